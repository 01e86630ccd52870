"""JSON Schemas as requests bring them: said in keywords that llguidance enforces, or refused."""

import copy
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard
from urllib.parse import unquote

from jaxserve.look_ahead import has_look_around, without_look_aheads

MAX_BYTES = 1 << 17
MAX_DEPTH = 64

_ENFORCED = frozenset({
    "$ref", "additionalItems", "additionalProperties", "allOf", "anyOf", "const", "enum",
    "exclusiveMaximum", "exclusiveMinimum", "format", "items", "maxItems", "maxLength",
    "maxProperties", "maximum", "minItems", "minLength", "minProperties", "minimum", "multipleOf",
    "oneOf", "pattern", "patternProperties", "prefixItems", "properties", "required", "type",
})  # fmt: skip
"""What llguidance makes grammars of, or refuses itself."""
_NOTES = frozenset({
    "$anchor", "$comment", "$defs", "$id", "$schema", "contentEncoding", "contentMediaType",
    "contentSchema", "default", "definitions", "deprecated", "description", "examples", "id",
    "readOnly", "strict", "title", "writeOnly",
    # OpenAPI's, which libraries that make schemas write as well.
    "discriminator", "example", "externalDocs", "xml",
})  # fmt: skip
"""What says nothing about which JSON is valid."""
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "nullable": (False,),
    "unevaluatedItems": (True,),
    "unevaluatedProperties": (True,),
    "uniqueItems": (False,),
}
"""Values of other keywords that ask for nothing; libraries that make schemas write them."""
_NOTE_FORMATS = frozenset({
    "base64", "base64url", "binary", "byte", "color", "directory-path", "double", "file-path",
    "float", "int32", "int64", "ipv4network", "ipv6network", "ipvanyaddress", "ipvanyinterface",
    "ipvanynetwork", "json-string", "multi-host-uri", "password", "path", "regex",
})  # fmt: skip
"""Of pydantic and OpenAPI, which tell a program what a text or number is for."""
_PATTERN_FORMATS = frozenset({
    "cidrv4", "cuid", "cuid2", "e164", "emoji", "ends_with", "hex", "includes", "ksuid",
    "lowercase", "mac", "nanoid", "starts_with", "ulid", "uppercase", "xid",
})  # fmt: skip
"""Of zod, which are no more than names of the pattern beside them."""
_LLGUIDANCE_OPTIONS = "x-guidance"

_LISTS_OR_ONE = (
    "additionalItems", "additionalProperties", "allOf", "anyOf", "items", "oneOf", "prefixItems",
)  # fmt: skip
_NO_LOOK_AROUND = "look-arounds are not supported there, only look-aheads in a value's own pattern"
_NAMED = ("$defs", "definitions", "patternProperties", "properties")


def schema_text(schema: object) -> str:
    """The schema, a mapping or its text, as compact JSON, made enforceable; members in the order
    given.

    ValueError or TypeError, in one line, if it is none, or if part of it would not be enforced.
    """
    try:
        text = schema if isinstance(schema, str) else _dump(schema)
        if len(text) > MAX_BYTES:
            raise ValueError(f"it must be of at most {MAX_BYTES} bytes, got {len(text)}")
        value = json.loads(text, object_pairs_hook=_members)
        if not isinstance(value, dict):
            raise ValueError(f"it must be an object, got {value!r:.80}")
    except RecursionError as error:
        raise ValueError(f"it must be of at most {MAX_DEPTH} levels") from error
    make_enforceable(value)
    return _dump(value)


def _asks_for_nothing(keyword: str, value: object) -> bool:
    if keyword == "format":
        return isinstance(value, str) and value in _NOTE_FORMATS
    return any(type(value) is type(v) and value == v for v in _NEUTRAL.get(keyword, ()))


def _drop_what_asks_for_nothing(part: dict[str, Any]) -> None:
    """llguidance refuses it all the same."""
    for keyword in [k for k, value in part.items() if _asks_for_nothing(k, value)]:
        del part[keyword]
    match part:
        case {"format": str(name), "pattern": str()} if name in _PATTERN_FORMATS:
            del part["format"]


def make_enforceable(schema: dict[str, Any]) -> None:
    """Have it say the same, in place, in keywords that llguidance enforces.

    ValueError if it is nested too deeply, for keywords that would be passed over in silence, and
    for references that lead nowhere, or to what cannot stay as it is.
    """
    check_depth(schema)
    parts = list(subschemas(schema))
    # In a part with a name of its own, references count from there.
    root = None if any("$id" in part for part in parts[1:]) else schema
    targets: dict[str, Any] = {}
    for part in parts:
        _drop_what_asks_for_nothing(part)
    for part in parts:
        _refuse_look_arounds_of_names(part)
        if root is not None:
            _check_reference(root, part, targets)
    known: dict[str, _Names | None] = {}
    names = [_names(part.get("propertyNames", True), root, known) for part in parts]
    room = MAX_BYTES
    # The inner ones first, as names are given copies of them.
    for part, allowed in zip(reversed(parts), reversed(names), strict=True):
        part.pop("propertyNames", None)
        _write_out_look_aheads(part)
        if allowed is not None:
            room -= _write_out_names(part, allowed, room)
    are_names_written = any(allowed is not None for allowed in names)
    for part in subschemas(schema):
        for keyword in part:
            if not (_is_note(keyword) or keyword in _ENFORCED):
                raise ValueError(f"its keyword {keyword!r:.80} is not supported")
        reference = part.get("$ref")
        if root is not None and is_local(reference):
            if _find(root, reference) is not targets[reference]:
                raise ValueError(
                    f"its reference {reference!r:.80} leads to what propertyNames changes"
                )
        elif are_names_written and reference is not None:
            raise ValueError(
                f"its propertyNames cannot be enforced beside a $ref to {reference!r:.80}"
            )


def _is_note(keyword: str) -> bool:
    is_extension = keyword.startswith("x-") and keyword != _LLGUIDANCE_OPTIONS
    return is_extension or keyword in _NOTES


def _write_out_look_aheads(part: dict[str, Any]) -> None:
    pattern, others = part.get("pattern"), part.get("allOf", [])
    if isinstance(pattern, str) and isinstance(others, list):
        *looked, part["pattern"] = without_look_aheads(pattern)
        if looked:
            part["allOf"] = [*others, *({"pattern": one} for one in looked)]


def _refuse_look_arounds_of_names(part: dict[str, Any]) -> None:
    patterns = part.get("patternProperties")
    for pattern in patterns if isinstance(patterns, dict) else ():
        if has_look_around(pattern):
            raise ValueError(f"its patternProperties have {pattern!r:.80}: {_NO_LOOK_AROUND}")


@dataclass(frozen=True)
class _Names:
    """What `propertyNames` allows: what matches the pattern, or, if that is None, the texts."""

    pattern: str | None
    texts: dict[str, None]
    num_bytes: int
    """Of the pattern or the texts."""


def _write_out_names(part: dict[str, Any], names: _Names, room: int) -> int:
    """Say `propertyNames` in other keywords: all the names or a pattern of them, and no others.

    Returns how many bytes these take, about. ValueError for what cannot be said so, in `room`
    bytes.
    """
    known, others = part.get("properties", {}), part.get("additionalProperties", True)
    if "patternProperties" in part or not isinstance(known, dict):
        raise ValueError("its propertyNames cannot be enforced beside patternProperties")
    num_bytes = names.num_bytes + len(names.texts) * len(_dump(others))
    if num_bytes > room:
        raise ValueError("its propertyNames has too many names for values of such a schema")
    part["additionalProperties"] = False
    if names.pattern is not None:
        if known:
            raise ValueError("its propertyNames with pattern cannot be enforced beside properties")
        part["patternProperties"] = {names.pattern: others}
        return num_bytes
    listed = [name for name in known if name in names.texts]
    part["properties"] = {
        name: known[name] if name in known else copy.deepcopy(others)
        for name in [*listed, *names.texts]
    }
    return num_bytes


def _names(
    names: object, root: dict[str, Any] | None, known: dict[str, _Names | None]
) -> _Names | None:
    """None: any name. References lead into `root`, if it is not None; `known` has what those
    followed before allow."""
    chain: dict[str, None] = {}
    while True:
        asked = _asked_of_names(names)
        if root is None or asked.keys() != {"$ref"} or not is_local(where := asked["$ref"]):
            allowed = _allowed_names(asked)
            break
        if where in known:
            allowed = known[where]
            break
        if where in chain:
            raise ValueError(f"its reference {where!r:.80} leads to itself")
        chain[where] = None
        names = _find(root, where)
    known.update(dict.fromkeys(chain, allowed))
    return allowed


def _allowed_names(asked: dict[str, Any]) -> _Names | None:
    if not asked:
        return None
    match asked:
        case {"const": text, **others} if not others:
            return _listed_names([text])
        case {"enum": list(texts), **others} if not others:
            return _listed_names(texts)
        case {"pattern": str(pattern), **others} if not others:
            if has_look_around(pattern):
                raise ValueError(f"its propertyNames has {pattern!r:.80}: {_NO_LOOK_AROUND}")
            return _Names(pattern, {}, len(pattern))
    raise ValueError(
        "its propertyNames can be enforced with enum, const or pattern alone, "
        f"got {' and '.join(asked):.80}"
    )


def _listed_names(values: list[Any]) -> _Names:
    texts = dict.fromkeys(value for value in values if isinstance(value, str))
    return _Names(None, texts, sum(map(len, texts)))


def _asked_of_names(names: object) -> dict[str, Any]:
    if isinstance(names, bool):
        return {} if names else {"enum": []}
    if not isinstance(names, dict):
        raise ValueError(f"its propertyNames must be a schema, got {names!r:.80}")
    return {k: v for k, v in names.items() if not _is_note(k) and (k, v) != ("type", "string")}


def subschemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema and every schema in it; what `const`, `enum`, `default` and `examples` hold are
    values."""
    yield schema
    for keyword, value in schema.items():
        inner: Iterable[object] = ()
        if keyword in _LISTS_OR_ONE:
            inner = value if isinstance(value, list) else (value,)
        elif keyword in _NAMED and isinstance(value, dict):
            inner = value.values()
        for child in inner:
            if isinstance(child, dict):
                yield from subschemas(child)


def is_local(reference: object) -> TypeGuard[str]:
    """Whether what `$ref` holds is a place in the schema itself."""
    return isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))


def _check_reference(schema: dict[str, Any], part: Any, targets: dict[str, Any]) -> None:
    """`targets` has what those that are checked lead to. llguidance refuses what leads nowhere out
    of this schema."""
    seen: set[str] = set()
    while isinstance(part, dict) and is_local(reference := part.get("$ref")):
        if reference in seen:
            raise ValueError(f"its reference {reference!r:.80} leads to itself")
        if reference in targets:
            break
        part = _find(schema, reference)
        if not isinstance(part, dict | bool):
            raise ValueError(f"its reference {reference!r:.80} leads to no schema")
        seen.add(reference)
        targets[reference] = part


def _find(schema: Any, reference: str) -> Any:
    """What a JSON pointer leads to; None if to nothing."""
    for part in unquote(reference).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, dict):
            schema = schema.get(key)
        elif isinstance(schema, list) and key.isdecimal() and int(key) < len(schema):
            schema = schema[int(key)]
        else:
            return None
    return schema


def _dump(schema: object) -> str:
    return json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"an object has the key {twice!r:.80} more than once")
    return members


def check_depth(schema: object) -> None:
    """ValueError for more than MAX_DEPTH levels of objects and lists."""
    level = [schema]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for value in level
            if isinstance(value, dict | list)
            for child in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return
    raise ValueError(f"it must be of at most {MAX_DEPTH} levels")
