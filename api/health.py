"""Whether the server lives (`/health`), whether it takes work (`/ready`), what it counts
(`/metrics`).
"""

import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import Response

from api.capacity import memory_object
from api.deps import Api, CurrentApi
from api.errors import json_response
from api.metrics import CONTENT_TYPE
from scheduler.metrics import Metrics as SchedulerMetrics
from scheduler.service import Readiness

router = APIRouter()


@router.api_route("/health", methods=["GET", "HEAD"])
async def health(api: CurrentApi) -> Response:
    """The process answers: 200, with what it runs. It says nothing about the work: see /ready."""
    service, served = api.service, api.service.served
    body: dict[str, object] = {
        "status": "ok",
        "run": service.run_id,
        "state": state_of(service.readiness()),
        "model": None if served is None else served.name,
        "blas": None if served is None else served.blas,
        "device": None if served is None else device_of(served.blas),
        "saving": saving_object(api),
        "memory": memory_object(service.metrics.memory, time.time_ns()),
        "journal": journal_object(api.settings.state / "journal.db", service.metrics),
    }
    return json_response(body)


def saving_object(api: Api) -> dict[str, object]:
    """Whether KV is saved. A disk that is full or fails, or a bug in a writer, stops that, and
    nothing else.
    """
    reason = api.service.saving_stopped
    return {
        "enabled": api.settings.kv.enabled,
        "stopped": reason is not None,
        "reason": reason,
        "detail": None if reason is None else api.service.stopped_detail,
    }


def state_of(readiness: Readiness) -> str:
    """`ready`, or why it is not."""
    return readiness.reason or "ready"


def device_of(blas: str) -> str:
    """Where the model computes: a GPU brings its own matrix library, and the fake model none."""
    return blas if blas in ("metal", "cuda", "none") else "cpu"


def journal_object(path: Path, metrics: SchedulerMetrics) -> dict[str, object]:
    """Where the journal is, its size with its log or null if that cannot be seen, and what this run
    wrote.
    """
    num_bytes: int | None = None
    with suppress(OSError):  # The disk may be broken, or the file be replaced just now.
        num_bytes = path.stat().st_size
        num_bytes += path.with_name(f"{path.name}-wal").stat().st_size
    return {
        "path": str(path),
        "size_bytes": num_bytes,
        "steps": metrics.steps,
        "events": metrics.events,
    }


@router.api_route("/ready", methods=["GET", "HEAD"])
async def ready(api: CurrentApi) -> Response:
    """200 if requests are taken and worked on; 503 while the model loads, while the server stops,
    and when work waits and the last step is too old. Its age is in the answer, and whether KV is
    saved: without that, requests are served as well, and only start from nothing more often.
    """
    readiness = api.service.readiness()
    body = {**asdict(readiness), "saving": saving_object(api)}
    return json_response(body, status=200 if readiness.ready else 503)


@router.get("/metrics")
async def metrics(api: CurrentApi) -> Response:
    """Everything that is counted, for Prometheus."""
    return Response(api.metrics.text(api.service.metrics), media_type=CONTENT_TYPE)
