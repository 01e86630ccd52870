"""What comes before anything of ours looks at it: request lines and headers, bounded."""

from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jaxserve.server.protocol.errors import ApiError
from jaxserve.server.protocol.shaping import encode_json

MAX_HEAD_BYTES = 1 << 16
"""Of a request's line and headers."""


def head_too_large() -> ApiError:
    return ApiError(
        431,
        f"the request line and headers must have at most {MAX_HEAD_BYTES} bytes",
        headers={"Connection": "close"},
    )


class BoundedHeads(HttpToolsProtocol):
    """uvicorn's protocol, which hangs up where a head, or the trailer of a body, does not end, and
    has our errors for that and for what is no HTTP.

    What has come in one piece may be longer: the gate refuses such a head.
    """

    url = b""
    _num_pending_bytes = 0
    """Since something whole, or part of a body, has come."""
    _has_progress = False

    def on_message_begin(self) -> None:
        self._has_progress = True
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        self._has_progress = True
        super().on_body(body)

    def data_received(self, data: bytes) -> None:
        self._has_progress = False
        super().data_received(data)
        self._num_pending_bytes = 0 if self._has_progress else self._num_pending_bytes + len(data)
        if self._num_pending_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(head_too_large())

    def send_400_response(self, msg: str) -> None:
        """Called for what cannot be parsed, such as the URL of a head that is too large; `msg` is
        uvicorn's word for it."""
        is_long = len(self.url) >= MAX_HEAD_BYTES
        no_http = ApiError(400, "what came is no valid HTTP/1.1 request")
        self._refuse(head_too_large() if is_long else no_http)

    def _refuse(self, error: ApiError) -> None:
        """Answer, unless another answer has begun, and hang up."""
        is_answering = self.cycle is not None and self.cycle.response_started
        if not is_answering or self.cycle.response_complete:
            status, body = HTTPStatus(error.status_code), encode_json(error.body)
            head = (
                f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
                f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
