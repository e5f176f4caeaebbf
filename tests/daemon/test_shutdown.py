"""The stop sequence step by step, at exact instants on a clock that jumps whenever everybody waits (R9)."""

# ruff: noqa: ARG001 - pytest-trio looks for a clock only among the test's own arguments, used or not

import math
import signal
from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import pytest
import trio
from attrs import Factory, define
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from trio.testing import MockClock

from armcore_trio import daemon, logs
from armcore_trio.borders.bus import Received
from armcore_trio.errors import Dependency, DependencyDown
from armcore_trio.exchange.books import books
from armcore_trio.exchange.inbox import Inbox, Pending
from armcore_trio.settings import Settings, load
from armcore_trio.shutdown import Shutdown, log_complete
from armcore_trio.supervision.status import State, Status
from armcore_trio.supervision.supervisor import ChildSpec, Stop, Supervisor
from tests.support import envelopes
from tests.support.database import JobIds
from tests.support.records import Records

PASSES = ("publisher", "watchdog")
SUBSCRIBER = ("subscriber.apply", "subscriber.intake")
STEPS = ["passes", "inbox", "connections", "health"]
NEVER = math.inf


def instant(seconds: float) -> Any:
    """An instant of the virtual clock; only the rounding of its own sums is forgiven."""
    return pytest.approx(seconds, abs=1e-6)


def pending(job_id: UUID | None = None, msg_id: str | None = "m") -> Pending:
    """A received result; without a job, one that cannot be read."""
    data = b"{" if job_id is None else str(envelopes.done(JobIds(job_id, job_id))).replace("'", '"').encode()
    return Pending(Received(data, msg_id), 10_000)


@define
class World:
    """Stand-ins for the daemon's children; `story` is what befell them, with its instant.

    Each takes its `seconds` to end once asked: the intake to leave its group, with `under_way` messages yet to come,
    the application for each message. `NEVER` is one that hangs.
    """

    supervisor: Supervisor
    status: Status = Factory(lambda: Status({}, "1", enabled=True))
    inbox: Inbox = Factory(lambda: Inbox(100))
    story: list[tuple[float, str]] = Factory(list)
    seconds: dict[str, float] = Factory(dict)
    under_way: int = 0

    def start(self, *names: str, **runs: Callable[..., Any]) -> None:
        """Start these children, each under its own name; `runs` are to replace a stand-in."""
        self.status.kept = books(self.inbox)
        special = {"subscriber.apply": self._apply, "subscriber.intake": self._receive}
        for name in names or (*PASSES, *SUBSCRIBER, "health"):
            run = runs.get(name) or special.get(name, self._finish)

            async def start(stop: Stop, *, task_status: Any, run: Any = run, name: str = name) -> None:
                task_status.started()
                try:
                    await run(name, stop)
                except trio.Cancelled:
                    self.tell(name, "cut")
                    raise
                self.tell(name, "ended")

            self.supervisor.start(ChildSpec(name, start), self.status.add(name))

    def tell(self, name: str, what: str) -> None:
        self.story.append((round(trio.current_time(), 6), f"{name} {what}"))

    def put(self, *messages: Pending) -> None:
        """Messages that the intake has received."""
        for message in messages:
            self.status.tasks["subscriber.intake"].totals["received"] += 1
            assert self.inbox.put(message)

    async def stop(self, grace_seconds: float = 20) -> float:
        """Run the sequence; the seconds it took."""
        started = trio.current_time()
        await Shutdown(self.supervisor, self.status, self.inbox, grace_seconds).run("SIGTERM")
        return trio.current_time() - started

    async def _finish(self, name: str, stop: Stop) -> None:
        with stop.interrupts():
            await trio.sleep_forever()
        self.tell(name, "asked")
        await trio.sleep(self.seconds.get(name, 0))

    async def _receive(self, name: str, stop: Stop) -> None:
        with self.inbox.receiving():
            await self._finish(name, stop)
            self.put(*(pending(uuid4()) for _ in range(self.under_way)))
        await self.inbox.wait_settled()

    async def _apply(self, name: str, stop: Stop) -> None:
        while not stop.requested:
            with stop.interrupts():
                await self.inbox.wait_filled()
            for _ in self.inbox.front(1):
                await trio.sleep(self.seconds.get(name, 0))
                self.inbox.drop(1)
                self.status.tasks[name].totals["applied"] += 1


@pytest.fixture
async def world(autojump_clock: MockClock, nursery: trio.Nursery, log: Records) -> World:
    assert trio.lowlevel.current_clock() is autojump_clock, "the test itself must name the clock"
    return World(Supervisor(nursery))


def steps(log: Records) -> dict[str, tuple[float, bool]]:
    """What the log says of each step, in order: seconds, and whether it finished by itself."""
    found = log.named("shutdown.step")
    assert {(record["finished"], record["log_level"]) for record in found} <= {(True, "info"), (False, "warning")}
    return {record["step"]: (record["seconds"], record["finished"]) for record in found}


# --- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.req("R9")
async def test_each_step_begins_when_the_one_before_has_ended(world: World, autojump_clock: MockClock, log: Records) -> None:
    world.seconds = {"publisher": 1, "watchdog": 2, "subscriber.intake": 3, "subscriber.apply": 0.5, "health": 1.5}
    world.under_way = 2
    world.start()
    await trio.sleep(10)
    assert await world.stop() == instant(7.5)
    told = [(at - 10, what) for at, what in world.story]
    assert sorted(told[:2]) == [(0, f"{name} asked") for name in PASSES]
    assert told[2:6] == [
        (1, "publisher ended"),
        (2, "watchdog ended"),
        (2, "subscriber.intake asked"),
        (6, "subscriber.intake ended"),  # 3 s to leave, and all that was under way applied
    ]
    assert told[6:] == [(6, "subscriber.apply ended"), (6, "health asked"), (7.5, "health ended")]
    assert list(steps(log)) == STEPS
    assert steps(log) == {"passes": (2, True), "inbox": (4, True), "connections": (0, True), "health": (1.5, True)}
    assert log.all[0] == {"event": "shutdown.started", "log_level": "info", "signal": "SIGTERM", "grace_seconds": 20}
    assert (
        world.status.books()["subscriber"] | {"received": 2, "applied": 2, "difference": 0} == world.status.books()["subscriber"]
    )


@pytest.mark.req("R9", "B40")
async def test_health_says_stopping_from_the_signal_until_it_goes_last(world: World, autojump_clock: MockClock) -> None:
    world.seconds = {"publisher": 2, "subscriber.intake": 2, "health": 1}
    world.start()
    await trio.sleep(1)
    seen: list[tuple[float, str, str]] = []

    async def watch() -> None:
        while True:
            report = world.status.report(database_answers=True)
            seen.append((trio.current_time(), report["status"], report["tasks"]["health"]["state"]))
            await trio.sleep(0.4)

    async with trio.open_nursery() as nursery:
        await nursery.start(_started, watch)
        await world.stop()
        nursery.cancel_scope.cancel()
    assert seen[0] == (1, "ok", "running")
    assert seen[1:] == [(instant(1 + 0.4 * n), "stopping", "running") for n in range(1, 13)], "it goes at 6 s"


async def _started(run: Callable[[], Any], *, task_status: Any) -> None:
    """Run something that has begun once `nursery.start` returns."""
    task_status.started()
    await run()


@pytest.mark.req("R9", "B04")
async def test_with_nothing_to_finish_it_takes_no_time(world: World, autojump_clock: MockClock, log: Records) -> None:
    world.start()
    await trio.sleep(1)
    assert await world.stop() == 0
    assert steps(log) == dict.fromkeys(STEPS, (0, True))
    assert {task.state for task in world.status.tasks.values()} == {State.STOPPED}


@pytest.mark.req("S6.3", "R9")
async def test_with_the_exchange_disabled_only_health_is_stopped(world: World, autojump_clock: MockClock, log: Records) -> None:
    world.start("health")
    await trio.sleep(1)
    assert await world.stop() == 0
    assert [what for _, what in world.story] == ["health asked", "health ended"]
    assert steps(log) == dict.fromkeys(STEPS, (0, True))


# --- bounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.req("R9")
@pytest.mark.parametrize(("hanging", "took", "expected"), [
    ({"publisher"}, 8.25, {"passes": (8.25, False), "inbox": (0, True), "connections": (0, True), "health": (0, True)}),
    ({"watchdog"}, 8.25, {"passes": (8.25, False), "inbox": (0, True), "connections": (0, True), "health": (0, True)}),
    ({"subscriber.intake"}, 17, {"passes": (0, True), "inbox": (16.5, False), "connections": (0.5, False), "health": (0, True)}),
    ({"health"}, 3, {"passes": (0, True), "inbox": (0, True), "connections": (0, True), "health": (3, False)}),
    (
        {*PASSES, *SUBSCRIBER, "health"},
        20,
        {"passes": (8.25, False), "inbox": (8.25, False), "connections": (0.5, False), "health": (3, False)},
    ),
])  # fmt: skip
async def test_a_child_that_hangs_is_cut_at_its_steps_bound_and_the_others_finish(
    world: World,
    autojump_clock: MockClock,
    log: Records,
    hanging: set[str],
    took: float,
    expected: dict[str, tuple[float, bool]],
) -> None:
    world.seconds = dict.fromkeys(hanging, NEVER)
    world.start()
    await trio.sleep(1)
    assert await world.stop(20) == instant(took)
    assert steps(log) == {step: (instant(seconds), finished) for step, (seconds, finished) in expected.items()}
    cut = {what.removesuffix(" cut") for _, what in world.story if what.endswith("cut")}
    assert cut ^ hanging <= {"subscriber.apply"}, "which has nothing to apply, and no time either once that is up"
    assert {task.state for task in world.status.tasks.values()} == {State.STOPPED}


@pytest.mark.req("R9")
async def test_what_the_passes_left_of_their_time_is_the_inboxs(world: World, autojump_clock: MockClock, log: Records) -> None:
    world.seconds = {"publisher": 8, "subscriber.apply": 8}
    world.start()
    await trio.sleep(1)
    world.put(pending(uuid4()))
    assert await world.stop(20) == 8, "both at once"
    assert steps(log)["inbox"] == (0, True)


@pytest.mark.req("R9")
@pytest.mark.parametrize("grace_seconds", [0.01, 0.5, 1, 2, 4, 5, 6, 20, 600])
async def test_all_steps_together_keep_the_grace_even_if_every_child_hangs(
    world: World, autojump_clock: MockClock, log: Records, grace_seconds: float
) -> None:
    log.claim("inbox.abandoned")
    world.seconds = dict.fromkeys((*PASSES, *SUBSCRIBER, "health"), NEVER)
    world.start()
    world.put(pending(uuid4()))
    await trio.sleep(1)
    assert await world.stop(grace_seconds) <= grace_seconds + 1e-9
    assert list(steps(log)) == STEPS


DURATIONS = st.one_of(st.just(0.0), st.floats(0, 30), st.just(NEVER))


@pytest.mark.req("R9")
@given(
    grace_seconds=st.floats(5, 60),
    seconds=st.dictionaries(st.sampled_from([*PASSES, *SUBSCRIBER, "health"]), DURATIONS),
    received=st.integers(0, 5),
    under_way=st.integers(0, 5),
)
@hypothesis_settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_the_children_do_the_grace_is_kept_and_every_message_accounted_for(
    grace_seconds: float, seconds: dict[str, float], received: int, under_way: int
) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            world = World(Supervisor(nursery), seconds=seconds, under_way=under_way)
            world.start()
            await trio.testing.wait_all_tasks_blocked()
            world.put(*(pending(uuid4()) for _ in range(received)))
            assert await world.stop(grace_seconds) <= grace_seconds + 1e-9 + 1e-6
            assert {task.state for task in world.status.tasks.values()} == {State.STOPPED}
            book = world.status.books()["subscriber"]
            assert (book["difference"], book["waiting"]) == (0, 0)
            abandoned = [record for record in records if record["event"] == "inbox.abandoned"]
            assert len(abandoned) == book["abandoned"]
            told = [(record["step"], record["finished"]) for record in records if record["event"] == "shutdown.step"]
            assert [step for step, _ in told] == STEPS
            if book["abandoned"]:
                assert ("inbox", False) in told

    with capture_logs() as records:
        trio.run(main, clock=MockClock(autojump_threshold=0))


# --- what had to be given up ------------------------------------------------------------------------------------------


@pytest.mark.req("R9", "D4.7")
async def test_what_could_not_be_applied_is_listed_one_by_one(world: World, autojump_clock: MockClock, log: Records) -> None:
    log.claim("inbox.abandoned")
    world.seconds = {"subscriber.apply": 6}
    world.start()
    jobs = [uuid4() for _ in range(4)]
    world.put(*(pending(job, f"result:{job}:1") for job in jobs), pending(None, None))
    assert await world.stop(20) == instant(17)
    applied = 2
    abandoned = log.named("inbox.abandoned")
    ids: list[tuple[str | None, str | None]] = [(str(job), f"result:{job}:1") for job in jobs[applied:]]
    assert [(record["job_id"], record["msg_id"]) for record in abandoned] == [*ids, (None, None)]
    assert {record["error"] for record in abandoned} == {"the stop came before it could be applied"}
    assert len(world.inbox) == 0
    assert steps(log)["inbox"] == (16.5, False)
    log_complete(world.status, seconds=17, exit_code=0)
    complete = log.one("shutdown.complete")
    book = complete["books"]["subscriber"]
    assert (book["received"], book["applied"], book["abandoned"], book["difference"]) == (5, 2, 3, 0)
    assert complete["totals"]["subscriber"]["abandoned"] == 3
    assert (complete["seconds"], complete["exit_code"]) == (17, 0)
    assert [record["event"] for record in log.all].index("inbox.abandoned") > [record.get("step") for record in log.all].index(
        "connections"
    )


@pytest.mark.req("R9", "B14")
async def test_an_application_that_backs_off_leaves_its_messages_to_be_listed(
    world: World, autojump_clock: MockClock, log: Records
) -> None:
    async def away(_: str, __: Stop) -> None:
        raise DependencyDown(Dependency.DATABASE, "frozen")

    log.claim("inbox.abandoned")
    world.start(**{"subscriber.apply": away})
    world.put(pending(uuid4()))
    await trio.sleep(60)
    assert await world.stop(10) == instant(7.5)
    assert steps(log) == {"passes": (0, True), "inbox": (7, False), "connections": (0.5, False), "health": (0, True)}
    assert len(log.named("inbox.abandoned")) == 1


@pytest.mark.req("R9")
@pytest.mark.parametrize(("task", "totals"), [
    ("subscriber.intake", {"received": 3, "abandoned": 2}),
    ("subscriber.intake", {"received": 3, "abandoned": 4}),
    ("publisher", {"taken": 3, "confirmed": 1, "failed": 1}),
])  # fmt: skip
async def test_books_that_do_not_balance_are_an_error(
    world: World, autojump_clock: MockClock, log: Records, task: str, totals: dict[str, int]
) -> None:
    log.claim("shutdown.books_do_not_balance")
    world.start()
    world.status.tasks[task].totals.update(totals)
    log_complete(world.status, seconds=1.23456, exit_code=0)
    error, complete = log.all
    assert (error["event"], error["log_level"]) == ("shutdown.books_do_not_balance", "error")
    assert error["books"] == complete["books"] == world.status.books()
    assert [name for name, book in complete["books"].items() if book["difference"]] == [task.partition(".")[0]]
    assert (complete["event"], complete["log_level"], complete["seconds"]) == ("shutdown.complete", "info", 1.235)


# --- the daemon around it ---------------------------------------------------------------------------------------------


@define
class Daemon:
    """`daemon.run` with stand-ins for its children."""

    world: World
    settings: Settings

    def signal_at(self, nursery: trio.Nursery, *instants: float, number: signal.Signals = signal.SIGTERM) -> None:
        async def send() -> None:
            for at in instants:
                await trio.sleep_until(at)
                signal.raise_signal(number)

        nursery.start_soon(send)

    async def run(self) -> int:
        return await daemon.run(self.settings)


@pytest.fixture
def stood_in(world: World, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Daemon]:
    """Makes a daemon with these children in place of its own."""

    def make(**runs: Callable[..., Any]) -> Daemon:
        def start_children(supervisor: Supervisor, _: Settings, status: Status, inbox: Inbox, **__: object) -> None:
            world.supervisor, world.status, world.inbox = supervisor, status, inbox
            world.start(*(*PASSES, *SUBSCRIBER, "health"), **runs)

        monkeypatch.setattr(daemon, "_start_children", start_children)
        return Daemon(world, load({"NATS_ENABLED": "false"}))

    return make


async def crashing(_: str, __: Stop) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_fail, ValueError("the first\ncause"))
        nursery.start_soon(_fail, DependencyDown(Dependency.NATS, "the second cause"))


async def _fail(error: Exception) -> None:
    raise error


@pytest.mark.req("D9.2", "B41")
async def test_a_child_that_always_crashes_is_exit_70_with_its_causes_in_one_line(
    stood_in: Callable[..., Daemon], autojump_clock: MockClock, log: Records
) -> None:
    log.claim("task.restarting", "supervisor.gave_up")
    under_test = stood_in(watchdog=crashing)
    assert await under_test.run() == 70
    assert 15.5 * 0.8 < trio.current_time() < 15.5 * 1.2
    assert len(log.named("task.restarting", task="watchdog")) == 5
    gave_up = log.one("supervisor.gave_up")
    assert (gave_up["log_level"], gave_up["task"], gave_up["crashes"]) == ("critical", "watchdog", 6)
    line = logs._flatten_exception(None, "", dict(gave_up))
    assert set(line["error"].split(" | ")) == {"ValueError: the first cause", "nats: the second cause"}
    assert any("_fail" in place for place in line["traceback"])
    assert all("\n" not in place for place in line["traceback"])
    assert [record["event"] for record in log.all[-6:]] == ["shutdown.started", *["shutdown.step"] * 4, "shutdown.complete"]
    assert log.one("shutdown.started")["signal"] is None
    assert steps(log) == dict.fromkeys(STEPS, (0, True)), "the siblings are stopped in order"
    assert log.one("shutdown.complete")["exit_code"] == 70
    assert log.one("shutdown.complete")["totals"]["watchdog"] == {"restarts": 5}


@pytest.mark.req("R9", "B37")
@pytest.mark.parametrize(("signals", "exit_code", "took"), [(0, 70, 5), (1, 70, 5), (2, 128 + signal.SIGTERM, 2)])
async def test_after_giving_up_the_first_signal_is_no_second_one(
    stood_in: Callable[..., Daemon],
    autojump_clock: MockClock,
    log: Records,
    nursery: trio.Nursery,
    signals: int,
    exit_code: int,
    took: float,
) -> None:
    log.claim("task.restarting", "supervisor.gave_up")
    under_test = stood_in(watchdog=crashing)
    under_test.world.seconds = {"publisher": 5}
    gave_up_at: list[float] = []

    async def send() -> None:
        await under_test.world.supervisor.gave_up.wait()
        gave_up_at.append(trio.current_time())
        under_test.signal_at(nursery, *(trio.current_time() + n for n in range(1, signals + 1)))

    async def begin() -> None:
        await trio.sleep(1)
        await send()

    nursery.start_soon(begin)
    assert await under_test.run() == exit_code
    assert trio.current_time() - gave_up_at[0] == instant(took)
    assert len(log.named("shutdown.hurried")) == (signals == 2)
    assert log.one("shutdown.complete")["exit_code"] == exit_code
    assert under_test.world.story[-1][1].endswith("cut" if signals == 2 else "health ended")


@pytest.mark.req("R9", "B37")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("at", [0.001, 30])
async def test_a_signal_is_exit_0(
    stood_in: Callable[..., Daemon],
    autojump_clock: MockClock,
    log: Records,
    nursery: trio.Nursery,
    number: signal.Signals,
    at: float,
) -> None:
    under_test = stood_in()
    under_test.signal_at(nursery, at, number=number)
    assert await under_test.run() == 0
    assert trio.current_time() == instant(at)
    assert log.one("shutdown.started")["signal"] == number.name
    assert steps(log) == dict.fromkeys(STEPS, (0, True))
    assert log.all[-1]["event"] == "shutdown.complete"


@pytest.mark.req("R9", "B37")
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_it_in_that_instant_and_what_is_left_is_in_the_books(
    stood_in: Callable[..., Daemon], autojump_clock: MockClock, log: Records, nursery: trio.Nursery, second: signal.Signals
) -> None:
    log.claim("inbox.abandoned")
    under_test = stood_in()
    under_test.world.seconds = {"subscriber.apply": NEVER}

    async def receive() -> None:
        await trio.sleep(1)
        under_test.world.put(pending(uuid4()), pending(uuid4()))

    nursery.start_soon(receive)
    under_test.signal_at(nursery, 30)
    under_test.signal_at(nursery, 33, number=second)
    assert await under_test.run() == 128 + second
    assert trio.current_time() == instant(33)
    assert log.one("shutdown.hurried")["signal"] == second.name
    complete = log.one("shutdown.complete")
    assert (complete["exit_code"], complete["seconds"]) == (128 + second, instant(33))
    book = complete["books"]["subscriber"]
    assert (book["received"], book["abandoned"] + book["waiting"], book["difference"]) == (2, 2, 0)


@pytest.mark.req("R9", "D4.7")
async def test_what_a_second_signal_gave_up_is_listed_as_well(
    stood_in: Callable[..., Daemon], autojump_clock: MockClock, log: Records, nursery: trio.Nursery
) -> None:
    log.claim("inbox.abandoned")
    under_test = stood_in()
    under_test.world.seconds = {"subscriber.apply": NEVER}
    jobs = [uuid4(), uuid4()]

    async def receive() -> None:
        await trio.sleep(1)
        under_test.world.put(*(pending(job, f"result:{job}:1") for job in jobs))

    nursery.start_soon(receive)
    under_test.signal_at(nursery, 30, 33)
    assert await under_test.run() == 128 + signal.SIGTERM
    abandoned = [(record["job_id"], record["msg_id"]) for record in log.named("inbox.abandoned")]
    assert abandoned == [(str(job), f"result:{job}:1") for job in jobs]
    book = log.one("shutdown.complete")["books"]["subscriber"]
    assert (book["received"], book["abandoned"], book["waiting"], book["difference"]) == (2, 2, 0, 0)
