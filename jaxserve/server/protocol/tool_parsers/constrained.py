"""Calls in answers that a grammar holds to them (tool_choice "required", or one function)."""

from jaxserve.server.protocol.text_parser import (
    CallArguments,
    CallStart,
    Content,
    Malformed,
    Reading,
)
from jaxserve.server.protocol.tool_parsers.json_calls import SPACE, ToolParser


class RequiredCallsParser(ToolParser):
    """An array of `{"name": …, "parameters": …}`."""

    def _read(self) -> Reading[None]:
        self._mark = 0
        separator = "["
        try:
            while (yield from self._skip(SPACE)) == separator:
                self._at += 1
                yield from self._take_call()
                self._mark = self._at
                separator = ","
            if not self._has_calls:
                raise Malformed
            yield from self._expect("]")
            yield from self._skip(SPACE)
            self._mark = None
        except Malformed:
            self._show_held()
        yield from self._take_rest(Content)


class NamedCallParser(ToolParser):
    """The arguments of one call of `name`."""

    def __init__(self, name: str) -> None:
        self._name = name
        super().__init__()

    def _read(self) -> Reading[None]:
        if (yield from self._skip(SPACE)):
            self._show(CallStart(self._name))
        yield from self._take_rest(CallArguments)
