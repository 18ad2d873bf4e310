"""Whole runs of RND on the real game: same seed, resume, rooms, evaluation, bad input."""

import json
import re
import threading
from dataclasses import fields
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tyro
from conftest import (
    assert_flag_matters,
    assert_one_sentence,
    assert_resumes_after_sigterm,
    assert_same_run,
    documented_flags,
    flags_of,
    parameters,
    read_metrics,
    start,
)

import evaluate
import rnd_montezuma as rnd
from common import atari, compute, envs, runs
from common.actors import ActorError

# Small enough to compile in seconds; the game is real.
TINY = {
    "num_envs": 4, "num_steps": 16, "num_minibatches": 2, "update_epochs": 2, "channels": "4,4,4", "hidden": 8,
    "obs_norm_init_steps": 5, "learning_rate": "0.003", "total_timesteps": 240, "max_episode_steps": 30,
    "wandb_mode": "disabled",
}  # fmt: skip
# Everything that has a state of its own is on.
ASYNC = {"async_": True, "vtrace": True, "gru": True, "checkpoint_every": 130}
SYNC = {"checkpoint_every": 130}


@pytest.fixture
def train(tmp_path):
    """train(**flags) runs the script with TINY settings and returns its run."""
    return lambda **flags: rnd.main(rnd.Args(**TINY | {"run_dir": str(tmp_path)} | flags))


@pytest.fixture(scope="module", params=[SYNC, ASYNC], ids=["sync", "async"])
def whole(request, tmp_path_factory):
    """Flags, and an uninterrupted run with them."""
    flags = TINY | request.param | {"run_dir": str(tmp_path_factory.mktemp("whole"))}
    return SimpleNamespace(flags=request.param, path=rnd.main(rnd.Args(**flags)).path)


def test_same_seed_same_metrics(train, whole):
    assert_same_run(whole.path, train(**whole.flags).path)
    lags = [line["charts/policy_lag"] for line in read_metrics(whole.path)]
    # One update behind, but for the first rollout, which was played with the first parameters as the second is.
    assert lags == ([0, 1, 1, 1] if whole.flags is ASYNC else [0] * 4)


@pytest.mark.parametrize("stop", [1, 100, 190])
def test_resume_equals_uninterrupted(train, whole, stop):
    """Stopped before, at and after the checkpoint where the games start anew."""
    half = train(**whole.flags, total_timesteps=stop)
    resumed = train(**whole.flags, resume=str(half.path))
    assert resumed.path == half.path
    assert_same_run(whole.path, resumed.path)


def test_running_statistics_are_resumed(whole):
    saved = runs.load_checkpoint(whole.path)[1]["state"]
    steps = TINY["obs_norm_init_steps"] + 4 * TINY["num_steps"]
    assert saved["frame_stats"]["count"] == TINY["num_envs"] * steps
    assert saved["bonus_filter"]["count"] == saved["global_step"]
    assert saved["updates"] == 4


def test_stopped_before_the_first_update(train, monkeypatch):
    """A signal during the random steps: the resumed run begins with them, and equals one that was not stopped."""
    whole = train()
    observe = rnd.observe_random_play
    monkeypatch.setattr(rnd, "observe_random_play", lambda args, stats, stop: observe(args, stats, lambda: True))
    monkeypatch.setattr(runs.Run, "__enter__", stop_at_once(runs.Run.__enter__))
    stopped = train()
    monkeypatch.undo()
    assert stopped.stop == "SIGTERM"
    assert_same_run(whole.path, train(resume=str(stopped.path)).path)


def stop_at_once(enter):
    def entered(run):
        enter(run)
        run.stop = "SIGTERM"
        return run

    return entered


def test_a_failing_actor_stops_the_run_with_a_checkpoint(train, whole, tmp_path, monkeypatch, capfd):
    step, played = envs.Games.step, []

    def failing(self, actions):
        played.append(1)
        if len(played) > 40 and threading.current_thread().name == "actor 0":
            raise ZeroDivisionError("the game broke")
        return step(self, actions)

    monkeypatch.setattr(envs.Games, "step", failing)
    with pytest.raises(ActorError):
        train(**whole.flags)
    assert "--resume" in capfd.readouterr().err
    monkeypatch.undo()
    (run_dir,) = tmp_path.iterdir()
    assert_same_run(whole.path, train(**whole.flags, resume=str(run_dir)).path)


def test_divergence_stops_and_keeps_the_last_good_checkpoint(train, tmp_path):
    with pytest.raises(runs.DivergedError, match=r"losses/\w+ is not finite at step \d+.*is kept"):
        train(checkpoint_every=60, learning_rate="0:0.001,100:0.001,101:1e35", total_timesteps=10_000)
    (run_dir,) = tmp_path.iterdir()
    assert all((np.abs(np.float64(x)) < 1e6).all() for x in parameters(run_dir) if x.dtype == np.float32)


@pytest.mark.parametrize("flags", [{}, ASYNC], ids=["sync", "async"])
def test_the_form_for_accelerators_trains_too(train, monkeypatch, flags):
    """What runs on a GPU, run on a CPU: plain Flax in bfloat16, one device."""
    monkeypatch.setattr(compute, "on_cpu", lambda: False)
    assert "losses/policy_loss" in read_metrics(train(**flags, total_timesteps=100).path)[-1]


def test_sigterm_writes_a_checkpoint_and_resumes_exactly(tmp_path):
    assert_resumes_after_sigterm(rnd, TINY | ASYNC | {"total_timesteps": 2000}, tmp_path)


# ROOMS


def test_rooms_are_counted_by_step_and_by_episode():
    rooms = atari.Rooms(2)
    where = np.array([[1, 1], [1, 2], [5, 2], [1, 1], [1, 7]])
    done = np.zeros((5, 2), bool)
    done[2] = True  # both episodes end on their third frame
    picture = np.full((84, 84), 9, np.uint8)
    rooms.add(where, done, {1: picture})
    assert rooms.visited() == [1, 2, 5, 7]
    assert rooms.visits[[1, 2, 5, 7]].tolist() == [6, 2, 1, 1]
    assert rooms.metrics() == {"charts/rooms_visited": 4, "charts/max_room_score": 2, "charts/rooms_per_episode": 2}
    np.testing.assert_array_equal(rooms.pictures[1], picture)
    rooms.restart()
    again = atari.Rooms(2)
    again.restore(rooms.save())
    again.add(np.array([[3, 4]]), np.ones((1, 2), bool), {})
    assert again.metrics() == {"charts/rooms_visited": 6, "charts/max_room_score": 2, "charts/rooms_per_episode": 1.5}
    assert rooms.visited() == [1, 2, 5, 7]


def test_the_map_shows_each_room_in_its_place():
    visits, pictures = np.zeros(24, np.int64), np.zeros((24, 84, 84), np.uint8)
    visits[[1, 15]], pictures[1], pictures[15] = 5, 250, 100
    image = atari.draw_rooms(visits, pictures)
    bright = lambda value: np.argwhere((image == value).all(axis=-1)).mean(axis=0) / image.shape[:2]  # noqa: E731
    np.testing.assert_allclose(bright(250), [0.11, 0.5], atol=0.03)  # room 1: the middle of the top floor
    np.testing.assert_allclose(bright(100), [0.86, 0.06], atol=0.03)  # room 15: the left of the lowest


class Corridor:
    """Two games of episodes of 2, 3, 4, ... steps: game 0's pay 100 a step and stay in room 1, game 1's pay 1 and each
    visits a room of its own; the frames count the steps. As EnvPool, it ignores the action after an episode's end."""

    def __init__(self, args, num_envs, seed, gray_scale=True, **size):
        self.channels, self.asked, self.num_envs = 1 if gray_scale else 3, [], num_envs
        Corridor.made.append(self)

    def _answer(self, reward, ended):
        room = np.where(np.arange(2) == 1, 2 + self.episode, 1)
        ram = np.zeros((2, 128), np.uint8)
        ram[:, 3] = room
        frames = np.broadcast_to(
            np.uint8(len(self.asked) + 100 * np.arange(2))[:, None, None, None], (2, self.channels, 84, 84)
        )
        info = {"ram": ram, "elapsed_step": self.age.copy()}
        return (frames, info) if reward is None else (frames, reward, ended, np.zeros(2, bool), info)

    def reset(self):
        self.age, self.episode, self.over = np.zeros(2, np.int32), np.zeros(2, int), np.zeros(2, bool)
        return self._answer(None, None)

    def step(self, actions):
        self.asked.append(np.array(actions))
        self.episode += self.over
        self.age = np.where(self.over, 0, self.age + 1)
        reward = np.where(self.over, 0.0, [100.0, 1.0])
        self.over = self.age == self.episode + 2
        return self._answer(reward, self.over)

    def close(self):
        pass


def test_evaluation_tells_scores_and_rooms_and_films_the_best_episode(monkeypatch):
    monkeypatch.setattr(atari, "make_montezuma", Corridor)
    Corridor.made = []
    rows, summary, film = atari.evaluate(rnd.Args(), atari.random_policy, episodes=2, seed=3, record=True)
    assert [(row["score"], row["steps"], row["rooms"]) for row in rows] == [(200, 2, [1]), (2, 2, [2])]
    monkeypatch.setattr(atari, "min", lambda *_: 2, raising=False)  # two games, three episodes each
    Corridor.made = []
    rows, summary, film = atari.evaluate(rnd.Args(), atari.random_policy, episodes=6, seed=3, record=True)
    scores = [(row["score"], row["steps"], row["rooms"]) for row in rows]
    assert scores[:3] == [(200, 2, [1]), (300, 3, [1]), (400, 4, [1])]
    assert scores[3:] == [(2, 2, [2]), (3, 3, [3]), (4, 4, [4])]
    assert summary["rooms"] == [1, 2, 3, 4]
    assert (summary["mean_return"], summary["max"], summary["episodes"]) == (909 / 6, 400, 6)
    assert film[:, 0, 0, 0].tolist() == [7, 8, 9, 10, 11]  # of game 0, after episodes of 3 and of 4 frames
    played, filmed = Corridor.made
    np.testing.assert_array_equal(filmed.asked, played.asked[: len(filmed.asked)])
    assert len({tuple(actions) for actions in filmed.asked}) > 3


def test_a_replay_is_the_same_game_in_colour():
    args, rng = rnd.Args(max_episode_steps=60), np.random.default_rng(0)
    env, actions = atari.make_montezuma(args, 2, 3), rng.integers(0, 18, (60, 2))
    grey = [env.reset()[0][1, 0]] + [env.step(action)[0][1, 0].copy() for action in actions]
    env.close()
    film = atari.replay(args, 2, 3, actions, atari.Episode(0.0, [1], env=1, first=10, last=60))
    assert film.shape == (51, 210, 160, 3)
    mean = lambda x: x.reshape(42, x.shape[0] // 42, 4, x.shape[1] // 4).mean(axis=(1, 3))  # noqa: E731
    small = lambda x: np.repeat(np.repeat(np.float64(x), 5, axis=0), 8, axis=1)  # noqa: E731
    for t in range(10, 61, 10):
        one, other = mean(small(grey[t])), mean(np.float64(film[t - 10] @ [0.299, 0.587, 0.114]))
        assert np.corrcoef(one.ravel(), other.ravel())[0, 1] > 0.98


def test_two_thousand_frames(tmp_path):
    """The command line as a user types it: W&B, a map of the rooms, then evaluate.py."""
    command = flags_of(
        {"async_": True, "vtrace": True, "num_envs": 16, "num_steps": 32, "channels": "8,8,8", "hidden": 32,
         "obs_norm_init_steps": 10, "total_timesteps": 2_000, "checkpoint_every": 600, "keep_checkpoints": 2,
         "max_episode_steps": 60, "room_map": True, "run_dir": tmp_path, "wandb_mode": "offline",
         "wandb_project": "test"}
    )  # fmt: skip
    process = start("rnd_montezuma.py", *command)
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    assert "rooms visited: 1" in output
    (run_dir,) = tmp_path.iterdir()
    assert re.fullmatch(r"MontezumaRevenge-v5__rnd_montezuma__1__\d+", run_dir.name)
    lines = read_metrics(run_dir, clocks=True)
    assert lines[-1]["global_step"] >= 2_000
    names = {"charts/episodic_return", "charts/episodic_length", "charts/SPS", "charts/policy_lag", "time/update"}
    names |= {"charts/rooms_visited", "charts/max_room_score", "charts/rooms_per_episode", "charts/intrinsic_reward"}
    names |= {"charts/episodic_intrinsic_return", "charts/prediction_error", "losses/rnd_loss", "losses/policy_loss"}
    names |= {"losses/explained_variance", "losses/intrinsic_explained_variance", "time/waiting", "time/actor_game"}
    assert names <= set(lines[-1])
    assert all(np.isfinite(list(line.values())).all() for line in lines)
    assert len(list((run_dir / "checkpoints").iterdir())) == 2
    assert len(list((run_dir / "wandb").glob("offline-run-*"))) == 1
    assert len(list((run_dir / "wandb").glob("offline-run-*/files/media/images/pictures/rooms*.png"))) >= 1
    from PIL import Image

    picture = np.asarray(Image.open(run_dir / "rooms.png"))
    assert picture[:200, 600:900].std() > 30  # room 1

    runs.cli(evaluate.Args, evaluate.main, [str(run_dir), "--episodes", "3", "--video"])
    result = json.loads((run_dir / "eval.json").read_text())
    assert result["episodes"]["episodes"] == 3
    assert result["episodes"]["rooms"] == [1]
    assert result["episodes"]["update"] == 4
    import av

    with av.open(str(run_dir / "videos" / f"episodes_{result['global_step']}.mp4")) as container:
        pictures = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(pictures) == 61
    assert pictures[0].shape == (420, 320, 3)
    assert np.std(pictures[5]) > 10


# FLAGS


# What each flag is changed to: then something must differ.
FLAGS = {
    "sticky_actions": 0.9, "max_episode_steps": 20, "frame_stack": 2, "channels": "4,4,8", "hidden": 16, "gru": True,
    "predictor_depth": 0, "dtype": "bfloat16", "total_timesteps": 64, "num_envs": 8, "num_steps": 8, "async_": True,
    "vtrace": True, "obs_norm_init_steps": 6, "num_minibatches": 4, "update_epochs": 1,
    "learning_rate": "0:0.003,1000:0.001", "gamma": 0.9, "int_gamma": 0.9, "gae_lambda": 0.5, "ext_coef": 0.0,
    "int_coef": 0.5, "norm_adv": True, "clip_coef": 0.01, "vf_coef": 0.1, "ent_coef": 0.1, "update_proportion": 0.5,
    "max_grad_norm": 0.01, "adam_eps": 0.1, "seed": 2, "checkpoint_every": 100,
}  # fmt: skip
# Tested elsewhere: these change files, not metrics.
ELSEWHERE = {
    "run_dir", "resume", "keep_checkpoints", "room_map", "wandb_mode", "wandb_project", "wandb_entity",
}  # fmt: skip
# These need others, and these are for the host.
NEEDS = {"vtrace": {"async_": True}}
HOST = {"sticky_actions", "max_episode_steps", "total_timesteps", "async_", "checkpoint_every"}


def test_every_flag_is_in_a_test():
    assert {f.name for f in fields(rnd.Args)} == set(FLAGS) | ELSEWHERE


@pytest.mark.parametrize("flag", [*FLAGS, "none"])
def test_every_flag_changes_something(flag, tmp_path):
    flags = TINY | {"total_timesteps": 140, "run_dir": str(tmp_path)} | NEEDS.get(flag, {})
    change = {} if flag == "none" else {flag: FLAGS[flag]}
    assert_flag_matters(rnd, flags, change, whole=flag in HOST)


# Words, the flag and its value that the answer names, and what it says is valid.
BAD = {
    "minibatches": (["--num-minibatches", 7], "--num-minibatches 7", "16384"),
    "whole rollouts": (["--gru", "--num-minibatches", 256], "--num-minibatches 256", "128 (a GRU"),
    "correction of nothing": (["--vtrace"], "--vtrace", "--async"),
    "channels": (["--channels", "32,64"], "--channels 32,64", "3 numbers"),
    "discount": (["--int-gamma", 1.5], "--int-gamma 1.5", "from 0 to 1"),
    "share": (["--update-proportion", 2], "--update-proportion 2", "from 0 to 1"),
    "no share": (["--update-proportion", 0], "--update-proportion 0.0", "give 0.00024 or more"),
    "no goal": (["--ext-coef", 0, "--int-coef", 0], "--ext-coef 0.0", "--int-coef"),
    "no channels": (["--channels", ""], "--channels ''", "3 numbers"),
    "nan": (["--ext-coef", "nan"], "--ext-coef nan", "0 or more"),
    "no statistics": (["--obs-norm-init-steps", 0], "--obs-norm-init-steps 0", "from 1"),
    "schedule": (["--learning-rate", "0:1e-4,oops"], "--learning-rate '0:1e-4,oops'", "step:value"),
    "batch too large": (["--num-envs", 65536, "--num-steps", 1024], "--num-envs 65536", "at most 16777216"),
    "not a run": (["--resume", "/nowhere"], "--resume /nowhere", "run directory"),
    "other script": (None, "--resume", "ppo_procgen.py"),
    "other game": (None, "--sticky-actions 0.0", "keeps its own, 0.25"),
    "shapes": (None, "does not fit", "here"),
    "memory": (None, "does not fit", "rnd_montezuma"),
}


@pytest.mark.parametrize("whole", [SYNC], indirect=True, ids=["sync"])
@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_sentence(case, tmp_path, whole, monkeypatch, capfd):
    words, names, valid = BAD[case]
    more = {"other game": ["--sticky-actions", 0], "shapes": ["--hidden", 16], "memory": ["--gru"]}
    if case == "other script":
        (tmp_path / "args.json").write_text('{"script": "ppo_procgen", "args": {}}')
        words = ["--resume", tmp_path]
    elif words is None:
        words = ["--resume", whole.path, *more[case]]
    assert_one_sentence(rnd, words, names, valid, monkeypatch, capfd)


@pytest.mark.parametrize("whole", [SYNC], indirect=True, ids=["sync"])
def test_levels_mean_nothing_here(whole, capfd):
    with pytest.raises(SystemExit) as stopped:
        runs.cli(evaluate.Args, evaluate.main, [str(whole.path), "--levels", "train"])
    assert stopped.value.code == 2
    assert "--levels train: has no effect" in capfd.readouterr().err


def test_commands_in_the_readme_are_valid():
    flags = list(documented_flags("rnd_montezuma.py"))
    assert len(flags) >= 4
    for words in flags:
        rnd.check_args(tyro.cli(rnd.Args, args=words))


def test_default_networks_are_the_papers():
    """Parameters counted by hand: three convolutions on 84 x 84, the target's dense layer, the predictor's three."""
    args = rnd.Args()
    state = jax.eval_shape(lambda: rnd.initial_state(args, rnd.make_agent(args)))
    count = lambda tree: sum(x.size for x in jax.tree.leaves(tree))  # noqa: E731
    convolutions = lambda c: 8 * 8 * c * 32 + 32 + 4 * 4 * 32 * 64 + 64 + 3 * 3 * 64 * 64 + 64  # noqa: E731
    dense = lambda i, o: i * o + o  # noqa: E731
    target = convolutions(1) + dense(7 * 7 * 64, 512)
    assert count(state.target) == target
    assert count(state.params["predictor"]) == target + 2 * dense(512, 512)
    trunk = convolutions(4) + dense(3136, 256) + dense(256, 512)
    assert count(state.params["agent"]) == trunk + 2 * dense(512, 512) + dense(512, 18) + dense(512, 2)
