"""JSON Schemas that are refused for what no grammar would hold an answer to."""

import json
import sys

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
        ({"propertyNames": {"$ref": "#/propertyNames"}}, "'#/propertyNames' leads to itself"),
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
        ({"propertyNames": {"pattern": "^(?=a)b"}}, "propertyNames has .*look-arounds are not"),
        (
            {"propertyNames": {"$ref": "#/$defs/a"}, "$defs": {"a": {"pattern": "^(?!a)b"}}},
            "propertyNames has .*look-arounds are not",
        ),
        (
            {"items": {"patternProperties": {"a": {}, "(?<=b)a": {}}}},
            "patternProperties have .*<=b",
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


@pytest.mark.parametrize("names", [{"enum": ["n" * 2000]}, {"pattern": "n" * 2000}])
def test_names_are_bounded_in_all(names):
    """A name said once may stand for many."""
    for num_parts in (60, 70):
        parts = [{"propertyNames": {"$ref": "#/$defs/a"}}] * num_parts
        schema = {"anyOf": parts, "$defs": {"a": names}}
        if num_parts == 60:
            assert StructuredOutputsParams(json=schema).json.count("n" * 2000) == 61
        else:
            with pytest.raises(ValueError, match="too many names"):
                StructuredOutputsParams(json=schema)


RECORD = {
    "propertyNames": {"enum": ["b", "a"]},
    "additionalProperties": {"items": {"minLength": 1}},
}


@pytest.mark.parametrize(
    "reference",
    [
        "#/properties/p/additionalProperties",
        "#/properties/p/additionalProperties/items",
        "#/properties/p/properties/z",
        "#/properties/p/properties",
        "#/properties/p/propertyNames",
        "#/properties/p/properties/z/items/0",
    ],
)
@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("use", [lambda it: it, lambda it: {"propertyNames": it}])
def test_references_to_what_names_change(reference, is_before, use):
    """The names of a record are read as they were before any other was written out."""
    known = {"z": {"items": [{"enum": ["x"]}]}, "a": {"enum": ["y"]}}
    record = {**RECORD, "properties": known}
    user = use({"$ref": reference})
    members = {"q": user, "p": record} if is_before else {"p": record, "q": user}
    names = {"items/0": ["x"], "propertyNames": ["b", "a"]}
    read = [names[end] for end in names if "propertyNames" in user and reference.endswith(end)]
    if read:
        found = json.loads(StructuredOutputsParams(json={"properties": members}).json)
        assert found["properties"]["q"]["properties"] == dict.fromkeys(*read, True)
    else:
        message = "leads to what propertyNames changes|enum, const or pattern alone"
        with pytest.raises(ValueError, match=message):
            StructuredOutputsParams(json={"properties": members})


def test_references_to_what_names_keep():
    known = {"z": {}, "a": {"type": "null"}}
    kept = {"q": {"$ref": "#/properties/p/properties/a"}, "r": {"$ref": "#/properties/p"}}
    schema = {"properties": {**kept, "p": {**RECORD, "properties": known}}}
    found = json.loads(StructuredOutputsParams(json=schema).json)["properties"]
    assert found["q"] == kept["q"]
    assert found["p"]["properties"] == {"a": {"type": "null"}, "b": {"items": {"minLength": 1}}}


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ({"$id": "https://example.org/it"}, "https://example.org/it#/additionalProperties"),
        ({"$defs": {"a": {"$id": "a"}}}, "#/additionalProperties"),
        ({"$defs": {"a": {"$anchor": "a"}}}, "#a"),
    ],
)
def test_references_beside_names_that_are_not_followed(name, reference):
    schema = {**RECORD, **name, "items": {"$ref": reference}}
    with pytest.raises(ValueError, match=r"its propertyNames cannot be enforced beside a \$ref to"):
        StructuredOutputsParams(json=schema)


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


def calls_of(schema):
    count = 0

    def see(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(see)
    try:
        StructuredOutputsParams(json=schema)
    finally:
        sys.setprofile(None)
    return count


def test_names_of_long_chains_of_references_take_no_time():
    """Twice the schema is about twice the work."""

    def schema(size):
        links = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(size)}
        parts = [{"propertyNames": {"$ref": "#/$defs/0"}}] * size
        return {"anyOf": parts, "$defs": {**links, str(size): {"const": "a"}}}

    assert calls_of(schema(600)) < 2.5 * calls_of(schema(300))


def test_a_key_given_twice_after_many_is_found_at_once():
    """Were the keys compared with one another, this would take ten seconds."""
    keys = ",".join(f'"{i}":1' for i in range(13_000))
    with pytest.raises(ValueError, match="the key 'twice' more than once"):
        StructuredOutputsParams(json=f'{{{keys},"twice":1,"twice":2}}')
