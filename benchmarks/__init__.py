"""Speed and memory; each file is a command, `python -m benchmarks.NAME` from the repository's root."""
