"""Clients that others wrote, run against a server: `python -m benchmarks.clients --help`."""
