"""What a benchmark found, as a row of the table and as JSON: medians of several runs, their spread, ratios within each run."""

import json
import statistics
from collections.abc import Sequence
from typing import Literal

from attrs import asdict, frozen

Bound = Literal["at least", "below"]


@frozen
class Target:
    """What a row is held to: its median ratio to what stands beside it if there is such, its own median otherwise."""

    bound: Bound
    value: float

    def met(self, value: float) -> bool:
        """Whether the value keeps the bound."""
        return value >= self.value if self.bound == "at least" else value < self.value

    def __str__(self) -> str:
        return f"{'≥' if self.bound == 'at least' else '<'} {self.value:g}"


@frozen
class Row:
    """One line of the table. `ours[i]` and `theirs[i]` were measured in turn i, one right after the other."""

    what: str
    unit: str
    ours: Sequence[float]
    beside: str = ""
    """What `theirs` is: the ceiling, or the peer and what its job is made of."""
    theirs: Sequence[float] = ()
    target: Target | None = None
    target_is_ratio: bool = True
    """Whether the target is one for the ratio; false where a peer is shown beside a figure that has a target of its own."""

    @property
    def ratios(self) -> list[float]:
        """Ours to theirs, turn by turn."""
        return [ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)] if self.theirs else []

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without a target."""
        if self.target is None:
            return None
        return self.target.met(statistics.median(self.ratios if self.ratios and self.target_is_ratio else self.ours))


def table(rows: Sequence[Row]) -> str:
    """For people: a line for each row, in columns as wide as they need to be."""
    cells = [("", "ours", "beside", "ratio", "target", "met")]
    for row in rows:
        ratio = _spread(row.ratios, "") if row.ratios else ""
        beside = f"{row.beside} {_spread(row.theirs, row.unit)}".strip() if row.theirs else row.beside
        met = {True: "yes", False: "NO", None: ""}[row.met]
        cells.append((row.what, _spread(row.ours, row.unit), beside, ratio, str(row.target or ""), met))
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells)


def document(rows: Sequence[Row]) -> str:
    """For machines: one JSON document."""
    return json.dumps([{**asdict(row), "ratios": row.ratios, "met": row.met} for row in rows])


def _spread(values: Sequence[float], unit: str) -> str:
    shown = [_number(value) for value in (statistics.median(values), min(values), max(values))]
    median = f"{shown[0]} {unit}".strip()
    return f"{median} ({shown[1]}-{shown[2]})" if len(values) > 1 else median


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
