"""The clock of the tests themselves: it stands still while real servers answer, and moves only when told (B55)."""

import time

import pytest
import trio

from armcore_trio.borders.bus import Message, open_bus
from armcore_trio.borders.database import connect
from armcore_trio.settings import Settings
from tests.support.clock import FrozenClock
from tests.support.database import Database


@pytest.mark.req("B55")
async def test_real_servers_answer_while_time_stands_still(clock: FrozenClock, settings: Settings, dsn: str) -> None:
    await clock.advance(1)
    before = trio.current_time()
    async with connect(dsn, "test") as connection, open_bus(settings, "test") as bus:
        await connection.execute("SELECT pg_sleep(0.05)")
        await bus.publish_batch([Message(settings.result_subject, b"1")])
    assert trio.current_time() == before


@pytest.mark.req("B55")
async def test_both_clocks_move_together_and_take_no_real_time(clock: FrozenClock, db: Database) -> None:
    before, real = (trio.current_time(), db.execute("SELECT now()")[0]["now"]), time.monotonic()
    await clock.advance(86_400)
    after = (trio.current_time(), db.execute("SELECT now()")[0]["now"])
    assert after[0] - before[0] == 86_400
    assert (after[1] - before[1]).total_seconds() == 86_400
    assert time.monotonic() - real < 60
