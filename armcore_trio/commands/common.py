"""What commands have in common: settings or exit 78, exit codes, `--json`."""

import os
import sys

import click

from armcore_trio.errors import SettingsError
from armcore_trio.settings import DSN, Settings, load

REFUSED, UNAVAILABLE, CONFIG = 1, 69, 78

as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def settings(*, database: bool = True) -> Settings:
    """The environment's settings, or the end of the process with a line for each variable at fault."""
    try:
        return load(os.environ, database=database)
    except SettingsError as error:
        for key, problem in sorted(error.problems.items()):
            click.echo(f"{key}: {problem}", err=True)
        sys.exit(CONFIG)


def dsn() -> str:
    """The connection string, needed even where the daemon would do without (`NATS_ENABLED=false`)."""
    secret = settings().postgres_dsn
    if secret is None:
        click.echo(f"{DSN}: is required for this command", err=True)
        sys.exit(CONFIG)
    return secret.reveal()
