"""The exchange between a document-processing core and its recognition services: outbox, NATS, one Trio nursery."""

from importlib.metadata import version

__version__ = version("armcore-trio")
