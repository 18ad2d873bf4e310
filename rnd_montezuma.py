"""PPO with Random Network Distillation on Montezuma's Revenge: a bonus for frames that a network cannot predict yet.

Burda et al. 2018 (arXiv 1810.12894), with the paper's settings as defaults, except that a run is a third as long; "the
bonus" is the paper's intrinsic reward. With --async the games go on while the learner learns, one update behind. Try:

    python rnd_montezuma.py --async --room-map
    python rnd_montezuma.py --num-envs 64 --num-steps 32 --channels 16,32,32 --hidden 256 --update-epochs 2 --norm-adv
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from annotated_types import Interval

from common import agents, atari, devices, envs, networks, runs, shaping
from common.actors import ActorArgs, Fleet
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
)

SCRIPT = Path(__file__).stem


@dataclass(frozen=True)
class Args(atari.GameArgs, ActorArgs, runs.RunArgs):
    FIXED: ClassVar = ("num_envs", "obs_norm_init_steps")  # the games and the first statistics are of these

    checkpoint_every: PositiveInt = devices.host_only(2_000_000)
    wandb_project: str = devices.host_only("montezuma")

    total_timesteps: Timesteps = 163_840_000
    """total number of environment steps"""
    num_envs: PositiveInt = 128
    """number of parallel environments, over all devices"""
    num_steps: PositiveInt = 128
    """steps per environment in a rollout; the batch is num_envs x num_steps"""
    async_: Annotated[bool, tyro.conf.arg(name="async")] = False
    """play the next rollout while the learner learns from this one, with parameters that are one update behind"""
    vtrace: bool = False
    """with async: correct both values and their advantages for the policy's age by V-trace, ratios clipped at 1"""
    obs_norm_init_steps: Annotated[int, Interval(ge=1, le=10**6)] = 2048
    """steps that each game plays at random before training (not in total_timesteps), to start the statistics by which
    RND's frames are normalised"""
    num_minibatches: PositiveInt = 4
    """number of minibatches per epoch"""
    update_epochs: Iterations = 4
    """epochs over each batch"""
    learning_rate: NonNegativeSchedule = "1e-4"
    """Adam's learning rate: a number, or a schedule "step:value,..." in environment steps"""
    predictor_lr_ratio: NonNegativeFloat = 1.0
    """step size of RND's predictor over that of the policy; the slower it learns, the longer a bonus lasts"""
    gamma: UnitInterval = 0.999
    """discount of the game's reward"""
    int_gamma: UnitInterval = 0.99
    """discount of the bonus, whose return does not end with the episode"""
    gae_lambda: UnitInterval = 0.95
    """lambda of generalised advantage estimation, for both"""
    ext_coef: NonNegativeFloat = 2.0
    """weight of the advantage from the game's reward, which is clipped to its sign; 0 for curiosity only"""
    int_coef: NonNegativeFloat = 1.0
    """weight of the advantage from the bonus"""
    int_reward_clip: NonNegativeFloat = 0.0
    """a transition's bonus, divided by its return's standard deviation, is at most this; 0 for no limit"""
    norm_adv: bool = False
    """normalise the advantages of a batch"""
    clip_coef: PositiveFloat = 0.1
    """clip the probability ratio to 1 +- this"""
    vf_coef: NonNegativeFloat = 1.0
    """coefficient of the value loss, half the mean squared error of each head"""
    ent_coef: NonNegativeFloat = 0.001
    """coefficient of the entropy bonus"""
    update_proportion: UnitInterval = 0.25
    """share of each minibatch, drawn at random, that the predictor learns from"""
    max_grad_norm: NonNegativeFloat = 0.0
    """clip the gradient of policy and predictor together to this global norm; 0 for no clipping"""
    adam_eps: PositiveFloat = 1e-8
    """Adam's epsilon"""
    channels: str = "32,64,64"
    """channels of the three convolutions, in policy, target and predictor"""
    hidden: Size = 512
    """units of the dense layers (half as many in the policy's first) and of the core, and the target's features"""
    core: Literal["none", "lstm", "gru"] = "none"
    """recurrent core of the policy; minibatches then are of whole rollouts"""
    predictor_depth: Annotated[int, Interval(ge=0, le=16)] = 2
    """dense layers that the predictor has besides the target's one; 0 for equal depth"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """the policy's convolutions and first dense layer; auto is bfloat16 on an accelerator and float32 on a CPU"""
    room_map: bool = devices.host_only(False)
    """draw the rooms visited so far, at each checkpoint: rooms.png in the run directory, and W&B"""

    def check(self) -> None:
        """Raises UsageError for inconsistent flags."""
        check(self.channels != "", "--channels '': give 3 numbers, such as 32,64,64")
        encoder_args(self).check()
        check(self.ext_coef + self.int_coef > 0, "--ext-coef 0.0: nothing to learn from, as --int-coef is 0 too")
        check(not self.distributed, f"--distributed: {SCRIPT}.py trains on one host, on as many devices as it has")
        runs.check_needs(self, self.async_, "--async", ("vtrace", "actor_devices"))
        check(self.actor_devices <= 1, f"--actor-devices {self.actor_devices}: give at most 1, for the one actor")
        runs.check_batch(self)

    def check_training(self) -> None:
        """Raises UsageError, one sentence, if so many devices leave the predictor nothing to learn from."""
        sample = self.num_envs * self.num_steps // self.num_minibatches // devices.count(self)
        check(
            round(self.update_proportion * sample) >= 1,
            f"--update-proportion {self.update_proportion}: leaves the predictor nothing of each device's {sample} "
            f"samples of a minibatch, give {1 / sample:.2g} or more",
        )


# NETWORKS


def encoder_args(args: Args) -> networks.EncoderArgs:
    """The policy's convolutions and its first dense layer."""
    return networks.EncoderArgs(
        encoder="nature",
        channels=args.channels,
        init="orthogonal",
        pool="flatten",
        hidden=max(args.hidden // 2, 1),
        dtype=args.dtype,
    )


class Agent(nn.Module):
    """A policy and two values, of the game's reward and of the bonus, on the Nature CNN and perhaps a core."""

    encoder: nn.Module
    core: networks.Recurrent
    hidden: int

    def setup(self):
        dense = partial(nn.Dense, precision="highest")  # in full float32 on a GPU too
        self.trunk = dense(self.hidden, kernel_init=networks.INITS["orthogonal"])
        self.actor = dense(self.hidden, kernel_init=networks.INITS["orthogonal"])
        self.critic = dense(self.hidden, kernel_init=networks.INITS["orthogonal"])
        # Small last layers make the first policy nearly uniform, and the first values nearly 0.
        self.policy = dense(atari.NUM_ACTIONS, kernel_init=nn.initializers.orthogonal(0.01))
        self.values = dense(2, kernel_init=nn.initializers.orthogonal(0.01))

    def encode(self, frames: jax.Array) -> jax.Array:
        """Frames uint8 [B, 84, 84, C] -> features float32 [B, hidden]."""
        return nn.relu(self.trunk(self.encoder(frames)))

    def decode(self, x: jax.Array, first: jax.Array, core: networks.Core):
        """Features [B, S, hidden] of S steps, whether each is its episode's first [B, S], and the core before them
        -> logits float32 [B, S, 18], values float32 [B, S, 2] and the core after them."""
        x, core = self.core(x, first, core)
        return self.policy(nn.relu(self.actor(x))), self.values(nn.relu(self.critic(x))), core

    def __call__(self, frames: jax.Array, first: jax.Array, core: networks.Core):
        """All of it, for frames [B, 84, 84, C] of one step."""
        return self.decode(self.encode(frames)[:, None], first[:, None], core)


def make_agent(args: Args) -> Agent:
    """The networks that these flags describe."""
    core = networks.Recurrent(args.core, args.hidden)
    return Agent(networks.make_encoder(encoder_args(args)), core, args.hidden)


def policy_and_value(agent: Agent, params: dict, frames: jax.Array, first: jax.Array, core: networks.Core):
    """Logits [N, 18], values [N, 2] and the next core for stacked frames [N, 84, 84, C] of one step."""
    features = devices.in_chunks(partial(agent.apply, params, method="encode"), frames)
    logits, values, core = agent.apply(params, features[:, None], first[:, None], core, method="decode")
    return logits[:, 0], values[:, 0], core


class Features(nn.Module):
    """RND's target network or, with `depth` more dense layers, its predictor: whitened frames float32 [B, 84, 84, 1] ->
    features float32 [B, hidden] (Burda et al. 2018, appendix A.5)."""

    channels: str
    hidden: int
    depth: int  # dense layers before the last

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        # In full float32 on every device: rounding would be a bonus that never falls.
        options = {"kernel_init": networks.INITS["orthogonal"], "precision": "highest"}
        for features, size, stride in zip(self.channels.split(","), (8, 4, 3), (4, 2, 1), strict=True):
            x = nn.leaky_relu(networks.conv(int(features), size, stride, "VALID", **options)(x), 0.2)
        x = x.reshape(len(x), -1)
        for _ in range(self.depth):
            x = nn.relu(nn.Dense(self.hidden, **options)(x))
        return nn.Dense(self.hidden, **options)(x)


def make_target(args: Args) -> Features:
    return Features(args.channels, args.hidden, 0)


def make_predictor(args: Args) -> Features:
    return Features(args.channels, args.hidden, args.predictor_depth)


# TRAINING STATE


class FrameStatistics(NamedTuple):
    """Mean and variance of each pixel over all frames that were seen, float32."""

    count: jax.Array  # []
    mean: jax.Array  # [84, 84, 1]
    var: jax.Array  # [84, 84, 1]


class TrainState(NamedTuple):
    """The learner."""

    params: dict  # of the agent and of RND's predictor
    target: dict  # RND's other network, which never learns
    opt_state: optax.OptState
    key: jax.Array
    global_step: jax.Array  # int32 []: transitions learnt from
    updates: jax.Array  # int32 []: the parameters' version
    frame_stats: FrameStatistics
    bonus_filter: shaping.ReturnFilter


STATE = devices.layout(TrainState, bonus_filter=shaping.FILTER)


class Carry(NamedTuple):
    """What the actor needs besides its games to go on with them."""

    history: jax.Array  # uint8 [H, N, 84, 84, 1]: the frames before the newest
    numbers: jax.Array  # int32 [N]: of these games in the run
    core: networks.Core


CARRY = devices.layout(Carry, steps="history", games="numbers core")


def make_optimizer(args: Args) -> optax.GradientTransformation:
    """Adam's direction, without step size and sign: `optimize` multiplies it by -learning_rate, from a schedule."""
    return optax.chain(devices.clip_by_norm(args.max_grad_norm), optax.scale_by_adam(eps=args.adam_eps))


@partial(jax.jit, static_argnums=(0, 1))
def initial_state(args: Args, agent: Agent) -> TrainState:
    """The learner before its first update, from `args.seed`."""
    key, agent_key, predictor_key, target_key = jax.random.split(jax.random.PRNGKey(args.seed), 4)
    frames = jnp.zeros((1, *atari.FRAME_SHAPE[:2], args.frame_stack), jnp.uint8)
    frame = jnp.zeros((1, *atari.FRAME_SHAPE))
    core = networks.initial_core(args.core, args.hidden, 1)
    params = {
        "agent": agent.init(agent_key, frames, jnp.ones(1, bool), core),
        "predictor": make_predictor(args).init(predictor_key, frame),
    }
    return TrainState(
        params=params,
        target=make_target(args).init(target_key, frame),
        opt_state=make_optimizer(args).init(params),
        key=key,
        global_step=jnp.int32(0),
        updates=jnp.int32(0),
        frame_stats=FrameStatistics(jnp.float32(0), jnp.zeros(atari.FRAME_SHAPE), jnp.ones(atari.FRAME_SHAPE)),
        bonus_filter=shaping.new_filter(args.num_envs),
    )


@partial(jax.jit, static_argnums=0)
def initial_carry(args: Args, numbers: jax.Array) -> Carry:
    """Before the first step of the games with these numbers, int32 [N]."""
    return Carry(
        history=envs.empty_history(len(numbers), args.offsets, atari.FRAME_SHAPE),
        numbers=numbers,
        core=networks.initial_core(args.core, args.hidden, len(numbers)),
    )


# ROLLOUT


class Rollout(NamedTuple):
    """What stays on the device while T steps are played."""

    frames: envs.Frames  # of T + 1 steps
    actions: jax.Array  # int32 [T, N]
    logits: jax.Array  # float32 [T, N, 18]
    values: jax.Array  # float32 [T + 1, N, 2]
    numbers: jax.Array  # int32 [N]
    first_core: networks.Core
    core: networks.Core
    key: jax.Array
    t: jax.Array  # int32 []

    @property
    def reached(self) -> jax.Array:
        """The frames uint8 [T, N, 84, 84, 1] that its steps lead to."""
        return self.frames.images[self.frames.past + 1 :]


ROLLOUT = devices.layout(Rollout, steps="frames actions logits values", games="numbers first_core core")


class Unroll(NamedTuple):
    """What the actor hands to the learner."""

    rollout: Rollout
    steps: envs.Steps
    rooms: np.ndarray  # int64 [T, N]: where step t acts
    pictures: dict[int, np.ndarray]  # a frame uint8 [84, 84] of each of these rooms


def in_turns(args: Args) -> bool:
    """Whether the actor has all devices in its turn; with --async it has one of its own, or one of the learner's."""
    return not args.async_


@partial(jax.jit, static_argnums=0)
@devices.spread([CARRY, SAME], ROLLOUT, when=in_turns)
def begin_rollout(args: Args, carry: Carry, i: int) -> Rollout:
    """The run's i-th rollout, before its first step."""
    shape = (args.num_steps, len(carry.numbers))
    return Rollout(
        frames=envs.Frames.after(carry.history, args.num_steps + 1, args.offsets),
        actions=jnp.zeros(shape, jnp.int32),
        logits=jnp.zeros((*shape, atari.NUM_ACTIONS)),
        values=jnp.zeros((args.num_steps + 1, len(carry.numbers), 2)),
        numbers=carry.numbers,
        first_core=carry.core,
        core=carry.core,
        key=jax.random.fold_in(jax.random.PRNGKey(envs.derive_seed(args.seed, 2)), i),
        t=jnp.int32(0),
    )


def observe(args: Args, agent: Agent, params: dict, rollout: Rollout, *, obs: jax.Array, age: jax.Array):
    """Adds obs uint8 [N, 1, 84, 84], age int32 [N] and their values to the rollout; returns it, logits [N, 18] and the
    next core."""
    t = rollout.t
    frames = rollout.frames.put(t, obs, age)
    logits, values, core = policy_and_value(agent, params, frames.stack(t), age == 0, rollout.core)
    return rollout._replace(frames=frames, values=rollout.values.at[t].set(values)), logits, core


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
@devices.spread([SAME, ROLLOUT, GAMES, GAMES], (ROLLOUT, GAMES), when=in_turns)
def act(args: Args, agent: Agent, params: dict, rollout: Rollout, obs: jax.Array, age: jax.Array):
    """Chooses actions for obs uint8 [N, 1, 84, 84], age int32 [N]; returns the rollout and actions int32 [N]."""
    t = rollout.t
    rollout, logits, core = observe(args, agent, params, rollout, obs=obs, age=age)
    # Drawn by game, so that it plays the same on whichever device it is.
    keys = devices.keys_of(jax.random.fold_in(rollout.key, t), rollout.numbers)
    actions = jax.vmap(jax.random.categorical)(keys, logits)
    rollout = rollout._replace(
        actions=rollout.actions.at[t].set(actions),
        logits=rollout.logits.at[t].set(logits),
        core=core,
        t=t + 1,
    )
    return rollout, actions


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
@devices.spread([SAME, ROLLOUT, GAMES, GAMES], (ROLLOUT, CARRY), when=in_turns)
def end_rollout(args: Args, agent: Agent, params: dict, rollout: Rollout, obs: jax.Array, age: jax.Array):
    """Adds the frames after the last step, obs uint8 [N, 1, 84, 84], and their values float32 [N, 2]; returns the
    rollout and the next Carry."""
    rollout, _, _ = observe(args, agent, params, rollout, obs=obs, age=age)
    return rollout, Carry(rollout.frames.history(args.num_steps), rollout.numbers, rollout.core)


def collect(args: Args, agent: Agent, games: envs.Games, params: dict, carry: Carry, *, i: int, watch, check_stop):
    """Plays the i-th rollout, num_steps steps of each game, as `actors.Fleet` asks for it: Unroll, next Carry."""
    agent, params = networks.for_acting(agent, params)
    rollout, rooms, pictures = begin_rollout(args, carry, i), [], {}

    def choose_actions(obs, age):
        nonlocal rollout
        given = devices.feed(args, (obs, age)) if in_turns(args) else (obs, age)
        rollout, actions = act(args, agent, params, rollout, *given)
        rooms.append(atari.rooms_of(games.info))
        for room, env in zip(*np.unique(rooms[-1], return_index=True), strict=True):
            pictures[int(room)] = obs[env, 0].copy()
        return actions

    steps = games.play(choose_actions, args.num_steps, watch, check_stop)
    rollout, carry = end_rollout(args, agent, params, rollout, games.obs, games.age)
    return Unroll(rollout, steps, np.stack(rooms), pictures), carry


# RANDOM NETWORK DISTILLATION (Burda et al. 2018, sections 2.2 and 2.4)


@jax.jit
def add_frames(stats: FrameStatistics, frames: jax.Array) -> FrameStatistics:
    """The statistics with frames uint8 [B, 84, 84, 1] added."""
    count = devices.total(len(frames))
    mean = devices.total(frames.sum(axis=0, dtype=jnp.float32)) / count
    var = devices.total(((frames - mean) ** 2).sum(axis=0)) / count
    return FrameStatistics(*shaping.merge_moments(*stats, count, mean, var))


def whiten(stats: FrameStatistics, frames: jax.Array) -> jax.Array:
    """Frames uint8 [B, 84, 84, 1] as RND sees them: float32, by the running mean and std of each pixel, within +-5."""
    return jnp.clip((frames - stats.mean) / jnp.sqrt(stats.var + 1e-4), -5, 5)  # a std of 0.01 grey levels at the least


def novelty(args: Args, stats: FrameStatistics, target: dict, predictor: dict, frames: jax.Array) -> jax.Array:
    """How badly the predictor knows the target's features of frames uint8 [B, 84, 84, 1]: mean squares [B]."""
    white = whiten(stats, frames)
    truth = jax.lax.stop_gradient(make_target(args).apply(target, white))
    return ((make_predictor(args).apply(predictor, white) - truth) ** 2).mean(axis=-1)


def bonuses(args: Args, state: TrainState, rollout: Rollout, mask: jax.Array):
    """The bonus of each transition, for the frame that it leads to, divided by the running standard deviation of its
    return: the filter, and raw and divided bonus float32 [T, N], 0 where not `mask`."""
    of_frames = partial(novelty, args, state.frame_stats, state.target, state.params["predictor"])
    raw = mask * jax.lax.map(partial(devices.in_chunks, of_frames), rollout.reached)
    # The return runs on through an episode's end, and is not clipped.
    ended = jnp.zeros_like(mask)
    bonus_filter, bonus = shaping.normalize(state.bonus_filter, raw, ended, mask, args.int_gamma, clip=jnp.inf)
    return bonus_filter, raw, bonus


def predictor_loss(args: Args, stats: FrameStatistics, target: dict, predictor: dict, frames: jax.Array):
    """The predictor's loss for each of the frames uint8 [B, 84, 84, 1], as `devices.gradient` wants it: [B]."""
    return {"loss": novelty(args, stats, target, predictor, frames)}


# PROXIMAL POLICY OPTIMISATION


def gae(rewards, values, *, discount, decay, ratio) -> jax.Array:
    """Generalised advantage estimates (Schulman et al. 2016, equation 16), with V-trace's truncated importance weights
    (Espeholt et al. 2018, equation 1, both bars 1) where another policy has acted.

    Args:
      rewards: float32 [T, ...], of the transition from step t to t + 1.
      values: float32 [T + 1, ...].
      discount: float32 [T, ...], of the value that follows: 0 where the episode terminates.
      decay: float32 [T, ...], discount x lambda; 0 where nothing may come through, 1 to pass over a step.
      ratio: float32 [T, ...], learner's over actor's probability of the action; 1 on-policy.

    Returns advantages float32 [T, ...], which are also V-trace's targets less the values (with its lambda, as in rlax).
    """
    chex.assert_equal_shape([rewards, values[1:], discount, decay, ratio])
    rho = jnp.minimum(1.0, ratio)
    deltas = rho * (rewards + discount * values[1:] - values[:-1])

    def backward(advantage, step):
        delta, decay = step
        advantage = delta + decay * advantage
        return advantage, advantage

    start, steps = jnp.zeros_like(deltas[0]), (deltas, rho * decay)
    return jax.lax.scan(backward, start, steps, reverse=True, unroll=devices.unroll())[1]


def advantages(args: Args, rewards, bonus, *, values, ratio, steps: envs.Steps) -> jax.Array:
    """Advantages float32 [T, N, 2]: of the game's rewards, which are episodic, and of the bonus, which is not.

    Args:
      rewards, bonus, ratio: float32 [T, N].
      values: float32 [T + 1, N, 2].
    """
    # At a time limit the last frame's value stands for the rest of the episode.
    of_game = gae(
        rewards,
        values[..., 0],
        discount=args.gamma * (1.0 - steps.terminated),
        decay=args.gamma * args.gae_lambda * (1.0 - steps.ended),
        ratio=ratio,
    )
    # The bonus's return goes on with the next episode, over EnvPool's junk step as if it were not there.
    real = ~steps.done
    through = jnp.where(real, values[:-1, :, 1], values[1:, :, 1])
    of_bonus = gae(
        bonus,
        jnp.concatenate([through, values[-1:, :, 1]]),
        discount=jnp.where(real, args.int_gamma, 1.0),
        decay=jnp.where(real, args.int_gamma * args.gae_lambda, 1.0),
        ratio=jnp.where(real, ratio, 1.0),
    )
    return jnp.stack([of_game, of_bonus], axis=-1)


class Batch(NamedTuple):
    """Transitions to learn from: over a rollout [T, N]; in a minibatch B sequences of S steps, [B, S] (S = 1 without a
    recurrent core)."""

    actions: jax.Array  # int32; all else is float32
    logits: jax.Array  # [..., 18], of the policy that the ratio compares with
    advantages: jax.Array  # of both rewards, weighed and added
    returns: jax.Array  # [..., 2]


class Inputs(NamedTuple):
    """What the policy sees of a minibatch."""

    frames: jax.Array  # uint8 [B, S, 84, 84, C]
    first: jax.Array  # bool [B, S]: whether a step is its episode's first
    core: networks.Core  # before the first step, [B, hidden]


def log_ratio_of(log_probs: jax.Array, old_log_probs: jax.Array, actions: jax.Array) -> jax.Array:
    """The log of the ratio, new over old, of two policies' probabilities of the actions int32 [...]: float32 [...],
    from their log-probabilities float32 [..., 18]."""
    return jnp.take_along_axis(log_probs - old_log_probs, actions[..., None], axis=-1)[..., 0]


def ppo_parts(args: Args, log_probs: jax.Array, values: jax.Array, batch: Batch) -> dict[str, jax.Array]:
    """The parts of PPO's loss (Schulman et al. 2017, equations 7 and 9) for each sample, float32 [B, S].

    Args:
      log_probs: float32 [B, S, 18], of the policy that learns.
      values: float32 [B, S, 2].
      batch: [B, S].
    """
    chex.assert_equal_shape([log_probs, batch.logits])
    chex.assert_equal_shape([values, batch.returns])
    chex.assert_equal_shape([values[..., 0], batch.actions, batch.advantages])
    old_log_probs = jax.nn.log_softmax(batch.logits)
    ratio = jnp.exp(log_ratio_of(log_probs, old_log_probs, batch.actions))
    clipped = jnp.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    return {
        "policy_loss": -jnp.minimum(ratio * batch.advantages, clipped * batch.advantages),
        "value_loss": 0.5 * ((values - batch.returns) ** 2).sum(axis=-1),
        "entropy": -(jnp.exp(log_probs) * log_probs).sum(axis=-1),
        "approx_kl": (jnp.exp(old_log_probs) * (old_log_probs - log_probs)).sum(axis=-1),
        "clipfrac": (jnp.abs(ratio - 1) > args.clip_coef).astype(jnp.float32),
    }


def forward(agent: Agent, params: dict, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """The learner's log-probabilities float32 [B, S, 18] and values [B, S, 2]."""
    frames = inputs.frames.reshape(-1, *inputs.frames.shape[2:])
    features = devices.in_chunks(partial(agent.apply, params, method="encode"), frames)
    features = features.reshape(*inputs.first.shape, -1)
    logits, values, _ = agent.apply(params, features, inputs.first, inputs.core, method="decode")
    return jax.nn.log_softmax(logits), values


def loss(args: Args, agent: Agent, params: dict, minibatch: tuple[Inputs, Batch]) -> dict[str, jax.Array]:
    """PPO's loss.

    Returns its parts for each sample, float32 [B, S], and no means over samples: `devices.gradient` takes them, and its
    docstring says why.
    """
    inputs, batch = minibatch
    parts = ppo_parts(args, *forward(agent, params, inputs), batch)
    total = parts["policy_loss"] + args.vf_coef * parts["value_loss"] - args.ent_coef * parts["entropy"]
    return parts | {"loss": total}


def recompute(args: Args, agent: Agent, params: dict, rollout: Rollout) -> tuple[jax.Array, jax.Array]:
    """What a rollout's steps would have been with these parameters: logits float32 [T, N, 18], values [T + 1, N, 2]."""

    def step(core, t):
        stacked, first = rollout.frames.stack(t), rollout.frames.first[t]
        logits, values, core = policy_and_value(agent, params, stacked, first, core)
        return core, (logits, values)

    _, (logits, values) = jax.lax.scan(step, rollout.first_core, jnp.arange(args.num_steps + 1))
    return logits[:-1], values


def prepare(args: Args, agent: Agent, state: TrainState, rollout: Rollout, steps: envs.Steps):
    """Bonuses and advantages: returns the state with its filter moved on, a Batch [T, N], the bonuses float32 [T, N]
    and metrics float32 []."""
    mask = ~steps.done

    def mean_of(x):
        return shaping.masked_moments(x, mask)[0]

    logits, values, ratio, metrics = rollout.logits, rollout.values, jnp.ones(mask.shape), {}
    if args.vtrace:  # logits and values become the learner's, who is one update ahead of the policy that acted
        logits, values = recompute(args, agent, state.params["agent"], rollout)
        acted = jax.nn.log_softmax(rollout.logits)
        ratio = jnp.exp(log_ratio_of(jax.nn.log_softmax(logits), acted, rollout.actions))
        metrics = {"losses/rho": mean_of(jnp.minimum(1.0, ratio)), "losses/rho_clipfrac": mean_of(ratio > 1)}
    bonus_filter, raw, whole_bonus = bonuses(args, state, rollout, mask)
    bonus = jnp.minimum(whole_bonus, args.int_reward_clip or jnp.inf)
    rewards = jnp.sign(steps.rewards)
    both = advantages(args, rewards, bonus, values=values, ratio=ratio, steps=steps)
    total = args.ext_coef * both[..., 0] + args.int_coef * both[..., 1]
    if args.norm_adv:
        mean, var = shaping.masked_moments(total, mask)
        total = (total - mean) / jnp.sqrt(var + 1e-8)
    batch = Batch(actions=rollout.actions, logits=logits, advantages=total, returns=both + values[:-1])
    metrics |= {
        "charts/extrinsic_reward": mean_of(rewards),
        "charts/intrinsic_reward": mean_of(bonus),
        "charts/intrinsic_reward_max": devices.highest(whole_bonus.max()),
        "charts/prediction_error": mean_of(raw),
        "charts/intrinsic_return_std": jnp.sqrt(bonus_filter.var),
    }
    for i, name in enumerate(("explained_variance", "intrinsic_explained_variance")):
        _, unexplained = shaping.masked_moments(both[..., i], mask)
        _, spread = shaping.masked_moments(batch.returns[..., i], mask)
        metrics[f"losses/{name}"] = 1 - unexplained / jnp.maximum(spread, 1e-8)  # advantages are returns - values
    return state._replace(bonus_filter=bonus_filter), batch, bonus, metrics


def optimize(
    args: Args, agent: Agent, state: TrainState, rollout: Rollout, batch: Batch, *, weight, learning_rate, key
):
    """Epochs of minibatches; returns parameters, Adam's state and the last epoch's mean metrics.

    Args:
      batch, weight: [T, N]; the weight is 0 for what is no transition.
    """
    chex.assert_tree_shape_prefix(batch, weight.shape)  # an index beyond an array's end would be no error
    tx, recurrent, num_envs = make_optimizer(args), args.core != "none", len(rollout.numbers)
    of_policy = partial(loss, args, agent)
    of_predictor = partial(predictor_loss, args, state.frame_stats, state.target)

    def minibatch(learner, key, index):
        params, opt_state = learner
        if recurrent:  # whole rollouts of some games
            time, env = jnp.arange(args.num_steps)[None], index[:, None]
        else:
            time, env = index[:, None] // num_envs, index[:, None] % num_envs
        inputs = Inputs(
            frames=rollout.frames.stack(time, env),
            first=rollout.frames.first[time, env],
            core=jax.tree.map(lambda x: x[index], rollout.first_core),
        )
        part = jax.tree.map(lambda x: x[time, env], batch)
        policy_grads, parts, _ = devices.gradient(of_policy, params["agent"], (inputs, part), weight[time, env])
        # The predictor learns from the frames that gave the bonus, of a random part of the transitions.
        shape = part.actions.shape
        drawn = jax.random.choice(
            devices.own_key(key), part.actions.size, (round(args.update_proportion * part.actions.size),), replace=False
        )
        time, env = (jnp.broadcast_to(x, shape).reshape(-1)[drawn] for x in (time, env))
        predictor_grads, error, _ = devices.gradient(
            of_predictor, params["predictor"], rollout.reached[time, env], weight[time, env]
        )
        grads = {"agent": policy_grads, "predictor": predictor_grads}
        direction, opt_state = tx.update(grads, opt_state, params)
        direction["predictor"] = jax.tree.map(lambda d: args.predictor_lr_ratio * d, direction["predictor"])
        params = optax.apply_updates(params, jax.tree.map(lambda d: -learning_rate * d, direction))
        return (params, opt_state), parts | {"rnd_loss": error["loss"], "grad_norm": devices.norm(grads)}

    def epoch(learner, key):
        shuffle_key, sample_key = jax.random.split(key)
        samples = num_envs if recurrent else weight.size  # of this device, which has its part of each minibatch
        order = jax.random.permutation(devices.own_key(shuffle_key), samples).reshape(args.num_minibatches, -1)
        keys = jax.random.split(sample_key, args.num_minibatches)
        learner, parts = jax.lax.scan(lambda learner, x: minibatch(learner, *x), learner, (keys, order))
        return learner, jax.tree.map(jnp.mean, parts)

    keys = jax.random.split(key, args.update_epochs)
    (params, opt_state), parts = jax.lax.scan(epoch, (state.params, state.opt_state), keys)
    return params, opt_state, jax.tree.map(lambda x: x[-1], parts)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
@devices.spread([STATE, ROLLOUT, envs.STEPS], (STATE, SAME, STEPS))
def update(args: Args, agent: Agent, state: TrainState, rollout: Rollout, steps: envs.Steps):
    """One update (Burda et al. 2018, algorithm 1): the next state, metrics float32 [] and bonuses float32 [T, N]."""
    learning_rate = runs.parse_schedule(args.learning_rate)(state.global_step)
    key, shuffle_key = jax.random.split(state.key)
    weight = ~steps.done
    state, batch, bonus, metrics = prepare(args, agent, state, rollout, steps)
    # The bonus was given by the old statistics, the predictor learns with the new ones.
    seen = rollout.reached.reshape(-1, *atari.FRAME_SHAPE)
    state = state._replace(frame_stats=add_frames(state.frame_stats, seen))
    params, opt_state, parts = optimize(
        args, agent, state, rollout, batch, weight=weight, learning_rate=learning_rate, key=shuffle_key
    )
    state = state._replace(
        params=params,
        opt_state=opt_state,
        key=key,
        global_step=state.global_step + devices.total(weight.sum()),
        updates=state.updates + 1,
    )
    metrics |= {f"losses/{name}": value for name, value in parts.items()} | {
        "losses/param_norm": devices.norm(params),  # infinite where the last step went wrong
        "charts/learning_rate": learning_rate,
        "charts/updates": state.updates,
    }
    return state, metrics, bonus


# EVALUATION


@partial(jax.jit, static_argnums=(0, 1))
@devices.spread([SAME, GAMES, GAMES, GAMES, GAMES], (GAMES, GAMES))
def choose(args: Args, agent: Agent, params: dict, frames: jax.Array, age: jax.Array, keys: jax.Array, core):
    """Draws actions int32 [N] from the policy for stacked frames uint8 [N, 84, 84, C], steps since each episode's first
    frame int32 [N], and keys uint32 [N, 2]; returns them and the next core, the policy's memory."""
    logits, _, core = policy_and_value(agent, params, frames, age == 0, core)
    return jax.vmap(jax.random.categorical)(keys, logits), core


def make_policy(args: Args, agent: Agent, params: dict) -> Callable:
    """A policy as `envs.play_episodes` calls it."""
    start = partial(networks.initial_core, args.core, args.hidden)
    return envs.as_recurrent_policy(partial(choose, args, agent, params), start)


def trained(args: Args, agent: Agent, run_dir: str) -> dict:
    """What evaluation needs of a run's newest checkpoint, or of an agent that `evaluate.py --export` wrote."""

    def part(state):
        return {"params": state.params["agent"], "updates": state.updates}

    return agents.load(run_dir, partial(initial_state, args, agent), part)


def evaluate(
    args: Args, run_dir: str, *, episodes: int, seed: int, levels: str, random: bool, video: bool
) -> runs.Evaluation:
    """For evaluate.py: plays what a run has learnt, or random actions, in the game as it was trained on: a row for each
    episode, a summary of them and the best one's frames, if asked."""
    agent = make_agent(args)
    saved = devices.put(args, trained(args, agent, run_dir), SAME)
    policy = atari.random_policy if random else make_policy(args, agent, saved["params"])
    rows, summary, film = atari.evaluate(args, policy, episodes=episodes, seed=seed, record=video)
    name, updates = "random_episodes" if random else "episodes", int(saved["updates"])
    return runs.Evaluation(
        int(saved["global_step"]), name, f"update {updates:,}", rows, summary | {"update": updates}, film
    )


# MAIN


def observe_random_play(args: Args, run: runs.Run, state: TrainState) -> TrainState:
    """Starts the statistics of frames from random steps (section 2.4); they stay as they are if a signal comes."""
    run.say(f"{args.obs_norm_init_steps * args.num_envs:,} random steps, to normalise RND's frames by")
    env = atari.make_montezuma(args, args.num_envs, envs.derive_seed(args.seed, 3))
    rng = np.random.default_rng(envs.derive_seed(args.seed, 4))
    stats = jax.device_get(state.frame_stats)
    env.reset()
    for _ in range(args.obs_norm_init_steps):
        if run.stop:
            break
        obs = env.step(rng.integers(0, atari.NUM_ACTIONS, args.num_envs))[0]
        stats = add_frames(stats, obs.transpose(0, 2, 3, 1))
    env.close()
    return state if run.stop else devices.put(args, state._replace(frame_stats=stats), STATE)


def make_fleet(args: Args, agent: Agent) -> Fleet:
    """One actor. With --async it plays beside the learner, on one device; else they take turns on all of them."""
    seed, numbers = envs.derive_seed(args.seed, 1), devices.games_of_host(args)
    own = devices.of_actors(args, 1)
    return Fleet(
        partial(collect, args, agent),
        [envs.Games(partial(atari.make_montezuma, args), numbers, seed, args.restart_every)],
        [initial_carry(args, numbers)],
        homes=own if args.async_ else [devices.shardings(args, SAME)],
        carry_homes=own if args.async_ else [devices.shardings(args, CARRY)],
        max_lag=int(args.async_),
        lockstep=True,
    )


def initial(args: Args, agent: Agent) -> dict:
    """The learner's part of what a resume needs."""
    return {"state": initial_state(args, agent)}


def kept(args: Args, agent: Agent) -> tuple:
    """What a run keeps, for `runs.check_memory`."""
    carry = initial_carry(args, devices.games_of_host(args))
    rollout = begin_rollout(args, carry, 0)
    return initial(args, agent), (rollout,) * (2 if args.async_ else 1)  # one is played while another is learnt from


def main(args: Args) -> runs.Run:
    """Trains; returns the run, finished or stopped by a signal (`run.stop`)."""
    runs.check_args(args, SCRIPT)
    args.check_training()
    agent = make_agent(args)
    names = ("num_envs", "num_steps", "hidden", "predictor_depth")
    runs.check_memory(args, names, jax.eval_shape(partial(kept, args, agent)))

    load = partial(runs.load, partial(initial, args, agent))
    with runs.Run(args, SCRIPT, load) as run, make_fleet(args, agent) as fleet:
        saved = run.saved
        statistics, watch = atari.Statistics(args.num_envs), runs.Stopwatch()
        state = devices.put(args, (saved or devices.run_once(initial, args, agent))["state"], STATE)
        step = int(state.global_step)
        if saved:
            statistics.restore(saved["statistics"])
            fleet.restore(saved["fleet"], state.params["agent"], run)
        if state.frame_stats.count == 0:
            state = observe_random_play(args, run, state)

        def save():
            run.save(step, {"state": state}, {"fleet": fleet.save(), "statistics": statistics.save()})
            if args.room_map:
                run.save_picture(step, "rooms", atari.draw_rooms(statistics.rooms.visits, statistics.rooms.pictures))

        if not run.over(step):
            fleet.start(int(state.updates), state.params["agent"])
        while not run.over(step):
            with watch("waiting"):
                items = fleet.take(run, save)
            if items is None:
                break
            unroll, updates = items[0].unroll, int(state.updates)
            with watch("transfer"):
                given = devices.put(args, (unroll.rollout, unroll.steps), (ROLLOUT, envs.STEPS))
                given = jax.block_until_ready(given)
            with watch("update"):
                state, metrics, bonus = update(args, agent, state, *given)
                metrics, bonus = jax.device_get((metrics, bonus))
            fleet.publish(updates + 1, state.params["agent"])
            step = int(state.global_step)
            run.check_finite(step, metrics)
            statistics.add(unroll.steps, bonus, unroll.rooms, unroll.pictures)
            charts = statistics.metrics() | fleet.metrics(updates, items) | watch.fractions()
            run.log(step, metrics | charts | {"charts/SPS": run.steps_per_second(step)})
            if run.checkpoint_due(step):
                save()
        save()
        run.say(f"rooms visited: {', '.join(map(str, statistics.rooms.visited())) or 'none yet'}")
        fleet.check()  # one that failed after the last batch
    return run


if __name__ == "__main__":
    runs.cli(Args, main)
