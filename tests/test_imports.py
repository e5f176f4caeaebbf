"""The rooms of the house: each may use those below it, never one above, and only the borders know the drivers."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from armcore_trio.cli import COMMANDS

PACKAGE = Path(__file__).parent.parent / "armcore_trio"

# From the roof to the ground. Rooms on one floor do not know each other.
FLOORS: list[set[str]] = [
    {"__main__"},
    {"cli"},
    {"demo"},
    {"kit"},
    {"commands"},
    {"daemon"},
    {"shutdown"},
    {"observation", "exchange"},
    {"supervision", "borders"},
    {"protocol"},
]
GROUND = len(FLOORS)
DRIVERS = {"alembic", "nats", "psycopg", "psycopg_pool", "sqlalchemy", "trio_asyncio"}
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


@cache
def imports(module: str) -> frozenset[str]:
    """Everything a module imports anywhere in it, as full names; ours as modules, whatever is taken from them."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else str(node.module))
    if module == "armcore_trio.cli":
        found |= set(COMMANDS.values())
    return frozenset(found)


def ours(module: str) -> set[str]:
    """The modules of this package that a module imports. The package itself holds no more than the version."""
    return {name for name in imports(module) if name in MODULES and name != "armcore_trio"}


def room(module: str) -> str:
    return module.split(".")[1]


def floor(module: str) -> int:
    return next((number for number, rooms in enumerate(FLOORS) if room(module) in rooms), GROUND)


def reached(module: str) -> set[str]:
    """All modules of ours that importing this one can lead to."""
    seen: set[str] = set()
    waiting = {module}
    while waiting:
        seen |= waiting
        waiting = {inner for name in waiting for inner in ours(name)} - seen
    return seen


def test_every_room_exists() -> None:
    standing = {room(module) for module in MODULES if module.count(".")}
    assert {name for rooms in FLOORS for name in rooms} <= standing


def test_no_arrow_points_upward() -> None:
    upward = [
        f"{module} -> {used}"
        for module in MODULES
        if module.count(".")
        for used in ours(module)
        if not (room(used) == room(module) or floor(used) > floor(module) or floor(used) == floor(module) == GROUND)
    ]
    assert upward == []


def test_no_module_leads_back_to_itself() -> None:
    TopologicalSorter({module: ours(module) for module in MODULES}).prepare()  # raises CycleError


def test_only_the_borders_know_the_drivers() -> None:
    knowing = {
        (module, name.partition(".")[0])
        for module in MODULES
        for name in imports(module)
        if name.partition(".")[0] in DRIVERS and room(f"{module}.") != "borders"
    }
    assert knowing == {("armcore_trio.dsn", "psycopg")}  # libpq's parser


@pytest.mark.req("R9")
@pytest.mark.parametrize("module", ["armcore_trio.daemon", "armcore_trio.commands.run"])
def test_the_daemon_reaches_no_other_command(module: str) -> None:
    above = {name for name in reached(module) if floor(name) < floor("armcore_trio.daemon")}
    assert above <= {"armcore_trio.commands.run", "armcore_trio.commands.common"}


@pytest.mark.parametrize(
    ("arguments", "spared"),
    [
        (["probe"], {"trio", "structlog", "psycopg", "nats", "nkeys", "jsonschema", "alembic", "hypercorn", "starlette"}),
        (["run"], {"alembic", "sqlalchemy"}),
    ],
)
def test_a_command_starts_without_what_others_need(arguments: list[str], spared: set[str]) -> None:
    program = (
        "import sys\n"
        "from armcore_trio.cli import main\n"
        f"try: main({arguments!r})\n"
        f"finally: print(sorted(set(sys.modules) & {spared!r}), file=sys.stderr)"
    )
    environment = {"HEALTH_BIND": "127.0.0.1:1", "OPENBAO__POSTGRES__POSTGRES_DSN": "host=127.0.0.1 port=1", "DEBUG": "no"}
    if arguments == ["run"]:
        environment["OPENBAO__NATS__NATS_URL"] = "http://no-such-scheme"  # ends it at once
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert found.stderr.splitlines()[-1] == "[]", found
