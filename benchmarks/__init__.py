"""Measurements of speed and memory, and tests that runs resume or repeat bit for bit.

Commands are run as `python -m benchmarks.NAME` from the repository's root; golden_runs.py is a list of runs for others.
"""
