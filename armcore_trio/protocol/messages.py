"""What travels over NATS: the request we build and the envelope a service sends. Pure: bytes in, values or a reason out.

An envelope passes through `decode` once: size, UTF-8, JSON (stricter than the `json` module), schema, then types. Each
refusal has a reason code (D4.6); nothing a service sends makes `decode` raise.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache
from typing import Any, NoReturn, cast
from uuid import UUID

import jsonschema_rs
from attrs import field, frozen
from cattrs import Converter
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.exceptions import best_match

from armcore_trio.resources import SCHEMAS

MAX_DEPTH = 64  # of nesting; interpreters give up at very different depths, so the limit is ours


class ServiceStatus(StrEnum):
    """`status` of an envelope: an ack, or one of three results."""

    PROCESSING = "processing"
    DONE = "done"
    NEEDS_CHECK = "needs_check"
    ERROR = "error"


class Reason(StrEnum):
    """Why a message is `invalid`; stable codes for logs, metrics and answers."""

    EMPTY = "empty"
    TOO_LARGE = "too_large"
    NOT_UTF8 = "not_utf8"
    BYTE_ORDER_MARK = "byte_order_mark"
    NOT_JSON = "not_json"
    DUPLICATE_KEY = "duplicate_key"
    NOT_FINITE = "not_finite"
    NUMBER_RANGE = "number_range"
    BAD_TEXT = "bad_text"
    TOO_DEEP = "too_deep"
    SCHEMA = "schema"
    RAW_KEY = "raw_key"
    RESULT_KEY = "result_key"
    KEY_TAKEN = "key_taken"
    REFUSED_BY_DATABASE = "refused_by_database"


@frozen
class ObjectKey:
    """A place in the object store."""

    bucket: str
    key: str


@frozen
class Service:
    """Who answered."""

    name: str
    version: str


@frozen
class ServiceFailure:
    """Why a service could not do the job."""

    code: str
    message: str


@frozen
class Envelope:
    """A valid ack or result. `job_id` is normalised to lower case by being a UUID."""

    job_id: UUID
    status: ServiceStatus
    service: Service
    result_s3: ObjectKey | None = None
    result_schema_version: str | None = None
    raw_s3_key: str | None = None
    metrics: dict[str, Any] = field(factory=dict)
    error: ServiceFailure | None = None


@frozen
class Invalid:
    """A message that is no envelope: why, in a code and in words, and whose it claims to be if that much could be read."""

    reason: Reason
    detail: str
    job_id: UUID | None = None


class _Unreadable(Exception):
    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class RequestInvalid(Exception):
    """No valid request can be built from the row; the text says what is wrong (D1.5)."""


@frozen
class Source:
    """A job joined with its file and source object, as the outbox reads it. `None` where the join found nothing."""

    job_id: UUID
    file_id: UUID | None
    """None if the file's row is gone."""
    attempt: int
    pipeline: str
    file_name: str | None
    content_type: str | None
    bucket: str | None
    key: str | None
    reply_deadline: str | None
    """RFC 3339 in UTC, written by the database's own clock; None if it has no such form (infinity)."""
    republish_count: int
    unreadable: str | None = None
    """Which of its texts is not in the database's encoding, if one is not (N06)."""


_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*+"?|([\[{])|([\]}])', re.DOTALL)

_converter = Converter(detailed_validation=False)  # the schema has said what is wrong
_converter.register_structure_hook(UUID, lambda text, _: UUID(text))


@cache
def schema(name: str) -> dict[str, Any]:
    """The schema of that name, as a document."""
    document: dict[str, Any] = json.loads((SCHEMAS / f"{name}.schema.json").read_text("utf-8"))
    return document


@cache
def validator(name: str) -> Draft202012Validator:
    """The reference: what breaks the schema of that name, and why, is what `jsonschema` says. Formats are asserted."""
    return Draft202012Validator(schema(name), format_checker=Draft202012Validator.FORMAT_CHECKER)


@cache
def quick_validator(name: str) -> jsonschema_rs.Draft202012Validator:
    """The same schema compiled, a hundred times as fast: it may accept what the reference accepts, never refuse."""
    return jsonschema_rs.Draft202012Validator(schema(name), validate_formats=True)


def build_request(source: Source) -> bytes:
    """The request message for a job, valid by `recognition-request.schema.json`. Raises `RequestInvalid` (D1.5)."""
    if source.file_id is None:
        raise RequestInvalid("the file's row is gone")
    if source.unreadable is not None:
        raise RequestInvalid(f"{source.unreadable} is not text in the encoding of the database")
    if source.bucket is None:
        raise RequestInvalid("the file has no source object")
    file = {"name": source.file_name} | ({"content_type": source.content_type} if source.content_type is not None else {})
    request = {
        "schema_version": "1.0",
        "job_id": str(source.job_id),
        "file_id": str(source.file_id),
        "attempt": source.attempt,
        "pipeline": source.pipeline,
        "s3": {"bucket": source.bucket, "key": source.key},
        "file": file,
        "reply_deadline": source.reply_deadline,
    }
    if problem := violation("recognition-request", request):
        raise RequestInvalid(problem)
    return _encode(request).encode()


def decode(data: bytes, max_bytes: int) -> Envelope | Invalid:
    """A service's message as an envelope, or why it is none. Never raises."""
    document: Any = None
    try:
        document = _parse(data, max_bytes)
        if problem := violation("recognition-result-message", document):
            raise _Unreadable(Reason.SCHEMA, problem)
        return _converter.structure(document, Envelope)
    except _Unreadable as error:
        return Invalid(error.reason, str(error), _claimed_job(document))


def _parse(data: bytes, max_bytes: int) -> Any:
    if not data:
        raise _Unreadable(Reason.EMPTY, "the message has no body")
    if len(data) > max_bytes:
        raise _Unreadable(Reason.TOO_LARGE, f"{len(data)} bytes, at most {max_bytes} are taken")
    if data.startswith(b"\xef\xbb\xbf"):
        raise _Unreadable(Reason.BYTE_ORDER_MARK, "starts with a byte order mark")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _Unreadable(Reason.NOT_UTF8, f"byte {error.start} is not UTF-8") from None
    if _too_deep(data):
        raise _Unreadable(Reason.TOO_DEEP, f"nested more than {MAX_DEPTH} levels deep")
    try:
        document = _decoder.decode(text)
    except json.JSONDecodeError as error:
        raise _Unreadable(Reason.NOT_JSON, f"{error.msg} at character {error.pos}") from None
    if "\\u" in text and not _storable(document):
        raise _Unreadable(Reason.BAD_TEXT, "holds U+0000 or half of a surrogate pair, which no text column can")
    return document


def _too_deep(data: bytes) -> bool:
    """Bounds nesting before the parser recurses. Few brackets cannot be deep, so ordinary messages cost two counts."""
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return False
    depth = 0
    for match in _BRACKETS.finditer(data):
        if match.group(1):
            depth += 1
            if depth > MAX_DEPTH:
                return True
        elif match.group(2):
            depth -= 1
    return False


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise _Unreadable(Reason.DUPLICATE_KEY, "an object has the same key twice")
    return document


def _no_constant(name: str) -> NoReturn:
    raise _Unreadable(Reason.NOT_FINITE, f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise _Unreadable(Reason.NUMBER_RANGE, "a number is beyond the range of a double")
    return number


def _whole(text: str) -> int:
    if len(text) > 310:  # as far as a double reaches; Python itself refuses only past 4300 digits
        raise _Unreadable(Reason.NUMBER_RANGE, f"a whole number of {len(text)} digits")
    return int(text)


# Made once: `json.dumps` and `json.loads` with options make one for each call, which costs as much as the work itself.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite, parse_int=_whole)


def _storable(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" not in value and not any("\ud800" <= character <= "\udfff" for character in value)
    if isinstance(value, list):
        return all(map(_storable, value))
    if isinstance(value, dict):
        return all(_storable(key) and _storable(inner) for key, inner in value.items())
    return True


def violation(name: str, document: object) -> str | None:
    """What in a document breaks the schema of that name: the place and the rule, never the value. None if nothing does."""
    if quick_validator(name).is_valid(document):
        return None
    error = best_match(validator(name).iter_errors(document))
    if error is None:
        return None
    place = ".".join(str(part) for part in error.absolute_path) or "message"
    return f"{place}: {_EXPLANATIONS.get(str(error.validator), _rule)(error)}"


def _missing(error: ValidationError) -> str:
    present = error.instance if isinstance(error.instance, Mapping) else {}
    return "lacks " + ", ".join(name for name in cast("list[str]", error.validator_value) if name not in present)


def _rule(error: ValidationError) -> str:
    return f"must satisfy {error.validator} {json.dumps(error.validator_value)[:120]}"


_EXPLANATIONS: Mapping[str, Callable[[ValidationError], str]] = {
    "required": _missing,
    "type": lambda error: f"must be of type {error.validator_value}",
    "minLength": lambda _: "must not be empty",
    "additionalProperties": lambda _: "has a field the schema does not know",
}


def _claimed_job(document: Any) -> UUID | None:
    claimed = document.get("job_id") if isinstance(document, dict) else None
    return UUID(claimed) if isinstance(claimed, str) and _UUID.fullmatch(claimed) else None
