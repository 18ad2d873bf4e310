"""Whole rounds, a rollout and its update, of each on-policy script: what they learn, by which schedules."""

from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import init_state
from rollouts import acting_params, init_env_state

import impala_procgen as impala
import ppg_procgen as ppg
import ppo_procgen as ppo
import rnd_montezuma as rnd
import trpo_procgen as trpo
from common import envs

scripts = pytest.mark.parametrize("script", [ppo, trpo, ppg, impala, rnd], ids=lambda script: script.SCRIPT)
T, GAMES = 4, 32
SMALL = {"num_envs": GAMES, "num_steps": T, "num_minibatches": 2, "hidden": 8}
PROCGEN = SMALL | {"encoder": "nature", "width": 1, "pool": "flatten", "gamma": "0:0.9,100:0.8"}
FLAGS = {
    ppo: PROCGEN | {"learning_rate": "0:0.02,100:0.01", "ent_coef": "0:0.02,100:0", "update_epochs": 2},
    trpo: PROCGEN | {"learning_rate": "0:0.02,100:0.01", "max_kl": 0.1, "value_epochs": 1},
    ppg: PROCGEN | {"learning_rate": "0:0.004,100:0.002", "ent_coef": "0:0.02,100:0"},
    impala: PROCGEN | {"learning_rate": "0:0.008,100:0.004", "ent_coef": "0:0.02,100:0", "num_actors": 1},
    rnd: SMALL | {"channels": "4,4,4", "learning_rate": "0:0.02,100:0.01", "int_coef": "0:0.2,100:0"},
}


@cache
def make(script):
    """Args, the state before training, and round(state, env_state, i) -> state, rollout, metrics. Each episode is one
    frame, always the same, in which action 3 alone is rewarded; then comes EnvPool's junk step."""
    args = script.Args(**FLAGS[script])
    agent, obs_shape = script.make_agent(args), (1, 84, 84) if script is rnd else (3, 64, 64)
    obs = np.random.default_rng(0).integers(0, 256, (1, *obs_shape), np.uint8).repeat(GAMES, axis=0)
    episode_step = np.arange(T + 1, dtype=np.int32)[:, None].repeat(GAMES, axis=1) % 2
    is_reset = episode_step[:-1] == 1
    act, update = jax.jit(partial(script.act, args, agent)), jax.jit(partial(script.update, args, agent))

    def play_and_learn(state, env_state, i):
        rollout, params, actions = script.begin_rollout(args, env_state, i), acting_params(state), []
        for t in range(T):
            rollout, played = act(params, rollout, obs, episode_step[t])
            actions.append(played)
        end = partial(rnd.end_rollout, args, agent, params) if script is rnd else partial(envs.end_rollout, args)
        rollout = end(rollout, obs, episode_step[T])
        rewards = np.float32((np.stack(actions) == 3) & ~is_reset)
        steps = envs.Timesteps(rewards, ~is_reset, is_reset & False, is_reset, episode_step, np.zeros(GAMES, bool))
        inputs = rollout, steps
        if script is impala:
            inputs = impala.assemble_batch(args, impala.init_buffers(args), *([x] for x in inputs), 0, i)[1:]
        state, *results = update(state, *inputs)
        (metrics,) = (x for x in results if isinstance(x, dict))
        return state, rollout, metrics

    return SimpleNamespace(args=args, state=init_state(script, args, agent), round=play_and_learn)


@scripts
def test_twelve_rounds_learn_which_action_is_rewarded(script):
    own, chances = make(script), []
    state, env_state = own.state, init_env_state(script, own.args)
    for i in range(12):
        state, rollout, _ = own.round(state, env_state, i)
        env_state = rollout.env_state
        chances.append(jax.nn.softmax(rollout.logits[-2])[:, 3].mean())
    assert chances[0] < 0.1
    assert chances[-1] > 0.5


@scripts
def test_schedules_go_by_environment_steps(script):
    own = make(script)
    state = own.state._replace(global_step=jnp.int32(50), updates=jnp.int32(3))
    _, _, metrics = own.round(state, init_env_state(script, own.args), 0)
    for name in {"learning_rate", "ent_coef", "gamma", "int_coef"} & FLAGS[script].keys():
        points = [tuple(map(float, point.split(":"))) for point in FLAGS[script][name].split(",")]
        assert metrics[f"charts/{name}"] == pytest.approx(oracle.schedule(points, 50)), name
