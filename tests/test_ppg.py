"""PPG: its losses against float64 NumPy, what each trains, and the auxiliary phase; tests/test_scripts.py has runs."""

import os
import signal
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY, assert_same_run, init_state, read_metrics

import ppg_procgen as ppg
from common import checkpoints, envs, runs

ARGS = ppg.Args(**{k: v for k, v in TINY.items() if k != "num_devices"} | {
    "num_steps": 8, "policy_iterations": 2, "aux_epochs": 3, "aux_minibatches": 2, "update_epochs": 1,
    "normalize_rewards": True,
})  # fmt: skip


class Outputs:
    """In an agent's place: it looks its outputs up by the frames, which are numbers of samples."""

    def apply(self, outputs, frames, keys):
        return jax.tree.map(lambda x: jnp.asarray(x)[frames[:, 0]], outputs)


def random_outputs(rng, samples):
    """Logits [B, 15], values [B] and auxiliary values [B]; frames that stand for them; another policy's logits."""
    outputs = rng.normal(size=(samples, 15)), *rng.normal(size=(2, samples))
    outputs = jax.tree.map(np.float32, outputs)
    return outputs, np.arange(samples)[:, None], outputs[0] + np.float32(rng.normal(size=(samples, 15)) * 0.3)


def test_losses_of_both_phases_equal_float64_oracles():
    rng = np.random.default_rng(0)
    outputs, frames, old_logits = random_outputs(rng, 19)
    logits, values, aux_values = map(np.float64, outputs)
    returns, advantages = np.float32(rng.normal(size=(2, 19)))
    batch = ppg.Batch(rng.integers(0, 15, 19), old_logits, advantages, returns)
    args = replace(ARGS, clip_coef=0.1, vf_coef=0.7, beta_clone=0.3)
    got = ppg.policy_phase_loss(args, Outputs(), outputs, (frames, None, batch), ent_coef=0.02)
    p, q = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (logits, np.float64(old_logits)))
    chosen = np.arange(19), batch.actions
    ratio = p[chosen] / q[chosen]
    surrogate = np.minimum(ratio * advantages, np.clip(ratio, 0.9, 1.1) * advantages)
    assert 0 < np.mean(np.abs(ratio - 1) > 0.1) < 1
    entropy, kl, value_loss = -(p * np.log(p)).sum(1), (q * np.log(q / p)).sum(1), (values - returns) ** 2 / 2
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    close(got["loss"], -surrogate + 0.7 * value_loss - 0.02 * entropy)
    close(got["approx_kl"], kl)
    got = ppg.aux_phase_loss(args, Outputs(), outputs, (frames, None, returns, old_logits))
    close(got["loss"], (aux_values - returns) ** 2 / 2 + 0.3 * kl + value_loss)
    close(got["aux_phase_kl"], kl)


@pytest.mark.parametrize("separate", [False, True])
def test_no_value_loss_but_the_auxiliary_trains_the_policys_features(separate):
    args, rng = replace(ARGS, separate_value=separate), np.random.default_rng(0)
    agent = ppg.make_agent(args)
    params, frames = init_state(ppg, args).params, rng.integers(0, 256, (2, 64, 64, 6), np.uint8)

    def trained_by(output):
        grads = jax.jit(jax.grad(lambda params: (ppg.forward(agent, params, frames)[output] ** 2).sum()))(params)
        return {name for name, part in grads["params"].items() if any(x.any() for x in jax.tree.leaves(part))}

    own = {"value_encoder"} if separate else set()
    assert set(params["params"]) == {"encoder", "policy", "value", "aux_value"} | own
    assert trained_by(0) == {"encoder", "policy"}
    assert trained_by(1) == {"value"} | own
    assert trained_by(2) == {"encoder", "aux_value"}


def test_gathered_minibatch_has_single_environments_of_any_rollout():
    rng = np.random.default_rng(0)

    def rollout():
        images, episode_steps = rng.integers(0, 256, (12, 4, 2, 2, 3), np.uint8), rng.integers(0, 5, (9, 4))
        frames = envs.Frames(images, episode_steps, (0, 3))
        return ppg.AuxBatch(frames, *rng.random((2, 8, 4)), rng.random((8, 4, 15)))

    rollouts = [rollout() for _ in range(3)]
    got = ppg.gather(rollouts, np.array([9, 2]))
    for i, (of_rollout, env) in enumerate(((2, 1), (0, 2))):
        want = rollouts[of_rollout]
        np.testing.assert_array_equal(got.logits[:, i], want.logits[:, env])
        np.testing.assert_array_equal(got.frames.stack(4, np.array([i])), want.frames.stack(4, np.array([env])))


def test_auxiliary_update_with_noise_in_junk_steps_is_bit_identical():
    """The same noise in transitions is not."""
    rng, shape = np.random.default_rng(0), (8, 2)
    junk = rng.random(shape) < 0.4
    frames = envs.Frames(rng.integers(0, 256, (12, 2, 64, 64, 3), np.uint8), rng.integers(0, 5, (9, 2)), (3, 0))
    batch = ppg.AuxBatch(frames, *map(np.float32, (rng.normal(size=shape), ~junk, rng.normal(size=(*shape, 15)))))
    state = init_state(ppg, ARGS)
    update = jax.jit(partial(ppg.aux_update, ARGS, ppg.make_agent(ARGS), ids=jnp.arange(2)))
    noise = np.float32(rng.normal(size=shape))

    def with_noise(mask):
        logits = batch.logits + noise[..., None] * mask[..., None] * np.eye(15)[3]
        return update(state, batch._replace(returns=batch.returns + noise * mask, logits=np.float32(logits)))

    before, same, other = update(state, batch), with_noise(junk), with_noise(~junk)
    jax.tree.map(np.testing.assert_array_equal, before, same)
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (before.params, other.params)), strict=True))


def train(folder, **flags):
    return ppg.main(replace(ARGS, run_dir=str(folder), num_devices=1, **flags)).path


@pytest.mark.slow
def test_auxiliary_phase_before_its_first_step_rebuilds_the_old_policy(tmp_path, monkeypatch):
    """Without a step a sample's policy is that before the phase, whatever its place in rollouts and minibatches."""
    make = ppg.init_state

    def sharpened(*given):  # the policy's head: it is nearly uniform at first, and no fault would show
        state = make(*given)
        return state._replace(params=jax.tree.map(lambda x: 300 * x if x.shape == (16, 15) else x, state.params))

    monkeypatch.setattr(ppg, "init_state", sharpened)
    # The policy phase, of the steps up to 64, moves the policy; the auxiliary phase after it does not.
    lines = read_metrics(train(tmp_path, learning_rate="0:0.003,40:0.003,41:0", total_timesteps=100))
    (kl,) = [line["losses/aux_phase_kl"] for line in lines if "losses/aux_phase_kl" in line]
    assert abs(kl) < 1e-6


@pytest.mark.slow
def test_auxiliary_phase_that_diverges_stops_the_run_without_a_checkpoint(tmp_path):
    with pytest.raises(runs.DivergedError, match="param_norm"):
        train(tmp_path, learning_rate="0:0.003,32:0.003,33:1e35", checkpoint_every=1)
    assert not [*tmp_path.glob("*/checkpoints/[0-9]*")]


@pytest.mark.optimised
def test_auxiliary_phase_continues_where_a_signal_stops_it(tmp_path, monkeypatch):
    flags = {"total_timesteps": 150, "augment": "translate", "dropout": 0.1, "frame_stack": 2, "aux_epochs": 8}
    whole = train(tmp_path / "whole", **flags)
    lines = [line for line in read_metrics(whole) if "losses/aux_phase_kl" in line]
    assert len(lines) == 2
    assert all(0 < line["losses/aux_phase_kl"] < 0.05 for line in lines)

    gather, calls = ppg.gather, []

    def stop_and_gather(*given):
        calls.append(given)
        if len(calls) == 21:  # in the sixth epoch of the first phase, of 4 minibatches each
            os.kill(os.getpid(), signal.SIGTERM)
        return gather(*given)

    with monkeypatch.context() as patch:
        patch.setattr(ppg, "gather", stop_and_gather)
        path = train(tmp_path / "stopped", **flags)
    _, tree = checkpoints.load(path)
    assert tree["state"]["aux_updates"] == len(calls) == 21
    ppg.main(replace(ARGS, resume=str(path), run_dir=str(tmp_path / "stopped"), num_devices=1, **flags))
    assert_same_run(whole, path)
