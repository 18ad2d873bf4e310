"""Whole runs of IMPALA on the real game: lock-step, resume, failures, signals, bad input."""

import json
import os
import re
import signal
import threading
import time
from dataclasses import fields

import numpy as np
import pytest
import tyro
from conftest import (
    ENCODER_FLAGS,
    assert_flag_matters,
    assert_one_sentence,
    assert_resumes_after_sigterm,
    assert_same_run,
    documented_flags,
    flags_of,
    read_metrics,
    start,
)

import evaluate
import impala_procgen as impala
from common import compute, envs, runs
from common.actors import ActorError, Actors

# Small enough to compile in seconds; the games are real.
TINY = {
    "env_id": "bigfish", "num_envs": 4, "num_steps": 32, "num_minibatches": 2, "num_sgd_iter": 2, "encoder": "nature",
    "pool": "flatten", "width": 1, "hidden": 16, "learning_rate": "0.003", "total_timesteps": 384,
    "eval_episodes": 0, "wandb_mode": "disabled", "deterministic": True,
}  # fmt: skip
# Everything that has a state of its own is on.
STATEFUL = {"normalize_rewards": True, "sticky_actions": 0.25, "checkpoint_every": 200, "core": "lstm",
            "replay_fraction": 0.5, "replay_size": 16, "max_lag": 2}  # fmt: skip


@pytest.fixture
def train(tmp_path):
    """train(**flags) runs the script with TINY settings and returns its run."""
    return lambda **flags: impala.main(impala.Args(**TINY | {"run_dir": str(tmp_path)} | flags))


def actor_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("actor")]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return impala.main(impala.Args(**TINY | STATEFUL | {"run_dir": str(tmp_path_factory.mktemp("whole"))})).path


def test_same_seed_same_metrics_whatever_the_threads_speed(train, uninterrupted, monkeypatch):
    step, rng = envs.Games.step, np.random.default_rng()

    def slow(self, actions):
        time.sleep(rng.random() * 0.02)
        return step(self, actions)

    monkeypatch.setattr(envs.Games, "step", slow)
    assert_same_run(uninterrupted, train(**STATEFUL).path)
    assert not actor_threads()


@pytest.mark.parametrize("stop", [100, 200, 300])
def test_resume_equals_uninterrupted(train, uninterrupted, stop):
    """Stopped before, at and after the checkpoint where the games start anew."""
    half = train(**STATEFUL | {"total_timesteps": stop})
    resumed = train(**STATEFUL | {"resume": str(half.path)})
    assert resumed.path == half.path
    assert_same_run(uninterrupted, resumed.path)


def test_evaluation_does_not_disturb_training(train, uninterrupted):
    evaluated = read_metrics(train(**STATEFUL, eval_every=100, eval_episodes=2).path)
    assert sum("eval/test_levels/mean_return" in line for line in evaluated) > 1
    assert [x for x in evaluated if "losses/loss" in x] == read_metrics(uninterrupted)


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_lag_of_lock_step(train, max_lag):
    lags = [line["charts/policy_lag"] for line in read_metrics(train(max_lag=max_lag).path)]
    assert lags == [min(max_lag, i) for i in range(len(lags))]


def fail_after(monkeypatch, steps):
    """Makes the games of one actor raise."""
    step, played = envs.Games.step, {}

    def failing(self, actions):
        played[id(self)] = played.get(id(self), 0) + 1
        if played[id(self)] > steps and threading.current_thread().name == "actor 1":
            raise ZeroDivisionError("the game broke")
        return step(self, actions)

    monkeypatch.setattr(envs.Games, "step", failing)


def test_a_failing_actor_stops_the_run_with_a_checkpoint(train, uninterrupted, tmp_path, monkeypatch, capfd):
    fail_after(monkeypatch, 80)
    with pytest.raises(ActorError, match="actor 1") as error:
        train(**STATEFUL)
    assert "the game broke" in str(error.value.__cause__)
    assert "--resume" in capfd.readouterr().err
    assert not actor_threads()
    monkeypatch.undo()
    (run_dir,) = tmp_path.iterdir()
    assert_same_run(uninterrupted, train(**STATEFUL, resume=str(run_dir)).path)


def test_a_failing_actor_shows_its_traceback(tmp_path):
    code = (
        "import sys; sys.path.insert(0, '.'); import impala_procgen as impala; from common import envs, runs\n"
        "def step(self, actions): raise ZeroDivisionError('the game broke')\n"
        "envs.Games.step = step\n"
        "runs.cli(impala.Args, impala.main)"
    )
    process = start("-c", code, *flags_of(TINY | {"run_dir": tmp_path}))
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 1
    assert "in step" in output
    assert "ZeroDivisionError: the game broke" in output
    assert "ActorError: actor" in output


def test_a_slow_game_starves_the_learner_and_it_shows(train, monkeypatch):
    step = envs.Games.step

    def slow(self, actions):
        time.sleep(0.05)
        return step(self, actions)

    monkeypatch.setattr(envs.Games, "step", slow)
    last = read_metrics(train(deterministic=False, total_timesteps=500).path, clocks=True)[-1]
    assert last["charts/queue_size"] == 0
    assert last["time/waiting"] > 0.5
    assert last["time/actor_game"] > 0.5


def wait_for_full_queues(monkeypatch, then=lambda updates: None):
    """Makes the learner so slow that the actors, max_lag = 2, have filled their queues before each update ends."""
    update, made, done = impala.update, [], []

    def slow(*args):
        end = time.monotonic() + 60
        while made[0].queue_size < 2 and time.monotonic() < end:
            time.sleep(0.01)
        done.append(1)
        then(len(done))
        return update(*args)

    monkeypatch.setattr(impala, "Actors", lambda *args: made.append(Actors(*args)) or made[0])
    monkeypatch.setattr(impala, "update", slow)


def test_a_slow_learner_holds_the_actors_back(train, monkeypatch):
    wait_for_full_queues(monkeypatch)
    lines = read_metrics(train(deterministic=False, max_lag=2, total_timesteps=600).path, clocks=True)[1:]
    assert len(lines) > 2
    assert all(line["charts/queue_size"] == 2 for line in lines)
    assert lines[-1]["charts/policy_lag"] == 2


def test_sigterm_with_full_queues(train, uninterrupted, monkeypatch):
    flags = STATEFUL | {"checkpoint_every": 10_000, "total_timesteps": 1000}
    whole = train(**flags)
    wait_for_full_queues(monkeypatch, lambda done: done == 4 and os.kill(os.getpid(), signal.SIGTERM))
    stopped = train(**flags)
    assert stopped.stop == "SIGTERM"
    assert read_metrics(stopped.path, clocks=True)[-1]["charts/queue_size"] == 2
    assert not actor_threads()
    monkeypatch.undo()
    assert_same_run(whole.path, train(**flags, resume=str(stopped.path)).path)


def test_an_actor_that_fails_after_the_last_batch_is_reported(train, monkeypatch):
    fail_after(monkeypatch, 96)  # its fourth unroll, which no update of the three takes
    wait_for_failure = impala.update

    def slow(*args):
        time.sleep(1)
        return wait_for_failure(*args)

    monkeypatch.setattr(impala, "update", slow)
    with pytest.raises(ActorError, match="actor 1"):
        train(total_timesteps=360)


def test_divergence_stops_and_keeps_the_last_good_checkpoint(train, tmp_path):
    with pytest.raises(runs.DivergedError, match=r"losses/\w+ is not finite at step \d+.*is kept"):
        train(checkpoint_every=100, learning_rate="0:0.001,200:0.001,201:1e35", total_timesteps=10_000)
    assert not actor_threads()


# What each flag is changed to, and what must differ then: the metrics.
FLAGS = {
    "env_id": "coinrun", "distribution_mode": "hard", "num_levels": 1, "start_level": 5, "sticky_actions": 0.5,
    "frame_stack": 2, "gap_stack": False, "reward_shaping": True, "reward_clip": 0.5, "normalize_rewards": True,
    "encoder": "impala", "width": 2, "pool": "avg", "hidden": 8, "dtype": "bfloat16", "core": "lstm",
    "total_timesteps": 100, "num_actors": 1, "num_envs": 8, "num_steps": 16, "max_lag": 0, "num_sgd_iter": 1,
    "num_minibatches": 4, "replay_fraction": 0.5, "replay_size": 4, "learning_rate": "0:0.003,1000:0.001",
    "gamma": "0.5", "rho_bar": 0.5, "c_bar": 0.5, "pg_rho_bar": 0.5, "vtrace_lambda": 0.5, "vf_coef": 0.1,
    "ent_coef": "0.1", "max_grad_norm": 0.01, "optimizer": "rmsprop", "optimizer_eps": 0.1, "l2": 0.1, "seed": 2,
    "dropout": 0.5, "augment": "translate", "augment_prob": 1.0, "augment_mode": "drac", "drac_coef": 0.5,
    "checkpoint_every": 100, "eval_every": 100, "eval_episodes": 1,
}  # fmt: skip
# Tested elsewhere: these change files, or let the clock in.
ELSEWHERE = {
    "run_dir", "resume", "keep_checkpoints", "capture_video", "wandb_mode", "wandb_project", "wandb_entity",
    "deterministic", *ENCODER_FLAGS,
}  # fmt: skip
# These need others, and these are for the host.
NEEDS = {
    "start_level": {"num_levels": 1}, "eval_every": {"eval_episodes": 1}, "replay_size": {"replay_fraction": 0.5},
    "augment_prob": {"augment": "translate"}, "augment_mode": {"augment": "translate"},
    "drac_coef": {"augment": "translate", "augment_mode": "drac"},
}  # fmt: skip
HOST = {"total_timesteps", "max_lag", "checkpoint_every", "eval_every", "eval_episodes"}


def test_every_flag_is_in_a_test():
    assert {f.name for f in fields(impala.Args)} == set(FLAGS) | ELSEWHERE


@pytest.mark.parametrize("flag", [*FLAGS, "none"])
def test_every_flag_changes_something(flag, tmp_path):
    flags = TINY | {"total_timesteps": 250, "run_dir": str(tmp_path)} | NEEDS.get(flag, {})
    change = {} if flag == "none" else {flag: FLAGS[flag]}
    assert_flag_matters(impala, flags, change, whole=flag in HOST)


@pytest.mark.parametrize("core", ["none", "gru"])
def test_the_form_for_accelerators_trains_too(train, monkeypatch, core):
    """What runs on a GPU, run on a CPU: plain Flax in bfloat16, one device."""
    monkeypatch.setattr(compute, "on_cpu", lambda: False)
    lines = read_metrics(train(core=core, eval_episodes=1).path)
    assert "losses/loss" in lines[-2]
    assert "eval/test_levels/mean_return" in lines[-1]


def test_sigterm_writes_a_checkpoint_and_resumes_exactly(tmp_path):
    assert_resumes_after_sigterm(impala, TINY | STATEFUL | {"total_timesteps": 3000}, tmp_path)


def test_sigterm_while_the_learner_waits(train, monkeypatch):
    """A game hangs: the run still ends, within a step of it."""
    step = envs.Games.step

    def hanging(self, actions):
        if self.steps == 70 and threading.current_thread().name == "actor 1":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        return step(self, actions)

    monkeypatch.setattr(envs.Games, "step", hanging)
    run = train()
    assert run.stop == "SIGTERM"
    assert not actor_threads()
    assert runs.load_checkpoint(run.path)[0] == read_metrics(run.path)[-1]["global_step"]


def test_ten_thousand_frames(tmp_path):
    """The command line as a user types it, threads free to run: W&B, evaluation, video, then evaluate.py."""
    command = flags_of(
        {"env_id": "starpilot", "gap_stack": True, "width": 1, "num_levels": 3, "num_envs": 16, "num_steps": 64,
         "num_minibatches": 4, "num_sgd_iter": 1, "learning_rate": "5e-4", "total_timesteps": 10_000, "core": "lstm",
         "eval_every": 6_000, "eval_episodes": 4, "capture_video": True, "checkpoint_every": 3_000,
         "keep_checkpoints": 2, "run_dir": tmp_path, "wandb_mode": "offline", "wandb_project": "test"}
    )  # fmt: skip
    process = start("impala_procgen.py", *command)
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    (run_dir,) = tmp_path.iterdir()
    assert re.fullmatch(r"starpilot__impala_procgen__1__\d+", run_dir.name)
    lines = read_metrics(run_dir, clocks=True)
    assert lines[-1]["global_step"] >= 10_000
    names = {"charts/episodic_return", "charts/episodic_length", "charts/SPS", "charts/policy_lag", "time/update"}
    names |= {"charts/queue_size", "losses/policy_loss", "losses/value_loss", "losses/entropy", "losses/approx_kl"}
    names |= {"losses/explained_variance", "time/waiting", "time/transfer", "time/actor_inference", "time"}
    names |= {f"eval/{x}_levels/{y}" for x in ("train", "test") for y in ("mean_return", "normalized", "min", "max")}
    assert names <= set(lines[-2]) | set(lines[-1])
    assert all(np.isfinite(list(line.values())).all() for line in lines)
    assert all(line.get("charts/policy_lag", 0) <= 1 for line in lines)
    assert len(list((run_dir / "checkpoints").iterdir())) == 2
    assert len(list((run_dir / "wandb").glob("offline-run-*"))) == 1
    assert len(list((run_dir / "videos").glob("*.mp4"))) == 2
    runs.cli(evaluate.Args, evaluate.main, [str(run_dir), "--episodes", "3", "--levels", "train"])
    assert json.loads((run_dir / "eval.json").read_text())["train_levels"]["episodes"] == 3


BAD = {
    "unknown game": (["--env-id", "bigfsh"], "--env-id bigfsh", "did you mean bigfish?"),
    "actors": (["--num-actors", 3], "--num-actors 3", "16"),
    "minibatches": (["--num-minibatches", 3], "--num-minibatches 3", "16"),
    "replayed minibatches": (["--replay-fraction", 0.2, "--num-minibatches", 3], "--num-minibatches 3", "20"),
    "replay fraction": (["--replay-fraction", 0.02], "--replay-fraction 0.02", "at least 0.059"),
    "replay of all": (["--replay-fraction", 1], "--replay-fraction 1", "from 0 to 0.95"),
    "replay size": (["--replay-fraction", 0.5, "--replay-size", 8], "--replay-size 8", "from 16"),
    "lag": (["--max-lag", -1], "--max-lag -1", "from 0 to 64"),
    "lambda": (["--vtrace-lambda", 1.5], "--vtrace-lambda 1.5", "from 0 to 1"),
    "rho": (["--rho-bar", "nan"], "--rho-bar nan", "0 or more"),
    "network": (["--encoder", "xresnet:[32,3]"], "--encoder xresnet:[32,3]", "stride 1 or 2"),
    "augmentation": (["--augment", "rotat"], "--augment rotat", "did you mean rotate?"),
    "schedule": (["--learning-rate", "0:1e-4,oops"], "--learning-rate '0:1e-4,oops'", "step:value"),
    "batch too large": (["--num-envs", 65536, "--num-steps", 1024], "--num-envs 65536", "at most 16777216"),
    "no evaluation to film": (["--capture-video", "--eval-episodes", 0], "--capture-video", "--eval-episodes 1"),
    "not a run": (["--resume", "/nowhere"], "--resume /nowhere", "run directory"),
    "other script": (None, "--resume", "ppo_procgen.py"),
    "other actors": (None, "--num-actors 1", "keeps its own, 2"),
    "shapes": (None, "does not fit", "(4, 3, 64, 64, 3) here"),
    "core": (None, "bigfish__impala_procgen__1", "does not fit"),
    "no buffer to go on with": (None, "bigfish__impala_procgen__1", "does not fit"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return impala.main(impala.Args(**TINY | {"run_dir": str(tmp_path_factory.mktemp("d")), "total_timesteps": 1})).path


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_sentence(case, tmp_path, finished, monkeypatch, capfd):
    words, names, valid = BAD[case]
    more = {"other actors": ["--num-actors", 1], "shapes": ["--num-envs", 8], "core": ["--core", "lstm"],
            "no buffer to go on with": ["--replay-fraction", 0.5]}  # fmt: skip
    if case == "other script":
        (tmp_path / "args.json").write_text('{"script": "ppo_procgen", "args": {}}')
        words = ["--resume", tmp_path]
    elif words is None:
        words = ["--resume", finished, *more[case]]
    assert_one_sentence(impala, words, names, valid, monkeypatch, capfd)


def test_commands_in_the_readme_are_valid():
    flags = list(documented_flags("impala_procgen.py"))
    assert len(flags) >= 4
    for words in flags:
        impala.check_args(tyro.cli(impala.Args, args=words))
