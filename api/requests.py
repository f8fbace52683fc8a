"""Requests by their ids: listed, shown, read again from any position, cancelled."""

import asyncio

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from api import sse
from api.capacity import memory_object
from api.client import ClientWatch
from api.deps import Api, CurrentApi
from api.errors import ApiError, invalid, json_response, quoted, request_not_found
from api.exchange import answer_headers
from api.generate import DIALECTS
from api.models import known_model
from api.rendering import Progress
from api.settings import CANCEL_WAIT_S, MAX_LISTED_EVENTS, MAX_LISTED_REQUESTS
from api.streaming import EventStream, Reader
from scheduler.request import OPEN
from scheduler.service import RequestView
from scheduler.streams import RequestStream

router = APIRouter()

OPEN_STATES = tuple(phase.value for phase in OPEN)


def whole_number(request: Request, name: str, default: int, most: int) -> int:
    """A query parameter from 0 to `most`. Raises ApiError for anything else."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 19 and int(text) <= most):
        raise invalid(name, f"expected a whole number from 0 to {most}, got {quoted(text)}")
    return int(text)


def request_object(view: RequestView) -> dict[str, object]:
    """A request as these routes show it."""
    return {"object": "request", **msgspec.structs.asdict(view)}


async def known_request(api: Api, request_id: str) -> RequestView:
    """The request, open or ended. Raises ApiError for one that is unknown."""
    view = await api.service.view_request(request_id)
    if view is None:
        raise request_not_found(request_id)
    return view


@router.get("/v1/requests")
async def list_requests(request: Request, api: CurrentApi) -> Response:
    """All open requests, in the order of arrival, and memory. Query: `state`, `limit`."""
    state = request.query_params.get("state")
    if state is not None and state not in OPEN_STATES:
        known = ", ".join(OPEN_STATES)
        raise invalid("state", f"open requests are one of: {known}; got {quoted(state)}")
    limit = whole_number(request, "limit", MAX_LISTED_REQUESTS, MAX_LISTED_REQUESTS)
    view = await api.service.view()
    chosen = [item for item in view.requests if state in (None, item.state)]
    data = [request_object(item) for item in chosen[:limit]]
    body = {
        "object": "list",
        "data": data,
        "has_more": len(chosen) > limit,
        "memory": memory_object(view.memory, view.now_ns),
    }
    return json_response(body)


@router.get("/v1/requests/{request_id}")
async def show_request(api: CurrentApi, request_id: str) -> Response:
    """One request, as it is now or as it ended."""
    return json_response(request_object(await known_request(api, request_id)))


@router.get("/v1/requests/{request_id}/events")
async def list_events(request: Request, api: CurrentApi, request_id: str) -> Response:
    """What the journal says about a request. Query: `after` (a seq), `limit`."""
    after = whole_number(request, "after", 0, 2**62)
    limit = whole_number(request, "limit", MAX_LISTED_EVENTS, MAX_LISTED_EVENTS)
    await known_request(api, request_id)
    data = await api.service.events(request_id, after, limit + 1)
    body = {"object": "list", "data": data[:limit], "has_more": len(data) > limit}
    return json_response(body)


@router.delete("/v1/requests/{request_id}")
async def cancel_request(api: CurrentApi, request_id: str) -> Response:
    """Ends a request, and says how it ended: 200 if that is known within a moment, else 202. One
    that had ended stays as it is.
    """
    view = await known_request(api, request_id)
    if view.state not in OPEN_STATES:
        return json_response(request_object(view))
    stream = await api.service.find(request_id)
    api.service.cancel(request_id)
    if stream is not None:
        await wait_end(stream)
    view = await known_request(api, request_id)
    status = 202 if view.state in OPEN_STATES else 200
    return json_response(request_object(view), status=status)


async def wait_end(stream: RequestStream) -> None:
    """Returns at the end of the stream, or when that takes longer than a moment."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + CANCEL_WAIT_S
    while stream.end is None and not stream.cut and (left_s := deadline - clock()) > 0:
        await stream.wait(len(stream.tokens), left_s)


@router.get("/v1/requests/{request_id}/stream")
async def read_stream(request: Request, api: CurrentApi, request_id: str) -> Response:
    """The answer as events, in the dialect of the route that it was asked on; only what comes after
    a position, if one is given (query `after`, or the header Last-Event-ID).

    A reader that leaves changes nothing for the request.
    """
    after = position_asked(request)
    view = await known_request(api, request_id)
    served = await known_model(api)
    if view.model_fingerprint != served.facts.fingerprint:
        raise other_model(request_id)
    stream = await api.service.find(request_id)
    if stream is None:
        raise request_not_found(request_id)
    dialect = DIALECTS[stream.parameters.route](request_id, stream.parameters)
    reader = Reader(stream, Progress(stream, served.tokenizer, after or 0), dialect, api.service)
    first = sse.event(dialect.opening(), 0) if after is None else first_sign(reader, stream, after)
    headers = answer_headers(api, request_id)
    return EventStream(reader.events(first), ClientWatch(request), headers, on_client_gone=nothing)


def nothing() -> None:
    """What a reader's leaving changes."""


def position_asked(request: Request) -> int | None:
    """How many output tokens the reader has seen; null when it wants all. Raises ApiError for what
    is no position.
    """
    most = 2**31 - 1
    if "after" in request.query_params:
        return whole_number(request, "after", 0, most)
    text = request.headers.get("last-event-id")
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 11 and int(text) <= most):
        raise invalid("Last-Event-ID", f"expected a whole number, got {quoted(text)}")
    return int(text)


def first_sign(reader: Reader, stream: RequestStream, after: int) -> bytes | None:
    """A heartbeat for a reader for whom there is nothing yet, so that it hears at once."""
    return None if stream.has_news(after) else reader.heartbeat()


def other_model(request_id: str) -> ApiError:
    """The answer for a request of a model that was served here before."""
    return ApiError(
        409,
        f"The request {request_id} belongs to another model than the one that is served now.",
        code="other_model",
        param="request_id",
    )
