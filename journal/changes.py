"""Writes what the projections have changed, in the transaction that is under way."""

import msgspec

from journal.blocks import statement_of
from journal.database import Run
from journal.rows import Changes
from journal.statements import (
    DELETE_DISK_PLAN,
    DELETE_PIN,
    PUT_ADOPTION,
    PUT_DISK_PLAN,
    PUT_DISK_WRITE,
    PUT_MINUTE,
    PUT_ORPHAN,
    PUT_PAUSE,
    PUT_PHASE,
    PUT_PIN,
    PUT_REQUEST,
    PUT_RUN,
    PUT_SAMPLE,
)


def write_changes(run: Run, changes: Changes) -> None:
    """Puts the changed rows in their place, and does to blocks what was done to them."""
    for statement, rows in (
        (PUT_REQUEST, changes.requests),
        (PUT_RUN, changes.runs),
        (PUT_MINUTE, changes.minutes),
        (PUT_PAUSE, changes.pauses),
        (PUT_SAMPLE, changes.samples),
        (PUT_ORPHAN, changes.orphans),
        (PUT_ADOPTION, changes.adoptions),
        (PUT_PHASE, changes.phases),
        (PUT_DISK_WRITE, changes.writes),
    ):
        if rows:
            run(statement, [msgspec.structs.astuple(row) for row in rows.values()])
    for number, pin in changes.pins.items():
        if pin is None:
            run(DELETE_PIN, (number,))
        else:
            run(PUT_PIN, msgspec.structs.astuple(pin))
    for key, plan in changes.plans.items():
        if plan is None:
            run(DELETE_DISK_PLAN, key)
        else:
            run(PUT_DISK_PLAN, msgspec.structs.astuple(plan))
    for change in changes.blocks:
        run(*statement_of(change))
