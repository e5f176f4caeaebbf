"""The compiled schemas of the hot path accept exactly what `jsonschema`, the reference, accepts (D4.3, D4.6)."""

import json
import string
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armcore_trio.protocol.messages import quick_validator, schema, validator

NAMES = ["recognition-request", "recognition-result-message"]
JOB, FILE = str(uuid4()), str(uuid4())

REQUEST: dict[str, Any] = {
    "schema_version": "1.0",
    "job_id": JOB,
    "file_id": FILE,
    "attempt": 1,
    "pipeline": "tabular",
    "s3": {"bucket": "arm-ka", "key": "source/a.xlsx"},
    "file": {"name": "a.xlsx", "content_type": "text/csv"},
    "reply_deadline": "2026-11-30T12:00:00.000001Z",
}
RESULT: dict[str, Any] = {
    "schema_version": "1.0",
    "job_id": JOB,
    "status": "done",
    "service": {"name": "tabular-parser", "version": "1.2.3"},
    "result_s3": {"bucket": "arm-ka", "key": f"results/{FILE}/{JOB}/result.json"},
    "result_schema_version": "1.0",
    "raw_s3_key": f"raw/{JOB}.json",
    "metrics": {"rows": 3},
    "error": {"code": "X", "message": ""},
}
VALID = dict(zip(NAMES, [REQUEST, RESULT], strict=True))

texts = st.one_of(
    st.text(max_size=12),
    st.text(alphabet="0123456789abcdefABCDEF-\n{}", min_size=34, max_size=38),
    st.sampled_from([
        "", "\n", "1.0", "1.0\n", "1.00", "1.10", "2.0", "1.", "01.0", JOB, JOB.upper(), JOB + "\n", JOB.replace("-", ""),
        "{" + JOB + "}", "urn:uuid:" + JOB, "processing", "done", "needs_check", "error", "2026-11-30T12:00:00Z",
        "2026-11-30T12:00:00.123456Z", "2026-11-30T12:00:00+00:00", "2026-02-30T12:00:00Z", "2026-11-30T24:00:00Z",
        "2026-11-30T23:59:60Z", "20000-01-01T00:00:00Z", "x" * 63, "x" * 64, "x" * 200, "x" * 201, "é" * 1024, "😀" * 1025,
    ]),
)  # fmt: skip
scalars = st.none() | st.booleans() | st.integers(-3, 10**20) | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(string.ascii_lowercase, max_size=8), inner, max_size=3),
)


def agree(name: str, document: object) -> None:
    assert quick_validator(name).is_valid(document) == validator(name).is_valid(document), json.dumps(document)


@pytest.mark.req("D4.3")
@pytest.mark.parametrize("name", NAMES)
def test_a_valid_document_is_valid_to_both(name: str) -> None:
    assert quick_validator(name).is_valid(VALID[name])
    assert validator(name).is_valid(VALID[name])


@st.composite
def mutated(draw: st.DrawFn, name: str) -> Any:
    """A valid document with a few places changed, removed or added."""
    document = json.loads(json.dumps(VALID[name]))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from([document, *(inner for inner in document.values() if isinstance(inner, dict))]))
        known = sorted({*place, *schema(name)["properties"], "name", "code", "extra"})
        key = draw(st.sampled_from(known))
        if draw(st.booleans()):
            place.pop(key, None)
        else:
            place[key] = draw(values)
    return document


@pytest.mark.req("D4.3", "D4.6")
@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=1_500, deadline=None)
def test_both_accept_the_same_of_documents_nearly_right(name: str, data: st.DataObject) -> None:
    agree(name, data.draw(mutated(name)))


@pytest.mark.req("D4.3", "D4.6")
@pytest.mark.parametrize("name", NAMES)
@given(document=values)
@settings(max_examples=300, deadline=None)
def test_both_accept_the_same_of_any_document(name: str, document: object) -> None:
    agree(name, document)


@pytest.mark.req("D4.3", "B54")
@pytest.mark.parametrize("name", NAMES)
@given(text=texts)
@settings(max_examples=500, deadline=None)
def test_both_accept_the_same_text_in_every_place(name: str, text: str) -> None:
    for key, value in VALID[name].items():
        agree(name, {**VALID[name], key: text})
        for inner in value if isinstance(value, dict) else ():
            agree(name, {**VALID[name], key: {**value, inner: text}})
