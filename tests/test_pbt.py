"""Population-based training: clones, stops and resumes, ownership of a study, bad input."""

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
from experiments import pbt, records, trials

OWN = "total_timesteps", "eval_episodes", "learning_rate", "wandb_mode"
SET = [f"{k}={v}" for k, v in TINY.items() if k not in OWN]
# The metric is a hyper-parameter, so that the larger gamma is certainly better.
STUDY = [
    "-m", "experiments.pbt", "ppo_procgen.py", "--mutate", "gamma=0.9:0.999", "learning_rate=1e-4:1e-2:log",
    "--population", 2, "--generations", 2, "--interval", 128, "--metric", "charts/gamma", "--seed", 3, "--set", *SET,
]  # fmt: skip


def read_rows(out):
    return {(int(row["member"]), int(row["generation"])): row for row in records.read_rows(out / "results.csv")}


def main(words):
    runs.cli(pbt.Args, pbt.main, [*map(str, words)])


@pytest.mark.slow
def test_clone_continues_the_run_of_its_donor_also_after_a_stop(tmp_path):
    (tmp_path / "work/1_thesis").mkdir(parents=True)
    process = start(*STUDY, "--out", tmp_path)
    begun = set()
    wait_for(lambda: begun.update(tmp_path.glob("work/*/output.txt")) or len(begun) == 3, process, 300)  # generation 2
    assert len(read_rows(tmp_path)) == 2
    process.send_signal(signal.SIGTERM)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    assert "stopped; repeat the command to continue" in output
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


def test_donors_after_a_stop_include_waiting_members_but_none_that_is_behind():
    """Ray's own scheduler finds no checkpoint of a waiting member, and compares scores of different times."""
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


def test_failed_members_are_the_worst_and_a_generation_of_them_is_the_last(tmp_path, monkeypatch):
    def fail(*given, **how):
        raise RuntimeError("bad")

    rows, context = [], types.SimpleNamespace(get_trial_id=lambda: "x_00001")
    monkeypatch.setattr(trials, "run", fail)
    monkeypatch.setattr(pbt.tune, "get_context", lambda: context)
    monkeypatch.setattr(pbt.tune, "get_checkpoint", lambda: None)
    monkeypatch.setattr(pbt.tune, "report", lambda row, checkpoint: rows.append(row))
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    study = {"id": "a", "out": str(tmp_path), "gpus": 0, "generations": 1, "interval": 9, "program": "p"}
    for goal, worst in (("maximize", -math.inf), ("minimize", math.inf)):
        pbt.member({"seed": 0, "study": study | {"flags": {}, "ranges": [], "metric": "m", "goal": goal}})
        assert (rows[-1]["score"], rows[-1]["why"], os.environ["JAX_PLATFORMS"]) == (worst, "bad", "cpu")  # no GPU
    results = pbt.Results(pbt.Args("ppo_procgen.py", population=2), tmp_path, {})
    results.rows = {(0, 2): {"why": "x"}, (1, 2): {"why": ""}}
    assert not results.stop_all()
    results.rows[1, 2]["why"] = "y"
    assert results.stop_all()


def test_values_are_drawn_within_their_range():
    pbt.random.seed(0)
    draws = [pbt.Range(0.9, 0.999, False, False).draw() for _ in range(100)]
    assert 0.9 <= min(draws) < 0.92 < 0.98 < max(draws) <= 0.999
    assert {pbt.Range(1, 6, True, True).draw() for _ in range(200)} == {1, 2, 3, 4, 5, 6}
    draws = [pbt.Range(1e-4, 1e-2, True, False).draw() for _ in range(300)]
    assert 120 < sum(x < 1e-3 for x in draws) < 180  # half of them, in the logarithm


@pytest.mark.parametrize(
    ("ends", "value", "neighbours"),
    [
        ((0.9, 1.0, False, False), 0.95, {0.94, 0.96}),  # a tenth of the range
        ((0.9, 1.0, False, False), 1.0, {0.99, 1.0}),
        ((0, 0.02, False, False), 0, {0, 0.002}),
        ((1e-4, 1e-2, True, False), 1e-3, {8e-4, 1.2e-3}),  # a fifth of the value
        ((1, 6, True, True), 2, {1, 3}),
        ((1, 6, False, True), 2, {1, 3}),  # integers: at least the next
        ((100, 1000, False, True), 500, {410, 590}),
    ],
)
def test_perturbed_value_is_a_neighbour_in_its_range(ends, value, neighbours):
    assert {pbt.Range(*ends).perturb(value) for _ in range(50)} == neighbours


def test_evaluation_is_on_only_if_members_are_compared_by_it():
    flags = {"checkpoint_every": 400_000, "keep_checkpoints": 1, "total_timesteps": 8_000_000}
    assert pbt.check_args(pbt.Args("ppo_procgen.py"))[1] == flags | {"eval_episodes": 0}
    by_test = pbt.Args("ppo_procgen.py", metric="eval/test_levels/mean_return")
    assert pbt.check_args(by_test)[1] == flags


def test_work_folders_of_others_are_not_removed(tmp_path):
    for name in ("1_thesis", "abc_1_x", "abc_11_x", "abd_1_x"):
        (tmp_path / "work" / name).mkdir(parents=True)
    pbt.remove_work(tmp_path, "abc_1_")
    assert {path.name for path in tmp_path.glob("work/*")} == {"1_thesis", "abc_11_x", "abd_1_x"}
    pbt.remove_work(tmp_path, "abc_")
    assert {path.name for path in tmp_path.glob("work/*")} == {"1_thesis", "abd_1_x"}


# BAD INPUT


@pytest.mark.parametrize(
    ("words", "names", "valid"),
    [
        (["dqn.py"], "program dqn.py", "ppo_procgen.py"),
        (["hnppo_doorgym.py"], "SCRIPT hnppo_doorgym.py", "--total-timesteps"),
        (["--mutate"], "--mutate", "at least one"),
        (["--mutate", "gamma=nan:0.9"], "--mutate gamma=nan:0.9", "less than high"),
        (["--mutate", "gamma=0:0.9:log"], "--mutate gamma=0:0.9:log", "above 0"),
        (["--mutate", "rnd_coef=0:1"], "--mutate rnd_coef=0:", "above 0"),
        (["--mutate", "gama=0.9:0.99"], "--mutate gama=0.9:0.99", "no flag gama"),
        (["--mutate", "gamma=0.9:1.1"], "--gamma '1.1'", "from 0 to 1"),
        (["--mutate", "kl_coef=0.1:1"], "--mutate kl_coef", "keeps its own"),
        (["--mutate", "gamma=0.9:0.99", "--set", "gamma=0.9"], "--set gamma=0.9", "changes it"),
        (["--mutate", "gamma=0.9:0.99", "gamma=0.5:0.6"], "--mutate gamma=0.5:0.6", "give one"),
        (["--mutate", "update_epochs=1.5:3.5"], "--mutate update_epochs=1.5:3.5", "integer bounds"),
        (["--mutate", "wandb_mode=1:2"], "--mutate wandb_mode=1.0:2.0", "each run is given its own"),
        (
            ["impala_procgen.py", "--mutate", "num_steps=9:99", "--set", "replay_fraction=1"],
            "num_steps",
            "keeps its own",
        ),
        (["--set", "num_envs=0"], "--num-envs 0", "1 or more"),
        (["--population", "1"], "--population 1", "from 2"),
        (["--quantile", "0.6"], "--quantile 0.6", "to 0.5"),
        (["--jobs", "2", "--address", "auto"], "--jobs 2", "--address"),
        (["--address", "127.0.0.1:1"], "--address 127.0.0.1:1", "Ray does not start"),
        (["--out", "/dev/null/study"], "--out /dev/null/study", "cannot write"),
    ],
)
def test_bad_flag_is_refused_in_one_sentence(words, names, valid, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(pbt.ray, "init", None)
    words = words if words[0].endswith(".py") else ["ppo_procgen.py", *words]
    words = words if "--out" in words else [*words, "--out", tmp_path]
    assert_refused(pbt, words, capfd, names, valid)


@pytest.mark.parametrize("text", ["[]", "{", "1", '{"id": "*"}', "[" * 100_000, "\0", "of another study"])
def test_args_json_that_is_damaged_or_of_another_study_is_refused(text, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(pbt.ray, "init", None)
    known = dataclasses.asdict(pbt.Args("ppo_procgen.py")) | {"id": "a" * 32}
    other = json.dumps(known | {"population": 5})
    (tmp_path / "args.json").write_text(other if text == "of another study" else text)
    parts = f"--out {tmp_path / 'args.json'}: ", "give another folder"
    if text == "of another study":
        parts = f"--population {known['population']}: the study in {tmp_path} has 5", "another --out"
    assert_refused(pbt, ["ppo_procgen.py", "--out", tmp_path], capfd, *parts)


@pytest.mark.parametrize("text", ["{}", "[1]", "[1, 2, 3]", '["1", 2]', "["])
def test_damaged_checkpoint_is_refused_in_one_sentence(text, tmp_path):
    (tmp_path / "member.json").write_text("[1, 2]")
    assert pbt.read_owner(tmp_path) == (1, 2)
    (tmp_path / "member.json").write_text(text)
    with pytest.raises(runs.UsageError, match=str(tmp_path)):
        pbt.read_owner(tmp_path)


class Reached(Exception):
    """Ray would train."""


@pytest.fixture
def no_ray(tmp_path, monkeypatch):
    """Ray on a machine without GPUs, which starts nothing; what the scheduler of a new population is given."""
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


@pytest.fixture
def begun(no_ray, tmp_path, monkeypatch):
    """A study of this user that Ray would continue: its command line, and the file that tuner.pkl makes if it is
    unpickled."""
    words = ["ppo_procgen.py", "--out", str(tmp_path / "study")]
    with pytest.raises(Reached):
        main(words)
    (tmp_path / "study/members/0").mkdir(parents=True)
    (tmp_path / "study/members/tuner.pkl").write_bytes(pickle.dumps(Payload(tmp_path / "executed")))
    monkeypatch.setattr(pbt.ray, "init", lambda *_, **how: pbt.Generations())
    with pytest.raises(Reached):
        main(words)
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
def test_study_of_another_user_or_place_is_refused_and_not_unpickled(begun, change, tmp_path, capfd):
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


def test_damaged_results_csv_is_refused_in_one_sentence(begun, tmp_path, capfd):
    """Text in place of a number, a missing column, a cell too many or too few."""
    path, columns = tmp_path / "study/results.csv", ["gamma", "learning_rate", "charts/episodic_return"]
    head = f"member,generation,global_step,{','.join(columns)},cloned_from,hours,why\n"
    row = "0,1,128,0.99,1e-05,-2.5,1,0.1,\n"
    path.write_text(head + row + "1,1,,0.99,1e-05,,,,lost\n")
    assert [row["hours"] for row in pbt.read_rows(path.parent, columns)] == ["0.1", ""]
    capfd.readouterr()
    for text in (head + row.replace("128", "much"), head.replace(",why", "") + row, head + "1," + row, head + "0,1\n"):
        path.write_text(text)
        assert_refused(pbt, begun[0], capfd, f"--out {path}: ", "give another folder")


def test_missing_ray_is_reported_with_the_command_that_installs_it(monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(pbt.__file__)
    assert stopped.value.code == 2
    assert capfd.readouterr().err == "error: experiments/pbt.py needs Ray Tune: pip install '.[ray]'\n"


def test_scheduler_gets_goal_and_quantile_if_the_gpus_are_there(no_ray, tmp_path, capfd):
    words = ["ppo_procgen.py", "--out", tmp_path / "new"]
    assert_refused(pbt, [*words, "--gpus", 0.5], capfd, "--gpus 0.5", "there are 0 here")
    with pytest.raises(Reached):
        main([*words, "--gpus", "0", "--goal", "minimize", "--quantile", "0.4"])
    assert (no_ray["mode"], no_ray["quantile_fraction"]) == ("min", 0.4)


def test_study_locked_by_another_process_is_refused(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(pbt.ray, "init", None)
    with files.lock_run(tmp_path):
        assert_refused(
            pbt, ["ppo_procgen.py", "--out", tmp_path], capfd, f"--out {tmp_path}: process ", "is running it"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
