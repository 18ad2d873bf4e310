"""Ape-X's parts against independent oracles."""

import itertools
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import init_state
from hypothesis import given
from hypothesis import strategies as st
from rollouts import normal, relaxed, seeds
from test_apex_run import TINY

import apex_procgen as apex
from common import augment, bonus, devices, envs, offpolicy, replay, runs
from common.devices import ENV_SHARDED, REPLICATED

draw = jax.jit(replay.sample, static_argnames=("batch_size", "n_step", "gamma"))
GAMES = 4


def make_args(**flags):
    """The network and the shapes of the whole runs, whose programs need not be compiled again."""
    return apex.Args(**TINY | flags)


@cache
def programs(script, args):
    """The mesh, the agent, and what `main` compiles for these arguments."""
    agent, mesh = script.make_agent(args), devices.make_mesh(args)
    update, update_on_batch = script.make_update(args, agent, mesh), script.make_update_on_batch(args, agent, mesh)
    return SimpleNamespace(
        agent=agent,
        mesh=mesh,
        insert=offpolicy.make_insert(args, mesh),
        update=update,
        update_on_batch=update_on_batch,
        run_updates=offpolicy.make_run_updates(args, mesh, update, update_on_batch),
    )


def init_env_state(args, env_ids):
    return envs.init_env_state(np.int32(env_ids), args.stack_offsets)


# THE LOSS


@relaxed
@given(seeds, st.sampled_from([2, 51]), st.floats(0, 1))
def test_projection_of_random_distributions_equals_the_papers_algorithm(seed, atoms, discount):
    rng = np.random.default_rng(seed)
    support = np.linspace(-3, 7, atoms, dtype=np.float32)
    returns, discounts = 4 * normal(rng, 5), np.full(5, discount, np.float32)
    probs = rng.dirichlet(np.ones(atoms), 5).astype(np.float32)
    got = apex.project(jnp.array(support), returns, discounts, probs)
    want = [oracle.project(support.astype(np.float64), r, discount, p) for r, p in zip(returns, probs, strict=True)]
    np.testing.assert_allclose(got, want, atol=2e-5)


PLAIN = {"augment": "", "dropout": 0}  # what a table cannot have


class Table:
    """Stands for the network: its parameters are the outputs of every state, its frames are states."""

    def __init__(self, args):
        self.support = apex.make_agent(args).support

    @staticmethod
    def apply(params, states, keys=None, taus=None, policies=None):
        return params[states]


@cache
def of_table(args):
    """What `devices.gradient` makes of the loss: a function of parameters, target and batch."""

    def gradient(params, target, batch):
        loss = partial(apex.loss, args, Table(args), target_params=target)
        return devices.gradient(loss, params, batch, jnp.ones(args.batch_size), in_chunks=False)

    return jax.jit(gradient)


def random_batch(rng, args, states=7):
    size = args.batch_size
    weight = rng.random(size, np.float32) * (rng.random(size) < 0.9)
    return replay.Batch(
        frames=rng.integers(0, states, size),
        next_frames=rng.integers(0, states, size),
        actions=rng.integers(0, 15, size, np.int32),
        returns=4 * normal(rng, size),
        discounts=rng.random(size, np.float32),
        weight=weight.astype(np.float32),
        row=np.arange(size),
        env=np.zeros(size, np.int32),
        keys=jax.random.split(jax.random.PRNGKey(0), size),
    )


@relaxed
@given(seeds, st.booleans(), st.sampled_from([1, 11, 51]))
def test_loss_of_random_tables_equals_the_sums_by_hand(seed, double_q, atoms):
    args = make_args(**PLAIN, double_q=double_q, num_atoms=atoms)
    rng, support = np.random.default_rng(seed), np.array(Table(args).support)
    params, target = 2 * normal(rng, 2, 7, 15, atoms)
    batch = random_batch(rng, args)
    _, means, parts = of_table(args)(params, target, batch)
    want, tds, values = [], [], []
    for i in range(args.batch_size):
        one = jax.tree.map(lambda x: x[i], batch)  # noqa: B023
        outputs = [x.astype(np.float64) for x in (
            params[one.frames, one.actions], params[one.next_frames], target[one.next_frames]
        )]  # fmt: skip
        loss, td = oracle.apex_loss(args, support, one.weight, *outputs, one.returns, one.discounts)
        want.append(loss)
        tds.append(td)
        values.append(outputs[0][0] if atoms == 1 else oracle.softmax(outputs[0]) @ support)
    np.testing.assert_allclose(parts["loss"], want, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(parts["td_error"], tds, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(parts["q_values"], values, rtol=1e-3, atol=1e-4)
    for name, x in {"loss": want, "td_error": tds, "q_values": values}.items():
        np.testing.assert_allclose(means[name], np.mean(x), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("alpha", [0.0, 0.9])
def test_loss_with_quantiles_asks_the_right_network_about_the_right_frames(alpha):
    """With quantiles, drawn where the loss says they are, evenly spaced ones to choose the next action by, and double
    Q-learning or Munchausen's reward; each network about the policy that played."""
    args = make_args(**PLAIN, num_atoms=99, num_quantiles=4, munchausen_alpha=alpha, num_devices=1, num_policies=3)
    agent, rng = apex.make_agent(args), np.random.default_rng(0)
    params = init_state(apex, args, agent).params
    online, target = (jax.tree.map(lambda x: x + 0.1 * normal(rng, *x.shape), params) for _ in range(2))
    frames = rng.integers(0, 256, (2, args.batch_size, 64, 64, 6), np.uint8)
    policies = rng.integers(0, 3, args.batch_size, np.int32)
    batch = random_batch(rng, args)._replace(frames=frames[0], next_frames=frames[1], policies=policies)
    keys = [[jax.random.fold_in(key, i) for key in batch.keys] for i in (3, 4)]
    taus, next_taus = (np.stack([jax.random.uniform(key, (4,)) for key in some]) for some in keys)
    apply = partial(jax.jit(agent.apply), policies=policies)
    following = apply(target, batch.next_frames, taus=next_taus)
    outputs = apex.Outputs(
        online=apply(online, batch.frames, taus=taus), next_target=following,
        next_selector=apply(target if alpha else online, batch.next_frames),
        target=apply(target, batch.frames), taus=taus,
    )  # fmt: skip
    want = apex.q_loss_terms(args, agent.support, outputs, batch)
    got = apex.loss(args, agent, online, batch, target_params=target)
    for name, x in want.items():
        np.testing.assert_allclose(got[name], x, rtol=1e-3, atol=1e-4, err_msg=name)
    for wrong in ({"taus": next_taus}, {"next_selector": apply(online if alpha else target, batch.next_frames)}):
        other = apex.q_loss_terms(args, agent.support, outputs._replace(**wrong), batch)["loss"]
        assert np.abs(other - want["loss"]).max() > 1e-3


def test_loss_with_augmentation_transforms_frames_apart_and_drops_features_once():
    args, seen = make_args(num_atoms=1, augment_prob=1.0), []
    batch = frames_batch(args)

    class Spy:
        support = (0.0,)

        def apply(self, params, frames, keys=None, taus=None, policies=None):
            seen.append((params, frames, keys))
            return jnp.zeros((len(frames), 15, 1))

    apex.loss(args, Spy(), "online", batch, target_params="target")
    keys = [jax.vmap(jax.random.fold_in, (0, None))(batch.keys, i) for i in range(3)]
    frames, following = augment.augment(args, keys[0], batch.frames), augment.augment(args, keys[1], batch.next_frames)
    want = ("online", frames, keys[2]), ("target", following, None), ("online", following, None)
    for got, one in zip(seen, want, strict=True):
        assert got[0] == one[0]
        np.testing.assert_array_equal(got[1], one[1])
        np.testing.assert_array_equal(got[2], one[2])


@pytest.mark.parametrize("atoms", [1, 11])
def test_gradient_of_random_tables_equals_differences_by_hand(atoms):
    """Of the loss by hand, in float64, with respect to some of the outputs that are learnt; all others have none."""
    args = make_args(**PLAIN, num_atoms=atoms)
    rng, support = np.random.default_rng(0), np.array(Table(args).support)
    params, target = 2 * normal(rng, 2, 7, 15, atoms)
    batch = random_batch(rng, args)
    got, _, _ = of_table(args)(jnp.array(params), target, batch)

    def chosen_loss(chosen, i):
        weight, reward, discount = (float(x[i]) for x in (batch.weight, batch.returns, batch.discounts))
        next_frame = batch.next_frames[i]
        outputs = chosen, np.float64(params[next_frame]), np.float64(target[next_frame])
        return oracle.apex_loss(args, support, weight, *outputs, reward, discount)[0]

    want, small = np.zeros(params.shape), 1e-6
    for i in range(args.batch_size):
        place = batch.frames[i], batch.actions[i]
        for k in range(atoms):
            step = small * (np.arange(atoms) == k)
            ends = [chosen_loss(np.float64(params[place]) + sign * step, i) for sign in (1, -1)]
            want[(*place, k)] += (ends[0] - ends[1]) / (2 * small) / args.batch_size
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)


@relaxed
@given(seeds, st.sampled_from([(1, 1), (3, 5), (8, 8)]))
def test_quantile_loss_of_random_quantiles_equals_the_sums_by_hand(seed, sizes):
    rng, (few, many) = np.random.default_rng(seed), sizes
    taus, quantiles, targets = rng.random((4, few), np.float32), 2 * normal(rng, 4, few), 2 * normal(rng, 4, many)
    got = apex.quantile_loss(taus, quantiles, targets)
    want = [
        oracle.quantile_loss(*(x.astype(np.float64) for x in row)) for row in zip(taus, quantiles, targets, strict=True)
    ]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


@relaxed
@given(seeds, st.sampled_from([0, 4]), st.sampled_from([0.0, 0.9]), st.booleans())
def test_loss_with_quantiles_or_munchausen_equals_the_sums_by_hand(seed, quantiles, alpha, double_q):
    args = make_args(
        **PLAIN, num_atoms=99 if quantiles else 1, num_quantiles=quantiles, munchausen_alpha=alpha, double_q=double_q,
        munchausen_tau=0.3,
    )  # fmt: skip
    rng, size, count = np.random.default_rng(seed), 5, quantiles or 1
    outputs = apex.Outputs(*2 * normal(rng, 4, size, 15, count), rng.random((size, count), np.float32))
    batch = jax.tree.map(lambda x: x[:size], random_batch(rng, args))
    got = apex.q_loss_terms(args, (0.0,), outputs, batch)
    for i in range(size):
        one = jax.tree.map(lambda x: np.float64(x[i]), outputs)  # noqa: B023
        action, reward, discount = batch.actions[i], float(batch.returns[i]), float(batch.discounts[i])
        if alpha:
            outputs_of_one = one.target, one.next_target, one.next_selector
            targets = oracle.munchausen(args, *outputs_of_one, action, reward, discount)
        else:
            targets = reward + discount * one.next_target[one.next_selector.mean(axis=1).argmax()]
        td = targets.mean() - one.online[action].mean()
        loss = oracle.quantile_loss(one.taus, one.online[action], targets) if quantiles else oracle.huber(td)
        np.testing.assert_allclose(got["loss"][i], batch.weight[i] * loss, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(got["td_error"][i], abs(td), rtol=1e-3, atol=1e-4)

    def total(outputs):
        return apex.q_loss_terms(args, (0.0,), outputs, batch)["loss"].sum()

    slopes = jax.grad(total)(outputs)
    assert np.any(slopes.online)
    assert not any(np.any(x) for x in (slopes.next_target, slopes.next_selector, slopes.target))


@pytest.mark.parametrize("flags", [{"num_atoms": 1}, {"num_atoms": 11}, {"num_atoms": 99, "num_quantiles": 4}])
def test_conservative_penalty_of_random_outputs_and_its_gradient_equal_those_by_hand(flags):
    """What it adds to the loss, whose importance weights it has, and to the gradient; priorities stay the same."""
    args, plain = make_args(**PLAIN, **flags, cql_alpha=0.7), make_args(**PLAIN, **flags)
    rng, size, support = np.random.default_rng(0), 5, np.array(Table(args).support)
    outputs = apex.Outputs(*2 * normal(rng, 4, size, 15, max(len(support), args.num_quantiles)), None)
    if args.num_quantiles:
        outputs = outputs._replace(taus=rng.random((size, args.num_quantiles), np.float32))
    batch = jax.tree.map(lambda x: x[:size], random_batch(rng, args))

    def total(args, values):
        terms = apex.q_loss_terms(args, support.tolist(), outputs._replace(online=values), batch)
        return terms["loss"].sum(), terms

    slopes, terms = jax.grad(partial(total, args), has_aux=True)(outputs.online)
    plain_slopes, plain_terms = jax.grad(partial(total, plain), has_aux=True)(outputs.online)
    for i, logits in enumerate(np.float64(outputs.online)):
        p = (
            np.stack([oracle.softmax(x) for x in logits])
            if args.with_atoms
            else np.full(logits.shape, 1 / logits.shape[1])
        )
        values = (p * (support if args.with_atoms else logits)).sum(axis=1)
        penalty, slope = oracle.cql(values, batch.actions[i])
        # A value's gradient with respect to an atom's logit (Bellemare et al. 2017's softmax) is p_k (z_k - value).
        inner = p * (support - values[:, None]) if args.with_atoms else p
        weight = 0.7 * batch.weight[i]
        np.testing.assert_allclose(terms["cql_loss"][i], penalty, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(terms["loss"][i] - plain_terms["loss"][i], weight * penalty, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose((slopes - plain_slopes)[i], weight * slope[:, None] * inner, rtol=1e-3, atol=1e-5)
    for name in ("td_error", "q_values"):
        np.testing.assert_array_equal(terms[name], plain_terms[name])
    assert "cql_loss" not in plain_terms


def test_state_value_is_that_of_the_best_action_or_of_the_softmax_policy():
    values = np.float32([[0.3, 0.1, -0.2]])
    np.testing.assert_allclose(apex.state_value(make_args(), values), [0.3])
    args = make_args(num_atoms=1, munchausen_alpha=0.9, munchausen_tau=0.2)
    p = oracle.softmax(np.float64(values[0]) / 0.2)
    np.testing.assert_allclose(apex.state_value(args, values), [(p * (values[0] - 0.2 * np.log(p))).sum()], rtol=1e-5)


def heads_by_hand(hand, x, dueling=True, atoms=1):
    """Features [..., F] -> [..., 15, atoms], in a duel (Wang et al. 2016, equation 9) or not."""
    streams = (hand.dense(oracle.relu(hand.dense(x))) for _ in range(1 + dueling))
    advantage, *value = (y.reshape(*y.shape[:-1], -1, atoms) for y in streams)
    return value[0] + advantage - advantage.mean(axis=-2, keepdims=True) if dueling else advantage


@pytest.mark.parametrize("dueling", [True, False])
@pytest.mark.parametrize("atoms", [1, 11])
def test_values_or_their_atoms_of_frames_equal_those_by_hand(atoms, dueling):
    agent = apex.make_agent(make_args(num_atoms=atoms, dueling=dueling))
    frames = np.random.default_rng(0).integers(0, 256, (3, 64, 64, 6), np.uint8)
    outputs, params = jax.jit(agent.init_with_output)(jax.random.key(0, impl="rbg"), frames)
    hand = oracle.Hand(params["params"])
    x = np.float64(agent.encoder.apply({"params": params["params"]["encoder"]}, frames))
    np.testing.assert_allclose(outputs, heads_by_hand(hand, x, dueling, atoms), rtol=1e-3, atol=1e-4)
    assert hand.all_used() == len(params["params"]) - 1


@pytest.mark.parametrize("num_policies", [1, 3])
def test_agent_without_drawn_quantiles_takes_evenly_spaced_ones(num_policies):
    """And of several policies, whose index is one-hot beside the features, the first."""
    agent = apex.make_agent(make_args(num_atoms=99, num_quantiles=4, num_policies=num_policies))
    frames = np.random.default_rng(0).integers(0, 256, (3, 64, 64, 6), np.uint8)
    outputs, params = jax.jit(agent.init_with_output)(jax.random.key(0, impl="rbg"), frames)
    assert outputs.shape == (3, 15, 4)
    spaced = np.tile(np.float32([0.125, 0.375, 0.625, 0.875]), (3, 1))
    np.testing.assert_allclose(outputs, agent.apply(params, frames, taus=spaced), atol=1e-6)
    one = agent.apply(params, frames[:1], taus=spaced[:1, 2:3])
    np.testing.assert_allclose(one, outputs[:1, :, 2:3], atol=1e-5)
    assert np.ptp(outputs, axis=2).min() > 1e-6
    # By hand: cosines of the quantiles (Dabney et al. 2018, equation 4).
    hand = oracle.Hand(params["params"])
    x = np.float64(agent.encoder.apply({"params": params["params"]["encoder"]}, frames))
    x = x[:, None] * oracle.relu(hand.dense(np.cos(np.pi * np.arange(64) * spaced[..., None])))

    def streams(policies):
        layers = oracle.Hand(params["params"])
        layers.used = dict(hand.used)
        ones = np.eye(num_policies)[policies][:, None].repeat(4, axis=1)
        y = np.concatenate([x, ones], axis=2) if num_policies > 1 else x
        return heads_by_hand(layers, y)[..., 0].mT

    np.testing.assert_allclose(outputs, streams([0, 0, 0]), rtol=1e-3, atol=1e-4)
    if num_policies > 1:
        of_others = agent.apply(params, frames, policies=np.int32([2, 0, 1]))
        np.testing.assert_allclose(of_others, streams([2, 0, 1]), rtol=1e-3, atol=1e-4)
        assert np.abs(of_others[0] - outputs[0]).max() > 1e-2


# THE UPDATE


def frames_batch(args):
    rng = np.random.default_rng(1)
    frames = rng.integers(0, 256, (2, args.batch_size, 64, 64, 6), np.uint8)
    return random_batch(rng, args)._replace(frames=frames[0], next_frames=frames[1])


def full_buffer(args, device):
    """Random frames and steps, all of which can be drawn."""
    rng, buffer = np.random.default_rng(2), offpolicy.init_replay(args)
    shape = buffer.priorities.shape
    rows = buffer.rows._replace(
        frames=buffer.rows.frames.replace(images=rng.integers(0, 256, (*shape, 64, 64, 3), np.uint8)),
        actions=rng.integers(0, 15, shape, np.int32),
        rewards=normal(rng, *shape),
    )
    return jax.device_put(buffer._replace(rows=rows, priorities=rng.random(shape, np.float32)), device)


def new_state(args):
    own = programs(apex, args)
    return jax.device_put(init_state(apex, args, own.agent), devices.shardings(own.mesh, REPLICATED))


def make_accelerator_args(**flags):
    """For the code path of a GPU. `programs` caches by arguments: with another run_dir than in other tests, which the
    programs do not depend on, none that was traced for a CPU is used."""
    return make_args(run_dir="code path of a GPU", dtype="float32", num_devices=1, **flags)


def test_update_on_two_devices_equals_code_path_of_a_gpu_on_one(monkeypatch):
    """Also the TD errors, which come back sample by sample, not weighted; and the step size is by steps."""

    def begin(args):
        return new_state(args)._replace(global_step=jnp.int32(50))

    args = make_args()
    agent, batch = apex.make_agent(args), frames_batch(args)
    state, td, metrics = programs(apex, args).update_on_batch(begin(args), batch)
    assert len(td.sharding.device_set) == args.num_devices == 2
    monkeypatch.setattr(devices, "on_cpu", lambda: False)
    one = make_accelerator_args(learning_rate=f"0:{2 * float(args.learning_rate)},100:0")
    start = begin(one)
    terms = jax.device_get(apex.loss(one, agent, start.params, batch, target_params=start.target_params))
    want_state, want_td, want = programs(apex, one).update_on_batch(start, batch)
    for x in (td, terms["td_error"]):
        np.testing.assert_allclose(x, want_td, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(want["losses/td_error"], terms["td_error"].mean(), rtol=1e-3)
    for name, x in want.items():
        np.testing.assert_allclose(metrics[name], x, rtol=1e-3, atol=1e-5, err_msg=name)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), state.opt_state, want_state.opt_state)


def test_update_on_two_devices_samples_each_half_from_its_own_games():
    """An update on two devices, by hand: half of the batch comes of each half of the games, with weights for that."""
    args = make_args()
    own, whole, beta = programs(apex, args), full_buffer(args, jax.devices()[0]), 0.7
    placed = jax.device_put(full_buffer(args, jax.devices()[0]), devices.shardings(own.mesh, replay.REPLAY_SPECS))
    state, buffer, metrics = own.update(new_state(args), placed, 1, beta)
    parts, batches, weights, key = [], [], [], jax.random.PRNGKey(envs.derive_seed(args.seed, 1))
    for i in range(2):
        games = slice(2 * i, 2 * i + 2)
        frames = jax.tree.map(lambda x: x[:, games], whole.rows.frames)  # noqa: B023
        rows = jax.tree.map(lambda x: x[:, games], whole.rows._replace(frames=None))._replace(frames=frames)  # noqa: B023
        parts.append(replay.Replay(rows, whole.priorities[:, games], whole.written))
        device_key = jax.random.fold_in(jax.random.fold_in(key, 0), i)
        batches.append(draw(parts[i], device_key, beta, batch_size=8, n_step=args.n_step, gamma=args.gamma))
        p = np.asarray(parts[i].priorities, np.float64)
        probability = p[batches[i].row, batches[i].env] / p.sum() / 2
        weights.append((2 * p.size * probability) ** -beta)
    batch = jax.tree.map(lambda *x: jnp.concatenate(x), *batches)
    weight = np.concatenate(weights) / np.max(weights)
    batch = batch._replace(weight=weight.astype(np.float32))
    batch = jax.device_put(batch, devices.shardings(own.mesh, ENV_SHARDED))
    want, td, same = own.update_on_batch(new_state(args), batch)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=3e-6), state.params, want.params)
    for name, x in same.items():
        np.testing.assert_allclose(metrics[name], x, rtol=1e-4, err_msg=name)
    for i in range(2):
        part = replay.set_priorities(parts[i], batches[i], np.asarray(td)[8 * i : 8 * i + 8], per_alpha=args.per_alpha)
        np.testing.assert_allclose(buffer.priorities[:, 2 * i : 2 * i + 2], part.priorities, rtol=1e-3, atol=1e-5)
        assert (part.priorities != parts[i].priorities).sum() > 4


def test_sample_with_another_seed_draws_other_steps():
    buffer = full_buffer(make_args(), jax.devices()[0])
    rows = [jax.jit(partial(offpolicy.sample, make_args(seed=seed)))(buffer, 0, 0.5).row for seed in (1, 2)]
    assert (rows[0] != rows[1]).any()


def test_updates_in_one_program_equal_those_from_host_memory(monkeypatch):
    """The same buffer on the learner's device, and on another: same parameters, priorities, metrics. And the target
    network is copied every fourth update."""
    monkeypatch.setattr(devices, "on_cpu", lambda: False)
    monkeypatch.setattr(devices, "fold_in_axis_index", lambda key: key)  # the host draws for all devices, with one key
    args, host = make_accelerator_args(seed=3), make_accelerator_args(seed=3, replay_device="host")
    watch = runs.Stopwatch()
    first, other = jax.devices()[0], jax.devices()[-1]
    assert first != other
    state, buffer, metrics = programs(apex, args).run_updates(new_state(args), full_buffer(args, first), 6, 0.5, watch)
    assert "sample" not in watch.seconds
    one, there, same, each = new_state(host), full_buffer(args, other), [], []
    for _ in range(6):
        one, there, some = programs(apex, host).run_updates(one, there, 1, 0.5, watch)
        each.append(some)
        leaves = zip(jax.tree.leaves(one.params), jax.tree.leaves(one.target_params), strict=True)
        same.append(all(np.array_equal(a, b) for a, b in leaves))
    assert "sample" in watch.seconds
    assert same == [False, False, False, True, False, False]
    assert state.updates == one.updates == state.opt_state[1].count == 6
    assert there.written.devices() == {other}
    for got, want in ((state, one), (buffer, there)):  # each parameter has moved by 0.01 or so
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=3e-6), got, want)
    for name, x in metrics.items():
        np.testing.assert_allclose(x, np.mean([some[name] for some in each]), rtol=1e-4, err_msg=name)


def test_values_before_training_are_near_zero():
    frames = np.random.default_rng(0).integers(0, 256, (8, 64, 64, 6), np.uint8)
    for flags in ({}, {"dueling": False}, *({"num_atoms": count} for count in (1, 2, 3, 5, 99))):
        agent = apex.make_agent(make_args(**flags))
        key = jax.random.key(0, impl="rbg")  # whose draws compile quickly
        outputs, _ = jax.jit(agent.init_with_output)(key, frames)
        values = apex.mean_q(agent.support, outputs)
        assert values.shape == (8, 15)
        apart = np.diff(agent.support).max(initial=0)  # what an output's noise moves a value by
        assert np.abs(values).max() < max(1, apart / 4)
        assert abs(values.mean()) < 1
        if len(agent.support) > 1:  # and no atom is out of reach
            assert jax.nn.log_softmax(outputs).min() > -25


# ACTING


def test_epsilons_and_epsilon_greedy_are_the_papers():
    np.testing.assert_allclose(apex.epsilons(make_args(num_envs=8)), 0.4 ** np.arange(1, 9), rtol=1e-5)
    assert apex.epsilons(make_args(num_envs=1, num_actors=1)) == np.float32(0.4)
    values, epsilon = jnp.tile(jnp.arange(15.0), (4000, 1)), jnp.repeat(jnp.array([0.0, 0.3]), 2000)
    actions = np.asarray(apex.epsilon_greedy(jax.random.split(jax.random.PRNGKey(0), 4000), values, epsilon))
    assert (actions[:2000] == 14).all()
    assert (actions[2000:] != 14).mean() == pytest.approx(0.3 * 14 / 15, abs=0.03)
    assert len(np.unique(actions)) == 15


def test_policy_in_an_evaluation_is_all_but_greedy(monkeypatch):
    args = make_args(epsilon=0.9)
    agent, rng = apex.make_agent(args), np.random.default_rng(0)
    params, frames = init_state(apex, args, agent).params, rng.integers(0, 256, (8, 64, 64, 6), np.uint8)
    best = apex.mean_q(agent.support, jax.jit(agent.apply)(params, frames)).argmax(axis=1)
    assert apex.EVALUATION_EPSILON == 0.001

    def choose():
        policy = apex.make_policy(args, agent, devices.make_mesh(args))
        return policy(params, frames, np.zeros(8, np.int32), jax.random.PRNGKey(0), None)[0]

    assert len(set(np.asarray(best).tolist())) > 1
    np.testing.assert_array_equal(choose(), best)
    monkeypatch.setattr(apex, "EVALUATION_EPSILON", 1.0)
    assert (choose() != best).any()


def test_act_beside_any_other_games_plays_a_game_the_same():
    """Its id alone decides over its random draws, and how much it explores: game 0 with a probability of 0.9 at each
    step, games 2 and 3 with one of less than a millionth."""
    args, rng, T = make_args(epsilon=0.9, epsilon_alpha=200), np.random.default_rng(0), 12
    agent, obs = apex.make_agent(args), rng.integers(0, 256, (T, 4, 3, 64, 64), np.uint8)
    params, played = init_state(apex, args, agent).params, []
    act = jax.jit(partial(apex.act, args, agent))
    for env_ids in ([0, 1, 2, 3], [2, 3], [3, 0]):
        rollout = offpolicy.begin_rollout(args, init_env_state(args, env_ids), 0)
        actions = []
        for t in range(T):
            rollout, some = act(params, rollout, obs[t, env_ids], np.full(len(env_ids), t % 4, np.int32))
            actions.append(some)
        greedy = (rollout.action_value == rollout.state_value)[:T].mean(axis=0)
        for env_id, share in zip(env_ids, greedy, strict=True):
            assert share < 0.7 if env_id == 0 else share == 1, env_id
        played.append(np.stack([rollout.actions[:T], actions]))
    everyone, *some = played
    assert len(np.unique(everyone)) > 5
    assert (everyone[0] != everyone[1]).any()  # some actions stuck
    for env_ids, own in zip(([2, 3], [3, 0]), some, strict=True):
        np.testing.assert_array_equal(own, everyone[..., env_ids])


def test_record_step_with_sticky_actions_remembers_what_was_played():
    """Whether an action sticks has a key of its own."""
    args = make_args(sticky_actions=0.9)
    rollout = offpolicy.begin_rollout(args, init_env_state(args, range(4)), 0)
    policy_keys, sticky_keys = envs.step_keys(rollout.key, rollout.t, rollout.env_state.env_ids)
    assert (policy_keys != sticky_keys).any(axis=1).all()
    values = {"q_values": jnp.zeros((4, 15)), "state_value": jnp.zeros(4)}
    rollout, played = offpolicy.record_step(
        args, rollout, np.ones(4, np.int32), jnp.full(4, 7), sticky_keys=sticky_keys, **values
    )
    assert (played == 0).any()
    np.testing.assert_array_equal(rollout.env_state.last_action, played)


def test_updates_due_follow_the_steps_played():
    args = make_args(replay_ratio=0.7, batch_size=32)
    steps = np.cumsum(np.random.default_rng(0).integers(0, 90, 200))
    due = [offpolicy.updates_due(args, 1000, a, b) for a, b in itertools.pairwise(steps)]
    assert sum(due) == int(0.7 * (steps[-1] - 1000) / 32)
    assert sum(n for n, step in zip(due, steps[1:], strict=True) if step <= 1000) == 0


def test_samples_of_real_games_are_what_the_actors_saw():
    """On real games the values of sampled frames are those that the actors had: stacks, ages and rows are right. All
    games restart after every 64 steps."""
    args = make_args()
    own, everyone = programs(apex, args), range(args.num_actors)
    agent, collect = own.agent, offpolicy.make_collect(args, own.agent, apex.act)
    params, buffer = init_state(apex, args, agent).params, offpolicy.make_buffer(args, own.mesh, {})
    env_ids = np.arange(4, dtype=np.int32).reshape(2, 2)
    vec_envs = [envs.ReplayableVecEnv(partial(envs.make_procgen, args), ids, 5, restart_every=64) for ids in env_ids]
    env_states, ends, forced_reset = [init_env_state(args, ids) for ids in env_ids], 0, 0
    keys = []
    for i in range(18):
        unrolls = []
        for actor in everyone:
            unroll, env_states[actor] = collect(
                vec_envs[actor], params, env_states[actor], i=i, watch=runs.Stopwatch(), check_stop=lambda: None
            )
            unrolls.append(unroll)
        keys.append(np.asarray(unrolls[0].rollout.key))
        steps = envs.join_envs([unroll.timesteps for unroll in unrolls], axis=-1)
        ends, forced_reset = ends + steps.episode_end.sum(), forced_reset + steps.forced_reset.sum()
        buffer = own.insert(buffer, *zip(*unrolls, strict=True))
    assert ends > 2
    assert forced_reset == 4 * 4
    assert len(np.unique(np.stack(keys), axis=0)) == 18  # each unroll draws its own
    assert len(buffer.priorities.sharding.device_set) == 2
    buffer = jax.device_put(buffer, jax.devices()[0])
    rows = buffer.rows
    sample = jax.jit(partial(offpolicy.sample, args))
    values_of = jax.jit(lambda frames: apex.mean_q(agent.support, agent.apply(params, frames)))
    for i in range(16):
        batch = sample(buffer, i, 0.4)
        np.testing.assert_allclose(
            values_of(batch.frames)[jnp.arange(16), batch.actions], rows.action_value[batch.row, batch.env],
            rtol=1e-3, atol=1e-4,
        )  # fmt: skip
        _, _, after = replay.n_step_return(rows, batch.row, batch.env, n_step=args.n_step, gamma=args.gamma)
        np.testing.assert_allclose(
            values_of(batch.next_frames).max(axis=1), rows.state_value[after, batch.env], rtol=1e-3, atol=1e-4
        )
    for vec_env in vec_envs:
        vec_env.close()


# CURIOSITY


@pytest.mark.parametrize("count", [2, 3, 4, 32])
def test_betas_and_gammas_are_the_papers(count):
    args = make_args(num_envs=64, num_policies=count, rnd_coef=0.4, gamma=0.997, min_gamma=0.98)
    betas, discounts = oracle.curiosity(count, 0.4, 0.997, 0.98)
    np.testing.assert_allclose(apex.betas(args), betas, rtol=1e-5)
    np.testing.assert_allclose(apex.gammas(args), discounts, rtol=1e-6)
    assert (apex.betas(args)[[0, -1]] == np.float32([0, 0.4])).all()


@pytest.mark.parametrize("num_policies", [3, 8])
def test_each_policy_has_environments_and_the_first_that_which_explores_least(num_policies):
    args = make_args(num_envs=8, num_policies=num_policies)
    policies = apex.policies_of(args, np.arange(8))
    assert set(policies) == set(range(num_policies))
    assert policies[apex.epsilons(args).argmin()] == 0
    assert np.ptp(np.bincount(policies)) <= 1
    assert apex.policies_of(make_args(), np.arange(4)) is None


def test_act_asks_each_environment_about_its_own_policy():
    args, rng = make_args(num_policies=4, epsilon=0), np.random.default_rng(0)
    agent, obs = apex.make_agent(args), np.tile(rng.integers(0, 256, (1, 3, 64, 64), np.uint8), (4, 1, 1, 1))
    params = init_state(apex, args, agent).params
    rollout = offpolicy.begin_rollout(args, init_env_state(args, [3, 0, 2, 1]), 0)
    rollout, _ = jax.jit(partial(apex.act, args, agent))(params, rollout, obs, np.zeros(4, np.int32))
    values = apex.mean_q(agent.support, agent.apply(params, rollout.frames.stack(0), policies=np.arange(4)))
    np.testing.assert_allclose(rollout.state_value[0], values.max(axis=1)[np.array([0, 3, 1, 2])], rtol=1e-4, atol=1e-5)
    assert len(np.unique(rollout.state_value[0].round(4))) == 4


def test_intrinsic_rewards_are_the_novelty_of_frames_by_each_policys_beta():
    """Normalised over two rollouts of two actors, in which episodes end and games restart; none before the predictor's
    warm-up is over."""
    args = make_args(num_policies=3, num_steps=8, num_devices=2, frame_stack=1, gamma=0.9, min_gamma=0.5)
    rng, mesh = np.random.default_rng(0), devices.make_mesh(args)
    state = init_state(apex, args, apex.make_agent(args))
    curiosity = jax.device_put(state.curiosity, devices.shardings(mesh, apex.CURIOSITY_SPECS))
    untrained, trained = (
        curiosity.opt_state._replace(count=curiosity.opt_state.count + apex.PREDICTOR_WARMUP - i) for i in (1, 0)
    )
    compute, steps = apex.make_intrinsic_rewards(args, mesh), rng.integers(0, 4, (2, 8, 4), np.int32)
    images = rng.integers(0, 256, (2, 8, 4, 64, 64, 3), np.uint8)
    novelty = jax.jit(partial(bonus.novelty, state.curiosity.bonus.target))
    betas, gammas = oracle.curiosity(3, args.rnd_coef, 0.9, 0.5)
    env_ids, seen = [0, 2, 1, 3], []  # the columns' of two actors: each one's first, then each one's second
    for i in range(2):
        rollouts = []
        for actor in range(2):
            env_state = init_env_state(args, [2 * actor, 2 * actor + 1])
            rollout, columns = offpolicy.begin_rollout(args, env_state, i), slice(actor, None, 2)
            frames = np.concatenate([env_state.history, images[i][:, columns]])
            rollouts.append(
                rollout._replace(frames=rollout.frames.replace(images=frames, episode_steps=steps[i][:, columns]))
            )
        same, _, nothing, _ = compute(curiosity._replace(opt_state=untrained), tuple(rollouts))
        assert not np.any(nothing)
        assert same.bonus.filter.count == curiosity.bonus.filter.count
        curiosity, policies, got, metrics = compute(curiosity._replace(opt_state=trained), tuple(rollouts))
        raw = np.stack([novelty(state.curiosity.predictor, x) for x in images[i]]) * (steps[i] > 0)
        seen.append((raw, steps[i] == 0, steps[i] > 0))
    want = oracle.normalize_rewards(seen, 0.9)[0][1]
    own = [(3 - env_id) % 3 for env_id in env_ids]
    np.testing.assert_array_equal(policies.index, own)
    np.testing.assert_allclose(policies.gamma, np.take(gammas, own), rtol=1e-5)
    np.testing.assert_allclose(got, want * np.take(betas, own), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(metrics["charts/intrinsic_reward"], want[steps[1] > 0].mean(), rtol=1e-3)


def test_predictor_learns_from_the_frames_that_are_rewarded():
    """Those one step later, not n."""
    args, rng = make_args(num_policies=3, frame_stack=1, learning_rate="1e-3"), np.random.default_rng(0)
    agent, frames = apex.make_agent(args), rng.integers(0, 256, (3, args.batch_size, 64, 64, 3), np.uint8)
    batch = random_batch(rng, args)._replace(
        frames=frames[0], next_frames=frames[1], one_step_frames=frames[2], policies=np.zeros(args.batch_size, np.int32)
    )
    state, train = init_state(apex, args, agent), jax.jit(partial(apex.train_step, args, agent))
    want = bonus.novelty(state.curiosity.bonus.target, state.curiosity.predictor, frames[2]).mean()
    after, _, metrics = train(state, batch)
    np.testing.assert_allclose(metrics["losses/rnd_loss"], want, rtol=1e-3)
    assert train(after, batch)[2]["losses/rnd_loss"] < want
    jax.tree.map(np.testing.assert_array_equal, after.curiosity.bonus, state.curiosity.bonus)


# A GAME WITH KNOWN VALUES


ROOMS = np.broadcast_to(255 * np.eye(3, dtype=np.uint8)[:, None, None], (3, 64, 64, 3))  # red, green and blue


def chain(rng, steps):
    """Three rooms in a row. In room i, action i + 1 leads on (from the last: out, with a reward of 2); any other ends
    the episode. Leaving room 1 the right way pays 1, room 0 the wrong way 0.1. Returns frames, actions and Steps."""
    room, episode_step, over = np.zeros((3, GAMES), int)
    rows = {name: [] for name in ("frames", "actions", "rewards", "terminated", "done", "episode_step")}
    for _ in range(steps):
        actions = np.where(rng.random(GAMES) < 0.6, room + 1, rng.integers(0, 15, GAMES))
        right = actions == room + 1
        rewards = np.where(right, np.array([0, 1, 2])[room], np.array([0.1, 0, 0])[room])
        ends = (~right | (room == 2)) & ~over.astype(bool)
        for name, x in {"frames": ROOMS[room], "actions": actions, "rewards": rewards * (over == 0), "terminated": ends,
                        "done": over == 1, "episode_step": episode_step}.items():  # fmt: skip
            rows[name].append(np.array(x))
        room = np.where(over == 1, 0, np.where(ends, room, room + 1))
        episode_step, over = np.where(over == 1, 0, episode_step + 1), ends.astype(int)
    rows = {name: np.stack(x) for name, x in rows.items()}
    terminated = rows["terminated"]
    steps = envs.Timesteps(
        rewards=rows["rewards"].astype(np.float32),
        terminated=terminated,
        truncated=terminated & False,
        is_reset=rows["done"],
        episode_step=np.concatenate([rows["episode_step"], episode_step[None]]).astype(np.int32),
        forced_reset=np.zeros(GAMES, bool),
    )
    return rows["frames"], rows["actions"].astype(np.int32), steps


def chain_buffer(own, args):
    """A buffer full of `chain`'s transitions."""
    images, actions, steps = chain(np.random.default_rng(0), 400)
    env_state = init_env_state(args, range(GAMES))
    frames = envs.Frames(np.concatenate([env_state.history, images]), steps.episode_step[:-1], (0,))
    values = np.zeros((400, GAMES), np.float32)
    rollout = offpolicy.Rollout(frames, actions, values, values, env_state, jax.random.PRNGKey(0), jnp.int32(400))
    return own.insert(offpolicy.make_buffer(args, own.mesh, {}), (rollout,), (steps,))


def learnt_values(updates, **flags):
    """What is learnt in so many updates of the values of all actions, right ones [3] and the rooms' others [3, 14]."""
    args = make_args(
        num_actors=1, num_steps=400, buffer_size=400 * GAMES, n_step=1, v_min=-1, v_max=4, gamma=0.9, batch_size=64,
        frame_stack=1, hidden=32, target_network_frequency=10, per_alpha=0, adam_eps=1e-8, **PLAIN | flags,
    )  # fmt: skip
    own = programs(apex, args)
    buffer, state, watch = chain_buffer(own, args), new_state(args), runs.Stopwatch()
    for i in range(0, updates, 10):
        state = state._replace(global_step=jax.device_put(jnp.int32(i), devices.shardings(own.mesh, REPLICATED)))
        state, buffer, _ = own.run_updates(state, buffer, 10, 1.0, watch)
    values = np.asarray(apex.mean_q(own.agent.support, jax.jit(own.agent.apply)(state.params, ROOMS)))
    return np.array([values[i, i + 1] for i in range(3)]), np.array([np.delete(values[i], i + 1) for i in range(3)])


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.optimised
@pytest.mark.parametrize(("updates", "flags", "wrong_values", "atol"), [
    (200, {"num_atoms": 31, "learning_rate": "0:3e-3,150:1e-4"}, [0.1, 0, 0], 0.25),
    slow(200, {"num_atoms": 1, "learning_rate": "0:3e-3,150:1e-4"}, [0.1, 0, 0], 0.25),
    slow(200, {"num_atoms": 99, "num_quantiles": 4, "learning_rate": "0:3e-3,150:1e-4"}, [0.1, 0, 0], 0.25),
    # A sure choice costs nothing; a wrong one in room 0, from where most is known, 0.9 times the bound of -1.
    slow(300, {"num_quantiles": 4, "munchausen_alpha": 0.9, "learning_rate": "0:1e-3,250:1e-4"}, [0.1 - 0.9], 0.15),
], ids=["atoms", "mean", "quantiles", "munchausen"])  # fmt: skip
def test_values_of_a_known_game_are_learnt(updates, flags, wrong_values, atol):
    right, wrong = learnt_values(updates, **flags)
    np.testing.assert_allclose(right, [0.9 * 2.8, 2.8, 2], atol=0.25)
    np.testing.assert_allclose(wrong.mean(axis=1)[: len(wrong_values)], wrong_values, atol=atol)


def test_encoder_before_the_dueling_streams_has_no_dense_layer():
    args = make_args(hidden=24)
    shapes = jax.eval_shape(partial(apex.init_state, args, apex.make_agent(args))).params["params"]
    assert shapes["Dense_0"]["kernel"].shape == (32 * 32 * 8, 24)
