"""Doors opened in each task after each task learnt, ours beside the published: heat maps. Try:

    python -m experiments.matrices runs/DoorGym__hnppo_doorgym* --out experiments/results/doorgym_matrices

Runs of the same method are averaged, over the tasks that each of them has learnt so far; they may differ in their seed
only, by the flags of a run's last resume. Published: means of three seeds (Schoepf et al. 2022).
"""

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tyro

import hnppo_doorgym
from common import continual, doors, files, runs
from common.files import check
from common.flags import flag_of
from experiments import plot, trials
from experiments.plot import plt

REFERENCE = Path(__file__).parent / "reference" / "doorgym_matrices.csv"
# Flags in which runs of one method may differ; tasks are compared by their names.
FREE = trials.BESIDE | {"seed", "num_devices", "tasks"}


@dataclass(frozen=True)
class Args:
    run_dirs: tyro.conf.Positional[tuple[str, ...]]
    """run directories of hnppo_doorgym.py, of the same tasks"""
    out: str = "matrices"
    """where to write: OUT.csv, with the metrics of each run, and OUT.png"""


def name_of(args: hnppo_doorgym.Args) -> str:
    """The method of a run, as the reference calls it if it is with hooks and hard doors, as there."""
    names = {"ppo": "PPO for each task", "finetune": "fine-tuning"}
    critic = "" if args.critic == "hyper" else ", fresh critic"
    method = names.get(args.method, "HN-PPO" + critic + (", beta 0" if args.beta == 0 else ""))
    return method + ", gripper" * (args.robot == "gripper") + ", easy" * (args.hardness == "easy")


def args_of(run: plot.Logged) -> hnppo_doorgym.Args:
    """A run's arguments. Raises UsageError if it is older than a flag that decides what is learnt: its default then may
    not be today's."""
    args = runs.saved_args(hnppo_doorgym.Args, run.path, "RUN_DIRS", hnppo_doorgym.SCRIPT)
    unknown = [flag_of(f.name) for f in fields(args) if f.name not in FREE | run.args.keys()]
    check(not unknown, f"RUN_DIRS {run.path}: is of a version without {', '.join(unknown)}, leave it out")
    return args


def read_rates(path: Path, tasks: tuple[str, ...], method: str | None = None) -> np.ndarray:
    """Success rates [M, N] on N tasks after the first M, NaN where not measured; of a method, if the file has several.

    Raises UsageError if that is not what is in the file.
    """
    rows = files.read(path, list[dict[str, str]], "RUN_DIRS", "leave it out")
    texts = [[row.get(task, "?") for task in tasks] for row in rows if row.get("method") == method]
    good = 0 < len(texts) <= len(tasks) and all(
        re.fullmatch(r"(0?\.\d+|[01](\.0*)?)?", x) for row in texts for x in row
    )
    check(good, f"RUN_DIRS {path}: is no table of success rates on {', '.join(tasks)} (or not yet), leave it out")
    return np.array([[float(x or "nan") for x in row] for row in texts])


def published(tasks: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The study's success rates [N, N] by method, if these are its tasks."""
    rows = files.read(REFERENCE, list[dict[str, str]], "RUN_DIRS", "check it out again")
    methods = dict.fromkeys(row["method"] for row in rows) if tasks == tuple(rows[0])[2:] else ()
    return {method: read_rates(REFERENCE, tasks, method) for method in methods}


class Method(NamedTuple):
    """Runs of one method."""

    seeds: list[int]
    steps: list[int]  # decisions of each so far
    matrices: list[np.ndarray]  # [M, N] of each


def read_ours(run_dirs: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, Method]]:
    """Tasks, and their runs by method. Raises UsageError for one that has learnt no task or does not fit the others."""
    ours, first, tasks = {}, {}, ()
    for run in plot.read_runs(run_dirs):
        args = args_of(run)
        path, own, name = Path(run.path) / "matrix.csv", doors.task_names(args), name_of(args)
        check(path.exists(), f"RUN_DIRS {run.path}: has no matrix.csv yet, leave it out")
        tasks = tasks or own
        check(own == tasks, f"RUN_DIRS {run.path}: is of {', '.join(own)}, another of {', '.join(tasks)}")
        known = first.setdefault(name, args)
        free = FREE if args.method == "hnppo" else FREE | set(hnppo_doorgym.HYPERNET_FLAGS)
        other = [f.name for f in fields(args) if getattr(args, f.name) != getattr(known, f.name) and f.name not in free]
        check(not other, f"RUN_DIRS {run.path}: differs from another run of {name} in {', '.join(map(flag_of, other))}")
        method = ours.setdefault(name, Method([], [], []))
        check(args.seed not in method.seeds, f"RUN_DIRS {run.path}: {name} with seed {args.seed} is given twice")
        method.seeds.append(args.seed)
        ends = [line for line in run.lines if "eval/ACC" in line] or run.lines
        method.steps.append(ends[-1]["global_step"])  # where its last task ended: the matrix is of then
        method.matrices.append(read_rates(path, tasks))
    return tasks, ours


def draw(tasks: tuple[str, ...], ours: dict[str, Method], theirs: dict[str, np.ndarray]) -> plt.Figure:
    """A row for each method: the study's, if there is one, and ours."""
    shape = len(ours), 1 if theirs.keys().isdisjoint(ours) else 2
    size = 4.5 * shape[1], 3.2 * shape[0]
    figure, axes = plt.subplots(*shape, figsize=size, dpi=120, layout="constrained", squeeze=False)
    for (name, method), row in zip(ours.items(), axes, strict=True):
        left, right = row[0], row[-1]
        done = min(map(len, method.matrices))
        mean = np.mean([matrix[:done] for matrix in method.matrices], axis=0)
        panels = [(left, theirs[name], "published, 3 seeds")] if name in theirs else []
        panels += [(right, mean, f"ours, seed{'s' * (len(method.seeds) > 1)} {', '.join(map(str, method.seeds))}")]
        left.set_axis_off()
        for axis, matrix, whose in panels:
            axis.set_axis_on()
            axis.grid(visible=False)
            axis.set_title(f"{name}: {whose}", fontsize=9)
            continual.heat_map(axis, matrix, fontsize=8)
            axis.set_aspect("auto")
            axis.set_ylim(len(tasks) - 0.5, -0.5)  # also of runs that go on
            axis.set_yticks(range(len(tasks)), tasks if axis is panels[0][0] else [""] * len(tasks), fontsize=7)
            axis.set_xticks(range(len(tasks)), tasks, rotation=35, ha="right", fontsize=7)
    figure.supxlabel("doors opened in task", fontsize=9)
    figure.supylabel("after learning", fontsize=9)
    return figure


def row_of(name: str, whose: str, seed: int | str, step: int | str, matrix: np.ndarray, tasks: tuple[str, ...]) -> dict:
    """What a matrix [M, N] says: the metrics of the tasks learnt, and how many doors of each were opened then."""
    row = {"method": name, "whose": whose, "seed": seed, "step": step, "tasks_learnt": len(matrix)}
    row |= {metric: round(value, 4) for metric, value in continual.metrics(matrix[:, : len(matrix)]).items()}
    return row | {task: round(float(x), 4) for task, x in zip(tasks, np.diag(matrix), strict=False)}


def main(args: Args) -> list[dict]:
    plot.check_out(args.out)
    tasks, ours = read_ours(args.run_dirs)
    theirs, rows = published(tasks), []
    for name, method in ours.items():
        if name in theirs:
            done = min(map(len, method.matrices))
            rows.append(row_of(name, "published", "", "", theirs[name][:done], tasks))
        for seed, step, matrix in zip(*method, strict=True):
            rows.append(row_of(name, "ours", seed, step, matrix, tasks))
    columns = dict.fromkeys(column for row in rows for column in row)
    plot.write_table(args.out, ".csv", columns, rows)
    plot.write_whole(args.out, ".png", lambda path: draw(tasks, ours, theirs).savefig(path, format="png"))
    return rows


if __name__ == "__main__":
    runs.cli(Args, main)
