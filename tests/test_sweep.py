"""Sweeps: the files, as W&B and as Optuna run them, a trial of each kind, kills, failures, two processes, pruning."""

import csv
import importlib
import io
import json
import re
import signal
import textwrap
import threading
from datetime import date
from pathlib import Path

import numpy as np
import optuna
import pytest
import tyro
import yaml
from conftest import ROOT, TINY, assert_refused, assert_same_run, run_here, start, wait_for
from matplotlib.figure import Figure
from matplotlib.text import Text
from optuna.trial import TrialState
from rich.console import Console
from sqlalchemy.exc import SQLAlchemyError

import hnppo_doorgym
import ppo_procgen
from common import files, runs
from experiments import sweep, trials

FILES = sorted((ROOT / "sweeps").glob("*.yaml"))
# Small enough to end in seconds. What a file sweeps over is left to it, but for the game: bigfish's episodes are short.
PROCGEN = {
    "env_id": "bigfish",
    "num_envs": 12,
    "encoder": "nature",
    "downsample": "auto",
    "pool": "flatten",
    "width": 1,
    "hidden": 16,
    "eval_episodes": 4,
    "num_devices": 1,
}
SMALL = {
    "ppo_procgen.py": PROCGEN | {"num_steps": 64, "num_minibatches": 2, "update_epochs": 1, "total_timesteps": 1000},
    "rnd_montezuma.py": {"num_envs": 4, "num_steps": 64, "num_minibatches": 2, "update_epochs": 1, "channels": "4,4,4",
                         "hidden": 16, "predictor_depth": 0, "obs_norm_init_steps": 4, "total_timesteps": 3000,
                         "num_devices": 1},
    "hnppo_doorgym.py": {"task_timesteps": 512, "num_envs": 4, "num_worlds": 4, "num_minibatches": 1,
                         "update_epochs": 1, "eval_every": 1, "eval_episodes": 4},
}  # fmt: skip
TINY_GRID = {
    "program": "ppo_procgen.py",
    "method": "grid",
    "metric": {"name": "charts/episodic_return", "goal": "maximize"},
    "parameters": {name: {"value": value} for name, value in TINY.items() if name != "wandb_mode"}
    | {"gap_stack": {"values": [True, False]}},
}


def write_sweep(path, **changes):
    path.write_text(yaml.safe_dump(TINY_GRID | changes))
    return path


def read_results(out):
    with (out / "results.csv").open() as file:
        return list(csv.DictReader(file))


def cells_of(content):
    """Cells of a sweep file in which every two parameters meet with each pair of their first and last values."""
    first, last = {}, {}
    for name, spec in content["parameters"].items():
        values = [spec["value"]] if "value" in spec else spec.get("values") or [spec["min"], spec["max"]]
        first[name], last[name] = str(values[0]), str(values[-1])
    swept = [name for name in first if first[name] != last[name]]
    others = [cell | {name: other[name]} for cell, other in ((first, last), (last, first)) for name in swept]
    return [first, last, *others]


# THE FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_valid_for_wandb_and_the_script(path, monkeypatch):
    """In W&B's grammar, and the script takes each value as `wandb agent` gives it: --name=value, True or False."""
    content = sweep.read_sweep(str(path))
    assert path.read_text().startswith("# ")
    assert set(content) <= {"program", "method", "metric", "parameters", "early_terminate"}
    assert set(content["metric"]) == {"name", "goal"}
    assert content["metric"]["goal"] in ("maximize", "minimize")
    assert (content["method"] == "bayes") == ("early_terminate" in content)
    for spec in content["parameters"].values():
        assert set(spec) in ({"value"}, {"values"}, {"min", "max"}, {"min", "max", "distribution"})
    source = (ROOT / content["program"]).read_text() + (ROOT / "common/envs.py").read_text()
    assert content["metric"]["name"].split("/")[-1] in source
    script = importlib.import_module(path_stem := Path(content["program"]).stem)
    seen = []
    monkeypatch.setattr(script, "main", lambda args: seen.append(args))
    script.main.__module__ = path_stem
    for cell in cells_of(content):
        runs.cli(script.Args, script.main, trials.words_of(cell))
        runs.check_args(seen[-1], script.SCRIPT)
        for name, value in cell.items():
            kept = getattr(seen[-1], name if hasattr(seen[-1], name) else name + "_")
            assert kept == float(value) if isinstance(kept, float) else str(kept) == value


def first_of_its_kind():
    """A file for each kind of game, of one script."""
    files = {yaml.safe_load(path.read_text())["program"]: path for path in reversed(FILES)}
    return [files[program] for program in SMALL]


@pytest.mark.slow
@pytest.mark.parametrize("path", first_of_its_kind(), ids=lambda path: path.stem)
def test_a_file_runs(path, tmp_path, monkeypatch):
    """One short trial on the real game, and the objective under the name that the script logs."""
    monkeypatch.setattr(trials, "run", run_here)
    content = yaml.safe_load(path.read_text())
    swept = [name for name, spec in content["parameters"].items() if "value" not in spec and name != "env_id"]
    small = {name: value for name, value in SMALL[content["program"]].items() if name not in swept}
    if "eval_episodes" in small and not content["metric"]["name"].startswith("eval/"):
        small["eval_episodes"] = 0
    words = tuple(f"{name}={value}" for name, value in small.items())
    args = sweep.Args(sweep=str(path), count=1, out=str(tmp_path / "out"), set=words)
    trial = sweep.main(args).trials[0]
    assert trial.state.name == "COMPLETE", trial.user_attrs
    (row,) = read_results(tmp_path / "out")
    assert float(row[content["metric"]["name"]]) == trial.value == trial.intermediate_values[int(row["logged"])]


def test_booleans_as_wandb_agent_gives_them():
    for words, expected in (
        (["--gap_stack=False", "--normalize_rewards=True"], (False, True)),
        (["--gap-stack=true", "--normalize-rewards=false"], (True, False)),
        (["--no-gap-stack", "--normalize-rewards"], (False, True)),
    ):
        args = tyro.cli(ppo_procgen.Args, args=runs.plain_booleans(ppo_procgen.Args, words))
        assert (args.gap_stack, args.normalize_rewards) == expected
    words = ["--method=finetune", "--chunked=True", "--tasks=0,1"]
    assert tyro.cli(hnppo_doorgym.Args, args=runs.plain_booleans(hnppo_doorgym.Args, words)).chunked is True


# RUNNING THEM

# Stands in for a script where processes, not learning, are looked at: logs x, slowly; ends well on SIGTERM, with `slow`
# not before it may; fails if another one writes to its run directory.
SCRIPT = """
    import json, os, pathlib, signal, sys, time
    flags = {"steps": "5", "slow": ""} | dict(word[2:].split("=", 1) for word in sys.argv[1:])
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    run = pathlib.Path(flags.get("resume") or flags["run_dir"] + "/run")
    (run / "checkpoints" / "1").mkdir(parents=True, exist_ok=True)
    (run / "args.json").write_text("{}")
    os.close(os.open(run / "alive", os.O_CREAT | os.O_EXCL))
    log = run / "metrics.jsonl"
    log.touch()
    for step in range(len(log.read_text().splitlines()), int(flags["steps"])):
        with log.open("a") as file:
            file.write(json.dumps({"loss": float(flags["x"])}) + chr(10))
        time.sleep(0.1)
        if stopped:
            while flags["slow"] and not pathlib.Path(flags["slow"]).exists():
                time.sleep(0.05)
            print("stopped by SIGTERM; continue with: --resume")
            break
    (run / "alive").unlink()
    sys.exit("error: --x 0: is bad" if flags["x"] == "0" else 0)
"""
# Lets a sweep have a program that is none of ours, and takes where it ran for known: finding out takes a second.
ANY_PROGRAM = """
from experiments import sweep, trials
trials.check_flags = trials.ask_script = lambda *_: None
trials.origin = lambda: {"machine": "this one"}
sweep.runs.cli(sweep.Args, sweep.main)
"""


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """quick(parameters, *words) runs a sweep of the stand-in in tmp_path/out, or starts one as a process, `apart`."""
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    monkeypatch.setattr(trials, "check_flags", lambda *_: None)
    monkeypatch.setattr(trials, "ask_script", lambda *_: None)
    monkeypatch.setattr(trials, "origin", lambda: {"machine": "this one"})

    def run_sweep(parameters, *words, method="grid", apart=False):
        content = {"program": str(tmp_path / "script.py"), "method": method, "parameters": parameters}
        path = tmp_path / "s.yaml"
        path.write_text(yaml.safe_dump(content | {"metric": {"name": "loss", "goal": "minimize"}}))
        words = [*map(str, (path, "--out", tmp_path / "out", *words))]
        return start("-c", ANY_PROGRAM, *words) if apart else runs.cli(sweep.Args, sweep.main, words)

    return run_sweep


def assert_ends(process, code=0):
    output = process.communicate(timeout=120)[0]
    assert process.returncode == code, output


@pytest.mark.slow
def test_a_killed_sweep_goes_on_exactly(tmp_path):
    """kill -9 within a trial: started again, the sweep resumes that trial's run, exactly."""
    steps = 256 * 12
    given = {"total_timesteps": {"value": steps}, "checkpoint_every": {"value": 256}}
    path = write_sweep(tmp_path / "s.yaml", parameters=TINY_GRID["parameters"] | given)
    words = ["-m", "experiments.sweep", path, "--count", 1, "--out", tmp_path / "out"]
    process = start(*words)
    wait_for(lambda: any((tmp_path / "out/0000").glob("*/checkpoints/[0-9]*/commit_success.txt")), process)
    process.kill()
    process.communicate()
    runs.cli(sweep.Args, sweep.main, [*map(str, words[2:])])
    (row,) = read_results(tmp_path / "out")
    assert (row["state"], row["gap_stack"]) == ("complete", "True")
    assert (tmp_path / "out/0000/output.txt").read_text().count("stopped by SIGTERM") == 1  # not left running
    (run,) = (tmp_path / "out/0000").glob("*/")
    whole = ppo_procgen.main(ppo_procgen.Args(**TINY | {"total_timesteps": steps, "checkpoint_every": 256,
                                                        "run_dir": str(tmp_path / "whole")}))  # fmt: skip
    assert_same_run(whole.path, run)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_never_has_two_writers_and_comes_before_new_ones(quick, tmp_path, monkeypatch, end):
    """Started again at once, while the old script still writes its checkpoint: the trial waits, and then goes on."""
    take, written = files.lock_run, tmp_path / "written"

    def take_or_let_it_end(folder, wait=False):
        lock = take(folder, wait)
        if lock is None:
            written.touch()
        return lock

    monkeypatch.setattr(files, "take", take_or_let_it_end)
    parameters = {"x": {"values": [1, 2, 3]}, "steps": {"value": 20}, "slow": {"value": str(written)}}
    process = quick(parameters, "--count", 1, apart=True)
    wait_for(lambda: len(list(tmp_path.glob("out/0000/run/metrics.jsonl"))) == 1, process)
    process.send_signal(end)
    quick(parameters, "--count", 1)
    process.communicate()
    assert written.exists()
    (row,) = read_results(tmp_path / "out")
    assert (row["state"], row["x"], row["logged"], row["goal"]) == ("complete", "1", "20", "minimize")
    assert (tmp_path / "out/0000/output.txt").read_text().count("stopped by SIGTERM") == 1


def test_results_have_a_trial_whose_process_died_before_it_wrote_them(quick, tmp_path):
    quick({"x": {"values": [1, 2]}})
    whole = read_results(tmp_path / "out")
    (tmp_path / "out" / "results.csv").unlink()
    quick({"x": {"values": [1, 2]}})
    assert read_results(tmp_path / "out") == whole
    assert len(whole) == 2


@pytest.mark.slow
def test_four_processes_share_a_study(quick, tmp_path):
    """Begun at the same time: each cell is run once, whoever takes it; one that fails is recorded, the others go on."""
    processes = [quick({"x": {"values": [*range(9)]}}, apart=True) for _ in range(4)]
    for process in processes:
        assert_ends(process)
    rows = read_results(tmp_path / "out")
    assert sorted(row["x"] for row in rows) == [str(x) for x in range(9)]
    assert {row["x"]: row["why"] for row in rows if row["state"] != "complete"} == {
        "0": "exit code 1: error: --x 0: is bad"
    }
    assert all(row["loss"] == f"{float(row['x'])}" for row in rows if row["state"] == "complete")
    study = optuna.load_study(study_name="s", storage=f"sqlite:///{tmp_path / 'out/study.db'}")
    assert len({trial.user_attrs["worker"] for trial in study.trials}) > 1
    assert (tmp_path / "out/parallel.png").stat().st_size > 10_000


def test_no_draw_is_made_twice(quick, tmp_path):
    """By a process that goes on, or joins: three trials by four jobs, then five more by two processes."""
    parameters = {"x": {"min": 0.5, "max": 1.0}, "steps": {"value": 1}}
    quick(parameters, "--count", 3, "--jobs", 4, method="random")
    assert len(read_results(tmp_path / "out")) == 3
    both = [quick(parameters, "--count", 8, method="random", apart=True) for _ in range(2)]
    for process in both:
        assert_ends(process)
    drawn = [row["x"] for row in read_results(tmp_path / "out")]
    assert len(drawn) == len(set(drawn)) == 8


def test_a_trial_that_was_never_begun_is_run(quick, tmp_path):
    """Its process died right after it had asked for it."""
    parameters = {"x": {"values": [1, 2]}, "steps": {"value": 1}}
    quick(parameters, "--count", 1)
    optuna.load_study(study_name="s", storage=f"sqlite:///{tmp_path / 'out/study.db'}").ask()
    quick(parameters)
    assert [row["x"] for row in read_results(tmp_path / "out")] == ["1", "2"]


@pytest.mark.parametrize(("checkpoint", "flag"), [("383", "--resume="), ("383.orbax-checkpoint-tmp", "--run_dir=")])
def test_a_run_goes_on_from_whole_checkpoints_only(tmp_path, checkpoint, flag):
    """One that was being written when its script was killed is none."""
    shares = "XLA_PYTHON_CLIENT_PREALLOCATE"
    (tmp_path / "script.py").write_text(f"import os, sys; print(sys.argv, os.environ['{shares}'])")
    (tmp_path / "0/run/checkpoints" / checkpoint).mkdir(parents=True)
    (tmp_path / "0/run/args.json").write_text("{}")
    with files.lock_run(tmp_path / "0") as lock:
        trials.run(str(tmp_path / "script.py"), {}, tmp_path / "0", lock, stopping=threading.Event())
    said = (tmp_path / "0/output.txt").read_text()
    assert flag in said
    assert "'--wandb_mode=disabled', " in said
    assert said.endswith("] false\n")


def test_of_two_runs_the_one_with_a_checkpoint_goes_on(tmp_path):
    """Also where a copy of the folder has another order."""
    for name in ("trained", "killed before its first checkpoint"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "args.json").write_text("{}")
    (tmp_path / "trained/checkpoints/383").mkdir(parents=True)
    assert trials.find_run(tmp_path).name == "trained"


def test_a_trial_is_pruned(tmp_path):
    """A trial that Hyperband (or any pruner) gives up is ended, long before its end, and keeps its last value."""
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    content = {"method": "random", "program": str(tmp_path / "script.py"), "metric": {"name": "loss"}}
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=2))
    with files.lock_run(folder := tmp_path / "0000") as lock:
        text = io.StringIO()
        with trials.ProgressLine("study", 1, 0, Console(file=text, force_terminal=True, width=100)) as line:
            where = {"folder": folder, "lock": lock, "stopping": threading.Event(), "line": line}
            sweep.end_trial(study, study.ask(), content, {"x": 3, "steps": 1000}, **where)
    assert study.trials[0].state.name == "PRUNED"
    assert study.trials[0].value == 3
    assert len((folder / "run/metrics.jsonl").read_text().splitlines()) < 1000
    assert "1.0 of 1 runs" in text.getvalue()


def test_hyperband_is_that_of_wandb():
    """Rungs at min_iter eta^k, or max_iter / eta^s on: there whoever is not among the best 1 / eta so far goes.

    Trial 4 is the best until step 3 and falls behind then; trial 5 is the second best of six, a third of them.
    """
    slopes = (5, 1, 2, 1.5, 9, 7)
    for rule, expected in (
        ({"min_iter": 3}, {1: 3, 2: 3, 3: 3, 4: 9}),
        ({"max_iter": 27, "s": 2, "eta": 3}, {1: 3, 2: 3, 3: 3, 4: 9}),
        ({"min_iter": 3, "eta": 2}, {1: 3, 2: 3, 3: 3, 4: 6}),
        ({"min_iter": 3, "eta": 4}, {1: 3, 2: 3, 3: 3, 4: 12, 5: 3}),
    ):
        pruner = sweep.make_pruner({"early_terminate": {"type": "hyperband"} | rule})
        study, ended = optuna.create_study(pruner=pruner, direction="maximize"), {}
        for i, slope in enumerate(slopes):
            trial = study.ask()
            for step in range(1, 30):
                trial.report(0 if i == 4 and step > 3 else slope * step, step)
                if trial.should_prune():
                    ended[i] = step
                    break
            study.tell(trial, slope)
        assert ended == expected, rule


def test_hyperband_with_max_iter_has_a_last_rung():
    """At max_iter / eta: who falls behind later is left alone, as by W&B."""
    pruner = sweep.make_pruner({"early_terminate": {"type": "hyperband", "max_iter": 27, "s": 2}})
    study = optuna.create_study(pruner=pruner, direction="maximize")
    for late in (3, 2, 1, -1):  # better and better at first, then worse and worse
        trial = study.ask()
        for step in range(1, 40):
            trial.report(10 * (4 - late) if step < 20 else late, step)
            assert not trial.should_prune(), (late, step)


def test_a_trial_stays_pruned(tmp_path):
    """Where its process died after it had been given up, and before the study was told: its script is not run again."""
    study = optuna.create_study()
    trial = study.ask()
    trial.report(1.0, 3)
    trial.set_user_attr("ended", "pruned")
    where = {"folder": tmp_path, "lock": None, "stopping": None, "line": trials.ProgressLine("study", 1, 0)}
    sweep.end_trial(study, trial, {"method": "random", "program": "none", "metric": {"name": "loss"}}, {}, **where)
    assert study.trials[0].state.name == "PRUNED"


def test_a_trial_whose_script_is_killed_goes_on(quick, tmp_path, monkeypatch):
    """As for want of memory: twice it is begun again where it was, the third time it has failed."""
    begun, run = [], trials.run

    def run_and_kill(program, flags, *where, **how):
        begun.append(flags["x"])
        if flags["x"] == 2 or (flags["x"] == 1 and begun.count(1) < 3):
            raise trials.Killed("exit code 137: killed")
        run(program, flags, *where, **how)

    monkeypatch.setattr(trials, "run", run_and_kill)
    quick({"x": {"values": [1, 2, 3]}, "steps": {"value": 1}})
    ends = [(row["state"], row["why"]) for row in read_results(tmp_path / "out")]
    assert ends == [("complete", ""), ("fail", "exit code 137: killed"), ("complete", "")]
    assert begun == [1, 1, 1, 2, 2, 2, 3]


def test_a_file_that_cannot_be_read_for_once_is_no_trials_failure(quick, tmp_path, monkeypatch):
    """The trial goes on from where it was."""
    run, errors = trials.run, [OSError(116, "Stale file handle")]

    def run_or_not(*where, **how):
        if errors:
            raise errors.pop()
        run(*where, **how)

    monkeypatch.setattr(trials, "run", run_or_not)
    quick({"x": {"value": 1}, "steps": {"value": 1}})
    assert [row["state"] for row in read_results(tmp_path / "out")] == ["complete"]


def test_an_error_in_one_worker_stops_the_others(quick, tmp_path, monkeypatch, capfd):
    """Else they would go on alone for days, and only then would it be said."""
    begun, run = [], trials.run

    def run_or_fail(program, flags, folder, lock, stopping, **how):
        begun.append(flags["x"])
        if len(begun) == 1:
            raise optuna.exceptions.StorageInternalError("gone")
        stopping.wait(20)
        run(program, flags, folder, lock, stopping=stopping, **how)

    monkeypatch.setattr(trials, "run", run_or_fail)
    with pytest.raises(SystemExit):
        quick({"x": {"values": [1, 2, 3, 4]}, "steps": {"value": 1}}, "--jobs", 2)
    assert "does not answer (gone); the same command goes on" in capfd.readouterr().err
    assert len(begun) <= 2


def test_a_bayesian_search_learns_from_trials_that_fail(quick, tmp_path, capfd):
    """They count as the worst so far, where there is one; in results they are failed, without a value."""
    quick({"x": {"values": [0, 3, 5]}}, "--count", 7, "--seed", 1, method="bayes")
    study = optuna.load_study(study_name="s", storage=f"sqlite:///{tmp_path / 'out/study.db'}")
    rows = read_results(tmp_path / "out")
    assert {(row["x"], row["state"]) for row in rows} == {("0", "fail"), ("3", "complete"), ("5", "complete")}
    worst = None
    for trial, row in zip(study.trials, rows, strict=True):
        if row["state"] == "fail":
            assert (row["loss"], trial.value) == ("", worst)
            assert trial.state.name == ("FAIL" if worst is None else "COMPLETE")
        else:
            worst = max(worst or 0, trial.value)
    failed = sum(row["state"] == "fail" for row in rows)
    assert f"{failed} of 7 runs failed" in capfd.readouterr().out


def test_gaussian_processes_learn_from_pruned_trials():
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.GPSampler(seed=0))
    trial = study.ask()
    for step in (1, 2):
        trial.report(step / 2, step)
    rules = {"method": "bayes", "metric": {"goal": "maximize"}}
    assert sweep.as_told(study, trial, rules, None, TrialState.PRUNED) == (1.0, TrialState.COMPLETE)
    study.sampler = optuna.samplers.TPESampler(seed=0)
    assert sweep.as_told(study, trial, rules, None, TrialState.PRUNED) == (None, TrialState.PRUNED)


def test_a_failed_trial_counts_as_the_worst_of_its_goal():
    for goal, worst in (("maximize", 2.0), ("minimize", 5.0)):
        study, rules = optuna.create_study(direction=goal), {"method": "bayes", "metric": {"goal": goal}}
        for value in (5.0, 2.0):
            study.tell(study.ask(), value)
        assert sweep.as_told(study, study.ask(), rules, None, TrialState.FAIL) == (worst, TrialState.COMPLETE)


def test_a_metric_that_is_never_logged_ends_the_study_at_once(tmp_path, quick, capfd):
    with pytest.raises(SystemExit) as stopped:
        quick({"x": {"values": [1, 2]}, "steps": {"value": 0}})
    assert stopped.value.code == 2
    assert "error: metric loss: " in capfd.readouterr().err
    assert [path.name for path in (tmp_path / "out").glob("0*")] == ["0000"]


def test_one_trial_without_a_value_ends_no_study(tmp_path, quick):
    quick({"x": {"values": [1]}, "steps": {"values": [1, 0]}})
    assert [row["state"] for row in read_results(tmp_path / "out")] == ["complete", "fail"]


def test_values_are_drawn_within_their_ranges():
    """As W&B reads them: whole numbers from whole bounds, and both ends of a range within reach."""
    specs = {
        "whole": {"min": 4, "max": 16},
        "real": {"min": 0.1, "max": 0.6},
        "log": {"distribution": "log_uniform_values", "min": 1e-5, "max": 1e-1},
        "steps": {"distribution": "q_uniform", "min": 0.0, "max": 1.0, "q": 0.25},
        "sizes": {"distribution": "q_uniform", "min": 64, "max": 256, "q": 64},
        "choice": {"values": ["a", "", False]},
        "fixed": {"value": [1]},
    }
    drawn = []
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(lambda t: drawn.append({k: sweep.suggest(t, k, v) for k, v in specs.items()}) or 0.0, n_trials=300)
    values = {name: [row[name] for row in drawn] for name in specs}
    assert set(values["whole"]) == set(range(4, 17))
    assert 0.1 <= min(values["real"]) < 0.15
    assert 0.55 < max(values["real"]) <= 0.6
    assert 120 < sum(x < 1e-3 for x in values["log"]) < 180  # half of them, in the logarithm
    assert set(values["steps"]) == {0, 0.25, 0.5, 0.75, 1}
    assert {str(x) for x in values["sizes"]} == {"64", "128", "192", "256"}  # a flag of whole numbers takes no point
    assert set(values["choice"]) == {"a", "", False}
    assert values["fixed"] == [[1]] * 300


def with_gamma(spec, method="random"):
    return {"parameters": {"gamma": spec}, "method": method}


BAD = {
    "nothing there": ({}, ["--out", "x"], "SWEEP", "sweep file"),
    "no parameters": ({"parameters": None}, [], "parameters: Input should be a valid dictionary, it is None", "SWEEP"),
    "an unknown method": ({"method": "pbt"}, [], "pbt", "'grid', 'random' or 'bayes'"),
    "an unknown program": ({"program": "dqn.py"}, [], "dqn.py", "ppo_procgen.py"),
    "an unknown program and --set": ({"program": "dqn.py"}, ["--set", "gamma=1"], "SWEEP", "program dqn.py"),
    "an unknown flag": ({"parameters": {"lr": {"value": 1}}}, [], "lr", "no flag"),
    "a range in a grid": (with_gamma({"min": 0.9, "max": 1.0}, "grid"), [], "gamma", "a grid takes values"),
    "half a range": (with_gamma({"min": 0.9}), [], "gamma", "min and max"),
    "a command with a flag": (
        {"command": ["python", "${program}", "--env_id=maze", "${args}"]}, [], "command has --env_id=maze", "parameters"
    ),
    "another rule": ({"early_terminate": {"type": "hyperband"}}, [], "early_terminate", "min_iter"),
    "no mapping": ({"parameters": {"gamma": 0.5}}, [], "parameters.gamma", "a valid dictionary, it is 0.5"),
    "another goal": ({"metric": {"name": "loss", "goal": "max"}}, [], "metric.goal", "'minimize' or 'maximize'"),
    "a metric without a name": ({"metric": "loss"}, [], "metric", "a valid dictionary, it is 'loss'"),
    "no end": ({"method": "bayes"}, [], "--count 0", "number of trials"),
    "a count below 0": ({}, ["--count", -1], "--count -1", "from 0"),
    "no jobs": ({}, ["--jobs", 0], "--jobs 0", "from 1 to 1000"),
    "twenty digits of jobs": ({}, ["--jobs", "1" * 20], "--jobs 1111", "from 1 to 1000"),
    "a flag without value": ({}, ["--set", "gamma"], "--set gamma", "name=value"),
    "a storage that is none": ({}, ["--storage", "nosql://x"], "--storage nosql://x", "cannot be opened"),
    "values that are nothing": (with_gamma({"values": None}), [], "gamma.values", "valid list, it is None"),
    "values that are a number": (with_gamma({"values": 5}), [], "gamma.values", "valid list, it is 5"),
    "values that are text": (with_gamma({"values": "abc"}), [], "gamma.values", "valid list, it is 'abc'"),
    "no values": (with_gamma({"values": []}), [], "gamma.values", "at least 1 item"),
    "dates": (with_gamma({"values": [date(2020, 1, 1)]}), [], "gamma.values.0: give a number", "2020"),
    "a date": (with_gamma({"value": date(2020, 1, 1)}), [], "gamma.value: give a number", "2020"),
    "lists among values": (with_gamma({"values": [[1]]}), [], "gamma.values.0: give a number", "[1]"),
    "infinity": (with_gamma({"value": float("inf")}), [], "gamma.value: give a number", "inf"),
    "400 digits": (with_gamma({"min": 0, "max": 10**400}), [], "gamma.max: give a number", "1000"),
    "an end of text": (with_gamma({"min": "low", "max": 1}), [], "gamma.min: give a number", "'low'"),
    "min above max": (with_gamma({"min": 2, "max": 1}), [], "gamma: min must not be above max", "SWEEP"),
    "a logarithm of 0": (
        with_gamma({"min": 0, "max": 1, "distribution": "log_uniform_values"}), [], "gamma", "must be above 0"
    ),
    "another distribution": (with_gamma({"min": 0, "max": 1, "distribution": "normal"}), [], "normal", "q_uniform"),
    "halves of whole numbers": (
        with_gamma({"min": 0.5, "max": 1, "distribution": "int_uniform"}), [], "gamma", "whole numbers"
    ),
    "steps of 0": (
        with_gamma({"min": 0, "max": 1, "distribution": "q_uniform", "q": 0}), [], "gamma", "q must be above 0"
    ),
    "steps of another distribution": (with_gamma({"min": 0, "max": 1.0, "q": 0.5}), [], "gamma: q is for", "q_uniform"),
    "a number without a point": (with_gamma({"min": "1e-4", "max": 1}), [], "gamma.min: give a number", "1.0e-4"),
    "--set twice": ({}, ["--set", "gamma=0.5", "--set", "l2=0"], "--set: is given twice", "all its values after one"),
    "a number for a flag": ({"parameters": {1: {"value": 2}}}, [], "parameters.1", "a valid string, it is 1"),
    "a rule in a list": ({"early_terminate": [1]}, [], "early_terminate", "a valid dictionary, it is [1]"),
    "an eta of 0": (
        {"early_terminate": {"type": "hyperband", "min_iter": 1, "eta": 0}}, [], "early_terminate.eta", "or equal to 2"
    ),
    "a large grid": (
        {"parameters": {name: {"values": [*range(100)]} for name in ("gamma", "l2", "hidden", "width", "seed")}}, [],
        "its grid has 10,000,000,000 cells", "at most 1,000",
    ),
    "another run": ({"parameters": {"resume": {"value": "/x"}}}, [], "resume={'value': '/x'}", "each run is given its"),
    "another run's folder": ({}, ["--set", "run-dir=/x"], "--set run_dir=/x", "each run is given its own"),
    "another project": ({}, ["--set", "wandb_project=x"], "--set wandb_project=x", "each run is given its own"),
    "a later value that the script refuses": (with_gamma({"values": [0.9, 1.5]}), [], "--gamma '1.5'", "from 0 to 1"),
    "an end that the script refuses": (
        with_gamma({"min": 0.9, "max": 1.5}), ["--count", 1], "--gamma '1.5'", "from 0 to 1"
    ),
    "a misspelt key": (
        with_gamma({"min": 0, "max": 1, "distribtion": "uniform"}), [], "gamma.distribtion", "not permitted"
    ),
    "a rule that is misspelt": ({"early_terminat": {}}, [], "early_terminat", "not permitted"),
    "a flag twice": ({}, ["--set", "gamma=0.5", "gamma=0.9"], "--set gamma=0.9", "give one value"),
    "a value that the script refuses": ({}, ["--set", "l2=-1"], "--l2 -1", "0 or more"),
    "a file to write in": ({}, ["--out", "/dev/null"], "--out /dev/null: cannot write there", "another folder"),
    "a long name": ({}, ["--out", "/tmp/" + "a" * 300], "--out /tmp/aaa", "File name too long"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_answered_in_one_sentence(case, tmp_path, capfd):
    changes, words, names, valid = BAD[case]
    path = write_sweep(tmp_path / "s.yaml", **changes)
    if case == "nothing there":
        path.unlink()
    assert_refused(sweep, [path, "--out", tmp_path / "out", *words], capfd, names, valid)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: " + "[" * 200_000, "nested too deeply"),  # what reads YAML in C dies of it
        ("a: &a [*a]", "program: Field required"),
        ("- 1", "a valid dictionary, it is [1]"),
        ("a: 2020-13-45", "month must be in 1..12"),
        ("\x00", "not allowed"),
    ],
)
def test_what_is_no_sweep_file_is_answered_in_one_sentence(text, said, tmp_path, capfd):
    (tmp_path / "s").write_text(text)
    assert_refused(sweep, [tmp_path / "s", "--out", tmp_path / "out"], capfd, f"SWEEP {tmp_path / 's'}: ", said)


def test_what_wandb_takes_is_taken(tmp_path):
    """Values of each kind, both forms of Hyperband, and keys that only its server reads."""
    parameters = {
        "gamma": {"values": [0.9, 1]}, "augment": {"values": ["", "flip"]}, "gap_stack": {"values": [True, False]},
        "l2": {"min": 0, "max": 1.0}, "vf_coef": {"distribution": "q_uniform", "min": 0, "max": 1, "q": 0.25},
        "learning_rate": {"distribution": "log_uniform_values", "min": 1e-5, "max": 1}, "kl_coef": {"value": 0},
        "ent_coef": {"distribution": "categorical", "values": [0, 0.1]}, "seed": {"min": 1, "max": 9},
    }  # fmt: skip
    for rule in ({"min_iter": 3, "eta": 2, "strict": True}, {"max_iter": 27, "s": 2}):
        given = {"parameters": parameters, "method": "bayes", "early_terminate": {"type": "hyperband"} | rule}
        mine = {"name": date(2024, 5, 1), "command": ["x"], "run_cap": 9}
        read = sweep.read_sweep(str(write_sweep(tmp_path / "s.yaml", **mine, **given)))
        assert read["parameters"] == parameters
        json.dumps(read)
        assert [type(x) for x in read["parameters"]["gamma"]["values"]] == [float, int]


def test_a_grid_may_have_cells_that_the_script_refuses(tmp_path):
    """512 minibatches are too many for 8 games of 16 steps, not for 64."""
    parameters = {"num_envs": [8, 64], "num_minibatches": [4, 512], "num_steps": [16]}
    given = {"parameters": {name: {"values": values} for name, values in parameters.items()}}
    sweep.ask_script(sweep.read_sweep(str(write_sweep(tmp_path / "s.yaml", **given))))


def test_real_numbers_for_a_whole_one_are_refused_before_a_trial_is(tmp_path, capfd):
    """In the script's own words, which are those of tyro."""
    given = {"parameters": {"hidden": {"min": 16, "max": 64, "distribution": "uniform"}}, "method": "random"}
    with pytest.raises(SystemExit) as stopped:
        runs.cli(sweep.Args, sweep.main, [str(write_sweep(tmp_path / "s.yaml", **given)), "--count", "1"])
    assert stopped.value.code == 2
    assert re.search(r"--hidden: .*'16\.0'", capfd.readouterr().err)


def test_another_study_is_refused(tmp_path, capfd):
    """Rather than mixed with the one that is there."""
    path, out = write_sweep(tmp_path / "s.yaml"), tmp_path / "out"
    out.mkdir()
    study = sweep.open_study(sweep.Args(str(path)), sweep.read_sweep(str(path)), "s", out)
    assert study.direction.name == "MAXIMIZE"
    study.set_user_attr("sweep", study.user_attrs["sweep"] | {"name": "mine"})  # as an earlier version kept it
    sweep.open_study(sweep.Args(str(path)), sweep.read_sweep(str(path)), "s", out)
    (out / "0000").mkdir()

    assert_refused(sweep, [path, "--out", out, "--set", "gamma=0.5"], capfd, "give another --out")
    assert_refused(sweep, [path, "--out", out, "--seed", 1], capfd, "--seed 1: the study s", "has 0, give that")
    assert_refused(sweep, [write_sweep(tmp_path / "t.yaml"), "--out", out], capfd, "has the study s, give another")
    words = ["--out", tmp_path / "elsewhere", "--storage", f"sqlite:///{out / 'study.db'}"]
    assert_refused(sweep, [path, *words], capfd, f"has its runs in {out}, give that")
    (out / "study.db").unlink()
    assert_refused(sweep, [path, "--out", out], capfd, "of a study that is gone")
    for text in ("[]", '{"study": "s"}', '{"study": ["s"], "id": 1}', "{", "[" * 100_000):
        (out / "study.json").write_text(text)
        assert_refused(sweep, [path, "--out", out], capfd, f"--out {out / 'study.json'}: ", "give another folder")


def test_failures_are_told(quick, tmp_path, capfd):
    """Where all trials failed, with exit code 1 and each reason once; beside one that came to its end, in a line."""
    two = {"x": {"values": [0, 2]}, "steps": {"value": 1}}
    with pytest.raises(SystemExit) as stopped:
        quick(two, "--count", 1)
    assert stopped.value.code == 1
    told = f"1 of 1 runs failed, see {tmp_path / 'out/results.csv'}: trial 0: exit code 1: error: --x 0: is bad\n"
    assert capfd.readouterr().err == f"error: {told}"
    quick(two)
    assert told.replace("1 of 1", "1 of 2") in capfd.readouterr().out


def test_a_stopped_study_has_not_failed(quick, monkeypatch, capfd):
    """Though the one trial that is over did."""
    real = trials.run

    def run(program, flags, folder, lock, stopping, **how):
        if folder.name == "0001":
            signal.raise_signal(signal.SIGTERM)
        real(program, flags, folder, lock, stopping=stopping, **how)

    monkeypatch.setattr(trials, "run", run)
    quick({"x": {"values": [0, 2]}, "steps": {"value": 1}})
    assert "stopped; the same command goes on" in capfd.readouterr().out


def test_runs_are_beside_each_other(quick, monkeypatch, capfd):
    both = threading.Barrier(2, timeout=60)

    def meet(*given, **how):
        both.wait()
        raise RuntimeError("met")

    monkeypatch.setattr(trials, "run", meet)
    with pytest.raises(SystemExit):
        quick({"x": {"values": [1, 2]}}, "--jobs", 2)
    assert ": met\n" in capfd.readouterr().err


def test_a_full_disk_is_told_in_one_sentence(quick, monkeypatch, capfd):
    """SQLite's own words for it, in Optuna's error."""

    def fail(*given, **where):
        try:
            raise SQLAlchemyError("(sqlite3.OperationalError) database or disk is full")
        except SQLAlchemyError as error:
            raise optuna.exceptions.StorageInternalError("an exception is raised during the commit") from error

    monkeypatch.setattr(sweep, "run_trial", fail)
    with pytest.raises(SystemExit) as stopped:
        quick({"x": {"values": [1]}})
    assert stopped.value.code == 1
    assert re.search(r"the disk is full.*the same command goes on\n$", capfd.readouterr().err)


def test_a_database_that_is_gone_is_told_in_one_sentence(quick, monkeypatch, capfd):
    def fail(*given, **where):
        raise SQLAlchemyError("connection refused")

    monkeypatch.setattr(sweep, "begin_trial", fail)
    with pytest.raises(SystemExit) as stopped:
        quick({"x": {"values": [1]}})
    assert stopped.value.code == 1
    said = capfd.readouterr()
    assert said.err == ("error: the study's database does not answer (connection refused); the same command goes on\n")
    assert "results.csv" not in said.out


def test_a_line_says_how_far_the_runs_are(tmp_path):
    """One of four was done before, of two that run a half and a quarter are, and then the first ends."""
    for name, args, step in (
        ("0", {"total_timesteps": 100}, 50),
        ("1", {"task_timesteps": 30, "tasks": "0,5"}, 15),
    ):
        run = tmp_path / name / "run"
        run.mkdir(parents=True)
        (run / "args.json").write_text(json.dumps({"script": "x", "wandb_id": "x", "args": args}))
        (run / "metrics.jsonl").write_text('{"global_step": 1}\n' + json.dumps({"global_step": step}) + "\n")
    text = io.StringIO()
    with trials.ProgressLine("study", 4, 1, Console(file=text, force_terminal=True, width=100)) as line:
        line.look(tmp_path / "0", True)
        line.look(tmp_path / "1", True)
        assert line._progress.tasks[0].completed == 1.75
        line.look(tmp_path / "0", False)
    assert "2.2 of 4 runs" in text.getvalue()
    quiet = io.StringIO()
    with trials.ProgressLine("study", 4, 1, Console(file=quiet)) as line:
        line.look(tmp_path / "0", True)
    assert not quiet.getvalue().strip()


def test_names_are_no_formulas(tmp_path, monkeypatch):
    """A study's or a value's: what is between two $ is drawn as it is. A logarithm's numbers are none either."""
    study = optuna.create_study(study_name="$\\frac{$", sampler=optuna.samplers.RandomSampler(seed=0))
    study.set_user_attr("sweep", {"metric": {"name": "$\\frac{$", "goal": "minimize"}})
    specs = {"x": {"values": ["$\\frac{$", "b"]}, "y": {"distribution": "log_uniform_values", "min": 1e-5, "max": 1e-1}}
    for value in range(4):
        trial = study.ask()
        assert {name: sweep.suggest(trial, name, spec) for name, spec in specs.items()}
        for name, content in {"seconds": 1, "origin": {"machine": "this one"}}.items():
            trial.set_user_attr(name, content)
        study.tell(trial, value)
    texts, save = [], Figure.savefig

    def look(figure, *given, **how):
        save(figure, *given, **how)
        texts.extend(text.get_text() for text in figure.findobj(Text))

    monkeypatch.setattr(Figure, "savefig", look)
    sweep.write_results(study, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"results.csv", "parallel.png", "importance.png"}
    assert {"$\\frac{$", "1e\N{MINUS SIGN}03"} <= set(texts)
    assert not any("mathdefault" in text for text in texts)


@pytest.mark.parametrize("goal", ["maximize", "minimize"])
def test_importance_is_of_what_the_best_trials_have_in_common(goal, tmp_path, monkeypatch):
    """The best are those with x near 1, the worst those with y near 0."""
    study, sign = optuna.create_study(direction=goal), 1 if goal == "maximize" else -1
    study.set_user_attr("sweep", {"metric": {"name": "m", "goal": goal}})
    told = {"seconds": 1, "origin": {"machine": "this one"}}
    distributions = dict.fromkeys("xy", optuna.distributions.FloatDistribution(0, 1))
    for x, y in np.random.default_rng(0).random((60, 2)).tolist():
        value = sign * (x**8 - (1 - y) ** 8)
        study.add_trial(optuna.trial.create_trial(
            params={"x": x, "y": y}, distributions=distributions, value=value, user_attrs=told
        ))  # fmt: skip
    importance = {}

    def look(path, plot, drawn, target_name, **options):
        if path.name == "importance.png":
            importance.update(optuna.importance.get_param_importances(drawn, **options))

    monkeypatch.setattr(sweep, "draw", look)
    sweep.write_results(study, tmp_path)
    assert importance["x"] > 0.7


def test_cells_are_queued_once(tmp_path, monkeypatch):
    """Though the process that queued the first of them died."""
    cells = {"gamma": {"values": [0.9, 1]}, "gap_stack": {"values": [True, False]}}
    path = str(write_sweep(tmp_path / "s.yaml", parameters=cells))
    given = sweep.Args(path), sweep.read_sweep(path), "s", tmp_path
    with monkeypatch.context() as patch:
        patch.setattr(sweep, "grid_of", lambda content: [{"gamma": 0.9, "gap_stack": True}, None])
        with pytest.raises(TypeError):
            sweep.open_study(*given)
    queued = [trial.system_attrs["fixed_params"] for trial in sweep.open_study(*given).trials]
    assert queued == sweep.grid_of(given[1])


def test_a_study_prunes_as_its_file_says(tmp_path):
    for name, rule, pruner in (
        ("a", None, "NopPruner"),
        ("b", {"type": "hyperband", "min_iter": 3}, "SuccessiveHalvingPruner"),
    ):
        path = str(write_sweep(tmp_path / f"{name}.yaml", early_terminate=rule))
        (tmp_path / name).mkdir()
        study = sweep.open_study(sweep.Args(path), sweep.read_sweep(path), name, tmp_path / name)
        assert type(study.pruner).__name__ == pruner


def test_a_method_has_its_sampler_and_a_file_its_number_of_trials(tmp_path, monkeypatch):
    for method, sampler in (("bayes", "TPESampler"), ("random", "RandomSampler")):
        assert type(sweep.make_sampler(sweep.Args("s"), {"method": method}, 0)).__name__ == sampler
    counts, path = [], write_sweep(tmp_path / "r.yaml", method="random", run_cap=3)
    monkeypatch.setattr(sweep, "begin_trial", lambda study, args, content, count, out: counts.append(count))
    runs.cli(sweep.Args, sweep.main, [str(path), "--out", str(tmp_path / "r")])
    assert counts == [3]


def test_a_sampler_that_is_not_there_begins_no_study(tmp_path, monkeypatch, capfd):
    path = write_sweep(tmp_path / "b.yaml", method="bayes", run_cap=1)
    monkeypatch.setattr(sweep.importlib.util, "find_spec", lambda name: None)
    assert_refused(sweep, [path, "--out", tmp_path / "b", "--sampler", "gp"], capfd, "--sampler gp: needs PyTorch")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("code", "says", "raises"),
    [
        (0, "stopped by SIGTERM; continue with: --resume", trials.Stopped),
        (143, "stopped by SIGTERM", trials.Stopped),
        (1, "error: cannot write /x: the disk is full, 0.0 MiB are free there; go on", files.FullError),
        (1, "error: --x 0: is bad", RuntimeError),
        (2, "\u256d box \u256e\n\u2502 Error parsing --x: bad \u2502\n\u2570\u2500\u256f", RuntimeError),
        (137, "nothing", trials.Killed),
    ],
)
def test_how_a_run_ended(code, says, raises, tmp_path):
    (tmp_path / "script.py").write_text(f"import sys; print({says!r}); sys.exit({code})")
    with files.lock_run(tmp_path / "0") as lock, pytest.raises(raises) as raised:
        trials.run(str(tmp_path / "script.py"), {}, tmp_path / "0", lock, stopping=threading.Event())
    assert raised.type is raises
    if code == 2:
        assert str(raised.value) == "exit code 2: Error parsing --x: bad"
