"""Makes a table of the studies that we follow: runs what is missing of it, and puts ours beside the published. Try:

    python -m experiments.reproduce coinrun_ppo_grid --seeds 1 2 3
    python -m experiments.reproduce coinrun_ppo_grid --scale 0.15 --set encoder=nature downsample=auto --jobs 2
    python -m experiments.reproduce coinrun_ppo_grid --collect

What was published is in experiments/reference/tables.csv: a row a cell, with the script, flags and steps that stand for
it here. Stopped or killed and started again it continues; runs are found again by their flags, steps and seed. A seed's
value stays in the file even if its run is on another machine, or gone; of values with different steps, those with more
training stay.
"""

import contextlib
import hashlib
import json
import shlex
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NotRequired

import matplotlib as mpl
import numpy as np
import tyro
from annotated_types import Interval
from pydantic import ConfigDict, Field
from scipy import stats
from typing_extensions import TypedDict

from common import files, runs
from common.files import check
from experiments import records, trials
from experiments.trials import ORIGIN, joined

mpl.use("Agg")
import matplotlib.pyplot as plt

Digits = Annotated[str, Field(pattern="^[0-9]{1,15}$")]
Decimal = Annotated[str, Field(pattern=r"^-?[0-9]+(\.[0-9]+)?(e-?[0-9]+)?$")]
VALUES = r"^([0-9]+:-?[0-9]+(\.[0-9]+)?(e[-+]?[0-9]+)?( |$))*$"
REFERENCE = Path(__file__).parent / "reference" / "tables.csv"


@dataclass(frozen=True)
class Args:
    table: tyro.conf.Positional[str]
    """name of a table, such as coinrun_ppo_grid (a wrong one lists them)"""
    scale: float = 1.0
    """train for this many times the table's environment steps; below 1 for shorter runs"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """a run of each cell for each of them"""
    cells: tuple[str, ...] = ()
    """run only the cells with these names, or, where no cell is named so, with this in their name; none for all"""
    jobs: Annotated[int, Interval(ge=1, le=trials.MAX_JOBS)] = 1
    """runs at a time"""
    set: tuple[str, ...] = ()
    """flags with a value that every run gets besides the table's, such as encoder=nature"""
    collect: bool = False
    """run nothing, only gather the runs that are done"""
    runs: str = "runs/tables"
    """folder of the runs"""
    out: str = "runs/tables"
    """where to write: OUT/TABLE.csv, .md and .png, TABLE_evaluations.csv, with every evaluation while runs trained, and
    TABLE_training.csv, with their curves (those of the repository are in experiments/results)"""


# WHAT TO RUN


def published() -> list[dict]:
    """The rows of all published tables."""
    return records.read_rows(REFERENCE)


def read_table(name: str) -> list[dict]:
    """The rows of one; raises UsageError."""
    names = list(dict.fromkeys(row["table"] for row in published()))
    check(name in names, f"TABLE {name}: give one of {', '.join(names)}")
    return [row for row in published() if row["table"] == name]


def flags_of(row: dict, args: Args) -> dict:
    """The flags of a cell's runs but the seed; raises UsageError if the script does not have them."""
    flags = trials.read_settings(row["flags"].split()) | trials.read_settings(args.set)
    steps = "task_timesteps" if row["script"] == "hnppo_doorgym.py" else "total_timesteps"
    flags[steps] = max(1, round(int(row["steps"]) * args.scale))
    trials.check_flags(f"TABLE {args.table}", row["script"], flags)
    return flags


def check_overrides(args: Args, rows: list[dict]) -> None:
    """Raises UsageError if --set has a flag that a script lacks, that is not free, or in which the cells differ.

    Ends as a script would if it does not take a value.
    """
    given = trials.read_settings(args.set)
    for program in {row["script"] for row in rows if row["script"]}:
        trials.check_flags("--set", program, given, own=("seed",))
    own = [trials.read_settings(row["flags"].split()) for row in rows if row["script"]]
    for name in given:
        same = len({flags.get(name) for flags in own}) == 1 and not name.endswith("_timesteps")
        check(same, f"--set {name}: cells of {args.table} differ in it; give another flag, or --scale for steps")
    for row in rows if given else ():
        if row["script"] and is_asked(args, row):
            trials.ask_script(row["script"], flags_of(row, args))


def check_cells(cells: Iterable[str], rows: list[dict]) -> None:
    """Raises UsageError if one of --cells is in no name of a table's cells."""
    for part in cells:
        named = any(part in row["cell"] for row in rows)
        check(named, f"--cells {part}: is in no cell's name, such as {rows[0]['cell']!r}")


def is_asked(args: Args, row: dict) -> bool:
    """Whether a cell is to be run."""
    names = {other["cell"] for other in published() if other["table"] == args.table}
    return any(part == row["cell"] or (part in row["cell"] and part not in names) for part in args.cells or [""])


def folder_of(root: Path, row: dict, flags: dict, seed: int) -> Path:
    """A folder for each combination of script, flags and seed."""
    text = json.dumps([row["script"], sorted((name, str(value)) for name, value in flags.items())])
    return root / f"{Path(row['script']).stem}__{hashlib.sha256(text.encode()).hexdigest()[:12]}" / str(seed)


# RUNS

ELSEWHERE = "another process is at it"
STOPPED = "stopped"
EVALUATION = "cell", "metric", "seed", "of steps", "step"  # what tells one from another
TRAINING = "cell", "seed", "of steps"
RETURN = "charts/episodic_return"


class Progress(TypedDict):
    """progress.json: how far a run is, and where it was run."""

    done: bool
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    why: str
    machine: NotRequired[str]
    jax: NotRequired[str]
    commit: NotRequired[str]
    date: NotRequired[str]


def read_progress(folder: Path) -> Progress:
    path = folder / "progress.json"
    if not path.exists():
        return {"done": False, "seconds": 0.0, "why": ""}
    return files.read(path, Progress, "--runs", "delete it, and the run resumes from its checkpoint")


def train(
    row: dict, flags: dict, seed: int, folder: Path, *, origin: dict, stopping: threading.Event, look: Callable
) -> str:
    """Runs a script to its end, or continues a run that was stopped; says what came of it, and records it.

    Says ELSEWHERE where another process is at it.
    """
    with files.lock_run(folder) or contextlib.nullcontext() as lock:
        before = read_progress(folder)
        if before["done"] or lock is None:
            if before["done"]:
                look(False)
            return "done elsewhere" if before["done"] else ELSEWHERE
        both = joined(before, origin)
        runs.write_json(folder / "progress.json", before | both)  # also of a session that is killed
        done = False
        why = ""
        try:
            trials.run(row["script"], flags | {"seed": seed}, folder, lock, stopping=stopping, look=look)
            done = True
        except trials.Stopped:
            pass
        except files.FullError:  # no fault of the cell's
            raise
        except RuntimeError as error:
            why = str(error)
            look(False)
        clock = trials.values_of(trials.find_run(folder), "seconds")  # the run's own, which continues over resumes
        seconds = float(clock[-1]) if clock else 0.0
        runs.write_json(folder / "progress.json", {"done": done, "seconds": seconds, "why": why, **both})
        return "done" if done else why or STOPPED


# WHAT CAME OUT


def interval(values: list[float]) -> tuple[float, float]:
    """Student's 95 % interval of the mean; NaN for less than two values, and for values that are all the same, which
    say nothing of how far others would lie."""
    if len(set(np.float32(values))) < 2:  # as they were measured
        return float("nan"), float("nan")
    return tuple(float(x) for x in stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values)))


def of_all_seeds(folders: list[Path]) -> list[Path]:
    """The folders of a cell's runs, and those that lie beside them of seeds that are not asked for, by seed."""
    beside = (folder for folder in folders[0].parent.glob("*") if folder.name.isdecimal()) if folders else ()
    return sorted({*folders, *beside}, key=lambda folder: int(folder.name))


def summarize(row: dict, flags: dict, folders: list[Path], args: Args) -> dict:
    """A row of the result: published beside the mean, over seeds, of the last value that each run logged."""
    progress = {folder: read_progress(folder) for folder in folders}
    done = [folder for folder in folders if progress[folder]["done"]]
    found = [trials.find_run(folder) for folder in done]
    logged = {int(folder.name): trials.read_metrics(run) for folder, run in zip(done, found, strict=True)}

    def last(name: str) -> dict[int, float]:
        series = {seed: [line[name] for line in lines if name in line] for seed, lines in logged.items()}
        return {seed: float(some[-1]) for seed, some in series.items() if some}

    values = {seed: value for seed, value in last(row["metric"]).items() if np.isfinite(value)}
    failed = [p["why"] for folder, p in progress.items() if p["why"] and int(folder.name) in args.seeds]
    notes = [f"{len(failed)} failed: {failed[0]}"] if failed else []
    notes += [f"{len(done) - len(values)} without {row['metric']}"] if len(values) < len(done) else []
    saved = [runs.read_args(str(run), "--runs")["args"] for run in found if run]
    names = dict.fromkeys(name for args in saved for name in args if name not in trials.BESIDE | {"seed"})
    unlike = [runs.flag_of(name) for name in names if any(args.get(name) != saved[0].get(name) for args in saved)]
    notes += [f"runs of versions that differ in {', '.join(unlike)}"] if unlike else []
    short = {seed: step for seed, step in last("global_step").items() if step < (steps_of(flags) or 0)}
    notes += [f"seed {seed} ended after {step / 1e6:.3g}M" for seed, step in short.items()]
    result = {"cell": row["cell"], "metric": row["metric"], "published": row["published"]}
    result |= of_seeds(values)
    result |= {"published steps": row["steps"], "steps": steps_of(flags)}
    result |= {"seconds": round(np.mean([progress[f]["seconds"] for f in done])) if done else ""}
    result |= {"note": row["note"], "of its runs": "; ".join(notes), "script": row["script"], "flags": row["flags"]}
    result |= joined(*(progress[folder] for folder in done))
    asked = args if not values else replace(args, seeds=tuple(int(folder.name) for folder in done))
    return result | {"command": command_of(asked, args.cells if is_asked(args, row) else ())}


def of_seeds(values: dict[int, float]) -> dict:
    """The columns of a result that say what came out, of the value of each seed."""
    low, high = interval(list(values.values()))
    each = " ".join(f"{seed}:{value:.9g}" for seed, value in sorted(values.items()))
    mean = float(np.mean(list(values.values()))) if values else float("nan")
    return {"ours": mean, "low": low, "high": high, "seeds": len(values), "values": each}


def seeds_of(row: dict) -> dict[int, float]:
    """The value of each seed in a row of a result; none where an older one does not say."""
    pairs = (pair.split(":") for pair in row.get("values", "").split())
    return {int(seed): float(value) for seed, value in pairs}


def merged(before: dict, row: dict, args: Args) -> dict:
    """The row of the runs that are here, plus the seeds that only the earlier row `before` has, if both have as many
    steps. If `before` has other steps, or does not list its seeds' values: the one of them with more training."""
    new, old = seeds_of(row), seeds_of(before)
    known = {name: row[name] for name in ("published", "note")}
    kept = {seed: value for seed, value in old.items() if seed not in new}
    if not (new and kept) or len(old) < before["seeds"] or before["steps"] != row["steps"]:
        return before | known if training(before) > training(row) else row
    if new.items() <= old.items():
        return before | known
    parts = (before, len(kept)), (row, len(new))
    both = joined(before, row)
    both["seconds"] = round(sum((part["seconds"] or 0) * n for part, n in parts) / (len(kept) + len(new)))
    notes = [note for note in before["of its runs"].split("; ") if note and note not in row["of its runs"]]
    both["of its runs"] = "; ".join([*notes, *filter(None, [row["of its runs"]])])
    seeds = replace(args, seeds=tuple(sorted(kept | new)))
    return row | of_seeds(kept | new) | both | {"command": command_of(seeds, args.cells if is_asked(args, row) else ())}


def evaluations(row: dict, flags: dict, folders: list[Path]) -> list[dict]:
    """Each evaluation of a cell's runs so far, also of those under way: the mean return, and its standard error over
    the episodes; none where the cell's metric is no such mean."""
    metric, found = row["metric"], []
    if not metric.endswith("/mean_return"):
        return []
    std, episodes = (metric.replace("mean_return", name) for name in ("std", "episodes"))
    for folder in folders:
        lines, progress = trials.read_metrics(trials.find_run(folder)), read_progress(folder)
        about = {"cell": row["cell"], "metric": metric, "seed": int(folder.name), "of steps": steps_of(flags)}
        where = {"steps/s": speed(lines)} | {name: progress.get(name, "") for name in ORIGIN}
        for line in lines:
            if {metric, std, episodes} <= line.keys():
                error = line[std] / max(line[episodes] - 1, 1) ** 0.5
                numbers = {"step": line["global_step"], "mean": f"{line[metric]:.4g}", "error": f"{error:.3g}"}
                found.append(about | numbers | {"episodes": int(line[episodes])} | where)
    return found


def curves(row: dict, flags: dict, folders: list[Path]) -> list[dict]:
    """Some 60 points of the training returns of a cell's finished runs: what a picture needs if the runs are lost."""
    found = []
    for folder in folders:
        run = trials.find_run(folder)
        if run and read_progress(folder)["done"]:
            about = {"cell": row["cell"], "seed": int(folder.name), "of steps": steps_of(flags)}
            lines = [x for x in trials.read_metrics(run) if {RETURN, "global_step", "seconds"} <= x.keys()]
            for line in lines[:: -(-len(lines) // 60) or 1]:
                numbers = {"global_step": line["global_step"], "hours": f"{line['seconds'] / 3600:.4f}"}
                found.append(about | numbers | {RETURN: f"{line[RETURN]:.4g}"})
    return found


def pooled(rows: list[dict]) -> tuple[float, float]:
    """Of one evaluation of each seed, as `evaluations` has them: the mean, and its standard error over all episodes or
    over seeds, whichever is larger, since of two seeds either may be far too small."""
    means = [float(row["mean"]) for row in rows]
    of_episodes = sum(float(row["error"]) ** 2 for row in rows) ** 0.5 / len(rows)
    return float(np.mean(means)), max(of_episodes, float(stats.sem(means)) if len(means) > 1 else 0.0)


def speed(lines: list[dict]) -> str:
    """Steps a second of a run's fastest tenth, by its own clock: what other jobs have disturbed least."""
    points = [(line["seconds"], line["global_step"]) for line in lines if "charts/SPS" in line and "seconds" in line]
    pairs = zip(points, points[max(len(points) // 10, 1) :], strict=False)
    rates = [(step - before) / (now - then) for (then, before), (now, step) in pairs if now > then]
    return f"{max(rates):.3g}" if rates else ""


def command_of(args: Args, cells: tuple[str, ...] = ()) -> str:
    words = ["python", "-m", "experiments.reproduce", args.table]
    words += ["--scale", str(args.scale)] if args.scale != 1 else []
    words += ["--seeds", *map(str, args.seeds), *(["--cells", *cells] if cells else [])]
    words += ["--set", *args.set] if args.set else []
    return shlex.join(words)


def steps_of(flags: dict) -> int | str:
    """How many environment steps a cell's runs take, nothing for a cell without a script."""
    return next((value for name, value in flags.items() if name.endswith("_timesteps")), "")


def where_of(results: list[dict]) -> str:
    """Where, with what and when the rows of a result were run."""
    told = joined(*(row for row in results if row["commit"]))
    jax, commits, dates = (", ".join(told[name].split()) for name in ("jax", "commit", "date"))
    return f"{told['machine']}, JAX {jax}, commit {commits}, {dates}"


def has_interval(row: dict) -> bool:
    """Whether a row is shown with its interval: that of two seeds says little, and their values are shown instead."""
    return bool(number(row["low"])) and len(seeds_of(row)) != 2


def notes_of(row: dict) -> str:
    """What is said of a cell, and of its runs."""
    each = [f"{value:.2f}" for value in seeds_of(row).values()]
    seeds = f"seeds {', '.join(each)}" if len(each) == 2 else ""
    return "; ".join(filter(None, (row["note"], seeds, row.get("of its runs"))))


def number(value: float | str, digits: int = 2) -> str:
    return "" if value == "" or np.isnan(float(value)) else f"{float(value):.{digits}f}"


def markdown(args: Args, results: list[dict]) -> str:
    """The table as a page: what was run, where, and each cell."""
    parts = parts_of(results)
    unlike = [f"{in_words(parts)} of its steps"] if parts != (1, 1) else []
    unlike += [f"with {' '.join(args.set)}"] if args.set else []
    scaled = f"**Not the published setting**: {', '.join(unlike)}."
    scaled += " Compare the order of the cells only."
    commands = dict.fromkeys(row["command"] for row in results if row["seeds"]) or [command_of(args)]
    lines = [
        f"# {args.table}",
        "Published beside ours: the mean of what each run logged last, and its 95 % interval over seeds (Student's).",
        f"{where_of(results)}:" if any(row["seeds"] for row in results) else "Nothing has run yet:",
        "\n".join(f"    {command}" for command in commands),
        *([scaled] if unlike else []),
    ]
    columns = ("cell", "published", "ours", "95 %", "seeds", "steps", "minutes", "")
    table = [columns, ["---"] * len(columns)]
    for row in results:
        between = f"{number(row['low'])} to {number(row['high'])}" if has_interval(row) else ""
        minutes = number(row["seconds"] / 60, 1) if row["seconds"] else ""
        steps = f"{row['steps']:,}" if row["steps"] else ""
        ours = number(row["ours"]), between, row["seeds"], steps, minutes, notes_of(row)
        table.append((row["cell"], row["published"], *ours))
    return "\n\n".join(lines) + "\n\n" + "".join(f"| {' | '.join(map(str, row))} |\n" for row in table)


def draw(path: Path, title: str, results: list[dict]) -> None:
    """Each cell's published value (a square) and ours (a dot with its interval), told apart without colours; without
    the cells that have neither."""
    results = [row for row in results if row["seeds"] or number(row["published"])] or results
    figure, axis = plt.subplots(figsize=(8, 1.6 + 0.3 * len(results)), dpi=120, layout="constrained")
    for i, row in enumerate(results):
        if number(row["published"]):
            axis.plot(float(row["published"]), i, "s", color="w", mec="k", ms=8, label="published")
        if row["seeds"]:
            axis.plot(row["ours"], i, "o", color="#0072B2", ms=7, label="ours")
        values = list(seeds_of(row).values())
        if has_interval(row):
            axis.plot([row["low"], row["high"]], [i, i], "-", color="#0072B2", lw=2, label="ours, 95 %")
        elif len(values) == 2:
            axis.plot(values, [i, i], "|", color="#0072B2", ms=10, label="ours, each seed")
    axis.set_yticks(range(len(results)), [row["cell"] for row in results])
    axis.set(
        ylim=(len(results) - 0.5, -0.5),
        xlabel=" and ".join(dict.fromkeys(row["metric"] for row in results)),
        title=title,
    )
    axis.grid(axis="y", alpha=0.3)
    named = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    if named:
        figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=3)
    with files.atomic_write(path) as temporary:
        figure.savefig(temporary, format="png")
    plt.close(figure)


Number, Count = Decimal | Literal[""], Digits | Literal[""]
# A row of a result, as `summarize` makes it; older ones say nothing of their runs.
Result = TypedDict("Result", {
    "cell": str, "metric": str, "published": str, "ours": Number, "low": Number, "high": Number, "seeds": Digits,
    "values": NotRequired[Annotated[str, Field(pattern=VALUES)]], "published steps": Count, "steps": Count,
    "seconds": Count, "note": str, "of its runs": NotRequired[str], "script": str, "flags": str, "machine": str,
    "jax": str, "commit": str, "date": str, "command": str,
})  # fmt: skip
Result.__pydantic_config__ = ConfigDict(extra="forbid")  # a column of the user's own would be lost


def read_results(args: Args) -> list[dict]:
    """The rows of an earlier OUT/TABLE.csv, as `summarize` gives them; none if there is no such file.

    Raises UsageError if it is damaged, or has runs with another --set, or of cells that the table has no more.
    """
    path = Path(args.out) / f"{args.table}.csv"
    evaluated = path.with_name(f"{args.table}_evaluations.csv").exists()  # also of runs that are not done
    if not path.exists():
        check(not (evaluated and args.set), f"--out {path.parent}: has evaluations without --set, give another folder")
        return []
    rows = files.read(path, list[Result], "--out", "move it away, or give another folder")
    flags = {(row["cell"], row["metric"]): row["flags"] for row in read_table(args.table)}
    for row in rows:
        given = row["command"].partition(" --set ")[2]
        same = sorted(given.split()) == sorted(shlex.join(args.set).split())
        nothing = row["seeds"] == "0" and not evaluated
        check(same or nothing, f"--out {path}: is there already, of --set {given or 'nothing'}; give another folder")
        now = flags.get((row["cell"], row["metric"]))
        same = row["flags"] == now or nothing
        check(same, f"--out {path}: has {row['cell']!r} of an older table; give another folder")
    floats, integers = ("ours", "low", "high"), ("seeds", "steps", "seconds")
    return [
        dict.fromkeys(Result.__annotations__, "")  # the columns in their order, also those of older files
        | row
        | {name: float(row[name] or "nan") for name in floats}
        | {name: int(row[name]) if row[name] else "" for name in integers}
        for row in rows
    ]


def training(row: dict) -> int:
    """How many environment steps are in a row of a result."""
    return row["seeds"] * (row["steps"] or 0)


def parts_of(results: list[dict]) -> tuple[float, float]:
    """The least and the largest part of a published run's steps that cells were trained for."""
    done = [row for row in results if row["seeds"] and row["steps"] and row["published steps"]]
    parts = [row["steps"] / int(row["published steps"]) for row in done] or [1.0]
    return min(parts), max(parts)


def in_words(parts: tuple[float, float]) -> str:
    return " to ".join(dict.fromkeys(f"{part:.2g}" for part in parts))


def write(args: Args, cells: list[tuple]) -> list[dict]:
    """OUT/TABLE.csv, .md, .png, TABLE_evaluations.csv and TABLE_training.csv: of each cell the runs that are done, of
    whatever seeds, and what is there of others, or of more training."""
    cells = [(row, flags, of_all_seeds(folders)) for row, flags, folders in cells]
    out = Path(args.out) / args.table
    with files.lock_run(out.parent, wait=True):
        old = {(row["cell"], row["metric"]): row for row in read_results(args)}
        here = [summarize(row, flags, folders, args) for row, flags, folders in cells]
        results = []
        for row in here:
            before = old.get((row["cell"], row["metric"]))
            results.append(merged(before, row, args) if before else row)
        blank = [{name: "" if x != x else x for name, x in row.items()} for row in results]  # NaN: nothing
        records.write_rows(out.with_suffix(".csv"), blank)
        for ending, key, gather in (("evaluations", EVALUATION, evaluations), ("training", TRAINING, curves)):
            found = [one for row, *of_cell in cells for one in gather(row, *of_cell)]
            if found:
                records.replace_rows(out.with_name(f"{args.table}_{ending}.csv"), found, key)
        with files.atomic_write(out.with_suffix(".md")) as temporary:
            temporary.write_text(markdown(args, results))
        parts = parts_of(results)
        title = args.table if parts == (1, 1) else f"{args.table}, {in_words(parts)} of the steps"
        title = ", ".join([title, *args.set])  # of which what was published knows nothing
        draw(out.with_suffix(".png"), title, results)
    return results


def main(args: Args) -> list[dict]:
    check(0 < args.scale <= 100, f"--scale {args.scale}: must be above 0, at most 100")
    given = " ".join(map(str, args.seeds))
    check(len(set(args.seeds)) == len(args.seeds) > 0, f"--seeds {given}: give one or more, each once")
    valid = min(args.seeds) >= 0 and max(args.seeds) <= runs.MAX_SEED
    check(valid, f"--seeds {given}: must be from 0 to {runs.MAX_SEED}")
    rows = read_table(args.table)
    check_cells(args.cells, rows)
    check_overrides(args, rows)
    root, out = Path(args.runs).absolute(), Path(args.out) / args.table
    cells = []
    for row in rows:
        flags = flags_of(row, args) if row["script"] else {}
        cells.append((row, flags, [folder_of(root, row, flags, seed) for seed in args.seeds] if flags else []))
    for flag, folder in (("--runs", root), ("--out", out.parent)):
        files.make_folder(folder, flag)
    read_results(args)  # before anything is run
    asked = {
        folder: (row, flags, seed)
        for row, flags, folders in cells
        for folder, seed in zip(folders, args.seeds, strict=bool(folders))
        if is_asked(args, row)
    }  # cells that differ in their metric only share their runs
    wanted = {folder: run for folder, run in asked.items() if not read_progress(folder)["done"]}
    origin = trials.origin()

    waiting, held = deque(() if args.collect else wanted), set()

    def work() -> None:
        """One run after the other. One that another process is at comes again after the rest: it may be stopped."""
        while not stopping.is_set():
            try:
                folder = waiting.popleft()
            except IndexError:
                return
            row, _, seed = wanted[folder]
            look = partial(line.look, folder)
            said = train(*wanted[folder], folder, origin=origin, stopping=stopping, look=look)
            if said != ELSEWHERE or folder not in held:
                print(f"{row['cell']}, seed {seed}: {said}", flush=True)
            if said == ELSEWHERE:
                held.add(folder)
            if said in (ELSEWHERE, STOPPED) and not stopping.is_set():  # something else may have sent it a signal
                waiting.append(folder)
                stopping.wait(2)
            if said != ELSEWHERE:
                write(args, cells)

    done = len(asked) - len(wanted)
    with trials.until_signal() as stopping, trials.ProgressLine(args.table, len(asked), done) as line:
        trials.in_parallel(work, args.jobs, stopping)
    results = write(args, cells)
    print(f"{out}.csv, .md, .png" + ("; stopped, repeat the command to continue" * stopping.is_set()))
    names = {folder: f"{row['cell']}, seed {seed}" for folder, (row, _, seed) in asked.items()}
    failed = {name: why for folder, name in names.items() if (why := read_progress(folder)["why"])}
    trials.report_failures(failed, len(names), root)
    return results


if __name__ == "__main__":
    runs.cli(Args, main)
