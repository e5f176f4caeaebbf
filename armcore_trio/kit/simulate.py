"""A recognition service that only pretends to recognise, and is exemplary otherwise: see docs/service-guide.md.

The outcome stands in the file's name: `needs_check` or `needs-check`, `error`, `silent` (never answered), else done.
Jobs outlive connections: work goes on while NATS is away, and a result is repeated until the core has answered it.
"""

import json
import random
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from math import inf
from typing import Any
from uuid import UUID, uuid4

import click
import trio
from attrs import Factory, define, frozen

from armcore_trio import __version__, logs
from armcore_trio.borders.bus import Bus, Message, Received, open_bus
from armcore_trio.commands.common import settings
from armcore_trio.settings import Settings
from armcore_trio.signals import stop_signals, wait_hurry
from armcore_trio.supervision.status import TaskStatus
from armcore_trio.supervision.supervisor import ChildSpec, RestartPolicy, Stop, Supervisor

_log = logs.get(task="simulator")

SERVICES = {"tabular": "tabular-parser", "image": "image-recogniser"}  # the names of their queue groups too

_ANSWER_SECONDS, _PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 10.0, 0.5, 30.0
_SLOTS = 256  # documents worked on at once; more are acknowledged and wait


@click.command("simulate")
@click.option(
    "--pipeline",
    "pipelines",
    multiple=True,
    type=click.Choice(list(SERVICES)),
    help="Repeatable; both if not given.",
)
@click.option(
    "--delay",
    "delay_seconds",
    default=0.2,
    show_default=True,
    type=click.FloatRange(0, 3600),
    help="Seconds a document takes.",
)
def command(pipelines: tuple[str, ...], delay_seconds: float) -> None:
    """Be a recognition service that answers by what the file's name says (needs_check, error, silent, anything else is done)."""
    given = settings(database=False)
    logs.configure(given.log_format, debug=given.debug, secrets=given.secrets)
    trio.run(run, given, pipelines or tuple(SERVICES), delay_seconds)


async def run(settings: Settings, pipelines: Sequence[str], delay_seconds: float) -> None:
    """Serve these pipelines, each document taking so long, until a stop signal. A NATS that is away is waited for.

    What was acknowledged is then finished and confirmed within `SHUTDOWN_GRACE_SECONDS`; a second signal ends it at once.
    """
    with trio.open_signal_receiver(*stop_signals()) as signals:
        async with trio.open_nursery() as nursery:
            simulator = _Simulator(settings, tuple(dict.fromkeys(pipelines)), delay_seconds, nursery)
            supervisor = Supervisor(nursery)
            supervisor.start(ChildSpec("simulator", simulator.run, RestartPolicy(intensity=sys.maxsize)), TaskStatus())
            await anext(signals)
            nursery.start_soon(_hurry, signals, nursery.cancel_scope)
            await supervisor.stop("simulator", settings.shutdown_grace_seconds)
            nursery.cancel_scope.cancel()
    (_log.warning if simulator.open_jobs else _log.info)("simulator.stopped", unfinished=sorted(simulator.open_jobs))


async def _hurry(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
    await wait_hurry(signals)
    scope.cancel()


@frozen
class _Request:
    job_id: str
    file_id: str
    attempt: int
    service: str
    file_name: str

    @classmethod
    def read(cls, data: bytes) -> "_Request":
        body = json.loads(data)
        job_id, service = str(UUID(body["job_id"])), SERVICES[body["pipeline"]]
        return cls(job_id, body["file_id"], int(body["attempt"]), service, str(body["file"]["name"]))

    def envelope(self, fields: dict[str, Any]) -> bytes:
        service = {"name": self.service, "version": __version__}
        return json.dumps({"schema_version": "1.0", "job_id": self.job_id, "service": service, **fields}).encode()


def _recognise(request: _Request, bucket: str) -> dict[str, Any]:
    """The rest of the result's envelope, as the file's name has it."""
    name = request.file_name.lower()
    if "error" in name:
        return {"status": "error", "error": {"code": "UNSUPPORTED_FORMAT", "message": f"cannot read {request.file_name}"}}
    unsure = "needs_check" in name or "needs-check" in name
    return {
        "status": "needs_check" if unsure else "done",
        "result_s3": {"bucket": bucket, "key": f"results/{request.file_id}/{request.job_id}/result.json"},
        "raw_s3_key": f"raw/{request.job_id}.json",
        "metrics": {"pages": random.randint(1, 20), "confidence": 0.61 if unsure else 0.98},
    }


@define(eq=False)
class _Simulator:
    settings: Settings
    pipelines: tuple[str, ...]
    delay_seconds: float
    jobs: trio.Nursery
    open_jobs: set[str] = Factory(set)
    _known: set[str] = Factory(set)
    _answers: dict[str, trio.MemorySendChannel[bytes]] = Factory(dict)
    _inbox: str = Factory(lambda: f"_INBOX.{uuid4().hex}")
    _slots: trio.CapacityLimiter = Factory(lambda: trio.CapacityLimiter(_SLOTS))
    _outgoing: trio.MemorySendChannel[Message] | None = None
    _job_closed: trio.Event = Factory(trio.Event)

    async def run(self, stop: Stop, *, task_status: trio.TaskStatus[None]) -> None:
        """Take requests until the stop; then leave the queue groups and stay until every job is finished and confirmed."""
        async with open_bus(self.settings, "armcore-trio simulator") as bus, trio.open_nursery() as nursery:
            self._outgoing, outgoing = trio.open_memory_channel[Message](inf)
            nursery.start_soon(_send, bus, outgoing)
            try:
                await bus.subscribe(f"{self._inbox}.*", "", self._take_answer)
                for pipeline in self.pipelines:
                    await bus.subscribe(self.settings.request_subjects[pipeline], SERVICES[pipeline], self._take_request)
                _log.info("simulator.listening", services=[SERVICES[pipeline] for pipeline in self.pipelines])
                task_status.started()
                with stop.interrupts():
                    await trio.sleep_forever()
                await bus.drain()
                while self.open_jobs:
                    self._job_closed = trio.Event()
                    await self._job_closed.wait()
                nursery.cancel_scope.cancel()
            finally:
                self._outgoing = None

    def _take_request(self, received: Received) -> None:
        try:
            request = _Request.read(received.data)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            _log.warning("simulator.unreadable", error=repr(error))
            return
        repeat, silent = request.job_id in self._known, "silent" in request.file_name.lower()
        _log.info("simulator.request", job_id=request.job_id, attempt=request.attempt, repeat=repeat, ignored=silent)
        if not silent:
            self._post(Message(self.settings.result_subject, request.envelope({"status": "processing"})))
        if not silent and not repeat:
            self._known.add(request.job_id)
            self.open_jobs.add(request.job_id)
            self.jobs.start_soon(self._work, request)

    async def _work(self, request: _Request) -> None:
        async with self._slots:
            await trio.sleep(self.delay_seconds)
        answer = await self._confirm(request, _recognise(request, self.settings.s3_bucket))
        if answer["outcome"] == "invalid":  # the same bytes would fail again; end the job with plain ones
            error = {"code": "INVALID_RESULT", "message": f"the core refused the result: {answer['reason']}"}
            answer = await self._confirm(request, {"status": "error", "error": error})
        _log.info("simulator.confirmed", job_id=request.job_id, outcome=answer["outcome"], reason=answer["reason"])
        self.open_jobs.discard(request.job_id)
        self._job_closed.set()

    async def _confirm(self, request: _Request, fields: dict[str, Any]) -> dict[str, Any]:
        """Send the result until the core answers; every copy is the same (D4.8)."""
        msg_id, reply = f"result:{request.job_id}:{request.attempt}", f"{self._inbox}.{request.job_id}"
        message = Message(self.settings.result_subject, request.envelope(fields), msg_id, reply)
        self._answers[reply], answers = trio.open_memory_channel[bytes](inf)
        pause_seconds = _PAUSE_SECONDS
        while True:
            if self._post(message):
                with trio.move_on_after(_ANSWER_SECONDS), suppress(ValueError):  # nobody there: an empty answer, at once
                    answer: dict[str, Any] = json.loads(await answers.receive())
                    del self._answers[reply]
                    return answer
            await trio.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _MAX_PAUSE_SECONDS)

    def _take_answer(self, received: Received) -> None:
        if answers := self._answers.get(received.subject):
            answers.send_nowait(received.data)

    def _post(self, message: Message) -> bool:
        """False without a connection. Like any message NATS loses, a request comes again and a result is repeated."""
        if self._outgoing is not None:
            self._outgoing.send_nowait(message)
        return self._outgoing is not None


async def _send(bus: Bus, outgoing: trio.MemoryReceiveChannel[Message]) -> None:
    async for message in outgoing:
        waiting = outgoing.statistics().current_buffer_used
        await bus.publish_batch([message, *(outgoing.receive_nowait() for _ in range(waiting))])
