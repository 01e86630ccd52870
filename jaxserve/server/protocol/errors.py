"""Errors in OpenAI's shape."""

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


def from_engine(error: Exception, fields: Sequence[str] = ()) -> ApiError:
    """What the engine's refusal or death means to a client. `fields` are the request's: a refusal
    begins with the name of the one that is wrong, if it is one."""
    if isinstance(error, EngineDeadError):
        return ApiError(503, f"the engine cannot serve requests: {error}")
    if isinstance(error, QueueFullError):
        return unavailable(f"the queue is full: {error}")
    if isinstance(error, ValueError):
        message = str(error)
        name = message.split(" ", 1)[0]
        return ApiError(400, message, param=name if name in fields else None)
    return ApiError(500, "internal error")


def from_validation(errors: Sequence[dict[str, Any]]) -> ApiError:
    """pydantic's list of what is wrong with a body, as one line."""
    parts: dict[str, list[str]] = {}
    for error in errors:
        # ("body", field, index or union branch, ...)
        location = [str(part) for part in error["loc"] if part != "body"]
        message = error["msg"].removeprefix("Value error, ")
        parts.setdefault(location[0] if location else "", []).append(message)
    texts = [
        f"{name}: {'; '.join(dict.fromkeys(messages))}" if name else "; ".join(messages)
        for name, messages in parts.items()
    ]
    return ApiError(400, ", ".join(texts), param=next(iter(parts), "") or None)
