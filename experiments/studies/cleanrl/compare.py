"""Runs CleanRL's PPO on Procgen, then ours with its settings and ours with --flags, for the same minutes each.

    python3.10 -m venv theirs && theirs/bin/pip install torch tyro tensorboard procgen "gym==0.23.1" "numpy<2"
    python -m experiments.studies.cleanrl.compare cleanrl/cleanrl/ppo_procgen.py --python theirs/bin/python \
        --flags="--encoder nature"
    python -m experiments.studies.cleanrl.compare cleanrl/cleanrl/ppo_procgen.py --python theirs/bin/python \
        --env-id jumper --minutes 26 --run-dir RUN_DIR

A curve is the mean return of the last hundred training episodes over steps and over minutes since the process started,
compilation included. Of episodes that end in the same step CleanRL prints one. Runs found in OUT.csv are not repeated.
"""

import contextlib
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tyro
from matplotlib.ticker import EngFormatter

import evaluate
import ppo_procgen as ppo
from common import envs, files, runs
from common.flags import PositiveFloat, Seed
from experiments import plot, records, trials

# CleanRL's settings (OpenAI's but for the reward normaliser's discount and the initial weights) as our flags.
SETTINGS = (
    "--frame-stack 1 --encoder impala --center no --init pytorch --width 1 --pool flatten --num-envs 64 --num-steps 256"
    " --num-minibatches 8 --update-epochs 3 --learning-rate 5e-4 --gamma 0.999 --gae-lambda 0.95 --clip-coef 0.2"
    " --kl-coef 0 --vf-coef 0.5 --vf-clip 0.2 --ent-coef 0.01 --max-grad-norm 0.5 --adam-eps 1e-5 --normalize-rewards"
)
EPISODE = re.compile(r"global_step=(\d+), episodic_return=(\S+)")
FOREVER = 2**30  # steps; the clock ends a run


@dataclass(frozen=True)
class Args:
    script: tyro.conf.Positional[str]
    """path of CleanRL's ppo_procgen.py"""
    python: str = "python3.10"
    """interpreter that runs it"""
    env_id: envs.Game = "starpilot"
    """Procgen game"""
    minutes: PositiveFloat = 30.0
    """length of each run"""
    flags: str = ""
    """flags of a third run, of ppo_procgen.py here; none for two runs only"""
    run_dir: str = ""
    """finished run of ppo_procgen.py to compare CleanRL with, in place of new runs"""
    seed: Seed = 1
    """seed of all runs"""
    out: str = str(Path(__file__).with_name("cleanrl"))
    """OUT.csv gets a row for every half minute of a new run, OUT's folder the curves, GAME.png"""


class Point(NamedTuple):
    seconds: float
    step: int
    mean_return: float  # of the last hundred episodes


def play_theirs(args: Args, folder: Path) -> list[Point]:
    """CleanRL's curve, a point for each episode printed; raises UsageError if the script ends by itself."""
    runs.check(shutil.which(args.python) is not None, f"--python {args.python}: no such program")
    python = str(Path(args.python).absolute()) if "/" in args.python else args.python  # it starts in another folder
    command = [python, "-u", str(Path(args.script).resolve()), "--env-id", args.env_id]
    command += ["--seed", str(args.seed), "--total-timesteps", str(FOREVER)]
    last, points, begun = deque(maxlen=100), [], time.monotonic()
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    clock = threading.Timer(60 * args.minutes, process.kill)
    clock.start()
    try:
        for line in process.stdout:
            if found := EPISODE.search(line):
                last.append(float(found[2]))
                points.append(Point(time.monotonic() - begun, int(found[1]), float(np.mean(last))))
    finally:
        in_time = time.monotonic() < begun + 60 * args.minutes
        clock.cancel()
        process.kill()
        process.wait()
    runs.check(not in_time, f"SCRIPT {args.script}: it ended by itself; see that --python runs it")
    return points


def play_ours(args: Args, flags: str, folder: Path) -> list[Point]:
    """Our curve, a point for each update that logged a return."""
    given, defaults = vars(records.parse_flags(ppo, flags)), vars(ppo.Args())
    changed = {name: value for name, value in given.items() if value != defaults[name]}
    own = {"env_id": args.env_id, "seed": args.seed, "eval_episodes": 0, "total_timesteps": FOREVER}
    stopping, begun = threading.Event(), time.time()
    clock = threading.Timer(60 * args.minutes, stopping.set)
    clock.start()
    try:
        with files.lock_run(folder) as lock, contextlib.suppress(trials.Stopped):
            trials.run(f"{ppo.SCRIPT}.py", changed | own, folder, lock, stopping)
    except RuntimeError as error:
        raise files.FailedError(f"{ppo.SCRIPT}.py: {error}") from None
    finally:
        clock.cancel()
    lines = trials.read_metrics(trials.find_run(folder))
    return to_points([line | {"seconds": line["time"] - begun} for line in lines], args.minutes)


def to_points(lines: list[dict], minutes: float) -> list[Point]:
    """A curve from the lines of metrics.jsonl that have a return, up to so many minutes."""
    name = "charts/episodic_return"
    points = [Point(line["seconds"], line["global_step"], line[name]) for line in lines if name in line]
    return [point for point in points if point.seconds <= 60 * minutes]


def compare(curves: dict[str, np.ndarray]) -> list[dict]:
    """A row for each run's points [P, 3]: its end, and its return after as many steps as the shortest one has."""
    common, table = min(curve[-1, 1] for curve in curves.values()), []
    for name, curve in curves.items():
        seconds, step, mean_return = curve[-1]
        row = {"run": name, "minutes": f"{seconds / 60:.1f}", "steps": f"{step:,.0f}"}
        row |= {"steps/s": f"{step / seconds:.0f}", "return at the end": f"{mean_return:.2f}"}
        table.append(row | {f"after {common:,.0f} steps": f"{np.interp(common, curve[:, 1], curve[:, 2]):.2f}"})
    return table


def draw(path: Path, game: str, curves: dict[str, np.ndarray]) -> None:
    """Returns over steps and over minutes."""
    figure, axes = plot.plt.subplots(1, 2, figsize=(10, 4), dpi=120, layout="constrained", sharey=True)
    for name, curve in curves.items():
        axes[0].plot(curve[:, 1], curve[:, 2], label=name)
        axes[1].plot(curve[:, 0] / 60, curve[:, 2], label=name)
    axes[0].xaxis.set_major_formatter(EngFormatter(sep=""))
    axes[0].set(xlabel="environment steps", ylabel=f"{game}: mean return of 100 episodes")
    axes[1].set(xlabel="minutes")
    axes[0].legend()
    figure.savefig(path)


def main(args: Args) -> None:
    table = Path(f"{args.out}.csv")
    settings = {"CleanRL": ""}
    if args.run_dir:
        run = plot.read_run(args.run_dir)
        runs.check(run.game == args.env_id, f"--run-dir {args.run_dir}: give its game, --env-id {run.game}")
        runs.check(not args.flags, f"--flags {args.flags}: has no effect with --run-dir")
    else:
        settings |= {"ours, its settings": SETTINGS} | ({"ours": args.flags} if args.flags else {})
    game = {"game": args.env_id, "seed": str(args.seed), "minutes": f"{args.minutes:g}"}
    for name, flags in settings.items():
        key = {"run": name, **game, "flags": flags}
        if any(key.items() <= row.items() for row in records.read_rows(table)):
            continue
        with tempfile.TemporaryDirectory() as folder:
            points = play_ours(args, flags, Path(folder)) if flags else play_theirs(args, Path(folder))
        points = {int(point.seconds // 30): point for point in points}.values()  # the last of every half minute
        new = [key | {k: f"{v:.6g}" for k, v in point._asdict().items()} | trials.origin() for point in points]
        records.add_rows(table, new, tuple(key))
    curves = {}
    for row in records.read_rows(table):
        if game.items() <= row.items() and row["flags"] == settings.get(row["run"]):
            curves.setdefault(row["run"], []).append([float(row[name]) for name in Point._fields])
    if args.run_dir:  # by its own clock, which begins when its devices are there
        curves["ours"] = to_points(run.lines, args.minutes)
    curves = {name: np.array(points) for name, points in curves.items()}
    evaluate.show(f"{args.env_id}, {args.minutes:g} minutes", compare(curves))
    draw(table.with_name(f"{args.env_id}.png"), args.env_id, curves)


if __name__ == "__main__":
    runs.cli(Args, main)
