"""Plots learning curves of runs, and scores over games, and writes the numbers as CSV. Try:

    python -m experiments.plot runs/bigfish* --out experiments/results/bigfish --reference easy-all
    python -m experiments.plot runs/*__* --group-by encoder --aggregate --out encoders

A line is the mean over a group of runs (by default, of one script and with the same flags but for the seed) with its
95 % bootstrap interval. It ends where the first of its runs ends. A run that was resumed with other flags counts with
the last ones. Returns on easy levels have a dotted line for random play.
"""

import importlib
import importlib.util
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Annotated, NamedTuple, NotRequired

import matplotlib as mpl
import numpy as np
import tyro
from pydantic import BeforeValidator, ConfigDict, Field, FiniteFloat
from typing_extensions import TypedDict

import evaluate
from common import files, runs, tracking
from common.envs import RANDOM_RETURNS, RETURN_RANGES
from common.flags import PositiveInt
from experiments import records, trials

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patheffects import Normal, Stroke
from matplotlib.ticker import EngFormatter

REFERENCE = Path(__file__).parent / "reference" / "openai_ppo_procgen_curves.csv"
REFERENCES = "easy-all", "easy-200-train", "easy-200-test", "hard-all", "hard-500-train", "hard-500-test"
COLUMNS = {  # of the CSV; other metrics that are drawn are added under their own names
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
# Okabe and Ito's colours, in an order in which neighbours differ in grey too; with five strokes, 35 pairs.
COLORS = "#0072B2", "#E69F00", "#000000", "#D55E00", "#56B4E9", "#009E73", "#CC79A7"
STROKES = "-", (0, (5, 2)), (0, (1, 1.3)), (0, (6, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1))
MARKERS = "o", "s", "^", "D", "v", "P", "X"
HALO = [Stroke(linewidth=3.5, foreground="w"), Normal()]  # sets a line off from the edges of bands
plt.rcParams |= {"font.size": 10, "legend.fontsize": 9, "axes.grid": True, "grid.alpha": 0.3, "savefig.dpi": 120}
plt.rcParams["text.parse_math"] = False  # a $ in a name starts no TeX formula


@dataclass(frozen=True)
class Args:
    run_dirs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN_DIRS")]
    """run directories; each game gets a panel"""
    out: str = "curve"
    """writes OUT.csv and OUT.png"""
    group_by: tuple[str, ...] = ()
    """flags, script or env_id that define groups; by default all flags but env_id, seed, length, logging"""
    reference: tuple[str, ...] = ()
    """curves to add: OpenAI's PPO, such as easy-all or hard-500-test, or CSV files of env_steps, mean_return"""
    time_to: str = ""
    """print when runs reach OpenAI's score at 25M steps (hard: 200M): easy-all, easy-200-train, hard-all, ..."""
    hours: bool = False
    """draw the curves over hours of training too"""
    metrics: tuple[str, ...] = ("charts/episodic_return",)
    """logged metrics to draw, such as charts/episodic_return charts/intrinsic_reward"""
    each_run: bool = False
    """also draw each run of a group, thin"""
    points: PositiveInt = 400
    """approximate number of points per line, and of rows per run in the CSV; a mean over runs has at most 120"""
    aggregate: bool = False
    """score the groups over all games with rliable: OUT_aggregate.csv and OUT_aggregate.png"""
    score_metric: str = "eval/test_levels/mean_return"
    """return whose last value --aggregate takes, normalised with train-procgen's constants"""


class Logged(NamedTuple):
    """A run as it was saved; `lines` are those of metrics.jsonl, with `hours` of the run's own clock."""

    path: str
    script: str
    game: str
    args: dict
    lines: list[dict]
    devices: str
    flags: str = ""  # those that define its group


# RUNS


class SavedArgs(TypedDict, total=False):
    """The arguments of a run that are read here."""

    __pydantic_config__ = ConfigDict(extra="allow")
    env_id: str
    seed: int
    num_levels: Annotated[int, Field(ge=0)]
    distribution_mode: str


class Saved(TypedDict):
    """A run's args.json; older ones have env_id in the arguments only."""

    script: str
    env_id: NotRequired[str]
    devices: NotRequired[str]
    args: SavedArgs


def read_runs(run_dirs: Sequence[str]) -> list[Logged]:
    """Reads run directories; raises UsageError if there are none, one is no run, or one is given twice."""
    runs.check(len(run_dirs) > 0, "RUN_DIRS: give at least one run directory")
    everything, seen = [], {}
    for run_dir in run_dirs:
        everything.append(read_run(run_dir))
        stat = Path(run_dir).stat()
        first = seen.setdefault((stat.st_dev, stat.st_ino), run_dir)
        runs.check(len(seen) == len(everything), f"RUN_DIRS {run_dir}: is the same run as {first}, give it once")
    return everything


def read_run(run_dir: str) -> Logged:
    """Reads a run directory; raises UsageError if there is none, or nothing was logged."""
    content = files.read(Path(run_dir, "args.json"), Saved, "RUN_DIRS", "give run directories")
    clocks = "global_step", "seconds"
    lines = [
        line | {"hours": line["seconds"] / 3600}
        for line in trials.iter_metrics(Path(run_dir))
        if all(0 <= line.get(clock, -1) < 1e15 for clock in clocks)
    ]
    runs.check(len(lines) > 0, f"RUN_DIRS {run_dir}: has no line of metrics yet, give runs that have logged something")
    game = content["args"].get("env_id") or content.get("env_id") or Path(run_dir).resolve().name.split("__")[0]
    args = {name: tracking.as_number(value) for name, value in content["args"].items()}  # 5e-4 is 0.0005
    return Logged(run_dir, content["script"], game, args, lines, content.get("devices", ""))


def default_of(script: str, name: str) -> object:
    """A flag's default in today's script; None if there is no such script or flag."""
    args = getattr(importlib.import_module(script), "Args", None) if f"{script}.py" in trials.SCRIPTS else None
    default = getattr(args, name, None)
    return list(default) if isinstance(default, tuple) else tracking.as_number(default)  # as JSON has it


def value_of(run: Logged, name: str) -> object:
    """A run's argument; an older run that lacks it has today's default."""
    return run.args[name] if name in run.args else default_of(run.script, name)


def differing(run: Logged, everything: list[Logged]) -> list[str]:
    """Names of the arguments in which this script's runs differ, except game, seed, length and NEUTRAL_FLAGS."""
    runs_of_script = [other for other in everything if other.script == run.script]
    names = dict.fromkeys(name for other in runs_of_script for name in other.args)
    same = trials.NEUTRAL_FLAGS | {"env_id", "seed", "total_timesteps", "capture_video"}

    def differs(name):
        values = [value_of(other, name) for other in runs_of_script]
        return any(value != values[0] for value in values)

    return [name for name in names if name not in same and differs(name)]


def drop_repeats(everything: list[Logged]) -> list[Logged]:
    """Keeps the longest of the runs with the same flags, game, devices and seed, and prints the others, which are
    beginnings of it. Runs of IMPALA, Ape-X and SAC are all kept unless made with --deterministic or --max-lag 0."""
    longest = {}
    for run in everything:
        exact = run.args.get("deterministic", True) or run.args.get("max_lag") == 0
        seed = run.args.get("seed", run.path) if exact else run.path
        flags = [value_of(run, name) for name in differing(run, everything)]
        key = json.dumps([run.script, run.game, run.devices, seed, *flags])
        first = longest.setdefault(key, run)
        if first is not run:
            shorter, longer = sorted((first, run), key=lambda each: each.lines[-1]["global_step"])
            print(f"left out: {shorter.path}, with the seed and flags of {longer.path}")
            longest[key] = longer
    return list(longest.values())


def group_runs(everything: list[Logged], group_by: tuple[str, ...]) -> dict[str, list[Logged]]:
    """Groups of runs by their names, such as "ppo_procgen, pool avg", in the given order."""
    known = {"script": "script", "env_id": "env_id"} | {k.rstrip("_"): k for run in everything for k in run.args}
    unknown = [name for name in group_by if name.replace("-", "_") not in known]
    runs.check(not unknown, f"--group-by {' '.join(unknown)}: no run has it, give some of {' '.join(sorted(known))}")
    groups = {}
    for run in everything:
        chosen = [known[name.replace("-", "_")] for name in group_by] or ["script", *differing(run, everything)]
        values = {k: run.game if k == "env_id" else value_of(run, k) for k in chosen if k != "script"}
        flags = " ".join(f"{k} {'none' if value is None else value}" for k, value in values.items())
        name = ", ".join(filter(None, (run.script if "script" in chosen else "", flags))) or "all runs"
        groups.setdefault(name, []).append(run._replace(flags=flags))
    return groups


def describe_count(group: list[Logged]) -> str:
    """The number of runs of a group per game: "seed 1", "3 runs", "2 to 3 runs"."""
    counts = Counter(run.game for run in group).values()
    seeds = {run.args.get("seed") for run in group}
    if len(seeds) == max(counts) == 1:
        return f"seed {seeds.pop()}"
    return f"{min(counts)} to {max(counts)} runs" if min(counts) < max(counts) else f"{max(counts)} runs"


def check_metrics(flag: str, metrics: Iterable[str], everything: list[Logged]) -> None:
    """Raises UsageError if no run has logged one of these."""
    logged = {name for run in everything for line in run.lines for name in line} - {"time"}
    unknown = " ".join(name for name in metrics if name not in logged)
    runs.check(not unknown, f"{flag} {unknown}: no run has logged that, give some of {' '.join(sorted(logged))}")


def first_return(metrics: Sequence[str]) -> str | None:
    """The first metric that is a return, in whose panel random play and references are drawn."""
    return next((name for name in metrics if name == "charts/episodic_return" or name.endswith("/mean_return")), None)


Number = Annotated[FiniteFloat, BeforeValidator(float)]


class Point(TypedDict):
    """A row of a published curve."""

    env_steps: Number
    mean_return: Number
    split: NotRequired[str]
    game: NotRequired[str]


def read_reference(name: str, games: list[str], flag: str = "--reference") -> dict[tuple[str, str], np.ndarray]:
    """Reads published curves, float64 [2, points] (steps, return), by label and game ("" for any)."""
    path, own = (REFERENCE, "OpenAI's PPO") if name in REFERENCES else (Path(name), Path(name).stem)
    valid = f"give {', '.join(REFERENCES)} or a CSV with columns env_steps and mean_return"
    curves = {}
    for row in files.read(path, list[Point], flag, valid):
        if path != REFERENCE or row["split"] == name:
            label = ", ".join(filter(None, (own, row.get("split"))))
            curves.setdefault((label, row.get("game", "")), []).append((row["env_steps"], row["mean_return"]))
    curves = {key: np.array(sorted(points)).T for key, points in curves.items() if key[1] in ("", *games)}
    runs.check(bool(curves), f"{flag} {name}: has no curve of {' or '.join(games)}, give one that has")
    return curves


# NUMBERS


def thin(lines: list[dict], points: int) -> list[dict]:
    """Keeps every n-th line (about `points`), the last, and each with an evaluation."""
    every = -(-len(lines) // points)  # rounded up
    last = len(lines) - 1
    return [x for i, x in enumerate(lines) if i % every == 0 or i == last or any(k.startswith("eval/") for k in x)]


def curve(lines: list[dict], x: str, metric: str) -> np.ndarray:
    """A metric over `x` (global_step or hours), float64 [2, points]."""
    # Matplotlib's axes take no larger number.
    points = [(line[x], line[metric]) for line in lines if abs(line.get(metric, np.nan)) < 1e100]
    return np.array(points, np.float64).reshape(-1, 2).T


def common_grid(curves: list[np.ndarray], points: int) -> tuple[np.ndarray, np.ndarray]:
    """Interpolates curves [2, any length] on a grid [P], P <= points: the x of the one with the fewest points, within
    the range that all cover.

    Returns the grid and the values float64 [runs, P]; P may be 0. Runs log at slightly different steps, so a curve is
    held constant for up to 2 % before its first and after its last point.
    """
    first, last = 0.98 * max(x[0] for x, _ in curves), 1.02 * min(x[-1] for x, _ in curves)
    grid = min((x for x, _ in curves), key=len)
    grid = grid[(first <= grid) & (grid <= last)]
    grid = grid[np.unique(np.linspace(0, len(grid) - 1, min(points, len(grid))).round().astype(int))]
    return grid, np.array([np.interp(grid, x, y) for x, y in curves]).reshape(len(curves), len(grid))


def bootstrap_mean(values: np.ndarray, draws: int = 5000) -> np.ndarray:
    """Mean over runs of values [runs, ...] and its 95 % percentile bootstrap interval: float64 [3, ...].

    Whole runs are resampled, so that a curve's points stay together. With few runs the interval is too narrow: for 2,
    3, 4, 5 and 10 normal runs it covers the true mean in 50, 75, 79, 83 and 90 % of cases. For one run, it is NaN.
    """
    count = len(values)
    mean = np.mean(values, axis=0)
    if count == 1:
        return np.stack([mean, mean * np.nan, mean * np.nan])
    shares = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), draws) / count
    return np.stack([mean, *np.quantile(np.tensordot(shares, values, 1), (0.025, 0.975), axis=0)])


def times_to(name: str, everything: list[Logged], games: list[str]) -> list[dict]:
    """A row for each run: the step and the minutes of training at which the mean return of its last 100 episodes first
    reached what OpenAI's PPO has after 25M steps (hard: 200M); "" if it never did."""
    length = 25e6 if name.startswith("easy") else 200e6
    published = read_reference(name, games, "--time-to")
    targets = {game: np.interp(length, *points) for (_, game), points in published.items()}
    rows = []
    for run in everything:
        runs.check(run.game in targets, f"--time-to {name}: has no curve of {run.game}, leave {run.path} out")
        # Until all environments have reached their time limit, only early ends count: in heist and maze, successes.
        lines = [line for line in run.lines if line["global_step"] >= 1000 * run.args.get("num_envs", 64)]
        above = [x for x in lines if x.get("charts/episodic_return", -np.inf) >= targets[run.game]]
        row = {"game": run.game, "script": run.script, "seed": run.args.get("seed", "")}
        row |= {"score": f"{targets[run.game]:.1f}", "steps": f"{above[0]['global_step']:,}" if above else ""}
        rows.append(row | {"minutes": f"{60 * above[0]['hours']:.1f}" if above else "", "devices": run.devices})
    return rows


# FILES AND PICTURES


def write_output(out: str, ending: str, write: Callable[[Path], None]) -> None:
    """Writes OUT with an ending atomically: write(path) gets a temporary name. Raises UsageError where it cannot."""
    path = Path(out.removesuffix(".png").removesuffix(".csv") + ending)
    try:
        with files.atomic_write(path) as temporary:
            write(temporary)
    except OSError as error:
        raise runs.UsageError(f"--out {out}: cannot write {path} ({error.strerror})") from None
    print(path)


def write_table(out: str, ending: str, columns: Collection[str], rows: list[dict]) -> None:
    """Writes these columns of the rows to a CSV file."""
    table = [{name: row.get(name, "") for name in columns} for row in rows]
    write_output(out, ending, lambda temporary: records.write_rows(temporary, table))


def write_picture(out: str, ending: str, figure: plt.Figure) -> None:
    """Writes a figure with one legend for all its panels, below them."""
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
    write_output(out, ending, lambda temporary: figure.savefig(temporary, format="png"))
    plt.close(figure)


def style_of(i: int) -> dict:
    """Colour, stroke and marker of the i-th group, distinct without colour too."""
    return {"color": COLORS[i % 7], "ls": STROKES[i % 5], "marker": MARKERS[i % 7], "ms": 5, "lw": 1.6}


def draw_band(axis, x: np.ndarray, low: np.ndarray, high: np.ndarray, color: str, alpha=0.15, **edges) -> None:
    """Draws a light band [P] with distinct edges."""
    axis.fill_between(x, low, high, color=color, alpha=alpha, lw=0)
    for edge in (low, high):
        axis.plot(x, edge, **{"color": color, "lw": 0.5, "alpha": 0.8} | edges)


def draw_group(axis, group: list[Logged], clock: str, metric: str, args: Args, style: dict, label: str) -> None:
    """Draws the mean over a group with its interval; for episodic returns, also the evaluations."""
    drawn = [(run, points) for run in group if (points := curve(run.lines, clock, metric)).size]
    curves = [points for _, points in drawn]
    if not curves and group:
        print(f"not drawn: {label}, which has no {metric}")
    if curves:
        grid, values = common_grid(curves, args.points if len(curves) == 1 else min(args.points, 120))
        mean, low, high = bootstrap_mean(values)
        label += f", {describe_count([run for run, _ in drawn])}"
        if grid.size:
            every = max(1, len(grid) // 8)
            axis.plot(grid, mean, **style, markevery=every, label=label, zorder=3, path_effects=HALO)
        else:
            print(f"not drawn: {label}, whose {metric} has no {clock} in common")
        if grid.size and len(curves) > 1:
            draw_band(axis, grid, low, high, color=style["color"])
        if args.each_run and len(curves) > 1:
            for points in curves:
                axis.plot(*points, color=style["color"], lw=0.5, alpha=0.6)
    if metric != "charts/episodic_return":
        return
    for levels, face in (("train", style["color"]), ("test", "w")):
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
    """A panel for each metric, clock (steps, hours) and, unless --group-by has env_id, game."""
    clocks = ("global_step", "hours") if args.hours else ("global_step",)
    columns = [games] if "env_id" in [x.replace("-", "_") for x in args.group_by] else [[game] for game in games]
    panels = [(metric, clock, column) for metric in args.metrics for clock in clocks for column in columns]
    width = len(clocks) if len(columns) == 1 else min(4, len(columns))
    height = -(-len(panels) // width)
    size = (8, 12, 13, 15)[width - 1], 2 + 3 * height
    figure, axes = plt.subplots(height, width, figsize=size, squeeze=False, layout="constrained")
    every_run = [run for group in groups.values() for run in group]
    last = max(run.lines[-1]["global_step"] for run in every_run)
    scripts = dict.fromkeys(run.script for run in every_run)
    steps = "decisions" if games == ["DoorGym"] else "environment steps"
    returns = first_return(args.metrics)
    easy = {run.game for run in every_run if run.args.get("distribution_mode") == "easy"} & RANDOM_RETURNS.keys()
    for axis, (metric, clock, column) in zip(axes.flat, panels, strict=False):
        for i, (name, group) in enumerate(groups.items()):
            of_panel = [run for run in group if run.game in column]
            draw_group(axis, of_panel, clock, metric, args=args, style=style_of(i), label=name)
        for game in column:
            if metric == returns and game in easy:
                axis.axhline(RANDOM_RETURNS[game], color="0.4", ls=":", label="random play")
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
    """A group's normalised scores float64 [runs, games]: (R - R_min) / (R_max - R_min), R a run's last `metric`.

    All games count with as many runs as the one with the fewest, those with the lowest seeds.
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
        same = max(steps) <= 1.02 * min(steps)
        span = f"{min(steps):,.0f} to {max(steps):,.0f} steps"
        runs.check(same, f"{of_game} has runs of {game} whose last values are at {span}, leave some out")
        modes = [run.args.get("distribution_mode", "easy") for run in found]
        known = all(game in RETURN_RANGES.get(mode, {}) for mode in modes)
        runs.check(known, f"--aggregate: {game} has no normalisation constants, give runs of Procgen's games")
        ranges = np.array([RETURN_RANGES[mode][game] for mode in modes])
        scores.append((last - ranges[:, 0]) / (ranges[:, 1] - ranges[:, 0]))
    return np.array([x[: min(map(len, scores))] for x in scores]).T


def aggregate(scores: dict[str, np.ndarray], taus: np.ndarray) -> tuple[dict, dict]:
    """Estimates of each group's scores [runs, games] with 95 % stratified bootstrap intervals (Agarwal et al. 2021,
    arXiv 2108.13264). With few runs these are too narrow, by a factor sqrt(1 - 1 / runs): with two they cover the
    true value in 83 % of cases, and in fewer with few games.

    Returns by group: float64 [3 (value, low, high), 3 (STATISTICS)], and the performance profile float64 [3, taus], the
    fraction of runs that score above each tau. With one run per game, low and high are NaN.
    """
    from rliable import library, metrics  # slow to import

    functions = metrics.aggregate_iqm, metrics.aggregate_mean, metrics.aggregate_optimality_gap
    answers = []
    for measure in (lambda x: np.array([f(x) for f in functions]), lambda x: (x[..., None] > taus).mean(axis=(0, 1))):
        np.random.seed(0)  # noqa: NPY002 - what rliable draws from, whatever its random_state
        values, intervals = library.get_interval_estimates(scores, measure, reps=2000)
        hidden = {name: 0 if len(x) > 1 else np.nan for name, x in scores.items()}
        answers.append({name: np.stack([values[name], *(intervals[name] + hidden[name])]) for name in scores})
    return tuple(answers)


def draw_aggregate(estimates: dict, profiles: dict, taus: np.ndarray, names: dict[str, str]) -> plt.Figure:
    """Draws the estimates [3, 3] of each group above, the profiles [3, taus] below."""
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
    axes["profile"].set(title="performance profile", xlabel="normalised score x", ylabel="fraction of runs above x")
    return figure


def write_aggregate(args: Args, groups: dict, games: list[str], scores: dict[str, np.ndarray]) -> None:
    """Writes the table and the plot of each group's normalised scores [runs, games]; prints their mean."""
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
            row | {k: f"{v:.6g}" for k, v in zip(("value", "low", "high"), numbers, strict=True) if not np.isnan(v)}
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


def check_args(args: Args) -> None:
    """Raises UsageError."""
    named = Path(args.out).name != "" and not args.out.endswith("/")
    runs.check(named, f"--out {args.out!r}: give the name of a file, such as curve")
    runs.check(len(args.metrics) > 0, "--metrics: give at least one, such as charts/episodic_return")
    fits = not args.reference or first_return(args.metrics) is not None
    runs.check(fits, "--reference: is of returns, give one in --metrics, such as charts/episodic_return")
    training = [name for name in REFERENCES if not name.endswith("-test")]
    valid = f"give {', '.join(training)}"
    runs.check(args.time_to in ("", *training), f"--time-to {args.time_to}: has no training curve, {valid}")
    same = len({Path(name).stem for name in args.reference}) == len(args.reference)
    legend = "two would have the same name in the legend, give each its own"
    runs.check(same, f"--reference {' '.join(args.reference)}: {legend}")
    runs.check_needs(args, args.aggregate, "--aggregate", ["score_metric"])
    scored = not args.aggregate or importlib.util.find_spec("rliable") is not None
    runs.check(scored, "--aggregate: needs rliable; run make .venv/with-dev")


def write_curves(args: Args, groups: dict, games: list[str]) -> None:
    """Writes OUT.csv: the logged numbers of each run."""
    columns = COLUMNS | {metric: metric for metric in args.metrics if metric not in COLUMNS}
    rows = []
    for group in groups.values():
        for run in group:
            where = {"script": run.script, "flags": run.flags, "seed": run.args.get("seed", ""), "game": run.game}
            for line in thin(run.lines, args.points):
                numbers = {short: f"{line[name]:.6g}" for name, short in columns.items() if name in line}
                rows.append(where | {"hours": f"{line['hours']:.4f}"} | numbers)
    known = ["script", "flags", "seed", *(["game"] if len(games) > 1 else []), "hours", *columns.values()]
    write_table(args.out, ".csv", [name for name in known if any(name in row for row in rows)], rows)


def main(args: Args) -> None:
    check_args(args)
    everything = drop_repeats(read_runs(args.run_dirs))
    groups = group_runs(everything, args.group_by)
    games = list(dict.fromkeys(run.game for run in everything))
    check_metrics("--metrics", args.metrics, everything)
    references = {k: points for name in args.reference for k, points in read_reference(name, games).items()}
    if args.aggregate:
        check_metrics("--score-metric", [args.score_metric], everything)
        scores = {name: scores_of(name, group, games, args.score_metric) for name, group in groups.items()}
        write_aggregate(args, groups, games, scores)
    if args.time_to:
        evaluate.show(f"--time-to {args.time_to}", times_to(args.time_to, everything, games))
    write_curves(args, groups, games)
    write_picture(args.out, ".png", draw_curves(args, groups, games, references))


if __name__ == "__main__":
    runs.cli(Args, main)
