"""The stop, step by step, each step bounded and said in the log (R9).

signal -> health says stopping -> publisher and watchdog finish their pass -> the subscription is drained, and all
that was received is applied and answered -> connections close -> health last -> shutdown.complete
"""

from collections.abc import Awaitable, Callable, Sequence

import trio
from attrs import frozen

from armcore_trio import logs
from armcore_trio.exchange.inbox import Inbox
from armcore_trio.exchange.subscriber import abandon
from armcore_trio.supervision.status import Status
from armcore_trio.supervision.supervisor import Supervisor

_log = logs.get()

_HEALTH_SECONDS = 3.0
_MARGIN_SECONDS = 0.5


def abandon_rest(inbox: Inbox, status: Status) -> None:
    """List what was received and not applied, one record each; the inbox is empty then."""
    while rest := inbox.front(len(inbox)):
        for pending in rest:
            abandon(pending, status.tasks["subscriber.apply"], "the stop came before it could be applied")
        inbox.drop(len(rest))


def log_complete(status: Status, *, seconds: float, exit_code: int) -> None:
    """The log's last record: what was done in all, and whether the books balance."""
    books = status.books()
    if any(book["difference"] for book in books.values()):
        _log.error("shutdown.books_do_not_balance", books=books)
    _log.info("shutdown.complete", seconds=round(seconds, 3), exit_code=exit_code, totals=status.totals(), books=books)


@frozen
class Shutdown:
    """The stop sequence of a daemon whose children these are. Takes at most `grace_seconds`, plus a bounded clean-up."""

    supervisor: Supervisor
    status: Status
    inbox: Inbox
    grace_seconds: float

    async def run(self, signal_name: str | None) -> None:
        """Go through all steps. What could not be applied in time is listed in the log as abandoned."""
        _log.info("shutdown.started", signal=signal_name, grace_seconds=self.grace_seconds)
        self.status.stopping = True
        started, grace = trio.current_time(), self.grace_seconds
        last = started + grace - min(_HEALTH_SECONDS, grace / 4)
        settled = last - min(_MARGIN_SECONDS, grace / 20)
        await self._step("passes", self._stop_all, ["publisher", "watchdog"], (started + settled) / 2)
        await self._step("inbox", self._settle, settled)
        await self._step("connections", self._stop_all, ["subscriber.apply", "subscriber.intake"], last)
        abandon_rest(self.inbox, self.status)
        await self._step("health", self._stop_all, ["health"], min(trio.current_time() + _HEALTH_SECONDS, started + grace))

    async def _step(self, name: str, action: Callable[..., Awaitable[bool]], *args: object) -> None:
        started = trio.current_time()
        finished = await action(*args)
        seconds = round(trio.current_time() - started, 3)
        (_log.info if finished else _log.warning)("shutdown.step", step=name, seconds=seconds, finished=finished)

    async def _stop_all(self, names: Sequence[str], deadline: float) -> bool:
        finished: list[bool] = []

        async def stop(name: str) -> None:
            finished.append(await self.supervisor.stop(name, max(0, deadline - trio.current_time())))

        async with trio.open_nursery() as nursery:
            for name in names:
                nursery.start_soon(stop, name)
        return all(finished)

    async def _settle(self, deadline: float) -> bool:
        self.supervisor.request_stop("subscriber.intake")
        with trio.move_on_at(deadline):
            await self.inbox.wait_settled()
            return True
        return False
