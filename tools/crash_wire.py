"""One HTTP exchange over a connection of its own, as bytes came: what was received is the truth of
what was delivered, so nothing here tries again or fills in.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools
import msgspec

SILENCE_LIMIT_S = 60
READ_BYTES = 2**16


class Cut(Exception):
    """The connection was refused or lost, or the answer ended before its end."""


class Silence(Exception):
    """Nothing came for a minute over a connection that stands."""


@dataclass
class Answer:
    """The answer so far. `pieces` are parts of the body that nobody has taken yet."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict[str, str])
    pieces: list[bytes] = field(default_factory=list[bytes])
    has_head: bool = False
    is_whole: bool = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self.headers[name.decode().lower()] = value.decode()

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self.has_head = True

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        self.pieces.append(body)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self.is_whole = True


class Exchange:
    """One exchange whose head has come."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._answer = Answer()
        self._parser = httptools.HttpResponseParser(self._answer)

    @property
    def status(self) -> int:
        return self._answer.status

    @property
    def headers(self) -> dict[str, str]:
        return self._answer.headers

    async def head(self) -> None:
        """Waits for the head. Raises Cut."""
        while not self._answer.has_head:
            await self._more()
        self._answer.status = self._parser.get_status_code()

    async def _more(self) -> None:
        try:
            data = await asyncio.wait_for(self._reader.read(READ_BYTES), SILENCE_LIMIT_S)
        except TimeoutError as error:
            raise Silence from error
        except OSError as error:
            raise Cut(str(error)) from error
        if not data:
            raise Cut("the connection was closed")
        self._parser.feed_data(data)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises Cut when it is not whole."""
        while True:
            taken, self._answer.pieces = self._answer.pieces, []
            for piece in taken:
                yield piece
            if self._answer.is_whole:
                return
            await self._more()

    async def body(self) -> bytes:
        """The whole body. Raises Cut."""
        return b"".join([piece async for piece in self.pieces()])

    async def events(self) -> AsyncIterator[tuple[int | None, bytes]]:
        """Server-sent events: id and data. One that was cut in two does not come. Raises Cut."""
        rest = b""
        async for piece in self.pieces():
            *whole, rest = (rest + piece).split(b"\n\n")
            for event in whole:
                found = parse(event)
                if found is not None:
                    yield found


def parse(event: bytes) -> tuple[int | None, bytes] | None:
    """The id and the data of one event; None for a comment."""
    position: int | None = None
    data: bytes | None = None
    for line in event.split(b"\n"):
        name, _, value = line.partition(b": ")
        if name == b"id":
            position = int(value)
        elif name == b"data":
            data = value
    return None if data is None else (position, data)


@asynccontextmanager
async def exchange(
    address: str,
    method: str,
    path: str,
    body: object = None,
    headers: dict[str, str] | None = None,
) -> AsyncIterator[Exchange]:
    """Asks, and waits for the head of the answer. The connection is closed at the end. Raises
    Cut.
    """
    url = urlsplit(address)
    content = b"" if body is None else msgspec.json.encode(body)
    lines = [f"{method} {path} HTTP/1.1", f"host: {url.netloc}", f"content-length: {len(content)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    try:
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
    except OSError as error:
        raise Cut(str(error)) from error
    try:
        writer.write("\r\n".join((*lines, "connection: close", "", "")).encode() + content)
        found = Exchange(reader)
        await found.head()
        yield found
    finally:
        writer.transport.abort()
