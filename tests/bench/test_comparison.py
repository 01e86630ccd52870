"""Ratios of engines that took turns, and the table and plots made from them."""

import functools
import json
import sys
from types import SimpleNamespace

import pytest


def record(engine, turn, workload="8x8", rate=None, step=None, flagged=False):
    return {
        "engine": engine,
        "turn": turn,
        "gpu": "a GPU",
        "dtype": "bfloat16",
        "workload": workload,
        "output_tokens_per_s": rate,
        "total_tokens_per_s": rate and 2 * rate,
        "prefill_tokens_per_s": None,
        "decode_step_ms": step and {"1": step},
        "rows": {"1": {"flagged": flagged}},
        "flagged": flagged,
    }


@pytest.fixture
def records():
    ours = [(300, 1.0, False), (220, 1.0, False), (900, 1.0, True), (200, 1.0, False)]
    made = []
    for turn, (rate, step, flagged) in enumerate(ours):
        made += [
            record("jaxserve", turn, rate=rate, flagged=flagged),
            record("vllm", turn, rate=100),
        ]
        made += [
            record("jaxserve", turn, "decode", step=step),
            record("vllm", turn, "decode", step=step * (2 + turn)),
        ]
    return made


def test_engines_keep_their_packages_apart(script, monkeypatch):
    compare = script("bench", "compare")
    started = []
    monkeypatch.setattr(compare.subprocess, "run", lambda *args, **kw: started.append((args, kw)))
    monkeypatch.setenv("PYTHONPATH", "/callers")
    args = SimpleNamespace(site=["vllm=/packages"], python=["vllm=/python"])
    for engine in ("jaxserve", "vllm-v2"):
        compare.run_script(args, engine, "bench/engines/worker.py", ["job"])
    (ours, ours_kw), (theirs, theirs_kw) = started
    assert ours_kw["env"]["PYTHONPATH"].split(":")[-1] == "/callers"
    paths = theirs_kw["env"]["PYTHONPATH"].split(":")
    assert paths[0] == "/packages"
    assert "/callers" not in paths
    assert theirs_kw["env"]["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert (ours[0][0], theirs[0][0]) == (sys.executable, "/python")


def test_a_turn_is_gone_on_with(script):
    """From the first workload that an engine lacks."""
    records = [record("jaxserve", 0), record("jaxserve", 0, "decode"), record("vllm", 0)]
    missing = functools.partial(
        script("bench", "compare").missing_workloads, records, ["decode", "8x8"]
    )
    assert missing(0, "jaxserve") == []
    assert missing(0, "vllm") == ["decode"]
    assert missing(1, "jaxserve") == ["decode", "8x8"]


def test_whoever_had_the_first_turn(script, records, monkeypatch, tmp_path):
    """Ratios are of the engine that is named first in `ENGINES`; and what is missing is told."""
    compare = script("bench", "compare")
    ours, theirs = (
        [r | {"engine": engine} for r in records if r["engine"] == engine and r["turn"] < 2]
        for engine in ("jaxserve", "vllm")
    )
    path = tmp_path / "compare-qwen2.5-0.5b-s1.json"
    path.write_text(json.dumps({"records": theirs, "session": "s1"}))
    made = iter([[r for r in ours if r["turn"] == 0], []])
    monkeypatch.setattr(compare, "run_turn", lambda *_: next(made))
    flags = "--shape qwen2.5-0.5b --engines jaxserve --workloads decode 8x8 --session s1 --turns 1"
    flags += f" --no-ceilings --no-check --num-prompts 2 --output-dir {tmp_path}"
    monkeypatch.setattr(sys, "argv", ["compare.py", *flags.split()])
    assert compare.main() == 0
    written = json.loads(path.read_text())
    assert [r["engine"] for r in written["records"]] == ["jaxserve"] * 2 + ["vllm"] * 4
    assert list(written["ratios"]) == ["jaxserve over vllm"]
    assert compare.main() == 1


def test_ratios_are_medians_of_good_turns(script, records):
    ratios = script("bench", "ratios").ratios_of(records)
    assert list(ratios) == ["jaxserve over vllm"]
    rows = ratios["jaxserve over vllm"]
    assert rows["8x8, output_tokens_per_s"] == {
        "turns": [3.0, 2.2, 9.0, 2.0],
        "flagged": [False, False, True, False],
        "median": 2.2,
    }
    assert rows["decode, decode_steps_per_s at batch 1"]["median"] == 3.5
    everything_flagged = [r | {"flagged": True} for r in records]
    rows = script("bench", "ratios").ratios_of(everything_flagged)["jaxserve over vllm"]
    assert rows["8x8, total_tokens_per_s"]["median"] is None


@pytest.fixture
def result(script, records):
    return {
        "benchmark": "compare",
        "session": "s1",
        "model": "qwen2.5-0.5b",
        "hardware": {"cpu": "a CPU", "threads": 2, "gpus": ["another GPU", "a GPU"]},
        "records": records,
        "ratios": script("bench", "ratios").ratios_of(records),
        "floors": {"decode_step_ms": {"1": 0.21}, "output_tokens_per_s": {"8x8": 5000.0}},
    }


def test_the_table_has_medians_limits_and_ratios(script, result):
    last = "vllm", 3
    result["records"] = [r for r in result["records"] if (r["engine"], r["turn"]) != last]
    ours, theirs = (
        [r for r in result["records"] if (r["engine"], r["workload"]) == (engine, "decode")]
        for engine in ("jaxserve", "vllm")
    )
    ours[1]["profiles"] = {"1": {"kernels": 1047.1, "busy_share": 0.142}}
    ours[2]["profiles"] = {"1": {"kernels": 9.0, "busy_share": 0.9}}
    theirs[0]["profiles"] = {"1": {"kernels": 30.0, "busy_share": 1.004}}
    theirs[0]["rows"] = {"1": {"flagged": True}}
    lines = script("tools", "results_table").compare_table(result)
    assert lines[0].startswith("qwen2.5-0.5b, bfloat16, a GPU, session s1;")
    assert lines[2:] == [
        "|  | jaxserve, 4 turns | vllm, 3 turns | device's limit | jaxserve over vllm |",
        "|---|---|---|---|---|",
        "| decode step, batch 1, ms | 1.00 | 3.00 ! | 0.21 | 3.50 |",
        "| kernels of a step in one turn, batch 1; GPU busy | 1,047; 14% | 30; 100% ! |  |  |",
        "| 8x8, output tokens/s | 260 ! | 100 | 5,000 | 2.20 |",
        "| 8x8, total tokens/s | 520 ! | 200 |  | 2.20 |",
    ]


def test_the_table_of_one_engine(script, result):
    alone = result | {"records": result["records"][::2], "ratios": {}, "floors": {}}
    lines = script("tools", "results_table").compare_table(alone)
    assert lines[0].endswith("`!` if any two passes were over 15% apart.")
    assert lines[2:5] == [
        "|  | jaxserve, 4 turns |", "|---|---|", "| decode step, batch 1, ms | 1.00 |"
    ]  # fmt: skip


def test_tables_of_pairs(script, result, monkeypatch, tmp_path):
    """Over sessions; flagged ones take no part in the median."""
    records = [r | {"flagged": r["engine"] == "vllm"} for r in result["records"][:8]]
    flagged = result | {"session": "s2", "records": records}
    flagged["ratios"] = script("bench", "ratios").ratios_of(records)
    others = [
        result | {"model": "qwen2.5-0.5b-instruct"},
        result | {"session": "s3", "ratios": {"jaxserve over vllm": {}}},
    ]
    for index, content in enumerate([flagged, *others, result]):
        (tmp_path / f"compare-{index}.json").write_text(json.dumps(content))
    tool = script("tools", "results_table")
    monkeypatch.setattr(tool, "RESULTS", tmp_path)
    parts = tool.tables().split("\n\n")
    heads = [part for part in parts if "in every pair of turns" in part]
    assert [head.split(", whose")[0] for head in heads] == [
        "qwen2.5-0.5b, jaxserve over vllm in every pair of turns, sessions s2, s1"
    ]
    assert parts[parts.index(heads[0]) + 1].splitlines() == [
        "| jaxserve over vllm | pairs | median of those without `!` |",
        "|---|---|---|",
        "| 8x8, output tokens/s | 3.000 !, 2.200 !, 3.000, 2.200, 9.000 !, 2.000 | 2.200 of 3 |",
        "| decode step, batch 1 | 2.000, 3.000, 2.000, 3.000, 4.000, 5.000 | 3.000 of 6 |",
    ]
    assert "| 8x8, output tokens/s | 3.000 !, 2.200 ! |  |" in "\n".join(
        next(tool.pairs_tables([flagged]))
    )


def report(phase="decode", **fields):
    times = {"wall_ms": 2.0, "busy_ms": 1.5, "gaps_ms": 0.3, "host_ms": 0.2}
    made = {
        "benchmark": "step_report",
        "model": "qwen2.5-0.5b",
        "date": "2026-01-01",
        "hardware": {"cpu": "a CPU", "gpus": ["a GPU"]},
        "phase": phase,
        "num_tokens": 32,
        "kernels_per_step": 301.0,
        "launches": {"graphs": 1, "outside_of_graphs": {"kCopy": 2, "kWhile": 1}},
        "flagged": False,
    }
    return made | times | fields


def test_the_tables_of_steps(script):
    kernels = [{"kernel": name, "count": 2.0, "us": us} for us, name in enumerate("abcdefgh")]
    make = script("tools", "docs_tables").step_reports
    reports = (
        report(kernels=kernels[::-1], busy_ms=0.028, gaps_ms=0.02, host_ms=0.008, wall_ms=0.056),
        report("prefill", flagged=True, kernels=[]),
    )
    assert make(*reports)[2:] == [
        "| qwen2.5-0.5b, decode of 32 tokens | 0.06 | 50% | 36% | 14% | 301 | 1 | 3 |",
        "| qwen2.5-0.5b, prefill of 32 tokens | 2.00 ! | 75% | 15% | 10% | 301 | 1 | 3 |",
        "",
        "| step | kernel or copy | times | us | of busy GPU |",
        "|---|---|---|---|---|",
        "| qwen2.5-0.5b, decode of 32 tokens | `h` | 2 | 7 | 25% |",
        "|  | `g` | 2 | 6 | 21% |",
        "|  | `f` | 2 | 5 | 18% |",
        "|  | `e` | 2 | 4 | 14% |",
        "|  | `d` | 2 | 3 | 11% |",
        "|  | `c` | 2 | 2 | 7% |",
        "|  | others | 4 | 1 | 4% |",
    ]


def test_plots(script, result, tmp_path, monkeypatch):
    (tmp_path / "compare.json").write_text(json.dumps(result))
    for phase in ("decode", "prefill"):
        (tmp_path / f"step_report-{phase}.json").write_text(json.dumps(report(phase)))
    plots = script("tools", "plots")
    argv = ["plots.py", "--results", str(tmp_path), "--output-dir", str(tmp_path)]
    monkeypatch.setattr("sys.argv", argv)
    assert plots.main() == 0
    made = {path.name: path.read_bytes() for path in tmp_path.glob("*.svg")}
    assert set(made) == {
        "step-qwen2.5-0.5b-s1.svg",
        "throughput-qwen2.5-0.5b-s1.svg",
        "breakdown-qwen2.5-0.5b.svg",
    }
    plots.main()
    assert made == {path.name: path.read_bytes() for path in tmp_path.glob("*.svg")}
