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
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

TIME_LIMIT = signal.SIGPROF
"""What ends the process when a grammar takes too long."""
_MEMORY_BYTES = 4 << 30
_STACK_BYTES = 1 << 20
"""Less than any thread's, so that what fits here fits anywhere."""
_NO_LOOK_AROUND = "error: look-around, including look-ahead and look-behind, is not supported"
_MAX_LEXER_STATES = 50_000
"""Of all matchers of a grammar together."""


@dataclass(frozen=True)
class Limits:
    """How much work a grammar may be. A request whose grammar grows past them in the middle of an
    answer fails, alone: every other in the batch would wait for its masks."""

    max_items_in_row: int
    """Of the parser, between two terminals. Its work there grows with their square, and where a
    grammar is ambiguous with their cube."""
    step_max_items: int
    """In all rows that are tried for one mask."""
    step_lexer_fuel: int
    """Of terminals, for one mask; some 70 ns each."""
    max_grammar_size: int
    """Symbols. Bounds the first row that is too long, which is found out after it is made."""

    def shared(self, num_rows: int) -> "Limits":
        """Those with which so many matchers do about the work of one with these."""
        # The worst work is the product of items a step and the square of items a row.
        share = num_rows ** (-1 / 3)
        return Limits(*(int(limit * share) for limit in astuple(self)))


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


def compile_grammar(tokenizer: LLTokenizer, grammar: str, limits: Limits) -> LLMatcher:
    """A matcher at the grammar's start, its first mask computed; ValueError if there is none, or
    if the limits do not let it follow one token."""
    parser_limits = LLParserLimits(
        **asdict(limits), max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False
    )
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits)
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
    """Limits of the parser show when a first token is taken."""
    byte = next(i for i, bits in enumerate(mask) if bits)
    matcher.consume_token(8 * byte + (mask[byte] & -mask[byte]).bit_length() - 1)
    if not matcher.is_error():
        if matcher.is_stopped():
            return ""
        matcher.compute_bitmask()
    return matcher.get_error()


def one_line(error: str) -> str:
    """llguidance's words, without its own names of things."""
    if _NO_LOOK_AROUND in error:
        return "look-arounds are not supported, only look-aheads in a pattern of the field json"
    for inner in ("<non-verbose/>", "json-schema:///"):
        error = error.replace(inner, "")
    text = " ".join(error.split())
    return text if len(text) <= 400 else f"{text[:250]} ... {text[-150:]}"


def main() -> None:
    """Reads a Vocabulary and a number of seconds, then grammars and their limits; answers each with
    what is wrong with it, or an empty string. Ends with its input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK_BYTES)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    tokens, special_token_ids, eos_token_ids, seconds = pickle.load(requests)
    tokenizer = make_tokenizer(Vocabulary(tokens, special_token_ids, eos_token_ids))

    def attempt(grammar: str, *limits: int) -> None:
        answer = ""
        try:
            compile_grammar(tokenizer, grammar, Limits(*limits))
        except ValueError as error:
            answer = str(error)
        pickle.dump(answer, answers)
        answers.flush()

    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, seconds)
        thread = threading.Thread(target=attempt, args=request)
        thread.start()
        thread.join()
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
