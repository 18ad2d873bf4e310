"""EnvPool's games: Procgen and its published score ranges, frame and gap stacks, episode statistics.

EnvPool's automatic reset is NEXT_STEP: the step that ends an episode returns its last frame; the step after
that ignores its action, resets the game and returns the first frame of the next episode with reward 0. That
following step is no transition. Whoever collects data here gets `done` for the frame they act on and leaves
those steps out.
"""

import ctypes
import difflib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from common.runs import Run, Stopwatch, UsageError, check, write_json

NUM_ACTIONS = 15  # of every Procgen game
FRAME_SHAPE = (64, 64, 3)  # as the networks see it; EnvPool's own frames are (3, 64, 64)
MAX_SEED = 2**31 - 1  # EnvPool's seeds and Procgen's level numbers are non-negative int32

# Score of a policy that sees nothing, and the best possible (or best known) score, for each game and mode:
# openai/train-procgen, train_procgen/constants.py. Normalised score = (R - low) / (high - low).
RETURN_RANGES = {
    "easy": {
        "bigfish": (1, 40),
        "bossfight": (0.5, 13),
        "caveflyer": (3.5, 12),
        "chaser": (0.5, 13),
        "climber": (2, 12.6),
        "coinrun": (5, 10),
        "dodgeball": (1.5, 19),
        "fruitbot": (-1.5, 32.4),
        "heist": (3.5, 10),
        "jumper": (1, 10),
        "leaper": (1.5, 10),
        "maze": (5, 10),
        "miner": (1.5, 13),
        "ninja": (3.5, 10),
        "plunder": (4.5, 30),
        "starpilot": (2.5, 64),
    },
    "hard": {
        "bigfish": (0, 40),
        "bossfight": (0.5, 13),
        "caveflyer": (2, 13.4),
        "chaser": (0.5, 14.2),
        "climber": (1, 12.6),
        "coinrun": (5, 10),
        "dodgeball": (1.5, 19),
        "fruitbot": (-0.5, 27.2),
        "heist": (2, 10),
        "jumper": (1, 10),
        "leaper": (1.5, 10),
        "maze": (4, 10),
        "miner": (1.5, 20),
        "ninja": (2, 10),
        "plunder": (3, 30),
        "starpilot": (1.5, 35),
    },
}
GAMES = tuple(RETURN_RANGES["easy"])


def check_game(env_id: str) -> None:
    """Raises UsageError, with the nearest name and the list, if `env_id` is not a Procgen game."""
    if env_id not in GAMES:
        nearest = difflib.get_close_matches(env_id.lower(), GAMES, n=1, cutoff=0)[0]
        raise UsageError(f"--env-id {env_id}: no such game, did you mean {nearest}? Valid: {', '.join(GAMES)}")


def check_flags(args) -> None:
    """Raises UsageError, one sentence, if a script's flags of the games and their evaluation make no sense."""
    check_game(args.env_id)
    check(
        args.start_level + args.num_levels < MAX_SEED,
        f"--start-level {args.start_level}: no level is left above the {args.num_levels} training levels",
    )
    check(
        args.num_levels > 0 or args.start_level == 0,
        f"--start-level {args.start_level}: has no effect on unlimited levels, give --num-levels 1 or more",
    )
    check(
        args.eval_episodes > 0 or not args.capture_video,
        "--capture-video: films an evaluation, give --eval-episodes 1 or more",
    )


def load_qt() -> None:
    """Loads Qt 5 from the wheel PyQt5-Qt5, which EnvPool 1.2.5 (Python 3.11) draws Procgen with.

    EnvPool 1.2.7 (Python 3.12 and newer) bundles Qt 6: nothing to do. Raises UsageError where Qt cannot load.
    """
    if sys.version_info >= (3, 12):
        return
    package = importlib.util.find_spec("PyQt5")
    folders = list(package.submodule_search_locations) if package else []
    library = next((p for folder in folders if (p := Path(folder, "Qt5", "lib")).is_dir()), None)
    if library is None:
        return  # the system's Qt 5 may be there; if not, EnvPool's import says so
    try:
        for pattern in ("libicudata.so.*", "libicuuc.so.*", "libicui18n.so.*", "libQt5Core.so.5", "libQt5Gui.so.5"):
            for path in sorted(library.glob(pattern)):
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise UsageError(f"Qt 5 does not load ({error}): use Python 3.12 or newer, which needs no Qt 5") from None


def make_procgen(
    env_id: str,
    num_envs: int,
    seed: int,
    distribution_mode: str = "easy",
    num_levels: int = 0,
    start_level: int = 0,
):
    """Makes `num_envs` copies of a Procgen game as one EnvPool (Gymnasium API, C++ threads).

    Args:
      env_id: one of GAMES.
      seed: 0 to MAX_SEED; with the same actions it gives the same frames and rewards.
      distribution_mode: "easy" or "hard".
      num_levels: how many levels, from `start_level` on; 0 draws from all levels (`start_level` has no effect).

    Returns an EnvPool: frames uint8 [N, 3, 64, 64], rewards float32 [N], 15 actions.
    """
    load_qt()
    import envpool  # late: it takes seconds, and bad arguments should be answered before

    return envpool.make(
        f"{env_id.capitalize()}{distribution_mode.capitalize()}-v0",
        env_type="gymnasium",
        num_envs=num_envs,
        seed=seed,
        num_levels=num_levels,
        start_level=start_level,
    )


def make_levels(args, num_envs: int, seed: int, levels: str = "train"):
    """Makes a script's game (`args`: env_id, distribution_mode, num_levels, start_level) on "train" or "test" levels.

    Test levels are all levels above the training ones; where those are unlimited, test and train are the same.
    """
    first, count = args.start_level, args.num_levels
    if levels == "test" and count:
        first, count = first + count, MAX_SEED - first - count
    return make_procgen(args.env_id, num_envs, seed, args.distribution_mode, count, first)


def derive_seed(*numbers: int) -> int:
    """A seed for the games from the run's seed, the step, and whatever else tells them apart."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0] % MAX_SEED)


class Steps(NamedTuple):
    """What T steps of N games say, NumPy on the host. `done[t]`: the frame of step t is an episode's last."""

    rewards: np.ndarray  # float32 [T, N]: of the transition that starts at step t
    terminated: np.ndarray  # bool [T, N]: that transition ended the episode
    truncated: np.ndarray  # bool [T, N]: that transition was the last before the time limit
    done: np.ndarray  # bool [T, N]: EnvPool resets here, this step is no transition
    age: np.ndarray  # int32 [T + 1, N]: steps since the episode's first frame

    @property
    def ended(self) -> np.ndarray:
        """bool [T, N]: that transition was its episode's last."""
        return self.terminated | self.truncated


def join_steps(parts: Sequence[Steps]) -> Steps:
    """The steps of several actors' games as one, in this order."""
    return jax.tree.map(lambda *x: np.concatenate(x, axis=1), *parts)


class Games:
    """An EnvPool whose point in time can be saved: by its seed and the actions played since.

    EnvPool cannot save a game's state, but its games are deterministic: a copy with the same seed that plays
    the same actions arrives at the same frames. `restart` keeps that list of actions short.

    Attributes:
      obs: uint8 [N, C, H, W], the newest frames, and info, what EnvPool says besides.
      age: int32 [N], steps since each episode's first frame (0 on it).
      done: bool [N], True where `obs` is the last frame of an episode: the next step is no transition.
    """

    def __init__(self, make: Callable[[int], object], seed: int):
        """`make(seed)` returns an EnvPool with Gymnasium's API."""
        self._make = make
        self._env = None
        self.restart(seed)

    def restart(self, seed: int) -> None:
        """Drops all unfinished episodes and starts every game anew from `seed`."""
        if self._env is not None:
            self._env.close()
        self._seed, self._actions = seed, []
        self._env = self._make(seed)
        self.obs, self.info = self._env.reset()
        self.age = self.info["elapsed_step"]
        self.done = np.zeros(len(self.age), bool)

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Plays int [N] actions; returns reward float32 [N], terminated bool [N], truncated bool [N]."""
        self._actions.append(actions.astype(np.uint8))
        self.obs, reward, terminated, truncated, self.info = self._env.step(actions)
        self.age = self.info["elapsed_step"]
        self.done = terminated | truncated
        return reward, terminated, truncated

    def play(self, act: Callable, num_steps: int, watch: Stopwatch, check: Callable = lambda: None) -> Steps:
        """Plays `num_steps` steps with actions int [N] = act(obs, age); calls check() before each."""
        shape = (num_steps, len(self.age))
        rewards, (terminated, truncated, done) = np.zeros(shape, np.float32), np.zeros((3, *shape), bool)
        age = np.zeros((num_steps + 1, shape[1]), np.int32)
        for t in range(num_steps):
            check()
            age[t], done[t] = self.age, self.done
            with watch("inference"):
                actions = np.asarray(act(self.obs, self.age))
            with watch("game"):
                rewards[t], terminated[t], truncated[t] = self.step(actions)
        age[-1] = self.age
        return Steps(rewards, terminated, truncated, done, age)

    @property
    def steps(self) -> int:
        """How many steps have been played since the last restart."""
        return len(self._actions)

    def save(self, steps: int | None = None) -> dict[str, np.ndarray]:
        """Seed and actions uint8 [steps, N] since the last restart (left out while there are none).

        With `steps`, the point in time after so many of them.
        """
        actions = self._actions[:steps]
        return {"seed": np.int64(self._seed)} | ({"actions": np.stack(actions)} if actions else {})

    def restore(self, saved: dict[str, np.ndarray]) -> None:
        """Plays the games forward to the point in time that `save` was called at."""
        self.restart(int(saved["seed"]))
        for actions in saved.get("actions", ()):
            self.step(actions.astype(np.int32))

    def close(self) -> None:
        self._env.close()


# FRAME STACKS


def stack_offsets(frame_stack: int, gap_stack: bool) -> tuple[int, ...]:
    """How many steps back each stacked frame lies, oldest first: (3, 2, 1, 0), or (3, 0) with the gap."""
    offsets = tuple(range(frame_stack - 1, -1, -1))
    return (offsets[0], offsets[-1]) if gap_stack and frame_stack > 1 else offsets


def history_length(args) -> int:
    """How many older frames a rollout starts with, for the stacks of its first steps."""
    return max(args.frame_stack - 1, 1)


def put_frames(frames: jax.Array, row: jax.Array, obs: jax.Array) -> jax.Array:
    """Writes EnvPool's frames uint8 [N, C, H, W] as row `row` of frames uint8 [rows, N, H, W, C]."""
    return frames.at[row].set(obs.transpose(0, 2, 3, 1))


def stack_frames(frames: jax.Array, age: jax.Array, time: jax.Array, env: jax.Array, offsets: Sequence[int]):
    """Stacks of past frames, gathered from frames that are stored once.

    A frame from before the episode's first is replaced by the first, as if a reset had filled the stack with it.

    Args:
      frames: uint8 [rows, N, H, W, C], one row a step.
      age: int [B], steps since the first frame of the episode.
      time, env: int [B], where in `frames` the newest frame of each stack is.
      offsets: from `stack_offsets`.

    Returns uint8 [B, H, W, C * len(offsets)], oldest frame first.
    """
    return jnp.concatenate([frames[time - jnp.minimum(age, back), env] for back in offsets], axis=-1)


# EPISODES


class EpisodeStatistics:
    """Returns and lengths of finished episodes, in the games' own rewards; the last 100 are remembered."""

    def __init__(self, num_envs: int):
        self._return, self._length = np.zeros(num_envs), np.zeros(num_envs, np.int64)
        self._recent = np.full((100, 2), np.nan)  # return, length; oldest first

    def add(self, steps: Steps) -> None:
        """Takes the steps of a rollout; those that are no transition are left out."""
        for reward, done, valid in zip(steps.rewards, steps.ended, ~steps.done, strict=True):
            self._return += reward * valid
            self._length += valid
            if done.any():
                ended = np.stack([self._return[done], self._length[done]], axis=1)
                self._recent = np.concatenate([self._recent, ended])[-100:]
                self._return[done], self._length[done] = 0, 0

    def restart(self) -> None:
        """Forgets the unfinished episodes."""
        self._return[:], self._length[:] = 0, 0

    def metrics(self) -> dict[str, float]:
        """Means over the last 100 finished episodes; nothing before the first."""
        recent = self._recent[~np.isnan(self._recent[:, 0])]
        if not len(recent):
            return {}
        mean_return, mean_length = recent.mean(axis=0)
        return {"charts/episodic_return": float(mean_return), "charts/episodic_length": float(mean_length)}

    def save(self) -> dict[str, np.ndarray]:
        return {"return": self._return, "length": self._length, "recent": self._recent}

    def restore(self, saved: dict[str, np.ndarray]) -> None:
        self._return, self._length, self._recent = (np.array(saved[k]) for k in ("return", "length", "recent"))


# EVALUATION


@partial(jax.jit, static_argnums=3, donate_argnums=0)
def _slide(frames, obs, age, offsets):
    frames = put_frames(jnp.roll(frames, -1, axis=0), -1, obs)
    return frames, stack_frames(frames, age, jnp.int32(len(frames) - 1), jnp.arange(len(obs)), offsets)


def play_episodes(
    env, policy: Callable, offsets: Sequence[int], episodes: int, seed: int, record: bool = False, stop=lambda: False
):
    """Plays the same number of episodes in each game, so that short episodes count no more than long ones.

    Args:
      env: an EnvPool, not yet reset.
      policy: policy(frames uint8 [N, H, W, C], age int32 [N], key, memory) -> int [N] actions, memory. Its memory,
        None at first, is handed back to it at the next step; an episode's first frame has age 0.
      offsets: from `stack_offsets`.
      episodes: at least this many in all, rounded up to a multiple of N.
      record: keep the frames of the first game's first episode (else its first frame only).
      stop: asked at each step; when it says yes, the answer is None.

    Returns the returns float64 [episodes], raw rewards, game by game, and the frames uint8 [T, H, W, channels].
    """
    obs, info = env.reset()
    num_envs, key = len(obs), jax.random.PRNGKey(seed)
    quota, memory = -(-episodes // num_envs), None
    totals, counts = np.zeros((quota, num_envs)), np.zeros(num_envs, np.int64)
    done, columns = np.zeros(num_envs, bool), np.arange(num_envs)
    film, filming = [obs[0].copy()], record  # a copy: obs[0] keeps all games' frames alive
    frames = jnp.zeros((max(offsets) + 1, *np.moveaxis(obs, 1, -1).shape), jnp.uint8)
    while counts.min() < quota:
        if stop():
            return None
        frames, stacked = _slide(frames, obs, info["elapsed_step"], tuple(offsets))
        key, now = jax.random.split(key)
        actions, memory = policy(stacked, info["elapsed_step"], now, memory)
        counted = ~done & (counts < quota)
        obs, reward, terminated, truncated, info = env.step(np.asarray(actions))
        totals[counts[counted], columns[counted]] += reward[counted]
        done = terminated | truncated
        counts += done & counted
        if filming:
            film.append(obs[0].copy())
            filming = not done[0]
    return totals.T.reshape(-1), np.stack(film).transpose(0, 2, 3, 1)


def evaluate(args, policy: Callable, levels: str, episodes: int, seed: int, record: bool = False, stop=lambda: False):
    """`play_episodes` on a script's "train" or "test" levels, up to 64 games side by side, and a summary of it.

    Returns mean, std, min and max of the raw returns and the mean normalised by RETURN_RANGES, and the frames; or
    None if `stop` said yes.
    """
    env = make_levels(args, min(episodes, 64), seed, levels)
    offsets = stack_offsets(args.frame_stack, args.gap_stack)
    played = play_episodes(env, policy, offsets, episodes, seed, record, stop)
    env.close()
    if played is None:
        return None
    returns, film = played
    low, high = RETURN_RANGES[args.distribution_mode][args.env_id]
    return summarize(returns) | {"normalized": float((returns.mean() - low) / (high - low))}, film


def summarize(returns: np.ndarray) -> dict[str, float]:
    """What an evaluation says of its episodes' returns [episodes]."""
    statistics = {"mean_return": returns.mean(), "std": returns.std(), "min": returns.min(), "max": returns.max()}
    return {name: float(value) for name, value in statistics.items()} | {"episodes": len(returns)}


def evaluate_run(args, run: Run, policy: Callable, step: int) -> dict[str, float]:
    """Evaluation within training: `args.eval_episodes` episodes on test levels and, if they are limited, on training
    levels; writes eval.json and, with `args.capture_video`, a video. Its randomness is its own.

    Returns metrics eval/{train,test}_levels/{mean_return,std,min,max,normalized,episodes}; none if a signal came.
    """
    results, films = {}, {}
    for i, levels in enumerate(("train", "test") if args.num_levels else ("test",)):
        record = args.capture_video and levels == "test"
        seed = derive_seed(args.seed, step, 1 + i)
        answer = evaluate(args, policy, levels, args.eval_episodes, seed, record, lambda: run.stop)
        if answer is None:
            return {}
        results[levels], films[levels] = answer
    if args.capture_video:
        run.save_video(step, films["test"])
    write_json(run.path / "eval.json", {"global_step": step} | {f"{k}_levels": v for k, v in results.items()})
    run.say(
        f"{step:,} steps: "
        + ", ".join(f"{k} levels {r['mean_return']:.2f} +- {r['std']:.2f}" for k, r in results.items())
        + ("" if args.num_levels else " (training levels are unlimited: test levels come from the same distribution)")
    )
    return {f"eval/{levels}_levels/{k}": v for levels, summary in results.items() for k, v in summary.items()}
