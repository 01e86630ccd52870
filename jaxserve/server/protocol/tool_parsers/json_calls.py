"""What the styles of tool calls have in common: JSON objects with a name and arguments."""

import json
import string
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar

from jaxserve.server.protocol.text_parser import (
    CallArguments,
    CallStart,
    Content,
    Malformed,
    Reading,
    TextParser,
)

SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")
_BARE = string.ascii_letters + string.digits + "+-."
"""Characters of numbers and of true, false and null."""
_UNQUOTED = frozenset(_BARE + SPACE + ",:")


class ToolParser(TextParser):
    """Finds the calls in an answer; the rest of its text is content.

    An object is a call once its name is known and its arguments have begun with an object. What
    turns out not to be one before that is content, whole. From then on the arguments are shown as
    the model writes them, up to their last bracket: a client has to check them in any case.
    """

    tags: ClassVar[tuple[str, ...]] = ()
    """What the parser looks for: it must see these, be they special tokens or not."""

    def __init__(self) -> None:
        self._has_calls = False
        self._call_is_shown = False
        super().__init__()

    def _take_content_up_to(self, tag: str) -> Reading[bool]:
        """Show content before `tag`, and take the tag; False if the text ends without one. White
        space beside calls is not content."""
        return (yield from self._take_up_to(tag, Content, SPACE, holds_end=self._has_calls))

    def _take_call(self) -> Reading[None]:
        """Take `{"name": …, "arguments": {…}}` and show it. Malformed if it is no call; the text
        from the mark on is to be shown then."""
        self._call_is_shown = False
        with suppress(Malformed):
            yield from self._take_members()
        if not self._call_is_shown:
            raise Malformed

    def _take_members(self) -> Reading[None]:
        name = ""
        early: list[str] = []
        yield from self._expect("{")
        while True:
            key = yield from self._take_string()
            yield from self._expect(":")
            char = yield from self._skip(SPACE)
            if key == "name" and not name:
                name = yield from self._take_string()
                if not name:
                    raise Malformed
                if early:
                    self._show_call(name)
                    self._show_arguments("".join(early))
            elif key in _ARGUMENTS and not early and not self._call_is_shown:
                yield from self._take_arguments(name, early)
            elif char in ('"', "{", "["):
                yield from self._take_nested(_ignore)
            else:
                yield from self._skip(_BARE)
            if (yield from self._skip(SPACE)) != ",":
                break
            self._at += 1
        yield from self._expect("}")

    def _take_arguments(self, name: str, early: list[str]) -> Reading[None]:
        """Show the object that comes, or put it into `early` if the function has no name yet."""
        yield from self._expect("{")
        if (yield from self._skip(SPACE)) not in ('"', "}"):
            raise Malformed
        show = early.append
        if name:
            self._show_call(name)
            show = self._show_arguments
        show("{")
        yield from self._take_nested(show, depth=1)

    def _show_call(self, name: str) -> None:
        self._has_calls = self._call_is_shown = True
        self._mark = None
        self._show(CallStart(name))

    def _show_arguments(self, text: str) -> None:
        self._show(CallArguments(text))

    def _expect(self, char: str) -> Reading[None]:
        if (yield from self._skip(SPACE)) != char:
            raise Malformed
        self._at += 1

    def _take_string(self) -> Reading[str]:
        if (yield from self._skip(SPACE)) != '"':
            raise Malformed
        parts: list[str] = []
        yield from self._take_nested(parts.append)
        try:
            text = json.loads("".join(parts), strict=False)
            text.encode()  # half a surrogate pair could not be sent on
        except ValueError as error:
            raise Malformed from error
        return text

    def _take_nested(self, show: Callable[[str], None], depth: int = 0) -> Reading[None]:
        """Take what a quote or a bracket begins, and give its text to `show` as it comes. `depth`:
        brackets that are open already. Malformed at what cannot be JSON, and if the text ends."""
        in_string = is_escaped = False
        while (yield from self._char()):
            begin, done = self._at, False
            while self._at < len(self._text) and not done:
                char = self._text[self._at]
                if in_string:
                    in_string = is_escaped or char != '"'
                    is_escaped = char == "\\" and not is_escaped
                elif char == '"':
                    in_string = True
                elif char in "{[":
                    depth += 1
                elif char in "}]":
                    depth -= 1
                elif char not in _UNQUOTED:
                    break
                self._at += 1
                done = depth == 0 and not in_string
            if self._at > begin:
                show(self._text[begin : self._at])
            if done:
                return
            if self._at < len(self._text):
                break
        raise Malformed


def _ignore(text: str) -> None:
    pass
