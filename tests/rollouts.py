"""Made-up steps and rollouts, and rollouts of real games, for tests of the scripts' maths."""

from contextlib import closing
from functools import cache, partial
from types import SimpleNamespace

import jax
import numpy as np
from conftest import init_state
from hypothesis import settings
from hypothesis import strategies as st

from common import devices, envs, multihost, runs
from common.envs import Timesteps

relaxed = settings(deadline=None, max_examples=25)
seeds = st.integers(0, 2**32 - 1)


def normal(rng, *shape, scale=1.0):
    return (rng.normal(size=shape) * scale).astype(np.float32)


def random_steps(rng, steps, envs):
    """Episodes as EnvPool reports them: after a step that ends one comes a junk step."""
    terminated, truncated = np.zeros((2, steps, envs), bool)
    is_reset = np.zeros((steps + 1, envs), bool)
    episode_step = np.zeros((steps + 1, envs), np.int32)
    episode_step[0], is_reset[0] = rng.integers(0, 5, envs), rng.random(envs) < 0.2
    for t in range(steps):
        ends = (rng.random(envs) < 0.25) & ~is_reset[t]
        early = rng.random(envs) < 0.5
        terminated[t], truncated[t], is_reset[t + 1] = ends & early, ends & ~early, ends
        episode_step[t + 1] = np.where(is_reset[t], 0, episode_step[t] + 1)
    rewards = (rng.normal(size=(steps, envs)) * 3).astype(np.float32) * ~is_reset[:-1]
    return Timesteps(rewards, terminated, truncated, is_reset[:-1], episode_step, np.zeros(envs, bool))


MADE_UP = {
    "num_envs": 3, "num_steps": 8, "num_minibatches": 2, "encoder": "nature", "width": 1, "hidden": 8,
    "normalize_rewards": True,
}  # fmt: skip


def acting_params(state):
    return state.params.get("agent", state.params)


def init_env_state(script, args):
    make = getattr(script, "init_env_state", lambda args, env_ids: envs.init_env_state(env_ids, args.stack_offsets))
    return make(args, np.arange(args.num_envs))


@cache
def made_up(script, args):
    """Agent, state and jitted update of PPO, TRPO or PPG, and a rollout of random frames with episode ends."""
    rng, agent, obs_shape = np.random.default_rng(0), script.make_agent(args), (args.num_envs, 3, 64, 64)
    steps, state = random_steps(rng, args.num_steps, args.num_envs), init_state(script, args, agent)
    act = jax.jit(partial(script.act, args, agent, acting_params(state)))
    rollout = script.begin_rollout(args, init_env_state(script, args), 0)
    for t in range(args.num_steps + 1):
        obs = rng.integers(0, 256, obs_shape, np.uint8)
        if t < args.num_steps:
            rollout, _ = act(rollout, obs, steps.episode_step[t])
    rollout = envs.end_rollout(args, rollout, obs, steps.episode_step[-1])
    images, history = rollout.frames.images, rollout.env_state.history
    np.testing.assert_array_equal(images[-1], obs.transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(history, images[-1 - len(history) : -1])  # the next rollout continues this one
    assert len(images) == len(history) + args.num_steps + 1
    update = jax.jit(partial(script.update, args, agent))
    return SimpleNamespace(agent=agent, state=state, steps=steps, rollout=rollout, update=update)


def play(script, args, updates, change=lambda state: state, again=False):
    """States, metrics and Timesteps of updates of PPO, TRPO or PPG on real games; of the same rollout with `again`."""
    agent, mesh = script.make_agent(args), devices.make_mesh(args)
    collect, update = script.make_collect(args, agent, mesh), script.make_update(args, agent, mesh)
    state = multihost.distribute(mesh, change(init_state(script, args, agent)), script.STATE_SPECS)
    env_state = jax.device_put(init_env_state(script, args), devices.shardings(mesh, envs.ENV_STATE_SPECS))
    states, lines, played = [jax.device_get(state)], [], []
    make = envs.make_threaded_envs if hasattr(args, "rollout_threads") else envs.make_train_envs
    with closing(make(args)) as vec_env:
        for i in range(updates):
            if i == 0 or not again:
                rollout, steps = collect(vec_env, acting_params(state), env_state, i, runs.Stopwatch())
                env_state = rollout.env_state
            state, *_, metrics = update(state, rollout, steps)
            for kept, new in zip((states, lines, played), jax.device_get((state, metrics, steps)), strict=True):
                kept.append(new)
    return states, lines, played
