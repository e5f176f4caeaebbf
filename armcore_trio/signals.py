"""The signals that ask a process of ours to finish what it began and end."""

import signal
from collections.abc import AsyncIterator


def stop_signals() -> list[signal.Signals]:
    """SIGTERM, SIGINT and a terminal that hangs up, save for a process started to outlive its terminal (nohup)."""
    hang_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *hang_up]


async def wait_hurry(signals: AsyncIterator[int]) -> int:
    """Wait for the signal after the one that began the stop, which ends it at once. A closing terminal may hang up twice."""
    while (number := await anext(signals)) == signal.SIGHUP:
        pass
    return number
