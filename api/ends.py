"""What a client is told of a request that did not end well: the same in a stream's last event and
in an answer of its own, on every route.

The sentences name no numbers: some clients look for those of statuses in them. What the journal
says beside its reason is in the field `detail`.
"""

from api.errors import BUSY, OVERLOADED, ApiError, overloaded, retry_headers
from scheduler.pace import RETRY_AFTER_MIN_S
from scheduler.streams import StreamEnd

DO_NOT_RETRY = {"x-should-retry": "false"}

GIVEN_UP = {
    "engine_failed": "The model failed on this request, each time that it was tried.",
    "server_deaths": "The server died while it worked on this request, each time that it did.",
}

CANCELLED = {
    "client_gone": (
        "The request was cancelled: its connection was lost, and nobody came back for it in time."
    ),
    "nobody_attached": (
        "The request was cancelled: the server was started again, and nobody came back for it in "
        "time."
    ),
    "on_restart": (
        "The request was cancelled: the server was started again, and ends what it finds "
        "unfinished."
    ),
}
"""Of who is not there to be told, for whoever reads it later."""


def from_end(end: StreamEnd, retry_after_s: int) -> ApiError:
    """The error for a request that was cancelled or aborted. `retry_after_s` is when to send it
    again, where that is of use.
    """
    if end.kind == "cancelled":
        return too_old(retry_after_s) if end.reason == "deadline" else cancelled(end)
    if end.reason in BUSY:
        return overloaded(end.reason, retry_after_s, detail=end.detail)
    return given_up(end)


def cancelled(end: StreamEnd) -> ApiError:
    """410: of the statuses that fit, the one that no client takes as a reason to try again."""
    return ApiError(
        410,
        CANCELLED.get(end.reason, f"The request was cancelled ({end.reason})."),
        code="request_cancelled",
        headers=DO_NOT_RETRY.copy(),
        more={"reason": end.reason, "retryable": False},
    )


def too_old(retry_after_s: int) -> ApiError:
    """504: SDKs send it again, twice at most, and each time it starts from what is saved of its
    prompt, so it gets further. As a 410 it would end an agent's work for good, and a 503 would say
    that the server is the reason, for which some clients try for ever.
    """
    return ApiError(
        504,
        "The request was not done within the time that a request may take here. What was computed "
        "of its prompt is kept: sent again, it starts from there.",
        code="deadline_exceeded",
        kind="server_error",
        headers=retry_headers(retry_after_s),
        more={"reason": "deadline", "retryable": True},
    )


def given_up(end: StreamEnd) -> ApiError:
    """500: it has been tried again as often as it may, so that the client need not."""
    return ApiError(
        500,
        GIVEN_UP[end.reason],
        code=end.reason,
        kind="server_error",
        headers=DO_NOT_RETRY.copy(),
        more={"reason": end.reason, "detail": end.detail, "retryable": False},
    )


def stopped(request_id: str) -> ApiError:
    """The error for an answer in one object that the server's stop came before."""
    return ApiError(
        503,
        "The server stopped before the answer was whole. The request goes on at its next start: "
        "read it there, or send it again.",
        code=OVERLOADED,
        kind="server_error",
        headers=retry_headers(RETRY_AFTER_MIN_S),
        more={
            "reason": "server_stopping",
            "stream": f"/v1/requests/{request_id}/stream",
            "retryable": True,
        },
    )
