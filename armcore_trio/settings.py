"""The environment as frozen, checked values (R7). Every variable at fault is named in one go; no secret is ever shown.

A field's metadata carries the variable's name; its type decides how the text is converted, strictly. An empty value
means unset.
"""

import re
from base64 import urlsafe_b64decode
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from functools import partial
from ipaddress import ip_address
from json import loads
from pathlib import Path
from typing import Annotated, Any, NewType, TypeVar, get_args, get_origin
from urllib.parse import unquote, urlsplit

import nkeys
from attrs import Attribute, field, fields, frozen
from cattrs import ClassValidationError, Converter
from cattrs.gen import make_dict_structure_fn, override

from armcore_trio.database import check_dsn
from armcore_trio.errors import SettingsError

T = TypeVar("T")


class Secret:
    """A text that hides itself: `repr`, `str` and formatting show no more than that it is set."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The text itself, for the one call that needs it."""
        return self._text

    def __repr__(self) -> str:
        return "<hidden>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)


class LogFormat(StrEnum):
    """How a log line looks: one JSON object for machines, or text for a person at a terminal."""

    JSON = "json"
    CONSOLE = "console"


@frozen
class Bounds:
    """The least and greatest number a variable takes."""

    least: float
    greatest: float


@frozen
class Endpoint:
    """A host and a port to listen on; port 0 lets the system choose."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@frozen
class NatsServer:
    """One NATS URL, its parts apart so that logs can name the server without its credentials."""

    host: str
    port: int
    tls: bool
    user: Secret | None = None
    password: Secret | None = None

    def __str__(self) -> str:
        return f"{'tls' if self.tls else 'nats'}://{Endpoint(self.host, self.port)}"


Seconds = Annotated[float, Bounds(0.01, 31_536_000)]
BatchSize = Annotated[int, Bounds(1, 10_000)]
Subject = NewType("Subject", str)


def _env(name: str, default: Any = None) -> Any:
    return field(default=default, metadata={"env": name})


_NATS = "OPENBAO__NATS__NATS_"
DSN = "OPENBAO__POSTGRES__POSTGRES_DSN"
URL, SEED, JWT, CA_FILE = (f"{_NATS}{name}" for name in ("URL", "SEED", "JWT", "CA_FILE"))


@frozen
class Settings:
    """All the daemon can be told. Build it with `load`."""

    debug: bool = _env("DEBUG", default=False)
    log_format: LogFormat = _env("LOG_FORMAT", LogFormat.JSON)
    nats_enabled: bool = _env("NATS_ENABLED", default=True)
    outbox_poll_seconds: Seconds = _env("OUTBOX_POLL_SECONDS", 5.0)
    outbox_batch_size: BatchSize = _env("OUTBOX_BATCH_SIZE", 500)
    ack_timeout_seconds: Seconds = _env("ACK_TIMEOUT_SECONDS", 30.0)
    outbox_max_republish: Annotated[int, Bounds(0, 1_000)] = _env("OUTBOX_MAX_REPUBLISH", 3)
    reply_timeout_seconds: Seconds = _env("REPLY_TIMEOUT_SECONDS", 900.0)
    watchdog_period_seconds: Seconds = _env("WATCHDOG_PERIOD_SECONDS", 30.0)
    inbox_batch_size: BatchSize = _env("INBOX_BATCH_SIZE", 500)
    inbox_max_bytes: Annotated[int, Bounds(1_024, 67_108_864)] = _env("INBOX_MAX_BYTES", 262_144)
    inbox_buffer_messages: Annotated[int, Bounds(1, 1_000_000)] = _env("INBOX_BUFFER_MESSAGES", 20_000)
    shutdown_grace_seconds: Seconds = _env("SHUTDOWN_GRACE_SECONDS", 20.0)
    health_bind: Endpoint = _env("HEALTH_BIND", Endpoint("127.0.0.1", 8080))
    postgres_dsn: Secret | None = _env(DSN)
    nats_url: tuple[NatsServer, ...] = _env(URL, (NatsServer("127.0.0.1", 4222, tls=False),))
    nats_seed: Secret | None = _env(SEED)
    nats_jwt: Secret | None = _env(JWT)
    nats_ca_file: Path | None = _env(CA_FILE)
    tabular_request_subject: Subject = _env(f"{_NATS}TABULAR_REQUEST_SUBJECT", "files.tabular_uploaded")
    image_request_subject: Subject = _env(f"{_NATS}IMAGE_REQUEST_SUBJECT", "files.img_uploaded")
    result_subject: Subject = _env(f"{_NATS}RESULT_SUBJECT", "files.tabular_parsed")
    s3_bucket: str = _env("OPENBAO__S3__S3_BUCKET", "arm-ka")

    @property
    def subjects(self) -> dict[str, str]:
        """The subjects as `/healthcheck` and the log show them."""
        return {
            "tabular_request": self.tabular_request_subject,
            "image_request": self.image_request_subject,
            "result": self.result_subject,
        }

    @property
    def request_subjects(self) -> dict[str, str]:
        """Pipeline → the subject its requests go to."""
        return {"tabular": self.tabular_request_subject, "image": self.image_request_subject}

    @property
    def secrets(self) -> list[str]:
        """Every text that must not appear in any output, for the log's last line of defence."""
        urls = [secret for server in self.nats_url for secret in (server.user, server.password) if secret]
        dsn = [password] if self.postgres_dsn and (password := check_dsn(self.postgres_dsn.reveal())) else []
        return [secret.reveal() for secret in (self.nats_seed, self.nats_jwt, *urls) if secret] + dsn


def load(environment: Mapping[str, str]) -> Settings:
    """The settings in an environment. Raises `SettingsError` naming every variable at fault, without its value."""
    given = {name: text for name, env in _ENV.items() if (text := environment.get(env, "").strip())}
    problems: dict[str, str] = {}
    try:
        settings = _converter.structure(given, Settings)
    except ClassValidationError as group:
        for error, note in group.group_exceptions()[0]:
            problems[_ENV[note.name]] = str(error)
        good = {name: text for name, text in given.items() if _ENV[name] not in problems}
        settings = _converter.structure(good, Settings)
    for key, problem, cause in _conflicts(settings):
        if key not in problems and cause not in problems:
            problems[key] = problem
    if problems:
        raise SettingsError(problems) from None
    return settings


def _conflicts(settings: Settings) -> Iterator[tuple[str, str, str]]:
    """What no single variable shows: (variable, problem, the other variable it depends on)."""
    subjects: dict[str, str] = {}
    for name in ("tabular_request_subject", "image_request_subject", "result_subject"):
        subject, key = getattr(settings, name), _ENV[name]
        if other := subjects.get(subject):
            yield key, f"is the same subject as {other}", other
        subjects[subject] = key
    seed, jwt = settings.nats_seed, settings.nats_jwt
    if settings.nats_enabled and settings.postgres_dsn is None:
        yield DSN, "is required while NATS_ENABLED is true", "NATS_ENABLED"
    if jwt and not seed:
        yield JWT, f"is of no use without {SEED}", SEED
    if jwt and seed and _jwt_subject(jwt.reveal()) != _public_key(seed.reveal()):
        yield JWT, f"was issued for another key than {SEED} holds", SEED
    if settings.nats_ca_file and not any(server.tls for server in settings.nats_url):
        yield CA_FILE, f"is of no use unless {URL} is tls://", URL


def _number(of: Callable[[str], T], pattern: str, kind: str, bounds: Bounds) -> Callable[[str], T]:
    def convert(text: str) -> T:
        if not re.fullmatch(pattern, text, re.ASCII):
            raise ValueError(f"must be {kind}, such as {max(bounds.least, 1):g}")
        number = of(text)
        if not bounds.least <= number <= bounds.greatest:  # type: ignore[operator]
            raise ValueError(f"must lie between {bounds.least:g} and {bounds.greatest:g}")
        return number

    return convert


_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def _boolean(text: str) -> bool:
    if (value := _BOOLEANS.get(text.lower())) is None:
        raise ValueError("must be one of " + ", ".join(_BOOLEANS))
    return value


def _log_format(text: str) -> LogFormat:
    try:
        return LogFormat(text)
    except ValueError:
        raise ValueError("must be one of " + ", ".join(LogFormat)) from None


def _subject(text: str) -> Subject:
    if re.search(r"\s|[\x00-\x1f\x7f]", text):
        raise ValueError("must not hold white space")
    if "*" in text or ">" in text:
        raise ValueError("must not hold a wildcard (* or >)")
    if "" in text.split("."):
        raise ValueError("must not hold an empty token")
    return Subject(text)


def _endpoint(text: str) -> Endpoint:
    host, separator, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        ip_address(host)
    elif ":" in host:
        raise ValueError("must put an IPv6 address in brackets, such as [::1]:8080")
    if not separator or not host or not re.fullmatch("[0-9]{1,5}", port, re.ASCII) or int(port) > 65535:
        raise ValueError("must be host:port, such as 127.0.0.1:8080")
    return Endpoint(host, int(port))


def _nats_servers(text: str) -> tuple[NatsServer, ...]:
    return tuple(_nats_server(url.strip()) for url in text.split(","))


def _nats_server(url: str) -> NatsServer:
    try:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        port = 4222 if parts.port is None else parts.port
    except ValueError:
        parts, port = urlsplit(""), 0
    if parts.scheme not in {"nats", "tls"} or not parts.hostname or not port or parts.path.strip("/") or parts.query:
        raise ValueError("must be nats://host:port or tls://host:port, several apart by commas")
    user, password = (Secret(unquote(part)) if part else None for part in (parts.username, parts.password))
    return NatsServer(parts.hostname, port, parts.scheme == "tls", user, password)


def _dsn(text: str) -> Secret:
    check_dsn(text)
    return Secret(text)


def _seed(text: str) -> Secret:
    if not text.startswith("SU"):
        raise ValueError("must be the seed of a user (SU…)")
    try:
        _public_key(text)
    except Exception:  # noqa: BLE001 - nkeys raises its own, binascii's and TypeError; none may show the seed
        raise ValueError("is not a valid nkey seed") from None
    return Secret(text)


def _public_key(seed: str) -> str:
    return bytes(nkeys.from_seed(bytearray(seed.encode())).public_key).decode()


def _jwt(text: str) -> Secret:
    try:
        subject = _jwt_subject(text)
    except ValueError:
        subject = ""
    if not subject.startswith("U"):
        raise ValueError("is not the JWT of a user")
    return Secret(text)


def _jwt_subject(text: str) -> str:
    _header, claims, _signature = text.split(".")
    document = loads(urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
    return str(document.get("sub", "")) if isinstance(document, dict) else ""


def _readable_file(text: str) -> Path:
    path = Path(text)
    try:
        path.open("rb").close()
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    return path


_BY_FIELD: dict[str, Callable[[str], object]] = {
    "nats_url": _nats_servers,
    "postgres_dsn": _dsn,
    "nats_seed": _seed,
    "nats_jwt": _jwt,
    "nats_ca_file": _readable_file,
}
_BY_TYPE: dict[object, Callable[[str], object]] = {
    bool: _boolean,
    LogFormat: _log_format,
    Endpoint: _endpoint,
    Subject: _subject,
    str: str,
}


def _conversion(attribute: "Attribute[Any]") -> Callable[[str], object]:
    kind = attribute.type
    if get_origin(kind) is Annotated:
        base, bounds = get_args(kind)
        if base is int:
            return _number(int, "[0-9]{1,12}", "a whole number", bounds)
        return _number(float, r"[0-9]{1,12}(\.[0-9]+)?", "a number of seconds", bounds)
    return _BY_FIELD.get(attribute.name) or _BY_TYPE[kind]


def _structure(text: str, _: object, *, convert: Callable[[str], object]) -> object:
    return convert(text)


_ENV = {attribute.name: attribute.metadata["env"] for attribute in fields(Settings)}
_converter = Converter()
_conversions: Any = {a.name: override(struct_hook=partial(_structure, convert=_conversion(a))) for a in fields(Settings)}
_converter.register_structure_hook(Settings, make_dict_structure_fn(Settings, _converter, **_conversions))
