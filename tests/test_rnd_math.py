"""Random Network Distillation's parts against independent oracles."""

from dataclasses import replace
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
from rollouts import random_steps, relaxed, seeds

import rnd_montezuma as rnd
from common import atari, devices, envs, runs

T, GAMES = 8, 4
SMALL = {"num_envs": GAMES, "num_steps": T, "num_minibatches": 2, "update_epochs": 2, "channels": "4,4,4", "hidden": 8,
         "learning_rate": "0:0.005,5000:0.0005", "async_": True, "num_devices": 2}  # fmt: skip


# ADVANTAGES


def one_by_one(rewards, values, ratio, terminated, done, gamma, gae_lambda):
    """V-trace's targets less the values, by the paper's sums; with ratios of 1 that is the GAE."""
    args = SimpleNamespace(vtrace_lambda=gae_lambda, rho_bar=1.0, c_bar=1.0, pg_rho_bar=1.0)
    targets, _ = oracle.vtrace(args, np.log(ratio), rewards, values, terminated, done, gamma)
    return targets - values[:-1]


@jax.jit
def compiled_advantages(gammas, rewards, bonus, given):
    """`rnd.gae_per_head`, compiled once for whatever discounts."""
    names = ("gamma", "int_gamma", "gae_lambda")
    return rnd.gae_per_head(SimpleNamespace(**dict(zip(names, gammas, strict=True))), rewards, bonus, **given)


@relaxed
@given(seeds, st.sampled_from([1, 2, 5, 12]), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.booleans())
def test_advantages_of_both_heads_equal_the_sums_by_hand(seed, length, gamma, int_gamma, gae_lambda, on_policy):
    """The game's are episodic; the bonus's are those of one long episode, without EnvPool's junk steps."""
    rng = np.random.default_rng(seed)
    steps, real = random_steps(rng, length, 3), None
    bonus = rng.random((length, 3)).astype(np.float32) * ~steps.is_reset
    values = rng.normal(size=(length + 1, 3, 2)).astype(np.float32)
    ratio = np.exp(0 if on_policy else rng.normal(size=(length, 3))).astype(np.float32) * np.ones((length, 3), "f")
    given = {"values": values, "ratio": ratio, "timesteps": steps}
    got = np.asarray(compiled_advantages((gamma, int_gamma, gae_lambda), steps.rewards, bonus, given))
    for n in range(3):
        real, nothing = ~steps.is_reset[:, n], np.zeros(length, bool)
        streams = (
            (steps.rewards[:, n], values[:, n, 0], ratio[:, n], steps.terminated[:, n], steps.is_reset[:, n], gamma),
            (bonus[real, n], values[np.append(real, True), n, 1], ratio[real, n], nothing, nothing, int_gamma),
        )
        for head, stream in enumerate(streams):
            want = one_by_one(*stream, gae_lambda)
            want = want[real] if head == 0 else want
            np.testing.assert_allclose(got[real, n, head], want, rtol=1e-3, atol=1e-4)
            if on_policy and head == 1:
                gae = oracle.gae(*stream[:2], nothing, nothing, int_gamma, gae_lambda)
                np.testing.assert_allclose(got[real, n, head], gae[: real.sum()], rtol=1e-3, atol=1e-4)


@relaxed
@given(seeds)
def test_loss_of_both_heads_equals_the_sums_by_hand(seed):
    args, rng = rnd.Args(vf_coef=0.7, ent_coef=0.02), np.random.default_rng(seed)

    def normal(*shape):
        return 2 * rng.normal(size=shape).astype(np.float32)

    old, values, returns = normal(20, 1, 18), normal(20, 1, 2), normal(20, 1, 2)
    new, weight = old + 0.1 * normal(20, 1, 18), rng.random((20, 1)) < 0.8
    weight[0] = True
    batch = rnd.Batch(rng.integers(0, 18, (20, 1)), old, normal(20, 1), returns)

    def loss(outputs, data):  # what is made of the terms, with the networks' outputs as parameters
        index, batch = data
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rnd, "forward", lambda *_: (jax.nn.log_softmax(outputs[0][index]), outputs[1][index]))
            return rnd.loss(args, None, None, (None, batch))

    _, terms, _ = devices.gradient(loss, (new, values), (np.arange(20), batch), weight, in_chunks=False)
    (new, values, weight), flat = jax.tree.map(lambda x: x[:, 0], ((new, values, weight), batch))
    plain = SimpleNamespace(clip_coef=args.clip_coef, vf_clip=0, vf_coef=0.7)
    value_loss = 0
    for head in range(2):
        one = SimpleNamespace(**flat._replace(returns=flat.returns[:, head])._asdict(), values=values[:, head])
        _, want = oracle.ppo_loss(plain, 0, 0.02, new, values[:, head], one, weight)
        value_loss += want["value_loss"]
    want["value_loss"] = value_loss
    want["loss"] = want["policy_loss"] + 0.7 * value_loss - 0.02 * want["entropy"]
    assert terms.keys() == want.keys()
    for name, x in want.items():
        np.testing.assert_allclose(terms[name], x, rtol=2e-4, atol=1e-5, err_msg=name)


# STATISTICS AND BONUS


@relaxed
@given(seeds, st.lists(st.integers(1, 30), min_size=1, max_size=4))
def test_frame_statistics_of_batches_equal_those_of_all_frames(seed, sizes):
    rng = np.random.default_rng(seed)
    frames = rng.integers(0, 256, (sum(sizes), *atari.FRAME_SHAPE)).astype(np.uint8)
    frames[:, :40] = 200  # as most of the game's pixels, these never change
    stats = rnd.FrameStatistics(jnp.float32(0), jnp.zeros(atari.FRAME_SHAPE), jnp.ones(atari.FRAME_SHAPE))
    for batch in np.split(frames, np.cumsum(sizes)[:-1]):
        stats = rnd.add_frames(stats, batch)
    assert stats.count == len(frames)
    mean, var = np.float64(frames).mean(axis=0), np.float64(frames).var(axis=0)
    np.testing.assert_allclose(stats.mean, mean, rtol=1e-4)
    np.testing.assert_allclose(stats.var, var, rtol=1e-3, atol=1e-4)
    other = frames[:1] + rng.integers(0, 3, atari.FRAME_SHAPE, np.uint8)
    want = np.clip((other - mean) / np.sqrt(var + 1e-4), -5, 5)
    got = rnd.normalize_frames(stats, other)
    assert (np.abs(np.abs(got) - 5) < 1e-6).any()
    np.testing.assert_allclose(got[:, 40:], want[:, 40:], rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(got[:, :40], want[:, :40], atol=0.1)  # a grey level is 100 standard deviations there


def test_prediction_error_of_frames_equals_numpy(tiny):
    frames, state = np.asarray(tiny.rollout.frames.images[4:6, 0]), tiny.state
    white = np.clip((frames - np.float64(state.frame_stats.mean)) / np.sqrt(state.frame_stats.var + 1e-4), -5, 5)
    target, predictor, depth = state.target["params"], state.params["predictor"]["params"], tiny.args.predictor_depth
    truth, layers = oracle.rnd_features(target, white, 0)
    guess, deeper = oracle.rnd_features(predictor, white, depth)
    assert (layers, deeper) == (len(target), len(predictor)) == (4, 4 + depth)
    given = tiny.args, state.frame_stats, state.target, state.params["predictor"], frames
    for got in (rnd.prediction_error(*given), rnd.predictor_loss(*given)["loss"]):
        np.testing.assert_allclose(got, ((truth - guess) ** 2).mean(axis=1), rtol=1e-3)
    for name, layer in target.items():  # the predictor begins elsewhere
        assert (layer["kernel"] != predictor[name]["kernel"]).all()


def with_separate_value(tiny, separate_value):
    """Agent and its first parameters, with both values on the policy's network or on one of their own."""
    args = replace(tiny.args, separate_value=separate_value)
    agent = rnd.make_agent(args)
    return agent, init_state(rnd, args, agent).params["agent"]


@pytest.mark.parametrize("separate_value", [False, True])
def test_heads_of_a_frame_stack_equal_numpy(tiny, separate_value):
    (agent, params), stacked = with_separate_value(tiny, separate_value), tiny.rollout.frames.stack(5)
    logits, values, _ = rnd.policy_and_value(agent, params, stacked, np.zeros(GAMES, bool), ())
    of_policy = params["params"]
    of_values = of_policy["value_network"] if separate_value else of_policy
    for got, own, layers in (
        (logits, of_policy, ("trunk", "actor", "policy")),
        (values, of_values, ("trunk", "critic", "values")),
    ):
        x = np.float64(agent.encoder.apply({"params": own["encoder"]}, stacked))
        for name in layers:
            x = oracle.relu(x) @ np.float64(own[name]["kernel"]) + own[name]["bias"]
        np.testing.assert_allclose(got, x, rtol=1e-3, atol=1e-6)
        assert np.linalg.norm(own[name]["kernel"], 2) == pytest.approx(0.01, rel=1e-3)  # nearly uniform, nearly 0


@pytest.mark.parametrize("separate_value", [False, True])
def test_gradients_of_policy_and_values_meet_in_the_trunk_unless_separate(tiny, separate_value):
    """Which parameters a term of the loss moves: with --separate-value the other's gradient is exactly 0."""
    (agent, params), rng = with_separate_value(tiny, separate_value), np.random.default_rng(0)
    inputs = rnd.Inputs(rng.integers(0, 256, (8, 1, 84, 84, 4), np.uint8), np.zeros((8, 1), bool), ())
    advantages, returns = rng.normal(size=(8, 1)), rng.normal(size=(8, 1, 2))
    batch = rnd.Batch(np.zeros((8, 1), int), np.zeros((8, 1, 18)), advantages, returns)

    @jax.jit
    @jax.jacrev
    def gradients(params):
        terms = rnd.loss(tiny.args, agent, params, (inputs, batch))
        return terms["policy_loss"].sum(), terms["value_loss"].sum()

    paths = [jax.tree_util.keystr(path, simple=True) for path, _ in jax.tree.leaves_with_path(params)]
    of_policy, of_values = (
        {path for path, grad in zip(paths, jax.tree.leaves(grads), strict=True) if np.any(grad)}
        for grads in gradients(params)
    )
    assert of_policy | of_values == set(paths)
    if separate_value:
        assert of_values == {path for path in paths if "value_network" in path} == set(paths) - of_policy
    else:
        assert of_policy & of_values == {path for path in paths if "encoder" in path or "trunk" in path}


@pytest.mark.parametrize("number", [1, 4])
def test_dead_units_are_zero_for_the_frames_of_every_device(number):
    features = np.zeros((4, 8), np.float32)
    features[[0, 1, 2, 3, 3], [0, 2, 3, 5, 7]] = 1e-6  # frames, units
    agent = SimpleNamespace(apply=lambda params, frames, method: (frames, None))
    mesh = devices.make_mesh(rnd.Args(num_devices=number))
    specs = {"in_specs": devices.ENV_SHARDED, "out_specs": devices.REPLICATED}
    share = jax.shard_map(partial(rnd.dead_units, agent, {}), mesh=mesh, check_vma=False, **specs)
    assert share(features) == 3 / 8


ENV_IDS = np.arange(GAMES, dtype=np.int32)
HOW = {"watch": runs.Stopwatch(), "check_stop": lambda: None}


class Recording:
    """Environments that show frames uint8 [T + 1, N, 1, 84, 84] of such timesteps, whatever is played."""

    def __init__(self, frames, timesteps):
        self.frames, self.timesteps = frames, timesteps
        self.info = {"ram": np.ones((GAMES, 128), np.uint8)}

    def play(self, act, num_steps, watch, check_stop):
        for t in range(num_steps):
            act(self.frames[t], self.timesteps.episode_step[t])
        self.obs, self.episode_step = self.frames[num_steps], self.timesteps.episode_step[num_steps]
        return self.timesteps


@cache
def make_collect(args):
    return rnd.make_collect(args, rnd.make_agent(args), devices.make_mesh(args))


@cache
def make_update(args):
    return rnd.make_update(args, rnd.make_agent(args), devices.make_mesh(args))


def made_up(args, params):
    """A rollout of random frames, the EnvState after it, its timesteps, the frames, and their generator."""
    rng = np.random.default_rng(0)
    steps = random_steps(rng, T, GAMES)
    frames = rng.integers(0, 256, (T + 1, GAMES, 1, 84, 84), np.uint8)
    env_state = rnd.init_env_state(args, ENV_IDS)
    unroll, env_state = make_collect(args)(Recording(frames, steps), params, env_state, i=0, **HOW)
    return unroll.rollout, env_state, steps, frames, rng


def make_tiny(**flags):
    """Args, agent, state, rollout and steps of made-up frames, with episode ends."""
    args = rnd.Args(**SMALL | flags)
    agent = rnd.make_agent(args)
    state = init_state(rnd, args, agent)
    rollout, env_state, steps, frames, rng = made_up(args, state.params["agent"])
    state = state._replace(frame_stats=rnd.add_frames(state.frame_stats, frames[0].transpose(0, 2, 3, 1)))
    return SimpleNamespace(
        args=args, agent=agent, state=state, rollout=rollout, env_state=env_state, steps=steps, rng=rng
    )


@pytest.fixture(scope="module")
def tinies():
    return {core: make_tiny(core=core) for core in ("none", "gru")}


@pytest.fixture
def tiny(tinies):
    return tinies["none"]


def run_update(tiny, rollout, steps, **flags):
    args = replace(tiny.args, **flags)
    return jax.device_get(make_update(args)(jax.tree.map(jnp.copy, tiny.state), rollout, steps))


def test_acting_on_all_devices_equals_acting_on_one(tinies):
    tiny = tinies["gru"]
    args = replace(tiny.args, async_=False)
    rollout, env_state, *_ = made_up(args, tiny.state.params["agent"])
    assert len(rollout.logits.sharding.device_set) == 2
    assert len(tiny.rollout.logits.sharding.device_set) == 1
    np.testing.assert_array_equal(rollout.actions, tiny.rollout.actions)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), (rollout, env_state), (tiny.rollout, tiny.env_state)
    )


def test_bonus_over_rollouts_is_of_the_next_frame_and_its_filter_continues(tiny):
    """Two rollouts: the second continues the first one's returns; no junk step, no clipping, no mean taken off."""
    after, mask = np.asarray(tiny.rollout.frames.images[4:]), ~tiny.steps.is_reset
    state, parts = tiny.state, []
    novelty = partial(rnd.prediction_error, tiny.args, state.frame_stats, state.target, state.params["predictor"])
    for _ in range(2):
        raw = np.zeros((T, GAMES))
        for t, n in np.argwhere(mask):
            raw[t, n] = novelty(after[t, n][None])[0]
        parts.append((raw, np.zeros_like(mask), mask))
        bonus_filter, got_raw, got = jax.jit(partial(rnd.compute_bonuses, tiny.args))(state, tiny.rollout, mask)
        np.testing.assert_allclose(got_raw, raw, rtol=1e-3, atol=1e-6)
        state = state._replace(bonus_filter=bonus_filter)
    want, mean, var = oracle.normalize_rewards(parts, tiny.args.int_gamma, clip=np.inf)
    np.testing.assert_allclose([bonus_filter.mean, bonus_filter.var], [mean, var], rtol=1e-3)
    np.testing.assert_allclose(got, want[1], rtol=1e-3, atol=1e-6)
    most = float(np.median(got[mask]))
    learnt_from = [
        jax.jit(partial(rnd.compute_advantages, replace(tiny.args, int_reward_clip=clip), tiny.agent))(
            state, tiny.rollout, tiny.steps
        )
        for clip in (0.0, most)
    ]
    (moved, _, no_limit, metrics), (same, batch, limited, others) = learnt_from
    values, ratio = np.asarray(tiny.rollout.values), np.ones((T, GAMES))
    rewards = np.sign(tiny.steps.rewards)
    both = rnd.gae_per_head(tiny.args, rewards, limited, values=values, ratio=ratio, timesteps=tiny.steps)
    np.testing.assert_allclose(batch.returns, both + values[:-1], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(limited, np.minimum(no_limit, most), rtol=1e-4)
    assert same.bonus_filter.var == moved.bonus_filter.var
    assert others["charts/intrinsic_reward_max"] == metrics["charts/intrinsic_reward_max"] > most


def test_update_of_a_rollout_learns_from_signs_and_both_advantages(tiny):
    """Rewards by their sign; advantages 2 : 1, normalised with --norm-adv only; returns of both heads;
    statistics for the next time."""
    steps, mask = tiny.steps._replace(rewards=400 * tiny.steps.rewards), ~tiny.steps.is_reset
    prepare = jax.jit(partial(rnd.compute_advantages, replace(tiny.args, norm_adv=True), tiny.agent))
    moved, batch, bonus, metrics = prepare(tiny.state, tiny.rollout, steps)
    values, ratio = np.asarray(tiny.rollout.values), np.ones((T, GAMES))
    both = rnd.gae_per_head(tiny.args, np.sign(steps.rewards), bonus, values=values, ratio=ratio, timesteps=steps)
    total = np.asarray(2 * both[..., 0] + both[..., 1])
    want = (total - total[mask].mean()) / total[mask].std()
    np.testing.assert_allclose(batch.advantages[mask], want[mask], rtol=1e-3, atol=1e-3)
    for share, schedule in ((0.5, "0.5"), (1.0, "1.0"), (0.625, "0:1,18:0.25")):
        args, state = replace(tiny.args, int_coef=schedule), tiny.state._replace(global_step=jnp.int32(9))
        batch = jax.jit(partial(rnd.compute_advantages, args, tiny.agent))(state, tiny.rollout, steps)[1]
        want = total - (1 - share) * both[..., 1]
        np.testing.assert_allclose(batch.advantages, want, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(batch.returns, both + values[:-1], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(metrics["charts/extrinsic_reward"], np.sign(steps.rewards)[mask].mean(), rtol=1e-3)
    for i, name in enumerate(("explained_variance", "intrinsic_explained_variance")):
        unexplained = np.asarray(both)[..., i][mask].var() / np.asarray(batch.returns)[..., i][mask].var()
        np.testing.assert_allclose(metrics[f"losses/{name}"], 1 - unexplained, rtol=1e-3, atol=1e-3)
    _, raw, _ = rnd.compute_bonuses(tiny.args, tiny.state, tiny.rollout, mask)
    for name, x in {"intrinsic_reward": bonus, "prediction_error": raw}.items():
        np.testing.assert_allclose(metrics[f"charts/{name}"], np.asarray(x)[mask].mean(), rtol=1e-3)
    assert moved.bonus_filter.count == mask.sum()
    after, metrics, given = run_update(tiny, tiny.rollout, steps)
    np.testing.assert_allclose(given, bonus, rtol=1e-4)  # by the statistics from before
    encode = jax.jit(partial(tiny.agent.apply, method="encode"))
    features, _ = encode(after.params["agent"], tiny.rollout.frames.stack(T))
    assert metrics["losses/dead_units"] == (np.asarray(features) == 0).all(axis=0).mean()
    assert (after.key != np.asarray(tiny.state.key)).any()  # other minibatches the next time
    learner, errors = after, [metrics["charts/prediction_error"]]
    for _ in range(3):
        learner = learner._replace(frame_stats=tiny.state.frame_stats)
        learner, metrics, _ = run_update(SimpleNamespace(**vars(tiny) | {"state": learner}), tiny.rollout, steps)
        errors.append(metrics["charts/prediction_error"])
    assert errors[-1] < errors[0]
    jax.tree.map(np.testing.assert_array_equal, learner.target, tiny.state.target)
    np.testing.assert_allclose(after.bonus_filter.var, moved.bonus_filter.var, rtol=1e-4)
    stats, frames = after.frame_stats, np.asarray(tiny.rollout.frames.images)
    # The predictor learns by the statistics from after it.
    _, metrics, _ = run_update(tiny, tiny.rollout, steps, num_minibatches=1, update_epochs=1, update_proportion=1.0)
    predictor, reached = tiny.state.params["predictor"], frames[4:].reshape(-1, *frames.shape[2:])
    errors = rnd.prediction_error(tiny.args, stats, tiny.state.target, predictor, reached[:, None]).reshape(T, GAMES)
    np.testing.assert_allclose(metrics["losses/rnd_loss"], np.asarray(errors)[mask].mean(), rtol=1e-3)
    seen = np.float64(np.concatenate([frames[3], *frames[4:]]))  # the first were in the statistics before
    np.testing.assert_allclose(stats.mean, seen.mean(axis=0), rtol=1e-4)
    np.testing.assert_allclose(stats.var, seen.var(axis=0), rtol=1e-3)
    late = SimpleNamespace(**vars(tiny) | {"state": tiny.state._replace(global_step=jnp.int32(2500))})
    rate = run_update(late, tiny.rollout, steps)[1]["charts/learning_rate"]
    assert rate == pytest.approx(0.00275, rel=1e-3)  # by steps, not by updates


def test_predictor_with_a_lower_rate_moves_less_and_the_policy_the_same(tiny):
    """Of one and the same gradient: a quarter as far, and the policy where it would have been."""
    once = {"num_minibatches": 1, "update_epochs": 1, "update_proportion": 1.0}
    before = tiny.state.params["predictor"]
    whole, short = (
        run_update(tiny, tiny.rollout, tiny.steps, **once, predictor_lr_ratio=ratio)[0].params for ratio in (1.0, 0.25)
    )
    jax.tree.map(np.testing.assert_array_equal, whole["agent"], short["agent"])
    want = jax.tree.map(lambda start, end: start + (end - start) / 4, before, whole["predictor"])
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), short["predictor"], want)


@pytest.mark.parametrize("core", ["none", "gru"])
def test_vtrace_of_a_lagged_rollout_corrects_to_the_learners_policy(tinies, core):
    """The learner has moved on: its values and probabilities, over the actor's, are those of an agent that walks
    through the rollout step by step."""
    tiny = tinies[core]
    args = replace(tiny.args, vtrace=True)
    rng, steps, mask = np.random.default_rng(1), tiny.steps, ~tiny.steps.is_reset
    moved = jax.tree.map(lambda x: x + 0.3 * rng.normal(size=x.shape).astype("f"), tiny.state.params["agent"])
    frames, core = np.asarray(tiny.rollout.frames.images), tiny.rollout.initial_hidden_state
    logits, values = np.zeros((T + 1, GAMES, 18)), np.zeros((T + 1, GAMES, 2), np.float32)
    apply = jax.jit(tiny.agent.apply)
    for t in range(T + 1):
        seen = np.stack(
            [
                [frames[3 + t - min(back, episode_step), n] for back in (3, 2, 1, 0)]
                for n, episode_step in enumerate(steps.episode_step[t])
            ]
        )
        seen = seen[..., 0].transpose(0, 2, 3, 1)
        logits[t], values[t], core = (
            x if isinstance(x, tuple) else x[:, 0] for x in apply(moved, seen, steps.episode_step[t] == 0, core)
        )

    def picked(x):
        return np.take_along_axis(x, np.asarray(tiny.rollout.actions)[..., None], axis=-1)[..., 0]

    def probs(x):
        return np.apply_along_axis(oracle.softmax, -1, np.float64(x))

    ratio = picked(probs(logits[:T])) / picked(probs(tiny.rollout.logits))
    assert (ratio[mask] > 1.05).any()
    assert (ratio[mask] < 0.95).any()
    state = tiny.state._replace(params=tiny.state.params | {"agent": moved})
    _, batch, bonus, metrics = jax.jit(partial(rnd.compute_advantages, args, tiny.agent))(state, tiny.rollout, steps)
    given = {"values": values, "ratio": np.float32(ratio), "timesteps": steps}
    want = rnd.gae_per_head(args, np.sign(steps.rewards), bonus, **given)
    np.testing.assert_allclose(batch.returns[mask], (want + values[:-1])[mask], rtol=1e-2, atol=1e-3)
    np.testing.assert_allclose(batch.advantages[mask], (2 * want[..., 0] + want[..., 1])[mask], rtol=1e-2, atol=2e-3)
    np.testing.assert_allclose(probs(batch.logits), probs(logits[:T]), rtol=1e-2, atol=1e-5)
    assert metrics["losses/rho"] == pytest.approx(np.minimum(ratio, 1)[mask].mean(), rel=1e-3)
    assert metrics["losses/rho_clipfrac"] == pytest.approx((ratio > 1)[mask].mean(), abs=0.05)


def test_update_with_other_junk_steps_gives_the_same_parameters(tiny):
    junk = tiny.steps.is_reset
    assert 0 < junk.sum() < junk.size
    noise = np.where(junk[..., None], tiny.rng.normal(size=tiny.rollout.logits.shape), tiny.rollout.logits)
    actions = jnp.where(junk, 17, tiny.rollout.actions)
    rollout = tiny.rollout._replace(actions=actions, logits=jnp.float32(noise))
    steps = tiny.steps._replace(rewards=np.where(junk, 1.0, tiny.steps.rewards).astype("f"))
    moved = tiny.steps._replace(rewards=np.where(junk, 0, 1.0).astype("f"))
    # That games restart afterwards changes nothing either: values stand for what would have followed.
    restarted = tiny.steps._replace(forced_reset=np.ones(GAMES, bool))
    inputs = ((tiny.rollout, tiny.steps), (rollout, steps), (tiny.rollout, restarted), (tiny.rollout, moved))
    before, *same, other = (run_update(tiny, *x, vtrace=True) for x in inputs)
    for one in same:
        jax.tree.map(np.testing.assert_array_equal, before[0].params, one[0].params)
        assert before[1] == one[1]
    assert before[0].global_step == (~junk).sum()
    assert before[1] != other[1]  # and transitions do change something


@pytest.mark.parametrize("core", ["none", "gru"])
def test_predictor_in_each_minibatch_learns_from_a_new_random_quarter(tinies, core, monkeypatch):
    """Of each minibatch, each device draws a quarter of its own games' part, without repeats; over time every
    transition comes up, and no junk counts."""
    tiny, seen = tinies[core], []
    rollout = tiny.rollout
    images = np.zeros(rollout.frames.images.shape, np.uint8)
    images[-T:, :, 0, 0, 0] = np.arange(T * GAMES).reshape(T, GAMES)  # the frame after step t of game n

    def spy(loss, params, batch, weight):
        if not isinstance(batch, tuple):  # the predictor's frames, and not the policy's inputs
            jax.debug.callback(lambda *both: seen.append(both), batch[:, 0, 0, 0], weight)
        return jax.tree.map(jnp.zeros_like, params), {"loss": jnp.float32(0)}, None

    monkeypatch.setattr(devices, "gradient", spy)
    rollout = rollout._replace(frames=rollout.frames.replace(images=jnp.array(images)))
    run_update(tiny, rollout, tiny.steps, update_epochs=16)
    jax.effects_barrier()
    quarter, real = T * GAMES // 2 // 4, ~tiny.steps.is_reset.reshape(-1)
    assert len(seen) == 16 * 2 * 2
    for drawn, weight in seen:
        assert len(set(drawn.tolist())) == len(drawn) == quarter / 2
        assert len(set((drawn % GAMES // 2).tolist())) == 1
        np.testing.assert_array_equal(weight, real[drawn])
    assert len({tuple(sorted(drawn.tolist())) for drawn, _ in seen}) > 20
    assert set(np.concatenate([drawn for drawn, _ in seen]).tolist()) == set(range(T * GAMES))


# ROLLOUTS OF THE REAL GAME


@pytest.mark.parametrize("core", [pytest.param("none", marks=pytest.mark.slow), "gru"])
def test_update_without_lag_finds_the_actors_probabilities(core):
    """On the real game, as long as nothing is learnt: frame stacks and hidden states over episode ends and restarts,
    computed again, give all ratios 1."""
    flags = {"vtrace": True, "max_episode_steps": 10, "restart_every": 20, "clip_coef": 1e-3, "learning_rate": "0"}
    args = rnd.Args(**SMALL | flags, core=core)
    agent = rnd.make_agent(args)
    vec_env = envs.ReplayableVecEnv(partial(atari.make_montezuma, args), ENV_IDS, 3, args.restart_every)
    state, env_state = init_state(rnd, args, agent), rnd.init_env_state(args, ENV_IDS)
    state.params["agent"]["params"]["policy"]["kernel"] *= 10_000  # it starts nearly uniform: no mistake would show
    state_sharding, *shardings = devices.shardings(
        devices.make_mesh(args), (rnd.STATE_SPECS, rnd.ROLLOUT_SPECS, envs.TIMESTEP_SPECS)
    )
    state, seen = jax.device_put(state, state_sharding), []
    local = jax.device_put(jax.device_get(state.params["agent"]), jax.devices()[-1])
    for i in range(6):
        unroll, env_state = make_collect(args)(vec_env, local, env_state, i=i, **HOW)
        seen.append(unroll)
        inputs = jax.device_put([unroll.rollout, unroll.timesteps], shardings)
        state, metrics, _ = make_update(args)(state, *inputs)
        assert metrics["losses/rho"] == pytest.approx(1, abs=1e-3)
        assert abs(metrics["losses/approx_kl"]) < 1e-5
        assert metrics["losses/clipfrac"] == 0
        assert metrics["losses/entropy"] < 2.8
        np.testing.assert_array_equal(unroll.rooms, 1)
        assert set(unroll.pictures) == {1}
    vec_env.close()
    assert sum(unroll.timesteps.episode_end.sum() for unroll in seen) >= 4 * GAMES
    assert [unroll.timesteps.forced_reset.all() for unroll in seen] == [False, False, True] * 2
    np.testing.assert_array_equal(seen[3].timesteps.episode_step[0], 0)
    assert seen[2].timesteps.episode_step[-1].all()  # there the games were in the midst of episodes
    logits = np.concatenate([unroll.rollout.logits for unroll in seen])
    assert logits.std(axis=(0, 1)).max() > 0.1  # it does see differences


def test_two_rollouts_equal_one_of_twice_the_length():
    """History, hidden state and draws continue over the border of a rollout; and each step draws anew."""
    rng, parts = np.random.default_rng(0), {}
    frames = rng.integers(0, 256, (9, GAMES, 1, 84, 84), np.uint8)
    episode_step = np.arange(9)[:, None] * np.ones(GAMES, np.int32)
    for size in (4, 8):
        args = rnd.Args(**SMALL | {"num_steps": size, "core": "gru"})
        agent, env_state, parts[size] = rnd.make_agent(args), rnd.init_env_state(args, ENV_IDS), []
        params = init_state(rnd, args, agent).params["agent"]
        for i in range(8 // size):
            frame, step = frames[i * size : (i + 1) * size + 1], episode_step[i * size : (i + 1) * size + 1]
            vec_env = Recording(frame, SimpleNamespace(episode_step=step))
            unroll, env_state = make_collect(args)(vec_env, params, env_state, i=i, **HOW)
            parts[size].append(unroll.rollout)
    (first, second), (whole,) = parts[4], parts[8]
    np.testing.assert_allclose(np.concatenate([first.logits, second.logits]), whole.logits, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(np.concatenate([first.values[:4], second.values]), whole.values, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(env_state.hidden_state[0], whole.env_state.hidden_state[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(first.actions, whole.actions[:4])
    rows = [tuple(row) for row in np.concatenate([whole.actions, second.actions]).tolist()]
    assert len(set(rows)) > 8
