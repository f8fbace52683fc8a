"""Short ways to let requests lose their clients, shared by the journal's tests."""

from typing import Literal

import msgspec

from journal.events import (
    ClientAttached,
    ClientGone,
    Decision,
    Likeness,
    Orphaning,
    OrphanLimits,
    ReleaseRequested,
    RequestAdopted,
    RequestJoined,
    RequestReceived,
    ServerStarted,
)
from tests.journal_steps import LIMITS, SECOND_NS, received, request_id, server_started

GRACE_NS, RESTART_GRACE_NS, RETENTION_NS = 60 * SECOND_NS, 1_800 * SECOND_NS, 86_400 * SECOND_NS

OnRestart = Literal["resume", "hold", "cancel"]


def orphan_limits(on_restart: OnRestart = "resume", grace_ns: int = GRACE_NS) -> OrphanLimits:
    return OrphanLimits(
        grace_ns=grace_ns,
        restart_grace_ns=RESTART_GRACE_NS,
        on_restart=on_restart,
        adopt=True,
        retention_ns=RETENTION_NS,
    )


ORPHANS = orphan_limits()


def started(orphans: OrphanLimits | None = ORPHANS) -> ServerStarted:
    """A run that looks after clients, or not."""
    limits = msgspec.structs.replace(LIMITS, orphans=orphans)
    return msgspec.structs.replace(server_started(), limits=limits)


def arrival(number: int, key: str = "", content: str = "c") -> RequestReceived:
    """A request with digests; with a key when one is given."""
    digests = {"key_digest": key, "content_digest": content, "owner_digest": "owner"}
    return msgspec.structs.replace(received(number), **digests)


def gone(number: int) -> ClientGone:
    return ClientGone(request_id=request_id(number))


def attached(number: int) -> ClientAttached:
    return ClientAttached(request_id=request_id(number))


def released(number: int) -> ReleaseRequested:
    return ReleaseRequested(request_id=request_id(number))


def adopts(
    adopter: int,
    number: int,
    by: Likeness = "content",
    orphaned_by: Orphaning | None = "client_gone",
    orphaned_ns: int = 5 * SECOND_NS,
) -> tuple[Decision, Decision]:
    """An arrival joins a request, which has a client again."""
    joined = RequestJoined(
        request_id=request_id(adopter), number=adopter, joined_id=request_id(number), by=by
    )
    adopted = RequestAdopted(
        request_id=request_id(number),
        number=number,
        adopter_id=request_id(adopter),
        adopter_number=adopter,
        by=by,
        orphaned_by=orphaned_by,
        orphaned_ns=orphaned_ns,
        num_output_tokens=2,
    )
    return joined, adopted
