"""IMPALA on Procgen: actor threads play with older parameters, and V-trace corrects for this policy lag.

Espeholt et al. 2018 (arXiv 1802.01561), with the settings of a 2020 Procgen competition entry as defaults: unrolls
of 200 steps, three epochs over each batch, and the same network on the same frames as ppo_procgen.py. Try:

    python impala_procgen.py --env-id bigfish
    python impala_procgen.py --env-id coinrun --num-actors 4 --num-envs 256 --num-steps 32 --update-epochs 1
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from jax.sharding import Mesh

from common import actors, agents, augment, devices, envs, multihost, networks, runs
from common.actors import Unroll
from common.devices import ENV_SHARDED, REPLICATED, TIME_ENV_SHARDED
from common.files import check
from common.flags import (
    Iterations,
    NonNegativeFloat,
    NonNegativeSchedule,
    PositiveFloat,
    PositiveInt,
    Size,
    StepCount,
    UnitInterval,
    UnitSchedule,
)
from common.rewards import (
    RETURN_FILTER_SPECS,
    NormalizeArgs,
    ReturnFilter,
    init_return_filter,
    masked_moments,
    prepare_rewards,
)

SCRIPT = Path(__file__).stem


@dataclass(frozen=True)
class Args(
    envs.GameArgs, NormalizeArgs, networks.EncoderArgs, augment.AugmentArgs, augment.DracArgs,
    actors.FleetArgs, runs.RunArgs,
):  # fmt: skip
    total_timesteps: StepCount = 8_000_000
    """total number of environment steps"""
    num_envs: Size = 16
    num_steps: PositiveInt = 200
    """steps per environment in an unroll; an update learns from a new unroll of every environment"""
    num_minibatches: PositiveInt = 2
    """number of minibatches per epoch, each of whole unrolls"""
    update_epochs: Iterations = 3
    """epochs over each batch"""
    update_pieces: PositiveInt = 1
    """split each update into this many programs; actors that share the learner's GPU act between them"""
    replay_fraction: Annotated[float, Interval(ge=0, le=0.95)] = 0.0
    """fraction of each batch that is older unrolls, drawn from a buffer and added to the new ones; 0 for no buffer"""
    replay_size: PositiveInt = 128
    """unrolls that the buffer holds, each of one environment, on the device (2.4 MiB each at 200 steps)"""
    learning_rate: NonNegativeSchedule = "0:1e-4,1000000:5e-4,8000000:1e-4"
    """learning rate: a number, or "step:value,..." in environment steps, linear between, never rescaled"""
    gamma: UnitSchedule = "0.99"
    """discount: a number, or a schedule like the learning rate's"""
    rho_bar: PositiveFloat = 1.0
    """V-trace: clip each temporal difference's importance ratio; lower moves values towards the behaviour policy's"""
    c_bar: NonNegativeFloat = 1.0
    """V-trace: clip the importance ratios of the traces; affects speed, not the fixed point (paper: at most rho_bar)"""
    pg_rho_bar: PositiveFloat = 1.0
    """V-trace: clip the importance ratio that weights the policy gradient's advantages"""
    vtrace_lambda: UnitInterval = 1.0
    """V-trace: decay of later temporal differences, as in TD(lambda)"""
    clip_coef: NonNegativeFloat = 0.0
    """clip PPO's ratio to 1 +- this, with V-trace once per update; 0: the paper's loss, V-trace in each minibatch"""
    vf_coef: NonNegativeFloat = 0.5
    """coefficient of the value loss, half the mean squared error"""
    ent_coef: NonNegativeSchedule = "0.01"
    """coefficient of the entropy bonus: a number, or a schedule like the learning rate's"""
    max_grad_norm: NonNegativeFloat = 0.5
    """maximum global norm of the gradient (of the mean over a minibatch); 0 for no clipping"""
    optimizer: Literal["adam", "rmsprop"] = "adam"
    """Adam, as the competition entry, or the paper's RMSProp (decay 0.99), but with bias correction"""
    adam_eps: PositiveFloat = 1e-8
    """epsilon of Adam, or of RMSProp (there within the square root)"""
    l2: NonNegativeFloat = 0.0
    """coefficient of the L2 penalty, the squared norm of all convolution kernels (not part of the logged loss)"""
    core: Literal["none", "lstm", "gru"] = "none"
    """recurrent core between encoder and heads; its gradient goes through whole unrolls"""

    @property
    def pieces_per_epoch(self) -> int:
        """How many of an update's pieces share an epoch; 1 if each has whole epochs."""
        return max(self.update_pieces // self.update_epochs, 1)

    def check(self) -> None:
        """Raises UsageError for inconsistent flags; the inherited groups check their own."""
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
        pieces, epochs = self.update_pieces, self.update_epochs
        check(
            epochs % pieces == 0 or (pieces % epochs == 0 and self.num_minibatches % (pieces // epochs) == 0),
            f"--update-pieces {pieces}: must divide --update-epochs, {epochs}, or be {epochs} x a divisor of "
            f"--num-minibatches, {self.num_minibatches}",
        )
        if self.replay_fraction:
            one, most = 1 / (self.num_envs + 1), 2**24 // self.num_steps
            check(
                replayed > 0, f"--replay-fraction {self.replay_fraction}: give 0, or {one:.2g} for one unroll, or more"
            )
            check(
                self.num_envs <= self.replay_size <= most,
                f"--replay-size {self.replay_size}: must be from {self.num_envs} (an unroll per environment) to {most}",
            )

    def sharded_sizes(self) -> dict[str, int]:
        """The sizes that are divided among the learner devices, by their descriptions."""
        replayed = num_replayed(self)
        batch = self.num_envs + replayed
        shares = {
            "an actor's environments, --num-envs / --num-actors": self.num_envs // self.num_actors,
            "a minibatch's unrolls": batch // self.num_minibatches,
        }
        return shares | ({"the replayed unrolls": replayed, "--replay-size": self.replay_size} if replayed else {})


def num_replayed(args: Args) -> int:
    """The number of unrolls in a batch that are drawn from the replay buffer."""
    return round(args.num_envs * args.replay_fraction / (1 - args.replay_fraction))


# NETWORK


class Agent(nn.Module):
    """An encoder, a recurrent core, and policy and value heads."""

    encoder: nn.Module
    core: networks.Recurrent
    dropout: float

    def setup(self):
        # "highest": no TF32 on a GPU. The small gain makes the first policy nearly uniform.
        dense = partial(nn.Dense, precision="highest")
        self.policy = dense(envs.NUM_ACTIONS, kernel_init=nn.initializers.orthogonal(0.01))
        self.value = dense(1, kernel_init=nn.initializers.orthogonal(1.0))

    def encode(self, frames: jax.Array, keys: jax.Array | None = None) -> jax.Array:
        """Frames uint8 [B, 64, 64, C] and dropout keys uint32 [B, 2] -> features float32 [B, hidden]."""
        return networks.dropout(self.encoder(frames), keys, self.dropout)

    def decode(self, x: jax.Array, is_first: jax.Array, hidden_state: networks.HiddenState):
        """Features [B, S, hidden] of S steps, whether each is its episode's first [B, S], and the hidden state before
        them -> logits float32 [B, S, 15], values float32 [B, S], and the hidden state after them."""
        x, hidden_state = self.core(x, is_first, hidden_state)
        return self.policy(x), self.value(x)[..., 0], hidden_state

    def __call__(self, frames: jax.Array, is_first: jax.Array, hidden_state: networks.HiddenState):
        """Frames [B, 64, 64, C] of one step, for `init` and `forward`'s last value. Modules not called here get no
        parameters."""
        return self.decode(self.encode(frames)[:, None], is_first[:, None], hidden_state)


def make_agent(args: Args) -> Agent:
    """The network that these flags describe."""
    return Agent(networks.make_encoder(args), networks.Recurrent(args.core, args.hidden), args.dropout)


def policy_logits(agent: Agent, params: dict, frames: jax.Array, is_first: jax.Array, hidden_state):
    """Logits [N, 15] and the next hidden state for stacked frames [N, 64, 64, C] of one step."""
    features = devices.map_in_chunks(partial(agent.apply, params, method="encode"), frames)
    logits, _, hidden_state = agent.apply(params, features[:, None], is_first[:, None], hidden_state, method="decode")
    return logits[:, 0], hidden_state


# TRAINING STATE


class TrainState(NamedTuple):
    """State of the learner."""

    params: dict
    opt_state: optax.OptState
    key: jax.Array
    global_step: jax.Array  # int32 []: transitions learnt from, without those replayed
    updates: jax.Array  # int32 []: the version of the parameters, and the index of the rollouts to learn from next


class VTraceOutput(NamedTuple):
    """V-trace's results for each step, behind a stop-gradient: float32 [T, N] for a batch, [B, T] for a minibatch."""

    targets: jax.Array  # of the value loss
    advantages: jax.Array  # of the policy gradient, not yet weighted; in `Batch.old_targets` normalised
    weights: jax.Array  # importance weights of the advantages: ratios clipped at pg_rho_bar, 0 for junk steps
    log_prob: jax.Array  # of the action, under the learner's policy


class Batch(NamedTuple):
    """Steps to learn from: [T, N] for a batch, [B, T] for a minibatch of B unrolls."""

    actions: jax.Array  # int32
    logits: jax.Array  # float32 [..., 15], of the behaviour policy
    rewards: jax.Array  # float32
    terminated: jax.Array  # bool: the transition ended the episode, not by a time limit
    is_reset: jax.Array  # bool: a junk step, no transition: frame t is an episode's last, t + 1 the next one's first
    old_targets: VTraceOutput | None = None  # with clip_coef: V-trace by the parameters before the update


class UnrollBatch(NamedTuple):
    """Unrolls of N environments, which are axis 1 of all arrays."""

    frames: envs.Frames  # of T + 1 steps
    hidden_state: networks.HiddenState  # [1, N, hidden], before the first step
    batch: Batch


class LearnerBuffers(NamedTuple):
    """The learner's reward filter and replay buffer, kept between updates."""

    reward_filter: ReturnFilter
    replay: UnrollBatch | None  # N = replay_size; rewards (as processed when new) and hidden states stay as recorded
    written: jax.Array  # int32 []: unrolls written to each device's part of the replay, kept below 2 x its size


BUFFER_SPECS = devices.partition_specs(LearnerBuffers, reward_filter=RETURN_FILTER_SPECS, replay=TIME_ENV_SHARDED)


def make_optimizer(args: Args) -> optax.GradientTransformation:
    """Adam or RMSProp without the learning rate: `optimize` multiplies updates by -learning_rate, from a schedule."""
    clip = devices.clip_by_global_norm(args.max_grad_norm)
    if args.optimizer == "rmsprop":
        return optax.chain(clip, optax.scale_by_rms(decay=0.99, eps=args.adam_eps, bias_correction=True))
    return optax.chain(clip, optax.scale_by_adam(eps=args.adam_eps))


def init_state(args: Args, agent: Agent) -> TrainState:
    """The learner's state before its first update, from `args.seed`."""
    key, init_key = jax.random.split(jax.random.PRNGKey(args.seed))
    frames = jnp.zeros((1, 64, 64, 3 * len(args.stack_offsets)), jnp.uint8)
    params = agent.init(init_key, frames, jnp.ones(1, bool), networks.init_hidden_state(args.core, args.hidden, 1))
    return TrainState(
        params=params,
        opt_state=make_optimizer(args).init(params),
        key=key,
        global_step=jnp.int32(0),
        updates=jnp.int32(0),
    )


def init_buffers(args: Args) -> LearnerBuffers:
    """The buffers before the first update."""
    replay = empty_unrolls(args, args.replay_size) if args.replay_fraction else None
    return LearnerBuffers(init_return_filter(args.num_envs), replay, jnp.int32(0))


def empty_unrolls(args: Args, num_envs: int) -> UnrollBatch:
    """Unrolls of `num_envs` environments, all zeros."""
    shape = (args.num_steps, num_envs)
    history = envs.empty_history(num_envs, args.stack_offsets)
    return UnrollBatch(
        frames=envs.Frames.after(history, args.num_steps + 1, args.stack_offsets),
        hidden_state=jax.tree.map(lambda x: x[None], networks.init_hidden_state(args.core, args.hidden, num_envs)),
        batch=Batch(
            actions=jnp.zeros(shape, jnp.int32),
            logits=jnp.zeros((*shape, envs.NUM_ACTIONS)),
            rewards=jnp.zeros(shape),
            terminated=jnp.zeros(shape, bool),
            is_reset=jnp.zeros(shape, bool),
        ),
    )


def init_env_state(args: Args, env_ids: jax.Array) -> envs.EnvState:
    """The state before the first step of the environments env_ids int32 [n]."""
    hidden_state = networks.init_hidden_state(args.core, args.hidden, len(env_ids))
    return envs.init_env_state(env_ids, args.stack_offsets, hidden_state)


# ROLLOUT


class Rollout(NamedTuple):
    """T steps of an actor's n environments, collected on its device."""

    frames: envs.Frames  # of T + 1 steps
    actions: jax.Array  # int32 [T, n]
    logits: jax.Array  # float32 [T, n, 15]
    initial_hidden_state: networks.HiddenState
    env_state: envs.EnvState  # after the last step; `envs.end_rollout` sets its history
    key: jax.Array
    t: jax.Array  # int32 []


ROLLOUT_SPECS = devices.partition_specs(
    Rollout,
    frames=TIME_ENV_SHARDED,
    actions=TIME_ENV_SHARDED,
    logits=TIME_ENV_SHARDED,
    initial_hidden_state=ENV_SHARDED,
    env_state=envs.ENV_STATE_SPECS,
)


def begin_rollout(args: Args, env_state: envs.EnvState, i: int) -> Rollout:
    """An actor's i-th rollout, before its first step."""
    shape = (args.num_steps, len(env_state.env_ids))
    return Rollout(
        frames=envs.Frames.after(env_state.history, args.num_steps + 1, args.stack_offsets),
        actions=jnp.zeros(shape, jnp.int32),
        logits=jnp.zeros((*shape, envs.NUM_ACTIONS)),
        initial_hidden_state=env_state.hidden_state,
        env_state=env_state,
        key=jax.random.fold_in(jax.random.PRNGKey(envs.derive_seed(args.seed, 0)), i),
        t=jnp.int32(0),
    )


def act(args: Args, agent: Agent, params: dict, rollout: Rollout, obs: jax.Array, episode_step: jax.Array):
    """Chooses actions for obs uint8 [n, 3, 64, 64] and episode_step int32 [n]; returns the rollout and actions [n]."""
    t, env_state = rollout.t, rollout.env_state
    frames = rollout.frames.write(t, obs, episode_step)
    logits, hidden_state = policy_logits(agent, params, frames.stack(t), episode_step == 0, env_state.hidden_state)
    policy_keys, sticky_keys = envs.step_keys(rollout.key, t, env_state.env_ids)
    actions = jax.vmap(jax.random.categorical)(policy_keys, logits)
    played = envs.apply_sticky_actions(sticky_keys, args.sticky_actions, actions, env_state.last_action, episode_step)
    rollout = rollout._replace(
        frames=frames,
        actions=rollout.actions.at[t].set(actions),  # as chosen: sticky actions belong to the environment
        logits=rollout.logits.at[t].set(logits),
        env_state=env_state._replace(last_action=played, hidden_state=hidden_state),
        t=t + 1,
    )
    return rollout, played


def make_collect(args: Args, agent: Agent) -> Callable:
    """Returns collect(vec_env, params, env_state, *, i, watch, check_stop) -> Unroll, EnvState, which `actors.Fleet`
    calls in an actor's thread: it plays the i-th rollout on the device of the parameters."""
    begin = jax.jit(partial(begin_rollout, args))
    step = jax.jit(partial(act, args, networks.acting_agent(agent)), donate_argnums=1)
    end = jax.jit(partial(envs.end_rollout, args), donate_argnums=0)

    def collect(vec_env: envs.ReplayableVecEnv, params: dict, env_state: envs.EnvState, *, i, watch, check_stop):
        params = networks.acting_params(agent, params)  # cast to the encoder's dtype, once for all steps
        rollout = begin(env_state, i)

        def choose_actions(obs, episode_step):
            nonlocal rollout
            rollout, actions = step(params, rollout, obs, episode_step)
            return actions

        timesteps = vec_env.play(choose_actions, args.num_steps, watch, check_stop)
        rollout = end(rollout, vec_env.obs, vec_env.episode_step)
        return Unroll(rollout, timesteps), rollout.env_state

    return collect


# THE LEARNER'S BATCH


def assemble_batch(
    args: Args,
    buffers: LearnerBuffers,
    rollouts: Sequence[Rollout],
    timesteps: Sequence[envs.Timesteps],
    step: jax.Array,
    i: jax.Array,
) -> tuple[LearnerBuffers, UnrollBatch]:
    """Joins the actors' i-th rollouts and timesteps [T, n] and prepares their rewards, with the discount at environment
    step `step`; returns the buffers and the update's unrolls, the new ones first, then those replayed."""
    gamma, timesteps = runs.parse_schedule(args.gamma)(step), envs.join_envs(timesteps, axis=-1)
    reward_filter, rewards = prepare_rewards(args, buffers.reward_filter, timesteps, gamma)
    frames, actions, logits = envs.join_envs([(r.frames, r.actions, r.logits) for r in rollouts], axis=1)
    hidden_state = envs.join_envs([jax.tree.map(lambda x: x[None], r.initial_hidden_state) for r in rollouts], axis=1)
    batch = Batch(actions, logits, rewards, timesteps.terminated, timesteps.is_reset)
    buffers, unrolls = buffers._replace(reward_filter=reward_filter), UnrollBatch(frames, hidden_state, batch)
    return add_replayed(args, buffers, unrolls, i) if args.replay_fraction else (buffers, unrolls)


def add_replayed(args: Args, buffers: LearnerBuffers, new: UnrollBatch, i: jax.Array):
    """Draws older unrolls from the replay, uniformly and with replacement, then writes the new ones to it; returns the
    buffers, and both together."""
    key = devices.fold_in_axis_index(jax.random.fold_in(jax.random.PRNGKey(envs.derive_seed(args.seed, 1)), i))
    num_envs, size = new.batch.is_reset.shape[1], args.replay_size // devices.axis_size()  # of this device
    filled = jnp.minimum(buffers.written, size)
    is_empty = filled == 0  # nothing is written yet: draw from the new ones
    index = jax.random.randint(key, num_replayed(args) // devices.axis_size(), 0, jnp.where(is_empty, num_envs, filled))
    old = jax.tree.map(lambda x, stored: jnp.where(is_empty, x[:, index], stored[:, index]), new, buffers.replay)
    slots = (buffers.written + jnp.arange(num_envs)) % size
    replay = jax.tree.map(lambda stored, x: stored.at[:, slots].set(x), buffers.replay, new)
    written = buffers.written + num_envs
    # Once the replay is full, `written` stays from size to 2 size - 1: still full, and it never overflows.
    written = jnp.where(written < 2 * size, written, written - size)
    unrolls = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), new, old)
    return LearnerBuffers(buffers.reward_filter, replay, written), unrolls


def make_assemble_batch(args: Args, mesh: Mesh) -> Callable:
    """Returns the jitted assemble_batch(buffers, rollouts, timesteps, step, i), which donates the buffers."""
    rollout_specs, timestep_specs = (ROLLOUT_SPECS,) * args.num_actors, (envs.TIMESTEP_SPECS,) * args.num_actors
    return jax.jit(
        jax.shard_map(
            partial(assemble_batch, args),
            mesh=mesh,
            in_specs=(BUFFER_SPECS, rollout_specs, timestep_specs, REPLICATED, REPLICATED),
            out_specs=(BUFFER_SPECS, TIME_ENV_SHARDED),
            check_vma=False,
        ),
        donate_argnums=0,
    )


# ALGORITHM


def vtrace(log_ratio, rewards, values, terminated, is_reset, *, gamma, rho_bar, c_bar, pg_rho_bar, vtrace_lambda):
    """V-trace of one sequence (Espeholt et al. 2018, equation 1 and section 4.2).

    Args:
      log_ratio: float32 [T], log of the learner's over the actor's probability of the action.
      rewards: float32 [T], terminated: bool [T], of the transition from step t to t + 1.
      values: float32 [T + 1], the learner's.
      is_reset: bool [T], junk steps, which show an episode's last frame. Their ratio counts as 0: their target is their
        value, which bootstraps a truncated episode, and nothing of the next episode comes through.
      gamma, rho_bar, c_bar, pg_rho_bar, vtrace_lambda: float32 [].

    Returns float32 [T] each: the values' targets, the policy gradient's advantages, and their importance weights.
    """
    chex.assert_rank([log_ratio, rewards, values, terminated, is_reset], 1)
    chex.assert_equal_shape([log_ratio, rewards, values[1:], terminated, is_reset])
    ratio = jnp.where(is_reset, 0.0, jnp.exp(log_ratio))
    discounts = gamma * (1.0 - terminated)
    deltas = jnp.minimum(rho_bar, ratio) * (rewards + discounts * values[1:] - values[:-1])
    decays = discounts * vtrace_lambda * jnp.minimum(c_bar, ratio)

    def backward(correction, step):  # remark 1: v_s - V(x_s), recursively
        delta, decay = step
        correction = delta + decay * correction
        return correction, correction

    steps = deltas, decays
    targets = values[:-1] + jax.lax.scan(backward, jnp.float32(0), steps, reverse=True, unroll=devices.scan_unroll())[1]
    # The paper's next target is targets[1:], the same for lambda 1. This is rlax's: on-policy, advantages are GAE's.
    next_targets = jnp.append(vtrace_lambda * targets[1:] + (1 - vtrace_lambda) * values[1:-1], values[-1])
    return targets, rewards + discounts * next_targets - values[:-1], jnp.minimum(pg_rho_bar, ratio)


class Inputs(NamedTuple):
    """Network inputs of a minibatch of B unrolls."""

    frames: jax.Array  # uint8 [B, T + 1, 64, 64, C]; the last is the one after the last step
    is_first: jax.Array  # bool [B, T + 1]: whether a frame is its episode's first
    hidden_state: networks.HiddenState  # before the first step, [B, hidden]
    keys: jax.Array | None  # uint32 [B, T, 2], for augmentation and dropout


def action_log_prob(log_probs: jax.Array, actions: jax.Array) -> jax.Array:
    """The log-probability float32 [...] of each action int32 [...], from those of all actions [..., 15]."""
    return jnp.take_along_axis(log_probs, actions[..., None], axis=-1)[..., 0]


def vtrace_targets(args: Args, log_probs: jax.Array, values: jax.Array, batch: Batch, *, gamma) -> VTraceOutput:
    """V-trace of B unrolls, from the learner's log-probabilities float32 [B, T, 15] and values [B, T + 1]."""
    chex.assert_equal_shape([log_probs, batch.logits])
    chex.assert_equal_shape([values[:, 1:], batch.actions, batch.rewards, batch.terminated, batch.is_reset])
    log_prob = action_log_prob(log_probs, batch.actions)
    log_ratio = log_prob - action_log_prob(jax.nn.log_softmax(batch.logits), batch.actions)
    clips = {"rho_bar": args.rho_bar, "c_bar": args.c_bar, "pg_rho_bar": args.pg_rho_bar}
    targets, advantages, weights = jax.vmap(partial(vtrace, gamma=gamma, vtrace_lambda=args.vtrace_lambda, **clips))(
        log_ratio, batch.rewards, values, batch.terminated, batch.is_reset
    )
    return jax.lax.stop_gradient(VTraceOutput(targets, advantages, weights, log_prob))


def impala_loss_terms(
    args: Args, log_probs: jax.Array, values: jax.Array, batch: Batch, *, gamma
) -> dict[str, jax.Array]:
    """The terms of IMPALA's loss (Espeholt et al. 2018, section 4.2) per sample, float32 [B, T].

    Args:
      log_probs: float32 [B, T, 15], of the current policy.
      values: float32 [B, T + 1].
      batch: [B, T].
    """
    log_prob, acting_log_probs = action_log_prob(log_probs, batch.actions), jax.nn.log_softmax(batch.logits)
    vtrace_output = batch.old_targets if args.clip_coef else vtrace_targets(args, log_probs, values, batch, gamma=gamma)
    weighted = vtrace_output.weights * vtrace_output.advantages
    if args.clip_coef:  # Schulman et al. 2017, equation 7
        update_ratio = jnp.exp(log_prob - vtrace_output.log_prob)
        ratio_clipped = jnp.clip(update_ratio, 1 - args.clip_coef, 1 + args.clip_coef)
        terms = {
            "policy_loss": -jnp.minimum(update_ratio * weighted, ratio_clipped * weighted),
            "clipfrac": (jnp.abs(update_ratio - 1) > args.clip_coef).astype(jnp.float32),
        }
    else:
        terms = {"policy_loss": -(weighted * log_prob)}
    value_error = values[:, :-1] - vtrace_output.targets
    ratio = jnp.exp(log_prob - action_log_prob(acting_log_probs, batch.actions))  # logged only
    # The last four are not logged: `finish_update` computes the explained variance from them.
    return terms | {
        "value_loss": 0.5 * value_error**2,
        "entropy": -(jnp.exp(log_probs) * log_probs).sum(axis=-1),
        "approx_kl": (jnp.exp(acting_log_probs) * (acting_log_probs - log_probs)).sum(axis=-1),  # exact; CleanRL's name
        "rho": jnp.minimum(args.rho_bar, ratio),
        "rho_clipfrac": (ratio > args.rho_bar).astype(jnp.float32),
        "value_error": value_error,
        "value_error_square": value_error**2,
        "target": vtrace_output.targets,
        "target_square": vtrace_output.targets**2,
    }


def forward(agent: Agent, params: dict, inputs: Inputs, frames: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities float32 [B, T, 15] and values [B, T + 1] for `frames` of T steps in place of the inputs' own.
    The last value only bootstraps: of the inputs' own last frame, without dropout, and a constant to the gradient."""
    shape = frames.shape[:2]
    frames, keys = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (frames, inputs.keys))
    features = devices.map_in_chunks(lambda x: agent.apply(params, *x, method="encode"), (frames, keys))
    features = features.reshape(*shape, -1)
    logits, values, hidden_state = agent.apply(
        params, features, inputs.is_first[:, :-1], inputs.hidden_state, method="decode"
    )
    last_value = agent.apply(params, inputs.frames[:, -1], inputs.is_first[:, -1], hidden_state)[1]
    values = jnp.concatenate([values, jax.lax.stop_gradient(last_value)], axis=1)
    return jax.nn.log_softmax(logits), values


def loss(args: Args, agent: Agent, params: dict, minibatch: tuple[Inputs, Batch], *, gamma, ent_coef):
    """IMPALA's loss, with DrAC's regulariser if the flags ask for it.

    Returns its terms per sample, float32 [B, T]; `devices.gradient` weights them (0 for junk steps), averages them over
    samples and devices and differentiates "loss"; `finish_update` logs the means. A term may depend on its own unroll
    only: on a CPU `loss` is called on one unroll at a time (several if they are short). Batch statistics belong in
    `assemble_batch` or, with --clip-coef, `precompute_targets`.
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
    terms = impala_loss_terms(args, log_probs, values, batch, gamma=gamma)
    total = terms["policy_loss"] + args.vf_coef * terms["value_loss"] - ent_coef * terms["entropy"]
    if args.augment and args.augment_mode == "drac":
        new_log_probs, new_values = forward(agent, params, inputs, augmented)
        terms["drac_loss"] = augment.drac_loss(log_probs, values[:, :-1], new_log_probs, new_values[:, :-1])
        total += args.drac_coef * terms["drac_loss"]
    return terms | {"loss": total}


def make_minibatch(args: Args, unrolls: UnrollBatch, index: jax.Array, key: jax.Array | None) -> tuple[Inputs, Batch]:
    """The unrolls at `index` int32 [B], batch axis first; with a key, also keys for augmentation and dropout."""
    # Of other shapes JAX would read wrong samples without an error: it clamps an index that is out of range.
    chex.assert_tree_shape_prefix(unrolls.batch, unrolls.batch.is_reset.shape)
    steps = jnp.arange(args.num_steps + 1)
    time, env = steps[None, :-1], index[:, None]

    def sample_keys(i):
        return devices.fold_in_ids(jax.random.fold_in(key, i), steps[:-1])

    inputs = Inputs(
        frames=unrolls.frames.stack(steps[None], env),
        is_first=unrolls.frames.is_first[steps[None], env],
        hidden_state=jax.tree.map(lambda x: x[0, index], unrolls.hidden_state),
        keys=jax.vmap(sample_keys)(index) if key is not None and (args.augment or args.dropout) else None,
    )
    return inputs, jax.tree.map(lambda x: x[time, env], unrolls.batch)


def precompute_targets(args: Args, agent: Agent, params: dict, unrolls: UnrollBatch, *, gamma) -> UnrollBatch:
    """Computes V-trace once for all epochs, by the parameters before the update, and normalises the advantages before
    they are weighted: subtracting their mean then changes no expected gradient where no ratio is clipped."""

    def minibatch_targets(index):
        inputs, batch = make_minibatch(args, unrolls, index, None)
        return vtrace_targets(args, *forward(agent, params, inputs, inputs.frames[:, :-1]), batch, gamma=gamma)

    is_reset = unrolls.batch.is_reset
    index = jnp.arange(is_reset.shape[1]).reshape(args.num_minibatches, -1)  # in no more memory than a minibatch takes
    output = jax.tree.map(lambda x: x.reshape(-1, len(is_reset)).T, jax.lax.map(minibatch_targets, index))
    mean, var = masked_moments(output.advantages, ~is_reset)
    output = output._replace(advantages=(output.advantages - mean) / jnp.sqrt(var + 1e-8))
    return unrolls._replace(batch=unrolls.batch._replace(old_targets=output))


def schedules(args: Args, step: jax.Array) -> tuple[jax.Array, ...]:
    """Learning rate, entropy coefficient and discount at an environment step, float32 []."""
    return tuple(runs.parse_schedule(text)(step) for text in (args.learning_rate, args.ent_coef, args.gamma))


def optimize(args: Args, agent: Agent, state: TrainState, unrolls: UnrollBatch, piece: int | jax.Array):
    """Runs piece `piece` of args.update_pieces of an update: whole epochs, or some minibatches of one epoch.

    Returns the state with new parameters, the batch with the V-trace targets of `clip_coef`, and the mean metrics of
    the piece's last epoch.
    """
    learning_rate, ent_coef, gamma = schedules(args, state.global_step)
    epochs = max(args.update_epochs // args.update_pieces, 1)  # in a piece
    minibatches = args.num_minibatches // args.pieces_per_epoch  # of an epoch, in a piece
    tx = make_optimizer(args)
    if args.clip_coef and unrolls.batch.old_targets is None:
        unrolls = precompute_targets(args, agent, state.params, unrolls, gamma=gamma)
    minibatch_loss = partial(loss, args, agent, gamma=gamma, ent_coef=ent_coef)

    def train_minibatch(carry, key, index):
        params, opt_state = carry
        inputs, batch = make_minibatch(args, unrolls, index, key)
        grads, means, _ = devices.gradient(minibatch_loss, params, (inputs, batch), ~batch.is_reset)
        grads = networks.add_l2(grads, params, args.l2)
        direction, opt_state = tx.update(grads, opt_state, params)
        params = optax.tree.add_scale(params, -learning_rate, direction)
        return (params, opt_state), means | {"grad_norm": devices.global_norm(grads)}

    def train_epoch(carry, key):
        shuffle_key, sample_key = jax.random.split(key)
        num_unrolls = unrolls.batch.is_reset.shape[1]  # on this device
        order = jax.random.permutation(devices.fold_in_axis_index(shuffle_key), num_unrolls)
        order = order.reshape(args.num_minibatches, -1)
        order = jax.lax.dynamic_slice_in_dim(order, piece % args.pieces_per_epoch * minibatches, minibatches)
        sample_key = devices.fold_in_axis_index(sample_key)
        carry, means = jax.lax.scan(lambda carry, index: train_minibatch(carry, sample_key, index), carry, order)
        return carry, jax.tree.map(jnp.mean, means)

    _, key = jax.random.split(state.key)  # the same in all pieces; `finish_update` replaces state.key
    keys = jax.random.split(key, args.update_epochs)
    keys = jax.lax.dynamic_slice_in_dim(keys, piece * args.update_epochs // args.update_pieces, epochs)
    (params, opt_state), means = jax.lax.scan(train_epoch, (state.params, state.opt_state), keys)
    return state._replace(params=params, opt_state=opt_state), unrolls.batch, jax.tree.map(lambda x: x[-1], means)


def finish_update(args: Args, state: TrainState, is_reset: jax.Array, means: list[dict]) -> tuple[TrainState, dict]:
    """The next TrainState and metrics, float32 [], from the means of the last epoch's pieces."""
    learning_rate, ent_coef, gamma = schedules(args, state.global_step)
    means = jax.tree.map(lambda *x: sum(x) / len(x), *means)
    target_var = means.pop("target_square") - means.pop("target") ** 2
    error_var = means.pop("value_error_square") - means.pop("value_error") ** 2
    metrics = {f"losses/{name}": value for name, value in means.items()} | {
        "losses/explained_variance": 1 - error_var / jnp.maximum(target_var, 1e-8),
        "losses/param_norm": devices.global_norm(state.params),  # not finite if the last step diverged
        "charts/learning_rate": learning_rate,
        "charts/ent_coef": ent_coef,
        "charts/gamma": gamma,
    }
    num_new = args.num_envs // devices.axis_size()  # this device's unrolls that are not replayed
    state = state._replace(
        key=jax.random.split(state.key)[0],
        global_step=state.global_step + devices.psum((~is_reset[:, :num_new]).sum()),
        updates=state.updates + 1,
    )
    return state, metrics


def update(args: Args, agent: Agent, state: TrainState, unrolls: UnrollBatch) -> tuple[TrainState, dict]:
    """One IMPALA update, on each device's part of the unrolls: returns the next TrainState and metrics, float32 [].

    Losses are means over the last epoch, replayed unrolls included. By then earlier minibatches have usually changed
    the policy that rho and approx_kl compare with the behaviour policy.
    """
    state, _, means = optimize(args, agent, state, unrolls, 0)
    return finish_update(args, state, unrolls.batch.is_reset, [means])


def make_update(args: Args, agent: Agent, mesh: Mesh) -> Callable:
    """Returns update(state, unrolls) -> TrainState, metrics, which donates the state: a jitted program, or several."""

    def jit(function, in_specs, out_specs):
        function = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return jax.jit(function, donate_argnums=0)

    state_and_metrics = REPLICATED, REPLICATED
    if args.update_pieces == 1:
        return jit(partial(update, args, agent), (REPLICATED, TIME_ENV_SHARDED), state_and_metrics)
    specs = REPLICATED, TIME_ENV_SHARDED, REPLICATED  # of the arguments, and of what `optimize` returns
    train = jit(partial(optimize, args, agent), specs, specs)
    finish = jit(partial(finish_update, args), specs, state_and_metrics)

    def update_in_pieces(state: TrainState, unrolls: UnrollBatch):
        means = []
        for piece in range(args.update_pieces):
            state, batch, piece_means = train(state, unrolls, piece)
            unrolls = unrolls._replace(batch=batch)
            # A GPU runs programs in the order of their launches: with all pieces queued, no actor would come between.
            means.append(jax.block_until_ready(piece_means))
        return finish(state, batch.is_reset, means[-args.pieces_per_epoch :])

    return update_in_pieces


# EVALUATION


def make_policy(args: Args, agent: Agent, mesh: Mesh) -> Callable:
    """Returns policy(params, ...), the policy that `envs.play_episodes` calls; it samples actions."""

    def sample_actions(params, frames, episode_step, keys, hidden_state):
        logits, hidden_state = policy_logits(agent, params, frames, episode_step == 0, hidden_state)
        return jax.vmap(jax.random.categorical)(keys, logits), hidden_state

    return envs.jit_policy(mesh, sample_actions, partial(networks.init_hidden_state, args.core, args.hidden))


def load_params(args: Args, agent: Agent, run_dir: str) -> dict:
    """{"params", "global_step"} of a run's newest checkpoint or an exported agent."""
    return agents.load(run_dir, partial(init_state, args, agent), lambda state: {"params": state.params})


# MAIN


def init_checkpoint(args: Args, agent: Agent) -> dict:
    """What a new run starts from; its checkpoints also hold the buffers, the actors and the episodes' statistics."""
    return {"state": init_state(args, agent)}


def load_checkpoint(args: Args, init_checkpoint: Callable, run_dir: str) -> dict:
    """Loads the newest checkpoint of a run, with the learner's buffers."""
    return runs.load(lambda: init_checkpoint() | {"buffers": init_buffers(args)}, run_dir)


def make_buffers(args: Args, mesh: Mesh, run: runs.Run) -> LearnerBuffers:
    """The checkpoint's buffers, or a new run's, of which each device makes its own part."""
    if not run.resumed:
        return jax.jit(partial(init_buffers, args), out_shardings=devices.shardings(mesh, BUFFER_SPECS))()
    buffers = run.checkpoint.pop("buffers")  # large: not to be kept twice
    if run.checkpoint["run"]["devices"] != mesh.size:  # a device would draw from parts that were never written
        buffers = buffers._replace(written=np.int32(0))
    return multihost.distribute(mesh, buffers, BUFFER_SPECS)


def main(args: Args) -> runs.Run:
    """Trains; returns the run, finished or stopped by a signal (`run.stop`)."""
    runs.check_args(args, SCRIPT)
    agent, mesh = make_agent(args), devices.make_mesh(args)
    collect, policy = make_collect(args, agent), make_policy(args, agent, mesh.local_mesh)
    assemble_batch, update = make_assemble_batch(args, mesh), make_update(args, agent, mesh)

    with (
        runs.Run(args, SCRIPT, mesh, partial(init_checkpoint, args, agent), partial(load_checkpoint, args)) as run,
        actors.make_fleet(args, collect, partial(init_env_state, args)) as fleet,
    ):
        episodes, watch = envs.EpisodeStatistics(len(devices.local_env_ids(args))), runs.Stopwatch()
        state = multihost.distribute(mesh, run.checkpoint["state"], REPLICATED)
        buffers = make_buffers(args, mesh, run)
        step, params = int(state.global_step), multihost.local_replica(mesh, state.params)
        if "fleet" in run.checkpoint:  # absent in a new run, or after the number of hosts changed
            episodes.restore(run.checkpoint["episodes"])
            fleet.restore(run.checkpoint["fleet"], params, run)

        def save():
            run.save(step, {"state": state, "buffers": buffers}, {"fleet": fleet.save(), "episodes": episodes.save()})

        if not run.finished(step):
            fleet.start(int(state.updates), params)
        while True:
            envs.evaluate_if_due(args, mesh, run, step, partial(policy, params))
            if run.finished(step):
                break
            with watch("waiting"):
                actor_batches = fleet.get(run, save)
            if actor_batches is None:
                break
            i = int(state.updates)
            with watch("transfer"):
                rollouts, timesteps = zip(*(batch.unroll for batch in actor_batches), strict=True)
                specs = (ROLLOUT_SPECS,) * len(rollouts), (envs.TIMESTEP_SPECS,) * len(timesteps)
                arrays = multihost.host_to_global(mesh, (rollouts, timesteps), specs)
                buffers, unrolls = jax.block_until_ready(assemble_batch(buffers, *arrays, step, i))
            with watch("update"):
                state, metrics = update(state, unrolls)
                metrics = jax.device_get(metrics)
            step, params = int(state.global_step), multihost.local_replica(mesh, state.params)
            fleet.publish(i + 1, params)
            episodes.add(envs.join_envs(timesteps, axis=-1))
            metrics |= fleet.metrics(i, actor_batches) | episodes.metrics() | watch.fractions()
            metrics["charts/return_std"] = np.sqrt(buffers.reward_filter.var)
            run.check_finite(step, metrics)
            metrics["charts/SPS"] = run.steps_per_second(step)
            run.log(step, metrics)
            if run.checkpoint_due(step):
                save()
        save()
        fleet.check()  # an actor may have failed after the last unrolls were taken
    return run


if __name__ == "__main__":
    runs.cli(Args, main)
