"""`jaxserve COMMAND ...`: the commands, and how each of them may end."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxserve.cli import bench, chat, environment, generate, serve
from jaxserve.cli.flags import UsageError, add_flags, given
from jaxserve.config import EngineConfig

EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_CLOSED_PIPE = 1, 2, 130, 141


class Parser(argparse.ArgumentParser):
    """Errors take one line, like all others of the command."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"jaxserve: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 (error), 2 (usage), 130 (Ctrl-C) or 141 (the
    reader of the output has gone). Results go to stdout, everything else to stderr."""
    args = _parser().parse_args(argv)
    if sys.stdout is None:
        # The shell's >&- closes it; then there is nowhere to write an answer to.
        print("jaxserve: error: standard output is closed", file=sys.stderr)
        return EXIT_ERROR
    # A terminal that lacks a character must not cost the answer.
    sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The interpreter flushes stdout once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_CLOSED_PIPE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        if args.debug:
            raise
        print(f"jaxserve: error: {_one_line(error)}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_ERROR


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    text = " ".join(str(error).split())
    if isinstance(error, ValueError | OSError | RuntimeError) and text:
        return text
    return f"{type(error).__name__}: {text} (--debug shows where)"


def _parser() -> Parser:
    parser = Parser(prog="jaxserve", description="LLM inference in JAX.", allow_abbrev=False)
    command = _commands_of(parser)
    generate.add_arguments(command("generate", generate.run, "complete prompts or answer messages"))
    serve.add_arguments(command("serve", serve.run, "serve OpenAI's HTTP API"))
    chat.add_arguments(command("chat", chat.run, "hold a conversation in the terminal"))
    converter = command("convert", _convert, "write a checkpoint in the engine's own layout")
    converter.add_argument("model", metavar="MODEL", help="any name that --model takes elsewhere")
    converter.add_argument("out", metavar="OUT", type=Path, help="the new folder")
    add_flags(converter, EngineConfig, only=("dtype", "tensor_parallel_size"))
    bench.add_arguments(_commands_of(command("bench", None, "measure a server or the engine")))
    command("collect-env", environment.run, "print versions and devices, for reports")
    return parser


def _commands_of(parser: Parser) -> Callable[[str, Any, str], Parser]:
    """What adds a command to `parser`: a name, the function that runs it, and its help."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, help_: str) -> Parser:
        sub = commands.add_parser(
            name, help=help_, description=help_[0].upper() + help_[1:] + ".", allow_abbrev=False
        )
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        sub.set_defaults(run=run)
        return sub

    return command


def _convert(args: argparse.Namespace) -> int:
    from jaxserve.model.loader import convert

    fields = given(args, EngineConfig)
    convert(fields.pop("model"), args.out, **fields)
    return 0
