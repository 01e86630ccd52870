"""The command in this process, over an engine that answers with the prompt read backwards."""

import json

import pytest

from jaxserve import CompletionOutput, Logprob, RequestErrors, RequestMetrics, RequestOutput


class FakeTokenizer:
    """One token a character. Templates are ignored, but for showing that they came."""

    def encode_chat(self, messages, chat_template=None):
        if not all(isinstance(m, dict) and "role" in m for m in messages):
            raise ValueError("messages[0] must have a 'role'")
        text = "".join(f"{m['role'][0]}:{m['content']};" for m in messages)
        return [ord(char) for char in text + (chat_template or "")]


class FakeLLM:
    """Refuses prompts that hold "bad"."""

    made: list["FakeLLM"] = []  # noqa: RUF012

    def __init__(self, model, **fields):
        if model == "missing":
            raise ValueError("no model 'missing':\n give another")
        self.model, self.fields, self.closed = model, fields, False
        self.calls = []
        self.tokenizer = None if fields.get("skip_tokenizer_init") else FakeTokenizer()
        FakeLLM.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def close(self):
        self.closed = True

    def generate(self, prompts, params, *, use_tqdm):
        self.calls.append((prompts, params, use_tqdm))
        outputs, errors = [], {}
        for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            if prompt == "interrupt":
                raise KeyboardInterrupt
            if prompt == "bug":
                raise KeyError("lost")
            try:
                outputs.append(answer(prompt, p, f"request-{i}"))
            except ValueError as error:
                outputs.append(None)
                errors[i] = str(error)
        if errors:
            raise RequestErrors(errors, outputs)
        return outputs


def answer(prompt, params, request_id):
    ids = [ord(char) for char in prompt] if isinstance(prompt, str) else prompt
    text = "".join(map(chr, ids))
    if "bad" in text:
        raise ValueError("the prompt is bad")
    logprobs = None if params.logprobs is None else [{65: Logprob(-0.5, 1, "A")}]
    return RequestOutput(
        request_id=request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=ids,
        outputs=[
            CompletionOutput(
                index=n,
                text=text[::-1],
                token_ids=ids[::-1],
                finish_reason="stop",
                logprobs=logprobs,
                cumulative_logprob=None if logprobs is None else -0.5,
            )
            for n in range(params.n)
        ],
        metrics=RequestMetrics(arrival_s=0.0),
        prompt_logprobs=None if params.prompt_logprobs is None else [None, logprobs[0]],
    )


class FakeAsyncLLM(FakeLLM):
    """Streams a character at a time; "interrupt" is cut short by Ctrl-C after three."""

    async def generate(self, prompt, params):
        self.calls.append((prompt, params))
        whole = answer(prompt, params, "request-0")
        text = whole.outputs[0].text
        for end in range(1, len(text) + 1):
            whole.outputs[0].text = text[:end]
            yield whole
            if end == 3 and "interrupt" in text[::-1]:
                raise KeyboardInterrupt


@pytest.fixture
def engines(monkeypatch):
    """All engines that the command has made."""
    monkeypatch.setattr("jaxserve.llm.LLM", FakeLLM)
    monkeypatch.setattr("jaxserve.llm.AsyncLLM", FakeAsyncLLM)
    monkeypatch.setattr(FakeLLM, "made", [])
    return FakeLLM.made


@pytest.fixture
def cli(engines, cli):
    """As everywhere, with these engines."""
    return cli


@pytest.fixture
def prompts_file(tmp_path):
    """Writes lines (JSON values, or text as it is) to a file."""

    def write(*lines: object):
        path = tmp_path / "prompts.jsonl"
        path.write_text(
            "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        )
        return path

    return write
