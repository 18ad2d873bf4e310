"""Ape-X DQN on Procgen: actors that explore differently fill a prioritised replay, one learner samples from it.

Horgan et al. 2018 (arXiv 1803.00933), with what a 2020 Procgen competition entry added: dueling streams, double
Q-learning, n-step returns and a distribution of values (C51). Its settings are the defaults. Try:

    python apex_procgen.py --env-id coinrun --gap-stack
    python apex_procgen.py --env-id coinrun --n-step 3 --num-atoms 1 --augment translate --buffer-size 50000
"""

import common  # noqa: F401, I001 - first: from here on signals are answered
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

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
EVALUATION_EPSILON = 0.001  # Horgan et al. 2018, appendix C: without it a policy may stand still for ever


@dataclass(frozen=True)
class Args(envs.GameArgs, networks.EncoderArgs, augment.AugmentArgs, ActorArgs, runs.RunArgs):
    LIMITS: ClassVar = {
        "num_actors": (1, 256), "num_envs": (1, 65536), "num_steps": (1, 4096), "max_lag": (0, 64), "epsilon": (0, 1),
        "epsilon_alpha": (0, None), "buffer_size": (1, 2**27), "replay_ratio": (0, 1024), "batch_size": (1, 65536),
        "per_alpha": (0, 1), "n_step": (1, 1024), "num_atoms": (1, 1024), "v_min": (-1e9, 1e9), "v_max": (-1e9, 1e9),
        "target_network_frequency": (1, None), "gamma": (0, 1), "max_grad_norm": (0, None), "adam_eps": (1e-30, None),
        "l2": (0, None),
    }  # fmt: skip
    # Each actor has games of its own, and the replay buffer holds what came of these.
    FIXED: ClassVar = (
        "num_actors", "num_steps", "n_step", "learning_starts", "per_alpha", "reward_shaping", "reward_clip",
    )  # fmt: skip

    hidden: int = 512
    dueling: bool = True
    """a stream for the state's value beside the one for the actions' advantages, each with a dense layer of its own"""
    total_timesteps: int = 8_000_000
    """environment steps to train for"""
    num_actors: int = 2
    """threads that play, each its own games"""
    num_envs: int = 24
    """games played side by side by all actors together; each explores with its own epsilon"""
    num_steps: int = 16
    """steps of each game in an unroll, after which actors hand over and fetch parameters"""
    max_lag: int = 1
    """how many iterations old an unroll's parameters may be; 0 lets actors and learner take turns"""
    deterministic: bool = False
    """play each unroll with parameters exactly max_lag iterations old: the same seed then gives the same metrics"""
    epsilon: float = 0.4
    """game i of N plays a random action with probability epsilon^(1 + i / (N - 1) * epsilon_alpha)"""
    epsilon_alpha: float = 7.0
    """how much less the last game explores than the first"""
    buffer_size: int = 200_000
    """transitions in the replay buffer, 12 kB each"""
    replay_device: Literal["device", "host"] = "device"
    """where the replay buffer is: on the devices that learn, each its own games' part, or in the host's memory"""
    save_replay: bool = True
    """keep the replay buffer in each checkpoint (12 kB a transition); else a resumed run refills it first"""
    learning_starts: int = 50_000
    """environment steps played before the first update"""
    replay_ratio: float = 2.0
    """transitions learnt from for each one played, whatever the machine's speed"""
    batch_size: int = 128
    """transitions in an update"""
    per_alpha: float = 0.5
    """prioritised replay: probabilities are proportional to |TD error| to this power; 0 for uniform"""
    per_beta: str = "0:0.4,2000000:1"
    """prioritised replay: how far importance weights correct for that; a number or a schedule"""
    n_step: int = 20
    """rewards before the bootstrap"""
    num_atoms: int = 99
    """atoms of the distribution of values (C51); 1 for its mean alone, learnt with Huber's loss"""
    v_min: float = -5.0
    """the lowest atom"""
    v_max: float = 20.0
    """the highest atom; returns above it cannot be told apart"""
    double_q: bool = True
    """choose the next action by the online network, and take its value from the target network"""
    target_network_frequency: int = 150
    """updates between two copies to the target network"""
    gamma: float = 0.99
    """discount"""
    learning_rate: str = "1e-4"
    """Adam's step size: a number, or "step:value,..." for piecewise-linear in environment steps"""
    max_grad_norm: float = 40.0
    """clip the gradient to this global norm; 0 for no clipping"""
    adam_eps: float = 1.5e-4
    """Adam's epsilon"""
    l2: float = 0.0
    """coefficient of the squared norm of the convolutions' kernels in the loss"""

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
        check(
            self.v_min <= 0 <= self.v_max and self.v_max - self.v_min >= 1e-3,
            f"--v-min {self.v_min}: must be 0 or less, and less than --v-max, which must be 0 or more, not "
            f"{self.v_max}",
        )
        platforms = jax.config.jax_platforms or "cpu"
        check(
            self.replay_device == "device" or "cpu" in platforms,
            f"--replay-device host: JAX_PLATFORMS={platforms} leaves out the host's memory, give {platforms},cpu",
        )
        runs.check_needs(self, self.num_atoms > 1, "--num-atoms 2 or more", ("v_min", "v_max"))
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
    """Values of all actions (their distributions, if num_atoms > 1), in dueling streams (Wang et al. 2016)."""

    encoder: nn.Module
    hidden: int
    dropout: float
    dueling: bool
    support: tuple[float, ...]

    @nn.compact
    def __call__(self, frames: jax.Array, keys: jax.Array | None = None) -> jax.Array:
        """Frames uint8 [B, 64, 64, C] and keys for dropout [B, 2] -> float32 [B, 15, atoms]: logits, or values."""
        x = networks.dropout(self.encoder(frames), keys, self.dropout)
        atoms = len(self.support)

        def stream(outputs, bias_init=nn.initializers.zeros):
            dense = partial(nn.Dense, precision="highest")  # in full float32 on a GPU too
            hidden = nn.relu(dense(self.hidden)(x))
            return dense(outputs * atoms, bias_init=bias_init)(hidden).reshape(len(x), outputs, atoms)

        def near_zero(key, shape, dtype=jnp.float32):
            """Values start around 0, as one atom's do, and not in the middle of the support, which is above all that
            most games pay: what is far too high bootstraps itself and is slow to come down."""
            if atoms == 1:
                return jnp.zeros(shape, dtype)
            z = np.array(self.support)
            return jnp.tile(jnp.asarray(-((z / (0.05 * (z[-1] - z[0]))) ** 2) / 2, dtype), shape[0] // atoms)

        if not self.dueling:
            return stream(envs.NUM_ACTIONS, near_zero)
        advantages = stream(envs.NUM_ACTIONS)
        return stream(1, near_zero) + advantages - advantages.mean(axis=1, keepdims=True)


def make_agent(args: Args) -> Agent:
    encoder = networks.make_encoder(replace(args, hidden=0))  # the streams have the dense layers
    support = tuple(np.linspace(args.v_min, args.v_max, args.num_atoms).tolist()) if args.num_atoms > 1 else (0.0,)
    return Agent(encoder, args.hidden, args.dropout, args.dueling, support)


def mean_value(support: Sequence[float], outputs: jax.Array) -> jax.Array:
    """The network's outputs [..., atoms] -> values [...]."""
    if len(support) == 1:
        return outputs[..., 0]
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


class Carry(NamedTuple):
    """What an actor needs besides its games to go on with n of them."""

    history: jax.Array  # uint8 [H, n, 64, 64, 3]: the frames before the newest
    numbers: jax.Array  # int32 [n]: of these games in the run
    last_action: jax.Array  # int32 [n]: what the games played last


def make_optimizer(args: Args) -> optax.GradientTransformation:
    """The direction of a step; `update` multiplies it by the scheduled learning rate."""
    clip = devices.clip_by_norm(args.max_grad_norm) if args.max_grad_norm else optax.identity()
    return optax.chain(clip, optax.scale_by_adam(eps=args.adam_eps))


@partial(jax.jit, static_argnums=(0, 1))
def initial_state(args: Args, agent: Agent) -> TrainState:
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
    state_value: jax.Array  # float32 [T, n]: of the best one
    numbers: jax.Array  # int32 [n]
    last_action: jax.Array  # int32 [n]
    key: jax.Array
    t: jax.Array  # int32 []


ROLLOUT = devices.layout(Rollout, steps="frames actions action_value state_value", games="numbers last_action")


class Unroll(NamedTuple):
    """What an actor hands to the learner."""

    rollout: Rollout
    steps: envs.Steps


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
    values = mean_value(agent.support, devices.in_chunks(partial(agent.apply, params), frames.stack(t)))
    choose_key, stick_key = jax.random.split(jax.random.fold_in(rollout.key, t))
    # Drawn by game, so that it plays the same whichever actor it has.
    epsilon = jnp.array(epsilons(args))[rollout.numbers]
    actions = explore(devices.keys_of(choose_key, rollout.numbers), values, epsilon)
    stick_keys = devices.keys_of(stick_key, rollout.numbers)
    played = envs.stick(stick_keys, args.sticky_actions, actions, last_action=rollout.last_action, age=age)
    rollout = rollout._replace(
        frames=frames,
        actions=rollout.actions.at[t].set(actions),
        action_value=rollout.action_value.at[t].set(jnp.take_along_axis(values, actions[:, None], axis=-1)[:, 0]),
        state_value=rollout.state_value.at[t].set(values.max(axis=-1)),
        last_action=played,
        t=t + 1,
    )
    return rollout, played


def collect(args: Args, agent: Agent, games: envs.Games, params: dict, carry: Carry, *, i: int, watch, check_stop):
    """Plays an actor's i-th unroll, as `actors.Fleet` asks for it in its thread: Unroll and the next Carry."""
    params = networks.for_acting(agent, params)
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
@devices.spread(
    [replay.REPLAY, [ROLLOUT], [envs.STEPS]], replay.REPLAY, when=lambda args: args.replay_device == "device"
)
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


@partial(jax.jit, static_argnums=0)
def sample(args: Args, buffer: replay.Replay, i: jax.Array, beta: jax.Array) -> replay.Batch:
    """Draws the i-th update's batch, or a device's part of it."""
    key = devices.own_key(jax.random.fold_in(jax.random.PRNGKey(envs.derive_seed(args.seed, 1)), i))
    size = args.batch_size // devices.size()
    return replay.sample(buffer, key, beta, batch_size=size, n_step=args.n_step, gamma=args.gamma)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def set_priorities(args: Args, buffer: replay.Replay, batch: replay.Batch, td: jax.Array) -> replay.Replay:
    """Takes what an update has found: absolute TD errors [B]."""
    return replay.set_priorities(buffer, batch, td, per_alpha=args.per_alpha)


# ALGORITHM


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


def q_parts(
    support: Sequence[float], outputs: jax.Array, batch: replay.Batch, *, following: jax.Array, judge: jax.Array
) -> dict[str, jax.Array]:
    """The parts of Q-learning's loss of n-step transitions, for each sample, float32 [B].

    For distributions the cross-entropy with the projected target (Bellemare et al. 2017, algorithm 1). One atom has no
    distribution to learn: it is the value itself, with Huber's loss, as in Ape-X (its section 3). The TD error is that
    of means in both, since those are what actors can compute too.

    Args:
      support: of the distributions.
      outputs: float32 [B, 15, atoms], of the network that learns, for the batch's frames.
      following: float32 [B, 15, atoms], of the target network, for its next frames.
      judge: float32 [B, 15, atoms], for its next frames, of the network that chooses the next action.
    """
    chex.assert_equal_shape([outputs, following, judge])
    chex.assert_equal_shape([batch.actions, batch.returns, batch.discounts, batch.weight])

    def pick(x, actions):
        return jnp.take_along_axis(x, actions[:, None, None], axis=1)[:, 0]

    outputs = pick(outputs, batch.actions)
    following = jax.lax.stop_gradient(pick(following, mean_value(support, judge).argmax(axis=1)))
    value = mean_value(support, outputs)
    td = batch.returns + batch.discounts * mean_value(support, following) - value
    if len(support) == 1:
        losses = optax.huber_loss(td)
    else:
        goal = project(jnp.array(support), batch.returns, batch.discounts, nn.softmax(following))
        losses = -(goal * nn.log_softmax(outputs)).sum(axis=-1)
    chex.assert_equal_shape([losses, td, batch.weight])
    return {"loss": batch.weight * losses, "q_values": value, "td_error": jnp.abs(td)}


def loss(args: Args, agent: Agent, params: dict, batch: replay.Batch, *, target: dict) -> dict[str, jax.Array]:
    """Ape-X's loss. Returns its parts for each sample, float32 [B]: `devices.gradient` says why, and takes the mean."""
    frames, next_frames, dropout_keys = batch.frames, batch.next_frames, None
    if args.augment or args.dropout:
        keys, next_keys, dropout_keys = (
            jax.vmap(jax.random.fold_in, in_axes=(0, None))(batch.keys, i) for i in range(3)
        )
        transform = partial(augment.augment, augment.parse(args.augment), args.augment_prob)
        frames, next_frames = transform(keys, frames), transform(next_keys, next_frames)
    outputs = agent.apply(params, frames, dropout_keys)
    following = agent.apply(target, next_frames)
    judge = agent.apply(params, next_frames) if args.double_q else following
    return q_parts(agent.support, outputs, batch, following=following, judge=judge)


def improve(args: Args, agent: Agent, state: TrainState, batch: replay.Batch) -> tuple[TrainState, jax.Array, dict]:
    """One update: returns the next state, the absolute TD errors float32 [B] and metrics, float32 []."""
    learning_rate = runs.parse_schedule(args.learning_rate)(state.global_step)
    objective = partial(loss, args, agent, target=state.target)
    grads, means, parts = devices.gradient(objective, state.params, batch, jnp.ones_like(batch.returns))
    grads = networks.add_l2(grads, state.params, args.l2)
    direction, opt_state = make_optimizer(args).update(grads, state.opt_state)
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
    """k updates as one program, so that nothing waits for Python: each device draws from its own part of the buffer.

    Returns the state, the buffer with new priorities, and mean metrics.
    """

    def once(state, buffer):
        batch = sample(args, buffer, state.updates, beta)
        state, td, metrics = improve(args, agent, state, batch)
        return state, set_priorities(args, buffer, batch, td), metrics

    def add(_, carry):
        state, buffer, metrics = once(*carry[:2])
        return state, buffer, jax.tree.map(jnp.add, carry[2], metrics)

    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(once, state, buffer)[2])
    state, buffer, sums = jax.lax.fori_loop(0, k, add, (state, buffer, zero))
    return state, buffer, jax.tree.map(lambda x: x / k, sums)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
@devices.spread([SAME, GAMES], (SAME, GAMES, SAME))
def update_on_batch(args: Args, agent: Agent, state: TrainState, batch: replay.Batch):
    """`improve`, each device on its part of a batch that was drawn elsewhere."""
    return improve(args, agent, state, batch)


def learn(args: Args, agent: Agent, state: TrainState, buffer: replay.Replay, *, k: int, beta: float, watch):
    """k updates: returns the state, the buffer with new priorities, and mean metrics, of none if there is no update."""
    if k == 0:
        return state, buffer, {}
    if args.replay_device == "device":
        with watch("update"):
            state, buffer, metrics = update(args, agent, state, buffer, k, beta)
            return state, buffer, jax.device_get(metrics)
    # The buffer is in the host's memory: batches come from there, TD errors go back.
    home, metrics = buffer.written.sharding, []
    for i in range(int(state.updates), int(state.updates) + k):
        with watch("sample"):
            batch = sample(args, buffer, i, beta)
            given = jax.block_until_ready(devices.put(args, batch, GAMES))
        with watch("update"):
            state, td, some = update_on_batch(args, agent, state, given)
            metrics.append(jax.device_get(some))
        with watch("sample"):
            buffer = set_priorities(args, buffer, batch, jax.device_put(td, home))
    return state, buffer, jax.tree.map(lambda *x: float(np.mean(x)), *metrics)


def updates_due(args: Args, learn_from: int, before: int, after: int) -> int:
    """How many updates belong between two environment steps."""

    def due(step):
        return int(args.replay_ratio * max(step - learn_from, 0) / args.batch_size)

    return due(after) - due(before)


# EVALUATION


@partial(jax.jit, static_argnums=(0, 1))
@devices.spread([SAME, GAMES, GAMES], GAMES)
def choose(args: Args, agent: Agent, params: dict, frames: jax.Array, keys: jax.Array) -> jax.Array:
    """Almost always the best actions int32 [N] for stacked frames uint8 [N, 64, 64, C], with a key [2] for each."""
    values = mean_value(agent.support, devices.in_chunks(partial(agent.apply, params), frames))
    return explore(keys, values, jnp.full(len(frames), EVALUATION_EPSILON))


def make_policy(args: Args, agent: Agent, params: dict) -> Callable:
    """A policy as `envs.play_episodes` calls it."""

    def policy(frames, age, key, memory):
        return choose(args, agent, params, frames, jax.random.split(key, len(frames))), None

    return policy


def evaluate(args: Args, run_dir: str, **how) -> runs.Evaluation:
    """For evaluate.py: plays the newest checkpoint of a run (see `envs.evaluate_checkpoint`)."""
    agent = make_agent(args)
    state = devices.put(args, load(args, agent, run_dir)["state"], SAME)
    return envs.evaluate_checkpoint(args, int(state.global_step), make_policy(args, agent, state.params), **how)


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
    if args.replay_device == "host":
        home = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    else:
        home = devices.shardings(args, replay.REPLAY)
    if saved and "replay" in saved:
        return jax.device_put(saved.pop("replay"), home)
    return jax.jit(partial(initial_replay, args), out_shardings=home)()


def move(args: Args, rollouts: Sequence[Rollout], steps: Sequence[envs.Steps]) -> tuple:
    """The actors' rollouts and steps where the replay buffer is."""
    if args.replay_device == "host":
        return jax.device_put((rollouts, steps), jax.devices("cpu")[0])
    return devices.put(args, (rollouts, steps), ((ROLLOUT,) * len(rollouts), (envs.STEPS,) * len(steps)))


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
    buffer, others = jax.eval_shape(partial(initial_replay, args)), jax.eval_shape(partial(kept, args, agent))
    on_host = args.replay_device == "host"
    names = "num_envs", "num_steps", "buffer_size"
    runs.check_memory(args, names, (others, () if on_host else buffer), on_host=buffer if on_host else ())

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
            envs.evaluate_if_due(args, run, step, make_policy(args, agent, state.params))
            if run.over(step):
                break
            with watch("waiting"):
                items = fleet.take(run, save)
            if items is None:
                break
            i, before = int(state.iterations), step
            with watch("insert"):
                rollouts, steps = zip(*(item.unroll for item in items), strict=True)
                given = move(args, rollouts, steps)
                buffer = jax.block_until_ready(insert(args, buffer, *given))
            steps = envs.join_steps(steps)
            step += int((~steps.done).sum())
            beta = float(runs.parse_schedule(args.per_beta)(step))
            k = updates_due(args, int(state.learn_from), before, step)
            state, buffer, metrics = learn(args, agent, state, buffer, k=k, beta=beta, watch=watch)
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
