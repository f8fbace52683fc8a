"""A request from its body to its answer: the same steps for every route that generates.

Read and check, count its tokens in the tokenizer's thread, hand it to the scheduler, wait for its
judgement, answer. Nothing is known of a request to anybody before it is handed over, so whatever
fails until then leaves no trace. One that was sent before is answered by the request that it
equals: from the start of its answer, under its id, in the form that is asked for now.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import msgspec
import structlog
from fastapi import Request
from fastapi.responses import Response

from api import sse
from api.body import decode_body, read_body
from api.client import ClientWatch
from api.deps import Api, caller_of
from api.dialect import Dialect
from api.digests import Digests, Sent, digests_of, sent_with
from api.errors import (
    ApiError,
    ClientLeft,
    from_rejection,
    json_response,
    overloaded,
    saturated,
    unavailable,
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
from scheduler.streams import Arrival, Joined, Rejected, RequestStream, StreamCut

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
    asked = Asked(request, api, api.service.new_request_id())
    try:
        with ExitStack() as last:
            return await answer(asked, route, last)
    except ApiError as error:
        error.headers |= answer_headers(api, asked.request_id)
        raise


@dataclass
class Asked:
    """One POST. `request_id` is that of the request that answers it, as soon as it is known."""

    request: Request
    api: Api
    request_id: str

    def client_gone(self) -> None:
        """The connection that was to carry the answer is lost."""
        note_lost(self.api, self.request_id)


def answer_headers(api: Api, request_id: str) -> dict[str, str]:
    """What every answer about a generation carries: its id, and how long a request may be here, as
    soon as that is known.
    """
    headers = {"x-request-id": request_id}
    if api.service.served is not None:
        most = str(api.service.max_context_tokens)
        headers |= {"x-omlx-max-context-tokens": most, "x-max-context-tokens": most}
    return headers


async def answer(asked: Asked, route: Route[Body], last: ExitStack) -> Response:
    """The steps, in their order. `last` closes the watch over the client and says that it follows
    no more, when all is over: a stream takes it along.
    """
    request, api = asked.request, asked.api
    sent = sent_with(request.headers, caller_of(request))
    served = await known_model(api)
    async with api.preparer.turns:
        body, question = await read_question(asked, route)
        check_model_name(api, question.fields.model, served)
        sampling = question.sampling(served.tokenizer)
        watch = ClientWatch(request)
        last.callback(watch.close)
        work = prepare(api, served.tokenizer, question, sent, body)
        prompt, digests = await watch.race(api.preparer.run(work))
    parameters = RequestParameters(
        route=question.route,
        model=served.name,
        created=int(time.time()),
        stream=bool(question.fields.stream),
        sampling=sampling,
        options=question.options(),
    )
    arrival = arrival_of(asked, question, parameters, prompt, digests)
    stream = await submit(asked, watch, question, arrival, last)
    shown = parameters if stream.request_id == arrival.request_id else in_form(stream, parameters)
    dialect = route.dialect(stream.request_id, shown)
    reader = Reader(stream, Progress(stream, served.tokenizer), dialect, api.service)
    if not parameters.stream:
        return await whole_answer(asked, watch, reader)
    return EventStream(
        reader.events(sse.event(dialect.opening(), 0)),
        watch,
        answer_headers(api, stream.request_id),
        on_client_gone=asked.client_gone,
        last=last.pop_all(),
    )


async def read_question(asked: Asked, route: Route[Body]) -> tuple[bytes, Question]:
    """The body, read and checked. Fields that nobody here knows are skipped, and logged."""
    body = await read_body(asked.request, asked.api.server.body_limit_bytes)
    fields, unknown = decode_body(body, route.body)
    if unknown:
        names = [name[:MAX_QUOTED_CHARACTERS] for name in unknown[:MAX_LISTED_FIELDS]]
        log.info(
            "unknown_fields", request_id=asked.request_id, fields=names, num_fields=len(unknown)
        )
    return body, route.question(fields)


def prepare(
    api: Api, tokenizer: Tokenizer, question: Question, sent: Sent, body: bytes
) -> Callable[[], tuple[Prompt, Digests]]:
    """What the tokenizer's thread is to do with a request: its tokens, and by what it is known."""
    count, secret, route = question.prompt(tokenizer), api.service.secret, question.route
    return lambda: (count(), digests_of(secret, route, sent, body))


def arrival_of(
    asked: Asked,
    question: Question,
    parameters: RequestParameters,
    prompt: Prompt,
    digests: Digests,
) -> Arrival:
    """The request as the scheduler takes it."""
    return Arrival(
        request_id=asked.request_id,
        client_request_id=client_request_id(asked.request),
        route=question.route,
        stream=parameters.stream,
        prompt=prompt.token_ids,
        max_tokens=question.max_tokens,
        parameters=parameters,
        num_suffix_tokens=prompt.num_suffix_tokens,
        keep_output=prompt.keep_output,
        content_digest=digests.content,
        session_digest=digests.session,
        key_digest=digests.key,
        owner_digest=digests.owner,
    )


def client_request_id(request: Request) -> str | None:
    """The client's own X-Request-Id, cut to printable characters and a bounded length."""
    given = request.headers.get("x-request-id", "")
    printable = "".join(letter for letter in given if letter.isascii() and letter.isprintable())
    return printable[:MAX_CLIENT_REQUEST_ID] or None


async def submit(
    asked: Asked, watch: ClientWatch, question: Question, arrival: Arrival, last: ExitStack
) -> RequestStream:
    """Hands the request over; returns the stream of its answer once it is taken, or once it is
    known which one it equals.

    Raises ApiError when it is refused, and ClientLeft when the client leaves meanwhile.
    """
    service = asked.api.service
    try:
        stream = service.submit(arrival)
        last.callback(service.leave, stream)
        judgement = await watch.race(stream.judged())
    except Saturated as error:
        raise saturated(error) from error
    except StreamCut as error:
        raise overloaded("server_stopping", RETRY_AFTER_MIN_S) from error
    except ClientLeft:
        asked.client_gone()
        raise
    if isinstance(judgement, Rejected):
        raise from_rejection(
            judgement.event,
            prompt_param=question.prompt_param,
            max_tokens_param=question.max_tokens_param,
            retry_after_s=service.retry_after_s(),
        )
    if isinstance(judgement, Joined):
        return await joined_stream(asked, stream, judgement.request_id)
    return stream


async def joined_stream(asked: Asked, stream: RequestStream, joined_id: str) -> RequestStream:
    """The stream of the request that was sent before, open or ended. Raises ApiError in the one
    moment in which it is not kept any more: sent once more, the request is a new one.
    """
    asked.request_id = joined_id
    found = stream.joined or await asked.api.service.find(joined_id)
    if found is None:
        raise unavailable(
            "The answer to this request was there and is not kept any more. Send it again.",
            "answer_expired",
            RETRY_AFTER_MIN_S,
            "answer_expired",
        )
    return found


def in_form(stream: RequestStream, asked: RequestParameters) -> RequestParameters:
    """The parameters of a request that was sent before, with the form that is asked for now."""
    options = stream.parameters.options | {"stream_options": asked.options["stream_options"]}
    return msgspec.structs.replace(stream.parameters, stream=asked.stream, options=options)


async def whole_answer(asked: Asked, watch: ClientWatch, reader: Reader) -> Response:
    """The answer as one object. Raises ApiError when the request did not end well."""
    try:
        body = await watch.race(reader.whole())
    except ClientLeft:
        asked.client_gone()
        raise
    reach("http.whole.before")
    return json_response(body, headers=answer_headers(asked.api, asked.request_id))


def note_lost(api: Api, request_id: str) -> None:
    """A connection was lost over which somebody followed the request."""
    api.metrics.clients_gone.inc()
    log.info("client_gone", request_id=request_id)
