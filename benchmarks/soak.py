"""Runs a script for hours and records its memory, threads, open files and steps per second.

Adds a row to OUT.csv every `--every` seconds (60); at the end and at each stop draws OUT.png and prints how fast memory
grows. A signal to this program makes the script write a checkpoint; with the same --out and flags it continues that run
and its minutes. Linux only. The flags in quotes are the script's:

    python -m benchmarks.soak ppo_procgen.py --minutes 120 --out benchmarks/results/soak_ppo --flags="--env-id bigfish"
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from annotated_types import Interval

from common import files, runs
from experiments import records, trials

WARM = 10  # minutes after each start that do not count as growth: it compiles and fills its buffers
ENDLESS = 2_000_000_000  # steps


@dataclass(frozen=True)
class Args:
    script: tyro.conf.Positional[str]
    """the script, such as ppo_procgen.py"""
    out: str
    """what to write: OUT.csv and OUT.png"""
    flags: str = ""
    """its flags, in quotes: --flags='--num-envs 8'"""
    minutes: Annotated[float, Interval(ge=0.1, le=10**6)] = 120
    """minutes of soaking, those before a stop included"""
    every: Annotated[float, Interval(ge=1, le=3600)] = 60
    """seconds between samples"""
    run_dir: str = "runs/soak"
    """where the run goes, in a folder named after OUT"""


# SAMPLES


def process_usage(pid: int) -> dict[str, float]:
    """Resident memory in MiB, threads and open files of a process; raises OSError if it is gone."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    if "VmRSS" not in status:  # a zombie
        raise ProcessLookupError(pid)
    return {
        "memory_mib": round(int(status["VmRSS"].split()[0]) / 1024, 1),
        "threads": int(status["Threads"]),
        "open_files": len(os.listdir(f"/proc/{pid}/fd")),
    }


def new_lines(run: Path | None, since: float) -> list[tuple[int, float]]:
    """(step, seconds since 1970) of the lines logged at `since` or later, within the last 256 KiB of metrics.jsonl."""
    metrics = run and run / "metrics.jsonl"
    if not (metrics and metrics.exists()):
        return []
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - 2**18))
        text = file.read().splitlines(keepends=True)
    logged = []
    for line in text:
        if line.startswith(b"{") and line.endswith(b"\n"):  # not what is cut at the front, or being written
            entry = json.loads(line)
            logged.append((entry["global_step"], entry["time"]))
    return [(step, moment) for step, moment in logged if moment >= since]


class Sampler:
    """Samples one process of a script. Minutes, starts and checkpoints continue from the last of `rows`."""

    def __init__(self, pid: int, folder: Path, rows: list[dict]):
        last = rows[-1] if rows else {"start": 0, "minutes": 0, "checkpoints": 0}
        self._pid, self._folder, self._start = pid, folder, int(last["start"]) + 1
        self._begin, self._minutes = time.monotonic(), float(last["minutes"])
        self._logged = time.time()
        self._seen, self._checkpoints = set(folder.glob("*/checkpoints/*")), int(last["checkpoints"])

    @property
    def minutes(self) -> float:
        return self._minutes + (time.monotonic() - self._begin) / 60

    def count_checkpoints(self) -> int:
        """Checkpoints written since the first start; call often: old ones are deleted."""
        now = {path for path in self._folder.glob("*/checkpoints/*") if path.name.isdigit()}
        self._checkpoints += len(now - self._seen)
        self._seen |= now
        return self._checkpoints

    def sample(self) -> dict:
        """A row; steps/s from the first to the last line logged since the row before, None if there was none."""
        lines = new_lines(trials.find_run(self._folder), self._logged)
        rate = None
        if len(lines) > 1 and lines[-1][1] > lines[0][1]:
            rate = round((lines[-1][0] - lines[0][0]) / (lines[-1][1] - lines[0][1]), 1)
        if lines:
            self._logged = lines[-1][1]
        row = {"minutes": round(self.minutes, 3), "start": self._start} | process_usage(self._pid)
        step = lines[-1][0] if lines else None
        return row | {"steps_per_second": rate, "global_step": step, "checkpoints": self.count_checkpoints()}


# THE REPORT


def growth(rows: list[dict]) -> dict[int, tuple[float, float, float]]:
    """By start: least-squares memory growth in MiB per hour, and the first and last minute fitted.

    The first minutes of each start do not count; a start with fewer than three samples after them is left out.
    """
    found = {}
    for start in sorted({int(row["start"]) for row in rows}):
        own = [(float(row["minutes"]), float(row["memory_mib"])) for row in rows if int(row["start"]) == start]
        before = max((float(row["minutes"]) for row in rows if int(row["start"]) < start), default=0.0)
        minutes, memory = np.array([(x, y) for x, y in own if x >= before + WARM]).reshape(-1, 2).T
        if len(minutes) >= 3:
            found[start] = 60 * np.polyfit(minutes - minutes[0], memory, 1)[0], minutes[0], minutes[-1]
    return found


def draw(path: Path, rows: list[dict], title: str) -> None:
    """A panel for each quantity over the minutes of soaking, with a vertical line where it was started again."""
    from experiments import plot

    columns = {"memory_mib": "resident memory, MiB", "threads": "threads", "open_files": "open files",
               "steps_per_second": "steps/s"}  # fmt: skip
    starts = np.array([int(row["start"]) for row in rows])
    minutes = np.array([float(row["minutes"]) for row in rows])
    again = [minutes[starts < start].max() for start in set(starts) if start > starts.min()]
    figure, axes = plot.plt.subplots(2, 2, figsize=(10, 6), sharex=True, layout="constrained")
    for axis, (column, label), color in zip(axes.flat, columns.items(), plot.COLORS, strict=False):
        values = np.array([float(row[column] or "nan") for row in rows])
        for start in sorted(set(starts)):  # a line per start
            own = starts == start
            axis.plot(minutes[own], values[own], ".-", color=color, markersize=3, linewidth=1)
        for minute in again:
            axis.axvline(minute, color="0.4", linestyle=(0, (5, 2)), linewidth=1)
        axis.set_title(label, loc="left")
        axis.set_xlim(0)
        if column != "memory_mib":  # its axis starts above 0, to show slow growth
            axis.set_ylim(0, 1.15 * np.nanmax([1, *values]))
    for start, (slope, first, last) in growth(rows).items():
        own = (starts == start) & (minutes >= first)
        middle = np.mean([float(row["memory_mib"]) for row, mine in zip(rows, own, strict=True) if mine])
        ends = middle + slope / 60 * (np.array([first, last]) - minutes[own].mean())
        axes[0, 0].plot([first, last], ends, color="k", linestyle=(0, (1, 1.3)), linewidth=2)
    for axis in axes[1]:
        axis.set_xlabel("minutes of soaking" + ("; dashed: started again" if again else ""))
    figure.suptitle("\n".join(textwrap.wrap(title, 140)), fontsize=9)
    with files.atomic_write(path) as temporary:
        figure.savefig(temporary, format="png")
    plot.plt.close(figure)


def report(args: Args, rows: list[dict]) -> None:
    """Draws the picture and says how fast memory grows."""
    last = rows[-1]
    draw(Path(f"{args.out}.png"), rows, f"{args.script} {args.flags} ({last['machine']}, commit {last['commit']})")
    found = growth(rows)
    for start, (slope, first, after) in found.items():
        print(f"start {start}, minute {first:.0f} to {after:.0f}: memory grows by {slope:+.1f} MiB an hour")
    if not found:
        print(f"growth of memory: three samples later than {WARM} minutes after a start are needed")
    print(f"{float(last['minutes']):.1f} of {args.minutes:g} minutes: {args.out}.csv, {args.out}.png")


# THE SCRIPT


def read_rows(path: Path) -> list[dict]:
    """The rows so far, without one that was cut short."""
    return [row for row in records.read_rows(path) if None not in row and None not in row.values()]


def start(args: Args, folder: Path, lock) -> subprocess.Popen:
    """Starts the script, or resumes the run in the folder if it has a checkpoint; output is appended to output.txt.

    If this process dies, the kernel sends the script SIGTERM. The script inherits `lock`, so the folder stays locked
    until it has ended."""
    run = trials.find_resumable(folder)
    words = ["--wandb-mode", "disabled", *records.split_flags(args.flags)]
    if "total_timesteps" in [field.name for field in fields(import_module(Path(args.script).stem).Args)]:
        words = ["--total-timesteps", str(ENDLESS), *words]
    words += ["--resume", str(run)] if run else ["--run-dir", str(folder)]
    prctl, set_death_signal = ctypes.CDLL(None).prctl, 1
    with (folder / "output.txt").open("a") as output:
        return subprocess.Popen(
            [sys.executable, args.script, *words], cwd=records.ROOT, stdout=output, stderr=output,
            stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=[lock.fileno()],
            preexec_fn=lambda: prctl(set_death_signal, signal.SIGTERM),
        )  # fmt: skip


def soak(args: Args, folder: Path, rows: list[dict], lock) -> str:
    """Samples the script until the minutes are full or a signal comes, and then asks it to end; adds to `rows`.

    Returns what went wrong with it; empty if nothing.
    """
    stopping = threading.Event()
    for number in runs.stop_signals():
        signal.signal(number, lambda *_: stopping.set())
    origin = {"script": args.script, "flags": args.flags} | trials.origin()
    process = start(args, folder, lock)
    sampler = Sampler(process.pid, folder, rows)
    due, row = time.monotonic() + args.every, None

    def add(row):
        rows.append(row | origin)
        records.append_rows(f"{args.out}.csv", rows[-1:])

    while process.poll() is None and not stopping.is_set() and sampler.minutes < args.minutes:
        left = 60 * (args.minutes - sampler.minutes)
        stopping.wait(max(0, min(1, due - time.monotonic(), left)))
        sampler.count_checkpoints()
        if time.monotonic() >= due:
            due += args.every
            try:
                sample = sampler.sample()
            except OSError:  # it has just ended
                continue
            add(sample)
    asked = process.poll() is None
    if asked:
        if time.monotonic() > due - args.every + 1:
            with contextlib.suppress(OSError):
                row = sampler.sample()  # the last, partial interval
        process.send_signal(signal.SIGTERM)
        print("waiting for the script's checkpoint", flush=True)
    code = process.wait()
    if row:
        add(row | {"checkpoints": sampler.count_checkpoints()})
    if (code == 0 and asked) or code == -signal.SIGTERM:  # the latter before its handler was installed
        return ""
    lines = [line for line in (folder / "output.txt").read_text().splitlines() if any(map(str.isalpha, line))]
    said = " ".join(lines[-1:]).removeprefix("error: ").strip("│ ")
    runs.check(code != 2, f"--flags {args.flags}: {said} (all it said is in {folder}/output.txt)")
    return f"{args.script} ended by itself with exit code {code}: {said} (all it said is in {folder}/output.txt)"


def main(args: Args) -> None:
    trials.check_flags("SCRIPT", args.script, {})
    records.parse_flags(import_module(Path(args.script).stem), args.flags)
    runs.check(Path("/proc/self/status").exists(), f"SCRIPT {args.script}: needs /proc, so Linux")
    files.make_room(Path(f"{args.out}.csv"), "--out")
    files.make_folder(Path(args.run_dir), "--run-dir")
    rows = read_rows(Path(f"{args.out}.csv"))
    there = [rows[0].get(name, "") for name in ("script", "flags")] if rows else [args.script, args.flags]
    of = " ".join(there).strip() or "another table"
    runs.check(there == [args.script, args.flags], f"--out {args.out}: is of {of}; give another")
    folder = Path(args.run_dir, Path(args.out).name).absolute()
    lock = files.lock_run(folder)
    runs.check(lock is not None, f"--out {args.out}: {files.holder(folder)} is writing in {folder}")
    run = None if rows else trials.find_resumable(folder)
    runs.check(run is None, f"--out {args.out}: has no rows of {run}; move that away, or give another")
    wrong = "" if rows and float(rows[-1]["minutes"]) >= args.minutes else soak(args, folder, rows, lock)
    if rows:
        report(args, rows)
    if wrong:
        sys.exit(f"error: {wrong}")


if __name__ == "__main__":
    runs.cli(Args, main)
