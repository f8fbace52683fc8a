"""The upgrade of a journal's schema. Imported only where one is due: alembic takes long."""

from importlib.util import find_spec

import msgspec
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection

from journal.changes import write_changes
from journal.database import Run
from journal.queries import read_records
from journal.rebuild import Rebuild, load_base
from journal.statements import INSERT_BLOCK, PUT_DISK_PLAN, PUT_PIN
from journal.tables import SCHEMA


def upgrade(connection: Connection) -> None:
    """Applies the revisions that are missing, within the transaction that the caller has begun."""
    spec = find_spec("migrations")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    config = Config()
    # The configuration interpolates percent signs, which a folder's name may hold.
    folder = spec.submodule_search_locations[0].replace("%", "%%")
    config.set_main_option("script_location", folder)
    config.attributes["connection"] = connection
    command.upgrade(config, SCHEMA)
    fold_again(connection.exec_driver_sql)


def fold_again(run: Run) -> None:
    """Writes the rows of the projections as this release folds them: a column that is new is filled
    from the events that are there.
    """
    run("DELETE FROM block")
    run("DELETE FROM pin")
    run("DELETE FROM disk_plan")
    base = load_base(run)
    for row in base.rows.pins:
        run(PUT_PIN, msgspec.structs.astuple(row))
    for plan in base.rows.plans:
        run(PUT_DISK_PLAN, msgspec.structs.astuple(plan))
    rebuild = Rebuild(base)
    for row in rebuild.blocks.values():
        run(INSERT_BLOCK, msgspec.structs.astuple(row))
    last_seq = 0
    for record in read_records(run, 0, None):
        last_seq = record.seq
        changes = rebuild.apply(record)
        if changes is not None:
            write_changes(run, changes)
    rebuild.projection.flush()
    changes = rebuild.projection.take_changes(last_seq)
    if changes is not None:
        write_changes(run, changes)
