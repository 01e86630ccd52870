"""Parsers of an answer's text while it comes.

A parser is written as if it read the whole text: its coroutine reads on where it likes, and waits
where the text so far ends. What it finds does not depend on how the text is cut into parts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass

type Reading[T] = Generator[None, None, T]
"""A step of a parser, which waits for more text at each yield."""


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of the function `name` begins."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the last call's arguments: JSON as the model wrote it."""

    text: str


Piece = Content | Reasoning | CallStart | CallArguments


class Malformed(Exception):
    """The text is not what it seemed to be."""


class TextParser(ABC):
    """Feed it an answer's text; it gives back the pieces that are certain."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        """Where the parser reads on."""
        self._mark: int | None = None
        """From where the text is kept: it may yet be content."""
        self._ended = False
        self._pieces: list[Piece] = []
        self._reading = self._read()
        next(self._reading)

    @abstractmethod
    def _read(self) -> Reading[None]:
        """Read the whole text. No position may be remembered over a wait but `_mark`."""

    def feed(self, text: str, finished: bool) -> list[Piece]:
        """The pieces that `text` makes certain. `finished`: no more will come, so all are."""
        begin = self._at if self._mark is None else self._mark
        self._text = self._text[begin:] + text
        self._at -= begin
        if self._mark is not None:
            self._mark = 0
        self._ended = finished
        next(self._reading, None)
        pieces, self._pieces = self._pieces, []
        return merge(pieces)

    def _show(self, piece: Piece) -> None:
        self._pieces.append(piece)

    def _show_held(self, kind: Callable[[str], Piece] = Content) -> None:
        """Show the text from the mark on, and forget the mark."""
        held = self._text[self._mark : self._at]
        self._mark = None
        if held:
            self._show(kind(held))

    def _rewind(self) -> None:
        """Go back to the mark, and forget it."""
        self._at, self._mark = self._mark, None

    def _char(self) -> Reading[str]:
        """The next character, which is not taken; "" at the end."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def _skip(self, chars: str) -> Reading[str]:
        """Take whatever of `chars` comes; the character after it, which is not taken."""
        while (char := (yield from self._char())) and char in chars:
            self._at += 1
        return char

    def _take(self, literal: str) -> Reading[bool]:
        """Take `literal` if it comes next; whether it did."""
        while not self._ended and len(self._text) - self._at < len(literal):
            if not literal.startswith(self._text[self._at :]):
                return False
            yield
        if not self._text.startswith(literal, self._at):
            return False
        self._at += len(literal)
        return True

    def _take_up_to(
        self, tag: str, kind: Callable[[str], Piece], held: str = "", holds_end: bool = False
    ) -> Reading[bool]:
        """Show the text before `tag` as it comes, and take the tag; False if the text ends without
        one. Characters of `held` right before the tag are not shown, with `holds_end` also not
        before the end. Afterwards they and the tag are marked."""
        self._mark = self._at
        while True:
            found = end = self._text.find(tag, self._at)
            if found < 0:
                end = len(self._text)
                if not self._ended:
                    end -= _overlap(self._text[self._at :], tag)
            certain = self._text[self._at : end].rstrip(held)
            if certain:
                self._at += len(certain)
                self._show_held(kind)
                self._mark = self._at
            self._at = end
            if found >= 0:
                self._at += len(tag)
                return True
            if self._ended:
                if not holds_end:
                    self._show_held(kind)
                self._mark = None
                return False
            yield

    def _take_rest(self, kind: Callable[[str], Piece]) -> Reading[None]:
        """Show all text that comes."""
        while (yield from self._char()):
            self._show(kind(self._text[self._at :]))
            self._at = len(self._text)


def merge(pieces: list[Piece]) -> list[Piece]:
    """The same pieces, with the texts of neighbours of one kind joined."""
    merged: list[Piece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if type(piece) is type(last) and not isinstance(piece, CallStart):
            merged[-1] = type(piece)(last.text + piece.text)
        else:
            merged.append(piece)
    return merged


def _overlap(text: str, tag: str) -> int:
    """How many of the last characters of `text` may be the beginning of `tag`."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
