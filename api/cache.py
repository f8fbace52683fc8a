"""`/v1/cache`: what is saved of KV, what it has saved of work, and a way to throw it away."""

import asyncio

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response

from api.deps import Api, CurrentApi, CurrentCaller
from api.errors import ApiError, json_response, operators_only
from api.settings import CLEAR_LOOK_S, CLEAR_WAIT_S
from scheduler.metrics import Metrics
from scheduler.views import CacheView

router = APIRouter()


@router.get("/v1/cache")
async def show_cache(api: CurrentApi) -> Response:
    """Blocks and bytes, the bounds on them, and what prompts have found since the start."""
    return json_response(cache_object(api, await api.service.view_cache()))


@router.post("/v1/cache/clear")
async def clear_cache(api: CurrentApi, caller: CurrentCaller) -> Response:
    """Sends away every block that may go, of this model and of others; what a running request
    holds stays. 200 with what has gone once that is so, 202 if it takes longer than a moment.

    Raises ApiError where nothing is saved, and for anybody but the operator.
    """
    if not caller.sees_all:
        raise operators_only()
    if not api.settings.kv.enabled:
        raise ApiError(
            409,
            "This server saves no KV (kv.enabled is false) and leaves older files of it alone:"
            " start it with kv.enabled, or remove the folder kv in its state folder.",
            code="cache_disabled",
        )
    metrics = api.service.metrics
    num_blocks = metrics.evicted_blocks["cleared"]
    num_bytes = metrics.evicted_bytes["cleared"]
    api.service.clear_cache("http")
    done, after = await cleared(api)
    body = {
        "object": "cache.clear",
        "done": done,
        "num_cleared_blocks": metrics.evicted_blocks["cleared"] - num_blocks,
        "cleared_bytes": metrics.evicted_bytes["cleared"] - num_bytes,
        "num_blocks": after.num_blocks,
        "disk_bytes": after.disk_bytes,
    }
    return json_response(body, status=200 if done else 202)


async def cleared(api: Api) -> tuple[bool, CacheView]:
    """Whether all that may go has gone, within a moment, and what is left."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + CLEAR_WAIT_S
    while True:
        after = await api.service.view_cache()
        if not after.clearing or clock() >= deadline:
            return not after.clearing, after
        await asyncio.sleep(CLEAR_LOOK_S)


def cache_object(api: Api, view: CacheView) -> dict[str, object]:
    """The cache as this route shows it."""
    return {
        "object": "cache",
        **msgspec.structs.asdict(view),
        "since_start": hits_object(api.service.metrics),
    }


def hits_object(metrics: Metrics) -> dict[str, object]:
    """Where the prompts of requests that have finished since the start came from."""
    hits = metrics.memory_hit_tokens + metrics.disk_hit_tokens
    total = hits + metrics.prefilled_tokens
    return {
        "num_memory_tokens": metrics.memory_hit_tokens,
        "num_disk_tokens": metrics.disk_hit_tokens,
        "num_prefilled_tokens": metrics.prefilled_tokens,
        "hit_rate": round(hits / total, 4) if total else None,
        "num_restores": metrics.restores,
        "num_saved_blocks": metrics.saved_blocks,
        "num_evicted_blocks": dict(metrics.evicted_blocks),
        "num_save_failures": dict(metrics.save_failures),
    }
