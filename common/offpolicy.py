"""What scripts that learn from a replay buffer share: actors that fill it, and how often it is learnt from.

A script has the network, how it acts, and what an update is. Here is what lies between: an actor's unroll of steps, how
unrolls become rows of the buffer, where the buffer is, and the loop over updates, on the devices or from the host.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Interval

from common import actors, checkpoints, devices, envs, networks, replay, runs, shaping
from common.actors import Item, Unroll
from common.files import check
from common.flags import NonNegativeInt, PositiveInt, Size, UnitInterval, UnitSchedule


@dataclass(frozen=True)
class OffPolicyArgs(actors.FleetArgs):
    """Actors, the replay buffer, and how often to learn from it."""

    # What is in the replay buffer came of these, and when learning starts.
    FIXED: ClassVar = ("num_steps", "n_step", "learning_starts", "per_alpha", "reward_shaping", "reward_clip")

    num_steps: PositiveInt = 16
    """steps per environment in an unroll, after which actors fetch new parameters"""
    buffer_size: Annotated[int, Interval(ge=1, le=2**27)] = 200_000
    """transitions in the replay buffer, 12 kB each"""
    replay_device: Literal["device", "host"] = "device"
    """location of the replay buffer: sharded over the learner's devices, or in host memory"""
    save_replay: bool = True
    """include the replay buffer in checkpoints (12 kB a transition); if off, a resumed run refills it first"""
    learning_starts: NonNegativeInt = 50_000
    """environment steps before the first update"""
    replay_ratio: Annotated[float, Interval(ge=0, le=1024)] = 2.0
    """transitions sampled per environment step: an update every batch_size / replay_ratio steps"""
    batch_size: Size = 128
    """transitions per update"""
    per_alpha: UnitInterval = 0.5
    """exponent of the priorities, |TD error|^alpha, in prioritised replay; 0 for uniform sampling"""
    per_beta: UnitSchedule = "0:0.4,2000000:1"
    """exponent of the importance weights in prioritised replay: a number, or a schedule such as 0:0.4,2000000:1 in
    environment steps"""
    n_step: PositiveInt = 3
    """steps of the n-step return"""
    gamma: UnitInterval = 0.99
    """discount factor"""

    def check(self) -> None:
        """Raises UsageError for inconsistent flags."""
        games, unroll = self.num_envs, self.n_step + self.num_steps
        check(not self.distributed, "--distributed: this script trains on one host, on as many devices as it has")
        least = games * (unroll + 2 * max(self.frame_stack - 1, 1))  # the oldest rows lack frames of their stacks
        need = f"room for an unroll, an n-step return and two frame stacks of each of {games} games"
        check(self.buffer_size >= least, f"--buffer-size {self.buffer_size}: give {least} or more, {need}")
        check(
            least <= self.learning_starts <= self.buffer_size,
            f"--learning-starts {self.learning_starts}: must be from {least}, {need}, to --buffer-size, "
            f"{self.buffer_size}",
        )
        platforms = jax.config.jax_platforms or "cpu"
        check(
            self.replay_device == "device" or "cpu" in platforms,
            f"--replay-device host: JAX_PLATFORMS={platforms} leaves out the host's memory, give {platforms},cpu",
        )
        runs.check_needs(self, self.per_alpha, "--per-alpha", ("per_beta",))

    def shares(self) -> dict[str, int]:
        """What the devices divide between them."""
        games = self.num_envs // self.num_actors
        return {"an actor's games, --num-envs / --num-actors": games, "--batch-size": self.batch_size}


# ACTORS


class Carry(NamedTuple):
    """What an actor needs besides its games to go on with n of them."""

    history: jax.Array  # uint8 [H, n, 64, 64, 3]: the frames before the newest
    numbers: jax.Array  # int32 [n]: of these games in the run
    last_action: jax.Array  # int32 [n]: what the games played last


class Rollout(NamedTuple):
    """What stays on an actor's device while it plays T steps of n games."""

    frames: envs.Frames  # of T steps
    actions: jax.Array  # int32 [T, n]
    action_value: jax.Array  # float32 [T, n]: of that action
    state_value: jax.Array  # float32 [T, n]: of the state, as the learner would bootstrap from it
    numbers: jax.Array  # int32 [n]
    last_action: jax.Array  # int32 [n]
    key: jax.Array
    t: jax.Array  # int32 []


ROLLOUT = devices.layout(Rollout, steps="frames actions action_value state_value", games="numbers last_action")


@partial(jax.jit, static_argnums=0)
def initial_carry(args: Any, numbers: jax.Array) -> Carry:
    """Before the first step of the games with these numbers, int32 [n]."""
    return Carry(envs.empty_history(len(numbers), args.offsets), numbers, last_action=jnp.zeros_like(numbers))


@partial(jax.jit, static_argnums=0)
def begin_rollout(args: Any, carry: Carry, i: int) -> Rollout:
    """An actor's i-th rollout, before its first step."""
    shape = (args.num_steps, len(carry.numbers))
    return Rollout(
        frames=envs.Frames.after(carry.history, args.num_steps, args.offsets),
        actions=jnp.zeros(shape, jnp.int32),
        action_value=jnp.zeros(shape),
        state_value=jnp.zeros(shape),
        numbers=carry.numbers,
        last_action=carry.last_action,
        key=jax.random.fold_in(jax.random.PRNGKey(envs.derive_seed(args.seed, 0)), i),
        t=jnp.int32(0),
    )


def record(args: Any, rollout: Rollout, age: jax.Array, actions: jax.Array, *, values, state_value, stick_keys):
    """Writes down a step's actions int32 [n], chosen by values float32 [n, 15] in a state worth float32 [n]; returns
    the rollout and what the games play, sticky actions included."""
    t = rollout.t
    played = envs.stick(stick_keys, args.sticky_actions, actions, last_action=rollout.last_action, age=age)
    rollout = rollout._replace(
        actions=rollout.actions.at[t].set(actions),
        action_value=rollout.action_value.at[t].set(jnp.take_along_axis(values, actions[:, None], axis=-1)[:, 0]),
        state_value=rollout.state_value.at[t].set(state_value),
        last_action=played,
        t=t + 1,
    )
    return rollout, played


def collect(
    act: Callable, args: Any, agent: nn.Module, games: envs.Games, params: dict, carry: Carry, *, i, watch, check_stop
) -> tuple[Unroll, Carry]:
    """Plays an actor's i-th unroll, as `actors.Fleet` asks for it in its thread: Unroll and the next Carry.

    Args:
      act: the script's act(args, agent, params, rollout, obs, age) -> (rollout, actions).
    """
    agent, params = networks.for_acting(agent, params)
    rollout = begin_rollout(args, carry, i)

    def choose_actions(obs, age):
        nonlocal rollout
        rollout, actions = act(args, agent, params, rollout, obs, age)
        return actions

    steps = games.play(choose_actions, args.num_steps, watch, check_stop)
    history = rollout.frames.history(args.num_steps)
    return Unroll(rollout, steps), Carry(history, rollout.numbers, rollout.last_action)


def make_fleet(args: Any, agent: nn.Module, act: Callable) -> actors.Fleet:
    """The actors of a script, which choose by its `act`, as `collect` calls it."""
    return actors.make_fleet(args, partial(collect, act, args, agent), partial(initial_carry, args))


# THE BUFFER


def initial_replay(args: Any) -> replay.Replay:
    """An empty buffer of --buffer-size transitions, or a few more: of each game whole unrolls."""
    rows = -(-args.buffer_size // (args.num_envs * args.num_steps)) * args.num_steps
    return replay.empty(rows, args.num_envs, args.offsets)


def make_buffer(args: Any, saved: dict | None) -> replay.Replay:
    """The replay buffer where it is to lie, as it was saved or empty."""
    if args.replay_device == "host":
        home = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    else:
        home = devices.shardings(args, replay.REPLAY)
    if saved and "replay" in saved:
        return jax.device_put(saved.pop("replay"), home)
    return jax.jit(partial(initial_replay, args), out_shardings=home)()


def learn_later(args: Any, run: runs.Run, state: Any, buffer: replay.Replay) -> Any:
    """A resumed run's state, which learns once the buffer is filled again where that was not saved; `run` says so."""
    if buffer.written or not state.global_step or state.global_step >= args.total_timesteps:
        return state
    run.say(f"the replay buffer was not saved: learning goes on after {args.learning_starts:,} more steps")
    return state._replace(learn_from=state.global_step + args.learning_starts)


def describe(args: Any, buffer: replay.Replay, learn_from: int) -> str:
    """Where the buffer is and how large, and whether anything is learnt from it."""
    size, count = sum(x.nbytes for x in jax.tree.leaves(buffer)), buffer.priorities.size
    where = ", ".join(map(str, buffer.written.devices()))
    idle = updates_due(args, learn_from, 0, args.total_timesteps) == 0
    note = "; no update is due in this run, by --learning-starts, --replay-ratio and --total-timesteps" if idle else ""
    return f"replay buffer: {count:,} steps x {size / count / 1e3:.1f} kB = {size / 1e9:.2f} GB, on {where}{note}"


def check_memory(args: Any, initial: Callable[[], dict]) -> None:
    """Raises UsageError if a run, what `initial` makes included, keeps more than there is memory for."""

    def kept():
        rollout = begin_rollout(args, initial_carry(args, devices.games_of_host(args)), 0)
        return initial(), (rollout,) * (args.max_lag + 1)  # learnt from, waiting or played

    buffer, others = jax.eval_shape(partial(initial_replay, args)), jax.eval_shape(kept)
    on_host = args.replay_device == "host"
    names, copies = ("num_envs", "num_steps", "buffer_size"), 0
    if args.save_replay:  # a checkpoint has one for Orbax, and one before that where parts have to be brought together
        in_one_piece = on_host or (devices.on_cpu() and devices.count(args) == 1)
        names, copies = (*names, "save_replay"), 1 if in_one_piece else 2
    runs.check_memory(args, names, (others, () if on_host else buffer), on_host=(buffer,) * (on_host + copies))


def load(args: Any, initial: Callable[[], dict], run_dir: str) -> dict:
    """The newest checkpoint of a run, with its replay buffer if it was saved."""
    saved = runs.load(initial, run_dir)
    if "replay" in saved:
        template = jax.eval_shape(partial(initial_replay, args))
        saved["replay"] = checkpoints.restore_tree(template, saved["replay"], run_dir)
    return saved


def add(args: Any, buffer: replay.Replay, items: Sequence[Item]) -> tuple[replay.Replay, envs.Steps]:
    """The buffer with what the actors hand over, and their steps side by side."""
    rollouts, steps = zip(*(item.unroll for item in items), strict=True)
    buffer = jax.block_until_ready(insert(args, buffer, *move(args, rollouts, steps)))
    return buffer, envs.join_games(steps, axis=-1)


def move(args: Any, rollouts: Sequence[Rollout], steps: Sequence[envs.Steps]) -> tuple:
    """The actors' rollouts and steps where the replay buffer is."""
    if args.replay_device == "host":
        return jax.device_put((rollouts, steps), jax.devices("cpu")[0])
    return devices.put(args, (rollouts, steps), ((ROLLOUT,) * len(rollouts), (envs.STEPS,) * len(steps)))


@partial(jax.jit, static_argnums=0, donate_argnums=1)
@devices.spread(
    [replay.REPLAY, [ROLLOUT], [envs.STEPS]], replay.REPLAY, when=lambda args: args.replay_device == "device"
)
def insert(args: Any, buffer: replay.Replay, rollouts: Sequence[Rollout], steps: Sequence[envs.Steps]):
    """Adds the actors' rollouts and steps [T, n], side by side; each device has the part of its own games."""
    parts = [(r.frames, r.actions, r.action_value, r.state_value) for r in rollouts]
    frames, actions, action_value, state_value = envs.join_games(parts, axis=1)
    steps = envs.join_games(steps, axis=-1)
    new = replay.Rows(
        frames=frames,
        actions=actions,
        rewards=shaping.shape_and_clip(args, steps.rewards),
        terminated=steps.terminated,
        ended=steps.ended,
        done=steps.done,
        action_value=action_value,
        state_value=state_value,
    )
    return replay.insert(buffer, new, steps.restarts, n_step=args.n_step, gamma=args.gamma, per_alpha=args.per_alpha)


# UPDATES


@partial(jax.jit, static_argnums=0)
def sample(args: Any, buffer: replay.Replay, i: jax.Array, beta: jax.Array) -> replay.Batch:
    """Draws the i-th update's batch, or a device's part of it."""
    key = devices.own_key(jax.random.fold_in(jax.random.PRNGKey(envs.derive_seed(args.seed, 1)), i))
    size = args.batch_size // devices.size()
    return replay.sample(buffer, key, beta, batch_size=size, n_step=args.n_step, gamma=args.gamma)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def set_priorities(args: Any, buffer: replay.Replay, batch: replay.Batch, td: jax.Array) -> replay.Replay:
    """Takes what an update has found: absolute TD errors [B]."""
    return replay.set_priorities(buffer, batch, td, per_alpha=args.per_alpha)


def updates_due(args: Any, learn_from: int, before: int, after: int) -> int:
    """How many updates belong between two environment steps."""

    def due(step):
        return int(args.replay_ratio * max(step - learn_from, 0) / args.batch_size)

    return due(after) - due(before)


def repeat(args: Any, improve: Callable, state: Any, buffer: replay.Replay, k: jax.Array, beta: jax.Array):
    """k updates on batches of the buffer, for a script to jit as one program, so that nothing waits for Python.

    Args:
      improve: improve(state, batch) -> (state, absolute TD errors [B], metrics).

    Returns the state, the buffer with new priorities, and mean metrics.
    """

    @jax.jit  # so that it is traced once, not for its shapes too
    def once(state, buffer):
        batch = sample(args, buffer, state.updates, beta)
        state, td, metrics = improve(state, batch)
        return state, set_priorities(args, buffer, batch, td), metrics

    def one_more(_, carry):
        state, buffer, metrics = once(*carry[:2])
        return state, buffer, jax.tree.map(jnp.add, carry[2], metrics)

    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(once, state, buffer)[2])
    state, buffer, sums = jax.lax.fori_loop(0, k, one_more, (state, buffer, zero))
    return state, buffer, jax.tree.map(lambda x: x / k, sums)


def learn(
    args: Any,
    agent: nn.Module,
    state: Any,
    buffer: replay.Replay,
    *,
    update,
    update_on_batch,
    k: int,
    beta: float,
    watch,
) -> tuple[Any, replay.Replay, dict]:
    """k updates: returns the state, the buffer with new priorities, and mean metrics, of none if there is no update.

    Args:
      update: the script's update(args, agent, state, buffer, k, beta), which is `repeat`, jitted.
      update_on_batch: its update_on_batch(args, agent, state, batch), of a batch that was drawn elsewhere.
    """
    if k == 0:
        return state, buffer, {}
    if args.replay_device == "device":
        with watch("update"):
            state, buffer, metrics = update(args, agent, state, buffer, k, beta)
            return state, buffer, jax.device_get(metrics)
    # The buffer is in the host's memory: batches come from there, TD errors go back.
    home, metrics = buffer.written.sharding, []
    for i in range(int(state.updates), int(state.updates) + k):
        with watch("sample"):
            batch = sample(args, buffer, i, beta)
            given = jax.block_until_ready(devices.put(args, batch, devices.GAMES))
        with watch("update"):
            state, td, some = update_on_batch(args, agent, state, given)
            metrics.append(jax.device_get(some))
        with watch("sample"):
            buffer = set_priorities(args, buffer, batch, jax.device_put(td, home))
    return state, buffer, jax.tree.map(lambda *x: float(np.mean(x)), *metrics)
