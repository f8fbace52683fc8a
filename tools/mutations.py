"""Mistakes that somebody could make in the policy or in the fold, as changes of the source. Each
must be found by the simulation, or else it would not find such a mistake either.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    """A text that is in a file exactly once, and what takes its place."""

    name: str
    file: str
    text: str
    replacement: str
    breaks: str


MUTATIONS = (
    # Who gets in
    Mutation(
        name="room up to the ceiling",
        file="scheduler/resuming.py",
        text="return mark_bytes(state, limits.low_permille) - in_use",
        replacement="return mark_bytes(state, limits.emergency_permille) - in_use",
        breaks="A row comes to others though that leaves no room below the low mark.",
    ),
    Mutation(
        name="room given twice",
        file="scheduler/resuming.py",
        text="in_use = draft.firm_bytes + draft.added_bytes",
        replacement="in_use = draft.firm_bytes",
        breaks="Two rows that get in with one step count on the same room.",
    ),
    Mutation(
        name="others beside solo",
        file="scheduler/resuming.py",
        text="is_solo = request.solo or draft.has_solo or there.has_solo",
        replacement="is_solo = request.solo or draft.has_solo",
        breaks="Others come to a request that may be what kills the server.",
    ),
    Mutation(
        name="held ones overtake each other",
        file="scheduler/resuming.py",
        text="        if not begin(state, draft, request):\n            return",
        replacement="        if not begin(state, draft, request):\n            continue",
        breaks="A small held request goes on before an older one that waits for room.",
    ),
    Mutation(
        name="nothing left to feed",
        file="scheduler/prefix.py",
        text="    most = num_known_tokens - 1\n",
        replacement="    most = num_known_tokens\n",
        breaks="A prompt that is saved whole is restored whole, and nothing is left to begin with.",
    ),
    # Who is held
    Mutation(
        name="oldest is held",
        file="scheduler/relief.py",
        text="[r for r in rows if r is not oldest and r.phase is not Phase.RESUMING]",
        replacement="[r for r in rows if r.phase is not Phase.RESUMING]",
        breaks="The oldest row may be the victim, so that nothing need ever finish.",
    ),
    Mutation(
        name="no progress between pauses",
        file="scheduler/relief.py",
        text="request.num_cached_tokens - request.resumed_tokens < limits.min_progress_tokens",
        replacement="request.num_cached_tokens < request.resumed_tokens",
        breaks="A request that has just gone on is held again.",
    ),
    Mutation(
        name="two pauses at once",
        file="scheduler/relief.py",
        text="if state.reliefs and not (is_emergency and may_add(state, limits)):",
        replacement="if len(state.reliefs) >= MAX_RELIEFS:",
        breaks="More is done before the effect of the last action is measured.",
    ),
    Mutation(
        name="drain holds nobody",
        file="scheduler/policy.py",
        text="    if state.drained:\n        hold_drained(state, draft)\n",
        replacement="",
        breaks="What does not finish before a stop is not saved.",
    ),
    # What is kept of them
    Mutation(
        name="pinned early",
        file="scheduler/pausing.py",
        text="    if not all(name in state.index.blocks for name in names):\n        return",
        replacement="    if not names and request.chain_blocks:\n        return",
        breaks="A chain is pinned, and its row let go, before all of it is durable.",
    ),
    Mutation(
        name="pinned blocks go",
        file="scheduler/eviction.py",
        text="if children[block.parent] == 0 and not parent.leases and not parent.pins:",
        replacement="if children[block.parent] == 0 and not parent.leases:",
        breaks="A block of a held request goes when the last one behind it has gone.",
    ),
    # Clients
    Mutation(
        name="answers without end",
        file="scheduler/adopting.py",
        text="        if not other.key_digest and other.until_ns > state.now_ns:",
        replacement="        if not other.key_digest:",
        breaks="An answer is given to a client that asks long after it was given up.",
    ),
    Mutation(
        name="keyed ones are anybody's",
        file="scheduler/adopting.py",
        text="        if not other.key_digest and other.until_ns > state.now_ns:",
        replacement="        if other.until_ns > state.now_ns:",
        breaks="The answer to a request with a key is given to a client without it.",
    ),
    # The fold
    Mutation(
        name="clients outlive the server",
        file="scheduler/orphans.py",
        text='        request.orphaned_by = "restart"\n        request.orphaned_ns = now_ns\n',
        replacement="        pass\n",
        breaks="After a start it is believed that the clients are still there.",
    ),
    Mutation(
        name="bytes that never come back",
        file="scheduler/evolve.py",
        text="    state.reserved_bytes -= state.leaving.pop(event.number, 0)\n",
        replacement="    state.leaving.pop(event.number, 0)\n",
        breaks="What a row had reserved stays reserved when it is gone.",
    ),
    Mutation(
        name="chain lost at a start",
        file="scheduler/runs.py",
        text="            forget_row(request)\n            insert_paused(state, request)",
        replacement=(
            "            forget_row(request)\n            forget_tail(state, request)\n"
            "            insert_paused(state, request)"
        ),
        breaks="A request that was going on when the server died has its tokens only.",
    ),
    Mutation(
        name="key of a cancelled request",
        file="scheduler/orphans.py",
        text="    elif state.keys.get(request.key_digest) == request.request_id:\n"
        "        del state.keys[request.key_digest]\n",
        replacement="",
        breaks="A key names a request that has ended without an answer.",
    ),
)
