"""Hypernetwork PPO on DoorGym: continual learning of a sequence of tasks.

PPO (Schulman et al. 2017) with networks whose weights a hypernetwork generates from a task's embedding. A penalty on
changes to the weights generated for earlier tasks prevents forgetting (von Oswald et al. 2020, arXiv 1906.00695;
Schoepf et al. 2022).

For comparison, --method ppo learns each task from scratch and --method finetune continues with the last task's
networks. Tasks are those of `TASKS` in common/doors.py, or other names in doorgym, each at most once. The settings of
Schoepf et al. 2022 are in docs/hnppo.md. Try:

    python hnppo_doorgym.py --tasks 0,1
    python hnppo_doorgym.py --method ppo --task 2 --robot gripper
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from operator import itemgetter
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from annotated_types import Interval
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh

import doorgym
from common import agents, continual, devices, doors, envs, runs
from common.devices import REPLICATED, TIME_ENV_SHARDED
from common.doors import DECISIONS, MAX_TASKS, Rollout
from common.files import check
from common.flags import Iterations, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Size, UnitInterval
from common.rewards import RETURN_FILTER_SPECS, ReturnFilter, init_return_filter, masked_moments, normalize_rewards

SCRIPT = Path(__file__).stem
# Seeds of the evaluation doors. EVAL_SEED: of the matrix, and of evaluate.py, which adds its --seed. SELECT_SEED, above
# any such sum: of eval/success_rate, by which a task's best parameters are chosen.
EVAL_SEED, SELECT_SEED = 1000, 2**40
# Flags of --method hnppo alone.
HYPERNET_FLAGS = ("beta", "task_embedding_dim", "hyper_width", "chunked", "hyper_learning_rate", "critic")


@dataclass(frozen=True)
class Args(doors.DoorArgs, runs.RunArgs):
    # --resume refuses to change these; num_envs is the return filter's shape.
    FIXED: ClassVar = ("method", "critic", "keep_std", "num_envs")

    method: Literal["hnppo", "ppo", "finetune"] = "hnppo"
    """hnppo: hypernetwork; ppo: new policy and value networks for each task; finetune: the same ones for all tasks"""
    critic: Literal["hyper", "fresh"] = "hyper"
    """critic of --method hnppo; hyper: generated and remembered like the policy; fresh: a new network for each task"""
    keep_std: bool = False
    """as the paper: hnppo generates the actions' standard deviation, finetune keeps it; else each task starts at 1"""
    beta: NonNegativeFloat = 1.0
    """coefficient of the penalty on changes to the weights generated for earlier tasks"""
    task_embedding_dim: Annotated[int, Interval(ge=1, le=4096)] = 8
    """dimension of a task's embedding"""
    hyper_width: Size = 640
    """units of each of the hypernetwork's two hidden layers"""
    chunked: bool = False
    """generate 1000 weights at a time, with an embedding per chunk: a hypernetwork of about a million weights"""
    hidden: Size = 64
    """units of each hidden layer of the policy and value networks"""
    num_layers: Annotated[int, Interval(ge=1, le=16)] = 2
    """number of hidden layers of the policy and value networks"""
    task_timesteps: Annotated[int, Interval(ge=1, le=2**28)] = 4_000_000
    """maximum number of decisions (80 ms each) per task, rounded up to whole updates"""
    num_envs: Size = 64
    """number of parallel doors; a batch is one episode of 128 decisions of each"""
    num_minibatches: PositiveInt = 8
    """number of minibatches per epoch"""
    update_epochs: Iterations = 10
    """epochs over each batch"""
    learning_rate: NonNegativeFloat = 1e-3
    """Adam's learning rate for policy, critic and standard deviation where they are not generated"""
    hyper_learning_rate: NonNegativeFloat = 5e-5
    """Adam's learning rate for the hypernetwork and the task's embedding"""
    gamma: UnitInterval = 0.99
    """discount per decision"""
    gae_lambda: UnitInterval = 0.95
    """lambda of generalised advantage estimation (GAE)"""
    clip_coef: PositiveFloat = 0.2
    """clip the probability ratio to 1 +- this, and the change of a value to +- this"""
    vf_coef: NonNegativeFloat = 0.5
    """coefficient of the value loss, half the larger of the squared errors of the value and the clipped value"""
    ent_coef: NonNegativeFloat = 0.01
    """coefficient of the entropy bonus"""
    noise_color: Annotated[float, Interval(ge=0, le=2)] = 1.0
    """exponent of the exploration noise's power spectrum, 1 / f^exponent: 0 is white, 1 is pink"""
    max_grad_norm: NonNegativeFloat = 0.5
    """maximum global norm of PPO's gradient, without the penalty's; 0 for no clipping"""
    adam_eps: PositiveFloat = 1e-5
    """Adam's epsilon"""
    max_skipped: PositiveInt = 50
    """stop with an error after this many consecutive optimiser steps skipped for a gradient that is not finite"""
    stop_at_success: Annotated[float, Interval(ge=0, le=2)] = 0.95
    """end a task early after three consecutive evaluations with at least this success rate; above 1 for never"""
    num_devices: NonNegativeInt = 1  # small networks: a batch on one device takes less time than sums over several
    checkpoint_every: PositiveInt = 163_840
    """decisions between checkpoints"""
    keep_checkpoints: PositiveInt = 2
    wandb_project: str = "doorgym"

    @property
    def total_timesteps(self) -> int:
        """`task_timesteps` of all tasks together, for `runs.Run`."""
        return self.task_timesteps * len(doors.task_names(self))

    @property
    def has_ordinary_weights(self) -> bool:
        """Whether weights are learnt that the hypernetwork does not generate, at --learning-rate."""
        return self.method != "hnppo" or self.critic == "fresh" or not self.keep_std

    def check(self) -> None:
        """Raises UsageError for inconsistent flags; the inherited groups check their own."""
        runs.check_needs(self, self.method == "hnppo", "--method hnppo", HYPERNET_FLAGS)
        runs.check_needs(self, self.method != "ppo", "--method hnppo or finetune", ("keep_std",))
        runs.check_needs(self, self.has_ordinary_weights, "--critic fresh or --no-keep-std", ("learning_rate",))
        runs.check_needs(self, self.eval_every, "--eval-every", ("stop_at_success",))
        runs.check_needs(self, len(doors.task_names(self)) > 1, "a second task in --tasks", ("beta",))
        check(not self.distributed, f"--distributed: {SCRIPT}.py trains on one host")
        batch = DECISIONS * self.num_envs
        check(
            batch % self.num_minibatches == 0,
            f"--num-minibatches {self.num_minibatches}: must divide the batch, {DECISIONS} x num_envs = {batch}",
        )

    def sharded_sizes(self) -> dict[str, int]:
        """The sizes that are divided among the learner devices, by their descriptions."""
        size = DECISIONS * self.num_envs // self.num_minibatches
        return {"the doors, --num-envs": self.num_envs, "a minibatch's samples": size}


# NETWORKS

Dense = partial(nn.Dense, precision="highest")  # no TF32 on a GPU


class MLP(nn.Module):
    """Tanh layers, then a linear one: observations float32 [..., D] -> the mean of the policy's Gaussian or the value,
    float32 [..., outputs]."""

    outputs: int
    hidden: int
    layers: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.layers):
            x = nn.tanh(Dense(self.hidden, kernel_init=nn.initializers.orthogonal(2**0.5))(x))
        return Dense(self.outputs, kernel_init=nn.initializers.orthogonal(1.0))(x)


CHUNK, CHUNK_EMBEDDING_DIM = 1000, 5


def torch_dense(features: int, fan_in: int) -> nn.Dense:
    """A linear layer with PyTorch's default initialisation, as in Schoepf et al. 2022: weights and biases uniform
    within 1 / sqrt(fan_in)."""

    def init(key, shape, dtype=jnp.float32):
        return jax.random.uniform(key, shape, dtype, -1, 1) / np.sqrt(fan_in)

    return Dense(features, kernel_init=init, bias_init=init)


class HyperNetwork(nn.Module):
    """A task's embedding [..., E] -> the weights [..., size] of its networks, in one vector.

    One head of `size` units is the same as one head per tensor, as in Schoepf et al. 2022. Chunked, it generates 1000
    weights at a time, from the task's embedding and the chunk's (von Oswald et al. 2020, section 2.2).
    """

    size: int
    width: int
    chunked: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        out = self.size
        if self.chunked:
            chunks, out = -(-self.size // CHUNK), CHUNK
            chunk_embeddings = self.param("chunks", nn.initializers.normal(1.0), (chunks, CHUNK_EMBEDDING_DIM))
            shape = (*x.shape[:-1], chunks)
            x = jnp.broadcast_to(x[..., None, :], (*shape, x.shape[-1]))
            x = jnp.concatenate([x, jnp.broadcast_to(chunk_embeddings, (*shape, CHUNK_EMBEDDING_DIM))], axis=-1)
        for _ in range(2):
            x = nn.relu(torch_dense(self.width, x.shape[-1])(x))
        x = torch_dense(out, self.width)(x)
        return x.reshape(*x.shape[:-2], -1)[..., : self.size] if self.chunked else x


@dataclass(frozen=True)
class Agent:
    """The networks of a run.

    The trained parameters are a dict, the `learner`: "actor", "critic" and the actions' "log_std" [A]; with a
    hypernetwork "hyper" and the task's "embedding" replace those that it generates.
    """

    args: Args

    @cached_property
    def actor(self) -> MLP:
        return MLP(doorgym.vector.sizes(self.args.robot)[1], self.args.hidden, self.args.num_layers)

    @cached_property
    def critic(self) -> MLP:
        return MLP(1, self.args.hidden, self.args.num_layers)

    @cached_property
    def hyper(self) -> HyperNetwork:
        return HyperNetwork(self.size, self.args.hyper_width, self.args.chunked)

    def init_networks(self, key: jax.Array) -> dict:
        """Parameters of a policy and a value network, and log_std for a standard deviation of 1."""
        actor_key, critic_key = jax.random.split(key)
        obs = jnp.zeros(doorgym.vector.sizes(self.args.robot)[0])
        networks = {"actor": self.actor.init(actor_key, obs), "critic": self.critic.init(critic_key, obs)}
        return networks | {"log_std": jnp.zeros(self.actor.outputs)}

    def init(self, key: jax.Array) -> dict:
        """A new learner; its embedding is drawn when its task begins."""
        network_key, hyper_key = jax.random.split(key)
        learner = self.init_networks(network_key)
        if self.args.method != "hnppo":
            return learner
        embedding = jnp.zeros(self.args.task_embedding_dim)
        ordinary = {name: learner[name] for name in learner if name not in self.stored}
        return ordinary | {"hyper": self.hyper.init(hyper_key, embedding), "embedding": embedding}

    def networks(self, learner: dict) -> dict:
        """Parameters of the policy and the value network, and log_std."""
        if self.args.method != "hnppo":
            return learner
        ordinary = {name: learner[name] for name in learner if name not in ("hyper", "embedding")}
        return ordinary | self.unpack(self.hyper.apply(learner["hyper"], learner["embedding"]))

    @property
    def stored(self) -> tuple[str, ...]:
        """Names of the parameters that `end_task` stores: those that hnppo generates; else the policy's, which
        evaluate.py plays with ppo."""
        critic = self.args.method == "hnppo" and self.args.critic == "hyper"
        stored = {"actor": True, "critic": critic, "log_std": self.args.keep_std}
        return tuple(name for name in stored if stored[name])

    def pack(self, params: dict) -> jax.Array:
        """The stored parameters as one vector [size]."""
        return ravel_pytree({name: params[name] for name in self.stored})[0]

    def unpack(self, weights: jax.Array) -> dict:
        """The stored parameters from one vector [size]."""
        return self._layout[1](weights)

    @property
    def size(self) -> int:
        """The number of weights stored for a task."""
        return self._layout[0]

    @cached_property
    def _layout(self) -> tuple[int, Callable]:
        shapes = jax.eval_shape(self.init_networks, jax.random.PRNGKey(0))
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), {name: shapes[name] for name in self.stored})
        weights, unpack = ravel_pytree(zeros)
        return weights.size, unpack


def make_agent(args: Args) -> Agent:
    """The networks that these flags describe."""
    return Agent(args)


# TRAINING STATE


class Best(NamedTuple):
    """The task's evaluations so far: parameters and success rate of the best, and how many in a row were good."""

    learner: dict
    success: jax.Array  # float32 []; -1 before the first
    good_evals: jax.Array  # int32 []: latest ones in a row that reached stop_at_success; three end the task


class TrainState(NamedTuple):
    """State of the training. Arrays with a row per task of the sequence have MAX_TASKS rows."""

    learner: dict  # the trained parameters, see `Agent`
    opt_state: optax.OptState
    embeddings: jax.Array  # [MAX_TASKS, E], of the finished tasks; fixed
    targets: jax.Array  # [MAX_TASKS, size], of the finished tasks: the penalty's targets or, with ppo, their policies
    best: Best
    matrix: jax.Array  # float32 [MAX_TASKS, MAX_TASKS]: success rate on task j after task i; NaN where not measured
    key: jax.Array
    task: jax.Array  # int32 []: position in the task sequence; -1 before the first
    finished: jax.Array  # int32 []: number of finished tasks: `task` while one is learnt, task + 1 after it
    updates: jax.Array  # int32 []: in this task
    global_step: jax.Array  # int32 []: decisions learnt from
    skipped: jax.Array  # int32 []: optimiser steps skipped because their gradient was not finite
    skipped_in_a_row: jax.Array  # int32 []
    return_filter: ReturnFilter


STATE_SPECS = devices.partition_specs(TrainState, return_filter=RETURN_FILTER_SPECS)


def make_optimizer(args: Args) -> optax.GradientTransformation:
    """An Adam for each part of a learner, by its name."""
    hyper, ordinary = args.hyper_learning_rate, args.learning_rate
    rates = {"hyper": hyper, "embedding": hyper, "actor": ordinary, "critic": ordinary, "log_std": ordinary}
    adams = {name: optax.adam(rate, eps=args.adam_eps) for name, rate in rates.items()}
    return optax.partition(adams, lambda learner: {name: name for name in learner})


def task_start(args: Args, learner: dict) -> dict:
    """The fields of TrainState that are new in each task."""
    return {
        "learner": learner,
        "opt_state": make_optimizer(args).init(learner),
        "best": Best(learner, jnp.float32(-1), jnp.int32(0)),
        "updates": jnp.int32(0),
        "return_filter": init_return_filter(args.num_envs),
    }


def init_state(args: Args, agent: Agent) -> TrainState:
    """The state before the first task, from `args.seed`."""
    key, learner_key = jax.random.split(jax.random.PRNGKey(args.seed))
    return TrainState(
        embeddings=jnp.zeros((MAX_TASKS, args.task_embedding_dim)),
        targets=jnp.zeros((MAX_TASKS, agent.size)),
        matrix=jnp.full((MAX_TASKS, MAX_TASKS), jnp.nan, jnp.float32),
        key=key,
        task=jnp.int32(-1),
        finished=jnp.int32(0),
        global_step=jnp.int32(0),
        skipped=jnp.int32(0),
        skipped_in_a_row=jnp.int32(0),
        **task_start(args, agent.init(learner_key)),
    )


def begin_task(args: Args, agent: Agent, state: TrainState) -> TrainState:
    """Starts the next task: keeps the hypernetwork (hnppo) or the networks (finetune); initialises the other
    parameters, Adam and the return filter."""
    key, learner_key, embedding_key = jax.random.split(state.key, 3)
    # A standard deviation that has shrunk in one task would not let the next explore.
    finetuned = ("actor", "critic", "log_std") if args.keep_std else ("actor", "critic")
    kept = {"hnppo": ("hyper",), "ppo": (), "finetune": finetuned}[args.method]
    learner = agent.init(learner_key) | {name: state.learner[name] for name in kept}
    if args.method == "hnppo":
        learner["embedding"] = jax.random.normal(embedding_key, (args.task_embedding_dim,))
    return state._replace(key=key, task=state.task + 1, **task_start(args, learner))


def end_task(args: Args, agent: Agent, state: TrainState) -> TrainState:
    """Ends the task: makes its best parameters the current ones, and stores their weights as its targets. (Schoepf et
    al. 2022 and von Oswald et al. 2020, equation 2, recompute all targets before each task, so that they drift.)"""
    learner = state.best.learner
    targets = state.targets.at[state.task].set(agent.pack(agent.networks(learner)))
    state = state._replace(learner=learner, targets=targets, finished=state.finished + 1)
    if args.method == "hnppo":
        state = state._replace(embeddings=state.embeddings.at[state.task].set(learner["embedding"]))
    return state


# ROLLOUT


def policy_params(agent: Agent, state: TrainState, i: int) -> dict:
    """The policy's parameters for the i-th task: generated from the task's embedding or, if it is not finished, from
    the newest embedding; without a hypernetwork, the current policy's."""
    learner = state.learner
    if "embedding" in learner:
        learner = learner | {"embedding": jnp.where(i < state.finished, state.embeddings[i], learner["embedding"])}
    params = agent.networks(learner)
    return {name: params[name] for name in ("actor", "log_std")}


def act(agent: Agent, params: dict, obs: jax.Array, noise: jax.Array | None = None) -> jax.Array:
    """Actions float32 [N, A] for obs float32 [N, D]: the policy's mean, plus `noise` [N, A], in standard deviations."""
    mean = agent.actor.apply(params["actor"], obs)
    return mean if noise is None else mean + jnp.exp(params["log_std"]) * noise


def colored_noise(args: Args, action_size: int, key: jax.Array) -> jax.Array:
    """An episode's noise float32 [DECISIONS, N, A] of variance 1 and power 1 / f^noise_color at frequency f (Timmer &
    Koenig 1995): noise that is correlated in time moves a door further than white noise.

    Log-probabilities treat it as white noise (as in Hollenstein et al. 2024, arXiv 2312.11091).
    """
    frequencies = jnp.maximum(jnp.abs(jnp.fft.fftfreq(DECISIONS)), 1 / DECISIONS)
    scale = frequencies ** (-args.noise_color / 2)
    white = jax.random.normal(key, (DECISIONS, args.num_envs * action_size))
    colored = jnp.fft.ifft(scale[:, None] * jnp.fft.fft(white, axis=0), axis=0).real
    return (colored / jnp.sqrt((scale**2).mean())).reshape(DECISIONS, args.num_envs, action_size)


def collect(args: Args, jitted: "Jitted", env: doorgym.DoorVectorEnv, state: TrainState, watch: runs.Stopwatch):
    """Plays an episode of each door; returns Rollout and Outcomes."""
    seed = envs.derive_seed(args.seed, 1 + int(state.task), 1 + int(state.updates))
    params = jitted.policy_params(state, state.task)
    noise = jax.device_get(jitted.colored_noise(jax.random.PRNGKey(seed)))

    def policy(obs, t):
        with watch("inference"):
            return jax.device_get(jitted.act(params, obs, noise[t]))

    with watch("rollout"):
        return doors.play(env, policy, seed)


# ALGORITHM


def gae(rewards: jax.Array, values: jax.Array, *, gamma: float, gae_lambda: float) -> jax.Array:
    """Generalised advantage estimates float32 [T] of an episode truncated by its time limit (Schulman et al. 2016,
    equation 16), from rewards float32 [T] and values float32 [T + 1]."""
    chex.assert_rank([rewards, values], 1)
    chex.assert_equal_shape([rewards, values[1:]])
    deltas = rewards + gamma * values[1:] - values[:-1]

    def backward(advantage, delta):
        advantage = delta + gamma * gae_lambda * advantage
        return advantage, advantage

    return jax.lax.scan(backward, jnp.float32(0), deltas, reverse=True, unroll=devices.scan_unroll())[1]


class Batch(NamedTuple):
    """Decisions to learn from, all float32."""

    obs: jax.Array  # [B, D]
    actions: jax.Array  # [B, A]
    log_prob: jax.Array  # [B], of these actions, under the behaviour policy
    values: jax.Array  # [B]
    advantages: jax.Array  # [B]
    returns: jax.Array  # [B]


def log_prob(mean: jax.Array, log_std: jax.Array, actions: jax.Array) -> jax.Array:
    """Log-density [...] of actions [..., A] under Gaussians of mean [..., A] and log standard deviation [A]."""
    x = (actions - mean) * jnp.exp(-log_std)
    return (-0.5 * x**2 - log_std - 0.5 * np.log(2 * np.pi)).sum(axis=-1)


def ppo_loss_terms(args: Args, log_prob: jax.Array, values: jax.Array, batch: Batch) -> dict[str, jax.Array]:
    """The terms of PPO's loss (Schulman et al. 2017, equations 7 and 9) per sample, float32 [B].

    The value loss is half the larger of the squared errors of the value and the clipped value, as in Schoepf et al.
    2022's PPO; their HN-PPO takes the clipped value's alone, which gives values beyond the clip no gradient.
    """
    chex.assert_equal_shape([log_prob, values, batch.log_prob, batch.values, batch.advantages, batch.returns])
    log_ratio = log_prob - batch.log_prob
    ratio = jnp.exp(log_ratio)
    ratio_clipped = jnp.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    value_clipped = batch.values + jnp.clip(values - batch.values, -args.clip_coef, args.clip_coef)
    value_loss = jnp.maximum((values - batch.returns) ** 2, (value_clipped - batch.returns) ** 2)
    return {
        "policy_loss": -jnp.minimum(ratio * batch.advantages, ratio_clipped * batch.advantages),
        "value_loss": 0.5 * value_loss,
        "approx_kl": ratio - 1 - log_ratio,  # an estimate from the actions taken: k3 of joschu.net/blog/kl-approx.html
        "clipfrac": (jnp.abs(ratio - 1) > args.clip_coef).astype(jnp.float32),
    }


def loss(args: Args, agent: Agent, learner: dict, batch: Batch) -> dict[str, jax.Array]:
    """PPO's loss.

    Returns its terms per sample, float32 [B]; `devices.gradient` averages them over samples and devices and
    differentiates "loss"; all means are logged. With several devices `batch` is one device's part of the minibatch:
    compute statistics over samples in `compute_advantages`.
    """
    params = agent.networks(learner)
    mean, log_std = agent.actor.apply(params["actor"], batch.obs), params["log_std"]
    values = agent.critic.apply(params["critic"], batch.obs)[..., 0]
    terms = ppo_loss_terms(args, log_prob(mean, log_std, batch.actions), values, batch)
    terms["entropy"] = jnp.full_like(values, (log_std + 0.5 * np.log(2 * np.pi * np.e)).sum())
    total = terms["policy_loss"] + args.vf_coef * terms["value_loss"] - args.ent_coef * terms["entropy"]
    return terms | {"loss": total}


def penalty(agent: Agent, hyper: dict, state: TrainState) -> jax.Array:
    """The squared distance of the weights generated for earlier tasks from their targets, a mean over these tasks (von
    Oswald et al. 2020, equation 2, but with fixed targets)."""
    distance = ((agent.hyper.apply(hyper, state.embeddings) - state.targets) ** 2).sum(axis=-1)
    earlier = jnp.arange(MAX_TASKS) < state.task
    return (earlier * distance).sum() / jnp.maximum(state.task, 1)


def minibatch_gradient(args: Args, agent: Agent, state: TrainState, batch: Batch, *, with_penalty: bool):
    """PPO's gradient, clipped, plus the penalty's, not clipped. Returns the gradient and the means of the loss's terms,
    float32 []."""
    weight = jnp.ones(len(batch.obs))
    grads, means, _ = devices.gradient(partial(loss, args, agent), state.learner, batch, weight, in_chunks=False)
    grads = devices.optimization_barrier(grads)  # for speed: on a CPU XLA may compute them anew for each use
    norm = means["grad_norm"] = devices.global_norm(grads)
    if args.max_grad_norm:
        scale = jnp.minimum(1.0, args.max_grad_norm / norm)
        grads = jax.tree.map(lambda g: scale * g, grads)
    if with_penalty:
        # The penalty's gradient is taken at the hypernetwork that an Adam step with PPO's gradient alone would give
        # (von Oswald et al., equation 2, with that change held constant).
        step, _ = make_optimizer(args).update(grads, state.opt_state, state.learner)
        ahead = devices.optimization_barrier(optax.apply_updates(state.learner, step)["hyper"])
        means["penalty"], penalty_grads = jax.value_and_grad(partial(penalty, agent))(ahead, state)
        grads = grads | {"hyper": jax.tree.map(lambda g, p: g + args.beta * p, grads["hyper"], penalty_grads)}
        grads = devices.optimization_barrier(grads)
    return grads, means


def compute_advantages(args: Args, agent: Agent, state: TrainState, rollout: Rollout):
    """Normalised rewards and GAE: returns the state with its running statistics updated, a Batch and metrics."""
    params = agent.networks(state.learner)
    mean, log_std = agent.actor.apply(params["actor"], rollout.obs[:-1]), params["log_std"]
    values = agent.critic.apply(params["critic"], rollout.obs)[..., 0]
    last = jnp.zeros(rollout.rewards.shape, bool).at[-1].set(True)
    return_filter, rewards = normalize_rewards(
        state.return_filter, rollout.rewards, ended=last, mask=jnp.ones_like(last), gamma=args.gamma
    )
    advantages = jax.vmap(partial(gae, gamma=args.gamma, gae_lambda=args.gae_lambda), 1, 1)(rewards, values)
    returns = advantages + values[:-1]
    mean_advantage, var_advantage = masked_moments(advantages, jnp.ones_like(advantages))
    _, var_return = masked_moments(returns, jnp.ones_like(returns))
    metrics = {
        "charts/return_std": jnp.sqrt(return_filter.var),
        "losses/explained_variance": 1 - var_advantage / jnp.maximum(var_return, 1e-8),  # advantages: returns - values
        "losses/action_std": jnp.exp(log_std).mean(),
    }
    batch = Batch(
        obs=rollout.obs[:-1],
        actions=rollout.actions,
        log_prob=log_prob(mean, log_std, rollout.actions),
        values=values[:-1],
        advantages=(advantages - mean_advantage) / (jnp.sqrt(var_advantage) + 1e-5),
        returns=returns,
    )
    batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
    return state._replace(return_filter=return_filter), batch, metrics


def optimize(args: Args, agent: Agent, state: TrainState, batch: Batch, *, with_penalty: bool):
    """Runs update_epochs epochs of minibatch steps; returns the next state and the last epoch's mean metrics."""
    # Of other shapes JAX would read wrong samples without an error: it clamps an index that is out of range.
    chex.assert_tree_shape_prefix(batch, batch.returns.shape)
    tx = make_optimizer(args)

    def apply(grads, learner, opt_state):
        step, opt_state = tx.update(grads, opt_state, learner)
        return optax.apply_updates(learner, step), opt_state

    def skip(grads, learner, opt_state):
        return learner, opt_state

    def train_minibatch(state, index):
        minibatch = jax.tree.map(lambda x: x[index], batch)
        grads, means = minibatch_gradient(args, agent, state, minibatch, with_penalty=with_penalty)
        # Both norms: clipping makes 0 of a gradient of infinite norm, and the penalty's is added after it.
        finite = jnp.isfinite(means["grad_norm"] + devices.global_norm(grads))
        learner, opt_state = devices.cond(finite, apply, skip, grads, state.learner, state.opt_state)
        in_a_row = jnp.where(finite, 0, state.skipped_in_a_row + 1)
        state = state._replace(
            learner=learner, opt_state=opt_state, skipped=state.skipped + ~finite, skipped_in_a_row=in_a_row
        )
        return state, (means, finite, in_a_row)

    def train_epoch(state, key):
        order = jax.random.permutation(devices.fold_in_axis_index(key), len(batch.obs))
        state, (means, finite, in_a_row) = jax.lax.scan(train_minibatch, state, order.reshape(args.num_minibatches, -1))
        steps = jnp.maximum(finite.sum(), 1)
        means = jax.tree.map(lambda x: jnp.where(finite, x, 0).sum() / steps, means)  # means of the steps not skipped
        return state, (means, in_a_row.max())

    keys = jax.random.split(state.key, 1 + args.update_epochs)
    state, (means, in_a_row) = jax.lax.scan(train_epoch, state._replace(key=keys[0]), keys[1:])
    metrics = {f"losses/{name}": value[-1] for name, value in means.items()}
    return state, metrics | {"charts/skipped_steps": state.skipped, "charts/skipped_in_a_row": in_a_row.max()}


def update(args: Args, agent: Agent, state: TrainState, rollout: Rollout, *, with_penalty: bool):
    """One PPO update, on each device's part of the rollout; returns the next state and metrics float32 []."""
    chex.assert_axis_dimension(rollout.rewards, 0, DECISIONS)
    state, batch, metrics = compute_advantages(args, agent, state, rollout)
    state, losses = optimize(args, agent, state, batch, with_penalty=with_penalty)
    state = state._replace(updates=state.updates + 1, global_step=state.global_step + DECISIONS * args.num_envs)
    return state, metrics | losses


def make_update(args: Args, agent: Agent, mesh: Mesh, *, with_penalty: bool) -> Callable:
    """Returns the jitted update(state, rollout) -> TrainState, metrics, which donates the state."""
    return jax.jit(
        jax.shard_map(
            partial(update, args, agent, with_penalty=with_penalty),
            mesh=mesh,
            in_specs=(STATE_SPECS, TIME_ENV_SHARDED),
            out_specs=(STATE_SPECS, REPLICATED),
            check_vma=False,
        ),
        donate_argnums=0,
    )


# EVALUATION


def keep_best(args: Args, state: TrainState, success: jax.Array) -> TrainState:
    """Records an evaluation's success rate, and keeps the best parameters; of equally good ones the latest."""
    best = jax.tree.map(partial(jnp.where, success >= state.best.success), state.learner, state.best.learner)
    good_evals = jnp.where(success >= args.stop_at_success, state.best.good_evals + 1, 0)
    return state._replace(best=Best(best, jnp.maximum(success, state.best.success), good_evals))


class Jitted(NamedTuple):
    """The jitted functions of a run."""

    begin_task: Callable  # (state) -> state
    end_task: Callable  # (state) -> state
    policy_params: Callable  # (state, i) -> params
    act: Callable  # (params, obs, noise) -> actions
    colored_noise: Callable  # (key) -> noise
    update: Callable  # (state, rollout) -> state, metrics
    update_with_penalty: Callable  # the same, with --beta, for --method hnppo after the first task
    keep_best: Callable  # (state, success) -> state


def make_jitted(args: Args, agent: Agent, mesh: Mesh) -> Jitted:
    """Jits the functions of a run; each is compiled at its first call."""
    return Jitted(
        begin_task=jax.jit(partial(begin_task, args, agent)),
        end_task=jax.jit(partial(end_task, args, agent)),
        policy_params=jax.jit(partial(policy_params, agent)),
        act=jax.jit(partial(act, agent)),
        colored_noise=jax.jit(partial(colored_noise, args, agent.actor.outputs)),
        update=make_update(args, agent, mesh, with_penalty=False),
        update_with_penalty=make_update(args, agent, mesh, with_penalty=True),
        keep_best=jax.jit(partial(keep_best, args)),
    )


def make_policy(jitted: Jitted, params: dict) -> Callable:
    """Returns policy(obs, t) -> mean actions, for `doors.play`."""
    return lambda obs, t: jitted.act(params, obs)


def evaluate_task(args: Args, jitted: Jitted, state: TrainState, task: str) -> tuple[TrainState, dict]:
    """Evaluates the current task; returns the state, its `best` updated, and metrics."""
    policy = make_policy(jitted, jitted.policy_params(state, state.task))
    outcomes = doors.evaluate(args, policy, task, episodes=args.eval_episodes, seed=SELECT_SEED)
    state = jitted.keep_best(state, outcomes.success.mean())
    best = {"eval/best_success_rate": state.best.success}
    return state, outcomes.means("eval/") | best | {"eval/mean_return": outcomes.returns.mean()}


def load_params(args: Args, agent: Agent, run_dir: str) -> dict:
    """Loads a run's newest checkpoint or an exported agent: "actor", the policies' parameters stacked over tasks,
    "finished", the number of finished tasks, and "global_step".

    Each task's policy is that of `policy_params` or, with --method ppo, the one stored when the task ended. In an
    unfinished task, the best parameters replace the current ones once there was an evaluation."""

    def select(state):
        evaluated = state.best.success >= 0
        learner = jax.tree.map(partial(jnp.where, evaluated), state.best.learner, state.learner)
        state, actors = state._replace(learner=learner), []
        params_of = jax.jit(partial(policy_params, agent))
        for i in range(len(doors.task_names(args))):
            actor = params_of(state, i)["actor"]
            if args.method == "ppo":
                own = agent.unpack(state.targets[i])["actor"]
                actor = jax.tree.map(partial(jnp.where, i < state.finished), own, actor)
            actors.append(actor)
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *actors)
        return {"actor": stacked, "finished": state.finished}

    return agents.load(run_dir, partial(init_state, args, agent), select)


def evaluate(
    args: Args, run_dir: str, *, episodes: int, seed: int, levels: str, random: bool, video: bool
) -> runs.Evaluation:
    """For evaluate.py: evaluates a trained policy, or random actions, on each of its tasks."""
    most = doors.MAX_DOORS
    check(episodes <= most, f"--episodes {episodes}: give at most {most:,}, since each needs a door of its own")
    agent = make_agent(args)
    jitted = make_jitted(args, agent, devices.make_mesh(args))
    loaded, rows, film = load_params(args, agent, run_dir), [], []
    rng, finished = np.random.default_rng(seed), int(loaded["finished"])

    space = doorgym.vector.action_space(args.robot)

    def random_policy(obs, t):
        return rng.uniform(space.low, space.high, (len(obs), agent.actor.outputs))

    for i, task in enumerate(doors.task_names(args)):
        actor = jax.tree.map(itemgetter(i), loaded["actor"])
        policy = random_policy if random else make_policy(jitted, {"actor": actor})
        outcomes = doors.evaluate(
            args, policy, task, episodes=episodes, seed=EVAL_SEED + seed, film=film if video else None
        )
        success, mean_return = float(outcomes.success.mean()), float(outcomes.returns.mean())
        row = {"task": task, "success_rate": success, "mean_return": mean_return}
        rows.append(row | {"episodes": episodes, "done": "yes" if i < finished else "no"})
    return runs.Evaluation(
        step=int(loaded["global_step"]),
        name="random_episodes" if random else "episodes",
        title=f"{args.method}, {args.robot}, doors opened" + (" by random actions" if random else ""),
        rows=rows,
        summary={row["task"]: row["success_rate"] for row in rows} | {"tasks_learnt": finished},
        film=np.stack(film) if video else None,
        fps=1000 / (doors.ACTION_REPEAT * doorgym.vector.FRAME_SKIP),  # real time
        scenes=len(rows),
        details={"episodes": episodes},
    )


# MAIN


def check_skipped(args: Args, run: runs.Run, step: int, metrics: dict, *, with_penalty: bool) -> None:
    """Raises DivergedError if too many consecutive gradients were not finite."""
    if (skipped := int(metrics["charts/skipped_in_a_row"])) >= args.max_skipped:
        smaller = ["--hyper-learning-rate"] if args.method == "hnppo" else []
        smaller += ["--learning-rate"] if args.has_ordinary_weights else []
        smaller += ["--beta"] if with_penalty else []
        raise runs.DivergedError(
            f"{skipped} gradients in a row were not finite before step {step}: training stopped; {run.resume_hint()}; "
            f"try a smaller {', '.join(smaller)} or --clip-coef"
        )


def learn_task(args: Args, jitted: Jitted, mesh: Mesh, run: runs.Run, state: TrainState) -> TrainState:
    """Trains on the current task until it ends or a signal arrives."""
    watch = runs.Stopwatch()
    task = doors.task_names(args)[int(state.task)]
    with_penalty = args.method == "hnppo" and args.beta > 0 and int(state.task) > 0
    update = jitted.update_with_penalty if with_penalty else jitted.update
    shardings = devices.shardings(mesh, (STATE_SPECS, TIME_ENV_SHARDED))
    batch_size = DECISIONS * args.num_envs
    seed = envs.derive_seed(args.seed, 9)  # no task number: tasks with the same kind of knob share worlds
    with closing(doors.make_doors(args, task, args.num_envs, seed=seed, num_worlds=args.num_worlds)) as env:
        while not run.stop and state.finished == state.task:
            rollout, outcomes = collect(args, jitted, env, state, watch)
            with watch("update"):
                state, metrics = update(*jax.device_put((state, rollout), shardings))
                metrics = jax.device_get(metrics)
            step, decisions = int(state.global_step), batch_size * int(state.updates)
            check_skipped(args, run, step, metrics, with_penalty=with_penalty)
            run.check_finite(step, metrics)
            metrics |= outcomes.means("charts/") | {
                "charts/episodic_return": outcomes.returns.mean(),
                "charts/task": state.task,
                "charts/task_updates": state.updates,
            }
            out_of_time = decisions >= args.task_timesteps
            if out_of_time or runs.crossed(args.eval_every, decisions - batch_size, decisions):
                with watch("evaluation"):
                    state, eval_metrics = evaluate_task(args, jitted, state, task)
                metrics |= eval_metrics
            run.log(step, metrics | watch.fractions() | {"charts/SPS": run.steps_per_second(step)})
            if out_of_time or state.best.good_evals == 3:
                state = finish_task(args, jitted, run, state)
            if run.checkpoint_due(step):
                run.save(step, {"state": state}, {})
    run.save(int(state.global_step), {"state": state}, {})
    return state


def finish_task(args: Args, jitted: Jitted, run: runs.Run, state: TrainState) -> TrainState:
    """Ends the task, then evaluates all tasks, later ones too, with `policy_params` (without a hypernetwork: the newest
    policy for all; with ppo, evaluate.py plays each task's own), and reports the matrix so far."""
    names, i = doors.task_names(args), int(state.task)
    state = jitted.end_task(state)
    row = np.full(MAX_TASKS, np.nan)
    for j, name in enumerate(names):
        policy = make_policy(jitted, jitted.policy_params(state, j))
        row[j] = doors.evaluate(args, policy, name, episodes=args.eval_episodes, seed=EVAL_SEED).success.mean()
    state = state._replace(matrix=state.matrix.at[i].set(row))
    continual.report(
        run,
        int(state.global_step),
        np.asarray(state.matrix)[: i + 1, : len(names)],
        names,
        title=f"{args.method}, {args.robot}, seed {args.seed}",
        note=f"{names[i]} ended after {int(state.updates)} updates",
    )
    return state


def init_checkpoint(args: Args, agent: Agent) -> dict:
    """What a new run starts from."""
    return {"state": init_state(args, agent)}


def load_checkpoint(args: Args, init_checkpoint: Callable[[], dict], run_dir: str) -> dict:
    """Loads the newest checkpoint of a run. Raises UsageError if --tasks does not begin with the run's own tasks."""
    own = doors.task_names(runs.saved_args(Args, run_dir, "--resume", SCRIPT))
    kept = doors.task_names(args)[: len(own)] == own
    check(kept, f"--tasks {args.tasks!r}: this run is of {', '.join(own)}; give these, and others after them")
    return runs.load(init_checkpoint, run_dir)


def main(args: Args) -> runs.Run:
    """Trains; returns the run, finished or stopped by a signal (`run.stop`)."""
    runs.check_args(args, SCRIPT)
    agent, mesh = make_agent(args), devices.make_mesh(args)
    jitted = make_jitted(args, agent, mesh)
    with runs.Run(args, SCRIPT, mesh, partial(init_checkpoint, args, agent), partial(load_checkpoint, args)) as run:
        state = run.checkpoint["state"]
        num_tasks = len(doors.task_names(args))
        if state.finished == num_tasks:
            run.print("all tasks of the run are finished already; to continue, give a longer --tasks")
        while not run.stop and state.finished < num_tasks:
            if state.finished > state.task:
                state = jitted.begin_task(state)
            state = learn_task(args, jitted, mesh, run, state)
    return run


if __name__ == "__main__":
    runs.cli(Args, main)
