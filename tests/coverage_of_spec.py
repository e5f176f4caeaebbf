"""Which test proves which line of docs/requirements.md: `python tests/coverage_of_spec.py [pytest options]`.

Tests name what they prove with `@pytest.mark.req("S4.2", "D4.1")`. Nothing is run: this reads what pytest collects, so
a `pytest.skip()` inside a test's body is not seen. Exit 1: a scenario (S) or decision (D) without a test, a marker with
an unknown id, or a failed collection. A requirement (R) without any test at all and a trial (B, N) without one are listed
as open and do not fail. A function with many parameters counts once; a skipped or expected failure counts not at all.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "docs" / "requirements.md"
HEADING = re.compile(r"^#+ (R\d+)\b|^- \*\*([SDBN]\d+(?:\.\d+)?)\*\*", re.MULTILINE)
NAMES_SHOWN = 2


def documented_ids(text: str) -> list[str]:
    """Ids in the order of the document, repeated if the document repeats them."""
    return [requirement or item for requirement, item in HEADING.findall(text)]


def counts_as_proof(item: pytest.Item) -> bool:
    """False for a test that will be skipped or may fail; a condition given as text is taken to hold."""
    for mark in item.iter_markers():
        if mark.name == "skip":
            return False
        if mark.name in ("skipif", "xfail") and any(mark.args or (mark.kwargs.get("condition", True),)):
            return False
    return True


class MarkerReader:
    """A pytest plugin that notes, for each id, the tests that name it, after deselection."""

    def __init__(self) -> None:
        self.named: dict[str, set[str]] = {}
        self.tests: dict[str, list[str]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            name = item.nodeid.partition("[")[0]
            proof = counts_as_proof(item)
            for spec_id in {str(arg) for mark in item.iter_markers("req") for arg in mark.args}:
                self.named.setdefault(spec_id, set()).add(name)
                tests = self.tests.setdefault(spec_id, [])
                if proof and name not in tests:
                    tests.append(name)


def collect(options: list[str]) -> MarkerReader | None:
    """The markers of the test suite, or None, with pytest's own words on stderr, if it could not be collected."""
    reader, output = MarkerReader(), io.StringIO()
    arguments = ["--collect-only", "-q", f"--rootdir={ROOT}", *options, str(ROOT / "tests"), str(ROOT / "tests/image/checks.py")]
    with contextlib.redirect_stdout(output):
        code = pytest.main(arguments, plugins=[reader])
    if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return reader
    print(output.getvalue(), file=sys.stderr)
    print(f"collection failed: pytest exit {int(code)}", file=sys.stderr)
    return None


def tests_of(spec_id: str, tests: dict[str, list[str]]) -> list[str]:
    """Tests that name the id; for a requirement also those that name a scenario or decision under it."""

    def belongs(key: str) -> bool:
        return key == spec_id or (spec_id[0] == "R" and key.startswith(("S", "D")) and key[1:].partition(".")[0] == spec_id[1:])

    return list(dict.fromkeys(name for key, names in tests.items() if belongs(key) for name in names))


def main(options: list[str]) -> int:
    """Print the table, the faults and a line of totals; return the exit code."""
    ids = documented_ids(REQUIREMENTS.read_text(encoding="utf-8"))
    reader = collect(options)
    if reader is None:
        return 1
    missing: list[str] = []
    still_open: list[str] = []
    for spec_id in dict.fromkeys(ids):
        tests = tests_of(spec_id, reader.tests)
        shown = ", ".join(name.rpartition("/")[2] for name in tests[:NAMES_SHOWN])
        more = f" +{len(tests) - NAMES_SHOWN}" if len(tests) > NAMES_SHOWN else ""
        print(f"{spec_id:<6}{len(tests):>4}  {shown}{more}".rstrip())
        if not tests:
            (missing if spec_id[0] in "SD" else still_open).append(spec_id)
    repeated = [spec_id for spec_id, times in Counter(ids).items() if times > 1]
    unknown = {spec_id: names for spec_id, names in sorted(reader.named.items()) if spec_id not in ids}
    print()
    for spec_id, names in unknown.items():
        print(f"unknown id {spec_id!r} in {', '.join(sorted(names))}")
    for label, group in (("listed twice", repeated), ("open", still_open), ("without a test", missing)):
        if group:
            print(f"{label}: {' '.join(group)}")
    kinds = Counter(spec_id[0] for spec_id in set(ids))
    if not (kinds["S"] and kinds["D"]):
        print(f"no scenarios or decisions found in {REQUIREMENTS}")
    print(
        f"{kinds['R']} requirements, {kinds['S']} scenarios, {kinds['D']} decisions, {kinds['B'] + kinds['N']} trials: "
        f"{len(missing)} without a test, {len(still_open)} open, {len(unknown)} unknown"
    )
    return 1 if missing or unknown or repeated or not (kinds["S"] and kinds["D"]) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
