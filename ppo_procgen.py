"""PPO on Procgen: proximal policy optimisation with ratio clipping and an adaptive KL penalty.

Schulman et al. 2017 (arXiv 1707.06347), with the settings of a 2020 Procgen competition entry as defaults: a
wide IMPALA CNN, average-pooled, on the oldest and the newest of four frames. Try:

    python ppo_procgen.py --env-id bigfish
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

from common import agents, augment, bonus, devices, envs, networks, runs, shaping
from common.devices import GAMES, SAME
from common.flags import (
    Iterations,
    NonNegativeFloat,
    NonNegativeSchedule,
    PositiveFloat,
    PositiveInt,
    Timesteps,
    UnitInterval,
    UnitSchedule,
)

SCRIPT = Path(__file__).stem


@dataclass(frozen=True)
class Args(
    envs.GameArgs, shaping.NormalizeArgs, networks.EncoderArgs, augment.AugmentArgs, augment.DracArgs, bonus.BonusArgs,
    runs.RunArgs,
):  # fmt: skip
    FIXED: ClassVar = ("kl_coef",)  # what a resume cannot change: it has adapted since

    total_timesteps: Timesteps = 8_000_000
    """total number of environment steps"""
    num_envs: PositiveInt = 64
    """number of parallel environments, over all devices"""
    num_steps: PositiveInt = 128
    """steps per environment in a rollout; the batch is num_envs x num_steps"""
    num_minibatches: PositiveInt = 8
    """number of minibatches per epoch"""
    update_epochs: Iterations = 3
    """epochs over each batch"""
    learning_rate: NonNegativeSchedule = (
        "0:1e-4,500000:8e-4,1000000:1e-4,2000000:5e-4,3000000:5e-5,4000000:2e-4,8000000:3e-5"
    )
    """Adam's learning rate: a number, or a schedule "step:value,..." in environment steps; here for 8M"""
    gamma: UnitSchedule = "0.99"
    """discount: a number, or a schedule like the learning rate's"""
    gae_lambda: UnitInterval = 0.9
    """lambda of generalised advantage estimation (GAE)"""
    clip_coef: PositiveFloat = 0.2
    """clip the probability ratio to 1 +- this; 1e9 for no clip, so that the KL penalty alone holds it"""
    kl_coef: Annotated[float, Interval(ge=0, le=1000)] = 0.2
    """initial coefficient of the adaptive KL penalty; 0 for none"""
    kl_target: PositiveFloat = 0.01
    """the KL divergence (nats) that the penalty's coefficient is adapted to"""
    vf_coef: NonNegativeFloat = 1.0
    """coefficient of the value loss, half the mean squared error (RLlib's 0.5, which has no half, is 1.0 here)"""
    vf_clip: NonNegativeFloat = 30.0
    """clip the change of a value in one update to +- this, in units of the rewards learnt from; 0 for no clipping"""
    ent_coef: NonNegativeSchedule = "0.01"
    """coefficient of the entropy bonus: a number, or a schedule like the learning rate's"""
    max_grad_norm: NonNegativeFloat = 0.0
    """maximum global norm of the gradient; 0 for no clipping"""
    adam_eps: PositiveFloat = 1e-8
    """Adam's epsilon"""
    l2: NonNegativeFloat = 0.0
    """coefficient of the L2 penalty, the squared norm of all convolution kernels (not part of the logged loss)"""
    core: Literal["none", "lstm", "gru"] = "none"
    """recurrent core between encoder and heads; minibatches then are of whole rollouts"""

    def check(self) -> None:
        """Raises UsageError for inconsistent flags."""
        runs.check_batch(self)
        runs.check_needs(self, self.kl_coef, "--kl-coef", ("kl_target",))


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


def policy_and_value(agent: Agent, params: dict, frames: jax.Array, first: jax.Array, core: networks.Core):
    """Logits [N, 15], values [N] and the next core for stacked frames [N, 64, 64, C] of one step."""
    features = devices.in_chunks(partial(agent.apply, params, method="encode"), frames)
    logits, values, core = agent.apply(params, features[:, None], first[:, None], core, method="decode")
    return logits[:, 0], values[:, 0], core


# TRAINING STATE


class TrainState(NamedTuple):
    """The learner."""

    params: dict  # of the agent, and of the bonus's predictor where there is one
    opt_state: optax.OptState
    key: jax.Array
    global_step: jax.Array  # int32 []: transitions learnt from
    updates: jax.Array  # int32 []
    kl_coef: jax.Array  # float32 []
    reward_filter: shaping.ReturnFilter
    bonus: bonus.Bonus


STATE = devices.layout(TrainState, reward_filter=shaping.FILTER, bonus=bonus.BONUS)


class Carry(NamedTuple):
    """What is needed besides the games to go on with them."""

    history: jax.Array  # uint8 [H, N, 64, 64, 3]: the frames before the newest
    numbers: jax.Array  # int32 [N]: of these games in the run
    last_action: jax.Array  # int32 [N]: what the games played last
    core: networks.Core


CARRY = devices.layout(Carry, steps="history", games="numbers last_action core")


def make_optimizer(args: Args) -> optax.GradientTransformation:
    """Adam's direction, without step size and sign: `optimize` multiplies it by -learning_rate, from a schedule."""
    return optax.chain(devices.clip_by_norm(args.max_grad_norm), optax.scale_by_adam(eps=args.adam_eps))


@partial(jax.jit, static_argnums=(0, 1))
def initial_state(args: Args, agent: Agent) -> TrainState:
    """The learner before its first update, from `args.seed`."""
    key, init_key = jax.random.split(jax.random.PRNGKey(args.seed))
    frames = jnp.zeros((1, 64, 64, 3 * len(args.offsets)), jnp.uint8)
    core = networks.initial_core(args.core, args.hidden, 1)
    params = {"agent": agent.init(init_key, frames, jnp.ones(1, bool), core)}
    params["predictor"], extra = bonus.init(args, init_key, frames)
    return TrainState(
        params=params,
        opt_state=make_optimizer(args).init(params),
        key=key,
        global_step=jnp.int32(0),
        updates=jnp.int32(0),
        kl_coef=jnp.float32(args.kl_coef),
        reward_filter=shaping.new_filter(args.num_envs),
        bonus=extra,
    )


@partial(jax.jit, static_argnums=0)
def initial_carry(args: Args, numbers: jax.Array) -> Carry:
    """Before the first step of the games with these numbers, int32 [N]."""
    return Carry(
        history=envs.empty_history(len(numbers), args.offsets),
        numbers=numbers,
        last_action=jnp.zeros_like(numbers),
        core=networks.initial_core(args.core, args.hidden, len(numbers)),
    )


# ROLLOUT


class Rollout(NamedTuple):
    """What stays on the device while T steps are played."""

    frames: envs.Frames  # of T + 1 steps
    actions: jax.Array  # int32 [T, N]
    logits: jax.Array  # float32 [T, N, 15]
    values: jax.Array  # float32 [T, N]
    numbers: jax.Array  # int32 [N]
    last_action: jax.Array  # int32 [N]
    first_core: networks.Core
    core: networks.Core
    key: jax.Array
    t: jax.Array  # int32 []


ROLLOUT = devices.layout(Rollout, steps="frames actions logits values", games="numbers last_action first_core core")


@partial(jax.jit, static_argnums=0)
@devices.spread([CARRY, SAME], ROLLOUT, every_host=False)
def begin_rollout(args: Args, carry: Carry, i: int) -> Rollout:
    """The run's i-th rollout, before its first step."""
    shape = (args.num_steps, len(carry.numbers))
    return Rollout(
        frames=envs.Frames.after(carry.history, args.num_steps + 1, args.offsets),
        actions=jnp.zeros(shape, jnp.int32),
        logits=jnp.zeros((*shape, envs.NUM_ACTIONS)),
        values=jnp.zeros(shape),
        numbers=carry.numbers,
        last_action=carry.last_action,
        first_core=carry.core,
        core=carry.core,
        key=jax.random.fold_in(jax.random.PRNGKey(envs.derive_seed(args.seed, 0)), i),
        t=jnp.int32(0),
    )


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
@devices.spread([SAME, ROLLOUT, GAMES, GAMES], (ROLLOUT, GAMES), every_host=False)
def act(args: Args, agent: Agent, params: dict, rollout: Rollout, obs: jax.Array, age: jax.Array):
    """Chooses actions for obs uint8 [N, 3, 64, 64], age int32 [N]; returns the rollout and actions int32 [N]."""
    t = rollout.t
    frames = rollout.frames.put(t, obs, age)
    logits, values, core = policy_and_value(agent, params, frames.stack(t), age == 0, rollout.core)
    choose_keys, stick_keys = envs.step_keys(rollout)
    actions = jax.vmap(jax.random.categorical)(choose_keys, logits)
    played = envs.stick(stick_keys, args.sticky_actions, actions, last_action=rollout.last_action, age=age)
    rollout = rollout._replace(
        frames=frames,
        actions=rollout.actions.at[t].set(actions),
        logits=rollout.logits.at[t].set(logits),
        values=rollout.values.at[t].set(values),
        last_action=played,
        core=core,
        t=t + 1,
    )
    return rollout, played


@partial(jax.jit, static_argnums=0, donate_argnums=1)
@devices.spread([ROLLOUT, GAMES, GAMES], (ROLLOUT, CARRY), every_host=False)
def end_rollout(args: Args, rollout: Rollout, obs: jax.Array, age: jax.Array) -> tuple[Rollout, Carry]:
    """Adds the frames uint8 [N, 3, 64, 64] after the last step, and their ages int32 [N]."""
    rollout = rollout._replace(frames=rollout.frames.put(args.num_steps, obs, age))
    history = rollout.frames.history(args.num_steps)
    return rollout, Carry(history, rollout.numbers, rollout.last_action, rollout.core)


def collect(args: Args, agent: Agent, games: envs.Games, params: dict, carry: Carry, *, i: int, watch: runs.Stopwatch):
    """Plays the i-th rollout, num_steps steps of each game; returns Rollout, envs.Steps and the next Carry."""
    agent, params = networks.for_acting(agent, params)
    rollout = begin_rollout(args, carry, i)

    def choose_actions(obs, age):
        nonlocal rollout
        rollout, actions = act(args, agent, params, rollout, *devices.feed(args, (obs, age)))
        return actions

    steps = games.play(choose_actions, args.num_steps, watch)
    rollout, carry = end_rollout(args, rollout, *devices.feed(args, (games.obs, games.age)))
    return rollout, steps, carry


# ALGORITHM


def gae(rewards, values, terminated, truncated, *, gamma, gae_lambda) -> jax.Array:
    """Generalised advantage estimates of one sequence (Schulman et al. 2016, equation 16).

    Args:
      rewards: float32 [T], terminated, truncated: bool [T], of the transition from step t to t + 1.
      values: float32 [T + 1]. At a truncation the last frame's value stands for the rest of the episode.
      gamma, gae_lambda: float32 [].

    Returns advantages float32 [T]; those of steps that are no transition are meaningless and reach no other step.
    """
    chex.assert_rank([rewards, values, terminated, truncated], 1)
    chex.assert_equal_shape([rewards, values[1:], terminated, truncated])
    deltas = rewards + gamma * jnp.where(terminated, 0.0, values[1:]) - values[:-1]
    decay = gamma * gae_lambda * (1.0 - (terminated | truncated))

    def backward(advantage, step):
        delta, decay = step
        advantage = delta + decay * advantage
        return advantage, advantage

    return jax.lax.scan(backward, jnp.float32(0), (deltas, decay), reverse=True, unroll=devices.unroll())[1]


class Batch(NamedTuple):
    """Transitions to learn from: over a rollout [T, N]; in a minibatch B sequences of S steps, [B, S] (S = 1 without a
    recurrent core)."""

    actions: jax.Array  # int32; all else is float32
    logits: jax.Array  # [..., 15], of the policy that acted
    values: jax.Array
    advantages: jax.Array  # normalised over the rollout
    returns: jax.Array  # the value loss's targets


class Inputs(NamedTuple):
    """What the networks see of a minibatch."""

    frames: jax.Array  # uint8 [B, S, 64, 64, C]
    next_frames: jax.Array | None  # the same of the next step, for the bonus
    first: jax.Array  # bool [B, S]: whether a step is its episode's first
    core: networks.Core  # before the first step, [B, hidden]
    keys: jax.Array | None  # uint32 [B, S, 2], for augmentation and dropout


def ppo_parts(args: Args, log_probs: jax.Array, values: jax.Array, batch: Batch) -> dict[str, jax.Array]:
    """The parts of PPO's loss (Schulman et al. 2017, equations 7 to 9) for each sample, float32 [B, S].

    Args:
      log_probs: float32 [B, S, 15], of the policy that learns.
      values: float32 [B, S].
      batch: [B, S].
    """
    chex.assert_equal_shape([log_probs, batch.logits])
    chex.assert_equal_shape([values, batch.values, batch.returns, batch.actions, batch.advantages])
    old_log_probs = jax.nn.log_softmax(batch.logits)
    log_ratio = jnp.take_along_axis(log_probs - old_log_probs, batch.actions[..., None], axis=-1)[..., 0]
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    value_loss = (values - batch.returns) ** 2
    if args.vf_clip:
        near = batch.values + jnp.clip(values - batch.values, -args.vf_clip, args.vf_clip)
        value_loss = jnp.maximum(value_loss, (near - batch.returns) ** 2)
    return {
        "policy_loss": -jnp.minimum(ratio * batch.advantages, clipped * batch.advantages),
        "value_loss": 0.5 * value_loss,
        "entropy": -(jnp.exp(log_probs) * log_probs).sum(axis=-1),
        "approx_kl": (jnp.exp(old_log_probs) * (old_log_probs - log_probs)).sum(axis=-1),  # exact; the usual name
        "clipfrac": (jnp.abs(ratio - 1) > args.clip_coef).astype(jnp.float32),
    }


def forward(agent: Agent, params: dict, inputs: Inputs, frames: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The learner's log-probabilities float32 [B, S, 15] and values [B, S] for `frames` in place of the inputs'."""
    frames, keys = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (frames, inputs.keys))
    features = devices.in_chunks(lambda x: agent.apply(params, *x, method="encode"), (frames, keys))
    features = features.reshape(*inputs.first.shape, -1)
    logits, values, _ = agent.apply(params, features, inputs.first, inputs.core, method="decode")
    return jax.nn.log_softmax(logits), values


def loss(args: Args, agent: Agent, params: dict, minibatch: tuple[Inputs, Batch], *, kl_coef, ent_coef, target=None):
    """PPO's loss, with DrAC's regulariser and the prediction error of the bonus's `target` if asked.

    Returns its parts for each sample, float32 [B, S], and no means over samples: `devices.gradient` takes them, and its
    docstring says why.
    """
    inputs, batch = minibatch
    frames = inputs.frames
    if inputs.keys is not None:
        augment_keys, dropout_keys = jnp.moveaxis(jax.vmap(jax.vmap(jax.random.split))(inputs.keys), 2, 0)
        inputs = inputs._replace(keys=dropout_keys)
    if args.augment:
        augmented = jax.vmap(partial(augment.augment, args))(augment_keys, frames)
        frames = augmented if args.augment_mode == "rad" else frames
    log_probs, values = forward(agent, params["agent"], inputs, frames)
    parts = ppo_parts(args, log_probs, values, batch)
    total = parts["policy_loss"] + args.vf_coef * parts["value_loss"] - ent_coef * parts["entropy"]
    if args.kl_coef:
        total += kl_coef * parts["approx_kl"]
    if args.augment and args.augment_mode == "drac":
        parts["drac_loss"] = augment.drac_loss(log_probs, values, *forward(agent, params["agent"], inputs, augmented))
        total += args.drac_coef * parts["drac_loss"]
    if args.rnd_coef:
        parts["rnd_loss"] = bonus.error(target, params["predictor"], inputs.next_frames)
        total += parts["rnd_loss"]
    return parts | {"loss": total}


def adapt_kl_coef(kl_coef: jax.Array, kl: jax.Array, target: float) -> jax.Array:
    """Schulman et al. 2017, section 4: halves or doubles the coefficient where KL is off target by 1.5 times.

    It stays within 1e-6 and 1e6, so that it can always come back.
    """
    factor = jnp.where(kl < target / 1.5, 0.5, jnp.where(kl > target * 1.5, 2.0, 1.0))
    return jnp.clip(kl_coef * factor, 1e-6, 1e6)


def prepare(args: Args, agent: Agent, state: TrainState, rollout: Rollout, steps: envs.Steps, gamma: jax.Array):
    """Rewards and advantages: returns the state with its filters moved on, a Batch [T, N] and metrics float32 []."""
    mask = ~steps.done
    reward_filter, rewards = shaping.prepare_rewards(args, state.reward_filter, steps, gamma)
    state = state._replace(reward_filter=reward_filter)
    metrics = {"charts/return_std": jnp.sqrt(reward_filter.var)}
    if args.rnd_coef:
        moved, extra = bonus.of_transitions(
            args, state.bonus, state.params["predictor"], frames=rollout.frames, steps=steps, gamma=gamma
        )
        state, rewards = state._replace(bonus=moved), rewards + args.rnd_coef * extra
        metrics["charts/intrinsic_reward"] = shaping.masked_moments(extra, mask)[0]
    stacked, first = rollout.frames.stack(args.num_steps), rollout.frames.first[-1]
    last_value = policy_and_value(agent, state.params["agent"], stacked, first, rollout.core)[1]
    advantages = jax.vmap(partial(gae, gamma=gamma, gae_lambda=args.gae_lambda), 1, 1)(
        rewards, jnp.concatenate([rollout.values, last_value[None]]), steps.terminated, steps.truncated
    )
    returns = advantages + rollout.values
    mean, var = shaping.masked_moments(advantages, mask)
    _, spread = shaping.masked_moments(returns, mask)
    metrics["losses/explained_variance"] = 1 - var / jnp.maximum(spread, 1e-8)  # advantages are returns - values
    batch = Batch(
        actions=rollout.actions,
        logits=rollout.logits,
        values=rollout.values,
        advantages=(advantages - mean) / jnp.sqrt(var + 1e-8),
        returns=returns,
    )
    return state, batch, metrics


def optimize(args: Args, agent: Agent, state: TrainState, rollout: Rollout, batch: Batch, *, weight, rates, key):
    """Epochs of minibatches; returns parameters, Adam's state and the last epoch's mean metrics.

    Args:
      batch, weight: [T, N]; the weight is 0 for what is no transition.
      rates: learning rate and entropy coefficient, float32 [].
    """
    chex.assert_tree_shape_prefix(batch, weight.shape)  # an index beyond an array's end would be no error
    tx, recurrent, num_envs = make_optimizer(args), args.core != "none", len(rollout.numbers)
    learning_rate, ent_coef = rates
    target = state.bonus.target if args.rnd_coef else None
    objective = partial(loss, args, agent, kl_coef=state.kl_coef, ent_coef=ent_coef, target=target)

    def minibatch(learner, key, index):
        params, opt_state = learner
        if recurrent:  # whole rollouts of some games
            time, env = jnp.arange(args.num_steps)[None], index[:, None]
        else:
            time, env = index[:, None] // num_envs, index[:, None] % num_envs
        # By the sample's number in the run, so that its draws are the same on whichever device it is.
        keys = jax.vmap(partial(devices.keys_of, key))(time * args.num_envs + rollout.numbers[env])
        inputs = Inputs(
            frames=rollout.frames.stack(time, env),
            next_frames=rollout.frames.stack(time + 1, env) if args.rnd_coef else None,
            first=rollout.frames.first[time, env],
            core=jax.tree.map(lambda x: x[index], rollout.first_core),
            keys=keys if args.augment or args.dropout else None,
        )
        part = jax.tree.map(lambda x: x[time, env], batch)
        grads, parts, _ = devices.gradient(objective, params, (inputs, part), weight[time, env])
        grads = grads | {"agent": networks.add_l2(grads["agent"], params["agent"], args.l2)}
        direction, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, jax.tree.map(lambda d: -learning_rate * d, direction))
        return (params, opt_state), parts | {"grad_norm": devices.norm(grads)}

    def epoch(learner, key):
        shuffle_key, sample_key = jax.random.split(key)
        samples = num_envs if recurrent else weight.size  # of this device, which has its part of each minibatch
        order = jax.random.permutation(devices.own_key(shuffle_key), samples).reshape(args.num_minibatches, -1)
        learner, parts = jax.lax.scan(lambda learner, index: minibatch(learner, sample_key, index), learner, order)
        return learner, jax.tree.map(jnp.mean, parts)

    keys = jax.random.split(key, args.update_epochs)
    (params, opt_state), parts = jax.lax.scan(epoch, (state.params, state.opt_state), keys)
    return params, opt_state, jax.tree.map(lambda x: x[-1], parts)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
@devices.spread([STATE, ROLLOUT, envs.STEPS], (STATE, SAME))
def update(args: Args, agent: Agent, state: TrainState, rollout: Rollout, steps: envs.Steps) -> tuple[TrainState, dict]:
    """One PPO update: returns the next state and metrics, float32 []."""
    learning_rate, ent_coef, gamma = (
        runs.parse_schedule(text)(state.global_step) for text in (args.learning_rate, args.ent_coef, args.gamma)
    )
    key, shuffle_key = jax.random.split(state.key)
    weight = ~steps.done
    state, batch, metrics = prepare(args, agent, state, rollout, steps, gamma)
    params, opt_state, parts = optimize(
        args, agent, state, rollout, batch, weight=weight, rates=(learning_rate, ent_coef), key=shuffle_key
    )
    metrics |= {f"losses/{name}": value for name, value in parts.items()} | {
        "losses/kl_coef": state.kl_coef,
        "losses/param_norm": devices.norm(params),  # infinite where the last step went wrong
        "charts/learning_rate": learning_rate,
        "charts/ent_coef": ent_coef,
        "charts/gamma": gamma,
    }
    state = state._replace(
        params=params,
        opt_state=opt_state,
        key=key,
        global_step=state.global_step + devices.total(weight.sum()),
        updates=state.updates + 1,
        kl_coef=adapt_kl_coef(state.kl_coef, parts["approx_kl"], args.kl_target) if args.kl_coef else state.kl_coef,
    )
    return state, metrics


# EVALUATION


@partial(jax.jit, static_argnums=(0, 1))
@devices.spread([SAME, GAMES, GAMES, GAMES, GAMES], (GAMES, GAMES), every_host=False)
def choose(args: Args, agent: Agent, params: dict, frames: jax.Array, age: jax.Array, keys: jax.Array, core):
    """Draws actions int32 [N] from the policy for stacked frames uint8 [N, 64, 64, C], steps since each episode's first
    frame int32 [N], and keys uint32 [N, 2]; returns them and the next core, the policy's memory."""
    logits, _, core = policy_and_value(agent, params, frames, age == 0, core)
    return jax.vmap(jax.random.categorical)(keys, logits), core


def make_policy(args: Args, agent: Agent, params: dict) -> Callable:
    """A policy as `envs.play_episodes` calls it."""
    start = partial(networks.initial_core, args.core, args.hidden)
    return envs.as_recurrent_policy(partial(choose, args, agent, params), start)


def trained(args: Args, agent: Agent, run_dir: str) -> dict:
    """What evaluation needs of a run's newest checkpoint, or of an agent that `evaluate.py --export` wrote."""
    return agents.load(run_dir, partial(initial_state, args, agent), lambda state: {"params": state.params["agent"]})


# MAIN


def initial(args: Args, agent: Agent) -> dict:
    """All that a resume needs besides the games; `main` saves the same."""
    return {"state": initial_state(args, agent), "carry": initial_carry(args, devices.games_of_host(args))}


def kept(args: Args, agent: Agent) -> tuple:
    """What a run keeps, for `runs.check_memory`."""
    carry = initial_carry(args, devices.games_of_host(args))
    return initial(args, agent), begin_rollout(args, carry, 0)


def main(args: Args) -> runs.Run:
    """Trains; returns the run, finished or stopped by a signal (`run.stop`)."""
    runs.check_args(args, SCRIPT)
    agent = make_agent(args)
    runs.check_memory(args, ("num_envs", "num_steps", "hidden"), jax.eval_shape(partial(kept, args, agent)))

    numbers, seed = devices.games_of_host(args), envs.derive_seed(args.seed, 0)
    with (
        runs.Run(args, SCRIPT, partial(runs.load, partial(initial, args, agent))) as run,
        closing(envs.Games(partial(envs.make_levels, args), numbers, seed, args.restart_every)) as games,
    ):
        saved = run.saved
        episodes, watch = envs.EpisodeStatistics(len(numbers)), runs.Stopwatch()
        start_from = saved or devices.run_once(initial, args, agent)
        state = devices.share(args, start_from["state"], STATE)
        carry = start_from["carry"] if "carry" in start_from else initial_carry(args, numbers)
        carry = devices.put(args, carry, CARRY)
        step = int(state.global_step)
        if saved and "games" in saved:  # else there are not as many hosts as there were, and games start anew
            episodes.restore(saved["episodes"])
            games.restore(saved["games"], run)

        def save():
            own = {"carry": carry, "games": games.mark().save(), "episodes": episodes.save()}
            run.save(step, {"state": state}, own)

        while True:
            params, i = devices.here(args, state.params["agent"]), int(state.updates)
            envs.evaluate_if_due(args, run, step, make_policy(args, agent, params))
            if run.over(step):
                break
            rollout, steps, carry = collect(args, agent, games, params, carry, i=i, watch=watch)
            with watch("update"):
                given = devices.join(args, (rollout, steps), (ROLLOUT, envs.STEPS))
                state, metrics = update(args, agent, state, *given)
                metrics = jax.device_get(metrics)
            step = int(state.global_step)
            run.check_finite(step, metrics)
            episodes.add(steps)
            run.log(step, metrics | episodes.metrics() | {"charts/SPS": run.steps_per_second(step)} | watch.fractions())
            if run.checkpoint_due(step):
                save()
        save()
    return run


if __name__ == "__main__":
    runs.cli(Args, main)
