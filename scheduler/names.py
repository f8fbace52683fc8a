"""The hashes of requests' blocks: computed from tokens, so outside the core, and recorded as
facts.

A request's prompt is named once the domain is known, which the loaded model decides; a block that
its output fills is named in the step that brings the block's last token.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from journal import events
from scheduler.engine.base import RowTokens
from scheduler.known import KnownRequests
from scheduler.kvcache.naming import BlockNamer, Chain
from scheduler.state import SchedulerState
from scheduler.streams import Arrival

MAX_NAMED = 32
"""Prompts that are named in one step at most."""


class BlockNames:
    """The chains of open requests. Used by the loop's thread only."""

    def __init__(self, known: KnownRequests) -> None:
        self._known = known
        self._chains: dict[int, Chain] = {}
        self._unnamed: deque[int] = deque()
        self._namer: BlockNamer | None = None
        self._block_tokens = 0

    def begin(self, namer: BlockNamer, block_tokens: int, state: SchedulerState) -> None:
        """The domain is known: all open requests are to be named, in the order of their arrival."""
        self._namer = namer
        self._block_tokens = block_tokens
        self._unnamed.extend(sorted(state.requests))

    def pending(
        self, state: SchedulerState, rows: Sequence[RowTokens], most: int
    ) -> Iterator[events.BlocksNamed]:
        """Some of the requests that were open before the domain was known. `rows` is what a decode
        step of these facts has put out: it is not among the known tokens yet.
        """
        news = {row.number: row.token_ids for row in rows}
        for _ in range(min(MAX_NAMED, most, len(self._unnamed))):
            number = self._unnamed.popleft()
            request = state.requests.get(number)
            if request is not None:
                tokens = [*self._known.by_number[number].tokens, *news.get(number, ())]
                yield from self._named(number, request.request_id, tokens)

    def has_pending(self) -> bool:
        """Whether requests are still without names."""
        return bool(self._unnamed)

    def of_arrival(self, arrival: Arrival, number: int) -> Iterator[events.BlocksNamed]:
        """The names of a prompt that has just arrived."""
        if self._namer is not None:
            yield from self._named(number, arrival.request_id, arrival.prompt)

    def of_rows(self, rows: Sequence[RowTokens]) -> Iterator[events.BlocksNamed]:
        """The names of blocks that these output tokens fill."""
        for row in rows:
            chain = self._chains.get(row.number)
            if chain is None or not row.token_ids:
                continue
            first = len(chain.hashes)
            hashes = chain.extend(row.token_ids)
            if hashes:
                request_id = self._known.by_number[row.number].request_id
                yield events.BlocksNamed(request_id=request_id, first=first, hashes=tuple(hashes))

    def forget(self, number: int) -> None:
        """Drops the chain of a request that has ended."""
        self._chains.pop(number, None)

    def _named(
        self, number: int, request_id: str, tokens: Sequence[int]
    ) -> Iterator[events.BlocksNamed]:
        assert self._namer is not None
        chain = Chain(self._namer, self._block_tokens)
        chain.extend(tokens)
        self._chains[number] = chain
        if chain.hashes:
            yield events.BlocksNamed(request_id=request_id, first=0, hashes=tuple(chain.hashes))
