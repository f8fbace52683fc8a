"""What the handlers of one server share."""

from typing import Annotated, cast

from fastapi import Depends, Request

from api.digests import Caller
from api.metrics import HttpMetrics
from api.prompt import Preparer
from scheduler.service import Service
from scheduler.settings import ServerSettings, Settings


class Api:
    """One per server. Touched on the asyncio thread only."""

    def __init__(self, service: Service, preparer: Preparer) -> None:
        self.service = service
        self.settings: Settings = service.settings
        self.preparer = preparer
        self.metrics = HttpMetrics()

    @property
    def server(self) -> ServerSettings:
        """The settings of HTTP."""
        return self.settings.server


def api_of(request: Request) -> Api:
    """The server's, as `create_app` put it there."""
    return cast("Api", request.app.state.api)


CurrentApi = Annotated[Api, Depends(api_of)]

CALLER = "caller"
"""Under which an exchange's state has who has sent it (api/gate.py)."""


def caller_of(request: Request) -> Caller:
    """Who has sent this, of whom the gate has looked at the key."""
    caller = request.scope["state"][CALLER]
    assert isinstance(caller, Caller), "nobody comes here without a key that is ours"
    return caller


CurrentCaller = Annotated[Caller, Depends(caller_of)]
