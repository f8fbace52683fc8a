"""The kinds of events of which the projections take no notice."""

from journal import events

Quiet = (
    events.StateCarried
    | events.EngineFailed
    | events.CancelRequested
    | events.TokensDecoded
    | events.BlocksNamed
    | events.BlockSaved
    | events.BlockSaveFailed
    | events.SavingStopped
    | events.SavingResumed
    | events.BlockCorrupt
    | events.BlocksLost
    | events.StoreMeasured
    | events.ClearRequested
    | events.ClockTicked
    | events.BlockSavePlanned
    | events.BlocksEvicted
    | events.TierShrunk
    | events.ChainRestoreFailed
    | events.ChainSaveFailed
    | events.MemoryReclaimed
    | events.HoldRequested
    | events.ReclaimStarted
    | events.EmergencyDeclared
    | events.TailSavePlanned
)
"""Kinds that change no row of a request, a run or a minute, nor of what belongs to a request; some
change blocks.
"""


def leave(_: Quiet) -> None:
    """The rows stay as they are. A new kind that nobody handles is no argument of this."""
