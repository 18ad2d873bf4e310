"""TRPO on Procgen: trust region policy optimisation, with a value network of its own.

Schulman et al. 2015 (arXiv 1502.05477): a natural-gradient step scaled to the KL bound, then a backtracking line
search. --penalty replaces the trust region by a fixed KL penalty. Try:

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
from jax.sharding import Mesh

from common import agents, devices, envs, multihost, networks, runs
from common.derivatives import forward_mode
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
class Args(envs.GameArgs, NormalizeArgs, networks.EncoderArgs, runs.RunArgs):
    FIXED: ClassVar = ("penalty",)  # --resume refuses to change it: with a penalty Adam has the policy's moments too

    total_timesteps: StepCount = 8_000_000
    """total number of environment steps"""
    num_envs: PositiveInt = 64
    """number of parallel environments, over all devices"""
    num_steps: PositiveInt = 128
    """steps per environment in a rollout; the batch is num_envs x num_steps"""
    num_minibatches: PositiveInt = 8
    """number of minibatches per epoch of Adam; the trust-region step accumulates its gradient over them"""
    gamma: UnitSchedule = "0.99"
    """discount: a number, or a schedule such as "0:0.99,1000000:0.999" in environment steps, linear between"""
    gae_lambda: UnitInterval = 0.95
    """lambda of generalised advantage estimation (GAE)"""
    max_kl: PositiveFloat = 0.01
    """trust region: largest mean KL(old, new) of an update, nats"""
    fisher_fraction: Annotated[float, Interval(gt=0, le=1)] = 0.1
    """fraction of the batch for Fisher-vector products (rounded up to a multiple of 8 per minibatch and device)"""
    cg_iterations: Iterations = 10
    """conjugate-gradient iterations, one Fisher-vector product each"""
    damping: PositiveFloat = 0.1
    """added to the Fisher matrix's diagonal; a larger value turns steps towards the gradient and shortens them"""
    line_search_steps: Iterations = 10
    """step lengths that the line search tries, the full one first, each half the last; then the step is rejected"""
    learning_rate: NonNegativeSchedule = "5e-4"
    """Adam's learning rate for values (with a penalty, the policy too): a number, or a schedule like gamma's"""
    value_epochs: Iterations = 3
    """epochs over each batch to fit the value network (with a penalty, the policy too)"""
    penalty: NonNegativeFloat = 0.0
    """coefficient of a fixed KL penalty, with Adam in place of the trust region; 0 for TRPO"""

    def check(self) -> None:
        """Raises UsageError for inconsistent flags; the inherited groups check their own."""
        runs.check_batch(self)
        trust_region_flags = "max_kl", "fisher_fraction", "cg_iterations", "damping", "line_search_steps"
        runs.check_needs(self, not self.penalty, "--penalty 0", trust_region_flags)


# NETWORKS
# Two: through a shared encoder the value loss would move the policy past the KL bound, and a policy step the values.


class Network(nn.Module):
    """An encoder and a linear layer."""

    encoder: nn.Module
    outputs: int
    scale: float

    @nn.compact
    def __call__(self, frames: jax.Array) -> jax.Array:
        """Frames uint8 [B, 64, 64, C] -> float32 [B, outputs]."""
        init = nn.initializers.orthogonal(self.scale)
        # "highest": no TF32 on a GPU. The encoder computes in bfloat16 there, unless --dtype float32.
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


def apply_network(network: Network, params: dict, frames: jax.Array) -> jax.Array:
    """Outputs float32 [N, outputs] for stacked frames uint8 [N, 64, 64, C]."""
    return devices.map_in_chunks(partial(network.apply, params), frames)


# TRAINING STATE


class TrainState(NamedTuple):
    """State of the learner."""

    params: dict  # "policy" and "value"
    opt_state: optax.OptState  # of the value network; with a penalty, of both
    key: jax.Array
    global_step: jax.Array  # int32 []: transitions learnt from
    updates: jax.Array  # int32 []
    reward_filter: ReturnFilter


STATE_SPECS = devices.partition_specs(TrainState, reward_filter=RETURN_FILTER_SPECS)


def adam_params(args: Args, params: dict) -> dict:
    """The parameters that Adam trains: the value network's; with a penalty, the policy's too."""
    return params if args.penalty else {"value": params["value"]}


def make_optimizer() -> optax.GradientTransformation:
    """Adam without the learning rate: `optimize` multiplies its updates by -learning_rate, from a schedule."""
    return optax.scale_by_adam(eps=1e-5)  # as in Baselines' PPO


def init_state(args: Args, agent: Agent) -> TrainState:
    """The learner's state before its first update, from `args.seed`."""
    key, *init_keys = jax.random.split(jax.random.PRNGKey(args.seed), 3)
    frames = jnp.zeros((1, 64, 64, 3 * len(args.stack_offsets)), jnp.uint8)
    networks_and_keys = zip(agent._asdict().items(), init_keys, strict=True)
    params = {name: network.init(init_key, frames) for (name, network), init_key in networks_and_keys}
    return TrainState(
        params=params,
        opt_state=make_optimizer().init(adam_params(args, params)),
        key=key,
        global_step=jnp.int32(0),
        updates=jnp.int32(0),
        reward_filter=init_return_filter(args.num_envs),
    )


# ROLLOUT


class Rollout(NamedTuple):
    """T steps of N environments, collected on the device."""

    frames: envs.Frames  # of T + 1 steps
    actions: jax.Array  # int32 [T, N]
    logits: jax.Array  # float32 [T, N, 15]
    values: jax.Array  # float32 [T, N]
    env_state: envs.EnvState  # after the last step; `envs.end_rollout` sets its history
    key: jax.Array
    t: jax.Array  # int32 []


ROLLOUT_SPECS = devices.partition_specs(
    Rollout,
    frames=TIME_ENV_SHARDED,
    actions=TIME_ENV_SHARDED,
    logits=TIME_ENV_SHARDED,
    values=TIME_ENV_SHARDED,
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
        env_state=env_state,
        key=jax.random.fold_in(jax.random.PRNGKey(envs.derive_seed(args.seed, 0)), i),
        t=jnp.int32(0),
    )


def act(args: Args, agent: Agent, params: dict, rollout: Rollout, obs: jax.Array, episode_step: jax.Array):
    """Chooses actions for obs uint8 [N, 3, 64, 64] and episode_step int32 [N]; returns the rollout and actions [N]."""
    t, env_state = rollout.t, rollout.env_state
    frames = rollout.frames.write(t, obs, episode_step)
    stacked = frames.stack(t)
    logits = apply_network(agent.policy, params["policy"], stacked)
    policy_keys, sticky_keys = envs.step_keys(rollout.key, t, env_state.env_ids)
    actions = jax.vmap(jax.random.categorical)(policy_keys, logits)
    played = envs.apply_sticky_actions(sticky_keys, args.sticky_actions, actions, env_state.last_action, episode_step)
    rollout = rollout._replace(
        frames=frames,
        actions=rollout.actions.at[t].set(actions),  # as chosen: sticky actions belong to the environment
        logits=rollout.logits.at[t].set(logits),
        values=rollout.values.at[t].set(apply_network(agent.value, params["value"], stacked)[:, 0]),
        env_state=env_state._replace(last_action=played),
        t=t + 1,
    )
    return rollout, played


def make_collect(args: Args, agent: Agent, mesh: Mesh) -> Callable:
    """Returns collect(vec_env, params, env_state, i, watch) -> Rollout, envs.Timesteps: it plays the i-th rollout,
    num_steps steps of each environment, each device with its own environments."""
    shard_map = partial(jax.shard_map, mesh=mesh, check_vma=False)
    begin = jax.jit(partial(begin_rollout, args), out_shardings=devices.shardings(mesh, ROLLOUT_SPECS))
    step = shard_map(
        partial(act, args, Agent(*map(networks.acting_agent, agent))),
        in_specs=(REPLICATED, ROLLOUT_SPECS, ENV_SHARDED, ENV_SHARDED),
        out_specs=(ROLLOUT_SPECS, ENV_SHARDED),
    )
    step = jax.jit(step, donate_argnums=1)
    end = shard_map(
        partial(envs.end_rollout, args), in_specs=(ROLLOUT_SPECS, ENV_SHARDED, ENV_SHARDED), out_specs=ROLLOUT_SPECS
    )
    end = jax.jit(end, donate_argnums=0)

    def collect(vec_env: envs.ReplayableVecEnv, params: dict, env_state: envs.EnvState, i: int, watch: runs.Stopwatch):
        params = {name: networks.acting_params(getattr(agent, name), params[name]) for name in agent._fields}
        rollout = begin(env_state, i)

        def choose_actions(obs, episode_step):
            nonlocal rollout
            rollout, actions = step(params, rollout, obs, episode_step)
            return actions

        timesteps = vec_env.play(choose_actions, args.num_steps, watch)
        return end(rollout, vec_env.obs, vec_env.episode_step), timesteps

    return collect


# ALGORITHM


def gae(rewards, values, terminated, truncated, *, gamma, gae_lambda) -> jax.Array:
    """Generalised advantage estimates of one sequence (Schulman et al. 2016, equation 16).

    Args:
      rewards: float32 [T], terminated, truncated: bool [T], of the transition from step t to t + 1.
      values: float32 [T + 1]. At a truncation the last frame's value stands for the rest of the episode.
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
    """Transitions to learn from: over a rollout [T, N]; in a minibatch [B]."""

    actions: jax.Array  # int32; all else is float32
    logits: jax.Array  # [..., 15], of the behaviour policy
    advantages: jax.Array  # normalised over the rollout
    returns: jax.Array  # targets of the value loss


def policy_loss_terms(logits: jax.Array, batch: Batch) -> dict[str, jax.Array]:
    """Per sample, float32 [B]: the negative surrogate objective (Schulman et al. 2015, equation 14), the KL divergence
    of the policy with logits [B, 15] from the old one, and its entropy."""
    chex.assert_equal_shape([logits, batch.logits])
    log_probs, old_log_probs = jax.nn.log_softmax(logits), jax.nn.log_softmax(batch.logits)
    log_ratio = jnp.take_along_axis(log_probs - old_log_probs, batch.actions[:, None], axis=-1)[:, 0]
    return {
        "policy_loss": -jnp.exp(log_ratio) * batch.advantages,
        "approx_kl": (jnp.exp(old_log_probs) * (old_log_probs - log_probs)).sum(axis=-1),  # exact; named as in CleanRL
        "entropy": -(jnp.exp(log_probs) * log_probs).sum(axis=-1),
    }


def policy_loss(network: Network, params: dict, minibatch: tuple[jax.Array, Batch]) -> dict[str, jax.Array]:
    """`policy_loss_terms` of a network on frames uint8 [B, 64, 64, C]; the policy loss is the "loss"."""
    frames, batch = minibatch
    terms = policy_loss_terms(apply_network(network, params, frames), batch)
    return terms | {"loss": terms["policy_loss"]}


def fisher_loss(network: Network, params: dict, minibatch: tuple, *, vector: dict) -> dict[str, jax.Array]:
    """A per-sample loss, float32 [B], whose gradient is the Fisher matrix times a vector v: J' F J v.

    J is the Jacobian of the logits by the parameters, J' its transpose, and F = diag(p) - p p' the Fisher matrix of a
    categorical in its logits (Schulman et al. 2015, appendix C). The loss is the logits' product with F J v, taken as a
    constant, so that its gradient is J' F J v.
    """
    apply = partial(network.apply, frames=minibatch[0])
    with forward_mode():  # without the encoder's custom_vjp rules, which `jax.jvp` refuses
        _, logits_dot = jax.jvp(apply, (jax.lax.stop_gradient(params),), (vector,))
    logits = apply(params)  # again, to be differentiated backwards by those rules
    probs = jax.nn.softmax(logits)
    fisher_dot = probs * (logits_dot - (probs * logits_dot).sum(axis=-1, keepdims=True))
    return {"loss": (logits * jax.lax.stop_gradient(fisher_dot)).sum(axis=-1)}


def conjugate_gradients(product: Callable, b: dict, iterations: int) -> dict:
    """Solves product(x) = b for a symmetric positive definite linear function of a pytree, from x = 0 (Hestenes and
    Stiefel 1952). `jax.scipy.sparse.linalg.cg` would compute one more product."""

    def step(carry, _):
        x, residual, direction, square = carry
        image = product(direction)
        # Once solved, the direction is 0: the bounds make 0 / 0 a 0. Negative curvature ends in NaN and stops the run.
        length = square / jnp.maximum(optax.tree.vdot(direction, image), 1e-30)
        x, residual = optax.tree.add_scale(x, length, direction), optax.tree.add_scale(residual, -length, image)
        new_square = optax.tree.vdot(residual, residual)
        direction = optax.tree.add_scale(residual, new_square / jnp.maximum(square, 1e-30), direction)
        return (x, residual, direction, new_square), None

    start = jax.tree.map(jnp.zeros_like, b), b, b, optax.tree.vdot(b, b)
    return jax.lax.scan(step, start, length=iterations)[0][0]


def line_search(evaluate: Callable, params: dict, step: dict, before: dict, *, max_kl: float, tries: int):
    """Backtracks from params + step, params + step / 2, ... to the first with a lower loss than `before` and a mean KL
    divergence of at most max_kl; evaluate(params) returns the means of the loss's terms, float32 [], as `before`'s.
    They must be over all devices, which then take the same number of steps.

    Returns parameters, their means, and the fraction of the step taken, float32 [] (0: rejected).
    """

    def accepted(means):
        return (means["loss"] < before["loss"]) & (means["approx_kl"] <= max_kl)

    def halve(carry):
        i, fraction, _ = carry
        return i + 1, fraction / 2, evaluate(optax.tree.add_scale(params, fraction / 2, step))

    # The loop begins with fraction 2 / 2, since `before` is not `accepted`; if it were, no step would be tried.
    start = jnp.int32(0), jnp.float32(2), before
    _, fraction, means = jax.lax.while_loop(lambda carry: (carry[0] < tries) & ~accepted(carry[2]), halve, start)
    fraction = jnp.where(accepted(means), fraction, 0.0)
    means = jax.tree.map(partial(jnp.where, fraction > 0), means, before)
    # Not params + 0 * step: where the step is not finite, that would be NaN.
    new_params = jax.tree.map(partial(jnp.where, fraction > 0), optax.tree.add_scale(params, fraction, step), params)
    return new_params, means, fraction


def compute_advantages(
    args: Args, agent: Agent, state: TrainState, rollout: Rollout, timesteps: envs.Timesteps, gamma: jax.Array
):
    """Shaped rewards and GAE: returns the state with its running statistics updated, a Batch [T, N] and metrics []."""
    mask = ~timesteps.is_reset
    reward_filter, rewards = prepare_rewards(args, state.reward_filter, timesteps, gamma)
    last_value = apply_network(agent.value, state.params["value"], rollout.frames.stack(args.num_steps))[:, 0]
    advantages = jax.vmap(partial(gae, gamma=gamma, gae_lambda=args.gae_lambda), 1, 1)(
        rewards, jnp.concatenate([rollout.values, last_value[None]]), timesteps.terminated, timesteps.truncated
    )
    returns = advantages + rollout.values
    mean, var = masked_moments(advantages, mask)
    _, return_var = masked_moments(returns, mask)
    batch = Batch(rollout.actions, rollout.logits, (advantages - mean) / jnp.sqrt(var + 1e-8), returns)
    metrics = {
        "charts/return_std": jnp.sqrt(reward_filter.var),
        "losses/explained_variance": 1 - var / jnp.maximum(return_var, 1e-8),  # advantages are returns - values
    }
    return state._replace(reward_filter=reward_filter), batch, metrics


class Data(NamedTuple):
    """A rollout to learn from."""

    frames: envs.Frames
    batch: Batch  # [T, N]
    mask: jax.Array  # bool [T, N]: False for junk steps

    def take(self, index: jax.Array) -> tuple[tuple[jax.Array, Batch], jax.Array]:
        """Samples `index` int32 [B] -> ((frames uint8 [B, 64, 64, C], Batch [B]), mask bool [B])."""
        # Of other shapes JAX would read wrong samples without an error: it clamps an index that is out of range.
        chex.assert_tree_shape_prefix(self.batch, self.mask.shape)
        time, env = index // self.mask.shape[1], index % self.mask.shape[1]
        return (self.frames.stack(time, env), jax.tree.map(lambda x: x[time, env], self.batch)), self.mask[time, env]


def mean_over(function: Callable, data: Data, order: jax.Array):
    """The mean over the samples `order` int32 [M, B], one minibatch of B after the other, in the memory of one.

    function(minibatch, mask [B]) -> a pytree of means over a minibatch on all devices. They are averaged here, weighted
    by each minibatch's number of transitions.
    """
    total = jnp.maximum(devices.psum(data.mask.reshape(-1)[order].sum()), 1)

    @jax.jit  # so that it is traced once, not for its shapes too
    def weighted(index):
        minibatch, mask = data.take(index)
        fraction = devices.psum(mask.sum()) / total
        return jax.tree.map(lambda x: fraction * x, function(minibatch, mask))

    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(weighted, order[0]))
    return jax.lax.scan(lambda sums, index: (jax.tree.map(jnp.add, sums, weighted(index)), None), zero, order)[0]


def fisher_order(args: Args, order: jax.Array) -> jax.Array:
    """The first `args.fisher_fraction` of this device's shuffled samples int32 [M, B], in as few rows as possible,
    since each costs a psum: int32 [rows, width]."""
    number = math.ceil(args.fisher_fraction * order.size)
    rows = -(-number // order.shape[1])
    width = min(-(-number // rows // 8) * 8, order.shape[1])  # in the CPU's chunks of 8, if there are so many
    return order.reshape(-1)[: rows * width].reshape(rows, width)


def trust_region_step(args: Args, agent: Agent, params: dict, data: Data, order: jax.Array) -> tuple[dict, dict]:
    """TRPO's step of the policy's parameters (Schulman et al. 2015, section 6 and appendix C); returns them and
    metrics [], the loss's terms after the step among them."""
    minibatch_loss, fisher_samples = partial(policy_loss, agent.policy), fisher_order(args, order)

    def evaluate(params):
        def minibatch_means(minibatch, mask):
            weight = mask / jnp.maximum(devices.psum(mask.sum()), 1)
            return devices.psum({name: (weight * x).sum() for name, x in minibatch_loss(params, minibatch).items()})

        return mean_over(minibatch_means, data, order)

    def fisher(vector):
        vector_loss = partial(fisher_loss, agent.policy, vector=vector)
        product = mean_over(lambda *part: devices.gradient(vector_loss, params, *part)[0], data, fisher_samples)
        return optax.tree.add_scale(product, args.damping, vector)

    grads, before = mean_over(lambda *part: devices.gradient(minibatch_loss, params, *part)[:2], data, order)
    descent = jax.tree.map(jnp.negative, grads)
    direction = conjugate_gradients(fisher, descent, args.cg_iterations)
    image = fisher(direction)
    # At this length the quadratic model of the KL divergence, damping included, is max_kl (appendix C).
    curvature = optax.tree.vdot(direction, image)
    # Not finite if this curvature is not positive; the line search then rejects the step.
    length = jnp.sqrt(2 * args.max_kl / curvature)
    step = optax.tree.scale(length, direction)
    params, means, taken = line_search(evaluate, params, step, before, max_kl=args.max_kl, tries=args.line_search_steps)
    del means["loss"]  # equals policy_loss; the logged loss is Adam's
    grad_norm = devices.global_norm(grads)
    residual = devices.global_norm(optax.tree.sub(descent, image)) / jnp.maximum(grad_norm, 1e-30)
    return params, means | {"grad_norm": grad_norm, "cg_residual": residual, "step_taken": taken}


def loss(args: Args, agent: Agent, params: dict, minibatch: tuple[jax.Array, Batch]) -> dict[str, jax.Array]:
    """Adam's loss: the value network's squared error; with a penalty, also the policy's surrogate and KL divergence
    (Schulman et al. 2017, equation 5).

    Returns its terms per sample, float32 [B]; `devices.gradient` weights them (0 for junk steps), averages them over
    samples and devices and differentiates "loss"; all means are logged. A sample's terms may depend on that sample
    only: on a CPU `loss` is called on 8 frames at a time. Batch statistics belong in `compute_advantages`.
    """
    frames, batch = minibatch
    value_loss = 0.5 * (apply_network(agent.value, params["value"], frames)[:, 0] - batch.returns) ** 2
    if not args.penalty:
        return {"loss": value_loss, "value_loss": value_loss}
    terms = policy_loss(agent.policy, params["policy"], minibatch)
    total = terms["policy_loss"] + args.penalty * terms["approx_kl"] + value_loss
    return terms | {"loss": total, "value_loss": value_loss}


def optimize(args: Args, agent: Agent, state: TrainState, data: Data, *, learning_rate: jax.Array, key: jax.Array):
    """Runs value_epochs epochs of Adam; returns all parameters, Adam's state and the last epoch's mean metrics."""
    adam = make_optimizer()

    def train_minibatch(carry, index):
        params, opt_state = carry
        grads, means, _ = devices.gradient(partial(loss, args, agent), params, *data.take(index))
        direction, opt_state = adam.update(grads, opt_state, params)
        params = optax.tree.add_scale(params, -learning_rate, direction)
        norm_name = "grad_norm" if args.penalty else "value_grad_norm"
        return (params, opt_state), means | {norm_name: devices.global_norm(grads)}

    def train_epoch(carry, key):
        carry, means = jax.lax.scan(train_minibatch, carry, shuffled_minibatches(args, data.mask.size, key))
        return carry, jax.tree.map(jnp.mean, means)

    start = adam_params(args, state.params), state.opt_state
    (params, opt_state), means = jax.lax.scan(train_epoch, start, jax.random.split(key, args.value_epochs))
    return state.params | params, opt_state, jax.tree.map(lambda x: x[-1], means)


def shuffled_minibatches(args: Args, samples: int, key: jax.Array) -> jax.Array:
    """This device's samples in an order of its own, in minibatches: int32 [M, B]."""
    return jax.random.permutation(devices.fold_in_axis_index(key), samples).reshape(args.num_minibatches, -1)


def update(args: Args, agent: Agent, state: TrainState, rollout: Rollout, timesteps: envs.Timesteps):
    """One TRPO update, on each device's part of the rollout: returns the next TrainState and metrics, float32 []."""
    learning_rate, gamma = (runs.parse_schedule(text)(state.global_step) for text in (args.learning_rate, args.gamma))
    key, policy_key, value_key = jax.random.split(state.key, 3)
    mask = ~timesteps.is_reset
    state, batch, metrics = compute_advantages(args, agent, state, rollout, timesteps, gamma)
    data = Data(rollout.frames, batch, mask)
    policy_means = {}
    if not args.penalty:
        order = shuffled_minibatches(args, mask.size, policy_key)
        policy, policy_means = trust_region_step(args, agent, state.params["policy"], data, order)
        state = state._replace(params=state.params | {"policy": policy})
    params, opt_state, means = optimize(args, agent, state, data, learning_rate=learning_rate, key=value_key)
    metrics |= {f"losses/{name}": value for name, value in (means | policy_means).items()} | {
        "losses/param_norm": devices.global_norm(params),  # not finite if the last step diverged
        "charts/learning_rate": learning_rate,
        "charts/gamma": gamma,
    }
    state = state._replace(
        params=params,
        opt_state=opt_state,
        key=key,
        global_step=state.global_step + devices.psum(mask.sum()),
        updates=state.updates + 1,
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
        logits = apply_network(agent.policy, params, frames)
        return jax.vmap(jax.random.categorical)(keys, logits), hidden_state

    return envs.jit_policy(mesh, sample_actions)


def load_params(args: Args, agent: Agent, run_dir: str) -> dict:
    """{"params", "global_step"} of a run's newest checkpoint or an exported agent."""
    return agents.load(run_dir, partial(init_state, args, agent), lambda state: {"params": state.params["policy"]})


# MAIN


def init_checkpoint(args: Args, agent: Agent) -> dict:
    """What a new run starts from; its checkpoints also hold the environments and the episodes' statistics."""
    env_ids = devices.local_env_ids(args)
    return {"state": init_state(args, agent), "env_state": envs.init_env_state(env_ids, args.stack_offsets)}


def main(args: Args) -> runs.Run:
    """Trains; returns the run, finished or stopped by a signal (`run.stop`)."""
    runs.check_args(args, SCRIPT)
    agent, mesh = make_agent(args), devices.make_mesh(args)
    collect, update = make_collect(args, agent, mesh.local_mesh), make_update(args, agent, mesh)
    policy = make_policy(args, agent, mesh.local_mesh)

    with (
        runs.Run(args, SCRIPT, mesh, partial(init_checkpoint, args, agent)) as run,
        closing(envs.make_train_envs(args)) as vec_env,
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
            per_host = {"env_state": env_state, "snapshot": vec_env.snapshot().save(), "episodes": episodes.save()}
            run.save(step, {"state": state}, per_host)

        while True:
            params, i = multihost.local_replica(mesh, state.params), int(state.updates)
            envs.evaluate_if_due(args, mesh, run, step, partial(policy, params["policy"]))
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
