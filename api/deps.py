"""What the handlers of one server share."""

from typing import Annotated, cast

from fastapi import Depends, Request

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
