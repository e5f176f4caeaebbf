"""R3: without an ack the request is repeated, and after the last repeat the job is a dead letter, each at its exact instant."""

from collections.abc import Callable

import pytest
import trio

from armcore_trio.demo.embedded import Nats
from armcore_trio.errors import Dependency, DependencyDown
from armcore_trio.exchange.publisher import Publisher
from armcore_trio.settings import URL, Settings, load
from tests.support import envelopes
from tests.support.clock import FrozenClock
from tests.support.database import Database
from tests.support.exchange import Exchange, open_exchange, record_passes
from tests.support.failing import nats_down
from tests.support.proxy import Direction, Proxy
from tests.support.records import Records
from tests.support.refusals import refuse, relent
from tests.support.service import ServiceClient
from tests.support.waiting import until

LOST = DependencyDown(Dependency.NATS, "the server closed the connection")


async def publish_at(clock: FrozenClock, exchange: Exchange, *instants: float) -> None:
    """A pass at each of these instants."""
    for instant in instants:
        await clock.advance_to(instant)
        await exchange.publish()


@pytest.mark.req("S3.1", "D3.2", "D4.10")
async def test_three_repeats_30_s_apart_and_the_dead_letter_at_120_s(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    job = db.insert_job()
    await exchange.publish()
    (first,) = service.heard()
    for repeat in (1, 2, 3):
        await publish_at(clock, exchange, 30 * repeat - 0.001)
        assert len(service.heard()) == repeat, "not a millisecond early"
        await publish_at(clock, exchange, 30 * repeat)
        row = db.job(job)
        assert (row["status"], row["metrics"]) == ("published", {"republish_count": repeat})
        assert row["published_at"] == clock.at(30 * repeat)
        assert (row["request_msg_id"], row["attempt"], row["reply_deadline"]) == (job.msg_id, 1, clock.at(900))
    assert service.heard() == [first] * 4, "the same request, id and all"

    await publish_at(clock, exchange, 119.999)
    assert db.job(job)["status"] == "published"
    await publish_at(clock, exchange, 120)
    row, file, fact = db.job(job), db.file(job), db.fact(job)
    assert (row["status"], row["error_code"], row["finished_at"]) == ("dlq", "NO_ACK", clock.at(120))
    assert (row["request_msg_id"], row["metrics"], row["published_at"]) == (job.msg_id, {"republish_count": 3}, clock.at(90))
    assert (file["status"], file["error_code"], file["error_message"]) == ("ERROR", "NO_ACK", row["error_message"])
    assert fact is not None
    assert (fact["failure_kind"], fact["error_code"], fact["pipeline"]) == ("NO_ACK", "NO_ACK", "tabular")
    assert (fact["file_id"], fact["service_name"], fact["occurred_at"]) == (job.file_id, None, clock.at(120))
    assert row["xmin"] == file["xmin"] == fact["xmin"], "one transaction"
    assert [record["job_ids"] for record in log.named("outbox.republished")] == [[str(job.id)]] * 3
    assert log.one("outbox.dead_lettered")["job_ids"] == [str(job.id)]

    before = db.snapshot()
    await publish_at(clock, exchange, 150, 180)
    assert (db.snapshot(), len(service.heard())) == (before, 4)


@pytest.mark.req("S3.1", "D3.2", "R9")
async def test_the_running_publisher_keeps_the_same_instants(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = record_passes(monkeypatch, Publisher)
    job = db.insert_job()
    seen: list[tuple[float, tuple[str, int]]] = []
    async with trio.open_nursery() as nursery:
        await nursery.start(exchange.parts.publisher.run, exchange.parts.stop)
        for polls in range(25):
            await until(lambda expected=polls + 1: len(passes) == expected)  # type: ignore[misc]
            row = db.job(job)
            if (what := (row["status"], row["metrics"].get("republish_count", 0))) not in [change for _, change in seen]:
                seen.append((clock.seconds, what))
            await clock.advance(5)
        nursery.cancel_scope.cancel()
    assert seen == [
        (0, ("published", 0)),
        (30, ("published", 1)),
        (60, ("published", 2)),
        (90, ("published", 3)),
        (120, ("dlq", 3)),
    ]
    assert len(service.heard()) == 4


@pytest.mark.req("D3.2")
@pytest.mark.environment(OUTBOX_MAX_REPUBLISH=0)
async def test_with_no_repeats_allowed_the_first_wait_ends_in_a_dead_letter(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient
) -> None:
    job = db.insert_job()
    await exchange.publish()
    await publish_at(clock, exchange, 29.999)
    assert db.job(job)["status"] == "published"
    await publish_at(clock, exchange, 30)
    assert (db.job(job)["status"], db.job(job)["metrics"]) == ("dlq", {})
    assert len(service.heard()) == 1


@pytest.mark.req("R3")
@pytest.mark.environment(ACK_TIMEOUT_SECONDS=0.25, OUTBOX_MAX_REPUBLISH=1)
async def test_the_wait_and_the_number_of_repeats_are_settings(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient
) -> None:
    job = db.insert_job()
    await exchange.publish()
    await publish_at(clock, exchange, 0.249, 0.25, 0.499)
    assert (db.job(job)["status"], len(service.heard())) == ("published", 2)
    await publish_at(clock, exchange, 0.5)
    assert db.job(job)["status"] == "dlq"


@pytest.mark.req("S3.2")
async def test_a_service_that_comes_after_the_first_publication_stops_the_repeats(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient
) -> None:
    job = db.insert_job()
    await exchange.publish()
    await publish_at(clock, exchange, 20)
    assert await exchange.outcomes(service, (envelopes.ack(job), None)) == ["applied"]
    await publish_at(clock, exchange, 30, 60, 90, 120, 150)
    row = db.job(job)
    assert (row["status"], row["started_at"], row["metrics"]) == ("processing", clock.at(20), {})
    assert len(service.heard()) == 1


@pytest.mark.req("S3.2")
async def test_an_ack_of_the_last_repeat_saves_the_job(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient
) -> None:
    job = db.insert_job()
    await exchange.publish()
    await publish_at(clock, exchange, 30, 60, 90, 119.999)
    assert await exchange.outcomes(service, (envelopes.ack(job), None)) == ["applied"]
    await publish_at(clock, exchange, 120, 150)
    assert (db.job(job)["status"], db.job(job)["metrics"]) == ("processing", {"republish_count": 3})
    assert db.fact(job) is None


@pytest.mark.req("R3", "R2", "S4.4")
async def test_what_a_service_says_of_a_dead_letter_changes_nothing(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    job = db.insert_job()
    await exchange.publish()
    await publish_at(clock, exchange, 30, 60, 90, 120)
    before = db.snapshot()
    outcomes = await exchange.outcomes(service, (envelopes.ack(job), None), (envelopes.done(job), envelopes.result_id(job)))
    assert outcomes == ["ignored", "late"]
    assert db.snapshot() == before
    assert log.one("inbox.ignored")["job_id"] == log.one("inbox.late")["job_id"] == str(job.id)


@pytest.mark.req("D3.1", "B30")
async def test_while_no_ack_could_come_in_nothing_is_repeated_or_counted(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient
) -> None:
    job = db.insert_job()
    await exchange.publish()
    before = db.job(job)
    exchange.parts.receiving.failed(LOST)
    await publish_at(clock, exchange, 30, 60, 90, 120, 150)
    assert (db.job(job), len(service.heard())) == (before, 1)

    exchange.parts.receiving.running()
    await publish_at(clock, exchange, 151)
    assert (db.job(job)["metrics"], len(service.heard())) == ({"republish_count": 1}, 2), "one repeat, no burst"
    await publish_at(clock, exchange, 152, 180.999)
    assert len(service.heard()) == 2


@pytest.mark.req("D3.1", "D3.2", "B30")
async def test_after_an_outage_the_last_wait_is_a_full_one(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient
) -> None:
    job = db.insert_job()
    await exchange.publish()
    await publish_at(clock, exchange, 30, 60, 90)
    exchange.parts.receiving.failed(LOST)
    await publish_at(clock, exchange, 120, 140)
    exchange.parts.receiving.running()
    await publish_at(clock, exchange, 140, 169.999)
    assert (db.job(job)["status"], len(service.heard())) == ("published", 4)
    await publish_at(clock, exchange, 170)
    assert (db.job(job)["status"], db.job(job)["finished_at"]) == ("dlq", clock.at(170))


@pytest.mark.req("D3.1", "B30")
@pytest.mark.parametrize("repeats", [0, 3])
async def test_over_a_dead_connection_nothing_is_counted_or_given_up(
    clock: FrozenClock,
    db: Database,
    environment: dict[str, str],
    nats_server: Nats,
    link: Callable[[int], Proxy],
    repeats: int,
) -> None:
    wire = link(nats_server.port)
    settings = load(environment | {URL: f"nats://127.0.0.1:{wire.port}"})
    job = db.insert_job(status="published", published_at=clock.start, metrics={"republish_count": repeats})
    before = db.snapshot()
    with nats_down():
        async with open_exchange(settings, receiving=False) as exchange, trio.open_nursery() as nursery:
            await clock.advance(30)
            wire.stall()
            before_pass = len(wire.recorded(Direction.UP))
            nursery.start_soon(exchange.publish)
            await until(lambda: wire.recorded(Direction.UP)[before_pass:].endswith(b"PING\r\n"))
            assert db.is_locked(job)
            await clock.advance(5, settle=False)
            await trio.sleep_forever()
    await until(lambda: not db.is_locked(job))
    assert db.snapshot() == before
    wire.resume()
    async with open_exchange(settings, receiving=False) as exchange:
        await publish_at(clock, exchange, 64.999)
        row = db.job(job)
        assert (row["status"], row["metrics"]) == ("published", {"republish_count": max(repeats, 1)})
        await publish_at(clock, exchange, 65)
        assert db.job(job)["status"] == ("published" if repeats == 0 else "dlq")


@pytest.mark.req("D3.2", "D1.4")
async def test_a_job_past_its_deadline_is_the_watchdogs(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient
) -> None:
    once = db.insert_job(status="published", published_at=clock.start, reply_deadline=clock.at(29.999))
    last = db.insert_job(
        status="published", published_at=clock.start, reply_deadline=clock.at(29.999), metrics={"republish_count": 3}
    )
    before = db.snapshot()
    await publish_at(clock, exchange, 30, 60, 90, 120)
    assert (db.snapshot(), service.heard()) == (before, [])
    await exchange.expire()
    assert db.statuses([once, last]) == ["timeout", "timeout"]


@pytest.mark.req("D1.5", "R3")
async def test_a_repeat_that_can_no_longer_be_built_ends_the_job(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    broken, good = db.insert_jobs(2)
    await exchange.publish()
    db.execute("UPDATE stored_file SET s3_object_id = NULL WHERE id = %s", broken.file_id)
    await publish_at(clock, exchange, 30)
    row, file = db.job(broken), db.file(broken)
    assert (row["status"], row["error_code"], row["finished_at"]) == ("error", "INVALID_REQUEST", clock.at(30))
    assert row["error_message"] == "the file has no source object"
    assert (file["status"], file["error_code"]) == ("ERROR", "INVALID_REQUEST")
    assert db.fact(broken) is None
    assert db.job(good)["metrics"] == {"republish_count": 1}
    assert [request.msg_id for request in service.heard()][2:] == [good.msg_id]
    assert log.one("outbox.refused")["job_id"] == str(broken.id)


@pytest.mark.req("R3", "D4.2")
@pytest.mark.parametrize(
    ("metrics", "after"),
    [
        ('{"pages": 3}', {"pages": 3, "republish_count": 1}),
        ('{"republish_count": "2"}', {"republish_count": 1}),
        ("[1, 2]", {"republish_count": 1}),
        ("null", {"republish_count": 1}),
    ],
)
async def test_a_repeat_leaves_other_metrics_alone_and_copes_with_strange_ones(
    clock: FrozenClock, db: Database, exchange: Exchange, metrics: str, after: dict[str, object]
) -> None:
    job = db.insert_job(metrics=metrics)
    await exchange.publish()
    await publish_at(clock, exchange, 30)
    assert db.job(job)["metrics"] == after


@pytest.mark.req("R3")
@pytest.mark.environment(OUTBOX_BATCH_SIZE=3)
async def test_repeats_go_out_longest_waiting_first_and_all_in_one_go(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient
) -> None:
    waits = [40, 31, 90, 33, 30, 50, 35, 29]
    jobs = {wait: db.insert_job(status="published", published_at=clock.at(-wait)) for wait in waits}
    await exchange.publish()
    assert [request.msg_id for request in service.heard()] == [jobs[wait].msg_id for wait in sorted(waits)[:0:-1]]
    assert db.job(jobs[29])["metrics"] == {}


@pytest.mark.req("R3")
@pytest.mark.environment(OUTBOX_BATCH_SIZE=7)
async def test_two_publishers_repeat_each_job_once(
    clock: FrozenClock, db: Database, settings: Settings, service: ServiceClient
) -> None:
    jobs = db.insert_jobs(100, status="published", published_at=clock.at(-30))
    async with open_exchange(settings) as one, open_exchange(settings) as other, trio.open_nursery() as nursery:
        nursery.start_soon(one.publish)
        nursery.start_soon(other.publish)
    assert sorted(str(request.msg_id) for request in service.heard()) == sorted(job.msg_id for job in jobs)
    assert all(row["metrics"] == {"republish_count": 1} for row in db.jobs(jobs))


@pytest.mark.req("B48", "R3")
@pytest.mark.environment(OUTBOX_BATCH_SIZE=50)
async def test_dead_letters_the_database_refuses_are_tried_again_and_hold_up_nobody(
    clock: FrozenClock, db: Database, exchange: Exchange, log: Records
) -> None:
    jobs = db.insert_jobs(120, status="published", published_at=clock.start, metrics={"republish_count": 3})
    guilty = jobs[6::7]
    refuse(db, "quality_failure_fact", guilty)
    log.claim("outbox.write_refused")
    await publish_at(clock, exchange, 30)
    assert db.statuses(jobs) == ["published" if job in guilty else "dlq" for job in jobs]
    assert {db.file(job)["status"] for job in guilty} == {"UPLOADED"}
    assert len(db.rows("quality_failure_fact")) == len(jobs) - len(guilty)
    assert len(log.named("outbox.write_refused")) == len(guilty)

    relent(db)
    await publish_at(clock, exchange, 35)
    assert set(db.statuses(jobs)) == {"dlq"}
    assert len(db.rows("quality_failure_fact")) == len(jobs)


@pytest.mark.req("R3", "R8")
async def test_a_dead_letter_leaves_a_file_alone_that_has_moved_on(clock: FrozenClock, db: Database, exchange: Exchange) -> None:
    old = db.insert_job(status="published", published_at=clock.start, metrics={"republish_count": 3})
    db.insert_attempt(old, status="processing")
    before = db.file(old)
    await publish_at(clock, exchange, 30)
    assert db.job(old)["status"] == "dlq"
    assert db.fact(old) is not None
    assert db.file(old) == before
