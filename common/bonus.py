"""Random Network Distillation's exploration bonus as another algorithm's option (Burda et al. 2018, arXiv 1810.12894,
section 2.2). It is added to the game's reward, so its return ends with the episode and it has no value head of its own.
By default PPO clips it, as the 2020 competition entry, and Ape-X normalises it. rnd_montezuma.py is the paper's
algorithm.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from common import devices, envs, networks
from common.flags import NonNegativeFloat, check_needs
from common.rewards import RETURN_FILTER_SPECS, ReturnFilter, init_return_filter, normalize_rewards

ENCODER = networks.EncoderArgs(width=1)


@dataclass(frozen=True)
class BonusArgs:
    """RND's exploration bonus."""

    rnd_coef: NonNegativeFloat = 0.0
    """coefficient of RND's bonus, added to shaped and normalised rewards; 0 for none"""
    rnd_normalize: bool = False
    """divide the bonus by the running standard deviation of its return, clip to +-10; if off, clip to [0, 2]"""

    def check(self) -> None:
        check_needs(self, self.rnd_coef, "--rnd-coef", ("rnd_normalize",))


class Bonus(NamedTuple):
    """The bonus's state besides the predictor, which PPO trains with the agent, Ape-X by an Adam of its own."""

    target: dict  # parameters of the random network; {} without a bonus
    filter: ReturnFilter  # of the bonus; for rnd_normalize


BONUS_SPECS = devices.partition_specs(Bonus, filter=RETURN_FILTER_SPECS)


def _network(hidden: int) -> nn.Module:
    """The predictor, with a dense layer of `hidden` units before its last, or with `hidden` = 0 the target. In float32,
    since bfloat16's rounding error would be a bonus that never falls."""
    encoder = networks.make_encoder(replace(ENCODER, hidden=hidden, dtype="float32"))
    return nn.Sequential([encoder, nn.Dense(256)])


def init(args, key: jax.Array, frames: jax.Array) -> tuple[dict, Bonus]:
    """The predictor's parameters ({} without --rnd-coef) and the Bonus, for stacked frames uint8 [1, 64, 64, C]."""
    if not args.rnd_coef:
        return {}, Bonus({}, init_return_filter(args.num_envs))
    target = _network(0).init(jax.random.fold_in(key, 0), frames)
    predictor = _network(256).init(jax.random.fold_in(key, 1), frames)
    return predictor, Bonus(target, init_return_filter(args.num_envs))


def novelty(target: dict, predictor: dict, frames: jax.Array) -> jax.Array:
    """The predictor's mean squared error [B] on the target's features of stacked frames uint8 [B, 64, 64, C]."""
    with jax.default_matmul_precision("highest"):  # on a GPU too
        truth = jax.lax.stop_gradient(_network(0).apply(target, frames))
        return ((_network(256).apply(predictor, frames) - truth) ** 2).mean(axis=-1)


def predictor_loss(target: dict, predictor: dict, next_frames: jax.Array) -> jax.Array:
    """The predictor's loss [B, S] on the next stacked frames uint8 [B, S, 64, 64, C] of B sequences of S steps."""
    flat = next_frames.reshape(-1, *next_frames.shape[2:])
    return devices.map_in_chunks(lambda x: novelty(target, predictor, x), flat).reshape(next_frames.shape[:2])


def of_transitions(
    args, bonus: Bonus, predictor: dict, *, frames: envs.Frames, timesteps: envs.Timesteps, gamma: jax.Array
):
    """The bonus float32 [T, N] of each transition, for the frame it leads to; 0 for junk steps. Returns the updated
    Bonus and the bonus."""
    times, valid = jnp.arange(args.num_steps) + 1, ~timesteps.is_reset
    return _of_steps(args, bonus, predictor, frames, times, valid, timesteps.sequence_end, gamma)


def of_frames(args, bonus: Bonus, predictor: dict, *, frames: envs.Frames, mask: jax.Array, gamma: jax.Array):
    """The bonus float32 [T, N] of reaching each frame, 0 where `mask` (bool [T, N]) is false. The mask leaves out
    episodes' first frames, which no transition reaches. Row t is of the transition that starts at step t - 1 (row 0: at
    the previous rollout's last). `gamma` is of the bonus's return. Returns the updated Bonus and the bonus."""
    return _of_steps(args, bonus, predictor, frames, jnp.arange(args.num_steps), mask, frames.is_first, gamma)


def _of_steps(args, bonus, predictor, frames, times, valid, ended, gamma):
    def at(t):
        return devices.map_in_chunks(partial(novelty, bonus.target, predictor), frames.stack(t))

    raw = jax.lax.map(at, times) * valid
    if not args.rnd_normalize:
        return bonus, jnp.clip(raw, 0, 2)
    new_filter, normalized = normalize_rewards(bonus.filter, raw, ended, valid, gamma)
    return bonus._replace(filter=new_filter), normalized
