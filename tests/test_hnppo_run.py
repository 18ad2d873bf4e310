"""Whole runs of hypernetwork PPO before real doors: same seed, resume, task after task, evaluation, bad input."""

import csv
import json
import re
from dataclasses import fields

import jax
import numpy as np
import pytest
import tyro
from conftest import (
    assert_flag_matters,
    assert_one_sentence,
    assert_resumes_after_sigterm,
    assert_same_run,
    documented_flags,
    flags_of,
    read_metrics,
    start,
)

import evaluate
import hnppo_doorgym as hn
from common import runs

# Small enough to compile in seconds; the physics is real. Three updates a task.
TINY = {
    "tasks": "0,2", "num_envs": 2, "num_worlds": 2, "num_minibatches": 2, "update_epochs": 2, "hidden": 8,
    "hyper_width": 16, "task_timesteps": 3 * 256, "eval_every": 2, "eval_episodes": 4, "checkpoint_every": 2,
    "hyper_learning_rate": 1e-3, "wandb_mode": "disabled",
}  # fmt: skip

# For the methods that have no hypernetwork.
PLAIN = {name: value for name, value in TINY.items() if name not in hn.HYPER}


@pytest.fixture
def train(tmp_path):
    """train(**flags) runs the script with TINY settings and returns its run."""
    return lambda **flags: hn.main(hn.Args(**TINY | {"run_dir": str(tmp_path)} | flags))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return hn.main(hn.Args(**TINY | {"run_dir": str(tmp_path_factory.mktemp("whole"))})).path


def state_of(run_dir):
    return runs.load_checkpoint(run_dir)[1]["state"]


@pytest.fixture
def stop_after(monkeypatch):
    """stop_after(n): a signal comes during the n-th update."""

    def arm(n):
        learn, calls = hn.learn, []

        def learn_and_stop(args, state, doors, watch):
            calls.append(1)
            if len(calls) == n:
                running[-1].stop = "SIGTERM"
            return learn(args, state, doors, watch)

        running, enter = [], runs.Run.__enter__
        monkeypatch.setattr(runs.Run, "__enter__", lambda run: running.append(run) or enter(run))
        monkeypatch.setattr(hn, "learn", learn_and_stop)

    return arm


@pytest.mark.parametrize("threads", [1, 3])
def test_same_seed_same_metrics_whatever_the_threads(train, whole, threads):
    assert_same_run(whole, train(num_threads=threads).path)


@pytest.mark.parametrize("updates", [1, 2, 3, 4, 6])
def test_resume_equals_uninterrupted(train, whole, stop_after, monkeypatch, updates):
    """Stopped within the first task, at its end, within the second."""
    stop_after(updates)
    half = train()
    monkeypatch.undo()
    assert half.stop == "SIGTERM"
    assert int(state_of(half.path)["finished"]) == updates // 3
    resumed = train(resume=str(half.path))
    assert resumed.path == half.path
    assert_same_run(whole, resumed.path)
    assert (half.path / "matrix.csv").read_text() == (whole / "matrix.csv").read_text()


def test_a_finished_series_can_be_given_another_task(train, whole):
    """As if both had been asked for at once, but for the evaluation of what was not asked for yet."""
    first = train(tasks="Pull-Right-Pull")
    both = train(tasks="0,2", resume=str(first.path))
    names = [f"eval/{name}" for name in ("Lever-Right-Pull/success_rate", "FWT")]
    without = lambda lines: [{k: v for k, v in x.items() if k not in names} for x in lines]  # noqa: E731
    assert without(read_metrics(whole)) == without(read_metrics(both.path))
    rows, whole_rows = (list(csv.reader((path / "matrix.csv").open())) for path in (both.path, whole))
    assert rows[1] == [*whole_rows[1][:2], ""]  # not measured, which is not 0
    assert [rows[0], rows[2]] == [whole_rows[0], whole_rows[2]]


def test_sigterm_writes_a_checkpoint_and_resumes_exactly(tmp_path):
    flags = TINY | {"task_timesteps": 40 * 256, "tasks": "0"}
    assert_resumes_after_sigterm(hn, flags, tmp_path)


def test_what_a_run_writes(whole):
    lines = read_metrics(whole, clocks=True)
    updates = [line for line in lines if "charts/task" in line]
    assert [(x["charts/task"], x["charts/task_updates"]) for x in updates] == [
        (i, j) for i in (0, 1) for j in (1, 2, 3)
    ]
    assert [x["global_step"] for x in updates] == [256 * i for i in range(1, 7)]
    # Evaluated every second update and at a task's end.
    assert ["eval/success_rate" in x for x in updates] == [False, True, True] * 2
    assert ["losses/penalty" in x for x in updates] == [False] * 3 + [True] * 3
    names = {
        "charts/success_rate",
        "charts/episodic_return",
        "charts/SPS",
        "charts/skipped_steps",
        "losses/policy_loss",
    }
    names |= {
        "losses/value_loss",
        "losses/entropy",
        "losses/approx_kl",
        "losses/explained_variance",
        "losses/grad_norm",
    }
    assert names | {"time/rollout", "time/inference", "time/update"} <= set(updates[-1])
    assert all(np.isfinite(list(line.values())).all() for line in lines)
    series = [line for line in lines if "eval/ACC" in line]
    assert len(series) == 2
    matrix = [
        [line[f"eval/{name}/success_rate"] for name in ("Pull-Right-Pull", "Lever-Right-Pull")] for line in series
    ]
    rows = list(csv.reader((whole / "matrix.csv").open()))
    assert [row[0] for row in rows] == ["after", "Pull-Right-Pull", "Lever-Right-Pull"]
    np.testing.assert_allclose(np.array([row[1:] for row in rows[1:]], float), matrix, atol=1e-4)
    np.testing.assert_allclose(state_of(whole)["matrix"][:2, :2], matrix, atol=1e-6)
    from PIL import Image

    assert np.asarray(Image.open(whole / "matrix.png")).std() > 20


def test_the_best_parameters_end_a_task(train, monkeypatch):
    """Evaluations say 0.5, 0.9, 0.1: the second one's parameters are what the next task begins with."""
    seen, rates = [], iter([0.5, 0.9, 0.1])
    play = hn.evaluate_policy

    def evaluate_policy(args, actor, task, episodes, *more):
        if (rate := next(rates, None)) is None:
            return play(args, actor, task, episodes, *more)
        seen.append(jax.device_get(actor))
        return np.zeros(10), np.arange(10) < 10 * rate

    monkeypatch.setattr(hn, "evaluate_policy", evaluate_policy)
    run = train(tasks="0", eval_every=1)
    state = state_of(run.path)
    kept = hn.policy_for(hn.Args(**TINY), hn.load(hn.Args(**TINY), str(run.path))["state"], 0)
    same = [all((x == y).all() for x, y in zip(jax.tree.leaves(kept), jax.tree.leaves(a), strict=True)) for a in seen]
    assert same == [False, True, False]
    assert state["best_success"] == np.float32(0.9)


def test_a_task_that_is_held_three_times_ends_early(train, monkeypatch):
    play = hn.evaluate_policy
    rates = iter([1.0, 0.5, 1.0, 0.95, 1.0])

    def evaluate_policy(args, actor, task, episodes, *more):
        rate = next(rates, None)
        return (np.zeros(20), np.arange(20) < 20 * rate) if rate else play(args, actor, task, episodes, *more)

    monkeypatch.setattr(hn, "evaluate_policy", evaluate_policy)
    run = train(tasks="0", eval_every=1, task_timesteps=100 * 256)
    assert int(state_of(run.path)["updates"]) == 5


def test_gradients_that_are_not_finite_stop_the_run_with_advice(train, tmp_path):
    with pytest.raises(runs.DivergedError, match=r"5 gradients in a row.*try a smaller --hyper-learning-rate"):
        train(hyper_learning_rate=1e30, max_skipped=5, checkpoint_every=1, update_epochs=8, clip_coef=1e9)
    (run_dir,) = tmp_path.iterdir()
    assert not list((run_dir / "checkpoints").glob("[0-9]*"))


def test_penalty_is_what_beta_zero_lacks(train, whole):
    assert not any("losses/penalty" in line for line in read_metrics(train(beta=0.0).path))


@pytest.mark.parametrize("method", ["ppo", "finetune"])
def test_other_methods(tmp_path, method):
    """Two tasks, then evaluate.py: from scratch, the first one has a policy of its own; otherwise there is but one."""
    args = hn.Args(**PLAIN | {"method": method, "run_dir": str(tmp_path)})
    run = hn.main(args)
    state = hn.load(args, str(run.path))["state"]
    assert int(state.finished) == 2
    first, newest = (hn.generated(args)[1](state.targets[i])["actor"] for i in (0, 1))
    want = [hn.evaluate_policy(args, actor, "Pull-Right-Pull", 3)[0].mean() for actor in (first, newest)]
    assert want[0] != want[1]
    rows = hn.evaluate(args, str(run.path), 3, 0, False, False)[2]
    assert rows[0]["mean_return"] == want[method == "finetune"]
    assert [row["learnt"] for row in rows] == ["yes", "yes"]


def test_two_thousand_decisions(tmp_path):
    """The command line as a user types it: W&B, the gripper, then evaluate.py with a video."""
    flags = TINY | {
        "tasks": "0,Round-Left-Push", "robot": "gripper", "num_envs": 8, "num_worlds": 8, "task_timesteps": 1_024,
        "critic": "hyper", "chunked": True, "run_dir": tmp_path, "wandb_mode": "offline", "wandb_project": "test",
    }  # fmt: skip
    process = start("hnppo_doorgym.py", *flags_of(flags))
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    assert "REM" in output
    assert "Round-Left-Push" in output
    (run_dir,) = tmp_path.iterdir()
    assert re.fullmatch(r"DoorGym__hnppo_doorgym__1__\d+", run_dir.name)
    assert len(list((run_dir / "wandb").glob("offline-run-*"))) == 1

    runs.cli(evaluate.Args, evaluate.main, [str(run_dir), "--episodes", "3", "--video"])
    result = json.loads((run_dir / "eval.json").read_text())
    assert set(result["episodes"]) == {"Pull-Right-Pull", "Round-Left-Push", "tasks_learnt"}
    import av

    with av.open(str(run_dir / "videos" / f"episodes_{result['global_step']}.mp4")) as container:
        pictures = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(pictures) == 2 * hn.DECISIONS
    assert np.std(pictures[5]) > 10
    runs.cli(evaluate.Args, evaluate.main, [str(run_dir), "--episodes", "3", "--random"])
    assert "random_episodes" in json.loads((run_dir / "eval.json").read_text())


def test_evaluation_is_the_same_every_time(whole):
    args = hn.Args(**TINY)
    first, second = (hn.evaluate(args, str(whole), 5, 0, False, False) for _ in range(2))
    assert first[2:4] == second[2:4]
    assert hn.evaluate(args, str(whole), 5, 1, False, False)[2] != first[2]


# FLAGS


# What each flag is changed to: then something must differ.
FLAGS = {
    "tasks": "1,2", "robot": "gripper", "num_worlds": 3, "method": "ppo", "critic": "hyper",
    "beta": 0.1, "task_embedding_dim": 4, "hyper_width": 8, "chunked": True, "hidden": 16, "num_layers": 1,
    "task_timesteps": 512, "num_envs": 4, "num_minibatches": 4, "update_epochs": 1, "learning_rate": 0.01,
    "hyper_learning_rate": 1e-4, "gamma": 0.9, "gae_lambda": 0.5, "clip_coef": 0.01, "ent_coef": 0.1, "vf_coef": 0.1,
    "max_grad_norm": 0.01, "adam_eps": 0.1, "eval_every": 1, "eval_episodes": 3, "stop_at_success": 0.0, "seed": 2,
}  # fmt: skip
# Tested elsewhere: these change files, speed, or what so short a run does not reach.
ELSEWHERE = {
    "hardness", "num_threads", "max_skipped", "run_dir", "resume", "checkpoint_every", "keep_checkpoints", "wandb_mode",
    "wandb_project", "wandb_entity",
}  # fmt: skip
# These are for the host, or for a second task.
HOST = {
    "tasks", "num_worlds", "beta", "task_timesteps", "eval_every", "eval_episodes", "stop_at_success",
    "seed",
}  # fmt: skip
NEEDS = {"stop_at_success": {"eval_every": 1, "task_timesteps": 4 * 256}}


def test_hardness_is_that_of_the_knobs():
    stiffness = {}
    for hardness in ("hard", "easy"):
        doors = hn.make_doors(hn.Args(hardness=hardness), "Lever-Right-Pull", 1, 1, 5)
        stiffness[hardness] = [model.joint("knob").stiffness[0] for model in doors.models]
        doors.close()
    assert min(stiffness["hard"]) >= 1
    assert max(stiffness["easy"]) <= 0.14


def test_every_flag_is_in_a_test():
    assert {f.name for f in fields(hn.Args)} == set(FLAGS) | ELSEWHERE


@pytest.mark.parametrize("flag", [*FLAGS, "none"])
def test_every_flag_changes_something(flag, tmp_path):
    flags = (PLAIN if flag == "method" else TINY) | {"run_dir": str(tmp_path)} | NEEDS.get(flag, {})
    change = {} if flag == "none" else {flag: FLAGS[flag]}
    assert_flag_matters(hn, flags, change, whole=flag in HOST)


# Words, the flag and its value that the answer names, and what it says is valid.
BAD = {
    "number": (["--tasks", "0,6"], "--tasks '0,6'", "from 0 to 5"),
    "name": (["--task", "Lever"], "--tasks 'Lever'", "Lever-Right-Pull"),
    "none": (["--tasks", ""], "--tasks ''", "from 0 to 5"),
    "too many": (["--tasks", "0,1,2,3,4,5,Round-Left-Pull"], "Round-Left-Pull'", "at most 6"),
    "twice": (["--tasks", "0,Pull-Right-Pull"], "--tasks '0,Pull-Right-Pull'", "twice"),
    "minibatches": (["--num-minibatches", 7], "--num-minibatches 7", "8192"),
    "no hypernetwork": (["--method", "ppo", "--beta", 1e-3], "--beta 0.001", "--method hnppo"),
    "no memory": (["--method", "finetune", "--critic", "hyper"], "--critic hyper", "--method hnppo"),
    "discount": (["--gamma", 1.5], "--gamma 1.5", "from 0 to 1"),
    "worlds": (["--num-worlds", 0], "--num-worlds 0", "from 1"),
    "nan": (["--beta", "nan"], "--beta nan", "0 or more"),
    "embedding": (["--task-embedding-dim", 0], "--task-embedding-dim 0", "from 1"),
    "not a run": (["--resume", "/nowhere"], "--resume /nowhere", "run directory"),
    "other script": (None, "--resume", "ppo_procgen.py"),
    "other robot": (None, "--robot gripper", "keeps its own, hook"),
    "other tasks": (None, "--tasks '0,3'", "Lever-Right-Pull"),
    "shapes": (None, "does not fit", "here"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_sentence(case, tmp_path, whole, monkeypatch, capfd):
    words, names, valid = BAD[case]
    more = {"other robot": ["--robot", "gripper"], "other tasks": ["--tasks", "0,3"], "shapes": ["--hidden", 16]}
    if case == "other script":
        (tmp_path / "args.json").write_text('{"script": "ppo_procgen", "args": {}}')
        words = ["--resume", tmp_path]
    elif words is None:
        words = ["--resume", whole, *more[case]]
    assert_one_sentence(hn, words, names, valid, monkeypatch, capfd)


def test_commands_in_the_readme_are_valid():
    flags = list(documented_flags("hnppo_doorgym.py"))
    assert len(flags) >= 4
    for words in flags:
        hn.check_args(tyro.cli(hn.Args, args=words))


def test_checkpoints_hold_what_is_learnt(whole):
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state_of(whole) | {"matrix": 0}))
    assert len(list((whole / "checkpoints").glob("[0-9]*"))) == 2
