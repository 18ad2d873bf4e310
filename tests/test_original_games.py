"""benchmarks/original_games.py with a stand-in for OpenAI's package: what goes through the pipe, what is counted."""

import contextlib
import sys

import numpy as np
import pytest
from conftest import assert_refused

from benchmarks import original_games
from common import envs

# Episodes of 2, 3, 4, ... steps, whose frames show the game's number and the episode_step; each action is its own reward.
PROCGEN = """
import numpy as np
print("said by the package")
class ProcgenGym3Env:
    def __init__(self, num, env_name, start_level, num_levels, **others):
        assert (env_name, start_level, num_levels) == ("maze", 50, 2**31 - 1 - 50), (start_level, num_levels)
        self.episode_step, self.rewards = np.zeros(num, int), np.zeros(num)
        self.length = np.arange(num) + 2
    def observe(self):
        frames = np.zeros((len(self.episode_step), 64, 64, 3), np.uint8)
        frames[..., 0], frames[..., 1] = self.length[:, None, None], self.episode_step[:, None, None]
        return self.rewards, {"rgb": frames}, self.episode_step == 0
    def act(self, actions):
        self.rewards = actions.astype(float)
        self.episode_step = (self.episode_step + 1) % self.length
"""


@pytest.fixture
def args(tmp_path, monkeypatch):
    (tmp_path / "procgen.py").write_text(PROCGEN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return original_games.Args(python=sys.executable)


def test_each_game_plays_its_quota(args):
    """Five episodes of three games are two each; a return is of one episode, and frames of another are in no stack."""
    saved = original_games.ppo_procgen.Args(env_id="maze", num_levels=50)
    seen = []

    def policy(frames, episode_step, key, memory):
        seen.append((np.asarray(frames[:, 0, 0]), episode_step, memory))
        return np.arange(3) + 1, len(seen)

    with original_games.original(args, saved, 3) as games:
        returns = original_games.play(games, policy, saved.stack_offsets, num_envs=3, episodes=5, seed=0)
    assert returns.tolist() == [2, 2, 6, 6, 12, 12]
    assert [memory for *_, memory in seen] == [None, *range(1, 8)]
    for pixels, episode_step, _ in seen:
        assert pixels[:, 3].tolist() == [2, 3, 4]  # the newest frame's
        assert pixels[:, 4].tolist() == episode_step.tolist()
        assert pixels[:, 1].tolist() == np.maximum(episode_step - 3, 0).tolist()


def test_another_frame_is_noticed(args):
    saved = original_games.ppo_procgen.Args(env_id="maze", num_levels=50)
    frames, pixels, rewards = original_games.difference(args, saved, num_envs=3, steps=10)
    assert frames == 2 + 3 + 4
    assert pixels > 0.9
    assert rewards > 4


def test_a_player_that_nobody_reads_is_ended(args):
    saved = original_games.ppo_procgen.Args(env_id="maze", num_levels=50)
    with original_games.original(args, saved, 64):  # whose first frames do not fit into the pipe
        pass


def test_scores_have_their_sides_and_errors(args, monkeypatch):
    saved = original_games.ppo_procgen.Args(env_id="maze", num_levels=50)
    monkeypatch.setattr(original_games, "difference", lambda *_: (10, 0.5, 3))
    monkeypatch.setattr(original_games, "original", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(envs, "evaluate", lambda *_, **__: ({"mean_return": 1, "standard_error": 1.5},))
    monkeypatch.setattr(original_games, "play", lambda *_, **__: np.array([2, 6, 2, 6]))
    row = original_games.compare(args, "a", saved, None)
    assert (row["EnvPool"], row["error"], row["OpenAI"], row["OpenAI error"]) == ("1.00", "1.50", "4.00", "1.15")


def test_bad_input_gets_one_sentence(args, tmp_path, capfd):
    none = str(tmp_path / "python")
    assert_refused(original_games, ["--random", "maze", "--episodes", 2, "--python", none], capfd, f"--python {none}")
    (tmp_path / "procgen.py").write_text("raise ImportError")
    words = ["--random", "maze", "--episodes", 2, "--python", sys.executable]
    assert_refused(original_games, words, capfd, f"--python {sys.executable}", "does not play")
    dies = PROCGEN.replace("self.rewards = actions", "raise SystemExit").replace("assert (", "assert True or (")
    (tmp_path / "procgen.py").write_text(dies.replace("SystemExit.astype(float)", "SystemExit"))
    assert_refused(original_games, words, capfd, f"--python {sys.executable}", "does not play")
    assert_refused(original_games, ["--random", "golf"], capfd, "--random golf", envs.GAMES[0])
    assert_refused(original_games, [], capfd, "RUN_DIRS")
    assert_refused(original_games, ["agents/hnppo_six_doors"], capfd, "agents/hnppo_six_doors", "Procgen")
