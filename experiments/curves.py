"""All curves of a table that `reproduce` has made, a row of panels for each game, over steps and over hours. Try:

    python -m experiments.curves algorithms_nature --least 1000000 --random starpilot 1.75 coinrun 2.66

It needs no run: `reproduce` keeps their training's returns in TABLE_training.csv and their evaluations in
TABLE_evaluations.csv. A line is a cell's mean over its seeds, of each twentieth of the steps; the legend says which
these are, since the file may not have all. Of a seed that ran more than once the longest run counts.
"""

from dataclasses import dataclass, field
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import tyro
from matplotlib.ticker import EngFormatter

from common import runs
from experiments import plot, records, reproduce, trials

RESULTS = Path(__file__).parent / "results"
PARTS = 20


@dataclass(frozen=True)
class Args:
    table: tyro.conf.Positional[str]
    """name of a table with curves, such as algorithms_nature"""
    cells: tuple[str, ...] = ()
    """only the cells with one of these in their name; none for all"""
    least: int = 0
    """only runs of at least so many environment steps"""
    random: dict[str, float] = field(default_factory=dict)
    """returns of random play by game, such as starpilot 1.75 coinrun 2.66, drawn as lines"""
    folder: str = str(RESULTS)
    """where TABLE_training.csv and TABLE_evaluations.csv are"""
    out: str = "curves"
    """where to write: OUT.png"""


def by_run(rows: list[dict]) -> dict[tuple[str, str, int], list[dict]]:
    """Rows by cell, seed and the steps that the run was given, in their order."""
    found = {}
    for row in rows:
        found.setdefault((row["cell"], row["seed"], int(row["of steps"])), []).append(row)
    return found


def in_parts(rows: list[dict]) -> np.ndarray:
    """float64 [3, PARTS]: steps, hours and training's return of a run, means over equal parts of its steps."""
    columns = ("global_step", "hours", reproduce.RETURN)
    points = np.array([[float(row[name]) for name in columns] for row in rows])
    ends = np.linspace(0, max(int(rows[0]["of steps"]), points[-1, 0]), PARTS + 1)  # doors: these are of one task
    part = np.clip(np.searchsorted(ends, points[:, 0]) - 1, 0, PARTS - 1)
    none = np.full(3, np.nan)
    return np.stack([points[part == i].mean(axis=0) if (part == i).any() else none for i in range(PARTS)], axis=1)


def last_evaluation(seeds: list[list[dict]]) -> tuple[float, float, float]:
    """Step, mean over seeds and its standard error (`reproduce.pooled`), of each seed's last evaluation."""
    last = [max(rows, key=lambda row: int(row["step"])) for rows in seeds]
    return np.mean([float(row["step"]) for row in last]), *reproduce.pooled(last)


def read(args: Args) -> dict[str, dict[str, tuple[list, list]]]:
    """The seeds' rows of training and those of evaluations, by game and by the cell's name without the game. Of each
    cell only the seeds that ran for the most steps: a mean with shorter runs would be of no length.

    Raises UsageError if there are none.
    """
    table = reproduce.read_table(args.table)
    reproduce.check_cells(args.cells, table)
    flags = {row["cell"]: trials.read_settings(row["flags"].split()) for row in table}
    files = [Path(args.folder, f"{args.table}_{ending}.csv") for ending in ("training", "evaluations")]
    training, evaluated = (by_run(records.read_rows(path)) for path in files)
    most = {}
    for cell, _, steps in training:
        most[cell] = max(most.get(cell, args.least), steps)
    games = {}
    for (cell, seed, steps), rows in training.items():
        asked = any(part in cell for part in args.cells or [""]) and steps == most[cell]
        if asked and cell in flags:
            game = flags[cell].get("env_id", args.table)  # scripts of one game have no such flag
            of_cell = games.setdefault(game, {}).setdefault(cell.removesuffix(f", {game}"), ([], []))
            of_cell[0].append(rows)
            of_cell[1].extend(filter(None, [evaluated.get((cell, seed, steps))]))
    runs.check(bool(games), f"TABLE {args.table}: has no such curves in {args.folder}, give one that has")
    return games


def seeds_of(games: dict[str, dict[str, tuple[list, list]]]) -> dict[str, str]:
    """Which seeds a cell's lines are of, by its name: "seeds 1, 2", or "seeds 1, 2 / 1" where games differ."""
    found = {}
    for cells in games.values():
        for name, (training, _) in cells.items():
            seeds = ", ".join(sorted({rows[0]["seed"] for rows in training}, key=int))
            found.setdefault(name, []).append(seeds)
    return {name: "seeds " + " / ".join(dict.fromkeys(each)) for name, each in found.items()}


def draw(games: dict[str, dict[str, tuple[list, list]]], random: dict[str, float]) -> plt.Figure:
    """A game's curves over steps and over hours, and at their right ends the last evaluations with their errors."""
    how = {"figsize": (13, 1 + 4 * len(games)), "sharey": "row", "squeeze": False, "layout": "constrained"}
    figure, axes = plt.subplots(len(games), 2, **how)
    names = list(dict.fromkeys(name for cells in games.values() for name in cells))
    shown, seeds = {}, seeds_of(games)
    for (over_steps, over_hours), (game, cells) in zip(axes, games.items(), strict=True):
        for i, (name, (training, evaluated)) in enumerate(sorted(cells.items(), key=lambda x: names.index(x[0]))):
            means = np.mean([in_parts(rows) for rows in training], axis=0)
            steps, hours, returns = means[:, np.isfinite(means[2])]
            style = plot.style_of(names.index(name))
            style |= {"mfc": "w"} if names.index(name) >= len(plot.MARKERS) else {}  # the first one's colour again
            for axis, x in ((over_steps, steps), (over_hours, hours)):
                line = axis.plot(x, returns, **style, markevery=4, path_effects=plot.HALO)
                shown[f"{name}, {seeds[name]}"] = line[0]
            if evaluated:
                step, mean, error = last_evaluation(evaluated)
                mark = {"mfc": style["color"], "mec": "k", "ms": 8, "capsize": 3} | style | {"ls": "", "ms": 8}
                over_steps.errorbar(step * (1.02 + 0.015 * i), mean, error, **mark)
        for axis in (over_steps, over_hours):
            if game in random:
                shown["random play"] = axis.axhline(random[game], color="0.4", ls=":")
            axis.set(title=game, ylabel="return of an episode")
        over_steps.set(xlabel="environment steps; right: last evaluation, unseen levels")
        over_steps.xaxis.set_major_formatter(EngFormatter(sep=""))
        over_hours.set(xlabel="hours")
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=3, handlelength=4)
    return figure


def main(args: Args) -> None:
    plot.check_out(args.out)
    games = read(args)
    unknown = " ".join(game for game in args.random if game not in games)
    runs.check(not unknown, f"--random {unknown}: has no curve here, give some of {' '.join(games)}")
    figure = draw(games, args.random)
    plot.write_whole(args.out, ".png", lambda temporary: figure.savefig(temporary, format="png"))


if __name__ == "__main__":
    runs.cli(Args, main)
