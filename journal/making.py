"""The rows with which a request, a run and a reading begin, and what ends a request."""

import msgspec

from journal import events
from journal.events import Record
from journal.rows import MinuteRow, RequestRow, RunRow, SampleRow

EndEvent = events.RequestFinished | events.RequestCancelled | events.RequestAborted


def _json(value: object) -> str:
    return msgspec.json.encode(value, order="sorted").decode()


def run_row(record: Record, event: events.ServerStarted) -> RunRow:
    """The row of a run that begins with this record."""
    return RunRow(
        run_id=record.run_id,
        first_seq=record.seq,
        started_ns=record.at_ns,
        process_id=event.process_id,
        policy_version=event.policy_version,
        code_digest=event.code_digest,
        model_name=event.model.name,
        model_fingerprint=event.model.fingerprint,
        engine_nonce=event.engine_nonce,
        platform=event.platform,
        blas=event.blas,
        sqlite_version=event.versions.get("sqlite"),
        mlx_version=event.versions.get("mlx"),
        python_version=event.versions.get("python"),
        versions=_json(event.versions),
        limits=_json(event.limits),
        configuration=_json(event.configuration),
        kv_block_tokens=event.limits.kv.block_tokens if event.limits.kv is not None else None,
    )


def run_ready(run: RunRow, record: Record, event: events.EngineReady) -> None:
    """The engine of the run can be used, and what was estimated is known."""
    run.ready_ns = record.at_ns
    run.one_row_only = int(event.one_row_only)
    run.load_duration_ns = event.load_ns
    run.model_fingerprint = event.model.fingerprint
    run.kv_domain = event.kv_domain or None


def request_row(record: Record, event: events.RequestReceived) -> RequestRow:
    """The row of a request that arrives with this record."""
    return RequestRow(
        number=event.number,
        request_id=event.request_id,
        client_request_id=event.client_request_id,
        model_fingerprint=event.model_fingerprint,
        route=event.route,
        stream=int(event.stream),
        phase="waiting",
        run_id=record.run_id,
        received_seq=record.seq,
        received_ns=record.at_ns,
        num_prompt_tokens=event.num_prompt_tokens,
        asked_max_tokens=event.max_tokens,
        has_key=int(bool(event.key_digest)),
        owner_digest=event.owner_digest,
    )


def explain(row: RequestRow, event: events.RequestRejected) -> None:
    """The numbers with which the request was refused."""
    row.num_waiting = event.num_waiting
    if event.numbers is not None:
        row.required_bytes = event.numbers.required_bytes
        row.capacity_bytes = event.numbers.capacity_bytes
        row.max_context_tokens = event.numbers.max_context_tokens


def sample_row(record: Record, event: events.MemorySampled, run: RunRow) -> SampleRow:
    """The row of a reading in this run."""
    return SampleRow(
        seq=record.seq,
        run_id=record.run_id,
        at_ns=record.at_ns,
        active_bytes=event.active_bytes,
        cached_bytes=event.cached_bytes,
        peak_bytes=event.peak_bytes,
        process_bytes=event.process_bytes,
        available_bytes=event.available_bytes,
        age_ns=event.age_ns,
        ceiling_bytes=msgspec.json.decode(run.limits)["ceiling_bytes"],
    )


def count_end(event: EndEvent, row: RequestRow | None, minute: MinuteRow) -> str:
    """Counts an end, keeps its error in words, and returns the outcome."""
    match event:
        case events.RequestFinished():
            minute.num_finished += 1
            return "finished"
        case events.RequestCancelled():
            minute.num_cancelled += 1
            return "cancelled"
        case events.RequestAborted():
            minute.num_aborted += 1
            if row is not None:
                row.detail = event.detail
            return "aborted"
