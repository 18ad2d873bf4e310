"""Draws all curves of a table from the files that `reproduce` keeps, over steps and over hours, a row for each game.

    python -m experiments.studies.algorithms_nature.curves --least 1000000

A line is a cell's mean over the seeds with the longest runs, in twentieths of the steps; at its right end is their last
evaluation. The runs themselves are not needed.
"""

from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import tyro
from matplotlib.ticker import EngFormatter

from common import envs, runs
from experiments import plot, records, reproduce, trials

PARTS = 20


@dataclass(frozen=True)
class Args:
    table: tyro.conf.Positional[str] = "algorithms_nature"
    """a table of reproduce"""
    least: int = 0
    """shortest runs that count, in environment steps"""
    folder: str = str(reproduce.REFERENCE.parents[1] / "results")
    """where TABLE_training.csv and TABLE_evaluations.csv are"""
    out: str = str(Path(__file__).with_name("curves"))
    """writes OUT.png"""


def by_run(path: Path) -> dict[tuple[str, str, int], list[dict]]:
    """Rows by cell, seed and the steps that the run was given."""
    found = {}
    for row in records.read_rows(path):
        found.setdefault((row["cell"], row["seed"], int(row["of steps"])), []).append(row)
    return found


def in_parts(rows: list[dict]) -> np.ndarray:
    """float64 [3, PARTS]: steps, hours and training return of a run, averaged over equal parts of its steps."""
    points = np.array([[float(row[name]) for name in ("global_step", "hours", reproduce.RETURN)] for row in rows])
    ends = np.linspace(0, max(int(rows[0]["of steps"]), points[-1, 0]), PARTS + 1)
    part = np.clip(np.searchsorted(ends, points[:, 0]) - 1, 0, PARTS - 1)
    none = np.full(3, np.nan)
    return np.stack([points[part == i].mean(axis=0) if (part == i).any() else none for i in range(PARTS)], axis=1)


def read(args: Args) -> dict[str, dict[str, tuple[list, list]]]:
    """The longest runs' rows of training and of evaluations, by game and cell."""
    flags = {row["cell"]: trials.read_settings(row["flags"].split()) for row in reproduce.read_table(args.table)}
    training = by_run(Path(args.folder, f"{args.table}_training.csv"))
    evaluated = by_run(Path(args.folder, f"{args.table}_evaluations.csv"))
    most, games = {}, {}
    for cell, _, steps in training:
        most[cell] = max(most.get(cell, args.least), steps)
    for (cell, seed, steps), rows in training.items():
        if steps == most[cell] and cell in flags:
            game = flags[cell].get("env_id", args.table)  # scripts of one game have no such flag
            of_cell = games.setdefault(game, {}).setdefault(cell.removesuffix(f", {game}"), ([], []))
            of_cell[0].append(rows)
            of_cell[1].extend(filter(None, [evaluated.get((cell, seed, steps))]))
    return games


def draw(games: dict[str, dict[str, tuple[list, list]]]) -> plt.Figure:
    """A row of panels for each game."""
    how = {"figsize": (13, 1 + 4 * len(games)), "sharey": "row", "squeeze": False, "layout": "constrained"}
    figure, axes = plt.subplots(len(games), 2, **how)
    names = list(dict.fromkeys(name for cells in games.values() for name in cells))
    shown = {}
    for (over_steps, over_hours), (game, cells) in zip(axes, games.items(), strict=True):
        for i, (name, (training, evaluated)) in enumerate(sorted(cells.items(), key=lambda x: names.index(x[0]))):
            steps, hours, returns = np.mean([in_parts(rows) for rows in training], axis=0)
            style = plot.style_of(names.index(name))
            style |= {"mfc": "w"} if names.index(name) >= len(plot.MARKERS) else {}  # the first one's colour again
            seeds = ", ".join(sorted(rows[0]["seed"] for rows in training))
            for axis, x in ((over_steps, steps), (over_hours, hours)):
                known = np.isfinite(returns)
                (line,) = axis.plot(x[known], returns[known], **style, markevery=4, path_effects=plot.HALO)
                shown.setdefault(name, (line, f"{name}, seeds {seeds}"))
            if evaluated:
                last = [max(rows, key=lambda row: int(row["step"])) for rows in evaluated]
                step, (mean, error) = np.mean([float(row["step"]) for row in last]), reproduce.pooled(last)
                mark = {"mfc": style["color"], "mec": "k", "capsize": 3} | style | {"ls": "", "ms": 8}
                over_steps.errorbar(step * (1.02 + 0.015 * i), mean, error, **mark)
        for axis in (over_steps, over_hours):
            if game in envs.RANDOM_RETURNS:
                shown["random"] = axis.axhline(envs.RANDOM_RETURNS[game], color="0.4", ls=":"), "random play"
            axis.set(title=game, ylabel="return of an episode", xlabel="hours")
        over_steps.set(xlabel="environment steps; right: last evaluation, test levels")
        over_steps.xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.legend(*zip(*shown.values(), strict=True), loc="outside lower center", ncols=3, handlelength=4)
    return figure


def main(args: Args) -> None:
    figure = draw(read(args))
    plot.write_output(args.out, ".png", lambda temporary: figure.savefig(temporary, format="png"))


if __name__ == "__main__":
    runs.cli(Args, main)
