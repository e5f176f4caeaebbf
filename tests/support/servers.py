"""Databases on an embedded PostgreSQL, and the daemon's environment."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from armcore_trio.borders.migrate import migrate
from armcore_trio.demo.embedded import Postgres
from armcore_trio.settings import DSN, URL

TEMPLATE = "armcore_template"

# Quick, and real all the same: no waiting for the disk, nothing that would change an answer.
POSTGRES = {
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "max_connections": "200",
    "autovacuum_naptime": "1h",
    "jit": "off",
    "log_min_messages": "fatal",
}

_MEMORY = Path("/dev/shm")  # noqa: S108 - each server makes a directory of its own there, with a random name
_ROOM_BYTES = 2 * 1024**3

_NATS = "OPENBAO__NATS__NATS_"
TABULAR_SUBJECT, IMAGE_SUBJECT, RESULT_SUBJECT = (
    f"{_NATS}{name}_SUBJECT" for name in ("TABULAR_REQUEST", "IMAGE_REQUEST", "RESULT")
)


@contextmanager
def start_postgres(**settings: str) -> Iterator[Postgres]:
    """A server for tests, in memory where there is room: copying a database then takes 10 ms, on some disks 300."""
    with pytest.MonkeyPatch.context() as patch:
        if _holds_servers(_MEMORY):
            patch.setattr("tempfile.tempdir", str(_MEMORY))
        server = Postgres(settings=POSTGRES | settings)
        server.start()
    try:
        yield server
    finally:
        server.close()


def _holds_servers(directory: Path) -> bool:
    """Containers often give it 64 MB, or forbid to run programs there, of which root needs a copy."""
    if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
        return False
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize > _ROOM_BYTES and not status.f_flag & os.ST_NOEXEC


def migrated_template(server: Postgres) -> None:
    """A database with the schema, to copy from."""
    with administration(server) as connection:
        connection.execute(f"CREATE DATABASE {TEMPLATE}")
    migrate(server.dsn(TEMPLATE))


@contextmanager
def fresh_database(server: Postgres, template: str = TEMPLATE) -> Iterator[str]:
    """The DSN of a copy of the template, which is dropped afterwards with whoever is still connected."""
    name = f"test_{uuid4().hex}"
    with administration(server) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY file_copy")
    try:
        yield server.dsn(name)
    finally:
        if server.running:
            with administration(server) as connection:
                connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@contextmanager
def administration(server: Postgres) -> Iterator[psycopg.Connection]:
    """A session for what concerns whole databases."""
    with psycopg.connect(server.dsn(), autocommit=True, connect_timeout=10) as connection:
        yield connection


def new_environment(dsn: str, nats_url: str) -> dict[str, str]:
    """The daemon's variables for these servers, with subjects of its own."""
    prefix = f"test_{uuid4().hex}"
    return {
        DSN: dsn,
        URL: nats_url,
        TABULAR_SUBJECT: f"{prefix}.tabular_uploaded",
        IMAGE_SUBJECT: f"{prefix}.img_uploaded",
        RESULT_SUBJECT: f"{prefix}.tabular_parsed",
    }
