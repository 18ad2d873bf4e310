"""SAC on Procgen: soft actor-critic for discrete actions, with actor threads and a replay buffer.

Haarnoja et al. 2018 (arXiv 1812.05905) and Christodoulou 2019 (arXiv 1910.07207): twin Q-functions, a temperature that
keeps the policy's entropy at a target, and exact expectations over actions. Critics and policy share one encoder, which
learns from the critics alone, as in DrQ (Kostrikov et al. 2021, arXiv 2004.13649). Try:

    python sac_procgen.py --env-id coinrun --encoder nature --width 1 --pool flatten --buffer-size 100000
    python sac_procgen.py --env-id starpilot --encoder nature --width 1 --pool flatten --average-q --q-clip 0.5
"""

from collections.abc import Callable
from dataclasses import dataclass
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
from common.flags import NonNegativeFloat, NonNegativeInt, NonNegativeSchedule, Size, Timesteps, UnitInterval

SCRIPT = Path(__file__).stem
MAX_ENTROPY = float(np.log(envs.NUM_ACTIONS))  # nats, of a policy that chooses at random


@dataclass(frozen=True)
class Args(envs.GameArgs, networks.EncoderArgs, augment.AugmentArgs, offpolicy.OffPolicyArgs, runs.RunArgs):
    FIXED: ClassVar = ("autotune", "alpha")  # the checkpoint has the temperature

    hidden: Size = 256
    """units of the encoder's dense layer, and of the hidden layer of the policy and of each Q-function"""
    total_timesteps: Timesteps = 8_000_000
    """total number of environment steps"""
    learning_starts: NonNegativeInt = 20_000
    per_alpha: UnitInterval = 0.0
    autotune: bool = True
    """move the temperature so that the policy's entropy comes to its target"""
    alpha: Annotated[float, Interval(ge=1e-6, le=10)] = 0.01
    """temperature, the reward that a nat of entropy is worth: at the start or, with --no-autotune, throughout"""
    target_entropy_scale: Annotated[float, Interval(ge=0.01, le=0.99)] = 0.3
    """the target of the policy's entropy, as a part of log 15, that of a random policy"""
    alpha_learning_rate: Annotated[float, Interval(ge=1e-6, le=1)] = 0.01
    """how far an update moves the temperature's logarithm for each nat between that target and the policy's entropy"""
    min_alpha: Annotated[float, Interval(ge=1e-6, le=10)] = 1e-6
    """lower bound of the temperature; one that has sunk far rises again too slowly to save the policy's entropy"""
    tau: Annotated[float, Interval(ge=1e-6, le=1)] = 0.005
    """how far the target network goes towards the one that learns; 1 copies it"""
    target_network_frequency: Annotated[int, Interval(ge=1, le=2**31 - 1)] = 1
    """updates between two such moves"""
    average_q: bool = False
    """take the mean of both Q-functions, in targets and for the policy; the smaller one, the default, may be too low"""
    q_clip: NonNegativeFloat = 0.0
    """in the critics' loss, clip how far a Q-value is from the target network's to +- this, in reward; 0 for no clip"""
    entropy_penalty: NonNegativeFloat = 0.0
    """coefficient of half the squared difference (nats^2) of the policy's entropy from that of the target network's"""
    learning_rate: NonNegativeSchedule = "3e-4"
    """Adam's learning rate: a number, or a schedule "step:value,..." in environment steps"""
    max_grad_norm: NonNegativeFloat = 10.0
    """maximum global norm of the gradient; 0 for no clipping"""

    def check(self) -> None:
        """Raises UsageError for inconsistent flags."""
        tuned = ("target_entropy_scale", "alpha_learning_rate", "min_alpha")
        runs.check_needs(self, self.autotune, "--autotune", tuned)
        # With dropout a target that is copied each time differs too, since it drops nothing.
        apart = self.tau < 1 or self.target_network_frequency > 1 or self.dropout
        needs = "a target network that lags, --tau below 1 or --target-network-frequency 2 or more"
        runs.check_needs(self, apart, needs, ("q_clip", "entropy_penalty"))

    def check_training(self) -> None:
        """Raises UsageError, one sentence, if a new run's temperature starts below its bound."""
        above = self.min_alpha <= self.alpha or self.resume  # which has its checkpoint's temperature
        check(above, f"--min-alpha {self.min_alpha}: give at most --alpha, {self.alpha}")


# NETWORK


class Agent(nn.Module):
    """Two Q-functions and a policy on one encoder, each with a hidden layer of its own."""

    encoder: nn.Module
    hidden: int
    dropout: float

    def setup(self):
        dense = partial(nn.Dense, precision="highest")  # in full float32 on a GPU too
        small = nn.initializers.orthogonal(0.01)  # values start around 0, and the policy nearly uniform

        def head():
            return nn.Sequential([dense(self.hidden), nn.relu, dense(envs.NUM_ACTIONS, kernel_init=small)])

        self.policy, self.q1, self.q2 = head(), head(), head()

    def encode(self, frames: jax.Array, keys: jax.Array | None = None) -> jax.Array:
        """Frames uint8 [B, 64, 64, C] and keys for dropout uint32 [B, 2] -> features float32 [B, hidden]."""
        return networks.dropout(self.encoder(frames), keys, self.dropout)

    def logits(self, features: jax.Array) -> jax.Array:
        """Features [B, hidden] -> the policy's logits float32 [B, 15]."""
        return self.policy(features)

    def values(self, features: jax.Array) -> jax.Array:
        """Features [B, hidden] -> both Q-functions of all actions, float32 [B, 2, 15]."""
        return jnp.stack([self.q1(features), self.q2(features)], axis=1)

    def __call__(self, frames: jax.Array) -> tuple[jax.Array, jax.Array]:
        """All of it: logits [B, 15] and values [B, 2, 15]."""
        features = self.encode(frames)
        return self.logits(features), self.values(features)


def make_agent(args: Args) -> Agent:
    """The networks that these flags describe."""
    return Agent(networks.make_encoder(args), args.hidden, args.dropout)


# TRAINING STATE


class TrainState(NamedTuple):
    """The learner."""

    params: dict  # of the "agent", and "log_alpha" float32 [], the temperature's logarithm, for actors too
    target: dict  # of the agent
    opt_state: optax.OptState
    global_step: jax.Array  # int32 []: transitions played
    updates: jax.Array  # int32 []
    iterations: jax.Array  # int32 []: the version of the parameters that actors have
    learn_from: jax.Array  # int32 []: the step at which learning starts


def make_optimizer(args: Args) -> optax.GradientTransformation:
    """Adam's direction, without step size and sign: `improve` multiplies it by -learning_rate, from a schedule."""
    return optax.chain(devices.clip_by_norm(args.max_grad_norm), optax.scale_by_adam(eps=1e-8))


@partial(jax.jit, static_argnums=(0, 1))
def initial_state(args: Args, agent: Agent) -> TrainState:
    """The learner before its first update, from `args.seed`."""
    frames = jnp.zeros((1, 64, 64, 3 * len(args.offsets)), jnp.uint8)
    params = {"agent": agent.init(jax.random.PRNGKey(args.seed), frames), "log_alpha": jnp.log(jnp.float32(args.alpha))}
    return TrainState(
        params=params,
        target=jax.tree.map(jnp.copy, params["agent"]),
        opt_state=make_optimizer(args).init(params["agent"]),
        global_step=jnp.int32(0),
        updates=jnp.int32(0),
        iterations=jnp.int32(0),
        learn_from=jnp.int32(args.learning_starts),
    )


# ACTING


def soft_value(args: Args, logits: jax.Array, values: jax.Array, alpha: jax.Array) -> jax.Array:
    """The value float32 [B] of states where a policy with logits [B, 15] acts, its entropy included at temperature
    alpha float32 [], by two Q-functions [B, 2, 15] (Christodoulou 2019, equation 10: an expectation, no sample)."""
    chex.assert_equal_shape([logits, values[:, 0], values[:, 1]])
    log_probs = jax.nn.log_softmax(logits)
    return (jnp.exp(log_probs) * (lesser_or_mean(args, values) - alpha * log_probs)).sum(axis=-1)


def lesser_or_mean(args: Args, values: jax.Array) -> jax.Array:
    """Two Q-functions [B, 2, ...] -> the lesser one or, if asked, their mean [B, ...] (Zhou et al. 2022, section 4)."""
    return values.mean(axis=1) if args.average_q else values.min(axis=1)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def act(
    args: Args, agent: Agent, params: dict, rollout: offpolicy.Rollout, obs: jax.Array, age: jax.Array
) -> tuple[offpolicy.Rollout, jax.Array]:
    """Chooses actions for obs uint8 [n, 3, 64, 64], age int32 [n]; returns the rollout and actions int32 [n]."""
    frames = rollout.frames.put(rollout.t, obs, age)
    logits, values = devices.in_chunks(partial(agent.apply, params["agent"]), frames.stack(rollout.t))
    choose_keys, stick_keys = envs.step_keys(rollout)
    actions = jax.vmap(jax.random.categorical)(choose_keys, logits)
    soft = soft_value(args, logits, values, jnp.exp(params["log_alpha"]))
    mean = values.mean(axis=1)  # as the learner's TD error has it
    rollout = rollout._replace(frames=frames)
    return offpolicy.record(args, rollout, age, actions, values=mean, state_value=soft, stick_keys=stick_keys)


# ALGORITHM


class Outputs(NamedTuple):
    """What the networks say of B transitions."""

    values: jax.Array  # float32 [B, 2, 15], of the Q-functions that learn, for the batch's frames
    logits: jax.Array  # float32 [B, 15], of the policy, from features that its loss does not change
    next_logits: jax.Array  # float32 [B, 15], of the same policy for the next frames
    next_target: jax.Array  # float32 [B, 2, 15], of the target network for the next frames
    old_values: jax.Array | None  # float32 [B, 2, 15], of the target network for the batch's frames
    old_logits: jax.Array | None  # float32 [B, 15]


def entropy_of(logits: jax.Array) -> jax.Array:
    """The entropy float32 [B] of a policy with logits [B, 15], nats."""
    log_probs = jax.nn.log_softmax(logits)
    return -(jnp.exp(log_probs) * log_probs).sum(axis=-1)


def sac_parts(args: Args, outputs: Outputs, alpha: jax.Array, batch: replay.Batch) -> dict[str, jax.Array]:
    """The parts of SAC's losses of n-step transitions at the temperature alpha [], for each sample, float32 [B].

    Critics: Christodoulou 2019, equation 4; policy, with exact expectations: equation 12. Zhou et al. 2022 (arXiv
    2209.10081): the mean of two Q-functions and the clipped Q-loss, equation 13, and the entropy's penalty, equation 9,
    here with the target network's policy as the old one. Importance weights scale the critics' loss only.
    """
    chex.assert_equal_shape([batch.actions, batch.returns, batch.discounts, batch.weight])
    held = jax.lax.stop_gradient

    def pick(values):
        return jnp.take_along_axis(values, batch.actions[:, None, None], axis=2)[..., 0]

    # Entropy counts where the n steps end; that of the states between is left out, as is usual with n-step returns.
    goal = batch.returns + batch.discounts * soft_value(args, outputs.next_logits, outputs.next_target, alpha)
    goal = held(goal)[:, None]
    chosen = pick(outputs.values)  # [B, 2]
    squares = (chosen - goal) ** 2
    if args.q_clip:
        old = held(pick(outputs.old_values))
        near = old + jnp.clip(chosen - old, -args.q_clip, args.q_clip)
        squares = jnp.maximum(squares, (near - goal) ** 2)
    entropy = entropy_of(outputs.logits)
    parts = {
        "q_loss": batch.weight * 0.5 * squares.sum(axis=-1),
        "policy_loss": -soft_value(args, outputs.logits, held(outputs.values), alpha),
        "q_values": chosen.mean(axis=-1),
        "q_difference": jnp.abs(chosen[:, 0] - chosen[:, 1]),
        "entropy": entropy,
        "td_error": jnp.abs(chosen.mean(axis=-1) - goal[:, 0]),
    }
    total = parts["q_loss"] + parts["policy_loss"]
    if args.entropy_penalty:
        total += args.entropy_penalty * 0.5 * (entropy - held(entropy_of(outputs.old_logits))) ** 2
    return parts | {"loss": total}


def loss(
    args: Args, agent: Agent, params: dict, batch: replay.Batch, *, target: dict, alpha: jax.Array
) -> dict[str, jax.Array]:
    """SAC's losses. Returns their parts for each sample, float32 [B], and no means over samples: `devices.gradient`
    takes them, and its docstring says why."""
    keys, next_keys, dropout_keys = (jax.vmap(jax.random.fold_in, in_axes=(0, None))(batch.keys, i) for i in range(3))
    frames = augment.augment(args, keys, batch.frames)
    next_frames = augment.augment(args, next_keys, batch.next_frames)
    features = agent.apply(params, frames, dropout_keys, method="encode")
    # The encoder learns from the critics alone: what the policy's loss would do to it, they would have to follow.
    logits = agent.apply(params, jax.lax.stop_gradient(features), method="logits")
    old_logits, old_values = agent.apply(target, frames) if args.q_clip or args.entropy_penalty else (None, None)
    outputs = Outputs(
        values=agent.apply(params, features, method="values"),
        logits=logits,
        next_logits=jax.lax.stop_gradient(agent.apply(params, next_frames)[0]),
        next_target=agent.apply(target, next_frames)[1],
        old_values=old_values,
        old_logits=old_logits,
    )
    return sac_parts(args, outputs, alpha, batch)


def tune(args: Args, log_alpha: jax.Array, entropy: jax.Array) -> jax.Array:
    """log alpha, float32 [], after a gradient step on Christodoulou 2019, equation 11; `entropy` [] is a batch's mean.

    As usual the gradient by alpha, entropy - target, is applied to log alpha. A plain step, not Adam's: its averages
    remember the first updates, with entropies far above the target, and would hold back a temperature that must rise.
    """
    gap = args.target_entropy_scale * MAX_ENTROPY - entropy
    most = 10.0  # far above what any game's rewards want
    return jnp.clip(log_alpha + args.alpha_learning_rate * gap, jnp.log(args.min_alpha), jnp.log(most))


def improve(args: Args, agent: Agent, state: TrainState, batch: replay.Batch) -> tuple[TrainState, jax.Array, dict]:
    """One update: returns the next state, the absolute TD errors float32 [B] and metrics, float32 []."""
    learning_rate = runs.parse_schedule(args.learning_rate)(state.global_step)
    params, log_alpha = state.params["agent"], state.params["log_alpha"]
    objective = partial(loss, args, agent, target=state.target, alpha=jnp.exp(log_alpha))
    # Weights of 1, not batch.weight: `gradient` divides by the sum of its weights, which would undo that importance
    # weights make the loss smaller. `loss` has multiplied by them already.
    grads, means, parts = devices.gradient(objective, params, batch, jnp.ones_like(batch.returns))
    direction, opt_state = make_optimizer(args).update(grads, state.opt_state, params)
    params = optax.apply_updates(params, jax.tree.map(lambda d: -learning_rate * d, direction))
    if args.autotune:
        log_alpha = tune(args, log_alpha, means["entropy"])
    updates = state.updates + 1
    move = jnp.where(updates % args.target_network_frequency == 0, args.tau, 0.0)
    target = optax.incremental_update(params, state.target, move)
    metrics = {f"losses/{name}": value for name, value in means.items()} | {
        "losses/grad_norm": devices.norm(grads),
        "losses/param_norm": devices.norm(params),  # infinite where the last step went wrong
        "losses/alpha": jnp.exp(log_alpha),
        "charts/learning_rate": learning_rate,
    }
    params = {"agent": params, "log_alpha": log_alpha}
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
    """Draws actions int32 [N] from the policy for stacked frames uint8 [N, 64, 64, C], with keys uint32 [N, 2]."""
    logits, _ = devices.in_chunks(partial(agent.apply, params), frames)
    return jax.vmap(jax.random.categorical)(keys, logits)


def make_policy(args: Args, agent: Agent, params: dict) -> Callable:
    """A policy as `envs.play_episodes` calls it."""
    return envs.as_policy(partial(choose, args, agent, params))


def trained(args: Args, agent: Agent, run_dir: str) -> dict:
    """What evaluation needs of a run's newest checkpoint, or of an agent that `evaluate.py --export` wrote."""
    return agents.load(run_dir, partial(initial_state, args, agent), lambda state: {"params": state.params["agent"]})


# MAIN


def initial(args: Args, agent: Agent) -> dict:
    """All that a resume needs besides the actors, their games and the replay buffer; `main` saves the same."""
    return {"state": initial_state(args, agent)}


def main(args: Args) -> runs.Run:
    """Trains; returns the run, finished or stopped by a signal (`run.stop`)."""
    runs.check_args(args, SCRIPT)
    args.check_training()
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
            envs.evaluate_if_due(args, run, step, make_policy(args, agent, state.params["agent"]))
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
