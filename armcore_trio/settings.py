"""The environment as frozen, checked values (R7). Every variable at fault is named in one go; no secret is ever shown.

A field's metadata carries the variable's name and the conversion of its text. An empty value means unset and white space
around a value is dropped, save for the subjects, which are taken as they stand.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from attrs import field, fields, frozen
from cattrs import ClassValidationError, Converter
from cattrs.gen import make_dict_structure_fn, override

from armcore_trio.dsn import passwords
from armcore_trio.errors import SettingsError
from armcore_trio.values import (
    BadValue,
    Endpoint,
    LogFormat,
    NatsServer,
    Secret,
    boolean,
    dsn,
    endpoint,
    jwt,
    jwt_subject,
    log_format,
    nats_servers,
    public_key,
    readable_file,
    seconds,
    seed,
    subject,
    whole,
)


def _env(name: str, convert: Callable[[str], object], default: Any = None, *, verbatim: bool = False) -> Any:
    return field(default=default, metadata={"env": name, "convert": convert, "verbatim": verbatim})


def _subject(name: str, default: str) -> Any:
    return _env(f"{_NATS}{name}_SUBJECT", subject, default, verbatim=True)


def _structure(text: str, _: object, *, convert: Callable[[str], object]) -> object:
    if not text.isascii() and text.encode("utf-8", "replace").decode() != text:
        raise BadValue("is not UTF-8 text")
    return convert(text)


_NATS = "OPENBAO__NATS__NATS_"
DSN = "OPENBAO__POSTGRES__POSTGRES_DSN"
URL, SEED, JWT, CA_FILE = (f"{_NATS}{name}" for name in ("URL", "SEED", "JWT", "CA_FILE"))


@frozen
class Settings:
    """All the daemon can be told. Build it with `load`."""

    debug: bool = _env("DEBUG", boolean, default=False)
    log_format: LogFormat = _env("LOG_FORMAT", log_format, LogFormat.JSON)
    nats_enabled: bool = _env("NATS_ENABLED", boolean, default=True)
    outbox_poll_seconds: float = _env("OUTBOX_POLL_SECONDS", seconds, 5.0)
    outbox_batch_size: int = _env("OUTBOX_BATCH_SIZE", whole(1, 10_000), 500)
    ack_timeout_seconds: float = _env("ACK_TIMEOUT_SECONDS", seconds, 30.0)
    outbox_max_republish: int = _env("OUTBOX_MAX_REPUBLISH", whole(0, 1_000), 3)
    reply_timeout_seconds: float = _env("REPLY_TIMEOUT_SECONDS", seconds, 900.0)
    watchdog_period_seconds: float = _env("WATCHDOG_PERIOD_SECONDS", seconds, 30.0)
    inbox_batch_size: int = _env("INBOX_BATCH_SIZE", whole(1, 10_000), 500)
    inbox_max_bytes: int = _env("INBOX_MAX_BYTES", whole(1_024, 67_108_864), 262_144)
    inbox_buffer_messages: int = _env("INBOX_BUFFER_MESSAGES", whole(1, 1_000_000), 20_000)
    shutdown_grace_seconds: float = _env("SHUTDOWN_GRACE_SECONDS", seconds, 20.0)
    health_bind: Endpoint = _env("HEALTH_BIND", endpoint, Endpoint("127.0.0.1", 8080))
    postgres_dsn: Secret | None = _env(DSN, dsn)
    nats_url: tuple[NatsServer, ...] = _env(URL, nats_servers, (NatsServer("127.0.0.1", 4222, tls=False),))
    nats_seed: Secret | None = _env(SEED, seed)
    nats_jwt: Secret | None = _env(JWT, jwt)
    nats_ca_file: Path | None = _env(CA_FILE, readable_file)
    tabular_request_subject: str = _subject("TABULAR_REQUEST", "files.tabular_uploaded")
    image_request_subject: str = _subject("IMAGE_REQUEST", "files.img_uploaded")
    result_subject: str = _subject("RESULT", "files.tabular_parsed")
    s3_bucket: str = _env("OPENBAO__S3__S3_BUCKET", str, "arm-ka")

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
        urls = [server.password or server.user for server in self.nats_url]  # a user without a password is a token
        database = passwords(self.postgres_dsn.reveal()) if self.postgres_dsn else []
        return [secret.reveal() for secret in (self.nats_seed, self.nats_jwt, *urls) if secret] + database


def load(environment: Mapping[str, str], *, database: bool = True) -> Settings:
    """The settings in an environment. Raises `SettingsError` naming every variable at fault, without its value.

    `database` tells whether the DSN will be needed; if not, it is not even read.
    """
    given = _given(environment if database else {name: text for name, text in environment.items() if name != DSN})
    problems: dict[str, str] = {}
    try:
        settings = _converter.structure(given, Settings)
    except ClassValidationError as group:
        for error, note in group.group_exceptions()[0]:
            problems[_ENV[note.name]] = str(error) if isinstance(error, BadValue) else f"cannot be read ({type(error).__name__})"
        good = {name: text for name, text in given.items() if _ENV[name] not in problems}
        settings = _converter.structure(good, Settings)
    try:
        conflicts = [(key, problem) for key, problem, cause in _conflicts(settings) if cause not in problems]
    except Exception as fault:  # noqa: BLE001 - whatever it is, its text may hold a credential
        conflicts = [(JWT, f"cannot be checked ({type(fault).__name__})")]
    if database and settings.nats_enabled and settings.postgres_dsn is None and "NATS_ENABLED" not in problems:
        problems.setdefault(DSN, "is required while NATS_ENABLED is true")
    for key, problem in conflicts:
        problems.setdefault(key, problem)
    if problems:
        raise SettingsError(problems) from None
    return settings


def _given(environment: Mapping[str, str]) -> dict[str, str]:
    given = {}
    for attribute in fields(Settings):
        text = environment.get(attribute.metadata["env"])
        if text is not None and not attribute.metadata["verbatim"]:
            text = text.strip() or None
        if text is not None:
            given[attribute.name] = text
    return given


def _conflicts(settings: Settings) -> Iterator[tuple[str, str, str]]:
    """What no single variable shows: (variable, problem, the other variable it depends on)."""
    subjects: dict[str, str] = {}
    for name in ("tabular_request_subject", "image_request_subject", "result_subject"):
        chosen, key = getattr(settings, name), _ENV[name]
        if other := subjects.get(chosen):
            yield key, f"is the same subject as {other}", other
        subjects.setdefault(chosen, key)
    held, issued = settings.nats_seed, settings.nats_jwt
    if issued and not held:
        yield JWT, f"is of no use without {SEED}", SEED
    if issued and held and jwt_subject(issued.reveal()) != public_key(held.reveal()):
        yield JWT, f"was issued for another key than {SEED} holds", SEED
    if settings.nats_ca_file and not any(server.tls for server in settings.nats_url):
        yield CA_FILE, f"is of no use unless {URL} is tls://", URL


_ENV = {attribute.name: attribute.metadata["env"] for attribute in fields(Settings)}
_converter = Converter()
_conversions: Any = {
    attribute.name: override(struct_hook=partial(_structure, convert=attribute.metadata["convert"]))
    for attribute in fields(Settings)
}
_converter.register_structure_hook(Settings, make_dict_structure_fn(Settings, _converter, **_conversions))
