"""`armcore-trio check`: the settings in force, and whether the servers can be used with them."""

import json
import sys

import click
import trio
from attrs import fields

from armcore_trio.borders.bus import open_bus
from armcore_trio.borders.store import Store
from armcore_trio.commands.common import UNAVAILABLE, as_json, settings
from armcore_trio.errors import DependencyDown, SchemaUnfit, describe
from armcore_trio.settings import Settings
from armcore_trio.values import Secret


@click.command("check")
@click.option("--connect", is_flag=True, help="Also try the servers.")
@as_json
def command(connect: bool, as_json: bool) -> None:
    """Check the settings, and with --connect whether the servers can be used with them."""
    given = settings()
    shown = report(given)
    problems = trio.run(try_servers, given) if connect else {}
    if as_json:
        click.echo(json.dumps({"settings": shown, "problems": problems}))
    else:
        for key, value in shown.items():
            click.echo(f"{key}={value}")
        for server, problem in problems.items():
            click.echo(f"{server}: {problem or 'ok'}")
    sys.exit(UNAVAILABLE if any(problems.values()) else 0)


def report(settings: Settings) -> dict[str, str]:
    """Every variable and its value in force; a secret only as set or not."""
    return {attribute.metadata["env"]: _shown(getattr(settings, attribute.name)) for attribute in fields(Settings)}


def _shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, Secret) else str(value)


async def try_servers(settings: Settings) -> dict[str, str | None]:
    """Each server, with what is wrong with it or None."""
    if not settings.nats_enabled:
        return {}
    return {"nats": await _try_nats(settings), "database": await _try_database(settings)}


async def _try_nats(settings: Settings) -> str | None:
    """Two connections at once, as the daemon has: a limit may leave room for one."""
    problem = None
    try:
        async with open_bus(settings, "armcore-trio check"), open_bus(settings, "armcore-trio check"):
            pass
    except* DependencyDown as group:
        problem = describe(group)
    return problem


async def _try_database(settings: Settings) -> str | None:
    if settings.postgres_dsn is None:
        return None
    try:
        async with Store(settings.postgres_dsn.reveal()).open("check"):
            return None
    except (DependencyDown, SchemaUnfit) as error:
        return describe(error)
