"""`armcore-trio review-log`: a run's story for a person, and whether everything in it adds up (R9)."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from armcore_trio.cli import main
from armcore_trio.commands.review_log import review

Record = dict[str, Any]


def record(event: str, second: float = 0, **fields: Any) -> Record:
    return {"timestamp": f"2026-11-30T12:00:{second:06.3f}Z", "level": "info", "event": event, **fields}


def complete(**totals: int) -> Record:
    """The last record of an orderly run in which the subscriber counted this."""
    accounted = {name: count for name, count in totals.items() if name != "received"}
    book = {"received": totals.get("received", 0), **accounted}
    book["difference"] = book["received"] - sum(accounted.values())
    return record("shutdown.complete", 9, seconds=9.0, exit_code=0, totals={"subscriber": totals}, books={"subscriber": book})


STOP = [record("shutdown.started", 8, signal="SIGTERM"), record("shutdown.step", 8.5, step="inbox", seconds=0.5, finished=True)]


def run_of(*between: Record, end: Record | None = None, stop: Iterable[Record] = STOP) -> list[str]:
    records = [record("daemon.started", version="0.1.0"), *between, *stop, end or complete()]
    return [json.dumps(one) + "\n" for one in records]


@pytest.mark.req("R9")
def test_the_story_of_an_orderly_run() -> None:
    lines = run_of(
        record("task.restarting", 1, task="publisher", error="nats: gone"),
        record("task.recovered", 3, task="publisher", outage_seconds=2.0, attempts=3),
        record("inbox.applied", 4, count=2),
        record("inbox.late", 5),
        end=complete(received=3, applied=2, late=1),
    )
    found = review(lines)
    assert found.problems == []
    assert found.story == [
        "run 1: started 2026-11-30T12:00:00.000Z, version 0.1.0",
        "  12:00:08.000 shutdown.started signal=SIGTERM",
        "  12:00:01.000 publisher: nats: gone",
        "  12:00:03.000 publisher: back after 2.0 s, 3 attempts",
        "  subscriber: received 3, applied 2, late 1",
        "  books of subscriber: 3 received = 2 applied + 1 late",
        "  12:00:08.500 stop, inbox: 0.5 s",
        "  12:00:09.000 ended after 9.0 s, exit code 0",
    ]


@pytest.mark.req("R9")
@pytest.mark.parametrize(("lines", "problem"), [
    ([], "there is no daemon.started in this log"),
    (['{"timestamp": "2026-11-30T12:00:00Z", "eve\n', *run_of()], "line 1 is a record that was cut"),
    (['{"timestamp": "yesterday", "event": "x"}\n', *run_of()], "line 1 is a record that was cut"),
    (['{"timestamp": "' + "[" * 100_000, *run_of()], "line 1 is a record that was cut"),
    (run_of()[:-1], "run 1: the log ends without shutdown.complete: the process was killed, or still runs"),
    (run_of(end=complete() | {"exit_code": 70}), "run 1: exit code 70"),
    (
        run_of(record("inbox.applied", count=2), end=complete(received=3, applied=2)),
        "run 1: the books of subscriber differ by 1",
    ),
    (
        run_of(stop=[record("shutdown.step", step="inbox", seconds=5.0, finished=False)]),
        "run 1: the stop of inbox was cut short",
    ),
    (
        run_of(record("inbox.abandoned"), end=complete(received=1, abandoned=1)),
        "run 1: 1 received messages were abandoned",
    ),
    (
        run_of(record("inbox.applied", count=1), end=complete(received=2, applied=2)),
        "run 1: the records tell of 1 applied by subscriber, the totals of 2",
    ),
])  # fmt: skip
def test_what_does_not_add_up(lines: list[str], problem: str) -> None:
    assert review(lines).problems == [problem]


@pytest.mark.req("R9")
def test_each_run_in_a_log_is_told_on_its_own() -> None:
    found = review([*run_of()[:-1], *run_of()])
    assert [line for line in found.story if line.startswith("run")] == [
        "run 1: started 2026-11-30T12:00:00.000Z, version 0.1.0",
        "run 2: started 2026-11-30T12:00:00.000Z, version 0.1.0",
    ]
    assert found.problems == ["run 1: the log ends without shutdown.complete: the process was killed, or still runs"]


@pytest.mark.req("R9")
def test_the_command_reads_a_file_or_standard_input(tmp_path: Path) -> None:
    runner = CliRunner()
    good = "".join(run_of())
    piped = runner.invoke(main, ["review-log"], input=good)
    assert (piped.exit_code, piped.output.splitlines()[-1]) == (0, "everything adds up")
    (tmp_path / "log").write_text(good.replace('"exit_code": 0', '"exit_code": 69'), "utf-8")
    from_file = runner.invoke(main, ["review-log", str(tmp_path / "log"), "--json"])
    assert from_file.exit_code == 1
    assert json.loads(from_file.output)["problems"] == ["run 1: exit code 69"]


# --- journals (N13) ---------------------------------------------------------------------------------------------------


def _journal(line: str) -> list[str]:
    return [f"Nov 30 12:00:00 host armcore-trio[17]: {line}"]


def _cri(line: str) -> list[str]:
    text, stamp = line.rstrip("\n"), "2026-11-30T12:00:00.123456789+01:00 stdout"
    return [f"{stamp} P {text[:20]}\n", f"{stamp} P {text[20:40]}\n", f"{stamp} F {text[40:]}\n"]


def _docker(line: str) -> list[str]:
    return [
        json.dumps({"log": part, "stream": "stdout", "time": "2026-11-30T12:00:00Z"}) + "\n" for part in (line[:30], line[30:])
    ]


def _json(line: str) -> list[str]:
    text, rest = line.rstrip("\n"), {"_SYSTEMD_UNIT": "core.service", "__REALTIME_TIMESTAMP": "1"}
    return [
        json.dumps({"MESSAGE": text[:9], "CONTAINER_PARTIAL_MESSAGE": "true", **rest}) + "\n",
        json.dumps({"MESSAGE": list(text[9:].encode()), **rest}) + "\n",
    ]


FOREIGN = [
    "-- Boot 5c1f --\n",
    "systemd[1]: Started core.service.\n",
    '{"MESSAGE": "Stopping"}\n',
    "[" * 100_000 + "\n",
    "{[\n",
    "7\n",
]
FORMATS = [lambda line: [line], _journal, lambda line: [f"2026-11-30T12:00:00.1Z {line}"], _cri, _docker, _json]


@pytest.mark.req("N13")
@pytest.mark.parametrize("wrap", FORMATS)
def test_a_journal_is_read_as_it_comes(wrap: Callable[[str], list[str]]) -> None:
    records = run_of(record("inbox.applied", 4, count=2), end=complete(received=2, applied=2))
    first, *others = [part for line in records for part in wrap(line)]
    *whole, last = others
    found = review([*FOREIGN, first, *whole, last, *FOREIGN])
    assert found.problems == []
    assert f"{2 * len(FOREIGN)} lines are not the daemon's" in found.story
    plain = review(records)
    assert [line for line in found.story if line in plain.story] == plain.story


@pytest.mark.req("N13")
@pytest.mark.parametrize("between", ["", "systemd[1]: something\n"])
def test_a_record_that_a_runtime_cut_is_told_once(between: str) -> None:
    first, *others = run_of(record("inbox.late", 5, error="x" * 100), end=complete(received=1, late=1))
    cut = others.pop(0)
    found = review([first, cut[:90] + "\n", between, cut[90:], *others])
    assert found.problems == [
        "line 2 is a record that was cut",
        "run 1: the records tell of 0 late by subscriber, the totals of 1",
    ]


values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3))


@pytest.mark.req("R9")
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.too_slow])  # how busy the machine is proves nothing
@given(st.lists(st.dictionaries(st.sampled_from(["event", "timestamp", "count", "books", "totals", "task"]), values), max_size=6))
def test_no_log_makes_it_fail(records: list[Record]) -> None:
    found = review([*run_of()[:1], *(json.dumps(one) for one in records)])
    assert found.problems


@pytest.mark.req("R9")
@given(st.sampled_from(["shutdown.complete", "inbox.applied", "task.recovered", "shutdown.step"]), values, values)
def test_no_field_makes_it_fail(event: str, one: Any, other: Any) -> None:
    odd = record(event, count=one, totals=other, books=one, step=other, finished=one, error=other)
    review([*run_of()[:1], json.dumps(odd), *run_of()[1:]])
