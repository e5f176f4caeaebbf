"""psycopg on Trio: connections that wait with Trio, end in bounded time, and fail in two ways only.

Inside `bounded`, every failure of the database is either `DependencyDown` (the server is away, deaf or unwilling: start
afresh) or `WriteRefused` (the server refused the data). Which of the two is told by SQLSTATE, since psycopg's classes
mix outages with bad data. A cancelled query leaves its connection usable or closed, never stuck.
"""

import logging
import select
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import aclosing, asynccontextmanager, closing, suppress
from functools import partial
from typing import Any, TypeVar

import psycopg
import trio
from psycopg import _encodings, conninfo, pq
from psycopg.abc import PQGen, PQGenConn
from psycopg.waiting import Ready, Wait

from armcore_trio.dsn import hosts
from armcore_trio.errors import Dependency, DependencyDown, RowsLocked, WriteRefused

RV = TypeVar("RV")

logging.getLogger("psycopg").setLevel(logging.ERROR)  # its warnings tell of errors beside the one that it raises

CONNECT_SECONDS = 5.0
QUERY_SECONDS = 10.0
"""The longest a unit of work may take before the database counts as down. Lock waits end a little sooner, on the server."""
PING_SECONDS = 2.0
_CANCEL_SECONDS = 0.5

SEARCH_PATH = "public, pg_temp"
_SETTINGS = {
    "lock_timeout": "4s",
    "statement_timeout": "0",
    "transaction_timeout": "0",
    "idle_session_timeout": "0",
    "idle_in_transaction_session_timeout": "30s",
    "default_transaction_isolation": "read committed",
    "default_transaction_deferrable": "off",
    "row_security": "off",
    "TimeZone": "UTC",
    "DateStyle": "ISO, MDY",
    "IntervalStyle": "postgres",
    "bytea_output": "hex",
    "standard_conforming_strings": "on",
    "array_nulls": "on",
    "transform_null_equals": "off",
    "exit_on_error": "off",
    "quote_all_identifiers": "off",
}
"""What a role or a database could have set otherwise, and the exchange relies on; those a server does not know are left.

Not among them: a read-only default, which is how one switches writers off (B12), and what only changes speed.
"""


_SESSION = """
SET statement_timeout = 0;
SELECT pg_catalog.set_config(name, value, false) FROM (VALUES <wanted>) AS wanted (name, value)
WHERE pg_catalog.current_setting(name, true) IS NOT NULL
UNION ALL
SELECT pg_catalog.set_config('synchronous_commit', 'on', false)
WHERE pg_catalog.current_setting('synchronous_commit') = 'off'
"""


def _session() -> str:
    """One round trip that makes the session the exchange's own. What is committed has to be durable, by whatever rule."""
    wanted = ", ".join(f"('{name}', '{value}')" for name, value in {"search_path": SEARCH_PATH, **_SETTINGS}.items())
    return _SESSION.replace("<wanted>", wanted)


# SQLSTATE classes that say nothing about the data, only that the server cannot or will not work now: connection, stale
# plan or statement, wrong transaction state (read-only), login, no such database, rollback, resources, wrong state of an
# object (locks), intervention, system, snapshot too old, configuration, internal. Whatever else a trigger may raise refuses.
_OUTAGE_CLASSES = frozenset({"08", "0A", "25", "26", "28", "3D", "40", "53", "55", "57", "58", "72", "F0", "XX"})
# Class 42 is a statement that does not fit the schema, a defect of ours, save these: no right, no table.
_LOCK_NOT_AVAILABLE = "55P03"
_UNWILLING = frozenset({"42501", "42P01"})


class Connection(psycopg.AsyncConnection[tuple[Any, ...]]):
    """An `AsyncConnection` that waits with Trio. Opened by `connect`, in autocommit mode."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lock = trio.Lock()  # type: ignore[assignment]  # used as a context manager only

    @property
    def codec(self) -> str | None:
        """Python's name for the encoding of the database's texts; None if that is UTF-8 and the server answers for it.

        Without an encoding (SQL_ASCII) texts are taken for UTF-8, which all of ours are.
        """
        encoding = self.pgconn.parameter_status(b"server_encoding") or b"UTF8"
        if encoding == b"UTF8":
            return None
        if encoding == b"SQL_ASCII":
            return "utf-8"
        try:
            return _encodings.pg2pyenc(encoding)
        except psycopg.NotSupportedError:  # EUC_TW and MULE_INTERNAL
            return "ascii"

    async def wait(self, gen: PQGen[RV], interval: float = 0, timeout: float | None = None) -> RV:  # noqa: ARG002
        """Drive one of psycopg's generators. A query whose wait is cancelled is cancelled on the server too."""
        try:
            with trio.move_on_after(float("inf") if timeout is None else timeout):
                return await self._drive(gen)
        except trio.Cancelled:
            if self.pgconn.transaction_status == pq.TransactionStatus.ACTIVE or self.pgconn.pipeline_status:
                await self._abandon(gen)
            with suppress(psycopg.Error):  # a pipeline's last words, to a connection that is closed
                gen.close()
            raise
        raise psycopg.errors._WaitTimeout("wait timeout expired")

    async def _drive(self, gen: PQGen[RV]) -> RV:
        return await _run(_on(self.pgconn.socket, gen))

    async def _abandon(self, gen: PQGen[Any]) -> None:
        """Ask the server to stop and read what it still says; close if that takes too long (a frozen server)."""
        with trio.move_on_after(_CANCEL_SECONDS, shield=True), suppress(psycopg.Error, OSError):
            await _run(self._cancel_gen())
            await self._drive(gen)
        if self.pgconn.transaction_status == pq.TransactionStatus.ACTIVE or self.pgconn.pipeline_status:
            self.pgconn.finish()

    @asynccontextmanager
    async def transaction(
        self, savepoint_name: str | None = None, force_rollback: bool = False
    ) -> AsyncIterator[psycopg.AsyncTransaction]:
        """As psycopg's, and closed if a cancellation left no time to roll back: the server then does it by itself."""
        outermost = not self._num_transactions
        try:
            async with super().transaction(savepoint_name, force_rollback) as transaction:
                yield transaction
        finally:
            if outermost and self.pgconn.transaction_status != pq.TransactionStatus.IDLE:
                self.pgconn.finish()

    async def rest(self, seconds: float) -> None:
        """Wait for a notification, so long at most; then make sure that the server still answers, be the link open or not."""
        if not await self.notified(seconds):
            async with bounded("a ping", PING_SECONDS):
                await self.execute("SELECT 1")

    async def notified(self, seconds: float) -> bool:
        """Wait for a notification, so long at most; returns whether one came."""
        with trio.move_on_after(seconds):
            await self.wait_notified()
            return True
        return False

    async def wait_notified(self) -> None:
        """Wait for a notification. `DependencyDown` as soon as the connection dies, so this also watches an idle one."""
        async with bounded("LISTEN", float("inf")), aclosing(self.notifies(stop_after=1)) as notifications:
            async for _ in notifications:
                pass


@asynccontextmanager
async def connect(dsn: str, application: str) -> AsyncIterator[Connection]:
    """A connection for the length of the block, in autocommit mode; `application` names it in `pg_stat_activity`.

    Hosts are tried in turn, `CONNECT_SECONDS` each for its name and for each address. Raises `DependencyDown` if none lets
    us in. Leaving the block closes the connection at once, without a word to the server.
    """
    async with bounded("connect", float("inf")):
        connection = await _connect_any(dsn, application)
    try:
        yield connection
    finally:
        await connection.close()


async def _connect_any(dsn: str, application: str) -> Connection:
    failure: psycopg.Error = psycopg.OperationalError("no host to connect to")
    for host in await _in_thread(partial(hosts, dsn, application_name=application, client_encoding="UTF8")):
        try:
            addresses = await _in_thread(partial(conninfo.conninfo_attempts, host))
        except psycopg.OperationalError as error:
            failure = error
            continue
        for address in addresses:
            try:
                with trio.fail_after(CONNECT_SECONDS):
                    return await _open(conninfo.make_conninfo("", **address))
            except trio.TooSlowError:
                failure = psycopg.OperationalError(f"no answer to connect within {CONNECT_SECONDS:g} s")
            except psycopg.OperationalError as error:
                failure = error
    raise failure


async def _open(address: str) -> Connection:
    """With its session set: one that lets us in and then says nothing, as a pooler without a server, has not let us in."""
    with closing(Connection._connect_gen(address)) as connecting:
        connection = await _run(connecting)
    connection.prepare_threshold = None  # a pooler may not keep prepared statements, and ours are run once a batch
    try:
        await connection.set_autocommit(True)
        await connection.execute(_session().encode())
    except BaseException:
        await connection.close()
        raise
    return connection


async def _in_thread(look_up: Callable[[], list[Any]]) -> list[Any]:
    """Outside the shared limit on threads: look-ups that hang must not keep others from theirs."""
    try:
        with trio.fail_after(CONNECT_SECONDS):
            return await trio.to_thread.run_sync(look_up, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1))
    except trio.TooSlowError:
        raise psycopg.OperationalError(f"no answer from the name server within {CONNECT_SECONDS:g} s") from None
    except (OSError, UnicodeError) as error:
        raise psycopg.OperationalError(f"the host's name cannot be resolved: {error}") from None


@asynccontextmanager
async def bounded(what: str, seconds: float = QUERY_SECONDS) -> AsyncIterator[None]:
    """Run a unit of work on a connection: it ends within `seconds` and fails as the module says.

    `what` names the work in `DependencyDown`. Errors in the statements themselves pass as they are: they are defects.
    """
    try:
        with trio.fail_after(seconds):
            yield
    except trio.TooSlowError:
        raise DependencyDown(Dependency.DATABASE, f"no answer to {what} within {seconds:g} s") from None
    except psycopg.Error as error:
        raise _translate(error) from error
    except UnicodeDecodeError as error:  # a database that takes any byte for text
        raise WriteRefused("22021", f"a text that is not {error.encoding}") from error


def is_outage(state: str) -> bool:
    """Whether an SQLSTATE says nothing about the data or the schema, only that the server cannot or will not work now."""
    return state[:2] in _OUTAGE_CLASSES


def _translate(error: psycopg.Error) -> Exception:
    state, reason = error.sqlstate, " ".join((error.diag.message_primary or str(error)).split())
    if state is None:
        if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
            return DependencyDown(Dependency.DATABASE, reason)
        return WriteRefused(None, reason) if isinstance(error, psycopg.DataError) else error
    if state == _LOCK_NOT_AVAILABLE:
        return RowsLocked(Dependency.DATABASE, f"{reason} ({state})")
    if is_outage(state) or state in _UNWILLING:
        return DependencyDown(Dependency.DATABASE, f"{reason} ({state})")
    return error if state[:2] == "42" else WriteRefused(state, reason, error.diag.table_name)


async def _run(gen: PQGenConn[RV]) -> RV:
    """Drive a generator that yields what to wait for and on which descriptor."""
    try:
        descriptor, wanted = next(gen)
        while True:
            descriptor, wanted = gen.send(await _ready(descriptor, wanted))
    except StopIteration as stop:
        result: RV = stop.value
        return result


def _on(descriptor: int, gen: PQGen[RV]) -> Generator[tuple[int, Wait], Ready | int, RV]:
    """A generator of waits as one of waits on this descriptor."""
    try:
        wanted = next(gen)
        while True:
            wanted = gen.send((yield descriptor, wanted))
    except StopIteration as stop:
        result: RV = stop.value
        return result


async def _ready(descriptor: int, wanted: Wait) -> Ready:
    if wanted == Wait.R:
        await trio.lowlevel.wait_readable(descriptor)
        return Ready.R
    if wanted == Wait.W:
        await trio.lowlevel.wait_writable(descriptor)
        return Ready.W
    return await _ready_either(descriptor)


async def _ready_either(descriptor: int) -> Ready:
    """Both directions (a pipeline's wait): a socket is nearly always writable, so look before waiting for either."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN | select.POLLOUT)
    while not (events := poll.poll(0)):
        async with trio.open_nursery() as nursery:
            for wait in (trio.lowlevel.wait_readable, trio.lowlevel.wait_writable):
                nursery.start_soon(_first, wait, descriptor, nursery.cancel_scope)
    await trio.lowlevel.checkpoint()
    found = events[0][1]
    readable = Ready.R if found & ~select.POLLOUT else Ready.NONE
    return Ready(readable | (Ready.W if found & select.POLLOUT else Ready.NONE))


async def _first(wait: Any, descriptor: int, scope: trio.CancelScope) -> None:
    await wait(descriptor)
    scope.cancel()
