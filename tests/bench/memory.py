"""Whether a daemon's memory grows with the jobs it has seen."""

import time
from pathlib import Path

import psycopg

from tests.bench.context import Context
from tests.bench.figures import Row, Target
from tests.bench.loaded import loaded_daemon, work
from tests.support.servers import new_environment

_AT_ONCE = 5000
_EARLY, _LATE = 10_000, 100_000
_SETTLE_SECONDS = 1.0


def measure(context: Context) -> list[Row]:
    """Resident memory of an idle daemon after a few jobs and after many."""
    resident: dict[int, float] = {}
    with psycopg.connect(context.dsn, autocommit=True) as connection:
        environment = new_environment(context.dsn, context.nats.url)
        with loaded_daemon(environment, context.nats.url) as daemon:
            for jobs in range(_AT_ONCE, _LATE + 1, _AT_ONCE):
                work(connection, _AT_ONCE)
                connection.execute("VACUUM recognition_job")  # nobody else does
                if jobs in (_EARLY, _LATE):
                    time.sleep(_SETTLE_SECONDS)
                    resident[jobs] = _resident_megabytes(daemon.pid)
                context.progress(jobs / _LATE)
    early, late = [resident[_EARLY]], [resident[_LATE]]
    return [
        Row(f"memory: RSS after {_LATE:,} jobs", "MB", late, f"after {_EARLY:,}", early, Target("below", 1.1)),
        Row("memory: RSS as it is then", "MB", late, target=Target("below", 100)),
    ]


def _resident_megabytes(pid: int) -> float:
    """As Linux tells it, in millions of bytes."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) * 1024 / 1e6
