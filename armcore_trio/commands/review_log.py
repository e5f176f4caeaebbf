"""`armcore-trio review-log`: reads a daemon's log and tells what happened, for a person (R9).

Each run in the log is told on its own: start, outages, totals, the books, how the stop went. What does not add up is said
last: a run without an end, books that do not balance, records that contradict the totals, work abandoned, a step cut
short, an exit other than 0. A unit's journal holds other programs' lines too: those are counted, and no problem (N13).
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, TextIO

import click
from attrs import define, field

from armcore_trio.commands.common import REFUSED, as_json

Record = dict[str, Any]

# Which total each event must add up to: (task, total) by event; an event without `count` counts once.
_ADDS_TO = {
    "outbox.published": ("publisher", "published"),
    "outbox.republished": ("publisher", "republished"),
    "outbox.refused": ("publisher", "refused"),
    "outbox.dead_lettered": ("publisher", "dead_lettered"),
    "watchdog.timed_out": ("watchdog", "timed_out"),
    "inbox.applied": ("subscriber", "applied"),
    "inbox.duplicate": ("subscriber", "duplicate"),
    "inbox.late": ("subscriber", "late"),
    "inbox.ignored": ("subscriber", "ignored"),
    "inbox.invalid": ("subscriber", "invalid"),
    "inbox.unknown_job": ("subscriber", "unknown"),
    "inbox.abandoned": ("subscriber", "abandoned"),
}


@click.command("review-log")
@click.argument("log", type=click.File("r", encoding="utf-8", errors="backslashreplace"), default="-", metavar="[FILE]")
@as_json
def command(log: TextIO, as_json: bool) -> None:
    """Tell the story of a daemon's log (a file, or standard input). Exit 1 if something in it does not add up."""
    result = review(log)
    if as_json:
        click.echo(json.dumps({"story": result.story, "problems": result.problems}))
    else:
        for line in result.story:
            click.echo(line)
        for problem in result.problems or ["everything adds up"]:
            click.echo(f"! {problem}" if result.problems else problem)
    sys.exit(REFUSED if result.problems else 0)


@define
class Run:
    """One life of a daemon, from `daemon.started` to `shutdown.complete` or wherever the log ends."""

    records: list[Record] = field(factory=list)

    def named(self, *events: str) -> list[Record]:
        """Its records of these events, in order."""
        return [record for record in self.records if record["event"] in events]

    @property
    def end(self) -> Record | None:
        """Its last word, if it got to say it."""
        return next(iter(self.named("shutdown.complete")), None)


@define
class Review:
    """The story of a log as lines, and what in it does not add up."""

    story: list[str] = field(factory=list)
    problems: list[str] = field(factory=list)


def review(lines: Iterable[str]) -> Review:
    """Read a log, line by line. Never raises: what cannot be read is a problem to report."""
    result = Review()
    runs = list(_runs(lines, result))
    if not runs:
        result.problems.append("there is no daemon.started in this log")
    for number, run in enumerate(runs, 1):
        try:
            result.story += _tell(run, number)
            result.problems += [f"run {number}: {problem}" for problem in _problems(run)]
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            result.problems.append(f"run {number}: a record is not as this version writes it ({type(error).__name__})")
    return result


def _runs(lines: Iterable[str], result: Review) -> Iterator[Run]:
    run: Run | None = None
    foreign = 0
    for number, line in _whole(lines):
        start = line.find(_BEGIN)
        record = _record(line if start < 0 else line[start:])
        if record is None:
            if start >= 0:
                result.problems.append(f"line {number} is a record that was cut")
            foreign += start < 0
        elif record["event"] == "daemon.started":
            if run:
                yield run
            run = Run([record])
        elif run:
            run.records.append(record)
    if run:
        yield run
    if foreign:
        result.story.append(f"{foreign} lines are not the daemon's")


_BEGIN = '{"timestamp": "'
"""How each of our records begins, whatever a runtime puts before it."""
_CRI = re.compile(r"\S+ std(?:out|err) ([PF]) (.*)", re.DOTALL)


def _whole(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Each line that is not blank with its number, as the daemon wrote it: unpacked, and joined where a runtime had cut it."""
    parts = ""
    for number, line in enumerate(lines, 1):
        text, ends = _unpacked(line)
        parts += text
        if ends:
            if parts.strip():
                yield number, parts
            parts = ""
    if parts.strip():
        yield number, parts


def _unpacked(line: str) -> tuple[str, bool]:
    """What the daemon wrote of a line, and whether its line ends there.

    Known are the formats of `journalctl -o json`, Docker's json-file, and CRI, which Podman calls k8s-file.
    """
    if found := _CRI.match(line):
        text = found[2].rstrip("\n")
        return text, found[1] == "F"
    if line.startswith("{") and not line.startswith(_BEGIN):
        try:
            packed = json.loads(line)
        except (ValueError, RecursionError):
            return line, True
        message, written = packed.get("MESSAGE"), packed.get("log")
        if isinstance(message, list) and all(isinstance(one, int) and 0 <= one < 256 for one in message):
            message = bytes(message).decode("utf-8", "backslashreplace")  # what journald found unprintable
        if isinstance(message, str):
            return message, packed.get("CONTAINER_PARTIAL_MESSAGE") != "true"
        if isinstance(written, str):
            return written.removesuffix("\n"), written.endswith("\n")
    return line, True


def _record(text: str) -> Record | None:
    try:
        record = json.loads(text)
        datetime.fromisoformat(record["timestamp"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("event"), str) else None


def _tell(run: Run, number: int) -> Iterator[str]:
    first, end = run.records[0], run.end
    yield f"run {number}: started {first['timestamp']}, version {first.get('version')}"
    for record in run.named("health.listening", "migrate.done", "supervisor.gave_up", "shutdown.started"):
        yield f"  {_clock(record)} {record['event']}{_fields(record, 'url', 'revision', 'task', 'signal', 'error')}"
    yield from _outages(run)
    if end:
        for task, totals in end.get("totals", {}).items():
            yield f"  {task}: " + (", ".join(f"{name} {count}" for name, count in totals.items() if count) or "nothing to do")
        for task, book in end.get("books", {}).items():
            entered, *accounted = [(name, count) for name, count in book.items() if name != "difference"]
            parts = " + ".join(f"{count} {name}" for name, count in accounted if count) or "0"
            yield f"  books of {task}: {entered[1]} {entered[0]} = {parts}"
    for record in run.named("shutdown.step"):
        yield f"  {_clock(record)} stop, {record.get('step')}: {record.get('seconds')} s"
    if end:
        yield f"  {_clock(end)} ended after {end.get('seconds')} s, exit code {end.get('exit_code')}"


def _outages(run: Run) -> Iterator[str]:
    for record in run.named("task.restarting", "task.recovered"):
        cause = record.get("error") or f"back after {record.get('outage_seconds')} s, {record.get('attempts')} attempts"
        yield f"  {_clock(record)} {record.get('task')}: {cause}"


def _problems(run: Run) -> Iterator[str]:
    end = run.end
    if end is None:
        yield "the log ends without shutdown.complete: the process was killed, or still runs"
        return
    if end.get("exit_code") != 0:
        yield f"exit code {end.get('exit_code')}"
    for task, book in end.get("books", {}).items():
        if book.get("difference"):
            yield f"the books of {task} differ by {book['difference']}"
    for record in run.named("shutdown.step"):
        if not record.get("finished"):
            yield f"the stop of {record.get('step')} was cut short"
    if abandoned := run.named("inbox.abandoned"):
        yield f"{len(abandoned)} received messages were abandoned"
    yield from _contradictions(run, end)


def _contradictions(run: Run, end: Record) -> Iterator[str]:
    told: Counter[tuple[str, str]] = Counter()
    for record in run.named(*_ADDS_TO):
        told[_ADDS_TO[record["event"]]] += record.get("count", 1)
    for task, total in _ADDS_TO.values():
        claimed = end.get("totals", {}).get(task, {}).get(total, 0)
        if told[task, total] != claimed:
            yield f"the records tell of {told[task, total]} {total} by {task}, the totals of {claimed}"


def _clock(record: Record) -> str:
    return datetime.fromisoformat(record["timestamp"]).strftime("%H:%M:%S.%f")[:-3]


def _fields(record: Record, *names: str) -> str:
    return "".join(f" {name}={record[name]}" for name in names if record.get(name) is not None)
