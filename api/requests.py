"""Requests by their ids: listed, shown, cancelled. Each caller sees those that are its own, and of
others not even that they are there.
"""

import asyncio

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from api.capacity import memory_object
from api.deps import Api, CurrentApi, CurrentCaller
from api.digests import Caller
from api.errors import invalid, json_response, quoted, request_not_found
from api.settings import CANCEL_WAIT_S, MAX_LISTED_EVENTS, MAX_LISTED_REQUESTS
from scheduler.request import OPEN
from scheduler.streams import RequestStream
from scheduler.views import RequestView, ServerView

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


HIDDEN = ("owner_digest", "joined_id")
"""Fields of a view that are for this server alone."""


def request_object(view: RequestView) -> dict[str, object]:
    """A request as these routes show it."""
    fields = msgspec.structs.asdict(view)
    return {"object": "request", **{name: fields[name] for name in fields if name not in HIDDEN}}


async def known_request(api: Api, caller: Caller, request_id: str) -> RequestView:
    """The request, open or ended; for one that equals another one, that. Raises ApiError for one
    that is unknown, or another's.
    """
    view = await own_request(api, caller, request_id)
    return view if view.joined_id is None else await own_request(api, caller, view.joined_id)


async def own_request(api: Api, caller: Caller, request_id: str) -> RequestView:
    """The request under this very id. Raises ApiError for one that is unknown, or another's."""
    view = await api.service.view_request(request_id)
    if view is None or not caller.may_see(view.owner_digest):
        raise request_not_found(request_id)
    if caller.sees_all or view.wait is None or view.wait.request_id is None:
        return view
    other = await api.service.view_request(view.wait.request_id)
    is_own = other is not None and caller.may_see(other.owner_digest)
    return view if is_own else without_other(view, set())


def without_others(view: ServerView, caller: Caller) -> ServerView:
    """What this caller may see of all that is open: no id of another's request."""
    if caller.sees_all:
        return view
    own = [item for item in view.requests if caller.may_see(item.owner_digest)]
    ids = {item.id for item in own}
    reliefs = [r for r in view.memory.reliefs if r.request_id is None or r.request_id in ids]
    return msgspec.structs.replace(
        view,
        requests=[without_other(item, ids) for item in own],
        memory=msgspec.structs.replace(view.memory, reliefs=reliefs),
    )


def without_other(view: RequestView, ids: set[str]) -> RequestView:
    """The request without the id of the one that it waits for, if that is not among these."""
    if view.wait is None or view.wait.request_id is None or view.wait.request_id in ids:
        return view
    wait = msgspec.structs.replace(view.wait, request_id=None)
    return msgspec.structs.replace(view, wait=wait)


@router.get("/v1/requests")
async def list_requests(request: Request, api: CurrentApi, caller: CurrentCaller) -> Response:
    """The open requests, in the order of arrival, and memory. Query: `state`, `limit`."""
    state = request.query_params.get("state")
    if state is not None and state not in OPEN_STATES:
        known = ", ".join(OPEN_STATES)
        raise invalid("state", f"open requests are one of: {known}; got {quoted(state)}")
    limit = whole_number(request, "limit", MAX_LISTED_REQUESTS, MAX_LISTED_REQUESTS)
    view = without_others(await api.service.view(), caller)
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
async def show_request(api: CurrentApi, caller: CurrentCaller, request_id: str) -> Response:
    """One request, as it is now or as it ended."""
    return json_response(request_object(await known_request(api, caller, request_id)))


@router.get("/v1/requests/{request_id}/events")
async def list_events(
    request: Request, api: CurrentApi, caller: CurrentCaller, request_id: str
) -> Response:
    """What the journal says about this very request. Query: `after` (a seq), `limit`."""
    after = whole_number(request, "after", 0, 2**62)
    limit = whole_number(request, "limit", MAX_LISTED_EVENTS, MAX_LISTED_EVENTS)
    await own_request(api, caller, request_id)
    data = await api.service.events(request_id, after, limit + 1)
    body = {"object": "list", "data": data[:limit], "has_more": len(data) > limit}
    return json_response(body)


@router.delete("/v1/requests/{request_id}")
async def cancel_request(api: CurrentApi, caller: CurrentCaller, request_id: str) -> Response:
    """Ends a request, and says how it ended: 200 if that is known within a moment, else 202. One
    that had ended stays as it is.
    """
    view = await known_request(api, caller, request_id)
    if view.state not in OPEN_STATES:
        return json_response(request_object(view))
    stream = await api.service.find(view.id)
    api.service.cancel(view.id)
    if stream is not None:
        await wait_end(stream)
    view = await known_request(api, caller, view.id)
    status = 202 if view.state in OPEN_STATES else 200
    return json_response(request_object(view), status=status)


async def wait_end(stream: RequestStream) -> None:
    """Returns at the end of the stream, or when that takes longer than a moment."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + CANCEL_WAIT_S
    while stream.end is None and not stream.cut and (left_s := deadline - clock()) > 0:
        await stream.wait(len(stream.tokens), left_s)
