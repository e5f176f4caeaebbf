"""Waiting for a condition with a limit in real time, whatever a mock clock says meanwhile."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import trio

T = TypeVar("T")

LIMIT_SECONDS = 15.0
_POLL_SECONDS = 0.003


def wait_until(condition: Callable[[], T], seconds: float = LIMIT_SECONDS, what: object = "the condition") -> T:
    """What `condition` returned when it first was true. Blocks; for tests without Trio. `what` names it in the failure."""
    give_up = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < give_up, f"{_said(what)} did not come true within {seconds:g} s; last it was {result!r}"
        time.sleep(_POLL_SECONDS)
    return result


async def until(condition: Callable[[], T], seconds: float = LIMIT_SECONDS, what: object = "the condition") -> T:
    """As `wait_until`, letting Trio's other tasks run. The limit is real time even while Trio's clock is frozen."""
    give_up = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < give_up, f"{_said(what)} did not come true within {seconds:g} s; last it was {result!r}"
        await trio.to_thread.run_sync(time.sleep, _POLL_SECONDS)
    return result


async def in_thread(call: Callable[..., T], *args: Any) -> T:
    """A blocking call, such as a query that waits for a lock, beside Trio's tasks."""
    return await trio.to_thread.run_sync(call, *args, abandon_on_cancel=True)


def _said(what: object) -> object:
    return what() if callable(what) else what
