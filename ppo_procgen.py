"""PPO on Procgen: proximal policy optimisation with ratio clipping and an adaptive KL penalty.

Schulman et al. 2017 (arXiv 1707.06347), with the settings of the 2020 Procgen competition as defaults: a wide
IMPALA CNN, average-pooled, on the oldest and the newest of four frames. Try:

    python ppo_procgen.py --env-id bigfish --gap-stack
    python ppo_procgen.py --env-id coinrun --num-levels 200 --total-timesteps 2000000 --capture-video
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from common import augment, compute, envs, networks, runs, shaping
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
    """recurrent core between encoder and heads; minibatches then are of whole rollouts"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """the encoder's arithmetic; auto is bfloat16 on an accelerator and float32 on a CPU"""

    # The algorithm
    total_timesteps: int = 8_000_000
    """environment steps to train for"""
    num_envs: int = 64
    """games played side by side; on a CPU, a multiple of its cores is fastest"""
    num_steps: int = 128
    """steps of each game in a rollout; num_envs x num_steps is the batch"""
    num_minibatches: int = 8
    """minibatches in an epoch"""
    update_epochs: int = 3
    """passes over a batch"""
    learning_rate: str = "0:1e-4,500000:8e-4,1000000:1e-4,2000000:5e-4,3000000:5e-5,4000000:2e-4,8000000:3e-5"
    """Adam's step size: a number, or "step:value,..." for piecewise-linear in environment steps"""
    gamma: str = "0.99"
    """discount: a number, or a schedule like the learning rate's"""
    gae_lambda: float = 0.9
    """lambda of generalised advantage estimation"""
    clip_coef: float = 0.2
    """clip the probability ratio to 1 +- this"""
    kl_coef: float = 0.2
    """initial coefficient of the adaptive KL penalty; 0 for none"""
    kl_target: float = 0.01
    """the KL divergence (nats) that the penalty's coefficient is adapted to"""
    target_kl: float = 0.0
    """skip the remaining epochs once an epoch's mean KL divergence (nats) is above this; 0 for never"""
    vf_coef: float = 1.0
    """coefficient of the value loss, half the mean squared error (RLlib's 0.5, which has no half, is 1.0 here)"""
    vf_clip: float = 30.0
    """clip the change of a value in one update to +- this; 0 for no clipping"""
    ent_coef: str = "0.01"
    """coefficient of the entropy bonus: a number, or a schedule like the learning rate's"""
    max_grad_norm: float = 0.0
    """clip the gradient to this global norm; 0 for no clipping"""
    adam_eps: float = 1e-8
    """Adam's epsilon"""
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
    rnd_coef: float = 0.0
    """coefficient of RND's bonus for new frames, added to rewards that are shaped and normalised already; 0 for none"""
    rnd_normalize: bool = False
    """divide the bonus by the running standard deviation of its return and clip it to +-10; else clip it to [0, 2]"""
    rnd_episodic: bool = True
    """the bonus's return ends with the episode; else it goes on, and has a value head of its own"""

    # The run
    seed: int = 1
    """of everything: the same seed gives the same metrics"""
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
    "total_timesteps": (1, 2**31 - 2**24), "num_envs": (1, 65536), "num_steps": (1, 65536),
    "num_minibatches": (1, None), "update_epochs": (1, 1000), "gae_lambda": (0, 1), "clip_coef": (0, None),
    "kl_coef": (0, 1000), "kl_target": (1e-8, None), "target_kl": (0, None), "vf_coef": (0, None),
    "vf_clip": (0, None), "max_grad_norm": (0, None), "adam_eps": (1e-30, None), "l2": (0, None),
    "augment_prob": (0, 1), "drac_coef": (0, None), "rnd_coef": (0, None),
    "seed": (0, envs.MAX_SEED), "checkpoint_every": (1, None), "keep_checkpoints": (1, None),
    "eval_every": (0, None), "eval_episodes": (0, 10**6),
}  # fmt: skip
# What a run cannot change when it is resumed: its games have been played, its coefficient has adapted.
FIXED = ("env_id", "distribution_mode", "num_levels", "start_level", "seed", "kl_coef")


def check_args(args: Args) -> None:
    """Raises UsageError, one sentence, if a flag's value makes no sense."""
    runs.check_limits(args, LIMITS)
    envs.check_flags(args)
    networks.check_flags(args)
    augment.check_flags(args)
    runs.check_needs(args, args.rnd_coef, "--rnd-coef", ("rnd_normalize", "rnd_episodic"))
    batch = args.num_envs * args.num_steps
    if args.core == "none":
        what, parts = f"the batch, num_envs x num_steps = {batch}", batch
    else:
        what, parts = f"the number of games, {args.num_envs} (a core learns from whole rollouts)", args.num_envs
    check(parts % args.num_minibatches == 0, f"--num-minibatches {args.num_minibatches}: must divide {what}")
    check(batch <= 2**24, f"--num-envs {args.num_envs}: num_envs x num_steps = {batch} must be at most {2**24}")
    runs.check_schedule("--learning-rate", args.learning_rate, 0, None)
    runs.check_schedule("--ent-coef", args.ent_coef, 0, None)
    runs.check_schedule("--gamma", args.gamma, 0, 1)


# NETWORK


class Agent(nn.Module):
    """Policy and value heads on an encoder, with a recurrent core between them."""

    encoder: nn.Module
    core: networks.Recurrent
    dropout: float
    num_values: int

    def setup(self):
        # A small first policy layer makes the first policy nearly uniform.
        self.policy = nn.Dense(envs.NUM_ACTIONS, kernel_init=nn.initializers.orthogonal(0.01))
        self.value = nn.Dense(self.num_values, kernel_init=nn.initializers.orthogonal(1.0))

    def encode(self, frames: jax.Array, keys: jax.Array | None = None) -> jax.Array:
        """Frames uint8 [B, 64, 64, C] and keys for dropout [B, 2] -> features float32 [B, hidden]."""
        return networks.dropout(self.encoder(frames), keys, self.dropout)

    def decode(self, x: jax.Array, first: jax.Array, core: networks.Core):
        """Features [B, S, hidden] of S steps, whether each is its episode's first [B, S], and the core before them
        -> logits float32 [B, S, 15], values float32 [B, S, V] and the core after them."""
        x, core = self.core(x, first, core)
        return self.policy(x), self.value(x), core

    def __call__(self, frames: jax.Array, first: jax.Array, core: networks.Core):
        """All of it, for frames [B, 64, 64, C] of one step."""
        return self.decode(self.encode(frames)[:, None], first[:, None], core)


def make_agent(args: Args) -> Agent:
    core = networks.Recurrent(args.core, args.hidden)
    return Agent(networks.make_encoder(args), core, args.dropout, num_values=1 if args.rnd_episodic else 2)


def look(agent: Agent, params: dict, frames: jax.Array, age: jax.Array, core: networks.Core):
    """Logits [N, 15], values [N, V] and the next core for stacked frames [N, 64, 64, C] of one step."""
    features = compute.apply(partial(agent.apply, method="encode"), params, frames)
    logits, values, core = agent.apply(params, features[:, None], age[:, None] == 0, core, method="decode")
    return logits[:, 0], values[:, 0], core


# RANDOM NETWORK DISTILLATION (Burda et al. 2018, section 2.2)


def rnd_network(args: Args, hidden: int) -> nn.Module:
    """Small, as the competition entry's: the target has no dense layer before its last, the predictor one."""
    spec = networks.Spec(width=1, hidden=hidden, dtype=args.dtype)
    return nn.Sequential([networks.make_encoder(spec), nn.Dense(256)])


def novelty(args: Args, params: dict, frames: jax.Array) -> jax.Array:
    """How badly the predictor knows the target's features of stacked frames [B, 64, 64, C]: mean squares [B]."""
    target = rnd_network(args, 0).apply({"params": jax.lax.stop_gradient(params["target"])}, frames)
    return ((rnd_network(args, 256).apply({"params": params["predictor"]}, frames) - target) ** 2).mean(axis=-1)


# TRAINING STATE


class TrainState(NamedTuple):
    """All that a resume needs, besides the games."""

    params: dict
    opt_state: optax.OptState
    key: jax.Array
    global_step: jax.Array  # int32 []: transitions learnt from
    kl_coef: jax.Array  # float32 []
    reward_filter: shaping.ReturnFilter
    bonus_filter: shaping.ReturnFilter
    core: networks.Core
    history: jax.Array  # uint8 [H, N, 64, 64, 3]: the frames before the newest
    last_action: jax.Array  # int32 [N]: what the games played last


def make_optimizer(args: Args) -> optax.GradientTransformation:
    """The direction of a step; `update` multiplies it by the scheduled learning rate."""
    clip = optax.clip_by_global_norm(args.max_grad_norm) if args.max_grad_norm else optax.identity()
    return optax.chain(clip, optax.scale_by_adam(eps=args.adam_eps))


@partial(jax.jit, static_argnums=(0, 1))
def initial_state(args: Args, agent: Agent) -> TrainState:
    key, init_key = jax.random.split(jax.random.PRNGKey(args.seed))
    channels = 3 * len(envs.stack_offsets(args.frame_stack, args.gap_stack))
    frames = jnp.zeros((1, 64, 64, channels), jnp.uint8)
    params = agent.init(init_key, frames, jnp.ones(1, bool), networks.initial_core(args.core, args.hidden, 1))
    if args.rnd_coef:
        for i, (name, hidden) in enumerate({"target": 0, "predictor": 256}.items()):
            params[name] = rnd_network(args, hidden).init(jax.random.fold_in(init_key, i), frames)["params"]
    return TrainState(
        params=params,
        opt_state=make_optimizer(args).init(params),
        key=key,
        global_step=jnp.int32(0),
        kl_coef=jnp.float32(args.kl_coef),
        reward_filter=shaping.new_filter(args.num_envs),
        bonus_filter=shaping.new_filter(args.num_envs),
        core=networks.initial_core(args.core, args.hidden, args.num_envs),
        history=jnp.zeros((envs.history_length(args), args.num_envs, *envs.FRAME_SHAPE), jnp.uint8),
        last_action=jnp.zeros(args.num_envs, jnp.int32),
    )


# ROLLOUT


class Rollout(NamedTuple):
    """What stays on the device while T steps are played; H rows of older frames come first."""

    frames: jax.Array  # uint8 [H + T + 1, N, 64, 64, 3]: row H + t is what step t acts on
    actions: jax.Array  # int32 [T, N]
    logits: jax.Array  # float32 [T, N, 15]
    values: jax.Array  # float32 [T, N, V]: V = 2 where the bonus has a value of its own
    last_action: jax.Array  # int32 [N]
    core: networks.Core
    key: jax.Array
    t: jax.Array  # int32 []


@partial(jax.jit, static_argnums=(0, 1))
def begin_rollout(args: Args, agent: Agent, state: TrainState) -> Rollout:
    rows, shape = envs.history_length(args) + args.num_steps + 1, (args.num_steps, args.num_envs)
    frames = jnp.zeros((rows, args.num_envs, *envs.FRAME_SHAPE), jnp.uint8)
    return Rollout(
        frames=frames.at[: envs.history_length(args)].set(state.history),
        actions=jnp.zeros(shape, jnp.int32),
        logits=jnp.zeros((*shape, envs.NUM_ACTIONS)),
        values=jnp.zeros((*shape, agent.num_values)),
        last_action=state.last_action,
        core=state.core,
        key=jax.random.split(state.key, 3)[0],
        t=jnp.int32(0),
    )


def stack(args: Args, frames: jax.Array, age: jax.Array, time: jax.Array, env: jax.Array) -> jax.Array:
    return envs.stack_frames(frames, age, time, env, envs.stack_offsets(args.frame_stack, args.gap_stack))


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def act(args: Args, agent: Agent, params: dict, rollout: Rollout, obs: jax.Array, age: jax.Array):
    """Chooses actions for obs uint8 [N, 3, 64, 64], age int32 [N]; returns the rollout and actions int32 [N]."""
    t, row = rollout.t, envs.history_length(args) + rollout.t
    frames = envs.put_frames(rollout.frames, row, obs)
    stacked = stack(args, frames, age, row, jnp.arange(args.num_envs))
    logits, values, core = look(agent, params, stacked, age, rollout.core)
    choose_key, stick_key = jax.random.split(jax.random.fold_in(rollout.key, t))
    actions = jax.random.categorical(choose_key, logits)
    stick = jax.random.bernoulli(stick_key, args.sticky_actions, actions.shape) & (age > 0)
    played = jnp.where(stick, rollout.last_action, actions)
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
def end_rollout(args: Args, rollout: Rollout, obs: jax.Array) -> Rollout:
    """Adds the frames uint8 [N, 3, 64, 64] after the last step."""
    return rollout._replace(frames=envs.put_frames(rollout.frames, envs.history_length(args) + args.num_steps, obs))


def collect(args: Args, agent: Agent, state: TrainState, games: envs.Games, watch: runs.Stopwatch):
    """Plays num_steps steps of each game; returns Rollout and envs.Steps."""
    rollout = begin_rollout(args, agent, state)

    def choose_actions(obs, age):
        nonlocal rollout
        rollout, actions = act(args, agent, state.params, rollout, obs, age)
        return actions

    steps = games.play(choose_actions, args.num_steps, watch)
    return end_rollout(args, rollout, games.obs), steps


# ALGORITHM


def gae(rewards, values, terminated, truncated, gamma, gae_lambda) -> jax.Array:
    """Generalised advantage estimates of one sequence (Schulman et al. 2016, equation 16).

    Args:
      rewards, terminated, truncated: [T], of the transition from step t to t + 1.
      values: [T + 1]. At a truncation the last frame's value stands for the rest of the episode.
      gamma, gae_lambda: [T], or [] if they are the same at each step.

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

    return jax.lax.scan(backward, jnp.float32(0), (deltas, decay), reverse=True)[1]


class Batch(NamedTuple):
    """Transitions to learn from: over a rollout [T, N]; in a minibatch B sequences of S steps, [B, S] (S = 1 without a
    recurrent core)."""

    actions: jax.Array
    logits: jax.Array  # [..., 15], of the policy that acted
    values: jax.Array  # [..., V]
    advantages: jax.Array
    returns: jax.Array  # [..., V]
    weight: jax.Array  # 0 for what is no transition; sums to 1 over a minibatch


class Inputs(NamedTuple):
    """What the networks see of a minibatch."""

    frames: jax.Array  # uint8 [B, S, 64, 64, C]
    next_frames: jax.Array | None  # the same of the next step, for the bonus
    first: jax.Array  # bool [B, S]: whether a step is its episode's first
    core: networks.Core  # before the first step, [B, hidden]
    keys: jax.Array | None  # uint32 [B, S, 2], for augmentation and dropout


def loss(args: Args, agent: Agent, kl_coef, ent_coef, params: dict, data: tuple[Inputs, Batch]):
    """PPO's loss (Schulman et al. 2017, equations 7 to 9), with DrAC's regulariser and RND's prediction error if asked.

    Returns the loss float32 [] and its parts: sums over the batch, by weight.
    """
    inputs, batch = data
    flat = lambda x: x.reshape(-1, *x.shape[2:])  # noqa: E731
    one, other = (None, None) if inputs.keys is None else jax.vmap(jax.random.split, out_axes=1)(flat(inputs.keys))

    def forward(frames):
        encode = lambda x: agent.apply(params, *x, method="encode")  # noqa: E731
        features = compute.in_chunks(encode, (frames, other)).reshape(*batch.actions.shape, -1)
        return agent.apply(params, features, inputs.first, inputs.core, method="decode")[:2]

    frames = flat(inputs.frames)
    if args.augment:
        augmented = augment.augment(augment.parse(args.augment), args.augment_prob, one, frames)
    logits, values = forward(augmented if args.augment and args.augment_mode == "rad" else frames)
    chex.assert_equal_shape([logits, batch.logits])
    chex.assert_equal_shape([values, batch.values, batch.returns])
    chex.assert_equal_shape([values[..., 0], batch.actions, batch.advantages, batch.weight])
    log_probs, old_log_probs = jax.nn.log_softmax(logits), jax.nn.log_softmax(batch.logits)
    log_ratio = jnp.take_along_axis(log_probs - old_log_probs, batch.actions[..., None], axis=-1)[..., 0]
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -jnp.minimum(ratio * batch.advantages, clipped * batch.advantages)

    value_loss = (values - batch.returns) ** 2
    if args.vf_clip:
        near = batch.values + jnp.clip(values - batch.values, -args.vf_clip, args.vf_clip)
        value_loss = jnp.maximum(value_loss, (near - batch.returns) ** 2)

    parts = {
        "policy_loss": policy_loss,
        "value_loss": 0.5 * value_loss.sum(axis=-1),
        "entropy": -(jnp.exp(log_probs) * log_probs).sum(axis=-1),
        "approx_kl": (jnp.exp(old_log_probs) * (old_log_probs - log_probs)).sum(axis=-1),
        "clipfrac": (jnp.abs(ratio - 1) > args.clip_coef).astype(jnp.float32),
    }
    if args.augment and args.augment_mode == "drac":
        parts["drac_loss"] = augment.drac_loss(logits, values, *forward(augmented))
    if args.rnd_coef:
        error = compute.in_chunks(partial(novelty, args, params), flat(inputs.next_frames))
        parts["rnd_loss"] = error.reshape(batch.weight.shape)
    parts = {name: (batch.weight * part).sum() for name, part in parts.items()}
    total = parts["policy_loss"] + args.vf_coef * parts["value_loss"] - ent_coef * parts["entropy"]
    if args.kl_coef:
        total += kl_coef * parts["approx_kl"]
    total += args.drac_coef * parts.get("drac_loss", 0) + parts.get("rnd_loss", 0)
    return total, parts | {"loss": total}


def adapt_kl_coef(kl_coef: jax.Array, kl: jax.Array, target: float) -> jax.Array:
    """Schulman et al. 2017, section 4: halves or doubles the coefficient where KL is off target by 1.5 times.

    It stays within 1e-6 and 1e6, so that it can always come back.
    """
    factor = jnp.where(kl < target / 1.5, 0.5, jnp.where(kl > target * 1.5, 2.0, 1.0))
    return jnp.clip(kl_coef * factor, 1e-6, 1e6)


def bonuses(args: Args, state: TrainState, rollout: Rollout, steps: envs.Steps, gamma: jax.Array):
    """RND's bonus of each transition, for the frame it leads to: the filter and float32 [T, N]."""

    def after(t):
        stacked = stack(
            args, rollout.frames, steps.age[t + 1], envs.history_length(args) + t + 1, jnp.arange(args.num_envs)
        )
        return compute.apply(partial(novelty, args), state.params, stacked)

    bonus = jax.lax.map(after, jnp.arange(args.num_steps)) * ~steps.done
    if not args.rnd_normalize:
        return state.bonus_filter, jnp.clip(bonus, 0, 2)
    return shaping.normalize(state.bonus_filter, bonus, steps.ended & args.rnd_episodic, ~steps.done, gamma)


def prepare(args: Args, agent: Agent, state: TrainState, rollout: Rollout, steps: envs.Steps, gamma: jax.Array):
    """Rewards and advantages: returns a Batch [T, N], the two filters and the mean bonus."""
    mask, (terminated, truncated) = ~steps.done, (jnp.asarray(steps.terminated), jnp.asarray(steps.truncated))
    reward_filter, reward = shaping.prepare_rewards(args, state.reward_filter, steps, gamma)
    bonus_filter, bonus = bonuses(args, state, rollout, steps, gamma) if args.rnd_coef else (state.bonus_filter, 0.0)
    last_row = envs.history_length(args) + args.num_steps
    last_stack = stack(args, rollout.frames, steps.age[-1], last_row, jnp.arange(args.num_envs))
    last_value = look(agent, state.params, last_stack, steps.age[-1], rollout.core)[1]
    values = jnp.concatenate([rollout.values, last_value[None]])
    shared = agent.num_values == 1
    advantages = jax.vmap(gae, (1, 1, 1, 1, None, None), 1)(
        reward + args.rnd_coef * bonus if shared else reward, values[..., 0], terminated, truncated, gamma,
        args.gae_lambda,
    )[..., None]  # fmt: skip
    if not shared:  # what the bonus brings goes on after an episode's end, over EnvPool's junk step as if it were not
        never, through = jnp.zeros_like(mask), jnp.where(mask, values[:-1, :, 1], values[1:, :, 1])
        intrinsic = jax.vmap(gae, 1, 1)(
            args.rnd_coef * bonus, jnp.concatenate([through, values[-1:, :, 1]]), never, never,
            jnp.where(mask, gamma, 1), jnp.where(mask, args.gae_lambda, 1),
        )  # fmt: skip
        advantages = jnp.concatenate([advantages, intrinsic[..., None]], axis=-1)
    total = advantages.sum(axis=-1)
    mean, var = shaping.masked_moments(total, mask)
    batch = Batch(
        actions=rollout.actions,
        logits=rollout.logits,
        values=rollout.values,
        advantages=(total - mean) / jnp.sqrt(var + 1e-8),
        returns=advantages + rollout.values,
        weight=mask.astype(jnp.float32),
    )
    return batch, (reward_filter, bonus_filter), shaping.masked_moments(bonus * mask, mask)[0]


def optimize(args: Args, agent: Agent, state: TrainState, frames, age, batch: Batch, learning_rate, ent_coef, key):
    """Epochs of minibatches; returns parameters, Adam's state, the last epoch's mean metrics and the epochs done."""
    tx, first_row, recurrent = make_optimizer(args), envs.history_length(args), args.core != "none"

    def minibatch(learner, key, index):
        params, opt_state = learner
        if recurrent:  # whole rollouts of some games
            time, env = jnp.arange(args.num_steps)[None], index[:, None]
        else:
            time, env = index[:, None] // args.num_envs, index[:, None] % args.num_envs
        part = jax.tree.map(lambda x: x[time, env], batch)
        part = part._replace(weight=part.weight / jnp.maximum(part.weight.sum(), 1))
        keys = jax.vmap(jax.vmap(partial(jax.random.fold_in, key)))(time * args.num_envs + env)
        inputs = Inputs(
            frames=stack(args, frames, age[time, env], first_row + time, env),
            next_frames=stack(args, frames, age[time + 1, env], first_row + time + 1, env) if args.rnd_coef else None,
            first=age[time, env] == 0,
            core=jax.tree.map(lambda x: x[index], state.core),
            keys=keys if args.augment or args.dropout else None,
        )
        objective = partial(loss, args, agent, state.kl_coef, ent_coef)
        few = 1 if recurrent else compute.CHUNK
        (_, parts), grads = compute.value_and_grad(objective, params, (inputs, part), few)
        if args.l2:  # the gradient of l2 x the squared norm of each convolution's kernel
            decay = lambda g, w: g + 2 * args.l2 * w if w.ndim == 4 else g  # noqa: E731
            grads = grads | {"params": jax.tree.map(decay, grads["params"], params["params"])}
        direction, opt_state = tx.update(grads, opt_state)
        params = optax.apply_updates(params, jax.tree.map(lambda d: -learning_rate * d, direction))
        return (params, opt_state), parts | {"grad_norm": optax.tree.norm(grads)}

    def epoch(carry, key):
        def run():
            shuffle_key, sample_key = jax.random.split(key)
            order = jax.random.permutation(shuffle_key, count).reshape(args.num_minibatches, -1)
            learner, parts = jax.lax.scan(lambda learner, index: minibatch(learner, sample_key, index), carry[0], order)
            return learner, jax.tree.map(jnp.mean, parts)

        if not args.target_kl:
            return run(), True
        stop = carry[1]["approx_kl"] > args.target_kl
        return jax.lax.cond(stop, lambda: carry, run), ~stop

    count = args.num_envs if recurrent else batch.weight.size
    learner, some = (state.params, state.opt_state), jnp.zeros(count // args.num_minibatches, jnp.int32)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(minibatch, learner, key, some)[1])
    ((params, opt_state), parts), ran = jax.lax.scan(
        epoch, (learner, nothing), jax.random.split(key, args.update_epochs)
    )
    return params, opt_state, parts, ran.sum()


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def update(args: Args, agent: Agent, state: TrainState, rollout: Rollout, steps: envs.Steps) -> tuple[TrainState, dict]:
    """One PPO update: returns the next state and metrics, float32 []."""
    learning_rate, ent_coef, gamma = (
        runs.parse_schedule(text)(state.global_step) for text in (args.learning_rate, args.ent_coef, args.gamma)
    )
    _, key, shuffle_key = jax.random.split(state.key, 3)
    batch, (reward_filter, bonus_filter), bonus = prepare(args, agent, state, rollout, steps, gamma)
    params, opt_state, parts, epochs = optimize(
        args, agent, state, rollout.frames, steps.age, batch, learning_rate, ent_coef, shuffle_key
    )
    new_state = TrainState(
        params=params,
        opt_state=opt_state,
        key=key,
        global_step=state.global_step + (~steps.done).sum(),
        kl_coef=adapt_kl_coef(state.kl_coef, parts["approx_kl"], args.kl_target) if args.kl_coef else state.kl_coef,
        reward_filter=reward_filter,
        bonus_filter=bonus_filter,
        core=rollout.core,
        history=rollout.frames[args.num_steps : args.num_steps + envs.history_length(args)],
        last_action=rollout.last_action,
    )
    _, unexplained = shaping.masked_moments((batch.returns - batch.values)[..., 0], batch.weight)
    _, spread = shaping.masked_moments(batch.returns[..., 0], batch.weight)
    metrics = {f"losses/{name}": value for name, value in parts.items()} | {
        "losses/explained_variance": 1 - unexplained / jnp.maximum(spread, 1e-8),
        "losses/kl_coef": state.kl_coef,
        "losses/param_norm": optax.tree.norm(params),  # infinite where the last step went wrong
        "losses/epochs": epochs,
        "charts/learning_rate": learning_rate,
        "charts/ent_coef": ent_coef,
        "charts/gamma": gamma,
        "charts/return_std": jnp.sqrt(reward_filter.var),
    }
    if args.rnd_coef:
        metrics |= {"charts/rnd_bonus": bonus}
    return new_state, metrics


# EVALUATION


@partial(jax.jit, static_argnums=0)
def choose(agent: Agent, params: dict, frames: jax.Array, age: jax.Array, key: jax.Array, core: networks.Core):
    """Draws actions int32 [N] from the policy for stacked frames uint8 [N, 64, 64, C]; its memory is the core."""
    logits, _, core = look(agent, params, frames, age, core)
    return jax.random.categorical(key, logits), core


def make_policy(args: Args, agent: Agent, params: dict) -> Callable:
    """A policy as `envs.play_episodes` calls it."""

    def policy(frames, age, key, core):
        core = networks.initial_core(args.core, args.hidden, len(frames)) if core is None else core
        return choose(agent, params, frames, age, key, core)

    return policy


def load_policy(args: Args, run_dir: str) -> tuple[int, Callable]:
    """For evaluate.py: the step of a run's newest checkpoint, and its policy."""
    state, _ = load_state(args, run_dir)
    return int(state.global_step), make_policy(args, make_agent(args), state.params)


# MAIN


def load_state(args: Args, run_dir: str) -> tuple[TrainState, dict]:
    """The newest checkpoint of a run: its training state, and the rest of what `main` saved."""
    _, saved = runs.load_checkpoint(run_dir)
    template = jax.eval_shape(partial(initial_state, args, make_agent(args)))
    return compute.replicate(runs.restore_tree(template, saved["state"], run_dir)), saved


def main(args: Args) -> runs.Run:
    """Trains; returns the run, finished or stopped by a signal (`run.stop`)."""
    check_args(args)
    agent, saved = make_agent(args), None
    if args.resume:
        runs.check_same(args, runs.saved_args(Args, args.resume, "--resume", SCRIPT), FIXED)
        state, saved = load_state(args, args.resume)

    with runs.Run(args, SCRIPT) as run:
        games = envs.Games(partial(envs.make_levels, args, args.num_envs), envs.derive_seed(args.seed, 0))
        episodes, watch = envs.EpisodeStatistics(args.num_envs), runs.Stopwatch()
        if saved:
            games.restore(saved["games"])
            episodes.restore(saved["episodes"])
            run.restore(saved["run"])
        else:
            state = compute.replicate(initial_state(args, agent))
        step = int(state.global_step)
        if step >= args.total_timesteps:
            run.say(f"the run is at step {step} already; to go on, give a larger --total-timesteps")

        def save():
            run.save(step, {"state": state, "games": games.save(), "episodes": episodes.save()})

        while not run.stop:
            finished = step >= args.total_timesteps
            if args.eval_episodes and run.evaluation_due(args.eval_every, step, finished):
                results = envs.evaluate_run(args, run, make_policy(args, agent, state.params), step)
                if results:
                    run.log_evaluation(step, results)
            if finished or run.stop:
                break
            rollout, steps = collect(args, agent, state, games, watch)
            with watch("update"):
                state, metrics = update(args, agent, state, rollout, steps)
                metrics = jax.device_get(metrics)
            before, step = step, int(state.global_step)
            run.check_finite(step, metrics)
            episodes.add(steps)
            run.log(step, metrics | episodes.metrics() | {"charts/SPS": run.steps_per_second(step)} | watch.fractions())
            if runs.crossed(args.checkpoint_every, before, step):
                # Games cannot be saved, so every run starts them anew here: a resumed run does the same.
                games.restart(envs.derive_seed(args.seed, step))
                episodes.restart()
                filters = {name: shaping.restart(getattr(state, name)) for name in ("reward_filter", "bonus_filter")}
                state = state._replace(**filters)
                save()
        save()
        games.close()
    return run


if __name__ == "__main__":
    runs.cli(Args, main)
