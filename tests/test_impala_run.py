"""Whole runs of IMPALA on real games: policy lag, restarts, actors that fail or hang, a starved learner."""

import os
import re
import signal
import threading
import time
import traceback

import numpy as np
import pytest
from conftest import assert_same_run, cut_back, flags_of, read_metrics

import impala_procgen as impala
from common import checkpoints, devices, envs, runs
from common.actors import ActorError

pytestmark = pytest.mark.optimised

# Small enough to compile in seconds; the games are real. They restart after every second update.
TINY = {
    "env_id": "bigfish", "num_envs": 4, "num_steps": 16, "num_minibatches": 2, "update_epochs": 2, "encoder": "nature",
    "pool": "flatten", "width": 1, "hidden": 16, "learning_rate": "0.003",
    "total_timesteps": 360, "restart_every": 24, "eval_episodes": 0, "wandb_mode": "disabled", "deterministic": True,
    "num_devices": 2,
}  # fmt: skip
# Everything that has a state of its own is on, and there is a checkpoint after each update.
STATEFUL = {"normalize_rewards": True, "sticky_actions": 0.25, "core": "lstm", "replay_fraction": 0.5,
            "replay_size": 16, "max_lag": 2, "checkpoint_every": 1, "keep_checkpoints": 9}  # fmt: skip
FREE = STATEFUL | {"deterministic": False, "checkpoint_every": 1_000_000}


@pytest.fixture
def train(tmp_path):
    """train(**flags) runs the script with TINY settings and returns its run."""
    return lambda **flags: impala.main(impala.Args(**TINY | {"run_dir": str(tmp_path / "runs")} | flags))


def actor_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("actor")]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """An uninterrupted run's directory."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    return impala.main(impala.Args(**TINY | STATEFUL | {"run_dir": str(folder)})).path


def wrap_update(monkeypatch, before):
    """Calls before(state, unrolls) before each update."""
    make_update = impala.make_update

    def make(*given):
        update = make_update(*given)

        def wrapped(state, unrolls):
            before(state, unrolls)
            return update(state, unrolls)

        return wrapped

    monkeypatch.setattr(impala, "make_update", make)


def test_games_restart_after_every_second_update(uninterrupted, tmp_path):
    """In each checkpoint: the environments, the episodes, and the normaliser's returns."""
    assert [line["charts/policy_lag"] for line in read_metrics(uninterrupted)] == [0, 1, 2, 2, 2, 2]
    for number, step in enumerate(checkpoints.steps_in(uninterrupted), 1):
        saved = checkpoints.load(cut_back(uninterrupted, number, tmp_path / str(step)))[1]
        restarted, own = number % 2 == 0, saved["hosts"]["0"]
        assert saved["state"]["updates"] == number
        assert (own["episodes"]["length"] == 0).all() == restarted
        assert (saved["buffers"]["reward_filter"]["discounted"] == 0).all() or not restarted
        for actor in range(2):
            seed = envs.derive_seed(1, 0)
            for _ in range((number - 1) // 2):
                seed = envs.derive_seed(seed)
            snapshot = own["fleet"]["snapshots"][str(actor)]
            assert (int(snapshot["seed"]), snapshot["actions"].shape) == (seed, (32 if restarted else 16, 2))
            if restarted:
                actions = snapshot["actions"]
                assert (actions[:16] != actions[16:]).mean() > 0.5  # each unroll draws its own


@pytest.mark.slow
def test_replay_on_other_devices_begins_anew(train, monkeypatch):
    """Else a device would draw from a part of it into which nothing had been written yet."""
    path = train(**STATEFUL | {"num_devices": 1, "total_timesteps": 60}).path
    blank = []

    def look(state, unrolls):
        blank.append((np.asarray(unrolls.frames.images) == 0).all(axis=(0, 2, 3, 4)).any())

    wrap_update(monkeypatch, look)
    train(**STATEFUL, resume=str(path))
    assert len(blank) > 3
    assert not any(blank)


def before_step(monkeypatch, number, call):
    """Calls call() before this step, counted from 1, of the environments of actor 1."""
    step, played = envs.ReplayableVecEnv.step, []

    def call_and_step(self, actions):
        if threading.current_thread().name == "actor 1":
            played.append(1)
            if len(played) == number:
                call()
        return step(self, actions)

    monkeypatch.setattr(envs.ReplayableVecEnv, "step", call_and_step)


def fail():
    raise ZeroDivisionError("the game broke")


def test_an_actor_that_fails_stops_the_run_with_a_checkpoint(train, uninterrupted, tmp_path, monkeypatch, capfd):
    """From the command line, where Python shows the exception's traceback."""
    monkeypatch.chdir(tmp_path)
    before_step(monkeypatch, 61, fail)
    with pytest.raises(ActorError, match="actor 1") as error:
        runs.cli(impala.Args, impala.main, flags_of(TINY | STATEFUL))
    shown = "".join(traceback.format_exception(error.value))
    assert "in fail" in shown
    assert "ZeroDivisionError: the game broke" in shown
    assert "--resume" in capfd.readouterr().err
    assert not actor_threads()
    monkeypatch.undo()
    (run_dir,) = tmp_path.glob("runs/*")
    assert_same_run(uninterrupted, train(**STATEFUL, resume=str(run_dir)).path)


@pytest.mark.slow
def test_a_learner_starved_by_slow_games_shows_in_the_metrics(train, monkeypatch):
    step = envs.ReplayableVecEnv.step

    def step_slowly(self, actions):
        time.sleep(0.1)
        return step(self, actions)

    monkeypatch.setattr(envs.ReplayableVecEnv, "step", step_slowly)
    last = read_metrics(train(**FREE).path, clocks=True)[-1]
    assert last["charts/queue_size"] == 0
    assert last["time/waiting"] > 0.5
    assert last["time/actor_game"] > 0.5


def test_an_actor_that_fails_after_its_last_batch_is_reported(train, monkeypatch):
    """In its seventh unroll, which no update of the six takes, while the sixth goes on."""
    done, last = [], threading.Event()
    before_step(monkeypatch, 97, lambda: last.wait(60) and fail())

    def slow(state, unrolls):
        done.append(1)
        if len(done) == 6:
            last.set()
            (actor,) = [thread for thread in actor_threads() if thread.name == "actor 1"]
            actor.join(60)

    wrap_update(monkeypatch, slow)
    with pytest.raises(ActorError, match="actor 1"):
        train(**STATEFUL)


@pytest.mark.slow
def test_divergence_stops_a_run_and_its_actors(train):
    with pytest.raises(runs.DivergedError, match=r"not finite at step \d+: losses/.*is complete"):
        train(checkpoint_every=60, learning_rate="0:0.003,120:0.003,121:1e35", total_timesteps=10_000)
    assert not actor_threads()


def test_sigterm_while_a_games_step_takes_a_second_stops_a_run_that_resumes_exactly(train, uninterrupted, monkeypatch):
    before_step(monkeypatch, 70, lambda: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(1))
    run = train(**STATEFUL)
    assert run.stop == "SIGTERM"
    assert not actor_threads()
    assert checkpoints.load(run.path)[0] == read_metrics(run.path)[-1]["global_step"]
    monkeypatch.undo()
    assert_same_run(uninterrupted, train(**STATEFUL, resume=str(run.path)).path)


def test_a_run_with_evaluations_logs_every_metric_and_films(train):
    flags = {"env_id": "starpilot", "num_levels": 3, "eval_every": 1000, "eval_episodes": 4, "capture_video": True}
    more = {"total_timesteps": 2_000, "restart_every": 400, "checkpoint_every": 400, "keep_checkpoints": 2}
    run_dir = train(**STATEFUL | flags | more).path
    assert re.fullmatch(r"starpilot__impala_procgen__1__\d+", run_dir.name)
    lines = read_metrics(run_dir, clocks=True)
    names = {"charts/episodic_return", "charts/episodic_length", "charts/SPS", "charts/policy_lag", "time/update"}
    names |= {"charts/queue_size", "losses/policy_loss", "losses/value_loss", "losses/entropy", "losses/approx_kl"}
    names |= {"losses/explained_variance", "time/waiting", "time/transfer", "time/actor_inference", "time"}
    names |= {f"eval/{x}_levels/{y}" for x in ("train", "test") for y in ("mean_return", "normalized", "min", "max")}
    assert names <= set().union(*lines)
    assert all(np.isfinite(list(line.values())).all() for line in lines)
    assert len(list((run_dir / "checkpoints").iterdir())) == 2
    assert len(list((run_dir / "videos").glob("*.mp4"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("core", ["none", "gru"])
def test_code_path_of_a_gpu_runs_on_a_cpu(train, monkeypatch, core):
    """What runs on a GPU, run on a CPU: plain Flax in bfloat16, one device."""
    monkeypatch.setattr(devices, "on_cpu", lambda: False)
    lines = read_metrics(train(core=core, eval_episodes=1, total_timesteps=100).path)
    assert "losses/loss" in lines[-2]
    assert "eval/test_levels/mean_return" in lines[-1]
