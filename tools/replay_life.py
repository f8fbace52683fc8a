"""The life of one request, from the events that name it and those that changed it."""

from collections.abc import Iterator
from typing import Any

import msgspec

from journal import events
from journal.events import Record
from journal.reader import JournalReader
from scheduler.evolve import evolve
from scheduler.state import SchedulerState
from tools.request_ids import PREFIX

MAX_MEANT = 5
"""Requests that are named when an id could be any of several."""


class NoSuchRequest(Exception):
    """The journal knows no such request, or several. One line."""


class Moment(msgspec.Struct, kw_only=True):
    """One event of a life. `phase` is what the request is after it, or how it ended; `since_ms` is
    counted from its arrival. Decode steps that follow each other are one moment: `num_steps` of
    them brought `num_tokens`.
    """

    seq: int
    step: int
    run_id: int
    at_ns: int
    since_ms: int
    source: str
    kind: str
    phase: str
    numbers: dict[str, Any]
    num_steps: int = 0
    num_tokens: int = 0


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """A request and its moments, in order."""

    request_id: str
    moments: list[Moment]


def find_request(reader: JournalReader, given: str) -> str:
    """The id that begins as given, with or without `req_`. Raises NoSuchRequest."""
    start = given if given.startswith(PREFIX) else PREFIX + given
    with reader.transaction() as run:
        query = "SELECT request_id FROM request WHERE substr(request_id, 1, ?) = ? LIMIT ?"
        found = [row[0] for row in run(query, (len(start), start, MAX_MEANT + 1))]
    if not found:
        raise NoSuchRequest(f"the journal knows no request {given}")
    if len(found) > 1:
        names = ", ".join(found[:MAX_MEANT])
        raise NoSuchRequest(f"{given} may be any of several requests: {names}")
    return found[0]


ENDS = {
    "request_finished": "finished",
    "request_cancelled": "cancelled",
    "request_aborted": "aborted",
    "request_rejected": "rejected",
    "request_joined": "joined",
}


def life_of(records: Iterator[Record], request_id: str) -> Life:
    """Folds the journal, and keeps what is about this request."""
    state = SchedulerState()
    moments: list[Moment] = []
    for record in records:
        before = phase_of(state, request_id)
        number = state.numbers.get(request_id)
        evolve(state, record)
        phase = phase_of(state, request_id)
        if names(record, request_id, number) or phase != before:
            moment = moment_of(record, request_id, number, phase, moments)
            if moments and moment.kind == moments[-1].kind == "tokens_decoded":
                moments[-1].num_steps += 1
                moments[-1].num_tokens += moment.num_tokens
            else:
                moments.append(moment)
    return Life(request_id=request_id, moments=moments)


def phase_of(state: SchedulerState, request_id: str) -> str:
    """What the request is now; empty while it is not open."""
    request = state.find(request_id)
    return "" if request is None else request.phase.value


def names(record: Record, request_id: str, number: int | None) -> bool:
    """Whether the event is about this request, or brought it tokens."""
    event = record.event
    if isinstance(event, events.TokensDecoded):
        return number in event.numbers and tokens_for(event, number) > 0
    if isinstance(event, events.RequestAdopted | events.RequestJoined):
        other = event.adopter_id if isinstance(event, events.RequestAdopted) else event.joined_id
        return request_id in (event.request_id, other)
    return getattr(event, "request_id", None) == request_id


def tokens_for(event: events.TokensDecoded, number: int | None) -> int:
    """How many tokens this step brought to the request."""
    pairs = zip(event.numbers, event.counts, strict=True)
    return sum(count for owner, count in pairs if owner == number)


def moment_of(
    record: Record, request_id: str, number: int | None, phase: str, before: list[Moment]
) -> Moment:
    """The event as a moment; what it says of itself is left out where it is the same for all."""
    event = record.event
    body = msgspec.to_builtins(event)
    kind = body.pop("kind")
    tokens = tokens_for(event, number) if isinstance(event, events.TokensDecoded) else 0
    if tokens:
        body = {}
    if body.get("request_id") == request_id:
        del body["request_id"]
    body.pop("number", None)
    began_ns = before[0].at_ns if before else record.at_ns
    return Moment(
        seq=record.seq,
        step=record.step,
        run_id=record.run_id,
        at_ns=record.at_ns,
        since_ms=(record.at_ns - began_ns) // 1_000_000,
        source=record.source,
        kind=kind,
        phase=phase or ENDS.get(kind, before[-1].phase if before else ""),
        numbers={name: value for name, value in body.items() if value not in ("", None, [], ())},
        num_steps=1 if tokens else 0,
        num_tokens=tokens,
    )
