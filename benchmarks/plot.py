"""Learning curves of runs: a CSV table and a picture. Try:

python benchmarks/plot.py runs/bigfish* --out benchmarks/results/bigfish --random 0.9 --reference easy-all
"""

import contextlib
import csv
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib as mpl
import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import runs

mpl.use("Agg")
import matplotlib.pyplot as plt

REFERENCE = Path(__file__).parent / "reference" / "openai_ppo_procgen_easy_curves.csv"
COLUMNS = {
    "global_step": "global_step",
    "charts/episodic_return": "episodic_return",
    "eval/train_levels/mean_return": "train_levels",
    "eval/test_levels/mean_return": "test_levels",
    "charts/intrinsic_reward": "intrinsic_reward",
    "charts/episodic_intrinsic_return": "episodic_intrinsic_return",
    "charts/prediction_error": "prediction_error",
    "charts/rooms_visited": "rooms_visited",
    "charts/max_room_score": "max_room_score",
    "charts/episodic_length": "episodic_length",
    "charts/task": "task",
    "charts/success_rate": "success_rate",
    "eval/success_rate": "evaluated_success_rate",
    "losses/penalty": "penalty",
    "losses/entropy": "entropy",
    "losses/explained_variance": "explained_variance",
    "losses/intrinsic_explained_variance": "intrinsic_explained_variance",
    "charts/SPS": "steps_per_second",
}


@dataclass(frozen=True)
class Args:
    run_dirs: tyro.conf.Positional[tuple[str, ...]]
    """run directories, of one game"""
    out: str = "curve"
    """where to write: OUT.csv and OUT.png"""
    random: float | None = None
    """return of a random policy on the same levels (evaluate.py --random), drawn as a line"""
    reference: Literal["", "easy-all", "easy-200-train", "easy-200-test"] = ""
    """also draw OpenAI's PPO"""
    hours: bool = False
    """draw the curves over wall time too, in a second panel"""
    metrics: tuple[str, ...] = ("charts/episodic_return",)
    """what to draw, a row each, such as charts/episodic_return charts/intrinsic_reward"""
    points: int = 400
    """at most this many rows a run"""


def read_run(run_dir: str) -> tuple[dict, list[dict]]:
    """A run's args.json and game, and its metrics with `hours` since the first line (as long as it ran in one go)."""
    content = runs.read_args(run_dir, "RUN_DIRS")
    content["game"] = content["args"].get("env_id", Path(run_dir).resolve().name.split("__")[0])
    lines = []
    for line in Path(run_dir, "metrics.jsonl").read_text().splitlines():
        with contextlib.suppress(ValueError):  # the last line of a killed run
            lines.append(json.loads(line))
    for line in lines:
        line["hours"] = (line["time"] - lines[0]["time"]) / 3600
    return content, lines


def thin(lines: list[dict], points: int) -> list[dict]:
    """Every n-th line, and each that holds an evaluation."""
    every = max(1, len(lines) // points)
    return [x for i, x in enumerate(lines) if i % every == 0 or any(k.startswith("eval/") for k in x)]


def differing(content: dict, everything: list) -> str:
    """The flags that tell a run of a script from the others', such as "pool avg", but for seeds and places."""
    others = [other["args"] for other, _ in everything if other["script"] == content["script"]]
    same = {"seed", "run_dir", "resume", "total_timesteps"}
    known = [k for k in content["args"] if k not in same and all(k in other for other in others)]
    return " ".join(f"{k} {content['args'][k]}" for k in known if any(o[k] != content["args"][k] for o in others))


def main(args: Args) -> None:
    runs.check(len(args.run_dirs) > 0, "RUN_DIRS: give at least one run directory")
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    panels = ("global_step", "hours") if args.hours else ("global_step",)
    unknown = [name for name in args.metrics if name not in COLUMNS]
    runs.check(not unknown, f"--metrics {' '.join(unknown)}: give some of {' '.join(COLUMNS)}")
    size = (8 if len(panels) == 1 else 12), 2 + 3 * len(args.metrics)
    grid = len(args.metrics), len(panels)
    figure, axes = plt.subplots(*grid, figsize=size, dpi=120, squeeze=False, sharex="col", layout="constrained")
    rows, kinds = [], []
    everything = [read_run(run_dir) for run_dir in args.run_dirs]
    for (content, lines), style in zip(everything, ("-", "--", "-.", ":") * len(everything), strict=False):
        script, game, seed = content["script"], content["game"], content["args"]["seed"]
        kinds = list(dict.fromkeys([*kinds, (script, flags := differing(content, everything))]))
        color = f"C{kinds.index((script, flags)) % 10}"
        name = ", ".join(filter(None, (script.split("_")[0].upper(), flags, f"seed {seed}")))
        lines = thin(lines, args.points)
        for row, metric in zip(axes, args.metrics, strict=True):
            for axis, x in zip(row, panels, strict=True):
                shown = [line for line in lines if metric in line]
                points = [line[x] for line in shown], [line[metric] for line in shown]
                axis.plot(*points, style, color=color, lw=1, label=name)
        for axis, x in zip(axes[0], panels, strict=True):
            for levels, marker in (("train", "s"), ("test", "o")):
                key = f"eval/{levels}_levels/mean_return"
                shown = [line for line in lines if key in line]
                points = [line[x] for line in shown], [line[key] for line in shown]
                axis.plot(*points, marker, color=color, mec="k", ms=5)
        for line in lines:
            row = {"script": script, "flags": flags, "seed": seed, "hours": f"{line['hours']:.4f}"}
            rows.append(row | {short: f"{line[k]:.6g}" for k, short in COLUMNS.items() if k in line})
    evaluated = any("train_levels" in row or "test_levels" in row for row in rows)
    for levels, marker in (("train", "s"), ("test", "o")) if evaluated else ():
        axes[0, 0].plot([], [], marker, color="w", mec="k", ms=5, label=f"evaluation, {levels} levels")
    if args.random is not None:
        for axis in axes[0]:
            axis.axhline(args.random, color="0.4", ls=":", label=f"random policy: {args.random:g}")
    if args.reference:
        with REFERENCE.open() as file:
            curve = [x for x in csv.DictReader(file) if x["split"] == args.reference and x["game"] == game]
        last = max(float(row["global_step"]) for row in rows)
        curve = [x for x in curve if float(x["env_steps"]) <= 1.3 * last]
        points = [float(x["env_steps"]) for x in curve], [float(x["mean_return"]) for x in curve]
        axes[0, 0].plot(*points, "^-", color="0.6", ms=4, label=f"OpenAI's PPO, {args.reference}")
    title = f"{' and '.join(dict.fromkeys(script for script, _ in kinds))} on {game}"
    labels = {"charts/episodic_return": "return of an episode (lines: last 100)"}
    for row, metric in zip(axes, args.metrics, strict=True):
        for axis in row:
            axis.set(ylabel=labels.get(metric, COLUMNS[metric].replace("_", " ")))
            axis.grid(alpha=0.3)
    for axis, label in zip(axes[-1], ("environment steps", "hours"), strict=False):
        axis.set(xlabel=label)
    figure.suptitle(title)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(out.with_suffix(".png"))
    with out.with_suffix(".csv").open("w", newline="") as file:
        columns = [short for short in COLUMNS.values() if any(short in row for row in rows)]
        writer = csv.DictWriter(file, ["script", "flags", "seed", "hours", *columns])
        writer.writeheader()
        writer.writerows(rows)
    print(f"{out.with_suffix('.csv')}, {out.with_suffix('.png')}")


if __name__ == "__main__":
    runs.cli(Args, main)
