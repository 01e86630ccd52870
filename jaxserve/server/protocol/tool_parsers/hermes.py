"""Calls as Hermes and Qwen models write them: `<tool_call>{"name": …, "arguments": …}</tool_call>`,
as many as there are, with or without other text around them."""

from jaxserve.server.protocol.text_parser import Malformed, Reading
from jaxserve.server.protocol.tool_parsers.json_calls import SPACE, ToolParser

_BEGIN, _END = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    tags = (_BEGIN, _END)

    def _read(self) -> Reading[None]:
        while (yield from self._take_content_up_to(_BEGIN)):
            try:
                yield from self._take_call()
            except Malformed:
                self._show_held()
            else:
                # A bracket too many is the usual slip.
                yield from self._skip(SPACE + "}")
                yield from self._take(_END)
