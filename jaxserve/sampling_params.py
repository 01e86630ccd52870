"""How one request is sampled; names and meanings follow vLLM's SamplingParams."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from jaxserve import json_schema

MAX_BAD_WORD_TOKENS = 16
MAX_BAD_WORDS = 64
MAX_SEED = 2**64 - 1
MIN_TEMPERATURE = 1e-5
MAX_GRAMMAR_BYTES = json_schema.MAX_BYTES
"""Of a schema, regular expression or grammar, and of all choices together."""


def _check(condition: bool, name: str, allowed: str, value: object) -> None:
    if not condition:
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    # Finite by comparison, since an integer may be too large for a float.
    return isinstance(value, Real) and not isinstance(value, bool) and abs(value) < math.inf


def _is_ids(value: object) -> bool:
    return isinstance(value, Sequence) and all(_is_int(i) and i >= 0 for i in value)


def _is_texts(value: object) -> bool:
    return isinstance(value, Sequence) and all(isinstance(text, str) and text for text in value)


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """What an answer's text must be; exactly one of the first five says it.

    ValueError, naming the field, for what no grammar can be made of at first sight. The engine
    compiles the grammar and refuses the others.
    """

    json: str | Mapping[str, Any] | None = None
    """JSON that a JSON Schema validates; the schema as a mapping or its text. Kept as text."""
    regex: str | None = None
    """Text that this regular expression (Rust's syntax; \\d is 0 to 9) matches as a whole."""
    choice: Sequence[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """Text that a context-free grammar derives from `start`; llguidance's variant of Lark."""
    json_object: bool | None = None
    """True: any JSON object."""
    disable_any_whitespace: bool = False
    """With `json` and `json_object` alone: no whitespace outside strings."""
    whitespace_pattern: str | None = None
    """With these alone: the whitespace that there may be outside strings, as a regular expression;
    None: a space, or a line end and up to 20 spaces."""
    after: str | None = None
    """With these alone: the JSON comes after this text, and before it any text may stand, such as
    a model's reasoning (which this ends). None: the answer is JSON from its beginning."""

    def __post_init__(self) -> None:
        chosen = [name for name in _CONSTRAINTS if getattr(self, name) not in (None, False)]
        if len(chosen) != 1:
            raise ValueError(
                f"structured_outputs must have exactly one of {', '.join(_CONSTRAINTS)}, got "
                f"{' and '.join(chosen) or 'none'}"
            )
        for name in ("json_object", "disable_any_whitespace"):
            value = getattr(self, name)
            _check(isinstance(value, bool | None), name, "true or false", value)
        if self.json is not None:
            _check(
                isinstance(self.json, str | Mapping),
                "json",
                "a JSON Schema as a mapping or its text (a pydantic model's model_json_schema())",
                self.json,
            )
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            _check(
                not isinstance(self.choice, str) and _is_texts(self.choice) and self.choice,
                "choice",
                "a list of strings that are not empty",
                self.choice,
            )
            object.__setattr__(self, "choice", tuple(self.choice))
        for name in ("regex", "grammar", "whitespace_pattern", "after"):
            value = getattr(self, name)
            _check(value is None or (isinstance(value, str) and value), name, "text", value)
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise ValueError("whitespace_pattern and disable_any_whitespace exclude each other")
        if self.json is None and not self.json_object:
            for name in ("whitespace_pattern", "disable_any_whitespace", "after"):
                if getattr(self, name):
                    raise ValueError(f"{name} needs json or json_object, not {chosen[0]}")
        num_bytes = sum(len(_utf8(chosen[0], text)) for text in self._texts())
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise ValueError(
                f"{chosen[0]} must be of at most {MAX_GRAMMAR_BYTES} bytes, got {num_bytes}"
            )

    def _texts(self) -> Sequence[str]:
        if self.choice is not None:
            return self.choice
        texts = (self.json, self.regex, self.grammar, self.whitespace_pattern, self.after)
        return [text for text in texts if text is not None]


_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")


def _utf8(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} must be Unicode, but its character {error.start} is {text[error.start]!r}"
        ) from error


def _schema_text(schema: object) -> str:
    try:
        return json_schema.schema_text(schema)
    except (TypeError, ValueError) as error:
        raise ValueError(f"json must be a JSON Schema that can be used: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one request. Every impossible value raises ValueError here, naming the parameter.

    Token ids are checked against the vocabulary by the engine, which knows it.
    """

    n: int = 1
    """How many answers to the prompt."""
    temperature: float = 1.0
    """0 is greedy: the exact argmax. So is anything under MIN_TEMPERATURE."""
    top_p: float = 1.0
    """Draw from the fewest most likely tokens whose probabilities reach this."""
    top_k: int = 0
    """Draw from this many most likely tokens; 0 or -1: no limit."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one's probability."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens that the output holds already."""
    frequency_penalty: float = 0.0
    """The same, once for each time."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output."""
    seed: int | None = None
    """Makes the request's random draws its own, whatever it is batched with."""
    stop: str | Sequence[str] = ()
    """Text that ends the answer."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the answer, beside the model's end-of-sequence tokens."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence tokens."""
    max_tokens: int | None = 16
    """None: up to the model's length limit."""
    min_tokens: int = 0
    """No stop token before these, and no stop string in their text."""
    logprobs: int | None = None
    """How many of the most likely tokens to report at each output position; 0: the sampled one."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Accepted as vLLM does; the tokenizers of the supported models never put spaces there."""
    include_stop_str_in_output: bool = False
    """Keep what ended the answer in its text."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these tokens."""
    allowed_token_ids: Sequence[int] | None = None
    """No other tokens are sampled."""
    bad_words: Sequence[str] = ()
    """Words never to be completed, also where the prompt ends with their beginning."""
    structured_outputs: StructuredOutputsParams | None = None
    """What the answer's text must be."""

    def __post_init__(self) -> None:
        _check(_is_int(self.n) and 1 <= self.n <= 128, "n", "an integer from 1 to 128", self.n)
        _check(
            _is_number(self.temperature) and 0 <= self.temperature <= 100,
            "temperature",
            "a number from 0 to 100",
            self.temperature,
        )
        _check(
            _is_number(self.top_p) and 0 < self.top_p <= 1,
            "top_p",
            "a number over 0 and at most 1",
            self.top_p,
        )
        _check(
            _is_int(self.top_k) and -1 <= self.top_k < 2**31,
            "top_k",
            "-1 or 0 (no limit) or a positive integer",
            self.top_k,
        )
        _check(
            _is_number(self.min_p) and 0 <= self.min_p <= 1,
            "min_p",
            "a number from 0 to 1",
            self.min_p,
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(_is_number(value) and -2 <= value <= 2, name, "a number from -2 to 2", value)
        _check(
            _is_number(self.repetition_penalty) and 0 < self.repetition_penalty <= 100,
            "repetition_penalty",
            "a number over 0 and at most 100",
            self.repetition_penalty,
        )
        _check(
            self.seed is None or (_is_int(self.seed) and 0 <= self.seed <= MAX_SEED),
            "seed",
            "None or an integer from 0 to 2**64 - 1",
            self.seed,
        )
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        _check(_is_texts(stop), "stop", "strings that are not empty", stop)
        object.__setattr__(self, "stop", tuple(stop))
        _check(
            _is_ids(self.stop_token_ids or ()),
            "stop_token_ids",
            "token ids of at least 0",
            self.stop_token_ids,
        )
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        _check(
            self.max_tokens is None or (_is_int(self.max_tokens) and 1 <= self.max_tokens < 2**31),
            "max_tokens",
            "None or an integer from 1 to 2**31 - 1",
            self.max_tokens,
        )
        _check(
            _is_int(self.min_tokens)
            and 0 <= self.min_tokens < 2**31
            and (self.max_tokens is None or self.min_tokens <= self.max_tokens),
            "min_tokens",
            f"an integer from 0 to max_tokens ({self.max_tokens or 2**31 - 1})",
            self.min_tokens,
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(
                value is None or (_is_int(value) and value >= 0),
                name,
                "None or an integer of at least 0",
                value,
            )
        if self.logit_bias is not None:
            _check(
                isinstance(self.logit_bias, Mapping) and _is_ids(tuple(self.logit_bias)),
                "logit_bias",
                "a mapping whose keys are token ids of at least 0",
                self.logit_bias,
            )
            _check(
                all(_is_number(b) and -100 <= b <= 100 for b in self.logit_bias.values()),
                "logit_bias",
                "a mapping whose values are numbers from -100 to 100",
                self.logit_bias,
            )
        if self.allowed_token_ids is not None:
            _check(
                _is_ids(self.allowed_token_ids) and len(self.allowed_token_ids) > 0,
                "allowed_token_ids",
                "None or at least one token id of at least 0",
                self.allowed_token_ids,
            )
        _check(
            not isinstance(self.bad_words, str) and _is_texts(self.bad_words or ()),
            "bad_words",
            "a list of strings that are not empty",
            self.bad_words,
        )
        object.__setattr__(self, "bad_words", tuple(self.bad_words or ()))
        _check(
            isinstance(self.structured_outputs, StructuredOutputsParams | None),
            "structured_outputs",
            "None or StructuredOutputsParams",
            self.structured_outputs,
        )

    @property
    def greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE
