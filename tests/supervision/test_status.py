"""What children report becomes the words of `/healthcheck`, the totals of the last log line, and books that balance."""

from collections import Counter

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from armcore_trio.borders.bus import Received
from armcore_trio.errors import Dependency, DependencyDown
from armcore_trio.exchange.books import books
from armcore_trio.exchange.inbox import Inbox, Pending
from armcore_trio.supervision.status import Book, State, Status, TaskStatus

SUBJECTS = {"tabular_request": "a", "image_request": "b", "result": "c"}
NATS, DATABASE = Dependency.NATS, Dependency.DATABASE


def daemon(*, enabled: bool = True) -> Status:
    """A daemon whose tasks are known and have not started."""
    status = Status(SUBJECTS, "1.2.3", enabled, kept=books(Inbox(9)))
    status.add("health")
    if enabled:
        status.add("publisher", Dependency)
        status.add("watchdog", [DATABASE])
        status.add("subscriber.apply", [DATABASE])
        status.add("subscriber.intake", [NATS])
    return status


def running(*, enabled: bool = True) -> Status:
    status = daemon(enabled=enabled)
    for task in status.tasks.values():
        task.running()
    return status


def down(dependency: Dependency, reason: str = "refused") -> DependencyDown:
    return DependencyDown(dependency, reason)


def words(status: Status, *, database_answers: bool = True) -> tuple[str, str, str]:
    report = status.report(database_answers=database_answers)
    return report["status"], report["nats"], report["database"]


@pytest.mark.req("S7.1", "R9")
async def test_a_whole_report() -> None:
    assert running().report(database_answers=True) == {
        "status": "ok",
        "nats": "ok",
        "database": "ok",
        "subjects": SUBJECTS,
        "tasks": {
            "health": {"state": "running", "restarts": 0, "last_error": None},
            "publisher": {"state": "running", "restarts": 0, "last_error": None},
            "watchdog": {"state": "running", "restarts": 0, "last_error": None},
            "subscriber": {"state": "running", "restarts": 0, "last_error": None},
        },
        "version": "1.2.3",
    }


@pytest.mark.req("D9.1")
async def test_before_anything_has_started_nothing_is_ok() -> None:
    status = daemon()
    assert words(status) == ("degraded", "down", "down")
    assert status.report(database_answers=True)["tasks"]["subscriber"]["state"] == "starting"


@pytest.mark.req("S6.3")
async def test_with_the_exchange_disabled_both_are_off_and_all_is_well() -> None:
    assert words(running(enabled=False), database_answers=False) == ("ok", "off", "off")
    assert words(daemon(enabled=False), database_answers=False) == ("degraded", "off", "off")


@pytest.mark.req("B09", "B14", "B38")
@pytest.mark.parametrize(("task", "dependency", "expected"), [
    ("subscriber.intake", NATS, ("degraded", "down", "ok")),
    ("publisher", NATS, ("degraded", "down", "ok")),
    ("publisher", DATABASE, ("degraded", "ok", "down")),
    ("watchdog", DATABASE, ("degraded", "ok", "down")),
    ("subscriber.apply", DATABASE, ("degraded", "ok", "down")),
])  # fmt: skip
async def test_a_dependency_is_down_while_any_task_lacks_it(task: str, dependency: Dependency, expected: tuple[str, ...]) -> None:
    status = running()
    failed = status.tasks[task]
    failed.failed(down(dependency))
    assert words(status) == expected
    failed.starting(float("inf"))
    assert words(status) == expected
    failed.running()
    assert words(status) == ("ok", "ok", "ok")


@pytest.mark.req("B16")
async def test_a_group_names_all_that_is_down() -> None:
    status = running()
    status.tasks["publisher"].failed(ExceptionGroup("", [down(NATS), ExceptionGroup("", [down(DATABASE, "frozen"), down(NATS)])]))
    assert words(status) == ("degraded", "down", "down")
    assert status.tasks["publisher"].last_error == "nats: refused | database: frozen"


@pytest.mark.req("B14")
async def test_a_database_that_does_not_answer_is_down_whatever_the_tasks_think() -> None:
    assert words(running(), database_answers=False) == ("degraded", "ok", "down")


@pytest.mark.req("B34")
async def test_a_crash_degrades_without_blaming_a_dependency() -> None:
    status = running()
    status.tasks["watchdog"].failed(ValueError("x"))
    assert words(status) == ("degraded", "ok", "ok")
    assert status.report(database_answers=True)["tasks"]["watchdog"] == {
        "state": "backoff",
        "restarts": 1,
        "last_error": "ValueError: x",
    }


@pytest.mark.req("R9", "B40")
async def test_stopping_comes_before_everything() -> None:
    status = running()
    status.stopping = True
    assert words(status) == ("stopping", "ok", "ok")
    status.tasks["publisher"].failed(down(NATS))
    assert words(status) == ("stopping", "down", "ok")


@pytest.mark.req("R9")
async def test_a_task_of_several_parts_shows_its_worst() -> None:
    status = running()
    apply, intake = status.tasks["subscriber.apply"], status.tasks["subscriber.intake"]

    def shown() -> tuple[str, int, str | None]:
        task = status.report(database_answers=True)["tasks"]["subscriber"]
        return task["state"], task["restarts"], task["last_error"]

    apply.failed(down(DATABASE))
    assert shown() == ("backoff", 1, "database: refused")
    intake.failed(down(NATS))
    intake.starting(float("inf"))
    assert shown() == ("backoff", 2, "database: refused")
    apply.running()
    assert shown() == ("starting", 2, "nats: refused")
    intake.running()
    assert shown() == ("running", 2, "database: refused")
    intake.gave_up(ValueError("x"))
    apply.ended()
    assert shown() == ("failed", 2, "ValueError: x")


@pytest.mark.req("R9")
async def test_the_end_of_a_task_keeps_a_failure_in_sight() -> None:
    task = TaskStatus()
    task.running()
    task.ended()
    assert (task.state, task.running_seconds()) == (State.STOPPED, None)
    task.gave_up(ValueError("x"))
    task.ended()
    assert (task.state, task.running_seconds(), task.restarts) == (State.FAILED, None, 0)


def test_states_are_ordered_from_best_to_worst() -> None:
    assert list(State) == ["running", "stopped", "starting", "backoff", "stalled", "failed"]


@pytest.mark.req("D3.1")
async def test_running_seconds_begin_anew_with_each_run(autojump_clock: MockClock) -> None:
    assert trio.lowlevel.current_clock() is autojump_clock
    task = TaskStatus()
    assert task.running_seconds() is None
    task.running()
    await trio.sleep(5)
    assert task.running_seconds() == 5
    task.failed(down(NATS))
    assert task.running_seconds() is None
    await trio.sleep(5)
    task.starting(float("inf"))
    assert task.running_seconds() is None
    task.running()
    await trio.sleep(2)
    assert task.running_seconds() == 2


@pytest.mark.req("B34", "R9")
async def test_a_task_without_a_sign_of_life_is_stalled(autojump_clock: MockClock) -> None:
    assert trio.lowlevel.current_clock() is autojump_clock
    status = running()
    task = status.tasks["watchdog"]
    task.starting(4)
    task.running()
    await trio.sleep(4)
    assert status.stalled() == []
    await trio.sleep(1)
    assert status.stalled() == ["watchdog"]
    assert words(status) == ("degraded", "ok", "ok")
    task.beat()
    assert status.stalled() == []
    await trio.sleep(5)
    task.failed(ValueError())
    assert task.state is State.BACKOFF
    await trio.sleep(100)
    assert status.stalled() == []


@pytest.mark.req("R9")
async def test_totals_are_summed_over_the_parts_of_a_task() -> None:
    status = running()
    status.tasks["subscriber.apply"].totals.update({"applied": 3, "abandoned": 1})
    status.tasks["subscriber.intake"].totals.update({"received": 5, "abandoned": 2})
    status.tasks["subscriber.intake"].failed(down(NATS))
    assert status.totals() == {
        "health": {"restarts": 0},
        "publisher": {"restarts": 0},
        "watchdog": {"restarts": 0},
        "subscriber": {"applied": 3, "abandoned": 3, "received": 5, "restarts": 1},
    }


@pytest.mark.req("R9", "B04")
async def test_the_books_balance_or_tell_the_difference() -> None:
    status = running()
    inbox = Inbox(9)
    status.kept = books(inbox)
    for _ in range(2):
        inbox.put(Pending(Received(b""), 1_024))
    status.tasks["subscriber.apply"].totals.update({"applied": 3, "late": 1, "restarts": 9})
    status.tasks["subscriber.intake"].totals.update({"received": 7, "abandoned": 1})
    status.tasks["publisher"].totals.update({"taken": 4, "confirmed": 2, "refused": 1})
    subscriber = {
        "received": 7,
        "applied": 3,
        "duplicate": 0,
        "late": 1,
        "ignored": 0,
        "invalid": 0,
        "unknown": 0,
        "abandoned": 1,
        "waiting": 2,
    }
    assert status.books() == {
        "publisher": {"taken": 4, "confirmed": 2, "failed": 0, "refused": 1, "difference": 1},
        "subscriber": {**subscriber, "difference": 0},
    }


@pytest.mark.req("S6.3")
async def test_a_daemon_without_exchange_has_empty_books() -> None:
    assert {task: book["difference"] for task, book in running(enabled=False).books().items()} == {
        "publisher": 0,
        "subscriber": 0,
    }


@pytest.mark.req("R9")
@given(st.dictionaries(st.sampled_from(["in", "a", "b", "other"]), st.integers(0, 100)))
def test_a_book_counts_only_its_own_entries(totals: dict[str, int]) -> None:
    entries = Book("in", ("a", "b")).read(Counter(totals))
    assert list(entries) == ["in", "a", "b", "difference"]
    assert entries["difference"] == totals.get("in", 0) - totals.get("a", 0) - totals.get("b", 0)
