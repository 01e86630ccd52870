"""Write the README's table of measurements from the files in `bench/results/`.

python tools/results_table.py          # rewrites the part of README.md between the markers
python tools/results_table.py --check  # exit code 1 if that would change anything
"""

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
MARKERS = re.compile(r"(<!-- results -->\n).*?(<!-- /results -->)", re.DOTALL)


def offline_rows(result: dict) -> list[str]:
    where = f"{result['hardware']['cpu']}, {result['hardware']['threads']} threads"
    rows = []
    for engine, figures in result["engines"].items():
        rates = " / ".join(f"{rate:.1f}" for rate in figures["output_tokens_per_s"])
        flag = " (flagged: spread over 15%)" if figures["flagged"] else ""
        what = f"{result['model']}, {result['dtype']}, {result['workload']}, {engine}"
        rows.append(f"| {what} | {rates} output tokens/s{flag} | {where} |")
    rows.append(
        f"| the same, jaxserve over transformers | {result['ratio_median']:.2f} times | {where} |"
    )
    return rows


def host_rows(result: dict) -> list[str]:
    where = result["hardware"]["cpu"]
    rows = []
    for running, figures in result["running"].items():
        flag = " (flagged: spread over 15%)" if figures["flagged"] else ""
        times = " / ".join(f"{p['total_ms_p50']:.3f}" for p in figures["passes"])
        rows.append(
            f"| host work of a decode step (schedule, build, update), {running} running | "
            f"{times} ms{flag} | {where} |"
        )
    return rows


def structured_rows(result: dict) -> list[str]:
    where = f"{result['device']}, {result['hardware']['cpu']}"
    flag = " (flagged: spread over 15%)" if result["flagged"] else ""
    return [
        f"| {result['model']}, a step of {result['num_requests']} requests with as many different "
        f"JSON schemas, over one without ({result['outputs_valid']} outputs validate) | "
        f"{result['ratio_all']:.2f} times{flag} | {where} |"
    ]


def table() -> str:
    """The Markdown table of all result files that have a row here."""
    makers = {
        "offline_vs_transformers": offline_rows,
        "host_time": host_rows,
        "structured_output": structured_rows,
    }
    rows = []
    for path in sorted((ROOT / "bench" / "results").glob("*.json")):
        result = json.loads(path.read_text())
        if result.get("benchmark") in makers:
            rows += makers[result["benchmark"]](result)
    return "\n".join(["| what | measured | where |", "|---|---|---|", *rows]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    readme = ROOT / "README.md"
    before = readme.read_text()
    made = table()
    after = MARKERS.sub(lambda m: m[1] + made + m[2], before)
    if args.check:
        return int(before != after)
    readme.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
