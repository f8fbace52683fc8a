"""What the journal says of requests, most of them ended. Called in threads that may wait."""

from pathlib import Path
from typing import Self

import msgspec

from journal.events import Record
from journal.reader import JournalReader
from journal.rows import RequestRow
from scheduler.engine.base import TokenLogprobs
from scheduler.parameters import decode_parameters
from scheduler.streams import Accepted, RequestStream, StreamEnd
from scheduler.views import RequestView

MAX_EVENTS_READ = 1000
"""Events of one answer at most."""


class History:
    """Reads beside the writer, each time in short transactions of its own."""

    def __init__(self, reader: JournalReader) -> None:
        self._reader = reader

    @classmethod
    def open(cls, path: Path) -> Self:
        """The history in a journal that is there. Raises JournalError."""
        return cls(JournalReader.open(path))

    def close(self) -> None:
        """Gives the reader's connections back."""
        self._reader.close()

    def stream(self, request_id: str) -> RequestStream | None:
        """The stream of a request that has ended, or None when it never had one or its tokens are
        not kept.
        """
        row = self._reader.request(request_id)
        if row is None or row.outcome is None or row.max_tokens is None:
            return None
        body = self._reader.parameters(request_id)
        if body is None:
            return None
        ids, logprobs = self._reader.output_tokens(request_id)
        if len(ids) != row.num_output_tokens:
            return None  # they were purged between two of these reads
        stream = RequestStream(
            request_id,
            decode_parameters(body),
            row.num_prompt_tokens,
            Accepted(row.max_tokens),
            tokens=list(ids),
        )
        if logprobs is not None:
            stream.logprobs = [TokenLogprobs(chosen, top) for chosen, top in logprobs]
        stream.end = end_of(row)
        return stream

    def view(self, request_id: str) -> RequestView | None:
        """The request as its row says, or None when there is none."""
        row = self._reader.request(request_id)
        return None if row is None else view_row(row)

    def events(self, request_id: str, after_seq: int, limit: int) -> list[dict[str, object]]:
        """The request's events after a seq, in order, at most `limit` and `MAX_EVENTS_READ`."""
        limit = min(limit, MAX_EVENTS_READ)
        return [shown(record) for record in self._reader.events_of(request_id, after_seq, limit)]


def shown(record: Record) -> dict[str, object]:
    """An event as people see it, of values that JSON knows."""
    body = msgspec.to_builtins(record.event)
    return {
        "seq": record.seq,
        "run_id": record.run_id,
        "step": record.step,
        "source": record.source,
        "kind": body.pop("kind"),
        "at_ns": record.at_ns,
        "body": body,
    }


def end_of(row: RequestRow) -> StreamEnd:
    """How an ended request ended."""
    assert row.outcome in ("finished", "cancelled", "aborted"), f"an end by {row.outcome}"
    return StreamEnd(
        kind=row.outcome,
        reason=row.reason or "",
        detail=row.detail or "",
        num_prompt_tokens=row.num_prompt_tokens,
        num_output_tokens=row.num_output_tokens or 0,
        num_cached_prompt_tokens=row.num_memory_tokens + row.num_disk_tokens,
    )


def view_row(row: RequestRow) -> RequestView:
    """A row of the journal's table of requests, as people see it."""
    ended_ns = row.ended_ns or row.received_ns
    return RequestView(
        id=row.request_id,
        route=row.route,
        state=row.outcome or row.phase,
        held_reason=None,
        model_fingerprint=row.model_fingerprint,
        num_prompt_tokens=row.num_prompt_tokens,
        num_output_tokens=row.num_output_tokens or 0,
        num_known_tokens=row.num_prompt_tokens + (row.num_output_tokens or 0),
        num_cached_tokens=row.num_cached_tokens or 0,
        num_memory_tokens=row.num_memory_tokens,
        num_disk_tokens=row.num_disk_tokens,
        max_tokens=row.max_tokens or 0,
        row_bytes=0,
        reserved_bytes=0,
        wait=None,
        hold=False,
        pause_reason=None,
        num_saved_tokens=0,
        num_pinned_blocks=0,
        tail_bytes=0,
        num_pauses=row.num_pauses,
        held_ms=row.held_ns // 1_000_000,
        received_at_ns=row.received_ns,
        admitted_at_ns=row.admitted_ns,
        ended_at_ns=row.ended_ns,
        age_ms=(ended_ns - row.received_ns) // 1_000_000,
        retries=row.num_retries,
        deaths=row.num_deaths,
        solo=False,
        reason=row.reason,
        detail=row.detail,
        has_client=False,
        orphaned_by=None,
        orphaned_ms=0,
        keyed=bool(row.has_key),
        joined_id=row.joined_id,
        owner_digest=row.owner_digest,
    )
