import csv
import dataclasses
import json
import math
import os
import pathlib
import pickle
import runpy
import shutil
import signal
import sys
import types
from unittest import mock

import pytest
from conftest import TINY, assert_refused, start, wait_for

from common import files, runs
from experiments import pbt, trials

OWN = "total_timesteps", "eval_episodes", "learning_rate", "wandb_mode"
SET = [f"{k}={v}" for k, v in TINY.items() if k not in OWN]
# The metric is a hyper-parameter, so that it is certain who is better: the larger gamma.
STUDY = [
    "-m", "experiments.pbt", "ppo_procgen.py", "--mutate", "gamma=0.9:0.999", "learning_rate=1e-4:1e-2:log",
    "--population", 2, "--generations", 2, "--interval", 128, "--metric", "charts/gamma", "--seed", 3, "--set", *SET,
]  # fmt: skip


def read_rows(out):
    if not (out / "results.csv").exists():
        return {}
    with (out / "results.csv").open(newline="") as file:
        return {(int(row["member"]), int(row["generation"])): row for row in csv.DictReader(file)}


@pytest.mark.slow
def test_a_clone_goes_on_with_its_donors_run_also_after_a_stop(tmp_path):
    (tmp_path / "work/1_thesis").mkdir(parents=True)
    process = start(*STUDY, "--out", tmp_path)
    begun = set()
    wait_for(lambda: begun.update(tmp_path.glob("work/*/output.txt")) or len(begun) == 3, process, 300)  # generation 2
    assert len(read_rows(tmp_path)) == 2
    process.send_signal(signal.SIGTERM)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    assert "stopped; the same command goes on" in output
    before = read_rows(tmp_path)

    process = start(*STUDY, "--out", tmp_path)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    rows = read_rows(tmp_path)
    assert sorted(rows) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert {key: rows[key] for key in before} == before
    for (_, generation), row in rows.items():
        assert 128 * generation <= int(row["global_step"]) < 128 * (generation + 1)
        assert 0.9 <= float(row["gamma"]) <= 0.999
        assert 1e-4 <= float(row["learning_rate"]) <= 1e-2
        assert row["gamma"] == row["charts/gamma"]
        assert not row["why"]

    donor, clone = sorted((0, 1), key=lambda i: float(rows[i, 1]["gamma"]), reverse=True)
    assert rows[clone, 2]["cloned_from"] == str(donor)
    assert rows[clone, 2]["gamma"] != rows[donor, 1]["gamma"] == rows[donor, 2]["gamma"]
    last = {i: trials.find_run(max((tmp_path / "members" / f"{i:05d}").glob("checkpoint_*"))) for i in (0, 1)}
    lines = {i: trials.read_metrics(run) for i, run in last.items()}
    first = sum(line["global_step"] <= int(rows[donor, 1]["global_step"]) for line in lines[donor])
    assert lines[clone][:first] == lines[donor][:first]  # their times too: it is the same file
    assert lines[clone][first:] != lines[donor][first:]
    for i in (0, 1):
        args = json.loads((last[i] / "args.json").read_text())["args"]
        assert args["seed"] == 3 + donor
        assert float(args["learning_rate"]) == float(rows[i, 2]["learning_rate"])
    assert (tmp_path / "pbt.png").stat().st_size > 10_000
    assert [path.name for path in tmp_path.glob("work/*")] == ["1_thesis"]  # which is not the study's
    assert f"best: member {max((0, 1), key=lambda i: float(rows[i, 2]['gamma']))}, " in output


@pytest.mark.parametrize(
    ("words", "names", "valid"),
    [
        (["dqn.py"], "PROGRAM dqn.py", "ppo_procgen.py"),
        (["hnppo_doorgym.py"], "PROGRAM hnppo_doorgym.py", "--total-timesteps"),
        (["ppo_procgen.py", "--mutate", "gamma"], "--mutate gamma", "name=low:high"),
        (["ppo_procgen.py", "--mutate", "gamma=0.9:much"], "--mutate gamma=0.9:much", "numbers"),
        (["ppo_procgen.py", "--mutate", "gamma=0.99:0.9"], "--mutate gamma=0.99:0.9", "less than high"),
        (["ppo_procgen.py", "--mutate", "gamma=nan:0.9"], "--mutate gamma=nan:0.9", "less than high"),
        (["ppo_procgen.py", "--mutate", "gamma=0:0.9:log"], "--mutate gamma=0:0.9:log", "above 0"),
        (["ppo_procgen.py", "--mutate", "gama=0.9:0.99"], "--mutate gama=0.9:0.99", "no flag --gama"),
        (["ppo_procgen.py", "--mutate", "gamma=0.9:1.1"], "--gamma '1.1'", "from 0 to 1"),
        (["ppo_procgen.py", "--mutate", "kl_coef=0.1:1"], "--mutate kl_coef", "keeps its own"),
        (["ppo_procgen.py", "--mutate", "hidden=16:64"], "--mutate hidden", "keeps its own"),
        (["ppo_procgen.py", "--mutate", "gamma=0.9:0.99", "--set", "gamma=0.9"], "--set gamma=0.9", "changes it"),
        (["ppo_procgen.py", "--mutate", "gamma=0.9:0.99", "gamma=0.5:0.6"], "--mutate gamma=0.5:0.6", "give one"),
        (["ppo_procgen.py", "--mutate"], "--mutate", "at least one"),
        (["ppo_procgen.py", "--mutate", "update_epochs=1.5:3.5"], "--mutate update_epochs=1.5:3.5", "whole ends"),
        (["ppo_procgen.py", "--set", "l2=0", "--set", "gae_lambda=0.9"], "--set: is given twice", "after one"),
        (["ppo_procgen.py", "--set", "num_envs"], "--set num_envs", "name=value"),
        (["ppo_procgen.py", "--set", "games=3"], "--set", "no flag games"),
        (["ppo_procgen.py", "--set", "seed=3"], "--set seed=3", "each run is given its own"),
        (["ppo_procgen.py", "--set", "resume=/x"], "--set resume=/x", "each run is given its own"),
        (["ppo_procgen.py", "--mutate", "wandb_mode=1:2"], "--mutate wandb_mode=1.0:2.0", "each run is given its own"),
        (["ppo_procgen.py", "--set", "num_envs=0"], "--num-envs 0", "1 or more"),
        (["ppo_procgen.py", "--interval", "0"], "--interval 0", "from 1"),
        (["ppo_procgen.py", "--population", "1"], "--population 1", "from 2"),
        (["ppo_procgen.py", "--generations", "0"], "--generations 0", "from 1"),
        (["ppo_procgen.py", "--quantile", "0.6"], "--quantile 0.6", "to 0.5"),
        (["ppo_procgen.py", "--jobs", "2", "--address", "auto"], "--jobs 2", "--address"),
        (["ppo_procgen.py", "--cpus", "0.5"], "--cpus 0.5", "--address"),
        (["ppo_procgen.py", "--address", "127.0.0.1:1"], "--address 127.0.0.1:1", "Ray does not start"),
        (["ppo_procgen.py", "--out", "/dev/null/study"], "--out /dev/null/study", "cannot write"),
    ],
)
def test_bad_input_is_answered_in_one_sentence(words, names, valid, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(pbt.ray, "init", None)
    words = words if "--out" in words else [*words, "--out", str(tmp_path)]
    assert_refused(pbt, words, capfd, names, valid)


def test_a_study_goes_on_only_as_it_was(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(pbt.ray, "init", None)
    known = dataclasses.asdict(pbt.Args("ppo_procgen.py")) | {"id": "a" * 32}
    assert known["population"] != 5
    (tmp_path / "args.json").write_text(json.dumps(known | {"population": 5}))
    with pytest.raises(SystemExit):
        runs.cli(pbt.Args, pbt.main, ["ppo_procgen.py", "--out", str(tmp_path)])
    said = capfd.readouterr().err
    assert f"--population {known['population']}: the study in {tmp_path} has 5" in said
    assert "another --out" in said


@pytest.mark.parametrize("text", ["[]", "{", "1", '{"id": "*"}', "[" * 100_000, "\0"])
def test_damaged_arguments_are_answered_in_one_sentence(text, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(pbt.ray, "init", None)
    (tmp_path / "args.json").write_text(text)
    words = ["ppo_procgen.py", "--out", tmp_path]
    assert_refused(pbt, words, capfd, f"--out {tmp_path / 'args.json'}: ", "give another folder")


@pytest.mark.parametrize("text", ["{}", "[1]", "[1, 2, 3]", '["1", 2]', "["])
def test_a_damaged_checkpoint_is_answered_in_one_sentence(text, tmp_path):
    (tmp_path / "member.json").write_text("[1, 2]")
    assert pbt.read_owner(tmp_path) == (1, 2)
    (tmp_path / "member.json").write_text(text)
    with pytest.raises(runs.UsageError, match=str(tmp_path)):
        pbt.read_owner(tmp_path)


class Reached(Exception):
    """Ray would be started."""


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """A study of this user that Ray would go on with; words to go on, and what its tuner.pkl would write if it were
    read."""

    def start_ray(*given, **how):
        raise Reached

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(pbt.ray, "init", start_ray)
    words = ["ppo_procgen.py", "--out", str(tmp_path / "study")]
    with pytest.raises(Reached):
        runs.cli(pbt.Args, pbt.main, words)
    (tmp_path / "study/members/0").mkdir(parents=True)
    (tmp_path / "study/members/tuner.pkl").write_bytes(pickle.dumps(Payload(tmp_path / "executed")))
    with pytest.raises(Reached):
        runs.cli(pbt.Args, pbt.main, words)
    return words, tmp_path / "executed"


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


def copy(study):
    shutil.copytree(study, study.with_name("other"))
    shutil.rmtree(study)
    study.with_name("other").rename(study)


def rename(study):
    args = json.loads((study / "args.json").read_text())
    (study / "args.json").write_text(json.dumps(args | {"id": "0" * 32}))


@pytest.mark.parametrize(
    "change",
    [
        copy,
        rename,
        lambda study: (study / "args.json").unlink(),
        lambda study: shutil.rmtree(study.with_name("cache")),
        lambda study: os.chown(study / "members/tuner.pkl", 12345, -1),
        lambda study: os.chown(study / "members/0", 12345, -1),
    ],
    ids=["a copy", "another id", "no arguments", "no token", "another user's file", "another user's folder"],
)
def test_a_strangers_study_is_refused_and_not_executed(begun, change, tmp_path, capfd):
    words, executed = begun
    try:
        change(tmp_path / "study")
    except PermissionError:
        pytest.skip("only root can give files away")
    capfd.readouterr()
    assert_refused(pbt, words, capfd, f"--out {tmp_path / 'study'}: ", "where it was begun, or give another --out")
    assert not executed.exists()
    pickle.loads((tmp_path / "study/members/tuner.pkl").read_bytes())
    assert executed.exists()  # it would have been


def test_damaged_results_are_answered_in_one_sentence(begun, tmp_path, capfd):
    """Good ones are read; a text where a number should be, a column less and a cell more are refused."""
    path, columns = tmp_path / "study/results.csv", ["gamma", "learning_rate", "charts/episodic_return"]
    head = f"member,generation,global_step,{','.join(columns)},cloned_from,hours,why\n"
    row = "0,1,128,0.99,1e-05,-2.5,1,0.1,\n"
    path.write_text(head + row + "1,1,,0.99,1e-05,,,,lost\n")
    assert [row["hours"] for row in pbt.read_rows(path.parent, columns)] == ["0.1", ""]
    capfd.readouterr()
    for text in (head + row.replace("128", "much"), head.replace(",why", "") + row, head + "1," + row, head + "0,1\n"):
        path.write_text(text)
        assert_refused(pbt, begun[0], capfd, f"--out {path}: ", "give another folder")


def test_only_own_folders_are_removed(tmp_path):
    """A member's, and the study's when it is over; what a user has put there stays."""
    for name in ("1_thesis", "abc_1_x", "abc_11_x", "abd_1_x"):
        (tmp_path / "work" / name).mkdir(parents=True)
    pbt.remove_work(tmp_path, "abc_1_")
    assert {path.name for path in tmp_path.glob("work/*")} == {"1_thesis", "abc_11_x", "abd_1_x"}
    pbt.remove_work(tmp_path, "abc_")
    assert {path.name for path in tmp_path.glob("work/*")} == {"1_thesis", "abd_1_x"}


def test_without_ray_it_says_what_to_install(monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(pbt.__file__)
    assert stopped.value.code == 2
    assert capfd.readouterr().err == "error: experiments/pbt.py needs Ray Tune: pip install '.[ray]'\n"


def test_values_stay_in_their_range():
    gamma, steps = pbt.Range(0.9, 0.999, False, False), pbt.Range(1, 6, True, True)
    assert gamma.clamp(0.99 * 1.2) == 0.999
    assert gamma.clamp(0.99 * 0.8) == 0.9
    assert steps.clamp(4 * 1.2) == 5
    draws = [gamma.draw() for _ in range(100)]
    assert 0.9 <= min(draws) < max(draws) <= 0.999
    assert {steps.draw() for _ in range(200)} == {1, 2, 3, 4, 5, 6}


def test_evaluations_are_played_where_members_are_compared_by_them():
    kinds = {"eval_episodes": int}
    assert pbt.read_flags(pbt.Args("ppo_procgen.py"), kinds)["eval_episodes"] == 0
    by_test = pbt.Args("ppo_procgen.py", metric="eval/test_levels/mean_return")
    assert "eval_episodes" not in pbt.read_flags(by_test, kinds)


def test_a_generation_of_failures_is_the_last(tmp_path):
    results = pbt.Results(pbt.Args("ppo_procgen.py", population=2), tmp_path, ["gamma"])
    results.rows = {(0, 2): {"why": "x"}, (1, 2): {"why": ""}}
    assert not results.stop_all()
    results.rows[1, 2]["why"] = "y"
    assert results.stop_all()


@pytest.mark.parametrize(("goal", "worst"), [("maximize", -math.inf), ("minimize", math.inf)])
def test_a_member_that_fails_is_the_worst(goal, worst, tmp_path, monkeypatch):
    """And without GPUs it takes none."""

    def fail(*given, **how):
        raise RuntimeError("bad")

    rows, context = [], types.SimpleNamespace(get_trial_id=lambda: "x_00001")
    monkeypatch.setattr(trials, "run", fail)
    monkeypatch.setattr(pbt.tune, "get_context", lambda: context)
    monkeypatch.setattr(pbt.tune, "get_checkpoint", lambda: None)
    monkeypatch.setattr(pbt.tune, "report", lambda row, checkpoint: rows.append(row))
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    study = {"id": "a", "out": str(tmp_path), "gpus": 0, "generations": 1, "interval": 9, "program": "p"}
    study |= {"flags": {}, "ranges": [], "metric": "m", "goal": goal}
    pbt.member({"seed": 0, "study": study})
    assert (rows[0]["score"], rows[0]["why"], os.environ["JAX_PLATFORMS"]) == (worst, "bad", "cpu")


@pytest.fixture
def no_ray(tmp_path, monkeypatch):
    """Ray as on a machine without GPUs, of which nothing is started; what the scheduler is given."""
    seen = {}

    def stop(**given):
        seen.update(given)
        raise Reached

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(pbt.ray, "init", lambda *_, **how: None)
    monkeypatch.setattr(pbt.ray, "cluster_resources", dict)
    monkeypatch.setattr(pbt.signal, "signal", lambda *_: None)
    monkeypatch.setattr(pbt, "Generations", stop)
    return seen


def test_the_scheduler_has_the_goal(no_ray, tmp_path):
    words = ["ppo_procgen.py", "--goal", "minimize", "--quantile", "0.4", "--out", str(tmp_path / "new")]
    with pytest.raises(Reached):
        runs.cli(pbt.Args, pbt.main, words)
    assert (no_ray["mode"], no_ray["quantile_fraction"]) == ("min", 0.4)


def test_after_a_stop_waiting_members_are_donors_and_one_that_is_behind_is_none():
    """Ray's own finds no checkpoint of a member that waits to be started again, and compares scores of any time."""
    draws = {"hyperparam_mutations": {"gamma": lambda: 0.9}, "quantile_fraction": 0.5}
    scheduler = pbt.Generations("generation", "score", "max", perturbation_interval=1, synch=True, **draws)
    members = []
    for score, generation in ((0, 10), (1, 10), (2, 10), (9, 4)):
        members.append(mock.Mock(status="PENDING", checkpoint=f"of {score}", **{"is_finished.return_value": False}))
        scheduler._trial_state[members[-1]] = types.SimpleNamespace(
            last_score=score, last_train_time=generation, last_checkpoint=None
        )
    lower, upper = scheduler._quantiles()
    assert (lower, upper) == (members[:2], members[2:3])
    scheduler._checkpoint_or_exploit(members[2], None, upper, lower)
    assert scheduler._trial_state[members[2]].last_checkpoint == "of 2"
    scheduler._trial_state[members[3]].last_train_time = 11
    assert scheduler._quantiles()[1] == members[3:]


def test_a_study_without_its_gpus_is_not_begun(no_ray, tmp_path, capfd):
    words = ["ppo_procgen.py", "--out", str(tmp_path / "new")]
    assert_refused(pbt, [*words, "--gpus", 0.5], capfd, "--gpus 0.5", "there are 0 here")
    with pytest.raises(Reached):
        runs.cli(pbt.Args, pbt.main, [*words, "--gpus", "0"])


def test_a_clone_has_values_beside_its_donors():
    """In a logarithm a fifth less or more, else a tenth of the range up or down, whole numbers the next at least; and
    from an end of the range there is a way back."""

    def moves(r, value):
        return {r.move(value) for _ in range(50)}

    assert moves(pbt.Range(0.9, 1.0, False, False), 0.95) == {0.94, 0.96}
    assert moves(pbt.Range(0.9, 1.0, False, False), 1.0) == {0.99, 1.0}
    assert moves(pbt.Range(1e-4, 1e-2, True, False), 1e-3) == {8e-4, 1.2e-3}
    assert moves(pbt.Range(0, 0.02, False, False), 0) == {0, 0.002}
    for log in (False, True):
        assert moves(pbt.Range(1, 6, log, True), 2) == {1, 3}
    assert moves(pbt.Range(100, 1000, False, True), 500) == {410, 590}


def test_one_process_holds_a_study(tmp_path, capfd):
    with files.lock_run(tmp_path):
        assert_refused(pbt, ["ppo_procgen.py", "--out", tmp_path], capfd, f"--out {tmp_path}: process ", "is at it")
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
