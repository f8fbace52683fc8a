"""What the two OpenAI routes say differently. A dialect is made for one request, from what is
stored of it, so it can be made again after a restart.
"""

from typing import Protocol

from api.rendering import Piece
from api.sse import DONE
from scheduler.parameters import RequestParameters
from scheduler.streams import StreamEnd

FINISH_REASONS = {"stop": "stop", "end_of_turn": "stop", "length": "length"}


class Dialect(Protocol):
    """The objects of one route."""

    def __init__(self, request_id: str, parameters: RequestParameters) -> None: ...

    def opening(self) -> dict[str, object]:
        """The first event of a stream; it shows nothing."""
        ...

    def heartbeat(self) -> dict[str, object]:
        """An event that says nothing."""
        ...

    def delta(self, piece: Piece) -> dict[str, object]:
        """The event that shows a piece."""
        ...

    def closing(self, end: StreamEnd) -> list[object]:
        """The last events of a stream that ended well."""
        ...

    def whole(self, piece: Piece, end: StreamEnd) -> dict[str, object]:
        """The answer in one object; the piece is all of it."""
        ...


def usage(end: StreamEnd) -> dict[str, object]:
    """The token counts of an answer. Cached are those tokens of the prompt that were restored."""
    return {
        "prompt_tokens": end.num_prompt_tokens,
        "completion_tokens": end.num_output_tokens,
        "total_tokens": end.num_prompt_tokens + end.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": end.num_cached_prompt_tokens},
    }


def wants_usage(parameters: RequestParameters) -> bool:
    """Whether a stream of this request ends with the token counts."""
    options = parameters.options.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage"))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


def closing_events(last: dict[str, object], counts: dict[str, object] | None) -> list[object]:
    """The event with the finish reason, then the one with the counts if they are wanted, then
    [DONE].
    """
    return [last, DONE] if counts is None else [last, counts, DONE]
