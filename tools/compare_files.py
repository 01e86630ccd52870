"""Reads what `bench/compare.py` has written: figures by engine, workload and batch size; and step
reports."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RATES = ("output_tokens_per_s", "total_tokens_per_s", "prefill_tokens_per_s")


def compare_files(folder: Path) -> list[dict[str, Any]]:
    """All sessions in `folder` that have figures, by file name."""
    return [result for result in _results(folder, "compare") if result["records"]]


def step_reports(folder: Path) -> list[dict[str, Any]]:
    """What `tools/step_report.py` has left in `folder`: by model, phase and tokens."""
    reports = _results(folder, "step_report")
    return sorted(reports, key=lambda r: (r["model"], r["phase"], r["num_tokens"]))


def _results(folder: Path, benchmark: str) -> list[dict[str, Any]]:
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return [result for result in results if result.get("benchmark") == benchmark]


def engines_of(result: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(record["engine"] for record in result["records"]))


def of_engine(result: dict[str, Any], engine: str) -> list[dict[str, Any]]:
    return [record for record in result["records"] if record["engine"] == engine]


def step_times(result: dict[str, Any], engine: str) -> dict[int, tuple[list[float], bool]]:
    """{batch: (ms of every turn, whether any turn is flagged)}."""
    found: dict[int, tuple[list[float], bool]] = {}
    for record in of_engine(result, engine):
        for size, ms in (record["decode_step_ms"] or {}).items():
            values, flagged = found.get(int(size), ([], False))
            found[int(size)] = ([*values, ms], flagged or record["rows"][size]["flagged"])
    return dict(sorted(found.items()))


def step_profiles(result: dict[str, Any], engine: str) -> dict[int, tuple[float, float, bool]]:
    """{batch: (kernels of a decode step, how busy its GPU was, whether its time is flagged)}, of
    the first turn that was profiled."""
    profiled = (record for record in of_engine(result, engine) if record.get("profiles"))
    record = next(profiled, {"profiles": {}})
    return {
        int(size): (stats["kernels"], stats["busy_share"], record["rows"][size]["flagged"])
        for size, stats in record["profiles"].items()
    }


def rates(result: dict[str, Any], engine: str, name: str) -> dict[str, tuple[list[float], bool]]:
    """{workload: (the rate in every turn, whether any turn is flagged)}; `name` is one of RATES."""
    found: dict[str, tuple[list[float], bool]] = {}
    for record in of_engine(result, engine):
        if record[name] is not None:
            values, flagged = found.get(record["workload"], ([], False))
            found[record["workload"]] = ([*values, record[name]], flagged or record["flagged"])
    return found


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
