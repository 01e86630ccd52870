"""The tokenizer that a GGUF file describes, written in Hugging Face's format.

A GGUF holds vocabulary, merges and the name of the text splitter (`tokenizer.ggml.pre`), not the
splitter itself; the splitters here are those of the models' own tokenizer.json files.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from jaxserve.model.errors import ModelError

# Token types of `tokenizer.ggml.token_type`.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4

# What GGUF calls the special tokens, and what tokenizer_config.json does.
_TOKEN_OPTIONS = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
}

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": lambda: _split(_LLAMA3_SPLIT),
    "qwen2": lambda: _split(_QWEN2_SPLIT),
    "deepseek-r1-qwen": lambda: _split(_QWEN2_SPLIT),
}


def write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template into `folder`.

    Raises ModelError for missing metadata and for kinds of tokenizer that are not supported.
    """
    tokens = _required(metadata, "tokens")
    kind = _required(metadata, "model")
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level(metadata, tokens)
    elif kind == "llama":
        tokenizer, adds_bos = _sentencepiece(metadata, tokens)
    else:
        raise ModelError(f"tokenizer {kind!r} is not supported; supported are gpt2, llama")

    types = _token_types(metadata, tokens)
    for token, type_ in zip(tokens, types, strict=True):
        if type_ in (_CONTROL, _USER_DEFINED):
            added = AddedToken(token, normalized=False, special=type_ == _CONTROL)
            tokenizer.add_tokens([added])

    special = {name: _token(metadata, tokens, name) for name in _TOKEN_OPTIONS}
    if metadata.get("tokenizer.ggml.add_bos_token", adds_bos):
        if special["bos"] is None:
            raise ModelError("the tokenizer adds a bos token, but bos_token_id is missing")
        bos = special["bos"]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, tokenizer.token_to_id(bos))],
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {_TOKEN_OPTIONS[name]: token for name, token in special.items() if token is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    if chat_template := metadata.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(chat_template)


def _byte_level(metadata: dict[str, Any], tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether its models begin each text with a bos token by default."""
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in _PRE_TOKENIZERS:
        raise ModelError(
            f"pre-tokenizer {pre!r} is not supported; supported are {', '.join(_PRE_TOKENIZERS)}"
        )
    merges = [tuple(merge.split(" ")) for merge in _required(metadata, "merges")]
    llama3 = pre == "llama-bpe"
    # Llama 3 takes a word that is in the vocabulary whole, whatever the merges would make of it.
    tokenizer = Tokenizer(_bpe(tokens, merges, ignore_merges=llama3))
    if pre in ("qwen2", "deepseek-r1-qwen"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, llama3


def _sentencepiece(metadata: dict[str, Any], tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
    """SentencePiece's BPE: spaces are U+2581, unknown characters fall back to byte tokens."""
    scores = _required(metadata, "scores")
    types = _token_types(metadata, tokens)
    tokenizer = Tokenizer(
        _bpe(
            tokens,
            _merges_from_scores(tokens, scores, types),
            unk_token=_token(metadata, tokens, "unknown"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space_first = metadata.get("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), replace]) if space_first else replace
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*steps, decoders.Strip(" ", 1, 0)] if space_first else steps
    )
    return tokenizer, True


def _merges_from_scores(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third, the highest score first.

    SentencePiece joins the neighbours whose union scores best, so the scores are the merge list.
    """
    score_of = {
        token: score
        for token, score, type_ in zip(tokens, scores, types, strict=True)
        if type_ == _NORMAL
    }
    merges = [
        (score, token[:cut], token[cut:])
        for token, score in score_of.items()
        for cut in range(1, len(token))
        if token[:cut] in score_of and token[cut:] in score_of
    ]
    merges.sort(key=lambda merge: (-merge[0], len(merge[1])))
    return [(left, right) for _, left, right in merges]


def _bpe(tokens: Sequence[str], merges: list[tuple[str, str]], **options: Any) -> BPE:
    vocab = {token: id_ for id_, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ModelError("the tokenizer's vocabulary holds a token twice")
    try:
        return BPE(vocab=vocab, merges=merges, **options)
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"the tokenizer's vocabulary and merges disagree: {error}") from error


def _required(metadata: dict[str, Any], name: str) -> Any:
    try:
        return metadata[f"tokenizer.ggml.{name}"]
    except KeyError:
        raise ModelError(f"metadata tokenizer.ggml.{name} is missing") from None


def _token_types(metadata: dict[str, Any], tokens: Sequence[str]) -> Sequence[int]:
    types = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise ModelError(f"{len(tokens)} tokens have {len(types)} token types")
    return types


def _token(metadata: dict[str, Any], tokens: Sequence[str], name: str) -> str | None:
    """The bos, eos, unknown or padding token, if the file names one."""
    id_ = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if id_ is None:
        return None
    if not 0 <= id_ < len(tokens):
        raise ModelError(f"{name}_token_id {id_} is outside the {len(tokens)} tokens")
    return tokens[id_]
