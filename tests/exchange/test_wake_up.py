"""D1.6: inserts notify only while a publisher sleeps, and no insert is overlooked by one that falls asleep meanwhile."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import partial
from random import Random
from time import sleep
from typing import Any, Self

import psycopg
import pytest
import trio
from attrs import Factory, define, field
from trio.testing import wait_all_tasks_blocked

from armcore_trio.borders import store
from armcore_trio.borders.database import Connection
from armcore_trio.borders.migrate import migrate
from armcore_trio.errors import DependencyDown
from armcore_trio.exchange.publisher import Publisher
from armcore_trio.settings import Settings
from tests.conftest import StartDaemon
from tests.support.clock import FrozenClock
from tests.support.database import Database, JobIds, Sleeper
from tests.support.exchange import Exchange, open_exchange
from tests.support.failing import failing
from tests.support.records import Records
from tests.support.refusals import refuse
from tests.support.servers import start_postgres
from tests.support.service import ServiceClient
from tests.support.waiting import LIMIT_SECONDS, until, wait_until

HOLDERS = """
SELECT pid FROM pg_locks
WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND mode = %s
"""
INSERT = "INSERT INTO recognition_job (file_id, pipeline, attempt) VALUES (%s, 'tabular', %s) RETURNING id"
PROMPT_SECONDS = 10
"""Far more than a job may take that is not overlooked, and far less than the poll of the daemons here."""


def sleepers(db: Database) -> list[int]:
    """The sessions that hold the lock as one that sleeps does."""
    return [row["pid"] for row in db.execute(HOLDERS, "ExclusiveLock")]


def unnotified(db: Database) -> list[int]:
    """The sessions with an insert under way that will not notify."""
    return [row["pid"] for row in db.execute(HOLDERS, "ShareLock")]


@pytest.fixture
def sleeper(dsn: str) -> Iterator[Sleeper]:
    """Awake."""
    with Sleeper(dsn) as sleeper:
        yield sleeper


@define
class Producer:
    """A session that inserts attempts for a file of its own, in a transaction that goes on until it is ended."""

    db: Database
    connection: psycopg.Connection[Any] = field()
    file: JobIds = field()
    attempts: int = 0

    @connection.default
    def _connect(self) -> psycopg.Connection[Any]:
        return self.db.connect()

    @file.default
    def _insert_file(self) -> JobIds:
        """With a job of no interest, which is done."""
        return self.db.insert_job(status="done", attempt=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    @property
    def pid(self) -> int:
        return self.connection.info.backend_pid

    def insert(self) -> JobIds:
        """The job inserted; not committed."""
        self.attempts += 1
        row = self.connection.execute(INSERT.encode(), (self.file.file_id, self.attempts)).fetchone()
        assert row is not None
        return JobIds(row["id"], self.file.file_id, self.file.key, self.attempts)

    def run(self, *statements: str) -> None:
        """Each an INSERT, or SQL."""
        for statement in statements:
            if statement == "INSERT":
                self.insert()
            else:
                self.connection.execute(statement.encode())

    def commit(self) -> None:
        self.connection.commit()

    def rollback(self) -> None:
        self.connection.rollback()


@pytest.fixture
def new_producer(db: Database) -> Iterator[Callable[[], Producer]]:
    """Makes producers, who are closed when the test ends."""
    producers: list[Producer] = []

    def make() -> Producer:
        producers.append(Producer(db))
        return producers[-1]

    yield make
    for producer in producers:
        producer.connection.close()


@pytest.fixture
def producer(new_producer: Callable[[], Producer]) -> Producer:
    """A producer with nothing under way."""
    return new_producer()


# Who notifies

INTO = "INSERT INTO recognition_job (file_id, pipeline, attempt)"
STATEMENTS = {
    "one row": f"{INTO} SELECT id, 'image', 1 FROM stored_file LIMIT 1",
    "many rows": f"{INTO} SELECT id, 'image', n FROM stored_file, generate_series(1, 9) n",
    "no row": f"{INTO} SELECT id, 'image', 1 FROM stored_file WHERE false",
    "returning": f"{INTO} SELECT id, 'image', 1 FROM stored_file LIMIT 1 RETURNING id",
    "on conflict": f"""
        {INTO} SELECT id, 'image', n / 2 FROM stored_file, generate_series(2, 9) n
        ON CONFLICT (file_id, attempt) DO NOTHING""",
    "merge": """
        MERGE INTO recognition_job USING stored_file ON file_id = stored_file.id AND attempt = 1
        WHEN NOT MATCHED THEN INSERT (file_id, pipeline) VALUES (stored_file.id, 'image')""",
    "in a query": f"""
        WITH job AS ({INTO} SELECT id, 'image', 1 FROM stored_file RETURNING *)
        SELECT count(*) FROM job""",
    "twice in a query": f"""
        WITH job AS ({INTO} SELECT id, 'image', 1 FROM stored_file RETURNING *)
        {INTO} SELECT file_id, pipeline, attempt + 1 FROM job""",
    "in a block": f"""
        DO $$ BEGIN
            {INTO} SELECT id, 'image', 1 FROM stored_file;
            BEGIN
                {INTO} SELECT id, 'image', 1 FROM stored_file;
            EXCEPTION WHEN unique_violation THEN NULL;
            END;
        END $$""",
}


@pytest.mark.req("D1.6")
@pytest.mark.parametrize("statement", STATEMENTS)
def test_whatever_inserts_notifies_once_if_somebody_sleeps(
    db: Database, sleeper: Sleeper, producer: Producer, statement: str
) -> None:
    assert sleeper.fall_asleep()
    producer.run(STATEMENTS[statement])
    assert unnotified(db) == []
    assert sleeper.notified() == 0, "nothing is committed"
    producer.commit()
    assert sleeper.notified() == 1


@pytest.mark.req("D1.6")
@pytest.mark.parametrize("statement", STATEMENTS)
def test_whatever_inserts_keeps_others_from_sleep_if_nobody_sleeps(
    db: Database, sleeper: Sleeper, producer: Producer, statement: str
) -> None:
    producer.run(STATEMENTS[statement])
    assert unnotified(db) == [producer.pid]
    assert not sleeper.fall_asleep()
    producer.commit()
    assert (sleeper.fall_asleep(), sleeper.notified()) == (True, 0)


@pytest.mark.req("D1.6")
def test_copy_does_as_an_insert(sleeper: Sleeper, producer: Producer) -> None:
    def copy(attempt: int) -> None:
        with producer.connection.cursor().copy("COPY recognition_job (file_id, pipeline, attempt) FROM STDIN") as rows:
            rows.write_row((producer.file.file_id, "image", attempt))

    copy(1)
    assert not sleeper.fall_asleep()
    producer.commit()
    assert (sleeper.fall_asleep(), sleeper.notified()) == (True, 0)
    copy(2)
    producer.commit()
    assert sleeper.notified() == 1


@pytest.mark.req("D1.6")
def test_one_insert_wakes_all_who_listen_and_the_last_to_wake_ends_the_notifications(
    dsn: str, db: Database, sleeper: Sleeper, producer: Producer
) -> None:
    with Sleeper(dsn) as second, Sleeper(dsn) as third:
        everyone = (sleeper, second, third)
        assert [one.fall_asleep() for one in everyone] == [True, True, True]
        assert sleepers(db) == [sleeper.connection.info.backend_pid], "one holds the lock for all"
        producer.insert()
        producer.commit()
        assert [one.notified() for one in everyone] == [1, 1, 1]
        for one in (second, third, sleeper):
            assert sleepers(db) != []
            one.wake_up()
        producer.insert()
        producer.commit()
        assert [one.notified() for one in everyone] == [0, 0, 0]


@pytest.mark.req("D1.6")
def test_falling_asleep_again_and_again_is_undone_by_waking_up_once(db: Database, sleeper: Sleeper, producer: Producer) -> None:
    assert [sleeper.fall_asleep() for _ in range(3)] == [True] * 3
    sleeper.wake_up()
    producer.insert()
    assert unnotified(db) == [producer.pid]


@pytest.mark.req("D1.6")
def test_one_who_could_not_fall_asleep_holds_nothing(
    dsn: str, db: Database, sleeper: Sleeper, new_producer: Callable[[], Producer]
) -> None:
    first, second = new_producer(), new_producer()
    first.insert()
    assert not sleeper.fall_asleep()
    second.insert()
    assert sorted(unnotified(db)) == sorted([first.pid, second.pid])
    first.commit()
    second.commit()
    with Sleeper(dsn) as other:
        assert other.fall_asleep()


# How long an insert that does not notify keeps others from sleep

FREE, KEPT = True, False
UNDONE = f"DO $$ BEGIN {INTO} SELECT id, 'image', 99 FROM stored_file; RAISE data_exception; EXCEPTION WHEN others THEN END $$"
ENDINGS: dict[str, list[tuple[str, bool]]] = {
    "commit": [("INSERT", KEPT), ("COMMIT", FREE)],
    "rollback": [("INSERT", KEPT), ("ROLLBACK", FREE)],
    "two inserts": [("INSERT", KEPT), ("INSERT", KEPT), ("COMMIT", FREE)],
    "commit and chain": [("INSERT", KEPT), ("COMMIT AND CHAIN", FREE), ("INSERT", KEPT), ("COMMIT", FREE)],
    "rollback to the savepoint before": [("SAVEPOINT a", FREE), ("INSERT", KEPT), ("ROLLBACK TO a", FREE), ("COMMIT", FREE)],
    "rollback to a savepoint in between": [
        ("INSERT", KEPT), ("SAVEPOINT a", KEPT), ("INSERT", KEPT), ("ROLLBACK TO a", KEPT), ("COMMIT", FREE),
    ],
    "rollback to a savepoint after": [("INSERT", KEPT), ("SAVEPOINT a", KEPT), ("ROLLBACK TO a", KEPT), ("COMMIT", FREE)],
    "release": [("SAVEPOINT a", FREE), ("INSERT", KEPT), ("RELEASE a", KEPT), ("COMMIT", FREE)],
    "release, and rollback of the outer": [
        ("SAVEPOINT a", FREE), ("SAVEPOINT b", FREE), ("INSERT", KEPT), ("RELEASE b", KEPT), ("ROLLBACK TO a", FREE),
        ("COMMIT", FREE),
    ],
    "rollback and another": [
        ("SAVEPOINT a", FREE), ("INSERT", KEPT), ("ROLLBACK TO a", FREE), ("INSERT", KEPT), ("COMMIT", FREE),
    ],
    "a block that failed": [(UNDONE, FREE), ("COMMIT", FREE)],
    "who gives up its own locks": [("INSERT", KEPT), ("SELECT pg_advisory_unlock_all()", KEPT), ("COMMIT", FREE)],
}  # fmt: skip


@pytest.mark.req("D1.6")
@pytest.mark.parametrize("ending", ENDINGS)
def test_an_insert_that_does_not_notify_keeps_others_from_sleep_as_long_as_it_may_be_committed(
    db: Database, sleeper: Sleeper, producer: Producer, ending: str
) -> None:
    for statement, free in ENDINGS[ending]:
        producer.run(statement)
        assert sleeper.fall_asleep() == free, statement
        sleeper.wake_up()
    assert unnotified(db) == []
    assert sleeper.notified() == 0


@pytest.mark.req("D1.6")
def test_the_last_of_several_inserts_lets_others_sleep_who_then_see_all_of_them(
    sleeper: Sleeper, new_producer: Callable[[], Producer]
) -> None:
    producers = [new_producer() for _ in range(4)]
    jobs = [producer.insert().id for producer in producers]
    for producer in Random(5).sample(producers, len(producers)):
        assert not sleeper.fall_asleep()
        producer.commit()
    assert sleeper.fall_asleep()
    found = sleeper.connection.execute("SELECT id FROM recognition_job WHERE status = 'queued'").fetchall()
    assert {row[0] for row in found} == set(jobs)


@pytest.mark.req("D1.6")
def test_the_end_of_a_producers_session_lets_others_sleep(db: Database, sleeper: Sleeper, producer: Producer) -> None:
    producer.insert()
    assert not sleeper.fall_asleep()
    db.execute("SELECT pg_terminate_backend(%s)", producer.pid)
    wait_until(sleeper.fall_asleep, what="the lock")


# An insert that notifies


@pytest.mark.req("D1.6")
def test_an_insert_that_notifies_does_so_at_its_commit_however_often_others_woke_and_slept(
    sleeper: Sleeper, producer: Producer
) -> None:
    assert sleeper.fall_asleep()
    producer.insert()
    for _ in range(2):
        sleeper.wake_up()
        assert sleeper.fall_asleep(), "it will be woken"
    assert sleeper.notified() == 0
    producer.commit()
    assert sleeper.notified() == 1


@pytest.mark.req("D1.6")
def test_an_insert_that_notifies_does_so_even_if_nobody_sleeps_at_its_commit(sleeper: Sleeper, producer: Producer) -> None:
    assert sleeper.fall_asleep()
    producer.insert()
    sleeper.wake_up()
    producer.commit()
    assert sleeper.notified() == 1


@pytest.mark.req("D1.6")
def test_what_is_rolled_back_notifies_nobody(sleeper: Sleeper, producer: Producer) -> None:
    assert sleeper.fall_asleep()
    producer.run("INSERT", "ROLLBACK", "SAVEPOINT a", "INSERT", "ROLLBACK TO a", UNDONE, "COMMIT")
    assert sleeper.notified() == 0
    producer.run("INSERT", "SAVEPOINT a", "INSERT", "ROLLBACK TO a", "COMMIT")
    assert sleeper.notified() == 1
    producer.run("SAVEPOINT a", "INSERT", "RELEASE a", "COMMIT")
    assert sleeper.notified() == 1


@pytest.mark.req("D1.6")
def test_one_transaction_may_do_both(sleeper: Sleeper, producer: Producer) -> None:
    """Its first insert is to notify, its second holds the lock, and undoing either leaves what the other did."""
    for undone in ("", "the second"):
        assert sleeper.fall_asleep()
        producer.insert()
        sleeper.wake_up()
        producer.run("SAVEPOINT a", "INSERT")
        assert not sleeper.fall_asleep()
        if undone:
            producer.run("ROLLBACK TO a")
            assert sleeper.fall_asleep()
            sleeper.wake_up()
        producer.commit()
        assert sleeper.notified() == 1
    assert sleeper.fall_asleep()
    producer.run("SAVEPOINT a", "INSERT")
    sleeper.wake_up()
    producer.run("ROLLBACK TO a", "INSERT")
    assert not sleeper.fall_asleep()
    producer.commit()
    assert (sleeper.fall_asleep(), sleeper.notified()) == (True, 0)


@pytest.mark.req("D1.6")
def test_a_query_that_inserts_twice_may_do_both(db: Database, sleeper: Sleeper, producer: Producer) -> None:
    """PostgreSQL drops what the first part has decided on if the table gets its second; that one then has the lock."""
    db.execute(
        "CREATE FUNCTION pause() RETURNS uuid LANGUAGE plpgsql AS $$"
        "BEGIN PERFORM pg_advisory_lock(1); PERFORM pg_advisory_unlock(1); RETURN NULL; END $$"
    )
    query = """
        WITH job AS (INSERT INTO recognition_job (file_id, pipeline) SELECT id, 'image' FROM stored_file RETURNING *)
        INSERT INTO recognition_job (file_id, pipeline, attempt)
        SELECT file_id, pipeline, attempt + 1 FROM job UNION ALL SELECT id, 'image', 9 FROM stored_file WHERE pause() IS NULL"""
    assert sleeper.fall_asleep()
    with ThreadPoolExecutor(1) as pool:
        with db.transaction() as gate:
            gate.execute("SELECT pg_advisory_xact_lock(1)")
            inserting = pool.submit(producer.run, query)
            wait_until(db.lock_waiters, what="the second part")
            sleeper.wake_up()
        inserting.result(LIMIT_SECONDS)
    assert unnotified(db) == [producer.pid]
    assert not sleeper.fall_asleep()
    producer.commit()
    assert (sleeper.fall_asleep(), sleeper.notified()) == (True, 0)
    assert db.value("SELECT count(*) FROM recognition_job WHERE status = 'queued'") == 3


# Two-phase commit


@pytest.mark.req("D1.6")
def test_a_prepared_transaction_is_refused_while_somebody_sleeps_and_else_keeps_others_from_sleep() -> None:
    with start_postgres(max_prepared_transactions="3") as server:
        migrate(server.dsn())
        db = Database(server.dsn())
        with Sleeper(server.dsn()) as sleeper, Producer(db) as producer:
            assert sleeper.fall_asleep()
            producer.insert()
            with pytest.raises(psycopg.errors.FeatureNotSupported, match="cannot PREPARE a transaction that has executed"):
                producer.run("PREPARE TRANSACTION 'a'")
            producer.rollback()
            sleeper.wake_up()
            producer.run("INSERT", "PREPARE TRANSACTION 'a'", "BEGIN", "INSERT", "PREPARE TRANSACTION 'b'")
            assert not sleeper.fall_asleep()
        server.stop()
        server.start()
        with Sleeper(server.dsn()) as sleeper:
            assert not sleeper.fall_asleep()
            db.execute("ROLLBACK PREPARED 'a'")
            assert not sleeper.fall_asleep()
            db.execute("COMMIT PREPARED 'b'")
            assert (sleeper.fall_asleep(), sleeper.notified()) == (True, 0)
            assert sleeper.connection.execute("SELECT attempt FROM recognition_job WHERE status = 'queued'").fetchall() == [(3,)]
        db.close()


# A publisher that falls asleep and wakes up among producers

_stepped: ContextVar["Stepped"] = ContextVar("stepped")


@define(eq=False)
class Stepped:
    """A running publisher, held before each step of its loop until told to take it. Time does not pass for it.

    The steps are to listen, to fall asleep, to look, to wake up and to rest. One that rests, and for which no notification
    is there, takes no step until there is one; then it stands before the next.
    """

    state: str = "moving"
    """Or "held", or "resting"."""
    _permit: trio.Semaphore = Factory(lambda: trio.Semaphore(0))
    _changed: trio.lowlevel.ParkingLot = Factory(trio.lowlevel.ParkingLot)

    @property
    def resting(self) -> bool:
        return self.state == "resting"

    async def step(self) -> None:
        """Let it take one, and return when it stands before the next or rests."""
        if not self.resting:
            self._become("moving")
            self._permit.release()
            await self.settle()

    async def settle(self) -> None:
        """Wait until it is held, or rests although it has received all that was sent to it before."""
        await self._until("held", "resting")
        await wait_all_tasks_blocked()
        await self._until("held", "resting")

    async def woken(self) -> None:
        """Wait until a notification that was sent has ended its rest."""
        if self.resting:
            await self._until("held")

    async def _hold(self) -> None:
        self._become("held")
        await self._permit.acquire()

    def _become(self, state: str) -> None:
        self.state = state
        self._changed.unpark_all()

    async def _until(self, *states: str) -> None:
        with trio.fail_after(LIMIT_SECONDS):
            while self.state not in states:
                await self._changed.park()

    @staticmethod
    def patch(patch: pytest.MonkeyPatch) -> None:
        """Have all publishers held that are run inside `Stepped.run`."""
        for place, name in ((store, "listen"), (store, "fall_asleep"), (store, "wake_up"), (Publisher, "run_once")):
            patch.setattr(place, name, Stepped._holding(getattr(place, name)))
        original = Connection.notified

        async def notified(connection: Connection, seconds: float) -> bool:
            self = _stepped.get()
            await self._hold()
            if seconds < 1:  # a moment, since inserts are under way
                return await original(connection, 0.001)
            await connection.execute("SELECT 1")  # brings along what was sent before
            self._become("resting")
            return await original(connection, seconds)

        patch.setattr(Connection, "notified", notified)

    @staticmethod
    def _holding(step: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def held(*args: Any, **options: Any) -> Any:
            await _stepped.get()._hold()
            return await step(*args, **options)

        return held

    async def run(self, exchange: Exchange) -> None:
        _stepped.set(self)
        await exchange.parts.publisher.run(exchange.parts.stop, task_status=trio.TASK_STATUS_IGNORED)


@define
class Play:
    """Publishers and producers on one database, moved one step at a time; what they did is told if a job is overlooked."""

    db: Database
    observer: Sleeper
    publishers: list[Stepped]
    producers: list[Producer]
    committed: list[JobIds] = Factory(list)
    _uncommitted: dict[int, list[JobIds]] = Factory(dict)
    _story: list[str] = Factory(list)

    async def publisher(self, number: int) -> None:
        self._story.append(f"publisher {number}")
        await self.publishers[number].step()
        self._check()

    async def insert(self, number: int) -> None:
        self._story.append(f"insert {number}")
        self._uncommitted.setdefault(number, []).append(self.producers[number].insert())
        self._check()

    async def undo(self, number: int) -> None:
        """An insert that is undone, in a transaction that goes on."""
        self._story.append(f"undo {number}")
        self.producers[number].run("SAVEPOINT a", "INSERT", "ROLLBACK TO a")
        self._check()

    async def rollback(self, number: int) -> None:
        self._story.append(f"rollback {number}")
        self._uncommitted.pop(number, None)
        self.producers[number].rollback()
        assert not self.observer.notified()
        self._check()

    async def commit(self, number: int) -> None:
        self._story.append(f"commit {number}")
        self.producers[number].commit()
        self.committed += self._uncommitted.pop(number, [])
        if self.observer.notified():
            self._story.append("notified")
            for publisher in self.publishers:
                await publisher.woken()
        self._check()

    async def end(self) -> None:
        """Whoever is inside a transaction commits, then the publishers go on until all rest."""
        for number in list(self._uncommitted):
            await self.commit(number)
        for _ in range(20):
            for number in range(len(self.publishers)):
                await self.publisher(number)
            if all(publisher.resting for publisher in self.publishers):
                assert len(sleepers(self.db)) == 1, self._story
                self._story.clear()
                return
        pytest.fail(f"they never rest: {self._story}")

    def _check(self) -> None:
        """While all rest, and no notification is on its way, no job is there to be published."""
        if all(publisher.resting for publisher in self.publishers):
            left = self.db.value("SELECT count(*) FROM recognition_job WHERE status = 'queued'")
            assert left == 0, f"overlooked after {self._story}"


@asynccontextmanager
async def playing(settings: Settings, db: Database, *, publishers: int = 1, producers: int = 2) -> AsyncIterator[Play]:
    """All for the length of the block. The publishers are held before their first step."""
    async with AsyncExitStack() as stack:
        Stepped.patch(stack.enter_context(pytest.MonkeyPatch.context()))
        observer = stack.enter_context(Sleeper(db.dsn))
        play = Play(db, observer, [], [stack.enter_context(Producer(db)) for _ in range(producers)])
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        for _ in range(publishers):
            exchange = await stack.enter_async_context(open_exchange(settings, receiving=False))
            play.publishers.append(Stepped())
            nursery.start_soon(play.publishers[-1].run, exchange)
            await play.publishers[-1].settle()
        yield play


def orders(**counts: int) -> Iterator[str]:
    """Every order of so many of each letter."""
    if not any(counts.values()):
        yield ""
    for letter, count in counts.items():
        if count:
            yield from (letter + rest for rest in orders(**counts | {letter: count - 1}))


async def play_order(play: Play, order: str) -> None:
    """`p` is a step of the publisher; `a` and `b` are producers, who insert at their first letter and commit at the next."""
    inside: set[str] = set()
    for letter in order:
        if letter == "p":
            await play.publisher(0)
        elif letter in inside:
            await play.commit("ab".index(letter))
        else:
            inside.add(letter)
            await play.insert("ab".index(letter))
    await play.end()


def published(service: ServiceClient, play: Play) -> bool:
    """Whether each committed job went out once, and no other."""
    return sorted(str(one.msg_id) for one in service.heard()) == sorted(job.msg_id for job in play.committed)


@pytest.mark.req("D1.6")
@pytest.mark.environment(OUTBOX_POLL_SECONDS=3600, ACK_TIMEOUT_SECONDS=3600)
@pytest.mark.usefixtures("log")
async def test_no_order_of_two_inserts_and_of_the_steps_of_a_publisher_makes_it_overlook_one(
    settings: Settings, db: Database, service: ServiceClient
) -> None:
    async with playing(settings, db) as play:
        await play.end()
        for order in orders(p=6, a=2, b=2):
            if order.index("a") < order.index("b"):
                await play_order(play, order)
        assert len(play.committed) == 1260
        assert published(service, play)


@pytest.mark.req("D1.6")
@pytest.mark.environment(OUTBOX_POLL_SECONDS=3600, ACK_TIMEOUT_SECONDS=3600)
@pytest.mark.usefixtures("log")
async def test_no_order_of_an_insert_and_of_a_publishers_first_steps_makes_it_overlook_one(
    settings: Settings, db: Database, service: ServiceClient
) -> None:
    for count, order in enumerate(orders(p=5, a=2), 1):
        async with playing(settings, db) as play:
            await play_order(play, order)
        assert db.value("SELECT count(*) FROM recognition_job WHERE status = 'published'") == count
        assert len(service.heard()) == count


@pytest.mark.req("D1.6", "R1")
@pytest.mark.environment(OUTBOX_POLL_SECONDS=3600, ACK_TIMEOUT_SECONDS=3600)
@pytest.mark.parametrize("publishers", [1, 2, 3])
@pytest.mark.usefixtures("log")
async def test_publishers_among_producers_of_every_kind_overlook_nothing(
    settings: Settings, db: Database, service: ServiceClient, publishers: int
) -> None:
    random = Random(publishers)
    async with playing(settings, db, publishers=publishers, producers=3) as play:
        for _ in range(60):
            for _ in range(random.randint(1, 30)):
                if random.random() < 0.6:
                    await play.publisher(random.randrange(publishers))
                else:
                    act = random.choice([play.insert, play.insert, play.undo, play.rollback, play.commit, play.commit])
                    await act(random.randrange(3))
            await play.end()
        assert len(play.committed) > 50
        assert published(service, play)


# Publishers at rest

StartPublisher = Callable[[], Awaitable[None]]


@pytest.fixture
def start_publisher(settings: Settings, log: Records, nursery: trio.Nursery) -> StartPublisher:
    """Starts instances of the daemon that publish and nothing else. Each ends with the test, or with its connection."""

    assert log is not None

    async def run(*, task_status: trio.TaskStatus[None]) -> None:
        async with open_exchange(settings, receiving=False) as exchange:
            with failing(DependencyDown, "connection"):
                await exchange.parts.publisher.run(exchange.parts.stop, task_status=task_status)

    return partial(nursery.start, run)


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """When publishers began to rest, and for how long at most, so far."""
    original, begun = Connection.notified, []

    async def notified(connection: Connection, seconds: float) -> bool:
        begun.append((trio.current_time(), seconds))
        return await original(connection, seconds)

    monkeypatch.setattr(Connection, "notified", notified)
    return begun


@pytest.mark.req("D1.6")
async def test_one_that_polls_in_its_sleep_lets_inserts_go_on_to_notify(
    clock: FrozenClock, db: Database, start_publisher: StartPublisher, rests: list[tuple[float, float]]
) -> None:
    await start_publisher()
    await until(lambda: rests == [(0, 5)])
    holder = sleepers(db)
    assert len(holder) == 1
    for polls in (1, 2, 3):
        await clock.advance(5)
        await until(lambda: rests[polls:] == [(5 * polls, 5)])  # noqa: B023
        assert sleepers(db) == holder
    job = db.insert_job()
    await until(lambda: rests[4:] == [(15, 5)])
    assert db.job(job)["published_at"] == clock.at(15)
    assert sleepers(db) == holder


@pytest.mark.req("D1.6")
async def test_while_an_insert_is_under_way_that_will_not_notify_it_looks_every_moment(
    clock: FrozenClock, db: Database, producer: Producer, start_publisher: StartPublisher, rests: list[tuple[float, float]]
) -> None:
    def moments() -> list[float]:
        """When it began to rest for one."""
        return [begun for begun, seconds in rests if seconds <= 0.05]

    late = producer.insert()
    await start_publisher()
    await until(lambda: moments() == [0])
    await clock.advance_to(0.06)
    await until(lambda: moments() == [0, 0.06])
    other = db.insert_job()
    await clock.advance_to(0.12)
    await until(lambda: moments() == [0, 0.06, 0.12])
    assert db.job(other)["published_at"] == clock.at(0.12)
    assert sleepers(db) == []
    producer.commit()
    await clock.advance_to(0.18)
    await until(lambda: [(begun, round(seconds, 3)) for begun, seconds in rests[3:]] == [(0.18, 4.82)])
    assert db.job(late)["published_at"] == clock.at(0.18)
    assert len(sleepers(db)) == 1


@pytest.mark.req("D1.6", "B48")
async def test_a_job_that_cannot_be_written_is_tried_once_a_poll_however_often_it_looks(
    clock: FrozenClock,
    db: Database,
    producer: Producer,
    start_publisher: StartPublisher,
    rests: list[tuple[float, float]],
    log: Records,
) -> None:
    guilty = db.insert_job()
    refuse(db, "recognition_job", [guilty])
    producer.insert()  # keeps it awake
    await start_publisher()
    for look in range(1, 6):
        await until(lambda: len(rests) == look)  # noqa: B023
        await clock.advance(0.06)
    await until(lambda: len(rests) == 6)
    assert len(log.named("outbox.write_refused")) == 1
    await clock.advance_to(5)
    await until(lambda: len(log.named("outbox.write_refused")) == 2)
    log.claim("outbox.write_refused")


@pytest.mark.req("D1.6", "R1")
@pytest.mark.environment(OUTBOX_POLL_SECONDS=3600)
async def test_two_that_sleep_are_both_woken_by_one_insert_which_goes_out_once(
    db: Database, service: ServiceClient, producer: Producer, start_publisher: StartPublisher, rests: list[tuple[float, float]]
) -> None:
    for _ in range(2):
        await start_publisher()
    for turn in range(1, 11):
        await until(lambda: len([1 for _, seconds in rests if seconds > 1]) == 2 * turn, what="sleep")  # noqa: B023
        producer.insert()
        producer.commit()
    await until(lambda: len([1 for _, seconds in rests if seconds > 1]) == 22, what="sleep")
    assert sorted(one.document["attempt"] for one in service.heard()) == list(range(1, 11))
    assert len(sleepers(db)) == 1


@pytest.mark.req("D1.6")
@pytest.mark.environment(OUTBOX_POLL_SECONDS=3600)
async def test_inserts_wake_one_that_sleeps_while_another_keeps_the_lock_for_ever(
    db: Database, sleeper: Sleeper, start_publisher: StartPublisher
) -> None:
    """Another instance, say, whose process was stopped in its sleep."""
    assert sleeper.fall_asleep()
    await start_publisher()
    for _ in range(3):
        job = db.insert_job()
        await until(lambda: db.job(job)["status"] == "published")  # noqa: B023


@pytest.mark.req("D1.6", "B36")
async def test_the_end_of_the_one_that_holds_the_lock_costs_the_others_one_poll_period(
    clock: FrozenClock, db: Database, start_publisher: StartPublisher, rests: list[tuple[float, float]]
) -> None:
    for count in (1, 2, 3):
        await start_publisher()
        await until(lambda: rests == [(0, 5)] * count)  # noqa: B023
    (holder,) = sleepers(db)
    db.execute("SELECT pg_terminate_backend(%s)", holder)
    await until(lambda: sleepers(db) == [])
    job = db.insert_job()
    await clock.advance_to(4.999)
    assert (rests, db.job(job)["status"]) == ([(0, 5)] * 3, "queued")
    await clock.advance_to(5)
    await until(lambda: rests[3:] == [(5, 5)] * 2)
    assert db.job(job)["published_at"] == clock.at(5)
    assert len(sleepers(db)) == 1, "another holds it"
    for _ in range(3):
        job = db.insert_job()
        await until(lambda: db.job(job)["status"] == "published", what="a wake-up")  # noqa: B023
        assert db.job(job)["published_at"] == clock.at(5)


@pytest.mark.req("D1.6", "B36")
async def test_an_insert_past_the_trigger_neither_notifies_nor_holds_the_lock_and_is_found_by_the_poll(
    clock: FrozenClock, db: Database, producer: Producer, start_publisher: StartPublisher, rests: list[tuple[float, float]]
) -> None:
    producer.run("SET session_replication_role = replica")
    early = producer.insert()
    await start_publisher()
    await until(lambda: rests == [(0, 5)])
    producer.commit()
    late = producer.insert()
    producer.commit()
    await clock.advance_to(4.999)
    assert db.statuses([early, late]) == ["queued", "queued"]
    await clock.advance_to(5)
    await until(lambda: db.statuses([early, late]) == ["published", "published"])


# Daemons whose poll is no help

NO_POLL = {"OUTBOX_POLL_SECONDS": "3600", "ACK_TIMEOUT_SECONDS": "3600"}


@pytest.fixture(params=[1, 2], ids=["one daemon", "two daemons"])
def start_daemons(request: pytest.FixtureRequest, start_daemon: StartDaemon) -> Callable[[], None]:
    """Starts so many on one database."""

    def start() -> None:
        for daemon in [start_daemon(**NO_POLL) for _ in range(request.param)]:
            daemon.wait_ok()

    return start


@contextmanager
def eight_producers(db: Database) -> Iterator[Callable[..., list[JobIds]]]:
    """Has eight at once insert up to so many jobs each, one a transaction, with pauses; returns when all are committed."""
    random = Random(8)
    with ExitStack() as stack:
        producers = [stack.enter_context(Producer(db)) for _ in range(8)]
        pool = stack.enter_context(ThreadPoolExecutor(len(producers)))

        def insert(producer: Producer, pauses: list[float]) -> list[JobIds]:
            jobs = []
            for pause in pauses:
                sleep(pause)
                jobs.append(producer.insert())
                producer.commit()
            return jobs

        def run(most: int, *, pause: float) -> list[JobIds]:
            pauses = [
                [random.choice([0, 0, random.uniform(0, pause)]) for _ in range(random.randint(0, most))] for _ in producers
            ]
            return [job for jobs in pool.map(insert, producers, pauses) for job in jobs]

        yield run


def wait_published(db: Database) -> None:
    """Every job that is committed goes out, although no further insert comes to wake anybody up."""
    queued = "SELECT count(*) FROM recognition_job WHERE status = 'queued'"
    wait_until(lambda: db.value(queued) == 0, PROMPT_SECONDS, what="the publication of all")


def went_out_once(service: ServiceClient, jobs: Sequence[JobIds]) -> bool:
    return sorted(str(one.msg_id) for one in service.heard()) == sorted(job.msg_id for job in jobs)


@pytest.mark.req("D1.6", "R1")
def test_no_job_of_eight_producers_waits_for_the_poll(
    start_daemons: Callable[[], None], db: Database, service: ServiceClient
) -> None:
    """Each round ends with a job that nobody inserts after, so one that is overlooked stays so."""
    start_daemons()
    jobs = []
    with eight_producers(db) as insert:
        for number in range(40):
            jobs += insert(1 + number % 4, pause=0.005 * (number % 5))
            wait_published(db)
        jobs += insert(80, pause=0.02)
        wait_published(db)
    assert len(jobs) > 500
    assert went_out_once(service, jobs)
    wait_until(lambda: len(sleepers(db)) == 1, what="sleep")


@pytest.mark.req("D1.6", "B58")
@pytest.mark.parametrize("asleep", [True, False], ids=["inserted while somebody sleeps", "inserted while nobody sleeps"])
def test_a_producer_who_takes_long_to_commit_holds_up_nobody(
    start_daemons: Callable[[], None], db: Database, service: ServiceClient, producer: Producer, asleep: bool
) -> None:
    late = [] if asleep else [producer.insert()]
    start_daemons()
    if asleep:
        wait_until(lambda: sleepers(db), what="sleep")
        late = [producer.insert()]
    assert unnotified(db) == ([] if asleep else [producer.pid])
    jobs = []
    with eight_producers(db) as insert:
        for number in range(10):
            jobs += insert(1 + number % 3, pause=0.005 * (number % 5))
            wait_published(db)
    assert went_out_once(service, jobs)
    producer.commit()
    wait_published(db)
    assert went_out_once(service, late + jobs)
    wait_until(lambda: len(sleepers(db)) == 1, what="sleep")
