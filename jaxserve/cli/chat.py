"""`jaxserve chat`: a conversation in the terminal, or piped through."""

import argparse
import asyncio
import sys
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.cli.flags import add_flags, build, given
from jaxserve.config import EngineConfig
from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.llm import AsyncLLM

# --seed is the answers'.
_NO_FLAGS = ("seed", "skip_tokenizer_init")
_HELP = "/reset forgets the conversation, /quit ends; Ctrl-C stops an answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _HELP
    parser.add_argument("--system", metavar="TEXT", help="what the conversation begins with")
    parser.add_argument(
        "--chat-template", metavar="FILE", type=Path, help="a Jinja file, for the model's own"
    )
    add_flags(parser, EngineConfig, skip=_NO_FLAGS)
    add_flags(
        parser,
        SamplingParams,
        skip=("n", "logprobs", "prompt_logprobs"),
        notes={"max_tokens": "Here the default is none."},
    )


def run(args: argparse.Namespace) -> int:
    """1 if a message could not be answered."""
    config_fields = given(args, EngineConfig, skip=_NO_FLAGS)
    build(EngineConfig, config_fields)
    params = build(SamplingParams, {"max_tokens": None, **given(args, SamplingParams)})
    template = None if args.chat_template is None else args.chat_template.read_text()

    from jaxserve.llm import AsyncLLM

    llm = AsyncLLM(**config_fields)
    try:
        with asyncio.Runner() as runner:
            return _converse(Conversation(llm, params, args.system, template), runner)
    finally:
        llm.close()


class Conversation:
    """The messages so far, and the next answer."""

    def __init__(
        self, llm: "AsyncLLM", params: SamplingParams, system: str | None, template: str | None
    ) -> None:
        self._llm = llm
        self._params = params
        self._template = template
        self._beginning = [] if system is None else [{"role": "system", "content": system}]
        self.reset()

    def reset(self) -> None:
        self._messages = list(self._beginning)

    async def answer(self, text: str) -> None:
        """Stream the answer to stdout. What was shown is remembered, also if it is cut short; a
        message that got no answer at all is forgotten."""
        messages = [*self._messages, {"role": "user", "content": text}]
        prompt = self._llm.tokenizer.encode_chat(messages, chat_template=self._template)
        shown = ""
        try:
            async with aclosing(self._llm.generate(prompt, self._params)) as outputs:
                async for output in outputs:
                    whole = output.outputs[0].text
                    print(whole[len(shown) :], end="", flush=True)
                    shown = whole
        finally:
            if shown:
                print(flush=True)
                self._messages = [*messages, {"role": "assistant", "content": shown}]


def _converse(conversation: Conversation, runner: asyncio.Runner) -> int:
    interactive = sys.stdin.isatty()
    if interactive:
        print(_HELP, file=sys.stderr)
    code = 0
    while True:
        try:
            text = input("> ") if interactive else _next_line()
            if text == "/quit":
                return code
            if text == "/reset":
                conversation.reset()
            elif text.strip():
                runner.run(conversation.answer(text))
        except EOFError:
            return code
        except KeyboardInterrupt:
            if not interactive:
                raise
            print(file=sys.stderr)
        except ValueError as error:
            print(f"jaxserve: error: {error}", file=sys.stderr)
            code = 1


def _next_line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")
