"""What every HTTP request passes: its id, its key, and its line in the log."""

import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server.heads import MAX_HEAD_BYTES, head_too_large
from jaxserve.server.page import sign_in_response
from jaxserve.server.protocol.errors import ApiError, error_body
from jaxserve.server.protocol.shaping import encode_json

OPEN_PATHS = frozenset({"/health", "/ping"})
POLLED_PATHS = OPEN_PATHS | {"/metrics"}
"""Asked for again and again by machines and by the page."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

logger = logging.getLogger("jaxserve.access")


def error_response(error: ApiError) -> Response:
    return Response(
        encode_json(error.body),
        error.status_code,
        headers=error.headers,
        media_type="application/json",
    )


class Gate:
    """ASGI middleware. `api_keys`: one of them is asked for on every path but the health probes;
    none: everybody may pass. `logs_requests`: a line for each request, without its content; a poll
    that went well has none."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], logs_requests: bool) -> None:
        self._app = app
        self._api_keys = [key.encode() for key in api_keys]
        self._logs_requests = logs_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} is not served here")
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        unique_id = f"{request_id}-{uuid.uuid4().hex[:8]}" if request_id is given else request_id
        state = scope.setdefault("state", {})
        state["id"] = unique_id
        begin = time.monotonic()
        status = 500

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            if _num_head_bytes(scope) > MAX_HEAD_BYTES:
                await error_response(head_too_large())(scope, receive, send_with_id)
            elif self._may_pass(scope["path"], headers):
                await self._app(scope, receive, send_with_id)
            else:
                await _refusal(scope, headers)(scope, receive, send_with_id)
        finally:
            if self._logs_requests and not (status == 200 and scope["path"] in POLLED_PATHS):
                self._log(scope, unique_id, status, time.monotonic() - begin)

    def _may_pass(self, path: str, headers: Headers) -> bool:
        if not self._api_keys or path in OPEN_PATHS:
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        shown = key.strip().encode("latin-1")
        # Every key is compared, in constant time.
        matches = [hmac.compare_digest(shown, key) for key in self._api_keys]
        return scheme.lower() == "bearer" and any(matches)

    def _log(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        if scope["state"].get("disconnected"):
            status = 499
        # As it came, percent-encoded: a decoded line end would forge a line of the log.
        path = scope["raw_path"].decode("ascii", "backslashreplace")
        logger.info(
            "%s %s %d %.3f s %s",
            scope["method"],
            path,
            status,
            seconds,
            request_id,
            extra={
                "fields": {
                    "method": scope["method"],
                    "path": path,
                    "status": status,
                    "seconds": round(seconds, 4),
                    "request_id": request_id,
                }
            },
        )


def _num_head_bytes(scope: Scope) -> int:
    """Of the request line and headers, with what parts them; optional whitespace counts as one
    space."""
    query = scope["query_string"]
    target_len = len(scope["raw_path"]) + len(query) + bool(query)
    line_len = len(scope["method"]) + target_len + len("  HTTP/1.1\r\n")
    return line_len + sum(
        len(name) + len(value) + len(": \r\n") for name, value in scope["headers"]
    )


def _refusal(scope: Scope, headers: Headers) -> Response:
    is_browser = "text/html" in headers.get("accept", "")
    if scope["method"] == "GET" and scope["path"] == "/" and is_browser:
        return sign_in_response()
    body = error_body(401, "missing or wrong API key", code="invalid_api_key")
    return Response(
        encode_json(body),
        401,
        headers={"WWW-Authenticate": "Bearer"},
        media_type="application/json",
    )
