"""TRPO: its parts against independent oracles, and a run on the real game."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY, init_params, read_metrics
from hypothesis import given
from hypothesis import strategies as st
from rollouts import MADE_UP, made_up, play, relaxed, seeds
from scipy.special import softmax
from test_ppo_math import random_batch as ppo_batch

import evaluate
import trpo_procgen as trpo
from benchmarks import encoders
from common import devices, runs
from common.derivatives import custom_vjp, forward_mode

TINY = {k: v for k, v in TINY.items() if k not in ("update_epochs", "learning_rate")} | {"value_epochs": 2}


def random_batch(rng, size):
    """New logits, and the Batch of an older policy."""
    logits, _, batch, _ = ppo_batch(rng, size)
    return logits, trpo.Batch(batch.actions, batch.logits, batch.advantages, batch.returns)


def assert_close(got, want, rtol, atol):
    """Of pytrees, with an absolute tolerance relative to each array's largest number."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol * np.abs(b).max())


@relaxed
@given(seeds)
def test_policy_loss_terms_of_random_batch_equal_sums_by_hand(seed):
    logits, batch = random_batch(np.random.default_rng(seed), 20)
    new, old, each = (*(softmax(np.float64(x), 1) for x in (logits, batch.logits)), np.arange(20))
    got = trpo.policy_loss_terms(logits, batch)
    ratio = new[each, batch.actions] / old[each, batch.actions]
    np.testing.assert_allclose(got["policy_loss"], -ratio * batch.advantages, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got["approx_kl"], (old * np.log(old / new)).sum(axis=1), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(got["entropy"], -(new * np.log(new)).sum(axis=1), rtol=1e-4)


@relaxed
@given(seeds, st.integers(1, 8))
def test_conjugate_gradients_of_random_system_equal_numpy(seed, size):
    rng = np.random.default_rng(seed)
    root, cut = rng.normal(size=(size, size)), size // 2  # of a pytree of two arrays
    matrix, target = root @ root.T + np.eye(size), rng.normal(size=size)

    def product(x):
        y = jnp.float32(matrix) @ jnp.concatenate(x)
        return y[:cut], y[cut:]

    def solve(iterations):
        parts = jnp.float32(target[:cut]), jnp.float32(target[cut:])
        return np.concatenate(trpo.conjugate_gradients(product, parts, iterations))

    assert_close(solve(3 * size), np.linalg.solve(matrix, target), 2e-3, 2e-4)
    step = (target @ target) / (target @ matrix @ target) * target  # one iteration is a step along the target
    np.testing.assert_allclose(solve(1), step, rtol=1e-4, atol=1e-5)


class SmallPolicy(nn.Module):
    @nn.compact
    def __call__(self, frames):
        x = frames.reshape(len(frames), -1) / 255
        return nn.Dense(15)(nn.tanh(nn.Dense(4)(x)))


class Samples(NamedTuple):
    """These samples in place of a rollout."""

    frames: np.ndarray
    batch: trpo.Batch
    mask: np.ndarray

    def take(self, index):
        frames, batch, mask = jax.tree.map(lambda x: jnp.asarray(x)[index], tuple(self))
        return (frames, batch), mask


def small_problem(mask):
    """A small policy's parameters and a Batch of it, with samples of this mask."""
    rng = np.random.default_rng(len(mask))
    frames = rng.integers(0, 256, (len(mask), 3, 1), np.uint8)
    params = init_params(SmallPolicy(), frames)
    batch = random_batch(rng, len(mask))[1]._replace(logits=np.asarray(SmallPolicy().apply(params, frames)))
    return params, Samples(frames, batch, np.array(mask, bool))


def fisher_matrix(params, frames, mean):
    """The weighted mean over samples of J' (diag(p) - p p') J, and the Jacobian J [B, 15, parameters], in float64."""
    flat, unflatten = jax.flatten_util.ravel_pytree(jax.tree.map(np.float64, params))
    jacobian = np.asarray(jax.jacobian(lambda x: SmallPolicy().apply(unflatten(x), np.float64(frames)))(flat))
    probs = softmax(np.float64(SmallPolicy().apply(params, frames)), 1)
    inner = np.einsum("b,ba,ac->bac", mean, probs, np.eye(15)) - np.einsum("b,ba,bc->bac", mean, probs, probs)
    return np.einsum("bai,bac,bcj->ij", jacobian, inner, jacobian), jacobian


def test_fisher_product_with_vector_equals_full_matrix_and_hessian_of_kl():
    params, data = small_problem([1, 1, 0, 1, 1, 1])
    flat, unflatten = jax.flatten_util.ravel_pytree(params)
    vector, mean = np.float32(np.random.default_rng(0).normal(size=flat.shape)), data.mask / 5
    fisher = partial(trpo.fisher_loss, SmallPolicy(), vector=unflatten(vector))
    got = devices.gradient(fisher, params, (data.frames, None), data.mask)[0]
    with jax.enable_x64(True):
        exact, unflatten = jax.flatten_util.ravel_pytree(jax.tree.map(np.float64, params))

        def log_probs(x):
            return jax.nn.log_softmax(SmallPolicy().apply(unflatten(x), np.float64(data.frames)))

        old = log_probs(exact)
        hessian = jax.hessian(lambda x: (jnp.exp(old) * (old - log_probs(x))).sum(axis=1) @ mean)(exact)
        matrix, _ = fisher_matrix(params, data.frames, mean)
    np.testing.assert_allclose(matrix, hessian, rtol=1e-4, atol=1e-6)
    assert_close(jax.flatten_util.ravel_pytree(got)[0], matrix @ vector, 1e-3, 1e-5)


@pytest.mark.parametrize("encoder", ["nature", pytest.param("impala", marks=pytest.mark.slow)])
def test_fisher_product_in_custom_layers_equals_plain_flax(encoder, monkeypatch):
    """Forward-mode derivatives go through the networks' own convolutions and pools, on a CPU and on a GPU."""
    args = trpo.Args(**TINY | {"width": 1, "encoder": encoder})
    network, rng = trpo.make_agent(args).policy, np.random.default_rng(0)
    frames = rng.integers(0, 256, (3, 64, 64, 6), np.uint8)
    frames[:, :, :32] = 0  # as most of some games: a ReLU is exactly 0 there
    params = init_params(network, frames)
    vector = jax.tree.map(lambda x: np.float32(rng.normal(size=x.shape)), params)

    def product():
        fisher = partial(trpo.fisher_loss, network, vector=vector)
        return jax.jit(lambda p: devices.gradient(fisher, p, (frames, None), jnp.ones(3))[0])(params)

    with encoders.plain_flax():
        plain = product()
    assert_close(product(), plain, 1e-2, 1e-3)
    monkeypatch.setattr(devices, "on_cpu", lambda: False)
    assert_close(product(), plain, 1e-2, 1e-3)


@pytest.mark.parametrize("order", [1, -1], ids=["forward first", "backward first"])
def test_jitted_function_in_either_mode_takes_its_own_derivative(order):
    square = custom_vjp(lambda x: x**2)
    square.defvjp(lambda x: (x**2, x), lambda x, g: (7 * g,))  # wrong on purpose
    compiled = jax.jit(square)

    def forward():
        with forward_mode():
            assert jax.jvp(compiled, (3.0,), (1.0,))[1] == 6

    def backward():
        assert jax.grad(compiled)(3.0) == 7

    for differentiate in (forward, backward)[::order]:
        differentiate()


def test_trust_region_step_equals_dense_natural_gradient():
    """Over minibatches with different weights, one of which has no transition."""
    params, data = small_problem([1, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1])
    args = trpo.Args(fisher_fraction=1.0, cg_iterations=60, damping=0.01, max_kl=1e-4)
    agent, batch, mean = trpo.Agent(SmallPolicy(), None), data.batch, data.mask / data.mask.sum()
    step = jax.jit(partial(trpo.trust_region_step, args, agent))
    after, metrics = step(params, data, np.arange(12).reshape(3, 4))

    matrix, jacobian = fisher_matrix(params, data.frames, mean)
    matrix += 0.01 * np.eye(len(matrix))
    probs, new = (softmax(np.float64(x), 1) for x in (batch.logits, SmallPolicy().apply(after, data.frames)))
    slope = (mean * batch.advantages)[:, None] * (np.eye(15)[batch.actions] - probs)
    gradient = np.einsum("ba,bai->i", slope, jacobian)
    direction = np.linalg.solve(matrix, gradient)
    want = np.sqrt(2 * 1e-4 / (direction @ matrix @ direction)) * direction
    got = jax.flatten_util.ravel_pytree(jax.tree.map(jnp.subtract, after, params))[0]
    assert_close(got, want, 2e-2, 2e-3)
    assert metrics["step_taken"] == 1
    assert metrics["cg_residual"] < 1e-3
    np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(gradient), rtol=1e-3)
    ratio = (new / probs)[np.arange(12), batch.actions]
    np.testing.assert_allclose(metrics["policy_loss"], -mean @ (ratio * batch.advantages), rtol=1e-3)
    np.testing.assert_allclose(metrics["approx_kl"], mean @ (probs * np.log(probs / new)).sum(1), rtol=0.05)


def test_trust_region_step_without_finite_direction_keeps_policy_and_shows():
    params, data = small_problem([1, 1, 1, 1])
    data.batch.advantages[1] = np.nan
    step = jax.jit(partial(trpo.trust_region_step, trpo.Args(), trpo.Agent(SmallPolicy(), None)))
    after, metrics = step(params, data, np.arange(4).reshape(1, 4))
    jax.tree.map(np.testing.assert_array_equal, after, params)
    assert metrics["step_taken"] == 0
    assert not np.isfinite(metrics["cg_residual"])  # Run.check_finite stops the run


@pytest.mark.parametrize(
    ("fraction", "shape", "want"),
    [(0.1, (8, 512), (1, 416)), (0.3, (8, 512), (3, 416)), (1.0, (8, 512), (8, 512)), (1e-6, (2, 4), (1, 4))],
)
def test_fisher_order_of_fraction_is_few_rows_of_distinct_samples(fraction, shape, want):
    order = np.random.default_rng(0).permutation(np.prod(shape)).reshape(shape)
    rows = np.asarray(trpo.fisher_order(trpo.Args(fisher_fraction=fraction), order))
    assert rows.shape == want
    assert len(np.unique(rows)) == rows.size


@pytest.mark.parametrize(
    ("step", "tries", "taken"), [(0.5, 4, 1.0), (4.0, 4, 0.25), (4.0, 2, 0.0), (-1.0, 9, 0.0), (np.nan, 3, 0.0)]
)
def test_line_search_takes_first_step_with_lower_loss_within_region(step, tries, taken):
    def evaluate(x):  # lower up to 3, within the region up to 1
        return {"loss": (x["x"] - 1.5) ** 2, "approx_kl": x["x"] ** 2, "policy_loss": x["x"]}

    start, full_step = {"x": jnp.float32(0)}, {"x": jnp.float32(step)}
    params, terms, fraction = trpo.line_search(evaluate, start, full_step, evaluate(start), max_kl=1.0, tries=tries)
    assert fraction == taken
    assert terms["policy_loss"] == params["x"] == (step * taken if taken else 0)


# UPDATES


def test_update_with_rejected_step_trains_value_network_alone(monkeypatch):
    """Uphill no loss is lower, so that no step is taken."""
    monkeypatch.setattr(trpo, "conjugate_gradients", lambda _, target, __: jax.tree.map(jnp.negative, target))
    args = trpo.Args(**TINY | {"line_search_steps": 2, "learning_rate": "0:1e-4,1000:5e-5"})
    states, lines, _ = play(trpo, args, 4, again=True)
    assert not any(line["losses/step_taken"] for line in lines)
    jax.tree.map(np.testing.assert_array_equal, states[0].params["policy"], states[4].params["policy"])
    assert (np.diff([line["losses/value_loss"] for line in lines]) < 0).all()
    for state, line in zip(states, lines, strict=False):  # by steps, not by updates
        assert line["charts/learning_rate"] == pytest.approx(np.interp(state.global_step, [0, 1000], [1e-4, 5e-5]))
    assert [int(state.opt_state.count) for state in states] == [0, 4, 8, 12, 16]
    orders = {np.asarray(trpo.shuffled_minibatches(args, 128, state.key)).tobytes() for state in states}
    assert len(orders) == 5


def test_loss_with_penalty_adds_surrogate_and_kl_and_trains_policy():
    args = trpo.Args(**MADE_UP, penalty=0.5, value_epochs=1)
    tiny, rng = made_up(trpo, args), np.random.default_rng(0)
    frames, batch = rng.integers(0, 256, (5, 64, 64, 6), np.uint8), random_batch(rng, 5)[1]
    params = tiny.state.params
    terms, alone = (trpo.loss(a, tiny.agent, params, (frames, batch)) for a in (args, replace(args, penalty=0.0)))
    value_loss = 0.5 * (np.float64(tiny.agent.value.apply(params["value"], frames)[:, 0]) - batch.returns) ** 2
    want = terms["policy_loss"] + 0.5 * terms["approx_kl"] + value_loss
    np.testing.assert_allclose(terms["loss"], want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(alone["loss"], value_loss, rtol=1e-4, atol=1e-6)
    state, metrics = tiny.update(tiny.state, tiny.rollout, tiny.steps)
    assert "losses/step_taken" not in metrics
    for name in ("policy", "value"):
        pairs = zip(*(jax.tree.leaves(x.params[name]) for x in (tiny.state, state)), strict=True)
        assert any((a != b).any() for a, b in pairs)


@pytest.mark.optimised
def test_run_on_real_game_takes_better_steps_within_trust_region(tmp_path):
    """evaluate.py plays the trained policy."""
    flags = TINY | {
        "damping": 1e-3, "max_kl": 0.02, "total_timesteps": 500, "eval_episodes": 2, "eval_every": 300, "num_steps": 16,
        "normalize_rewards": True, "sticky_actions": 0.25, "restart_every": 30, "run_dir": str(tmp_path),
    }  # fmt: skip
    run_dir = trpo.main(trpo.Args(**flags)).path
    runs.cli(evaluate.Args, evaluate.main, [str(run_dir), "--episodes", "2", "--levels", "test"])
    lines = [line for line in read_metrics(run_dir) if "losses/policy_loss" in line]
    assert {"losses/cg_residual", "losses/value_loss", "losses/entropy"} <= set(lines[-1])
    taken = [line for line in lines if line["losses/step_taken"]]
    assert len(taken) > len(lines) / 2
    for line in taken:
        assert 1e-4 < line["losses/approx_kl"] <= 0.02
        assert line["losses/policy_loss"] < 0  # it is 0 for the old policy, whose advantages are normalised
    assert sum("eval/test_levels/mean_return" in line for line in read_metrics(run_dir)) == 2
