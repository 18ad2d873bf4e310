"""The encoders against the same networks by hand, and the forms that are fast on a CPU against plain Flax and XLA."""

from dataclasses import replace
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import ENCODER_FLAGS, FULL_PRECISION, init_params, init_state, matmuls
from hypothesis import given, settings
from hypothesis import strategies as st
from rollouts import relaxed, seeds

import apex_procgen as apex
import impala_procgen as impala
import ppg_procgen as ppg
import ppo_procgen as ppo
import sac_procgen as sac
import trpo_procgen as trpo
from benchmarks import encoders
from common import cpu, devices, gpu, networks
from common.devices import ENV_SHARDED, REPLICATED
from common.files import UsageError
from common.networks import EncoderArgs

SMALL = EncoderArgs(width=1, hidden=8)


def gradients(function, *arrays):
    weight = np.random.default_rng(9).normal(size=jax.eval_shape(function, *arrays).shape)
    return jax.jit(jax.grad(lambda *a: (function(*a) * weight).sum(), argnums=range(len(arrays))))(*arrays)


@pytest.mark.parametrize(("size", "channels", "features", "kernel", "stride", "padding", "groups", "dilation"), [
    # Four, two and one pixels at a time; other sizes.
    (8, 3, 16, 3, 1, "SAME", 1, 1), (16, 16, 16, 3, 1, "SAME", 1, 1), (8, 32, 32, 3, 1, "SAME", 1, 1),
    (7, 4, 5, 3, 1, "SAME", 1, 1), (7, 4, 5, 4, 1, "SAME", 1, 1), (7, 4, 5, 1, 1, "SAME", 1, 1),
    # The Nature CNN's.
    (64, 6, 32, 8, 4, "VALID", 1, 1), (15, 32, 64, 4, 2, "VALID", 1, 1), (6, 64, 64, 3, 1, "VALID", 1, 1),
    # Strides that do not divide the kernel.
    (9, 4, 5, 3, 2, "VALID", 1, 1), (8, 4, 5, 3, 2, "SAME", 1, 1), (7, 4, 5, 3, 2, "SAME", 1, 1),
    (8, 4, 5, 1, 2, "SAME", 1, 1), (7, 4, 5, 5, 3, "SAME", 1, 1),
    # Depthwise, with one to three filters a channel; other groups; dilation.
    (8, 4, 4, 3, 1, "SAME", 4, 1), (7, 4, 4, 3, 2, "SAME", 4, 1), (8, 4, 12, 3, 2, "SAME", 4, 1),
    (9, 4, 8, 4, 2, "VALID", 4, 1), (8, 4, 6, 3, 1, "SAME", 2, 1), (8, 3, 4, 3, 1, "SAME", 1, 2),
])  # fmt: skip
def test_convolution_of_any_form_equals_xla(size, channels, features, kernel, stride, padding, groups, dilation):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, size, size, channels)).astype(np.float32)
    w = rng.normal(size=(kernel, kernel, channels // groups, features)).astype(np.float32)
    options = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": groups}
    options["rhs_dilation"] = (dilation, dilation)
    ours, xla = (
        lambda x, w, convolve=convolve: convolve(x, w, (stride, stride), padding, **options)
        for convolve in (cpu.conv_general_dilated, jax.lax.conv_general_dilated)
    )
    np.testing.assert_allclose(jax.jit(ours)(x, w), xla(x, w), rtol=1e-4, atol=1e-4)
    for got, want in zip(gradients(ours, x, w), gradients(xla, x, w), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


@settings(max_examples=16, deadline=None)
@given(
    st.sampled_from([networks.max_pool, gpu.max_pool]),
    st.sampled_from(["float32", "bfloat16"]),
    *[st.sampled_from([1, 2, 3, 5, 8, 9, 64])] * 2,
    seeds,
)
def test_max_pool_with_ties_equals_flax(pool, dtype, height, width, seed):
    """The first of equal pixels gets the gradient: small whole numbers, which add up in bfloat16 in any order."""
    rng, flax = np.random.default_rng(seed), partial(nn.max_pool, window_shape=(3, 3), strides=(2, 2), padding="SAME")
    x, g = (rng.integers(-3, 3, (2, *size, 3)) for size in ((height, width), (-(-height // 2), -(-width // 2))))

    @partial(jax.jit, static_argnums=0)
    def value_and_gradient(pool, x, g):
        value, backward = jax.vjp(pool, x)
        return value, backward(g)[0]

    x, g = jnp.asarray(x, dtype), jnp.asarray(g, dtype)
    jax.tree.map(np.testing.assert_array_equal, value_and_gradient(pool, x, g), value_and_gradient(flax, x, g))


@pytest.mark.parametrize("channels", [3, 6, 8])
def test_convolution_with_channels_of_zeros_on_gpu_equals_lax(channels):
    """Bit for bit in bfloat16: small whole numbers, which add up in any order."""
    rng = np.random.default_rng(0)
    shapes = (513, 6, 5, channels), (3, 3, channels, 4), (513, 6, 5, 4)
    x, w, g = (jnp.asarray(rng.integers(-1, 2, shape) * (rng.random(shape) < 0.01), jnp.bfloat16) for shape in shapes)
    numbers = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}

    def value_and_gradients(convolve):
        value, backward = jax.vjp(lambda x, w: convolve(x, w, (1, 1), "SAME", **numbers), x, w)
        return value, *backward(g)

    ours, want = value_and_gradients(gpu.conv_general_dilated), value_and_gradients(jax.lax.conv_general_dilated)
    jax.tree.map(np.testing.assert_array_equal, ours, want)


def test_max_pool_on_gpu_of_nan_is_nan():
    x = np.zeros((1, 8, 8, 1), np.float32)
    x[0, 3, 4] = np.nan
    want = nn.max_pool(x, (3, 3), (2, 2), "SAME")
    np.testing.assert_array_equal(gpu.max_pool(x), want)
    assert np.isnan(want).any()


@pytest.mark.parametrize("on_cpu", [True, False])
def test_relu_on_cpu_or_gpu_equals_jax(on_cpu, monkeypatch):
    monkeypatch.setattr(devices, "on_cpu", lambda: on_cpu)
    x = np.array([-2, -0.0, 0, 1e-30, 3], np.float32)
    np.testing.assert_array_equal(networks.relu(x), nn.relu(x))
    np.testing.assert_array_equal(gradients(networks.relu, x)[0], gradients(nn.relu, x)[0])


def test_small_parts_of_an_update_on_gpu_equal_those_on_cpu(monkeypatch):
    rng = np.random.default_rng(0)
    tree = {"a": rng.normal(size=(3, 4)).astype(np.float32), "b": rng.normal(size=5).astype(np.float32)}

    def results():
        clips = [devices.clip_by_global_norm(norm) for norm in (0.5, 100.0)]
        clipped = [clip.update(tree, clip.init(tree)) for clip in clips]  # with states: checkpoints fit either
        chosen = [devices.cond(jnp.bool_(x), lambda t: t, lambda t: jax.tree.map(jnp.exp, t), tree) for x in (0, 1)]
        return devices.global_norm(tree), clipped, chosen, devices.optimization_barrier(tree)

    want = results()
    monkeypatch.setattr(devices, "on_cpu", lambda: False)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), results(), want)


GRADIENTS = {
    "impala": replace(SMALL, channels="8,8"),
    "nature": replace(SMALL, encoder="nature", pool="flatten"),
    "strides": replace(SMALL, channels="8,8", downsample="stride", pool="max"),
    # Smooth, since near ties of a max-pool are decided by rounding.
    "separable": replace(
        SMALL, channels="16,32", blocks=1, separable=2, norm="group", downsample="stride", activation="gelu"
    ),
    "xresnet": replace(SMALL, encoder="xresnet:stem,[8,2],[8,1],[16,2],se,sa1"),
}
SLOW_GRADIENTS = {"separable", "strides"}


@pytest.mark.parametrize(("name", "size"), [
    ("nature", 5),
    *[pytest.param(name, 32, marks=pytest.mark.slow if name in SLOW_GRADIENTS else ()) for name in GRADIENTS],
])  # fmt: skip
def test_gradient_in_chunks_over_devices_equals_whole(name, size, monkeypatch):
    """Over four devices (one where they have no even share), against what one accelerator computes."""
    rng = np.random.default_rng(0)
    encoder = networks.make_encoder(GRADIENTS[name])
    frames, target = rng.integers(0, 256, (size, 64, 64, 3), np.uint8), rng.normal(size=(size, 8))
    params, weight = randomized(rng, init_params(encoder, frames[:1])), rng.random((size, 1)) < 0.7

    def loss(params, batch):
        error = ((encoder.apply(params, batch[0]) - batch[1]) ** 2).sum(axis=1, keepdims=True)
        return {"loss": error, "double": 2 * error}

    def gradient(num_devices):
        gradient = jax.shard_map(
            lambda *given: devices.gradient(loss, *given),
            mesh=devices.make_mesh(ppo.Args(num_devices=num_devices)),
            in_specs=(REPLICATED, ENV_SHARDED, ENV_SHARDED),
            out_specs=(REPLICATED, REPLICATED, ENV_SHARDED),
            check_vma=False,
        )
        return jax.jit(gradient)(params, (frames, target), weight)

    got = gradient(1 if size % 4 else 4)
    outputs = jax.jit(lambda params: devices.map_in_chunks(partial(encoder.apply, params), frames))(params)
    monkeypatch.setattr(devices, "on_cpu", lambda: False)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(gradient(1)), strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-3, atol=2e-3 * np.abs(w).max())
    np.testing.assert_allclose(outputs, jax.jit(encoder.apply)(params, frames), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("in_chunks", [False, True])
def test_gradient_of_loss_without_terms_per_sample_says_what_to_return(in_chunks):
    """A mean taken too early would make the result depend on how many samples a core takes at a time."""
    params, x = jnp.ones(3), np.random.default_rng(0).normal(size=(32, 1, 3)).astype(np.float32)

    def gradient(loss):
        return devices.gradient(loss, params, x, np.ones((32, 1)), in_chunks=in_chunks)

    def error(params, x):
        return (x @ params) ** 2

    grads, means, terms = gradient(lambda params, x: {"loss": error(params, x)})
    np.testing.assert_allclose(grads, jax.grad(lambda params: error(params, x).mean())(params), rtol=1e-5)
    np.testing.assert_allclose(means["loss"], terms["loss"].mean(), rtol=1e-5)
    np.testing.assert_allclose(terms["loss"], error(params, x), rtol=1e-5)
    for loss, words in (
        (lambda params, x: {"loss": error(params, x).mean()}, r"term 'loss' has shape \[\]; leave out the mean"),
        (lambda params, x: {"loss": error(params, x), "kl": x[:, 0]}, r"per sample, .* term 'kl' has shape \[\d+, 3\]"),
        (lambda params, x: {"loss": error(params, x), "kl": x}, r"term 'kl' has shape \[\d+, 1, 3\]; sum it over"),
        (lambda params, x: error(params, x).mean(), "returns a dict of terms per sample"),
        (lambda params, x: {"policy_loss": error(params, x)}, "one of them 'loss'"),
    ):
        with pytest.raises(ValueError, match=words):
            gradient(loss)


# PARAMETERS TO ACT WITH


def make_acting(**flags):
    """An agent, its parameters, their acting forms, and inputs."""
    args, rng = ppo.Args(hidden=8, **flags), np.random.default_rng(0)
    agent = ppo.make_agent(args)
    params = randomized(rng, init_state(ppo, args, agent).params["agent"])
    frames = rng.integers(0, 256, (2, 64, 64, 3 * len(args.stack_offsets)), np.uint8)
    acting = networks.acting_agent(agent), networks.acting_params(agent, params)
    return (agent, params), acting, (frames, np.ones(2, bool), ())


@pytest.mark.parametrize(
    "flags", [{"channels": "4", "blocks": 1, "norm": "group"}, {"encoder": "xresnet:[8,2],se,sa1"}]
)
def test_acting_params_of_bfloat16_encoder_give_bit_identical_outputs(flags, monkeypatch):
    """Operation by operation: a CPU's compiler may leave out a rounding to bfloat16 in one program, not in another."""
    (agent, params), (_, acting), inputs = make_acting(**flags, dtype="bfloat16")
    jax.tree.map(np.testing.assert_array_equal, agent.apply(acting, *inputs), agent.apply(params, *inputs))
    changed = [str(path) for path, x in jax.tree_util.tree_leaves_with_path(acting) if x.dtype == jnp.bfloat16]
    assert all("encoder" in path for path in changed)
    assert len(changed) >= 5
    monkeypatch.setattr(devices, "on_cpu", lambda: False)  # there cuDNN's layout besides
    on_gpu = networks.acting_params(agent, params)
    jax.tree.map(np.testing.assert_array_equal, on_gpu, acting)
    assert {x.format.layout.major_to_minor for x in jax.tree.leaves(on_gpu) if x.ndim == 4} == {(3, 0, 1, 2)}


def test_acting_params_of_float32_or_unknown_encoder_are_the_learners_themselves():
    agent, params = ppo.make_agent(ppo.Args(width=1, hidden=8)), {"params": {"encoder": {"kernel": jnp.ones(3)}}}
    for encoder in (agent.encoder, nn.Dense(8), nn.Sequential([agent.encoder, nn.Dense(8)])):  # .layers may be a list
        assert networks.acting_params(agent.clone(encoder=encoder), params) is params


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_acting_agent_with_spectral_norm_does_not_divide_again(dtype, tolerance):
    """Its kernels are divided already: what is not divided changes its outputs."""
    flags = {"channels": "4,8", "blocks": 1, "spectral_norm": True, "dtype": dtype}
    (agent, params), (acting_agent, acting), inputs = make_acting(**flags)
    apply = jax.jit(lambda agent, params: agent.apply(params, *inputs)[:2], static_argnums=0)
    want, got, undivided = apply(agent, params), apply(acting_agent, acting), apply(acting_agent, params)
    for x, y, z in zip(want, got, undivided, strict=True):
        np.testing.assert_allclose(y, x, rtol=tolerance, atol=tolerance)
        assert np.abs(z - x).max() > 2 * tolerance


# ENCODERS


def randomized(rng, params):
    """Nothing starts at 0 or 1, where a mistake would not show."""
    return jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype(np.float32), params)


SILU = {"act": lambda x: x / (1 + np.exp(-x))}
BY_HAND = {
    "impala": ({"channels": "4,6"}, oracle.impala_cnn, (2, 2, "avg"), {}),
    "impala, flattened":
        ({"channels": "4", "blocks": 1, "pool": "flatten", "conv_bias": "no"},
         oracle.impala_cnn, (1, 1, "flatten"), {}),
    "impala, averaged late":
        ({"channels": "4", "blocks": 1, "pool": "act_avg", "activation": "silu"},
         oracle.impala_cnn, (1, 1, "act_avg"), SILU),
    "impala, in parts":
        ({"channels": "4", "blocks": 0, "pool": "max6", "center": "no"},
         oracle.impala_cnn, (1, 0, "max6"), {"center": False}),
    "impala, strides":
        ({"channels": "4,6", "blocks": 0, "downsample": "stride", "pool": "max"},
         oracle.impala_cnn, (2, 0, "max"), {"by_stride": True}),
    "impala, separable":
        ({"channels": "4,6", "blocks": 1, "separable": 2, "norm": "group"},
         oracle.impala_cnn, (2, 1, "avg"), {"separable": True, "norm": True}),
    "xresnet": ({"encoder": "xresnet:[4,2],[4,1],[6,1]"}, oracle.xresnet, ([(4, 2), (4, 1), (6, 1)],), {}),
    "xresnet, everything":
        ({"encoder": "xresnet:stem, [4,1], [6, 2]x2, se, sa2", "downsample": "maxpool"},
         oracle.xresnet, ([(4, 1), (6, 2), (6, 2)], True, True, 2, True), {}),
    "xresnet, flattened":
        ({"encoder": "xresnet:[4,2],[4,1]", "pool": "flatten", "activation": "silu"},
         oracle.xresnet, ([(4, 2), (4, 1)],), {"pool": "flatten"} | SILU),
    "mobilenet": ({"encoder": "mobilenet", "channels": "4,6"}, oracle.mobilenet, (2, 2), {}),
    "nature": ({"encoder": "nature", "channels": "2,3,4", "pool": "flatten"}, oracle.nature_cnn, ("flatten",), {}),
    "nature, averaged": ({"encoder": "nature", "channels": "2,3,4"}, oracle.nature_cnn, ("avg",), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_encoder_with_random_parameters_equals_float64_by_hand(name):
    flags, by_hand, given, options = BY_HAND[name]
    spec = replace(SMALL, **flags)
    rng = np.random.default_rng(0)
    size = 64 if spec.encoder == "nature" else 16
    frames = rng.integers(0, 256, (2, size, size, 3), np.uint8)
    encoder = networks.make_encoder(spec)
    params = randomized(rng, init_params(encoder, frames))
    want, used = by_hand(params["params"], frames, *given, **options)
    assert used == len(params["params"])
    assert (want > 0).mean() > 0.2  # not all features are dead
    np.testing.assert_allclose(jax.jit(encoder.apply)(params, frames), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("spec", "parameters"), [  # convolutions, then the dense layer
    (EncoderArgs(width=1, pool="flatten"), 448 + 4 * 2320 + 4640 + 4 * 9248 + 9248 + 4 * 9248 + (2048 + 1) * 256),
    (EncoderArgs(width=1), 448 + 4 * 2320 + 4640 + 4 * 9248 + 9248 + 4 * 9248 + (32 + 1) * 256),
    (EncoderArgs("nature", width=1, pool="flatten"), 6176 + 32832 + 36928 + (1024 + 1) * 256),
    (EncoderArgs("xresnet:[32,2],[64,1]"), 9 * 32 * (3 + 32 + 64 + 2 * 64) + 3 * 32 + 32 * 64 + 65 * 256),
])  # fmt: skip
def test_cost_of_encoder_counts_parameters_arithmetic_and_memory(spec, parameters):
    assert encoders.cost(spec, channels=3)["parameters"] == parameters
    if spec.encoder == "nature":
        cost, outputs = encoders.cost(spec, channels=6), (15 * 15 * 32, 6 * 6 * 64, 4 * 4 * 64, 256)
        madds = np.dot(outputs, (8 * 8 * 6, 4 * 4 * 32, 3 * 3 * 64, 1024))
        assert cost["MFLOP"] == pytest.approx(2 * madds / 1e6, rel=0.05)
        kept = 4 * (64 * 64 * 6 + sum(outputs)) / 1024  # float32 inputs of each layer, and masks of the nonlinearities
        assert kept < cost["KiB kept"] < 1.5 * kept


@pytest.mark.parametrize("script", [ppo, trpo, ppg, impala, apex, sac], ids=lambda script: script.SCRIPT)
def test_agent_with_another_encoder_flag_is_another_network(script):
    def agent(**flags):
        return script.make_agent(script.Args(**{"channels": "4,4"} | flags))

    assert agent() == agent()
    assert [flag for flag, value in ENCODER_FLAGS.items() if agent(**{flag: value}) == agent()] == []


def test_encoder_of_auto_dtype_is_bfloat16_on_gpu_alone(monkeypatch):
    frames = jnp.zeros((2, 64, 64, 3), jnp.uint8)
    for on_cpu, dtype in ((True, "float32"), (False, "bfloat16")):
        monkeypatch.setattr(devices, "on_cpu", lambda on_cpu=on_cpu: on_cpu)
        for spec in (SMALL, GRADIENTS["nature"], GRADIENTS["xresnet"]):
            encoder = networks.make_encoder(spec)
            params = jax.eval_shape(encoder.init, jax.random.PRNGKey(0), frames)
            assert {x for x, _ in matmuls(encoder.apply, params, frames)} == {dtype}


@relaxed
@given(seeds, st.sampled_from([(3, 3, 16, 32), (3, 3, 32, 8), (1, 1, 4, 4)]))
def test_largest_singular_value_of_random_kernel_equals_numpy(seed, shape):
    """And its slope u v'."""
    kernel = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    u, values, v = np.linalg.svd(kernel.reshape(-1, shape[3]).astype(np.float64), full_matrices=False)
    got, slope = jax.value_and_grad(networks.largest_singular_value)(kernel)
    # After 256 steps two values that lie closer than a hundredth are not told apart, which changes little.
    np.testing.assert_allclose(got, values[0], rtol=3e-3)
    assert got <= values[0] * (1 + 1e-5)
    if values[1] < 0.95 * values[0]:
        np.testing.assert_allclose(slope.reshape(-1, shape[3]), np.outer(u[:, 0], v[0]), atol=2e-3)


def test_largest_singular_value_on_gpu_is_in_full_precision():
    assert matmuls(networks.largest_singular_value, jnp.ones((3, 3, 4, 4))) == FULL_PRECISION


def test_encoder_with_spectral_norm_divides_residual_kernels_by_numpys_norm():
    encoder = networks.make_encoder(EncoderArgs(channels="4,8", blocks=1, hidden=8, spectral_norm=True))
    frames = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), np.uint8)
    params = init_params(encoder, frames)
    divided = jax.tree.map(jnp.copy, params)
    for i in range(4):
        kernel = params["params"][f"SpectralConv_{i}"]["kernel"]
        norm = np.linalg.svd(np.reshape(kernel, (-1, kernel.shape[3])), compute_uv=False)[0]
        divided["params"][f"SpectralConv_{i}"]["kernel"] = kernel / norm
    done = encoder.clone(layers=replace(encoder.layers, residual_norm="divided"))
    want = jax.jit(done.apply)(divided, frames)
    np.testing.assert_allclose(jax.jit(encoder.apply)(params, frames), want, rtol=5e-3, atol=1e-4)


def test_l2_of_convolutions_adds_gradient_of_squares():
    rng = np.random.default_rng(0)
    params = {"kernel": rng.normal(size=(3, 3, 2, 4)), "dense": rng.normal(size=(4, 5)), "bias": rng.normal(size=4)}
    grads = jax.tree.map(lambda x: rng.normal(size=x.shape), params)
    got = networks.add_l2(grads, params, 0.1)
    np.testing.assert_allclose(got["kernel"], grads["kernel"] + 0.2 * params["kernel"])
    assert all((got[name] == grads[name]).all() for name in ("dense", "bias"))
    assert networks.add_l2(grads, params, 0.0) is grads


@pytest.mark.parametrize("size", [6, 8, 11])
def test_adaptive_max_pool_of_uneven_parts_equals_oracle(size):
    x = np.random.default_rng(0).normal(size=(2, size, size + 1, 3)).astype(np.float32)
    np.testing.assert_array_equal(networks.adaptive_max_pool(x, 6), oracle.max_in_parts(x, 6))


def test_initial_weights_of_each_initializer_have_its_variance():
    for init, want in {"glorot": 2 / (32 + 64), "kaiming": 2 / 32, "orthogonal": 2 / 64}.items():
        encoder = networks.make_encoder(EncoderArgs(width=1, hidden=64, init=init))
        params = init_params(encoder, jnp.zeros((1, 64, 64, 3), jnp.uint8))
        kernel = np.asarray(params["params"]["Dense_0"]["kernel"])
        assert kernel.var() == pytest.approx(want, rel=0.15), init
    np.testing.assert_allclose(kernel @ kernel.T, 2 * np.eye(32), atol=1e-5)  # orthogonal, gain sqrt(2)


def test_initial_weights_and_biases_as_pytorchs_are_uniform():
    """torch.nn.Conv2d and Linear: both within 1 / sqrt(fan-in), where a depthwise kernel has one input channel."""
    encoder = networks.make_encoder(replace(SMALL, channels="64", blocks=0, separable=8, hidden=256, init="pytorch"))
    layers = init_params(encoder, jnp.zeros((1, 16, 16, 3), jnp.uint8))["params"]
    assert layers["Conv_0"]["kernel"].shape == (3, 3, 1, 24)
    assert "bias" not in layers["Conv_0"]
    for name, fan_in in {"Conv_0": 9, "Conv_1": 24, "Dense_0": 64}.items():
        for values in layers[name].values():
            bound = 1 / np.sqrt(fan_in)
            assert 0.9 * bound < np.abs(values).max() <= bound
            assert np.std(values) == pytest.approx(bound / np.sqrt(3), rel=0.25)
    assert "bias" in layers["Conv_1"]


@pytest.mark.parametrize(("flags", "words"), [
    *[({"encoder": text}, f"--encoder {text}: {words}") for text, words in {
        "imapla": "give impala, nature, mobilenet", "xresnet": "give", "xresnet:": "'' is neither [channels,stride]",
        "xresnet:se": "has no blocks", "xresnet:[32,3]": "'[32,3]' is neither", "xresnet:[0,1]": "'[0,1]' is neither",
        "xresnet:[5000,1]": "'[5000,1]' is neither", "xresnet:[32,2]x0": "'[32,2]x0' is neither",
        "xresnet:[32,1]x100": "'[32,1]x100' is neither", "xresnet:[32,2": "'[32' is neither",
        "xresnet:[32,2],sa0": "'sa0' is neither", "xresnet:[32,2],[32,1]x4,sa9": "sa9 is more than its 5 blocks",
        "xresnet:[32,2]x6": "halves the 64 x 64 frame 6 times; at most 5", "xresnet:[32,1],se,se": "has 'se' twice",
        "xresnet:[32,1]x99,[32,1]x99,[32,1]x99": "has 297 blocks",
    }.items()],
    ({"channels": "32,,64"}, "--channels 32,,64: give 1 to 5 numbers from 1 to 4096, such as 16,32,32"),
    ({"channels": "32,64", "encoder": "nature"}, "--channels 32,64: give 3 numbers"),
    ({"channels": "8,8", "encoder": "xresnet:[32,2]"}, "--channels 8,8: only impala and nature and mobilenet have it"),
    ({"blocks": 3, "encoder": "nature"}, "--blocks 3: only impala and mobilenet have it, not nature"),
    ({"downsample": "stride", "encoder": "nature"}, "leave it at auto"),
    ({"separable": 1, "encoder": "mobilenet"}, "--separable 1: only"),
    ({"width": 1, "channels": "8,8"}, "--width 1: has no effect where --channels"),
    ({"width": 1, "encoder": "xresnet:[32,2]"}, "--width 1: only"),
    ({"pool": "act_avg", "encoder": "nature"}, "--pool act_avg: only impala"),
    ({"spectral_norm": True, "separable": 1}, "--spectral-norm: needs"),
    ({"spectral_norm": True, "blocks": 0}, "--spectral-norm: needs"),
])  # fmt: skip
def test_encoder_flags_that_make_no_network_are_answered_in_one_sentence(flags, words):
    with pytest.raises(UsageError) as error:
        EncoderArgs(**flags).check()
    assert words in str(error.value)
    assert "\n" not in str(error.value)


# DROPOUT AND RECURRENT CORES


def test_dropout_of_features_drops_fraction_and_keeps_mean():
    keys = jax.random.split(jax.random.PRNGKey(0), 64)
    x = jnp.ones((64, 256))
    y = np.asarray(networks.dropout(x, keys, 0.25))
    assert set(np.unique(y)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs(y.mean() - 1) < 0.02
    assert len(np.unique(y, axis=0)) == 64  # each sample its own
    np.testing.assert_array_equal(networks.dropout(x, None, 0.25), x)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_recurrent_core_at_first_frame_alone_forgets(kind):
    rng, core = np.random.default_rng(0), networks.init_hidden_state(kind, 8, 2)
    module = networks.Recurrent(kind, 8)
    x = rng.normal(size=(2, 6, 8)).astype(np.float32)
    start = jax.tree.map(lambda c: rng.normal(size=c.shape).astype(np.float32), core)
    params = init_params(module, x, np.zeros((2, 6), bool), core)
    first = np.zeros((2, 6), bool)
    first[:, 3] = True
    whole, end = module.apply(params, x, first, start)
    early, _ = module.apply(params, x[:, :3], first[:, :3], start)
    late, last = module.apply(params, x[:, 3:], first[:, 3:] & False, core)
    np.testing.assert_allclose(whole, np.concatenate([early, late], axis=1), rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), end, last)
    unreset = module.apply(params, x, first & False, start)[0]
    assert np.abs(unreset[:, 3:] - whole[:, 3:]).min() > 0
