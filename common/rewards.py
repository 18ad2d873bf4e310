"""Reward shaping and normalisation, and moments of masked arrays."""

from dataclasses import dataclass
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from common import devices
from common.flags import UnitInterval, check_needs


@dataclass(frozen=True)
class NormalizeArgs:
    """Reward normalisation."""

    normalize_rewards: bool = False
    """divide (clipped) rewards by the running standard deviation of their discounted return, then clip to +-10"""
    normalize_gamma: UnitInterval = 0.0
    """discount of that return; 0 for gamma (Baselines' VecNormalize: 0.99)"""

    def check(self) -> None:
        check_needs(self, self.normalize_rewards, "--normalize-rewards", ("normalize_gamma",))


class ReturnFilter(NamedTuple):
    """Running statistics of discounted returns, float32."""

    discounted: jax.Array  # [N]: the return so far of each unfinished episode
    count: jax.Array  # []
    mean: jax.Array  # []
    var: jax.Array  # []


RETURN_FILTER_SPECS = devices.partition_specs(ReturnFilter, discounted=devices.ENV_SHARDED)


def init_return_filter(num_envs: int) -> ReturnFilter:
    """The filter before the first reward."""
    return ReturnFilter(jnp.zeros(num_envs), jnp.float32(0), jnp.float32(0), jnp.float32(1))


def merge_moments(count, mean, var, new_count, new_mean, new_var):
    """Count [], mean and variance [...] of the union of two samples, from those of each, float32 (Chan et al. 1979)."""
    total = jnp.maximum(count + new_count, 1)
    delta = new_mean - mean
    var = (var * count + new_var * new_count + delta**2 * count * new_count / total) / total
    return count + new_count, mean + delta * new_count / total, var


def normalize_rewards(
    state: ReturnFilter, rewards: jax.Array, ended: jax.Array, mask: jax.Array, gamma: jax.Array, clip=10.0
):
    """Divides rewards by the running standard deviation of their return, here the discounted sum of past rewards, as
    OpenAI Baselines' VecNormalize, which updates it at each step; here the whole rollout does before any is divided.

    Args:
      rewards: float32 [T, N].
      ended: bool [T, N], whether the return starts anew after this step, as after `envs.Timesteps.sequence_end`.
      mask: bool [T, N], False for junk steps, which the return skips.
      gamma: float32 [], the return's discount.
      clip: the result is clipped to +- this.

    Returns the updated filter and rewards float32 [T, N].
    """
    chex.assert_rank(rewards, 2)
    chex.assert_equal_shape([rewards, ended, mask])

    def forward(past, step):
        reward, end, valid = step
        now = jnp.where(valid, gamma * past + reward, past)
        return jnp.where(end, 0.0, now), now

    steps = rewards, ended, mask
    discounted, returns = jax.lax.scan(forward, state.discounted, steps, unroll=devices.scan_unroll())
    count = devices.psum(mask.sum())
    moments = merge_moments(state.count, state.mean, state.var, count, *masked_moments(returns, mask))
    state = ReturnFilter(discounted, *moments)
    return state, jnp.clip(rewards / jnp.sqrt(state.var + 1e-8), -clip, clip)


def shape_and_clip(args, rewards) -> jax.Array:
    """Shapes and clips rewards float32 [...] (`args`: reward_shaping, reward_clip). Shaping halves small rewards and
    takes the root of large ones (Pohlen et al. 2018, section 3.2, for values; 0.001 as in R2D2, Kapturowski et al.
    2019, section 2.3)."""
    rewards = jnp.asarray(rewards)
    if args.reward_shaping:
        rewards = jnp.sign(rewards) * (jnp.sqrt(jnp.abs(rewards) + 1) - 1) + 0.001 * rewards
    return jnp.clip(rewards, -args.reward_clip, args.reward_clip) if args.reward_clip else rewards


def prepare_rewards(args, state: ReturnFilter, timesteps, gamma: jax.Array) -> tuple[ReturnFilter, jax.Array]:
    """Shapes, clips and normalises the rewards of `envs.Timesteps` (`args`: GameArgs, NormalizeArgs). Returns the
    updated filter and rewards float32 [T, N]."""
    rewards = shape_and_clip(args, timesteps.rewards)
    if args.normalize_rewards:
        gamma = args.normalize_gamma or gamma
        return normalize_rewards(state, rewards, timesteps.sequence_end, ~timesteps.is_reset, gamma)
    return state, rewards


def masked_moments(x: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and variance, float32 [], of x where `mask` (bool, or 0 and 1, of x's shape) is true, over all devices."""
    count = jnp.maximum(devices.psum(mask.sum()), 1)
    mean = devices.psum((x * mask).sum()) / count
    return mean, devices.psum(((x - mean) ** 2 * mask).sum()) / count
