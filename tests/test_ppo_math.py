"""The algorithm's parts against independent oracles."""

import math
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ppo_procgen as ppo
import trpo_procgen as trpo
from common import augment, bonus, devices, envs, runs, shaping
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
    return Steps(raw, terminated, truncated, done[:-1], age, np.zeros(envs, bool))


@pytest.mark.parametrize("gae", [jax.jit(ppo.gae), jax.jit(trpo.gae)], ids=["ppo", "trpo"])
@relaxed
@given(seeds, st.sampled_from([1, 2, 5, 12]), st.floats(0, 1), st.floats(0, 1))
def test_gae_equals_the_double_sum(gae, seed, length, gamma, gae_lambda):
    rng = np.random.default_rng(seed)
    steps = random_steps(rng, length, 1)
    raw, terminated, truncated = (x[:, 0] for x in (steps.rewards, steps.terminated, steps.truncated))
    values = rng.normal(size=length + 1).astype(np.float32)
    got = gae(raw, values, terminated, truncated, gamma=gamma, gae_lambda=gae_lambda)
    want = oracle.gae(raw, values, terminated, truncated, gamma, gae_lambda)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_unrolled_gae_is_the_same_bit_for_bit(monkeypatch):
    """As it runs on a GPU, here with a rest that does not fill a turn."""
    rng = np.random.default_rng(0)
    steps = random_steps(rng, 75, 4)
    values = rng.normal(size=(76, 4)).astype(np.float32)

    def advantages(steps):
        estimate = jax.vmap(partial(ppo.gae, gamma=0.97, gae_lambda=0.9), 1, 1)
        _, rewards = shaping.normalize(shaping.new_filter(4), steps.rewards, steps.last, ~steps.done, 0.97)
        return jax.jit(lambda: estimate(rewards, values, steps.terminated, steps.truncated))()

    want = advantages(steps)
    monkeypatch.setattr(devices, "unroll", lambda: 32)
    np.testing.assert_array_equal(advantages(steps), want)


def random_batch(rng, *shape):
    """Logits and values of a policy, the Batch of one that is near to it, and weights."""
    weight = rng.random(shape) < 0.8
    weight[0] = True
    normal = partial(rng.normal, size=shape)
    old = rng.normal(size=(*shape, 15))
    new = old + 0.3 * rng.normal(size=(*shape, 15))
    actions = rng.integers(0, 15, shape).astype(np.int32)
    batch = ppo.Batch(actions, old, 3 * normal(), 3 * normal(), 3 * normal())
    logits, values, batch = jax.tree.map(lambda x: np.asarray(x, np.float32), (new, 3 * normal(), batch))
    return logits, values, batch._replace(actions=actions), weight


@cache
def of_outputs(args):
    """What `devices.gradient` makes of the loss, with the network's outputs as its parameters: a function of these,
    (index, batch) and weight."""

    def loss(outputs, data):
        index, batch = data
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ppo, "forward", lambda *_: (jax.nn.log_softmax(outputs[0][index]), outputs[1][index]))
            inputs = ppo.Inputs(None, None, None, (), None)
            return ppo.loss(args, None, {"agent": None}, (inputs, batch), kl_coef=args.kl_coef, ent_coef=0.02)

    return jax.jit(partial(devices.gradient, loss, whole=True))


@relaxed
@given(seeds, st.sampled_from([0.0, 0.5]), st.sampled_from([0.0, 0.3]), st.sampled_from([(20, 1), (5, 4)]))
def test_loss_equals_the_sums_by_hand(seed, vf_clip, kl_coef, shape):
    args = ppo.Args(vf_clip=vf_clip, kl_coef=kl_coef, vf_coef=0.7)
    logits, values, batch, weight = random_batch(np.random.default_rng(seed), *shape)
    _, parts, _ = of_outputs(args)((logits, values), (np.arange(len(weight)), batch), weight)
    logits, values, batch = jax.tree.map(lambda x: x.reshape(20, *x.shape[2:]), (logits, values, batch))
    want, want_parts = oracle.ppo_loss(args, kl_coef, 0.02, logits, values, batch, weight.reshape(-1))
    np.testing.assert_allclose(parts["loss"], want, rtol=2e-4, atol=1e-5)
    for name, x in want_parts.items():
        np.testing.assert_allclose(parts[name], x, rtol=2e-4, atol=1e-5, err_msg=name)


def test_policy_gradient_by_differences():
    """Of the loss by hand, in float64, with respect to each logit of a sample."""
    logits, values, batch, _ = random_batch(np.random.default_rng(1), 8, 1)
    args, weight = ppo.Args(), np.ones(8)
    flat_values, flat = jax.tree.map(lambda x: np.float64(x).reshape(8, *x.shape[2:]), (values, batch))
    flat = flat._replace(actions=np.asarray(batch.actions).reshape(8))

    def ours(logits):
        return ppo.ppo_parts(args, jax.nn.log_softmax(logits), values, batch)["policy_loss"].mean()

    def by_hand(logits):
        return oracle.ppo_loss(args, 0.0, 0.0, logits.reshape(8, -1), flat_values, flat, weight)[1]["policy_loss"]

    got, logits, small = jax.grad(ours)(logits), np.float64(logits), 1e-6
    for place in [(i, 0, int(a)) for i in range(8) for a in (flat.actions[i], (flat.actions[i] + 1) % 15)]:
        sums = []
        for sign in (1, -1):
            moved = logits.copy()
            moved[place] += sign * small
            sums.append(by_hand(moved))
        np.testing.assert_allclose(got[place], (sums[0] - sums[1]) / (2 * small), rtol=1e-3, atol=1e-5)


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
    yes = np.ones((1000, 1), bool)
    _, clipped = shaping.normalize(shaping.new_filter(1), np.float32([[0]] * 999 + [[-1]]), yes, yes, 0.9)
    assert clipped.min() == -10


def test_the_normaliser_has_a_discount_of_its_own():
    steps = random_steps(np.random.default_rng(0), 20, 3)
    for own, discount in ((0.0, 0.9), (0.5, 0.5)):
        args = ppo.Args(normalize_rewards=True, normalize_gamma=own)
        _, got = shaping.prepare_rewards(args, shaping.new_filter(3), steps, jnp.float32(0.9))
        (want,), *_ = oracle.normalize_rewards([(steps.rewards, steps.ended, ~steps.done)], discount)
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


def make_tiny(**flags):
    """Args, agent, state, rollout and steps of made-up frames, with episode ends."""
    args = ppo.Args(
        num_envs=3, num_steps=8, num_minibatches=2, update_epochs=2, encoder="nature", width=1, hidden=8,
        learning_rate="0.001", normalize_rewards=True, **flags,
    )  # fmt: skip
    rng, agent = np.random.default_rng(0), ppo.make_agent(args)
    steps = random_steps(rng, 8, 3)
    state = devices.run_once(ppo.initial_state, args, agent)
    rollout = ppo.begin_rollout(args, ppo.initial_carry(args, np.arange(3)), 0)
    for t in range(8):
        obs = rng.integers(0, 256, (3, 3, 64, 64), np.uint8)
        rollout, _ = ppo.act(args, agent, state.params["agent"], rollout, obs, steps.age[t])
    rollout, carry = ppo.end_rollout(args, rollout, obs, steps.age[8])
    return SimpleNamespace(args=args, agent=agent, state=state, rollout=rollout, steps=steps, carry=carry, rng=rng)


@pytest.fixture(scope="module")
def tiny():
    return make_tiny()


def run_update(tiny, rollout, steps):
    state = devices.run_once(ppo.initial_state, tiny.args, tiny.agent)
    return jax.device_get(ppo.update(tiny.args, tiny.agent, state, rollout, steps))


def test_steps_that_are_no_transition_change_nothing(tiny):
    junk = tiny.steps.done
    assert 0 < junk.sum() < junk.size

    def noise(x):
        return np.where(junk.reshape(8, 3, *[1] * (x.ndim - 2)), tiny.rng.normal(size=x.shape), x)

    rollout = tiny.rollout._replace(
        actions=jnp.where(junk, 14, tiny.rollout.actions),
        logits=jnp.float32(noise(np.asarray(tiny.rollout.logits))),
    )
    steps = tiny.steps._replace(rewards=np.float32(noise(tiny.steps.rewards)))
    before, after = run_update(tiny, tiny.rollout, tiny.steps), run_update(tiny, rollout, steps)
    jax.tree.map(np.testing.assert_array_equal, before[0].params, after[0].params)
    assert before[1] == after[1]
    assert before[0].global_step == (~junk).sum()
    assert before[0].reward_filter.count == (~junk).sum()  # it is for the next update too


def test_transitions_do_change_the_update(tiny):
    """The test above can fail: the same noise on transitions does move the parameters."""
    steps = tiny.steps._replace(rewards=tiny.steps.rewards + ~tiny.steps.done * tiny.rng.random((8, 3), np.float32))
    before, after = (run_update(tiny, tiny.rollout, given)[0].params for given in (tiny.steps, steps))
    assert any(not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True))


def test_updates_lower_the_loss(tiny):
    state, losses = devices.run_once(ppo.initial_state, tiny.args, tiny.agent), []
    for _ in range(5):
        key = np.asarray(state.key)
        state, metrics = ppo.update(tiny.args, tiny.agent, state, tiny.rollout, tiny.steps)
        logged = {name.split("/")[1]: float(x) for name, x in metrics.items()}
        assert (logged["learning_rate"], logged["ent_coef"], logged["gamma"]) == pytest.approx((0.001, 0.01, 0.99))
        parts = logged["policy_loss"] + logged["value_loss"] - 0.01 * logged["entropy"]
        total = parts + logged["kl_coef"] * logged["approx_kl"]
        assert logged["loss"] == pytest.approx(total, rel=1e-4, abs=1e-6)
        losses.append(float(metrics["losses/policy_loss"]))  # advantages are normalised: the same each time
        assert (np.asarray(state.key) != key).any()  # the next one's minibatches are other ones
    assert (np.diff(losses) < 0).all()
    assert state.opt_state[1].count == 20
    ends = []
    for seed in (0, 1):
        start = devices.run_once(ppo.initial_state, tiny.args, tiny.agent)._replace(key=jax.random.PRNGKey(seed))
        end, _ = ppo.update(tiny.args, tiny.agent, start, tiny.rollout, tiny.steps)
        ends.append(jax.tree.leaves(end.params))
    assert any((a != b).any() for a, b in zip(*ends, strict=True))  # of other minibatches


def test_the_adapted_kl_coefficient_is_in_the_loss(tiny):
    assert tiny.state.kl_coef == np.float32(tiny.args.kl_coef)
    logits = tiny.rollout.logits + np.float32(tiny.rng.normal(size=tiny.rollout.logits.shape))
    lines = []
    for coef in (0.1, 10.0):
        state = devices.run_once(ppo.initial_state, tiny.args, tiny.agent)._replace(kl_coef=jnp.float32(coef))
        rollout = tiny.rollout._replace(logits=logits)
        after, metrics = jax.device_get(ppo.update(tiny.args, tiny.agent, state, rollout, tiny.steps))
        lines.append(metrics)
        assert after.kl_coef == pytest.approx(2 * coef)  # its KL divergence is far above the target
    assert lines[1]["losses/loss"] - lines[0]["losses/loss"] > 5 * lines[1]["losses/approx_kl"] > 0.1


def test_what_was_recorded_is_what_the_network_says(tiny):
    first = tiny.steps.age == 0
    for t in (0, 5, 8):
        frames = tiny.rollout.frames.stack(t)
        logits, values, _ = ppo.policy_and_value(tiny.agent, tiny.state.params["agent"], frames, first[t], ())
        if t < 8:
            np.testing.assert_allclose(tiny.rollout.logits[t], logits, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(tiny.rollout.values[t], values, rtol=1e-4, atol=1e-5)
    assert np.abs(tiny.rollout.values).max() > 1e-3
    kernel = tiny.state.params["agent"]["params"]["policy"]["kernel"]
    assert np.linalg.norm(kernel, 2) == pytest.approx(0.01, rel=1e-3)  # nearly uniform


def test_history_continues_the_rollout(tiny):
    images = tiny.rollout.frames.images
    np.testing.assert_array_equal(tiny.carry.history, images[-1 - len(tiny.carry.history) : -1])
    assert len(images) == len(tiny.carry.history) + 9


# AUGMENTATION, BONUS AND CORE


def minibatch_of(rng, next_frames=False):
    """Inputs and a batch of 6 sequences of one step, and their weights; the frames' stack has 2."""
    frames = rng.integers(0, 256, (2, 6, 1, 64, 64, 6), np.uint8)
    keys = jax.random.split(jax.random.PRNGKey(1), 6)[:, None]
    inputs = ppo.Inputs(frames[0], frames[1] if next_frames else None, np.zeros((6, 1), bool), (), keys)
    _, _, batch, weight = random_batch(rng, 6, 1)
    return inputs, batch, weight


def test_augmentation_is_of_the_learners_frames_or_a_regulariser(tiny):
    inputs, batch, weight = minibatch_of(np.random.default_rng(3))
    grey = jax.vmap(augment.grayscale, in_axes=(None, 0))(None, inputs.frames[:, 0])
    flags = {"augment": "grayscale", "augment_prob": 1.0}

    def parts(frames, **flags):
        args, params = ppo.Args(**vars(tiny.args) | flags), tiny.state.params
        loss = partial(ppo.loss, args, tiny.agent, kl_coef=0.1, ent_coef=0.01)
        data = (inputs._replace(frames=frames), batch)
        return jax.jit(lambda: devices.gradient(loss, params, data, weight)[1])()

    def outputs(frames):
        return tiny.agent.apply(tiny.state.params["agent"], frames, np.zeros(6, bool), ())[:2]

    plain, rad = parts(inputs.frames), parts(inputs.frames, **flags)
    assert rad.keys() == plain.keys()
    for name, want in parts(grey[:, None]).items():
        np.testing.assert_allclose(rad[name], want, rtol=1e-4, atol=1e-6)
        assert rad[name] != plain[name] or name in ("clipfrac", "entropy")  # the policy is nearly uniform

    drac = parts(inputs.frames, **flags, augment_mode="drac", drac_coef=0.5)
    each = augment.drac_loss(*outputs(inputs.frames[:, 0]), *outputs(grey))
    want = each[weight].mean()
    np.testing.assert_allclose(drac["drac_loss"], want, rtol=1e-3, atol=1e-7)  # of differences of numbers near 1
    np.testing.assert_allclose(drac["loss"], plain["loss"] + 0.5 * want, rtol=1e-4)
    np.testing.assert_allclose(drac["policy_loss"], plain["policy_loss"], rtol=1e-4)


def test_predictor_learns_the_target_and_nothing_else_does(monkeypatch):
    tiny = make_tiny(rnd_coef=1.0)
    inputs, batch, weight = minibatch_of(np.random.default_rng(3), next_frames=True)
    target = tiny.state.bonus.target

    def grads(**flags):
        args = ppo.Args(**vars(tiny.args) | flags)
        loss = partial(ppo.loss, args, tiny.agent, kl_coef=0.1, ent_coef=0.01, target=target)
        return jax.jit(lambda params: devices.gradient(loss, params, (inputs, batch), weight))(tiny.state.params)

    (with_rnd, parts, _), (without, plain, _) = grads(), grads(rnd_coef=0.0)
    np.testing.assert_allclose(parts["loss"], plain["loss"] + parts["rnd_loss"], rtol=1e-4)
    assert set(tiny.state.params) == {"agent", "predictor"}  # the target is not among what is trained
    assert sum(np.abs(x).sum() for x in jax.tree.leaves(with_rnd["predictor"])) > 0
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7), with_rnd["agent"], without["agent"])
    features = [
        bonus._network(hidden).apply(params, inputs.next_frames[:, 0])
        for params, hidden in ((target, 0), (tiny.state.params["predictor"], 256))
    ]
    error = ((np.float64(features[1]) - features[0]) ** 2).mean(axis=1)
    np.testing.assert_allclose(parts["rnd_loss"], error[weight[:, 0]].mean(), rtol=1e-3)
    kernels = [p["params"]["layers_0"]["Conv_0"]["kernel"] for p in (target, tiny.state.params["predictor"])]
    assert (kernels[0] != kernels[1]).all()
    monkeypatch.setattr(devices, "on_cpu", lambda: False)  # in full float32 on a GPU too
    predictor = tiny.state.params["predictor"]
    text = str(jax.make_jaxpr(bonus.novelty)(target, predictor, inputs.next_frames[:, 0]))
    assert "bf16" not in text
    assert "(Precision.HIGHEST, Precision.HIGHEST)" in text
    assert "precision=None" not in text


@pytest.mark.parametrize("normalize", [pytest.param(False, marks=pytest.mark.slow), True])
def test_bonus_is_that_of_the_frame_a_step_leads_to(normalize):
    tiny = make_tiny(rnd_coef=0.5, rnd_normalize=normalize)
    params, steps, past = tiny.state.params, tiny.steps, len(tiny.carry.history)
    layers = params["predictor"]["params"]
    kernel = layers["layers_1"]["kernel"]  # random frames are much alike: make some bonuses exceed 2
    layers = layers | {"layers_1": {"kernel": 5 * kernel, "bias": jnp.ones(256)}}
    params = params | {"predictor": {"params": layers}}
    images, want = np.asarray(tiny.rollout.frames.images), np.zeros((8, 3))

    def seen(row, age):
        stacks = [np.concatenate([images[row - min(3, a), n], images[row, n]], axis=2) for n, a in enumerate(age)]
        return np.stack(stacks)

    novelty = jax.jit(partial(bonus.novelty, tiny.state.bonus.target, params["predictor"]))
    for t in range(8):
        want[t] = novelty(seen(past + t + 1, steps.age[t + 1])) * ~steps.done[t]
    state = tiny.state._replace(params=params)
    extra = partial(bonus.of_transitions, tiny.args, state.bonus, params["predictor"])
    moved, got = jax.jit(lambda: extra(frames=tiny.rollout.frames, steps=steps, gamma=0.9))()
    assert ((want > 2) & ~steps.done).any()
    assert ((want < 2) & ~steps.done).any()
    if normalize:
        (normalized,), mean, var = oracle.normalize_rewards([(want, steps.ended, ~steps.done)], 0.9)
        np.testing.assert_allclose([moved.filter.mean, moved.filter.var], [mean, var], rtol=1e-3)
        np.testing.assert_allclose(got, normalized, rtol=1e-3, atol=1e-5)
    else:
        np.testing.assert_allclose(got, want.clip(0, 2), rtol=1e-3, atol=1e-5)

    after, batch, metrics = jax.jit(partial(ppo.prepare, tiny.args, tiny.agent))(state, tiny.rollout, steps, 0.9)
    kept = ~steps.done
    assert after.bonus.filter.count == normalize * kept.sum()
    np.testing.assert_allclose(metrics["charts/intrinsic_reward"], np.asarray(got)[kept].mean(), rtol=1e-3)
    last = seen(past + 8, steps.age[-1])
    last_value = tiny.agent.apply(params["agent"], last, np.zeros(3, bool), ())[1][:, 0]
    values = np.concatenate([tiny.rollout.values, last_value[None]])
    reward = shaping.prepare_rewards(tiny.args, tiny.state.reward_filter, steps, 0.9)[1]
    rewards, advantages = np.asarray(reward) + 0.5 * np.asarray(got), np.zeros((8, 3))
    for n in range(3):
        ends = steps.terminated[:, n], steps.truncated[:, n]
        advantages[:, n] = oracle.gae(rewards[:, n], values[:, n], *ends, 0.9, tiny.args.gae_lambda)
    np.testing.assert_allclose((batch.returns - batch.values)[kept], advantages[kept], rtol=1e-3, atol=1e-4)
    expected = (advantages - advantages[kept].mean()) / advantages[kept].std()
    np.testing.assert_allclose(batch.advantages[kept], expected[kept], rtol=1e-3, atol=1e-3)
    unexplained = advantages[kept].var() / (advantages + values[:-1])[kept].var()
    np.testing.assert_allclose(metrics["losses/explained_variance"], 1 - unexplained, rtol=1e-3, atol=1e-3)
    _, _, var = oracle.normalize_rewards([(steps.rewards, steps.ended, kept)], 0.9)
    np.testing.assert_allclose(metrics["charts/return_std"], np.sqrt(var), rtol=1e-3)

    args = replace(tiny.args, num_minibatches=1, update_epochs=1, learning_rate="0")
    metrics = ppo.update(args, tiny.agent, state, tiny.rollout, steps)[1]
    np.testing.assert_allclose(metrics["losses/rnd_loss"], want[kept].mean(), rtol=1e-3)  # on the same frames


@pytest.mark.parametrize("core", [pytest.param("none", marks=pytest.mark.slow), "lstm"])
def test_same_parameters_give_the_probabilities_that_acted(core):
    """What the learner rebuilds of real games (stacks, ages, cores) is what was acted on: all ratios are 1."""
    args = ppo.Args(
        num_envs=4, num_steps=150, num_minibatches=2, update_epochs=1, encoder="nature", width=1, hidden=8,
        pool="flatten", learning_rate="0", sticky_actions=0.25, core=core, clip_coef=1e-3,
    )  # fmt: skip
    agent, games = ppo.make_agent(args), envs.Games(partial(envs.make_levels, args), range(4), 3, args.restart_every)
    state, ends = devices.run_once(ppo.initial_state, args, agent), 0
    state.params["agent"]["params"]["policy"]["kernel"] *= 3000  # it starts nearly uniform: no mistake would show
    state = devices.put(args, state, ppo.STATE)
    carry = devices.put(args, ppo.initial_carry(args, np.arange(4)), ppo.CARRY)
    for i in range(2):
        acting = state.params["agent"]
        rollout, steps, carry = ppo.collect(args, agent, games, acting, carry, i=i, watch=runs.Stopwatch())
        ends += steps.ended.sum()
        state, metrics = ppo.update(args, agent, state, rollout, steps)
        assert metrics["losses/entropy"] < 2.6
        assert abs(metrics["losses/approx_kl"]) < 1e-5
        assert metrics["losses/clipfrac"] == 0
    games.close()
    assert ends > 3


def test_the_last_value_is_of_the_core_after_the_last_step(monkeypatch):
    """Of a core and a value that count an episode's steps, with no rewards: each target is one more than its value."""

    def counting(agent, params, frames, first, core):
        core = jnp.where(first, 0, core[0][:, 0]) + 1
        return jnp.zeros((len(first), 15)), core, (jnp.tile(core[:, None], (1, 8)),)

    monkeypatch.setattr(ppo, "policy_and_value", counting)
    args = ppo.Args(
        num_envs=3, num_steps=5, num_devices=1, core="gru", hidden=8, gae_lambda=0.0, num_minibatches=3, seed=78
    )
    rollout, frames = (
        ppo.begin_rollout(args, ppo.initial_carry(args, np.arange(3)), 0),
        np.zeros((3, 3, 64, 64), np.uint8),
    )
    age = np.arange(6, dtype=np.int32)[:, None] + np.int32([0, 4, 9])
    for t in range(5):
        rollout, _ = ppo.act(args, None, None, rollout, frames, age[t])
    rollout, carry = ppo.end_rollout(args, rollout, frames, age[5])
    assert carry.core[0][:, 0].tolist() == rollout.core[0][:, 0].tolist() == [5, 5, 5]  # for the next rollout
    no = np.zeros((5, 3), bool)
    steps = Steps(np.zeros((5, 3), np.float32), no, no, no, age, no[0])
    state = SimpleNamespace(reward_filter=shaping.new_filter(3), params={"agent": None}, _replace=lambda **_: state)
    _, batch, _ = ppo.prepare(args, None, state, rollout, steps, 1.0)
    np.testing.assert_allclose(batch.returns, rollout.values + 1)


def test_the_bonus_is_clipped_or_normalised_until_a_restart(monkeypatch):
    monkeypatch.setattr(bonus, "novelty", lambda target, predictor, frames: jnp.full(len(frames), 3.0))
    no, junk, restarts = np.zeros((2, 3), bool), np.array([[0, 0, 1], [0, 0, 0]], bool), np.array([True, False, False])
    steps = Steps(np.zeros((2, 3), np.float32), no, no, junk, np.ones((3, 3), np.int32), restarts)
    start, frames = bonus.Bonus({}, shaping.new_filter(3)), SimpleNamespace(stack=lambda t: np.zeros((3, 1)))
    moved = {}
    for normalize in (False, True):
        args = SimpleNamespace(num_steps=2, rnd_normalize=normalize)
        moved[normalize] = bonus.of_transitions(args, start, {}, frames=frames, steps=steps, gamma=0.9)
    np.testing.assert_array_equal(moved[False][1], 2 * ~junk)
    assert (moved[True][0].filter.discounted == 0).tolist() == restarts.tolist()


def test_dropout_is_the_learners_alone_and_new_each_time():
    tiny = make_tiny(dropout=0.5)
    plain, params = ppo.make_agent(replace(tiny.args, dropout=0.0)), tiny.state.params["agent"]
    stacked, first = tiny.rollout.frames.stack(5), np.zeros(3, bool)
    seen = [ppo.policy_and_value(agent, params, stacked, first, ()) for agent in (tiny.agent, plain)]
    jax.tree.map(np.testing.assert_array_equal, *seen)
    losses = set()
    for epochs in (1, 2):  # the metrics are the last epoch's
        args = replace(tiny.args, learning_rate="0", update_epochs=epochs, l2=100.0)
        state = devices.run_once(ppo.initial_state, args, tiny.agent)
        metrics = ppo.update(args, tiny.agent, state, tiny.rollout, tiny.steps)[1]
        losses.add(float(metrics["losses/loss"]))
    assert len(losses) == 2
    kernels = [x for x in jax.tree.leaves(params) if x.ndim == 4]
    assert metrics["losses/grad_norm"] == pytest.approx(200 * float(devices.norm(kernels)), rel=0.1)  # --l2 counts
