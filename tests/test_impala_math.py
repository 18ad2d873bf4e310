"""V-trace, IMPALA's loss and update against independent oracles."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ppo_math import random_steps

import apex_procgen as apex
import impala_procgen as impala
import ppo_procgen as ppo
import rnd_montezuma as rnd
from common import augment, devices, envs, networks, runs, shaping
from common.devices import GAMES, SAME

relaxed = settings(deadline=None, max_examples=25)
seeds = st.integers(0, 2**32 - 1)
bars = st.sampled_from([0.5, 1.0, 2.0])


def normal(rng, *shape, scale=1.0):
    return (rng.normal(size=shape) * scale).astype(np.float32)


def bars_of(args):
    return {name: getattr(args, name) for name in ("rho_bar", "c_bar", "pg_rho_bar", "vtrace_lambda")}


compiled_vtrace = jax.jit(impala.vtrace)


@relaxed
@given(seeds, st.sampled_from([1, 2, 7, 14]), st.floats(0, 1), st.floats(0, 1), bars, bars, bars)
def test_vtrace_equals_the_papers_formula(seed, length, gamma, vtrace_lambda, rho_bar, c_bar, pg_rho_bar):
    """Across episode ends, truncations and junk steps."""
    args = impala.Args(rho_bar=rho_bar, c_bar=c_bar, pg_rho_bar=pg_rho_bar, vtrace_lambda=vtrace_lambda)
    rng = np.random.default_rng(seed)
    steps = jax.tree.map(lambda x: x[..., 0], random_steps(rng, length, 1))
    values, log_ratio = normal(rng, length + 1, scale=3), normal(rng, length, scale=0.7)
    rewards = np.where(steps.done, 1e6, steps.rewards)  # whatever stands at a junk step
    got = compiled_vtrace(log_ratio, rewards, values, steps.terminated, steps.done, gamma=gamma, **bars_of(args))
    want = oracle.vtrace(args, log_ratio, steps.rewards, values, steps.terminated, steps.done, gamma)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(g)[~steps.done], w[~steps.done], rtol=2e-4, atol=2e-4)


@relaxed
@given(seeds, st.floats(0, 1), st.floats(0, 1))
def test_advantages_of_the_policy_that_acted_are_gae(seed, gamma, gae_lambda):
    rng = np.random.default_rng(seed)
    steps = jax.tree.map(lambda x: x[..., 0], random_steps(rng, 14, 1))
    values = normal(rng, 15, scale=3)
    _, got = compiled_vtrace(
        np.zeros(14, np.float32), steps.rewards, values, steps.terminated, steps.done, gamma=gamma,
        **bars_of(impala.Args(vtrace_lambda=gae_lambda)),
    )  # fmt: skip
    want = ppo.gae(steps.rewards, values, steps.terminated, steps.truncated, gamma=gamma, gae_lambda=gae_lambda)
    np.testing.assert_allclose(got[~steps.done], want[~steps.done], rtol=2e-4, atol=2e-4)


@pytest.mark.optimised
def test_unrolled_vtrace_is_the_same_bit_for_bit(monkeypatch):
    """As it runs on a GPU, here with a rest that does not fill a turn."""
    rng, args = np.random.default_rng(0), impala.Args()
    log_ratio, rewards, values = normal(rng, 75), normal(rng, 75), normal(rng, 76)
    terminated, done = rng.random((2, 75)) < 0.1

    def correct():
        of = partial(impala.vtrace, gamma=0.97, **bars_of(args))
        return jax.jit(lambda: of(log_ratio, rewards, values, terminated, done))()

    want = correct()
    monkeypatch.setattr(devices, "unroll", lambda: 32)
    for got, one in zip(correct(), want, strict=True):
        np.testing.assert_array_equal(got, one)


STEPS, NUM_ENVS = 12, 4


def make_args(**flags):
    return impala.Args(**{
        "num_envs": NUM_ENVS, "num_steps": STEPS, "num_minibatches": 2, "update_epochs": 2, "encoder": "nature",
        "width": 1, "hidden": 8, "learning_rate": "0.001", "pool": "flatten",
    } | flags)  # fmt: skip


def random_unrolls(rng, args, size=NUM_ENVS):
    shape = args.num_steps, size
    steps, empty = random_steps(rng, *shape), impala.empty_unrolls(args, size)
    images = rng.integers(0, 256, empty.frames.images.shape, np.uint8)
    return impala.Unrolls(
        frames=empty.frames.replace(images=images, ages=steps.age),
        core=jax.tree.map(lambda x: normal(rng, *x.shape), empty.core),
        batch=impala.Batch(
            rng.integers(0, 15, shape, np.int32), normal(rng, *shape, 15), steps.rewards,
            steps.terminated, steps.done,
        ),
    )  # fmt: skip


def minibatch_of(args, unrolls):
    """All of them, in their order."""
    games = jnp.arange(unrolls.batch.done.shape[1])
    return jax.jit(partial(impala.minibatch_of, args))(unrolls, games, jax.random.PRNGKey(5))


def outputs(agent, params, unrolls):
    """Logits [T, N, 15] and values [T + 1, N], one step after the other."""
    core, logits, values = jax.tree.map(lambda x: x[0], unrolls.core), [], []
    frames = jax.tree.map(jnp.asarray, unrolls.frames)
    look = jax.jit(lambda t, core: agent.apply(params, frames.stack(t), frames.first[t], core))
    for t in range(STEPS + 1):
        l, v, core = look(t, core)  # noqa: E741
        logits.append(l[:, 0])
        values.append(v[:, 0])
    return np.stack(logits[:-1]), np.stack(values)


@pytest.mark.parametrize(
    "core", [pytest.param("none", marks=pytest.mark.slow), "lstm", pytest.param("gru", marks=pytest.mark.slow)]
)
def test_loss_equals_the_sums_by_hand(core):
    """Of each game, since the oracle averages over one."""
    args = make_args(core=core, vf_coef=0.7, rho_bar=0.9, c_bar=0.8, pg_rho_bar=0.7, vtrace_lambda=0.95)
    agent, unrolls = impala.make_agent(args), random_unrolls(np.random.default_rng(0), args)
    params = devices.run_once(impala.initial_state, args, agent).params
    logits, values = outputs(agent, params, unrolls)
    minibatch = minibatch_of(args, unrolls)
    parts = jax.jit(partial(impala.loss, args, agent, gamma=0.9, ent_coef=0.02))(params, minibatch)
    for n in range(NUM_ENVS):
        game = jax.tree.map(lambda x: x[:, n], unrolls.batch)  # noqa: B023
        want_total, want = oracle.impala_loss(args, 0.02, logits[:, n], values[:, n], game, 0.9)
        for name, x in (want | {"loss": want_total}).items():
            got = parts[name][n][~game.done].mean()
            np.testing.assert_allclose(got, x, rtol=1e-3, atol=1e-3, err_msg=name)


def test_targets_and_advantages_are_constants_in_the_loss():
    """The policy loss moves no value, and the value loss no policy; Espeholt et al. 2018, section 4.2."""
    args, rng = make_args(rho_bar=0.9, pg_rho_bar=0.7), np.random.default_rng(0)
    steps, actions = jax.tree.map(lambda x: x.T, random_steps(rng, 6, 2)), rng.integers(0, 15, (2, 6), np.int32)
    batch = impala.Batch(actions, normal(rng, 2, 6, 15), steps.rewards, steps.terminated, steps.done)
    logits, values = normal(rng, 2, 6, 15), normal(rng, 2, 7)
    targets, advantages, _ = impala.judge(args, jax.nn.log_softmax(logits), values, batch, gamma=0.9)

    def slopes(name):
        def total(logits, values):
            return impala.impala_parts(args, jax.nn.log_softmax(logits), values, batch, gamma=0.9)[name].sum()

        return jax.jit(jax.grad(total, (0, 1)))(logits, values)

    of_logits, of_values = slopes("policy_loss")
    want = np.asarray(advantages)[..., None] * (jax.nn.softmax(logits) - np.eye(15)[actions])
    np.testing.assert_allclose(of_logits, want, rtol=1e-4, atol=1e-5)
    assert not of_values.any()
    of_logits, of_values = slopes("value_loss")
    assert not of_logits.any()
    np.testing.assert_allclose(of_values[:, :-1], values[:, :-1] - targets, rtol=1e-4, atol=1e-5)
    assert not of_values[:, -1].any()


def test_clipped_loss_keeps_what_vtrace_said_before_the_update():
    """By hand: V-trace by the parameters from before, its advantages normalised over the batch, and PPO's surrogate."""
    args = make_args(clip_coef=0.2, rho_bar=0.9, c_bar=0.8, pg_rho_bar=0.7, vtrace_lambda=0.95, dropout=0.5)
    agent, rng = impala.make_agent(args), np.random.default_rng(0)
    unrolls, before = random_unrolls(rng, args), devices.run_once(impala.initial_state, args, agent).params
    after = jax.tree.map(lambda x: x + normal(rng, *x.shape, scale=0.1), before)
    unrolls = jax.jit(partial(impala.judge_all, args, agent, gamma=0.9))(before, unrolls)
    old, new = outputs(agent, before, unrolls), outputs(agent, after, unrolls)
    kept, actions = ~unrolls.batch.done, unrolls.batch.actions[..., None]
    acted, log_prob, moved = (
        np.take_along_axis(np.asarray(jax.nn.log_softmax(x)), actions, axis=-1)[..., 0]
        for x in (unrolls.batch.logits, old[0], new[0])
    )
    targets, advantages = np.zeros((2, STEPS, NUM_ENVS))
    for n in range(NUM_ENVS):
        game = jax.tree.map(lambda x: x[:, n], unrolls.batch)  # noqa: B023
        ends = game.terminated, game.done
        ratio = (log_prob - acted)[:, n]
        targets[:, n], advantages[:, n] = oracle.vtrace(args, ratio, game.rewards, old[1][:, n], *ends, 0.9)
    advantages = (advantages - advantages[kept].mean()) / advantages[kept].std()
    judged = unrolls.batch.judged
    np.testing.assert_allclose(judged.targets[kept], targets[kept], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(judged.advantages[kept], advantages[kept], rtol=1e-3, atol=1e-3)
    inputs, batch = minibatch_of(args, unrolls)
    assert len(np.unique(np.asarray(inputs.keys).reshape(-1, 2), axis=0)) == NUM_ENVS * STEPS  # of dropout
    without_dropout = inputs._replace(keys=None), batch
    parts = jax.jit(partial(impala.loss, args, agent, gamma=0.9, ent_coef=0.02))(after, without_dropout)
    ratio = np.exp(moved - log_prob)
    assert (np.abs(ratio - 1)[kept] > 0.2).any()
    np.testing.assert_array_equal(parts["clipfrac"].T[kept], (np.abs(ratio - 1) > 0.2)[kept])
    want = -np.minimum(ratio * advantages, ratio.clip(0.8, 1.2) * advantages)
    np.testing.assert_allclose(parts["policy_loss"].T[kept], want[kept], rtol=2e-3, atol=2e-3)
    want = (new[1][:-1] - targets) ** 2 / 2
    np.testing.assert_allclose(parts["value_loss"].T[kept], want[kept], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        (3, {"dropout": 0.5, "augment": "translate", "augment_mode": "drac", "drac_coef": 1}),
        pytest.param(4, {"core": "lstm", "augment": "flip"}, marks=pytest.mark.slow),
    ],
)
def test_gradient_does_not_depend_on_chunks_and_devices(size, flags, monkeypatch):
    """By sequence, and of that a few frames at a time, on one core or four; or as an accelerator does it."""
    args = make_args(num_envs=size, num_actors=1, num_minibatches=1, **flags)
    agent, unrolls = impala.make_agent(args), random_unrolls(np.random.default_rng(1), args, size)
    params, minibatch = devices.run_once(impala.initial_state, args, agent).params, minibatch_of(args, unrolls)

    @devices.spread([SAME, GAMES], (SAME, SAME, GAMES))
    def gradient(args, params, minibatch):
        objective = partial(impala.loss, args, agent, gamma=0.9, ent_coef=0.01)
        return devices.gradient(objective, params, minibatch, ~minibatch[1].done)

    got = jax.jit(partial(gradient, replace(args, num_devices=1 if size % 4 else 4)))(params, minibatch)
    monkeypatch.setattr(devices, "on_cpu", lambda: False)
    want = jax.jit(partial(gradient, replace(args, num_devices=1)))(params, minibatch)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), got[:2], want[:2])
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-3), got[2], want[2])


class Table:
    """Stands for the network: features are a frame's sum times the parameter, the core counts steps."""

    @staticmethod
    def apply(params, x, *more, method=None):
        if method == "encode":
            return params * x.sum(axis=(1, 2, 3), dtype=jnp.float32)[:, None]
        if method == "decode":
            return jnp.tile(x, 15), x[..., 0], more[1] + x.shape[1]
        return None, params * x.sum(axis=(1, 2, 3), dtype=jnp.float32)[:, None] + more[1], None


def test_the_value_after_the_last_step_is_a_constant_and_of_the_core_there():
    frames = jnp.asarray(np.random.default_rng(0).integers(0, 256, (3, 5, 2, 2, 3), np.uint8))
    inputs = impala.Inputs(frames, jnp.zeros((3, 5), bool), jnp.full((3, 1), 10.0), None)

    def values(params):
        return impala.forward(Table, params, inputs, frames[:, :-1])[1]

    np.testing.assert_array_equal(values(2.0), 2 * frames.sum(axis=(2, 3, 4)) + np.array([0, 0, 0, 0, 14]))
    slopes = jax.jacobian(values)(2.0)
    np.testing.assert_array_equal(slopes[:, :-1], frames[:, :-1].sum(axis=(2, 3, 4)))
    assert not slopes[:, -1].any()


@pytest.mark.slow
def test_augmentation_is_of_the_learners_frames_or_a_regulariser():
    args = make_args()
    agent, unrolls = impala.make_agent(args), random_unrolls(np.random.default_rng(2), args)
    params = devices.run_once(impala.initial_state, args, agent).params
    inputs, batch = minibatch_of(make_args(augment="grayscale"), unrolls)
    images = inputs.frames.reshape(-1, *inputs.frames.shape[2:])
    grey = jax.vmap(augment.grayscale, (None, 0))(None, images).reshape(inputs.frames.shape)
    grey = grey.at[:, -1].set(inputs.frames[:, -1])  # what comes after the last step is only valued

    @partial(jax.jit, static_argnums=0)
    def parts(args, frames):
        return impala.loss(args, agent, params, (inputs._replace(frames=frames), batch), gamma=0.9, ent_coef=0.01)

    flags = {"augment": "grayscale", "augment_prob": 1.0}
    plain, of_grey, rad = parts(args, inputs.frames), parts(args, grey), parts(make_args(**flags), inputs.frames)
    drac = parts(make_args(**flags, augment_mode="drac", drac_coef=0.5), inputs.frames)
    for name, want in of_grey.items():
        np.testing.assert_allclose(rad[name], want, rtol=1e-4, atol=1e-5)
    assert (rad["loss"] != plain["loss"]).any()
    seen = inputs.frames[:, :-1], grey[:, :-1]
    flat = [agent.apply(params, x.reshape(-1, 64, 64, 6), jnp.zeros(x.shape[0] * x.shape[1], bool), ()) for x in seen]
    (logits, values, _), (new_logits, new_values, _) = flat
    want = augment.drac_loss(logits, values, new_logits, new_values).reshape(NUM_ENVS, STEPS)
    np.testing.assert_allclose(drac["drac_loss"], want, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(drac["loss"], plain["loss"] + 0.5 * want, rtol=1e-4, atol=1e-5)


def test_core_is_forgotten_at_an_episodes_first_frame():
    args = make_args(core="lstm")
    agent, rng = impala.make_agent(args), np.random.default_rng(0)
    params = devices.run_once(impala.initial_state, args, agent).params
    core = jax.tree.map(lambda c: normal(rng, *c.shape), networks.initial_core("lstm", 8, 2))
    x, first = normal(rng, 2, 6, 8), np.zeros((2, 6), bool)
    first[0, 3] = True
    decode = jax.jit(partial(agent.apply, params, method="decode"))
    logits, _, last = decode(x, first, core)
    other, _, other_last = decode(x + np.float32(np.arange(6) < 3)[:, None], first, core)
    np.testing.assert_array_equal(logits[0, 3:], other[0, 3:])  # a new episode does not know the one before
    assert (logits[1, 3:] != other[1, 3:]).any()  # the same episode does
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[0], b[0]), last, other_last)


@pytest.fixture(scope="module", params=[pytest.param("none", marks=pytest.mark.slow), "gru"])
def tiny(request):
    """A script whose learning rate is 0 from the thousandth step on."""
    args = make_args(core=request.param, num_steps=75, num_actors=2, sticky_actions=0.25,
                     learning_rate="0:0.001,999:0.001,1000:0")  # fmt: skip
    return SimpleNamespace(args=args, agent=impala.make_agent(args), rng=np.random.default_rng(0))


@pytest.mark.parametrize("script", [ppo, impala, rnd, apex], ids=lambda script: script.SCRIPT)
def test_gradients_are_clipped_before_adam(script):
    optimizer, grad = script.make_optimizer(script.Args(max_grad_norm=0.5, adam_eps=0.1)), np.float32([3, -4])
    direction, _ = optimizer.update(grad, optimizer.init(grad))
    np.testing.assert_allclose(direction, 0.1 * grad / (0.1 * np.abs(grad) + 0.1), rtol=1e-4)


def test_rmsprop_is_the_papers_with_bias_correction():
    args = make_args(optimizer="rmsprop", adam_eps=0.01, max_grad_norm=0.0)
    optimizer, square = impala.make_optimizer(args), 0.0
    state = optimizer.init(np.zeros(3, np.float32))
    for i, grad in enumerate(np.random.default_rng(0).normal(size=(3, 3)), 1):
        direction, state = optimizer.update(np.float32(grad), state)
        square = 0.99 * square + 0.01 * grad**2
        np.testing.assert_allclose(direction, grad / np.sqrt(square / (1 - 0.99**i) + 0.01), rtol=1e-4)


def run_update(tiny, unrolls, state=None):
    state = devices.run_once(impala.initial_state, tiny.args, tiny.agent) if state is None else state
    return jax.device_get(impala.update(tiny.args, tiny.agent, jax.tree.map(jnp.copy, state), unrolls))


def test_steps_that_are_no_transition_change_nothing(tiny):
    unrolls = random_unrolls(tiny.rng, tiny.args)
    batch = unrolls.batch
    junk = batch.done
    assert 0 < junk.sum() < junk.size
    other = batch._replace(
        actions=np.where(junk, 14, batch.actions),
        logits=np.where(junk[..., None], 5.0 * normal(tiny.rng, *batch.logits.shape), batch.logits),
        rewards=np.where(junk, 1e6, batch.rewards).astype(np.float32),
    )
    moved = batch._replace(rewards=batch.rewards + ~junk)  # and the same on transitions does change it
    before, after, changed = (run_update(tiny, unrolls._replace(batch=x)) for x in (batch, other, moved))
    jax.tree.map(np.testing.assert_array_equal, before[0].params, after[0].params)
    assert before[1] == after[1] != changed[1]
    assert before[0].global_step == (~junk).sum()


def test_an_update_goes_down(tiny, monkeypatch):
    """Its step is against the gradient of the loss, and the next one's minibatches are other ones."""
    unrolls = random_unrolls(tiny.rng, tiny.args)
    before = devices.run_once(impala.initial_state, tiny.args, tiny.agent)
    after, _ = run_update(tiny, unrolls, before)
    minibatch = impala.minibatch_of(tiny.args, unrolls, np.arange(unrolls.batch.done.shape[1]), None)

    @jax.jit
    @jax.grad
    def gradient(params):
        parts = impala.loss(tiny.args, tiny.agent, params, minibatch, gamma=0.99, ent_coef=0.01)
        return jnp.where(minibatch[1].done, 0, parts["loss"]).sum()

    slopes = jax.tree.map(lambda g, x, y: (g * (y - x)).sum(), gradient(before.params), before.params, after.params)
    assert sum(jax.tree.leaves(slopes)) < 0
    assert (after.key != before.key).any()
    assert after.opt_state[1].count == 4
    other, _ = run_update(tiny, unrolls, before._replace(key=jax.random.PRNGKey(1)))
    ends = (jax.tree.leaves(x.params) for x in (after, other))
    assert any((a != b).any() for a, b in zip(*ends, strict=True))  # of other minibatches
    decayed = []
    monkeypatch.setattr(networks, "add_l2", lambda grads, params, coef: decayed.append(coef) or grads)
    jax.eval_shape(partial(impala.update, replace(tiny.args, l2=0.1), tiny.agent), before, unrolls)
    assert 0.1 in decayed


def test_replay_holds_the_newest_and_draws_from_them():
    args = make_args(
        num_devices=1, replay_fraction=0.5, replay_size=6, num_actors=2, normalize_rewards=True, core="lstm"
    )
    memory, seen, drawn, rng = impala.initial_memory(args), {}, [], np.random.default_rng(0)
    for i in range(9):
        rollouts = []
        for actor in range(2):
            # Each game's core carries its number: which update, which game.
            number = jnp.float32(100 * i + actor) + 2 * jnp.arange(2.0)
            carry = impala.initial_carry(args, np.arange(2))._replace(core=(jnp.tile(number[:, None], (1, 8)),) * 2)
            rollouts.append(impala.begin_rollout(args, carry, i))
        parts = [random_steps(rng, STEPS, NUM_ENVS // 2) for _ in range(2)]
        steps = envs.join_games(parts, axis=-1)
        memory, unrolls = impala.remember(args, memory, rollouts, parts, 0, i)
        numbers = np.asarray(unrolls.core[0][0, :, 0])
        assert numbers[:4].tolist() == [100 * i + k for k in range(4)]
        assert len(numbers) == 8
        np.testing.assert_array_equal(unrolls.batch.done[:, :4], steps.done)
        np.testing.assert_array_equal(unrolls.batch.terminated[:, :4], steps.terminated)
        np.testing.assert_array_equal(np.sign(unrolls.batch.rewards[:, :4]), np.sign(steps.rewards))  # normalised
        held = list(seen)[-6:] or numbers[:4]  # the first update has no older ones
        assert set(numbers[4:]) <= set(held)
        drawn += numbers[4:].tolist()
        games = [jax.device_get(jax.tree.map(lambda x: x[:, k], unrolls)) for k in range(8)]  # noqa: B023
        seen |= dict(zip(numbers[:4], games[:4], strict=True))
        for number, game in zip(numbers[4:], games[4:], strict=True):  # all that belongs to an unroll comes together
            jax.tree.map(np.testing.assert_array_equal, game, seen[number])
    assert len({number % 100 for number in drawn}) == 4
    assert any(number < 100 * (i - 1) for i, number in zip(np.arange(36) // 4, drawn, strict=True))  # two updates old
    assert 6 <= memory.written < 12


@pytest.mark.parametrize("more", [{}, {"replay_fraction": 0.5, "replay_size": NUM_ENVS}])
def test_rewards_are_normalised_over_updates_and_replay_is_drawn_anew(more):
    given = {"num_actors": 1, "normalize_rewards": True, "reward_clip": 0.5, "gamma": "0:0.5,1000:0.99"}
    args = make_args(num_devices=1, **given, **more)
    memory, past, rng = impala.initial_memory(args), shaping.new_filter(NUM_ENVS), np.random.default_rng(0)
    drawn, held = set(), None
    for i in range(4):
        carry = impala.initial_carry(args, np.arange(NUM_ENVS))
        steps = random_steps(rng, STEPS, NUM_ENVS)
        memory, unrolls = impala.remember(args, memory, [impala.begin_rollout(args, carry, i)], [steps], 1000, i)
        old, (past, want) = np.asarray(past.var), shaping.prepare_rewards(args, past, steps, 0.99)
        np.testing.assert_allclose(unrolls.batch.rewards[:, :NUM_ENVS], want, rtol=1e-5)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), memory.reward_filter, past)
        assert old != past.var
        if more and i:  # the ring has one update's unrolls, in place: which were drawn?
            replayed = np.asarray(unrolls.batch.rewards[:, NUM_ENVS:]).T
            drawn.add(tuple(int(np.abs(held - one[:, None]).sum(axis=0).argmin()) for one in replayed))
        held = np.asarray(want)
    assert len(drawn) > 1 or not more


def test_same_parameters_give_the_actors_probabilities(tiny):
    """What the learner rebuilds (stacks, ages, cores) is what the actor saw: with no lag, on real games, all ratios are
    1 as long as nothing is learnt, across episode ends and where games start anew too."""
    args, agent = tiny.args, tiny.agent
    numbers = np.arange(NUM_ENVS, dtype=np.int32).reshape(2, -1)
    games = [envs.Games(partial(envs.make_levels, args), own, 3, 150) for own in numbers]
    state, memory = devices.run_once(impala.initial_state, args, agent), impala.initial_memory(args)
    state = state._replace(global_step=np.int32(1000))
    state.params["params"]["policy"]["kernel"] *= 3000  # it starts nearly uniform: no mistake would show
    state, carries, ends = jax.device_get(state), [impala.initial_carry(args, own) for own in numbers], 0
    for i in range(4):
        collected = [
            impala.collect(args, agent, games[actor], state.params, carries[actor], i=i,
                           watch=runs.Stopwatch(), check_stop=lambda: None)
            for actor in range(2)
        ]  # fmt: skip
        unrolls, carries = zip(*collected, strict=True)
        for unroll, carry in zip(unrolls, carries, strict=True):  # the next one goes on from there
            jax.tree.map(np.testing.assert_array_equal, carry.core, unroll.rollout.core)
            images = unroll.rollout.frames.images
            np.testing.assert_array_equal(carry.history, images[-1 - len(carry.history) : -1])
        for unroll in unrolls:  # what was chosen is kept, and not what sticky actions made of it
            rollout = unroll.rollout
            keys = jax.vmap(partial(jax.random.fold_in, rollout.key))(np.arange(args.num_steps))
            choose_keys = jax.vmap(lambda key, own=rollout.numbers: devices.keys_of(jax.random.split(key)[0], own))(
                keys
            )
            chosen = jax.vmap(jax.vmap(jax.random.categorical))(choose_keys, rollout.logits)
            np.testing.assert_array_equal(rollout.actions, chosen)
        parts = [unroll.steps for unroll in unrolls]
        steps = envs.join_games(parts, axis=-1)
        assert steps.restarts.all() == (i % 2 == 1)
        memory, unrolls = impala.remember(args, memory, [unroll.rollout for unroll in unrolls], parts, 0, i)
        ends += steps.ended.sum()
        _, metrics = run_update(tiny, unrolls, state)
        assert metrics["losses/entropy"] < 2.6
        assert abs(metrics["losses/approx_kl"]) < 1e-5
        assert abs(metrics["losses/rho"] - 1) < 1e-3
    assert ends > 0
    parts = jax.jit(partial(impala.loss, args, agent, gamma=0.99, ent_coef=0.01))(
        state.params, minibatch_of(args, unrolls)
    )
    error, target = (parts[name].T[~unrolls.batch.done] for name in ("value_error", "target"))
    assert abs(metrics["losses/explained_variance"] - (1 - error.var() / target.var())) < 1e-3
    for mine in games:
        mine.close()
