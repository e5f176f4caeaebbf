"""One nursery of children that are restarted by policy and stopped in two phases. Mechanism only: it knows no child.

A child is a coroutine function `start(stop, task_status=…)`. It calls `task_status.started()` once its set-up has worked,
then runs until `stop` is requested. Returning before that is a failure like any other. `DependencyDown`, alone or in a
group of nothing else, is waited out for ever; `Unrecoverable` ends everything; any other failure counts against the
restart intensity. A stop works in every phase: during a start it cancels the attempt, during back-off the wait.
"""

import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from enum import Enum

import trio
from attrs import Factory, define, frozen

from armcore_trio import logs
from armcore_trio.errors import DependencyDown, Unrecoverable, describe, leaves
from armcore_trio.supervision.status import TaskStatus


class Stop:
    """A request to finish. The child says where it may be interrupted; everything else it completes."""

    def __init__(self) -> None:
        self.requested = False
        self._scopes: set[trio.CancelScope] = set()

    def request(self) -> None:
        """Ask. Asking twice changes nothing."""
        self.requested = True
        for scope in self._scopes:
            scope.cancel()

    @contextmanager
    def interrupts(self) -> Iterator[None]:
        """A block that the stop, now or later, cuts short at its next checkpoint."""
        with trio.CancelScope() as scope:
            self._scopes.add(scope)
            if self.requested:
                scope.cancel()
            try:
                yield
            finally:
                self._scopes.discard(scope)


Start = Callable[..., Awaitable[None]]


class Mode(Enum):
    """Whether a child that returns by itself has failed (permanent) or is done (transient)."""

    PERMANENT = "permanent"
    TRANSIENT = "transient"


class Kind(Enum):
    """How a failure is treated."""

    DEPENDENCY = "dependency"
    CRASH = "crash"
    FATAL = "fatal"


def classify(error: BaseException) -> Kind:
    """A group counts as its worst member."""
    causes = list(leaves(error))
    if any(isinstance(cause, Unrecoverable) for cause in causes):
        return Kind.FATAL
    return Kind.DEPENDENCY if all(isinstance(cause, DependencyDown) for cause in causes) else Kind.CRASH


@frozen
class History:
    """What a policy knows of a child: how often it has failed in a row, and when it last crashed (oldest first)."""

    failures: int = 0
    crashes: tuple[float, ...] = ()
    fatal: bool = False


@frozen
class RestartPolicy:
    """When and whether to try again (D9.2): pure functions of history, now and a source of randomness. Times in seconds."""

    mode: Mode = Mode.PERMANENT
    base_seconds: float = 0.5
    factor: float = 2.0
    cap_seconds: float = 10.0
    jitter: float = 0.2
    """The share by which a delay may differ from the plain one, either way."""
    intensity: int = 5
    period_seconds: float = 60.0
    """More than `intensity` crashes within this long are too many. A dependency that is down never counts."""
    healthy_seconds: float = 10.0
    """After having run this long, a child's back-off starts from the base again."""

    def record(self, history: History, kind: Kind, now: float, ran_seconds: float) -> History:
        """The history with one more failure, of a child that had been running for so long (0 if it never got ready)."""
        failures = 1 if ran_seconds >= self.healthy_seconds else history.failures + 1
        recent = tuple(instant for instant in history.crashes if instant > now - self.period_seconds)
        return History(failures, recent + ((now,) if kind is Kind.CRASH else ()), kind is Kind.FATAL)

    def decide(self, history: History, source: random.Random) -> float | None:
        """The wait before the next attempt; None if there shall be none."""
        if history.fatal or len(history.crashes) > self.intensity:
            return None
        plain = min(self.cap_seconds, self.base_seconds * self.factor ** min(history.failures - 1, 64))
        return plain * (1 + self.jitter * (2 * source.random() - 1))


@frozen
class ChildSpec:
    """What to run, under which name, restarted how."""

    name: str
    start: Start
    policy: RestartPolicy = RestartPolicy()
    heartbeat_seconds: float = float("inf")
    """The longest the child may go without `TaskStatus.beat()`; after that it counts as stalled."""


class ReturnedEarly(Exception):
    """A child returned although nobody had asked it to stop."""


@define(eq=False)
class _Child:
    spec: ChildSpec
    status: TaskStatus
    source: random.Random
    """Its own, so that the same seed gives each child the same waits in whatever order they fail."""
    stop: Stop = Factory(Stop)
    scope: trio.CancelScope = Factory(trio.CancelScope)
    ended: trio.Event = Factory(trio.Event)
    history: History = History()
    down_since: float | None = None
    logged: str | None = None


class Supervisor:
    """Runs children in the nursery it is given. `gave_up` is set, with `failure`, when one cannot be restarted any more."""

    def __init__(self, nursery: trio.Nursery, source: random.Random | None = None) -> None:
        self._nursery = nursery
        self._random = source or random.Random()
        self._children: dict[str, _Child] = {}
        self.gave_up = trio.Event()
        self.failure: BaseException | None = None

    def start(self, spec: ChildSpec, status: TaskStatus) -> None:
        """Begin to run a child; its progress is reported through `status`."""
        child = self._children[spec.name] = _Child(spec, status, random.Random(self._random.random()))
        self._nursery.start_soon(self._supervise, child, name=spec.name)

    def request_stop(self, name: str) -> None:
        """Ask a child to finish what it has begun, without waiting for it."""
        if child := self._children.get(name):
            child.stop.request()

    async def stop(self, name: str, seconds: float) -> bool:
        """Ask a child to finish, and cancel it after so many seconds. Returns whether it finished by itself."""
        child = self._children.get(name)
        if child is None:
            return True
        child.stop.request()
        with trio.move_on_after(seconds):
            await child.ended.wait()
        if child.ended.is_set():
            return True
        child.scope.cancel()
        with trio.CancelScope(shield=True):
            await child.ended.wait()
        return False

    async def _supervise(self, child: _Child) -> None:
        try:
            with child.scope:
                while not child.stop.requested:
                    failure = await self._attempt(child)
                    if failure is None or not await self._survive(child, failure):
                        break
        finally:
            child.status.ended()
            child.ended.set()

    async def _attempt(self, child: _Child) -> BaseException | None:
        """Run the child once. Returns why it failed, or None if it is done: stopped as asked, or transient and finished."""
        child.status.starting(child.spec.heartbeat_seconds)
        failure: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                with child.stop.interrupts():
                    await nursery.start(child.spec.start, child.stop, name=child.spec.name)
                    self._started(child)
        except* Exception as group:  # noqa: BLE001 - whatever it is, the policy decides
            if child.stop.requested:
                logs.get(task=child.spec.name).warning("task.failed_while_stopping", error=describe(group))
            else:
                failure = group
        if failure is None and not child.stop.requested and child.spec.policy.mode is Mode.PERMANENT:
            return ReturnedEarly("returned without having been asked to stop")
        return failure

    def _started(self, child: _Child) -> None:
        child.status.running()
        if child.down_since is not None:
            outage_seconds = round(trio.current_time() - child.down_since, 3)
            attempts = child.history.failures
            logs.get(task=child.spec.name).info("task.recovered", outage_seconds=outage_seconds, attempts=attempts)
        child.down_since = child.logged = None

    async def _survive(self, child: _Child, failure: BaseException) -> bool:
        """Wait before the next attempt. Returns False if there shall be none."""
        now, policy = trio.current_time(), child.spec.policy
        kind = classify(failure)
        child.history = policy.record(child.history, kind, now, child.status.running_seconds() or 0)
        delay_seconds = policy.decide(child.history, child.source)
        if delay_seconds is None:
            self._give_up(child, failure, kind)
            return False
        child.status.failed(failure)
        child.down_since = now if child.down_since is None else child.down_since
        self._log_restarting(child, failure, kind, delay_seconds)
        with child.stop.interrupts():
            await trio.sleep(delay_seconds)
        return True

    def _log_restarting(self, child: _Child, failure: BaseException, kind: Kind, delay_seconds: float) -> None:
        """A crash is told each time, an outage once for each cause."""
        error = describe(failure)
        if kind is Kind.CRASH or error != child.logged:
            told = {"exc_info": failure} if kind is Kind.CRASH else {"error": error}
            log = logs.get(task=child.spec.name, restarts=child.status.restarts, delay_seconds=round(delay_seconds, 3))
            (log.error if kind is Kind.CRASH else log.warning)("task.restarting", **told)
        child.logged = error

    def _give_up(self, child: _Child, failure: BaseException, kind: Kind) -> None:
        """End everything. Several children that find the same thing unrecoverable say so once."""
        child.status.gave_up(failure)
        if self.failure is None or kind is Kind.CRASH:
            told = {"error": describe(failure)} if kind is Kind.FATAL else {"exc_info": failure}
            logs.get(task=child.spec.name).critical("supervisor.gave_up", crashes=len(child.history.crashes), **told)
        self.failure = self.failure or failure
        self.gave_up.set()
