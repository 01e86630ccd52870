"""Bounds what a client may send before anything looks at it: request lines and headers."""

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
    """uvicorn's protocol, which hangs up where a head, or the trailer of a body, does not end.

    What has come in one piece may be longer: the gate refuses such a head.
    """

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
            if self.cycle is None or self.cycle.response_complete:
                body = encode_json(head_too_large().body)
                self.transport.write(
                    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
                    b"content-type: application/json\r\nconnection: close\r\n"
                    b"content-length: %d\r\n\r\n%s" % (len(body), body)
                )
            self.transport.close()
