"""What every exchange passes first: the key, and the bound on how many are open.

`server.api_key` is the operator's, who sees and touches everything. Whoever has one of
`server.client_keys` sees and touches what was sent with it. Where there are no keys nobody is told
apart from anybody, and a key that is given only says which requests are the same one.

Pure ASGI: a middleware of the convenient kind would hide from the handlers that a client left.
"""

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.deps import CALLER, Api
from api.digests import Caller, owner_digest
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
        self._client_keys = [key.encode() for key in api.server.client_keys]
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets the exchange pass, or answers it with an error."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._api.metrics.answers.labels(str(message["status"])).inc()
            await send(message)

        caller = self._caller(scope)
        scope["state"] = {CALLER: caller}
        refusal = self._refusal(scope, caller)
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

    def _refusal(self, scope: Scope, caller: Caller | None) -> ApiError | None:
        if caller is None and scope["path"] not in OPEN_PATHS:
            return wrong_key()
        if self._num_open >= MAX_CONNECTIONS:
            return overloaded("connections", self._api.service.retry_after_s())
        return None

    def _caller(self, scope: Scope) -> Caller | None:
        """Who has sent this; null for a key that is none of ours."""
        given = key_given(Headers(scope=scope))
        is_operator = self._key is None or hmac.compare_digest(given, self._key)
        is_client = [hmac.compare_digest(given, key) for key in self._client_keys]
        if not (is_operator or any(is_client)):
            return None
        return Caller(given, owner_digest(self._api.service.secret, given), is_operator)


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
