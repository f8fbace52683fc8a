"""Errors as clients see them: OpenAI's shape, each naming what was wrong.

The sentences of a prompt that never fits are those that agents recognise; a sentence holds no byte
counts, because some clients look for status numbers in it. Fields hold the numbers.
"""

import re

import msgspec
from fastapi.responses import Response

from api.settings import MAX_QUOTED_CHARACTERS
from journal.events import CapacityNumbers, RequestRejected
from scheduler.service import Saturated

JSON_PATH = re.compile(r"^(?P<what>.*) - at `(?P<path>.*)`$", re.DOTALL)
MISSING_FIELD = re.compile(r"^Object missing required field `(?P<field>.*)`$")

OVERLOADED = "server_is_overloaded"
"""The code on which Codex tries again later."""


class ApiError(Exception):
    """An answer that is an error. Raised anywhere before the answer has begun.

    `more` are further fields of the `error` object.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None,
        kind: str = "invalid_request_error",
        param: str | None = None,
        headers: dict[str, str] | None = None,
        more: dict[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.kind = kind
        self.param = param
        self.headers = headers or {}
        self.more = more or {}

    def body(self) -> dict[str, object]:
        """The JSON object that answers and streams carry."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
                **self.more,
            }
        }

    def response(self) -> Response:
        """The whole answer."""
        return json_response(self.body(), status=self.status, headers=self.headers)


class ClientLeft(Exception):
    """The client closed its connection before it had its answer."""


def json_response(
    body: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """An answer with this value as JSON."""
    return Response(
        msgspec.json.encode(body),
        status_code=status,
        headers=headers,
        media_type="application/json",
    )


def quoted(text: str) -> str:
    """A client's text, short enough for a message."""
    if len(text) <= MAX_QUOTED_CHARACTERS:
        return repr(text)
    return repr(text[:MAX_QUOTED_CHARACTERS]) + "..."


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """A 400 for one field. `param` is its path, such as `messages[2].content`."""
    text = message if param is None else f"`{param}`: {message}"
    return ApiError(400, text, code=code, param=param)


def from_validation(error: msgspec.ValidationError) -> ApiError:
    """The 400 for a value of the wrong type or range, with the path of the field.

    msgspec writes the path as `$.messages[2].content`, with `[...]` for a key of a mapping.
    """
    match = JSON_PATH.match(str(error))
    what, path = (match["what"], match["path"]) if match else (str(error), "$")
    path = path.removeprefix("$").removeprefix(".").removesuffix("[...]")
    if missing := MISSING_FIELD.match(what):
        param = f"{path}.{missing['field']}" if path else missing["field"]
        return invalid(param, "this field is required", "missing_required_parameter")
    if not path:
        return invalid(None, f"The body is no JSON object: {what[0].lower()}{what[1:]}")
    return invalid(path, f"{what[0].lower()}{what[1:]}")


def model_not_found(name: str, served: str) -> ApiError:
    """The 404 for a model that is not served here."""
    return ApiError(
        404,
        f"The model {quoted(name)} is not served here. `default` and {served!r} are.",
        code="model_not_found",
        param="model",
    )


def request_not_found(request_id: str) -> ApiError:
    """The 404 for a request that this server does not know, or no longer."""
    return ApiError(
        404,
        f"There is no request {quoted(request_id)} here, or its retention time is over.",
        code="request_not_found",
        param="request_id",
    )


def answer_expired(request_id: str) -> ApiError:
    """The 410 for a request that has ended, and whose answer is not kept any more."""
    return ApiError(
        410,
        f"The request {quoted(request_id)} has ended, and its answer is not kept any more: its "
        "retention time is over.",
        code="answer_expired",
        param="request_id",
    )


def no_answer(request_id: str) -> ApiError:
    """The 404 for a request that was refused: there is nothing to read of it."""
    return ApiError(
        404,
        f"The request {quoted(request_id)} was refused when it came, so it has no answer.",
        code="no_answer",
        param="request_id",
    )


def operators_only() -> ApiError:
    """The 403 for what concerns all requests, and was asked with the key of one client."""
    return ApiError(
        403,
        "This is the operator's alone: it needs the server's own API key (server.api_key).",
        code="operator_only",
        kind="permission_error",
    )


def retry_headers(retry_after_s: int) -> dict[str, str]:
    """When to try again, in both forms that SDKs read."""
    return {"retry-after": str(retry_after_s), "retry-after-ms": str(retry_after_s * 1000)}


def unavailable(message: str, code: str, retry_after_s: int, reason: str) -> ApiError:
    """The 503 for what will pass, with the time after which to try again."""
    return ApiError(
        503,
        message,
        code=code,
        kind="server_error",
        headers=retry_headers(retry_after_s),
        more={"reason": reason, "retryable": True},
    )


BUSY = {
    "queue_full": "The server is overloaded: its queue is full. Try again later.",
    "inbox_full": "The server is overloaded: too much arrives at once. Try again later.",
    "connections": "The server is overloaded: too many connections are open. Try again later.",
    "server_stopping": "The server is stopping and takes nothing new. Try again later.",
    "journal_full": "The server's disk is full, and nothing is taken until there is space.",
    "memory": "The server ran short of memory and gave this request up. Try again later.",
    "memory_wait": (
        "Other programs hold the memory that this request needs, and it has waited as long as a "
        "request may. Try again later."
    ),
}
"""What a saturated server says, by its reason."""


def overloaded(reason: str, retry_after_s: int, **more: object) -> ApiError:
    """The 503 of a server that cannot do it now, for one of the reasons in `BUSY`. None of them is
    about the request, so its client should send the same again later.
    """
    error = unavailable(BUSY[reason], OVERLOADED, retry_after_s, reason)
    error.more |= more
    return error


def saturated(error: Saturated) -> ApiError:
    """The 503 for a request that the scheduler did not even look at."""
    return overloaded(error.reason, error.retry_after_s)


def loading(retry_after_s: int) -> ApiError:
    """The 503 of a server that does not know its model yet."""
    return unavailable(
        "The model is still loading. Try again later.",
        "model_is_loading",
        retry_after_s,
        "model_loading",
    )


def unreadable(retry_after_s: int) -> ApiError:
    """The 503 for what only the journal can tell, while it cannot be read."""
    return unavailable(
        "The journal cannot be read, the log says why. Try again later.",
        "journal_unreadable",
        retry_after_s,
        "journal_unreadable",
    )


def from_rejection(
    event: RequestRejected, *, prompt_param: str, max_tokens_param: str, retry_after_s: int
) -> ApiError:
    """The answer for a request that the scheduler refused."""
    match event.reason:
        case "context_length_exceeded":
            assert event.numbers is not None
            return never_fits(
                event.numbers,
                prompt_too_long(event.numbers),
                code="context_length_exceeded",
                param=prompt_param,
            )
        case "max_tokens_exceeds_capacity":
            assert event.numbers is not None
            return never_fits(
                event.numbers,
                output_too_long(event.numbers),
                code="max_tokens_exceeds_capacity",
                param=max_tokens_param,
            )
        case "queue_full" | "server_stopping" as reason:
            return overloaded(reason, retry_after_s)
        case "key_reused":
            return key_reused()


def key_reused() -> ApiError:
    """The 422 for a key that another question has: nobody should try again."""
    return ApiError(
        422,
        "This Idempotency-Key was sent before, with another request. Send a new key with a new "
        "request, or the same request with this key.",
        code="idempotency_key_reused",
        param="Idempotency-Key",
        headers={"x-should-retry": "false"},
        more={"reason": "key_reused", "retryable": False},
    )


def never_fits(numbers: CapacityNumbers, sentence: str, *, code: str, param: str) -> ApiError:
    """The 400 for what can never be served, with the seven numbers."""
    more: dict[str, object] = {
        "reason": "context_exceeds_capacity",
        **msgspec.structs.asdict(numbers),
        "retryable": False,
    }
    headers = {"x-should-retry": "false"}
    return ApiError(400, sentence, code=code, param=param, headers=headers, more=more)


def prompt_too_long(numbers: CapacityNumbers) -> str:
    """Agents compact their history when they read this, in these words.

    A prompt of exactly the maximum leaves no room for an answer: its first token is counted too.
    """
    most = numbers.max_context_tokens
    given = max(numbers.prompt_tokens, most + 1)
    return (
        f"prompt is too long: {given} tokens > {most} maximum. This model's maximum context "
        f"length is {most} tokens. However, you requested {given} tokens. Please reduce the "
        "length of the messages or completion."
    )


def output_too_long(numbers: CapacityNumbers) -> str:
    """Agents lower max_tokens when they read this, and keep their history."""
    return (
        f"input length and `max_tokens` exceed context limit: {numbers.prompt_tokens} + "
        f"{numbers.max_tokens} > {numbers.max_context_tokens}, decrease input length or "
        "`max_tokens` and try again"
    )
