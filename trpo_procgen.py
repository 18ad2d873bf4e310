"""TRPO on Procgen: trust region policy optimisation, with a value network of its own.

Schulman et al. 2015 (arXiv 1502.05477): a natural gradient by conjugate gradients, as long as the KL divergence allows,
and a line search that takes only what is better. --penalty trades the trust region for a fixed KL penalty. Try:

    python trpo_procgen.py --env-id starpilot --encoder nature --width 1 --pool flatten
    python trpo_procgen.py --env-id starpilot --encoder nature --width 1 --pool flatten --penalty 0.5
"""

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from annotated_types import Interval

from common import agents, devices, envs, networks, runs, shaping
from common.derivatives import forward_mode
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
class Args(envs.GameArgs, shaping.NormalizeArgs, networks.EncoderArgs, runs.RunArgs):
    FIXED: ClassVar = ("penalty",)  # with one, Adam has the policy's moments too

    total_timesteps: Timesteps = 8_000_000
    """total number of environment steps"""
    num_envs: PositiveInt = 64
    """number of parallel environments, over all devices"""
    num_steps: PositiveInt = 128
    """steps per environment in a rollout; the batch is num_envs x num_steps"""
    num_minibatches: PositiveInt = 8
    """parts that a batch is cut into: Adam takes a step on each; TRPO's own step adds them up, only to save memory"""
    gamma: UnitSchedule = "0.99"
    """discount: a number, or a schedule such as "0:0.99,1000000:0.999" in environment steps"""
    gae_lambda: UnitInterval = 0.95
    """lambda of generalised advantage estimation (GAE)"""
    max_kl: PositiveFloat = 0.01
    """how far a step may take the policy: mean KL divergence from the old one, nats"""
    fisher_fraction: Annotated[float, Interval(gt=0, le=1)] = 0.1
    """share of the batch to estimate the Fisher matrix on (rounded up to a multiple of 8, in each pass and device)"""
    cg_iterations: Iterations = 10
    """iterations of conjugate gradients, each with a product of the Fisher matrix and a vector"""
    damping: PositiveFloat = 0.1
    """added to the Fisher matrix's diagonal: the more, the nearer a step is to the plain gradient's, and the shorter"""
    line_search_steps: Iterations = 10
    """lengths of a step that are tried, each half the last, before it is given up"""
    learning_rate: NonNegativeSchedule = "5e-4"
    """Adam's step size for the value network (with a penalty, the policy too): a number, or a schedule like gamma's"""
    value_epochs: Iterations = 3
    """passes over a batch to fit the value network (with a penalty, the policy too)"""
    penalty: NonNegativeFloat = 0.0
    """learn by Adam from the surrogate minus this times the KL divergence, without a trust region; 0 for TRPO"""

    def check(self) -> None:
        """Raises UsageError for inconsistent flags."""
        runs.check_batch(self)
        of_trpo = "max_kl", "fisher_fraction", "cg_iterations", "damping", "line_search_steps"
        runs.check_needs(self, not self.penalty, "--penalty 0", of_trpo)


# NETWORKS
# Two, without a shared encoder: the trust region bounds what a step does to the policy, but not what it would do to a
# value head on the same encoder; and the value loss would move a shared encoder, and so the policy, without any bound.


class Network(nn.Module):
    """An encoder and a linear layer."""

    encoder: nn.Module
    outputs: int
    scale: float

    @nn.compact
    def __call__(self, frames: jax.Array) -> jax.Array:
        """Frames uint8 [B, 64, 64, C] -> float32 [B, outputs]."""
        init = nn.initializers.orthogonal(self.scale)
        # "highest" is full float32 on a GPU too.
        return nn.Dense(self.outputs, kernel_init=init, precision="highest")(self.encoder(frames))


class Agent(NamedTuple):
    policy: Network
    value: Network


def make_agent(args: Args) -> Agent:
    """The networks that these flags describe."""
    # A small last layer makes the first policy nearly uniform.
    return Agent(
        policy=Network(networks.make_encoder(args), envs.NUM_ACTIONS, 0.01),
        value=Network(networks.make_encoder(args), 1, 1.0),
    )


def look(network: Network, params: dict, frames: jax.Array) -> jax.Array:
    """What a network says of frames uint8 [N, 64, 64, C]: float32 [N, outputs]."""
    return devices.in_chunks(partial(network.apply, params), frames)


# TRAINING STATE


class TrainState(NamedTuple):
    """The learner."""

    params: dict  # "policy" and "value"
    opt_state: optax.OptState  # of the value network; with a penalty, of both
    key: jax.Array
    global_step: jax.Array  # int32 []: transitions learnt from
    updates: jax.Array  # int32 []
    reward_filter: shaping.ReturnFilter


STATE = devices.layout(TrainState, reward_filter=shaping.FILTER)


class Carry(NamedTuple):
    """What is needed besides the games to go on with them."""

    history: jax.Array  # uint8 [H, N, 64, 64, 3]: the frames before the newest
    numbers: jax.Array  # int32 [N]: of these games in the run
    last_action: jax.Array  # int32 [N]: what the games played last


CARRY = devices.layout(Carry, steps="history", games="numbers last_action")


def of_adam(args: Args, params: dict) -> dict:
    """The parameters that Adam learns."""
    return params if args.penalty else {"value": params["value"]}


def make_optimizer() -> optax.GradientTransformation:
    """Adam's direction, without step size and sign: `optimize` multiplies it by -learning_rate, from a schedule."""
    return optax.scale_by_adam(eps=1e-5)  # PPO's in Baselines


@partial(jax.jit, static_argnums=(0, 1))
def initial_state(args: Args, agent: Agent) -> TrainState:
    """The learner before its first update, from `args.seed`."""
    key, *init_keys = jax.random.split(jax.random.PRNGKey(args.seed), 3)
    frames = jnp.zeros((1, 64, 64, 3 * len(args.offsets)), jnp.uint8)
    networks_and_keys = zip(agent._asdict().items(), init_keys, strict=True)
    params = {name: network.init(init_key, frames) for (name, network), init_key in networks_and_keys}
    return TrainState(
        params=params,
        opt_state=make_optimizer().init(of_adam(args, params)),
        key=key,
        global_step=jnp.int32(0),
        updates=jnp.int32(0),
        reward_filter=shaping.new_filter(args.num_envs),
    )


@partial(jax.jit, static_argnums=0)
def initial_carry(args: Args, numbers: jax.Array) -> Carry:
    """Before the first step of the games with these numbers, int32 [N]."""
    history = envs.empty_history(len(numbers), args.offsets)
    return Carry(history=history, numbers=numbers, last_action=jnp.zeros_like(numbers))


# ROLLOUT


class Rollout(NamedTuple):
    """What stays on the device while T steps are played."""

    frames: envs.Frames  # of T + 1 steps
    actions: jax.Array  # int32 [T, N]
    logits: jax.Array  # float32 [T, N, 15]
    values: jax.Array  # float32 [T, N]
    numbers: jax.Array  # int32 [N]
    last_action: jax.Array  # int32 [N]
    key: jax.Array
    t: jax.Array  # int32 []


ROLLOUT = devices.layout(Rollout, steps="frames actions logits values", games="numbers last_action")


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
        key=jax.random.fold_in(jax.random.PRNGKey(envs.derive_seed(args.seed, 0)), i),
        t=jnp.int32(0),
    )


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
@devices.spread([SAME, ROLLOUT, GAMES, GAMES], (ROLLOUT, GAMES), every_host=False)
def act(args: Args, agent: Agent, params: dict, rollout: Rollout, obs: jax.Array, age: jax.Array):
    """Chooses actions for obs uint8 [N, 3, 64, 64], age int32 [N]; returns the rollout and actions int32 [N]."""
    t = rollout.t
    frames = rollout.frames.put(t, obs, age)
    stacked = frames.stack(t)
    logits = look(agent.policy, params["policy"], stacked)
    choose_keys, stick_keys = envs.step_keys(rollout)
    actions = jax.vmap(jax.random.categorical)(choose_keys, logits)
    played = envs.stick(stick_keys, args.sticky_actions, actions, last_action=rollout.last_action, age=age)
    rollout = rollout._replace(
        frames=frames,
        actions=rollout.actions.at[t].set(actions),
        logits=rollout.logits.at[t].set(logits),
        values=rollout.values.at[t].set(look(agent.value, params["value"], stacked)[:, 0]),
        last_action=played,
        t=t + 1,
    )
    return rollout, played


@partial(jax.jit, static_argnums=0, donate_argnums=1)
@devices.spread([ROLLOUT, GAMES, GAMES], (ROLLOUT, CARRY), every_host=False)
def end_rollout(args: Args, rollout: Rollout, obs: jax.Array, age: jax.Array) -> tuple[Rollout, Carry]:
    """Adds the frames uint8 [N, 3, 64, 64] after the last step, and their ages int32 [N]."""
    rollout = rollout._replace(frames=rollout.frames.put(args.num_steps, obs, age))
    return rollout, Carry(rollout.frames.history(args.num_steps), rollout.numbers, rollout.last_action)


def collect(args: Args, agent: Agent, games: envs.Games, params: dict, carry: Carry, *, i: int, watch: runs.Stopwatch):
    """Plays the i-th rollout, num_steps steps of each game; returns Rollout, envs.Steps and the next Carry."""
    acting = {name: networks.for_acting(network, params[name]) for name, network in agent._asdict().items()}
    agent = Agent(**{name: network for name, (network, _) in acting.items()})
    params = {name: some for name, (_, some) in acting.items()}
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
    """Transitions to learn from: over a rollout [T, N]; in a minibatch [B]."""

    actions: jax.Array  # int32; all else is float32
    logits: jax.Array  # [..., 15], of the policy that acted
    advantages: jax.Array  # normalised over the rollout
    returns: jax.Array  # the value loss's targets


def policy_parts(logits: jax.Array, batch: Batch) -> dict[str, jax.Array]:
    """For each sample, float32 [B]: the surrogate objective, negative (Schulman et al. 2015, equation 14), the KL
    divergence of the policy with logits [B, 15] from the old one, and its entropy."""
    chex.assert_equal_shape([logits, batch.logits])
    log_probs, old_log_probs = jax.nn.log_softmax(logits), jax.nn.log_softmax(batch.logits)
    log_ratio = jnp.take_along_axis(log_probs - old_log_probs, batch.actions[:, None], axis=-1)[:, 0]
    return {
        "policy_loss": -jnp.exp(log_ratio) * batch.advantages,
        "approx_kl": (jnp.exp(old_log_probs) * (old_log_probs - log_probs)).sum(axis=-1),  # exact; the usual name
        "entropy": -(jnp.exp(log_probs) * log_probs).sum(axis=-1),
    }


def policy_loss(network: Network, params: dict, minibatch: tuple[jax.Array, Batch]) -> dict[str, jax.Array]:
    """`policy_parts` of a network on frames uint8 [B, 64, 64, C], with the policy loss as "loss": each float32 [B]."""
    frames, batch = minibatch
    parts = policy_parts(look(network, params, frames), batch)
    return parts | {"loss": parts["policy_loss"]}


def fisher_loss(network: Network, params: dict, minibatch: tuple, *, vector: dict) -> dict[str, jax.Array]:
    """A loss for each sample, float32 [B], whose gradient is the Fisher matrix times a vector v: J' F J v.

    J is the Jacobian of the logits by the parameters, J' its transpose, and F = diag(p) - p p' the Fisher matrix of a
    categorical in its logits (Schulman et al. 2015, appendix C). J v comes from forward-mode differentiation. The loss
    is the logits' product with F J v, taken as a constant, so that its gradient is J' F J v.
    """
    apply = partial(network.apply, frames=minibatch[0])
    with forward_mode():
        _, change = jax.jvp(apply, (jax.lax.stop_gradient(params),), (vector,))
    logits = apply(params)
    probs = jax.nn.softmax(logits)
    change = probs * (change - (probs * change).sum(axis=-1, keepdims=True))
    return {"loss": (logits * jax.lax.stop_gradient(change)).sum(axis=-1)}


def dot(x: dict, y: dict) -> jax.Array:
    """The inner product of two trees of arrays, in full float32, []."""
    return sum(jnp.vdot(a, b, precision="highest") for a, b in zip(*map(jax.tree.leaves, (x, y)), strict=True))


def along(x: dict, scale: jax.Array, direction: dict) -> dict:
    """x + scale * direction, of trees of arrays."""
    return jax.tree.map(lambda a, b: a + scale * b, x, direction)


def conjugate_gradients(product: Callable, target: dict, iterations: int) -> dict:
    """Solves product(x) = target for a symmetric positive definite linear function of a tree of arrays, from x = 0
    (Hestenes and Stiefel 1952)."""

    def step(carry, _):
        x, rest, direction, square = carry
        image = product(direction)
        # Where all is solved there is no direction left: 0, and not 0 / 0.
        length = square / jnp.maximum(dot(direction, image), 1e-30)
        x, rest = along(x, length, direction), along(rest, -length, image)
        new = dot(rest, rest)
        return (x, rest, along(rest, new / jnp.maximum(square, 1e-30), direction), new), None

    start = jax.tree.map(jnp.zeros_like, target), target, target, dot(target, target)
    return jax.lax.scan(step, start, length=iterations)[0][0]


def line_search(evaluate: Callable, params: dict, step: dict, before: dict, *, max_kl: float, tries: int):
    """The first of params + step, + step / 2, ... that has a lower loss than `before`, and a mean KL divergence of at
    most max_kl; `params` where none of `tries` does. evaluate(params) -> parts, float32 [], as `before`'s.

    Returns parameters, their parts, and how much of the step was taken, float32 [] (0: rejected).
    """

    def good(parts):
        return (parts["loss"] < before["loss"]) & (parts["approx_kl"] <= max_kl)

    def shorter(carry):
        i, scale, _ = carry
        return i + 1, scale / 2, evaluate(along(params, scale / 2, step))

    start = jnp.int32(0), jnp.float32(2), before  # `before` is no gain on itself, so the loop begins with scale 2 / 2
    _, scale, parts = jax.lax.while_loop(lambda carry: (carry[0] < tries) & ~good(carry[2]), shorter, start)
    scale = jnp.where(good(parts), scale, 0.0)
    parts = jax.tree.map(partial(jnp.where, scale > 0), parts, before)
    # Not params + 0 * step: where the step is not finite, that would be NaN.
    return jax.tree.map(partial(jnp.where, scale > 0), along(params, scale, step), params), parts, scale


def prepare(args: Args, agent: Agent, state: TrainState, rollout: Rollout, steps: envs.Steps, gamma: jax.Array):
    """Rewards and advantages: returns the state with its filter moved on, a Batch [T, N] and metrics float32 []."""
    mask = ~steps.done
    reward_filter, rewards = shaping.prepare_rewards(args, state.reward_filter, steps, gamma)
    last_value = look(agent.value, state.params["value"], rollout.frames.stack(args.num_steps))[:, 0]
    advantages = jax.vmap(partial(gae, gamma=gamma, gae_lambda=args.gae_lambda), 1, 1)(
        rewards, jnp.concatenate([rollout.values, last_value[None]]), steps.terminated, steps.truncated
    )
    returns = advantages + rollout.values
    mean, var = shaping.masked_moments(advantages, mask)
    _, spread = shaping.masked_moments(returns, mask)
    batch = Batch(rollout.actions, rollout.logits, (advantages - mean) / jnp.sqrt(var + 1e-8), returns)
    metrics = {
        "charts/return_std": jnp.sqrt(reward_filter.var),
        "losses/explained_variance": 1 - var / jnp.maximum(spread, 1e-8),  # advantages are returns - values
    }
    return state._replace(reward_filter=reward_filter), batch, metrics


class Data(NamedTuple):
    """A rollout to learn from, and where its samples are in it."""

    frames: envs.Frames
    batch: Batch  # [T, N]
    weight: jax.Array  # bool [T, N]: whether a step is a transition

    def take(self, index: jax.Array) -> tuple[tuple[jax.Array, Batch], jax.Array]:
        """Samples `index` int32 [B] -> ((frames uint8 [B, 64, 64, C], Batch [B]), weight bool [B])."""
        chex.assert_tree_shape_prefix(self.batch, self.weight.shape)  # an index beyond an array's end would be no error
        time, env = index // self.weight.shape[1], index % self.weight.shape[1]
        return (self.frames.stack(time, env), jax.tree.map(lambda x: x[time, env], self.batch)), self.weight[time, env]


def mean_over(function: Callable, data: Data, order: jax.Array):
    """The mean over the samples `order` int32 [M, B], one minibatch of B after the other, in the memory of one.

    function(minibatch, weight [B]) -> a tree of its means over a minibatch; these are averaged here, weighted by how
    many transitions each minibatch has on all devices.
    """
    total = jnp.maximum(devices.total(data.weight.reshape(-1)[order].sum()), 1)

    @jax.jit  # so that it is traced once, not for its shapes too
    def some(index):
        minibatch, weight = data.take(index)
        share = devices.total(weight.sum()) / total
        return jax.tree.map(lambda x: share * x, function(minibatch, weight))

    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(some, order[0]))
    return jax.lax.scan(lambda sums, index: (jax.tree.map(jnp.add, sums, some(index)), None), zero, order)[0]


def fisher_rows(args: Args, order: jax.Array) -> jax.Array:
    """`args.fisher_fraction` of this device's samples int32 [M, B]: int32 [rows, width], in as few rows as hold them.
    Each row is one pass, after which the devices sum."""
    number = math.ceil(args.fisher_fraction * order.size)
    rows = -(-number // order.shape[1])
    width = min(-(-number // rows // 8) * 8, order.shape[1])  # the CPU's chunks are of 8
    return order.reshape(-1)[: rows * width].reshape(rows, width)


def trust_region_step(args: Args, agent: Agent, params: dict, data: Data, order: jax.Array) -> tuple[dict, dict]:
    """TRPO's step of the policy's parameters (Schulman et al. 2015, section 6 and appendix C); also metrics []: those
    of the loss are after the step."""
    objective, few = partial(policy_loss, agent.policy), fisher_rows(args, order)

    def evaluate(params):
        def means(minibatch, weight):
            share = weight / jnp.maximum(devices.total(weight.sum()), 1)
            return devices.total({name: (share * x).sum() for name, x in objective(params, minibatch).items()})

        return mean_over(means, data, order)

    def fisher(vector):
        parts = partial(fisher_loss, agent.policy, vector=vector)
        product = mean_over(lambda *some: devices.gradient(parts, params, *some)[0], data, few)
        return along(product, args.damping, vector)

    grads, before = mean_over(lambda *some: devices.gradient(objective, params, *some)[:2], data, order)
    downhill = jax.tree.map(jnp.negative, grads)
    direction = conjugate_gradients(fisher, downhill, args.cg_iterations)
    image = fisher(direction)
    # At this length the quadratic model of the KL divergence, damping included, is max_kl (appendix C).
    curvature = dot(direction, image)
    # Not a number where the curvature is not positive; then the line search takes nothing.
    length = jnp.sqrt(2 * args.max_kl / curvature)
    step = jax.tree.map(lambda d: length * d, direction)
    params, parts, taken = line_search(evaluate, params, step, before, max_kl=args.max_kl, tries=args.line_search_steps)
    del parts["loss"]  # is the policy_loss, and the value's goes by this name
    grad_norm = devices.norm(grads)
    residual = devices.norm(along(downhill, -1.0, image)) / jnp.maximum(grad_norm, 1e-30)
    return params, parts | {"grad_norm": grad_norm, "cg_residual": residual, "step_taken": taken}


def loss(args: Args, agent: Agent, params: dict, minibatch: tuple[jax.Array, Batch]) -> dict[str, jax.Array]:
    """What Adam minimises, for each sample, float32 [B]: the value network's squared error and, with a penalty, the
    policy's surrogate and KL divergence (Schulman et al. 2017, equation 5)."""
    frames, batch = minibatch
    value_loss = 0.5 * (look(agent.value, params["value"], frames)[:, 0] - batch.returns) ** 2
    if not args.penalty:
        return {"loss": value_loss, "value_loss": value_loss}
    parts = policy_loss(agent.policy, params["policy"], minibatch)
    total = parts["policy_loss"] + args.penalty * parts["approx_kl"] + value_loss
    return parts | {"loss": total, "value_loss": value_loss}


def optimize(args: Args, agent: Agent, state: TrainState, data: Data, *, learning_rate: jax.Array, key: jax.Array):
    """Epochs of Adam's minibatches; returns all parameters, Adam's state and the last epoch's mean metrics."""
    adam = make_optimizer()

    def minibatch(learner, index):
        params, opt_state = learner
        grads, parts, _ = devices.gradient(partial(loss, args, agent), params, *data.take(index))
        direction, opt_state = adam.update(grads, opt_state, params)
        params = along(params, -learning_rate, direction)
        return (params, opt_state), parts | {"grad_norm" if args.penalty else "value_grad_norm": devices.norm(grads)}

    def epoch(learner, key):
        learner, parts = jax.lax.scan(minibatch, learner, shuffled(args, data.weight.size, key))
        return learner, jax.tree.map(jnp.mean, parts)

    start = of_adam(args, state.params), state.opt_state
    (params, opt_state), parts = jax.lax.scan(epoch, start, jax.random.split(key, args.value_epochs))
    return state.params | params, opt_state, jax.tree.map(lambda x: x[-1], parts)


def shuffled(args: Args, samples: int, key: jax.Array) -> jax.Array:
    """This device's samples in minibatches, in an order of its own: int32 [M, B]."""
    return jax.random.permutation(devices.own_key(key), samples).reshape(args.num_minibatches, -1)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
@devices.spread([STATE, ROLLOUT, envs.STEPS], (STATE, SAME))
def update(args: Args, agent: Agent, state: TrainState, rollout: Rollout, steps: envs.Steps) -> tuple[TrainState, dict]:
    """One TRPO update: returns the next state and metrics, float32 []."""
    learning_rate, gamma = (runs.parse_schedule(text)(state.global_step) for text in (args.learning_rate, args.gamma))
    key, policy_key, value_key = jax.random.split(state.key, 3)
    weight = ~steps.done
    state, batch, metrics = prepare(args, agent, state, rollout, steps, gamma)
    data = Data(rollout.frames, batch, weight)
    moved = {}
    if not args.penalty:
        order = shuffled(args, weight.size, policy_key)
        policy, moved = trust_region_step(args, agent, state.params["policy"], data, order)
        state = state._replace(params=state.params | {"policy": policy})
    params, opt_state, parts = optimize(args, agent, state, data, learning_rate=learning_rate, key=value_key)
    metrics |= {f"losses/{name}": value for name, value in (parts | moved).items()} | {
        "losses/param_norm": devices.norm(params),  # infinite where the last step went wrong
        "charts/learning_rate": learning_rate,
        "charts/gamma": gamma,
    }
    state = state._replace(
        params=params,
        opt_state=opt_state,
        key=key,
        global_step=state.global_step + devices.total(weight.sum()),
        updates=state.updates + 1,
    )
    return state, metrics


# EVALUATION


@partial(jax.jit, static_argnums=(0, 1))
@devices.spread([SAME, GAMES, GAMES], GAMES, every_host=False)
def choose(args: Args, agent: Agent, params: dict, frames: jax.Array, keys: jax.Array) -> jax.Array:
    """Draws actions int32 [N] from the policy for stacked frames uint8 [N, 64, 64, C], with keys uint32 [N, 2]."""
    return jax.vmap(jax.random.categorical)(keys, look(agent.policy, params, frames))


def make_policy(args: Args, agent: Agent, params: dict) -> Callable:
    """A policy as `envs.play_episodes` calls it."""
    return envs.as_policy(partial(choose, args, agent, params))


def trained(args: Args, agent: Agent, run_dir: str) -> dict:
    """What evaluation needs of a run's newest checkpoint, or of an agent that `evaluate.py --export` wrote."""
    return agents.load(run_dir, partial(initial_state, args, agent), lambda state: {"params": state.params["policy"]})


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
            params, i = devices.here(args, state.params), int(state.updates)
            envs.evaluate_if_due(args, run, step, make_policy(args, agent, params["policy"]))
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
