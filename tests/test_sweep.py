"""Sweeps: files, kills and resumes, several processes, failures, pruning, results, and bad input."""

import contextlib
import importlib
import json
import re
import shutil
import signal
import sqlite3
import textwrap
import threading
from datetime import date
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import optuna
import pytest
import tyro
import yaml
from conftest import ROOT, TINY, assert_refused, assert_same_run, start, wait_for
from matplotlib.figure import Figure
from matplotlib.text import Text
from optuna.trial import TrialState
from sqlalchemy.exc import SQLAlchemyError

import ppo_procgen
from common import files, runs
from experiments import records, sweep, trials

TINY_GRID = {
    "program": "ppo_procgen.py",
    "method": "grid",
    "metric": {"name": "charts/episodic_return", "goal": "maximize"},
    "parameters": {name: {"value": value} for name, value in TINY.items() if name != "wandb_mode"}
    | {"gap_stack": {"values": [True, False]}},
}
ORIGIN = {"machine": "this one"}


def write_sweep(path, **changes):
    path.write_text(yaml.safe_dump(TINY_GRID | changes))
    return path


def read_results(out):
    return records.read_rows(out / "results.csv")


def load_study(tmp_path):
    return optuna.load_study(study_name="s", storage=f"sqlite:///{tmp_path / 'out/study.db'}")


def main(*words):
    return runs.cli(sweep.Args, sweep.main, [*map(str, words)])


@pytest.mark.parametrize("path", sorted((ROOT / "sweeps").glob("*.yaml")), ids=lambda path: path.stem)
def test_sweep_file_of_the_repository_is_valid_for_wandb_and_the_script(path):
    """In W&B's grammar, and the script takes each value as `wandb agent` gives it: --name=value, True or False."""
    content = sweep.read_sweep(str(path))
    assert set(content["metric"]) == {"name", "goal"}
    assert (content["method"] == "bayes") == ("early_terminate" in content)
    source = (ROOT / content["program"]).read_text() + (ROOT / "common/envs.py").read_text()
    assert content["metric"]["name"].split("/")[-1] in source
    sweep.check_values(content)
    script = importlib.import_module(Path(content["program"]).stem)
    for end in (0, -1):
        specs = content["parameters"].items()
        cell = {
            k: (spec.get("values") or [spec.get("value", spec.get("min")), spec.get("max")])[end] for k, spec in specs
        }
        cell = {name: value for name, value in cell.items() if value is not None}
        args = tyro.cli(script.Args, args=runs.plain_values(script.Args, trials.words_of(cell)))
        for name, value in cell.items():
            parsed = getattr(args, name if hasattr(args, name) else name + "_")
            assert parsed == float(value) if isinstance(parsed, float) else str(parsed) == str(value)


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
ANY_PROGRAM = f"""
from experiments import sweep, trials
trials.check_flags = trials.check_values = lambda *_: None
trials.origin = lambda: {ORIGIN}
sweep.runs.cli(sweep.Args, sweep.main)
"""


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """quick(parameters, *words) sweeps the stand-in in tmp_path/out, with `apart` in a process of its own."""
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    monkeypatch.setattr(trials, "check_flags", lambda *_: None)
    monkeypatch.setattr(trials, "check_values", lambda *_: None)
    monkeypatch.setattr(trials, "origin", lambda: ORIGIN)

    def run_sweep(parameters, *words, method="grid", apart=False):
        content = {"program": str(tmp_path / "script.py"), "method": method, "parameters": parameters}
        path = tmp_path / "s.yaml"
        path.write_text(yaml.safe_dump(content | {"metric": {"name": "loss", "goal": "minimize"}}))
        words = [*map(str, (path, "--out", tmp_path / "out", *words))]
        return start("-c", ANY_PROGRAM, *words) if apart else main(*words)

    return run_sweep


@pytest.fixture
def fake_run(monkeypatch):
    """fake_run(before): trials run as ever, after before(flags, folder); returns the values of x so far."""
    begun, run = [], trials.run

    def install(before):
        def run_after(program, flags, folder, *rest):
            begun.append(flags["x"])
            before(flags, folder)
            run(program, flags, folder, *rest)

        monkeypatch.setattr(trials, "run", run_after)
        return begun

    return install


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
    main(*words[2:])
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


def test_study_that_lacks_a_table_is_refused(quick, tmp_path, capfd):
    """Optuna makes it anew, empty."""
    parameters, path = {"x": {"values": [1, 2]}, "steps": {"value": 1}}, tmp_path / "out/study.db"
    quick(parameters)
    whole, results = path.read_bytes(), read_results(tmp_path / "out")
    for table in ("trials", "trial_params", "trial_values", "trial_user_attributes", "trial_intermediate_values"):
        path.write_bytes(whole)
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute(f"DROP TABLE {table}")
        with pytest.raises(SystemExit) as stopped:
            quick(parameters)
        assert stopped.value.code == 2
        assert "study.db is damaged; put a copy back" in capfd.readouterr().err
    path.write_bytes(whole)
    quick(parameters)
    assert read_results(tmp_path / "out") == results


def test_cells_of_a_grid_are_queued_once_though_a_process_died_between(tmp_path, monkeypatch):
    cells = {"gamma": {"values": [0.9, 1]}, "gap_stack": {"values": [True, False]}}
    path = str(write_sweep(tmp_path / "s.yaml", parameters=cells))
    given = sweep.Args(path), sweep.read_sweep(path), "s", tmp_path
    with monkeypatch.context() as patch:
        patch.setattr(sweep, "grid_cells", lambda content: [{"gamma": 0.9, "gap_stack": True}, None])
        with pytest.raises(TypeError):
            sweep.open_study(*given)
    queued = [trial.system_attrs["fixed_params"] for trial in sweep.open_study(*given).trials]
    assert [(cell["gamma"], cell["gap_stack"]) for cell in queued] == [(0.9, True), (0.9, False), (1, True), (1, False)]


@pytest.mark.slow
def test_grid_shared_by_four_processes_runs_each_cell_once(quick, tmp_path):
    processes = [quick({"x": {"values": [*range(9)]}}, apart=True) for _ in range(4)]
    for process in processes:
        output = process.communicate(timeout=120)[0]
        assert process.returncode == 0, output
    rows = read_results(tmp_path / "out")
    assert sorted(row["x"] for row in rows) == [str(x) for x in range(9)]
    failed = {row["x"]: row["why"] for row in rows if row["state"] != "complete"}
    assert failed == {"0": "exit code 1: error: --x 0: is bad"}
    assert all(row["loss"] == f"{float(row['x'])}" for row in rows if row["state"] == "complete")
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
        trials.run(str(tmp_path / "script.py"), {}, tmp_path / "0", lock, threading.Event())
    output = (tmp_path / "0/output.txt").read_text()
    assert (f"--resume={tmp_path / '0/run'}'" if flag == "--resume=" else flag) in output
    assert "'--wandb_mode=disabled', " in output
    assert output.endswith("] false\n")


# FAILURES


@pytest.mark.parametrize(
    ("code", "output", "error", "sentence"),
    [
        (0, "stopped by SIGTERM; continue with: --resume", trials.Stopped, ""),
        (143, "stopped by SIGTERM", trials.Stopped, ""),
        (1, "error: cannot write /x: disk full, 0.0 MiB are free there; go", files.FullError, "cannot write /x: "),
        (1, "error: --x 0: is bad", RuntimeError, "exit code 1: error: --x 0: is bad"),
        (
            2,
            "\u256d\n\u2502 Error parsing --x: bad \u2502\n\u2570",
            RuntimeError,
            "exit code 2: Error parsing --x: bad",
        ),
        (152, "stopped by SIGXCPU", trials.Stopped, ""),
        (137, "", trials.Killed, "exit code 137: no output"),
    ],
)
def test_exit_code_and_output_of_a_script_select_the_error(code, output, error, sentence, tmp_path):
    (tmp_path / "script.py").write_text(f"import sys; print({output!r}); sys.exit({code})")
    with files.lock_run(tmp_path / "0") as lock, pytest.raises(error) as raised:
        trials.run(str(tmp_path / "script.py"), {}, tmp_path / "0", lock, threading.Event())
    assert raised.type is error
    assert str(raised.value).startswith(sentence)


def test_trial_whose_script_is_killed_three_times_fails(quick, tmp_path, fake_run):
    """As by the kernel when memory is full; until then it resumes."""
    errors = [OSError(116, "Stale file handle")]

    def kill(flags, folder):
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
    fake_run(lambda flags, folder: folder.name == "0001" and signal.raise_signal(signal.SIGTERM))
    quick({"x": {"values": [0, 2]}, "steps": {"value": 1}})
    assert "stopped; repeat the command to continue" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        ("objective", "(sqlite3.OperationalError) database or disk is full", r"the disk is full.*repeat the command"),
        ("begin_trial", "connection refused", r"^error: the study's database does not answer \(connection refused\)"),
    ],
)
def test_database_error_is_one_sentence_with_exit_code_1(function, error, message, quick, monkeypatch, capfd):
    def fail(*given):
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
    assert re.search(message, output.err)
    assert output.err.count("\n") == 1
    assert "results.csv" not in output.out


def test_metric_that_is_not_logged_fails_a_trial_or_ends_the_study_if_no_trial_logs_it(tmp_path, quick, capfd):
    with pytest.raises(SystemExit) as stopped:
        quick({"x": {"values": [1, 2]}, "steps": {"value": 0}})
    assert stopped.value.code == 2
    assert "error: metric loss was never logged" in capfd.readouterr().err
    assert [path.name for path in (tmp_path / "out").glob("0*")] == ["0000"]
    shutil.rmtree(tmp_path / "out")
    quick({"x": {"values": [1]}, "steps": {"values": [1, 0]}})
    assert [row["state"] for row in read_results(tmp_path / "out")] == ["complete", "fail"]


# PRUNING AND SAMPLING


def test_pruned_trial_ends_early_and_stays_pruned(tmp_path, monkeypatch):
    """Also where its process dies before the study is told: the script is not run again."""
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    content = {"method": "random", "program": str(tmp_path / "script.py"), "metric": {"name": "loss"}}
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=2))
    trial = study.ask()
    with files.lock_run(folder := tmp_path / "0000") as lock:
        where = folder, lock, threading.Event()
        with monkeypatch.context() as patch:
            patch.setattr(trials, "seconds_of", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                sweep.run_trial(study, trial, content, {"x": 3, "steps": 1000}, *where)
        assert len((folder / "run/metrics.jsonl").read_text().splitlines()) < 1000
        monkeypatch.setattr(trials, "run", None)
        sweep.run_trial(study, trial, content, {}, *where)
    assert [(trial.state.name, trial.value) for trial in study.trials] == [("PRUNED", 3)]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({}, {1: 3, 2: 3, 3: 3, 4: 9}),
        ({"eta": 2}, {1: 3, 2: 3, 3: 3, 4: 6}),
        ({"eta": 4}, {1: 3, 2: 3, 3: 3, 4: 12, 5: 3}),
    ],
)
def test_hyperband_prunes_at_the_rungs_of_wandb(rule, expected):
    """At min_iter eta^k, trials below the best 1 / eta end. Trial 4 is the best until step 3 and falls behind then;
    trial 5 is the second best of six."""
    pruner = sweep.make_pruner({"early_terminate": {"type": "hyperband", "min_iter": 3} | rule})
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


def test_bayesian_search_counts_failed_trials_as_the_worst_so_far(quick, tmp_path, capfd):
    quick({"x": {"values": [0, 3, 5]}, "steps": {"value": 1}}, "--count", 7, "--seed", 1, method="bayes")
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


@pytest.mark.parametrize(
    ("goal", "state", "expected"),
    [
        ("maximize", TrialState.FAIL, (2.0, TrialState.COMPLETE)),
        ("minimize", TrialState.FAIL, (5.0, TrialState.COMPLETE)),
        ("minimize", TrialState.PRUNED, (None, TrialState.PRUNED)),
    ],
)
def test_outcome_of_a_failed_or_pruned_trial_depends_on_goal(goal, state, expected):
    study = optuna.create_study(direction=goal)
    study.add_trials(optuna.trial.create_trial(value=value) for value in (5.0, 2.0))
    study.ask()
    rules = {"method": "bayes", "metric": {"goal": goal}}
    assert sweep.outcome_for_sampler(study, rules, None, state) == expected


def test_values_are_drawn_from_the_ranges_of_wandb():
    """Whole numbers from whole bounds; both ends of a range are within reach."""
    specs = {
        "whole": {"min": 4, "max": 16},
        "real": {"min": 0.1, "max": 0.6},
        "log": {"distribution": "log_uniform_values", "min": 1e-5, "max": 1e-1},
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
    assert set(values["choice"]) == {"a", "", False}
    assert values["fixed"] == [[1]] * 300


@pytest.mark.parametrize(("method", "sampler"), [("bayes", "TPESampler"), ("random", "RandomSampler")])
def test_method_and_file_select_sampler_pruner_and_count(method, sampler, tmp_path, monkeypatch):
    assert type(sweep.make_sampler(sweep.Args("s"), {"method": method}, 0)).__name__ == sampler
    rule = {"type": "hyperband", "min_iter": 3} if method == "bayes" else None
    path, studies = write_sweep(tmp_path / "s.yaml", method=method, run_cap=3, early_terminate=rule), []
    monkeypatch.setattr(sweep, "begin_trial", lambda study, args, content, count, out: studies.append((study, count)))
    main(path, "--out", tmp_path / "out")
    ((study, count),) = studies
    assert type(study.pruner).__name__ == ("SuccessiveHalvingPruner" if rule else "NopPruner")
    assert (study.direction.name, count) == ("MAXIMIZE", 3)


# RESULTS


def test_names_with_dollar_signs_are_drawn_as_they_are(tmp_path, monkeypatch):
    """Not as formulas; nor are the numbers of a logarithmic axis."""
    study = optuna.create_study(study_name="$\\frac{$", sampler=optuna.samplers.RandomSampler(seed=0))
    study.set_user_attr("sweep", {"metric": {"name": "$\\frac{$", "goal": "minimize"}})
    specs = {"x": {"values": ["$\\frac{$", "b"]}, "y": {"distribution": "log_uniform_values", "min": 1e-5, "max": 1e-1}}
    for value in range(4):
        trial = study.ask()
        assert {name: sweep.suggest(trial, name, spec) for name, spec in specs.items()}
        for name, content in {"ended": "complete", "seconds": 1, "origin": ORIGIN}.items():
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
    attrs, distributions = (
        {"ended": "complete", "seconds": 1, "origin": ORIGIN},
        dict.fromkeys("xy", optuna.distributions.FloatDistribution(0, 1)),
    )
    study.add_trials(
        optuna.trial.create_trial(
            params={"x": x, "y": y}, distributions=distributions, value=sign * (x**8 - (1 - y) ** 8), user_attrs=attrs
        )
        for x, y in np.random.default_rng(0).random((60, 2)).tolist()
    )
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
    "range in a grid": (with_range(0.9, 1.0) | {"method": "grid"}, [], "gamma", "a grid takes values"),
    "half a range": (with_gamma({"min": 0.9}), [], "gamma", "min and max"),
    "value and values": (with_gamma({"value": 0.9, "values": [1]}), [], "gamma", "a value, values, or min and max"),
    "command": ({"command": ["python", "--env_id=maze"]}, [], "command: Extra inputs are not permitted", "--env_id"),
    "rule without rungs": ({"early_terminate": {"type": "hyperband"}}, [], "early_terminate.min_iter: Field required"),
    "unknown goal": ({"metric": {"name": "loss", "goal": "max"}}, [], "metric.goal", "'minimize' or 'maximize'"),
    "no count": ({"method": "bayes"}, [], "--count 0", "number of trials"),
    "twenty digits of jobs": ({}, ["--jobs", "1" * 20], "--jobs 1111", "from 1 to 1000"),
    "unknown storage": ({}, ["--storage", "nosql://me:secret@x"], "--storage nosql://me:***@x", "cannot be opened"),
    "values as text": (with_gamma({"values": "abc"}), [], "gamma.values", "valid list, it is 'abc'"),
    "date": (with_gamma({"values": [date(2020, 1, 1)]}), [], "gamma.values.0", "2020"),
    "number without a point": (with_range("1e-4", 1), [], "gamma.min: give a number", "1.0e-4"),
    "min above max": (with_range(2, 1), [], "gamma: min must not be above max", "SWEEP"),
    "logarithm of 0": (with_range(0, 1, distribution="log_uniform_values"), [], "gamma", "must be above 0"),
    "unknown distribution": (with_range(0, 1, distribution="normal"), [], "normal", "'log_uniform_values'"),
    "misspelt key": (with_range(0, 1, distribtion="uniform"), [], "gamma.distribtion", "not permitted"),
    "large grid": ({"parameters": WIDE}, [], "its grid has 10,000,000,000 cells", "at most 1,000"),
    "run of another": ({"parameters": {"resume": {"value": "/x"}}}, [], "resume={'value': '/x'}", "each run is given"),
    "later value refused": (with_gamma({"values": [0.9, 1.5]}), [], "--gamma '1.5'", "from 0 to 1"),
    "end refused": (with_range(0.9, 1.5), ["--count", 1], "--gamma '1.5'", "from 0 to 1"),
    "flag of ours in a list": (
        {"parameters": {"env_id": {"value": ["maze", "--wandb-mode", "online"]}}, "method": "grid"},
        [],
        "--env-id",
        "cannot begin with --",
    ),
    "flag twice": ({}, ["--set", "gamma=0.5", "gamma=0.9"], "--set gamma=0.9", "give one value"),
    "--set twice": ({}, ["--set", "gamma=0.5", "--set", "l2=0"], "--set: is given twice", "all its values after one"),
    "file as folder": ({}, ["--out", "/dev/null"], "--out /dev/null: cannot write there", "another folder"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_sweep_is_refused_in_one_sentence(case, tmp_path, capfd):
    changes, words, *parts = BAD[case]
    path = write_sweep(tmp_path / "s.yaml", **changes)
    assert_refused(sweep, [path, "--out", tmp_path / "out", *words], capfd, *parts)
    assert case == "unknown storage" or not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: " + "[" * 200_000, "nested too deeply"),  # crashes the YAML parser in C
        ("a: &a [*a]", "program: Field required"),
        ("- 1", "a valid dictionary, it is [1]"),
        ("program: a\nprogram: b", "program stands there twice"),
        ("a: 2020-13-45", "month must be in 1..12"),
        ("\x00", "not allowed"),
        (None, "give a sweep file"),
    ],
)
def test_damaged_sweep_file_is_refused_in_one_sentence(text, reason, tmp_path, capfd):
    if text is not None:
        (tmp_path / "s").write_text(text)
    assert_refused(sweep, [tmp_path / "s", "--out", tmp_path / "out"], capfd, f"SWEEP {tmp_path / 's'}: ", reason)


def test_sweep_with_every_kind_of_value_is_read(tmp_path):
    """Also with keys that only W&B's server reads."""
    parameters = {
        "gamma": {"values": [0.9, 1]}, "augment": {"values": ["", "flip"]}, "gap_stack": {"values": [True, False]},
        "l2": {"min": 0, "max": 1.0}, "vf_coef": {"value": [1, 2.5]}, "kl_coef": {"value": 0},
        "learning_rate": {"distribution": "log_uniform_values", "min": 1e-5, "max": 1}, "seed": {"min": 1, "max": 9},
    }  # fmt: skip
    given = {"parameters": parameters, "method": "bayes", "name": date(2024, 5, 1), "project": "p", "run_cap": 9}
    given["early_terminate"] = {"type": "hyperband", "min_iter": 3, "eta": 2}
    read = sweep.read_sweep(str(write_sweep(tmp_path / "s.yaml", **given)))
    assert json.loads(json.dumps(read))["parameters"] == parameters
    assert [type(x) for x in read["parameters"]["gamma"]["values"]] == [float, int]
    assert [type(x) for x in read["parameters"]["gap_stack"]["values"]] == [bool, bool]


def test_sweep_may_merge_a_part_into_another(tmp_path):
    (tmp_path / "s.yaml").write_text(
        "program: a\nmetric: &one {name: b, goal: minimize}\nmore:\n  <<: *one\n  goal: c\n"
    )
    assert files.read(tmp_path / "s.yaml", dict, "SWEEP", "")["more"] == {"name": "b", "goal": "c"}


def test_grid_with_a_cell_that_the_script_refuses_is_accepted(tmp_path):
    """512 minibatches are too many for 8 games of 16 steps, but not for 64."""
    parameters = {"num_envs": [8, 64], "num_minibatches": [4, 512], "num_steps": [16]}
    given = {"parameters": {name: {"values": values} for name, values in parameters.items()}}
    sweep.check_values(sweep.read_sweep(str(write_sweep(tmp_path / "s.yaml", **given))))


def test_fractions_for_an_integer_flag_are_refused_before_a_trial(tmp_path, capfd):
    """In tyro's words, as by the script itself."""
    given = {"parameters": {"hidden": {"min": 16, "max": 64, "distribution": "uniform"}}, "method": "random"}
    with pytest.raises(SystemExit) as stopped:
        main(write_sweep(tmp_path / "s.yaml", **given), "--count", 1)
    assert stopped.value.code == 2
    assert re.search(r"--hidden: .*'16\.0'", capfd.readouterr().err)


def test_study_with_other_settings_in_the_same_folder_is_refused(tmp_path, capfd):
    path, out = write_sweep(tmp_path / "s.yaml"), tmp_path / "out"
    out.mkdir()
    sweep.open_study(sweep.Args(str(path)), sweep.read_sweep(str(path)), "s", out)
    (out / "0000").mkdir()
    storage = "--storage", f"sqlite:///{out / 'study.db'}"
    for words, *parts in (
        ([path, "--out", out, "--set", "gamma=0.5"], "give another --out"),
        ([path, "--out", out, "--seed", 1], "--seed 1: the study s", "has 0, give that"),
        ([write_sweep(tmp_path / "t.yaml"), "--out", out], "has trials of another study"),
        ([path, "--out", tmp_path / "elsewhere", *storage], f"has its runs in {out}, give that"),
    ):
        assert_refused(sweep, words, capfd, *parts)
    for text in ("[]", '{"study": "s"}', '{"id": 1}', "{", "[" * 100_000):
        (out / "study.json").write_text(text)
        assert_refused(sweep, [path, "--out", out], capfd, f"--out {out / 'study.json'}: ", "give another folder")
    (out / "study.db").unlink()
    assert_refused(sweep, [path, "--out", out], capfd, "or of one that is gone")
