"""Ape-X's parts against independent oracles."""

import itertools
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import rlax
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ppo_math import random_steps

import apex_procgen as apex
from common import compute, envs, runs

relaxed = settings(deadline=None, max_examples=25)
seeds = st.integers(0, 2**32 - 1)
T, GAMES = 4, 6


def make_args(**flags):
    return apex.Args(**{
        "num_envs": GAMES, "num_actors": 2, "num_steps": T, "buffer_size": 20 * GAMES, "learning_starts": 60,
        "batch_size": 32, "n_step": 3, "num_atoms": 11, "encoder": "nature", "width": 1, "hidden": 8,
        "pool": "flatten", "replay_ratio": 1.0,
    } | flags)  # fmt: skip


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


# THE LOSS


@relaxed
@given(seeds, st.sampled_from([2, 51]), st.floats(0, 1))
def test_projection_equals_the_papers_algorithm_and_rlax(seed, atoms, discount):
    rng = np.random.default_rng(seed)
    support = np.linspace(-3, 7, atoms, dtype=np.float32)
    returns, discounts = 4 * normal(rng, 5), np.full(5, discount, np.float32)
    probs = rng.dirichlet(np.ones(atoms), 5).astype(np.float32)
    got = apex.project(jnp.array(support), returns, discounts, probs)
    want = [oracle.project(support.astype(np.float64), r, discount, p) for r, p in zip(returns, probs, strict=True)]
    np.testing.assert_allclose(got, want, atol=2e-5)
    moved = returns[:, None] + discounts[:, None] * support
    theirs = jax.vmap(rlax.categorical_l2_project, (0, 0, None))(moved, probs, support)
    np.testing.assert_allclose(got, theirs, atol=2e-5)


class Table:
    """Stands for the network: its parameters are the outputs of every state, its frames are states."""

    def __init__(self, args):
        self.support = apex.make_agent(args).support

    @staticmethod
    def apply(params, states, keys=None):
        return params[states]


def random_batch(rng, args, states=7):
    size = args.batch_size
    weight = rng.random(size, np.float32) * (rng.random(size) < 0.9)
    place = np.arange(size)
    return apex.Batch(
        rng.integers(0, states, size), rng.integers(0, states, size), rng.integers(0, 15, size, np.int32),
        4 * normal(rng, size), rng.random(size, np.float32), weight.astype(np.float32), place, place * 0, place,
        jax.random.split(jax.random.PRNGKey(0), size),
    )  # fmt: skip


@relaxed
@given(seeds, st.booleans(), st.sampled_from([1, 11, 51]))
def test_loss_equals_the_sums_by_hand(seed, double_q, atoms):
    args = make_args(double_q=double_q, num_atoms=atoms)
    rng, agent = np.random.default_rng(seed), Table(args)
    params, target = 2 * normal(rng, 2, 7, 15, atoms)
    batch = random_batch(rng, args)
    total, parts = apex.loss(args, agent, jnp.array(target), jnp.array(params), batch)
    want, tds = [], []
    for i in range(args.batch_size):
        one = jax.tree.map(lambda x: x[i], batch)  # noqa: B023
        outputs = (x.astype(np.float64) for x in (
            params[one.frames, one.actions], params[one.next_frames], target[one.next_frames]
        ))  # fmt: skip
        loss, td = oracle.apex_loss(args, np.array(agent.support), one.weight, *outputs, one.returns, one.discounts)
        want.append(loss)
        tds.append(td)
    np.testing.assert_allclose(total, np.mean(want), rtol=1e-3)
    np.testing.assert_allclose(parts["td"], tds, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(parts["td_error"], np.mean(tds), rtol=1e-3)


@pytest.mark.parametrize("atoms", [1, 11])
def test_gradient_equals_rlax(atoms):
    args = make_args(num_atoms=atoms)
    rng, agent = np.random.default_rng(0), Table(args)
    params, target = jnp.array(2 * normal(rng, 2, 7, 15, atoms))
    batch = random_batch(rng, args)
    value = partial(apex.mean_value, agent)

    def theirs(params):
        online, following = params[batch.frames], target[batch.next_frames]
        selector, common = value(params[batch.next_frames]), (batch.returns, batch.discounts)
        if atoms == 1:
            td = jax.vmap(rlax.double_q_learning)(value(online), batch.actions, *common, value(following), selector)
            losses = rlax.huber_loss(td)
        else:
            z = jnp.array(agent.support)
            losses = jax.vmap(rlax.categorical_double_q_learning, (None, 0, 0, 0, 0, None, 0, 0))(
                z, online, batch.actions, *common, z, following, selector
            )
        return (losses * batch.weight).mean()

    got = jax.grad(lambda params: apex.loss(args, agent, target, params, batch)[0])(params)
    np.testing.assert_allclose(got, jax.grad(theirs)(params), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("flags", [{}, {"dropout": 0.3, "augment": "translate", "dueling": False, "num_atoms": 1}])
def test_update_on_every_core_equals_the_whole(flags, monkeypatch):
    """Also the TD errors, which come back at their samples' places."""
    args = make_args(**flags)
    agent, rng = apex.make_agent(args), np.random.default_rng(1)
    frames = rng.integers(0, 256, (2, args.batch_size, 64, 64, 6), np.uint8)
    batch = random_batch(rng, args)._replace(frames=frames[0], next_frames=frames[1])
    run = lambda: apex.update(args, agent, compute.replicate(apex.initial_state(args, agent)), batch)  # noqa: E731
    state, td, metrics = run()
    jax.clear_caches()
    monkeypatch.setattr(compute, "on_cpu", lambda: False)
    want_state, want_td, want = run()
    np.testing.assert_allclose(td, want_td, rtol=1e-3, atol=1e-4)
    for name, x in want.items():
        np.testing.assert_allclose(metrics[name], x, rtol=1e-3, atol=1e-5, err_msg=name)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), state.opt_state, want_state.opt_state)
    jax.clear_caches()


def test_target_is_copied_every_so_many_updates():
    args = make_args(target_network_frequency=3, learning_rate="0.01")
    agent, rng = apex.make_agent(args), np.random.default_rng(1)
    frames = rng.integers(0, 256, (2, args.batch_size, 64, 64, 6), np.uint8)
    batch = random_batch(rng, args)._replace(frames=frames[0], next_frames=frames[1])
    state, same = compute.replicate(apex.initial_state(args, agent)), []
    for _ in range(6):
        state, _, _ = apex.update(args, agent, state, batch)
        leaves = zip(jax.tree.leaves(state.params), jax.tree.leaves(state.target), strict=True)
        same.append(all(np.array_equal(a, b) for a, b in leaves))
    assert same == [False, False, True, False, False, True]


def test_values_start_near_zero():
    frames = np.random.default_rng(0).integers(0, 256, (8, 64, 64, 6), np.uint8)
    for flags in ({}, {"dueling": False}, {"num_atoms": 1}, {"num_atoms": 99}):
        agent = apex.make_agent(make_args(**flags))
        values = apex.mean_value(agent, agent.apply(agent.init(jax.random.PRNGKey(0), frames), frames))
        assert values.shape == (8, 15)
        assert np.abs(values).max() < 1


# THE REPLAY BUFFER


def play(args, rng, unrolls):
    """Made-up unrolls, and the same steps in one piece; a frame's first number is its step, its second its game."""
    steps = random_steps(rng, T * unrolls, GAMES)
    frames = np.zeros((T * unrolls, GAMES, 64, 64, 3), np.uint8)
    frames[..., 0, 0, 0], frames[..., 0, 0, 1] = np.arange(len(frames))[:, None], np.arange(GAMES)
    actions = rng.integers(0, 15, frames.shape[:2], np.int32)
    chosen, best = normal(rng, *actions.shape), normal(rng, *actions.shape)
    replay, past, each = apex.initial_replay(args), envs.history_length(args), GAMES // args.num_actors
    for i in range(unrolls):
        now = slice(i * T, (i + 1) * T)
        rollouts = []
        for actor in range(args.num_actors):
            mine = now, slice(actor * each, (actor + 1) * each)
            older = np.zeros((past, each, 64, 64, 3), np.uint8)
            rollouts.append(apex.Rollout(
                np.concatenate([older, frames[mine]]), actions[mine], chosen[mine], best[mine], None, None, None
            ))  # fmt: skip
        some = envs.Steps(*(x[now] for x in steps[:4]), steps.age[i * T : (i + 1) * T + 1])
        replay = apex.insert(args, replay, rollouts, some)
    return SimpleNamespace(replay=replay, steps=steps, actions=actions, chosen=chosen, best=best)


def first_priority(args, game, t, n):
    returns, discount, after = oracle.n_step(
        args.gamma, args.n_step, game.steps.rewards[:, n], game.steps.terminated[:, n], game.steps.ended[:, n], t
    )
    td = returns + discount * game.best[after, n] - game.chosen[t, n]
    return (abs(td) + 1e-6) ** args.per_alpha


@pytest.mark.parametrize("unrolls", [1, 3, 5, 6, 13])
@pytest.mark.parametrize("n_step", [1, 3])
def test_insert_gives_priorities_to_what_can_be_sampled(unrolls, n_step):
    """20 rows: before, when and after the ring is full."""
    args = make_args(n_step=n_step)
    game = play(args, np.random.default_rng(unrolls), unrolls)
    size, past, end = apex.buffer_rows(args), envs.history_length(args), T * unrolls
    assert size == 20
    oldest = 0 if end <= size - past else end - size + past  # its whole stack is still there
    want = np.zeros((size, GAMES))
    for t in range(oldest, end - n_step):
        for n in range(GAMES):
            known = t >= min(game.steps.age[t, n], past)  # the games were going on before the first row
            want[t % size, n] = first_priority(args, game, t, n) if known and not game.steps.done[t, n] else 0
    np.testing.assert_allclose(game.replay.priorities, want, rtol=1e-3, atol=1e-5)
    assert (want > 0).sum() > (n_step == 1 or unrolls > 1)
    rows = np.arange(max(end - size, 0), end)
    np.testing.assert_array_equal(game.replay.frames[rows % size, :, 0, 0, 0], rows[:, None] + np.zeros(GAMES, int))
    np.testing.assert_array_equal(game.replay.actions[rows % size], game.actions[rows])


@pytest.mark.parametrize("frame_stack", [1, 4])
def test_samples_are_the_transitions_that_were_played(frame_stack):
    """Stacks never reach over an episode's first frame, returns never over its end; also around the ring's end."""
    args = make_args(batch_size=64, frame_stack=frame_stack, gap_stack=False)
    game = play(args, np.random.default_rng(0), 13)
    end, size, seen = 13 * T, apex.buffer_rows(args), set()
    for i in range(8):
        batch = apex.sample(args, game.replay, i, 0.6)
        for b in range(args.batch_size):
            t = int(end - 1 - (end - 1 - batch.row[b]) % size)
            n = int(batch.env[b])
            seen.add((t, n))
            assert not game.steps.done[t, n]
            parts = (x[:, n] for x in (game.steps.rewards, game.steps.terminated, game.steps.ended))
            returns, discount, after = oracle.n_step(args.gamma, args.n_step, *parts, t)
            np.testing.assert_allclose(batch.returns[b], returns, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(batch.discounts[b], discount, rtol=1e-5)
            assert batch.actions[b] == game.actions[t, n]
            for stack, newest in ((batch.frames[b], t), (batch.next_frames[b], after)):
                age = game.steps.age[newest, n]
                want = [newest - min(age, back) for back in range(frame_stack - 1, -1, -1)]
                np.testing.assert_array_equal(stack[0, 0, 0::3], want)
                assert (stack[0, 0, 1::3] == n).all()
    assert len(seen) > 50


def test_sampling_follows_the_priorities():
    args = make_args(batch_size=32, per_alpha=0.7)
    replay = play(args, np.random.default_rng(3), 13).replay
    rng = np.random.default_rng(0)
    priorities = np.where(replay.priorities > 0, rng.random(replay.priorities.shape) ** 3, 0).astype(np.float32)
    replay = replay._replace(priorities=jnp.array(priorities))
    counts, probability = np.zeros(priorities.shape), priorities.astype(np.float64) / priorities.sum(dtype=np.float64)
    for i in range(400):
        batch = apex.sample(args, replay, i, 0.6)
        np.add.at(counts, (batch.row, batch.env), 1)
        drawn = probability[batch.row, batch.env]
        weight = ((priorities > 0).sum() * drawn) ** -0.6
        np.testing.assert_allclose(batch.weight, weight / weight.max(), rtol=1e-3)
    assert counts[priorities == 0].sum() == 0
    often = probability * counts.sum() > 5
    expected = probability[often] * counts.sum()
    observed = counts[often] * expected.sum() / counts[often].sum()
    # Stratified draws vary less than independent ones: the statistic is at most the chi-square's.
    assert scipy.stats.chisquare(observed, expected).pvalue > 0.01
    assert scipy.stats.chisquare(observed, np.full(len(observed), observed.mean())).pvalue < 1e-6  # it can fail


def test_priorities_of_a_batch_are_updated():
    args = make_args(batch_size=4)
    replay = play(args, np.random.default_rng(3), 5).replay
    batch = random_batch(np.random.default_rng(0), args)._replace(
        row=jnp.array([5, 5, 6, 7]), env=jnp.array([1, 1, 2, 3]), weight=jnp.array([1.0, 1, 0.5, 0])
    )
    td = jnp.array([0.25, 4, 9, 100])
    want = np.array(replay.priorities)
    want[5, 1], want[6, 2], want[7, 3] = 2, 3, 0  # of two the larger; nothing for what was no transition
    got = apex.set_priorities(args, replay.priorities, batch, td)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


def test_games_that_start_anew_truncate_their_episodes():
    args = make_args()
    game = play(args, np.random.default_rng(3), 4)
    last, done = 4 * T - 1, game.steps.done
    replay = apex.cut(game.replay)
    np.testing.assert_array_equal(replay.done[last], True)
    np.testing.assert_array_equal(replay.ended[last - 1], game.steps.ended[last - 1] | ~done[last - 1])
    np.testing.assert_array_equal(replay.terminated[: 4 * T], game.steps.terminated)
    row, env = jnp.full(GAMES, last - 2), jnp.arange(GAMES)
    _, discounts, after = apex.n_step_return(args, replay, row, env)
    going_on = ~(game.steps.ended[last - 2] | game.steps.ended[last - 1] | done[last - 2])
    assert going_on.any()
    np.testing.assert_array_equal(after[going_on], last)
    np.testing.assert_allclose(discounts[going_on], args.gamma**2, rtol=1e-5)


def test_exploration_is_the_papers():
    args = make_args(num_envs=8)
    np.testing.assert_allclose(apex.epsilons(args), 0.4 ** np.arange(1, 9), rtol=1e-5)
    assert apex.epsilons(make_args(num_envs=1, num_actors=1)) == np.float32(0.4)
    values, epsilon = jnp.tile(jnp.arange(15.0), (4000, 1)), jnp.repeat(jnp.array([0.0, 0.3]), 2000)
    actions = np.asarray(apex.explore(jax.random.PRNGKey(0), values, epsilon))
    assert (actions[:2000] == 14).all()
    assert (actions[2000:] != 14).mean() == pytest.approx(0.3 * 14 / 15, abs=0.03)
    assert len(np.unique(actions)) == 15


def test_updates_follow_the_steps_played():
    args = make_args(replay_ratio=0.7, batch_size=32)
    steps = np.cumsum(np.random.default_rng(0).integers(0, 90, 200))
    due = [apex.updates_due(args, 1000, a, b) for a, b in itertools.pairwise(steps)]
    assert sum(due) == int(0.7 * (steps[-1] - 1000) / 32)
    assert sum(n for n, step in zip(due, steps[1:], strict=True) if step <= 1000) == 0


def test_the_learner_sees_what_the_actors_saw():
    """On real games the values of sampled frames are those that the actors had: stacks, ages and rows are right."""
    args = make_args(num_envs=4, num_steps=60, buffer_size=4 * 180, n_step=5, env_id="bigfish", sticky_actions=0.25,
                     batch_size=64)  # fmt: skip
    agent = apex.make_agent(args)
    params, replay = apex.initial_state(args, agent).params, apex.initial_replay(args)
    games = [envs.Games(partial(envs.make_levels, args, 2), 3 + actor) for actor in range(2)]
    carries, ends = [apex.initial_carry(args)] * 2, 0
    for i in range(4):
        unrolls = []
        for actor in range(2):
            unroll, carries[actor] = apex.collect(
                args, agent, games, actor, i, params, carries[actor], runs.Stopwatch(), lambda: None
            )
            unrolls.append(unroll)
        steps = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *(unroll.steps for unroll in unrolls))
        ends += steps.ended.sum()
        replay = apex.insert(args, replay, [unroll.rollout for unroll in unrolls], steps)
    assert ends > 2
    for i in range(4):
        batch = apex.sample(args, replay, i, 0.4)
        values = apex.mean_value(agent, agent.apply(params, batch.frames))
        np.testing.assert_allclose(
            values[jnp.arange(64), batch.actions], replay.chosen[batch.row, batch.env], rtol=1e-3, atol=1e-4
        )
        following = apex.mean_value(agent, agent.apply(params, batch.next_frames)).max(axis=1)
        _, _, after = apex.n_step_return(args, replay, batch.row, batch.env)
        np.testing.assert_allclose(following, replay.best[after, batch.env], rtol=1e-3, atol=1e-4)
    for mine in games:
        mine.close()


# A GAME WITH KNOWN VALUES


ROOMS = np.broadcast_to(255 * np.eye(3, dtype=np.uint8)[:, None, None], (3, 64, 64, 3))  # red, green and blue


def chain(args, rng, steps):
    """Three rooms in a row. In room i, action i + 1 leads on (from the last: out, with a reward of 2); any other ends
    the episode. Leaving room 1 the right way pays 1, room 0 the wrong way 0.1. Returns frames, actions and Steps."""
    room, age, over = np.zeros((3, GAMES), int)
    rows = {name: [] for name in ("frames", "actions", "rewards", "terminated", "done", "age")}
    for _ in range(steps):
        actions = np.where(rng.random(GAMES) < 0.6, room + 1, rng.integers(0, 15, GAMES))
        right = actions == room + 1
        rewards = np.where(right, np.array([0, 1, 2])[room], np.array([0.1, 0, 0])[room])
        ends = (~right | (room == 2)) & ~over.astype(bool)
        for name, x in {"frames": ROOMS[room], "actions": actions, "rewards": rewards * (over == 0), "terminated": ends,
                        "done": over == 1, "age": age}.items():  # fmt: skip
            rows[name].append(np.array(x))
        room = np.where(over == 1, 0, np.where(ends, room, room + 1))
        age, over = np.where(over == 1, 0, age + 1), ends.astype(int)
    rows = {name: np.stack(x) for name, x in rows.items()}
    age = np.concatenate([rows["age"], age[None]]).astype(np.int32)
    terminated, done = rows["terminated"], rows["done"]
    return (rows["frames"], rows["actions"].astype(np.int32)), envs.Steps(
        rows["rewards"].astype(np.float32), terminated, terminated & False, done, age
    )


@pytest.mark.parametrize("atoms", [1, 31])
def test_known_values_are_learnt(atoms):
    args = make_args(
        num_actors=1, num_steps=50, buffer_size=400 * GAMES, n_step=1, num_atoms=atoms, v_min=-1, v_max=4, gamma=0.9,
        channels="4,8,8", batch_size=64, frame_stack=1, learning_rate="0:3e-3,350:1e-4", hidden=32,
        target_network_frequency=10, per_alpha=0, adam_eps=1e-8,
    )  # fmt: skip
    agent, rng, replay = apex.make_agent(args), np.random.default_rng(0), apex.initial_replay(args)
    (frames, actions), steps = chain(args, rng, 400)
    for i in range(8):
        now = slice(50 * i, 50 * i + 50)
        past = np.zeros((1, GAMES, 64, 64, 3), np.uint8)
        zero = np.zeros((50, GAMES), np.float32)
        rollout = apex.Rollout(np.concatenate([past, frames[now]]), actions[now], zero, zero, None, None, None)
        some = envs.Steps(*(x[now] for x in steps[:4]), steps.age[50 * i : 50 * i + 51])
        replay = apex.insert(args, replay, [rollout], some)
    state = compute.replicate(apex.initial_state(args, agent))
    for i in range(400):
        batch = compute.replicate(apex.sample(args, replay, i, 1.0))
        state, td, _ = jax.block_until_ready(apex.update(args, agent, state._replace(global_step=i), batch))
        batch, td = jax.device_put((batch, td), jax.devices()[0])
        replay = replay._replace(priorities=apex.set_priorities(args, replay.priorities, batch, td))
    values = np.asarray(apex.mean_value(agent, agent.apply(state.params, ROOMS)))
    np.testing.assert_allclose([values[i, i + 1] for i in range(3)], [0.9 * 2.8, 2.8, 2], atol=0.25)
    np.testing.assert_allclose([np.delete(values[i], i + 1).mean() for i in range(3)], [0.1, 0, 0], atol=0.25)


def test_flags_of_one_network_leave_the_other():
    """`--hidden` is of the streams: the encoder has no dense layer of its own."""
    args = make_args(hidden=24)
    shapes = jax.eval_shape(partial(apex.initial_state, args, apex.make_agent(args))).params["params"]
    assert "Dense_0" not in shapes["encoder"]
    assert shapes["Dense_0"]["kernel"].shape == (1024, 24)
    same = replace(args, dueling=False)
    assert "Dense_2" not in jax.eval_shape(partial(apex.initial_state, same, apex.make_agent(same))).params["params"]
