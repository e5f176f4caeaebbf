"""The whole system on servers of its own, to watch: a mixed handful of jobs travels from row to result and is checked.

Daemon and simulator are processes of their own with an environment made from nothing. Everything but their logs is gone
afterwards, even if this program is killed.
"""

import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import ClassVar, LiteralString
from uuid import UUID, uuid4

import click
import trio
from attrs import field, frozen

from armcore_trio.borders import store
from armcore_trio.borders.database import bounded, connect
from armcore_trio.borders.migrate import migrate
from armcore_trio.commands.probe import ask
from armcore_trio.demo.embedded import EmbeddedError, Nats, Postgres
from armcore_trio.demo.server_process import ServerProcess
from armcore_trio.errors import DependencyDown, leaves
from armcore_trio.kit.simulate import SERVICES
from armcore_trio.protocol.lifecycle import FINAL, Status
from armcore_trio.settings import DSN, URL
from armcore_trio.values import Endpoint

LIMIT_SECONDS, _WATCH_SECONDS = 60, 45
_SETTINGS = {"OUTBOX_POLL_SECONDS": "0.1", "ACK_TIMEOUT_SECONDS": "0.75", "OUTBOX_MAX_REPUBLISH": "3"}
_ROWS_SHOWN = 40
_say = partial(print, sep="\n", flush=True)

_JOBS: LiteralString = """
SELECT job.id, job.status, file.status, coalesce(job.error_code, ''), coalesce(fact.failure_kind, ''),
       coalesce((job.metrics ->> 'republish_count')::integer, 0),
       job.created_at, job.published_at, job.started_at, job.finished_at
FROM recognition_job AS job
JOIN stored_file AS file ON file.id = job.file_id
LEFT JOIN quality_failure_fact AS fact ON fact.job_id = job.id
"""


@frozen
class _Job:
    """A job, its file's status and its failure fact. `instants` are its creation, first publication, ack and end."""

    status: str
    file_status: str
    error: str = ""
    fact: str = ""
    repeats: int | None = None
    instants: tuple[datetime | None, ...] = ()


_KINDS = (
    ("prices-{}.xlsx", "tabular", _Job("done", "PROCESSING")),
    ("silent-{}.xls", "tabular", _Job("dlq", "ERROR", "NO_ACK", "NO_ACK", 3)),
    ("scan-{}.png", "image", _Job("done", "PROCESSING")),
    ("needs_check-{}.csv", "tabular", _Job("needs_check", "PROCESSING")),
    ("error-{}.gif", "image", _Job("error", "ERROR", "UNSUPPORTED_FORMAT", "SERVICE_ERROR")),
    ("needs_check-{}.jpg", "image", _Job("needs_check", "PROCESSING")),
)


@frozen
class _Sample:
    file_name: str
    pipeline: str
    expected: _Job
    job_id: UUID = field(factory=uuid4)


class _Program(ServerProcess):
    """A command of ours as a process that ends with us. Its log stays."""

    arguments: ClassVar[Sequence[str]]
    _guardian_signal = "TERM"

    def __init__(self, environment: Mapping[str, str], directory: Path) -> None:
        super().__init__()
        self.log_path = directory / f"{self.name}.log"
        self._environment = {**environment, "HEALTH_BIND": f"127.0.0.1:{self.port}"}

    def end(self) -> int:
        """SIGTERM, if it still runs. Returns the exit code."""
        process = self._process
        assert process is not None
        self._end(signal.SIGTERM)
        return process.returncode

    @property
    def _log_path(self) -> Path:
        return self.log_path

    def _command(self) -> list[str | Path]:
        here = {"PYTHONPATH": Path(__file__).parents[2]}  # this very copy of the package
        variables = (f"{name}={value}" for name, value in (here | self._environment).items())
        return ["env", *variables, sys.executable, "-m", "armcore_trio", *self.arguments]


class _Daemon(_Program):
    name, arguments = "daemon", ("run",)

    def _answers(self) -> bool:
        return ask(Endpoint("127.0.0.1", self.port))[0]


class _Simulator(_Program):
    name, arguments = "simulator", ("simulate", "--delay", "0.6")

    def _answers(self) -> bool:
        return "simulator.listening" in self.log


@click.command("demo")
@click.option("--jobs", default=12, show_default=True, type=click.IntRange(1, 10_000), help="How many jobs to submit.")
def command(jobs: int) -> None:
    """The whole system on an embedded PostgreSQL and nats-server: watch jobs travel. Needs the extra `demo`."""
    sys.exit(demonstrate(jobs))


def demonstrate(jobs: int) -> int:
    """Submit so many jobs and watch them. 0 if each ended as it should, 1 if not, 69 without a server, 130 on Ctrl-C."""
    code, started = 1, time.monotonic()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have set it to be ignored
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.alarm(LIMIT_SECONDS)
    for name in [name for name in os.environ if name.startswith("PG")]:
        del os.environ[name]  # libpq would heed it
    try:
        with ExitStack() as stack:
            code = _demonstrate(stack, jobs)
    except* KeyboardInterrupt:
        late = time.monotonic() - started >= LIMIT_SECONDS
        code = 1 if late else 130
        print(f"\nnot finished within {LIMIT_SECONDS} s" if late else "", file=sys.stderr)
    except* (EmbeddedError, DependencyDown) as group:
        code = 69
        print(*leaves(group), sep="\n", file=sys.stderr)
    finally:
        signal.alarm(0)
    return code


def _demonstrate(stack: ExitStack, jobs: int) -> int:
    started = time.monotonic()
    postgres = stack.enter_context(Postgres(settings={"fsync": "off"}))
    nats = stack.enter_context(Nats())
    migrate(postgres.dsn())
    _say(f"PostgreSQL on port {postgres.port}, nats-server (without JetStream) on port {nats.port}")
    environment = {**_SETTINGS, DSN: postgres.dsn(), URL: nats.url}
    directory = Path(tempfile.mkdtemp(prefix="armcore-trio-demo-"))
    daemon = stack.enter_context(_Daemon(environment, directory))
    _say(f"daemon, http://127.0.0.1:{daemon.port}/healthcheck, log in {daemon.log_path}")
    simulator = stack.enter_context(_Simulator(environment, directory))
    _say(f"simulated {' and '.join(SERVICES.values())}, log in {simulator.log_path}", "")

    kinds = zip(range(1, jobs + 1), cycle(_KINDS), strict=False)
    samples = [_Sample(name.format(number), pipeline, expected) for number, (name, pipeline, expected) in kinds]
    left_seconds = max(0, started + _WATCH_SECONDS - time.monotonic())
    seen = trio.run(_watch, postgres.dsn(), samples, (simulator, daemon), left_seconds)
    exits = {program.name: program.end() for program in (simulator, daemon)}
    _say("", *_table(samples[:_ROWS_SHOWN], seen), f"... and {jobs - _ROWS_SHOWN} more" if jobs > _ROWS_SHOWN else "")
    problems = [line for sample in samples for line in _differences(sample, seen.get(sample.job_id))]
    problems += [f"the {name} ended with exit code {code}" for name, code in exits.items() if code]
    verdict = f"{len(problems)} differences" if problems else f"All {jobs} jobs ended as they should"
    _say(*problems[:_ROWS_SHOWN], f"{verdict} ({time.monotonic() - started:.1f} s).")
    return 1 if problems else 0


async def _watch(dsn: str, samples: Sequence[_Sample], programs: Sequence[_Program], seconds: float) -> dict[UUID, _Job]:
    """Submit the jobs and look until all are final, the time is up or a program has ended. Returns what was seen last."""
    seen: dict[UUID, _Job] = {}
    show = _Progress()
    with trio.move_on_after(seconds):
        async with connect(dsn, "armcore-trio demo") as connection, trio.open_nursery() as nursery:
            nursery.start_soon(_submit, dsn, samples)
            while all(program.running for program in programs):
                async with bounded("a look at the jobs"):
                    rows = await (await connection.execute(_JOBS)).fetchall()
                for job_id, status, file_status, error, fact, repeats, created, published, *later in rows:
                    first = seen[job_id].instants[1] if job_id in seen else None  # a repeat moves it
                    seen[job_id] = _Job(status, file_status, error, fact, repeats, (created, first or published, *later))
                show(Counter(job.status for job in seen.values()))
                if len(seen) == len(samples) and all(job.status in FINAL for job in seen.values()):
                    break
                await trio.sleep(0.1)
            nursery.cancel_scope.cancel()
    return seen


async def _submit(dsn: str, samples: Sequence[_Sample]) -> None:
    """One after the other within some two seconds; if they are many, some at once."""
    at_once = 1 + len(samples) // 200
    async with connect(dsn, "armcore-trio demo") as connection:
        for start in range(0, len(samples), at_once):
            async with bounded("submit"), connection.transaction():
                for sample in samples[start : start + at_once]:
                    values = {"file_name": sample.file_name, "pipeline": sample.pipeline, "content_type": None}
                    place = {"bucket": "arm-ka", "key": f"demo/{sample.file_name}"}
                    await store.submit(connection, job_id=sample.job_id, file_id=uuid4(), **values, **place)
            await trio.sleep(min(0.15, 2 * at_once / len(samples)))


class _Progress:
    """Counts by status: one line that changes on a terminal, elsewhere a line for each change."""

    def __init__(self) -> None:
        self._started, self._live, self._shown = time.monotonic(), sys.stdout.isatty(), Counter[str]()

    def __call__(self, counts: Counter[str]) -> None:
        states = [f"{status} {counts[status]}" for status in Status if counts[status] or status is not Status.TIMEOUT]
        line = f"{time.monotonic() - self._started:5.1f} s  {'  '.join(states)}"
        if self._live:
            print("\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1], end="", flush=True)
        elif counts != self._shown:
            _say(line)
        self._shown = counts


def _table(samples: Sequence[_Sample], seen: Mapping[UUID, _Job]) -> list[str]:
    heads = ["file", "pipeline", "expected", "ended", "error", "fact", "repeats", "publish", "ack", "final"]
    rows = [heads, *(_row(sample, seen.get(sample.job_id)) for sample in samples)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    shown = ("  ".join(f"{text:{'>' if at > 5 else '<'}{widths[at]}}" for at, text in enumerate(row)) for row in rows)
    return ["Milliseconds from queued to published, from there to the ack, from there to the end:", *shown]


def _row(sample: _Sample, job: _Job | None) -> list[str]:
    cells = [sample.file_name, sample.pipeline, sample.expected.status]
    if job is None:
        return [*cells, "missing", *[""] * 6]
    times, before = [], job.instants[0]
    for instant in job.instants[1:]:
        times.append(f"{(instant - before).total_seconds() * 1000:.0f}" if instant and before else "-")
        before = instant or before
    return [*cells, job.status, job.error, job.fact, str(job.repeats), *times]


def _differences(sample: _Sample, job: _Job | None) -> list[str]:
    if job is None:
        return [f"{sample.file_name}: not submitted"]
    names = ("status", "file_status", "error", "fact", "repeats")
    fields = ((name, getattr(job, name), getattr(sample.expected, name)) for name in names)
    wrong = ((name, found, due) for name, found, due in fields if due not in (None, found))
    return [f"{sample.file_name}: {name} is {found or 'none'}, not {due or 'none'}" for name, found, due in wrong]
