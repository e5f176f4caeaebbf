"""How a pass over claimed rows goes on until there is nothing left, whatever single rows do to it."""

from collections.abc import Awaitable, Callable
from uuid import UUID

from armcore_trio.errors import DependencyDown, RowsLocked, WriteRefused
from armcore_trio.supervision.supervisor import Stop

Refusal = WriteRefused | RowsLocked
Attempt = Callable[[int, set[UUID], list[UUID]], Awaitable[None]]


class BatchSize:
    """How much to take at once: half after a batch that failed as a whole, twice after one that did not, up to the setting.

    So a batch that a slow server cannot do within its limit is not tried at the same size for ever.
    """

    def __init__(self, greatest: int) -> None:
        self._greatest = greatest
        self.now = greatest

    def failed(self) -> None:
        """The last batch was too much, for all one knows."""
        self.now = max(1, self.now // 2)

    def succeeded(self) -> None:
        """The last batch was done."""
        self.now = min(self._greatest, self.now * 2)


async def run_pass(
    attempt: Attempt,
    *,
    size: BatchSize,
    stop: Stop,
    refused: Callable[[UUID, Refusal], None],
    skip: set[UUID] | None = None,
) -> int:
    """Run `attempt` batch after batch until one is not full, or the stop is requested; returns how many rows were done.

    `attempt(limit, skip, claimed)` is one transaction over at most `limit` rows not in `skip`; it puts their ids into
    `claimed`. When the database refuses what it writes, or another session holds what it needs, the rows are taken one
    by one until the guilty one is found; `refused` is told, and the others go on. The next pass tries it again. A
    failure before anything was claimed passes, as does every other one. `skip` is given if several runs share it.
    """
    skip = set() if skip is None else skip
    done = 0
    one_by_one = False
    while not stop.requested:
        limit = 1 if one_by_one else size.now
        claimed: list[UUID] = []
        try:
            await attempt(limit, skip, claimed)
        except (WriteRefused, RowsLocked) as refusal:
            if not claimed:
                raise
            if len(claimed) == 1:
                skip.add(claimed[0])
                refused(claimed[0], refusal)
            one_by_one = len(claimed) > 1
            continue
        except DependencyDown:
            if claimed:
                size.failed()
            raise
        done += len(claimed)
        if len(claimed) < limit:
            break
        if not one_by_one:
            size.succeeded()
    return done
