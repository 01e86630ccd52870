"""`jaxserve serve`: the HTTP server."""

import argparse
import atexit
import os
import sys
import threading

from jaxserve.cli.flags import add_flags, build, given
from jaxserve.config import EngineConfig
from jaxserve.server.config import ServerConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="any name that --model takes elsewhere")
    add_flags(parser, ServerConfig)
    add_flags(parser, EngineConfig, skip=("model", "skip_tokenizer_init"))


def run(args: argparse.Namespace) -> int:
    """1 if the engine has failed and --exit-on-engine-failure was given."""
    engine_config = build(EngineConfig, given(args, EngineConfig))
    config = build(ServerConfig, given(args, ServerConfig))

    from jaxserve.server.lifecycle import serve

    code = serve(engine_config, config)
    _leave_downloads(code)
    return code


def _leave_downloads(code: int) -> None:
    """End the process now if threads are left. That is a download: the hub's library makes it in a
    pool of threads, which an interpreter's end would wait for, maybe for ever."""
    if threading.active_count() > 1:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
