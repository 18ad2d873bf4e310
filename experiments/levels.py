"""How well runs trained on few levels play others: returns over the number of training levels. Try:

    python -m experiments.levels runs/starpilot__ppo* --out experiments/results/levels/starpilot

Each run's last evaluation counts. Unlimited levels (--num-levels 0) are drawn at the right end, as "all": there every
level is one for training, so a run has a single evaluation, shown as that of test levels, and no gap.
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
    """run directories of one game, of different --num-levels, each with an evaluation"""
    out: str = "levels"
    """where to write: OUT.csv and OUT.png"""
    group_by: tuple[str, ...] = ()
    """flags that tell lines apart, script too; by default the script and what differs but the seed"""


def last_evaluation(run: plot.Logged) -> tuple[int, dict[str, dict[str, float]]]:
    """The step of the last line that has them for all splits that the run evaluates: mean_return, min, max and std by
    split."""
    splits = SPLITS if run.args["num_levels"] else SPLITS[1:]
    names = [(split, name) for split in splits for name in ("mean_return", "min", "max", "std")]
    found = [x for x in run.lines if all(plot.can_be_drawn(x.get(f"eval/{s}_levels/{n}", np.nan)) for s, n in names)]
    runs.check(bool(found), f"RUN_DIRS {run.path}: has no evaluation on {' and '.join(splits)} levels, leave it out")
    by_split = {s: {n: found[-1][f"eval/{s}_levels/{n}"] for split, n in names if s == split} for s in splits}
    return found[-1]["global_step"], by_split


def summarize(evaluations: list[dict[str, dict[str, float]]], steps: int) -> dict[str, dict[str, float]]:
    """What runs (seeds) of one group and number of levels say after so many steps, by split.

    The mean of their mean returns with its 95 % bootstrap interval, min and max over all their episodes, the mean of
    their variances (std of the episodes' returns, squared), and the gap: mean on training minus mean on test levels.
    """
    answer = {}
    for split in evaluations[0]:
        columns = {name: np.array([x[split][name] for x in evaluations]) for name in evaluations[0][split]}
        mean, low, high = plot.bootstrap_mean(columns["mean_return"])
        answer[split] = {"steps": steps, "runs": len(evaluations), "mean": mean, "low": low, "high": high,
                         "min": columns["min"].min(), "max": columns["max"].max(),
                         "variance": (columns["std"] ** 2).mean()}  # fmt: skip
    gap = answer["train"]["mean"] - answer["test"]["mean"] if "train" in answer else np.nan
    return {split: numbers | {"gap": gap} for split, numbers in answer.items()}


def study(groups: dict[str, list[plot.Logged]]) -> dict[str, dict[int, dict[str, dict[str, float]]]]:
    """`summarize` of each group and number of levels, with the group's steps; levels in rising order, 0 (unlimited)
    last."""
    answer = {}
    for name, group in groups.items():
        by_levels = {}
        for run in sorted(group, key=lambda run: run.args["num_levels"] or np.inf):
            by_levels.setdefault(run.args["num_levels"], []).append(last_evaluation(run))
        steps = [step for found in by_levels.values() for step, _ in found]
        plot.check_lengths(steps, f"RUN_DIRS: {name} has runs")
        answer[name] = {levels: summarize([x for _, x in found], max(steps)) for levels, found in by_levels.items()}
    return answer


def draw(answer: dict, title: str) -> plot.plt.Figure:
    """Returns above, variances below; training levels on the left, test levels on the right."""
    levels = sorted({n for group in answer.values() for n in group}, key=lambda n: n or np.inf)
    at = {n: n or 10 * max(1, *levels) for n in levels}  # "all" is a decade further to the right
    figure, axes = plot.plt.subplots(2, 2, figsize=(12, 8), sharex=True, sharey="row", layout="constrained")
    for i, (name, group) in enumerate(answer.items()):
        style, steps = plot.style_of(i), max(numbers["steps"] for of in group.values() for numbers in of.values())
        for (top, bottom), split in zip(axes.T, SPLITS, strict=True):
            shown = {n: numbers[split] for n, numbers in group.items() if split in numbers}
            x = [at[n] for n in shown]
            mean, low, high, least, most, variance = (
                np.array([numbers[k] for numbers in shown.values()])
                for k in ("mean", "low", "high", "min", "max", "variance")
            )
            edges = {"ls": style["ls"], "lw": 1, "marker": "_", "ms": 9}
            plot.draw_band(top, x, least, most, color=style["color"], alpha=0.06, **edges)
            sides = np.maximum((mean - low, high - mean), 0)  # rounding may have made one negative
            top.errorbar(x, mean, sides, **style | {"ms": 7}, capsize=4, label=f"{name}, {steps:,.0f} steps", zorder=3)
            bottom.plot(x, variance, **style | {"ms": 7})
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
    plot.check_out(args.out)
    everything = plot.read_runs(args.run_dirs)
    everything = plot.drop_repeats(everything)
    games = list(dict.fromkeys(run.game for run in everything))
    runs.check(len(games) == 1, f"RUN_DIRS: are of {' and '.join(games)}, give runs of one game")
    without = " ".join(run.path for run in everything if "num_levels" not in run.args)
    runs.check(not without, f"RUN_DIRS {without}: has no --num-levels, give runs of Procgen's games")
    differing = (name for run in everything for name in plot.differing(run, everything) if name != "num_levels")
    answer = study(plot.group_runs(everything, args.group_by or tuple(dict.fromkeys(["script", *differing]))))
    rows = []
    for group, by_levels in answer.items():
        for levels, splits in by_levels.items():
            for split, numbers in splits.items():
                cells = {k: f"{v:.6g}" for k, v in numbers.items() if v == v}  # NaN: empty
                rows.append({"group": group, "num_levels": levels, "split": split} | cells)
    columns = "group", "num_levels", "split", "steps", "runs", "mean", "low", "high", "min", "max", "variance", "gap"
    plot.write_table(args.out, ".csv", columns, rows)
    plot.write_picture(args.out, ".png", draw(answer, f"{games[0]}: the last evaluation of each run"))


if __name__ == "__main__":
    runs.cli(Args, main)
