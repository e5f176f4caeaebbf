"""D1.1, D1.2, S1.2: what counts as published, watched on the wire and between the locks."""

from collections.abc import Callable, Iterator

import pytest
import trio

from armcore_trio.demo.embedded import Nats
from armcore_trio.exchange.publisher import Publisher
from armcore_trio.settings import URL, Settings, load
from armcore_trio.supervision.supervisor import ChildSpec, Supervisor
from tests.support import envelopes
from tests.support.clock import FrozenClock
from tests.support.database import Database
from tests.support.exchange import Exchange, Parts, open_exchange, record_passes
from tests.support.failing import nats_down
from tests.support.proxy import Direction, Proxy
from tests.support.records import Records
from tests.support.service import ServiceClient
from tests.support.waiting import until


@pytest.fixture
def wire(link: Callable[[int], Proxy], nats_server: Nats) -> Proxy:
    """A link to the shared NATS that can be watched and broken."""
    return link(nats_server.port)


@pytest.fixture
def wired(environment: dict[str, str], wire: Proxy) -> Settings:
    """The settings of an instance behind that link."""
    return load(environment | {URL: f"nats://127.0.0.1:{wire.port}"})


def commands(stream: bytes) -> Iterator[str]:
    """What a client wrote, command by command; of a publication its message id."""
    while stream:
        line, _, stream = stream.partition(b"\r\n")
        verb, *words = line.decode().split()
        if verb == "HPUB":
            header = stream[: int(words[-2])].decode()
            stream = stream[int(words[-1]) + 2 :]
            yield header.partition("Nats-Msg-Id: ")[2].strip()
        else:
            yield verb


@pytest.mark.req("D1.1")
async def test_the_ping_that_confirms_a_batch_follows_its_last_byte(
    clock: FrozenClock, db: Database, wired: Settings, wire: Proxy
) -> None:
    jobs = db.insert_jobs(400, file_name="n" * 2000)
    async with open_exchange(wired, receiving=False) as exchange:
        before = len(wire.recorded(Direction.UP))
        wire.hold(Direction.DOWN)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(exchange.publish)
            await until(lambda: wire.recorded(Direction.UP)[before:].endswith(b"PING\r\n"))
            on_the_wire = list(commands(wire.recorded(Direction.UP)[before:]))
            assert on_the_wire == [job.msg_id for job in sorted(jobs, key=lambda job: job.id)] + ["PING"]
            assert set(db.statuses(jobs)) == {"queued"}, "sent is not confirmed"
            wire.resume()
    assert set(db.statuses(jobs)) == {"published"}
    assert {row["published_at"] for row in db.jobs(jobs)} == {clock.start}


@pytest.mark.req("D1.1", "S1.2", "B31", "B32")
async def test_a_batch_whose_pong_never_comes_stays_queued_and_unlocked(
    clock: FrozenClock, db: Database, wired: Settings, wire: Proxy, service: ServiceClient
) -> None:
    job = db.insert_job()
    with nats_down("did not confirm a batch within 5 s"):
        async with open_exchange(wired, receiving=False) as exchange, trio.open_nursery() as nursery:
            wire.hold(Direction.DOWN)
            nursery.start_soon(exchange.publish)
            await until(lambda: wire.recorded(Direction.UP).endswith(b"PING\r\n") and service.heard())
            assert db.is_locked(job)
            await clock.advance(4.999, settle=False)
            assert db.is_locked(job)
            await clock.advance(0.001, settle=False)
            await trio.sleep_forever()
    await until(lambda: not db.is_locked(job))
    assert db.job(job)["status"] == "queued"


@pytest.mark.req("D1.1", "S1.2")
@pytest.mark.parametrize("size", [1, 5_000, 60_000])
async def test_a_link_that_breaks_amid_a_batch_publishes_none_of_it(
    db: Database, wired: Settings, wire: Proxy, settings: Settings, service: ServiceClient, size: int
) -> None:
    jobs = db.insert_jobs(200)
    with nats_down():
        async with open_exchange(wired, receiving=False) as exchange:
            wire.cut_after(size)
            await exchange.publish()
    assert set(db.statuses(jobs)) == {"queued"}

    first_time = len(service.heard())
    async with open_exchange(settings, receiving=False) as exchange:
        await exchange.publish()
    assert set(db.statuses(jobs)) == {"published"}
    assert first_time < 200
    again = [request.msg_id for request in service.heard()[first_time:]]
    assert sorted(map(str, again)) == sorted(job.msg_id for job in jobs), "the same ids once more"


@pytest.mark.req("S1.2", "D1.1")
async def test_without_nats_a_job_stays_queued_until_nats_is_back(
    clock: FrozenClock, db: Database, environment: dict[str, str], own_nats: Nats, log: Records
) -> None:
    parts = Parts(load(environment | {URL: own_nats.url}))
    own_nats.stop()
    job = db.insert_job()
    async with trio.open_nursery() as nursery:
        Supervisor(nursery).start(ChildSpec("publisher", parts.publisher.run), parts.publishing)
        await until(lambda: parts.publishing.restarts == 1)
        assert "Connect call failed" in log.one("task.restarting", log_level="warning")["error"]
        await clock.advance(0.6, settle=False)  # the first back-off and its jitter
        await until(lambda: parts.publishing.restarts == 2)
        assert db.job(job)["status"] == "queued"
        own_nats.start()
        await clock.advance(1.2, settle=False)
        await until(lambda: db.job(job)["status"] == "published")
        assert db.job(job)["published_at"] == clock.at(1.8)
        nursery.cancel_scope.cancel()


@pytest.mark.req("D1.2", "B45")
async def test_an_ack_faster_than_the_commit_waits_for_it(
    clock: FrozenClock, db: Database, wired: Settings, wire: Proxy, exchange: Exchange, service: ServiceClient
) -> None:
    job = db.insert_job()
    async with open_exchange(wired, receiving=False) as slow, trio.open_nursery() as nursery:
        wire.hold(Direction.DOWN)
        nursery.start_soon(slow.publish)
        await until(service.heard, what="the request")
        assert db.job(job)["status"] == "queued"
        reply = service.new_reply()
        service.send(envelopes.ack(job), reply=reply)
        nursery.start_soon(exchange.apply, 1)
        await until(lambda: db.lock_waiters() == 1, what="the ack waiting for the publisher's lock")
        assert service.heard(reply) == []
        wire.resume()
    assert service.answer(reply) == {"outcome": "applied", "job_id": str(job.id), "reason": None}
    row = db.job(job)
    assert (row["status"], row["published_at"], row["started_at"]) == ("processing", clock.start, clock.start)


@pytest.mark.req("D1.2", "D2.1")
async def test_a_result_faster_than_a_commit_that_fails_is_applied_to_the_queued_job(
    db: Database, wired: Settings, wire: Proxy, exchange: Exchange, service: ServiceClient
) -> None:
    job = db.insert_job()
    with nats_down():
        async with open_exchange(wired, receiving=False) as slow, trio.open_nursery() as nursery:
            wire.hold(Direction.DOWN)
            nursery.start_soon(slow.publish)
            await until(service.heard, what="the request")
            wire.cut()
            wire.resume()
            await trio.sleep_forever()
    assert await exchange.outcomes(service, (envelopes.ack(job), None), (envelopes.done(job), "r1")) == ["ignored", "applied"]
    row = db.job(job)
    assert (row["status"], row["started_at"], row["published_at"]) == ("done", None, None)
    await exchange.publish()
    assert len(service.heard()) == 1, "a finished job is not requested again"


@pytest.mark.req("D1.6")
async def test_an_insert_from_any_session_wakes_the_publisher(
    clock: FrozenClock, db: Database, exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = record_passes(monkeypatch, Publisher)
    old = db.insert_job(status="timeout")
    async with trio.open_nursery() as nursery:
        await nursery.start(exchange.parts.publisher.run, exchange.parts.stop)
        await until(lambda: passes == [0])
        with db.transaction() as session:
            session.execute("SET search_path = ''")
            session.execute("CREATE ROLE " + (role := f"producer_{old.id.hex}"))
            session.execute(f"GRANT INSERT ON public.recognition_job TO {role}".encode())
            session.execute(f"SET ROLE {role}".encode())
            values = [old.file_id, 2, "tabular"]
            session.execute("INSERT INTO public.recognition_job (file_id, attempt, pipeline) VALUES (%s, %s, %s)", values)
            session.execute("RESET ROLE")
            session.execute(f"DROP OWNED BY {role}".encode())
            session.execute(f"DROP ROLE {role}".encode())
        await until(lambda: db.rows("recognition_job", "attempt = 2 AND status = 'published'"))
        assert clock.seconds == 0
        nursery.cancel_scope.cancel()
