"""Where the log's lines go: through a bounded queue to one thread that writes them, so that no reader can hurt.

A reader that stalls, leaves, or a full disk costs lines, which are counted and told once the sink works again (N02, N03).
Neither `logging.handlers.QueueListener` nor structlog fits: their queue blocks or raises when it is full, what the sink
refuses goes to stderr uncounted, and neither can be flushed within a limit.
"""

import os
import select
import threading
from collections import deque
from collections.abc import Callable

MOST_BYTES = 8 * 2**20
"""What waits for a reader that stalls; further lines are lost."""
_EXIT_SECONDS = 1.0


class Sink:
    """Writes lines to a descriptor of its own. Called from any thread; nothing here blocks or raises but `flush`, bounded.

    `tell` makes the line that says how many were lost, and why.
    """

    def __init__(self, descriptor: int, tell: Callable[[int, str], str]) -> None:
        self._descriptor = os.dup(descriptor)
        self._tell = tell
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._busy = self._given_up = self._midst = False
        self.lost = 0
        self._untold, self._why = 0, ""
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def put(self, text: str) -> None:
        """Have a line written, or several."""
        data = (text + "\n").encode("utf-8", "backslashreplace")
        with self._changed:
            if self._waiting_bytes + len(data) > MOST_BYTES:
                self._lose(data, "the log's reader stalls")
                return
            self._waiting.append(data)
            self._waiting_bytes += len(data)
            self._changed.notify_all()

    debug = info = warning = error = critical = msg = log = put

    def flush(self, seconds: float = _EXIT_SECONDS) -> None:
        """Wait until all is written, so long at most. A sink that did not manage it once is not waited for again."""
        with self._changed:
            if not self._given_up:
                self._given_up = not self._changed.wait_for(lambda: not self._waiting and not self._busy, seconds)

    def _lose(self, data: bytes, why: str) -> None:
        lines = data.count(b"\n")
        self.lost += lines
        self._untold, self._why = self._untold + lines, why

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting)
                self._busy = True
                data = self._waiting.popleft()
                self._waiting_bytes -= len(data)
                count, why = self._untold, self._why
            try:
                if count:
                    self._write((self._tell(count, why) + "\n").encode())
                    with self._changed:
                        self._untold -= count
                self._write(data)
            except OSError as error:
                with self._changed:
                    self._lose(data, error.strerror or type(error).__name__)

    def _write(self, data: bytes) -> None:
        """Write all of it, on a line of its own. Raises what the system says."""
        rest = memoryview(b"\n" + data if self._midst else data)
        while rest:
            try:
                written = os.write(self._descriptor, rest)
            except BlockingIOError:
                select.select([], [self._descriptor], [])
                continue
            self._midst = written < len(rest)
            rest = rest[written:]
