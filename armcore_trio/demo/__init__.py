"""The whole system on servers of its own."""
