"""One streamed request: what came back, and when."""

import os
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

IDLE_TIMEOUT_S = 600
"""A stream that is silent for so long has failed."""
_CONNECT_TIMEOUT_S = 30
# Below the five seconds after which uvicorn closes an idle connection: one that the server is
# closing right now must not be used again.
_KEEP_ALIVE_S = 2


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times are of time.perf_counter, durations in seconds."""

    sent_s: float
    ttft_s: float | None = None
    """Until the first token."""
    itls_s: list[float] = field(default_factory=list)
    """Between one event with tokens and the next."""
    latency_s: float = 0.0
    """Until the last token, or until it failed."""
    input_len: int = 0
    output_len: int = 0
    """Tokens, as the server counts them; events, if it does not tell."""
    error: str | None = None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first, if there are any."""
        if self.ttft_s is None or self.output_len < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.output_len - 1)


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None

    @property
    def has_tokens(self) -> bool:
        return bool(self.content or self.reasoning_content or self.reasoning or self.tool_calls)


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_tokens(self) -> bool:
        """A chat's first event tells the role alone. A completion's text may be empty where a token
        is part of a character."""
        if self.delta is not None:
            return self.delta.has_tokens
        return bool(self.text) or self.finish_reason is None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


def make_session(headers: dict[str, str]) -> aiohttp.ClientSession:
    """Connections are as many as there are requests open."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=IDLE_TIMEOUT_S
        ),
        headers=headers,
    )


async def send(session: aiohttp.ClientSession, url: str, body: bytes) -> Outcome:
    """Never raises for what a server does: the outcome's `error` says it in one line."""
    outcome = Outcome(time.perf_counter())
    try:
        headers = {"Content-Type": "application/json"}
        async with session.post(url, data=body, headers=headers) as response:
            if response.status != 200:
                outcome.error = f"HTTP {response.status}: {error_text(await response.read())}"
            else:
                await _read_stream(response, outcome)
    except aiohttp.SocketTimeoutError:
        outcome.error = f"nothing came for {IDLE_TIMEOUT_S} s"
    except (aiohttp.ClientError, OSError) as error:
        outcome.error = connection_error(error)
    except msgspec.DecodeError as error:
        outcome.error = f"an event is no JSON as OpenAI has it: {error}"
    if outcome.error is not None:
        outcome.latency_s = time.perf_counter() - outcome.sent_s
    return outcome


def connection_error(error: Exception) -> str:
    """What went wrong below HTTP, in one line without addresses."""
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def error_text(body: bytes) -> str:
    """The message in an error's body, or how the body begins."""
    try:
        value = msgspec.json.decode(body)
        return str(value["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return " ".join(body[:200].decode(errors="replace").split()) or "no body"


async def _read_stream(response: aiohttp.ClientResponse, outcome: Outcome) -> None:
    last_s = outcome.sent_s
    num_events = 0
    done = False
    usage = _Usage()
    tail = b""
    async for data in response.content.iter_any():
        now = time.perf_counter()
        *lines, tail = (tail + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                done = True
                continue
            event = _decode_event(payload)
            if event.error is not None:
                outcome.error = f"an error amid the stream: {error_text(payload)}"
                return
            usage = event.usage or usage
            for choice in event.choices:
                if choice.finish_reason in ("abort", "error"):
                    outcome.error = f"the stream ended with the reason {choice.finish_reason!r}"
                    return
                if choice.has_tokens:
                    num_events += 1
                    if outcome.ttft_s is None:
                        outcome.ttft_s = now - outcome.sent_s
                    else:
                        outcome.itls_s.append(now - last_s)
                    last_s = now
    outcome.latency_s = last_s - outcome.sent_s
    outcome.input_len = usage.prompt_tokens
    outcome.output_len = usage.completion_tokens or num_events
    if not done:
        outcome.error = "the stream ended early"
    elif outcome.ttft_s is None:
        outcome.error = "no token came"
