"""JSON Schemas that are all different, and how long the JSON that satisfies one can get."""

import json
import random
import string
from collections.abc import Callable, Mapping
from typing import Any

Schema = dict[str, Any]

LENGTHS = range(150, 260)
_FORMATS = {"uuid": 36, "ipv4": 15}
"""Characters of a string of each format, at most."""
_MOST_BYTES = 12
"""Of one character in a string: two escapes such as \\ud83d."""


class SchemaMaker:
    """Objects of four properties; names, kinds, values and bounds are drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._kinds: list[Callable[[], Schema]] = [
            self._coded, self._text, self._formatted, self._choice, self._decimal, self._integer,
            self._multiple, self._list, self._pair, self._nested, self._nullable, self._tagged,
            self._constant, self._referring,
        ]  # fmt: skip

    def make(self) -> Schema:
        """Its longest JSON has LENGTHS bytes, so that answers are somewhat alike. Of the four
        properties, one may be left out."""
        while longest(schema := self._any()) not in LENGTHS:
            pass
        return schema

    def _any(self) -> Schema:
        kinds = self._rng.sample(self._kinds, 4)
        schema = self._object([kind() for kind in kinds])
        schema["required"].remove(self._rng.choice(schema["required"]))
        schema["$defs"] = {"size": self._object([self._integer(), self._choice()])}
        return schema

    def _word(self) -> str:
        return "".join(self._rng.choices(string.ascii_lowercase, k=self._rng.randint(3, 8)))

    def _object(self, values: list[Schema]) -> Schema:
        properties = {f"{self._word()}_{i}": value for i, value in enumerate(values)}
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }

    def _coded(self) -> Schema:
        letters, digits = self._rng.randint(2, 4), self._rng.randint(2, 5)
        return {"type": "string", "pattern": f"^[A-Z]{{{letters}}}(-[0-9]{{{digits}}}){{1,3}}$"}

    def _text(self) -> Schema:
        return {"type": "string", "minLength": 1, "maxLength": self._rng.randint(4, 8)}

    def _formatted(self) -> Schema:
        return {"type": "string", "format": self._rng.choice(list(_FORMATS))}

    def _choice(self) -> Schema:
        return {"enum": [self._word() for _ in range(self._rng.randint(3, 6))]}

    def _decimal(self) -> Schema:
        values = {self._rng.randint(-9999, 9999) / 100 for _ in range(6)}
        return {"type": "number", "enum": sorted(values)}

    def _integer(self) -> Schema:
        low = self._rng.randint(-1000, 1000)
        return {"type": "integer", "minimum": low, "maximum": low + self._rng.randint(50, 5000)}

    def _multiple(self) -> Schema:
        return {
            "type": "integer", "minimum": 0, "exclusiveMaximum": self._rng.randint(500, 5000),
            "multipleOf": self._rng.choice([2, 5, 25]),
        }  # fmt: skip

    def _list(self) -> Schema:
        few = self._rng.randint(2, 4)
        items = self._rng.choice([self._integer, self._choice, self._coded])()
        return {"type": "array", "items": items, "minItems": few, "maxItems": few + 2}

    def _pair(self) -> Schema:
        first = [self._integer(), self._choice()]
        return {"type": "array", "prefixItems": first, "items": False, "minItems": 2}

    def _nested(self) -> Schema:
        inner = self._object([{"type": "boolean"}, self._choice()])
        return self._object([inner, self._integer(), {"type": "boolean"}])

    def _nullable(self) -> Schema:
        return {"anyOf": [self._integer(), {"type": "null"}]}

    def _tagged(self) -> Schema:
        return {
            "anyOf": [
                self._object([{"const": self._word()}, value])
                for value in (self._integer(), self._choice(), {"type": "boolean"})
            ]
        }

    def _constant(self) -> Schema:
        return {"const": {self._word(): self._rng.randint(0, 99), self._word(): [True, None]}}

    def _referring(self) -> Schema:
        return {"type": "array", "items": {"$ref": "#/$defs/size"}, "minItems": 1, "maxItems": 2}


def longest(schema: Schema, definitions: Mapping[str, Schema] | None = None) -> int:
    """The most bytes of JSON that satisfies a schema of SchemaMaker's, with at most one space
    beside any `{}[]:,`. A token has at least one byte, so that it takes no more tokens."""
    definitions = schema.get("$defs", {}) if definitions is None else definitions
    match schema:
        case {"$ref": reference}:
            return longest(definitions[reference.rpartition("/")[2]], definitions)
        case {"anyOf": branches}:
            return max(longest(branch, definitions) for branch in branches)
        case {"enum": values}:
            return max(map(_spaced, values))
        case {"const": value}:
            return _spaced(value)
        case {"type": "boolean" | "null"}:
            return len("false")
        case {"type": "integer", "minimum": low, **others}:
            high = others.get("maximum", others.get("exclusiveMaximum"))
            return max(len(str(low)), len(str(high)))
        case {"type": "string", "pattern": pattern}:
            letters, digits = (int(n.partition("}")[0]) for n in pattern.split("{")[1:3])
            return 2 + letters + 3 * (1 + digits)
        case {"type": "string", "maxLength": most}:
            return 2 + _MOST_BYTES * most
        case {"type": "string", "format": name}:
            return 2 + _FORMATS[name]
        case {"type": "array", "prefixItems": items, "items": False}:
            return 4 + sum(3 + longest(item, definitions) for item in items)
        case {"type": "array", "items": item, "maxItems": most}:
            return 4 + most * (3 + longest(item, definitions))
        case {"type": "object", "properties": properties, "additionalProperties": False}:
            sizes = [_spaced(name) + 3 + longest(p, definitions) for name, p in properties.items()]
            return 4 + sum(3 + size for size in sizes)
    raise ValueError(f"no bound is known for {schema}")


def _spaced(value: object) -> int:
    """Bytes of a value that is spelled one way, spaces included."""
    text = json.dumps(value, separators=(",", ":"))
    return len(text) + 2 * sum(text.count(mark) for mark in "{}[]:,")
