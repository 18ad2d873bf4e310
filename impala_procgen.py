"""IMPALA on Procgen: actor threads play with parameters that lag, the learner corrects for it with V-trace.

Espeholt et al. 2018 (arXiv 1802.01561), with the settings of a 2020 Procgen competition entry as defaults: unrolls
of 200 steps, three passes over each batch, and the same network on the same frames as ppo_procgen.py. Try:

    python impala_procgen.py --env-id bigfish --gap-stack
    python impala_procgen.py --env-id coinrun --num-actors 4 --num-envs 256 --num-steps 32 --num-sgd-iter 1
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from common import augment, compute, envs, networks, runs, shaping
from common.actors import ActorError, Actors
from common.runs import check

SCRIPT = Path(__file__).stem


@dataclass(frozen=True)
class Args:
    # The games
    env_id: str = "bigfish"
    """one of the 16 games, such as coinrun or starpilot (a wrong name lists them)"""
    distribution_mode: Literal["easy", "hard"] = "easy"
    """difficulty of the levels"""
    num_levels: int = 0
    """how many levels to train on; 0 for all of them"""
    start_level: int = 0
    """the first training level, where num_levels is not 0"""
    sticky_actions: float = 0.0
    """probability that the game repeats the action before, whatever the policy chose"""
    frame_stack: int = 4
    """how many frames back the policy sees, the newest included; 1 for no stack"""
    gap_stack: bool = True
    """of these frames, keep the oldest and the newest only"""
    reward_shaping: bool = False
    """learn from sign(r)(sqrt(|r| + 1) - 1) + 0.001 r instead of r"""
    reward_clip: float = 0.0
    """clip rewards to [-c, c], after shaping; 0 for no clipping"""
    normalize_rewards: bool = False
    """divide rewards by the running standard deviation of their return, discounted with gamma; after clipping"""

    # The network
    encoder: str = "impala"
    """impala, nature, mobilenet, or an XResNet: "xresnet:stem,[32,2],[64,1]x4,se,sa2" (channels, stride; see README)"""
    channels: str = ""
    """channels of each stage, such as 32,64,64; empty for the encoder's own times width"""
    width: int = 2
    """multiplies the encoder's own channels (impala: 16, 32, 32; nature: 32, 64, 64; mobilenet: 8, 12, 16, 32)"""
    blocks: int = 2
    """residual blocks in a stage (impala, mobilenet)"""
    downsample: Literal["auto", "maxpool", "stride"] = "auto"
    """by max-pools or by the stride of convolutions (impala, xresnet); auto is maxpool in impala, stride in xresnet"""
    separable: int = 0
    """depthwise-separable convolutions with so many filters a channel; 0 for plain ones (impala, xresnet)"""
    norm: Literal["auto", "none", "group"] = "auto"
    """GroupNorm after each convolution, or none; auto is none but in mobilenet"""
    conv_bias: Literal["auto", "yes", "no"] = "auto"
    """whether convolutions have a bias; auto is yes in impala and nature"""
    init: Literal["glorot", "orthogonal", "kaiming"] = "glorot"
    """initial weights of convolutions and dense layer"""
    activation: Literal["relu", "elu", "gelu", "silu"] = "relu"
    """the encoder's nonlinearity"""
    pool: Literal["avg", "max", "flatten"] = "avg"
    """before the dense layer: average or maximum over all positions, or keep them"""
    hidden: int = 256
    """units of the dense layer, and of the core"""
    dropout: float = 0.0
    """share of the dense layer's outputs that the learner drops"""
    core: Literal["none", "lstm", "gru"] = "none"
    """recurrent core between encoder and heads; its gradient goes through whole unrolls"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """the encoder's arithmetic; auto is bfloat16 on an accelerator and float32 on a CPU"""

    # The algorithm
    total_timesteps: int = 8_000_000
    """environment steps to train for"""
    num_actors: int = 2
    """actor threads, each with its own games"""
    num_envs: int = 16
    """games played side by side, all actors' together"""
    num_steps: int = 200
    """steps of each game in an unroll; an update learns from one unroll of every game"""
    max_lag: int = 1
    """how many updates older than the learner an unroll's policy may be; 0 for none: actors and learner take turns"""
    deterministic: bool = False
    """play each unroll with a policy exactly max_lag updates old, so that the same seed gives the same metrics (bit for
    bit on a CPU); without it the threads' timing decides how old"""
    num_sgd_iter: int = 3
    """passes over a batch"""
    num_minibatches: int = 2
    """minibatches in a pass, each of whole unrolls"""
    replay_fraction: float = 0.0
    """share of each batch (rounded to whole unrolls) that is drawn from a buffer of older unrolls; 0 for no buffer"""
    replay_size: int = 128
    """unrolls of one game that the buffer holds, on the device (2.4 MiB each at 200 steps)"""
    learning_rate: str = "0:1e-4,1000000:5e-4,8000000:1e-4"
    """the optimiser's step size: a number, or "step:value,..." for piecewise-linear in environment steps"""
    gamma: str = "0.99"
    """discount: a number, or a schedule like the learning rate's"""
    rho_bar: float = 1.0
    """V-trace: clip the probability ratio that weighs each temporal difference; decides the fixed point"""
    c_bar: float = 1.0
    """V-trace: clip the probability ratio that lets later differences through; decides the speed"""
    pg_rho_bar: float = 1.0
    """V-trace: clip the probability ratio of the policy gradient"""
    vtrace_lambda: float = 1.0
    """V-trace: decay of later differences, as in TD(lambda)"""
    vf_coef: float = 0.5
    """coefficient of the value loss, half the mean squared error"""
    ent_coef: str = "0.01"
    """coefficient of the entropy bonus: a number, or a schedule like the learning rate's"""
    max_grad_norm: float = 0.5
    """clip the gradient (of the mean over a minibatch) to this global norm; 0 for no clipping"""
    optimizer: Literal["adam", "rmsprop"] = "adam"
    """Adam, as the competition entry, or RMSProp, as the paper (decay 0.99)"""
    optimizer_eps: float = 1e-8
    """the optimiser's epsilon"""
    l2: float = 0.0
    """coefficient of the squared norm of the convolutions' kernels in the loss"""
    augment: str = ""
    """random transforms of the learner's frames, such as translate,flip (a wrong name lists them)"""
    augment_prob: float = 0.5
    """probability of each of these transforms, for each sample"""
    augment_mode: Literal["rad", "drac"] = "rad"
    """rad: learn from the augmented frames, which the ratio then compares too; drac: only regularise by them"""
    drac_coef: float = 0.1
    """coefficient of that regulariser"""

    # The run
    seed: int = 1
    """of everything; see --deterministic"""
    run_dir: str = "runs"
    """where run directories go"""
    resume: str = ""
    """a run directory to continue; its arguments are taken over, and flags given here override them"""
    checkpoint_every: int = 1_000_000
    """environment steps between checkpoints; at each, the games start anew (unfinished episodes are truncated)"""
    keep_checkpoints: int = 3
    """how many of the newest checkpoints to keep"""
    eval_every: int = 1_000_000
    """environment steps between evaluations; 0 for one at the end only"""
    eval_episodes: int = 128
    """episodes of an evaluation on each set of levels; 0 for no evaluation"""
    capture_video: bool = False
    """write a video of one episode at each evaluation"""
    wandb_mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """Weights & Biases; auto is online if logged in, else offline"""
    wandb_project: str = "procgen"
    """W&B project"""
    wandb_entity: str = ""
    """W&B team or user; empty for your default"""


# Closed ranges of the numbers among the flags; None: no bound.
LIMITS = {
    "num_levels": (0, envs.MAX_SEED), "start_level": (0, envs.MAX_SEED), "sticky_actions": (0, 0.99),
    "frame_stack": (1, 64), "reward_clip": (0, None), "dropout": (0, 0.99),
    "total_timesteps": (1, 2**31 - 2**24), "num_actors": (1, 256), "num_envs": (1, 65536), "num_steps": (1, 65536),
    "max_lag": (0, 64), "num_sgd_iter": (1, 1000), "num_minibatches": (1, None), "replay_fraction": (0, 0.95),
    "replay_size": (1, 2**20), "rho_bar": (0, None), "c_bar": (0, None), "pg_rho_bar": (0, None),
    "vtrace_lambda": (0, 1), "vf_coef": (0, None), "max_grad_norm": (0, None), "optimizer_eps": (1e-30, None),
    "l2": (0, None), "augment_prob": (0, 1), "drac_coef": (0, None), "seed": (0, envs.MAX_SEED),
    "checkpoint_every": (1, None), "keep_checkpoints": (1, None), "eval_every": (0, None), "eval_episodes": (0, 10**6),
}  # fmt: skip
# What a run cannot change when it is resumed: its games have been played.
FIXED = ("env_id", "distribution_mode", "num_levels", "start_level", "seed", "num_actors")


def num_replayed(args: Args) -> int:
    """How many of a batch's sequences come from the replay buffer."""
    return round(args.num_envs * args.replay_fraction / (1 - args.replay_fraction))


def check_args(args: Args) -> None:
    """Raises UsageError, one sentence, if a flag's value makes no sense."""
    runs.check_limits(args, LIMITS)
    envs.check_flags(args)
    networks.check_flags(args)
    augment.check_flags(args)
    check(
        args.num_envs % args.num_actors == 0,
        f"--num-actors {args.num_actors}: must divide the number of games, {args.num_envs}",
    )
    batch = args.num_envs + num_replayed(args)
    check(
        batch % args.num_minibatches == 0,
        f"--num-minibatches {args.num_minibatches}: must divide a batch's unrolls, {batch}"
        + (f" ({args.num_envs} new and {batch - args.num_envs} replayed)" if args.replay_fraction else ""),
    )
    if args.replay_fraction:
        least = 1 / (args.num_envs + 1)
        check(batch > args.num_envs, f"--replay-fraction {args.replay_fraction}: give 0, or at least {least:.2g}")
        check(
            args.num_envs <= args.replay_size <= 2**24 // args.num_steps,
            f"--replay-size {args.replay_size}: must be from {args.num_envs}, one unroll of each game, to "
            f"{2**24 // args.num_steps}",
        )
    check(
        batch * args.num_steps <= 2**24,
        f"--num-envs {args.num_envs}: a batch of {batch * args.num_steps} steps is too large, at most {2**24}",
    )
    runs.check_schedule("--learning-rate", args.learning_rate, 0, None)
    runs.check_schedule("--ent-coef", args.ent_coef, 0, None)
    runs.check_schedule("--gamma", args.gamma, 0, 1)


# NETWORK


class Agent(nn.Module):
    """Policy and value heads on an encoder, with a recurrent core between them."""

    encoder: nn.Module
    core: networks.Recurrent
    dropout: float

    def setup(self):
        # A small first policy layer makes the first policy nearly uniform.
        self.policy = nn.Dense(envs.NUM_ACTIONS, kernel_init=nn.initializers.orthogonal(0.01))
        self.value = nn.Dense(1, kernel_init=nn.initializers.orthogonal(1.0))

    def encode(self, frames: jax.Array, keys: jax.Array | None = None) -> jax.Array:
        """Frames uint8 [B, 64, 64, C] and keys for dropout [B, 2] -> features float32 [B, hidden]."""
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
    return Agent(networks.make_encoder(args), networks.Recurrent(args.core, args.hidden), args.dropout)


def initial_core(args: Args, size: int) -> networks.Core:
    return networks.initial_core(args.core, args.hidden, size)


# TRAINING STATE


class TrainState(NamedTuple):
    """The learner."""

    params: dict
    opt_state: optax.OptState
    key: jax.Array
    global_step: jax.Array  # int32 []: transitions learnt from, replayed ones not counted
    updates: jax.Array  # int32 []: the parameters' version


class Sequences(NamedTuple):
    """Unrolls as the learner sees them, one game each; H older frames come first."""

    frames: jax.Array  # uint8 [B, H + T + 1, 64, 64, 3]
    age: jax.Array  # int32 [B, T + 1]: steps since the episode's first frame
    actions: jax.Array  # int32 [B, T]
    logits: jax.Array  # float32 [B, T, 15], of the policy that acted
    rewards: jax.Array  # float32 [B, T]
    terminated: jax.Array  # bool [B, T]
    done: jax.Array  # bool [B, T]: EnvPool resets here, this step is no transition
    core: networks.Core  # before the first step


class Memory(NamedTuple):
    """What the learner remembers of the games, on its first device."""

    reward_filter: shaping.ReturnFilter
    replay: Sequences | None  # B = replay_size
    written: jax.Array  # int32 []: sequences ever put into the replay buffer


class Carry(NamedTuple):
    """What an actor needs besides its games to go on with n of them."""

    history: jax.Array  # uint8 [n, H, 64, 64, 3]: the frames before the newest
    last_action: jax.Array  # int32 [n]: what the games played last
    core: networks.Core


def make_optimizer(args: Args) -> optax.GradientTransformation:
    """The direction of a step; `update` multiplies it by the scheduled learning rate."""
    clip = optax.clip_by_global_norm(args.max_grad_norm) if args.max_grad_norm else optax.identity()
    if args.optimizer == "rmsprop":
        return optax.chain(clip, optax.scale_by_rms(decay=0.99, eps=args.optimizer_eps, bias_correction=True))
    return optax.chain(clip, optax.scale_by_adam(eps=args.optimizer_eps))


@partial(jax.jit, static_argnums=(0, 1))
def initial_state(args: Args, agent: Agent) -> TrainState:
    key, init_key = jax.random.split(jax.random.PRNGKey(args.seed))
    channels = 3 * len(envs.stack_offsets(args.frame_stack, args.gap_stack))
    frames = jnp.zeros((1, 64, 64, channels), jnp.uint8)
    params = agent.init(init_key, frames, jnp.ones(1, bool), initial_core(args, 1))
    return TrainState(params, make_optimizer(args).init(params), key, jnp.int32(0), jnp.int32(0))


@partial(jax.jit, static_argnums=0)
def initial_memory(args: Args) -> Memory:
    replay, size, steps = None, args.replay_size, args.num_steps
    if args.replay_fraction:
        replay = Sequences(
            frames=jnp.zeros((size, envs.history_length(args) + steps + 1, *envs.FRAME_SHAPE), jnp.uint8),
            age=jnp.zeros((size, steps + 1), jnp.int32),
            actions=jnp.zeros((size, steps), jnp.int32),
            logits=jnp.zeros((size, steps, envs.NUM_ACTIONS)),
            rewards=jnp.zeros((size, steps)),
            terminated=jnp.zeros((size, steps), bool),
            done=jnp.zeros((size, steps), bool),
            core=initial_core(args, size),
        )
    return Memory(shaping.new_filter(args.num_envs), replay, jnp.int32(0))


@partial(jax.jit, static_argnums=0)
def initial_carry(args: Args) -> Carry:
    size = args.num_envs // args.num_actors
    history = jnp.zeros((size, envs.history_length(args), *envs.FRAME_SHAPE), jnp.uint8)
    return Carry(history, jnp.zeros(size, jnp.int32), initial_core(args, size))


# ROLLOUT


class Rollout(NamedTuple):
    """What stays on an actor's device while it plays T steps of n games, game by game; H older frames come first."""

    frames: jax.Array  # uint8 [n, H + T + 1, 64, 64, 3]: column H + t is what step t acts on
    actions: jax.Array  # int32 [n, T]
    logits: jax.Array  # float32 [n, T, 15]
    last_action: jax.Array  # int32 [n]
    first_core: networks.Core
    core: networks.Core
    key: jax.Array
    t: jax.Array  # int32 []


class Unroll(NamedTuple):
    """What an actor hands to the learner."""

    rollout: Rollout
    steps: envs.Steps
    games: int  # steps that the games had played by its end, since they were last started


@partial(jax.jit, static_argnums=0)
def begin_rollout(args: Args, carry: Carry, seed: int, i: int) -> Rollout:
    size, past = len(carry.last_action), envs.history_length(args)
    frames = jnp.zeros((size, past + args.num_steps + 1, *envs.FRAME_SHAPE), jnp.uint8)
    return Rollout(
        frames=frames.at[:, :past].set(carry.history),
        actions=jnp.zeros((size, args.num_steps), jnp.int32),
        logits=jnp.zeros((size, args.num_steps, envs.NUM_ACTIONS)),
        last_action=carry.last_action,
        first_core=carry.core,
        core=carry.core,
        key=jax.random.fold_in(jax.random.PRNGKey(seed), i),
        t=jnp.int32(0),
    )


def put_frames(args: Args, rollout: Rollout, obs: jax.Array) -> jax.Array:
    """The rollout's frames with obs uint8 [n, 3, 64, 64], of its step t, added."""
    return rollout.frames.at[:, envs.history_length(args) + rollout.t].set(obs.transpose(0, 2, 3, 1))


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def end_rollout(args: Args, rollout: Rollout, obs: jax.Array) -> tuple[Rollout, Carry]:
    """Adds the frames after the last step."""
    history = rollout.frames[:, args.num_steps : args.num_steps + envs.history_length(args)]
    return rollout._replace(frames=put_frames(args, rollout, obs)), Carry(history, rollout.last_action, rollout.core)


def stack(args: Args, frames: jax.Array, age: jax.Array, times: jax.Array) -> jax.Array:
    """Stacks uint8 [B, S, 64, 64, C] of the frames [B, H + T + 1, 64, 64, 3] of B games, at steps `times` [S] with
    ages [B, S]."""
    offsets = envs.stack_offsets(args.frame_stack, args.gap_stack)
    game = lambda frames, age: envs.stack_frames(frames[:, None], age, envs.history_length(args) + times, 0, offsets)  # noqa: E731
    return jax.vmap(game)(frames, age)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def act(args: Args, agent: Agent, params: dict, rollout: Rollout, obs: jax.Array, age: jax.Array):
    """Chooses actions for obs uint8 [n, 3, 64, 64], age int32 [n]; returns the rollout and actions int32 [n]."""
    t, frames = rollout.t, put_frames(args, rollout, obs)
    stacked = stack(args, frames, age[:, None], t[None])[:, 0]
    features = compute.in_chunks(partial(agent.apply, params, method="encode"), stacked)
    logits, _, core = agent.apply(params, features[:, None], age[:, None] == 0, rollout.core, method="decode")
    choose_key, stick_key = jax.random.split(jax.random.fold_in(rollout.key, t))
    actions = jax.random.categorical(choose_key, logits[:, 0])
    stick = jax.random.bernoulli(stick_key, args.sticky_actions, actions.shape) & (age > 0)
    played = jnp.where(stick, rollout.last_action, actions)
    rollout = rollout._replace(
        frames=frames,
        actions=rollout.actions.at[:, t].set(actions),
        logits=rollout.logits.at[:, t].set(logits[:, 0]),
        last_action=played,
        core=core,
        t=t + 1,
    )
    return rollout, played


def collect(args: Args, agent: Agent, games: Sequence[envs.Games], actor: int, i: int, params, carry, watch, check):
    """Plays an actor's i-th unroll, as `common.actors.Actors` asks for it: returns an Unroll and the next Carry."""
    rollout = begin_rollout(args, carry, envs.derive_seed(args.seed, actor), i)

    def choose_actions(obs, age):
        nonlocal rollout
        rollout, actions = act(args, agent, params, rollout, obs, age)
        return actions

    steps = games[actor].play(choose_actions, args.num_steps, watch, check)
    rollout, carry = end_rollout(args, rollout, games[actor].obs)
    return Unroll(rollout, steps, games[actor].steps), carry


# ALGORITHM


def vtrace(args: Args, log_ratio, rewards, values, terminated, done, next_value, next_target, gamma):
    """V-trace of S steps of one sequence (Espeholt et al. 2018, equation 1 and section 4.2).

    Args:
      log_ratio: [S], log of the learner's over the actor's probability of the action.
      rewards, terminated: [S], of the transition from step t to t + 1.
      values: [S], the learner's.
      done: [S], whether step t is no transition. Its ratio counts as 0: so its target is its value, which stands for
        the rest of a truncated episode, and nothing of the next episode comes through.
      next_value, next_target: [], of the step after these; equal at a sequence's end.

    Returns targets of the values and advantages of the policy gradient, float32 [S].
    """
    chex.assert_rank([log_ratio, rewards, values, terminated, done], 1)
    chex.assert_equal_shape([log_ratio, rewards, values, terminated, done])
    ratio = jnp.where(done, 0.0, jnp.exp(log_ratio))
    discounts = gamma * (1.0 - terminated)
    next_values = jnp.append(values[1:], next_value)
    deltas = jnp.minimum(args.rho_bar, ratio) * (rewards + discounts * next_values - values)
    decays = discounts * args.vtrace_lambda * jnp.minimum(args.c_bar, ratio)

    def backward(correction, step):  # the paper's remark 1: v_s - V(x_s), from that of the step after
        delta, decay = step
        correction = delta + decay * correction
        return correction, correction

    targets = values + jax.lax.scan(backward, next_target - next_value, (deltas, decays), reverse=True)[1]
    next_targets = jnp.append(targets[1:], next_target)
    advantages = jnp.minimum(args.pg_rho_bar, ratio) * (rewards + discounts * next_targets - values)
    return targets, advantages


def loss(args: Args, agent: Agent, gamma, ent_coef, params: dict, data, start, size, after):
    """IMPALA's loss (Espeholt et al. 2018, section 4.2) of the `size` steps from `start` on.

    Args:
      data: Sequences [B, ...], a weight [B, T], 0 for what is no transition, and keys [B, 2] for augmentation and
        dropout, or None.
      after: value and target [B] of the step that follows.

    Returns the loss float32 [], its parts (sums by weight), and value and target of the first step.
    """
    part = lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)  # noqa: E731
    (batch, weight, keys), age = data, part(data[0].age)
    weight, times = part(weight), start + jnp.arange(size)
    actions, old_logits, rewards = part(batch.actions), part(batch.logits), part(batch.rewards)
    terminated, done = part(batch.terminated), part(batch.done)

    one = other = None
    if keys is not None:
        keys = jax.vmap(lambda key: jax.vmap(partial(jax.random.fold_in, key))(times))(keys).reshape(-1, 2)
        one, other = jax.vmap(jax.random.split, out_axes=1)(keys)
    frames = stack(args, batch.frames, age, times)
    frames = frames.reshape(-1, *frames.shape[2:])

    def forward(frames):
        encode = lambda x: agent.apply(params, *x, method="encode")  # noqa: E731
        features = compute.in_chunks(encode, (frames, other)).reshape(*age.shape, -1)
        return agent.apply(params, features, age == 0, batch.core, method="decode")[:2]

    if args.augment:
        augmented = augment.augment(augment.parse(args.augment), args.augment_prob, one, frames)
    logits, values = forward(augmented if args.augment and args.augment_mode == "rad" else frames)
    chex.assert_equal_shape([logits, old_logits])
    chex.assert_equal_shape([values, actions, rewards, done, weight])
    log_probs, old_log_probs = jax.nn.log_softmax(logits), jax.nn.log_softmax(old_logits)
    log_prob, old_log_prob = (
        jnp.take_along_axis(x, actions[..., None], axis=-1)[..., 0] for x in (log_probs, old_log_probs)
    )
    log_ratio = log_prob - old_log_prob
    targets, advantages = jax.lax.stop_gradient(
        jax.vmap(partial(vtrace, args), in_axes=(0, 0, 0, 0, 0, 0, 0, None))(
            log_ratio, rewards, values, terminated, done, *after, gamma
        )
    )
    parts = {
        "policy_loss": -advantages * log_prob,
        "value_loss": 0.5 * (values - targets) ** 2,
        "entropy": -(jnp.exp(log_probs) * log_probs).sum(axis=-1),
        "approx_kl": (jnp.exp(old_log_probs) * (old_log_probs - log_probs)).sum(axis=-1),
        "rho": jnp.minimum(args.rho_bar, jnp.exp(log_ratio)),
        "rho_clipfrac": (jnp.exp(log_ratio) > args.rho_bar).astype(jnp.float32),
        "target": targets,
        "target_square": targets**2,
    }
    if args.augment and args.augment_mode == "drac":
        new_logits, new_values = forward(augmented)
        parts["drac_loss"] = augment.drac_loss(logits, values[..., None], new_logits, new_values[..., None])
    parts = {name: (weight * part).sum() for name, part in parts.items()}
    total = parts["policy_loss"] + args.vf_coef * parts["value_loss"] - ent_coef * parts["entropy"]
    total += args.drac_coef * parts.get("drac_loss", 0)
    return total, (parts | {"loss": total}, (values[:, 0], targets[:, 0]))


def last_value(args: Args, agent: Agent, params: dict, batch: Sequences) -> jax.Array:
    """Values float32 [B] of the frame after the last step."""
    first = args.num_steps if args.core == "none" else 0  # a core has to see all that came before
    times = jnp.arange(first, args.num_steps + 1)
    age = batch.age[:, first:]
    stacked = stack(args, batch.frames, age, times)
    features = compute.apply(partial(agent.apply, method="encode"), params, stacked.reshape(-1, *stacked.shape[2:]))
    return agent.apply(params, features.reshape(*age.shape, -1), age == 0, batch.core, method="decode")[1][:, -1]


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def remember(args: Args, memory: Memory, rollouts: Sequence[Rollout], steps: envs.Steps, step: int, i: int):
    """Makes the i-th update's batch of the actors' rollouts [n, T] and all their steps [T, N], at environment step
    `step`: returns the memory and Sequences [B, ...], the new ones first, then those replayed."""
    gamma = runs.parse_schedule(args.gamma)(step)
    reward_filter, reward = shaping.prepare_rewards(args, memory.reward_filter, steps, gamma)

    def join(*arrays):  # as long rows, which XLA copies twice as fast on a CPU
        return jnp.concatenate([x.reshape(len(x), -1) for x in arrays]).reshape(-1, *arrays[0].shape[1:])

    arrays = ((r.frames, r.actions, r.logits, r.first_core) for r in rollouts)
    frames, actions, logits, core = jax.tree.map(join, *arrays)
    new = Sequences(frames, steps.age.T, actions, logits, reward.T, steps.terminated.T, steps.done.T, core)
    if not args.replay_fraction:
        return memory._replace(reward_filter=reward_filter), new
    key = jax.random.fold_in(jax.random.PRNGKey(envs.derive_seed(args.seed, args.num_actors)), i)
    filled = jnp.minimum(memory.written, args.replay_size)  # in the first update, nothing: it draws from the new ones
    drawn = jax.random.randint(key, num_replayed(args), 0, jnp.where(filled == 0, args.num_envs, filled))
    draw = lambda x, buffer: jnp.where(filled == 0, x[drawn], buffer[drawn])  # noqa: E731
    batch = jax.tree.map(lambda x, buffer: join(x, draw(x, buffer)), new, memory.replay)
    rows = (memory.written + jnp.arange(args.num_envs)) % args.replay_size
    replay = jax.tree.map(lambda buffer, x: buffer.at[rows].set(x), memory.replay, new)
    written = memory.written + args.num_envs
    # Counted modulo the size once it is full, so that it never overflows.
    written = jnp.where(written < 2 * args.replay_size, written, written - args.replay_size)
    return Memory(reward_filter, replay, written), batch


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def update(args: Args, agent: Agent, state: TrainState, batch: Sequences) -> tuple[TrainState, dict]:
    """Passes of minibatches over Sequences [B, ...], V-trace anew in each: returns the next state and metrics [].

    The losses are means of the last pass, over replayed unrolls too: rho and approx_kl are of all that the policy has
    moved since an unroll was played, in this batch's own steps as well.
    """
    learning_rate, ent_coef, gamma = (
        runs.parse_schedule(text)(state.global_step) for text in (args.learning_rate, args.ent_coef, args.gamma)
    )
    key, shuffle_key = jax.random.split(state.key)
    tx = make_optimizer(args)

    def minibatch(learner, key, index):
        params, opt_state = learner
        part = jax.tree.map(lambda x: x[index], batch)
        weight = ~part.done / jnp.maximum((~part.done).sum(), 1)
        objective, value = partial(loss, args, agent, gamma, ent_coef), last_value(args, agent, params, part)
        keys = jax.vmap(partial(jax.random.fold_in, key))(index) if args.augment or args.dropout else None
        (_, parts), grads = compute.value_and_grad_backwards(
            objective, params, (part, weight, keys), (value, value), args.num_steps, whole=args.core != "none"
        )
        if args.l2:  # the gradient of l2 x the squared norm of each convolution's kernel
            grads = jax.tree.map(lambda g, w: g + 2 * args.l2 * w if w.ndim == 4 else g, grads, params)
        direction, opt_state = tx.update(grads, opt_state)
        params = optax.apply_updates(params, jax.tree.map(lambda d: -learning_rate * d, direction))
        return (params, opt_state), parts | {"grad_norm": optax.tree.norm(grads)}

    def one_pass(learner, key):
        shuffle_key, sample_key = jax.random.split(key)
        order = jax.random.permutation(shuffle_key, len(batch.age)).reshape(args.num_minibatches, -1)
        learner, parts = jax.lax.scan(lambda learner, index: minibatch(learner, sample_key, index), learner, order)
        return learner, jax.tree.map(jnp.mean, parts)

    keys = jax.random.split(shuffle_key, args.num_sgd_iter)
    (params, opt_state), parts = jax.lax.scan(one_pass, (state.params, state.opt_state), keys)
    parts = jax.tree.map(lambda x: x[-1], parts)
    spread = parts.pop("target_square") - parts.pop("target") ** 2
    new_transitions = (~batch.done[: args.num_envs]).sum()
    metrics = {f"losses/{name}": value for name, value in parts.items()} | {
        "losses/explained_variance": 1 - 2 * parts["value_loss"] / jnp.maximum(spread, 1e-8),
        "losses/param_norm": optax.tree.norm(params),  # infinite where the last step went wrong
        "charts/learning_rate": learning_rate,
        "charts/ent_coef": ent_coef,
        "charts/gamma": gamma,
    }
    return TrainState(params, opt_state, key, state.global_step + new_transitions, state.updates + 1), metrics


# EVALUATION


@partial(jax.jit, static_argnums=(0,))
def choose(agent: Agent, params: dict, frames: jax.Array, age: jax.Array, key: jax.Array, core: networks.Core):
    """Draws actions int32 [N] from the policy for stacked frames uint8 [N, 64, 64, C]; its memory is the core."""
    features = compute.apply(partial(agent.apply, method="encode"), params, frames)
    logits, _, core = agent.apply(params, features[:, None], age[:, None] == 0, core, method="decode")
    return jax.random.categorical(key, logits[:, 0]), core


def make_policy(args: Args, agent: Agent, params: dict) -> Callable:
    """A policy as `envs.play_episodes` calls it."""

    def policy(frames, age, key, core):
        return choose(agent, params, frames, age, key, initial_core(args, len(frames)) if core is None else core)

    return policy


def load_policy(args: Args, run_dir: str) -> tuple[int, Callable]:
    """For evaluate.py: the step of a run's newest checkpoint, and its policy."""
    agent = make_agent(args)
    template = jax.eval_shape(partial(initial_state, args, agent))
    state = compute.replicate(runs.restore_tree(template, runs.load_checkpoint(run_dir)[1]["state"], run_dir))
    return int(state.global_step), make_policy(args, agent, state.params)


# MAIN


def initial(args: Args, agent: Agent) -> dict:
    """All that a resume needs besides the games; `main` saves the same."""
    state, actors = initial_state(args, agent), range(args.num_actors)
    carries = {str(actor): initial_carry(args) for actor in actors}
    return {"state": state, "memory": initial_memory(args), "carries": carries, "published": {"0": state.params}}


def load(args: Args, agent: Agent, run_dir: str) -> dict:
    """The newest checkpoint of a run."""
    _, saved = runs.load_checkpoint(run_dir)
    template = jax.eval_shape(partial(initial, args, agent))
    template["published"] = dict.fromkeys(saved["published"], template["published"]["0"])
    return saved | {name: runs.restore_tree(part, saved[name], run_dir) for name, part in template.items()}


def main(args: Args) -> runs.Run:
    """Trains; returns the run, finished or stopped by a signal (`run.stop`)."""
    check_args(args)
    agent, saved, devices = make_agent(args), None, jax.devices()
    if args.resume:
        runs.check_same(args, runs.saved_args(Args, args.resume, "--resume", SCRIPT), FIXED)
        saved = load(args, agent, args.resume)

    with runs.Run(args, SCRIPT) as run:
        make, everyone = partial(envs.make_levels, args, args.num_envs // args.num_actors), range(args.num_actors)
        games = [envs.Games(make, envs.derive_seed(args.seed, 0, 0, actor)) for actor in everyone]
        episodes, watch = envs.EpisodeStatistics(args.num_envs), runs.Stopwatch()
        if saved:
            for actor in everyone:
                games[actor].restore(saved["games"][str(actor)])
            episodes.restore(saved["episodes"])
            run.restore(saved["run"])
        start_from = saved or initial(args, agent)
        # The learner has the first device (and on a CPU, all of them); the actors begin at the last.
        homes = [devices[-1 - actor % len(devices)] for actor in everyone]
        state, memory = compute.replicate(start_from["state"]), jax.device_put(start_from["memory"], devices[0])
        carries = [start_from["carries"][str(actor)] for actor in everyone]
        step, played = int(state.global_step), [mine.steps for mine in games]
        if step >= args.total_timesteps:
            run.say(f"the run is at step {step} already; to go on, give a larger --total-timesteps")

        with Actors(partial(collect, args, agent, games), homes, args.max_lag, args.deterministic) as actors:

            def start():
                actors.start(int(state.updates), [jax.device_put(carries[actor], homes[actor]) for actor in everyone])

            def save():
                """Stops the actors; what they have played and the learner has not taken is dropped."""
                actors.stop()
                logs = {str(actor): games[actor].save(played[actor]) for actor in everyone}
                tree = {"state": state, "memory": memory, "games": logs, "episodes": episodes.save()}
                tree["carries"] = {str(actor): carries[actor] for actor in everyone}
                tree["published"] = {str(version): params for version, params in actors.published().items()}
                run.save(step, tree)

            for version, params in start_from["published"].items():
                actors.publish(int(version), params)
            start()
            while not run.stop:
                finished = step >= args.total_timesteps
                if args.eval_episodes and run.evaluation_due(args.eval_every, step, finished):
                    results = envs.evaluate_run(args, run, make_policy(args, agent, state.params), step)
                    if results:
                        run.log_evaluation(step, results)
                if finished or run.stop:
                    break
                charts = {"charts/queue_size": actors.queue_size}
                try:
                    with watch("waiting"):
                        items = actors.take(lambda: run.stop)
                except ActorError:
                    save()
                    run.say(f"an actor failed; {run.path} has a checkpoint of step {step}, to continue with --resume")
                    raise
                if items is None:
                    break
                unrolls, carries = [item.unroll for item in items], [item.carry for item in items]
                played, version = [unroll.games for unroll in unrolls], int(state.updates)
                charts["charts/policy_lag"] = version - np.mean([item.version for item in items])
                with watch("transfer"):
                    steps = envs.join_steps([unroll.steps for unroll in unrolls])
                    rollouts = jax.device_put([unroll.rollout for unroll in unrolls], devices[0])
                    memory, batch = remember(args, memory, rollouts, steps, step, version)
                    batch = jax.block_until_ready(compute.replicate(batch))
                with watch("update"):
                    state, metrics = update(args, agent, state, batch)
                    metrics = jax.device_get(metrics)
                actors.publish(version + 1, state.params)
                before, step = step, int(state.global_step)
                run.check_finite(step, metrics)
                episodes.add(steps)
                for part in ("inference", "game", "blocked"):
                    charts[f"time/actor_{part}"] = np.mean([item.shares[f"time/{part}"] for item in items])
                charts["charts/return_std"] = np.sqrt(memory.reward_filter.var)
                charts |= episodes.metrics() | {"charts/SPS": run.steps_per_second(step)} | watch.fractions()
                run.log(step, metrics | charts)
                if runs.crossed(args.checkpoint_every, before, step):
                    actors.stop()
                    # Games cannot be saved, so every run starts them anew here: a resumed run does the same.
                    for actor in everyone:
                        games[actor].restart(envs.derive_seed(args.seed, step, 0, actor))
                    played = [0] * len(games)
                    episodes.restart()
                    memory = memory._replace(reward_filter=shaping.restart(memory.reward_filter))
                    save()
                    start()
            save()
            actors.check()  # one that failed after the last batch
        for mine in games:
            mine.close()
    return run


if __name__ == "__main__":
    runs.cli(Args, main)
