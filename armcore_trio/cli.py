"""Gathers the commands and nothing else. Each is a module of its own that is imported when it is called.

Exit codes: 0 done; 1 refused or not found; 2 usage; 69 a server out of reach, or its schema missing or too old; 70 the
supervisor gave up; 78 settings.
"""

import errno
import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

import click

from armcore_trio import __version__

COMMANDS = {
    "run": "armcore_trio.commands.run",
    "migrate": "armcore_trio.commands.migrate",
    "check": "armcore_trio.commands.check",
    "probe": "armcore_trio.commands.probe",
    "submit": "armcore_trio.commands.submit",
    "retry": "armcore_trio.commands.retry",
    "simulate": "armcore_trio.kit.simulate",
    "review-log": "armcore_trio.commands.review_log",
    "demo": "armcore_trio.demo.demo",
}
"""Each command's module, which holds it under the name `command`."""


_SINK_BROKEN = frozenset({errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG, errno.EAGAIN, errno.EBADF})


class _NotText(click.ClickException):
    exit_code = click.UsageError.exit_code


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(COMMANDS[cmd_name]).command
        return command

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> click.Context:
        """An argument that is no text would fail wherever it is first written: a statement, a message, a log."""
        for position, argument in enumerate(args, 1):
            if argument != argument.encode("utf-8", "replace").decode():
                raise _NotText(f"argument {position} is not UTF-8 text")
        return super().make_context(info_name, args, *rest, **extra)

    def main(self, *args: Any, **extra: Any) -> Any:
        """What a command printed has to arrive: a full disk ends it with one line, a reader that left without one (N02)."""
        try:
            try:
                return super().main(*args, **extra)
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()
        except OSError as error:
            if error.errno not in _SINK_BROKEN:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            with suppress(OSError):
                if error.errno != errno.EPIPE:
                    click.echo(f"Error: what it did could not be written to standard output: {error.strerror}", err=True)
            sys.exit(1)


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="armcore-trio")
def main() -> None:
    """The exchange between a document-processing core and its recognition services.

    Everything is set through environment variables; see the README.
    """
