"""What it takes to learn one task of doors: a row for each run of `hnppo_doorgym.py`. Try:

    python hnppo_doorgym.py --method ppo --task 2 --stop-at-success 2 --task-timesteps 3000000
    python -m experiments.remedies runs/DoorGym__hnppo_doorgym* --out experiments/results/levers

A resumed run is shown with the flags of its last resume: leave out one whose flags have changed.
"""

from dataclasses import dataclass, fields

import numpy as np
import tyro

from common import doors, runs
from common.files import check
from common.flags import as_given
from experiments import matrices, plot, trials

# Flags that are not told: of no account to what is learnt until then, or with a column of their own.
NOT_METHODS = trials.BESIDE | {"seed", "method", "tasks", "task_timesteps", "stop_at_success", "eval_every"}
LAST = 10  # updates whose mean is shown


@dataclass(frozen=True)
class Args:
    run_dirs: tyro.conf.Positional[tuple[str, ...]]
    """run directories of one task each"""
    out: str = "remedies"
    """where to write: OUT.csv"""
    half: float = 0.5
    """success rate of an evaluation whose decisions are counted"""


def summarize(run: plot.Logged, half: float) -> dict:
    """A run's row: what differs from the defaults, its best evaluation, and what its last updates' episodes did.

    Raises UsageError if it is of another script or version, of several tasks, or was not evaluated yet.
    """
    args = matrices.args_of(run)
    tasks = doors.task_names(args)
    check(len(tasks) == 1, f"RUN_DIRS {run.path}: is of {len(tasks)} tasks, give runs of one")
    told = {field.name: field.default for field in fields(args) if field.name not in NOT_METHODS}
    flags = [as_given(name, getattr(args, name)) for name in told if getattr(args, name) != told[name]]
    evaluations = [line for line in run.lines if "eval/success_rate" in line]
    updates = [line for line in run.lines if {"charts/freed_rate", "losses/action_std"} <= line.keys()]
    check(len(evaluations) > 0, f"RUN_DIRS {run.path}: has no evaluation yet, leave it out")
    check(len(updates) > 0, f"RUN_DIRS {run.path}: has not logged what became of the latch, leave it out")
    reached = [line["global_step"] for line in evaluations if line["eval/success_rate"] >= half]
    last = {name: np.mean([line[f"charts/{name}"] for line in updates[-LAST:]])
            for name in ("success_rate", "freed_rate", "max_knob_angle")}  # fmt: skip
    return {
        "task": tasks[0], "method": args.method, "flags": " ".join(flags), "seed": args.seed,
        "decisions": run.lines[-1]["global_step"],
        "best_evaluation": round(max(line["eval/success_rate"] for line in evaluations), 3),
        f"decisions_to_{half:g}": reached[0] if reached else "",
        **{f"training_{name}": round(float(value), 3) for name, value in last.items()},
        "action_std": round(updates[-1]["losses/action_std"], 3),
    }  # fmt: skip


def main(args: Args) -> list[dict]:
    check(0 < args.half <= 1, f"--half {args.half}: must be above 0, at most 1")
    plot.check_out(args.out)
    rows = [summarize(run, args.half) for run in plot.read_runs(args.run_dirs)]
    rows.sort(key=lambda row: (row["task"], row["method"], row["flags"], row["seed"]))
    for row in rows:
        print(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in row.items() if value != ""))
    plot.write_table(args.out, ".csv", rows[0], rows)
    return rows


if __name__ == "__main__":
    runs.cli(Args, main)
