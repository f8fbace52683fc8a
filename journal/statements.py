"""The statements of the journal, compiled once from the tables.

A compiled statement goes to the driver as it is: building it anew for each commit would cost more
than the commit.
"""

from sqlalchemy import Insert, Table, insert
from sqlalchemy.dialects import sqlite

from journal import tables

_DIALECT = sqlite.dialect(paramstyle="qmark")


def _insert(table: Table, prefix: str = "") -> str:
    statement: Insert = insert(table)
    if prefix:
        statement = statement.prefix_with(prefix)
    return str(statement.compile(dialect=_DIALECT))


def column_names(table: Table) -> str:
    """The columns in their order, for a SELECT."""
    return ", ".join(column.name for column in table.columns)


INSERT_EVENT = _insert(tables.events)
INSERT_STEP_TOKENS = _insert(tables.step_tokens)
INSERT_TOKEN_IDS = _insert(tables.token_ids)
INSERT_PARAMETERS = _insert(tables.request_parameters)
PUT_SNAPSHOT = _insert(tables.snapshots, "OR REPLACE")
PUT_REQUEST = _insert(tables.request, "OR REPLACE")
PUT_RUN = _insert(tables.run, "OR REPLACE")
PUT_MINUTE = _insert(tables.minute, "OR REPLACE")
INSERT_BLOCK = _insert(tables.block)
PUT_PAUSE = _insert(tables.pause, "OR REPLACE")
PUT_PIN = _insert(tables.pin, "OR REPLACE")
PUT_ORPHAN = _insert(tables.orphan, "OR REPLACE")
PUT_ADOPTION = _insert(tables.adoption, "OR REPLACE")
PUT_SAMPLE = _insert(tables.memory_sample, "OR REPLACE")
PUT_PHASE = _insert(tables.phase, "OR REPLACE")
PUT_DISK_WRITE = _insert(tables.disk_write, "OR REPLACE")
PUT_DISK_PLAN = _insert(tables.disk_plan, "OR REPLACE")
DELETE_DISK_PLAN = "DELETE FROM disk_plan WHERE hash = ? AND part = ?"
DELETE_PIN = "DELETE FROM pin WHERE number = ?"
