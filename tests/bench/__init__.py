"""Benchmarks: figures to compare within one run, never asserted in the test suite. Run with `make bench`."""
