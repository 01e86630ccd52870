"""OpenAI's own client for Python."""

import asyncio
import json

import openai
from harness import (
    MODEL,
    PERSON,
    QUESTION,
    URL,
    WEATHER,
    check_person,
    check_weather_arguments,
    refused,
    run,
)
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
MESSAGES = [{"role": "user", "content": QUESTION}]
CHAT = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 32}
COMPLETION = {"model": MODEL, "prompt": "The capital of France is", "temperature": 0}


class Person(BaseModel):
    name: str = Field(max_length=30)
    age: int = Field(ge=0, le=150)


def check_models():
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.list().data[0].owned_by == "jaxserve"


def check_chat():
    answer = client.chat.completions.create(**CHAT)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def check_chat_stream():
    whole = client.chat.completions.create(**CHAT).choices[0].message.content
    with client.chat.completions.stream(**CHAT, stream_options={"include_usage": True}) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole
    assert final.usage.completion_tokens > 3


def check_several_answers_and_logprobs():
    answer = client.chat.completions.create(
        **CHAT | {"temperature": 1}, n=3, seed=1, logprobs=True, top_logprobs=4
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        for entry in choice.logprobs.content:
            assert len(entry.top_logprobs) == 4
            assert entry.logprob <= 0
    assert len({choice.message.content for choice in answer.choices}) > 1


def check_completion():
    answer = client.completions.create(**COMPLETION, max_tokens=4, logprobs=2, echo=True)
    assert answer.choices[0].text.startswith("The capital of France is Paris")
    assert answer.choices[0].logprobs.text_offset[0] == 0
    assert answer.choices[0].finish_reason == "length"


def check_completion_stream():
    whole = client.completions.create(**COMPLETION, max_tokens=24).choices[0].text
    stream = client.completions.create(**COMPLETION, max_tokens=24, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole


def check_several_prompts():
    answer = client.completions.create(
        model=MODEL, prompt=["one two", "three four"], max_tokens=3, extra_body={"top_k": 1}
    )
    assert [choice.index for choice in answer.choices] == [0, 1]


def check_stop():
    answer = client.completions.create(**COMPLETION, max_tokens=30, stop=["."])
    assert answer.choices[0].text == " Paris"
    assert answer.choices[0].finish_reason == "stop"


def check_errors():
    for changes, kind in (
        ({"model": "another"}, openai.NotFoundError),
        ({"temperature": -1}, openai.BadRequestError),
        ({"messages": []}, openai.BadRequestError),
    ):
        with refused(kind) as caught:
            client.chat.completions.create(**CHAT | changes)
        assert caught[0].body["message"]


def check_many_at_once():
    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none") as many:
            asked = [many.chat.completions.create(**CHAT) for _ in range(12)]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]

    assert len(set(asyncio.run(ask_all()))) == 1


def check_a_stream_that_is_closed():
    stream = client.chat.completions.create(**CHAT | {"max_tokens": 500}, stream=True)
    next(iter(stream))
    stream.close()
    assert client.chat.completions.create(**CHAT).choices


def check_json_object():
    answer = client.chat.completions.create(
        **CHAT | {"max_tokens": 200}, response_format={"type": "json_object"}
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "length" or isinstance(
        json.loads(choice.message.content), dict
    ), choice


def check_json_schema():
    schema = {"name": "person", "schema": PERSON, "strict": True}
    body = CHAT | {
        "messages": [{"role": "user", "content": "John Doe is 30 years old."}],
        "max_tokens": 200,
    }
    body["response_format"] = {"type": "json_schema", "json_schema": schema}
    check_person(json.loads(client.chat.completions.create(**body).choices[0].message.content))
    stream = client.chat.completions.create(**body, stream=True)
    text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
    check_person(json.loads(text))


def check_parse():
    answer = client.chat.completions.parse(
        **CHAT
        | {
            "messages": [{"role": "user", "content": "John Doe is 30 years old."}],
            "max_tokens": 200,
        },
        response_format=Person,
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def check_structured_outputs():
    def ask(**structured):
        answer = client.completions.create(
            **COMPLETION, max_tokens=20, extra_body={"structured_outputs": structured}
        )
        return answer.choices[0].text

    assert ask(choice=["Berlin", "Rome"]) in ("Berlin", "Rome")
    assert ask(regex="[0-9]{3}-[0-9]{2}")[3] == "-"


def check_required_tool():
    answer = client.chat.completions.create(
        **CHAT | {"max_tokens": 200}, tools=[WEATHER], tool_choice="required"
    )
    choice = answer.choices[0]
    (call,) = choice.message.tool_calls[:1]
    assert call.function.name == "get_weather"
    assert choice.finish_reason == "tool_calls"
    check_weather_arguments(call.function.arguments)


def check_named_tool_streamed():
    named = {"type": "function", "function": {"name": "get_weather"}}
    body = CHAT | {"max_tokens": 200, "tools": [WEATHER], "tool_choice": named}
    with client.chat.completions.stream(**body) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls[0].function.name == "get_weather"
    assert message.tool_calls[0].id
    check_weather_arguments(message.tool_calls[0].function.arguments)


def check_tool_result():
    """The second half of a call: the tool's answer goes back."""
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris", "unit": "celsius"}'},
    }
    messages = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees and sunny"},
    ]
    answer = client.chat.completions.create(**CHAT | {"messages": messages}, tools=[WEATHER])
    assert answer.choices[0].message.content is not None or answer.choices[0].message.tool_calls


def check_tools_that_may_not_be_called():
    answer = client.chat.completions.create(**CHAT, tools=[WEATHER], tool_choice="none")
    assert not answer.choices[0].message.tool_calls
    assert answer.choices[0].message.content


run(globals(), "openai")
