"""Restarts, giving up and stopping, at exact instants on a clock that jumps whenever everybody waits (R9, D9.2)."""

# ruff: noqa: ARG001 - pytest-trio looks for a clock only among the test's own arguments, used or not

import random
from collections.abc import Awaitable, Callable, Iterator
from itertools import accumulate, pairwise
from typing import Any

import pytest
import structlog
import trio
from attrs import Factory, define
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from armcore_trio.errors import Dependency, DependencyDown, SchemaOutdated, Unrecoverable
from armcore_trio.supervision.status import State, TaskStatus
from armcore_trio.supervision.supervisor import (
    ChildSpec,
    History,
    Kind,
    Mode,
    RestartPolicy,
    ReturnedEarly,
    Stop,
    Supervisor,
    classify,
)

RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
SEED = 7
Records = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def records() -> Iterator[Records]:
    """What was logged."""
    with structlog.testing.capture_logs() as captured:
        yield captured  # type: ignore[misc]


def events(records: Records, name: str) -> Records:
    return [record for record in records if record["event"] == name]


def instant(seconds: float) -> Any:
    """An instant of the virtual clock; only the rounding of its own sums is forgiven."""
    return pytest.approx(seconds, abs=1e-6)


def delays(seed: int = SEED, policy: RestartPolicy | None = None) -> Iterator[float]:
    """The waits after the first, second … failure in a row."""
    source, policy, failures = random.Random(random.Random(seed).random()), policy or RestartPolicy(), 0
    while True:
        failures += 1
        yield wait(policy, failures, source)


def wait(policy: RestartPolicy, failures: int, source: random.Random) -> float:
    """The wait after so many failures in a row, none of them a crash."""
    delay = policy.decide(History(failures), source)
    assert delay is not None
    return delay


def first(count: int, of: Iterator[float]) -> list[float]:
    return [next(of) for _ in range(count)]


def nats_down(reason: str = "refused") -> DependencyDown:
    return DependencyDown(Dependency.NATS, reason)


Act = Callable[[Stop], Awaitable[None]]


@define
class Script:
    """A child that plays one act an attempt, the last one for ever, and notes when each began. An exception is raised."""

    acts: list[Act | BaseException]
    before_started: bool = False
    attempts: list[float] = Factory(list)
    ends: list[str] = Factory(list)

    async def run(self, stop: Stop, *, task_status: trio.TaskStatus[None]) -> None:
        act = self.acts[min(len(self.attempts), len(self.acts) - 1)]
        self.attempts.append(trio.current_time())
        if not self.before_started:
            task_status.started()
        try:
            if isinstance(act, BaseException):
                raise act
            await act(stop)
        except BaseException as end:
            self.ends.append(type(end).__name__)
            raise
        self.ends.append("returned")


async def until_stopped(stop: Stop) -> None:
    with stop.interrupts():
        await trio.sleep_forever()


async def for_ever(_: Stop) -> None:
    await trio.sleep_forever()


async def at_once(_: Stop) -> None:
    pass


def after(seconds: float, error: BaseException) -> Act:
    async def act(stop: Stop) -> None:
        with stop.interrupts():
            await trio.sleep(seconds)
        if not stop.requested:
            raise error

    return act


@define
class World:
    """A supervisor in a nursery, with statuses by name."""

    supervisor: Supervisor
    nursery: trio.Nursery
    statuses: dict[str, TaskStatus] = Factory(dict)

    def start(self, script: Script, name: str = "child", policy: RestartPolicy | None = None) -> TaskStatus:
        status = self.statuses[name] = TaskStatus(frozenset(Dependency))
        self.supervisor.start(ChildSpec(name, script.run, policy or RestartPolicy()), status)
        return status


@pytest.fixture
async def world(autojump_clock: MockClock, nursery: trio.Nursery) -> World:
    assert trio.lowlevel.current_clock() is autojump_clock, "the test itself must name the clock"
    return World(Supervisor(nursery, random.Random(SEED)), nursery)


# --- start ------------------------------------------------------------------------------------------------------------


@pytest.mark.req("R9")
async def test_a_child_counts_as_running_only_once_its_set_up_worked(world: World, autojump_clock: MockClock) -> None:
    ready = trio.Event()

    async def start(stop: Stop, *, task_status: trio.TaskStatus[None]) -> None:
        await trio.sleep(3)
        task_status.started()
        ready.set()
        await until_stopped(stop)

    status = TaskStatus(frozenset({Dependency.NATS}))
    world.supervisor.start(ChildSpec("child", start), status)
    await trio.sleep(2.9)
    assert (status.state, status.running_seconds()) == (State.STARTING, None)
    assert status.missing == {Dependency.NATS}
    await ready.wait()
    await trio.sleep(2)
    assert (status.state, status.running_seconds()) == (State.RUNNING, instant(2))
    assert status.missing == frozenset()
    assert await world.supervisor.stop("child", 1)


@pytest.mark.req("R9")
async def test_a_failure_before_readiness_is_retried_like_any_other(world: World, autojump_clock: MockClock) -> None:
    script = Script([nats_down(), nats_down(), until_stopped], before_started=True)
    status = world.start(script)
    await trio.sleep(5)
    assert script.attempts == [instant(at) for at in accumulate([0, *first(2, delays())])]
    assert status.state is State.STARTING  # this one never says that it is ready
    assert status.restarts == 2


@pytest.mark.req("B34")
@pytest.mark.parametrize("before_started", [False, True])
async def test_a_return_without_being_asked_is_a_failure(
    world: World, autojump_clock: MockClock, records: Records, before_started: bool
) -> None:
    script = Script([at_once, until_stopped], before_started=before_started)
    status = world.start(script)
    await trio.sleep(1)
    assert script.attempts == [0, instant(next(delays()))]
    assert status.restarts == 1
    (record,) = events(records, "task.restarting")
    assert record["log_level"] == "error"
    assert status.last_error == (
        "RuntimeError: child exited without calling task_status.started()"
        if before_started
        else "ReturnedEarly: returned without having been asked to stop"
    )


@pytest.mark.req("B34", "D9.2")
async def test_a_child_that_only_ever_returns_ends_the_process(world: World, autojump_clock: MockClock) -> None:
    script = Script([at_once])
    status = world.start(script)
    await world.supervisor.gave_up.wait()
    assert len(script.attempts) == 6
    assert isinstance(world.supervisor.failure, ReturnedEarly)
    assert status.state is State.FAILED


@pytest.mark.req("R9")
async def test_a_transient_child_that_returns_is_done(world: World, autojump_clock: MockClock, records: Records) -> None:
    script = Script([nats_down(), at_once])
    status = world.start(script, policy=RestartPolicy(mode=Mode.TRANSIENT))
    await trio.sleep(100)
    assert (len(script.attempts), status.state, status.restarts) == (2, State.STOPPED, 1)
    assert [record["event"] for record in records] == ["task.restarting", "task.recovered"]


@pytest.mark.req("R9", "B34")
async def test_a_child_without_a_sign_of_life_is_stalled_until_its_next(world: World, autojump_clock: MockClock) -> None:
    status = TaskStatus()

    async def start(stop: Stop, *, task_status: trio.TaskStatus[None]) -> None:
        await trio.sleep(7)
        task_status.started()
        await trio.sleep(10)
        status.beat()
        await until_stopped(stop)

    world.supervisor.start(ChildSpec("child", start, heartbeat_seconds=5), status)
    seen = []
    for seconds in (4.5, 1, 2, 4, 1.5, 4.5, 1.5):
        await trio.sleep(seconds)
        seen.append((trio.current_time(), status.state))
    assert seen == [
        (4.5, State.STARTING),
        (5.5, State.STARTING),
        (7.5, State.RUNNING),
        (11.5, State.RUNNING),
        (13, State.STALLED),
        (17.5, State.RUNNING),
        (19, State.RUNNING),
    ]
    await trio.sleep(10)
    assert status.state is State.STALLED
    assert await world.supervisor.stop("child", 1)
    await trio.sleep(100)
    assert str(status.state) == "stopped"


# --- dependencies -----------------------------------------------------------------------------------------------------


@pytest.mark.req("D9.2", "B09")
async def test_a_lost_dependency_is_waited_out_for_ever_at_exact_instants(
    world: World, autojump_clock: MockClock, records: Records
) -> None:
    script = Script([nats_down()], before_started=True)
    status = world.start(script)
    waits = first(1_000, delays())
    await trio.sleep(sum(waits) - 1)
    assert len(script.attempts) == 1_000
    assert script.attempts == [instant(at) for at in accumulate([0, *waits[:-1]])]
    assert all(0.4 <= pause <= 12 for pause in waits)
    assert all(pause >= 8 for pause in waits[5:])
    assert not world.supervisor.gave_up.is_set()
    assert (status.state, status.restarts) == (State.BACKOFF, 1_000)
    assert status.missing == {Dependency.NATS}
    (record,) = events(records, "task.restarting")
    assert record == {
        "event": "task.restarting",
        "log_level": "warning",
        "task": "child",
        "error": "nats: refused",
        "restarts": 1,
        "delay_seconds": round(waits[0], 3),
    }


@pytest.mark.req("D9.2", "B16")
async def test_the_log_tells_each_change_of_cause_once(world: World, autojump_clock: MockClock, records: Records) -> None:
    other = DependencyDown(Dependency.DATABASE, "the server is starting up")
    both = ExceptionGroup("", [nats_down(), ExceptionGroup("", [other, nats_down()])])
    world.start(Script([nats_down(), nats_down(), other, other, both, both, nats_down(), until_stopped], before_started=True))
    await trio.sleep(60)
    assert [record["error"] for record in events(records, "task.restarting")] == [
        "nats: refused",
        "database: the server is starting up",
        "nats: refused | database: the server is starting up",
        "nats: refused",
    ]


@pytest.mark.req("D9.2")
async def test_a_recovery_is_told_with_its_outage(world: World, autojump_clock: MockClock, records: Records) -> None:
    failing: list[Act | BaseException] = [after(1, nats_down()), nats_down("x"), nats_down("x")]
    script = Script([*failing, until_stopped])
    world.start(script)
    await trio.sleep(10)
    recoveries = events(records, "task.recovered")
    assert len(recoveries) == 3
    assert recoveries[0] == {
        "event": "task.recovered",
        "log_level": "info",
        "task": "child",
        "outage_seconds": round(next(delays()), 3),
        "attempts": 1,
    }
    assert [record["attempts"] for record in recoveries] == [1, 2, 3]


@pytest.mark.req("D9.2")
async def test_an_outage_lasts_until_the_set_up_works(world: World, autojump_clock: MockClock, records: Records) -> None:
    attempts = 0

    async def start(stop: Stop, *, task_status: trio.TaskStatus[None]) -> None:
        nonlocal attempts
        attempts += 1
        if attempts < 4:
            await trio.sleep(2)
            raise nats_down()
        task_status.started()
        await until_stopped(stop)

    world.supervisor.start(ChildSpec("child", start), TaskStatus())
    await trio.sleep(60)
    (record,) = events(records, "task.recovered")
    assert record["attempts"] == 3
    assert record["outage_seconds"] == pytest.approx(sum(first(3, delays())) + 4, abs=0.001)


@pytest.mark.req("B16")
@pytest.mark.parametrize(("error", "kind"), [
    (nats_down(), Kind.DEPENDENCY),
    (ExceptionGroup("", [nats_down(), DependencyDown(Dependency.DATABASE, "x")]), Kind.DEPENDENCY),
    (ExceptionGroup("", [ExceptionGroup("", [nats_down()]), nats_down()]), Kind.DEPENDENCY),
    (ValueError(), Kind.CRASH),
    (ExceptionGroup("", [nats_down(), ValueError()]), Kind.CRASH),
    (ExceptionGroup("", [nats_down(), ExceptionGroup("", [ValueError()])]), Kind.CRASH),
    (Unrecoverable(), Kind.FATAL),
    (SchemaOutdated(), Kind.FATAL),
    (ExceptionGroup("", [ValueError(), nats_down(), SchemaOutdated()]), Kind.FATAL),
])  # fmt: skip
def test_a_group_counts_as_its_worst_member(error: Exception, kind: Kind) -> None:
    assert classify(error) is kind


@pytest.mark.req("B16")
async def test_two_tasks_of_a_child_that_fail_at_once_are_one_restart_with_both_causes(
    world: World, autojump_clock: MockClock, records: Records
) -> None:
    killed = trio.Event()

    async def both(_: Stop) -> None:
        async with trio.open_nursery() as nursery:
            for dependency in Dependency:
                nursery.start_soon(fail, dependency)
            await trio.sleep(5)
            killed.set()

    async def fail(dependency: Dependency) -> None:
        await killed.wait()
        raise DependencyDown(dependency, "killed")

    status = world.start(Script([both, until_stopped]))
    await trio.sleep(5.1)
    assert (status.state, status.restarts) == (State.BACKOFF, 1)
    assert status.missing == set(Dependency)
    (record,) = events(records, "task.restarting")
    assert set(record["error"].split(" | ")) == {"nats: killed", "database: killed"}
    assert record["log_level"] == "warning"


# --- crashes ----------------------------------------------------------------------------------------------------------


@pytest.mark.req("D9.2")
async def test_the_sixth_crash_within_a_minute_ends_it_at_an_exact_instant(
    world: World, autojump_clock: MockClock, records: Records
) -> None:
    error = ValueError("a defect")
    script = Script([error])
    status = world.start(script)
    await world.supervisor.gave_up.wait()
    waits = first(5, delays())
    assert script.attempts == [instant(at) for at in accumulate([0, *waits])]
    assert trio.current_time() == instant(sum(waits))
    assert isinstance(world.supervisor.failure, ExceptionGroup)
    assert world.supervisor.failure.exceptions == (error,)
    assert (status.state, status.restarts, status.last_error) == (State.FAILED, 5, "ValueError: a defect")
    restarting = events(records, "task.restarting")
    assert [record["delay_seconds"] for record in restarting] == [round(wait, 3) for wait in waits]
    assert {record["log_level"] for record in restarting} == {"error"}
    (record,) = events(records, "supervisor.gave_up")
    assert (record["log_level"], record["task"], record["crashes"]) == ("critical", "child", 6)
    assert record["exc_info"] is world.supervisor.failure


@pytest.mark.req("D9.2")
@pytest.mark.parametrize(("run_seconds", "crashes"), [(11.4, 6), (11.5, None), (11.6, None), (59, None)])
async def test_the_window_slides(world: World, autojump_clock: MockClock, run_seconds: float, crashes: int | None) -> None:
    """A crash each `run_seconds` + 0.5: with 12 s between them the first of six is exactly a minute old and forgotten."""
    script = Script([after(run_seconds, ValueError())])
    world.start(script, policy=RestartPolicy(jitter=0))
    with trio.move_on_after(3_590):
        await world.supervisor.gave_up.wait()
    if crashes:
        assert trio.current_time() == instant(crashes * run_seconds + (crashes - 1) * 0.5)
    else:
        assert not world.supervisor.gave_up.is_set()
        assert len(script.attempts) == 1 + int(3_590 // (run_seconds + 0.5))


@pytest.mark.req("D9.2")
async def test_lost_dependencies_between_crashes_do_not_count(world: World, autojump_clock: MockClock) -> None:
    crash, outage = ValueError(), nats_down()
    script = Script([crash, outage, crash, outage, crash, crash, outage, crash, until_stopped])
    world.start(script, policy=RestartPolicy(cap_seconds=0.5))
    await trio.sleep(100)
    assert len(script.attempts) == 9
    assert not world.supervisor.gave_up.is_set()


@pytest.mark.req("D9.2", "B16")
async def test_a_crash_beside_a_lost_dependency_counts_as_a_crash(world: World, autojump_clock: MockClock) -> None:
    script = Script([ExceptionGroup("", [nats_down(), ValueError()])])
    world.start(script)
    await world.supervisor.gave_up.wait()
    assert len(script.attempts) == 6


@pytest.mark.req("D9.1", "D9.2")
@pytest.mark.parametrize("grouped", [False, True])
async def test_what_no_restart_can_mend_ends_it_at_once(
    world: World, autojump_clock: MockClock, records: Records, grouped: bool
) -> None:
    error: Exception = SchemaOutdated("the schema is missing")
    script = Script([ExceptionGroup("", [nats_down(), error]) if grouped else error], before_started=True)
    status = world.start(script)
    await world.supervisor.gave_up.wait()
    assert (len(script.attempts), trio.current_time()) == (1, 0)
    assert status.state is State.FAILED
    assert len(events(records, "supervisor.gave_up")) == 1
    assert not events(records, "task.restarting")


@pytest.mark.req("B39")
async def test_siblings_work_on_while_one_crashes_and_after_it_gave_up(world: World, autojump_clock: MockClock) -> None:
    steady, broken = Script([until_stopped]), Script([ValueError()])
    status = world.start(steady, "steady")
    world.start(broken, "broken")
    await world.supervisor.gave_up.wait()
    await trio.sleep(100)
    assert (steady.attempts, status.state, status.restarts) == ([0], State.RUNNING, 0)
    assert len(broken.attempts) == 6


@pytest.mark.req("B16")
async def test_two_children_that_fail_in_one_instant_are_restarted_apart(
    world: World, autojump_clock: MockClock, records: Records
) -> None:
    scripts = {name: Script([after(30, nats_down(name)), until_stopped]) for name in ("a", "b")}
    statuses = {name: world.start(script, name) for name, script in scripts.items()}
    await trio.sleep(40)
    assert {record["task"]: record["error"] for record in events(records, "task.restarting")} == {"a": "nats: a", "b": "nats: b"}
    assert len(events(records, "task.restarting")) == 2
    restarted = {script.attempts[1] for script in scripts.values()}
    assert sorted(restarted) == [instant(30 + wait) for wait in sorted(_alike(2))]
    assert all(status.state is State.RUNNING for status in statuses.values())


def _alike(children: int) -> list[float]:
    """The first wait of each of so many children, who have a source each."""
    source = random.Random(SEED)
    return [wait(RestartPolicy(), 1, random.Random(source.random())) for _ in range(children)]


@pytest.mark.req("B16", "D9.2")
async def test_two_children_that_give_up_in_one_instant_are_both_told(
    world: World, autojump_clock: MockClock, records: Records
) -> None:
    at_first = RestartPolicy(intensity=0)
    for name in ("a", "b"):
        world.start(Script([after(1, ValueError(name))]), name, at_first)
    await world.supervisor.gave_up.wait()
    await trio.sleep(1)
    assert sorted(record["task"] for record in events(records, "supervisor.gave_up")) == ["a", "b"]
    assert all(status.state is State.FAILED for status in world.statuses.values())
    assert isinstance(world.supervisor.failure, ExceptionGroup)


# --- back-off ---------------------------------------------------------------------------------------------------------


@pytest.mark.req("D9.2")
@pytest.mark.parametrize(("healthy_for", "resets"), [(9.9, False), (10, True), (100, True)])
async def test_health_begins_the_back_off_anew(world: World, autojump_clock: MockClock, healthy_for: float, resets: bool) -> None:
    outages: list[Act | BaseException] = [nats_down(), nats_down(), nats_down()]
    script = Script([*outages, after(healthy_for, nats_down()), until_stopped])
    world.start(script, policy=RestartPolicy(jitter=0))
    await trio.sleep(200)
    gaps = [round(later - earlier, 6) for earlier, later in pairwise(script.attempts)]
    assert gaps == [0.5, 1, 2, healthy_for + (0.5 if resets else 4)]


@pytest.mark.req("D9.2")
async def test_a_long_start_is_no_health(world: World, autojump_clock: MockClock) -> None:
    async def start(_: Stop, **__: object) -> None:
        attempts.append(trio.current_time())
        await trio.sleep(30)
        raise nats_down()

    attempts: list[float] = []
    world.supervisor.start(ChildSpec("child", start, RestartPolicy(jitter=0)), TaskStatus())
    await trio.sleep(200)
    assert attempts == [instant(at) for at in (0, 30.5, 61.5, 93.5, 127.5, 165.5)]


@pytest.mark.req("D9.2")
def test_the_back_off_without_jitter() -> None:
    policy, source = RestartPolicy(jitter=0), random.Random()
    assert [wait(policy, failures, source) for failures in range(1, 9)] == [0.5, 1, 2, 4, 8, 10, 10, 10]
    assert wait(policy, 10**9, source) == 10


@pytest.mark.req("D9.2")
def test_the_same_seed_gives_the_same_instants() -> None:
    def attempts(seed: int) -> list[float]:
        script = Script([nats_down(), ValueError(), after(3, nats_down()), after(12, nats_down()), nats_down()])

        async def main() -> None:
            async with trio.open_nursery() as nursery:
                Supervisor(nursery, random.Random(seed)).start(ChildSpec("child", script.run), TaskStatus())
                await trio.sleep(300)
                nursery.cancel_scope.cancel()

        trio.run(main, clock=MockClock(autojump_threshold=0))
        return script.attempts

    assert attempts(1) == attempts(1)
    assert attempts(1) != attempts(2)


@pytest.mark.req("D9.2")
@given(
    policy=st.builds(
        RestartPolicy,
        base_seconds=st.floats(0.01, 10),
        factor=st.floats(1, 4),
        cap_seconds=st.floats(0.01, 100),
        jitter=st.floats(0, 0.9),
    ),
    failures=st.integers(1, 10**6),
    seed=st.integers(),
)
@RELAXED
def test_every_delay_lies_within_its_jitter(policy: RestartPolicy, failures: int, seed: int) -> None:
    delay = wait(policy, failures, random.Random(seed))
    plain = min(policy.cap_seconds, policy.base_seconds * policy.factor ** min(failures - 1, 64))
    assert plain * (1 - policy.jitter) * 0.999999 <= delay <= plain * (1 + policy.jitter) * 1.000001
    assert delay == wait(policy, failures, random.Random(seed))


@pytest.mark.req("D9.2")
@given(
    gaps=st.lists(st.tuples(st.integers(0, 70), st.sampled_from([Kind.DEPENDENCY, Kind.CRASH]))),
    intensity=st.integers(0, 6),
    period=st.integers(1, 100),
)
@RELAXED
def test_exhaustion_counts_the_crashes_of_the_period(gaps: list[tuple[int, Kind]], intensity: int, period: int) -> None:
    policy = RestartPolicy(intensity=intensity, period_seconds=period)
    history, now, crashes = History(), 0, []
    for gap, kind in gaps:
        now += gap
        history = policy.record(history, kind, now, 0)
        crashes += [now] if kind is Kind.CRASH else []
        recent = [crash for crash in crashes if now - crash < period]
        assert list(history.crashes) == recent
        assert (policy.decide(history, random.Random(0)) is None) == (len(recent) > intensity)


@pytest.mark.req("D9.2")
@pytest.mark.parametrize(("ran_seconds", "failures"), [(0, 5), (9.99, 5), (10, 1), (1_000, 1)])
def test_the_history_counts_failures_in_a_row(ran_seconds: float, failures: int) -> None:
    policy = RestartPolicy()
    assert policy.record(History(4, (1.0,)), Kind.DEPENDENCY, 2, ran_seconds) == History(failures, (1.0,))
    assert policy.record(History(4, (1.0,)), Kind.CRASH, 2, ran_seconds) == History(failures, (1.0, 2))
    assert policy.record(History(4), Kind.FATAL, 2, ran_seconds) == History(failures, fatal=True)
    assert policy.decide(History(1, fatal=True), random.Random(0)) is None


@define
class Model:
    """What the policy promises, said once more in plain steps: the instants of the attempts, and of giving up."""

    attempts: list[float] = Factory(list)
    gave_up: float | None = None

    def play(self, schedule: list[tuple[float, bool]], policy: RestartPolicy, seed: int) -> None:
        source, now, failures = random.Random(random.Random(seed).random()), 0.0, 0
        crashes: list[float] = []
        for run_seconds, crash in schedule:
            self.attempts.append(now)
            now += run_seconds
            crashes += [now] if crash else []
            if sum(now - one < policy.period_seconds for one in crashes) > policy.intensity:
                self.gave_up = now
                return
            failures = 1 if run_seconds >= policy.healthy_seconds else failures + 1
            now += wait(policy, failures, source)
        self.attempts.append(now)


@pytest.mark.req("D9.2")
@given(
    schedule=st.lists(st.tuples(st.sampled_from([0.0, 0.25, 3.0, 9.5, 10.5, 70.0]), st.booleans()), max_size=25),
    seed=st.integers(0, 2**32),
    intensity=st.integers(0, 6),
)
@RELAXED
def test_any_schedule_of_failures_plays_as_the_policy_says(schedule: list[tuple[float, bool]], seed: int, intensity: int) -> None:
    policy, model = RestartPolicy(intensity=intensity), Model()
    acts = [after(seconds, ValueError() if crash else nats_down()) for seconds, crash in schedule]
    script = Script([*acts, until_stopped])
    gave_up: list[float] = []

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            supervisor = Supervisor(nursery, random.Random(seed))
            supervisor.start(ChildSpec("child", script.run, policy), TaskStatus())
            with trio.move_on_after(100_000):
                await supervisor.gave_up.wait()
                gave_up.append(trio.current_time())
            assert await supervisor.stop("child", 1)

    trio.run(main, clock=MockClock(autojump_threshold=0))
    model.play(schedule, policy, seed)
    assert script.attempts == [instant(at) for at in model.attempts]
    assert gave_up == ([instant(model.gave_up)] if model.gave_up is not None else [])


# --- stop -------------------------------------------------------------------------------------------------------------


@pytest.mark.req("R9")
async def test_a_stop_while_running_lets_the_child_finish(world: World, autojump_clock: MockClock, records: Records) -> None:
    async def finishing(stop: Stop) -> None:
        await until_stopped(stop)
        await trio.sleep(4)

    script = Script([finishing])
    status = world.start(script)
    await trio.sleep(10)
    assert await world.supervisor.stop("child", 5)
    assert trio.current_time() == instant(14)
    assert (script.ends, status.state, status.restarts) == (["returned"], State.STOPPED, 0)
    assert records == []


@pytest.mark.req("R9")
async def test_a_child_that_ignores_the_stop_is_cancelled_after_its_bound(world: World, autojump_clock: MockClock) -> None:
    script = Script([for_ever])
    status = world.start(script)
    await trio.sleep(10)
    assert not await world.supervisor.stop("child", 5)
    assert trio.current_time() == instant(15)
    assert (script.ends, status.state) == (["Cancelled"], State.STOPPED)


@pytest.mark.req("R9")
async def test_a_stop_during_back_off_ends_the_wait(world: World, autojump_clock: MockClock) -> None:
    script = Script([nats_down()])
    status = world.start(script)
    await trio.sleep(0.1)
    assert status.state is State.BACKOFF
    assert await world.supervisor.stop("child", 5)
    assert (trio.current_time(), len(script.attempts), status.state) == (instant(0.1), 1, State.STOPPED)


@pytest.mark.req("R9", "B37")
async def test_a_stop_during_a_start_cancels_the_attempt(world: World, autojump_clock: MockClock, records: Records) -> None:
    script = Script([for_ever], before_started=True)
    status = world.start(script)
    await trio.sleep(10)
    assert await world.supervisor.stop("child", 5)
    assert (trio.current_time(), script.ends, status.state) == (instant(10), ["Cancelled"], State.STOPPED)
    assert records == []


@pytest.mark.req("R9", "B37")
async def test_a_stop_before_the_start_prevents_it(world: World, autojump_clock: MockClock) -> None:
    script = Script([until_stopped])
    status = world.start(script)
    world.supervisor.request_stop("child")
    assert await world.supervisor.stop("child", 5)
    assert (trio.current_time(), script.attempts, status.state) == (0, [], State.STOPPED)


@pytest.mark.req("R9")
async def test_stopping_twice_and_at_once_works(world: World, autojump_clock: MockClock) -> None:
    async def finishing(stop: Stop) -> None:
        await until_stopped(stop)
        await trio.sleep(1)

    world.start(Script([finishing]))
    await trio.testing.wait_all_tasks_blocked()
    results: list[bool] = []

    async def stop() -> None:
        results.append(await world.supervisor.stop("child", 5))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stop)
        nursery.start_soon(stop)
    assert results == [True, True]
    world.supervisor.request_stop("child")
    assert await world.supervisor.stop("child", 5)
    assert trio.current_time() == instant(1)


@pytest.mark.req("R9")
async def test_a_child_that_had_ended_counts_as_finished_even_without_time_left(world: World, autojump_clock: MockClock) -> None:
    world.start(Script([until_stopped]))
    await trio.testing.wait_all_tasks_blocked()
    assert await world.supervisor.stop("child", 5)
    assert await world.supervisor.stop("child", 0)


@pytest.mark.req("R9")
async def test_stopping_a_stranger_is_nothing(world: World, autojump_clock: MockClock) -> None:
    world.supervisor.request_stop("nobody")
    assert await world.supervisor.stop("nobody", 5)
    assert trio.current_time() == 0


@pytest.mark.req("R9", "B16")
@pytest.mark.parametrize("error", [ValueError("x"), nats_down("x"), ExceptionGroup("", [nats_down("x"), SchemaOutdated("x")])])
async def test_a_failure_while_stopping_is_told_and_not_retried(
    world: World, autojump_clock: MockClock, records: Records, error: Exception
) -> None:
    async def failing(stop: Stop) -> None:
        await until_stopped(stop)
        await trio.sleep(1)
        raise error

    script = Script([failing])
    status = world.start(script)
    await trio.sleep(10)
    assert await world.supervisor.stop("child", 5)
    assert (trio.current_time(), len(script.attempts), status.state) == (instant(11), 1, State.STOPPED)
    (record,) = records
    assert (record["event"], record["log_level"], record["task"]) == ("task.failed_while_stopping", "warning", "child")
    assert not world.supervisor.gave_up.is_set()


@pytest.mark.req("R9", "B16")
async def test_a_failure_on_being_cancelled_is_told(world: World, autojump_clock: MockClock, records: Records) -> None:
    async def clumsy(_: Stop) -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("while cleaning up")

    world.start(Script([clumsy]))
    await trio.sleep(1)
    assert not await world.supervisor.stop("child", 2)
    assert trio.current_time() == instant(3)
    (record,) = records
    assert (record["event"], record["error"]) == ("task.failed_while_stopping", "ValueError: while cleaning up")


@pytest.mark.req("R9")
async def test_a_stop_after_giving_up_keeps_the_failure_in_sight(world: World, autojump_clock: MockClock) -> None:
    status = world.start(Script([SchemaOutdated("x")]))
    await world.supervisor.gave_up.wait()
    assert await world.supervisor.stop("child", 5)
    assert status.state is State.FAILED


@pytest.mark.req("R9")
async def test_an_interruptible_block_ends_at_the_stop_and_others_do_not(autojump_clock: MockClock) -> None:
    stop, ended = Stop(), []

    async def work() -> None:
        with stop.interrupts():
            await trio.sleep(100)
        ended.append(trio.current_time())
        await trio.sleep(7)
        ended.append(trio.current_time())
        with stop.interrupts():
            await trio.sleep(100)
        ended.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(work)
        await trio.sleep(3)
        stop.request()
        stop.request()
    assert stop.requested
    assert ended == [instant(3), instant(10), instant(10)]
