"""What of a block is on its way to disk: the block, the state at its end, or both. An upgrade comes
at a start, when nothing is.
"""

from alembic import op

revision = "0004"
down_revision = "0003"

CHANGES = (
    "ALTER TABLE block ADD COLUMN writing_parts INTEGER NOT NULL DEFAULT 0",
    "CREATE INDEX block_writing ON block (hash) WHERE writing_parts <> 0",
)


def upgrade() -> None:
    for statement in CHANGES:
        op.execute(statement)
