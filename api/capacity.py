"""`GET /v1/capacity`: how long a request may be here, and what memory has room for.

The same under `/v1/omlx/capacity`, where clients of another server look for it.
"""

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response

from api.deps import CurrentApi
from api.errors import json_response
from api.models import known_model
from scheduler.service import ServedModel
from scheduler.views import MemoryView, ServerView

router = APIRouter()


@router.get("/v1/capacity")
@router.get("/v1/omlx/capacity")
async def show_capacity(api: CurrentApi) -> Response:
    """The numbers that decide whether a request is refused, waits or runs."""
    served = await known_model(api)
    return json_response(capacity_object(served, await api.service.view()))


def capacity_object(served: ServedModel, view: ServerView) -> dict[str, object]:
    """The numbers that a refusal carries, those of its request apart, and memory as it is now.

    `capacity_bytes` is the most that this server can ever give, and `max_context_tokens` follows
    from it; `ceiling_bytes` is what holds now, and lower only where it follows what other programs
    leave (`ceiling_is_auto`). `reserved_bytes` is what the admitted rows may come to. Null: there
    is no ceiling.
    """
    memory = view.memory
    return {
        "object": "capacity",
        "model": served.name,
        "max_context_tokens": view.max_context_tokens,
        "model_context_tokens": served.facts.context_tokens,
        "capacity_bytes": view.capacity_bytes,
        "weights_bytes": served.facts.weights_bytes,
        "kv_bytes_per_token": served.facts.kv_bytes_per_token,
        "state_bytes": served.facts.state_bytes,
        "ceiling_bytes": memory.ceiling_bytes,
        "ceiling_is_auto": memory.is_auto,
        "low_bytes": memory.low_bytes,
        "high_bytes": memory.high_bytes,
        "emergency_bytes": memory.emergency_bytes,
        "level": memory.level,
        "usage_bytes": memory.usage_bytes,
        "reserved_bytes": view.reserved_bytes,
    }


def memory_object(memory: MemoryView, now_ns: int) -> dict[str, object]:
    """Memory as of the last reading, and how old that is."""
    sampled_ns = memory.sampled_at_ns
    age_ms = None if sampled_ns is None else max(0, now_ns - sampled_ns) // 1_000_000
    return {**msgspec.structs.asdict(memory), "age_ms": age_ms}
