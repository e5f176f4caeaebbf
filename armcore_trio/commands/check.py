"""`armcore-trio check`: the settings in force, and whether the servers can be used with them."""

import json
import sys
from contextlib import suppress
from typing import Any
from uuid import uuid4

import click
import trio
from attrs import fields

from armcore_trio.borders.bus import Bus, Message, Received, open_bus
from armcore_trio.borders.store import Store
from armcore_trio.commands.common import UNAVAILABLE, as_json, settings
from armcore_trio.errors import DependencyDown, SchemaUnfit, describe
from armcore_trio.settings import Settings
from armcore_trio.values import Secret

_ANSWER_SECONDS = 1.0


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
    """Two connections at once, as the daemon has: a limit may leave room for one. Nothing is published, nothing taken away."""
    problem = None
    try:
        async with open_bus(settings, "armcore-trio check"), open_bus(settings, "armcore-trio check") as bus:
            await bus.subscribe(settings.result_subject, "", lambda _: None)
            permissions = await _permissions(bus)
            refused = [subject for subject in settings.request_subjects.values() if not _allows(permissions, subject)]
            if refused:
                problem = f"nats: {bus.server}: permissions violation for publish to {' and to '.join(refused)}"
    except* DependencyDown as group:
        problem = describe(group)
    return problem


async def _permissions(bus: Bus) -> dict[str, Any]:
    """To which subjects we may publish, as nats-server 2.10 and later tell; nothing if it does not."""
    heard, received = trio.open_memory_channel[Received](1)
    inbox = f"_INBOX.{uuid4().hex}"
    with suppress(DependencyDown, ValueError, LookupError, TypeError, AttributeError):
        await bus.subscribe(inbox, "", heard.send_nowait)
        await bus.publish_batch([Message("$SYS.REQ.USER.INFO", b"", reply=inbox)])
        with trio.move_on_after(_ANSWER_SECONDS):
            told = json.loads((await received.receive()).data)
            return dict(told["data"]["permissions"]["publish"])
    return {}


def _allows(permissions: dict[str, Any], subject: str) -> bool:
    allowed, denied = permissions.get("allow") or [">"], permissions.get("deny") or []
    return any(_matches(one, subject) for one in allowed) and not any(_matches(one, subject) for one in denied)


def _matches(pattern: str, subject: str) -> bool:
    """Whether a subject is meant by a pattern, in which `*` stands for a token and `>` for all that follow."""
    wanted, tokens = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted, tokens = wanted[:-1], tokens[: len(wanted) - 1] if len(tokens) >= len(wanted) else []
    return len(wanted) == len(tokens) and all(one in {"*", token} for one, token in zip(wanted, tokens, strict=True))


async def _try_database(settings: Settings) -> str | None:
    if settings.postgres_dsn is None:
        return None
    try:
        async with Store(settings.postgres_dsn.reveal()).open("check"):
            return None
    except (DependencyDown, SchemaUnfit) as error:
        return describe(error)
