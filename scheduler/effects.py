"""What the world is to be told of a step, once the step is committed.

Each effect carries the seq of the event that caused it: a decision, or the tokens_decoded whose
tokens it sends. Effects are idempotent by (request, position), so one that was lost in a crash can
be repeated.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from journal import events
from journal.events import Record
from scheduler.prefix import tail_name
from scheduler.state import SchedulerState


@dataclass(frozen=True, slots=True)
class AcceptRequest:
    """The client is told that its request runs: headers, and the first protocol event."""

    seq: int
    request_id: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class RejectRequest:
    """The client is told why its request was refused."""

    seq: int
    request_id: str
    event: events.RequestRejected


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """The client is told that its request is one that was sent before, and gets its answer."""

    seq: int
    request_id: str
    joined_id: str


@dataclass(frozen=True, slots=True)
class StartRow:
    """The engine makes a row of the request's known tokens."""

    seq: int
    number: int
    request_id: str
    num_known_tokens: int


@dataclass(frozen=True, slots=True)
class TailPlace:
    """The tail of a held request: positions `start` to `end`."""

    request_id: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RestoreRow:
    """The engine fills the row from these blocks, in order, up to `num_tokens` tokens.

    `states` are the depths (in blocks) at which a state is kept, the deepest last; empty where
    every layer can be cut.
    """

    seq: int
    number: int
    hashes: tuple[str, ...]
    num_tokens: int
    states: tuple[int, ...]
    tail: TailPlace | None = None


@dataclass(frozen=True, slots=True)
class SaveTail:
    """The engine hands what the row holds behind `tail_start` to the writers, once it has come to
    rest.
    """

    seq: int
    number: int
    request_id: str
    tail_start: int


@dataclass(frozen=True, slots=True)
class ReclaimMemory:
    """The engine gives back what the allocator keeps."""

    seq: int


@dataclass(frozen=True, slots=True)
class SaveBlocks:
    """The engine hands these full blocks of the row to the writers."""

    seq: int
    number: int
    blocks: tuple[events.PlannedBlock, ...]


@dataclass(frozen=True, slots=True)
class RemoveFiles:
    """The files of these blocks, states and tails are unlinked, and leave memory. A tail's name is
    `<request id>-<position>`.
    """

    seq: int
    domain: str
    hashes: tuple[str, ...]
    states: tuple[str, ...]
    tails: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ShrinkTier:
    """These leave memory."""

    seq: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunChunk:
    """The engine feeds tokens `start` to `start + length`."""

    seq: int
    number: int
    chunk: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class SetBatch:
    """The engine decodes these rows from its next launch on."""

    seq: int
    batch: int
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropRow:
    """The engine frees the row's caches."""

    seq: int
    number: int


@dataclass(frozen=True, slots=True)
class SendTokens:
    """The tokens of this tokens_decoded go to their streams, and the engine may deliver its next
    step.
    """

    seq: int


@dataclass(frozen=True, slots=True)
class EndRequest:
    """The client gets its terminal event."""

    seq: int
    request_id: str
    outcome: Literal["finished", "cancelled", "aborted"]
    reason: str
    detail: str
    num_output_tokens: int
    num_cached_prompt_tokens: int = 0


EngineEffect = (
    StartRow | RestoreRow | SaveBlocks | SaveTail | ReclaimMemory | RunChunk | SetBatch | DropRow
)
StoreEffect = RemoveFiles | ShrinkTier
StreamEffect = AcceptRequest | RejectRequest | JoinRequest | SendTokens | EndRequest
Effect = EngineEffect | StoreEffect | StreamEffect


def effects_of(state: SchedulerState, records: Iterable[Record]) -> list[Effect]:
    """The effects of a committed step whose facts and decisions are folded into `state`.

    They are performed in this order: what the engine must drop, start and decode comes before the
    tokens that are sent, since sending them lets the engine deliver the step that it has launched;
    ends come last, behind the tokens of the same step.
    """
    engine: list[Effect] = []
    streams: list[Effect] = []
    ends: list[Effect] = []
    for record in records:
        match record.event:
            case events.TokensDecoded():
                streams.append(SendTokens(record.seq))
            case events.RequestQueued() as event:
                streams.append(AcceptRequest(record.seq, event.request_id, event.max_tokens))
            case events.RequestRejected() as event:
                streams.append(RejectRequest(record.seq, event.request_id, event))
            case events.RequestJoined() as event:
                streams.append(JoinRequest(record.seq, event.request_id, event.joined_id))
            case events.RequestFinished() | events.RequestCancelled() | events.RequestAborted():
                if drops_row(record.event):
                    assert record.event.number in state.leaving, "a row that is dropped leaves"
                    engine.append(DropRow(record.seq, record.event.number))
                ends.append(end_of(record.seq, record.event))
            case _:
                engine.extend(engine_effects_of(state, record))
    return engine + streams + ends


def drops_row(
    event: events.RequestFinished | events.RequestCancelled | events.RequestAborted,
) -> bool:
    """Whether the request was in the engine until its end. The row of one that waited for a retry
    was dropped by then, though its bytes may still be leaving.
    """
    return isinstance(event, events.RequestFinished) or event.had_row


def end_of(
    seq: int,
    event: events.RequestFinished | events.RequestCancelled | events.RequestAborted,
) -> EndRequest:
    """The terminal event of a request, as its stream needs it."""
    outcome, detail = "finished", ""
    if isinstance(event, events.RequestCancelled):
        outcome = "cancelled"
    elif isinstance(event, events.RequestAborted):
        outcome, detail = "aborted", event.detail
    return EndRequest(
        seq,
        event.request_id,
        outcome,
        event.reason,
        detail,
        event.num_output_tokens,
        event.num_memory_tokens + event.num_disk_tokens,
    )


def engine_effects_of(state: SchedulerState, record: Record) -> list[Effect]:
    """What an event that lets its request go on means for the engine and the store."""
    seq = record.seq
    match record.event:
        case events.RequestAdmitted() as event:
            return start_effects(state, seq, event)
        case events.PrefillChunkPlanned() as event:
            return [RunChunk(seq, event.number, event.chunk, event.start, event.length)]
        case events.BatchChanged() as event:
            return [SetBatch(seq, event.batch, event.numbers)]
        case events.RequestRetried() as event:
            return [DropRow(seq, event.number)]
        case events.BlockSavePlanned() as event:
            return [SaveBlocks(seq, event.number, event.blocks)]
        case events.BlocksEvicted() as event:
            return [RemoveFiles(seq, event.domain, event.hashes, event.states, event.tails)]
        case events.TierShrunk() as event:
            return [ShrinkTier(seq, event.hashes)]
        case _:
            return holding_effects_of(state, record)


def holding_effects_of(state: SchedulerState, record: Record) -> list[Effect]:
    """What an event about memory or a held request means for the engine and the store."""
    seq = record.seq
    match record.event:
        case events.ReclaimStarted():
            return [ReclaimMemory(seq)]
        case events.TailSavePlanned() as event:
            return [SaveTail(seq, event.number, event.request_id, event.tail_start)]
        case events.RequestPaused() as event if event.had_row:
            return [DropRow(seq, event.number)]
        case events.ResumeStarted() as event:
            return resume_effects(state, seq, event)
        case events.ChainUnpinned() as event if event.tail_bytes:
            tail = tail_name(event.request_id, event.num_tokens)
            return [RemoveFiles(seq, event.domain, (), (), (tail,))]
        case _:
            return []


def resume_effects(state: SchedulerState, seq: int, event: events.ResumeStarted) -> list[Effect]:
    """A row, and the chain that it is filled from."""
    start = StartRow(seq, event.number, event.request_id, event.num_known_tokens)
    if event.num_cached_tokens == 0:
        return [start]
    request = state.requests[event.number]
    tail = None
    if event.has_tail:
        tail = TailPlace(event.request_id, request.tail_start, event.num_cached_tokens)
    return [start, restore(state, seq, event, tail)]


def start_effects(state: SchedulerState, seq: int, event: events.RequestAdmitted) -> list[Effect]:
    """A row, and what it starts from."""
    start = StartRow(seq, event.number, event.request_id, event.num_known_tokens)
    if event.num_cached_tokens == 0:
        return [start]
    return [start, restore(state, seq, event, None)]


def restore(
    state: SchedulerState,
    seq: int,
    event: events.RequestAdmitted | events.ResumeStarted,
    tail: TailPlace | None,
) -> Effect:
    """The first blocks of a request, with the boundaries among them that have a state."""
    hashes = tuple(state.requests[event.number].hashes[: event.num_blocks])
    depths = enumerate(hashes, 1)
    states = tuple(d for d, name in depths if state.index.blocks[name].state_bytes)
    return RestoreRow(seq, event.number, hashes, event.num_cached_tokens, states, tail)
