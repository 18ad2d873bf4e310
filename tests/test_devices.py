"""Several devices and several hosts train the same as one: cores of this machine, and processes on it."""

import os
import signal
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import (
    COMPILE_SOONER,
    TINY,
    assert_one_sentence,
    assert_same_run,
    flags_of,
    init_state,
    read_metrics,
    record_shardings,
    run_of,
    start,
    wait_for,
)

import apex_procgen as apex
import hnppo_doorgym as hnppo
import impala_procgen as impala
import ppg_procgen as ppg
import ppo_procgen as ppo
import rnd_montezuma as rnd
import sac_procgen as sac
import trpo_procgen as trpo
from benchmarks.golden_runs import variables_of_hosts
from common import checkpoints, devices, envs, multihost, offpolicy, replay, runs, tracking

# One minibatch, of all samples, so that no device decides which are in it.
ACTOR_CRITIC = TINY | {"num_minibatches": 1, "sticky_actions": 0.25, "normalize_rewards": True, "num_envs": 8}
# Which samples are drawn depends on the device: what does not is how the games are played.
OFF_POLICY = {
    "num_envs": 8, "num_steps": 16, "buffer_size": 512, "learning_starts": 300, "batch_size": 16, "n_step": 3,
    "encoder": "nature", "pool": "flatten", "width": 1, "hidden": 16, "total_timesteps": 250, "eval_episodes": 0,
    "wandb_mode": "disabled", "deterministic": True, "sticky_actions": 0.25, "learning_rate": "0.01",
}  # fmt: skip
SCRIPTS = {
    ppo: ACTOR_CRITIC | {
        "core": "gru", "rnd_coef": 0.1, "rnd_normalize": True, "augment": "translate", "num_steps": 4,
        "total_timesteps": 60,
    },
    trpo: {k: v for k, v in ACTOR_CRITIC.items() if k not in ("update_epochs", "learning_rate")} | {
        "num_steps": 8, "fisher_fraction": 1.0, "value_epochs": 1, "total_timesteps": 120,
    },
    ppg: {k: v for k, v in ACTOR_CRITIC.items() if k != "update_epochs"} | {
        "num_steps": 8, "policy_iterations": 1, "aux_epochs": 1, "aux_minibatches": 1, "augment": "translate",
        "dropout": 0.1, "learning_rate": "0.001", "total_timesteps": 120,
    },
    impala: ACTOR_CRITIC | {
        "num_steps": 8, "deterministic": True, "core": "lstm", "clip_coef": 0.2, "total_timesteps": 120,
    },
    apex: OFF_POLICY | {"num_atoms": 5, "num_policies": 3},
    sac: OFF_POLICY,
    rnd: {
        "num_envs": 8, "num_steps": 8, "num_minibatches": 1, "channels": "4,4,4", "hidden": 8, "total_timesteps": 120,
        "update_proportion": 1.0, "obs_norm_init_steps": 4, "wandb_mode": "disabled", "norm_adv": True,
        "separate_value": True,
    },
    hnppo: {
        "tasks": "0,1", "num_envs": 4, "num_worlds": 2, "num_minibatches": 1, "update_epochs": 2, "hidden": 8,
        "num_layers": 1, "hyper_width": 16, "task_timesteps": 512, "eval_episodes": 2, "wandb_mode": "disabled",
        "hyper_learning_rate": 0.002,
        # A smaller adam_eps lets Adam take whole steps along gradients of nothing but rounding. A contact in the second
        # task magnifies rounding too, of seven seeds with 7 the least.
        "adam_eps": 0.01, "seed": 7,
    },
}  # fmt: skip


def of_script(*quick, scripts=SCRIPTS):
    marked = [pytest.param(x, id=x.SCRIPT, marks=() if x in quick else pytest.mark.slow) for x in scripts]
    return pytest.mark.parametrize("script", marked)


def train(script, folder, **flags):
    """A run's directory, last checkpoint and metrics."""
    path = script.main(script.Args(**flags, run_dir=str(folder))).path
    return path, checkpoints.load(path)[1], read_metrics(path)


def assert_close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=2e-4)


# DEVICES


@of_script(ppo, apex)
def test_one_and_four_devices_train_the_same(script, tmp_path, monkeypatch):
    """To float32 rounding; and an update gathers nothing that is on another device, such as its frames. Ape-X and SAC
    only play here: which samples they learn from depends on the device."""
    _, one, lines = train(script, tmp_path, **SCRIPTS[script] | {"num_devices": 1})
    texts, make_update = [], script.make_update

    def make_and_read(*given, **how):
        update = make_update(*given, **how)

        def read_and_update(*arrays):
            if not texts:
                texts.append(update.lower(*arrays).compile().as_text())
            return update(*arrays)

        return read_and_update

    monkeypatch.setattr(script, "make_update", make_and_read)
    _, four, others = train(script, tmp_path, **SCRIPTS[script] | {"num_devices": 4})
    if script in (apex, sac):
        jax.tree.map(np.testing.assert_array_equal, one["replay"], four["replay"])
    else:
        learnt = "learner" if script is hnppo else "params"
        first = getattr(init_state(script, script.Args(**SCRIPTS[script] | {"num_devices": 1})), learnt)
        for before, after in zip(jax.tree.leaves(first), jax.tree.leaves(one["state"][learnt]), strict=True):
            assert np.abs(after - before).max() > 2e-4  # more than what `assert_close` lets pass
        assert_close(one["state"][learnt], four["state"][learnt])
    for line, other in zip(lines, others, strict=True):
        assert line.keys() == other.keys()
        assert line["global_step"] == other["global_step"]
        names = "charts/episodic_return", "losses/loss", "losses/grad_norm", "losses/explained_variance"
        for name in (*names, "charts/intrinsic_reward"):
            np.testing.assert_allclose(line.get(name, 0), other.get(name, 0), rtol=2e-3, atol=2e-4, err_msg=name)
    assert len(texts) == (script not in (apex, sac))  # which have only played
    for text in texts:
        assert "all-reduce" in text
        assert "all-gather" not in text
        assert "all-to-all" not in text


@of_script(sac, scripts=(apex, sac))
def test_an_update_on_a_batch_split_over_devices_is_that_on_one(script):
    rng = np.random.default_rng(0)
    *frames, one_step_frames = rng.integers(0, 256, (3, 16, 64, 64, 6), np.uint8)
    returns, discounts, weight = rng.random((3, 16), np.float32)
    actions = rng.integers(0, 15, 16).astype(np.int32)
    places, keys = np.zeros(16, np.int32), jax.random.split(jax.random.PRNGKey(0), 16)
    several = (actions % 3, one_step_frames) if script is apex else ()
    batch = replay.Batch(*frames, actions, returns, discounts, weight, places, places, keys, *several)
    results = []
    for number in (1, 4):
        args = script.Args(**SCRIPTS[script] | {"replay_device": "host", "num_devices": number})
        agent, mesh = script.make_agent(args), devices.make_mesh(args)
        state = jax.device_put(init_state(script, args, agent), devices.shardings(mesh, devices.REPLICATED))
        results.append(jax.device_get(script.make_update_on_batch(args, agent, mesh)(state, batch)))
    assert_close(*results)


def test_a_column_of_the_buffer_is_of_the_same_environment_wherever_the_buffer_is():
    """So that a run that continues on other devices, or from the host's memory, mixes no games."""
    columns = []
    for flags in ({"num_devices": 1}, {"num_devices": 2}, {"num_devices": 4}, {"replay_device": "host"}):
        args = apex.Args(**SCRIPTS[apex] | {"num_actors": 2, "reward_clip": 5.0} | flags)
        mesh, rollouts, timesteps = devices.make_mesh(args), [], []
        for env_ids in np.arange(8, dtype=np.int32).reshape(2, 4):
            rollout = offpolicy.begin_rollout(args, envs.init_env_state(env_ids, args.stack_offsets), 0)
            rollouts.append(rollout._replace(actions=rollout.actions + env_ids))
            rewards, no = np.float32(np.tile(env_ids, (16, 1))), np.zeros((16, 4), bool)
            terminated, truncated = no.copy(), no.copy()
            terminated[3], truncated[5] = env_ids % 2 == 0, True
            timesteps.append(envs.Timesteps(rewards, terminated, truncated, no, np.zeros((17, 4), np.int32), no[0]))
        buffer = offpolicy.make_buffer(args, mesh, {})
        rows = offpolicy.make_insert(args, mesh)(buffer, tuple(rollouts), tuple(timesteps)).rows
        np.testing.assert_array_equal(rows.rewards[:16], np.minimum(rows.actions[:16], 5))
        np.testing.assert_array_equal(rows.terminated[3], rows.actions[3] % 2 == 0)
        assert (rows.terminated[5].any(), rows.episode_end[5].all()) == (False, True)  # its time limit is no death
        columns.append(rows.actions[0].tolist())
    assert sorted(columns[0]) == list(range(8))
    assert columns == columns[:1] * 4


@of_script(*SCRIPTS)
def test_no_array_of_a_first_state_is_weakly_typed(script):
    """A weak type would change in the first update, which would then be compiled a second time."""
    args = script.Args(**SCRIPTS[script] | {"num_devices": 1})
    state = jax.eval_shape(lambda: script.init_state(args, script.make_agent(args)))
    assert not [jax.tree_util.keystr(path) for path, x in jax.tree.leaves_with_path(state) if x.weak_type]


@pytest.mark.slow
def test_actors_with_devices_of_their_own_play_the_same(tmp_path, monkeypatch):
    shardings = record_shardings(monkeypatch)
    flags = SCRIPTS[impala] | {"total_timesteps": 300, "num_devices": 2}
    own, _, _ = train(impala, tmp_path, **flags | {"actor_devices": 2})
    assert shardings == [[jax.devices()[3], jax.devices()[2]]]
    assert_same_run(own, train(impala, tmp_path, **flags)[0])


def test_a_run_has_as_many_devices_as_divide_its_games():
    assert [devices.make_mesh(ppo.Args(num_envs=n)).size for n in (64, 6, 5)] == [4, 3, 1]


@pytest.mark.parametrize(("cores", "want"), [(1, 1), (3, 2), (4, 4), (64, 8)])
def test_devices_are_no_more_than_cores(cores, want, monkeypatch):
    asked = []
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    config = SimpleNamespace(update=lambda *given: asked.append(given))
    monkeypatch.setattr(devices, "jax", SimpleNamespace(config=config))
    devices.use_every_core()
    assert asked == [("jax_num_cpu_devices", want)]
    assert "_terminate_timeout_seconds=3600" in os.environ["XLA_FLAGS"]


@pytest.mark.parametrize(("quota", "want"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1)])
def test_cores_are_no_more_than_a_containers_quota(quota, want, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    (tmp_path / "cpu.max").write_text(quota)
    assert devices.available_cores(str(tmp_path / "cpu.max")) == want
    assert devices.available_cores(str(tmp_path / "none")) == 8


@pytest.mark.parametrize(("limit", "want"), [("max", 8 << 30), (f"{2 << 30}\n", 2 << 30), (f"{16 << 30}", 8 << 30)])
@pytest.mark.parametrize("file", ["memory.max", "memory/memory.limit_in_bytes"])
def test_memory_is_no_more_than_a_containers_limit(file, limit, want, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2 << 20}.get)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(limit)
    assert devices.host_memory(str(tmp_path)) == want


# HOSTS


def on_two_hosts(script, flags):
    """The same script in two processes, with a device each."""
    one = f"--xla_force_host_platform_device_count=1 {COMPILE_SOONER}"
    command = [f"{script.SCRIPT}.py", *flags_of(flags), "--distributed"]
    return [start(*command, XLA_FLAGS=one, **variables) for variables in variables_of_hosts(2)]


def finish(hosts):
    """Waits for both; returns their output."""
    outputs = [host.communicate(timeout=300)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], outputs
    return outputs


HOSTS = {
    trpo: SCRIPTS[trpo] | {"num_devices": 0, "total_timesteps": 400},
    ppo: ACTOR_CRITIC | {"num_devices": 0, "total_timesteps": 1500, "checkpoint_every": 500},
    impala: SCRIPTS[impala] | {"num_devices": 0, "num_actors": 1, "total_timesteps": 400},
}


def assert_same_state(a, b):
    jax.tree.map(np.testing.assert_array_equal, *(checkpoints.load(path)[1]["state"] for path in (a, b)))


def test_two_hosts_that_stop_and_continue_train_as_one_with_two_devices(tmp_path, capfd):
    """PPO, with a signal that reaches the second host only."""
    hosts = on_two_hosts(ppo, HOSTS[ppo] | {"run_dir": tmp_path / "hosts"})
    wait_for(lambda: list(tmp_path.glob("hosts/*/checkpoints/[0-9]*/commit_success.txt")), hosts[0], 240)
    hosts[1].send_signal(signal.SIGTERM)
    assert "stopped by a signal on another host" in finish(hosts)[0]
    (path,) = tmp_path.glob("hosts/*")
    assert checkpoints.load(path)[0] == read_metrics(path)[-1]["global_step"] < 1500
    finish(on_two_hosts(ppo, {"resume": path}))
    one, _, lines = train(ppo, tmp_path / "one", **HOSTS[ppo] | {"num_devices": 2})
    assert_same_state(one, path)
    assert [line["losses/loss"] for line in lines] == [line["losses/loss"] for line in read_metrics(path)]
    # One host alone continues with what was learnt, resets its games, and says that this is not the same.
    step = checkpoints.load(path)[0]
    ppo.main(ppo.Args(**HOSTS[ppo] | {"resume": str(path), "num_devices": 2, "total_timesteps": step + 1}))
    assert read_metrics(path)[-1]["global_step"] > step
    said = "on 2 devices of 2 hosts and continues on 2 devices of 1 hosts: its numbers will differ"
    assert said in capfd.readouterr().err.replace("a CPU, with ", "")


@of_script(scripts=(trpo, impala))
def test_two_hosts_of_other_scripts_train_as_one_with_two_devices(script, tmp_path):
    finish(on_two_hosts(script, HOSTS[script] | {"run_dir": tmp_path / "hosts"}))
    (path,) = tmp_path.glob("hosts/*")
    assert_same_state(train(script, tmp_path / "one", **HOSTS[script] | {"num_devices": 2})[0], path)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_host_that_is_killed_ends_the_others(victim, tmp_path):
    hosts = on_two_hosts(ppo, HOSTS[ppo] | {"run_dir": tmp_path, "total_timesteps": 10**6})
    wait_for(lambda: list(tmp_path.glob("*/checkpoints/[0-9]*/commit_success.txt")), hosts[0], 240)
    hosts[victim].kill()
    died = time.monotonic()
    output = hosts[1 - victim].communicate(timeout=120)[0]
    assert time.monotonic() - died < 60
    assert hosts[1 - victim].returncode != 0
    # Ours; or JAX's own, where it is the first to notice.
    assert "this host or another has failed" in output or "another task died" in output
    (path,) = tmp_path.iterdir()
    assert checkpoints.load(path)[0] >= 500


def test_hosts_that_read_other_checkpoints_do_not_continue(tmp_path, monkeypatch):
    """As on a file system that shows a new file to one of them later."""
    args = ppo.Args(**TINY | {"run_dir": str(tmp_path), "num_devices": 1})
    with run_of(ppo, args) as run:
        run.save(5, {"state": np.zeros(())}, {})
    args, mesh = ppo.Args(**vars(args) | {"resume": str(run.path)}), devices.make_mesh(args)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost, "gather_per_host", lambda step: {"0": step, "1": step + 1})
    with pytest.raises(runs.UsageError, match=r"of steps \[5, 6\]"):
        runs.Run(args, ppo.SCRIPT, mesh, lambda: {"state": np.zeros(())})


def test_only_the_first_host_asks_for_wandb(tmp_path, monkeypatch):
    args = ppo.Args(**TINY | {"run_dir": str(tmp_path)})
    mesh = devices.make_mesh(args)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(tracking, "wandb_mode", None)  # which it would call
    runs.Run(args, ppo.SCRIPT, mesh, lambda: {})


@pytest.mark.parametrize("address", [None, "first-host"])  # without a port
def test_hosts_that_cannot_be_found_are_answered_in_one_sentence(address, monkeypatch, capfd):
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    if address:
        for name, value in {"COORDINATOR_ADDRESS": address, "NUM_PROCESSES": "2", "PROCESS_ID": "1"}.items():
            monkeypatch.setenv(f"JAX_{name}", value)
    assert_one_sentence(ppo, ["--distributed"], "--distributed", "JAX_COORDINATOR_ADDRESS", monkeypatch, capfd)


def test_hosts_with_unequal_numbers_of_devices_are_refused(monkeypatch, capfd):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(devices, "learner_devices", lambda args, host: range(8 - host))
    said = "--distributed: the hosts have [8, 7] devices"
    with pytest.raises(runs.UsageError, match="CUDA_VISIBLE_DEVICES") as refused:
        runs.check_args(ppo.Args(), ppo.SCRIPT)
    assert str(refused.value).startswith(said)


def test_slurm_leaves_a_host_all_of_its_gpus():
    """JAX's own choice there is one for each process."""
    code = "import jax; from common import multihost; multihost.initialize()"
    code = f"{code}; print(jax.config.values['jax_cuda_visible_devices'])"
    slurm = {"JOB_ID": 7, "STEP_NODELIST": "localhost", "NTASKS": 1, "PROCID": 0, "LOCALID": 0, "STEP_NUM_NODES": 1}
    process = start("-c", code, **{f"SLURM_{name}": str(value) for name, value in slurm.items()})
    assert process.communicate(timeout=60)[0].strip().endswith("all")


def test_a_host_that_has_joined_answers_sigterm():
    """JAX's own service for that would take it, and nothing would end."""
    code = """if True:
        import os, signal
        from common import multihost
        signal.signal(signal.SIGTERM, lambda *given: os._exit(7))
        multihost.initialize()
        os.kill(os.getpid(), signal.SIGTERM)
    """
    (variables,) = variables_of_hosts(1)
    assert start("-c", code, **variables).wait(timeout=60) == 7
