"""Ape-X DQN on Procgen: actors that explore differently fill a prioritised replay, one learner samples from it.

Horgan et al. 2018 (arXiv 1803.00933): dueling streams, double Q-learning, n-step returns; with a distribution of values
(C51). The defaults follow a 2020 Procgen competition entry (differences: docs/apex.md). Flags add parts of Beyond the
Rainbow (Clark et al. 2025): IQN's quantiles, Munchausen targets, spectral normalisation, adaptive max pooling; and
policies with different exploration bonuses and discounts (Never Give Up, Badia et al. 2020). Try:

    python apex_procgen.py --env-id coinrun
    python apex_procgen.py --env-id coinrun --n-step 3 --num-atoms 1 --augment translate --buffer-size 50000
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from annotated_types import Interval
from jax.sharding import Mesh

from common import agents, augment, bonus, devices, envs, networks, offpolicy, replay, runs
from common.devices import ENV_SHARDED, REPLICATED, TIME_ENV_SHARDED
from common.files import check
from common.flags import (
    NonNegativeFloat,
    NonNegativeSchedule,
    PositiveFloat,
    PositiveInt,
    Size,
    StepCount,
    UnitInterval,
)
from common.rewards import masked_moments

SCRIPT = Path(__file__).stem
EVALUATION_EPSILON = 0.001  # Horgan et al. 2018, appendix C
# Updates of RND's predictor before its errors count as bonus: the first errors are hundreds of times as large, and the
# running standard deviation that normalises the bonus never forgets them.
PREDICTOR_WARMUP = 500


@dataclass(frozen=True)
class Args(
    envs.GameArgs, networks.EncoderArgs, augment.AugmentArgs, offpolicy.OffPolicyArgs, bonus.BonusArgs, runs.RunArgs
):
    # The shapes and meaning of the network's outputs, and the rewards in the replay buffer.
    FIXED: ClassVar = (
        "num_atoms", "v_min", "v_max", "num_quantiles", "dueling", "num_policies", "rnd_coef", "rnd_normalize",
    )  # fmt: skip

    hidden: Size = 512
    """units of the dense layer of each stream"""
    dueling: bool = True
    """dueling streams for the state's value and the advantages, each with a dense layer of its own"""
    total_timesteps: StepCount = 8_000_000
    """total number of environment steps"""
    num_envs: Size = 24
    n_step: PositiveInt = 20
    epsilon: UnitInterval = 0.4
    """environment i of N plays a random action with probability epsilon^(1 + i / (N - 1) * epsilon_alpha)"""
    epsilon_alpha: NonNegativeFloat = 7.0
    """spread of exploration in --epsilon's formula; 0 for the same epsilon in all environments"""
    num_policies: Size = 1
    """policies with their own RND bonus and discount (Never Give Up), dealt to environments in turn; 0 is evaluated"""
    rnd_coef: NonNegativeFloat = 0.3
    """with --num-policies 2 or more: RND's coefficient in the last policy; 0 in policy 0, a sigmoid between them"""
    rnd_normalize: bool = True
    min_gamma: UnitInterval = 0.97
    """with --num-policies 2 or more: discount of the last policy; log(1 - discount) is linear from gamma to it"""
    num_atoms: Annotated[int, Interval(ge=1, le=1024)] = 99
    """atoms of the distribution of values (C51); 1 for its mean alone, learnt with Huber's loss"""
    v_min: Annotated[float, Interval(ge=-1e9, le=1e9)] = -5.0
    """lowest atom: the least discounted return (of the rewards learnt from) that can be represented; 0 or less"""
    v_max: Annotated[float, Interval(ge=-1e9, le=1e9)] = 20.0
    """highest atom: the largest discounted return (of the rewards learnt from) that can be represented; 0 or more"""
    num_quantiles: Annotated[int, Interval(ge=0, le=1024)] = 0
    """learn this many quantiles of the distribution of values, drawn anew in each update (IQN); 0 to learn atoms"""
    munchausen_alpha: UnitInterval = 0.0
    """adds alpha max(tau log pi(a|s), -1) to rewards, pi the target's softmax policy; not with atoms; 0 for none"""
    munchausen_tau: PositiveFloat = 0.03
    """temperature tau of Munchausen's softmax policy; its soft value replaces double Q-learning's"""
    cql_alpha: NonNegativeFloat = 0.0
    """coefficient of conservative Q-learning's penalty, log sum_b exp Q(s, b) - Q(s, a), in the loss; 0 for none"""
    double_q: bool = True
    """choose the next action by the online network, and take its value from the target network"""
    target_network_frequency: Annotated[int, Interval(ge=1, le=2**31 - 1)] = 150
    """updates between copies to the target network"""
    learning_rate: NonNegativeSchedule = "1e-4"
    """Adam's learning rate: a number, or "step:value,..." in environment steps, linear between"""
    max_grad_norm: NonNegativeFloat = 40.0
    """maximum global norm of the gradient; 0 for no clipping"""
    adam_eps: PositiveFloat = 1.5e-4
    """Adam's epsilon"""
    l2: NonNegativeFloat = 0.0
    """coefficient of the L2 penalty, the squared norm of all convolution kernels (not part of the logged loss)"""

    @property
    def with_atoms(self) -> bool:
        """Whether values are distributions on fixed atoms (C51)."""
        return self.num_atoms > 1 and not self.num_quantiles

    def check(self) -> None:
        """Raises UsageError for inconsistent flags; the inherited groups check their own."""
        differ = self.num_envs > 1 and 0 < self.epsilon < 1
        runs.check_needs(self, differ, "two environments or more and an --epsilon between 0 and 1", ("epsilon_alpha",))
        runs.check_needs(self, not self.num_quantiles, "--num-quantiles 0", ("num_atoms",))
        runs.check_needs(self, self.with_atoms, "--num-atoms 2 or more and --num-quantiles 0", ("v_min", "v_max"))
        check(self.v_min <= 0, f"--v-min {self.v_min}: must be 0 or less: values start near 0")
        check(self.v_max >= 0, f"--v-max {self.v_max}: must be 0 or more: values start near 0")
        wide_enough = self.v_max - self.v_min >= 1e-3
        check(wide_enough, f"--v-max {self.v_max}: must be above --v-min, {self.v_min}, by 0.001 or more")
        check(
            not (self.munchausen_alpha and self.with_atoms),
            f"--munchausen-alpha {self.munchausen_alpha}: moves values off a fixed support; give --num-quantiles 1 or "
            "more, or --num-atoms 1, too",
        )
        runs.check_needs(self, self.munchausen_alpha, "--munchausen-alpha", ("munchausen_tau",))
        runs.check_needs(self, not self.munchausen_alpha, "--munchausen-alpha 0", ("double_q",))
        count, several = self.num_policies, self.num_policies > 1
        runs.check_needs(self, several, "--num-policies 2 or more", ("rnd_coef", "rnd_normalize", "min_gamma"))
        check(count <= self.num_envs, f"--num-policies {count}: give at most --num-envs, {self.num_envs}")
        check(self.rnd_coef or not several, f"--rnd-coef {self.rnd_coef}: must be above 0 with --num-policies {count}")
        check(self.gamma < 1 or not several, f"--gamma {self.gamma}: must be below 1 with --num-policies {count}")
        above = several and self.min_gamma > self.gamma
        check(not above, f"--min-gamma {self.min_gamma}: must be at most --gamma, {self.gamma}")


# NETWORK


class Agent(nn.Module):
    """Action values, or their distributions by atoms or quantiles, in dueling streams (Wang et al. 2016)."""

    encoder: nn.Module
    hidden: int
    dropout: float
    dueling: bool
    support: tuple[float, ...]  # the atoms; (0.0,) for plain Q-values or quantiles
    num_quantiles: int
    num_policies: int

    @nn.compact
    def __call__(
        self,
        frames: jax.Array,
        keys: jax.Array | None = None,
        taus: jax.Array | None = None,
        policies: jax.Array | None = None,
    ) -> jax.Array:
        """Frames uint8 [B, 64, 64, C] and dropout keys uint32 [B, 2] -> float32 [B, 15, atoms]: the atoms' logits or,
        of one atom, values. With num_quantiles -> [B, 15, N]: quantiles at fractions `taus` float32 [B, N], by default
        the midpoints of N equal parts of 0 to 1. With several policies, for those of index `policies` int32 [B] (0 if
        not given)."""
        x = networks.dropout(self.encoder(frames), keys, self.dropout)
        num_atoms = len(self.support)
        dense = partial(nn.Dense, precision="highest")  # no TF32 on a GPU
        if self.num_quantiles:
            if taus is None:
                taus = jnp.broadcast_to(
                    (jnp.arange(self.num_quantiles) + 0.5) / self.num_quantiles, (len(x), self.num_quantiles)
                )
            cosines = jnp.cos(jnp.pi * jnp.arange(64) * taus[..., None])  # Dabney et al. 2018b (IQN), equation 4
            x = x[:, None] * nn.relu(dense(x.shape[1])(cosines))  # [B, N, features]
        if self.num_policies > 1:
            one_hot = nn.one_hot(jnp.zeros(len(x), jnp.int32) if policies is None else policies, self.num_policies)
            one_hot = jnp.expand_dims(one_hot, range(1, x.ndim - 1))  # the same for all quantiles
            x = jnp.concatenate([x, jnp.broadcast_to(one_hot, (*x.shape[:-1], self.num_policies))], axis=-1)

        def stream(outputs, bias_init=nn.initializers.zeros):
            hidden = nn.relu(dense(self.hidden)(x))
            y = dense(outputs * num_atoms, bias_init=bias_init)(hidden)
            return y.mT if self.num_quantiles else y.reshape(len(x), outputs, num_atoms)

        bias_init = partial(init_value_bias, self.support)
        if not self.dueling:
            return stream(envs.NUM_ACTIONS, bias_init)
        advantages = stream(envs.NUM_ACTIONS)
        return stream(1, bias_init) + advantages - advantages.mean(axis=1, keepdims=True)  # Wang et al., equation 9


def init_value_bias(support: Sequence[float], key: jax.Array, shape: tuple[int], dtype=jnp.float32) -> jax.Array:
    """Initialises biases [outputs * atoms] so that values start near 0, like plain Q-values (at 5 % of the support if
    its lowest atom is 0). From mid-support they would fall slowly, since targets bootstrap from them.

    The logits are minus Huber's loss of an atom's distance from 0, in twentieths of the support (a Gaussian's tails are
    too low to be learnt). If atoms are more than a twentieth apart, the two around 0 share the probability by nearness.
    """
    num_atoms = len(support)
    if num_atoms == 1:
        return jnp.zeros(shape, dtype)
    spacing, width = support[1] - support[0], 0.05 * (support[-1] - support[0])
    z = np.abs(support) / width
    bell = -np.where(z < 1, z**2 / 2, z - 0.5)  # as Huber's loss
    nearest = np.clip(1 - np.abs(support) / spacing, 0, 1)
    logits = bell if spacing <= width else np.log(nearest + 0.01 / num_atoms)
    return jnp.tile(jnp.asarray(logits, dtype), shape[0] // num_atoms)


def make_agent(args: Args) -> Agent:
    """The network that these flags describe."""
    encoder = networks.make_encoder(replace(args, hidden=0))  # the streams have the dense layers
    support = tuple(np.linspace(args.v_min, args.v_max, args.num_atoms).tolist()) if args.with_atoms else (0.0,)
    return Agent(encoder, args.hidden, args.dropout, args.dueling, support, args.num_quantiles, args.num_policies)


def mean_q(support: Sequence[float], outputs: jax.Array) -> jax.Array:
    """The network's outputs float32 [..., atoms or quantiles] -> Q-values float32 [...]: the mean over quantiles, or
    over the support by the atoms' softmax."""
    if len(support) == 1:
        return outputs.mean(axis=-1)
    return jnp.matmul(nn.softmax(outputs), jnp.array(support), precision="highest")


# TRAINING STATE


class Curiosity(NamedTuple):
    """RND's state, for several policies."""

    predictor: dict
    opt_state: optax.OptState  # of the predictor
    bonus: bonus.Bonus  # RND's fixed random network and its running statistics


CURIOSITY_SPECS = devices.partition_specs(Curiosity, bonus=bonus.BONUS_SPECS)


class TrainState(NamedTuple):
    """State of the learner."""

    params: dict
    target_params: dict
    opt_state: optax.OptState
    global_step: jax.Array  # int32 []: transitions played
    updates: jax.Array  # int32 []
    iterations: jax.Array  # int32 []: main-loop iterations so far
    learn_from: jax.Array  # int32 []: the step at which learning starts; later after a resume without the buffer
    curiosity: Curiosity | None  # None for a single policy


def state_specs(args: Args):
    """The PartitionSpecs of TrainState: replicated, but for each environment's return of bonuses."""
    curiosity = REPLICATED if args.num_policies == 1 else CURIOSITY_SPECS
    return devices.partition_specs(TrainState, curiosity=curiosity)


def make_optimizer(args: Args) -> optax.GradientTransformation:
    """Adam without the learning rate: `train_step` multiplies its updates by -learning_rate, from a schedule."""
    return optax.chain(devices.clip_by_global_norm(args.max_grad_norm), optax.scale_by_adam(eps=args.adam_eps))


def init_state(args: Args, agent: Agent) -> TrainState:
    """The learner's state before its first update, from `args.seed`."""
    frames = jnp.zeros((1, 64, 64, 3 * len(args.stack_offsets)), jnp.uint8)
    params = agent.init(jax.random.PRNGKey(args.seed), frames)
    curiosity = None
    if args.num_policies > 1:
        predictor, bonus_state = bonus.init(args, jax.random.PRNGKey(args.seed), frames)
        curiosity = Curiosity(predictor, optax.scale_by_adam().init(predictor), bonus_state)
    return TrainState(
        params=params,
        target_params=jax.tree.map(jnp.copy, params),
        opt_state=make_optimizer(args).init(params),
        global_step=jnp.int32(0),
        updates=jnp.int32(0),
        iterations=jnp.int32(0),
        learn_from=jnp.int32(args.learning_starts),
        curiosity=curiosity,
    )


# CURIOSITY: policy j maximises the return of r + beta_j x RND's bonus, discounted by gamma_j, as in Never Give Up
# (Badia et al. 2020a, arXiv 2002.06038) and Agent57 (Badia et al. 2020b, arXiv 2003.13350), without an episodic bonus.


def policies_of(args: Args, env_ids: jax.Array) -> jax.Array | None:
    """The policies int32 [n] of environments env_ids int32 [n]; None if there is a single one. The last environment,
    whose epsilon is the smallest, plays policy 0."""
    return None if args.num_policies == 1 else (args.num_envs - 1 - env_ids) % args.num_policies


def betas(args: Args) -> np.ndarray:
    """The coefficients of the policies' bonus, float32 [policies] (Never Give Up, appendix A; Agent57, G.1)."""
    j, middle = np.arange(args.num_policies), args.num_policies - 2
    sigmoid = 1 / (1 + np.exp(-10 * (2 * j - middle) / max(middle, 1)))
    sigmoid[0], sigmoid[-1] = 0, 1
    return np.float32(args.rnd_coef * sigmoid)


def gammas(args: Args) -> np.ndarray:
    """The policies' discounts, float32 [policies]: log(1 - gamma_j) is evenly spaced (Never Give Up, appendix A)."""
    return np.float32(1 - np.geomspace(1 - args.gamma, 1 - args.min_gamma, args.num_policies))


def make_intrinsic_rewards(args: Args, mesh: Mesh) -> Callable:
    """Returns intrinsic_rewards(curiosity, rollouts) -> Curiosity, replay.Policies of the N environments, beta_j times
    the bonus of reaching each frame float32 [T, N], and metrics; it moves the rollouts to the mesh. A transition keeps
    the bonus that it had when it was inserted."""

    def intrinsic_rewards(curiosity, rollouts):
        policies = policies_of(args, envs.join_envs([rollout.env_state.env_ids for rollout in rollouts], axis=0))
        frames = envs.join_envs([rollout.frames for rollout in rollouts], axis=1)
        mask = ~frames.is_first & (curiosity.opt_state.count >= PREDICTOR_WARMUP)
        bonus_state, intrinsic = bonus.of_frames(
            args, curiosity.bonus, curiosity.predictor, frames=frames, mask=mask, gamma=args.gamma
        )
        metrics = {"charts/intrinsic_reward": masked_moments(intrinsic, mask)[0]}
        gamma, beta = jnp.array(gammas(args))[policies], jnp.array(betas(args))[policies]
        return curiosity._replace(bonus=bonus_state), replay.Policies(policies, gamma), beta * intrinsic, metrics

    rollout_specs = (offpolicy.ROLLOUT_SPECS,) * args.num_actors
    function = jax.jit(
        jax.shard_map(
            intrinsic_rewards,
            mesh=mesh,
            in_specs=(CURIOSITY_SPECS, rollout_specs),
            out_specs=(CURIOSITY_SPECS, ENV_SHARDED, TIME_ENV_SHARDED, REPLICATED),
            check_vma=False,
        )
    )

    def move_and_compute(curiosity, rollouts):
        return function(curiosity, jax.device_put(rollouts, devices.shardings(mesh, rollout_specs)))

    return move_and_compute


def train_predictor(curiosity: Curiosity, frames: jax.Array, learning_rate: jax.Array) -> tuple[Curiosity, jax.Array]:
    """One step of RND's predictor, by an Adam of its own, on frames uint8 [B, 64, 64, C]; returns its mean loss too,
    float32 []."""

    def loss(predictor, frames):
        return {"loss": bonus.novelty(curiosity.bonus.target, predictor, frames)}

    grads, means, _ = devices.gradient(loss, curiosity.predictor, frames, jnp.ones(len(frames)))
    direction, opt_state = optax.scale_by_adam().update(grads, curiosity.opt_state)
    predictor = optax.tree.add_scale(curiosity.predictor, -learning_rate, direction)
    return curiosity._replace(predictor=predictor, opt_state=opt_state), means["loss"]


# ACTING


def epsilons(args: Args) -> np.ndarray:
    """Each environment's probability of a random action, float32 [N] (Horgan et al. 2018, section 4)."""
    fraction = np.arange(args.num_envs) / max(args.num_envs - 1, 1)
    return np.float32(args.epsilon ** (1 + fraction * args.epsilon_alpha))


def epsilon_greedy(keys: jax.Array, q_values: jax.Array, epsilon: jax.Array) -> jax.Array:
    """Greedy actions int32 [N] for q_values float32 [N, 15], or with probability epsilon [N] random ones; keys are
    uint32 [N, 2]."""

    def choose_action(key, q_values, epsilon):
        explore_key, action_key = jax.random.split(key)
        random_action = jax.random.randint(action_key, (), 0, envs.NUM_ACTIONS)
        return jnp.where(jax.random.bernoulli(explore_key, epsilon), random_action, q_values.argmax())

    return jax.vmap(choose_action)(keys, q_values, epsilon)


def act(args: Args, agent: Agent, params: dict, rollout: offpolicy.Rollout, obs: jax.Array, episode_step: jax.Array):
    """Chooses actions for obs uint8 [n, 3, 64, 64] and episode_step int32 [n]; returns the rollout and actions [n]."""
    t, env_ids = rollout.t, rollout.env_state.env_ids
    frames = rollout.frames.write(t, obs, episode_step)

    def outputs(frames_and_policies):
        frames, policies = frames_and_policies
        return agent.apply(params, frames, policies=policies)

    inputs = frames.stack(t), policies_of(args, env_ids)
    q_values = mean_q(agent.support, devices.map_in_chunks(outputs, inputs))
    policy_keys, sticky_keys = envs.step_keys(rollout.key, t, env_ids)
    actions = epsilon_greedy(policy_keys, q_values, jnp.array(epsilons(args))[env_ids])
    return offpolicy.record_step(
        args, rollout._replace(frames=frames), episode_step, actions,
        q_values=q_values, state_value=state_value(args, q_values), sticky_keys=sticky_keys,
    )  # fmt: skip


# ALGORITHM


def state_value(args: Args, q_values: jax.Array) -> jax.Array:
    """State values float32 [...] from Q-values [..., 15]: the largest or, with Munchausen, the softmax policy's
    mean value plus tau times its entropy (Vieillard et al. 2020, the sum over actions in equation 3)."""
    if not args.munchausen_alpha:
        return q_values.max(axis=-1)
    return args.munchausen_tau * jax.nn.logsumexp(q_values / args.munchausen_tau, axis=-1)


def quantile_loss(taus: jax.Array, quantiles: jax.Array, targets: jax.Array) -> jax.Array:
    """The quantile Huber loss float32 [B] (Dabney et al. 2018b, equation 3, kappa 1).

    Args:
      taus: float32 [B, N], the quantile fractions.
      quantiles: float32 [B, N].
      targets: float32 [B, M], samples of the distribution to learn.
    """
    chex.assert_equal_shape([taus, quantiles])
    td_errors = targets[:, None, :] - quantiles[:, :, None]
    losses = jnp.abs(taus[:, :, None] - (td_errors < 0)) * optax.huber_loss(td_errors)
    return losses.mean(axis=2).sum(axis=1)


def project(support: jax.Array, returns: jax.Array, discounts: jax.Array, probs: jax.Array) -> jax.Array:
    """Projects the distribution of return + discount * value onto the support (Bellemare et al. 2017, equation 7).

    Args:
      support: float32 [atoms], evenly spaced.
      returns, discounts: float32 [B].
      probs: float32 [B, atoms], of the value.

    Returns float32 [B, atoms].
    """
    chex.assert_rank([support, returns, discounts, probs], [1, 1, 1, 2])
    atoms = jnp.clip(returns[:, None] + discounts[:, None] * support, support[0], support[-1])
    weights = 1 - jnp.abs(atoms[:, None, :] - support[:, None]) / (support[1] - support[0])  # [B, to, from]
    return jnp.einsum("btf,bf->bt", jnp.clip(weights, 0, 1), probs, precision="highest")


class Outputs(NamedTuple):
    """Network outputs for B transitions: distributions by K atoms or quantiles, or Q-values (K = 1)."""

    online: jax.Array  # float32 [B, 15, K], of the online network
    next_target: jax.Array  # float32 [B, 15, K], of the target network for the next frames
    next_selector: jax.Array  # float32 [B, 15, K], for the next frames: their greedy action or Munchausen's policy
    target: jax.Array | None  # float32 [B, 15, K], of the target network for the current frames; for Munchausen
    taus: jax.Array | None  # float32 [B, K], the fractions of the quantiles `online`


def bootstrap(args: Args, support: Sequence[float], outputs: Outputs, batch: replay.Batch):
    """Returns the parts of the TD target: n-step returns float32 [B], and the target network's outputs for the next
    state float32 [B, K].

    With Munchausen (Vieillard et al. 2020, arXiv 2007.14430, equation 3) alpha max(tau log pi(a | s), -1) is added to
    the first of the n rewards, and the next state's outputs are their mean under pi plus tau times pi's entropy.
    """
    if not args.munchausen_alpha:
        actions = mean_q(support, outputs.next_selector).argmax(axis=1)
        return batch.returns, outputs_of(outputs.next_target, actions)
    tau = args.munchausen_tau
    scaled_log_policy = tau * nn.log_softmax(mean_q(support, outputs.target) / tau)
    scaled_log_prob = jnp.take_along_axis(scaled_log_policy, batch.actions[:, None], axis=1)[:, 0]
    returns = batch.returns + args.munchausen_alpha * jnp.clip(scaled_log_prob, -1, 0)
    next_log_policy = nn.log_softmax(mean_q(support, outputs.next_selector) / tau)[..., None]
    return returns, (jnp.exp(next_log_policy) * (outputs.next_target - tau * next_log_policy)).sum(axis=1)


def outputs_of(outputs: jax.Array, actions: jax.Array) -> jax.Array:
    """The outputs float32 [B, K] for actions int32 [B], of those for all actions [B, 15, K]."""
    return jnp.take_along_axis(outputs, actions[:, None, None], axis=1)[:, 0]


def q_loss_terms(args: Args, support: Sequence[float], outputs: Outputs, batch: replay.Batch) -> dict[str, jax.Array]:
    """The terms of the Q-learning loss of n-step transitions per sample, float32 [B].

    The loss is the cross-entropy with the projected target for atoms (Bellemare et al. 2017, algorithm 1),
    `quantile_loss` for quantiles, and Huber's loss for plain Q-values, as in DQN (Mnih et al. 2015). The TD error, for
    priorities, is that of mean Q-values (over the quantiles drawn); with atoms its target is the projected one's mean,
    since a return beyond the support cannot be learnt. (The actors' first estimate has neither that projection nor
    Munchausen's reward.) Conservative Q-learning (Kumar et al. 2020, arXiv 2006.04779, equation 4, CQL(H)) lowers mean
    Q-values by their softmax weight and raises the played action's.
    """
    chex.assert_equal_shape([outputs.online, outputs.next_target, outputs.next_selector])
    chex.assert_equal_shape([batch.actions, batch.returns, batch.discounts, batch.weight])
    chosen = outputs_of(outputs.online, batch.actions)
    returns, next_outputs = jax.lax.stop_gradient(bootstrap(args, support, outputs, batch))
    q_value = mean_q(support, chosen)
    # Each of the three losses has its own target; with atoms the projected one gives the TD error too.
    td_errors = returns + batch.discounts * mean_q(support, next_outputs) - q_value
    if args.num_quantiles:
        losses = quantile_loss(outputs.taus, chosen, returns[:, None] + batch.discounts[:, None] * next_outputs)
    elif len(support) == 1:
        losses = optax.huber_loss(td_errors)
    else:
        target = project(jnp.array(support), returns, batch.discounts, nn.softmax(next_outputs))
        td_errors = jnp.matmul(target, jnp.array(support), precision="highest") - q_value
        losses = -(target * nn.log_softmax(chosen)).sum(axis=-1)
    terms = {"q_values": q_value, "td_error": jnp.abs(td_errors)}
    if args.cql_alpha:
        terms["cql_loss"] = jax.nn.logsumexp(mean_q(support, outputs.online), axis=1) - q_value
        losses += args.cql_alpha * terms["cql_loss"]
    chex.assert_equal_shape([losses, td_errors, batch.weight])
    return {"loss": batch.weight * losses} | terms


def loss(args: Args, agent: Agent, params: dict, batch: replay.Batch, *, target_params: dict) -> dict[str, jax.Array]:
    """Ape-X's loss.

    Returns its terms per sample, float32 [B]; `devices.gradient` averages them over samples and devices and
    differentiates "loss"; all means are logged. "td_error" gives the sample's new priority, `replay.insert` its first.
    A sample's terms may depend on that sample only: on a CPU `loss` is called on 8 samples at a time.
    """
    keys, next_keys, dropout_keys, *tau_keys = (
        jax.vmap(jax.random.fold_in, in_axes=(0, None))(batch.keys, i) for i in range(5)
    )
    frames = augment.augment(args, keys, batch.frames)
    next_frames = augment.augment(args, next_keys, batch.next_frames)
    taus = next_taus = None
    if args.num_quantiles:
        taus, next_taus = (jax.vmap(lambda key: jax.random.uniform(key, (args.num_quantiles,)))(k) for k in tau_keys)
    selector_params = params if args.double_q and not args.munchausen_alpha else target_params
    apply = partial(agent.apply, policies=batch.policies)
    outputs = Outputs(
        online=apply(params, frames, dropout_keys, taus),
        next_target=apply(target_params, next_frames, taus=next_taus),
        # With evenly spaced quantiles: an action chosen by the same draws that value it would be valued too high.
        next_selector=apply(selector_params, next_frames),
        target=apply(target_params, frames) if args.munchausen_alpha else None,
        taus=taus,
    )
    return q_loss_terms(args, agent.support, outputs, batch)


def train_step(args: Args, agent: Agent, state: TrainState, batch: replay.Batch) -> tuple[TrainState, jax.Array, dict]:
    """One update: returns the next state, the absolute TD errors float32 [B] for `replay.set_priorities`, and metrics,
    float32 []."""
    learning_rate = runs.parse_schedule(args.learning_rate)(state.global_step)
    batch_loss = partial(loss, args, agent, target_params=state.target_params)
    # Weights of 1, since `loss` has the importance weights already; `gradient` would divide by their sum.
    grads, means, terms = devices.gradient(batch_loss, state.params, batch, jnp.ones_like(batch.returns))
    grads = networks.add_l2(grads, state.params, args.l2)
    direction, opt_state = make_optimizer(args).update(grads, state.opt_state, state.params)
    params = optax.tree.add_scale(state.params, -learning_rate, direction)
    updates = state.updates + 1
    sync = updates % args.target_network_frequency == 0
    target_params = jax.tree.map(lambda new, old: jnp.where(sync, new, old), params, state.target_params)
    metrics = {f"losses/{name}": value for name, value in means.items()} | {
        "losses/grad_norm": devices.global_norm(grads),
        "losses/param_norm": devices.global_norm(params),  # not finite if the last step diverged
        "charts/learning_rate": learning_rate,
    }
    if args.num_policies > 1:
        curiosity, metrics["losses/rnd_loss"] = train_predictor(state.curiosity, batch.one_step_frames, learning_rate)
        state = state._replace(curiosity=curiosity)
    state = state._replace(params=params, target_params=target_params, opt_state=opt_state, updates=updates)
    return state, terms["td_error"], metrics


def make_update(args: Args, agent: Agent, mesh: Mesh) -> Callable:
    """Returns the jitted update(state, buffer, num_updates, beta) -> TrainState, Replay, metrics, which donates the
    state and the buffer: each device samples from its own part of the buffer (see `offpolicy.sample`)."""
    return jax.jit(
        jax.shard_map(
            partial(offpolicy.train_steps, args, partial(train_step, args, agent)),
            mesh=mesh,
            in_specs=(state_specs(args), replay.REPLAY_SPECS, REPLICATED, REPLICATED),
            out_specs=(state_specs(args), replay.REPLAY_SPECS, REPLICATED),
            check_vma=False,
        ),
        donate_argnums=(0, 1),
    )


def make_update_on_batch(args: Args, agent: Agent, mesh: Mesh) -> Callable:
    """Returns the jitted `train_step`(state, batch), which donates the state: for a batch sampled on the host."""
    return jax.jit(
        jax.shard_map(
            partial(train_step, args, agent),
            mesh=mesh,
            in_specs=(state_specs(args), ENV_SHARDED),
            out_specs=(state_specs(args), ENV_SHARDED, REPLICATED),
            check_vma=False,
        ),
        donate_argnums=0,
    )


# EVALUATION


def make_policy(args: Args, agent: Agent, mesh: Mesh) -> Callable:
    """Returns policy(params, ...), the policy that `envs.play_episodes` calls; EVALUATION_EPSILON-greedy."""

    def choose_actions(params, frames, episode_step, keys, hidden_state):
        q_values = mean_q(agent.support, devices.map_in_chunks(partial(agent.apply, params), frames))
        return epsilon_greedy(keys, q_values, jnp.full(len(frames), EVALUATION_EPSILON)), hidden_state

    return envs.jit_policy(mesh, choose_actions)


def load_params(args: Args, agent: Agent, run_dir: str) -> dict:
    """{"params", "global_step"} of a run's newest checkpoint or an exported agent."""
    return agents.load(run_dir, partial(init_state, args, agent), lambda state: {"params": state.params})


# MAIN


def init_checkpoint(args: Args, agent: Agent) -> dict:
    """What a new run starts from; its checkpoints also hold the actors, the episodes' statistics and, unless
    --no-save-replay, the replay buffer."""
    return {"state": init_state(args, agent)}


def main(args: Args) -> runs.Run:
    """Trains; returns the run, finished or stopped by a signal (`run.stop`)."""
    runs.check_args(args, SCRIPT)
    agent, mesh = make_agent(args), devices.make_mesh(args)
    offpolicy.check_memory(args, mesh)
    policy, insert = make_policy(args, agent, mesh), offpolicy.make_insert(args, mesh)
    update, update_on_batch = make_update(args, agent, mesh), make_update_on_batch(args, agent, mesh)
    run_updates = offpolicy.make_run_updates(args, mesh, update, update_on_batch)
    intrinsic_rewards, shardings = make_intrinsic_rewards(args, mesh), devices.shardings(mesh, state_specs(args))

    with (
        runs.Run(args, SCRIPT, mesh, partial(init_checkpoint, args, agent), partial(offpolicy.load, args)) as run,
        offpolicy.make_fleet(args, agent, act) as fleet,
    ):
        episodes, watch = envs.EpisodeStatistics(args.num_envs), runs.Stopwatch()
        state = jax.device_put(run.checkpoint["state"], shardings)
        buffer = offpolicy.make_buffer(args, mesh, run.checkpoint)
        step = int(state.global_step)
        if run.resumed:
            episodes.restore(run.checkpoint["episodes"])
            fleet.restore(run.checkpoint["fleet"], state.params, run)
            state = offpolicy.delay_learning(args, run, state, buffer)
        run.print(offpolicy.describe(args, buffer, int(state.learn_from)))

        def save():
            tree = {"state": state} | ({"replay": buffer} if args.save_replay else {})
            run.save(step, tree, {"fleet": fleet.save(), "episodes": episodes.save()})

        if not run.finished(step):
            fleet.start(int(state.iterations), state.params)
        while True:
            envs.evaluate_if_due(args, mesh, run, step, partial(policy, state.params))
            if run.finished(step):
                break
            with watch("waiting"):
                actor_batches = fleet.get(run, save)
            if actor_batches is None:
                break
            i, before = int(state.iterations), step
            with watch("insert"):
                rollouts, timesteps = zip(*(batch.unroll for batch in actor_batches), strict=True)
                policies, intrinsic, bonus_metrics = replay.SINGLE_POLICY, None, {}
                if args.num_policies > 1:
                    curiosity, policies, intrinsic, bonus_metrics = intrinsic_rewards(state.curiosity, rollouts)
                    state = state._replace(curiosity=curiosity)
                buffer = jax.block_until_ready(insert(buffer, rollouts, timesteps, policies, intrinsic))
            timesteps = envs.join_envs(timesteps, axis=-1)
            step += int((~timesteps.is_reset).sum())
            beta = float(runs.parse_schedule(args.per_beta)(before))
            num_updates = offpolicy.updates_due(args, int(state.learn_from), before, step)
            state, buffer, metrics = run_updates(state, buffer, num_updates, beta, watch)
            state = jax.device_put(state._replace(global_step=jnp.int32(step), iterations=jnp.int32(i + 1)), shardings)
            fleet.publish(i + 1, state.params)
            metrics |= jax.device_get(bonus_metrics)
            run.check_finite(step, metrics)
            episodes.add(timesteps)
            metrics |= fleet.metrics(i, actor_batches) | episodes.metrics() | watch.fractions()
            charts = {"updates": int(state.updates), "per_beta": beta, "SPS": run.steps_per_second(step)}
            run.log(step, metrics | {f"charts/{name}": value for name, value in charts.items()})
            if run.checkpoint_due(step):
                save()
        save()
        fleet.check()  # an actor may have failed after the last unrolls were taken
    return run


if __name__ == "__main__":
    runs.cli(Args, main)
