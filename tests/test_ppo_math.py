"""The algorithm's parts against independent oracles."""

import math
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

import ppo_procgen as ppo
from common import runs, shaping
from common.envs import Steps

relaxed = settings(deadline=None, max_examples=25)
seeds = st.integers(0, 2**32 - 1)


def random_steps(rng, steps, envs):
    """Episodes as EnvPool reports them: after a step that ends one comes a step that is no transition."""
    terminated, truncated = np.zeros((2, steps, envs), bool)
    done = np.zeros((steps + 1, envs), bool)
    age = np.zeros((steps + 1, envs), np.int32)
    age[0], done[0] = rng.integers(0, 5, envs), rng.random(envs) < 0.2
    for t in range(steps):
        ends = (rng.random(envs) < 0.25) & ~done[t]
        early = rng.random(envs) < 0.5
        terminated[t], truncated[t], done[t + 1] = ends & early, ends & ~early, ends
        age[t + 1] = np.where(done[t], 0, age[t] + 1)
    raw = (rng.normal(size=(steps, envs)) * 3).astype(np.float32) * ~done[:-1]
    return Steps(raw, terminated, truncated, done[:-1], age)


@relaxed
@given(seeds, st.integers(1, 12), st.floats(0, 1), st.floats(0, 1))
def test_gae_equals_the_double_sum(seed, length, gamma, gae_lambda):
    rng = np.random.default_rng(seed)
    steps = random_steps(rng, length, 1)
    raw, terminated, truncated = (x[:, 0] for x in (steps.rewards, steps.terminated, steps.truncated))
    values = rng.normal(size=length + 1).astype(np.float32)
    got = ppo.gae(raw, values, terminated, truncated, gamma, gae_lambda)
    want = oracle.gae(raw, values, terminated, truncated, gamma, gae_lambda)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_gae_equals_rlax():
    rng = np.random.default_rng(0)
    raw, values = rng.normal(size=50).astype(np.float32), rng.normal(size=51).astype(np.float32)
    terminated = rng.random(50) < 0.1
    got = ppo.gae(raw, values, terminated, np.zeros(50, bool), 0.97, 0.9)
    want = rlax.truncated_generalized_advantage_estimation(raw, 0.97 * (1.0 - terminated), 0.9, values)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


class Table:
    """Stands for the network: its parameters are the outputs."""

    @staticmethod
    def apply(params, frames):
        return params


def random_batch(rng, size):
    weight = (rng.random(size) < 0.8).astype(np.float32)
    weight[0] = 1
    old = rng.normal(size=(size, 15)).astype(np.float32)
    new = old + rng.normal(size=(size, 15)).astype(np.float32) * 0.3
    normal = partial(rng.normal, size=size)
    values, old_values, advantages, returns = (normal().astype(np.float32) * 3 for _ in range(4))
    actions = rng.integers(0, 15, size).astype(np.int32)
    return (new, values), ppo.Batch(actions, old, old_values, advantages, returns, weight / weight.sum())


@relaxed
@given(seeds, st.sampled_from([0.0, 0.5]), st.sampled_from([0.0, 0.3]))
def test_loss_equals_the_sums_by_hand(seed, vf_clip, kl_coef):
    args = ppo.Args(vf_clip=vf_clip, kl_coef=kl_coef, vf_coef=0.7)
    outputs, batch = random_batch(np.random.default_rng(seed), 20)
    total, parts = ppo.loss(args, Table, kl_coef, 0.02, outputs, (None, batch))
    want_total, want_parts = oracle.ppo_loss(args, kl_coef, 0.02, *outputs, batch)
    np.testing.assert_allclose(total, want_total, rtol=2e-4, atol=1e-5)
    for name, want in want_parts.items():
        np.testing.assert_allclose(parts[name], want, rtol=2e-4, atol=1e-5, err_msg=name)


def test_policy_gradient_equals_rlax():
    outputs, batch = random_batch(np.random.default_rng(1), 32)
    batch = batch._replace(weight=np.full(32, 1 / 32, np.float32))

    def theirs(logits):
        log_ratio = jax.nn.log_softmax(logits) - jax.nn.log_softmax(batch.logits)
        return rlax.clipped_surrogate_pg_loss(jnp.exp(log_ratio[jnp.arange(32), batch.actions]), batch.advantages, 0.2)

    def ours(logits):
        return ppo.loss(ppo.Args(), Table, 0, 0, (logits, outputs[1]), (None, batch))[1]["policy_loss"]

    np.testing.assert_allclose(jax.grad(ours)(outputs[0]), jax.grad(theirs)(outputs[0]), rtol=1e-4, atol=1e-6)


def test_kl_coefficient_doubles_and_halves():
    kls = [0.0, 0.0066, 0.0067, 0.0149, 0.0151, 1.0]
    want = [0.1, 0.1, 0.2, 0.2, 0.4, 0.4]
    np.testing.assert_allclose([ppo.adapt_kl_coef(0.2, np.float32(kl), 0.01) for kl in kls], want, rtol=1e-6)
    coef = jnp.float32(0.2)
    for kl in [0.0] * 300 + [1.0] * 20:  # after a long quiet time it comes back
        coef = ppo.adapt_kl_coef(coef, np.float32(kl), 0.01)
    assert coef > 0.5


@relaxed
@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-6, 1)), min_size=1, max_size=6), st.integers(0, 10**7))
def test_schedule_is_piecewise_linear(moves, step):
    points = [(sum(m[0] for m in moves[:i]), value) for i, (_, value) in enumerate(moves)]
    text = ",".join(f"{x}:{y!r}" for x, y in points)
    assert runs.parse_schedule(text)(step) == pytest.approx(oracle.schedule(points, step), rel=1e-4, abs=1e-7)
    assert float(runs.parse_schedule("0.25")(step)) == 0.25


def test_reward_shaping():
    raw = [-12.0, -1.0, 0.0, 0.5, 1.0, 40.0]
    want = [math.copysign(math.sqrt(abs(r) + 1) - 1, r) + 0.001 * r for r in raw]
    np.testing.assert_allclose(shaping.shape_reward(np.array(raw)), want, rtol=1e-5)


@relaxed
@given(seeds)
def test_reward_normaliser_filters_over_time(seed):
    rng = np.random.default_rng(seed)
    steps = random_steps(rng, 20, 3)
    rollouts = [jax.tree.map(lambda x: x[:12], steps), jax.tree.map(lambda x: x[12:], steps)]
    state, got = shaping.new_filter(3), []
    for part in rollouts:
        state, normalized = shaping.normalize(state, part.rewards, part.terminated | part.truncated, ~part.done, 0.9)
        got.append(normalized)
    want, mean, var = oracle.normalize_rewards(
        [(s.rewards, s.terminated | s.truncated, ~s.done) for s in rollouts], 0.9
    )
    np.testing.assert_allclose([state.mean, state.var], [mean, var], rtol=1e-3, atol=1e-4)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def tiny():
    """Args, agent, state, rollout and steps of made-up frames, with episode ends."""
    args = ppo.Args(
        num_envs=3, num_steps=8, num_minibatches=2, update_epochs=2, encoder="nature", width=1, hidden=8,
        learning_rate="0.001", normalize_rewards=True,
    )  # fmt: skip
    rng, agent = np.random.default_rng(0), ppo.make_agent(args)
    steps = random_steps(rng, 8, 3)
    state = ppo.initial_state(args, agent)
    rollout = ppo.begin_rollout(args, state)
    for t in range(8):
        obs = rng.integers(0, 256, (3, 3, 64, 64), np.uint8)
        rollout, _ = ppo.act(args, agent, state.params, rollout, obs, steps.age[t])
    rollout = ppo.end_rollout(args, rollout, obs)
    return SimpleNamespace(args=args, agent=agent, rollout=rollout, steps=steps, rng=rng)


def run_update(tiny, rollout, steps):
    state, metrics = ppo.update(tiny.args, tiny.agent, ppo.initial_state(tiny.args, tiny.agent), rollout, steps)
    return jax.device_get((state, metrics))


def test_steps_that_are_no_transition_change_nothing(tiny):
    junk = tiny.steps.done
    assert 0 < junk.sum() < junk.size
    noise = lambda x: np.where(junk.reshape(8, 3, *[1] * (x.ndim - 2)), tiny.rng.normal(size=x.shape), x)  # noqa: E731
    rollout = tiny.rollout._replace(
        actions=jnp.where(junk, 14, tiny.rollout.actions),
        logits=jnp.float32(noise(np.asarray(tiny.rollout.logits))),
    )
    steps = tiny.steps._replace(rewards=np.float32(noise(tiny.steps.rewards)))
    before, after = run_update(tiny, tiny.rollout, tiny.steps), run_update(tiny, rollout, steps)
    jax.tree.map(np.testing.assert_array_equal, before[0].params, after[0].params)
    assert before[1] == after[1]
    assert before[0].global_step == (~junk).sum()


def test_transitions_do_change_the_update(tiny):
    """The test above can fail: the same noise on transitions does move the parameters."""
    steps = tiny.steps._replace(rewards=tiny.steps.rewards + ~tiny.steps.done * tiny.rng.random((8, 3), np.float32))
    before, after = run_update(tiny, tiny.rollout, tiny.steps), run_update(tiny, tiny.rollout, steps)
    assert any(not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True))


def test_history_continues_the_rollout(tiny):
    state, _ = run_update(tiny, tiny.rollout, tiny.steps)
    past = ppo.history_length(tiny.args)
    np.testing.assert_array_equal(state.history, tiny.rollout.frames[8 : 8 + past])
