"""Do EnvPool's and OpenAI's Procgen agree? Plays a policy in both, and compares frames of the same seed and actions.

OpenAI's package needs NumPy below 2 and Python 3.10 at most, so it runs in an interpreter of its own, behind a pipe:

    python3.10 -m venv original && original/bin/pip install procgen "numpy<2"
    python -m experiments.studies.original_games.compare agents/ppo_bigfish --python original/bin/python
    python -m experiments.studies.original_games.compare --random coinrun maze --python original/bin/python
"""

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import tyro
from jax.sharding import Mesh

import evaluate
import ppo_procgen
from common import devices, envs, runs
from common.flags import PositiveInt, Seed
from experiments import records

# Writes rewards, whether a frame is the episode's first, and frames; reads actions.
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
    """interpreter with OpenAI's procgen"""
    random: tuple[envs.Game, ...] = ()
    """games to play with random actions too"""
    episodes: PositiveInt = 256
    """episodes in each of the two"""
    seed: Seed = 0
    """seed of the games and the policy"""
    csv: str = ""
    """table to add rows to"""


class Original:
    """OpenAI's games, with the settings of a Procgen script (`saved`: GameArgs), on its test levels."""

    def __init__(self, args: Args, saved, num_envs: int):
        first, count = envs.range_of_levels(saved, "test")
        settings = {"num": num_envs, "env_name": saved.env_id, "distribution_mode": saved.distribution_mode,
                    "start_level": first, "num_levels": count, "rand_seed": args.seed,
                    "use_backgrounds": saved.use_backgrounds, "restrict_themes": saved.restrict_themes}  # fmt: skip
        runs.check(shutil.which(args.python) is not None, f"--python {args.python}: no such program")
        command = [args.python, "-c", PLAYER, json.dumps(settings)]
        self._num, self._python = num_envs, args.python
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self) -> "Original":
        return self

    def __exit__(self, *_) -> None:
        self._process.kill()
        self._process.wait()

    def observe(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rewards float32 [N], first frames bool [N], and frames uint8 [N, 3, 64, 64]."""
        sizes = 4 * self._num, self._num, self._num * 64 * 64 * 3
        rewards, first, frames = (self._process.stdout.read(size) for size in sizes)
        runs.check(len(frames) == sizes[2], f"--python {self._python}: its procgen does not play")
        frames = np.frombuffer(frames, np.uint8).reshape(self._num, 64, 64, 3).transpose(0, 3, 1, 2)
        return np.frombuffer(rewards, np.float32), np.frombuffer(first, np.uint8) > 0, frames

    def act(self, actions: np.ndarray) -> None:
        self._process.stdin.write(np.ascontiguousarray(actions, np.int32).tobytes())
        self._process.stdin.flush()


def play(games: Original, policy: Callable, offsets: tuple[int, ...], *, num_envs: int, episodes: int, seed: int):
    """Returns float64 [episodes], as `envs.play_episodes`; here an episode's last action shows the next one's first
    frame."""
    quota = -(-episodes // num_envs)
    returns: list[list[float]] = [[] for _ in range(num_envs)]
    totals, episode_step = np.zeros(num_envs), np.zeros(num_envs, np.int32)
    frames = envs.Frames.after(envs.empty_history(num_envs, offsets), 1, offsets)
    key, hidden_state = jax.random.PRNGKey(seed), None
    _, _, obs = games.observe()
    while min(map(len, returns)) < quota:
        frames, stacked = envs.push_frame(frames, obs, episode_step)
        key, step_key = jax.random.split(key)
        actions, hidden_state = policy(stacked, episode_step, step_key, hidden_state)
        games.act(np.asarray(actions))
        rewards, first, obs = games.observe()
        totals += rewards
        for game in np.flatnonzero(first):
            returns[game].append(float(totals[game]))
        totals[first] = 0
        episode_step = np.where(first, 0, episode_step + 1).astype(np.int32)
    return np.array([some[:quota] for some in returns]).reshape(-1)


def difference(args: Args, saved, num_envs: int = 16, steps: int = 200) -> tuple[int, float, int]:
    """Frames compared under the same seed and random actions, until a game's first episode ends in either; the share of
    their pixels that differ, and the number of rewards that do."""
    rng, frames, pixels, rewards = np.random.default_rng(args.seed), 0, 0, 0
    env = envs.make_procgen(saved, num_envs, args.seed, "test")
    obs, _ = env.reset()
    with Original(args, saved, num_envs) as games:
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


def compare(args: Args, name: str, saved, mesh: Mesh, policy: Callable) -> dict:
    """A row: the policy's mean return and its standard error in both, on test levels."""
    frames, pixels, rewards = difference(args, saved)
    ours, *_ = envs.evaluate(saved, mesh, policy, "test", episodes=args.episodes, seed=args.seed)
    num_envs = devices.round_to_devices(mesh, min(args.episodes, 64))
    with Original(args, saved, num_envs) as games:
        theirs = play(games, policy, saved.stack_offsets, num_envs=num_envs, episodes=args.episodes, seed=args.seed)
    theirs = envs.summarize(theirs)
    return {
        "policy": name, "game": saved.env_id, "episodes": theirs["episodes"],
        "EnvPool": f"{ours['mean_return']:.2f}", "error": f"{ours['standard_error']:.2f}",
        "OpenAI": f"{theirs['mean_return']:.2f}", "OpenAI error": f"{theirs['standard_error']:.2f}",
        "frames compared": frames, "pixels that differ %": f"{100 * pixels:.4f}", "rewards that differ": rewards,
    }  # fmt: skip


def main(args: Args) -> None:
    chosen = []
    for run_dir in args.run_dirs:
        _, saved, mesh, _, policy = evaluate.procgen_policy(run_dir)
        chosen.append((Path(run_dir).name, saved, mesh, policy))
    for game in args.random:
        game_args = ppo_procgen.Args(env_id=game)
        chosen.append(("random", game_args, devices.make_mesh(game_args), envs.random_policy))
    rows = []
    for one in chosen:
        rows.append(compare(args, *one))
        if args.csv:
            records.add_rows(Path(args.csv), [rows[-1] | records.origin()], ("policy", "game"))
    evaluate.show("EnvPool's Procgen and OpenAI's", rows)


if __name__ == "__main__":
    runs.cli(Args, main)
