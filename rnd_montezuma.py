"""PPO with Random Network Distillation on Montezuma's Revenge: a bonus for frames that a network cannot predict yet.

Burda et al. 2018 (arXiv 1810.12894), with its settings as defaults. With --async the games go on while the learner
learns, one update behind. Try:

    python rnd_montezuma.py --async --vtrace --room-map
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

from common import atari, compute, envs, networks, runs, shaping
from common.actors import ActorError, Actors
from common.runs import check

SCRIPT = Path(__file__).stem


@dataclass(frozen=True)
class Args:
    env_id: ClassVar[str] = atari.ENV_ID

    # The game
    sticky_actions: float = 0.25
    """probability that the emulator repeats the action before, at each of its frames"""
    max_episode_steps: int = 4500
    """steps of an episode, four frames each, after which it is truncated"""
    frame_stack: int = 4
    """how many frames back the policy sees, the newest included; RND sees the newest one only"""

    # The networks
    channels: str = "32,64,64"
    """channels of the three convolutions, in policy, target and predictor"""
    hidden: int = 512
    """units of the dense layers (half as many in the policy's first) and of the GRU, and the target's features"""
    gru: bool = False
    """give the policy a memory; minibatches then are of whole rollouts"""
    predictor_depth: int = 2
    """dense layers that the predictor has besides the target's one; 0 for equal depth"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """the policy's convolutions and first dense layer; auto is bfloat16 on an accelerator and float32 on a CPU"""

    # The algorithm
    total_timesteps: int = 163_840_000
    """environment steps to train for"""
    num_envs: int = 128
    """games played side by side"""
    num_steps: int = 128
    """steps of each game in a rollout; num_envs x num_steps is the batch"""
    async_: Annotated[bool, tyro.conf.arg(name="async")] = False
    """play the next rollout while the learner learns from this one, with parameters that are one update behind"""
    vtrace: bool = False
    """correct both value streams and their advantages for that with V-trace, ratios clipped at 1"""
    obs_norm_init_steps: int = 2048
    """random steps of each game before training, which the statistics of RND's frames start from"""
    num_minibatches: int = 4
    """minibatches in an epoch"""
    update_epochs: int = 4
    """passes over a batch"""
    learning_rate: str = "1e-4"
    """Adam's step size: a number, or "step:value,..." for piecewise-linear in environment steps"""
    gamma: float = 0.999
    """discount of the game's reward"""
    int_gamma: float = 0.99
    """discount of the bonus, whose return does not end with the episode"""
    gae_lambda: float = 0.95
    """lambda of generalised advantage estimation, for both"""
    ext_coef: float = 2.0
    """weight of the advantage from the game's reward, which is clipped to its sign; 0 for curiosity only"""
    int_coef: float = 1.0
    """weight of the advantage from the bonus"""
    norm_adv: bool = False
    """normalise the advantages of a batch"""
    clip_coef: float = 0.1
    """clip the probability ratio to 1 +- this"""
    vf_coef: float = 1.0
    """coefficient of the value loss, half the mean squared error of each head"""
    ent_coef: float = 0.001
    """coefficient of the entropy bonus"""
    update_proportion: float = 0.25
    """share of each minibatch, drawn at random, that the predictor learns from"""
    max_grad_norm: float = 0.0
    """clip the gradient to this global norm; 0 for no clipping"""
    adam_eps: float = 1e-8
    """Adam's epsilon"""

    # The run
    seed: int = 1
    """of everything: the same seed gives the same metrics"""
    run_dir: str = "runs"
    """where run directories go"""
    resume: str = ""
    """a run directory to continue; its arguments are taken over, and flags given here override them"""
    checkpoint_every: int = 2_000_000
    """environment steps between checkpoints; at each, the games start anew (unfinished episodes are truncated)"""
    keep_checkpoints: int = 3
    """how many of the newest checkpoints to keep"""
    room_map: bool = False
    """draw the rooms visited so far, at each checkpoint: rooms.png in the run directory, and W&B"""
    wandb_mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """Weights & Biases; auto is online if logged in, else offline"""
    wandb_project: str = "montezuma"
    """W&B project"""
    wandb_entity: str = ""
    """W&B team or user; empty for your default"""


# Closed ranges of the numbers among the flags; None: no bound.
LIMITS = {
    "sticky_actions": (0, 0.99), "max_episode_steps": (2, 10**6), "frame_stack": (1, 64), "hidden": (1, 65536),
    "predictor_depth": (0, 16), "total_timesteps": (1, 2**31 - 2**24), "num_envs": (1, 65536), "num_steps": (1, 65536),
    "obs_norm_init_steps": (1, 10**6), "num_minibatches": (1, None), "update_epochs": (1, 1000), "gamma": (0, 1),
    "int_gamma": (0, 1), "gae_lambda": (0, 1), "ext_coef": (0, None), "int_coef": (0, None), "clip_coef": (0, None),
    "vf_coef": (0, None), "ent_coef": (0, None), "update_proportion": (0, 1), "max_grad_norm": (0, None),
    "adam_eps": (1e-30, None), "seed": (0, envs.MAX_SEED), "checkpoint_every": (1, None), "keep_checkpoints": (1, None),
}  # fmt: skip
# What a run cannot change when it is resumed: its games have been played.
FIXED = ("sticky_actions", "max_episode_steps", "num_envs", "obs_norm_init_steps", "seed")


def check_args(args: Args) -> None:
    """Raises UsageError, one sentence, if a flag's value makes no sense."""
    runs.check_limits(args, LIMITS)
    check(args.channels != "", "--channels '': give 3 numbers, such as 32,64,64")
    networks.check_flags(encoder_spec(args))
    check(args.ext_coef + args.int_coef > 0, "--ext-coef 0.0: nothing to learn from, as --int-coef is 0 too")
    runs.check_needs(args, args.async_, "--async", ("vtrace",))
    batch = args.num_envs * args.num_steps
    if args.gru:
        what, parts = f"the number of games, {args.num_envs} (a GRU learns from whole rollouts)", args.num_envs
    else:
        what, parts = f"the batch, num_envs x num_steps = {batch}", batch
    check(parts % args.num_minibatches == 0, f"--num-minibatches {args.num_minibatches}: must divide {what}")
    check(batch <= 2**24, f"--num-envs {args.num_envs}: num_envs x num_steps = {batch} must be at most {2**24}")
    sample = batch // args.num_minibatches
    check(
        round(args.update_proportion * sample) >= 1,
        f"--update-proportion {args.update_proportion}: leaves the predictor nothing of a minibatch of {sample}, "
        f"give {1 / sample:.2g} or more",
    )
    runs.check_schedule("--learning-rate", args.learning_rate, 0, None)


# NETWORKS


def encoder_spec(args: Args) -> networks.Spec:
    return networks.Spec(
        "nature", args.channels, init="orthogonal", pool="flatten", hidden=max(args.hidden // 2, 1), dtype=args.dtype
    )


class Agent(nn.Module):
    """A policy and two values, of the game's reward and of the bonus, on the Nature CNN and perhaps a GRU."""

    encoder: nn.Module
    core: networks.Recurrent
    hidden: int

    def setup(self):
        self.trunk, self.actor, self.critic = (
            nn.Dense(self.hidden, kernel_init=networks.INITS["orthogonal"]) for _ in range(3)
        )
        # A small first policy layer makes the first policy nearly uniform.
        self.policy = nn.Dense(atari.NUM_ACTIONS, kernel_init=nn.initializers.orthogonal(0.01))
        self.values = nn.Dense(2, kernel_init=nn.initializers.orthogonal(0.01))

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


class Features(nn.Module):
    """What RND's target makes of a frame and its predictor learns to: whitened frames float32 [B, 84, 84, 1] ->
    [B, hidden] (Burda et al. 2018, appendix A.4)."""

    channels: str
    hidden: int
    depth: int  # dense layers before the last

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        # In full float32 on every device: rounding would be a bonus that never falls.
        options = {"kernel_init": networks.INITS["orthogonal"], "precision": "highest"}
        fast = {"conv_general_dilated": compute.conv_general_dilated}
        for features, size, stride in zip(self.channels.split(","), (8, 4, 3), (4, 2, 1), strict=True):
            x = nn.leaky_relu(nn.Conv(int(features), (size, size), stride, "VALID", **options, **fast)(x), 0.2)
        x = x.reshape(len(x), -1)
        for _ in range(self.depth):
            x = nn.relu(nn.Dense(self.hidden, **options)(x))
        return nn.Dense(self.hidden, **options)(x)


def make_target(args: Args) -> Features:
    return Features(args.channels, args.hidden, 0)


def make_predictor(args: Args) -> Features:
    return Features(args.channels, args.hidden, args.predictor_depth)


def make_agent(args: Args) -> Agent:
    core = networks.Recurrent("gru" if args.gru else "none", args.hidden)
    return Agent(networks.make_encoder(encoder_spec(args)), core, args.hidden)


def initial_core(args: Args, size: int) -> networks.Core:
    return networks.initial_core("gru" if args.gru else "none", args.hidden, size)


def look(agent: Agent, params: dict, frames: jax.Array, first: jax.Array, core: networks.Core, one_core: bool = False):
    """Logits [N, 18], values [N, 2] and the next core for stacked frames [N, 84, 84, C] of one step; on one core of a
    CPU if another program has the others."""
    encode = partial(agent.apply, method="encode")
    features = compute.in_chunks(partial(encode, params), frames) if one_core else compute.apply(encode, params, frames)
    logits, values, core = agent.apply(params, features[:, None], first[:, None], core, method="decode")
    return logits[:, 0], values[:, 0], core


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


class Carry(NamedTuple):
    """What the actor needs besides its games to go on."""

    history: jax.Array  # uint8 [H, N, 84, 84, 1]: the frames before the newest
    core: networks.Core


def make_optimizer(args: Args) -> optax.GradientTransformation:
    """The direction of a step; `update` multiplies it by the scheduled learning rate."""
    clip = optax.clip_by_global_norm(args.max_grad_norm) if args.max_grad_norm else optax.identity()
    return optax.chain(clip, optax.scale_by_adam(eps=args.adam_eps))


@partial(jax.jit, static_argnums=(0, 1))
def initial_state(args: Args, agent: Agent) -> TrainState:
    key, agent_key, predictor_key, target_key = jax.random.split(jax.random.PRNGKey(args.seed), 4)
    frames = jnp.zeros((1, *atari.FRAME_SHAPE[:2], args.frame_stack), jnp.uint8)
    frame = jnp.zeros((1, *atari.FRAME_SHAPE))
    params = {
        "agent": agent.init(agent_key, frames, jnp.ones(1, bool), initial_core(args, 1)),
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
def initial_carry(args: Args) -> Carry:
    history = jnp.zeros((envs.history_length(args), args.num_envs, *atari.FRAME_SHAPE), jnp.uint8)
    return Carry(history, initial_core(args, args.num_envs))


# ROLLOUT


class Rollout(NamedTuple):
    """What stays on the device while T steps are played; H rows of older frames come first."""

    frames: jax.Array  # uint8 [H + T + 1, N, 84, 84, 1]: row H + t is what step t acts on
    actions: jax.Array  # int32 [T, N]
    logits: jax.Array  # float32 [T, N, 18]
    values: jax.Array  # float32 [T + 1, N, 2]
    first_core: networks.Core
    core: networks.Core
    key: jax.Array
    t: jax.Array  # int32 []


class Unroll(NamedTuple):
    """What the actor hands to the learner."""

    rollout: Rollout
    steps: envs.Steps
    rooms: np.ndarray  # int64 [T, N]: where step t acts
    pictures: dict[int, np.ndarray]  # a frame uint8 [84, 84] of each of these rooms
    games: int  # steps that the games had played by its end, since they were last started


@partial(jax.jit, static_argnums=0)
def begin_rollout(args: Args, carry: Carry, i: int) -> Rollout:
    rows, shape = envs.history_length(args) + args.num_steps + 1, (args.num_steps, args.num_envs)
    frames = jnp.zeros((rows, args.num_envs, *atari.FRAME_SHAPE), jnp.uint8)
    return Rollout(
        frames=frames.at[: envs.history_length(args)].set(carry.history),
        actions=jnp.zeros(shape, jnp.int32),
        logits=jnp.zeros((*shape, atari.NUM_ACTIONS)),
        values=jnp.zeros((args.num_steps + 1, args.num_envs, 2)),
        first_core=carry.core,
        core=carry.core,
        key=jax.random.fold_in(jax.random.PRNGKey(envs.derive_seed(args.seed, 2)), i),
        t=jnp.int32(0),
    )


def stack(args: Args, frames: jax.Array, age: jax.Array, t: jax.Array, env: jax.Array) -> jax.Array:
    """What the policy sees at steps t of a rollout, at these ages."""
    offsets = envs.stack_offsets(args.frame_stack, False)
    return envs.stack_frames(frames, age, envs.history_length(args) + t, env, offsets)


def see(args: Args, agent: Agent, params: dict, rollout: Rollout, obs: jax.Array, age: jax.Array):
    """Adds obs uint8 [N, 1, 84, 84] to the rollout, and its values; returns it, logits [N, 18] and the next core."""
    frames = envs.put_frames(rollout.frames, envs.history_length(args) + rollout.t, obs)
    stacked = stack(args, frames, age, rollout.t, jnp.arange(args.num_envs))
    logits, values, core = look(agent, params, stacked, age == 0, rollout.core, one_core=args.async_)
    return rollout._replace(frames=frames, values=rollout.values.at[rollout.t].set(values)), logits, core


def reached(args: Args, rollout: Rollout) -> jax.Array:
    """The frames uint8 [T, N, 84, 84, 1] that its steps lead to."""
    return rollout.frames[envs.history_length(args) + 1 :]


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def act(args: Args, agent: Agent, params: dict, rollout: Rollout, obs: jax.Array, age: jax.Array):
    """Chooses actions for obs uint8 [N, 1, 84, 84], age int32 [N]; returns the rollout and actions int32 [N]."""
    rollout, logits, core = see(args, agent, params, rollout, obs, age)
    actions = jax.random.categorical(jax.random.fold_in(rollout.key, rollout.t), logits)
    rollout = rollout._replace(
        actions=rollout.actions.at[rollout.t].set(actions),
        logits=rollout.logits.at[rollout.t].set(logits),
        core=core,
        t=rollout.t + 1,
    )
    return rollout, actions


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def end_rollout(args: Args, agent: Agent, params: dict, rollout: Rollout, obs: jax.Array, age: jax.Array):
    """Adds the frames after the last step and their values; returns the rollout and the next Carry."""
    rollout, _, _ = see(args, agent, params, rollout, obs, age)
    return rollout, Carry(rollout.frames[args.num_steps : args.num_steps + envs.history_length(args)], rollout.core)


def collect(args: Args, agent: Agent, games: envs.Games, actor: int, i: int, params, carry, watch, check):
    """Plays the i-th rollout, as `common.actors.Actors` asks for it: returns an Unroll and the next Carry."""
    rollout, rooms, pictures = begin_rollout(args, carry, i), [], {}

    def choose_actions(obs, age):
        nonlocal rollout
        rollout, actions = act(args, agent, params, rollout, obs, age)
        rooms.append(atari.rooms_of(games.info))
        for room, env in zip(*np.unique(rooms[-1], return_index=True), strict=True):
            pictures[int(room)] = obs[env, 0].copy()
        return actions

    steps = games.play(choose_actions, args.num_steps, watch, check)
    rollout, carry = end_rollout(args, agent, params, rollout, games.obs, games.age)
    return Unroll(rollout, steps, np.stack(rooms), pictures, games.steps), carry


# RANDOM NETWORK DISTILLATION (Burda et al. 2018, sections 2.2 and 2.4)


@jax.jit
def add_frames(stats: FrameStatistics, frames: jax.Array) -> FrameStatistics:
    """The statistics with frames uint8 [B, 84, 84, 1] added."""
    mean = frames.mean(axis=0, dtype=jnp.float32)
    var = ((frames - mean) ** 2).mean(axis=0)
    return FrameStatistics(*shaping.merge_moments(*stats, len(frames), mean, var))


def whiten(stats: FrameStatistics, frames: jax.Array) -> jax.Array:
    """Frames uint8 [B, 84, 84, 1] as RND sees them: float32, by the running mean and std of each pixel, within +-5."""
    return jnp.clip((frames - stats.mean) / jnp.sqrt(stats.var + 1e-4), -5, 5)  # in grey levels: 0.01 at the least


def novelty(args: Args, stats: FrameStatistics, target: dict, predictor: dict, frames: jax.Array) -> jax.Array:
    """How badly the predictor knows the target's features of frames uint8 [B, 84, 84, 1]: mean squares [B]."""
    white = whiten(stats, frames)
    truth = jax.lax.stop_gradient(make_target(args).apply(target, white))
    return ((make_predictor(args).apply(predictor, white) - truth) ** 2).mean(axis=-1)


def bonuses(args: Args, state: TrainState, rollout: Rollout, mask: jax.Array):
    """The bonus of each transition, for the frame that it leads to, divided by the running standard deviation of its
    return: the filter, and raw and divided bonus float32 [T, N], 0 where not `mask`."""

    def of_frames(params, frames):
        return novelty(args, state.frame_stats, *params, frames)

    raw = mask * jax.lax.map(
        partial(compute.apply, of_frames, (state.target, state.params["predictor"])),
        reached(args, rollout),
    )
    # The return runs on through an episode's end, and is not clipped.
    bonus_filter, bonus = shaping.normalize(
        state.bonus_filter, raw, jnp.zeros_like(mask), mask, args.int_gamma, clip=jnp.inf
    )
    return bonus_filter, raw, bonus


def predictor_loss(args: Args, stats: FrameStatistics, target: dict, predictor: dict, data: tuple):
    """Of frames uint8 [B, 84, 84, 1] and their weights [B]."""
    frames, weight = data
    total = (weight * novelty(args, stats, target, predictor, frames)).sum()
    return total, {"rnd_loss": total}


# PROXIMAL POLICY OPTIMISATION


def gae(rewards, values, discount, decay, ratio) -> jax.Array:
    """Generalised advantage estimates (Schulman et al. 2016, equation 16), with V-trace's truncated importance weights
    (Espeholt et al. 2018, equation 1, both bars 1) where another policy has acted.

    Args:
      rewards: [T, ...], of the transition from step t to t + 1.
      values: [T + 1, ...].
      discount: [T, ...], of the value that follows: 0 where the episode terminates.
      decay: [T, ...], discount x lambda, and 0 wherever the episode ends.
      ratio: [T, ...], learner's over actor's probability of the action; 1 on-policy.

    Returns advantages float32 [T, ...], which are also V-trace's targets less the values (with its lambda, as in rlax).
    """
    chex.assert_equal_shape([rewards, values[1:], discount, decay, ratio])
    rho = jnp.minimum(1.0, ratio)
    deltas = rho * (rewards + discount * values[1:] - values[:-1])

    def backward(advantage, step):
        delta, decay = step
        advantage = delta + decay * advantage
        return advantage, advantage

    return jax.lax.scan(backward, jnp.zeros_like(deltas[0]), (deltas, rho * decay), reverse=True)[1]


def advantages(args: Args, rewards, bonus, values, ratio, steps: envs.Steps) -> jax.Array:
    """Advantages float32 [T, N, 2]: of the game's rewards, which are episodic, and of the bonus, which is not.

    At a time limit the last frame's value stands for the rest of the episode. The bonus's return goes on with the next
    episode, over EnvPool's junk step as if it were not there.

    Args:
      rewards, bonus, ratio: [T, N].
      values: [T + 1, N, 2].
    """
    both, real, values = lambda *x: jnp.stack(x, axis=-1), ~steps.done, jnp.asarray(values)
    through = jnp.where(real, values[:-1, :, 1], values[1:, :, 1])
    return gae(
        both(rewards, bonus),
        values.at[:-1, :, 1].set(through),
        both(args.gamma * (1.0 - steps.terminated), jnp.where(real, args.int_gamma, 1.0)),
        both(
            args.gamma * args.gae_lambda * (1.0 - steps.ended), jnp.where(real, args.int_gamma * args.gae_lambda, 1.0)
        ),
        both(ratio, jnp.where(real, ratio, 1.0)),
    )


def look_again(args: Args, agent: Agent, params: dict, rollout: Rollout, age: jax.Array):
    """What the learner's policy says of a rollout: logits float32 [T, N, 18] and values float32 [T + 1, N, 2]."""

    def step(core, t):
        stacked = stack(args, rollout.frames, age[t], t, jnp.arange(args.num_envs))
        logits, values, core = look(agent, params, stacked, age[t] == 0, core)
        return core, (logits, values)

    _, (logits, values) = jax.lax.scan(step, rollout.first_core, jnp.arange(args.num_steps + 1))
    return logits[:-1], values


class Batch(NamedTuple):
    """Transitions to learn from: over a rollout [T, N]; in a minibatch B sequences of S steps, [B, S] (S = 1 without a
    GRU)."""

    first: jax.Array  # whether a step is its episode's first
    actions: jax.Array
    log_probs: jax.Array  # [..., 18], of the policy that the ratio compares with
    advantages: jax.Array
    returns: jax.Array  # [..., 2]
    weight: jax.Array  # 0 for what is no transition; sums to 1 over a minibatch


def chosen(log_probs: jax.Array, actions: jax.Array) -> jax.Array:
    return jnp.take_along_axis(log_probs, actions[..., None], axis=-1)[..., 0]


def loss(args: Args, agent: Agent, params: dict, data: tuple[jax.Array, networks.Core, Batch]):
    """PPO's loss (Schulman et al. 2017, equation 9) of frames uint8 [B, S, 84, 84, C], the core before the first step
    [B, hidden] and a Batch [B, S]: float32 [] and its parts, sums by weight."""
    frames, core, batch = data
    encode = partial(agent.apply, params, method="encode")
    features = compute.in_chunks(encode, frames.reshape(-1, *frames.shape[2:])).reshape(*batch.actions.shape, -1)
    logits, values, _ = agent.apply(params, features, batch.first, core, method="decode")
    log_probs = jax.nn.log_softmax(logits)
    chex.assert_equal_shape([log_probs, batch.log_probs])
    chex.assert_equal_shape([values, batch.returns])
    chex.assert_equal_shape([values[..., 0], batch.actions, batch.advantages, batch.weight])
    ratio = jnp.exp(chosen(log_probs - batch.log_probs, batch.actions))
    clipped = jnp.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    parts = {
        "policy_loss": -jnp.minimum(ratio * batch.advantages, clipped * batch.advantages),
        "value_loss": 0.5 * ((values - batch.returns) ** 2).sum(axis=-1),
        "entropy": -(jnp.exp(log_probs) * log_probs).sum(axis=-1),
        "approx_kl": (jnp.exp(batch.log_probs) * (batch.log_probs - log_probs)).sum(axis=-1),
        "clipfrac": (jnp.abs(ratio - 1) > args.clip_coef).astype(jnp.float32),
    }
    parts = {name: (batch.weight * part).sum() for name, part in parts.items()}
    total = parts["policy_loss"] + args.vf_coef * parts["value_loss"] - args.ent_coef * parts["entropy"]
    return total, parts


def optimize(args: Args, agent: Agent, state: TrainState, rollout: Rollout, age, batch: Batch, learning_rate, key):
    """Epochs of minibatches; returns the parameters, Adam's state and the last epoch's mean metrics."""
    tx, after = make_optimizer(args), reached(args, rollout)

    def minibatch(learner, key, index):
        params, opt_state = learner
        if args.gru:  # whole rollouts of some games
            time, env = jnp.arange(args.num_steps)[None], index[:, None]
        else:
            time, env = index[:, None] // args.num_envs, index[:, None] % args.num_envs
        part, core = jax.tree.map(lambda x: x[time, env], batch), jax.tree.map(lambda x: x[index], rollout.first_core)
        mean = lambda weight: weight / jnp.maximum(weight.sum(), 1)  # noqa: E731
        frames = stack(args, rollout.frames, age[time, env], time, env)
        data = (frames, core, part._replace(weight=mean(part.weight)))
        few = 1 if args.gru else compute.CHUNK
        (_, parts), gradient = compute.value_and_grad(partial(loss, args, agent), params["agent"], data, few)
        # The predictor learns from the frames that gave the bonus, of a random part of the transitions.
        count = part.weight.size
        drawn = jax.random.choice(key, count, (round(args.update_proportion * count),), replace=False)
        time, env = (jnp.broadcast_to(x, part.weight.shape).reshape(-1)[drawn] for x in (time, env))
        error = partial(predictor_loss, args, state.frame_stats, state.target)
        data = (after[time, env], mean(part.weight.reshape(-1)[drawn]))
        (_, rnd_parts), rnd_gradient = compute.value_and_grad(error, params["predictor"], data)
        grads = {"agent": gradient, "predictor": rnd_gradient}
        direction, opt_state = tx.update(grads, opt_state)
        params = optax.apply_updates(params, jax.tree.map(lambda d: -learning_rate * d, direction))
        return (params, opt_state), parts | rnd_parts | {"grad_norm": optax.tree.norm(grads)}

    def epoch(learner, key):
        shuffle_key, sample_key = jax.random.split(key)
        count = args.num_envs if args.gru else batch.weight.size
        order = jax.random.permutation(shuffle_key, count).reshape(args.num_minibatches, -1)
        keys = jax.random.split(sample_key, args.num_minibatches)
        learner, parts = jax.lax.scan(lambda learner, x: minibatch(learner, *x), learner, (keys, order))
        return learner, jax.tree.map(jnp.mean, parts)

    keys = jax.random.split(key, args.update_epochs)
    (params, opt_state), parts = jax.lax.scan(epoch, (state.params, state.opt_state), keys)
    return params, opt_state, jax.tree.map(lambda x: x[-1], parts)


def prepare(args: Args, agent: Agent, state: TrainState, rollout: Rollout, steps: envs.Steps):
    """What an update learns from: a Batch [T, N], the filter, the bonuses [T, N], and metrics of them, float32 []."""
    mask, values, ratio, metrics = ~steps.done, rollout.values, jnp.ones(steps.done.shape), {}
    mean_of = lambda x: shaping.masked_moments(x, mask)[0]  # noqa: E731
    log_probs = jax.nn.log_softmax(rollout.logits)
    if args.vtrace:  # values and ratio are the learner's, who is one update ahead of the policy that acted
        logits, values = look_again(args, agent, state.params["agent"], rollout, steps.age)
        acted, log_probs = log_probs, jax.nn.log_softmax(logits)
        ratio = jnp.exp(chosen(log_probs - acted, rollout.actions))
        metrics = {"losses/rho": mean_of(jnp.minimum(1.0, ratio)), "losses/rho_clipfrac": mean_of(ratio > 1)}
    bonus_filter, raw, bonus = bonuses(args, state, rollout, mask)
    both = advantages(args, jnp.sign(steps.rewards), bonus, values, ratio, steps)
    total = args.ext_coef * both[..., 0] + args.int_coef * both[..., 1]
    if args.norm_adv:
        mean, var = shaping.masked_moments(total, mask)
        total = (total - mean) / jnp.sqrt(var + 1e-8)
    weight = mask.astype(jnp.float32)
    batch = Batch(steps.age[:-1] == 0, rollout.actions, log_probs, total, both + values[:-1], weight)
    metrics |= {
        "charts/intrinsic_reward": mean_of(bonus),
        "charts/intrinsic_reward_max": bonus.max(),
        "charts/prediction_error": mean_of(raw),
        "charts/intrinsic_return_std": jnp.sqrt(bonus_filter.var),
    }
    for i, name in enumerate(("explained_variance", "intrinsic_explained_variance")):
        _, unexplained = shaping.masked_moments(both[..., i], mask)
        _, spread = shaping.masked_moments(batch.returns[..., i], mask)
        metrics[f"losses/{name}"] = 1 - unexplained / jnp.maximum(spread, 1e-8)
    return batch, bonus_filter, bonus, metrics


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def update(args: Args, agent: Agent, state: TrainState, rollout: Rollout, steps: envs.Steps):
    """One update (Burda et al. 2018, algorithm 1): the next state, metrics float32 [] and bonuses float32 [T, N]."""
    batch, bonus_filter, bonus, metrics = prepare(args, agent, state, rollout, steps)
    # The bonus was given by the old statistics, the predictor learns with the new ones.
    seen = reached(args, rollout).reshape(-1, *atari.FRAME_SHAPE)
    state = state._replace(frame_stats=add_frames(state.frame_stats, seen))
    learning_rate = runs.parse_schedule(args.learning_rate)(state.global_step)
    key, shuffle_key = jax.random.split(state.key)
    params, opt_state, parts = optimize(args, agent, state, rollout, steps.age, batch, learning_rate, shuffle_key)
    state = state._replace(
        params=params,
        opt_state=opt_state,
        key=key,
        global_step=state.global_step + (~steps.done).sum(),
        updates=state.updates + 1,
        bonus_filter=bonus_filter,
    )
    metrics |= {f"losses/{name}": value for name, value in parts.items()} | {
        "losses/param_norm": optax.tree.norm(params),  # infinite where the last step went wrong
        "charts/learning_rate": learning_rate,
        "charts/updates": state.updates,
    }
    return state, metrics, bonus


# EVALUATION


@partial(jax.jit, static_argnums=0)
def choose(agent: Agent, params: dict, frames: jax.Array, age: jax.Array, key: jax.Array, core: networks.Core):
    """Draws actions int32 [N] from the policy for stacked frames uint8 [N, 84, 84, C]; its memory is the core."""
    logits, _, core = look(agent, params, frames, age == 0, core)
    return jax.random.categorical(key, logits), core


def make_policy(args: Args, agent: Agent, params: dict) -> Callable:
    """A policy as `envs.play_episodes` calls it."""

    def policy(frames, age, key, core):
        return choose(agent, params, frames, age, key, initial_core(args, len(frames)) if core is None else core)

    return policy


def evaluate(args: Args, run_dir: str, episodes: int, seed: int, random: bool, video: bool):
    """For evaluate.py: plays the newest checkpoint of a run, or random actions, in the game as it was trained on.

    Returns the step, a title, a row for each episode, a summary of them and the best one's frames, if asked.
    """
    agent = make_agent(args)
    state = load(args, agent, run_dir)["state"]
    policy = atari.random_policy if random else make_policy(args, agent, compute.replicate(state.params["agent"]))
    rows, summary, film = atari.evaluate(args, policy, episodes, seed, video)
    update = int(state.updates)
    return int(state.global_step), f"update {update:,}", rows, summary | {"update": update}, film


# MAIN


def observe_random_play(args: Args, stats: FrameStatistics, stop: Callable) -> FrameStatistics:
    """Starts the statistics from random steps (section 2.4); they stay as they are if `stop()` says yes."""
    env, new = atari.make_montezuma(args, args.num_envs, envs.derive_seed(args.seed, 3)), stats
    rng = np.random.default_rng(envs.derive_seed(args.seed, 4))
    env.reset()
    for _ in range(args.obs_norm_init_steps):
        if stop():
            break
        obs = env.step(rng.integers(0, atari.NUM_ACTIONS, args.num_envs))[0]
        new = add_frames(new, obs.transpose(0, 2, 3, 1))
    env.close()
    return stats if stop() else new


def initial(args: Args, agent: Agent) -> dict:
    """Learner, actor and the parameters that it has, as `main` saves them."""
    state = initial_state(args, agent)
    return {"state": state, "carry": initial_carry(args), "published": {"0": state.params["agent"]}}


def load(args: Args, agent: Agent, run_dir: str) -> dict:
    """The newest checkpoint of a run."""
    _, saved = runs.load_checkpoint(run_dir)
    template = jax.eval_shape(partial(initial, args, agent))
    template["published"] = dict.fromkeys(saved["published"], template["published"]["0"])
    return saved | {name: runs.restore_tree(part, saved[name], run_dir) for name, part in template.items()}


def main(args: Args) -> runs.Run:
    """Trains; returns the run, finished or stopped by a signal (`run.stop`)."""
    check_args(args)
    agent, saved = make_agent(args), None
    if args.resume:
        runs.check_same(args, runs.saved_args(Args, args.resume, "--resume", SCRIPT), FIXED)
        saved = load(args, agent, args.resume)

    with runs.Run(args, SCRIPT) as run:
        games = envs.Games(partial(atari.make_montezuma, args, args.num_envs), envs.derive_seed(args.seed, 1))
        episodes, intrinsic = envs.EpisodeStatistics(args.num_envs), envs.EpisodeStatistics(args.num_envs)
        rooms, watch = atari.Rooms(args.num_envs), runs.Stopwatch()
        books = {"episodes": episodes, "intrinsic": intrinsic, "rooms": rooms}
        if saved:
            if "actions" in saved["games"]:
                run.say(f"playing the {saved['games']['actions'].size:,} steps since the last checkpoint again")
            games.restore(saved["games"])
            for name, book in books.items():
                book.restore(saved[name])
            run.restore(saved["run"])
        start_from = saved or initial(args, agent)
        # Side by side, the learner has the first device (and on a CPU, all of them) and the actor the last.
        home = jax.devices()[-1] if args.async_ else compute.everywhere()
        state, carry = compute.replicate(start_from["state"]), start_from["carry"]
        step, played = int(state.global_step), games.steps
        if step >= args.total_timesteps:
            run.say(f"the run is at step {step} already; to go on, give a larger --total-timesteps")
        if state.frame_stats.count == 0:
            run.say(f"{args.obs_norm_init_steps * args.num_envs:,} random steps, to normalise RND's frames by")
            stats = observe_random_play(args, jax.device_get(state.frame_stats), lambda: run.stop)
            state = compute.replicate(state._replace(frame_stats=stats))

        with Actors(partial(collect, args, agent, games), [home], int(args.async_), lockstep=True) as actors:

            def start():
                actors.start(int(state.updates), [jax.device_put(carry, home)])

            def save():
                """Stops the actor; what it has played and the learner has not taken is dropped."""
                actors.stop()
                published = {str(version): params for version, params in actors.published().items()}
                tree = {"state": state, "carry": carry, "published": published, "games": games.save(played)}
                run.save(step, tree | {name: book.save() for name, book in books.items()})
                if args.room_map:
                    run.save_picture(step, "rooms", atari.draw_rooms(rooms.visits, rooms.pictures))

            for version, params in start_from["published"].items():
                actors.publish(int(version), params)
            if not run.stop and step < args.total_timesteps:
                start()
            while not run.stop and step < args.total_timesteps:
                try:
                    with watch("waiting"):
                        items = actors.take(lambda: run.stop)
                except ActorError:
                    save()
                    run.say(f"the actor failed; {run.path} has a checkpoint of step {step}, to continue with --resume")
                    raise
                if items is None:
                    break
                unroll, carry, version, shares = items[0]
                played, updates = unroll.games, int(state.updates)
                with watch("transfer"):
                    rollout = jax.block_until_ready(compute.replicate(unroll.rollout))
                with watch("update"):
                    state, metrics, bonus = update(args, agent, state, rollout, unroll.steps)
                    metrics, bonus = jax.device_get((metrics, bonus))
                actors.publish(updates + 1, state.params["agent"])
                before, step = step, int(state.global_step)
                run.check_finite(step, metrics)
                episodes.add(unroll.steps)
                intrinsic.add(unroll.steps._replace(rewards=bonus))
                rooms.add(unroll.rooms, unroll.steps.done, unroll.pictures)
                charts = watch.fractions()
                charts |= {"charts/policy_lag": updates - version, "charts/SPS": run.steps_per_second(step)}
                charts |= {name.replace("/", "/actor_"): share for name, share in shares.items()}
                if own := intrinsic.metrics():
                    charts["charts/episodic_intrinsic_return"] = own["charts/episodic_return"]
                run.log(step, metrics | episodes.metrics() | rooms.metrics() | charts)
                if runs.crossed(args.checkpoint_every, before, step):
                    actors.stop()
                    # Games cannot be saved, so every run starts them anew here: a resumed run does the same.
                    games.restart(envs.derive_seed(args.seed, 1, step))
                    played = 0
                    for book in books.values():
                        book.restart()
                    save()
                    start()
            save()
            run.say(f"rooms visited: {', '.join(map(str, rooms.visited())) or 'none yet'}")
            actors.check()  # one that failed after the last batch
        games.close()
    return run


if __name__ == "__main__":
    runs.cli(Args, main)
