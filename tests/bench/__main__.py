"""Measures the exchange on embedded servers with fsync on, and prints one table, or with `--json` one document.

Figures are medians of several runs with the spread beside them, ratios are taken within each run. Exit 0 whatever they
are, and 1 if a job was done twice or not at all.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from armcore_trio import logs
from armcore_trio.demo.embedded import Nats, Postgres
from armcore_trio.values import LogFormat
from tests.bench import figures, idle, latency, memory, producers, scale, throughput
from tests.bench.context import Context, Measure
from tests.bench.exchange import NotOnce
from tests.support.servers import fresh_database, migrated_template

_MEASURES: dict[str, Measure] = {
    "drain": throughput.drain,
    "inbox": throughput.inbox,
    "cycle": throughput.cycle,
    "latency": latency.measure,
    "idle": idle.measure,
    "producers": producers.measure,
    "memory": memory.measure,
    "scale": scale.measure,
    "history": throughput.history,
}
_STEPS = 100
"""Of the progress bar, for each measure."""
_MOST = 100_000


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(prog="make bench", description="ARGS are:")
    parser.add_argument("--jobs", type=_positive, default=5000, help="jobs in each turn (5000)")
    parser.add_argument("--runs", type=_positive, default=5, help="turns of each, besides one that warms up (5)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"of {', '.join(_MEASURES)}, and with --peers of theirs")
    parser.add_argument("--peers", action="store_true", help="others beside ours too; needs what make bench-peers installs")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    measures = {**_MEASURES, **(_peers() if options.peers else {})}
    if unknown := set(options.only or ()) - measures.keys():
        parser.error(f"no such measure: {', '.join(sorted(unknown))}; there are {', '.join(measures)}")
    chosen = {name: measure for name, measure in measures.items() if name in (options.only or measures)}
    rows, wrong = _run(chosen, options.jobs, options.runs)
    print(figures.document(rows) if options.json else figures.table(rows))
    for problem in wrong:
        print(problem, file=sys.stderr)
    sys.exit(1 if wrong else 0)


def _positive(text: str) -> int:
    if not (text.isdecimal() and 0 < int(text) <= _MOST):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to {_MOST}")
    return int(text)


def _peers() -> Mapping[str, Measure]:
    from tests.bench import peers

    return peers.measures


def _run(measures: dict[str, Measure], jobs: int, runs: int) -> tuple[list[figures.Row], list[str]]:
    """The rows, and what was done twice or not at all. Autovacuum is off: it would come to some turns and not to others."""
    rows, wrong = [], []
    with (
        Postgres(settings={"autovacuum": "off"}) as postgres,
        Nats() as nats,
        click.progressbar(length=_STEPS * len(measures), label="servers", file=sys.stderr) as bar,
        _quiet(),
    ):
        migrated_template(postgres)
        for number, (name, measure) in enumerate(measures.items()):

            def progress(part: float, first: int = _STEPS * number) -> None:
                bar.update(first + int(_STEPS * part) - bar.pos)

            bar.label = name
            with fresh_database(postgres) as dsn:
                try:
                    rows += measure(Context(postgres, nats, dsn, jobs, runs, progress))
                except NotOnce as problem:
                    wrong.append(f"{name}: {problem}")
            progress(1)
    return rows, wrong


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The log is written, as in production, but to nowhere."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        logs.configure(LogFormat.JSON, debug=False, secrets=[])
        yield


if __name__ == "__main__":
    main()
