"""Shared by Ape-X and SAC: actors that fill a replay buffer, and the loop over updates from it.

A script has the network, `act` and `train_step`. The buffer is sharded over the mesh by environment, or in the host's
memory.
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
from jax.sharding import Mesh

from common import actors, checkpoints, devices, envs, networks, replay, runs
from common.actors import Unroll
from common.devices import ENV_SHARDED, TIME_ENV_SHARDED
from common.files import check
from common.flags import NonNegativeInt, PositiveInt, Size, UnitInterval, UnitSchedule
from common.rewards import shape_and_clip


@dataclass(frozen=True)
class OffPolicyArgs(actors.FleetArgs):
    """Actors, the replay buffer, and how often to learn from it."""

    # A checkpoint's replay buffer, priorities and `learn_from` were made with these.
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
    """environment steps before the first update; at most --buffer-size"""
    replay_ratio: Annotated[float, Interval(ge=0, le=1024)] = 2.0
    """transitions sampled per environment step: an update every batch_size / replay_ratio steps"""
    batch_size: Size = 128
    """transitions per update"""
    per_alpha: UnitInterval = 0.5
    """exponent of the priorities, |TD error|^alpha, in prioritised replay; 0 for uniform sampling"""
    per_beta: UnitSchedule = "0:0.4,2000000:1"
    """exponent of the importance weights: a number, or "step:value,..." in environment steps, linear between"""
    n_step: PositiveInt = 3
    """steps of the n-step return"""
    gamma: UnitInterval = 0.99
    """discount"""

    def check(self) -> None:
        size, starts = self.buffer_size, self.learning_starts
        check(not self.distributed, "--distributed: this script trains on one host, on as many devices as it has")
        steps = self.n_step + self.num_steps + 2 * max(self.frame_stack - 1, 1)  # the oldest rows lack stacked frames
        least = self.num_envs * steps
        need = f"an unroll, an n-step return and two frame stacks of each of {self.num_envs} environments"
        check(size >= least, f"--buffer-size {size}: give {least} or more, for {need}")
        valid = f"must be from {least} ({need}) to {size} (--buffer-size)"
        check(least <= starts <= size, f"--learning-starts {starts}: {valid}")
        platforms = jax.config.jax_platforms or "cpu"
        valid = f"JAX_PLATFORMS={platforms} leaves out the host's memory, give {platforms},cpu"
        check(self.replay_device == "device" or "cpu" in platforms, f"--replay-device host: {valid}")
        runs.check_needs(self, self.per_alpha, "--per-alpha", ("per_beta",))

    def sharded_sizes(self) -> dict[str, int]:
        """The sizes that are divided among the learner devices, by their descriptions."""
        num_envs = self.num_envs // self.num_actors
        return {"an actor's environments, --num-envs / --num-actors": num_envs, "--batch-size": self.batch_size}


# ACTORS


class Rollout(NamedTuple):
    """T steps of n environments, collected on an actor's device."""

    frames: envs.Frames  # of T steps
    actions: jax.Array  # int32 [T, n]
    action_value: jax.Array  # float32 [T, n]: of that action
    state_value: jax.Array  # float32 [T, n]: of the state; both by the actor's parameters, for the initial priority
    env_state: envs.EnvState  # of the newest step; its history is set at the end
    key: jax.Array
    t: jax.Array  # int32 []


ROLLOUT_SPECS = devices.partition_specs(
    Rollout,
    frames=TIME_ENV_SHARDED,
    actions=TIME_ENV_SHARDED,
    action_value=TIME_ENV_SHARDED,
    state_value=TIME_ENV_SHARDED,
    env_state=envs.ENV_STATE_SPECS,
)


def begin_rollout(args: Any, env_state: envs.EnvState, i: int) -> Rollout:
    """An actor's i-th rollout, before its first step."""
    shape = (args.num_steps, len(env_state.env_ids))
    return Rollout(
        frames=envs.Frames.after(env_state.history, args.num_steps, args.stack_offsets),
        actions=jnp.zeros(shape, jnp.int32),
        action_value=jnp.zeros(shape),
        state_value=jnp.zeros(shape),
        env_state=env_state,
        key=jax.random.fold_in(jax.random.PRNGKey(envs.derive_seed(args.seed, 0)), i),
        t=jnp.int32(0),
    )


def record_step(
    args: Any, rollout: Rollout, episode_step: jax.Array, actions: jax.Array, *, q_values, state_value, sticky_keys
) -> tuple[Rollout, jax.Array]:
    """Records actions int32 [n] chosen by q_values float32 [n, 15], and state_value float32 [n]; returns the rollout
    and the actions to play, which sticky actions may replace."""
    t, env_state = rollout.t, rollout.env_state
    played = envs.apply_sticky_actions(sticky_keys, args.sticky_actions, actions, env_state.last_action, episode_step)
    rollout = rollout._replace(
        actions=rollout.actions.at[t].set(actions),
        action_value=rollout.action_value.at[t].set(jnp.take_along_axis(q_values, actions[:, None], axis=-1)[:, 0]),
        state_value=rollout.state_value.at[t].set(state_value),
        env_state=env_state._replace(last_action=played),
        t=t + 1,
    )
    return rollout, played


def make_collect(args: Any, agent: nn.Module, act: Callable) -> Callable:
    """Returns collect(vec_env, params, env_state, *, i, watch, check_stop) -> Unroll, EnvState for `actors.Fleet`, with
    the script's act(args, agent, params, rollout, obs, episode_step) -> rollout, actions."""
    begin = jax.jit(partial(begin_rollout, args))
    step = jax.jit(partial(act, args, networks.acting_agent(agent)), donate_argnums=1)

    def collect(vec_env: envs.ReplayableVecEnv, params: dict, env_state: envs.EnvState, *, i, watch, check_stop):
        params = networks.acting_params(agent, params)
        rollout = begin(env_state, i)

        def choose_actions(obs, episode_step):
            nonlocal rollout
            rollout, actions = step(params, rollout, obs, episode_step)
            return actions

        timesteps = vec_env.play(choose_actions, args.num_steps, watch, check_stop)
        env_state = rollout.env_state._replace(history=rollout.frames.history(args.num_steps))
        return Unroll(rollout._replace(env_state=env_state), timesteps), env_state

    return collect


def make_fleet(args: Any, agent: nn.Module, act: Callable) -> actors.Fleet:
    """The actors of a script, with its `act` as for `make_collect`."""
    init_env_state = partial(envs.init_env_state, stack_offsets=args.stack_offsets)
    return actors.make_fleet(args, make_collect(args, agent, act), init_env_state)


# THE BUFFER


def init_replay(args: Any) -> replay.Replay:
    """An empty buffer of --buffer-size transitions, rounded up to whole unrolls of all environments."""
    rows = -(-args.buffer_size // (args.num_envs * args.num_steps)) * args.num_steps
    return replay.init(rows, args.num_envs, args.stack_offsets, getattr(args, "num_policies", 1) > 1)


def check_memory(args: Any, mesh: Mesh) -> None:
    """Raises UsageError if the replay buffer exceeds the learner devices' free memory, or, with its copies while a
    checkpoint is written, the host's memory."""
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(partial(init_replay, args))))
    stats = [device.memory_stats() for device in mesh.devices.flat]
    on_host = args.replay_device == "host" or not all(stats)  # a CPU has none
    flag = f"--buffer-size {args.buffer_size}: needs"
    if not on_host:
        free = len(stats) * min(x["bytes_limit"] - x["bytes_in_use"] for x in stats)
        check(size <= free, f"{flag} {size / 1e9:.2f} GB, the learner devices have {free / 1e9:.2f} GB")
    # A checkpoint's parts come together on the host, and Orbax copies the whole.
    in_one_piece = args.replay_device == "host" or (on_host and mesh.size == 1)
    copies = (1 if in_one_piece else 2) * args.save_replay
    needed, memory = (on_host + copies) * size, devices.host_memory()
    less = f" with a checkpoint's copies ({on_host * size / 1e9:.2f} GB with --no-save-replay)" if copies else ""
    check(needed <= memory, f"{flag} {needed / 1e9:.2f} GB{less}, this host has {memory / 1e9:.2f} GB")


def load(args: Any, init_checkpoint: Callable[[], dict], run_dir: str) -> dict:
    """`runs.load` with the replay buffer, if it was saved."""
    checkpoint = runs.load(init_checkpoint, run_dir)
    if "replay" in checkpoint:
        template = jax.eval_shape(partial(init_replay, args))
        checkpoint["replay"] = checkpoints.restore_tree(template, checkpoint["replay"], run_dir)
    return checkpoint


def make_buffer(args: Any, mesh: Mesh, checkpoint: dict) -> replay.Replay:
    """Moves the replay buffer out of a checkpoint, or makes an empty one, on the mesh or in the host's memory."""
    sharding = devices.shardings(mesh, replay.REPLAY_SPECS)
    if args.replay_device == "host":
        sharding = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    if "replay" in checkpoint:
        return jax.device_put(checkpoint.pop("replay"), sharding)
    return jax.jit(partial(init_replay, args), out_shardings=sharding)()


def delay_learning(args: Any, run: runs.Run, state: Any, buffer: replay.Replay) -> Any:
    """Returns the state of a resumed run, which starts learning later if its buffer was not saved."""
    if buffer.written or not state.global_step or state.global_step >= args.total_timesteps:
        return state
    run.print(f"the replay buffer was not saved: learning resumes after {args.learning_starts:,} more steps")
    return state._replace(learn_from=state.global_step + args.learning_starts)


def describe(args: Any, buffer: replay.Replay, learn_from: int) -> str:
    """A sentence on the buffer's size and device, and on whether the run will learn from it."""
    size, count = sum(x.nbytes for x in jax.tree.leaves(buffer)), buffer.priorities.size
    place = ", ".join(map(str, buffer.written.devices()))
    idle = updates_due(args, learn_from, 0, args.total_timesteps) == 0
    note = "; no update is due in this run, by --learning-starts, --replay-ratio and --total-timesteps" if idle else ""
    return f"replay buffer: {count:,} steps x {size / count / 1e3:.1f} kB = {size / 1e9:.2f} GB, on {place}{note}"


def insert(
    args: Any,
    buffer: replay.Replay,
    rollouts: Sequence[Rollout],
    timesteps: Sequence[envs.Timesteps],
    policies: replay.Policies,
    bonus: jax.Array | None,
) -> replay.Replay:
    """Inserts the rollouts and timesteps [T, n] of all actors into the buffer of their N environments, with policies
    and bonus as of `replay.insert`."""
    arrays = [(r.frames, r.actions, r.action_value, r.state_value) for r in rollouts]
    frames, actions, action_value, state_value = envs.join_envs(arrays, axis=1)
    timesteps = envs.join_envs(timesteps, axis=-1)
    rows = replay.Rows(
        frames=frames,
        actions=actions,
        rewards=shape_and_clip(args, timesteps.rewards),
        terminated=timesteps.terminated,
        episode_end=timesteps.episode_end,
        is_reset=timesteps.is_reset,
        action_value=action_value,
        state_value=state_value,
    )
    return replay.insert(
        buffer, rows, timesteps.forced_reset, n_step=args.n_step, gamma=args.gamma, per_alpha=args.per_alpha,
        policies=policies, bonus=bonus,
    )  # fmt: skip


def make_insert(args: Any, mesh: Mesh) -> Callable:
    """Returns insert(buffer, rollouts, timesteps, policies, bonus) -> Replay, which donates the buffer and moves the
    other arguments to its devices; for a single policy, leave the last two out."""
    unrolls = (ROLLOUT_SPECS,) * args.num_actors, (envs.TIMESTEP_SPECS,) * args.num_actors
    specs = *unrolls, ENV_SHARDED, TIME_ENV_SHARDED
    function = partial(insert, args)
    if args.replay_device == "host":
        sharding = jax.devices("cpu")[0]
    else:
        sharding = devices.shardings(mesh, specs)
        in_specs, out_specs = (replay.REPLAY_SPECS, *specs), replay.REPLAY_SPECS
        function = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    function = jax.jit(function, donate_argnums=0)

    def move_and_insert(buffer, rollouts, timesteps, policies=replay.SINGLE_POLICY, bonus=None):
        return function(buffer, *jax.device_put((rollouts, timesteps, policies, bonus), sharding))

    return move_and_insert


# UPDATES


def sample(args: Any, buffer: replay.Replay, i: jax.Array, beta: jax.Array) -> replay.Batch:
    """Samples this device's part of the i-th update's batch from its part of the buffer."""
    key = devices.fold_in_axis_index(jax.random.fold_in(jax.random.PRNGKey(envs.derive_seed(args.seed, 1)), i))
    size = args.batch_size // devices.axis_size()
    return replay.sample(buffer, key, beta, batch_size=size, n_step=args.n_step, gamma=args.gamma)


def updates_due(args: Any, learn_from: int, before: int, after: int) -> int:
    """The number of updates due between two environment steps."""
    due = [int(args.replay_ratio * max(step - learn_from, 0) / args.batch_size) for step in (before, after)]
    return due[1] - due[0]


def train_steps(
    args: Any, train_step: Callable, state: Any, buffer: replay.Replay, num_updates: jax.Array, beta: jax.Array
):
    """Several updates on batches from the buffer in one program, by train_step(state, batch) -> state, absolute TD
    errors [B], metrics. Returns the state, the buffer with new priorities, and mean metrics."""

    @jax.jit  # traced once for its shapes and the loop
    def step(state, buffer):
        batch = sample(args, buffer, state.updates, beta)
        state, td_errors, metrics = train_step(state, batch)
        return state, replay.set_priorities(buffer, batch, td_errors, per_alpha=args.per_alpha), metrics

    def body(_, carry):
        state, buffer, sums = carry
        state, buffer, metrics = step(state, buffer)
        return state, buffer, jax.tree.map(jnp.add, sums, metrics)

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(step, state, buffer)[2])
    state, buffer, sums = jax.lax.fori_loop(0, num_updates, body, (state, buffer, zeros))
    return state, buffer, jax.tree.map(lambda x: x / num_updates, sums)


def make_run_updates(args: Any, mesh: Mesh, update: Callable, update_on_batch: Callable) -> Callable:
    """Returns run_updates(state, buffer, num_updates, beta, watch) -> state, the buffer with new priorities, and mean
    metrics, {} if there is no update.

    Args:
      update: `train_steps` with the script's `train_step`, jitted: update(state, buffer, num_updates, beta).
      update_on_batch: for a buffer in host memory, `train_step`, jitted: update_on_batch(state, batch) -> state,
        absolute TD errors [B], metrics.
    """
    sample_on_host = jax.jit(partial(sample, args))
    set_priorities = jax.jit(partial(replay.set_priorities, per_alpha=args.per_alpha), donate_argnums=0)
    batch_sharding = devices.shardings(mesh, ENV_SHARDED)

    def update_from_host(state, buffer, num_updates, beta, watch):
        metrics = []
        for i in range(int(state.updates), int(state.updates) + num_updates):
            with watch("sample"):
                batch = sample_on_host(buffer, i, beta)
                batch_on_mesh = jax.block_until_ready(jax.device_put(batch, batch_sharding))
            with watch("update"):
                state, td_errors, step_metrics = update_on_batch(state, batch_on_mesh)
                metrics.append(jax.device_get(step_metrics))
            with watch("sample"):
                buffer = set_priorities(buffer, batch, jax.device_put(td_errors, buffer.written.sharding))
        return state, buffer, jax.tree.map(lambda *x: float(np.mean(x)), *metrics)

    def run_updates(state, buffer, num_updates, beta, watch):
        if num_updates == 0:
            return state, buffer, {}
        if args.replay_device == "host":
            return update_from_host(state, buffer, num_updates, beta, watch)
        with watch("update"):
            state, buffer, metrics = update(state, buffer, num_updates, beta)
            return state, buffer, jax.device_get(metrics)

    return run_updates
