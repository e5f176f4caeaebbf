"""D4.7-D4.9: messages are kept through an outage, take effect in order, and are answered once the commit stands."""

import pytest
import trio

from armcore_trio.errors import DependencyDown
from tests.support import envelopes
from tests.support.database import Database, JobIds
from tests.support.exchange import Exchange
from tests.support.failing import failing
from tests.support.records import Records
from tests.support.service import Headers, ServiceClient
from tests.support.waiting import until


def kill_session(db: Database, name: str) -> bool:
    sessions = "FROM pg_stat_activity WHERE datname = current_database() AND application_name = %s"
    return bool(db.value(f"SELECT bool_and(pg_terminate_backend(pid)) {sessions}", name))


@pytest.mark.req("D4.8")
async def test_each_of_the_six_outcomes_is_answered(db: Database, exchange: Exchange, service: ServiceClient) -> None:
    job, finished, acked = db.insert_job(), db.insert_job(status="timeout"), db.insert_job(status="processing")
    stranger = JobIds(finished.file_id, finished.file_id)
    answers = await exchange.deliver(
        service,
        (envelopes.done(job), "r"),
        (envelopes.done(job), "r"),
        (envelopes.done(finished), "r"),
        (envelopes.ack(acked), None),
        (envelopes.done(stranger), "r"),
        (envelopes.done(job, status="weird"), "r"),
        (b"{", "r"),
    )
    assert answers == [
        {"outcome": "applied", "job_id": str(job.id), "reason": None},
        {"outcome": "duplicate", "job_id": str(job.id), "reason": None},
        {"outcome": "late", "job_id": str(finished.id), "reason": "timeout"},
        {"outcome": "ignored", "job_id": str(acked.id), "reason": "processing"},
        {"outcome": "unknown_job", "job_id": str(stranger.id), "reason": None},
        {"outcome": "invalid", "job_id": str(job.id), "reason": "schema"},
        {"outcome": "invalid", "job_id": None, "reason": "not_json"},
    ]
    assert exchange.applied == {"applied": 1, "duplicate": 1, "late": 1, "ignored": 1, "unknown": 1, "invalid": 2}


@pytest.mark.req("D4.8")
async def test_the_answer_comes_after_the_commit(db: Database, exchange: Exchange, service: ServiceClient) -> None:
    job = db.insert_job(status="published")
    reply = service.new_reply()
    async with trio.open_nursery() as nursery:
        with db.transaction() as session:
            session.execute("SELECT 1 FROM recognition_job WHERE id = %s FOR UPDATE", [job.id])
            service.send(envelopes.done(job), "r", reply=reply)
            nursery.start_soon(exchange.apply, 1)
            await until(lambda: db.lock_waiters() == 1)
            assert (service.heard(reply), db.job(job)["status"]) == ([], "published")
    assert db.job(job)["status"] == "done"
    assert service.answer(reply)["outcome"] == "applied"


@pytest.mark.req("D4.8", "B43")
async def test_an_answer_nobody_waits_for_any_more_does_no_harm(db: Database, exchange: Exchange, service: ServiceClient) -> None:
    gone, here = db.insert_jobs(2, status="published")
    reply = service.new_reply()
    service.send(envelopes.done(gone), "r", reply="_INBOX.nobody.listens")
    service.send(envelopes.done(here), "r", reply=reply)
    await exchange.apply(2)
    assert db.statuses([gone, here]) == ["done", "done"]
    assert service.answer(reply)["outcome"] == "applied"


@pytest.mark.req("D4.8", "B43")
async def test_an_answer_that_cannot_be_sent_is_a_warning_and_the_commit_stands(
    db: Database, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    jobs = db.insert_jobs(2, status="published")
    for job in jobs:
        service.send(envelopes.done(job), "r", reply=service.new_reply())
    await exchange.received(2)
    exchange.parts.inbox.answer = None  # as the intake leaves it when its connection ends
    await exchange.apply(2)
    assert db.statuses(jobs) == ["done", "done"]
    assert log.one("inbox.answers_unsent", log_level="warning")["count"] == 2
    assert len(exchange.parts.inbox) == 0


@pytest.mark.req("D4.9")
@pytest.mark.environment(INBOX_BATCH_SIZE=2)
async def test_batches_take_effect_in_the_order_of_arrival(
    db: Database, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    jobs = db.insert_jobs(7, status="published")
    for job in reversed(jobs):
        service.send(envelopes.done(job), "r")
    await exchange.received(7)
    async with trio.open_nursery() as nursery:
        await nursery.start(exchange.parts.application.run, exchange.parts.stop)
        await until(lambda: set(db.statuses(jobs)) == {"done"})
        nursery.cancel_scope.cancel()
    arrived = [str(job.id) for job in reversed(jobs)]
    applied = [record["job_ids"] for record in log.named("inbox.applied")]
    assert applied == [arrived[0:2], arrived[2:4], arrived[4:6], arrived[6:]]
    transactions = [row["xmin"] for row in db.jobs(jobs)][::-1]
    assert transactions == sorted(transactions)


@pytest.mark.req("D4.9", "S4.4")
@pytest.mark.parametrize("first", ["done", "error"])
async def test_of_two_results_for_a_job_the_first_counts(
    db: Database, exchange: Exchange, service: ServiceClient, first: str
) -> None:
    job, other = db.insert_jobs(2, status="processing")
    said = [(envelopes.done(job), "r1"), (envelopes.error(job), "r2")]
    if first == "error":
        said.reverse()
    outcomes = await exchange.outcomes(service, said[0], (envelopes.done(other), "r3"), said[1])
    assert outcomes == ["applied", "applied", "late"]
    assert db.job(job)["status"] == first
    assert (db.fact(job) is None) == (first == "done")


@pytest.mark.req("D4.7")
async def test_messages_outlive_the_database_connection_they_were_to_be_applied_on(
    db: Database, exchange: Exchange, service: ServiceClient
) -> None:
    jobs = db.insert_jobs(3, status="published")
    replies = [service.new_reply() for _ in jobs]
    for job, reply in zip(jobs, replies, strict=True):
        service.send(envelopes.done(job), "r", reply=reply)
    await exchange.received(3)
    application, stop = exchange.parts.application, exchange.parts.stop
    with db.transaction() as session:
        session.execute("LOCK TABLE recognition_job")
        with failing(DependencyDown, "database"):
            async with trio.open_nursery() as nursery:
                await nursery.start(application.run, stop)
                await until(lambda: db.lock_waiters() == 1)
                assert kill_session(db, "armcore-trio subscriber")
    assert len(exchange.parts.inbox) == 3
    assert db.statuses(jobs) == ["published"] * 3
    assert [service.heard(reply) for reply in replies] == [[], [], []]

    async with trio.open_nursery() as nursery:
        await nursery.start(application.run, stop)
        await until(lambda: all(map(service.heard, replies)))
        nursery.cancel_scope.cancel()
    assert [service.answer(reply)["outcome"] for reply in replies] == ["applied"] * 3
    assert db.statuses(jobs) == ["done"] * 3


@pytest.mark.req("D4.7", "B44")
@pytest.mark.environment(INBOX_BUFFER_MESSAGES=2)
async def test_what_cannot_be_kept_is_logged_with_its_ids(
    db: Database, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    jobs = db.insert_jobs(5, status="published")
    log.claim("inbox.abandoned")
    for n, job in enumerate(jobs):
        service.send(envelopes.done(job), f"r{n}")
    await until(lambda: exchange.parts.receiving.totals["received"] == 5)
    abandoned = log.named("inbox.abandoned", log_level="error")
    assert [(record["job_id"], record["msg_id"]) for record in abandoned] == [(str(jobs[n].id), f"r{n}") for n in (2, 3, 4)]
    await exchange.apply(2)
    assert db.statuses(jobs) == ["done", "done", "published", "published", "published"]
    assert exchange.parts.receiving.totals["abandoned"] == 3


@pytest.mark.req("B42", "D4.5")
@pytest.mark.parametrize("name", ["Nats-Msg-Id", "nats-msg-id", "NATS-MSG-ID", "Nats-Msg-id"])
async def test_the_message_id_is_found_in_any_case(db: Database, exchange: Exchange, service: ServiceClient, name: str) -> None:
    job = db.insert_job(status="published")
    service.send(envelopes.done(job), headers={"X-Trace": "1", name: "the-id", "Y": "nats-msg-id"})
    await exchange.apply(1)
    assert db.job(job)["result_msg_id"] == "the-id"
    assert await exchange.outcomes(service, (envelopes.done(job), "the-id")) == ["duplicate"], "another spelling is a repeat"


MISSING: dict[str, Headers] = {
    "no headers": {},
    "other headers": {"Msg-Id": "x", "X-Nats-Msg-Id": "y"},
    "an empty value": {"Nats-Msg-Id": ""},
    "blanks": {"nats-msg-id": "   "},
}


@pytest.mark.req("B42", "D4.5")
@pytest.mark.parametrize("case", MISSING)
async def test_a_missing_message_id_is_told_apart(
    db: Database, exchange: Exchange, service: ServiceClient, log: Records, case: str
) -> None:
    job = db.insert_job(status="published")
    service.send(envelopes.done(job), headers=MISSING[case])
    await exchange.apply(1)
    assert (db.job(job)["status"], db.job(job)["result_msg_id"]) == ("done", None)
    assert log.one("inbox.missing_msg_id")["job_id"] == str(job.id)


@pytest.mark.req("B42")
async def test_of_different_message_ids_the_first_counts_and_a_warning_says_so(
    db: Database, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    twice, differing = db.insert_jobs(2, status="published")
    service.send(envelopes.done(twice), headers=[("Nats-Msg-Id", "a"), ("nats-msg-id", "a"), ("NATS-MSG-ID", "")])
    service.send(envelopes.done(differing), headers=[("nats-msg-id", "first"), ("Nats-Msg-Id", "second")])
    await exchange.apply(2)
    assert [row["result_msg_id"] for row in db.jobs([twice, differing])] == ["a", "first"]
    record = log.one("inbox.conflicting_msg_ids", log_level="warning")
    assert (record["job_id"], record["msg_id"]) == (str(differing.id), "first")


@pytest.mark.req("B22", "B42")
async def test_a_message_id_that_no_column_can_hold_harms_nobody(
    db: Database, exchange: Exchange, service: ServiceClient
) -> None:
    jobs = db.insert_jobs(3, status="published")
    for job, msg_id in zip(jobs, ["good", "with\0nul", "x" * 20_000], strict=True):
        service.send(envelopes.done(job), msg_id)
    await exchange.apply(3)
    assert db.statuses(jobs) == ["done"] * 3
    assert [len(row["result_msg_id"]) for row in db.jobs(jobs)] == [4, 8, 20_000]


@pytest.mark.req("B43", "D4.6")
async def test_a_no_responders_message_is_no_data(db: Database, exchange: Exchange, service: ServiceClient, log: Records) -> None:
    job = db.insert_job(status="published")
    service.publish(service.result_subject, b"", status="503")
    service.publish(service.result_subject, b"", headers={"Status": "503", "Description": "No Responders"})
    service.send(envelopes.ack(job))
    await exchange.apply(3)
    assert [record["reason"] for record in log.named("inbox.invalid")] == ["empty", "empty"]
    assert exchange.applied == {"invalid": 2, "applied": 1}
    assert db.job(job)["status"] == "processing"
