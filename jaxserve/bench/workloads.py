"""What is asked of an engine: lengths by name or from a file, token ids from a seed."""

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scheduler import read_trace

LENGTHS = Path(__file__).parent / "lengths"
FILES = {
    "sharegpt": "sharegpt_like_1000.csv",
    "lmsys-trace": "lengths_lmsys.csv",
    "sharegpt-trace": "lengths_sharegpt.csv",
    "splitwise-trace": "lengths_splitwise.csv",
}
"""Length files by name; `lengths/README.md` says where they are from."""

_SQUARE = re.compile(r"(\d+)x(\d+)")
_PREFILL = re.compile(r"prefill-(\d+)")
_MOST_REQUESTS = 1_000_000


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """One request: token ids in, exactly `output_len` tokens out."""

    prompt_token_ids: list[int]
    output_len: int


def is_prefill(workload: str) -> bool:
    return _PREFILL.fullmatch(workload) is not None


def lengths_of(workload: str, num_requests: int | None = None) -> list[tuple[int, int]]:
    """(input, output) tokens of each request of a workload.

    `workload`: "512x512" (input x output), "prefill-1024" (one output token each), a name in FILES,
    or the path of such a CSV file. `num_requests` None: all of a file, 512 of one size, 128 to
    prefill. ValueError in one line for any other name, a damaged file, or one that is too short.
    """
    if match := _SQUARE.fullmatch(workload):
        lengths = [(int(match[1]), int(match[2]))] * (num_requests or 512)
    elif match := _PREFILL.fullmatch(workload):
        lengths = [(int(match[1]), 1)] * (num_requests or 128)
    else:
        lengths = read_lengths(workload, num_requests)
    if min(min(pair) for pair in lengths) < 1:
        raise ValueError(f"workload {workload}: every length must be at least 1")
    return lengths


def read_lengths(name: str, num_requests: int | None = None) -> list[tuple[int, int]]:
    """The first requests of a length file, by its name in FILES or its path."""
    path = LENGTHS / FILES[name] if name in FILES else Path(name)
    if not path.is_file():
        raise ValueError(
            f"no workload {name!r}: give INPUTxOUTPUT, prefill-INPUT, one of {', '.join(FILES)}, "
            "or a CSV file with the columns input_len and output_len"
        )
    try:
        trace = read_trace(path, num_requests or _MOST_REQUESTS)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no file of lengths: {error!r}") from error
    if len(trace) < (num_requests or 1):
        raise ValueError(f"{path} has {len(trace)} requests, {num_requests or 1} are needed")
    return [(request.input_len, request.output_len) for request in trace]


def make_requests(
    lengths: Sequence[tuple[int, int]], vocab_size: int, seed: int
) -> list[TokenRequest]:
    """Random token ids below `vocab_size`; the same for the same arguments."""
    rng = random.Random(seed)
    ids = range(vocab_size)
    return [TokenRequest(rng.choices(ids, k=input_len), output) for input_len, output in lengths]


def save_requests(path: Path, requests: Sequence[TokenRequest]) -> None:
    """Write them as `jaxserve generate --prompts-file` reads them, one JSON object a line."""
    with path.open("w") as file:
        for request in requests:
            params = {"max_tokens": request.output_len, "ignore_eos": True, "temperature": 0}
            record = {"prompt_token_ids": request.prompt_token_ids, "sampling_params": params}
            file.write(json.dumps(record) + "\n")


def load_requests(path: Path) -> list[TokenRequest]:
    """Read what `save_requests` wrote."""

    def read() -> Iterator[TokenRequest]:
        for line in path.read_text().splitlines():
            record = json.loads(line)
            yield TokenRequest(record["prompt_token_ids"], record["sampling_params"]["max_tokens"])

    return list(read())
