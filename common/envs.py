"""EnvPool's games: Procgen and its published score ranges, frame and gap stacks, episode statistics.

EnvPool's automatic reset is NEXT_STEP: the step that ends an episode returns its last frame; the step after
that ignores its action, resets the game and returns the first frame of the next episode with reward 0. That
following step is no transition: a "junk step". Whoever collects data here gets `done` for the frame they act on
and leaves those steps out.
"""

import ctypes
import difflib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Interval
from flax import struct

from common import devices
from common.files import UsageError, check, write_json
from common.flags import MAX_SEED, NonNegativeFloat, NonNegativeInt, check_needs
from common.runs import Evaluation, Run, Stopwatch

NUM_ACTIONS = 15  # of every Procgen game
FRAME_SHAPE = (64, 64, 3)  # as the networks see it; EnvPool's own frames are (3, 64, 64)

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
Game = Literal[GAMES]


@dataclass(frozen=True)
class GameArgs:
    """The Procgen game, its observations and rewards, and evaluation."""

    # With another restart_every, games would restart although the saved steps had not announced it (`Steps.restarts`);
    # another stack of as many frames has the saved one's shapes, so that nothing else would notice.
    FIXED: ClassVar = (
        "env_id", "distribution_mode", "num_levels", "start_level", "use_backgrounds", "restrict_themes",
        "frame_stack", "gap_stack", "restart_every",
    )  # fmt: skip

    env_id: Game = "bigfish"
    """Procgen game"""
    distribution_mode: Literal["easy", "hard"] = "easy"
    """difficulty of the levels"""
    num_levels: NonNegativeInt = 0
    """number of training levels; 0 for unlimited"""
    start_level: NonNegativeInt = 0
    """first training level, if num_levels is not 0"""
    use_backgrounds: bool = True
    """draw decorative backgrounds (black if off)"""
    restrict_themes: bool = False
    """use a single theme for each kind of object"""
    sticky_actions: Annotated[float, Interval(ge=0, le=0.99)] = 0.0
    """probability of repeating the previous action in training instead of the policy's"""
    frame_stack: Annotated[int, Interval(ge=1, le=64)] = 4
    """number of stacked frames, the newest included; 1 for no stack"""
    gap_stack: bool = True
    """keep only the oldest and the newest frame of a stack"""
    reward_shaping: bool = False
    """transform rewards to sign(r)(sqrt(|r| + 1) - 1) + 0.001 r (Pohlen et al. 2018)"""
    reward_clip: NonNegativeFloat = 0.0
    """clip rewards to [-c, c], after shaping; 0 for no clipping"""
    restart_every: Annotated[int, Interval(ge=1, le=10**6)] = 16_384
    """steps of each environment between restarts of all games, which drop unfinished episodes; a resume replays the
    steps since the last restart"""
    eval_every: NonNegativeInt = devices.host_only(1_000_000)
    """environment steps between evaluations; 0 for a single one at the end"""
    eval_episodes: Annotated[int, Interval(ge=0, le=10**6)] = devices.host_only(128)
    """evaluation episodes on unseen levels, and on the training levels if --num-levels limits them; rounded up to a
    multiple of the parallel environments (at most 64); 0 for no evaluation"""
    capture_video: bool = devices.host_only(False)
    """record one episode of each evaluation as a video"""

    @property
    def offsets(self) -> tuple[int, ...]:
        """How many steps back each frame of a stack lies, oldest first."""
        return stack_offsets(self.frame_stack, self.gap_stack)

    def check(self) -> None:
        """Raises UsageError for inconsistent flags."""
        check(
            self.start_level + self.num_levels < MAX_SEED,
            f"--num-levels {self.num_levels} --start-level {self.start_level}: no level is left above the training "
            f"levels, their sum must be below {MAX_SEED}",
        )
        check_needs(self, self.num_levels, "--num-levels 1 or more", ("start_level",))
        check_needs(self, self.eval_episodes, "--eval-episodes 1 or more", ("capture_video",))
        check_needs(self, self.eval_episodes or not self.eval_every, "--eval-episodes 1 or more", ("eval_every",))


def check_game(env_id: str, flag: str = "--env-id") -> None:
    """Raises UsageError, with the nearest name and the list, if the value of `flag` is not a Procgen game."""
    if env_id not in GAMES:
        nearest = difflib.get_close_matches(env_id.lower(), GAMES, n=1, cutoff=0)[0]
        raise UsageError(f"{flag} {env_id}: no such game, did you mean {nearest}? Valid: {', '.join(GAMES)}")


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


def range_of_levels(args, levels: str) -> tuple[int, int]:
    """The first of a script's "train" or "test" levels and how many there are, 0 for all (`args`: GameArgs).

    Test levels are all levels above the training ones; where those are unlimited, test and train are the same.
    """
    first, count = args.start_level, args.num_levels
    if levels == "test" and count:
        return first + count, MAX_SEED - first - count
    return first, count


def import_envpool() -> ModuleType:
    """Imports EnvPool when games are made, not earlier: it takes seconds, and bad arguments should be answered before.
    Raises UsageError where a system library that EnvPool loads is missing, as in a bare container."""
    load_qt()
    try:
        import envpool
    except ModuleNotFoundError:  # the package itself
        raise
    except ImportError as error:
        install = "libgl1" if sys.version_info < (3, 12) else "libegl1 libopengl0"
        raise UsageError(f"EnvPool does not load ({error}): apt install {install}") from None
    return envpool


def make_levels(args, num_envs: int, seed: int | Sequence[int], levels: str = "train"):
    """Makes `num_envs` copies of a script's game (`args`: GameArgs) on "train" or "test" levels, as one EnvPool
    (Gymnasium API, C++ threads): frames uint8 [N, 3, 64, 64], rewards float32 [N], 15 actions.

    A seed is 0 to MAX_SEED, or one for each game; with the same actions it gives the same frames and rewards.
    """
    envpool = import_envpool()

    first, count = range_of_levels(args, levels)
    return envpool.make(
        f"{args.env_id.capitalize()}{args.distribution_mode.capitalize()}-v0",
        env_type="gymnasium",
        num_envs=num_envs,
        seed=seed,
        num_levels=count,
        start_level=first,
        use_backgrounds=args.use_backgrounds,
        restrict_themes=args.restrict_themes,
    )


def derive_seed(*numbers: int) -> int:
    """A seed for one purpose, from the run's seed and the numbers that tell this purpose from a script's others. 0s
    at the end do not count."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0] % MAX_SEED)


class Steps(NamedTuple):
    """What T steps of N games say, NumPy on the host. `done[t]`: the frame of step t is an episode's last."""

    rewards: np.ndarray  # float32 [T, N]: of the transition that starts at step t
    terminated: np.ndarray  # bool [T, N]: that transition ended the episode
    truncated: np.ndarray  # bool [T, N]: that transition was the last before the time limit
    done: np.ndarray  # bool [T, N]: EnvPool resets here, this step is no transition
    age: np.ndarray  # int32 [T + 1, N]: steps since the episode's first frame
    restarts: np.ndarray  # bool [N]: the game starts anew after these steps, whatever became of its episode

    @property
    def ended(self) -> np.ndarray:
        """bool [T, N]: that transition was its episode's last."""
        return self.terminated | self.truncated

    @property
    def last(self) -> jax.Array:
        """bool [T, N]: nothing follows that transition, as it was its episode's last or the game starts anew."""
        return jnp.asarray(self.ended).at[-1].set(self.ended[-1] | self.restarts)


STEPS = devices.layout(Steps, games="restarts", steps="rewards terminated truncated done age")


def join_games(parts: Sequence, axis: int):
    """Joins trees of arrays of several actors along `axis`, that of each actor's n games: every actor's first game,
    then every actor's second, and so on.

    This order is the same on any number of devices, since each device has its part of every actor's games.
    """

    def join(*x):
        before, after = x[0].shape[:axis], x[0].shape[axis:][1:]
        xp = jnp if isinstance(x[0], jax.Array) else np
        return xp.stack(x, axis=len(before) + 1).reshape(*before, -1, *after)

    return jax.tree.map(join, *parts)


class Mark(NamedTuple):
    """A point in time of some games, which they can be brought back to."""

    seed: int
    actions: list[np.ndarray]  # uint8 [N] each; games add to this list, `steps` says how many are before this point
    steps: int

    def save(self) -> dict[str, np.ndarray]:
        """Seed and actions uint8 [steps, N] (left out while there are none)."""
        actions = self.actions[: self.steps]
        return {"seed": np.int64(self.seed)} | ({"actions": np.stack(actions)} if actions else {})


class Games:
    """An EnvPool whose point in time can be saved: by its seed and the actions played since.

    EnvPool cannot save a game's state, but its games are deterministic: a copy with the same seed that plays
    the same actions arrives at the same frames. So that this list does not grow for ever, all games start anew, from a
    seed derived from the last, when each has played `restart_every` steps or more at the end of a `play`. It happens
    after as many steps of a game however many games there are, and wherever checkpoints fall.

    A game's own seed comes of this one and its number, so it is the same game beside whichever others it is played.

    Attributes:
      obs: uint8 [N, C, H, W], the newest frames, and info, what EnvPool says besides.
      age: int32 [N], steps since each episode's first frame (0 on it).
      done: bool [N], True where `obs` is the last frame of an episode: the next step is no transition.
    """

    def __init__(self, make: Callable[[int, list[int]], object], numbers: Sequence[int], seed: int, restart_every: int):
        """`make(N, seeds)` returns an EnvPool with Gymnasium's API; `numbers` are those of the N games in the run."""
        self._make, self._numbers, self._restart_every = make, numbers, restart_every
        self._env = None
        self._start(seed)

    def _start(self, seed: int) -> None:
        """Drops all unfinished episodes and starts every game anew from `seed`."""
        if self._env is not None:
            self._env.close()
        self._seed, self._actions = seed, []
        self._env = self._make(len(self._numbers), [derive_seed(seed, int(number)) for number in self._numbers])
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

    def play(self, act: Callable, num_steps: int, watch: Stopwatch, check_stop: Callable = lambda: None) -> Steps:
        """Plays `num_steps` steps with actions int [N] = act(obs, age); calls check_stop() before each."""
        if len(self._actions) >= self._restart_every:
            self._start(derive_seed(self._seed))
        shape = (num_steps, len(self.age))
        rewards, (terminated, truncated, done) = np.zeros(shape, np.float32), np.zeros((3, *shape), bool)
        age = np.zeros((num_steps + 1, shape[1]), np.int32)
        for t in range(num_steps):
            check_stop()
            age[t], done[t] = self.age, self.done
            with watch("inference"):
                actions = np.asarray(act(self.obs, self.age))
            with watch("game"):
                rewards[t], terminated[t], truncated[t] = self.step(actions)
        age[-1] = self.age
        restarts = np.full(shape[1], len(self._actions) >= self._restart_every)
        return Steps(rewards, terminated, truncated, done, age, restarts)

    def mark(self) -> Mark:
        """This point in time."""
        return Mark(self._seed, self._actions, len(self._actions))

    def restore(self, saved: dict[str, np.ndarray], run: Run) -> None:
        """Plays the games forward to the point in time that a Mark was saved of; says so if that takes long."""
        self._start(int(saved["seed"]))
        actions = saved.get("actions", np.zeros((0, len(self.age)), np.uint8))
        progress = run.while_replaying("the games since they were last started", actions.size)
        for i, some in enumerate(actions):
            progress(i * len(some))
            self.step(some.astype(np.int32))

    def close(self) -> None:
        self._env.close()


def step_keys(rollout: Any) -> tuple[jax.Array, jax.Array]:
    """Keys uint32 [N, 2] for the choices and for the sticky actions of a rollout's next step: by game, so that it plays
    the same on whichever device, and whichever actor it has."""
    key = jax.random.fold_in(rollout.key, rollout.t)
    return tuple(devices.keys_of(key, rollout.numbers) for key in jax.random.split(key))


def stick(keys: jax.Array, probability: float, actions: jax.Array, last_action: jax.Array, age: jax.Array) -> jax.Array:
    """The actions int32 [N] that the games play: with this probability a game repeats its last action, except on an
    episode's first frame (Machado et al. 2018, section 5). Keys uint32 [N, 2], probability float32 [], all else
    int32 [N]."""
    again = jax.vmap(jax.random.bernoulli, (0, None))(keys, probability) & (age > 0)
    return jnp.where(again, last_action, actions)


# FRAMES


def stack_offsets(frame_stack: int, gap_stack: bool) -> tuple[int, ...]:
    """How many steps back each stacked frame lies, oldest first: (3, 2, 1, 0), or (3, 0) with the gap."""
    offsets = tuple(range(frame_stack - 1, -1, -1))
    return (offsets[0], offsets[-1]) if gap_stack and frame_stack > 1 else offsets


@struct.dataclass
class Frames:
    """Frames of T steps of N games, each stored once; older ones, for the stacks of the first steps, come before them.

    A stack has no frame from before its episode's first: that one stands for them, as if a reset had filled the stack.
    """

    images: jax.Array  # uint8 [past + T, N, H, W, C]: row past + t is what step t sees
    ages: jax.Array  # int32 [T, N]: steps since the episode's first frame
    offsets: tuple[int, ...] = struct.field(pytree_node=False)  # of `stack_offsets`

    @classmethod
    def after(cls, history: jax.Array, steps: int, offsets: Sequence[int]) -> "Frames":
        """Room for so many steps after a history uint8 [past, N, H, W, C]."""
        images = jnp.zeros((len(history) + steps, *history.shape[1:]), jnp.uint8)
        ages = jnp.zeros((steps, history.shape[1]), jnp.int32)
        return cls(images.at[: len(history)].set(history), ages, tuple(offsets))

    @property
    def past(self) -> int:
        """How many rows come before step 0's."""
        return len(self.images) - len(self.ages)

    @property
    def first(self) -> jax.Array:
        """bool [T, N]: whether a frame is its episode's first."""
        return self.ages == 0

    def put(self, t: jax.Array, obs: jax.Array, age: jax.Array) -> "Frames":
        """Writes EnvPool's frames uint8 [N, C, H, W] and their ages int32 [N] as those of step t."""
        images = self.images.at[self.past + t].set(obs.transpose(0, 2, 3, 1))
        return self.replace(images=images, ages=self.ages.at[t].set(age))

    def stack(self, time: jax.Array, env: jax.Array | None = None) -> jax.Array:
        """What is seen at steps `time` of games `env`, both int32 [...]: uint8 [..., H, W, C * len(offsets)], the
        oldest frame first. Without `env`, all games [N] at one step."""
        env = jnp.arange(self.ages.shape[1]) if env is None else env
        row, age = self.past + time, self.ages[time, env]
        return jnp.concatenate([self.images[row - jnp.minimum(age, back), env] for back in self.offsets], axis=-1)

    def history(self, steps: int) -> jax.Array:
        """The frames before those of step `steps`, uint8 [past, N, H, W, C], as `after` takes them."""
        return self.images[steps : steps + self.past]


def empty_history(num_envs: int, offsets: Sequence[int], shape: tuple[int, ...] = FRAME_SHAPE) -> jax.Array:
    """The history before a first step: uint8 [past, N, H, W, C] of zeros, which no stack reaches back to."""
    return jnp.zeros((max(*offsets, 1), num_envs, *shape), jnp.uint8)


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
        self._return[steps.restarts], self._length[steps.restarts] = 0, 0

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


@partial(jax.jit, donate_argnums=0)
def slide(frames: Frames, obs: jax.Array, age: jax.Array) -> tuple[Frames, jax.Array]:
    """Frames of one step, moved on to the next ones, uint8 [N, C, H, W] of ages int32 [N]; and what is seen then, uint8
    [N, H, W, C * len(offsets)]."""
    frames = frames.replace(images=jnp.roll(frames.images, -1, axis=0)).put(0, obs, age)
    return frames, frames.stack(0)


def play_episodes(
    env, policy: Callable, offsets: Sequence[int], *, episodes: int, seed: int, record: bool = False, stop=lambda: False
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

    Returns the returns float64 [episodes], raw rewards, game by game, the level of each (`level_seed`; 0 in a game
    without), int [episodes], how often each action was played in them, int64 [the highest one + 1], and the frames
    uint8 [T, H, W, channels].
    """
    obs, info = env.reset()
    num_envs = len(obs)
    key = jax.random.PRNGKey(seed)
    memory = None
    quota = -(-episodes // num_envs)
    totals, played = np.zeros((quota, num_envs)), np.zeros((quota, num_envs), np.int64)
    counts = np.zeros(num_envs, np.int64)
    chosen = []
    done = np.zeros(num_envs, bool)
    columns = np.arange(num_envs)
    film = [obs[0].copy()]  # a copy: obs[0] keeps all games' frames alive
    filming = record
    frames = Frames.after(empty_history(num_envs, offsets, np.moveaxis(obs[0], 0, -1).shape), 1, offsets)
    while counts.min() < quota:
        if stop():
            return None
        frames, stacked = slide(frames, obs, info["elapsed_step"])
        key, now = jax.random.split(key)
        actions, memory = policy(stacked, info["elapsed_step"], now, memory)
        counted = ~done & (counts < quota)
        played[counts[counted], columns[counted]] = info.get("level_seed", np.zeros(num_envs, np.int64))[counted]
        actions = np.asarray(actions)
        chosen.append(actions[counted])
        obs, reward, terminated, truncated, info = env.step(actions)
        totals[counts[counted], columns[counted]] += reward[counted]
        done = terminated | truncated
        counts += done & counted
        if filming:
            film.append(obs[0].copy())
            filming = not done[0]
    often = np.bincount(np.concatenate(chosen))
    return totals.T.reshape(-1), played.T.reshape(-1), often, np.stack(film).transpose(0, 2, 3, 1)


def evaluate(
    args, policy: Callable, levels: str, *, episodes: int, seed: int, record: bool = False, stop=lambda: False
):
    """`play_episodes` on a script's "train" or "test" levels, up to 64 games side by side, and a summary of it.

    Returns what `summarize` says of the raw returns, their mean normalised by RETURN_RANGES and the share of steps with
    the commonest action, near 1 if it is the same whatever is seen; the returns by level; and the frames. Or None if
    `stop` said yes.
    """
    env = make_levels(args, devices.multiple(args, min(episodes, 64)), seed, levels)
    played = play_episodes(env, policy, args.offsets, episodes=episodes, seed=seed, record=record, stop=stop)
    env.close()
    if played is None:
        return None
    returns, seeds, chosen, film = played
    low, high = RETURN_RANGES[args.distribution_mode][args.env_id]
    by_level = {}
    for level, value in sorted(zip(seeds.tolist(), returns.tolist(), strict=True)):
        by_level.setdefault(str(level), []).append(value)
    summary = summarize(returns) | {"normalized": float((returns.mean() - low) / (high - low))}
    return summary | {"commonest_action": float(chosen.max() / chosen.sum())}, by_level, film


def summarize(returns: np.ndarray) -> dict[str, float]:
    """What an evaluation says of its episodes' returns [episodes]."""
    error = returns.std() / max(len(returns) - 1, 1) ** 0.5  # of the unbiased variance; 0 for a single episode
    statistics = {"mean_return": returns.mean(), "standard_error": error, "std": returns.std()}
    statistics |= {"min": returns.min(), "max": returns.max()}
    return {name: float(value) for name, value in statistics.items()} | {"episodes": len(returns)}


def evaluate_if_due(args, run: Run, step: int, policy: Callable) -> None:
    """Evaluation within training, where one is due: `args.eval_episodes` episodes on test levels and, if they are
    limited, on training levels; writes eval.json and, with `args.capture_video`, a video. Its randomness is its own.

    Logs eval/{train,test}_levels/{mean_return,standard_error,std,min,max,normalized,episodes,commonest_action}; nothing
    if a signal came.
    """
    if not (args.eval_episodes and run.evaluation_due(step)):
        return
    results, films, content = {}, {}, {"global_step": step}
    for i, levels in enumerate(("train", "test") if args.num_levels else ("test",)):
        record = args.capture_video and levels == "test"
        seed = derive_seed(args.seed, step, 1 + i)
        answer = evaluate(
            args, policy, levels, episodes=args.eval_episodes, seed=seed, record=record, stop=lambda: run.interrupted
        )
        if answer is None:
            return
        results[levels], by_level, films[levels] = answer
        content[f"{levels}_levels"] = results[levels] | {"returns_by_level": by_level}
    if args.capture_video:
        run.save_video(step, films["test"])
    write_json(run.path / "eval.json", content)
    run.say(
        f"{step:,} steps: "
        + ", ".join(f"{k} levels {r['mean_return']:.2f} +- {r['standard_error']:.2f}" for k, r in results.items())
        + ("" if args.num_levels else " (training levels are unlimited: test levels come from the same distribution)")
    )
    metrics = {f"eval/{levels}_levels/{k}": v for levels, summary in results.items() for k, v in summary.items()}
    run.log_evaluation(step, metrics)


def as_policy(choose: Callable) -> Callable:
    """A policy without a memory, as `play_episodes` calls it.

    Args:
      choose: choose(frames, keys uint32 [N, 2]) -> actions int32 [N].
    """

    def play(frames, age, key, memory):
        return choose(frames, jax.random.split(key, len(frames))), None

    return play


def as_recurrent_policy(choose: Callable, start: Callable) -> Callable:
    """A policy with a memory, as `play_episodes` calls it.

    Args:
      choose: choose(frames, age, keys uint32 [N, 2], memory) -> actions int32 [N], memory.
      start: start(N) -> the memory before the first step.
    """

    def play(frames, age, key, memory):
        memory = start(len(frames)) if memory is None else memory
        return choose(frames, age, jax.random.split(key, len(frames)), memory)

    return play


def random_policy(frames, age, key, memory, actions: int = NUM_ACTIONS):
    """Uniformly random actions int32 [N], as `play_episodes` calls a policy."""
    return jax.random.randint(key, len(frames), 0, actions), None


def evaluate_checkpoint(
    args, step: int, policy: Callable, *, episodes: int, seed: int, levels: str, random: bool, video: bool
) -> Evaluation:
    """For evaluate.py: plays a policy of environment step `step`, or random actions, on "train" or "test" levels."""
    played = random_policy if random else policy
    summary, by_level, film = evaluate(args, played, levels, episodes=episodes, seed=seed, record=video)
    name = f"{'random_' if random else ''}{levels}_levels"
    title = name.replace("_", " ")
    title += "" if args.num_levels else "; training levels were unlimited: these come from the same distribution"
    return Evaluation(step, name, title, [], summary, film, details={"returns_by_level": by_level})
