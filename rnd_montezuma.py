"""PPO with Random Network Distillation on Montezuma's Revenge: a bonus for frames that the agent has rarely seen.

Burda et al. 2018 (arXiv 1810.12894). The bonus (intrinsic reward) is a network's error in predicting the features that
a fixed random network gives the next frame. Defaults are the paper's, but a run and the random play before it are a
third as long, and time limits bootstrap where the paper terminates; the policy's network, minibatches and an episode's
last bonus differ too (docs/rnd.md). With --async the actors play while the learner learns, with parameters one update
old. Try:

    python rnd_montezuma.py --async --room-map
    python rnd_montezuma.py --channels 16,32,32 --hidden 256 --num-envs 32 --num-minibatches 8 --total-timesteps 8000000
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
from jax.sharding import Mesh

from common import agents, atari, devices, envs, networks, runs
from common.actors import ActorArgs, Fleet
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
)
from common.rewards import (
    RETURN_FILTER_SPECS,
    ReturnFilter,
    init_return_filter,
    masked_moments,
    merge_moments,
    normalize_rewards,
)

SCRIPT = Path(__file__).stem


@dataclass(frozen=True)
class Args(atari.GameArgs, ActorArgs, runs.RunArgs):
    FIXED: ClassVar = ("num_envs", "obs_norm_init_steps")  # --resume refuses to change them: sizes, first statistics

    total_timesteps: StepCount = 163_840_000
    """total number of environment steps, of four frames each"""
    num_envs: PositiveInt = 128
    """number of parallel environments, over all devices"""
    num_steps: PositiveInt = 128
    """steps per environment in a rollout; the batch is num_envs x num_steps"""
    async_: Annotated[bool, tyro.conf.arg(name="async")] = False
    """play the next rollout while the learner learns from this one, with parameters that are one update behind"""
    num_actors: Annotated[int, Interval(ge=1, le=256)] = 1
    """with --async: number of actor threads, each with an equal part of the environments"""
    vtrace: bool = False
    """with --async: V-trace (rho_bar = c_bar = 1) corrects both advantages for the lag; PPO's ratio then starts at 1"""
    obs_norm_init_steps: Annotated[int, Interval(ge=1, le=10**6)] = 2048
    """random steps per environment before training (not in total_timesteps), to initialise observation normalisation"""
    num_minibatches: PositiveInt = 4
    """number of minibatches per epoch"""
    update_epochs: Iterations = 4
    """epochs over each batch"""
    learning_rate: NonNegativeSchedule = "1e-4"
    """Adam's learning rate: a number, or "step:value,..." in environment steps, linear between"""
    predictor_lr_ratio: NonNegativeFloat = 1.0
    """predictor's learning rate, relative to the policy's; a lower one keeps bonuses longer"""
    gamma: UnitInterval = 0.999
    """discount of the game's reward"""
    int_gamma: UnitInterval = 0.99
    """discount of the bonus's return, which is non-episodic"""
    gae_lambda: UnitInterval = 0.95
    """lambda of generalised advantage estimation (GAE), for both advantages"""
    ext_coef: NonNegativeFloat = 2.0
    """weight of the extrinsic advantage (from the sign of the game's reward); 0 for curiosity only"""
    int_coef: NonNegativeSchedule = "1.0"
    """weight of the intrinsic advantage (from the bonus): a number, or a schedule like the learning rate's"""
    int_reward_clip: NonNegativeFloat = 0.0
    """upper bound of the normalised bonus; 0 for none"""
    norm_adv: bool = False
    """normalise the advantages, once per batch"""
    clip_coef: PositiveFloat = 0.1
    """clip the probability ratio to 1 +- this"""
    vf_coef: NonNegativeFloat = 1.0
    """coefficient of the value loss: half the mean squared error, summed over both heads"""
    ent_coef: NonNegativeFloat = 0.001
    """coefficient of the entropy bonus"""
    update_proportion: UnitInterval = 0.25
    """fraction of each minibatch, drawn at random, that the predictor learns from; the paper: 32 / num_envs"""
    max_grad_norm: NonNegativeFloat = 0.0
    """maximum global norm of the gradient of policy and predictor together; 0 for no clipping"""
    adam_eps: PositiveFloat = 1e-8
    """Adam's epsilon"""
    channels: str = "32,64,64"
    """channels of the three convolutions, in policy, target and predictor"""
    hidden: Size = 512
    """units of the policy's dense layers (its first: half as many) and core, and of RND's; also RND's features"""
    core: Literal["none", "lstm", "gru"] = "none"
    """recurrent core of the policy; a minibatch then holds all steps of some environments"""
    separate_value: bool = False
    """separate networks for policy and values: with sparse rewards a shared one can lose rank (Moalla et al. 2024)"""
    predictor_depth: Annotated[int, Interval(ge=0, le=16)] = 2
    """hidden dense layers of the predictor before its output layer; the target has none"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of the policy's convolutions and first dense layer; auto: bfloat16 on an accelerator, float32 on a CPU"""
    room_map: bool = False
    """draw the rooms visited so far, at each checkpoint: rooms.png in the run directory, and W&B or TensorBoard"""

    checkpoint_every: PositiveInt = 2_000_000
    wandb_project: str = "montezuma"

    def check(self) -> None:
        """Raises UsageError for inconsistent flags; the inherited groups check their own."""
        check(self.channels != "", "--channels '': give 3 numbers, such as 32,64,64")
        encoder_args(self).check()
        weights = self.ext_coef, *runs.parse_schedule(self.int_coef).values
        check(max(weights) > 0, "--ext-coef 0.0: nothing to learn from, as --int-coef is 0 too")
        no_core = "--separate-value: the values' own network has no recurrent core; leave --core at none"
        check(self.core == "none" or not self.separate_value, no_core)
        check(not self.distributed, f"--distributed: {SCRIPT}.py trains on one host, on as many devices as it has")
        runs.check_needs(self, self.async_, "--async", ("num_actors", "vtrace", "actor_devices"))
        runs.check_batch(self)

    def sharded_sizes(self) -> dict[str, int]:
        """The sizes that are divided among the learner devices, by their descriptions."""
        num_envs = self.num_envs // self.num_actors
        return super().sharded_sizes() | {"an actor's environments, --num-envs / --num-actors": num_envs}

    def check_training(self) -> None:
        """Raises UsageError if --update-proportion leaves the predictor no sample of a device's part of a minibatch."""
        sample = self.num_envs * self.num_steps // self.num_minibatches // devices.num_learner_devices(self)
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


Encoded = tuple[jax.Array, jax.Array | None]  # the policy's features, and the values if they have their own network


class Agent(nn.Module):
    """The Nature CNN, a recurrent core, and policy and value heads (values of the game's reward and of the bonus); with
    --separate-value the values come from `value_network`."""

    encoder: nn.Module
    core: networks.Recurrent
    hidden: int
    value_network: nn.Module | None

    def setup(self):
        dense = partial(nn.Dense, precision="highest")  # no TF32 on a GPU
        self.trunk = dense(self.hidden, kernel_init=networks.INITS["orthogonal"])
        self.actor = dense(self.hidden, kernel_init=networks.INITS["orthogonal"])
        self.critic = dense(self.hidden, kernel_init=networks.INITS["orthogonal"])
        # Small last layers make the first policy nearly uniform, and the first values nearly 0.
        self.policy = dense(atari.NUM_ACTIONS, kernel_init=nn.initializers.orthogonal(0.01))
        self.values = dense(2, kernel_init=nn.initializers.orthogonal(0.01))

    def encode(self, frames: jax.Array) -> Encoded:
        """Frames uint8 [B, 84, 84, C] -> features float32 [B, hidden] and a value network's values float32 [B, 2]."""
        values = self.value_network(frames) if self.value_network else None
        return nn.relu(self.trunk(self.encoder(frames))), values

    def decode(self, encoded: Encoded, is_first: jax.Array, hidden_state: networks.HiddenState):
        """Encoded frames [B, S, ...] of S steps, whether each is its episode's first [B, S], and the hidden state
        before them -> logits float32 [B, S, 18], values float32 [B, S, 2], and the hidden state after them."""
        x, values = encoded
        x, hidden_state = self.core(x, is_first, hidden_state)
        if values is None:
            values = self.values(nn.relu(self.critic(x)))
        return self.policy(nn.relu(self.actor(x))), values, hidden_state

    def __call__(self, frames: jax.Array, is_first: jax.Array, hidden_state: networks.HiddenState):
        """Frames [B, 84, 84, C] of one step, for `init` alone. Call each new head here, or it gets no parameters."""
        encoded = jax.tree.map(lambda x: x[:, None], self.encode(frames))
        return self.decode(encoded, is_first[:, None], hidden_state)


class ValueNetwork(nn.Module):
    """With --separate-value: both values, from layers like the policy's, none of them shared."""

    encoder: nn.Module
    hidden: int

    @nn.compact
    def __call__(self, frames: jax.Array) -> jax.Array:
        """Frames uint8 [B, 84, 84, C] -> values float32 [B, 2]."""
        dense = partial(nn.Dense, precision="highest")
        x = self.encoder(frames)
        for name in ("trunk", "critic"):
            x = nn.relu(dense(self.hidden, kernel_init=networks.INITS["orthogonal"], name=name)(x))
        return dense(2, kernel_init=nn.initializers.orthogonal(0.01), name="values")(x)


def make_agent(args: Args) -> Agent:
    """The network that these flags describe."""
    core, value_network = networks.Recurrent(args.core, args.hidden), None
    if args.separate_value:
        value_network = ValueNetwork(networks.make_encoder(encoder_args(args)), args.hidden)
    return Agent(networks.make_encoder(encoder_args(args)), core, args.hidden, value_network)


def policy_and_value(agent: Agent, params: dict, frames: jax.Array, is_first: jax.Array, hidden_state):
    """Logits [N, 18], values [N, 2] and the next hidden state for stacked frames [N, 84, 84, C] of one step."""
    encoded = devices.map_in_chunks(partial(agent.apply, params, method="encode"), frames)
    encoded = jax.tree.map(lambda x: x[:, None], encoded)
    logits, values, hidden_state = agent.apply(params, encoded, is_first[:, None], hidden_state, method="decode")
    return logits[:, 0], values[:, 0], hidden_state


class RNDNetwork(nn.Module):
    """RND's target or, with `depth` more dense layers, its predictor: normalised frames float32 [B, 84, 84, 1] ->
    features float32 [B, hidden] (appendix A.5; dense layers, leaky ReLU and gain sqrt(2) as in OpenAI's code)."""

    channels: str
    hidden: int
    depth: int  # dense layers before the last

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        # In full float32 on every device: rounding errors would leave a bonus that never falls.
        options = {"kernel_init": networks.INITS["orthogonal"], "precision": "highest"}
        for features, size, stride in zip(self.channels.split(","), (8, 4, 3), (4, 2, 1), strict=True):
            x = nn.leaky_relu(networks.conv(int(features), size, stride, "VALID", **options)(x), 0.2)
        x = x.reshape(len(x), -1)
        for _ in range(self.depth):
            x = nn.relu(nn.Dense(self.hidden, **options)(x))
        return nn.Dense(self.hidden, **options)(x)


def make_target(args: Args) -> RNDNetwork:
    return RNDNetwork(args.channels, args.hidden, 0)


def make_predictor(args: Args) -> RNDNetwork:
    return RNDNetwork(args.channels, args.hidden, args.predictor_depth)


# TRAINING STATE


class FrameStatistics(NamedTuple):
    """Running mean and variance of each pixel, float32."""

    count: jax.Array  # []: frames
    mean: jax.Array  # [84, 84, 1]
    var: jax.Array  # [84, 84, 1]


class TrainState(NamedTuple):
    """State of the learner."""

    params: dict  # of the agent and of RND's predictor
    target: dict  # parameters of RND's target, which stay as initialised
    opt_state: optax.OptState
    key: jax.Array
    global_step: jax.Array  # int32 []: transitions learnt from
    updates: jax.Array  # int32 []
    frame_stats: FrameStatistics
    bonus_filter: ReturnFilter


# For jax.shard_map: a field named here is by environment, a part on each device; all others are replicated.
STATE_SPECS = devices.partition_specs(TrainState, bonus_filter=RETURN_FILTER_SPECS)


class EnvState(NamedTuple):
    """What a rollout of N environments hands to the next one."""

    history: jax.Array  # uint8 [past, N, 84, 84, 1]: the frames before the newest
    env_ids: jax.Array  # int32 [N]
    hidden_state: networks.HiddenState


ENV_STATE_SPECS = EnvState(TIME_ENV_SHARDED, ENV_SHARDED, ENV_SHARDED)


def make_optimizer(args: Args) -> optax.GradientTransformation:
    """Adam without the learning rate: `optimize` multiplies its updates by -learning_rate, from a schedule."""
    return optax.chain(devices.clip_by_global_norm(args.max_grad_norm), optax.scale_by_adam(eps=args.adam_eps))


def init_state(args: Args, agent: Agent) -> TrainState:
    """The learner's state before its first update, from `args.seed`."""
    key, agent_key, predictor_key, target_key = jax.random.split(jax.random.PRNGKey(args.seed), 4)
    frames = jnp.zeros((1, *atari.FRAME_SHAPE[:2], args.frame_stack), jnp.uint8)
    frame = jnp.zeros((1, *atari.FRAME_SHAPE))
    hidden_state = networks.init_hidden_state(args.core, args.hidden, 1)
    params = {
        "agent": agent.init(agent_key, frames, jnp.ones(1, bool), hidden_state),
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
        bonus_filter=init_return_filter(args.num_envs),
    )


def init_env_state(args: Args, env_ids: jax.Array) -> EnvState:
    """The state before the first step of the environments env_ids int32 [N]."""
    return EnvState(
        history=envs.empty_history(len(env_ids), args.stack_offsets, atari.FRAME_SHAPE),
        env_ids=jnp.asarray(env_ids),
        hidden_state=networks.init_hidden_state(args.core, args.hidden, len(env_ids)),
    )


# ROLLOUT


class Rollout(NamedTuple):
    """T steps of N environments, collected on the device."""

    frames: envs.Frames  # of T + 1 steps
    actions: jax.Array  # int32 [T, N]
    logits: jax.Array  # float32 [T, N, 18]
    values: jax.Array  # float32 [T + 1, N, 2]
    initial_hidden_state: networks.HiddenState
    env_state: EnvState  # after the last step; `end_rollout` sets its history
    key: jax.Array
    t: jax.Array  # int32 []

    @property
    def next_frames(self) -> jax.Array:
        """The frame after each step, uint8 [T, N, 84, 84, 1]."""
        return self.frames.images[self.frames.past + 1 :]


ROLLOUT_SPECS = devices.partition_specs(
    Rollout,
    frames=TIME_ENV_SHARDED,
    actions=TIME_ENV_SHARDED,
    logits=TIME_ENV_SHARDED,
    values=TIME_ENV_SHARDED,
    initial_hidden_state=ENV_SHARDED,
    env_state=ENV_STATE_SPECS,
)


class Unroll(NamedTuple):
    """An actor's rollout, with what its environments returned."""

    rollout: Rollout
    timesteps: envs.Timesteps
    rooms: np.ndarray  # int64 [T, N]: the room of each step's frame
    pictures: dict[int, np.ndarray]  # a frame uint8 [84, 84] of each of these rooms


def begin_rollout(args: Args, env_state: EnvState, i: int) -> Rollout:
    """An actor's i-th rollout, before its first step."""
    shape = (args.num_steps, len(env_state.env_ids))
    return Rollout(
        frames=envs.Frames.after(env_state.history, args.num_steps + 1, args.stack_offsets),
        actions=jnp.zeros(shape, jnp.int32),
        logits=jnp.zeros((*shape, atari.NUM_ACTIONS)),
        values=jnp.zeros((args.num_steps + 1, len(env_state.env_ids), 2)),
        initial_hidden_state=env_state.hidden_state,
        env_state=env_state,
        key=jax.random.fold_in(jax.random.PRNGKey(envs.derive_seed(args.seed, 2)), i),
        t=jnp.int32(0),
    )


def observe(agent: Agent, params: dict, rollout: Rollout, obs: jax.Array, episode_step: jax.Array):
    """Writes obs uint8 [N, 1, 84, 84], episode_step int32 [N] and the network's values for them as step `rollout.t`;
    returns the rollout, logits [N, 18] and the next hidden state."""
    t = rollout.t
    frames = rollout.frames.write(t, obs, episode_step)
    logits, values, hidden_state = policy_and_value(
        agent, params, frames.stack(t), episode_step == 0, rollout.env_state.hidden_state
    )
    return rollout._replace(frames=frames, values=rollout.values.at[t].set(values)), logits, hidden_state


def act(args: Args, agent: Agent, params: dict, rollout: Rollout, obs: jax.Array, episode_step: jax.Array):
    """Chooses actions for obs uint8 [N, 1, 84, 84] and episode_step int32 [N]; returns the rollout and actions [N]."""
    t, env_state = rollout.t, rollout.env_state
    rollout, logits, hidden_state = observe(agent, params, rollout, obs, episode_step)
    # Keys depend on the environment, not on its device.
    keys = devices.fold_in_ids(jax.random.fold_in(rollout.key, t), env_state.env_ids)
    actions = jax.vmap(jax.random.categorical)(keys, logits)
    rollout = rollout._replace(
        actions=rollout.actions.at[t].set(actions),
        logits=rollout.logits.at[t].set(logits),
        env_state=env_state._replace(hidden_state=hidden_state),
        t=t + 1,
    )
    return rollout, actions


def end_rollout(args: Args, agent: Agent, params: dict, rollout: Rollout, obs: jax.Array, episode_step: jax.Array):
    """Adds the frames uint8 [N, 1, 84, 84] after the last step, their episode_step int32 [N] and their values."""
    rollout, _, _ = observe(agent, params, rollout, obs, episode_step)
    env_state = rollout.env_state._replace(history=rollout.frames.history(args.num_steps))
    return rollout._replace(env_state=env_state)


def make_collect(args: Args, agent: Agent, mesh: Mesh) -> Callable:
    """Returns collect(vec_env, params, env_state, *, i, watch, check_stop) -> Unroll, EnvState, which `actors.Fleet`
    calls in an actor's thread: it plays the i-th rollout, num_steps steps of each environment."""
    begin = partial(begin_rollout, args)
    acting_agent = networks.acting_agent(agent)
    step, end = partial(act, args, acting_agent), partial(end_rollout, args, acting_agent)
    if not args.async_:  # on all devices, each with its own environments; with --async on the parameters' device
        shard_map = partial(jax.shard_map, mesh=mesh, check_vma=False)
        in_specs = (REPLICATED, ROLLOUT_SPECS, ENV_SHARDED, ENV_SHARDED)
        begin = shard_map(begin, in_specs=(ENV_STATE_SPECS, REPLICATED), out_specs=ROLLOUT_SPECS)
        step = shard_map(step, in_specs=in_specs, out_specs=(ROLLOUT_SPECS, ENV_SHARDED))
        end = shard_map(end, in_specs=in_specs, out_specs=ROLLOUT_SPECS)
    begin, step, end = jax.jit(begin), jax.jit(step, donate_argnums=1), jax.jit(end, donate_argnums=1)

    def collect(vec_env: envs.ReplayableVecEnv, params: dict, env_state: EnvState, *, i: int, watch, check_stop):
        params = networks.acting_params(agent, params)  # cast to the encoder's dtype, once for all steps
        rollout, rooms, pictures = begin(env_state, i), [], {}

        def choose_actions(obs, episode_step):
            nonlocal rollout
            rollout, actions = step(params, rollout, obs, episode_step)
            rooms.append(atari.rooms_of(vec_env.info))
            for room, env in zip(*np.unique(rooms[-1], return_index=True), strict=True):
                pictures[int(room)] = obs[env, 0].copy()
            return actions

        timesteps = vec_env.play(choose_actions, args.num_steps, watch, check_stop)
        rollout = end(params, rollout, vec_env.obs, vec_env.episode_step)
        return Unroll(rollout, timesteps, np.stack(rooms), pictures), rollout.env_state

    return collect


# RANDOM NETWORK DISTILLATION (Burda et al. 2018, sections 2.2 and 2.4)


@jax.jit
def add_frames(stats: FrameStatistics, frames: jax.Array) -> FrameStatistics:
    """Adds the frames uint8 [B, 84, 84, 1] of all devices (outside `shard_map`: of the caller) to the statistics."""
    count = devices.psum(len(frames))
    mean = devices.psum(frames.sum(axis=0, dtype=jnp.float32)) / count
    var = devices.psum(((frames - mean) ** 2).sum(axis=0)) / count
    return FrameStatistics(*merge_moments(*stats, count, mean, var))


def normalize_frames(stats: FrameStatistics, frames: jax.Array) -> jax.Array:
    """Frames uint8 [B, 84, 84, 1] less the mean, divided by the standard deviation of each pixel, clipped to +-5."""
    return jnp.clip((frames - stats.mean) / jnp.sqrt(stats.var + 1e-4), -5, 5)  # a std of 0.01 grey levels at the least


def prediction_error(args: Args, stats: FrameStatistics, target: dict, predictor: dict, frames: jax.Array) -> jax.Array:
    """Mean squared difference [B] between the predictor's and the target's features of frames uint8 [B, 84, 84, 1]."""
    x = normalize_frames(stats, frames)
    target_features = jax.lax.stop_gradient(make_target(args).apply(target, x))
    return ((make_predictor(args).apply(predictor, x) - target_features) ** 2).mean(axis=-1)


def compute_bonuses(args: Args, state: TrainState, rollout: Rollout, mask: jax.Array):
    """The bonus: the prediction error on a step's next frame, divided by the running standard deviation of the errors'
    discounted return, this rollout's included (section 2.4).

    Returns the updated filter, and errors and bonuses float32 [T, N], 0 for junk steps: those in which EnvPool resets.
    """
    error_of = partial(prediction_error, args, state.frame_stats, state.target, state.params["predictor"])
    errors = mask * jax.lax.map(partial(devices.map_in_chunks, error_of), rollout.next_frames)
    # The bonus's return does not end with the episode; `compute_advantages` clips the bonus.
    ended = jnp.zeros_like(mask)
    bonus_filter, bonus = normalize_rewards(state.bonus_filter, errors, ended, mask, args.int_gamma, clip=jnp.inf)
    return bonus_filter, errors, bonus


def predictor_loss(args: Args, stats: FrameStatistics, target: dict, predictor: dict, frames: jax.Array):
    """The predictor's loss on frames uint8 [B, 84, 84, 1].

    Returns its terms per sample, float32 [B]: `devices.gradient` weights and averages them.
    """
    return {"loss": prediction_error(args, stats, target, predictor, frames)}


# PROXIMAL POLICY OPTIMISATION


def gae(rewards, values, *, discount, decay, ratio) -> jax.Array:
    """Generalised advantage estimates (Schulman et al. 2016, equation 16), with V-trace's truncated importance weights
    (Espeholt et al. 2018, equation 1, both bars 1) where another policy has acted.

    Args:
      rewards: float32 [T, ...], of the transition from step t to t + 1.
      values: float32 [T + 1, ...].
      discount: float32 [T, ...], of the next value: 0 where the episode terminates.
      decay: float32 [T, ...], of the next advantage: discount x lambda, 0 at an episode's end, 1 to skip a step.
      ratio: float32 [T, ...], learner's over actor's probability of the action; 1 on-policy.

    Returns advantages float32 [T, ...]; added to the values they are V-trace's targets (with its lambda, as in rlax).
    """
    chex.assert_equal_shape([rewards, values[1:], discount, decay, ratio])
    rho = jnp.minimum(1.0, ratio)
    deltas = rho * (rewards + discount * values[1:] - values[:-1])

    def backward(advantage, step):
        delta, decay = step
        advantage = delta + decay * advantage
        return advantage, advantage

    init, steps = jnp.zeros_like(deltas[0]), (deltas, rho * decay)
    return jax.lax.scan(backward, init, steps, reverse=True, unroll=devices.scan_unroll())[1]


def gae_per_head(args: Args, rewards, bonus, *, values, ratio, timesteps: envs.Timesteps) -> jax.Array:
    """Advantages float32 [T, N, 2]: of the game's rewards, which are episodic, and of the bonus, which is not.

    Args:
      rewards, bonus, ratio: float32 [T, N].
      values: float32 [T + 1, N, 2].
    """
    # At a truncation the last frame's value stands for the rest of the episode (the paper terminates).
    ext_advantages = gae(
        rewards,
        values[..., 0],
        discount=args.gamma * (1.0 - timesteps.terminated),
        decay=args.gamma * args.gae_lambda * (1.0 - timesteps.episode_end),
        ratio=ratio,
    )
    # EnvPool's reset, a junk step, is no transition of the bonus's stream either: with bonus 0, discount 1 and the next
    # frame's value, the step before it bootstraps from the next episode's first frame. If a rollout's last step ends an
    # episode, that frame is not known yet: the ended episode's last frame stands in for it.
    mask = ~timesteps.is_reset
    int_values = jnp.where(mask, values[:-1, :, 1], values[1:, :, 1])
    int_advantages = gae(
        bonus,
        jnp.concatenate([int_values, values[-1:, :, 1]]),
        discount=jnp.where(mask, args.int_gamma, 1.0),
        decay=jnp.where(mask, args.int_gamma * args.gae_lambda, 1.0),
        ratio=jnp.where(mask, ratio, 1.0),
    )
    return jnp.stack([ext_advantages, int_advantages], axis=-1)


class Batch(NamedTuple):
    """Transitions to learn from: over a rollout [T, N]; in a minibatch B sequences of S steps, [B, S] (S = 1 without a
    recurrent core)."""

    actions: jax.Array  # int32; all else is float32
    logits: jax.Array  # [..., 18], of the behaviour policy or, with --vtrace, of the one before the update
    advantages: jax.Array  # of both heads, weighted and added; with --norm-adv normalised
    returns: jax.Array  # [..., 2]


class Inputs(NamedTuple):
    """Network inputs of a minibatch."""

    frames: jax.Array  # uint8 [B, S, 84, 84, C]
    is_first: jax.Array  # bool [B, S]: whether a frame is its episode's first
    hidden_state: networks.HiddenState  # before the first step, [B, hidden]


def log_ratio(log_probs: jax.Array, old_log_probs: jax.Array, actions: jax.Array) -> jax.Array:
    """Log of the probability ratio, new over old, float32 [...], of actions int32 [...]; log_probs are those of all
    actions, float32 [..., 18]."""
    return jnp.take_along_axis(log_probs - old_log_probs, actions[..., None], axis=-1)[..., 0]


def ppo_loss_terms(args: Args, log_probs: jax.Array, values: jax.Array, batch: Batch) -> dict[str, jax.Array]:
    """Terms of PPO's loss (Schulman et al. 2017, equations 7 and 9) per sample, float32 [B, S].

    Args:
      log_probs: float32 [B, S, 18], of the current policy.
      values: float32 [B, S, 2].
      batch: [B, S].
    """
    chex.assert_equal_shape([log_probs, batch.logits])
    chex.assert_equal_shape([values, batch.returns])
    chex.assert_equal_shape([values[..., 0], batch.actions, batch.advantages])
    old_log_probs = jax.nn.log_softmax(batch.logits)
    ratio = jnp.exp(log_ratio(log_probs, old_log_probs, batch.actions))
    ratio_clipped = jnp.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    return {
        "policy_loss": -jnp.minimum(ratio * batch.advantages, ratio_clipped * batch.advantages),
        "value_loss": 0.5 * ((values - batch.returns) ** 2).sum(axis=-1),
        "entropy": -(jnp.exp(log_probs) * log_probs).sum(axis=-1),
        "approx_kl": (jnp.exp(old_log_probs) * (old_log_probs - log_probs)).sum(axis=-1),  # exact; named as in CleanRL
        "clipfrac": (jnp.abs(ratio - 1) > args.clip_coef).astype(jnp.float32),
    }


def forward(agent: Agent, params: dict, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """The learner's log-probabilities float32 [B, S, 18] and values [B, S, 2]."""
    frames = inputs.frames.reshape(-1, *inputs.frames.shape[2:])
    encoded = devices.map_in_chunks(partial(agent.apply, params, method="encode"), frames)
    encoded = jax.tree.map(lambda x: x.reshape(*inputs.is_first.shape, -1), encoded)
    logits, values, _ = agent.apply(params, encoded, inputs.is_first, inputs.hidden_state, method="decode")
    return jax.nn.log_softmax(logits), values


def loss(args: Args, agent: Agent, params: dict, minibatch: tuple[Inputs, Batch]) -> dict[str, jax.Array]:
    """PPO's loss.

    Returns its terms per sample, float32 [B, S]; `devices.gradient` weights them (0 for junk steps), averages them over
    samples and devices and differentiates "loss"; all means are logged. A sample's terms may depend on that sample
    only: on a CPU `loss` is called on 8 frames or one sequence at a time. Batch statistics belong in
    `compute_advantages`.
    """
    inputs, batch = minibatch
    terms = ppo_loss_terms(args, *forward(agent, params, inputs), batch)
    total = terms["policy_loss"] + args.vf_coef * terms["value_loss"] - args.ent_coef * terms["entropy"]
    return terms | {"loss": total}


def recompute_policy_and_value(args: Args, agent: Agent, params: dict, rollout: Rollout) -> tuple[jax.Array, jax.Array]:
    """These parameters' logits float32 [T, N, 18] and values float32 [T + 1, N, 2] on a rollout's frames."""

    def step(hidden_state, t):
        stacked, is_first = rollout.frames.stack(t), rollout.frames.is_first[t]
        logits, values, hidden_state = policy_and_value(agent, params, stacked, is_first, hidden_state)
        return hidden_state, (logits, values)

    _, (logits, values) = jax.lax.scan(step, rollout.initial_hidden_state, jnp.arange(args.num_steps + 1))
    return logits[:-1], values


def compute_advantages(args: Args, agent: Agent, state: TrainState, rollout: Rollout, timesteps: envs.Timesteps):
    """Bonuses and both heads' GAE: returns the state with its filter updated, a Batch [T, N], the bonuses float32
    [T, N] and metrics float32 []."""
    mask = ~timesteps.is_reset

    def masked_mean(x):
        return masked_moments(x, mask)[0]

    logits, values, ratio, metrics = rollout.logits, rollout.values, jnp.ones(mask.shape), {}
    if args.vtrace:  # the learner's policy and values, one update newer, in place of the actors'
        logits, values = recompute_policy_and_value(args, agent, state.params["agent"], rollout)
        acting_log_probs = jax.nn.log_softmax(rollout.logits)
        ratio = jnp.exp(log_ratio(jax.nn.log_softmax(logits), acting_log_probs, rollout.actions))
        metrics = {"losses/rho": masked_mean(jnp.minimum(1.0, ratio)), "losses/rho_clipfrac": masked_mean(ratio > 1)}
    bonus_filter, errors, unclipped_bonus = compute_bonuses(args, state, rollout, mask)
    bonus = jnp.minimum(unclipped_bonus, args.int_reward_clip or jnp.inf)
    rewards = jnp.sign(timesteps.rewards)
    per_head = gae_per_head(args, rewards, bonus, values=values, ratio=ratio, timesteps=timesteps)
    int_coef = runs.parse_schedule(args.int_coef)(state.global_step)
    advantages = args.ext_coef * per_head[..., 0] + int_coef * per_head[..., 1]
    if args.norm_adv:
        mean, var = masked_moments(advantages, mask)
        advantages = (advantages - mean) / jnp.sqrt(var + 1e-8)
    batch = Batch(actions=rollout.actions, logits=logits, advantages=advantages, returns=per_head + values[:-1])
    metrics |= {
        "charts/extrinsic_reward": masked_mean(rewards),
        "charts/intrinsic_reward": masked_mean(bonus),
        "charts/intrinsic_reward_max": devices.pmax(unclipped_bonus.max()),
        "charts/prediction_error": masked_mean(errors),
        "charts/intrinsic_return_std": jnp.sqrt(bonus_filter.var),
        "charts/int_coef": int_coef,
    }
    for i, name in enumerate(("explained_variance", "intrinsic_explained_variance")):
        _, var = masked_moments(per_head[..., i], mask)
        _, return_var = masked_moments(batch.returns[..., i], mask)
        metrics[f"losses/{name}"] = 1 - var / jnp.maximum(return_var, 1e-8)  # advantages are returns - values
    return state._replace(bonus_filter=bonus_filter), batch, bonus, metrics


def optimize(args: Args, agent: Agent, state: TrainState, rollout: Rollout, batch: Batch, *, mask, learning_rate, key):
    """Runs update_epochs epochs of minibatch steps; returns parameters, Adam's state and the last epoch's mean metrics.

    Args:
      batch, mask: [T, N]; the mask is False for junk steps.
      learning_rate: float32 [].
    """
    chex.assert_tree_shape_prefix(batch, mask.shape)  # else JAX would index wrong samples, without an error
    tx, recurrent = make_optimizer(args), args.core != "none"
    local_num_envs = len(rollout.env_state.env_ids)  # on this device
    agent_loss = partial(loss, args, agent)
    rnd_loss = partial(predictor_loss, args, state.frame_stats, state.target)

    def predictor_gradient(params, key, time, env):
        """The gradient and the loss, on a random part of the transitions at time, env, int32 [B, S] each."""
        samples = round(args.update_proportion * time.size)
        drawn = jax.random.choice(devices.fold_in_axis_index(key), time.size, (samples,), replace=False)
        time, env = time.reshape(-1)[drawn], env.reshape(-1)[drawn]
        grads, means, _ = devices.gradient(rnd_loss, params, rollout.next_frames[time, env], mask[time, env])
        return grads, means["loss"]

    def train_minibatch(carry, key, index):
        params, opt_state = carry
        if recurrent:  # all steps of some environments
            time, env = jnp.arange(args.num_steps)[None], index[:, None]
        else:  # single transitions, numbered t * N + n
            time, env = index[:, None] // local_num_envs, index[:, None] % local_num_envs
        inputs = Inputs(
            frames=rollout.frames.stack(time, env),
            is_first=rollout.frames.is_first[time, env],
            hidden_state=jax.tree.map(lambda x: x[index], rollout.initial_hidden_state),  # () without a core
        )
        minibatch = inputs, jax.tree.map(lambda x: x[time, env], batch)
        grads, means, _ = devices.gradient(agent_loss, params["agent"], minibatch, mask[time, env])
        rnd_grads, means["rnd_loss"] = predictor_gradient(params["predictor"], key, *jnp.broadcast_arrays(time, env))
        grads = {"agent": grads, "predictor": rnd_grads}
        direction, opt_state = tx.update(grads, opt_state, params)
        direction["predictor"] = jax.tree.map(lambda d: args.predictor_lr_ratio * d, direction["predictor"])
        params = optax.tree.add_scale(params, -learning_rate, direction)
        return (params, opt_state), means | {"grad_norm": devices.global_norm(grads)}

    def train_epoch(carry, key):
        shuffle_key, sample_key = jax.random.split(key)
        samples = local_num_envs if recurrent else mask.size  # on this device
        order = jax.random.permutation(devices.fold_in_axis_index(shuffle_key), samples)
        keys, order = jax.random.split(sample_key, args.num_minibatches), order.reshape(args.num_minibatches, -1)
        carry, means = jax.lax.scan(lambda carry, x: train_minibatch(carry, *x), carry, (keys, order))
        return carry, jax.tree.map(jnp.mean, means)

    keys = jax.random.split(key, args.update_epochs)
    (params, opt_state), means = jax.lax.scan(train_epoch, (state.params, state.opt_state), keys)
    return params, opt_state, jax.tree.map(lambda x: x[-1], means)


def dead_units(agent: Agent, params: dict, frames: jax.Array) -> jax.Array:
    """Fraction of the policy trunk's units that are 0 for all frames [N, 84, 84, C] of all devices, float32 []."""
    features, _ = devices.map_in_chunks(partial(agent.apply, params, method="encode"), frames)
    return (devices.pmax(features.max(axis=0)) == 0).mean()


def update(args: Args, agent: Agent, state: TrainState, rollout: Rollout, timesteps: envs.Timesteps):
    """One update (Burda et al. 2018, algorithm 1), on each device's part of the rollout: returns the next TrainState,
    metrics float32 [] and bonuses float32 [T, N]."""
    learning_rate = runs.parse_schedule(args.learning_rate)(state.global_step)
    key, shuffle_key = jax.random.split(state.key)
    mask = ~timesteps.is_reset
    state, batch, bonus, metrics = compute_advantages(args, agent, state, rollout, timesteps)
    # As in algorithm 1: the bonuses had the old statistics, the predictor's loss has the new ones.
    next_frames = rollout.next_frames.reshape(-1, *atari.FRAME_SHAPE)
    state = state._replace(frame_stats=add_frames(state.frame_stats, next_frames))
    params, opt_state, means = optimize(
        args, agent, state, rollout, batch, mask=mask, learning_rate=learning_rate, key=shuffle_key
    )
    state = state._replace(
        params=params,
        opt_state=opt_state,
        key=key,
        global_step=state.global_step + devices.psum(mask.sum()),
        updates=state.updates + 1,
    )
    metrics |= {f"losses/{name}": value for name, value in means.items()} | {
        "losses/param_norm": devices.global_norm(params),  # not finite if the last step diverged
        "losses/dead_units": dead_units(agent, params["agent"], rollout.frames.stack(args.num_steps)),
        "charts/learning_rate": learning_rate,
        "charts/updates": state.updates,
    }
    return state, metrics, bonus


def make_update(args: Args, agent: Agent, mesh: Mesh) -> Callable:
    """Returns the jitted update(state, rollout, timesteps) -> TrainState, metrics, bonuses, which donates the state."""
    return jax.jit(
        jax.shard_map(
            partial(update, args, agent),
            mesh=mesh,
            in_specs=(STATE_SPECS, ROLLOUT_SPECS, envs.TIMESTEP_SPECS),
            out_specs=(STATE_SPECS, REPLICATED, TIME_ENV_SHARDED),
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
    """{"params", "updates", "global_step"} of a run's newest checkpoint or an exported agent."""
    return agents.load(
        run_dir,
        partial(init_state, args, agent),
        lambda state: {"params": state.params["agent"], "updates": state.updates},
    )


def evaluate(
    args: Args, run_dir: str, *, episodes: int, seed: int, levels: str, random: bool, video: bool
) -> runs.Evaluation:
    """For evaluate.py: plays a run's trained policy, or random actions; the film is of the best episode."""
    agent, mesh = make_agent(args), devices.make_mesh(args)
    loaded = jax.device_put(load_params(args, agent, run_dir), devices.shardings(mesh, REPLICATED))
    policy = atari.random_policy if random else partial(make_policy(args, agent, mesh), loaded["params"])
    rows, summary, film = atari.evaluate(args, mesh, policy, episodes=episodes, seed=seed, record=video)
    name, updates = "random_episodes" if random else "episodes", int(loaded["updates"])
    return runs.Evaluation(
        int(loaded["global_step"]), name, f"update {updates:,}", rows, summary | {"update": updates}, film
    )


# MAIN


def observe_random_play(args: Args, run: runs.Run, stats: FrameStatistics) -> FrameStatistics:
    """Starts the frame statistics from random steps (section 2.4); returns them unchanged if a signal comes."""
    run.print(f"{args.obs_norm_init_steps * args.num_envs:,} random steps to initialise observation normalisation")
    env = atari.make_montezuma(args, args.num_envs, envs.derive_seed(args.seed, 3))
    rng = np.random.default_rng(envs.derive_seed(args.seed, 4))
    init_stats = stats = jax.device_get(stats)
    env.reset()
    for _ in range(args.obs_norm_init_steps):
        if run.stop:
            break
        obs = env.step(rng.integers(0, atari.NUM_ACTIONS, args.num_envs))[0]
        stats = add_frames(stats, obs.transpose(0, 2, 3, 1))
    env.close()
    return init_stats if run.stop else stats


def make_fleet(args: Args, agent: Agent, mesh: Mesh) -> Fleet:
    """The actors: with --async they play while the learner learns; otherwise a single one takes turns with the learner
    on the same devices. Actor i of n has the environments i, i + n, i + 2n, ..."""
    seed, env_ids = envs.derive_seed(args.seed, 1), devices.local_env_ids(args)
    parts = [env_ids[i :: args.num_actors] for i in range(args.num_actors)]
    if args.async_:
        param_shardings = env_state_shardings = devices.actor_devices(args)
    else:
        param_shardings = [devices.shardings(mesh, REPLICATED)]
        env_state_shardings = [devices.shardings(mesh, ENV_STATE_SPECS)]
    return Fleet(
        make_collect(args, agent, mesh),
        [envs.ReplayableVecEnv(partial(atari.make_montezuma, args), part, seed, args.restart_every) for part in parts],
        [init_env_state(args, part) for part in parts],
        param_shardings=param_shardings,
        env_state_shardings=env_state_shardings,
        max_lag=int(args.async_),
        deterministic=True,  # parameters exactly max_lag updates old
    )


def init_checkpoint(args: Args, agent: Agent) -> dict:
    """What a new run starts from; its checkpoints also hold the actors and the statistics."""
    return {"state": init_state(args, agent)}


def main(args: Args) -> runs.Run:
    """Trains; returns the run, finished or stopped by a signal (`run.stop`)."""
    runs.check_args(args, SCRIPT)
    args.check_training()
    agent, mesh = make_agent(args), devices.make_mesh(args)
    update = make_update(args, agent, mesh)
    _, join = envs.make_split_and_join(mesh, ROLLOUT_SPECS, args.num_actors)
    state_sharding, rollout_sharding, timestep_sharding = devices.shardings(
        mesh, (STATE_SPECS, ROLLOUT_SPECS, envs.TIMESTEP_SPECS)
    )

    with (
        runs.Run(args, SCRIPT, mesh, partial(init_checkpoint, args, agent)) as run,
        make_fleet(args, agent, mesh) as fleet,
    ):
        statistics, watch = atari.Statistics(args.num_envs), runs.Stopwatch()
        state = jax.device_put(run.checkpoint["state"], state_sharding)
        step = int(state.global_step)
        if run.resumed:
            statistics.restore(run.checkpoint["statistics"])
            fleet.restore(run.checkpoint["fleet"], state.params["agent"], run)
        if state.frame_stats.count == 0:  # a new run, or one that a signal stopped during its random play
            stats = observe_random_play(args, run, state.frame_stats)
            state = jax.device_put(state._replace(frame_stats=stats), state_sharding)  # else `update` compiles twice

        def save():
            run.save(step, {"state": state}, {"fleet": fleet.save(), "statistics": statistics.save()})
            if args.room_map:
                run.save_picture(step, "rooms", atari.draw_rooms(statistics.rooms.visits, statistics.rooms.pictures))

        if not run.finished(step):
            fleet.start(int(state.updates), state.params["agent"])
        while not run.finished(step):
            with watch("waiting"):
                actor_batches = fleet.get(run, save)
            if actor_batches is None:
                break
            rollouts, timesteps, rooms, pictures = zip(*(batch.unroll for batch in actor_batches), strict=True)
            i, timesteps = int(state.updates), envs.join_envs(timesteps, axis=-1)
            with watch("transfer"):
                rollout = join(jax.device_put(list(rollouts), [rollout_sharding] * args.num_actors))
                inputs = jax.block_until_ready((rollout, jax.device_put(timesteps, timestep_sharding)))
            with watch("update"):
                state, metrics, bonus = update(state, *inputs)
                metrics, bonus = jax.device_get((metrics, bonus))
            fleet.publish(i + 1, state.params["agent"])
            step = int(state.global_step)
            run.check_finite(step, metrics)
            pictures = {room: picture for part in pictures for room, picture in part.items()}
            statistics.add(timesteps, bonus, envs.join_envs(rooms, axis=1), pictures)
            metrics |= statistics.metrics() | fleet.metrics(i, actor_batches) | watch.fractions()
            run.log(step, metrics | {"charts/SPS": run.steps_per_second(step)})
            if run.checkpoint_due(step):
                save()
        save()
        run.print(f"rooms visited: {', '.join(map(str, statistics.rooms.visited())) or 'none yet'}")
        fleet.check()  # raises if an actor failed after its last batch
    return run


if __name__ == "__main__":
    runs.cli(Args, main)
