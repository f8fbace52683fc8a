"""Which events a picture of a journal shows together: a group for each kind of event."""

from journal.events import AnyEvent, TierShrunk

GROUPS = {
    "pauses": "Pauses",
    "resumes": "Going on",
    "admissions": "Arrivals and admissions",
    "ends": "Ends",
    "clients": "Clients",
    "memory": "Memory",
    "store": "Saved KV",
    "server": "Server",
    "steps": "Every step",
}
"""The groups by which events are filtered, in this order, and what people call them."""

UNDRAWN = ("steps",)
"""Groups that are not drawn until they are asked for: they say little, and there are many of them.
"""

KINDS_OF: dict[str, tuple[str, ...]] = {
    "pauses": (
        "hold_requested",
        "pause_started",
        "tail_save_planned",
        "chain_save_failed",
        "chain_pinned",
        "kv_dropped",
        "request_paused",
    ),
    "resumes": (
        "release_requested",
        "resume_started",
        "chain_restore_failed",
        "request_resumed",
        "chain_unpinned",
    ),
    "admissions": (
        "request_received",
        "request_queued",
        "request_deferred",
        "request_admitted",
        "request_retried",
    ),
    "ends": (
        "cancel_requested",
        "request_finished",
        "request_cancelled",
        "request_aborted",
        "request_rejected",
    ),
    "clients": ("client_gone", "client_attached", "request_joined", "request_adopted"),
    "memory": ("reclaim_started", "memory_reclaimed", "tier_shrunk", "emergency_declared"),
    "store": (
        "blocks_evicted",
        "block_corrupt",
        "blocks_lost",
        "block_save_failed",
        "saving_stopped",
        "saving_resumed",
        "clear_requested",
    ),
    "server": (
        "state_carried",
        "server_started",
        "engine_ready",
        "engine_failed",
        "server_stopping",
        "drain_ended",
    ),
    "steps": (
        "chain_saved",
        "chain_restored",
        "blocks_named",
        "block_save_planned",
        "block_saved",
        "store_measured",
        "memory_sampled",
        "clock_ticked",
        "prefill_chunk_planned",
        "prefill_chunk_done",
        "prefill_chunk_committed",
        "batch_changed",
        "tokens_decoded",
        "kv_freed",
    ),
}
"""Every kind of event, in the group in which people look for it."""

GROUP_OF = {kind: group for group, kinds in KINDS_OF.items() for kind in kinds}


def group_of(kind: str, event: AnyEvent) -> str:
    """The event's group. That blocks leave memory for newer ones is everyday; under pressure it is
    not.
    """
    if isinstance(event, TierShrunk) and event.reason == "budget":
        return "steps"
    return GROUP_OF[kind]
