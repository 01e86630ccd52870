"""`jaxserve serve`: the HTTP server."""

import argparse

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

    return serve(engine_config, config)
