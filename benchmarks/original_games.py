"""A policy in EnvPool's Procgen and in OpenAI's own: both scores, with their standard errors, and whether the same seed
and actions show the same frames.

OpenAI's package needs NumPy below 2 and Python 3.10 at most, so it runs in an interpreter of its own, which sends its
frames through a pipe:

    python3.10 -m venv original && original/bin/pip install procgen "numpy<2"
    python -m benchmarks.original_games agents/ppo_bigfish agents/ppo_starpilot --python original/bin/python
    python -m benchmarks.original_games --random coinrun maze --python original/bin/python
"""

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import tyro
from annotated_types import Interval

import evaluate
import ppo_procgen
from benchmarks import records
from common import devices, envs, runs
from common.flags import Seed

# What the other interpreter runs. It writes rewards, whether frames are an episode's first, and frames, and reads
# actions.
PLAYER = """
import json, sys
out, sys.stdout = sys.stdout.buffer, sys.stderr  # what libraries print must not come between
import numpy as np
from procgen import ProcgenGym3Env
settings = json.loads(sys.argv[1])
env = ProcgenGym3Env(**settings)
while True:
    rewards, obs, first = env.observe()
    for array, kind in ((rewards, np.float32), (first, np.uint8), (obs["rgb"], np.uint8)):
        out.write(np.ascontiguousarray(array, kind).tobytes())
    out.flush()
    actions = sys.stdin.buffer.read(4 * settings["num"])
    if len(actions) < 4 * settings["num"]:
        break
    env.act(np.frombuffer(actions, np.int32))
"""


@dataclass(frozen=True)
class Args:
    run_dirs: tyro.conf.Positional[tuple[str, ...]] = ()
    """runs of Procgen scripts, or exported agents"""
    python: str = "python3.10"
    """the interpreter that has OpenAI's procgen"""
    random: tuple[str, ...] = ()
    """games in which random actions are played too"""
    episodes: Annotated[int, Interval(ge=2, le=10**6)] = 256
    """episodes in each of the two, the same number in each game"""
    seed: Seed = 0
    """of the games and the policy's draws"""
    csv: str = ""
    """also write the table to this file, among the rows of other policies and games that it has"""


class Original:
    """OpenAI's games in a process of another interpreter. `with` ends it."""

    def __init__(self, python: str, settings: dict):
        """Raises UsageError if there is no such interpreter, or it does not play."""
        self._num, self._said = settings["num"], tempfile.TemporaryFile()  # noqa: SIM115 - until the end
        command = [python, "-c", PLAYER, json.dumps(settings)]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said)
        except OSError as error:
            raise runs.UsageError(f"--python {python}: {error.strerror}, give an interpreter with procgen") from None
        self._python = python

    def __enter__(self) -> "Original":
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has died, and nobody reads what is still to be flushed
            self._process.stdin.close()
        self._process.stdout.close()  # before the wait: it may be writing a frame that nobody reads
        self._process.wait()
        self._said.close()

    def observe(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rewards float32 [N] of the last actions, whether a frame is its episode's first bool [N], and frames uint8
        [N, 3, 64, 64]."""
        sizes = 4 * self._num, self._num, self._num * 64 * 64 * 3
        parts = [self._process.stdout.read(size) for size in sizes]
        if len(parts[-1]) < sizes[-1]:
            self._process.wait()
            self._said.seek(0)
            why = self._said.read().decode(errors="replace").strip().splitlines()[-1:]
            raise runs.UsageError(f"--python {self._python}: its procgen does not play ({''.join(why)})")
        rewards, first = np.frombuffer(parts[0], np.float32), np.frombuffer(parts[1], np.uint8) > 0
        return rewards, first, np.frombuffer(parts[2], np.uint8).reshape(self._num, 64, 64, 3).transpose(0, 3, 1, 2)

    def act(self, actions: np.ndarray) -> None:
        """Plays int [N] actions."""
        with contextlib.suppress(BrokenPipeError):  # it has died: `observe` says so
            self._process.stdin.write(np.ascontiguousarray(actions, np.int32).tobytes())
            self._process.stdin.flush()


def play(games: Original, policy: Callable, offsets: tuple[int, ...], *, num_envs: int, episodes: int, seed: int):
    """As `envs.play_episodes`, but where the frame after an episode's last action is the next one's first: the returns
    float64 [episodes]."""
    quota = -(-episodes // num_envs)
    returns: list[list[float]] = [[] for _ in range(num_envs)]
    totals, age = np.zeros(num_envs), np.zeros(num_envs, np.int32)
    frames = envs.Frames.after(envs.empty_history(num_envs, offsets), 1, offsets)
    key, memory = jax.random.PRNGKey(seed), None
    _, _, obs = games.observe()
    while min(map(len, returns)) < quota:
        frames, stacked = envs.slide(frames, obs, age)
        key, now = jax.random.split(key)
        actions, memory = policy(stacked, age, now, memory)
        games.act(np.asarray(actions))
        rewards, first, obs = games.observe()
        totals += rewards
        for game in np.flatnonzero(first):
            returns[game].append(float(totals[game]))
        totals[first] = 0
        age = np.where(first, 0, age + 1).astype(np.int32)
    return np.array([some[:quota] for some in returns]).reshape(-1)


def original(args: Args, saved, num_envs: int) -> Original:
    """OpenAI's games as a Procgen script has them (`saved`: GameArgs), on its unseen levels."""
    first, count = envs.range_of_levels(saved, "test")
    settings = {"num": num_envs, "env_name": saved.env_id, "distribution_mode": saved.distribution_mode,
                "start_level": first, "num_levels": count, "rand_seed": args.seed,
                "use_backgrounds": saved.use_backgrounds, "restrict_themes": saved.restrict_themes}  # fmt: skip
    return Original(args.python, settings)


def difference(args: Args, saved, num_envs: int = 16, steps: int = 200) -> tuple[int, float, int]:
    """Both with the same seed and random actions, each game until its first episode ends in either or for so many
    steps: how many frames were compared, the share of their pixels that differ, and how many rewards do."""
    rng, frames, pixels, rewards = np.random.default_rng(args.seed), 0, 0, 0
    env = envs.make_levels(saved, num_envs, args.seed, "test")
    obs, _ = env.reset()
    with original(args, saved, num_envs) as games:
        _, _, other = games.observe()
        alive = np.ones(num_envs, bool)
        for _ in range(steps):
            frames += int(alive.sum())
            pixels += int((obs != other)[alive].any(axis=1).sum())
            actions = rng.integers(0, envs.NUM_ACTIONS, num_envs)
            obs, reward, terminated, truncated, _ = env.step(actions)
            games.act(actions)
            other_reward, first, other = games.observe()
            rewards += int((reward != other_reward)[alive].sum())
            alive &= ~(terminated | truncated | first)
    env.close()
    return frames, pixels / (frames * obs.shape[2] * obs.shape[3]), rewards


def compare(args: Args, name: str, saved, policy: Callable) -> dict:
    """A row: the policy's mean return and its standard error in both, on unseen levels."""
    frames, pixels, rewards = difference(args, saved)  # first: an interpreter without procgen is noticed here
    ours, *_ = envs.evaluate(saved, policy, "test", episodes=args.episodes, seed=args.seed)
    num_envs = devices.multiple(saved, min(args.episodes, 64))
    with original(args, saved, num_envs) as games:
        theirs = play(games, policy, saved.offsets, num_envs=num_envs, episodes=args.episodes, seed=args.seed)
    theirs = envs.summarize(theirs)
    return {
        "policy": name, "game": saved.env_id, "episodes": theirs["episodes"],
        "EnvPool": f"{ours['mean_return']:.2f}", "error": f"{ours['standard_error']:.2f}",
        "OpenAI": f"{theirs['mean_return']:.2f}", "OpenAI error": f"{theirs['standard_error']:.2f}",
        "frames compared": frames, "pixels that differ %": f"{100 * pixels:.4f}", "rewards that differ": rewards,
    }  # fmt: skip


def main(args: Args) -> list[dict]:
    """Compares each policy; returns the table's rows."""
    records.make_room(args.csv, "--csv")
    runs.check(len(args.run_dirs + args.random) > 0, "RUN_DIRS: give at least one, or --random GAME")
    for game in args.random:
        envs.check_game(game, "--random")
    chosen = []
    for run_dir in args.run_dirs:
        _, saved, _, policy = evaluate.procgen_policy(run_dir)
        chosen.append((Path(run_dir).name, saved, policy))
    chosen += [("random", ppo_procgen.Args(env_id=game), envs.random_policy) for game in args.random]
    rows = []
    for one in chosen:
        rows.append(compare(args, *one))
        if args.csv:
            records.add_rows(Path(args.csv), [rows[-1] | records.origin()], ("policy", "game"))
    evaluate.show("EnvPool's Procgen and OpenAI's", rows, {})
    return rows


if __name__ == "__main__":
    runs.cli(Args, main)
