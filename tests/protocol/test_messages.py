"""What a service sends becomes an envelope or a reason code, never an exception; what we send is valid by its schema."""

import json
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from uuid import UUID

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from armcore_trio.protocol import messages
from armcore_trio.protocol.lifecycle import Outcome
from armcore_trio.protocol.messages import (
    MAX_DEPTH,
    Envelope,
    Invalid,
    ObjectKey,
    Reason,
    RequestInvalid,
    Service,
    ServiceFailure,
    ServiceStatus,
    Source,
    build_request,
    decode,
)
from armcore_trio.resources import SCHEMAS

MAX_BYTES = 262_144
JOB = "3f2b8a54-6c1d-4e0f-9b7a-2d5c8e1f0a63"
FILE = "b7c9d2e0-1a34-4f56-8b90-0c1d2e3f4a5b"
GUIDE = (Path(__file__).parents[2] / "docs" / "service-guide.md").read_text("utf-8")
RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def done(**fields: object) -> dict[str, Any]:
    return {
        "schema_version": "1.0",
        "job_id": JOB,
        "status": "done",
        "service": {"name": "tabular-parser", "version": "2.3.1"},
        "result_s3": {"bucket": "arm-ka", "key": f"results/{FILE}/{JOB}/result.json"},
    } | fields


def failed(**error: object) -> dict[str, Any]:
    return without(done(status="error", error={"code": "X", "message": "why"} | error), "result_s3")


def without(document: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name not in names}


def encoded(document: object) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode()


def text(**fields: str) -> bytes:
    """An envelope with fields given as JSON text, for what `json.dumps` would not write."""
    plain = json.dumps(done())[:-1]
    return "".join([plain, *(f', "{name}": {value}' for name, value in fields.items()), "}"]).encode()


def message(inner: str) -> bytes:
    """An error whose message is given as the inside of a JSON string."""
    return json.dumps(failed(message="@@")).replace("@@", inner).encode()


def reason(data: bytes, max_bytes: int = MAX_BYTES) -> Reason:
    invalid = decode(data, max_bytes)
    assert isinstance(invalid, Invalid), invalid
    assert invalid.detail
    return invalid.reason


def accept(data: bytes, max_bytes: int = MAX_BYTES) -> Envelope:
    envelope = decode(data, max_bytes)
    assert isinstance(envelope, Envelope), envelope
    return envelope


def nested(levels: int, opening: str = "[", closing: str = "]") -> bytes:
    return text(metrics='{"k": ' + opening * levels + "1" + closing * levels + "}")


# --- decode: reason codes and their siblings --------------------------------------------------------------------------

VALID = encoded(done())
PADDED = VALID + b" " * (MAX_BYTES - len(VALID))


@pytest.mark.req("D4.6", "B22", "B23", "B24")
@pytest.mark.parametrize(
    ("code", "data"),
    [
        (Reason.EMPTY, b""),
        (Reason.TOO_LARGE, PADDED + b" "),
        (Reason.TOO_LARGE, b"[" * 10_000_000),
        (Reason.NOT_UTF8, message("é").decode().encode("latin-1")),
        (Reason.NOT_UTF8, VALID.decode().encode("utf-16")),
        (Reason.NOT_UTF8, b"\xff"),
        (Reason.NOT_UTF8, message("@").replace(b"@", b"\xed\xa0\x80")),
        (Reason.NOT_UTF8, message("@").replace(b"@", b"\xc0\x80")),
        (Reason.NOT_UTF8, message("@").replace(b"@", b"\xf4\x90\x80\x80")),
        (Reason.BYTE_ORDER_MARK, b"\xef\xbb\xbf" + VALID),
        (Reason.BYTE_ORDER_MARK, b"\xef\xbb\xbf"),
        (Reason.NOT_JSON, VALID.decode().encode("utf-16-le")),
        (Reason.NOT_JSON, VALID.decode().encode("utf-32-be")),
        (Reason.NOT_JSON, b" "),
        (Reason.NOT_JSON, b"x"),
        (Reason.NOT_JSON, VALID[:-1]),
        (Reason.NOT_JSON, VALID + VALID),
        (Reason.NOT_JSON, VALID + b"\0"),
        (Reason.NOT_JSON, VALID.replace(b'"', b"'")),
        (Reason.NOT_JSON, VALID[:-1] + b",}"),
        (Reason.NOT_JSON, VALID + b"// comment"),
        (Reason.NOT_JSON, message("a\nb")),
        (Reason.NOT_JSON, message("a\0b")),
        (Reason.NOT_JSON, message("\\x41")),
        (Reason.NOT_JSON, message("\\u12")),
        (Reason.NOT_JSON, b"\x1e" + VALID),
        (Reason.NOT_JSON, b"[" * 10),
        (Reason.NOT_JSON, b"]" * 1000 + b"[" * 1000),
        (Reason.NOT_JSON, text(metrics='{"n": 01}')),
        (Reason.NOT_JSON, text(metrics='{"n": +1}')),
        (Reason.NOT_JSON, text(metrics='{"n": .5}')),
        (Reason.DUPLICATE_KEY, text(status='"error"')),
        (Reason.DUPLICATE_KEY, text(job_id=json.dumps(JOB))),
        (Reason.DUPLICATE_KEY, text(metrics='{"a": 1, "a": 1}')),
        (Reason.DUPLICATE_KEY, text(metrics='{"a": 1, "\\u0061": 2}')),
        (Reason.DUPLICATE_KEY, text(x='[[{"": 1, "": 2}]]')),
        (Reason.NOT_FINITE, text(metrics='{"score": NaN}')),
        (Reason.NOT_FINITE, text(metrics='{"score": Infinity}')),
        (Reason.NOT_FINITE, text(metrics='{"score": -Infinity}')),
        (Reason.NOT_FINITE, b"NaN"),
        (Reason.NUMBER_RANGE, text(metrics='{"score": 1e400}')),
        (Reason.NUMBER_RANGE, text(metrics='{"score": -1e400}')),
        (Reason.NUMBER_RANGE, text(metrics='{"score": 1' + "0" * 400 + ".5}")),
        (Reason.NUMBER_RANGE, text(metrics='{"n": ' + "9" * 5_000 + "}")),
        (Reason.NUMBER_RANGE, text(metrics='{"n": -' + "9" * 5_000 + "}")),
        (Reason.NUMBER_RANGE, text(metrics='{"n": [' + ",".join(["9" * 5_000] * 20) + "]}")),
        (Reason.NUMBER_RANGE, text(metrics='{"n": ' + "9" * 200_000 + "}")),
        (Reason.BAD_TEXT, message("a\\u0000b")),
        (Reason.BAD_TEXT, message("\\ud800")),
        (Reason.BAD_TEXT, message("\\uDFFF")),
        (Reason.BAD_TEXT, message("\\ude00\\ud83d")),
        (Reason.BAD_TEXT, text(metrics='{"k": "\\ud800"}')),
        (Reason.BAD_TEXT, text(metrics='{"\\u0000": 1}')),
        (Reason.BAD_TEXT, text(metrics='{"a": [{"\\ud800": 1}]}')),
        (Reason.BAD_TEXT, text(unknown='["\\u0000"]')),
        (Reason.BAD_TEXT, text(**{"\\u0000": "1"})),
        (Reason.TOO_DEEP, nested(MAX_DEPTH - 1)),
        (Reason.TOO_DEEP, nested(300)),
        (Reason.TOO_DEEP, nested(5_000, '{"a":', "}")),
        (Reason.TOO_DEEP, nested(100_000)),
        (Reason.TOO_DEEP, b"[" * 100_000),
        (Reason.TOO_DEEP, b'{"a":' * 40_000),
        (Reason.TOO_DEEP, text(metrics='{"k": "\\"", "n": ' + "[" * 100 + "]" * 100 + "}")),
        (Reason.TOO_DEEP, text(metrics='{"k": "\\\\", "n": ' + "[" * 100 + "]" * 100 + "}")),
        (Reason.SCHEMA, b"null"),
        (Reason.SCHEMA, b"[]"),
        (Reason.SCHEMA, b"{}"),
        (Reason.SCHEMA, b"1"),
        (Reason.SCHEMA, b'"done"'),
    ],
    ids=lambda value: value[:40] if isinstance(value, bytes) else value,
)
def test_refused_with_a_reason_code(code: Reason, data: bytes) -> None:
    assert reason(data) is code


@pytest.mark.req("D4.6", "B22", "B23", "B24")
@pytest.mark.parametrize(
    "data",
    [
        VALID,
        PADDED,
        b"\r\n\t " + VALID + b"\n",
        message("é € 😀"),
        message("\\ud83d\\ude00"),
        message("\\\\u0000 \\\\ud800"),
        message("\\n\\t\\u001b[31m"),
        message('x\\n{\\"level\\":\\"info\\"}'),
        message("NaN"),
        message("[" * 1_000),
        message("{" * 1_000 + '\\"' + "]" * 5),
        nested(MAX_DEPTH - 2),
        text(metrics='{"a": {"a": {"a": 1}}, "A": 2, "b": [{"a": 1}, {"a": 1}]}'),
        text(metrics='{"n": [1e308, -1e308, 1e-400, 0, -0, 0.0, 1E5]}'),
        text(metrics='{"n": ' + "9" * 300 + "}"),
        text(metrics='{"n": [' + ",".join(["[]"] * 10_000) + "]}"),
        text(metrics="{}"),
        text(unknown="null"),
    ],
    ids=lambda value: value[:40],
)
def test_the_sibling_is_accepted(data: bytes) -> None:
    assert accept(data).job_id == UUID(JOB)


@pytest.mark.req("B24")
def test_distinct_reasons_for_what_a_lax_parser_accepts() -> None:
    lax = [
        text(metrics='{"score": NaN}'),
        text(metrics='{"score": 1e400}'),
        text(status='"error"'),
        VALID.decode().encode("utf-16"),
        b"\xef\xbb\xbf" + VALID,
    ]
    assert len({reason(data) for data in lax}) == len(lax)


@pytest.mark.req("D4.6")
@pytest.mark.parametrize("limit", [1_024, 4_096])
def test_the_limit_in_bytes_is_exact(limit: int) -> None:
    padded = VALID + b" " * (limit - len(VALID))
    assert accept(padded, limit).status is ServiceStatus.DONE
    assert reason(padded + b" ", limit) is Reason.TOO_LARGE


# --- decode: the schema -----------------------------------------------------------------------------------------------


@pytest.mark.req("B54")
@pytest.mark.parametrize("job_id", [
    "abc", "", f"{{{JOB}}}", f"urn:uuid:{JOB}", JOB.replace("-", ""), JOB + "\n", JOB + " ", " " + JOB, JOB[:-1], JOB + "0",
    JOB[:-1] + "g", JOB[:-1] + "٣", JOB.replace("-", "\u2010"), "3f2b8a546-c1d-4e0f-9b7a-2d5c8e1f0a63", None, 5, [JOB],
])  # fmt: skip
def test_only_canonical_uuids_name_a_job(job_id: object) -> None:
    invalid = decode(encoded(done(job_id=job_id)), MAX_BYTES)
    assert isinstance(invalid, Invalid)
    assert (invalid.reason, invalid.job_id) == (Reason.SCHEMA, None)
    assert invalid.detail.startswith("job_id: ")


@pytest.mark.req("B54")
def test_upper_case_ids_are_normalised() -> None:
    assert str(accept(encoded(done(job_id=JOB.upper()))).job_id) == JOB


@pytest.mark.req("D4.3")
@pytest.mark.parametrize("version", ["1.0", "1.1", "1.9", "1.10", "1.123456789"])
def test_every_minor_version_is_accepted(version: str) -> None:
    accept(encoded(done(schema_version=version)))


@pytest.mark.req("D4.3", "B29")
@pytest.mark.parametrize(
    "version",
    [1.0, 1, "1", "1.", "1.01", "01.0", "2.0", "0.9", "1.0.0", "1.x", "1.0\n", " 1.0", "1.٣", "", None, "1." + "1" * 30],
)
def test_other_versions_are_refused(version: object) -> None:
    assert reason(encoded(done(schema_version=version))) is Reason.SCHEMA


@pytest.mark.req("D4.3")
@pytest.mark.parametrize("status", ["done", "needs_check"])
def test_a_success_needs_its_result_file(status: str) -> None:
    accept(encoded(done(status=status)))
    invalid = decode(encoded(without(done(status=status), "result_s3")), MAX_BYTES)
    assert invalid == Invalid(Reason.SCHEMA, "message: lacks result_s3", UUID(JOB))


@pytest.mark.req("D4.3")
def test_an_error_needs_its_error() -> None:
    assert accept(encoded(failed())).error == ServiceFailure("X", "why")
    invalid = decode(encoded(without(failed(), "error")), MAX_BYTES)
    assert invalid == Invalid(Reason.SCHEMA, "message: lacks error", UUID(JOB))


@pytest.mark.req("D4.3")
def test_an_ack_needs_neither() -> None:
    ack = accept(encoded(without(done(status="processing"), "result_s3")))
    assert ack == Envelope(UUID(JOB), ServiceStatus.PROCESSING, Service("tabular-parser", "2.3.1"))


@pytest.mark.req("D4.3")
def test_fields_the_schema_does_not_name_are_allowed_and_ignored() -> None:
    extra = done(x=1, service={"name": "s", "version": "1", "host": "h"}, result_s3={**done()["result_s3"], "etag": "e"})
    assert accept(encoded(extra)) == accept(encoded(done(service={"name": "s", "version": "1"})))


@pytest.mark.req("D4.6", "B29")
@pytest.mark.parametrize(("document", "detail"), [
    (without(done(), "schema_version"), "message: lacks schema_version"),
    (without(done(), "service", "status"), "message: lacks status, service"),
    (done(service={"name": None, "version": "1"}), "service.name: must be of type string"),
    (done(service={"name": "", "version": "1"}), "service.name: must not be empty"),
    (done(service={"name": "s"}), "service: lacks version"),
    (done(service={"name": "s" * 201, "version": "1"}), "service.name: must satisfy maxLength 200"),
    (done(service="s"), "service: must be of type object"),
    (done(status="DONE"), 'status: must satisfy enum ["processing", "done", "needs_check", "error"]'),
    (done(status="published"), 'status: must satisfy enum ["processing", "done", "needs_check", "error"]'),
    (done(result_s3=None), "result_s3: must be of type object"),
    (done(result_s3={"bucket": "", "key": "k"}), "result_s3.bucket: must not be empty"),
    (done(result_s3={"bucket": "b"}), "result_s3: lacks key"),
    (done(result_s3={"bucket": "b" * 64, "key": "k"}), "result_s3.bucket: must satisfy maxLength 63"),
    (done(result_s3={"bucket": "b", "key": 5}), "result_s3.key: must be of type string"),
    (done(raw_s3_key=None), "raw_s3_key: must be of type string"),
    (done(raw_s3_key=""), "raw_s3_key: must not be empty"),
    (done(metrics=None), "metrics: must be of type object"),
    (done(metrics=[]), "metrics: must be of type object"),
    (done(result_schema_version=1.2), "result_schema_version: must be of type string"),
    (failed(code=""), "error.code: must not be empty"),
    (failed(code=None), "error.code: must be of type string"),
    (failed(message=None), "error.message: must be of type string"),
    (done(error=None), "error: must be of type object"),
])  # fmt: skip
def test_a_violated_schema_is_explained_without_the_value(document: dict[str, Any], detail: str) -> None:
    invalid = decode(encoded(document), MAX_BYTES)
    assert isinstance(invalid, Invalid)
    assert (invalid.reason, invalid.detail, invalid.job_id) == (Reason.SCHEMA, detail, UUID(JOB))


@pytest.mark.req("D4.6")
@pytest.mark.parametrize("field", ["schema_version", "status", "service", "result_s3", "raw_s3_key", "metrics", "error"])
def test_a_refused_value_is_not_repeated(field: str) -> None:
    invalid = decode(encoded(done(**{field: "CANARY\n{}" * 100 if field != "raw_s3_key" else ["CANARY"]})), MAX_BYTES)
    assert isinstance(invalid, Invalid)
    assert "CANARY" not in invalid.detail
    assert "\n" not in invalid.detail
    assert len(invalid.detail) < 300


@pytest.mark.req("D4.8")
def test_a_message_refused_before_it_was_read_names_no_job() -> None:
    invalid = decode(text(status='"error"'), MAX_BYTES)
    assert invalid == Invalid(Reason.DUPLICATE_KEY, "an object has the same key twice", None)


# --- decode: work and memory ------------------------------------------------------------------------------------------


@pytest.mark.req("B23")
@pytest.mark.parametrize(
    "data", [b"[" * MAX_BYTES, b'{"a":' * 50_000, b" " * (MAX_BYTES + 1), b"\xef\xbb\xbf" + b"[" * 1_000, b"\xff" * 1_000]
)
def test_what_is_hopeless_never_reaches_the_parser(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("the parser was asked")

    monkeypatch.setattr(messages, "json", SimpleNamespace(loads=parse, JSONDecodeError=json.JSONDecodeError))
    assert isinstance(decode(data, MAX_BYTES), Invalid)


@pytest.mark.req("B23")
def test_digits_beyond_the_limit_are_never_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def convert(digits: str) -> int:
        lengths.append(len(digits))
        return int(digits)

    monkeypatch.setattr(messages, "int", convert, raising=False)
    numbers = ",".join(["1", "22", "9" * 5_000, "333"])
    assert reason(text(metrics=f'{{"n": [{numbers}]}}')) is Reason.NUMBER_RANGE
    assert lengths == [1, 2]


@pytest.mark.req("B23")
@pytest.mark.timeout(5)
@pytest.mark.parametrize("pattern", ['\\"', '"', "\\", '"\\', "[]", '"[', '\\"[', "{}", '""', "\\\\", "]["])
def test_looking_for_depth_is_linear_in_the_size(pattern: str) -> None:
    """Each of these would take minutes if every quote led to a scan of the rest."""
    data = ("[]" * (MAX_DEPTH + 1) + '"' + pattern * MAX_BYTES)[:MAX_BYTES].encode()
    assert isinstance(decode(data, MAX_BYTES), Invalid)


@pytest.mark.req("B23")
@pytest.mark.parametrize("element", ["[]", "{}", "1.5", '"a"', '{"a":1}', "12345678901234567890"])
def test_memory_is_bounded_by_the_size(element: str) -> None:
    body = ",".join([element] * (MAX_BYTES // (len(element) + 1) - 200))
    data = text(metrics=f'{{"n": [{body}]}}')
    assert len(data) <= MAX_BYTES
    decode(VALID, MAX_BYTES)
    tracemalloc.start()
    try:
        accept(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * MAX_BYTES


# --- decode: properties -----------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)
KEYS = st.builds(ObjectKey, NAMES, NAMES)


@st.composite
def envelopes(draw: st.DrawFn) -> Envelope:
    status = draw(st.sampled_from(ServiceStatus))
    success = status in {ServiceStatus.DONE, ServiceStatus.NEEDS_CHECK}
    return Envelope(
        job_id=draw(st.uuids()),
        status=status,
        service=draw(st.builds(Service, NAMES, NAMES)),
        result_s3=draw(KEYS if success else st.none() | KEYS),
        result_schema_version=draw(st.none() | NAMES),
        raw_s3_key=draw(st.none() | NAMES),
        metrics=draw(st.dictionaries(TEXTS, JSON, max_size=4)),
        error=draw(st.builds(ServiceFailure, NAMES, TEXTS) if status is ServiceStatus.ERROR else st.none()),
    )


def document_of(envelope: Envelope, version: str = "1.0") -> dict[str, Any]:
    fields = attrs.asdict(envelope, filter=lambda _, value: value is not None)
    return {"schema_version": version, **fields, "job_id": str(envelope.job_id)}


@pytest.mark.req("R4", "D4.3")
@RELAXED
@given(envelopes(), st.booleans(), st.integers(0, 10**6))
def test_a_valid_envelope_survives_the_journey(envelope: Envelope, ascii_only: bool, minor: int) -> None:
    data = json.dumps(document_of(envelope, f"1.{minor}"), ensure_ascii=ascii_only).encode()
    assert decode(data, MAX_BYTES) == envelope


@pytest.mark.req("D4.6")
@RELAXED
@given(st.binary(max_size=300))
def test_no_bytes_make_decode_raise(data: bytes) -> None:
    assert isinstance(decode(data, 256), Invalid)


@pytest.mark.req("D4.6")
@RELAXED
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_no_json_document_makes_decode_raise(document: object) -> None:
    assert isinstance(decode(json.dumps(document).encode(), MAX_BYTES), Invalid)


def places(document: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield path
    children: list[tuple[str | int, object]] = []
    if isinstance(document, dict):
        children = list(document.items())
    elif isinstance(document, list):
        children = list(enumerate(document))
    for key, inner in children:
        yield from places(inner, (*path, key))


def replaced(document: Any, path: tuple[str | int, ...], value: object) -> Any:
    if not path:
        return value
    copy: Any = dict(document) if isinstance(document, dict) else list(document)
    copy[path[0]] = replaced(document[path[0]], path[1:], value)
    return copy


@pytest.mark.req("D4.6", "B22", "B24")
@RELAXED
@given(st.data())
def test_no_mutation_of_a_valid_envelope_makes_decode_raise(data: st.DataObject) -> None:
    document: Any = document_of(data.draw(envelopes()))
    for _ in range(data.draw(st.integers(1, 3))):
        where = data.draw(st.sampled_from(list(places(document))))
        document = replaced(document, where, data.draw(JSON | st.floats() | st.text()))
    decoded = decode(json.dumps(document).encode(), MAX_BYTES)
    if isinstance(decoded, Envelope):
        json.dumps(decoded.metrics, allow_nan=False, ensure_ascii=False).encode()


@pytest.mark.req("D4.6", "B23")
@RELAXED
@given(
    envelopes().map(document_of).map(encoded),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3), st.binary(max_size=6)), min_size=1, max_size=4),
)
def test_no_damage_to_the_bytes_makes_decode_raise(data: bytes, damages: list[tuple[float, int, bytes]]) -> None:
    for where, lost, added in damages:
        position = int(where * len(data))
        data = data[:position] + added + data[position + lost :]
    assert isinstance(decode(data, MAX_BYTES), Envelope | Invalid)


# --- requests ---------------------------------------------------------------------------------------------------------

SOURCE = Source(
    job_id=UUID(JOB),
    file_id=UUID(FILE),
    attempt=1,
    pipeline="tabular",
    file_name="price-list.xlsx",
    content_type="text/csv",
    bucket="arm-ka",
    key="uploads/price-list.xlsx",
    reply_deadline="2025-06-01T12:15:00.123456Z",
    republish_count=0,
)


@pytest.mark.req("R1", "S1.1")
def test_a_request() -> None:
    assert json.loads(build_request(SOURCE)) == {
        "schema_version": "1.0",
        "job_id": JOB,
        "file_id": FILE,
        "attempt": 1,
        "pipeline": "tabular",
        "s3": {"bucket": "arm-ka", "key": "uploads/price-list.xlsx"},
        "file": {"name": "price-list.xlsx", "content_type": "text/csv"},
        "reply_deadline": "2025-06-01T12:15:00.123456Z",
    }


@pytest.mark.req("D1.5")
def test_an_unknown_content_type_is_left_out() -> None:
    assert json.loads(build_request(attrs.evolve(SOURCE, content_type=None)))["file"] == {"name": "price-list.xlsx"}


@pytest.mark.req("D1.4")
@pytest.mark.parametrize("deadline", ["2025-06-01T12:15:00Z", "2025-06-01T12:15:00.000001Z", "9999-12-31T23:59:59Z"])
def test_deadlines_are_rfc_3339_in_utc(deadline: str) -> None:
    assert json.loads(build_request(attrs.evolve(SOURCE, reply_deadline=deadline)))["reply_deadline"] == deadline


@pytest.mark.req("D1.4", "D1.5")
@pytest.mark.parametrize("deadline", [
    "2025-06-01 12:15:00Z", "2025-06-01T12:15:00", "2025-06-01T12:15:00+00:00", "2025-06-01T12:15:00z", "infinity",
    "10000-01-01T00:00:00Z", "2025-13-01T00:00:00Z", "2025-06-01T12:15:00Z\n", "2025-06-01T12:15:00.1234567Z", "", None,
])  # fmt: skip
def test_other_deadlines_are_refused(deadline: str | None) -> None:
    with pytest.raises(RequestInvalid, match=r"^reply_deadline: must "):
        build_request(attrs.evolve(SOURCE, reply_deadline=deadline))


@pytest.mark.req("D1.5")
@pytest.mark.parametrize(("fields", "problem"), [
    ({"bucket": None, "key": None}, "the file has no source object"),
    ({"key": None}, "s3.key: must be of type string"),
    ({"bucket": ""}, "s3.bucket: must not be empty"),
    ({"key": ""}, "s3.key: must not be empty"),
    ({"key": "k" * 1025}, "s3.key: must satisfy maxLength 1024"),
    ({"file_name": ""}, "file.name: must not be empty"),
    ({"file_name": None}, "file.name: must be of type string"),
    ({"content_type": ""}, "file.content_type: must not be empty"),
    ({"pipeline": ""}, "pipeline: must not be empty"),
    ({"attempt": 0}, "attempt: must satisfy minimum 1"),
    ({"reply_deadline": None}, "reply_deadline: must be of type string"),
])  # fmt: skip
def test_what_makes_no_valid_request(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(RequestInvalid) as caught:
        build_request(attrs.evolve(SOURCE, **fields))
    assert str(caught.value) == problem


@pytest.mark.req("R1", "D1.5")
@RELAXED
@given(st.integers(-1, 10**9), st.text(max_size=20), st.none() | TEXTS, st.none() | TEXTS, st.none() | TEXTS, st.none() | TEXTS)
def test_a_request_is_valid_by_the_schema_or_refused(
    attempt: int, pipeline: str, name: str | None, content_type: str | None, bucket: str | None, key: str | None
) -> None:
    fields: dict[str, Any] = {"file_name": name, "content_type": content_type, "bucket": bucket, "key": key}
    try:
        data = build_request(
            attrs.evolve(SOURCE, attempt=attempt, pipeline=pipeline.encode("utf-8", "replace").decode(), **fields)
        )
    except RequestInvalid:
        return
    schema("recognition-request").validate(json.loads(data))


# --- schemas and guide ------------------------------------------------------------------------------------------------


def schema(name: str) -> Draft202012Validator:
    return Draft202012Validator(
        json.loads((SCHEMAS / f"{name}.schema.json").read_text("utf-8")), format_checker=Draft202012Validator.FORMAT_CHECKER
    )


@pytest.mark.req("R1", "R4")
@pytest.mark.parametrize("name", ["recognition-request", "recognition-result-message"])
def test_the_schemas_are_valid(name: str) -> None:
    document: Any = schema(name).schema
    Draft202012Validator.check_schema(document)
    assert document["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_there_are_no_other_schemas() -> None:
    assert sorted(path.name for path in SCHEMAS.iterdir()) == [
        "recognition-request.schema.json",
        "recognition-result-message.schema.json",
    ]


def examples(kind: str, language: str) -> list[str]:
    return re.findall(rf"<!-- example: {kind} -->\n```{language}\n(.*?)```", GUIDE, re.DOTALL)


@pytest.mark.req("R1", "R4")
def test_the_examples_of_the_guide_are_valid() -> None:
    requests, results = examples("recognition-request", "json"), examples("recognition-result-message", "json")
    assert len(requests) == 1
    schema("recognition-request").validate(json.loads(requests[0]))
    assert [accept(example.encode()).status for example in results] == ["processing", "done", "needs_check", "error"]
    (service,) = examples("service", "python")
    compile(service, "service.py", "exec")
    assert GUIDE.count("<!-- example: ") == 6


@pytest.mark.req("D4.4")
def test_the_examples_of_the_guide_fit_each_other() -> None:
    request = json.loads(examples("recognition-request", "json")[0])
    result = json.loads(examples("recognition-result-message", "json")[1])
    assert result["job_id"] == request["job_id"]
    assert result["result_s3"]["key"].startswith(f"results/{request['file_id']}/{request['job_id']}/")
    assert result["raw_s3_key"] == f"raw/{request['job_id']}.json"


@pytest.mark.req("D4.6", "D4.8")
def test_the_guide_lists_the_reason_codes_and_outcomes() -> None:
    table = GUIDE.partition("<!-- reason-codes: begin -->")[2].partition("<!-- reason-codes: end -->")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == ["reason", *Reason]
    outcomes = GUIDE.partition("| `outcome` |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", outcomes, re.MULTILINE) == list(Outcome)
