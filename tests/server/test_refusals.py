"""What a client may not ask for: 4xx in OpenAI's shape, and the next request is fine."""

import concurrent.futures
import json
import random
import re

import pytest

GOOD = {"prompt": "hello", "max_tokens": 3}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def check_alive(server):
    assert server.post("/v1/completions", **GOOD).json()["choices"][0]["text"] == "hello"


def check_error(response, status, param=None):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"]
    assert error["param"] == param
    return error


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": "", "add_special_tokens": False}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [["a"]]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 100}, "n"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [1, 2, 267, 268]}, "prompt[2]"),
        ({"prompt": [[1], [2, 10**30]]}, "prompt[1][1]"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": "1"}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"min_tokens": 4}, "min_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**64}, "seed"),
        ({"seed": -1}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": "x" * 2000}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, 'logit_bias["1"]'),
        ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"bad_words": "x"}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"priority": "high"}, "priority"),
        ({"priority": 1}, "priority"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_impossible_completions(fake, changes, param):
    check_error(fake.post("/v1/completions", **GOOD | changes), 400, param)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        (
            {
                "messages": [
                    CHAT["messages"][0],
                    {"role": "user", "content": [{"type": "image_url"}]},
                ]
            },
            "messages[1].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0]"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_impossible_chats(fake, changes, param):
    check_error(fake.post("/v1/chat/completions", **CHAT | changes), 400, param)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": "hi"}, 'messages: must be a list, got "hi"'),
        ({"messages": [{"role": "user", "content": 1}]},
         "messages[0].content: must be a string or a list, got 1"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]},
         "messages[0].content[0].type: must be 'text', got \"image_url\""),
        (CHAT | {"n": "1", "stop": ["x"] * 65},
         'n: must be an integer, got "1", stop: must have a length of at most 64, got 65'),
        (CHAT | {"max_tokens": 10**30, "stop": "y" * 2000},
         "stop: must have a length of at most 1024, got 2000, max_tokens: must be at most "
         f"2147483647, got {10**30}"),
        (CHAT | {"seed": 10**300, "temperature": "h" * 99},
         f'temperature: must be a number, got "{"h" * 40}"..., seed: must be at most '
         "18446744073709551615, got a longer number"),
        ({}, "messages: is required"),
        ([], "the body must be a JSON object, got a list"),
        ("x" * 99, f'the body must be a JSON object, got "{"x" * 40}"...'),
        (None, "the body must be a JSON object"),
    ],
    ids=range(10),
)  # fmt: skip
def test_messages_are_in_plain_words(fake, body, message):
    response = fake.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == message


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/detokenize"])
def test_an_empty_body_is_told_what_it_must_be(fake, path):
    error = check_error(fake.http.post(path), 400)
    assert error["message"] == "the body must be a JSON object"


def test_an_impossible_token_id_is_named_and_not_repeated_at_length(fake):
    for path, name in (("/v1/completions", "prompt"), ("/detokenize", "tokens")):
        error = check_error(fake.post(path, **{name: [5, 267]}), 400, f"{name}[1]")
        assert error["message"] == f"{name}[1]: must be a token id from 0 to 266, got 267"
    error = check_error(fake.post("/v1/completions", prompt=[10**4000]), 400, "prompt[0]")
    assert error["message"].endswith("got a longer number")


def test_what_asks_for_nothing_is_fine(fake):
    nothing = {"tools": [], "response_format": {"type": "text"}, "user": "me", "store": False}
    nothing |= {"stop": None, "logit_bias": {}, "temperature": None, "n": None, "seed": None}
    assert fake.post("/v1/chat/completions", **CHAT | nothing).status_code == 200


@pytest.mark.parametrize("token", [-1, 267, 2**31, 2**63, 2**100])
@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids", "allowed_token_ids"])
def test_fault_14_token_ids_outside_the_vocabulary(fake, name, token):
    value = {str(token): 1.0} if name == "logit_bias" else [token]
    check_error(fake.post("/v1/completions", **GOOD, **{name: value}), 400, name)
    check_alive(fake)


def test_fault_15_lengths(fake):
    limit = 512
    longest = fake.post("/v1/completions", prompt=[71] * (limit - 1), max_tokens=10).json()
    assert longest["usage"]["completion_tokens"] == 1
    assert longest["choices"][0]["finish_reason"] == "length"
    for prompt in ([71] * limit, "a" * limit):
        error = check_error(fake.post("/v1/completions", prompt=prompt), 400, "prompt")
        assert error["code"] == "context_length_exceeded"
        length = limit + isinstance(prompt, str)
        assert f"{length} tokens" in error["message"]
        assert f"max_model_len={limit}" in error["message"]
    error = check_error(
        fake.post("/v1/chat/completions", messages=[{"role": "user", "content": "a" * limit}]),
        400,
        "prompt",
    )
    assert f"{limit + 5 - 1} tokens" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": ' + b"[" * 100_000,
    ],
    ids=range(10),
)
def test_bodies_that_are_no_request(fake, body):
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        response = fake.http.post(path, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["message"]
    check_alive(fake)


def test_random_bodies_are_never_the_servers_fault(fake):
    rng = random.Random(0)
    values = [None, True, 0, -1, 1, 2**40, 0.5, "", "x", [], ["x"], [1], {}, {"1": 1}, [[1]], [{}]]
    names = ["prompt", "messages", "n", "max_tokens", "temperature", "top_p", "top_k", "seed"]
    names += ["stop", "logprobs", "echo", "logit_bias", "stream_options", "min_tokens", "model"]
    names += ["stop_token_ids", "bad_words", "allowed_token_ids", "prompt_logprobs", "priority"]
    names += ["tool_choice", "parallel_tool_calls", "chat_template_kwargs", "include_reasoning"]
    names += ["top_logprobs", "tools", "response_format", "add_special_tokens", "tokens"]
    statuses = set()
    for i in range(400):
        base = dict(GOOD if i % 2 else CHAT)
        base |= {rng.choice(names): rng.choice(values) for _ in range(rng.randint(1, 3))}
        path = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")[i % 4]
        statuses.add(fake.post(path, **base).status_code)
    assert statuses <= {200, 400, 404}
    assert statuses >= {200, 400}


def test_a_body_that_is_not_called_json(fake):
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        response = fake.http.post(
            "/v1/completions", content=json.dumps(GOOD), headers={"Content-Type": kind}
        )
        assert "application/json" in check_error(response, 415)["message"]
    check_alive(fake)


def test_wrong_paths_and_methods(fake):
    check_error(fake.http.get("/v1/nothing"), 404)
    check_error(fake.http.get("/v1/completions"), 405)
    check_error(fake.post("/v1/completions", **GOOD, model="other"), 404, "model")


def test_a_body_over_the_limit(narrow):
    check_error(narrow.post("/v1/completions", prompt="x" * 1000), 413)
    chunks = (b"x" * 100 for _ in range(100))  # without a Content-Length
    headers = {"content-type": "application/json"}
    check_error(narrow.http.post("/v1/completions", content=chunks, headers=headers), 413)
    check_alive(narrow)


def health_answers_during(server, path, body):
    """The response to a long request, and how many times /health answered meanwhile."""
    headers = {"content-type": "application/json"}
    count = 0
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        task = pool.submit(server.http.post, path, content=body, headers=headers)
        while not task.done():
            assert server.http.get("/health").status_code == 200
            count += 1
    return task.result(), count


@pytest.fixture(scope="module")
def long_model(start_fake):
    return start_fake("--max-model-len", "200000").ready()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello " * 600_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello " * 600_000}]}),
    ],
    ids=["completion", "chat"],
)
def test_a_long_prompt_does_not_freeze_the_server(long_model, path, body):
    """It is tokenised to its end, which takes a second or so, before it is refused."""
    response, count = health_answers_during(long_model, path, json.dumps(body).encode())
    error = check_error(response, 400, "prompt")
    assert re.search(r"60\d{4} tokens", error["message"])
    assert count > 20


@pytest.mark.parametrize("prompt", ["hello " * 3_300_000, [71] * 5_000_000], ids=["text", "ids"])
def test_a_prompt_that_cannot_fit_does_not_freeze_the_server(fake, prompt):
    body = json.dumps({"prompt": prompt}).encode()
    assert len(body) > 19_000_000
    response, count = health_answers_during(fake, "/v1/completions", body)
    assert check_error(response, 400, "prompt")["code"] == "context_length_exceeded"
    assert count > 5


def keys(count):
    return {f"k{i}": i for i in range(count)}


@pytest.mark.parametrize(
    "body",
    [
        GOOD | keys(500_000),
        CHAT | {"chat_template_kwargs": keys(500_000)},
        {"messages": [{"role": "user", "content": [{}] * 1_000_000}]},
        GOOD | {"x": [[]] * 1_000_000},
        GOOD | {"stop": ["x"] * 1_000_000},
    ],
    ids=["keys", "nested", "parts", "lists", "strings"],
)
def test_a_body_of_very_many_values_is_not_parsed(fake, body):
    """Which would hold the interpreter's lock for seconds."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    error = check_error(fake.post(path, **body), 400)
    assert "at most 65536 strings, lists and objects" in error["message"]
    check_alive(fake)


@pytest.mark.parametrize(
    "changes",
    [
        {"content": [1] * 1_000_000},
        {"role": "assistant", "content": None, "tool_calls": [1] * 1_000_000},
    ],
    ids=["content", "tool_calls"],
)
def test_one_fault_of_many_is_enough(fake, changes):
    """Each would take time to describe."""
    response = fake.post("/v1/chat/completions", messages=[CHAT["messages"][0] | changes])
    (name,) = {"content", "tool_calls"} & {n for n, value in changes.items() if value}
    check_error(response, 400, f"messages[0].{name}[0]")
    assert len(response.content) < 1000


@pytest.mark.parametrize("key", ["x" * 100_000, "1 " * 50_000])
def test_a_long_key_is_not_repeated(fake, key):
    response = fake.post("/v1/completions", **GOOD, logit_bias={key: "much"})
    error = check_error(response, 400, f'logit_bias["{key[:40]}"...]')
    assert len(error["message"]) < 200


def test_of_many_faults_some_are_told(fake):
    response = fake.post("/v1/completions", **GOOD, stop=[1] * 64)
    error = check_error(response, 400, "stop[0]")
    assert error["message"].endswith("stop[7]: must be a string, got 1, and 56 more")


def test_what_text_holds_is_not_counted(fake):
    text = '"}{][\\' * 40_000
    error = check_error(fake.post("/v1/completions", prompt=text), 400, "prompt")
    assert error["code"] == "context_length_exceeded"
    ids = fake.post("/v1/completions", prompt=[71] * 200_000)
    assert check_error(ids, 400, "prompt")["code"] == "context_length_exceeded"
