"""Whole runs of Ape-X on the real game: lock-step, resume, replay, signals, bad input."""

import json
import os
import re
import signal
import threading
import time
from dataclasses import fields
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import (
    SHARED_FLAGS,
    assert_flag_matters,
    assert_one_sentence,
    assert_same_run,
    cut_back,
    flags_of,
    read_metrics,
    record_homes,
)

import apex_procgen as apex
import evaluate
from common import actors, checkpoints, devices, envs, offpolicy, replay, runs

pytestmark = pytest.mark.optimised

# Small enough to compile in seconds; the games are real. Everything that has a state of its own is on; the replay
# buffer goes round, and the games start anew after every 64 steps. What is compiled is the same in most of these tests.
TINY = {
    "env_id": "bigfish", "num_envs": 4, "num_steps": 16, "buffer_size": 320, "learning_starts": 100, "batch_size": 16,
    "replay_ratio": 0.5, "n_step": 3, "num_atoms": 11, "channels": "8", "blocks": 0, "downsample": "stride",
    "pool": "flatten", "hidden": 16, "learning_rate": "0.003", "target_network_frequency": 4, "total_timesteps": 600,
    "eval_episodes": 0, "wandb_mode": "disabled", "deterministic": True, "sticky_actions": 0.25,
    "checkpoint_every": 200, "max_lag": 2, "dropout": 0.1, "augment": "translate", "restart_every": 64,
    "num_devices": 2,
}  # fmt: skip


@pytest.fixture
def train(tmp_path):
    """train(**flags) runs the script with TINY settings and returns its run."""
    return lambda **flags: apex.main(apex.Args(**TINY | {"run_dir": str(tmp_path)} | flags))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A run with a checkpoint after each of its iterations."""
    folder = {"run_dir": str(tmp_path_factory.mktemp("whole")), "checkpoint_every": 1, "keep_checkpoints": 20}
    return apex.main(apex.Args(**TINY | folder)).path


def assert_same_run_and_replay(a, b):
    assert_same_run(a, b)
    jax.tree.map(np.testing.assert_array_equal, *(checkpoints.load(path)[1]["replay"] for path in (a, b)))


def test_same_seed_same_metrics_whatever_the_threads_speed(train, uninterrupted, monkeypatch):
    step, rng = envs.Games.step, np.random.default_rng()

    def slow(self, actions):
        time.sleep(rng.random() * 0.02)
        return step(self, actions)

    monkeypatch.setattr(envs.Games, "step", slow)
    assert_same_run_and_replay(uninterrupted, train().path)


@pytest.mark.slow
def test_all_parts_of_beyond_the_rainbow_together(train):
    run = train(num_quantiles=4, num_atoms=99, munchausen_alpha=0.9, spectral_norm=True, pool="max6", channels="4,4",
                blocks=1, downsample="maxpool", per_alpha=0.2)  # fmt: skip
    lines = read_metrics(run.path)
    assert lines[-1]["losses/grad_norm"] > 0
    assert all(np.isfinite(list(line.values())).all() for line in lines)


@pytest.mark.parametrize(("iterations", "played"), [(2, 32), (4, 64), (7, 48)])
def test_resume_equals_uninterrupted(train, uninterrupted, iterations, played, tmp_path):
    """Stopped before learning starts, where the games are about to start anew, and after that."""
    half = cut_back(uninterrupted, iterations, tmp_path)
    games = checkpoints.load(half)[1]["hosts"]["0"]["fleet"]["games"]
    assert [len(games[actor]["actions"]) for actor in games] == [played, played]
    assert_same_run_and_replay(uninterrupted, train(resume=str(half)).path)


def test_sigterm_writes_a_checkpoint_and_resumes_exactly(train, uninterrupted, monkeypatch, capfd):
    """The signal comes while the actors play and the learner learns."""
    learn, calls = offpolicy.learn, []

    def interrupted(*given, **how):
        calls.append(given)
        if len(calls) == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return learn(*given, **how)

    monkeypatch.setattr(offpolicy, "learn", interrupted)
    stopped = train()
    monkeypatch.undo()
    assert stopped.stop == "SIGTERM"
    assert f"python apex_procgen.py --resume {stopped.path}" in capfd.readouterr().err
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("actor")]
    assert len(read_metrics(stopped.path)) == 6
    assert checkpoints.load(stopped.path)[0] == read_metrics(stopped.path)[-1]["global_step"]
    assert_same_run_and_replay(uninterrupted, train(resume=str(stopped.path)).path)


def test_actors_with_devices_of_their_own_play_the_same(train, uninterrupted, monkeypatch):
    """The learner has the first two of four devices, and each actor one of the others."""
    homes = record_homes(monkeypatch)
    assert_same_run_and_replay(uninterrupted, train(actor_devices=2).path)
    assert homes == [[jax.devices()[3], jax.devices()[2]]]


@pytest.mark.slow
def test_a_buffer_in_the_hosts_memory(train, uninterrupted):
    """The games are the same until something is learnt, on two devices; and a resumed run is one that was not stopped,
    also where the buffer comes from and goes to the devices."""
    whole = train(replay_device="host", total_timesteps=250).path
    half = train(replay_device="host", total_timesteps=150).path
    assert checkpoints.load(half)[1]["state"]["updates"] > 0
    assert_same_run_and_replay(whole, train(replay_device="host", total_timesteps=250, resume=str(half)).path)
    want = read_metrics(uninterrupted)
    for line, same in zip(read_metrics(whole), want, strict=False):
        assert line["global_step"] == same["global_step"]
        assert line["charts/updates"] == same["charts/updates"]
    moved = train(replay_device="device", total_timesteps=350, num_devices=1, resume=str(half)).path
    assert read_metrics(moved)[-1]["charts/updates"] == int(0.5 * (read_metrics(moved)[-1]["global_step"] - 100) / 16)


def test_no_actor_plays_for_a_run_that_is_over(train, uninterrupted, monkeypatch):
    monkeypatch.setattr(actors.Fleet, "start", lambda *given: pytest.fail("an actor was started"))
    before = read_metrics(uninterrupted)
    train(resume=str(uninterrupted))
    assert read_metrics(uninterrupted) == before


@pytest.mark.slow
def test_evaluation_does_not_disturb_training(train, uninterrupted):
    evaluated = read_metrics(train(eval_every=200, eval_episodes=2).path)
    assert sum("eval/test_levels/mean_return" in line for line in evaluated) > 1
    assert [x for x in evaluated if "charts/updates" in x] == read_metrics(uninterrupted)


def test_without_a_saved_buffer_it_is_filled_again(train, capfd):
    half = train(save_replay=False, total_timesteps=300)
    assert "replay" not in checkpoints.load(half.path)[1]
    before = read_metrics(half.path)[-1]
    resumed = train(save_replay=False, resume=str(half.path))
    assert "the replay buffer was not saved: learning goes on after 100 more steps" in capfd.readouterr().err
    for line in read_metrics(resumed.path):
        refilling = before["global_step"] < line["global_step"] <= before["global_step"] + 100
        assert not refilling or line["charts/updates"] == before["charts/updates"]
    assert line["charts/updates"] > before["charts/updates"]


def test_the_buffer_is_cut_and_its_priorities_are_written(uninterrupted):
    """Where the games start anew no return runs on; and what was learnt from has a new priority."""
    args = apex.Args(**TINY)
    saved = checkpoints.load(uninterrupted)[1]["replay"]
    buffer = checkpoints.restore_tree(jax.eval_shape(lambda: offpolicy.initial_replay(args)), saved, "")
    rows, length = buffer.rows, len(buffer.priorities)
    (last,) = [t % length for t in range(buffer.written - length, buffer.written) if t % 64 == 63]
    assert rows.done[last].all()
    assert (rows.ended[last - 1] | rows.done[last - 1]).all()
    assert (rows.frames.ages[last + 1] == 0).all()
    assert rows.done.mean() < 0.2
    row, env = np.nonzero(buffer.priorities)
    returns, discounts, after = replay.n_step_return(rows, row, env, n_step=args.n_step, gamma=args.gamma)
    td = returns + discounts * rows.state_value[after, env] - rows.action_value[row, env]
    changed = np.abs(replay.priority(td, args.per_alpha) - buffer.priorities[row, env]) > 1e-3
    assert changed.any()
    assert not changed.all()


def test_actors_get_the_network_that_learns(uninterrupted, tmp_path):
    other = False
    for iterations in (4, 5, 6):
        saved = checkpoints.load(cut_back(uninterrupted, iterations, tmp_path / str(iterations)))[1]
        newest = saved["hosts"]["0"]["fleet"]["published"][str(iterations)]
        networks = (newest, saved["state"]["params"], saved["state"]["target"])
        for got, online, target in zip(*map(jax.tree.leaves, networks), strict=True):
            np.testing.assert_array_equal(got, online)
            other |= np.any(online != target)
    assert other


def test_updates_follow_the_replay_ratio(uninterrupted, tmp_path):
    """And beta the steps before them; steps that are no transition are none."""
    lines, beta = read_metrics(uninterrupted), runs.parse_schedule(apex.Args().per_beta)
    for before, line in zip([0, *(line["global_step"] for line in lines)], lines, strict=False):
        assert line["charts/updates"] == int(0.5 * max(line["global_step"] - 100, 0) / 16)
        assert line["charts/per_beta"] == pytest.approx(float(beta(before)), abs=1e-9)
    early = checkpoints.load(cut_back(uninterrupted, 3, tmp_path))[1]
    played = 4 * 48 - early["replay"]["rows"]["done"][:48].sum()
    assert early["state"]["global_step"] == played < 4 * 48


@pytest.mark.slow
def test_divergence_stops_and_keeps_the_last_good_checkpoint(train):
    with pytest.raises(runs.DivergedError, match=r"not finite at step \d+: losses/.*is whole"):
        train(checkpoint_every=100, learning_rate="0:0.001,200:0.001,201:1e38", total_timesteps=10_000)


# What each flag is changed to, and what must differ then: the metrics.
FLAGS = {
    "sticky_actions": 0.5, "frame_stack": 2, "gap_stack": False, "reward_shaping": True, "reward_clip": 0.5,
    "encoder": "nature", "width": 1, "pool": "avg", "dtype": "bfloat16", "hidden": 8, "dropout": 0.5, "dueling": False,
    "num_actors": 1, "num_envs": 2, "num_steps": 8, "max_lag": 0, "epsilon": 0.9, "epsilon_alpha": 1.0,
    "buffer_size": 256, "learning_starts": 200, "replay_ratio": 1.0, "batch_size": 8, "per_alpha": 0.9, "per_beta": "1",
    "n_step": 2, "num_atoms": 1, "v_min": -1.0, "v_max": 5.0, "double_q": False, "target_network_frequency": 1,
    "gamma": 0.5, "learning_rate": "0:0.003,1000:0.001", "max_grad_norm": 0.01, "adam_eps": 0.1, "l2": 0.1, "seed": 2,
    "augment": "flip", "augment_prob": 1.0, "restart_every": 16, "num_devices": 1, "num_quantiles": 4,
    "munchausen_alpha": 0.5, "munchausen_tau": 0.3,
}  # fmt: skip
# Tested elsewhere: these let the clock in, or say where things are.
ELSEWHERE = {"deterministic", "save_replay", "replay_device", "actor_devices"}
# These need others, and these are for the host.
OTHER_NETWORK = {"channels": "", "blocks": 2, "downsample": "auto"}
NEEDS = {"encoder": OTHER_NETWORK, "width": OTHER_NETWORK, "num_envs": {"num_actors": 1},
         "num_quantiles": {"num_atoms": 99}, "munchausen_alpha": {"num_atoms": 1},
         "munchausen_tau": {"num_atoms": 1, "munchausen_alpha": 0.9}}  # fmt: skip
HOST = {"max_lag", "replay_ratio", "restart_every"}


def test_every_flag_is_in_a_test():
    names = {f.name for f in fields(apex.Args)}
    assert names - SHARED_FLAGS <= set(FLAGS) | ELSEWHERE <= names
    kept = "distribution_mode num_levels start_level use_backgrounds restrict_themes gap_stack restart_every num_steps"
    kept += " learning_starts per_alpha reward_shaping reward_clip"
    assert set(kept.split()) <= set(runs.fixed(apex.Args))
    assert {"v_min", "v_max", "num_atoms", "num_quantiles", "dueling"} <= set(runs.fixed(apex.Args))


@pytest.mark.slow
@pytest.mark.parametrize("flag", [*FLAGS, "none"])
def test_every_flag_changes_something(flag, tmp_path):
    flags = TINY | {"total_timesteps": 250, "run_dir": str(tmp_path)} | NEEDS.get(flag, {})
    change = {} if flag == "none" else {flag: FLAGS[flag]}
    assert_flag_matters(apex, flags, change, whole=flag in HOST)


@pytest.mark.slow
@pytest.mark.parametrize("replay_device", ["device", "host"])
def test_the_form_for_accelerators_trains_too(train, monkeypatch, replay_device):
    """What runs on a GPU, run on a CPU: plain Flax in bfloat16, one device; or two, where the last stands for it."""
    if replay_device == "host":
        last = jax.devices()[-1:]
        monkeypatch.setattr(jax, "local_devices", lambda: last)
    monkeypatch.setattr(devices, "on_cpu", lambda: False)
    flags = {"replay_device": replay_device, "total_timesteps": 250, "eval_episodes": 2, "num_devices": 1}
    lines = read_metrics(train(**flags).path, clocks=True)
    assert "losses/loss" in lines[-2]
    assert ("time/sample" in lines[-2]) == (replay_device == "host")  # else it is in the update's one program
    assert "eval/test_levels/mean_return" in lines[-1]


def test_the_hosts_memory_must_be_there(monkeypatch):
    monkeypatch.setattr(offpolicy, "jax", SimpleNamespace(config=SimpleNamespace(jax_platforms="cuda")))
    with pytest.raises(runs.UsageError, match=r"--replay-device host: JAX_PLATFORMS=cuda .* cuda,cpu"):
        offpolicy.OffPolicyArgs.check(apex.Args(replay_device="host"))
    offpolicy.OffPolicyArgs.check(runs.on_this_machine(apex.Args(replay_device="host")))  # evaluation has no buffer


def test_the_command_line(tmp_path, capfd):
    """Threads free to run: W&B, evaluation, video, then evaluate.py."""
    command = TINY | {
        "env_id": "starpilot", "num_levels": 8, "total_timesteps": 2_000, "replay_ratio": 1.0, "deterministic": False,
        "eval_every": 1_200, "eval_episodes": 2, "capture_video": True, "checkpoint_every": 800, "keep_checkpoints": 2,
        "run_dir": tmp_path, "wandb_mode": "offline", "wandb_project": "test",
    }  # fmt: skip
    runs.cli(apex.Args, apex.main, flags_of(command))
    assert "replay buffer: 320 steps x 12.3 kB" in "".join(capfd.readouterr())
    (run_dir,) = tmp_path.iterdir()
    assert re.fullmatch(r"starpilot__apex_procgen__1__\d+", run_dir.name)
    lines = read_metrics(run_dir, clocks=True)
    assert lines[-1]["global_step"] >= 2_000
    names = {"charts/episodic_return", "charts/episodic_length", "charts/SPS", "charts/policy_lag", "time/update"}
    names |= {"charts/queue_size", "losses/loss", "losses/q_values", "losses/td_error", "charts/updates"}
    names |= {"time/waiting", "time/insert", "time/actor_inference", "time/actor_blocked", "time"}
    names |= {f"eval/{x}_levels/{y}" for x in ("train", "test") for y in ("mean_return", "normalized", "min", "max")}
    assert names <= set(lines[-2]) | set(lines[-1])
    assert all(np.isfinite(list(line.values())).all() for line in lines)
    assert len(list((run_dir / "checkpoints").iterdir())) == 2
    assert len(list((run_dir / "wandb").glob("offline-run-*"))) == 1
    assert len(list((run_dir / "videos").glob("*.mp4"))) == 2
    runs.cli(evaluate.Args, evaluate.main, [str(run_dir), "--episodes", "2", "--levels", "train"])
    assert json.loads((run_dir / "eval.json").read_text())["train_levels"]["episodes"] == 2


# Words, the flag and its value that the answer names, and what it says is valid.
BAD = {
    "actors": (["--num-actors", 5], "--num-actors 5", "24"),
    "buffer": (["--buffer-size", 100], "--buffer-size 100", "give 1008 or more"),
    "learning starts late": (["--learning-starts", 10**6], "--learning-starts 1000000", "--buffer-size, 200000"),
    "learning starts early": (["--learning-starts", 10], "--learning-starts 10", "from 1008"),
    "support": (["--v-min", 30], "--v-min 30", "0 or less"),
    "support's end": (["--v-max", -1], "--v-max -1", "0 or more"),
    "no epsilon": (["--epsilon", 0, "--epsilon-alpha", 3], "--epsilon-alpha 3", "between 0 and 1"),
    "no support": (["--num-atoms", 1, "--v-max", 9], "--v-max 9", "--num-atoms 2 or more"),
    "atoms and quantiles": (["--num-quantiles", 8, "--num-atoms", 51], "--num-atoms 51", "--num-quantiles 0"),
    "munchausen": (["--munchausen-alpha", 0.9], "--munchausen-alpha 0.9", "--num-atoms 1"),
    "temperature": (["--munchausen-tau", 0.1], "--munchausen-tau 0.1", "--munchausen-alpha"),
    "pool": (["--encoder", "nature", "--width", 1, "--pool", "max6"], "--pool max6", "4 x 4"),
    "spectral norm": (["--encoder", "nature", "--width", 1, "--spectral-norm"], "--spectral-norm", "impala"),
    "alpha": (["--per-alpha", 2], "--per-alpha 2", "from 0 to 1"),
    "beta": (["--per-beta", "0:0.4,5:2"], "--per-beta '0:0.4,5:2'", "from 0 to 1"),
    "atoms": (["--num-atoms", 0], "--num-atoms 0", "from 1 to 1024"),
    "network": (["--encoder", "xresnet:[32,3]"], "--encoder xresnet:[32,3]", "stride 1 or 2"),
    "augmentation": (["--augment", "rotat"], "--augment rotat", "did you mean rotate?"),
    "devices": (["--num-devices", 3], "--num-devices 3", "does not divide --batch-size, 128; give 1 or 2 or 4"),
    "no learners": (
        ["--num-actors", 4, "--actor-devices", 4],
        "--actor-devices 4",
        "leaves none of this machine's devices to learn on",
    ),
    "not a run": (["--resume", "/nowhere"], "--resume /nowhere", "run directory"),
    "other actors": (None, "--num-actors 1", "keeps its own, --num-actors 2"),
    "other games": (None, "--num-envs 2", "keeps its own, --num-envs 4"),
    "other returns": (None, "--n-step 2", "keeps its own, --n-step 3"),
    "shapes": (None, "does not fit", "here"),
    "other buffer": (None, "does not fit", "here"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return apex.main(apex.Args(**TINY | {"run_dir": str(tmp_path_factory.mktemp("d")), "total_timesteps": 1})).path


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_sentence(case, tmp_path, finished, monkeypatch, capfd):
    words, names, valid = BAD[case]
    more = {
        "other actors": ["--num-actors", 1],
        "other returns": ["--n-step", 2],
        "other games": ["--num-envs", 2, "--num-devices", 1],
        "shapes": ["--hidden", 8],
        "other buffer": ["--buffer-size", 1024],
    }
    if words is None:
        words = ["--resume", finished, *more[case]]
    assert_one_sentence(apex, words, names, valid, monkeypatch, capfd)
