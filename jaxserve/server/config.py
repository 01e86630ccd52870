"""What the HTTP server can be told."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

LogFormat = Literal["text", "json"]
ToolCallParserName = Literal["hermes", "llama3_json"]
ReasoningParserName = Literal["deepseek_r1", "qwen3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Raises ValueError, naming the field and what it allows."""

    host: str = "127.0.0.1"
    """Address to listen on; "0.0.0.0" is every IPv4 address of the machine."""
    port: int = 8000
    """0: any free one; the log says which."""
    data_parallel_size: int = 1
    """Engines behind the port, each with a copy of the model; on GPUs each has tensor_parallel_size
    of its own."""
    ray: bool = False
    """Spread the engines over a Ray cluster, behind the HTTP of Ray Serve."""
    api_key: Sequence[str] = ()
    """A key that clients may show. The command line is public on most machines: prefer
    api_key_file."""
    api_key_file: str | None = None
    """A file with one key a line. Without any key, everybody who can connect is served."""
    served_model_name: Sequence[str] = ()
    """Names that requests may use for the model; answers carry the first. None: the name given as
    the model."""
    chat_template: str | None = None
    """A Jinja file, for the model's own."""
    enable_auto_tool_choice: bool = False
    """Let the model decide whether to call the tools of a request; needs tool_call_parser."""
    tool_call_parser: ToolCallParserName | None = None
    """How the model writes calls."""
    reasoning_parser: ReasoningParserName | None = None
    """How the model marks what it thinks, so that answers tell it apart from their content."""
    allowed_origins: Sequence[str] = ()
    """Web origins whose pages may call the server ("*": all); none by default."""
    max_request_bytes: int = 32 << 20
    """Longest request body."""
    max_num_queued_reqs: int = 4096
    """Most requests that wait for a slot of one engine; more get 503 and Retry-After. Each prompt
    of a list is one."""
    shutdown_timeout: float = 20.0
    """Seconds that running requests get to finish after SIGTERM or SIGINT; a second signal ends
    them at once."""
    engine_stall_timeout: float = 60.0
    """Seconds without a finished step, with requests open, after which the engine counts as
    dead."""
    exit_on_engine_failure: bool = False
    """End the server, with exit code 1, when an engine has failed; requests of other engines get
    shutdown_timeout to finish."""
    log_format: LogFormat = "text"
    """"json": one object a line."""
    otlp_endpoint: str | None = None
    """An OpenTelemetry collector's URL (OTLP over HTTP, for instance http://127.0.0.1:4318), which
    gets a span for each request."""
    disable_log_requests: bool = False
    """No line for each request."""

    def __post_init__(self) -> None:
        def check(condition: bool, name: str, allowed: str) -> None:
            if not condition:
                raise ValueError(f"{name} must be {allowed}, got {getattr(self, name)!r}")

        check(bool(self.host), "host", "an address")
        check(0 <= self.port < 65536, "port", "from 0 to 65535")
        check(self.data_parallel_size >= 1, "data_parallel_size", "at least 1")
        if self.ray:
            check(self.port > 0, "port", "over 0 with ray")
            check(not self.exit_on_engine_failure, "exit_on_engine_failure",
                  "off with ray, which starts failed engines again")  # fmt: skip
        check(all(k and k.isascii() and k == k.strip() for k in self.api_key), "api_key",
              "ASCII text that is not empty and has no space at its ends")  # fmt: skip
        check(all(self.served_model_name), "served_model_name", "names that are not empty")
        check(self.max_request_bytes >= 1, "max_request_bytes", "at least 1")
        check(self.max_num_queued_reqs >= 0, "max_num_queued_reqs", "at least 0")
        check(0 <= self.shutdown_timeout < math.inf, "shutdown_timeout", "at least 0")
        check(0 < self.engine_stall_timeout < math.inf, "engine_stall_timeout", "over 0")
        for name, names in (
            ("tool_call_parser", get_args(ToolCallParserName)),
            ("reasoning_parser", get_args(ReasoningParserName)),
        ):
            check(getattr(self, name) in (None, *names), name, " or ".join(names))
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ValueError("enable_auto_tool_choice needs a tool_call_parser")
        url = self.otlp_endpoint
        check(url is None or url.startswith(("http://", "https://")), "otlp_endpoint",
              "an http:// or https:// URL")  # fmt: skip
        check(self.log_format in ("text", "json"), "log_format", "text or json")
