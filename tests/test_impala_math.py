"""V-trace, IMPALA's loss and update against independent oracles."""

import threading
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import rlax
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ppo_math import random_steps

import impala_procgen as impala
from common import augment, compute, envs, runs

relaxed = settings(deadline=None, max_examples=25)
seeds = st.integers(0, 2**32 - 1)
bars = st.sampled_from([0.5, 1.0, 2.0])


def normal(rng, *shape, scale=1.0):
    return (rng.normal(size=shape) * scale).astype(np.float32)


@relaxed
@given(seeds, st.integers(1, 14), st.floats(0, 1), st.floats(0, 1), bars, bars, bars)
def test_vtrace_equals_the_papers_formula(seed, length, gamma, vtrace_lambda, rho_bar, c_bar, pg_rho_bar):
    """Across episode ends, truncations and junk steps."""
    args = impala.Args(rho_bar=rho_bar, c_bar=c_bar, pg_rho_bar=pg_rho_bar, vtrace_lambda=vtrace_lambda)
    rng = np.random.default_rng(seed)
    steps = jax.tree.map(lambda x: x[:, 0], random_steps(rng, length, 1))
    values, log_ratio = normal(rng, length + 1, scale=3), normal(rng, length, scale=0.7)
    rewards = np.where(steps.done, 1e6, steps.rewards)  # whatever stands at a junk step
    got = impala.vtrace(
        args, log_ratio, rewards, values[:-1], steps.terminated, steps.done, values[-1], values[-1], gamma
    )
    want = oracle.vtrace(args, log_ratio, steps.rewards, values, steps.terminated, steps.done, gamma)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(g)[~steps.done], w[~steps.done], rtol=2e-4, atol=2e-4)


@relaxed
@given(seeds, st.floats(0, 1))
def test_vtrace_targets_equal_rlax(seed, vtrace_lambda):
    rng = np.random.default_rng(seed)
    args = impala.Args(vtrace_lambda=vtrace_lambda, rho_bar=0.9, pg_rho_bar=0.8)
    log_ratio, rewards, values = normal(rng, 40), normal(rng, 40), normal(rng, 41)
    terminated = rng.random(40) < 0.1
    no = np.zeros(40, bool)
    targets, advantages = impala.vtrace(
        args, log_ratio, rewards, values[:-1], terminated, no, values[-1], values[-1], 0.97
    )
    theirs = partial(
        rlax.vtrace_td_error_and_advantage, values[:-1], values[1:], rewards, 0.97 * (1.0 - terminated),
        np.exp(log_ratio), clip_rho_threshold=0.9, clip_pg_rho_threshold=0.8,
    )  # fmt: skip
    np.testing.assert_allclose(targets - values[:-1], theirs(vtrace_lambda).errors, rtol=1e-3, atol=1e-4)
    if vtrace_lambda == 1.0:  # for less, rlax mixes values into the advantage's bootstrap, which the paper does not
        np.testing.assert_allclose(advantages, theirs(1.0).pg_advantage, rtol=1e-3, atol=1e-4)


def test_vtrace_advantages_equal_rlax():
    test_vtrace_targets_equal_rlax.hypothesis.inner_test(3, 1.0)


@relaxed
@given(seeds, st.integers(1, 13))
def test_vtrace_of_two_parts_equals_the_whole(seed, cut):
    rng = np.random.default_rng(seed)
    args, steps = impala.Args(), jax.tree.map(lambda x: x[:, 0], random_steps(rng, 14, 1))
    arrays = normal(rng, 14), steps.rewards, normal(rng, 14), steps.terminated, steps.done
    last = np.float32(rng.normal())
    whole = impala.vtrace(args, *arrays, last, last, 0.9)
    late = impala.vtrace(args, *(x[cut:] for x in arrays), last, last, 0.9)
    early = impala.vtrace(args, *(x[:cut] for x in arrays), arrays[2][cut], late[0][0], 0.9)
    for w, e, l in zip(whole, early, late, strict=True):  # noqa: E741
        np.testing.assert_allclose(w, np.concatenate([e, l]), rtol=1e-4, atol=1e-5)


STEPS, GAMES = 12, 4


def make_args(**flags):
    return impala.Args(**{
        "num_envs": GAMES, "num_steps": STEPS, "num_minibatches": 2, "num_sgd_iter": 2, "encoder": "nature",
        "width": 1, "hidden": 8, "learning_rate": "0.001", "pool": "flatten",
    } | flags)  # fmt: skip


def random_sequences(rng, args, size=GAMES):
    steps = random_steps(rng, STEPS, size)
    by_time = (steps.age, rng.integers(0, 15, (STEPS, size), np.int32), normal(rng, STEPS, size, 15),
               steps.rewards, steps.terminated, steps.done)  # fmt: skip
    rows = envs.history_length(args) + STEPS + 1
    frames = rng.integers(0, 256, (size, rows, 64, 64, 3), np.uint8)
    core = jax.tree.map(lambda x: normal(rng, *x.shape), impala.initial_core(args, size))
    return impala.Sequences(frames, *(np.swapaxes(x, 0, 1) for x in by_time), core)


def outputs(args, agent, params, batch):
    """Logits [B, T, 15] and values [B, T + 1] in plain Flax, one step after the other."""
    core, logits, values = batch.core, [], []
    for t in range(STEPS + 1):
        frames = impala.stack(args, batch.frames, batch.age[:, t : t + 1], jnp.array([t]))[:, 0]
        l, v, core = agent.apply(params, frames, batch.age[:, t] == 0, core)  # noqa: E741
        logits.append(l[:, 0])
        values.append(v[:, 0])
    return np.stack(logits[:-1], axis=1), np.stack(values, axis=1)


@pytest.mark.parametrize("core", ["none", "lstm", "gru"])
def test_loss_equals_the_sums_by_hand(core):
    """One sequence at a time, since the oracle averages over one."""
    args = make_args(core=core, vf_coef=0.7)
    agent, batch = impala.make_agent(args), random_sequences(np.random.default_rng(0), args)
    params = impala.initial_state(args, agent).params
    logits, values = outputs(args, agent, params, batch)
    for b in range(GAMES):
        one = jax.tree.map(lambda x: x[b : b + 1], batch)  # noqa: B023
        weight = (~one.done / (~one.done).sum()).astype(np.float32)
        value = impala.last_value(args, agent, params, one)
        np.testing.assert_allclose(value, values[b : b + 1, -1], rtol=1e-3, atol=1e-4)
        total, (parts, _) = impala.loss(args, agent, 0.9, 0.02, params, (one, weight, None), 0, STEPS, (value, value))
        sequence = jax.tree.map(lambda x: x[0], one)
        want_total, want = oracle.impala_loss(args, 0.02, logits[b], values[b], sequence, 0.9)
        np.testing.assert_allclose(total, want_total, rtol=1e-3, atol=1e-3)
        for name, x in want.items():
            np.testing.assert_allclose(parts[name], x, rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        (4, {}),
        (3, {"dropout": 0.5, "augment": "translate", "augment_mode": "drac", "drac_coef": 1}),
        (2, {"core": "lstm", "augment": "flip"}),
    ],
)
def test_gradient_backwards_in_time_equals_the_whole(size, flags, monkeypatch):
    args = make_args(num_envs=size, **flags)
    agent, batch = impala.make_agent(args), random_sequences(np.random.default_rng(1), args, size)
    params = impala.initial_state(args, agent).params
    weight = (~batch.done / (~batch.done).sum()).astype(np.float32)
    data = (batch, weight, jax.random.split(jax.random.PRNGKey(5), size))

    def gradient():
        value = impala.last_value(args, agent, params, batch)
        objective = partial(impala.loss, args, agent, 0.9, 0.01)
        return compute.value_and_grad_backwards(objective, params, data, (value, value), STEPS, args.core != "none")

    (value, parts), grads = jax.jit(gradient)()
    monkeypatch.setattr(compute, "on_cpu", lambda: False)
    (want_value, want_parts), want_grads = jax.jit(lambda: gradient())()
    np.testing.assert_allclose(value, want_value, rtol=1e-4, atol=1e-5)
    for got, want in ((parts, want_parts), (grads, want_grads)):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), got, want)


def test_augmentation_is_of_the_learners_frames_or_a_regulariser():
    args = make_args()
    agent, batch = impala.make_agent(args), random_sequences(np.random.default_rng(2), args)
    params, weight = impala.initial_state(args, agent).params, (~batch.done / (~batch.done).sum()).astype(np.float32)
    images = batch.frames.reshape(-1, 64, 64, 3)
    grey = batch._replace(frames=jax.vmap(augment.grayscale, (None, 0))(None, images).reshape(batch.frames.shape))
    keys, after = jax.random.split(jax.random.PRNGKey(0), GAMES), (np.zeros(GAMES, np.float32),) * 2

    def parts(batch, **flags):
        args = make_args(**flags)
        run = lambda: impala.loss(args, agent, 0.9, 0.01, params, (batch, weight, keys), 0, STEPS, after)  # noqa: E731
        return jax.jit(run)()[1][0]

    flags = {"augment": "grayscale", "augment_prob": 1.0}
    plain, of_grey, rad = parts(batch), parts(grey), parts(batch, **flags)
    drac = parts(batch, **flags, augment_mode="drac", drac_coef=0.5)
    for name, want in of_grey.items():
        np.testing.assert_allclose(rad[name], want, rtol=1e-4, atol=1e-5)
    assert rad["loss"] != plain["loss"]
    outputs_of = partial(outputs, args, agent, params)
    (logits, values), (new_logits, new_values) = outputs_of(batch), outputs_of(grey)
    regulariser = augment.drac_loss(logits, values[:, :-1, None], new_logits, new_values[:, :-1, None])
    want = (weight * regulariser).sum()
    np.testing.assert_allclose(drac["drac_loss"], want, rtol=1e-3)
    np.testing.assert_allclose(drac["loss"], plain["loss"] + 0.5 * want, rtol=1e-4)


def test_core_is_forgotten_at_an_episodes_first_frame():
    args = make_args(core="lstm")
    agent, rng = impala.make_agent(args), np.random.default_rng(0)
    params = impala.initial_state(args, agent).params
    x, core = normal(rng, 2, 6, 8), jax.tree.map(lambda c: normal(rng, *c.shape), impala.initial_core(args, 2))
    first = np.zeros((2, 6), bool)
    first[0, 3] = True
    decode = partial(agent.apply, params, method="decode")
    logits, _, last = decode(x, first, core)
    other, _, other_last = decode(x + np.float32(np.arange(6) < 3)[:, None], first, core)
    np.testing.assert_array_equal(logits[0, 3:], other[0, 3:])  # a new episode does not know the one before
    assert (logits[1, 3:] != other[1, 3:]).any()  # the same episode does
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[0], b[0]), last, other_last)


@pytest.fixture(scope="module")
def tiny():
    args = make_args()
    return SimpleNamespace(args=args, agent=impala.make_agent(args), rng=np.random.default_rng(0))


def run_update(tiny, batch):
    state = compute.replicate(impala.initial_state(tiny.args, tiny.agent))
    return jax.device_get(impala.update(tiny.args, tiny.agent, state, batch))


def test_steps_that_are_no_transition_change_nothing(tiny):
    batch = random_sequences(tiny.rng, tiny.args)
    junk = batch.done
    assert 0 < junk.sum() < junk.size
    other = batch._replace(
        actions=np.where(junk, 14, batch.actions),
        logits=np.where(junk[..., None], 5.0 * normal(tiny.rng, *batch.logits.shape), batch.logits),
        rewards=np.where(junk, 1e6, batch.rewards).astype(np.float32),
    )
    before, after = run_update(tiny, batch), run_update(tiny, other)
    jax.tree.map(np.testing.assert_array_equal, before[0].params, after[0].params)
    assert before[1] == after[1]
    assert before[0].global_step == (~junk).sum()
    moved = batch._replace(rewards=batch.rewards + ~junk)  # and the same on transitions does change it
    assert run_update(tiny, moved)[1] != before[1]


def test_replay_holds_the_newest_and_draws_from_them():
    args = make_args(replay_fraction=0.5, replay_size=6, num_actors=2, normalize_rewards=True, core="lstm")
    memory, seen, drawn, rng = impala.initial_memory(args), {}, [], np.random.default_rng(0)
    for i in range(9):
        rollouts = []
        for actor in range(2):
            # Each game's core carries its number: which update, which game.
            number = jnp.float32(100 * i + 2 * actor) + jnp.arange(2.0)
            carry = impala.initial_carry(args)._replace(core=(jnp.tile(number[:, None], (1, 8)),) * 2)
            rollouts.append(impala.begin_rollout(args, carry, 0, i))
        steps = random_steps(rng, STEPS, GAMES)
        memory, batch = impala.remember(args, memory, rollouts, steps, 0, i)
        numbers = np.asarray(batch.core[0][:, 0])
        assert numbers[:4].tolist() == [100 * i + k for k in range(4)]
        assert len(numbers) == 8
        np.testing.assert_array_equal(batch.age[:4], steps.age.T)
        held = list(seen)[-6:] or numbers[:4]  # the first update has no older ones
        assert set(numbers[4:]) <= set(held)
        drawn += numbers[4:].tolist()
        seen |= {number: jax.device_get(jax.tree.map(lambda x: x[k], batch)) for k, number in enumerate(numbers[:4])}  # noqa: B023
        for k, number in enumerate(numbers[4:]):  # all that belongs to a sequence is drawn together
            jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x: x[4 + k], batch), seen[number])  # noqa: B023
    assert len({number % 100 for number in drawn}) == 4
    assert any(number < 100 * (i - 1) for i, number in zip(np.arange(36) // 4, drawn, strict=True))  # two updates old
    assert 6 <= memory.written < 12


def test_same_parameters_give_the_actors_probabilities():
    """What the learner rebuilds (stacks, ages, cores) is what the actor saw: with no lag, on real games, all
    ratios of the first minibatch are 1, across episode ends too."""
    for core in ("none", "gru"):
        args = make_args(core=core, num_steps=150, num_sgd_iter=1, num_minibatches=1, num_actors=2, env_id="bigfish",
                         learning_rate="0", sticky_actions=0.25)  # fmt: skip
        agent = impala.make_agent(args)
        games = [impala.envs.Games(partial(impala.envs.make_levels, args, GAMES // 2), 3 + actor) for actor in range(2)]
        state, memory = impala.initial_state(args, agent), impala.initial_memory(args)
        state.params["params"]["policy"]["kernel"] *= 3000  # it starts nearly uniform: no mistake would show
        state, carries = compute.replicate(state), [impala.initial_carry(args)] * 2
        ends = 0
        for i in range(2):
            watch, check = runs.Stopwatch(), threading.Event().is_set
            collected = [
                impala.collect(args, agent, games, actor, i, state.params, carries[actor], watch, check)
                for actor in range(2)
            ]
            unrolls, carries = zip(*collected, strict=True)
            steps = envs.join_steps([unroll.steps for unroll in unrolls])
            memory, batch = impala.remember(args, memory, [unroll.rollout for unroll in unrolls], steps, 0, i)
            ends += steps.ended.sum()
            state, metrics = impala.update(args, agent, state, compute.replicate(batch))
            assert metrics["losses/entropy"] < 2.6
            assert abs(metrics["losses/approx_kl"]) < 1e-5
            assert abs(metrics["losses/rho"] - 1) < 1e-3
        assert ends > 0
        for mine in games:
            mine.close()
