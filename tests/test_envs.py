"""Frame stacks, episode statistics, and what this project relies on in EnvPool."""

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import envs
from ppo_procgen import Args


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.booleans())
def test_frame_stack_across_episode_ends(seed, frame_stack, gap_stack):
    rng = np.random.default_rng(seed)
    frames, first = rng.integers(0, 256, (15, 2, 1, 1, 3), np.uint8), rng.random((15, 2)) < 0.3
    first[0] = True
    age = np.zeros((15, 2), np.int32)
    for t in range(1, 15):
        age[t] = np.where(first[t], 0, age[t - 1] + 1)
    time, env = (x.reshape(-1) for x in np.indices((15, 2)))
    offsets = envs.stack_offsets(frame_stack, gap_stack)
    got = envs.stack_frames(jnp.asarray(frames), age.reshape(-1), time, env, offsets)
    want = oracle.frame_stacks(frames, first, frame_stack, gap_stack)
    np.testing.assert_array_equal(got.reshape(want.shape), want)


def test_episode_statistics_leave_out_steps_that_are_no_transition():
    stats = envs.EpisodeStatistics(2)
    assert stats.metrics() == {}
    rewards = np.array([[1, 1], [2, 1], [99, 1], [4, 1]], np.float32)
    ends = np.array([[0, 0], [1, 0], [0, 0], [1, 0]], bool)
    mask = np.array([[1, 1], [1, 1], [0, 1], [1, 1]], bool)
    age = np.zeros((5, 2), np.int32)
    stats.add(envs.Steps(rewards, ends, np.zeros_like(ends), ~mask, age))
    assert stats.metrics() == {"charts/episodic_return": 3.5, "charts/episodic_length": 1.5}
    copy = envs.EpisodeStatistics(2)
    copy.restore(stats.save())
    for s in (stats, copy):
        no = np.zeros((1, 2), bool)
        s.add(envs.Steps(np.ones((1, 2), np.float32), no, ~no, no, age[:2]))
    assert stats.metrics() == copy.metrics() == {
        "charts/episodic_return": np.mean([3, 4, 1, 5]), "charts/episodic_length": np.mean([2, 1, 1, 5])
    }  # fmt: skip


@pytest.fixture(scope="module")
def make():
    return lambda seed: envs.make_procgen("bigfish", 3, seed)


def test_games_come_back_where_they_were(make):
    rng = np.random.default_rng(0)
    games = envs.Games(make, seed=5)
    for _ in range(150):
        games.step(rng.integers(0, 15, 3))
    copy = envs.Games(make, seed=6)
    copy.restore(games.save())
    for _ in range(100):
        np.testing.assert_array_equal(games.obs, copy.obs)
        np.testing.assert_array_equal(games.age, copy.age)
        np.testing.assert_array_equal(games.done, copy.done)
        actions = rng.integers(0, 15, 3)
        for a, b in zip(games.step(actions), copy.step(actions), strict=True):
            np.testing.assert_array_equal(a, b)


def test_envpool_resets_one_step_late(make):
    """The step after an episode's end ignores its action, gives no reward and returns a first frame."""
    games = envs.Games(make, seed=5)
    ends = 0
    for _ in range(400):
        ended = games.done
        reward, terminated, truncated = games.step(np.full(3, 4))
        assert (games.age[ended] == 0).all()
        assert (reward[ended] == 0).all()
        assert not (terminated | truncated)[ended].any()
        assert (games.age[~ended] > 0).all()
        ends += ended.sum()
    assert ends > 3


@pytest.mark.parametrize("game", envs.GAMES)
@pytest.mark.parametrize("mode", ["easy", "hard"])
def test_every_game_runs(game, mode):
    env = envs.make_procgen(game, 2, 0, mode)
    obs, _ = env.reset()
    assert obs.shape == (2, 3, 64, 64)
    assert obs.dtype == np.uint8
    assert env.action_space.n == envs.NUM_ACTIONS
    assert obs.std() > 0


def test_test_levels_lie_above_the_training_levels():
    args = Args(num_levels=7, start_level=40)
    train = envs.make_levels(args, 32, 0, "train").reset()[1]["level_seed"]
    test = envs.make_levels(args, 32, 0, "test").reset()[1]["level_seed"]
    assert set(train) <= set(range(40, 47))
    assert len(set(train)) > 3
    assert test.min() >= 47


class Scripted:
    """An EnvPool of games whose episodes last 2, 3, 4, ... steps; a frame's pixels are the episode and the step."""

    def __init__(self, num_envs):
        self.length = np.arange(num_envs) + 2
        self.episode, self.age = np.zeros(num_envs, np.int32), np.zeros(num_envs, np.int32)

    def observe(self):
        obs = np.zeros((len(self.age), 3, 64, 64), np.uint8)
        obs[:, 0], obs[:, 1] = self.episode[:, None, None], self.age[:, None, None]
        return obs, {"elapsed_step": self.age.copy()}

    def reset(self):
        return self.observe()

    def step(self, actions):
        done = self.age == self.length  # the step after an episode's end
        self.episode, self.age = self.episode + done, np.where(done, 0, self.age + 1)
        obs, info = self.observe()
        return obs, np.float32(~done * actions), self.age == self.length, np.zeros_like(done), info


def test_each_game_plays_its_quota_of_episodes():
    """Three games, five episodes: two a game, whatever their lengths; the film is one whole episode."""
    seen = []

    def policy(frames, age, key, memory):
        seen.append((frames.shape, memory))
        assert (age == [len(seen) - 1] * 3).all() or len(seen) > 2
        return np.ones(3, np.int32), len(seen)

    returns, film = envs.play_episodes(Scripted(3), policy, envs.stack_offsets(4, True), 5, 0, record=True)
    assert returns.tolist() == [2, 2, 3, 3, 4, 4]
    assert seen == [((3, 64, 64, 6), i or None) for i in range(len(seen))]
    assert film[:, 0, 0, :2].tolist() == [[0, 0], [0, 1], [0, 2]]
