"""Servers in processes of their own on ephemeral ports of the loopback, and a small tokenizer."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
START_S = 300
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PYTHONPATH")
} | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|eos|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TOOL_TEMPLATE = (
    "{{ '<|bos|>' }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% for c in m['tool_calls'] %}[{{ c['id'] }} {{ c['function']['name'] }} "
    "{{ c['function']['arguments'] | tojson }}]{% endfor %}"
    "{% if m['tool_call_id'] %}[{{ m['tool_call_id'] }}]{% endif %}"
    "{% if m['reasoning_content'] %}~{{ m['reasoning_content'] }}~{% endif %}"
    "{{ '<|eos|>' }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if color %}{{ color }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
SPECIALS = ("<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny configuration and a byte-level BPE tokenizer that puts <|bos|> before a text."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    merges = [("l", "l"), ("h", "e"), ("he", "ll"), ("hell", "o"), ("Ġ", "hello")]
    for merge in merges:
        vocab["".join(merge)] = len(vocab)
    backend = Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    from tokenizers.processors import TemplateProcessing

    bos, eos = (backend.token_to_id(text) for text in SPECIALS[:2])
    backend.post_processor = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", bos)]
    )
    backend.save(str(folder / "tokenizer.json"))
    size = backend.get_vocab_size()
    config = {**TINY_CONFIG, "vocab_size": size, "bos_token_id": bos, "eos_token_id": eos}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": SPECIALS[0],
                "eos_token": SPECIALS[1],
                "chat_template": CHAT_TEMPLATE,
                "clean_up_tokenization_spaces": False,
            }
        )
    )
    return folder


class Server:
    """A running server; its log is kept for assertions."""

    def __init__(self, command: list[str], port: int, env: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command, "--port", str(port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT | env,
        )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.url = self.wait_for(r"listening on (http://[\w.:]+)")[1]
            self.http = httpx2.Client(base_url=self.url, timeout=60)
        except BaseException:
            self.process.kill()
            self.process.wait()
            self._reader.join(10)
            self.process.stderr.close()
            raise

    def _read(self) -> None:
        for line in self.process.stderr:
            with self._changed:
                self.lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self.lines.append("")
            self._changed.notify_all()

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def wait_for(self, pattern: str, timeout_s: float = START_S) -> re.Match[str]:
        """The first match in the log, when it is there."""
        with self._changed:
            found = self._changed.wait_for(
                lambda: re.search(pattern, self.log) or self.lines[-1:] == [""], timeout_s
            )
        match = re.search(pattern, self.log)
        assert found, f"no {pattern!r} within {timeout_s} s in:\n{self.log}"
        assert match, f"ended without {pattern!r}:\n{self.log}"
        return match

    def ready(self) -> "Server":
        self.wait_for(r"ready: ")
        return self

    def children(self) -> list[int]:
        """Process ids of its descendants, as the kernel knows them."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has just ended
            if int(fields[1]) == self.process.pid and fields[0] != "Z":
                found.append(int(stat.parent.name))
        return found

    def engine_pids(self) -> list[int]:
        """The children that run engines, by their command lines."""
        return [
            pid
            for pid in self.children()
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]

    def engine_pid(self) -> int:
        (pid,) = self.engine_pids()
        return pid

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 30) -> int:
        return self.process.wait(timeout_s)

    def post(self, path: str, **body: Any) -> httpx2.Response:
        return self.http.post(path, json=body)

    def metric(self, name: str, **labels: str) -> float:
        """The value of one sample of /metrics."""
        from prometheus_client.parser import text_string_to_metric_families

        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                if sample.name == f"jaxserve:{name}" and labels.items() <= sample.labels.items():
                    return sample.value
        raise KeyError(name)

    def ask_to_end(self) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGTERM)

    def end(self) -> None:
        self.http.close()
        try:
            self.wait()
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.wait()
            raise
        finally:
            self._reader.join(10)
            self.process.stderr.close()


@pytest.fixture(scope="session")
def server_environment() -> dict[str, str]:
    return ENVIRONMENT


@pytest.fixture(scope="session")
def start_server() -> Iterator[Callable[..., Server]]:
    """Start a server with the interpreter's arguments; all of them end with the session."""
    started: list[Server] = []

    def start(*arguments: str, port: int = 0, env: Mapping[str, str] | None = None) -> Server:
        started.append(Server([*arguments], port, env or {}))
        return started[-1]

    yield start
    for server in started:
        server.ask_to_end()
    for server in started:
        server.end()


@pytest.fixture(scope="session")
def fake_script() -> str:
    """`jaxserve serve` over the fake engine."""
    return str(HERE / "fake_server.py")


@pytest.fixture(scope="session")
def start_fake(
    start_server: Callable[..., Server], fake_script: str, model_folder: Path
) -> Callable[..., Server]:
    """Start a server over the fake engine, with flags of `jaxserve serve`."""
    return partial(start_server, fake_script, str(model_folder), "--served-model-name", "fake")


@pytest.fixture(scope="session")
def fake(start_fake: Callable[..., Server]) -> Server:
    """The server that most tests share; long prompts take several steps."""
    return start_fake("--step-time", "0.001", "--max-num-batched-tokens", "64").ready()


def events_of(server: Server, path: str, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, which must end with [DONE]."""
    with server.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.fixture(scope="session")
def events() -> Callable[..., list[dict[str, Any]]]:
    return events_of


class Stream:
    """A streamed completion of "abc" over and over, read by a thread of its own. `text` and `error`
    are what has come; `task` ends when the stream has."""

    def __init__(self, pool: ThreadPoolExecutor, server: Server, max_tokens: int = 60) -> None:
        self.text = ""
        self.error: dict[str, Any] | None = None
        self._body = {"prompt": "abc", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        self.task = pool.submit(self._read, server)

    def _read(self, server: Server) -> None:
        with server.http.stream("POST", "/v1/completions", json=self._body) as response:
            assert response.status_code == 200, response.read()
            lines = []
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    self.error = event.get("error", self.error)
                    self.text += event["choices"][0]["text"] if "choices" in event else ""
                lines.append(line)
            assert lines[-2] == "data: [DONE]"


@pytest.fixture(scope="session")
def open_stream() -> type[Stream]:
    """Open a stream, with `Stream`'s arguments."""
    return Stream


@pytest.fixture(scope="session")
def narrow(start_fake: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    """One slot and a short queue, steps of 10 ms, short bodies, and a template of its own."""
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    return start_fake(
        "--step-time", "0.01", "--max-num-seqs", "1", "--max-num-queued-reqs", "2",
        "--scheduling-policy", "priority", "--max-request-bytes", "1000",
        "--chat-template", str(template),
    ).ready()  # fmt: skip


@pytest.fixture(scope="session")
def tool_template(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with a chat template that shows tools, their calls and thoughts."""
    path = tmp_path_factory.mktemp("tools") / "template.jinja"
    path.write_text(TOOL_TEMPLATE)
    return str(path)


@pytest.fixture(scope="session")
def hermes(start_fake: Callable[..., Server], tool_template: str) -> Server:
    """Reads tool calls and thoughts out of what the fake repeats."""
    return start_fake(
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3",
        "--chat-template", tool_template, "--max-model-len", "4096",
    ).ready()  # fmt: skip
