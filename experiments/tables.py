"""Writes the tables of docs and README from the committed CSV files.

Each goes between its two marks, wherever these are:

    python -m experiments.tables           # after a new result
    python -m experiments.tables --check   # fails if a table is not that of its files
"""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import numpy as np

from benchmarks import cleanrl
from common import files, runs
from experiments import constant_actions, plot, records, reproduce, study_units

DOCS = records.ROOT / "docs"
SPEED = records.ROOT / "benchmarks" / "results"
STUDIES = records.ROOT / "experiments" / "results"
SETTINGS = {
    "small": "small: `--width 1 --pool flatten`, one frame",
    "nature": "`--encoder nature --width 1 --pool flatten`",
    "nature-3-passes": "the same, three passes",
    "default": "default: `--width 2 --pool avg`, gap stack",
    "impala": "`--width 1`",
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


def percent(name: str, form: str = ".0f") -> Callable[[dict], str]:
    return number(name, form, " %")


def setting(row: dict) -> str:
    return SETTINGS.get(row["setting"], f"`{row['flags']}`")


def of_one_call(row: dict) -> tuple[str, ...]:
    """What rows have in common that a benchmark measured in turns."""
    return tuple(row[name] for name in ("setting", "machine", "commit", "date"))


def throughput() -> list[str]:
    columns = {"setting": setting, "steps/s": number("steps/s", ".0f"), "game": percent("game %", ".1f")}
    columns |= {"inference": percent("inference %", ".1f"), "update": percent("update %", ".1f")}
    columns |= {"Python and rest": percent("Python and rest %", ".1f"), "GFLOP/s": number("GFLOP/s")}
    columns["gradient against plain Flax"] = number("gradient speed-up", ".1f", " x faster")
    return table(sorted(records.read_rows(SPEED / "throughput.csv"), key=lambda row: -float(row["steps/s"])), columns)


def ppo_impala() -> list[str]:
    rows = records.read_rows(SPEED / "ppo_impala.csv")
    ppo = {of_one_call(row): row["steps/s"] for row in rows if row["script"] == "ppo"}
    rows = [row | {"PPO": ppo[of_one_call(row)]} for row in rows if row["script"] == "impala"]
    rows.sort(key=lambda row: -float(row["PPO"]))
    columns = {"setting": setting, "PPO steps/s": number("PPO", ".0f"), "IMPALA steps/s": number("steps/s", ".0f")}
    columns |= {"learner busy": percent("learner busy %"), "waits": percent("learner waits %")}
    columns |= {"actors busy": percent("actors busy %"), "lag": number("lag")}
    return table(rows, columns)


def apex() -> list[str]:
    columns = {"setting": setting, "steps/s": number("steps/s", ".0f"), "updates/s": number("updates/s", ".2g")}
    columns |= {"update": percent("update %"), "learner waits": percent("learner waits %")}
    columns["sampling and priorities"] = percent("sampling and priorities %", ".1f")
    return table(records.read_rows(SPEED / "apex.csv"), columns)


def rnd() -> list[str]:
    names = {"paper": "the paper's network and epochs, 32 games", "small": "a tiny network, one epoch, 64 games"}
    rows = records.read_rows(SPEED / "rnd.csv")
    speed = {(*of_one_call(row), row["mode"]): row["steps/s"] for row in rows}
    firsts = sorted((row for row in rows if row["mode"] == "synchronous"), key=lambda row: float(row["steps/s"]))
    for row in firsts:
        row |= {mode: speed.get((*of_one_call(row), mode), "") for mode in ("--async", "--async --vtrace")}
    columns = {"setting": lambda row: names[row["setting"]]}
    columns |= {"emulator alone": number("emulator alone steps/s", ".0f", " steps/s")}
    columns |= {"synchronous": number("steps/s", ".0f"), "`--async`": number("--async", ".0f")}
    columns |= {"`--async --vtrace`": number("--async --vtrace", ".0f"), "update": percent("learner busy %")}
    columns |= {"emulator": percent("actor's game %"), "inference": percent("actor's inference %")}
    return table(firsts, columns)


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


def original_games() -> list[str]:
    columns = {"policy": lambda row: row["policy"].replace("_", " "), "game": lambda row: row["game"]}
    columns |= {"EnvPool": lambda row: f"{row['EnvPool']} ({row['error']})"}
    columns |= {"OpenAI's": lambda row: f"{row['OpenAI']} ({row['OpenAI error']})"}
    columns |= {"frames compared": number("frames compared")}
    columns |= {"pixels that differ": percent("pixels that differ %", "g")}
    columns["rewards that differ"] = number("rewards that differ")
    return table(records.read_rows(SPEED / "original_games.csv"), columns)


def beside_cleanrl() -> list[str]:
    """CleanRL's script and ours, after the same minutes and after the same steps."""
    rows = records.read_rows(SPEED / "cleanrl.csv")
    of = {"game": cleanrl.Args.env_id, "minutes": f"{cleanrl.Args.minutes:g}"}
    newest = {(row["run"], row["seed"]): row["flags"] for row in rows}
    same = [row | {"run": f"{row['run']}, seed {row['seed']}"} for row in rows
            if of.items() <= row.items() and newest[row["run"], row["seed"]] == row["flags"]]  # fmt: skip
    rows = cleanrl.compare(same)
    return table(rows, {name: itemgetter(name) for name in rows[0]})


def tables() -> list[str]:
    """Each table of the studies that was reproduced, published beside ours."""
    lines = []
    for name in dict.fromkeys(row["table"] for row in reproduce.published()):
        rows = records.read_rows(STUDIES / f"{name}.csv")
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
    evaluated = records.read_rows(STUDIES / "algorithms_nature_evaluations.csv")
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


def not_looking() -> list[str]:
    """What the best constant action makes in each game, random play, and OpenAI's PPO, which passes it at some step."""
    by_game = {}
    for row in records.read_rows(STUDIES / "constant_actions.csv"):
        by_game.setdefault(row["game"], {})[row["action"]] = row
    rows, published = [], [row for row in records.read_rows(plot.REFERENCE) if row["split"] == "easy-all"]
    for game, found in by_game.items():
        (name,) = (name for name in found if name.endswith(constant_actions.ANEW))
        curve = [(float(row["env_steps"]), float(row["mean_return"])) for row in published if row["game"] == game]
        high = float(found[name]["mean"]) + 2 * float(found[name]["error"])
        not_above = [i for i, (_, mean) in enumerate(curve) if mean <= high]
        stays = curve[max(not_above, default=-1) + 1 :]  # above it
        theirs = {"passed": millions(stays[0][0]) if stays else "never", "at 8M": f"{dict(curve)[8e6]:.1f}"}
        ours = {"random": found[constant_actions.RANDOM], "name": name.partition(",")[0]}
        rows.append(found[name] | ours | theirs)

    def with_error(row):
        return f"{float(row['mean']):.2f} ({float(row['error']):.2f})"

    columns = {"game": itemgetter("game"), "random play": lambda row: with_error(row["random"])}
    columns |= {"best single action": itemgetter("name"), "makes": with_error}
    columns |= {"OpenAI's PPO stays above it from": itemgetter("passed"), "and at 8M": itemgetter("at 8M")}
    return table(sorted(rows, key=itemgetter("game")), columns)


def starpilot_study() -> list[str]:
    """The StarPilot study's returns beside ours, in its units and raw ones."""
    setting = ("method", "encoder", "hidden", "training levels")
    reference = records.read_rows(reproduce.REFERENCE.parent / "starpilot_study.csv")
    published = {tuple(row[name] for name in setting): row for row in reference}
    both = {}
    for row in (row for row in records.read_rows(STUDIES / "starpilot_study.csv") if row["game"] == study_units.GAME):
        both.setdefault(tuple(row[name] for name in ("run", *setting)), {})[row["on"]] = row
    rows = []
    for run in both.values():
        on_train, on_test = run["train"], run["test"]
        row = {name: on_train[name] for name in (*setting, "step")}
        theirs = published.get(tuple(row[name] for name in setting))
        row["published"] = f"{theirs['train']} / {theirs['test']}" if theirs else ""
        for name in ("normalized", "raw"):
            row[name] = " / ".join(f"{each[name]} ({each[f'{name} error']})" for each in (on_train, on_test))
        rows.append(row)
    rows.sort(key=lambda row: (row["method"], int(row["training levels"]) or np.inf))
    levels = {"0": "all"}  # as --num-levels has it
    columns = {"method": itemgetter("method")}
    columns |= {"training levels": lambda row: levels.get(row["training levels"], row["training levels"])}
    columns |= {"steps": number("step"), "published, training / test levels": lambda row: row["published"]}
    columns |= {"ours, in the same units": lambda row: row["normalized"], "ours, raw": lambda row: row["raw"]}
    return table(rows, columns)


def six_doors() -> list[str]:
    """The study's measures of each method after six doors, published and ours."""
    names = ("six/matrices", "gripper/matrices", "six/fresh_critic", "six/ordinary")
    rows = [row for name in names for row in records.read_rows(STUDIES / f"doorgym_{name}.csv")]
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
    for line in records.read_rows(STUDIES / row["file"]):
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
        where = (STUDIES / row["file"]).parent
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
    for path in sorted((STUDIES / "sweeps").glob("*/results.csv")):
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
    "throughput": throughput, "ppo_impala": ppo_impala, "apex": apex, "rnd": rnd, "doors_update": doors,
    "encoders": encoders, "original_games": original_games, "starpilot_study": starpilot_study, "tables": tables,
    "sweeps": sweeps, "published": beside, "headlines": headlines, "six_doors": six_doors,
    "cleanrl": beside_cleanrl, "side_by_side": side_by_side, "not_looking": not_looking,
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
            with files.whole(page) as temporary:
                temporary.write_text(new)


if __name__ == "__main__":
    runs.cli(Args, main)
