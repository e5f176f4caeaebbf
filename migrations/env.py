"""How Alembic reaches the database. Called by `borders/migrate.py` with a connection, or none to print SQL."""

from alembic import context

VERSION_TABLE = "armcore_trio_version"


def run() -> None:
    """Run the chosen migrations in one transaction, or print them."""
    connection = context.config.attributes.get("connection")
    if connection is None:
        context.configure(dialect_name="postgresql", version_table=VERSION_TABLE, literal_binds=True)
    else:
        context.configure(connection=connection, version_table=VERSION_TABLE)
    with context.begin_transaction():
        context.run_migrations()


run()
