"""How a one-off command works with a server: one that is away, outdated or unwilling ends it with one line."""

import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

import click
import trio

from armcore_trio.borders.store import Store
from armcore_trio.commands.common import REFUSED, UNAVAILABLE, dsn
from armcore_trio.errors import DependencyDown, SchemaUnfit, WriteRefused, describe

T = TypeVar("T")


def with_store(work: Callable[[Store], Awaitable[T]]) -> T:
    """Run a command's work on the database of the environment."""
    store = Store(dsn())
    return reaching(lambda: trio.run(work, store))


def reaching(work: Callable[[], T]) -> T:
    """Run a command's work; what a server does to it becomes one line on stderr and the exit code."""
    code, told, result = UNAVAILABLE, "", None
    try:
        result = work()
    except* (DependencyDown, SchemaUnfit) as group:
        told = describe(group)
    except* WriteRefused as group:
        code, told = REFUSED, describe(group)
    if not told:
        return cast("T", result)
    click.echo(told, err=True)
    sys.exit(code)
