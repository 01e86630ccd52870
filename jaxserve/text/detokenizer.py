"""Token ids of a running answer to text that can be shown at once."""

import codecs
from collections.abc import Sequence

from jaxserve.sampling_params import SamplingParams
from jaxserve.text.stop_strings import StopSearch
from jaxserve.text.tokenizer import Tokenizer

_LONGEST_CHARACTER_BYTES = 4


class IncrementalDetokenizer:
    """One answer's text, in pieces.

    No piece ends within a character or holds any part of a stop string. Joined, they are the whole
    text of the output tokens, read after the prompt: a character that the prompt leaves cut and the
    output completes belongs to the output; what of the prompt stays incomplete is left out. Of
    `params` it reads stop, include_stop_str_in_output, min_tokens and skip_special_tokens. The text
    of the first `min_tokens` tokens is not searched for stop strings.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._search = StopSearch(params.stop)
        self._held = ""
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        tail = self._tail_bytes(prompt_token_ids)
        self._utf8.decode(tail)
        # What the prompt's incomplete character becomes if the output does not complete it.
        self._cut = self._utf8.getstate()[0].decode(errors="replace")
        self._at_start = not tail
        self.num_tokens = 0
        """Tokens taken, up to the one that completed a stop string."""
        self.stop_string: str | None = None
        """The stop string that has ended the text."""

    def push(self, token_ids: Sequence[int], finished: bool) -> str:
        """The text that these tokens make certain. `finished`: no more will come, so all is.

        Tokens after the one that completes a stop string are ignored, as are later calls.
        """
        skips_special = self._params.skip_special_tokens
        if not self._params.stop:  # no token in particular ends the text
            self.num_tokens += len(token_ids)
            return self._read(self._tokenizer.joined_bytes(token_ids, skips_special), finished)
        pieces = []
        for token in token_ids:
            if self.stop_string is not None:
                break
            self.num_tokens += 1
            data = self._tokenizer.shown_bytes(token, skips_special)
            pieces.append(self._release(self._read(data)))
        if finished and self.stop_string is None:
            pieces.append(self._release(self._read(b"", final=True)))
            pieces.append(self._held)
            self._held = ""
        return "".join(pieces)

    def _tail_bytes(self, prompt_token_ids: Sequence[int]) -> bytes:
        """The end of the prompt, from a byte before any character that is still incomplete."""
        tail = b""
        for token in reversed(prompt_token_ids):
            tail = self._tokenizer.shown_bytes(token, self._params.skip_special_tokens) + tail
            if len(tail) >= _LONGEST_CHARACTER_BYTES:
                break
        return tail

    def _read(self, data: bytes, final: bool = False) -> str:
        text = self._utf8.decode(data, final)
        if not text:
            return ""
        text = text.removeprefix(self._cut)
        self._cut = ""
        if self._at_start:
            self._at_start = False
            if self._tokenizer.drops_first_space:
                text = text.removeprefix(" ")
        return text

    def _release(self, text: str) -> str:
        """What of the text held so far and `text` cannot belong to a stop string."""
        if self.num_tokens <= self._params.min_tokens:
            return text
        buffer = self._held + text
        match = self._search.feed(text)
        if match is None:
            certain = len(buffer) - self._search.num_open
            self._held = buffer[certain:]
            return buffer[:certain]
        self.stop_string = match.stop_string
        end = len(self._held) + match.end
        self._held = ""
        kept = 0 if self._params.include_stop_str_in_output else len(match.stop_string)
        return buffer[: end - kept]
