"""A bonus for frames that a network cannot predict yet, as another algorithm's option: Random Network Distillation
(Burda et al. 2018, arXiv 1810.12894, section 2.2), clipped as the 2020 competition's entry did. Its return ends with
the episode, and it has no value head of its own; rnd_montezuma.py is the paper's algorithm.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from common import devices, envs, networks, shaping
from common.flags import NonNegativeFloat, check_needs

ENCODER = networks.EncoderArgs(width=1)


@dataclass(frozen=True)
class BonusArgs:
    """RND's exploration bonus."""

    rnd_coef: NonNegativeFloat = 0.0
    """coefficient of RND's bonus, added to shaped and normalised rewards; 0 for none"""
    rnd_normalize: bool = False
    """divide the bonus by the running standard deviation of its return, clip to +-10; if off, clip to [0, 2]"""

    def check(self) -> None:
        """Raises UsageError for inconsistent flags."""
        check_needs(self, self.rnd_coef, "--rnd-coef", ("rnd_normalize",))


class Bonus(NamedTuple):
    """What a resume needs of it, besides the predictor, which learns with the agent."""

    target: dict  # a network that never learns; of no arrays without a bonus
    filter: shaping.ReturnFilter


BONUS = devices.layout(Bonus, filter=shaping.FILTER)


def _network(hidden: int) -> nn.Module:
    """Small, as the entry's: the target has no dense layer before its last, the predictor one. In float32, since
    bfloat16's rounding would be a bonus that never falls."""
    encoder = networks.make_encoder(replace(ENCODER, hidden=hidden, dtype="float32"))
    return nn.Sequential([encoder, nn.Dense(256)])


def init(args, key: jax.Array, frames: jax.Array) -> tuple[dict, Bonus]:
    """The predictor's parameters ({} without --rnd-coef) and the Bonus, for stacked frames uint8 [1, 64, 64, C]."""
    if not args.rnd_coef:
        return {}, Bonus({}, shaping.new_filter(args.num_envs))
    target, predictor = (_network(hidden).init(jax.random.fold_in(key, i), frames) for i, hidden in enumerate((0, 256)))
    return predictor, Bonus(target, shaping.new_filter(args.num_envs))


def novelty(target: dict, predictor: dict, frames: jax.Array) -> jax.Array:
    """How badly the predictor knows the target's features of stacked frames uint8 [B, 64, 64, C]: mean squares [B],
    which are what the predictor minimises."""
    with jax.default_matmul_precision("highest"):  # on a GPU too
        truth = jax.lax.stop_gradient(_network(0).apply(target, frames))
        return ((_network(256).apply(predictor, frames) - truth) ** 2).mean(axis=-1)


def error(target: dict, predictor: dict, next_frames: jax.Array) -> jax.Array:
    """The predictor's loss for the stacked frames uint8 [B, S, 64, 64, C] after B sequences of S steps: [B, S]."""
    flat = next_frames.reshape(-1, *next_frames.shape[2:])
    return devices.in_chunks(lambda x: novelty(target, predictor, x), flat).reshape(next_frames.shape[:2])


def of_transitions(args, bonus: Bonus, predictor: dict, *, frames: envs.Frames, steps: envs.Steps, gamma: jax.Array):
    """The bonus of each transition, for the frame it leads to: the Bonus with its filter moved on, and float32 [T, N],
    0 for what is no transition."""

    def after(t):
        return devices.in_chunks(partial(novelty, bonus.target, predictor), frames.stack(t + 1))

    raw = jax.lax.map(after, jnp.arange(args.num_steps)) * ~steps.done
    if not args.rnd_normalize:
        return bonus, jnp.clip(raw, 0, 2)
    new_filter, normalized = shaping.normalize(bonus.filter, raw, steps.last, ~steps.done, gamma)
    return bonus._replace(filter=new_filter), normalized
