"""How well do agents trained on few levels play others? Draws each run's last evaluation over --num-levels.

    python -m experiments.studies.levels.draw RUN_DIRS --group-by encoder --out levels

Runs with unlimited levels (0) are drawn at the right end, as "all": they have one evaluation, shown as test levels.
"""

from dataclasses import dataclass

import numpy as np
import tyro

from common import runs
from experiments import plot

SPLITS = "train", "test"


@dataclass(frozen=True)
class Args:
    run_dirs: tyro.conf.Positional[tuple[str, ...]]
    """run directories of one Procgen game, of different --num-levels, each with an evaluation"""
    group_by: tuple[str, ...] = ("script",)
    """flags that tell lines apart"""
    out: str = "levels"
    """writes OUT.csv and OUT.png"""


def last_evaluation(run: plot.Logged, split: str) -> dict[str, float]:
    """The last mean_return, min, max and std of a run on one split, and the step."""
    name = f"eval/{split}_levels/"
    lines = [line for line in run.lines if f"{name}mean_return" in line]
    runs.check(bool(lines), f"RUN_DIRS {run.path}: has no evaluation on {split} levels, leave it out")
    last = lines[-1]
    return {key: last[name + key] for key in ("mean_return", "min", "max", "std")} | {"steps": last["global_step"]}


def summarize(group: list[plot.Logged]) -> list[dict]:
    """A row for each number of levels and split: the mean over runs of one group with its 95 % bootstrap interval, the
    extremes of all episodes, the mean variance, and the gap between training and test levels."""
    rows = []
    for levels in sorted({plot.value_of(run, "num_levels") for run in group}, key=lambda n: n or np.inf):
        same = [run for run in group if plot.value_of(run, "num_levels") == levels]
        means = {}
        for split in SPLITS if levels else SPLITS[1:]:
            found = [last_evaluation(run, split) for run in same]
            columns = {key: np.array([one[key] for one in found]) for key in found[0]}
            mean, low, high = plot.bootstrap_mean(columns["mean_return"])
            means[split] = mean
            row = {"num_levels": levels, "split": split, "steps": int(columns["steps"].min()), "runs": len(same)}
            row |= {"mean": mean, "low": low, "high": high, "min": columns["min"].min(), "max": columns["max"].max()}
            rows.append(row | {"variance": (columns["std"] ** 2).mean()})
        for row in rows[-2:] if len(means) == 2 else ():
            row["gap"] = means["train"] - means["test"]
    return rows


def draw(groups: dict[str, list[dict]], title: str) -> plot.plt.Figure:
    """Returns above, variances below; training levels on the left, test levels on the right."""
    levels = sorted({row["num_levels"] for rows in groups.values() for row in rows}, key=lambda n: n or np.inf)
    at = {n: n or 10 * max(1, *levels) for n in levels}  # "all" is a decade further to the right
    figure, axes = plot.plt.subplots(2, 2, figsize=(12, 8), sharex=True, sharey="row", layout="constrained")
    for i, (name, rows) in enumerate(groups.items()):
        style = plot.style_of(i) | {"ms": 7}
        for (top, bottom), split in zip(axes.T, SPLITS, strict=True):
            shown = [row for row in rows if row["split"] == split]
            if not shown:  # a group that trains on all levels alone
                continue
            x = [at[row["num_levels"]] for row in shown]
            names = "mean", "low", "high", "min", "max", "variance"
            mean, low, high, least, most, variance = np.array([[row[k] for k in names] for row in shown]).T
            edges = {"ls": style["ls"], "lw": 1, "marker": "_", "ms": 9}
            plot.draw_band(top, x, least, most, color=style["color"], alpha=0.06, **edges)
            sides = np.maximum((mean - low, high - mean), 0)
            top.errorbar(x, mean, sides, **style, capsize=4, label=f"{name}, {rows[0]['steps']:,.0f} steps", zorder=3)
            bottom.plot(x, variance, **style)
    for axis, split in zip(axes[0], ("training", "test"), strict=True):
        axis.set(title=f"{split} levels", xscale="log")
    axes[0, 0].fill_between([], [], [], color="0.5", alpha=0.2, label="least to greatest return of an episode")
    axes[0, 0].set_ylabel("return")
    axes[1, 0].set_ylabel("variance of an episode's return")
    for axis in axes[1]:
        axis.set(xlabel="number of training levels", ylim=(0, None))
        axis.set_xticks(list(at.values()), [str(n) if n else "all" for n in levels])
        axis.minorticks_off()
    figure.suptitle(title)
    return figure


def main(args: Args) -> None:
    everything = plot.drop_repeats(plot.read_runs(args.run_dirs))
    runs.check(len({run.game for run in everything}) == 1, "RUN_DIRS: give runs of one game")
    groups = {name: summarize(group) for name, group in plot.group_runs(everything, args.group_by).items()}
    columns = "group", "num_levels", "split", "steps", "runs", "mean", "low", "high", "min", "max", "variance", "gap"
    rows = [{"group": name} | row for name, group in groups.items() for row in group]
    rows = [{k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items() if v == v} for row in rows]
    plot.write_table(args.out, ".csv", columns, rows)
    plot.write_picture(args.out, ".png", draw(groups, f"{everything[0].game}: the last evaluation of each run"))


if __name__ == "__main__":
    runs.cli(Args, main)
