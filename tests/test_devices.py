"""Several devices and several hosts train the same as one: cores of this machine, and processes on it."""

import signal
import time

import jax
import numpy as np
import pytest
from conftest import COMPILE_SOONER, TINY, assert_one_sentence, flags_of, read_metrics, record_homes, start, wait_for

import apex_procgen as apex
import hnppo_doorgym as hnppo
import impala_procgen as impala
import ppo_procgen as ppo
import rnd_montezuma as rnd
import sac_procgen as sac
import trpo_procgen as trpo
from benchmarks.scaling import variables_of_hosts
from common import checkpoints, devices, envs, offpolicy, replay, runs

# One minibatch, of all samples, so that no device decides which are in it.
ACTOR_CRITIC = TINY | {"num_minibatches": 1, "sticky_actions": 0.25, "normalize_rewards": True, "num_envs": 8}
SCRIPTS = {
    ppo: ACTOR_CRITIC | {
        "core": "gru", "rnd_coef": 0.1, "rnd_normalize": True, "augment": "translate", "num_steps": 4,
        "total_timesteps": 60,
    },
    trpo: {k: v for k, v in ACTOR_CRITIC.items() if k not in ("update_epochs", "learning_rate")} | {
        "num_steps": 8, "fisher_fraction": 1.0, "value_epochs": 1, "total_timesteps": 120,
    },
    impala: ACTOR_CRITIC | {
        "num_steps": 8, "deterministic": True, "core": "lstm", "clip_coef": 0.2, "total_timesteps": 120,
    },
    # Which samples are drawn depends on the device: what does not is how the games are played.
    apex: {
        "num_envs": 8, "num_steps": 16, "buffer_size": 512, "learning_starts": 300, "batch_size": 16, "n_step": 3,
        "num_atoms": 5, "encoder": "nature", "pool": "flatten", "width": 1, "hidden": 16, "total_timesteps": 250,
        "eval_episodes": 0, "wandb_mode": "disabled", "deterministic": True, "sticky_actions": 0.25,
    },
    sac: {
        "num_envs": 8, "num_steps": 16, "buffer_size": 512, "learning_starts": 300, "batch_size": 16, "n_step": 3,
        "encoder": "nature", "pool": "flatten", "width": 1, "hidden": 16, "total_timesteps": 250,
        "eval_episodes": 0, "wandb_mode": "disabled", "deterministic": True, "sticky_actions": 0.25,
    },
    rnd: {
        "num_envs": 8, "num_steps": 8, "num_minibatches": 1, "channels": "4,4,4", "hidden": 8, "total_timesteps": 120,
        "update_proportion": 1.0, "obs_norm_init_steps": 4, "wandb_mode": "disabled", "norm_adv": True,
    },
    hnppo: {
        "tasks": "0,1", "num_envs": 4, "num_worlds": 2, "num_minibatches": 1, "update_epochs": 2, "hidden": 8,
        "num_layers": 1, "hyper_width": 16, "task_timesteps": 512, "eval_episodes": 2, "wandb_mode": "disabled",
    },
}  # fmt: skip


def train(script, folder, **flags):
    """A run's last checkpoint and its metrics."""
    path = script.main(script.Args(**flags, run_dir=str(folder))).path
    return checkpoints.load(path)[1], read_metrics(path)


def assert_close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=2e-4)


def read_programs(script, monkeypatch):
    """The text of each program of a script that is compiled from now on, by name."""
    texts = {}

    def reading(name, function):
        def call(*given):
            if name not in texts and not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(given)):
                texts[name] = function.lower(*given).compile().as_text()
            return function(*given)

        return call

    for module in (script, offpolicy):
        for name in {"act", "remember", "insert", "update"} & set(vars(module)):
            monkeypatch.setattr(module, name, reading(name, getattr(module, name)))
    return texts


@pytest.mark.parametrize(
    "script",
    [pytest.param(x, id=x.SCRIPT, marks=() if x in (ppo, apex) else pytest.mark.slow) for x in SCRIPTS],
)
def test_one_and_four_devices_train_the_same(script, tmp_path, monkeypatch):
    """To float32 rounding; and no program gathers what is on another device, such as its frames."""
    one, lines = train(script, tmp_path, **SCRIPTS[script] | {"num_devices": 1})
    texts = read_programs(script, monkeypatch)
    four, others = train(script, tmp_path, **SCRIPTS[script] | {"num_devices": 4})
    learnt = "learner" if script is hnppo else "params"
    assert_close(one["state"][learnt], four["state"][learnt])
    for line, other in zip(lines, others, strict=True):
        assert line.keys() == other.keys()
        for name in ("charts/episodic_return", "losses/loss", "losses/grad_norm", "losses/explained_variance"):
            np.testing.assert_allclose(line.get(name, 0), other.get(name, 0), rtol=2e-3, atol=2e-4, err_msg=name)
    assert "update" in texts or script in (apex, sac)  # which have only played
    for name, text in texts.items():
        assert "all-gather" not in text, name
        assert "all-to-all" not in text, name
        assert ("all-reduce" in text) == (name in ("update", "remember")), name


@pytest.mark.parametrize("script", [pytest.param(apex, marks=pytest.mark.slow), sac], ids=lambda script: script.SCRIPT)
def test_parts_of_a_batch_on_several_devices_are_the_batch(script):
    """Updates of a batch that was drawn elsewhere."""
    args = script.Args(**SCRIPTS[script] | {"replay_device": "host"})
    agent, rng = script.make_agent(args), np.random.default_rng(0)
    frames = rng.integers(0, 256, (2, 16, 64, 64, 6), np.uint8)
    returns, discounts, weight = rng.random((3, 16), np.float32)
    actions = rng.integers(0, 15, 16).astype(np.int32)
    places, keys = np.zeros(16, np.int32), jax.random.split(jax.random.PRNGKey(0), 16)
    batch = replay.Batch(*frames, actions, returns, discounts, weight, places, places, keys)
    results = []
    for number in (1, 4):
        spread = script.Args(**vars(args) | {"num_devices": number})
        state = devices.run_once(script.initial_state, args, agent)
        results.append(jax.device_get(script.update_on_batch(spread, agent, state, batch)))
    assert_close(*results)


def test_a_column_of_the_buffer_is_of_the_same_game_wherever_the_buffer_is():
    """So that a run which goes on with other devices, or from the host's memory, mixes no games."""
    columns = []
    for flags in ({"num_devices": 1}, {"num_devices": 2}, {"num_devices": 4}, {"replay_device": "host"}):
        args = apex.Args(**SCRIPTS[apex] | {"num_actors": 2, "reward_clip": 5.0} | flags)
        rollouts, steps = [], []
        for numbers in np.arange(8, dtype=np.int32).reshape(2, 4):
            rollout = offpolicy.begin_rollout(args, offpolicy.initial_carry(args, numbers), 0)
            rollouts.append(rollout._replace(actions=rollout.actions + numbers))
            rewards, no = np.float32(np.tile(numbers, (16, 1))), np.zeros((16, 4), bool)
            terminated, truncated = no.copy(), no.copy()
            terminated[3], truncated[5] = numbers % 2 == 0, True
            steps.append(envs.Steps(rewards, terminated, truncated, no, np.zeros((17, 4), np.int32), no[0]))
        given = offpolicy.move(args, tuple(rollouts), tuple(steps))
        rows = offpolicy.insert(args, offpolicy.make_buffer(args, None), *given).rows
        np.testing.assert_array_equal(rows.rewards[:16], np.minimum(rows.actions[:16], 5))
        np.testing.assert_array_equal(rows.terminated[3], rows.actions[3] % 2 == 0)
        assert (rows.terminated[5].any(), rows.ended[5].all()) == (False, True)  # its time limit is no death
        columns.append(rows.actions[0].tolist())
    assert sorted(columns[0]) == list(range(8))
    assert columns == columns[:1] * 4


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.SCRIPT)
def test_a_first_state_has_the_types_of_the_next(script):
    """Else all that takes it is compiled twice, the second time in the midst of training."""
    args = script.Args(**SCRIPTS[script] | {"num_devices": 1})
    state = jax.eval_shape(lambda: script.initial_state(args, script.make_agent(args)))
    assert not [jax.tree_util.keystr(path) for path, x in jax.tree.leaves_with_path(state) if x.weak_type]


@pytest.mark.slow
def test_devices_draw_from_their_own_part_of_the_buffer(tmp_path):
    """Ape-X learns on four devices, and priorities are set where they were drawn."""
    flags = SCRIPTS[apex] | {"num_devices": 4, "num_envs": 8, "learning_starts": 200, "total_timesteps": 400}
    saved, lines = train(apex, tmp_path, **flags)
    assert lines[-1]["charts/updates"] > 3
    priorities = saved["replay"]["priorities"]
    assert all(len(np.unique(own)) > 16 for own in np.split(priorities, 4, axis=1))


@pytest.mark.parametrize(
    ("script", "flags", "names", "valid"),
    [
        (ppo, "--num-devices 3 --num-envs 8", "--num-devices 3: does not divide the games", "give 1 or 2 or 4"),
        (ppo, "--num-devices 4 --num-envs 8 --core gru", "a minibatch's games, 1", "give 1"),
        (ppo, "--num-devices 5", "--num-devices 5", "there are 4"),
        (impala, "--num-devices 4 --num-envs 16 --num-minibatches 8", "a minibatch's unrolls, 2", "1 or 2"),
        (impala, "--num-actors 8 --actor-devices 4", "--actor-devices 4", "leaves none"),
        (impala, "--num-actors 8 --actor-devices 5", "--actor-devices 5", "leaves none"),
        (apex, "--num-devices 3 --actor-devices 1 --batch-size 32", "--batch-size, 32", "1 or 2"),
        (apex, "--num-devices 4 --actor-devices 1", "--num-devices 4", "there are 3"),
        (rnd, "--actor-devices 1", "--actor-devices 1", "--async"),
    ],
)  # fmt: skip
def test_what_devices_cannot_divide_is_said(script, flags, names, valid, monkeypatch, capfd):
    assert_one_sentence(script, flags.split(), names, valid, monkeypatch, capfd)


@pytest.mark.slow
def test_a_run_that_goes_on_with_other_devices_says_so(tmp_path, capfd):
    flags = ACTOR_CRITIC | {"run_dir": str(tmp_path), "total_timesteps": 256}
    path = ppo.main(ppo.Args(**flags)).path
    ppo.main(ppo.Args(**flags | {"resume": str(path), "total_timesteps": 500, "num_devices": 4}))
    assert (
        "on 2 devices of 1 hosts and goes on with 4 devices of 1 hosts: it will not be the same"
        in capfd.readouterr().err
    )
    assert read_metrics(path)[-1]["global_step"] >= 500


@pytest.mark.slow
def test_actors_have_devices_of_their_own(tmp_path, monkeypatch):
    """They play the same there."""
    homes = record_homes(monkeypatch)
    flags = SCRIPTS[impala] | {"total_timesteps": 300}
    with_own = train(impala, tmp_path, **flags | {"actor_devices": 2, "num_devices": 2})
    assert homes == [[jax.devices()[3], jax.devices()[2]]]
    shared = train(impala, tmp_path, **flags | {"num_devices": 2})
    assert_close(with_own[0]["state"], shared[0]["state"])


# HOSTS


def on_two_hosts(script, flags):
    """The same script in two processes, with a device each."""
    one = f"--xla_force_host_platform_device_count=1 {COMPILE_SOONER}"
    command = [f"{script.SCRIPT}.py", *flags_of(flags), "--distributed"]
    return [start(*command, XLA_FLAGS=one, **variables) for variables in variables_of_hosts(2)]


def finish(hosts):
    """Waits for both; returns what they said."""
    outputs = [host.communicate(timeout=300)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], outputs
    return outputs


HOSTS = {
    trpo: SCRIPTS[trpo] | {"num_devices": 0, "total_timesteps": 400},
    ppo: ACTOR_CRITIC | {"num_devices": 0, "total_timesteps": 1500, "checkpoint_every": 500},
    impala: SCRIPTS[impala] | {"num_devices": 0, "num_actors": 1, "total_timesteps": 400},
}


def test_two_hosts_stop_go_on_and_train_as_one_with_two_devices(tmp_path, capfd):
    """PPO, with a signal that reaches the second host only."""
    hosts = on_two_hosts(ppo, HOSTS[ppo] | {"run_dir": tmp_path / "hosts"})
    wait_for(lambda: list(tmp_path.glob("hosts/*/checkpoints/[0-9]*/commit_success.txt")), hosts[0], 240)
    hosts[1].send_signal(signal.SIGTERM)
    assert "stopped by a signal on another host" in finish(hosts)[0]
    (path,) = tmp_path.glob("hosts/*")
    stopped = read_metrics(path)[-1]["global_step"]
    assert checkpoints.load(path)[0] == stopped < 1500
    finish(on_two_hosts(ppo, {"resume": path}))
    saved, lines = train(ppo, tmp_path / "one", **HOSTS[ppo] | {"num_devices": 2})
    for x, y in zip(jax.tree.leaves(saved["state"]), jax.tree.leaves(checkpoints.load(path)[1]["state"]), strict=True):
        np.testing.assert_array_equal(x, y)
    assert [line["losses/loss"] for line in lines] == [line["losses/loss"] for line in read_metrics(path)]
    # One host alone goes on with what was learnt, begins its games anew, and says that this is not the same.
    step = checkpoints.load(path)[0]
    ppo.main(ppo.Args(**HOSTS[ppo] | {"resume": str(path), "num_devices": 2, "total_timesteps": step + 1}))
    assert read_metrics(path)[-1]["global_step"] > step
    assert (
        "on 2 devices of 2 hosts and goes on with 2 devices of 1 hosts: it will not be the same"
        in capfd.readouterr().err
    )


@pytest.mark.slow
@pytest.mark.parametrize("script", [trpo, impala], ids=lambda script: script.SCRIPT)
def test_two_hosts_of_other_scripts_train_as_one_with_two_devices(script, tmp_path):
    """IMPALA in lock-step."""
    finish(on_two_hosts(script, HOSTS[script] | {"run_dir": tmp_path / "hosts"}))
    (path,) = tmp_path.glob("hosts/*")
    saved, _ = train(script, tmp_path / "one", **HOSTS[script] | {"num_devices": 2})
    for x, y in zip(jax.tree.leaves(saved["state"]), jax.tree.leaves(checkpoints.load(path)[1]["state"]), strict=True):
        np.testing.assert_array_equal(x, y)


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


@pytest.mark.parametrize(
    ("script", "name"),
    [(apex, "this script"), (sac, "this script"), (rnd, "rnd_montezuma.py"), (hnppo, "hnppo_doorgym.py")],
)
def test_scripts_for_one_host_say_so(script, name, monkeypatch, capfd):
    """Without looking for the others."""
    monkeypatch.setattr(runs.devices, "connect", None)
    assert_one_sentence(script, ["--distributed"], "--distributed", f"{name} trains on one host", monkeypatch, capfd)


def test_a_bad_flag_is_answered_before_hosts_are_looked_for(monkeypatch, capfd):
    monkeypatch.setattr(runs.devices, "connect", None)
    words = ["--distributed", "--num-minibatches", 0]
    assert_one_sentence(ppo, words, "--num-minibatches 0", "1 or more", monkeypatch, capfd)


@pytest.mark.parametrize("address", [None, "first-host"])  # without a port
def test_hosts_that_cannot_be_found_are_said(address, monkeypatch, capfd):
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    if address:
        for name, value in {"COORDINATOR_ADDRESS": address, "NUM_PROCESSES": "2", "PROCESS_ID": "1"}.items():
            monkeypatch.setenv(f"JAX_{name}", value)
    assert_one_sentence(ppo, ["--distributed"], "--distributed", "JAX_COORDINATOR_ADDRESS", monkeypatch, capfd)


def test_hosts_need_as_many_devices_each(monkeypatch, capfd):
    monkeypatch.setattr(runs.devices, "of_hosts", lambda args: [range(8), range(7)])
    assert_one_sentence(
        ppo, [], "--distributed: the hosts have [8, 7] devices", "CUDA_VISIBLE_DEVICES", monkeypatch, capfd
    )


def test_slurm_leaves_a_host_all_of_its_gpus():
    """JAX's own choice there is one for each process."""
    connect = "import jax; from common import devices; devices.connect()"
    code = f"{connect}; print(jax.config.values['jax_cuda_visible_devices'])"
    slurm = {"JOB_ID": 7, "STEP_NODELIST": "localhost", "NTASKS": 1, "PROCID": 0, "LOCALID": 0, "STEP_NUM_NODES": 1}
    process = start("-c", code, **{f"SLURM_{name}": str(value) for name, value in slurm.items()})
    assert process.communicate(timeout=60)[0].strip().endswith("all")


def test_a_host_that_has_joined_answers_sigterm():
    """JAX's own service for that would take it, and nothing would end."""
    code = """if True:
        import os, signal
        from common import devices
        signal.signal(signal.SIGTERM, lambda *given: os._exit(7))
        devices.connect()
        os.kill(os.getpid(), signal.SIGTERM)
    """
    (variables,) = variables_of_hosts(1)
    assert start("-c", code, **variables).wait(timeout=60) == 7
