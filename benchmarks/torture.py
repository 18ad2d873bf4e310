"""Kills runs with SIGKILL at random moments, resumes them, and compares metrics and last checkpoint bit for bit with an
uninterrupted run.

The games are real, the networks tiny, and a checkpoint is written every update or two (PPG: every third). A third of
the kills aims at the 0.1 s after a checkpoint was begun; some hit a start with an empty compilation cache; some runs
are killed repeatedly:

    python -m benchmarks.torture --kills 20 --seed 1

Prints a line a kill, with the first difference (uninterrupted -> resumed); the exit code is 1 if a run differs. The
seed draws the moments, but what they hit depends on the machine's speed.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
from annotated_types import Interval

from benchmarks.golden_runs import differences, without_clocks
from common import checkpoints, files, runs
from experiments import records, trials

# All stateful options are on; runs last several checkpoints.
PROCGEN = {
    "env_id": "bigfish", "num_envs": 4, "num_steps": 16, "hidden": 16, "pool": "flatten", "learning_rate": 0.003,
    "sticky_actions": 0.25, "restart_every": 40, "eval_episodes": 1, "total_timesteps": 1000, "eval_every": 600,
    "checkpoint_every": 100,
}  # fmt: skip
NATURE = {"encoder": "nature", "width": 1, "num_minibatches": 2, "normalize_rewards": True}
FLAGS = {
    "ppo_procgen.py": PROCGEN | NATURE | {
        "update_epochs": 2, "core": "gru", "rnd_coef": 0.5, "rnd_normalize": True, "augment": "translate",
        "dropout": 0.1, "kl_target": 1e-4,
    },
    "trpo_procgen.py": PROCGEN | NATURE | {"value_epochs": 2},
    "ppg_procgen.py": PROCGEN | NATURE | {
        "policy_iterations": 3, "aux_epochs": 2, "aux_minibatches": 2, "augment": "translate", "dropout": 0.1,
    },
    "impala_procgen.py": PROCGEN | NATURE | {
        "update_epochs": 2, "core": "lstm", "replay_fraction": 0.5, "replay_size": 16, "max_lag": 2,
        "deterministic": True,
    },
    "apex_procgen.py": PROCGEN | {
        "buffer_size": 320, "learning_starts": 100, "batch_size": 16, "replay_ratio": 0.5, "n_step": 3, "num_atoms": 11,
        "channels": 8, "blocks": 0, "downsample": "stride", "target_network_frequency": 4, "max_lag": 2,
        "dropout": 0.1, "augment": "translate", "deterministic": True,
    },
    "sac_procgen.py": PROCGEN | {
        "buffer_size": 320, "learning_starts": 100, "batch_size": 16, "replay_ratio": 0.5, "channels": 8, "blocks": 0,
        "downsample": "stride", "entropy_penalty": 0.5, "dropout": 0.1, "augment": "translate", "per_alpha": 0.5,
        "deterministic": True,
    },
    "rnd_montezuma.py": {
        "num_envs": 4, "num_steps": 16, "num_minibatches": 2, "update_epochs": 2, "channels": "4,4,4", "hidden": 8,
        "obs_norm_init_steps": 5, "learning_rate": 0.003, "max_episode_steps": 30, "restart_every": 40, "async": True,
        "vtrace": True, "core": "gru", "room_map": True, "total_timesteps": 1000, "checkpoint_every": 100,
    },
    "hnppo_doorgym.py": {
        "tasks": "0,2", "num_envs": 2, "num_worlds": 2, "num_minibatches": 2, "update_epochs": 2, "hidden": 8,
        "num_layers": 1, "hyper_width": 16, "task_timesteps": 4 * 256, "eval_every": 600, "eval_episodes": 4,
        "checkpoint_every": 256, "hyper_learning_rate": 1e-3,
    },
}  # fmt: skip
COLD, WRITING, AGAIN = 1 / 6, 1 / 3, 1 / 4  # chances: an empty cache; a kill during a write; another kill
WRITE_SECONDS = 0.1  # how long after a checkpoint was begun it is killed, at most
TIMEOUT = 600  # seconds of a run


@dataclass(frozen=True)
class Args:
    kills: Annotated[int, Interval(ge=1, le=10_000)] = 20
    """how many kills, in turns over the scripts"""
    seed: int = 1
    """seed of the kills' moments"""
    scripts: tuple[str, ...] = tuple(FLAGS)
    """which scripts"""
    folder: str = ""
    """an empty folder for the runs, which are kept there; by default a temporary one, kept if a run differs"""


# CHECKPOINTS AND METRICS


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps of the complete checkpoints of the run in a folder."""
    run = trials.find_run(folder)
    return checkpoints.steps_in(run) if run else []


def unfinished_checkpoints(folder: Path) -> set[Path]:
    """Checkpoints under their temporary names."""
    return set(folder.glob(f"*/checkpoints/*{checkpoints.TEMPORARY}*"))


def describe(folder: Path) -> str:
    """What a killed process has left behind."""
    run = trials.find_run(folder)
    if run is None:
        return "nothing" if not any(folder.glob("*__*")) else "a run directory without args.json"
    logged = trials.values_of(run, "global_step")
    steps = checkpoint_steps(folder)
    words = f"step {int(logged[-1])} logged" if logged else "nothing logged"
    return f"{words}, {f'checkpoints up to {steps[-1]}' if steps else 'no checkpoint'}"


def difference(whole: Path, run: Path) -> str:
    """Where a run's metrics, but for clocks, or anything in its last checkpoint differ from another's; empty if not."""
    want, got = ([without_clocks(line) for line in trials.read_metrics(path)] for path in (whole, run))
    if found := differences(want, got):
        return found[0]
    (step, a), (its_step, b) = checkpoints.load(whole), checkpoints.load(run)
    for tree in (a, b):
        for own in ("seconds", "identity", "logged"):  # of the run itself: clocks and W&B's id are in them
            tree["run"].pop(own, None)
    if step != its_step or jax.tree.structure(a) != jax.tree.structure(b):
        return f"the last checkpoint is of step {its_step}, {step} if uninterrupted, or has other parts"
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        if not np.array_equal(x, y, equal_nan=np.issubdtype(np.asarray(x).dtype, np.floating)):
            return f"{jax.tree_util.keystr(path)} in the last checkpoint"
    return ""


# RUNS


def start(script: str, folder: Path, cache: Path) -> subprocess.Popen:
    """Starts a script in a folder, or continues the run that is there if it has a complete checkpoint."""
    if run := trials.find_resumable(folder):
        words = ["--resume", str(run)]
    else:
        words = trials.words_of(FLAGS[script] | {"wandb_mode": "disabled", "run_dir": folder})
    variables = {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    variables |= {"PYTHONFAULTHANDLER": "1"}  # for what hangs
    command = [sys.executable, script, *words]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "output.txt").open("a") as output:
        return subprocess.Popen(command, cwd=records.ROOT, env=os.environ | variables, stdout=output, stderr=output)


def finish(process: subprocess.Popen, folder: Path) -> str:
    """Waits for a process; what went wrong with it, empty if nothing."""
    try:
        code = process.wait(TIMEOUT)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # it prints where its threads are
        process.wait()
        return f"not done after {TIMEOUT} s"
    finally:
        process.kill()
    last = (folder / "output.txt").read_text().strip().splitlines()[-1:]
    return f"exit code {code}: {' '.join(last)}" if code else ""


def kill(process: subprocess.Popen, folder: Path, seconds: float, number: int = 0) -> float | None:
    """Kills a process `seconds` after its start or, with `number`, after it began its `number`-th checkpoint.

    Returns how long it lived, in seconds; None if it was done before.
    """
    begin = since = time.monotonic()
    seen = unfinished_checkpoints(folder)
    wanted = len(seen) + number
    while process.poll() is None and (len(seen) < wanted or time.monotonic() - since < seconds):
        if len(seen) < wanted:
            seen |= unfinished_checkpoints(folder)
            since = time.monotonic()
        time.sleep(0.001)
    lived = time.monotonic() - begin
    process.kill()
    return lived if process.wait() == -signal.SIGKILL else None


def run_uninterrupted(script: str, folder: Path, cache: Path) -> tuple[float, float]:
    """Returns the seconds of two uninterrupted runs, with nothing compiled and with everything."""
    seconds = []
    for name in ("first", "whole"):
        begin = time.monotonic()
        wrong = finish(start(script, folder / name, cache), folder / name)
        seconds.append(time.monotonic() - begin)
        runs.check(not wrong, f"--scripts {script}: does not run even if uninterrupted ({wrong})")
    wrong = difference(*(trials.find_run(folder / name) for name in ("whole", "first")))
    runs.check(not wrong, f"--scripts {script}: two uninterrupted runs differ ({wrong})")
    return tuple(seconds)


def kill_and_resume(
    script: str, folder: Path, max_kills: int, seconds: tuple[float, float], rng: random.Random
) -> tuple[list, str]:
    """Kills a run in a folder, at most `max_kills` times, and resumes it to its end.

    Returns a line for each kill, and how it differs from the uninterrupted run; empty if it does not.
    """
    kills, cold = [], rng.random() < COLD
    # What is killed while it writes a compiled program leaves a part of it to the next start.
    cache = folder / "cache" if cold else folder.with_name("cache")
    process = None
    try:
        while True:
            since, old = checkpoint_steps(folder), unfinished_checkpoints(folder)
            process = start(script, folder, cache)
            if kills:
                kills[-1] += f"; resumed from {since[-1]}" if since else "; started anew"
            if len(kills) == max_kills or (kills and rng.random() >= AGAIN):
                break
            if rng.random() < WRITING:
                lived = kill(process, folder, rng.uniform(0, WRITE_SECONDS), number=rng.randint(1, 6))
            else:
                lived = kill(process, folder, rng.uniform(0, seconds[0] if cold and not kills else seconds[1]))
            if lived is None:
                break
            while_writing = ", while a checkpoint was being written" if unfinished_checkpoints(folder) - old else ""
            kills.append(f"{script} after {lived:.1f} s{' of a cold start' if cold and not kills else ''}"
                         f"{while_writing}: {describe(folder)}")  # fmt: skip
        wrong = finish(process, folder)
    finally:
        if process:
            process.kill()
    return kills, wrong or difference(trials.find_run(folder.with_name("whole")), trials.find_run(folder))


def main(args: Args) -> None:
    unknown = [name for name in args.scripts if name not in FLAGS]
    runs.check(bool(args.scripts) and not unknown, f"--scripts {' '.join(unknown)}: give some of {' '.join(FLAGS)}")
    root = Path(args.folder or tempfile.mkdtemp(prefix="torture")).absolute()
    empty = not root.exists() or (root.is_dir() and not any(root.iterdir()))
    runs.check(empty, f"--folder {args.folder}: give an empty folder")
    files.make_folder(root, "--folder")
    rng = random.Random(args.seed)
    print(f"seed {args.seed}, {args.kills} kills, in {root}", flush=True)
    failed, done, turn, seconds = 0, 0, 0, {}
    while done < args.kills:
        script = args.scripts[turn % len(args.scripts)]
        folder, turn = root / Path(script).stem, turn + 1
        if script not in seconds:
            seconds[script] = run_uninterrupted(script, folder, folder / "cache")
            cold, warm = seconds[script]
            print(f"{script} uninterrupted: {cold:.1f} s, {warm:.1f} s once it is compiled", flush=True)
        kills, wrong = kill_and_resume(script, folder / f"killed{turn}", args.kills - done, seconds[script], rng)
        for i, line in enumerate(kills or [f"{script} was done before it was killed"]):
            number = done + i + 1 if kills else "-"
            print(f"{number:>3} {line}; {f'NOT EXACT: {wrong}' if wrong else 'exact'}", flush=True)
            failed += bool(wrong)
        done += len(kills)
    if not failed and not args.folder:
        shutil.rmtree(root)
    print(f"{done} kills, {failed} not exact" + (f": the runs are kept in {root}" if failed else ""))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    runs.cli(Args, main)
