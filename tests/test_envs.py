"""Frame stacks, episode statistics, evaluation, and what this project relies on in EnvPool."""

from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import atari, devices, envs, runs
from common.rewards import init_return_filter, prepare_rewards, shape_and_clip
from ppo_procgen import Args

NEVER = 10**6


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.booleans())
def test_frame_stack_over_episode_ends_and_rollouts_equals_oracle(seed, frame_stack, gap_stack):
    rng = np.random.default_rng(seed)
    images, first = rng.integers(0, 256, (15, 2, 1, 1, 3), np.uint8), rng.random((15, 2)) < 0.3
    first[0] = True
    episode_step = np.zeros((15, 2), np.int32)
    for t in range(1, 15):
        episode_step[t] = np.where(first[t], 0, episode_step[t - 1] + 1)
    offsets = envs.frame_stack_offsets(frame_stack, gap_stack)
    want = oracle.frame_stacks(images, first, frame_stack, gap_stack)
    history = envs.empty_history(2, offsets, (1, 1, 3))
    for start, steps in ((0, 8), (8, 7)):
        frames = envs.Frames.after(history, steps, offsets)
        for t in range(steps):
            frames = frames.write(t, images[start + t].transpose(0, 3, 1, 2), episode_step[start + t])
            np.testing.assert_array_equal(frames.stack(t), want[start + t])
        np.testing.assert_array_equal(frames.is_first, first[start : start + steps])
        np.testing.assert_array_equal(frames.stack(*np.indices((steps, 2))), want[start : start + steps])
        history = frames.history(steps)


def timesteps(rewards, ends, is_reset=False, forced_reset=False):
    """Timesteps of rewards [T, N] whose episodes terminate where `ends`."""
    rewards = np.array(rewards, np.float32)
    ends, is_reset = (np.broadcast_to(np.array(x, bool), rewards.shape) for x in (ends, is_reset))
    episode_step, forced_reset = (
        np.zeros((len(rewards) + 1, rewards.shape[1]), int),
        np.full(rewards[0].shape, forced_reset),
    )
    return envs.Timesteps(rewards, ends, np.zeros_like(ends), is_reset, episode_step, forced_reset)


def test_episode_statistics_with_junk_steps_and_restarts_are_of_finished_episodes():
    def means(stats):
        return tuple(stats.metrics().values())

    stats, copy = envs.EpisodeStatistics(2), envs.EpisodeStatistics(2)
    assert stats.metrics() == {}
    ends, junk = [[0, 0], [1, 0], [0, 0], [1, 0]], [[0, 0], [0, 0], [1, 0], [0, 0]]
    stats.add(timesteps([[1, 1], [2, 1], [99, 1], [4, 1]], ends, junk))
    assert stats.metrics() == {"charts/episodic_return": 3.5, "charts/episodic_length": 1.5}
    copy.restore(stats.save())
    for s in (stats, copy):
        s.add(timesteps([[1, 1]], True))
        assert means(s) == (np.mean([3, 4, 1, 5]), np.mean([2, 1, 1, 5]))
    stats = envs.EpisodeStatistics(1)
    stats.add(timesteps([[1], [1]], False, forced_reset=True))
    stats.add(timesteps([[1], [1]], [[0], [1]]))
    assert means(stats) == (2, 2)
    stats.add(timesteps(np.arange(150)[:, None], True))
    assert means(stats) == (99.5, 1)  # of the last hundred


# ENVPOOL


@pytest.fixture(scope="module")
def make():
    return partial(envs.make_procgen, Args(env_id="bigfish"))


def play(vec_env, actions, check_stop=lambda: None):
    """Plays int [T, N] actions."""
    choices = iter(actions)
    return vec_env.play(lambda obs, episode_step: next(choices), len(actions), runs.Stopwatch(), check_stop)


@pytest.mark.parametrize("rollouts", [0, 2, 3, 4, 5])
def test_vec_env_restored_from_snapshot_continues_bit_identical(make, rollouts):
    """Before, at and after a restart, every 60 steps of each environment at a rollout's end."""
    actions, told = np.random.default_rng(0).integers(0, 15, (rollouts + 1, 20, 3)), []
    vec_env = envs.ReplayableVecEnv(make, range(3), seed=5, restart_every=60)
    played = [play(vec_env, actions[i]) for i in range(rollouts)]
    assert [steps.forced_reset.tolist() for steps in played] == [[i == 2] * 3 for i in range(rollouts)]
    snapshot = vec_env.snapshot()
    want = play(vec_env, actions[-1])  # the snapshot stays where it is, also over a restart
    copy = envs.ReplayableVecEnv(make, range(3), seed=6, restart_every=60)
    copy.restore(snapshot.save(), SimpleNamespace(replay_progress=lambda total: told.append))
    assert told == list(range(0, 3 * snapshot.steps, 3))
    jax.tree.map(np.testing.assert_array_equal, play(copy, actions[-1]), want)
    np.testing.assert_array_equal(vec_env.obs, copy.obs)


def test_timesteps_of_rollout_equal_envpools_with_reset_one_step_late(make):
    """The step after an episode's end ignores its action, gives no reward and returns a first frame."""
    by_hand, asked = envs.ReplayableVecEnv(make, range(3), 5, NEVER), []
    actions = np.random.default_rng(0).integers(0, 15, (400, 3))
    steps = play(envs.ReplayableVecEnv(make, range(3), 5, NEVER), actions, lambda: asked.append(1))
    assert len(asked) == 400  # whether to stop, before each step
    want = zip(*(by_hand.step(action) for action in actions), strict=True)
    for got, x in zip((steps.rewards, steps.terminated, steps.truncated), want, strict=True):
        np.testing.assert_array_equal(got, x)
    assert steps.terminated.sum() > 3
    np.testing.assert_array_equal(steps.is_reset, np.concatenate([np.zeros((1, 3), bool), steps.episode_end[:-1]]))
    np.testing.assert_array_equal(steps.episode_step[1:] == 0, steps.is_reset)
    assert not (steps.rewards.astype(bool) | steps.episode_end)[steps.is_reset].any()


def test_time_limit_in_maze_truncates_and_shows_last_frame():
    """Maze ends after 500 steps; all up reaches no cheese."""
    seen = []

    def up(obs, episode_step):
        seen.append((np.array(obs), np.array(episode_step)))
        return np.full(3, 5)

    vec_env = envs.ReplayableVecEnv(partial(envs.make_procgen, Args(env_id="maze")), range(3), 5, NEVER)
    steps = vec_env.play(up, 510, runs.Stopwatch())
    assert not steps.terminated.any()
    assert steps.truncated.sum(axis=0).tolist() == [1, 1, 1]
    for n in range(3):
        (limit,) = np.flatnonzero(steps.truncated[:, n])
        (before, _), (last, _), (first, episode_step) = seen[limit : limit + 3]
        np.testing.assert_array_equal(last[n], before[n])  # it stands before a wall
        assert (first[n] != last[n]).any()
        assert episode_step[n] == 0


def test_games_of_one_seed_beside_any_others_play_alike_each_on_its_own_levels(make):
    """Games 4 and 5 of six, which another host may play by themselves, over restarts."""
    actions = np.random.default_rng(0).integers(0, 15, (4, 20, 6))

    def rewards_and_steps(env_ids):
        vec_env = envs.ReplayableVecEnv(make, env_ids, seed=5, restart_every=20)
        assert len(np.unique(vec_env.info["level_seed"])) == len(env_ids)
        played = [play(vec_env, part[:, list(env_ids)]) for part in actions]
        return [x for steps in played for x in (steps.rewards, steps.episode_step)], vec_env.obs

    (together, obs), (alone, own_obs) = rewards_and_steps(range(6)), rewards_and_steps([4, 5])
    for a, b in zip(together, alone, strict=True):
        np.testing.assert_array_equal(a[:, 4:], b)
    np.testing.assert_array_equal(obs[4:], own_obs)


@pytest.mark.parametrize("game", envs.GAMES)
@pytest.mark.parametrize("mode", ["easy", "hard"])
def test_procgen_game_in_either_mode_runs(game, mode):
    env = envs.make_procgen(Args(env_id=game, distribution_mode=mode), 2, 0)
    obs, _ = env.reset()
    assert (obs.shape, obs.dtype, env.action_space.n) == ((2, 3, 64, 64), np.uint8, envs.NUM_ACTIONS)
    assert obs.std() > 0
    env.step(np.zeros(2, np.int32))
    assert env.spec.config.distribution_mode == (mode == "hard")


def test_procgen_game_has_no_backgrounds_and_one_theme_if_asked():
    config = envs.make_procgen(Args(use_backgrounds=False, restrict_themes=True), 1, 0).spec.config
    assert (config.use_backgrounds, config.restrict_themes) == (False, True)


def test_test_levels_with_limited_training_levels_lie_above():
    args = Args(num_levels=7, start_level=40)
    train, test = (envs.make_procgen(args, 32, 0, levels).reset()[1]["level_seed"] for levels in ("train", "test"))
    assert set(train) <= set(range(40, 47))
    assert len(set(train)) > 3
    assert test.min() >= 47
    assert len(set(test)) == 32


# ACTIONS AND REWARDS


def test_sticky_actions_after_first_frame_repeat_with_their_probability():
    keys, episode_step = jax.random.split(jax.random.PRNGKey(0), 4000), np.arange(4000) % 2
    actions, last = np.arange(4000) % 15, 100 + np.arange(4000)
    played = np.asarray(envs.apply_sticky_actions(keys, 0.3, actions, last_action=last, episode_step=episode_step))
    again = played == last
    assert (again | (played == actions)).all()
    assert not again[episode_step == 0].any()
    assert again[episode_step == 1].mean() == pytest.approx(0.3, abs=0.04)


def test_rewards_with_shaping_and_clip_are_shaped_then_clipped():
    rewards = np.array([-12.0, -1.0, -0.2, 0.0, 0.5, 40.0], np.float32)
    shaped = np.sign(rewards) * (np.sqrt(np.abs(rewards) + 1) - 1) + 0.001 * rewards
    for flags, want in (
        ({}, rewards),
        ({"reward_shaping": True}, shaped),
        ({"reward_clip": 0.5}, rewards.clip(-0.5, 0.5)),
        ({"reward_clip": 0.5, "reward_shaping": True}, shaped.clip(-0.5, 0.5)),
    ):
        np.testing.assert_allclose(shape_and_clip(Args(**flags), rewards), want, rtol=1e-5)
        _, prepared = prepare_rewards(Args(**flags), init_return_filter(1), timesteps(rewards[:, None], False), 0.9)
        np.testing.assert_allclose(prepared[:, 0], want, rtol=1e-5)


@pytest.mark.parametrize("game", [envs, atari])
def test_random_policy_plays_every_action(game):
    actions, _ = game.random_policy(np.zeros(999), None, jax.random.PRNGKey(0), None)
    assert set(np.asarray(actions).tolist()) == set(range(game.NUM_ACTIONS))


# EVALUATION


class ScriptedEnv:
    """An EnvPool whose episodes last 2, 3, 4, ... steps; a frame's pixels are the episode and the step."""

    def __init__(self, num_envs):
        self.length = np.arange(num_envs) + 2
        self.episode, self.episode_step = np.zeros(num_envs, np.int32), np.zeros(num_envs, np.int32)

    def reset(self):
        obs = np.zeros((len(self.episode_step), 3, 64, 64), np.uint8)
        obs[:, 0], obs[:, 1] = self.episode[:, None, None], self.episode_step[:, None, None]
        return obs, {"elapsed_step": self.episode_step.copy(), "level_seed": 10 * self.length + self.episode}

    def step(self, actions):
        is_reset = self.episode_step == self.length
        self.episode, self.episode_step = self.episode + is_reset, np.where(is_reset, 0, self.episode_step + 1)
        obs, info = self.reset()
        return obs, np.float32(~is_reset * actions), self.episode_step == self.length, np.zeros_like(is_reset), info


def test_episodes_of_unlike_lengths_are_played_alike_in_each_environment():
    """Three environments, five episodes: two each; the film is one whole episode."""
    seen, keys = [], []

    def policy(frames, episode_step, key, hidden_state):
        seen.append((frames.shape, hidden_state))
        keys.append(tuple(np.asarray(key).tolist()))
        assert (episode_step == [len(seen) - 1] * 3).all() or len(seen) > 2
        want = np.stack([np.maximum(episode_step - 3, 0), episode_step], axis=1)
        np.testing.assert_array_equal(frames[:, 0, 0, [1, 4]], want)
        return np.array([1, 2, 1]), len(seen)

    offsets = envs.frame_stack_offsets(4, True)
    played = envs.play_episodes(ScriptedEnv(3), policy, offsets, episodes=5, seed=0, record=True)
    assert played.returns.tolist() == [2, 2, 6, 6, 4, 4]
    assert played.action_counts.tolist() == [0, 12, 6]  # neither junk steps nor those beyond the quota
    assert seen == [((3, 64, 64, 6), i or None) for i in range(len(seen))]
    assert len(set(keys)) == len(keys)
    assert played.levels.tolist() == [20, 21, 30, 31, 40, 41]
    assert played.film[:, 0, 0, :2].tolist() == [[0, 0], [0, 1], [0, 2]]


@pytest.mark.parametrize(("mode", "lowest"), [("easy", 1), ("hard", 0)])
def test_evaluation_summary_in_either_mode_is_normalised_by_game(mode, lowest, monkeypatch):
    """Bigfish pays from 1 or 0 to 40."""
    returns, made, asked = np.array([10.0, 30.0, 23.0]), [], []
    played = envs.EpisodesPlayed(returns, np.array([5, 3, 5]), np.array([0, 6, 2]), None)
    monkeypatch.setattr(envs, "make_procgen", lambda *how: made.append(how) or SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(envs, "play_episodes", lambda env, policy, *_, **__: asked.append(policy) or played)
    args = Args(env_id="bigfish", distribution_mode=mode)
    mesh = devices.make_mesh(args)
    summary, by_level, _ = envs.evaluate(args, mesh, None, "test", episodes=3, seed=1)
    assert made[0][2:] == (1, "test")
    assert by_level == {"3": [30.0], "5": [10.0, 23.0]}
    assert summary == pytest.approx({
        "normalized": (21 - lowest) / (40 - lowest), "commonest_action": 0.75, "mean_return": 21, "episodes": 3,
        "standard_error": np.std(returns, ddof=1) / np.sqrt(3), "std": np.std(returns), "min": 10, "max": 30,
    })  # fmt: skip
    how = {"episodes": 3, "seed": 1, "levels": "test", "video": False}
    names = [envs.evaluate_checkpoint(args, mesh, 5, "policy", random=random, **how).name for random in (False, True)]
    assert names == ["test_levels", "random_test_levels"]
    assert asked[1:] == ["policy", envs.random_policy]


def test_return_ranges_of_all_games_equal_published():
    """openai/train-procgen's, in sums that are weighted by the game's place."""
    sums = [np.dot(range(1, 17), list(ranges.values())) for ranges in envs.RETURN_RANGES.values()]
    np.testing.assert_allclose(sums, [[347, 2872.2], [259.5, 2466.6]])


def test_evaluations_in_training_have_asked_episodes_and_seeds_of_their_own(monkeypatch):
    asked = []
    monkeypatch.setattr(envs, "evaluate", lambda *given, episodes, seed, **how: asked.append((episodes, seed)))
    run = SimpleNamespace(evaluation_due=lambda step: True)
    for seed, step in ((1, 5), (1, 6), (2, 5)):
        envs.evaluate_if_due(Args(seed=seed, eval_episodes=7), None, run, step, None)
    assert [episodes for episodes, _ in asked] == [7, 7, 7]
    assert len({seed for _, seed in asked}) == 3
