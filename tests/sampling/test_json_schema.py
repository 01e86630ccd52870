"""JSON Schemas that are refused for what no grammar would hold an answer to."""

import json

import pytest

from jaxserve.sampling_params import StructuredOutputsParams

FINE = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$id": "https://example.org/it",
    "title": "It",
    "examples": [{"fooBar": 1}],
    "x-order": 3,
    "properties": {
        "fooBar": {"type": "string", "format": "date", "description": "not", "deprecated": True},
        "$ref": {"const": {"$ref": "#/nowhere", "%lark": 1}},
        "not": {"enum": [{"uniqueItems": True}], "default": {"if": 1}},
        "list": {"items": {"$ref": "#/$defs/a~1b%20c"}, "prefixItems": [True, {"type": "null"}]},
        "again": {"anyOf": [{"$ref": "#"}, {"type": "null"}], "discriminator": {"mapping": {}}},
        "kind": {"$ref": "#/properties/list/prefixItems/1"},
    },
    "additionalProperties": False,
    "$defs": {"a/b c": {"$ref": "#/$defs/end"}, "end": {"type": "integer"}},
}


def test_what_is_said_beside_the_rules_is_fine():
    assert StructuredOutputsParams(json=FINE).json is not None


def test_what_asks_for_nothing_is_left_out():
    """As pydantic, zod and OpenAPI write it; the same names still can be members'."""
    asks = {
        "type": "object",
        "propertyNames": {"type": "string"},
        "dependentRequired": {},
        "properties": {
            "uniqueItems": {"type": "array", "uniqueItems": False, "nullable": False},
            "file": {"type": "string", "format": "path"},
            "day": {"type": "string", "format": "date"},
        },
    }
    names = asks["properties"]
    left = {"uniqueItems": {"type": "array"}, "file": {"type": "string"}, "day": names["day"]}
    found = json.loads(StructuredOutputsParams(json=asks).json)
    assert found == {"type": "object", "properties": left}
    with pytest.raises(ValueError, match="keyword 'uniqueItems' is not supported"):
        StructuredOutputsParams(json={"items": {"uniqueItems": True}})


PLAIN = {"type": "string", "pattern": "^[a-z]+$"}


@pytest.mark.parametrize(
    ("asks", "says"),
    [
        (  # zod's z.record(z.enum(["b", "a"]), z.int())
            {
                "propertyNames": {"type": "string", "enum": ["b", "a"]},
                "additionalProperties": {"type": "integer"},
                "required": ["b"],
            },
            {
                "properties": {"b": {"type": "integer"}, "a": {"type": "integer"}},
                "additionalProperties": False,
                "required": ["b"],
            },
        ),
        (  # pydantic's dict[Colour, ...]
            {
                "propertyNames": {"$ref": "#/$defs/Colour"},
                "$defs": {"Colour": {"$ref": "#/$defs/C"}, "C": {"title": "C", "enum": ["red"]}},
            },
            {
                "properties": {"red": True},
                "additionalProperties": False,
                "$defs": {"Colour": {"$ref": "#/$defs/C"}, "C": {"title": "C", "enum": ["red"]}},
            },
        ),
        (
            {
                "properties": {"c": {}, "a": {"type": "null"}},
                "propertyNames": {"enum": [1, "x", "a"]},
                "additionalProperties": {"uniqueItems": False, "pattern": "^(?=a)b"},
            },
            {
                "properties": {
                    "a": {"type": "null"},
                    "x": {"pattern": "^b", "allOf": [{"pattern": "^(?:a)"}]},
                },
                "additionalProperties": False,
            },
        ),
        (
            {"propertyNames": {"const": "a"}},
            {"properties": {"a": True}, "additionalProperties": False},
        ),
        ({"propertyNames": False}, {"properties": {}, "additionalProperties": False}),
        (
            {"propertyNames": PLAIN, "additionalProperties": PLAIN},
            {"patternProperties": {"^[a-z]+$": PLAIN}, "additionalProperties": False},
        ),
        ({"propertyNames": {"type": "string", "title": "Name"}}, {}),
        (
            {"items": {"format": "email", "pattern": "^(?!-)(?!.*__)a", "allOf": [PLAIN]}},
            {
                "items": {
                    "format": "email",
                    "pattern": "^a",
                    "allOf": [
                        PLAIN,
                        {"pattern": "^(?:[^-][\\s\\S]*)?$"},
                        {"pattern": "^(?:_{0,1}[^_])*_{0,1}$"},
                    ],
                }
            },
        ),
        ({"format": "starts_with", "pattern": "^ab.*"}, {"pattern": "^ab.*"}),
        ({"format": "starts_with"}, {"format": "starts_with"}),
    ],
)
def test_what_is_said_in_other_words(asks, says):
    found = StructuredOutputsParams(json=asks).json
    assert json.loads(found) == says
    assert StructuredOutputsParams(json=found).json == found


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"propertyNames": {"minLength": 1}}, "enum, const or pattern alone, got minLength"),
        ({"propertyNames": {"enum": ["a"], "pattern": "a"}}, "alone, got enum and pattern"),
        ({"propertyNames": {"type": "integer"}}, "alone, got type"),
        ({"propertyNames": {"enum": "a"}}, "alone, got enum"),
        ({"propertyNames": {"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}}}}, "must be a schema"),
        ({"propertyNames": {"$ref": "#/propertyNames"}}, r"must be a schema, got None"),
        ({"propertyNames": {"$ref": "http://127.0.0.1/"}}, r"alone, got \$ref"),
        ({"propertyNames": 1}, "its propertyNames must be a schema, got 1"),
        (
            {"propertyNames": {"enum": ["a"]}, "patternProperties": {"b": {}}},
            "cannot be enforced beside patternProperties",
        ),
        (
            {"propertyNames": {"pattern": "a"}, "properties": {"b": {}}},
            "with pattern cannot be enforced beside properties",
        ),
        (
            {
                "propertyNames": {"enum": [f"name {i}" for i in range(900)]},
                "additionalProperties": {"enum": [f"value {i}" for i in range(900)]},
            },
            "too many names for values of such a schema",
        ),
        ({"items": {"pattern": "a(?!b)"}}, "its pattern .* has a look-around that is not"),
        ({"format": [1], "pattern": "a", "uniqueItems": True}, "'uniqueItems' is not supported"),
    ],
)
def test_what_cannot_be_said_in_other_words(schema, message):
    with pytest.raises(ValueError, match=f"^json must be a JSON Schema .*{message}") as caught:
        StructuredOutputsParams(json=schema)
    assert "\n" not in str(caught.value)


def test_copies_for_names_are_bounded_in_all():
    """Each of the two has room for itself."""
    names = {"enum": [f"n{i}" for i in range(80)]}
    part = {"propertyNames": names, "additionalProperties": {"enum": ["x" * 1000]}}
    assert StructuredOutputsParams(json={"properties": {"a": part}}).json.count("x" * 1000) == 80
    with pytest.raises(ValueError, match="too many names"):
        StructuredOutputsParams(json={"properties": {"a": part, "b": part}})


def test_too_many_levels():
    for levels in (65, 3000, 9000):
        with pytest.raises(ValueError, match="at most 64 levels"):
            StructuredOutputsParams(json='{"items":' * levels + "{}" + "}" * levels)


@pytest.mark.parametrize(
    "keyword", ["fooBar", "%lark", "x-guidance", "not", "if", "uniqueItems", "nullable", "extends"]
)
@pytest.mark.parametrize(
    "place",
    [
        lambda bad: bad,
        lambda bad: {"properties": {"a": {"items": bad}}},
        lambda bad: {"patternProperties": {"^a": {"additionalProperties": bad}}},
        lambda bad: {"anyOf": [{"type": "null"}, {"allOf": [{"oneOf": [bad]}]}]},
        lambda bad: {"items": [{}, bad]},
        lambda bad: {"prefixItems": [bad]},
        lambda bad: {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array"}, "b": bad}},
        lambda bad: {"definitions": {"a": bad}},
    ],
)
def test_keywords_that_would_be_passed_over(keyword, place):
    with pytest.raises(ValueError, match=f"^json must .* its keyword '{keyword}' is not supported"):
        StructuredOutputsParams(json=place({keyword: 1}))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$ref": "#"}, "'#' leads to itself"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#"}}},
            "'#/.defs/a' leads to itself",
        ),
        ({"items": {"$ref": "#/$defs/a"}, "$defs": {"b": {}}}, "'#/.defs/a' leads to no schema"),
        ({"items": {"$ref": "#/enum/1"}, "enum": [{}]}, "'#/enum/1' leads to no schema"),
        ('{"type": "object", "properties": {"a": {}, "b": {}, "a": {}}}', "the key 'a' more than"),
    ],
)
def test_what_leads_nowhere(schema, message):
    with pytest.raises(ValueError, match=message) as caught:
        StructuredOutputsParams(json=schema)
    assert "\n" not in str(caught.value)


def test_long_chains_of_references_take_no_time():
    """Were each followed to its end, this would take minutes."""
    links = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(3000)}
    assert StructuredOutputsParams(json={"$defs": {**links, "3000": {}}}).json is not None
