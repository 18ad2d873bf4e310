"""What the scripts share: augmentations, networks, flags, optimisers, trackers."""

import importlib
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Annotated
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tyro
import wandb
from annotated_types import Interval
from conftest import FULL_PRECISION, matmuls
from test_hnppo_math import random_rollout
from test_scripts import FLAGS

import hnppo_doorgym as hn
import impala_procgen as impala
import ppg_procgen as ppg
import ppo_procgen as ppo
from benchmarks import gpu_plan
from common import actors, augment, devices, envs, files, networks, runs, tracking
from common.flags import PositiveInt
from common.networks import EncoderArgs
from experiments import trials

# AUGMENTATION


def test_transforms_and_whether_they_are_used_are_drawn_independently():
    keys = jax.random.split(jax.random.PRNGKey(0), 1000)
    x = np.random.default_rng(0).integers(0, 256, (1, 64, 64, 3), np.uint8).repeat(1000, axis=0)
    got = np.asarray(augment.augment(augment.AugmentArgs("flip", 0.5), keys, x))
    across, down = ((got == want).all(axis=(1, 2, 3)).mean() for want in (x[:, :, ::-1], x[:, ::-1]))
    assert [across, down] == pytest.approx([0.25, 0.25], abs=0.04)


def test_a_cutouts_sides_are_of_10_to_30_pixels():
    white, keys = jnp.full((64, 64, 3), 255, jnp.uint8), jax.random.split(jax.random.PRNGKey(3), 200)
    black = np.asarray(jax.vmap(augment.cutout, (0, None))(keys, white))[..., 0] == 0
    sides = np.concatenate([black.any(axis=1).sum(axis=1), black.any(axis=2).sum(axis=1)])
    assert (sides.min(), sides.max()) == (10, 30)


# NETWORKS


def shapes_of(spec):
    frames = jnp.zeros((1, 64, 64, 3), jnp.uint8)
    return jax.eval_shape(networks.make_encoder(spec).init, jax.random.PRNGKey(0), frames)["params"]


def inverted(c, out):
    return 4 * c * (c + 4 + 9 + out) + 2 * out


SE = 9 * (3 * 64 + 64 * 64) + 3 * 64 + (64 * 8 + 8 + 8 * 64 + 64) + (2 * 64 * 8 + 64 * 64 + 1) + 65 * 256
PAIRS = [(8, 8), (8, 8), (8, 12), (12, 12), (12, 16), (16, 16), (16, 32), (32, 32)]


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        (EncoderArgs("mobilenet", width=1), 232 + sum(inverted(*p) for p in PAIRS) + 32 * 128 + 256 + 129 * 256),
        (EncoderArgs("xresnet:[64,2],se,sa1"), SE),
        (EncoderArgs("xresnet:[64,2],se,sa"), SE),
        (
            EncoderArgs("xresnet:stem,[32,2],[64,1]"),
            9 * (3 * 32 + 2 * 32 * 32 + 32 * 64 + 64 * 64) + 32 * 64 + 65 * 256,
        ),
    ],
)
def test_an_encoders_parameters_are_those_counted_by_hand(spec, want):
    assert sum(x.size for x in jax.tree.leaves(shapes_of(spec))) == want


def test_attention_changes_nothing_at_first():
    encoder = networks.make_encoder(EncoderArgs("xresnet:[8,2],sa1", hidden=8))
    params = encoder.init(jax.random.PRNGKey(0), jnp.zeros((1, 16, 16, 3), jnp.uint8))["params"]
    assert params["attention_0"] == 0


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_cores_products_are_in_full_float32_on_a_gpu_too(kind):
    core = networks.init_hidden_state(kind, 8, 2)
    module, x, first = networks.Recurrent(kind, 8), np.zeros((2, 6, 8), np.float32), np.zeros((2, 6), bool)
    params = jax.eval_shape(module.init, jax.random.PRNGKey(0), x, first, core)
    assert matmuls(module.apply, params, x, first, core) == FULL_PRECISION


# FLAGS, OPTIMISERS, RANDOM NUMBERS


def test_a_forks_tuples_and_optional_flags_come_back_from_its_args_json(tmp_path):
    @dataclass(frozen=True)
    class Args:
        betas: tuple[Annotated[float, Interval(ge=0, le=1)], float] = (0.9, 0.999)
        parts: tuple[str, ...] = ()
        count: PositiveInt | None = None

    for args in (Args(), Args((0.8, -0.5), ("a", "b=c"))):
        files.write_json(tmp_path / "args.json", {"script": "my_fork", "args": asdict(args)})
        assert runs.saved_args(Args, str(tmp_path), "RUN_DIR") == args
        assert tyro.cli(Args, args=trials.words_of(asdict(args))) == args  # and from a sweep's
    with pytest.raises(runs.UsageError, match=r"--betas -0.5: must be from 0 to 1"):
        runs.check_flags(Args((-0.5, 7)))
    with pytest.raises(runs.UsageError, match=r"--count 0: must be 1 or more"):
        runs.check_flags(Args(count=0))


@pytest.mark.parametrize("name", FLAGS)
def test_a_forks_optimiser_may_use_the_parameters(name, monkeypatch):
    """`optax.add_decayed_weights` raises as it is traced if it does not get them."""

    def with_weight_decay():
        return optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.01))

    def make_optimizer(*args):
        if name != "hnppo_doorgym":
            return with_weight_decay()
        parts = {part: with_weight_decay() for part in ("hyper", "embedding", "log_std")}
        return optax.partition(parts, lambda learner: {part: part for part in learner})

    monkeypatch.setattr(f"{name}.make_optimizer", make_optimizer)
    script = importlib.import_module(name)
    args = script.Args(**FLAGS[name] | {"num_devices": 1})
    agent, mesh = script.make_agent(args), devices.make_mesh(args)
    if script is hn:
        state = jax.eval_shape(lambda: hn.begin_task(args, agent, hn.init_state(args, agent)))
        for update in hn.make_jitted(args, agent, mesh)[-3:-1]:
            jax.eval_shape(update, state, random_rollout(args))
        return
    gpu_plan.lowerings(script, args, mesh)["update"]()
    if script is ppg:
        ids = jnp.arange(args.num_envs)
        rollout = ppg.begin_rollout(args, envs.init_env_state(ids, args.stack_offsets), 0)
        batch = ppg.AuxBatch(rollout.frames, rollout.values, rollout.values, rollout.logits)
        jax.eval_shape(lambda: ppg.aux_update(args, agent, ppg.init_state(args, agent), batch, ids))


def test_random_numbers_are_those_of_earlier_runs():
    """JAX may choose others with its next release."""
    assert jax.random.bits(jax.random.PRNGKey(1), (4,)).tolist() == [1883912375, 2292451390, 1915204986, 1882898417]


@pytest.mark.parametrize("how", [{"deterministic": False, "max_lag": 3}, {"deterministic": True, "max_lag": 0}])
def test_each_actor_has_environments_of_its_own(how, monkeypatch):
    fleet = mock.Mock()
    monkeypatch.setattr(envs, "ReplayableVecEnv", lambda make, env_ids, seed, restart_every: env_ids.tolist())
    monkeypatch.setattr(actors, "Fleet", fleet)
    actors.make_fleet(impala.Args(num_envs=4, num_actors=2, **how), None, lambda env_ids: env_ids.tolist())
    _, vec_envs, env_states = fleet.call_args.args
    assert vec_envs == env_states == [[0, 1], [2, 3]]
    assert fleet.call_args.kwargs.items() >= how.items()


# TRACKERS


def test_wandbs_own_variable_counts_where_no_flag_does(monkeypatch):
    for logged_in in (True, False):
        monkeypatch.setattr(wandb, "login", lambda logged_in=logged_in, **options: logged_in)
        auto = "online" if logged_in else "offline"
        for said, want in {"disabled": "disabled", "offline": "offline", "": auto}.items():
            monkeypatch.setenv("WANDB_MODE", said)
            assert tracking.wandb_mode(ppo.Args()) == want
    monkeypatch.setattr(wandb, "login", mock.Mock(side_effect=OSError("no network")))
    assert tracking.wandb_mode(ppo.Args()) == "offline"
    with pytest.raises(files.UsageError, match="or no network"):
        tracking.wandb_mode(SimpleNamespace(track="wandb", wandb_mode="online"))
