"""Ask a running daemon how it is, as a container's health check does."""

import http.client
import json

from armcore_trio.values import Endpoint

_SECONDS = 5.0
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - listened on, not called


def ask(bind: Endpoint, *, live: bool = False) -> tuple[bool, str]:
    """Whether `/healthcheck`, or `/livez` if so asked, answers 200, and what it says in a line."""
    connection = http.client.HTTPConnection(_ANY.get(bind.host, bind.host), bind.port, timeout=_SECONDS)
    try:
        connection.request("GET", "/livez" if live else "/healthcheck")
        response = connection.getresponse()
        text = response.read().decode()
        report = {} if live else json.loads(text)
        summary = text.strip() if live else ", ".join(f"{name} {report[name]}" for name in ("status", "nats", "database"))
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        return False, f"no answer from {bind}: {error}"
    else:
        return response.status == http.client.OK, summary
    finally:
        connection.close()
