"""A port that notes which tails an engine hands over and which it refuses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from journal.events import PlannedBlock
from scheduler.engine.base import Caches, RestoreRow, Restoring, RowRestored, SaveTail


@dataclass
class EndlessRestore:
    """Nothing is read until `result` is set."""

    result: RowRestored | None = None

    def advance(self, *, wait: bool) -> RowRestored | None:
        del wait
        return self.result

    def close(self) -> None:
        """Nothing is held."""


@dataclass
class TailPort:
    """See `KvPort`. `answers` are the rows' numbers, each with the end of its tail or why not."""

    answers: list[tuple[int, int | str]] = field(default_factory=list[tuple[int, int | str]])
    restoring: EndlessRestore = field(default_factory=EndlessRestore)

    def describe(self, caches: Caches, num_tokens: int) -> str:
        del caches, num_tokens
        return "d" * 64

    def save(self, caches: Caches, blocks: Sequence[PlannedBlock]) -> None:
        """Blocks are not looked at here."""

    def refuse(self, blocks: Sequence[PlannedBlock]) -> None:
        """Nor these."""

    def save_tail(self, caches: Caches, command: SaveTail, end: int) -> None:
        del caches
        self.answers.append((command.number, end))

    def refuse_tail(self, command: SaveTail, reason: str) -> None:
        self.answers.append((command.number, reason))

    def restore(
        self, caches: Caches, command: RestoreRow, num_room_tokens: int, ready: Callable[[], None]
    ) -> Restoring:
        del caches, command, num_room_tokens, ready
        return self.restoring
