"""What happens to a run from outside: two that want it, damaged files, full disks, lost history, signals, clocks."""

import contextlib
import errno
import fcntl
import gc
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
from conftest import ROOT, TINY, assert_refused, read_metrics, run_of

import evaluate
import ppo_procgen as ppo
from common import atari, checkpoints, envs, files, runs, tracking

STATE = {"state": np.arange(5000, dtype=np.float32)}
STEPS = [100, 200, 300, 400]


def open_run(args):
    """A PPO run that has `STATE` in place of networks, and begins where its newest checkpoint is."""
    return run_of(ppo, args, **STATE)


def write_run(folder, **flags):
    """A run with a checkpoint after each of its four lines of metrics."""
    with open_run(ppo.Args(**TINY | {"run_dir": str(folder), "keep_checkpoints": 10} | flags)) as run:
        train_until(run, STEPS)
    return run.path


def train_until(run, steps):
    for step in steps:
        run.log(step, {"losses/loss": step})
        run.save(step, {"state": STATE["state"] + step}, {})


def resumed(run_dir, **flags):
    return open_run(ppo.Args(**TINY | {"keep_checkpoints": 10, "resume": str(run_dir)} | flags))


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("template"))


@pytest.fixture
def run_dir(template, tmp_path):
    return shutil.copytree(template, tmp_path / "run")


def contents(run_dir):
    return {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and path.name != "lock"}


def answer(main, words, capfd):
    """Exit code and lines on stderr of a script with this `main`."""
    capfd.readouterr()
    main.__module__ = ppo.__name__
    with pytest.raises(SystemExit) as stopped:
        runs.cli(ppo.Args, main, [*map(str, words), "--wandb-mode", "disabled"])
    return stopped.value.code, capfd.readouterr().err.splitlines()


# ONE PROCESS AT A TIME


def test_a_run_that_is_locked_is_refused_by_its_holders_name(run_dir, capfd):
    """Nothing is changed; it may be read meanwhile, and is free once its holder is dead."""
    code = (
        "import pathlib, sys; from common import files; x = files.lock_run(pathlib.Path(sys.argv[1])); print(); input()"
    )
    command = [sys.executable, "-uc", code, run_dir]
    holder = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    holder.stdout.readline()
    before = contents(run_dir)
    words = ["--resume", run_dir, "--total-timesteps", 600, "--wandb-mode", "disabled"]
    assert_refused(ppo, words, capfd, f"--resume {run_dir}: process {holder.pid} on ", "wait for its end")
    assert contents(run_dir) == before
    assert checkpoints.load(run_dir)[0] == 400
    holder.kill()
    holder.wait()
    with resumed(run_dir):
        assert files.lock_run(run_dir) is None
        assert files.holder(run_dir) == f"process {os.getpid()} on {os.uname().nodename}"
    files.lock_run(run_dir).close()


def test_a_file_system_without_locks_is_reported(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))))
    assert files.lock_run(tmp_path)
    assert "cannot be locked" in capfd.readouterr().err


def test_a_checkpoint_replaced_while_it_is_read_gives_the_newer_one(run_dir, monkeypatch, capfd):
    """As when evaluate.py reads the run of somebody who trains."""
    read, path = checkpoints._read, run_dir / "checkpoints"
    (path / "400").rename(path / "away")

    def train_on(one):
        if (path / "away").exists():
            (path / "away").rename(path / "400")
            shutil.rmtree(one)
        return read(one)

    monkeypatch.setattr(checkpoints, "_read", train_on)
    assert checkpoints.load(run_dir)[0] == 400
    assert "damaged" not in capfd.readouterr().err


# CHECKPOINTS


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
def test_a_damaged_checkpoint_is_named_moved_away_and_the_one_before_taken(run_dir, kind, capfd):
    folder = run_dir / "checkpoints" / "400"
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
    with resumed(run_dir) as run:
        assert run.checkpoint["state"][0] == 300
        train_until(run, [400])
    said = [line for line in capfd.readouterr().err.splitlines() if "run directory" not in line]
    assert len(said) == 1
    assert said[0].startswith(f"checkpoint {folder} is damaged (")
    assert said[0].endswith("): the one before it is taken")
    assert [line["global_step"] for line in read_metrics(run_dir)] == STEPS == checkpoints.steps_in(run_dir)
    aside = run_dir / "damaged" / "400"  # not deleted
    assert aside.is_symlink() if kind == "dangling" else aside.is_dir()


@pytest.mark.parametrize(
    ("content", "valid"),
    [
        (None, "give a run directory"), ("[1]", "give a run directory"), ('{"script": "x_y"}', "no arguments"),
        ('{"script": "trpo_procgen", "args": {}}', "this one is of trpo_procgen.py"),
        ('{"script": "ppo_procgen", "args": {"num_envs": "many"}}', "version"),
        ('{"script": "ppo_procgen", "args": {}}', "exported agent"),
    ],
)  # fmt: skip
def test_a_resume_from_no_run_is_refused(content, valid, tmp_path, capfd):
    if content:
        (tmp_path / "args.json").write_text(content)
    words = ["--resume", tmp_path, "--wandb-mode", "disabled"]
    assert_refused(ppo, words, capfd, f"--resume {tmp_path}", valid)


@pytest.mark.parametrize("name", ["lock", "metrics.jsonl", "checkpoints", "damaged", "videos"])
def test_a_run_whose_part_is_a_link_is_refused_and_writes_nothing(name, run_dir, tmp_path, capfd):
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").write_text("mine")
    shutil.rmtree(run_dir / name, ignore_errors=True)
    (run_dir / name).unlink(missing_ok=True)
    (run_dir / name).symlink_to(other / "file" if name in ("lock", "metrics.jsonl") else other)
    assert_refused(ppo, ["--resume", run_dir, "--wandb-mode", "disabled"], capfd, f"--resume {run_dir}", "link")
    assert_refused(evaluate, [run_dir], capfd, f"RUN_DIR {run_dir}", "link")
    assert [(path.name, path.read_text()) for path in other.iterdir()] == [("file", "mine")]


@pytest.mark.parametrize("name", ["checkpoints", "videos", "wandb"])
def test_a_file_in_a_folders_place_is_refused(name, run_dir, capfd):
    shutil.rmtree(run_dir / name, ignore_errors=True)
    (run_dir / name).write_text("mine")
    for script, words in ((ppo, ["--resume", run_dir, "--wandb-mode", "disabled"]), (evaluate, [run_dir, "--video"])):
        assert_refused(script, words, capfd, f"{run_dir}: {name} is a link or no folder")


@pytest.mark.parametrize("name", ["lock", "args.json", "metrics.jsonl"])
def test_a_fifo_in_a_run_is_refused_and_not_waited_for(name, run_dir, capfd):
    (run_dir / name).unlink(missing_ok=True)
    os.mkfifo(run_dir / name)
    assert_refused(ppo, ["--resume", run_dir, "--wandb-mode", "disabled"], capfd, name, "regular file")


def test_folders_that_are_not_the_runs_are_kept(run_dir):
    ours = [run_dir / "checkpoints" / name for name in ("20", "my.orbax-checkpoint-tmp-thesis")]
    for folder in ours:
        folder.mkdir()
        (folder / "file").write_text("mine")
    checkpoints.remove_unfinished(run_dir)
    checkpoints.save(run_dir, 600, {"x": np.zeros(2)}, keep=1)
    assert checkpoints.steps_in(run_dir) == [600]
    assert [(run_dir / "damaged/20/file").read_text(), (ours[1] / "file").read_text()] == ["mine", "mine"]


@pytest.mark.parametrize("kind", ["all gone", "all damaged"])
def test_a_resume_without_a_whole_checkpoint_is_refused(kind, run_dir, capfd):
    for step in STEPS:
        shutil.rmtree(run_dir / "checkpoints" / str(step))
        if kind == "all damaged":
            (run_dir / "checkpoints" / str(step)).mkdir()
    says = f"{run_dir} has no {'complete' if kind == 'all gone' else 'intact'} checkpoint"
    assert_refused(ppo, ["--resume", run_dir, "--wandb-mode", "disabled"], capfd, says)


def test_an_error_that_is_not_the_checkpoints_fault_is_no_damage(run_dir, monkeypatch, tmp_path):
    """A file that may not be read now is not moved away; one of an earlier format is reported as such."""
    numbers = errno.EMFILE, errno.EIO, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT
    tensorstore = ValueError(f"Permission denied [os_error_code='{errno.EACCES}']")
    for error in (*(OSError(number, os.strerror(number)) for number in numbers), tensorstore, MemoryError()):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, "_read", mock.Mock(side_effect=error))
            with pytest.raises(runs.UsageError, match=r"cannot be read here and now") as refused:
                checkpoints.load(run_dir)
        assert str(error) in str(refused.value)
    with monkeypatch.context() as patch:
        patch.setattr(os, "sysconf", lambda name: 100)
        with pytest.raises(runs.UsageError, match=r"needs 0\.0 GB, this host has 0\.0 GB"):
            checkpoints.load(run_dir)
    old = tmp_path / "checkpoints" / "5"
    with checkpoints._orbax() as orbax:
        orbax.save(old, {"state": np.zeros(1)})
    with pytest.raises(runs.UsageError, match=r"is of format 1, these scripts read 3"):
        checkpoints.load(tmp_path)


@pytest.mark.parametrize(
    ("saved", "why"),
    [
        ({"a": np.zeros(3), "b": np.zeros(1)}, r"\['a'\] is \(3,\) there, \(2,\) here"),
        ({"a": {"c": np.zeros(2)}, "b": np.zeros(1)}, "something in it that they do not need"),
        ({"a": np.zeros(2)}, "does not fit"),
    ],
)
def test_a_checkpoint_of_other_arrays_does_not_fit(saved, why):
    template = {"a": {} if isinstance(saved["a"], dict) else np.zeros(2), "b": np.zeros(1)}
    with pytest.raises(checkpoints.MisfitError, match=why):
        checkpoints.restore_tree(template, saved, "there")


def test_old_checkpoints_are_pruned_and_half_a_checkpoint_is_removed(run_dir):
    left = run_dir / "checkpoints" / "7.orbax-checkpoint-tmp"
    left.mkdir()
    with resumed(run_dir, keep_checkpoints=2) as run:
        assert not left.exists()
        train_until(run, [500])
    assert checkpoints.steps_in(run_dir) == [400, 500]
    assert len(list((run_dir / "checkpoints").iterdir())) == 2
    assert len(list((run_dir / "checkpoints" / "500").rglob("*"))) < 30  # few files


def watch(monkeypatch):
    """A list that gets what is written through to the disk, and what is removed, in order."""
    done, fsync, rmtree = [], os.fsync, shutil.rmtree
    monkeypatch.setattr(os, "fsync", lambda fd: done.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd))
    monkeypatch.setattr(
        shutil, "rmtree", lambda path, *a, **how: done.append(f"gone {Path(path).name}") or rmtree(path, *a, **how)
    )
    return done


def test_a_checkpoint_is_on_the_disk_after_its_metrics_and_before_an_older_one_goes(run_dir, monkeypatch):
    with resumed(run_dir, keep_checkpoints=4) as run:
        done = watch(monkeypatch)
        train_until(run, [500])
    folder = run_dir / "checkpoints" / "500"
    before = done[: done.index("gone 100.orbax-checkpoint-tmp")]
    assert {str(path) for path in (*folder.rglob("*"), folder, folder.parent)} <= set(before)
    assert before[0] == str(run_dir / "metrics.jsonl")


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done = watch(monkeypatch)
    files.write_json(tmp_path / "a.json", {})
    assert [Path(name).name.startswith("a.json.") for name in done] == [True]


def test_a_disk_that_fails_costs_no_older_checkpoint(run_dir, monkeypatch):
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        checkpoints.save(run_dir, 500, {"x": np.arange(3)}, keep=1)
    assert checkpoints.steps_in(run_dir)[:4] == STEPS


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


def test_a_full_disk_while_a_checkpoint_is_written_is_answered_in_one_sentence(run_dir, capfd):
    """No half-written folder is left, and once there is room it continues. The kernel refuses for real."""

    def main(args):
        with open_run(args) as run, small_files():
            run.save(500, {"state": np.random.default_rng(0).normal(size=10_000)}, {})

    code, said = answer(main, ["--resume", run_dir], capfd)
    said = [line for line in said if not line.startswith("run directory")]
    assert code == 1
    assert len(said) == 1, said
    assert said[0].startswith(f"error: cannot write {run_dir}")
    for part in (os.strerror(errno.EFBIG), "MiB are free there", "step 400 is complete", f"--resume {run_dir}"):
        assert part in said[0]
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == [str(step) for step in STEPS]
    with resumed(run_dir) as run:
        train_until(run, [500])


def test_a_full_disk_under_many_files_is_reported_once(tmp_path, caplog):
    """Orbax writes them in tasks: those nobody waits for any more would log what they raised when they are collected,
    which on Python 3.11 also breaks an ast.parse that is under way then."""
    arrays = {str(i): np.random.default_rng(i).normal(size=1000) for i in range(2000)}  # that cannot be compressed
    with small_files(), pytest.raises(ValueError, match=os.strerror(errno.EFBIG)) as refused:
        checkpoints.save(tmp_path, 1, arrays, keep=1)
    assert files.full_disk(refused.value, tmp_path)
    assert not [*(tmp_path / "checkpoints").iterdir()]
    del refused
    gc.collect()
    assert not caplog.records


def test_a_disk_without_inodes_is_told_from_a_full_one(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda path: mock.Mock(f_files=9, f_favail=0, f_frsize=2**20, f_bavail=5))
    full = files.full_disk(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), tmp_path)
    assert str(full).endswith("no inodes left, delete some of its many files, 5.0 MiB are free there")


@pytest.mark.filterwarnings("error")
def test_a_full_disk_when_a_folder_is_locked_leaves_no_file_open(tmp_path):
    with small_files(0), pytest.raises(OSError, match=os.strerror(errno.EFBIG)) as refused:
        files.lock_run(tmp_path)
    assert files.full_disk(refused.value, tmp_path)
    locks = [step.frame.f_locals.get("lock") for step in refused.traceback]
    assert [lock.closed for lock in locks if lock] == [True]
    files.lock_run(tmp_path).close()
    assert files.holder(tmp_path).startswith("process")


@pytest.mark.parametrize("resume", [False, True])
def test_a_full_disk_at_the_first_write_leaves_everything_as_it_was(resume, run_dir, tmp_path, monkeypatch, capfd):
    before = contents(tmp_path)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(runs, "write_json", mock.Mock(side_effect=full))
    words = ["--resume", run_dir] if resume else ["--run-dir", tmp_path / "new"]
    code, said = answer(lambda args: open_run(args), words, capfd)
    assert (code, len(said)) == (1, 1)
    assert "the disk is full" in said[0]
    assert contents(tmp_path) == before
    assert not [*(tmp_path / "new").glob("*")]
    held = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert not [path for path in held if "metrics.jsonl" in path]
    files.lock_run(run_dir).close()  # it is free again


def test_a_full_disk_while_events_are_written_is_answered_in_one_sentence(tmp_path):
    """Of TensorBoard; what was written before is there."""
    args = ppo.Args(**TINY | {"run_dir": str(tmp_path), "track": "tensorboard"})

    def log_for_long():
        with contextlib.ExitStack() as until_it_is_closed, open_run(args) as run:
            (path,) = (run.path / "tensorboard").iterdir()
            run.log(1, {"losses/first": 1.0})
            while b"losses/first" not in path.read_bytes():  # a thread writes it
                time.sleep(0.01)
                run._board.flush()
            run._metrics = open(os.devnull, "w")  # noqa: SIM115 - `run` closes it: only the events are to be too many
            until_it_is_closed.enter_context(small_files())
            for step in range(2, 10**5):
                run.log(step, {f"losses/{i}": 1.0 for i in range(20)})

    with pytest.raises(files.FullError, match=r"cannot write .*no checkpoint was written yet"):
        log_for_long()


# HISTORY


@pytest.mark.parametrize("kind", ["missing", "empty", "text", "binary", "headless", "one bad line", "another run's"])
def test_lost_history_is_reported_and_kept(run_dir, kind, capfd):
    path = run_dir / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    bad = {"text": b"hello\n" * 9, "binary": bytes(range(256)) * 20, "empty": b"", "headless": b"".join(lines[2:]),
           "one bad line": b"".join([lines[0], b'{"global_step": tru\n', *lines[2:]]),
           "another run's": b"".join(lines).replace(b'"losses/loss": 1', b'"losses/loss": 2')}  # fmt: skip
    path.unlink()
    if kind in bad:
        path.write_bytes(bad[kind])
    with resumed(run_dir) as run:
        train_until(run, [500])
    others = bad["another run's"].splitlines(keepends=True)
    kept = {"headless": lines[2:], "one bad line": [lines[0], *lines[2:]], "another run's": others}.get(kind, [])
    said = capfd.readouterr().err
    assert f"{path}: {4 - len(kept) or 'some'} of the 4 lines before step 400" in said
    assert path.read_bytes().startswith(b"".join(kept))
    assert len(read_metrics(run_dir)) == len(kept) + 1
    if bad.get(kind):
        assert (run_dir / "damaged" / "metrics.jsonl").read_bytes() == bad[kind]
        assert str(run_dir / "damaged" / "metrics.jsonl") in said
    # From here on the history is whole again.
    assert checkpoints.load(run_dir)[1]["run"]["lines"] == len(kept) + 1
    with resumed(run_dir):
        assert "of the" not in capfd.readouterr().err


@pytest.mark.parametrize("change", [{"seed": 2}, {"env_id": "coinrun"}, {"wandb_id": "another"}])
def test_args_json_of_another_run_than_the_checkpoints_is_refused(change, run_dir, capfd):
    content = json.loads((run_dir / "args.json").read_text())
    (name, value), before = *change.items(), (run_dir / "metrics.jsonl").read_bytes()
    (content if name in content else content["args"])[name] = value
    if name == "env_id":
        content["args"][name] = value
    (run_dir / "args.json").write_text(json.dumps(content))
    for script, words in ((ppo, ["--resume", run_dir, "--wandb-mode", "disabled"]), (evaluate, [run_dir])):
        assert_refused(script, words, capfd, f"{run_dir}: {name} is '{value}'" if name != "seed" else "seed is 2")
    assert (run_dir / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("change", ["run deleted", "run renamed", "log deleted", "log replaced"])
def test_a_run_whose_files_are_taken_away_stops_at_its_next_checkpoint(change, run_dir):
    path = run_dir / "metrics.jsonl"

    def take_away_and_train(run):
        if change == "run deleted":
            shutil.rmtree(run_dir)
        elif change == "run renamed":
            run_dir.rename(run_dir.with_name("renamed"))
        else:
            path.unlink()
        if change == "log replaced":
            path.write_text("")
        train_until(run, [500])

    with pytest.raises(files.FailedError, match=r"metrics.jsonl was removed, .* at step 500"), resumed(run_dir) as run:
        take_away_and_train(run)
    assert run_dir.exists() == ("run" not in change)


def test_history_is_not_lost_where_there_is_no_room_to_mend_it(run_dir, monkeypatch):
    """As after kill -9 between what is set aside and what is written."""
    path = run_dir / "metrics.jsonl"
    bad = path.read_bytes() + b"cut"
    path.write_bytes(bad.replace(b'{"global_step"', b'{"global_stop"', 1))
    before, write = path.read_bytes(), files.atomic_write

    def refuse(one):
        if one == path:
            raise files.FullError("cannot write")
        return write(one)

    monkeypatch.setattr(files, "atomic_write", refuse)
    with pytest.raises(files.FullError), resumed(run_dir):
        pass
    assert path.read_bytes() == before
    assert (run_dir / "damaged" / "metrics.jsonl").read_bytes() == before


def test_files_set_aside_replace_nothing(tmp_path):
    for content in "abc":
        (tmp_path / "x").write_text(content)
        files.quarantine(tmp_path / "x", tmp_path)
        (tmp_path / "damaged" / "x").unlink() if content == "b" else None
    assert {path.read_text() for path in (tmp_path / "damaged").iterdir()} == {"b", "c"}


def test_a_runs_clock_continues_over_a_resume_whoever_sets_the_machines(tmp_path, monkeypatch):
    """It leaves out the time between."""
    path = write_run(tmp_path)
    first = [line["seconds"] for line in read_metrics(path, clocks=True)]
    saved, now = float(checkpoints.load(path)[1]["run"]["seconds"]), time.time
    monkeypatch.setattr(time, "time", lambda: now() - 7200)
    monkeypatch.setattr(time, "monotonic", lambda old=time.monotonic: old() + 1e6)  # and the machine had been off
    with resumed(path) as run:
        time.sleep(0.01)
        train_until(run, [500])
    lines = read_metrics(path, clocks=True)
    seconds = [line["seconds"] for line in lines]
    assert seconds[: len(first)] == first
    assert seconds == sorted(seconds)
    assert first[-1] <= saved < seconds[len(first)] < saved + 1000
    assert lines[-1]["time"] < lines[0]["time"]


# EVALUATION


def test_evaluation_of_a_run_without_a_checkpoint_is_refused_before_another_is_played(run_dir, tmp_path, capfd):
    begun = shutil.copytree(run_dir, tmp_path / "begun", ignore=shutil.ignore_patterns("checkpoints"))
    assert_refused(evaluate, [run_dir, begun], capfd, f"RUN_DIR {begun}", "no complete checkpoint")


def test_evaluation_of_no_run_of_ours_is_refused(run_dir, capfd):
    assert_refused(evaluate, [run_dir, "--episodes", "1" + "0" * 20], capfd, "--episodes 1" + "0" * 20, "to 1000000")
    args = json.loads((run_dir / "args.json").read_text())
    for change, part in (
        ({"script": "../x"}, "no script's name"),
        ({"script": "dqn_procgen"}, "dqn_procgen.py, which is not here"),
        ({"args": [1]}, "no arguments"),
        ({"args": args["args"] | {"num_steps": 0}}, "--num-steps 0"),
        ({"args": args["args"] | {"num_minibatches": 7}}, "--num-minibatches 7"),
        ({"args": args["args"] | {"gone": 3}}, "--gone"),
        ({"args": args["args"] | {"pool": "old"}}, "--pool: Input should be 'avg', "),
    ):
        (run_dir / "args.json").write_text(json.dumps(args | change))
        assert_refused(evaluate, [run_dir], capfd, f"RUN_DIR {run_dir}", part)
    for text in ("[" * 100_000, "[1]", "", "\0"):
        (run_dir / "args.json").write_text(text)
        assert_refused(evaluate, [run_dir], capfd, f"RUN_DIR {run_dir}", "give a run directory")


def test_an_eval_json_that_cannot_be_read_or_is_of_another_step_is_replaced(tmp_path, monkeypatch):
    (tmp_path / "eval.json").write_text("{")
    assert evaluate.read_results(tmp_path / "eval.json") == {}
    assert (tmp_path / "damaged" / "eval.json").read_text() == "{"  # what cannot be read is kept

    def play(**how):
        asked.append((how["levels"], how["seed"]))
        return envs.Evaluation(7, "test_levels", "", [], {"episodes": 4}, np.zeros((2, 64, 64, 3), np.uint8))

    asked = []
    monkeypatch.setattr(evaluate, "make_evaluate", lambda *_: play)
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


# SIGNALS


def test_a_signal_before_training_leaves_no_folder(tmp_path, monkeypatch, capfd):
    """It comes after the run directory is made."""
    monkeypatch.setattr(tracking, "start_tensorboard", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    code, said = answer(lambda args: open_run(args), ["--track", "tensorboard", "--run-dir", tmp_path / "runs"], capfd)
    assert (code, said) == (128 + signal.SIGTERM, ["stopped by SIGTERM"])
    assert not [*(tmp_path / "runs").iterdir()]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_closed_pipe_ends_a_run_as_a_signal_does(tmp_path, monkeypatch):
    """As with `2>&1 | head`: training ends with a checkpoint, and can be resumed."""
    reader, writer = os.pipe()
    say = runs.Run.print

    def say_to_nobody(run, sentence):
        os.close(reader)
        monkeypatch.undo()
        say(run, sentence)

    with os.fdopen(writer, "w") as pipe, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", pipe)
        monkeypatch.setattr(runs.Run, "print", say_to_nobody)
        with open_run(ppo.Args(**TINY | {"run_dir": str(tmp_path)})) as run:
            assert run.finished(0)
            run.save(0, STATE, {})
    assert run.stop == "SIGPIPE"
    assert checkpoints.steps_in(run.path) == [0]


@pytest.mark.skipif(os.getuid() != 0, reason="root alone becomes another user, and has no limit itself")
def test_a_user_with_too_few_processes_is_told_so():
    code = "import os, resource; from common import flags; resource.setrlimit(resource.RLIMIT_NPROC, (20, 20)); "
    code += "os.setuid(65534); flags._check_threads()"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert re.search(r"FailedError: cannot start \d+ threads, only \d+: raise the user's limit", ended.stderr)


def test_a_user_without_a_home_has_a_folder(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(files.Path, "home", mock.Mock(side_effect=RuntimeError("Could not determine home directory.")))
    assert files.own_folder() == files.own_folder()
