"""Runs of the real engine, each in a process of its own, for the tests and the demo to read."""
