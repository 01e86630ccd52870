"""From a caller's prompt and parameters to a request that the engine can run."""

import itertools
import random
import time

from llguidance import LLMatcher

from jaxserve.config import EngineConfig
from jaxserve.engine.prompts import Prompt, check_prompt, encode_prompt
from jaxserve.engine.request_state import RequestState, Submission
from jaxserve.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxserve.sampling import check_token_ids
from jaxserve.sampling_params import SamplingParams
from jaxserve.text.detokenizer import IncrementalDetokenizer
from jaxserve.text.grammar import GrammarCompiler
from jaxserve.text.tokenizer import Tokenizer
from scheduler import Request


class RequestPreparer:
    """Checks requests against one model. Touches nothing that a step uses: any thread may call it.

    `eos_token_ids` end an answer. Without a tokenizer there are no grammars either.
    """

    def __init__(
        self,
        config: EngineConfig,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        tokenizer: Tokenizer | None,
        grammars: GrammarCompiler | None,
    ) -> None:
        self._max_logprobs = config.max_logprobs
        self._has_priorities = config.scheduling_policy == "priority"
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._seeds = random.Random(config.seed)
        self._request_numbers = itertools.count()

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Submission:
        """ValueError, in one line, for what cannot be served.

        Compiles the grammar, if there is one that is not known yet; others wait for that.
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, got {params!r}")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ValueError(f"priority must be an integer, got {priority!r}")
        if priority and not self._has_priorities:
            raise ValueError(
                f"priority must be 0 without scheduling_policy='priority', got {priority}"
            )
        if not isinstance(request_id, str | None):
            raise ValueError(f"request_id must be a string, got {request_id!r}")
        text, ids = encode_prompt(prompt, self._tokenizer)
        check_prompt(ids, self._vocab_size, self._max_model_len)
        ids = [int(i) for i in ids]
        bad_words = self._check_params(params)
        # Sequences have names of their own: two requests of one id may follow each other while
        # a step of the first is still in flight.
        number = next(self._request_numbers)
        if request_id is None:
            request_id = f"request-{number}"
        room = self._max_model_len - len(ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        has_grammar = params.structured_outputs is not None
        # With a grammar the token masks hold the end back, and let it through when it is all that
        # is left; it counts then.
        ignores_eos = params.ignore_eos and not has_grammar
        eos = frozenset() if ignores_eos else self._eos_token_ids
        metrics = RequestMetrics(arrival_s=time.monotonic())
        output = RequestOutput(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=ids,
            outputs=[CompletionOutput(index) for index in range(params.n)],
            metrics=metrics,
        )
        submission = Submission(output)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        single = [words[0] for words in bad_words if len(words) == 1]
        has_bias = bool(params.logit_bias or params.allowed_token_ids or single)
        for index in range(params.n):
            request = Request(
                request_id=f"{number}.{index}",
                prompt_token_ids=ids,
                max_tokens=max_tokens,
                stop_token_ids=eos | frozenset(params.stop_token_ids),
                min_tokens=0 if has_grammar else params.min_tokens,
                priority=priority,
                use_prefix_cache=params.prompt_logprobs is None,
            )
            detokenizer = None
            if self._tokenizer is not None:
                detokenizer = IncrementalDetokenizer(self._tokenizer, ids, params)
            state = RequestState(
                request=request,
                parent_id=request_id,
                index=index,
                params=params,
                seed=(seed + index) % 2**64,
                has_bias=has_bias,
                bad_word_token_ids=bad_words,
                metrics=metrics,
                tokenizer=self._tokenizer,
                detokenizer=detokenizer,
                eos_token_ids=eos,
                matcher=self._matcher(params),
            )
            submission.states.append(state)
        return submission

    def _check_params(self, params: SamplingParams) -> list[list[int]]:
        """Check what depends on the model; returns the token sequences of `bad_words`."""
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > self._max_logprobs:
                raise ValueError(
                    f"{name} must be at most max_logprobs={self._max_logprobs}, got {value}"
                )
        if self._tokenizer is None:
            for name in ("stop", "bad_words"):
                if getattr(params, name):
                    raise ValueError(f"{name} needs a tokenizer, and this engine has none")
            words = []
        else:
            words = [
                ids for word in params.bad_words for ids in self._tokenizer.encode_bad_word(word)
            ]
        check_token_ids(params, words, self._vocab_size)
        return words

    def _matcher(self, params: SamplingParams) -> LLMatcher | None:
        if params.structured_outputs is None:
            return None
        if self._grammars is None:
            raise ValueError("structured_outputs needs a tokenizer, and this engine has none")
        return self._grammars.matcher(params.structured_outputs, params.n)

    def must_compile(self, params: SamplingParams) -> bool:
        """Whether `prepare` has to compile a grammar first."""
        structure = params.structured_outputs
        return not (
            structure is None or self._grammars is None or self._grammars.has(structure, params.n)
        )

    def forget_grammar(self, params: SamplingParams) -> None:
        """One of its matchers has failed, and others would with it."""
        self._grammars.forget(params.structured_outputs, params.n)

    def close(self) -> None:
        """End the process that tries grammars. Closing twice is fine."""
        if self._grammars is not None:
            self._grammars.close()
