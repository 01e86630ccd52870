"""What a client may not ask for: 4xx in OpenAI's shape, and the next request is fine."""

import concurrent.futures
import json
import random
import time

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
        ({"prompt": [-1]}, None),
        ({"prompt": [267]}, None),
        ({"prompt": [10**30]}, None),
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
        ({"stop": [""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": "x" * 2000}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, None),
        ({"stream_options": {"include_usage": True}}, None),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": "x"}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"priority": "high"}, "priority"),
        ({"suffix": "x"}, None),
        ({"best_of": 2}, None),
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
        ({"messages": [{"content": "hi"}]}, "messages"),
        ({"messages": [{"role": "king", "content": "hi"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, None),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"continue_final_message": True}, None),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "xml"}}, "response_format"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_impossible_chats(fake, changes, param):
    check_error(fake.post("/v1/chat/completions", **CHAT | changes), 400, param)


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


def test_a_long_prompt_does_not_freeze_the_server(fake):
    """20 MB of text, and as many ids, are refused while /health goes on answering."""
    headers = {"content-type": "application/json"}

    def send(prompt):
        body = json.dumps({"prompt": prompt}).encode()
        assert len(body) > 19_000_000
        return fake.http.post("/v1/completions", content=body, headers=headers)

    slowest = 0.0
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for prompt in ("hello " * 3_300_000, [71] * 5_000_000):
            task = pool.submit(send, prompt)
            while not task.done():
                begin = time.monotonic()
                assert fake.http.get("/health").status_code == 200
                slowest = max(slowest, time.monotonic() - begin)
            error = check_error(task.result(), 400, "prompt")
            assert error["code"] == "context_length_exceeded"
    assert slowest < 5.0  # far more than it takes, for busy machines
