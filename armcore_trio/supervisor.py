"""One nursery of children that are restarted by policy and stopped in two phases. Mechanism only: it knows no child.

A child is a coroutine function `start(stop, task_status=…)`. It calls `task_status.started()` once its set-up has worked,
then runs until `stop` is requested. Returning before that is a failure like any other. `DependencyDown`, alone or in a
group of nothing else, is waited out for ever; `Unrecoverable` ends everything; any other failure counts against the
restart intensity. A stop works in every phase: during a start it cancels the attempt, during back-off the wait.
"""

import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum

import trio
from attrs import Factory, define, frozen

from armcore_trio import logs
from armcore_trio.errors import DependencyDown, Unrecoverable, describe, leaves
from armcore_trio.status import State, TaskStatus


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


@frozen
class RestartPolicy:
    """When and whether to try again (D9.2). Seconds throughout; `jitter` is the share by which a delay may differ."""

    base_seconds: float = 0.5
    factor: float = 2.0
    cap_seconds: float = 10.0
    jitter: float = 0.2
    intensity: int = 5
    period_seconds: float = 60.0
    healthy_seconds: float = 10.0
    """A child that ran this long starts its back-off from the base again."""

    def delay(self, failures: int, source: random.Random) -> float:
        """The wait after so many failures in a row (1 for the first)."""
        plain = min(self.cap_seconds, self.base_seconds * self.factor ** min(failures - 1, 64))
        return plain * (1 + self.jitter * (2 * source.random() - 1))

    def exhausted(self, crashes: Sequence[float], now: float) -> bool:
        """Whether crashes (instants, oldest first) exceed what is tolerated within the period before now."""
        return sum(instant > now - self.period_seconds for instant in crashes) > self.intensity


@frozen
class ChildSpec:
    """What to run, under which name, restarted how."""

    name: str
    start: Start
    policy: RestartPolicy = RestartPolicy()


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


class ReturnedEarly(Exception):
    """A child returned although nobody had asked it to stop."""


@define(eq=False)
class _Child:
    spec: ChildSpec
    status: TaskStatus
    stop: Stop = Factory(Stop)
    scope: trio.CancelScope = Factory(trio.CancelScope)
    ended: trio.Event = Factory(trio.Event)
    crashes: deque[float] = Factory(lambda: deque(maxlen=1000))
    failures: int = 0
    running_since: float | None = None
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
        child = self._children[spec.name] = _Child(spec, status)
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
            child.status.state = State.FAILED if child.status.state is State.FAILED else State.STOPPED
            child.ended.set()

    async def _attempt(self, child: _Child) -> BaseException | None:
        """Run the child once. Returns why it failed, or None if it stopped as asked."""
        child.status.state, child.running_since = State.STARTING, None
        failure: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                with child.stop.interrupts():
                    await nursery.start(child.spec.start, child.stop, name=child.spec.name)
                    self._started(child)
        except* Exception as group:  # noqa: BLE001 - whatever it is, the policy decides
            failure = group
        if failure is None and not child.stop.requested:
            return ReturnedEarly("returned without having been asked to stop")
        return failure

    def _started(self, child: _Child) -> None:
        child.running_since = trio.current_time()
        child.status.running()
        if child.down_since is not None:
            outage_seconds = round(child.running_since - child.down_since, 3)
            logs.get(task=child.spec.name).info("task.recovered", outage_seconds=outage_seconds, attempts=child.failures)
        child.down_since = child.logged = None

    async def _survive(self, child: _Child, failure: BaseException) -> bool:
        """Wait before the next attempt. Returns False if there shall be none."""
        log, now, policy = logs.get(task=child.spec.name), trio.current_time(), child.spec.policy
        if child.stop.requested:
            log.warning("task.failed_while_stopping", error=describe(failure))
            return False
        child.status.failed(failure)
        kind = classify(failure)
        if kind is Kind.CRASH:
            child.crashes.append(now)
        if kind is Kind.FATAL or policy.exhausted(child.crashes, now):
            self._give_up(child, failure, kind)
            return False
        if child.running_since is not None and now - child.running_since >= policy.healthy_seconds:
            child.failures = 0
        child.failures += 1
        child.down_since = now if child.down_since is None else child.down_since
        delay = policy.delay(child.failures, self._random)
        error = describe(failure)
        if kind is Kind.CRASH:
            log.error("task.restarting", exc_info=failure, restarts=child.status.restarts, delay_seconds=round(delay, 3))
        elif error != child.logged:
            log.warning("task.restarting", error=error, restarts=child.status.restarts, delay_seconds=round(delay, 3))
        child.logged = error
        with child.stop.interrupts():
            await trio.sleep(delay)
        return True

    def _give_up(self, child: _Child, failure: BaseException, kind: Kind) -> None:
        child.status.state = State.FAILED
        if self.failure is None:
            self.failure = failure
            told = {"error": describe(failure)} if kind is Kind.FATAL else {"exc_info": failure, "crashes": len(child.crashes)}
            logs.get(task=child.spec.name).critical("supervisor.gave_up", **told)
        self.gave_up.set()
