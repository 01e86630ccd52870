"""The benchmark's JSON Schemas: different, sound, and bounded by construction."""

import json
import random

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from jaxserve.text.grammar_trial import Vocabulary, make_tokenizer

BYTES, EOS = [bytes([i]) for i in range(256)], 256


@pytest.fixture
def schemas(script):
    return script("bench", "schemas")


@pytest.fixture
def made(schemas):
    maker = schemas.SchemaMaker(seed=0)
    return [maker.make() for _ in range(32)]


def keywords(schema):
    if isinstance(schema, dict):
        yield from schema
        schema = list(schema.values())
    for value in schema if isinstance(schema, list) else ():
        yield from keywords(value)


def test_they_are_different_and_of_every_kind(made):
    assert len({json.dumps(schema, sort_keys=True) for schema in made}) == 32
    assert {
        "anyOf", "const", "enum", "exclusiveMaximum", "format", "items", "maxItems", "maxLength",
        "maximum", "minItems", "minLength", "minimum", "multipleOf", "pattern", "prefixItems",
        "$ref", "$defs",
    } <= set(keywords(made))  # fmt: skip
    for schema in made:
        jsonschema.Draft202012Validator.check_schema(schema)
        assert len(schema["required"]) == len(schema["properties"]) - 1


def test_no_text_is_longer_than_the_bound(schemas, made):
    """Whatever is drawn from the grammar validates and stays below, rarely by much."""
    rng = random.Random(0)
    tokenizer = make_tokenizer(Vocabulary([*BYTES, b"<eos>"], [EOS], [EOS]))
    options = {"lenient": False, "whitespace_flexible": True, "whitespace_pattern": " ?"}
    shares = []
    for schema in made:
        text = json.dumps(schema)
        grammar = LLMatcher.grammar_from_json_schema(text, overrides=options)
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        drawn = []
        while not matcher.is_stopped():
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
            # Spaces, escapes and what goes on rather than ends make it long.
            longer = [i for i in allowed if i in b" \\u-0123456789abcdefABCDEF,"]
            drawn.append(rng.choice(longer or allowed))
            matcher.consume_token(drawn[-1])
        if drawn[-1] == EOS:
            drawn.pop()
        jsonschema.validate(json.loads(bytes(drawn)), schema)
        shares.append(len(drawn) / schemas.longest(schema))
    assert max(shares) <= 1
    assert sorted(shares)[16] > 0.6


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": "number"},
        {"type": "array", "items": {"type": "null"}},
        {"type": "object", "properties": {}},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
    ],
)
def test_there_is_no_bound_of_what_has_none(schemas, schema):
    with pytest.raises(ValueError, match="no bound is known"):
        schemas.longest(schema)
