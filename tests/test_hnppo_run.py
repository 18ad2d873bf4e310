"""Whole runs of hypernetwork PPO on real doors: task after task, what a run writes, evaluation."""

import csv
import json
import re
from contextlib import closing
from functools import partial

import jax
import numpy as np
import pytest
from conftest import assert_refused, flags_of, read_metrics
from PIL import Image

import doorgym
import evaluate
import hnppo_doorgym as hn
from common import checkpoints, devices, doors, runs

# Small enough to compile in seconds; the physics is real. A task has three updates of 256 decisions, and is evaluated
# after the second and at its end.
TINY = {
    "tasks": "0,2", "num_envs": 2, "num_worlds": 2, "num_minibatches": 2, "update_epochs": 2, "hidden": 8,
    "num_layers": 1, "hyper_width": 16, "task_timesteps": 3 * 256, "eval_every": 400, "eval_episodes": 2,
    "checkpoint_every": 512, "hyper_learning_rate": 1e-3, "wandb_mode": "disabled",
}  # fmt: skip
# For the methods without a hypernetwork.
PLAIN = {name: value for name, value in TINY.items() if name not in hn.HYPERNET_FLAGS}


@pytest.fixture
def train(tmp_path):
    """train(**flags) runs the script with TINY settings and returns its run."""
    return lambda **flags: hn.main(hn.Args(**TINY | {"run_dir": str(tmp_path / "runs")} | flags))


@pytest.fixture(scope="module")
def two_tasks(tmp_path_factory):
    """The directory of a finished run."""
    return hn.main(hn.Args(**TINY | {"run_dir": str(tmp_path_factory.mktemp("two_tasks"))})).path


def make(args):
    agent = hn.make_agent(args)
    return agent, hn.make_jitted(args, agent, devices.make_mesh(args))


def load_state(args, agent, run_dir):
    return runs.load(partial(hn.init_checkpoint, args, agent), str(run_dir))["state"]


def test_finished_run_given_another_task_continues_as_if_asked_for_both(train, two_tasks, capfd):
    """But for the evaluation of the task that was not asked for yet."""
    run_dir = train(tasks="Pull-Right-Pull").path
    before = read_metrics(run_dir)
    train(tasks="Pull-Right-Pull", resume=str(run_dir))
    assert "all tasks of the run are finished" in "".join(capfd.readouterr())
    assert read_metrics(run_dir) == before
    train(resume=str(run_dir))
    names = "eval/Lever-Right-Pull/success_rate", "eval/FWT"
    lines, both = (
        [{k: v for k, v in x.items() if k not in names} for x in read_metrics(y)] for y in (run_dir, two_tasks)
    )
    assert lines == both
    rows, both_rows = (list(csv.reader((path / "matrix.csv").open())) for path in (run_dir, two_tasks))
    assert rows[1] == [*both_rows[1][:2], ""]  # not measured, which is not 0
    assert [rows[0], rows[2]] == [both_rows[0], both_rows[2]]


def test_finished_run_has_logged_and_saved_each_update_task_and_matrix(two_tasks):
    lines = read_metrics(two_tasks, clocks=True)
    updates = [line for line in lines if "charts/task" in line]
    assert [(x["charts/task"], x["charts/task_updates"]) for x in updates] == [
        (i, j) for i in (0, 1) for j in (1, 2, 3)
    ]
    assert [x["global_step"] for x in updates] == [256 * i for i in range(1, 7)]
    # After 400 decisions, of each task's own, and at its end.
    assert ["eval/success_rate" in x for x in updates] == [False, True, True] * 2
    assert ["losses/penalty" in x for x in updates] == [False] * 3 + [True] * 3
    charts = "success_rate", "episodic_return", "SPS", "skipped_steps"
    losses = "loss", "policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "explained_variance", "grad_norm"
    names = {f"charts/{name}" for name in charts} | {f"losses/{name}" for name in (*losses, "action_std")}
    assert names | {"time/rollout", "time/inference", "time/update"} <= set(updates[-1])
    assert all(np.isfinite(list(line.values())).all() for line in lines)
    tasks = "Pull-Right-Pull", "Lever-Right-Pull"
    matrix = [[line[f"eval/{name}/success_rate"] for name in tasks] for line in lines if "eval/ACC" in line]
    header, *rows = csv.reader((two_tasks / "matrix.csv").open())
    assert header == ["after", *tasks]
    np.testing.assert_allclose(np.array([row[1:] for row in rows], float), matrix, atol=1e-4)
    state = checkpoints.load(two_tasks)[1]["state"]
    np.testing.assert_allclose(state["matrix"][:2, :2], matrix, atol=1e-6)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state | {"matrix": 0}))
    # Every 512 decisions, and at a task's end: 512, 768, 1024, 1536.
    assert {path.name for path in (two_tasks / "checkpoints").glob("[0-9]*")} == {"1024", "1536"}
    assert np.asarray(Image.open(two_tasks / "matrix.png")).std() > 20


def test_task_with_three_good_evaluations_ends_with_its_best_parameters(train, monkeypatch):
    """The evaluation after the fifth update is the third in a row that is good enough; the one before was the best."""
    obs, actions, rates, seeds = np.ones((3, 15), np.float32), [], iter([1.0, 0.5, 0.95, 1.0, 0.95, 0.0]), []

    def evaluate_doors(args, policy, task, *, episodes, seed):
        seeds.append(seed)
        actions.append(np.asarray(policy(obs, 0)))
        return doors.Outcomes(np.zeros(20), np.arange(20) < 20 * next(rates), np.zeros(20, bool), np.zeros(20))

    monkeypatch.setattr(doors, "evaluate", evaluate_doors)
    run = train(tasks="0", eval_every=256, task_timesteps=100 * 256)
    args = hn.Args(**TINY)
    agent, jitted = make(args)
    state = load_state(args, agent, run.path)
    assert (int(state.updates), float(state.best.success)) == (5, 1.0)
    kept = hn.make_policy(jitted, jitted.policy_params(state, 0))(obs, 0)
    assert [bool((kept == x).all()) for x in actions] == [False, False, False, True, False, True]
    # Parameters are chosen by other doors than the matrix is of, which evaluate.py plays with --seed 0.
    assert seeds == [hn.SELECT_SEED] * 5 + [hn.EVAL_SEED]
    assert hn.SELECT_SEED > hn.EVAL_SEED + runs.MAX_SEED


def test_gradients_that_stay_infinite_stop_the_run_with_advice(train, tmp_path):
    words = r"5 gradients in a row.*no checkpoint was written yet; try a smaller --hyper-learning-rate"
    with pytest.raises(runs.DivergedError, match=words):
        train(hyper_learning_rate=1e30, max_skipped=5, checkpoint_every=1, update_epochs=8, clip_coef=1e9)
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert not list((run_dir / "checkpoints").glob("[0-9]*"))


@pytest.mark.slow
def test_run_with_beta_zero_has_no_penalty(train):
    lines = read_metrics(train(beta=0.0, task_timesteps=256).path)
    assert lines[-1]["global_step"] == 512
    assert not any("losses/penalty" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ppo", "finetune"])
def test_run_without_hypernetwork_is_evaluated_with_its_policies(tmp_path, method):
    """From scratch, the first of two tasks has a policy of its own; otherwise there is but one."""
    args = hn.Args(**PLAIN | {"method": method, "task_timesteps": 256, "eval_every": 0, "run_dir": str(tmp_path)})
    run_dir = str(hn.main(args).path)
    agent, jitted = make(args)
    state = load_state(args, agent, run_dir)
    assert int(state.finished) == 2
    assert not any("losses/penalty" in line for line in read_metrics(tmp_path / run_dir))
    returns = []
    for i in (0, 1):
        policy = hn.make_policy(jitted, agent.unpack(state.targets[i]))
        outcomes = doors.evaluate(args, policy, "Pull-Right-Pull", episodes=3, seed=hn.EVAL_SEED)
        returns.append(outcomes.returns.mean())
    assert returns[0] != returns[1]
    evaluate_run = partial(hn.evaluate, args, run_dir, seed=0, levels="test", random=False, video=False)
    with pytest.raises(runs.UsageError, match="--episodes 20001"):
        evaluate_run(episodes=20_001)
    answer = evaluate_run(episodes=3)
    assert answer.rows[0]["mean_return"] == returns[method == "finetune"]
    assert [row["done"] for row in answer.rows] == ["yes", "yes"]


def test_command_line_trains_a_gripper_and_films_it(tmp_path, monkeypatch, capfd):
    flags = TINY | {
        "tasks": "0,Round-Left-Push", "robot": "gripper", "num_envs": 8, "num_worlds": 8, "task_timesteps": 1_024,
        "chunked": True, "run_dir": tmp_path, "wandb_mode": "offline", "wandb_project": "test",
    }  # fmt: skip
    runs.cli(hn.Args, hn.main, flags_of(flags))
    output = "".join(capfd.readouterr())
    assert "REM" in output
    assert "Round-Left-Push ended after 1 updates" in output
    (run_dir,) = tmp_path.iterdir()
    assert re.fullmatch(r"DoorGym__hnppo_doorgym__1__\d+", run_dir.name)
    assert len(list((run_dir / "wandb").glob("offline-run-*"))) == 1

    monkeypatch.setattr(doorgym, "make_vec", partial(doorgym.make_vec, width=80, height=60))
    runs.cli(evaluate.Args, evaluate.main, [str(run_dir), "--episodes", "3", "--video"])
    result = json.loads((run_dir / "eval.json").read_text())
    assert set(result["episodes"]) == {"Pull-Right-Pull", "Round-Left-Push", "tasks_learnt", "episodes", "seed"}
    import av

    video = run_dir / "videos" / f"episodes_{result['global_step']}.mp4"
    with av.open(str(video)) as container:
        assert container.streams.video[0].average_rate == 12.5  # a decision lasts 80 ms
        pictures = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(pictures) == 2 * doors.DECISIONS
    assert np.asarray(Image.open(video.with_suffix(".png"))).shape == (2 * 60, 8 * 80, 3)
    assert np.std(pictures[5]) > 10
    runs.cli(evaluate.Args, evaluate.main, [str(run_dir), "--episodes", "3", "--random"])
    assert json.loads((run_dir / "eval.json").read_text())["random_episodes"]["episodes"] == 3
    assert "doors opened by random actions" in capfd.readouterr().out


def test_evaluation_of_a_seed_is_always_the_same_and_of_each_tasks_policy(two_tasks, capfd):
    args = hn.Args(**TINY)
    evaluate_run = partial(hn.evaluate, args, str(two_tasks), episodes=2, levels="test", video=False)
    first, again, other = (evaluate_run(seed=seed, random=False) for seed in (0, 0, 1))
    assert first == again
    assert first.step == 1536
    assert first.rows != other.rows
    assert first.rows != evaluate_run(seed=0, random=True).rows
    agent, jitted = make(args)
    state = load_state(args, agent, two_tasks)
    params = [jitted.policy_params(state, i) for i in range(2)]
    assert any((x != y).any() for x, y in zip(*map(jax.tree.leaves, params), strict=True))
    for row, one in zip(first.rows, params, strict=True):
        policy = hn.make_policy(jitted, one)
        outcomes = doors.evaluate(args, policy, row["task"], episodes=2, seed=hn.EVAL_SEED)
        assert row["mean_return"] == pytest.approx(outcomes.returns.mean(), rel=1e-5)
    assert_refused(evaluate, [two_tasks, "--levels", "train"], capfd, "--levels train", "hnppo_doorgym.py")


class Reached(Exception):
    """The doors would be made."""


def test_training_doors_are_as_many_as_asked_for_and_differ_by_seed(train, monkeypatch):
    asked = []

    def make_doors(*given, **how):
        asked.append(how)
        raise Reached

    monkeypatch.setattr(doors, "make_doors", make_doors)
    for seed in (1, 2):
        with pytest.raises(Reached):
            train(tasks="0", num_worlds=3, eval_every=0, seed=seed)
    first, second = asked
    assert not first.get("in_turn")
    assert first["num_worlds"] == second["num_worlds"] == 3
    assert first["seed"] != second["seed"]


def test_doors_have_the_flags_hardness_and_threads():
    stiffness = {}
    for hardness in ("hard", "easy"):
        args = hn.Args(hardness=hardness, num_threads=3)
        runs.check_flags(args)  # though some of the tasks have no spring
        with closing(doors.make_doors(args, "Lever-Right-Pull", 1, seed=1, num_worlds=5)) as env:
            stiffness[hardness] = [model.joint("knob").stiffness[0] for model in env.models]
            assert len(env._datas) == 3
    assert min(stiffness["hard"]) >= 1
    assert max(stiffness["easy"]) <= 0.14
