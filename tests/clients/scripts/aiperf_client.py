"""aiperf: a minute of streamed chats, measured as it measures any server."""

import json

from harness import FIGURES, FOLDER, MODEL, MODEL_FOLDER, URL, command, run


def check_one_minute_of_chats():
    command(
        "aiperf",
        "profile", "--model", MODEL, "--url", URL, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", MODEL_FOLDER, "--concurrency", "4", "--benchmark-duration", "60",
        "--benchmark-grace-period", "60", "--synthetic-input-tokens-mean", "40",
        "--output-tokens-mean", "16", "--ui", "none", "--artifact-dir", str(FOLDER),
        "--num-dataset-entries", "20", "--random-seed", "1",
        timeout_s=600,
    )  # fmt: skip
    (path,) = FOLDER.rglob("profile_export_aiperf.json")
    result = json.loads(path.read_text())
    FIGURES["requests"] = result["request_count"]["avg"]
    assert FIGURES["requests"] >= 4, result
    assert not (result.get("error_request_count") or {"avg": 0})["avg"], result
    assert result["time_to_first_token"]["p50"] > 0


run(globals(), "aiperf")
