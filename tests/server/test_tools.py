"""Tool calls and reasoning over HTTP: what comes back.

The fake repeats the rendered conversation up to its first end: the first message is the answer.
"""

import json

import openai
import pytest

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "time", "description": "now"}},
]
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
THOUGHT = "<think>\nHm.\n</think>\n\n"


@pytest.fixture(scope="module")
def llama(start_server, fake_script, model_folder, tool_template, tmp_path_factory):
    """`<|python_tag|>` is a special token there."""
    folder = tmp_path_factory.mktemp("llama")
    for path in model_folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    last = tokenizer["added_tokens"][-1]
    tokenizer["added_tokens"].append(
        {**last, "id": last["id"] + 1, "content": "<|python_tag|>", "special": True}
    )
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return start_server(
        fake_script, str(folder), "--enable-auto-tool-choice", "--tool-call-parser", "llama3_json",
        "--reasoning-parser", "deepseek_r1", "--chat-template", tool_template,
    ).ready()  # fmt: skip


@pytest.fixture(scope="module")
def client(hermes):
    with openai.OpenAI(base_url=f"{hermes.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(server, text, **body):
    response = server.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": text}], **body
    )
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def functions(message):
    return [(c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]]


def rendered(server, messages, **body):
    tokens = server.post("/tokenize", messages=messages, **body).json()["tokens"]
    return server.post("/detokenize", tokens=tokens).json()["prompt"]


def test_calls_that_the_model_chooses(hermes):
    choice = ask(hermes, CALLS, tools=TOOLS, chat_template_kwargs={"enable_thinking": False})
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "Let me see."
    assert functions(message) == [("weather", '{"city": "Köln"}'), ("time", "{}")]
    assert all(set(call) == {"id", "type", "function"} for call in message["tool_calls"])
    choice = ask(hermes, "<think></think>No tools.", tools=TOOLS, tool_choice="auto")
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {"role": "assistant", "content": "No tools."}


def test_openai_client_streams_calls(client):
    messages = [{"role": "user", "content": THOUGHT + CALLS}]
    stream = client.chat.completions.create(
        model="fake", messages=messages, tools=TOOLS, n=2, stream=True, parallel_tool_calls=True
    )
    calls, texts, reasons = [{}, {}], ["", ""], [None, None]
    for chunk in stream:
        (choice,) = chunk.choices
        delta = choice.delta
        texts[choice.index] += delta.content or ""
        for call in delta.tool_calls or ():
            if call.id:
                assert call.type == "function"
                assert call.function.name
                assert call.index == len(calls[choice.index])
                calls[choice.index][call.index] = [call.function.name, ""]
            calls[choice.index][call.index][1] += call.function.arguments
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    expected = {0: ["weather", '{"city": "Köln"}'], 1: ["time", "{}"]}
    assert calls == [expected, expected]
    assert texts == ["\n\nLet me see."] * 2
    assert reasons == ["tool_calls"] * 2

    with client.chat.completions.stream(model="fake", messages=messages, tools=TOOLS) as events:
        choice = events.get_final_completion().choices[0]
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Köln"}'
    assert len(choice.message.tool_calls) == 2
    assert choice.message.reasoning == "\nHm.\n"


def test_malformed_calls_are_content(hermes, events):
    text = '<tool_call>{"name": weather}</tool_call>'
    choice = ask(hermes, f"<think></think>{text}", tools=TOOLS)
    assert choice["message"] == {"role": "assistant", "content": text}
    assert choice["finish_reason"] == "stop"
    chunks = events(
        hermes,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": f"<think></think>{text}"}],
        tools=TOOLS,
    )
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == text
    # Cut off within a call: the client sees what there was, and why it ended.
    choice = ask(hermes, CALLS, tools=TOOLS, max_tokens=70, reasoning_effort="none")
    assert choice["finish_reason"] == "length"
    assert functions(choice["message"])[0][0] == "weather"


def test_at_most_one_call_if_asked_for(hermes):
    choice = ask(hermes, CALLS, tools=TOOLS, parallel_tool_calls=False, reasoning_effort="none")
    assert functions(choice["message"]) == [("weather", '{"city": "Köln"}')]


def test_no_calls_with_tool_choice_none(hermes):
    choice = ask(hermes, CALLS, tools=TOOLS, tool_choice="none", reasoning_effort="none")
    assert choice["message"] == {"role": "assistant", "content": CALLS}
    assert choice["finish_reason"] == "stop"


def check_calls(calls):
    assert calls
    for name, arguments in calls:
        assert name in ("weather", "time")
        assert set(json.loads(arguments)) == ({"city"} if name == "weather" else set())


def test_calls_that_a_grammar_makes(fake, events):
    """Without any flag: what the fake says under a grammar is random."""
    body = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200}
    for fields in ({}, {"response_format": {"type": "json_object"}}, {"n": 3}):
        choice = ask(fake, "hi", **body, **fields)
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        check_calls(functions(choice["message"]))
    choice = ask(fake, "hi", **body, parallel_tool_calls=False)
    assert len(choice["message"]["tool_calls"]) == 1
    named = {"type": "function", "function": {"name": "weather"}}
    choice = ask(fake, "hi", tools=TOOLS, tool_choice=named, max_tokens=200)
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] is None
    check_calls(functions(choice["message"]))
    for tool_choice, reason in (("required", "tool_calls"), (named, "stop")):
        chunks = events(
            fake,
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "hi"}],
            tools=TOOLS,
            tool_choice=tool_choice,
            max_tokens=200,
        )
        calls = []
        for change in (c for k in chunks for c in k["choices"][0]["delta"].get("tool_calls", ())):
            if "id" in change:
                calls.append([change["function"]["name"], ""])
            calls[change["index"]][1] += change["function"]["arguments"]
        check_calls(calls)
        assert not any(chunk["choices"][0]["delta"].get("content") for chunk in chunks)
        assert chunks[-1]["choices"][0]["finish_reason"] == reason


def test_thoughts_before_a_grammar(hermes):
    body = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 300}
    message = ask(hermes, "Hm {1}</think>", **body)["message"]
    assert message["reasoning"].endswith("Hm {1}")
    check_calls(functions(message))
    message = ask(hermes, "Hm {1}</think>", **body, reasoning_effort="none")["message"]
    assert "reasoning" not in message
    check_calls(functions(message))
    answer = {"type": "json_schema", "json_schema": {"name": "it", "schema": PARAMETERS}}
    message = ask(hermes, "Hm</think>", response_format=answer, max_tokens=300)["message"]
    assert message["reasoning"].endswith("Hm")
    assert set(json.loads(message["content"])) == {"city"}
    # Other grammars hold from the first token.
    message = ask(hermes, "Hm</think>", structured_outputs={"choice": ["yes"]})["message"]
    assert message == {"role": "assistant", "content": "yes"}


def test_llama_calls_after_a_special_token(llama):
    text = '</think><|python_tag|>{"name": "time", "parameters": {}}'
    choice = ask(llama, text, tools=TOOLS)
    assert functions(choice["message"]) == [("time", "{}")]
    # This request's parsers do not look for it.
    choice = ask(llama, "</think>a<|python_tag|>b")
    assert choice["message"]["content"] == "ab"


def test_reasoning(hermes, events):
    choice = ask(hermes, THOUGHT + "Yes.")
    message = choice["message"]
    assert message["content"] == "\n\nYes."
    assert message["reasoning"] == message["reasoning_content"] == "\nHm.\n"
    # The opening tag may be in the prompt.
    assert ask(hermes, "Hm.</think>Yes.")["message"]["reasoning"] == "Hm."
    assert ask(hermes, "Hm.")["message"] == {
        "role": "assistant", "content": None, "reasoning": "Hm.", "reasoning_content": "Hm.",
    }  # fmt: skip
    # The switch is the template's variable; the template's closed thoughts say the same.
    for off in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        assert ask(hermes, "Yes.", **off)["message"] == {"role": "assistant", "content": "Yes."}
    body = {"messages": [{"role": "user", "content": THOUGHT + "Yes."}]}
    deltas = [c["choices"][0]["delta"] for c in events(hermes, "/v1/chat/completions", **body)]
    assert "".join(delta.get("content", "") for delta in deltas) == "\n\nYes."
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == "\nHm.\n"


def test_reasoning_left_out(hermes):
    choice = ask(hermes, THOUGHT + "Yes.", include_reasoning=False, logprobs=True)
    assert choice["message"] == {"role": "assistant", "content": "\n\nYes."}
    assert choice["logprobs"] is None  # they would tell
    assert ask(hermes, THOUGHT + "Yes.", logprobs=True)["logprobs"] is not None


def test_deepseek_thinks_unless_the_prompt_has_thought(llama):
    assert ask(llama, "Hm.</think>Yes.")["message"]["reasoning"] == "Hm."
    variables = {"enable_thinking": False}
    assert ask(llama, "Yes.", chat_template_kwargs=variables)["message"]["content"] == "Yes."


def test_reasoning_of_an_answer_that_goes_on(hermes):
    def go_on(begun):
        messages = [{"role": "user", "content": "Hm."}, {"role": "assistant", "content": begun}]
        body = {"messages": messages, "continue_final_message": True}
        return hermes.post("/v1/chat/completions", **body).json()["choices"][0]["message"]

    assert go_on("<think>Well")["reasoning"] == "Hm."
    assert go_on("<think>Well</think>So")["content"] == "Hm."
    assert go_on("So")["content"] == "Hm."


def test_calls_and_results_reach_the_template(hermes):
    messages = [
        {"role": "user", "content": "U"},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "R",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Köln"}'},
                },
                {
                    "id": "call_2",
                    "type": "function",
                    "function": {"name": "time", "arguments": '{"cut off'},
                },
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "noon"}]},
        {"role": "assistant", "content": "A", "tool_calls": []},
    ]
    text = rendered(hermes, messages, tools=TOOLS, chat_template_kwargs={"color": "blue"})
    assert text == (
        '<|bos|><|user|>U<|eos|><|assistant|>[call_1 weather {"city": "Köln"}]'
        '[call_2 time "{\\"cut off"]~R~<|eos|><|tool|>rain[call_1]<|eos|>'
        f"<|tool|>noon[call_2]<|eos|><|assistant|>A<|eos|>{json.dumps(TOOLS)}blue<|assistant|>"
    )
    assert rendered(hermes, messages[:1], tools=[]) == "<|bos|><|user|>U<|eos|><|assistant|>"
    answer = hermes.post("/v1/chat/completions", messages=messages, tools=TOOLS, max_tokens=1)
    assert answer.status_code == 200
