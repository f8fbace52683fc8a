"""`POST /v1/requests/{id}/pause` and `/resume`: a request is held by hand, and goes on.

Both may be sent again. Each answers as soon as it has happened, with 200; when that takes longer
than a moment, with 202 and the request as it is by then. Its `state` and `wait` say how far it has
come, and what it waits for.
"""

import asyncio
from collections.abc import Callable

from fastapi import APIRouter
from fastapi.responses import Response

from api.deps import Api, CurrentApi, CurrentCaller
from api.digests import Caller
from api.errors import ApiError, json_response
from api.requests import OPEN_STATES, known_request, request_object
from api.settings import HOLD_LOOK_S, HOLD_WAIT_S
from scheduler.request import Phase
from scheduler.views import RequestView

router = APIRouter()


@router.post("/v1/requests/{request_id}/pause")
async def pause_request(api: CurrentApi, caller: CurrentCaller, request_id: str) -> Response:
    """Holds the request until it is released: 200 once it has no row any more. Its client's stream
    stays open.

    Raises ApiError: 404 when it is unknown, 409 when it has ended, also before it could be held.
    """
    view = await known_request(api, caller, request_id)  # one that is unknown cannot be wished for
    api.service.hold(view.id)
    return await answer(api, caller, view.id, is_held)


@router.post("/v1/requests/{request_id}/resume")
async def resume_request(api: CurrentApi, caller: CurrentCaller, request_id: str) -> Response:
    """Releases the request: 200 once it is in the engine or the queue again, 202 while it waits for
    memory or a row. Nothing changes for one that nobody holds.

    Raises ApiError: 404 when it is unknown, 409 when it has ended.
    """
    view = await known_request(api, caller, request_id)  # one that is unknown cannot be wished for
    api.service.release(view.id)
    return await answer(api, caller, view.id, goes_on)


def is_held(view: RequestView) -> bool:
    """Whether it is held by hand. One that this server cannot run has nothing to be taken from."""
    return view.hold and (view.state == Phase.PAUSED or view.held_reason is not None)


def goes_on(view: RequestView) -> bool:
    """Whether it has left its pause behind."""
    return not view.hold and view.state not in (Phase.PAUSING, Phase.PAUSED, Phase.RESUMING)


async def answer(
    api: Api, caller: Caller, request_id: str, is_done: Callable[[RequestView], bool]
) -> Response:
    """The request once it is so, or as it is after a moment."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + HOLD_WAIT_S
    while True:
        view = await known_request(api, caller, request_id)
        must_be_open(view)
        if is_done(view):
            return json_response(request_object(view))
        if clock() >= deadline:
            return json_response(request_object(view), status=202)
        await asyncio.sleep(HOLD_LOOK_S)


def must_be_open(view: RequestView) -> None:
    """Raises ApiError for a request that has ended: there is nothing to hold or to go on."""
    if view.state not in OPEN_STATES:
        raise ApiError(
            409,
            f"The request has ended ({view.state}: {view.reason}), so it cannot be held or go on.",
            code="request_has_ended",
            param="request_id",
            more={"state": view.state, "reason": view.reason},
        )
