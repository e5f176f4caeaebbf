"""The daemon's children in the test's own process, each pass run by hand on real servers."""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from attrs import Factory, define, field

from armcore_trio.borders.bus import Bus, open_bus
from armcore_trio.borders.database import Connection
from armcore_trio.borders.store import Store
from armcore_trio.exchange.hearing import Hold
from armcore_trio.exchange.inbox import Inbox
from armcore_trio.exchange.publisher import Publisher
from armcore_trio.exchange.subscriber import Application, Intake
from armcore_trio.exchange.watchdog import Watchdog
from armcore_trio.settings import Settings
from armcore_trio.supervision.status import TaskStatus
from armcore_trio.supervision.supervisor import Stop
from tests.support.service import ServiceClient
from tests.support.waiting import until

Said = tuple[dict[str, Any] | bytes, str | None]
"""An envelope, or whatever is sent in its place, and its message id."""
Answer = dict[str, Any]


@define
class Parts:
    """Publisher, intake, application and watchdog, wired as the daemon wires them, and none of them running."""

    settings: Settings
    store: Store = field()
    inbox: Inbox = field()
    publishing: TaskStatus = Factory(TaskStatus)
    receiving: TaskStatus = Factory(TaskStatus)
    applying: TaskStatus = Factory(TaskStatus)
    watching: TaskStatus = Factory(TaskStatus)
    hold: Hold = Factory(Hold)
    stop: Stop = Factory(Stop)

    @store.default
    def _store(self) -> Store:
        assert self.settings.postgres_dsn is not None
        return Store(self.settings.postgres_dsn.reveal())

    @inbox.default
    def _inbox(self) -> Inbox:
        return Inbox(self.settings.inbox_buffer_messages)

    @property
    def publisher(self) -> Publisher:
        return Publisher(self.settings, self.store, self.publishing, self.receiving, self.inbox)

    @property
    def intake(self) -> Intake:
        return Intake(self.settings, self.inbox, self.receiving)

    @property
    def application(self) -> Application:
        return Application(self.settings, self.store, self.inbox, self.applying)

    @property
    def watchdog(self) -> Watchdog:
        return Watchdog(self.settings, self.store, self.watching, self.inbox, [self.receiving, self.applying], self.hold)


@define
class Exchange:
    """All parts on open connections: one instance of the daemon that moves when told to."""

    parts: Parts
    connection: Connection
    bus: Bus

    @property
    def applied(self) -> Counter[str]:
        """How many messages had which outcome."""
        return self.parts.applying.totals

    async def publish(self) -> None:
        """One pass of the publisher: queued jobs, then unacknowledged ones."""
        await self.parts.publisher.run_once(self.connection, self.bus, self.parts.stop)

    async def expire(self) -> None:
        """One pass of the watchdog."""
        await self.parts.watchdog.run_once(self.connection, self.parts.stop)

    async def received(self, count: int) -> None:
        """Wait until so many messages wait to be applied."""
        await until(lambda: len(self.parts.inbox) >= count, what=f"{count} messages in the inbox")

    async def apply(self, count: int) -> None:
        """Receive so many messages and apply them as one batch."""
        await self.received(count)
        await self.parts.application.apply(self.connection, self.parts.inbox.front(count))

    async def deliver(self, service: ServiceClient, *messages: Said) -> list[Answer]:
        """Let the service say all this, apply it as one batch, and return what each message was answered."""
        replies = [service.new_reply() for _ in messages]
        for (envelope, msg_id), reply in zip(messages, replies, strict=True):
            service.send(envelope, msg_id, reply=reply)
        await self.apply(len(messages))
        return [service.answer(reply) for reply in replies]

    async def outcomes(self, service: ServiceClient, *messages: Said) -> list[str]:
        """As `deliver`; the outcomes alone."""
        return [answer["outcome"] for answer in await self.deliver(service, *messages)]


@asynccontextmanager
async def open_exchange(settings: Settings, *, receiving: bool = True) -> AsyncIterator[Exchange]:
    """An instance for the length of the block. Without `receiving` its intake counts as connected and takes nothing."""
    parts = Parts(settings)
    async with trio.open_nursery() as nursery:
        if receiving:
            await nursery.start(parts.intake.run, parts.stop)
        else:
            parts.inbox.hear = trio.lowlevel.checkpoint
        parts.receiving.running()
        async with parts.store.open("test") as connection, open_bus(settings, "armcore-trio test") as bus:
            parts.publishing.running()
            yield Exchange(parts, connection, bus)
        nursery.cancel_scope.cancel()


def record_passes(patch: pytest.MonkeyPatch, kind: type[Publisher] | type[Watchdog]) -> list[float]:
    """The instants, by Trio's clock, of the passes that have ended so far; grows as a `run` goes on."""
    original: Callable[..., Awaitable[float]] = kind.run_once
    instants: list[float] = []

    async def run_once(self: Publisher | Watchdog, *args: Any) -> float:
        started = trio.current_time()
        found = await original(self, *args)
        instants.append(started)
        return found

    patch.setattr(kind, "run_once", run_once)
    return instants
