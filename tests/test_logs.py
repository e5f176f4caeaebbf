"""Every line of stdout is one JSON object, whoever wrote it and whatever it says, and no line holds a secret."""

import json
import logging
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from typing import Any, NoReturn
from uuid import UUID

import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from armcore_trio import logs
from armcore_trio.errors import Dependency, DependencyDown
from armcore_trio.values import LogFormat, Secret

RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def restored_hooks() -> Iterator[None]:
    """`configure` changes the whole process; the tests of other modules shall not notice."""
    root, configuration = logging.getLogger(), structlog.get_config()
    handlers, level = root.handlers, root.level
    hooks = sys.excepthook, threading.excepthook, sys.unraisablehook
    yield
    sys.excepthook, threading.excepthook, sys.unraisablehook = hooks
    root.handlers = handlers
    root.setLevel(level)
    logging.captureWarnings(capture=False)
    structlog.configure(**configuration)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """The records written so far; each line must be JSON as the standard has it, and nothing may be on stderr."""
    out, err = capsys.readouterr()
    assert err == ""
    assert out.isascii()
    assert out == "" or out.endswith("\n")
    return [json.loads(line, parse_constant=refuse_constant) for line in out.split("\n")[:-1]]


def refuse_constant(name: str) -> NoReturn:
    raise AssertionError(f"{name} is not JSON")


def configure(*secrets: str, debug: bool = False, log_format: LogFormat = LogFormat.JSON) -> None:
    logs.configure(log_format, debug=debug, secrets=secrets)


# --- our own records --------------------------------------------------------------------------------------------------


@pytest.mark.req("B41")
def test_a_record(capsys: pytest.CaptureFixture[str]) -> None:
    configure()
    logs.get(task="publisher").warning("outbox.published", count=2, job_ids=["a", "b"], status=LogFormat.JSON, nothing=None)
    (record,) = lines(capsys)
    assert list(record)[:3] == ["timestamp", "level", "event"]
    assert record.pop("timestamp").endswith("Z")
    assert record == {
        "level": "warning",
        "event": "outbox.published",
        "task": "publisher",
        "count": 2,
        "job_ids": ["a", "b"],
        "status": "json",
        "nothing": None,
    }


@pytest.mark.req("R7")
@pytest.mark.parametrize(
    ("debug", "levels"),
    [(False, ["info", "warning", "error", "critical"]), (True, ["debug", "info", "warning", "error", "critical"])],
)
def test_debug_records_only_on_demand(debug: bool, levels: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    configure(debug=debug)
    for level in ("debug", "info", "warning", "error", "critical"):
        getattr(logs.get(), level)("x")
    assert [record["level"] for record in lines(capsys)] == levels


FORGED = 'x\n{"level":"info","event":"outbox.published"}'
NASTY = [
    FORGED,
    "a\r\nb",
    "\x1b[31mred\x1b[0m",
    "\0",
    "\ud800",
    "\udcff half \ude00",
    "\u2028\u2029\u0085",
    "\x7f\x9b",
    "é€😀",
    '"\\',
    "",
    " ",
    "x" * 1_500,
]


@pytest.mark.req("B41")
@pytest.mark.parametrize("text", NASTY)
def test_one_line_whatever_the_text(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    configure()
    logs.get(bound=text).info(text, field=text, nested={"a": [text]}, **{"a b": text})
    (record,) = lines(capsys)
    assert {key: record[key] for key in ("event", "bound", "field", "nested", "a b")} == {
        "event": text,
        "bound": text,
        "field": text,
        "nested": {"a": [text]},
        "a b": text,
    }


@pytest.mark.req("B41", "B24")
@pytest.mark.parametrize("value", [
    float("nan"), float("inf"), {1, 2}, b"\xff", object(), UUID(int=1), Secret("x"), (1, (2,)), 10**400,
    ValueError("x\ny"),
])  # fmt: skip
def test_one_line_whatever_the_value(value: object, capsys: pytest.CaptureFixture[str]) -> None:
    configure("a secret")
    logs.get().info("x", value=value)
    assert len(lines(capsys)) == 1


@pytest.mark.req("B41")
@RELAXED
@given(st.text(st.characters(), min_size=1), st.text(st.characters()), st.text(st.characters(), min_size=6))
def test_any_text_makes_one_line(capsys: pytest.CaptureFixture[str], event: str, text: str, secret: str) -> None:
    configure(secret)
    logs.get().info(event, text=text, both=f"{text}{secret}{text}")
    (record,) = lines(capsys)
    assert secret not in record["both"].replace(logs.HIDDEN, "")


# --- exceptions -------------------------------------------------------------------------------------------------------


def raised(error: BaseException) -> BaseException:
    """An exception with a traceback."""
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001 - groups of anything
        return caught


@pytest.mark.req("B41")
def test_an_exception_becomes_fields(capsys: pytest.CaptureFixture[str]) -> None:
    configure()
    logs.get().error("x", exc_info=raised(ValueError(FORGED)))
    (record,) = lines(capsys)
    assert record["error"] == 'ValueError: x {"level":"info","event":"outbox.published"}'
    (place,) = record["traceback"]
    assert place.startswith(__file__)
    assert place.endswith(" raised")
    assert "exc_info" not in record


@pytest.mark.req("B16", "B41")
def test_an_exception_group_becomes_one_line_with_its_causes(capsys: pytest.CaptureFixture[str]) -> None:
    configure()
    down = raised(DependencyDown(Dependency.NATS, "refused"))
    inner = raised(BaseExceptionGroup("inner", [down, raised(ValueError("a\nb")), raised(ValueError("a b"))]))
    logs.get().error("x", exc_info=raised(BaseExceptionGroup("outer", [inner, down])))
    (record,) = lines(capsys)
    assert record["error"] == "nats: refused | ValueError: a b"
    assert [len(place) - len(place.lstrip()) for place in record["traceback"]] == [0, 2, 4, 4, 4, 2]


# --- secrets ----------------------------------------------------------------------------------------------------------

SECRETS = [
    "SUACANARYCANARY",
    "pa ss\"word'",
    "back\\slash\\",
    "ünïcödé-canary",
    '{"json":1}',
    "longer-canary",
    "longer-canary-still",
]


@pytest.mark.req("R7", "S7.4", "B28")
@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize(
    "write", [str, repr, json.dumps, lambda text: repr({"a": text}), lambda text: json.dumps([text], ensure_ascii=False)]
)
@pytest.mark.parametrize("log_format", LogFormat)
def test_no_secret_in_any_form(secret: str, write: Any, log_format: LogFormat, capsys: pytest.CaptureFixture[str]) -> None:
    configure(*SECRETS, "", log_format=log_format)
    text = f"<{write(secret)}>"
    logs.get(bound=text).info("event", field=text, nested={"a": [{"b": text}]}, plain=[secret])
    logs.get().error("y", exc_info=raised(ValueError(secret)))
    logging.getLogger("library").error("%s", text)
    out = capsys.readouterr().out
    assert out.count(logs.HIDDEN) >= 6
    for form in {secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]}:
        assert form not in out


@pytest.mark.req("R7", "B41")
@pytest.mark.parametrize(
    "secret", ["1", "true", '"', ":", ",", "{", "info", "}\n{", '","', "level", "timestamp", "event", "hidden", "<hidden>"]
)
def test_redaction_never_breaks_the_line(secret: str, capsys: pytest.CaptureFixture[str]) -> None:
    configure(secret)
    logs.get().info("x", count=1, yes=True, text='a "b": {1}, true')
    (record,) = lines(capsys)
    assert (record["count"], record["yes"]) == (1, True)
    assert list(record) == ["timestamp", "level", "event", "count", "yes", "text"]


@pytest.mark.req("R7")
def test_a_longer_secret_is_cut_out_whole(capsys: pytest.CaptureFixture[str]) -> None:
    configure("longer-canary", "longer-canary-still")
    logs.get().info("x", text="longer-canary-still longer-canary")
    assert lines(capsys)[0]["text"] == "<hidden> <hidden>"


# --- what others write ------------------------------------------------------------------------------------------------


@pytest.mark.req("B41")
def test_the_standard_library_s_records(capsys: pytest.CaptureFixture[str]) -> None:
    configure()
    library = logging.getLogger("some.library")
    library.info("not of interest")
    library.warning("a\n%s", FORGED)
    library.error("with a cause", exc_info=raised(ValueError("x")))
    library.critical("no cause", exc_info=True)
    records = lines(capsys)
    assert [(record["level"], record["event"]) for record in records] == [
        ("warning", "library.some.library"),
        ("error", "library.some.library"),
        ("error", "library.some.library"),
    ]
    assert records[0]["message"] == 'a x {"level":"info","event":"outbox.published"}'
    assert records[1]["error"] == "ValueError: x"
    assert "error" not in records[2]


@pytest.mark.req("B41")
def test_a_library_that_logs_wrongly_is_neither_disturbed_nor_lost(capsys: pytest.CaptureFixture[str]) -> None:
    configure()
    logging.getLogger("clumsy").warning("%d items", "three")
    (record,) = lines(capsys)
    assert record["event"] == "library.clumsy"


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program that has configured its log with the secret `s3cret-canary`."""
    setup = """
        import logging, sys, threading, warnings
        from armcore_trio import logs
        from armcore_trio.values import LogFormat
        logs.configure(LogFormat(sys.argv[1]), debug=False, secrets=["s3cret-canary"])
    """
    code = textwrap.dedent(setup) + textwrap.dedent(program)
    arguments = [sys.executable, "-c", code, environment.pop("log_format", "json")]
    return subprocess.run(arguments, env=os.environ | environment, capture_output=True, text=True, timeout=30, check=False)


def records_of(ended: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert ended.stderr == ""
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.mark.req("B41")
def test_warnings_become_records() -> None:
    ended = run('warnings.warn("old\\nways s3cret-canary", DeprecationWarning)', PYTHONWARNINGS="default")
    (record,) = records_of(ended)
    assert (record["level"], record["event"]) == ("warning", "library.py.warnings")
    assert "DeprecationWarning: old ways <hidden>" in record["message"]


@pytest.mark.req("B41", "B28")
def test_an_uncaught_exception_is_one_record() -> None:
    ended = run('raise ExceptionGroup("g", [ValueError("a\\ns3cret-canary"), KeyError("b")])')
    (record,) = records_of(ended)
    assert ended.returncode == 1
    assert (record["level"], record["event"]) == ("critical", "process.uncaught_exception")
    assert record["error"] == "ValueError: a <hidden> | KeyError: 'b'"
    assert len(record["traceback"]) == 1


@pytest.mark.req("B41")
def test_an_uncaught_exception_in_a_thread_is_one_record() -> None:
    ended = run("""
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
        logs.get().info("done")
    """)
    record, done = records_of(ended)
    assert (ended.returncode, done["event"]) == (0, "done")
    assert record["error"] == "ZeroDivisionError: division by zero"


@pytest.mark.req("B41")
def test_an_exception_nobody_can_catch_is_one_record() -> None:
    ended = run("""
        class Clumsy:
            def __del__(self):
                raise ValueError("too late")
        Clumsy()
    """)
    (record,) = records_of(ended)
    assert (ended.returncode, record["error"]) == (0, "ValueError: too late")


@pytest.mark.req("B41", "B37")
@pytest.mark.parametrize("ending", ["sys.exit(0)", "threading.Thread(target=sys.exit).start()"])
def test_an_orderly_exit_is_silent(ending: str) -> None:
    ended = run(ending)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.req("B37")
def test_an_interrupt_by_keyboard_prints_no_traceback() -> None:
    ended = run("raise KeyboardInterrupt")
    assert (ended.stdout, ended.stderr) == ("", "")
    assert ended.returncode != 0


@pytest.mark.req("B41")
def test_records_are_ascii_whatever_the_locale() -> None:
    ended = run("logs.get().info('é\\ud800\\n😀')", PYTHONIOENCODING="ascii")
    assert records_of(ended)[0]["event"] == "é\ud800\n😀"


# --- console ----------------------------------------------------------------------------------------------------------


@pytest.mark.req("R7")
def test_the_console_format_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    configure(log_format=LogFormat.CONSOLE)
    logs.get(task="publisher").warning("outbox.published", count=2)
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("\n") == 1
    assert "\x1b" not in out
    assert out.split()[1:] == ["[warning", "]", "outbox.published", "count=2", "task=publisher"]


@pytest.mark.req("B41")
def test_the_console_format_keeps_an_exception_in_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure(log_format=LogFormat.CONSOLE)
    logs.get().error("x", exc_info=raised(ExceptionGroup("g", [ValueError("a\nb")])))
    out, _ = capsys.readouterr()
    assert out.count("\n") == 1
    assert "error='ValueError: a b'" in out


@pytest.mark.req("B41")
def test_text_that_cannot_be_encoded_does_not_end_the_program() -> None:
    ended = run("logs.get().info('x', text='\\ud800'); logs.get().info('y')", log_format="console")
    assert ended.returncode == 0
    assert len(ended.stdout.splitlines()) == 2


# --- the length of lines (N12) ----------------------------------------------------------------------------------------


@pytest.mark.req("N12")
@pytest.mark.parametrize("log_format", LogFormat)
def test_a_long_list_is_split_and_the_counts_add_up(log_format: LogFormat, capsys: pytest.CaptureFixture[str]) -> None:
    configure(log_format=log_format)
    ids = [str(UUID(int=number)) for number in range(1000)]
    logs.get().info("outbox.published", count=len(ids), job_ids=ids, note="n" * 2000)
    text = capsys.readouterr().out
    assert max(len(line) + 1 for line in text.splitlines()) <= 8192
    assert [text.count(one) for one in ids] == [1] * 1000
    if log_format is LogFormat.JSON:
        records = [json.loads(line) for line in text.splitlines()]
        assert {record["event"] for record in records} == {"outbox.published"}
        assert sum(record["count"] for record in records) == 1000
        assert [one for record in records for one in record["job_ids"]] == ids


@pytest.mark.req("N12")
@pytest.mark.parametrize(
    "fields",
    [
        {"error": "ж" * 100_000},
        {"error": "x" * 100_000, "traceback": ["y" * 300] * 300},
        {"problems": {str(number): "z" * 100 for number in range(500)}},
        {"job_ids": ["q" * 100_000], "count": 1},
        {"count": 3, "books": [[["w" * 9000]]]},
        {str(number): "v" * 90 for number in range(200)},
        {"number": 10**4000, "other": 10**4200},
    ],
)
def test_no_line_is_longer_than_runtimes_leave_whole(fields: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    configure()
    logs.get().info("x" * 9000 if "books" in fields else "an.event", **fields)
    (record,) = lines(capsys)
    assert len(json.dumps(record)) < 8192
    assert "(cut)" in json.dumps(record, ensure_ascii=False)


@pytest.mark.req("N12", "R7")
def test_a_secret_at_the_place_of_a_cut_stays_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    configure("canary-secret")
    for shift in range(0, 200, 3):
        logs.get().info("x", error="a" * (8000 + shift) + "canary-secret" * 300)
    assert "canary" not in capsys.readouterr().out
