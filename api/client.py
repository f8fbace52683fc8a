"""The client at the other end of one exchange: whether it is still there, and cutting it off."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar, cast

from fastapi import Request
from starlette.types import Scope

from api.errors import ClientLeft

T = TypeVar("T")

CUT = "fermata.cut"
"""The ASGI extension by which api/protocol.py lets the application close a socket."""


class ClientWatch:
    """Notices within a moment that the client has closed its connection.

    It may begin once the body is read: from then on the only message that comes is the one that
    says so. `close` is called when the exchange is over.
    """

    def __init__(self, request: Request) -> None:
        self._scope = request.scope
        self._gone = asyncio.ensure_future(until_gone(request))

    async def race(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises ClientLeft, and cancels it, when the client leaves first."""
        working = asyncio.ensure_future(work)
        try:
            await asyncio.wait((working, self._gone), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientLeft
            return working.result()
        finally:
            working.cancel()
            await asyncio.wait((working,))

    async def cut(self) -> None:
        """Closes the socket in the middle of the answer, so that the client sees that it is not
        whole.
        """
        abort_of(self._scope)()
        await self._gone

    def close(self) -> None:
        """Ends the watching."""
        self._gone.cancel()


async def until_gone(request: Request) -> None:
    """Returns when the connection is closed."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def abort_of(scope: Scope) -> Any:
    """The function that closes this exchange's socket at once."""
    extensions = cast("dict[str, dict[str, Any]]", scope["extensions"])
    return extensions[CUT]["abort"]
