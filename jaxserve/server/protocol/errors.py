"""Errors in OpenAI's shape."""

import json
import re
from collections.abc import Sequence
from typing import Any, TypedDict

from starlette.exceptions import HTTPException

from jaxserve.engine.streams import EngineDeadError, QueueFullError

RETRY_AFTER_S = 1


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(TypedDict):
    error: ErrorDetail


class ApiError(HTTPException):
    """What a client is told instead of an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param = param
        self.code = code

    @property
    def body(self) -> ErrorResponse:
        return error_body(self.status_code, self.detail, self.param, self.code)


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> ErrorResponse:
    kinds = {401: "authentication_error", 404: "not_found_error", 503: "service_unavailable_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def unavailable(message: str, retry_after_s: int = RETRY_AFTER_S) -> ApiError:
    return ApiError(503, message, headers={"Retry-After": str(retry_after_s)})


def from_engine(
    error: Exception, fields: Sequence[str] = (), otherwise: str | None = None
) -> ApiError:
    """What a refusal or the engine's death means to a client. `fields` are the request's: a refusal
    begins with the name of the one that is wrong, or it is `otherwise`."""
    if isinstance(error, EngineDeadError):
        return ApiError(503, f"the engine cannot serve requests: {error}")
    if isinstance(error, QueueFullError):
        return unavailable(f"the queue is full: {error}")
    if isinstance(error, ValueError):
        message = str(error)
        place = _PLACE.match(message)
        param = place[0] if place and place[1] in fields else otherwise
        return ApiError(400, message, param=param)
    return ApiError(500, "internal error")


_TYPES = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing_size": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
"""pydantic's names for values of a wrong type, and what the right one is."""
_BOUNDS = {
    "greater_than": "over {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "under {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
}
_LENGTHS = {
    "too_short": "at least {min_length}",
    "too_long": "at most {max_length}",
    "string_too_short": "at least {min_length}",
    "string_too_long": "at most {max_length}",
}
_PLACE = re.compile(r"(\w+)(\[\d+\])*(?= )")
_NAME = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)
_MAX_SHOWN = 40
_MAX_LISTED = 8


def from_validation(errors: Sequence[dict[str, Any]], body: Any) -> ApiError:
    """pydantic's list of what is wrong with `body`, as one line. None: it was empty, or null."""
    if not isinstance(body, dict):
        got = "" if body is None else f", got {shown(body)}"
        return ApiError(400, f"the body must be a JSON object{got}")
    found: dict[str, list[dict[str, Any]]] = {}
    for error in errors:
        found.setdefault(_path(error, body), []).append(error)
    # Of a union each alternative has its own say; the one that got furthest is what was meant.
    outer = {path[:i] for path in found for i, char in enumerate(path) if char in ".["}
    paths = [path for path in found if path not in outer and (path or len(found) == 1)]
    listed = [f"{path}: {_wrong(found[path])}".removeprefix(": ") for path in paths[:_MAX_LISTED]]
    if len(paths) > _MAX_LISTED:
        listed.append(f"and {len(paths) - _MAX_LISTED} more")
    line = ", ".join(listed)
    param = paths[0]
    if not param:
        first_word = line.split(" ", 1)[0]
        param = first_word if first_word in body else ""
    return ApiError(400, line, param=param or None)


def _path(error: dict[str, Any], body: Any) -> str:
    """Where in the body, as in `messages[2].content`; without pydantic's names for the members of a
    union, which lie between."""
    path, value = "", body
    parts = error["loc"][1:]  # without "body"
    for i, part in enumerate(parts):
        is_missing = error["type"] == "missing" and i == len(parts) - 1
        if isinstance(value, dict) and isinstance(part, str) and (part in value or is_missing):
            path += f".{part}" if _NAME.fullmatch(part) else f"[{shown(part)}]"
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            path += f"[{part}]"
            value = value[part]
    return path.removeprefix(".")


def _wrong(errors: Sequence[dict[str, Any]]) -> str:
    """What is wrong with one value, and what is allowed."""
    # A value of one alternative's type was meant for that one.
    errors = [e for e in errors if e["type"] not in _TYPES] or errors
    allowed, others = [], []
    for error in errors:
        kind, context = error["type"], error.get("ctx", {})
        if kind == "missing":
            others.append("is required")
        elif kind in _LENGTHS:
            length = _LENGTHS[kind].format(**context)
            others.append(f"must have a length of {length}, got {len(error['input'])}")
        elif kind in _TYPES:
            allowed.append(_TYPES[kind])
        elif kind in _BOUNDS:
            allowed.append(_BOUNDS[kind].format(**context))
        else:
            others.append(error["msg"].removeprefix("Value error, "))
    if allowed:
        choices = " or ".join(dict.fromkeys(allowed))
        others.insert(0, f"must be {choices}, got {shown(errors[0]['input'])}")
    return "; ".join(dict.fromkeys(others))


def shown(value: Any) -> str:
    """A value of the client's, in few words."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    if isinstance(value, int) and value.bit_length() > 128:
        return "a longer number"
    text = json.dumps(value[:_MAX_SHOWN] if isinstance(value, str) else value)
    return f"{text}..." if isinstance(value, str) and len(value) > _MAX_SHOWN else text
