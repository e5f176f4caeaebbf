"""The failures that decide what happens next: who waits, who restarts, who ends."""

from collections.abc import Iterator
from enum import StrEnum


class Dependency(StrEnum):
    """A server this daemon cannot work without, named as `/healthcheck` names it."""

    NATS = "nats"
    DATABASE = "database"


class DependencyDown(Exception):
    """A server is away, deaf or unwilling. Transient by definition: whoever owned the connection is restarted, for ever."""

    def __init__(self, dependency: Dependency, reason: str) -> None:
        super().__init__(f"{dependency}: {reason}")
        self.dependency = dependency
        self.reason = reason


class RowsLocked(DependencyDown):
    """Another session holds a row or table for too long. Whoever works through a batch may go on without that row."""

    sqlstate = "55P03"


class WriteRefused(Exception):
    """The database answered, and refused the data itself; trying the same again cannot help.

    The transaction is rolled back and the connection usable. `sqlstate` tells why, `table` where, if that is known.
    """

    def __init__(self, sqlstate: str | None, reason: str, table: str | None = None) -> None:
        super().__init__(reason)
        self.sqlstate = sqlstate
        self.reason = reason
        self.table = table


class Unrecoverable(Exception):
    """Ends the process: no restart can mend it. `exit_code` is what the operator's supervisor sees."""

    exit_code = 70


class SchemaUnfit(Unrecoverable):
    """The database answers, and the work cannot be done there as it stands; says what to mend (N07)."""

    exit_code = 69


class SchemaOutdated(SchemaUnfit):
    """Its schema is missing or older than this version (D9.1)."""


class SettingsError(Exception):
    """The environment is unusable. `problems` maps each variable at fault to what is wrong with it, never to its value (R7)."""

    def __init__(self, problems: dict[str, str]) -> None:
        super().__init__("; ".join(f"{key}: {problem}" for key, problem in sorted(problems.items())))
        self.problems = problems


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The single failures inside an exception group, however deep; a plain exception is its own leaf."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


def describe(error: BaseException) -> str:
    """One line for a log field: every cause of a group, each named once."""
    lines = (f"{leaf}" if isinstance(leaf, DependencyDown) else f"{type(leaf).__name__}: {leaf}" for leaf in leaves(error))
    return " | ".join(dict.fromkeys(" ".join(line.split()) for line in lines))
