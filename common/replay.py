"""Prioritised replay: a ring buffer of the last steps of N environments, as pure functions.

Every frame is stored once, as bytes; stacks and n-step returns are assembled when sampled, and never cross an
episode's end. Within `jax.shard_map` each device has a buffer of its own environments, and only the importance weights
depend on the others'.

Sources: Horgan et al. 2018 (Ape-X, arXiv 1803.00933, section 3) for n-step returns, Schaul et al. 2016 (arXiv
1511.05952, section 3.3 and appendix B.2.1) for priorities and sampling.
"""

from collections.abc import Sequence
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from common import devices, envs
from common.devices import ENV_SHARDED, TIME_ENV_SHARDED


class Rows(NamedTuple):
    """Steps of N environments: T new ones, or the L rows of the ring."""

    frames: envs.Frames  # without history in the ring
    actions: jax.Array  # int32 [T, N]
    rewards: jax.Array  # float32 [T, N]: of the transition from a row to the next
    terminated: jax.Array  # bool [T, N]: it ended the episode
    episode_end: jax.Array  # bool [T, N]: it was its episode's last, or cut off by a forced reset
    is_reset: jax.Array  # bool [T, N]: a junk step, no transition: its frame is its episode's last
    action_value: jax.Array  # float32 [T, N]: the actor's estimate for its action
    state_value: jax.Array  # float32 [T, N]: its estimate of the state's value; both give the initial priority


class Policies(NamedTuple):
    """The policy of each of N environments, or of B transitions."""

    index: jax.Array | None  # int32 [N]
    gamma: jax.Array | None  # float32 [N]: its discount factor


SINGLE_POLICY = Policies(None, None)  # which needs no arrays


class Replay(NamedTuple):
    """The last L steps of N environments, a ring: row 0 follows row L - 1."""

    rows: Rows
    priorities: jax.Array  # float32 [L, N]: to the power of alpha; 0 for steps that cannot be sampled (yet)
    written: jax.Array  # int32 []: rows written since the start
    policies: Policies = SINGLE_POLICY  # of the environments


REPLAY_SPECS = devices.partition_specs(Replay, rows=TIME_ENV_SHARDED, priorities=TIME_ENV_SHARDED, policies=ENV_SHARDED)


class Batch(NamedTuple):
    """B sampled n-step transitions."""

    frames: jax.Array  # uint8 [B, 64, 64, C]
    next_frames: jax.Array  # uint8 [B, 64, 64, C]: n steps later, or fewer at an episode's end
    actions: jax.Array  # int32 [B]
    returns: jax.Array  # float32 [B]: discounted sum of the rewards between them
    discounts: jax.Array  # float32 [B]: of the next frames' value
    weight: jax.Array  # float32 [B]: importance weight, at most 1
    row: jax.Array  # int32 [B]: its place in the ring
    env: jax.Array  # int32 [B]: its column of the ring (this device's or, in host memory, of all), not its env_id
    keys: jax.Array  # uint32 [B, 2]: for the learner's augmentation, dropout and quantiles
    policies: jax.Array | None = None  # int32 [B]: which policy played, of several
    one_step_frames: jax.Array | None = None  # uint8 [B, 64, 64, C]: one step later, for RND; with several policies


def init(length: int, num_envs: int, offsets: Sequence[int], several_policies: bool) -> Replay:
    """An empty ring of `length` rows; `offsets` are from `envs.frame_stack_offsets`."""
    shape = (length, num_envs)
    images = jnp.zeros((*shape, *envs.FRAME_SHAPE), jnp.uint8)
    rows = Rows(
        frames=envs.Frames(images, jnp.zeros(shape, jnp.int32), tuple(offsets)),
        actions=jnp.zeros(shape, jnp.int32),
        rewards=jnp.zeros(shape),
        terminated=jnp.zeros(shape, bool),
        episode_end=jnp.zeros(shape, bool),
        is_reset=jnp.zeros(shape, bool),
        action_value=jnp.zeros(shape),
        state_value=jnp.zeros(shape),
    )
    policies = Policies(jnp.zeros(num_envs, jnp.int32), jnp.zeros(num_envs)) if several_policies else SINGLE_POLICY
    return Replay(rows, priorities=jnp.zeros(shape), written=jnp.int32(0), policies=policies)


def n_step_return(rows: Rows, row: jax.Array, env: jax.Array, *, n_step: int, gamma: float | jax.Array):
    """n-step returns from steps `row` of environments `env`, both int32 [...], cut at the episode's end. The discount
    factor gamma is one for all, or float32 [...].

    Returns the discounted sum of rewards float32 [...], the bootstrap value's discount float32 [...] (0 after a
    termination), and the row int32 [...] of the frame to bootstrap from (a truncated episode's last).
    """
    length = len(rows.episode_end)
    window = (row[..., None] + jnp.arange(n_step)) % length
    rewards, terminated, end = (x[window, env[..., None]] for x in (rows.rewards, rows.terminated, rows.episode_end))
    in_episode = jnp.cumsum(end, axis=-1) - end == 0  # no earlier step of the window ended it
    powers = (gamma[..., None] if isinstance(gamma, jax.Array) else gamma) ** jnp.arange(n_step)
    returns = (powers * rewards * in_episode).sum(axis=-1)
    count = in_episode.sum(axis=-1)
    discounts = gamma**count * ~(terminated & in_episode).any(axis=-1)
    return returns, discounts, (row + count) % length


def priority(td_errors: jax.Array, per_alpha: float) -> jax.Array:
    """The priorities of TD errors, both float32 [...] (Schaul et al. 2016, section 3.3); 1 if alpha is 0."""
    return (jnp.abs(td_errors) + 1e-6) ** per_alpha


def insert(
    replay: Replay, new: Rows, forced_reset: jax.Array, *, n_step: int, gamma: float, per_alpha: float,
    policies: Policies = SINGLE_POLICY, bonus: jax.Array | None = None,
) -> Replay:  # fmt: skip
    """Writes T new rows; T must divide the ring's length. Whatever is stored per step is set anew here.

    A transition can be sampled once the row n steps later is written. Its initial priority is the TD error by the
    actor's own values, without evaluating a network.

    Args:
      new: with frames as of `envs.Frames.after`.
      forced_reset: bool [N], whether an environment is reset after these rows. If so, its last transition lacks a
        next frame and is dropped unless terminal: the episode is truncated one row earlier.
      policies: of the N environments, if there are several; their discount factors replace gamma.
      bonus: float32 [T, N], the intrinsic reward of reaching each new frame. It is added to the reward one row earlier,
        which no return that could be sampled contains yet.
    """
    steps, num_envs = new.actions.shape
    length, past, now = len(replay.priorities), new.frames.past, replay.written
    chex.assert_is_divisible(length, steps)
    new = new._replace(frames=new.frames.replace(images=new.frames.images[past:]))

    def write(ring, x):
        return jax.lax.dynamic_update_slice_in_dim(ring, jnp.asarray(x), now % length, axis=0)

    rows = jax.tree.map(write, replay.rows, new)
    last, before = (now + steps - 1) % length, (now + steps - 2) % length
    dropped = forced_reset & ~rows.terminated[last]
    rows = rows._replace(
        is_reset=rows.is_reset.at[last].set(rows.is_reset[last] | dropped),
        episode_end=rows.episode_end.at[before].set(rows.episode_end[before] | (dropped & ~rows.is_reset[before])),
    )
    if bonus is not None:
        led_here = (now - 1 + jnp.arange(steps)) % length
        rows = rows._replace(rewards=rows.rewards.at[led_here].add(bonus))
    # The oldest rows follow the new ones; frames of their stacks have been overwritten.
    priorities = write(replay.priorities, jnp.zeros((steps, num_envs)))
    priorities = priorities.at[(now + steps + jnp.arange(past)) % length].set(0)

    # Steps, counted from the start (negative: before it), whose n-th successor is among the new rows.
    complete, env = now - n_step + jnp.arange(steps)[:, None], jnp.arange(num_envs)
    row = complete % length
    gamma = gamma if policies.gamma is None else policies.gamma
    returns, discounts, next_row = n_step_return(rows, row, env, n_step=n_step, gamma=gamma)
    td_errors = returns + discounts * rows.state_value[next_row, env] - rows.action_value[row, env]
    has_stack = complete >= jnp.minimum(rows.frames.episode_steps[row, env], past)  # its frames were written
    valid = has_stack & ~rows.is_reset[row, env]
    priorities = priorities.at[row, env].set(jnp.where(valid, priority(td_errors, per_alpha), 0))
    return replay._replace(rows=rows, priorities=priorities, written=now + steps, policies=policies)


def sample(replay: Replay, key: jax.Array, beta: jax.Array, *, batch_size: int, n_step: int, gamma: float) -> Batch:
    """Samples B transitions in proportion to their priorities (Schaul et al. 2016, appendix B.2.1): a row from each of
    B equal parts of the priorities' sum, then an environment within the row.

    The two steps have sums and random numbers of their own, since float32 has too few digits for one cumulative sum of
    a million priorities. The sums are computed anew each time: there is no sum tree.

    `beta` is the exponent of the importance weights (section 3.4), which also correct for devices whose priorities have
    unequal sums, since each samples B transitions of its own environments.
    """
    rows, priorities = replay.rows, replay.priorities
    row_key, env_key, sample_key = jax.random.split(key, 3)
    row_sums = jnp.cumsum(priorities.sum(axis=1))
    strata = jnp.arange(batch_size) + jax.random.uniform(row_key, (batch_size,))
    # "compare_all", since the default method is a loop of some twenty tiny kernels on a GPU.
    row = jnp.searchsorted(row_sums, strata / batch_size * row_sums[-1], side="right", method="compare_all")
    row = jnp.minimum(row, len(row_sums) - 1)
    env_sums = jnp.cumsum(priorities[row], axis=1)
    point = jax.random.uniform(env_key, (batch_size,)) * env_sums[:, -1]
    env = jnp.minimum((env_sums <= point[:, None]).sum(axis=1), priorities.shape[1] - 1)
    # 0 where rounding at an edge chose a transition that cannot be sampled.
    probability = priorities[row, env] / row_sums[-1] / devices.axis_size()
    weight = jnp.where(probability > 0, (devices.psum((priorities > 0).sum()) * probability) ** -beta, 0)
    policies = jax.tree.map(lambda x: x[env], replay.policies)
    gamma = gamma if policies.gamma is None else policies.gamma
    returns, discounts, next_row = n_step_return(rows, row, env, n_step=n_step, gamma=gamma)
    several = policies.index is not None
    return Batch(
        frames=rows.frames.stack(row, env),  # a stack that begins before row 0 wraps to the last rows
        next_frames=rows.frames.stack(next_row, env),
        actions=rows.actions[row, env],
        returns=returns,
        discounts=discounts,
        weight=weight / jnp.maximum(devices.pmax(weight.max()), 1e-30),
        row=row,
        env=env,
        keys=jax.random.split(sample_key, batch_size),
        policies=policies.index,
        one_step_frames=rows.frames.stack((row + 1) % len(priorities), env) if several else None,
    )


def set_priorities(replay: Replay, batch: Batch, td_errors: jax.Array, *, per_alpha: float) -> Replay:
    """Sets a batch's priorities from TD errors float32 [B]; a transition sampled twice gets the larger one."""
    new = jnp.where(batch.weight > 0, priority(td_errors, per_alpha), 0)
    index = batch.row, batch.env
    return replay._replace(priorities=replay.priorities.at[index].set(0).at[index].max(new))
