"""/v1/chat/completions, by hand and with OpenAI's own client."""

import openai
import pytest


@pytest.fixture(scope="module")
def client(fake):
    with openai.OpenAI(base_url=f"{fake.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(server, content, **body):
    return server.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": content}], **body
    )


def test_an_answer(fake):
    # The fake repeats the rendered conversation, up to the first end of sequence.
    answer = chat(fake, "hello é😀").json()
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello é😀"}
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] == 12
    assert answer["id"].startswith("chatcmpl-")


def test_roles_reach_the_template(fake):
    messages = [
        {"role": "system", "content": "S"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "U1"}, {"type": "text", "text": "U2"}],
        },
        {"role": "assistant", "content": "A"},
        {"role": "tool", "content": "T", "tool_call_id": "x"},
    ]
    tokens = fake.post("/tokenize", messages=messages).json()["tokens"]
    text = fake.post("/detokenize", tokens=tokens).json()["prompt"]
    assert text == (
        "<|bos|><|system|>S<|eos|><|user|>U1\nU2<|eos|><|assistant|>A<|eos|><|tool|>T<|eos|>"
        "<|assistant|>"
    )
    messages[0]["role"] = "developer"
    assert fake.post("/tokenize", messages=messages).json()["tokens"] == tokens


def test_fault_15_one_bos(fake):
    messages = [{"role": "user", "content": "hi"}]
    tokens = fake.post("/tokenize", messages=messages).json()["tokens"]
    assert tokens.count(261) == 1
    text = fake.post("/detokenize", tokens=tokens).json()["prompt"]
    # The same conversation, rendered by the client: its bos is not doubled either.
    assert fake.post("/tokenize", prompt=text).json()["tokens"] == tokens
    answer = fake.post("/v1/chat/completions", messages=messages).json()
    assert answer["usage"]["prompt_tokens"] == len(tokens)


def test_the_last_message_is_continued(fake):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}]
    body = {"messages": messages, "continue_final_message": True, "return_token_strs": True}
    strings = fake.post("/tokenize", **body).json()["token_strs"]
    assert "".join(strings) == "<|bos|><|user|>hi<|eos|><|assistant|>well"
    strings = fake.post(
        "/tokenize", messages=messages[:1], add_generation_prompt=False, return_token_strs=True
    ).json()["token_strs"]
    assert strings[-1] == "<|eos|>"


def test_a_template_of_the_operators(narrow):
    answer = chat(narrow, "ab", max_tokens=6).json()
    assert answer["choices"][0]["message"]["content"] == "[ab][a"


def test_limits_on_the_answer(fake):
    for name in ("max_tokens", "max_completion_tokens"):
        answer = chat(fake, "abcdefgh", **{name: 4}).json()
        assert answer["usage"]["completion_tokens"] == 4
        assert answer["choices"][0]["finish_reason"] == "length"


def test_logprobs_with_bytes(fake, events):
    body = {"logprobs": True, "top_logprobs": 2, "max_tokens": 5}
    content = chat(fake, "é", **body).json()["choices"][0]["logprobs"]["content"]
    assert (
        bytes(b for entry in content for b in entry["bytes"]) == "<|bos|><|user|>é<|eos|>".encode()
    )
    for entry in content:
        assert [top["logprob"] for top in entry["top_logprobs"]] == [
            entry["logprob"],
            entry["logprob"] - 1,
        ]
    chunks = events(
        fake, "/v1/chat/completions", messages=[{"role": "user", "content": "é"}], **body
    )
    streamed = [
        entry
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert streamed == content
    content = chat(fake, "é", logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert content[0]["top_logprobs"] == []


def test_openai_client(client):
    messages = [{"role": "user", "content": "hello world"}]
    answer = client.chat.completions.create(model="fake", messages=messages, n=2, seed=1)
    assert [choice.message.content for choice in answer.choices] == ["hello world"] * 2
    answer = client.completions.create(
        model="fake", prompt=["ab", "cd"], max_tokens=3, logprobs=1, extra_body={"top_k": 3}
    )
    assert [choice.text for choice in answer.choices] == ["ab", "cd"]
    assert answer.choices[1].logprobs.tokens == ["<|bos|>", "c", "d"]
    assert [model.id for model in client.models.list()] == ["fake"]


def test_openai_client_streams(client):
    messages = [{"role": "user", "content": "hello é"}]
    stream = client.chat.completions.create(
        model="fake", messages=messages, n=2, stream=True, stream_options={"include_usage": True}
    )
    texts, roles, reasons, usage = ["", ""], [None, None], [None, None], None
    for chunk in stream:
        for choice in chunk.choices:
            roles[choice.index] = choice.delta.role or roles[choice.index]
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason
        usage = chunk.usage or usage
    assert texts == ["hello é"] * 2
    assert roles == ["assistant"] * 2
    assert reasons == ["stop"] * 2
    assert usage.completion_tokens == 2 * 7


def test_openai_client_sees_errors(client):
    with pytest.raises(openai.NotFoundError, match="no model 'other' here, only 'fake'"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.completions.create(model="fake", prompt="x", temperature=-1)
    assert caught.value.param == "temperature"
