"""`armcore-trio migrate`: the schema up or down, or its SQL."""

import click

from armcore_trio.borders import migrate as migrations
from armcore_trio.borders.fitness import SCHEMA_VERSION
from armcore_trio.commands.common import dsn
from armcore_trio.commands.reaching import reaching


@click.command("migrate")
@click.option("--sql", is_flag=True, help="Print the SQL for a DBA instead of running it.")
@click.option("--to", "revision", metavar="REVISION", help="Go up or down to this revision ('base' for none).")
def command(sql: bool, revision: str | None) -> None:
    """Bring the database schema up to date. Several at once do no harm."""
    if revision not in {None, "base", *migrations.revisions()}:
        raise click.UsageError(f"there is no revision {revision}; there are {', '.join(migrations.revisions())}")
    if sql:
        click.echo(migrations.script(revision or SCHEMA_VERSION))
        return
    before = reaching(lambda: migrations.migrate(dsn(), revision))
    click.echo(f"schema: {before or 'none'} -> {revision or max(before, SCHEMA_VERSION)}")
