"""Measurements: the flags and the machine that they were made with, and the CSV files that they are written to."""

import csv
import json
import os
import platform
import shlex
import subprocess
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import tyro
from rich.console import Console
from rich.table import Table

from common import devices, files, runs

ROOT = Path(__file__).parent.parent


# FLAGS


def split_flags(flags: str) -> list[str]:
    """Splits --flags into words as a shell does; raises UsageError."""
    try:
        return shlex.split(flags)
    except ValueError as error:
        raise runs.UsageError(f"--flags {flags}: {error}; give them as on a command line") from None


def parse_flags(script: ModuleType, flags: str) -> Any:
    """Parses a script's Args, and exits as the script would for an unknown flag. Does not initialise the devices: that
    would take the GPU from the runs."""
    return tyro.cli(script.Args, args=runs.plain_values(script.Args, split_flags(flags)))


def read_flags(script: ModuleType, flags: str) -> Any:
    """Parses and checks a script's Args; raises UsageError."""
    args = parse_flags(script, flags)
    runs.check_args(args, script.SCRIPT)
    return args


# ORIGIN


def machine() -> str:
    """The GPU's or the CPU's name and the number of cores."""
    cores = f"{len(os.sched_getaffinity(0))} cores"
    if not devices.on_cpu():
        return f"{jax.devices()[0].device_kind}, {cores}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{model}, {cores}"


def commit() -> str:
    """The commit's hash, with a + if files other than results differ from it."""

    def git(*words):
        try:
            return subprocess.run(["git", *words], capture_output=True, text=True, cwd=ROOT, check=False).stdout
        except FileNotFoundError:  # no git here, as in the image of the Dockerfile
            return ""

    data = ":!benchmarks/results", ":!experiments/results", ":!experiments/studies/*.csv", ":!experiments/studies/*.png"
    changed = git("status", "--porcelain", "--", ".", *data)
    return git("rev-parse", "--short=9", "HEAD").strip() + ("+" if changed else "")


def origin() -> dict[str, str]:
    """The columns that say where and when a row was measured."""
    return {"machine": machine(), "jax": jax.__version__, "commit": commit(), "date": date.today().isoformat()}


# TABLES


def show(rows: list[dict], names: Iterable[str]) -> None:
    """Prints a transposed table: a column for each row, under its name, and a line for each key."""
    table = Table("", *names)
    for key in rows[0]:
        table.add_row(key, *(str(row[key]) for row in rows))
    Console().print(table)


def make_room(path: str, flag: str) -> None:
    """Creates the folder of an output file before anything is measured; raises UsageError if it cannot be written."""
    if path:
        files.make_room(Path(path), flag)


def read_rows(path: Path) -> list[dict]:
    """The rows of a CSV file; none if there is no such file."""
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: list[dict]) -> None:
    """Writes rows with the same columns to a CSV file, atomically."""
    with files.atomic_write(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def append_rows(path: str, rows: list[dict]) -> None:
    """Appends rows to a CSV file, if a path is given; raises UsageError if the file has other columns."""
    if path:
        check_columns(path, read_rows(Path(path)), rows)
        with Path(path).open("a", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            if file.tell() == 0:
                writer.writeheader()
            elif not Path(path).read_bytes().endswith(b"\n"):  # the last row was cut short
                file.write("\n")
            writer.writerows(rows)


def add_rows(path: Path, rows: list[dict], key: tuple[str, ...]) -> None:
    """Adds rows to a CSV file that other processes may write to, in place of those with the same `key` columns.

    Raises UsageError if the file has other columns.
    """
    with files.lock_run(path.parent, wait=True):
        existing = read_rows(path)
        check_columns(path, existing, rows)
        new = {tuple(str(row[name]) for name in key) for row in rows}
        write_rows(path, [*(row for row in existing if tuple(row[name] for name in key) not in new), *rows])


def check_columns(path: str | Path, existing: list[dict], rows: list[dict]) -> None:
    """Raises UsageError if the rows of a CSV file have other columns than new ones."""
    same = not existing or list(existing[0]) == list(rows[0])
    runs.check(same, f"{path}: has other columns than {', '.join(rows[0])}; move it away, or give another file")


if __name__ == "__main__":
    print(json.dumps(origin()))
