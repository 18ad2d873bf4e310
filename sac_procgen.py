"""SAC on Procgen: soft actor-critic for discrete actions, with actor threads and a replay buffer.

Haarnoja et al. 2018 (arXiv 1812.05905) and Christodoulou 2019 (arXiv 1910.07207): twin Q-functions, a temperature that
holds the policy's entropy, and expectations over actions that are exact. Critics and policy see by one encoder, which
learns from the critics alone (Yarats et al. 2021, arXiv 1910.01741). Try:

    python sac_procgen.py --env-id coinrun --encoder nature --width 1 --pool flatten --buffer-size 100000
    python sac_procgen.py --env-id starpilot --encoder nature --width 1 --pool flatten --average-targets --q-clip 0.5
"""

import common  # noqa: F401, I001 - first: from here on signals are answered
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from common import augment, checkpoints, devices, envs, networks, replay, runs, shaping
from common.actors import ActorArgs, Fleet
from common.devices import GAMES, SAME
from common.runs import check

SCRIPT = Path(__file__).stem
MAX_ENTROPY = float(np.log(envs.NUM_ACTIONS))  # nats, of a policy that chooses at random


@dataclass(frozen=True)
class Args(envs.GameArgs, networks.EncoderArgs, augment.AugmentArgs, ActorArgs, runs.RunArgs):
    LIMITS: ClassVar = {
        "num_actors": (1, 256), "num_envs": (1, 65536), "num_steps": (1, 4096), "max_lag": (0, 64),
        "buffer_size": (1, 2**27), "replay_ratio": (0, 1024), "batch_size": (1, 65536), "per_alpha": (0, 1),
        "n_step": (1, 1024), "alpha": (1e-30, None), "target_entropy_scale": (0, 1), "tau": (0, 1),
        "target_network_frequency": (1, None), "q_clip": (0, None), "entropy_penalty": (0, None), "gamma": (0, 1),
        "max_grad_norm": (0, None),
    }  # fmt: skip
    # Each actor has games of its own, and the replay buffer holds what came of these.
    FIXED: ClassVar = (
        "num_actors", "num_steps", "n_step", "learning_starts", "per_alpha", "reward_shaping", "reward_clip",
    )  # fmt: skip

    total_timesteps: int = 8_000_000
    """environment steps to train for"""
    num_actors: int = 2
    """threads that play, each its own games"""
    num_envs: int = 32
    """games played side by side by all actors together"""
    num_steps: int = 16
    """steps of each game in an unroll, after which actors hand over and fetch parameters"""
    max_lag: int = 1
    """how many iterations old an unroll's parameters may be; 0 lets actors and learner take turns"""
    deterministic: bool = False
    """play each unroll with parameters exactly max_lag iterations old: the same seed then gives the same metrics"""
    buffer_size: int = 200_000
    """transitions in the replay buffer, 12 kB each"""
    save_replay: bool = True
    """keep the replay buffer in each checkpoint (12 kB a transition); else a resumed run refills it first"""
    learning_starts: int = 20_000
    """environment steps played before the first update"""
    replay_ratio: float = 2.0
    """transitions learnt from for each one played, whatever the machine's speed"""
    batch_size: int = 128
    """transitions in an update"""
    per_alpha: float = 0.0
    """prioritised replay: probabilities are proportional to |TD error| to this power; 0 for uniform"""
    per_beta: str = "0:0.4,2000000:1"
    """prioritised replay: how far importance weights correct for that; a number or a schedule"""
    n_step: int = 3
    """rewards before the bootstrap"""
    autotune: bool = True
    """move the temperature so that the policy's entropy comes to its target"""
    alpha: float = 0.01
    """the temperature, what a nat of entropy is worth: to begin with, or for ever without --autotune"""
    target_entropy_scale: float = 0.3
    """the target of the policy's entropy, as a part of log 15, that of a random policy"""
    tau: float = 0.005
    """how far the target network goes towards the one that learns; 1 copies it"""
    target_network_frequency: int = 1
    """updates between two such moves"""
    average_targets: bool = False
    """take the mean of the two Q-functions and not the lesser one, which may be far too low"""
    q_clip: float = 0.0
    """a Q-value gains nothing by being further than this from the target network's; 0 for no clipping"""
    entropy_penalty: float = 0.0
    """coefficient of the squared difference between the policy's entropy and its target network's"""
    gamma: float = 0.99
    """discount"""
    learning_rate: str = "3e-4"
    """Adam's step size: a number, or "step:value,..." for piecewise-linear in environment steps"""
    max_grad_norm: float = 10.0
    """clip the gradient to this global norm; 0 for no clipping"""

    def check(self) -> None:
        """Raises UsageError, one sentence, if these flags make no sense."""
        games, unroll = self.num_envs, self.n_step + self.num_steps
        check(not self.distributed, f"--distributed: {SCRIPT}.py trains on one host, on as many devices as it has")
        check(games % self.num_actors == 0, f"--num-actors {self.num_actors}: must divide the number of games, {games}")
        least = games * (unroll + 2 * max(self.frame_stack - 1, 1))  # the oldest rows lack frames of their stacks
        check(
            buffer_rows(self) * games >= least,
            f"--buffer-size {self.buffer_size}: give {least} or more, {games} games times an unroll and an n-step "
            "return",
        )
        check(
            games * unroll <= self.learning_starts <= self.buffer_size,
            f"--learning-starts {self.learning_starts}: must be from {games * unroll}, {games} games times an unroll "
            f"and an n-step return, to --buffer-size, {self.buffer_size}",
        )
        runs.check_needs(self, self.autotune, "--autotune", ("target_entropy_scale",))
        runs.check_needs(self, self.per_alpha, "--per-alpha", ("per_beta",))
        runs.check_schedule("--learning-rate", self.learning_rate, 0, None)
        runs.check_schedule("--per-beta", self.per_beta, 0, 1)

    def shares(self) -> dict[str, int]:
        """What the devices divide between them."""
        games = self.num_envs // self.num_actors
        return {"an actor's games, --num-envs / --num-actors": games, "--batch-size": self.batch_size}


def buffer_rows(args: Args) -> int:
    """Steps of each game in the replay buffer: whole unrolls."""
    return -(-args.buffer_size // (args.num_envs * args.num_steps)) * args.num_steps


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
        """Frames uint8 [B, 64, 64, C] and keys for dropout [B, 2] -> features float32 [B, hidden]."""
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
    return Agent(networks.make_encoder(args), args.hidden, args.dropout)


# TRAINING STATE


class TrainState(NamedTuple):
    """The learner."""

    params: dict  # of the "agent", and "log_alpha" float32 [], the temperature's logarithm
    target: dict  # of the agent
    opt_state: optax.OptState
    global_step: jax.Array  # int32 []: transitions played
    updates: jax.Array  # int32 []
    iterations: jax.Array  # int32 []: the version of the parameters that actors have
    learn_from: jax.Array  # int32 []: the step at which learning starts


class Carry(NamedTuple):
    """What an actor needs besides its games to go on with n of them."""

    history: jax.Array  # uint8 [H, n, 64, 64, 3]: the frames before the newest
    numbers: jax.Array  # int32 [n]: of these games in the run
    last_action: jax.Array  # int32 [n]: what the games played last


def make_optimizer(args: Args) -> optax.GradientTransformation:
    """The direction of a step; `update` multiplies it by the scheduled learning rate."""
    clip = devices.clip_by_norm(args.max_grad_norm) if args.max_grad_norm else optax.identity()
    return optax.chain(clip, optax.scale_by_adam())


@partial(jax.jit, static_argnums=(0, 1))
def initial_state(args: Args, agent: Agent) -> TrainState:
    frames = jnp.zeros((1, 64, 64, 3 * len(args.offsets)), jnp.uint8)
    params = {"agent": agent.init(jax.random.PRNGKey(args.seed), frames), "log_alpha": jnp.log(args.alpha)}
    return TrainState(
        params=params,
        target=jax.tree.map(jnp.copy, params["agent"]),
        opt_state=make_optimizer(args).init(params),
        global_step=jnp.int32(0),
        updates=jnp.int32(0),
        iterations=jnp.int32(0),
        learn_from=jnp.int32(args.learning_starts),
    )


def initial_replay(args: Args) -> replay.Replay:
    return replay.empty(buffer_rows(args), args.num_envs, args.offsets)


@partial(jax.jit, static_argnums=0)
def initial_carry(args: Args, numbers: jax.Array) -> Carry:
    """Before the first step of the games with these numbers, int32 [n]."""
    return Carry(envs.empty_history(len(numbers), args.offsets), numbers, last_action=jnp.zeros_like(numbers))


# ROLLOUT


class Rollout(NamedTuple):
    """What stays on an actor's device while it plays T steps of n games."""

    frames: envs.Frames  # of T steps
    actions: jax.Array  # int32 [T, n]
    action_value: jax.Array  # float32 [T, n]: of that action
    state_value: jax.Array  # float32 [T, n]: soft, of the policy
    numbers: jax.Array  # int32 [n]
    last_action: jax.Array  # int32 [n]
    key: jax.Array
    t: jax.Array  # int32 []


ROLLOUT = devices.layout(Rollout, steps="frames actions action_value state_value", games="numbers last_action")


class Unroll(NamedTuple):
    """What an actor hands to the learner."""

    rollout: Rollout
    steps: envs.Steps


def soft_value(args: Args, logits: jax.Array, values: jax.Array, alpha: jax.Array) -> jax.Array:
    """The value float32 [B] of states where a policy with logits [B, 15] acts, its entropy included, by two Q-functions
    [B, 2, 15] (Christodoulou 2019, equation 10: an expectation, no sample)."""
    chex.assert_equal_shape([logits, values[:, 0], values[:, 1]])
    log_probs = jax.nn.log_softmax(logits)
    return (jnp.exp(log_probs) * (one_of_two(args, values) - alpha * log_probs)).sum(axis=-1)


def one_of_two(args: Args, values: jax.Array) -> jax.Array:
    """Two Q-functions [B, 2, ...] -> the lesser one or, if asked, their mean [B, ...] (Zhou et al. 2022, section 4)."""
    return values.mean(axis=1) if args.average_targets else values.min(axis=1)


@partial(jax.jit, static_argnums=0)
def begin_rollout(args: Args, carry: Carry, i: int) -> Rollout:
    """An actor's i-th rollout, before its first step."""
    shape = (args.num_steps, len(carry.numbers))
    return Rollout(
        frames=envs.Frames.after(carry.history, args.num_steps, args.offsets),
        actions=jnp.zeros(shape, jnp.int32),
        action_value=jnp.zeros(shape),
        state_value=jnp.zeros(shape),
        numbers=carry.numbers,
        last_action=carry.last_action,
        key=jax.random.fold_in(jax.random.PRNGKey(envs.derive_seed(args.seed, 0)), i),
        t=jnp.int32(0),
    )


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def act(args: Args, agent: Agent, params: dict, rollout: Rollout, obs: jax.Array, age: jax.Array):
    """Chooses actions for obs uint8 [n, 3, 64, 64], age int32 [n]; returns the rollout and actions int32 [n]."""
    t = rollout.t
    frames = rollout.frames.put(t, obs, age)
    logits, values = devices.in_chunks(partial(agent.apply, params["agent"]), frames.stack(t))
    choose_key, stick_key = jax.random.split(jax.random.fold_in(rollout.key, t))
    # Drawn by game, so that it plays the same whichever actor it has.
    actions = jax.vmap(jax.random.categorical)(devices.keys_of(choose_key, rollout.numbers), logits)
    action_value = jnp.take_along_axis(one_of_two(args, values), actions[:, None], axis=-1)[:, 0]
    stick_keys = devices.keys_of(stick_key, rollout.numbers)
    played = envs.stick(stick_keys, args.sticky_actions, actions, last_action=rollout.last_action, age=age)
    rollout = rollout._replace(
        frames=frames,
        actions=rollout.actions.at[t].set(actions),
        action_value=rollout.action_value.at[t].set(action_value),
        state_value=rollout.state_value.at[t].set(soft_value(args, logits, values, jnp.exp(params["log_alpha"]))),
        last_action=played,
        t=t + 1,
    )
    return rollout, played


def collect(args: Args, agent: Agent, games: envs.Games, params: dict, carry: Carry, *, i: int, watch, check_stop):
    """Plays an actor's i-th unroll, as `actors.Fleet` asks for it in its thread: Unroll and the next Carry."""
    params = params | {"agent": networks.for_acting(agent, params["agent"])}
    rollout = begin_rollout(args, carry, i)

    def choose_actions(obs, age):
        nonlocal rollout
        rollout, actions = act(args, agent, params, rollout, obs, age)
        return actions

    steps = games.play(choose_actions, args.num_steps, watch, check_stop)
    history = rollout.frames.history(args.num_steps)
    return Unroll(rollout, steps), Carry(history, rollout.numbers, rollout.last_action)


# REPLAY


@partial(jax.jit, static_argnums=0, donate_argnums=1)
@devices.spread([replay.REPLAY, [ROLLOUT], [envs.STEPS]], replay.REPLAY)
def insert(args: Args, buffer: replay.Replay, rollouts: Sequence[Rollout], steps: Sequence[envs.Steps]):
    """Adds the actors' rollouts and steps [T, n], side by side; each device has the part of its own games."""
    parts = [(r.frames, r.actions, r.action_value, r.state_value) for r in rollouts]
    frames, actions, action_value, state_value = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *parts)
    steps = envs.join_steps(steps)
    new = replay.Rows(
        frames=frames,
        actions=actions,
        rewards=shaping.shape_and_clip(args, steps.rewards),
        terminated=steps.terminated,
        ended=steps.ended,
        done=steps.done,
        action_value=action_value,
        state_value=state_value,
    )
    return replay.insert(buffer, new, steps.restarts, n_step=args.n_step, gamma=args.gamma, per_alpha=args.per_alpha)


def sample(args: Args, buffer: replay.Replay, i: jax.Array, beta: jax.Array) -> replay.Batch:
    """Draws the i-th update's batch, or a device's part of it."""
    key = devices.own_key(jax.random.fold_in(jax.random.PRNGKey(envs.derive_seed(args.seed, 1)), i))
    size = args.batch_size // devices.size()
    return replay.sample(buffer, key, beta, batch_size=size, n_step=args.n_step, gamma=args.gamma)


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


def sac_parts(args: Args, outputs: Outputs, log_alpha: jax.Array, batch: replay.Batch) -> dict[str, jax.Array]:
    """The parts of SAC's losses of n-step transitions, for each sample, float32 [B].

    Critics: Christodoulou 2019, equation 4; policy, with exact expectations: equation 12; temperature: equation 11, of
    its logarithm. Zhou et al. 2022 (arXiv 2209.10081): the mean of two Q-functions and the clipped Q-loss, equation 13,
    and the entropy's penalty, equation 9, here by the target network's policy as the old one.
    """
    chex.assert_equal_shape([batch.actions, batch.returns, batch.discounts, batch.weight])
    held = jax.lax.stop_gradient
    alpha = held(jnp.exp(log_alpha))

    def pick(values):
        return jnp.take_along_axis(values, batch.actions[:, None, None], axis=2)[..., 0]

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
        "entropy": entropy,
        "td_error": jnp.abs(chosen.mean(axis=-1) - goal[:, 0]),
    }
    total = parts["q_loss"] + parts["policy_loss"]
    if args.autotune:
        total += log_alpha * held(entropy - args.target_entropy_scale * MAX_ENTROPY)
    if args.entropy_penalty:
        total += args.entropy_penalty * 0.5 * (entropy - held(entropy_of(outputs.old_logits))) ** 2
    return parts | {"loss": total}


def loss(args: Args, agent: Agent, params: dict, batch: replay.Batch, *, target: dict) -> dict[str, jax.Array]:
    """SAC's losses. Returns their parts for each sample, float32 [B]: `devices.gradient` says why, and takes the
    mean."""
    frames, next_frames, dropout_keys = batch.frames, batch.next_frames, None
    if args.augment or args.dropout:
        keys, next_keys, dropout_keys = (
            jax.vmap(jax.random.fold_in, in_axes=(0, None))(batch.keys, i) for i in range(3)
        )
        transform = partial(augment.augment, augment.parse(args.augment), args.augment_prob)
        frames, next_frames = transform(keys, frames), transform(next_keys, next_frames)
    features = agent.apply(params["agent"], frames, dropout_keys, method="encode")
    # The encoder learns from the critics alone: what the policy's loss would do to it, they would have to follow.
    logits = agent.apply(params["agent"], jax.lax.stop_gradient(features), method="logits")
    old_logits, old_values = agent.apply(target, frames) if args.q_clip or args.entropy_penalty else (None, None)
    outputs = Outputs(
        values=agent.apply(params["agent"], features, method="values"),
        logits=logits,
        next_logits=jax.lax.stop_gradient(agent.apply(params["agent"], next_frames)[0]),
        next_target=agent.apply(target, next_frames)[1],
        old_values=old_values,
        old_logits=old_logits,
    )
    return sac_parts(args, outputs, params["log_alpha"], batch)


def improve(args: Args, agent: Agent, state: TrainState, batch: replay.Batch) -> tuple[TrainState, jax.Array, dict]:
    """One update: returns the next state, the absolute TD errors float32 [B] and metrics, float32 []."""
    learning_rate = runs.parse_schedule(args.learning_rate)(state.global_step)
    objective = partial(loss, args, agent, target=state.target)
    grads, means, parts = devices.gradient(objective, state.params, batch, jnp.ones_like(batch.returns))
    direction, opt_state = make_optimizer(args).update(grads, state.opt_state)
    params = optax.apply_updates(state.params, jax.tree.map(lambda d: -learning_rate * d, direction))
    updates = state.updates + 1
    move = jnp.where(updates % args.target_network_frequency == 0, args.tau, 0.0)
    target = jax.tree.map(lambda new, old: old + move * (new - old), params["agent"], state.target)
    metrics = {f"losses/{name}": value for name, value in means.items()} | {
        "losses/grad_norm": devices.norm(grads),
        "losses/param_norm": devices.norm(params),  # infinite where the last step went wrong
        "losses/alpha": jnp.exp(params["log_alpha"]),
        "charts/learning_rate": learning_rate,
    }
    state = state._replace(params=params, target=target, opt_state=opt_state, updates=updates)
    return state, parts["td_error"], metrics


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
@devices.spread([SAME, replay.REPLAY, SAME, SAME], (SAME, replay.REPLAY, SAME))
def update(args: Args, agent: Agent, state: TrainState, buffer: replay.Replay, k: jax.Array, beta: jax.Array):
    """k updates as one program, so that nothing waits for Python: each device draws from its own part of the buffer.

    Returns the state, the buffer with new priorities, and mean metrics.
    """

    def once(state, buffer):
        batch = sample(args, buffer, state.updates, beta)
        state, td, metrics = improve(args, agent, state, batch)
        return state, replay.set_priorities(buffer, batch, td, per_alpha=args.per_alpha), metrics

    def add(_, carry):
        state, buffer, metrics = once(*carry[:2])
        return state, buffer, jax.tree.map(jnp.add, carry[2], metrics)

    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(once, state, buffer)[2])
    state, buffer, sums = jax.lax.fori_loop(0, k, add, (state, buffer, zero))
    return state, buffer, jax.tree.map(lambda x: x / k, sums)


def updates_due(args: Args, learn_from: int, before: int, after: int) -> int:
    """How many updates belong between two environment steps."""

    def due(step):
        return int(args.replay_ratio * max(step - learn_from, 0) / args.batch_size)

    return due(after) - due(before)


# EVALUATION


@partial(jax.jit, static_argnums=(0, 1))
@devices.spread([SAME, GAMES, GAMES], GAMES)
def choose(args: Args, agent: Agent, params: dict, frames: jax.Array, keys: jax.Array) -> jax.Array:
    """Draws actions int32 [N] from the policy for stacked frames uint8 [N, 64, 64, C], with a key [2] for each."""
    logits, _ = devices.in_chunks(partial(agent.apply, params), frames)
    return jax.vmap(jax.random.categorical)(keys, logits)


def make_policy(args: Args, agent: Agent, params: dict) -> Callable:
    """A policy as `envs.play_episodes` calls it."""

    def policy(frames, age, key, memory):
        return choose(args, agent, params, frames, jax.random.split(key, len(frames))), None

    return policy


def evaluate(args: Args, run_dir: str, **how) -> runs.Evaluation:
    """For evaluate.py: plays the newest checkpoint of a run (see `envs.evaluate_checkpoint`)."""
    agent = make_agent(args)
    state = devices.put(args, load(args, agent, run_dir)["state"], SAME)
    return envs.evaluate_checkpoint(
        args, int(state.global_step), make_policy(args, agent, state.params["agent"]), **how
    )


# MAIN


def initial(args: Args, agent: Agent) -> dict:
    """All that a resume needs besides the actors, their games and the replay buffer; `main` saves the same."""
    return {"state": initial_state(args, agent)}


def load(args: Args, agent: Agent, run_dir: str) -> dict:
    """The newest checkpoint of a run, with its replay buffer if it was saved."""
    saved = runs.load(run_dir, jax.eval_shape(partial(initial, args, agent)))
    if "replay" in saved:
        template = jax.eval_shape(partial(initial_replay, args))
        saved["replay"] = checkpoints.restore_tree(template, saved["replay"], run_dir)
    return saved


def make_fleet(args: Args, agent: Agent) -> Fleet:
    numbers, seed = devices.games_of_host(args).reshape(args.num_actors, -1), envs.derive_seed(args.seed, 0)
    return Fleet(
        partial(collect, args, agent),
        [envs.Games(partial(envs.make_levels, args), own, seed, args.restart_every) for own in numbers],
        [initial_carry(args, own) for own in numbers],
        homes=devices.of_actors(args, args.num_actors),
        max_lag=args.max_lag,
        lockstep=args.deterministic,
    )


def make_buffer(args: Args, saved: dict | None) -> replay.Replay:
    """The replay buffer where it is to lie, as it was saved or empty."""
    home = devices.shardings(args, replay.REPLAY)
    if saved and "replay" in saved:
        return jax.device_put(saved.pop("replay"), home)
    return jax.jit(partial(initial_replay, args), out_shardings=home)()


def describe(buffer: replay.Replay) -> str:
    size, count = sum(x.nbytes for x in jax.tree.leaves(buffer)), buffer.priorities.size
    where = ", ".join(map(str, buffer.written.devices()))
    return f"replay buffer: {count:,} steps x {size / count / 1e3:.1f} kB = {size / 1e9:.2f} GB, on {where}"


def kept(args: Args, agent: Agent) -> tuple:
    """What a run keeps, for `runs.check_memory`."""
    carry = initial_carry(args, devices.games_of_host(args))
    rollout = begin_rollout(args, carry, 0)
    return initial(args, agent), rollout, rollout  # one unroll is played while another is learnt from


def main(args: Args) -> runs.Run:
    """Trains; returns the run, finished or stopped by a signal (`run.stop`)."""
    runs.check_args(args, SCRIPT)
    agent = make_agent(args)
    whole = partial(initial_replay, args), partial(kept, args, agent)
    runs.check_memory(args, ("num_envs", "num_steps", "buffer_size"), [jax.eval_shape(some) for some in whole])

    with runs.Run(args, SCRIPT, partial(load, args, agent)) as run, make_fleet(args, agent) as fleet:
        saved, buffer = run.saved, make_buffer(args, run.saved)
        episodes, watch = envs.EpisodeStatistics(args.num_envs), runs.Stopwatch()
        state = devices.put(args, (saved or initial(args, agent))["state"], SAME)
        step = int(state.global_step)
        if saved:
            episodes.restore(saved["episodes"])
            fleet.restore(saved["fleet"], state.params, run)
            if not buffer.written:
                state = state._replace(learn_from=state.global_step + args.learning_starts)
                run.say(f"the replay buffer was not saved: learning goes on after {args.learning_starts:,} more steps")
        run.say(describe(buffer))

        def save():
            tree = {"state": state} | ({"replay": buffer} if args.save_replay else {})
            run.save(step, tree, {"fleet": fleet.save(), "episodes": episodes.save()})

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
                rollouts, steps = zip(*(item.unroll for item in items), strict=True)
                lies = (ROLLOUT,) * len(rollouts), (envs.STEPS,) * len(steps)
                given = devices.put(args, (rollouts, steps), lies)
                buffer = jax.block_until_ready(insert(args, buffer, *given))
            steps = envs.join_steps(steps)
            step += int((~steps.done).sum())
            beta = float(runs.parse_schedule(args.per_beta)(step))
            k = updates_due(args, int(state.learn_from), before, step)
            metrics = {}
            if k:
                with watch("update"):
                    state, buffer, metrics = update(args, agent, state, buffer, k, beta)
                    metrics = jax.device_get(metrics)
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
