"""Sweeps: the files, kills and resumes, several processes, pruning, results, and bad input."""

import importlib
import io
import json
import re
import shutil
import signal
import textwrap
import threading
from datetime import date
from pathlib import Path

import numpy as np
import optuna
import pytest
import yaml
from conftest import ROOT, TINY, assert_refused, assert_same_run, start, wait_for
from matplotlib.figure import Figure
from matplotlib.text import Text
from optuna.trial import TrialState
from rich.console import Console
from sqlalchemy.exc import SQLAlchemyError

import ppo_procgen
from common import files, runs
from experiments import records, sweep, trials

FILES = sorted((ROOT / "sweeps").glob("*.yaml"))
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
    return records.read_rows(out / "results.csv")


def load_study(tmp_path):
    return optuna.load_study(study_name="s", storage=f"sqlite:///{tmp_path / 'out/study.db'}")


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
def test_sweep_file_is_valid_for_wandb_and_the_script(path, monkeypatch):
    """In W&B's grammar, and the script takes each value as `wandb agent` gives it: --name=value, True or False."""
    content = sweep.read_sweep(str(path))
    assert set(content) <= {"program", "method", "metric", "parameters", "early_terminate"}
    assert set(content["metric"]) == {"name", "goal"}
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
            parsed = getattr(seen[-1], name if hasattr(seen[-1], name) else name + "_")
            assert parsed == float(value) if isinstance(parsed, float) else str(parsed) == value


# RUNNING TRIALS

# Stands in for a script where processes matter and not learning: logs x, slowly; ends well on SIGTERM, with `slow` only
# once that file exists; fails if another process writes to its run directory.
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
# Accepts any program, and skips the second that it takes to describe the machine.
ANY_PROGRAM = """
from experiments import sweep, trials
trials.check_flags = trials.ask_script = lambda *_: None
trials.origin = lambda: {"machine": "this one"}
sweep.runs.cli(sweep.Args, sweep.main)
"""


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """quick(parameters, *words) sweeps the stand-in in tmp_path/out, with `apart` in a process of its own."""
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


@pytest.fixture
def fake_run(monkeypatch):
    """fake_run(before): trials run as ever, after before(flags, folder, stopping); returns the values of x so far."""
    begun, run = [], trials.run

    def install(before):
        def run_after(program, flags, folder, lock, stopping, **how):
            begun.append(flags["x"])
            before(flags, folder, stopping)
            run(program, flags, folder, lock, stopping=stopping, **how)

        monkeypatch.setattr(trials, "run", run_after)
        return begun

    return install


def assert_ends(process):
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output


@pytest.mark.slow
def test_sweep_killed_within_a_trial_resumes_its_run_bit_for_bit(tmp_path):
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
    flags = TINY | {"total_timesteps": steps, "checkpoint_every": 256, "run_dir": str(tmp_path / "whole")}
    assert_same_run(ppo_procgen.main(ppo_procgen.Args(**flags)).path, run)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_trial_restarted_while_its_old_script_still_writes_waits_for_it(quick, tmp_path, monkeypatch, end):
    """A run never has two writers, and an open trial comes before new ones."""
    lock_run, waited = files.lock_run, tmp_path / "waited"

    def lock_or_let_it_end(folder, wait=False):
        lock = lock_run(folder, wait)
        if lock is None:
            waited.touch()
        return lock

    monkeypatch.setattr(files, "lock_run", lock_or_let_it_end)
    parameters = {"x": {"values": [1, 2, 3]}, "steps": {"value": 20}, "slow": {"value": str(waited)}}
    process = quick(parameters, "--count", 1, apart=True)
    wait_for(lambda: len(list(tmp_path.glob("out/0000/run/metrics.jsonl"))) == 1, process)
    process.send_signal(end)
    quick(parameters, "--count", 1)
    process.communicate()
    assert waited.exists()
    (row,) = read_results(tmp_path / "out")
    assert (row["state"], row["x"], row["logged"], row["goal"]) == ("complete", "1", "20", "minimize")
    assert (tmp_path / "out/0000/output.txt").read_text().count("stopped by SIGTERM") == 1


def test_study_of_a_process_that_died_is_completed(quick, tmp_path):
    """After a trial was asked for and not begun, and after all trials but before the results were written."""
    parameters = {"x": {"values": [1, 2]}, "steps": {"value": 1}}
    quick(parameters, "--count", 1)
    load_study(tmp_path).ask()
    quick(parameters)
    whole = read_results(tmp_path / "out")
    assert [row["x"] for row in whole] == ["1", "2"]
    (tmp_path / "out/results.csv").unlink()
    quick(parameters)
    assert read_results(tmp_path / "out") == whole


@pytest.mark.slow
def test_grid_shared_by_four_processes_runs_each_cell_once(quick, tmp_path):
    processes = [quick({"x": {"values": [*range(9)]}}, apart=True) for _ in range(4)]
    for process in processes:
        assert_ends(process)
    rows = read_results(tmp_path / "out")
    assert sorted(row["x"] for row in rows) == [str(x) for x in range(9)]
    assert {row["x"]: row["why"] for row in rows if row["state"] != "complete"} == {
        "0": "exit code 1: error: --x 0: is bad"
    }
    assert all(row["loss"] == f"{float(row['x'])}" for row in rows if row["state"] == "complete")
    assert len({trial.user_attrs["worker"] for trial in load_study(tmp_path).trials}) > 1
    assert (tmp_path / "out/parallel.png").stat().st_size > 10_000


def test_random_draws_of_parallel_and_later_trials_differ(quick, tmp_path):
    for count in (3, 8):
        quick({"x": {"min": 0.5, "max": 1.0}, "steps": {"value": 1}}, "--count", count, "--jobs", 4, method="random")
        drawn = [row["x"] for row in read_results(tmp_path / "out")]
        assert len(drawn) == len(set(drawn)) == count


@pytest.mark.parametrize(("checkpoint", "flag"), [("383", "--resume="), ("383.orbax-checkpoint-tmp", "--run_dir=")])
def test_run_with_a_checkpoint_resumes_if_that_is_complete(tmp_path, checkpoint, flag):
    shares = "XLA_PYTHON_CLIENT_PREALLOCATE"
    (tmp_path / "script.py").write_text(f"import os, sys; print(sys.argv, os.environ['{shares}'])")
    for name in ("killed before its first checkpoint", "run"):
        (tmp_path / "0" / name).mkdir(parents=True)
        (tmp_path / "0" / name / "args.json").write_text("{}")
    (tmp_path / "0/run/checkpoints" / checkpoint).mkdir(parents=True)
    with files.lock_run(tmp_path / "0") as lock:
        trials.run(str(tmp_path / "script.py"), {}, tmp_path / "0", lock, stopping=threading.Event())
    output = (tmp_path / "0/output.txt").read_text()
    assert (f"--resume={tmp_path / '0/run'}'" if flag == "--resume=" else flag) in output
    assert "'--wandb_mode=disabled', " in output
    assert output.endswith("] false\n")


@pytest.mark.parametrize(
    ("code", "output", "error"),
    [
        (0, "stopped by SIGTERM; continue with: --resume", trials.Stopped),
        (143, "stopped by SIGTERM", trials.Stopped),
        (1, "error: cannot write /x: the disk is full, 0.0 MiB are free there; continue", files.FullError),
        (1, "error: --x 0: is bad", RuntimeError),
        (2, "\u256d box \u256e\n\u2502 Error parsing --x: bad \u2502\n\u2570\u2500\u256f", RuntimeError),
        (137, "nothing", trials.Killed),
    ],
)
def test_exit_code_and_output_of_a_script_select_the_error(code, output, error, tmp_path):
    (tmp_path / "script.py").write_text(f"import sys; print({output!r}); sys.exit({code})")
    with files.lock_run(tmp_path / "0") as lock, pytest.raises(error) as raised:
        trials.run(str(tmp_path / "script.py"), {}, tmp_path / "0", lock, stopping=threading.Event())
    assert raised.type is error
    if code == 2:
        assert str(raised.value) == "exit code 2: Error parsing --x: bad"


# FAILURES


def test_trial_whose_script_is_killed_three_times_fails(quick, tmp_path, fake_run):
    """As by the kernel when memory is full; until then it resumes."""
    errors = [OSError(116, "Stale file handle")]

    def kill(flags, folder, stopping):
        if flags["x"] == 3 and errors:
            raise errors.pop()
        if flags["x"] == 2 or (flags["x"] == 1 and begun.count(1) < 3):
            raise trials.Killed("exit code 137: killed")

    begun = fake_run(kill)
    quick({"x": {"values": [1, 2, 3]}, "steps": {"value": 1}})
    ends = [(row["state"], row["why"]) for row in read_results(tmp_path / "out")]
    assert ends == [("complete", ""), ("fail", "exit code 137: killed"), ("complete", "")]
    assert begun == [1, 1, 1, 2, 2, 2, 3, 3]  # an error of a file is no failure of the trial


def test_jobs_run_trials_in_parallel(quick, tmp_path, fake_run):
    both = threading.Barrier(2, timeout=60)
    fake_run(lambda *given: both.wait())
    quick({"x": {"values": [1, 2]}, "steps": {"value": 1}}, "--jobs", 2)
    assert [row["state"] for row in read_results(tmp_path / "out")] == ["complete", "complete"]


def test_failed_trials_are_reported_with_exit_code_1_if_all_failed(quick, tmp_path, capfd):
    two = {"x": {"values": [0, 2]}, "steps": {"value": 1}}
    with pytest.raises(SystemExit) as stopped:
        quick(two, "--count", 1)
    assert stopped.value.code == 1
    report = f"1 of 1 runs failed, see {tmp_path / 'out/results.csv'}: trial 0: exit code 1: error: --x 0: is bad\n"
    assert capfd.readouterr().err == f"error: {report}"
    quick(two)
    assert report.replace("1 of 1", "1 of 2") in capfd.readouterr().out


def test_study_stopped_by_a_signal_has_not_failed(quick, fake_run, capfd):
    """Although its only finished trial has."""
    fake_run(lambda flags, folder, stopping: folder.name == "0001" and signal.raise_signal(signal.SIGTERM))
    quick({"x": {"values": [0, 2]}, "steps": {"value": 1}})
    assert "stopped; repeat the command to continue" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (
            "run_trial",
            "(sqlite3.OperationalError) database or disk is full",
            r"the disk is full.*repeat the command to continue",
        ),
        (
            "begin_trial",
            "connection refused",
            r"^error: the study's database does not answer \(connection refused\); repeat the command",
        ),
    ],
)
def test_database_error_is_one_sentence_with_exit_code_1(function, error, message, quick, monkeypatch, capfd):
    def fail(*given, **where):
        try:
            raise SQLAlchemyError(error)
        except SQLAlchemyError as cause:
            if function == "begin_trial":
                raise
            raise optuna.exceptions.StorageInternalError("an exception is raised during the commit") from cause

    monkeypatch.setattr(sweep, function, fail)
    with pytest.raises(SystemExit) as stopped:
        quick({"x": {"values": [1]}})
    assert stopped.value.code == 1
    output = capfd.readouterr()
    assert re.search(message + r"\n$", output.err)
    assert output.err.count("\n") == 1
    assert "results.csv" not in output.out


def test_metric_that_is_not_logged_fails_a_trial_or_ends_the_study_if_no_trial_logs_it(tmp_path, quick, capfd):
    with pytest.raises(SystemExit) as stopped:
        quick({"x": {"values": [1, 2]}, "steps": {"value": 0}})
    assert stopped.value.code == 2
    assert "error: metric loss: " in capfd.readouterr().err
    assert [path.name for path in (tmp_path / "out").glob("0*")] == ["0000"]
    shutil.rmtree(tmp_path / "out")
    quick({"x": {"values": [1]}, "steps": {"values": [1, 0]}})
    assert [row["state"] for row in read_results(tmp_path / "out")] == ["complete", "fail"]


# PRUNING AND SAMPLING


def test_trial_that_is_pruned_ends_early_and_stays_pruned(tmp_path):
    """Also where its process died before the study was told: the script is not run again."""
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    content = {"method": "random", "program": str(tmp_path / "script.py"), "metric": {"name": "loss"}}
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=2))
    text = io.StringIO()
    with files.lock_run(folder := tmp_path / "0000") as lock:
        with trials.ProgressLine("study", 1, 0, Console(file=text, force_terminal=True, width=100)) as line:
            where = {"folder": folder, "lock": lock, "stopping": threading.Event(), "line": line}
            sweep.end_trial(study, study.ask(), content, {"x": 3, "steps": 1000}, **where)
        again = study.ask()
        again.report(1.0, 3)
        again.set_user_attr("ended", "pruned")
        sweep.end_trial(study, again, content | {"program": "none"}, {}, **where)
    assert [(trial.state.name, trial.value) for trial in study.trials] == [("PRUNED", 3), ("PRUNED", 1)]
    assert study.trials[0].user_attrs["ended"] == "pruned"  # as the second, before the study is told
    assert len((folder / "run/metrics.jsonl").read_text().splitlines()) < 1000
    assert "1.0 of 1 runs" in text.getvalue()


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"min_iter": 3}, {1: 3, 2: 3, 3: 3, 4: 9}),
        ({"max_iter": 27, "s": 2, "eta": 3}, {1: 3, 2: 3, 3: 3, 4: 9}),
        ({"min_iter": 3, "eta": 2}, {1: 3, 2: 3, 3: 3, 4: 6}),
        ({"min_iter": 3, "eta": 4}, {1: 3, 2: 3, 3: 3, 4: 12, 5: 3}),
    ],
)
def test_hyperband_prunes_at_the_rungs_of_wandb(rule, expected):
    """At min_iter eta^k, or max_iter / eta^s and so on, trials below the best 1 / eta end. Trial 4 is the best until
    step 3 and falls behind then; trial 5 is the second best of six."""
    pruner = sweep.make_pruner({"early_terminate": {"type": "hyperband"} | rule})
    study, ended = optuna.create_study(pruner=pruner, direction="maximize"), {}
    for i, slope in enumerate((5, 1, 2, 1.5, 9, 7)):
        trial = study.ask()
        for step in range(1, 30):
            trial.report(0 if i == 4 and step > 3 else slope * step, step)
            if trial.should_prune():
                ended[i] = step
                break
        study.tell(trial, slope)
    assert ended == expected


def test_hyperband_with_max_iter_prunes_no_trial_after_the_last_rung():
    pruner = sweep.make_pruner({"early_terminate": {"type": "hyperband", "max_iter": 27, "s": 2}})
    study = optuna.create_study(pruner=pruner, direction="maximize")
    for late in (3, 2, 1, -1):  # better and better at first, then worse and worse
        trial = study.ask()
        for step in range(1, 40):
            trial.report(10 * (4 - late) if step < 20 else late, step)
            assert not trial.should_prune(), (late, step)


def test_bayesian_search_counts_failed_trials_as_the_worst_so_far(quick, tmp_path, capfd):
    quick({"x": {"values": [0, 3, 5]}}, "--count", 7, "--seed", 1, method="bayes")
    rows, worst = read_results(tmp_path / "out"), None
    assert {(row["x"], row["state"]) for row in rows} == {("0", "fail"), ("3", "complete"), ("5", "complete")}
    for trial, row in zip(load_study(tmp_path).trials, rows, strict=True):
        if row["state"] == "fail":
            assert (row["loss"], trial.value) == ("", worst)
            assert trial.state.name == ("FAIL" if worst is None else "COMPLETE")
        else:
            worst = max(worst or 0, trial.value)
    failed = sum(row["state"] == "fail" for row in rows)
    assert f"{failed} of 7 runs failed" in capfd.readouterr().out


def test_value_of_a_failed_or_pruned_trial_depends_on_goal_and_sampler():
    for goal, worst in (("maximize", 2.0), ("minimize", 5.0)):
        study, rules = optuna.create_study(direction=goal), {"method": "bayes", "metric": {"goal": goal}}
        for value in (5.0, 2.0):
            study.tell(study.ask(), value)
        assert sweep.as_told(study, study.ask(), rules, None, TrialState.FAIL) == (worst, TrialState.COMPLETE)
    trial = study.ask()
    trial.report(0.5, 1)
    for sampler, expected in (
        (optuna.samplers.GPSampler(seed=0), (0.5, TrialState.COMPLETE)),  # it would ignore a pruned one
        (optuna.samplers.TPESampler(seed=0), (None, TrialState.PRUNED)),
    ):
        study.sampler = sampler
        assert sweep.as_told(study, trial, rules, None, TrialState.PRUNED) == expected


def test_values_are_drawn_from_the_ranges_of_wandb():
    """Whole numbers from whole bounds; both ends of a range are within reach."""
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


def test_method_and_file_select_sampler_pruner_and_count(tmp_path, monkeypatch, capfd):
    for method, sampler in (("bayes", "TPESampler"), ("random", "RandomSampler")):
        assert type(sweep.make_sampler(sweep.Args("s"), {"method": method}, 0)).__name__ == sampler
    for rule, pruner in ((None, "NopPruner"), ({"type": "hyperband", "min_iter": 3}, "SuccessiveHalvingPruner")):
        path = str(write_sweep(tmp_path / f"{pruner}.yaml", early_terminate=rule))
        (tmp_path / pruner).mkdir()
        study = sweep.open_study(sweep.Args(path), sweep.read_sweep(path), pruner, tmp_path / pruner)
        assert type(study.pruner).__name__ == pruner
    counts, path = [], write_sweep(tmp_path / "r.yaml", method="random", run_cap=3)
    with monkeypatch.context() as patch:
        patch.setattr(sweep, "begin_trial", lambda study, args, content, count, out: counts.append(count))
        runs.cli(sweep.Args, sweep.main, [str(path), "--out", str(tmp_path / "r")])
    assert counts == [3]
    capfd.readouterr()
    path = write_sweep(tmp_path / "b.yaml", method="bayes", run_cap=1)
    monkeypatch.setattr(sweep.importlib.util, "find_spec", lambda name: None)
    assert_refused(sweep, [path, "--out", tmp_path / "b", "--sampler", "gp"], capfd, "--sampler gp: needs PyTorch")
    assert not (tmp_path / "b").exists()  # no study is begun


def test_cells_of_a_grid_are_queued_once_though_a_process_died_between(tmp_path, monkeypatch):
    cells = {"gamma": {"values": [0.9, 1]}, "gap_stack": {"values": [True, False]}}
    path = str(write_sweep(tmp_path / "s.yaml", parameters=cells))
    given = sweep.Args(path), sweep.read_sweep(path), "s", tmp_path
    with monkeypatch.context() as patch:
        patch.setattr(sweep, "grid_of", lambda content: [{"gamma": 0.9, "gap_stack": True}, None])
        with pytest.raises(TypeError):
            sweep.open_study(*given)
    queued = [trial.system_attrs["fixed_params"] for trial in sweep.open_study(*given).trials]
    assert queued == sweep.grid_of(given[1])


# RESULTS


def test_progress_line_counts_parts_of_runs(tmp_path):
    """One of four was done before, two are at a half and a quarter, and then the first ends."""
    for name, args, step in (("0", {"total_timesteps": 100}, 50), ("1", {"task_timesteps": 30, "tasks": "0,5"}, 15)):
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


def test_names_with_dollar_signs_are_drawn_as_they_are(tmp_path, monkeypatch):
    """Not as formulas; nor are the numbers of a logarithmic axis."""
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
def test_importance_favours_what_the_best_trials_have_in_common(goal, tmp_path, monkeypatch):
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


# BAD INPUT


def with_gamma(spec, method="random"):
    return {"parameters": {"gamma": spec}, "method": method}


def with_range(low, high, **more):
    return with_gamma({"min": low, "max": high} | more)


WIDE = {name: {"values": [*range(100)]} for name in ("gamma", "l2", "hidden", "width", "seed")}
BAD = {
    "no parameters": ({"parameters": None}, [], "parameters: Input should be a valid dictionary, it is None", "SWEEP"),
    "unknown method": ({"method": "pbt"}, [], "pbt", "'grid', 'random' or 'bayes'"),
    "unknown program": ({"program": "dqn.py"}, ["--set", "gamma=1"], "SWEEP", "program dqn.py", "ppo_procgen.py"),
    "unknown flag": ({"parameters": {"lr": {"value": 1}}}, [], "lr", "no flag"),
    "range in a grid": (with_gamma({"min": 0.9, "max": 1.0}, "grid"), [], "gamma", "a grid takes values"),
    "half a range": (with_gamma({"min": 0.9}), [], "gamma", "min and max"),
    "command with a flag": ({"command": ["python", "--env_id=maze"]}, [], "command has --env_id=maze", "parameters"),
    "rule without rungs": ({"early_terminate": {"type": "hyperband"}}, [], "early_terminate", "min_iter"),
    "unknown goal": ({"metric": {"name": "loss", "goal": "max"}}, [], "metric.goal", "'minimize' or 'maximize'"),
    "no count": ({"method": "bayes"}, [], "--count 0", "number of trials"),
    "twenty digits of jobs": ({}, ["--jobs", "1" * 20], "--jobs 1111", "from 1 to 1000"),
    "unknown storage": ({}, ["--storage", "nosql://x"], "--storage nosql://x", "cannot be opened"),
    "values as text": (with_gamma({"values": "abc"}), [], "gamma.values", "valid list, it is 'abc'"),
    "date": (with_gamma({"values": [date(2020, 1, 1)]}), [], "gamma.values.0: give a number", "2020"),
    "number without a point": (with_range("1e-4", 1), [], "gamma.min: give a number", "1.0e-4"),
    "min above max": (with_range(2, 1), [], "gamma: min must not be above max", "SWEEP"),
    "logarithm of 0": (with_range(0, 1, distribution="log_uniform_values"), [], "gamma", "must be above 0"),
    "unknown distribution": (with_range(0, 1, distribution="normal"), [], "normal", "q_uniform"),
    "steps of 0": (with_range(0, 1, distribution="q_uniform", q=0), [], "gamma", "q must be above 0"),
    "misspelt key": (with_range(0, 1, distribtion="uniform"), [], "gamma.distribtion", "not permitted"),
    "large grid": ({"parameters": WIDE}, [], "its grid has 10,000,000,000 cells", "at most 1,000"),
    "run of another": ({"parameters": {"resume": {"value": "/x"}}}, [], "resume={'value': '/x'}", "each run is given"),
    "later value refused": (with_gamma({"values": [0.9, 1.5]}), [], "--gamma '1.5'", "from 0 to 1"),
    "end refused": (with_range(0.9, 1.5), ["--count", 1], "--gamma '1.5'", "from 0 to 1"),
    "flag twice": ({}, ["--set", "gamma=0.5", "gamma=0.9"], "--set gamma=0.9", "give one value"),
    "--set twice": ({}, ["--set", "gamma=0.5", "--set", "l2=0"], "--set: is given twice", "all its values after one"),
    "file as folder": ({}, ["--out", "/dev/null"], "--out /dev/null: cannot write there", "another folder"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_sweep_is_refused_in_one_sentence(case, tmp_path, capfd):
    changes, words, *parts = BAD[case]
    path = write_sweep(tmp_path / "s.yaml", **changes)
    assert_refused(sweep, [path, "--out", tmp_path / "out", *words], capfd, *parts)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: " + "[" * 200_000, "nested too deeply"),  # crashes the YAML parser in C
        ("a: &a [*a]", "program: Field required"),
        ("- 1", "a valid dictionary, it is [1]"),
        ("a: 2020-13-45", "month must be in 1..12"),
        ("\x00", "not allowed"),
        (None, "give a sweep file"),
    ],
)
def test_damaged_sweep_file_is_refused_in_one_sentence(text, reason, tmp_path, capfd):
    if text is not None:
        (tmp_path / "s").write_text(text)
    assert_refused(sweep, [tmp_path / "s", "--out", tmp_path / "out"], capfd, f"SWEEP {tmp_path / 's'}: ", reason)


def test_sweep_of_every_kind_of_value_is_read(tmp_path):
    """Both forms of Hyperband, and keys that only W&B's server reads."""
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


def test_grid_with_a_cell_that_the_script_refuses_is_accepted(tmp_path):
    """512 minibatches are too many for 8 games of 16 steps, but not for 64."""
    parameters = {"num_envs": [8, 64], "num_minibatches": [4, 512], "num_steps": [16]}
    given = {"parameters": {name: {"values": values} for name, values in parameters.items()}}
    sweep.ask_script(sweep.read_sweep(str(write_sweep(tmp_path / "s.yaml", **given))))


def test_fractions_for_an_integer_flag_are_refused_before_a_trial(tmp_path, capfd):
    """In tyro's words, as by the script itself."""
    given = {"parameters": {"hidden": {"min": 16, "max": 64, "distribution": "uniform"}}, "method": "random"}
    with pytest.raises(SystemExit) as stopped:
        runs.cli(sweep.Args, sweep.main, [str(write_sweep(tmp_path / "s.yaml", **given)), "--count", "1"])
    assert stopped.value.code == 2
    assert re.search(r"--hidden: .*'16\.0'", capfd.readouterr().err)


def test_study_with_other_settings_in_the_same_folder_is_refused(tmp_path, capfd):
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
