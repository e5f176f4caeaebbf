"""How long one message takes through a daemon that has nothing else to do: a process of its own with default settings."""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from uuid import uuid4

import psycopg

from tests.bench.context import Context
from tests.bench.exchange import NotOnce
from tests.bench.figures import Row, Target
from tests.bench.workload import insert, insert_jobs
from tests.support import envelopes
from tests.support.daemon import DaemonProcess
from tests.support.database import JobIds
from tests.support.responder import acknowledge
from tests.support.servers import RESULT_SUBJECT, TABULAR_SUBJECT, new_environment
from tests.support.service import Heard, ServiceClient

_RUNS = 3
_WAKE_SAMPLES, _ANSWER_SAMPLES, _WARM_UP = 200, 100, 10
_PAUSE_SECONDS = (0.02, 0.05)
_LIMIT_SECONDS = 10


def wake(dsn: str, url: str, samples: int) -> list[float]:
    """Seconds from just before an insert's commit is sent until its request reaches a subscriber, one after the other.

    Starts a daemon on this migrated database and stops it. Between two samples there is a short pause at random, in which
    the service's ack is applied.
    """
    environment = new_environment(dsn, url)
    service = _service(environment, url, environment[TABULAR_SUBJECT], acknowledge)
    with psycopg.connect(dsn) as connection, service as (_, arrivals):

        def prepare() -> Callable[[], None]:
            insert(connection, 1, "queued")
            return connection.commit

        return list(_samples(arrivals, prepare, samples))


def answered(dsn: str, url: str, samples: int) -> list[float]:
    """Seconds from a result's publication until the answer that its service asked for, which follows the commit.

    So the commit came sooner: this is the most it can have taken. Otherwise as `wake`.
    """
    reply = f"bench_{uuid4().hex}"
    with psycopg.connect(dsn) as connection:
        rows = insert_jobs(connection, samples + _WARM_UP, "processing")
    jobs = (JobIds(row.job_id, row.file_id) for row in rows)
    with _service(new_environment(dsn, url), url, reply) as (service, arrivals):

        def prepare() -> Callable[[], None]:
            job = next(jobs)
            return partial(service.send, envelopes.done(job), envelopes.result_id(job), reply=reply)

        return list(_samples(arrivals, prepare, samples))


def measure(context: Context) -> list[Row]:
    """Both, each several times."""
    wakes: list[list[float]] = []
    answers: list[list[float]] = []
    for run in range(_RUNS):
        wakes.append(wake(context.dsn, context.nats.url, _WAKE_SAMPLES))
        context.progress((run + 0.5) / _RUNS)
        answers.append(answered(context.dsn, context.nats.url, _ANSWER_SAMPLES))
        context.progress((run + 1) / _RUNS)
    return [
        Row("latency: insert to wire, p50", "ms", _percentiles(wakes, 50), target=Target("below", 5)),
        Row("latency: insert to wire, p99", "ms", _percentiles(wakes, 99), target=Target("below", 15)),
        Row("latency: result to answer after its commit, p50", "ms", _percentiles(answers, 50), target=Target("below", 5)),
    ]


@contextmanager
def _service(
    environment: Mapping[str, str], url: str, subject: str, then: Callable[[ServiceClient, Heard], None] = lambda *_: None
) -> Iterator[tuple[ServiceClient, SimpleQueue[float]]]:
    """A daemon, and a service that notes when messages come on the subject before it does what is to be done then."""
    arrivals: SimpleQueue[float] = SimpleQueue()

    def arrive(service: ServiceClient, message: Heard) -> None:
        arrivals.put(time.perf_counter())
        then(service, message)

    with DaemonProcess(environment) as daemon:
        daemon.wait_ok()
        with ServiceClient(url, subjects=[subject], result_subject=environment[RESULT_SUBJECT], on_message=arrive) as service:
            yield service, arrivals
        daemon.stop()


def _samples(arrivals: SimpleQueue[float], prepare: Callable[[], Callable[[], None]], samples: int) -> Iterator[float]:
    for sample in range(_WARM_UP + samples):
        time.sleep(random.uniform(*_PAUSE_SECONDS))
        if not arrivals.empty():
            raise NotOnce("something came twice")
        send = prepare()
        started = time.perf_counter()
        send()
        try:
            seconds = arrivals.get(timeout=_LIMIT_SECONDS) - started
        except Empty:
            raise NotOnce(f"nothing came within {_LIMIT_SECONDS} s") from None
        if sample >= _WARM_UP:
            yield seconds


def _percentiles(runs: list[list[float]], percent: int) -> list[float]:
    """One for each run, in milliseconds."""
    return [1000 * statistics.quantiles(run, n=100)[percent - 1] for run in runs]
