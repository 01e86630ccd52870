"""Text to token ids and back, for one model folder."""

import inspect
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from jaxserve.text.token_bytes import TokenBytes

_TEMPLATE_ERRORS = (
    TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError,
)  # fmt: skip
"""What messages that a template was not written for may lead to."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class Tokenizer:
    """The tokenizer and chat template in `folder`. Methods may be called from any thread.

    Raises ValueError, in one line, if the folder holds no tokenizer or one that cannot be used.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            raise ValueError(f"no tokenizer in {folder}: none of {', '.join(_TOKENIZER_FILES)}")
        self._hf = _load(folder)
        # The library's own call would change settings of the shared object in every call.
        self._backend = self._hf.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._bytes = TokenBytes(self._backend)
        # Variables for a template come from clients, who must not get at the call's own arguments.
        own = inspect.signature(self._hf.apply_chat_template).parameters.keys()
        self._reserved = own | {"self", "messages", "conversations"}
        added = self._backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(self._hf.all_special_ids) | {
            id_ for id_, token in added.items() if token.special
        }
        self.bos_token_id: int | None = self._hf.bos_token_id
        self.eos_token_ids = frozenset(_eos_token_ids(folder, self._hf.eos_token_id))
        """All that end an answer: of generation_config.json, config.json and the tokenizer."""
        self.vocab_size = len(self._hf)
        """With added tokens."""

    @property
    def drops_first_space(self) -> bool:
        """Whether the space that a text begins with belongs to the encoding, not to the text."""
        return self._bytes.drops_first_space

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with what the tokenizer adds to a text unless told otherwise; a bos token in
        the text itself is not doubled. Raises ValueError if the text is not Unicode (holds half a
        surrogate pair)."""
        ids = self._encode(text, add_special_tokens)
        bos = self.bos_token_id
        if bos is not None and ids[:2] == [bos, bos] and text.startswith(self._hf.bos_token):
            return ids[1:]
        return ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
    ) -> list[int]:
        """Token ids of a conversation. The template is all there is: nothing is added to it.

        Raises as `render_chat` does.
        """
        text = self.render_chat(messages, add_generation_prompt, tools, chat_template)
        return self._encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as the model sees it; `chat_template` (Jinja) replaces the model's own.
        `continue_final_message` leaves the last message open, for the model to go on with it.
        `variables` are the template's, beside messages and tools.

        Raises ValueError if the messages are malformed, if there is no template, or if the
        template refuses the messages.
        """
        if self._hf.chat_template is None and chat_template is None:
            raise ValueError("the model has no chat template: give one, or use plain prompts")
        variables = variables or {}
        if taken := sorted(variables.keys() & self._reserved):
            raise ValueError(f"chat_template_kwargs must not set {', '.join(taken)}")
        try:
            return self._hf.apply_chat_template(
                [_plain_message(i, message) for i, message in enumerate(_as_list(messages))],
                tools=None if tools is None else list(tools),
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **variables,
            )
        except _TEMPLATE_ERRORS as error:
            raise ValueError(f"the chat template cannot take the messages: {error}") from error

    def is_special(self, text: str) -> bool:
        """Whether the text is a special token, which texts leave out unless told otherwise."""
        return self._backend.token_to_id(text) in self.special_token_ids

    def encode_bad_word(self, word: str) -> list[list[int]]:
        """The token sequences to ban for `word`: at the start of a text and after a space."""
        plain, spaced = (
            self._encode(prefix + word.lstrip(), add_special_tokens=False) for prefix in ("", " ")
        )
        return [plain] if spaced[-len(plain) :] == plain else [plain, spaced]

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; bytes that are no UTF-8 become U+FFFD."""
        data = self.joined_bytes(token_ids, skip_special_tokens)
        text = data.decode(errors="replace")
        return text[1:] if self.drops_first_space and text.startswith(" ") else text

    def shown_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        """What the token adds to a text: its bytes, or nothing for a special one if skipped."""
        if skip_special_tokens and token_id in self.special_token_ids:
            return b""
        return self._bytes[token_id]

    def joined_bytes(self, token_ids: Iterable[int], skip_special_tokens: bool) -> bytes:
        """What the tokens add to a text, one after another."""
        return b"".join([self.shown_bytes(token, skip_special_tokens) for token in token_ids])

    def token_bytes(self, token_id: int) -> bytes:
        """What the token stands for, be it special or not."""
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """One token alone, as reported with log-probabilities; keeps its leading space."""
        return self._bytes[token_id].decode(errors="replace")

    def longest_token_bytes(self) -> int:
        """Bytes of the longest token. Looks at the whole vocabulary."""
        return max(len(self._bytes[token]) for token in range(self.vocab_size))

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text is not Unicode: character {error.start} is {text[error.start]!r}"
            ) from error
        # As a batch: only then do other threads run meanwhile.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def _load(folder: Path) -> Any:
    with _without_advice():
        # Imported here: it takes long, and `--help` must not.
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # the libraries raise nothing narrower
            reason = " ".join(str(error).split())
            raise ValueError(f"the tokenizer in {folder} cannot be loaded: {reason}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(
            f"the tokenizer in {folder} ({type(tokenizer).__name__}) is not supported: it cannot "
            "be expressed as a tokenizer.json"
        )
    return tokenizer


@contextmanager
def _without_advice():
    """No word on the absence of PyTorch, which is not used."""

    def is_wanted(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("PyTorch was not found")

    logger = logging.getLogger("transformers")
    logger.addFilter(is_wanted)
    try:
        yield
    finally:
        logger.removeFilter(is_wanted)


def _eos_token_ids(folder: Path, of_tokenizer: int | None) -> set[int]:
    found = {of_tokenizer}
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            value = json.loads(path.read_text()).get("eos_token_id")
            found |= set(value) if isinstance(value, list) else {value}
    return found - {None}


def _as_list(messages: Any) -> list[Any]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(f"messages must be a list, got {type(messages).__name__}")
    if not messages:
        raise ValueError("messages must hold at least one message")
    return list(messages)


def _plain_message(index: int, message: Any) -> dict[str, Any]:
    """The message with its content as one string; text parts are joined by line ends."""
    name = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise ValueError(f"{name} must be a mapping with 'role' and 'content', got {message!r}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{name} must have a 'role' that is a string, got {role!r}")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        content = ""
    elif isinstance(content, Sequence) and not isinstance(content, str):
        content = "\n".join(_text_part(f"{name}['content'][{i}]", p) for i, p in enumerate(content))
    elif not isinstance(content, str):
        raise ValueError(
            f"{name} must have a 'content' that is a string or a list of text parts, "
            f"got {content!r}"
        )
    return {**message, "content": content}


def _text_part(name: str, part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise ValueError(f"{name} must be {{'type': 'text', 'text': ...}}, got {part!r}")
