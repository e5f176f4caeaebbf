"""What `armcore-trio check` shows: the settings in force, and whether the servers can be used with them."""

from attrs import fields

from armcore_trio.borders.bus import open_bus
from armcore_trio.borders.store import Store
from armcore_trio.errors import DependencyDown, SchemaOutdated, describe
from armcore_trio.settings import Settings
from armcore_trio.values import Secret


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


async def connect(settings: Settings) -> dict[str, str | None]:
    """Each server, with what is wrong with it or None."""
    if not settings.nats_enabled:
        return {}
    return {"nats": await _try_nats(settings), "database": await _try_database(settings)}


async def _try_nats(settings: Settings) -> str | None:
    problem = None
    try:
        async with open_bus(settings, "armcore-trio check"):
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
    except (DependencyDown, SchemaOutdated) as error:
        return describe(error)
