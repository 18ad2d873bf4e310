"""Published tables: each cell can be run, what is done is not done again; the tables of results; the shell scripts."""

import csv
import fcntl
import importlib
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tyro
from conftest import ROOT, TINY, assert_refused, assert_same_run, flags_of, read_metrics, run_here, wait_for
from PIL import Image

import ppo_procgen
from common import files, runs
from experiments import records, reproduce, tables, trials

ROWS = reproduce.published()
FLAGS = " ".join(f"{name}={value}" for name, value in TINY.items() if name not in ("total_timesteps", "wandb_mode"))
TABLE = [
    {"table": "small", "cell": "runs", "script": "ppo_procgen.py", "flags": FLAGS, "published": "2.5"},
    {"table": "small", "cell": "fails", "script": "ppo_procgen.py", "flags": FLAGS + " gamma=2", "published": "fail"},
    {"table": "small", "cell": "no script", "script": "", "flags": "", "published": "1.9"},
]


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A published table of TINY cells in the reference's place: one that runs, one that fails, one without a script."""
    rows = [row | {"steps": "3840", "metric": "charts/episodic_return", "note": ""} for row in TABLE]
    rows[1]["published"] = ""
    records.write_rows(tmp_path / "tables.csv", rows)
    monkeypatch.setattr(reproduce, "REFERENCE", tmp_path / "tables.csv")
    return tmp_path


@pytest.mark.parametrize("name", dict.fromkeys(row["table"] for row in ROWS))
def test_every_cell_can_be_run(name):
    """Its flags are the script's, with values that it takes, and no two cells of a metric are the same run."""
    seen, args = set(), reproduce.Args(table=name)
    for row in reproduce.read_table(name):
        assert row["published"] == "" or math.isfinite(float(row["published"]))
        if row["script"]:
            flags = reproduce.flags_of(row, args)
            script = importlib.import_module(Path(row["script"]).stem)
            words = runs.plain_booleans(script.Args, trials.words_of(flags))
            runs.check_args(tyro.cli(script.Args, args=words), script.SCRIPT)
            seen.add((reproduce.folder_of(Path(), row, flags, 1), row["metric"]))
    assert len(seen) == sum(bool(row["script"]) for row in reproduce.read_table(name))


def commands_with_settings():
    """Those in the docs that give a table's cells other flags."""
    pages = [ROOT / name for name in ("README.md", "benchmarks/TODO.md", "experiments/reproduce.py")]
    pages += sorted(ROOT.glob("docs/*.md"))
    lines = [line for page in pages for line in page.read_text().splitlines()]
    found = [
        line.partition("python -m experiments.reproduce ")[2].split("#")[0].strip()
        for line in lines
        if "--set " in line
    ]
    return [line for line in dict.fromkeys(found) if line]


@pytest.mark.parametrize("words", commands_with_settings())
def test_settings_that_the_docs_give_are_taken(words):
    args = tyro.cli(reproduce.Args, args=shlex.split(words))
    reproduce.check_overrides(args, reproduce.read_table(args.table))


def test_the_interval_is_students():
    """Mean 2, standard error 1/sqrt(3), t(2) = 4.3027 at 97.5 %; nothing for a single value."""
    half = 4.302653 / 3**0.5
    np.testing.assert_allclose(reproduce.interval([1.0, 2.0, 3.0]), [2 - half, 2 + half], rtol=1e-6)
    assert np.isnan([reproduce.interval([1.0]), reproduce.interval([1.0, 1.0])]).all()


@pytest.mark.slow
def test_a_table_is_made_and_not_made_twice(table, monkeypatch):
    """Published beside ours; a failure is recorded, a cell without a script stays, what is done is not run again."""
    apart = trials.run

    def run(program, flags, *rest, **options):
        (apart if flags.get("gamma") == "2" else run_here)(program, flags, *rest, **options)

    monkeypatch.setattr(trials, "run", run)
    words = {"seeds": (1, 3), "scale": 0.1, "jobs": 2, "runs": str(table / "runs"), "out": str(table / "out")}
    args = reproduce.Args(table="small", **words)
    chosen = reproduce.main(replace(args, cells=("run",)))
    assert [row["seeds"] for row in chosen] == [2, 0, 0]
    assert chosen[1]["note"] == ""  # that cell was not begun
    first, failed, absent = reproduce.main(args)
    values = [read_metrics(run.parent)[-1]["charts/episodic_return"] for run in table.glob("runs/*/*/*/metrics.jsonl")]
    assert (first["seeds"], first["steps"], first["published"]) == (2, 384, "2.5")
    assert first["ours"] == pytest.approx(np.mean(values))
    assert first["low"] < first["ours"] < first["high"]
    assert (failed["seeds"], absent["seeds"]) == (0, 0)
    assert failed["of its runs"] == "2 failed: exit code 2: error: --gamma '2': must be from 0 to 1"
    times = {path: path.stat().st_mtime_ns for path in table.glob("runs/*/*/*/metrics.jsonl")}
    assert len(times) == 2
    again = reproduce.main(args)[0]
    assert {path: path.stat().st_mtime_ns for path in table.glob("runs/*/*/*/metrics.jsonl")} == times
    assert (again["ours"], again["seconds"]) == (first["ours"], first["seconds"])
    page = (table / "out/small.md").read_text()
    assert "python -m experiments.reproduce small --scale 0.1 --seeds 1 3" in page
    assert "Not the published setting" in page
    with (table / "out/small.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["ours"] == "" for row in rows] == [False, True, True]
    assert rows[0]["commit"]
    assert rows[0]["machine"]
    assert np.asarray(Image.open(table / "out/small.png").convert("L")).std() > 5
    other = reproduce.main(reproduce.Args(table="small", collect=True, **words | {"scale": 0.2}))
    assert other[0] == pytest.approx(again, nan_ok=True)  # those are other runs, and what is there stays
    assert page[: page.index("| fails")] in (table / "out/small.md").read_text()


def test_a_run_that_another_process_holds_is_made_once_it_is_free(table, monkeypatch, capfd):
    """As after `kill -9`, where the script of the one before is still writing its checkpoint: after the others."""
    args = reproduce.Args("small", cells=("runs",), seeds=(1, 2), runs=str(table / "runs"), out=str(table / "out"))
    row = reproduce.read_table("small")[0]
    held = files.lock_run(reproduce.folder_of(table / "runs", row, reproduce.flags_of(row, args), 1))
    made = []

    def run(program, flags, folder, lock, **how):
        made.append(flags["seed"])
        held.close()

    monkeypatch.setattr(trials, "run", run)
    reproduce.main(args)
    assert made == [2, 1]
    assert capfd.readouterr().out.count("another process is at it") == 1


BAD = {
    "an unknown table": (["coinrun_grid"], "TABLE coinrun_grid", "coinrun_ppo_grid"),
    "no scale": (["gamma", "--scale", 0], "--scale 0", "above 0"),
    "a seed twice": (["gamma", "--seeds", 1, 1], "--seeds", "each once"),
    "no jobs": (["gamma", "--jobs", 0], "--jobs 0", "from 1"),
    "a seed below 0": (["gamma", "--seeds", 1, -1], "--seeds 1 -1", "from 0 to 2147483647"),
    "a seed of all": (["gamma", "--set", "seed=3"], "--set seed=3", "each run is given its own"),
    "another run": (["gamma", "--set", "run_dir=/x"], "--set run_dir=/x", "each run is given its own"),
    "what the cells differ in": (["gamma", "--set", "gamma=0.9"], "--set gamma", "differ"),
    "steps": (["gamma", "--set", "total_timesteps=9"], "--set total_timesteps", "--scale"),
    "no such cell": (["gamma", "--cells", "0.99", "width"], "--cells width", "0.99, bigfish"),
    "a value that the script refuses": (["gamma", "--set", "learning_rate=-1"], "--learning-rate '-1'", "0 or more"),
    "a value that one cell refuses": (
        ["doorgym_continual", "--set", "hyper_width=128"],
        "--hyper-width 128",
        "--method hnppo",
    ),
    "an unknown flag": (["gamma", "--set", "lr=9"], "lr", "no flag"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_answered_in_one_sentence(case, tmp_path, capfd):
    words, names, valid = BAD[case]
    assert_refused(reproduce, [*words, "--runs", tmp_path, "--out", tmp_path], capfd, names, valid)
    assert not list(tmp_path.iterdir())


def test_damaged_files_are_answered_in_one_sentence(table, monkeypatch, capfd):
    """Before anything is run: files in the place of folders, the progress of a run, and an earlier result."""
    monkeypatch.setattr(trials, "run", None)
    (out, root) = (table / "out", table / "runs")
    words = ["small", "--seeds", 1, "--out", out, "--runs", root]
    for flag in ("--out", "--runs"):
        assert_refused(reproduce, [*words, flag, table / "tables.csv"], capfd, f"{flag} {table}/tables.csv: cannot wri")
    row = reproduce.read_table("small")[0]
    folder = reproduce.folder_of(root, row, reproduce.flags_of(row, reproduce.Args("small")), 1)
    folder.mkdir(parents=True)
    good = {"done": True, "seconds": 1.5, "why": ""}
    for content in ([], 1, {}, good | {"done": 1}, good | {"seconds": "1"}, good | {"seconds": -1}, good | {"why": 1}):
        (folder / "progress.json").write_text(json.dumps(content))
        assert_refused(reproduce, words, capfd, f"--runs {folder / 'progress.json'}: ", "delete it")
    (folder / "progress.json").unlink()
    for text in ("seeds\n1\n", "seeds,steps\n1\n", "seeds,steps\n1,x\n", "seeds,steps\n-1,2\n"):
        (out / "small.csv").write_text(text)
        assert_refused(reproduce, words, capfd, f"--out {out / 'small.csv'}: ", "move it away")
    result = {"cell": "a", "metric": "b", "command": "c --set gamma=0.5", "flags": row["flags"], "machine": "here",
              "ours": "1.5", "low": "", "high": "", "seeds": "1", "published steps": "100", "steps": "10",
              "seconds": "", "published": "", "note": "", "script": "", "jax": "", "commit": "",
              "date": ""}  # fmt: skip
    for name, bad in {"seeds": "-1", "steps": "x", "ours": "one", "published steps": "1.5", "low": "nan"}.items():
        records.write_rows(out / "small.csv", [result | {name: bad}])
        assert_refused(reproduce, words, capfd, f"--out {out / 'small.csv'}: ", "move it away")
    records.write_rows(out / "small.csv", [result])
    assert_refused(reproduce, words, capfd, f"--out {out / 'small.csv'}: ", "of --set gamma=0.5", "another folder")
    of_cell = {"cell": row["cell"], "metric": row["metric"], "command": "c", "flags": "gamma=0.7"}
    records.write_rows(out / "small.csv", [result | of_cell])
    assert_refused(reproduce, words, capfd, f"--out {out / 'small.csv'}: ", "of an older table", "another folder")
    records.write_rows(out / "small.csv", [result | {"command": "c"}])  # of a cell that is in the table no more
    assert_refused(reproduce, words, capfd, f"--out {out / 'small.csv'}: ", "of an older table")
    records.write_rows(out / "small.csv", [result | {"remark": "mine"}])
    assert_refused(reproduce, words, capfd, f"--out {out / 'small.csv'}: ", "remark", "move it away")
    empty = [result | {"seeds": "0"}, result | of_cell | {"seeds": "0"}]
    records.write_rows(out / "small.csv", empty)
    assert len(reproduce.read_results(reproduce.Args("small", out=str(out)))) == 2
    (out / "small_evaluations.csv").touch()  # of runs of another --set that are under way
    assert_refused(reproduce, words, capfd, f"--out {out / 'small.csv'}: ", "of --set gamma=0.5", "another folder")
    (out / "small.csv").unlink()
    other = [*words, "--cells", "runs", "--set", "adam_eps=1e-6"]
    assert_refused(reproduce, other, capfd, f"--out {out}: ", "without --set")


def test_a_file_keeps_the_most_training_of_each_cell(table, monkeypatch):
    """Another machine has none of the runs that a file is of: what it adds does not take them away."""
    origin = {"machine": "this", "jax": "1", "commit": "a", "date": "today"}
    monkeypatch.setattr(trials, "run", run_here)
    monkeypatch.setattr(trials, "origin", lambda: origin)
    words = {"scale": 0.1, "out": str(table / "out"), "cells": ("run",)}
    first, *_ = reproduce.main(reproduce.Args("small", seeds=(1, 3), runs=str(table / "here"), **words))
    (seed,) = (table / "here").glob("*/1")
    shutil.copytree(seed, table / "there" / seed.relative_to(table / "here"))
    one_seed, *_ = reproduce.main(reproduce.Args("small", seeds=(1,), runs=str(table / "there"), **words))
    assert first["seeds"] == 2
    assert one_seed == pytest.approx(first, nan_ok=True)
    fresh = words | {"out": str(table / "fresh")}
    beside = reproduce.main(reproduce.Args("small", seeds=(1,), runs=str(table / "here"), **fresh))[0]
    assert beside == pytest.approx(first, nan_ok=True)  # the other seed's run is there too, and counts
    origin["commit"] = "b"
    another, *_ = reproduce.main(reproduce.Args("small", seeds=(1, 3), runs=str(table / "there"), **words))
    assert another["commit"] == "a b"
    assert another["ours"] == pytest.approx(first["ours"])


def test_a_cell_s_whole_name_is_of_that_cell_alone():
    def asked(*cells):
        args = reproduce.Args("doorgym_lever", cells=cells)
        return [row["cell"] for row in reproduce.read_table(args.table) if reproduce.is_asked(args, row)]

    assert asked("PPO") == ["PPO"]
    assert asked("PPO", "fresh") == ["PPO", "HN-PPO, fresh critic"]
    assert len(asked("entropy")) == 3
    assert asked() == [row["cell"] for row in reproduce.read_table("doorgym_lever")]


def test_what_is_known_of_a_killed_run(table, monkeypatch):
    """Its machine and commit, from its start on, and its own clock: also what it had done before it was killed."""
    args = reproduce.Args("small", cells=("runs",), seeds=(1,), runs=str(table / "runs"), out=str(table / "out"))
    monkeypatch.setattr(trials, "origin", lambda: {"machine": "this", "jax": "1", "commit": "a", "date": "today"})

    def run(program, flags, folder, lock, **how):
        assert reproduce.read_progress(folder)["commit"] == "a"
        (folder / "a run").mkdir()
        runs.write_json(folder / "a run/args.json", {"script": "x", "wandb_id": "x", "args": {}})
        (folder / "a run/metrics.jsonl").write_text('{"seconds": 90.5, "charts/episodic_return": 1}\n')

    monkeypatch.setattr(trials, "run", run)
    row, other, *_ = reproduce.main(args)
    assert (row["seconds"], row["ours"], row["commit"]) == (90, 1, "a")
    assert [x["command"].partition("small ")[2] for x in (row, other)] == ["--seeds 1 --cells runs", "--seeds 1"]


def test_every_evaluation_of_a_run_is_written_down(tmp_path):
    """Mean and standard error over its episodes; and how fast the run was in the tenth that nothing disturbed."""
    metric, run = "eval/test_levels/mean_return", tmp_path / "1" / "a run"
    run.mkdir(parents=True)
    runs.write_json(run / "args.json", {"script": "x", "wandb_id": "x", "args": {}})
    lines = [{"global_step": 100 * i, "seconds": (2.0 if i < 20 else 1.0) * i, "charts/SPS": 1} for i in range(40)]
    evaluation = {metric: 2.5, "eval/test_levels/std": 3.0, "eval/test_levels/episodes": 65.0}
    lines.insert(30, {"global_step": 2950, "seconds": 29.5} | evaluation)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    row = {"cell": "PPO, maze", "metric": metric}
    folders, flags = [tmp_path / "1", tmp_path / "2"], {"total_timesteps": 4000}
    runs.write_json(tmp_path / "1/progress.json", {"done": False, "seconds": 0.0, "why": "", "commit": "a"})
    (found,) = reproduce.evaluations(row, flags, folders)
    assert [found[name] for name in ("seed", "of steps", "step", "mean", "error")] == [1, 4000, 2950, "2.5", "0.375"]
    assert (found["steps/s"], found["commit"]) == ("100", "a")


def test_curves_of_finished_runs_are_kept(tmp_path):
    row = {"cell": "runs, maze", "flags": "env_id=maze", "metric": "eval/test_levels/mean_return"}
    lines = [{"global_step": 10 * i, "seconds": 36.0 * i, reproduce.RETURN: i} for i in range(1, 181)]
    for seed, done in (("1", True), ("2", False)):
        (tmp_path / seed / "a run").mkdir(parents=True)
        runs.write_json(tmp_path / seed / "a run/args.json", {"script": "x", "wandb_id": "x", "args": {}})
        (tmp_path / seed / "a run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        runs.write_json(tmp_path / seed / "progress.json", {"done": done, "seconds": 0.0, "why": ""})
    kept = reproduce.curves(row, {"total_timesteps": 1800}, [tmp_path / "1", tmp_path / "2"])
    assert (len(kept), kept[1]["global_step"], kept[1]["hours"]) == (60, 40, "0.0400")


def test_an_error_in_one_worker_stops_the_others(table, monkeypatch):
    """Such as a full disk's: else the other cells would be run to their ends before it is said."""
    begun = []

    def run_or_fail(program, flags, folder, lock, stopping, **how):
        begun.append(flags["seed"])
        if len(begun) == 1:
            raise files.FullError("cannot write")
        raise trials.Stopped if stopping.wait(5) else RuntimeError("nobody stopped it")

    monkeypatch.setattr(trials, "run", run_or_fail)
    where = {"runs": str(table / "runs"), "out": str(table / "out")}
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(files.FullError, match="cannot write"):
        reproduce.main(reproduce.Args("small", cells=("runs",), seeds=(1, 2, 3, 4), jobs=2, **where))
    assert len(begun) <= 2
    assert signal.getsignal(signal.SIGTERM) is handler


def test_seeds_are_pooled_in_the_table_of_all_algorithms(tmp_path, monkeypatch):
    """(2 + 4) / 2, and their standard error; a seed's longer run counts alone; speeds are one machine's."""
    row = {"cell": "PPO, starpilot", "seed": 1, "step": 507_904, "mean": 2, "error": 0.3, "steps/s": ""}
    row |= {"of steps": 1_000_000, "machine": "AMD EPYC, 1 cores"}
    shorter = row | {"of steps": 500_000, "mean": 9}
    other = row | {"seed": 2, "step": 499_000, "mean": 4, "error": 0.4, "steps/s": 77}
    elsewhere = other | {"step": 1_000_900, "steps/s": 99, "machine": "a faster one"}
    rows = [row, shorter, other, elsewhere]
    records.write_rows(tmp_path / "algorithms_nature_evaluations.csv", rows)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.side_by_side()[-1] == "| PPO | 3.00 (1.00), 2 seeds | 4.00 (0.40) |  |  | 77 |"


def test_a_row_without_its_runs_here_keeps_what_was_said_of_them(table):
    row = reproduce.read_table("small")[0]
    cell = {"cell": row["cell"], "metric": row["metric"], "command": "c", "flags": row["flags"], "machine": "here"}
    cell |= {"ours": "1.5", "low": "", "high": "", "seeds": "1", "published steps": "100", "steps": "10", "seconds": ""}
    cell |= {"note": "older", "of its runs": "2 failed: by night", "jax": "1", "commit": "a", "date": "today"}
    (table / "out").mkdir()
    records.write_rows(table / "out/small.csv", [cell | {"published": "", "script": row["script"]}])
    args = reproduce.Args("small", seeds=(1,), collect=True, runs=str(table / "runs"), out=str(table / "out"))
    first, *_ = reproduce.main(args)
    assert (first["ours"], first["note"], first["of its runs"]) == (1.5, row["note"], "2 failed: by night")
    assert list(first) == list(reproduce.Result.__annotations__)
    assert "2 failed: by night" in (table / "out/small.md").read_text()


def test_seeds_of_another_machine_stay_beside_those_that_ran_here():
    """Their mean, notes and origins together; where steps differ, or seeds are not known, the row of more training."""
    args = reproduce.Args("doorgym_lever", seeds=(2,), cells=("PPO",))
    row = {"cell": "PPO", "steps": 10, "seconds": 30, "note": "n", "published": "", "of its runs": "seed 2 ended"}
    row |= {"machine": "one", "jax": "1", "commit": "a", "date": "today"}
    here = row | reproduce.of_seeds({2: 0.5}) | {"commit": "b"}
    before = row | reproduce.of_seeds({1: 0.1, 2: 0.9}) | {"seconds": 60, "of its runs": "slow; seed 2 ended"}
    got = reproduce.merged(before, here, args)
    assert (got["ours"], got["seeds"], got["values"], got["seconds"]) == (pytest.approx(0.3), 2, "1:0.1 2:0.5", 45)
    assert (got["commit"], got["machine"], got["of its runs"]) == ("a b", "one", "slow; seed 2 ended")
    assert "--seeds 1 2 --cells PPO" in got["command"]
    assert reproduce.notes_of(got) == "n; seeds 0.10, 0.50; slow; seed 2 ended"
    longer = before | reproduce.of_seeds({1: 0.1}) | {"steps": 30}
    assert reproduce.merged(longer, here, args)["values"] == "1:0.1"
    assert reproduce.merged(longer | {"steps": 9}, here, args) == here
    unknown = before | {"values": ""}
    assert reproduce.merged(unknown, here, args)["values"] == ""
    assert reproduce.merged(before, row | reproduce.of_seeds({}), args)["values"] == before["values"]


def test_seeds_that_ran_with_other_defaults_are_noted(tmp_path):
    row = {"cell": "c", "metric": "m", "published": "", "steps": "", "note": "", "script": "x.py", "flags": ""}
    for seed, own in ((1, {"old": 1}), (2, {"old": 1, "new_flag": 2}), (3, {"old": 1, "new_flag": 2})):
        run = tmp_path / str(seed) / "game__x__1"
        run.mkdir(parents=True)
        saved = {"script": "x", "wandb_id": "x", "args": own | {"seed": seed, "run_dir": str(run)}}
        (run / "args.json").write_text(json.dumps(saved))
        lines = [{"global_step": 1, "time": 1, "m": m} for m in (99, seed**2)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (run.parent / "progress.json").write_text('{"done": true, "seconds": 1, "why": ""}')
    folders = [tmp_path / seed for seed in "123"]
    assert "differ in --new-flag" in reproduce.summarize(row, {}, folders, reproduce.Args("small"))["of its runs"]
    assert not reproduce.summarize(row, {}, folders[1:], reproduce.Args("small"))["of its runs"]
    short = reproduce.summarize(row, {"total_timesteps": 9}, folders[1:2], reproduce.Args("small"))["of its runs"]
    assert short == "seed 2 ended after 1e-06M"
    # What counts is the mean, over the runs that are done, of what each logged last.
    made = reproduce.summarize(row, {}, folders, reproduce.Args("small"))
    assert (made["ours"], made["seeds"]) == (pytest.approx(14 / 3), 3)
    assert (made["low"], made["high"]) == reproduce.interval([1, 4, 9])
    (tmp_path / "3/progress.json").write_text('{"done": false, "seconds": 1, "why": ""}')
    made = reproduce.summarize(row, {}, folders, reproduce.Args("small"))
    assert (made["ours"], made["seeds"]) == (2.5, 2)


def test_a_run_that_went_on_has_each_commit_once():
    def commits(*texts):
        return reproduce.joined(*({"commit": text} for text in texts))["commit"]

    assert commits("", "a") == "a"
    assert commits("a b+", "b") == "a b+ b"
    assert commits("a b", "b") == commits("a b", "a") == commits("a", "a b") == "a b"
    machines = [{"machine": name} for name in ("AMD EPYC, 2 cores", "Intel", "AMD EPYC, 2 cores and Intel")]
    assert reproduce.joined(*machines)["machine"] == "AMD EPYC, 2 cores and Intel"


def test_failures_are_told(table, monkeypatch, capfd):
    """Where all runs failed, with exit code 1 and each reason once; beside one that came to its end, in a line."""

    def fail(program, flags, *rest, **options):
        if failing or "gamma" in flags:
            raise RuntimeError("exit code 1: error: no")

    monkeypatch.setattr(trials, "run", fail)
    monkeypatch.setattr(trials, "origin", lambda: {"machine": "this", "jax": "1", "commit": "a", "date": "today"})
    words = ["small", "--seeds", "1", "--out", str(table / "out"), "--runs", str(table / "runs")]
    failing = True
    with pytest.raises(SystemExit) as stopped:
        runs.cli(reproduce.Args, reproduce.main, words)
    assert stopped.value.code == 1
    told = f"2 of 2 runs failed, see {table / 'runs'}: "
    assert capfd.readouterr().err.startswith(f"error: {told}")
    failing = False
    runs.cli(reproduce.Args, reproduce.main, words)
    assert f"1 of 2 runs failed, see {table / 'runs'}: fails, seed 1: exit code 1: error: no" in capfd.readouterr().out


def test_a_run_that_something_else_stopped_is_begun_again(table, monkeypatch, capfd):
    """Nobody asked this process to stop, so it goes on until the run is done or has failed."""
    begun = []

    def stop_once(program, flags, folder, lock, **how):
        begun.append(folder)
        raise trials.Stopped if len(begun) == 1 else RuntimeError("exit code 1")

    monkeypatch.setattr(trials, "run", stop_once)
    monkeypatch.setattr(trials, "origin", dict)
    words = ["small", "--cells", "runs", "--seeds", "1", "--out", str(table / "out"), "--runs", str(table / "runs")]
    with pytest.raises(SystemExit):
        runs.cli(reproduce.Args, reproduce.main, words)
    assert len(begun) == 2
    assert "exit code 1" in capfd.readouterr().err


# THE TABLES OF RESULTS


def test_the_docs_have_the_tables_of_the_committed_files():
    tables.main(tables.Args(check=True))


def test_a_new_number_comes_into_the_page(tmp_path, monkeypatch):
    """And nothing else changes."""
    for path in tables.SPEED.glob("*.csv"):
        (tmp_path / path.name).write_text(path.read_text().replace(",1595,", ",98765,"))
    monkeypatch.setattr(tables, "SPEED", tmp_path)
    old = (tables.DOCS / "results.md").read_text()
    assert "| 1,595 |" in old
    assert tables.fill(old, "results.md") == old.replace("| 1,595 |", "| 98,765 |")
    with pytest.raises(runs.UsageError, match="one of the two marks"):
        tables.fill("<!-- end of apex -->", "a page")
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("")
    monkeypatch.setattr(tables, "DOCS", tmp_path / "docs")
    with pytest.raises(runs.UsageError, match="no page has the mark"):
        tables.main(tables.Args())
    page = tmp_path / "docs" / "results.md"
    page.write_text(old)
    monkeypatch.setattr(tables, "PARTS", {"doors_update": tables.doors})
    with pytest.raises(runs.UsageError, match=r"results\.md is old"):
        tables.main(tables.Args(check=True))
    tables.main(tables.Args())
    assert "| 98,765 |" in page.read_text()
    tables.main(tables.Args(check=True))


def test_a_table_shows_the_cells_that_have_something(tmp_path, monkeypatch):
    """What has run or was published; how many have neither is said. A picture has no place for these."""
    names = dict.fromkeys(
        ["note", "low", "high", "seconds", "steps", "machine", "jax", "date", "command", "metric"], ""
    )
    rows = [
        names | {"cell": "ours", "published": "", "ours": 2.5, "seeds": 1, "commit": "abc"},
        names | {"cell": "theirs", "published": "3.5", "ours": "", "seeds": 0, "commit": ""},
        names | {"cell": "neither", "published": "", "ours": "", "seeds": 0, "commit": ""},
    ]
    records.write_rows(tmp_path / "gamma.csv", rows)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    lines = tables.tables()
    cells = [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| ")]
    assert cells == ["cell", "---", "ours", "theirs"]
    assert "Cells that have not run: 1." in lines
    drawn = []
    monkeypatch.setattr(reproduce.plt, "close", drawn.append)
    reproduce.draw(tmp_path / "gamma.png", "gamma", [row | {"low": "nan", "high": "nan"} for row in rows])
    assert [label.get_text() for label in drawn[0].axes[0].get_yticklabels()] == ["ours", "theirs"]


def test_what_stands_beside_the_published(tmp_path, monkeypatch):
    """Of curves the mean over the last tenth of the steps, of other numbers the last; then over seeds."""
    rows = [{"seed": seed, "global_step": i, "episodic_return": i + seed} for seed in (1, 2) for i in range(101)]
    rows = [row | {"test_levels": row["global_step"] * row["seed"]} for row in rows]
    rows[-1]["test_levels"] = rows[-2]["test_levels"] = ""  # not evaluated
    records.write_rows(tmp_path / "a.csv", rows)
    records.write_rows(tmp_path / "b.csv", [{"whose": "ours", "ACC": 0.9}, {"whose": "published", "ACC": 0.8}])
    runs_of = [{"run": str(n), "training levels": n // 2, "step": n, "normalized": n} for n in (2, 3, 4)]
    runs_of = [row | {"normalized error": row["step"] / 10} for row in runs_of]
    records.write_rows(tmp_path / "c.csv", runs_of)
    monkeypatch.setattr(tables, "EXPERIMENTS", tmp_path)
    assert tables.at_the_end({"file": "a.csv", "rows": "", "column": "episodic_return"}) == (96.5, 100, 2, "")
    runs_of_one = {"file": "c.csv", "rows": "'training levels=1'", "column": "normalized"}
    assert tables.at_the_end(runs_of_one) == (2.5, 2.5, 2, "")
    assert tables.at_the_end(runs_of_one | {"rows": "'training levels=2'"}) == (4, 4, 1, "0.4")
    assert tables.at_the_end({"file": "a.csv", "rows": "seed=2", "column": "test_levels"}) == (187, 98, 1, "")
    value, step, seeds, _ = tables.at_the_end({"file": "b.csv", "rows": "whose=ours", "column": "ACC"})
    assert (value, seeds) == (0.9, 1)
    assert np.isnan(step)
    records.write_rows(tmp_path / "d.csv", [{"cell": "a b", "ours": 7.5, "seeds": 3, "steps": 9}])
    assert tables.at_the_end({"file": "d.csv", "rows": "cell='a b'", "column": "ours"}) == (7.5, 9, 3, "")


def test_the_best_trial_is_the_least_where_less_is_better(tmp_path, monkeypatch):
    """And a sweep without a trial that came to its end is left out."""
    rows = [
        {"trial": i, "state": "complete", "loss": x, "goal": "minimize", "lr": 0.1 * i} for i, x in enumerate((3, 1, 2))
    ]
    rows += [rows[0] | {"state": "pruned", "loss": 0}]
    rows = [row | {"logged": 1, "seconds": 1, "why": "", "commit": "abc"} for row in rows]
    records.write_rows(tmp_path / "sweeps/a/results.csv", rows)
    records.write_rows(tmp_path / "sweeps/b/results.csv", rows[-1:])
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    (line,) = tables.sweeps()[2:]
    assert "| loss | 1 | abc | lr 0.1 |" in line
    assert "| 4 | 1 |" in line


# SHELL SCRIPTS


def shell(script, *words, **variables):
    environment = os.environ | {"PYTHON": sys.executable} | {name: str(value) for name, value in variables.items()}
    return subprocess.Popen([ROOT / "experiments" / script, *map(str, words)], cwd=ROOT, env=environment,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip


def stand_ins(folder, **does):
    """Commands of these names in a folder, each a line or more of a shell script; the PATH that finds them first."""
    for name, lines in does.items():
        (folder / name).write_text(f"#!/bin/sh\n{lines}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.slow
def test_slurm_goes_on_after_preemption(tmp_path):
    """The signal before the end of a task's time writes a checkpoint; queued again, the task resumes, exactly."""
    flags = TINY | {"total_timesteps": 256 * 12, "checkpoint_every": 256}
    given = {"OUT": tmp_path, "SLURM_ARRAY_JOB_ID": 7, "SLURM_ARRAY_TASK_ID": 3}
    words = ["slurm.sh", "run", "ppo_procgen.py", *flags_of(flags)]
    process = shell(*words, **given)
    wait_for(lambda: any(tmp_path.glob("7/3/*/checkpoints/[0-9]*/commit_success.txt")), process)
    process.send_signal(signal.SIGTERM)
    assert "stopped by SIGTERM" in process.communicate()[0]
    assert process.returncode == 0
    again = shell(*words, **given)
    assert again.wait(120) == 0, again.communicate()[0]
    (run,) = (tmp_path / "7/3").iterdir()
    given = flags | {"seed": 3, "run_dir": str(tmp_path / "whole")}
    assert_same_run(ppo_procgen.main(ppo_procgen.Args(**given)).path, run)


def test_slurm_starts_a_job_of_several_tasks_on_all_of_them(tmp_path):
    """A stand-in for srun says what it is given."""
    path = stand_ins(tmp_path, srun='echo "srun $@"')
    given = {"OUT": tmp_path, "SLURM_NTASKS": 4, "SLURM_CPUS_PER_TASK": 8, "PATH": path}
    output = shell("slurm.sh", "run", "ppo_procgen.py", "--num-envs", 256, **given).communicate()[0]
    assert output.startswith("srun --kill-on-bad-exit=1 --cpus-per-task=8 ")
    assert output.endswith(f"ppo_procgen.py --seed 0 --run-dir {tmp_path}/0/0 --num-envs 256 --distributed\n")
    resumed = shell(
        "slurm.sh", "run", "ppo_procgen.py", "--resume", "runs/x", **given | {"SLURM_NTASKS": 1, "PYTHON": "echo"}
    )
    assert resumed.communicate()[0] == "ppo_procgen.py --resume runs/x\n"  # whose seed and folder are its own
    alone, run = {"OUT": tmp_path, "PYTHON": "echo"}, tmp_path / "0/0/run"
    for name, said in (("9.orbax-checkpoint-tmp", f"--seed 0 --run-dir {tmp_path}/0/0"), ("9", f"--resume {run}")):
        (run / "checkpoints" / name).mkdir(parents=True)
        assert shell("slurm.sh", "run", "ppo_procgen.py", **alone).communicate()[0] == f"ppo_procgen.py {said}\n"
    refused = shell("slurm.sh", "sweep", "some.yaml", **given)
    assert "one task a job" in refused.communicate()[0]
    assert refused.returncode == 2


@pytest.mark.parametrize(("state", "task"), [("RUNNING", ""), ("COMPLETING", ""), ("", ""), ("RUNNING", "3")])
def test_slurm_queues_a_job_again_unless_it_was_cancelled(state, task, tmp_path):
    """Both end by the same signal; stand-ins for squeue, which may fail, and scontrol. Of an array it is the task."""
    path = stand_ins(tmp_path, squeue=f"echo {state}", scontrol="echo scontrol $@", python="echo begun; exec sleep 60")
    given = {"OUT": tmp_path, "SLURM_JOB_ID": 7, "PATH": path}
    given |= {"SLURM_ARRAY_JOB_ID": 7, "SLURM_ARRAY_TASK_ID": task} if task else {}
    process = shell("slurm.sh", "run", "ppo_procgen.py", **given | {"PYTHON": tmp_path / "python"})
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGTERM)
    again = "" if state == "COMPLETING" else f"scontrol requeue {'7_3' if task else 7}"
    assert process.communicate()[0].strip() == again
    slowly = "trap 'sleep 0.5; echo written; exit 0' TERM\necho begun\nwhile :; do sleep 0.1; done\n"
    stand_ins(tmp_path, python=slowly)  # as a script that writes its checkpoint
    process = shell("slurm.sh", "run", "ppo_procgen.py", **given | {"PYTHON": tmp_path / "python"})
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate()[0].split("\n") == ["written", *filter(None, [again]), ""]


def test_slurm_stops_several_tasks_by_scancel(tmp_path):
    """srun's own answer to SIGTERM is to kill them."""
    path = stand_ins(
        tmp_path,
        srun=f"shift 2; \"$@\" &\necho $! > {tmp_path}/pid\ntrap 'kill -9 $!; exit 137' TERM\nwait $!",
        scancel=f"echo scancel $@; kill -TERM $(cat {tmp_path}/pid)",
        scontrol="echo scontrol $@",
        squeue="echo RUNNING",
        python="trap 'echo written; exit 0' TERM\necho begun\nwhile :; do sleep 0.1; done",
    )
    given = {"OUT": tmp_path, "SLURM_JOB_ID": 7, "SLURM_NTASKS": 2, "PYTHON": tmp_path / "python"}
    process = shell("slurm.sh", "run", "ppo_procgen.py", **given, PATH=path)
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate()[0].split("\n") == ["scancel --signal=TERM 7", "written", "scontrol requeue 7", ""]
    assert process.returncode == 0


@pytest.mark.slow
def test_all_games_come_to_one_number(tmp_path):
    """Killed within the first game, it goes on, and scores by the competition's constants; then it only scores."""
    words = ["all_games.sh", "ppo_procgen.py", *flags_of(TINY | {"eval_episodes": 4})]
    for name in ("--env-id", "--run-dir"):
        if name in words:
            del words[words.index(name) : words.index(name) + 2]
    given = {"GAMES": "bigfish fruitbot", "SEEDS": "1", "OUT": tmp_path}
    (first := shell(*words, **given)).stdout.readline()
    wait_for(lambda: list(tmp_path.glob("*/bigfish/1/*/args.json")), first)
    first.kill()  # before its script, or it would go on with the next game
    kill = ["pkill", "-9", "-f", str(tmp_path / "ppo_procgen/bigfish/1")]
    assert subprocess.run(kill).returncode == 0
    while subprocess.run(kill).returncode == 0:
        pass
    with (tmp_path / "ppo_procgen" / "lock").open() as lock:  # until the kernel has let go of what it held
        fcntl.flock(lock, fcntl.LOCK_EX)
    outputs = [shell(*words, **given).communicate()[0] for _ in range(2)]
    assert [output.count("output.txt") for output in outputs] == [2, 0], outputs
    done = [Path(path.read_text().strip()) for path in sorted(tmp_path.glob("ppo_procgen/*/1/done"))]
    score = np.mean([read_metrics(run)[-1]["eval/test_levels/normalized"] for run in done])
    for output in outputs:
        assert f"mean normalised score {score:.4f} over 2 games" in output
    refused = shell(*words[:-2], **given)
    assert "give another OUT" in refused.communicate()[0]
    assert refused.returncode == 2
