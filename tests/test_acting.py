"""What actions are drawn, played and recorded, of a policy that is uniform or certain, in all scripts that draw."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import impala_procgen as impala
import ppo_procgen as ppo
import rnd_montezuma as rnd
import trpo_procgen as trpo

AGENT, PARAMS = trpo.Agent(None, None), {"policy": None, "value": None}


def network(script, certain):
    """Where a script asks its network, and what to answer: every action alike, or 3."""

    def logits(frames):
        return jnp.zeros((len(frames), 18 if script is rnd else 15)).at[:, 3].set(50.0 * certain)

    return {
        ppo: ("policy_and_value", lambda _, __, frames, ___, core: (logits(frames), jnp.zeros(len(frames)), core)),
        rnd: ("policy_and_value", lambda _, __, frames, ___, core: (logits(frames), jnp.zeros((len(frames), 2)), core)),
        impala: ("policy", lambda _, __, frames, ___, core: (logits(frames), core)),
        trpo: ("look", lambda _, __, frames: logits(frames)),
    }[script]


scripts = partial(pytest.mark.parametrize, "script", ids=lambda script: script.SCRIPT)


@scripts([ppo, impala, trpo])
def test_actions_are_drawn_anew_and_recorded_as_chosen(script, monkeypatch):
    monkeypatch.setattr(script, *network(script, certain=False))
    args = script.Args(num_envs=8, num_steps=12, num_devices=1, sticky_actions=0.5, seed=77)
    frames, steps = np.zeros((8, 3, 64, 64), np.uint8), []
    for i in range(2):
        rollout, before = script.begin_rollout(args, script.initial_carry(args, np.arange(8)), i), np.zeros(8, int)
        for t in range(12):
            rollout, played = script.act(args, AGENT, PARAMS, rollout, frames, np.full(8, t, np.int32))
            chosen, played = np.asarray(rollout.actions)[t], np.asarray(played)
            assert ((played == chosen) | (played == before)).all()
            steps.append((chosen, played != chosen))
            before = played
    chosen, stuck = (np.stack(x) for x in zip(*steps, strict=True))
    assert len(np.unique(chosen, axis=0)) == 24  # no step's draws are another's, in the next rollout neither
    assert 40 < stuck.sum() < 140  # half of 176 chances
    assert (chosen[stuck] == 0).any()  # whether an action sticks is drawn by a key of its own


@scripts([ppo, impala, trpo, rnd])
def test_an_evaluation_draws_its_actions_for_each_game(script, monkeypatch):
    frames, ages, drawn = np.zeros((64, 2, 2, 3), np.uint8), np.zeros(64, np.int32), {}
    for certain in (False, True):
        monkeypatch.setattr(script, *network(script, certain))
        policy = script.make_policy(script.Args(num_devices=1, seed=77 + certain), AGENT, PARAMS)
        drawn[certain] = set(np.asarray(policy(frames, ages, jax.random.PRNGKey(0), None)[0]).tolist())
    assert len(drawn[False]) > 8
    assert drawn[True] == {3}


@scripts([ppo, impala, trpo, rnd])
def test_the_likeliest_action_is_played(script, monkeypatch):
    monkeypatch.setattr(script, *network(script, certain=True))
    args = script.Args(num_envs=8, num_steps=12, num_devices=1, sticky_actions=0.0, seed=79)
    rollout = script.begin_rollout(args, script.initial_carry(args, np.arange(8)), 0)
    frames = np.zeros((8, 1, 84, 84) if script is rnd else (8, 3, 64, 64), np.uint8)
    _, played = script.act(args, AGENT, PARAMS, rollout, frames, np.zeros(8, np.int32))
    assert set(np.asarray(played).tolist()) == {3}
