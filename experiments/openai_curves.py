"""OpenAI's PPO on Procgen, as train-procgen published its runs, at the same steps: what `plot --reference` draws.

    git clone https://github.com/openai/train-procgen
    python -m experiments.openai_curves train-procgen/train_procgen/results

Means over three runs of their `eprewmean`, the mean return of the last 100 training episodes, over the eleven updates
around each point (at the beginning of a run those that there are): their noise is less, and nothing lags, as it would
with the exponential average of their plots.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from pydantic import AfterValidator, ConfigDict, Field
from typing_extensions import TypedDict

from common import files, runs
from common.envs import GAMES
from experiments import plot, records

# Workers whose steps add up to a run's; those that only test play on levels of their own.
WORKERS = {"easy-all": 1, "easy-200": 1, "hard-all": 4, "hard-500": 4}
NEAR = 5  # updates before and after a point
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


# What is read of an update; the mean is nan before the first episode has ended.
Number = Annotated[str, AfterValidator(float)]
Update = TypedDict("Update", {"misc/total_timesteps": Number, "eprewmean": Number})
Update.__pydantic_config__ = ConfigDict(extra="allow")


def around(steps: np.ndarray, returns: np.ndarray) -> list[float]:
    """Mean return [points] of the updates around each of POINTS that a run [updates] has come to, NaN where no episode
    had ended yet."""
    found = np.searchsorted(steps, [point for point in POINTS if point <= steps[-1] * 1.001])
    return [float(returns[max(i - NEAR, 0) : i + NEAR + 1].mean()) for i in found]


def read(path: Path, workers: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps of all workers and returns, a number for each update. Raises UsageError."""
    rows = files.read(path, Annotated[list[Update], Field(min_length=1)], "RESULTS", "give train-procgen's results")
    return tuple(np.array([row[name] for row in rows]) * scale
                 for name, scale in (("misc/total_timesteps", workers), ("eprewmean", 1)))  # fmt: skip


def main(args: Args) -> list[dict]:
    folder = Path(args.results)
    files.make_room(Path(args.out), "--out")
    rows = []
    for name, workers in WORKERS.items():
        for part in ("",) if name.endswith("all") else ("-train", "-test"):
            for game in GAMES:
                curves = [
                    around(*read(folder / f"{name}-run{i}" / f"progress-{game}{part}.csv", workers)) for i in range(3)
                ]
                shortest = min(map(len, curves))
                values = np.array([curve[:shortest] for curve in curves])
                for point, mean, std in zip(POINTS, values.mean(axis=0), values.std(axis=0, ddof=1), strict=False):
                    row = {"split": name + part, "game": game, "env_steps": point, "mean_return": f"{mean:.3f}"}
                    if np.isfinite(mean):
                        rows.append(row | {"std_over_runs": f"{std:.3f}", "runs": len(curves)})
    records.write_rows(Path(args.out), rows)
    return rows


if __name__ == "__main__":
    runs.cli(Args, main)
