"""What the server's process and the engine's process say to each other, and how it is framed.

A frame is its length in 4 bytes, then MessagePack.
"""

import struct
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from jaxserve.engine.stats import EngineStats
from jaxserve.outputs import OutputDelta
from jaxserve.sampling_params import SamplingParams

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What does not change while an engine runs."""

    platform: str
    """JAX's name for what it runs on: "gpu" or "cpu"."""
    max_model_len: int
    max_num_seqs: int
    max_logprobs: int
    vocab_size: int
    num_blocks: int
    """As the scheduler counts them: block 0 is for padding."""
    block_size: int
    kv_capacity_tokens: int
    enable_prefix_caching: bool
    scheduling_policy: Literal["fcfs", "priority"]
    startup_s: dict[str, float]
    """Seconds of each phase of the start."""


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    pass


# To the engine.


class Add(_Message):
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int


class Abort(_Message):
    request_id: str


class ResetPrefixCache(_Message):
    """Answered, in order, by PrefixCacheReset."""


class Stop(_Message):
    """End all requests, then the process."""


# From the engine.


class Ready(_Message):
    info: EngineInfo


class Failed(_Message):
    """The engine cannot start, or has failed; nothing follows."""

    message: str


class Queued(_Message):
    request_id: str


class Refused(_Message):
    """The answer to an Add whose request cannot be served."""

    request_id: str
    message: str
    kind: Literal["invalid", "queue_full", "internal"]


class Deltas(_Message):
    deltas: list[OutputDelta]


class Stats(_Message):
    """Sent while the engine steps, and when it runs out of work."""

    stats: EngineStats
    num_compilations: dict[str, int]
    """By phase: "startup" and "serving"."""


class PrefixCacheReset(_Message):
    done: bool


ToEngine = Add | Abort | ResetPrefixCache | Stop
FromEngine = Ready | Failed | Queued | Refused | Deltas | Stats | PrefixCacheReset

_encoder = msgspec.msgpack.Encoder()


def frame(message: _Message) -> bytes:
    """The message as it goes over the socket."""
    payload = _encoder.encode(message)
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Messages of `union` from the bytes that arrive."""

    def __init__(self, union: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(union)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that `data` completes."""
        self._buffer += data
        messages = []
        start = 0
        with memoryview(self._buffer) as view:
            while len(view) - start >= _LENGTH.size:
                begin = start + _LENGTH.size
                end = begin + _LENGTH.unpack_from(view, start)[0]
                if end > len(view):
                    break
                messages.append(self._decoder.decode(view[begin:end]))
                start = end
        del self._buffer[:start]
        return messages
