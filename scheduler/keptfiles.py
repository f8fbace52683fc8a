"""Files of saved KV by the names that the core has for them, and what came of files, as facts."""

from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Literal

from journal import events
from journal.events import Fact, PlannedBlock
from scheduler.engine.base import SaveTail
from scheduler.kvcache.naming import SUFFIX, BlockFile, KeptFile, StateFile, TailFile
from scheduler.kvcache.store import Saved, SaveFailed
from scheduler.kvcache.writers import StopReason
from scheduler.prefix import STATE_SUFFIX, BlockIndex, is_tail

TailFailure = Literal["disk_full", "io_error", "not_taken"]


def file_of(domain: str, name: str, *, is_state: bool) -> KeptFile:
    """The file of a block, or of the state at its end."""
    return StateFile(domain, name) if is_state else BlockFile(domain, name)


def saved(result: Saved) -> Fact:
    """The fact of a file that is durable."""
    return events.BlockSaved(
        hash=hash_of(result.file),
        part=part_of(result.file),
        saved_bytes=result.file_bytes,
        duration_ns=result.duration_ns,
    )


def not_saved(
    planned: PlannedBlock, reason: Literal["given_up", "not_taken"], detail: str = ""
) -> Fact:
    """The fact of a block that came to no writer."""
    return events.BlockSaveFailed(
        hash=planned.hash, part=planned.part, reason=reason, detail=detail
    )


def save_failed(result: SaveFailed) -> Fact:
    """The fact of a file that is not there."""
    return events.BlockSaveFailed(
        hash=hash_of(result.file),
        part=part_of(result.file),
        reason=result.kind,
        detail=result.detail,
    )


def hash_of(file: KeptFile) -> str:
    """The block's hash, of the block itself or of the state at its end."""
    assert not isinstance(file, TailFile), "a tail has no hash"
    return file.hash


def part_of(file: KeptFile) -> events.Part:
    """Which of a block's two files this is."""
    return "state" if isinstance(file, StateFile) else "block"


def tail_saved(command: SaveTail, end: int, tail_bytes: int, duration_ns: int) -> Fact:
    """The fact of a tail that is durable; without bytes, of one that needs no file."""
    return events.ChainSaved(
        request_id=command.request_id,
        number=command.number,
        tail_start=command.tail_start,
        num_tokens=end,
        tail_bytes=tail_bytes,
        duration_ns=duration_ns,
    )


def tail_not_saved(command: SaveTail, reason: TailFailure, detail: str) -> Fact:
    """The fact of a tail that came to nothing."""
    return events.ChainSaveFailed(
        request_id=command.request_id, number=command.number, reason=reason, detail=detail
    )


def tail_failure(failed: SaveFailed, stopped: StopReason | None) -> TailFailure:
    """Why a tail that was taken is not on disk. Given up with others, it has failed as they did."""
    match failed.kind:
        case "disk_full":
            return "disk_full"
        case "io_error" | "obstructed":
            return "io_error"
        case "given_up":
            return stop_failure(stopped)


def stop_failure(stopped: StopReason | None) -> TailFailure:
    """Why a tail is not saved while nothing is. A writer's bug is to it as a broken disk."""
    match stopped:
        case None:
            return "not_taken"
        case "disk_full":
            return "disk_full"
        case "io_error" | "bug":
            return "io_error"


def lost(paths: Iterable[str], reason: events.LostReason) -> Fact:
    """Files by their path below the store's folder, as blocks, states and tails that are lost."""
    names = [PurePosixPath(path).name.removesuffix(SUFFIX) for path in paths]
    kept = [name for name in names if not is_tail(name)]
    return events.BlocksLost(
        hashes=tuple(name for name in kept if not name.endswith(STATE_SUFFIX)),
        states=tuple(n.removesuffix(STATE_SUFFIX) for n in kept if n.endswith(STATE_SUFFIX)),
        tails=tuple(name for name in names if is_tail(name)),
        reason=reason,
    )


def tail_file(domain: str, name: str) -> TailFile:
    """The file of a tail by the core's name for it: `<request id>-<position>`."""
    request_id, _, position = name.rpartition("-")
    return TailFile(domain, request_id, int(position))


def known_files(index: BlockIndex) -> dict[str, int]:
    """The paths and sizes of all files that the index knows."""
    known = {tail_file(tail.domain, n).path: tail.num_bytes for n, tail in index.tails.items()}
    for name, block in index.blocks.items():
        known[BlockFile(block.domain, name).path] = block.block_bytes
        if block.state_bytes:
            known[StateFile(block.domain, name).path] = block.state_bytes
    return known
