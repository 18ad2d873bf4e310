"""Writes the tables of docs and README from the committed CSV files.

Each goes between its two marks, wherever these are:

    python -m experiments.tables           # after a new result
    python -m experiments.tables --check   # fails if a table is not that of its files
"""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path

import numpy as np

from common import files, runs
from experiments import plot, records, reproduce

DOCS = records.ROOT / "docs"
EXPERIMENTS = records.ROOT / "experiments"
SPEED = records.ROOT / "benchmarks" / "results"
RESULTS = EXPERIMENTS / "results"
STUDIES = "cleanrl", "constant_actions", "original_games", "starpilot_study"
FROZEN = {  # tables of finished measurements, as they are shown
    **{name: SPEED / "tables" / f"{name}.csv" for name in ("throughput", "ppo_impala", "apex", "rnd")},
    **{name: EXPERIMENTS / "studies" / name / "table.csv" for name in STUDIES},
}


@dataclass(frozen=True)
class Args:
    check: bool = False
    """write nothing; exit code 2 if a page is not up to date"""


def table(rows: list[dict], columns: dict[str, Callable[[dict], str]]) -> list[str]:
    """A Markdown table with a line a row, and a function of the row for each column."""
    lines = [list(columns), ["---"] * len(columns), *([cell(row) for cell in columns.values()] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def number(name: str, form: str = ",.0f", after: str = "") -> Callable[[dict], str]:
    """A column as a number of a form, empty where the file has none."""
    return lambda row: f"{float(row[name]):{form}}{after}" if row[name] else ""


def frozen(name: str) -> list[str]:
    """A table of FROZEN."""
    rows = records.read_rows(FROZEN[name])
    return table(rows, {column: itemgetter(column) for column in rows[0]})


def doors() -> list[str]:
    columns = {"setting": itemgetter("setting")}
    columns |= {"weights that learn": number("weights that learn"), "decisions": number("decisions")}
    columns |= {"gradient steps": number("gradient steps"), "physics and inference": number("rollout s", ".1f", " s")}
    columns |= {"update": number("update s", ".1f", " s"), "decisions/s": number("decisions/s")}
    return table(records.read_rows(SPEED / "doors_update.csv"), columns)


def encoders() -> list[str]:
    columns = {"encoder": lambda row: row["encoder"], "parameters": number("parameters"), "MFLOP": number("MFLOP", "g")}
    columns |= {"KiB kept": number("KiB kept", "g"), "forward ms": number("forward ms", "g")}
    columns |= {"gradient ms": number("gradient ms", "g"), "in plain Flax ms": number("plain Flax ms", "g")}
    return table(records.read_rows(SPEED / "encoders.csv"), columns)


def tables() -> list[str]:
    """Each table of the studies that was reproduced, published beside ours."""
    lines = []
    for name in dict.fromkeys(row["table"] for row in reproduce.published()):
        rows = records.read_rows(RESULTS / f"{name}.csv")
        done = [row for row in rows if row["commit"]]
        if done:
            columns = {"cell": lambda row: row["cell"], "published": lambda row: row["published"]}
            columns |= {"ours": number("ours", ".2f")}
            if any(map(reproduce.has_interval, done)):
                columns |= {"95 % from": number("low", ".2f"), "to": number("high", ".2f")}
            columns |= {"seeds": number("seeds"), "steps": number("steps"), "seconds": number("seconds")}
            if any(reproduce.notes_of(row) for row in rows):
                columns["note"] = reproduce.notes_of
            command = "`, `".join(dict.fromkeys(row["command"] for row in done))
            where = f"[all columns](../experiments/results/{name}.csv); {reproduce.where_of(done)}"
            lines += [f"**{name}** ({where}), `{command}`:", ""]
            shown = [row for row in rows if row["commit"] or row["published"]]
            lines += [*table(shown, columns), ""]
            if len(shown) < len(rows):
                lines += [f"Cells that have not run: {len(rows) - len(shown)}.", ""]
            lines += [f"![{name}](../experiments/results/{name}.png)", ""]
    return lines[:-1]


def side_by_side() -> list[str]:
    """What each algorithm makes on unseen levels of two games, over seeds, with its error (`reproduce.pooled`)."""
    evaluated = records.read_rows(RESULTS / "algorithms_nature_evaluations.csv")
    rows = {}
    for row in evaluated:
        name, game = row["cell"].rsplit(", ", 1)
        rows.setdefault(name, {}).setdefault(game, []).append(row)

    def at(row, game, steps):
        """Of each seed the evaluation there, of its longest run."""
        near = (one for one in row["of"].get(game, []) if abs(int(one["step"]) - steps) <= 0.02 * steps)
        return list({one["seed"]: one for one in sorted(near, key=lambda one: int(one["of steps"]))}.values())

    def after(game: str, steps: int) -> Callable[[dict], str]:
        def cell(row):
            found = at(row, game, steps)
            if not found:
                return ""
            mean, error = reproduce.pooled(found)
            return f"{mean:.2f} ({error:.2f})" + (f", {len(found)} seeds" if len(found) > 1 else "")

        return cell

    def speed(row):
        rates = [
            float(one["steps/s"])
            for one in row["of"].get("starpilot", [])
            if one["steps/s"] and one["machine"] == "AMD EPYC, 1 cores"  # one machine, where all have run
        ]
        return f"{max(rates):.0f}" if rates else ""

    columns = {"": lambda row: row["name"]}
    for game in ("starpilot", "coinrun"):
        columns |= {f"{game}, {millions(steps)}": after(game, steps) for steps in (500_000, 1_000_000)}
    columns["steps/s"] = speed

    def at_half(row):
        found = at(row, "starpilot", 500_000)
        return reproduce.pooled(found)[0] if found else 0.0

    shown = [{"name": name, "of": of} for name, of in rows.items()]
    return table(sorted(shown, key=at_half, reverse=True), columns)


def six_doors() -> list[str]:
    """The study's measures of each method after six doors, published and ours."""
    names = "studies/doorgym_six/matrices", "results/doorgym_gripper/matrices", "studies/doorgym_six/fresh_critic"
    names += ("studies/doorgym_six/ordinary",)
    rows = [row for name in names for row in records.read_rows(EXPERIMENTS / f"{name}.csv")]
    rows = [row for row in rows if row["tasks_learnt"] == "6"]
    theirs = {row["method"]: row for row in rows if row["whose"] == "published"}

    def both(name):
        def cell(row):
            published = f"{float(theirs[row['method']][name]):.2f}" if row["method"] in theirs else "none"
            return f"{published} / {float(row[name]):.2f}"

        return cell

    columns = {"published / ours": itemgetter("method")}
    columns |= {name: both(name) for name in ("ACC", "FWT", "BWT", "BWT+", "REM")}
    columns["our decisions"] = lambda row: millions(row["step"])
    return table([row for row in rows if row["whose"] == "ours"], columns)


def at_the_end(row: dict) -> tuple[float, float, int, str]:
    """What we measured for a row of published.csv: value, steps, number of seeds, standard error.

    Value and steps (NaN where the file has none) are means over seeds; a curve's value is its mean over the last tenth
    of its steps. The error, over an evaluation's episodes, is there for a single seed where the file has it, else "".
    A reproduced table's cells are means over seeds already, and say of how many.
    """
    chosen = dict(pair.split("=") for pair in shlex.split(row["rows"]))
    curves, error, seeds = {}, "", 0
    for line in records.read_rows(EXPERIMENTS / row["file"]):
        if chosen.items() <= line.items() and line[row["column"]]:
            step = float(line.get("global_step") or line.get("step") or line.get("steps") or "nan")
            seeds = int(line.get("seeds", 0))
            curves.setdefault(line.get("seed") or line.get("run", ""), []).append((step, float(line[row["column"]])))
            error = line.get(f"{row['column']} error", "")
    ends = []
    for curve in curves.values():
        steps, values = np.array(curve).T
        late = steps >= 0.9 * steps[-1] if row["column"] in ("episodic_return", "test_levels") else [-1]
        ends.append((values[late].mean(), steps[-1]))
    return *np.mean(ends, axis=0), seeds or len(ends), error if len(ends) == 1 else ""


def beside(chosen: Callable[[dict], bool] = lambda row: True) -> list[str]:
    """What was published beside ours: experiments/reference/published.csv says where each is."""
    rows = []
    for row in filter(chosen, records.read_rows(reproduce.REFERENCE.parent / "published.csv")):
        ours, step, seeds, error = at_the_end(row)
        theirs, steps = row["published"], row["steps"]
        if theirs.startswith("openai "):
            ((_, curve),) = plot.read_reference("easy-all", [theirs.split()[1]]).items()
            late = np.linspace(0.9 * step, step, 101)  # as ours
            theirs, steps = f"{np.interp(late, *curve).mean():.2f}", f"{step}"
        where = (EXPERIMENTS / row["file"]).parent
        where = where / ("" if (where / "README.md").exists() else Path(row["file"]).name)
        rows.append({
            "": f"[{row['what']}](../{where.relative_to(records.ROOT)})", "published": theirs,
            "ours": f"{ours:.2f}" + (f" ({error})" if error else ""),
            "their steps": millions(steps), "our steps": millions(step), "our seeds": str(seeds),
            "why they differ": row["why"],
        })  # fmt: skip
    return table(rows, {name: itemgetter(name) for name in rows[0]})


def headlines() -> list[str]:
    """`beside`, of what the README shows."""
    return beside(lambda row: row["readme"] == "yes")


def millions(steps: str | float) -> str:
    """12.3M; nothing where it is not known."""
    return "" if steps == "" or np.isnan(float(steps)) else f"{float(steps) / 1e6:.3g}M"


def sweeps() -> list[str]:
    """Each committed sweep: how many trials, and the best one."""
    rows = []
    for path in sorted((RESULTS / "sweeps").glob("*/results.csv")):
        trials = records.read_rows(path)
        columns = list(trials[0])
        metric = columns[2]
        names = columns[4 : columns.index("logged")]
        sign = 1 if trials[0]["goal"] == "maximize" else -1
        done = [row for row in trials if row["state"] == "complete"]
        if not done:
            continue
        best = max(done, key=lambda row: sign * float(row[metric]))
        link = f"[{path.parent.name}](../experiments/results/sweeps/{path.parent.name})"
        pruned = sum(row["state"] == "pruned" for row in trials)
        rows.append({"sweep": link, "trials": str(len(trials)), "pruned": str(pruned)})
        rows[-1] |= {"metric": metric, "best": short(best[metric]), "commit": best["commit"]}
        rows[-1]["at"] = ", ".join(f"{name} {short(best[name])}" for name in names)
    return table(rows, {name: itemgetter(name) for name in rows[0]}) if rows else []


def short(text: str) -> str:
    try:
        return f"{float(text):.3g}"
    except ValueError:
        return text


PARTS = {
    "doors_update": doors, "encoders": encoders, "tables": tables, "sweeps": sweeps, "published": beside,
    "headlines": headlines, "six_doors": six_doors, "side_by_side": side_by_side,
    **{name: partial(frozen, name) for name in FROZEN},
}  # fmt: skip


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: by experiments/tables.py -->\n", f"<!-- end of {name} -->"


def fill(text: str, where: str) -> str:
    """A page with what is between each pair of marks made anew; raises UsageError if one of two marks is missing."""
    for name, make in PARTS.items():
        begin, end = marks(name)
        runs.check((begin in text) == (end in text), f"{where}: has one of the two marks {begin.strip()} and {end}")
        if begin in text:
            head, rest = text.split(begin, 1)
            lines = "\n".join([*make(), ""])
            lines = lines.replace("](../", "](") if where == "README.md" else lines  # it is not in docs/
            text = head + begin + lines + end + rest.split(end, 1)[1]
    return text


def main(args: Args) -> None:
    pages = {page: page.read_text() for page in (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md")))}
    for name in PARTS:
        begin, _ = marks(name)
        runs.check(any(begin in text for text in pages.values()), f"docs: no page has the mark {begin.strip()}")
    for page, old in pages.items():
        where = str(page.relative_to(DOCS.parent))
        new = fill(old, where)
        runs.check(not args.check or new == old, f"--check: {where} is old, run python -m experiments.tables")
        if new != old:
            with files.atomic_write(page) as temporary:
                temporary.write_text(new)


if __name__ == "__main__":
    runs.cli(Args, main)
