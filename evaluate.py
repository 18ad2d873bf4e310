"""Plays a trained agent: a table of its returns, eval.json and a video in the run directory. Try:

python evaluate.py runs/bigfish__ppo_procgen__1__1790000000 --episodes 256 --levels test --video
python evaluate.py runs/MontezumaRevenge-v5__rnd_montezuma__1__1790000000 --episodes 8 --video
"""

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import tyro
from rich.console import Console
from rich.table import Table

from common import envs, runs


@dataclass(frozen=True)
class Args:
    run_dir: tyro.conf.Positional[str]
    """the run directory"""
    episodes: int = 128
    """episodes to play, the same number in each game"""
    levels: Literal["train", "test"] = "test"
    """of Procgen: the levels trained on, or unseen ones (the same distribution where training levels were unlimited)"""
    video: bool = False
    """also write a video: of one episode in Procgen, of the best one in Montezuma's Revenge"""
    random: bool = False
    """play uniformly random actions instead, for comparison"""
    seed: int = 0
    """of the games and the policy's draws"""


def read_results(path: Path) -> dict:
    """An earlier eval.json; nothing where there is none that can be read."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def random_policy(frames, age, key, memory):
    return jax.random.randint(key, len(frames), 0, envs.NUM_ACTIONS), None


def show(title: str, rows: list[dict], summary: dict) -> None:
    """Prints a table of rows, if there are any, and one of the summary."""

    def text(value):
        if isinstance(value, list):
            return ", ".join(map(str, value))
        return f"{value:.3f}" if isinstance(value, float) else str(value)

    for lines in (rows, [summary]):
        if lines:
            table = Table(title=title)
            for column in lines[0]:
                table.add_column(column.replace("_", " ").replace("-", " "), justify="right")
            for line in lines:
                table.add_row(*map(text, line.values()))
            Console().print(table)


def main(args: Args) -> dict:
    """Evaluates the newest checkpoint of a run; returns what eval.json now says of it.

    A script whose game is not Procgen has an `evaluate` of its own (see rnd_montezuma.py).
    """
    runs.check(args.episodes >= 1, f"--episodes {args.episodes}: must be 1 or more")
    runs.check(0 <= args.seed <= envs.MAX_SEED, f"--seed {args.seed}: must be from 0 to {envs.MAX_SEED}")
    path, name = Path(args.run_dir), runs.read_args(args.run_dir, "RUN_DIR")["script"]
    here = Path(__file__).with_name(f"{name}.py").exists()
    runs.check(here, f"RUN_DIR {args.run_dir}: it is a run of {name}.py, which is not here")
    script = importlib.import_module(name)
    run_args = runs.saved_args(script.Args, args.run_dir, "RUN_DIR")
    if hasattr(script, "evaluate"):
        runs.check(args.levels == "test", f"--levels {args.levels}: has no effect on {name}.py's game")
        answer = script.evaluate(run_args, args.run_dir, args.episodes, args.seed, args.random, args.video)
        step, title, rows, summary, film = answer
        name = "random_episodes" if args.random else "episodes"
        title = f"step {step:,}, {title}"
    else:
        step, policy = script.load_policy(run_args, args.run_dir)
        policy = random_policy if args.random else policy
        name = f"{'random_' if args.random else ''}{args.levels}_levels"
        summary, film = envs.evaluate(run_args, policy, args.levels, args.episodes, args.seed, record=args.video)
        title, rows = f"step {step:,}, {name.replace('_', ' ')}", []
    show(f"{path.name}, {title}", rows, summary)
    if hasattr(run_args, "num_levels") and not run_args.num_levels:
        print("training levels were unlimited: these come from the same distribution")

    old = read_results(path / "eval.json")
    same_step = old if old.get("global_step") == step else {}
    runs.write_json(path / "eval.json", same_step | {"global_step": step, name: summary})
    if args.video:
        video = path / "videos" / f"{name}_{step}.mp4"
        runs.write_video(video, film)
        print(f"video: {video}")
    return summary


if __name__ == "__main__":
    runs.cli(Args, main)
