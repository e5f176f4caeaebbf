"""Failures that a block must end with, alone or as the one leaf of a group."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import pytest
from attrs import define

from armcore_trio.errors import Dependency, DependencyDown, leaves

E = TypeVar("E", bound=BaseException)


@define
class Caught(Generic[E]):
    """What the block ended with; set once it has."""

    _error: E | None = None

    @property
    def error(self) -> E:
        assert self._error is not None, "the block has not ended yet"
        return self._error


@contextmanager
def failing(kind: type[E], match: str = "") -> Iterator[Caught[E]]:
    """The block ends with such an exception, or with a group whose only kind of leaf it is; `match` is found in its text."""
    caught: Caught[E] = Caught()
    try:
        yield caught
    except BaseException as error:
        found = [leaf for leaf in leaves(error) if not isinstance(leaf, kind)]
        if found:
            raise
        leaf = next(iter(leaves(error)))
        assert isinstance(leaf, kind)
        assert re.search(match, str(leaf)), str(leaf)
        caught._error = leaf
    else:
        pytest.fail(f"no {kind.__name__}")


@contextmanager
def nats_down(match: str = "") -> Iterator[Caught[DependencyDown]]:
    """The block ends because NATS is away, deaf or unwilling."""
    with failing(DependencyDown, match) as caught:
        yield caught
    assert caught.error.dependency is Dependency.NATS
    assert "\n" not in caught.error.reason
