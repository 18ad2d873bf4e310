"""Whole runs of Ape-X and SAC on the real game: replay, actors, devices. tests/test_scripts.py has what all scripts do
alike."""

import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import assert_same_run, cut_back, flags_of, read_metrics, record_shardings

import apex_procgen as apex
import sac_procgen as sac
from common import actors, checkpoints, devices, envs, offpolicy, replay, runs

pytestmark = pytest.mark.optimised

# Small enough to compile in seconds; the games are real. Everything that has a state of its own is on; the replay
# buffer goes round, and the games restart after every 64 steps. Most of these tests share their compiled programs.
TINY = {
    "env_id": "bigfish", "num_envs": 4, "num_steps": 16, "buffer_size": 320, "learning_starts": 100, "batch_size": 16,
    "replay_ratio": 0.5, "n_step": 3, "num_atoms": 11, "channels": "8", "blocks": 0, "downsample": "stride",
    "pool": "flatten", "hidden": 16, "learning_rate": "0.003", "target_network_frequency": 4, "total_timesteps": 600,
    "eval_episodes": 0, "wandb_mode": "disabled", "deterministic": True, "sticky_actions": 0.25,
    "checkpoint_every": 200, "max_lag": 2, "dropout": 0.1, "augment": "translate", "restart_every": 64,
    "num_devices": 2,
}  # fmt: skip
SAC = {name: x for name, x in TINY.items() if name != "num_atoms"} | {
    "per_alpha": 0.5, "target_network_frequency": 2, "tau": 0.1,
}  # fmt: skip
FLAGS = {apex: TINY, sac: SAC}
of_both = pytest.mark.parametrize("script", FLAGS, ids=lambda script: script.SCRIPT)


@pytest.fixture
def train(tmp_path):
    """train(script, **flags) runs a script with the settings above and returns its run."""
    return lambda script, **flags: script.main(script.Args(**FLAGS[script] | {"run_dir": str(tmp_path)} | flags))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """uninterrupted(script) is a run with a checkpoint after each of its iterations, and the parameters that it would
    have evaluated at its end."""

    @functools.cache
    def run(script):
        evaluated = []
        folder = {"run_dir": str(tmp_path_factory.mktemp("whole")), "checkpoint_every": 1, "keep_checkpoints": 20}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(envs, "evaluate_if_due", lambda *given: evaluated.append(given[-1].args[0]))
            return script.main(script.Args(**FLAGS[script] | folder)).path, evaluated[-1]

    return run


@of_both
def test_updates_of_a_run_follow_the_replay_ratio_and_beta_the_steps(script, uninterrupted, tmp_path):
    """Steps that are no transition do not count."""
    path, _ = uninterrupted(script)
    lines, beta = read_metrics(path), runs.parse_schedule(script.Args().per_beta)
    for before, line in zip([0, *(line["global_step"] for line in lines)], lines, strict=False):
        assert line["charts/updates"] == int(0.5 * max(line["global_step"] - 100, 0) / 16)
        assert line["charts/per_beta"] == pytest.approx(float(beta(before)), abs=1e-9)
    early = checkpoints.load(cut_back(path, 3, tmp_path))[1]
    played = 4 * 48 - early["replay"]["rows"]["is_reset"][:48].sum()
    assert early["state"]["global_step"] == played < 4 * 48


@of_both
def test_actors_and_evaluation_get_the_network_that_learns(script, uninterrupted, tmp_path):
    path, evaluated = uninterrupted(script)
    differ = False
    for iterations in (4, 5, 6):
        saved = checkpoints.load(cut_back(path, iterations, tmp_path / str(iterations)))[1]
        published, state = saved["hosts"]["0"]["fleet"]["published"][str(iterations)], saved["state"]
        jax.tree.map(np.testing.assert_array_equal, published, state["params"])
        online = state["params"] if script is apex else state["params"]["agent"]
        pairs = zip(jax.tree.leaves(online), jax.tree.leaves(state["target_params"]), strict=True)
        differ |= any(np.any(x != target) for x, target in pairs)
    assert differ
    last = checkpoints.load(path)[1]["state"]["params"]
    jax.tree.map(np.testing.assert_array_equal, evaluated, last if script is apex else last["agent"])


def test_buffer_of_restarted_games_is_cut_and_has_new_priorities(uninterrupted):
    """Where the games restart no return runs on; and what was sampled has a new priority."""
    args = apex.Args(**TINY)
    saved = checkpoints.load(uninterrupted(apex)[0])[1]["replay"]
    buffer = checkpoints.restore_tree(jax.eval_shape(lambda: offpolicy.init_replay(args)), saved, "")
    rows, length = buffer.rows, len(buffer.priorities)
    (last,) = [t % length for t in range(buffer.written - length, buffer.written) if t % 64 == 63]
    assert rows.is_reset[last].all()
    assert (rows.episode_end[last - 1] | rows.is_reset[last - 1]).all()
    assert (rows.frames.episode_steps[last + 1] == 0).all()
    assert rows.is_reset.mean() < 0.2
    row, env = np.nonzero(buffer.priorities)
    returns, discounts, after = replay.n_step_return(rows, row, env, n_step=args.n_step, gamma=args.gamma)
    td = returns + discounts * rows.state_value[after, env] - rows.action_value[row, env]
    changed = np.abs(replay.priority(td, args.per_alpha) - buffer.priorities[row, env]) > 1e-3
    assert changed.any()
    assert not changed.all()


def test_actors_with_devices_of_their_own_play_the_same(train, uninterrupted, monkeypatch):
    """The learner has the first two of four devices, and each actor one of the others."""
    whole, _ = uninterrupted(apex)  # before its actors' devices could be recorded too
    shardings = record_shardings(monkeypatch)
    assert_same_run(whole, train(apex, actor_devices=2).path)
    assert shardings == [[jax.devices()[3], jax.devices()[2]]]


def test_actors_of_a_finished_run_do_not_start(train, uninterrupted, monkeypatch):
    monkeypatch.setattr(actors.Fleet, "start", lambda *given: pytest.fail("an actor was started"))
    path, _ = uninterrupted(apex)
    before = read_metrics(path)
    train(apex, resume=str(path))
    assert read_metrics(path) == before


@pytest.mark.parametrize("script", [apex, pytest.param(sac, marks=pytest.mark.slow)], ids=["apex", "sac"])
def test_buffer_that_is_not_saved_is_refilled_before_learning_resumes(script, train, capfd):
    half = train(script, save_replay=False, total_timesteps=300)
    assert "replay" not in checkpoints.load(half.path)[1]
    before = read_metrics(half.path)[-1]
    resumed = train(script, save_replay=False, resume=str(half.path))
    assert "the replay buffer was not saved: learning resumes after 100 more steps" in capfd.readouterr().err
    for line in read_metrics(resumed.path):
        refilling = before["global_step"] < line["global_step"] <= before["global_step"] + 100
        assert not refilling or line["charts/updates"] == before["charts/updates"]
    assert line["charts/updates"] > before["charts/updates"]


@pytest.mark.slow
def test_buffer_in_host_memory_resumes_exactly_and_moves_to_a_device(train, uninterrupted):
    host = {"replay_device": "host"}
    whole = train(apex, **host, total_timesteps=250).path
    half = train(apex, **host, total_timesteps=150).path
    assert checkpoints.load(half)[1]["state"]["updates"] > 0
    assert_same_run(whole, train(apex, **host, total_timesteps=250, resume=str(half)).path)
    for line, same in zip(read_metrics(whole), read_metrics(uninterrupted(apex)[0]), strict=False):
        assert line["global_step"] == same["global_step"]
        assert line["charts/updates"] == same["charts/updates"]
    lines = read_metrics(train(apex, total_timesteps=350, num_devices=1, resume=str(half), replay_device="device").path)
    assert lines[-1]["charts/updates"] == int(0.5 * (lines[-1]["global_step"] - 100) / 16)


@pytest.mark.parametrize(("flags", "copies"), [
    ({"num_devices": 1}, 2), ({"num_devices": 2}, 3), ({"num_devices": 2, "replay_device": "host"}, 2),
    ({"num_devices": 2, "save_replay": False}, 1),
])  # fmt: skip
def test_buffer_needs_memory_for_the_copies_of_a_checkpoint_too(flags, copies, monkeypatch):
    args = apex.Args(num_envs=24, **flags)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(lambda: offpolicy.init_replay(args))))
    monkeypatch.setattr(devices, "host_memory", lambda: copies * size)
    offpolicy.check_memory(args, devices.make_mesh(args))
    monkeypatch.setattr(devices, "host_memory", lambda: copies * size - 1)
    with pytest.raises(runs.UsageError, match=r"--buffer-size 200000: needs .* GB.*, this host has"):
        offpolicy.check_memory(args, devices.make_mesh(args))


def test_buffer_in_host_memory_without_jaxs_cpu_is_refused(monkeypatch):
    monkeypatch.setattr(offpolicy, "jax", SimpleNamespace(config=SimpleNamespace(jax_platforms="cuda")))
    with pytest.raises(runs.UsageError, match=r"--replay-device host: JAX_PLATFORMS=cuda .* cuda,cpu"):
        offpolicy.OffPolicyArgs.check(apex.Args(replay_device="host"))
    offpolicy.OffPolicyArgs.check(runs.on_this_machine(apex.Args(replay_device="host")))  # evaluation has no buffer


@pytest.mark.slow
@pytest.mark.parametrize(("script", "place"), [(apex, "device"), (apex, "host"), (sac, "device"), (sac, "host")])
def test_code_path_of_a_gpu_runs_on_a_cpu(script, place, train, monkeypatch):
    """What runs on a GPU, run on a CPU: plain Flax in bfloat16, one device.

    With the replay in host memory the last CPU device stands for the GPU.
    """
    if place == "host":
        last = jax.devices()[-1:]
        monkeypatch.setattr(devices, "learner_devices", lambda *given: last)
    monkeypatch.setattr(devices, "on_cpu", lambda: False)
    run = train(script, replay_device=place, total_timesteps=250, eval_episodes=2, num_devices=1)
    lines = read_metrics(run.path, clocks=True)
    assert "losses/loss" in lines[-2]
    assert ("time/sample" in lines[-2]) == (place == "host")  # else it is in the update's one program
    assert "eval/test_levels/mean_return" in lines[-1]


@pytest.mark.slow
def test_run_with_all_parts_of_beyond_the_rainbow_stays_finite(train):
    run = train(apex, num_quantiles=4, num_atoms=99, munchausen_alpha=0.9, spectral_norm=True, pool="max6",
                channels="4,4", blocks=1, downsample="maxpool", per_alpha=0.2)  # fmt: skip
    lines = read_metrics(run.path)
    assert lines[-1]["losses/grad_norm"] > 0
    assert all(np.isfinite(list(line.values())).all() for line in lines)


@pytest.mark.slow
def test_run_that_diverges_stops_and_keeps_its_last_good_checkpoint(train):
    with pytest.raises(runs.DivergedError, match=r"not finite at step \d+: losses/.*is complete"):
        train(apex, checkpoint_every=100, learning_rate="0:0.001,200:0.001,201:1e38", total_timesteps=10_000)


def test_command_with_free_threads_logs_evaluates_and_resumes(tmp_path, capfd):
    command = TINY | {
        "env_id": "starpilot", "num_levels": 8, "total_timesteps": 2_000, "replay_ratio": 1.0, "deterministic": False,
        "eval_every": 1_200, "eval_episodes": 2, "checkpoint_every": 800, "run_dir": tmp_path,
    }  # fmt: skip
    runs.cli(apex.Args, apex.main, flags_of(command))
    assert "replay buffer: 320 steps x 12.3 kB" in "".join(capfd.readouterr())
    (run_dir,) = tmp_path.iterdir()
    lines = read_metrics(run_dir, clocks=True)
    assert lines[-1]["global_step"] >= 2_000
    names = {"charts/episodic_return", "charts/episodic_length", "charts/SPS", "charts/policy_lag", "time/update"}
    names |= {"charts/queue_size", "losses/loss", "losses/q_values", "losses/td_error", "charts/updates"}
    names |= {"time/waiting", "time/insert", "time/actor_inference", "time/actor_blocked", "time"}
    names |= {f"eval/{x}_levels/{y}" for x in ("train", "test") for y in ("mean_return", "normalized", "min", "max")}
    assert names <= set(lines[-2]) | set(lines[-1])
    more = {"total_timesteps": 2_600, "eval_every": 0, "eval_episodes": 0, "wandb_mode": "disabled"}
    runs.cli(apex.Args, apex.main, ["--resume", str(run_dir), *flags_of(more)])
    lines = read_metrics(run_dir, clocks=True)
    steps = [line["global_step"] for line in lines]
    assert steps == sorted(steps)
    assert steps[-1] >= 2_600
    assert all(0 <= line.get("charts/policy_lag", 0) <= command["max_lag"] for line in lines)
    assert all(np.isfinite(list(line.values())).all() for line in lines)
