"""`jaxserve serve` with the fake engine: its flags, and --step-time."""

import argparse
import functools
import sys

from fake_engine import make_fake_engine

from jaxserve.cli import serve as command
from jaxserve.cli.flags import build, given
from jaxserve.config import EngineConfig
from jaxserve.server.config import ServerConfig
from jaxserve.server.lifecycle import serve


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-time", type=float, default=0.0)
    command.add_arguments(parser)
    args = parser.parse_args()
    return serve(
        build(EngineConfig, given(args, EngineConfig)),
        build(ServerConfig, given(args, ServerConfig)),
        functools.partial(make_fake_engine, step_time_s=args.step_time),
    )


if __name__ == "__main__":
    sys.exit(main())
