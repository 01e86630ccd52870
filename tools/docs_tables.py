"""Write the tables in docs/ that come from the files in `bench/results/`.

python tools/docs_tables.py          # rewrites what is between the markers
python tools/docs_tables.py --check  # exit code 1 if that would change anything
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"


def clients() -> list[str]:
    """What each client was tried with."""
    result = json.loads((RESULTS / "clients.json").read_text())
    lines = ["| client | version | what was tried | outcome |", "|---|---|---|---|"]
    for name, outcome in result["scripts"].items():
        checks = outcome["checks"]
        failed = [check for check, said in checks.items() if said != "passed"]
        tried = ", ".join(check.replace("_", " ") for check in checks)
        figures = {k: v for k, v in outcome["figures"].items() if not isinstance(v, dict)}
        notes = "".join(f"; {key} {value:g}" for key, value in figures.items())
        said = f"failed: {', '.join(failed)}" if failed else f"passed{notes}"
        label = f"{outcome['client']} ({Path(name).suffix[1:] or 'py'})"
        lines.append(f"| {label} | {outcome['version']} | {tried} | {said} |")
    return lines


def soak() -> list[str]:
    """What the clients of the soak saw, and what they left."""
    result = json.loads((RESULTS / "soak.json").read_text())
    memory = ", ".join(f"{k} {100 * v['growth']:+.1f}%" for k, v in result["memory"].items())
    statuses = ", ".join(f"{count:,} x {status}" for status, count in result["statuses"].items())
    rows = {
        "time, clients at once": f"{result['minutes']:g} minutes, {result['num_clients']}",
        "things done": f"{sum(result['requests'].values()):,}",
        "answers by status": statuses,
        "greedy texts compared with those given alone": f"{result['greedy_texts_compared']:,}",
        "preemptions": f"{result['num_preemptions']:,.0f}",
        "memory, last minute against first": memory,
        "failures": f"{result['num_failures']}",
        "where": f"{result['hardware']['cpu']}, {result['hardware']['threads']} threads",
    }
    return _rows(rows)


def shutdown() -> list[str]:
    """How a killed engine and a stopped server end."""
    result = json.loads((RESULTS / "shutdown.json").read_text())
    killed, stopped = result["engine_killed"], result["sigterm"]
    rows = {
        "engine killed: `/health` says 503 after": f"{killed['health_503_s']} s",
        f"engine killed: the last of {killed['num_clients']} clients has its error after": (
            f"{killed['last_client_error_s']} s"
        ),
        "SIGTERM: requests finished": f"{stopped['finished']} of {stopped['num_clients']}",
        "SIGTERM: exit code, processes left": (
            f"{stopped['exit_code']}, {stopped['processes_left']}"
        ),
        "where": f"{result['hardware']['cpu']}, {result['hardware']['threads']} threads",
    }
    return _rows(rows)


def _rows(rows: dict[str, str]) -> list[str]:
    return ["| what | measured |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows.items())]


TABLES: dict[str, Callable[[], list[str]]] = {
    "clients": clients,
    "soak": soak,
    "shutdown": shutdown,
}


def filled(text: str) -> str:
    """The document with the tables made anew that have results."""
    for name, make in TABLES.items():
        if not (RESULTS / f"{name}.json").exists():
            continue
        markers = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if markers.search(text):
            table = "\n".join(make()) + "\n"
            text = markers.sub(lambda m, table=table: m[1] + table + m[2], text)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    changed = False
    for path in sorted((ROOT / "docs").glob("*.md")):
        before = path.read_text()
        after = filled(before)
        changed |= before != after
        if not args.check:
            path.write_text(after)
    return int(args.check and changed)


if __name__ == "__main__":
    sys.exit(main())
