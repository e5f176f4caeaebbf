"""What the daemon shows of itself over HTTP."""
