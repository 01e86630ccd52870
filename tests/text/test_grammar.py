"""Grammars compiled for small tokenizers: what they let through, and what is refused."""

import json
import threading

import pytest

from jaxserve.sampling_params import StructuredOutputsParams
from jaxserve.text import grammar as module
from jaxserve.text.grammar import GrammarCompiler

NUM_SPARE = 13
"""Logits beyond the vocabulary."""


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def compiler(tokenizer):
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size + NUM_SPARE, compile_cpu_s=0.5)
    yield compiler
    compiler.close()


def accepts(compiler, tokenizer, text, **fields) -> bool:
    matcher = compiler.matcher(StructuredOutputsParams(**fields))
    tokens = [t for char in text for t in single_tokens(tokenizer, char)]
    return matcher.consume_tokens(tokens) and matcher.is_accepting()


def single_tokens(tokenizer, char):
    """A character as tokens of one byte each."""
    of_byte = {
        tokenizer.token_bytes(token): token for token in reversed(range(tokenizer.vocab_size))
    }
    return [of_byte[bytes([byte])] for byte in char.encode()]


def allowed(matcher) -> set[int]:
    bits = matcher.compute_bitmask()
    return {i for i in range(8 * len(bits)) if bits[i // 8] >> (i % 8) & 1}


EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@"
    r"([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
)
"""As zod 4.1 writes it."""
RECORD = {"type": "object", "additionalProperties": {"type": "integer"}}
SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}, "required": ["é"]}


@pytest.mark.parametrize(
    ("fields", "yes", "no"),
    [
        (
            {"json": SCHEMA},
            ['{"é":1}', '{ "é" :\n-20, "x": [{}]}', '{\n    "é": 1\n}'],
            ['{"é":1.5}', "{}", '{"é":1', '{  "é":1}', '{"é":1\n\n}'],
        ),
        (
            {"json": SCHEMA, "disable_any_whitespace": True},
            ['{"é":1}', '{"é":1,"x":" "}'],
            ['{"é": 1}'],
        ),
        ({"json": SCHEMA, "whitespace_pattern": " "}, ['{ "é" : 1 }'], ['{  "é":1}']),
        ({"json_object": True}, ["{}", '{"a": [1, null]}'], ["[]", "1", '{"a"}']),
        ({"regex": "[ab]{2}|ç"}, ["ab", "ç"], ["a", "abc", ""]),
        ({"regex": "\\d/\\w\n"}, ["1/a\n", "1/é\n"], ["\u0661/a\n", "1/a"]),
        ({"choice": ["a", "ab", 'q"\\\n😀']}, ["a", "ab", 'q"\\\n😀'], ["b", "aba"]),
        ({"choice": [f"a{i}" for i in range(3000)]}, ["a0", "a2999"], ["a3000", "a"]),
        ({"choice": ["\x7f"]}, ["\x7f"], ["\\u007f"]),
        ({"grammar": 'start: "(" start ")" | "x"'}, ["x", "((x))"], ["(x", "()"]),
        (
            {"json": {"type": "string", "format": "email", "pattern": EMAIL}},
            ['"a@b.co"', '"x.y+z@q-r.org"'],
            ['".a@b.co"', '"a..b@c.org"', '"a@b"', '"a.@b.co"', '"a!@b.co"'],
        ),
        (
            {"json": {"type": "string", "pattern": r"^(?=.*[A-Z])(?=.*\d)(?!.*__).{3,}$"}},
            ['"aA1"', '"1_A_"'],
            ['"aa1"', '"aAA"', '"A1"', '"A1__"'],
        ),
        (
            {"json": RECORD | {"propertyNames": {"type": "string", "enum": ["é", "b"]}}},
            ["{}", '{"é":1}', '{"é":1,"b":2}'],
            ['{"c":1}', '{"b":"1"}', '{"b":1,"b":2}'],
        ),
        (
            {"json": RECORD | {"propertyNames": {"pattern": "^[a-c]+$"}, "required": ["ab"]}},
            ['{"ab":1}', '{"ab":1,"c":2}'],
            ["{}", '{"c":1}', '{"ab":1,"d":2}', '{"ab":1,"c":"2"}'],
        ),
        ({"json_object": True, "after": "</t>"}, ["a<\n</t>\n{}", "</t>{}"], ["{}", "</t>"]),
    ],
)
def test_what_passes(compiler, tokenizer, fields, yes, no):
    for text in yes:
        assert accepts(compiler, tokenizer, text, **fields), text
    for text in no:
        assert not accepts(compiler, tokenizer, text, **fields), text


def test_masks_hold_text_tokens_and_the_end(compiler, tokenizer):
    everything = allowed(compiler.matcher(StructuredOutputsParams(regex="(?s:.*)")))
    eos = tokenizer.eos_token_ids
    assert everything >= eos
    assert not (everything - eos) & tokenizer.special_token_ids
    assert max(everything) < tokenizer.vocab_size
    assert (
        {t for char in "aé😀" for t in single_tokens(tokenizer, char)}
        <= everything
        | {
            single_tokens(tokenizer, "é")[1],  # a byte in the middle of a character is none
            *single_tokens(tokenizer, "😀")[1:],
        }
    )
    letter = compiler.matcher(StructuredOutputsParams(regex="a"))
    assert not allowed(letter) & eos
    letter.consume_tokens(single_tokens(tokenizer, "a"))
    assert allowed(letter) == eos


@pytest.mark.parametrize("repeated", [9, 500_000])
def test_what_must_come_next_may_be_any_token_that_begins_it(compiler, tokenizer, repeated):
    """However much must come: a mask is not made by walking through all of it."""
    tokens = {t: tokenizer.token_bytes(t) for t in range(tokenizer.vocab_size)}
    word = max((token for token in tokens.values() if token.isalpha()), key=len)
    begins = {t for t, token in tokens.items() if token and (word * 9).startswith(token)}
    begins -= tokenizer.special_token_ids
    assert len(begins) > 1
    regex = f"({word.decode()}){{{repeated}}}"
    assert allowed(compiler.matcher(StructuredOutputsParams(regex=regex))) == begins


SQL = r"""start: select
select: "SELECT" columns "FROM" tables ("WHERE" expr)? ("GROUP" "BY" list)? ("LIMIT" INT)?
columns: "*" | column ("," column)*
column: expr ("AS" NAME)?
tables: table (("LEFT" | "INNER")? "JOIN" table "ON" expr)*
table: NAME ("AS" NAME)? | "(" select ")" "AS" NAME
list: expr ("," expr)*
expr: expr "OR" all | all
all: all "AND" not | not
not: "NOT" not | sum (("=" | "<=" | ">=" | "<" | ">" | "LIKE") sum)?
    | sum "IS" "NOT"? "NULL" | sum "IN" "(" (select | list) ")" | sum "BETWEEN" sum "AND" sum
sum: sum ("+" | "-") product | product
product: product ("*" | "/") one | one
one: "-" one | INT | STRING | "NULL" | "(" expr ")" | "(" select ")" | NAME "(" ("*" | list)? ")"
    | NAME ("." NAME)? | "CASE" ("WHEN" expr "THEN" expr)+ ("ELSE" expr)? "END"
NAME: /[a-zA-Z_][a-zA-Z0-9_]*/
INT: /[0-9]+/
STRING: /'[^']*'/
%ignore / +/
"""
QUERY = (
    "SELECT u.name AS n, COUNT(*), CASE WHEN u.age > 30 THEN 'a' ELSE 'b' END FROM users AS u "
    "LEFT JOIN (SELECT id, MAX(p) FROM items WHERE NOT (p BETWEEN 1 AND 2 OR n LIKE 'a')) AS i "
    "ON i.id = u.id WHERE u.city IN ('x', 'y') AND (u.a + 3 * (u.b - 1) / 2) = 1 GROUP BY u.n"
)
RIGHT = """start: product (("+" | "-") start)?
product: atom (("*" | "/") product)?
atom: /[0-9]+/ | "(" start ")"
"""
AMBIGUOUS = 'start: start start | "a" | "b"'
CALLS = [
    {
        "properties": {"name": {"const": f"tool {i}"}, "a": {}},
        "required": ["name", "a"],
        "additionalProperties": False,
    }
    for i in range(500)
]


@pytest.mark.parametrize(
    ("fields", "text", "num_rows"),
    [
        ({"grammar": SQL}, QUERY, 8),
        ({"grammar": RIGHT}, "(1+2*(3-4))*5+" * 20 + "1", 8),
        ({"json": {"type": "array", "items": {"anyOf": CALLS}}}, '[{"name":"tool 499","a":1}]', 1),
        (
            {"json": {"type": "array", "items": {"anyOf": CALLS[:200]}}},
            '[{"name":"tool 19","a":{"b":[]}}]',
            8,
        ),
        ({"json": {"properties": {f"p{i}": {} for i in range(250)}}}, '{"p1":1,"p200":[2]}', 1),
        ({"json": {"properties": {f"p{i}": {} for i in range(120)}}}, '{"p1":1,"p100":[2]}', 8),
        ({"json": {"enum": [f"the value {i}" for i in range(2000)]}}, '"the value 1999"', 32),
        ({"choice": [f"the value {i}" for i in range(2000)]}, "the value 1999", 128),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_ordinary_grammars_stay_within_their_limits(compiler, tokenizer, fields, text, num_rows):
    matcher = compiler.matcher(StructuredOutputsParams(**fields), num_rows)
    for char in text:
        matcher.compute_bitmask()
        assert matcher.consume_tokens(single_tokens(tokenizer, char)), matcher.get_error()
    assert matcher.is_accepting()
    matcher.compute_bitmask()
    assert not matcher.is_error(), matcher.get_error()


def follow(compiler, tokenizer, text, num_rows, **fields):
    """How many characters its limits let it follow, and the matcher."""
    matcher = compiler.matcher(StructuredOutputsParams(**fields), num_rows)
    for index, char in enumerate(text):
        matcher.compute_bitmask()
        if matcher.is_error() or not matcher.consume_tokens(single_tokens(tokenizer, char)):
            return index, matcher
    return len(text), matcher


def test_an_ambiguous_grammar_ends_at_its_limits(compiler, tokenizer):
    """Its work grows with the cube of the text. Answers of one request share what one may do."""
    lengths = []
    for num_rows in (1, 8, 64):
        length, matcher = follow(compiler, tokenizer, "ab" * 99, num_rows, grammar=AMBIGUOUS)
        assert "max is" in matcher.get_error() or "Too many items" in matcher.get_error()
        lengths.append(length)
        compiler.forget(StructuredOutputsParams(grammar=AMBIGUOUS), num_rows)
    assert lengths[0] < 120
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == pytest.approx(2 * lengths[1], rel=0.1)
    assert lengths[0] == pytest.approx(4 * lengths[2], rel=0.2)
    again, _ = follow(compiler, tokenizer, "ab" * 99, 1, grammar=AMBIGUOUS)
    assert again == lengths[0]


def test_matchers_of_one_grammar_are_independent(compiler, tokenizer):
    params = StructuredOutputsParams(choice=["ab", "cd"])
    first, second = compiler.matcher(params), compiler.matcher(params)
    assert first.consume_tokens(single_tokens(tokenizer, "a"))
    assert second.consume_tokens(single_tokens(tokenizer, "cd"))
    assert first.consume_tokens(single_tokens(tokenizer, "b"))


NESTED_RULES = "start: r0\n" + "".join(f"r{i}: /a/ r{i + 1} | r{i + 1}\n" for i in range(5000))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json": {"type": "text"}}, "the JSON schema cannot be used: Invalid type: text"),
        ({"json": {"type": "integer", "minimum": "1"}}, "Expected f64 for 'minimum'"),
        ({"json": {"$ref": "http://127.0.0.1/x"}}, "not present in a registry"),
        ({"json": {"type": "string", "format": "colour"}}, "Unknown format: colour"),
        ({"json": {"type": "integer", "minimum": 2, "maximum": 1}}, "Unsatisfiable schema"),
        ({"json": {"const": 10**400}}, "the JSON schema cannot be used"),
        ({"regex": "(a"}, "the regular expression cannot be used: .*unclosed group"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"regex": "(" * 60_000 + ")" * 60_000}, "the regular expression cannot be used"),
        ({"regex": "^(?!a)b"}, "cannot be used: look-arounds are not supported, only look-aheads"),
        ({"grammar": 'start: %json {"pattern": "^(?=a)b"}'}, "used: look-arounds are not supp"),
        ({"regex": r"[^\s\S]"}, "no text satisfies it"),
        ({"grammar": "start: start"}, "the grammar cannot be used: no text satisfies it"),
        ({"grammar": 'root ::= "a"'}, "the grammar cannot be used: .*Expected"),
        ({"grammar": NESTED_RULES + "r5000: /b/"}, "it is too large or nested too deeply"),
        (
            {"json": {"type": "string", "allOf": [{"pattern": f"a.*b{i}"} for i in range(99)]}},
            "it takes over 0.5 s to compile",
        ),
    ],
)
def test_refusals_leave_the_compiler_well(compiler, tokenizer, fields, message):
    with pytest.raises(ValueError, match=message) as caught:
        compiler.matcher(StructuredOutputsParams(**fields))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert accepts(compiler, tokenizer, "12", regex=r"\d+")


def test_known_grammars_are_not_compiled_again(compiler, monkeypatch):
    monkeypatch.setattr(module, "MAX_CACHED_GRAMMARS", 2)
    known, *others = (StructuredOutputsParams(regex=f"a{{{i}}}") for i in range(1, 5))
    assert not compiler.has(known)
    compiler.matcher(known)
    assert not compiler.has(known, 2)
    compiler.matcher(others[0])
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_compile", None)
        compiler.matcher(known)
    assert compiler.has(known)
    for params in others:
        compiler.matcher(params)
    assert not compiler.has(known)


def test_many_threads_compile_a_grammar_once(compiler, monkeypatch):
    compiled = []
    compile_one = compiler._compile
    monkeypatch.setattr(
        compiler, "_compile", lambda params, n: compiled.append(params) or compile_one(params, n)
    )
    params = StructuredOutputsParams(json=json.dumps({"enum": list(range(100))}))
    threads = [threading.Thread(target=compiler.matcher, args=(params,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiled == [params]


def test_a_model_without_an_end(byte_level, monkeypatch):
    monkeypatch.setattr(byte_level, "eos_token_ids", frozenset())
    with pytest.raises(ValueError, match="needs an end-of-sequence token"):
        GrammarCompiler(byte_level, 400).matcher(StructuredOutputsParams(regex="a"))


def test_a_trial_that_never_answers(byte_level, monkeypatch, tmp_path):
    """It is ended, and the next grammar gets another."""
    hanging = tmp_path / "hanging.py"
    hanging.write_text("import time\ntime.sleep(100)\n")
    compiler = GrammarCompiler(byte_level, byte_level.vocab_size)
    params = StructuredOutputsParams(regex="a")
    with monkeypatch.context() as patch:
        patch.setattr(module, "COMPILE_WALL_S", 0.5)
        patch.setattr(module.grammar_trial, "__file__", str(hanging))
        with pytest.raises(ValueError, match=r"it takes over 0\.5 s to compile"):
            compiler.matcher(params)
    assert compiler.matcher(params) is not None
    compiler.close()
