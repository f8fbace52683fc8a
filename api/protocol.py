"""uvicorn's HTTP protocol with two things added: the application can cut a socket, and a request
that is no HTTP gets its error in the shape of all others.
"""

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api.client import CUT
from api.errors import invalid


class Protocol(HttpToolsProtocol):
    """One connection."""

    def on_message_begin(self) -> None:
        """Adds the extension by which an answer is cut."""
        super().on_message_begin()
        self.scope["extensions"] = {CUT: {"abort": self.transport.abort}}

    def send_400_response(self, msg: str) -> None:
        """Answers what the parser could not read (a bad Content-Length, for one)."""
        body = msgspec.json.encode(invalid(None, msg, "malformed_http").body())
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
