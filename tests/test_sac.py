"""SAC: its losses against float64 NumPy, and a game with known values; tests/test_apex_run.py has whole runs."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import init_state
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import cql, softmax
from test_apex_math import GAMES, ROOMS, chain_buffer, init_env_state, programs
from test_apex_run import SAC

import sac_procgen as sac
from common import augment, devices, networks, offpolicy, replay, runs
from common.devices import REPLICATED

relaxed = settings(deadline=None, max_examples=10)
PLAIN = {"dropout": 0.0, "augment": "", "num_devices": 1}
ADDITIONS = {"average_q": True, "q_clip": 0.5, "entropy_penalty": 0.5}  # of Zhou et al. 2022 (docs/sac.md)


# LOSSES


def random_outputs(rng, size):
    values, next_target_values, target_values = rng.normal(size=(3, size, 2, 15))
    logits, next_logits, target_logits = rng.normal(size=(3, size, 15))
    outputs = sac.Outputs(values, logits, next_logits, next_target_values, target_values, target_logits)
    batch = replay.Batch(
        frames=None, next_frames=None, actions=rng.integers(0, 15, size).astype(np.int32),
        returns=np.float32(rng.normal(size=size)), discounts=np.float32(rng.random(size) * (rng.random(size) < 0.8)),
        weight=np.float32(rng.random(size)), row=None, env=None, keys=None,
    )  # fmt: skip
    return jax.tree.map(np.float32, outputs), batch


def by_hand(args, outputs, constant, alpha, batch):
    """The terms in float64, a sample and an action at a time; no gradient flows through `constant`."""

    def one(values):
        return (values[0] + values[1]) / 2 if args.average_q else min(values[0], values[1])

    names = "q_loss", "policy_loss", "entropy", "loss", "td_error", "q_values", "q_difference", "cql_loss"
    rows = {name: [] for name in names}
    for i in range(len(batch.actions)):
        a, p, q = batch.actions[i], softmax(constant.next_logits[i]), np.float64(constant.next_target_q_values[i])
        following = sum(p[b] * (one(q[:, b]) - alpha * np.log(p[b])) for b in range(15))
        target = float(batch.returns[i]) + float(batch.discounts[i]) * following
        q_loss, both = 0.0, np.float64(outputs.q_values[i, :, a])
        for k in range(2):
            value, old = float(outputs.q_values[i, k, a]), float(constant.target_q_values[i, k, a])
            square = (value - target) ** 2
            if args.q_clip:
                value_clipped = old + min(max(value - old, -args.q_clip), args.q_clip)
                square = max(square, (value_clipped - target) ** 2)
            q_loss += float(batch.weight[i]) * square / 2
        p, q = softmax(outputs.logits[i]), np.float64(constant.q_values[i])
        policy = sum(p[b] * (alpha * np.log(p[b]) - one(q[:, b])) for b in range(15))
        entropy = -sum(p * np.log(p))
        total = q_loss + policy
        if args.entropy_penalty:
            old = softmax(constant.target_logits[i])
            total += args.entropy_penalty / 2 * (entropy + sum(old * np.log(old))) ** 2
        penalty = sum(cql(outputs.q_values[i, k], a)[0] for k in range(2))
        total += args.cql_alpha * float(batch.weight[i]) * penalty
        td, difference = abs(target - both.mean()), abs(both[0] - both[1])
        for name, x in zip(names, (q_loss, policy, entropy, total, td, both.mean(), difference, penalty), strict=True):
            rows[name].append(x)
    return {name: np.array(x) for name, x in rows.items() if name != "cql_loss" or args.cql_alpha}


@relaxed
@given(st.integers(0, 2**32 - 1), st.sampled_from([{}, ADDITIONS | {"cql_alpha": 0.7}, {"q_clip": 0.3}]))
def test_losses_and_gradients_of_random_outputs_equal_those_by_hand(seed, flags):
    rng, size = np.random.default_rng(seed), 3
    args = sac.Args(**flags)
    outputs, batch = random_outputs(rng, size)
    alpha = float(np.exp(rng.normal() - 1))
    got = sac.sac_loss_terms(args, outputs, alpha, batch)
    want = by_hand(args, outputs, outputs, alpha, batch)
    assert got.keys() == want.keys()
    for name, x in want.items():
        np.testing.assert_allclose(got[name], x, rtol=1e-3, atol=1e-4, err_msg=name)

    grads = jax.grad(lambda outputs: sac.sac_loss_terms(args, outputs, alpha, batch)["loss"].sum())(outputs)
    small = 1e-5

    def change(field, index):
        """Central differences of the sum, in float64, of one number."""
        sums = []
        for sign in (1, -1):
            moved = {name: np.float64(x) for name, x in outputs._asdict().items()}
            moved[field][index] += sign * small
            sums.append(by_hand(args, sac.Outputs(**moved), outputs, alpha, batch)["loss"].sum())
        return (sums[0] - sums[1]) / (2 * small)

    for i in range(size):
        seen = "q_values", (i, int(rng.integers(2)), batch.actions[i])
        any_action = "q_values", (i, int(rng.integers(2)), int(rng.integers(15)))  # which CQL's penalty lowers
        for field, index in (seen, any_action, ("logits", (i, int(rng.integers(15))))):
            np.testing.assert_allclose(
                getattr(grads, field)[index], change(field, index), rtol=2e-2, atol=2e-3, err_msg=field
            )
    for field in ("next_logits", "next_target_q_values", "target_q_values", "target_logits"):
        assert not np.any(getattr(grads, field)), field


def test_temperature_moves_towards_the_target_entropy_and_stays_in_its_range():
    args, update = sac.Args(target_entropy_scale=0.5, alpha_learning_rate=0.1), sac.update_temperature
    target = 0.5 * np.log(15)
    np.testing.assert_allclose(update(args, jnp.float32(-2), target - 0.3), -2 + 0.03, rtol=1e-5)
    np.testing.assert_allclose(update(args, jnp.float32(-2), target + 0.3), -2 - 0.03, rtol=1e-5)
    np.testing.assert_allclose(update(args, jnp.log(jnp.float32(9.9)), -1e3), np.log(10), rtol=1e-5)
    np.testing.assert_allclose(update(args, jnp.log(jnp.float32(1e-5)), 1e3), np.log(1e-6), rtol=1e-5)
    bounded = replace(args, min_alpha=3e-3)
    np.testing.assert_allclose(update(bounded, jnp.log(jnp.float32(4e-3)), 1e3), np.log(3e-3), rtol=1e-5)


def different_networks(**flags):
    """Arguments, an agent, its state with a target network of another seed, and a batch of random frames."""
    args = sac.Args(**SAC | PLAIN | flags)
    agent, rng = sac.make_agent(args), np.random.default_rng(0)
    state = init_state(sac, args, agent)
    loud = jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype(np.float32), state.params["agent"])
    state = state._replace(params=state.params | {"agent": loud})
    frames = rng.integers(0, 256, (2, args.batch_size, 64, 64, 6), np.uint8)
    _, batch = random_outputs(rng, args.batch_size)
    batch = batch._replace(
        frames=frames[0], next_frames=frames[1], row=np.arange(args.batch_size), env=np.zeros(args.batch_size, int),
        keys=jax.random.split(jax.random.PRNGKey(0), args.batch_size),
    )  # fmt: skip
    return args, agent, state, batch


def test_heads_of_random_features_equal_those_by_hand():
    args, agent, state, batch = different_networks()
    online = state.params["agent"]
    logits, values = jax.jit(agent.apply)(online, batch.frames)
    features = np.float64(agent.apply(online, batch.frames, method="encode"))
    for name, head in {"policy": logits, "q1": values[:, 0], "q2": values[:, 1]}.items():
        hidden, last = (online["params"][name][f"layers_{i}"] for i in (0, 2))
        hidden = np.maximum(0, features @ hidden["kernel"] + hidden["bias"])
        np.testing.assert_allclose(head, hidden @ last["kernel"] + last["bias"], rtol=1e-3, atol=1e-4)
    first = init_state(sac, args, agent).params["agent"]["params"]["policy"]["layers_2"]["kernel"]
    assert np.linalg.norm(first, 2) == pytest.approx(0.01, rel=1e-3)  # nearly uniform


def test_loss_with_all_terms_asks_the_right_network_about_the_right_frames():
    """Frames and next frames are transformed apart, and only the online network's features of frames are dropped."""
    args, agent, state, batch = different_networks(augment="translate", augment_prob=1.0, dropout=0.5, **ADDITIONS)
    online, target = state.params["agent"], state.target_params
    keys, next_keys, dropout_keys = (jax.vmap(jax.random.fold_in, in_axes=(0, None))(batch.keys, i) for i in range(3))
    frames, next_frames = augment.augment(args, keys, batch.frames), augment.augment(args, next_keys, batch.next_frames)
    assert (augment.augment(args, keys, batch.next_frames) != next_frames).any()
    whole = agent.apply(online, frames, method="encode")
    features = networks.dropout(whole, dropout_keys, 0.5)
    assert 0.2 < (features[whole != 0] == 0).mean() < 0.8
    target_logits, target_values = agent.apply(target, frames)
    outputs = sac.Outputs(
        agent.apply(online, features, method="q_values"), agent.apply(online, features, method="logits"),
        next_logits=agent.apply(online, next_frames)[0], next_target_q_values=agent.apply(target, next_frames)[1],
        target_q_values=target_values, target_logits=target_logits,
    )  # fmt: skip
    assert np.abs(outputs.q_values - target_values).max() > 0.1
    want = sac.sac_loss_terms(args, outputs, 0.3, batch)
    got = sac.loss(args, agent, online, batch, target_params=target, alpha=0.3)
    for name, x in want.items():
        np.testing.assert_allclose(got[name], x, rtol=1e-4, atol=1e-5, err_msg=name)


def test_train_step_moves_the_target_and_the_temperature_and_lowers_the_loss():
    args, agent, state, batch = different_networks(
        tau=0.1, target_network_frequency=3, per_alpha=1.0, learning_rate="0:6e-4,100:0"
    )
    train_step = jax.jit(partial(sac.train_step, args, agent))
    for updates in (0, 1):  # and the third moves it
        new, _, _ = train_step(state._replace(updates=jnp.asarray(updates, state.updates.dtype)), batch)
        jax.tree.map(np.testing.assert_array_equal, new.target_params, state.target_params)
    new, td, metrics = train_step(state._replace(updates=jnp.asarray(2, state.updates.dtype)), batch)
    want = jax.tree.map(lambda x, old: old + 0.1 * (x - old), new.params["agent"], state.target_params)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), new.target_params, want)
    moved = sac.update_temperature(args, state.params["log_alpha"], metrics["losses/entropy"])
    np.testing.assert_allclose(new.params["log_alpha"], moved, rtol=1e-5)
    np.testing.assert_allclose(metrics["losses/alpha"], np.exp(moved), rtol=1e-5)
    still, _, _ = jax.jit(partial(sac.train_step, sac.Args(**vars(args) | {"autotune": False}), agent))(state, batch)
    assert still.params["log_alpha"] == state.params["log_alpha"]
    assert (td >= 0).all()
    # Sample by sample, not weighted, at the temperature that is tuned, and with a step size by steps.
    warm = state._replace(global_step=jnp.int32(50), params=state.params | {"log_alpha": jnp.float32(-1)})
    want = sac.loss(args, agent, warm.params["agent"], batch, target_params=warm.target_params, alpha=np.exp(-1))
    _, td, metrics = train_step(warm, batch)
    np.testing.assert_allclose(td, want["td_error"], rtol=1e-3, atol=1e-4)
    for name in ("policy_loss", "entropy"):
        np.testing.assert_allclose(metrics[f"losses/{name}"], want[name].mean(), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(metrics["charts/learning_rate"], 3e-4, rtol=1e-4)
    learner, losses = state, []
    for _ in range(10):
        learner, _, metrics = train_step(learner, batch)
        losses.append(float(metrics["losses/q_loss"]))
    assert losses[-1] < 0.9 * losses[0]
    assert learner.opt_state[1].count == 10  # Adam's moments go from update to update


@pytest.mark.parametrize("average_q", [False, True])
def test_act_records_the_learners_values(average_q):
    args, agent, state, _ = different_networks(average_q=average_q, sticky_actions=0.0, alpha=0.5)
    env_state, act = init_env_state(args, range(4)), jax.jit(partial(sac.act, args, agent))
    obs = np.random.default_rng(1).integers(0, 256, (4, 3, 64, 64), np.uint8)
    rollout, played = act(state.params, offpolicy.begin_rollout(args, env_state, 0), obs, np.zeros(4, np.int32))
    stacks = np.concatenate([obs.transpose(0, 2, 3, 1)] * 2, axis=-1)  # the first frame stands for those before
    logits, values = (np.float64(x) for x in jax.jit(agent.apply)(state.params["agent"], stacks))
    one = values.mean(axis=1) if average_q else values.min(axis=1)
    np.testing.assert_array_equal(rollout.actions[0], played)
    for i in range(4):
        p = softmax(logits[i])
        soft = sum(p * (one[i] - 0.5 * np.log(p)))
        np.testing.assert_allclose(rollout.state_value[0, i], soft, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(rollout.action_value[0, i], values[i, :, played[i]].mean(), rtol=1e-3, atol=1e-4)


def test_act_and_evaluation_sample_the_policy():
    args, agent, state, batch = different_networks(sticky_actions=0.5)
    act, obs = jax.jit(partial(sac.act, args, agent)), np.zeros((256, 3, 64, 64), np.uint8)
    env_state = init_env_state(args, range(256))._replace(last_action=jnp.full(256, 7, jnp.int32))
    begun, fresh = offpolicy.begin_rollout(args, env_state, 0), init_state(sac, args, agent).params  # nearly uniform
    rollout, played = act(fresh, begun, obs, np.ones(256, np.int32))
    actions = np.asarray(rollout.actions[0])
    assert len(np.unique(actions)) == 15
    assert (actions[np.asarray(played) != actions] == 0).any()  # what sticks is drawn apart from what is chosen
    last = state.params["agent"]["params"]["policy"]["layers_2"]
    last["bias"] = last["bias"] + 50 * (np.arange(15) == 3)
    rollout, _ = act(state.params, begun, obs, np.ones(256, np.int32))
    policy = sac.make_policy(args, agent, devices.make_mesh(args))
    chosen, _ = policy(state.params["agent"], batch.frames, None, jax.random.PRNGKey(0), None)
    assert {*np.asarray(rollout.actions[0]).tolist(), *np.asarray(chosen).tolist()} == {3}


def test_encoder_without_the_critics_loss_has_no_gradient():
    args, agent, state, batch = different_networks()
    batch = batch._replace(weight=np.zeros(args.batch_size, np.float32))

    def total(params, target):
        return sac.loss(args, agent, params, batch, target_params=target, alpha=0.1)["loss"].sum()

    grads = jax.jit(jax.grad(total, (0, 1)))(state.params["agent"], state.target_params)
    heads, of_target = (x["params"] for x in grads)
    assert not any(np.any(x) for x in jax.tree.leaves([heads["encoder"], heads["q1"], heads["q2"]]))
    assert any(np.any(x) for x in jax.tree.leaves(heads["policy"]))
    assert not any(np.any(x) for x in jax.tree.leaves(of_target))


@pytest.mark.optimised
@pytest.mark.slow
@pytest.mark.parametrize("flags", [
    {}, ADDITIONS, {"autotune": True, "alpha": 0.1, "alpha_learning_rate": 0.05, "learning_rate": "0:3e-3,300:1e-4"},
], ids=["plain", "additions", "autotune"])  # fmt: skip
def test_values_of_a_known_game_are_learnt(flags):
    """Three rooms in a row, of which `chain` says what they pay; the temperature is low enough not to matter. Or it is
    tuned, and the policy has the entropy asked for. At three times the step size a policy without these remedies soon
    has nothing left for an action that proves to be better."""
    args = sac.Args(**SAC | PLAIN | {
        "num_envs": GAMES, "num_actors": 1, "num_steps": 400, "buffer_size": 400 * GAMES, "n_step": 1, "gamma": 0.9,
        "batch_size": 64, "frame_stack": 1, "learning_rate": "0:1e-3,300:1e-4", "hidden": 32, "per_alpha": 0.0,
        "tau": 0.2, "target_network_frequency": 1, "alpha": 0.01, "autotune": False,
        "learning_starts": 400 * GAMES,
    } | flags)  # fmt: skip
    own = programs(sac, args)
    agent, buffer, state = own.agent, chain_buffer(own, args), init_state(sac, args, own.agent)
    for i in range(0, 400, 20):
        global_step = jax.device_put(jnp.int32(i), devices.shardings(own.mesh, REPLICATED))
        state, buffer, _ = own.update(state._replace(global_step=global_step), buffer, 20, 1.0)
    logits, values = jax.device_get(jax.jit(agent.apply)(state.params["agent"], ROOMS))
    if args.autotune:
        frames = offpolicy.sample(args, buffer, 0, 1.0).frames
        entropy = sac.policy_entropy(agent.apply(state.params["agent"], frames)[0])
        assert entropy.mean() == pytest.approx(args.target_entropy_scale * np.log(15), abs=0.3)
        return
    values, best = values.mean(axis=1), np.arange(3) + 1
    np.testing.assert_allclose(values[np.arange(3), best], [0.9 * 2.8, 2.8, 2], atol=0.3)
    np.testing.assert_allclose([np.delete(values[i], i + 1).mean() for i in range(3)], [0.1, 0, 0], atol=0.3)
    assert (logits.argmax(axis=1) == best).all()


def test_min_alpha_above_alpha_is_accepted_in_a_resume_alone():
    with pytest.raises(runs.UsageError, match=r"at most --alpha, 0\.01"):
        sac.Args(min_alpha=0.02).check_training()
    runs.check_flags(sac.Args(min_alpha=0.02))
    sac.Args(min_alpha=0.02, resume="runs/x").check_training()
