"""uvicorn's HTTP protocol with three things added: the application can cut a socket, the head of a
request is bounded, and one that cannot be read gets its error in the shape of all others.
"""

from http import HTTPStatus

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api.client import CUT
from api.errors import ApiError, invalid
from api.settings import MAX_HEAD_BYTES


class HeadTooLarge(Exception):
    """A request has more before its body than is taken."""


class Protocol(HttpToolsProtocol):
    """One connection."""

    in_head = False
    num_head_bytes = 0

    def on_message_begin(self) -> None:
        """Adds the extension by which an answer is cut."""
        super().on_message_begin()
        self.in_head = True
        self.num_head_bytes = 0
        self.scope["extensions"] = {CUT: {"abort": self.transport.abort}}

    def on_url(self, url: bytes) -> None:
        """See `count`."""
        self.count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """See `count`."""
        self.count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """What follows is the body, which is bounded where it is read."""
        self.in_head = False
        super().on_headers_complete()

    def count(self, num_bytes: int) -> None:
        """So much more of the head. Raises HeadTooLarge, at which the parser stops."""
        self.num_head_bytes += num_bytes
        if self.num_head_bytes > MAX_HEAD_BYTES:
            raise HeadTooLarge

    def data_received(self, data: bytes) -> None:
        """The parser keeps a header for itself until it has all of it: what comes meanwhile is
        counted too.
        """
        scope = self.scope if self.in_head else None
        num_before = self.num_head_bytes
        super().data_received(data)
        if self.in_head and self.scope is scope and not self.transport.is_closing():
            self.num_head_bytes = num_before + len(data)
            if self.num_head_bytes > MAX_HEAD_BYTES:
                self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        """Answers what the parser could not read (a bad Content-Length, for one), or would not."""
        is_large = self.num_head_bytes > MAX_HEAD_BYTES
        error = head_too_large() if is_large else invalid(None, msg, "malformed_http")
        body = msgspec.json.encode(error.body())
        status = HTTPStatus(error.status)
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def head_too_large() -> ApiError:
    """The 431, with the limit."""
    return ApiError(
        431,
        f"The request's path and headers are larger than the limit of {MAX_HEAD_BYTES} bytes.",
        code="headers_too_large",
    )
