"""The demo model behind the server, with OpenAI's client: calls that its grammar makes sure of."""

import json

import openai
import pytest

FLAGS = (
    "--dtype", "float32", "--max-num-seqs", "2", "--max-num-batched-tokens", "16",
    "--max-model-len", "256", "--kv-cache-memory-bytes", "100000000",
)  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 20},
                    "unit": {"enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 20}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
MESSAGES = [{"role": "user", "content": "What is the weather like in Paris, in celsius?"}]
BODY = {"model": "smollm2-135m", "tools": TOOLS, "temperature": 0, "max_tokens": 120}


@pytest.fixture(scope="module")
def client(start_server):
    server = start_server("-m", "jaxserve", "serve", "smollm2-135m", *FLAGS)
    server.wait_for(r"ready: ", timeout_s=400)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def check(choice, reason):
    assert choice.finish_reason == reason
    assert not choice.message.content
    for call in choice.message.tool_calls:
        arguments = json.loads(call.function.arguments)
        assert len(arguments["city"]) <= 20
        if call.function.name == "get_weather":
            assert arguments["unit"] in ("celsius", "fahrenheit")
        else:
            assert call.function.name == "get_time"


@pytest.mark.parametrize(("tool_choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
def test_calls_streamed_and_whole(client, tool_choice, reason):
    body = {**BODY, "tool_choice": tool_choice, "parallel_tool_calls": False}
    whole = client.chat.completions.create(messages=MESSAGES, **body).choices[0]
    check(whole, reason)
    assert len(whole.message.tool_calls) == 1
    with client.chat.completions.stream(messages=MESSAGES, **body) as events:
        streamed = events.get_final_completion().choices[0]
    check(streamed, reason)
    first, second = whole.message.tool_calls[0], streamed.message.tool_calls[0]
    assert first.id != second.id
    assert first.function.name == second.function.name
    assert first.function.arguments == second.function.arguments
    # The call and its answer go back to the model.
    answered = [
        *MESSAGES,
        whole.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": first.id, "content": "Sunny."},
    ]
    after = client.chat.completions.create(messages=answered, **BODY, tool_choice="none")
    assert after.choices[0].message.content
    assert not after.choices[0].message.tool_calls
