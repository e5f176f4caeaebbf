"""The state machine: every pair of status and event, its table in the documentation, and what no sequence of events breaks."""

import json
import re
from pathlib import Path
from typing import Any
from uuid import UUID

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from armcore_trio.borders.bus import Received
from armcore_trio.exchange.inbox import Pending
from armcore_trio.exchange.subscriber import decide
from armcore_trio.protocol.lifecycle import (
    FINAL,
    RETRYABLE,
    TRANSITIONS,
    Change,
    Event,
    FailureKind,
    FileStatus,
    Job,
    Outcome,
    Status,
    Transition,
    UnackedAction,
    Verdict,
    advance,
    decide_unacked,
    receive,
)
from armcore_trio.protocol.messages import Envelope, ObjectKey, Reason, Service, ServiceFailure, ServiceStatus

ARCHITECTURE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text("utf-8")
RAW_BUCKET = "arm-ka"
JOB, FILE = UUID(int=1), UUID(int=1001)
RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

# --- the table --------------------------------------------------------------------------------------------------------

# (status, event): new status, file, fact, error code. Whatever is missing here must change nothing.
EXPECTED = {
    ("queued", "request confirmed"): ("published", None, None, None),
    ("queued", "no valid request"): ("error", "ERROR", None, "INVALID_REQUEST"),
    ("queued", "result done"): ("done", "PROCESSING", None, None),
    ("queued", "result needs_check"): ("needs_check", "PROCESSING", None, None),
    ("queued", "result error"): ("error", "ERROR", "SERVICE_ERROR", None),
    ("published", "repeat confirmed"): ("published", None, None, None),
    ("published", "no valid request"): ("error", "ERROR", None, "INVALID_REQUEST"),
    ("published", "ack"): ("processing", "PROCESSING", None, None),
    ("published", "result done"): ("done", "PROCESSING", None, None),
    ("published", "result needs_check"): ("needs_check", "PROCESSING", None, None),
    ("published", "result error"): ("error", "ERROR", "SERVICE_ERROR", None),
    ("published", "repeats used up"): ("dlq", "ERROR", "NO_ACK", "NO_ACK"),
    ("published", "deadline passed"): ("timeout", "ERROR", "TIMEOUT", "TIMEOUT"),
    ("processing", "result done"): ("done", None, None, None),
    ("processing", "result needs_check"): ("needs_check", None, None, None),
    ("processing", "result error"): ("error", "ERROR", "SERVICE_ERROR", None),
    ("processing", "deadline passed"): ("timeout", "ERROR", "TIMEOUT", "TIMEOUT"),
}
ARRIVING = {
    Event.ACKED: ServiceStatus.PROCESSING,
    Event.DONE: ServiceStatus.DONE,
    Event.NEEDS_CHECK: ServiceStatus.NEEDS_CHECK,
    Event.FAILED: ServiceStatus.ERROR,
}


def envelope(status: ServiceStatus, **fields: Any) -> Envelope:
    """A valid envelope for `JOB`."""
    if status in {ServiceStatus.DONE, ServiceStatus.NEEDS_CHECK}:
        fields = {"result_s3": ObjectKey("results-bucket", f"results/{FILE}/{JOB}/result.json")} | fields
    if status is ServiceStatus.ERROR:
        fields = {"error": ServiceFailure("UNSUPPORTED_FORMAT", "a password protects it")} | fields
    return Envelope(JOB, status, Service("tabular-parser", "2.3.1"), **fields)


def arrive(job: Job | None, message: Envelope, msg_id: str | None = "result:1") -> Verdict:
    return receive(job, message, msg_id, raw_bucket=RAW_BUCKET)


def job_in(status: Status, result_msg_id: str | None = None) -> Job:
    return Job(JOB, FILE, status, result_msg_id)


@pytest.mark.req("R1", "R2", "R3", "R4", "R5", "D4.1", "D4.10")
@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("status", Status)
def test_every_status_and_event(status: Status, event: Event) -> None:
    expected = EXPECTED.get((status.value, event.value))
    job = job_in(status)
    change = arrive(job, envelope(ARRIVING[event])).change if event in ARRIVING else advance(job, event, "why")
    if expected is None:
        assert change is None
        return
    assert change is not None
    code = "UNSUPPORTED_FORMAT" if event is Event.FAILED else expected[3]
    assert (change.job, change.expected) == (job, status)
    assert (change.status, change.file, change.fact, change.error_code) == (*expected[:3], code)
    assert change.after().status == expected[0]


@pytest.mark.req("R2", "R4")
def test_no_event_leaves_a_final_status() -> None:
    assert {Status(status) for status in ("done", "needs_check", "error", "timeout", "dlq")} == FINAL
    assert not [pair for pair in TRANSITIONS if pair[0] in FINAL]
    assert {Status.ERROR, Status.TIMEOUT, Status.DLQ} == RETRYABLE


@pytest.mark.req("R4", "R5", "R3", "D1.5")
def test_a_fact_exists_exactly_for_a_service_error_a_timeout_and_a_dead_letter() -> None:
    facts = {(event, to.fact) for (_, event), to in TRANSITIONS.items() if to.fact}
    assert facts == {
        (Event.FAILED, FailureKind.SERVICE_ERROR),
        (Event.EXPIRED, FailureKind.TIMEOUT),
        (Event.UNACKED, FailureKind.NO_ACK),
    }


@pytest.mark.req("D4.10")
def test_the_file_fails_exactly_with_its_job() -> None:
    for to in TRANSITIONS.values():
        assert (to.file is FileStatus.ERROR) == (to.status in RETRYABLE)


@pytest.mark.req("R1")
def test_the_documentation_holds_the_same_table() -> None:
    table = ARCHITECTURE.partition("<!-- lifecycle: begin -->")[2].partition("<!-- lifecycle: end -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()]
    assert rows[0] == ["Status", "Event", "Becomes", "File", "Fact", "`error_code`"]
    documented = {}
    for status, event, becomes, file, fact, code in rows[2:]:
        assert (code == "the service's") == (event == Event.FAILED)
        documented[Status(status), Event(event)] = Transition(
            Status(becomes),
            None if file == "–" else FileStatus(file),
            None if fact == "–" else FailureKind(fact),
            code.strip("`") if code.startswith("`") else None,
        )
    assert len(documented) == len(rows) - 2
    assert documented == TRANSITIONS


@pytest.mark.req("R1")
def test_the_diagram_shows_the_same_arrows() -> None:
    diagram = ARCHITECTURE.partition("stateDiagram-v2\n")[2].partition("```")[0]
    arrows = {(here, there, text.split(" ")[0]) for here, there, text in re.findall(r"(\w+) --> (\w+): (.+)", diagram)}
    assert arrows == {(here, to.status.value, event.value.split(" ")[0]) for (here, event), to in TRANSITIONS.items()}
    assert re.findall(r"(\w+) --> \[\*\]", diagram) == [status.value for status in Status if status in FINAL]


# --- single decisions -------------------------------------------------------------------------------------------------


@pytest.mark.req("R3", "D3.2")
@pytest.mark.parametrize(("count", "maximum", "action"), [
    (0, 3, UnackedAction.REPUBLISH),
    (1, 3, UnackedAction.REPUBLISH),
    (2, 3, UnackedAction.REPUBLISH),
    (3, 3, UnackedAction.DEAD_LETTER),
    (4, 3, UnackedAction.DEAD_LETTER),
    (0, 0, UnackedAction.DEAD_LETTER),
    (0, 1, UnackedAction.REPUBLISH),
])  # fmt: skip
def test_repeat_or_dead_letter(count: int, maximum: int, action: UnackedAction) -> None:
    assert decide_unacked(count, maximum) is action


@pytest.mark.req("R4")
def test_an_unknown_job() -> None:
    for status in ServiceStatus:
        assert arrive(None, envelope(status)) == Verdict(Outcome.UNKNOWN_JOB)


@pytest.mark.req("R2", "S2.1")
def test_an_ack() -> None:
    verdict = arrive(job_in(Status.PUBLISHED), envelope(ServiceStatus.PROCESSING), None)
    assert verdict == Verdict(
        Outcome.APPLIED,
        change=Change(
            job_in(Status.PUBLISHED),
            Status.PUBLISHED,
            Status.PROCESSING,
            FileStatus.PROCESSING,
            acked=True,
            service_name="tabular-parser",
            service_version="2.3.1",
        ),
    )


@pytest.mark.req("R2", "D2.1", "D4.8")
@pytest.mark.parametrize("status", [status for status in Status if status is not Status.PUBLISHED])
def test_an_ack_for_a_job_in_another_status_is_ignored(status: Status) -> None:
    assert arrive(job_in(status), envelope(ServiceStatus.PROCESSING)) == Verdict(Outcome.IGNORED, status)


@pytest.mark.req("R2")
def test_an_ack_registers_nothing_and_carries_no_result() -> None:
    raw, result = "raw/of/another.json", ObjectKey("b", "k")
    ack = envelope(ServiceStatus.PROCESSING, raw_s3_key=raw, result_s3=result, metrics={"a": 1}, result_schema_version="1")
    change = arrive(job_in(Status.PUBLISHED), ack, "id").change
    assert change is not None
    assert (change.raw, change.result, change.metrics, change.result_msg_id, change.result_schema_version) == (None,) * 5


@pytest.mark.req("S4.1", "S4.5", "D4.2")
@pytest.mark.parametrize("status", [Status.QUEUED, Status.PUBLISHED, Status.PROCESSING])
def test_a_result(status: Status) -> None:
    raw_key = f"raw/{JOB}.json"
    message = envelope(
        ServiceStatus.DONE, metrics={"rows": 5, "republish_count": 99}, result_schema_version="1.2", raw_s3_key=raw_key
    )
    change = arrive(job_in(status), message).change
    assert change is not None
    assert change == Change(
        job_in(status),
        status,
        Status.DONE,
        None if status is Status.PROCESSING else FileStatus.PROCESSING,
        service_name="tabular-parser",
        service_version="2.3.1",
        metrics={"rows": 5},
        result_schema_version="1.2",
        result_msg_id="result:1",
        result=ObjectKey("results-bucket", f"results/{FILE}/{JOB}/result.json"),
        raw=ObjectKey(RAW_BUCKET, raw_key),
    )
    assert change.after() == job_in(Status.DONE, "result:1")


@pytest.mark.req("S4.3", "S4.6")
def test_an_error() -> None:
    change = arrive(job_in(Status.PROCESSING), envelope(ServiceStatus.ERROR)).change
    assert change is not None
    assert (change.status, change.file, change.fact) == (Status.ERROR, FileStatus.ERROR, FailureKind.SERVICE_ERROR)
    assert (change.error_code, change.error_message) == ("UNSUPPORTED_FORMAT", "a password protects it")
    assert (change.result, change.raw) == (None, None)


@pytest.mark.req("S4.2", "S4.4", "D4.5")
@pytest.mark.parametrize("status", sorted(FINAL))
def test_a_result_for_a_final_job(status: Status) -> None:
    job = job_in(status, "result:1")
    assert arrive(job, envelope(ServiceStatus.DONE), "result:1") == Verdict(Outcome.DUPLICATE)
    assert arrive(job, envelope(ServiceStatus.ERROR), "result:1") == Verdict(Outcome.DUPLICATE)
    assert arrive(job, envelope(ServiceStatus.DONE), "result:2") == Verdict(Outcome.LATE, status)
    assert arrive(job, envelope(ServiceStatus.DONE), None) == Verdict(Outcome.LATE, status)
    assert arrive(job_in(status), envelope(ServiceStatus.DONE), None) == Verdict(Outcome.LATE, status)


@pytest.mark.req("D4.5")
def test_a_result_without_message_id() -> None:
    verdict = arrive(job_in(Status.PROCESSING), envelope(ServiceStatus.DONE), None)
    assert verdict.change is not None
    assert verdict.change.after() == job_in(Status.DONE)


@pytest.mark.req("D4.4")
@pytest.mark.parametrize("raw_key", [
    "raw/x.json", f"raw/{UUID(int=2)}.json", f"raw/{JOB}", f"/raw/{JOB}.json", f"raw/{JOB}.json ", f"RAW/{JOB}.json",
    f"raw/{JOB}.jsonx",
])  # fmt: skip
@pytest.mark.parametrize("status", [ServiceStatus.DONE, ServiceStatus.NEEDS_CHECK, ServiceStatus.ERROR])
def test_a_raw_key_of_another_form_is_refused(raw_key: str, status: ServiceStatus) -> None:
    assert arrive(job_in(Status.PROCESSING), envelope(status, raw_s3_key=raw_key)) == Verdict(Outcome.INVALID, Reason.RAW_KEY)


@pytest.mark.req("D4.4")
@pytest.mark.parametrize("key", [
    "result.json",
    f"results/{FILE}/{JOB}",
    f"results/{FILE}/{JOB}/",
    f"results/{FILE}/{UUID(int=2)}/result.json",
    f"results/{UUID(int=2)}/{JOB}/result.json",
    f"results/{FILE}/{JOB}x/result.json",
    f"/results/{FILE}/{JOB}/result.json",
    f"results/{FILE}/{JOB}/../{UUID(int=2)}/result.json",
    f"results/{FILE}/{JOB}/./result.json",
    f"results/{FILE}/{JOB}//result.json",
    f"results/{FILE}/{JOB}/x/",
    f"Results/{FILE}/{JOB}/result.json",
])  # fmt: skip
@pytest.mark.parametrize("status", [ServiceStatus.DONE, ServiceStatus.NEEDS_CHECK, ServiceStatus.ERROR])
def test_a_result_key_elsewhere_is_refused(key: str, status: ServiceStatus) -> None:
    message = envelope(status, result_s3=ObjectKey("any", key))
    assert arrive(job_in(Status.PROCESSING), message) == Verdict(Outcome.INVALID, Reason.RESULT_KEY)


@pytest.mark.req("D4.4")
@pytest.mark.parametrize("name", ["result.json", "a/b/c", "..x", ".hidden", "%2e%2e", "ü"])
def test_below_its_prefix_a_service_is_free(name: str) -> None:
    message = envelope(ServiceStatus.DONE, result_s3=ObjectKey("any", f"results/{FILE}/{JOB}/{name}"))
    assert arrive(job_in(Status.PROCESSING), message).outcome is Outcome.APPLIED


@pytest.mark.req("D4.4", "S4.4")
def test_late_comes_before_invalid() -> None:
    message = envelope(ServiceStatus.DONE, raw_s3_key="raw/x.json")
    assert arrive(job_in(Status.TIMEOUT), message) == Verdict(Outcome.LATE, Status.TIMEOUT)


# --- a model of the rows ----------------------------------------------------------------------------------------------


@attrs.define
class Row:
    """A job with its file's and fact's columns as the one writing statement leaves them."""

    job: Job
    acked: bool = False
    finished: bool = False
    republish_count: int = 0
    columns: dict[str, Any] = attrs.Factory(dict)
    metrics: dict[str, Any] = attrs.Factory(dict)
    file: tuple[FileStatus, str | None] | None = None
    facts: list[FailureKind] = attrs.Factory(list)

    def write(self, change: Change) -> None:
        assert change.expected == self.job.status
        assert change.job.id == self.job.id
        self.job = attrs.evolve(self.job, status=change.status, result_msg_id=change.result_msg_id)
        self.acked |= change.acked
        self.finished |= change.status in FINAL
        self.metrics |= change.metrics or {}
        for name in ("service_name", "service_version"):
            self.columns[name] = getattr(change, name) or self.columns.get(name)
        for name in ("error_code", "error_message", "result_schema_version"):
            self.columns[name] = getattr(change, name)
        self.columns["objects"] = (change.result, change.raw)
        if change.file is not None:
            self.file = (change.file, change.error_code if change.file is FileStatus.ERROR else None)
        if change.fact is not None:
            self.facts.append(change.fact)


MSG_IDS = st.sampled_from(["result:1", "result:2", "result:3", None])
SENDABLE = st.sampled_from(ServiceStatus)


class Exchange(RuleBasedStateMachine):
    """One file, its jobs, and any sequence of what can happen to them."""

    @initialize(maximum=st.integers(0, 4))
    def begin(self, maximum: int) -> None:
        self.maximum = maximum
        self.rows: list[Row] = []
        self.registered: set[ObjectKey] = set()
        self.frozen: dict[UUID, str] = {}
        self.file_status = "UPLOADED"
        self.queue_another()

    def queue_another(self) -> None:
        self.rows.append(Row(Job(UUID(int=len(self.rows) + 1), FILE, Status.QUEUED)))

    @property
    def current(self) -> Row:
        return self.rows[-1]

    def row(self, which: int) -> Row:
        return self.rows[which % len(self.rows)]

    def write(self, row: Row, change: Change | None) -> None:
        if change is None:
            return
        row.write(change)
        if row is self.current and change.file is not None:
            self.file_status = change.file

    @rule(which=st.integers(0, 9), event=st.sampled_from([Event.PUBLISHED, Event.UNBUILDABLE, Event.EXPIRED]))
    def time_or_publisher(self, which: int, event: Event) -> None:
        row = self.row(which)
        self.write(row, advance(row.job, event, "why"))

    @rule(which=st.integers(0, 9))
    def ack_timeout(self, which: int) -> None:
        row = self.row(which)
        if decide_unacked(row.republish_count, self.maximum) is UnackedAction.DEAD_LETTER:
            self.write(row, advance(row.job, Event.UNACKED, "why"))
        elif change := advance(row.job, Event.REPUBLISHED):
            row.republish_count += 1
            self.write(row, change)

    @rule(
        which=st.integers(0, 9),
        status=SENDABLE,
        msg_id=MSG_IDS,
        raw=st.booleans(),
        name=st.sampled_from(["r.json", "s.json", "../x"]),
    )
    def message(self, which: int, status: ServiceStatus, msg_id: str | None, raw: bool, name: str) -> None:
        row = self.row(which)
        message = envelope(
            status,
            raw_s3_key=f"raw/{row.job.id}.json" if raw else None,
            result_s3=ObjectKey("b", f"results/{FILE}/{row.job.id}/{name}"),
            metrics={"republish_count": 99, "rows": 1},
        )
        message = attrs.evolve(message, job_id=row.job.id)
        verdict = receive(row.job, message, msg_id, raw_bucket=RAW_BUCKET)
        assert (verdict.outcome is Outcome.APPLIED) == (verdict.change is not None)
        if verdict.change:
            stored = [key for key in (verdict.change.result, verdict.change.raw) if key]
            assert not self.registered & set(stored)
            self.registered.update(stored)
        self.write(row, verdict.change)

    @precondition(lambda self: self.current.job.status in RETRYABLE)
    @rule()
    def retry(self) -> None:
        self.queue_another()
        self.file_status = "UPLOADED"

    @invariant()
    def final_jobs_never_change(self) -> None:
        for row in self.rows:
            if row.job.status in FINAL:
                assert self.frozen.setdefault(row.job.id, repr(row)) == repr(row)

    @invariant()
    def facts_are_exact(self) -> None:
        kinds = {"TIMEOUT": FailureKind.TIMEOUT, "NO_ACK": FailureKind.NO_ACK, "UNSUPPORTED_FORMAT": FailureKind.SERVICE_ERROR}
        for row in self.rows:
            kind = kinds.get(row.columns.get("error_code") or "")
            assert row.facts == ([kind] if kind else [])
            assert bool(row.facts) == (row.job.status in RETRYABLE and row.columns["error_code"] != "INVALID_REQUEST")

    @invariant()
    def repeats_stay_within_their_maximum(self) -> None:
        for row in self.rows:
            assert row.republish_count <= self.maximum
            assert "republish_count" not in row.metrics
            if row.job.status is Status.DLQ:
                assert row.republish_count == self.maximum

    @invariant()
    def the_file_follows_its_current_job(self) -> None:
        status = self.current.job.status
        if status in RETRYABLE:
            assert self.file_status == "ERROR"
        elif status in {Status.QUEUED, Status.PUBLISHED}:
            assert self.file_status == "UPLOADED"
        else:
            assert self.file_status == "PROCESSING"

    @invariant()
    def what_is_recorded_fits_the_status(self) -> None:
        for row in self.rows:
            assert row.finished == (row.job.status in FINAL)
            assert row.acked or row.job.status is not Status.PROCESSING


TestExchange = pytest.mark.req("R1", "R2", "R3", "R4", "R5", "R8", "D3.2", "D4.2", "B46", "B47")(Exchange.TestCase)
TestExchange.settings = settings(deadline=None, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow])


# --- a batch is one message after the other ---------------------------------------------------------------------------


def pending(draw: st.DrawFn) -> Pending:
    """A message for one of three jobs (the third unknown), valid or not, with one of few ids and keys."""
    job_id, file_id = UUID(int=draw(st.integers(1, 3))), FILE
    owner = UUID(int=draw(st.sampled_from([job_id.int, job_id.int, 1])))
    document: dict[str, Any] = {
        "schema_version": "1.0",
        "job_id": str(job_id),
        "status": draw(SENDABLE).value,
        "service": {"name": draw(st.sampled_from(["a", "b"])), "version": "1"},
        "result_s3": {"bucket": RAW_BUCKET, "key": f"results/{file_id}/{owner}/{draw(st.sampled_from('xy'))}"},
        "metrics": draw(st.dictionaries(st.sampled_from(["m", "n", "republish_count"]), st.integers(0, 3), max_size=2)),
        "error": {"code": draw(st.sampled_from(["X", "Y"])), "message": ""},
    }
    if draw(st.booleans()):
        document["raw_s3_key"] = f"raw/{owner}.json"
    if draw(st.integers(0, 9)) == 0:
        del document["service"]
    return Pending(Received(json.dumps(document).encode(), draw(MSG_IDS)), 262_144)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Pending], list[Job]]:
    messages = [pending(draw) for _ in range(draw(st.integers(0, 8)))]
    jobs = [
        Job(UUID(int=number), FILE, status, "result:3" if status in FINAL and draw(st.booleans()) else None)
        for number, status in enumerate(
            draw(st.lists(st.sampled_from([*Status, *[Status.PUBLISHED] * 4]), min_size=2, max_size=2)), 1
        )
    ]
    return messages, jobs


@pytest.mark.req("R4", "D4.9", "S4.2", "B42")
@RELAXED
@given(batches())
def test_a_batch_is_the_same_as_one_message_after_the_other(batch: tuple[list[Pending], list[Job]]) -> None:
    messages, jobs = batch
    together, singly = {job.id: Row(job) for job in jobs}, {job.id: Row(job) for job in jobs}

    verdicts, changes = decide(messages, {job.id: job for job in jobs}, RAW_BUCKET)
    assert len({change.job.id for change in changes}) == len(changes)
    for change in changes:
        assert change.job.status == change.expected or change.expected == together[change.job.id].job.status
        together[change.job.id].write(change)

    one_by_one = []
    for message in messages:
        (verdict,), written = decide([message], {key: row.job for key, row in singly.items()}, RAW_BUCKET)
        one_by_one.append((verdict.outcome, verdict.reason))
        for change in written:
            singly[change.job.id].write(change)

    assert [(verdict.outcome, verdict.reason) for verdict in verdicts] == one_by_one
    assert together == singly


ACK: dict[str, Any] = {
    "schema_version": "1.0",
    "job_id": str(JOB),
    "status": "processing",
    "service": {"name": "a", "version": "1"},
}


@pytest.mark.req("R4", "D4.1", "D4.9")
@pytest.mark.parametrize(("result", "status", "file", "fact"), [
    ({"status": "error", "error": {"code": "X", "message": "why"}}, Status.ERROR, FileStatus.ERROR, FailureKind.SERVICE_ERROR),
    (
        {"status": "done", "result_s3": {"bucket": "b", "key": f"results/{FILE}/{JOB}/x"}},
        Status.DONE,
        FileStatus.PROCESSING,
        None,
    ),
])  # fmt: skip
def test_an_ack_and_its_result_in_one_batch_make_one_change(
    result: dict[str, Any], status: Status, file: FileStatus, fact: FailureKind | None
) -> None:
    messages = [
        Pending(Received(json.dumps(document).encode(), "result:1"), 262_144) for document in (ACK, ACK | result, ACK | result)
    ]
    verdicts, (change,) = decide(messages, {JOB: job_in(Status.PUBLISHED)}, RAW_BUCKET)
    assert [verdict.outcome for verdict in verdicts] == [Outcome.APPLIED, Outcome.APPLIED, Outcome.DUPLICATE]
    assert (change.expected, change.status, change.acked) == (Status.PUBLISHED, status, True)
    assert (change.file, change.fact, change.result_msg_id) == (file, fact, "result:1")
