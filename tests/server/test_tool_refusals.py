"""Requests with tools and reasoning that are refused, in words that say why."""

import json

import pytest


def content_of(server, text, **body):
    """What the fake repeats: the first message."""
    messages = [{"role": "user", "content": text}]
    response = server.post("/v1/chat/completions", messages=messages, **body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def refusal(server, **body):
    body = {"messages": [{"role": "user", "content": "hi"}], **body}
    response = server.post("/v1/chat/completions", **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert "\n" not in error["message"]
    return error["param"], error["message"]


def tool(name="f", **fields):
    return {"type": "function", "function": {"name": name, **fields}}


TOOLS = [tool()]


def nested(depth):
    return {"x": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].type", "function"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
        ({"tools": [tool("")]}, "tools[0].function.name", "at least 1"),
        ({"tools": {"name": "f"}}, "tools", "list"),
        ({"tools": [tool(), tool()]}, "tools", "2 functions are named 'f'"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters", "an object"),
        ({"tools": [tool(parameters={"type": "string"})]}, "tools", "of function 'f'"),
        ({"tools": [tool(parameters={"properties": []})]}, "tools", "function 'f'"),
        ({"tools": [tool(str(i)) for i in range(513)]}, "tools", "at most 512"),
        ({"tools": [tool(description="x" * (1 << 20))]}, "tools", "at most 1048576 bytes"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": "auto", "tools": []}, "tool_choice", "needs tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "'none', 'auto' or 'required'"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "no function of tools is named 'g'",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function", "required"),
        (
            {"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "exclude",
        ),
        (
            {
                "tools": [tool(parameters={"properties": {"a": {"type": "nope"}}})],
                "tool_choice": "required",
            },
            "tools",
            "Invalid type",
        ),
        (
            {"tools": [tool(parameters={"default": "x" * 140_000})], "tool_choice": "required"},
            "tools",
            "at most 131072 bytes",
        ),
        ({"functions": [{"name": "f"}]}, "functions", "functions is not supported"),
        ({"function_call": {"name": "f"}}, "function_call", "function_call is not supported"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "chat_template is not supported"),
        (
            {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
            "chat_template_kwargs",
            "chat_template",
        ),
        (
            {"chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs",
            "must not set messages",
        ),
        (
            {"chat_template_kwargs": {"tokenize": True, "tools": 1}},
            "chat_template_kwargs",
            "tokenize, tools",
        ),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "must not set self"),
        (
            {"chat_template_kwargs": {"conversations": 1}},
            "chat_template_kwargs",
            "must not set conversations",
        ),
        ({"chat_template_kwargs": ["x"]}, "chat_template_kwargs", "an object"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "medium"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]", "tool_call_id"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "'tool'"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "1", **tool(arguments={})}]}
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
            "must be a string, got an object",
        ),
        (
            {"messages": [{"role": "user", "tool_calls": [{"id": "1", **tool(arguments="")}]}]},
            "messages[0]",
            "only an assistant's message",
        ),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else "",
)
def test_impossible_tools(hermes, body, param, message):
    got_param, got_message = refusal(hermes, **body)
    assert message in got_message
    assert got_param == param


@pytest.mark.parametrize("depth", [50, 400, 900])
def test_deep_nesting_is_never_the_servers_fault(hermes, depth):
    deep = json.dumps(nested(depth))
    for body in (
        {"tools": [tool(parameters={"properties": json.loads(deep)})]},
        {"tools": [tool(x=json.loads(deep))], "tool_choice": "required"},
        {"chat_template_kwargs": {"color": json.loads(deep)}},
        {"messages": [{"role": "user", "content": "hi", "x": json.loads(deep)}]},
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", **tool(arguments=deep)}],
                },
            ]
        },
    ):
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, **body}
        response = hermes.post("/v1/chat/completions", **body)
        assert response.status_code in (200, 400), response.text
        assert response.json()
    assert content_of(hermes, "</think>hi") == "hi"


def test_tools_need_the_operators_flags(fake):
    for body in ({"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "auto"}):
        param, message = refusal(fake, **body)
        assert param == "tool_choice"
        assert message == (
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
        )
    assert content_of(fake, "hi", tools=TOOLS, tool_choice="none") == "hi"
    thought = "<think>\nHm.\n</think>\n\n"
    assert content_of(fake, thought) == thought
