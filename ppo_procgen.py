"""PPO on Procgen: proximal policy optimisation with ratio clipping and an adaptive KL penalty.

Schulman et al. 2017 (arXiv 1707.06347), with the settings of a 2020 Procgen competition entry as defaults: a
wide IMPALA CNN, average-pooled, on the oldest and the newest of four frames. Others' settings: docs/ppo.md. Try:

    python ppo_procgen.py --env-id bigfish  # for a GPU; for two CPU cores: make train
    python ppo_procgen.py --env-id coinrun --num-levels 200 --total-timesteps 2000000 --learning-rate 5e-4
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from annotated_types import Interval
from jax.sharding import Mesh

from common import agents, augment, bonus, devices, envs, multihost, networks, runs
from common.devices import ENV_SHARDED, REPLICATED, TIME_ENV_SHARDED
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
class Args(
    envs.GameArgs, NormalizeArgs, networks.EncoderArgs, augment.AugmentArgs, augment.DracArgs, bonus.BonusArgs,
    runs.RunArgs,
):  # fmt: skip
    FIXED: ClassVar = ("kl_coef",)  # --resume refuses to change it: a checkpoint has the adapted value

    total_timesteps: StepCount = 8_000_000
    """total number of environment steps"""
    num_envs: PositiveInt = 64
    """number of parallel environments, over all devices"""
    num_steps: PositiveInt = 128
    """steps per environment in a rollout; the batch is num_envs x num_steps"""
    rollout_threads: PositiveInt = 1
    """threads, each with a part of the environments; on a GPU one part steps while actions for another are computed"""
    num_minibatches: PositiveInt = 8
    """number of minibatches per epoch"""
    update_epochs: Iterations = 3
    """epochs over each batch"""
    learning_rate: NonNegativeSchedule = (
        "0:1e-4,500000:8e-4,1000000:1e-4,2000000:5e-4,3000000:5e-5,4000000:2e-4,8000000:3e-5"
    )
    """Adam's learning rate: a number, or "step:value,..." in environment steps, linear between, never rescaled"""
    gamma: UnitSchedule = "0.99"
    """discount: a number, or a schedule like the learning rate's"""
    gae_lambda: UnitInterval = 0.9
    """lambda of generalised advantage estimation (GAE)"""
    clip_coef: PositiveFloat = 0.2
    """clip the probability ratio to 1 +- this; 1e9 for no clipping, with the KL penalty alone"""
    kl_coef: Annotated[float, Interval(ge=0, le=1000)] = 0.2
    """initial coefficient of the KL penalty, adapted unless --dropout or --augment in mode rad is on; 0 for none"""
    kl_target: PositiveFloat = 0.01
    """target KL divergence (nats) of the adaptive coefficient; no update stops early"""
    vf_coef: NonNegativeFloat = 1.0
    """coefficient of the value loss, half the mean squared error (RLlib omits the half: its 0.5 is 1.0 here)"""
    vf_clip: NonNegativeFloat = 30.0
    """clip the change of a value in one update to +- this, in units of the processed rewards; 0 for no clipping"""
    ent_coef: NonNegativeSchedule = "0.01"
    """coefficient of the entropy bonus: a number, or a schedule, such as "0:0.01,8000000:0" to anneal it"""
    max_grad_norm: NonNegativeFloat = 0.0
    """maximum global norm of the gradient; 0 for no clipping"""
    adam_eps: PositiveFloat = 1e-8
    """Adam's epsilon"""
    l2: NonNegativeFloat = 0.0
    """coefficient of the L2 penalty, the squared norm of all convolution kernels (not part of the logged loss)"""
    core: Literal["none", "lstm", "gru"] = "none"
    """recurrent core between encoder and heads; a minibatch then holds all steps of some environments"""

    def check(self) -> None:
        """Raises UsageError for inconsistent flags; the inherited groups check their own."""
        runs.check_batch(self)
        divide = f"must divide the number of environments, {self.num_envs}"
        runs.check(self.num_envs % self.rollout_threads == 0, f"--rollout-threads {self.rollout_threads}: {divide}")
        runs.check_needs(self, self.kl_coef, "--kl-coef", ("kl_target",))

    def sharded_sizes(self) -> dict[str, int]:
        """The sizes that are divided among the learner devices, by their descriptions."""
        return super().sharded_sizes() | {"the environments of a rollout thread": self.num_envs // self.rollout_threads}


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
        """Frames [B, 64, 64, C] of one step, for `init` alone. Call each new head here, or it gets no parameters."""
        return self.decode(self.encode(frames)[:, None], is_first[:, None], hidden_state)


def make_agent(args: Args) -> Agent:
    """The network that these flags describe."""
    return Agent(networks.make_encoder(args), networks.Recurrent(args.core, args.hidden), args.dropout)


def policy_and_value(agent: Agent, params: dict, frames: jax.Array, is_first: jax.Array, hidden_state):
    """Logits [N, 15], values [N] and the next hidden state for stacked frames [N, 64, 64, C] of one step."""
    # On a CPU eight frames at a time, whose activations stay in its cache; on a GPU all at once.
    features = devices.map_in_chunks(partial(agent.apply, params, method="encode"), frames)
    logits, values, hidden_state = agent.apply(
        params, features[:, None], is_first[:, None], hidden_state, method="decode"
    )
    return logits[:, 0], values[:, 0], hidden_state


# TRAINING STATE


class TrainState(NamedTuple):
    """State of the learner."""

    params: dict  # {"agent", "predictor"}, both trained; the predictor, RND's, is {} without --rnd-coef
    opt_state: optax.OptState
    key: jax.Array
    global_step: jax.Array  # int32 []: transitions learnt from
    updates: jax.Array  # int32 []
    kl_coef: jax.Array  # float32 []
    reward_filter: ReturnFilter
    bonus: bonus.Bonus


# For jax.shard_map: a field named here is by environment, a part on each device; all others are replicated.
STATE_SPECS = devices.partition_specs(TrainState, reward_filter=RETURN_FILTER_SPECS, bonus=bonus.BONUS_SPECS)


def make_optimizer(args: Args) -> optax.GradientTransformation:
    """Adam without the learning rate: `optimize` multiplies its updates by -learning_rate, from a schedule."""
    return optax.chain(devices.clip_by_global_norm(args.max_grad_norm), optax.scale_by_adam(eps=args.adam_eps))


def init_state(args: Args, agent: Agent) -> TrainState:
    """The learner's state before its first update, from `args.seed`."""
    key, init_key = jax.random.split(jax.random.PRNGKey(args.seed))
    frames = jnp.zeros((1, 64, 64, 3 * len(args.stack_offsets)), jnp.uint8)
    hidden_state = networks.init_hidden_state(args.core, args.hidden, 1)
    params = {"agent": agent.init(init_key, frames, jnp.ones(1, bool), hidden_state)}
    params["predictor"], bonus_state = bonus.init(args, init_key, frames)  # derives its own keys from init_key
    return TrainState(
        params=params,
        opt_state=make_optimizer(args).init(params),
        key=key,
        global_step=jnp.int32(0),
        updates=jnp.int32(0),
        kl_coef=jnp.float32(args.kl_coef),
        reward_filter=init_return_filter(args.num_envs),
        bonus=bonus_state,
    )


def init_env_state(args: Args, env_ids: jax.Array) -> envs.EnvState:
    """What acting hands from one rollout to the next (past frames, last action, hidden state), before the first step of
    the environments env_ids int32 [N]. The games' own state is EnvPool's."""
    hidden_state = networks.init_hidden_state(args.core, args.hidden, len(env_ids))
    return envs.init_env_state(env_ids, args.stack_offsets, hidden_state)


# ROLLOUT


class Rollout(NamedTuple):
    """T steps of N environments, collected on the device."""

    frames: envs.Frames  # of T + 1 steps
    actions: jax.Array  # int32 [T, N]
    logits: jax.Array  # float32 [T, N, 15]
    values: jax.Array  # float32 [T, N]
    initial_hidden_state: networks.HiddenState
    env_state: envs.EnvState  # after the last step; `envs.end_rollout` sets its history
    key: jax.Array
    t: jax.Array  # int32 []


ROLLOUT_SPECS = devices.partition_specs(
    Rollout,
    frames=TIME_ENV_SHARDED,
    actions=TIME_ENV_SHARDED,
    logits=TIME_ENV_SHARDED,
    values=TIME_ENV_SHARDED,
    initial_hidden_state=ENV_SHARDED,
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
        initial_hidden_state=env_state.hidden_state,
        env_state=env_state,
        key=jax.random.fold_in(jax.random.PRNGKey(envs.derive_seed(args.seed, 0)), i),
        t=jnp.int32(0),
    )


def act(args: Args, agent: Agent, params: dict, rollout: Rollout, obs: jax.Array, episode_step: jax.Array):
    """Chooses actions for obs uint8 [N, 3, 64, 64] and episode_step int32 [N]; returns the rollout and actions [N]."""
    t, env_state = rollout.t, rollout.env_state
    frames = rollout.frames.write(t, obs, episode_step)
    logits, values, hidden_state = policy_and_value(
        agent, params, frames.stack(t), episode_step == 0, env_state.hidden_state
    )
    policy_keys, sticky_keys = envs.step_keys(rollout.key, t, env_state.env_ids)
    actions = jax.vmap(jax.random.categorical)(policy_keys, logits)
    played = envs.apply_sticky_actions(sticky_keys, args.sticky_actions, actions, env_state.last_action, episode_step)
    rollout = rollout._replace(
        frames=frames,
        actions=rollout.actions.at[t].set(actions),  # as chosen: sticky actions belong to the environment
        logits=rollout.logits.at[t].set(logits),
        values=rollout.values.at[t].set(values),
        env_state=env_state._replace(last_action=played, hidden_state=hidden_state),
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
    split, join = envs.make_split_and_join(mesh, ROLLOUT_SPECS, args.rollout_threads)

    def collect(vec_env: envs.ThreadedVecEnv, params: dict, env_state: envs.EnvState, i: int, watch: runs.Stopwatch):
        params = networks.acting_params(agent, params)  # cast to the encoder's dtype, once for all steps
        rollouts = [begin(part, i) for part in split(env_state)]

        def choose_actions(thread, obs, episode_step):  # `step` consumes the rollout that it is given (donation)
            rollouts[thread], actions = step(params, rollouts[thread], obs, episode_step)
            return actions

        timesteps = vec_env.play(choose_actions, args.num_steps, watch)
        for thread, part in enumerate(vec_env.parts):
            rollouts[thread] = end(rollouts[thread], part.obs, part.episode_step)
        return join(rollouts), timesteps

    return collect


# ALGORITHM


def gae(rewards, values, terminated, truncated, *, gamma, gae_lambda) -> jax.Array:
    """Generalised advantage estimates of one sequence (Schulman et al. 2016, equation 16).

    Args:
      rewards: float32 [T], terminated, truncated: bool [T], of the transition from step t to t + 1.
      values: float32 [T + 1]. After a truncated step the next one is the value of the episode's last frame, as EnvPool
        resets a step later (the junk step), and stands for the rest of the episode.
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
    """Transitions to learn from: over a rollout [T, N]; in a minibatch B sequences of S steps, [B, S] (S = 1 without a
    recurrent core)."""

    actions: jax.Array  # int32; all else is float32
    logits: jax.Array  # [..., 15], of the behaviour policy
    values: jax.Array
    advantages: jax.Array  # normalised over the rollout, by `compute_advantages`
    returns: jax.Array  # targets of the value loss


class Inputs(NamedTuple):
    """Network inputs of a minibatch."""

    frames: jax.Array  # uint8 [B, S, 64, 64, C]
    next_frames: jax.Array | None  # of the next step, for RND's predictor; None without it
    is_first: jax.Array  # bool [B, S]: whether a step is its episode's first
    hidden_state: networks.HiddenState  # before the first step, [B, hidden]
    keys: jax.Array | None  # uint32 [B, S, 2], for augmentation and dropout; None without them


def ppo_loss_terms(args: Args, log_probs: jax.Array, values: jax.Array, batch: Batch) -> dict[str, jax.Array]:
    """The terms of PPO's loss (Schulman et al. 2017, equations 7 to 9) per sample, float32 [B, S].

    Args:
      log_probs: float32 [B, S, 15], of the current policy.
      values: float32 [B, S].
      batch: [B, S].
    """
    chex.assert_equal_shape([log_probs, batch.logits])
    chex.assert_equal_shape([values, batch.values, batch.returns, batch.actions, batch.advantages])
    old_log_probs = jax.nn.log_softmax(batch.logits)
    log_ratio = jnp.take_along_axis(log_probs - old_log_probs, batch.actions[..., None], axis=-1)[..., 0]
    ratio = jnp.exp(log_ratio)
    ratio_clipped = jnp.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    value_loss = (values - batch.returns) ** 2
    if args.vf_clip:
        value_clipped = batch.values + jnp.clip(values - batch.values, -args.vf_clip, args.vf_clip)
        value_loss = jnp.maximum(value_loss, (value_clipped - batch.returns) ** 2)
    return {
        "policy_loss": -jnp.minimum(ratio * batch.advantages, ratio_clipped * batch.advantages),
        "value_loss": 0.5 * value_loss,
        "entropy": -(jnp.exp(log_probs) * log_probs).sum(axis=-1),
        "approx_kl": (jnp.exp(old_log_probs) * (old_log_probs - log_probs)).sum(axis=-1),  # exact; named as in CleanRL
        "clipfrac": (jnp.abs(ratio - 1) > args.clip_coef).astype(jnp.float32),
    }


def forward(agent: Agent, params: dict, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities float32 [B, S, 15] and values float32 [B, S]."""
    frames, keys = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (inputs.frames, inputs.keys))
    features = devices.map_in_chunks(lambda x: agent.apply(params, *x, method="encode"), (frames, keys))
    features = features.reshape(*inputs.is_first.shape, -1)
    logits, values, _ = agent.apply(params, features, inputs.is_first, inputs.hidden_state, method="decode")
    return jax.nn.log_softmax(logits), values


def loss(
    args: Args, agent: Agent, params: dict, minibatch: tuple[Inputs, Batch], *, kl_coef, ent_coef, rnd_target=None
):
    """PPO's loss, with DrAC's regulariser and the error of RND's predictor if the flags ask for them.

    Returns its terms per sample, float32 [B, S]; `devices.gradient` weights them (0 for junk steps), averages them over
    samples and devices and differentiates "loss"; all means are logged. A sample's terms may depend on that sample
    only: a CPU calls `loss` on 8 frames or one sequence at a time, so `x - x.mean()` would be over those, and on a GPU
    over a device's part of a minibatch, without an error. A rollout's statistics belong in `compute_advantages`, a
    minibatch's in `train_minibatch`, both by `masked_moments`; for a loss across samples see docs/forking_reference.md.
    """
    inputs, batch = minibatch
    if inputs.keys is not None:
        augment_keys, dropout_keys = jnp.moveaxis(jax.vmap(jax.vmap(jax.random.split))(inputs.keys), 2, 0)
        inputs = inputs._replace(keys=dropout_keys)
    augmented = inputs
    if args.augment:
        augmented = inputs._replace(frames=jax.vmap(partial(augment.augment, args))(augment_keys, inputs.frames))
    log_probs, values = forward(agent, params["agent"], augmented if args.augment_mode == "rad" else inputs)
    terms = ppo_loss_terms(args, log_probs, values, batch)
    total = terms["policy_loss"] + args.vf_coef * terms["value_loss"] - ent_coef * terms["entropy"]
    if args.kl_coef:  # the flag: whether there is a penalty; the argument kl_coef is its adapted weight
        total += kl_coef * terms["approx_kl"]
    if args.augment and args.augment_mode == "drac":
        new_log_probs, new_values = forward(agent, params["agent"], augmented)
        terms["drac_loss"] = augment.drac_loss(log_probs, values, new_log_probs, new_values)
        total += args.drac_coef * terms["drac_loss"]
    if args.rnd_coef:
        terms["rnd_loss"] = bonus.predictor_loss(rnd_target, params["predictor"], inputs.next_frames)
        total += terms["rnd_loss"]  # rnd_coef scales the reward only
    return terms | {"loss": total}


def adapt_kl_coef(kl_coef: jax.Array, kl: jax.Array, kl_target: float) -> jax.Array:
    """Halves or doubles the coefficient if KL is below kl_target / 1.5 or above 1.5 kl_target (Schulman et al. 2017,
    section 4). It stays within 1e-6 and 1e6, so that it can recover."""
    factor = jnp.where(kl < kl_target / 1.5, 0.5, jnp.where(kl > kl_target * 1.5, 2.0, 1.0))
    return jnp.clip(kl_coef * factor, 1e-6, 1e6)


def compute_advantages(
    args: Args, agent: Agent, state: TrainState, rollout: Rollout, timesteps: envs.Timesteps, gamma: jax.Array
):
    """Shaped rewards, RND's bonus, GAE: returns the state with its running statistics updated, a Batch [T, N] and
    metrics float32 []."""
    mask = ~timesteps.is_reset  # False for junk steps: the frame is an episode's last, EnvPool ignores the action
    # Shaped and normalised, below with RND's bonus; the game's own rewards are timesteps.rewards.
    reward_filter, rewards = prepare_rewards(args, state.reward_filter, timesteps, gamma)
    state = state._replace(reward_filter=reward_filter)
    metrics = {"charts/return_std": jnp.sqrt(reward_filter.var)}
    if args.rnd_coef:
        bonus_state, intrinsic = bonus.of_transitions(
            args, state.bonus, state.params["predictor"], frames=rollout.frames, timesteps=timesteps, gamma=gamma
        )
        state, rewards = state._replace(bonus=bonus_state), rewards + args.rnd_coef * intrinsic
        metrics["charts/intrinsic_reward"] = masked_moments(intrinsic, mask)[0]
    # The frame after the last step, which has a value but no action.
    stacked, is_first = rollout.frames.stack(args.num_steps), rollout.frames.is_first[-1]
    hidden_state = rollout.env_state.hidden_state
    last_value = policy_and_value(agent, state.params["agent"], stacked, is_first, hidden_state)[1]
    advantages = jax.vmap(partial(gae, gamma=gamma, gae_lambda=args.gae_lambda), 1, 1)(
        rewards, jnp.concatenate([rollout.values, last_value[None]]), timesteps.terminated, timesteps.truncated
    )
    returns = advantages + rollout.values
    mean, var = masked_moments(advantages, mask)  # over all devices
    _, return_var = masked_moments(returns, mask)
    metrics["losses/explained_variance"] = 1 - var / jnp.maximum(return_var, 1e-8)  # advantages are returns - values
    batch = Batch(
        actions=rollout.actions,
        logits=rollout.logits,
        values=rollout.values,
        advantages=(advantages - mean) / jnp.sqrt(var + 1e-8),
        returns=returns,
    )
    return state, batch, metrics


def optimize(
    args: Args, agent: Agent, state: TrainState, rollout: Rollout, batch: Batch, *, mask, learning_rate, ent_coef, key
):
    """Runs update_epochs epochs of minibatch steps; returns parameters, Adam's state and the last epoch's mean metrics.

    Args:
      batch, mask: [T, N]; the mask is False for junk steps.
      learning_rate, ent_coef: float32 [].
    """
    chex.assert_tree_shape_prefix(batch, mask.shape)  # else JAX would index wrong samples, without an error
    env_ids, recurrent = rollout.env_state.env_ids, args.core != "none"
    local_num_envs = len(env_ids)  # on this device
    tx = make_optimizer(args)
    rnd_target = state.bonus.target if args.rnd_coef else None
    minibatch_loss = partial(loss, args, agent, kl_coef=state.kl_coef, ent_coef=ent_coef, rnd_target=rnd_target)

    def train_minibatch(carry, key, index):
        params, opt_state = carry
        if recurrent:  # all steps of some environments
            time, env = jnp.arange(args.num_steps)[None], index[:, None]
        else:  # single transitions, numbered t * N + n
            time, env = index[:, None] // local_num_envs, index[:, None] % local_num_envs
        # Keys depend on a sample's global index, not on its device.
        keys = jax.vmap(partial(devices.fold_in_ids, key))(time * args.num_envs + env_ids[env])
        inputs = Inputs(
            frames=rollout.frames.stack(time, env),
            next_frames=rollout.frames.stack(time + 1, env) if args.rnd_coef else None,
            is_first=rollout.frames.is_first[time, env],
            hidden_state=jax.tree.map(lambda x: x[index], rollout.initial_hidden_state),  # () without a core
            keys=keys if args.augment or args.dropout else None,
        )
        minibatch = inputs, jax.tree.map(lambda x: x[time, env], batch)
        grads, means, _ = devices.gradient(minibatch_loss, params, minibatch, mask[time, env])
        grads = grads | {"agent": networks.add_l2(grads["agent"], params["agent"], args.l2)}
        direction, opt_state = tx.update(grads, opt_state, params)
        params = optax.tree.add_scale(params, -learning_rate, direction)
        return (params, opt_state), means | {"grad_norm": devices.global_norm(grads)}

    def train_epoch(carry, key):
        shuffle_key, sample_key = jax.random.split(key)
        samples = local_num_envs if recurrent else mask.size  # on this device
        order = jax.random.permutation(devices.fold_in_axis_index(shuffle_key), samples)
        order = order.reshape(args.num_minibatches, -1)
        carry, means = jax.lax.scan(lambda carry, index: train_minibatch(carry, sample_key, index), carry, order)
        return carry, jax.tree.map(jnp.mean, means)

    keys = jax.random.split(key, args.update_epochs)
    (params, opt_state), means = jax.lax.scan(train_epoch, (state.params, state.opt_state), keys)
    return params, opt_state, jax.tree.map(lambda x: x[-1], means)


def update(args: Args, agent: Agent, state: TrainState, rollout: Rollout, timesteps: envs.Timesteps):
    """One PPO update, on each device's part of the rollout: returns the next TrainState and metrics, float32 []."""
    learning_rate, ent_coef, gamma = (
        runs.parse_schedule(text)(state.global_step) for text in (args.learning_rate, args.ent_coef, args.gamma)
    )
    key, shuffle_key = jax.random.split(state.key)
    mask = ~timesteps.is_reset  # junk steps, in which EnvPool resets, are not learnt from
    state, batch, metrics = compute_advantages(args, agent, state, rollout, timesteps, gamma)
    params, opt_state, means = optimize(
        args, agent, state, rollout, batch,
        mask=mask, learning_rate=learning_rate, ent_coef=ent_coef, key=shuffle_key,
    )  # fmt: skip
    metrics |= {f"losses/{name}": value for name, value in means.items()} | {
        "losses/kl_coef": state.kl_coef,
        "losses/param_norm": devices.global_norm(params),  # not finite if the last step diverged
        "charts/learning_rate": learning_rate,
        "charts/ent_coef": ent_coef,
        "charts/gamma": gamma,
    }
    # Dropout and RAD add to the KL divergence even without an update, so it cannot drive the coefficient.
    adaptive = args.kl_coef and not args.dropout and not (args.augment and args.augment_mode == "rad")
    adapted = adapt_kl_coef(state.kl_coef, means["approx_kl"], args.kl_target)
    state = state._replace(
        params=params,
        opt_state=opt_state,
        key=key,
        global_step=state.global_step + devices.psum(mask.sum()),
        updates=state.updates + 1,
        kl_coef=adapted if adaptive else state.kl_coef,
    )
    return state, metrics


def make_update(args: Args, agent: Agent, mesh: Mesh) -> Callable:
    """Returns the jitted update(state, rollout, timesteps) -> TrainState, metrics, which donates the state."""
    return jax.jit(
        jax.shard_map(
            partial(update, args, agent),
            mesh=mesh,
            in_specs=(STATE_SPECS, ROLLOUT_SPECS, envs.TIMESTEP_SPECS),
            out_specs=(STATE_SPECS, REPLICATED),
            check_vma=False,
        ),
        donate_argnums=0,
    )


# EVALUATION


def make_policy(args: Args, agent: Agent, mesh: Mesh) -> Callable:
    """Returns policy(params, ...), the policy that `envs.play_episodes` calls; it samples actions."""

    def sample_actions(params, frames, episode_step, keys, hidden_state):
        logits, _, hidden_state = policy_and_value(agent, params, frames, episode_step == 0, hidden_state)
        return jax.vmap(jax.random.categorical)(keys, logits), hidden_state

    return envs.jit_policy(mesh, sample_actions, partial(networks.init_hidden_state, args.core, args.hidden))


def load_params(args: Args, agent: Agent, run_dir: str) -> dict:
    """{"params", "global_step"} of a run's newest checkpoint or an exported agent."""
    return agents.load(run_dir, partial(init_state, args, agent), lambda state: {"params": state.params["agent"]})


# MAIN


def init_checkpoint(args: Args, agent: Agent) -> dict:
    """What a new run starts from; its checkpoints also hold the environments and the episodes' statistics."""
    return {"state": init_state(args, agent), "env_state": init_env_state(args, devices.local_env_ids(args))}


def main(args: Args) -> runs.Run:
    """Trains; returns the run, finished or stopped by a signal (`run.stop`)."""
    runs.check_args(args, SCRIPT)
    agent, mesh = make_agent(args), devices.make_mesh(args)
    collect, update = make_collect(args, agent, mesh.local_mesh), make_update(args, agent, mesh)
    policy = make_policy(args, agent, mesh.local_mesh)

    with (
        runs.Run(args, SCRIPT, mesh, partial(init_checkpoint, args, agent)) as run,
        closing(envs.make_threaded_envs(args)) as vec_env,
    ):
        episodes, watch = envs.EpisodeStatistics(vec_env.num_envs), runs.Stopwatch()
        state = multihost.distribute(mesh, run.checkpoint["state"], STATE_SPECS)
        env_state_sharding = devices.shardings(mesh.local_mesh, envs.ENV_STATE_SPECS)
        env_state = jax.device_put(run.checkpoint["env_state"], env_state_sharding)
        step = int(state.global_step)
        if "snapshot" in run.checkpoint:  # absent in a new run, or after the number of hosts changed
            episodes.restore(run.checkpoint["episodes"])
            vec_env.restore(run.checkpoint["snapshot"], run)

        def save():
            per_host = {"env_state": env_state, "snapshot": vec_env.save(), "episodes": episodes.save()}
            run.save(step, {"state": state}, per_host)

        while True:
            params, i = multihost.local_replica(mesh, state.params["agent"]), int(state.updates)
            envs.evaluate_if_due(args, mesh, run, step, partial(policy, params))
            if run.finished(step):
                break
            rollout, timesteps = collect(vec_env, params, env_state, i, watch)
            env_state = rollout.env_state
            with watch("update"):
                specs = ROLLOUT_SPECS, envs.TIMESTEP_SPECS
                state, metrics = update(state, *multihost.host_to_global(mesh, (rollout, timesteps), specs))
                metrics = jax.device_get(metrics)
            step = int(state.global_step)
            run.check_finite(step, metrics)
            episodes.add(timesteps)
            run.log(step, metrics | episodes.metrics() | {"charts/SPS": run.steps_per_second(step)} | watch.fractions())
            if run.checkpoint_due(step):
                save()
        save()
    return run


if __name__ == "__main__":
    runs.cli(Args, main)
