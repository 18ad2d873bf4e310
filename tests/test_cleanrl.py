"""benchmarks/cleanrl.py with a stand-in for CleanRL's script: what is read of its output, and what is compared."""

import csv
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import assert_refused

from benchmarks import cleanrl

# Prints as the script does, and goes on until it is ended.
SCRIPT = """
import sys, time
assert sys.argv[1:5] == ["--env-id", "maze", "--seed", "3"], sys.argv
for i in range(150):
    print(f"global_step={64 * (i + 1)}, episodic_return={float(i)}")
print("SPS: 100")
time.sleep(600)
"""


@pytest.fixture
def args(tmp_path):
    (tmp_path / "theirs.py").write_text(SCRIPT)
    flags = {"python": sys.executable, "env_id": "maze", "seed": 3, "minutes": 0.1}
    return cleanrl.Args(str(tmp_path / "theirs.py"), out=str(tmp_path / "out_0.5"), **flags)


def test_their_curve_is_of_the_last_hundred_episodes(args, tmp_path):
    points = cleanrl.play_theirs(replace(args, minutes=0.04), tmp_path)
    assert [point.step for point in points] == [64 * (i + 1) for i in range(150)]
    assert points[9].mean_return == 4.5
    assert points[-1].mean_return == sum(range(50, 150)) / 100


def test_an_interpreter_is_given_from_here(args, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    python = str(Path("bin", "python"))
    assert cleanrl.play_theirs(replace(args, minutes=0.04, python=python), tmp_path / "elsewhere")


def test_our_curve_is_of_the_given_setting_and_minutes(args, tmp_path, monkeypatch):
    given = {}

    def run(program, flags, folder, *_):
        given.update(flags)
        (folder / "run").mkdir()
        (folder / "run" / "args.json").write_text("{}")
        lines = [{"global_step": s, "time": time.time() + s, "charts/episodic_return": 5} for s in (1, 9)]
        (folder / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    monkeypatch.setattr(cleanrl.trials, "run", run)
    points = cleanrl.play_ours(args, cleanrl.SETTINGS, tmp_path / "ours")
    assert (given["env_id"], given["seed"], given["normalize_rewards"], given["width"]) == ("maze", 3, True, 1)
    assert [point.step for point in points] == [1]  # the other one is after six seconds


def test_runs_are_compared_at_the_steps_of_the_shortest(args, monkeypatch):
    ours = [cleanrl.Point(10, 5_000, 1), cleanrl.Point(50, 15_000, 3), cleanrl.Point(55, 16_000, 9)]
    theirs = [cleanrl.Point(1, 9_536, 98.5), cleanrl.Point(2, 9_600, 99.5)]
    monkeypatch.setattr(cleanrl, "play_ours", lambda args, flags, folder: ours)
    monkeypatch.setattr(cleanrl, "play_theirs", lambda args, folder: theirs)
    cleanrl.main(args)
    with open(f"{args.out}.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["9600", "5000", "16000"]  # the last of every half minute
    theirs, settings = cleanrl.compare(rows)
    assert (theirs["return at the end"], theirs["after 9,600 steps"]) == ("99.50", "99.50")
    assert (settings["return at the end"], settings["after 9,600 steps"]) == ("9.00", "4.35")
    monkeypatch.setattr(cleanrl, "play_theirs", None)  # what is in the file is not run again
    monkeypatch.setattr(cleanrl, "play_ours", None)
    cleanrl.main(args)


def test_bad_input_gets_one_sentence(args, tmp_path, capfd):
    out = ["--out", args.out]
    assert_refused(cleanrl, [tmp_path / "none.py"], capfd, "SCRIPT", "none.py")
    assert_refused(cleanrl, [args.script, "--minutes", 0], capfd, "--minutes 0")
    assert_refused(cleanrl, [args.script, "--flags=--num-envs 0"], capfd, "--num-envs 0")
    (tmp_path / "other.csv").write_text("game,return\nmaze,1\n")
    assert_refused(cleanrl, [args.script, "--out", tmp_path / "other"], capfd, "other.csv: has other columns")
    none = tmp_path / "python"
    assert_refused(cleanrl, [args.script, "--python", none, *out], capfd, f"--python {none}")
    (tmp_path / "theirs.py").write_text("raise ImportError('no gym')")
    assert_refused(cleanrl, [args.script, "--python", sys.executable, *out], capfd, "no gym", "ended by itself")
