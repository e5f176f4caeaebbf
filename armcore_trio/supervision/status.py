"""What the children report about themselves, and what `/healthcheck` and the log's last line make of it.

Plain state, written by one task and read by another within one thread: no locks, no I/O.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any

import trio
from attrs import Factory, define, frozen

from armcore_trio.errors import Dependency, DependencyDown, describe, leaves


class State(StrEnum):
    """Where a supervised task is, from best to worst."""

    RUNNING = "running"
    STOPPED = "stopped"
    STARTING = "starting"
    BACKOFF = "backoff"
    STALLED = "stalled"
    FAILED = "failed"


_WORST_FIRST = list(reversed(State))


@define
class TaskStatus:
    """One supervised task as it is now."""

    needs: frozenset[Dependency] = frozenset()
    restarts: int = 0
    last_error: str | None = None
    missing: frozenset[Dependency] = Factory(lambda self: self.needs, takes_self=True)
    """What it needs and does not have, as far as it knows."""
    totals: Counter[str] = Factory(Counter)
    _state: State = State.STARTING
    _running_since: float | None = None
    _last_beat: float = float("inf")
    _heartbeat_seconds: float = float("inf")

    @property
    def state(self) -> State:
        """Stalled if it is at work and has not given a sign for longer than it may. A start has limits of its own."""
        stalled = self._state is State.RUNNING and trio.current_time() - self._last_beat > self._heartbeat_seconds
        return State.STALLED if stalled else self._state

    def beat(self) -> None:
        """A sign of life, given by the task itself wherever it goes on."""
        self._last_beat = trio.current_time()

    def starting(self, heartbeat_seconds: float) -> None:
        """An attempt begins."""
        self._state, self._running_since, self._heartbeat_seconds = State.STARTING, None, heartbeat_seconds
        self.beat()

    def running(self) -> None:
        """The task works; all it needs is there."""
        self._state, self.missing, self._running_since = State.RUNNING, frozenset(), trio.current_time()
        self.beat()

    def failed(self, error: BaseException) -> None:
        """The task ended with this and will be tried again."""
        down = frozenset(leaf.dependency for leaf in leaves(error) if isinstance(leaf, DependencyDown))
        self._state, self.missing, self._running_since = State.BACKOFF, down, None
        self.restarts, self.last_error = self.restarts + 1, describe(error)

    def gave_up(self, error: BaseException) -> None:
        """The task ended with this and will not be tried again."""
        self._state, self._running_since, self.last_error = State.FAILED, None, describe(error)

    def ended(self) -> None:
        """Nothing more comes from this task."""
        self._state = State.FAILED if self._state is State.FAILED else State.STOPPED
        self._running_since = None

    def running_seconds(self) -> float | None:
        """How long the task has been running without a break; None while it is not."""
        return None if self._running_since is None else trio.current_time() - self._running_since


@frozen
class Book:
    """What came in must equal what became of it. Entries are totals of the task, save those in `now`, which are looked up."""

    entered: str
    accounted: tuple[str, ...]
    now: Mapping[str, Callable[[], int]] = Factory(dict)

    def read(self, totals: Mapping[str, int]) -> dict[str, int]:
        """The entries, and the `difference` that must be 0."""
        names = (self.entered, *self.accounted)
        entries = {name: self.now[name]() if name in self.now else totals.get(name, 0) for name in names}
        return entries | {"difference": entries[self.entered] - sum(entries[name] for name in self.accounted)}


@define
class Status:
    """The whole daemon as it is now. Task names with a dot are parts: `a.b` shows under `a`."""

    subjects: Mapping[str, str]
    version: str
    enabled: bool
    tasks: dict[str, TaskStatus] = Factory(dict)
    kept: Mapping[str, Book] = Factory(dict)
    """The book of each task that keeps one."""
    stopping: bool = False

    def add(self, name: str, needs: Iterable[Dependency] = ()) -> TaskStatus:
        """Make a task known before it starts."""
        task = self.tasks[name] = TaskStatus(frozenset(needs))
        return task

    def dependency(self, dependency: Dependency) -> str:
        """`ok` while every task that needs it has it, `down` while any lacks it, `off` when the exchange is disabled."""
        if not self.enabled:
            return "off"
        return "down" if any(dependency in task.missing for task in self.tasks.values()) else "ok"

    def waits_for(self, dependency: Dependency) -> bool:
        """Whether a task has failed for want of it and will try again."""
        return any(task.state is State.BACKOFF and dependency in task.missing for task in self.tasks.values())

    def report(self, *, database_answers: bool) -> dict[str, Any]:
        """The body of `/healthcheck`. `database_answers` is what a probe of this moment says."""
        dependencies = {dependency.value: self.dependency(dependency) for dependency in Dependency}
        if self.enabled and not database_answers:
            dependencies[Dependency.DATABASE] = "down"
        healthy = "down" not in dependencies.values() and all(task.state is State.RUNNING for task in self.tasks.values())
        return {
            "status": "stopping" if self.stopping else "ok" if healthy else "degraded",
            **dependencies,
            "subjects": dict(self.subjects),
            "tasks": {name: self._shown(parts) for name, parts in self._by_task().items()},
            "version": self.version,
        }

    def stalled(self) -> list[str]:
        """The tasks that hang, for `/livez`."""
        return [name for name, task in self.tasks.items() if task.state is State.STALLED]

    def totals(self) -> dict[str, dict[str, int]]:
        """What each task has done since the start of the process."""
        return {
            name: dict(sum((part.totals for part in parts), Counter())) | {"restarts": sum(part.restarts for part in parts)}
            for name, parts in self._by_task().items()
        }

    def books(self) -> dict[str, dict[str, int]]:
        """Per task with books, its entries; `difference` is 0 between any two steps of the daemon."""
        totals = self.totals()
        return {task: book.read(totals.get(task, {})) for task, book in self.kept.items()}

    def _by_task(self) -> dict[str, list[TaskStatus]]:
        grouped: dict[str, list[TaskStatus]] = {}
        for name, task in self.tasks.items():
            grouped.setdefault(name.partition(".")[0], []).append(task)
        return grouped

    @staticmethod
    def _shown(parts: list[TaskStatus]) -> dict[str, Any]:
        worst = min(parts, key=lambda part: _WORST_FIRST.index(part.state))
        return {
            "state": worst.state,
            "restarts": sum(part.restarts for part in parts),
            "last_error": worst.last_error or next((part.last_error for part in parts if part.last_error), None),
        }
