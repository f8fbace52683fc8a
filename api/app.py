"""The one place where the HTTP application is put together."""

from http import HTTPStatus

import structlog
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from api import cache, capacity, generate, health, holding, models, requests, takeup
from api.deps import Api
from api.errors import ApiError, ClientLeft, saturated, unreadable
from api.gate import Gate
from api.prompt import Preparer
from api.settings import MAX_PREPARING
from journal.errors import JournalError
from scheduler.service import Saturated, Service

log = structlog.get_logger(__name__)


def create_app(service: Service) -> FastAPI:
    """The application over a service. `close_app` ends the thread that it starts."""
    # Bodies are read by api/body.py, so a generated schema would say nothing of them.
    app = FastAPI(title="Fermata", openapi_url=None, redirect_slashes=False)
    app.state.api = Api(service, Preparer(MAX_PREPARING))
    for module in (generate, requests, takeup, holding, models, capacity, health, cache):
        app.include_router(module.router)
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(ClientLeft, on_client_left)
    app.add_exception_handler(Saturated, on_saturated)
    app.add_exception_handler(JournalError, on_journal_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(HTTPStatus.INTERNAL_SERVER_ERROR, on_bug)
    app.add_middleware(Gate, api=app.state.api)
    return app


def close_app(app: FastAPI) -> None:
    """Ends the tokenizer's thread."""
    app.state.api.preparer.close()


async def on_api_error(_: Request, error: Exception) -> Response:
    """An error that we raised ourselves."""
    assert isinstance(error, ApiError)
    return error.response()


async def on_client_left(_: Request, error: Exception) -> Response:
    """Closes an exchange whose client has left. Nobody reads this answer; proxies log 499."""
    assert isinstance(error, ClientLeft)
    return Response(status_code=499)


async def on_saturated(_: Request, error: Exception) -> Response:
    """The scheduler cannot answer now."""
    assert isinstance(error, Saturated)
    return saturated(error).response()


async def on_journal_error(request: Request, error: Exception) -> Response:
    """The journal cannot be read for an answer. What is being served does not need that."""
    assert isinstance(error, JournalError)
    log.warning("the journal cannot be read", path=request.url.path, error=str(error))
    api: Api = request.app.state.api
    return unreadable(api.service.retry_after_s()).response()


async def on_http_error(request: Request, error: Exception) -> Response:
    """What the router says about paths and methods that are not there."""
    assert isinstance(error, HTTPException)
    kinds = {404: "not_found", 405: "method_not_allowed"}
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = kinds.get(error.status_code, "http_error")
    headers = dict(error.headers or {})
    return ApiError(error.status_code, message, code=code, headers=headers).response()


async def on_bug(_: Request, error: Exception) -> Response:
    """An exception that nobody expected. The server logs it after this answer."""
    message = f"The server made a mistake ({type(error).__name__}). Its log says more."
    return ApiError(500, message, code="internal_error", kind="server_error").response()
