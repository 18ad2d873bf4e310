"""What becomes of the games' rewards before an algorithm learns from them, and moments of masked arrays."""

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
    """discount of that return; 0 for gamma (Baselines always uses 0.99)"""

    def check(self) -> None:
        """Raises UsageError for inconsistent flags."""
        check_needs(self, self.normalize_rewards, "--normalize-rewards", ("normalize_gamma",))


def shape_reward(reward: jax.Array) -> jax.Array:
    """sign(r)(sqrt(|r| + 1) - 1) + 0.001 r, float32 [...]: small rewards are halved, large ones become roots.

    Pohlen et al. 2018, section 3.2, of values; .001 is R2D2's (Kapturowski et al. 2019, section 2.3).
    """
    return jnp.sign(reward) * (jnp.sqrt(jnp.abs(reward) + 1) - 1) + 0.001 * reward


class ReturnFilter(NamedTuple):
    """The discounted return so far of each unfinished episode, and the moments of all such returns, float32."""

    discounted: jax.Array  # [N]
    count: jax.Array  # []
    mean: jax.Array  # []
    var: jax.Array  # []


FILTER = devices.layout(ReturnFilter, games="discounted")


def new_filter(num_envs: int) -> ReturnFilter:
    """A filter of so many games that has seen nothing."""
    return ReturnFilter(jnp.zeros(num_envs), jnp.float32(0), jnp.float32(0), jnp.float32(1))


def merge_moments(count, mean, var, more, more_mean, more_var):
    """Count [], mean and variance [...] of two sets joined, from those of each, float32 (Chan et al. 1979)."""
    total = jnp.maximum(count + more, 1)
    apart = more_mean - mean
    var = (var * count + more_var * more + apart**2 * count * more / total) / total
    return count + more, mean + apart * more / total, var


def normalize(state: ReturnFilter, rewards: jax.Array, ended: jax.Array, mask: jax.Array, gamma: jax.Array, clip=10.0):
    """Divides rewards by the standard deviation of the discounted return, which runs forward in time.

    The rollout's own returns count too. As OpenAI Baselines' VecNormalize, which does so step by step.

    Args:
      rewards: float32 [T, N].
      ended: bool [T, N], whether nothing follows the transition: `envs.Steps.last`.
      mask: bool [T, N], False for steps that are no transition.
      clip: the result is clipped to +- this.

    Returns the filter with this rollout's transitions added, and rewards float32 [T, N].
    """
    chex.assert_rank(rewards, 2)
    chex.assert_equal_shape([rewards, ended, mask])

    def forward(past, step):
        reward, end, valid = step
        now = jnp.where(valid, gamma * past + reward, past)
        return jnp.where(end, 0.0, now), now

    steps = rewards, ended, mask
    discounted, returns = jax.lax.scan(forward, state.discounted, steps, unroll=devices.unroll())
    count = devices.total(mask.sum())
    moments = merge_moments(state.count, state.mean, state.var, count, *masked_moments(returns, mask))
    state = ReturnFilter(discounted, *moments)
    return state, jnp.clip(rewards / jnp.sqrt(state.var + 1e-8), -clip, clip)


def shape_and_clip(args, rewards) -> jax.Array:
    """Rewards of any shape as a script's flags ask for (`args`: reward_shaping, reward_clip)."""
    rewards = shape_reward(rewards) if args.reward_shaping else jnp.asarray(rewards)
    return jnp.clip(rewards, -args.reward_clip, args.reward_clip) if args.reward_clip else rewards


def prepare_rewards(args, state: ReturnFilter, steps, gamma: jax.Array) -> tuple[ReturnFilter, jax.Array]:
    """The rewards that a script learns from (`args`: reward_shaping, reward_clip, normalize_rewards,
    normalize_gamma).

    Returns the filter with these `envs.Steps` added, and rewards float32 [T, N].
    """
    rewards = shape_and_clip(args, steps.rewards)
    if args.normalize_rewards:
        return normalize(state, rewards, steps.last, ~steps.done, args.normalize_gamma or gamma)
    return state, rewards


def masked_moments(x: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and variance, float32 [], of x where `mask`, bool of x's shape, is true, over all devices."""
    count = jnp.maximum(devices.total(mask.sum()), 1)
    mean = devices.total((x * mask).sum()) / count
    return mean, devices.total(((x - mean) ** 2 * mask).sum()) / count
