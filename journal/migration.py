"""The upgrade of a journal's schema. Imported only where one is due: alembic takes long."""

from importlib.util import find_spec

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection

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
