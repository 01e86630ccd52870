"""What the first GPU can do at most: copy bandwidth, and the rate of a large bf16 product.

    PYTHONPATH=. python bench/ceilings.py --output bench/results/ceilings.json

Floors of steps and ceilings of throughput are computed from these. On a CPU it measures the CPU.
"""

import argparse
import os
from pathlib import Path

from jaxserve.bench.ceilings import (
    COPY_BYTES,
    MATMUL_SIZE,
    WARM_UP_S,
    copy_bandwidth,
    matmul_rate,
)
from jaxserve.bench.environment import describe, write_result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--copy-bytes", type=int, default=COPY_BYTES)
    parser.add_argument("--matmul-size", type=int, default=MATMUL_SIZE)
    parser.add_argument("--warm-up-s", type=float, default=WARM_UP_S)
    parser.add_argument("--output", type=Path, default=Path("bench/results/ceilings.json"))
    args = parser.parse_args()
    copy = copy_bandwidth(args.copy_bytes, args.warm_up_s)
    matmul = matmul_rate(args.matmul_size, args.warm_up_s)
    result = describe(os.cpu_count()) | {
        "benchmark": "ceilings",
        "copy_bytes_per_s": copy.value,
        "matmul_flops_per_s": matmul.value,
        "rows": {"copy": copy.as_json(), "matmul": matmul.as_json()},
        "spread": max(copy.spread, matmul.spread),
        "flagged": copy.flagged or matmul.flagged,
    }
    write_result(args.output, result)


if __name__ == "__main__":
    main()
