"""nats-servers joined by routes into one cluster, and a service on nats-py that finds its own way between them."""

import asyncio
import json
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Self
from uuid import UUID

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from armcore_trio.demo.embedded import Nats
from armcore_trio.demo.server_process import _free_port
from tests.support import envelopes
from tests.support.database import JobIds
from tests.support.waiting import LIMIT_SECONDS, wait_until


class Cluster:
    """Three nodes; on entering the block each knows the others."""

    def __init__(self) -> None:
        routes = [_free_port() for _ in range(3)]
        addresses = ", ".join(f"nats://127.0.0.1:{route}" for route in routes)
        self.nodes = [
            Nats(config=f"cluster {{ name: test, listen: 127.0.0.1:{route}, routes: [{addresses}] }}") for route in routes
        ]
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for node in self.nodes:
                stack.enter_context(node)
            wait_until(lambda: all(self.known_to(node) == len(self.nodes) for node in self.nodes), what="the cluster")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @staticmethod
    def known_to(node: Nats) -> int:
        """How many nodes a client is told of by this one."""
        with socket.create_connection(("127.0.0.1", node.port), 5) as connection, connection.makefile("rb") as stream:
            info = json.loads(stream.readline().removeprefix(b"INFO "))
        return len(info.get("connect_urls", []))


class ReconnectingService:
    """Acknowledges every request, and asks for each result to be applied until it is told so (D4.8), across reconnects."""

    def __init__(self, nodes: Sequence[Nats], subject: str, result_subject: str) -> None:
        self.requests: Counter[str] = Counter()
        """`Nats-Msg-Id` of each request heard, and how often."""
        self.outcomes: dict[str, list[str]] = {}
        """Job id → what it was answered."""
        self._urls = [node.url for node in nodes]
        self._subject, self._result_subject = subject, result_subject
        self._client = Client()
        self._loop = asyncio.SelectorEventLoop()  # trio-asyncio's policy would make one of its own kind
        self._work: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def port(self) -> int | None:
        """Of the node it is connected to; None while it is not."""
        url = self._client.connected_url
        return url.port if url is not None and self._client.is_connected else None

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._connect())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_SECONDS)
        self._loop.close()

    def _run(self, call: Any) -> None:
        asyncio.run_coroutine_threadsafe(call, self._loop).result(LIMIT_SECONDS)

    async def _connect(self) -> None:
        async def ignore(_: Exception) -> None:
            """It reconnects."""

        options: dict[str, Any] = {"dont_randomize": True, "max_reconnect_attempts": -1, "reconnect_time_wait": 0.1}
        await self._client.connect(self._urls, error_cb=ignore, **options)
        await self._client.subscribe(self._subject, queue="tabular-parser", cb=self._take)
        await self._client.flush()

    async def _close(self) -> None:
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        await self._client.close()

    async def _take(self, request: Msg) -> None:
        document = json.loads(request.data)
        job = JobIds(UUID(document["job_id"]), UUID(document["file_id"]))
        known = job.msg_id in self.requests
        self.requests[(request.headers or {})["Nats-Msg-Id"]] += 1
        await self._client.publish(self._result_subject, json.dumps(envelopes.ack(job)).encode())
        if not known:
            task = asyncio.create_task(self._confirm(job))
            self._work.add(task)

    async def _confirm(self, job: JobIds) -> None:
        body, headers = json.dumps(envelopes.done(job)).encode(), {"Nats-Msg-Id": envelopes.result_id(job)}
        while True:
            try:
                answer = await self._client.request(self._result_subject, body, timeout=1, headers=headers)
            except (nats.errors.Error, OSError, TimeoutError):
                await asyncio.sleep(0.1)
                continue
            self.outcomes.setdefault(str(job.id), []).append(json.loads(answer.data)["outcome"])
            return
