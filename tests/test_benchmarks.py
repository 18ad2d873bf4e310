"""Benchmarks: what they read, compute, print and refuse; no run is started."""

import json
import os
import types

import jax
import numpy as np
import pytest
from conftest import assert_refused

import ppo_procgen
from benchmarks import doors, encoders, gpu_plan, gpu_profile, gpu_trials, scaling, soak, throughput, torture
from common import devices, runs
from experiments import records


def write_lines(run, lines, end=""):
    run.mkdir(exist_ok=True)
    (run / "args.json").write_text("{}")
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + end)


def rows(slope, start=1, begin=0, minutes=60):
    """Memory that grows by `slope` MiB an hour, and by 50 MiB in the first minutes after a start."""
    origin = {"machine": "M", "commit": "c", "threads": 5, "open_files": 9, "steps_per_second": ""}
    return [
        origin | {"start": str(start), "minutes": str(begin + m), "memory_mib": 300 + 50 * (m > 5) + slope / 60 * m}
        for m in range(1, minutes + 1)
    ]


def test_memory_growth_leaves_out_the_first_minutes_of_each_start(tmp_path):
    found = soak.growth(rows(12) + rows(-6, start=2, begin=60) + rows(0, start=3, begin=120, minutes=11))
    assert found == {1: (pytest.approx(12), 10, 60), 2: (pytest.approx(-6), 70, 120)}
    soak.draw(tmp_path / "soak.png", rows(12) + rows(-6, start=2, begin=60), "title")
    assert [path.name for path in tmp_path.iterdir()] == ["soak.png"]


def test_sample_of_a_process_has_its_memory_and_files():
    before = soak.process_usage(os.getpid())
    with open(os.devnull):
        after = soak.process_usage(os.getpid())
    assert after["open_files"] == before["open_files"] + 1
    assert after["threads"] >= 1
    assert 10 < after["memory_mib"] < 100_000
    with pytest.raises(OSError, match="No such file"):
        soak.process_usage(2**22 + 1)


def test_sample_of_a_run_counts_steps_and_checkpoints_since_the_last(tmp_path):
    run = tmp_path / "run"
    write_lines(run, [])
    sampler = soak.Sampler(os.getpid(), tmp_path, [{"start": "2", "minutes": "7.5", "checkpoints": "4"}])
    assert sampler.sample()["steps_per_second"] is None
    times = sampler._logged + np.array([-100, 10, 20, 30])
    write_lines(run, [{"global_step": 50 * i, "time": t} for i, t in enumerate(times)], '{"global_step": 99')
    for name in ("100", "150.orbax-checkpoint-tmp"):
        (run / "checkpoints" / name).mkdir(parents=True)
    row = sampler.sample()
    assert (row["steps_per_second"], row["start"], row["checkpoints"]) == (5, 3, 5)
    assert 7.5 <= row["minutes"] < 8
    again = sampler.sample()
    assert (again["steps_per_second"], again["checkpoints"]) == (None, 5)


def test_soak_resumes_its_run(tmp_path, monkeypatch):
    commands, output = [], types.SimpleNamespace(fileno=lambda: 0)
    monkeypatch.setattr(soak.subprocess, "Popen", lambda words, **_: commands.append(words))
    monkeypatch.setattr(soak.trials.checkpoints, "steps_in", lambda run: [100])
    args = soak.Args("ppo_procgen.py", "x", "--env-id maze")
    soak.start(args, tmp_path, output)
    write_lines(tmp_path / "run", [])
    soak.start(args, tmp_path, output)
    assert [words[-4:] for words in commands] == [
        ["--env-id", "maze", "--run-dir", str(tmp_path)],
        ["--env-id", "maze", "--resume", str(tmp_path / "run")],
    ]
    with pytest.raises(runs.UsageError, match="has no rows of"):
        soak.main(soak.Args("ppo_procgen.py", str(tmp_path / "new" / tmp_path.name), run_dir=str(tmp_path.parent)))


REFUSED = {
    "script": (soak, ["dqn.py", "--out", "x"], "program dqn.py", "ppo_procgen.py"),
    "minutes": (soak, ["ppo_procgen.py", "--out", "x", "--minutes", 0], "--minutes 0", "from 0.1"),
    "another table": (soak, ["ppo_procgen.py", "--out", "other"], "--out other: is of another table", "give another"),
    "scripts": (torture, ["--scripts", "dqn.py"], "--scripts dqn.py", "ppo_procgen.py"),
    "folder": (torture, ["--folder", "."], "--folder .", "an empty folder"),
    "no run folder": (soak, ["ppo_procgen.py", "--out", "x", "--run-dir", "there.csv/x"], "--run-dir", "cannot write"),
    "no folder to torture in": (torture, ["--folder", "there.csv"], "--folder there.csv", "an empty folder"),
    "no script": (throughput, ["dqn"], "VARIANTS: program dqn.py", "ppo_procgen.py"),
    "a variant twice": (throughput, ["ppo_procgen", "ppo_procgen"], "VARIANTS", "each once"),
    "columns": (throughput, ["ppo_procgen", "--csv", "other.csv"], "other.csv: has other columns", "another file"),
    "half a phase": (throughput, ["ppg_procgen"], "--updates 10", "a multiple of 32"),
    "too few updates": (scaling, ["ppo_procgen", "--steps", 40_000], "--steps 40000", "49152 or more"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_in_one_sentence(case, tmp_path, monkeypatch, capfd):
    tool, words, *parts = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.csv").write_text("start,minutes,script,flags\n1,1,apex_procgen.py,\n")
    (tmp_path / "other.csv").write_text("game,return\nmaze,1\n")
    assert_refused(tool, words, capfd, *parts)


@pytest.mark.parametrize(
    "tool", [doors, encoders, gpu_profile, scaling, throughput], ids=lambda tool: tool.__name__.split(".")[-1]
)
def test_file_that_cannot_be_written_is_refused_before_anything_is_measured(tool, monkeypatch, capfd):
    for name in ("measure", "speed", "cost", "steps_per_second"):
        monkeypatch.setattr(tool, name, None, raising=False)
    flag = "--out" if tool in (doors, gpu_profile) else "--csv"
    needed = {"name": "a", "script": "ppo_procgen", "variants": "ppo_procgen"}
    words = [word for name, word in needed.items() if name in tool.Args.__dataclass_fields__]
    assert_refused(tool, [*words, flag, "/dev/null/x"], capfd, f"{flag} /dev/null", "cannot write there")


def test_torture_names_the_first_difference(tmp_path, monkeypatch):
    for name, loss in (("whole", 1.0), ("run", 1.5)):
        lines = [{"global_step": 1, "time": loss, "time/update": loss, "losses/loss": 1.0}]
        write_lines(tmp_path / name, [*lines, {"global_step": 2, "time": loss, "losses/loss": loss}])
    difference = torture.difference(tmp_path / "whole", tmp_path / "run")
    assert difference == "line 2, step 2: losses/loss 1.0 -> 1.5"
    for name in ("whole", "run"):
        write_lines(tmp_path / name, [])
    last = lambda run: (2, {"run": {"seconds": 0}, "w": np.array([np.nan, run.name == "run"])})  # noqa: E731
    monkeypatch.setattr(torture.checkpoints, "load", last)
    assert torture.difference(tmp_path / "whole", tmp_path / "run") == "['w'] in the last checkpoint"


@pytest.mark.parametrize(("wrong", "code"), [("differs", 1), ("", 0)])
def test_torture_exit_code_is_1_if_a_run_differs(wrong, code, tmp_path, monkeypatch):
    monkeypatch.setattr(torture, "run_uninterrupted", lambda *_: (1, 1))
    monkeypatch.setattr(torture, "kill_and_resume", lambda *_: (["killed"], wrong))
    with pytest.raises(SystemExit, match=f"^{code}$"):
        torture.main(torture.Args(kills=1, folder=str(tmp_path / "new")))


def test_variants_run_in_turns_with_ratios_to_the_first(tmp_path, monkeypatch):
    def ratios(file, column):
        return [row[column] for row in records.read_rows(tmp_path / file)]

    order = []

    def measure(name, args, updates):
        order.append((name, args.num_envs))
        if len(order) == 6:
            raise runs.FailedError("the second variant")
        return {"steps/s": 100 + 50 * (name == "impala_procgen")}

    monkeypatch.setattr(throughput, "measure", measure)
    monkeypatch.setattr(throughput, "games_rate", lambda *_: 200)
    variants = "ppo_procgen", "impala_procgen --num-envs 8"
    throughput.main(throughput.Args(variants, rounds=2, csv=str(tmp_path / "a")))
    assert ratios("a", "times the first") == ["1", "1.5"]
    assert tuple(records.read_rows(tmp_path / "a")[0]) == throughput.COLUMNS
    assert order == [("ppo_procgen", 64), ("impala_procgen", 8), ("impala_procgen", 8), ("ppo_procgen", 64)]
    with pytest.raises(runs.FailedError):
        throughput.main(throughput.Args(variants, rounds=1, csv=str(tmp_path / "b")))
    assert ratios("b", "variant") == ["ppo_procgen"]
    monkeypatch.setattr(scaling, "steps_per_second", lambda args, way: 150 - 50 * (way == "one device"))
    scaling.main(scaling.Args("ppo_procgen", steps=10**5, rounds=1, csv=str(tmp_path / "c")))
    assert ratios("c", "ratio") == ["1", "1.5", "1.5"]


def test_rates_leave_out_iterations_that_compile():
    """Timing starts at the second line with losses; parts are weighted by time."""
    filling = [{"global_step": 10 * i, "time": 9.0 * i} for i in range(3)]
    learning = [(100, 100, 0.9), (200, 200, 0.9), (600, 202, 0.5), (1000, 203, 0.2)]
    lines = filling + [
        {"global_step": s, "time": t, "losses/loss": 1, "charts/updates": s / 2, "time/actor_game": share}
        for s, t, share in learning
    ]
    timed = throughput.timed_lines(lines)
    assert [line["global_step"] for line in timed] == [200, 600, 1000]
    found = throughput.rates(timed)
    assert found == {"steps/s": 800 / 3, "updates/s": 400 / 3, "game %": pytest.approx(40)}
    assert throughput.timed_lines(filling) == []
    assert [line["global_step"] for line in throughput.timed_lines(lines, phase=2)] == [600, 1000]


def test_flags_of_a_variant_are_parsed_as_by_the_script():
    assert records.parse_flags(ppo_procgen, "--gap-stack=False").gap_stack is False
    _, args = throughput.read_variant("ppo_procgen --seed 5", "--gap-stack=False")
    assert (args.gap_stack, args.seed) == (False, 5)


def test_pallas_convolution_equals_xlas_between_relu_and_residual_sum():
    """Interpreted, on a CPU, where Triton does not run."""
    rng = np.random.default_rng(0)
    shapes = (2, 8, 8, 3), (3, 3, 3, 5), (5,), (2, 8, 8, 5)
    x, kernel, bias, residual = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    found = gpu_trials.pallas_conv(x, kernel, bias, residual, relu=True)
    dimensions = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    want = jax.lax.conv_general_dilated(x.clip(0), kernel, (1, 1), "SAME", **dimensions) + bias + residual
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", gpu_plan.SCRIPTS)
def test_gpu_plan_lowers_every_program(name):
    script, flags = gpu_plan.SCRIPTS[name], {"num_envs": 8, "num_steps": 8, "hidden": 16, "num_devices": 1}
    if name != "rnd":
        flags |= {"encoder": "nature", "width": 1, "pool": "flatten"}
    if name in ("apex", "sac"):
        flags |= {"batch_size": 16, "buffer_size": 512, "learning_starts": 300}
    args = script.Args(**flags)
    programs = gpu_plan.lowerings(script, args, devices.make_mesh(args))
    assert programs.keys() == {"act", "update"} | ({"insert"} if name in ("apex", "sac") else set())
    for lower in programs.values():
        lower()


def test_gpu_trial_is_described_beside_the_baseline():
    baseline = {"takes": np.float64(2), "outputs": np.zeros(4), "actions": np.arange(4)}
    assert gpu_trials.describe(baseline, baseline) == "takes 2.000 ms (1.00 x), equal"
    other = {"takes": np.float64(1), "outputs": np.float32([0, 0, 0, 0.5]), "actions": np.arange(4) % 3}
    words = "takes 1.000 ms (0.50 x), outputs differ by up to 0.5, 75.0% of actions equal"
    assert gpu_trials.describe(other, baseline) == words
    assert gpu_trials.describe(other, None) == "takes 1.000 ms"
