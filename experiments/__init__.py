"""Studies and their results; most files are a command, `python -m experiments.NAME` from the repository's root."""
