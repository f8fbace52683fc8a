"""Whether the limits of saved KV leave room for anything of a model."""

from journal.events import KvLimits, ModelFacts
from scheduler.prefix import block_bytes, state_bytes


def why_none_is_saved(model: ModelFacts, limits: KvLimits) -> str | None:
    """Which limit is below what a prefix of one block takes, with both numbers; nothing when none
    is. A prefix needs a block and, where layers cannot be cut, the state at its end.
    """
    block, state = block_bytes(model, limits), state_bytes(model)
    part = max(block, state)
    if part > limits.writing_bytes:
        return f"kv.writing_bytes is {limits.writing_bytes}, one file takes {part}"
    # A tenth is kept free for what the writers may hold.
    room = limits.max_bytes - min(limits.writing_bytes, limits.max_bytes // 10)
    if block + state > room:
        return (
            f"kv.max_bytes is {limits.max_bytes}, of which {room} can stay filled;"
            f" a block of {limits.block_tokens} tokens takes {block + state}"
        )
    return None
