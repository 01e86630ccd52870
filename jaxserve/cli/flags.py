"""Flags made from dataclass fields: name, type, default and docstring are written once."""

import argparse
import ast
import dataclasses
import inspect
import itertools
import json
import textwrap
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType, NoneType
from typing import Any, Literal, get_args, get_origin


class UsageError(ValueError):
    """The command line asks for what is impossible, as far as can be told without the model."""


def add_flags(
    parser: argparse.ArgumentParser,
    cls: type,
    *,
    only: Collection[str] | None = None,
    skip: Collection[str] = (),
    notes: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """A group with one flag for each field of the dataclass `cls` that is in `only`, if given, and
    not in `skip`. `notes` are added to the fields' help."""
    group = parser.add_argument_group(f"{cls.__name__} fields")
    docs = _field_docs(cls)
    for field in dataclasses.fields(cls):
        if field.name in skip or (only is not None and field.name not in only):
            continue
        required = field.default is dataclasses.MISSING
        text = docs.get(field.name, "")
        if not required:
            text += f" (default: {_shown(field.default)}) {notes.get(field.name, '')}"
        group.add_argument(
            _flag(field.name),
            dest=field.name,
            default=argparse.SUPPRESS,
            required=required,
            help=text.strip().replace("%", "%%"),
            **_options(field),
        )


def given(args: argparse.Namespace, cls: type, *, skip: Collection[str] = ()) -> dict[str, Any]:
    """The fields of `cls` that the command line sets, but for those in `skip`."""
    names = [field.name for field in dataclasses.fields(cls) if field.name not in skip]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def build[T](cls: type[T], fields: Mapping[str, Any]) -> T:
    """`cls(**fields)`, where what it refuses is the command line's fault."""
    try:
        return cls(**fields)
    except ValueError as error:
        raise UsageError(str(error)) from error


def token_biases(value: Any) -> dict[int, float]:
    """logit_bias from JSON, whose keys can only be strings. ValueError if it is no such mapping."""
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias must be a mapping of token ids to numbers, got {value!r}")
    try:
        return {int(token): bias for token, bias in value.items()}
    except ValueError:
        raise ValueError(f"logit_bias must have token ids as keys, got {value!r}") from None


def from_fields[T](cls: type[T], name: str, value: Any) -> T:
    """The dataclass `cls` from JSON; ValueError, beginning with `name`, if it is no such object."""
    known = [field.name for field in dataclasses.fields(cls)]
    if not isinstance(value, Mapping) or not value.keys() <= set(known):
        raise ValueError(f"{name} must be an object with {', '.join(known)}, got {value!r:.200}")
    return cls(**value)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _shown(default: Any) -> str:
    return "none" if default is None or default == () else str(default)


def _options(field: dataclasses.Field[Any]) -> dict[str, Any]:
    kinds = [field.type] if get_origin(field.type) in (Literal, None) else get_args(field.type)
    if get_origin(field.type) in (Sequence, Mapping):
        kinds = [field.type]
    kind = next(k for k in reversed(kinds) if k is not NoneType)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if get_origin(kind) is Mapping:
        return {"type": _json_biases, "metavar": "JSON"}
    if dataclasses.is_dataclass(kind):
        return {"type": _json_fields(kind), "metavar": "JSON"}
    if get_origin(kind) is Sequence:
        (item,) = get_args(kind)
        return {"type": item, "metavar": _metavar(item), "nargs": "+", "action": "extend"}
    if NoneType in kinds and field.default is not None:
        return {"type": _or_none(kind), "metavar": f"{_metavar(kind)}|none"}
    return {"type": kind, "metavar": _metavar(kind)}


def _metavar(kind: type) -> str:
    return {int: "N", float: "X", str: "TEXT"}[kind]


def _or_none(kind: type) -> Any:
    def parse(text: str) -> Any:
        return None if text == "none" else kind(text)

    parse.__name__ = kind.__name__  # for argparse's message
    return parse


def _json_biases(text: str) -> dict[int, float]:
    try:
        return token_biases(json.loads(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not a JSON object of token ids: {error}") from error


def _json_fields(cls: type) -> Any:
    def parse(text: str) -> Any:
        try:
            return from_fields(cls, "it", json.loads(text))
        except (ValueError, RecursionError) as error:
            raise argparse.ArgumentTypeError(f"{text:.80}: {error}") from error

    return parse


def _field_docs(cls: type) -> dict[str, str]:
    """The strings below the fields in the source, which Python itself does not keep."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    docs = {}
    for field, text in itertools.pairwise(definition.body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            docs[field.target.id] = " ".join(text.value.value.split())
    return docs
