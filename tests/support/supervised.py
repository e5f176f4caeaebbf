"""The daemon's children in the test's own process under a real Supervisor: frozen clock, real servers, known jitter."""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import accumulate
from random import Random
from typing import Any
from weakref import WeakSet

import pytest
import trio
from attrs import Factory, define
from psycopg.pq import ConnStatus, TransactionStatus
from trio.testing import wait_all_tasks_blocked

from armcore_trio.borders.database import Connection
from armcore_trio.settings import Settings
from armcore_trio.supervision.status import State, TaskStatus
from armcore_trio.supervision.supervisor import ChildSpec, History, RestartPolicy, Supervisor
from tests.support.clock import FrozenClock
from tests.support.exchange import Parts
from tests.support.waiting import until

CHILDREN = ("publisher", "subscriber.apply", "subscriber.intake", "watchdog")


@define
class Supervised:
    """Children that are restarted as in the daemon. `attempts` are the instants at which each was started."""

    clock: FrozenClock
    parts: Parts
    supervisor: Supervisor
    attempts: dict[str, list[float]] = Factory(dict)
    statuses: dict[str, TaskStatus] = Factory(dict)
    _connections: WeakSet[Connection] = Factory(WeakSet)

    def start(self, *names: str) -> None:
        """Begin to run these children; all of the exchange's if none is named."""
        parts = self.parts
        known: dict[str, tuple[Any, TaskStatus]] = {
            "publisher": (parts.publisher, parts.publishing),
            "subscriber.apply": (parts.application, parts.applying),
            "subscriber.intake": (parts.intake, parts.receiving),
            "watchdog": (parts.watchdog, parts.watching),
        }
        for name in names or CHILDREN:
            child, status = known[name]
            self.attempts[name], self.statuses[name] = [], status
            spec = ChildSpec(name, partial(self._run, name, child), heartbeat_seconds=child.heartbeat_seconds)
            self.supervisor.start(spec, status)

    async def _run(self, name: str, child: Any, *args: Any, **options: Any) -> None:
        self.attempts[name].append(trio.current_time())
        await child.run(*args, **options)

    async def wait_running(self, *names: str) -> None:
        """Wait, while time stands still, until these children work; all if none is named."""
        states = [self.statuses[name] for name in names or self.statuses]
        await until(lambda: all(status.state is State.RUNNING for status in states), what=lambda: self.statuses)

    async def wait_failed(self, name: str, times: int = 1) -> None:
        """Wait, while time stands still, until the child has failed so often and backs off."""
        status = self.statuses[name]
        await until(lambda: (status.restarts, status.state) == (times, State.BACKOFF), what=lambda: (status, self.attempts))

    async def wait_at_rest(self) -> None:
        """Wait, while time stands still, until no child is starting and none waits for a server's answer."""
        await wait_all_tasks_blocked()
        await until(self._at_rest, what=lambda: self.statuses)
        await wait_all_tasks_blocked()

    async def pass_time(self, seconds: float) -> None:
        """Move on to so many seconds after the start, from one thing that is due to the next, at rest in between."""
        while True:
            await self.wait_at_rest()
            due = self.clock.seconds + trio.lowlevel.current_statistics().seconds_to_next_deadline
            if due > seconds:
                break
            await self.clock.advance_to(reached(max(due, self.clock.seconds + 1e-6)))
        if seconds > self.clock.seconds:
            await self.clock.advance_to(seconds)
            await self.wait_at_rest()

    def _at_rest(self) -> bool:
        open_ones = [one.pgconn for one in self._connections if one.pgconn.status == ConnStatus.OK]
        return all(one.transaction_status == TransactionStatus.IDLE for one in open_ones) and all(
            status.state is not State.STARTING for status in self.statuses.values()
        )


def reached(seconds: float) -> float:
    """The first whole microsecond, in which the clock counts, that is not before this instant."""
    return _microseconds(seconds) / 1e6


def missed(seconds: float) -> float:
    """The last whole microsecond before this instant."""
    return (_microseconds(seconds) - 1) / 1e6


def _microseconds(seconds: float) -> int:
    return math.ceil(round(seconds * 1e6, 3))


def back_off(seed: int, failures: int) -> list[float]:
    """How long a lone child waits after each of so many failures in a row."""
    policy, source = RestartPolicy(), Random(Random(seed).random())
    waits = [policy.decide(History(n), source) for n in range(1, failures + 1)]
    assert None not in waits
    return [wait or 0 for wait in waits]


def restarts_after(outage_began: float, seed: int, failures: int) -> list[float]:
    """The instants of a lone child's attempts after it first failed then, each failing at once."""
    waits = back_off(seed, failures)
    return list(accumulate(waits, lambda instant, wait: reached(instant + wait), initial=outage_began))[1:]


@asynccontextmanager
async def supervise(clock: FrozenClock, settings: Settings, seed: int) -> AsyncIterator[Supervised]:
    """Children for the length of the block, restarted with the jitter of this seed."""
    connections: WeakSet[Connection] = WeakSet()
    original = Connection.__init__

    def remember(connection: Connection, *args: Any, **options: Any) -> None:
        original(connection, *args, **options)
        connections.add(connection)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "__init__", remember)
        async with trio.open_nursery() as nursery:
            supervisor = Supervisor(nursery, Random(seed))
            yield Supervised(clock, Parts(settings), supervisor, connections=connections)
            nursery.cancel_scope.cancel()
