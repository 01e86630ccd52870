"""Tool parsers by the names that `--tool-call-parser` takes."""

from jaxserve.server.protocol.tool_parsers.hermes import HermesParser
from jaxserve.server.protocol.tool_parsers.json_calls import ToolParser
from jaxserve.server.protocol.tool_parsers.llama3_json import Llama3JsonParser

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
}
