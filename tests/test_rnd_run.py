"""Whole runs of RND on the real game: policy lag, restarts, statistics, rooms, evaluation."""

import functools
import json
import re
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import assert_same_run, cut_back, init_state, parameters, read_metrics, record_shardings

import evaluate
import ppo_procgen as ppo
import rnd_montezuma as rnd
from common import atari, checkpoints, devices, envs, runs
from common.actors import ActorError

# Small enough to compile in seconds; the game is real. It restarts after every second update.
TINY = {
    "num_envs": 4, "num_steps": 16, "num_minibatches": 2, "update_epochs": 2, "channels": "4,4,4", "hidden": 8,
    "obs_norm_init_steps": 5, "learning_rate": "0.003", "total_timesteps": 240,
    "max_episode_steps": 30, "restart_every": 20, "wandb_mode": "disabled", "num_devices": 2,
}  # fmt: skip
# Everything that has a state of its own is on.
ASYNC = {"async_": True, "vtrace": True, "core": "gru", "checkpoint_every": 1, "keep_checkpoints": 9}
SYNC = {"separate_value": True, "checkpoint_every": 1, "keep_checkpoints": 9}


@pytest.fixture
def train(tmp_path):
    """train(**flags) runs the script with TINY settings and returns its run's directory."""
    return lambda **flags: rnd.main(rnd.Args(**TINY | {"run_dir": str(tmp_path / "runs")} | flags)).path


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """uninterrupted(**flags) is the directory of a run with a checkpoint after each of its four updates."""

    @functools.cache
    def run(**flags):
        return rnd.main(rnd.Args(**TINY | flags | {"run_dir": str(tmp_path_factory.mktemp("uninterrupted"))})).path

    return run


of_both = pytest.mark.parametrize("flags", [SYNC, ASYNC], ids=["sync", "async"])


@of_both
def test_a_run_of_four_updates_has_the_lag_restarts_and_statistics_of_its_flags(flags, uninterrupted, tmp_path):
    """In each checkpoint: the bonus's statistics continue over a restart, those of unfinished episodes do not."""
    run_dir, played = uninterrupted(**flags), []
    # One update behind, but for the first rollout, which is played with the first parameters as the second is.
    lags = [line["charts/policy_lag"] for line in read_metrics(run_dir)]
    assert lags == ([0, 1, 1, 1] if flags is ASYNC else [0] * 4)
    for number, step in enumerate(checkpoints.steps_in(run_dir), 1):
        saved = checkpoints.load(cut_back(run_dir, number, tmp_path / str(step)))[1]
        state, own = saved["state"], saved["hosts"]["0"]
        snapshot, statistics = own["fleet"]["snapshots"]["0"], own["statistics"]
        played.append((int(snapshot["seed"]), len(snapshot["actions"])))
        restarted = number % 2 == 0
        assert (statistics["episodes"]["length"] == 0).all() == restarted
        assert statistics["rooms"]["episode"].any() != restarted
        assert (state["bonus_filter"]["discounted"] > 0).all()
        assert state["bonus_filter"]["count"] == state["global_step"]
        steps = TINY["obs_norm_init_steps"] + number * TINY["num_steps"]
        assert (state["updates"], state["frame_stats"]["count"]) == (number, TINY["num_envs"] * steps)
        newest = own["fleet"]["published"][str(number)]  # which the actor plays next
        jax.tree.map(np.testing.assert_array_equal, newest, state["params"]["agent"])
    seed = envs.derive_seed(1, 1)
    after = envs.derive_seed(seed)
    assert played == [(seed, 16), (seed, 32), (after, 16), (after, 32)]


def test_a_run_stopped_during_its_random_steps_begins_with_them_when_resumed(train, uninterrupted, monkeypatch):
    observe, add, seen = rnd.observe_random_play, rnd.add_frames, []

    def observe_and_stop(args, run, stats):
        def add_and_stop(stats, frames):
            seen.append(frames)
            if len(seen) == 2:
                run.stop = "SIGTERM"
            return add(stats, frames)

        monkeypatch.setattr(rnd, "add_frames", add_and_stop)
        return observe(args, run, stats)

    monkeypatch.setattr(rnd, "observe_random_play", observe_and_stop)
    stopped = train(**SYNC)
    assert len(seen) == 2
    monkeypatch.undo()
    saved = checkpoints.load(stopped)[1]["state"]
    assert saved["frame_stats"]["count"] == saved["updates"] == 0
    assert_same_run(uninterrupted(**SYNC), train(**SYNC, resume=str(stopped)))


@pytest.mark.slow
def test_an_actor_that_fails_stops_the_run_with_a_checkpoint(train, uninterrupted, tmp_path, monkeypatch):
    step, played = envs.ReplayableVecEnv.step, []

    def failing(self, actions):
        played.append(1)
        if len(played) > 40 and threading.current_thread().name == "actor 0":
            raise ZeroDivisionError("the game broke")
        return step(self, actions)

    monkeypatch.setattr(envs.ReplayableVecEnv, "step", failing)
    with pytest.raises(ActorError):
        train(**ASYNC)
    monkeypatch.undo()
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert_same_run(uninterrupted(**ASYNC), train(**ASYNC, resume=str(run_dir)))


@pytest.mark.slow
def test_divergence_stops_a_run_and_keeps_the_last_good_checkpoint(train, tmp_path):
    with pytest.raises(runs.DivergedError, match=r"not finite at step \d+: losses/.*is complete"):
        train(checkpoint_every=60, learning_rate="0:0.003,120:0.003,121:1e35", total_timesteps=10_000)
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert all((np.abs(np.float64(x)) < 1e6).all() for x in parameters(run_dir) if x.dtype == np.float32)


@pytest.mark.optimised
@pytest.mark.slow
@pytest.mark.parametrize("flags", [{"separate_value": True}, ASYNC], ids=["sync", "async"])
def test_code_path_of_a_gpu_runs_on_a_cpu(train, monkeypatch, flags):
    """What runs on a GPU, run on a CPU: plain Flax in bfloat16, one device."""
    monkeypatch.setattr(devices, "on_cpu", lambda: False)
    path = train(**flags | {"total_timesteps": 100, "num_devices": 1})
    assert "losses/policy_loss" in read_metrics(path)[-1]


def test_two_actors_play_as_one(train, uninterrupted, tmp_path):
    """Each has every second game; over a resume too."""
    run_dir = train(**ASYNC, num_actors=2)
    for line, want in zip(read_metrics(run_dir), read_metrics(uninterrupted(**ASYNC)), strict=True):
        assert line == pytest.approx(want, rel=1e-3, abs=1e-5)
    copy = cut_back(run_dir, 2, tmp_path)
    assert_same_run(run_dir, train(**ASYNC, num_actors=2, resume=str(copy)))


@pytest.mark.slow
def test_an_actor_with_a_device_of_its_own_plays_the_same(train, uninterrupted, monkeypatch):
    """The learner has the first two of four devices, and the actor the last."""
    whole = uninterrupted(**ASYNC)  # before its actor's device could be recorded too
    param_shardings = record_shardings(monkeypatch)
    assert_same_run(whole, train(**ASYNC, actor_devices=1))
    assert param_shardings == [[jax.devices()[3]]]


# ROOMS


def steps_of(done, forced_reset=False, ended=False):
    """What `atari.RoomStatistics` reads of the steps of two games: the last frames of their episodes, bool [T, 2]."""
    return SimpleNamespace(is_reset=done, forced_reset=np.full(2, forced_reset), episode_end=np.full(done.shape, ended))


def test_rooms_of_finished_episodes_are_counted_by_step_and_by_episode():
    rooms = atari.RoomStatistics(2)
    where = np.array([[1, 1], [1, 2], [5, 2], [1, 1], [1, 7]])
    done = np.zeros((5, 2), bool)
    done[2] = True  # both episodes end on their third frame
    picture = np.full((84, 84), 9, np.uint8)
    rooms.add(where, steps_of(done), {1: picture})
    assert rooms.visited() == [1, 2, 5, 7]
    assert rooms.visits[[1, 2, 5, 7]].tolist() == [6, 2, 1, 1]
    assert rooms.metrics() == {"charts/rooms_visited": 4, "charts/max_room_score": 2, "charts/rooms_per_episode": 2}
    np.testing.assert_array_equal(rooms.pictures[1], picture)
    again = atari.RoomStatistics(2)
    again.restore(rooms.save())
    again.add(np.array([[3, 4]]), steps_of(np.ones((1, 2), bool)), {})  # the same episodes: rooms 1, 3 and 1, 7, 4
    assert again.metrics() == {"charts/rooms_visited": 6, "charts/max_room_score": 3, "charts/rooms_per_episode": 2.25}
    assert rooms.visited() == [1, 2, 5, 7]


def test_an_episode_that_ends_has_returns_of_the_game_and_of_the_bonus():
    statistics, no, ends = atari.Statistics(1), np.zeros((2, 1), bool), np.array([[False], [True]])
    steps = envs.Timesteps(np.ones((2, 1), np.float32), ends, no, no, np.zeros((3, 1), int), np.zeros(1, bool))
    statistics.add(steps, np.float32([[0.25], [0.5]]), np.ones((2, 1), int), {})
    told = statistics.metrics()
    assert (told["charts/episodic_return"], told["charts/episodic_intrinsic_return"]) == (2, 0.75)


def test_the_game_with_default_flags_is_that_of_the_papers():
    """Machado et al. 2018: sticky actions, five minutes at 15 decisions a second, all lives, and the score as it is."""
    env = atari.make_montezuma(rnd.Args(), 1, 3)
    how = env.spec.config
    env.close()
    assert (how.repeat_action_probability, how.max_episode_steps, how.frame_skip) == (0.25, 4500, 4)
    assert (how.episodic_life, how.reward_clip, how.use_fire_reset, how.noop_max) == (False, False, False, 1)
    sticky = atari.make_montezuma(rnd.Args(sticky_actions=0.5), 1, 3)
    assert sticky.spec.config.repeat_action_probability == 0.5
    sticky.close()


def test_rooms_before_a_restart_are_of_no_finished_episode():
    rooms, unfinished = atari.RoomStatistics(2), np.zeros((2, 2), bool)
    rooms.add(np.array([[1, 1], [2, 5]]), steps_of(unfinished, forced_reset=True), {})
    assert rooms.metrics() == {"charts/rooms_visited": 3, "charts/max_room_score": 2}
    rooms.add(np.array([[1, 1], [1, 1]]), steps_of(~unfinished), {})
    assert rooms.metrics() == {"charts/rooms_visited": 3, "charts/max_room_score": 2, "charts/rooms_per_episode": 1}
    # But one that ended in the last step before is finished, though EnvPool's junk step never comes.
    rooms = atari.RoomStatistics(2)
    last = np.array([[False, False], [True, False]])
    rooms.add(np.array([[1, 1], [2, 5]]), steps_of(unfinished, forced_reset=True, ended=last), {})
    assert rooms.metrics()["charts/rooms_per_episode"] == 2
    assert (rooms._recent == 2).sum() == 1


def test_the_map_of_visited_rooms_shows_each_in_its_place():
    visits, pictures = np.zeros(24, np.int64), np.zeros((24, 84, 84), np.uint8)
    visits[[1, 15]], pictures[1], pictures[15] = 5, 250, 100
    image = atari.draw_rooms(visits, pictures)

    def bright(value):
        return np.argwhere((image == value).all(axis=-1)).mean(axis=0) / image.shape[:2]

    np.testing.assert_allclose(bright(250), [0.11, 0.5], atol=0.03)  # room 1: the middle of the top floor
    np.testing.assert_allclose(bright(100), [0.86, 0.06], atol=0.03)  # room 15: the left of the lowest


class Corridor:
    """Two games of episodes of 2, 3, 4, ... steps: game 0's pay 100 a step and stay in room 1, game 1's pay 1 and each
    visits a room of its own; the frames count the steps. As EnvPool, it ignores the action after an episode's end."""

    def __init__(self, args, num_envs, seed, gray_scale=True, **size):
        self.channels, self.asked, self.num_envs, self.seed = 1 if gray_scale else 3, [], num_envs, seed
        Corridor.made.append(self)

    def _answer(self, reward, ended):
        room = np.where(np.arange(2) == 1, 2 + self.episode, 1)
        ram = np.zeros((2, 128), np.uint8)
        ram[:, 3] = room
        frames = np.broadcast_to(
            np.uint8(len(self.asked) + 100 * np.arange(2))[:, None, None, None], (2, self.channels, 84, 84)
        )
        info = {"ram": ram, "elapsed_step": self.episode_step.copy()}
        return (frames, info) if reward is None else (frames, reward, ended, np.zeros(2, bool), info)

    def reset(self):
        self.episode_step, self.episode, self.over = np.zeros(2, np.int32), np.zeros(2, int), np.zeros(2, bool)
        return self._answer(None, None)

    def step(self, actions):
        self.asked.append(np.array(actions))
        self.episode += self.over
        self.episode_step = np.where(self.over, 0, self.episode_step + 1)
        reward = np.where(self.over, 0.0, [100.0, 1.0])
        self.over = self.episode_step == self.episode + 2
        return self._answer(reward, self.over)

    def close(self):
        pass


def test_evaluation_with_a_film_reports_scores_and_rooms_and_shows_the_best_episode(monkeypatch):
    monkeypatch.setattr(atari, "make_montezuma", Corridor)
    Corridor.made = []
    args = rnd.Args(num_devices=2)
    mesh = devices.make_mesh(args)
    rows, summary, film = atari.evaluate(args, mesh, atari.random_policy, episodes=2, seed=3, record=True)
    assert [(row["score"], row["steps"], row["rooms"]) for row in rows] == [(200, 2, [1]), (2, 2, [2])]
    monkeypatch.setattr(atari, "min", lambda *_: 2, raising=False)  # two games, three episodes each
    Corridor.made = []
    rows, summary, film = atari.evaluate(args, mesh, atari.random_policy, episodes=6, seed=3, record=True)
    scores = [(row["score"], row["steps"], row["rooms"]) for row in rows]
    assert scores[:3] == [(200, 2, [1]), (300, 3, [1]), (400, 4, [1])]
    assert scores[3:] == [(2, 2, [2]), (3, 3, [3]), (4, 4, [4])]
    assert summary["rooms"] == [1, 2, 3, 4]
    assert (summary["mean_return"], summary["max"], summary["episodes"]) == (909 / 6, 400, 6)
    assert film[:, 0, 0, 0].tolist() == [7, 8, 9, 10, 11]  # of game 0, after episodes of 3 and of 4 frames
    played, filmed = Corridor.made
    np.testing.assert_array_equal(filmed.asked, played.asked[: len(filmed.asked)])
    assert len({tuple(actions) for actions in filmed.asked}) > 3
    assert (played.seed, filmed.seed) == (3, 3)


def test_evaluation_with_equal_scores_films_the_episode_with_most_rooms(monkeypatch):
    """Nearly all episodes score nothing."""
    step = Corridor.step

    def play_for_nothing(self, actions):
        frames, reward, *rest = step(self, actions)
        return frames, 0 * reward, *rest

    monkeypatch.setattr(Corridor, "step", play_for_nothing)
    monkeypatch.setattr(atari, "make_montezuma", Corridor)
    monkeypatch.setattr(atari, "rooms_of", lambda info: np.array([1, info["elapsed_step"][1]]))
    Corridor.made = []
    args = rnd.Args(num_devices=2)
    mesh = devices.make_mesh(args)
    *_, film = atari.evaluate(args, mesh, atari.random_policy, episodes=2, seed=3, record=True)
    assert film[0, 0, 0, 0] >= 100  # of game 1


def test_a_replay_of_an_episode_is_the_same_game_in_colour():
    args, rng = rnd.Args(max_episode_steps=60), np.random.default_rng(0)
    env, actions = atari.make_montezuma(args, 2, 3), rng.integers(0, 18, (60, 2))
    grey = [env.reset()[0][1, 0]] + [env.step(action)[0][1, 0].copy() for action in actions]
    env.close()
    episode = atari.Episode(0.0, [1], env=1, first=10, last=60)
    film = atari.replay(args, 2, 3, actions=actions, episode=episode)
    assert film.shape == (51, 210, 160, 3)

    def mean(x):
        return x.reshape(42, x.shape[0] // 42, 4, x.shape[1] // 4).mean(axis=(1, 3))

    def small(x):
        return np.repeat(np.repeat(np.float64(x), 5, axis=0), 8, axis=1)

    for t in range(10, 61, 10):
        one, other = mean(small(grey[t])), mean(np.float64(film[t - 10] @ [0.299, 0.587, 0.114]))
        assert np.corrcoef(one.ravel(), other.ravel())[0, 1] > 0.98


@pytest.mark.optimised
def test_a_run_with_room_map_and_film_has_every_metric_and_picture(train, capfd):
    """W&B, a map of the rooms, and evaluate.py with a film."""
    more = {"total_timesteps": 1_000, "checkpoint_every": 400, "max_episode_steps": 60, "restart_every": 130}
    run_dir = train(**ASYNC | more | {"room_map": True, "wandb_mode": "offline", "wandb_project": "test"})
    assert "rooms visited: 1" in capfd.readouterr().err
    assert re.fullmatch(r"MontezumaRevenge-v5__rnd_montezuma__1__\d+", run_dir.name)
    lines = read_metrics(run_dir, clocks=True)
    names = {"charts/episodic_return", "charts/episodic_length", "charts/SPS", "charts/policy_lag", "time/update"}
    names |= {"charts/rooms_visited", "charts/max_room_score", "charts/rooms_per_episode", "charts/intrinsic_reward"}
    names |= {"charts/episodic_intrinsic_return", "charts/prediction_error", "losses/rnd_loss", "losses/policy_loss"}
    names |= {"losses/explained_variance", "losses/intrinsic_explained_variance", "time/waiting", "time/actor_game"}
    assert names <= set(lines[-1])
    assert all(np.isfinite(list(line.values())).all() for line in lines)
    assert len(list((run_dir / "wandb").glob("offline-run-*/files/media/images/pictures/rooms*.png"))) >= 2
    from PIL import Image

    picture = np.asarray(Image.open(run_dir / "rooms.png"))
    assert picture[:200, 600:900].std() > 30  # room 1

    runs.cli(evaluate.Args, evaluate.main, [str(run_dir), "--episodes", "4", "--video"])
    result = json.loads((run_dir / "eval.json").read_text())
    assert result["episodes"]["episodes"] == 4
    assert result["episodes"]["rooms"] == [1]
    assert result["episodes"]["update"] == len(lines)
    import av

    with av.open(str(run_dir / "videos" / f"episodes_{result['global_step']}.mp4")) as container:
        pictures = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(pictures) == 61
    assert pictures[0].shape == (420, 320, 3)
    assert np.std(pictures[5]) > 10


def test_statistics_at_the_start_are_of_random_play_and_upright_frames(monkeypatch):
    asked = []

    class Bar:
        """A game in which nothing happens, with a bar at the top."""

        def __init__(self, args, num_envs, seed):
            self.obs = np.zeros((num_envs, 1, 84, 84), np.uint8)
            self.obs[:, :, :10] = 200
            self.info = {"ram": np.ones((num_envs, 128), np.uint8), "elapsed_step": np.ones(num_envs, np.int32)}

        def reset(self):
            return self.obs, self.info

        def step(self, actions):
            asked.extend(actions.tolist())
            nothing = np.zeros(len(actions), bool)
            return self.obs, np.zeros(len(actions), np.float32), nothing, nothing, self.info

        def close(self):
            pass

    monkeypatch.setattr(atari, "make_montezuma", Bar)
    args = rnd.Args(**TINY | {"num_envs": 64, "num_devices": 1})
    run = SimpleNamespace(stop=None, print=lambda _: None)
    mean = rnd.observe_random_play(args, run, init_state(rnd, args).frame_stats).mean[..., 0]
    np.testing.assert_allclose(mean, 200.0 * (np.arange(84) < 10)[:, None] * np.ones(84), atol=1e-2)
    assert set(asked) == set(range(atari.NUM_ACTIONS))


def test_a_run_of_more_devices_than_there_are_can_be_evaluated(tmp_path):
    runs.check_flags(rnd.Args(update_proportion=0.0004, num_devices=4))
    args = vars(ppo.Args(num_devices=64, distributed=True))
    runs.write_json(tmp_path / "args.json", {"script": "ppo_procgen", "args": args})
    saved = evaluate.script_of(str(tmp_path))[1]
    assert (saved.num_devices, saved.distributed) == (0, False)
    assert runs.on_this_machine(rnd.Args(async_=True, actor_devices=1)).actor_devices == 0


def test_evaluation_with_levels_is_refused_and_with_random_plays_at_random(uninterrupted, capfd, monkeypatch):
    run_dir = str(uninterrupted(**SYNC))
    with pytest.raises(SystemExit) as stopped:
        runs.cli(evaluate.Args, evaluate.main, [run_dir, "--levels", "train"])
    assert stopped.value.code == 2
    assert "--levels train: has no effect" in capfd.readouterr().err
    monkeypatch.setattr(atari, "evaluate", lambda args, mesh, policy, **how: (policy, {}, None))
    how = {"episodes": 1, "seed": 0, "levels": "test", "random": True, "video": False}
    answer = rnd.evaluate(rnd.Args(**TINY | SYNC), run_dir, **how)
    assert (answer.rows, answer.name) == (atari.random_policy, "random_episodes")


def test_networks_with_default_flags_have_the_parameters_counted_by_hand():
    """Target and predictor are the paper's; the policy is lightning_rnd's (docs/rnd.md)."""

    def init_params(args):
        return jax.eval_shape(lambda: rnd.init_state(args, rnd.make_agent(args)))

    state, separate = init_params(rnd.Args()), init_params(rnd.Args(separate_value=True))

    def count(tree):
        return sum(x.size for x in jax.tree.leaves(tree))

    def convolutions(channels):
        return 8 * 8 * channels * 32 + 32 + 4 * 4 * 32 * 64 + 64 + 3 * 3 * 64 * 64 + 64

    def dense(inputs, outputs):
        return inputs * outputs + outputs

    target = convolutions(1) + dense(7 * 7 * 64, 512)
    assert count(state.target) == target
    assert count(state.params["predictor"]) == target + 2 * dense(512, 512)
    trunk = convolutions(4) + dense(3136, 256) + dense(256, 512)
    policy, values = (trunk + dense(512, 512) + dense(512, outputs) for outputs in (18, 2))
    assert count(state.params["agent"]) == policy + values - trunk
    assert count(separate.params["agent"]) == policy + values
    assert set(state.params["agent"]["params"]) == {"encoder", "trunk", "actor", "policy", "critic", "values"}
    assert set(separate.params["agent"]["params"]) == {"encoder", "trunk", "actor", "policy", "value_network"}
