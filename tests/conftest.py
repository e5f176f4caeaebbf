"""Servers, databases and helpers for every test. Each test has a database, subjects and clients of its own."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack

import pytest
from structlog.testing import capture_logs

from armcore_trio import settings as settings_module
from armcore_trio.borders.migrate import migrate
from armcore_trio.demo.embedded import Nats, Postgres
from armcore_trio.settings import Settings
from tests.support.clock import FrozenClock
from tests.support.daemon import DaemonProcess
from tests.support.database import Database
from tests.support.exchange import Exchange, open_exchange
from tests.support.proxy import Proxy
from tests.support.records import Records
from tests.support.servers import (
    IMAGE_SUBJECT,
    RESULT_SUBJECT,
    TABULAR_SUBJECT,
    fresh_database,
    migrated_template,
    new_environment,
    start_postgres,
)
from tests.support.service import ServiceClient


def pytest_configure(config: pytest.Config) -> None:
    """Markers that only the fixtures here read."""
    config.addinivalue_line("markers", "environment(NAME=value, ...): variables of the daemon that this test sets")


StartDaemon = Callable[..., DaemonProcess]


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """The PostgreSQL all tests share; it holds a migrated database to copy from. Not to be stopped or frozen."""
    with start_postgres() as server:
        migrated_template(server)
        yield server


@pytest.fixture(scope="session")
def nats_server() -> Iterator[Nats]:
    """The nats-server all tests share. Not to be stopped or frozen."""
    with Nats() as server:
        yield server


@pytest.fixture
def own_postgres() -> Iterator[Postgres]:
    """A PostgreSQL for this test alone, its database `postgres` migrated: to kill, freeze and restart."""
    with start_postgres() as server:
        migrate(server.dsn())
        yield server


@pytest.fixture
def own_nats() -> Iterator[Nats]:
    """A nats-server for this test alone: to kill, freeze and restart."""
    with Nats() as server:
        yield server


@pytest.fixture
def dsn(postgres: Postgres) -> Iterator[str]:
    """This test's own database, migrated and empty."""
    with fresh_database(postgres) as dsn:
        yield dsn


@pytest.fixture
def clock(dsn: str) -> Iterator[FrozenClock]:
    """Trio's clock and this database's, frozen. The test function itself must name this fixture."""
    with pytest.MonkeyPatch.context() as patch:
        clock = FrozenClock(dsn, patch)
        yield clock
        clock.close()


@pytest.fixture
def variables(request: pytest.FixtureRequest) -> dict[str, str]:
    """What the test sets by `@pytest.mark.environment(OUTBOX_BATCH_SIZE=3)`."""
    marks = request.node.iter_markers("environment")
    return {name: str(value) for mark in marks for name, value in mark.kwargs.items()}


@pytest.fixture
def environment(dsn: str, nats_server: Nats, variables: dict[str, str]) -> dict[str, str]:
    """The daemon's variables for this test: its database, the shared NATS, subjects nobody else uses, its `variables`."""
    return new_environment(dsn, nats_server.url) | variables


@pytest.fixture
def own_environment(own_postgres: Postgres, own_nats: Nats, variables: dict[str, str]) -> dict[str, str]:
    """The daemon's variables for the servers that are this test's own, and its `variables`."""
    return new_environment(own_postgres.dsn(), own_nats.url) | variables


@pytest.fixture
def settings(environment: dict[str, str]) -> Settings:
    """The settings of `environment`."""
    return settings_module.load(environment)


@pytest.fixture
def db(dsn: str) -> Iterator[Database]:
    """A look at this test's database from outside."""
    database = Database(dsn)
    yield database
    database.close()


@pytest.fixture
def own_db(own_postgres: Postgres) -> Iterator[Database]:
    """A look at the database of `own_postgres`."""
    database = Database(own_postgres.dsn())
    yield database
    database.close()


@pytest.fixture
def open_service() -> Iterator[Callable[..., ServiceClient]]:
    """Makes service clients for an environment; they are closed when the test ends."""
    with ExitStack() as stack:

        def connect(environment: dict[str, str], **options: object) -> ServiceClient:
            subjects = [environment[TABULAR_SUBJECT], environment[IMAGE_SUBJECT]]
            chosen = {"subjects": subjects, "result_subject": environment[RESULT_SUBJECT], **options}
            client = ServiceClient(environment[settings_module.URL], **chosen)  # type: ignore[arg-type]
            return stack.enter_context(client)

        yield connect


@pytest.fixture
def service(open_service: Callable[..., ServiceClient], environment: dict[str, str]) -> ServiceClient:
    """A recognition service that hears this test's requests and says what the test tells it to."""
    return open_service(environment)


@pytest.fixture
def log() -> Iterator[Records]:
    """What children in this process log; errors that the test does not claim fail it."""
    with capture_logs() as captured:
        records = Records(captured)  # type: ignore[arg-type]
        yield records
    records.check()


@pytest.fixture
async def exchange(settings: Settings, log: Records) -> AsyncIterator[Exchange]:
    """The children in this process, one pass at a time."""
    assert log is not None
    async with open_exchange(settings) as exchange:
        yield exchange


@pytest.fixture
def start_daemon(environment: dict[str, str]) -> Iterator[StartDaemon]:
    """Starts daemons: `start_daemon(DEBUG="true")` on this test's servers, `start_daemon(env)` on others.

    More arguments follow `armcore-trio` in place of `run`. Each is killed at the end and its log checked.
    """
    with ExitStack() as stack:

        def start(base: dict[str, str] | None = None, *arguments: str, **variables: str) -> DaemonProcess:
            chosen = (environment if base is None else base) | variables
            return stack.enter_context(DaemonProcess(chosen, *arguments))

        yield start


@pytest.fixture
def link() -> Iterator[Callable[[int], Proxy]]:
    """Makes breakable links to a port: `link(nats_server.port)`."""
    with ExitStack() as stack:
        yield lambda port: stack.enter_context(Proxy(port))
