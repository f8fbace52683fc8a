"""`GET /v1/requests/{id}/stream`: an answer is read from any position, while it comes or later.

Any number of readers may follow one request, each at its own pace: what it has put out is there
once for all of them, and a connection that does not take more holds only its own reader up.
"""

from contextlib import ExitStack
from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response

from api import sse
from api.client import ClientWatch
from api.deps import Api, CurrentApi, CurrentCaller
from api.errors import ApiError, answer_expired, invalid, no_answer, quoted
from api.exchange import answer_headers, note_lost
from api.generate import DIALECTS
from api.models import known_model
from api.rendering import Progress
from api.requests import known_request, whole_number
from api.streaming import EventStream, Reader
from scheduler.streams import RequestStream
from scheduler.views import RequestView

router = APIRouter()

MOST = 2**31 - 1
"""The largest position that is looked at."""

AFTER, LAST_EVENT_ID = "after", "Last-Event-ID"


@router.get("/v1/requests/{request_id}/stream")
async def read_stream(
    request: Request, api: CurrentApi, caller: CurrentCaller, request_id: str
) -> Response:
    """The answer as events, in the dialect of the route that it was asked on; only what comes after
    a position, if one is given (query `after`, or the header Last-Event-ID).

    Who reads it is a client of the request: the last one that leaves makes it an orphan.
    """
    after = position_asked(request)
    view = await known_request(api, caller, request_id)
    served = await known_model(api)
    if view.model_fingerprint != served.facts.fingerprint:
        raise other_model(view.id)
    stream = await known_stream(api, view)
    must_be_within(request, stream, after)
    dialect = DIALECTS[stream.parameters.route](view.id, stream.parameters)
    reader = Reader(stream, Progress(stream, served.tokenizer, after or 0), dialect, api.service)
    first = sse.event(dialect.opening(), 0) if after is None else first_sign(reader, stream, after)
    watch = ClientWatch(request)
    with ExitStack() as last:
        last.callback(watch.close)
        last.callback(api.service.leave, stream)
        api.service.follow(stream)
        return EventStream(
            reader.events(first),
            watch,
            answer_headers(api, view.id),
            on_client_gone=partial(note_lost, api, view.id),
            last=last.pop_all(),
        )


async def known_stream(api: Api, view: RequestView) -> RequestStream:
    """The stream of a request. Raises ApiError where there is none, or none any more."""
    stream = await api.service.find(view.id)
    if stream is None:
        raise no_answer(view.id) if view.state == "rejected" else answer_expired(view.id)
    return stream


def position_asked(request: Request) -> int | None:
    """How many output tokens the reader has seen; null when it wants all. Raises ApiError for what
    is no position, and for two that differ.
    """
    text = request.headers.get(LAST_EVENT_ID)
    by_header = None if text is None else whole_position(text)
    if AFTER not in request.query_params:
        return by_header
    if len(set(request.query_params.getlist(AFTER))) > 1:
        raise invalid(AFTER, "it is given twice, and differs")
    after = whole_number(request, AFTER, 0, MOST)
    if by_header not in (None, after):
        raise invalid(AFTER, f"it says {after}, and the header {LAST_EVENT_ID} says {by_header}")
    return after


def whole_position(text: str) -> int:
    """The position in a header. Raises ApiError for anything else."""
    if not (text.isascii() and text.isdecimal() and len(text) < 11 and int(text) <= MOST):
        raise invalid(LAST_EVENT_ID, f"expected a whole number, got {quoted(text)}")
    return int(text)


def must_be_within(request: Request, stream: RequestStream, after: int | None) -> None:
    """Raises ApiError for a position that the answer does not have: what comes behind it would not
    be what follows on what the reader has.
    """
    num_tokens = len(stream.tokens)
    if after is None or after <= num_tokens:
        return
    has = "has put out so far" if stream.end is None else "has put out in all"
    param = AFTER if AFTER in request.query_params else LAST_EVENT_ID
    error = invalid(
        param,
        f"position {after} is past the end: the request {has} {num_tokens} tokens",
        "position_past_end",
    )
    error.more |= {"position": after, "num_output_tokens": num_tokens}
    raise error


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
