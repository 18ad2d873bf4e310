"""What it takes to learn one task of doors: a row for each run of `hnppo_doorgym.py`. Try:

python hnppo_doorgym.py --method ppo --task 2 --stop-at-success 2 --task-timesteps 2000000
python -m experiments.remedies runs/DoorGym__hnppo_doorgym* --out experiments/results/levers
"""

from dataclasses import MISSING, dataclass, fields

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import hnppo_doorgym
from common import runs
from common.runs import check, flag_of
from experiments import plot

# Flags of one run that say nothing about how it learnt.
NOT_METHODS = {"seed", "method", "tasks", "task_timesteps", "stop_at_success", "num_threads", "eval_every", "run_dir"}
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
    """A run's row: what differs from the defaults, its best evaluation, and what its last updates' episodes did."""
    defaults = {f.name: f.default for f in fields(hnppo_doorgym.Args) if f.default is not MISSING}
    changed = {name: value for name, value in run.args.items() if name in defaults and value != defaults[name]}
    flags = " ".join(f"{flag_of(n)} {v}" for n, v in changed.items() if not (n in NOT_METHODS or "wandb" in n))
    evaluations = [line for line in run.lines if "eval/success_rate" in line]
    updates = [line for line in run.lines if "charts/freed_rate" in line]
    check(bool(evaluations and updates), f"RUN_DIRS {run.path}: has no evaluation yet, leave it out")
    reached = [line["global_step"] for line in evaluations if line["eval/success_rate"] >= half]
    last = {name: np.mean([line[f"charts/{name}"] for line in updates[-LAST:]])
            for name in ("success_rate", "freed_rate", "max_knob_angle")}  # fmt: skip
    return {
        "task": run.args["tasks"], "method": run.args["method"], "flags": flags, "seed": run.args["seed"],
        "decisions": run.lines[-1]["global_step"],
        "best_evaluation": round(max(line["eval/success_rate"] for line in evaluations), 3),
        f"decisions_to_{half:g}": reached[0] if reached else "",
        **{f"training_{name}": round(float(value), 3) for name, value in last.items()},
        "action_std": round(updates[-1]["losses/action_std"], 3),
    }  # fmt: skip


def main(args: Args) -> list[dict]:
    check(0 < args.half <= 1, f"--half {args.half}: must be above 0, at most 1")
    plot.check_out(args.out)
    found = [plot.read_run(path) for path in args.run_dirs]
    for run in found:
        check(run.args.get("tasks", "").count(",") == 0, f"RUN_DIRS {run.path}: is of several tasks, give runs of one")
    rows = [summarize(run, args.half) for run in found]
    rows.sort(key=lambda row: (row["task"], row["method"], row["flags"], row["seed"]))
    table = Table()
    for column in rows[0]:
        table.add_column(column.replace("_", "\n"))
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    plot.write_table(args.out, ".csv", rows[0], rows)
    return rows


if __name__ == "__main__":
    runs.cli(Args, main)
