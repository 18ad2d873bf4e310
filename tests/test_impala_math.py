"""V-trace, IMPALA's loss and update against independent oracles."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import init_state
from hypothesis import given
from hypothesis import strategies as st
from rollouts import normal, random_steps, relaxed, seeds

import apex_procgen as apex
import impala_procgen as impala
import ppg_procgen as ppg
import ppo_procgen as ppo
import rnd_montezuma as rnd
from common import augment, devices, envs, networks, runs
from common.devices import ENV_SHARDED, REPLICATED
from common.rewards import init_return_filter, prepare_rewards

STEPS, NUM_ENVS = 12, 4
bars = st.sampled_from([0.5, 1.0, 2.0])


def bars_of(args):
    return {name: getattr(args, name) for name in ("rho_bar", "c_bar", "pg_rho_bar", "vtrace_lambda")}


compiled_vtrace = jax.jit(impala.vtrace)


@relaxed
@given(seeds, st.sampled_from([1, 2, 7, 14]), st.floats(0, 1), st.floats(0, 1), bars, bars, bars)
def test_vtrace_over_ends_equals_the_papers_formula(seed, length, gamma, vtrace_lambda, rho_bar, c_bar, pg_rho_bar):
    """Across episode ends, truncations and junk steps."""
    args = impala.Args(rho_bar=rho_bar, c_bar=c_bar, pg_rho_bar=pg_rho_bar, vtrace_lambda=vtrace_lambda)
    rng = np.random.default_rng(seed)
    steps = jax.tree.map(lambda x: x[..., 0], random_steps(rng, length, 1))
    values, log_ratio = normal(rng, length + 1, scale=3), normal(rng, length, scale=0.7)
    rewards = np.where(steps.is_reset, 1e6, steps.rewards)  # whatever stands at a junk step
    targets, advantages, weights = compiled_vtrace(
        log_ratio, rewards, values, steps.terminated, steps.is_reset, gamma=gamma, **bars_of(args)
    )
    want = oracle.vtrace(args, log_ratio, steps.rewards, values, steps.terminated, steps.is_reset, gamma)
    for g, w in zip((targets, weights * advantages), want, strict=True):
        np.testing.assert_allclose(np.asarray(g)[~steps.is_reset], w[~steps.is_reset], rtol=2e-4, atol=2e-4)


@pytest.mark.optimised
def test_vtrace_unrolled_as_on_a_gpu_is_the_same_bit_for_bit(monkeypatch):
    """As it runs on a GPU, here with a rest that does not fill a turn."""
    rng, args = np.random.default_rng(0), impala.Args()
    log_ratio, rewards, values = normal(rng, 75), normal(rng, 75), normal(rng, 76)
    terminated, is_reset = rng.random((2, 75)) < 0.1

    def correct():
        of = partial(impala.vtrace, gamma=0.97, **bars_of(args))
        return jax.jit(lambda: of(log_ratio, rewards, values, terminated, is_reset))()

    want = correct()
    monkeypatch.setattr(devices, "scan_unroll", lambda: 32)
    for got, one in zip(correct(), want, strict=True):
        np.testing.assert_array_equal(got, one)


def make_args(**flags):
    return impala.Args(**{
        "num_envs": NUM_ENVS, "num_steps": STEPS, "num_minibatches": 2, "update_epochs": 2, "encoder": "nature",
        "width": 1, "hidden": 8, "learning_rate": "0.001", "pool": "flatten",
    } | flags)  # fmt: skip


def random_unrolls(rng, args, size=NUM_ENVS):
    shape = args.num_steps, size
    steps, empty = random_steps(rng, *shape), impala.empty_unrolls(args, size)
    images = rng.integers(0, 256, empty.frames.images.shape, np.uint8)
    return impala.UnrollBatch(
        frames=empty.frames.replace(images=images, episode_steps=steps.episode_step),
        hidden_state=jax.tree.map(lambda x: normal(rng, *x.shape), empty.hidden_state),
        batch=impala.Batch(
            rng.integers(0, 15, shape, np.int32), normal(rng, *shape, 15), steps.rewards,
            steps.terminated, steps.is_reset,
        ),
    )  # fmt: skip


def make_minibatch(args, unrolls):
    """All of them, in their order."""
    index = jnp.arange(unrolls.batch.is_reset.shape[1])
    return jax.jit(partial(impala.make_minibatch, args))(unrolls, index, jax.random.PRNGKey(5))


def outputs(agent, params, unrolls):
    """Logits [T, N, 15] and values [T + 1, N], one step after the other."""
    hidden_state, logits, values = jax.tree.map(lambda x: x[0], unrolls.hidden_state), [], []
    frames = jax.tree.map(jnp.asarray, unrolls.frames)
    apply = jax.jit(lambda t, hidden_state: agent.apply(params, frames.stack(t), frames.is_first[t], hidden_state))
    for t in range(STEPS + 1):
        l, v, hidden_state = apply(t, hidden_state)  # noqa: E741
        logits.append(l[:, 0])
        values.append(v[:, 0])
    return np.stack(logits[:-1]), np.stack(values)


@pytest.mark.parametrize(
    "core", [pytest.param("none", marks=pytest.mark.slow), "lstm", pytest.param("gru", marks=pytest.mark.slow)]
)
def test_loss_of_each_core_equals_the_sums_by_hand(core):
    """Of each game, since the oracle averages over one."""
    args = make_args(core=core, vf_coef=0.7, rho_bar=0.9, c_bar=0.8, pg_rho_bar=0.7, vtrace_lambda=0.95)
    agent, unrolls = impala.make_agent(args), random_unrolls(np.random.default_rng(0), args)
    params = init_state(impala, args, agent).params
    logits, values = outputs(agent, params, unrolls)
    minibatch = make_minibatch(args, unrolls)
    terms = jax.jit(partial(impala.loss, args, agent, gamma=0.9, ent_coef=0.02))(params, minibatch)
    for n in range(NUM_ENVS):
        game = jax.tree.map(lambda x: x[:, n], unrolls.batch)  # noqa: B023
        want_total, want = oracle.impala_loss(args, 0.02, logits[:, n], values[:, n], game, 0.9)
        for name, x in (want | {"loss": want_total}).items():
            got = terms[name][n][~game.is_reset].mean()
            np.testing.assert_allclose(got, x, rtol=1e-3, atol=1e-3, err_msg=name)


def test_gradient_of_the_loss_takes_targets_and_advantages_as_constants():
    """The policy loss moves no value, and the value loss no policy; Espeholt et al. 2018, section 4.2."""
    args, rng = make_args(rho_bar=0.9, pg_rho_bar=0.7), np.random.default_rng(0)
    steps, actions = jax.tree.map(lambda x: x.T, random_steps(rng, 6, 2)), rng.integers(0, 15, (2, 6), np.int32)
    batch = impala.Batch(actions, normal(rng, 2, 6, 15), steps.rewards, steps.terminated, steps.is_reset)
    logits, values = normal(rng, 2, 6, 15), normal(rng, 2, 7)
    targets, advantages, weights, _ = impala.vtrace_targets(args, jax.nn.log_softmax(logits), values, batch, gamma=0.9)

    def slopes(name):
        def total(logits, values):
            return impala.impala_loss_terms(args, jax.nn.log_softmax(logits), values, batch, gamma=0.9)[name].sum()

        return jax.jit(jax.grad(total, (0, 1)))(logits, values)

    of_logits, of_values = slopes("policy_loss")
    want = np.asarray(weights * advantages)[..., None] * (jax.nn.softmax(logits) - np.eye(15)[actions])
    np.testing.assert_allclose(of_logits, want, rtol=1e-4, atol=1e-5)
    assert not of_values.any()
    of_logits, of_values = slopes("value_loss")
    assert not of_logits.any()
    np.testing.assert_allclose(of_values[:, :-1], values[:, :-1] - targets, rtol=1e-4, atol=1e-5)
    assert not of_values[:, -1].any()


def test_clipped_loss_after_an_update_has_the_targets_from_before_it():
    """By hand: V-trace by the parameters from before, its advantages normalised over the batch and then weighted, and
    PPO's surrogate."""
    args = make_args(clip_coef=0.2, rho_bar=0.9, c_bar=0.8, pg_rho_bar=0.7, vtrace_lambda=0.95, dropout=0.5)
    agent, rng = impala.make_agent(args), np.random.default_rng(0)
    unrolls, before = random_unrolls(rng, args), init_state(impala, args, agent).params
    after = jax.tree.map(lambda x: x + normal(rng, *x.shape, scale=0.1), before)
    unrolls = jax.jit(partial(impala.precompute_targets, args, agent, gamma=0.9))(before, unrolls)
    old, new = outputs(agent, before, unrolls), outputs(agent, after, unrolls)
    kept, actions = ~unrolls.batch.is_reset, unrolls.batch.actions[..., None]
    acted, log_prob, moved = (
        np.take_along_axis(np.asarray(jax.nn.log_softmax(x)), actions, axis=-1)[..., 0]
        for x in (unrolls.batch.logits, old[0], new[0])
    )
    targets, advantages = np.zeros((2, STEPS, NUM_ENVS))
    for n in range(NUM_ENVS):
        game = jax.tree.map(lambda x: x[:, n], unrolls.batch)  # noqa: B023
        ends = game.terminated, game.is_reset
        ratio = (log_prob - acted)[:, n]
        targets[:, n], advantages[:, n] = oracle.vtrace(args, ratio, game.rewards, old[1][:, n], *ends, 0.9)
    weights = np.minimum(args.pg_rho_bar, np.exp(log_prob - acted))
    advantages /= weights  # the oracle's are weighted
    advantages = weights * (advantages - advantages[kept].mean()) / advantages[kept].std()
    old_targets = unrolls.batch.old_targets
    np.testing.assert_allclose(old_targets.targets[kept], targets[kept], rtol=1e-3, atol=1e-3)
    got = old_targets.weights * old_targets.advantages
    np.testing.assert_allclose(got[kept], advantages[kept], rtol=1e-3, atol=1e-3)
    inputs, batch = make_minibatch(args, unrolls)
    assert len(np.unique(np.asarray(inputs.keys).reshape(-1, 2), axis=0)) == NUM_ENVS * STEPS  # of dropout
    without_dropout = inputs._replace(keys=None), batch
    terms = jax.jit(partial(impala.loss, args, agent, gamma=0.9, ent_coef=0.02))(after, without_dropout)
    ratio = np.exp(moved - log_prob)
    assert (np.abs(ratio - 1)[kept] > 0.2).any()
    np.testing.assert_array_equal(terms["clipfrac"].T[kept], (np.abs(ratio - 1) > 0.2)[kept])
    want = -np.minimum(ratio * advantages, ratio.clip(0.8, 1.2) * advantages)
    np.testing.assert_allclose(terms["policy_loss"].T[kept], want[kept], rtol=2e-3, atol=2e-3)
    want = (new[1][:-1] - targets) ** 2 / 2
    np.testing.assert_allclose(terms["value_loss"].T[kept], want[kept], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        (3, {"dropout": 0.5, "augment": "translate", "augment_mode": "drac", "drac_coef": 1}),
        pytest.param(4, {"core": "lstm", "augment": "flip"}, marks=pytest.mark.slow),
    ],
)
def test_gradient_in_chunks_on_devices_equals_that_of_the_whole_batch(size, flags, monkeypatch):
    """By sequence, and of that a few frames at a time, on one core or four; or as an accelerator does it."""
    args = make_args(num_envs=size, num_actors=1, num_minibatches=1, **flags)
    agent, unrolls = impala.make_agent(args), random_unrolls(np.random.default_rng(1), args, size)
    params, minibatch = init_state(impala, args, agent).params, make_minibatch(args, unrolls)

    def gradient(params, minibatch):
        minibatch_loss = partial(impala.loss, args, agent, gamma=0.9, ent_coef=0.01)
        return devices.gradient(minibatch_loss, params, minibatch, ~minibatch[1].is_reset)

    mesh = devices.make_mesh(replace(args, num_devices=1 if size % 4 else 4))
    specs = {"in_specs": (REPLICATED, ENV_SHARDED), "out_specs": (REPLICATED, REPLICATED, ENV_SHARDED)}
    got = jax.jit(jax.shard_map(gradient, mesh=mesh, check_vma=False, **specs))(params, minibatch)
    monkeypatch.setattr(devices, "on_cpu", lambda: False)
    want = jax.jit(lambda *arrays: gradient(*arrays))(params, minibatch)
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


def test_value_after_the_last_step_is_a_constant_and_of_the_hidden_state_there():
    frames = jnp.asarray(np.random.default_rng(0).integers(0, 256, (3, 5, 2, 2, 3), np.uint8))
    inputs = impala.Inputs(frames, jnp.zeros((3, 5), bool), jnp.full((3, 1), 10.0), None)

    def values(params):
        return impala.forward(Table, params, inputs, frames[:, :-1])[1]

    np.testing.assert_array_equal(values(2.0), 2 * frames.sum(axis=(2, 3, 4)) + np.array([0, 0, 0, 0, 14]))
    slopes = jax.jacobian(values)(2.0)
    np.testing.assert_array_equal(slopes[:, :-1], frames[:, :-1].sum(axis=(2, 3, 4)))
    assert not slopes[:, -1].any()


@pytest.mark.slow
def test_loss_with_augmentation_is_of_transformed_frames_or_regularised():
    args = make_args()
    agent, unrolls = impala.make_agent(args), random_unrolls(np.random.default_rng(2), args)
    params = init_state(impala, args, agent).params
    inputs, batch = make_minibatch(make_args(augment="grayscale"), unrolls)
    images = inputs.frames.reshape(-1, *inputs.frames.shape[2:])
    grey = jax.vmap(augment.grayscale, (None, 0))(None, images).reshape(inputs.frames.shape)
    grey = grey.at[:, -1].set(inputs.frames[:, -1])  # what comes after the last step is only valued

    @partial(jax.jit, static_argnums=0)
    def terms(args, frames):
        return impala.loss(args, agent, params, (inputs._replace(frames=frames), batch), gamma=0.9, ent_coef=0.01)

    flags = {"augment": "grayscale", "augment_prob": 1.0}
    plain, of_grey, rad = terms(args, inputs.frames), terms(args, grey), terms(make_args(**flags), inputs.frames)
    drac = terms(make_args(**flags, augment_mode="drac", drac_coef=0.5), inputs.frames)
    for name, want in of_grey.items():
        np.testing.assert_allclose(rad[name], want, rtol=1e-4, atol=1e-5)
    assert (rad["loss"] != plain["loss"]).any()
    seen = inputs.frames[:, :-1], grey[:, :-1]
    flat = [agent.apply(params, x.reshape(-1, 64, 64, 6), jnp.zeros(x.shape[0] * x.shape[1], bool), ()) for x in seen]
    (logits, values, _), (new_logits, new_values, _) = flat
    want = augment.drac_loss(logits, values, new_logits, new_values).reshape(NUM_ENVS, STEPS)
    np.testing.assert_allclose(drac["drac_loss"], want, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(drac["loss"], plain["loss"] + 0.5 * want, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module", params=[pytest.param("none", marks=pytest.mark.slow), "gru"])
def tiny(request):
    """Arguments whose learning rate is 0 from step 1,000 on, their agent and compiled update, and a generator."""
    args = make_args(core=request.param, num_steps=75, num_actors=2, sticky_actions=0.25,
                     learning_rate="0:0.001,999:0.001,1000:0")  # fmt: skip
    agent = impala.make_agent(args)
    update = impala.make_update(args, agent, devices.make_mesh(args))
    return SimpleNamespace(args=args, agent=agent, update=update, rng=np.random.default_rng(0))


@pytest.mark.parametrize("script", [ppo, ppg, impala, rnd, apex], ids=lambda script: script.SCRIPT)
def test_gradients_above_the_maximum_norm_are_clipped_before_adam(script):
    optimizer, grad = script.make_optimizer(script.Args(max_grad_norm=0.5, adam_eps=0.1)), np.float32([3, -4])
    direction, _ = optimizer.update(grad, optimizer.init(grad))
    np.testing.assert_allclose(direction, 0.1 * grad / (0.1 * np.abs(grad) + 0.1), rtol=1e-4)


def test_rmsprop_from_zero_is_the_papers_with_bias_correction():
    args = make_args(optimizer="rmsprop", adam_eps=0.01, max_grad_norm=0.0)
    optimizer, square = impala.make_optimizer(args), 0.0
    state = optimizer.init(np.zeros(3, np.float32))
    for i, grad in enumerate(np.random.default_rng(0).normal(size=(3, 3)), 1):
        direction, state = optimizer.update(np.float32(grad), state)
        square = 0.99 * square + 0.01 * grad**2
        np.testing.assert_allclose(direction, grad / np.sqrt(square / (1 - 0.99**i) + 0.01), rtol=1e-4)


def run_update(tiny, unrolls, state=None):
    state = init_state(impala, tiny.args, tiny.agent) if state is None else state
    return jax.device_get(tiny.update(jax.tree.map(jnp.copy, state), unrolls))


def test_update_with_other_junk_steps_gives_the_same_parameters(tiny):
    unrolls = random_unrolls(tiny.rng, tiny.args)
    batch = unrolls.batch
    junk = batch.is_reset
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


@pytest.mark.parametrize(
    ("pieces", "flags"),
    [
        (4, {"num_devices": 2, "dropout": 0.1, "clip_coef": 0.2}),
        pytest.param(2, {"num_devices": 1, "core": "gru"}, marks=pytest.mark.slow),
    ],
)
def test_update_in_pieces_equals_that_in_one(pieces, flags):
    """Of one minibatch each, so that the metrics are means over two pieces, or of one epoch each."""
    whole, results = make_args(**flags), []
    agent, unrolls = impala.make_agent(whole), random_unrolls(np.random.default_rng(3), whole)
    for args in (whole, replace(whole, update_pieces=pieces)):
        args.check()
        update = impala.make_update(args, agent, devices.make_mesh(args))
        results.append(jax.device_get(update(init_state(impala, args, agent), unrolls)))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), *results)


def test_update_from_a_batch_steps_against_the_gradient_and_draws_new_minibatches(tiny, monkeypatch):
    """Its step is against the gradient of the loss, and the next one's minibatches are other ones."""
    unrolls = random_unrolls(tiny.rng, tiny.args)
    before = init_state(impala, tiny.args, tiny.agent)
    after, _ = run_update(tiny, unrolls, before)
    minibatch = impala.make_minibatch(tiny.args, unrolls, np.arange(unrolls.batch.is_reset.shape[1]), None)

    @jax.jit
    @jax.grad
    def gradient(params):
        terms = impala.loss(tiny.args, tiny.agent, params, minibatch, gamma=0.99, ent_coef=0.01)
        return jnp.where(minibatch[1].is_reset, 0, terms["loss"]).sum()

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


def test_batches_of_successive_updates_have_normalised_rewards_and_draw_from_the_newest_unrolls():
    args = make_args(
        num_devices=1, replay_fraction=0.5, replay_size=6, num_actors=2, core="lstm", normalize_rewards=True,
        reward_clip=0.5, gamma="0:0.5,1000:0.99",
    )  # fmt: skip
    assemble_batch = impala.make_assemble_batch(args, devices.make_mesh(args))
    buffers, past, rng = impala.init_buffers(args), init_return_filter(NUM_ENVS), np.random.default_rng(0)
    seen, drawn, slots = {}, [], set()
    for i in range(9):
        rollouts = []
        for actor in range(2):
            # Each environment's hidden state carries a number: which update, which environment.
            number = jnp.float32(100 * i + actor) + 2 * jnp.arange(2.0)
            env_state = impala.init_env_state(args, np.arange(2))._replace(
                hidden_state=(jnp.tile(number[:, None], (1, 8)),) * 2
            )
            rollouts.append(impala.begin_rollout(args, env_state, i))
        timesteps = tuple(random_steps(rng, STEPS, NUM_ENVS // 2) for _ in range(2))
        steps = envs.join_envs(timesteps, axis=-1)
        buffers, unrolls = assemble_batch(buffers, tuple(rollouts), timesteps, 1000, i)
        numbers = np.asarray(unrolls.hidden_state[0][0, :, 0])
        assert numbers[:4].tolist() == [100 * i + k for k in range(4)]
        assert len(numbers) == 8
        np.testing.assert_array_equal(unrolls.batch.is_reset[:, :4], steps.is_reset)
        np.testing.assert_array_equal(unrolls.batch.terminated[:, :4], steps.terminated)
        old, (past, want) = np.asarray(past.var), prepare_rewards(args, past, steps, 0.99)
        np.testing.assert_allclose(unrolls.batch.rewards[:, :4], want, rtol=1e-5)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), buffers.reward_filter, past)
        assert old != past.var
        held = list(seen)[-6:] or numbers[:4]  # the first update has no older ones
        assert set(numbers[4:]) <= set(held)
        drawn += numbers[4:].tolist()
        if i > 1:  # the ring is full: which of its places were drawn?
            slots.add(tuple((4 * (numbers[4:] // 100) + numbers[4:] % 100) % 6))
        games = [jax.device_get(jax.tree.map(lambda x: x[:, k], unrolls)) for k in range(8)]  # noqa: B023
        seen |= dict(zip(numbers[:4], games[:4], strict=True))
        for number, game in zip(numbers[4:], games[4:], strict=True):  # all that belongs to an unroll comes together
            jax.tree.map(np.testing.assert_array_equal, game, seen[number])
    assert len({number % 100 for number in drawn}) == 4
    assert any(number < 100 * (i - 1) for i, number in zip(np.arange(36) // 4, drawn, strict=True))  # two updates old
    assert len(slots) > 1
    assert 6 <= buffers.written < 12


def test_update_without_lag_finds_the_actors_probabilities(tiny):
    """What the learner rebuilds (stacks, episode steps, hidden states) is what the actor saw: with no lag, on real
    games, all ratios are 1 as long as nothing is learnt, across episode ends and restarts."""
    args, agent = tiny.args, tiny.agent
    env_ids = np.arange(NUM_ENVS, dtype=np.int32).reshape(2, -1)
    vec_envs = [envs.ReplayableVecEnv(partial(envs.make_procgen, args), ids, 3, 150) for ids in env_ids]
    collect = impala.make_collect(args, agent)
    assemble_batch = impala.make_assemble_batch(args, devices.make_mesh(args))
    state, buffers = init_state(impala, args, agent), impala.init_buffers(args)
    state = state._replace(global_step=np.int32(1000))
    state.params["params"]["policy"]["kernel"] *= 3000  # it starts nearly uniform: no mistake would show
    state, env_states, ends = jax.device_get(state), [impala.init_env_state(args, ids) for ids in env_ids], 0
    for i in range(4):
        collected = [
            collect(vec_env, state.params, env_state, i=i, watch=runs.Stopwatch(), check_stop=lambda: None)
            for vec_env, env_state in zip(vec_envs, env_states, strict=True)
        ]
        unrolls, env_states = zip(*collected, strict=True)
        for unroll, env_state in zip(unrolls, env_states, strict=True):  # the next one continues from there
            images = unroll.rollout.frames.images
            np.testing.assert_array_equal(env_state.history, images[-1 - len(env_state.history) : -1])
        rollouts, timesteps = zip(*unrolls, strict=True)
        steps = envs.join_envs(timesteps, axis=-1)
        assert steps.forced_reset.all() == (i % 2 == 1)
        buffers, unrolls = assemble_batch(buffers, rollouts, timesteps, 0, i)
        ends += steps.episode_end.sum()
        _, metrics = run_update(tiny, unrolls, state)
        assert metrics["losses/entropy"] < 2.6
        assert abs(metrics["losses/approx_kl"]) < 1e-5
        assert abs(metrics["losses/rho"] - 1) < 1e-3
    assert ends > 0
    terms = jax.jit(partial(impala.loss, args, agent, gamma=0.99, ent_coef=0.01))(
        state.params, make_minibatch(args, unrolls)
    )
    error, target = (terms[name].T[~unrolls.batch.is_reset] for name in ("value_error", "target"))
    assert abs(metrics["losses/explained_variance"] - (1 - error.var() / target.var())) < 1e-3
    for vec_env in vec_envs:
        vec_env.close()
