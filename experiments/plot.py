"""Learning curves of runs, and scores over games: CSV tables and pictures. Try:

    python -m experiments.plot runs/bigfish* --out experiments/results/bigfish --random 0.9 --reference easy-all
    python -m experiments.plot runs/*__* --group-by encoder --aggregate --out encoders

Runs of a group (by default: same script, same flags but for the seed) are one line: their mean, with a 95 % bootstrap
interval of it over the runs. It is drawn where all of them have logged: a run that was stopped early ends the line. A
run that was resumed with other flags counts with the last ones.
"""

import csv
import importlib
import importlib.util
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Annotated, NamedTuple, NotRequired

import matplotlib as mpl
import numpy as np
import tyro
from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from common import files, runs, tracking
from common.envs import RETURN_RANGES
from common.flags import PositiveInt
from experiments import trials
from experiments.trials import BESIDE

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patheffects import Normal, Stroke
from matplotlib.ticker import EngFormatter

REFERENCE = Path(__file__).parent / "reference" / "openai_ppo_procgen_curves.csv"
REFERENCES = "easy-all", "easy-200-train", "easy-200-test", "hard-all", "hard-500-train", "hard-500-test"
COLUMNS = {  # of the CSV; what else is drawn is added under its own name
    "global_step": "global_step", "charts/episodic_return": "episodic_return",
    "eval/train_levels/mean_return": "train_levels", "eval/test_levels/mean_return": "test_levels",
    "charts/intrinsic_reward": "intrinsic_reward", "charts/episodic_intrinsic_return": "episodic_intrinsic_return",
    "charts/prediction_error": "prediction_error", "charts/rooms_visited": "rooms_visited",
    "charts/max_room_score": "max_room_score", "charts/episodic_length": "episodic_length",
    "charts/task": "task", "charts/success_rate": "success_rate", "eval/success_rate": "evaluated_success_rate",
    "losses/penalty": "penalty", "losses/entropy": "entropy", "losses/explained_variance": "explained_variance",
    "losses/intrinsic_explained_variance": "intrinsic_explained_variance", "charts/SPS": "steps_per_second",
}  # fmt: skip
LABELS = COLUMNS | {
    "charts/episodic_return": "return of an episode",
    "eval/train_levels/mean_return": "training levels",
}
# Okabe and Ito's colours for every kind of eye, neighbours apart in grey too. Seven of them and five strokes: 35 pairs.
COLORS = "#0072B2", "#E69F00", "#000000", "#D55E00", "#56B4E9", "#009E73", "#CC79A7"
STROKES = "-", (0, (5, 2)), (0, (1, 1.3)), (0, (6, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1))
MARKERS = "o", "s", "^", "D", "v", "P", "X"
HALO = [Stroke(linewidth=3.5, foreground="w"), Normal()]  # parts a line from the edges of bands
plt.rcParams |= {"font.size": 10, "legend.fontsize": 9, "axes.grid": True, "grid.alpha": 0.3, "savefig.dpi": 120}
plt.rcParams["text.parse_math"] = False  # names are no formulas, whatever is in them


@dataclass(frozen=True)
class Args:
    run_dirs: tyro.conf.Positional[tuple[str, ...]]
    """run directories; those of several games get a panel a game"""
    out: str = "curve"
    """where to write: OUT.csv and OUT.png"""
    group_by: tuple[str, ...] = ()
    """flags that tell lines apart, script and env_id too; by default the script and what differs but the seed,
    total_timesteps and capture_video"""
    random: float | None = None
    """return of a random policy on the same levels (evaluate.py --random), drawn as a line"""
    reference: tuple[str, ...] = ()
    """OpenAI's PPO, such as easy-all, easy-200-test or hard-500-train, or a CSV of env_steps, mean_return"""
    hours: bool = False
    """draw the curves over the hours that runs took too, without those between two resumes (older runs: with them)"""
    metrics: tuple[str, ...] = ("charts/episodic_return",)
    """what to draw, such as charts/episodic_return charts/intrinsic_reward; any that is logged"""
    each_run: bool = False
    """draw the runs of a group too, thin"""
    points: PositiveInt = 400
    """about this many rows a run in the CSV, evaluations besides, and points a line in the picture; a mean over runs
    has at most 120, and at most 20 marks for its evaluations"""
    aggregate: bool = False
    """also score the groups over all games with rliable: OUT_aggregate.csv and OUT_aggregate.png"""
    score_metric: str = "eval/test_levels/mean_return"
    """a return; --aggregate takes each run's last and normalises it with the competition's constants"""


class Logged(NamedTuple):
    """A run as it lies on the disk; `lines` of metrics.jsonl, with `hours`: by `seconds`, the run's own clock.

    Older runs have none. There they are the hours since the first line, by `time`, with those between two resumes.
    """

    path: str
    script: str
    game: str
    args: dict
    lines: list[dict]
    flags: str = ""  # what tells its group from others


# RUNS


class SavedArgs(TypedDict, total=False):
    """The arguments of a run, those of them that are read here."""

    __pydantic_config__ = ConfigDict(extra="allow")
    env_id: str
    seed: int
    num_levels: Annotated[int, Field(ge=0)]
    distribution_mode: str


class Saved(TypedDict):
    """args.json of a run; older ones have no env_id outside of the arguments."""

    script: str
    env_id: NotRequired[str]
    args: SavedArgs


def read_runs(run_dirs: Sequence[str]) -> list[Logged]:
    """Reads run directories; raises UsageError if there are none, one is no run, or one is given twice."""
    runs.check(len(run_dirs) > 0, "RUN_DIRS: give at least one run directory")
    everything, seen = [], {}
    for run_dir in run_dirs:
        everything.append(read_run(run_dir))
        there = Path(run_dir).stat()
        first = seen.setdefault((there.st_dev, there.st_ino), run_dir)
        runs.check(len(seen) == len(everything), f"RUN_DIRS {run_dir}: is the same run as {first}, give it once")
    return everything


def read_run(run_dir: str) -> Logged:
    """Reads a run directory; raises UsageError if there is none, or nothing in it."""
    content = files.read(Path(run_dir, "args.json"), Saved, "RUN_DIRS", "give run directories")
    lines = [x for x in trials.read_metrics(Path(run_dir)) if {"global_step", "time"} <= x.keys()]
    lines = [x for x in lines if all(0 <= x.get(clock, 0) < 1e15 for clock in ("global_step", "time", "seconds"))]
    runs.check(len(lines) > 0, f"RUN_DIRS {run_dir}: has no line of metrics yet, give runs that have logged something")
    hours, last = 0.0, {"seconds": 0.0, "time": lines[0]["time"]}
    for line in lines:
        clock = "seconds" if {"seconds"} <= line.keys() & last.keys() else "time"
        hours += max(0, line[clock] - last[clock]) / 3600  # a computer's time may go back
        line["hours"], last = hours, line
    game = content["args"].get("env_id") or content.get("env_id") or Path(run_dir).resolve().name.split("__")[0]
    args = {name: tracking.as_number(value) for name, value in content["args"].items()}  # 5e-4 is 0.0005
    return Logged(run_dir, content["script"], game, args, lines=lines)


def default_of(script: str, name: str) -> object:
    """A flag's default in the script here; None if there is no such script or flag."""
    args = getattr(importlib.import_module(script), "Args", None) if f"{script}.py" in trials.SCRIPTS else None
    default = getattr(args, name, None)
    return list(default) if isinstance(default, tuple) else tracking.as_number(default)  # as JSON has it


def differing(run: Logged, everything: list[Logged]) -> list[str]:
    """The arguments that tell a script's runs apart, but for game, seed and places. One that some runs do not have, as
    they are older, does so if it differs among the others, or is not the script's default there."""
    runs_of_script = [other.args for other in everything if other.script == run.script]
    same = BESIDE | {"env_id", "seed", "total_timesteps", "capture_video"}
    names = [name for name in dict.fromkeys(name for args in runs_of_script for name in args) if name not in same]

    def tells_apart(name):
        values = [args[name] for args in runs_of_script if name in args]
        known = len(values) == len(runs_of_script)
        return any(x != values[0] for x in values) or not (known or values[0] == default_of(run.script, name))

    return list(filter(tells_apart, names))


def drop_repeats(everything: list[Logged]) -> list[Logged]:
    """Of runs with the same flags, game and seed the longest, since on a CPU one is the other's beginning, unless
    threads play (no --deterministic); prints what it leaves out."""
    longest = {}
    for run in everything:
        seed = run.args.get("seed", run.path) if run.args.get("deterministic", True) else run.path
        key = json.dumps([run.script, run.game, seed, *(run.args.get(name) for name in differing(run, everything))])
        first = longest.setdefault(key, run)
        if first is not run:
            run, shorter = sorted((run, first), key=lambda each: -each.lines[-1]["global_step"])
            print(f"left out: {shorter.path}, with the seed and flags of {run.path}")
            longest[key] = run
    return list(longest.values())


def group_runs(everything: list[Logged], group_by: tuple[str, ...]) -> dict[str, list[Logged]]:
    """Runs by their group's name, such as "ppo_procgen, pool avg", in the order in which they are given."""
    known = {"script": "script", "env_id": "env_id"} | {k.rstrip("_"): k for run in everything for k in run.args}
    unknown = [name for name in group_by if name.replace("-", "_") not in known]
    runs.check(not unknown, f"--group-by {' '.join(unknown)}: no run has it, give some of {' '.join(sorted(known))}")
    groups = {}
    for run in everything:
        values = run.args | {"env_id": run.game}
        chosen = [known[name.replace("-", "_")] for name in group_by] or ["script", *differing(run, everything)]
        flags = " ".join(f"{k} {values.get(k, 'none')}" for k in chosen if k != "script")
        name = ", ".join(filter(None, (run.script if "script" in chosen else "", flags))) or "all runs"
        groups.setdefault(name, []).append(run._replace(flags=flags))
    return groups


def count(group: list[Logged]) -> str:
    """How many runs of a game a group has: "seed 1", "3 runs", "2 to 3 runs"."""
    counts = Counter(run.game for run in group).values()
    seeds = {run.args.get("seed") for run in group}
    if len(seeds) == max(counts) == 1:
        return f"seed {seeds.pop()}"
    return f"{min(counts)} to {max(counts)} runs" if min(counts) < max(counts) else f"{max(counts)} runs"


def check_metrics(flag: str, metrics: Iterable[str], everything: list[Logged]) -> None:
    """Raises UsageError if no run has logged one of these."""
    logged = {name for run in everything for line in run.lines for name in line} - {"time"}
    unknown = [name for name in metrics if name not in logged]
    runs.check(
        not unknown, f"{flag} {' '.join(unknown)}: no run has logged that, give some of {' '.join(sorted(logged))}"
    )


def first_return(metrics: Sequence[str]) -> str | None:
    """The first metric that is a return, to draw others' returns beside."""
    return next((name for name in metrics if name == "charts/episodic_return" or name.endswith("/mean_return")), None)


def read_reference(name: str, games: list[str]) -> dict[tuple[str, str], np.ndarray]:
    """Curves float64 [2, points] (steps, return) of a CSV by label and game ("" for any)."""
    path, own = (REFERENCE, "OpenAI's PPO") if name in REFERENCES else (Path(name), Path(name).stem)
    curves = {}
    try:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if path != REFERENCE or row["split"] == name:
                    label = ", ".join(filter(None, (own, row.get("split"))))
                    point = float(row["env_steps"]), float(row["mean_return"])
                    if not all(map(can_be_drawn, point)):
                        raise ValueError
                    curves.setdefault((label, row.get("game") or ""), []).append(point)
    except (OSError, ValueError, KeyError, TypeError, csv.Error):
        curves = {}
    valid = f"{', '.join(REFERENCES)} or a readable CSV with columns env_steps and mean_return"
    runs.check(bool(curves), f"--reference {name}: give {valid}")
    curves = {key: np.array(sorted(points)).T for key, points in curves.items() if key[1] in ("", *games)}
    runs.check(bool(curves), f"--reference {name}: has no curve of {' or '.join(games)}, give one that has")
    return curves


# NUMBERS


def thin(lines: list[dict], points: int) -> list[dict]:
    """Every n-th line, about so many; and the last, and each that holds an evaluation."""
    every = -(-len(lines) // points) or 1
    last = len(lines) - 1
    return [x for i, x in enumerate(lines) if i % every == 0 or i == last or any(k.startswith("eval/") for k in x)]


def can_be_drawn(value: float) -> bool:
    """Whether it is a number, and its square too: neither NaN nor too large for axes."""
    return abs(value) < 1e100


def curve(lines: list[dict], x: str, metric: str) -> np.ndarray:
    """float64 [2, points]: `x` (global_step or hours) and a metric, where it is logged and can be drawn."""
    points = [(line[x], line[metric]) for line in lines if can_be_drawn(line.get(metric, np.nan))]
    return np.array(points, np.float64).reshape(-1, 2).T


def common_grid(curves: list[np.ndarray], points: int) -> tuple[np.ndarray, np.ndarray]:
    """Curves [2, any length] on one grid [P], P <= points: the x of the shortest, where all of them are.

    Returns the grid and values float64 [runs, P], interpolated linearly; P is 0 where the curves do not overlap. Runs
    log at slightly different steps, so one that begins late or ends early by up to 2 % is held there.
    """
    first, last = 0.98 * max(x[0] for x, _ in curves), 1.02 * min(x[-1] for x, _ in curves)
    grid = min((x for x, _ in curves), key=len)
    grid = grid[(first <= grid) & (grid <= last)]
    grid = grid[np.unique(np.linspace(0, len(grid) - 1, min(points, len(grid))).round().astype(int))]
    return grid, np.array([np.interp(grid, x, y) for x, y in curves]).reshape(len(curves), len(grid))


def check_lengths(steps: Sequence[float], which: str) -> None:
    """Raises UsageError if runs whose last values are compared have not trained for as long, but for 2 %."""
    least, most = min(steps), max(steps)
    runs.check(most <= 1.02 * least, f"{which} with last values of {least:,.0f} to {most:,.0f} steps, leave some out")


def bootstrap_mean(values: np.ndarray, draws: int = 5000) -> np.ndarray:
    """Mean over runs of values [runs, ...] and its 95 % bootstrap interval, by percentiles: float64 [3, ...].

    Runs are drawn whole, so that a curve's points stay together. With few runs it is too narrow: of 2, 3, 4, 5 and 10
    normal runs it holds the true mean in 50, 75, 79, 83 and 90 % of cases (of two or three it is from the least to the
    greatest). One run has none: low and high are NaN.
    """
    count = len(values)
    mean = np.mean(values, axis=0)
    if count == 1:
        return np.stack([mean, mean * np.nan, mean * np.nan])
    shares = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), draws) / count
    return np.stack([mean, *np.quantile(np.tensordot(shares, values, 1), (0.025, 0.975), axis=0)])


# FILES AND PICTURES


def write_whole(out: str, ending: str, write: Callable[[Path], None]) -> None:
    """Calls write(path) on a temporary name of OUT and `ending`, then renames. Raises UsageError where it cannot."""
    path = Path(out.removesuffix(".png").removesuffix(".csv") + ending)
    try:
        with files.atomic_write(path) as temporary:
            write(temporary)
    except OSError as error:
        raise runs.UsageError(f"--out {out}: cannot write {path} ({error.strerror})") from None
    print(path)


def write_table(out: str, ending: str, columns: Iterable[str], rows: list[dict]) -> None:
    def write(temporary):
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(columns), extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)

    write_whole(out, ending, write)


def write_picture(out: str, ending: str, figure: plt.Figure) -> None:
    """Writes a figure, with the labels of all its panels as one legend below."""
    handles = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    handles = {k: handles[k] for k in sorted(handles, key=lambda label: label.startswith("evaluation"))}
    width = figure.get_figwidth()
    labels = [fill(label, int(width * 11)) for label in handles]
    columns = 1 if max(map(len, labels), default=0) > width * 5 else 2
    lines = sum(label.count("\n") + 1 for label in labels) / columns
    figure.set_figheight(figure.get_figheight() + max(0, 0.24 * (lines - 5)))  # a long legend takes little from panels
    figure.legend(handles.values(), labels, loc="outside lower center", ncols=columns, handlelength=4)
    write_whole(out, ending, lambda temporary: figure.savefig(temporary, format="png"))
    plt.close(figure)


def style_of(i: int) -> dict:
    """Colour, stroke and marker of the i-th group: to be told apart without colour too."""
    return {"color": COLORS[i % 7], "ls": STROKES[i % 5], "marker": MARKERS[i % 7], "ms": 5, "lw": 1.6}


def draw_band(axis, x: np.ndarray, low: np.ndarray, high: np.ndarray, color: str, alpha=0.15, **edges) -> None:
    """A light band [P] with distinct edges."""
    axis.fill_between(x, low, high, color=color, alpha=alpha, lw=0)
    for edge in (low, high):
        axis.plot(x, edge, **{"color": color, "lw": 0.5, "alpha": 0.8} | edges)


def draw_group(axis, group: list[Logged], clock: str, metric: str, args: Args, style: dict, label: str) -> None:
    """The mean of a group's runs with its interval, or its one run; on returns also the evaluations."""
    drawn = [(run, points) for run in group if (points := curve(run.lines, clock, metric)).size]
    curves = [points for _, points in drawn]
    if not curves and group:
        print(f"not drawn: {label}, which has no {metric}")
    if curves:
        grid, values = common_grid(curves, args.points if len(curves) == 1 else min(args.points, 120))
        mean, low, high = bootstrap_mean(values)
        label += f", {count([run for run, _ in drawn])}"
        if not grid.size:
            print(f"not drawn: {label}, whose {metric} has no {clock} in common")
        every = max(1, len(grid) // 8)
        axis.plot(grid, mean, **style, markevery=every, label=label, zorder=3, path_effects=HALO)
        if len(curves) > 1:
            draw_band(axis, grid, low, high, color=style["color"])
        for points in curves if args.each_run and len(curves) > 1 else ():
            axis.plot(*points, color=style["color"], lw=0.5, alpha=0.6)
    for levels, face in (("train", style["color"]), ("test", "w")) if metric == "charts/episodic_return" else ():
        key = f"eval/{levels}_levels/mean_return"
        found = [points for run in group if (points := curve(run.lines, clock, key)).size]
        if found:
            if len(found) < len(group):
                print(f"{label}: its evaluations on {levels} levels are of {len(found)} of {len(group)} runs")
            grid, values = common_grid(found, 20)
            edge = {"ms": 8, "mec": "k", "ls": "", "zorder": 4}
            axis.plot(grid, values.mean(axis=0), style["marker"], mfc=face, **edge)
            name = f"evaluation, {levels} levels"
            axis.plot([], [], "o", mfc="w" if face == "w" else "0.5", **edge, label=name)


def draw_curves(args: Args, groups: dict, games: list[str], references: dict) -> plt.Figure:
    """A panel for each metric, clock (steps, hours) and, unless lines are told apart by it, game."""
    clocks = ("global_step", "hours") if args.hours else ("global_step",)
    columns = [games] if "env_id" in [x.replace("-", "_") for x in args.group_by] else [[game] for game in games]
    panels = [(metric, clock, column) for metric in args.metrics for clock in clocks for column in columns]
    width = len(clocks) if len(columns) == 1 else min(4, len(columns))
    height = -(-len(panels) // width)
    size = (8, 12, 13, 15)[width - 1], 2 + 3 * height
    figure, axes = plt.subplots(height, width, figsize=size, squeeze=False, layout="constrained")
    last = max(run.lines[-1]["global_step"] for group in groups.values() for run in group)
    scripts = dict.fromkeys(run.script for group in groups.values() for run in group)
    steps = "decisions" if games == ["DoorGym"] else "environment steps"
    returns = first_return(args.metrics)
    for axis, (metric, clock, column) in zip(axes.flat, panels, strict=False):
        for i, (name, group) in enumerate(groups.items()):
            of_panel = [run for run in group if run.game in column]
            draw_group(axis, of_panel, clock, metric, args=args, style=style_of(i), label=name)
        if metric == returns and args.random is not None:
            axis.axhline(args.random, color="0.4", ls=":", label=f"random policy: {args.random:g}")
        shown = references if metric == returns and clock == "global_step" else {}
        names = {key: ", ".join(filter(None, key if len(column) > 1 else key[:1])) for key in references}
        for (label, game), points in shown.items():
            i = sorted(set(names.values())).index(names[label, game])
            style = {"marker": "h*<>"[i % 4], "ls": STROKES[i % 5], "color": "0.35", "mfc": "w", "ms": 5, "lw": 0.9}
            if game in ("", *column):
                axis.plot(*points[:, points[0] <= 1.3 * last], **style, label=names[label, game])
        axis.set(ylabel=LABELS.get(metric, metric).replace("_", " "), title=column[0] if len(columns) > 1 else "")
        axis.set(xlabel=steps if clock == "global_step" else "hours")
        if clock == "global_step":
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    title = f"{' and '.join(scripts)} on {games[0] if len(games) == 1 else f'{len(games)} games'}"
    figure.suptitle(fill(title, 70))
    return figure


# SCORES OVER GAMES

STATISTICS = {"iqm": "interquartile mean", "mean": "mean", "optimality_gap": "optimality gap (less is better)"}


def scores_of(name: str, group: list[Logged], games: list[str], metric: str) -> np.ndarray:
    """Normalised scores float64 [runs, games] of a group: (R - R_min) / (R_max - R_min), R a run's last `metric`.

    A game with more runs than another counts with those of the lowest seeds, as many as all games have.
    """
    scores = []
    for game in games:
        found = sorted((run for run in group if run.game == game), key=lambda run: run.args.get("seed", 0))
        of_game = f"--aggregate: the group {name!r}"
        runs.check(bool(found), f"{of_game} has no run of {game}, give each group runs of the same games")
        ends = [curve(run.lines, "global_step", metric)[:, -1:] for run in found]
        empty = " ".join(run.path for run, end in zip(found, ends, strict=True) if not end.size)
        runs.check(not empty, f"--score-metric {metric}: {empty} has logged none, leave it out or give another metric")
        steps, last = np.concatenate(ends, axis=1)
        check_lengths(steps, f"{of_game} has runs of {game}")
        modes = [run.args.get("distribution_mode", "easy") for run in found]
        known = all(game in RETURN_RANGES.get(mode, {}) for mode in modes)
        runs.check(known, f"--aggregate: {game} has no normalisation constants, give runs of Procgen's games")
        ranges = np.array([RETURN_RANGES[mode][game] for mode in modes])
        scores.append((last - ranges[:, 0]) / (ranges[:, 1] - ranges[:, 0]))
    return np.array([x[: min(map(len, scores))] for x in scores]).T


def aggregate(scores: dict[str, np.ndarray], taus: np.ndarray) -> tuple[dict, dict]:
    """Estimates with 95 % stratified bootstrap intervals of each group's scores [runs, games] (Agarwal et al. 2021,
    arXiv 2108.13264). With few runs these are too narrow, by sqrt(1 - 1 / runs): with two the true value is held in
    83 % of cases, and less often with few games.

    Returns by group: float64 [3 (value, low, high), 3 (STATISTICS)], and the performance profile float64 [3, taus], the
    share of runs that score above each tau. With one run a game low and high are NaN.
    """
    from rliable import library, metrics  # late: it takes a second

    functions = metrics.aggregate_iqm, metrics.aggregate_mean, metrics.aggregate_optimality_gap
    answers = []
    for measure in (lambda x: np.array([f(x) for f in functions]), lambda x: (x[..., None] > taus).mean(axis=(0, 1))):
        np.random.seed(0)  # noqa: NPY002 - what rliable draws from, whatever its random_state
        values, intervals = library.get_interval_estimates(scores, measure, reps=2000)
        hidden = {name: 0 if len(x) > 1 else np.nan for name, x in scores.items()}
        answers.append({name: np.stack([values[name], *(intervals[name] + hidden[name])]) for name in scores})
    return tuple(answers)


def draw_aggregate(estimates: dict, profiles: dict, taus: np.ndarray, names: dict[str, str]) -> plt.Figure:
    """The estimates [3, 3] of each group with their intervals above, the profiles [3, taus] below."""
    figure = plt.figure(figsize=(12, 4.5 + 0.45 * len(names)), layout="constrained")
    layout = [list(STATISTICS), ["profile"] * len(STATISTICS)]
    axes = figure.subplot_mosaic(layout, height_ratios=[1 + 0.45 * len(names), 4])
    for i, (name, label) in enumerate(names.items()):
        style = style_of(i)
        for j, statistic in enumerate(STATISTICS):
            value, low, high = estimates[name][:, j]
            axes[statistic].plot([low, high], [i, i], color=style["color"], ls=style["ls"], lw=2)
            axes[statistic].plot([low, high], [i, i], "|", color=style["color"], ms=10, mew=2)
            axes[statistic].plot(value, i, style["marker"], color=style["color"], mec="k", ms=9)
        axes["profile"].plot(taus, profiles[name][0], **style, markevery=(i * 3 % 16, 16), label=label)
        draw_band(axes["profile"], taus, *profiles[name][1:], color=style["color"])
    for i, (statistic, title) in enumerate(STATISTICS.items()):
        axes[statistic].set(title=title, ylim=(len(names) - 0.5, -0.5))
        axes[statistic].set_yticks(range(len(names)), [fill(x, 30) for x in names] if i == 0 else [""] * len(names))
    axes["profile"].set(title="performance profile", xlabel="normalised score x", ylabel="share of runs above x")
    return figure


def write_aggregate(args: Args, groups: dict, games: list[str], scores: dict[str, np.ndarray]) -> None:
    """Writes the table and the picture of normalised scores [runs, games] by group; prints their mean over games."""
    top = max(1.0, *(x.max() for x in scores.values()))
    taus = np.linspace(min(0.0, *(x.min() for x in scores.values())), top, 101)
    estimates, profiles = aggregate(scores, taus)
    rows, after = [], {}
    for (name, x), group in zip(scores.items(), groups.values(), strict=True):
        where = {"group": name, "game": "all", "runs": len(x)}
        blocks = [(where | {"statistic": s}, estimates[name][:, i]) for i, s in enumerate(STATISTICS)]
        each = bootstrap_mean(x)
        blocks += [(where | {"statistic": "mean", "game": game}, each[:, i]) for i, game in enumerate(games)]
        rows += [
            row | {k: f"{v:.6g}" for k, v in zip(("value", "low", "high"), numbers, strict=True) if v == v}
            for row, numbers in blocks
        ]
        left = f", {len(group) - x.size} more left out" if len(group) > x.size else ""
        ends = [curve(run.lines, "global_step", args.score_metric)[0, -1] for run in group]
        after[name] = " to ".join(dict.fromkeys(f"{end:,.0f}" for end in (min(ends), max(ends))))
        print(
            f"{name}: mean normalised score {x.mean():.4f} over {len(games)} games after {after[name]} steps, "
            f"{len(x)} runs of each{left}"
        )
    columns = "group", "game", "statistic", "value", "low", "high", "runs"
    write_table(args.out, "_aggregate.csv", columns, rows)
    labels = {name: f"{name}, {len(x)} runs of each game, {after[name]} steps" for name, x in scores.items()}
    figure = draw_aggregate(estimates, profiles, taus, labels)
    figure.suptitle(f"{args.score_metric} over {len(games)} games: {', '.join(games)}")
    write_picture(args.out, "_aggregate.png", figure)


def check_out(out: str) -> None:
    """Raises UsageError if OUT is no beginning of names of files."""
    runs.check(Path(out).name != "" and not out.endswith("/"), f"--out {out!r}: give the name of a file, such as curve")


def main(args: Args) -> None:
    check_out(args.out)
    runs.check(len(args.metrics) > 0, "--metrics: give at least one, such as charts/episodic_return")
    runs.check(args.random is None or abs(args.random) < 1e15, f"--random {args.random}: give a return, such as 0.9")
    runs.check_needs(args, args.aggregate, "--aggregate", ["score_metric"])
    scored = not args.aggregate or importlib.util.find_spec("rliable")
    runs.check(bool(scored), "--aggregate: needs rliable; run make .venv/with-dev")
    everything = read_runs(args.run_dirs)
    everything = drop_repeats(everything)
    groups = group_runs(everything, args.group_by)
    games = list(dict.fromkeys(run.game for run in everything))
    runs.check(
        args.random is None or len(games) == 1, f"--random {args.random}: is of one game, these are {len(games)}"
    )
    for name, given in (("random", args.random is not None), ("reference", len(args.reference) > 0)):
        fits = not given or first_return(args.metrics) is not None
        runs.check(fits, f"--{name}: is of returns, give one in --metrics, such as charts/episodic_return")
    check_metrics("--metrics", args.metrics, everything)
    stems = [Path(name).stem for name in args.reference]
    same = len(set(stems)) == len(stems)
    runs.check(same, f"--reference {' '.join(args.reference)}: a file's name names its line, give each its own")
    references = {k: points for name in args.reference for k, points in read_reference(name, games).items()}
    if args.aggregate:
        check_metrics("--score-metric", [args.score_metric], everything)
        scores = {name: scores_of(name, group, games, args.score_metric) for name, group in groups.items()}
        write_aggregate(args, groups, games, scores)
    columns = COLUMNS | {metric: metric for metric in args.metrics if metric not in COLUMNS}
    rows = []
    for group in groups.values():
        for run in group:
            where = {"script": run.script, "flags": run.flags, "seed": run.args.get("seed", ""), "game": run.game}
            for line in thin(run.lines, args.points):
                numbers = {short: f"{line[k]:.6g}" for k, short in columns.items() if k in line}
                rows.append(where | {"hours": f"{line['hours']:.4f}"} | numbers)
    known = ["script", "flags", "seed", *(["game"] if len(games) > 1 else []), "hours", *columns.values()]
    write_table(args.out, ".csv", [name for name in known if any(name in row for row in rows)], rows)
    write_picture(args.out, ".png", draw_curves(args, groups, games, references))


if __name__ == "__main__":
    runs.cli(Args, main)
