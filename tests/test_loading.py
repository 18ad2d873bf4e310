"""Nothing that is in a file is executed when the file is read: sweeps, JSON, metrics, tables and checkpoints."""

import contextlib
import json
import pickle
import sys

import numpy as np
import pytest
from conftest import assert_refused

import evaluate
import ppo_procgen as ppo
from common import checkpoints, runs
from experiments import pbt, plot, reproduce, sweep, trials

COMMANDS = "pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork"
CODE = "exec", "compile", "import"
MARKER = "of_a_hostile_file"
seen = []
watching = False


def look(event, given):
    """Notes commands, and code that has the marker in it."""
    if watching and (event in COMMANDS or (event in CODE and MARKER in f"{given} {getattr(given[0], 'co_names', '')}")):
        seen.append((event, repr(given)[:200]))


sys.addaudithook(look)  # for as long as the process lives


@contextlib.contextmanager
def watched(*answers):
    """What may be raised are UsageError and other `answers`."""
    global watching
    seen.clear()
    watching = True
    try:
        with contextlib.suppress(runs.UsageError, *answers):
            yield
    finally:
        watching = False


class Payload:
    """What unpickles it executes a command."""

    def __init__(self, path):
        self.code = f"{MARKER} = open({str(path)!r}, 'w')"

    def __reduce__(self):
        return exec, (self.code,)


def hostile(path):
    """Contents that make a file at `path` if they are taken for code, YAML's objects or pickles."""
    code = Payload(path).code
    reduced = {"py/object/apply": "builtins.exec", "__reduce__": ["builtins.exec", code], "__class__": code}
    return [
        f"!!python/object/apply:builtins.exec [{json.dumps(code)}]",
        f"parameters: !!python/object/new:os.system [{json.dumps(f'touch {path}')}]",
        f"!!python/module:{MARKER}", f"!!python/name:{code}", code, f"__import__('os').system({f'touch {path}'!r})",
        json.dumps(reduced), json.dumps([reduced]), json.dumps({"script": code, "args": reduced | {"env_id": code}}),
        pickle.dumps(Payload(path), 0).decode(), pickle.dumps(Payload(path)),
    ]  # fmt: skip


def read_study(folder):
    (folder / "s.yaml").write_text("program: ppo_procgen.py\nmethod: grid\nmetric: {name: x}\nparameters: {}\n")
    args = sweep.Args(str(folder / "s.yaml"))
    sweep.open_study(args, sweep.read_sweep(args.sweep), "s", folder)


LOADERS = {
    "s.yaml": lambda folder: sweep.read_sweep(str(folder / "s.yaml")),
    "s": lambda folder: sweep.read_sweep(str(folder / "s")),
    "study.json": read_study,
    "args.json": lambda folder: runs.saved_args(ppo.Args, str(folder), "RUN_DIR"),
    "args.json of a plot": lambda folder: plot.read_run(str(folder)),
    "args.json of a study": lambda folder: pbt.main(pbt.Args("ppo_procgen.py", out=str(folder))),
    "metrics.jsonl": lambda folder: trials.values_of(folder, "x"),
    "progress.json": reproduce.read_progress,
    "member.json": pbt.read_owner,
    "eval.json": lambda folder: evaluate.read_results(folder / "eval.json"),
    "results.csv": lambda folder: reproduce.read_results(reproduce.Args("results", out=str(folder))),
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_file_of_code_is_not_executed(name, tmp_path, monkeypatch):
    monkeypatch.setattr(pbt.ray, "init", None)
    monkeypatch.setattr(pbt, "check_args", lambda args: ({}, {}))
    for content in hostile(tmp_path / "executed"):
        path = tmp_path / name.split()[0]
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with watched():
            LOADERS[name](tmp_path)
        assert not seen
        assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"tyro_write_completion": ["bash", "executed"]}, {"env_id": ["bigfish", "--wandb-mode", "online"]},
        {"env_id": "--help"}, {"run_dir": 1}, {"num_envs": "4"}, {"num_envs": None}, {"seed": True},
    ],
)  # fmt: skip
def test_args_json_of_a_stranger_sets_fields_alone(change, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "args.json").write_text(json.dumps({"script": "ppo_procgen", "args": {"env_id": "bigfish"} | change}))
    with pytest.raises(runs.UsageError, match=f"--{next(iter(change)).replace('_', '-')}: "):
        runs.saved_args(ppo.Args, str(tmp_path), "RUN_DIR")
    assert [path.name for path in tmp_path.iterdir()] == ["args.json"]


def test_escape_sequences_of_a_stranger_do_not_reach_the_terminal(tmp_path, capfd):
    content = {"script": "ppo_procgen", "args": {"\x1b]0;title\x07": 1}}
    (tmp_path / "args.json").write_text(json.dumps(content))
    assert_refused(evaluate, [tmp_path], capfd, r"--\x1b]0;title\x07: ")


def test_the_watch_on_code_that_is_executed_sees_it(tmp_path):
    with watched():
        pickle.loads(pickle.dumps(Payload(tmp_path / "executed")))
    assert {event for event, _ in seen} >= {"pickle.find_class", "exec"}
    assert (tmp_path / "executed").exists()


def test_a_checkpoint_of_code_is_not_executed(tmp_path):
    """Whichever of its files is hostile; a whole one is read."""
    state = {"state": {"x": np.arange(3), "y": np.float32(2)}, "run": {"lines": np.int64(1)}}
    (tmp_path / "good" / "checkpoints").mkdir(parents=True)
    checkpoints.save(tmp_path / "good", 7, state, keep=1)
    step, tree = checkpoints.load(str(tmp_path / "good"))  # what loading imports and starts itself, it has now
    assert step == 7
    np.testing.assert_array_equal(tree["state"]["x"], [0, 1, 2])
    files = [path for path in (tmp_path / "good").rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        content = path.read_bytes()
        for bad in hostile(tmp_path / "executed")[-5:]:
            path.write_bytes(bad if isinstance(bad, bytes) else bad.encode())
            with watched():
                checkpoints.load(str(tmp_path / "good"))
            assert not seen, path
            assert not (tmp_path / "executed").exists(), path
        path.write_bytes(content)
