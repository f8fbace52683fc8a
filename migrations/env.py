"""Run by alembic: applies revisions on the connection that the journal hands over.

The journal opens one transaction around the whole upgrade, so that an interrupted one leaves the
file as it was.
"""

from alembic import context

connection = context.config.attributes["connection"]
context.configure(connection=connection, transactional_ddl=False)
context.run_migrations()
