"""What actions are drawn, played and recorded, of a policy that is uniform: PPO's, IMPALA's and TRPO's alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import impala_procgen as impala
import ppo_procgen as ppo
import trpo_procgen as trpo

AGENT, PARAMS = trpo.Agent(None, None), {"policy": None, "value": None}


def logits(frames):
    return jnp.zeros((len(frames), 15))


UNIFORM = {  # where each script asks its network
    ppo: ("policy_and_value", lambda _, __, frames, ___, core: (logits(frames), jnp.zeros(len(frames)), core)),
    impala: ("policy", lambda _, __, frames, ___, core: (logits(frames), core)),
    trpo: ("look", lambda _, __, frames: logits(frames)),
}


@pytest.mark.parametrize("script", UNIFORM, ids=lambda script: script.SCRIPT)
def test_actions_are_drawn_anew_and_recorded_as_chosen(script, monkeypatch):
    monkeypatch.setattr(script, *UNIFORM[script])
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


@pytest.mark.parametrize("script", UNIFORM, ids=lambda script: script.SCRIPT)
def test_an_evaluation_draws_its_actions_for_each_game(script, monkeypatch):
    monkeypatch.setattr(script, *UNIFORM[script])
    policy = script.make_policy(script.Args(num_devices=1, seed=77), AGENT, PARAMS)
    frames, ages = np.zeros((64, 2, 2, 3), np.uint8), np.zeros(64, np.int32)
    actions, _ = policy(frames, ages, jax.random.PRNGKey(0), None)
    assert len(set(np.asarray(actions).tolist())) > 8
