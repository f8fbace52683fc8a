"""The projection of saved blocks: what becomes of a row of `block`, as a closed set of changes.

There may be a hundred thousand rows, so the writer keeps none of them in memory. An event becomes
changes that are at once statements for the file and steps over a dict; the in-memory twin and a
rebuild use the dict, and a test compares the two.
"""

from dataclasses import dataclass
from typing import assert_never

import msgspec

from journal import events
from journal.events import Record
from journal.statements import INSERT_BLOCK


class BlockRow(msgspec.Struct, kw_only=True):
    """A row of `block`: one on disk, or, without `saved_ns`, on its way there. Its state may be on
    disk first: files are written side by side.
    """

    hash: str
    domain: str
    parent: str
    end_tokens: int
    block_bytes: int = 0
    state_bytes: int = 0
    planned_ns: int
    saved_ns: int | None = None
    last_use_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Planned:
    """A block is to be written: its row, of which nothing is on disk yet."""

    row: BlockRow


@dataclass(frozen=True, slots=True)
class Saved:
    """A block is on disk."""

    hash: str
    num_bytes: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class StateSaved:
    """The state at the block's end is on disk."""

    hash: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class NotSaved:
    """A block that was planned did not come to be. It stays on its way while its state is there."""

    hash: str


@dataclass(frozen=True, slots=True)
class Gone:
    """A block is not on disk, or no longer."""

    hash: str


@dataclass(frozen=True, slots=True)
class StateGone:
    """The state at the block's end is not on disk, or no longer."""

    hash: str


@dataclass(frozen=True, slots=True)
class Used:
    """A request starts from the chain that ends with this block."""

    last_hash: str
    at_ns: int


@dataclass(frozen=True, slots=True)
class RunBegan:
    """What the run before was writing is nobody's: the sweep at the start removes such files."""


BlockChange = Planned | Saved | StateSaved | NotSaved | Gone | StateGone | Used | RunBegan

_CHAIN = (
    "WITH RECURSIVE chain (hash, parent) AS ("
    " SELECT hash, parent FROM block WHERE hash = ?"
    " UNION SELECT b.hash, b.parent FROM chain c JOIN block b ON b.hash = c.parent)"
)


def statement_of(change: BlockChange) -> tuple[str, tuple[object, ...]]:
    """The change as a statement over the table, with its values."""
    match change:
        case Planned(row):
            return INSERT_BLOCK, msgspec.structs.astuple(row)
        case Saved(name, num_bytes, at_ns):
            statement = (
                "UPDATE block SET block_bytes = ?, saved_ns = coalesce(saved_ns, ?),"
                " last_use_ns = coalesce(last_use_ns, ?) WHERE hash = ?"
            )
            return statement, (num_bytes, at_ns, at_ns, name)
        case StateSaved(name, num_bytes):
            return "UPDATE block SET state_bytes = ? WHERE hash = ?", (num_bytes, name)
        case NotSaved(name):
            statement = "DELETE FROM block WHERE hash = ? AND saved_ns IS NULL AND state_bytes = 0"
            return statement, (name,)
        case Gone(name):
            return "DELETE FROM block WHERE hash = ? AND saved_ns IS NOT NULL", (name,)
        case StateGone(name):
            return "UPDATE block SET state_bytes = 0 WHERE hash = ?", (name,)
        case Used(name, at_ns):
            statement = (
                f"{_CHAIN} UPDATE block SET last_use_ns = ?"
                " WHERE hash IN (SELECT hash FROM chain) AND saved_ns IS NOT NULL"
            )
            return statement, (name, at_ns)
        case RunBegan():
            return "DELETE FROM block WHERE saved_ns IS NULL", ()
        case _:
            assert_never(change)


def apply(blocks: dict[str, BlockRow], change: BlockChange) -> None:
    """The change over rows by hash: the same as the statement."""
    match change:
        case Planned(row):
            blocks.setdefault(row.hash, msgspec.structs.replace(row))
        case RunBegan():
            for name in [name for name, row in blocks.items() if row.saved_ns is None]:
                del blocks[name]
        case Used(name, at_ns):
            _use_chain(blocks, name, at_ns)
        case _:
            row = blocks.get(change.hash)
            if row is not None:
                _apply_to(blocks, row, change)


def _apply_to(
    blocks: dict[str, BlockRow],
    row: BlockRow,
    change: Saved | StateSaved | NotSaved | Gone | StateGone,
) -> None:
    match change:
        case Saved(_, num_bytes, at_ns):
            row.block_bytes = num_bytes
            row.saved_ns = row.saved_ns or at_ns
            row.last_use_ns = row.last_use_ns or at_ns
        case StateSaved(_, num_bytes):
            row.state_bytes = num_bytes
        case NotSaved():
            if row.saved_ns is None and not row.state_bytes:
                del blocks[row.hash]
        case Gone():
            if row.saved_ns is not None:
                del blocks[row.hash]
        case StateGone():
            row.state_bytes = 0
        case _:
            assert_never(change)


def _use_chain(blocks: dict[str, BlockRow], name: str, at_ns: int) -> None:
    seen: set[str] = set()
    while name in blocks and name not in seen:
        seen.add(name)
        row = blocks[name]
        if row.saved_ns is not None:
            row.last_use_ns = at_ns
        name = row.parent


def changes_of(record: Record, domain: str | None, block_tokens: int | None) -> list[BlockChange]:
    """What an event means for the rows. The domain and the size of its blocks are those of its
    run.
    """
    event = record.event
    match event:
        case events.ServerStarted():
            return [RunBegan()]
        case events.BlockSavePlanned():
            assert domain is not None, "blocks are saved in a domain"
            assert block_tokens is not None, "blocks have a size"
            return [
                Planned(
                    BlockRow(
                        hash=planned.hash,
                        domain=domain,
                        parent=planned.parent,
                        end_tokens=(planned.index + 1) * block_tokens,
                        planned_ns=record.at_ns,
                    )
                )
                for planned in event.blocks
                if planned.part == "block"
            ]
        case events.BlockSaved(part="block"):
            return [Saved(event.hash, event.saved_bytes, record.at_ns)]
        case events.BlockSaved():
            return [StateSaved(event.hash, event.saved_bytes)]
        case events.BlockSaveFailed(part="block"):
            return [NotSaved(event.hash)]
        case events.BlockCorrupt():
            return [Gone(event.hash) if event.part == "block" else StateGone(event.hash)]
        case events.BlocksLost() | events.BlocksEvicted():
            states = [StateGone(name) for name in event.states]
            return [*(Gone(name) for name in event.hashes), *states]
        case events.RequestAdmitted() if event.last_hash:
            return [Used(event.last_hash, record.at_ns)]
        case _:
            return []
