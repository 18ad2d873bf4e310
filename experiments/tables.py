"""Writes the tables of docs and README from the committed CSV files.

Each replaces what is between its two marks on a page. Try:

    python -m experiments.tables           # after a new result
    python -m experiments.tables --check   # fails if a table is out of date
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

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


def table(rows: list[dict[str, str]], columns: Sequence[str] = ()) -> list[str]:
    """A Markdown table of these columns of the rows, or all."""
    columns = list(columns or rows[0])
    lines = [columns, ["---"] * len(columns), *([row[name] for name in columns] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def frozen(name: str) -> list[str]:
    """A table of FROZEN."""
    return table(records.read_rows(FROZEN[name]))


def doors() -> list[str]:
    rows, counts = [], ("trainable parameters", "decisions", "gradient steps")
    for row in records.read_rows(SPEED / "doors_update.csv"):
        rollout, update = (f"{float(row[name]):.1f} s" for name in ("rollout s", "update s"))
        shown = {"setting": row["setting"]} | {name: f"{int(row[name]):,}" for name in counts}
        shown |= {"physics and inference": rollout, "update": update, "decisions/s": f"{int(row['decisions/s']):,}"}
        rows.append(shown)
    return table(rows)


def encoders() -> list[str]:
    rows = [row | {"parameters": f"{int(row['parameters']):,}"} for row in records.read_rows(SPEED / "encoders.csv")]
    return table(rows, ("encoder", "parameters", "MFLOP", "KiB kept", "forward ms", "gradient ms"))


def side_by_side() -> list[str]:
    """The score of each algorithm on test levels of two games, over seeds, with its error (`reproduce.pooled`)."""
    evaluated = {}
    for row in records.read_rows(RESULTS / "algorithms_nature_evaluations.csv"):
        name, game = row["cell"].rsplit(", ", 1)
        evaluated.setdefault(name, {"starpilot": [], "coinrun": []})[game].append(row)

    def at(rows, steps):
        """Of each seed the evaluation there, of its longest run."""
        near = (row for row in rows if abs(int(row["step"]) - steps) <= 0.02 * steps)
        return list({row["seed"]: row for row in sorted(near, key=lambda row: int(row["of steps"]))}.values())

    def score(found):
        if not found:
            return ""
        return plus_minus(*reproduce.pooled(found)) + (" (1 seed)" if len(found) == 1 else "")

    def at_end(games):
        found = at(games["starpilot"], 1_000_000)
        return reproduce.pooled(found)[0] if found else 0.0

    names = {"penalty 0.5": "TRPO's script, `--penalty 0.5`"}
    rows = []
    for name, games in sorted(evaluated.items(), key=lambda item: at_end(item[1]), reverse=True):
        row = {"": names.get(name, name)}
        for game in games:
            row |= {f"{game}, {millions(steps)}": score(at(games[game], steps)) for steps in (500_000, 1_000_000)}
        # All but batch 32 have run on this machine.
        on_one = [one for one in games["starpilot"] if one["machine"] == "AMD EPYC, 1 cores"]
        rates = [float(one["steps/s"]) for one in on_one if one["steps/s"]]
        rows.append(row | {"steps/s": f"{max(rates):.0f}" if rates else ""})
    return table(rows)


def six_doors() -> list[str]:
    """HN-PPO's measures of each method after six doors, published and ours, means over seeds."""
    names = "studies/doorgym_six/matrices", "results/doorgym_gripper/matrices", "studies/doorgym_six/fresh_critic"
    names += ("studies/doorgym_six/ordinary",)
    rows = [row for name in names for row in records.read_rows(EXPERIMENTS / f"{name}.csv")]
    rows = [row for row in rows if row["tasks_learnt"] == "6"]
    theirs = {row["method"]: row for row in rows if row["whose"] == "published"}
    ours, shown = {}, []
    for row in rows:
        if row["whose"] == "ours":
            ours.setdefault(row["method"], []).append(row)
    for method, seeds in ours.items():
        both = {"published / ours (seeds)": f"{method} ({len(seeds)})"}
        for name in ("ACC", "FWT", "BWT", "BWT+", "REM"):
            published = f"{float(theirs[method][name]):.2f}" if method in theirs else "none"
            both[name] = f"{published} / {np.mean([float(row[name]) for row in seeds]):.2f}"
        shown.append(both | {"our decisions": millions(np.mean([float(row["step"]) for row in seeds]))})
    return table(shown)


def final_score(row: dict) -> tuple[float, float, int, float]:
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
    if np.isnan(error) or error == 0:
        return f"{mean:,.0f}" if mean >= 1000 else f"{mean:.3g}"
    return f"{mean:,.{digits}f} ± {error:.{digits}f}"


def compare_published() -> list[dict]:
    """What was published beside ours: experiments/reference/published.csv says where each is."""
    rows = []
    for row in records.read_rows(REFERENCE / "published.csv"):
        mean, error, seeds, step = final_score(row)
        theirs, steps = row["published"], row["steps"]
        if theirs.startswith("openai "):
            curve = openai(theirs.split()[1])
            late = np.linspace(0.9 * step, step, 101)  # as ours
            theirs = f"{np.interp(late, *curve).mean():.1f}"
        steps = round_millions(steps) if steps.isdecimal() else steps
        logs = (EXPERIMENTS / row["logs"]).resolve().relative_to(records.ROOT)
        rows.append(row | {
            "game and setting": f"[{row['setting']}](../{logs})", "published": theirs, "ours": plus_minus(mean, error),
            "seeds": str(seeds), "steps": " / ".join(dict.fromkeys(filter(None, (steps, round_millions(step))))),
        })  # fmt: skip
    return rows


def published() -> list[str]:
    """`compare_published` as a table, with a numbered list of its notes below."""
    rows = compare_published()
    notes = list(dict.fromkeys(row["note"] for row in rows if row["note"]))
    rows = [row | {"note": str(notes.index(row["note"]) + 1) if row["note"] else ""} for row in rows]
    columns = "game and setting", "published", "ours", "seeds", "steps", "note"
    return [*table(rows, columns), "", *(f"{i}. {note}" for i, note in enumerate(notes, 1))]


def headlines() -> list[str]:
    """Of `compare_published` what the README shows."""
    rows = [row for row in compare_published() if row["readme"] == "yes"]
    for row in rows:
        row["published"] += f" ({row['who']})"
        row["ours (seeds)"] = f"{row['ours']} ({row['seeds']})"
    return table(rows, ("game and setting", "published", "ours (seeds)", "steps"))


def millions(steps: str | float) -> str:
    """12.3M."""
    return f"{float(steps) / 1e6:.3g}M"


def round_millions(steps: str | float) -> str:
    """With one decimal at most, as published lengths are given: 0.9M for 853,440; nothing for NaN."""
    return "" if np.isnan(float(steps)) else f"{float(steps) / 1e6:.1f}M".replace(".0M", "M")


# PUBLIC SCORES, GAME BY GAME


def openai(game: str) -> np.ndarray:
    """The curve of OpenAI's PPO (easy, all levels), float64 [2, points] (steps, return)."""
    ((_, curve),) = plot.read_reference("easy-all", [game]).items()
    return curve


def openai_at(split: str, steps: int) -> dict[str, float]:
    """The return of OpenAI's PPO in each game after a number of steps."""
    curves = plot.read_reference(split, list(envs.GAMES))
    return {game: np.interp(steps, *curve) for (_, game), curve in curves.items()}


def public(setting: str, who: str, both: bool = False) -> dict[str, str]:
    """A column of baselines.csv: the score in each game; of `both`, on training / test levels."""
    found = {}
    for row in records.read_rows(REFERENCE / "baselines.csv"):
        if (row["setting"], row["who"]) == (setting, who):
            score = f"{float(row['score']):.1f}" + (f" ± {float(row['error']):.1f}" if row["error"] else "")
            found[row["game"]] = f"{float(row['train']):.1f} / {score}" if both else score
    return found


def rounded(scores: dict[str, float]) -> dict[str, str]:
    return {game: f"{score:.1f}" for game, score in scores.items()}


def train_and_test(split: str, steps: int) -> dict[str, str]:
    train, test = (openai_at(f"{split}-{part}", steps) for part in ("train", "test"))
    return {game: f"{train[game]:.1f} / {test[game]:.1f}" for game in train}


def by_game(columns: dict[str, dict[str, str]], mode: str) -> list[str]:
    """A row for each game, and the normalised mean of each column that has all games."""
    rows = [{"game": game} | {name: of.get(game, "") for name, of in columns.items()} for game in envs.GAMES]
    means = {name: mean_normalized(of, mode) for name, of in columns.items()}
    rows.append({"game": "normalised mean"} | means)
    return table(rows)


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
    columns = {"OpenAI 8M": rounded(openai_at("easy-all", 8_000_000))}
    columns |= {"entry 8M": public("easy-all", "competition entry")}
    columns |= {"OpenAI 25M": rounded(openai_at("easy-all", 25_000_000)), "CleanRL 25M": public("easy-all", "CleanRL")}
    columns |= {"OpenAI 50M": rounded(openai_at("easy-all", 50_000_000))}
    columns |= {"EpicPinkPenguin 50M": public("easy-all", "EpicPinkPenguin")}
    return by_game(columns, "easy")


def time_to_published() -> list[str]:
    """When the training returns of our runs of 8M steps pass OpenAI's PPO after 25M."""
    rows, scores = [], openai_at("easy-all", 25_000_000)
    for path in sorted((RESULTS / "ppo_8M").glob("*.csv")):
        score = scores[path.stem]
        later = [row for row in records.read_rows(path) if float(row["global_step"]) >= 64_000]  # see plot.times_to
        above = [row for row in later if float(row["episodic_return"] or "-inf") >= score]
        at, minutes = "not by 8M", ""
        if above:
            at, minutes = millions(above[0]["global_step"]), f"{60 * float(above[0]['hours']):.1f}"
        row = {"game": path.stem, "OpenAI's PPO at 25M": f"{score:.1f}", "ours passes it at": at, "minutes": minutes}
        rows.append(row)
    return table(rows)


def easy_200() -> list[str]:
    """Easy, 200 training levels, 25M steps."""
    columns = {"OpenAI": train_and_test("easy-200", 25_000_000), "PPO of CLOP": public("easy-200", "PPO of CLOP", True)}
    columns |= {name: public("easy-200", name) for name in ("UCB-DrAC", "IDAAC", "CLOP")}
    columns |= {"S-RYM": public("easy-200", "S-RYM", True), "DQL": public("easy-200", "quantile DQL")}
    return by_game(columns, "easy")


def hard() -> list[str]:
    """Hard: all levels, and 500 training levels."""
    columns = {"OpenAI 50M": rounded(openai_at("hard-all", 50_000_000))}
    columns |= {f"{who} 50M": public("hard-all", who) for who in ("PPG", "DreamerV3")}
    authors = {"PPO": "PPO of PPG's code", "PPG": "PPG's code", "PPG, one network,": "PPG's code, one network"}
    columns |= {f"{name} 100M": public("hard-all", who) for name, who in authors.items()}
    columns |= {"OpenAI 200M": rounded(openai_at("hard-all", 200_000_000))}
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
        highest = max(mean + 2 * error for mean, error in pairs)
        cells[game]["OpenAI's PPO above both from"] = steps_above(game, highest)
    columns = "game", "random play", "best constant action", "its return", "OpenAI's PPO above both from"
    return table(list(cells.values()), columns)


def steps_above(game: str, score: float) -> str:
    """The steps from which OpenAI's PPO (easy, all levels) stays above a score."""
    steps, values = openai(game)
    first = max(np.flatnonzero(values <= score), default=-1) + 1
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
        theirs = np.interp(steps, *openai(game))
        row = {"game": game, "steps": f"{steps / 1e6:.2f}M"}
        row |= {"return (seeds)": f"{plus_minus(mean, error)} ({len(seeds)})", "above both": "yes" if learnt else ""}
        rows.append(row | {"OpenAI's PPO": f"{theirs:.1f}"})
    return table(rows)


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
    columns = "game", "random play", "CleanRL's return", "its steps", "ours at its steps", "ours", "our steps"
    return table(rows, columns)


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
