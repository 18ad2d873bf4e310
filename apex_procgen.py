"""Ape-X DQN on Procgen: actors that explore differently fill a prioritised replay, one learner samples from it.

Horgan et al. 2018 (arXiv 1803.00933): dueling streams, double Q-learning, n-step returns; with a distribution of values
(C51), as in a 2020 Procgen competition entry, whose settings are the defaults. By flags, parts of Beyond the Rainbow
(Clark et al. 2025): quantiles (IQN) and Munchausen's targets, spectral norm and another pool. Try:

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

from common import agents, augment, devices, envs, networks, offpolicy, replay, runs
from common.devices import GAMES, SAME
from common.files import check
from common.flags import (
    NonNegativeFloat,
    NonNegativeSchedule,
    PositiveFloat,
    PositiveInt,
    Size,
    Timesteps,
    UnitInterval,
)

SCRIPT = Path(__file__).stem
EVALUATION_EPSILON = 0.001  # Horgan et al. 2018, appendix C: without it a policy may stand still for ever


@dataclass(frozen=True)
class Args(envs.GameArgs, networks.EncoderArgs, augment.AugmentArgs, offpolicy.OffPolicyArgs, runs.RunArgs):
    FIXED: ClassVar = ("num_atoms", "v_min", "v_max", "num_quantiles", "dueling")  # what the network's outputs mean

    hidden: Size = 512
    """units of the dense layer of each stream"""
    dueling: bool = True
    """a stream for the state's value beside the one for the actions' advantages, each with a dense layer of its own"""
    total_timesteps: Timesteps = 8_000_000
    """total number of environment steps"""
    num_envs: Size = 24
    n_step: PositiveInt = 20
    epsilon: UnitInterval = 0.4
    """game i of N plays a random action with probability epsilon^(1 + i / (N - 1) * epsilon_alpha)"""
    epsilon_alpha: NonNegativeFloat = 7.0
    """spread of exploration: the first game's random actions have probability epsilon, the last's epsilon^(1 + this)"""
    num_atoms: Annotated[int, Interval(ge=1, le=1024)] = 99
    """atoms of the distribution of values (C51); 1 for its mean alone, learnt with Huber's loss"""
    v_min: Annotated[float, Interval(ge=-1e9, le=1e9)] = -5.0
    """the lowest atom"""
    v_max: Annotated[float, Interval(ge=-1e9, le=1e9)] = 20.0
    """the highest atom; returns above it cannot be told apart"""
    num_quantiles: Annotated[int, Interval(ge=0, le=1024)] = 0
    """learn this many quantiles of the distribution of values, drawn anew in each update (IQN); 0 to learn atoms"""
    munchausen_alpha: UnitInterval = 0.0
    """weight in the reward of the bonus max(tau log pi(a|s), -1), pi a softmax of the target's values; 0 for none"""
    munchausen_tau: PositiveFloat = 0.03
    """temperature tau of Munchausen's softmax policy, whose mean value replaces that of double_q's best action"""
    double_q: bool = True
    """choose the next action by the online network, and take its value from the target network"""
    target_network_frequency: Annotated[int, Interval(ge=1, le=2**31 - 1)] = 150
    """updates between two copies to the target network"""
    learning_rate: NonNegativeSchedule = "1e-4"
    """Adam's learning rate: a number, or a schedule "step:value,..." in environment steps"""
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
        """Raises UsageError for inconsistent flags."""
        differ = self.num_envs > 1 and 0 < self.epsilon < 1
        runs.check_needs(self, differ, "two games or more and an --epsilon between 0 and 1", ("epsilon_alpha",))
        runs.check_needs(self, not self.num_quantiles, "--num-quantiles 0", ("num_atoms",))
        runs.check_needs(self, self.with_atoms, "--num-atoms 2 or more and --num-quantiles 0", ("v_min", "v_max"))
        check(self.v_min <= 0, f"--v-min {self.v_min}: must be 0 or less, where values start")
        check(self.v_max >= 0, f"--v-max {self.v_max}: must be 0 or more, where values start")
        apart = self.v_max - self.v_min >= 1e-3
        check(apart, f"--v-max {self.v_max}: must be above --v-min, {self.v_min}, by .001 or more")
        check(
            not (self.munchausen_alpha and self.with_atoms),
            f"--munchausen-alpha {self.munchausen_alpha}: moves values off a fixed support; give --num-quantiles 1 or "
            "more, or --num-atoms 1, too",
        )
        runs.check_needs(self, self.munchausen_alpha, "--munchausen-alpha", ("munchausen_tau",))
        runs.check_needs(self, not self.munchausen_alpha, "--munchausen-alpha 0", ("double_q",))


# NETWORK


class Agent(nn.Module):
    """Values of all actions (their distributions, if num_atoms > 1 or num_quantiles), in dueling streams (Wang et al.
    2016)."""

    encoder: nn.Module
    hidden: int
    dropout: float
    dueling: bool
    support: tuple[float, ...]
    num_quantiles: int

    @nn.compact
    def __call__(self, frames: jax.Array, keys: jax.Array | None = None, taus: jax.Array | None = None) -> jax.Array:
        """Frames uint8 [B, 64, 64, C], keys for dropout uint32 [B, 2] -> float32 [B, 15, atoms]: the atoms' logits or,
        of one atom, values. With num_quantiles -> [B, 15, N]: quantiles at the levels `taus` float32 [B, N], from 0 to
        1 (evenly spaced if not given)."""
        x = networks.dropout(self.encoder(frames), keys, self.dropout)
        atoms = len(self.support)
        dense = partial(nn.Dense, precision="highest")  # in full float32 on a GPU too
        if self.num_quantiles:
            if taus is None:
                taus = jnp.broadcast_to(
                    (jnp.arange(self.num_quantiles) + 0.5) / self.num_quantiles, (len(x), self.num_quantiles)
                )
            waves = jnp.cos(jnp.pi * jnp.arange(64) * taus[..., None])  # Dabney et al. 2018b (IQN), equation 4
            x = x[:, None] * nn.relu(dense(x.shape[1])(waves))  # [B, N, features]

        def stream(outputs, bias_init=nn.initializers.zeros):
            hidden = nn.relu(dense(self.hidden)(x))
            y = dense(outputs * atoms, bias_init=bias_init)(hidden)
            return y.mT if self.num_quantiles else y.reshape(len(x), outputs, atoms)

        def near_zero(key, shape, dtype=jnp.float32):
            """Biases [outputs * atoms] by which values start around 0, as one atom's do. The middle of the support is
            above what most games pay, and values far too high bootstrap from themselves and fall slowly.

            The logits are a bell around 0, a twentieth of the support wide, with straight slopes: a Gaussian's would be
            hundreds of logits deep, and atoms down there are hardly learnt. Atoms further apart than that would miss
            the bell: then the two around 0 share the probability, by their distance to it."""
            if atoms == 1:
                return jnp.zeros(shape, dtype)
            apart, width = self.support[1] - self.support[0], 0.05 * (self.support[-1] - self.support[0])
            z = np.abs(self.support) / width
            bell = -np.where(z < 1, z**2 / 2, z - 0.5)  # as Huber's loss
            around = np.clip(1 - np.abs(self.support) / apart, 0, 1)
            logits = bell if apart <= width else np.log(around + 0.01 / atoms)
            return jnp.tile(jnp.asarray(logits, dtype), shape[0] // atoms)

        if not self.dueling:
            return stream(envs.NUM_ACTIONS, near_zero)
        advantages = stream(envs.NUM_ACTIONS)
        return stream(1, near_zero) + advantages - advantages.mean(axis=1, keepdims=True)  # Wang et al., equation 9


def make_agent(args: Args) -> Agent:
    """The networks that these flags describe."""
    encoder = networks.make_encoder(replace(args, hidden=0))  # the streams have the dense layers
    support = tuple(np.linspace(args.v_min, args.v_max, args.num_atoms).tolist()) if args.with_atoms else (0.0,)
    return Agent(encoder, args.hidden, args.dropout, args.dueling, support, args.num_quantiles)


def mean_value(support: Sequence[float], outputs: jax.Array) -> jax.Array:
    """The network's outputs float32 [..., atoms or quantiles] -> values float32 [...]: the mean over quantiles, or over
    the support by the atoms' softmax."""
    if len(support) == 1:
        return outputs.mean(axis=-1)
    return jnp.matmul(nn.softmax(outputs), jnp.array(support), precision="highest")


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


def make_optimizer(args: Args) -> optax.GradientTransformation:
    """Adam's direction, without step size and sign: `improve` multiplies it by -learning_rate, from a schedule."""
    return optax.chain(devices.clip_by_norm(args.max_grad_norm), optax.scale_by_adam(eps=args.adam_eps))


@partial(jax.jit, static_argnums=(0, 1))
def initial_state(args: Args, agent: Agent) -> TrainState:
    """The learner before its first update, from `args.seed`."""
    frames = jnp.zeros((1, 64, 64, 3 * len(args.offsets)), jnp.uint8)
    params = agent.init(jax.random.PRNGKey(args.seed), frames)
    return TrainState(
        params=params,
        target=jax.tree.map(jnp.copy, params),
        opt_state=make_optimizer(args).init(params),
        global_step=jnp.int32(0),
        updates=jnp.int32(0),
        iterations=jnp.int32(0),
        learn_from=jnp.int32(args.learning_starts),
    )


# ACTING


def epsilons(args: Args) -> np.ndarray:
    """How often each game's action is random, float32 [N] (Horgan et al. 2018, section 4)."""
    place = np.arange(args.num_envs) / max(args.num_envs - 1, 1)
    return np.float32(args.epsilon ** (1 + place * args.epsilon_alpha))


def explore(keys: jax.Array, values: jax.Array, epsilon: jax.Array) -> jax.Array:
    """The best of the values [N, 15], or with probability epsilon [N] any action: int32 [N]; keys are uint32 [N, 2]."""

    def one(key, values, epsilon):
        random_key, action_key = jax.random.split(key)
        any_action = jax.random.randint(action_key, (), 0, envs.NUM_ACTIONS)
        return jnp.where(jax.random.bernoulli(random_key, epsilon), any_action, values.argmax())

    return jax.vmap(one)(keys, values, epsilon)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def act(
    args: Args, agent: Agent, params: dict, rollout: offpolicy.Rollout, obs: jax.Array, age: jax.Array
) -> tuple[offpolicy.Rollout, jax.Array]:
    """Chooses actions for obs uint8 [n, 3, 64, 64], age int32 [n]; returns the rollout and actions int32 [n]."""
    frames = rollout.frames.put(rollout.t, obs, age)
    values = mean_value(agent.support, devices.in_chunks(partial(agent.apply, params), frames.stack(rollout.t)))
    choose_keys, stick_keys = envs.step_keys(rollout)
    epsilon = jnp.array(epsilons(args))[rollout.numbers]
    actions = explore(choose_keys, values, epsilon)
    worth = state_value(args, values)
    rollout = rollout._replace(frames=frames)
    return offpolicy.record(args, rollout, age, actions, values=values, state_value=worth, stick_keys=stick_keys)


# ALGORITHM


def state_value(args: Args, values: jax.Array) -> jax.Array:
    """State values float32 [...] from action values [..., 15]: the largest or, with Munchausen, the softmax policy's
    mean value plus tau times its entropy (Vieillard et al. 2020, the sum over actions in equation 3)."""
    if not args.munchausen_alpha:
        return values.max(axis=-1)
    return args.munchausen_tau * jax.nn.logsumexp(values / args.munchausen_tau, axis=-1)


def quantile_loss(taus: jax.Array, quantiles: jax.Array, goals: jax.Array) -> jax.Array:
    """The quantile Huber loss float32 [B] (Dabney et al. 2018b, equation 3, kappa 1).

    Args:
      taus: float32 [B, N], which quantiles these are.
      quantiles: float32 [B, N].
      goals: float32 [B, M], samples of what they should be quantiles of.
    """
    chex.assert_equal_shape([taus, quantiles])
    td = goals[:, None, :] - quantiles[:, :, None]
    losses = jnp.abs(taus[:, :, None] - (td < 0)) * optax.huber_loss(td)
    return losses.mean(axis=2).sum(axis=1)


def project(support: jax.Array, returns: jax.Array, discounts: jax.Array, probs: jax.Array) -> jax.Array:
    """The distribution of return + discount * value, brought back to the support (Bellemare et al. 2017, equation 7).

    Args:
      support: float32 [atoms], evenly spaced.
      returns, discounts: float32 [B].
      probs: float32 [B, atoms], of the value.

    Returns float32 [B, atoms].
    """
    chex.assert_rank([support, returns, discounts, probs], [1, 1, 1, 2])
    moved = jnp.clip(returns[:, None] + discounts[:, None] * support, support[0], support[-1])
    share = 1 - jnp.abs(moved[:, None, :] - support[:, None]) / (support[1] - support[0])  # of source in [B, to, from]
    return jnp.einsum("btf,bf->bt", jnp.clip(share, 0, 1), probs, precision="highest")


class Outputs(NamedTuple):
    """What the networks say of B transitions: distributions by atoms or quantiles, K of them, or values (K = 1)."""

    values: jax.Array  # float32 [B, 15, K], of the network that learns, for the batch's frames
    next_target: jax.Array  # float32 [B, 15, K], of the target network, for its next frames
    next_selector: jax.Array  # float32 [B, 15, K], for the next frames, of the network that chooses the next action
    target: jax.Array | None  # float32 [B, 15, K], of the target network, for the batch's frames; Munchausen's
    taus: jax.Array | None  # float32 [B, K], which quantiles `values` are


def q_parts(args: Args, support: Sequence[float], outputs: Outputs, batch: replay.Batch) -> dict[str, jax.Array]:
    """The parts of Q-learning's loss of n-step transitions, for each sample, float32 [B].

    For distributions the cross-entropy with the projected target (Bellemare et al. 2017, algorithm 1), or the loss of
    quantiles. One atom has no distribution to learn: it is the value itself, with Huber's loss, as in DQN
    (Mnih et al. 2015). The TD error is always that of mean values (with quantiles: of those drawn), which actors can
    compute too. With atoms its target is the projected one's mean, since a return beyond the support cannot be learnt.

    Munchausen (Vieillard et al. 2020, arXiv 2007.14430, equation 3): the first of the n rewards gets a bonus of
    alpha max(tau log pi(a | s), -1), and the state that follows is worth its mean value under pi, entropy included.
    """
    chex.assert_equal_shape([outputs.values, outputs.next_target, outputs.next_selector])
    chex.assert_equal_shape([batch.actions, batch.returns, batch.discounts, batch.weight])

    def pick(x, actions):
        return jnp.take_along_axis(x, actions[:, None, None], axis=1)[:, 0]

    chosen, returns = pick(outputs.values, batch.actions), batch.returns
    if args.munchausen_alpha:
        tau = args.munchausen_tau
        log_policy = tau * nn.log_softmax(mean_value(support, outputs.target) / tau)
        bonus = jnp.take_along_axis(log_policy, batch.actions[:, None], axis=1)[:, 0]
        returns = returns + args.munchausen_alpha * jnp.clip(bonus, -1, 0)
        log_policy = nn.log_softmax(mean_value(support, outputs.next_selector) / tau)[..., None]
        following = (jnp.exp(log_policy) * (outputs.next_target - tau * log_policy)).sum(axis=1)
    else:
        following = pick(outputs.next_target, mean_value(support, outputs.next_selector).argmax(axis=1))
    returns, following = jax.lax.stop_gradient((returns, following))
    value = mean_value(support, chosen)
    td = returns + batch.discounts * mean_value(support, following) - value
    if args.num_quantiles:
        losses = quantile_loss(outputs.taus, chosen, returns[:, None] + batch.discounts[:, None] * following)
    elif len(support) == 1:
        losses = optax.huber_loss(td)
    else:
        goal = project(jnp.array(support), returns, batch.discounts, nn.softmax(following))
        td = jnp.matmul(goal, jnp.array(support), precision="highest") - value
        losses = -(goal * nn.log_softmax(chosen)).sum(axis=-1)
    chex.assert_equal_shape([losses, td, batch.weight])
    return {"loss": batch.weight * losses, "q_values": value, "td_error": jnp.abs(td)}


def loss(args: Args, agent: Agent, params: dict, batch: replay.Batch, *, target: dict) -> dict[str, jax.Array]:
    """Ape-X's loss. Returns its parts for each sample, float32 [B], and no means over samples: `devices.gradient` takes
    them, and its docstring says why."""
    keys, next_keys, dropout_keys, *tau_keys = (
        jax.vmap(jax.random.fold_in, in_axes=(0, None))(batch.keys, i) for i in range(5)
    )
    frames = augment.augment(args, keys, batch.frames)
    next_frames = augment.augment(args, next_keys, batch.next_frames)
    taus = next_taus = None
    if args.num_quantiles:
        taus, next_taus = (jax.vmap(lambda key: jax.random.uniform(key, (args.num_quantiles,)))(k) for k in tau_keys)
    by_other = args.double_q and not args.munchausen_alpha
    outputs = Outputs(
        values=agent.apply(params, frames, dropout_keys, taus),
        next_target=agent.apply(target, next_frames, taus=next_taus),
        # Of evenly spaced quantiles: an action chosen by the draws that it is valued by would be valued too high.
        next_selector=agent.apply(params if by_other else target, next_frames),
        target=agent.apply(target, frames) if args.munchausen_alpha else None,
        taus=taus,
    )
    return q_parts(args, agent.support, outputs, batch)


def improve(args: Args, agent: Agent, state: TrainState, batch: replay.Batch) -> tuple[TrainState, jax.Array, dict]:
    """One update: returns the next state, the absolute TD errors float32 [B] and metrics, float32 []."""
    learning_rate = runs.parse_schedule(args.learning_rate)(state.global_step)
    objective = partial(loss, args, agent, target=state.target)
    # Weights of 1, not batch.weight: `gradient` divides by the sum of its weights, which would undo that importance
    # weights make the loss smaller. `loss` has multiplied by them already.
    grads, means, parts = devices.gradient(objective, state.params, batch, jnp.ones_like(batch.returns))
    grads = networks.add_l2(grads, state.params, args.l2)
    direction, opt_state = make_optimizer(args).update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, jax.tree.map(lambda d: -learning_rate * d, direction))
    updates = state.updates + 1
    copy = updates % args.target_network_frequency == 0
    target = jax.tree.map(lambda new, old: jnp.where(copy, new, old), params, state.target)
    metrics = {f"losses/{name}": value for name, value in means.items()} | {
        "losses/grad_norm": devices.norm(grads),
        "losses/param_norm": devices.norm(params),  # infinite where the last step went wrong
        "charts/learning_rate": learning_rate,
    }
    state = state._replace(params=params, target=target, opt_state=opt_state, updates=updates)
    return state, parts["td_error"], metrics


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
@devices.spread([SAME, replay.REPLAY, SAME, SAME], (SAME, replay.REPLAY, SAME))
def update(args: Args, agent: Agent, state: TrainState, buffer: replay.Replay, k: jax.Array, beta: jax.Array):
    """k updates, each device's batches drawn from its own part of the buffer (see `offpolicy.repeat`)."""
    return offpolicy.repeat(args, partial(improve, args, agent), state, buffer, k, beta)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
@devices.spread([SAME, GAMES], (SAME, GAMES, SAME))
def update_on_batch(args: Args, agent: Agent, state: TrainState, batch: replay.Batch):
    """`improve`, each device on its part of a batch that was drawn elsewhere."""
    return improve(args, agent, state, batch)


# EVALUATION


@partial(jax.jit, static_argnums=(0, 1))
@devices.spread([SAME, GAMES, GAMES], GAMES)
def choose(args: Args, agent: Agent, params: dict, frames: jax.Array, keys: jax.Array) -> jax.Array:
    """Almost always the best actions int32 [N] for stacked frames uint8 [N, 64, 64, C], with keys uint32 [N, 2]."""
    values = mean_value(agent.support, devices.in_chunks(partial(agent.apply, params), frames))
    return explore(keys, values, jnp.full(len(frames), EVALUATION_EPSILON))


def make_policy(args: Args, agent: Agent, params: dict) -> Callable:
    """A policy as `envs.play_episodes` calls it."""
    return envs.as_policy(partial(choose, args, agent, params))


def trained(args: Args, agent: Agent, run_dir: str) -> dict:
    """What evaluation needs of a run's newest checkpoint, or of an agent that `evaluate.py --export` wrote."""
    return agents.load(run_dir, partial(initial_state, args, agent), lambda state: {"params": state.params})


# MAIN


def initial(args: Args, agent: Agent) -> dict:
    """All that a resume needs besides the actors, their games and the replay buffer; `main` saves the same."""
    return {"state": initial_state(args, agent)}


def main(args: Args) -> runs.Run:
    """Trains; returns the run, finished or stopped by a signal (`run.stop`)."""
    runs.check_args(args, SCRIPT)
    agent = make_agent(args)
    offpolicy.check_memory(args, partial(initial, args, agent))

    load = partial(offpolicy.load, args, partial(initial, args, agent))
    with runs.Run(args, SCRIPT, load) as run, offpolicy.make_fleet(args, agent, act) as fleet:
        saved, buffer = run.saved, offpolicy.make_buffer(args, run.saved)
        episodes, watch = envs.EpisodeStatistics(args.num_envs), runs.Stopwatch()
        state = devices.put(args, (saved or devices.run_once(initial, args, agent))["state"], SAME)
        step = int(state.global_step)
        if saved:
            episodes.restore(saved["episodes"])
            fleet.restore(saved["fleet"], state.params, run)
            state = offpolicy.learn_later(args, run, state, buffer)
        run.say(offpolicy.describe(args, buffer, int(state.learn_from)))

        def save():
            tree = {"state": state} | ({"replay": buffer} if args.save_replay else {})
            run.save(step, tree, {"fleet": fleet.save(), "episodes": episodes.save()})

        if not run.over(step):
            fleet.start(int(state.iterations), state.params)
        while True:
            envs.evaluate_if_due(args, run, step, make_policy(args, agent, state.params))
            if run.over(step):
                break
            with watch("waiting"):
                items = fleet.take(run, save)
            if items is None:
                break
            i, before = int(state.iterations), step
            with watch("insert"):
                buffer, steps = offpolicy.add(args, buffer, items)
            step += int((~steps.done).sum())
            beta = float(runs.parse_schedule(args.per_beta)(before))
            k = offpolicy.updates_due(args, int(state.learn_from), before, step)
            state, buffer, metrics = offpolicy.learn(
                args, agent, state, buffer, update=update, update_on_batch=update_on_batch, k=k, beta=beta, watch=watch
            )
            state = state._replace(global_step=jnp.int32(step), iterations=jnp.int32(i + 1))
            state = devices.put(args, state, SAME)
            fleet.publish(i + 1, state.params)
            run.check_finite(step, metrics)
            episodes.add(steps)
            metrics |= fleet.metrics(i, items) | episodes.metrics() | watch.fractions()
            charts = {"updates": int(state.updates), "per_beta": beta, "SPS": run.steps_per_second(step)}
            run.log(step, metrics | {f"charts/{name}": value for name, value in charts.items()})
            if run.checkpoint_due(step):
                save()
        save()
        fleet.check()  # one that failed after the last unrolls were taken
    return run


if __name__ == "__main__":
    runs.cli(Args, main)
