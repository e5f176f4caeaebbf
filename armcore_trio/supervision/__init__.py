"""Restarts by policy, and what tasks report. Knows no child."""
