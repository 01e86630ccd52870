"""The command `llm`, told about the server in its extra-openai-models.yaml."""

import json
import os

from harness import FOLDER, MODEL, PERSON, QUESTION, URL, check_person, command, run

(FOLDER / "extra-openai-models.yaml").write_text(
    f"- model_id: small\n  model_name: {MODEL}\n  api_base: {URL}/v1\n"
    "  supports_schema: true\n  supports_tools: true\n"
    f"- model_id: small-text\n  model_name: {MODEL}\n  api_base: {URL}/v1\n  completion: true\n"
)
ENVIRONMENT = os.environ | {"LLM_USER_PATH": str(FOLDER), "OPENAI_API_KEY": "none"}


def llm(*arguments: str) -> str:
    return command("llm", *arguments, env=ENVIRONMENT)


def check_chat():
    options = ("-m", "small", "-o", "temperature", "0", "-o", "max_tokens", "32")
    streamed = llm(*options, QUESTION)
    assert "Paris" in streamed
    assert llm(*options, "--no-stream", QUESTION) == streamed
    assert "Paris" in llm("logs", "-n", "1", "--response")


def check_completion():
    text = llm("-m", "small-text", "-o", "temperature", "0", "-o", "max_tokens", "5", "1, 2, 3,")
    assert "4" in text


def check_json_schema():
    options = ("-m", "small", "-o", "temperature", "0", "-o", "max_tokens", "200")
    check_person(
        json.loads(llm(*options, "--schema", json.dumps(PERSON), "John Doe is 30 years old."))
    )


run(globals(), "llm")
