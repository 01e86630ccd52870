"""The whole command with the demo model."""

import json
import subprocess
import sys

ENGINE = (
    "--model", "smollm2-135m", "--dtype", "float32", "--temperature", "0",
    "--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--max-model-len", "128",
)  # fmt: skip


def jaxserve(*argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxserve", *argv]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=300)


def test_generate_from_stdin():
    lines = [
        {"messages": [{"role": "user", "content": "What is the capital of France?"}]},
        {"prompt": ""},
        {"prompt": "a b c d e", "sampling_params": {"max_tokens": 9, "stop": "i j"}},
    ]
    stdin = "\n".join(map(json.dumps, lines))
    done = jaxserve("generate", *ENGINE, "--prompts-file", "-", "--json", stdin=stdin)
    assert done.returncode == 1, done.stderr
    france, empty, count = map(json.loads, done.stdout.splitlines())
    assert france["outputs"][0]["text"] == "The capital of France is Paris."
    assert france["outputs"][0]["finish_reason"] == "stop"
    assert empty == {"index": 1, "line": 2, "error": "the prompt is empty"}
    assert "jaxserve: error: stdin line 2: the prompt is empty" in done.stderr
    assert count["outputs"][0]["text"] == " f g h "
    assert count["outputs"][0]["stop_reason"] == "i j"
    assert "output tokens/s" in done.stderr


def test_chat_through_a_pipe():
    done = jaxserve("chat", *ENGINE, stdin="What is the capital of France?\n/quit\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "The capital of France is Paris.\n"
