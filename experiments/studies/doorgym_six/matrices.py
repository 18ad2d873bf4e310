"""Draws success rates in each door task after each task learnt, ours beside those of HN-PPO (Schoepf et al. 2022).

    python -m experiments.studies.doorgym_six.matrices runs/DoorGym__hnppo_doorgym* --out matrices

Averages runs of one method (which should differ in their seed only) over the tasks that all of them have learnt.
"""

from dataclasses import dataclass, fields
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import tyro

import hnppo_doorgym
from common import continual, doors, runs
from common.files import check
from common.flags import flag_of
from experiments import plot, records, trials

PUBLISHED = Path(__file__).with_name("published.csv")  # means of three seeds
FREE = trials.NEUTRAL_FLAGS | {"seed", "num_devices", "tasks"}


@dataclass(frozen=True)
class Args:
    run_dirs: tyro.conf.Positional[tuple[str, ...]]
    """run directories of hnppo_doorgym.py, of the same tasks"""
    out: str = "matrices"
    """writes OUT.csv, with the metrics of each run, and OUT.png"""


def name_of(args: hnppo_doorgym.Args) -> str:
    """A run's method, as published.csv calls it."""
    names = {"ppo": "PPO for each task", "finetune": "fine-tuning"}
    critic = "" if args.critic == "hyper" else ", fresh critic"
    method = names.get(args.method, "HN-PPO" + critic + (", beta 0" if args.beta == 0 else ""))
    return method + ", gripper" * (args.robot == "gripper") + ", easy" * (args.hardness == "easy")


def args_of(run: plot.Logged) -> hnppo_doorgym.Args:
    """A run's arguments. Raises UsageError if it lacks a newer flag, whose default then may not be today's."""
    args = runs.saved_args(hnppo_doorgym.Args, run.path, "RUN_DIRS", hnppo_doorgym.SCRIPT)
    unknown = [flag_of(f.name) for f in fields(args) if f.name not in FREE | run.args.keys()]
    check(not unknown, f"RUN_DIRS {run.path}: is of a version without {', '.join(unknown)}, leave it out")
    return args


def read_rates(path: Path, tasks: tuple[str, ...], method: str | None = None) -> np.ndarray:
    """Success rates [M, N] on N tasks after the first M, NaN where not measured."""
    rows = [row for row in records.read_rows(path) if row.get("method") == method]
    return np.array([[float(row[task] or "nan") for task in tasks] for row in rows])


def published(tasks: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The published success rates [N, N] by method, if these are its tasks."""
    rows = records.read_rows(PUBLISHED)
    methods = dict.fromkeys(row["method"] for row in rows) if tasks == tuple(rows[0])[2:] else ()
    return {method: read_rates(PUBLISHED, tasks, method) for method in methods}


def draw(tasks: tuple[str, ...], ours: dict, theirs: dict[str, np.ndarray]) -> plt.Figure:
    """A row for each method: published, if there is one, and ours."""
    shape = len(ours), 1 if theirs.keys().isdisjoint(ours) else 2
    size = 4.5 * shape[1], 3.2 * shape[0]
    figure, axes = plt.subplots(*shape, figsize=size, dpi=120, layout="constrained", squeeze=False)
    for (name, found), row in zip(ours.items(), axes, strict=True):
        done = min(len(matrix) for *_, matrix in found)
        mean = np.mean([matrix[:done] for *_, matrix in found], axis=0)
        seeds = ", ".join(str(seed) for seed, *_ in found)
        panels = [(row[0], theirs[name], "published, 3 seeds")] if name in theirs else []
        panels += [(row[-1], mean, f"ours, seed{'s' * (len(found) > 1)} {seeds}")]
        row[0].set_axis_off()
        for axis, matrix, whose in panels:
            axis.set_axis_on()
            axis.grid(visible=False)
            axis.set_title(f"{name}: {whose}", fontsize=9)
            continual.heat_map(axis, matrix, fontsize=8)
            axis.set(aspect="auto", ylim=(len(tasks) - 0.5, -0.5))  # also of unfinished runs
            axis.set_yticks(range(len(tasks)), tasks if axis is panels[0][0] else [""] * len(tasks), fontsize=7)
            axis.set_xticks(range(len(tasks)), tasks, rotation=35, ha="right", fontsize=7)
    figure.supxlabel("doors opened in task", fontsize=9)
    figure.supylabel("after learning", fontsize=9)
    return figure


def row_of(name: str, whose: str, seed: int | str, step: int | str, matrix: np.ndarray, tasks: tuple[str, ...]) -> dict:
    """The metrics of a matrix [M, N] over the tasks learnt, and the success in each right after learning it."""
    row = {"method": name, "whose": whose, "seed": seed, "step": step, "tasks_learnt": len(matrix)}
    row |= {metric: round(value, 4) for metric, value in continual.metrics(matrix[:, : len(matrix)]).items()}
    return row | {task: round(float(x), 4) for task, x in zip(tasks, np.diag(matrix), strict=False)}


def main(args: Args) -> None:
    ours, tasks = {}, ()
    for run in plot.read_runs(args.run_dirs):
        of = args_of(run)
        check(tasks in ((), doors.task_names(of)), f"RUN_DIRS {run.path}: is of {', '.join(doors.task_names(of))}")
        tasks = doors.task_names(of)
        ends = [line for line in run.lines if "eval/ACC" in line] or run.lines
        found = of.seed, ends[-1]["global_step"], read_rates(Path(run.path, "matrix.csv"), tasks)
        check(len(found[2]) > 0, f"RUN_DIRS {run.path}: has no matrix.csv yet, leave it out")
        ours.setdefault(name_of(of), []).append(found)
    theirs, rows = published(tasks), []
    for name, found in ours.items():
        if name in theirs:
            done = min(len(matrix) for *_, matrix in found)
            rows.append(row_of(name, "published", "", "", theirs[name][:done], tasks))
        rows += [row_of(name, "ours", *each, tasks) for each in found]
    columns = dict.fromkeys(column for row in rows for column in row)
    plot.write_table(args.out, ".csv", columns, rows)
    plot.write_output(args.out, ".png", lambda path: draw(tasks, ours, theirs).savefig(path, format="png"))


if __name__ == "__main__":
    runs.cli(Args, main)
