"""Plays a trained agent: a table of its returns, eval.json, a video and a strip of it in the run directory. Try:

python evaluate.py runs/bigfish__ppo_procgen__1__1790000000 --episodes 256 --levels test --video
python evaluate.py runs/MontezumaRevenge-v5__rnd_montezuma__1__1790000000 --episodes 8 --video
"""

import common  # noqa: F401, I001 - first: from here on signals are answered
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console
from rich.table import Table

from common import files, runs


@dataclass(frozen=True)
class Args:
    run_dir: tyro.conf.Positional[str]
    """the run directory"""
    episodes: int = 128
    """episodes to play, the same number in each game"""
    levels: Literal["train", "test"] = "test"
    """of Procgen: the levels trained on, or unseen ones (the same distribution where training levels were unlimited)"""
    video: bool = False
    """also write a video and a film strip: of an episode in Procgen, the best one of Montezuma, a door a task"""
    random: bool = False
    """play uniformly random actions instead, for comparison"""
    seed: int = 0
    """of the games and the policy's draws"""


def read_results(path: Path) -> dict:
    """An earlier eval.json; nothing where there is none. One that cannot be read is moved aside."""
    if not path.exists():
        return {}
    try:
        return files.read(path, dict, "RUN_DIR", "it is set aside")
    except runs.UsageError as error:
        print(error, file=sys.stderr)
        files.set_aside(path, path.parent / "damaged")
        return {}


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
    """Evaluates the newest checkpoint of a run; returns what eval.json now says of it."""
    runs.check_limits(args, {"episodes": (1, 10**6), "seed": (0, runs.MAX_SEED)})
    path = Path(args.run_dir)
    name = runs.read_args(args.run_dir, "RUN_DIR")["script"]
    here = [path.stem for path in Path(__file__).parent.glob("*_*.py")]
    runs.check(name in here, f"RUN_DIR {args.run_dir}: it is a run of {name}.py, which is not here")
    script = importlib.import_module(name)
    saved = runs.on_this_machine(runs.saved_args(script.Args, args.run_dir, "RUN_DIR"))
    try:
        runs.check_flags(saved)
    except runs.UsageError as error:
        raise runs.UsageError(f"RUN_DIR {args.run_dir}: of its args.json, {error}") from None
    files.make_folder(path, "RUN_DIR")
    answer = script.evaluate(
        saved,
        args.run_dir,
        episodes=args.episodes,
        seed=args.seed,
        levels=args.levels,
        random=args.random,
        video=args.video,
    )
    show(f"{path.name}, step {answer.step:,}, {answer.title}", answer.rows, answer.summary)

    old = read_results(path / "eval.json")
    same_step = old if old.get("global_step") == answer.step else {}
    runs.write_json(path / "eval.json", same_step | {"global_step": answer.step, answer.name: answer.summary})
    if args.video:
        video = path / "videos" / f"{answer.name}_{answer.step}.mp4"
        runs.write_video(video, answer.film, answer.fps)
        print(f"video: {video}")
        strip = video.with_suffix(".png")
        runs.write_picture(strip, runs.film_strip(answer.film, answer.scenes))
        print(f"film strip: {strip}")
    return answer.summary


if __name__ == "__main__":
    runs.cli(Args, main)
