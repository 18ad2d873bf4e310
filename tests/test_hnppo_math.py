"""Hypernetwork PPO against float64 NumPy and what can be done by hand."""

from contextlib import closing
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

import doorgym
import hnppo_doorgym as hn
from common import continual, devices, doors, envs, runs, shaping
from common.doors import DECISIONS, Rollout
from experiments.studies.doorgym_six import matrices

TINY = {
    "tasks": "0,1", "hidden": 5, "hyper_width": 7, "task_embedding_dim": 3, "num_envs": 4, "num_minibatches": 4,
    "update_epochs": 2, "critic": "fresh",
}  # fmt: skip
# One size for all tests that learn, so that each program is compiled once.
LEARN = {
    "num_envs": 8, "hidden": 16, "hyper_width": 32, "learning_rate": 0.02, "hyper_learning_rate": 1e-3, "beta": 1.0,
}  # fmt: skip
METHODS = {
    "hnppo": {}, "all generated": {"critic": "hyper", "chunked": True}, "ppo": {"method": "ppo"},
    "finetune": {"method": "finetune"},
}  # fmt: skip


def make(**flags):
    args = hn.Args(**TINY | flags)
    return args, hn.Agent(args)


def random_like(tree, seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(scale * rng.normal(size=x.shape), jnp.float32), tree)


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def random_rollout(args, seed=0):
    rng = np.random.default_rng(seed)
    shape, (obs, actions) = (DECISIONS, args.num_envs), doorgym.vector.sizes(args.robot)
    return Rollout(normal(rng, DECISIONS + 1, args.num_envs, obs), normal(rng, *shape, actions), normal(rng, *shape))


def random_learner(agent, seed=1):
    """Parameters that are all different, without computing how they would start."""
    return random_like(jax.eval_shape(agent.init, jax.random.PRNGKey(0)), seed, 0.3)


def begun(args, agent, tasks=1):
    """The state in the middle of the `tasks`-th task, with random parameters and optimiser."""
    state = hn.begin_task(args, agent, devices.run_once(hn.initial_state, args, agent))
    for _ in range(tasks - 1):
        state = hn.begin_task(args, agent, hn.end_task(args, agent, state))

    def moments(adam):
        nu = jax.tree.map(lambda x: x**2, random_like(adam.nu, 3, 1e-3))
        return adam._replace(count=jnp.int32(3), mu=random_like(adam.mu, 2, 1e-3), nu=nu)

    def is_adam(x):
        return isinstance(x, optax.ScaleByAdamState)

    opt_state = jax.tree.map(lambda x: moments(x) if is_adam(x) else x, state.opt_state, is_leaf=is_adam)
    return state._replace(learner=random_learner(agent), opt_state=opt_state)


def adam_of(state, name):
    """Adam's moments for one part of the learner."""
    (adam,) = (x for x in state.opt_state.inner_states[name].inner_state if isinstance(x, optax.ScaleByAdamState))
    return adam.mu[name], adam.nu[name]


def float64(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


# THE HYPERNETWORK


def layers(hyper):
    """Weights and biases of its three layers."""
    names = sorted(name for name in hyper["params"] if name.startswith("Dense"))
    return [(hyper["params"][name]["kernel"], hyper["params"][name]["bias"]) for name in names]


def forward(hyper, x):
    """Outputs of the two hidden layers and of the last, for x [T, E]."""
    (w1, b1), (w2, b2), (w3, b3) = layers(hyper)
    one = np.maximum(x @ w1 + b1, 0)
    two = np.maximum(one @ w2 + b2, 0)
    return one, two, two @ w3 + b3


def test_hypernetwork_by_hand():
    _, agent = make()
    learner = random_learner(agent)
    assert agent.size == 15 * 5 + 5 + 5 * 5 + 5 + 5 * 6 + 6
    assert make(keep_std=True)[1].size == agent.size + 6
    out = forward(float64(learner["hyper"]), np.float64(learner["embedding"])[None])[2][0]
    params = agent.networks(learner)
    want = {"critic": learner["critic"], "log_std": learner["log_std"]} | agent.unpack(jnp.float32(out))
    for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(agent.pack(params), out, rtol=1e-4, atol=1e-5)


def test_chunked_hypernetwork_by_hand():
    _, agent = make(chunked=True, hidden=30, critic="hyper")
    learner = random_learner(agent)
    hyper = float64(learner["hyper"])
    names = hyper["params"]["chunks"]
    assert names.shape == (-(-agent.size // 1000), 5)
    assert agent.size > 2000
    embedding = np.float64(learner["embedding"])
    parts = [forward(hyper, np.concatenate([embedding, name])[None])[2][0] for name in names]
    got = agent.hyper.apply(learner["hyper"], learner["embedding"])
    np.testing.assert_allclose(got, np.concatenate(parts)[: agent.size], rtol=1e-4, atol=1e-4)
    both = agent.hyper.apply(learner["hyper"], jnp.stack([0 * learner["embedding"], learner["embedding"]]))
    np.testing.assert_allclose(both[1], got, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("critic", "size", "weights"), [("fresh", 5580, 3_992_780), ("hyper", 10829, 7_357_389)])
def test_published_sizes(critic, size, weights):
    args = hn.Args(critic=critic, keep_std=True)
    state = jax.eval_shape(partial(hn.initial_state, args, hn.Agent(args)))
    assert state.targets.shape == (6, size)
    assert sum(x.size for x in jax.tree.leaves(state.learner["hyper"])) == weights


def test_hypernetwork_starts_as_in_pytorch():
    _, agent = make(hyper_width=100)
    for weights, biases in layers(agent.hyper.init(jax.random.PRNGKey(0), jnp.zeros(8))):
        bound = 1 / np.sqrt(len(weights))
        for x in (weights, biases):
            assert 0.95 * bound < np.abs(x).max() <= bound
            assert abs(np.mean(x)) < 0.2 * bound
    assert make(num_layers=1)[1].size == 15 * 5 + 5 + 5 * 6 + 6
    kernel = make(method="ppo", hidden=16)[1].init_networks(jax.random.PRNGKey(0))["actor"]["params"]["Dense_1"][
        "kernel"
    ]
    np.testing.assert_allclose(kernel.T @ kernel, 2 * np.eye(16), atol=1e-4)
    hyper = make(chunked=True, critic="hyper", hidden=30)[1].hyper.init(jax.random.PRNGKey(0), jnp.zeros(3))
    assert np.std(hyper["params"]["chunks"]) > 0.5


# THE PENALTY


def penalty_gradient(hyper, embeddings, targets):
    """Of 1/T sum_j |h(e_j) - W_j|^2 with respect to each layer, in float64, by the chain rule."""
    one, two, out = forward(hyper, embeddings)
    (_, _), (w2, _), (w3, _) = layers(hyper)
    d3 = 2 * (out - targets) / len(embeddings)
    d2 = (d3 @ w3.T) * (two > 0)
    d1 = (d2 @ w2.T) * (one > 0)
    return [(embeddings.T @ d1, d1.sum(0)), (one.T @ d2, d2.sum(0)), (two.T @ d3, d3.sum(0))]


@pytest.mark.parametrize("max_grad_norm", [1e-4, 0.0, 1e9])
def test_penalty_looks_a_step_ahead_and_is_not_clipped(max_grad_norm):
    args, agent = make(max_grad_norm=max_grad_norm, beta=0.3, hyper_learning_rate=0.02)
    state = begun(*make(), tasks=3)
    state = state._replace(embeddings=random_like(state.embeddings, 4), targets=random_like(state.targets, 5))
    gradients = [jax.jit(partial(hn.gradients, args, agent, remember=x)) for x in (False, True)]
    (plain, _), (both, parts) = (gradient(state, batch_of(args, 7)) for gradient in gradients)
    if max_grad_norm == 1e-4:
        np.testing.assert_allclose(optax.tree.norm(plain), max_grad_norm, rtol=1e-3)
        assert float(parts["grad_norm"]) > max_grad_norm
    else:
        np.testing.assert_allclose(optax.tree.norm(plain), parts["grad_norm"], rtol=1e-3)

    # Adam's next step with the task's gradient only, from its moments after three steps.
    def ahead(theta, g, mu, nu):
        mu, nu = 0.9 * mu + 0.1 * g, 0.999 * nu + 0.001 * g**2
        return theta - 0.02 * (mu / (1 - 0.9**4)) / (np.sqrt(nu / (1 - 0.999**4)) + args.adam_eps)

    trees = state.learner["hyper"], plain["hyper"], *adam_of(state, "hyper")
    theta = jax.tree.map(ahead, *map(float64, trees))
    embeddings, targets = np.float64(state.embeddings)[:2], np.float64(state.targets)[:2]
    want = penalty_gradient(theta, embeddings, targets)
    distance = ((forward(theta, embeddings)[2] - targets) ** 2).sum() / 2
    np.testing.assert_allclose(parts["penalty"], distance, rtol=1e-4)
    for got, clipped, gradient in zip(layers(both["hyper"]), layers(plain["hyper"]), want, strict=True):
        for x, y, z in zip(got, clipped, gradient, strict=True):
            np.testing.assert_allclose(x - y, 0.3 * z, rtol=2e-3, atol=2e-3 * np.abs(0.3 * z).max())
    for name in ("embedding", "critic"):
        for x, y in zip(jax.tree.leaves(both[name]), jax.tree.leaves(plain[name]), strict=True):
            np.testing.assert_array_equal(x, y)


def test_penalty_keeps_what_was_generated():
    """Ten updates of a second task, with it and without: how far the policy of the first one moves."""
    args, agent = make(**LEARN)
    moved = {}
    for remember in (False, True):
        state = hn.begin_task(args, agent, devices.run_once(hn.initial_state, args, agent))
        state = hn.begin_task(args, agent, hn.end_task(args, agent, state))
        embedding, before = state.embeddings[0], hn.policy_for(agent, state, 0)["actor"]
        for i in range(10):
            state, _ = hn.update(args, agent, remember, state, random_rollout(args, i))
        np.testing.assert_array_equal(state.embeddings[0], embedding)
        after = hn.policy_for(agent, state, 0)["actor"]
        pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        moved[remember] = np.sqrt(sum(((x - y) ** 2).sum() for x, y in pairs))
    assert 0 < moved[True] < 0.2 * moved[False]


# PPO


def batch_of(args, seed):
    rng = np.random.default_rng(seed)
    obs, actions = doorgym.vector.sizes(args.robot)
    log_probs = -6 + normal(rng, 9)
    return hn.Batch(normal(rng, 9, obs), normal(rng, 9, actions), log_probs, *(normal(rng, 9) for _ in range(3)))


@pytest.mark.parametrize("method", ["hnppo", "ppo"])
@pytest.mark.parametrize("clip_coef", [0.2, 0.05])
def test_loss_by_hand(method, clip_coef):
    """Each sample's parts, in float64."""
    args, agent = make(method=method, clip_coef=clip_coef, ent_coef=0.03, vf_coef=0.7)
    learner, batch = random_learner(agent), batch_of(args, 3)
    params, b = float64(agent.networks(learner)), float64(batch)
    got = jax.jit(partial(hn.loss, args, agent))(learner, batch)

    def mlp(net, x):
        net = net["params"]
        for i in range(2):
            x = np.tanh(x @ net[f"Dense_{i}"]["kernel"] + net[f"Dense_{i}"]["bias"])
        return x @ net["Dense_2"]["kernel"] + net["Dense_2"]["bias"]

    log_std = params["log_std"]
    entropy = (log_std + 0.5 * np.log(2 * np.pi * np.e)).sum()
    for i in range(len(b.obs)):
        mean, value = mlp(params["actor"], b.obs[i]), mlp(params["critic"], b.obs[i])[0]
        density = np.prod(
            np.exp(-((b.actions[i] - mean) ** 2) / 2 / np.exp(log_std) ** 2) / np.exp(log_std) / 2.5066283
        )
        ratio = density / np.exp(b.log_probs[i])
        policy = -min(ratio * b.advantages[i], np.clip(ratio, 1 - clip_coef, 1 + clip_coef) * b.advantages[i])
        near = b.values[i] + np.clip(value - b.values[i], -clip_coef, clip_coef)
        squares = (near - b.returns[i]) ** 2, (value - b.returns[i]) ** 2
        value_loss = 0.5 * max(squares)
        want = {
            "policy_loss": policy, "value_loss": value_loss, "entropy": entropy,
            "loss": policy + 0.7 * value_loss - 0.03 * entropy, "approx_kl": ratio - 1 - np.log(ratio),
            "clipfrac": float(abs(ratio - 1) > clip_coef),
        }  # fmt: skip
        assert set(got) == set(want)
        for name, x in want.items():
            np.testing.assert_allclose(got[name][i], x, rtol=1e-3, atol=1e-4, err_msg=name)


def test_a_value_that_has_moved_far_enough_moves_no_further():
    """Unless it has gone the wrong way: then it comes back."""
    one = np.ones(1, np.float32)
    batch = hn.Batch(None, None, log_probs=0 * one, values=0 * one, advantages=one, returns=one)

    def value_loss(value):
        return hn.ppo_parts(hn.Args(clip_coef=0.2), batch.log_probs, value * one, batch)["value_loss"][0]

    slopes = [float(jax.grad(value_loss)(value)) for value in (0.1, 0.5, -0.5)]
    np.testing.assert_allclose(slopes, [-0.9, 0, -1.5], atol=1e-6)


compiled_gae = jax.jit(hn.gae)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 1), st.floats(0, 1))
def test_gae_by_hand(seed, gamma, lam):
    rng = np.random.default_rng(seed)
    rewards, values = normal(rng, 12), normal(rng, 13)
    got = compiled_gae(rewards, values, gamma=gamma, gae_lambda=lam)
    no = np.zeros(12, bool)
    want = oracle.gae(rewards, values, no, no, gamma, lam)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


HYPER_RATES = {"hyper": 0.001, "embedding": 0.001, "critic": 0.02, "log_std": 0.02}
RATES = {"actor": 0.02, "critic": 0.02, "log_std": 0.02}


@pytest.mark.parametrize(("method", "rates"), [("hnppo", HYPER_RATES), ("ppo", RATES)])
def test_each_part_has_its_learning_rate(method, rates):
    """Adam's first step is as long as the learning rate, for every number; an update's eight are about as long."""
    args, agent = make(**LEARN | {"method": method})
    tx, before = hn.make_optimizer(args), begun(args, agent)
    before = before._replace(opt_state=tx.init(before.learner))
    step, _ = tx.update(before.learner, before.opt_state)
    learner, key = jax.device_get((before.learner, before.key))
    after, _ = hn.update(args, agent, False, before, random_rollout(args))
    assert (after.key != key).any()  # the next one's minibatches are other ones
    for name, rate in rates.items():
        steps = np.concatenate([np.abs(x).ravel() for x in jax.tree.leaves(step[name])])
        np.testing.assert_allclose(np.median(steps), rate, rtol=1e-2)
        pairs = zip(jax.tree.leaves(learner[name]), jax.tree.leaves(after.learner[name]), strict=True)
        moved = np.concatenate([np.abs(x - y).ravel() for x, y in pairs])
        assert 0.5 * rate < moved.max() < 12 * rate, name
        adam = after.opt_state.inner_states[name].inner_state[0]
        assert adam.count == 8  # its moments go from update to update


def test_a_rollout_ends_with_the_episodes_last_observation():
    """`play`, in a second episode too, against steps by hand of doors whose next episode begins by itself."""
    args = hn.Args()
    actions = normal(np.random.default_rng(0), DECISIONS, 4, 6)
    with closing(doors.make_doors(args, "Pull-Right-Pull", 4, seed=1, num_worlds=3)) as env:
        doors.play(env, lambda obs, t: actions[-t], 3)
        rollout, ends = doors.play(env, lambda obs, t: actions[t], 7)
    steps = {"action_repeat": doors.ACTION_REPEAT, "max_episode_steps": doors.ACTION_REPEAT * DECISIONS}
    how = {"robot": args.robot, "hardness": args.hardness, "num_worlds": 3}
    with closing(doorgym.make_vec("Pull-Right-Pull", 4, 1, **how, **steps)) as env:
        obs, rewards = [env.reset(seed=7)[0]], []
        for t in range(DECISIONS):
            new, reward, _, truncated, info = env.step(actions[t])
            assert truncated.all() == (t == DECISIONS - 1)
            obs.append(new)
            rewards.append(reward)
    np.testing.assert_array_equal(rollout.obs[:-1], obs[:-1])
    np.testing.assert_array_equal(rollout.obs[-1], info["final_obs"])
    assert (rollout.obs[-1] != obs[-1]).all()
    np.testing.assert_array_equal(rollout.rewards, np.float32(rewards))
    np.testing.assert_array_equal(rollout.actions, actions)
    for name in ("success", "freed", "max_knob_angle"):
        np.testing.assert_array_equal(getattr(ends, name), info["final_info"][name])
    np.testing.assert_array_equal(ends.returns, rollout.rewards.sum(axis=0))
    means = doors.Ends(np.zeros(4), np.arange(4) < 1, np.arange(4) < 2, np.full(4, 0.9)).means("a/")
    assert means == pytest.approx({"a/success_rate": 0.25, "a/freed_rate": 0.5, "a/max_knob_angle": 0.9})


def test_a_part_of_the_loss_that_is_no_number_is_seen(monkeypatch):
    """Though the gradient is finite. And fields of other lengths are refused, which JAX would read beyond their end."""
    args, agent = make(num_minibatches=3)
    loss, batch = hn.loss, batch_of(args, 0)
    monkeypatch.setattr(hn, "loss", lambda *given: (parts := loss(*given)) | {"odd": 0 * parts["loss"] / 0})
    optimize = partial(jax.jit(hn.optimize, static_argnums=(0, 1), static_argnames="remember"), args, agent)
    metrics = optimize(begun(args, agent), batch, remember=False)[1]
    assert np.isnan(metrics["losses/odd"])
    assert np.isfinite(metrics["losses/loss"])
    assert metrics["charts/skipped_steps"] == 0
    with pytest.raises(AssertionError, match="prefix"):
        optimize(None, batch._replace(values=batch.values[:3]), remember=False)


def test_a_row_of_the_matrix_asks_each_tasks_own_policy(monkeypatch):
    args, agent = make()
    state = hn.begin_task(args, agent, devices.run_once(hn.initial_state, args, agent))
    embeddings = normal(np.random.default_rng(0), *state.embeddings.shape)
    state = state._replace(task=jnp.int32(1), finished=jnp.int32(2), embeddings=embeddings)
    obs, said, reported = normal(np.random.default_rng(1), 3, 15), [], []

    def evaluate(args, policy, task, **how):
        said.append(policy(obs, 0))
        return doors.Ends(np.zeros(8), np.arange(8) < len(said), np.zeros(8), np.zeros(8))

    monkeypatch.setattr(hn.doors, "evaluate", evaluate)
    monkeypatch.setattr(hn, "end_task", lambda args, agent, state: state)
    monkeypatch.setattr(hn.continual, "report", lambda run, step, matrix, names, **how: reported.append(matrix))
    matrix = hn.finish_task(args, agent, None, state).matrix
    row = np.arange(1, 1 + len(said)) / 8  # of the second task; the first one's was not measured here
    np.testing.assert_array_equal(reported[0], [np.full(len(said), np.nan), row])
    np.testing.assert_array_equal(np.asarray(matrix)[:2, : len(said)], reported[0])
    for i in range(2):
        np.testing.assert_allclose(said[i], hn.act(agent, hn.policy_for(agent, state, i), obs), rtol=1e-5, atol=1e-6)
    assert np.abs(said[0] - said[1]).max() > 1e-3


def test_each_update_plays_episodes_of_its_own(monkeypatch):
    args, agent = make(num_envs=1, num_minibatches=1)
    state = hn.begin_task(args, agent, devices.run_once(hn.initial_state, args, agent))
    with closing(doors.make_doors(args, "Pull-Right-Pull", args.num_envs, seed=1, num_worlds=1)) as env:
        states = state, state, state._replace(updates=jnp.int32(1)), state._replace(task=jnp.int32(1))
        first, again, *others = (hn.collect(args, agent, env, some, watch=runs.Stopwatch())[0] for some in states)
    np.testing.assert_array_equal(first.actions, again.actions)
    for other in others:
        assert (first.obs[0] != other.obs[0]).any()
        noise = (x.actions[0] - hn.act(agent, hn.policy_for(agent, state, 0), x.obs[0]) for x in (first, other))
        assert np.abs(np.subtract(*noise)).max() > 0.1

    def stop_at(args, agent, remember, *_):
        raise KeyError(remember)

    monkeypatch.setattr(hn.doors, "make_doors", lambda *_, **__: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(hn, "collect", lambda *_, **__: (0, 0))
    monkeypatch.setattr(hn.devices, "put", lambda args, given, lies: given)
    monkeypatch.setattr(hn, "update", stop_at)
    later = hn.TrainState(*[1] * len(hn.TrainState._fields))  # in the second task
    for flags, remember in (({}, True), ({"beta": 0.0}, False), ({"method": "finetune"}, False)):
        with pytest.raises(KeyError) as said:
            hn.learn_task(*make(**flags), SimpleNamespace(stop=None), later)
        assert said.value.args[0] is remember


def test_what_is_played_is_what_the_density_is_of():
    """Actions are the mean plus the standard deviation times each decision's own noise."""
    args, agent = make()
    state = begun(args, agent)
    with closing(doors.make_doors(args, "Pull-Right-Pull", args.num_envs, seed=1, num_worlds=1)) as env:
        rollout, _ = hn.collect(args, agent, env, state, watch=runs.Stopwatch())
    params = agent.networks(state.learner)
    deviations = np.asarray(rollout.actions - hn.act(agent, params, rollout.obs[:-1])) / np.exp(params["log_std"])
    key = jax.random.PRNGKey(envs.derive_seed(args.seed, 1 + int(state.task), 1 + int(state.updates)))
    np.testing.assert_allclose(deviations, hn.colored_noise(args, 6, key), rtol=1e-3, atol=1e-4)
    assert np.ptp(params["log_std"]) > 0.01


def test_an_evaluation_is_before_as_many_doors(monkeypatch):
    def worlds_of(env, policy, seed, film):
        env.reset(seed=seed)
        return None, env._world

    monkeypatch.setattr(doors, "play", worlds_of)
    assert len(set(doors.evaluate(hn.Args(), None, "Pull-Right-Pull", episodes=20, seed=3))) == 20

    def start_of(env, policy, seed, film):
        return None, (env.worlds[0].shape, env.reset(seed=seed)[0][:, :6])

    monkeypatch.setattr(doors, "play", start_of)
    shapes, starts = zip(
        *(doors.evaluate(hn.Args(), None, "Pull-Right-Pull", episodes=2, seed=seed) for seed in (3, 4)), strict=True
    )
    assert shapes[0] != shapes[1]
    assert (starts[0] != starts[1]).all()


@pytest.mark.parametrize("color", [0, 0.5, 1, 2])
def test_noise_has_its_color_and_variance_one(color):
    noise = np.asarray(hn.colored_noise(hn.Args(num_envs=200, noise_color=color), 5, jax.random.PRNGKey(0)), np.float64)
    assert noise.shape == (DECISIONS, 200, 5)
    np.testing.assert_allclose((noise**2).mean(axis=(1, 2)), 1, atol=0.2)  # at every decision
    np.testing.assert_allclose(noise.std(), 1, atol=0.05)
    power = (np.abs(np.fft.rfft(noise, axis=0)) ** 2).mean(axis=(1, 2))[1:-1]
    slope, _ = np.polyfit(np.log(np.arange(len(power)) + 1), np.log(power), 1)
    assert slope == pytest.approx(-color, abs=0.05)
    _, p = scipy.stats.kstest(noise[::64].ravel(), "norm")
    assert p > 1e-3


@pytest.mark.parametrize("method", ["hnppo", "all generated", pytest.param("ppo", marks=pytest.mark.slow)])
def test_learns_which_action_is_rewarded(method):
    """Rewards for actions near one that depends on the observation's sign: the mean action finds it."""
    rate = {"learning_rate": 0.01} if method == "ppo" else {}
    args, agent = make(**LEARN | METHODS[method] | rate)
    state = hn.begin_task(args, agent, devices.run_once(hn.initial_state, args, agent))
    key, wish = jax.random.PRNGKey(0), np.array([0.8, -0.8, 0.4, 0.0, 0.4, -0.4])

    def far(actions, obs):
        return ((actions - wish * np.sign(obs[..., :1])) ** 2).sum(axis=-1)

    for i in range(60):
        obs = random_rollout(args, i).obs
        actor = hn.policy_for(agent, state, 0)
        noise = jax.random.normal(jax.random.fold_in(key, i), (*obs[:-1].shape[:-1], 6))
        actions = np.asarray(hn.act(agent, actor, obs[:-1], noise))
        rollout = Rollout(obs, actions, -np.float32(far(actions, obs[:-1])))
        state, _ = hn.update(args, agent, False, state, rollout)
    start = far(np.zeros(6), obs).mean()
    assert far(np.asarray(hn.act(agent, actor, obs)), obs).mean() < 0.5 * start


def test_what_an_update_learns_from():
    """The old policy's densities and the advantages, in float64; on two devices the same as on one."""
    args, agent = make(num_devices=2)
    state, rollout = begun(args, agent), random_rollout(args)
    params = agent.networks(state.learner)
    mean, log_std = float64((agent.actor.apply(params["actor"], rollout.obs[:-1]), params["log_std"]))
    values = float64(agent.critic.apply(params["critic"], rollout.obs))
    filters, rewards = shaping.normalize(
        state.return_filter, rollout.rewards, np.arange(DECISIONS)[:, None] + np.zeros(4) == DECISIONS - 1,
        np.ones((DECISIONS, 4), bool), args.gamma,
    )  # fmt: skip
    advantages = np.zeros((DECISIONS + 1, 4))
    for t in reversed(range(DECISIONS)):
        delta = rewards[t] + args.gamma * values[t + 1] - values[t]
        advantages[t] = delta + args.gamma * args.gae_lambda * advantages[t + 1]
    advantages = advantages[:-1]
    want = {
        "obs": rollout.obs[:-1], "actions": rollout.actions, "values": values[:-1], "returns": advantages + values[:-1],
        "advantages": (advantages - advantages.mean()) / advantages.std(),
        "log_probs": scipy.stats.norm.logpdf(rollout.actions, mean, np.exp(log_std)).sum(axis=-1),
    }  # fmt: skip
    specs = hn.Batch(*[devices.GAMES] * len(hn.Batch._fields))
    prepare = devices.spread([hn.STATE, devices.STEPS], (hn.STATE, specs, devices.SAME))(
        lambda args, *given: hn.prepare(args, agent, *given)
    )
    for n in (1, 2):
        moved, batch, metrics = jax.jit(prepare, static_argnums=0)(replace(args, num_devices=n), state, rollout)
        np.testing.assert_allclose(moved.return_filter.var, filters.var, rtol=1e-4)
        assert not moved.return_filter.discounted.any()  # each door's next episode begins at 0
        np.testing.assert_allclose(metrics["losses/action_std"], np.exp(log_std).mean(), rtol=1e-3)
        explained = 1 - advantages.var() / want["returns"].var()
        np.testing.assert_allclose(metrics["losses/explained_variance"], explained, rtol=1e-3, atol=1e-3)
        for name, x in want.items():
            # Each device has the decisions of its own doors.
            x = np.concatenate([part.reshape(-1, *x.shape[2:]) for part in np.split(x, n, axis=1)])
            np.testing.assert_allclose(getattr(batch, name), x, rtol=1e-3, atol=1e-3, err_msg=name)


# GRADIENTS THAT ARE NOT FINITE


def test_a_step_that_is_not_finite_is_skipped_and_counted():
    args, agent = make(**LEARN)
    update = partial(hn.update, args, agent, False)
    good, bad = random_rollout(args), random_rollout(args)
    bad.actions[5, 2] = 1e30  # its square overflows, in one of an epoch's four minibatches
    state, metrics = update(begun(args, agent), bad)
    assert metrics["charts/skipped_steps"] == 2
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state._replace(matrix=0)))
    assert all(np.isfinite(x) for x in metrics.values())
    nothing = good._replace(obs=np.full_like(good.obs, np.nan))
    before = jax.device_get(begun(args, agent))
    state, metrics = update(begun(args, agent), nothing)
    assert metrics["charts/skipped_in_a_row"] == metrics["charts/skipped_steps"] == 8
    state, metrics = update(state, nothing)
    assert metrics["charts/skipped_in_a_row"] == metrics["charts/skipped_steps"] == 16
    for x, y in zip(
        jax.tree.leaves((before.learner, before.opt_state)),
        jax.tree.leaves((state.learner, state.opt_state)),
        strict=True,
    ):
        np.testing.assert_array_equal(x, y)
    state, metrics = update(state, good)
    assert metrics["charts/skipped_steps"] == 16
    assert metrics["charts/skipped_in_a_row"] == 0
    early = random_rollout(args)
    early.actions[:32] = 1e30  # a quarter of the decisions: each minibatch has some of them
    assert update(begun(args, agent), early)[1]["charts/skipped_steps"] == 8


# TASK AFTER TASK


@pytest.mark.parametrize("keep_std", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_what_a_new_task_keeps(method, keep_std):
    args, agent = make(**LEARN | METHODS[method] | {"keep_std": keep_std})
    old = begun(args, agent)
    old = old._replace(return_filter=old.return_filter._replace(count=jnp.float32(5)))
    old = hn.keep_best(args, old, jnp.float32(0.5))
    worse = hn.keep_best(args, old._replace(learner=random_like(old.learner, 9)), jnp.float32(0.4))
    done = hn.end_task(args, agent, worse)
    new = hn.begin_task(args, agent, done)

    def same(a, b):
        return all((x == y).all() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))

    assert same(done.learner, old.learner)  # the best, not the last
    assert int(done.finished) == 1
    assert int(new.task) == 1
    assert same(new.opt_state, hn.make_optimizer(args).init(new.learner))
    assert same(new.best.learner, new.learner)
    assert float(new.best.success) == -1
    assert int(new.updates) == 0
    assert float(new.return_filter.count) == 0
    kept = {"ppo": set(), "finetune": {"actor", "critic"}}.get(args.method, {"hyper"})
    if args.method == "finetune" and args.keep_std:
        kept |= {"log_std"}
    for name in new.learner:
        assert same(new.learner[name], old.learner[name]) == (name in kept), name
    remembered = agent.unpack(done.targets[0])
    networks = jax.jit(agent.networks)(old.learner)
    for name, params in remembered.items():
        assert same(params, networks[name])
    learnt = {"actor", "critic"} if args.critic == "hyper" else {"actor"}
    assert set(remembered) == learnt | ({"log_std"} if keep_std else set())
    if not keep_std:
        assert not new.learner["log_std"].any()
    if args.method == "hnppo":
        assert same(done.embeddings[0], old.learner["embedding"])
        assert np.std(new.learner["embedding"]) > 0.1
        assert same(hn.policy_for(agent, new, 0)["actor"], networks["actor"])
        assert not same(hn.policy_for(agent, new, 1)["actor"], networks["actor"])
    if args.method == "hnppo":
        later = hn.begin_task(args, agent, new._replace(finished=jnp.int32(2)))
        assert not same(later.learner["embedding"], new.learner["embedding"])


def test_best_and_held():
    args, agent = make(**LEARN | {"stop_at_success": 0.9})
    state, held = begun(args, agent), []
    for i, success in enumerate((0.5, 0.95, 0.2, 0.9, 0.95, 0.9)):
        state = state._replace(learner=random_like(state.learner, i))
        state = hn.keep_best(args, state, jnp.float32(success))
        held.append(int(state.best.held))
    assert held == [0, 1, 0, 1, 2, 3]
    assert float(state.best.success) == np.float32(0.95)
    fifth = random_like(state.learner, 4)  # of two equally good ones the later
    assert all((x == y).all() for x, y in zip(jax.tree.leaves(state.best.learner), jax.tree.leaves(fifth), strict=True))
    keys = [devices.run_once(hn.initial_state, replace(args, seed=seed), agent).key for seed in (1, 2)]
    assert (keys[0] != keys[1]).any()


# METRICS

PUBLISHED = {  # ACC, FWT and REM, and half a digit of what is printed; the matrices are rounded too
    "HN-PPO": (0.810, 0.053, 0.998, 5e-4), "HN-PPO, fresh critic": (0.73, 0.04, 1.00, 6e-3),
    "HN-PPO, fresh critic, beta 0": (0.24, 0.03, 0.24, 6e-3), "fine-tuning": (0.20, 0.10, 0.47, 6e-3),
    "PPO for each task": (0.24, 0.10, 0.29, 6e-3),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_metrics_of_the_published_matrices(name):
    *want, digits = PUBLISHED[name]
    got = continual.metrics(matrices.published(doors.TASKS)[name])
    np.testing.assert_allclose([got["ACC"], got["FWT"], got["REM"]], want, atol=digits)
    assert got["BWT+"] == 0


def test_what_was_not_measured_is_not_zero(tmp_path):
    matrix = np.array([[0.8, np.nan, 0.2], [0.9, 0.6, 0.4], [0.9, 0.6, 0.5]])
    assert continual.metrics(matrix)["FWT"] == pytest.approx(0.3)
    assert set(continual.metrics(np.array([[0.8, np.nan], [0.9, 0.6]]))) == {"ACC", "BWT", "BWT+", "REM"}
    continual.write_csv(tmp_path / "matrix.csv", matrix, ("a", "b", "c"))
    assert (tmp_path / "matrix.csv").read_text().splitlines()[:2] == ["after,a,b,c", "a,0.8000,,0.2000"]
    assert continual.draw(matrix, ("a", "b", "c")).std() > 20
    assert list(continual.table_of(matrix[:2], ("a", "b", "c")).columns[1].cells) == ["0.80", "0.90"]
    logged = {}
    run = SimpleNamespace(
        log=lambda step, line: logged.update(line), path=tmp_path, save_picture=lambda *_: None, show=lambda *_: None
    )
    continual.report(run, 1, matrix[1:], ("a", "b", "c"), title="", note="")  # two of three tasks so far
    assert logged["eval/ACC"] == pytest.approx(2.4 / 3)


def test_metrics_by_hand():
    got = continual.metrics(np.array([[0.8, 0.1], [0.9, 0.6]]))
    want = {"ACC": 2.3 / 3, "FWT": 0.1, "BWT": 0.1, "BWT+": 0.1, "REM": 1.0}
    assert got == pytest.approx(want)
    assert continual.metrics(np.array([[0.7]])) == {"ACC": 0.7, "FWT": 0, "BWT": 0, "BWT+": 0, "REM": 1}


def test_inside_a_task_evaluate_plays_its_best_parameters(monkeypatch):
    args, agent = make(**LEARN)
    state = begun(args, agent)
    for success, old in ((-1.0, False), (0.5, True)):  # -1: not evaluated yet
        best = state.best._replace(learner=random_like(state.learner, 9), success=jnp.float32(success))
        inside = state._replace(best=best)
        monkeypatch.setattr(hn.agents, "load", lambda run_dir, initial, part, saved=inside: part(saved))
        want = jax.jit(agent.networks)(best.learner if old else state.learner)["actor"]
        got = hn.trained(args, agent, "")["actor"]
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x[0], y, rtol=1e-5, atol=1e-6), got, want)
    args, agent = make(method="ppo")
    state = begun(args, agent, tasks=2)
    monkeypatch.setattr(hn.agents, "load", lambda run_dir, initial, part: part(state))
    got = hn.trained(args, agent, "")["actor"]
    for i, want in enumerate((agent.unpack(state.targets[0])["actor"], state.learner["actor"])):
        jax.tree.map(lambda x, y, i=i: np.testing.assert_array_equal(x[i], y), got, want)
