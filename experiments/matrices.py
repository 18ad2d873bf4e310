"""Doors opened in each task after each task learnt, ours beside the published: heat maps. Try:

    python -m experiments.matrices runs/tables/hnppo_doorgym*/*/DoorGym* --out experiments/results/doorgym_matrices

Runs of the same method are averaged; of a run that goes on, the tasks that it has learnt are shown. Published: means of
three seeds (Schoepf et al. 2022).
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
import tyro

from common import continual, runs
from common.runs import check
from experiments import plot

mpl.use("Agg")
import matplotlib.pyplot as plt

REFERENCE = Path(__file__).parent / "reference" / "doorgym_matrices.csv"


@dataclass(frozen=True)
class Args:
    run_dirs: tyro.conf.Positional[tuple[str, ...]]
    """run directories of hnppo_doorgym.py, of the same tasks"""
    out: str = "matrices"
    """where to write: OUT.csv, with the metrics of each method, and OUT.png"""


def name_of(args: dict) -> str:
    """The method of a run, as the reference calls it."""
    names = {"ppo": "PPO for each task", "finetune": "fine-tuning"}
    critic = "" if args["critic"] == "hyper" else ", fresh critic"
    return names.get(args["method"], "HN-PPO" + critic + (", beta 0" if args["beta"] == 0 else ""))


def read_matrix(rows: list[dict]) -> tuple[tuple[str, ...], np.ndarray]:
    """Tasks, and success rates [M, N] after the first M of them, from the rows of a table."""
    tasks = tuple(name for name in rows[0] if name not in ("method", "after"))
    return tasks, np.array([[float(row[task] or "nan") for task in tasks] for row in rows])


def published() -> dict[str, tuple[tuple[str, ...], np.ndarray]]:
    """The study's, by method."""
    with REFERENCE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    methods = dict.fromkeys(row["method"] for row in rows)
    return {method: read_matrix([row for row in rows if row["method"] == method]) for method in methods}


def read_ours(run_dirs: tuple[str, ...]) -> dict[str, tuple[tuple[str, ...], list[np.ndarray]]]:
    """Tasks, and each run's matrix, by method. Raises UsageError for a run that has learnt no task, or other tasks."""
    ours = {}
    for run in plot.read_runs(run_dirs):
        path = Path(run.path) / "matrix.csv"
        check(path.exists(), f"RUN_DIRS {run.path}: has no matrix.csv yet, leave it out")
        with path.open(newline="") as file:
            tasks, matrix = read_matrix(list(csv.DictReader(file)))
        known = next((tasks for tasks, _ in ours.values()), tasks)
        check(tasks == known, f"RUN_DIRS {run.path}: is of {', '.join(tasks)}, another of {', '.join(known)}")
        ours.setdefault(name_of(run.args), (tasks, []))[1].append(matrix)
    return ours


def draw(ours: dict, theirs: dict[str, np.ndarray]) -> plt.Figure:
    """A row for each method: the study's, if there is one, and ours."""
    figure, axes = plt.subplots(
        len(ours), 2, figsize=(9, 3.2 * len(ours)), dpi=120, layout="constrained", squeeze=False
    )
    for i, (name, (tasks, matrices)) in enumerate(ours.items()):
        done = min(map(len, matrices))
        mean = np.mean([matrix[:done] for matrix in matrices], axis=0)
        panels = [(theirs.get(name), f"{name}: published, 3 seeds")]
        panels += [(mean, f"{name}: ours, {len(matrices)} seed{'s' * (len(matrices) > 1)}")]
        for axis, (matrix, title) in zip(axes[i], panels, strict=True):
            axis.set_title(title, fontsize=9)
            axis.set_axis_off()
            if matrix is not None:
                axis.set_axis_on()
                axis.grid(visible=False)
                axis.set_ylim(len(tasks) - 0.5, -0.5)  # also of a run that goes on
                axis.imshow(matrix, vmin=0, vmax=1, cmap="cividis", aspect="auto")
                for (row, column), value in np.ndenumerate(matrix):
                    color = "k" if value > 0.5 else "w"
                    axis.text(column, row, continual.cell(value, 2), ha="center", va="center", color=color, fontsize=8)
                axis.set_xticks(
                    range(len(tasks)), tasks if i == len(ours) - 1 else [], rotation=35, ha="right", fontsize=7
                )
                axis.set_yticks(range(len(matrix)), tasks[: len(matrix)] if matrix is not mean else [], fontsize=7)
    figure.supxlabel("doors opened in task", fontsize=9)
    figure.supylabel("after learning", fontsize=9)
    return figure


def main(args: Args) -> list[dict]:
    plot.check_out(args.out)
    check(len(args.run_dirs) > 0, "RUN_DIRS: give at least one run directory")
    ours, rows = read_ours(args.run_dirs), []
    tasks = next(iter(ours.values()))[0]
    theirs = {name: matrix for name, (names, matrix) in published().items() if names == tasks}
    for name, (_, matrices) in ours.items():
        for whose, some in (("published", [theirs[name]] if name in theirs else []), ("ours", matrices)):
            for seed, matrix in enumerate(some):
                summary = continual.metrics(matrix[:, : len(matrix)])
                row = {"method": name, "whose": whose, "run": seed, "tasks_learnt": len(matrix)}
                row |= {metric: round(value, 4) for metric, value in summary.items()}
                row |= {task: round(float(x), 4) for task, x in zip(tasks, np.diag(matrix), strict=False)}
                rows.append(row)
    columns = dict.fromkeys(column for row in rows for column in row)
    plot.write_table(args.out, ".csv", columns, rows)
    plot.write_whole(args.out, ".png", lambda path: draw(ours, theirs).savefig(path, format="png"))
    return rows


if __name__ == "__main__":
    runs.cli(Args, main)
