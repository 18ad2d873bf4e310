"""Whole runs on the real game: same seed, resume, signals, kill -9, bad input."""

import dataclasses
import importlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import fields, replace

import av
import numpy as np
import pytest
import tyro
import wandb
from conftest import (
    ENCODER_FLAGS,
    ROOT,
    TINY,
    assert_flag_matters,
    assert_one_sentence,
    assert_same_run,
    cut_back,
    documented_flags,
    flags_of,
    parameters,
    read_metrics,
    start,
    tensorboard_events,
    wait_for,
)
from PIL import Image

import evaluate
import ppo_procgen as ppo
from common import checkpoints, devices, envs, films, runs

pytestmark = pytest.mark.optimised

# Everything that has a state of its own is on.
STATEFUL = {"normalize_rewards": True, "sticky_actions": 0.25, "checkpoint_every": 100, "kl_target": 1e-4,
            "core": "gru", "rnd_coef": 0.5, "rnd_normalize": True, "augment": "translate", "dropout": 0.1,
            "num_steps": 16, "restart_every": 30, "total_timesteps": 192}  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A run with a checkpoint after each of its updates."""
    folder = {"run_dir": str(tmp_path_factory.mktemp("whole")), "checkpoint_every": 1, "keep_checkpoints": 9}
    return ppo.main(ppo.Args(**TINY | STATEFUL | folder)).path


def test_same_seed_same_metrics_wherever_checkpoints_fall(train, uninterrupted):
    assert_same_run(uninterrupted, train(**STATEFUL).path)


@pytest.mark.parametrize("updates", [1, 2, 3])
def test_resume_equals_uninterrupted(train, uninterrupted, updates, tmp_path):
    """From the checkpoint before the update after which the games start anew, at it, and after it."""
    path = cut_back(uninterrupted, updates, tmp_path)
    saved = checkpoints.load(path)[1]
    assert saved["state"]["updates"] == updates
    if updates == 2:
        first, second = np.split(saved["hosts"]["0"]["games"]["actions"], 2)
        assert (first != second).mean() > 0.5  # each rollout draws its own
    resumed = train(**STATEFUL | {"resume": str(path)})
    assert resumed.path == path
    assert_same_run(uninterrupted, path)


def test_an_evaluation_that_came_after_its_checkpoint_is_kept(tmp_path):
    """A signal in a run's last evaluation: it is made when the run is resumed, and a longer run has it too."""
    args = ppo.Args(**TINY | {"run_dir": str(tmp_path), "total_timesteps": 100, "num_devices": 1})

    def load(run_dir):
        return runs.load(lambda: {"state": np.zeros(2)}, run_dir)

    with runs.Run(args, ppo.SCRIPT) as run:
        run.log(100, {"losses/loss": 1})
        run.save(100, {"state": np.zeros(2)}, {})
    again = replace(args, resume=str(run.path))
    with runs.Run(again, ppo.SCRIPT, load) as resumed:
        assert resumed.evaluation_due(100)
        resumed._seconds += 50  # that the evaluation took
        resumed.log_evaluation(100, {"eval/test_levels/mean_return": 7.5})
        resumed.save(100, {"state": np.zeros(2)}, {})
    with runs.Run(replace(again, total_timesteps=200), ppo.SCRIPT, load) as longer:
        assert not longer.evaluation_due(100)
        longer.log(200, {"losses/loss": 2})
    lines = [sorted(set(line) - {"time", "seconds", "global_step"}) for line in read_metrics(run.path)]
    assert lines == [["losses/loss"], ["eval/test_levels/mean_return"], ["losses/loss"]]
    assert [line["seconds"] >= 50 for line in read_metrics(run.path, clocks=True)] == [False, True, True]


@pytest.mark.slow
def test_the_last_evaluation_is_kept_where_a_checkpoint_was_due_too(train):
    half = train(total_timesteps=128, checkpoint_every=64, eval_every=0, eval_episodes=2)
    assert "eval/test_levels/mean_return" in read_metrics(half.path)[-1]
    longer = train(resume=str(half.path), total_timesteps=192, eval_episodes=0)
    assert len([line for line in read_metrics(longer.path) if "eval/test_levels/mean_return" in line]) == 1


def test_a_run_that_dies_in_its_last_evaluation_has_all_that_it_learnt(train, monkeypatch, tmp_path):
    """There is a checkpoint of its end before, and a resume has only to evaluate."""
    whole = train(eval_episodes=4)

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(envs, "evaluate", killed)
        with pytest.raises(KeyboardInterrupt):
            train(eval_episodes=4, run_dir=str(tmp_path / "killed"))
    (dead,) = (tmp_path / "killed").iterdir()
    again = train(resume=str(dead), eval_episodes=4)
    assert_same_run(whole.path, again.path)
    assert any("eval/test_levels/mean_return" in line for line in read_metrics(again.path))


def test_an_error_closes_the_games(train, monkeypatch):
    closed = []
    monkeypatch.setattr(ppo.envs.Games, "close", lambda self: closed.append(self))
    monkeypatch.setattr(ppo, "collect", lambda *given, **how: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train()
    assert len(closed) == 1


def test_an_evaluation_disturbs_nothing_and_a_signal_ends_it(train, uninterrupted, monkeypatch):
    """Then it is given up, and made after the resume."""
    flags = STATEFUL | {"eval_every": 100, "eval_episodes": 2}
    whole = train(**flags)
    evaluated = read_metrics(whole.path)
    assert sum("eval/test_levels/mean_return" in line for line in evaluated) > 1
    assert [x for x in evaluated if "losses/loss" in x] == read_metrics(uninterrupted)
    play = envs.play_episodes

    def interrupted(*args, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return play(*args, **options)

    monkeypatch.setattr(envs, "play_episodes", interrupted)
    stopped = train(**flags)
    monkeypatch.undo()
    assert stopped.stop == "SIGTERM"
    assert len(read_metrics(stopped.path)) == 2
    assert_same_run(whole.path, train(**flags, resume=str(stopped.path)).path)


# What each flag is changed to: then something must differ.
FLAGS = {
    "env_id": "coinrun", "distribution_mode": "hard", "num_levels": 1, "start_level": 5, "sticky_actions": 0.5,
    "frame_stack": 2, "gap_stack": False, "reward_shaping": True, "reward_clip": 0.5, "normalize_rewards": True,
    "normalize_gamma": 0.5, "use_backgrounds": False, "restrict_themes": True,
    "encoder": "impala", "width": 2, "pool": "avg", "hidden": 8, "dtype": "bfloat16", "total_timesteps": 100,
    "num_envs": 8, "num_steps": 16, "num_minibatches": 4, "update_epochs": 1, "learning_rate": "0:0.003,1000:0.001",
    "num_devices": 1, "gamma": "0.5", "gae_lambda": 0.5, "clip_coef": 0.01, "kl_coef": 0.0, "kl_target": 1e-6,
    "vf_coef": 0.1, "vf_clip": 0.01, "ent_coef": "0.1", "max_grad_norm": 0.01, "adam_eps": 0.1, "l2": 0.1, "seed": 2,
    "dropout": 0.5, "core": "gru", "augment": "translate", "augment_prob": 1.0, "augment_mode": "drac",
    "drac_coef": 0.5, "rnd_coef": 1, "rnd_normalize": True, "restart_every": 32, "eval_every": 100, "eval_episodes": 1,
}  # fmt: skip
# Tested elsewhere: these change files, not metrics.
ELSEWHERE = {
    "run_dir", "resume", "checkpoint_every", "keep_checkpoints", "capture_video", "wandb_mode", "track",
    "wandb_project", "wandb_entity", "distributed", *ENCODER_FLAGS,
}  # fmt: skip
# These need others, and these are for the host.
NEEDS = {
    "start_level": {"num_levels": 1}, "eval_every": {"eval_episodes": 1}, "augment_prob": {"augment": "translate"},
    "augment_mode": {"augment": "translate"}, "drac_coef": {"augment": "translate", "augment_mode": "drac"},
    "rnd_normalize": {"rnd_coef": 1}, "normalize_gamma": {"normalize_rewards": True},
}  # fmt: skip
HOST = {"total_timesteps", "restart_every", "eval_every", "eval_episodes"}


def test_every_flag_is_in_a_test():
    assert {f.name for f in fields(ppo.Args)} == set(FLAGS) | ELSEWHERE
    assert {*ENCODER_FLAGS, "encoder", "width", "pool"} <= set(runs.fixed(ppo.Args))


@pytest.mark.slow
@pytest.mark.parametrize("flag", [*FLAGS, "none"])
def test_every_flag_changes_something(flag, tmp_path):
    flags = TINY | {"total_timesteps": 250, "run_dir": str(tmp_path)} | NEEDS.get(flag, {})
    change = {} if flag == "none" else {flag: FLAGS[flag]}
    assert_flag_matters(ppo, flags, change, whole=flag in HOST)


def test_the_form_for_accelerators_trains_too(train, monkeypatch):
    """What runs on a GPU, run on a CPU: plain Flax in bfloat16, one device."""
    monkeypatch.setattr(devices, "on_cpu", lambda: False)
    lines = read_metrics(train(width=2, eval_episodes=1, total_timesteps=100).path)
    assert "losses/loss" in lines[-2]
    assert "eval/test_levels/mean_return" in lines[-1]


# As many checkpoints and restarts as there can be; what else has a state is in the resumes above.
LONG = {"checkpoint_every": 100, "restart_every": 60, "total_timesteps": 1250}


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    return ppo.main(ppo.Args(**TINY | LONG | {"run_dir": str(tmp_path_factory.mktemp("long"))})).path


def interrupt(tmp_path, number, after):
    """Starts LONG, sends a signal once `after` checkpoints are there; returns the run directory, exit code, output."""
    process = start("ppo_procgen.py", *flags_of(TINY | LONG | {"run_dir": str(tmp_path)}))
    wait_for(lambda: len(list(tmp_path.glob("*/checkpoints/[0-9]*/commit_success.txt"))) >= after, process)
    process.send_signal(number)
    output = process.communicate()[0]
    return next(tmp_path.iterdir()), process.returncode, output


@pytest.mark.slow
def test_sigterm_writes_a_checkpoint_and_resumes_exactly(tmp_path, long_run):
    run_dir, code, output = interrupt(tmp_path, signal.SIGTERM, after=1)
    assert code == 0, output
    assert f"python ppo_procgen.py --resume {run_dir}" in output
    step = checkpoints.load(run_dir)[0]
    assert step == read_metrics(run_dir)[-1]["global_step"] < LONG["total_timesteps"]
    resumed = start("ppo_procgen.py", "--resume", run_dir)
    assert resumed.wait(120) == 0, resumed.communicate()[0]
    assert_same_run(long_run, run_dir)


def test_kill_9_leaves_the_last_checkpoint_usable(tmp_path, long_run):
    run_dir, code, _ = interrupt(tmp_path, signal.SIGKILL, after=2)
    assert code == -signal.SIGKILL
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"global_step": 99999, "ti')  # a line that was being written
    (run_dir / "checkpoints" / "1249.orbax-checkpoint-tmp").mkdir()  # and a checkpoint
    assert parameters(run_dir)
    ppo.main(ppo.Args(**TINY | LONG | {"resume": str(run_dir)}))
    assert_same_run(long_run, run_dir)


def test_four_thousand_frames(tmp_path, monkeypatch, capfd):
    """The command line as a user types it: W&B, evaluation, video, then evaluate.py."""
    command = flags_of(
        {"env_id": "starpilot", "gap_stack": True, "channels": "4,4,4", "blocks": 1, "num_levels": 3, "num_envs": 16,
         "num_steps": 64, "num_minibatches": 4, "update_epochs": 1, "learning_rate": "5e-4", "total_timesteps": 4_000,
         "eval_every": 2_500, "eval_episodes": 4, "capture_video": True, "checkpoint_every": 1_200,
         "keep_checkpoints": 2, "run_dir": tmp_path, "wandb_mode": "offline", "wandb_project": "test"}
    )  # fmt: skip
    given, init = {}, wandb.init
    monkeypatch.setattr(wandb, "init", lambda **options: given.update(options) or init(**options))
    runs.cli(ppo.Args, ppo.main, command)
    (run_dir,) = tmp_path.iterdir()
    assert f"wandb sync {run_dir}/wandb/offline-run-*" in "".join(capfd.readouterr()).replace("\n", "")
    assert given["config"]["learning_rate"] == 5e-4  # text would be no axis
    assert (given["config"]["exp_name"], given["config"]["channels"]) == ("ppo_procgen", "4,4,4")
    assert re.fullmatch(r"starpilot__ppo_procgen__1__\d+", run_dir.name)
    lines = read_metrics(run_dir, clocks=True)
    assert lines[-1]["global_step"] >= 4_000
    assert [x["global_step"] for x in lines] == sorted(x["global_step"] for x in lines)
    names = {"charts/episodic_return", "charts/episodic_length", "charts/SPS", "losses/policy_loss", "time/update"}
    names |= {"losses/value_loss", "losses/entropy", "losses/approx_kl", "losses/clipfrac", "time"}
    names |= {f"eval/{x}_levels/{y}" for x in ("train", "test") for y in ("mean_return", "normalized", "min", "max")}
    assert names <= set(lines[-2]) | set(lines[-1])
    assert all(np.isfinite(list(line.values())).all() for line in lines)
    # The bound is wide, since what is left depends on the machine: exact shares are the next test's.
    assert 0.5 < sum(lines[1][f"time/{x}"] for x in ("game", "inference", "update")) < 1.01
    assert len(list((run_dir / "checkpoints").iterdir())) == 2
    assert len(list((run_dir / "wandb").glob("offline-run-*"))) == 1
    assert len(list((run_dir / "videos").glob("*.mp4"))) == 2

    before = json.loads((run_dir / "eval.json").read_text())
    assert set(before["train_levels"]["returns_by_level"]) <= {"0", "1", "2"}
    for film in (run_dir / "videos").glob("*.mp4"):
        with av.open(str(film)) as container:
            assert sum(1 for _ in container.decode(video=0)) > 1
    runs.cli(evaluate.Args, evaluate.main, [str(run_dir), "--episodes", "4", "--levels", "train", "--video", "--human"])
    after = json.loads((run_dir / "eval.json").read_text())
    assert after["train_levels"]["episodes"] == 4
    by_level = after["train_levels"]["returns_by_level"]
    assert set(by_level) <= {"0", "1", "2"}
    assert after["train_levels"]["seed"] == 0
    runs.cli(evaluate.Args, evaluate.main, [str(run_dir), "--episodes", "2", "--levels", "train"])
    assert json.loads((run_dir / "eval.json").read_text()) == after  # of fewer episodes: it stays
    returns = np.concatenate(list(by_level.values()))
    assert (len(returns), returns.mean()) == (4, pytest.approx(after["train_levels"]["mean_return"]))
    assert after["test_levels"] == before["test_levels"]
    assert all(int(level) >= 3 for level in before["test_levels"]["returns_by_level"])  # none that it has trained on
    video = run_dir / "videos" / f"train_levels_{after['global_step']}.mp4"
    with av.open(str(video)) as container:
        pictures = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert pictures[0].shape == (384, 384, 3)
    assert len(pictures) > 10
    assert np.std(pictures[5]) > 10
    assert np.asarray(Image.open(video.with_suffix(".png"))).shape == (64, 8 * 64, 3)


def test_shares_of_time_by_hand(monkeypatch):
    """Two times of one name add up, what is not timed is in no share, and the next shares begin where these end."""
    clock = iter([10.0, 11.0, 14.0, 15.0, 17.0, 18.0, 19.0, 20.0, 21.0, 22.0, 24.0])
    monkeypatch.setattr(runs.time, "perf_counter", lambda: next(clock))
    watch = runs.Stopwatch()
    for name in ("game", "update", "game"):
        with watch(name):
            pass
    assert watch.fractions() == {"time/game": 0.4, "time/update": 0.2}
    with watch("update"):
        pass
    assert watch.fractions() == {"time/update": 0.25}


def test_a_film_strip_has_each_scenes_first_and_last_moment():
    film = np.arange(6 * 5, dtype=np.uint8).repeat(2 * 2 * 3).reshape(30, 2, 2, 3)
    strip = films.film_strip(film, 6, moments=3)
    assert strip.shape == (6 * 2, 3 * 2, 3)
    np.testing.assert_array_equal(strip[::2, ::2, 0], np.arange(30).reshape(6, 5)[:, [0, 2, 4]])


def test_tensorboard_gets_the_metrics_and_a_resumed_run_goes_on(train):
    """What a resume takes back, it is told to forget."""
    run = train(track="tensorboard", total_timesteps=200)
    saved = read_metrics(run.path)[-1]["global_step"]
    train(track="tensorboard", resume=str(run.path))
    assert not (run.path / "wandb").exists()
    events = list(tensorboard_events(run.path / "tensorboard"))
    written = {(e.step, v.tag): v.simple_value for e in events for v in e.summary.value}
    for line in read_metrics(run.path):
        step = line.pop("global_step")
        for name, value in line.items():
            if name in ("charts/episodic_return", "losses/policy_loss", "losses/entropy"):
                np.testing.assert_allclose(written[step, name], value, rtol=1e-6)
    assert [e.step for e in events if e.session_log.status] == [saved + 1]


def test_wandb_gets_project_entity_and_arguments(train, monkeypatch):
    import wandb

    given = {}
    monkeypatch.setattr(wandb, "init", lambda **options: given.update(options) or 1 / 0)
    with pytest.raises(runs.UsageError, match="--wandb-project games: W&B does not start"):
        train(wandb_mode="offline", wandb_project="games", wandb_entity="us", total_timesteps=1)
    assert (given["project"], given["entity"], given["mode"]) == ("games", "us", "offline")
    assert given["config"]["num_envs"] == TINY["num_envs"]
    assert re.fullmatch(f"{given['name']}-[0-9a-f]{{8}}", given["id"])  # two machines may have a folder of one name
    monkeypatch.setenv("WANDB_RUN_ID", "of the sweep")
    with pytest.raises(runs.UsageError):
        train(wandb_mode="offline", total_timesteps=1)
    assert (given["id"], given["resume"]) == ("of the sweep", "allow")


def test_wandb_has_the_step_as_its_axis_and_a_sweeps_project_is_kept(train, monkeypatch):
    """Its own step may not come twice, and does after a resume: rows would be dropped or moved to later steps."""
    import wandb

    rows, axes = [], []

    class Fake:
        project, entity, offline = "of the sweep", "us", True

        def log(self, row):
            rows.append(row)

        def define_metric(self, *names, **axis):
            axes.append((names, axis))

        def finish(self, exit_code):
            pass

    monkeypatch.setattr(wandb, "init", lambda **options: Fake())
    monkeypatch.setenv("WANDB_SWEEP_ID", "one")
    run = train(wandb_mode="offline", total_timesteps=200)
    assert axes == [(("global_step",), {}), (("*",), {"step_metric": "global_step"})]
    assert [row["global_step"] for row in rows] == [line["global_step"] for line in read_metrics(run.path)]
    saved = json.loads((run.path / "args.json").read_text())["args"]
    assert (saved["wandb_project"], saved["wandb_entity"]) == ("of the sweep", "us")


def test_a_run_survives_the_end_of_wandbs_process(train, monkeypatch, capfd):
    import wandb

    class Dead:
        offline = True

        def log(self, *given, **options):
            raise ConnectionResetError("Connection lost")

        finish = log

        def define_metric(self, *given, **options):
            pass

    monkeypatch.setattr(wandb, "init", lambda **options: Dead())
    run = train(wandb_mode="offline", total_timesteps=200)
    assert checkpoints.steps_in(run.path)
    assert read_metrics(run.path)[-1]["global_step"] >= 200
    assert capfd.readouterr().err.count("W&B has stopped (ConnectionResetError('Connection lost'))") == 1


def test_wandb_online_needs_a_login(train, monkeypatch):
    import wandb

    monkeypatch.setattr(wandb, "login", lambda **options: False)
    with pytest.raises(runs.UsageError, match="--wandb-mode online: not logged in"):
        train(wandb_mode="online")


def test_wandb_need_not_be_installed(train, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    train(total_timesteps=1)
    with pytest.raises(runs.UsageError, match="--wandb-mode auto"):
        train(total_timesteps=1, wandb_mode="auto")


def test_a_device_whose_memory_is_full_is_told_in_one_sentence(monkeypatch, capfd):
    """And by an exit code that sweeps take for a reason to go on."""

    def fill(args):
        try:
            raise ValueError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.\nAnd more.")
        except ValueError as error:
            raise RuntimeError("actor 0 failed") from error

    fill.__module__ = ppo.__name__
    with pytest.raises(SystemExit) as stopped:
        runs.cli(ppo.Args, fill, [])
    assert stopped.value.code == 137
    said = capfd.readouterr().err
    assert said.startswith("error: a device's memory is full (RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.);")
    assert said.count("\n") == 1


def test_a_run_that_goes_on_elsewhere_says_so(tmp_path, monkeypatch, capfd):
    args = ppo.Args(**TINY | {"run_dir": str(tmp_path), "num_devices": 1})
    with runs.Run(args, ppo.SCRIPT) as run:
        run.save(5, {"state": np.zeros(2)}, {})
    monkeypatch.setattr(devices, "on_cpu", lambda: False)

    def load(run_dir):
        return runs.load(lambda: {"state": np.zeros(2)}, run_dir)

    with runs.Run(replace(args, resume=str(run.path), dtype="float32"), ppo.SCRIPT, load):
        pass
    words = (
        "was on a CPU, with 1 devices of 1 hosts and goes on with an accelerator, with 1 devices of 1 hosts: it will"
    )
    assert words in capfd.readouterr().err


def test_divergence_stops_and_keeps_the_last_good_checkpoint(train, tmp_path):
    with pytest.raises(runs.DivergedError, match=r"not finite at step \d+: losses/.*is whole"):
        train(checkpoint_every=100, learning_rate="0:0.001,200:0.001,201:1e35", total_timesteps=10_000, kl_coef=0.0)
    (run_dir,) = tmp_path.iterdir()
    assert all((np.abs(np.float64(x)) < 1e6).all() for x in parameters(run_dir) if x.dtype == np.float32)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return ppo.main(ppo.Args(**TINY | {"run_dir": str(tmp_path_factory.mktemp("done")), "total_timesteps": 1})).path


def bad(tmp_path, finished, case):
    """Command-line words of a bad input, made ready on disk."""
    folder = tmp_path / "run"
    more = {
        "shapes": ["--hidden", 32], "other game": ["--env-id", "coinrun"], "other seed": ["--seed", 9],
        "other network": ["--activation", "gelu"], "other weights": ["--init", "orthogonal"],
        "another folder": ["--run-dir", "b"],
    }  # fmt: skip
    if case == "other script":
        folder.mkdir()
        (folder / "args.json").write_text('{"script": "impala_procgen", "args": {}}')
    elif case == "not even a dict":
        folder.mkdir()
        (folder / "args.json").write_text("[1]")
    elif case == "other version":
        folder.mkdir()
        (folder / "args.json").write_text('{"script": "ppo_procgen", "args": {"num_envs": "many"}}')
    elif case == "truncated" or case in more:
        subprocess.run(["cp", "-r", finished, folder], check=True)
        data = max((f for f in (folder / "checkpoints").rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
        if case == "truncated":
            os.truncate(data, data.stat().st_size // 2)
    elif case == "no checkpoint":
        subprocess.run(["cp", "-r", finished, folder], check=True)
        subprocess.run(["rm", "-r", *(folder / "checkpoints").iterdir()], check=True)
    elif case == "file":
        folder.write_text("not a folder")
    return ["--resume", folder, *more.get(case, [])]


BAD = {
    "batch": (["--num-minibatches", 7], "--num-minibatches 7", "8192"),
    "dropout": (["--dropout", 1], "--dropout 1", "from 0 to 0.99"),
    "penalty": (["--augment", "flip", "--augment-mode", "drac", "--drac-coef", -1], "--drac-coef -1", "0 or more"),
    "bonus": (["--rnd-coef", -1], "--rnd-coef -1", "0 or more"),
    "nothing to augment": (["--augment-mode", "drac"], "--augment-mode drac", "without --augment"),
    "nothing to augment often": (["--augment-prob", 1], "--augment-prob 1", "without --augment"),
    "schedule": (["--learning-rate", "0:1e-4,oops"], "--learning-rate '0:1e-4,oops'", "step:value"),
    "schedule backwards": (["--gamma", "5:0.9,2:0.8"], "--gamma '5:0.9,2:0.8'", "rising"),
    "schedule empty": (["--ent-coef", ""], "--ent-coef ''", "number"),
    "schedule nan": (["--learning-rate", "nan"], "--learning-rate 'nan'", "number"),
    "discount": (["--gamma", "1.5"], "--gamma '1.5'", "from 0 to 1"),
    "network": (["--encoder", "xresnet:[32,3]"], "--encoder xresnet:[32,3]", "stride 1 or 2"),
    "network's flags": (["--encoder", "nature", "--channels", "8"], "--channels 8", "3 numbers"),
    "augmentation": (["--augment", "rotat"], "--augment rotat", "did you mean rotate?"),
    "bonus's flags": (["--rnd-normalize"], "--rnd-normalize", "--rnd-coef"),
    "augmentation's flags": (["--drac-coef", 1, "--augment", "flip"], "--drac-coef 1", "--augment-mode drac"),
    "whole rollouts": (["--core", "lstm", "--num-minibatches", 128], "--num-minibatches 128", "64 (a recurrent core"),
    "negative": (["--vf-clip", -1], "--vf-clip -1", "0 or more"),
    "a target of nothing": (["--kl-coef", 0, "--kl-target", 0.1], "--kl-target 0.1", "without --kl-coef"),
    "nan": (["--clip-coef", "nan"], "--clip-coef nan", "above 0"),
    "zero": (["--num-envs", 0], "--num-envs 0", "1 or more"),
    "seed": (["--seed", 2**31], "--seed", "2147483647"),
    "levels": (["--start-level", 2**31 - 1, "--num-levels", 5], "--start-level", "level"),
    "W&B's flags": (["--track", "tensorboard", "--wandb-project", "x"], "--wandb-project x", "--track tensorboard"),
    "nothing there": (["--resume", "/nowhere"], "--resume /nowhere", "run directory"),
    "not a run": (["--resume", "file"], "run", "run directory"),
    "absurd": (["--num-steps", 10**9], "--num-steps 1000000000", "at most 16777216"),
    "batch too large": (["--num-envs", 65536, "--num-steps", 1024], "--num-envs 65536", "at most 16777216"),
    "no evaluation to film": (["--capture-video", "--eval-episodes", 0], "--capture-video", "--eval-episodes 1"),
    "no evaluation to be due": (
        ["--eval-every", 500, "--eval-episodes", 0],
        "--eval-every 500",
        "--eval-episodes 1 or more",
    ),
    "start of all levels": (["--start-level", 5], "--start-level 5", "--num-levels 1"),
    "other game": (None, "--env-id coinrun", "bigfish"),
    "other seed": (None, "--seed 9", "keeps its own, --seed 1"),
    "other weights": (None, "--init orthogonal", "keeps its own, --init glorot"),
    "other network": (None, "--activation gelu", "keeps its own, --activation relu"),
    "another folder": (None, "--run-dir b", "stays in its folder"),
    "two runs": (["--resume", "a", "--resume=b"], "--resume", "one run directory"),
    "other version": (None, "--resume", "version"),
    "not even a dict": (None, "--resume", "run directory"),
    "other script": (None, "--resume", "impala_procgen.py"),
    "shapes": (None, "run", "32"),
    "truncated": (None, "run", "damaged"),
    "no checkpoint": (None, "run", "no complete checkpoint"),
    "read-only": (["--run-dir", "/proc/runs"], "--run-dir /proc/runs", "cannot write"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_sentence(case, tmp_path, finished, monkeypatch, capfd):
    words, names, valid = BAD[case]
    if words is None or case == "not a run":
        words = bad(tmp_path, finished, "file" if case == "not a run" else case)
    assert_one_sentence(ppo, words, names, valid, monkeypatch, capfd)


def test_commands_in_the_readme_are_valid():
    makefile = re.search(r"TRAIN \?= ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text())[1]
    flags = [*documented_flags("ppo_procgen.py"), makefile.replace("\\\n", "").split()]
    assert len(flags) >= 4
    for words in flags:
        runs.check_args(tyro.cli(ppo.Args, args=words), ppo.SCRIPT)


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("ppo_procgen", ["epochs over each batch", "clip rewards to [-c, c]", "{bigfish,bossfight,"]),
        (
            "apex_procgen",
            ["units of the dense layer of each stream", "number of parallel environments, over all actors"],
        ),
        ("hnppo_doorgym", ["decisions between checkpoints", "number of most recent checkpoints to keep"]),
    ],
)
def test_help_has_own_flags_first_and_inherited_texts(name, texts, capsys):
    """A text is a script's own, if it has one, else its group's."""
    script = importlib.import_module(name)
    with pytest.raises(SystemExit):
        runs.cli(script.Args, script.main, argv=["--help"])
    shown = re.sub(r"[│\s]+", "", capsys.readouterr().out)
    for text in texts:
        assert re.sub(r"\s+", "", text) in shown, text
    own = [runs.flag_of(name) for name in inspect.get_annotations(script.Args) if name != "FIXED"]
    assert max(shown.index(flag) for flag in own) < shown.index("--run-dir")


def test_a_fork_is_told_of_a_name_or_a_default_that_do_not_work(capfd):
    """A name by which its runs would not be found again; a new default without its type, which Python leaves out."""
    for name in ("my-ppo", "myppo"):
        with pytest.raises(runs.UsageError, match=rf"{name}\.py: give it a name .* such as my_ppo\.py"):
            runs.check_args(ppo.Args(), name)

    @dataclasses.dataclass(frozen=True)
    class Forked(ppo.Args):
        num_levels = 200
        gae_lambda: float = 0.95

    with pytest.raises(
        runs.UsageError, match=r"Forked.num_levels: .* without its type: num_levels: NonNegativeInt = 200"
    ):
        runs.check_args(Forked(), "my_ppo")
    del Forked.num_levels
    Forked.vf_clip = 10
    with pytest.raises(runs.UsageError, match=r"Forked.vf_clip: .* without its type: vf_clip: NonNegativeFloat = 10"):
        runs.check_args(Forked(), "my_ppo")
    Forked.learning_rate = 5e-4
    del Forked.vf_clip
    with pytest.raises(
        runs.UsageError, match=r"learning_rate: .* without its type: learning_rate: NonNegativeSchedule = '0.0005'"
    ):
        runs.check_args(Forked(), "my_ppo")

    @dataclasses.dataclass(frozen=True)
    class New(ppo.Args):
        eval_every: int = 50_000
        huber_delta = 1.0

    with pytest.raises(
        runs.UsageError, match=r"New.huber_delta: is no flag.* without its type: huber_delta: float = 1.0"
    ):
        runs.check_args(New(), "my_ppo")
    with pytest.raises(SystemExit):
        runs.cli(New, ppo.main, ["--huber-delta", "3"])
    assert "huber_delta: float = 1.0" in capfd.readouterr().err  # and not that there is no such option
    New.huber_delta = 0.2, 0.3
    with pytest.raises(runs.UsageError, match=r"type: huber_delta: tuple\[float, float\] = \(0.2, 0.3\)"):
        runs.check_args(New(), "my_ppo")
    del New.huber_delta
    runs.check_args(New(eval_episodes=0), "my_ppo")  # a default of its own is not what the user gave


def test_what_a_fork_adds_to_a_batch_has_its_shape():
    """Else samples would be taken from beyond its end, which JAX does not mind."""
    batch = ppo.Batch(*(np.zeros((5, 3)) for _ in range(4)), returns=np.zeros((3, 5)))  # time, games
    with pytest.raises(AssertionError, match="prefix"):
        ppo.optimize(ppo.Args(), None, None, None, batch, weight=np.ones((5, 3)), rates=None, key=None)


def test_what_is_no_number_or_not_finite_is_named(tmp_path):
    run = runs.Run(ppo.Args(**TINY | {"run_dir": str(tmp_path)}), "ppo_procgen")
    run.check_finite(7, {"losses/a": np.float32(1)})
    with pytest.raises(runs.DivergedError, match="step 7: losses/a, losses/c; "):
        run.check_finite(7, {"losses/a": np.float32("nan"), "losses/b": 1.0, "losses/c": np.float32("inf")})
    with pytest.raises(ValueError, match=r"losses/b has shape \[2\]"):
        run.check_finite(7, {"losses/a": 1.0, "losses/b": np.ones(2)})


def test_flags_that_do_not_parse_exit_with_2(capfd):
    for words in (["--num-envs", "many"], ["--pool", "min"], ["--no-such-flag"], ["--env-id", "bigfsh"]):
        with pytest.raises(SystemExit) as stopped:
            runs.cli(ppo.Args, ppo.main, words)
        assert stopped.value.code == 2
    said = capfd.readouterr().err
    for part in ("'bigfsh'", "--env-id", *envs.GAMES):
        assert part in said


def test_a_signal_that_comes_twice_at_once_is_one(tmp_path):
    """As one does that is for all processes of a job; asked again later, the run ends without a checkpoint."""
    run = runs.Run(ppo.Args(**TINY | {"run_dir": str(tmp_path)}), "ppo_procgen")
    for _ in range(2):
        run._on_signal(signal.SIGTERM, None)
    assert run.stop == "SIGTERM"
    run._asked -= 3
    with pytest.raises(KeyboardInterrupt):
        run._on_signal(signal.SIGTERM, None)
    with pytest.raises(SystemExit):
        run.while_replaying("x", 2)(1)


def test_who_is_stopped_before_a_checkpoint_is_not_told_to_resume(tmp_path, capfd):
    with runs.Run(ppo.Args(**TINY | {"run_dir": str(tmp_path / "a:x:b")}), "ppo_procgen") as run:
        run.say(str(run.path))
        run._on_signal(signal.SIGTERM, None)
    said = capfd.readouterr()
    assert "stopped by SIGTERM; there was no checkpoint yet, begin again" in said.out + said.err
    assert "a:x:b" in said.out + said.err  # no emoji
