"""Draws the README's picture from committed curves, or that of `make train`'s setting on all games:

python -m experiments.studies.learning_curves.draw --out docs/curves.png
python -m experiments.studies.learning_curves.draw --laptop --out docs/laptop.png
"""

from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np

from common import envs, runs
from experiments import plot, records

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import EngFormatter

RESULTS = records.ROOT / "experiments" / "results"
README = {  # title: curve, game
    "bigfish, defaults, one H100": ("ppo_8M/bigfish.csv", "bigfish"),
    "coinrun, defaults, one H200": ("ppo_8M/coinrun.csv", "coinrun"),
    "starpilot, OpenAI's setting, one H100": ("ppo_8M/starpilot.csv", "starpilot"),
    "starpilot, make train, two CPU cores": ("ppo_starpilot_cpu/starpilot.csv", "starpilot"),
}
LAPTOP = {game: (f"laptop_games/{game}.csv", game) for game in envs.GAMES}


@dataclass(frozen=True)
class Args:
    out: Path = Path("curves.png")
    """where to write the picture"""
    laptop: bool = False
    """draw a panel for each game with `make train`'s setting"""


def read_curves(path: Path) -> list[np.ndarray]:
    """Steps and mean returns in training of each seed, float64 [2, points]."""
    curves = {}
    for row in records.read_rows(path):
        if row["episodic_return"]:
            point = float(row["global_step"]), float(row["episodic_return"])
            curves.setdefault(row["seed"], []).append(point)
    return [np.array(points).T for points in curves.values()]


def main(args: Args) -> None:
    panels, size = (LAPTOP, (13, 10)) if args.laptop else (README, (15, 3.4))
    evaluated = records.read_rows(RESULTS / "laptop_games" / "games.csv") if args.laptop else []
    ours = "ppo_procgen.py, a line per seed" if args.laptop else "ppo_procgen.py, 1 seed"
    figure, axes = plt.subplots(len(panels) // 4, 4, figsize=size, layout="constrained", squeeze=False)
    for axis, (title, (name, game)) in zip(axes.flat, panels.items(), strict=True):
        curves = read_curves(RESULTS / name)
        openai = plot.read_reference("easy-all", [game])["OpenAI's PPO, easy-all", game]
        openai = openai[:, openai[0] <= 1.05 * max(steps[-1] for steps, _ in curves)]
        axis.plot(*openai, color="0.45", ls="--", lw=1.5, label="OpenAI's PPO, mean of 3 seeds")
        for curve in curves:
            axis.plot(*curve, color=plot.COLORS[0], lw=1.8, label=ours)
        axis.axhline(envs.RANDOM_RETURNS[game], color="0.45", ls=":", label="random play")
        for row in (row for row in evaluated if row["game"] == game):
            numbers = float(row["steps"]), float(row["mean"]), 2 * float(row["error"])
            label = "on test levels, ± 2 standard errors"
            axis.errorbar(*numbers, fmt="o", color=plot.COLORS[3], capsize=4, label=label)
        lowest = min(returns.min() for _, returns in curves)
        axis.set(title=title, ylim=(None if lowest < 0 else 0, None))
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    for axis in axes[-1]:
        axis.set_xlabel("environment steps")
    for axis in axes[:, 0]:
        axis.set_ylabel("mean return of 100 episodes")
    if args.laptop:
        handles, labels = axes[0, 0].get_legend_handles_labels()
        entries = dict(zip(labels, handles, strict=True))  # one for all seeds
        figure.legend(entries.values(), entries, loc="outside lower center", ncols=4, frameon=False)
    else:
        axes[0, 1].legend(loc="lower right", frameon=False)
    figure.savefig(args.out)


if __name__ == "__main__":
    runs.cli(Args, main)
