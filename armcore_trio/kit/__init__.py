"""For those who write recognition services."""
