"""A request's output on its way to one client: as events while it comes, or whole at its end."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api import sse
from api.client import ClientWatch
from api.dialect import Dialect
from api.ends import from_end, stopped
from api.errors import ClientLeft
from api.rendering import Piece, Progress
from api.settings import RENDER_TOKENS
from journal.crashpoints import reach
from scheduler.service import Service
from scheduler.streams import RequestStream, StreamEnd


class SocketCut(Exception):
    """The server stops and the request goes on later: the socket is closed with no last event."""


class Reader:
    """One client's way through one stream, in the dialect of its route."""

    def __init__(
        self, stream: RequestStream, progress: Progress, dialect: Dialect, service: Service
    ) -> None:
        settings = service.settings.server
        self._stream = stream
        self._progress = progress
        self._dialect = dialect
        self._retry_after_s = service.retry_after_s
        self._form = settings.heartbeat_form
        self._heartbeat_s = settings.heartbeat_ms / 1000

    async def events(self, first: bytes | None) -> AsyncGenerator[bytes]:
        """All events from here on; `first` goes before them. After a while with none, a heartbeat.

        Raises SocketCut when the server stops.
        """
        clock = asyncio.get_running_loop().time
        if first is not None:
            yield first
        sent_at = clock()
        while True:
            piece = self._progress.take(RENDER_TOKENS)
            if piece is not None:
                yield sse.event(self._dialect.delta(piece), piece.position)
                sent_at = clock()
            if self._progress.behind:
                await asyncio.sleep(0)
                continue
            if self._stream.end is not None:
                break
            if self._stream.cut:
                raise SocketCut
            await self._stream.wait(self._progress.position, self._patience_s(sent_at, clock()))
            if self._is_silent(sent_at, clock()):
                yield self.heartbeat()
                sent_at = clock()
        for last in self._last_events(self._stream.end):
            yield last

    def heartbeat(self) -> bytes:
        """One event, or comment, that says nothing and has no id."""
        if self._form == "comment":
            return sse.COMMENT
        return sse.event(self._dialect.heartbeat(), None)

    async def whole(self) -> dict[str, object]:
        """The answer as one object, when it has ended. Raises ApiError if it did not end well, or
        the server stops first.
        """
        pieces: list[Piece] = []
        while True:
            piece = self._progress.take(RENDER_TOKENS)
            if piece is not None:
                pieces.append(piece)
            if self._progress.behind:
                await asyncio.sleep(0)
            elif self._stream.end is not None:
                break
            elif self._stream.cut:
                raise stopped(self._stream.request_id)
            else:
                await self._stream.wait(self._progress.position, None)
        end = self._stream.end
        if end.kind != "finished":
            raise from_end(end, self._retry_after_s())
        return self._dialect.whole(joined(pieces, end, self._progress.asked_logprobs), end)

    def _patience_s(self, sent_at: float, now: float) -> float | None:
        return None if self._form == "off" else max(0.0, sent_at + self._heartbeat_s - now)

    def _is_silent(self, sent_at: float, now: float) -> bool:
        if self._form == "off" or self._stream.has_news(self._progress.position):
            return False
        return now >= sent_at + self._heartbeat_s

    def _last_events(self, end: StreamEnd) -> list[bytes]:
        if end.kind != "finished":
            error = from_end(end, self._retry_after_s())
            return [sse.event(error.body(), end.num_output_tokens)]
        return [sse.event(data, end.num_output_tokens) for data in self._dialect.closing(end)]


class EventStream(Response):
    """The answer that a reader's events make. `on_client_gone` is called when the client leaves
    before all was sent, and `last` is closed when it is over, however it ends.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        watch: ClientWatch,
        headers: dict[str, str],
        *,
        on_client_gone: Callable[[], None],
        last: ExitStack,
    ) -> None:
        super().__init__(headers={**sse.HEADERS, **headers})
        del self.headers["content-length"]
        self._events = events
        self._watch = watch
        self._on_client_gone = on_client_gone
        self._last = last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it. Not a middleware's business: the client is watched here, also while no event
        is due and while the client does not read.
        """
        del scope, receive  # The watch has them.
        with self._last:
            try:
                await self._watch.race(self._send(send))
            except ClientLeft:
                self._on_client_gone()
            except SocketCut:
                await self._watch.cut()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        reach("http.start.before")
        await send(start)
        reach("http.start.after")
        async with aclosing(self._events) as events:
            async for event in events:
                reach("http.event.before")
                await send({"type": "http.response.body", "body": event, "more_body": True})
                reach("http.event.after")
        reach("http.end.before")
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        reach("http.end.after")


def joined(pieces: list[Piece], end: StreamEnd, asked_logprobs: bool) -> Piece:
    """All pieces as one."""
    tokens = [token for piece in pieces for token in piece.tokens or ()]
    text = "".join(piece.text for piece in pieces)
    return Piece(end.num_output_tokens, text, tokens if asked_logprobs else None)
