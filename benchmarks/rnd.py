"""RND on Montezuma's Revenge, with and without --async, in turns: steps per second beside the emulator's own rate.

Runs the script itself, as a user does, and reads its metrics; prints a table and appends its rows to a CSV file. The
flags in quotes are those of rnd_montezuma.py:

    python -m benchmarks.rnd paper
    python -m benchmarks.rnd small --flags="--channels 4,4,4 --hidden 16 --update-epochs 1"
"""

import shlex
import tempfile
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import tyro
from annotated_types import Interval

import rnd_montezuma as rnd
from benchmarks import records, throughput
from common import atari, runs
from common.flags import PositiveInt

MODES = {"synchronous": "", "--async": "--async", "--async --vtrace": "--async --vtrace"}


@dataclass(frozen=True)
class Args:
    name: tyro.conf.Positional[str]
    """what to call this setting in the table"""
    flags: str = ""
    """flags of rnd_montezuma.py, in one string, after a ="""
    updates: PositiveInt = 5
    """timed iterations in a round, after two that compile"""
    rounds: Annotated[int, Interval(ge=1, le=100)] = 3
    """how often each mode and the emulator alone run, in turns; the table has the medians"""
    csv: str = "benchmarks/results/rnd.csv"
    """file that rows are appended to; empty for none"""


def measure(flags: str, updates: int) -> dict[str, float]:
    """One run of the script, from its third line of metrics on."""
    args = records.read_flags(rnd, flags)
    with tempfile.TemporaryDirectory() as folder:
        fixed = f"--total-timesteps {args.num_envs * args.num_steps * (updates + 2)} --obs-norm-init-steps 1"
        fixed += f" --wandb-mode disabled --run-dir {shlex.quote(folder)}"
        run = rnd.main(records.read_flags(rnd, f"{flags} {fixed}"))
        lines = records.lines_of(run)
    timed = lines[2 : 2 + updates]

    def percent(part):
        return 100 * float(np.mean([line[f"time/{part}"] for line in timed]))

    return {
        "steps/s": (timed[-1]["global_step"] - lines[1]["global_step"]) / (timed[-1]["time"] - lines[1]["time"]),
        "learner busy %": percent("update") + percent("transfer"),
        "learner waits %": percent("waiting"),
        "actor's game %": percent("actor_game"),
        "actor's inference %": percent("actor_inference"),
        "actor waits %": percent("actor_blocked"),
    }


def main(args: Args) -> None:
    records.make_room(args.csv, "--csv")
    results = {name: [] for name in MODES}
    alone, given = [], records.read_flags(rnd, args.flags)
    runs.check(
        not given.async_ and not given.vtrace, "--flags: leave out --async and --vtrace, of which all is measured"
    )
    for i in range(args.rounds):
        alone.append(throughput.game_rate(given, atari.make_montezuma, atari.NUM_ACTIONS, 200))
        for name in MODES if i % 2 == 0 else reversed(MODES):
            row = measure(f"{args.flags} {MODES[name]}", args.updates)
            row["of the emulator's rate %"] = 100 * row["steps/s"] / alone[-1]
            results[name].append(row)
    for name in MODES:
        for row, base in zip(results[name], results["synchronous"], strict=True):
            row["times synchronous"] = row["steps/s"] / base["steps/s"]
    rows = []
    for name in MODES:
        row = {"setting": args.name, "mode": name}
        row |= {key: f"{np.median([x[key] for x in results[name]]):.4g}" for key in results[name][0]}
        row |= {"emulator alone steps/s": f"{np.median(alone):.4g}", "rounds": args.rounds, "flags": args.flags}
        rows.append(row | records.origin())
    records.show(rows, MODES)
    records.append_rows(args.csv, rows)


if __name__ == "__main__":
    runs.cli(Args, main)
