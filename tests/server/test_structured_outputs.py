"""`response_format` and `structured_outputs` over HTTP: answers that validate, and refusals."""

import concurrent.futures
import json
import re
import socket
import time

import jsonschema
import openai
import pytest

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 200, "seed": 1}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SLOW = {"type": "string", "allOf": [{"pattern": f"a.*b{i}"} for i in range(200)]}
"""Takes the compiler ages."""


def json_schema(schema):
    return {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": schema}}


def chat_text(server, **fields):
    response = server.post("/v1/chat/completions", **CHAT | fields)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"]


def test_response_format(fake):
    answer = json.loads(chat_text(fake, response_format=json_schema(PERSON)))
    jsonschema.validate(answer, PERSON)
    assert isinstance(json.loads(chat_text(fake, response_format={"type": "json_object"})), dict)
    assert chat_text(fake, response_format={"type": "text"}) == "hello"


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"json": PERSON}, r'\{\s*"name"\s*:.*\}'),
        ({"json": json.dumps(PERSON)}, r'\{\s*"name"\s*:.*\}'),
        ({"json": PERSON, "disable_any_whitespace": True}, r'\{"name":"[^"]*","age":-?\d+\}'),
        ({"json": PERSON, "whitespace_pattern": " "}, r'\{ ?"name" ?: ?"[^"]*".*\}'),
        ({"regex": r"[a-c]{2}-\d{3}"}, r"[a-c]{2}-\d{3}"),
        ({"choice": ["yes", "no", 'ma"y\\be 😀']}, r'yes|no|ma"y\\be 😀'),
        ({"grammar": 'start: "x" NUMBER\nNUMBER: /[0-9]{2}/'}, r"x\d\d"),
        ({"json_object": True}, r"\{.*\}"),
    ],
)
def test_structured_outputs(fake, fields, pattern):
    assert re.fullmatch(pattern, chat_text(fake, structured_outputs=fields), re.DOTALL)
    body = {"prompt": "hello", "max_tokens": 200, "structured_outputs": fields}
    (choice,) = fake.post("/v1/completions", **body).json()["choices"]
    assert re.fullmatch(pattern, choice["text"], re.DOTALL)
    assert choice["finish_reason"] == "stop"


def test_fields_that_ask_for_nothing(fake):
    assert chat_text(fake, structured_outputs={}) == "hello"
    assert chat_text(fake, structured_outputs={"regex": None, "structural_tag": None}) == "hello"


def test_streamed(fake, events):
    fields = {"response_format": json_schema(PERSON), "n": 2}
    chunks = events(fake, "/v1/chat/completions", **CHAT | fields)
    for index in range(2):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        text = "".join(c["delta"].get("content", "") for c in choices)
        jsonschema.validate(json.loads(text), PERSON)
        assert choices[-1]["finish_reason"] == "stop"


def test_openai_client_parses(fake):
    with openai.OpenAI(base_url=f"{fake.url}/v1", api_key="none", max_retries=0) as client:
        completion = client.chat.completions.create(
            model="fake", **CHAT, response_format=json_schema(PERSON)
        )
        jsonschema.validate(json.loads(completion.choices[0].message.content), PERSON)
        legacy = client.completions.create(
            model="fake", prompt="a", extra_body={"structured_outputs": {"choice": ["b"]}}
        )
        assert legacy.choices[0].text == "b"


def deep(levels):
    return {"items": deep(levels - 1)} if levels else {}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema"),
        ({"response_format": json_schema(None)}, "response_format.json_schema.schema", "an object"),
        ({"response_format": json_schema(deep(64))}, "response_format", "64 levels"),
        (
            {"response_format": json_schema({"type": "text"})},
            "response_format",
            "JSON schema.*Invalid type",
        ),
        (
            {"response_format": json_schema({"items": {"uniqueItems": True}})},
            "response_format",
            "its keyword 'uniqueItems' is not supported",
        ),
        (
            {"response_format": json_schema({"enum": []})},
            "response_format",
            "JSON schema.*Unsatisfiable",
        ),
        ({"response_format": json_schema({"const": 10**400})}, "response_format", "JSON schema"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "response_format",
            "exclude",
        ),
        (
            {"structured_outputs": {"regex": "(a"}},
            "structured_outputs",
            "regular expression.*unclosed group",
        ),
        ({"structured_outputs": {"regex": "a" * 200_000}}, "structured_outputs.regex", "131072"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "one of"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs",
            "whitespace_pattern needs json or json_object, not regex",
        ),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1"),
        (
            {"structured_outputs": {"grammar": "start: a"}},
            "structured_outputs",
            "grammar.*unknown name",
        ),
        (
            {"structured_outputs": {"grammar": "start: start"}},
            "structured_outputs",
            "no text satisfies it",
        ),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "JSON Schema"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag"),
        ({"structured_outputs": "regex"}, "structured_outputs", "must be an object"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_refusals(fake, fields, param, message):
    response = fake.post("/v1/chat/completions", **CHAT | fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert re.search(message, error["message"]), error
    assert "\n" not in error["message"]
    assert error["param"] == param
    assert chat_text(fake) == "hello"


def test_slow_grammars_hold_nobody_up(fake):
    """One is refused, one's client leaves; meanwhile others are served."""
    known = {"structured_outputs": {"choice": ["yes"]}}
    assert chat_text(fake, **known) == "yes"
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        slow = pool.submit(
            fake.post, "/v1/chat/completions", **CHAT, response_format=json_schema(SLOW)
        )
        body = json.dumps(CHAT | {"response_format": json_schema(SLOW | {"maxLength": 9})}).encode()
        host, port = fake.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as gone:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
            gone.sendall(f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + body)
            while fake.http.get("/load").json()["server_load"] < 2 and not slow.done():
                time.sleep(0.01)
        assert chat_text(fake) == "hello"
        assert chat_text(fake, **known) == "yes"
        response = slow.result()
    assert response.status_code == 400, response.text
    assert "takes over 0.5 s" in response.json()["error"]["message"]
    assert chat_text(fake, structured_outputs={"choice": ["new"]}) == "new"
    assert fake.http.get("/load").json()["server_load"] == 0
    assert fake.http.get("/health").status_code == 200


def test_a_grammar_that_outgrows_its_limits(fake):
    """Only following it shows that it does: an error, be something streamed by then or not."""
    tokens = fake.post("/tokenize", prompt="a", add_special_tokens=False).json()["tokens"]
    body = {"prompt": tokens, "max_tokens": 400, "n": 2}
    body["structured_outputs"] = {"regex": "(.{0,1000}a){0,1000}b"}
    response = fake.post("/v1/completions", **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["message"].startswith("the grammar failed: ")
    assert "\n" not in error["message"]
    lines = fake.post("/v1/completions", **body, stream=True).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert events.pop() == {"error": error}
    choices = [choice for event in events for choice in event["choices"]]
    assert len("".join(choice["text"] for choice in choices)) > 100
    assert {choice["finish_reason"] for choice in choices} == {None}
    assert chat_text(fake) == "hello"
    while fake.metric("num_requests_running", engine="0"):
        time.sleep(0.01)
