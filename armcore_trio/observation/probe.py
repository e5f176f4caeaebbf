"""The health child's own look at the database, over a connection that it keeps, so that a frozen server does not pass for a
healthy one.

Connecting has the time it needs, as for the tasks, and is nobody's business who asks: what is asked is only whether there is
an answer now.
"""

from collections.abc import Callable

import trio
from attrs import define, field

from armcore_trio.borders.database import bounded, connect
from armcore_trio.errors import Dependency, DependencyDown
from armcore_trio.supervision.status import Status

PROBE_SECONDS = 1.0
RETRY_SECONDS = 5.0
_LOOK_AGAIN_SECONDS = 0.1


@define
class DatabaseProbe:
    """Whether the database answers now. One look at a time, good for a second, so that many callers cost one query.

    `status` tells whether a task waits for the database. Then it is down whatever a look would find, and where the server
    grants few connections the probe's is the task's to take.
    """

    dsn: str
    status: Status
    failure: str | None = None
    """Why it last did not answer."""
    _answers: bool = False
    _looked_at: float = float("-inf")
    _wanted: trio.Event = field(factory=trio.Event)
    _seen: trio.Event = field(factory=trio.Event)

    async def answers(self) -> bool:
        """What a look finds, within `PROBE_SECONDS`, or what was seen less than a second ago. `run` must be running."""
        if self._others_wait():
            self._wanted.set()  # lest it keep its connection meanwhile
            return False
        if trio.current_time() - self._looked_at >= PROBE_SECONDS:
            seen = self._seen
            self._wanted.set()
            with trio.move_on_after(PROBE_SECONDS):
                await seen.wait()
            if not seen.is_set():
                self._conclude(answers=False)
        return self._answers

    async def run(self) -> None:
        """Keep a connection and look whenever somebody asks, until cancelled. One that is lost is replaced within the look."""
        while True:
            await self._wait_while(self._others_wait)
            if not await self._look_over_one_connection():
                await self._wait_while(lambda: self.status.dependency(Dependency.DATABASE) != "ok")

    async def _look_over_one_connection(self) -> bool:
        """Returns False if it was given up for others, True if it was lost or never there."""
        answered = False
        try:
            async with connect(self.dsn, "armcore-trio health") as connection:
                while not self._others_wait():
                    async with bounded("a probe", PROBE_SECONDS):
                        await connection.execute("SELECT 1")
                    answered = True
                    self._conclude(answers=True)
                    while not (await self._asked() or self._others_wait()):
                        pass
        except DependencyDown as down:
            self.failure = str(down)
            if not answered:
                self._conclude(answers=False)
                await self._asked()
            return True
        return False

    async def _wait_while(self, condition: Callable[[], bool]) -> None:
        while condition():  # noqa: ASYNC110 - a task's status is there to be read and tells nobody
            await trio.sleep(_LOOK_AGAIN_SECONDS)

    async def _asked(self) -> bool:
        """Wait until somebody asks, so long at most; returns whether anybody did."""
        with trio.move_on_after(RETRY_SECONDS):
            await self._wanted.wait()
            self._wanted = trio.Event()
            return True
        return False

    def _others_wait(self) -> bool:
        return self.status.waits_for(Dependency.DATABASE)

    def _conclude(self, *, answers: bool) -> None:
        self._answers, self._looked_at = answers, trio.current_time()
        self._seen.set()
        self._seen = trio.Event()
