"""NATS on Trio against real servers: confirmed or failed, in bounded time, and nothing handed to us is lost."""

import gc
import json
import logging
import os
import random
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import pytest
import trio
import trustme

from armcore_trio.borders import bus as bus_module
from armcore_trio.borders import nats_client
from armcore_trio.borders.bus import Bus, Message, Received, open_bus
from armcore_trio.demo.embedded import Nats
from armcore_trio.errors import DependencyDown
from armcore_trio.settings import CA_FILE, DSN, JWT, SEED, URL, Settings, load
from tests.support.credentials import Operator, new_seed, public_key, tls_config
from tests.support.failing import failing, nats_down
from tests.support.listener import Listener
from tests.support.proxy import Direction, Mode, Proxy
from tests.support.service import ServiceClient
from tests.support.waiting import in_thread, until

NAME = "armcore-trio test"
LIMIT_SECONDS = 20
Link = Callable[[int], Proxy]

pytestmark = pytest.mark.req("R6")


def settings_for(*urls: str, **variables: str) -> Settings:
    return load({DSN: "host=unused", URL: ",".join(urls), **variables})


def local(port: int, credentials: str = "", scheme: str = "nats") -> str:
    return f"{scheme}://{credentials}{'@' if credentials else ''}127.0.0.1:{port}"


@contextmanager
def taking(least: float, most: float) -> Iterator[None]:
    """The block lasts that long, in seconds of real time."""
    start = time.monotonic()
    yield
    taken = time.monotonic() - start
    assert least <= taken <= most, f"{taken:.3f} s"


@pytest.fixture
def subject() -> str:
    return f"test_{uuid4().hex}"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """All limits small, their order kept."""
    monkeypatch.setattr(bus_module, "CONNECT_SECONDS", 0.5)
    monkeypatch.setattr(bus_module, "PING_SECONDS", 0.2)
    monkeypatch.setattr(bus_module, "ANSWER_SECONDS", 0.4)
    monkeypatch.setattr(bus_module, "_CLOSE_SECONDS", 0.2)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """No library says a word, in the log or on the streams."""
    caplog.set_level(logging.WARNING)
    yield
    gc.collect()
    assert [record.getMessage() for record in caplog.records] == []
    assert capfd.readouterr() == ("", "")


def messages(subject: str, count: int, size: int = 0) -> list[Message]:
    """Numbered ones."""
    return [Message(subject, str(number).encode().ljust(size), f"id-{number}") for number in range(count)]


def numbers(found: list[Received]) -> list[int]:
    return [int(one.data) for one in found]


# Publishing


@pytest.mark.req("D1.1", "R1")
async def test_a_batch_arrives_whole_in_order_and_with_its_headers(nats_server: Nats, subject: str) -> None:
    with ServiceClient(nats_server.url, subjects=[subject]) as service:
        async with open_bus(settings_for(nats_server.url), NAME) as bus:
            batch = [
                Message(subject, b"a", "job:1"),
                Message(subject, b"", "é\N{SNOWMAN}"),
                Message(subject, b"c", None, "reply.here"),
            ]
            await bus.publish_batch(batch)
            heard = service.heard()
            assert [(one.data, one.headers, one.reply) for one in heard] == [
                (b"a", (("Nats-Msg-Id", "job:1"),), None),
                (b"", (("Nats-Msg-Id", "é\N{SNOWMAN}"),), None),
                (b"c", (), "reply.here"),
            ]


@pytest.mark.req("D1.1")
@pytest.mark.parametrize(("count", "size"), [(5_000, 10), (200, 50_000)])
async def test_a_large_batch_arrives_whole_and_in_order(nats_server: Nats, subject: str, count: int, size: int) -> None:
    with ServiceClient(nats_server.url, subjects=[subject]) as service:
        async with open_bus(settings_for(nats_server.url), NAME) as bus:
            with trio.fail_after(LIMIT_SECONDS):
                await bus.publish_batch(messages(subject, count, size))
            heard = service.heard()
            assert [int(one.data) for one in heard] == list(range(count))
            assert {len(one.data) for one in heard} == {len(message.data) for message in messages(subject, count, size)}
            assert [one.msg_id for one in heard] == [f"id-{number}" for number in range(count)]


async def test_the_largest_message_is_what_the_server_says() -> None:
    with Nats(config="max_payload: 4321") as server:
        async with open_bus(settings_for(server.url), NAME) as bus:
            assert bus.max_payload == 4321


@pytest.mark.req("D1.1")
@pytest.mark.parametrize("count", [0, 1, 3000])
async def test_a_batch_counts_once_a_pong_answers_a_ping_written_after_it(
    nats_server: Nats, link: Link, subject: str, count: int
) -> None:
    proxy = link(nats_server.port)
    done = trio.Event()
    async with open_bus(settings_for(local(proxy.port)), NAME) as bus:
        before = len(proxy.recorded(Direction.UP))

        async def publish() -> None:
            await bus.publish_batch(messages(subject, count))
            done.set()

        async with trio.open_nursery() as nursery:
            proxy.hold(Direction.DOWN)
            nursery.start_soon(publish)
            with trio.fail_after(LIMIT_SECONDS):
                await until(lambda: proxy.recorded(Direction.UP)[before:].endswith(b"PING\r\n"), what="the PING")
                wire = proxy.recorded(Direction.UP)[before:]
                assert [int(line) for line in wire.split(b"\r\n") if line.isdigit()] == list(range(count))
                assert wire.count(b"PING") == 1
                await until(lambda: proxy.recorded(Direction.DOWN).endswith(b"PONG\r\n"), what="the PONG")
                await trio.testing.wait_all_tasks_blocked(0.02)
                assert not done.is_set()
                proxy.resume()
                await done.wait()


@pytest.mark.req("D1.1", "B30")
@pytest.mark.parametrize("size", [0, 1, 3_000, 150_000])
async def test_a_batch_whose_connection_dies_does_not_count(nats_server: Nats, link: Link, subject: str, size: int) -> None:
    proxy = link(nats_server.port)
    with ServiceClient(nats_server.url, subjects=[subject]) as service:
        with taking(0, 3), nats_down("(?i)connection"):
            async with open_bus(settings_for(local(proxy.port)), NAME) as bus:
                proxy.cut_after(size + 1)
                await bus.publish_batch(messages(subject, 2_000, 100))
                pytest.fail("confirmed")
        await in_thread(service.flush)
        assert len(service.heard()) < 2_000


@pytest.mark.req("D1.1", "B30")
async def test_a_batch_without_its_pong_does_not_count(nats_server: Nats, link: Link, subject: str) -> None:
    proxy = link(nats_server.port)
    with ServiceClient(nats_server.url, subjects=[subject]) as service:
        with taking(0, 3), nats_down("closed the connection"):
            async with open_bus(settings_for(local(proxy.port)), NAME) as bus:
                proxy.cut_after(1, Direction.DOWN)
                await bus.publish_batch(messages(subject, 10))
                pytest.fail("confirmed")
        assert len(service.heard()) == 10


@pytest.mark.req("D1.1", "B30")
async def test_nothing_counts_after_the_connection_has_ended(own_nats: Nats, subject: str) -> None:
    with nats_down("closed the connection"):
        async with open_bus(settings_for(own_nats.url), NAME) as bus:
            own_nats.kill()
            for _ in range(3):
                with nats_down("(?i)connection"), trio.CancelScope(shield=True):
                    await bus.publish_batch(messages(subject, 1))
            await trio.sleep_forever()


@pytest.mark.req("D1.1")
async def test_batches_at_the_same_time_are_each_confirmed(nats_server: Nats, subject: str) -> None:
    with ServiceClient(nats_server.url, subjects=[f"{subject}.*"]) as service:
        async with open_bus(settings_for(nats_server.url), NAME) as bus, trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(bus.publish_batch, messages(f"{subject}.{number}", 50))
        for number in range(20):
            assert [int(one.data) for one in service.heard(f"{subject}.{number}")] == list(range(50))


@pytest.mark.req("B07")
async def test_cancelling_a_batch_at_any_moment_harms_nothing(nats_server: Nats, subject: str) -> None:
    """The next batch on the same connection goes out whole, once, and is confirmed by a PONG of its own."""
    chance = random.Random(7)
    with ServiceClient(nats_server.url, subjects=[f"{subject}.kept"]) as service, trio.fail_after(40):
        async with open_bus(settings_for(nats_server.url), NAME) as bus:
            start = trio.current_time()
            await bus.publish_batch(messages(subject, 500, 1_000))
            duration = trio.current_time() - start
            for number in range(60):
                with trio.move_on_after(chance.random() * duration):
                    await bus.publish_batch(messages(subject, 500, 1_000))
                await bus.publish_batch([Message(f"{subject}.kept", str(number).encode())])
                assert len(service.heard()) == number + 1
        assert [int(one.data) for one in service.heard()] == list(range(60))


# The end of a connection


@pytest.mark.req("B07", "B16", "B34")
@pytest.mark.parametrize("end", ["kill", "stop"])
async def test_a_server_that_goes_ends_the_block_at_once(own_nats: Nats, end: str) -> None:
    with taking(0, 5), nats_down("closed the connection"):
        async with open_bus(settings_for(own_nats.url), NAME):
            await trio.to_thread.run_sync(own_nats.kill if end == "kill" else own_nats.stop)
            await trio.sleep_forever()


@pytest.mark.req("B14", "B32")
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("how", ["frozen", "stalled", "deaf", "mute"])
async def test_a_peer_that_falls_silent_ends_the_block_within_two_pings(own_nats: Nats, link: Link, how: str) -> None:
    proxy = link(own_nats.port)
    with taking(0.2, 2), nats_down(r"did not answer a ping within 0\.2 s"):
        async with open_bus(settings_for(local(proxy.port)), NAME):
            if how == "frozen":
                own_nats.freeze()
            elif how == "stalled":
                proxy.stall()
            else:
                proxy.set(Mode.SWALLOW, [Direction.UP if how == "deaf" else Direction.DOWN])
            await trio.sleep_forever()


@pytest.mark.req("B31", "B32")
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("size", [10, 20_000_000], ids=["small", "larger than all buffers"])
async def test_a_batch_to_a_frozen_server_ends_in_time(own_nats: Nats, subject: str, size: int) -> None:
    with taking(0.2, 2.5), nats_down("did not"):
        async with open_bus(settings_for(own_nats.url), NAME) as bus:
            own_nats.freeze()
            await bus.publish_batch([Message(subject, b"x" * min(size, 1_000_000))] * max(1, size // 1_000_000))
            pytest.fail("confirmed")


@pytest.mark.req("B14")
@pytest.mark.usefixtures("impatient")
async def test_every_call_to_a_frozen_server_ends_in_time(own_nats: Nats, subject: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_module, "PING_SECONDS", 30)
    for call in ("subscribe", "drain"):
        with taking(0.3, 2), nats_down(r"did not (confirm|drain) the subscription within 0\.4 s"):
            async with open_bus(settings_for(own_nats.url), NAME) as bus:
                if call == "drain":
                    await bus.subscribe(subject, "group", lambda _: None)
                own_nats.freeze()
                await (bus.drain() if call == "drain" else bus.subscribe(subject, "group", lambda _: None))
                pytest.fail("confirmed")
        own_nats.thaw()


@pytest.mark.req("B14")
@pytest.mark.usefixtures("impatient")
async def test_leaving_the_block_on_a_frozen_server_ends_in_time(own_nats: Nats, subject: str) -> None:
    with trio.fail_after(LIMIT_SECONDS):
        async with open_bus(settings_for(own_nats.url), NAME) as bus:
            await bus.subscribe(subject, "group", lambda _: None)
            own_nats.freeze()
            start = time.monotonic()
    assert time.monotonic() - start < 1.5


@pytest.mark.req("B34", "B57")
async def test_lame_duck_mode_ends_the_block_with_what_was_under_way_delivered(own_nats: Nats, subject: str) -> None:
    delivered: list[Received] = []
    with ServiceClient(own_nats.url) as service, taking(0, 5), nats_down("is shutting down"):
        async with open_bus(settings_for(own_nats.url), NAME) as bus:
            await bus.subscribe(subject, "group", delivered.append)
            for number in range(500):
                service.publish(subject, str(number).encode())
            await in_thread(service.flush)
            own_nats.signal("ldm")
            await trio.sleep_forever()
    assert numbers(delivered) == list(range(500))


@pytest.mark.req("B20", "B34")
async def test_a_user_struck_from_the_servers_list_is_told_at_once() -> None:
    users = 'authorization { users: [ { user: "%s", password: "canary" } ] }'
    with Nats(config=users % "core") as server, taking(0, 5):
        for reason in ("closed the connection", "Authorization Violation"):
            with nats_down(reason) as caught:
                async with open_bus(settings_for(local(server.port, "core:canary")), NAME):
                    server.reload(users % "another")
                    await trio.sleep_forever()
            assert "canary" not in caught.error.reason


@pytest.mark.req("B33", "B34")
async def test_a_failure_of_whoever_takes_the_messages_ends_the_block(nats_server: Nats, subject: str) -> None:
    def deliver(_: Received) -> None:
        raise LookupError("a defect")

    with ServiceClient(nats_server.url) as service, trio.fail_after(5), failing(LookupError, "a defect"):
        async with open_bus(settings_for(nats_server.url), NAME) as bus:
            await bus.subscribe(subject, "group", deliver)
            service.publish(subject, b"x")
            await trio.sleep_forever()


async def test_a_failure_inside_the_block_leaves_it_as_it_is(nats_server: Nats) -> None:
    with failing(LookupError):
        async with open_bus(settings_for(nats_server.url), NAME):
            raise LookupError


# Connecting


@pytest.mark.req("B09", "D9.1", "S1.2")
async def test_a_refused_connection_is_told_at_once() -> None:
    with taking(0, 2), nats_down(r"nats://127\.0\.0\.1:1: .*Connect"):
        async with open_bus(settings_for(local(1)), NAME):
            pytest.fail("connected")


@pytest.mark.req("B09")
async def test_a_host_without_an_address_is_told() -> None:
    with taking(0, 4), nats_down(r"nats://no-such-host\.invalid:4222: "):
        async with open_bus(settings_for("nats://no-such-host.invalid"), NAME):
            pytest.fail("connected")


@pytest.mark.req("B09")
async def test_a_host_that_cannot_be_a_name_is_down_like_any_other() -> None:
    with taking(0, 4), nats_down("nats://a{64}"):
        async with open_bus(settings_for(f"nats://{'a' * 64}.invalid"), NAME):
            pytest.fail("connected")


@pytest.mark.req("B58", "B09")
@pytest.mark.usefixtures("impatient")
async def test_a_silent_server_costs_the_limit_then_the_next_one_is_used(nats_server: Nats, subject: str) -> None:
    with Listener() as silent:
        with taking(0.5, 2.5):
            async with open_bus(settings_for(local(silent.port), local(1), nats_server.url), NAME) as bus:
                assert bus.server.port == nats_server.port
                await bus.publish_batch(messages(subject, 1))
        await until(lambda: silent.ended == silent.accepted == 1, 5, "the end of the attempt's socket")
        expected = rf"127\.0\.0\.1:{silent.port} did not let us connect within 0\.5 s; nats://127\.0\.0\.1:1: .*Connect"
        with taking(0.5, 2.5), nats_down(expected):
            async with open_bus(settings_for(local(silent.port), local(1)), NAME):
                pytest.fail("connected")


@pytest.mark.req("B58")
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "greeting",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"INFO {\r\n",
        b"INFO []\r\n",
        b"INFO {}\r\n",
        b"\0" * 5000,
    ],
)
@pytest.mark.parametrize("hang_up", [False, True])
async def test_another_kind_of_server_is_nats_that_is_down(greeting: bytes, hang_up: bool) -> None:
    with Listener(greeting, hang_up=hang_up) as stranger, taking(0, 2.5), nats_down():
        async with open_bus(settings_for(local(stranger.port)), NAME):
            pytest.fail("connected")


@pytest.mark.req("B37", "B07")
async def test_a_cancelled_attempt_to_connect_closes_its_socket() -> None:
    with Listener() as silent:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(open_bus(settings_for(local(silent.port)), NAME).__aenter__)
            await until(lambda: silent.accepted, 5, "the attempt")
            with taking(0, 2.5):
                nursery.cancel_scope.cancel()
                with trio.CancelScope(shield=True):
                    await until(lambda: silent.ended, 5, "the end of the attempt's socket")


async def test_the_servers_monitoring_shows_our_name(nats_server: Nats, link: Link) -> None:
    proxy = link(nats_server.port)
    async with open_bus(settings_for(local(proxy.port)), NAME):
        connect = next(line for line in proxy.recorded(Direction.UP).split(b"\r\n") if line.startswith(b"CONNECT "))
        assert json.loads(connect.removeprefix(b"CONNECT "))["name"] == NAME


async def test_a_server_that_is_full_is_down() -> None:
    """Why, it says only to a client that has not yet written; ours may have."""
    with Nats(config="max_connections: 1") as server, ExitStack() as stack:

        def occupy() -> bool:
            """The one who asked whether the server is up may still be there."""
            guest = socket.create_connection(("127.0.0.1", server.port), 5)
            guest.settimeout(5)
            guest.sendall(b'CONNECT {"verbose":false}\r\nPING\r\n')
            try:
                while data := guest.recv(4096):
                    if data.endswith(b"PONG\r\n"):
                        stack.enter_context(guest)
                        return True
            except OSError:
                pass
            guest.close()
            return False

        await until(occupy, what="the only place")
        with taking(0, 2), nats_down():
            async with open_bus(settings_for(server.url), NAME):
                await trio.sleep_forever()


# Credentials

SPECIAL = "p@ss:w/o rd%#?é"


@pytest.mark.req("R7", "R6")
@pytest.mark.parametrize(
    ("config", "right", "wrong"),
    [
        (f'user: "u@:/", password: "{SPECIAL}"', f"{quote('u@:/', safe='')}:{quote(SPECIAL, safe='')}", "u:canary"),
        (f'token: "{SPECIAL}"', quote(SPECIAL, safe=""), "canary"),
    ],
    ids=["user and password", "token"],
)
async def test_credentials_in_the_url(config: str, right: str, wrong: str, subject: str) -> None:
    with Nats(config=f"authorization {{ {config} }}") as server:
        async with open_bus(settings_for(local(server.port, right)), NAME) as bus:
            await bus.publish_batch(messages(subject, 1))
        for credentials in (wrong, ""):
            with taking(0, 2), nats_down("Authorization Violation") as caught:
                async with open_bus(settings_for(local(server.port, credentials)), NAME):
                    pytest.fail("connected")
            assert "canary" not in caught.error.reason


@pytest.mark.req("R6", "R7", "B20", "B43")
async def test_a_subject_without_the_right_to_it_is_named(subject: str) -> None:
    permissions = f'publish: {{ deny: ["{subject}.no", "_INBOX.>"] }}, subscribe: {{ deny: "{subject}.no" }}'
    users = f'authorization {{ users: [ {{ user: "u", password: "p", permissions: {{ {permissions} }} }} ] }}'
    with Nats(config=users) as server:
        credentials: dict[str, Any] = {"user": "u", "pass": "p"}
        with ServiceClient(server.url, subjects=[f"{subject}.yes"], **credentials) as service:
            async with open_bus(settings_for(local(server.port, "u:p")), NAME) as bus:
                for denied in (f"{subject}.no", "_INBOX.a.b"):
                    with nats_down(f'(?i)permissions violation for publish to "{denied}"'):
                        await bus.publish_batch([Message(f"{subject}.yes", b"1"), Message(denied, b"2")])
                with nats_down(f'(?i)permissions violation for subscription to "{subject}.no"'):
                    await bus.subscribe(f"{subject}.no", "group", lambda _: None)
                await bus.publish_batch([Message(f"{subject}.yes", b"3")])
                assert [one.data for one in service.heard()] == [b"1", b"1", b"3"]


@pytest.mark.req("R6", "B21")
async def test_an_nkey_seed_lets_us_in(subject: str) -> None:
    seed, stranger = new_seed(), new_seed()
    with Nats(config=f"authorization {{ users: [ {{ nkey: {public_key(seed)} }} ] }}") as server:
        async with open_bus(settings_for(server.url, **{SEED: f"{seed}\r\n"}), NAME) as bus:
            await bus.publish_batch(messages(subject, 1))
        with nats_down("Authorization Violation") as caught:
            async with open_bus(settings_for(server.url, **{SEED: stranger}), NAME):
                pytest.fail("connected")
        assert stranger not in caught.error.reason


@pytest.mark.req("R6", "B20", "B21")
async def test_a_jwt_with_its_seed_lets_us_in(subject: str) -> None:
    seed, operator = new_seed(), Operator()
    with Nats(config=operator.config()) as server:
        async with open_bus(settings_for(server.url, **{SEED: seed, JWT: operator.user(seed)}), NAME) as bus:
            await bus.publish_batch(messages(subject, 1))
        for refused in (Operator().user(seed), operator.user(seed, exp=int(time.time()) - 10)):
            with nats_down("Authorization Violation") as caught:
                async with open_bus(settings_for(server.url, **{SEED: seed, JWT: refused}), NAME):
                    pytest.fail("connected")
            assert refused not in caught.error.reason
        with nats_down("Authorization Violation"):
            async with open_bus(settings_for(server.url), NAME):
                pytest.fail("connected")


@pytest.mark.req("R6", "B20")
async def test_a_jwt_that_expires_is_noticed_at_once_with_its_reason() -> None:
    seed, operator = new_seed(), Operator()
    with Nats(config=operator.config()) as server:
        user = operator.user(seed, exp=int(time.time()) + 2)
        with taking(0, 4), nats_down("(?i)authentication expired") as caught:
            async with open_bus(settings_for(server.url, **{SEED: seed, JWT: user}), NAME):
                await trio.sleep_forever()
        assert user not in caught.error.reason


# TLS


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@contextmanager
def tls_nats(authority: trustme.CA, directory: Path, *names: str, more: str = "") -> Iterator[Nats]:
    with Nats(config=f"{tls_config(authority.issue_cert(*names), directory)}\n{more}") as server:
        yield server


def ca_file(authority: trustme.CA, directory: Path) -> str:
    authority.cert_pem.write_to_path(str(directory / "ca.pem"))
    return str(directory / "ca.pem")


@pytest.mark.req("R6")
async def test_tls_with_the_right_authority(authority: trustme.CA, link: Link, tmp_path: Path, subject: str) -> None:
    with tls_nats(authority, tmp_path, "127.0.0.1", more='authorization { token: "canary" }') as server:
        proxy = link(server.port)
        settings = settings_for(local(proxy.port, "canary", "tls"), **{CA_FILE: ca_file(authority, tmp_path)})
        delivered: list[Received] = []
        with trio.fail_after(LIMIT_SECONDS):
            async with open_bus(settings, NAME) as bus:
                await bus.subscribe(subject, "", delivered.append)
                await bus.publish_batch(messages(subject, 2_000, 1_000))
                await until(lambda: len(delivered) == 2_000, what="all messages")
        assert numbers(delivered) == list(range(2_000))
        sent = proxy.recorded(Direction.UP)
        assert (b"canary" in sent, b"CONNECT" in sent, subject.encode() in sent) == (False, False, False)


@pytest.mark.req("R6", "B41")
@pytest.mark.parametrize("fault", ["another authority", "another name"])
async def test_tls_with_a_peer_we_cannot_trust(authority: trustme.CA, tmp_path: Path, fault: str) -> None:
    known = trustme.CA() if fault == "another authority" else authority
    name = "127.0.0.1" if fault == "another authority" else "nats.example"
    with tls_nats(authority, tmp_path, name) as server:
        settings = settings_for(local(server.port, "canary", "tls"), **{CA_FILE: ca_file(known, tmp_path)})
        with taking(0, 0.9), nats_down("(?i)certificate verify failed") as caught:
            async with open_bus(settings, NAME):
                pytest.fail("connected")
    assert "canary" not in caught.error.reason


@pytest.mark.req("R6", "B41")
async def test_the_end_of_a_tls_connection_is_told_in_our_words_alone(authority: trustme.CA, tmp_path: Path) -> None:
    """`quiet` holds that asyncio has nothing to add, in whichever order the end of TLS and that of the link arrive."""
    with tls_nats(authority, tmp_path, "127.0.0.1") as server:
        settings = settings_for(local(server.port, scheme="tls"), **{CA_FILE: ca_file(authority, tmp_path)})
        for _ in range(12):
            with nats_down():
                async with open_bus(settings, NAME):
                    with trio.CancelScope(shield=True):
                        await in_thread(server.stop)
                    await trio.sleep_forever()
            await in_thread(server.start)


@pytest.mark.req("R6", "R7")
async def test_tls_wanted_from_a_server_without_it_sends_no_credentials(nats_server: Nats, link: Link) -> None:
    proxy = link(nats_server.port)
    with taking(0, 2), nats_down("the server offers no TLS, and tls:// was asked for"):
        async with open_bus(settings_for(local(proxy.port, "canary", "tls")), NAME):
            pytest.fail("connected")
    assert proxy.recorded(Direction.UP) == b""


@pytest.mark.req("N17", "R6")
@pytest.mark.parametrize("more", ["", "allow_non_tls: true", "auto", "true", "1500ms"])
async def test_tls_is_made_however_the_server_offers_it(
    authority: trustme.CA, link: Link, tmp_path: Path, subject: str, more: str
) -> None:
    """Required, offered, begun by the client with and without a pause for those who wait: nothing after INFO is in clear."""
    config = tls_config(authority.issue_cert("127.0.0.1"), tmp_path)
    with Nats(config=f"{config}\n{more}" if ":" in more else config) as server:
        if more and ":" not in more:
            server.reload(config.replace("}", f", handshake_first: {more} }}"))
            await until(lambda: server_is_quiet(server.port), what="the new settings")
        proxy = link(server.port)
        wanted = local(proxy.port, "user:canary", "tls")
        settings = settings_for(local(1, "user:canary"), wanted, **{CA_FILE: ca_file(authority, tmp_path)})
        with trio.fail_after(LIMIT_SECONDS):
            async with open_bus(settings, NAME) as bus:
                await bus.publish_batch(messages(subject, 3))
        sent = proxy.recorded(Direction.UP)
        assert sent.startswith(b"\x16")
        assert not [word for word in (b"CONNECT", b"PING", b"PUB", b"canary", subject.encode()) if word in sent]
        assert b"PONG" not in proxy.recorded(Direction.DOWN)


def server_is_quiet(port: int) -> bool:
    """It does not speak first, or not at once."""
    with socket.create_connection(("127.0.0.1", port), 5) as guest:
        guest.settimeout(0.02)
        try:
            return not guest.recv(1)
        except TimeoutError:
            return True


@pytest.mark.req("N17", "R6")
@pytest.mark.parametrize("known", [True, False], ids=["another name", "another authority"])
async def test_tls_that_is_offered_only_is_made_with_a_peer_we_trust_or_not_at_all(
    authority: trustme.CA, link: Link, tmp_path: Path, known: bool
) -> None:
    with tls_nats(authority, tmp_path, "nats.example" if known else "127.0.0.1", more="allow_non_tls: true") as server:
        proxy = link(server.port)
        trusted = ca_file(authority if known else trustme.CA(), tmp_path)
        with nats_down("(?i)certificate verify failed"):
            async with open_bus(settings_for(local(proxy.port, "u:canary", "tls"), **{CA_FILE: trusted}), NAME):
                pytest.fail("connected")
        assert not [word for word in (b"CONNECT", b"canary") if word in proxy.recorded(Direction.UP)]


@pytest.mark.req("N17", "R6")
async def test_a_server_that_is_never_heard_gets_no_credentials_in_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_client, "_GREETING_SECONDS", 0.1)
    monkeypatch.setattr(bus_module, "CONNECT_SECONDS", 0.5)
    with Listener() as mute:
        with taking(0.5, 2.5), nats_down(r"did not let us connect within 0\.5 s"):
            async with open_bus(settings_for(local(mute.port, "u:canary", "tls")), NAME):
                pytest.fail("connected")
        assert mute.heard.startswith(b"\x16")
        assert b"canary" not in mute.heard


@pytest.mark.parametrize("scheme", ["nats", "tls"])
async def test_a_server_without_headers_is_refused_in_a_line(
    authority: trustme.CA, tmp_path: Path, link: Link, scheme: str
) -> None:
    """It resets a connection that sends one, and nobody would know why."""
    with tls_nats(authority, tmp_path, "127.0.0.1", more="allow_non_tls: true\nno_header_support: true") as server:
        proxy = link(server.port)
        trusted = {CA_FILE: ca_file(authority, tmp_path)} if scheme == "tls" else {}
        settings = settings_for(local(proxy.port, "u:canary", scheme), **trusted)
        with nats_down("the server takes no headers"):
            async with open_bus(settings, NAME):
                pytest.fail("connected")
        assert proxy.recorded(Direction.UP) == b""


@pytest.mark.req("R6")
async def test_no_tls_wanted_from_a_server_that_requires_it_is_told(authority: trustme.CA, tmp_path: Path) -> None:
    with tls_nats(authority, tmp_path, "127.0.0.1") as server, taking(0, 4), nats_down():
        async with open_bus(settings_for(server.url), NAME):
            pytest.fail("connected")


@pytest.mark.req("R6")
@pytest.mark.usefixtures("impatient")
async def test_a_tls_peer_that_falls_silent_in_the_handshake_costs_the_limit() -> None:
    greeting = b'INFO {"server_id":"x","version":"2.11.0","proto":1,"headers":true,"max_payload":1048576,"tls_required":true}\r\n'
    with Listener(greeting) as silent:
        with taking(0.5, 2.5), nats_down(r"did not let us connect within 0\.5 s"):
            async with open_bus(settings_for(local(silent.port, "canary", "tls")), NAME):
                pytest.fail("connected")
        await until(lambda: silent.ended == 1, 5, "the end of the attempt's socket")
        assert silent.heard[:1] == b"\x16"  # a handshake
        assert b"canary" not in silent.heard


def test_the_authorities_of_the_system_count_without_a_file_of_ours() -> None:
    from armcore_trio.borders.nats_client import credentials

    options = credentials(settings_for("tls://nats.example"), settings_for("tls://nats.example").nats_url[0])
    assert options["tls"].verify_mode is ssl.CERT_REQUIRED
    assert options["tls"].check_hostname


# Receiving


@pytest.mark.req("R6", "D4.9")
async def test_messages_are_delivered_in_order_with_all_that_came(nats_server: Nats, subject: str) -> None:
    delivered: list[Received] = []
    with ServiceClient(nats_server.url) as service:
        async with open_bus(settings_for(nats_server.url), NAME) as bus:
            await bus.subscribe(subject, "group", delivered.append)
            service.publish(subject, b"one", headers={"Nats-Msg-Id": "a"}, reply="answer.to")
            service.publish(subject, b"")
            for number in range(3_000):
                service.publish(subject, str(number).encode())
            await until(lambda: len(delivered) == 3_002, what="all messages")
    assert delivered[:2] == [Received(b"one", "a", "answer.to", subject=subject), Received(b"", subject=subject)]
    assert numbers(delivered[2:]) == list(range(3_000))


@pytest.mark.req("B42", "D4.5")
@pytest.mark.parametrize(
    ("headers", "msg_id", "conflicting"),
    [
        ([], None, False),
        ([("Nats-Msg-Id", "a")], "a", False),
        ([("nats-msg-id", "a")], "a", False),
        ([("NATS-MSG-ID", "  a b\t")], "a b", False),
        ([("Nats-Msg-Id", "")], None, False),
        ([("Nats-Msg-Id", "   ")], None, False),
        ([("Nats-Msg-Id", "a"), ("nats-msg-id", "a")], "a", False),
        ([("Nats-Msg-Id", "a"), ("Nats-Msg-Id", "b")], "a", True),
        ([("NATS-MSG-ID", "b"), ("Nats-Msg-Id", "a")], "b", True),
        ([("Nats-Msg-Id", ""), ("Nats-Msg-Id", "b")], "b", False),
        ([("Other", "x"), ("Nats-Msg-Id", "a:b:c"), ("Nats-Msg-Id-2", "y")], "a:b:c", False),
        ([("Nats-Msg-Id", "é\N{SNOWMAN}")], "é\N{SNOWMAN}", False),
        ([("Nats-Msg-Id", "a\0b")], "a\N{REPLACEMENT CHARACTER}b", False),
    ],
)
async def test_the_message_id_is_found_in_any_spelling(
    nats_server: Nats, subject: str, headers: list[tuple[str, str]], msg_id: str | None, conflicting: bool
) -> None:
    delivered: list[Received] = []
    with ServiceClient(nats_server.url) as service:
        async with open_bus(settings_for(nats_server.url), NAME) as bus:
            await bus.subscribe(subject, "group", delivered.append)
            service.publish(subject, b"x", headers=headers)
            await until(lambda: delivered, what="the message")
    assert delivered == [Received(b"x", msg_id, None, conflicting, subject)]


@pytest.mark.req("B42", "B43", "D4.6")
@pytest.mark.parametrize(
    "block",
    [
        b"NATS/1.0 503\r\n\r\n",
        b"NATS/1.0\r\n\r\n",
        b"NATS/1.0\r\nno colon\r\n\r\n",
        b"NATS/1.0\r\nNats-Msg-Id: \xff\xfe\r\n\r\n",
        b"\r\n\r\n",
        b"nonsense",
        b"\xff" * 100,
    ],
)
async def test_headers_of_any_kind_leave_the_next_message_alone(nats_server: Nats, subject: str, block: bytes) -> None:
    delivered: list[Received] = []
    with ServiceClient(nats_server.url) as service:
        async with open_bus(settings_for(nats_server.url), NAME) as bus:
            await bus.subscribe(subject, "group", delivered.append)
            service._write(b"HPUB %s %d %d\r\n%s\r\n" % (subject.encode(), len(block), len(block), block))
            service.publish(subject, b"next", headers={"Nats-Msg-Id": "a"})
            await until(lambda: len(delivered) == 2, 5, what="both messages")
    assert delivered[0].data == b""
    assert delivered[0].msg_id in (None, "\N{REPLACEMENT CHARACTER}" * 2)
    assert delivered[1] == Received(b"next", "a", subject=subject)


@pytest.mark.req("S6.2")
async def test_one_member_of_the_group_gets_each_message(nats_server: Nats, subject: str) -> None:
    first: list[Received] = []
    second: list[Received] = []
    settings = settings_for(nats_server.url)
    with ServiceClient(nats_server.url) as service:
        async with open_bus(settings, NAME) as one, open_bus(settings, NAME) as two:
            await one.subscribe(subject, "group", first.append)
            await two.subscribe(subject, "group", second.append)
            for number in range(1_000):
                service.publish(subject, str(number).encode())
            await until(lambda: len(first) + len(second) >= 1_000, what="all messages")
    assert sorted(numbers(first + second)) == list(range(1_000))
    assert first
    assert second


@pytest.mark.req("B04", "R9")
async def test_a_drain_delivers_all_that_was_published_before_and_nothing_after(nats_server: Nats, subject: str) -> None:
    delivered: list[Received] = []
    with ServiceClient(nats_server.url) as service:
        async with open_bus(settings_for(nats_server.url), NAME) as bus:
            await bus.subscribe(subject, "group", delivered.append)
            for number in range(5_000):
                service.publish(subject, str(number).encode().ljust(500))
            service.flush()
            with trio.fail_after(LIMIT_SECONDS):
                await bus.drain()
            assert numbers(delivered) == list(range(5_000))
            service.publish(subject, b"-1")
            service.flush()
            await bus.publish_batch(messages(f"{subject}.answers", 1))
            assert len(delivered) == 5_000


@pytest.mark.req("B04", "R9", "S6.2")
async def test_what_is_published_during_a_drain_reaches_this_member_or_the_other(nats_server: Nats) -> None:
    chance = random.Random(7)
    settings = settings_for(nats_server.url)
    for _ in range(8):
        subject = f"test_{uuid4().hex}"
        delivered: list[Received] = []
        sent = 0
        enough = threading.Event()
        with (
            ServiceClient(nats_server.url) as service,
            ServiceClient(nats_server.url, subjects=[subject], queue="group") as other,
        ):

            def publish(service: ServiceClient = service, subject: str = subject, enough: threading.Event = enough) -> int:
                count = 0
                while not enough.is_set() and count < 50_000:
                    service.publish(subject, str(count).encode())
                    count += 1
                service.flush()
                return count

            async with open_bus(settings, NAME) as bus, trio.open_nursery() as nursery:
                await bus.subscribe(subject, "group", delivered.append)

                async def count_sent(publish: Callable[[], int] = publish) -> None:
                    nonlocal sent
                    sent = await in_thread(publish)

                nursery.start_soon(count_sent)
                awaited = chance.randrange(1, 2_000)
                await until(lambda delivered=delivered, awaited=awaited: len(delivered) >= awaited, what="some messages")  # type: ignore[misc]
                with trio.fail_after(LIMIT_SECONDS):
                    await bus.drain()
                here = len(delivered)
                enough.set()
            assert len(delivered) == here
            there = [int(one.data) for one in other.heard(subject)]
        assert there
        assert Counter(numbers(delivered) + there) == Counter(range(sent))


@pytest.mark.req("B43")
async def test_an_inbox_for_answers_outlives_the_drain(nats_server: Nats, subject: str) -> None:
    delivered: list[Received] = []
    with ServiceClient(nats_server.url) as service:
        async with open_bus(settings_for(nats_server.url), NAME) as bus:
            await bus.subscribe(subject, "", delivered.append)
            await bus.drain()
            service.publish(subject, b"1")
            await until(lambda: numbers(delivered) == [1], what="the answer")


@pytest.mark.req("B07", "B37")
async def test_a_cancelled_drain_harms_nothing(nats_server: Nats, subject: str) -> None:
    chance = random.Random(7)
    with ServiceClient(nats_server.url) as service, trio.fail_after(LIMIT_SECONDS):
        for _ in range(20):
            async with open_bus(settings_for(nats_server.url), NAME) as bus:
                await bus.subscribe(subject, "group", lambda _: None)
                for number in range(100):
                    service.publish(subject, str(number).encode())
                with trio.move_on_after(chance.random() * 0.003):
                    await bus.drain()


# What stays behind


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - counted by the kernel, this one's own included both times


@pytest.mark.req("B07")
@pytest.mark.parametrize("end", ["left", "cancelled", "failed", "refused"])
async def test_nothing_is_left_of_connections_that_were_closed(nats_server: Nats, subject: str, end: str) -> None:
    settings = settings_for(local(1) if end == "refused" else nats_server.url)

    async def cycle() -> None:
        with trio.CancelScope() as scope:
            try:
                async with open_bus(settings, NAME) as bus:
                    await bus.subscribe(subject, "group", lambda _: None)
                    await bus.publish_batch(messages(subject, 10))
                    if end == "cancelled":
                        scope.cancel()
                        await trio.sleep_forever()
                    if end == "failed":
                        raise LookupError
            except* LookupError:
                assert end == "failed"
            except* DependencyDown:
                assert end == "refused"

    with trio.fail_after(LIMIT_SECONDS):
        await cycle()
        await trio.testing.wait_all_tasks_blocked()
        before = descriptors(), trio.lowlevel.current_statistics().tasks_living, threading.active_count()
        for _ in range(50):
            await cycle()
        await trio.testing.wait_all_tasks_blocked()
        assert (descriptors(), trio.lowlevel.current_statistics().tasks_living, threading.active_count()) == before


@pytest.mark.req("B07", "B16")
async def test_servers_killed_at_any_moment_end_their_own_connection_only(
    own_nats: Nats, nats_server: Nats, subject: str
) -> None:
    """A sibling on another server does not notice; `quiet` holds that no library says a word."""
    chance = random.Random(7)

    async def sibling(started: trio.Event) -> None:
        async with open_bus(settings_for(nats_server.url), NAME) as bus:
            while True:
                await bus.publish_batch(messages(subject, 5))
                started.set()

    async def use() -> None:
        async with open_bus(settings_for(own_nats.url), NAME) as bus:
            await bus.subscribe(subject, "group", lambda _: None)
            while True:
                await bus.publish_batch(messages(subject, 300))

    with trio.fail_after(40):
        async with trio.open_nursery() as nursery:
            started = trio.Event()
            nursery.start_soon(sibling, started)
            await started.wait()
            for _ in range(12):
                moment = chance.random() * 0.03

                async def kill(moment: float = moment) -> None:
                    with trio.CancelScope(shield=True):
                        await trio.sleep(moment)
                        await trio.to_thread.run_sync(own_nats.kill)

                with nats_down():
                    async with trio.open_nursery() as inner:
                        inner.start_soon(kill)
                        await use()
                await in_thread(own_nats.start)
            nursery.cancel_scope.cancel()


async def test_several_connections_live_side_by_side(nats_server: Nats, subject: str) -> None:
    delivered: list[Received] = []

    async def one(number: int, bus: Bus) -> None:
        await bus.publish_batch([Message(subject, str(number).encode())])

    async with open_bus(settings_for(nats_server.url), NAME) as receiver:
        await receiver.subscribe(subject, "", delivered.append)
        async with (
            open_bus(settings_for(nats_server.url), NAME) as first,
            open_bus(settings_for(nats_server.url), NAME) as second,
            trio.open_nursery() as nursery,
        ):
            for number in range(10):
                nursery.start_soon(one, number, first if number % 2 else second)
        await until(lambda: len(delivered) == 10, what="all messages")
    assert sorted(numbers(delivered)) == list(range(10))
