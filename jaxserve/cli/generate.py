"""`jaxserve generate`: one prompt, or a file of them, through the engine at once."""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from jaxserve.cli.flags import (
    UsageError,
    add_flags,
    build,
    from_fields,
    given,
    token_biases,
)
from jaxserve.config import EngineConfig
from jaxserve.sampling_params import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from jaxserve.llm import LLM
    from jaxserve.outputs import Logprob, RequestOutput

# --seed is the requests'.
_NO_FLAGS = ("seed",)
_INPUTS = ("prompt", "messages", "prompt_token_ids")


@dataclass
class Job:
    """One request on its way: what came in, then a result or what is wrong."""

    line: int | None = None
    """In the prompts file."""
    prompt: str | list[int] | None = None
    messages: Any = None
    params: SamplingParams | None = None
    output: "RequestOutput | None" = None
    error: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT")
    source.add_argument(
        "--prompts-file",
        metavar="F.jsonl",
        help='a JSON object a line: {"prompt": text}, {"messages": [...]} or {"prompt_token_ids": '
        '[...]}, each with "sampling_params" of its own if need be; "-" is stdin',
    )
    parser.add_argument(
        "--chat", action="store_true", help="put text prompts through the chat template"
    )
    parser.add_argument(
        "--chat-template", metavar="FILE", type=Path, help="a Jinja file, for the model's own"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a request on stdout")
    parser.add_argument(
        "--output-file", metavar="F", type=Path, help="write the JSON objects there, not to stdout"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar and no summary")
    add_flags(parser, EngineConfig, skip=_NO_FLAGS)
    add_flags(
        parser,
        SamplingParams,
        notes={"max_tokens": "With messages, or --chat, the default is none."},
    )


def run(args: argparse.Namespace) -> int:
    """1 if some requests were refused; the others have finished and are printed."""
    config_fields = given(args, EngineConfig, skip=_NO_FLAGS)
    build(EngineConfig, config_fields)
    jobs = list(_read_jobs(args, given(args, SamplingParams)))
    if not jobs:
        raise UsageError(f"--prompts-file {args.prompts_file} must hold at least one request")
    template = None if args.chat_template is None else args.chat_template.read_text()
    with _destination(args.output_file) as destination:
        if any(job.error is None for job in jobs):
            from jaxserve.llm import LLM

            with LLM(**config_fields) as llm:
                _generate(llm, jobs, template, quiet=args.quiet)
        for job in jobs:
            if job.error is not None:
                source = "stdin" if args.prompts_file == "-" else args.prompts_file
                place = "" if job.line is None else f"{source} line {job.line}: "
                print(f"jaxserve: error: {place}{job.error}", file=sys.stderr)
        as_json = args.json or args.output_file is not None
        for text in _json_lines(jobs) if as_json else _texts(jobs):
            print(text, file=destination)
    return 1 if any(job.error is not None for job in jobs) else 0


def _read_jobs(args: argparse.Namespace, fields: dict[str, Any]) -> Iterator[Job]:
    chat_fields = {"max_tokens": None, **fields}
    params, chat_params = build(SamplingParams, fields), build(SamplingParams, chat_fields)
    if args.prompt is not None:
        if args.chat:
            messages = [{"role": "user", "content": args.prompt}]
            yield Job(messages=messages, params=chat_params)
        else:
            yield Job(prompt=args.prompt, params=params)
        return
    # Bytes that are no UTF-8 become half surrogates, which are refused line by line.
    path = 0 if args.prompts_file == "-" else args.prompts_file
    with open(path, encoding="utf-8", errors="surrogateescape", closefd=path != 0) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                job = Job(line=number)
                try:
                    _read_line(job, line, args.chat, fields, chat_fields)
                except ValueError as error:
                    job.error = " ".join(str(error).split())
                yield job


def _read_line(
    job: Job, line: str, chat: bool, fields: dict[str, Any], chat_fields: dict[str, Any]
) -> None:
    """Fill in what the line asks for. ValueError if it makes no sense."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(record, Mapping):
        raise ValueError(f"must be a JSON object, got {record!r}")
    unknown = [name for name in record if name not in (*_INPUTS, "sampling_params")]
    if unknown:
        raise ValueError(f"unknown {unknown[0]!r}: known are {', '.join(_INPUTS)}, sampling_params")
    inputs = [name for name in _INPUTS if name in record]
    if len(inputs) != 1:
        raise ValueError(f"must have one of {', '.join(_INPUTS)}, got {len(inputs)}")
    value = record[inputs[0]]
    if inputs == ["messages"]:
        job.messages = value
    elif inputs == ["prompt_token_ids"]:
        if not isinstance(value, list) or any(type(token) is not int for token in value):
            raise ValueError("prompt_token_ids must be a list of integers")
        job.prompt = value
    elif not isinstance(value, str):
        raise ValueError(f"prompt must be a string, got {value!r}")
    elif chat:
        job.messages = [{"role": "user", "content": value}]
    else:
        job.prompt = value
    base = fields if job.messages is None else chat_fields
    job.params = SamplingParams(**base | _sampling_fields(record.get("sampling_params", {})))


def _sampling_fields(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"sampling_params must be a JSON object, got {value!r}")
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    for name in value:
        if name not in known:
            raise ValueError(f"sampling_params has no {name!r}: it has {', '.join(sorted(known))}")
    fields = dict(value)
    if fields.get("logit_bias") is not None:
        fields["logit_bias"] = token_biases(fields["logit_bias"])
    name = "structured_outputs"
    if fields.get(name) is not None:
        fields[name] = from_fields(StructuredOutputsParams, name, fields[name])
    return fields


def _generate(llm: "LLM", jobs: list[Job], template: str | None, *, quiet: bool) -> None:
    """Give each job its output, or the reason why it was refused."""
    from jaxserve.llm import RequestErrors

    for job in jobs:
        if job.error is None and job.messages is not None:
            try:
                if llm.tokenizer is None:
                    raise ValueError("chat needs a tokenizer, and this engine has none")
                job.prompt = llm.tokenizer.encode_chat(job.messages, chat_template=template)
            except ValueError as error:
                job.error = str(error)
    ready = [job for job in jobs if job.error is None]
    begin = time.monotonic()
    try:
        outputs = llm.generate(
            [job.prompt for job in ready], [job.params for job in ready], use_tqdm=not quiet
        )
    except RequestErrors as refused:
        outputs = refused.outputs
        for index, reason in refused.errors.items():
            ready[index].error = reason
    seconds = time.monotonic() - begin
    for job, output in zip(ready, outputs, strict=True):
        job.output = output
    answered = [output for output in outputs if output is not None]
    if answered and not quiet:
        print(_summary(answered, seconds), file=sys.stderr)


def _summary(outputs: "list[RequestOutput]", seconds: float) -> str:
    num_in = sum(len(output.prompt_token_ids) for output in outputs)
    num_out = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    return (
        f"{len(outputs)} requests, {num_in} prompt tokens, {num_out} output tokens in "
        f"{seconds:.2f} s: {num_out / seconds:.1f} output tokens/s"
    )


def _texts(jobs: list[Job]) -> Iterator[str]:
    """The answers; labelled where there are several requests or answers."""
    for index, job in enumerate(jobs, start=1):
        for answer in job.output.outputs if job.output else ():
            labels = [str(job.line or index)] if len(jobs) > 1 else []
            labels += [str(answer.index + 1)] if len(job.output.outputs) > 1 else []
            yield f"[{'.'.join(labels)}] {answer.text}" if labels else answer.text


def _json_lines(jobs: list[Job]) -> Iterator[str]:
    for index, job in enumerate(jobs):
        record: dict[str, Any] = {"index": index}
        if job.line is not None:
            record["line"] = job.line
        if job.error is not None:
            record["error"] = job.error
        else:
            record |= _json_output(job)
        yield json.dumps(record, ensure_ascii=False)


def _json_output(job: Job) -> dict[str, Any]:
    output = job.output
    record: dict[str, Any] = {"request_id": output.request_id}
    if job.messages is not None:
        record["messages"] = job.messages
    elif isinstance(job.prompt, str):
        record["prompt"] = job.prompt
    record["prompt_token_ids"] = output.prompt_token_ids
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = _json_logprobs(output.prompt_logprobs)
    record["num_cached_tokens"] = output.num_cached_tokens
    record["outputs"] = []
    for answer in output.outputs:
        fields = {
            "index": answer.index,
            "text": answer.text,
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if answer.logprobs is not None:
            fields["cumulative_logprob"] = answer.cumulative_logprob
            fields["logprobs"] = _json_logprobs(answer.logprobs)
        record["outputs"].append(fields)
    return record


def _json_logprobs(
    positions: "Iterable[dict[int, Logprob] | None]",
) -> list[list[dict[str, Any]] | None]:
    return [
        candidates
        and [{"token_id": token, **dataclasses.asdict(lp)} for token, lp in candidates.items()]
        for candidates in positions
    ]


@contextmanager
def _destination(path: Path | None) -> Iterator[TextIO]:
    """stdout, or a file that appears whole when all is written."""
    if path is None:
        yield sys.stdout
        return
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(f"--output-file {path} must name a file in a folder that exists")
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8", errors="backslashreplace") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
