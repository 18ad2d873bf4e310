"""PPG on Procgen: phasic policy gradient, PPO with auxiliary phases that distil the value into the policy's network.

Cobbe et al. 2020 (arXiv 2009.04416), with most of its hyperparameters; network and frames are a 2020 Procgen
competition entry's, as in ppo_procgen.py. Try:

    python ppg_procgen.py --env-id bigfish
    python ppg_procgen.py --env-id coinrun --separate-value --num-levels 200
"""

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from common import agents, augment, devices, envs, networks, runs
from common.devices import ENV_SHARDED, REPLICATED, TIME_ENV_SHARDED
from common.files import check
from common.flags import (
    Iterations,
    NonNegativeFloat,
    NonNegativeSchedule,
    PositiveFloat,
    PositiveInt,
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
class Args(envs.GameArgs, NormalizeArgs, networks.EncoderArgs, augment.AugmentArgs, runs.RunArgs):
    # --resume refuses to change these: they determine the network, the stored rollouts' shapes, the place in a phase.
    FIXED: ClassVar = ("separate_value", "num_steps", "policy_iterations", "aux_epochs", "aux_minibatches")

    total_timesteps: StepCount = 25_000_000
    """total number of environment steps"""
    num_envs: PositiveInt = 64
    """number of parallel environments, over all devices"""
    num_steps: PositiveInt = 256
    """steps per environment in a rollout; the batch is num_envs x num_steps"""
    num_minibatches: PositiveInt = 8
    """number of minibatches per epoch of a policy phase"""
    update_epochs: Iterations = 1
    """epochs over each rollout in a policy phase (the paper's E_pi and E_V)"""
    policy_iterations: Iterations = 32
    """rollouts in a policy phase, all of which the next auxiliary phase learns from (N_pi)"""
    aux_epochs: Iterations = 6
    """epochs of an auxiliary phase over the policy phase's rollouts (E_aux)"""
    aux_minibatches: PositiveInt = 16
    """auxiliary minibatches per stored rollout, each of num_envs / aux_minibatches sequences of num_steps steps"""
    beta_clone: NonNegativeFloat = 1.0
    """coefficient of the KL divergence from the policy before an auxiliary phase"""
    separate_value: bool = False
    """separate networks for policy and value, as in the paper; else the value reads the policy's, without gradient"""
    learning_rate: NonNegativeSchedule = "5e-4"
    """Adam's learning rate in both phases: a number, or "step:value,..." in environment steps, linear between"""
    gamma: UnitSchedule = "0.999"
    """discount: a number, or a schedule like the learning rate's"""
    gae_lambda: UnitInterval = 0.95
    """lambda of generalised advantage estimation (GAE)"""
    clip_coef: PositiveFloat = 0.2
    """clip the probability ratio to 1 +- this"""
    vf_coef: NonNegativeFloat = 1.0
    """coefficient of the value loss in a policy phase, half the mean squared error"""
    ent_coef: NonNegativeSchedule = "0.01"
    """coefficient of the entropy bonus: a number, or a schedule like the learning rate's"""
    max_grad_norm: NonNegativeFloat = 0.0
    """maximum global norm of the gradient; 0 for no clipping"""
    adam_eps: PositiveFloat = 1e-8
    """Adam's epsilon"""

    checkpoint_every: PositiveInt = 400_000
    """environment steps between checkpoints, rounded up to the end of an auxiliary phase"""
    normalize_rewards: bool = True
    normalize_gamma: UnitInterval = 0.99  # as in the authors' and CleanRL's code, whose gamma is 0.999 too

    def check(self) -> None:
        """Raises UsageError for inconsistent flags; the inherited groups check their own."""
        runs.check_batch(self)
        check(not self.distributed, f"--distributed: {SCRIPT}.py trains on one host, on as many devices as it has")
        divide = f"must divide the number of environments, {self.num_envs}"
        check(self.num_envs % self.aux_minibatches == 0, f"--aux-minibatches {self.aux_minibatches}: {divide}")

    def sharded_sizes(self) -> dict[str, int]:
        """The sizes that are divided among the learner devices, by their descriptions."""
        size = self.num_envs // self.aux_minibatches
        return super().sharded_sizes() | {"an auxiliary minibatch, --num-envs / --aux-minibatches": size}


# NETWORK


class Agent(nn.Module):
    """A policy and an auxiliary value head on one encoder, and a value head on that or on an encoder of its own."""

    encoder: nn.Module
    value_encoder: nn.Module | None
    dropout: float

    @nn.compact
    def __call__(self, frames: jax.Array, keys: jax.Array | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Frames uint8 [B, 64, 64, C] and dropout keys uint32 [B, 2] -> logits float32 [B, 15], values float32 [B] and
        auxiliary values float32 [B]."""
        # "highest": no TF32 on a GPU. 0.1: the first policy is nearly uniform, the first values near 0.
        dense = partial(nn.Dense, precision="highest", kernel_init=nn.initializers.orthogonal(0.1))
        x = networks.dropout(self.encoder(frames), keys, self.dropout)
        value_features = self.value_encoder(frames) if self.value_encoder else jax.lax.stop_gradient(x)
        value = dense(1, name="value")(value_features)[:, 0]
        return dense(envs.NUM_ACTIONS, name="policy")(x), value, dense(1, name="aux_value")(x)[:, 0]


def make_agent(args: Args) -> Agent:
    """The network that these flags describe."""
    value_encoder = networks.make_encoder(args) if args.separate_value else None
    return Agent(networks.make_encoder(args), value_encoder, args.dropout)


def forward(agent: Agent, params: dict, frames: jax.Array, dropout_keys: jax.Array | None = None):
    """Logits [B, 15], values [B] and auxiliary values [B] for stacked frames [B, 64, 64, C]."""
    return devices.map_in_chunks(lambda x: agent.apply(params, *x), (frames, dropout_keys))


# TRAINING STATE


class TrainState(NamedTuple):
    """State of the learner."""

    params: dict
    opt_state: optax.OptState  # of policy phases
    aux_opt_state: optax.OptState  # of auxiliary phases
    key: jax.Array
    global_step: jax.Array  # int32 []: transitions learnt from
    updates: jax.Array  # int32 []: rollouts learnt from
    aux_updates: jax.Array  # int32 []: minibatches of auxiliary phases
    aux_terms: dict[str, jax.Array]  # float32 []: means of the auxiliary loss's terms over its latest epoch
    reward_filter: ReturnFilter


STATE_SPECS = devices.partition_specs(TrainState, reward_filter=RETURN_FILTER_SPECS)


def make_optimizer(args: Args) -> optax.GradientTransformation:
    """Adam without the learning rate: `optimize` and `aux_update` multiply its updates by -learning_rate."""
    return optax.chain(devices.clip_by_global_norm(args.max_grad_norm), optax.scale_by_adam(eps=args.adam_eps))


def init_state(args: Args, agent: Agent) -> TrainState:
    """The learner's state before its first update, from `args.seed`."""
    key, init_key = jax.random.split(jax.random.PRNGKey(args.seed))
    params = agent.init(init_key, jnp.zeros((1, 64, 64, 3 * len(args.stack_offsets)), jnp.uint8))
    return TrainState(
        params=params,
        opt_state=make_optimizer(args).init(params),
        aux_opt_state=make_optimizer(args).init(params),
        key=key,
        global_step=jnp.int32(0),
        updates=jnp.int32(0),
        aux_updates=jnp.int32(0),
        aux_terms=dict.fromkeys(AUX_TERMS, jnp.float32(0)),
        reward_filter=init_return_filter(args.num_envs),
    )


# ROLLOUT


class Rollout(NamedTuple):
    """T steps of N environments, collected on the device."""

    frames: envs.Frames  # of T + 1 steps
    actions: jax.Array  # int32 [T, N]
    logits: jax.Array  # float32 [T, N, 15]
    values: jax.Array  # float32 [T, N]
    env_state: envs.EnvState  # after the last step; `envs.end_rollout` sets its history
    key: jax.Array
    t: jax.Array  # int32 []


ROLLOUT_SPECS = devices.partition_specs(
    Rollout,
    frames=TIME_ENV_SHARDED,
    actions=TIME_ENV_SHARDED,
    logits=TIME_ENV_SHARDED,
    values=TIME_ENV_SHARDED,
    env_state=envs.ENV_STATE_SPECS,
)


def begin_rollout(args: Args, env_state: envs.EnvState, i: int) -> Rollout:
    """The run's i-th rollout, before its first step."""
    shape = (args.num_steps, len(env_state.env_ids))
    return Rollout(
        frames=envs.Frames.after(env_state.history, args.num_steps + 1, args.stack_offsets),
        actions=jnp.zeros(shape, jnp.int32),
        logits=jnp.zeros((*shape, envs.NUM_ACTIONS)),
        values=jnp.zeros(shape),
        env_state=env_state,
        key=jax.random.fold_in(jax.random.PRNGKey(envs.derive_seed(args.seed, 0)), i),
        t=jnp.int32(0),
    )


def act(args: Args, agent: Agent, params: dict, rollout: Rollout, obs: jax.Array, episode_step: jax.Array):
    """Chooses actions for obs uint8 [N, 3, 64, 64] and episode_step int32 [N]; returns the rollout and actions [N]."""
    t, env_state = rollout.t, rollout.env_state
    frames = rollout.frames.write(t, obs, episode_step)
    logits, values, _ = forward(agent, params, frames.stack(t))
    policy_keys, sticky_keys = envs.step_keys(rollout.key, t, env_state.env_ids)
    actions = jax.vmap(jax.random.categorical)(policy_keys, logits)
    played = envs.apply_sticky_actions(sticky_keys, args.sticky_actions, actions, env_state.last_action, episode_step)
    rollout = rollout._replace(
        frames=frames,
        actions=rollout.actions.at[t].set(actions),  # as chosen: sticky actions belong to the environment
        logits=rollout.logits.at[t].set(logits),
        values=rollout.values.at[t].set(values),
        env_state=env_state._replace(last_action=played),
        t=t + 1,
    )
    return rollout, played


def make_collect(args: Args, agent: Agent, mesh: Mesh) -> Callable:
    """Returns collect(vec_env, params, env_state, i, watch) -> Rollout, envs.Timesteps: it plays the i-th rollout,
    num_steps steps of each environment, each device with its own environments."""
    shard_map = partial(jax.shard_map, mesh=mesh, check_vma=False)
    begin = jax.jit(partial(begin_rollout, args), out_shardings=devices.shardings(mesh, ROLLOUT_SPECS))
    step = shard_map(
        partial(act, args, networks.acting_agent(agent)),
        in_specs=(REPLICATED, ROLLOUT_SPECS, ENV_SHARDED, ENV_SHARDED),
        out_specs=(ROLLOUT_SPECS, ENV_SHARDED),
    )
    step = jax.jit(step, donate_argnums=1)
    end = shard_map(
        partial(envs.end_rollout, args), in_specs=(ROLLOUT_SPECS, ENV_SHARDED, ENV_SHARDED), out_specs=ROLLOUT_SPECS
    )
    end = jax.jit(end, donate_argnums=0)

    def collect(vec_env: envs.ReplayableVecEnv, params: dict, env_state: envs.EnvState, i: int, watch: runs.Stopwatch):
        params = networks.acting_params(agent, params)  # cast to the encoder's dtype, once for all steps
        rollout = begin(env_state, i)

        def choose_actions(obs, episode_step):
            nonlocal rollout
            rollout, actions = step(params, rollout, obs, episode_step)
            return actions

        timesteps = vec_env.play(choose_actions, args.num_steps, watch)
        return end(rollout, vec_env.obs, vec_env.episode_step), timesteps

    return collect


# POLICY PHASE


def gae(rewards, values, terminated, truncated, *, gamma, gae_lambda) -> jax.Array:
    """Generalised advantage estimates of one sequence (Schulman et al. 2016, equation 16).

    Args:
      rewards: float32 [T], terminated, truncated: bool [T], of the transition from step t to t + 1.
      values: float32 [T + 1]. At a truncation the last frame's value stands for the rest of the episode.
      gamma, gae_lambda: float32 [].

    Returns advantages float32 [T]. Those of junk steps, where EnvPool resets, are meaningless and reach no other step.
    """
    chex.assert_rank([rewards, values, terminated, truncated], 1)
    chex.assert_equal_shape([rewards, values[1:], terminated, truncated])
    deltas = rewards + gamma * jnp.where(terminated, 0.0, values[1:]) - values[:-1]
    decay = gamma * gae_lambda * (1.0 - (terminated | truncated))

    def backward(advantage, step):
        delta, decay = step
        advantage = delta + decay * advantage
        return advantage, advantage

    return jax.lax.scan(backward, jnp.float32(0), (deltas, decay), reverse=True, unroll=devices.scan_unroll())[1]


class Batch(NamedTuple):
    """Transitions to learn from: over a rollout [T, N]; in a minibatch [B]."""

    actions: jax.Array  # int32; all else is float32
    logits: jax.Array  # [..., 15], of the behaviour policy
    advantages: jax.Array  # normalised over the rollout
    returns: jax.Array  # targets of the values


def augmented_forward(args: Args, agent: Agent, params: dict, frames: jax.Array, keys: jax.Array):
    """`forward` with augmentation and dropout, if there are any, by keys uint32 [B, 2]."""
    if not (args.augment or args.dropout):
        return forward(agent, params, frames)
    augment_keys, dropout_keys = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
    return forward(agent, params, augment.augment(args, augment_keys, frames), dropout_keys)


def policy_phase_loss(args: Args, agent: Agent, params: dict, minibatch: tuple, *, ent_coef: jax.Array):
    """PPO's loss, from frames, keys and a Batch [B].

    Returns its terms per sample, float32 [B]; `devices.gradient` weights them (0 for junk steps), averages them over
    samples and devices and differentiates "loss"; all means are logged. A sample's terms may depend on that sample
    only: on a CPU `policy_phase_loss` is called on 8 frames at a time. Batch statistics belong in `compute_advantages`.
    """
    frames, keys, batch = minibatch
    logits, values, _ = augmented_forward(args, agent, params, frames, keys)
    log_probs, old_log_probs = jax.nn.log_softmax(logits), jax.nn.log_softmax(batch.logits)
    log_ratio = jnp.take_along_axis(log_probs - old_log_probs, batch.actions[:, None], axis=-1)[:, 0]
    ratio = jnp.exp(log_ratio)
    ratio_clipped = jnp.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    terms = {
        "policy_loss": -jnp.minimum(ratio * batch.advantages, ratio_clipped * batch.advantages),
        "value_loss": 0.5 * (values - batch.returns) ** 2,
        "entropy": -(jnp.exp(log_probs) * log_probs).sum(axis=-1),
        "approx_kl": (jnp.exp(old_log_probs) * (old_log_probs - log_probs)).sum(axis=-1),  # exact; named as in CleanRL
        "clipfrac": (jnp.abs(ratio - 1) > args.clip_coef).astype(jnp.float32),
    }
    return terms | {"loss": terms["policy_loss"] + args.vf_coef * terms["value_loss"] - ent_coef * terms["entropy"]}


def compute_advantages(
    args: Args, agent: Agent, state: TrainState, rollout: Rollout, timesteps: envs.Timesteps, gamma: jax.Array
):
    """Shaped rewards and GAE: returns the state with its running statistics updated, a Batch [T, N] and metrics []."""
    mask = ~timesteps.is_reset
    reward_filter, rewards = prepare_rewards(args, state.reward_filter, timesteps, gamma)
    last_value = forward(agent, state.params, rollout.frames.stack(args.num_steps))[1]
    advantages = jax.vmap(partial(gae, gamma=gamma, gae_lambda=args.gae_lambda), 1, 1)(
        rewards, jnp.concatenate([rollout.values, last_value[None]]), timesteps.terminated, timesteps.truncated
    )
    returns = advantages + rollout.values
    mean, var = masked_moments(advantages, mask)
    _, return_var = masked_moments(returns, mask)
    batch = Batch(rollout.actions, rollout.logits, (advantages - mean) / jnp.sqrt(var + 1e-8), returns)
    metrics = {
        "charts/return_std": jnp.sqrt(reward_filter.var),
        "losses/explained_variance": 1 - var / jnp.maximum(return_var, 1e-8),  # advantages are returns - values
    }
    return state._replace(reward_filter=reward_filter), batch, metrics


def optimize(
    args: Args, agent: Agent, state: TrainState, rollout: Rollout, batch: Batch, *, mask, learning_rate, ent_coef, key
):
    """Runs update_epochs epochs of minibatch steps; returns parameters, Adam's state and the last epoch's mean metrics.

    Args:
      batch, mask: [T, N]; the mask is False for junk steps.
      learning_rate, ent_coef: float32 [].
    """
    chex.assert_tree_shape_prefix(batch, mask.shape)  # else JAX would index wrong samples, without an error
    env_ids, tx = rollout.env_state.env_ids, make_optimizer(args)
    minibatch_loss = partial(policy_phase_loss, args, agent, ent_coef=ent_coef)

    def train_minibatch(carry, key, index):
        params, opt_state = carry
        time, env = index // len(env_ids), index % len(env_ids)
        # Keys depend on a sample's global index, not on its device.
        keys = devices.fold_in_ids(key, time * args.num_envs + env_ids[env])
        minibatch = rollout.frames.stack(time, env), keys, jax.tree.map(lambda x: x[time, env], batch)
        grads, means, _ = devices.gradient(minibatch_loss, params, minibatch, mask[time, env])
        direction, opt_state = tx.update(grads, opt_state, params)
        params = optax.tree.add_scale(params, -learning_rate, direction)
        return (params, opt_state), means | {"grad_norm": devices.global_norm(grads)}

    def train_epoch(carry, key):
        shuffle_key, sample_key = jax.random.split(key)
        order = jax.random.permutation(devices.fold_in_axis_index(shuffle_key), mask.size)  # of this device's samples
        order = order.reshape(args.num_minibatches, -1)
        carry, means = jax.lax.scan(lambda carry, x: train_minibatch(carry, sample_key, x), carry, order)
        return carry, jax.tree.map(jnp.mean, means)

    keys = jax.random.split(key, args.update_epochs)
    (params, opt_state), means = jax.lax.scan(train_epoch, (state.params, state.opt_state), keys)
    return params, opt_state, jax.tree.map(lambda x: x[-1], means)


def update(args: Args, agent: Agent, state: TrainState, rollout: Rollout, timesteps: envs.Timesteps):
    """One iteration of a policy phase, on each device's part of the rollout: returns the next TrainState, the values'
    targets float32 [T, N] and metrics, float32 []."""
    learning_rate, ent_coef, gamma = (
        runs.parse_schedule(text)(state.global_step) for text in (args.learning_rate, args.ent_coef, args.gamma)
    )
    key, shuffle_key = jax.random.split(state.key)
    mask = ~timesteps.is_reset
    state, batch, metrics = compute_advantages(args, agent, state, rollout, timesteps, gamma)
    params, opt_state, means = optimize(
        args, agent, state, rollout, batch,
        mask=mask, learning_rate=learning_rate, ent_coef=ent_coef, key=shuffle_key,
    )  # fmt: skip
    metrics |= {f"losses/{name}": value for name, value in means.items()} | {
        "losses/param_norm": devices.global_norm(params),  # not finite if the last step diverged
        "charts/learning_rate": learning_rate,
        "charts/ent_coef": ent_coef,
        "charts/gamma": gamma,
    }
    state = state._replace(
        params=params,
        opt_state=opt_state,
        key=key,
        global_step=state.global_step + devices.psum(mask.sum()),
        updates=state.updates + 1,
    )
    return state, batch.returns, metrics


def make_update(args: Args, agent: Agent, mesh: Mesh) -> Callable:
    """Returns the jitted update(state, rollout, timesteps) -> TrainState, value targets, metrics; donates the state."""
    return jax.jit(
        jax.shard_map(
            partial(update, args, agent),
            mesh=mesh,
            in_specs=(STATE_SPECS, ROLLOUT_SPECS, envs.TIMESTEP_SPECS),
            out_specs=(STATE_SPECS, TIME_ENV_SHARDED, REPLICATED),
            check_vma=False,
        ),
        donate_argnums=0,
    )


# AUXILIARY PHASE
# It learns from sequences, the T steps of one environment in one rollout. The rollouts stay in the host's memory, each
# frame once, as bytes: 32 of the default size are 6.5 GB. A minibatch is put together there while the devices learn
# from the one before.


class AuxBatch(NamedTuple):
    """What an auxiliary phase needs of a rollout [T, N], or of a minibatch of M sequences [T, M]."""

    frames: envs.Frames  # of T + 1 steps
    returns: jax.Array  # float32 [T, N]: targets of both values
    weight: jax.Array  # bool [T, N]: False for junk steps
    logits: jax.Array | None  # float32 [T, N, 15], of the policy before the phase; None until the phase begins


AUX_SPECS = AuxBatch(*[TIME_ENV_SHARDED] * 4)
AUX_TERMS = "aux_value_loss", "aux_phase_value_loss", "aux_phase_kl"  # of `aux_phase_loss`, to log


def aux_phase_loss(args: Args, agent: Agent, params: dict, minibatch: tuple):
    """The joint loss and the value loss (Cobbe et al. 2020, algorithm 1), from frames, keys, value targets [B] and the
    old policy's logits [B, 15]. Returns terms per sample, as `policy_phase_loss`, but only AUX_TERMS are logged."""
    frames, keys, returns, old_logits = minibatch
    logits, values, aux_values = augmented_forward(args, agent, params, frames, keys)
    log_probs, old_log_probs = jax.nn.log_softmax(logits), jax.nn.log_softmax(old_logits)
    terms = {
        "aux_value_loss": 0.5 * (aux_values - returns) ** 2,  # the auxiliary head's
        "aux_phase_value_loss": 0.5 * (values - returns) ** 2,  # the value head's
        "aux_phase_kl": (jnp.exp(old_log_probs) * (old_log_probs - log_probs)).sum(axis=-1),
    }
    total = terms["aux_value_loss"] + args.beta_clone * terms["aux_phase_kl"] + terms["aux_phase_value_loss"]
    return terms | {"loss": total}


def aux_update(args: Args, agent: Agent, state: TrainState, batch: AuxBatch, ids: jax.Array) -> TrainState:
    """One minibatch step of an auxiliary phase, on each device's part. ids int32 [M] are the minibatch's sequences, out
    of the phase's policy_iterations x num_envs."""
    per_epoch = args.policy_iterations * args.aux_minibatches
    learning_rate = runs.parse_schedule(args.learning_rate)(state.global_step)
    key = jax.random.fold_in(state.key, 2 + state.aux_updates)  # not 0 or 1: the keys that `update` splits it into
    time, sequence = jnp.divmod(jnp.arange(batch.weight.size), len(ids))
    keys = devices.fold_in_ids(key, ids[sequence] * args.num_steps + time)
    returns, logits, weight = (x[time, sequence] for x in (batch.returns, batch.logits, batch.weight))
    minibatch = batch.frames.stack(time, sequence), keys, returns, logits
    grads, means, _ = devices.gradient(partial(aux_phase_loss, args, agent), state.params, minibatch, weight)
    direction, aux_opt_state = make_optimizer(args).update(grads, state.aux_opt_state, state.params)
    is_first = state.aux_updates % per_epoch == 0
    return state._replace(
        params=optax.tree.add_scale(state.params, -learning_rate, direction),
        aux_opt_state=aux_opt_state,
        aux_updates=state.aux_updates + 1,
        aux_terms={k: jnp.where(is_first, 0, state.aux_terms[k]) + means[k] / per_epoch for k in AUX_TERMS},
    )


def old_policy_logits(agent: Agent, params: dict, frames: envs.Frames) -> jax.Array:
    """Logits float32 [T, N, 15] for frames of T + 1 steps, without augmentation and dropout."""
    return jax.lax.map(lambda t: forward(agent, params, frames.stack(t))[0], jnp.arange(len(frames.episode_steps) - 1))


def gather(rollouts: list[AuxBatch], ids: np.ndarray) -> AuxBatch:
    """A minibatch [T, M] of sequences: number i is environment i % N of rollout i // N."""
    num_envs = rollouts[0].weight.shape[1]
    sequences = [jax.tree.map(lambda x, env=i % num_envs: x[:, env], rollouts[i // num_envs]) for i in ids]
    return jax.tree.map(lambda *x: np.stack(x, axis=1), *sequences)


def make_auxiliary_phase(args: Args, agent: Agent, mesh: Mesh) -> Callable:
    """Returns auxiliary_phase(run, state, rollouts) -> TrainState, which empties the list of rollouts at its end. If a
    signal comes it returns early; another call, in the resumed run, continues it."""
    shard_map = partial(jax.shard_map, mesh=mesh, check_vma=False)
    old_logits = jax.jit(
        shard_map(
            partial(old_policy_logits, agent), in_specs=(REPLICATED, TIME_ENV_SHARDED), out_specs=TIME_ENV_SHARDED
        )
    )
    step = jax.jit(
        shard_map(
            partial(aux_update, args, agent), in_specs=(STATE_SPECS, AUX_SPECS, ENV_SHARDED), out_specs=STATE_SPECS
        ),
        donate_argnums=0,
    )
    frame_sharding, *minibatch_shardings = devices.shardings(mesh, (TIME_ENV_SHARDED, AUX_SPECS, ENV_SHARDED))
    per_epoch = args.policy_iterations * args.aux_minibatches

    def auxiliary_phase(run: runs.Run, state: TrainState, rollouts: list[AuxBatch]) -> TrainState:
        for i, rollout in enumerate(rollouts):
            if rollout.logits is None and not run.interrupted:
                logits = old_logits(state.params, jax.device_put(rollout.frames, frame_sharding))
                rollouts[i] = rollout._replace(logits=jax.device_get(logits))
        total, updates, order = args.aux_epochs * per_epoch, int(state.updates), None
        for i in range(int(state.aux_updates) % total, total):  # a resumed phase continues after its last step
            if run.interrupted:
                return state
            if i % per_epoch == 0 or order is None:
                rng = np.random.default_rng(envs.derive_seed(args.seed, 5, updates, i // per_epoch))
                order = rng.permutation(args.policy_iterations * args.num_envs).astype(np.int32).reshape(per_epoch, -1)
            ids = order[i % per_epoch]
            minibatch = jax.device_put((gather(rollouts, ids), ids), tuple(minibatch_shardings))
            state = step(jax.block_until_ready(state), *minibatch)  # the previous step ran during `gather`
        rollouts.clear()
        return state

    return auxiliary_phase


def check_memory(args: Args) -> None:
    """Raises UsageError if a policy phase's frames, and Orbax's copy of them while a checkpoint is written, do not fit
    the host's memory."""
    frames = args.policy_iterations * args.num_envs * (args.num_steps + 1 + max(*args.stack_offsets, 1))
    size, there = 2 * frames * math.prod(envs.FRAME_SHAPE), devices.host_memory()
    needs = f"a phase's rollouts, twice at a checkpoint, need {size / 1e9:.1f} GB, this host has {there / 1e9:.1f} GB"
    check(size <= there, f"--policy-iterations {args.policy_iterations}: {needs}; give fewer")


def restore_rollouts(args: Args, saved: dict) -> list[AuxBatch]:
    """A checkpoint's rollouts."""

    def restore(x):
        frames = envs.Frames(x["frames"]["images"], x["frames"]["episode_steps"], tuple(args.stack_offsets))
        return AuxBatch(frames, x["returns"], x["weight"], x["logits"])

    return [restore(saved[str(i)]) for i in range(len(saved))]


# EVALUATION


def make_policy(args: Args, agent: Agent, mesh: Mesh) -> Callable:
    """Returns policy(params, ...), the policy that `envs.play_episodes` calls; it samples actions."""

    def sample_actions(params, frames, episode_step, keys, hidden_state):
        return jax.vmap(jax.random.categorical)(keys, forward(agent, params, frames)[0]), hidden_state

    return envs.jit_policy(mesh, sample_actions)


def load_params(args: Args, agent: Agent, run_dir: str) -> dict:
    """{"params", "global_step"} of a run's newest checkpoint or an exported agent."""
    return agents.load(run_dir, partial(init_state, args, agent), lambda state: {"params": state.params})


# MAIN


def init_checkpoint(args: Args, agent: Agent) -> dict:
    """What a new run starts from; its checkpoints also hold the environments, the episodes' statistics and, within a
    policy phase, its rollouts so far."""
    env_ids = devices.local_env_ids(args)
    return {"state": init_state(args, agent), "env_state": envs.init_env_state(env_ids, args.stack_offsets)}


def main(args: Args) -> runs.Run:
    """Trains; returns the run, finished or stopped by a signal (`run.stop`)."""
    runs.check_args(args, SCRIPT)
    check_memory(args)
    agent, mesh = make_agent(args), devices.make_mesh(args)
    collect, update = make_collect(args, agent, mesh), make_update(args, agent, mesh)
    auxiliary_phase, policy = make_auxiliary_phase(args, agent, mesh), make_policy(args, agent, mesh)
    state_sharding, env_state_sharding, *rollout_shardings = devices.shardings(
        mesh, (STATE_SPECS, envs.ENV_STATE_SPECS, ROLLOUT_SPECS, envs.TIMESTEP_SPECS)
    )

    with (
        runs.Run(args, SCRIPT, mesh, partial(init_checkpoint, args, agent)) as run,
        closing(envs.make_train_envs(args)) as vec_env,
    ):
        episodes, watch = envs.EpisodeStatistics(vec_env.num_envs), runs.Stopwatch()
        state = jax.device_put(run.checkpoint["state"], state_sharding)
        env_state = jax.device_put(run.checkpoint["env_state"], env_state_sharding)
        rollouts = restore_rollouts(args, run.checkpoint.get("rollouts", {}))  # of this policy phase
        step = int(state.global_step)
        if run.resumed:
            episodes.restore(run.checkpoint["episodes"])
            vec_env.restore(run.checkpoint["snapshot"], run)
        run.checkpoint.clear()  # or it would keep the rollouts in memory

        def save():
            per_host = {"env_state": env_state, "snapshot": vec_env.snapshot().save(), "episodes": episodes.save()}
            written = run.save(step, {"state": state}, per_host | ({"rollouts": rollouts} if rollouts else {}))
            if run.stop and not written:
                run.print("this step has a checkpoint already; the resume continues from that")

        while True:
            # At a policy phase's end this evaluates before the auxiliary phase; this step's checkpoint is after it.
            envs.evaluate_if_due(args, mesh, run, step, partial(policy, state.params))
            if run.finished(step):
                break
            if len(rollouts) == args.policy_iterations:
                with watch("auxiliary"):
                    state = jax.block_until_ready(auxiliary_phase(run, state, rollouts))
                run.check_finite(step, {"losses/param_norm": devices.global_norm(state.params)})
            else:
                i = int(state.updates)
                rollout, timesteps = collect(vec_env, state.params, env_state, i, watch)
                env_state = rollout.env_state
                with watch("update"):
                    state, returns, metrics = update(
                        state, *jax.device_put((rollout, timesteps), tuple(rollout_shardings))
                    )
                    metrics, frames, returns = jax.device_get((metrics, rollout.frames, returns))
                rollouts.append(AuxBatch(frames, returns, ~timesteps.is_reset, None))
                if i and i % args.policy_iterations == 0:  # the first rollout after an auxiliary phase
                    metrics |= {f"losses/{name}": mean for name, mean in jax.device_get(state.aux_terms).items()}
                step = int(state.global_step)
                run.check_finite(step, metrics)
                episodes.add(timesteps)
                speed = {"charts/SPS": run.steps_per_second(step)}
                run.log(step, metrics | episodes.metrics() | speed | watch.fractions())
            # At the end of a phase, or of training: in between the stored rollouts would add gigabytes.
            if run.checkpoint_due(step) and (not rollouts or step >= args.total_timesteps):
                save()
        save()
    return run


if __name__ == "__main__":
    runs.cli(Args, main)
