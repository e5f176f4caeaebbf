"""`armcore-trio probe`: ask a running daemon how it is, as a container's health check does."""

import http.client
import json
import sys

import click

from armcore_trio.commands.common import REFUSED, settings
from armcore_trio.values import Endpoint

_SECONDS = 5.0
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - listened on, not called


@click.command("probe")
@click.option("--live", is_flag=True, help="Ask /livez: whether a restart would help, whatever the servers do.")
def command(live: bool) -> None:
    """Ask the daemon's /healthcheck: exit 0 if it says ok, 1 if not."""
    healthy, text = ask(settings(database=False).health_bind, live=live)
    click.echo(text)
    sys.exit(0 if healthy else REFUSED)


def ask(bind: Endpoint, *, live: bool = False) -> tuple[bool, str]:
    """Whether `/healthcheck`, or `/livez` if so asked, answers 200, and what it says in a line."""
    connection = http.client.HTTPConnection(_ANY.get(bind.host, bind.host), bind.port, timeout=_SECONDS)
    try:
        connection.request("GET", "/livez" if live else "/healthcheck")
        response = connection.getresponse()
        text = response.read().decode()
        report = {} if live else json.loads(text)
        summary = text.strip() if live else ", ".join(f"{name} {report[name]}" for name in ("status", "nats", "database"))
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        return False, f"no answer from {bind}: {error}"
    else:
        return response.status == http.client.OK, summary
    finally:
        connection.close()
