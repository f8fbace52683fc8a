"""`POST /v1/chat/completions`: its body, and its objects."""

from collections.abc import Callable
from typing import Annotated, cast

import msgspec

from api.dialect import FINISH_REASONS, closing_events, usage, wants_usage
from api.errors import invalid
from api.fields import Count, SharedFields, check_shared, sampling_of
from api.messages import Messages, canonical_messages, function_tools
from api.prompt import Prompt, chat_prompt
from api.rendering import Piece, ShownToken
from api.settings import MAX_TOOLS_BYTES, MAX_TOP_LOGPROBS
from scheduler.engine.model import Tokenizer
from scheduler.parameters import RequestParameters, SamplingParameters
from scheduler.streams import StreamEnd

ROUTE = "/v1/chat/completions"


class ResponseFormat(msgspec.Struct, kw_only=True):
    """The form that the answer is to have."""

    type: str


class ChatBody(SharedFields, kw_only=True):
    """The body of a chat request; other fields are skipped."""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: msgspec.Raw = msgspec.Raw(b"null")
    tool_choice: str | dict[str, object] | None = None
    response_format: ResponseFormat | None = None


class ChatQuestion:
    """A chat request that was checked, and is to be tokenized."""

    route = ROUTE
    prompt_param = "messages"

    def __init__(self, body: ChatBody) -> None:
        """Raises ApiError for a field whose value cannot be served."""
        check_shared(body)
        if body.top_logprobs and not body.logprobs:
            raise invalid("top_logprobs", "this needs `logprobs: true`")
        if body.response_format is not None and body.response_format.type != "text":
            raise invalid("response_format.type", "only 'text' is supported by this server")
        self.fields: SharedFields = body
        self.messages = canonical_messages(body.messages)
        self.tools = decode_tools(body.tools) if body.tool_choice != "none" else []
        self._body = body

    @property
    def max_tokens(self) -> int | None:
        """The limit that was asked for, under its newer name if both are there."""
        return self._body.max_completion_tokens or self._body.max_tokens

    @property
    def max_tokens_param(self) -> str:
        """The name under which the limit was asked for."""
        newer = self._body.max_completion_tokens is not None
        return "max_completion_tokens" if newer else "max_tokens"

    def sampling(self, tokenizer: Tokenizer) -> SamplingParameters:
        """Raises ApiError for a bias of an unknown token."""
        return sampling_of(
            self._body,
            tokenizer,
            logprobs=bool(self._body.logprobs),
            top_logprobs=self._body.top_logprobs or 0,
        )

    def prompt(self, tokenizer: Tokenizer) -> Callable[[], Prompt]:
        """What the tokenizer's thread is to do."""
        return lambda: chat_prompt(tokenizer, self.messages, self.tools)

    def options(self) -> dict[str, object]:
        """What the answer needs, kept with the request."""
        tools: dict[str, object] = {"tools": self.tools} if self.tools else {}
        return tools | {"stream_options": {"include_usage": self._body.include_usage}}


def decode_tools(raw: msgspec.Raw) -> list[dict[str, object]]:
    """The functions among the tools. Raises ApiError for JSON that is no list of tools."""
    body = bytes(raw)
    if len(body) > MAX_TOOLS_BYTES:
        raise invalid("tools", f"their JSON is larger than the limit of {MAX_TOOLS_BYTES} bytes")
    tools = msgspec.json.decode(body)
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise invalid("tools", "expected `array`")
    return function_tools(cast("list[object]", tools))


class ChatDialect:
    """The objects of a chat answer."""

    def __init__(self, request_id: str, parameters: RequestParameters) -> None:
        self._head: dict[str, object] = {
            "id": "chatcmpl-" + request_id.removeprefix("req_"),
            "created": parameters.created,
            "model": parameters.model,
        }
        self._wants_usage = wants_usage(parameters)

    def opening(self) -> dict[str, object]:
        """The event that names the role."""
        return self._chunk({"role": "assistant", "content": ""})

    def heartbeat(self) -> dict[str, object]:
        """An empty delta, which every client skips."""
        return self._chunk({})

    def delta(self, piece: Piece) -> dict[str, object]:
        """The event that shows a piece."""
        return self._chunk({"content": piece.text}, logprobs=logprobs_of(piece.tokens))

    def closing(self, end: StreamEnd) -> list[object]:
        """Finish reason, counts, [DONE]."""
        last = self._chunk({}, finish_reason=FINISH_REASONS[end.reason])
        counts: dict[str, object] = {
            **self._head_of("chat.completion.chunk"),
            "choices": [],
            "usage": usage(end),
        }
        return closing_events(last, counts if self._wants_usage else None)

    def whole(self, piece: Piece, end: StreamEnd) -> dict[str, object]:
        """The answer in one object."""
        choice: dict[str, object] = {
            "index": 0,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": logprobs_of(piece.tokens),
            "finish_reason": FINISH_REASONS[end.reason],
        }
        return {**self._head_of("chat.completion"), "choices": [choice], "usage": usage(end)}

    def _head_of(self, kind: str) -> dict[str, object]:
        return {**self._head, "object": kind}

    def _chunk(
        self,
        delta: dict[str, object],
        *,
        logprobs: dict[str, object] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": 0,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        counts: dict[str, object] = {"usage": None} if self._wants_usage else {}
        return {**self._head_of("chat.completion.chunk"), "choices": [choice], **counts}


def logprobs_of(tokens: list[ShownToken] | None) -> dict[str, object] | None:
    """The log-probabilities of a piece, or null when none were asked for."""
    if tokens is None:
        return None
    content = [
        token_object(token.text, token.logprob)
        | {"top_logprobs": [token_object(text, value) for text, value in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def token_object(text: str, logprob: float) -> dict[str, object]:
    """One token. `bytes` is null where the text is not the token's own (half a character)."""
    own = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": own}
