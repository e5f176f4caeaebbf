"""A pass goes on until there is nothing left, and one refused row holds up nobody."""

from collections.abc import Callable, Sequence
from uuid import UUID

import pytest
import trio
from attrs import Factory, define
from hypothesis import given
from hypothesis import strategies as st

from armcore_trio.errors import Dependency, DependencyDown, WriteRefused
from armcore_trio.exchange.passes import BatchSize, Refusal, run_pass
from armcore_trio.supervision.supervisor import Stop

PATIENCE = 10_000


@define
class Table:
    """Rows by number; an attempt takes the first that are not skipped and fails as a transaction does: nothing is done."""

    rows: list[int]
    poison: set[int] = Factory(set)
    leave: set[int] = Factory(set)
    done: list[int] = Factory(list)
    limits: list[int] = Factory(list)
    refused: list[int] = Factory(list)
    after_attempt: Callable[[], object] = lambda: None
    fault: Exception | None = None

    async def attempt(self, limit: int, skip: set[UUID], claimed: list[UUID]) -> None:
        assert len(self.limits) < PATIENCE, "the pass does not end"
        self.limits.append(limit)
        taken = [row for row in self.rows if UUID(int=row) not in skip][:limit]
        claimed += [UUID(int=row) for row in taken]
        await trio.lowlevel.checkpoint()
        self.after_attempt()
        if self.fault is not None:
            raise self.fault
        if self.poison & set(taken):
            raise WriteRefused("P0001", "refused by a trigger")
        left = self.leave & set(taken)
        skip |= {UUID(int=row) for row in left}
        self.done += [row for row in taken if row not in left]
        self.rows = [row for row in self.rows if row not in taken or row in left]

    def note(self, job_id: UUID, refusal: Refusal) -> None:
        assert refusal.sqlstate == "P0001"
        self.refused.append(job_id.int)


def table(rows: int, *, poison: Sequence[int] = (), leave: Sequence[int] = ()) -> Table:
    return Table(list(range(rows)), set(poison), set(leave))


async def play(rows: Table, batch_size: int = 10, stop: Stop | None = None) -> None:
    await run_pass(rows.attempt, size=BatchSize(batch_size), stop=stop or Stop(), refused=rows.note)


@pytest.mark.req("D1.3")
@pytest.mark.parametrize(("rows", "attempts"), [(0, 1), (1, 1), (9, 1), (10, 2), (11, 2), (95, 10), (100, 11)])
async def test_a_backlog_is_worked_off_in_one_pass(rows: int, attempts: int) -> None:
    backlog = table(rows)
    await play(backlog)
    assert backlog.done == list(range(rows))
    assert backlog.limits == [10] * attempts


@pytest.mark.req("B35", "B48")
async def test_a_refused_row_is_found_by_taking_the_batch_apart() -> None:
    rows = table(25, poison=[3])
    await play(rows)
    assert rows.done == [row for row in range(25) if row != 3]
    assert rows.refused == [3]
    assert rows.rows == [3]
    assert rows.limits == [10, 1, 1, 1, 1, 10, 10, 10]


@pytest.mark.req("B35", "B48")
async def test_the_oldest_rows_refused_do_not_stop_the_others() -> None:
    rows = table(70, poison=range(60))
    await play(rows, batch_size=50)
    assert rows.done == list(range(60, 70))
    assert rows.refused == list(range(60))


@pytest.mark.req("B48")
async def test_every_seventh_refused() -> None:
    rows = table(200, poison=range(0, 200, 7))
    await play(rows, batch_size=50)
    assert rows.refused == list(range(0, 200, 7))
    assert rows.done == [row for row in range(200) if row % 7]


@pytest.mark.req("B48")
async def test_the_next_pass_tries_a_refused_row_again() -> None:
    rows = table(3, poison=[1])
    await play(rows)
    await play(rows)
    assert rows.refused == [1, 1]
    rows.poison = set()
    await play(rows)
    assert (rows.rows, rows.done) == ([], [0, 2, 1])


@pytest.mark.req("D3.1")
async def test_rows_left_for_a_later_pass_are_not_taken_again() -> None:
    rows = table(30, leave=range(12))
    await play(rows)
    assert rows.rows == list(range(12))
    assert rows.done == list(range(12, 30))
    assert rows.limits == [10, 10, 10, 10]


@pytest.mark.req("B35")
async def test_a_batch_size_of_one() -> None:
    rows = table(4, poison=[0, 2])
    await play(rows, batch_size=1)
    assert (rows.done, rows.refused) == ([1, 3], [0, 2])


@pytest.mark.req("B53")
async def test_a_refusal_before_any_row_was_claimed_does_not_spin() -> None:
    """There is no row to blame: the claim itself is at fault, and the policy for crashes shall see it."""
    attempts = 0

    async def attempt(limit: int, skip: set[UUID], claimed: list[UUID]) -> None:  # noqa: ARG001 - as run_pass calls it
        nonlocal attempts
        attempts += 1
        assert attempts < 10, "the pass spins"
        await trio.lowlevel.checkpoint()
        raise WriteRefused("22003", "out of range")

    with pytest.raises(WriteRefused, match="out of range"):
        await run_pass(attempt, size=BatchSize(10), stop=Stop(), refused=lambda _, __: None)


@pytest.mark.req("R9")
async def test_a_stop_ends_the_pass_after_the_batch_it_is_in() -> None:
    stop, rows = Stop(), table(100)
    rows.after_attempt = lambda: stop.request() if len(rows.limits) == 3 else None
    await play(rows, stop=stop)
    assert rows.done == list(range(30))


@pytest.mark.req("R9")
async def test_a_stop_ends_the_search_for_a_refused_row() -> None:
    stop, rows = Stop(), table(100, poison=[5])
    rows.after_attempt = lambda: stop.request() if len(rows.limits) == 3 else None
    await play(rows, stop=stop)
    assert (rows.done, rows.refused) == ([0, 1], [])


@pytest.mark.req("R9")
async def test_after_a_stop_no_pass_begins() -> None:
    stop, rows = Stop(), table(100)
    stop.request()
    await play(rows, stop=stop)
    assert rows.limits == []


@pytest.mark.req("R1")
async def test_an_outage_ends_the_pass() -> None:
    rows = table(100)
    rows.fault = DependencyDown(Dependency.DATABASE, "gone")
    with pytest.raises(DependencyDown):
        await play(rows)
    assert (rows.limits, rows.done, rows.refused) == ([10], [], [])


@pytest.mark.req("D1.3", "B35", "B48")
@given(
    rows=st.integers(0, 60),
    poison=st.sets(st.integers(0, 60)),
    leave=st.sets(st.integers(0, 60)),
    batch_size=st.integers(1, 20),
)
def test_any_pass_does_what_can_be_done(rows: int, poison: set[int], leave: set[int], batch_size: int) -> None:
    backlog = table(rows, poison=sorted(poison), leave=sorted(leave - poison))
    trio.run(play, backlog, batch_size)
    everything = set(range(rows))
    assert backlog.done == sorted(everything - poison - leave)
    assert backlog.refused == sorted(everything & poison)
    assert set(backlog.rows) == everything & (poison | leave)
    assert len(backlog.limits) <= 3 * rows + 2
