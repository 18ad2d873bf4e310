"""TRPO: its parts against independent oracles, and whole runs on the real game."""

import re
from dataclasses import fields, replace
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import (
    SHARED_FLAGS,
    TINY,
    assert_flag_matters,
    assert_one_sentence,
    assert_same_run,
    cut_back,
    init_params,
    read_metrics,
    stop_and_go_on,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ppo_math import random_steps

import evaluate
import trpo_procgen as trpo
from benchmarks import encoders
from common import checkpoints, devices, envs, runs, shaping
from common.derivatives import custom_vjp, forward_mode

relaxed = settings(deadline=None, max_examples=25)
seeds = st.integers(0, 2**32 - 1)
TINY = {k: v for k, v in TINY.items() if k not in ("update_epochs", "learning_rate")} | {"value_epochs": 2}


def random_batch(rng, size):
    """New logits, and the Batch of an older policy."""
    old = rng.normal(size=(size, 15))
    new = old + 0.3 * rng.normal(size=(size, 15))
    advantages, returns = rng.normal(size=(2, size))
    batch = trpo.Batch(np.int32(rng.integers(0, 15, size)), *map(np.float32, (old, advantages, returns)))
    return np.float32(new), batch


def softmax(x):
    x = np.exp(np.float64(x) - x.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


@relaxed
@given(seeds)
def test_surrogate_and_kl_by_hand(seed):
    logits, batch = random_batch(np.random.default_rng(seed), 20)
    new, old, each = softmax(logits), softmax(batch.logits), np.arange(20)
    got = trpo.policy_parts(logits, batch)
    ratio = new[each, batch.actions] / old[each, batch.actions]
    np.testing.assert_allclose(got["policy_loss"], -ratio * batch.advantages, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got["approx_kl"], (old * np.log(old / new)).sum(axis=1), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(got["entropy"], -(new * np.log(new)).sum(axis=1), rtol=1e-4)


@relaxed
@given(seeds, st.integers(1, 8))
def test_conjugate_gradients_solve_as_numpy(seed, size):
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(size, size))
    matrix, target = root @ root.T + np.eye(size), rng.normal(size=size)
    cut = size // 2  # a tree of arrays
    parts = {"a": jnp.float32(target[:cut]), "b": jnp.float32(target[cut:])}

    def product(x):
        y = jnp.float32(matrix) @ jnp.concatenate([x["a"], x["b"]])
        return {"a": y[:cut], "b": y[cut:]}

    x = trpo.conjugate_gradients(product, parts, 3 * size)
    want = np.linalg.solve(matrix, target)
    np.testing.assert_allclose(np.concatenate([x["a"], x["b"]]), want, rtol=2e-3, atol=2e-4 * np.abs(want).max())
    one = trpo.conjugate_gradients(product, parts, 1)  # one iteration is a step along the target
    step = (target @ target) / (target @ matrix @ target) * target
    np.testing.assert_allclose(np.concatenate([one["a"], one["b"]]), step, rtol=1e-4, atol=1e-5)


class Small(nn.Module):
    @nn.compact
    def __call__(self, frames):
        x = frames.reshape(len(frames), -1) / 255
        return nn.Dense(15)(nn.tanh(nn.Dense(4)(x)))


def test_fisher_product_is_the_full_matrix_and_the_kl_divergences_hessian():
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (6, 3, 1), np.uint8)
    weight = np.array([1, 1, 0, 1, 1, 1], np.float32)
    network = Small()
    params = init_params(network, frames)
    flat, unflatten = jax.flatten_util.ravel_pytree(params)
    vector = np.float32(rng.normal(size=flat.shape))

    fisher = partial(trpo.fisher_loss, network, vector=unflatten(vector))
    got = devices.gradient(fisher, params, (frames, None), weight)[0]
    with jax.enable_x64(True):
        exact = np.float64(flat)

        def logits(x):
            return network.apply(jax.tree.map(jnp.float64, unflatten(x)), frames.astype(np.float64))

        def kl(x):
            old, new = jax.nn.log_softmax(logits(exact)), jax.nn.log_softmax(logits(x))
            return (jnp.exp(old) * (old - new)).sum(axis=1) @ (weight / weight.sum())

        unflatten = jax.flatten_util.ravel_pytree(jax.tree.map(np.float64, params))[1]
        jacobian, probs = np.asarray(jax.jacobian(logits)(exact)), softmax(np.asarray(logits(exact)))
        hessian = np.asarray(jax.hessian(kl)(exact))
    matrix = np.zeros((len(exact), len(exact)))
    for i in range(6):
        matrix += weight[i] / 5 * jacobian[i].T @ (np.diag(probs[i]) - np.outer(probs[i], probs[i])) @ jacobian[i]
    np.testing.assert_allclose(matrix, hessian, rtol=1e-8, atol=1e-10)
    got = jax.flatten_util.ravel_pytree(got)[0]
    np.testing.assert_allclose(got, matrix @ vector, rtol=1e-3, atol=1e-5 * np.abs(matrix @ vector).max())


@pytest.mark.parametrize("encoder", ["nature", pytest.param("impala", marks=pytest.mark.slow)])
def test_fisher_product_is_the_same_in_plain_flax(encoder, monkeypatch):
    """Derivatives forward go through the networks' own forms of convolutions and pools, on a CPU and on a GPU."""
    args = trpo.Args(**TINY | {"width": 1, "num_devices": 1, "encoder": encoder})
    network, rng = trpo.make_agent(args).policy, np.random.default_rng(0)
    frames = rng.integers(0, 256, (3, 64, 64, 6), np.uint8)
    frames[:, :, :32] = 0  # as most of some games: a ReLU is exactly 0 there
    params = init_params(network, frames)
    vector = jax.tree.map(lambda x: np.float32(rng.normal(size=x.shape)), params)

    def product():
        fisher = partial(trpo.fisher_loss, network, vector=vector)
        return jax.jit(lambda p: devices.gradient(fisher, p, (frames, None), jnp.ones(3))[0])(params)

    ours = product()
    with encoders.plain_flax():
        plain = product()
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3 * np.abs(b).max())
    monkeypatch.setattr(devices, "on_cpu", lambda: False)
    for a, b in zip(jax.tree.leaves(product()), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3 * np.abs(b).max())


@pytest.mark.parametrize("first", ["forward", "back"])
def test_forward_mode_is_part_of_what_is_compiled(first):
    """Whichever way a jitted function is differentiated first, each takes its own."""
    square = custom_vjp(lambda x: x**2)
    square.defvjp(lambda x: (x**2, x), lambda x, g: (7 * g,))  # wrong on purpose
    compiled = jax.jit(square)

    def forward():
        with forward_mode():
            assert jax.jvp(compiled, (3.0,), (1.0,))[1] == 6

    def back():
        assert jax.grad(compiled)(3.0) == 7

    for way in (forward, back) if first == "forward" else (back, forward):
        way()


class Data(NamedTuple):
    """Stands for a rollout: of these samples."""

    frames: np.ndarray
    batch: trpo.Batch
    weight: np.ndarray

    def take(self, index):
        frames, batch = jax.tree.map(lambda x: jnp.asarray(x)[index], (self.frames, self.batch))
        return (frames, batch), jnp.asarray(self.weight)[index]


def test_a_step_is_the_natural_gradients_at_the_trust_regions_edge():
    """Against a dense matrix, over minibatches with unlike weights, one of which has no transition."""
    rng = np.random.default_rng(1)
    frames = rng.integers(0, 256, (12, 3, 1), np.uint8)
    weight = np.array([1, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1], bool)
    network = Small()
    params = init_params(network, frames)
    batch = random_batch(rng, 12)[1]._replace(logits=np.asarray(network.apply(params, frames)))
    args = trpo.Args(fisher_fraction=1.0, cg_iterations=60, damping=0.01, max_kl=1e-4, num_devices=1)
    agent, data = trpo.Agent(network, None), Data(frames, batch, weight)
    moved, metrics = trpo.trust_region_step(args, agent, params, data, np.arange(12).reshape(3, 4))

    flat, unflatten = jax.flatten_util.ravel_pytree(params)
    jacobian = np.float64(jax.jacobian(lambda x: network.apply(unflatten(x), frames))(flat))
    probs, mean = softmax(np.asarray(batch.logits)), weight / weight.sum()
    matrix, gradient = 0.01 * np.eye(len(flat)), np.zeros(len(flat))
    for i in range(12):
        matrix += mean[i] * jacobian[i].T @ (np.diag(probs[i]) - np.outer(probs[i], probs[i])) @ jacobian[i]
        gradient += mean[i] * batch.advantages[i] * jacobian[i].T @ (np.eye(15)[batch.actions[i]] - probs[i])
    direction = np.linalg.solve(matrix, gradient)
    step = np.sqrt(2 * 1e-4 / (direction @ matrix @ direction)) * direction
    assert metrics["step_taken"] == 1
    assert metrics["cg_residual"] < 1e-3
    got = jax.flatten_util.ravel_pytree(moved)[0] - flat
    np.testing.assert_allclose(got, step, rtol=2e-2, atol=2e-3 * np.abs(step).max())
    np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(gradient), rtol=1e-3)
    new = softmax(np.asarray(network.apply(moved, frames)))
    ratio = (new / probs)[np.arange(12), batch.actions]
    np.testing.assert_allclose(metrics["policy_loss"], -mean @ (ratio * batch.advantages), rtol=1e-3)
    np.testing.assert_allclose(metrics["approx_kl"], mean @ (probs * np.log(probs / new)).sum(1), rtol=0.05)


def test_without_a_finite_direction_the_policy_stays_and_it_is_seen():
    rng = np.random.default_rng(2)
    frames, network = rng.integers(0, 256, (4, 3, 1), np.uint8), Small()
    params = init_params(network, frames)
    batch = random_batch(rng, 4)[1]._replace(logits=np.asarray(network.apply(params, frames)))
    batch.advantages[1] = np.nan
    agent, data = trpo.Agent(network, None), Data(frames, batch, np.ones(4, bool))
    moved, metrics = trpo.trust_region_step(trpo.Args(num_devices=1), agent, params, data, np.arange(4).reshape(1, 4))
    jax.tree.map(np.testing.assert_array_equal, moved, params)
    assert metrics["step_taken"] == 0
    assert not np.isfinite(metrics["cg_residual"])  # which Run.check_finite stops


@pytest.mark.parametrize(
    ("fraction", "shape", "want"),
    [(0.1, (8, 512), (1, 416)), (0.3, (8, 512), (3, 416)), (1.0, (8, 512), (8, 512)), (1e-6, (2, 4), (1, 4))],
)
def test_the_fisher_matrix_is_of_a_part_of_the_batch_in_few_rows(fraction, shape, want):
    order = np.random.default_rng(0).permutation(np.prod(shape)).reshape(shape)
    rows = np.asarray(trpo.fisher_rows(trpo.Args(fisher_fraction=fraction), order))
    assert rows.shape == want
    assert len(np.unique(rows)) == rows.size


@pytest.mark.parametrize(
    ("step", "tries", "taken"), [(0.5, 4, 1.0), (4.0, 4, 0.25), (4.0, 2, 0.0), (-1.0, 9, 0.0), (np.nan, 3, 0.0)]
)
def test_line_search_takes_the_first_step_that_is_better_and_near(step, tries, taken):
    def evaluate(x):  # better up to 3, near up to 1
        return {"loss": (x["x"] - 1.5) ** 2, "approx_kl": x["x"] ** 2, "policy_loss": x["x"]}

    start, step_of = {"x": jnp.float32(0)}, {"x": jnp.float32(step)}
    params, parts, scale = trpo.line_search(evaluate, start, step_of, evaluate(start), max_kl=1.0, tries=tries)
    assert scale == taken
    assert params["x"] == (step * taken if taken else 0)
    assert parts["policy_loss"] == params["x"]


# ON THE REAL GAME


def play(args, updates=3, change=lambda state: state, again=False):
    """States and metrics of some updates; of the same rollout, if asked."""
    agent, games = trpo.make_agent(args), envs.Games(partial(envs.make_levels, args), range(args.num_envs), 3, 10**6)
    state = devices.put(args, change(devices.run_once(trpo.initial_state, args, agent)), trpo.STATE)
    carry = devices.put(args, trpo.initial_carry(args, np.arange(args.num_envs)), trpo.CARRY)
    states, lines = [jax.device_get(state)], []
    for i in range(updates):
        if i == 0 or not again:
            rollout, steps, carry = trpo.collect(args, agent, games, state.params, carry, i=i, watch=runs.Stopwatch())
        state, metrics = trpo.update(args, agent, state, rollout, steps)
        states.append(jax.device_get(state))
        lines.append(jax.device_get(metrics))
    games.close()
    return states, lines


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_rejected_step_leaves_the_policy(monkeypatch):
    """Uphill nothing is better, so nothing is taken; the value network learns on."""
    monkeypatch.setattr(trpo, "conjugate_gradients", lambda _, target, __: jax.tree.map(jnp.negative, target))
    flags = {"max_kl": 1.01e-4, "line_search_steps": 2, "learning_rate": "0:1e-4,1000:5e-5"}
    args = trpo.Args(**TINY | flags)  # not another test's, which is compiled
    states, lines = play(args, updates=4, again=True)
    assert not any(line["losses/step_taken"] for line in lines)
    assert_equal(states[0].params["policy"], states[4].params["policy"])
    assert (np.diff([line["losses/value_loss"] for line in lines]) < 0).all()
    assert len({np.asarray(state.key).tobytes() for state in states}) == 5  # other minibatches each time
    for state, line in zip(states, lines, strict=False):  # by steps, not by updates
        assert line["charts/learning_rate"] == pytest.approx(np.interp(state.global_step, [0, 1000], [1e-4, 5e-5]))
    assert [int(state.opt_state.count) for state in states] == [0, 4, 8, 12, 16]
    orders = [np.asarray(trpo.shuffled(args, 128, jax.random.PRNGKey(seed))) for seed in (0, 1)]
    assert (orders[0] != orders[1]).any()


def test_advantages_and_targets_by_hand():
    """On made-up frames, with episode ends of both kinds."""
    args = trpo.Args(**TINY | {"num_envs": 3, "num_steps": 8, "normalize_rewards": True, "num_devices": 1})
    agent, rng = trpo.make_agent(args), np.random.default_rng(0)
    state, steps = devices.run_once(trpo.initial_state, args, agent), random_steps(rng, 8, 3)
    rollout = trpo.begin_rollout(args, trpo.initial_carry(args, np.arange(3)), 0)
    for t in range(8):
        obs = rng.integers(0, 256, (3, 3, 64, 64), np.uint8)
        rollout, _ = trpo.act(args, agent, state.params, rollout, obs, steps.age[t])
    newest = rng.integers(0, 256, (3, 3, 64, 64), np.uint8)
    rollout, carry = trpo.end_rollout(args, rollout, newest, steps.age[8])
    images = rollout.frames.images
    np.testing.assert_array_equal(images[-1], newest.transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(carry.history, images[-1 - len(carry.history) : -1])
    for t in (0, 5):
        for name, got in (("policy", rollout.logits[t]), ("value", rollout.values[t][:, None])):
            want = getattr(agent, name).apply(state.params[name], rollout.frames.stack(t))
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)
    after, batch, metrics = jax.jit(partial(trpo.prepare, args, agent))(state, rollout, steps, 0.9)
    assert after.reward_filter.count == (~steps.done).sum()  # it is for the next update too
    kernel = state.params["policy"]["params"]["Dense_0"]["kernel"]
    assert np.linalg.norm(kernel, 2) == pytest.approx(0.01, rel=1e-3)  # nearly uniform
    last_value = agent.value.apply(state.params["value"], rollout.frames.stack(8))[:, 0]
    values = np.concatenate([rollout.values, last_value[None]])
    rewards = shaping.prepare_rewards(args, state.reward_filter, steps, 0.9)[1]
    advantages, kept = np.zeros((8, 3)), ~steps.done
    for n in range(3):
        ends = steps.terminated[:, n], steps.truncated[:, n]
        advantages[:, n] = oracle.gae(np.asarray(rewards)[:, n], values[:, n], *ends, 0.9, args.gae_lambda)
    np.testing.assert_allclose((batch.returns - rollout.values)[kept], advantages[kept], rtol=1e-3, atol=1e-4)
    want = (advantages - advantages[kept].mean()) / advantages[kept].std()
    np.testing.assert_allclose(batch.advantages[kept], want[kept], rtol=1e-3, atol=1e-3)
    unexplained = advantages[kept].var() / (advantages + rollout.values)[kept].var()
    np.testing.assert_allclose(metrics["losses/explained_variance"], 1 - unexplained, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_the_learner_sees_what_was_acted_on():
    """The old policy's divergence from itself, rebuilt from real frames, stacks and ages, is 0."""

    def sharpen(state):  # it starts nearly uniform: no mistake would show
        state.params["policy"]["params"]["Dense_0"]["kernel"] *= 3000
        return state

    args = trpo.Args(**TINY | {"max_kl": 1e-6, "line_search_steps": 1, "sticky_actions": 0.25, "num_steps": 150})
    _, lines = play(args, updates=2, change=sharpen)
    for line in lines:
        assert line["losses/entropy"] < 2.6
        assert abs(line["losses/approx_kl"]) < 1e-5


def test_a_penalty_is_added_to_the_surrogate():
    args = trpo.Args(**TINY | {"penalty": 0.5, "num_devices": 1})
    agent, rng = trpo.make_agent(args), np.random.default_rng(0)
    frames = rng.integers(0, 256, (5, 64, 64, 6), np.uint8)
    batch, params = random_batch(rng, 5)[1], devices.run_once(trpo.initial_state, args, agent).params
    parts = trpo.loss(args, agent, params, (frames, batch))
    values = agent.value.apply(params["value"], frames)[:, 0]
    value_loss = 0.5 * (np.float64(values) - batch.returns) ** 2
    want = parts["policy_loss"] + 0.5 * parts["approx_kl"] + value_loss
    np.testing.assert_allclose(parts["loss"], want, rtol=1e-4, atol=1e-5)
    alone = trpo.loss(replace(args, penalty=0.0), agent, params, (frames, batch))
    np.testing.assert_allclose(alone["loss"], value_loss, rtol=1e-4, atol=1e-6)


# WHOLE RUNS

STATEFUL = {"normalize_rewards": True, "sticky_actions": 0.25, "checkpoint_every": 100, "num_steps": 16,
            "restart_every": 30, "total_timesteps": 192}  # fmt: skip


@pytest.fixture
def train(tmp_path):
    return lambda **flags: trpo.main(trpo.Args(**TINY | {"run_dir": str(tmp_path)} | flags))


def test_resume_equals_uninterrupted(train, tmp_path):
    """With a penalty, which trains policy and value network; without one, the next test."""
    flags = STATEFUL | {"penalty": 0.5, "checkpoint_every": 1}
    whole = train(**flags).path
    half = cut_back(whole, 2, tmp_path)
    saved, later = (checkpoints.load(path)[1] for path in (cut_back(whole, 1, tmp_path / "before"), half))
    assert (saved["state"]["updates"], later["state"]["updates"]) == (2, 3)
    assert later["hosts"]["0"]["episodes"]["length"].any()
    first, second = np.split(saved["hosts"]["0"]["games"]["actions"], 2)
    assert (first != second).mean() > 0.5  # each rollout draws its own
    before, after = (checkpoints.load(path)[1]["state"]["params"] for path in (half, whole))
    for name in ("policy", "value"):
        with pytest.raises(AssertionError):
            assert_equal(before[name], after[name])
    line = read_metrics(whole)[-1]
    assert 0 < line["losses/approx_kl"] < 1
    assert "losses/step_taken" not in line
    assert train(**flags | {"resume": str(half)}).path == half
    assert_same_run(whole, half)


@pytest.mark.optimised
def test_sigterm_writes_a_checkpoint_and_resumes_exactly(tmp_path):
    """Each step on the real game is better and within the trust region, and evaluate.py plays what has come of them."""
    flags = TINY | STATEFUL | {
        "damping": 1e-3, "max_kl": 0.02, "total_timesteps": 500, "eval_episodes": 2, "eval_every": 300,
    }  # fmt: skip
    whole = trpo.main(trpo.Args(**flags | {"run_dir": str(tmp_path / "whole")})).path
    run_dir = stop_and_go_on(trpo, flags, tmp_path)
    assert_same_run(whole, run_dir)
    runs.cli(evaluate.Args, evaluate.main, [str(run_dir), "--episodes", "2", "--levels", "test"])
    assert re.fullmatch(r"bigfish__trpo_procgen__1__\d+", run_dir.name)
    lines = [line for line in read_metrics(run_dir) if "losses/policy_loss" in line]
    assert {"losses/cg_residual", "losses/value_loss", "losses/entropy"} <= set(lines[-1])
    taken = [line for line in lines if line["losses/step_taken"]]
    assert len(taken) > len(lines) / 2
    for line in taken:
        assert 1e-4 < line["losses/approx_kl"] <= 0.02
        assert line["losses/policy_loss"] < 0  # it is 0 for the old policy, whose advantages are normalised
    assert sum("eval/test_levels/mean_return" in line for line in read_metrics(run_dir)) == 2


FLAGS = {
    "sticky_actions": 0.5, "reward_shaping": True, "normalize_rewards": True, "hidden": 8, "seed": 2, "num_envs": 8,
    "num_steps": 16, "num_minibatches": 4, "value_epochs": 1, "learning_rate": "0:0.003,1000:0.001", "num_devices": 1,
    "gamma": "0.5", "gae_lambda": 0.5, "max_kl": 1e-4, "fisher_fraction": 0.5, "cg_iterations": 2, "damping": 1e-3,
    "line_search_steps": 3, "penalty": 0.5, "restart_every": 32,
}  # fmt: skip
HOST = {"restart_every"}


def test_every_flag_is_in_a_test():
    names = {f.name for f in fields(trpo.Args)}
    assert names - SHARED_FLAGS <= set(FLAGS) <= names
    assert "penalty" in runs.fixed(trpo.Args)


@pytest.mark.slow
@pytest.mark.parametrize("flag", [*FLAGS, "none"])
def test_every_flag_changes_something(flag, tmp_path):
    flags = TINY | {"total_timesteps": 250, "run_dir": str(tmp_path)}
    change = {} if flag == "none" else {flag: FLAGS[flag]}
    assert_flag_matters(trpo, flags, change, whole=flag in HOST)


@pytest.mark.parametrize(
    ("words", "names", "valid"),
    [
        (["--max-kl", 0], "--max-kl 0", "above 0"),
        (["--fisher-fraction", 2], "--fisher-fraction 2", "at most 1"),
        (["--num-minibatches", 7], "--num-minibatches 7", "8192"),
        (["--penalty", -1], "--penalty -1", "0 or more"),
        (["--cg-iterations", 0], "--cg-iterations 0", "from 1"),
        (["--penalty", 0.5, "--damping", 1], "--damping 1", "--penalty 0"),
    ],
)
def test_bad_input_gets_one_sentence(words, names, valid, monkeypatch, capfd):
    assert_one_sentence(trpo, words, names, valid, monkeypatch, capfd)
