"""The exchange's books: whatever is counted on its way in is counted once more for what became of it (R9)."""

from armcore_trio.exchange.inbox import Inbox
from armcore_trio.supervision.status import Book


def books(inbox: Inbox) -> dict[str, Book]:
    """By the task that keeps it. Both sides of each change between two checkpoints."""
    return {
        "publisher": Book("taken", ("confirmed", "failed", "refused")),
        "subscriber": Book(
            "received",
            ("applied", "duplicate", "late", "ignored", "invalid", "unknown", "abandoned", "waiting"),
            {"waiting": inbox.__len__},
        ),
    }
