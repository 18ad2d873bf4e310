"""CleanRL's PPO on Procgen beside ours: on the same cores, for the same minutes, and at the same steps.

Nothing of it is here. Give the path of its script, and an interpreter that runs it:

    python3.10 -m venv theirs && theirs/bin/pip install torch tyro tensorboard procgen "gym==0.23.1" "numpy<2"
    python -m benchmarks.cleanrl cleanrl/cleanrl/ppo_procgen.py --python theirs/bin/python --flags="--encoder nature"

Three runs one after the other, each a process of its own: theirs, ours with its settings, and ours with --flags. A
curve is the mean return of the last hundred training episodes, over steps and over minutes since the process began, so
that compiling counts; with all levels, training levels are unseen ones too. Theirs are the episodes that it prints: of
those that end in the same step, one. Started again it makes the runs that are missing in its CSV file.
"""

import contextlib
import os
import re
import subprocess
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import tyro
from annotated_types import Interval

import evaluate
import ppo_procgen as ppo
from benchmarks import records
from common import envs, files, runs
from common.flags import Seed
from experiments import plot, trials
from experiments.plot import plt

# Its settings, OpenAI's but for the reward normaliser's discount and the initial weights, in our flags.
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
    """the interpreter that runs it"""
    env_id: envs.Game = "starpilot"
    """one of the 16 games"""
    minutes: Annotated[float, Interval(ge=0.1, le=10_000)] = 30.0
    """how long each run lasts"""
    flags: str = ""
    """a setting of ours that is to be compared too, in one string, after a =; none for two runs only"""
    seed: Seed = 1
    """of all three"""
    out: str = "benchmarks/results/cleanrl"
    """OUT.csv: a row for every half minute of a run"""


class Point(NamedTuple):
    seconds: float
    step: int
    mean_return: float  # of the last hundred episodes


def play_theirs(args: Args, folder: Path) -> list[Point]:
    """Their curve, a point for each episode that is printed; raises UsageError if the script ends by itself."""
    python = os.path.abspath(args.python) if os.sep in args.python else args.python  # it starts in another folder
    command = [python, "-u", str(Path(args.script).resolve()), "--env-id", args.env_id]
    command += ["--seed", str(args.seed), "--total-timesteps", str(FOREVER)]
    last, points, begun = deque(maxlen=100), [], time.monotonic()
    with (folder / "errors").open("w+") as errors:
        try:
            process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=errors, text=True)
        except OSError as error:
            raise runs.UsageError(f"--python {args.python}: {error.strerror}, give CleanRL's interpreter") from None
        clock = threading.Timer(60 * args.minutes, process.kill)
        clock.start()
        try:
            for line in process.stdout:
                if found := EPISODE.search(line):
                    last.append(float(found[2]))
                    points.append(Point(time.monotonic() - begun, int(found[1]), float(np.mean(last))))
        finally:
            in_time = clock.is_alive()
            clock.cancel()
            process.kill()
            process.wait()
        errors.seek(0)
        why = errors.read().strip().splitlines()[-1:]
    runs.check(not in_time, f"SCRIPT {args.script}: it ended by itself ({''.join(why)}); see that --python runs it")
    return points


def play_ours(args: Args, flags: str, folder: Path) -> list[Point]:
    """Our curve, a point for each update."""
    given, defaults = vars(records.parse_flags(ppo, flags)), vars(ppo.Args())
    changed = {name: value for name, value in given.items() if value != defaults[name]}
    own = {"env_id": args.env_id, "seed": args.seed, "eval_episodes": 0, "total_timesteps": FOREVER}
    stopping, begun = threading.Event(), time.time()
    clock = threading.Timer(60 * args.minutes, stopping.set)
    clock.start()
    try:
        with files.take(folder) as lock, contextlib.suppress(trials.Stopped):
            trials.run(f"{ppo.SCRIPT}.py", changed | own, folder, lock, stopping)
    except RuntimeError as error:
        raise files.FailedError(f"ours, {flags}: {error}") from None
    finally:
        clock.cancel()
    lines = trials.read_metrics(trials.find_run(folder))
    names = "time", "global_step", "charts/episodic_return"
    points = [Point(line[names[0]] - begun, line[names[1]], line[names[2]]) for line in lines if names[2] in line]
    return [point for point in points if point.seconds <= 60 * args.minutes]


def thinned(points: list[Point]) -> list[Point]:
    """The last one of every half minute."""
    return list({int(point.seconds // 30): point for point in points}.values())


def compare(rows: list[dict]) -> list[dict]:
    """A row for each run: its end, and its return after as many steps as the shortest one has."""
    curves = {}
    for row in rows:
        curves.setdefault(row["run"], []).append(Point(*(float(row[name]) for name in Point._fields)))
    common = min(curve[-1].step for curve in curves.values())
    table = []
    for name, curve in curves.items():
        seconds, step, mean_return = curve[-1]
        row = {"run": name, "minutes": f"{seconds / 60:.1f}", "steps": f"{step:,.0f}"}
        row |= {"steps/s": f"{step / seconds:.0f}", "return at the end": f"{mean_return:.2f}"}
        _, steps, returns = zip(*curve, strict=True)
        table.append(row | {f"after {common:,.0f} steps": f"{np.interp(common, steps, returns):.2f}"})
    return table


def draw(path: Path, rows: list[dict]) -> None:
    """Returns over steps and over minutes, a curve for each run."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), dpi=120, layout="constrained", sharey=True)
    for name in dict.fromkeys(row["run"] for row in rows):
        curve = np.array([[float(row[k]) for k in Point._fields] for row in rows if row["run"] == name])
        axes[0].plot(curve[:, 1], curve[:, 2], label=name)
        axes[1].plot(curve[:, 0] / 60, curve[:, 2], label=name)
    for axis, label in zip(axes, ("environment steps", "minutes"), strict=True):
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(f"{rows[0]['game']}: mean return of 100 episodes")
    axes[0].legend()
    with files.whole(path) as temporary:
        figure.savefig(temporary, format="png")
    plt.close(figure)


def main(args: Args) -> None:
    runs.check(Path(args.script).is_file(), f"SCRIPT {args.script}: no such file, give CleanRL's ppo_procgen.py")
    plot.check_out(args.out)
    runs.check_flags(records.parse_flags(ppo, args.flags))
    table = Path(f"{args.out}.csv")
    settings = {"CleanRL": "", "ours, its settings": SETTINGS} | ({"ours": args.flags} if args.flags else {})
    game = {"game": args.env_id, "seed": str(args.seed), "minutes": f"{args.minutes:g}"}
    columns = dict.fromkeys(["run", *game, "flags", *Point._fields, *trials.origin()])
    records.check_columns(table, records.read_rows(table), [columns])  # before anything is run
    for name, flags in settings.items():
        rows = records.read_rows(table)
        key = {"run": name, **game, "flags": flags}
        there = {row["machine"] for row in rows if key.items() <= row.items()}
        if there:
            print(f"{name}: taken from {table}, of {' and '.join(there)}; give another --out to run it here")
            continue
        with tempfile.TemporaryDirectory() as folder:
            points = play_ours(args, flags, Path(folder)) if flags else play_theirs(args, Path(folder))
        runs.check(len(points) > 0, f"--minutes {args.minutes:g}: no episode ended in the run {name!r}, give more")
        origin = trials.origin()
        new = [key | {k: f"{v:.6g}" for k, v in point._asdict().items()} | origin for point in thinned(points)]
        records.add_rows(table, new, tuple(key))
    rows = records.read_rows(table)
    rows = [row for row in rows if game.items() <= row.items() and row["flags"] in settings.values()]
    evaluate.show(f"{args.env_id}, {args.minutes:g} minutes", compare(rows), {})
    draw(Path(f"{args.out}.png"), rows)


if __name__ == "__main__":
    runs.cli(Args, main)
