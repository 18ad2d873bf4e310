"""Ape-X DQN on Procgen: actors that explore differently fill a prioritised replay, one learner samples from it.

Horgan et al. 2018 (arXiv 1803.00933), with what a 2020 Procgen competition entry added: dueling streams, double
Q-learning, n-step returns and a distribution of values (C51). Its settings are the defaults. Try:

    python apex_procgen.py --env-id coinrun --gap-stack
    python apex_procgen.py --env-id coinrun --n-step 3 --num-atoms 1 --augment translate --buffer-size 50000
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
    hidden: int = 512
    """units of the dense layer of each stream, value and advantages"""
    dropout: float = 0.0
    """share of the encoder's outputs that the learner drops"""
    dueling: bool = True
    """a stream for the state's value beside the one for the actions' advantages"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """the encoder's arithmetic; auto is bfloat16 on an accelerator and float32 on a CPU"""

    # The algorithm
    total_timesteps: int = 8_000_000
    """environment steps to train for"""
    num_actors: int = 2
    """threads that play, each its own games"""
    num_envs: int = 24
    """games played side by side by all actors together; each explores with its own epsilon"""
    num_steps: int = 16
    """steps of each game in an unroll, after which actors hand over and fetch parameters"""
    max_lag: int = 1
    """how many iterations old an unroll's parameters may be; 0 lets actors and learner take turns"""
    deterministic: bool = False
    """play each unroll with parameters exactly max_lag iterations old: the same seed then gives the same metrics"""
    epsilon: float = 0.4
    """game i of N plays a random action with probability epsilon^(1 + i / (N - 1) * epsilon_alpha)"""
    epsilon_alpha: float = 7.0
    """how much less the last game explores than the first"""
    buffer_size: int = 200_000
    """transitions in the replay buffer, 12 kB each"""
    replay_device: Literal["device", "host"] = "device"
    """where the replay buffer is: on the accelerator, or in the host's memory (the same on a CPU)"""
    save_replay: bool = True
    """keep the replay buffer in each checkpoint (12 kB a transition); else a resumed run refills it first"""
    learning_starts: int = 50_000
    """environment steps played before the first update"""
    replay_ratio: float = 2.0
    """transitions learnt from for each one played, whatever the machine's speed"""
    batch_size: int = 128
    """transitions in an update"""
    per_alpha: float = 0.5
    """prioritised replay: probabilities are proportional to |TD error| to this power; 0 for uniform"""
    per_beta: str = "0:0.4,2000000:1"
    """prioritised replay: how far importance weights correct for that; a number or a schedule"""
    n_step: int = 20
    """rewards before the bootstrap"""
    num_atoms: int = 99
    """atoms of the distribution of values (C51); 1 for its mean alone, learnt with Huber's loss"""
    v_min: float = -5.0
    """the lowest atom"""
    v_max: float = 20.0
    """the highest atom; returns above it cannot be told apart"""
    double_q: bool = True
    """choose the next action by the online network, and take its value from the target network"""
    target_network_frequency: int = 150
    """updates between two copies to the target network"""
    gamma: float = 0.99
    """discount"""
    learning_rate: str = "1e-4"
    """Adam's step size: a number, or "step:value,..." for piecewise-linear in environment steps"""
    max_grad_norm: float = 40.0
    """clip the gradient to this global norm; 0 for no clipping"""
    adam_eps: float = 1.5e-4
    """Adam's epsilon"""
    l2: float = 0.0
    """coefficient of the squared norm of the convolutions' kernels in the loss"""
    augment: str = ""
    """random transforms of the sampled frames, such as translate,flip (a wrong name lists them)"""
    augment_prob: float = 0.5
    """probability of each of these transforms, for each frame stack"""

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
    "total_timesteps": (1, 2**31 - 2**24), "num_actors": (1, 256), "num_envs": (1, 65536), "num_steps": (1, 4096),
    "max_lag": (0, 64), "epsilon": (0, 1), "epsilon_alpha": (0, None), "buffer_size": (1, 2**27),
    "replay_ratio": (0, 1024), "batch_size": (1, 65536), "per_alpha": (0, 1), "n_step": (1, 1024),
    "num_atoms": (1, 1024), "v_min": (-1e9, 1e9), "v_max": (-1e9, 1e9), "target_network_frequency": (1, None),
    "gamma": (0, 1), "max_grad_norm": (0, None), "adam_eps": (1e-30, None), "l2": (0, None),
    "augment_prob": (0, 1), "seed": (0, envs.MAX_SEED), "checkpoint_every": (1, None),
    "keep_checkpoints": (1, None), "eval_every": (0, None), "eval_episodes": (0, 10**6),
}  # fmt: skip
# What a run cannot change when it is resumed: its games have been played, its replay buffer holds what came of it.
FIXED = (
    "env_id", "distribution_mode", "num_levels", "start_level", "seed", "num_actors", "num_steps", "n_step",
    "learning_starts", "per_alpha", "reward_shaping", "reward_clip",
)  # fmt: skip
EVALUATION_EPSILON = 0.001  # Horgan et al. 2018, appendix C: without it a policy may stand still for ever


def check_args(args: Args) -> None:
    """Raises UsageError, one sentence, if a flag's value makes no sense."""
    runs.check_limits(args, LIMITS)
    envs.check_flags(args)
    networks.check_flags(args)
    augment.check_flags(args)
    games, unroll = args.num_envs, args.n_step + args.num_steps
    check(games % args.num_actors == 0, f"--num-actors {args.num_actors}: must divide the number of games, {games}")
    least = games * (unroll + 2 * envs.history_length(args))
    check(
        buffer_rows(args) * games >= least,
        f"--buffer-size {args.buffer_size}: give {least} or more, {games} games times an unroll and an n-step return",
    )
    check(
        games * unroll <= args.learning_starts <= args.buffer_size,
        f"--learning-starts {args.learning_starts}: must be from {games * unroll}, {games} games times an unroll and "
        f"an n-step return, to --buffer-size, {args.buffer_size}",
    )
    check(
        args.v_min <= 0 <= args.v_max and args.v_max - args.v_min >= 1e-3,
        f"--v-min {args.v_min}: must be 0 or less, and less than --v-max, which must be 0 or more, not {args.v_max}",
    )
    runs.check_needs(args, args.num_atoms > 1, "--num-atoms 2 or more", ("v_min", "v_max"))
    runs.check_needs(args, args.per_alpha, "--per-alpha", ("per_beta",))
    runs.check_schedule("--learning-rate", args.learning_rate, 0, None)
    runs.check_schedule("--per-beta", args.per_beta, 0, 1)


# NETWORK


class Agent(nn.Module):
    """Values of all actions (their distributions, if num_atoms > 1), in dueling streams (Wang et al. 2016)."""

    encoder: nn.Module
    hidden: int
    dropout: float
    dueling: bool
    support: tuple[float, ...]

    @nn.compact
    def __call__(self, frames: jax.Array, keys: jax.Array | None = None) -> jax.Array:
        """Frames uint8 [B, 64, 64, C] and keys for dropout [B, 2] -> float32 [B, 15, atoms]: logits, or values."""
        x, atoms = networks.dropout(self.encoder(frames), keys, self.dropout), len(self.support)

        def stream(outputs, bias_init=nn.initializers.zeros):
            hidden = nn.relu(nn.Dense(self.hidden)(x))
            return nn.Dense(outputs * atoms, bias_init=bias_init)(hidden).reshape(len(x), outputs, atoms)

        def near_zero(key, shape, dtype=jnp.float32):
            """Values start around 0, as one atom's do, and not in the middle of the support, which is above all that
            most games pay: what is far too high bootstraps itself and is slow to come down."""
            if atoms == 1:
                return jnp.zeros(shape, dtype)
            z = np.array(self.support)
            return jnp.tile(jnp.asarray(-((z / (0.05 * (z[-1] - z[0]))) ** 2) / 2, dtype), shape[0] // atoms)

        if not self.dueling:
            return stream(envs.NUM_ACTIONS, near_zero)
        advantages = stream(envs.NUM_ACTIONS)
        return stream(1, near_zero) + advantages - advantages.mean(axis=1, keepdims=True)


def make_agent(args: Args) -> Agent:
    encoder, support = networks.make_encoder(replace(args, hidden=0)), (0.0,)
    if args.num_atoms > 1:
        support = tuple(np.linspace(args.v_min, args.v_max, args.num_atoms).tolist())
    return Agent(encoder, args.hidden, args.dropout, args.dueling, support)


def mean_value(agent: Agent, outputs: jax.Array) -> jax.Array:
    """The network's outputs [..., atoms] -> values [...]."""
    if len(agent.support) == 1:
        return outputs[..., 0]
    return jnp.matmul(nn.softmax(outputs), jnp.array(agent.support), precision="highest")


# TRAINING STATE


class TrainState(NamedTuple):
    """The learner."""

    params: dict
    target: dict
    opt_state: optax.OptState
    global_step: jax.Array  # int32 []: transitions played
    updates: jax.Array  # int32 []
    iterations: jax.Array  # int32 []: the version of the parameters that actors have
    learn_from: jax.Array  # int32 []: the step at which learning starts


class Replay(NamedTuple):
    """The last L steps of N games, a ring of rows on one device; every frame is stored once."""

    frames: jax.Array  # uint8 [L, N, 64, 64, 3]
    age: jax.Array  # int32 [L, N]: steps since the episode's first frame
    actions: jax.Array  # int32 [L, N]
    rewards: jax.Array  # float32 [L, N]: of the transition from a row to the next
    terminated: jax.Array  # bool [L, N]: it ended the episode
    ended: jax.Array  # bool [L, N]: it was its episode's last, or the last before the games were started anew
    done: jax.Array  # bool [L, N]: EnvPool resets here, this step is no transition
    chosen: jax.Array  # float32 [L, N]: the actor's value of the action that it chose
    best: jax.Array  # float32 [L, N]: and of the one it thought best
    priorities: jax.Array  # float32 [L, N]: to the power of alpha; 0 for what cannot be sampled (yet)
    written: jax.Array  # int32 []: rows ever written


class Carry(NamedTuple):
    """What an actor needs besides its games to go on with n of them."""

    history: jax.Array  # uint8 [H, n, 64, 64, 3]: the frames before the newest
    last_action: jax.Array  # int32 [n]: what the games played last


def make_optimizer(args: Args) -> optax.GradientTransformation:
    """The direction of a step; `update` multiplies it by the scheduled learning rate."""
    clip = optax.clip_by_global_norm(args.max_grad_norm) if args.max_grad_norm else optax.identity()
    return optax.chain(clip, optax.scale_by_adam(eps=args.adam_eps))


def buffer_rows(args: Args) -> int:
    """Steps of each game in the replay buffer: whole unrolls."""
    return -(-args.buffer_size // (args.num_envs * args.num_steps)) * args.num_steps


@partial(jax.jit, static_argnums=(0, 1))
def initial_state(args: Args, agent: Agent) -> TrainState:
    channels = 3 * len(envs.stack_offsets(args.frame_stack, args.gap_stack))
    params = agent.init(jax.random.PRNGKey(args.seed), jnp.zeros((1, 64, 64, channels), jnp.uint8))
    target, zero = jax.tree.map(jnp.copy, params), jnp.int32(0)
    return TrainState(
        params, target, make_optimizer(args).init(params), zero, zero, zero, jnp.int32(args.learning_starts)
    )


@partial(jax.jit, static_argnums=0)
def initial_replay(args: Args) -> Replay:
    def rows(dtype, *shape):
        return jnp.zeros((buffer_rows(args), args.num_envs, *shape), dtype)

    return Replay(
        frames=rows(jnp.uint8, *envs.FRAME_SHAPE), age=rows(jnp.int32), actions=rows(jnp.int32),
        rewards=rows(jnp.float32), terminated=rows(bool), ended=rows(bool), done=rows(bool),
        chosen=rows(jnp.float32), best=rows(jnp.float32), priorities=rows(jnp.float32), written=jnp.int32(0),
    )  # fmt: skip


@partial(jax.jit, static_argnums=0)
def initial_carry(args: Args) -> Carry:
    size = args.num_envs // args.num_actors
    return Carry(jnp.zeros((envs.history_length(args), size, *envs.FRAME_SHAPE), jnp.uint8), jnp.zeros(size, jnp.int32))


# ROLLOUT


class Rollout(NamedTuple):
    """What stays on an actor's device while it plays T steps of n games; H rows of older frames come first."""

    frames: jax.Array  # uint8 [H + T, n, 64, 64, 3]: row H + t is what step t acts on
    actions: jax.Array  # int32 [T, n]
    chosen: jax.Array  # float32 [T, n]: the value of that action
    best: jax.Array  # float32 [T, n]: the highest value
    last_action: jax.Array  # int32 [n]
    key: jax.Array
    t: jax.Array  # int32 []


class Unroll(NamedTuple):
    """What an actor hands to the learner."""

    rollout: Rollout
    steps: envs.Steps
    games: int  # steps that the games had played by its end, since they were last started


def epsilons(args: Args) -> np.ndarray:
    """How often each game's action is random, float32 [N] (Horgan et al. 2018, section 4)."""
    place = np.arange(args.num_envs) / max(args.num_envs - 1, 1)
    return np.float32(args.epsilon ** (1 + place * args.epsilon_alpha))


def explore(key: jax.Array, values: jax.Array, epsilon: jax.Array) -> jax.Array:
    """The best of the values [N, 15], or with probability epsilon [N] any action: int32 [N]."""
    random_key, action_key = jax.random.split(key)
    any_action = jax.random.randint(action_key, epsilon.shape, 0, envs.NUM_ACTIONS)
    return jnp.where(jax.random.bernoulli(random_key, epsilon), any_action, values.argmax(axis=-1))


@partial(jax.jit, static_argnums=0)
def begin_rollout(args: Args, carry: Carry, seed: int, i: int) -> Rollout:
    shape = (args.num_steps, len(carry.last_action))
    frames = jnp.zeros((envs.history_length(args) + args.num_steps, shape[1], *envs.FRAME_SHAPE), jnp.uint8)
    return Rollout(
        frames=frames.at[: envs.history_length(args)].set(carry.history),
        actions=jnp.zeros(shape, jnp.int32),
        chosen=jnp.zeros(shape),
        best=jnp.zeros(shape),
        last_action=carry.last_action,
        key=jax.random.fold_in(jax.random.PRNGKey(seed), i),
        t=jnp.int32(0),
    )


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def act(args: Args, agent: Agent, params: dict, rollout: Rollout, obs: jax.Array, age: jax.Array, epsilon: jax.Array):
    """Chooses actions for obs uint8 [n, 3, 64, 64], age int32 [n]; returns the rollout and actions int32 [n]."""
    t, row = rollout.t, envs.history_length(args) + rollout.t
    frames, offsets = envs.put_frames(rollout.frames, row, obs), envs.stack_offsets(args.frame_stack, args.gap_stack)
    stacked = envs.stack_frames(frames, age, row, jnp.arange(len(age)), offsets)
    values = mean_value(agent, compute.in_chunks(partial(agent.apply, params), stacked))
    choose_key, stick_key = jax.random.split(jax.random.fold_in(rollout.key, t))
    actions = explore(choose_key, values, epsilon)
    stick = jax.random.bernoulli(stick_key, args.sticky_actions, actions.shape) & (age > 0)
    played = jnp.where(stick, rollout.last_action, actions)
    rollout = rollout._replace(
        frames=frames,
        actions=rollout.actions.at[t].set(actions),
        chosen=rollout.chosen.at[t].set(jnp.take_along_axis(values, actions[:, None], axis=-1)[:, 0]),
        best=rollout.best.at[t].set(values.max(axis=-1)),
        last_action=played,
        t=t + 1,
    )
    return rollout, played


def collect(args: Args, agent: Agent, games: Sequence[envs.Games], actor: int, i: int, params, carry, watch, check):
    """Plays an actor's i-th unroll, as `common.actors.Actors` asks for it: returns an Unroll and the next Carry."""
    rollout = begin_rollout(args, carry, envs.derive_seed(args.seed, actor), i)
    epsilon = epsilons(args).reshape(args.num_actors, -1)[actor]

    def choose_actions(obs, age):
        nonlocal rollout
        rollout, actions = act(args, agent, params, rollout, obs, age, epsilon)
        return actions

    steps = games[actor].play(choose_actions, args.num_steps, watch, check)
    return Unroll(rollout, steps, games[actor].steps), Carry(rollout.frames[args.num_steps :], rollout.last_action)


# PRIORITISED REPLAY (Schaul et al. 2016)


def n_step_return(args: Args, replay: Replay, row: jax.Array, env: jax.Array):
    """Up to n rewards from each row [B] on, to the episode's end and not beyond it (Horgan et al. 2018, section 3).

    Returns their discounted sum float32 [B], the discount of the value that follows (0 after a terminal step; where an
    episode was cut off, its last frame's value stands for the rest), and the row [B] of that frame.
    """
    rows = (row[:, None] + jnp.arange(args.n_step)) % len(replay.age)
    rewards, terminated, ended = (x[rows, env[:, None]] for x in (replay.rewards, replay.terminated, replay.ended))
    before = jnp.cumsum(ended, axis=1) - ended == 0  # whether the episode goes on until there
    returns = (args.gamma ** jnp.arange(args.n_step) * rewards * before).sum(axis=1)
    length = before.sum(axis=1)
    discounts = args.gamma**length * ~(terminated & before).any(axis=1)
    return returns, discounts, (row + length) % len(replay.age)


def priority(args: Args, td: jax.Array) -> jax.Array:
    return (jnp.abs(td) + 1e-6) ** args.per_alpha


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def insert(args: Args, replay: Replay, rollouts: Sequence[Rollout], steps: envs.Steps) -> Replay:
    """Writes the actors' unrolls [T, n], side by side, as the next rows.

    A transition can be sampled once the n-th step after it is there. Its first priority is the TD error by the actor's
    own values, as it acted: no network is evaluated for it.
    """
    size, past, games = len(replay.age), envs.history_length(args), jnp.arange(args.num_envs)
    now, times = replay.written, jnp.arange(args.num_steps)
    parts = ((r.frames[past:], r.actions, r.chosen, r.best) for r in rollouts)
    frames, actions, chosen, best = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *parts)
    rewards = shaping.shape_and_clip(args, steps.rewards)
    new = Replay(
        frames, steps.age[:-1], actions, rewards, steps.terminated, steps.ended, steps.done, chosen, best,
        jnp.zeros(actions.shape), None,
    )  # fmt: skip
    put = lambda buffer, x: jax.lax.dynamic_update_slice_in_dim(buffer, jnp.asarray(x), now % size, axis=0)  # noqa: E731
    replay = jax.tree.map(put, replay._replace(written=None), new)

    # The rows after the new ones are the oldest; their stacks reach back to frames that are gone.
    priorities = replay.priorities.at[(now + args.num_steps + jnp.arange(past)) % size].set(0)
    complete = now - args.n_step + times
    row, env = jnp.repeat(complete % size, args.num_envs), jnp.tile(games, args.num_steps)
    returns, discounts, after = n_step_return(args, replay, row, env)
    td = returns + discounts * replay.best[after, env] - replay.chosen[row, env]
    whole = jnp.repeat(complete, args.num_envs) >= jnp.minimum(replay.age[row, env], past)  # its stack is there too
    valid = whole & ~replay.done[row, env]
    priorities = priorities.at[row, env].set(jnp.where(valid, priority(args, td), 0))
    return replay._replace(priorities=priorities, written=now + args.num_steps)


@partial(jax.jit, donate_argnums=0)
def cut(replay: Replay) -> Replay:
    """The games start anew after this: the step last written leads nowhere, the one before it is a truncation."""
    size = len(replay.age)
    last, before = (replay.written - 1) % size, (replay.written - 2) % size
    return replay._replace(
        done=replay.done.at[last].set(True),
        ended=replay.ended.at[before].set(replay.ended[before] | ~replay.done[before]),
    )


class Batch(NamedTuple):
    """Transitions to learn from."""

    frames: jax.Array  # uint8 [B, 64, 64, C]
    next_frames: jax.Array  # uint8 [B, 64, 64, C]: n steps later
    actions: jax.Array  # int32 [B]
    returns: jax.Array  # float32 [B]: the rewards between them
    discounts: jax.Array  # float32 [B]: of the value that follows
    weight: jax.Array  # float32 [B], at most 1
    row: jax.Array  # int32 [B], where in the replay buffer it is
    env: jax.Array  # int32 [B]
    place: jax.Array  # int32 [B]: 0, 1, 2, ...
    keys: jax.Array  # uint32 [B, 2], for augmentation and dropout


@partial(jax.jit, static_argnums=0)
def sample(args: Args, replay: Replay, updates: jax.Array, beta: jax.Array) -> Batch:
    """Draws the batch of an update, each transition with probability proportional to its priority: one from each of B
    equal parts of their sum (Schaul et al. 2016, section 3.3 and appendix B.2.1).

    The sum is taken anew, first over rows and then within one: of 200,000 numbers that is less work than the network
    has with one frame.
    """
    key = jax.random.fold_in(jax.random.PRNGKey(envs.derive_seed(args.seed, args.num_actors)), updates)
    draw_key, sample_key = jax.random.split(key)
    upto = jnp.cumsum(replay.priorities.sum(axis=1))
    part = jnp.arange(args.batch_size) + jax.random.uniform(draw_key, (args.batch_size,))
    point = part / args.batch_size * upto[-1]
    row = jnp.minimum(jnp.searchsorted(upto, point, side="right"), len(upto) - 1)
    within = jnp.cumsum(replay.priorities[row], axis=1)
    rest = point - jnp.where(row > 0, upto[row - 1], 0)
    env = jnp.minimum((within <= rest[:, None]).sum(axis=1), args.num_envs - 1)
    probability = replay.priorities[row, env] / upto[-1]  # 0 at an edge, where rounding chose what cannot be sampled
    valid = probability > 0
    weight = jnp.where(valid, ((replay.priorities > 0).sum() * probability) ** -beta, 0)
    returns, discounts, after = n_step_return(args, replay, row, env)
    offsets = envs.stack_offsets(args.frame_stack, args.gap_stack)
    # Rows before the ring's first are, as negative indices, its last.
    stack = lambda row: envs.stack_frames(replay.frames, replay.age[row, env], row, env, offsets)  # noqa: E731
    return Batch(
        frames=stack(row),
        next_frames=stack(after),
        actions=replay.actions[row, env],
        returns=returns,
        discounts=discounts,
        weight=weight / jnp.maximum(weight.max(), 1e-30),
        row=row,
        env=env,
        place=jnp.arange(args.batch_size),
        keys=jax.random.split(sample_key, args.batch_size),
    )


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def set_priorities(args: Args, priorities: jax.Array, batch: Batch, td: jax.Array) -> jax.Array:
    """Gives the transitions of a batch the priorities of their TD errors [B]; of equal ones the larger."""
    new = jnp.where(batch.weight > 0, priority(args, td), 0)
    return priorities.at[batch.row, batch.env].set(0).at[batch.row, batch.env].max(new)


# ALGORITHM


def project(support: jax.Array, returns: jax.Array, discounts: jax.Array, probs: jax.Array) -> jax.Array:
    """The distribution of return + discount * value, brought back to the support (Bellemare et al. 2017, equation 7).

    Args:
      support: float32 [atoms], evenly spaced.
      returns, discounts: float32 [B].
      probs: float32 [B, atoms], of the value.

    Returns float32 [B, atoms].
    """
    moved = jnp.clip(returns[:, None] + discounts[:, None] * support, support[0], support[-1])
    share = 1 - jnp.abs(moved[:, None, :] - support[:, None]) / (support[1] - support[0])  # of source in [B, to, from]
    return jnp.einsum("btf,bf->bt", jnp.clip(share, 0, 1), probs, precision="highest")


def loss(args: Args, agent: Agent, target: dict, params: dict, batch: Batch):
    """Double Q-learning's loss of n-step transitions, weighted.

    For distributions the cross-entropy with the projected target (Bellemare et al. 2017, algorithm 1). One atom has no
    distribution to learn: it is the value itself, with Huber's loss, as in Ape-X (its section 3).

    Returns the loss float32 [] and its parts, sums over the batch; `td` float32 [batch_size] holds the absolute TD
    errors of means at their places, since those are what actors can compute too, whatever the loss.
    """
    frames, next_frames, keys = batch.frames, batch.next_frames, None
    if args.augment or args.dropout:
        one, other, keys = (jax.vmap(jax.random.fold_in, in_axes=(0, None))(batch.keys, i) for i in range(3))
        frames, next_frames = (
            augment.augment(augment.parse(args.augment), args.augment_prob, some, x)
            for some, x in ((one, frames), (other, next_frames))
        )
    value, support = partial(mean_value, agent), jnp.array(agent.support)
    pick = lambda x, action: jnp.take_along_axis(x, action[:, None, None], axis=1)[:, 0]  # noqa: E731
    outputs = pick(agent.apply(params, frames, keys), batch.actions)
    following = agent.apply(target, next_frames)
    judge = agent.apply(params, next_frames) if args.double_q else following
    following = jax.lax.stop_gradient(pick(following, value(judge).argmax(axis=1)))
    td = batch.returns + batch.discounts * value(following) - value(outputs)
    chex.assert_equal_shape([td, batch.weight])
    if args.num_atoms == 1:
        losses = optax.huber_loss(td)
    else:
        goal = project(support, batch.returns, batch.discounts, nn.softmax(following))
        losses = -(goal * nn.log_softmax(outputs)).sum(axis=-1)
    parts = {
        "loss": (batch.weight * losses).sum() / args.batch_size,
        "q_values": value(outputs).sum() / args.batch_size,
        "td_error": jnp.abs(td).sum() / args.batch_size,
        "td": jnp.zeros(args.batch_size).at[batch.place].set(jax.lax.stop_gradient(jnp.abs(td))),
    }
    return parts["loss"], parts


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def update(args: Args, agent: Agent, state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array, dict]:
    """One update: returns the next state, the absolute TD errors float32 [B] and metrics, float32 []."""
    learning_rate = runs.parse_schedule(args.learning_rate)(state.global_step)
    (_, parts), grads = compute.value_and_grad(partial(loss, args, agent, state.target), state.params, batch)
    if args.l2:  # the gradient of l2 x the squared norm of each convolution's kernel
        grads = jax.tree.map(lambda g, w: g + 2 * args.l2 * w if w.ndim == 4 else g, grads, state.params)
    direction, opt_state = make_optimizer(args).update(grads, state.opt_state)
    params = optax.apply_updates(state.params, jax.tree.map(lambda d: -learning_rate * d, direction))
    updates, td = state.updates + 1, parts.pop("td")
    copy = updates % args.target_network_frequency == 0
    target = jax.tree.map(lambda new, old: jnp.where(copy, new, old), params, state.target)
    metrics = {f"losses/{name}": x for name, x in parts.items()} | {
        "losses/grad_norm": optax.tree.norm(grads),
        "losses/param_norm": optax.tree.norm(params),  # infinite where the last step went wrong
        "charts/learning_rate": learning_rate,
    }
    return state._replace(params=params, target=target, opt_state=opt_state, updates=updates), td, metrics


def updates_due(args: Args, learn_from: int, before: int, after: int) -> int:
    """How many updates belong between two environment steps."""
    due = lambda step: int(args.replay_ratio * max(step - learn_from, 0) / args.batch_size)  # noqa: E731
    return due(after) - due(before)


# EVALUATION


@partial(jax.jit, static_argnums=0)
def choose(agent: Agent, params: dict, frames: jax.Array, key: jax.Array) -> jax.Array:
    """Almost always the best actions int32 [N] for stacked frames uint8 [N, 64, 64, C]."""
    values = mean_value(agent, compute.apply(agent.apply, params, frames))
    return explore(key, values, jnp.full(len(frames), EVALUATION_EPSILON))


def make_policy(agent: Agent, params: dict) -> Callable:
    """A policy as `envs.play_episodes` calls it."""
    return lambda frames, age, key, memory: (choose(agent, params, frames, key), None)


def load_policy(args: Args, run_dir: str) -> tuple[int, Callable]:
    """For evaluate.py: the step of a run's newest checkpoint, and its policy."""
    agent = make_agent(args)
    template = jax.eval_shape(partial(initial_state, args, agent))
    state = compute.replicate(runs.restore_tree(template, runs.load_checkpoint(run_dir)[1]["state"], run_dir))
    return int(state.global_step), make_policy(agent, state.params)


# MAIN


def initial(args: Args, agent: Agent) -> dict:
    """All that a resume needs besides the games and the replay buffer; `main` saves the same."""
    state = initial_state(args, agent)
    carries = {str(actor): initial_carry(args) for actor in range(args.num_actors)}
    return {"state": state, "carries": carries, "published": {"0": state.params}}


def load(args: Args, agent: Agent, run_dir: str, store: jax.Device) -> dict:
    """The newest checkpoint of a run; its replay buffer comes to lie on `store`."""
    _, saved = runs.load_checkpoint(run_dir)
    template = jax.eval_shape(partial(initial, args, agent))
    template["published"] = dict.fromkeys(saved["published"], template["published"]["0"])
    loaded = {name: runs.restore_tree(part, saved[name], run_dir) for name, part in template.items()}
    if "replay" in saved:
        with jax.default_device(store):
            replay = jax.eval_shape(partial(initial_replay, args))
            loaded["replay"] = runs.restore_tree(replay, saved["replay"], run_dir)
    return saved | loaded


def main(args: Args) -> runs.Run:
    """Trains; returns the run, finished or stopped by a signal (`run.stop`)."""
    check_args(args)
    agent, saved, devices = make_agent(args), None, jax.devices()
    store = jax.devices("cpu")[0] if args.replay_device == "host" else devices[0]
    if args.resume:
        runs.check_same(args, runs.saved_args(Args, args.resume, "--resume", SCRIPT), FIXED)
        saved = load(args, agent, args.resume, store)

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
        state = compute.replicate(start_from["state"])
        refill = saved and "replay" not in saved
        with jax.default_device(store):
            replay = jax.device_put(start_from.pop("replay"), store) if "replay" in start_from else initial_replay(args)
        carries = [start_from["carries"][str(actor)] for actor in everyone]
        step, played = int(state.global_step), [mine.steps for mine in games]
        size, count = sum(x.nbytes for x in replay), replay.age.size
        run.say(f"replay buffer: {count:,} steps x {size / count / 1e3:.1f} kB = {size / 1e9:.2f} GB, on {store}")
        if refill:
            state = state._replace(learn_from=state.global_step + args.learning_starts)
            run.say(f"the replay buffer was not saved: learning goes on after {args.learning_starts:,} more steps")
        learn_from = int(state.learn_from)
        if step >= args.total_timesteps:
            run.say(f"the run is at step {step} already; to go on, give a larger --total-timesteps")

        with Actors(partial(collect, args, agent, games), homes, args.max_lag, args.deterministic) as actors:

            def start():
                actors.start(int(state.iterations), [jax.device_put(carries[i], homes[i]) for i in everyone])

            def save():
                """Stops the actors; what they have played and the learner has not taken is dropped."""
                actors.stop()
                logs = {str(actor): games[actor].save(played[actor]) for actor in everyone}
                tree = {"state": state, "games": logs, "episodes": episodes.save()}
                tree["carries"] = {str(actor): carries[actor] for actor in everyone}
                tree["published"] = {str(version): params for version, params in actors.published().items()}
                run.save(step, tree | ({"replay": replay} if args.save_replay else {}))

            for version, params in start_from["published"].items():
                actors.publish(int(version), params)
            start()
            while not run.stop:
                finished = step >= args.total_timesteps
                if args.eval_episodes and run.evaluation_due(args.eval_every, step, finished):
                    results = envs.evaluate_run(args, run, make_policy(agent, state.params), step)
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
                played, version = [unroll.games for unroll in unrolls], int(state.iterations)
                charts["charts/policy_lag"] = version - np.mean([item.version for item in items])
                with watch("insert"):
                    steps = envs.join_steps([unroll.steps for unroll in unrolls])
                    rollouts = jax.device_put([unroll.rollout for unroll in unrolls], store)
                    replay = jax.block_until_ready(insert(args, replay, rollouts, steps))
                before, step = step, step + int((~steps.done).sum())
                beta, metrics = runs.parse_schedule(args.per_beta)(step), []
                for i in range(int(state.updates), int(state.updates) + updates_due(args, learn_from, before, step)):
                    with watch("sample"):
                        batch = sample(args, replay, i, beta)
                        batch = jax.block_until_ready(compute.replicate(batch))
                    with watch("update"):
                        state, td, some = update(args, agent, state, batch)
                        metrics.append(jax.device_get(some))
                    with watch("sample"):
                        batch, td = jax.device_put((batch._replace(frames=None, next_frames=None), td), store)
                        replay = replay._replace(priorities=set_priorities(args, replay.priorities, batch, td))
                metrics = jax.tree.map(lambda *x: float(np.mean(x)), *metrics) if metrics else {}
                counts = {"global_step": jnp.int32(step), "iterations": jnp.int32(version + 1)}
                state = compute.replicate(state._replace(**counts))
                actors.publish(version + 1, state.params)
                run.check_finite(step, metrics)
                episodes.add(steps)
                for part in ("inference", "game", "blocked"):
                    charts[f"time/actor_{part}"] = np.mean([item.shares[f"time/{part}"] for item in items])
                charts |= {"charts/updates": int(state.updates), "charts/per_beta": beta}
                charts |= episodes.metrics() | {"charts/SPS": run.steps_per_second(step)} | watch.fractions()
                run.log(step, metrics | charts)
                if runs.crossed(args.checkpoint_every, before, step):
                    actors.stop()
                    # Games cannot be saved, so every run starts them anew here: a resumed run does the same.
                    for actor in everyone:
                        games[actor].restart(envs.derive_seed(args.seed, step, 0, actor))
                    played, replay = [0] * len(games), cut(replay)
                    episodes.restart()
                    save()
                    start()
            save()
            actors.check()  # one that failed after the last batch
        for mine in games:
            mine.close()
    return run


if __name__ == "__main__":
    runs.cli(Args, main)
