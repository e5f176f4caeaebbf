"""The environment becomes settings strictly, all faults are named at once, and no secret is ever shown (R7)."""

import base64
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

import attrs
import nkeys
import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from armcore_trio import settings as settings_module
from armcore_trio.cli import main
from armcore_trio.commands.check import report
from armcore_trio.errors import SettingsError
from armcore_trio.settings import CA_FILE, DSN, JWT, SEED, URL, Settings, load
from armcore_trio.values import Endpoint, LogFormat, NatsServer, Secret

TABULAR = "OPENBAO__NATS__NATS_TABULAR_REQUEST_SUBJECT"
IMAGE = "OPENBAO__NATS__NATS_IMAGE_REQUEST_SUBJECT"
RESULT = "OPENBAO__NATS__NATS_RESULT_SUBJECT"
BUCKET = "OPENBAO__S3__S3_BUCKET"
SUBJECTS = (TABULAR, IMAGE, RESULT)

BASE = {DSN: "postgresql://core:dbsecret@db/core"}

DEFAULTS: dict[str, object] = {
    "DEBUG": False,
    "LOG_FORMAT": LogFormat.JSON,
    "NATS_ENABLED": True,
    "OUTBOX_POLL_SECONDS": 5.0,
    "OUTBOX_BATCH_SIZE": 500,
    "ACK_TIMEOUT_SECONDS": 30.0,
    "OUTBOX_MAX_REPUBLISH": 3,
    "REPLY_TIMEOUT_SECONDS": 900.0,
    "WATCHDOG_PERIOD_SECONDS": 30.0,
    "INBOX_BATCH_SIZE": 500,
    "INBOX_MAX_BYTES": 262_144,
    "INBOX_BUFFER_MESSAGES": 20_000,
    "SHUTDOWN_GRACE_SECONDS": 20.0,
    "HEALTH_BIND": Endpoint("127.0.0.1", 8080),
    DSN: None,
    URL: (NatsServer("127.0.0.1", 4222, tls=False),),
    SEED: None,
    JWT: None,
    CA_FILE: None,
    TABULAR: "files.tabular_uploaded",
    IMAGE: "files.img_uploaded",
    RESULT: "files.tabular_parsed",
    BUCKET: "arm-ka",
}
VARIABLES = sorted(DEFAULTS)
BOOLEANS = ("DEBUG", "NATS_ENABLED")
SECONDS = (
    "OUTBOX_POLL_SECONDS",
    "ACK_TIMEOUT_SECONDS",
    "REPLY_TIMEOUT_SECONDS",
    "WATCHDOG_PERIOD_SECONDS",
    "SHUTDOWN_GRACE_SECONDS",
)
WHOLE = ("OUTBOX_BATCH_SIZE", "OUTBOX_MAX_REPUBLISH", "INBOX_BATCH_SIZE", "INBOX_MAX_BYTES", "INBOX_BUFFER_MESSAGES")

CANARY = "CANARY"


def values(settings: Settings) -> dict[str, object]:
    return {field.metadata["env"]: getattr(settings, field.name) for field in attrs.fields(Settings)}


def value(variable: str, text: str) -> object:
    return values(load({**BASE, variable: text}))[variable]


def refuse(environment: Mapping[str, str]) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        load(environment)
    return caught.value


def refusal(variable: str, text: str) -> str:
    """What is said of the one variable at fault."""
    problems = refuse({**BASE, variable: text}).problems
    assert list(problems) == [variable]
    return problems[variable]


def every_text(error: BaseException) -> str:
    """All that an exception can put into a log: its text, its repr, its traceback with chained causes."""
    return "\n".join([str(error), repr(error), *traceback.format_exception(error)])


def seed(prefix: int = nkeys.PREFIX_BYTE_USER, *, of: int = 1) -> str:
    return bytes(nkeys.encode_seed(bytes([of]) * 32, prefix)).decode()


def public_key(text: str) -> str:
    return bytes(nkeys.from_seed(bytearray(text.encode())).public_key).decode()


def jwt(subject: object, *, signature: str = "signature") -> str:
    parts = ({"typ": "JWT", "alg": "ed25519-nkey"}, {"name": "core", "sub": subject})
    encoded = (base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)
    return ".".join([*encoded, signature])


USER_SEED = seed()
USER_JWT = jwt(public_key(USER_SEED), signature="CANARY-JWT-SIGNATURE")


# --- defaults -------------------------------------------------------------------------------------------------------


@pytest.mark.req("R7", "S7.1")
def test_defaults() -> None:
    assert values(load(BASE)) == {**DEFAULTS, DSN: Secret(BASE[DSN])}


@pytest.mark.req("B29")
@pytest.mark.parametrize("empty", ["", " ", "\n", "\t\r\n"])
def test_an_empty_value_means_the_default(empty: str) -> None:
    others = [variable for variable in VARIABLES if variable not in SUBJECTS]
    assert load({**dict.fromkeys(others, empty), **BASE}) == load(BASE)


@pytest.mark.req("R7")
def test_variables_of_other_programs_are_ignored() -> None:
    assert load({**BASE, "PATH": "/bin", "OPENBAO__NATS__NATS_OTHER": "x", "debug": "maybe"}) == load(BASE)


@pytest.mark.req("S6.3")
def test_a_dsn_is_required_exactly_while_nats_is_enabled() -> None:
    assert refuse({}).problems == {DSN: "is required while NATS_ENABLED is true"}
    assert refuse({"NATS_ENABLED": "yes", DSN: ""}).problems == {DSN: "is required while NATS_ENABLED is true"}
    assert load({"NATS_ENABLED": "false"}).postgres_dsn is None
    assert list(refuse({"NATS_ENABLED": "maybe"}).problems) == ["NATS_ENABLED"]


# --- conversions ----------------------------------------------------------------------------------------------------


@pytest.mark.req("B29")
@pytest.mark.parametrize("variable", BOOLEANS)
@pytest.mark.parametrize(("text", "meant"), [
    ("true", True), ("1", True), ("yes", True), ("on", True), ("TRUE", True), ("On", True), ("false", False), ("0", False),
    ("no", False), ("off", False), ("False", False), (" no ", False),
])  # fmt: skip
def test_booleans(variable: str, text: str, meant: bool) -> None:
    assert value(variable, text) is meant


@pytest.mark.req("B29")
@pytest.mark.parametrize("variable", BOOLEANS)
@pytest.mark.parametrize(
    "text", ["2", "maybe", "y", "n", "t", "f", "None", "null", "1.0", "01", "١", "ｔｒｕｅ", "true false", "-1", "disabled"]
)
def test_booleans_outside_the_list_are_refused(variable: str, text: str) -> None:
    assert refusal(variable, text) == "must be one of true, 1, yes, on, false, 0, no, off"


@pytest.mark.req("R7")
def test_log_formats() -> None:
    assert value("LOG_FORMAT", "json") is LogFormat.JSON
    assert value("LOG_FORMAT", "console") is LogFormat.CONSOLE


@pytest.mark.req("R7")
@pytest.mark.parametrize("text", ["JSON", "text", "json,console"])
def test_other_log_formats_are_refused(text: str) -> None:
    assert refusal("LOG_FORMAT", text) == "must be one of json, console"


@pytest.mark.req("R7")
@pytest.mark.parametrize("variable", SECONDS)
@pytest.mark.parametrize(
    ("text", "meant"), [("1", 1.0), ("0.25", 0.25), ("0.01", 0.01), ("007", 7.0), ("1.0", 1.0), ("31536000", 31_536_000.0)]
)
def test_seconds_accept_fractions(variable: str, text: str, meant: float) -> None:
    found = value(variable, text)
    assert found == meant
    assert type(found) is float


@pytest.mark.req("B53", "B29")
@pytest.mark.parametrize("variable", SECONDS)
@pytest.mark.parametrize("text", [
    "-1", "nan", "NaN", "inf", "-inf", "Infinity", "1e999", "1e-9", "1e3", "٣", "1_000", "1,5", "1.", ".5", "+1", "5s", "0x10",
    "1 0", "1\n2", "9" * 400, "true",
])  # fmt: skip
def test_seconds_written_otherwise_are_refused(variable: str, text: str) -> None:
    assert refusal(variable, text).startswith("must be a number of seconds")


@pytest.mark.req("B53")
@pytest.mark.parametrize("variable", SECONDS)
@pytest.mark.parametrize("text", ["0", "0.0", "0.009", "0." + "0" * 500 + "1", "31536001", "999999999999"])
def test_seconds_out_of_range_are_refused(variable: str, text: str) -> None:
    assert refusal(variable, text) == "must lie between 0.01 and 31536000"


@pytest.mark.req("B29")
@pytest.mark.parametrize(("variable", "text", "meant"), [
    ("OUTBOX_BATCH_SIZE", "1", 1), ("OUTBOX_BATCH_SIZE", "10000", 10_000),
    ("OUTBOX_MAX_REPUBLISH", "0", 0), ("OUTBOX_MAX_REPUBLISH", "1000", 1_000),
    ("INBOX_BATCH_SIZE", "0500", 500), ("INBOX_MAX_BYTES", "1024", 1_024), ("INBOX_MAX_BYTES", "67108864", 67_108_864),
    ("INBOX_BUFFER_MESSAGES", "1", 1), ("INBOX_BUFFER_MESSAGES", "1000000", 1_000_000),
])  # fmt: skip
def test_whole_numbers(variable: str, text: str, meant: int) -> None:
    found = value(variable, text)
    assert found == meant
    assert type(found) is int


@pytest.mark.req("B29", "B53")
@pytest.mark.parametrize("variable", WHOLE)
@pytest.mark.parametrize(
    "text", ["1.9", "1.0", "1_000", "٣", "３", "²", "-1", "+1", "1e3", "nan", "inf", "0x10", "1 000", "ten", "None", "9" * 5_000]
)
def test_whole_numbers_written_otherwise_are_refused(variable: str, text: str) -> None:
    assert refusal(variable, text).startswith("must be a whole number")


@pytest.mark.req("B53")
@pytest.mark.parametrize(("variable", "text", "problem"), [
    ("OUTBOX_BATCH_SIZE", "0", "must lie between 1 and 10000"),
    ("OUTBOX_BATCH_SIZE", "10001", "must lie between 1 and 10000"),
    ("OUTBOX_MAX_REPUBLISH", "1001", "must lie between 0 and 1000"),
    ("INBOX_BATCH_SIZE", "0", "must lie between 1 and 10000"),
    ("INBOX_MAX_BYTES", "0", "must lie between 1024 and 67108864"),
    ("INBOX_MAX_BYTES", "1023", "must lie between 1024 and 67108864"),
    ("INBOX_BUFFER_MESSAGES", "0", "must lie between 1 and 1000000"),
    ("INBOX_BUFFER_MESSAGES", "1000001", "must lie between 1 and 1000000"),
])  # fmt: skip
def test_whole_numbers_out_of_range_are_refused(variable: str, text: str, problem: str) -> None:
    assert refusal(variable, text) == problem


@pytest.mark.req("R7", "B53")
def test_every_bad_variable_is_named_at_once() -> None:
    bad = {
        "DEBUG": "maybe",
        "LOG_FORMAT": "xml",
        "NATS_ENABLED": "2",
        **dict.fromkeys(SECONDS, "nan"),
        **dict.fromkeys(WHOLE, "-1"),
        "HEALTH_BIND": "localhost",
        DSN: "host",
        URL: "http://nats",
        SEED: "SUCANARY",
        JWT: "CANARY",
        CA_FILE: "/nonexistent/ca.pem",
        **dict.fromkeys(SUBJECTS, "a.>"),
    }
    error = refuse(bad)
    assert sorted(error.problems) == sorted(set(VARIABLES) - {BUCKET})
    assert all(f"{variable}: " in str(error) for variable in bad)


# --- subjects -------------------------------------------------------------------------------------------------------


@pytest.mark.req("S7.2")
def test_subjects_are_taken_as_given() -> None:
    settings = load(
        {**BASE, TABULAR: "test.files.tabular_uploaded", IMAGE: "test.files.img_uploaded", RESULT: "test.files.tabular_parsed"}
    )
    assert settings.subjects == {
        "tabular_request": "test.files.tabular_uploaded",
        "image_request": "test.files.img_uploaded",
        "result": "test.files.tabular_parsed",
    }
    assert settings.request_subjects == {"tabular": "test.files.tabular_uploaded", "image": "test.files.img_uploaded"}


@pytest.mark.req("S7.1")
def test_subjects_shown_by_default() -> None:
    assert load(BASE).subjects == {
        "tabular_request": "files.tabular_uploaded",
        "image_request": "files.img_uploaded",
        "result": "files.tabular_parsed",
    }


@pytest.mark.req("S7.3", "R7")
@pytest.mark.parametrize("variable", SUBJECTS)
@pytest.mark.parametrize(("text", "problem"), [
    ("files.>", "must not hold a wildcard (* or >)"),
    (">", "must not hold a wildcard (* or >)"),
    ("files.*.x", "must not hold a wildcard (* or >)"),
    ("files.x*", "must not hold a wildcard (* or >)"),
    ("files..x", "must not hold an empty token"),
    (".files", "must not hold an empty token"),
    ("files.", "must not hold an empty token"),
    (".", "must not hold an empty token"),
    ("", "must not be empty: leave the variable out to have its default"),
    (" ", "must not hold white space"),
    ("\n", "must not hold white space"),
    (" files.x", "must not hold white space"),
    ("files.x ", "must not hold white space"),
    ("files.x\n", "must not hold white space"),
    ("files.x\r\n", "must not hold white space"),
    ("\ufefffiles.x", "must not hold white space"),
    ("files.\u200bx", "must not hold white space"),
    ("files. x", "must not hold white space"),
    ("files.a b", "must not hold white space"),
    ("files.a\tb", "must not hold white space"),
    ("files.a\r\nPUB x", "must not hold white space"),
    ("files.a\u00a0b", "must not hold white space"),
    ("files.a\u2028b", "must not hold white space"),
    ("files.a\0b", "must not hold white space"),
    ("files.a\x7fb", "must not hold white space"),
])  # fmt: skip
def test_subject_rules(variable: str, text: str, problem: str) -> None:
    assert refusal(variable, text) == problem


@pytest.mark.req("S7.3")
@pytest.mark.parametrize(("given", "named"), [
    ({RESULT: "files.tabular_uploaded"}, {RESULT: f"is the same subject as {TABULAR}"}),
    ({RESULT: "files.img_uploaded"}, {RESULT: f"is the same subject as {IMAGE}"}),
    ({IMAGE: "files.tabular_uploaded"}, {IMAGE: f"is the same subject as {TABULAR}"}),
    ({TABULAR: "x", IMAGE: "x"}, {IMAGE: f"is the same subject as {TABULAR}"}),
    ({TABULAR: "files.tabular_parsed"}, {RESULT: f"is the same subject as {TABULAR}"}),
    (dict.fromkeys(SUBJECTS, "x"), {IMAGE: f"is the same subject as {TABULAR}", RESULT: f"is the same subject as {TABULAR}"}),
])  # fmt: skip
def test_subjects_differ_from_each_other(given: dict[str, str], named: dict[str, str]) -> None:
    assert refuse({**BASE, **given}).problems == named


@pytest.mark.req("S7.3")
def test_a_bad_subject_is_not_also_compared_by_its_default() -> None:
    assert list(refuse({**BASE, TABULAR: "a.*", RESULT: "files.tabular_uploaded"}).problems) == [TABULAR]


@pytest.mark.req("R7")
@pytest.mark.parametrize("variable", [*SUBJECTS, BUCKET])
def test_text_that_cannot_be_written_as_utf8_is_refused(variable: str) -> None:
    """An environment may hold any bytes; Python shows undecodable ones as lone surrogates, which no answer can carry."""
    assert list(refuse({**BASE, variable: os.fsdecode(b"files.\xff")}).problems) == [variable]


# --- health address -------------------------------------------------------------------------------------------------


@pytest.mark.req("B39")
@pytest.mark.parametrize(("text", "host", "port", "shown"), [
    ("10.0.0.1:8080", "10.0.0.1", 8080, "10.0.0.1:8080"),
    ("localhost:1", "localhost", 1, "localhost:1"),
    ("127.0.0.1:0", "127.0.0.1", 0, "127.0.0.1:0"),
    ("127.0.0.1:65535", "127.0.0.1", 65535, "127.0.0.1:65535"),
    ("[::1]:0", "::1", 0, "[::1]:0"),
    ("[::]:8080", "::", 8080, "[::]:8080"),
    ("health.internal:80", "health.internal", 80, "health.internal:80"),
])  # fmt: skip
def test_health_bind(text: str, host: str, port: int, shown: str) -> None:
    assert value("HEALTH_BIND", text) == Endpoint(host, port)
    assert str(Endpoint(host, port)) == shown


@pytest.mark.req("B39")
@pytest.mark.parametrize("text", [
    "localhost", "127.0.0.1:99999", "127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:", ":8080", "8080", "127.0.0.1:80a",
    "127.0.0.1:٣", "127.0.0.1: 80", "127.0.0.1:000080", "::1", "::1:8080", "[::1]", "[::1]8080", "[]:80", "[nonsense]:80",
    "http://127.0.0.1:80", "127.0.0.1:80/x",
])  # fmt: skip
def test_a_malformed_health_bind_is_refused(text: str) -> None:
    refusal("HEALTH_BIND", text)


@pytest.mark.req("B39")
@pytest.mark.parametrize("text", ["a b:80", "unix:80", "fd://:3", "*:80", "a/b:80", "host\udcff:80"])
def test_what_is_no_host_is_refused(text: str) -> None:
    """`unix:` and `fd:` would be addresses of another kind to the server underneath."""
    refusal("HEALTH_BIND", text)


@pytest.mark.req("B28")
def test_a_malformed_health_bind_is_named_without_its_value() -> None:
    assert CANARY not in refusal("HEALTH_BIND", "[CANARY]:80")


# --- NATS addresses -------------------------------------------------------------------------------------------------


@pytest.mark.req("R7")
@pytest.mark.parametrize(("text", "servers"), [
    ("nats://a:1", [NatsServer("a", 1, tls=False)]),
    ("a", [NatsServer("a", 4222, tls=False)]),
    ("a:5222", [NatsServer("a", 5222, tls=False)]),
    ("tls://a", [NatsServer("a", 4222, tls=True)]),
    ("nats://a/", [NatsServer("a", 4222, tls=False)]),
    ("NATS://A:1", [NatsServer("a", 1, tls=False)]),
    ("nats://[::1]:4223", [NatsServer("::1", 4223, tls=False)]),
    ("tls://[fd00::1]", [NatsServer("fd00::1", 4222, tls=True)]),
    ("nats://a:1, tls://b:2 ,c", [NatsServer("a", 1, tls=False), NatsServer("b", 2, tls=True), NatsServer("c", 4222, tls=False)]),
    ("nats://u:p@a", [NatsServer("a", 4222, tls=False, user=Secret("u"), password=Secret("p"))]),
    ("nats://u%40x:p%3A%2F%2C%40@a:1", [NatsServer("a", 1, tls=False, user=Secret("u@x"), password=Secret("p:/,@"))]),
    ("nats://token@a", [NatsServer("a", 4222, tls=False, user=Secret("token"))]),
    ("tls://u:p@[::1]:9", [NatsServer("::1", 9, tls=True, user=Secret("u"), password=Secret("p"))]),
])  # fmt: skip
def test_nats_urls(text: str, servers: list[NatsServer]) -> None:
    assert value(URL, text) == tuple(servers)


@pytest.mark.req("R7")
def test_a_nats_server_is_shown_without_its_credentials() -> None:
    (server,) = load({**BASE, URL: "tls://CANARY:CANARY@[::1]:4223"}).nats_url
    assert str(server) == "tls://[::1]:4223"
    assert CANARY not in repr(server)


@pytest.mark.req("R7")
@pytest.mark.parametrize("text", [
    "http://a", "ws://a", "nats://", "nats:///x", "nats://:4222", "nats://a:0", "nats://a:65536", "nats://a:-1", "nats://a:x",
    "nats://a:٣", "nats://a:4222/path", "nats://a?x=1", "nats://[::1", "a,,b", "a,", ",", "nats://a:1 b:2:3",
])  # fmt: skip
def test_bad_nats_urls_are_refused(text: str) -> None:
    assert refusal(URL, text) == "must be nats://host:port or tls://host:port, several apart by commas"


@pytest.mark.req("R7", "B28")
@pytest.mark.parametrize(
    "text", ["nats://CANARY#x@a:4222", "nats://u:42#CANARY@a:4222", "nats://a#x", "nats://:CANARY@a", "nats://a b"]
)
def test_credentials_not_percent_encoded_are_refused_and_not_taken_for_a_host(text: str) -> None:
    assert CANARY not in refusal(URL, text)


# --- credentials ----------------------------------------------------------------------------------------------------


@pytest.mark.req("R6", "B21")
@pytest.mark.parametrize("end", ["", "\n", "\r\n", " \n\n"])
def test_line_ends_around_a_seed_and_a_jwt_are_trimmed(end: str) -> None:
    settings = load({**BASE, SEED: USER_SEED + end, JWT: USER_JWT + end})
    assert settings.nats_seed == Secret(USER_SEED)
    assert settings.nats_jwt == Secret(USER_JWT)


@pytest.mark.req("B21")
@pytest.mark.parametrize(("text", "problem"), [
    (USER_SEED.lower(), "must be the seed of a user (SU…)"),
    (seed(nkeys.PREFIX_BYTE_ACCOUNT), "must be the seed of a user (SU…)"),
    (seed(nkeys.PREFIX_BYTE_OPERATOR), "must be the seed of a user (SU…)"),
    (seed(nkeys.PREFIX_BYTE_SERVER), "must be the seed of a user (SU…)"),
    (public_key(USER_SEED), "must be the seed of a user (SU…)"),
    ("CANARY", "must be the seed of a user (SU…)"),
    ("SUCANARY", "is not a valid nkey seed"),
    ("SU", "is not a valid nkey seed"),
    (USER_SEED[:-1], "is not a valid nkey seed"),
    (USER_SEED[:20] + USER_SEED[21] + USER_SEED[20] + USER_SEED[22:], "is not a valid nkey seed"),
    (USER_SEED[:20] + "\n" + USER_SEED[20:], "is not a valid nkey seed"),
    ("SU\udcff" + USER_SEED[3:], "is not UTF-8 text"),
])  # fmt: skip
def test_impossible_seeds_are_refused_at_start(text: str, problem: str) -> None:
    assert refusal(SEED, text) == problem


@pytest.mark.req("B21")
@pytest.mark.parametrize("text", [
    "CANARY", "a.b", "a.b.c", "a.b.c.d", "a.!!!.c", "a.é.c", jwt(public_key(seed(nkeys.PREFIX_BYTE_ACCOUNT))),
    jwt(None), jwt(5), jwt(["U"]),
    "a." + base64.urlsafe_b64encode(b'["U"]').decode() + ".c", "a." + base64.urlsafe_b64encode(b"\xff\xfe").decode() + ".c",
])  # fmt: skip
def test_what_is_no_users_jwt_is_refused(text: str) -> None:
    problems = refuse({**BASE, SEED: USER_SEED, JWT: text}).problems
    assert problems == {JWT: "is not the JWT of a user"}


@pytest.mark.req("B21")
def test_an_absurdly_nested_jwt_is_refused() -> None:
    claims = base64.urlsafe_b64encode(b"[" * 100_000).decode()
    assert list(refuse({**BASE, SEED: USER_SEED, JWT: f"a.{claims}.c"}).problems) == [JWT]


@pytest.mark.req("B21")
def test_a_pair_that_cannot_work_is_refused() -> None:
    assert load({**BASE, SEED: USER_SEED}).nats_jwt is None
    assert refuse({**BASE, JWT: USER_JWT}).problems == {JWT: f"is of no use without {SEED}"}
    assert refuse({**BASE, JWT: USER_JWT, SEED: seed(of=2)}).problems == {JWT: f"was issued for another key than {SEED} holds"}
    assert list(refuse({**BASE, JWT: USER_JWT, SEED: "SUCANARY"}).problems) == [SEED]


@pytest.mark.req("R7")
def test_ca_file(tmp_path: Path) -> None:
    ca_file = tmp_path / "ca.pem"
    ca_file.write_text("certificate")
    assert load({**BASE, CA_FILE: str(ca_file), URL: "nats://a,tls://b"}).nats_ca_file == ca_file
    assert refuse({**BASE, CA_FILE: str(ca_file)}).problems == {CA_FILE: f"is of no use unless {URL} is tls://"}
    assert refuse({**BASE, CA_FILE: str(tmp_path / "none"), URL: "tls://b"}).problems == {
        CA_FILE: "cannot be read: No such file or directory"
    }
    assert refuse({**BASE, CA_FILE: str(tmp_path), URL: "tls://b"}).problems == {CA_FILE: "cannot be read: Is a directory"}
    assert list(refuse({**BASE, CA_FILE: str(ca_file), URL: "http://b"}).problems) == [URL]


@pytest.mark.req("R7")
@pytest.mark.parametrize(
    "text",
    ["postgresql://core:pw@db:5432/core?sslmode=require", "host=db user=core password='p w'", "dbname=core", "postgres://"],
)
def test_connection_strings(text: str) -> None:
    assert value(DSN, text) == Secret(text)


@pytest.mark.req("R7", "B28")
@pytest.mark.parametrize(
    "text", ["CANARY", "host=db CANARY", "host=db CANARY=1", "postgresql://u:CANARY%zz@h/", "mysql://u:CANARY@h/", "host='CANARY"]
)
def test_what_is_no_connection_string_is_refused(text: str) -> None:
    assert refusal(DSN, text) == "is not a PostgreSQL connection string"


@pytest.mark.req("R7")
@pytest.mark.parametrize(("text", "password"), [
    ("postgresql://u:p%40w@h/d", "p@w"), ("host=h password='a b'", "a b"),
    ("postgresql://u@h/d?password=q", "q"), ("host=h", None),
])  # fmt: skip
def test_the_secrets_for_the_log_to_cut_out(text: str, password: str | None) -> None:
    environment = {DSN: text, SEED: USER_SEED, JWT: USER_JWT, URL: "nats://us%40er:pa%3Ass@a,nats://token@b"}
    expected = {USER_SEED, USER_JWT, "pa:ss", "token"} | ({password} if password else set())
    assert set(load(environment).secrets) == expected


# --- secrets stay hidden --------------------------------------------------------------------------------------------

SECRETS = {
    DSN: "postgresql://core:CANARY-DSN@db/core",
    URL: "nats://CANARY-USER:CANARY-PASSWORD@a,tls://CANARY-TOKEN@b",
    SEED: USER_SEED,
    JWT: USER_JWT,
}
BAD = {"OUTBOX_POLL_SECONDS": "abc", "DEBUG": "maybe"}


def assert_hidden(text: str) -> None:
    assert CANARY not in text
    assert USER_SEED not in text
    assert USER_JWT not in text
    assert "CANARY" not in text.replace("\\", "")


@pytest.mark.req("S7.4", "B28")
def test_a_secret_hides_itself() -> None:
    secret = Secret(CANARY)
    assert secret.reveal() == CANARY
    assert repr(secret) == str(secret) == f"{secret}" == f"{secret!s:>8}" == "<hidden>"
    assert secret == Secret(CANARY)
    assert secret != CANARY
    assert len({secret, Secret(CANARY), Secret("other")}) == 2


@pytest.mark.req("S7.4")
def test_secrets_are_hidden_in_the_settings() -> None:
    settings = load(SECRETS)
    assert_hidden(repr(settings))
    assert_hidden(str(report(settings)))
    assert repr(settings).count("<hidden>") == 6
    assert [report(settings)[variable] for variable in (DSN, SEED, JWT)] == ["<hidden>"] * 3
    assert report(settings)[URL] == "nats://a:4222,tls://b:4222"


@pytest.mark.req("S7.4", "B28")
@pytest.mark.parametrize(
    "secrets", [SECRETS, dict.fromkeys((SEED, JWT, DSN, URL, CA_FILE), "CANARY://CANARY:CANARY@CANARY:CANARY")]
)
def test_secrets_are_hidden_in_the_error(secrets: dict[str, str]) -> None:
    error = refuse({**secrets, **BAD})
    assert {"OUTBOX_POLL_SECONDS", "DEBUG"} <= set(error.problems)
    assert_hidden(every_text(error))


@pytest.mark.req("B28")
@pytest.mark.parametrize("function", ["jwt_subject", "public_key"])
def test_secrets_are_hidden_after_a_fault_in_the_settings_code(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(text: str) -> str:
        raise KeyError(text)

    monkeypatch.setattr(settings_module, function, fault)
    assert_hidden(every_text(refuse({**SECRETS, **BAD})))


def invoke(*arguments: str, **environment: str) -> Result:
    unset = dict.fromkeys(VARIABLES)
    return CliRunner().invoke(main, list(arguments), env={**unset, **environment})


def output(result: Result) -> str:
    failure = "".join(traceback.format_exception(result.exception)) if result.exception else ""
    return result.output + result.stderr + failure


@pytest.mark.req("R7", "B28")
@pytest.mark.parametrize("log_format", ["json", "console"])
def test_check_names_every_bad_variable_and_exits_78(log_format: str) -> None:
    result = invoke("check", **SECRETS, **BAD, LOG_FORMAT=log_format)
    assert result.exit_code == 78
    assert result.stderr.splitlines() == [
        "DEBUG: must be one of true, 1, yes, on, false, 0, no, off",
        "OUTBOX_POLL_SECONDS: must be a number of seconds, such as 5 or 0.5",
    ]
    assert_hidden(output(result))


@pytest.mark.req("S7.4")
def test_check_shows_the_settings_in_force_without_secrets() -> None:
    plain, as_json = invoke("check", **SECRETS), invoke("check", "--json", **SECRETS)
    assert (plain.exit_code, as_json.exit_code) == (0, 0)
    assert [line.partition("=")[0] for line in plain.stdout.splitlines()] == list(DEFAULTS)
    assert json.loads(as_json.stdout) == {"settings": report(load(SECRETS)), "problems": {}}
    assert_hidden(output(plain) + output(as_json))


@pytest.mark.req("B28")
@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["check", "--help"], ["nonsense"]])
def test_help_shows_no_secret(arguments: list[str]) -> None:
    assert_hidden(output(invoke(*arguments, **SECRETS, **BAD)))


@pytest.mark.req("B28", "R7")
@pytest.mark.parametrize("command", [["probe"], ["retry", "3f2b8a54-6c1d-4e0f-9b7a-2d5c8e1f0a63"], ["simulate"], ["migrate"]])
def test_every_command_refuses_bad_settings_alike(command: list[str]) -> None:
    result = invoke(*command, **SECRETS, **BAD)
    assert result.exit_code == 78
    assert [line.partition(":")[0] for line in result.stderr.splitlines()] == sorted(BAD)
    assert_hidden(output(result))


@pytest.mark.req("R7", "S7.4", "B28")
@pytest.mark.parametrize("log_format", ["json", "console"])
def test_run_logs_every_bad_variable_in_one_json_line_and_exits_78(log_format: str) -> None:
    environment = {name: text for name, text in os.environ.items() if name not in VARIABLES}
    environment |= {**SECRETS, **BAD, SEED: "SUCANARY", "LOG_FORMAT": log_format}
    ended = subprocess.run(
        [sys.executable, "-m", "armcore_trio", "run"], env=environment, capture_output=True, text=True, timeout=30, check=False
    )
    assert ended.returncode == 78
    assert ended.stderr == ""
    (line,) = ended.stdout.splitlines()
    record = json.loads(line)
    assert record["event"] == "settings.invalid"
    assert sorted(record["problems"]) == sorted([*BAD, SEED])
    assert_hidden(line)


# --- properties -----------------------------------------------------------------------------------------------------

RELAXED = hypothesis_settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
PLAUSIBLE = [
    "0",
    "1",
    "1.5",
    "true",
    "off",
    "json",
    "console",
    "a.b",
    "a.b.c",
    "127.0.0.1:1",
    "[::1]:1",
    "nats://a",
    "tls://u:p@b:1",
    "host=h",
    USER_SEED,
    USER_JWT,
]
ENVIRONMENTS = st.dictionaries(st.sampled_from(VARIABLES), st.one_of(st.sampled_from(PLAUSIBLE), st.text(max_size=40)))


@pytest.mark.req("R7", "B29")
@RELAXED
@given(ENVIRONMENTS)
@example({DSN: "host=h\udcff"})
@example({"HEALTH_BIND": "[x]:1"})
def test_any_environment_loads_or_is_refused_by_name(environment: dict[str, str]) -> None:
    problems: dict[str, str] = {}
    try:
        settings = load(environment)
    except SettingsError as error:
        problems = error.problems
    else:
        assert len({*settings.subjects.values()}) == 3
        assert (settings.postgres_dsn is not None) or not settings.nats_enabled
        assert load(environment) == settings
        return
    assert problems
    assert set(problems) <= set(VARIABLES)
    assert all(problem and "\n" not in problem for problem in problems.values())


@pytest.mark.req("S7.4", "B28")
@RELAXED
@given(
    ENVIRONMENTS,
    st.dictionaries(st.sampled_from([DSN, SEED, JWT]), st.text(max_size=20).map(lambda text: f"CANARY{text}"), min_size=1),
)
def test_no_environment_makes_a_secret_show(environment: dict[str, str], secrets: dict[str, str]) -> None:
    error = refuse({**environment, **secrets})
    assert set(secrets) <= set(error.problems)
    assert CANARY not in every_text(error)
