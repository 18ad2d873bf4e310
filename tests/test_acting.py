"""The actions drawn, played and recorded by a uniform or a certain policy, in all scripts that draw."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_ppo_math import init_env_state

import impala_procgen as impala
import ppo_procgen as ppo
import rnd_montezuma as rnd
import trpo_procgen as trpo
from common import devices

scripts = pytest.mark.parametrize("script", [ppo, impala, trpo, rnd], ids=lambda script: script.SCRIPT)
PARAMS = {"policy": None, "value": None}


class FixedAgent:
    """Logits that do not depend on the frames: all 0, or certain of action 3; values are 0."""

    def __init__(self, script, certain):
        self.logits = np.zeros(18 if script is rnd else 15, np.float32)
        self.logits[3] = 50 * certain
        self.values = np.zeros(2 if script is rnd else (), np.float32)

    def apply(self, params, x, is_first=None, hidden_state=None, method=None):
        logits, values = (jnp.broadcast_to(y, (len(x), *y.shape)) for y in (self.logits, self.values))
        if method == "decode":
            return logits[:, None], values[:, None], hidden_state
        return logits if method is None else jnp.zeros((len(x), 1))


def make(script, certain, **flags):
    agent = FixedAgent(script, certain)
    return script.Args(num_devices=1, **flags), trpo.Agent(agent, agent) if script is trpo else agent


@pytest.mark.parametrize("script", [ppo, impala, trpo], ids=lambda script: script.SCRIPT)
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
