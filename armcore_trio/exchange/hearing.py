"""Whether whoever answered in time has been heard by now: an outage of our own never counts against a job (N11, D3.1).

After one, what an instance received and could not apply is still in its inbox, and what was said meanwhile is said
again. So judgement is put off until all instances have had time to work again. Nothing is known of the others: each
goes by what happened to its own tasks, and by the restart policy they share.
"""

from collections.abc import Iterable

import trio
from attrs import define

from armcore_trio.borders.database import CONNECT_SECONDS, QUERY_SECONDS
from armcore_trio.supervision.status import TaskStatus
from armcore_trio.supervision.supervisor import RestartPolicy

_POLICY = RestartPolicy()
SETTLE_SECONDS = _POLICY.cap_seconds * (1 + _POLICY.jitter) + CONNECT_SECONDS + QUERY_SECONDS
"""From the end of an outage until every instance is back and has applied what it held: the longest back-off, a start, a batch."""
LONGEST_HOLD_SECONDS = 300.0


def undisturbed_seconds(tasks: Iterable[TaskStatus]) -> float:
    """How long all these tasks have worked since one of them last failed; infinity if none ever did. A start is no outage."""
    return min((task.running_seconds() or 0.0 for task in tasks if task.restarts), default=float("inf"))


@define
class Hold:
    """How long judgement has been put off, so that neither a link that flaps nor an endless outage puts it off for ever."""

    _seconds: float = 0.0
    _last: float = float("-inf")

    def goes_on(self, undisturbed_seconds: float) -> bool:
        """Whether a pass shall hold; asked once by each.

        It shall until `SETTLE_SECONDS` without disturbance have passed, and for `LONGEST_HOLD_SECONDS` at most. Each pass
        counts the time since the one before, but no more than is due between two: while the database is away, be it for
        hours, there are none, and that time is not the jobs'.
        """
        now = trio.current_time()
        settled = undisturbed_seconds >= SETTLE_SECONDS
        self._seconds = 0.0 if settled else self._seconds + min(now - self._last, SETTLE_SECONDS)
        self._last = now
        return not settled and self._seconds <= LONGEST_HOLD_SECONDS
