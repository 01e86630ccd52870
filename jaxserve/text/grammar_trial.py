"""Compiling a grammar, and a process that does it first for grammars of unknown origin.

A few lines of schema can keep llguidance's compiler busy for hours, and deep nesting ends it with
a stack overflow; neither can be caught in the process that it happens in. So this file is also a
script, run with limits on time, memory and stack, which says whether a grammar can be compiled.
"""

import pickle
import resource
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

TIME_LIMIT = signal.SIGPROF
"""What ends the process when a grammar takes too long."""
MAX_MASK_CPU_S = 0.02
"""Of the second mask; much that later ones need is made for the first."""
_MEMORY_BYTES = 4 << 30
_STACK_BYTES = 1 << 20
"""Less than any thread's, so that what fits here fits anywhere."""
_LIMITS = LLParserLimits(
    max_items_in_row=500, step_max_items=20_000, max_lexer_states=50_000, verbose_errors=False
)
"""A request whose grammar grows past them in the middle of an answer fails, alone: every other in
the batch would wait for its masks."""


@dataclass(frozen=True)
class Vocabulary:
    """What the compiler knows of a tokenizer."""

    tokens: Sequence[bytes]
    """By id; one for each logit of the model."""
    special_token_ids: Sequence[int]
    """Never part of a text."""
    eos_token_ids: Sequence[int]
    """Allowed where the text may end."""


class _Greedy:
    """What llguidance wants of a tokenizer; it is asked for token bytes alone."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_token_ids
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.bos_token_id = None
        self._id_of_byte = {token: i for i, token in enumerate(self.tokens) if len(token) == 1}

    def __call__(self, text: bytes) -> list[int]:
        return [self._id_of_byte[bytes([byte])] for byte in text]


def make_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    """Takes a tenth of a second for 50,000 tokens."""
    return LLTokenizer(
        TokenizerWrapper(_Greedy(vocabulary)),
        n_vocab=len(vocabulary.tokens),
        eos_token=list(vocabulary.eos_token_ids),
    )


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the grammar's start, its first mask computed; ValueError if there is none, or
    if the grammar is too large to follow by one token."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    error = matcher.get_error()
    if not error:
        mask = matcher.compute_bitmask()
        error = matcher.get_error() and "no text satisfies it"
    if not error:
        error = _second_step_error(matcher.deep_copy(), mask)
    if error:
        raise ValueError(one_line(error))
    return matcher


def _second_step_error(matcher: LLMatcher, mask: bytes) -> str:
    """Limits of the parser show when a first token is taken; and while masks are computed, every
    request waits."""
    byte = next(i for i, bits in enumerate(mask) if bits)
    matcher.consume_token(8 * byte + (mask[byte] & -mask[byte]).bit_length() - 1)
    if not matcher.is_error():
        if matcher.is_stopped():
            return ""
        begin = time.thread_time()
        matcher.compute_bitmask()
        if time.thread_time() - begin > MAX_MASK_CPU_S:
            return f"it takes over {MAX_MASK_CPU_S:g} s a token to follow"
    return matcher.get_error()


def one_line(error: str) -> str:
    """llguidance's words, without its own names of things."""
    for inner in ("<non-verbose/>", "json-schema:///"):
        error = error.replace(inner, "")
    text = " ".join(error.split())
    return text if len(text) <= 400 else f"{text[:250]} ... {text[-150:]}"


def main() -> None:
    """Reads a Vocabulary and a number of seconds, then grammars; answers each with what is wrong
    with it, or an empty string. Ends with its input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK_BYTES)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    tokens, special_token_ids, eos_token_ids, seconds = pickle.load(requests)
    tokenizer = make_tokenizer(Vocabulary(tokens, special_token_ids, eos_token_ids))

    def attempt(grammar: str) -> None:
        answer = ""
        try:
            compile_grammar(tokenizer, grammar)
        except ValueError as error:
            answer = str(error)
        pickle.dump(answer, answers)
        answers.flush()

    while True:
        try:
            grammar = pickle.load(requests)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, seconds)
        thread = threading.Thread(target=attempt, args=(grammar,))
        thread.start()
        thread.join()
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
