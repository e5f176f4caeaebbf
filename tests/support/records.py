"""The log as a test reads it: records by event and fields, and no error that the test did not expect."""

from typing import Any

Record = dict[str, Any]


class Records:
    """Log records in order. A test claims the events at level error or critical that it provokes."""

    def __init__(self, records: list[Record] | None = None) -> None:
        self.all: list[Record] = [] if records is None else records
        self._claimed: set[str] = set()

    def claim(self, *events: str) -> None:
        """These errors are what the test is about."""
        self._claimed.update(events)

    def named(self, event: str, **fields: Any) -> list[Record]:
        """The records of an event whose fields have these values."""
        return [record for record in list(self.all) if record.get("event") == event and fields.items() <= record.items()]

    def one(self, event: str, **fields: Any) -> Record:
        """The only such record."""
        found = self.named(event, **fields)
        assert len(found) == 1, f"{len(found)} records {event} {fields}:\n{self}"
        return found[0]

    def check(self) -> None:
        """Fail on any error nobody claimed."""
        unclaimed = [
            record
            for record in self.all
            if record.get("log_level", record.get("level")) in ("error", "critical") and record["event"] not in self._claimed
        ]
        assert not unclaimed, f"errors in the log that the test did not claim: {unclaimed}"

    def __str__(self) -> str:
        return "\n".join(str(record) for record in self.all)
