"""A request from its body to its answer: the same steps for every route that generates.

Read and check, count its tokens in the tokenizer's thread, hand it to the scheduler, wait for its
judgement, answer. Nothing is known of a request to anybody before it is handed over, so whatever
fails until then leaves no trace.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import msgspec
import structlog
from fastapi import Request
from fastapi.responses import Response

from api import sse
from api.body import decode_body, read_body
from api.client import ClientWatch
from api.deps import Api
from api.dialect import Dialect
from api.errors import (
    ApiError,
    ClientLeft,
    from_rejection,
    json_response,
    overloaded,
    saturated,
)
from api.fields import SharedFields
from api.models import check_model_name, known_model
from api.prompt import Prompt
from api.rendering import Progress
from api.settings import (
    MAX_CLIENT_REQUEST_ID,
    MAX_LISTED_FIELDS,
    MAX_QUOTED_CHARACTERS,
)
from api.streaming import EventStream, Reader
from journal.crashpoints import reach
from scheduler.engine.model import Tokenizer
from scheduler.pace import RETRY_AFTER_MIN_S
from scheduler.parameters import RequestParameters, SamplingParameters
from scheduler.service import Saturated
from scheduler.streams import Arrival, Rejected, RequestStream, StreamCut

log = structlog.get_logger("api")

Body = TypeVar("Body", bound=msgspec.Struct)


class Question(Protocol):
    """A request whose body was checked."""

    route: str
    prompt_param: str
    fields: SharedFields

    @property
    def max_tokens(self) -> int | None: ...

    @property
    def max_tokens_param(self) -> str: ...

    def sampling(self, tokenizer: Tokenizer) -> SamplingParameters: ...

    def prompt(self, tokenizer: Tokenizer) -> Callable[[], Prompt]: ...

    def options(self) -> dict[str, object]: ...


@dataclass(frozen=True)
class Route(Generic[Body]):
    """What makes a route: the class of its body, how it is checked, and its dialect."""

    body: type[Body]
    question: Callable[[Body], Question]
    dialect: type[Dialect]


async def exchange(request: Request, api: Api, route: Route[Body]) -> Response:
    """Answers a POST. Raises ApiError, with the request's id in its headers, for one that cannot be
    answered.
    """
    request_id = api.service.new_request_id()
    try:
        with ExitStack() as stack:
            return await answer(request, api, route, request_id, stack)
    except ApiError as error:
        error.headers |= answer_headers(api, request_id)
        raise


def answer_headers(api: Api, request_id: str) -> dict[str, str]:
    """What every answer about a generation carries: its id, and how long a request may be here, as
    soon as that is known.
    """
    headers = {"x-request-id": request_id}
    if api.service.served is not None:
        most = str(api.service.max_context_tokens)
        headers |= {"x-omlx-max-context-tokens": most, "x-max-context-tokens": most}
    return headers


async def answer(
    request: Request, api: Api, route: Route[Body], request_id: str, stack: ExitStack
) -> Response:
    """The steps, in their order. `stack` closes the watch over the client, unless a stream takes it
    along.
    """
    served = await known_model(api)
    async with api.preparer.turns:
        question = await read_question(request, api, route, request_id)
        check_model_name(api, question.fields.model, served)
        sampling = question.sampling(served.tokenizer)
        watch = ClientWatch(request)
        stack.callback(watch.close)
        prompt = await watch.race(api.preparer.run(question.prompt(served.tokenizer)))
    parameters = RequestParameters(
        route=question.route,
        model=served.name,
        created=int(time.time()),
        stream=bool(question.fields.stream),
        sampling=sampling,
        options=question.options(),
    )
    arrival = Arrival(
        request_id=request_id,
        client_request_id=client_request_id(request),
        route=question.route,
        stream=parameters.stream,
        prompt=prompt.token_ids,
        max_tokens=question.max_tokens,
        parameters=parameters,
        num_suffix_tokens=prompt.num_suffix_tokens,
        keep_output=prompt.keep_output,
    )
    stream = await submit(api, watch, question, arrival)
    dialect = route.dialect(request_id, parameters)
    reader = Reader(stream, Progress(stream, served.tokenizer), dialect, api.service)
    if not parameters.stream:
        return await whole_answer(api, watch, reader, request_id)
    stack.pop_all()
    events = reader.events(sse.event(dialect.opening(), 0))
    gone = partial(client_gone, api, request_id)
    return EventStream(events, watch, answer_headers(api, request_id), on_client_gone=gone)


async def read_question(
    request: Request, api: Api, route: Route[Body], request_id: str
) -> Question:
    """The body, read and checked. Fields that nobody here knows are skipped, and logged."""
    body = await read_body(request, api.server.body_limit_bytes)
    fields, unknown = decode_body(body, route.body)
    if unknown:
        names = [name[:MAX_QUOTED_CHARACTERS] for name in unknown[:MAX_LISTED_FIELDS]]
        log.info("unknown_fields", request_id=request_id, fields=names, num_fields=len(unknown))
    return route.question(fields)


def client_request_id(request: Request) -> str | None:
    """The client's own X-Request-Id, cut to printable characters and a bounded length."""
    given = request.headers.get("x-request-id", "")
    printable = "".join(letter for letter in given if letter.isascii() and letter.isprintable())
    return printable[:MAX_CLIENT_REQUEST_ID] or None


async def submit(
    api: Api, watch: ClientWatch, question: Question, arrival: Arrival
) -> RequestStream:
    """Hands the request over; returns its stream once it is taken.

    Raises ApiError when it is refused, and ClientLeft when the client leaves meanwhile.
    """
    try:
        stream = api.service.submit(arrival)
        judgement = await watch.race(stream.judged())
    except Saturated as error:
        raise saturated(error) from error
    except StreamCut as error:
        raise overloaded("server_stopping", RETRY_AFTER_MIN_S) from error
    except ClientLeft:
        client_gone(api, arrival.request_id)
        raise
    if isinstance(judgement, Rejected):
        raise from_rejection(
            judgement.event,
            prompt_param=question.prompt_param,
            max_tokens_param=question.max_tokens_param,
            retry_after_s=api.service.retry_after_s(),
        )
    return stream


async def whole_answer(api: Api, watch: ClientWatch, reader: Reader, request_id: str) -> Response:
    """The answer as one object. Raises ApiError when the request did not end well."""
    try:
        body = await watch.race(reader.whole())
    except ClientLeft:
        client_gone(api, request_id)
        raise
    reach("http.whole.before")
    return json_response(body, headers=answer_headers(api, request_id))


def client_gone(api: Api, request_id: str) -> None:
    """The connection that carried the request is lost."""
    api.metrics.clients_gone.inc()
    log.info("client_gone", request_id=request_id)
    api.service.client_gone(request_id)
