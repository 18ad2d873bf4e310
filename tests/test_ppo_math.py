"""PPO's parts, and what it shares with the other scripts, against independent oracles."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import FULL_PRECISION, init_state, matmuls
from hypothesis import given
from hypothesis import strategies as st
from jax.test_util import check_grads
from rollouts import MADE_UP, acting_params, init_env_state, made_up, play, random_steps, relaxed, seeds

import ppg_procgen as ppg
import ppo_procgen as ppo
import trpo_procgen as trpo
from common import augment, bonus, devices, networks, runs
from common.rewards import init_return_filter, normalize_rewards, prepare_rewards


def assert_advantages_by_hand(args, batch, metrics, rewards, last_value, rollout, steps):
    """A Batch's returns and normalised advantages [T, N] and their explained variance are the oracle's."""
    values = np.concatenate([rollout.values, last_value[None]])
    columns = zip(*(np.asarray(x).T for x in (rewards, values, steps.terminated, steps.truncated)), strict=True)
    advantages = np.stack([oracle.gae(*column, 0.9, args.gae_lambda) for column in columns], axis=1)
    valid = ~steps.is_reset
    close = partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-3)
    close((batch.returns - rollout.values)[valid], advantages[valid], atol=1e-4)
    close(batch.advantages[valid], ((advantages - advantages[valid].mean()) / advantages[valid].std())[valid])
    explained = 1 - advantages[valid].var() / (advantages + rollout.values)[valid].var()
    close(metrics["losses/explained_variance"], explained)
    return_std = oracle.normalize_rewards([(steps.rewards, steps.episode_end, valid)], 0.9)[2] ** 0.5
    close(metrics["charts/return_std"], return_std)


# REWARDS, ADVANTAGES, SCHEDULES


@pytest.mark.parametrize("gae", [jax.jit(script.gae) for script in (ppo, trpo, ppg)], ids=["ppo", "trpo", "ppg"])
@relaxed
@given(seeds, st.sampled_from([1, 2, 5, 12]), st.floats(0, 1), st.floats(0, 1))
def test_gae_of_random_episodes_equals_double_sum(gae, seed, length, gamma, gae_lambda):
    rng = np.random.default_rng(seed)
    steps = random_steps(rng, length, 1)
    ends = steps.terminated[:, 0], steps.truncated[:, 0]
    rewards, values = steps.rewards[:, 0], rng.normal(size=length + 1).astype(np.float32)
    got = gae(rewards, values, *ends, gamma=gamma, gae_lambda=gae_lambda)
    want = oracle.gae(rewards, values, *ends, gamma, gae_lambda)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_scans_over_time_unrolled_as_on_gpu_are_bit_identical(monkeypatch):
    """GAE and the return filter, over a number of steps that 32 does not divide."""
    rng = np.random.default_rng(0)
    steps, values = random_steps(rng, 75, 4), rng.normal(size=(76, 4)).astype(np.float32)

    def advantages():
        estimate = jax.vmap(partial(ppo.gae, gamma=0.97, gae_lambda=0.9), 1, 1)
        _, rewards = normalize_rewards(init_return_filter(4), steps.rewards, steps.sequence_end, ~steps.is_reset, 0.97)
        return jax.jit(lambda: estimate(rewards, values, steps.terminated, steps.truncated))()

    want = advantages()
    monkeypatch.setattr(devices, "scan_unroll", lambda: 32)
    np.testing.assert_array_equal(advantages(), want)


@relaxed
@given(seeds, st.sampled_from([(0.0, 0.9), (0.5, 0.5)]))
def test_return_filter_over_rollouts_with_restarts_equals_oracle(seed, discounts):
    """With gamma or its own discount; the result is clipped to +-10."""
    normalize_gamma, discount = discounts
    args, rng = ppo.Args(normalize_rewards=True, normalize_gamma=normalize_gamma), np.random.default_rng(seed)
    state, got, seen = init_return_filter(3), [], []
    for _ in range(2):
        steps = random_steps(rng, 10, 3)._replace(forced_reset=rng.random(3) < 0.5)
        state, normalized = prepare_rewards(args, state, steps, jnp.float32(0.9))
        ended = steps.terminated | steps.truncated
        ended[-1] |= steps.forced_reset
        got.append(normalized)
        seen.append((steps.rewards, ended, ~steps.is_reset))
    want, mean, var = oracle.normalize_rewards(seen, discount)
    np.testing.assert_allclose([state.mean, state.var], [mean, var], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)
    assert not state.discounted[ended[-1]].any()
    yes = np.ones((1000, 1), bool)
    _, clipped = normalize_rewards(init_return_filter(1), np.float32([[0]] * 999 + [[-1]]), yes, yes, 0.9)
    assert clipped.min() == -10


@relaxed
@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-6, 1)), min_size=1, max_size=6), st.integers(0, 10**7))
def test_schedule_between_points_is_linear(moves, step):
    points = [(sum(m[0] for m in moves[:i]), value) for i, (_, value) in enumerate(moves)]
    text = ",".join(f"{x}:{y!r}" for x, y in points)
    assert runs.parse_schedule(text)(step) == pytest.approx(oracle.schedule(points, step), rel=1e-4, abs=1e-7)
    assert float(runs.parse_schedule("0.25")(step)) == 0.25


# THE LOSS


def random_batch(rng, *shape):
    """Logits and values of a policy, the Batch of a similar one, and weights."""
    weight = rng.random(shape) < 0.8
    weight[0] = True
    normal = partial(rng.normal, size=shape)
    old = rng.normal(size=(*shape, 15))
    new = old + 0.3 * rng.normal(size=(*shape, 15))
    actions = rng.integers(0, 15, shape).astype(np.int32)
    batch = ppo.Batch(actions, old, 3 * normal(), 3 * normal(), 3 * normal())
    logits, values, batch = jax.tree.map(lambda x: np.asarray(x, np.float32), (new, 3 * normal(), batch))
    return logits, values, batch._replace(actions=actions), weight


class TableAgent:
    """An agent whose parameters are the logits and values of all samples; a frame is a sample's number."""

    def apply(self, params, x, *_, method):
        return x if method == "encode" else (params[0][x[..., 0]], params[1][x[..., 0]], ())


@cache
def table_loss(args):
    def mean_terms(outputs, batch, weight):
        index = np.arange(weight.size).reshape(weight.shape)
        inputs = ppo.Inputs(index, None, np.zeros(weight.shape, bool), (), None)
        loss = partial(ppo.loss, args, TableAgent(), kl_coef=args.kl_coef, ent_coef=0.02)
        outputs = jax.tree.map(lambda x: x.reshape(weight.size, *x.shape[2:]), outputs)
        return devices.gradient(loss, {"agent": outputs}, (inputs, batch), weight, in_chunks=False)[1]

    return jax.jit(mean_terms)


@relaxed
@given(seeds, st.sampled_from([0.0, 0.5]), st.sampled_from([0.0, 0.3]), st.sampled_from([(20, 1), (5, 4)]))
def test_ppo_loss_of_random_batch_equals_sums_by_hand(seed, vf_clip, kl_coef, shape):
    args = ppo.Args(vf_clip=vf_clip, kl_coef=kl_coef, vf_coef=0.7)
    logits, values, batch, weight = random_batch(np.random.default_rng(seed), *shape)
    terms = table_loss(args)((logits, values), batch, weight)
    logits, values, batch = jax.tree.map(lambda x: x.reshape(20, *x.shape[2:]), (logits, values, batch))
    want, want_terms = oracle.ppo_loss(args, kl_coef, 0.02, logits, values, batch, weight.reshape(-1))
    for name, x in (want_terms | {"loss": want}).items():
        np.testing.assert_allclose(terms[name], x, rtol=2e-4, atol=1e-5, err_msg=name)


def test_ppo_loss_gradient_equals_differences():
    logits, values, batch, _ = random_batch(np.random.default_rng(1), 8, 1)

    def total(logits, values):
        terms = ppo.ppo_loss_terms(ppo.Args(), jax.nn.log_softmax(logits), values, batch)
        return sum(x.mean() for name, x in terms.items() if name != "clipfrac")

    with jax.enable_x64(True):
        check_grads(total, (np.float64(logits), np.float64(values)), 1, ["rev"], rtol=1e-4)


def test_kl_coefficient_off_target_doubles_or_halves():
    kls = [0.0, 0.0066, 0.0067, 0.0149, 0.0151, 1.0]
    want = [0.1, 0.1, 0.2, 0.2, 0.4, 0.4]
    np.testing.assert_allclose([ppo.adapt_kl_coef(0.2, np.float32(kl), 0.01) for kl in kls], want, rtol=1e-6)
    coef, adapt = jnp.float32(0.2), jax.jit(partial(ppo.adapt_kl_coef, kl_target=0.01))
    for kl in [0.0] * 300 + [1.0] * 20:  # it comes back, however long KL was low
        coef = adapt(coef, np.float32(kl))
    assert coef > 0.5


# UPDATES ON A MADE-UP ROLLOUT


ARGS = ppo.Args(**MADE_UP, update_epochs=2, learning_rate="0.001")


@pytest.fixture(scope="module")
def tiny():
    return made_up(ppo, ARGS)


@pytest.mark.parametrize(
    ("script", "args"),
    [
        (ppo, replace(ARGS, core="gru")),
        (trpo, trpo.Args(**MADE_UP)),
        (ppg, ppg.Args(**MADE_UP, aux_minibatches=1, normalize_gamma=0.0)),
    ],
    ids=["ppo", "trpo", "ppg"],
)
def test_advantages_of_rollout_with_recorded_outputs_equal_oracle(script, args):
    tiny = made_up(script, args)
    params, rollout, steps = acting_params(tiny.state), tiny.rollout, tiny.steps

    @jax.jit
    def outputs(frames, is_first, hidden_state):
        if script is ppo:
            return ppo.policy_and_value(tiny.agent, params, frames, is_first, hidden_state)
        if script is ppg:
            return *tiny.agent.apply(params, frames)[:2], ()
        logits, values = (network.apply(params[name], frames) for name, network in tiny.agent._asdict().items())
        return logits, values[:, 0], ()

    hidden_state = init_env_state(script, args).hidden_state
    for t in range(9):
        last_hidden_state = hidden_state
        logits, values, hidden_state = outputs(rollout.frames.stack(t), steps.episode_step[t] == 0, hidden_state)
        if t < 8:
            np.testing.assert_allclose(rollout.logits[t], logits, rtol=1e-3, atol=1e-5)
            np.testing.assert_allclose(rollout.values[t], values, rtol=1e-3, atol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4), rollout.env_state.hidden_state, last_hidden_state)
    assert np.abs(rollout.values).max() > 1e-3
    (head,) = (x for x in jax.tree.leaves(params) if x.shape == (8, 15))
    assert np.linalg.norm(head, 2) == pytest.approx(0.1 if script is ppg else 0.01, rel=1e-3)  # nearly uniform
    compute_advantages = jax.jit(partial(script.compute_advantages, args, tiny.agent))
    after, batch, metrics = compute_advantages(tiny.state, rollout, steps, 0.9)
    assert after.reward_filter.count == (~steps.is_reset).sum()  # the filter goes into the next update too
    rewards = prepare_rewards(args, tiny.state.reward_filter, steps, 0.9)[1]
    assert_advantages_by_hand(args, batch, metrics, rewards, values, rollout, steps)


@pytest.mark.parametrize(
    ("script", "args"), [(ppo, ARGS), (trpo, trpo.Args(**MADE_UP)), (ppg, ppg.Args(**MADE_UP, aux_minibatches=1))],
    ids=["ppo", "trpo", "ppg"],
)  # fmt: skip
def test_update_with_noise_in_junk_steps_is_bit_identical(script, args):
    """The same noise in transitions is not."""
    tiny, rng = made_up(script, args), np.random.default_rng(1)
    junk = tiny.steps.is_reset
    assert 0 < junk.sum() < junk.size
    noise = rng.normal(size=(8, 3, 15)).astype(np.float32)
    rollout = tiny.rollout._replace(
        actions=jnp.where(junk, 14, tiny.rollout.actions), logits=jnp.where(junk[..., None], noise, tiny.rollout.logits)
    )
    rewards = [tiny.steps.rewards + noise[..., 0] * mask for mask in (junk, ~junk)]
    state, *_, metrics = tiny.update(tiny.state, tiny.rollout, tiny.steps)
    same, *_, same_metrics = tiny.update(tiny.state, rollout, tiny.steps._replace(rewards=rewards[0]))
    other, *_ = tiny.update(tiny.state, tiny.rollout, tiny.steps._replace(rewards=rewards[1]))
    jax.tree.map(np.testing.assert_array_equal, (state, metrics), (same, same_metrics))
    assert state.global_step == state.reward_filter.count == (~junk).sum()  # the filter goes into the next update too
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (state.params, other.params)), strict=True))


def test_update_repeated_on_one_rollout_lowers_loss_with_kl_penalty_adapted(tiny):
    assert tiny.state.kl_coef == np.float32(ARGS.kl_coef)
    state, losses = tiny.state._replace(kl_coef=jnp.float32(64)), []
    for _ in range(12):
        key, kl_coef = state.key, float(state.kl_coef)
        state, metrics = tiny.update(state, tiny.rollout, tiny.steps)
        logged = {name.split("/")[1]: float(x) for name, x in metrics.items()}
        rates = logged["learning_rate"], logged["ent_coef"], logged["gamma"], logged["kl_coef"]
        assert rates == pytest.approx((0.001, 0.01, 0.99, kl_coef))
        assert state.kl_coef == ppo.adapt_kl_coef(kl_coef, logged["approx_kl"], ARGS.kl_target)
        total = logged["policy_loss"] + logged["value_loss"] - 0.01 * logged["entropy"] + kl_coef * logged["approx_kl"]
        assert logged["loss"] == pytest.approx(total, rel=1e-4, abs=1e-6)
        losses.append(logged["policy_loss"])  # advantages are normalised: the same each time
        assert (state.key != key).any()
    assert np.mean(losses[-4:]) < np.mean(losses[:4]) - 0.02
    assert state.kl_coef < 64
    assert state.opt_state[1].count == 12 * 4
    ends = [tiny.update(tiny.state._replace(key=jax.random.PRNGKey(i)), tiny.rollout, tiny.steps)[0] for i in (0, 1)]
    leaves = (jax.tree.leaves(end.params) for end in ends)
    assert any((a != b).any() for a, b in zip(*leaves, strict=True))  # each key draws its own minibatches


# AUGMENTATION, BONUS, DROPOUT, RECURRENT CORE


@pytest.fixture(scope="module")
def with_bonus(tiny):
    """Args with RND's bonus, and the state, whose predictor makes some bonuses exceed 2 on random frames."""
    args = replace(ARGS, rnd_coef=0.5, rnd_normalize=True)
    state = init_state(ppo, args, tiny.agent)
    layers = state.params["predictor"]["params"]
    layers = layers | {"layers_1": {"kernel": 5 * layers["layers_1"]["kernel"], "bias": jnp.ones(256)}}
    return args, state._replace(params=state.params | {"predictor": {"params": layers}})


def minibatch_of(rng, next_frames=False):
    """Inputs and a batch of 6 sequences of one step, and their weights; a stack has two frames."""
    frames = rng.integers(0, 256, (2, 6, 1, 64, 64, 6), np.uint8)
    keys = jax.random.split(jax.random.PRNGKey(1), 6)[:, None]
    inputs = ppo.Inputs(frames[0], frames[1] if next_frames else None, np.zeros((6, 1), bool), (), keys)
    _, _, batch, weight = random_batch(rng, 6, 1)
    return inputs, batch, weight


def test_augmentation_in_either_mode_changes_loss_as_published(tiny):
    """RAD learns from the augmented frames; DrAC from the plain ones with a regulariser."""
    inputs, batch, weight = minibatch_of(np.random.default_rng(3))
    grey = jax.vmap(augment.grayscale, in_axes=(None, 0))(None, inputs.frames[:, 0])

    def terms_of(**flags):
        loss = partial(ppo.loss, replace(ARGS, **flags), tiny.agent, kl_coef=0.1, ent_coef=0.01)
        params = tiny.state.params
        return jax.jit(lambda x: devices.gradient(loss, params, (inputs._replace(frames=x), batch), weight)[1])

    plain_terms, augmented = terms_of(), {"augment": "grayscale", "augment_prob": 1.0}
    plain, rad = plain_terms(inputs.frames), terms_of(**augmented)(inputs.frames)
    assert rad.keys() == plain.keys()
    for name, want in plain_terms(grey[:, None]).items():
        np.testing.assert_allclose(rad[name], want, rtol=1e-4, atol=1e-6)
        assert rad[name] != plain[name] or name in ("clipfrac", "entropy")  # the policy is nearly uniform

    drac = terms_of(**augmented, augment_mode="drac", drac_coef=0.5)(inputs.frames)
    outputs = jax.jit(lambda x: tiny.agent.apply(tiny.state.params["agent"], x, np.zeros(6, bool), ())[:2])
    want = augment.drac_loss(*outputs(inputs.frames[:, 0]), *outputs(grey))[weight].mean()
    np.testing.assert_allclose(drac["drac_loss"], want, rtol=1e-3, atol=1e-7)  # of differences of numbers near 1
    np.testing.assert_allclose(drac["loss"], plain["loss"] + 0.5 * want, rtol=1e-4)
    np.testing.assert_allclose(drac["policy_loss"], plain["policy_loss"], rtol=1e-4)


def test_predictor_alone_learns_target_in_full_precision(tiny, with_bonus, monkeypatch):
    args, state = with_bonus
    inputs, batch, weight = minibatch_of(np.random.default_rng(3), next_frames=True)
    target, predictor, frames = state.bonus.target, state.params["predictor"], inputs.next_frames[:, 0]

    def gradient(rnd_coef):
        args_ = replace(args, rnd_coef=rnd_coef)
        loss = partial(ppo.loss, args_, tiny.agent, kl_coef=0.1, ent_coef=0.01, rnd_target=target)
        return jax.jit(lambda params: devices.gradient(loss, params, (inputs, batch), weight))(state.params)

    (with_rnd, terms, _), (without, plain, _) = gradient(1.0), gradient(0.0)
    np.testing.assert_allclose(terms["loss"], plain["loss"] + terms["rnd_loss"], rtol=1e-4)
    assert set(state.params) == {"agent", "predictor"}  # the target is not trained
    assert sum(np.abs(x).sum() for x in jax.tree.leaves(with_rnd["predictor"])) > 0
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7), with_rnd["agent"], without["agent"])
    features = [bonus._network(n).apply(params, frames) for params, n in ((target, 0), (predictor, 256))]
    error = ((np.float64(features[1]) - features[0]) ** 2).mean(axis=1)
    np.testing.assert_allclose(terms["rnd_loss"], error[weight[:, 0]].mean(), rtol=1e-3)
    kernels = [p["params"]["layers_0"]["Conv_0"]["kernel"] for p in (target, predictor)]
    assert (kernels[0] != kernels[1]).all()
    monkeypatch.setattr(devices, "on_cpu", lambda: False)
    assert matmuls(bonus.novelty, target, predictor, frames) == FULL_PRECISION


def test_bonus_networks_have_the_size_of_the_narrowest_impala_cnn(small_bonus):
    assert small_bonus == networks.EncoderArgs(width=1)


def test_bonus_of_transitions_is_novelty_of_next_frames(tiny, with_bonus):
    """Clipped or normalised; in the advantages, and on the frames that the predictor learns from."""
    args, state = with_bonus
    steps = tiny.steps._replace(forced_reset=np.array([True, False, False]))
    valid, images = ~steps.is_reset, np.asarray(tiny.rollout.frames.images)
    past, novelty = len(images) - 9, jax.jit(partial(bonus.novelty, state.bonus.target, state.params["predictor"]))

    def seen(t):
        row, pairs = past + t, enumerate(steps.episode_step[t])
        return np.stack([np.concatenate([images[row - min(3, k), n], images[row, n]], axis=2) for n, k in pairs])

    raw = np.stack([novelty(seen(t + 1)) for t in range(8)]) * valid
    assert (raw[valid] > 2).any()
    assert (raw[valid] < 2).any()

    def of_transitions(**flags):
        of = partial(bonus.of_transitions, replace(args, **flags), state.bonus, state.params["predictor"])
        return jax.jit(lambda frames: of(frames=frames, timesteps=steps, gamma=0.9))(tiny.rollout.frames)

    unchanged, clipped = of_transitions(rnd_normalize=False)
    np.testing.assert_allclose(clipped, raw.clip(0, 2), rtol=1e-3, atol=1e-5)
    assert unchanged.filter.count == 0
    new_bonus, intrinsic = of_transitions()
    (want,), mean, var = oracle.normalize_rewards([(raw, steps.episode_end, valid)], 0.9)
    np.testing.assert_allclose([new_bonus.filter.mean, new_bonus.filter.var], [mean, var], rtol=1e-3)
    np.testing.assert_allclose(intrinsic, want, rtol=1e-3, atol=1e-5)
    assert ((new_bonus.filter.discounted == 0) == (steps.forced_reset | steps.episode_end[-1])).all()

    compute_advantages = jax.jit(partial(ppo.compute_advantages, args, tiny.agent))
    after, batch, metrics = compute_advantages(state, tiny.rollout, steps, 0.9)
    assert after.bonus.filter.count == valid.sum()
    np.testing.assert_allclose(metrics["charts/intrinsic_reward"], np.asarray(intrinsic)[valid].mean(), rtol=1e-3)
    last_value = tiny.agent.apply(state.params["agent"], seen(8), np.zeros(3, bool), ())[1][:, 0]
    rewards = prepare_rewards(args, state.reward_filter, steps, 0.9)[1] + 0.5 * intrinsic
    assert_advantages_by_hand(args, batch, metrics, rewards, last_value, tiny.rollout, steps)

    args = replace(args, num_minibatches=1, update_epochs=1, learning_rate="0")
    metrics = jax.jit(partial(ppo.update, args, tiny.agent))(state, tiny.rollout, steps)[1]
    np.testing.assert_allclose(metrics["losses/rnd_loss"], raw[valid].mean(), rtol=1e-3)


@pytest.mark.parametrize(("script", "flags"), [
    (ppo, {"core": "lstm", "clip_coef": 1e-3, "update_epochs": 1, "learning_rate": "0"}),
    pytest.param(ppo, {"clip_coef": 1e-3, "update_epochs": 1, "learning_rate": "0"}, marks=pytest.mark.slow),
    pytest.param(trpo, {"max_kl": 1e-6, "line_search_steps": 1}, marks=pytest.mark.slow),
    (ppg, {"clip_coef": 1e-3, "learning_rate": "0", "aux_minibatches": 2}),
])  # fmt: skip
def test_learner_before_its_first_step_rebuilds_policy_that_acted(script, flags):
    """On real games (stacks, episode steps, hidden states), up to TRPO's smallest step."""
    args = script.Args(
        **flags, num_envs=4, num_steps=150, num_minibatches=2, encoder="nature", width=1, hidden=8, pool="flatten",
        sticky_actions=0.25, seed=3,
    )  # fmt: skip

    scale = 300 if script is ppg else 3000  # PPG's first head has ten times PPO's gain

    def sharpen(state):  # the policy's head: it is nearly uniform at first, and no fault would show
        return state._replace(params=jax.tree.map(lambda x: scale * x if x.shape == (8, 15) else x, state.params))

    _, lines, played = play(script, args, 2, sharpen)
    for line in lines:
        assert line["losses/entropy"] < 2.6
        assert abs(line["losses/approx_kl"]) < 1e-5
        assert script is trpo or line["losses/clipfrac"] == 0
    assert sum(steps.episode_end.sum() for steps in played) > 3


@pytest.mark.parametrize(("mode", "adapts"), [("rad", False), ("drac", True)])
def test_kl_coefficient_stays_where_augmentation_changes_the_policy(tiny, mode, adapts):
    args = replace(ARGS, learning_rate="0", augment="flip", augment_mode=mode)
    state, _ = jax.jit(partial(ppo.update, args, tiny.agent))(tiny.state, tiny.rollout, tiny.steps)
    assert (state.kl_coef != tiny.state.kl_coef) == adapts


def test_dropout_in_learner_alone_is_new_each_epoch(tiny):
    args, params = replace(ARGS, dropout=0.5, learning_rate="0", l2=100.0), tiny.state.params["agent"]
    agent, stacked = ppo.make_agent(args), tiny.rollout.frames.stack(5)
    acting = [ppo.policy_and_value(x, params, stacked, np.zeros(3, bool), ()) for x in (agent, tiny.agent)]
    jax.tree.map(np.testing.assert_array_equal, *acting)
    losses = set()
    for epochs in (1, 2):  # metrics are of the last epoch; one minibatch, so that samples differ in dropout alone
        update = jax.jit(partial(ppo.update, replace(args, update_epochs=epochs, num_minibatches=1), agent))
        state, metrics = update(tiny.state, tiny.rollout, tiny.steps)
        losses.add(float(metrics["losses/loss"]))
    assert np.ptp([*losses]) > 1e-3
    assert metrics["losses/approx_kl"] > 0  # without an update: so it cannot say how large one was
    assert state.kl_coef == tiny.state.kl_coef
    norm = devices.global_norm([x for x in jax.tree.leaves(params) if x.ndim == 4])
    assert metrics["losses/grad_norm"] == pytest.approx(200 * float(norm), rel=0.1)  # of --l2
