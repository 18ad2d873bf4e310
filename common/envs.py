"""EnvPool's games: Procgen and its published score ranges, frame stacks, episode statistics, evaluation.

EnvPool resets as Gymnasium's AutoresetMode.NEXT_STEP: the step that ends an episode returns its last frame; the next
one ignores its action, resets the game and returns the new episode's first frame with reward 0. That step is no
transition but a "junk step", which `Timesteps.is_reset` marks and learners leave out.
"""

import ctypes
import importlib.util
import itertools
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Interval
from flax import struct
from jax.sharding import Mesh

from common import devices
from common.devices import ENV_SHARDED, REPLICATED, TIME_ENV_SHARDED
from common.files import UsageError, check, write_json
from common.flags import MAX_SEED, NonNegativeFloat, NonNegativeInt, check_needs
from common.runs import Evaluation, Run, Stopwatch

NUM_ACTIONS = 15  # of every Procgen game
FRAME_SHAPE = (64, 64, 3)  # as the networks see it; EnvPool's own frames are (3, 64, 64)

# (low, high) in easy and in hard mode: the score of a policy without observations, and the best possible or known one,
# of openai/train-procgen, train_procgen/constants.py. Normalised score = (R - low) / (high - low).
_RANGES = {
    "bigfish": ((1, 40), (0, 40)),
    "bossfight": ((0.5, 13), (0.5, 13)),
    "caveflyer": ((3.5, 12), (2, 13.4)),
    "chaser": ((0.5, 13), (0.5, 14.2)),
    "climber": ((2, 12.6), (1, 12.6)),
    "coinrun": ((5, 10), (5, 10)),
    "dodgeball": ((1.5, 19), (1.5, 19)),
    "fruitbot": ((-1.5, 32.4), (-0.5, 27.2)),
    "heist": ((3.5, 10), (2, 10)),
    "jumper": ((1, 10), (1, 10)),
    "leaper": ((1.5, 10), (1.5, 10)),
    "maze": ((5, 10), (4, 10)),
    "miner": ((1.5, 13), (1.5, 20)),
    "ninja": ((3.5, 10), (2, 10)),
    "plunder": ((4.5, 30), (3, 30)),
    "starpilot": ((2.5, 64), (1.5, 35)),
}
RETURN_RANGES = {mode: {game: ranges[i] for game, ranges in _RANGES.items()} for i, mode in enumerate(("easy", "hard"))}
GAMES = tuple(_RANGES)
# Random play, 1,024 episodes on all easy levels (docs/baselines.md).
RANDOM_RETURNS = {
    "bigfish": 0.9, "bossfight": 0.0, "caveflyer": 3.0, "chaser": 0.7, "climber": 2.3, "coinrun": 2.9,
    "dodgeball": 0.6, "fruitbot": -2.3, "heist": 3.0, "jumper": 3.1, "leaper": 2.4, "maze": 4.4, "miner": 1.2,
    "ninja": 2.7, "plunder": 4.2, "starpilot": 1.5,
}  # fmt: skip
Game = Literal[GAMES]


@dataclass(frozen=True)
class GameArgs:
    """The Procgen game, its observations and rewards, and evaluation."""

    # restart_every: with another, a resume could skip a reset that `forced_reset` announced. frame_stack: with a gap,
    # stacks of 3 and of 4 frames fit the same network, so loading a checkpoint would not notice.
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
    """probability of repeating the previous action in place of the policy's; in training only"""
    frame_stack: Annotated[int, Interval(ge=1, le=64)] = 4
    """number of frames that a stack spans, the newest included; 1 for no stack"""
    gap_stack: bool = True
    """keep only the oldest and the newest frame of a stack"""
    reward_shaping: bool = False
    """transform rewards to sign(r)(sqrt(|r| + 1) - 1) + 0.001 r (Pohlen et al. 2018; 0.001 as in R2D2)"""
    reward_clip: NonNegativeFloat = 0.0
    """clip rewards to [-c, c], after shaping; 0 for no clipping"""
    restart_every: Annotated[int, Interval(ge=1, le=10**6)] = 131_072
    """steps of each environment between restarts of all, which cut episodes; a resume replays the steps since then"""
    eval_every: NonNegativeInt = 1_000_000
    """environment steps between evaluations; 0 for a single one at the end"""
    eval_episodes: Annotated[int, Interval(ge=0, le=10**6)] = 128
    """evaluation episodes on test levels, and as many on limited training levels; 0 for no evaluation"""
    capture_video: bool = False
    """record one episode of each evaluation as a video"""

    @property
    def stack_offsets(self) -> tuple[int, ...]:
        """How many steps back each frame of a stack lies, oldest first."""
        return frame_stack_offsets(self.frame_stack, self.gap_stack)

    def check(self) -> None:
        given = f"--num-levels {self.num_levels} --start-level {self.start_level}"
        valid = f"no level is left above the training levels, their sum must be below {MAX_SEED}"
        check(self.start_level + self.num_levels < MAX_SEED, f"{given}: {valid}")
        check_needs(self, self.num_levels, "--num-levels 1 or more", ("start_level",))
        check_needs(self, self.eval_episodes, "--eval-episodes 1 or more", ("capture_video",))
        check_needs(self, self.eval_episodes or not self.eval_every, "--eval-episodes 1 or more", ("eval_every",))


def load_qt() -> None:
    """Loads Qt 5 from the wheel PyQt5-Qt5, which EnvPool 1.2.5 (Python 3.11) draws Procgen with; 1.2.7 (Python 3.12 and
    newer) bundles Qt 6. Raises UsageError if it does not load."""
    if sys.version_info >= (3, 12):
        return
    package = importlib.util.find_spec("PyQt5")
    folders = list(package.submodule_search_locations) if package else []
    library = next((path for folder in folders if (path := Path(folder, "Qt5", "lib")).is_dir()), None)
    if library is None:
        return  # the system may have Qt 5; if not, EnvPool's import says so
    try:
        for pattern in ("libicudata.so.*", "libicuuc.so.*", "libicui18n.so.*", "libQt5Core.so.5", "libQt5Gui.so.5"):
            for path in sorted(library.glob(pattern)):
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise UsageError(f"Qt 5 does not load ({error}): use Python 3.12 or newer, which needs no Qt 5") from None


def range_of_levels(args, levels: str) -> tuple[int, int]:
    """The first of the "train" or "test" levels and their number, 0 for unlimited (`args`: GameArgs). Test levels are
    all those above the training levels, or the same as these if unlimited."""
    first, count = args.start_level, args.num_levels
    if levels == "test" and count:
        return first + count, MAX_SEED - first - count
    return first, count


def import_envpool() -> ModuleType:
    """Imports EnvPool, here since that takes seconds. Raises UsageError if a system library that it loads is missing,
    as in a bare container."""
    load_qt()
    try:
        import envpool
    except ModuleNotFoundError:  # EnvPool is not installed: a system library would not help
        raise
    except ImportError as error:
        install = "libgl1" if sys.version_info < (3, 12) else "libegl1 libopengl0"
        raise UsageError(f"EnvPool does not load ({error}): apt install {install}") from None
    return envpool


def make_procgen(args, num_envs: int, seed: int | Sequence[int], levels: str = "train"):
    """Makes `num_envs` copies of a game (`args`: GameArgs) on "train" or "test" levels as one EnvPool (Gymnasium API,
    C++ threads): frames uint8 [N, 3, 64, 64], rewards float32 [N], 15 actions.

    `seed` is 0 to MAX_SEED, to which EnvPool adds each copy's index, or a list of one for each copy; the same seed and
    actions give the same frames and rewards.
    """
    first, count = range_of_levels(args, levels)
    return import_envpool().make(
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
    """A seed below MAX_SEED from a run's seed and numbers that identify its purpose. Trailing 0s make no difference:
    derive_seed(s) is derive_seed(s, 0), which training's environments and actions have."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0] % MAX_SEED)


class Timesteps(NamedTuple):
    """T steps of N environments: NumPy arrays from `play`, JAX arrays in the learner."""

    rewards: np.ndarray  # float32 [T, N]: of the transition that starts at step t
    terminated: np.ndarray  # bool [T, N]: that transition ended the episode
    truncated: np.ndarray  # bool [T, N]: that transition reached the time limit
    is_reset: np.ndarray  # bool [T, N]: EnvPool resets in this step, which is no transition (a junk step)
    episode_step: np.ndarray  # int32 [T + 1, N]: steps since the episode's first frame
    forced_reset: np.ndarray  # bool [N]: the environment is reset after these steps, its unfinished episode cut

    @property
    def episode_end(self) -> np.ndarray:
        """bool [T, N]: that transition was its episode's last."""
        return self.terminated | self.truncated

    @property
    def sequence_end(self) -> jax.Array:
        """bool [T, N]: nothing follows that transition, because its episode ends or the environment is reset."""
        return jnp.asarray(self.episode_end).at[-1].set(self.episode_end[-1] | self.forced_reset)


TIMESTEP_SPECS = Timesteps(*[TIME_ENV_SHARDED] * 5, forced_reset=ENV_SHARDED)


class EnvState(NamedTuple):
    """Environment-side state carried between rollouts of N environments."""

    history: jax.Array  # uint8 [past, N, 64, 64, 3]: the frames before the newest
    env_ids: jax.Array  # int32 [N]: their numbers in the run
    last_action: jax.Array  # int32 [N]: the actions played last
    hidden_state: tuple  # networks.HiddenState, () without a recurrent core


ENV_STATE_SPECS = EnvState(TIME_ENV_SHARDED, *[ENV_SHARDED] * 3)


def init_env_state(env_ids: jax.Array, stack_offsets: Sequence[int], hidden_state: tuple = ()) -> EnvState:
    """The state before the first step of the environments env_ids int32 [N]."""
    env_ids = jnp.asarray(env_ids)
    return EnvState(empty_history(len(env_ids), stack_offsets), env_ids, jnp.zeros_like(env_ids), hidden_state)


def end_rollout(args, rollout, obs: jax.Array, episode_step: jax.Array):
    """Adds the frames uint8 [N, 3, 64, 64] after a rollout's last step, and their episode_step int32 [N]."""
    frames = rollout.frames.write(args.num_steps, obs, episode_step)
    env_state = rollout.env_state._replace(history=frames.history(args.num_steps))
    return rollout._replace(frames=frames, env_state=env_state)


def join_envs(parts: Sequence, axis: int):
    """Joins pytrees of several actors along `axis`, the environments: every actor's first, then every actor's second...

    This order is the same on any number of devices, each of which has a part of every actor's environments.
    """

    def join(*x):
        before, after = x[0].shape[:axis], x[0].shape[axis:][1:]
        xp = jnp if isinstance(x[0], jax.Array) else np
        return xp.stack(x, axis=len(before) + 1).reshape(*before, -1, *after)

    return jax.tree.map(join, *parts)


def make_split_and_join(mesh: Mesh, rollout_specs, count: int) -> tuple[Callable, Callable]:
    """For `count` rollout threads: split(EnvState) -> one EnvState each, the i-th with environments i, i + count,
    i + 2 count, ..., and join(list of rollouts) -> one rollout, in the environments' order again (`join_envs`)."""
    if count == 1:
        return lambda env_state: [env_state], lambda rollouts: rollouts[0]

    def split(env_state):
        def part(i, spec, x):
            places = (*[slice(None)] * spec.index("device"), slice(i, None, count))
            return jax.tree.map(lambda array: array[places], x)

        return [jax.tree.map(partial(part, i), ENV_STATE_SPECS, env_state) for i in range(count)]

    def join(rollouts):
        def join_parts(spec, *parts):  # of what is replicated, the first
            return join_envs(parts, spec.index("device")) if "device" in spec else parts[0]

        return jax.tree.map(join_parts, rollout_specs, *rollouts)

    shard_map = partial(jax.shard_map, mesh=mesh, check_vma=False)
    split = shard_map(split, in_specs=(ENV_STATE_SPECS,), out_specs=[ENV_STATE_SPECS] * count)
    join = shard_map(join, in_specs=([rollout_specs] * count,), out_specs=rollout_specs)
    return jax.jit(split), jax.jit(join)


class EnvSnapshot(NamedTuple):
    """A point in time that a ReplayableVecEnv can be restored to."""

    seed: int
    actions: list[np.ndarray]  # uint8 [N] each; the environments append to this list
    steps: int  # how many of these actions come before this point

    def save(self) -> dict[str, np.ndarray]:
        """{"seed", "actions": uint8 [steps, N]}, without "actions" before the first."""
        actions = self.actions[: self.steps]
        return {"seed": np.int64(self.seed)} | ({"actions": np.stack(actions)} if actions else {})


class ReplayableVecEnv:
    """An EnvPool that can be restored from its seed and the actions played since.

    EnvPool cannot save its state, but a copy with the same seed that plays the same actions reaches the same frames. To
    bound the list of actions, all environments are reset, with a seed derived from the last, after the first `play`
    that completes `restart_every` steps. Each environment's seed is derived from that seed and its id only, not from
    how environments are divided among EnvPools.

    Attributes:
      obs: uint8 [N, C, H, W], the newest frames; info: EnvPool's.
      episode_step: int32 [N], steps since each episode's first frame.
      is_last: bool [N], whether `obs` is an episode's last frame, so that the next step is a junk step.
    """

    def __init__(self, make: Callable[[int, list[int]], object], env_ids: Sequence[int], seed: int, restart_every: int):
        """`make(N, seeds)` returns an EnvPool of N environments, those of `env_ids`, with Gymnasium's API."""
        self._make, self._env_ids, self._restart_every = make, env_ids, restart_every
        self.num_envs = len(env_ids)
        self._env = None
        self._start(seed)

    def _start(self, seed: int) -> None:
        """Drops all unfinished episodes and resets every environment with `seed`."""
        if self._env is not None:
            self._env.close()
        self._seed, self._actions = seed, []
        self._env = self._make(self.num_envs, [derive_seed(seed, int(env_id)) for env_id in self._env_ids])
        self.obs, self.info = self._env.reset()
        self.episode_step = self.info["elapsed_step"]
        self.is_last = np.zeros(self.num_envs, bool)

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Plays int [N] actions; returns reward float32 [N], terminated bool [N], truncated bool [N]."""
        self._actions.append(actions.astype(np.uint8))
        self.obs, reward, terminated, truncated, self.info = self._env.step(actions)
        self.episode_step = self.info["elapsed_step"]
        self.is_last = terminated | truncated
        return reward, terminated, truncated

    def play(self, act: Callable, num_steps: int, watch: Stopwatch, check_stop: Callable = lambda: None) -> Timesteps:
        """Plays `num_steps` steps with actions int [N] = act(obs, episode_step); calls check_stop() before each."""
        if len(self._actions) >= self._restart_every:
            self._start(derive_seed(self._seed))
        shape = (num_steps, self.num_envs)
        rewards, (terminated, truncated, is_reset) = np.zeros(shape, np.float32), np.zeros((3, *shape), bool)
        episode_step = np.zeros((num_steps + 1, self.num_envs), np.int32)
        for t in range(num_steps):
            check_stop()
            episode_step[t], is_reset[t] = self.episode_step, self.is_last
            with watch("inference"):
                actions = np.asarray(act(self.obs, self.episode_step))
            with watch("game"):
                rewards[t], terminated[t], truncated[t] = self.step(actions)
        episode_step[-1] = self.episode_step
        forced_reset = np.full(self.num_envs, len(self._actions) >= self._restart_every)
        return Timesteps(rewards, terminated, truncated, is_reset, episode_step, forced_reset)

    def snapshot(self) -> EnvSnapshot:
        return EnvSnapshot(self._seed, self._actions, len(self._actions))

    def restore(self, saved: dict[str, np.ndarray], run: Run) -> None:
        """Replays the environments up to a saved EnvSnapshot; prints progress if that takes long."""
        self._start(int(saved["seed"]))
        actions = saved.get("actions", np.zeros((0, self.num_envs), np.uint8))
        progress = run.replay_progress(actions.size)
        for i, row in enumerate(actions):
            progress(i * self.num_envs)
            self.step(row.astype(np.int32))

    def close(self) -> None:
        self._env.close()


class ThreadedVecEnv:
    """ReplayableVecEnvs that play in parallel, each in its own thread. `save` returns what a single one with all
    environments would, so a run can be resumed with another number of threads."""

    def __init__(self, parts: Sequence[ReplayableVecEnv]):
        """The i-th of n parts has every n-th environment from the i-th on."""
        self.parts = parts
        self.num_envs = sum(part.num_envs for part in parts)

    def play(self, act: Callable, num_steps: int, watch: Stopwatch) -> Timesteps:
        """As ReplayableVecEnv.play, with act(i, obs, episode_step) for the i-th part; `watch` times the first."""

        def play(i, part):
            return part.play(partial(act, i), num_steps, Stopwatch() if i else watch)

        if len(self.parts) == 1:  # in this thread, which a second signal ends at once
            return play(0, self.parts[0])
        with ThreadPoolExecutor(len(self.parts)) as threads:
            return join_envs(list(threads.map(play, itertools.count(), self.parts)), axis=-1)

    def save(self) -> dict[str, np.ndarray]:
        """As EnvSnapshot.save."""
        saved = [part.snapshot().save() for part in self.parts]
        actions = {"actions": join_envs([x["actions"] for x in saved], axis=1)} if "actions" in saved[0] else {}
        return {"seed": saved[0]["seed"]} | actions

    def restore(self, saved: dict[str, np.ndarray], run: Run) -> None:
        count = len(self.parts)
        for i, part in enumerate(self.parts):
            actions = {"actions": saved["actions"][:, i::count]} if "actions" in saved else {}
            part.restore({"seed": saved["seed"]} | actions, run)

    def close(self) -> None:
        for part in self.parts:
            part.close()


def make_train_envs(args, env_ids: np.ndarray | None = None) -> ReplayableVecEnv:
    """The training environments env_ids int32 [N] of a Procgen script (`args`: GameArgs, num_envs, seed); all of this
    host's by default."""
    env_ids = devices.local_env_ids(args) if env_ids is None else env_ids
    return ReplayableVecEnv(partial(make_procgen, args), env_ids, derive_seed(args.seed, 0), args.restart_every)


def make_threaded_envs(args) -> ThreadedVecEnv:
    """This host's training environments, split among `args.rollout_threads` threads."""
    env_ids, count = devices.local_env_ids(args), args.rollout_threads
    return ThreadedVecEnv([make_train_envs(args, env_ids[i::count]) for i in range(count)])


def step_keys(key: jax.Array, t: jax.Array, env_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys uint32 [N, 2] of step t of a rollout for the policy's draws and for sticky actions. They depend on the
    environment, not on its device."""
    key = jax.random.fold_in(key, t)
    return tuple(devices.fold_in_ids(key, env_ids) for key in jax.random.split(key))


def apply_sticky_actions(
    keys: jax.Array, probability: float, actions: jax.Array, last_action: jax.Array, episode_step: jax.Array
) -> jax.Array:
    """The actions int32 [N] to play: with `probability` an environment repeats its last action, except on an episode's
    first frame (Machado et al. 2018, section 5). Keys are uint32 [N, 2], all other arrays int32 [N]."""
    repeat = jax.vmap(jax.random.bernoulli, (0, None))(keys, probability) & (episode_step > 0)
    return jnp.where(repeat, last_action, actions)


# FRAMES


def frame_stack_offsets(frame_stack: int, gap_stack: bool) -> tuple[int, ...]:
    """How many steps back each stacked frame lies, oldest first: (3, 2, 1, 0), or (3, 0) with the gap."""
    offsets = tuple(range(frame_stack - 1, -1, -1))
    return (offsets[0], offsets[-1]) if gap_stack and frame_stack > 1 else offsets


@struct.dataclass
class Frames:
    """Frames of T steps of N environments, each stored once, preceded by older ones that the first steps' stacks need.
    At an episode's start a stack repeats its first frame."""

    images: jax.Array  # uint8 [past + T, N, H, W, C]: row past + t is the frame of step t
    episode_steps: jax.Array  # int32 [T, N]: steps since the episode's first frame
    offsets: tuple[int, ...] = struct.field(pytree_node=False)  # of `stack_offsets`

    @classmethod
    def after(cls, history: jax.Array, steps: int, offsets: Sequence[int]) -> "Frames":
        """A history uint8 [past, N, H, W, C], then zeros for `steps` steps, to be written."""
        images = jnp.zeros((len(history) + steps, *history.shape[1:]), jnp.uint8)
        episode_steps = jnp.zeros((steps, history.shape[1]), jnp.int32)
        return cls(images.at[: len(history)].set(history), episode_steps, tuple(offsets))

    @property
    def past(self) -> int:
        """The number of rows before step 0's."""
        return len(self.images) - len(self.episode_steps)

    @property
    def is_first(self) -> jax.Array:
        """bool [T, N]: whether a frame is its episode's first."""
        return self.episode_steps == 0

    def write(self, t: jax.Array, obs: jax.Array, episode_step: jax.Array) -> "Frames":
        """Writes EnvPool's frames uint8 [N, C, H, W] and their episode_steps int32 [N] as those of step t."""
        images = self.images.at[self.past + t].set(obs.transpose(0, 2, 3, 1))
        return self.replace(images=images, episode_steps=self.episode_steps.at[t].set(episode_step))

    def stack(self, time: jax.Array, env: jax.Array | None = None) -> jax.Array:
        """Stacked frames of steps `time` of environments `env`, both int32 [...]: uint8 [..., H, W, C * len(offsets)],
        the oldest first. Without `env`, of all environments [N] at one step."""
        env = jnp.arange(self.episode_steps.shape[1]) if env is None else env
        row, episode_step = self.past + time, self.episode_steps[time, env]
        return jnp.concatenate(
            [self.images[row - jnp.minimum(episode_step, back), env] for back in self.offsets], axis=-1
        )

    def history(self, steps: int) -> jax.Array:
        """The frames before those of step `steps`, uint8 [past, N, H, W, C], as `after` takes them."""
        return self.images[steps : steps + self.past]


def empty_history(num_envs: int, offsets: Sequence[int], shape: tuple[int, ...] = FRAME_SHAPE) -> jax.Array:
    """The history before a first step, zeros uint8 [past, N, H, W, C] that no stack contains."""
    return jnp.zeros((max(*offsets, 1), num_envs, *shape), jnp.uint8)  # never 0 rows, which Orbax refuses to save


# EPISODES


class EpisodeStatistics:
    """Returns (of raw rewards) and lengths of the last 100 finished episodes."""

    def __init__(self, num_envs: int):
        self._return, self._length = np.zeros(num_envs), np.zeros(num_envs, np.int64)
        self._recent = np.full((100, 2), np.nan)  # return, length; oldest first

    def add(self, timesteps: Timesteps) -> None:
        """Adds a rollout's steps, junk steps excepted."""
        for reward, end, valid in zip(timesteps.rewards, timesteps.episode_end, ~timesteps.is_reset, strict=True):
            self._return += reward * valid
            self._length += valid
            if end.any():
                finished = np.stack([self._return[end], self._length[end]], axis=1)
                self._recent = np.concatenate([self._recent, finished])[-100:]
                self._return[end], self._length[end] = 0, 0
        self._return[timesteps.forced_reset], self._length[timesteps.forced_reset] = 0, 0

    def metrics(self) -> dict[str, float]:
        """Means over the last 100 finished episodes; {} before the first."""
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
def push_frame(window: Frames, obs: jax.Array, episode_step: jax.Array) -> tuple[Frames, jax.Array]:
    """Pushes EnvPool's frames uint8 [N, C, H, W] of episode_step int32 [N] into a window of one step; returns it and
    the stacked frames uint8 [N, H, W, C * len(offsets)]."""
    window = window.replace(images=jnp.roll(window.images, -1, axis=0)).write(0, obs, episode_step)
    return window, window.stack(0)


class EpisodesPlayed(NamedTuple):
    """Episodes of an evaluation, environment by environment."""

    returns: np.ndarray  # float64 [episodes], of raw rewards
    levels: np.ndarray  # int64 [episodes]: `level_seed`; 0 in a game without levels
    action_counts: np.ndarray  # int64 [the highest action + 1]
    film: np.ndarray  # uint8 [T, H, W, channels]


def play_episodes(
    env, policy: Callable, offsets: Sequence[int], *, episodes: int, seed: int, record: bool = False, stop=lambda: False
) -> EpisodesPlayed | None:
    """Plays the same number of episodes in each environment, so that short episodes count no more than long ones.

    Args:
      env: an EnvPool, not yet reset.
      policy: policy(frames uint8 [N, H, W, C], episode_step int32 [N], key, hidden_state) -> int [N] actions,
        hidden_state. Its hidden state is None at first.
      offsets: from `frame_stack_offsets`.
      episodes: in all, rounded up to a multiple of N.
      seed: of the policy's keys; `env` has its own.
      record: keep the frames of the first environment's first episode (else its first frame only).
      stop: called at each step; once it returns True, the result is None.
    """
    obs, info = env.reset()
    num_envs = len(obs)
    key, hidden_state = jax.random.PRNGKey(seed), None
    quota = -(-episodes // num_envs)
    returns, levels = np.zeros((quota, num_envs)), np.zeros((quota, num_envs), np.int64)
    counts, done = np.zeros(num_envs, np.int64), np.zeros(num_envs, bool)
    actions_played = []
    film = [obs[0].copy()]  # a copy, since obs[0] keeps the frames of all environments alive
    filming = record
    window = Frames.after(empty_history(num_envs, offsets, np.moveaxis(obs[0], 0, -1).shape), 1, offsets)
    while counts.min() < quota:
        if stop():
            return None
        window, stacked = push_frame(window, obs, info["elapsed_step"])
        key, step_key = jax.random.split(key)
        actions, hidden_state = policy(stacked, info["elapsed_step"], step_key, hidden_state)
        counted = ~done & (counts < quota)
        current = counts[counted], np.flatnonzero(counted)  # episode, environment
        levels[current] = info.get("level_seed", np.zeros(num_envs, np.int64))[counted]
        actions = np.asarray(actions)
        actions_played.append(actions[counted])
        obs, reward, terminated, truncated, info = env.step(actions)
        returns[current] += reward[counted]
        done = terminated | truncated
        counts += done & counted
        if filming:
            film.append(obs[0].copy())
            filming = not done[0]
    action_counts = np.bincount(np.concatenate(actions_played))
    film = np.stack(film).transpose(0, 2, 3, 1)
    return EpisodesPlayed(returns.T.reshape(-1), levels.T.reshape(-1), action_counts, film)


def jit_policy(mesh: Mesh, choose: Callable, init_hidden_state: Callable = lambda num_envs: ()) -> Callable:
    """Jits choose(params, frames, episode_step, keys uint32 [N, 2], hidden_state) -> actions, hidden_state, with the
    environments sharded over the mesh. Returns policy(params, ...), with the other arguments as for `play_episodes`."""
    in_specs, out_specs = (REPLICATED, *[ENV_SHARDED] * 4), (ENV_SHARDED, ENV_SHARDED)
    choose = jax.jit(jax.shard_map(choose, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))

    def policy(params, frames, episode_step, key, hidden_state):
        hidden_state = init_hidden_state(len(frames)) if hidden_state is None else hidden_state
        return choose(params, frames, episode_step, jax.random.split(key, len(frames)), hidden_state)

    return policy


def evaluate(
    args, mesh: Mesh, policy: Callable, levels: str, *, episodes: int, seed: int, record=False, stop=lambda: False
):
    """`play_episodes` on "train" or "test" levels, in up to 64 environments.

    Returns a summary (see `summarize`) with the mean return normalised by RETURN_RANGES and the fraction of the
    commonest action; the returns by level; and the film. Returns None if `stop` ended it.
    """
    env = make_procgen(args, devices.round_to_devices(mesh, min(episodes, 64)), seed, levels)
    played = play_episodes(env, policy, args.stack_offsets, episodes=episodes, seed=seed, record=record, stop=stop)
    env.close()
    if played is None:
        return None
    low, high = RETURN_RANGES[args.distribution_mode][args.env_id]
    returns_by_level = {}
    for level, value in sorted(zip(played.levels.tolist(), played.returns.tolist(), strict=True)):
        returns_by_level.setdefault(str(level), []).append(value)
    summary = summarize(played.returns) | {
        "normalized": float((played.returns.mean() - low) / (high - low)),
        "commonest_action": float(played.action_counts.max() / played.action_counts.sum()),
    }
    return summary, returns_by_level, played.film


def summarize(returns: np.ndarray) -> dict[str, float]:
    """Statistics of the returns [episodes] of an evaluation."""
    error = returns.std() / max(len(returns) - 1, 1) ** 0.5  # of the unbiased variance; 0 for a single episode
    statistics = {"mean_return": returns.mean(), "standard_error": error, "std": returns.std()}
    statistics |= {"min": returns.min(), "max": returns.max()}
    return {name: float(value) for name, value in statistics.items()} | {"episodes": len(returns)}


def evaluate_if_due(args, mesh: Mesh, run: Run, step: int, policy: Callable) -> None:
    """Every `args.eval_every` steps of training, and at its end, evaluates `args.eval_episodes` episodes on test levels
    and, if training levels are limited, on these. Writes eval.json and, with `args.capture_video`, a video.

    Logs eval/{train,test}_levels/{mean_return,standard_error,std,min,max,normalized,episodes,commonest_action}; nothing
    if a signal came.
    """
    if not (args.eval_episodes and run.evaluation_due(step)):
        return
    summaries, content = {}, {"global_step": step}
    for i, levels in enumerate(("train", "test") if args.num_levels else ("test",)):
        record = args.capture_video and levels == "test"
        seed = derive_seed(args.seed, step, 1 + i)
        result = evaluate(
            args, mesh, policy, levels,
            episodes=args.eval_episodes, seed=seed, record=record, stop=lambda: run.interrupted,
        )  # fmt: skip
        if result is None:
            return
        summaries[levels], returns_by_level, film = result
        content[f"{levels}_levels"] = summaries[levels] | {"returns_by_level": returns_by_level}
    if args.capture_video:
        run.save_video(step, film)  # of the test levels, which come last
    write_json(run.path / "eval.json", content)
    told = ", ".join(f"{k} levels {s['mean_return']:.2f} +- {s['standard_error']:.2f}" for k, s in summaries.items())
    random = f"; random play: {RANDOM_RETURNS[args.env_id]}" if args.distribution_mode == "easy" else ""
    run.print(f"{step:,} steps: {told}{random}")
    metrics = {f"eval/{levels}_levels/{k}": v for levels, summary in summaries.items() for k, v in summary.items()}
    run.log_evaluation(step, metrics)


def random_policy(frames, episode_step, key, hidden_state, num_actions: int = NUM_ACTIONS):
    """Uniformly random actions int32 [N], a policy for `play_episodes`."""
    return jax.random.randint(key, len(frames), 0, num_actions), None


def evaluate_checkpoint(
    args, mesh: Mesh, step: int, policy: Callable, *, episodes: int, seed: int, levels: str, random: bool, video: bool
) -> Evaluation:
    """For evaluate.py: evaluates the policy of step `step`, or random actions, on "train" or "test" levels."""
    policy = random_policy if random else policy
    summary, returns_by_level, film = evaluate(args, mesh, policy, levels, episodes=episodes, seed=seed, record=video)
    name = f"{'random_' if random else ''}{levels}_levels"
    title = name.replace("_", " ")
    title += "" if args.num_levels else "; training levels were unlimited: these come from the same distribution"
    return Evaluation(step, name, title, [], summary, film, details={"returns_by_level": returns_by_level})
