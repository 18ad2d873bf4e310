"""Writes the tables of docs and README from the committed CSV files.

Each replaces what is between its two marks on a page. Try:

    python -m experiments.tables           # after a new result
    python -m experiments.tables --check   # fails if a table is not that of its files
"""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

import numpy as np

from common import envs, files, runs
from experiments import plot, records, reproduce

DOCS = records.ROOT / "docs"
EXPERIMENTS = records.ROOT / "experiments"
SPEED = records.ROOT / "benchmarks" / "results"
RESULTS = EXPERIMENTS / "results"
CLEANRL = EXPERIMENTS / "studies" / "cleanrl"
REFERENCE = reproduce.REFERENCE.parent
FROZEN = {  # tables of finished measurements, as they are shown
    **{name: SPEED / "tables" / f"{name}.csv" for name in ("throughput", "ppo_impala", "apex", "rnd")},
    "cleanrl": CLEANRL / "table.csv",
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
    """A column's number in the format `form`, followed by `after`; empty where the file has none."""
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
    columns |= {"gradient ms": number("gradient ms", "g")}
    return table(records.read_rows(SPEED / "encoders.csv"), columns)


def side_by_side() -> list[str]:
    """The score of each algorithm on test levels of two games, over seeds, with its error (`reproduce.pooled`)."""
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
            return plus_minus(*reproduce.pooled(found)) + (" (1 seed)" if len(found) == 1 else "")

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

    def at_end(row):
        found = at(row, "starpilot", 1_000_000)
        return reproduce.pooled(found)[0] if found else 0.0

    names = {"penalty 0.5": "TRPO's script, `--penalty 0.5`"}
    shown = [{"name": names.get(name, name), "of": of} for name, of in rows.items()]
    return table(sorted(shown, key=at_end, reverse=True), columns)


def six_doors() -> list[str]:
    """HN-PPO's measures of each method after six doors, published and ours."""
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


def at_the_end(row: dict) -> tuple[float, float, int, float]:
    """What we measured for a row of published.csv: value, standard error, number of seeds, steps (NaN where unknown).

    An evaluation's value is its mean, and its last one's where a file has several; a curve's, in training or on test
    levels, is the mean over the last tenth of its steps. Of several seeds: see `reproduce.pooled`.
    """
    path = EXPERIMENTS / row["file"]
    if path.suffix == ".json":  # an evaluation of an exported agent
        saved = json.loads(path.read_text())
        of = saved.get("test_levels") or saved["episodes"]  # Montezuma has no levels
        return of["mean_return"], of["std"] / (of["episodes"] - 1) ** 0.5, 1, float(saved["global_step"])
    chosen = dict(pair.split("=") for pair in shlex.split(row["rows"]))
    errors = "error" if row["column"] == "mean" else f"{row['column']} error"
    curves = {}
    for line in records.read_rows(path):
        if chosen.items() <= line.items() and line[row["column"]]:
            step = float(line.get("global_step") or line.get("step") or "nan")
            point = step, float(line[row["column"]]), float(line.get(errors) or "nan")
            curves.setdefault(line.get("seed") or line.get("run", ""), []).append(point)
    ends = []
    for curve in curves.values():
        steps, values, error = np.array(sorted(curve)).T
        late = steps >= 0.9 * steps[-1] if row["column"] in ("episodic_return", "test_levels") else [-1]
        ends.append({"step": steps[-1], "mean": values[late].mean(), "error": error[-1]})
    mean, error = reproduce.pooled(ends)
    return mean, error, len(ends), float(np.mean([end["step"] for end in ends]))


def plus_minus(mean: float, error: float) -> str:
    """2,303 ± 110, 25.1 ± 0.8, 9.39 ± 0.11; without an error where there is none, or none but 0."""
    digits = 0 if error >= 20 else 1 if error >= 0.195 else 2
    return f"{mean:.3g}" if np.isnan(error) or error == 0 else f"{mean:,.{digits}f} ± {error:.{digits}f}"


def beside() -> list[dict]:
    """What was published beside ours: experiments/reference/published.csv says where each is."""
    rows = []
    for row in records.read_rows(REFERENCE / "published.csv"):
        mean, error, seeds, step = at_the_end(row)
        theirs, steps = row["published"], row["steps"]
        if theirs.startswith("openai "):
            curve = openai("easy-all", theirs.split()[1])
            late = np.linspace(0.9 * step, step, 101)  # as ours
            theirs, steps = f"{np.interp(late, *curve).mean():.1f}", step
        steps = steps if isinstance(steps, str) and not steps.isdecimal() else in_millions(steps)
        logs = (EXPERIMENTS / row["logs"]).resolve().relative_to(records.ROOT)
        rows.append(row | {
            "game and setting": f"[{row['setting']}](../{logs})", "published": theirs, "ours": plus_minus(mean, error),
            "seeds": str(seeds), "steps": " / ".join(dict.fromkeys(filter(None, (steps, in_millions(step))))),
        })  # fmt: skip
    return rows


def published() -> list[str]:
    """`beside` as a table, with a numbered list of its notes below."""
    rows = beside()
    notes = list(dict.fromkeys(row["note"] for row in rows if row["note"]))
    columns = {name: itemgetter(name) for name in ("game and setting", "published", "ours", "seeds", "steps")}
    columns["note"] = lambda row: str(notes.index(row["note"]) + 1) if row["note"] else ""
    return [*table(rows, columns), "", *(f"{i}. {note}" for i, note in enumerate(notes, 1))]


def headlines() -> list[str]:
    """Of `beside` what the README shows."""
    columns = {"game and setting": itemgetter("game and setting")}
    columns["published"] = lambda row: f"{row['published']} ({row['who']})"
    columns["ours (seeds)"] = lambda row: f"{row['ours']} ({row['seeds']})"
    columns["steps"] = itemgetter("steps")
    return table([row for row in beside() if row["readme"] == "yes"], columns)


def millions(steps: str | float) -> str:
    """12.3M; nothing where it is not known."""
    return "" if steps == "" or np.isnan(float(steps)) else f"{float(steps) / 1e6:.3g}M"


def in_millions(steps: str | float) -> str:
    """As `millions`, with one decimal at most, as published lengths are given: 0.9M for 853,440."""
    return "" if steps == "" or np.isnan(float(steps)) else f"{float(steps) / 1e6:.1f}M".replace(".0M", "M")


# PUBLIC SCORES, GAME BY GAME


def openai(split: str, game: str) -> np.ndarray:
    """The curve of OpenAI's PPO, float64 [2, points] (steps, return)."""
    ((_, curve),) = plot.read_reference(split, [game]).items()
    return curve


def openai_at(split: str, steps: int) -> dict[str, float]:
    """The return of OpenAI's PPO in each game after a number of steps that the curves have."""
    curves = plot.read_reference(split, list(envs.GAMES))
    return {game: values[list(at).index(steps)] for (_, game), (at, values) in curves.items() if steps in at}


def public(setting: str, who: str, both: bool = False) -> dict[str, str]:
    """A column of baselines.csv: the score in each game; of `both`, on training / test levels."""
    found = {}
    for row in records.read_rows(REFERENCE / "baselines.csv"):
        if (row["setting"], row["who"]) == (setting, who):
            score = f"{float(row['score']):.1f}" + (f" ± {float(row['error']):.1f}" if row["error"] else "")
            found[row["game"]] = f"{float(row['train']):.1f} / {score}" if both else score
    return found


def shown(scores: dict[str, float]) -> dict[str, str]:
    return {game: f"{score:.1f}" for game, score in scores.items()}


def train_and_test(split: str, steps: int) -> dict[str, str]:
    train, test = (openai_at(f"{split}-{part}", steps) for part in ("train", "test"))
    return {game: f"{train[game]:.1f} / {test[game]:.1f}" for game in train if game in test}


def by_game(columns: dict[str, dict[str, str]], mode: str) -> list[str]:
    """A row for each game, and the normalised mean of each column that has all games."""
    rows = [{"game": game} | {name: of.get(game, "") for name, of in columns.items()} for game in envs.GAMES]
    means = {name: mean_normalized(of, mode) for name, of in columns.items()}
    rows.append({"game": "normalised mean"} | means)
    return table(rows, {name: itemgetter(name) for name in rows[0]})


def mean_normalized(scores: dict[str, str], mode: str) -> str:
    """0.39, or 0.60 / 0.35 of a column with two scores a cell; nothing unless all games are there."""
    if set(scores) != set(envs.GAMES):
        return ""
    pairs = np.array([[float(score) for score in scores[game].split(" / ")] for game in envs.GAMES])
    low, high = np.array([envs.RETURN_RANGES[mode][game] for game in envs.GAMES]).T
    means = ((pairs.T - low) / (high - low)).mean(-1)
    return " / ".join(f"{mean:.2f}" for mean in means)


def easy_all() -> list[str]:
    """Easy, all levels."""
    columns = {"OpenAI 8M": shown(openai_at("easy-all", 8_000_000))}
    columns |= {"entry 8M": public("easy-all", "competition entry")}
    columns |= {"OpenAI 25M": shown(openai_at("easy-all", 25_000_000)), "CleanRL 25M": public("easy-all", "CleanRL")}
    columns |= {"OpenAI 50M": shown(openai_at("easy-all", 50_000_000))}
    columns |= {"EpicPinkPenguin 50M": public("easy-all", "EpicPinkPenguin")}
    return by_game(columns, "easy")


def time_to_published() -> list[str]:
    """When the training returns of our runs of 8M steps pass OpenAI's PPO after 25M."""
    rows, scores = [], openai_at("easy-all", 25_000_000)
    for path in sorted((EXPERIMENTS / "results" / "ppo_8M").glob("*.csv")):
        score = scores[path.stem]
        later = [row for row in records.read_rows(path) if float(row["global_step"]) >= 64_000]  # see plot.times_to
        above = [row for row in later if float(row["episodic_return"] or "-inf") >= score]
        row = {"game": path.stem, "score": f"{score:.1f}", "at": "not by 8M", "minutes": ""}
        if above:
            row |= {"at": millions(above[0]["global_step"]), "minutes": f"{60 * float(above[0]['hours']):.1f}"}
        rows.append(row)
    names = {"game": "game", "OpenAI's PPO at 25M": "score", "ours passes it at": "at", "minutes": "minutes"}
    return table(rows, {name: itemgetter(key) for name, key in names.items()})


def easy_200() -> list[str]:
    """Easy, 200 training levels, 25M steps."""
    columns = {"OpenAI": train_and_test("easy-200", 25_000_000), "PPO of CLOP": public("easy-200", "PPO of CLOP", True)}
    columns |= {name: public("easy-200", name) for name in ("UCB-DrAC", "IDAAC", "CLOP")}
    columns |= {"S-RYM": public("easy-200", "S-RYM", True), "DQL": public("easy-200", "quantile DQL")}
    return by_game(columns, "easy")


def hard() -> list[str]:
    """Hard: all levels, and 500 training levels."""
    columns = {"OpenAI 50M": shown(openai_at("hard-all", 50_000_000))}
    columns |= {f"{who} 50M": public("hard-all", who) for who in ("PPG", "DreamerV3")}
    authors = {"PPO": "PPO of PPG's code", "PPG": "PPG's code", "PPG, one network,": "PPG's code, one network"}
    columns |= {f"{name} 100M": public("hard-all", who) for name, who in authors.items()}
    columns |= {"OpenAI 200M": shown(openai_at("hard-all", 200_000_000))}
    columns |= {"OpenAI 200M, 500 levels": train_and_test("hard-500", 200_000_000)}
    return by_game(columns, "hard")


def without_learning() -> tuple[dict[str, dict[str, str]], dict[str, list[tuple[float, float]]]]:
    """Random play and the best constant action in each game: cells of a table, and means with their errors."""
    rows = records.read_rows(EXPERIMENTS / "studies" / "constant_actions" / "constant_actions.csv")
    cells, scores = {game: {"game": game} for game in envs.GAMES}, {game: [] for game in envs.GAMES}
    for row in rows:
        if row["action"] == "random" or row["action"].endswith("played anew"):
            scores[row["game"]].append((float(row["mean"]), float(row["error"])))
            name = "random play" if row["action"] == "random" else "its return"
            cells[row["game"]][name] = plus_minus(*scores[row["game"]][-1])
            if name == "its return":
                cells[row["game"]]["best constant action"] = row["action"].split(",")[0]
    return cells, scores


def constant_actions() -> list[str]:
    """Random play and the best constant action in each game, and when OpenAI's PPO leaves that behind."""
    cells, scores = without_learning()
    for game, pairs in scores.items():
        highest = max((mean + 2 * error for mean, error in pairs), default=-np.inf)
        cells[game]["OpenAI's PPO above both from"] = above(game, highest)
    names = "game", "random play", "best constant action", "its return", "OpenAI's PPO above both from"
    return table([dict.fromkeys(names, "") | row for row in cells.values()], {name: itemgetter(name) for name in names})


def above(game: str, score: float) -> str:
    """The steps from which OpenAI's PPO (easy, all levels) stays above a score."""
    steps, values = openai("easy-all", game)
    below = np.flatnonzero(values <= score)
    first = 0 if not len(below) else below[-1] + 1
    return millions(steps[first]) if first < len(steps) else ""


def laptop_games() -> list[str]:
    """`make train`'s setting on each game: whether it is above what needs no learning, and OpenAI's PPO in training."""
    _, scores = without_learning()
    groups = {}  # by game and length, in 0.1M steps
    for row in records.read_rows(RESULTS / "laptop_games" / "games.csv"):
        groups.setdefault((row["game"], round(float(row["steps"]) / 1e5)), []).append(row)
    rows = []
    for (game, _), seeds in groups.items():
        mean, error = reproduce.pooled(seeds)
        steps = np.mean([float(row["steps"]) for row in seeds])
        learnt = all(mean - other > 2 * np.hypot(error, its_error) for other, its_error in scores[game])
        theirs = np.interp(steps, *openai("easy-all", game))
        row = {"steps": f"{steps / 1e6:.2f}M", "ours": f"{plus_minus(mean, error)} ({len(seeds)})"}
        rows.append({"game": game} | row | {"learnt": "yes" if learnt else "", "theirs": f"{theirs:.1f}"})
    columns = {"game": itemgetter("game"), "steps": itemgetter("steps"), "return (seeds)": itemgetter("ours")}
    columns |= {"above both": itemgetter("learnt"), "OpenAI's PPO": itemgetter("theirs")}
    return table(rows, columns)


def cleanrl_laptop() -> list[str]:
    """CleanRL's PPO and `make train`'s setting in training, seed 1 of both, after as many minutes of one core and after
    as many steps."""
    cells, _ = without_learning()
    wanted = {"run": "CleanRL", "seed": "1", "minutes": "26"}
    theirs = [row for row in records.read_rows(CLEANRL / "cleanrl.csv") if wanted.items() <= row.items()]
    rows = []
    for game, last in {row["game"]: row for row in theirs}.items():
        curve = [row for row in records.read_rows(RESULTS / "laptop_games" / f"{game}.csv") if row["seed"] == "1"]
        curve = [row for row in curve if row["episodic_return"]]
        ours = [row for row in curve if 60 * float(row["hours"]) <= 26][-1]
        before = [row for row in curve if float(row["global_step"]) <= float(last["step"])][-1]
        row = {"CleanRL's return": f"{float(last['mean_return']):.2f}", "its steps": millions(last["step"])}
        row |= {"ours at its steps": f"{float(before['episodic_return']):.2f}"}
        row |= {"ours": f"{float(ours['episodic_return']):.2f}", "our steps": millions(ours["global_step"])}
        rows.append(cells[game] | row)
    names = "game", "random play", "CleanRL's return", "its steps", "ours at its steps", "ours", "our steps"
    return table(rows, {name: itemgetter(name) for name in names})


PARTS = {
    "doors_update": doors, "encoders": encoders, "published": published, "headlines": headlines,
    "six_doors": six_doors, "side_by_side": side_by_side, "constant_actions": constant_actions, "easy_all": easy_all,
    "time_to_published": time_to_published, "easy_200": easy_200, "hard": hard, "laptop_games": laptop_games,
    "cleanrl_laptop": cleanrl_laptop,
    **{name: partial(frozen, name) for name in FROZEN},
}  # fmt: skip


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: by experiments/tables.py -->\n", f"<!-- end of {name} -->"


def fill(text: str, where: str) -> str:
    """A page's text with a new table between each pair of marks; raises UsageError if one of two marks is missing."""
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
