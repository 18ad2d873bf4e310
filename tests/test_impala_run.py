"""Whole runs of IMPALA on the real game: lock-step, resume, failures, signals, bad input."""

import json
import os
import re
import shutil
import signal
import threading
import time
import traceback
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import (
    SHARED_FLAGS,
    assert_flag_matters,
    assert_one_sentence,
    assert_same_run,
    cut_back,
    flags_of,
    read_metrics,
    stop_and_go_on,
)

import evaluate
import impala_procgen as impala
from common import checkpoints, devices, envs, runs
from common.actors import ActorError, Fleet

pytestmark = pytest.mark.optimised

# Small enough to compile in seconds; the games are real. They start anew after every second update, and the learning
# rate explodes later than most runs here end.
TINY = {
    "env_id": "bigfish", "num_envs": 4, "num_steps": 16, "num_minibatches": 2, "update_epochs": 2, "encoder": "nature",
    "pool": "flatten", "width": 1, "hidden": 16, "learning_rate": "0:0.003,2200:0.003,2201:1e35",
    "total_timesteps": 360, "restart_every": 24, "eval_episodes": 0, "wandb_mode": "disabled", "deterministic": True,
    "num_devices": 2,
}  # fmt: skip
# Everything that has a state of its own is on, and there is a checkpoint after each update.
STATEFUL = {"normalize_rewards": True, "sticky_actions": 0.25, "core": "lstm", "replay_fraction": 0.5,
            "replay_size": 16, "max_lag": 2, "checkpoint_every": 1, "keep_checkpoints": 9}  # fmt: skip
FREE = STATEFUL | {"deterministic": False, "checkpoint_every": 1_000_000}


def train_in(folder, **flags):
    """Runs the script with TINY settings."""
    return impala.main(impala.Args(**TINY | {"run_dir": str(folder / "runs")} | flags))


@pytest.fixture
def train(tmp_path):
    """train(**flags) trains in this test's folder and returns its run."""
    return lambda **flags: train_in(tmp_path, **flags)


@pytest.fixture
def resume(train):
    """resume(path, **flags) goes on with a run."""
    return lambda path, **flags: train(**flags, resume=str(path)).path


def actor_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("actor")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run, and its checkpoints in order."""
    path = train_in(tmp_path_factory.mktemp("whole"), **STATEFUL).path
    checkpoints = sorted((path / "checkpoints").iterdir(), key=lambda folder: int(folder.name))
    assert len(checkpoints) == len(read_metrics(path)) == 6
    return SimpleNamespace(path=path, checkpoints=checkpoints)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """One without all that has a state of its own."""
    return train_in(tmp_path_factory.mktemp("plain"), total_timesteps=250).path


def slow_down(monkeypatch, seconds):
    """Makes every step of the games take `seconds()` longer."""
    step = envs.Games.step

    def slow(self, actions):
        time.sleep(seconds())
        return step(self, actions)

    monkeypatch.setattr(envs.Games, "step", slow)


def test_same_seed_same_metrics_whatever_the_threads_speed_and_wherever_checkpoints_fall(train, whole, monkeypatch):
    rng = np.random.default_rng()
    slow_down(monkeypatch, lambda: rng.random() * 0.02)
    assert_same_run(whole.path, train(**STATEFUL | {"checkpoint_every": 150}).path)
    assert not actor_threads()


@pytest.mark.parametrize("updates", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_resume_equals_uninterrupted(resume, whole, updates, tmp_path):
    """From the checkpoint before the update after which the games start anew, at it, and after it; the actors, two
    updates ahead, had started them anew already or not."""
    path = cut_back(whole.path, updates, tmp_path)
    assert checkpoints.load(path)[1]["state"]["updates"] == updates
    assert_same_run(whole.path, resume(path, **STATEFUL))


def test_the_games_start_anew_after_every_second_update(whole, tmp_path):
    """Whatever checkpoints say of when: what is saved of the games, the episodes, and the normaliser's returns."""
    for number, folder in enumerate(whole.checkpoints, 1):
        shutil.copytree(folder, tmp_path / folder.name / "checkpoints" / folder.name)
        saved = checkpoints.load(tmp_path / folder.name)[1]
        anew = number % 2 == 0
        own = saved["hosts"]["0"]
        assert (own["episodes"]["length"] == 0).all() == anew
        assert (saved["memory"]["reward_filter"]["discounted"] == 0).all() or not anew
        for actor in range(2):
            seed = envs.derive_seed(1, 0)
            for _ in range((number - 1) // 2):
                seed = envs.derive_seed(seed)
            games = own["fleet"]["games"][str(actor)]
            assert (int(games["seed"]), games["actions"].shape) == (seed, (32 if anew else 16, 2))
            if anew:
                assert (games["actions"][:16] != games["actions"][16:]).mean() > 0.5  # each unroll draws its own


@pytest.mark.slow
def test_on_other_devices_the_replay_buffer_begins_anew(train, resume, monkeypatch):
    """Else a device would draw from a part of it into which nothing had been written yet."""
    path = train(**STATEFUL | {"num_devices": 1, "total_timesteps": 60}).path
    update, blank = impala.update, []

    def look(args, agent, state, unrolls):
        blank.append((np.asarray(unrolls.frames.images) == 0).all(axis=(0, 2, 3, 4)).any())
        return update(args, agent, state, unrolls)

    monkeypatch.setattr(impala, "update", look)
    resume(path, **STATEFUL)
    assert len(blank) > 3
    assert not any(blank)


@pytest.mark.slow
def test_evaluation_does_not_disturb_training(train, whole):
    evaluated = read_metrics(train(**STATEFUL, eval_every=100, eval_episodes=2).path)
    assert sum("eval/test_levels/mean_return" in line for line in evaluated) > 1
    assert [x for x in evaluated if "losses/loss" in x] == read_metrics(whole.path)


def test_lag_of_lock_step(whole, plain):
    """Other lags are tested in test_actors.py."""
    assert [line["charts/policy_lag"] for line in read_metrics(whole.path)] == [0, 1, 2, 2, 2, 2]
    assert [line["charts/policy_lag"] for line in read_metrics(plain)] == [0, 1, 1, 1]


def fail_after(monkeypatch, steps, wait=lambda: True):
    """Makes the games of one actor raise, once `wait` has returned."""
    step, played = envs.Games.step, []

    def failing(self, actions):
        if threading.current_thread().name == "actor 1":
            played.append(1)
            if len(played) > steps:
                assert wait()
                raise ZeroDivisionError("the game broke")
        return step(self, actions)

    monkeypatch.setattr(envs.Games, "step", failing)


def test_a_failing_actor_stops_the_run_with_a_checkpoint(resume, whole, tmp_path, monkeypatch, capfd):
    """From the command line, where Python shows the exception's traceback."""
    monkeypatch.chdir(tmp_path)
    fail_after(monkeypatch, 60)
    with pytest.raises(ActorError, match="actor 1") as error:
        runs.cli(impala.Args, impala.main, flags_of(TINY | STATEFUL))
    shown = "".join(traceback.format_exception(error.value))
    assert "in failing" in shown
    assert "ZeroDivisionError: the game broke" in shown
    assert "--resume" in capfd.readouterr().err
    assert not actor_threads()
    monkeypatch.undo()
    (run_dir,) = tmp_path.glob("runs/*")
    assert_same_run(whole.path, resume(run_dir, **STATEFUL))


@pytest.mark.slow
def test_a_slow_game_starves_the_learner_and_it_shows(train, monkeypatch):
    slow_down(monkeypatch, lambda: 0.1)
    last = read_metrics(train(**FREE).path, clocks=True)[-1]
    assert last["charts/queue_size"] == 0
    assert last["time/waiting"] > 0.5
    assert last["time/actor_game"] > 0.5


def wait_for_full_queues(monkeypatch, then=lambda updates: None):
    """Makes the learner so slow that the actors, max_lag = 2, have filled their queues before each update ends."""
    update, made, done = impala.update, [], []

    def make(*args, **options):
        made.append(Fleet(*args, **options))
        return made[0]

    def slow(*args):
        end = time.monotonic() + 60
        while min(map(len, made[0]._ready)) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        done.append(1)
        then(len(done))
        return update(*args)

    monkeypatch.setattr(impala.actors, "Fleet", make)
    monkeypatch.setattr(impala, "update", slow)


def test_a_slow_learner_holds_the_actors_back(train, monkeypatch):
    wait_for_full_queues(monkeypatch)
    lines = read_metrics(train(**FREE).path, clocks=True)
    assert len(lines) == 6
    assert all(2 <= line["charts/queue_size"] <= 3 for line in lines[1:])
    assert lines[-1]["charts/policy_lag"] == 2


def test_sigterm_with_full_queues(train, resume, whole, monkeypatch):
    wait_for_full_queues(monkeypatch, lambda done: done == 3 and os.kill(os.getpid(), signal.SIGTERM))
    stopped = train(**STATEFUL)
    assert stopped.stop == "SIGTERM"
    assert len(read_metrics(stopped.path)) == 3
    assert not actor_threads()
    monkeypatch.undo()
    assert_same_run(whole.path, resume(stopped.path, **STATEFUL))


def test_an_actor_that_fails_after_the_last_batch_is_reported(train, monkeypatch):
    """In its seventh unroll, which no update of the six takes, while the sixth goes on."""
    update, done, last = impala.update, [], threading.Event()
    fail_after(monkeypatch, 96, wait=lambda: last.wait(60))

    def slow(*args):
        done.append(1)
        if len(done) == 6:
            last.set()
            (actor,) = [thread for thread in actor_threads() if thread.name == "actor 1"]
            actor.join(60)
        return update(*args)

    monkeypatch.setattr(impala, "update", slow)
    with pytest.raises(ActorError, match="actor 1"):
        train(**STATEFUL)


@pytest.mark.slow
def test_divergence_stops_and_keeps_the_last_good_checkpoint(train):
    with pytest.raises(runs.DivergedError, match=r"not finite at step \d+: losses/.*is whole"):
        train(checkpoint_every=1000, total_timesteps=10_000)
    assert not actor_threads()


def test_sigterm_while_the_learner_waits(train, resume, whole, monkeypatch):
    """A game hangs: the run still ends, within a step of it."""
    step, played = envs.Games.step, []

    def hanging(self, actions):
        if threading.current_thread().name == "actor 1":
            played.append(1)
            if len(played) == 70:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(1)
        return step(self, actions)

    monkeypatch.setattr(envs.Games, "step", hanging)
    run = train(**STATEFUL)
    assert run.stop == "SIGTERM"
    assert not actor_threads()
    assert checkpoints.load(run.path)[0] == read_metrics(run.path)[-1]["global_step"]
    monkeypatch.undo()
    assert_same_run(whole.path, resume(run.path, **STATEFUL))


# FLAGS


# What each flag is changed to: then something must differ.
FLAGS = {
    "sticky_actions": 0.5, "frame_stack": 2, "gap_stack": False, "reward_shaping": True, "reward_clip": 0.5,
    "normalize_rewards": True, "encoder": "impala", "width": 2, "pool": "avg", "dtype": "bfloat16", "hidden": 8,
    "core": "lstm", "num_actors": 1, "num_envs": 8, "num_steps": 8, "update_epochs": 1, "num_minibatches": 1,
    "replay_fraction": 0.5, "replay_size": 4, "learning_rate": "0:0.003,1000:0.001", "gamma": "0.5", "rho_bar": 0.5,
    "c_bar": 0.5, "pg_rho_bar": 0.5, "vtrace_lambda": 0.5, "clip_coef": 0.2, "vf_coef": 0.1, "ent_coef": "0.1",
    "max_grad_norm": 0.01, "optimizer": "rmsprop", "adam_eps": 0.1, "l2": 0.1, "seed": 2, "dropout": 0.5,
    "augment": "translate", "augment_prob": 1.0, "augment_mode": "drac", "drac_coef": 0.5, "restart_every": 16,
    "num_devices": 1,
}  # fmt: skip
# Tested elsewhere: these let the clock in, or say where things are.
ELSEWHERE = {"deterministic", "max_lag", "actor_devices"}
# These need others, and these are for the host.
NEEDS = {
    "replay_size": {"replay_fraction": 0.5}, "augment_prob": {"augment": "translate"},
    "augment_mode": {"augment": "translate"}, "drac_coef": {"augment": "translate", "augment_mode": "drac"},
}  # fmt: skip
HOST = {"restart_every"}


def test_every_flag_is_in_a_test():
    names = {f.name for f in fields(impala.Args)}
    assert names - SHARED_FLAGS <= set(FLAGS) | ELSEWHERE <= names


@pytest.mark.slow
@pytest.mark.parametrize("flag", [*FLAGS, "none"])
def test_every_flag_changes_something(flag, tmp_path):
    flags = TINY | {"total_timesteps": 250, "run_dir": str(tmp_path)} | NEEDS.get(flag, {})
    change = {} if flag == "none" else {flag: FLAGS[flag]}
    assert_flag_matters(impala, flags, change, whole=flag in HOST)


@pytest.mark.slow
@pytest.mark.parametrize("core", ["none", "gru"])
def test_the_form_for_accelerators_trains_too(train, monkeypatch, core):
    """What runs on a GPU, run on a CPU: plain Flax in bfloat16, one device."""
    monkeypatch.setattr(devices, "on_cpu", lambda: False)
    lines = read_metrics(train(core=core, eval_episodes=1, total_timesteps=100).path)
    assert "losses/loss" in lines[-2]
    assert "eval/test_levels/mean_return" in lines[-1]


def test_two_thousand_frames(tmp_path):
    """As a user types it: W&B, evaluation, video, SIGTERM, --resume, then evaluate.py."""
    more = {
        "env_id": "starpilot", "num_levels": 3, "total_timesteps": 2_000, "eval_every": 1_200, "eval_episodes": 4,
        "capture_video": True, "checkpoint_every": 400, "keep_checkpoints": 2, "restart_every": 130,
        "wandb_mode": "offline", "wandb_project": "test",
    }  # fmt: skip
    run_dir = stop_and_go_on(impala, TINY | STATEFUL | more, tmp_path)
    assert re.fullmatch(r"starpilot__impala_procgen__1__\d+", run_dir.name)
    lines = read_metrics(run_dir, clocks=True)
    assert lines[-1]["global_step"] >= 2_000
    names = {"charts/episodic_return", "charts/episodic_length", "charts/SPS", "charts/policy_lag", "time/update"}
    names |= {"charts/queue_size", "losses/policy_loss", "losses/value_loss", "losses/entropy", "losses/approx_kl"}
    names |= {"losses/explained_variance", "time/waiting", "time/transfer", "time/actor_inference", "time"}
    names |= {f"eval/{x}_levels/{y}" for x in ("train", "test") for y in ("mean_return", "normalized", "min", "max")}
    assert names <= set(lines[-2]) | set(lines[-1])
    assert all(np.isfinite(list(line.values())).all() for line in lines)
    assert len(list((run_dir / "checkpoints").iterdir())) == 2
    # W&B has what came before the stop and after it, both of one run of its own.
    ids = [path.name.split("-", 3)[3] for path in (run_dir / "wandb").glob("offline-run-*")]
    assert ids == [json.loads((run_dir / "args.json").read_text())["wandb_id"]] * 2
    assert ids[0].startswith(f"{run_dir.name}-")
    assert len(list((run_dir / "videos").glob("*.mp4"))) == 2
    runs.cli(evaluate.Args, evaluate.main, [str(run_dir), "--episodes", "4", "--levels", "train"])
    assert json.loads((run_dir / "eval.json").read_text())["train_levels"]["episodes"] == 4


BAD = {
    "actors": (["--num-actors", 3], "--num-actors 3", "16"),
    "minibatches": (["--num-minibatches", 3], "--num-minibatches 3", "16"),
    "replayed minibatches": (["--replay-fraction", 0.2, "--num-minibatches", 3], "--num-minibatches 3", "20"),
    "replay fraction": (["--replay-fraction", 0.02], "--replay-fraction 0.02", "0.059 for one unroll"),
    "replay of all": (["--replay-fraction", 1], "--replay-fraction 1", "from 0 to 0.95"),
    "replay size": (["--replay-fraction", 0.5, "--replay-size", 8], "--replay-size 8", "from 16"),
    "replay size of nothing": (["--replay-size", 64], "--replay-size 64", "without --replay-fraction"),
    "lag": (["--max-lag", -1], "--max-lag -1", "from 0 to 64"),
    "lambda": (["--vtrace-lambda", 1.5], "--vtrace-lambda 1.5", "from 0 to 1"),
    "rho": (["--rho-bar", "nan"], "--rho-bar nan", "above 0"),
    "network": (["--encoder", "xresnet:[32,3]"], "--encoder xresnet:[32,3]", "stride 1 or 2"),
    "augmentation": (["--augment", "rotat"], "--augment rotat", "did you mean rotate?"),
    "schedule": (["--learning-rate", "0:1e-4,oops"], "--learning-rate '0:1e-4,oops'", "step:value"),
    "batch too large": (["--num-envs", 65536, "--num-steps", 1024], "--num-envs 65536", "at most 16777216"),
    "no evaluation to film": (["--capture-video", "--eval-episodes", 0], "--capture-video", "--eval-episodes 1"),
    "batch with its replay": (
        ["--num-envs", 512, "--num-steps", 65536, "--replay-fraction", 0.5],
        "--num-envs 512",
        "at most",
    ),
    "not a run": (["--resume", "/nowhere"], "--resume /nowhere", "run directory"),
    "other script": (["--resume", "other"], "--resume other", "ppo_procgen.py"),
    "devices for nobody": (["--actor-devices", 3], "--actor-devices 3", "at most --num-actors, 2"),
    "other actors": (["--num-actors", 1], "--num-actors 1", "keeps its own, --num-actors 2"),
    "other frames": (["--frame-stack", 8], "--frame-stack 8", "keeps its own, --frame-stack 4"),
    "other games": (["--num-envs", 8], "--num-envs 8", "keeps its own, --num-envs 4"),
    "core": (["--core", "lstm"], "does not fit", "--core lstm here, none there"),
    "no buffer to go on with": (["--replay-fraction", 0.5], "bigfish__impala_procgen__1", "does not fit"),
}


OF_A_RUN = ("other actors", "other frames", "other games", "core", "no buffer to go on with")


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_sentence(case, tmp_path, plain, monkeypatch, capfd):
    words, names, valid = BAD[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "args.json").write_text('{"script": "ppo_procgen", "args": {}}')
    words = ["--resume", plain, *words] if case in OF_A_RUN else words
    assert_one_sentence(impala, words, names, valid, monkeypatch, capfd)
