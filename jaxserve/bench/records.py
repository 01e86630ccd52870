"""A result of one engine on one workload, with the same keys whichever engine it is."""

from typing import Any

from jaxserve.bench.environment import describe

KEYS = (
    "engine",
    "engine_version",
    "gpu",
    "gpu_count",
    "date",
    "session",
    "command",
    "model",
    "dtype",
    "workload",
    "max_num_seqs",
    "output_tokens_per_s",
    "total_tokens_per_s",
    "decode_step_ms",
    "prefill_tokens_per_s",
    "ready_s",
    "kernels_per_step",
    "spread",
    "flagged",
)
"""In every record; None where the workload does not measure it. `decode_step_ms` is {batch: ms}."""


def make_record(session: str | None, num_gpus: int, **fields: Any) -> dict[str, Any]:
    """A record with all of KEYS, the machine, and what else `fields` hold.

    `session` is the name that compared runs share; None: the date, for a run by itself. On a
    machine without a GPU `gpu` is None and `gpu_count` 0.
    """
    about = describe()
    gpus = about["hardware"]["gpus"]
    known = {
        "gpu": gpus[0] if gpus else None,
        "gpu_count": num_gpus if gpus else 0,
        "session": session or about["date"],
    }
    known |= about | fields
    return {key: known.get(key) for key in KEYS} | known
