"""A run, by the example of PPO: evaluations, signals, trackers, films, divergence, forks."""

import contextlib
import dataclasses
import json
import os
import pty
import re
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Annotated
from unittest.mock import Mock

import av
import jax
import numpy as np
import pytest
import wandb
from annotated_types import Interval, Le
from conftest import (
    ROOT,
    TINY,
    assert_same_run,
    flags_of,
    parameters,
    read_metrics,
    run_of,
    tensorboard_events,
    wait_for,
)
from PIL import Image

import evaluate
import ppo_procgen as ppo
from common import checkpoints, devices, envs, films, runs

pytestmark = pytest.mark.optimised


@pytest.fixture
def args(tmp_path):
    return ppo.Args(**TINY | {"run_dir": str(tmp_path), "num_devices": 1})


# EVALUATIONS


def test_an_evaluation_made_after_its_checkpoint_is_kept(args):
    """A signal in a run's last evaluation: it is made when the run is resumed, and a longer run has it too."""
    args = replace(args, total_timesteps=100)
    state = {"state": np.zeros(2)}
    with run_of(ppo, args, **state) as run:
        run.log(100, {"losses/loss": 1})
        run.save(100, state, {})
    again = replace(args, resume=str(run.path))
    with run_of(ppo, again, **state) as resumed:
        assert resumed.evaluation_due(100)
        resumed._seconds += 50  # that the evaluation took
        resumed.log_evaluation(100, {"eval/test_levels/mean_return": 7.5})
        resumed.save(100, state, {})
    with run_of(ppo, replace(again, total_timesteps=200), **state) as longer:
        assert not longer.evaluation_due(100)
        longer.log(200, {"losses/loss": 2})
    lines = [sorted(set(line) - {"time", "seconds", "global_step"}) for line in read_metrics(run.path)]
    assert lines == [["losses/loss"], ["eval/test_levels/mean_return"], ["losses/loss"]]
    assert [line["seconds"] >= 50 for line in read_metrics(run.path, clocks=True)] == [False, True, True]


def test_an_evaluation_made_before_a_checkpoint_is_not_repeated(args):
    args = replace(args, total_timesteps=300, eval_every=100, eval_episodes=1)
    with run_of(ppo, args) as run:
        run.log_evaluation(100, {"eval/test_levels/mean_return": 7.5})
        run.save(150, {"state": np.zeros(())}, {})
    with run_of(ppo, replace(args, resume=str(run.path))) as again:
        assert not again.evaluation_due(199)
        assert again.evaluation_due(200)


@pytest.mark.parametrize("end", ["killed", "SIGTERM"])
def test_a_run_that_ends_in_an_evaluation_makes_it_when_resumed(end, train, monkeypatch, tmp_path):
    """Killed in its last one, it has a checkpoint of its end; at a signal the evaluation is given up."""
    flags = {"eval_episodes": 1, "eval_every": 0 if end == "killed" else 100, "total_timesteps": 130}
    whole, play, calls = train(**flags), envs.play_episodes, []
    evaluated = ["eval/test_levels/mean_return" in line for line in read_metrics(whole.path)]
    assert sum(evaluated) == (1 if end == "killed" else 2)

    def interrupt(*given, **options):
        calls.append(given)
        if end == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            raise KeyboardInterrupt
        return play(*given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(envs, "play_episodes", interrupt)
        try:
            stopped = train(**flags, run_dir=str(tmp_path / "ended"))
            assert (stopped.stop, end, len(calls)) == ("SIGTERM", "SIGTERM", 1)
        except KeyboardInterrupt:
            assert end == "killed"
    (path,) = (tmp_path / "ended").iterdir()
    assert_same_run(whole.path, train(**flags, resume=str(path)).path)


def test_an_error_in_a_run_closes_its_environments(train, monkeypatch):
    closed = []
    monkeypatch.setattr(envs.ReplayableVecEnv, "close", lambda self: closed.append(self))
    monkeypatch.setattr(ppo, "make_collect", lambda *given: lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train()
    assert len(closed) == 1


def test_code_path_of_a_gpu_runs_on_a_cpu(train, monkeypatch):
    """What runs on a GPU, run on a CPU: plain Flax in bfloat16, one device."""
    monkeypatch.setattr(devices, "on_cpu", lambda: False)
    lines = read_metrics(train(eval_episodes=1, total_timesteps=100, num_devices=1).path)
    assert "losses/loss" in lines[-2]
    assert "eval/test_levels/mean_return" in lines[-1]


def test_four_thousand_frames_from_the_command_line_to_a_film(tmp_path, monkeypatch, capfd):
    """As a user types it: W&B, evaluation, video, then evaluate.py; under SageMaker, which has ids of its own."""
    for name, value in {"SM_TRAINING_ENV": "{}", "TRAINING_JOB_NAME": "job", "CURRENT_HOST": "algo-1"}.items():
        monkeypatch.setenv(name, value)
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
    names = {"charts/episodic_return", "charts/episodic_length", "charts/SPS", "losses/policy_loss", "time"}
    names |= {"losses/value_loss", "losses/entropy", "losses/approx_kl", "losses/clipfrac"}
    names |= {f"eval/{x}_levels/{y}" for x in ("train", "test") for y in ("mean_return", "normalized", "min", "max")}
    assert names <= set(lines[-2]) | set(lines[-1])
    assert all(np.isfinite(list(line.values())).all() for line in lines)
    # The bound is wide, since the rest depends on the machine: exact fractions are the next test's.
    assert 0.5 < sum(lines[1][f"time/{x}"] for x in ("game", "inference", "update")) < 1.01
    (offline,) = (run_dir / "wandb").glob("offline-run-*")
    assert offline.name.endswith(json.loads((run_dir / "args.json").read_text())["wandb_id"])
    assert len(list((run_dir / "videos").glob("*.mp4"))) == 2

    before = json.loads((run_dir / "eval.json").read_text())
    assert all(int(level) >= 3 for level in before["test_levels"]["returns_by_level"])  # none that it has trained on
    runs.cli(evaluate.Args, evaluate.main, [str(run_dir), "--episodes", "8", "--levels", "train", "--video", "--human"])
    after = json.loads((run_dir / "eval.json").read_text())
    by_level = after["train_levels"]["returns_by_level"]
    assert set(by_level) <= {"0", "1", "2"}
    assert (after["train_levels"]["seed"], after["train_levels"]["episodes"]) == (0, 8)
    runs.cli(evaluate.Args, evaluate.main, [str(run_dir), "--episodes", "4", "--levels", "train"])
    assert json.loads((run_dir / "eval.json").read_text()) == after  # of fewer episodes: it stays
    returns = np.concatenate(list(by_level.values()))
    assert (len(returns), returns.mean()) == (8, pytest.approx(after["train_levels"]["mean_return"]))
    assert after["test_levels"] == before["test_levels"]
    video = run_dir / "videos" / f"train_levels_{after['global_step']}.mp4"
    with av.open(str(video)) as container:
        pictures = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert pictures[0].shape == (384, 384, 3)
    assert len(pictures) > 10
    assert np.std(pictures[5]) > 10
    assert np.asarray(Image.open(video.with_suffix(".png"))).shape == (64, 8 * 64, 3)


def test_a_stopwatch_gives_fractions_since_the_last(monkeypatch):
    """Two times of one name add up, what is not timed is in no fraction, and the next ones begin where these end."""
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


def test_speed_is_of_the_steps_since_the_start(args, monkeypatch):
    run, clock = run_of(ppo, args), iter([10.0, 12.0])
    monkeypatch.setattr(runs.time, "perf_counter", lambda: next(clock))
    assert [run.steps_per_second(1000), run.steps_per_second(1300)] == [0, 150]


# FILMS


def test_a_film_strip_has_each_scenes_first_and_last_moment():
    film = np.arange(6 * 5, dtype=np.uint8).repeat(2 * 2 * 3).reshape(30, 2, 2, 3)
    picture = films.film_strip(film, 6, moments=3)
    assert picture.shape == (6 * 2, 3 * 2, 3)
    np.testing.assert_array_equal(picture[::2, ::2, 0], np.arange(30).reshape(6, 5)[:, [0, 2, 4]])


def test_a_video_has_its_colours_and_all_its_frames(tmp_path):
    film = np.zeros((40, 64, 64, 3), np.uint8)
    film[..., 0], film[20:, ..., 1] = 200, 100
    films.write_video(tmp_path / "a.mp4", film, fps=12.5)
    with av.open(str(tmp_path / "a.mp4")) as container:
        seen = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    assert len(seen) == 40
    np.testing.assert_allclose(seen[[0, -1]].mean(axis=(1, 2)), [[200, 0, 0], [200, 100, 0]], atol=8)


# TRACKERS


def test_tensorboard_gets_the_metrics_and_a_resumed_run_purges_later_ones(args):
    args, state = replace(args, track="tensorboard"), {"state": np.zeros(2)}
    with run_of(ppo, args, **state) as run:
        run.log(100, {"losses/loss": 0.5})
        run.save(100, state, {})
        run.log(150, {"losses/loss": 0.75})
    with run_of(ppo, replace(args, resume=str(run.path)), **state) as resumed:
        resumed.log(200, {"losses/loss": 0.25, "charts/episodic_return": 3})
    assert not (run.path / "wandb").exists()
    events = list(tensorboard_events(run.path / "tensorboard"))
    written = {(e.step, v.tag): v.simple_value for e in events for v in e.summary.value}
    want = {(100, "losses/loss"): 0.5, (200, "losses/loss"): 0.25, (200, "charts/episodic_return"): 3}
    assert written.items() >= want.items()
    assert [e.step for e in events if e.session_log.status] == [101]


class Board(SimpleNamespace):
    """Stands for W&B's run, and notes what it is told."""

    project, entity, offline = "of the sweep", "us", True

    def log(self, row):
        self.rows.append(row)

    def define_metric(self, *names, **axis):
        self.axes.append((names, axis))

    def finish(self, exit_code):
        self.codes.append(exit_code)


@pytest.fixture
def board(monkeypatch):
    board = Board(rows=[], axes=[], codes=[], options={})
    monkeypatch.setattr(wandb, "init", lambda **options: board.options.update(options) or board)
    return board


def test_wandb_gets_project_entity_arguments_and_a_unique_id(args, board, monkeypatch):
    args = replace(args, wandb_mode="offline", wandb_project="games", wandb_entity="us")
    run_of(ppo, args)
    given = dict(board.options)
    assert (given["project"], given["entity"], given["mode"]) == ("games", "us", "offline")
    assert given["config"]["num_envs"] == TINY["num_envs"]
    assert re.fullmatch(f"{given['name']}-[0-9a-f]{{8}}", given["id"])  # two machines may have a folder of one name
    monkeypatch.setenv("WANDB_RUN_ID", "of the sweep")
    run_of(ppo, args)
    assert (board.options["id"], board.options["resume"]) == ("of the sweep", "allow")
    monkeypatch.setattr(wandb, "init", lambda **options: 1 / 0)
    with pytest.raises(runs.UsageError, match="--wandb-project games: W&B does not start"):
        run_of(ppo, args)


def test_wandb_has_the_step_as_its_axis_and_a_sweeps_project_is_saved(args, board, monkeypatch):
    """Its own step may not come twice, and does after a resume: rows would be dropped or moved to later steps."""
    monkeypatch.setenv("WANDB_SWEEP_ID", "one")
    with run_of(ppo, replace(args, wandb_mode="offline")) as run:
        for step in (100, 200):
            run.log(step, {"losses/loss": 1})
    assert board.axes == [(("global_step",), {}), (("*",), {"step_metric": "global_step"})]
    assert [row["global_step"] for row in board.rows] == [100, 200]
    saved = json.loads((run.path / "args.json").read_text())["args"]
    assert (saved["wandb_project"], saved["wandb_entity"]) == ("of the sweep", "us")


def test_wandb_is_told_how_a_run_ended_and_gets_its_videos(args, board):
    args = replace(args, wandb_mode="offline")
    for error in (None, ZeroDivisionError, SystemExit, KeyboardInterrupt):
        run = run_of(ppo, args).__enter__()
        run.__exit__(error, None, None)
    assert board.codes == [0, 1, 0, 1]
    run.save_video(5, np.zeros((2, 64, 64, 3), np.uint8))
    assert [set(row) for row in board.rows] == [{"global_step", "videos/episode"}]


def test_a_run_survives_the_end_of_wandbs_process(args, board, monkeypatch, capfd):
    def die(*given, **options):
        raise ConnectionResetError("Connection lost")

    monkeypatch.setattr(Board, "log", die)
    monkeypatch.setattr(Board, "finish", die)
    with run_of(ppo, replace(args, wandb_mode="offline")) as run:
        for step in (1, 2):
            run.log(step, {"losses/loss": 1.0})
    assert len(read_metrics(run.path)) == 2
    assert capfd.readouterr().err.count("W&B has stopped (ConnectionResetError('Connection lost'))") == 1


def test_wandb_without_a_login_or_a_package_is_refused(args, monkeypatch):
    monkeypatch.setattr(wandb, "login", lambda **options: False)
    with pytest.raises(runs.UsageError, match="--wandb-mode online: not logged in"):
        run_of(ppo, replace(args, wandb_mode="online"))
    monkeypatch.setitem(sys.modules, "wandb", None)
    run_of(ppo, args)
    with pytest.raises(runs.UsageError, match="--wandb-mode auto"):
        run_of(ppo, replace(args, wandb_mode="auto"))


# ERRORS AND SIGNALS


def test_a_full_device_memory_is_answered_in_one_sentence(monkeypatch, capfd):
    """And by an exit code that sweeps take for a reason to resume."""

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


def test_a_run_that_continues_elsewhere_says_so(args, monkeypatch, capfd):
    with run_of(ppo, args) as run:
        run.save(5, {"state": np.zeros(())}, {})
    monkeypatch.setattr(devices, "on_cpu", lambda: False)
    with run_of(ppo, replace(args, resume=str(run.path), dtype="float32", num_devices=2)):
        pass
    there, here = "a CPU, with 1 devices of 1 hosts", "an accelerator, with 2 devices of 1 hosts"
    assert f"was on {there} and continues on {here}: its numbers will differ" in capfd.readouterr().err


def test_divergence_stops_a_run_and_keeps_the_last_good_checkpoint(train, tmp_path):
    with pytest.raises(runs.DivergedError, match=r"not finite at step \d+: losses/.*is complete"):
        train(checkpoint_every=100, learning_rate="0:0.001,200:0.001,201:1e35", total_timesteps=10_000, kl_coef=0.0)
    (run_dir,) = tmp_path.iterdir()
    assert all((np.abs(np.float64(x)) < 1e6).all() for x in parameters(run_dir) if x.dtype == np.float32)


def test_metrics_that_are_no_finite_number_are_named(args):
    run = run_of(ppo, args)
    run.check_finite(7, {"losses/a": np.float32(1)})
    with pytest.raises(runs.DivergedError, match="step 7: losses/a, losses/c; "):
        run.check_finite(7, {"losses/a": np.float32("nan"), "losses/b": 1.0, "losses/c": np.float32("inf")})
    with pytest.raises(ValueError, match=r"losses/b has shape \[2\]"):
        run.check_finite(7, {"losses/a": 1.0, "losses/b": np.ones(2)})


def test_a_signal_that_comes_twice_at_once_is_one(args):
    """As one does that is for all processes of a job; asked again later, the run ends without a checkpoint."""
    with run_of(ppo, args) as run:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            pytest.fail("the second one was another")
        assert run.stop == "SIGTERM"
        with pytest.raises(SystemExit):
            run.replay_progress(2)(1)
        run._asked -= 3
        with pytest.raises(KeyboardInterrupt, match=str(int(signal.SIGTERM))):  # so that the exit code is 143
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_that_ends_gives_signals_back_and_does_not_advise_a_resume_without_a_checkpoint(args, tmp_path, capfd):
    numbers = signal.SIGINT, signal.SIGTERM
    before = [signal.getsignal(number) for number in numbers]
    with run_of(ppo, replace(args, run_dir=str(tmp_path / "a:x:b"))) as run:
        run.print(str(run.path))
        os.kill(os.getpid(), signal.SIGTERM)
    assert [signal.getsignal(number) for number in numbers] == before
    said = "".join(capfd.readouterr())
    assert "stopped by SIGTERM; there was no checkpoint yet" in said
    assert "a:x:b" in said  # no emoji


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU])
def test_a_warning_signal_stops_a_run_unless_it_was_ignored_at_the_start(number, args):
    before = signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup
    try:
        with run_of(ppo, args) as run:
            os.kill(os.getpid(), number)
            assert run.stop == number.name
        signal.signal(number, signal.SIG_IGN)  # nohup's way
        with run_of(ppo, args) as run:
            os.kill(os.getpid(), number)
            assert run.stop is None
    finally:
        signal.signal(number, before)


def test_a_run_whose_terminal_is_closed_writes_a_checkpoint(tmp_path):
    words = flags_of(TINY | {"total_timesteps": 10**6, "checkpoint_every": 10**6, "run_dir": str(tmp_path)})
    in_terminal = "import fcntl, runpy, signal, sys, termios; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
    in_terminal += "fcntl.ioctl(0, termios.TIOCSCTTY, 0); sys.argv = sys.argv[1:]; "
    command = [sys.executable, "-c", in_terminal + "runpy.run_path('ppo_procgen.py', run_name='__main__')"]
    terminal, its_end = pty.openpty()
    os.set_blocking(terminal, False)
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), its_end)
    process = subprocess.Popen([*command, "ppo_procgen.py", *words], cwd=ROOT, start_new_session=True, **streams)
    os.close(its_end)

    def has_logged():
        with contextlib.suppress(BlockingIOError):
            os.read(terminal, 10**6)  # a full terminal would block it
        return any(file.stat().st_size for file in tmp_path.glob("*/metrics.jsonl"))

    wait_for(has_logged, process)
    os.close(terminal)
    assert process.wait(60) == 0
    (run,) = tmp_path.iterdir()
    assert checkpoints.steps_in(run)


def test_a_second_ctrl_c_is_no_success():
    def interrupt(args):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stopped:
        runs.cli(ppo.Args, interrupt, [])
    assert stopped.value.code == 130


# FORKS


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("num_levels", 200, r"Forked.num_levels: .* without its type: num_levels: NonNegativeInt = 200"),
        ("vf_clip", 10, r"Forked.vf_clip: .* without its type: vf_clip: NonNegativeFloat = 10"),
        ("learning_rate", 5e-4, r"learning_rate: .* without its type: learning_rate: NonNegativeSchedule = '0.0005'"),
        ("huber_delta", 1.0, r"Forked.huber_delta: is no flag.* without its type: huber_delta: float = 1.0"),
        ("betas", (0.2, 0.3), r"type: betas: tuple\[float, float\] = \(0.2, 0.3\)"),
    ],
)
def test_a_forks_default_without_a_type_is_refused(name, value, said):
    """Python leaves it out of the dataclass."""

    @dataclasses.dataclass(frozen=True)
    class Forked(ppo.Args):
        eval_every: int = 50_000

    runs.check_args(Forked(eval_episodes=0), "my_ppo")  # a default of its own is not what the user gave
    setattr(Forked, name, value)
    with pytest.raises(runs.UsageError, match=said):
        runs.check_args(Forked(), "my_ppo")


@pytest.mark.parametrize(
    ("bounds", "good", "bad", "valid"),
    [
        (Interval(ge=0, lt=1), [0.0, 0.9], [-0.1, 1.0], "0 or more and below 1"),
        (Interval(gt=0, le=1), [0.1, 1.0], [0.0, 1.1], "above 0 and at most 1"),
        (Interval(ge=0, le=1), [0.0, 1.0], [-0.1, 1.1], "from 0 to 1"),
        (Le(1), [-5.0, 1.0], [1.1], "at most 1"),
    ],
)
def test_a_forks_range_holds_at_both_ends(bounds, good, bad, valid):
    @dataclasses.dataclass(frozen=True)
    class Forked(ppo.Args):
        momentum: Annotated[float, bounds] = 0.9

    for value in good:
        runs.check_args(Forked(momentum=value), "my_ppo")
    for value in bad:
        with pytest.raises(runs.UsageError, match=f"--momentum {value}: must be {valid}$"):
            runs.check_args(Forked(momentum=value), "my_ppo")


def test_a_fork_whose_runs_would_not_be_found_is_refused():
    for name in ("my-ppo", "myppo"):
        with pytest.raises(runs.UsageError, match=rf"{name}\.py: give it a name .* such as my_ppo\.py"):
            runs.check_args(ppo.Args(), name)


def test_a_platform_that_jax_does_not_find_is_named(monkeypatch):
    """For JAX_PLATFORMS=cuda without a GPU JAX raises a bare AssertionError."""
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(jax, "devices", Mock(side_effect=AssertionError))
    with pytest.raises(runs.UsageError, match="JAX_PLATFORMS=cuda: JAX finds no such device"):
        runs.check_args(ppo.Args(), "ppo_procgen")


def test_a_forks_array_of_another_shape_in_a_batch_is_refused():
    """Else samples would be taken from beyond its end, which JAX does not mind."""
    batch = ppo.Batch(*(np.zeros((5, 3)) for _ in range(4)), returns=np.zeros((3, 5)))  # time, environments
    with pytest.raises(AssertionError, match="prefix"):
        ppo.optimize(ppo.Args(), None, None, None, batch, mask=np.ones((5, 3)), learning_rate=0, ent_coef=0, key=None)
