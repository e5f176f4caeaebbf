"""How a pass over claimed rows goes on until there is nothing left, whatever single rows do to it."""

from collections.abc import Awaitable, Callable
from uuid import UUID

from armcore_trio.errors import WriteRefused
from armcore_trio.supervisor import Stop

Attempt = Callable[[int, set[UUID], list[UUID]], Awaitable[None]]


async def run_pass(attempt: Attempt, *, batch_size: int, stop: Stop, refused: Callable[[UUID, WriteRefused], None]) -> None:
    """Run `attempt` batch after batch until one is not full, or the stop is requested.

    `attempt(limit, skip, claimed)` is one transaction over at most `limit` rows not in `skip`; it puts their ids into
    `claimed`, and into `skip` those it leaves for a later pass. When the database refuses what it writes, the rows are
    taken one by one until the guilty one is found; `refused` is told, and the others go on. The next pass tries it again.
    A refusal before anything was claimed passes.
    """
    skip: set[UUID] = set()
    limit = batch_size
    while not stop.requested:
        claimed: list[UUID] = []
        try:
            await attempt(limit, skip, claimed)
        except WriteRefused as refusal:
            if not claimed:
                raise
            if len(claimed) == 1:
                skip.add(claimed[0])
                refused(claimed[0], refusal)
            limit = batch_size if len(claimed) == 1 else 1
            continue
        if len(claimed) < limit:
            return
