"""Draws throughput against batch size, instances and history to docs/performance.png. Run with `make plot`.

Everything but the axis in question is as by default. Between instances the messages go over NATS, two for each job as in
the other panels; there the program that sends them and hears the requests shares the cores.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import matplotlib as mpl
import psycopg
from attrs import asdict, frozen
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from armcore_trio import logs
from armcore_trio.demo.embedded import Nats, Postgres
from armcore_trio.settings import DSN, URL, load
from armcore_trio.values import LogFormat
from tests.bench import scale, throughput
from tests.bench.exchange import Bench
from tests.bench.workload import insert_history, insert_jobs
from tests.support.servers import fresh_database, migrated_template

TARGET = Path(__file__).parents[2] / "docs" / "performance.png"
BATCHES = (1, 10, 50, 100, 200, 500, 1000, 2000)
HISTORIES = (0, 10_000, 100_000, 1_000_000)

_JOBS_A_BATCH, _LEAST_JOBS = 50, 400
"""Small batches are slow: fewer jobs tell as much."""
_WIDTH, _HEIGHT, _DPI = 9.0, 3.9, 200
"""Inches; shown at a hundred pixels an inch, drawn at twice that."""
_TITLE = "Throughput of armcore-trio: {} cores for it, its servers and its load, fsync on"
_SERIES = (("drain", "#0072B2", "o", "-"), ("inbox", "#D55E00", "s", "--"))
"""In two of Okabe and Ito's colours, told apart by marker and line as well."""


@frozen
class Point:
    """Rates in jobs a second at one place of an axis, a value for each run."""

    at: int
    drain: Sequence[float]
    inbox: Sequence[float]


@frozen
class Panel:
    """One part of the picture: what was varied, and what that did."""

    title: str
    label: str
    points: Sequence[Point]


def main() -> None:
    """Measure, print the data if asked, draw."""
    parser = argparse.ArgumentParser(prog="make plot", description="ARGS are:")
    parser.add_argument("--jobs", type=int, default=5000, help="jobs in each run (5000)")
    parser.add_argument("--runs", type=int, default=3, help="runs at each point (3)")
    parser.add_argument("--output", type=Path, default=TARGET, help="the picture (docs/performance.png)")
    parser.add_argument("--json", action="store_true", help="print the data as one JSON document too")
    options = parser.parse_args()
    panels = measure(options.jobs, options.runs)
    if options.json:
        print(json.dumps([asdict(panel) for panel in panels]))
    draw(panels, options.output)


def measure(jobs: int, runs: int) -> list[Panel]:
    """The whole sweep, on servers of its own with fsync on and autovacuum off; a few minutes."""
    with (
        Postgres(settings={"autovacuum": "off"}) as postgres,
        Nats() as nats,
        Path(os.devnull).open("w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.ExitStack() as databases,
    ):
        logs.configure(LogFormat.JSON, debug=False, secrets=[])
        migrated_template(postgres)
        common = databases.enter_context(fresh_database(postgres))

        def batch(size: int) -> tuple[float, float]:
            sizes = {"OUTBOX_BATCH_SIZE": str(size), "INBOX_BATCH_SIZE": str(size)}
            bench = Bench(load({DSN: common, URL: nats.url} | sizes), common)
            some = min(jobs, max(_LEAST_JOBS, _JOBS_A_BATCH * size))
            return bench.drain(some), bench.inbox(some)

        def instances(number: int) -> tuple[float, float]:
            run = scale.once(common, nats.url, number, jobs)
            return run.published_rate, run.applied_rate

        def history(finished: int) -> tuple[float, float]:
            return throughput._halves(benches[finished], jobs, keep=finished > 0)

        panels = [
            Panel("Batch size (default 500)", "jobs or messages in a transaction", _sweep(BATCHES, batch, runs)),
            Panel("Instances", "daemons sharing a backlog", _sweep(scale.INSTANCES, instances, runs)),
        ]
        benches = {finished: _beside(databases.enter_context(fresh_database(postgres)), nats, finished) for finished in HISTORIES}
        return [*panels, Panel("History", "finished jobs in the tables", _sweep(HISTORIES, history, runs))]


def _beside(dsn: str, nats: Nats, finished: int) -> Bench:
    """As `throughput.history` does it: statistics are those of few jobs, and what a turn leaves joins the history."""
    with psycopg.connect(dsn) as connection:
        insert_jobs(connection, throughput._KNOWN, "done")
        insert_history(connection, finished)
    return Bench(load({DSN: dsn, URL: nats.url}), dsn)


def _sweep(axis: Sequence[int], once: Callable[[int], tuple[float, float]], runs: int) -> list[Point]:
    """All places of the axis in turn, again and again; the first round warms up."""
    found: dict[int, list[tuple[float, float]]] = {at: [] for at in axis}
    turns = [(run, at) for run in range(runs + 1) for at in axis]
    with click.progressbar(turns, label=once.__name__, file=sys.stderr) as bar:
        for run, at in bar:
            rates = once(at)
            if run > 0:
                found[at].append(rates)
    return [Point(at, *zip(*rates, strict=True)) for at, rates in found.items()]


def draw(panels: Sequence[Panel], target: Path) -> None:
    """Medians as lines and single runs as dots, all panels on one scale."""
    with mpl.rc_context({"font.size": 9, "font.family": "DejaVu Sans", "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axis, panel in zip(axes, panels, strict=True):
            _draw_panel(axis, panel)
        axes[0].set_ylim(bottom=0)
        axes[0].set_ylabel("jobs per second")
        axes[0].yaxis.set_major_formatter(EngFormatter(sep=" "))
        axes[0].legend(frameon=False, loc="upper left")
        figure.suptitle(_TITLE.format(os.cpu_count()), fontsize=11, fontweight="bold")
        figure.savefig(target, dpi=_DPI)


def _draw_panel(axis: Axes, panel: Panel) -> None:
    places = range(len(panel.points))
    for name, colour, marker, line in _SERIES:
        runs: list[Sequence[float]] = [getattr(point, name) for point in panel.points]
        for place, values in zip(places, runs, strict=True):
            axis.scatter([place] * len(values), values, s=8, color=colour, alpha=0.35, linewidths=0)
        medians = [statistics.median(values) for values in runs]
        axis.plot(places, medians, color=colour, marker=marker, markersize=4.5, linestyle=line, linewidth=1.6, label=name)
    axis.set_xticks(places, [EngFormatter(sep=" ").format_eng(point.at) for point in panel.points])
    axis.set_xlabel(panel.label)
    axis.set_title(panel.title, fontsize=9)
    axis.grid(axis="y", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)


if __name__ == "__main__":
    main()
