"""What does it take to learn one door task? A row for each run of hnppo_doorgym.py on a single task.

python hnppo_doorgym.py --method ppo --task 2 --stop-at-success 2 --task-timesteps 3000000
python -m experiments.studies.doorgym_six.remedies runs/DoorGym__hnppo_doorgym* --out levers
"""

from dataclasses import dataclass, fields

import numpy as np
import tyro

from common import doors, runs
from common.flags import as_given
from experiments import plot, trials
from experiments.studies.doorgym_six.matrices import args_of

# Flags that are not listed: irrelevant to what is learnt, or with a column of their own.
OTHER = trials.NEUTRAL_FLAGS | {"seed", "method", "tasks", "task_timesteps", "stop_at_success", "eval_every"}
LAST = 10  # updates that are averaged


@dataclass(frozen=True)
class Args:
    run_dirs: tyro.conf.Positional[tuple[str, ...]]
    """run directories, each of one task, with an evaluation"""
    out: str = "remedies"
    """writes OUT.csv"""


def summarize(run: plot.Logged) -> dict:
    """A run's changed flags, its best evaluation, and the mean of its last updates' episodes."""
    args = args_of(run)
    (task,) = doors.task_names(args)
    defaults = {field.name: field.default for field in fields(args) if field.name not in OTHER}
    flags = [as_given(name, getattr(args, name)) for name in defaults if getattr(args, name) != defaults[name]]
    evaluations = [line for line in run.lines if "eval/success_rate" in line]
    updates = [line for line in run.lines if {"charts/freed_rate", "losses/action_std"} <= line.keys()]
    reached = [line["global_step"] for line in evaluations if line["eval/success_rate"] >= 0.5]
    names = "success_rate", "freed_rate", "max_knob_angle"
    last = {name: np.mean([line[f"charts/{name}"] for line in updates[-LAST:]]) for name in names}
    return {
        "task": task, "method": args.method, "flags": " ".join(flags), "seed": args.seed,
        "decisions": run.lines[-1]["global_step"],
        "best_evaluation": round(max(line["eval/success_rate"] for line in evaluations), 3),
        "decisions_to_0.5": reached[0] if reached else "",
        **{f"training_{name}": round(float(value), 3) for name, value in last.items()},
        "action_std": round(updates[-1]["losses/action_std"], 3),
    }  # fmt: skip


def main(args: Args) -> None:
    rows = [summarize(run) for run in plot.read_runs(args.run_dirs)]
    rows.sort(key=lambda row: (row["task"], row["method"], row["flags"], row["seed"]))
    plot.write_table(args.out, ".csv", rows[0], rows)


if __name__ == "__main__":
    runs.cli(Args, main)
