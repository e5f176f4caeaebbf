"""What the children report about themselves, and what `/healthcheck` and the log's last line make of it.

Plain state, written by one task and read by another within one thread: no locks, no I/O.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

import trio
from attrs import Factory, define

from armcore_trio.errors import Dependency, DependencyDown, describe, leaves


class State(StrEnum):
    """Where a supervised task is, from best to worst."""

    RUNNING = "running"
    STOPPED = "stopped"
    STARTING = "starting"
    BACKOFF = "backoff"
    FAILED = "failed"


_WORST_FIRST = list(reversed(State))


@define
class TaskStatus:
    """One supervised task as it is now."""

    needs: frozenset[Dependency] = frozenset()
    state: State = State.STARTING
    restarts: int = 0
    last_error: str | None = None
    missing: frozenset[Dependency] = Factory(lambda self: self.needs, takes_self=True)
    """What it needs and does not have, as far as it knows."""
    running_since: float | None = None
    totals: Counter[str] = Factory(Counter)

    def running(self) -> None:
        """The task works; all it needs is there."""
        self.state, self.missing, self.running_since = State.RUNNING, frozenset(), trio.current_time()

    def failed(self, error: BaseException) -> None:
        """The task ended with this and will be tried again."""
        down = frozenset(leaf.dependency for leaf in leaves(error) if isinstance(leaf, DependencyDown))
        self.state, self.missing, self.running_since = State.BACKOFF, down, None
        self.restarts, self.last_error = self.restarts + 1, describe(error)

    def running_seconds(self) -> float | None:
        """How long the task has been running without a break; None while it is not."""
        return None if self.running_since is None else trio.current_time() - self.running_since


@define
class Status:
    """The whole daemon as it is now. Task names with a dot are parts: `subscriber.intake` shows under `subscriber`."""

    subjects: Mapping[str, str]
    version: str
    enabled: bool
    tasks: dict[str, TaskStatus] = Factory(dict)
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

    def totals(self) -> dict[str, dict[str, int]]:
        """What each task has done since the start of the process."""
        return {
            name: dict(sum((part.totals for part in parts), Counter())) | {"restarts": sum(part.restarts for part in parts)}
            for name, parts in self._by_task().items()
        }

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
