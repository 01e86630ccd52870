"""How much faster one engine was than another, turn by turn."""

import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any


def figures(record: dict[str, Any]) -> Iterator[tuple[str, float, bool]]:
    """(name, value, whether it is flagged) of what was measured, each larger where it is better."""
    for name in ("output_tokens_per_s", "total_tokens_per_s", "prefill_tokens_per_s"):
        if record[name] is not None:
            yield name, record[name], record["flagged"]
    for size, ms in (record["decode_step_ms"] or {}).items():
        yield f"decode_steps_per_s at batch {size}", 1000 / ms, record["rows"][size]["flagged"]


def ratios_of(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """{"A over B": {"WORKLOAD, FIGURE": {"turns", "flagged", "median"}}} of engines A, B in the
    order in which they first appear; over 1 where A is better. `flagged`, for each turn: whether
    either engine was. `median` is of the other turns; None if there are none."""
    found: dict[str, dict[tuple[str, str], dict[int, tuple[float, bool]]]] = {}
    for record in records:
        of_engine = found.setdefault(record["engine"], {})
        for name, value, flagged in figures(record):
            key = record["workload"], name
            of_engine.setdefault(key, {})[record["turn"]] = (value, flagged)
    result: dict[str, dict[str, Any]] = {}
    for ours, theirs in itertools.combinations(found, 2):
        rows = result.setdefault(f"{ours} over {theirs}", {})
        for key in found[ours].keys() & found[theirs].keys():
            a, b = found[ours][key], found[theirs][key]
            turns = sorted(a.keys() & b.keys())
            flagged = [a[t][1] or b[t][1] for t in turns]
            good = [a[t][0] / b[t][0] for t, flag in zip(turns, flagged, strict=True) if not flag]
            rows[", ".join(key)] = {
                "turns": [round(a[t][0] / b[t][0], 3) for t in turns],
                "flagged": flagged,
                "median": round(statistics.median(good), 3) if good else None,
            }
        result[f"{ours} over {theirs}"] = dict(sorted(rows.items()))
    return result
