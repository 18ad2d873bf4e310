"""With what flags and where a number was measured, and how it is written down."""

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


def words_of(flags: str) -> list[str]:
    """The words of --flags; raises UsageError."""
    try:
        return shlex.split(flags)
    except ValueError as error:
        raise runs.UsageError(f"--flags {flags}: {error}; give them as on a command line") from None


def parse_flags(script: ModuleType, flags: str) -> Any:
    """A script's Args from flags as on its command line, without a look at the devices, which would take the runs' GPU;
    ends as the script would if it has no such flag."""
    return tyro.cli(script.Args, args=runs.plain_booleans(script.Args, words_of(flags)))


def read_flags(script: ModuleType, flags: str) -> Any:
    """The same, checked; raises UsageError."""
    args = parse_flags(script, flags)
    runs.check_args(args, script.SCRIPT)
    return args


def machine() -> str:
    cores = f"{len(os.sched_getaffinity(0))} cores"
    if not devices.on_cpu():
        return f"{jax.devices()[0].device_kind}, {cores}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{model}, {cores}"


def commit() -> str:
    """The commit, with a + where files other than results differ from it."""

    def git(*words):
        command = ["git", *words]
        try:
            return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False).stdout
        except FileNotFoundError:  # no git here, as in the image of the Dockerfile
            return ""

    data = ":!benchmarks/results", ":!experiments/results", ":!experiments/studies/*.csv", ":!experiments/studies/*.png"
    changed = git("status", "--porcelain", "--", ".", *data)
    return git("rev-parse", "--short=9", "HEAD").strip() + ("+" if changed else "")


def origin() -> dict[str, str]:
    """Where and when a row was measured."""
    return {"machine": machine(), "jax": jax.__version__, "commit": commit(), "date": date.today().isoformat()}


def show(rows: list[dict], names: Iterable[str]) -> None:
    """Prints rows as columns under these names, with a line for each key."""
    table = Table("", *names)
    for key in rows[0]:
        table.add_row(key, *(str(row[key]) for row in rows))
    Console().print(table)


def make_room(path: str, flag: str) -> None:
    """Makes the folder of a file, if there is to be one: for before anything is measured. Raises UsageError, naming
    `flag`, if nothing can be written there."""
    if path:
        files.make_room(Path(path), flag)


def append_rows(path: str, rows: list[dict]) -> None:
    """Appends rows to a CSV file, with a header if it is new; does nothing without a path.

    Raises UsageError if the file has other columns.
    """
    if path:
        check_columns(path, read_rows(Path(path)), rows)
        with Path(path).open("a", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            if file.tell() == 0:
                writer.writeheader()
            elif not Path(path).read_bytes().endswith(b"\n"):  # the last row was cut short
                file.write("\n")
            writer.writerows(rows)


def read_rows(path: Path) -> list[dict]:
    """The rows of a CSV file, none if there is no such file."""
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: list[dict]) -> None:
    """Writes rows of the same columns to a CSV file, whole or not at all."""
    with files.atomic_write(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def check_columns(path: str | Path, there: list[dict], rows: list[dict]) -> None:
    """Raises UsageError if the rows that a CSV file has are of other columns than these."""
    same = not there or list(there[0]) == list(rows[0])
    runs.check(same, f"{path}: has other columns than {', '.join(rows[0])}; move it away, or give another file")


def add_rows(path: Path, rows: list[dict], key: tuple[str, ...]) -> None:
    """Adds rows to a CSV file, in the place of those with the same `key`; other processes may add theirs meanwhile.

    Raises UsageError if the file has other columns.
    """
    with files.lock_run(path.parent, wait=True):
        replace_rows(path, rows, key)


def replace_rows(path: Path, rows: list[dict], key: tuple[str, ...]) -> None:
    """`add_rows` for who holds the file's folder."""
    there = read_rows(path)
    check_columns(path, there, rows)
    new = {tuple(str(row[name]) for name in key) for row in rows}
    others = [row for row in there if tuple(row[name] for name in key) not in new]
    write_rows(path, [*others, *rows])


if __name__ == "__main__":
    print(json.dumps(origin()))
