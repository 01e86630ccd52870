"""What JSON Schema cannot say of a request body: rules between fields, and counts of tokens.

schemathesis makes bodies that obey the document alone, and expects them to be accepted. Here they
are made to obey these rules as well. Nothing else is changed.
"""

from typing import Any

import schemathesis


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case, kwargs: Any) -> None:
    if isinstance(case.body, dict):
        case.body = whole_numbers(case.body)
        for rule in RULES:
            rule(case.body)


def whole_numbers(value: Any) -> Any:
    """To JSON Schema 5.0 is an integer; here, as with OpenAI, it is a float."""
    if isinstance(value, dict):
        return {name: whole_numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [whole_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def given(body: dict[str, Any], name: str, kind: type) -> Any:
    """The field's value if it is of its type, else None; True is no number."""
    value = body.get(name)
    return value if type(value) is kind else None


def few_sequences(body: dict[str, Any]) -> None:
    """prompts x n has a limit."""
    prompts = given(body, "prompt", list)
    if prompts and type(prompts[0]) is not int and len(prompts) * (given(body, "n", int) or 1) > 64:
        body["prompt"] = prompts[:1]


def room_for_min_tokens(body: dict[str, Any]) -> None:
    """min_tokens <= max_tokens."""
    least = given(body, "min_tokens", int)
    for name in ("max_tokens", "max_completion_tokens"):
        most = given(body, name, int)
        if least and most is not None and 0 <= most < least:
            body["min_tokens"] = least = most
    if least and least > 16 and "prompt" in body and body.get("max_tokens") is None:
        body["min_tokens"] = 16


def short_answers(body: dict[str, Any]) -> None:
    """Not a rule: a small machine takes minutes for thousands of tokens."""
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        if (given(body, name, int) or 0) in range(9, 2**31):
            body[name] = 8
    if (given(body, "n", int) or 0) in range(5, 129):
        body["n"] = 4
    limits = ("max_tokens", "max_completion_tokens")
    if "messages" in body and all(body.get(name) is None for name in limits):
        body["max_completion_tokens"] = 8


def streams(body: dict[str, Any]) -> None:
    """stream_options need a stream, and prompt_logprobs none."""
    if isinstance(body.get("stream_options"), dict) and body.get("stream") in (None, False):
        body["stream"] = True
    if body.get("stream") is True and given(body, "prompt_logprobs", int) is not None:
        body["prompt_logprobs"] = None


def scores(body: dict[str, Any]) -> None:
    """A completion of 0 tokens needs echo; top_logprobs need logprobs."""
    if "prompt" in body and given(body, "max_tokens", int) == 0 and body.get("echo") is not True:
        body["max_tokens"] = 1
    if given(body, "top_logprobs", int) and body.get("logprobs") in (None, False):
        body["logprobs"] = True


def messages(body: dict[str, Any]) -> None:
    """Every message has a content; a tool's answer names its call, and only assistants call."""
    for message in given(body, "messages", list) or ():
        if isinstance(message, dict):
            if message.get("content") is None:
                message["content"] = "some text"
            if message.get("role") == "tool" and message.get("tool_call_id") is None:
                message["tool_call_id"] = "call_1"
            if message.get("role") != "assistant" and isinstance(message.get("tool_calls"), list):
                message["tool_calls"] = None


def tools(body: dict[str, Any]) -> None:
    """Tools have names of their own and schemas of objects; a choice needs tools to choose from,
    and "auto" a server that was told how the model writes calls."""
    functions = [
        tool["function"]
        for tool in given(body, "tools", list) or ()
        if isinstance(tool, dict) and isinstance(tool.get("function"), dict)
    ]
    for index, function in enumerate(functions):
        if isinstance(function.get("name"), str) and function["name"]:
            function["name"] = f"function_{index}"
        if isinstance(function.get("parameters"), dict):
            function["parameters"] = {"type": "object", "properties": {}}
    choice = body.get("tool_choice")
    named = isinstance(choice, dict) and isinstance(choice.get("function"), dict)
    if not functions and (choice in ("auto", "required") or named):
        body["tool_choice"] = None
    elif functions and choice in (None, "auto"):
        body["tool_choice"] = "none"
    elif functions and named and isinstance(choice["function"].get("name"), str):
        choice["function"]["name"] = functions[0].get("name")


def grammars(body: dict[str, Any]) -> None:
    """An answer is held to one grammar, which must be one that is known."""
    samples = {"json": {"type": "object"}, "regex": "a+", "grammar": 'start: "a"'}
    structured = given(body, "structured_outputs", dict)
    response_format = given(body, "response_format", dict)
    if structured:
        if isinstance(structured.get("whitespace_pattern"), str):
            structured["whitespace_pattern"] = None
        for name, sample in samples.items():
            texts = str | dict if name == "json" else str
            if isinstance(structured.get(name), texts) and structured[name] != "":
                structured[name] = sample
        names = (*samples, "choice", "json_object")
        kinds = [name for name in names if structured.get(name) not in (None, False)]
        for name in kinds[1:]:
            structured[name] = None
        if structured.get("disable_any_whitespace") is True:
            if not kinds:
                structured["json_object"] = True
            elif kinds[0] not in ("json", "json_object"):
                structured["disable_any_whitespace"] = False
    if response_format:
        schema = response_format.get("json_schema")
        if isinstance(schema, dict) and isinstance(schema.get("schema"), dict):
            schema["schema"] = samples["json"]
        if response_format.get("type") == "json_schema" and schema is None:
            response_format["type"] = "text"
    if body.get("tool_choice") in (None, "none"):
        if structured and response_format:
            body["response_format"] = None
    elif isinstance(body.get("tool_choice"), str | dict):
        body["structured_outputs"] = body["response_format"] = None


def continuation(body: dict[str, Any]) -> None:
    """Only an assistant's message can be continued, and then no other begins."""
    if body.get("continue_final_message") is True:
        if body.get("add_generation_prompt") is True:
            body["add_generation_prompt"] = None
        last = (given(body, "messages", list) or [None])[-1]
        if isinstance(last, dict) and last.get("role") != "assistant":
            body["continue_final_message"] = False


def short_bad_words(body: dict[str, Any]) -> None:
    """A bad word has at most 16 tokens, with or without a space before it."""
    if words := given(body, "bad_words", list):
        body["bad_words"] = [word[:3] if isinstance(word, str) else word for word in words]


def short_prompts(body: dict[str, Any]) -> None:
    """A prompt has at least one token, and fits the model."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        body["prompt"] = prompt[:100] or "x"
    elif isinstance(prompt, list):
        body["prompt"] = [text[:100] or "x" if isinstance(text, str) else text for text in prompt]
    if all_messages := given(body, "messages", list):
        body["messages"] = all_messages[-2:]
        for message in body["messages"]:
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(content, str):
                message["content"] = content[:50]
            for part in content[:] if isinstance(content, list) else ():
                if isinstance(part, dict) and isinstance(part.get("text"), str):
                    part["text"] = part["text"][: 50 // len(content)]


RULES = (
    short_answers, few_sequences, room_for_min_tokens, streams, scores, messages, tools, grammars,
    continuation, short_bad_words, short_prompts,
)  # fmt: skip
