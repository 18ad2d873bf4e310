"""A run of a script as a process of its own, in a folder where it goes on after anything: for sweeps and tables."""

import contextlib
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path

import records  # the file beside this one; it makes the repository's modules importable
import yaml

from common.runs import check

ROOT = Path(__file__).parent.parent
# Runs a command; asks it to end once standard input is closed, as it is when the process that writes to it dies.
SUPERVISOR = """
import signal, subprocess, sys, threading
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
threading.Thread(target=lambda: (sys.stdin.read(), child.send_signal(signal.SIGTERM)), daemon=True).start()
code = child.wait()
sys.exit(code if code >= 0 else 128 - code)
"""


class Stopped(Exception):
    """The run was asked to end before it was done; it can go on from its checkpoint."""


def read_settings(words: Sequence[str]) -> dict[str, dict]:
    """Words such as num_envs=8 or gap-stack=False as parameters of a sweep; raises UsageError."""
    settings = {}
    for word in words:
        name, equals, value = word.partition("=")
        check(bool(name and equals), f"--set {word}: give name=value")
        settings[name.replace("-", "_")] = {"value": yaml.safe_load(value) if value else ""}
    return settings


def check_flags(source: str, program: str, names: Iterable[str]) -> None:
    """Raises UsageError if a script is not here or lacks one of these flags."""
    scripts = sorted(path.name for path in ROOT.glob("*_*.py"))
    check(program in scripts, f"{source}: program {program}, give one of {', '.join(scripts)}")
    known = [field.name.rstrip("_") for field in fields(importlib.import_module(Path(program).stem).Args)]
    unknown = [name for name in names if name not in known]
    check(not unknown, f"{source}: {program} has no flag {', '.join(unknown)}")


def origin() -> dict[str, str]:
    """Where and when, as `records.origin` has it; in a process of its own, since JAX takes most of a GPU's memory."""
    command = [sys.executable, records.__file__]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def find_run(folder: Path) -> Path | None:
    """The newest run directory in a folder, if there is one."""
    found = [path.parent for path in folder.glob("*/args.json")]
    return max(found, key=lambda run: (run / "args.json").stat().st_ctime, default=None)


def read_metrics(run: Path | None) -> list[dict]:
    """The lines of a run's metrics.jsonl so far, without one that is still being written."""
    lines = []
    if run and (run / "metrics.jsonl").exists():
        for line in (run / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(line))
    return lines


def values_of(run: Path | None, metric: str) -> list[float]:
    """What a run has logged of a metric so far."""
    return [line[metric] for line in read_metrics(run) if metric in line]


def words_of(flags: dict) -> list[str]:
    """Flags as `wandb agent` gives them: --name=value."""
    return [f"--{name}={value}" for name, value in flags.items()]


def start(program: str, flags: dict, folder: Path) -> subprocess.Popen:
    """Starts a script with its run directory in `folder`, or goes on with the one that is there.

    What it prints is added to `folder`/output.txt. Closing its standard input asks it to end with a checkpoint. That
    happens too if this process dies, by whatever signal: no run ever has two writers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    run = find_run(folder)
    resumable = run is not None and any((run / "checkpoints").glob("[0-9]*"))
    where = {"resume": run} if resumable else {"run_dir": folder}
    command = [sys.executable, str(ROOT / program), *words_of({"wandb_mode": "disabled"} | flags | where)]
    shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # several runs may share a GPU
    with (folder / "output.txt").open("a") as output:
        return subprocess.Popen(
            [sys.executable, "-ISc", SUPERVISOR, *command], cwd=ROOT, env=shared | os.environ, stdin=subprocess.PIPE,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def wait(
    process: subprocess.Popen, folder: Path, stopping: threading.Event, look: Callable[[], None] = lambda: None
) -> None:
    """Waits for a script to end, calling `look` now and then; on any exception ends it, with a checkpoint, first.

    Raises Stopped once `stopping` is set, or if something else stopped the script; RuntimeError if it failed.
    """
    try:
        while process.poll() is None:
            if stopping.is_set():
                raise Stopped
            look()
            time.sleep(0.5)
    finally:
        process.stdin.close()
        process.wait()
    last = " ".join((folder / "output.txt").read_text().strip().splitlines()[-1:])
    if stopping.is_set() or last.startswith("stopped by "):
        raise Stopped
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {last}")
    look()
