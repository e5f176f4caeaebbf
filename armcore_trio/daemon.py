"""The daemon: one nursery in which publisher, subscriber, watchdog and health server run side by side (R9).

The only place where all parts meet. It builds the children, waits for a signal or for the supervisor to give up, then
runs the stop sequence.
"""

import gc
import signal
from collections.abc import AsyncIterator

import trio

from armcore_trio import __version__, logs
from armcore_trio.borders.fitness import SCHEMA_VERSION
from armcore_trio.borders.store import Store
from armcore_trio.errors import Dependency, SchemaUnfit, Unrecoverable, WriteRefused, leaves
from armcore_trio.exchange.books import books
from armcore_trio.exchange.inbox import Inbox
from armcore_trio.exchange.publisher import Publisher
from armcore_trio.exchange.subscriber import Application, Intake
from armcore_trio.exchange.watchdog import Watchdog
from armcore_trio.observation.health import HealthServer
from armcore_trio.observation.probe import DatabaseProbe
from armcore_trio.settings import Settings
from armcore_trio.shutdown import Shutdown, abandon_rest, log_complete
from armcore_trio.signals import stop_signals, wait_hurry
from armcore_trio.supervision.status import Status, TaskStatus
from armcore_trio.supervision.supervisor import ChildSpec, Mode, RestartPolicy, Stop, Supervisor

_GAVE_UP = 70
_FLUSH_SECONDS, _LEAST_FLUSH_SECONDS = 2.0, 0.1
"""For the last records, of what is left of the grace."""
GC_THRESHOLD = 10_000
"""Messages are thousands of objects and no cycles: looking for those every 700 objects costs a tenth of the time under load."""


async def run(settings: Settings, *, migrate: bool = False) -> int:
    """Run until a signal or until nothing more can be done; returns the exit code.

    0 after a signal; 128 + signal if a second one cut the stop short; 69 if the schema is missing or too old; 70 if the
    supervisor gave up.
    """
    log = logs.get()
    gc.set_threshold(GC_THRESHOLD)
    with trio.open_signal_receiver(*stop_signals()) as signals:
        started = trio.current_time()
        inbox = Inbox(settings.inbox_buffer_messages)
        status = Status(settings.subjects, __version__, settings.nats_enabled, kept=books(inbox))
        log.info("daemon.started", version=__version__, nats_enabled=settings.nats_enabled, subjects=settings.subjects)
        hurried: list[int] = []
        async with trio.open_nursery() as nursery:
            supervisor = Supervisor(nursery)
            _start_children(supervisor, settings, status, inbox, migrate=migrate)
            signal_name = await _wait_for_end(signals, supervisor)
            end = trio.current_time() + settings.shutdown_grace_seconds
            nursery.start_soon(_hurry, signals, signal_name, hurried, nursery.cancel_scope)
            await Shutdown(supervisor, status, inbox, settings.shutdown_grace_seconds).run(signal_name)
            nursery.cancel_scope.cancel()
        await _forget(signals)
        exit_code = 128 + hurried[0] if hurried else _exit_code(supervisor.failure)
        abandon_rest(inbox, status)  # a second signal may have cut the stop short
        log_complete(status, seconds=trio.current_time() - started, exit_code=exit_code)
        logs.flush(min(_FLUSH_SECONDS, max(_LEAST_FLUSH_SECONDS, end - trio.current_time())))
    return exit_code


def _start_children(supervisor: Supervisor, settings: Settings, status: Status, inbox: Inbox, *, migrate: bool) -> None:
    dsn = settings.postgres_dsn.reveal() if settings.postgres_dsn else None
    health = HealthServer(settings.health_bind, status, DatabaseProbe(dsn, status) if dsn and settings.nats_enabled else None)
    supervisor.start(ChildSpec("health", health.run), status.add("health"))
    upgrade = _Upgrade(dsn) if dsn and migrate else None
    if not settings.nats_enabled:
        if upgrade is not None:  # with nobody to find the schema too old
            supervisor.start(ChildSpec("migration", upgrade.run, RestartPolicy(Mode.TRANSIENT)), TaskStatus())
        return
    assert dsn is not None, "the settings demand it"
    store = Store(dsn, upgrade)
    intake_status = status.add("subscriber.intake", {Dependency.NATS})
    apply_status = status.add("subscriber.apply", {Dependency.DATABASE})
    children: dict[str, Intake | Application | Publisher | Watchdog] = {
        "subscriber.intake": Intake(settings, inbox, intake_status),
        "subscriber.apply": Application(settings, store, inbox, apply_status),
        "publisher": Publisher(settings, store, status.add("publisher", Dependency), intake_status, inbox),
        "watchdog": Watchdog(
            settings, store, status.add("watchdog", {Dependency.DATABASE}), inbox, [intake_status, apply_status]
        ),
    }
    for name, child in children.items():
        supervisor.start(ChildSpec(name, child.run, heartbeat_seconds=child.heartbeat_seconds), child.status)


class _Upgrade:
    """Migrates once for all children that find the schema missing or too old (`run --migrate`), or by itself without any."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._lock = trio.Lock()
        self._done = False

    async def __call__(self) -> None:
        async with self._lock:
            if self._done:
                return
            from armcore_trio.borders.migrate import migrate  # noqa: PLC0415 - Alembic costs a start that needs none a third of a second

            try:
                before = await trio.to_thread.run_sync(migrate, self._dsn, abandon_on_cancel=True)
            except WriteRefused as refusal:
                raise SchemaUnfit(f"migration: {refusal}") from None
            if before != SCHEMA_VERSION:
                logs.get().info("migrate.done", revision_before=before, revision=SCHEMA_VERSION)
            self._done = True

    async def run(self, _: Stop, *, task_status: trio.TaskStatus[None]) -> None:
        """As a child of its own: tried until it has worked once."""
        task_status.started()
        await self()


async def _wait_for_end(signals: AsyncIterator[int], supervisor: Supervisor) -> str | None:
    """The name of the signal that asks for the stop; None if the supervisor gave up."""
    name: str | None = None

    async def first_signal(scope: trio.CancelScope) -> None:
        nonlocal name
        name = signal.Signals(await anext(signals)).name
        scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(first_signal, nursery.cancel_scope)
        await supervisor.gave_up.wait()
        nursery.cancel_scope.cancel()
    return name


async def _hurry(signals: AsyncIterator[int], signal_name: str | None, hurried: list[int], scope: trio.CancelScope) -> None:
    """The signal after the one that began the stop ends everything at once."""
    if signal_name is None:
        await anext(signals)
    hurried.append(await wait_hurry(signals))
    logs.get().warning("shutdown.hurried", signal=signal.Signals(hurried[0]).name)
    scope.cancel()


async def _forget(signals: AsyncIterator[int]) -> None:
    """Take the signals nobody has read: Trio would raise them again once it stops receiving."""
    with trio.move_on_after(0):
        async for _ in signals:
            pass


def _exit_code(failure: BaseException | None) -> int:
    if failure is None:
        return 0
    return next((leaf.exit_code for leaf in leaves(failure) if isinstance(leaf, Unrecoverable)), _GAVE_UP)
