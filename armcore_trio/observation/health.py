"""The health child: what the daemon says of itself over HTTP. It shares nothing with the tasks it reports on.

`/healthcheck` looks at the database itself (`probe.py`), for at most a second. The other answers touch nothing but memory.
"""

import logging
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import trio
from attrs import frozen
from hypercorn.config import Config, Sockets
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from armcore_trio import logs
from armcore_trio.observation.door import IDLE_SECONDS, Door
from armcore_trio.observation.probe import DatabaseProbe
from armcore_trio.supervision.status import State, Status
from armcore_trio.supervision.supervisor import Stop
from armcore_trio.values import Endpoint

if TYPE_CHECKING:
    from hypercorn.typing import ASGIFramework

_log = logs.get(task="health")

_GRACE_SECONDS = 2.0


class CannotListen(Exception):
    """The address is taken or not ours."""


class _Config(Config):
    """A client that reads nothing for so long is cut off by the system: hypercorn shields its writes from every cancellation."""

    def create_sockets(self) -> Sockets:
        sockets = super().create_sockets()
        for listening in sockets.insecure_sockets:
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_GRACE_SECONDS * 1000))
        return sockets


class _Collector(Collector):
    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        events = CounterMetricFamily("armcore_events", "What each task has done", labels=["task", "event"])
        for task, totals in self._status.totals().items():
            for event, count in totals.items():
                events.add_metric([task, event], count)
        running = GaugeMetricFamily("armcore_task_running", "1 while the task works", labels=["task"])
        for name, task_status in self._status.tasks.items():
            running.add_metric([name], float(task_status.state is State.RUNNING))
        books = GaugeMetricFamily("armcore_books_difference", "What came in less what became of it; 0", labels=["task"])
        for name, entries in self._status.books().items():
            books.add_metric([name], entries["difference"])
        lost = CounterMetricFamily("armcore_log_lines_lost", "Lines that the log's sink did not take", logs.lines_lost())
        yield from (events, running, books, lost)


@frozen
class HealthServer:
    """Serves `/healthcheck`, `/livez`, `/readyz` and `/metrics`. `probe` is None when no database is used (S6.3)."""

    bind: Endpoint
    status: Status
    probe: DatabaseProbe | None

    async def run(self, stop: Stop, *, task_status: trio.TaskStatus[None]) -> None:
        """Serve until the stop. Raises `CannotListen` if the address cannot be bound."""
        config = self._config()
        try:
            (listening,) = config.create_sockets().insecure_sockets
            listening.listen(config.backlog)
        except OSError as error:
            raise CannotListen(f"cannot listen on {self.bind}: {error.strerror}") from None
        door = Door(cast("ASGIFramework", self.app()), config, listening)
        async with trio.open_nursery() as nursery:
            if self.probe is not None:
                nursery.start_soon(self.probe.run)
            _log.info("health.listening", url=door.url)
            task_status.started()
            await door.serve(stop)
            nursery.cancel_scope.cancel()

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/healthcheck", self._healthcheck),
                Route("/readyz", self._readyz),
                Route("/livez", self._livez),
                Route("/metrics", self._metrics),
            ]
        )

    def _config(self) -> Config:
        config = _Config()
        config.bind = [str(self.bind)]
        config.errorlog = logging.getLogger("hypercorn")
        config.keep_alive_timeout = IDLE_SECONDS
        config.graceful_timeout = _GRACE_SECONDS
        config.include_server_header = False
        return config

    async def _healthcheck(self, _: Request) -> Response:
        answers = self.probe is not None and await self.probe.answers()
        if self.probe is not None and self.probe.failure is not None:
            self.status.tasks["health"].last_error = self.probe.failure
        report = self.status.report(database_answers=answers)
        return JSONResponse(report, 200 if report["status"] == "ok" else 503)

    async def _readyz(self, request: Request) -> Response:
        return Response(status_code=(await self._healthcheck(request)).status_code)

    async def _livez(self, _: Request) -> Response:
        stalled = self.status.stalled()
        return PlainTextResponse(f"stalled: {', '.join(stalled)}\n", 503) if stalled else PlainTextResponse("ok\n")

    async def _metrics(self, _: Request) -> Response:
        registry = CollectorRegistry()
        registry.register(_Collector(self.status))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
