"""Draws the README's picture from committed curves:

python -m experiments.studies.learning_curves.draw --out docs/curves.png
"""

import csv
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
PANELS = {  # title: curve, game
    "bigfish, defaults, one H100": ("ppo_8M/bigfish.csv", "bigfish"),
    "coinrun, defaults, one H200": ("ppo_8M/coinrun.csv", "coinrun"),
    "starpilot, OpenAI's setting, one H100": ("ppo_8M/starpilot.csv", "starpilot"),
    "starpilot, make train, two CPU cores": ("ppo_starpilot_cpu/starpilot.csv", "starpilot"),
}


@dataclass(frozen=True)
class Args:
    out: Path = Path("curves.png")
    """where to write the picture"""


def read_curve(path: Path) -> np.ndarray:
    """Steps and mean returns in training, float64 [2, points]."""
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["episodic_return"]]
    return np.array([(float(row["global_step"]), float(row["episodic_return"])) for row in rows]).T


def main(args: Args) -> None:
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.4), layout="constrained")
    for axis, (title, (name, game)) in zip(axes, PANELS.items(), strict=True):
        steps, returns = read_curve(RESULTS / name)
        openai = plot.read_reference("easy-all", [game])["OpenAI's PPO, easy-all", game]
        openai = openai[:, openai[0] <= 1.05 * steps[-1]]
        axis.plot(*openai, color="0.45", ls="--", lw=1.5, label="OpenAI's PPO, mean of 3 seeds")
        axis.plot(steps, returns, color=plot.COLORS[0], lw=1.8, label="ppo_procgen.py, 1 seed")
        axis.axhline(envs.RANDOM_RETURNS[game], color="0.45", ls=":", label="random play")
        axis.set(title=title, xlabel="environment steps", ylim=(0, None))
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes[0].set_ylabel("mean return of 100 episodes")
    axes[1].legend(loc="lower right", frameon=False)
    figure.savefig(args.out)


if __name__ == "__main__":
    runs.cli(Args, main)
