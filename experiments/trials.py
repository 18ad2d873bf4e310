"""A run of a script as a process of its own, in a folder where it continues after anything: for sweeps and tables."""

import contextlib
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from common import checkpoints, runs
from common.files import FailedError, FullError, UsageError, check
from common.flags import flag_of
from common.flags import words_of as words_of_flag

# Flags that say nothing about how a run learnt.
BESIDE = {
    "run_dir", "resume", "num_threads", "checkpoint_every", "keep_checkpoints", "wandb_mode", "wandb_project",
    "wandb_entity", "track",
}  # fmt: skip

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(path.name for path in ROOT.glob("*_*.py"))
PLACES = ("resume", "run_dir")  # flags by which a run could write to another's
ORIGIN = "machine", "jax", "commit", "date"  # of a run, as records.py has them
# Numbers of any length: Python's own refuses those of thousands of digits.
DECODER = json.JSONDecoder(parse_int=lambda digits: int(digits) if len(digits) < 19 else float(digits))
MAX_JOBS = 1000
# Runs a command; asks it to end once standard input is closed, as it is when the process that writes to it dies. Takes
# no signals itself: one that is meant for all reaches the command too.
SUPERVISOR = """
import signal, subprocess, sys, threading
signal.signal(signal.SIGINT, lambda *_: None)
signal.signal(signal.SIGTERM, lambda *_: None)
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, close_fds=False)
threading.Thread(target=lambda: (sys.stdin.read(), child.send_signal(signal.SIGTERM)), daemon=True).start()
code = child.wait()
sys.exit(code if code >= 0 else 128 - code)
"""


class Stopped(Exception):
    """The run was asked to end before it was done; it can resume from its checkpoint."""


class Killed(RuntimeError):
    """The run was ended by a signal that it could not answer."""


# WHAT IS ASKED FOR


def read_settings(words: Sequence[str]) -> dict[str, str]:
    """Words such as num_envs=8 or gap-stack=False as flags, by name with underscores; raises UsageError."""
    settings = {}
    for word in words:
        name, equals, value = word.partition("=")
        name = name.replace("-", "_")
        check(bool(name and equals), f"--set {word}: give name=value")
        check(name not in settings, f"--set {word}: {name} is {settings.get(name)} already, give one value")
        settings[name] = value
    return settings


def check_flags(source: str, program: str, flags: dict[str, Any], own: Iterable[str] = ()) -> None:
    """Raises UsageError if a script is not here, lacks one of these flags, or gets it from us.

    Args:
      source: where the flags are from, such as --set.
      own: flags that whoever runs the script gives it, besides those that say where a run is.
    """
    check(program in SCRIPTS, f"{source}: program {program}, give one of {', '.join(SCRIPTS)}")
    module = importlib.import_module(Path(program).stem)
    check(hasattr(module, "Args"), f"{source}: program {program} is no script, it has no Args")
    known = [field.name.rstrip("_") for field in fields(module.Args)]
    unknown = [name for name in flags if name not in known]
    check(not unknown, f"{source}: {program} has no flag {', '.join(unknown)}")
    for name, value in flags.items():
        free = name not in (*PLACES, *own) and not name.startswith("wandb_")
        check(free, f"{source} {name}={value}: {flag_of(name)} is not free here, each run is given its own")


def ask_script(program: str, flags: dict) -> None:
    """Ends as the script would, with its sentence and exit code 2, if it does not take these values of its flags."""
    jax.config.update("jax_platforms", "cpu")  # this process must not take the runs' GPU
    script = importlib.import_module(Path(program).stem)
    runs.cli(script.Args, runs.check_flags, words_of(flags))


@functools.cache
def origin() -> dict[str, str]:
    """Where and when, as records.py has it; in a process of its own, since JAX takes most of a GPU's memory."""
    command = [sys.executable, "-m", "experiments.records"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if told.returncode:
        raise FailedError(f"JAX does not start: {(told.stderr.strip() or 'it said nothing').splitlines()[-1]}")
    return json.loads(told.stdout)


def joined(*origins: dict) -> dict[str, str]:
    """What was measured at several commits, on several days or machines has all of them, each once."""
    both = {}
    for name in ORIGIN:
        between = " and " if name == "machine" else " "
        parts = (part for origin in origins for part in origin.get(name, "").split(between) if part)
        both[name] = between.join(dict.fromkeys(parts))
    return both


def find_run(folder: Path) -> Path | None:
    """The newest run directory in a folder that has a checkpoint, else the newest, if there is one."""
    found = [path.parent for path in folder.glob("*/args.json")]

    def by_age(run):
        return bool(checkpoints.steps_in(run)), (run / "args.json").stat().st_ctime

    return max(found, key=by_age, default=None)


def each_line(run: Path | None) -> Iterator[dict]:
    """The lines of a run's metrics.jsonl so far that are numbers by name: not one that is still being written. One at a
    time, since a long run of Ape-X has millions."""
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
    """All of `each_line`."""
    return list(each_line(run))


def values_of(run: Path | None, metric: str) -> list[float]:
    """What a run has logged of a metric so far."""
    return [line[metric] for line in each_line(run) if metric in line]


def logged_names(run: Path | None) -> list[str]:
    """The metrics that a run has logged, in order."""
    return sorted({name for line in each_line(run) for name in line if "/" in name})


def part_done(run: Path | None) -> float:
    """How far a run is, from 0 to 1, by the last step that it has logged."""
    steps = values_of(run, "global_step")
    if not steps:
        return 0.0
    try:
        args = runs.read_args(str(run), "RUN_DIR")["args"]
        total = int(args.get("total_timesteps") or args["task_timesteps"] * len(args["tasks"].split(",")))  # or: doors
        return min(1.0, steps[-1] / total)
    except (UsageError, KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
        return 0.0  # the script itself will say what is wrong


class ProgressLine:
    """How far many runs are and how long the rest may take: one line on a terminal, and nothing where there is none."""

    def __init__(self, what: str, count: int, done: int, console: Console | None = None):
        """`done` of `count` runs are over already."""
        console = console or Console(stderr=True, emoji=False)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(None),
            TextColumn("{task.completed:.1f} of {task.total} runs"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            speed_estimate_period=24 * 3600,
            refresh_per_second=1,
            console=console,
            disable=not console.is_terminal,
            redirect_stdout=sys.stdout.isatty(),  # what is printed into a file stays in it
        )
        self._task = self._progress.add_task(what, total=count, completed=done)
        self._done, self._parts, self._looked = done, {}, {}

    def __enter__(self) -> "ProgressLine":
        self._progress.start()
        return self

    def __exit__(self, *_) -> None:
        self._progress.stop()

    def look(self, folder: Path, alive: bool) -> None:
        """Takes note of how far the run in a folder is, every ten seconds, or that it is over."""
        now = time.monotonic()
        if self._progress.disable or (alive and now < self._looked.get(folder, -10) + 10):
            return
        self._looked[folder] = now
        self._parts[folder] = part_done(find_run(folder)) if alive else 1.0
        self._progress.update(self._task, completed=self._done + sum(self._parts.values()))


@contextlib.contextmanager
def until_signal() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set, in place of ending this process."""
    stopping = threading.Event()
    old = {number: signal.signal(number, lambda *_: stopping.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopping
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def in_parallel(work: Callable[[], None], jobs: int, stopping: threading.Event) -> None:
    """Calls `work` on so many threads at once, and waits for all. An error in one stops the others by setting
    `stopping`, and is raised: said only when all have done their work, it could come days later."""

    def work_or_stop_all():
        try:
            work()
        except BaseException:
            stopping.set()
            raise

    with ThreadPoolExecutor(jobs) as pool:
        workers = [pool.submit(work_or_stop_all) for _ in range(jobs)]
    for worker in workers:
        worker.result()


def report_failures(failed: dict[str, str], count: int, see: Path) -> None:
    """Says which of `count` runs failed, by why; raises FailedError if it is all of them."""
    if not failed:
        return
    by_reason = {}
    for name, why in failed.items():
        by_reason.setdefault(why, []).append(name)
    listed = "; ".join(f"{', '.join(names)}: {why}" for why, names in by_reason.items())
    sentence = f"{len(failed)} of {count} runs failed, see {see}: {listed}"
    if len(failed) == count:
        raise FailedError(sentence)
    print(sentence)


def words_of(flags: dict) -> list[str]:
    """Flags as `wandb agent` gives them: --name=value."""
    return [word for name, value in flags.items() for word in words_of_flag(f"--{name}", value)]


def run(
    program: str,
    flags: dict,
    folder: Path,
    lock: TextIO,
    stopping: threading.Event,
    look: Callable[[bool], None] = lambda alive: None,
) -> None:
    """Runs a script with its run directory in `folder`, which we hold, or continues the one that is there.

    Calls look(True) now and then and look(False) once it has ended well. What it prints is added to output.txt. On any
    exception, and if this process dies by whatever signal, the script is asked to end, and writes a checkpoint.

    Raises Stopped once `stopping` is set, or if something else stopped the script; FullError if it met a full disk,
    Killed or RuntimeError if it failed.
    """
    found = find_run(folder)
    path = folder / "output.txt"
    where = {"resume": found} if found and checkpoints.steps_in(found) else {"run_dir": folder}
    command = [sys.executable, str(ROOT / program), *words_of({"wandb_mode": "disabled"} | flags | where)]
    # Several runs may share a GPU; and JAX would end a traceback with a note of its own, in place of the error.
    shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_TRACEBACK_FILTERING": "off"}
    with path.open("a") as output:
        begin = path.stat().st_size
        process = subprocess.Popen(
            [sys.executable, "-ISc", SUPERVISOR, *command], cwd=ROOT, env=shared | os.environ, stdin=subprocess.PIPE,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True, pass_fds=[lock.fileno()],
        )  # fmt: skip
    try:
        following = 0.0
        while process.poll() is None:
            if stopping.is_set():
                raise Stopped
            began = time.monotonic()
            if began >= following:
                look(True)
                following = time.monotonic() + max(0.5, 20 * (time.monotonic() - began))  # longer, the more was logged
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(5, max(0, following - time.monotonic())))
    finally:
        process.stdin.close()
        process.wait()
    said = path.read_bytes()[begin:].decode(errors="replace").strip().splitlines()
    stopped = any(line.startswith("stopped by ") for line in said)  # before training, with a signal's exit code
    if stopping.is_set() or (stopped and process.returncode in (0, 130, 143)):
        raise Stopped
    if said and said[-1].startswith("error: cannot write ") and "MiB are free there" in said[-1]:
        raise FullError(said[-1].removeprefix("error: "))
    if process.returncode:
        kind = Killed if process.returncode < 0 or process.returncode > 128 else RuntimeError
        boxed = [line.strip("│ ") for line in said if line.startswith("│ Error")]  # tyro's answer to a flag
        raise kind(f"exit code {process.returncode}: {(boxed or said or ['it said nothing'])[-1]}")
    look(False)
