"""IMPALA on Procgen: actor threads play with parameters that lag, the learner corrects for it with V-trace.

Espeholt et al. 2018 (arXiv 1802.01561), with the settings of a 2020 Procgen competition entry as defaults: unrolls
of 200 steps, three passes over each batch, and the same network on the same frames as ppo_procgen.py. Try:

    python impala_procgen.py --env-id bigfish
    python impala_procgen.py --env-id coinrun --num-actors 4 --num-envs 256 --num-steps 32 --update-epochs 1
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from annotated_types import Interval

from common import actors, agents, augment, devices, envs, networks, runs, shaping
from common.actors import Unroll
from common.devices import GAMES, SAME, STEPS
from common.files import check
from common.flags import (
    Iterations,
    NonNegativeFloat,
    NonNegativeSchedule,
    PositiveFloat,
    PositiveInt,
    Size,
    Timesteps,
    UnitInterval,
    UnitSchedule,
)

SCRIPT = Path(__file__).stem


@dataclass(frozen=True)
class Args(
    envs.GameArgs, shaping.NormalizeArgs, networks.EncoderArgs, augment.AugmentArgs, augment.DracArgs,
    actors.FleetArgs, runs.RunArgs,
):  # fmt: skip
    total_timesteps: Timesteps = 8_000_000
    """total number of environment steps"""
    num_envs: Size = 16
    num_steps: PositiveInt = 200
    """steps of each game in an unroll; an update learns from one unroll of every game"""
    num_minibatches: PositiveInt = 2
    """minibatches in an epoch, each of whole unrolls"""
    update_epochs: Iterations = 3
    """epochs over each batch"""
    replay_fraction: Annotated[float, Interval(ge=0, le=0.95)] = 0.0
    """share of each batch (rounded to whole unrolls) that is drawn from a buffer of older unrolls; 0 for no buffer"""
    replay_size: PositiveInt = 128
    """unrolls of one game that the buffer holds, on the device (2.4 MiB each at 200 steps)"""
    learning_rate: NonNegativeSchedule = "0:1e-4,1000000:5e-4,8000000:1e-4"
    """Adam's learning rate: a number, or a schedule "step:value,..." in environment steps; here for 8M"""
    gamma: UnitSchedule = "0.99"
    """discount: a number, or a schedule like the learning rate's"""
    rho_bar: PositiveFloat = 1.0
    """V-trace: clip each temporal difference's importance ratio; a lower one brings values nearer to those of the
    policy that acted"""
    c_bar: NonNegativeFloat = 1.0
    """V-trace: clip the ratios that carry later differences back; changes how fast values are learnt, not what they
    come to"""
    pg_rho_bar: PositiveFloat = 1.0
    """V-trace: clip the probability ratio of the policy gradient"""
    vtrace_lambda: UnitInterval = 1.0
    """V-trace: decay of later temporal differences, as in TD(lambda)"""
    clip_coef: NonNegativeFloat = 0.0
    """for several passes, as in PPO: V-trace once per update, advantages normalised, and the ratio to the policy before
    the update clipped to 1 +- this; 0 for the paper's loss, with V-trace computed anew in each minibatch"""
    vf_coef: NonNegativeFloat = 0.5
    """coefficient of the value loss, half the mean squared error"""
    ent_coef: NonNegativeSchedule = "0.01"
    """coefficient of the entropy bonus: a number, or a schedule like the learning rate's"""
    max_grad_norm: NonNegativeFloat = 0.5
    """clip the gradient (of the mean over a minibatch) to this global norm; 0 for no clipping"""
    optimizer: Literal["adam", "rmsprop"] = "adam"
    """Adam, as the competition entry, or RMSProp, as the paper (decay 0.99)"""
    adam_eps: PositiveFloat = 1e-8
    """epsilon of Adam, or of RMSProp"""
    l2: NonNegativeFloat = 0.0
    """coefficient of the L2 penalty, the squared norm of all convolution kernels (not part of the logged loss)"""
    core: Literal["none", "lstm", "gru"] = "none"
    """recurrent core between encoder and heads; its gradient goes through whole unrolls"""

    def check(self) -> None:
        """Raises UsageError for inconsistent flags."""
        runs.check_needs(self, self.replay_fraction, "--replay-fraction", ("replay_size",))
        replayed = num_replayed(self)
        batch = self.num_envs + replayed
        both = f" ({self.num_envs} new and {replayed} replayed)" if self.replay_fraction else ""
        check(
            batch * self.num_steps <= 2**24,
            f"--num-envs {self.num_envs} --num-steps {self.num_steps}: a batch of {batch} unrolls{both}, "
            f"{batch * self.num_steps} steps, is too large, at most {2**24} steps",
        )
        check(
            batch % self.num_minibatches == 0,
            f"--num-minibatches {self.num_minibatches}: must divide a batch's unrolls, {batch}{both}",
        )
        if self.replay_fraction:
            one, most = 1 / (self.num_envs + 1), 2**24 // self.num_steps
            check(
                replayed > 0, f"--replay-fraction {self.replay_fraction}: give 0, or {one:.2g} for one unroll, or more"
            )
            check(
                self.num_envs <= self.replay_size <= most,
                f"--replay-size {self.replay_size}: must be from {self.num_envs}, one unroll of each game, to {most}",
            )

    def shares(self) -> dict[str, int]:
        """What the devices divide between them."""
        replayed = num_replayed(self)
        batch = self.num_envs + replayed
        shares = {
            "an actor's games, --num-envs / --num-actors": self.num_envs // self.num_actors,
            "a minibatch's unrolls": batch // self.num_minibatches,
        }
        return shares | ({"the replayed unrolls": replayed, "--replay-size": self.replay_size} if replayed else {})


def num_replayed(args: Args) -> int:
    """How many of a batch's unrolls come from the replay buffer."""
    return round(args.num_envs * args.replay_fraction / (1 - args.replay_fraction))


# NETWORK


class Agent(nn.Module):
    """Policy and value heads on an encoder, with a recurrent core between them."""

    encoder: nn.Module
    core: networks.Recurrent
    dropout: float

    def setup(self):
        # A small last layer makes the first policy nearly uniform. Both in full float32 on a GPU too.
        dense = partial(nn.Dense, precision="highest")
        self.policy = dense(envs.NUM_ACTIONS, kernel_init=nn.initializers.orthogonal(0.01))
        self.value = dense(1, kernel_init=nn.initializers.orthogonal(1.0))

    def encode(self, frames: jax.Array, keys: jax.Array | None = None) -> jax.Array:
        """Frames uint8 [B, 64, 64, C] and keys for dropout uint32 [B, 2] -> features float32 [B, hidden]."""
        return networks.dropout(self.encoder(frames), keys, self.dropout)

    def decode(self, x: jax.Array, first: jax.Array, core: networks.Core):
        """Features [B, S, hidden] of S steps, whether each is its episode's first [B, S], and the core before them
        -> logits float32 [B, S, 15], values float32 [B, S] and the core after them."""
        x, core = self.core(x, first, core)
        return self.policy(x), self.value(x)[..., 0], core

    def __call__(self, frames: jax.Array, first: jax.Array, core: networks.Core):
        """All of it, for frames [B, 64, 64, C] of one step."""
        return self.decode(self.encode(frames)[:, None], first[:, None], core)


def make_agent(args: Args) -> Agent:
    """The networks that these flags describe."""
    return Agent(networks.make_encoder(args), networks.Recurrent(args.core, args.hidden), args.dropout)


def policy(agent: Agent, params: dict, frames: jax.Array, first: jax.Array, core: networks.Core):
    """Logits [N, 15] and the next core for stacked frames [N, 64, 64, C] of one step."""
    features = devices.in_chunks(partial(agent.apply, params, method="encode"), frames)
    logits, _, core = agent.apply(params, features[:, None], first[:, None], core, method="decode")
    return logits[:, 0], core


# TRAINING STATE


class TrainState(NamedTuple):
    """The learner."""

    params: dict
    opt_state: optax.OptState
    key: jax.Array
    global_step: jax.Array  # int32 []: transitions learnt from, replayed ones not counted
    updates: jax.Array  # int32 []: the parameters' version


class Judged(NamedTuple):
    """V-trace's results for each step, constants to the gradient: float32, of unrolls [T, N] or a minibatch [B, T]."""

    targets: jax.Array
    advantages: jax.Array
    log_prob: jax.Array  # of the action, by the policy that V-trace was computed with


class Batch(NamedTuple):
    """Steps to learn from: of unrolls of N games [T, N]; in a minibatch B of them, [B, T]."""

    actions: jax.Array  # int32
    logits: jax.Array  # float32 [..., 15], of the policy that acted
    rewards: jax.Array  # float32
    terminated: jax.Array  # bool
    done: jax.Array  # bool: EnvPool resets here, this step is no transition
    judged: Judged | None = None  # with clip_coef, in an update


class Unrolls(NamedTuple):
    """Unrolls of N games as the learner sees them; games are axis 1 of all its arrays."""

    frames: envs.Frames  # of T + 1 steps
    core: networks.Core  # [1, N, hidden], before the first step
    batch: Batch


class Memory(NamedTuple):
    """What the learner remembers of the games."""

    reward_filter: shaping.ReturnFilter
    replay: Unrolls | None  # N = replay_size
    written: jax.Array  # int32 []: unrolls put into each device's part of the buffer; once full, size to 2 size - 1


MEMORY = devices.layout(Memory, reward_filter=shaping.FILTER, replay=STEPS)


class Carry(NamedTuple):
    """What an actor needs besides its games to go on with n of them."""

    history: jax.Array  # uint8 [H, n, 64, 64, 3]: the frames before the newest
    numbers: jax.Array  # int32 [n]: of these games in the run
    last_action: jax.Array  # int32 [n]: what the games played last
    core: networks.Core


def make_optimizer(args: Args) -> optax.GradientTransformation:
    """Adam's or RMSProp's direction, without step size and sign: `optimize` multiplies it by -learning_rate, from a
    schedule."""
    clip = devices.clip_by_norm(args.max_grad_norm)
    if args.optimizer == "rmsprop":
        return optax.chain(clip, optax.scale_by_rms(decay=0.99, eps=args.adam_eps, bias_correction=True))
    return optax.chain(clip, optax.scale_by_adam(eps=args.adam_eps))


@partial(jax.jit, static_argnums=(0, 1))
def initial_state(args: Args, agent: Agent) -> TrainState:
    """The learner before its first update, from `args.seed`."""
    key, init_key = jax.random.split(jax.random.PRNGKey(args.seed))
    frames = jnp.zeros((1, 64, 64, 3 * len(args.offsets)), jnp.uint8)
    params = agent.init(init_key, frames, jnp.ones(1, bool), networks.initial_core(args.core, args.hidden, 1))
    return TrainState(
        params=params,
        opt_state=make_optimizer(args).init(params),
        key=key,
        global_step=jnp.int32(0),
        updates=jnp.int32(0),
    )


@partial(jax.jit, static_argnums=0)
def initial_memory(args: Args) -> Memory:
    replay = empty_unrolls(args, args.replay_size) if args.replay_fraction else None
    return Memory(shaping.new_filter(args.num_envs), replay, jnp.int32(0))


def empty_unrolls(args: Args, size: int) -> Unrolls:
    """Unrolls of `size` games, all zeros."""
    shape = (args.num_steps, size)
    return Unrolls(
        frames=envs.Frames.after(envs.empty_history(size, args.offsets), args.num_steps + 1, args.offsets),
        core=jax.tree.map(lambda x: x[None], networks.initial_core(args.core, args.hidden, size)),
        batch=Batch(
            actions=jnp.zeros(shape, jnp.int32),
            logits=jnp.zeros((*shape, envs.NUM_ACTIONS)),
            rewards=jnp.zeros(shape),
            terminated=jnp.zeros(shape, bool),
            done=jnp.zeros(shape, bool),
        ),
    )


@partial(jax.jit, static_argnums=0)
def initial_carry(args: Args, numbers: jax.Array) -> Carry:
    """Before the first step of the games with these numbers, int32 [n]."""
    return Carry(
        history=envs.empty_history(len(numbers), args.offsets),
        numbers=numbers,
        last_action=jnp.zeros_like(numbers),
        core=networks.initial_core(args.core, args.hidden, len(numbers)),
    )


# ROLLOUT


class Rollout(NamedTuple):
    """What stays on an actor's device while it plays T steps of n games."""

    frames: envs.Frames  # of T + 1 steps
    actions: jax.Array  # int32 [T, n]
    logits: jax.Array  # float32 [T, n, 15]
    numbers: jax.Array  # int32 [n]
    last_action: jax.Array  # int32 [n]
    first_core: networks.Core
    core: networks.Core
    key: jax.Array
    t: jax.Array  # int32 []


ROLLOUT = devices.layout(Rollout, steps="frames actions logits", games="numbers last_action first_core core")


@partial(jax.jit, static_argnums=0)
def begin_rollout(args: Args, carry: Carry, i: int) -> Rollout:
    """An actor's i-th rollout, before its first step."""
    shape = (args.num_steps, len(carry.numbers))
    return Rollout(
        frames=envs.Frames.after(carry.history, args.num_steps + 1, args.offsets),
        actions=jnp.zeros(shape, jnp.int32),
        logits=jnp.zeros((*shape, envs.NUM_ACTIONS)),
        numbers=carry.numbers,
        last_action=carry.last_action,
        first_core=carry.core,
        core=carry.core,
        key=jax.random.fold_in(jax.random.PRNGKey(envs.derive_seed(args.seed, 0)), i),
        t=jnp.int32(0),
    )


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def act(args: Args, agent: Agent, params: dict, rollout: Rollout, obs: jax.Array, age: jax.Array):
    """Chooses actions for obs uint8 [n, 3, 64, 64], age int32 [n]; returns the rollout and actions int32 [n]."""
    t = rollout.t
    frames = rollout.frames.put(t, obs, age)
    logits, core = policy(agent, params, frames.stack(t), age == 0, rollout.core)
    choose_keys, stick_keys = envs.step_keys(rollout)
    actions = jax.vmap(jax.random.categorical)(choose_keys, logits)
    played = envs.stick(stick_keys, args.sticky_actions, actions, last_action=rollout.last_action, age=age)
    rollout = rollout._replace(
        frames=frames,
        actions=rollout.actions.at[t].set(actions),
        logits=rollout.logits.at[t].set(logits),
        last_action=played,
        core=core,
        t=t + 1,
    )
    return rollout, played


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def end_rollout(args: Args, rollout: Rollout, obs: jax.Array, age: jax.Array) -> tuple[Rollout, Carry]:
    """Adds the frames uint8 [n, 3, 64, 64] after the last step, and their ages int32 [n]."""
    rollout = rollout._replace(frames=rollout.frames.put(args.num_steps, obs, age))
    history = rollout.frames.history(args.num_steps)
    return rollout, Carry(history, rollout.numbers, rollout.last_action, rollout.core)


def collect(args: Args, agent: Agent, games: envs.Games, params: dict, carry: Carry, *, i: int, watch, check_stop):
    """Plays an actor's i-th unroll, in its thread, as `actors.Fleet` asks for it.

    Returns an Unroll and the next Carry.
    """
    agent, params = networks.for_acting(agent, params)
    rollout = begin_rollout(args, carry, i)

    def choose_actions(obs, age):
        nonlocal rollout
        rollout, actions = act(args, agent, params, rollout, obs, age)
        return actions

    steps = games.play(choose_actions, args.num_steps, watch, check_stop)
    rollout, carry = end_rollout(args, rollout, games.obs, games.age)
    return Unroll(rollout, steps), carry


# ALGORITHM


def vtrace(log_ratio, rewards, values, terminated, done, *, gamma, rho_bar, c_bar, pg_rho_bar, vtrace_lambda):
    """V-trace of one sequence (Espeholt et al. 2018, equation 1 and section 4.2).

    Args:
      log_ratio: float32 [T], log of the learner's over the actor's probability of the action.
      rewards: float32 [T], terminated: bool [T], of the transition from step t to t + 1.
      values: float32 [T + 1], the learner's.
      done: bool [T], whether step t is no transition. Its ratio counts as 0: so its target is its value, which stands
        for the rest of a truncated episode, and nothing of the next episode comes through.
      gamma, rho_bar, c_bar, pg_rho_bar, vtrace_lambda: float32 [].

    Returns targets of the values and advantages of the policy gradient, float32 [T].
    """
    chex.assert_rank([log_ratio, rewards, values, terminated, done], 1)
    chex.assert_equal_shape([log_ratio, rewards, values[1:], terminated, done])
    ratio = jnp.where(done, 0.0, jnp.exp(log_ratio))
    discounts = gamma * (1.0 - terminated)
    deltas = jnp.minimum(rho_bar, ratio) * (rewards + discounts * values[1:] - values[:-1])
    decays = discounts * vtrace_lambda * jnp.minimum(c_bar, ratio)

    def backward(correction, step):  # the paper's remark 1: v_s - V(x_s), from that of the step after
        delta, decay = step
        correction = delta + decay * correction
        return correction, correction

    steps = deltas, decays
    targets = values[:-1] + jax.lax.scan(backward, jnp.float32(0), steps, reverse=True, unroll=devices.unroll())[1]
    # As rlax: with a lambda of 1 the paper's next target, and where nothing is off-policy GAE for any lambda.
    next_targets = jnp.append(vtrace_lambda * targets[1:] + (1 - vtrace_lambda) * values[1:-1], values[-1])
    advantages = jnp.minimum(pg_rho_bar, ratio) * (rewards + discounts * next_targets - values[:-1])
    return targets, advantages


class Inputs(NamedTuple):
    """What the network sees of a minibatch of B unrolls."""

    frames: jax.Array  # uint8 [B, T + 1, 64, 64, C]; the last is the one after the last step
    first: jax.Array  # bool [B, T + 1]: whether a frame is its episode's first
    core: networks.Core  # before the first step, [B, hidden]
    keys: jax.Array | None  # uint32 [B, T, 2], for augmentation and dropout


def of_actions(log_probs: jax.Array, batch: Batch) -> jax.Array:
    """The log-probabilities float32 [...] of the batch's actions, picked from those of all actions [..., 15]."""
    return jnp.take_along_axis(log_probs, batch.actions[..., None], axis=-1)[..., 0]


def judge(args: Args, log_probs: jax.Array, values: jax.Array, batch: Batch, *, gamma) -> Judged:
    """V-trace of B unrolls, by a policy's log-probabilities float32 [B, T, 15] and values [B, T + 1]."""
    chex.assert_equal_shape([log_probs, batch.logits])
    chex.assert_equal_shape([values[:, 1:], batch.actions, batch.rewards, batch.terminated, batch.done])
    log_prob = of_actions(log_probs, batch)
    correct = partial(
        vtrace,
        gamma=gamma,
        rho_bar=args.rho_bar,
        c_bar=args.c_bar,
        pg_rho_bar=args.pg_rho_bar,
        vtrace_lambda=args.vtrace_lambda,
    )
    log_ratio = log_prob - of_actions(jax.nn.log_softmax(batch.logits), batch)
    targets, advantages = jax.vmap(correct)(log_ratio, batch.rewards, values, batch.terminated, batch.done)
    return jax.lax.stop_gradient(Judged(targets, advantages, log_prob))


def impala_parts(args: Args, log_probs: jax.Array, values: jax.Array, batch: Batch, *, gamma) -> dict[str, jax.Array]:
    """The parts of IMPALA's loss (Espeholt et al. 2018, section 4.2) for each step, float32 [B, T].

    Args:
      log_probs: float32 [B, T, 15], of the policy that learns.
      values: float32 [B, T + 1].
      batch: [B, T].
    """
    log_prob, old_log_probs = of_actions(log_probs, batch), jax.nn.log_softmax(batch.logits)
    ratio = jnp.exp(log_prob - of_actions(old_log_probs, batch))
    if args.clip_coef:  # Schulman et al. 2017, equation 7
        targets, advantages, log_prob_before = batch.judged
        moved = jnp.exp(log_prob - log_prob_before)
        clipped = jnp.clip(moved, 1 - args.clip_coef, 1 + args.clip_coef)
        gain = jnp.minimum(moved * advantages, clipped * advantages)
        of_clip = {"clipfrac": (jnp.abs(moved - 1) > args.clip_coef).astype(jnp.float32)}
    else:
        targets, advantages, _ = judge(args, log_probs, values, batch, gamma=gamma)
        gain, of_clip = advantages * log_prob, {}
    error = values[:, :-1] - targets
    return of_clip | {
        "policy_loss": -gain,
        "value_loss": 0.5 * error**2,
        "entropy": -(jnp.exp(log_probs) * log_probs).sum(axis=-1),
        "approx_kl": (jnp.exp(old_log_probs) * (old_log_probs - log_probs)).sum(axis=-1),
        "rho": jnp.minimum(args.rho_bar, ratio),
        "rho_clipfrac": (ratio > args.rho_bar).astype(jnp.float32),
        "value_error": error,
        "value_error_square": error**2,
        "target": targets,
        "target_square": targets**2,
    }


def forward(agent: Agent, params: dict, inputs: Inputs, frames: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For T steps with these frames in place of the inputs': log-probabilities float32 [B, T, 15], and values
    [B, T + 1], of which the last, of the inputs' last frame, is a constant."""
    batch, steps = frames.shape[:2]
    frames, keys = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (frames, inputs.keys))
    features = devices.in_chunks(lambda x: agent.apply(params, *x, method="encode"), (frames, keys))
    features = features.reshape(batch, steps, -1)
    logits, values, core = agent.apply(params, features, inputs.first[:, :-1], inputs.core, method="decode")
    last_value = agent.apply(params, inputs.frames[:, -1], inputs.first[:, -1], core)[1]
    values = jnp.concatenate([values, jax.lax.stop_gradient(last_value)], axis=1)
    return jax.nn.log_softmax(logits), values


def loss(args: Args, agent: Agent, params: dict, minibatch: tuple[Inputs, Batch], *, gamma, ent_coef):
    """IMPALA's loss, with DrAC's regulariser if asked.

    Returns its parts for each step, float32 [B, T], and no means over steps: `devices.gradient` takes them, and its
    docstring says why.
    """
    inputs, batch = minibatch
    frames = inputs.frames[:, :-1]
    if inputs.keys is not None:
        augment_keys, dropout_keys = jnp.moveaxis(jax.vmap(jax.vmap(jax.random.split))(inputs.keys), 2, 0)
        inputs = inputs._replace(keys=dropout_keys)
    if args.augment:
        augmented = jax.vmap(partial(augment.augment, args))(augment_keys, frames)
        frames = augmented if args.augment_mode == "rad" else frames
    log_probs, values = forward(agent, params, inputs, frames)
    parts = impala_parts(args, log_probs, values, batch, gamma=gamma)
    total = parts["policy_loss"] + args.vf_coef * parts["value_loss"] - ent_coef * parts["entropy"]
    if args.augment and args.augment_mode == "drac":
        new_log_probs, new_values = forward(agent, params, inputs, augmented)
        parts["drac_loss"] = augment.drac_loss(log_probs, values[:, :-1], new_log_probs, new_values[:, :-1])
        total += args.drac_coef * parts["drac_loss"]
    return parts | {"loss": total}


@partial(jax.jit, static_argnums=0, donate_argnums=1)
@devices.spread([MEMORY, [ROLLOUT], [envs.STEPS], SAME, SAME], (MEMORY, STEPS))
def remember(args: Args, memory: Memory, rollouts: Sequence[Rollout], steps: Sequence[envs.Steps], step: int, i: int):
    """Makes the i-th update's batch of the actors' rollouts and steps [T, n], at environment step `step`: returns the
    memory and Unrolls, the new ones first, then those replayed."""
    gamma, steps = runs.parse_schedule(args.gamma)(step), envs.join_games(steps, axis=-1)
    reward_filter, rewards = shaping.prepare_rewards(args, memory.reward_filter, steps, gamma)
    frames, actions, logits = envs.join_games([(r.frames, r.actions, r.logits) for r in rollouts], axis=1)
    core = envs.join_games([jax.tree.map(lambda x: x[None], r.first_core) for r in rollouts], axis=1)
    new = Unrolls(frames, core, Batch(actions, logits, rewards, steps.terminated, steps.done))
    if not args.replay_fraction:
        return memory._replace(reward_filter=reward_filter), new
    key = devices.own_key(jax.random.fold_in(jax.random.PRNGKey(envs.derive_seed(args.seed, 1)), i))
    num_envs, size = steps.done.shape[1], args.replay_size // devices.size()  # of this device
    filled = jnp.minimum(memory.written, size)
    empty = filled == 0  # in the first update, which draws from the new ones
    drawn = jax.random.randint(key, num_replayed(args) // devices.size(), 0, jnp.where(empty, num_envs, filled))
    old = jax.tree.map(lambda x, held: jnp.where(empty, x[:, drawn], held[:, drawn]), new, memory.replay)
    places = (memory.written + jnp.arange(num_envs)) % size
    replay = jax.tree.map(lambda held, x: held.at[:, places].set(x), memory.replay, new)
    written = memory.written + num_envs
    # Once full it stays below 2 size, so that it never overflows; modulo the size it is unchanged.
    written = jnp.where(written < 2 * size, written, written - size)
    together = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), new, old)
    return Memory(reward_filter, replay, written), together


def minibatch_of(args: Args, unrolls: Unrolls, games: jax.Array, key: jax.Array | None) -> tuple[Inputs, Batch]:
    """The unrolls of games int32 [B], batch axis first; without a key, without augmentation and dropout."""
    chex.assert_tree_shape_prefix(unrolls.batch, unrolls.batch.done.shape)  # an index beyond an end would be no error
    steps = jnp.arange(args.num_steps + 1)
    time, env = steps[None, :-1], games[:, None]

    def keys_of(game):
        return devices.keys_of(jax.random.fold_in(key, game), steps[:-1])

    inputs = Inputs(
        frames=unrolls.frames.stack(steps[None], env),
        first=unrolls.frames.first[steps[None], env],
        core=jax.tree.map(lambda x: x[0, games], unrolls.core),
        keys=jax.vmap(keys_of)(games) if key is not None and (args.augment or args.dropout) else None,
    )
    return inputs, jax.tree.map(lambda x: x[time, env], unrolls.batch)


def judge_all(args: Args, agent: Agent, params: dict, unrolls: Unrolls, *, gamma) -> Unrolls:
    """The unrolls and what V-trace makes of them by these parameters, advantages normalised over all."""

    def some(games):
        inputs, batch = minibatch_of(args, unrolls, games, None)
        return judge(args, *forward(agent, params, inputs, inputs.frames[:, :-1]), batch, gamma=gamma)

    done = unrolls.batch.done
    games = jnp.arange(done.shape[1]).reshape(args.num_minibatches, -1)  # in no more memory than a minibatch takes
    judged = jax.tree.map(lambda x: x.reshape(-1, len(done)).T, jax.lax.map(some, games))
    mean, var = shaping.masked_moments(judged.advantages, ~done)
    judged = judged._replace(advantages=(judged.advantages - mean) / jnp.sqrt(var + 1e-8))
    return unrolls._replace(batch=unrolls.batch._replace(judged=judged))


def optimize(args: Args, agent: Agent, state: TrainState, unrolls: Unrolls, *, learning_rate, ent_coef, gamma, key):
    """Epochs of minibatches; returns parameters, the optimiser's state and the last epoch's mean metrics."""
    tx = make_optimizer(args)
    if args.clip_coef:
        unrolls = judge_all(args, agent, state.params, unrolls, gamma=gamma)
    objective = partial(loss, args, agent, gamma=gamma, ent_coef=ent_coef)

    def minibatch(learner, key, games):
        params, opt_state = learner
        inputs, batch = minibatch_of(args, unrolls, games, key)
        grads, parts, _ = devices.gradient(objective, params, (inputs, batch), ~batch.done)
        grads = networks.add_l2(grads, params, args.l2)
        direction, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, jax.tree.map(lambda d: -learning_rate * d, direction))
        return (params, opt_state), parts | {"grad_norm": devices.norm(grads)}

    def epoch(learner, key):
        shuffle_key, sample_key = jax.random.split(key)
        games = unrolls.batch.done.shape[1]
        order = jax.random.permutation(devices.own_key(shuffle_key), games).reshape(args.num_minibatches, -1)
        sample_key = devices.own_key(sample_key)
        learner, parts = jax.lax.scan(lambda learner, games: minibatch(learner, sample_key, games), learner, order)
        return learner, jax.tree.map(jnp.mean, parts)

    keys = jax.random.split(key, args.update_epochs)
    (params, opt_state), parts = jax.lax.scan(epoch, (state.params, state.opt_state), keys)
    return params, opt_state, jax.tree.map(lambda x: x[-1], parts)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
@devices.spread([SAME, STEPS], (SAME, SAME))
def update(args: Args, agent: Agent, state: TrainState, unrolls: Unrolls) -> tuple[TrainState, dict]:
    """One IMPALA update: returns the next state and metrics, float32 [].

    The losses are means of the last epoch, over replayed unrolls too: rho and approx_kl measure how far the policy has
    moved since an unroll was played, this update's own steps included.
    """
    learning_rate, ent_coef, gamma = (
        runs.parse_schedule(text)(state.global_step) for text in (args.learning_rate, args.ent_coef, args.gamma)
    )
    key, shuffle_key = jax.random.split(state.key)
    new = args.num_envs // devices.size()  # of this device's unrolls, those that were not replayed
    params, opt_state, parts = optimize(
        args, agent, state, unrolls, learning_rate=learning_rate, ent_coef=ent_coef, gamma=gamma, key=shuffle_key
    )
    variance = parts.pop("target_square") - parts.pop("target") ** 2
    unexplained = parts.pop("value_error_square") - parts.pop("value_error") ** 2
    metrics = {f"losses/{name}": value for name, value in parts.items()} | {
        "losses/explained_variance": 1 - unexplained / jnp.maximum(variance, 1e-8),
        "losses/param_norm": devices.norm(params),  # infinite where the last step went wrong
        "charts/learning_rate": learning_rate,
        "charts/ent_coef": ent_coef,
        "charts/gamma": gamma,
    }
    state = state._replace(
        params=params,
        opt_state=opt_state,
        key=key,
        global_step=state.global_step + devices.total((~unrolls.batch.done[:, :new]).sum()),
        updates=state.updates + 1,
    )
    return state, metrics


# EVALUATION


@partial(jax.jit, static_argnums=(0, 1))
@devices.spread([SAME, GAMES, GAMES, GAMES, GAMES], (GAMES, GAMES), every_host=False)
def choose(args: Args, agent: Agent, params: dict, frames: jax.Array, age: jax.Array, keys: jax.Array, core):
    """Draws actions int32 [N] from the policy for stacked frames uint8 [N, 64, 64, C], steps since each episode's first
    frame int32 [N], and keys uint32 [N, 2]; returns them and the next core, the policy's memory."""
    logits, core = policy(agent, params, frames, age == 0, core)
    return jax.vmap(jax.random.categorical)(keys, logits), core


def make_policy(args: Args, agent: Agent, params: dict) -> Callable:
    """A policy as `envs.play_episodes` calls it."""
    start = partial(networks.initial_core, args.core, args.hidden)
    return envs.as_recurrent_policy(partial(choose, args, agent, params), start)


def trained(args: Args, agent: Agent, run_dir: str) -> dict:
    """What evaluation needs of a run's newest checkpoint, or of an agent that `evaluate.py --export` wrote."""
    return agents.load(run_dir, partial(initial_state, args, agent), lambda state: {"params": state.params})


# MAIN


def initial(args: Args, agent: Agent) -> dict:
    """All that a resume needs besides the actors and their games; `main` saves the same."""
    return {"state": initial_state(args, agent), "memory": initial_memory(args)}


def make_fleet(args: Args, agent: Agent) -> actors.Fleet:
    return actors.make_fleet(args, partial(collect, args, agent), partial(initial_carry, args))


def kept(args: Args, agent: Agent) -> tuple:
    """What a run keeps, for `runs.check_memory`."""
    carry = initial_carry(args, devices.games_of_host(args))
    rollouts = (begin_rollout(args, carry, 0),) * (args.max_lag + 1)  # learnt from, waiting or played
    hosts = devices.hosts(args)
    memory = initial_memory(replace(args, num_envs=args.num_envs // hosts, replay_size=args.replay_size // hosts))
    return initial_state(args, agent), memory, rollouts


def main(args: Args) -> runs.Run:
    """Trains; returns the run, finished or stopped by a signal (`run.stop`)."""
    runs.check_args(args, SCRIPT)
    agent = make_agent(args)
    names = ("num_envs", "num_steps", "max_lag", "hidden") + (("replay_size",) if args.replay_fraction else ())
    runs.check_memory(args, names, jax.eval_shape(partial(kept, args, agent)))

    load = partial(runs.load, partial(initial, args, agent))
    with runs.Run(args, SCRIPT, load) as run, make_fleet(args, agent) as fleet:
        episodes, watch = envs.EpisodeStatistics(len(devices.games_of_host(args))), runs.Stopwatch()
        saved = run.saved
        state = devices.share(args, saved["state"] if saved else devices.run_once(initial_state, args, agent), SAME)
        if saved:
            memory = saved.pop("memory")  # large: not to lie there twice
            if int(saved["run"]["devices"]) != devices.mesh(args).size:
                memory = memory._replace(written=np.int32(0))  # of other parts of the buffer, some never written
            memory = devices.share(args, memory, MEMORY)
        else:  # each device makes its own part
            memory = jax.jit(partial(initial_memory, args), out_shardings=devices.shardings(args, MEMORY))()
        step, params = int(state.global_step), devices.here(args, state.params)
        if saved and "fleet" in saved:  # there are as many hosts as there were
            episodes.restore(saved["episodes"])
            fleet.restore(saved["fleet"], params, run)

        def save():
            run.save(step, {"state": state, "memory": memory}, {"fleet": fleet.save(), "episodes": episodes.save()})

        if not run.over(step):
            fleet.start(int(state.updates), params)
        while True:
            envs.evaluate_if_due(args, run, step, make_policy(args, agent, params))
            if run.over(step):
                break
            with watch("waiting"):
                items = fleet.take(run, save)
            if items is None:
                break
            i = int(state.updates)
            with watch("transfer"):
                rollouts, steps = zip(*(item.unroll for item in items), strict=True)
                given = devices.join(args, (rollouts, steps), ((ROLLOUT,) * len(items), (envs.STEPS,) * len(items)))
                memory, unrolls = jax.block_until_ready(remember(args, memory, *given, step, i))
            with watch("update"):
                state, metrics = update(args, agent, state, unrolls)
                metrics = jax.device_get(metrics)
            step, params = int(state.global_step), devices.here(args, state.params)
            fleet.publish(i + 1, params)
            episodes.add(envs.join_games(steps, axis=-1))
            metrics |= fleet.metrics(i, items) | episodes.metrics() | watch.fractions()
            metrics["charts/return_std"] = np.sqrt(memory.reward_filter.var)
            run.check_finite(step, metrics)
            metrics["charts/SPS"] = run.steps_per_second(step)
            run.log(step, metrics)
            if run.checkpoint_due(step):
                save()
        save()
        fleet.check()  # one that failed after the last unrolls were taken
    return run


if __name__ == "__main__":
    runs.cli(Args, main)
