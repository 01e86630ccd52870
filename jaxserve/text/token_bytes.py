"""The bytes that each token stands for, so that text is their concatenation read as UTF-8.

Decoding a library call at a time cannot stream exactly: what a token adds to the text depends on
the tokens around it. Its bytes do not. Byte-level BPE (GPT-2, Llama 3, Qwen) and SentencePiece's
BPE (Llama 1 and 2, Mistral) are of this kind, which is all that the supported models use.
"""

import json
import re
from typing import Any

from tokenizers import Tokenizer

SPACE = "▁"
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
_BYTE_LEVEL_STEPS = {"ByteLevel", "Fuse"}
_SENTENCEPIECE_STEPS = {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}


class TokenBytes:
    """Token id to bytes, as `tokenizer`'s decoder sees it. Added tokens stand for their own text.

    Raises ValueError for a decoder of another kind.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {
            id_: token.content.encode()
            for id_, token in tokenizer.get_added_tokens_decoder().items()
        }
        self._cache: dict[int, bytes] = {}
        steps = _decoder_steps(tokenizer)
        kinds = {step["type"] for step in steps}
        if "ByteLevel" in kinds and kinds <= _BYTE_LEVEL_STEPS:
            self._alphabet: dict[str, int] | None = _byte_level_alphabet()
        elif {"Replace", "Metaspace"} & kinds and kinds <= _SENTENCEPIECE_STEPS:
            self._alphabet = None
        else:
            found = ", ".join(sorted(kinds)) or "none"
            raise ValueError(
                f"the tokenizer's decoder ({found}) is not supported; supported are byte-level "
                "BPE and SentencePiece BPE"
            )
        self._has_byte_pieces = "ByteFallback" in kinds
        self.drops_first_space = any(
            step["type"] == "Strip" or step.get("prepend_scheme") in ("first", "always")
            for step in steps
        )
        """Whether a text's first space is the tokenizer's own, put there when encoding."""

    def __getitem__(self, token_id: int) -> bytes:
        """Empty for ids beyond the vocabulary: models have more logits than tokens."""
        if token_id not in self._cache:
            self._cache[token_id] = self._find(token_id)
        return self._cache[token_id]

    def _find(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._alphabet is not None:
            if all(char in self._alphabet for char in piece):
                return bytes(self._alphabet[char] for char in piece)
            return piece.encode()
        if self._has_byte_pieces and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes.fromhex(match[1])
        return piece.replace(SPACE, " ").encode()


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    decoder = json.loads(tokenizer.decoder.__getstate__())
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: itself if printable in Latin-1, else from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
