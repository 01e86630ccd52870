"""What parsers of answers find, however the text is cut into parts."""

import json
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.server.protocol.answer import Answer
from jaxserve.server.protocol.reasoning import ThinkParser
from jaxserve.server.protocol.text_parser import (
    CallArguments,
    CallStart,
    Content,
    Reasoning,
    merge,
)
from jaxserve.server.protocol.tool_parsers.constrained import NamedCallParser, RequiredCallsParser
from jaxserve.server.protocol.tool_parsers.hermes import HermesParser
from jaxserve.server.protocol.tool_parsers.json_calls import ToolParser
from jaxserve.server.protocol.tool_parsers.llama3_json import Llama3JsonParser

Named = partial(NamedCallParser, "f")
Thinking = partial(ThinkParser, True)
NotThinking = partial(ThinkParser, False)
PARSERS = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "required": RequiredCallsParser,
    "named": Named,
    "thinking": Thinking,
    "not_thinking": NotThinking,
}


def call(name, arguments):
    return [CallStart(name), CallArguments(arguments)]


# Parser, an answer's text, and what is in it.
ANSWERS = [
    (HermesParser, "", []),
    (HermesParser, "Just text, 1 < 2.\n", [Content("Just text, 1 < 2.\n")]),
    (
        HermesParser,
        '<tool_call>\n{"name": "f", "arguments": {"a": "é😀"}}\n</tool_call>',
        call("f", '{"a": "é😀"}'),
    ),
    (
        HermesParser,
        'Let me see.\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {"x": [1, {"y": null}]}}</tool_call>\n',
        [
            Content("Let me see."),
            *call("f", "{}"),
            *call("g", '{"x": [1, {"y": null}]}'),
        ],
    ),
    # Brackets, quotes and tags within strings are text.
    (
        HermesParser,
        r'<tool_call>{"name": "f\u0041\"", "arguments": {"a": "}\"]</tool_call>\\"}}</tool_call>.',
        [*call('fA"', r'{"a": "}\"]</tool_call>\\"}'), Content(".")],
    ),
    # Hermes 2 writes the arguments first; others add members.
    (
        HermesParser,
        '<tool_call>{"id": [1, "}"], "arguments": {"a": 1}, "x": -1.5e3, "name": "f"}</tool_call>',
        call("f", '{"a": 1}'),
    ),
    (
        HermesParser,
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "arguments": {"b": 2}, "name": "g"}',
        call("f", '{"a": 1}'),
    ),
    # Slips of small models: a bracket too many, one too few, no end.
    (
        HermesParser,
        '<tool_call>{"name": "f", "arguments": {"a": 1}}}\n</tool_call> ok',
        [*call("f", '{"a": 1}'), Content(" ok")],
    ),
    (
        HermesParser,
        '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>\n'
        '<tool_call>{"name": "f", "arguments": {"a": 2',
        [*call("f", '{"a": 1}'), *call("f", '{"a": 2')],
    ),
    (
        HermesParser,
        '<tool_call>{"name": "f", "arguments": {"a": [1</tool_call> ok',
        [*call("f", '{"a": [1'), Content(" ok")],
    ),
    # No calls: content, all of it.
    *(
        (HermesParser, text, [Content(text)])
        for text in (
            "a\n<tool_call>",
            "<tool_call>f(1)</tool_call>",
            '<tool_call>{"name": "f"}</tool_call> \n',
            '<tool_call>{"arguments": {}}</tool_call>',
            '<tool_call>{"name": "", "arguments": {}}</tool_call>',
            '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
            '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
            "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>",
            '<tool_call>{"name": "f", "arguments": {a: 1}}</tool_call>',
            r'<tool_call>{"name": "\x", "arguments": {}}</tool_call>',
            r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>',
            '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>',
            '<tool_call>{"name": "f", "argum',
            "</tool_call><tool_cal",
        )
    ),
    (
        HermesParser,
        'a <tool_call> <tool_call>{"name": "f", "arguments": {}}</tool_call>',
        [Content("a <tool_call> "), *call("f", "{}")],
    ),
    (
        Llama3JsonParser,
        ' {"name": "f", "parameters": {"a": "b"}}\n',
        call("f", '{"a": "b"}'),
    ),
    (
        Llama3JsonParser,
        '<|python_tag|>{"name": "f", "arguments": {}}; {"name": "g", "parameters": {"a": ";"}}',
        [*call("f", "{}"), *call("g", '{"a": ";"}')],
    ),
    (
        Llama3JsonParser,
        'Well: <|python_tag|>{"name": "f", "parameters": {}} then',
        [Content("Well:"), *call("f", "{}"), Content(" then")],
    ),
    (
        Llama3JsonParser,
        '{"name": "f", "parameters": {}}; {"answer": 42}',
        [*call("f", "{}"), Content('; {"answer": 42}')],
    ),
    *(
        (Llama3JsonParser, text, [Content(text)])
        for text in (
            "\n Hello {",
            '{"answer": 42}\n',
            '{"name": "f", "parameters": "x"}',
            "<|python_tag|>print(1)",
            "<|python",
            ' say {"name": "f", "parameters": {}}',
        )
    ),
    (
        RequiredCallsParser,
        '[{"name": "f", "parameters": {"a": 1}},\n {"name": "g", "parameters": {}} ]\n',
        [*call("f", '{"a": 1}'), *call("g", "{}")],
    ),
    (RequiredCallsParser, '[{"name": "f", "parameters": {"a', call("f", '{"a')),
    (RequiredCallsParser, '[{"name": "f', [Content('[{"name": "f')]),
    (RequiredCallsParser, "no [array]", [Content("no [array]")]),
    (Named, '{"a": [1, 2]}', call("f", '{"a": [1, 2]}')),
    (Named, "", []),
    (Thinking, "<think>\nHm.\n</think>\n\nYes.", [Reasoning("\nHm.\n"), Content("\n\nYes.")]),
    (Thinking, "Hm </b></think>Yes</think>.", [Reasoning("Hm </b>"), Content("Yes</think>.")]),
    (Thinking, "Hm </thin", [Reasoning("Hm </thin")]),
    (Thinking, "\n<thi", [Reasoning("\n<thi")]),
    (Thinking, "</think>", []),
    (NotThinking, "\n<think>Hm</think>Yes", [Reasoning("Hm"), Content("Yes")]),
    (NotThinking, " Yes <think>", [Content(" Yes <think>")]),
]


def parse(parser, *parts):
    pieces = [piece for part in parts for piece in parser.feed(part, finished=False)]
    return merge(pieces + parser.feed("", finished=True))


@pytest.mark.parametrize(("make", "text", "expected"), ANSWERS, ids=range(len(ANSWERS)))
def test_answers_whole_and_cut_anywhere(make, text, expected):
    assert make().feed(text, finished=True) == expected
    assert parse(make(), *text) == expected
    for i in range(len(text) + 1):
        assert parse(make(), text[:i], text[i:]) == expected
        for j in range(i, min(i + 14, len(text) + 1)):
            assert parse(make(), text[:i], text[i:j], text[j:]) == expected


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<|python_tag|>", "<think>", "</think>", "<", "<tool",
        '{"name": "f", "arguments": {', '{"name": "g", "parameters": {}}', '"a": ', '"name"', '"',
        "\\", "{", "}", "[", "]", ":", ",", ";", "1", "x", "é", " ", "\n", "}}", '{"arguments": {',
    ]
)  # fmt: skip


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_text_is_the_same_cut_anywhere(name, data):
    text = "".join(data.draw(st.lists(FRAGMENTS, max_size=15)))
    whole = PARSERS[name]().feed(text, finished=True)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(PARSERS[name](), *parts) == whole
    assert parse(PARSERS[name](), *text) == whole
    if isinstance(PARSERS[name](), ToolParser) and CallStart not in map(type, whole):
        content = "".join(piece.text for piece in whole)
        assert content == text or (name == "named" and text.isspace())  # nothing is lost


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)


@settings(max_examples=30, deadline=None)
@given(
    calls=st.lists(
        st.tuples(st.text(min_size=1, max_size=8), st.dictionaries(st.text(max_size=5), JSON)),
        min_size=1,
        max_size=3,
    ),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 1]),
)
def test_whatever_calls_a_model_writes_well(calls, ascii_only, indent):
    def dump(value):
        return json.dumps(value, ensure_ascii=ascii_only, indent=indent)

    texts = {
        HermesParser: "\n".join(
            f"<tool_call>\n{dump({'name': name, 'arguments': arguments})}\n</tool_call>"
            for name, arguments in calls
        ),
        Llama3JsonParser: ";".join(dump({"name": n, "parameters": a}) for n, a in calls),
        RequiredCallsParser: dump([{"name": n, "parameters": a} for n, a in calls]),
    }
    for make, text in texts.items():
        found = parse(make(), *text)
        starts, arguments = found[::2], found[1::2]
        assert [start.name for start in starts] == [name for name, _ in calls]
        assert [json.loads(piece.text) for piece in arguments] == [a for _, a in calls]


def test_pieces_come_as_soon_as_they_are_certain():
    parser = HermesParser()
    steps = [
        ("Let me", [Content("Let me")]),
        (" see <tool", [Content(" see")]),
        ("s <tool_", [Content(" <tools")]),
        ('call>{"name": "f', []),
        ('", "arguments": ', []),
        ('{"a', call("f", '{"a')),
        ('": 12', [CallArguments('": 12')]),
        ("3}", [CallArguments("3}")]),
        ("}</tool_call>", []),
    ]
    for text, expected in steps:
        assert parser.feed(text, finished=False) == expected
    parser = ThinkParser(True)
    for text, expected in [
        ("<thi", []),
        ("nk>Hm", [Reasoning("Hm")]),
        ("m</", [Reasoning("m")]),
        ("think>Y", [Content("Y")]),
        ("es", [Content("es")]),
    ]:
        assert parser.feed(text, finished=False) == expected
    for parser, text in ((NamedCallParser("f"), '{"a'), (RequiredCallsParser(), "")):
        if not text:
            text = '{"a'
            parser.feed('[{"name": "f", "parameters": ', finished=False)
        assert parser.feed(text, finished=False) == call("f", '{"a')


def join(deltas):
    """What a client makes of deltas."""
    message = {"content": None, "tool_calls": []}
    for delta in deltas:
        for name in ("content", "reasoning", "reasoning_content"):
            if name in delta:
                message[name] = (message.get(name) or "") + delta[name]
        for change in delta.get("tool_calls", ()):
            if change["index"] == len(message["tool_calls"]):
                assert change["type"] == "function"
                assert change["id"].startswith("call_")
                message["tool_calls"].append({"function": {**change["function"]}})
            else:
                assert set(change) == {"index", "function"}
                assert set(change["function"]) == {"arguments"}
                function = message["tool_calls"][change["index"]]["function"]
                function["arguments"] += change["function"]["arguments"]
    return message


def without_ids(message):
    calls = [{"function": call["function"]} for call in message.get("tool_calls", ())]
    return {name: message.get(name) for name in ("content", "reasoning")} | {"tool_calls": calls}


THOUGHT = "<think>\nHm <tool_call>\n</think>\n\n"
CALLS = (
    'One.\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n'
    '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
)


@pytest.mark.parametrize("shows_reasoning", [True, False])
@pytest.mark.parametrize("max_calls", [None, 1])
def test_messages_are_their_deltas_joined(shows_reasoning, max_calls):
    text = THOUGHT + CALLS

    def answer():
        return Answer(
            ThinkParser(True), HermesParser(), shows_reasoning=shows_reasoning, max_calls=max_calls
        )

    message = answer().message(text)
    calls = [("f", '{"a": 1}'), ("g", "{}")][:max_calls]
    assert [tuple(call["function"].values()) for call in message["tool_calls"]] == calls
    assert message["content"] == "\n\nOne."
    assert message.get("reasoning") == ("\nHm <tool_call>\n" if shows_reasoning else None)
    assert message.get("reasoning_content") == message.get("reasoning")
    assert len({call["id"] for call in message["tool_calls"]}) == len(calls)
    for i in range(len(text) + 1):
        cut = answer()
        deltas = [cut.delta(text[:i], finished=False), cut.delta(text[i:], finished=True)]
        assert without_ids(join(deltas)) == without_ids(message)
        assert cut.has_calls
    single = answer()
    deltas = [single.delta(char, finished=False) for char in text]
    assert without_ids(join([*deltas, single.delta("", finished=True)])) == without_ids(message)


def test_messages_without_content():
    calls = Answer(None, NamedCallParser("f")).message("{}")
    assert calls["content"] is None
    assert Answer(ThinkParser(True), None).message("Hm")["content"] is None
    assert Answer(None, None).message("") == {"role": "assistant", "content": ""}
    assert Answer(None, None).message("Hi") == {"role": "assistant", "content": "Hi"}
