"""Every event that a journal can hold: one frozen class per fact or decision, in a closed union.

The kind of an event is its class name in snake case and is for ever: a released kind keeps its
meaning, and a field is only ever added with a default.
"""

from typing import Literal

import msgspec

from journal.bodies import (
    Body,
    CapacityNumbers,
    Event,
    KvLimits,
    Likeness,
    Limits,
    LostReason,
    MemoryLimits,
    ModelFacts,
    Orphaning,
    OrphanLimits,
    Part,
    PauseReason,
    RowEnd,
    WindowLayers,
    kind_of,
)
from journal.decisions import (
    BatchChanged,
    BlockSavePlanned,
    BlocksEvicted,
    ChainPinned,
    ChainUnpinned,
    EmergencyDeclared,
    KvDropped,
    PauseStarted,
    PlannedBlock,
    PrefillChunkCommitted,
    PrefillChunkPlanned,
    ReclaimStarted,
    RequestAborted,
    RequestAdmitted,
    RequestAdopted,
    RequestCancelled,
    RequestDeferred,
    RequestFinished,
    RequestJoined,
    RequestPaused,
    RequestQueued,
    RequestRejected,
    RequestResumed,
    RequestRetried,
    ResumeStarted,
    TailSavePlanned,
    TierShrunk,
)
from journal.facts import (
    BlockCorrupt,
    BlockSaved,
    BlockSaveFailed,
    BlocksLost,
    BlocksNamed,
    CancelRequested,
    ChainRestored,
    ChainRestoreFailed,
    ChainSaved,
    ChainSaveFailed,
    ClearRequested,
    ClientAttached,
    ClientGone,
    ClockTicked,
    DrainEnded,
    EngineFailed,
    EngineReady,
    HoldRequested,
    KvFreed,
    MemoryReclaimed,
    MemorySampled,
    PrefillChunkDone,
    ReleaseRequested,
    RequestReceived,
    SavingResumed,
    SavingStopped,
    ServerStarted,
    ServerStopping,
    StateCarried,
    StoreMeasured,
    TokensDecoded,
)

__all__ = [
    "DECISIONS",
    "FACTS",
    "KINDS",
    "AnyEvent",
    "BatchChanged",
    "BlockCorrupt",
    "BlockSaveFailed",
    "BlockSavePlanned",
    "BlockSaved",
    "BlocksEvicted",
    "BlocksLost",
    "BlocksNamed",
    "Body",
    "CancelRequested",
    "CapacityNumbers",
    "ChainPinned",
    "ChainRestoreFailed",
    "ChainRestored",
    "ChainSaveFailed",
    "ChainSaved",
    "ChainUnpinned",
    "ClearRequested",
    "ClientAttached",
    "ClientGone",
    "ClockTicked",
    "Decision",
    "DrainEnded",
    "EmergencyDeclared",
    "EngineFailed",
    "EngineReady",
    "Event",
    "Fact",
    "HoldRequested",
    "KvDropped",
    "KvFreed",
    "KvLimits",
    "Likeness",
    "Limits",
    "LostReason",
    "MemoryLimits",
    "MemoryReclaimed",
    "MemorySampled",
    "ModelFacts",
    "OrphanLimits",
    "Orphaning",
    "Part",
    "PauseReason",
    "PauseStarted",
    "PlannedBlock",
    "PrefillChunkCommitted",
    "PrefillChunkDone",
    "PrefillChunkPlanned",
    "ReclaimStarted",
    "Record",
    "ReleaseRequested",
    "RequestAborted",
    "RequestAdmitted",
    "RequestAdopted",
    "RequestCancelled",
    "RequestDeferred",
    "RequestFinished",
    "RequestJoined",
    "RequestPaused",
    "RequestQueued",
    "RequestReceived",
    "RequestRejected",
    "RequestResumed",
    "RequestRetried",
    "ResumeStarted",
    "RowEnd",
    "SavingResumed",
    "SavingStopped",
    "ServerStarted",
    "ServerStopping",
    "Source",
    "StateCarried",
    "StoreMeasured",
    "TailSavePlanned",
    "TierShrunk",
    "TokensDecoded",
    "WindowLayers",
    "kind_of",
]

Fact = (
    StateCarried
    | ServerStarted
    | EngineReady
    | ServerStopping
    | RequestReceived
    | PrefillChunkDone
    | TokensDecoded
    | KvFreed
    | EngineFailed
    | ClientGone
    | CancelRequested
    | BlocksNamed
    | BlockSaved
    | BlockSaveFailed
    | SavingStopped
    | SavingResumed
    | ChainRestored
    | BlockCorrupt
    | BlocksLost
    | StoreMeasured
    | ClearRequested
    | ChainRestoreFailed
    | ChainSaved
    | ChainSaveFailed
    | MemorySampled
    | MemoryReclaimed
    | HoldRequested
    | ReleaseRequested
    | ClockTicked
    | ClientAttached
    | DrainEnded
)
Decision = (
    RequestQueued
    | RequestRejected
    | RequestAdmitted
    | PrefillChunkPlanned
    | PrefillChunkCommitted
    | BatchChanged
    | RequestRetried
    | RequestFinished
    | RequestCancelled
    | RequestAborted
    | RequestDeferred
    | BlockSavePlanned
    | BlocksEvicted
    | TierShrunk
    | ReclaimStarted
    | EmergencyDeclared
    | PauseStarted
    | TailSavePlanned
    | ChainPinned
    | KvDropped
    | RequestPaused
    | ResumeStarted
    | RequestResumed
    | ChainUnpinned
    | RequestJoined
    | RequestAdopted
)
AnyEvent = Fact | Decision

FACTS: tuple[type[Event], ...] = Fact.__args__
DECISIONS: tuple[type[Event], ...] = Decision.__args__
KINDS: dict[str, type[Event]] = {kind_of(cls.__name__): cls for cls in FACTS + DECISIONS}

Source = Literal["fact", "decision"]


class Record(msgspec.Struct, frozen=True):
    """An event in its place: what a journal hands out, and what `evolve` folds."""

    seq: int
    run_id: int
    step: int
    source: Source
    at_ns: int
    event: AnyEvent
