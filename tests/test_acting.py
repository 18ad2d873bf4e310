"""The actions drawn, played and recorded by a uniform or a certain policy, in all scripts that draw."""

import threading
from contextlib import closing
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollouts import init_env_state

import impala_procgen as impala
import ppg_procgen as ppg
import ppo_procgen as ppo
import rnd_montezuma as rnd
import trpo_procgen as trpo
from common import devices, envs, runs

scripts = pytest.mark.parametrize("script", [ppo, impala, trpo, ppg, rnd], ids=lambda script: script.SCRIPT)
PARAMS = {"policy": None, "value": None}


class FixedAgent:
    """Logits that do not depend on the frames: all 0, or certain of action 3; values are 0."""

    def __init__(self, script, certain):
        self.script = script
        self.logits = np.zeros(18 if script is rnd else 15, np.float32)
        self.logits[3] = 50 * certain
        self.values = np.zeros(2 if script is rnd else (), np.float32)

    def apply(self, params, x, is_first=None, hidden_state=None, method=None):
        logits, values = (jnp.broadcast_to(y, (len(x), *y.shape)) for y in (self.logits, self.values))
        if self.script is ppg:
            return logits, values, values
        if method == "decode":
            return logits[:, None], values[:, None], hidden_state
        return logits if method is None else jnp.zeros((len(x), 1))


def make(script, certain, **flags):
    agent = FixedAgent(script, certain)
    return script.Args(num_devices=1, **flags), trpo.Agent(agent, agent) if script is trpo else agent


@pytest.mark.parametrize("script", [ppo, impala, trpo, ppg], ids=lambda script: script.SCRIPT)
def test_acting_with_uniform_policy_draws_anew_each_step_and_records_choice(script):
    args, agent = make(script, False, num_envs=8, num_steps=12, sticky_actions=0.5)
    frames, steps = np.zeros((8, 3, 64, 64), np.uint8), []
    act = jax.jit(lambda rollout, t: script.act(args, agent, PARAMS, rollout, frames, jnp.full(8, t)))
    for i in range(2):
        rollout, before = script.begin_rollout(args, init_env_state(script, args), i), np.zeros(8, int)
        for t in range(12):
            rollout, played = act(rollout, t)
            chosen, played = np.asarray(rollout.actions)[t], np.asarray(played)
            assert ((played == chosen) | (played == before)).all()
            steps.append((chosen, played != chosen))
            before = played
    chosen, stuck = (np.stack(x) for x in zip(*steps, strict=True))
    assert len(np.unique(chosen, axis=0)) == 24  # no step repeats another's draws, nor does the next rollout
    assert 40 < stuck.sum() < 140  # half of 176 chances
    assert (chosen[stuck] == 0).any()  # whether an action sticks is drawn by a key of its own


@scripts
def test_acting_with_certain_policy_plays_likeliest_action(script):
    args, agent = make(script, True, num_envs=8, num_steps=12)
    rollout = script.begin_rollout(args, init_env_state(script, args), 0)
    frames = np.zeros((8, 1, 84, 84) if script is rnd else (8, 3, 64, 64), np.uint8)
    _, played = script.act(args, agent, PARAMS, rollout, frames, np.zeros(8, np.int32))
    assert set(np.asarray(played).tolist()) == {3}


@scripts
def test_evaluation_with_one_key_draws_for_each_game(script):
    frames, episode_step, drawn = np.zeros((64, 2, 2, 3), np.uint8), np.zeros(64, np.int32), {}
    for certain in (False, True):
        args, agent = make(script, certain)
        policy = script.make_policy(args, agent, devices.make_mesh(args))
        drawn[certain] = set(np.asarray(policy(PARAMS, frames, episode_step, jax.random.PRNGKey(0), None)[0]).tolist())
    assert len(drawn[False]) > 8
    assert drawn[True] == {3}


@pytest.mark.parametrize(("num_devices", "core"), [(1, "gru"), (2, "none")])
def test_rollout_in_two_threads_equals_that_in_one(num_devices, core):
    """Bit for bit but for the network, whose batch is smaller; over a restart, and within episodes. A snapshot of
    either restores the other."""
    played = {}
    for threads in (1, 2, 1):
        args = ppo.Args(
            env_id="bigfish", num_envs=8, num_steps=6, restart_every=12, rollout_threads=threads, core=core,
            encoder="nature", width=1, hidden=8, pool="avg", num_devices=num_devices, sticky_actions=0.5,
        )  # fmt: skip
        agent, mesh = ppo.make_agent(args), devices.make_mesh(args)
        collect, params = ppo.make_collect(args, agent, mesh), ppo.init_state(args, agent).params["agent"]
        env_state = ppo.init_env_state(args, devices.local_env_ids(args))
        env_state = jax.device_put(env_state, devices.shardings(mesh, envs.ENV_STATE_SPECS))
        results = []
        with closing(envs.make_threaded_envs(args)) as vec_env:
            if played:
                vec_env.restore(played["snapshot"], SimpleNamespace(replay_progress=lambda total: lambda i: None))
            else:
                collect(vec_env, params, env_state, 0, runs.Stopwatch())
                played["snapshot"] = vec_env.save()
            for i in (1, 2, 3):
                rollout, timesteps = collect(vec_env, params, env_state, i, runs.Stopwatch())
                env_state = rollout.env_state
                results.append(jax.device_get((rollout, timesteps, vec_env.save())))
        jax.tree.map(
            partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), results, played.setdefault("one", results)
        )


def test_rollout_threads_act_at_the_same_time():
    both = threading.Barrier(2)

    def act(thread, obs, episode_step):
        both.wait(timeout=60)  # for the other thread
        return np.full(2, thread)

    args = ppo.Args(env_id="bigfish", num_envs=4, rollout_threads=2)
    with closing(envs.make_threaded_envs(args)) as vec_env:
        vec_env.play(act, 3, runs.Stopwatch())
        assert vec_env.save()["actions"].tolist() == [[0, 1, 0, 1]] * 3
