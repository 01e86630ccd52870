"""Calls as Llama 3 models write them: `{"name": …, "parameters": …}` alone, several with `;`
between them; after `<|python_tag|>`, if the model writes that, also within other text."""

from jaxserve.server.protocol.text_parser import Malformed, Reading
from jaxserve.server.protocol.tool_parsers.json_calls import SPACE, ToolParser

_TAG = "<|python_tag|>"


class Llama3JsonParser(ToolParser):
    tags = (_TAG,)

    def _read(self) -> Reading[None]:
        self._mark = 0
        if (yield from self._skip(SPACE)) == "{":
            yield from self._take_calls()
        else:
            self._rewind()
        while (yield from self._take_content_up_to(_TAG)):
            yield from self._take_calls()

    def _take_calls(self) -> Reading[None]:
        """Take calls for as long as they come."""
        while True:
            try:
                yield from self._take_call()
            except Malformed:
                self._show_held()
                return
            self._mark = self._at
            if (yield from self._skip(SPACE + ";")) != "{":
                self._rewind()
                return
