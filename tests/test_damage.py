"""What happens to a run from outside: two that want it, damaged files, full disks, lost history, signals, clocks."""

import contextlib
import errno
import fcntl
import gc
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from unittest import mock

import jax
import numpy as np
import pytest
from conftest import ROOT, TINY, assert_refused, assert_same_run, read_metrics

import evaluate
import impala_procgen as impala
import ppo_procgen as ppo
from common import atari, checkpoints, devices, envs, files, runs

RUN = TINY | {"checkpoint_every": 128, "keep_checkpoints": 10, "total_timesteps": 500}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run with a checkpoint after each of its four updates."""
    return ppo.main(ppo.Args(**RUN | {"run_dir": str(tmp_path_factory.mktemp("whole"))})).path


@pytest.fixture
def run_dir(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


def resume(run_dir, **flags):
    return ppo.main(ppo.Args(**RUN | {"resume": str(run_dir)} | flags))


def contents(run_dir):
    return {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and path.name != "lock"}


# ONE PROCESS AT A TIME


def test_a_run_that_is_held_is_refused(run_dir, capfd):
    """By the name of its holder, and nothing is changed. It may be read meanwhile, and had again once that is dead."""
    code = "import pathlib, sys; from common import files; x = files.take(pathlib.Path(sys.argv[1])); print(); input()"
    command = [sys.executable, "-uc", code, run_dir]
    holder = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    holder.stdout.readline()
    before = contents(run_dir)
    words = ["--resume", run_dir, "--total-timesteps", 600, "--wandb-mode", "disabled"]
    assert_refused(ppo, words, capfd, f"--resume {run_dir}: process {holder.pid} on ", "wait for its end")
    assert contents(run_dir) == before
    assert checkpoints.load(run_dir)[0] == read_metrics(run_dir)[-1]["global_step"]
    holder.kill()
    holder.wait()
    with runs.Run(ppo.Args(**RUN | {"resume": str(run_dir)}), "ppo_procgen"):
        assert files.take(run_dir) is None
        assert files.holder(run_dir) == f"process {os.getpid()} on {os.uname().nodename}"
    files.take(run_dir).close()


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, capfd):
    def refuse(*_, **__):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert files.take(tmp_path)
    assert "cannot be locked" in capfd.readouterr().err


def test_a_checkpoint_that_is_replaced_while_it_is_read(run_dir, monkeypatch, capfd):
    """As when evaluate.py reads the run of somebody who trains: the newer one is read, and nothing said."""
    read, steps = checkpoints._read, checkpoints.steps_in(run_dir)
    path = run_dir / "checkpoints"
    (path / str(steps[-1])).rename(path / "away")

    def train_on(one):
        if (path / "away").exists():
            (path / "away").rename(path / str(steps[-1]))
            shutil.rmtree(one)
        return read(one)

    monkeypatch.setattr(checkpoints, "_read", train_on)
    assert checkpoints.load(run_dir)[0] == steps[-1]
    assert "damaged" not in capfd.readouterr().err


# DAMAGED CHECKPOINTS


def test_no_flipped_bit_goes_unnoticed(run_dir):
    """Anywhere in any file: what is loaded is what was saved, or the checkpoint before."""
    newest, tree = checkpoints.load(run_dir)
    rng = np.random.default_rng(0)
    paths = sorted(path for path in (run_dir / "checkpoints" / str(newest)).rglob("*") if path.stat().st_size)
    noticed = 0
    for path in rng.choice([path for path in paths if path.is_file()], 60):
        content = bytearray(path.read_bytes())
        bit = int(rng.integers(8 * len(content)))
        content[bit // 8] ^= 1 << bit % 8
        old, _ = path.read_bytes(), path.write_bytes(content)
        step, got = checkpoints.load(run_dir)
        noticed += step < newest
        if step == newest:
            jax.tree.map(np.testing.assert_array_equal, got, tree)
        path.write_bytes(old)
    assert noticed > 10


@pytest.mark.parametrize("kind", ["flipped", "half", "empty", "gone", "hollow", "dangling"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(run_dir, whole, kind, capfd):
    newest = checkpoints.steps_in(run_dir)[-1]
    folder = run_dir / "checkpoints" / str(newest)
    data = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes({"flipped": content, "half": content[: len(content) // 2]}.get(kind, b""))
    if kind == "gone":
        data.unlink()
    elif kind == "hollow":
        shutil.rmtree(folder)
        folder.mkdir()
        (folder.parent / "²").mkdir()  # no step, though a digit
        (folder.parent / "0999").mkdir()  # nor is this
    elif kind == "dangling":
        shutil.rmtree(folder)
        folder.symlink_to(run_dir / "purged")
    resume(run_dir)
    said = [line for line in capfd.readouterr().err.splitlines() if "run directory" not in line]
    assert len(said) == 1
    assert said[0].startswith(f"checkpoint {folder} is damaged (")
    assert said[0].endswith("): the one before it is taken")
    assert_same_run(whole, run_dir)
    aside = run_dir / "damaged" / str(newest)  # not deleted
    assert aside.is_symlink() if kind == "dangling" else aside.is_dir()


def test_checkpoints_are_pruned(run_dir):
    resume(run_dir, total_timesteps=700, keep_checkpoints=2)
    steps = checkpoints.steps_in(run_dir)
    assert len(steps) == len(list((run_dir / "checkpoints").iterdir())) == 2
    assert steps[-1] == read_metrics(run_dir)[-1]["global_step"] >= 700


def test_a_checkpoint_is_of_few_files(run_dir):
    step = checkpoints.steps_in(run_dir)[0]
    assert len(list((run_dir / "checkpoints" / str(step)).rglob("*"))) < 30


# FULL DISKS


@contextlib.contextmanager
def small_files(size: int = 1000):
    """The kernel writes no file beyond so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_while_a_checkpoint_is_written(run_dir, whole, monkeypatch, capfd):
    """One sentence, no half-written folder, and once there is room it goes on exactly. The kernel refuses for real."""
    step = checkpoints.steps_in(run_dir)[1]
    for later in checkpoints.steps_in(run_dir)[2:]:
        shutil.rmtree(run_dir / "checkpoints" / str(later))
    save = checkpoints.save

    def without_room(*given, **how):
        with small_files():
            save(*given, **how)

    monkeypatch.setattr(checkpoints, "save", without_room)
    with pytest.raises(SystemExit) as stopped:
        runs.cli(ppo.Args, ppo.main, ["--resume", str(run_dir)])
    said = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("run directory")]
    assert stopped.value.code == 1
    assert len(said) == 1, said
    assert said[0].startswith(f"error: cannot write {run_dir}: ")
    for part in (os.strerror(errno.EFBIG), "MiB are free there", f"step {step} is whole", f"--resume {run_dir}"):
        assert part in said[0]
    assert checkpoints.steps_in(run_dir)[-1] == step
    assert all(path.name.isdigit() for path in (run_dir / "checkpoints").iterdir())
    monkeypatch.undo()
    resume(run_dir)
    assert_same_run(whole, run_dir)


def test_of_many_files_without_room_only_one_is_heard(tmp_path, caplog):
    """Orbax writes them in tasks: those nobody waits for any more would log what they raised when they are collected,
    which on Python 3.11 also breaks an ast.parse that is under way then."""
    arrays = {str(i): np.random.default_rng(i).normal(size=1000) for i in range(2000)}  # that cannot be compressed
    with small_files(), pytest.raises(Exception, match=os.strerror(errno.EFBIG)) as refused:
        checkpoints.save(tmp_path, 1, arrays, keep=1)
    assert files.full_disk(refused.value)
    gc.collect()
    assert not caplog.records


@pytest.mark.filterwarnings("error")
def test_a_full_disk_when_a_folder_is_taken(tmp_path):
    """And the file is closed: one left open would be heard of in some later test."""
    with small_files(0), pytest.raises(OSError, match=os.strerror(errno.EFBIG)) as refused:
        files.take(tmp_path)
    locks = [step.frame.f_locals.get("lock") for step in refused.traceback]
    assert [lock.closed for lock in locks if lock] == [True]
    files.take(tmp_path).close()
    assert files.holder(tmp_path).startswith("process")


@pytest.mark.parametrize("words", [[], ["--resume"]])
def test_a_full_disk_at_the_first_write(words, run_dir, tmp_path, monkeypatch, capfd):
    """Of a new run nothing is left, and a resumed one is as it was."""
    before = contents(tmp_path)

    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(runs, "write_json", refuse)
    words = [*words, str(run_dir)] if words else ["--run-dir", str(tmp_path / "new"), "--wandb-mode", "disabled"]
    with pytest.raises(SystemExit) as stopped:
        runs.cli(ppo.Args, ppo.main, words)
    assert stopped.value.code == 1
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "the disk is full" in said
    assert contents(tmp_path) == before
    assert not [*(tmp_path / "new").glob("*")]
    held = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert not [path for path in held if "metrics.jsonl" in path]
    files.take(run_dir).close()  # it is free again


# HISTORY


@pytest.mark.parametrize("kind", ["missing", "empty", "text", "binary", "headless", "one bad line"])
def test_lost_history_is_said_and_kept(run_dir, kind, capfd):
    path = run_dir / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    bad = {"text": b"hello\n" * 9, "binary": bytes(range(256)) * 20, "empty": b"", "headless": b"".join(lines[2:]),
           "one bad line": b"".join([lines[0], b'{"global_step": tru\n', *lines[2:]])}  # fmt: skip
    path.unlink()
    if kind in bad:
        path.write_bytes(bad[kind])
    run = resume(run_dir, total_timesteps=600)
    kept = {"headless": lines[2:], "one bad line": [lines[0], *lines[2:]]}.get(kind, [])
    said = capfd.readouterr().err
    assert f"{path}: {len(lines) - len(kept)} of the {len(lines)} lines before step " in said
    assert path.read_bytes().startswith(b"".join(kept))
    assert len(read_metrics(run_dir)) == len(kept) + 1
    if bad.get(kind):
        assert (run_dir / "damaged" / "metrics.jsonl").read_bytes() == bad[kind]
        assert str(run_dir / "damaged" / "metrics.jsonl") in said
    # From here on the history is whole again.
    assert checkpoints.load(run.path)[1]["run"]["lines"] == len(kept) + 1
    resume(run_dir, total_timesteps=700)
    assert "missing" not in capfd.readouterr().err


def test_the_runs_own_clock(tmp_path, monkeypatch):
    """Goes on over a resume, leaves out the time between, and does not care who sets the machine's clock."""
    flags = RUN | {"run_dir": str(tmp_path), "total_timesteps": 250}
    run = ppo.main(ppo.Args(**flags))
    first = [line["seconds"] for line in read_metrics(run.path, clocks=True)]
    saved = float(checkpoints.load(run.path)[1]["run"]["seconds"])
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 7200)
    monkeypatch.setattr(time, "monotonic", lambda old=time.monotonic: old() + 1e6)  # and the machine had been off
    resume(run.path)
    lines = read_metrics(run.path, clocks=True)
    seconds = [line["seconds"] for line in lines]
    assert seconds[: len(first)] == first
    assert seconds == sorted(seconds)
    assert first[-1] <= saved < seconds[len(first)] < saved + 1000
    assert lines[-1]["time"] < lines[0]["time"]


# BAD INPUT

NONSENSE = {
    "an unset variable": (["--resume", ""], "--resume ''", "give a run directory"),
    "another form of it": (["--resume="], "--resume ''", "leave the flag out"),
    "no folder": (["--run-dir", ""], "--run-dir ''", "give a folder"),
    "twice the same": (["--augment", "flip,flip"], "--augment flip,flip", "each of them once"),
    "more than float32 holds": (["--vf-coef", "1e39"], "--vf-coef 1e+39", "float32"),
    "the same in a schedule": (["--learning-rate", "1e39"], "--learning-rate '1e39'", "give a number"),
}


@pytest.mark.parametrize("case", NONSENSE)
@pytest.mark.filterwarnings("error")
def test_nonsense_is_refused(case, capfd):
    words, names, valid = NONSENSE[case]
    assert_refused(ppo, ["--wandb-mode", "disabled", *words], capfd, names, valid)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (ppo, ["--num-envs", 65536, "--num-steps", 256]),
        (impala, ["--replay-size", 2**16, "--replay-fraction", 0.5]),
        ("apex_procgen", ["--buffer-size", 10**8]),
        ("rnd_montezuma", ["--num-envs", 65536, "--num-steps", 256]),
        ("hnppo_doorgym", ["--hyper-width", 65536]),
    ],
)
def test_more_than_memory_holds_is_refused(script, words, monkeypatch, capfd):
    script = __import__(script) if isinstance(script, str) else script
    monkeypatch.setattr(devices, "memory", lambda args: (25_300_000_000, 25_300_000_000))
    answer = assert_refused(
        script, ["--wandb-mode", "disabled", *words], capfd, f"{words[0]} {words[1]}", "there are 25.3"
    )
    assert float(answer.split("at least ")[1].split()[0].replace(",", "")) > 25.3


def test_a_gpus_memory_is_not_the_hosts(monkeypatch, capfd):
    monkeypatch.setattr(devices, "on_cpu", lambda: False)
    monkeypatch.setattr(devices, "memory", lambda args: (64 * 10**9, 1 * 10**9))
    words = ["--num-envs", 1024, "--num-steps", 256, "--wandb-mode", "disabled"]
    assert_refused(ppo, words, capfd, "0.3 GB on this machine", "GB on the devices that learn (there are 1.0)")


def test_a_checkpoint_has_a_replay_buffer_once_more(monkeypatch, capfd):
    """Which is in the host's memory, also where the buffer is in a GPU's, whence it comes there first."""
    apex = __import__("apex_procgen")
    words = ["--buffer-size", 10**6, "--num-devices", 1, "--wandb-mode", "disabled"]  # 12.3 GB
    monkeypatch.setattr(devices, "memory", lambda args: (24 * 10**9, 24 * 10**9))
    answer = assert_refused(apex, words, capfd, "--buffer-size 1000000 --save-replay", "this machine (there are 24.0)")
    assert 2 * 12.2 < float(answer.split("at least ")[1].split()[0]) < 2 * 12.7
    monkeypatch.setattr(devices, "on_cpu", lambda: False)
    assert_refused(apex, words, capfd, "--save-replay: ask for at least 24.6 GB on this machine", "12.4 GB on the dev")


def test_evaluation_says_which_run_has_no_checkpoint_before_it_plays_another(run_dir, tmp_path, capfd):
    begun = shutil.copytree(run_dir, tmp_path / "begun", ignore=shutil.ignore_patterns("checkpoints"))
    assert_refused(evaluate, [run_dir, begun], capfd, f"RUN_DIR {begun}", "no complete checkpoint")


def test_evaluation_of_what_is_no_run_of_ours(run_dir, tmp_path, capfd):
    assert_refused(evaluate, [run_dir, "--episodes", "1" + "0" * 20], capfd, "--episodes 1" + "0" * 20, "to 1000000")
    args = json.loads((run_dir / "args.json").read_text())
    for change, part in (
        ({"script": "../x"}, "no script's name"),
        ({"script": "dqn_procgen"}, "dqn_procgen.py, which is not here"),
        ({"args": [1]}, "no arguments"),
        (
            {"args": args["args"] | {"env_id": "bigfsh"}},
            "'bigfsh' for argument '--env-id'. Expected one of ('bigfish',",
        ),
        ({"args": args["args"] | {"num_steps": 10**9}}, "--num-steps 1000000000"),
        ({"args": args["args"] | {"gone": 3}}, "--gone"),
        ({"args": args["args"] | {"pool": "old"}}, "'old' for argument '--pool'. Expected one of ('avg',"),
    ):
        (run_dir / "args.json").write_text(json.dumps(args | change))
        assert_refused(evaluate, [run_dir], capfd, f"RUN_DIR {run_dir}", part)
    for text in ("[" * 100_000, "[1]", "", "\0"):
        (run_dir / "args.json").write_text(text)
        assert_refused(evaluate, [run_dir], capfd, f"RUN_DIR {run_dir}", "give a run directory")


def test_an_eval_json_that_cannot_be_read_is_kept(tmp_path, capfd, monkeypatch):
    (tmp_path / "eval.json").write_text("{")
    assert evaluate.read_results(tmp_path / "eval.json") == {}
    assert (tmp_path / "damaged" / "eval.json").read_text() == "{"

    def answer(**how):
        asked.append((how["levels"], how["seed"]))
        return envs.Evaluation(7, "test_levels", "", [], {"episodes": 4}, np.zeros((2, 64, 64, 3), np.uint8))

    asked = []
    monkeypatch.setattr(evaluate, "player", lambda *_: answer)
    for old in (
        {"global_step": 6, "test_levels": {"episodes": 9}},
        {"global_step": 7, "test_levels": {"episodes": None}},
    ):
        files.write_json(tmp_path / "eval.json", old)  # of another step, and no number
        evaluate.play(evaluate.Args((str(tmp_path),), seed=3, human=True), str(tmp_path), ppo, ppo.Args(num_levels=1))
        new = json.loads((tmp_path / "eval.json").read_text())
        assert new == {"global_step": 7, "test_levels": {"episodes": 4, "seed": 3}}
    assert asked[:3] == [("test", 3), ("train", 3), ("test", 3)]
    assert (tmp_path / "videos" / "side_by_side_7.mp4").exists()


def test_the_room_is_one_of_the_pyramids():
    """Byte 3 of the memory may hold anything while the game starts."""
    ram = np.zeros((3, 128), np.uint8)
    ram[:, 3] = 5, 23, 255
    assert atari.rooms_of({"ram": ram}).tolist() == [5, 23, 23]


def test_history_is_not_lost_where_there_is_no_room_to_mend_it(run_dir, monkeypatch):
    """As after kill -9 between what is set aside and what is written."""
    path = run_dir / "metrics.jsonl"
    bad = path.read_bytes() + b"cut"
    path.write_bytes(bad.replace(b'{"global_step"', b'{"global_stop"', 1))
    before, whole = path.read_bytes(), files.whole

    def refuse(one):
        if one == path:
            raise files.FullError("cannot write")
        return whole(one)

    with monkeypatch.context() as patch:
        patch.setattr(files, "whole", refuse)
        with pytest.raises(files.FullError):
            resume(run_dir, total_timesteps=600)
    assert path.read_bytes() == before
    assert (run_dir / "damaged" / "metrics.jsonl").read_bytes() == before


# SIGNALS


def test_a_closed_pipe_is_as_good_as_a_signal(tmp_path, monkeypatch, capfd):
    """As with `2>&1 | head`: training ends with a checkpoint, and can go on."""
    reader, writer = os.pipe()
    say = runs.Run.say

    def say_to_nobody(run, sentence):
        os.close(reader)
        monkeypatch.undo()
        say(run, sentence)

    with os.fdopen(writer, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", pipe)
        monkeypatch.setattr(runs.Run, "say", say_to_nobody)
        run = ppo.main(ppo.Args(**RUN | {"run_dir": str(tmp_path)}))
    assert run.stop == "SIGPIPE"
    assert checkpoints.steps_in(run.path) == [0]


def test_an_error_that_is_not_the_checkpoints_is_no_damage(run_dir, monkeypatch, tmp_path):
    """A file that may not be read now is not moved away; one of an earlier version is said to be that."""

    python = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    tensorstore = ValueError(f"Permission denied [os_error_code='{errno.EACCES}']")
    for error, why in ((python, "Too many open files"), (tensorstore, "Permission denied")):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, "_read", mock.Mock(side_effect=error))
            with pytest.raises(runs.UsageError, match=rf"cannot be read here and now.*{why}"):
                checkpoints.load(run_dir)
    for error in (MemoryError(), *(OSError(n, "") for n in (errno.EIO, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT))):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, "_read", mock.Mock(side_effect=error))
            with pytest.raises(runs.UsageError, match="here and now"):
                checkpoints.load(run_dir)
    monkeypatch.setattr(checkpoints, "checksum", lambda tree: np.zeros(32, np.uint8))
    with pytest.raises(runs.UsageError, match=r"no whole checkpoint: .*its checksum differs"):
        checkpoints.load(run_dir)
    old = tmp_path / "checkpoints" / "5"
    with checkpoints._orbax() as orbax:
        orbax.save(old, {"state": np.zeros(1)})
    with pytest.raises(runs.UsageError, match="has no checksum, it is of an earlier version"):
        checkpoints._read(old)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of the writer's own thread
def test_a_full_disk_while_events_are_written(tmp_path):
    """Of TensorBoard: in one sentence, and what was written before is there."""
    args = ppo.Args(**RUN | {"run_dir": str(tmp_path), "track": "tensorboard"})

    def log_for_long():
        with contextlib.ExitStack() as until_it_is_closed, runs.Run(args, ppo.SCRIPT) as run:
            run._metrics = open(os.devnull, "w")  # noqa: SIM115 - `run` closes it: only the events are to be too many
            until_it_is_closed.enter_context(small_files())
            for step in range(1, 10**5):
                run.log(step, {f"losses/{i}": 1.0 for i in range(20)})

    with pytest.raises(files.FullError, match=rf"cannot write {tmp_path}/.*no checkpoint was written yet"):
        log_for_long()
    (path,) = tmp_path.glob("*/tensorboard/*")
    assert b"losses/1" in path.read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_training_leaves_no_folder(number, tmp_path):
    """The first import after the run directory is made sends one."""
    (tmp_path / "tensorboardX.py").write_text(f"import os, time; os.kill(os.getpid(), {number:d}); time.sleep(9)")
    words = ["--track", "tensorboard", "--encoder", "nature", "--num-envs", "8", "--run-dir", str(tmp_path / "runs")]
    command = [sys.executable, "ppo_procgen.py", *words]
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert ended.stderr == f"stopped by {number.name}\n"
    assert ended.returncode == 128 + number
    assert not [*(tmp_path / "runs").iterdir()]


def test_a_user_without_a_home_has_a_folder(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(files.Path, "home", mock.Mock(side_effect=RuntimeError("Could not determine home directory.")))
    assert files.own_folder() == files.own_folder()


def test_what_is_set_aside_replaces_nothing(tmp_path):
    for content in "abc":
        (tmp_path / "x").write_text(content)
        files.set_aside(tmp_path / "x", tmp_path / "damaged")
        (tmp_path / "damaged" / "x").unlink() if content == "b" else None
    assert {path.read_text() for path in (tmp_path / "damaged").iterdir()} == {"b", "c"}
