"""`POST /v1/completions`: its body, and its objects."""

from collections.abc import Callable
from typing import Annotated

import msgspec

from api.dialect import FINISH_REASONS, closing_events, usage, wants_usage
from api.errors import invalid
from api.fields import SharedFields, check_shared, sampling_of
from api.prompt import Prompt, text_prompt, token_prompt
from api.rendering import Piece
from api.settings import MAX_TOP_LOGPROBS
from scheduler.engine.model import Tokenizer
from scheduler.parameters import RequestParameters, SamplingParameters
from scheduler.streams import StreamEnd

ROUTE = "/v1/completions"

GivenPrompt = str | list[int | str | list[int]]


class CompletionBody(SharedFields, kw_only=True):
    """The body of a completion request; other fields are skipped."""

    prompt: GivenPrompt
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class CompletionQuestion:
    """A completion request that was checked, and is to be tokenized."""

    route = ROUTE
    prompt_param = "prompt"
    max_tokens_param = "max_tokens"

    def __init__(self, body: CompletionBody) -> None:
        """Raises ApiError for a field whose value cannot be served."""
        check_shared(body)
        if body.best_of not in (None, 1):
            raise invalid("best_of", "only one answer per request is served here; it must be 1")
        if body.echo:
            raise invalid("echo", "the prompt is not repeated by this server")
        if body.suffix:
            raise invalid("suffix", "text after the answer is not supported by this server")
        self.fields: SharedFields = body
        self.single = single_prompt(body.prompt)
        self._body = body

    @property
    def max_tokens(self) -> int | None:
        """The limit that was asked for."""
        return self._body.max_tokens

    def sampling(self, tokenizer: Tokenizer) -> SamplingParameters:
        """Raises ApiError for a bias of an unknown token."""
        asked = self._body.logprobs
        return sampling_of(
            self._body, tokenizer, logprobs=asked is not None, top_logprobs=asked or 0
        )

    def prompt(self, tokenizer: Tokenizer) -> Callable[[], Prompt]:
        """What the tokenizer's thread is to do."""
        single = self.single
        if isinstance(single, str):
            return lambda: text_prompt(tokenizer, single)
        return lambda: token_prompt(tokenizer, single)

    def options(self) -> dict[str, object]:
        """What the answer needs, kept with the request."""
        return {"stream_options": {"include_usage": self._body.include_usage}}


def single_prompt(prompt: GivenPrompt) -> str | list[int]:
    """The one prompt, also out of a list of one. Raises ApiError for several, mixed or none."""
    if isinstance(prompt, str):
        if not prompt:
            raise invalid("prompt", "the prompt is empty")
        return prompt
    if prompt and all(isinstance(item, int) for item in prompt):
        return [item for item in prompt if isinstance(item, int)]
    if len(prompt) == 1 and not isinstance(prompt[0], int):
        if not prompt[0]:
            raise invalid("prompt[0]", "the prompt is empty")
        return prompt[0]
    if not prompt:
        raise invalid("prompt", "the prompt is empty")
    if any(isinstance(item, int) for item in prompt):
        raise invalid("prompt", "a list of token ids has nothing else in it")
    raise invalid("prompt", f"one prompt per request is served here, got {len(prompt)}")


class CompletionDialect:
    """The objects of a completion."""

    def __init__(self, request_id: str, parameters: RequestParameters) -> None:
        self._head: dict[str, object] = {
            "id": "cmpl-" + request_id.removeprefix("req_"),
            "object": "text_completion",
            "created": parameters.created,
            "model": parameters.model,
        }
        self._wants_usage = wants_usage(parameters)

    def opening(self) -> dict[str, object]:
        """An empty text."""
        return self._chunk("")

    def heartbeat(self) -> dict[str, object]:
        """An empty text, which every client skips."""
        return self._chunk("")

    def delta(self, piece: Piece) -> dict[str, object]:
        """The event that shows a piece."""
        return self._chunk(piece.text, logprobs=logprobs_of(piece))

    def closing(self, end: StreamEnd) -> list[object]:
        """Finish reason, counts, [DONE]."""
        last = self._chunk("", finish_reason=FINISH_REASONS[end.reason])
        counts: dict[str, object] = {**self._head, "choices": [], "usage": usage(end)}
        return closing_events(last, counts if self._wants_usage else None)

    def whole(self, piece: Piece, end: StreamEnd) -> dict[str, object]:
        """The answer in one object."""
        choice: dict[str, object] = {
            "index": 0,
            "text": piece.text,
            "logprobs": logprobs_of(piece),
            "finish_reason": FINISH_REASONS[end.reason],
        }
        return {**self._head, "choices": [choice], "usage": usage(end)}

    def _chunk(
        self,
        text: str,
        *,
        logprobs: dict[str, object] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": 0,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        counts: dict[str, object] = {"usage": None} if self._wants_usage else {}
        return {**self._head, "choices": [choice], **counts}


def logprobs_of(piece: Piece) -> dict[str, object] | None:
    """The four parallel lists of this route."""
    if piece.tokens is None:
        return None
    return {
        "tokens": [token.text for token in piece.tokens],
        "token_logprobs": [token.logprob for token in piece.tokens],
        "top_logprobs": [dict(token.top) for token in piece.tokens],
        "text_offset": [token.offset for token in piece.tokens],
    }
