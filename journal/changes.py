"""Writes what the projections have changed, in the transaction that is under way."""

import msgspec

from journal.blocks import statement_of
from journal.database import Run
from journal.rows import Changes
from journal.statements import PUT_MINUTE, PUT_REQUEST, PUT_RUN


def write_changes(run: Run, changes: Changes) -> None:
    """Puts the changed rows in their place, and does to blocks what was done to them."""
    for statement, rows in (
        (PUT_REQUEST, changes.requests),
        (PUT_RUN, changes.runs),
        (PUT_MINUTE, changes.minutes),
    ):
        if rows:
            run(statement, [msgspec.structs.astuple(row) for row in rows.values()])
    for change in changes.blocks:
        run(*statement_of(change))
