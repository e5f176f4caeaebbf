"""Ask a running daemon how it is, as a container's health check does."""

import http.client
import json

from armcore_trio.values import Endpoint

_SECONDS = 5.0
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - listened on, not called


def ask(bind: Endpoint) -> tuple[bool, str]:
    """Whether `/healthcheck` answers 200, and what it says in a line."""
    connection = http.client.HTTPConnection(_ANY.get(bind.host, bind.host), bind.port, timeout=_SECONDS)
    try:
        connection.request("GET", "/healthcheck")
        response = connection.getresponse()
        report = json.loads(response.read())
        summary = ", ".join(f"{name} {report[name]}" for name in ("status", "nats", "database"))
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        return False, f"no answer from {bind}: {error}"
    else:
        return response.status == http.client.OK, summary
    finally:
        connection.close()
