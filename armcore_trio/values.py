"""What a variable of the environment can hold: the types, and the strict conversions from text that make them.

A conversion raises `BadValue` saying what is wrong, never the text.
"""

import re
from base64 import b32decode, urlsafe_b64decode
from collections.abc import Callable
from enum import StrEnum
from ipaddress import IPv6Address
from json import loads
from pathlib import Path
from urllib.parse import unquote, urlsplit

from attrs import frozen

from armcore_trio.dsn import check


class BadValue(Exception):
    """The text cannot be what the variable needs. The message says why without repeating it."""


class Secret:
    """A text that hides itself: `repr`, `str` and formatting show no more than that it is set."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The text itself, for the one call that needs it."""
        return self._text

    def __repr__(self) -> str:
        return "<hidden>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)


class LogFormat(StrEnum):
    """How a log line looks: one JSON object for machines, or text for a person at a terminal."""

    JSON = "json"
    CONSOLE = "console"


@frozen
class Endpoint:
    """A host and a port to listen on; port 0 lets the system choose."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@frozen
class NatsServer:
    """One NATS URL, its parts apart so that logs can name the server without its credentials."""

    host: str
    port: int
    tls: bool
    user: Secret | None = None
    password: Secret | None = None

    def __str__(self) -> str:
        return f"{'tls' if self.tls else 'nats'}://{Endpoint(self.host, self.port)}"


_GREATEST_PORT = 65_535
_NO_ENDPOINT = "must be host:port, such as 127.0.0.1:8080 or [::1]:8080"
_NO_NATS_URL = "must be nats://host:port or tls://host:port, several apart by commas"
_LEAST_SECONDS, _GREATEST_SECONDS = 0.01, 31_536_000
_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def whole(least: int, greatest: int) -> Callable[[str], int]:
    """Whole numbers in ASCII digits within bounds."""

    def convert(text: str) -> int:
        if not re.fullmatch("[0-9]{1,12}", text):
            raise BadValue(f"must be a whole number, such as {max(least, 1)}")
        if not least <= int(text) <= greatest:
            raise BadValue(f"must lie between {least} and {greatest}")
        return int(text)

    return convert


def seconds(text: str) -> float:
    """A length of time in seconds, fractions allowed: from a hundredth of a second to a year."""
    if not re.fullmatch(r"[0-9]{1,12}(\.[0-9]+)?", text):
        raise BadValue("must be a number of seconds, such as 5 or 0.5")
    if not _LEAST_SECONDS <= float(text) <= _GREATEST_SECONDS:
        raise BadValue(f"must lie between {_LEAST_SECONDS} and {_GREATEST_SECONDS}")
    return float(text)


def boolean(text: str) -> bool:
    """True or false by the documented words, in any case."""
    if (value := _BOOLEANS.get(text.lower())) is None:
        raise BadValue("must be one of " + ", ".join(_BOOLEANS))
    return value


def log_format(text: str) -> LogFormat:
    """One of the log formats."""
    try:
        return LogFormat(text)
    except ValueError:
        raise BadValue("must be one of " + ", ".join(LogFormat)) from None


def subject(text: str) -> str:
    """A subject that can be published to and subscribed: no white space or unseen sign, wildcard or empty token (R7)."""
    if not text:
        raise BadValue("must not be empty: leave the variable out to have its default")
    if " " in text or not text.isprintable():
        raise BadValue("must not hold white space")
    if "*" in text or ">" in text:
        raise BadValue("must not hold a wildcard (* or >)")
    if "" in text.split("."):
        raise BadValue("must not hold an empty token")
    return text


def endpoint(text: str) -> Endpoint:
    """`host:port`; an IPv6 address stands in brackets."""
    host, _, port = text.rpartition(":")
    host = _host(host) if not host.startswith("[") else _ipv6(host)
    if not re.fullmatch("[0-9]{1,5}", port) or int(port) > _GREATEST_PORT:
        raise BadValue(_NO_ENDPOINT)
    return Endpoint(host, int(port))


def _host(text: str) -> str:
    """A name or an IPv4 address. `unix:` and `fd:` would be addresses of another kind to the server underneath."""
    if not re.fullmatch("[A-Za-z0-9_]([A-Za-z0-9._-]*)", text) or text in {"unix", "fd"}:
        raise BadValue(_NO_ENDPOINT)
    return text


def _ipv6(text: str) -> str:
    try:
        return str(IPv6Address(text.removeprefix("[").removesuffix("]"))) if text.endswith("]") else _host("")
    except ValueError:
        raise BadValue(_NO_ENDPOINT) from None


def nats_servers(text: str) -> tuple[NatsServer, ...]:
    """One or several NATS URLs, apart by commas; credentials may be percent-encoded."""
    return tuple(_nats_server(url.strip()) for url in text.split(","))


def _nats_server(url: str) -> NatsServer:
    try:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        port = 4222 if parts.port is None else parts.port
        host = parts.hostname or ""
        host = str(IPv6Address(host)) if ":" in host else _host(host)
    except (ValueError, BadValue):
        raise BadValue(_NO_NATS_URL) from None
    extra = parts.path.strip("/") or parts.query or parts.fragment or (parts.password and not parts.username)
    if parts.scheme not in {"nats", "tls"} or not port or extra:
        raise BadValue(_NO_NATS_URL)
    user, password = (Secret(unquote(part)) if part else None for part in (parts.username, parts.password))
    return NatsServer(host, port, parts.scheme == "tls", user, password)


def dsn(text: str) -> Secret:
    """A connection string that libpq can read."""
    try:
        check(text)
    except ValueError as error:
        raise BadValue(str(error)) from None
    return Secret(text)


def seed(text: str) -> Secret:
    """The nkey seed of a user."""
    import nkeys

    if not text.startswith("SU"):
        raise BadValue("must be the seed of a user (SU…)")
    try:
        *body, low, high = b32decode(text + "=" * (-len(text) % 8))
        if nkeys.crc16(bytearray(body)) != low | high << 8:  # the library does not look
            raise ValueError
        public_key(text)
    except Exception:  # noqa: BLE001 - nkeys raises its own, binascii's and TypeError; none may show the seed
        raise BadValue("is not a valid nkey seed") from None
    return Secret(text)


def public_key(seed: str) -> str:
    """The public key that belongs to a seed."""
    import nkeys

    return bytes(nkeys.from_seed(bytearray(seed.encode())).public_key).decode()


def jwt(text: str) -> Secret:
    """The JWT of a user."""
    try:
        subject = jwt_subject(text)
    except ValueError:
        subject = ""
    if not subject.startswith("U"):
        raise BadValue("is not the JWT of a user")
    return Secret(text)


def jwt_subject(text: str) -> str:
    """Whose JWT it is. Raises `ValueError` if the text is no JWT."""
    _header, claims, _signature = text.split(".")
    document = loads(urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
    return str(document.get("sub", "")) if isinstance(document, dict) else ""


def readable_file(text: str) -> Path:
    """The path of a file that can be read."""
    path = Path(text)
    try:
        path.open("rb").close()
    except OSError as error:
        raise BadValue(f"cannot be read: {error.strerror}") from None
    return path
