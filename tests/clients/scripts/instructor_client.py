"""instructor: answers as pydantic models, by a tool and by a JSON schema."""

import instructor
import openai
from harness import MODEL, URL, run
from pydantic import BaseModel, ConfigDict, Field


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")  # a small model would add keys without end
    name: str = Field(max_length=30)
    age: int = Field(ge=0, le=150)


def ask(mode: instructor.Mode, **extra: object) -> Person:
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0), mode=mode
    )
    return client.chat.completions.create(
        model=MODEL,
        response_model=Person,
        max_retries=1,
        messages=[{"role": "user", "content": "John Doe is 30 years old."}],
        temperature=0,
        max_tokens=200,
        **extra,
    )


def check_tools():
    assert isinstance(ask(instructor.Mode.TOOLS), Person)


def check_strict_tools():
    assert isinstance(ask(instructor.Mode.TOOLS_STRICT), Person)


def check_json_schema():
    assert isinstance(ask(instructor.Mode.JSON_SCHEMA), Person)


run(globals(), "instructor")
