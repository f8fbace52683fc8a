"""What every exchange passes first: the key, and the bound on how many are open.

Pure ASGI: a middleware of the convenient kind would hide from the handlers that a client left.
"""

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.deps import Api
from api.errors import ApiError, overloaded
from api.settings import MAX_CONNECTIONS

OPEN_PATHS = ("/health", "/ready")
"""Answered without a key: what watches over the server need not be trusted with its work."""


class Gate:
    """See the module's text."""

    def __init__(self, app: ASGIApp, api: Api) -> None:
        self._app = app
        self._api = api
        key = api.server.api_key
        self._key = None if key is None else key.encode()
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets the exchange pass, or answers it with an error."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._api.metrics.answers.labels(str(message["status"])).inc()
            await send(message)

        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal.response()(scope, receive, counted)
            return
        self._num_open += 1
        self._api.metrics.open_exchanges.set(self._num_open)
        try:
            await self._app(scope, receive, counted)
        finally:
            self._num_open -= 1
            self._api.metrics.open_exchanges.set(self._num_open)

    def _refusal(self, scope: Scope) -> ApiError | None:
        if not (scope["path"] in OPEN_PATHS or self._has_key(scope)):
            return wrong_key()
        if self._num_open >= MAX_CONNECTIONS:
            return overloaded("connections", self._api.service.retry_after_s())
        return None

    def _has_key(self, scope: Scope) -> bool:
        given = key_given(Headers(scope=scope))
        return self._key is None or hmac.compare_digest(given, self._key)


def key_given(headers: Headers) -> bytes:
    """The key in the request, in OpenAI's header or Anthropic's; empty when there is none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip().encode("latin-1")
    return headers.get("x-api-key", "").encode("latin-1")


def wrong_key() -> ApiError:
    """The 401, also for no key at all."""
    return ApiError(
        401,
        "This server needs its API key, as `Authorization: Bearer KEY` or `x-api-key: KEY`.",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )
