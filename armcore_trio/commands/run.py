"""`armcore-trio run`: the daemon as a process."""

import os
import signal
import sys

import click
import trio

from armcore_trio import daemon, logs
from armcore_trio.commands.common import CONFIG
from armcore_trio.errors import SettingsError
from armcore_trio.settings import DSN, Settings, load
from armcore_trio.signals import stop_signals
from armcore_trio.values import LogFormat

_STANDARD_ERROR = 2


@click.command("run")
@click.option("--migrate", is_flag=True, help="Bring the database schema up to date first.")
def command(migrate: bool) -> None:
    """Run the daemon until SIGTERM, SIGINT or SIGHUP."""
    _fill_standard_streams()
    settings = _settings(migrate=migrate)
    logs.configure(settings.log_format, debug=settings.debug, secrets=settings.secrets)
    exit_code = trio.run(lambda: daemon.run(settings, migrate=migrate))
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)  # what there was to stop has stopped; the exit code is decided
    sys.exit(exit_code)


def _fill_standard_streams() -> None:
    """A stream that was closed before the start would be the next file or connection, and others write there."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w")


def _settings(*, migrate: bool) -> Settings:
    """The settings; what is wrong with them is the log's only record, since that is where a daemon speaks."""
    try:
        settings = load(os.environ)
        if migrate and settings.postgres_dsn is None:
            raise SettingsError({DSN: "is required for --migrate"})
    except SettingsError as error:
        logs.configure(LogFormat.JSON, debug=False, secrets=[])
        logs.get().critical("settings.invalid", problems=error.problems)
        sys.exit(CONFIG)
    return settings
