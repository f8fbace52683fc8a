"""The tokens of open requests: what the scheduler decides by count, the engine needs by value."""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from scheduler import effects
from scheduler.engine.base import StartRow
from scheduler.parameters import RequestParameters


@dataclass(slots=True)
class KnownRequest:
    """An open request with all its tokens: the prompt, followed by the output so far."""

    number: int
    request_id: str
    num_prompt_tokens: int
    tokens: "array[int]"
    parameters: RequestParameters

    def start_row(self, effect: effects.StartRow, max_tokens: int) -> StartRow:
        """The engine's command for this effect."""
        assert len(self.tokens) == effect.num_known_tokens, (
            f"{self.request_id} has {len(self.tokens)} tokens in memory"
            f" and {effect.num_known_tokens} in the journal"
        )
        return StartRow(
            number=self.number,
            request_id=self.request_id,
            token_ids=tuple(self.tokens),
            num_prompt_tokens=self.num_prompt_tokens,
            max_tokens=max_tokens,
            sampling=self.parameters.sampling,
        )


class KnownRequests:
    """Open requests by number and by id, and the ids of rows that the engine still has."""

    def __init__(self) -> None:
        self.by_number: dict[int, KnownRequest] = {}
        self.by_id: dict[str, KnownRequest] = {}
        self.row_ids: dict[int, str] = {}

    def __iter__(self) -> Iterator[KnownRequest]:
        return iter(self.by_number.values())

    def add(self, known: KnownRequest) -> None:
        """A request that was taken, or is back after a restart."""
        self.by_number[known.number] = known
        self.by_id[known.request_id] = known

    def append(self, number: int, token_ids: Iterable[int]) -> KnownRequest:
        """Output tokens that are committed."""
        known = self.by_number[number]
        known.tokens.extend(token_ids)
        return known

    def end(self, request_id: str) -> KnownRequest | None:
        """The request has ended, and its tokens are the journal's alone. None: it came and went in
        one step.
        """
        known = self.by_id.pop(request_id, None)
        if known is not None:
            del self.by_number[known.number]
        return known
