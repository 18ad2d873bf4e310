"""Published tables: every cell can be run, is run once, and keeps its results; shell scripts."""

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
from experiments import records, reproduce, trials

FLAGS = " ".join(f"{name}={value}" for name, value in TINY.items() if name not in ("total_timesteps", "wandb_mode"))
METRIC = "charts/episodic_return"
ROW = {"table": "small", "script": "", "flags": "", "published": "", "steps": "3840", "metric": METRIC, "note": ""}
TABLE = [
    ROW | {"cell": "runs", "script": "ppo_procgen.py", "flags": FLAGS, "published": "2.5"},
    ROW | {"cell": "fails", "script": "ppo_procgen.py", "flags": FLAGS + " gamma=2"},
    ROW | {"cell": "no script", "published": "1.9"},
]
ORIGIN = {"machine": "this", "jax": "1", "commit": "a", "date": "today"}


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A published table "small" with three cells: one that runs, one that fails, one without a script."""
    records.write_rows(tmp_path / "tables.csv", TABLE)
    monkeypatch.setattr(reproduce, "REFERENCE", tmp_path / "tables.csv")
    monkeypatch.setattr(trials, "origin", lambda: ORIGIN)
    return tmp_path


def args_in(folder, **changes):
    where = {"runs": str(folder / "runs"), "out": str(folder / "out"), "seeds": (1,)}
    return reproduce.Args("small", **where | changes)


def words_in(folder, *words):
    return ["small", "--seeds", "1", "--out", str(folder / "out"), "--runs", str(folder / "runs"), *map(str, words)]


def write_run(folder, lines, **progress):
    """A run in its seed's folder, and its progress.json if any is given."""
    (folder / "a run").mkdir(parents=True)
    runs.write_json(folder / "a run/args.json", {})
    (folder / "a run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if progress:
        runs.write_json(folder / "progress.json", {"seconds": 0.0, "why": ""} | progress)


def cell_in(folder, steps=None, **row):
    """A cell whose runs are in a folder."""
    flags = {"total_timesteps": steps} if steps else {"lr": 1}
    return reproduce.Cell(ROW | {"cell": "c", "steps": ""} | row, flags, folder, selected=True)


# CELLS


@pytest.mark.parametrize("name", dict.fromkeys(row["table"] for row in records.read_rows(reproduce.REFERENCE)))
def test_cells_of_a_table_are_valid_and_different_runs(name):
    cells = [cell for cell in reproduce.read_cells(reproduce.Args(name)) if cell.row["script"]]
    for cell in cells:
        assert cell.row["published"] == "" or math.isfinite(float(cell.row["published"]))
        script = importlib.import_module(Path(cell.row["script"]).stem)
        words = runs.plain_values(script.Args, trials.words_of(cell.flags))
        runs.check_args(tyro.cli(script.Args, args=words), script.SCRIPT)
    assert len({(cell.folder, cell.row["metric"]) for cell in cells}) == len(cells)


@pytest.mark.parametrize(
    ("cells", "names"),
    [(("PPO",), {"PPO"}), (("PPO", "fresh"), {"PPO", "HN-PPO, fresh critic"}), (("entropy",), 3), ((), 12)],
)
def test_cell_is_selected_by_its_whole_name_or_any_part(cells, names):
    found = reproduce.selected_names(cells, reproduce.read_table("doorgym_lever"))
    assert found == names if isinstance(names, set) else len(found) == names


# RUNNING A TABLE


@pytest.mark.slow
def test_table_is_reproduced_once(table, monkeypatch):
    """A failure is recorded, a cell without a script stays, and finished runs are not repeated."""
    apart = trials.run

    def run(program, flags, *rest):
        (apart if flags.get("gamma") == "2" else run_here)(program, flags, *rest)

    monkeypatch.setattr(trials, "run", run)
    args = args_in(table, seeds=(1, 3), scale=0.1, jobs=2)
    chosen = reproduce.main(replace(args, cells=("run",)))
    assert [row["seeds"] for row in chosen] == [2, 0, 0]
    assert chosen[1]["of its runs"] == ""  # that cell was not begun
    first, failed, absent = reproduce.main(args)
    values = [read_metrics(run.parent)[-1][METRIC] for run in table.glob("runs/*/*/*/metrics.jsonl")]
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
    assert other[0] == again  # those are other runs, and what is there stays
    assert page[: page.index("| fails")] in (table / "out/small.md").read_text()


def test_run_locked_by_another_process_is_made_after_the_others(table, monkeypatch, capfd):
    """As after `kill -9`, where the script of the process before is still writing its checkpoint."""
    args = args_in(table, cells=("runs",), seeds=(1, 2))
    lock = files.lock_run(reproduce.read_cells(args)[0].folder / "1")
    made = []

    def run(program, flags, *rest):
        made.append(flags["seed"])
        lock.close()

    monkeypatch.setattr(trials, "run", run)
    reproduce.main(args)
    assert made == [2, 1]
    assert capfd.readouterr().out.count("another process is running it") == 1


def test_run_that_something_else_stopped_is_begun_again_until_it_fails(table, monkeypatch, capfd):
    begun = []

    def stop_once(program, flags, folder, *rest):
        begun.append(folder)
        raise trials.Stopped if len(begun) == 1 else RuntimeError("exit code 1")

    monkeypatch.setattr(trials, "run", stop_once)
    with pytest.raises(SystemExit) as stopped:
        runs.cli(reproduce.Args, reproduce.main, words_in(table, "--cells", "runs"))
    assert (len(begun), stopped.value.code) == (2, 1)
    assert f"error: 1 of 1 runs failed, see {table / 'runs'}: runs, seed 1: exit code 1" in capfd.readouterr().err


def test_killed_run_keeps_its_origin_clock_and_last_value(table, monkeypatch):
    def run(program, flags, folder, *rest):
        assert reproduce.read_progress(folder)["commit"] == "a"  # from its start on
        write_run(folder, [{"seconds": 90.5, METRIC: 1}])

    monkeypatch.setattr(trials, "run", run)
    row, other, *_ = reproduce.main(args_in(table, cells=("runs",)))
    assert (row["seconds"], row["ours"], row["commit"]) == (90, 1, "a")
    assert [x["command"].partition("small ")[2] for x in (row, other)] == ["--seeds 1 --cells runs", "--seeds 1"]


def test_error_in_one_worker_stops_the_others(table, monkeypatch):
    begun = []

    def run_or_fail(program, flags, folder, lock, stopping):
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
    assert reproduce.interval([1.0]) == reproduce.interval([1.0, 1.0]) == (None, None)


def test_results_keep_the_most_training_of_each_cell(table, monkeypatch):
    """A machine without the runs that a file is of does not take them away."""

    def run(program, flags, folder, *rest):
        write_run(folder, [{"global_step": flags["total_timesteps"], "seconds": 9, METRIC: flags["seed"]}])

    monkeypatch.setattr(trials, "run", run)
    here = args_in(table, seeds=(1, 3), scale=0.1, cells=("run",))
    first, *_ = reproduce.main(here)
    (seed,) = (table / "runs").glob("*/1")
    shutil.copytree(seed, table / "there" / seed.relative_to(table / "runs"))
    one_seed, *_ = reproduce.main(replace(here, seeds=(1,), runs=str(table / "there")))
    assert (first["seeds"], first["ours"]) == (2, 2)
    assert one_seed == first
    beside, *_ = reproduce.main(replace(here, seeds=(1,), out=str(table / "fresh")))
    assert beside == first  # the run of the other seed is there too, and counts
    monkeypatch.setattr(trials, "origin", lambda: ORIGIN | {"commit": "b"})
    another, *_ = reproduce.main(replace(here, runs=str(table / "there")))
    assert (another["commit"], another["ours"]) == ("a b", first["ours"])


def test_results_without_their_runs_keep_their_notes(table):
    before = dict.fromkeys(reproduce.Result.__annotations__, "") | TABLE[0] | ORIGIN
    before |= {"ours": "1.5", "seeds": "1", "values": "1:1.5", "steps": "10", "published steps": "100", "command": "c"}
    before |= {"note": "older", "of its runs": "2 failed: by night"}
    (table / "out").mkdir()
    rows = [{name: before[name] for name in reproduce.Result.__annotations__}]
    records.write_rows(table / "out/small.csv", rows)
    first, *_ = reproduce.main(args_in(table, collect=True))
    assert (first["ours"], first["note"], first["of its runs"]) == (1.5, "", "2 failed: by night")
    assert list(first) == list(reproduce.Result.__annotations__)
    assert "2 failed: by night" in (table / "out/small.md").read_text()


def test_results_of_two_machines_are_merged():
    """Mean, notes and origins together; where steps differ, the row of more training."""
    args = reproduce.Args("doorgym_lever", cells=("PPO",))
    row = {"cell": "PPO", "steps": 10, "seconds": 30, "note": "n", "published": "", "of its runs": "seed 2 ended"}
    row |= ORIGIN | {"machine": "one"}
    here = row | reproduce.statistics({2: 0.5}) | {"commit": "b"}
    before = row | reproduce.statistics({1: 0.1, 2: 0.9}) | {"seconds": 60, "of its runs": "slow; seed 2 ended"}

    def merge(before, here):
        return reproduce.merge(before, here, args, selected=True)

    got = merge(before, here)
    assert (got["ours"], got["seeds"], got["values"], got["seconds"]) == (pytest.approx(0.3), 2, "1:0.1 2:0.5", 45)
    assert (got["commit"], got["machine"], got["of its runs"]) == ("a b", "one", "slow; seed 2 ended")
    assert "--seeds 1 2 --cells PPO" in got["command"]
    assert reproduce.notes_of(got) == "n; seeds 0.10, 0.50; slow; seed 2 ended"
    longer = before | reproduce.statistics({1: 0.1}) | {"steps": 30}
    assert merge(longer, here)["values"] == "1:0.1"
    assert merge(longer | {"steps": 9}, here) == here
    assert merge(before, row | reproduce.statistics({}))["values"] == before["values"]


def test_summary_is_the_mean_of_finished_runs(tmp_path):
    for seed in (1, 2, 3):
        lines = [{"global_step": 1, METRIC: value} for value in (99, seed**2)]
        write_run(tmp_path / str(seed), lines, done=True)
    cell, args = cell_in(tmp_path), reproduce.Args("small")
    made = reproduce.summarize(cell, reproduce.read_runs(cell), args)
    assert (made["ours"], made["seeds"], made["of its runs"]) == (pytest.approx(14 / 3), 3, "")
    assert (made["low"], made["high"]) == reproduce.interval([1, 4, 9])
    runs.write_json(tmp_path / "3/progress.json", {"done": False, "seconds": 1, "why": "bad"})
    cell = cell_in(tmp_path, steps=9)
    made = reproduce.summarize(cell, reproduce.read_runs(cell), args)
    assert (made["ours"], made["seeds"]) == (2.5, 2)
    assert made["of its runs"] == "1 failed: bad; seed 1 ended after 1e-06M; seed 2 ended after 1e-06M"


def test_evaluations_and_curves_of_runs_are_written_down(tmp_path):
    """Standard errors over episodes, steps/s of the fastest tenth, thinned curves of finished runs."""
    metric = "eval/test_levels/mean_return"
    lines = [{"global_step": 100 * i, "seconds": (2.0 if i < 20 else 1.0) * i, "charts/SPS": 1} for i in range(40)]
    evaluation = {metric: 2.5, "eval/test_levels/std": 3.0, "eval/test_levels/episodes": 65.0}
    lines.insert(30, {"global_step": 2950, "seconds": 29.5} | evaluation)
    write_run(tmp_path / "1", lines, done=False, commit="a")
    lines = [{"global_step": 10 * i, "seconds": 36.0 * i, METRIC: i} for i in range(1, 181)]
    for seed, done in (("3", True), ("4", False)):
        write_run(tmp_path / seed, lines, done=done)
    cell = cell_in(tmp_path, steps=4000, metric=metric)
    everything = reproduce.read_runs(cell)
    (found,) = reproduce.evaluation_rows(cell, everything)
    assert [found[name] for name in ("seed", "of steps", "step", "mean", "error")] == [1, 4000, 2950, "2.5", "0.375"]
    assert (found["steps/s"], found["commit"]) == ("100", "a")
    kept = reproduce.curve_rows(cell, everything)
    assert (len(kept), kept[1]["global_step"], kept[1]["hours"]) == (60, 40, "0.0400")


def test_merged_origins_have_each_commit_and_machine_once():
    def merged(name, *texts):
        return trials.merge_origins(*({name: text} for text in texts))[name]

    assert merged("commit", "", "a") == "a"
    assert merged("commit", "a b+", "b") == "a b+ b"
    assert merged("commit", "a b", "b") == merged("commit", "a", "a b") == "a b"
    assert merged("machine", "AMD, 2 cores", "Intel", "AMD, 2 cores and Intel") == "AMD, 2 cores and Intel"


def test_picture_leaves_out_cells_without_numbers():
    rows = [
        {"cell": "neither", "published": "", "ours": None, "seeds": 0, "low": None},
        {"cell": "theirs", "published": "3.5", "ours": None, "seeds": 0, "low": None},
        {"cell": "ours", "published": "", "ours": 2.5, "seeds": 3, "low": 2.0, "high": 4.0},
    ]
    (axis,) = reproduce.draw("gamma", [{"metric": "m", "values": ""} | row for row in rows]).axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["theirs", "ours"]
    assert [(line.get_label(), line.get_xydata().tolist()) for line in axis.lines] == [
        ("published", [[3.5, 0]]),
        ("ours", [[2.5, 1]]),
        ("ours, 95 %", [[2, 1], [4, 1]]),
    ]


# BAD INPUT


BAD = {
    "unknown table": (["coinrun_grid"], "TABLE coinrun_grid", "coinrun_ppo_grid"),
    "scale of 0": (["gamma", "--scale", 0], "--scale 0", "above 0"),
    "seed twice": (["gamma", "--seeds", 1, 1], "--seeds", "each once"),
    "negative seed": (["gamma", "--seeds", 1, -1], "--seeds -1", "from 0 to 2147483647"),
    "seed of all": (["gamma", "--set", "seed=3"], "--set seed=3", "each run is given its own"),
    "what the cells differ in": (["gamma", "--set", "gamma=0.9"], "--set gamma", "differ"),
    "steps": (["gamma", "--set", "total_timesteps=9"], "--set total_timesteps", "--scale"),
    "unknown cell": (["gamma", "--cells", "0.99", "width"], "--cells width", "0.99, bigfish"),
    "value refused": (["gamma", "--set", "learning_rate=-1"], "--learning-rate '-1'", "0 or more"),
    "value refused by one cell": (["doorgym_continual", "--set", "hyper_width=128"], "--hyper-width 128", "--method"),
    "unknown flag": (["gamma", "--set", "lr=9"], "lr", "no flag"),
    "file as --out": (["gamma", "--out", "/dev/null"], "--out /dev/null: cannot wri", "another folder"),
    "file as --runs": (["gamma", "--runs", "/dev/null"], "--runs /dev/null: cannot wri", "another folder"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_flag_is_refused_in_one_sentence(case, tmp_path, capfd):
    words, names, valid = BAD[case]
    words = words + [word for flag in ("--runs", "--out") if flag not in words for word in (flag, tmp_path)]
    assert_refused(reproduce, words, capfd, names, valid)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("changes", [None, {"done": 1}, {"seconds": "1"}, {"seconds": -1}, {"why": 1}, {"commit": 1}])
def test_damaged_progress_is_refused_before_anything_runs(changes, table, monkeypatch, capfd):
    monkeypatch.setattr(trials, "run", None)
    path = reproduce.read_cells(args_in(table))[0].folder / "1/progress.json"
    good = {"done": True, "seconds": 1.5, "why": ""}
    files.write_json(path, good | changes if changes else [])
    assert_refused(reproduce, words_in(table), capfd, f"--runs {path}: ", "delete it")


def test_damaged_or_other_results_are_refused_before_anything_runs(table, monkeypatch, capfd):
    monkeypatch.setattr(trials, "run", None)
    path = table / "out/small.csv"
    path.parent.mkdir()

    def refused(*parts, words=()):
        assert_refused(reproduce, words_in(table, *words), capfd, f"--out {table / 'out'}", *parts)

    for text in ("seeds\n1\n", "seeds,steps\n1\n", "seeds,steps\n1,x\n", "seeds,steps\n-1,2\n"):
        path.write_text(text)
        refused(": ", "move it away")
    result = dict.fromkeys(reproduce.Result.__annotations__, "") | {"cell": "a", "command": "c --set gamma=0.5"}
    result |= {"seeds": "1", "values": "1:2", "flags": TABLE[0]["flags"]}
    of_cell = {"cell": "runs", "metric": METRIC, "command": "c", "flags": "gamma=0.7"}
    for changes, *parts in (
        ({"seeds": "-1"}, "move it away"),
        ({"seeds": ""}, "move it away"),
        ({"steps": "x"}, "move it away"),
        ({"published steps": "1.5"}, "move it away"),
        ({"low": "nan"}, "move it away"),
        ({"values": "1:x"}, "move it away"),
        ({"remark": "mine"}, "remark", "move it away"),
        ({}, "of --set gamma=0.5", "another folder"),
        (of_cell, "of an older table", "another folder"),
        ({"command": "c"}, "of an older table"),  # of a cell that is no longer in the table
    ):
        records.write_rows(path, [result | changes])
        refused("small.csv: ", *parts)
    records.write_rows(path, [result | {"seeds": "0"}, result | of_cell | {"seeds": "0"}])
    assert len(reproduce.read_results(args_in(table))) == 2
    (table / "out/small_evaluations.csv").touch()  # of runs of another --set that are under way
    refused("of --set gamma=0.5", "another folder")
    path.unlink()
    refused("without --set", words=["--cells", "runs", "--set", "adam_eps=1e-6"])


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
    return process.communicate(timeout=60)[0].splitlines(), process.returncode


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
        srun="shift 2; \"$@\" &\ntrap 'kill -9 $!; exit 137' TERM\nwait $!",
        scancel=f"echo scancel $@; kill -TERM $(cat {tmp_path}/pid)",
        scontrol="echo scontrol $@",
        squeue="echo RUNNING",
        python=f"trap 'echo written; exit 0' TERM\necho $$ > {tmp_path}/pid\necho begun\nwhile :; do sleep 0.1; done",
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
