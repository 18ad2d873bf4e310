"""Hypernetwork PPO against float64 NumPy and what can be computed by hand."""

from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import conftest
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from rollouts import normal

import doorgym
import hnppo_doorgym as hn
from common import agents, continual, devices, doors, envs, runs
from common.devices import ENV_SHARDED, REPLICATED, TIME_ENV_SHARDED
from common.doors import DECISIONS, Rollout
from common.rewards import normalize_rewards
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


@cache
def make_cached(**flags):
    args = hn.Args(**flags)
    agent = hn.make_agent(args)
    return args, agent, hn.make_jitted(args, agent, devices.make_mesh(args))


def make(**flags):
    """Args, Agent and Jitted; the same flags share what is compiled."""
    return make_cached(**TINY | flags)


def random_like(tree, seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(scale * rng.normal(size=x.shape), jnp.float32), tree)


def random_rollout(args, seed=0):
    rng = np.random.default_rng(seed)
    shape, (obs, actions) = (DECISIONS, args.num_envs), doorgym.vector.sizes(args.robot)
    return Rollout(normal(rng, DECISIONS + 1, args.num_envs, obs), normal(rng, *shape, actions), normal(rng, *shape))


def random_batch(args, seed):
    rng = np.random.default_rng(seed)
    obs, actions = doorgym.vector.sizes(args.robot)
    log_prob = -6 + normal(rng, 9)
    return hn.Batch(normal(rng, 9, obs), normal(rng, 9, actions), log_prob, *(normal(rng, 9) for _ in range(3)))


def random_learner(agent, seed=1):
    """Parameters that are all different, without computing how they would start."""
    return random_like(jax.eval_shape(agent.init, jax.random.PRNGKey(0)), seed, 0.3)


def first_task(args, agent, jitted):
    return jitted.begin_task(conftest.init_state(hn, args, agent))


def next_task(jitted, state):
    return jitted.begin_task(jitted.end_task(state))


def middle_of_task(args, agent, jitted, tasks=1):
    """The state in the middle of the `tasks`-th task, with random parameters and optimiser."""
    state = first_task(args, agent, jitted)
    for _ in range(tasks - 1):
        state = next_task(jitted, state)

    def moments(adam):
        nu = jax.tree.map(lambda x: x**2, random_like(adam.nu, 3, 1e-3))
        return adam._replace(count=jnp.int32(3), mu=random_like(adam.mu, 2, 1e-3), nu=nu)

    def is_adam(x):
        return isinstance(x, optax.ScaleByAdamState)

    opt_state = jax.tree.map(lambda x: moments(x) if is_adam(x) else x, state.opt_state, is_leaf=is_adam)
    return state._replace(learner=random_learner(agent), opt_state=opt_state)


def adam_of(state, name):
    """Adam's state for one part of the learner."""
    (adam,) = (x for x in state.opt_state.inner_states[name].inner_state if isinstance(x, optax.ScaleByAdamState))
    return adam


def copy(state):
    """`update` donates its state."""
    return jax.tree.map(jnp.copy, state)


def float64(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def assert_close(got, expected, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), got, expected)


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


def test_hypernetwork_forward_equals_numpy():
    _, agent, _ = make()
    learner = random_learner(agent)
    assert agent.size == 15 * 5 + 5 + 5 * 5 + 5 + 5 * 6 + 6
    assert make(keep_std=True)[1].size == agent.size + 6
    assert make(num_layers=1)[1].size == agent.size - 5 * 5 - 5
    out = forward(float64(learner["hyper"]), np.float64(learner["embedding"])[None])[2][0]
    params = agent.networks(learner)
    ordinary = {"critic": learner["critic"], "log_std": learner["log_std"]}
    assert_close(params, ordinary | agent.unpack(jnp.float32(out)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(agent.pack(params), out, rtol=1e-4, atol=1e-5)


def test_chunked_hypernetwork_forward_equals_numpy():
    _, agent, _ = make(chunked=True, hidden=30, critic="hyper")
    learner = random_learner(agent)
    hyper, embedding = float64(learner["hyper"]), np.float64(learner["embedding"])
    chunks = hyper["params"]["chunks"]
    assert chunks.shape == (-(-agent.size // 1000), 5)
    assert agent.size > 2000
    out = [forward(hyper, np.concatenate([embedding, chunk])[None])[2][0] for chunk in chunks]
    batch = jnp.stack([0 * learner["embedding"], learner["embedding"]])
    for got in (agent.hyper.apply(learner["hyper"], batch[1]), agent.hyper.apply(learner["hyper"], batch)[1]):
        np.testing.assert_allclose(got, np.concatenate(out)[: agent.size], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("critic", "size", "weights"), [("fresh", 5580, 3_992_780), ("hyper", 10829, 7_357_389)])
def test_hypernetwork_has_its_published_size(critic, size, weights):
    args = hn.Args(critic=critic, keep_std=True)
    state = jax.eval_shape(partial(hn.init_state, args, hn.make_agent(args)))
    assert state.targets.shape == (6, size)
    assert sum(x.size for x in jax.tree.leaves(state.learner["hyper"])) == weights


def test_new_networks_start_as_published():
    """The hypernetwork as PyTorch's linear layers, policy and value orthogonal."""
    key = jax.random.PRNGKey(0)
    for weights, biases in layers(make(hyper_width=100)[1].hyper.init(key, jnp.zeros(8))):
        bound = 1 / np.sqrt(len(weights))
        for x in (weights, biases):
            assert 0.95 * bound < np.abs(x).max() <= bound
            assert abs(np.mean(x)) < 0.2 * bound
    chunked = make(chunked=True, critic="hyper", hidden=30)[1].hyper.init(key, jnp.zeros(3))
    assert np.std(chunked["params"]["chunks"]) > 0.5
    kernel = make(method="ppo", hidden=16)[1].init_networks(key)["actor"]["params"]["Dense_1"]["kernel"]
    np.testing.assert_allclose(kernel.T @ kernel, 2 * np.eye(16), atol=1e-4)


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
def test_penalty_gradient_looks_a_step_ahead_and_is_not_clipped(max_grad_norm):
    args, agent, _ = make(max_grad_norm=max_grad_norm, beta=0.3, hyper_learning_rate=0.02)
    state = middle_of_task(*make(), tasks=3)
    state = state._replace(embeddings=random_like(state.embeddings, 4), targets=random_like(state.targets, 5))
    (plain, _), (both, terms) = (
        jax.jit(partial(hn.minibatch_gradient, args, agent, with_penalty=x))(state, random_batch(args, 7))
        for x in (False, True)
    )
    clipped = max_grad_norm == 1e-4
    np.testing.assert_allclose(optax.tree.norm(plain), 1e-4 if clipped else terms["grad_norm"], rtol=1e-3)
    assert float(terms["grad_norm"]) > 1e-4

    # Adam's next step with the task's gradient only, from its moments after three steps.
    def ahead(theta, g, mu, nu):
        mu, nu = 0.9 * mu + 0.1 * g, 0.999 * nu + 0.001 * g**2
        return theta - 0.02 * (mu / (1 - 0.9**4)) / (np.sqrt(nu / (1 - 0.999**4)) + args.adam_eps)

    adam = adam_of(state, "hyper")
    trees = state.learner["hyper"], plain["hyper"], adam.mu["hyper"], adam.nu["hyper"]
    theta = jax.tree.map(ahead, *map(float64, trees))
    embeddings, targets = np.float64(state.embeddings)[:2], np.float64(state.targets)[:2]
    distance = ((forward(theta, embeddings)[2] - targets) ** 2).sum() / 2
    np.testing.assert_allclose(terms["penalty"], distance, rtol=1e-4)

    def assert_added(both, plain, gradient):
        expected = 0.3 * gradient
        np.testing.assert_allclose(both - plain, expected, rtol=2e-3, atol=2e-3 * np.abs(expected).max())

    expected = penalty_gradient(theta, embeddings, targets)
    jax.tree.map(assert_added, layers(both["hyper"]), layers(plain["hyper"]), expected)
    assert same(both | {"hyper": 0}, plain | {"hyper": 0})


def test_penalty_over_ten_updates_keeps_the_first_tasks_policy():
    args, agent, jitted = make(**LEARN)
    changes = []
    for update in (jitted.update, jitted.update_with_penalty):
        state = next_task(jitted, first_task(args, agent, jitted))
        embedding, before = np.array(state.embeddings[0]), jitted.policy_params(state, 0)["actor"]
        for i in range(10):
            state, _ = update(state, random_rollout(args, i))
        np.testing.assert_array_equal(state.embeddings[0], embedding)
        after = jitted.policy_params(state, 0)["actor"]
        changes.append(optax.tree.norm(jax.tree.map(jnp.subtract, before, after)))
    assert 0 < changes[1] < 0.2 * changes[0]


# PPO


@pytest.mark.parametrize("method", ["hnppo", "ppo"])
@pytest.mark.parametrize("clip_coef", [0.2, 0.05])
def test_loss_of_each_sample_equals_numpy(method, clip_coef):
    args, agent, _ = make(method=method, clip_coef=clip_coef, ent_coef=0.03, vf_coef=0.7)
    learner, batch = random_learner(agent), random_batch(args, 3)
    params, b = float64(agent.networks(learner)), float64(batch)
    got = jax.jit(partial(hn.loss, args, agent))(learner, batch)

    def mlp(net, x):
        net = net["params"]
        for i in range(2):
            x = np.tanh(x @ net[f"Dense_{i}"]["kernel"] + net[f"Dense_{i}"]["bias"])
        return x @ net["Dense_2"]["kernel"] + net["Dense_2"]["bias"]

    std = np.exp(params["log_std"])
    entropy = (params["log_std"] + 0.5 * np.log(2 * np.pi * np.e)).sum()
    for i in range(len(b.obs)):
        mean, value = mlp(params["actor"], b.obs[i]), mlp(params["critic"], b.obs[i])[0]
        density = np.prod(np.exp(-((b.actions[i] - mean) ** 2) / 2 / std**2) / std / 2.5066283)
        ratio = density / np.exp(b.log_prob[i])
        policy = -min(ratio * b.advantages[i], np.clip(ratio, 1 - clip_coef, 1 + clip_coef) * b.advantages[i])
        value_clipped = b.values[i] + np.clip(value - b.values[i], -clip_coef, clip_coef)
        value_loss = 0.5 * max((value_clipped - b.returns[i]) ** 2, (value - b.returns[i]) ** 2)
        expected = {
            "policy_loss": policy, "value_loss": value_loss, "entropy": entropy,
            "loss": policy + 0.7 * value_loss - 0.03 * entropy, "approx_kl": ratio - 1 - np.log(ratio),
            "clipfrac": float(abs(ratio - 1) > clip_coef),
        }  # fmt: skip
        assert_close({name: x[i] for name, x in got.items()}, expected, rtol=1e-3, atol=1e-4)


jitted_gae = jax.jit(hn.gae)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 1), st.floats(0, 1))
def test_gae_equals_the_double_sum(seed, gamma, gae_lambda):
    rng = np.random.default_rng(seed)
    rewards, values, no = normal(rng, 12), normal(rng, 13), np.zeros(12, bool)
    got = jitted_gae(rewards, values, gamma=gamma, gae_lambda=gae_lambda)
    np.testing.assert_allclose(got, oracle.gae(rewards, values, no, no, gamma, gae_lambda), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_advantages_and_densities_of_a_rollout_equal_numpy(num_devices):
    args, agent, jitted = make()
    state, rollout = middle_of_task(args, agent, jitted), random_rollout(args)
    params = agent.networks(state.learner)
    mean, log_std = float64((agent.actor.apply(params["actor"], rollout.obs[:-1]), params["log_std"]))
    values = float64(agent.critic.apply(params["critic"], rollout.obs))[..., 0]
    last = np.arange(DECISIONS)[:, None] + np.zeros(4) == DECISIONS - 1
    mask = np.ones_like(last)
    return_filter, rewards = normalize_rewards(state.return_filter, rollout.rewards, last, mask, args.gamma)
    no = np.zeros(DECISIONS, bool)
    columns = [oracle.gae(r, values[:, i], no, no, args.gamma, args.gae_lambda) for i, r in enumerate(rewards.T)]
    advantages = np.stack(columns, axis=1)
    returns = advantages + values[:-1]
    expected = hn.Batch(
        obs=rollout.obs[:-1], actions=rollout.actions, values=values[:-1], returns=returns,
        advantages=(advantages - advantages.mean()) / advantages.std(),
        log_prob=scipy.stats.norm.logpdf(rollout.actions, mean, np.exp(log_std)).sum(axis=-1),
    )  # fmt: skip
    compute = jax.shard_map(
        partial(hn.compute_advantages, args, agent),
        mesh=devices.make_mesh(replace(args, num_devices=num_devices)),
        in_specs=(hn.STATE_SPECS, TIME_ENV_SHARDED),
        out_specs=(hn.STATE_SPECS, ENV_SHARDED, REPLICATED),
        check_vma=False,
    )
    after, batch, metrics = jax.jit(compute)(state, rollout)
    np.testing.assert_allclose(after.return_filter.var, return_filter.var, rtol=1e-4)
    assert not after.return_filter.discounted.any()  # each door's next episode begins at 0
    np.testing.assert_allclose(metrics["losses/action_std"], np.exp(log_std).mean(), rtol=1e-3)
    explained = 1 - advantages.var() / returns.var()
    np.testing.assert_allclose(metrics["losses/explained_variance"], explained, rtol=1e-3, atol=1e-3)

    def by_device(x):  # each has the decisions of its own doors
        return np.concatenate([part.reshape(-1, *x.shape[2:]) for part in np.split(x, num_devices, axis=1)])

    assert_close(batch, jax.tree.map(by_device, expected), rtol=1e-3, atol=1e-3)


HYPER_RATES = {"hyper": 0.001, "embedding": 0.001, "critic": 0.02, "log_std": 0.02}
RATES = {"actor": 0.02, "critic": 0.02, "log_std": 0.02}


@pytest.mark.parametrize(("method", "rates"), [("hnppo", HYPER_RATES), ("ppo", RATES)])
def test_update_moves_each_part_by_its_learning_rate(method, rates):
    """Adam's first step is as long as the learning rate, for every number; an update's eight are about as long."""
    args, agent, jitted = make(**LEARN | {"method": method})
    tx, before = hn.make_optimizer(args), middle_of_task(args, agent, jitted)
    before = before._replace(opt_state=tx.init(before.learner))
    step, _ = tx.update(before.learner, before.opt_state)
    after, _ = jitted.update(copy(before), random_rollout(args))
    assert (after.key != before.key).any()  # the next update's minibatches are other ones
    for name, rate in rates.items():
        steps = np.concatenate([np.abs(x).ravel() for x in jax.tree.leaves(step[name])])
        np.testing.assert_allclose(np.median(steps), rate, rtol=1e-2)
        change = jax.tree.map(jnp.subtract, before.learner[name], after.learner[name])
        assert 0.5 * rate < max(np.abs(x).max() for x in jax.tree.leaves(change)) < 12 * rate, name
        assert adam_of(after, name).count == 8  # its moments go from update to update


@pytest.mark.parametrize("method", ["hnppo", "all generated", pytest.param("ppo", marks=pytest.mark.slow)])
def test_sixty_updates_learn_which_action_is_rewarded(method):
    """Rewards for actions near one that depends on the observation's sign: the mean action finds it."""
    args, agent, jitted = make(**LEARN | METHODS[method] | ({"learning_rate": 0.01} if method == "ppo" else {}))
    state, key = first_task(args, agent, jitted), jax.random.PRNGKey(0)
    best = np.array([0.8, -0.8, 0.4, 0.0, 0.4, -0.4])

    def distance(actions, obs):
        return ((actions - best * np.sign(obs[..., :1])) ** 2).sum(axis=-1)

    for i in range(60):
        obs = random_rollout(args, i).obs
        params = jitted.policy_params(state, 0)
        noise = jax.random.normal(jax.random.fold_in(key, i), (*obs[:-1].shape[:-1], 6))
        actions = np.asarray(jitted.act(params, obs[:-1], noise))
        state, _ = jitted.update(state, Rollout(obs, actions, -np.float32(distance(actions, obs[:-1]))))
    assert distance(np.asarray(jitted.act(params, obs)), obs).mean() < 0.5 * distance(np.zeros(6), obs).mean()


def test_gradient_that_is_not_finite_is_skipped_and_counted():
    args, agent, jitted = make(**LEARN)
    state, good = middle_of_task(args, agent, jitted), random_rollout(args)

    def corrupt(index):
        actions = good.actions.copy()
        actions[index] = 1e30  # its square overflows
        return good._replace(actions=actions)

    def skipped(metrics):
        return int(metrics["charts/skipped_steps"]), int(metrics["charts/skipped_in_a_row"])

    after, metrics = jitted.update(copy(state), corrupt((5, 2)))  # in one of an epoch's four minibatches
    assert skipped(metrics)[0] == 2
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((after._replace(matrix=0), metrics)))
    assert skipped(jitted.update(copy(state), corrupt(slice(32)))[1])[0] == 8  # each minibatch has some of a quarter
    after = copy(state)
    for total in (8, 16):
        after, metrics = jitted.update(after, good._replace(obs=np.full_like(good.obs, np.nan)))
        assert skipped(metrics) == (total, total)
    assert same((after.learner, after.opt_state), (state.learner, state.opt_state))
    assert skipped(jitted.update(after, good)[1]) == (16, 0)


def test_loss_term_that_is_nan_is_logged_though_the_gradient_is_finite(monkeypatch):
    """And fields of other lengths are refused, which JAX would read beyond their end."""
    args, agent, jitted = make(num_minibatches=3)
    loss, batch = hn.loss, random_batch(args, 0)
    monkeypatch.setattr(hn, "loss", lambda *given: (terms := loss(*given)) | {"odd": 0 * terms["loss"] / 0})
    optimize = jax.jit(partial(hn.optimize, args, agent, with_penalty=False))
    metrics = optimize(middle_of_task(args, agent, jitted), batch)[1]
    assert np.isnan(metrics["losses/odd"])
    assert np.isfinite(metrics["losses/loss"])
    assert metrics["charts/skipped_steps"] == 0
    with pytest.raises(AssertionError, match="prefix"):
        optimize(None, batch._replace(values=batch.values[:3]))


# EPISODES


def test_played_rollout_ends_with_the_episodes_last_observation():
    """`play`, in a second episode too, against steps by hand of doors whose next episode begins by itself."""
    args = hn.Args()
    actions = normal(np.random.default_rng(0), DECISIONS, 4, 6)
    with closing(doors.make_doors(args, "Pull-Right-Pull", 4, seed=1, num_worlds=3)) as env:
        doors.play(env, lambda obs, t: actions[-t], 3)
        rollout, outcomes = doors.play(env, lambda obs, t: actions[t], 7)
    options = {"action_repeat": doors.ACTION_REPEAT, "max_episode_steps": doors.ACTION_REPEAT * DECISIONS}
    with closing(doorgym.make_vec("Pull-Right-Pull", 4, 1, num_worlds=3, **options)) as env:
        obs, rewards = [env.reset(seed=7)[0]], []
        for t in range(DECISIONS):
            new, reward, _, truncated, info = env.step(actions[t])
            assert truncated.all() == (t == DECISIONS - 1)
            obs.append(new)
            rewards.append(reward)
    assert (info["final_obs"] != obs[-1]).all()
    assert same(rollout, Rollout(np.stack([*obs[:-1], info["final_obs"]]), actions, np.float32(rewards)))
    final = info["final_info"]
    expected = rollout.rewards.sum(axis=0), final["success"], final["freed"], final["max_knob_angle"]
    assert same(outcomes, doors.Outcomes(*expected))
    means = doors.Outcomes(np.zeros(4), np.arange(4) < 1, np.arange(4) < 2, np.full(4, 0.9)).means("a/")
    assert means == pytest.approx({"a/success_rate": 0.25, "a/freed_rate": 0.5, "a/max_knob_angle": 0.9})


def test_collected_actions_are_the_mean_plus_each_updates_own_noise():
    args, agent, jitted = make(num_envs=1, num_minibatches=1)
    state = middle_of_task(args, agent, jitted)
    states = state, state, state._replace(updates=jnp.int32(1)), state._replace(task=jnp.int32(1))
    params = agent.networks(state.learner)
    assert np.ptp(params["log_std"]) > 0.01
    with closing(doors.make_doors(args, "Pull-Right-Pull", 1, seed=1, num_worlds=1)) as env:
        rollouts = [hn.collect(args, jitted, env, state, runs.Stopwatch())[0] for state in states]
    noises = []
    for state, rollout in zip(states, rollouts, strict=True):
        key = jax.random.PRNGKey(envs.derive_seed(args.seed, 1 + int(state.task), 1 + int(state.updates)))
        noises.append(jitted.colored_noise(key))
        deviations = (rollout.actions - jitted.act(params, rollout.obs[:-1])) / np.exp(params["log_std"])
        np.testing.assert_allclose(deviations, noises[-1], rtol=1e-3, atol=2e-4)
    first, again, *others = rollouts
    assert same(first, again)
    assert all((first.obs[0] != other.obs[0]).any() for other in others)
    assert all(np.abs(noises[0] - noise).max() > 0.1 for noise in noises[2:])


@pytest.mark.parametrize("color", [0, 0.5, 1, 2])
def test_noise_has_its_color_and_variance_one(color):
    noise = np.asarray(hn.colored_noise(hn.Args(num_envs=200, noise_color=color), 5, jax.random.PRNGKey(0)), np.float64)
    assert noise.shape == (DECISIONS, 200, 5)
    np.testing.assert_allclose((noise**2).mean(axis=(1, 2)), 1, atol=0.2)  # at every decision
    np.testing.assert_allclose(noise.std(), 1, atol=0.05)
    power = (np.abs(np.fft.rfft(noise, axis=0)) ** 2).mean(axis=(1, 2))[1:-1]
    slope, _ = np.polyfit(np.log(np.arange(len(power)) + 1), np.log(power), 1)
    assert slope == pytest.approx(-color, abs=0.05)
    assert scipy.stats.kstest(noise[::64].ravel(), "norm").pvalue > 1e-3


def test_evaluation_plays_as_many_doors_as_asked_for_which_its_seed_draws(monkeypatch):
    def start(env, policy, seed, film):
        obs, _ = env.reset(seed=seed)
        return None, (env._world.tolist(), env.worlds[0].shape, obs[:, :6])

    monkeypatch.setattr(doors, "play", start)
    evaluate = partial(doors.evaluate, hn.Args(), None, "Pull-Right-Pull")
    assert sorted(evaluate(episodes=20, seed=3)[0]) == list(range(20))
    (_, shape, obs), (_, other_shape, other_obs) = (evaluate(episodes=2, seed=seed) for seed in (3, 4))
    assert shape != other_shape
    assert (obs != other_obs).all()


# TASK AFTER TASK


@pytest.mark.parametrize("keep_std", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_next_task_keeps_the_best_hypernetwork_or_networks_only(method, keep_std):
    args, agent, jitted = make(**LEARN | METHODS[method] | {"keep_std": keep_std})
    old = middle_of_task(args, agent, jitted)
    old = old._replace(return_filter=old.return_filter._replace(count=jnp.float32(5)))
    old = jitted.keep_best(old, jnp.float32(0.5))
    worse = jitted.keep_best(old._replace(learner=random_like(old.learner, 9)), jnp.float32(0.4))
    done = jitted.end_task(worse)
    new = jitted.begin_task(done)
    assert same(done.learner, old.learner)  # the best, not the last
    assert (int(done.finished), int(new.task), int(new.updates)) == (1, 1, 0)
    assert same(new.opt_state, hn.make_optimizer(args).init(new.learner))
    assert same(new.best, hn.Best(new.learner, np.float32(-1), 0))
    assert float(new.return_filter.count) == 0
    kept = {"ppo": set(), "finetune": {"actor", "critic"}}.get(args.method, {"hyper"})
    if args.method == "finetune" and keep_std:
        kept |= {"log_std"}
    assert {name for name in new.learner if same(new.learner[name], old.learner[name])} == kept
    assert keep_std or not new.learner["log_std"].any()
    targets, networks = agent.unpack(done.targets[0]), jax.jit(agent.networks)(old.learner)
    stored = {"actor"} | ({"critic"} if args.critic == "hyper" else set()) | ({"log_std"} if keep_std else set())
    assert set(targets) == stored
    assert same(targets, {name: networks[name] for name in stored})
    if args.method == "hnppo":
        assert same(done.embeddings[0], old.learner["embedding"])
        assert np.std(new.learner["embedding"]) > 0.1
        assert same(jitted.policy_params(new, 0)["actor"], networks["actor"])
        assert not same(jitted.policy_params(new, 1)["actor"], networks["actor"])
        assert not same(next_task(jitted, new).learner["embedding"], new.learner["embedding"])


def test_best_parameters_are_the_latest_of_equally_good_ones():
    args, agent, jitted = make(**LEARN | {"stop_at_success": 0.9})
    state, good_evals = middle_of_task(args, agent, jitted), []
    for i, success in enumerate((0.5, 0.95, 0.2, 0.9, 0.95, 0.9)):
        state = jitted.keep_best(state._replace(learner=random_like(state.learner, i)), jnp.float32(success))
        good_evals.append(int(state.best.good_evals))
    assert good_evals == [0, 1, 0, 1, 2, 3]
    assert float(state.best.success) == np.float32(0.95)
    fifth = random_like(state.learner, 4)
    assert same(state.best.learner, fifth)
    assert same(jitted.end_task(state).learner, fifth)


def test_matrix_row_is_of_each_tasks_own_policy(monkeypatch):
    args, agent, jitted = make()
    state = first_task(args, agent, jitted)
    embeddings = normal(np.random.default_rng(0), *state.embeddings.shape)
    state = state._replace(task=jnp.int32(1), finished=jnp.int32(2), embeddings=embeddings)
    obs, actions, reported = normal(np.random.default_rng(1), 3, 15), [], []

    def evaluate(args, policy, task, **how):
        actions.append(policy(obs, 0))
        return doors.Outcomes(np.zeros(8), np.arange(8) < len(actions), np.zeros(8), np.zeros(8))

    monkeypatch.setattr(doors, "evaluate", evaluate)
    monkeypatch.setattr(continual, "report", lambda run, step, matrix, names, **how: reported.append(matrix))
    matrix = hn.finish_task(args, jitted._replace(end_task=lambda state: state), None, state).matrix
    np.testing.assert_array_equal(reported[0], [[np.nan, np.nan], [1 / 8, 2 / 8]])  # the first task's was not measured
    np.testing.assert_array_equal(np.asarray(matrix)[:2, :2], reported[0])
    for i in range(2):
        np.testing.assert_allclose(actions[i], jitted.act(jitted.policy_params(state, i), obs), rtol=1e-5, atol=1e-6)
    assert np.abs(actions[0] - actions[1]).max() > 1e-3


def test_loaded_policies_of_an_unfinished_task_are_its_best(monkeypatch):
    args, agent, jitted = make(**LEARN)
    state = middle_of_task(args, agent, jitted)
    best = random_like(state.learner, 9)
    for success, learner in ((-1.0, state.learner), (0.5, best)):  # -1: not evaluated yet
        saved = state._replace(best=state.best._replace(learner=best, success=jnp.float32(success)))
        monkeypatch.setattr(agents, "load", lambda run_dir, init, select, saved=saved: select(saved))
        actors = hn.load_params(args, agent, "")["actor"]
        expected = jax.jit(agent.networks)(learner)["actor"]
        assert_close(jax.tree.map(lambda x: x[0], actors), expected, rtol=1e-5, atol=1e-6)
    args, agent, jitted = make(method="ppo")
    state = middle_of_task(args, agent, jitted, tasks=2)
    monkeypatch.setattr(agents, "load", lambda run_dir, init, select: select(state))
    actors = hn.load_params(args, agent, "")["actor"]
    expected = agent.unpack(state.targets[0])["actor"], state.learner["actor"]
    assert same(actors, jax.tree.map(lambda *x: jnp.stack(x), *expected))


# METRICS OF THE MATRIX

PUBLISHED = {  # ACC, FWT and REM, and half a digit of what is printed; the matrices are rounded too
    "HN-PPO": (0.810, 0.053, 0.998, 5e-4), "HN-PPO, fresh critic": (0.73, 0.04, 1.00, 6e-3),
    "HN-PPO, fresh critic, beta 0": (0.24, 0.03, 0.24, 6e-3), "fine-tuning": (0.20, 0.10, 0.47, 6e-3),
    "PPO for each task": (0.24, 0.10, 0.29, 6e-3),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_metrics_of_a_published_matrix_are_the_published_ones(name):
    *expected, tolerance = PUBLISHED[name]
    got = continual.metrics(matrices.published(doors.TASKS)[name])
    np.testing.assert_allclose([got["ACC"], got["FWT"], got["REM"]], expected, atol=tolerance)
    assert got["BWT+"] == 0


def test_metrics_of_small_matrices_are_those_by_hand():
    expected = {"ACC": 2.3 / 3, "FWT": 0.1, "BWT": 0.1, "BWT+": 0.1, "REM": 1.0}
    assert continual.metrics(np.array([[0.8, 0.1], [0.9, 0.6]])) == pytest.approx(expected)
    assert continual.metrics(np.array([[0.7]])) == {"ACC": 0.7, "FWT": 0, "BWT": 0, "BWT+": 0, "REM": 1}


def test_entries_that_were_not_measured_are_not_zero(tmp_path):
    names, matrix = ("a", "b", "c"), np.array([[0.8, np.nan, 0.2], [0.9, 0.6, 0.4], [0.9, 0.6, 0.5]])
    assert continual.metrics(matrix)["FWT"] == pytest.approx(0.3)
    assert "FWT" not in continual.metrics(np.array([[0.8, np.nan], [0.9, 0.6]]))
    continual.write_csv(tmp_path / "matrix.csv", matrix, names)
    assert (tmp_path / "matrix.csv").read_text().splitlines()[:2] == ["after,a,b,c", "a,0.8000,,0.2000"]
    assert continual.draw(matrix, names).std() > 20
    assert list(continual.table_of(matrix[:2], names).columns[1].cells) == ["0.80", "0.90"]
    logged, ignore = {}, lambda *_: None
    run = SimpleNamespace(log=lambda step, line: logged.update(line), path=tmp_path, save_picture=ignore, print=ignore)
    continual.report(run, 1, matrix[1:], names, title="", note="")  # two of three tasks so far
    assert logged["eval/ACC"] == pytest.approx(2.4 / 3)
