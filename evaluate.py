"""Evaluates trained agents: newest checkpoints of runs, or agents written by --export.

Prints their returns and writes eval.json and, with --video, a video and a film strip to the agent's folder. Try:

    python evaluate.py runs/bigfish__ppo_procgen__1__1790000000 --episodes 256 --levels test --video
    python evaluate.py agents/ppo_bigfish agents/hnppo_six_doors --video
    python evaluate.py runs/coinrun__ppo_procgen__1__1790000000 --human     # of a run with --num-levels
    python evaluate.py runs/bigfish__ppo_procgen__1__1790000000 --export my_agents/bigfish --push-to-hub me/bigfish
"""

import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import jax
import tyro
from annotated_types import Interval
from jax.sharding import Mesh, NamedSharding
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from common import agents, checkpoints, devices, envs, files, films, runs
from common.devices import REPLICATED
from common.flags import Seed


@dataclass(frozen=True)
class Args:
    run_dirs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN_DIRS")]
    """directories of runs, or of agents written by --export"""
    episodes: Annotated[int, Interval(ge=1, le=10**6)] = 128
    """episodes to play, rounded up so that all parallel environments play the same number (DoorGym: of each task)"""
    levels: Literal["train", "test"] = "test"
    """Procgen: play the training levels or the test levels (the same distribution if training levels were unlimited)"""
    video: bool = False
    """also write a video and a film strip: of one episode (Procgen), the best one (Montezuma) or a door of each task"""
    human: bool = False
    """also write a video of a training level beside a test level; for runs of Procgen with --num-levels"""
    random: bool = False
    """play uniformly random actions instead, for comparison"""
    seed: Seed = 0
    """seed of the environments and the policy's draws"""
    export: str = ""
    """export the agent, without training state, to this folder, and evaluate it from there"""
    push_to_hub: str = ""
    """OWNER/NAME on Hugging Face's hub: upload the exported agent there, with a model card of its scores"""


SIDES = {"training level": "train", "test level": "test"}  # of --human


def read_results(path: Path) -> dict:
    """An earlier eval.json; nothing where there is none. One that cannot be read is moved aside."""
    if not path.exists():
        return {}
    try:
        return files.read(path, dict, "RUN_DIR", "it is set aside")
    except runs.UsageError as error:
        print(error, file=sys.stderr)
        files.quarantine(path, path.parent)
        return {}


def show(title: str, rows: list[dict], summaries: dict[str, dict] | None = None) -> None:
    """Prints a table of rows, if there are any, and one with a line for each number and a column for each summary."""

    def text(value):
        if isinstance(value, list):
            return ", ".join(map(str, value))
        return f"{value:.3f}" if isinstance(value, float) else escape(str(value))

    summaries = summaries or {}
    numbers = list(next(iter(summaries.values()), {}))
    columns = [{"": number} | {name: x[number] for name, x in summaries.items()} for number in numbers]
    for lines in (rows, columns):
        if lines:
            table = Table(title=escape(title))
            for column in lines[0]:
                table.add_column(escape(column.replace("_", " ").replace("-", " ")), justify="right", overflow="fold")
            for line in lines:
                table.add_row(*map(text, line.values()))
            Console(emoji=False).print(table)


def export(script: ModuleType, saved: Any, run_dir: str, folder: Path) -> None:
    """Writes a run's agent to a folder and prints its size. Raises UsageError if the folder has another run's agent."""
    public = {"run_dir": "runs", "resume": "", "wandb_entity": ""}  # without the user's paths and names
    run = runs.read_args(run_dir, "RUN_DIR").get("run", Path(run_dir).resolve().name)
    content = {"script": script.SCRIPT, "run": run, "env_id": saved.env_id}
    content["args"] = dataclasses.asdict(dataclasses.replace(saved, **public))
    if (folder / "args.json").exists():
        there = runs.read_args(str(folder), "--export")
        kept = (name for name in runs.fixed(type(saved)) if name in there["args"])  # what a resumed run keeps
        args = json.loads(json.dumps(content["args"]))  # tuples are lists there
        same = there["script"] == script.SCRIPT and there.get("run", run) == run
        same = same and all(there["args"][name] == args[name] for name in kept)
        runs.check(same, f"--export {folder}: has an agent of another run, give another folder")
    tree = script.load_params(saved, script.make_agent(saved), run_dir)
    agents.write(folder, content, jax.device_get(tree))
    print(f"agent: {folder}, {(folder / agents.FILE).stat().st_size / 1e3:,.0f} kB")


def main(args: Args) -> list[dict]:
    """Evaluates runs or exported agents one after the other; returns their summaries.

    An eval.json keeps an earlier evaluation of more episodes at the same step.
    """
    runs.check(len(args.run_dirs) > 0, "RUN_DIRS: give at least one, such as agents/ppo_bigfish")
    runs.check(not args.export or len(args.run_dirs) == 1, f"--export {args.export}: give one run directory")
    trained = f"--push-to-hub {args.push_to_hub}: uploads trained agents, leave out --random"
    runs.check(not (args.push_to_hub and args.random), trained)
    if args.export:
        busy = os.path.exists(Path(args.export, "checkpoints"))
        runs.check(not busy, f"--export {args.export}: is a run directory, give another folder")
    if args.push_to_hub:
        agent = args.export or args.run_dirs[0]
        alone = len(args.run_dirs) == 1 and (args.export or os.path.exists(Path(agent, agents.FILE)))
        runs.check(alone, f"--push-to-hub {args.push_to_hub}: give one run and --export, or one exported agent")
        agents.check_hub(args.push_to_hub)
    chosen = [script_of(run_dir) for run_dir in args.run_dirs]  # all of them before the first is played
    for run_dir in args.run_dirs:
        files.check_parts(run_dir, "RUN_DIR")
        exported = Path(run_dir, agents.FILE)
        whole = agents.read(exported) if exported.exists() else checkpoints.steps_in(run_dir)
        runs.check(bool(whole), f"RUN_DIR {run_dir}: has no complete checkpoint yet")
        if not args.export:
            alone = ", or give --export FOLDER" if len(args.run_dirs) == 1 else ""
            files.make_folder(Path(run_dir), "RUN_DIR", f"copy it to another folder{alone}")
    for run_dir, (script, saved) in zip(args.run_dirs, chosen, strict=True):
        has_levels = isinstance(saved, envs.GameArgs)
        what = f"--levels train: has no effect on {script.SCRIPT}.py, whose game has no levels to train on"
        runs.check(has_levels or args.levels == "test", what)
        if args.human:
            of = f"--human: RUN_DIR {run_dir}"
            runs.check(has_levels, f"{of} is of a game without levels, give --video")
            runs.check(saved.num_levels > 0, f"{of} was trained on all levels, give --video")
    answers = [play(args, run_dir, *one) for run_dir, one in zip(args.run_dirs, chosen, strict=True)]
    if len(answers) > 1:
        names = [Path(run_dir).resolve().name for run_dir in args.run_dirs]
        if len(set(names)) < len(names):
            names = args.run_dirs
        summaries = {name: {"step": x.step} | x.summary for name, x in zip(names, answers, strict=True)}
        if all(x.keys() == summaries[names[0]].keys() for x in summaries.values()):
            show(f"{len(summaries)} runs", [], summaries)
    if args.push_to_hub:
        print(f"uploaded: {agents.push(Path(agent), args.push_to_hub)}")
    return [answer.summary for answer in answers]


def script_of(run_dir: str) -> tuple[ModuleType, Any]:
    """The script of a run or an exported agent, and its arguments on this machine; raises UsageError."""
    name = runs.read_args(run_dir, "RUN_DIR")["script"]
    here = [path.stem for path in Path(__file__).parent.glob("*_*.py")]
    runs.check(name in here, f"RUN_DIR {run_dir}: it is a run of {name}.py, which is not here")
    script = importlib.import_module(name)
    saved = runs.on_this_machine(runs.saved_args(script.Args, run_dir, "RUN_DIR"))
    try:
        runs.check_flags(saved)
    except runs.UsageError as error:
        raise runs.UsageError(f"RUN_DIR {run_dir}: in its args.json, {error}") from None
    return script, saved


def load_policy(script: ModuleType, saved: envs.GameArgs, run_dir: str) -> tuple[Mesh, int, Callable]:
    """The mesh of a run of Procgen or an exported agent, its step, and its policy for `envs.play_episodes`."""
    agent, mesh = script.make_agent(saved), devices.make_mesh(saved)
    state = jax.device_put(script.load_params(saved, agent, run_dir), NamedSharding(mesh, REPLICATED))
    return mesh, int(state["global_step"]), partial(script.make_policy(saved, agent, mesh), state["params"])


def procgen_policy(run_dir: str) -> tuple[ModuleType, Any, Mesh, int, Callable]:
    """The script of a run or an exported agent, its arguments, its mesh, its step, and its policy for
    `envs.play_episodes`. Raises UsageError, also if it is not of Procgen."""
    script, saved = script_of(run_dir)
    runs.check(isinstance(saved, envs.GameArgs), f"RUN_DIR {run_dir}: is of {script.SCRIPT}.py, give a run of Procgen")
    return script, saved, *load_policy(script, saved, run_dir)


def make_evaluate(script: ModuleType, saved: Any, run_dir: str) -> Callable[..., runs.Evaluation]:
    """The function that evaluates a run: `envs.evaluate_checkpoint` for Procgen, else the script's. Procgen's policy is
    read once, since a run that trains writes a newer checkpoint meanwhile."""
    if isinstance(saved, envs.GameArgs):
        return partial(envs.evaluate_checkpoint, saved, *load_policy(script, saved, run_dir))
    return partial(script.evaluate, saved, run_dir)


def play(args: Args, run_dir: str, script: ModuleType, saved: Any) -> runs.Evaluation:
    """Evaluates one run or exported agent."""
    path = Path(args.export or run_dir)
    if args.export:
        export(script, saved, run_dir, path)
    evaluate = make_evaluate(script, saved, str(path))
    how = {"seed": args.seed, "random": args.random}
    answer = evaluate(episodes=args.episodes, levels=args.levels, video=args.video, **how)
    old = read_results(path / "eval.json")
    same_step = old if old.get("global_step") == answer.step else {}
    entry = answer.summary | (answer.details or {}) | {"seed": args.seed}
    before = same_step.get(answer.name)
    number = before.get("episodes") if isinstance(before, dict) else None
    if isinstance(number, int) and number > entry["episodes"]:
        print(f"{path / 'eval.json'} keeps its earlier evaluation of {number} episodes")
    else:
        runs.write_json(path / "eval.json", same_step | {"global_step": answer.step, answer.name: entry})
    title = f"{path.resolve().name}, step {answer.step:,}, {answer.title}"
    show(title, answer.rows, {answer.name.replace("_", " "): answer.summary})
    if args.video:
        video = path / "videos" / f"{answer.name}_{answer.step}.mp4"
        films.write_video(video, answer.film, answer.fps)
        print(f"video: {video}")
        strip = video.with_suffix(".png")
        films.write_picture(strip, films.film_strip(answer.film, answer.scenes))
        print(f"film strip: {strip}")
    if args.human:
        sides = {name: evaluate(episodes=1, levels=x, video=True, **how).film for name, x in SIDES.items()}
        both = path / "videos" / f"{'random_' if args.random else ''}side_by_side_{answer.step}.mp4"
        films.write_video(both, films.side_by_side(sides), answer.fps)
        print(f"side by side: {both}")
    return answer


if __name__ == "__main__":
    runs.cli(Args, main)
