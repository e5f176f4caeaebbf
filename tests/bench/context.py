"""What every measure gets: the servers, how much to do, and turns that are fair to all contenders."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from attrs import frozen

from armcore_trio.demo.embedded import Nats, Postgres
from armcore_trio.settings import DSN, URL, load
from tests.bench.exchange import Bench
from tests.bench.figures import Row
from tests.support.servers import fresh_database

T = TypeVar("T")


@frozen
class Context:
    """For one run of the benchmark. `progress` is told the finished part of the measure, 0 to 1."""

    postgres: Postgres
    nats: Nats
    dsn: str
    """A migrated database of the measure's own."""
    jobs: int
    runs: int
    progress: Callable[[float], None]

    def bench(self, dsn: str | None = None) -> Bench:
        """The contenders on that database, or on the measure's own."""
        return Bench(load({DSN: dsn or self.dsn, URL: self.nats.url}), dsn or self.dsn)

    @contextmanager
    def database(self) -> Iterator[str]:
        """The DSN of one more such database, dropped afterwards."""
        with fresh_database(self.postgres) as dsn:
            yield dsn

    def turns(self, *contenders: Callable[[int], T]) -> list[list[T]]:
        """One contender after the other, again and again, each with the number of jobs: what each returned, turn by turn.

        The first turn of each warms up and is not counted.
        """
        found: list[list[T]] = [[] for _ in contenders]
        for run in range(self.runs + 1):
            for number, contender in enumerate(contenders):
                figure = contender(self.jobs)
                if run > 0:
                    found[number].append(figure)
                self.progress((run * len(contenders) + number + 1) / (self.runs + 1) / len(contenders))
        return found


Measure = Callable[[Context], list[Row]]
"""One entry of the table of measures. Raises `NotOnce` if a job was done twice or not at all."""
