"""Small helpers that every script shares; each file can be read in five minutes."""
