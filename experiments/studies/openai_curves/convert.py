"""Converts train-procgen's logs of OpenAI's PPO to the curves that `plot --reference` draws.

git clone https://github.com/openai/train-procgen
python -m experiments.studies.openai_curves.convert train-procgen/train_procgen/results
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from common import runs
from common.envs import GAMES
from experiments import plot, records

# Workers, whose steps add up; those that only test play on levels of their own.
WORKERS = {"easy-all": 1, "easy-200": 1, "hard-all": 4, "hard-500": 4}
NEAR = 5  # updates averaged before and after a point
POINTS = [
    *range(100_000, 1_000_000, 100_000), *range(1_000_000, 5_000_000, 500_000),
    *range(5_000_000, 10_000_000, 1_000_000), *range(10_000_000, 50_000_000, 2_500_000),
    *range(50_000_000, 200_000_001, 10_000_000),
]  # fmt: skip


@dataclass(frozen=True)
class Args:
    results: tyro.conf.Positional[str]
    """the folder with easy-all-run0 and the others"""
    out: str = str(plot.REFERENCE)
    """the CSV to write"""


def read(path: Path, workers: int) -> list[float]:
    """Mean `eprewmean` (NaN before the first episode's end) around each point that a run reached."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    steps = workers * np.array([float(row["misc/total_timesteps"]) for row in rows])
    returns = np.array([float(row["eprewmean"]) for row in rows])
    found = np.searchsorted(steps, [point for point in POINTS if point <= steps[-1] * 1.001])
    return [float(returns[max(i - NEAR, 0) : i + NEAR + 1].mean()) for i in found]


def main(args: Args) -> None:
    rows = []
    for name, workers in WORKERS.items():
        for part in ("",) if name.endswith("all") else ("-train", "-test"):
            for game in GAMES:
                paths = [Path(args.results, f"{name}-run{i}", f"progress-{game}{part}.csv") for i in range(3)]
                curves = [read(path, workers) for path in paths]
                values = np.array([curve[: min(map(len, curves))] for curve in curves])
                for point, mean, std in zip(POINTS, values.mean(axis=0), values.std(axis=0, ddof=1), strict=False):
                    row = {"split": name + part, "game": game, "env_steps": point, "mean_return": f"{mean:.3f}"}
                    if np.isfinite(mean):
                        rows.append(row | {"std_over_runs": f"{std:.3f}", "runs": len(curves)})
    records.write_rows(Path(args.out), rows)


if __name__ == "__main__":
    runs.cli(Args, main)
