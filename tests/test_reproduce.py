"""Published tables: every cell can be run, is run once, and keeps its results; tables in the docs; shell scripts."""

import fcntl
import importlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tyro
from conftest import ROOT, TINY, assert_refused, flags_of, read_metrics, run_here, wait_for
from PIL import Image

from common import files, runs
from experiments import records, reproduce, tables, trials

ROWS = reproduce.published()
FLAGS = " ".join(f"{name}={value}" for name, value in TINY.items() if name not in ("total_timesteps", "wandb_mode"))
TABLE = [
    {"table": "small", "cell": "runs", "script": "ppo_procgen.py", "flags": FLAGS, "published": "2.5"},
    {"table": "small", "cell": "fails", "script": "ppo_procgen.py", "flags": FLAGS + " gamma=2", "published": "fail"},
    {"table": "small", "cell": "no script", "script": "", "flags": "", "published": "1.9"},
]


ORIGIN = {"machine": "this", "jax": "1", "commit": "a", "date": "today"}


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A published table "small" with three cells: one that runs, one that fails, one without a script."""
    rows = [row | {"steps": "3840", "metric": "charts/episodic_return", "note": ""} for row in TABLE]
    rows[1]["published"] = ""
    records.write_rows(tmp_path / "tables.csv", rows)
    monkeypatch.setattr(reproduce, "REFERENCE", tmp_path / "tables.csv")
    monkeypatch.setattr(trials, "origin", lambda: ORIGIN)
    return tmp_path


def args_in(folder, **changes):
    where = {"runs": str(folder / "runs"), "out": str(folder / "out"), "seeds": (1,)}
    return reproduce.Args("small", **where | changes)


def words_in(folder, *words):
    return ["small", "--seeds", "1", "--out", str(folder / "out"), "--runs", str(folder / "runs"), *map(str, words)]


def write_run(folder, lines, args=(), **progress):
    """A run in its seed's folder, and its progress.json if any is given."""
    (folder / "a run").mkdir(parents=True)
    runs.write_json(folder / "a run/args.json", {"script": "x", "wandb_id": "x", "args": dict(args)})
    (folder / "a run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if progress:
        runs.write_json(folder / "progress.json", {"seconds": 0.0, "why": ""} | progress)


# CELLS


@pytest.mark.parametrize("name", dict.fromkeys(row["table"] for row in ROWS))
def test_cells_of_a_table_are_valid_and_different_runs(name):
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


def test_cell_is_selected_by_its_whole_name_or_any_part():
    def asked(*cells):
        args = reproduce.Args("doorgym_lever", cells=cells)
        return [row["cell"] for row in reproduce.read_table(args.table) if reproduce.is_asked(args, row)]

    assert asked("PPO") == ["PPO"]
    assert asked("PPO", "fresh") == ["PPO", "HN-PPO, fresh critic"]
    assert len(asked("entropy")) == 3
    assert asked() == [row["cell"] for row in reproduce.read_table("doorgym_lever")]


# RUNNING A TABLE


@pytest.mark.slow
def test_table_is_reproduced_once(table, monkeypatch):
    """A failure is recorded, a cell without a script stays, and finished runs are not repeated."""
    apart = trials.run

    def run(program, flags, *rest, **options):
        (apart if flags.get("gamma") == "2" else run_here)(program, flags, *rest, **options)

    monkeypatch.setattr(trials, "run", run)
    args = args_in(table, seeds=(1, 3), scale=0.1, jobs=2)
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
    assert [row["ours"] == "" for row in records.read_rows(table / "out/small.csv")] == [False, True, True]
    assert np.asarray(Image.open(table / "out/small.png").convert("L")).std() > 5
    other = reproduce.main(replace(args, collect=True, scale=0.2))
    assert other[0] == pytest.approx(again, nan_ok=True)  # those are other runs, and what is there stays
    assert page[: page.index("| fails")] in (table / "out/small.md").read_text()


def test_run_locked_by_another_process_is_made_after_the_others(table, monkeypatch, capfd):
    """As after `kill -9`, where the script of the process before is still writing its checkpoint."""
    args = args_in(table, cells=("runs",), seeds=(1, 2))
    row = reproduce.read_table("small")[0]
    lock = files.lock_run(reproduce.folder_of(table / "runs", row, reproduce.flags_of(row, args), 1))
    made = []

    def run(program, flags, folder, lock_of_run, **how):
        made.append(flags["seed"])
        lock.close()

    monkeypatch.setattr(trials, "run", run)
    reproduce.main(args)
    assert made == [2, 1]
    assert capfd.readouterr().out.count("another process is at it") == 1


def test_run_that_something_else_stopped_is_begun_again_until_it_fails(table, monkeypatch, capfd):
    begun = []

    def stop_once(program, flags, folder, lock, **how):
        begun.append(folder)
        raise trials.Stopped if len(begun) == 1 else RuntimeError("exit code 1")

    monkeypatch.setattr(trials, "run", stop_once)
    with pytest.raises(SystemExit) as stopped:
        runs.cli(reproduce.Args, reproduce.main, words_in(table, "--cells", "runs"))
    assert (len(begun), stopped.value.code) == (2, 1)
    assert f"error: 1 of 1 runs failed, see {table / 'runs'}: runs, seed 1: exit code 1" in capfd.readouterr().err


def test_killed_run_keeps_its_origin_clock_and_last_value(table, monkeypatch):
    def run(program, flags, folder, lock, **how):
        assert reproduce.read_progress(folder)["commit"] == "a"  # from its start on
        write_run(folder, [{"seconds": 90.5, "charts/episodic_return": 1}])

    monkeypatch.setattr(trials, "run", run)
    row, other, *_ = reproduce.main(args_in(table, cells=("runs",)))
    assert (row["seconds"], row["ours"], row["commit"]) == (90, 1, "a")
    assert [x["command"].partition("small ")[2] for x in (row, other)] == ["--seeds 1 --cells runs", "--seeds 1"]


def test_error_in_one_worker_stops_the_others(table, monkeypatch):
    begun = []

    def run_or_fail(program, flags, folder, lock, stopping, **how):
        begun.append(flags["seed"])
        if len(begun) == 1:
            raise files.FullError("cannot write")
        raise trials.Stopped if stopping.wait(5) else RuntimeError("nobody stopped it")

    monkeypatch.setattr(trials, "run", run_or_fail)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(files.FullError, match="cannot write"):
        reproduce.main(args_in(table, cells=("runs",), seeds=(1, 2, 3, 4), jobs=2))
    assert len(begun) <= 2
    assert signal.getsignal(signal.SIGTERM) is handler


# RESULTS


def test_interval_is_that_of_student():
    """Mean 2, standard error 1/sqrt(3), t(2) = 4.3027 at 97.5 %; nothing for a single value or without spread."""
    half = 4.302653 / 3**0.5
    np.testing.assert_allclose(reproduce.interval([1.0, 2.0, 3.0]), [2 - half, 2 + half], rtol=1e-6)
    assert np.isnan([reproduce.interval([1.0]), reproduce.interval([1.0, 1.0])]).all()


def test_results_keep_the_most_training_of_each_cell(table, monkeypatch):
    """A machine without the runs that a file is of does not take them away."""

    def run(program, flags, folder, lock, **how):
        steps, metric = flags["total_timesteps"], "charts/episodic_return"
        write_run(folder, [{"global_step": steps, "seconds": 9, metric: flags["seed"]}], flags)

    monkeypatch.setattr(trials, "run", run)
    here = args_in(table, seeds=(1, 3), scale=0.1, cells=("run",))
    first, *_ = reproduce.main(here)
    (seed,) = (table / "runs").glob("*/1")
    shutil.copytree(seed, table / "there" / seed.relative_to(table / "runs"))
    one_seed, *_ = reproduce.main(replace(here, seeds=(1,), runs=str(table / "there")))
    assert (first["seeds"], first["ours"]) == (2, 2)
    assert one_seed == pytest.approx(first, nan_ok=True)
    beside, *_ = reproduce.main(replace(here, seeds=(1,), out=str(table / "fresh")))
    assert beside == pytest.approx(first, nan_ok=True)  # the run of the other seed is there too, and counts
    monkeypatch.setattr(trials, "origin", lambda: ORIGIN | {"commit": "b"})
    another, *_ = reproduce.main(replace(here, runs=str(table / "there")))
    assert another["commit"] == "a b"
    assert another["ours"] == pytest.approx(first["ours"])


def test_results_without_their_runs_keep_their_notes(table):
    row = reproduce.read_table("small")[0]
    cell = {"cell": row["cell"], "metric": row["metric"], "command": "c", "flags": row["flags"], "machine": "here"}
    cell |= {"ours": "1.5", "low": "", "high": "", "seeds": "1", "published steps": "100", "steps": "10", "seconds": ""}
    cell |= {"note": "older", "of its runs": "2 failed: by night", "jax": "1", "commit": "a", "date": "today"}
    (table / "out").mkdir()
    records.write_rows(table / "out/small.csv", [cell | {"published": "", "script": row["script"]}])
    first, *_ = reproduce.main(args_in(table, collect=True))
    assert (first["ours"], first["note"], first["of its runs"]) == (1.5, row["note"], "2 failed: by night")
    assert list(first) == list(reproduce.Result.__annotations__)
    assert "2 failed: by night" in (table / "out/small.md").read_text()


def test_results_of_two_machines_are_merged():
    """Mean, notes and origins together; where steps differ, or seeds are unknown, the row of more training."""
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


def test_summary_is_the_mean_of_finished_runs_and_notes_their_differences(tmp_path):
    row = {"cell": "c", "metric": "m", "published": "", "steps": "", "note": "", "script": "x.py", "flags": ""}
    for seed, own in ((1, {"old": 1}), (2, {"old": 1, "new_flag": 2}), (3, {"old": 1, "new_flag": 2})):
        lines = [{"global_step": 1, "time": 1, "m": m} for m in (99, seed**2)]
        write_run(tmp_path / str(seed), lines, own | {"seed": seed}, done=True)
    folders, args = [tmp_path / seed for seed in "123"], reproduce.Args("small")
    made = reproduce.summarize(row, {}, folders, args)
    assert (made["ours"], made["seeds"]) == (pytest.approx(14 / 3), 3)
    assert (made["low"], made["high"]) == reproduce.interval([1, 4, 9])
    assert "differ in --new-flag" in made["of its runs"]
    assert not reproduce.summarize(row, {}, folders[1:], args)["of its runs"]
    short = reproduce.summarize(row, {"total_timesteps": 9}, folders[1:2], args)["of its runs"]
    assert short == "seed 2 ended after 1e-06M"
    runs.write_json(tmp_path / "3/progress.json", {"done": False, "seconds": 1, "why": ""})
    made = reproduce.summarize(row, {}, folders, args)
    assert (made["ours"], made["seeds"]) == (2.5, 2)


def test_evaluations_and_curves_of_runs_are_written_down(tmp_path):
    """Standard errors over episodes, steps/s of the fastest tenth, thinned curves of finished runs."""
    metric = "eval/test_levels/mean_return"
    lines = [{"global_step": 100 * i, "seconds": (2.0 if i < 20 else 1.0) * i, "charts/SPS": 1} for i in range(40)]
    evaluation = {metric: 2.5, "eval/test_levels/std": 3.0, "eval/test_levels/episodes": 65.0}
    lines.insert(30, {"global_step": 2950, "seconds": 29.5} | evaluation)
    write_run(tmp_path / "1", lines, done=False, commit="a")
    row = {"cell": "PPO, maze", "flags": "env_id=maze", "metric": metric}
    (found,) = reproduce.evaluations(row, {"total_timesteps": 4000}, [tmp_path / "1", tmp_path / "2"])
    assert [found[name] for name in ("seed", "of steps", "step", "mean", "error")] == [1, 4000, 2950, "2.5", "0.375"]
    assert (found["steps/s"], found["commit"]) == ("100", "a")
    lines = [{"global_step": 10 * i, "seconds": 36.0 * i, reproduce.RETURN: i} for i in range(1, 181)]
    for seed, done in (("3", True), ("4", False)):
        write_run(tmp_path / seed, lines, done=done)
    kept = reproduce.curves(row, {"total_timesteps": 1800}, [tmp_path / "3", tmp_path / "4"])
    assert (len(kept), kept[1]["global_step"], kept[1]["hours"]) == (60, 40, "0.0400")
    every = ("cell", "metric", "seed", "of steps", "step")
    found = dict.fromkeys(every, "1") | {"mean": "2.5"}
    others = [found | {name: "2"} for name in every]
    records.write_rows(tmp_path / "e.csv", others)
    records.replace_rows(tmp_path / "e.csv", [found], reproduce.EVALUATION)
    assert records.read_rows(tmp_path / "e.csv") == [*others, found]  # those of other runs stay


def test_joined_origins_have_each_commit_and_machine_once():
    def commits(*texts):
        return reproduce.joined(*({"commit": text} for text in texts))["commit"]

    assert commits("", "a") == "a"
    assert commits("a b+", "b") == "a b+ b"
    assert commits("a b", "b") == commits("a b", "a") == commits("a", "a b") == "a b"
    machines = [{"machine": name} for name in ("AMD EPYC, 2 cores", "Intel", "AMD EPYC, 2 cores and Intel")]
    assert reproduce.joined(*machines)["machine"] == "AMD EPYC, 2 cores and Intel"


# BAD INPUT


BAD = {
    "unknown table": (["coinrun_grid"], "TABLE coinrun_grid", "coinrun_ppo_grid"),
    "scale of 0": (["gamma", "--scale", 0], "--scale 0", "above 0"),
    "seed twice": (["gamma", "--seeds", 1, 1], "--seeds", "each once"),
    "negative seed": (["gamma", "--seeds", 1, -1], "--seeds 1 -1", "from 0 to 2147483647"),
    "seed of all": (["gamma", "--set", "seed=3"], "--set seed=3", "each run is given its own"),
    "what the cells differ in": (["gamma", "--set", "gamma=0.9"], "--set gamma", "differ"),
    "steps": (["gamma", "--set", "total_timesteps=9"], "--set total_timesteps", "--scale"),
    "unknown cell": (["gamma", "--cells", "0.99", "width"], "--cells width", "0.99, bigfish"),
    "value refused": (["gamma", "--set", "learning_rate=-1"], "--learning-rate '-1'", "0 or more"),
    "value refused by one cell": (["doorgym_continual", "--set", "hyper_width=128"], "--hyper-width 128", "--method"),
    "unknown flag": (["gamma", "--set", "lr=9"], "lr", "no flag"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_flag_is_refused_in_one_sentence(case, tmp_path, capfd):
    words, names, valid = BAD[case]
    assert_refused(reproduce, [*words, "--runs", tmp_path, "--out", tmp_path], capfd, names, valid)
    assert not list(tmp_path.iterdir())


def test_damaged_folders_and_progress_are_refused_before_anything_runs(table, monkeypatch, capfd):
    monkeypatch.setattr(trials, "run", None)
    for flag in ("--out", "--runs"):
        words = words_in(table, flag, table / "tables.csv")
        assert_refused(reproduce, words, capfd, f"{flag} {table}/tables.csv: cannot wri")
    row = reproduce.read_table("small")[0]
    folder = reproduce.folder_of(table / "runs", row, reproduce.flags_of(row, reproduce.Args("small")), 1)
    folder.mkdir(parents=True)
    good = {"done": True, "seconds": 1.5, "why": ""}
    for content in ([], {}, good | {"done": 1}, good | {"seconds": "1"}, good | {"seconds": -1}, good | {"why": 1}):
        runs.write_json(folder / "progress.json", content)
        assert_refused(reproduce, words_in(table), capfd, f"--runs {folder / 'progress.json'}: ", "delete it")


def test_damaged_or_other_results_are_refused_before_anything_runs(table, monkeypatch, capfd):
    monkeypatch.setattr(trials, "run", None)
    path = table / "out/small.csv"
    path.parent.mkdir()
    row = reproduce.read_table("small")[0]

    def refused(*parts):
        assert_refused(reproduce, words_in(table), capfd, f"--out {path}: ", *parts)

    for text in ("seeds\n1\n", "seeds,steps\n1\n", "seeds,steps\n1,x\n", "seeds,steps\n-1,2\n"):
        path.write_text(text)
        refused("move it away")
    result = {"cell": "a", "metric": "b", "command": "c --set gamma=0.5", "flags": row["flags"], "machine": "here",
              "ours": "1.5", "low": "", "high": "", "seeds": "1", "published steps": "100", "steps": "10",
              "seconds": "", "published": "", "note": "", "script": "", "jax": "", "commit": "",
              "date": ""}  # fmt: skip
    of_cell = {"cell": row["cell"], "metric": row["metric"], "command": "c", "flags": "gamma=0.7"}
    for changes, *parts in (
        ({"seeds": "-1"}, "move it away"),
        ({"steps": "x"}, "move it away"),
        ({"published steps": "1.5"}, "move it away"),
        ({"low": "nan"}, "move it away"),
        ({"remark": "mine"}, "remark", "move it away"),
        ({}, "of --set gamma=0.5", "another folder"),
        (of_cell, "of an older table", "another folder"),
        ({"command": "c"}, "of an older table"),  # of a cell that is no longer in the table
    ):
        records.write_rows(path, [result | changes])
        refused(*parts)
    records.write_rows(path, [result | {"seeds": "0"}, result | of_cell | {"seeds": "0"}])
    assert len(reproduce.read_results(args_in(table))) == 2
    (table / "out/small_evaluations.csv").touch()  # of runs of another --set that are under way
    refused("of --set gamma=0.5", "another folder")
    path.unlink()
    other = words_in(table, "--cells", "runs", "--set", "adam_eps=1e-6")
    assert_refused(reproduce, other, capfd, f"--out {table / 'out'}: ", "without --set")


# TABLES IN THE DOCS


def test_tables_of_the_docs_match_the_committed_files():
    tables.main(tables.Args(check=True))


def test_new_number_changes_its_table_and_nothing_else(tmp_path, monkeypatch):
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
    page = tmp_path / "docs" / "results.md"
    page.write_text(old)
    monkeypatch.setattr(tables, "PARTS", {"doors_update": tables.doors})
    with pytest.raises(runs.UsageError, match=r"results\.md is old"):
        tables.main(tables.Args(check=True))
    tables.main(tables.Args())
    assert "| 98,765 |" in page.read_text()


def test_table_and_picture_leave_out_cells_without_numbers(tmp_path, monkeypatch):
    names = ("note", "low", "high", "seconds", "steps", "machine", "jax", "date", "command", "metric", "commit")
    rows = [
        {"cell": "ours", "published": "", "ours": 2.5, "seeds": 3, "low": 2.0, "high": 4.0, "commit": "abc"},
        {"cell": "theirs", "published": "3.5", "ours": "", "seeds": 0},
        {"cell": "neither", "published": "", "ours": "", "seeds": 0},
    ]
    rows = [dict.fromkeys(names, "") | row for row in rows]
    records.write_rows(tmp_path / "gamma.csv", rows)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    lines = tables.tables()
    cells = [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| ")]
    assert cells == ["cell", "---", "ours", "theirs"]
    assert "Cells that have not run: 1." in lines
    drawn = []
    monkeypatch.setattr(reproduce.plt, "close", drawn.append)
    reproduce.draw(tmp_path / "gamma.png", "gamma", rows[::-1])
    axis = drawn[0].axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["theirs", "ours"]
    assert [(line.get_label(), line.get_xydata().tolist()) for line in axis.lines] == [
        ("published", [[3.5, 0]]),
        ("ours", [[2.5, 1]]),
        ("ours, 95 %", [[2, 1], [4, 1]]),
    ]


def test_seeds_are_pooled_in_the_table_of_all_algorithms(tmp_path, monkeypatch):
    """(2 + 4) / 2 and their standard error; of a seed the longer run; speeds of one machine."""
    row = {"cell": "PPO, starpilot", "seed": 1, "step": 507_904, "mean": 2, "error": 0.3, "steps/s": ""}
    row |= {"of steps": 1_000_000, "machine": "AMD EPYC, 1 cores"}
    shorter = row | {"of steps": 500_000, "mean": 9}
    other = row | {"seed": 2, "step": 499_000, "mean": 4, "error": 0.4, "steps/s": 77}
    elsewhere = other | {"step": 1_000_900, "steps/s": 99, "machine": "a faster one"}
    rows = [row, shorter, other, elsewhere]
    records.write_rows(tmp_path / "algorithms_nature_evaluations.csv", rows)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.side_by_side()[-1] == "| PPO | 3.00 (1.00), 2 seeds | 4.00 (0.40) |  |  | 77 |"


def test_number_beside_the_published_is_the_end_of_a_curve_or_the_last_value(tmp_path, monkeypatch):
    """Of curves the mean over the last tenth of the steps; then over seeds."""
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


def test_best_trial_of_a_sweep_follows_its_goal(tmp_path, monkeypatch):
    """A sweep without a finished trial is left out."""
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


def stop_when_begun(**variables):
    """Output lines of a script under SLURM after its stand-in has printed "begun" and SIGTERM has come."""
    process = shell("slurm.sh", "run", "ppo_procgen.py", **variables)
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGTERM)
    return process.communicate()[0].splitlines(), process.returncode


def test_slurm_job_of_several_tasks_starts_them_by_srun(tmp_path):
    path = stand_ins(tmp_path, srun='echo "srun $@"')
    given = {"OUT": tmp_path, "SLURM_NTASKS": 4, "SLURM_CPUS_PER_TASK": 8, "PATH": path}
    output = shell("slurm.sh", "run", "ppo_procgen.py", "--num-envs", 256, **given).communicate()[0]
    assert output.startswith("srun --kill-on-bad-exit=1 --cpus-per-task=8 ")
    assert output.endswith(f"ppo_procgen.py --seed 0 --run-dir {tmp_path}/0/0 --num-envs 256 --distributed\n")
    alone, run = {"OUT": tmp_path, "PYTHON": "echo"}, tmp_path / "0/0/run"
    resumed = shell("slurm.sh", "run", "ppo_procgen.py", "--resume", "runs/x", **alone)
    assert resumed.communicate()[0] == "ppo_procgen.py --resume runs/x\n"  # whose seed and folder are its own
    for name, said in (("9.orbax-checkpoint-tmp", f"--seed 0 --run-dir {tmp_path}/0/0"), ("9", f"--resume {run}")):
        (run / "checkpoints" / name).mkdir(parents=True)
        assert shell("slurm.sh", "run", "ppo_procgen.py", **alone).communicate()[0] == f"ppo_procgen.py {said}\n"
    refused = shell("slurm.sh", "sweep", "some.yaml", **given)
    assert "one task a job" in refused.communicate()[0]
    assert refused.returncode == 2


@pytest.mark.parametrize(("state", "task"), [("RUNNING", ""), ("COMPLETING", ""), ("", ""), ("RUNNING", "3")])
def test_slurm_job_is_queued_again_unless_cancelled(state, task, tmp_path):
    """Preemption and scancel send the same signal; of an array it is the task."""
    path = stand_ins(tmp_path, squeue=f"echo {state}", scontrol="echo scontrol $@", python="echo begun; exec sleep 60")
    given = {"OUT": tmp_path, "SLURM_JOB_ID": 7, "PATH": path, "PYTHON": tmp_path / "python"}
    given |= {"SLURM_ARRAY_JOB_ID": 7, "SLURM_ARRAY_TASK_ID": task} if task else {}
    again = [] if state == "COMPLETING" else [f"scontrol requeue {'7_3' if task else 7}"]
    assert stop_when_begun(**given)[0] == again
    slowly = "trap 'sleep 0.5; echo written; exit 0' TERM\necho begun\nwhile :; do sleep 0.1; done\n"
    stand_ins(tmp_path, python=slowly)  # as a script that writes its checkpoint
    assert stop_when_begun(**given)[0] == ["written", *again]


def test_slurm_signal_reaches_several_tasks_by_scancel(tmp_path):
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
    lines, code = stop_when_begun(**given, PATH=path)
    assert (lines, code) == (["scancel --signal=TERM 7", "written", "scontrol requeue 7"], 0)


@pytest.mark.slow
def test_all_games_killed_within_the_first_resumes_and_scores(tmp_path):
    words = ["all_games.sh", "ppo_procgen.py", *flags_of(TINY | {"eval_episodes": 4})]
    for name in ("--env-id", "--run-dir"):
        if name in words:
            del words[words.index(name) : words.index(name) + 2]
    given = {"GAMES": "bigfish fruitbot", "SEEDS": "1", "OUT": tmp_path}
    (first := shell(*words, **given)).stdout.readline()
    wait_for(lambda: list(tmp_path.glob("*/bigfish/1/*/args.json")), first)
    first.kill()  # before its script, or it would continue with the next game
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
