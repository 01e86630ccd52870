"""What an answer's text must be, as grammars of llguidance, and matchers that follow the tokens."""

import json
import pickle
import subprocess
import sys
import threading
from collections import OrderedDict
from dataclasses import astuple
from typing import Any

from llguidance import LLMatcher, regex_to_lark

from jaxserve.sampling_params import StructuredOutputsParams
from jaxserve.text import grammar_trial
from jaxserve.text.grammar_trial import Limits, Vocabulary, compile_grammar, make_tokenizer
from jaxserve.text.tokenizer import Tokenizer

COMPILE_CPU_S = 3.0
COMPILE_WALL_S = 30.0
"""For a trial that computes nothing, or gets nothing to compute with."""
MAX_CACHED_GRAMMARS = 64
JSON_LIMITS = Limits(
    max_items_in_row=1500, step_max_items=40_000, step_lexer_fuel=200_000, max_grammar_size=50_000
)
"""Objects of hundreds of optional properties, and hundreds of tools: long rows, never ambiguous."""
LARK_LIMITS = Limits(
    max_items_in_row=200, step_max_items=20_000, step_lexer_fuel=200_000, max_grammar_size=10_000
)
"""Of SQL, two and a half times the row, five times the step and forty times the size."""
WHITESPACE_PATTERN = r" ?|\n {0,20}"
"""What indented JSON needs. Were there no bound, small models would write line ends without end."""
_AFTER = """start: before /[ \\r\\n]{0,8}/ answer
before[suffix=%s]: /(?s:.*)/
answer: %%json %s"""
_OPTIONS = {"name": "options", "lark_grammar": 'start: ""\n%llguidance {"no_forcing": true}'}
"""A grammar for its options alone, which count for all beside it: where only one text can follow,
the model chooses among all tokens that begin it. It would have to take a certain one otherwise, and
llguidance knows no tokenizer that would make it."""


class GrammarCompiler:
    """Makes matchers, for one tokenizer and a model of `vocab_size` logits.

    Grammars are compiled one after another, and the most recent ones are kept. Methods may be
    called from any thread. Costs nothing before the first call of `matcher`.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, compile_cpu_s: float = COMPILE_CPU_S
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compile_cpu_s = compile_cpu_s
        self._cache: OrderedDict[tuple[StructuredOutputsParams, int], LLMatcher] = OrderedDict()
        self._cache_lock = threading.Lock()
        self._compiling = threading.Lock()
        self._prepared: tuple[grammar_trial.LLTokenizer, _Trial] | None = None

    def matcher(self, params: StructuredOutputsParams, num_rows: int = 1) -> LLMatcher:
        """A matcher of the caller's own, at the start of the grammar.

        A request of `num_rows` answers needs as many, which share the limits of one. ValueError,
        in one line, if the grammar makes no sense, asks for what is not supported, or takes more
        than the time and memory it may.
        """
        key = (params, num_rows)
        matcher = self._cached(key)
        if matcher is None:
            with self._compiling:
                matcher = self._cached(key) or self._compile(*key)
        return matcher.deep_copy()

    def has(self, params: StructuredOutputsParams, num_rows: int = 1) -> bool:
        """Whether `matcher` has no need to compile."""
        with self._cache_lock:
            return (params, num_rows) in self._cache

    def forget(self, params: StructuredOutputsParams, num_rows: int = 1) -> None:
        """Compile it anew next time: matchers share what they have learned, and one has failed."""
        with self._cache_lock:
            self._cache.pop((params, num_rows), None)

    def close(self) -> None:
        """End the trial process. Closing twice is fine."""
        with self._compiling:
            if self._prepared is not None:
                self._prepared[1].close()
                self._prepared = None

    def _cached(self, key: tuple[StructuredOutputsParams, int]) -> LLMatcher | None:
        with self._cache_lock:
            if key in self._cache:
                self._cache.move_to_end(key)
            return self._cache.get(key)

    def _compile(self, params: StructuredOutputsParams, num_rows: int) -> LLMatcher:
        if self._prepared is None:
            vocabulary = self._vocabulary()
            trial = _Trial(vocabulary, self._compile_cpu_s)
            self._prepared = make_tokenizer(vocabulary), trial
        tokenizer, trial = self._prepared
        try:
            grammar = _grammar(params)
            limits = (JSON_LIMITS if _is_json(params) else LARK_LIMITS).shared(num_rows)
            trial.check(grammar, limits)
            matcher = compile_grammar(tokenizer, grammar, limits)
        except ValueError as error:
            raise ValueError(f"the {_kind(params)} cannot be used: {error}") from None
        with self._cache_lock:
            self._cache[params, num_rows] = matcher
            while len(self._cache) > MAX_CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        return matcher

    def _vocabulary(self) -> Vocabulary:
        tokenizer = self._tokenizer
        special, eos = (
            sorted(token for token in ids if token < self._vocab_size)
            for ids in (tokenizer.special_token_ids, tokenizer.eos_token_ids)
        )
        if not eos:
            raise ValueError("structured_outputs needs an end-of-sequence token, which is missing")
        return Vocabulary(
            tokens=[tokenizer.token_bytes(token) for token in range(self._vocab_size)],
            special_token_ids=special,
            eos_token_ids=eos,
        )


def _grammar(params: StructuredOutputsParams) -> str:
    """llguidance's description of the grammar."""
    described: dict[str, Any]
    if not _is_json(params):
        described = {"lark_grammar": _lark(params)}
    else:
        schema = json.loads(params.json) if params.json is not None else {"type": "object"}
        schema["x-guidance"] = _json_options(params)
        described = {"json_schema": schema}
        if params.after is not None:
            described = {"lark_grammar": _AFTER % (_quote(params.after), _quote(schema))}
    return json.dumps({"grammars": [described, _OPTIONS]}, ensure_ascii=False)


def _lark(params: StructuredOutputsParams) -> str:
    if params.grammar is not None:
        return params.grammar
    if params.regex is not None:
        return f"start: /{regex_to_lark(params.regex, use_ascii='d')}/"
    # One terminal, since alternatives of a rule count against the parser's limit; and the lexer of
    # Lark takes no DEL as it is.
    choice = " | ".join(map(_quote, params.choice)).replace("\x7f", "\\u007f")
    return f"start: CHOICE\nCHOICE: {choice}"


def _quote(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _is_json(params: StructuredOutputsParams) -> bool:
    return params.json is not None or bool(params.json_object)


def _json_options(params: StructuredOutputsParams) -> dict[str, Any]:
    """What llguidance is told of a JSON Schema: to refuse what it cannot enforce, and where JSON
    may have which whitespace."""
    flexible = not params.disable_any_whitespace
    options: dict[str, Any] = {"lenient": False, "whitespace_flexible": flexible}
    if flexible:
        options["whitespace_pattern"] = params.whitespace_pattern or WHITESPACE_PATTERN
    return options


def _kind(params: StructuredOutputsParams) -> str:
    if params.regex is not None:
        return "regular expression"
    if params.grammar is not None:
        return "grammar"
    return "choice" if params.choice is not None else "JSON schema"


class _Trial:
    """The process of `grammar_trial`, started again when a grammar has ended it."""

    def __init__(self, vocabulary: Vocabulary, seconds: float) -> None:
        self._first = pickle.dumps(
            (vocabulary.tokens, vocabulary.special_token_ids, vocabulary.eos_token_ids, seconds)
        )
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, grammar: str, limits: Limits) -> None:
        """ValueError if the grammar cannot be compiled within the limits."""
        request = pickle.dumps((grammar, *astuple(limits)))
        if self._process is None:
            self._process = self._start()
            request = self._first + request
        process = self._process
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            process.kill()

        alarm = threading.Timer(COMPILE_WALL_S, give_up)
        alarm.start()
        try:
            process.stdin.write(request)
            process.stdin.flush()
            error = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            self.close()
            seconds = COMPILE_WALL_S if is_late.is_set() else self._seconds
            if is_late.is_set() or process.returncode == -grammar_trial.TIME_LIMIT:
                raise ValueError(f"it takes over {seconds:g} s to compile") from None
            raise ValueError("it is too large or nested too deeply") from None
        finally:
            alarm.cancel()
        if error:
            raise ValueError(error)

    @staticmethod
    def _start() -> subprocess.Popen[bytes]:
        # By path: the script needs llguidance alone, and is ready in a tenth of a second.
        return subprocess.Popen(
            [sys.executable, "-P", grammar_trial.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
