"""The replay buffer against independent oracles."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import scipy.stats
from rollouts import random_steps

from common import envs, replay

T, GAMES, LENGTH = 4, 6, 20
GAMMA, ALPHA = 0.99, 0.5
insert = jax.jit(replay.insert, static_argnames=("n_step", "gamma", "per_alpha"))
draw = jax.jit(replay.sample, static_argnames=("batch_size", "n_step", "gamma"))


def restart(steps, t, n):
    """Game n restarts before its step t."""
    steps.is_reset[t, n], steps.episode_step[t, n] = False, 0
    for later in range(t + 1, len(steps.episode_step)):
        steps.episode_step[later, n] = 0 if steps.is_reset[later - 1, n] else steps.episode_step[later - 1, n] + 1


def play(rng, inserts, *, rows=T, offsets=(3, 0), n_step=3, restart_after=(), curious=False):
    """Made-up steps, inserted some rows at a time; half of the games restart after some of these inserts.

    A frame's first number is its step, its second its game. `lost` are the steps whose transition is unknown. With
    `curious` there are several policies, as with --num-policies: each game has its own discount factor, and a bonus for
    each frame but an episode's first.
    """
    steps = random_steps(rng, rows * inserts, GAMES)
    lost = np.zeros(steps.is_reset.shape, bool)
    restarts = np.zeros((inserts, GAMES), bool)
    for i in restart_after:
        restarts[i, i % 2 :: 2] = True
        for n in np.flatnonzero(restarts[i]):
            lost[(i + 1) * rows - 1, n] = not steps.terminated[(i + 1) * rows - 1, n]
            if i + 1 < inserts:
                restart(steps, (i + 1) * rows, n)
    images = np.zeros((*steps.is_reset.shape, 64, 64, 3), np.uint8)
    images[..., 0, 0, 0], images[..., 0, 0, 1] = np.arange(len(images))[:, None], np.arange(GAMES)
    actions = rng.integers(0, 15, steps.is_reset.shape, np.int32)
    action_value, state_value = rng.normal(size=(2, *actions.shape)).astype(np.float32)
    gammas, rewards, family, bonus = np.full(GAMES, GAMMA), steps.rewards, [{}] * inserts, None
    if curious:
        gammas, bonus = rng.uniform(0.5, 1, GAMES).astype(np.float32), rng.normal(size=rewards.shape).astype(np.float32)
        bonus *= steps.episode_step[:-1] > 0
        rewards = rewards + np.concatenate([bonus[1:], bonus[:1]])  # of the frame that a step leads to
        policies = replay.Policies(np.arange(GAMES, dtype=np.int32) % 4, gammas)
        family = [{"policies": policies, "bonus": bonus[i * rows : (i + 1) * rows]} for i in range(inserts)]
    buffer, past = replay.init(LENGTH, GAMES, offsets, curious), max(*offsets, 1)
    for i in range(inserts):
        now = slice(i * rows, (i + 1) * rows)
        older = np.zeros((past, GAMES, 64, 64, 3), np.uint8)
        parts = (steps.rewards, steps.terminated, steps.episode_end, steps.is_reset, action_value, state_value)
        frames = envs.Frames(np.concatenate([older, images[now]]), steps.episode_step[now], offsets)
        new = replay.Rows(frames, actions[now], *(x[now] for x in parts))
        buffer = insert(buffer, new, restarts[i], n_step=n_step, gamma=GAMMA, per_alpha=ALPHA, **family[i])
    return SimpleNamespace(
        buffer=buffer,
        steps=steps,
        rewards=rewards,
        gammas=gammas,
        lost=lost,
        actions=actions,
        action_value=action_value,
        state_value=state_value,
    )


def return_of(game, t, n, n_step=3):
    parts = (x[:, n] for x in (game.rewards, game.steps.terminated, game.steps.episode_end))
    return oracle.n_step(float(game.gammas[n]), n_step, *parts, t, game.lost[:, n])


@pytest.mark.parametrize(
    ("inserts", "rows", "restart_after"),
    [(1, 4, []), (3, 4, [1]), (5, 4, [4]), (6, 4, [4]), (13, 4, [8, 11]), (13, 4, []), (33, 1, [16, 31, 32])],
)
@pytest.mark.parametrize(("n_step", "curious"), [(1, False), (3, False), (3, True)])
def test_insert_of_random_steps_gives_priorities_to_what_can_be_sampled(inserts, rows, restart_after, n_step, curious):
    """20 rows: before, when and after the ring is full, and with games that restart."""
    rng = np.random.default_rng(inserts)
    game = play(rng, inserts, rows=rows, n_step=n_step, restart_after=restart_after, curious=curious)
    past, end = 3, rows * inserts
    oldest = 0 if end <= LENGTH - past else end - LENGTH + past  # its whole stack is still there
    want = np.zeros((LENGTH, GAMES))
    for t in range(oldest, end - n_step):
        for n in range(GAMES):
            known = t >= min(game.steps.episode_step[t, n], past)  # the games were going on before the first row
            if known and not game.steps.is_reset[t, n] and not game.lost[t, n]:
                returns, discount, after = return_of(game, t, n, n_step)
                td = returns + discount * game.state_value[after, n] - game.action_value[t, n]
                want[t % LENGTH, n] = (abs(td) + 1e-6) ** ALPHA
    np.testing.assert_allclose(game.buffer.priorities, want, rtol=1e-3, atol=1e-5)
    assert (want > 0).sum() > (n_step == 1 or inserts > 1)
    held = np.arange(max(end - LENGTH, 0), end)
    images = game.buffer.rows.frames.images
    np.testing.assert_array_equal(images[held % LENGTH, :, 0, 0, 0], held[:, None] + np.zeros(GAMES, int))
    np.testing.assert_array_equal(game.buffer.rows.actions[held % LENGTH], game.actions[held])
    np.testing.assert_array_equal(game.buffer.rows.terminated[held % LENGTH], game.steps.terminated[held])
    assert game.buffer.written == end


@pytest.mark.parametrize(("offsets", "curious"), [((0,), True), ((3, 2, 1, 0), False)])
def test_samples_around_episode_ends_and_restarts_are_what_was_played(offsets, curious):
    """Stacks never reach over an episode's first frame, returns never over its end or over where a game restarted;
    also around the ring's end."""
    game = play(np.random.default_rng(0), 13, offsets=offsets, restart_after=[8, 9, 10, 11], curious=curious)
    end, seen = 13 * T, set()
    cut = 0
    for i in range(8):
        batch = draw(game.buffer, jax.random.PRNGKey(i), 0.6, batch_size=64, n_step=3, gamma=GAMMA)
        batch = jax.device_get(batch)
        for b in range(64):
            t = int(end - 1 - (end - 1 - batch.row[b]) % LENGTH)
            n = int(batch.env[b])
            seen.add((t, n))
            assert not game.steps.is_reset[t, n]
            assert not game.lost[t, n]
            returns, discount, after = return_of(game, t, n)
            cut += game.lost[after, n]
            np.testing.assert_allclose(batch.returns[b], returns, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(batch.discounts[b], discount, rtol=1e-5)
            assert batch.actions[b] == game.actions[t, n]
            assert batch.policies[b] == n % 4 if curious else batch.policies is None
            stacks = [(batch.frames[b], t), (batch.next_frames[b], after)]
            if curious:
                stacks.append((batch.one_step_frames[b], t + 1))
            for stack, newest in stacks:
                want = [newest - min(game.steps.episode_step[newest, n], back) for back in offsets]
                np.testing.assert_array_equal(stack[0, 0, 0::3], want)
                assert (stack[0, 0, 1::3] == n).all()
    assert len(seen) > 40
    assert cut > 5
    assert len(np.unique(batch.keys, axis=0)) == 64


def test_samples_of_random_priorities_follow_them():
    buffer = play(np.random.default_rng(3), 13).buffer
    rng = np.random.default_rng(0)
    priorities = np.where(buffer.priorities > 0, rng.random(buffer.priorities.shape) ** 3, 0).astype(np.float32)
    buffer = buffer._replace(priorities=jnp.array(priorities))
    counts, probability = np.zeros(priorities.shape), priorities.astype(np.float64) / priorities.sum(dtype=np.float64)
    for i in range(400):
        batch = draw(buffer, jax.random.PRNGKey(i), 0.6, batch_size=32, n_step=3, gamma=GAMMA)
        row, env, weight = jax.device_get((batch.row, batch.env, batch.weight))
        np.add.at(counts, (row, env), 1)
        want = ((priorities > 0).sum() * probability[row, env]) ** -0.6
        np.testing.assert_allclose(weight, want / want.max(), rtol=1e-3)
        # One of each of 32 parts of the sum (Schaul et al. 2016, appendix B.2.1): of rows, which stand in their order.
        ends, part = np.append(0, np.cumsum(probability.sum(axis=1))), np.arange(32) / 32
        assert (ends[row] < part + 1 / 32 + 1e-6).all()
        assert (ends[row + 1] > part - 1e-6).all()
    assert counts[priorities == 0].sum() == 0
    often = probability * counts.sum() > 5
    expected = probability[often] * counts.sum()
    observed = counts[often] * expected.sum() / counts[often].sum()
    # Stratified draws vary less than independent ones: the statistic is at most the chi-square's.
    assert scipy.stats.chisquare(observed, expected).pvalue > 0.01
    assert scipy.stats.chisquare(observed, np.full(len(observed), observed.mean())).pvalue < 1e-6  # it can fail


def test_priorities_of_a_batch_are_replaced_by_the_larger_new_one():
    buffer = play(np.random.default_rng(3), 5).buffer
    batch = replay.Batch(*[None] * 9)._replace(
        row=jnp.array([5, 5, 6, 7]), env=jnp.array([1, 1, 2, 3]), weight=jnp.array([1.0, 1, 0.5, 0])
    )
    td = jnp.array([0.25, 4, 9, 100])
    want = np.array(buffer.priorities)
    want[5, 1], want[6, 2], want[7, 3] = 2, 3, 0  # of two the larger; nothing for what cannot be drawn
    got = replay.set_priorities(buffer, batch, td, per_alpha=ALPHA)
    np.testing.assert_allclose(got.priorities, want, rtol=1e-3, atol=1e-4)
    assert got.rows is buffer.rows
    np.testing.assert_array_equal(replay.priority(td, 0.0), 1)  # uniform
