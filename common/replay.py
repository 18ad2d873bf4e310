"""A replay buffer: a ring of the last steps of N games, of which transitions are drawn by priority.

Every frame is stored once, as bytes. Stacks and n-step returns are put together where they are drawn, and never reach
over an episode's end. What is here are pure functions of arrays, for a script to jit; each device has a buffer of its
own games, and only the weights of what is drawn look at the others'.

Sources: n-step returns as in Horgan et al. 2018 (Ape-X, arXiv 1803.00933, section 3), priorities and how they are drawn
from as in Schaul et al. 2016 (arXiv 1511.05952, section 3.3 and appendix B.2.1).
"""

from collections.abc import Sequence
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from common import devices, envs


class Rows(NamedTuple):
    """Steps of N games: T new ones, or the L of the ring."""

    frames: envs.Frames  # in the ring, of L steps with none before them
    actions: jax.Array  # int32 [T, N]
    rewards: jax.Array  # float32 [T, N]: of the transition from a row to the next
    terminated: jax.Array  # bool [T, N]: it ended the episode
    ended: jax.Array  # bool [T, N]: it was its episode's last, or the last that is known before a game starts anew
    done: jax.Array  # bool [T, N]: this step is no transition
    action_value: jax.Array  # float32 [T, N]: what the actor thought its action worth
    state_value: jax.Array  # float32 [T, N]: and the state; both give a transition its first priority


class Replay(NamedTuple):
    """The last L steps of N games, a ring: after the last row comes the first."""

    rows: Rows
    priorities: jax.Array  # float32 [L, N]: to the power of alpha; 0 for what cannot be drawn (yet)
    written: jax.Array  # int32 []: rows ever written


REPLAY = devices.layout(Replay, steps="rows priorities")


class Batch(NamedTuple):
    """B transitions to learn from."""

    frames: jax.Array  # uint8 [B, 64, 64, C]
    next_frames: jax.Array  # uint8 [B, 64, 64, C]: up to n steps later
    actions: jax.Array  # int32 [B]
    returns: jax.Array  # float32 [B]: the rewards between them
    discounts: jax.Array  # float32 [B]: of the value that follows
    weight: jax.Array  # float32 [B]: of importance sampling, at most 1
    row: jax.Array  # int32 [B]: where in the ring it is
    env: jax.Array  # int32 [B]
    keys: jax.Array  # uint32 [B, 2]: one each for whatever the learner draws


def empty(length: int, num_envs: int, offsets: Sequence[int]) -> Replay:
    """A ring of `length` rows for N games; `offsets` are from `envs.stack_offsets`."""
    shape = (length, num_envs)
    images = jnp.zeros((*shape, *envs.FRAME_SHAPE), jnp.uint8)
    rows = Rows(
        frames=envs.Frames(images, jnp.zeros(shape, jnp.int32), tuple(offsets)),
        actions=jnp.zeros(shape, jnp.int32),
        rewards=jnp.zeros(shape),
        terminated=jnp.zeros(shape, bool),
        ended=jnp.zeros(shape, bool),
        done=jnp.zeros(shape, bool),
        action_value=jnp.zeros(shape),
        state_value=jnp.zeros(shape),
    )
    return Replay(rows, priorities=jnp.zeros(shape), written=jnp.int32(0))


def n_step_return(rows: Rows, row: jax.Array, env: jax.Array, *, n_step: int, gamma: float):
    """Up to n rewards from each `row` of each `env` on, both int32 [...], to the episode's end and not beyond it.

    Returns their discounted sum float32 [...]; the discount float32 [...] of the value of the frame that follows, 0
    after a terminal step; and the row int32 [...] of that frame, the episode's last where the episode was cut off.
    """
    length = len(rows.ended)
    window = (row[..., None] + jnp.arange(n_step)) % length
    rewards, terminated, ended = (x[window, env[..., None]] for x in (rows.rewards, rows.terminated, rows.ended))
    going_on = jnp.cumsum(ended, axis=-1) - ended == 0  # whether the episode has not ended before
    returns = (gamma ** jnp.arange(n_step) * rewards * going_on).sum(axis=-1)
    count = going_on.sum(axis=-1)
    discounts = gamma**count * ~(terminated & going_on).any(axis=-1)
    return returns, discounts, (row + count) % length


def priority(td: jax.Array, per_alpha: float) -> jax.Array:
    """The priority of a temporal difference error, both float32 [...] (Schaul et al. 2016, section 3.3); 1 where alpha
    is 0."""
    return (jnp.abs(td) + 1e-6) ** per_alpha


def insert(replay: Replay, new: Rows, restarts: jax.Array, *, n_step: int, gamma: float, per_alpha: float) -> Replay:
    """Writes T new rows, where T divides the ring's length.

    A transition can be drawn once the n-th step after it is there. Its first priority is the TD error by the actor's
    own values, as it acted: no network is evaluated for it.

    Args:
      new: its frames come after those that their stacks reach back to, as `envs.Frames.after` has them.
      restarts: bool [N], whether a game starts anew after these rows. Then its last row leads nowhere, unless its
        episode terminated there, and an unfinished episode is truncated at the row before that.
    """
    steps, num_envs = new.actions.shape
    length, past, now = len(replay.priorities), new.frames.past, replay.written
    chex.assert_is_divisible(length, steps)
    new = new._replace(frames=new.frames.replace(images=new.frames.images[past:]))

    def put(ring, x):
        return jax.lax.dynamic_update_slice_in_dim(ring, jnp.asarray(x), now % length, axis=0)

    rows = jax.tree.map(put, replay.rows, new)
    last, before = (now + steps - 1) % length, (now + steps - 2) % length
    lost = restarts & ~rows.terminated[last]
    rows = rows._replace(
        done=rows.done.at[last].set(rows.done[last] | lost),
        ended=rows.ended.at[before].set(rows.ended[before] | (lost & ~rows.done[before])),
    )
    # The rows after the new ones are the oldest; their stacks reach back to frames that are gone.
    priorities = put(replay.priorities, jnp.zeros((steps, num_envs)))
    priorities = priorities.at[(now + steps + jnp.arange(past)) % length].set(0)

    complete, env = now - n_step + jnp.arange(steps)[:, None], jnp.arange(num_envs)
    row = complete % length
    returns, discounts, after = n_step_return(rows, row, env, n_step=n_step, gamma=gamma)
    td = returns + discounts * rows.state_value[after, env] - rows.action_value[row, env]
    whole = complete >= jnp.minimum(rows.frames.ages[row, env], past)  # its stack is there too
    valid = whole & ~rows.done[row, env]
    priorities = priorities.at[row, env].set(jnp.where(valid, priority(td, per_alpha), 0))
    return Replay(rows, priorities, now + steps)


def sample(replay: Replay, key: jax.Array, beta: jax.Array, *, batch_size: int, n_step: int, gamma: float) -> Batch:
    """Draws B transitions with probabilities proportional to their priorities (Schaul et al. 2016, appendix B.2.1): a
    row from each of B equal parts of the priorities' sum, then a game within the row.

    The two draws have cumulative sums and random numbers of their own, since float32 has too few digits for one sum
    over a million priorities. The sums are computed anew each time, at less cost than the network has with one frame.

    `beta` says how far the importance weights (section 3.4) correct for the priorities. Each device draws as many as
    the others, from its own games, whatever their priorities add up to; the weights correct for that too.
    """
    rows, priorities = replay.rows, replay.priorities
    row_key, env_key, sample_key = jax.random.split(key, 3)
    upto = jnp.cumsum(priorities.sum(axis=1))
    part = jnp.arange(batch_size) + jax.random.uniform(row_key, (batch_size,))
    # By comparing all: searchsorted's own method is a loop of some twenty tiny kernels on a GPU.
    row = jnp.searchsorted(upto, part / batch_size * upto[-1], side="right", method="compare_all")
    row = jnp.minimum(row, len(upto) - 1)
    within = jnp.cumsum(priorities[row], axis=1)
    point = jax.random.uniform(env_key, (batch_size,)) * within[:, -1]
    env = jnp.minimum((within <= point[:, None]).sum(axis=1), priorities.shape[1] - 1)
    # 0 at an edge, where rounding chose what cannot be drawn.
    probability = priorities[row, env] / upto[-1] / devices.size()
    weight = jnp.where(probability > 0, (devices.total((priorities > 0).sum()) * probability) ** -beta, 0)
    returns, discounts, after = n_step_return(rows, row, env, n_step=n_step, gamma=gamma)
    return Batch(
        frames=rows.frames.stack(row, env),  # rows before the first are, as negative indices, the last ones
        next_frames=rows.frames.stack(after, env),
        actions=rows.actions[row, env],
        returns=returns,
        discounts=discounts,
        weight=weight / jnp.maximum(devices.highest(weight.max()), 1e-30),
        row=row,
        env=env,
        keys=jax.random.split(sample_key, batch_size),
    )


def set_priorities(replay: Replay, batch: Batch, td: jax.Array, *, per_alpha: float) -> Replay:
    """Sets a batch's priorities by TD errors float32 [B]; a transition that was drawn twice gets the larger one."""
    new = jnp.where(batch.weight > 0, priority(td, per_alpha), 0)
    place = batch.row, batch.env
    return replay._replace(priorities=replay.priorities.at[place].set(0).at[place].max(new))
