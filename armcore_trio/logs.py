"""The structured log: every line of stdout is one JSON object, whoever wrote it, and no line holds a secret.

structlog renders our own records; the standard library's loggers, warnings and uncaught exceptions end in the same
place. Secrets are cut out of every record's values, so no field and no library can leak one. No line is longer than
container runtimes leave whole (N12); `sink.py` writes them.
"""

import atexit
import io
import json
import logging
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, cast
from urllib.parse import quote

import structlog
from structlog.typing import EventDict, WrappedLogger

from armcore_trio.errors import describe
from armcore_trio.sink import Sink
from armcore_trio.values import LogFormat

Log = structlog.typing.FilteringBoundLogger

HIDDEN = "<hidden>"
_LEAST_SECRET = 6
LONGEST_LINE = 8192
"""Bytes of a line with its end. conmon and cri-o cut what is longer."""
_CUT = " … (cut)"
_FIXED = frozenset({"timestamp", "level", "event", "task"})


def configure(format: LogFormat, *, debug: bool, secrets: Iterable[str]) -> None:  # noqa: A002 - as the variable is called
    """Send every record of this process to stdout, one line each."""
    console = structlog.dev.ConsoleRenderer(colors=sys.stdout.isatty())
    structlog.configure(
        processors=[
            structlog.stdlib.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _flatten_exception,
            _Redactor(secrets),
            _Fitted(console if format is LogFormat.CONSOLE else _render_json),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG if debug else logging.INFO),
        logger_factory=_writer(),
        cache_logger_on_first_use=False,
    )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    logging.captureWarnings(capture=True)
    root = logging.getLogger()
    root.handlers = [_Bridge()]
    root.setLevel(logging.WARNING)
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)
    sys.unraisablehook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)


_sinks: list[Sink] = []


def _writer() -> Callable[..., Any]:
    """The sink of this process's stdout. What stands in for stdout without a descriptor (a test's) is written to directly."""
    try:
        descriptor = sys.stdout.fileno()
        sink = _sinks[0] if _sinks else Sink(descriptor, _tell_lost)
    except (AttributeError, OSError):  # no descriptor, or stdout is closed
        return structlog.WriteLoggerFactory(sys.stdout if sys.stdout is not None else io.StringIO())
    if not _sinks:
        _sinks.append(sink)
        atexit.register(sink.flush)
    return lambda *_: sink


def flush(seconds: float) -> None:
    """Have what was logged so far written, within so long (N03)."""
    for sink in _sinks:
        sink.flush(seconds)


def lines_lost() -> int:
    """How many lines the sink did not take since the start."""
    return sum(sink.lost for sink in _sinks)


def _tell_lost(count: int, why: str) -> str:
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return json.dumps({"timestamp": now, "level": "warning", "event": "log.lines_lost", "count": count, "error": why})


def get(**fields: object) -> Log:
    """A logger whose records carry these fields."""
    return cast("Log", structlog.get_logger(**fields))


def _flatten_exception(_: WrappedLogger, __: str, record: EventDict) -> EventDict:
    """An exception becomes fields: `error` names every cause in one line, `traceback` is a list of places."""
    error = record.pop("exc_info", None)
    if isinstance(error, BaseException):
        record.setdefault("error", describe(error))
        record["traceback"] = _places(error)
    return record


def _places(error: BaseException) -> list[str]:
    places = []
    trace = error.__traceback__
    while trace:
        code = trace.tb_frame.f_code
        places.append(f"{code.co_filename}:{trace.tb_lineno} {code.co_qualname}")
        trace = trace.tb_next
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            places += [f"  {place}" for place in _places(inner)]
    return places


def _render_json(_: WrappedLogger, __: str, record: EventDict) -> str:
    first = {name: record.pop(name) for name in ("timestamp", "level", "event")}
    return json.dumps({**first, **record}, default=str)


class _Fitted:
    """Renders a record in lines of at most `LONGEST_LINE`: a list is split over several, whose `count`s add up; a text is cut."""

    def __init__(self, render: Callable[[WrappedLogger, str, EventDict], Any]) -> None:
        self._render = render

    def __call__(self, logger: WrappedLogger, name: str, record: EventDict) -> str:
        return "\n".join(self._lines(logger, name, record))

    def _lines(self, logger: WrappedLogger, name: str, record: EventDict) -> Iterator[str]:
        line = str(self._render(logger, name, dict(record)))
        if _bytes(line) < LONGEST_LINE:
            yield line
            return
        longest = max((field for field in record if field not in _KEPT), key=lambda field: _bytes(_plain(record[field])))
        value = record[longest]
        if isinstance(value, list) and len(value) > 1 and record.get("count") == len(value):
            middle = len(value) // 2
            for part in value[:middle], value[middle:]:
                yield from self._lines(logger, name, {**record, longest: part, "count": len(part)})
        else:
            yield from self._lines(logger, name, {**record, longest: _shortened(value)})


_KEPT = frozenset({"timestamp", "level"})


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "backslashreplace"))


def _shortened(value: object) -> object:
    """About half of a value, marked as such; at last nothing."""
    if isinstance(value, list) and len(value) > 1:
        return [*value[: len(value) // 2], _CUT.strip()] if len(value) > 2 else value[:1]
    text = _plain(value).removesuffix(_CUT)
    return text[: len(text) // 2] + _CUT if len(text) > len(_CUT) else None


def _forms(secret: str) -> tuple[str, ...]:
    """How a secret may be written inside another text: plain, or quoted by Python, by JSON or for a URL."""
    quoted = repr(secret)[1:-1], json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]
    return secret, *quoted, quote(secret, safe="", errors="surrogatepass")


class _Redactor:
    """Makes every value plain JSON and cuts secrets out of it.

    Secrets of a few letters are left: they would blot out innocent text, ids above all.
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        forms = {form for secret in secrets if len(secret) >= _LEAST_SECRET for form in _forms(secret)}
        self._forms = sorted(forms, key=len, reverse=True)

    def __call__(self, _: WrappedLogger, __: str, record: EventDict) -> EventDict:
        return {name: value if name in _FIXED else self._clean(value) for name, value in record.items()}

    def _clean(self, value: object) -> object:
        if isinstance(value, dict):
            return {name: self._clean(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [self._clean(inner) for inner in value]
        if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
            return value
        text = str(value)
        for form in self._forms:
            text = text.replace(form, HIDDEN)
        return text


class _Bridge(logging.Handler):
    """The standard library's records as ours: event `library.<logger>`, the text in `message`."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except Exception as fault:  # noqa: BLE001 - a library that formats wrongly has said something all the same
            message = f"{record.msg} {record.args} ({type(fault).__name__})"
        log = get(message=" ".join(message.split()))
        error = record.exc_info[1] if record.exc_info else None
        level = "error" if record.levelno >= logging.ERROR else "warning" if record.levelno >= logging.WARNING else "info"
        getattr(log, level)(f"library.{record.name}", **({"exc_info": error} if error else {}))


def _log_uncaught(_: type[BaseException], error: BaseException | None, __: TracebackType | None) -> None:
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return
    get().critical("process.uncaught_exception", exc_info=error)
