"""SAC on Procgen: soft actor-critic for discrete actions, with actor threads and a replay buffer.

Haarnoja et al. 2018 (arXiv 1812.05905) and Christodoulou 2019 (arXiv 1910.07207): twin Q-functions, a temperature that
keeps the policy's entropy at a target, and exact expectations over actions. Critics and policy share one encoder, which
learns from the Q-functions alone, as DrQ's convolutions do (Kostrikov et al. 2021, arXiv 2004.13649). Unlike in the
first two papers, returns are n-step, one Adam serves Q-functions and policy, and the target entropy is 0.3 of the
maximum. Try:

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
from jax.sharding import Mesh

from common import agents, augment, devices, envs, networks, offpolicy, replay, runs
from common.devices import ENV_SHARDED, REPLICATED
from common.files import check
from common.flags import NonNegativeFloat, NonNegativeInt, NonNegativeSchedule, Size, StepCount, UnitInterval

SCRIPT = Path(__file__).stem
MAX_ENTROPY = float(np.log(envs.NUM_ACTIONS))  # nats, of a policy that chooses at random


@dataclass(frozen=True)
class Args(envs.GameArgs, networks.EncoderArgs, augment.AugmentArgs, offpolicy.OffPolicyArgs, runs.RunArgs):
    FIXED: ClassVar = ("autotune", "alpha")  # --resume refuses to change them: the checkpoint has the temperature

    hidden: Size = 256
    """units of the encoder's dense layer, and of the hidden layer of the policy and of each Q-function"""
    total_timesteps: StepCount = 8_000_000
    """total number of environment steps"""
    learning_starts: NonNegativeInt = 20_000
    per_alpha: UnitInterval = 0.0  # uniform sampling
    autotune: bool = True
    """adapt the temperature to keep the policy's entropy at its target"""
    alpha: Annotated[float, Interval(ge=1e-6, le=10)] = 0.01
    """temperature, the reward that a nat of entropy is worth: at the start or, with --no-autotune, throughout"""
    target_entropy_scale: Annotated[float, Interval(ge=0.01, le=0.99)] = 0.3
    """target of the policy's entropy, as a fraction of the maximum, log 15 (Christodoulou: 0.98)"""
    alpha_learning_rate: Annotated[float, Interval(ge=1e-6, le=1)] = 0.01
    """learning rate of log alpha: each update adds this times (target entropy - entropy)"""
    min_alpha: Annotated[float, Interval(ge=1e-6, le=10)] = 1e-6
    """lower bound of the temperature; from too low a value it rises too slowly to stop a collapse of the entropy"""
    tau: Annotated[float, Interval(ge=1e-6, le=1)] = 0.005
    """coefficient of the target network's moving average; 1 copies the online network"""
    target_network_frequency: Annotated[int, Interval(ge=1, le=2**31 - 1)] = 1
    """updates between steps of the target network"""
    average_q: bool = False
    """average both Q-functions in targets and policy loss; the default, their minimum, can underestimate"""
    q_clip: NonNegativeFloat = 0.0
    """clip Q-values in the loss to +- this (in units of return) around the target network's; 0 for no clipping"""
    cql_alpha: NonNegativeFloat = 0.0
    """coefficient of conservative Q-learning's penalty, log sum_b exp Q(s, b) - Q(s, a), of both Qs; 0 for none"""
    entropy_penalty: NonNegativeFloat = 0.0
    """coefficient of 0.5 (H(policy) - H(target network's policy))^2, in nats^2"""
    learning_rate: NonNegativeSchedule = "3e-4"
    """Adam's learning rate: a number, or "step:value,..." in environment steps, linear between"""
    max_grad_norm: NonNegativeFloat = 10.0
    """maximum global norm of the gradient of Q-functions and policy together; 0 for no clipping"""

    def check(self) -> None:
        """Raises UsageError for inconsistent flags; the inherited groups check their own."""
        tuned = ("target_entropy_scale", "alpha_learning_rate", "min_alpha")
        runs.check_needs(self, self.autotune, "--autotune", tuned)
        # With dropout even a target copied at every update differs: it is evaluated without dropout.
        target_lags = self.tau < 1 or self.target_network_frequency > 1 or self.dropout
        needs = "a target network that lags, --tau below 1 or --target-network-frequency 2 or more"
        runs.check_needs(self, target_lags, needs, ("q_clip", "entropy_penalty"))

    def check_training(self) -> None:
        """Raises UsageError if a new run's temperature starts below its lower bound; not called to evaluate a run."""
        above = self.min_alpha <= self.alpha or self.resume  # which has its checkpoint's temperature
        check(above, f"--min-alpha {self.min_alpha}: give at most --alpha, {self.alpha}")


# NETWORK


class Agent(nn.Module):
    """Two Q-functions and a policy on one encoder, each with its own hidden layer."""

    encoder: nn.Module
    hidden: int
    dropout: float

    def setup(self):
        dense = partial(nn.Dense, precision="highest")  # no TF32 on a GPU
        small = nn.initializers.orthogonal(0.01)  # values start around 0, and the policy nearly uniform

        def head():
            return nn.Sequential([dense(self.hidden), nn.relu, dense(envs.NUM_ACTIONS, kernel_init=small)])

        self.policy, self.q1, self.q2 = head(), head(), head()

    def encode(self, frames: jax.Array, keys: jax.Array | None = None) -> jax.Array:
        """Frames uint8 [B, 64, 64, C] and dropout keys uint32 [B, 2] -> features float32 [B, hidden]."""
        return networks.dropout(self.encoder(frames), keys, self.dropout)

    def logits(self, features: jax.Array) -> jax.Array:
        """Features [B, hidden] -> the policy's logits float32 [B, 15]."""
        return self.policy(features)

    def q_values(self, features: jax.Array) -> jax.Array:
        """Features [B, hidden] -> both Q-functions of all actions, float32 [B, 2, 15]."""
        return jnp.stack([self.q1(features), self.q2(features)], axis=1)

    def __call__(self, frames: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Frames [B, 64, 64, C] -> logits [B, 15] and Q-values [B, 2, 15]."""
        features = self.encode(frames)
        return self.logits(features), self.q_values(features)


def make_agent(args: Args) -> Agent:
    """The network that these flags describe."""
    return Agent(networks.make_encoder(args), args.hidden, args.dropout)


# TRAINING STATE


class TrainState(NamedTuple):
    """State of the learner."""

    params: dict  # {"agent", "log_alpha" float32 []}; actors get both, log_alpha for the initial priorities
    target_params: dict  # of the agent
    opt_state: optax.OptState
    global_step: jax.Array  # int32 []: transitions played
    updates: jax.Array  # int32 []
    iterations: jax.Array  # int32 []: main-loop iterations so far
    learn_from: jax.Array  # int32 []: the step at which learning starts; later after a resume without the buffer


def make_optimizer(args: Args) -> optax.GradientTransformation:
    """Adam without the learning rate: `train_step` multiplies its updates by -learning_rate, from a schedule."""
    return optax.chain(devices.clip_by_global_norm(args.max_grad_norm), optax.scale_by_adam(eps=1e-8))


def init_state(args: Args, agent: Agent) -> TrainState:
    """The learner's state before its first update, from `args.seed`."""
    frames = jnp.zeros((1, 64, 64, 3 * len(args.stack_offsets)), jnp.uint8)
    params = {"agent": agent.init(jax.random.PRNGKey(args.seed), frames), "log_alpha": jnp.log(jnp.float32(args.alpha))}
    return TrainState(
        params=params,
        target_params=jax.tree.map(jnp.copy, params["agent"]),
        opt_state=make_optimizer(args).init(params["agent"]),
        global_step=jnp.int32(0),
        updates=jnp.int32(0),
        iterations=jnp.int32(0),
        learn_from=jnp.int32(args.learning_starts),
    )


# ACTING


def aggregate_q(args: Args, q_values: jax.Array) -> jax.Array:
    """The minimum over both Q-functions [B, 2, ...] or their mean: [B, ...] (Zhou et al. 2022, section 4)."""
    return q_values.mean(axis=1) if args.average_q else q_values.min(axis=1)


def soft_value(args: Args, logits: jax.Array, q_values: jax.Array, alpha: jax.Array) -> jax.Array:
    """The soft state values float32 [B] of a policy with logits [B, 15] by two Q-functions [B, 2, 15], at temperature
    alpha [] (Christodoulou 2019, equation 10: an exact expectation, not a sample)."""
    chex.assert_equal_shape([logits, q_values[:, 0], q_values[:, 1]])
    log_probs = jax.nn.log_softmax(logits)
    return (jnp.exp(log_probs) * (aggregate_q(args, q_values) - alpha * log_probs)).sum(axis=-1)


def act(args: Args, agent: Agent, params: dict, rollout: offpolicy.Rollout, obs: jax.Array, episode_step: jax.Array):
    """Samples actions for obs uint8 [n, 3, 64, 64] and episode_step int32 [n]; returns the rollout and actions [n]."""
    t = rollout.t
    frames = rollout.frames.write(t, obs, episode_step)
    logits, q_values = devices.map_in_chunks(partial(agent.apply, params["agent"]), frames.stack(t))
    policy_keys, sticky_keys = envs.step_keys(rollout.key, t, rollout.env_state.env_ids)
    actions = jax.vmap(jax.random.categorical)(policy_keys, logits)
    # For the transition's initial priority (`replay.insert`).
    state_value = soft_value(args, logits, q_values, jnp.exp(params["log_alpha"]))
    mean_q_values = q_values.mean(axis=1)  # as in the learner's TD error
    return offpolicy.record_step(
        args, rollout._replace(frames=frames), episode_step, actions,
        q_values=mean_q_values, state_value=state_value, sticky_keys=sticky_keys,
    )  # fmt: skip


# ALGORITHM


class Outputs(NamedTuple):
    """Network outputs for B transitions."""

    q_values: jax.Array  # float32 [B, 2, 15], of the online Q-functions
    logits: jax.Array  # float32 [B, 15], of the policy, from features behind a stop_gradient
    next_logits: jax.Array  # float32 [B, 15], of the policy for the next frames
    next_target_q_values: jax.Array  # float32 [B, 2, 15], of the target network for the next frames
    target_q_values: jax.Array | None  # float32 [B, 2, 15], of the target network; for --q-clip
    target_logits: jax.Array | None  # float32 [B, 15], of the target network; for --entropy-penalty


def policy_entropy(logits: jax.Array) -> jax.Array:
    """The entropy float32 [B] of a policy with logits [B, 15], nats."""
    log_probs = jax.nn.log_softmax(logits)
    return -(jnp.exp(log_probs) * log_probs).sum(axis=-1)


def sac_loss_terms(args: Args, outputs: Outputs, alpha: jax.Array, batch: replay.Batch) -> dict[str, jax.Array]:
    """SAC's loss terms for n-step transitions, per sample: float32 [B], at temperature alpha [].

    Critics: Christodoulou 2019, equation 4; policy, with exact expectations: equation 12. Zhou et al. 2022 (arXiv
    2209.10081): the mean of two Q-functions and the clipped Q-loss, equation 13, and the entropy penalty, equation 9,
    here with the target network's policy as the old one. Conservative Q-learning (Kumar et al. 2020, arXiv 2006.04779,
    equation 4, CQL(H)) lowers Q-values by their softmax weight and raises the played action's. Importance weights scale
    the Q-functions' losses, CQL's included; not those of policy and entropy penalty, nor the temperature's step.
    """
    chex.assert_equal_shape([batch.actions, batch.returns, batch.discounts, batch.weight])
    stop_gradient = jax.lax.stop_gradient

    def of_action(q_values):
        return jnp.take_along_axis(q_values, batch.actions[:, None, None], axis=2)[..., 0]

    # Only the bootstrap state's entropy is in the target, as is usual with n-step returns.
    next_value = soft_value(args, outputs.next_logits, outputs.next_target_q_values, alpha)
    target = stop_gradient(batch.returns + batch.discounts * next_value)[:, None]
    chosen = of_action(outputs.q_values)  # [B, 2]
    q_loss = (chosen - target) ** 2
    if args.q_clip:
        old = stop_gradient(of_action(outputs.target_q_values))
        q_clipped = old + jnp.clip(chosen - old, -args.q_clip, args.q_clip)
        q_loss = jnp.maximum(q_loss, (q_clipped - target) ** 2)
    entropy = policy_entropy(outputs.logits)
    terms = {
        "q_loss": batch.weight * 0.5 * q_loss.sum(axis=-1),
        "policy_loss": -soft_value(args, outputs.logits, stop_gradient(outputs.q_values), alpha),
        "q_values": chosen.mean(axis=-1),
        "q_difference": jnp.abs(chosen[:, 0] - chosen[:, 1]),
        "entropy": entropy,
        "td_error": jnp.abs(chosen.mean(axis=-1) - target[:, 0]),
    }
    total = terms["q_loss"] + terms["policy_loss"]
    if args.cql_alpha:
        terms["cql_loss"] = (jax.nn.logsumexp(outputs.q_values, axis=-1) - chosen).sum(axis=-1)
        total += args.cql_alpha * batch.weight * terms["cql_loss"]
    if args.entropy_penalty:
        total += args.entropy_penalty * 0.5 * (entropy - stop_gradient(policy_entropy(outputs.target_logits))) ** 2
    return terms | {"loss": total}


def loss(
    args: Args, agent: Agent, params: dict, batch: replay.Batch, *, target_params: dict, alpha: jax.Array
) -> dict[str, jax.Array]:
    """SAC's loss: that of the Q-functions plus that of the policy.

    Returns its terms per sample, float32 [B]; `devices.gradient` averages them over samples and devices and
    differentiates "loss"; all means are logged. A sample's terms may depend on that sample only: on a CPU `loss` is
    called on 8 samples at a time.
    """
    keys, next_keys, dropout_keys = (jax.vmap(jax.random.fold_in, in_axes=(0, None))(batch.keys, i) for i in range(3))
    frames = augment.augment(args, keys, batch.frames)
    next_frames = augment.augment(args, next_keys, batch.next_frames)
    features = agent.apply(params, frames, dropout_keys, method="encode")
    # The encoder learns from the Q-functions alone: gradients of the policy would shift their features.
    logits = agent.apply(params, jax.lax.stop_gradient(features), method="logits")
    target_logits = target_q_values = None
    if args.q_clip or args.entropy_penalty:
        target_logits, target_q_values = agent.apply(target_params, frames)
    outputs = Outputs(
        q_values=agent.apply(params, features, method="q_values"),
        logits=logits,
        next_logits=jax.lax.stop_gradient(agent.apply(params, next_frames)[0]),
        next_target_q_values=agent.apply(target_params, next_frames)[1],
        target_q_values=target_q_values,
        target_logits=target_logits,
    )
    return sac_loss_terms(args, outputs, alpha, batch)


def update_temperature(args: Args, log_alpha: jax.Array, entropy: jax.Array) -> jax.Array:
    """log alpha, float32 [], after a gradient step on Christodoulou 2019, equation 11, with a batch's mean entropy [].

    As usual the gradient with respect to alpha, entropy - target, is applied to log alpha. The step is plain SGD with
    its own learning rate: with Adam at the networks' rate alpha rises too slowly to stop a collapse of the entropy.
    """
    difference = args.target_entropy_scale * MAX_ENTROPY - entropy
    max_alpha = 10.0  # far above any game's need
    log_alpha = log_alpha + args.alpha_learning_rate * difference
    return jnp.clip(log_alpha, jnp.log(args.min_alpha), jnp.log(max_alpha))


def train_step(args: Args, agent: Agent, state: TrainState, batch: replay.Batch) -> tuple[TrainState, jax.Array, dict]:
    """One update: returns the next state, the absolute TD errors float32 [B] and metrics, float32 []."""
    learning_rate = runs.parse_schedule(args.learning_rate)(state.global_step)
    params, log_alpha = state.params["agent"], state.params["log_alpha"]
    batch_loss = partial(loss, args, agent, target_params=state.target_params, alpha=jnp.exp(log_alpha))
    # Weights of 1, since `loss` has the importance weights already; `gradient` would divide by their sum.
    grads, means, terms = devices.gradient(batch_loss, params, batch, jnp.ones_like(batch.returns))
    direction, opt_state = make_optimizer(args).update(grads, state.opt_state, params)
    params = optax.tree.add_scale(params, -learning_rate, direction)
    if args.autotune:
        log_alpha = update_temperature(args, log_alpha, means["entropy"])
    updates = state.updates + 1
    tau = jnp.where(updates % args.target_network_frequency == 0, args.tau, 0.0)
    target_params = optax.incremental_update(params, state.target_params, tau)
    metrics = {f"losses/{name}": value for name, value in means.items()} | {
        "losses/grad_norm": devices.global_norm(grads),
        "losses/param_norm": devices.global_norm(params),  # not finite if the last step diverged
        "losses/alpha": jnp.exp(log_alpha),
        "charts/learning_rate": learning_rate,
    }
    params = {"agent": params, "log_alpha": log_alpha}
    state = state._replace(params=params, target_params=target_params, opt_state=opt_state, updates=updates)
    return state, terms["td_error"], metrics


def make_update(args: Args, agent: Agent, mesh: Mesh) -> Callable:
    """Returns the jitted update(state, buffer, num_updates, beta) -> TrainState, Replay, metrics, which donates the
    state and the buffer: each device samples from its own part of the buffer (see `offpolicy.sample`)."""
    return jax.jit(
        jax.shard_map(
            partial(offpolicy.train_steps, args, partial(train_step, args, agent)),
            mesh=mesh,
            in_specs=(REPLICATED, replay.REPLAY_SPECS, REPLICATED, REPLICATED),
            out_specs=(REPLICATED, replay.REPLAY_SPECS, REPLICATED),
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
            in_specs=(REPLICATED, ENV_SHARDED),
            out_specs=(REPLICATED, ENV_SHARDED, REPLICATED),
            check_vma=False,
        ),
        donate_argnums=0,
    )


# EVALUATION


def make_policy(args: Args, agent: Agent, mesh: Mesh) -> Callable:
    """Returns policy(params, ...), the policy that `envs.play_episodes` calls; it samples actions."""

    def sample_actions(params, frames, episode_step, keys, hidden_state):
        logits, _ = devices.map_in_chunks(partial(agent.apply, params), frames)
        return jax.vmap(jax.random.categorical)(keys, logits), hidden_state

    return envs.jit_policy(mesh, sample_actions)


def load_params(args: Args, agent: Agent, run_dir: str) -> dict:
    """{"params", "global_step"} of a run's newest checkpoint or an exported agent."""
    return agents.load(run_dir, partial(init_state, args, agent), lambda state: {"params": state.params["agent"]})


# MAIN


def init_checkpoint(args: Args, agent: Agent) -> dict:
    """What a new run starts from; its checkpoints also hold the actors, the episodes' statistics and, unless
    --no-save-replay, the replay buffer."""
    return {"state": init_state(args, agent)}


def main(args: Args) -> runs.Run:
    """Trains; returns the run, finished or stopped by a signal (`run.stop`)."""
    runs.check_args(args, SCRIPT)
    args.check_training()
    agent, mesh = make_agent(args), devices.make_mesh(args)
    offpolicy.check_memory(args, mesh)
    policy, insert = make_policy(args, agent, mesh), offpolicy.make_insert(args, mesh)
    update, update_on_batch = make_update(args, agent, mesh), make_update_on_batch(args, agent, mesh)
    run_updates = offpolicy.make_run_updates(args, mesh, update, update_on_batch)
    replicated = devices.shardings(mesh, REPLICATED)

    with (
        runs.Run(args, SCRIPT, mesh, partial(init_checkpoint, args, agent), partial(offpolicy.load, args)) as run,
        offpolicy.make_fleet(args, agent, act) as fleet,
    ):
        episodes, watch = envs.EpisodeStatistics(args.num_envs), runs.Stopwatch()
        state = jax.device_put(run.checkpoint["state"], replicated)
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
            envs.evaluate_if_due(args, mesh, run, step, partial(policy, state.params["agent"]))
            if run.finished(step):
                break
            with watch("waiting"):
                actor_batches = fleet.get(run, save)
            if actor_batches is None:
                break
            i, before = int(state.iterations), step
            with watch("insert"):
                rollouts, timesteps = zip(*(batch.unroll for batch in actor_batches), strict=True)
                buffer = jax.block_until_ready(insert(buffer, rollouts, timesteps))
            timesteps = envs.join_envs(timesteps, axis=-1)
            step += int((~timesteps.is_reset).sum())
            beta = float(runs.parse_schedule(args.per_beta)(before))
            num_updates = offpolicy.updates_due(args, int(state.learn_from), before, step)
            state, buffer, metrics = run_updates(state, buffer, num_updates, beta, watch)
            state = jax.device_put(state._replace(global_step=jnp.int32(step), iterations=jnp.int32(i + 1)), replicated)
            fleet.publish(i + 1, state.params)
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
