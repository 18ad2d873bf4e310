"""Runs the cells of a published table that are missing, and puts our numbers beside the published ones. Try:

    python -m experiments.reproduce coinrun_ppo_grid --seeds 1 2 3
    python -m experiments.reproduce coinrun_ppo_grid --scale 0.15 --set encoder=nature downsample=auto --jobs 2
    python -m experiments.reproduce coinrun_ppo_grid --collect

experiments/reference/tables.csv has the published numbers: a row for each cell, with the script, flags and steps that
stand for it here. Stopped or killed and started again it resumes; runs are found by their flags, steps and seed.
Earlier results of runs that are gone or on other machines are kept; of runs of different lengths, the longer count.
"""

import contextlib
import hashlib
import json
import shlex
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Annotated, NamedTuple, NotRequired

import numpy as np
import tyro
from annotated_types import Interval
from matplotlib.figure import Figure
from pydantic import BeforeValidator, ConfigDict, Field, FiniteFloat, NonNegativeInt
from scipy import stats
from typing_extensions import TypedDict

from common import files, runs
from common.files import check
from common.flags import Iterations, Seed
from experiments import records, trials
from experiments.trials import ORIGIN, merge_origins

REFERENCE = Path(__file__).parent / "reference" / "tables.csv"
RETURN = "charts/episodic_return"


@dataclass(frozen=True)
class Args:
    table: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TABLE")]
    """name of a table, such as coinrun_ppo_grid (all: experiments/reference/tables.csv)"""
    scale: Annotated[float, Interval(gt=0, le=100)] = 1.0
    """multiple of the table's environment steps to train for, such as 0.1 for a tenth"""
    seeds: tuple[Seed, ...] = (1, 2, 3)
    """seeds; each cell is run once per seed"""
    cells: tuple[str, ...] = ()
    """cells to run, by name or by a part of their names; all if none is given"""
    jobs: Iterations = 1
    """runs at a time"""
    set: tuple[str, ...] = ()
    """flags of every run as name=value, in place of the table's where it has them, such as encoder=nature"""
    collect: bool = False
    """run nothing, only gather the runs that are done"""
    runs: str = "runs/tables"
    """folder of the runs"""
    out: str = "runs/tables"
    """folder of TABLE.csv, .md, .png, of evaluations and training curves; ours are in experiments/results"""


# CELLS


class Cell(NamedTuple):
    """A cell of a table; its runs are in folder/<seed>."""

    row: dict[str, str]  # of tables.csv
    flags: dict  # of its runs, without the seed; empty if it has no script
    folder: Path
    selected: bool  # by --cells

    @property
    def steps(self) -> int | None:
        """Environment steps of a run."""
        return next((value for name, value in self.flags.items() if name.endswith("_timesteps")), None)


def read_table(name: str) -> list[dict]:
    """The rows of one table; raises UsageError."""
    rows = records.read_rows(REFERENCE)
    names = dict.fromkeys(row["table"] for row in rows)
    check(name in names, f"TABLE {name}: give one of {', '.join(names)}")
    return [row for row in rows if row["table"] == name]


def selected_names(cells: tuple[str, ...], rows: list[dict]) -> set[str]:
    """The names of the cells that --cells selects; raises UsageError if a part of it selects none."""
    names = [row["cell"] for row in rows]
    selected = set()
    for part in cells or [""]:
        found = {part} if part in names else {name for name in names if part in name}
        check(bool(found), f"--cells {part}: no cell's name contains it, give a part of one, such as {names[0]!r}")
        selected |= found
    return selected


def flags_of(row: dict, args: Args) -> dict:
    """The flags of a cell's runs but for the seed; raises UsageError if the script lacks one."""
    flags = trials.read_settings(row["flags"].split()) | trials.read_settings(args.set)
    steps = "task_timesteps" if row["script"] == "hnppo_doorgym.py" else "total_timesteps"
    flags[steps] = max(1, round(int(row["steps"]) * args.scale))
    trials.check_flags(f"TABLE {args.table}", row["script"], flags)
    return flags


def check_overrides(args: Args, rows: list[dict]) -> None:
    """Raises UsageError if --set has a flag that a script lacks, that each run is given, or in which cells differ;
    exits as a script would that refuses a value."""
    given, selected = trials.read_settings(args.set), selected_names(args.cells, rows)
    rows = [row for row in rows if row["script"]]
    for program in {row["script"] for row in rows}:
        trials.check_flags("--set", program, given, own=("seed",))
    own = [trials.read_settings(row["flags"].split()) for row in rows]
    for name, value in given.items():
        check(not name.endswith("_timesteps"), f"--set {name}={value}: the table sets the steps, give --scale")
        same = len({flags.get(name) for flags in own}) == 1
        check(same, f"--set {name}={value}: cells of {args.table} differ in it, give another flag")
    for row in rows:
        if given and row["cell"] in selected:
            trials.check_values(row["script"], flags_of(row, args))


def read_cells(args: Args) -> list[Cell]:
    """All cells of a table; raises UsageError, or exits as a script would that refuses a value of --set."""
    rows = read_table(args.table)
    selected = selected_names(args.cells, rows)
    check_overrides(args, rows)
    cells = []
    for row in rows:
        flags = flags_of(row, args) if row["script"] else {}
        text = json.dumps([row["script"], sorted((name, str(value)) for name, value in flags.items())])
        name = f"{Path(row['script']).stem}__{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        cells.append(Cell(row, flags, Path(args.runs).absolute() / name, row["cell"] in selected))
    return cells


# RUNS

LOCKED = "another process is running it"
STOPPED = "stopped"


class Progress(TypedDict):
    """progress.json: whether a run is done, why it failed, its training time, and its origin."""

    done: bool
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    why: str
    machine: NotRequired[str]
    jax: NotRequired[str]
    commit: NotRequired[str]
    date: NotRequired[str]


def read_progress(folder: Path) -> Progress:
    """A run's progress.json; raises UsageError if it is damaged."""
    path = folder / "progress.json"
    if not path.exists():
        return {"done": False, "seconds": 0.0, "why": ""}
    return files.read(path, Progress, "--runs", "delete it, and the run resumes from its checkpoint")


def read_runs(cell: Cell) -> list[tuple[int, Progress, list[dict]]]:
    """Seed, progress and metrics of a cell's runs so far, also of seeds that are not asked for now."""
    seeds = sorted(int(path.name) for path in cell.folder.glob("*") if path.name.isdecimal()) if cell.flags else []
    folders = [cell.folder / str(seed) for seed in seeds]
    return [(int(path.name), read_progress(path), trials.read_metrics(trials.find_run(path))) for path in folders]


def train(cell: Cell, seed: int, stopping: Event) -> str:
    """Runs or resumes a cell's script and records how it ended; returns "done", "done elsewhere", LOCKED, STOPPED or
    the error."""
    folder = cell.folder / str(seed)
    with files.lock_run(folder) or contextlib.nullcontext() as lock:
        before = read_progress(folder)
        if before["done"]:
            return "done elsewhere"
        if lock is None:
            return LOCKED
        origin = merge_origins(before, trials.origin())
        runs.write_json(folder / "progress.json", before | origin)  # also of a session that is killed
        done, why = False, ""
        try:
            trials.run(cell.row["script"], cell.flags | {"seed": seed}, folder, lock, stopping)
            done = True
        except trials.Stopped:
            pass
        except files.FullError:  # not the cell's fault
            raise
        except RuntimeError as error:
            why = str(error)
        progress = {"done": done, "seconds": trials.seconds_of(folder), "why": why}
        runs.write_json(folder / "progress.json", progress | origin)
        return "done" if done else why or STOPPED


def run_all(waiting: Iterable[tuple[Cell, int]], jobs: int, finish: Callable[[], None]) -> bool:
    """Trains these cells and seeds and calls finish() after each; returns whether a signal stopped it."""
    waiting, locked = deque(waiting), set()
    trials.origin()  # before signals are caught: it takes a second

    def work(stopping: Event) -> None:
        while not stopping.is_set():
            try:
                cell, seed = waiting.popleft()
            except IndexError:
                return
            name = f"{cell.row['cell']}, seed {seed}"
            ended = train(cell, seed, stopping)
            if ended != LOCKED or name not in locked:
                print(f"{name}: {ended}", flush=True)
            if ended in (LOCKED, STOPPED) and not stopping.is_set():  # whoever has it may be stopped: after the rest
                waiting.append((cell, seed))
                stopping.wait(2)
            if ended == LOCKED:
                locked.add(name)
            else:
                finish()

    return trials.in_parallel(work, jobs)


# RESULTS

Real = Annotated[FiniteFloat | None, BeforeValidator(lambda text: float(text) if text else None)]
Count = Annotated[NonNegativeInt | None, BeforeValidator(lambda text: int(text) if text else None)]
VALUES = r"^([0-9]+:-?[0-9]+(\.[0-9]+)?(e[-+]?[0-9]+)?( |$))*$"
# A row of TABLE.csv.
Result = TypedDict("Result", {
    "cell": str, "metric": str, "published": str, "ours": Real, "low": Real, "high": Real,
    "seeds": Annotated[NonNegativeInt, BeforeValidator(int)], "values": Annotated[str, Field(pattern=VALUES)],
    "published steps": Count, "steps": Count, "seconds": Count, "note": str, "of its runs": NotRequired[str],
    "script": str, "flags": str, "machine": str, "jax": str, "commit": str, "date": str, "command": str,
})  # fmt: skip
Result.__pydantic_config__ = ConfigDict(extra="forbid")  # a column of the user's own would be lost


def interval(values: Iterable[float]) -> tuple[float, float] | tuple[None, None]:
    """Student's 95 % interval of the mean; None for fewer than two values and for equal ones, whose spread says
    nothing."""
    values = list(values)
    if len(set(np.float32(values))) < 2:  # in the precision of measurements
        return None, None
    return tuple(float(x) for x in stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values)))


def statistics(values: dict[int, float]) -> dict:
    """The columns of a result that follow from the value of each seed."""
    low, high = interval(values.values())
    each = " ".join(f"{seed}:{value:.9g}" for seed, value in sorted(values.items()))
    mean = float(np.mean(list(values.values()))) if values else None
    return {"ours": mean, "low": low, "high": high, "seeds": len(values), "values": each}


def seed_values(row: dict) -> dict[int, float]:
    """The value of each seed in a row of a result."""
    pairs = (pair.split(":") for pair in row.get("values", "").split())
    return {int(seed): float(value) for seed, value in pairs}


def summarize(cell: Cell, found: list[tuple], args: Args) -> dict:
    """A row of the results, from `read_runs`: the mean over seeds of each finished run's last value, beside what was
    published."""
    row = cell.row
    done = {seed: progress for seed, progress, _ in found if progress["done"]}

    def last(name: str) -> dict[int, float]:
        series = {seed: [line[name] for line in lines if name in line] for seed, _, lines in found if seed in done}
        return {seed: float(values[-1]) for seed, values in series.items() if values}

    values = {seed: value for seed, value in last(row["metric"]).items() if np.isfinite(value)}
    failed = [progress["why"] for seed, progress, _ in found if progress["why"] and seed in args.seeds]
    notes = [f"{len(failed)} failed: {failed[0]}"] if failed else []
    notes += [f"{len(done) - len(values)} without {row['metric']}"] if len(values) < len(done) else []
    short = {seed: step for seed, step in last("global_step").items() if step < (cell.steps or 0)}
    notes += [f"seed {seed} ended after {step / 1e6:.3g}M" for seed, step in short.items()]
    return {
        "cell": row["cell"], "metric": row["metric"], "published": row["published"], **statistics(values),
        "published steps": int(row["steps"]) if row["steps"] else None, "steps": cell.steps,
        "seconds": round(np.mean([progress["seconds"] for progress in done.values()])) if done else None,
        "note": row["note"], "of its runs": "; ".join(notes), "script": row["script"], "flags": row["flags"],
        **merge_origins(*done.values()), "command": command_of(args, done if values else args.seeds, cell.selected),
    }  # fmt: skip


def merge(before: dict, row: dict, args: Args, selected: bool) -> dict:
    """Adds to `row`, computed from the runs here, the seeds that only `before`, the earlier results, has. If either has
    no seeds of its own, or steps differ: returns the row of more steps, then of more seeds (`row` if equal).
    Otherwise, returns `before` if it has all values of `row`."""
    new, old = seed_values(row), seed_values(before)
    kept = {seed: value for seed, value in old.items() if seed not in new}
    before = before | {name: row[name] for name in ("published", "note")}
    if not (new and kept) or before["steps"] != row["steps"]:
        return max(row, before, key=lambda one: ((one["steps"] or 0) if one["seeds"] else -1, one["seeds"]))
    if new.items() <= old.items():
        return before
    seconds = (before["seconds"] or 0) * len(kept) + (row["seconds"] or 0) * len(new)
    notes = [note for note in before["of its runs"].split("; ") if note and note not in row["of its runs"]]
    return {
        **row, **statistics(kept | new), "seconds": round(seconds / len(kept | new)),
        "of its runs": "; ".join(filter(None, [*notes, row["of its runs"]])), **merge_origins(before, row),
        "command": command_of(args, sorted(kept | new), selected),
    }  # fmt: skip


def command_of(args: Args, seeds: Iterable[int], selected: bool) -> str:
    """The command that makes a row of the results."""
    words = ["python", "-m", "experiments.reproduce", args.table]
    words += ["--scale", str(args.scale)] if args.scale != 1 else []
    words += ["--seeds", *map(str, seeds), *(["--cells", *args.cells] if args.cells and selected else [])]
    words += ["--set", *args.set] if args.set else []
    return shlex.join(words)


def evaluation_rows(cell: Cell, found: list[tuple]) -> list[dict]:
    """Rows of TABLE_evaluations.csv, from `read_runs`: each evaluation of a cell's runs so far, unfinished ones
    included, with the standard error over episodes; none if the cell's metric is no mean return."""
    metric, rows = cell.row["metric"], []
    if not metric.endswith("/mean_return"):
        return []
    std, episodes = (metric.replace("mean_return", name) for name in ("std", "episodes"))
    for seed, progress, lines in found:
        about = {"cell": cell.row["cell"], "metric": metric, "seed": seed, "of steps": cell.steps}
        where = {"steps/s": steps_per_second(lines)} | {name: progress.get(name, "") for name in ORIGIN}
        for line in lines:
            if {metric, std, episodes} <= line.keys():
                error = line[std] / max(line[episodes] - 1, 1) ** 0.5
                numbers = {"step": line["global_step"], "mean": f"{line[metric]:.4g}", "error": f"{error:.3g}"}
                rows.append(about | numbers | {"episodes": int(line[episodes])} | where)
    return rows


def curve_rows(cell: Cell, found: list[tuple]) -> list[dict]:
    """Rows of TABLE_training.csv, from `read_runs`: some 60 points of the training returns of each finished run."""
    rows = []
    for seed, progress, lines in found:
        lines = [x for x in lines if progress["done"] and {RETURN, "global_step", "seconds"} <= x.keys()]
        for line in lines[:: -(-len(lines) // 60) or 1]:
            about = {"cell": cell.row["cell"], "seed": seed, "of steps": cell.steps}
            numbers = {"global_step": line["global_step"], "hours": f"{line['seconds'] / 3600:.4f}"}
            rows.append(about | numbers | {RETURN: f"{line[RETURN]:.4g}"})
    return rows


def steps_per_second(lines: list[dict]) -> str:
    """The speed of a run's fastest tenth, by its own clock: the one least disturbed by other jobs."""
    points = [(line["seconds"], line["global_step"]) for line in lines if "charts/SPS" in line and "seconds" in line]
    pairs = zip(points, points[max(len(points) // 10, 1) :], strict=False)
    rates = [(step - before) / (now - then) for (then, before), (now, step) in pairs if now > then]
    return f"{max(rates):.3g}" if rates else ""


def pooled(rows: list[dict]) -> tuple[float, float]:
    """Mean and standard error over seeds, of one evaluation of each: the error over all episodes, if there is one, or
    that over seeds, whichever is larger, since either may be far too small for two seeds."""
    means = [float(row["mean"]) for row in rows]
    of_episodes = sum(float(row["error"]) ** 2 for row in rows) ** 0.5 / len(rows)
    over_seeds = float(stats.sem(means)) if len(means) > 1 else float("nan")
    return float(np.mean(means)), float(np.fmax(of_episodes, over_seeds))


def read_results(args: Args) -> list[dict]:
    """The rows of an earlier OUT/TABLE.csv; none if there is no such file.

    Raises UsageError if it is damaged, or of another --set or an older table.
    """
    path = Path(args.out) / f"{args.table}.csv"
    evaluated = path.with_name(f"{args.table}_evaluations.csv").exists()  # also of runs that are not done
    if not path.exists():
        why = f"has {args.table}_evaluations.csv, perhaps of runs without --set, give another folder"
        check(not (evaluated and args.set), f"--out {path.parent}: {why}")
        return []
    rows = files.read(path, list[Result], "--out", "move it away, or give another folder")
    flags = {(row["cell"], row["metric"]): row["flags"] for row in read_table(args.table)}
    for row in rows:
        if row["seeds"] or evaluated:
            given = row["command"].partition(" --set ")[2]
            same = sorted(given.replace("-", "_").split()) == sorted(shlex.join(args.set).replace("-", "_").split())
            check(same, f"--out {path}: has results of --set {given or 'nothing'}; give another folder")
            same = row["flags"] == flags.get((row["cell"], row["metric"]))
            check(same, f"--out {path}: has {row['cell']!r} of an older table; give another folder")
    return [dict.fromkeys(Result.__annotations__, "") | row for row in rows]


def write(args: Args, cells: list[Cell]) -> list[dict]:
    """Writes all files of the results, and returns the rows: of each cell the finished runs of all seeds, merged with
    earlier results."""
    out = Path(args.out) / args.table
    with files.lock_run(out.parent, wait=True):
        old = {(row["cell"], row["metric"]): row for row in read_results(args)}
        results, evaluated, curves = [], [], []
        for cell in cells:
            found = read_runs(cell)
            evaluated += evaluation_rows(cell, found)
            curves += curve_rows(cell, found)
            row, before = summarize(cell, found, args), old.get((cell.row["cell"], cell.row["metric"]))
            results.append(merge(before, row, args, cell.selected) if before else row)
        records.write_rows(out.with_suffix(".csv"), results)
        with files.atomic_write(out.with_suffix(".md")) as temporary:
            temporary.write_text(markdown(args, results))
        scale = scale_of(results)
        title = ", ".join([args.table, *([f"{scale} of the steps"] if scale else []), *args.set])
        with files.atomic_write(out.with_suffix(".png")) as temporary:
            draw(title, results).savefig(temporary, format="png")
    if evaluated:
        records.add_rows(Path(f"{out}_evaluations.csv"), evaluated, ("cell", "metric", "seed", "of steps", "step"))
    if curves:
        records.add_rows(Path(f"{out}_training.csv"), curves, ("cell", "seed", "of steps"))
    return results


# THE PAGE AND THE PICTURE


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def has_interval(row: dict) -> bool:
    """Whether a row is shown with its interval; for two seeds, their values are shown in its place."""
    return row["low"] is not None and len(seed_values(row)) != 2


def notes_of(row: dict) -> str:
    """The notes on a cell and its runs."""
    values = [f"{value:.2f}" for value in seed_values(row).values()]
    seeds = f"seeds {', '.join(values)}" if len(values) == 2 else ""
    return "; ".join(filter(None, (row["note"], seeds, row.get("of its runs"))))


def scale_of(results: list[dict]) -> str:
    """The fraction of the published steps that cells were trained for, such as "0.1 to 0.15"; empty if it is 1."""
    done = [row for row in results if row["seeds"] and row["steps"] and row["published steps"]]
    scales = sorted(row["steps"] / row["published steps"] for row in done)
    ends = dict.fromkeys(f"{scale:.2g}" for scale in scales[:1] + scales[-1:])
    return "" if set(scales) <= {1.0} else " to ".join(ends)


def markdown(args: Args, results: list[dict]) -> str:
    """TABLE.md."""
    scale = scale_of(results)
    unlike = [f"{scale} of its steps"] if scale else []
    unlike += [f"with {' '.join(args.set)}"] if args.set else []
    warning = f"**Not the published setting**: {', '.join(unlike)}. Compare the order of the cells only."
    commands = dict.fromkeys(row["command"] for row in results if row["seeds"])
    origin = merge_origins(*(row for row in results if row["seeds"]))
    jax, commits, dates = (", ".join(origin[name].split()) for name in ("jax", "commit", "date"))
    where = f"{origin['machine']}, JAX {jax}, commit {commits}, {dates}:"
    lines = [
        f"# {args.table}",
        "Ours: the mean over seeds of what each run logged last; published: the source's value, where there is one; "
        "95 %: Student's interval, from three seeds on.",
        where if commands else "Nothing has run yet:",
        "\n".join(f"    {command}" for command in commands or [command_of(args, args.seeds, False)]),
        *([warning] if unlike else []),
    ]
    columns = ("cell", "published", "ours", "95 %", "seeds", "steps", "minutes", "")
    table = [columns, ["---"] * len(columns)]
    for row in results:
        between = f"{number(row['low'])} to {number(row['high'])}" if has_interval(row) else ""
        minutes = number(row["seconds"] / 60, 1) if row["seconds"] else ""
        steps = f"{row['steps']:,}" if row["steps"] else ""
        ours = number(row["ours"]), between, row["seeds"], steps, minutes, notes_of(row)
        table.append((row["cell"], row["published"], *ours))
    used = [i for i in range(len(columns)) if any(row[i] != "" for row in table[2:])]
    rows = (" | ".join(str(row[i]) for i in used) for row in table)
    return "\n\n".join(lines) + "\n\n" + "".join(f"| {row} |\n" for row in rows)


def draw(title: str, results: list[dict]) -> Figure:
    """TABLE.png: each cell's published value (a square) and ours (a dot with its interval), distinct without colour;
    without the cells that have neither."""
    results = [row for row in results if row["seeds"] or row["published"]] or results
    figure = Figure(figsize=(8, 1.6 + 0.3 * len(results)), dpi=120, layout="constrained")
    axis = figure.subplots()
    for i, row in enumerate(results):
        if row["published"]:
            axis.plot(float(row["published"]), i, "s", color="w", mec="k", ms=8, label="published")
        if row["seeds"]:
            axis.plot(row["ours"], i, "o", color="#0072B2", ms=7, label="ours")
        values = list(seed_values(row).values())
        if has_interval(row):
            axis.plot([row["low"], row["high"]], [i, i], "-", color="#0072B2", lw=2, label="ours, 95 %")
        elif len(values) == 2:
            axis.plot(values, [i, i], "|", color="#0072B2", ms=10, label="ours, each seed")
    metrics = " and ".join(dict.fromkeys(row["metric"] for row in results))
    axis.set_yticks(range(len(results)), [row["cell"] for row in results])
    axis.set(ylim=(len(results) - 0.5, -0.5), xlabel=metrics, title=title)
    axis.grid(axis="y", alpha=0.3)
    named = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    if named:
        figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=3)
    return figure


# MAIN


def main(args: Args) -> list[dict]:
    """Returns the rows of the results."""
    given = " ".join(map(str, args.seeds))
    check(len(set(args.seeds)) == len(args.seeds) > 0, f"--seeds {given}: give one or more, each once")
    cells = read_cells(args)
    for flag, folder in (("--runs", args.runs), ("--out", args.out)):
        check(folder != "", f"{flag} '': give a folder")
        files.make_folder(Path(folder), flag)
    read_results(args)  # before anything is run
    asked = {  # by folder: cells that differ only in their metric share runs
        cell.folder / str(seed): (cell, seed) for cell in cells for seed in args.seeds if cell.selected and cell.flags
    }
    missing = [run for folder, run in asked.items() if not read_progress(folder)["done"]]
    stopped = not args.collect and run_all(missing, args.jobs, partial(write, args, cells))
    results = write(args, cells)
    print(f"{Path(args.out) / args.table}.csv, .md, .png")
    if stopped:
        print("stopped; repeat the command to continue")
    names = {folder: f"{cell.row['cell']}, seed {seed}" for folder, (cell, seed) in asked.items()}
    failed = {name: why for folder, name in names.items() if (why := read_progress(folder)["why"])}
    trials.report_failures(failed, len(names), Path(args.runs).absolute())
    return results


if __name__ == "__main__":
    runs.cli(Args, main)
