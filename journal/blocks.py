"""The projection of saved blocks: what becomes of a row of `block`, as a closed set of changes.

There may be a hundred thousand rows, so the writer keeps none of them in memory. An event becomes
changes that are at once statements for the file and steps over a dict; the in-memory twin and a
rebuild use the dict, and a test compares the two.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

import msgspec

from journal import events
from journal.events import Part, Record
from journal.statements import INSERT_BLOCK

BLOCK_PART, STATE_PART = 1, 2
PARTS: dict[Part, int] = {"block": BLOCK_PART, "state": STATE_PART}
"""The bits of `writing_parts`."""


class BlockRow(msgspec.Struct, kw_only=True):
    """A row of `block`: one on disk, or, without `saved_ns`, one of which something is on disk or
    on its way there. Its state may be on disk first, since files are written side by side; and
    stay there while the block, which could not be saved, waits to be tried again.

    `writing_parts` says which of its two files are on their way: 1 the block, 2 the state.
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
    writing_parts: int = 0


@dataclass(frozen=True, slots=True)
class Planned:
    """A block, or the state at its end, is to be written: a row with what is on its way."""

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
    """A file that was planned did not come to be: this part of the block is not on its way."""

    hash: str
    part: int


@dataclass(frozen=True, slots=True)
class Gone:
    """A block is not on disk, or no longer, and with it its state. What is being written of it
    anew still is.
    """

    hash: str


@dataclass(frozen=True, slots=True)
class StateGone:
    """The state at the block's end is not on disk, or no longer."""

    hash: str


@dataclass(frozen=True, slots=True)
class NothingLeft:
    """The row goes, if nothing of the block is on disk or on its way. Follows what may have taken
    the last of it.
    """

    hash: str


@dataclass(frozen=True, slots=True)
class Used:
    """A request starts from the chain that ends with this block."""

    last_hash: str
    at_ns: int


@dataclass(frozen=True, slots=True)
class RunBegan:
    """What the run before was writing is nobody's: the sweep at the start removes such files, and
    states without their blocks. Rows without a block go.
    """


@dataclass(frozen=True, slots=True)
class WritersGone:
    """Of the rows that stay nothing is on its way. Follows `RunBegan`."""


OneBlockChange = Saved | StateSaved | NotSaved | Gone | StateGone | NothingLeft
BlockChange = Planned | OneBlockChange | Used | RunBegan | WritersGone

_CHAIN = (
    "WITH RECURSIVE chain (hash, parent) AS ("
    " SELECT hash, parent FROM block WHERE hash = ?"
    " UNION SELECT b.hash, b.parent FROM chain c JOIN block b ON b.hash = c.parent)"
)

_USE = (
    f"{_CHAIN} UPDATE block SET last_use_ns = ?"
    " WHERE hash IN (SELECT hash FROM chain) AND saved_ns IS NOT NULL"
)
_PLAN = (
    f"{INSERT_BLOCK} ON CONFLICT (hash) DO UPDATE"
    " SET writing_parts = writing_parts | excluded.writing_parts"
)
_SAVE = (
    "UPDATE block SET block_bytes = ?, saved_ns = coalesce(saved_ns, ?),"
    f" last_use_ns = coalesce(last_use_ns, ?), writing_parts = writing_parts & ~{BLOCK_PART}"
    " WHERE hash = ?"
)
_SAVE_STATE = (
    f"UPDATE block SET state_bytes = ?, writing_parts = writing_parts & ~{STATE_PART}"
    " WHERE hash = ?"
)
_STOP = "UPDATE block SET writing_parts = writing_parts & ~? WHERE hash = ?"
_LOSE = (
    "UPDATE block SET block_bytes = 0, state_bytes = 0, saved_ns = NULL, last_use_ns = NULL"
    " WHERE hash = ? AND saved_ns IS NOT NULL"
)
_TIDY = (
    "DELETE FROM block"
    " WHERE hash = ? AND saved_ns IS NULL AND state_bytes = 0 AND writing_parts = 0"
)


def statement_of(change: BlockChange) -> tuple[str, tuple[object, ...]]:
    """The change as a statement over the table, with its values."""
    match change:
        case Planned(row):
            return _PLAN, msgspec.structs.astuple(row)
        case Used(name, at_ns):
            return _USE, (name, at_ns)
        case RunBegan():
            return "DELETE FROM block WHERE saved_ns IS NULL", ()
        case WritersGone():
            return "UPDATE block SET writing_parts = 0 WHERE writing_parts <> 0", ()
        case _:
            return _statement_of_one(change)


def _statement_of_one(change: OneBlockChange) -> tuple[str, tuple[object, ...]]:
    match change:
        case Saved(name, num_bytes, at_ns):
            return _SAVE, (num_bytes, at_ns, at_ns, name)
        case StateSaved(name, num_bytes):
            return _SAVE_STATE, (num_bytes, name)
        case NotSaved(name, part):
            return _STOP, (part, name)
        case Gone(name):
            return _LOSE, (name,)
        case StateGone(name):
            return "UPDATE block SET state_bytes = 0 WHERE hash = ?", (name,)
        case NothingLeft(name):
            return _TIDY, (name,)
        case _:
            assert_never(change)


def apply(blocks: dict[str, BlockRow], change: BlockChange) -> None:
    """The change over rows by hash: the same as the statement."""
    match change:
        case Planned(row):
            found = blocks.setdefault(row.hash, msgspec.structs.replace(row))
            found.writing_parts |= row.writing_parts
        case WritersGone():
            for row in blocks.values():
                row.writing_parts = 0
        case RunBegan():
            for name in [name for name, row in blocks.items() if row.saved_ns is None]:
                del blocks[name]
        case Used(name, at_ns):
            _use_chain(blocks, name, at_ns)
        case _:
            row = blocks.get(change.hash)
            if row is not None:
                _apply_to(blocks, row, change)


def _apply_to(blocks: dict[str, BlockRow], row: BlockRow, change: OneBlockChange) -> None:
    match change:
        case Saved(_, num_bytes, at_ns):
            row.block_bytes = num_bytes
            row.saved_ns = row.saved_ns or at_ns
            row.last_use_ns = row.last_use_ns or at_ns
            row.writing_parts &= ~BLOCK_PART
        case StateSaved(_, num_bytes):
            row.state_bytes = num_bytes
            row.writing_parts &= ~STATE_PART
        case NotSaved(_, part):
            row.writing_parts &= ~part
        case Gone():
            if row.saved_ns is not None:
                row.block_bytes = row.state_bytes = 0
                row.saved_ns = row.last_use_ns = None
        case StateGone():
            row.state_bytes = 0
        case NothingLeft():
            if row.saved_ns is None and not row.state_bytes and not row.writing_parts:
                del blocks[row.hash]
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
            return [RunBegan(), WritersGone()]
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
                        writing_parts=PARTS[planned.part],
                    )
                )
                for planned in event.blocks
            ]
        case events.BlockSaved(part="block"):
            return [Saved(event.hash, event.saved_bytes, record.at_ns)]
        case events.BlockSaved():
            return [StateSaved(event.hash, event.saved_bytes)]
        case events.BlockSaveFailed():
            return [NotSaved(event.hash, PARTS[event.part]), NothingLeft(event.hash)]
        case events.BlockCorrupt():
            gone = Gone(event.hash) if event.part == "block" else StateGone(event.hash)
            return [gone, NothingLeft(event.hash)]
        case events.BlocksLost() | events.BlocksEvicted():
            return list(_gone(event.hashes, event.states))
        case events.RequestAdmitted() if event.last_hash:
            return [Used(event.last_hash, record.at_ns)]
        case _:
            return []


def _gone(hashes: Sequence[str], states: Sequence[str]) -> Iterator[BlockChange]:
    """Blocks and states that are not on disk any more."""
    for name in hashes:
        yield Gone(name)
        yield NothingLeft(name)
    for name in states:
        yield StateGone(name)
        yield NothingLeft(name)
