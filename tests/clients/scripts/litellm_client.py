"""litellm, as OpenAI's and as vLLM's."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # before the import: not over the network

import litellm
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

litellm.num_retries = 0
CHAT = {
    "api_base": f"{URL}/v1",
    "api_key": "none",
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
    "max_tokens": 32,
}
PROVIDERS = (f"openai/{MODEL}", f"hosted_vllm/{MODEL}")


def check_chat():
    for model in PROVIDERS:
        answer = litellm.completion(model=model, **CHAT)
        assert "Paris" in answer.choices[0].message.content
        assert answer.usage.completion_tokens > 3


def check_chat_stream():
    for model in PROVIDERS:
        chunks = list(litellm.completion(model=model, **CHAT, stream=True))
        assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert chunks[-1].choices[0].finish_reason == "stop"


def check_completion():
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        prompt="The capital of France is",
        api_base=f"{URL}/v1",
        api_key="none",
        temperature=0,
        max_tokens=4,
    )
    assert answer.choices[0].text.startswith(" Paris")


def check_errors():
    with refused(litellm.BadRequestError) as caught:
        litellm.completion(model=f"openai/{MODEL}", **CHAT | {"temperature": -1})
    assert "temperature" in str(caught[0])


def check_required_tool():
    for model in PROVIDERS:
        body = CHAT | {"max_tokens": 200, "tools": [WEATHER], "tool_choice": "required"}
        choice = litellm.completion(model=model, **body).choices[0]
        call = choice.message.tool_calls[0]
        assert call.function.name == "get_weather"
        # hosted_vllm takes additionalProperties out of the schema, and the model adds without end.
        if choice.finish_reason == "tool_calls" or model.startswith("openai/"):
            check_weather_arguments(call.function.arguments)


def check_json_schema():
    schema = {"name": "person", "schema": PERSON, "strict": True}
    for model in PROVIDERS:
        answer = litellm.completion(
            model=model,
            **CHAT | {"max_tokens": 200},
            response_format={"type": "json_schema", "json_schema": schema},
        )
        check_person(json.loads(answer.choices[0].message.content))


run(globals(), "litellm")
