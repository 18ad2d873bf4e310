"""Hypernetwork PPO against float64 NumPy, rlax and what can be done by hand."""

from contextlib import closing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rlax
from hypothesis import given, settings
from hypothesis import strategies as st

import hnppo_doorgym as hn
from common import continual

TINY = {
    "tasks": "0,1", "hidden": 5, "hyper_width": 7, "task_embedding_dim": 3, "num_envs": 4, "num_minibatches": 4,
    "update_epochs": 2,
}  # fmt: skip


def make_args(**flags):
    return hn.Args(**TINY | flags)


def random_like(tree, seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(scale * rng.normal(size=x.shape), jnp.float32), tree)


def random_rollout(args, seed=0):
    rng = np.random.default_rng(seed)
    shape, (obs, actions) = (hn.DECISIONS, args.num_envs), hn.sizes(args)
    draw = lambda *size: rng.normal(size=size).astype(np.float32)  # noqa: E731
    return hn.Rollout(draw(shape[0] + 1, shape[1], obs), draw(*shape, actions), draw(*shape))


def begun(args, tasks=1):
    """The state in the middle of the `tasks`-th task, with random parameters and optimiser."""
    state = hn.begin_task(args, hn.initial_state(args))
    for _ in range(tasks - 1):
        state = hn.begin_task(args, hn.end_task(args, state))
    learner = random_like(state.learner, 1, 0.3)
    moments = state.opt_state._replace(
        count=jnp.int32(3),
        mu=random_like(learner, 2, 1e-3),
        nu=jax.tree.map(lambda x: x**2, random_like(learner, 3, 1e-3)),
    )
    return state._replace(learner=learner, opt_state=moments)


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
    args = make_args()
    state = begun(args)
    size, unravel = hn.generated(args)
    assert size == 15 * 5 + 5 + 5 * 5 + 5 + 5 * 6 + 6 + 6
    out = forward(float64(state.learner["hyper"]), np.float64(state.learner["embedding"])[None])[2][0]
    params = hn.networks(args, state.learner)
    for x, y in zip(
        jax.tree.leaves(unravel(jnp.float32(out))), jax.tree.leaves({"actor": params["actor"]}), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    assert params["critic"] is state.learner["critic"]


def test_chunked_hypernetwork_by_hand():
    args = make_args(chunked=True, hidden=30, critic="hyper")
    state = begun(args)
    hyper, size = float64(state.learner["hyper"]), hn.generated(args)[0]
    names = hyper["params"]["chunks"]
    assert names.shape == (-(-size // 1000), 5)
    assert size > 2000
    embedding = np.float64(state.learner["embedding"])
    parts = [forward(hyper, np.concatenate([embedding, name])[None])[2][0] for name in names]
    got = hn.make_hyper(args).apply(state.learner["hyper"], state.learner["embedding"])
    np.testing.assert_allclose(got, np.concatenate(parts)[:size], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("critic", "size", "weights"), [("fresh", 5580, 3_992_780), ("hyper", 10829, 7_357_389)])
def test_published_sizes(critic, size, weights):
    args = hn.Args(critic=critic)
    state = jax.eval_shape(lambda: hn.initial_state(args))
    assert state.targets.shape == (6, size)
    assert sum(x.size for x in jax.tree.leaves(state.learner["hyper"])) == weights


def test_hypernetwork_starts_as_in_pytorch():
    state = hn.initial_state(hn.Args())
    for weights, biases in layers(state.learner["hyper"]):
        bound = 1 / np.sqrt(len(weights))
        for x in (weights, biases):
            assert 0.95 * bound < np.abs(x).max() <= bound
            assert abs(np.mean(x)) < 0.1 * bound


# THE PENALTY


def penalty_gradient(hyper, embeddings, targets):
    """Of 1/T sum_j |h(e_j) - W_j|^2 with respect to each layer, in float64, by the chain rule."""
    one, two, out = forward(hyper, embeddings)
    (_, _), (w2, _), (w3, _) = layers(hyper)
    d3 = 2 * (out - targets) / len(embeddings)
    d2 = (d3 @ w3.T) * (two > 0)
    d1 = (d2 @ w2.T) * (one > 0)
    return [(embeddings.T @ d1, d1.sum(0)), (one.T @ d2, d2.sum(0)), (two.T @ d3, d3.sum(0))]


@pytest.mark.parametrize("max_grad_norm", [1e-4, 0.01, 0.0])
def test_penalty_looks_a_step_ahead_and_is_not_clipped(max_grad_norm):
    args = make_args(max_grad_norm=max_grad_norm, beta=0.3, hyper_learning_rate=0.02, tasks="0,1,2")
    state = begun(args, tasks=3)
    state = state._replace(embeddings=random_like(state.embeddings, 4), targets=random_like(state.targets, 5))
    batch = batch_of(args, 7)
    plain, _ = hn.gradients(args, state, state.learner, state.opt_state, batch, False)
    both, parts = hn.gradients(args, state, state.learner, state.opt_state, batch, True)
    if max_grad_norm:
        np.testing.assert_allclose(optax.tree.norm(plain), max_grad_norm, rtol=1e-3)
        assert float(parts["grad_norm"]) > max_grad_norm

    # Adam's next step with the task's gradient only, from its moments after three steps.
    def ahead(theta, g, mu, nu):
        mu, nu = 0.9 * mu + 0.1 * g, 0.999 * nu + 0.001 * g**2
        return theta - 0.02 * (mu / (1 - 0.9**4)) / (np.sqrt(nu / (1 - 0.999**4)) + args.adam_eps)

    trees = state.learner, plain, state.opt_state.mu, state.opt_state.nu
    theta = jax.tree.map(ahead, *(float64(tree["hyper"]) for tree in trees))
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
    moved = {}
    for beta in (0.0, 0.1):
        args = make_args(beta=beta, hyper_learning_rate=3e-3)
        state = hn.initial_state(args)
        state = hn.begin_task(args, hn.end_task(args, hn.begin_task(args, state)))
        before = state.embeddings[0], hn.policy_for(args, state, 0)
        for i in range(10):
            state, _ = hn.update(args, beta > 0, state, random_rollout(args, i))
        np.testing.assert_array_equal(state.embeddings[0], before[0])
        after = hn.policy_for(args, state, 0)
        pairs = zip(jax.tree.leaves(before[1]), jax.tree.leaves(after), strict=True)
        moved[beta] = np.sqrt(sum(((x - y) ** 2).sum() for x, y in pairs))
    assert 0 < moved[0.1] < 0.2 * moved[0.0]


# PPO


def batch_of(args, seed):
    rng = np.random.default_rng(seed)
    obs, actions = hn.sizes(args)
    draw = lambda *size: rng.normal(size=size).astype(np.float32)  # noqa: E731
    return hn.Batch(draw(9, obs), draw(9, actions), -6 + draw(9), draw(9), draw(9), draw(9))


@pytest.mark.parametrize("method", ["hnppo", "ppo"])
@pytest.mark.parametrize("clip_coef", [0.2, 0.05])
def test_loss_by_hand(method, clip_coef):
    args = make_args(method=method, clip_coef=clip_coef, ent_coef=0.03, vf_coef=0.7)
    state, batch = begun(args), batch_of(args, 3)
    params, b = float64(hn.networks(args, state.learner)), float64(batch)

    def mlp(net, x):
        net = net["params"]
        for i in range(2):
            x = np.tanh(x @ net[f"Dense_{i}"]["kernel"] + net[f"Dense_{i}"]["bias"])
        return x @ net["Dense_2"]["kernel"] + net["Dense_2"]["bias"]

    policy, value_loss, n = 0.0, 0.0, len(b.obs)
    log_std = params["actor"]["params"]["log_std"]
    for i in range(n):
        mean, value = mlp(params["actor"], b.obs[i]), mlp(params["critic"], b.obs[i])[0]
        density = np.prod(
            np.exp(-((b.actions[i] - mean) ** 2) / 2 / np.exp(log_std) ** 2) / np.exp(log_std) / 2.5066283
        )
        ratio = density / np.exp(b.log_probs[i])
        policy -= min(ratio * b.advantages[i], np.clip(ratio, 1 - clip_coef, 1 + clip_coef) * b.advantages[i]) / n
        near = b.values[i] + np.clip(value - b.values[i], -clip_coef, clip_coef)
        squares = (near - b.returns[i]) ** 2, (value - b.returns[i]) ** 2
        value_loss += 0.5 * (max(squares) if method == "ppo" else squares[0]) / n
    entropy = (log_std + 0.5 * np.log(2 * np.pi * np.e)).sum()
    total, parts = hn.loss(args, state.learner, batch)
    got = parts["policy_loss"], parts["value_loss"], parts["entropy"], total
    np.testing.assert_allclose(
        got, [policy, value_loss, entropy, policy + 0.7 * value_loss - 0.03 * entropy], rtol=1e-3
    )


def test_a_value_that_has_moved_far_enough_moves_no_further():
    """The study's loss; PPO's larger of two goes on where the value has gone the wrong way."""
    old, returns = jnp.zeros(1), jnp.ones(1)
    slopes = {}
    for method in ("hnppo", "ppo"):
        args = make_args(method=method, clip_coef=0.2)
        slope = jax.grad(lambda v, args=args: hn.value_loss(args, v, old, returns))
        slopes[method] = [float(slope(jnp.array([v]))[0]) for v in (0.1, 0.5, -0.5)]
    np.testing.assert_allclose(slopes["hnppo"], [-0.9, 0, 0], atol=1e-6)
    np.testing.assert_allclose(slopes["ppo"], [-0.9, 0, -1.5], atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 1), st.floats(0, 1))
def test_gae_equals_rlax(seed, gamma, lam):
    args = make_args(gamma=gamma, gae_lambda=lam)
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(12, 2)).astype(np.float32), rng.normal(size=(13, 2)).astype(np.float32)
    got = hn.gae(args, jnp.asarray(rewards), jnp.asarray(values))
    for i in range(2):
        want = rlax.truncated_generalized_advantage_estimation(
            jnp.asarray(rewards[:, i]), jnp.full(12, gamma, jnp.float32), lam, jnp.asarray(values[:, i])
        )
        np.testing.assert_allclose(got[:, i], want, rtol=1e-4, atol=1e-5)


def test_each_part_has_its_learning_rate():
    """Adam's first step is as long as the learning rate, for every number with a gradient."""
    args = make_args(num_minibatches=1, update_epochs=1, adam_eps=1e-12, learning_rate=0.02, hyper_learning_rate=0.003)
    before = jax.device_get(begun(args)._replace(opt_state=hn.make_optimizer(args).init(begun(args).learner)))
    after, _ = hn.update(args, False, jax.tree.map(jnp.asarray, before), random_rollout(args))
    for name, rate in (("hyper", 0.003), ("embedding", 0.003), ("critic", 0.02)):
        pairs = zip(jax.tree.leaves(before.learner[name]), jax.tree.leaves(after.learner[name]), strict=True)
        steps = np.concatenate([np.abs(x - y).ravel() for x, y in pairs])
        moved = steps[steps > 0]
        assert len(moved) > 0.3 * len(steps), name
        np.testing.assert_allclose(np.median(moved), rate, rtol=1e-3)


def test_a_rollout_ends_with_the_episodes_last_observation():
    """`play` against steps by hand: the last observation is the episode's own, not the next one's first."""
    args = make_args(num_worlds=3)
    actions = np.random.default_rng(0).normal(size=(hn.DECISIONS, 4, 6))
    with closing(hn.make_doors(args, "Pull-Right-Pull", 4, 1, 3)) as doors:
        rollout, success = hn.play(doors, lambda obs, t: actions[t], 7)
        obs, rewards = [doors.reset(seed=7)[0]], []
        for t in range(hn.DECISIONS):
            new, reward, _, truncated, info = doors.step(actions[t])
            assert truncated.all() == (t == hn.DECISIONS - 1)
            obs.append(new)
            rewards.append(reward)
    np.testing.assert_array_equal(rollout.obs[:-1], obs[:-1])
    np.testing.assert_array_equal(rollout.obs[-1], info["final_obs"])
    assert (rollout.obs[-1] != obs[-1]).all()
    np.testing.assert_array_equal(rollout.rewards, np.float32(rewards))
    np.testing.assert_array_equal(rollout.actions, actions)
    np.testing.assert_array_equal(success, info["final_info"]["success"])


@pytest.mark.parametrize("flags", [{"method": "ppo"}, {"critic": "hyper"}, {"chunked": True}, {}], ids=str)
def test_learns_which_action_is_rewarded(flags):
    """Rewards for actions near one that depends on the observation's sign: the mean action finds it."""
    options = {"num_envs": 8, "learning_rate": 3e-3, "hyper_learning_rate": 1e-3, "hidden": 16, "hyper_width": 32}
    args = make_args(**options | flags)
    state = hn.begin_task(args, hn.initial_state(args))
    key, wish = jax.random.PRNGKey(0), np.array([0.8, -0.8, 0.4, 0.0, 0.4, -0.4])
    obs_size, _ = hn.sizes(args)

    def far(actions, obs):
        return ((actions - wish * np.sign(obs[..., :1])) ** 2).sum(axis=-1)

    for i in range(60):
        rng = np.random.default_rng(i)
        obs = rng.normal(size=(hn.DECISIONS + 1, args.num_envs, obs_size)).astype(np.float32)
        actor = hn.policy_of(args, state.learner)
        actions = np.asarray(hn.act(args, actor, obs[:-1], jax.random.fold_in(key, i), 0))
        state, _ = hn.update(args, False, state, hn.Rollout(obs, actions, -np.float32(far(actions, obs[:-1]))))
    start = far(np.zeros(6), obs).mean()
    assert far(np.asarray(hn.mean_action(args, actor, obs)), obs).mean() < 0.6 * start


# GRADIENTS THAT ARE NOT FINITE


def test_a_step_that_is_not_finite_is_skipped_and_counted():
    args = make_args(update_epochs=3)
    good, bad = random_rollout(args), random_rollout(args)
    bad.actions[5, 2] = 1e30  # its square overflows, in one of an epoch's four minibatches
    state, metrics = hn.update(args, False, begun(args), bad)
    assert metrics["charts/skipped_steps"] == 3
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state._replace(matrix=0)))
    assert all(np.isfinite(x) for x in metrics.values())
    nothing = good._replace(obs=np.full_like(good.obs, np.nan))
    before = jax.device_get(begun(args))
    state, metrics = hn.update(args, False, begun(args), nothing)
    assert metrics["charts/skipped_in_a_row"] == metrics["charts/skipped_steps"] == 12
    state, metrics = hn.update(args, False, state, nothing)
    assert metrics["charts/skipped_in_a_row"] == metrics["charts/skipped_steps"] == 24
    for x, y in zip(jax.tree.leaves(before.learner), jax.tree.leaves(state.learner), strict=True):
        np.testing.assert_array_equal(x, y)
    state, metrics = hn.update(args, False, state, good)
    assert metrics["charts/skipped_steps"] == 24
    assert metrics["charts/skipped_in_a_row"] == 0


# TASK AFTER TASK


@pytest.mark.parametrize(
    ("method", "critic"), [("hnppo", "fresh"), ("hnppo", "hyper"), ("ppo", "fresh"), ("finetune", "fresh")]
)
def test_what_a_new_task_keeps(method, critic):
    args = make_args(method=method, critic=critic)
    old = begun(args)
    old = old._replace(return_filter=old.return_filter._replace(count=jnp.float32(5)))
    old = hn.keep_best(args, old, jnp.float32(0.5))
    worse = hn.keep_best(args, old._replace(learner=random_like(old.learner, 9)), jnp.float32(0.4))
    done = hn.end_task(args, worse)
    new = hn.begin_task(args, done)

    def same(a, b):
        return all((x == y).all() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))

    assert same(done.learner, old.learner)  # the best, not the last
    assert int(done.finished) == 1
    assert int(new.task) == 1
    assert same(new.opt_state, hn.make_optimizer(args).init(new.learner))
    assert float(new.best_success) == -1
    assert float(new.return_filter.count) == 0
    kept = {"hnppo": {"hyper"}, "ppo": set(), "finetune": {"actor", "critic"}}[method]
    for name in new.learner:
        assert same(new.learner[name], old.learner[name]) == (name in kept), name
    remembered = hn.generated(args)[1](done.targets[0])
    for name, params in remembered.items():
        assert same(params, hn.networks(args, old.learner)[name])
    assert set(remembered) == ({"actor", "critic"} if critic == "hyper" else {"actor"})
    if method == "hnppo":
        assert same(done.embeddings[0], old.learner["embedding"])
        assert same(hn.policy_for(args, new, 0), hn.networks(args, old.learner)["actor"])


def test_best_and_held():
    args = make_args(stop_at_success=0.9)
    state, held = begun(args), []
    for i, success in enumerate((0.5, 0.95, 0.2, 0.9, 0.95, 0.9)):
        state = state._replace(learner=random_like(state.learner, i))
        state = hn.keep_best(args, state, jnp.float32(success))
        held.append(int(state.held))
    assert held == [0, 1, 0, 1, 2, 3]
    assert float(state.best_success) == np.float32(0.95)
    fifth = random_like(state.learner, 4)  # of two equally good ones the later
    assert all((x == y).all() for x, y in zip(jax.tree.leaves(state.best), jax.tree.leaves(fifth), strict=True))


# METRICS

PUBLISHED = {  # after each of six tasks, per cent
    "HN-PPO": "98 39 0 0 0 0  99 100 0 0 0 0  100 100 92 1 0 0  "
    "99 100 93 31 0 39  99 100 92 28 59 0  99 99 92 27 57 36",
    "finetune": "100 21 0 0 0 0  61 100 0 0 0 0  0 24 0 0 53 0  0 1 0 0 0 68  19 6 27 0 37 0  1 5 0 0 0 36",
    "PPO": "100 21 0 0 0 0  48 100 0 0 0 3  11 1 32 0 57 0  0 29 0 32 0 62  0 1 0 0 96 0  1 1 0 0 0 63",
}


@pytest.mark.parametrize(
    ("name", "acc", "fwt", "rem"),
    [("HN-PPO", 0.810, 0.053, 0.998), ("finetune", 0.20, 0.10, 0.47), ("PPO", 0.24, 0.10, 0.29)],
)
def test_metrics_of_the_published_matrices(name, acc, fwt, rem):
    matrix = np.array(PUBLISHED[name].split(), float).reshape(6, 6) / 100
    got = continual.metrics(matrix)
    digits = 5e-4 if name == "HN-PPO" else 1.1e-2  # as printed
    np.testing.assert_allclose([got["ACC"], got["FWT"], got["REM"]], [acc, fwt, rem], atol=digits)
    assert got["BWT+"] == 0
    if name == "HN-PPO":
        assert round(got["BWT"], 3) == -0.002


def test_what_was_not_measured_is_not_zero(tmp_path):
    matrix = np.array([[0.8, np.nan, 0.2], [0.9, 0.6, 0.4], [0.9, 0.6, 0.5]])
    assert continual.metrics(matrix)["FWT"] == pytest.approx(0.3)
    continual.write_csv(tmp_path / "matrix.csv", matrix, ("a", "b", "c"))
    assert (tmp_path / "matrix.csv").read_text().splitlines()[:2] == ["after,a,b,c", "a,0.8000,,0.2000"]
    assert continual.draw(matrix, ("a", "b", "c")).std() > 20


def test_metrics_by_hand():
    got = continual.metrics(np.array([[0.8, 0.1], [0.9, 0.6]]))
    want = {"ACC": 2.3 / 3, "FWT": 0.1, "BWT": 0.1, "BWT+": 0.1, "REM": 1.0}
    assert got == pytest.approx(want)
    assert continual.metrics(np.array([[0.7]])) == {"ACC": 0.7, "FWT": 0, "BWT": 0, "BWT+": 0, "REM": 1}
