"""One frozen clock for Trio and the database, moved by hand.

A child on real servers cannot run under an auto-jumping clock, for which waiting for a socket is idleness. Here time
stands still however long the servers take, until the test moves it. Unlike `MockClock(rate=0)` this one does not add up
rounding errors, so that an instant reached in any number of steps is the same.
"""

from datetime import UTC, datetime, timedelta
from weakref import WeakSet

import psycopg
import pytest
import trio
from psycopg import sql
from trio.testing import wait_all_tasks_blocked

from armcore_trio.borders import database
from armcore_trio.borders.bus import Bus
from tests.support.waiting import until

START = datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC)

_FOR_EVER = 999_999_999
_DEFAULTS = {
    "s3_object": ["created_at"],
    "stored_file": ["created_at", "updated_at"],
    "recognition_job": ["created_at"],
    "quality_failure_fact": ["occurred_at"],
}


class FrozenClock(trio.abc.Clock):
    """Trio's clock and one database's `now()`, both at rest. A test must name the fixture itself for Trio to run on it.

    `start` and `now` are the database's instants; `seconds` is what has passed of both.
    """

    start = START

    def __init__(self, dsn: str, patch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        self._buses: WeakSet[Bus] = WeakSet()
        self._watch_buses(patch)
        self._connection = psycopg.connect(dsn, autocommit=True, application_name="test clock")
        self._connection.execute("CREATE SCHEMA clock")
        self._connection.execute("CREATE TABLE clock.instant (now timestamptz NOT NULL)")
        self._connection.execute("GRANT USAGE ON SCHEMA clock TO PUBLIC")
        self._connection.execute("GRANT SELECT ON clock.instant TO PUBLIC")
        self._connection.execute("INSERT INTO clock.instant VALUES (%s)", [START])
        self._connection.execute(
            "CREATE FUNCTION clock.now() RETURNS timestamptz LANGUAGE sql STABLE AS 'SELECT now FROM clock.instant'"
        )
        for table, columns in _DEFAULTS.items():
            for column in columns:
                self._connection.execute(
                    sql.SQL("ALTER TABLE {} ALTER {} SET DEFAULT clock.now()").format(
                        sql.Identifier(table), sql.Identifier(column)
                    )
                )
        patch.setattr(database, "SEARCH_PATH", "clock, pg_catalog, public")
        name = sql.Identifier(self._connection.info.dbname)
        self._connection.execute(sql.SQL("ALTER DATABASE {} SET search_path = clock, pg_catalog, public").format(name))

    def start_clock(self) -> None:
        """It stands still."""

    def current_time(self) -> float:
        return self.seconds

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return 0 if deadline <= self.seconds else _FOR_EVER

    @property
    def now(self) -> datetime:
        """What the database says now."""
        return self.at(self.seconds)

    def at(self, seconds: float) -> datetime:
        """The instant so many seconds after the start."""
        return START + timedelta(seconds=seconds)

    async def advance(self, seconds: float, *, settle: bool = True) -> None:
        """Move both on by so many seconds: the database first, so that whoever wakes finds it there.

        Returns when all tasks have seen the new time and every NATS connection has its PONG for what it was asked, so
        that the next jump takes nobody for silent. `settle=False` if a server will not answer.
        """
        self.seconds = round(self.seconds + seconds, 6)
        self._connection.execute("UPDATE clock.instant SET now = %s", [self.now])
        await wait_all_tasks_blocked()
        if settle:
            await until(lambda: not any(bus._client._pongs for bus in self._buses if not bus._ended.is_set()), what="a PONG")
            await wait_all_tasks_blocked()

    async def advance_to(self, seconds: float) -> None:
        """Move on to so many seconds after the start."""
        await self.advance(round(seconds - self.seconds, 6))

    def close(self) -> None:
        self._connection.close()

    def _watch_buses(self, patch: pytest.MonkeyPatch) -> None:
        original, buses = Bus.__init__, self._buses

        def remember(bus: Bus, *args: object, **kwargs: object) -> None:
            original(bus, *args, **kwargs)  # type: ignore[arg-type]
            buses.add(bus)

        patch.setattr(Bus, "__init__", remember)
