"""Runs of a script, each in a process of its own, which resume after a stop or a kill: for sweeps, tables and PBT."""

import contextlib
import functools
import importlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from datetime import date
from pathlib import Path
from typing import Any, TextIO

import jax

from common import checkpoints, runs
from common.files import FailedError, FullError, UsageError, check, did_you_mean
from common.flags import flag_of, leave_closed_terminal, stop_signals
from experiments import records

# Flags that have no influence on what a run learns.
NEUTRAL_FLAGS = {
    "run_dir", "resume", "num_threads", "rollout_threads", "checkpoint_every", "keep_checkpoints",
    "wandb_mode", "wandb_project", "wandb_entity", "track",
}  # fmt: skip

SCRIPTS = sorted(path.name for path in records.ROOT.glob("*_*.py"))
PLACES = ("resume", "run_dir")  # with these, a run could write into another's directory
ORIGIN = "machine", "jax", "commit", "date"  # columns of records.origin
# Numbers of any length: Python's own parser refuses thousands of digits.
DECODER = json.JSONDecoder(parse_int=lambda digits: int(digits) if len(digits) < 19 else float(digits))
# Runs a command and sends it SIGTERM when standard input closes, as it does when the parent dies. It ignores signals
# itself: one sent to the process group reaches the command too.
SUPERVISOR = """
import signal, subprocess, sys, threading
for name in ("INT", "TERM", "HUP", "USR1", "XCPU"):
    number = getattr(signal, f"SIG{name}")
    if name in ("INT", "TERM") or signal.getsignal(number) != signal.SIG_IGN:  # what nohup ignores stays ignored
        signal.signal(number, lambda *_: None)
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, close_fds=False)
threading.Thread(target=lambda: (sys.stdin.read(), child.send_signal(signal.SIGTERM)), daemon=True).start()
code = child.wait()
sys.exit(code if code >= 0 else 128 - code)
"""


class Stopped(Exception):
    """The run was asked to stop before its end; it can resume from its checkpoint."""


class Killed(RuntimeError):
    """A signal ended the run, or device memory was full (exit code above 128)."""


class NotLoggedError(RuntimeError):
    """The run finished without logging the metric."""


# FLAGS


def read_settings(words: Sequence[str]) -> dict[str, str]:
    """Parses words such as num_envs=8 or gap-stack=False into flags by field name; raises UsageError."""
    settings = {}
    for word in words:
        name, equals, value = word.partition("=")
        name = name.replace("-", "_")
        check(bool(name and equals), f"--set {word}: give name=value")
        check(name not in settings, f"--set {word}: {name} is {settings.get(name)} already, give one value")
        settings[name] = value
    return settings


def check_flags(source: str, program: str, flags: dict[str, Any], own: Iterable[str] = ()) -> None:
    """Raises UsageError for an unknown script, a flag that it lacks, or one that the tool itself sets.

    Args:
      source: where the flags come from, such as --set.
      own: flags that the tool sets, besides run directories and W&B's.
    """
    check(program in SCRIPTS, f"{source}: program {program}, give one of {', '.join(SCRIPTS)}")
    module = importlib.import_module(Path(program).stem)
    check(hasattr(module, "Args"), f"{source}: program {program} is no script, it has no Args")
    known = [field.name.rstrip("_") for field in fields(module.Args)]
    for name, value in flags.items():
        if name not in known:
            hint = did_you_mean(name, known)
            raise UsageError(f"{source} {name}={value}: {program} has no flag {name}{hint}")
        free = name not in (*PLACES, *own) and not name.startswith("wandb_")
        check(free, f"{source} {name}={value}: {flag_of(name)} cannot be set here, each run is given its own")


def check_values(program: str, flags: dict) -> None:
    """Exits as the script would, with its sentence and exit code 2, if it refuses these values of its flags."""
    jax.config.update("jax_platforms", "cpu")  # this process must not take the runs' GPU
    script = importlib.import_module(Path(program).stem)
    runs.cli(script.Args, runs.check_flags, words_of(flags))


def words_of(flags: dict) -> list[str]:
    """Flags as `wandb agent` writes them, --name=value; those of tuples as --name value value. Raises UsageError."""
    words = []
    for name, value in flags.items():
        several = list(map(str, value)) if isinstance(value, list | tuple) else []
        check(not any(x.startswith("--") for x in several), f"{flag_of(name)} {several}: a value cannot begin with --")
        words += [f"--{name}", *several] if isinstance(value, list | tuple) else [f"--{name}={value}"]
    return words


# ORIGINS


def origin() -> dict[str, str]:
    """records.origin(), of now: a process that runs for days starts each run from the files as they are then."""
    return _first_origin() | {"commit": records.commit(), "date": date.today().isoformat()}


@functools.cache
def _first_origin() -> dict[str, str]:
    """records.origin(), from a process of its own: JAX would reserve most of a GPU's memory in this one."""
    command = [sys.executable, "-m", "experiments.records"]
    done = subprocess.run(command, cwd=records.ROOT, capture_output=True, text=True)
    if done.returncode:
        raise FailedError(f"JAX does not start: {(done.stderr.strip() or 'no output').splitlines()[-1]}")
    return json.loads(done.stdout)


def merge_origins(*origins: dict) -> dict[str, str]:
    """The origin of a number that was measured at several commits, on several days or machines: each listed once."""
    merged = {}
    for name in ORIGIN:
        separator = " and " if name == "machine" else " "
        parts = (part for origin in origins for part in origin.get(name, "").split(separator) if part)
        merged[name] = separator.join(dict.fromkeys(parts))
    return merged


# LOGS


def find_run(folder: Path) -> Path | None:
    """The newest run directory in a folder, those with a checkpoint first; None if there is none."""
    found = [path.parent for path in folder.glob("*/args.json")]

    def by_age(run):
        try:
            return bool(checkpoints.steps_in(run)), (run / "args.json").stat().st_ctime
        except FileNotFoundError:  # another process has just removed it
            return False, 0.0

    return max(found, key=by_age, default=None)


def find_resumable(folder: Path) -> Path | None:
    """The run in a folder, if it has a checkpoint."""
    run = find_run(folder)
    return run if run and checkpoints.steps_in(run) else None


def iter_metrics(run: Path | None) -> Iterator[dict]:
    """The lines of a run's metrics.jsonl as dicts of numbers, without a line that is still being written or damaged.
    One at a time: a long run of Ape-X has millions."""
    if not (run and (run / "metrics.jsonl").is_file()):
        return
    with (run / "metrics.jsonl").open("rb") as file:
        for text in file:
            line = None
            with contextlib.suppress(ValueError, RecursionError):
                line = DECODER.decode(text.decode())
            if isinstance(line, dict) and all(isinstance(value, (int, float)) for value in line.values()):
                yield line


def read_metrics(run: Path | None) -> list[dict]:
    """All lines of a run's metrics.jsonl."""
    return list(iter_metrics(run))


def values_of(run: Path | None, metric: str) -> list[float]:
    """The values that a run has logged of a metric so far."""
    return [line[metric] for line in iter_metrics(run) if metric in line]


def last_value(run: Path | None, metric: str) -> float:
    """The last value of a metric; raises RuntimeError if it is not finite, NotLoggedError if there is none."""
    values = values_of(run, metric)
    if not values:
        names = sorted({name for line in iter_metrics(run) for name in line if "/" in name})
        raise NotLoggedError(f"{metric} was never logged, give one of {' '.join(names)}")
    if not math.isfinite(values[-1]):
        raise RuntimeError(f"{metric} is {values[-1]}")
    return values[-1]


def seconds_of(folder: Path) -> float:
    """How long the run in a folder has trained, by its own clock, which continues over resumes."""
    return float((values_of(find_run(folder), "seconds") or [0])[-1])


# SEVERAL RUNS


def in_parallel(work: Callable[[threading.Event], None], jobs: int) -> bool:
    """Calls work(stopping) on `jobs` threads and waits for them; returns whether a stop signal came.

    A stop signal, or an exception in one thread, sets `stopping`; the exception is raised here once all threads have
    returned.
    """
    stopping = threading.Event()

    def work_or_stop_all():
        try:
            work(stopping)
        except BaseException:
            stopping.set()
            raise

    def stop(*_):
        leave_closed_terminal()
        stopping.set()

    handlers = {number: signal.signal(number, stop) for number in stop_signals()}
    try:
        with ThreadPoolExecutor(jobs) as pool:
            workers = [pool.submit(work_or_stop_all) for _ in range(jobs)]
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for worker in workers:
        worker.result()
    return stopping.is_set()


def report_failures(failed: dict[str, str], total: int, see: Path) -> None:
    """Prints which of `total` runs failed, grouped by reason; raises FailedError if all did."""
    if not failed:
        return
    by_reason = {}
    for name, why in failed.items():
        by_reason.setdefault(why, []).append(name)
    listed = "; ".join(f"{', '.join(names)}: {why}" for why, names in by_reason.items())
    sentence = f"{len(failed)} of {total} runs failed, see {see}: {listed}"
    if len(failed) == total:
        raise FailedError(sentence)
    print(sentence)


# ONE RUN


def run(
    program: str,
    flags: dict,
    folder: Path,
    lock: TextIO,
    stopping: threading.Event,
    on_poll: Callable[[bool], None] = lambda alive: None,
) -> None:
    """Runs a script with its run directory in a folder that we have locked, or resumes the run that is there.

    Calls on_poll(True) now and then, and on_poll(False) when the script has finished. Its output is appended to
    output.txt. On any exception, also one of on_poll, and if this process is killed, the script gets SIGTERM and writes
    a checkpoint.

    Raises Stopped if `stopping` is set or the script was stopped otherwise, FullError if it met a full disk, Killed if
    a signal ended it, RuntimeError if it failed.
    """
    found = find_resumable(folder)
    path = folder / "output.txt"
    where = {"resume": found} if found else {"run_dir": folder}
    if "run_dir" in where:
        for dead in folder.glob("*/args.json"):  # killed before its first checkpoint: plots would count it as a run
            shutil.rmtree(dead.parent)
    command = [sys.executable, str(records.ROOT / program), *words_of({"wandb_mode": "disabled"} | flags | where)]
    # Several runs may share a GPU; and JAX would end a traceback with a note of its own, in place of the error.
    shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_TRACEBACK_FILTERING": "off"}
    # A link in a folder that a stranger made could lead to any file.
    with open(path, "a", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666)) as output:
        begin = path.stat().st_size
        process = subprocess.Popen(
            [sys.executable, "-ISc", SUPERVISOR, *command], cwd=records.ROOT, env=shared | os.environ,
            stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            pass_fds=[lock.fileno()],
        )  # fmt: skip
    try:
        due = 0.0
        while process.poll() is None:
            if stopping.is_set():
                raise Stopped
            began = time.monotonic()
            if began >= due:
                on_poll(True)
                # At most a twentieth of the time goes into reading a long log.
                due = time.monotonic() + max(0.5, 20 * (time.monotonic() - began))
            with contextlib.suppress(subprocess.TimeoutExpired):
                # Short: a service's stop signals the script too, and a second SIGTERM after 2 s would end it at once.
                process.wait(min(1, max(0, due - time.monotonic())))
    finally:
        process.stdin.close()
        process.wait()
    raise_for_exit(process.returncode, path.read_bytes()[begin:].decode(errors="replace").strip(), stopping)
    on_poll(False)


def raise_for_exit(code: int, output: str, stopping: threading.Event) -> None:
    """Raises the error that a script's exit code and output stand for, if any."""
    lines = output.splitlines() or ["no output"]
    # A second signal, or one before training, ends the script with 128 + its number.
    stopped = any(line.startswith("stopped by ") for line in lines)
    if stopping.is_set() or (stopped and code in (0, *(128 + number for number in stop_signals()))):
        raise Stopped
    if lines[-1].startswith("error: cannot write ") and "MiB are free there" in lines[-1]:
        raise FullError(lines[-1].removeprefix("error: "))
    if code:
        kind = Killed if code < 0 or code > 128 else RuntimeError
        boxed = [line.strip("│ ") for line in lines if line.startswith("│ Error")]  # tyro's answer to a flag
        raise kind(f"exit code {code}: {(boxed or lines)[-1]}")
