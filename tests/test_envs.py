"""Frame stacks, episode statistics, and what this project relies on in EnvPool."""

from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import atari, envs, runs, shaping
from ppo_procgen import Args


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.booleans())
def test_frame_stack_across_episode_ends(seed, frame_stack, gap_stack):
    rng = np.random.default_rng(seed)
    images, first = rng.integers(0, 256, (15, 2, 1, 1, 3), np.uint8), rng.random((15, 2)) < 0.3
    first[0] = True
    age = np.zeros((15, 2), np.int32)
    for t in range(1, 15):
        age[t] = np.where(first[t], 0, age[t - 1] + 1)
    offsets = envs.stack_offsets(frame_stack, gap_stack)
    want = oracle.frame_stacks(images, first, frame_stack, gap_stack)
    # In rollouts of 8 and 7 steps, of which the second goes on with the history of the first.
    history = envs.empty_history(2, offsets, (1, 1, 3))
    for start, steps in ((0, 8), (8, 7)):
        frames = envs.Frames.after(history, steps, offsets)
        for t in range(steps):
            frames = frames.put(t, images[start + t].transpose(0, 3, 1, 2), age[start + t])
            np.testing.assert_array_equal(frames.stack(t), want[start + t])
        np.testing.assert_array_equal(frames.first, first[start : start + steps])
        time, env = np.indices((steps, 2))
        np.testing.assert_array_equal(frames.stack(time, env), want[start : start + steps])
        history = frames.history(steps)


def test_episode_statistics_leave_out_steps_that_are_no_transition():
    stats = envs.EpisodeStatistics(2)
    assert stats.metrics() == {}
    rewards = np.array([[1, 1], [2, 1], [99, 1], [4, 1]], np.float32)
    ends = np.array([[0, 0], [1, 0], [0, 0], [1, 0]], bool)
    mask = np.array([[1, 1], [1, 1], [0, 1], [1, 1]], bool)
    age = np.zeros((5, 2), np.int32)
    stats.add(envs.Steps(rewards, ends, np.zeros_like(ends), ~mask, age, np.zeros(2, bool)))
    assert stats.metrics() == {"charts/episodic_return": 3.5, "charts/episodic_length": 1.5}
    copy = envs.EpisodeStatistics(2)
    copy.restore(stats.save())
    for s in (stats, copy):
        no = np.zeros((1, 2), bool)
        s.add(envs.Steps(np.ones((1, 2), np.float32), no, ~no, no, age[:2], np.zeros(2, bool)))
    assert stats.metrics() == copy.metrics() == {
        "charts/episodic_return": np.mean([3, 4, 1, 5]), "charts/episodic_length": np.mean([2, 1, 1, 5])
    }  # fmt: skip
    many, ends = envs.EpisodeStatistics(1), np.ones((150, 1), bool)
    rewards = np.arange(150, dtype=np.float32)[:, None]
    many.add(envs.Steps(rewards, ends, ~ends, ~ends, np.zeros((151, 1), int), np.zeros(1, bool)))
    assert many.metrics() == {"charts/episodic_return": 99.5, "charts/episodic_length": 1}  # of the last hundred


@pytest.fixture(scope="module")
def make():
    return partial(envs.make_levels, Args(env_id="bigfish"))


class Quiet:
    """Stands for a run: nothing stops; what it is told."""

    def __init__(self):
        self.told = []

    def while_replaying(self, what, total):
        return self.told.append


def play(games, steps, rng):
    return games.play(lambda obs, age: rng.integers(0, 15, 3), steps, runs.Stopwatch())


@pytest.mark.parametrize("rollouts", [0, 2, 3, 4, 5])
def test_games_come_back_where_they_were(make, rollouts):
    """Before, at and after the point where they start anew (60 steps of each game, at a rollout's end)."""
    rng = np.random.default_rng(0)
    games = envs.Games(make, range(3), seed=5, restart_every=60)
    steps = [play(games, 20, rng) for _ in range(rollouts)]
    assert [step.restarts.tolist() for step in steps] == [[i == 2] * 3 for i in range(rollouts)]
    copy = envs.Games(make, range(3), seed=6, restart_every=60)
    mark = games.mark()
    went_on = play(games, 20, np.random.default_rng(1))  # a mark stays where it is, also over a restart
    quiet = Quiet()
    copy.restore(mark.save(), quiet)
    assert quiet.told == list(range(0, 3 * mark.steps, 3))
    for a, b in zip(play(copy, 20, np.random.default_rng(1)), went_on, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(games.obs, copy.obs)


def test_a_rollouts_steps_are_what_the_games_say(make):
    """Rewards, and which episodes were ended by the game."""
    rng, by_hand = np.random.default_rng(0), envs.Games(make, range(3), seed=5, restart_every=10**6)
    actions = rng.integers(0, 15, (400, 3))
    choices = iter(actions)
    asked, games = [], envs.Games(make, range(3), 5, 10**6)
    steps = games.play(lambda obs, age: next(choices), 400, runs.Stopwatch(), lambda: asked.append(1))
    assert len(asked) == 400  # whether to stop, before each step
    said = zip(*(by_hand.step(action) for action in actions), strict=True)
    for mine, theirs in zip((steps.rewards, steps.terminated, steps.truncated), said, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert steps.terminated.sum() > 3
    # The step after an episode's end is no transition: there the game begins anew.
    np.testing.assert_array_equal(steps.done, np.concatenate([np.zeros((1, 3), bool), steps.ended[:-1]]))
    np.testing.assert_array_equal(steps.age[1:] == 0, steps.done)


def test_a_time_limit_truncates_and_shows_the_episodes_last_frame():
    """Maze ends after 500 steps; all up reaches no cheese."""
    make = partial(envs.make_levels, Args(env_id="maze"))
    games, seen = envs.Games(make, range(3), seed=5, restart_every=10**6), []

    def up(obs, age):
        seen.append((np.array(obs), np.array(age)))
        return np.full(3, 5)

    steps = games.play(up, 510, runs.Stopwatch())
    assert not steps.terminated.any()
    assert steps.truncated.sum(axis=0).tolist() == [1, 1, 1]
    for n in range(3):
        (limit,) = np.flatnonzero(steps.truncated[:, n])
        last, first = seen[limit + 1], seen[limit + 2]  # the frame after the truncated step, and the next episode's
        np.testing.assert_array_equal(last[0][n], seen[limit][0][n])  # it stands before a wall
        assert (first[0][n] != last[0][n]).any()
        assert first[1][n] == 0


def test_each_game_has_levels_of_its_own(make):
    games = envs.Games(make, range(8), seed=5, restart_every=10**6)
    assert len(np.unique(games.info["level_seed"])) > 6


def test_a_game_is_the_same_beside_whichever_others_it_is_played(make):
    """Games 4 and 5 of six, which another host may play by themselves, over a point where they start anew."""
    actions = np.random.default_rng(0).integers(0, 15, (80, 6))

    def play(numbers):
        games, choices = envs.Games(make, numbers, seed=5, restart_every=20), iter(actions[:, list(numbers)])
        steps = [games.play(lambda obs, age: next(choices), 20, runs.Stopwatch()) for _ in range(4)]
        return [step.rewards for step in steps] + [step.age for step in steps] + [games.obs]

    for together, alone in zip(play(range(6)), play([4, 5]), strict=True):
        axis = 1 if together.ndim == 2 else 0
        np.testing.assert_array_equal(np.take(together, [4, 5], axis), alone)


def test_sticky_actions_repeat_what_was_played_before():
    """With their probability, but never on an episode's first frame."""
    keys, age = jax.random.split(jax.random.PRNGKey(0), 4000), np.arange(4000) % 2
    actions, last = np.arange(4000) % 15, 100 + np.arange(4000)
    played = np.asarray(envs.stick(keys, 0.3, actions, last_action=last, age=age))
    again = played == last
    assert (again | (played == actions)).all()
    assert not again[age == 0].any()
    assert again[age == 1].mean() == pytest.approx(0.3, abs=0.04)


def test_rewards_are_clipped_as_they_are_shaped():
    rewards = np.array([-3.0, -0.2, 0.0, 0.3, 7.0], np.float32)
    shaped = np.asarray(shaping.shape_reward(rewards))
    assert (shaped != rewards).any()
    for flags, want in (
        ({}, rewards),
        ({"reward_clip": 0.5}, rewards.clip(-0.5, 0.5)),
        ({"reward_clip": 0.5, "reward_shaping": True}, shaped.clip(-0.5, 0.5)),
    ):
        np.testing.assert_allclose(shaping.shape_and_clip(Args(**flags), rewards), want)
        steps = SimpleNamespace(rewards=rewards[:, None])  # and this is what scripts learn from
        _, prepared = shaping.prepare_rewards(Args(**flags), shaping.new_filter(1), steps, 0.9)
        np.testing.assert_allclose(prepared[:, 0], want)


@pytest.mark.parametrize(("mode", "least"), [("easy", 1), ("hard", 0)])
def test_what_is_said_of_an_evaluation(mode, least, monkeypatch):
    """Its mean is normalised by the game's range: bigfish pays from 1 or 0 to 40."""
    played = np.array([10.0, 30.0, 23.0]), np.array([5, 3, 5]), np.array([0, 6, 2]), None
    made = []
    monkeypatch.setattr(envs, "make_levels", lambda *how: made.append(how) or SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(envs, "play_episodes", lambda *_, **__: played)
    args = Args(env_id="bigfish", distribution_mode=mode)
    summary, by_level, _ = envs.evaluate(args, None, "test", episodes=3, seed=1)
    assert made[0][2:] == (1, "test")
    assert summary["normalized"] == pytest.approx((21 - least) / (40 - least))
    assert summary["commonest_action"] == 0.75
    assert summary["standard_error"] == pytest.approx(np.std(played[0], ddof=1) / np.sqrt(3))
    assert (summary["std"], summary["min"], summary["max"]) == (pytest.approx(np.std(played[0])), 10, 30)
    assert (summary["mean_return"], summary["episodes"], by_level) == (21, 3, {"3": [30.0], "5": [10.0, 23.0]})
    asked = []
    monkeypatch.setattr(envs, "play_episodes", lambda env, policy, *_, **__: asked.append(policy) or played)
    how = {"episodes": 3, "seed": 1, "levels": "test", "video": False}
    names = [envs.evaluate_checkpoint(args, 5, "policy", random=random, **how).name for random in (False, True)]
    assert names == ["test_levels", "random_test_levels"]
    assert asked == ["policy", envs.random_policy]
    sums = [[sum(ends) for ends in zip(*ranges.values(), strict=True)] for ranges in envs.RETURN_RANGES.values()]
    np.testing.assert_allclose(sums, [[35.5, 309], [26.5, 284.4]])  # openai/train-procgen's, all games together


def test_an_evaluation_in_training_has_the_episodes_that_are_asked_for_and_levels_of_its_own(monkeypatch):
    asked = []
    monkeypatch.setattr(envs, "evaluate", lambda *given, episodes, seed, **how: asked.append((episodes, seed)))
    run = SimpleNamespace(evaluation_due=lambda step: True)
    for seed, step in ((1, 5), (1, 6), (2, 5)):
        envs.evaluate_if_due(Args(seed=seed, eval_episodes=7), run, step, None)
    assert [episodes for episodes, _ in asked] == [7, 7, 7]
    assert len({seed for _, seed in asked}) == 3


def test_a_restart_ends_no_episode_in_the_statistics():
    stats, no = envs.EpisodeStatistics(1), np.zeros((2, 1), bool)
    for restarts in (True, False):
        ends = no if restarts else np.array([[False], [True]])
        stats.add(envs.Steps(np.ones((2, 1), np.float32), ends, no, no, np.zeros((3, 1), int), np.array([restarts])))
    assert stats.metrics() == {"charts/episodic_return": 2, "charts/episodic_length": 2}


def test_a_restart_ends_the_return_that_rewards_are_normalised_by():
    no = np.zeros((2, 2), bool)
    steps = envs.Steps(np.ones((2, 2), np.float32), no, no, no, np.zeros((3, 2), int), np.array([True, False]))
    state, _ = shaping.normalize(shaping.new_filter(2), steps.rewards, steps.last, ~no, 0.5)
    assert state.discounted.tolist() == [0, 1.5]


def test_envpool_resets_one_step_late(make):
    """The step after an episode's end ignores its action, gives no reward and returns a first frame."""
    games = envs.Games(make, range(3), seed=5, restart_every=10**6)
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
    env = envs.make_levels(Args(env_id=game, distribution_mode=mode), 2, 0)
    obs, _ = env.reset()
    assert obs.shape == (2, 3, 64, 64)
    assert obs.dtype == np.uint8
    assert env.action_space.n == envs.NUM_ACTIONS
    assert obs.std() > 0
    assert env.spec.config.distribution_mode == (mode == "hard")
    how = envs.make_levels(Args(env_id=game, use_backgrounds=False, restrict_themes=True), 1, 0).spec.config
    assert (how.use_backgrounds, how.restrict_themes) == (False, True)


def test_test_levels_lie_above_the_training_levels():
    args = Args(num_levels=7, start_level=40)
    train = envs.make_levels(args, 32, 0, "train").reset()[1]["level_seed"]
    test = envs.make_levels(args, 32, 0, "test").reset()[1]["level_seed"]
    assert set(train) <= set(range(40, 47))
    assert len(set(train)) > 3
    assert test.min() >= 47
    assert len(set(test)) == 32


class Scripted:
    """An EnvPool of games whose episodes last 2, 3, 4, ... steps; a frame's pixels are the episode and the step."""

    def __init__(self, num_envs):
        self.length = np.arange(num_envs) + 2
        self.episode, self.age = np.zeros(num_envs, np.int32), np.zeros(num_envs, np.int32)

    def observe(self):
        obs = np.zeros((len(self.age), 3, 64, 64), np.uint8)
        obs[:, 0], obs[:, 1] = self.episode[:, None, None], self.age[:, None, None]
        return obs, {"elapsed_step": self.age.copy(), "level_seed": 10 * self.length + self.episode}

    def reset(self):
        return self.observe()

    def step(self, actions):
        done = self.age == self.length  # the step after an episode's end
        self.episode, self.age = self.episode + done, np.where(done, 0, self.age + 1)
        obs, info = self.observe()
        return obs, np.float32(~done * actions), self.age == self.length, np.zeros_like(done), info


@pytest.mark.parametrize("game", [envs, atari])
def test_random_play_has_every_action(game):
    actions, _ = game.random_policy(np.zeros(999), None, jax.random.PRNGKey(0), None)
    assert set(np.asarray(actions).tolist()) == set(range(game.NUM_ACTIONS))


def test_each_game_plays_its_quota_of_episodes():
    """Three games, five episodes: two a game, whatever their lengths; the film is one whole episode."""
    seen, keys = [], []

    def policy(frames, age, key, memory):
        seen.append((frames.shape, memory))
        keys.append(tuple(np.asarray(key).tolist()))
        assert (age == [len(seen) - 1] * 3).all() or len(seen) > 2
        np.testing.assert_array_equal(frames[:, 0, 0, [1, 4]], np.stack([np.maximum(age - 3, 0), age], axis=1))
        return np.array([1, 2, 1]), len(seen)

    offsets = envs.stack_offsets(4, True)
    returns, levels, often, film = envs.play_episodes(Scripted(3), policy, offsets, episodes=5, seed=0, record=True)
    assert returns.tolist() == [2, 2, 6, 6, 4, 4]
    assert often.tolist() == [0, 12, 6]  # not the step after an episode's end, nor what is played beyond the quota
    assert seen == [((3, 64, 64, 6), i or None) for i in range(len(seen))]
    assert len(set(keys)) == len(keys)
    assert levels.tolist() == [20, 21, 30, 31, 40, 41]
    assert film[:, 0, 0, :2].tolist() == [[0, 0], [0, 1], [0, 2]]
