"""The encoders against the same networks by hand, and the forms that are fast on a CPU against plain Flax and XLA."""

from dataclasses import replace
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import ENCODER_FLAGS, init_params
from hypothesis import given, settings
from hypothesis import strategies as st

import apex_procgen as apex
import impala_procgen as impala
import ppo_procgen as ppo
import sac_procgen as sac
import trpo_procgen as trpo
from benchmarks import encoders
from common import cpu, devices, gpu, networks, runs
from common.devices import GAMES, SAME
from common.files import UsageError
from common.networks import EncoderArgs

relaxed = settings(deadline=None, max_examples=20)
SMALL = EncoderArgs(width=1, hidden=8)


def gradients(function, *arrays):
    weight = np.random.default_rng(9).normal(size=jax.eval_shape(function, *arrays).shape)
    return jax.jit(jax.grad(lambda *a: (function(*a) * weight).sum(), argnums=range(len(arrays))))(*arrays)


@pytest.mark.parametrize(
    ("size", "channels", "features", "kernel", "stride", "padding", "groups"),
    [
        (8, 3, 16, 3, 1, "SAME", 1),  # four pixels at a time
        (16, 16, 16, 3, 1, "SAME", 1),  # two
        (8, 32, 32, 3, 1, "SAME", 1),  # one
        (7, 4, 5, 3, 1, "SAME", 1),
        (7, 4, 5, 4, 1, "SAME", 1),
        (7, 4, 5, 1, 1, "SAME", 1),
        (64, 6, 32, 8, 4, "VALID", 1),  # the Nature CNN's three
        (15, 32, 64, 4, 2, "VALID", 1),
        (6, 64, 64, 3, 1, "VALID", 1),
        (9, 4, 5, 3, 2, "VALID", 1),  # strides that do not divide the kernel
        (8, 4, 5, 3, 2, "SAME", 1),
        (7, 4, 5, 3, 2, "SAME", 1),
        (8, 4, 5, 1, 2, "SAME", 1),
        (7, 4, 5, 5, 3, "SAME", 1),
        (8, 4, 4, 3, 1, "SAME", 4),  # one filter a channel
        (7, 4, 4, 3, 2, "SAME", 4),
        (8, 4, 12, 3, 2, "SAME", 4),  # three
        (9, 4, 8, 4, 2, "VALID", 4),
        (8, 4, 6, 3, 1, "SAME", 2),  # no fast form
    ],
)
def test_convolution_equals_xla(size, channels, features, kernel, stride, padding, groups):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, size, size, channels)).astype(np.float32)
    w = rng.normal(size=(kernel, kernel, channels // groups, features)).astype(np.float32)
    layout = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": groups}

    def ours(x, w):
        return cpu.conv_general_dilated(x, w, (stride, stride), padding, **layout)

    def theirs(x, w):
        return jax.lax.conv_general_dilated(x, w, (stride, stride), padding, **layout)

    np.testing.assert_allclose(jax.jit(ours)(x, w), theirs(x, w), rtol=1e-4, atol=1e-4)
    for got, want in zip(gradients(ours, x, w), gradients(theirs, x, w), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)
    fast = groups in (1, channels) and not kernel == stride == 1
    assert ("custom_vjp" in str(jax.make_jaxpr(ours)(x, w))) == fast


def test_dilated_convolution_is_not_taken_for_a_plain_one():
    x = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype(np.float32)
    ours, theirs = (
        nn.Conv(4, (3, 3), kernel_dilation=2, **options)
        for options in ({"conv_general_dilated": cpu.conv_general_dilated}, {})
    )
    params = init_params(ours, x)
    np.testing.assert_allclose(ours.apply(params, x), theirs.apply(params, x), rtol=1e-4, atol=1e-5)


def same_pool(ours, x, g):
    """Whether a max-pool is Flax's, and so its gradient for g; the first of equal pixels has it all."""
    theirs = partial(nn.max_pool, window_shape=(3, 3), strides=(2, 2), padding="SAME")

    @partial(jax.jit, static_argnums=0)
    def value_and_gradient(pool, x, g):
        value, backward = jax.vjp(pool, x)
        return value, backward(g)[0]

    for got, want in zip(value_and_gradient(ours, x, g), value_and_gradient(theirs, x, g), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("pool", [networks.max_pool, gpu.max_pool])
@pytest.mark.parametrize("size", [2, 5, 8, 64])
def test_max_pool_equals_flax_with_ties(pool, size):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 4, (3, size, size, 5)).astype(np.float32)  # many ties
    same_pool(pool, x, rng.integers(-9, 9, (3, -(-size // 2), -(-size // 2), 5)).astype(np.float32))
    if pool is networks.max_pool:
        assert ("name=max_pool" in str(jax.make_jaxpr(pool)(x))) == (size % 2 == 0)  # the CPU's own form


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from(["float32", "bfloat16"]), st.integers(0, 2**31))
def test_max_pool_of_any_size_equals_flax(height, width, dtype, seed):
    """Gradients are small whole numbers, so that the order of their additions does not matter in bfloat16."""
    rng, places = np.random.default_rng(seed), (-(-height // 2), -(-width // 2))
    x, g = (rng.integers(-3, 3, (2, *size, 3)) for size in ((height, width), places))
    same_pool(gpu.max_pool, jnp.asarray(x, dtype), jnp.asarray(g, dtype))


def test_max_pool_passes_on_what_is_not_a_number():
    x = np.zeros((1, 8, 8, 1), np.float32)
    x[0, 3, 4] = np.nan
    want = nn.max_pool(x, (3, 3), (2, 2), "SAME")
    np.testing.assert_array_equal(gpu.max_pool(x), want)
    assert np.isnan(want).any()


@pytest.mark.parametrize("on_cpu", [True, False])
def test_relu_equals_jax(on_cpu, monkeypatch):
    monkeypatch.setattr(devices, "on_cpu", lambda: on_cpu)
    relu = networks.relu
    x = np.array([-2, -0.0, 0, 1e-30, 3], np.float32)
    np.testing.assert_array_equal(relu(x), nn.relu(x))
    np.testing.assert_array_equal(gradients(relu, x)[0], gradients(nn.relu, x)[0])
    np.testing.assert_allclose(networks.ACTIVATIONS["elu"](x), np.where(x > 0, x, np.expm1(x)), rtol=1e-5)
    assert ("optimization_barrier" in str(jax.make_jaxpr(jax.grad(lambda x: relu(x).sum()))(x))) == (not on_cpu)


def test_small_parts_of_an_update_are_the_same_on_a_gpu(monkeypatch):
    rng = np.random.default_rng(0)
    tree = {"a": rng.normal(size=(3, 4)).astype(np.float32), "b": rng.normal(size=5).astype(np.float32)}

    def results():
        clips = [devices.clip_by_norm(most) for most in (0.5, 100.0)]
        clipped = [clip.update(tree, clip.init(tree))[0] for clip in clips]
        chosen = [devices.cond(jnp.bool_(x), lambda t: t, lambda t: jax.tree.map(jnp.exp, t), tree) for x in (0, 1)]
        return devices.norm(tree), clipped, chosen, devices.compute_once(tree)

    def states():
        return jax.tree.structure(devices.clip_by_norm(0.5).init(tree))

    want, states_before = results(), states()
    monkeypatch.setattr(devices, "on_cpu", lambda: False)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), results(), want)
    assert states() == states_before  # a checkpoint of one device is another's


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
def test_gradient_in_chunks_equals_the_whole(name, size, monkeypatch):
    """Over four devices (one where they have no even share), against what one accelerator computes."""
    rng = np.random.default_rng(0)
    encoder = networks.make_encoder(GRADIENTS[name])
    frames, target = rng.integers(0, 256, (size, 64, 64, 3), np.uint8), rng.normal(size=(size, 8))
    params = randomized(rng, init_params(encoder, frames[:1]))

    weight = rng.random((size, 1)) < 0.7

    def loss(params, batch):
        error = ((encoder.apply(params, batch[0]) - batch[1]) ** 2).sum(axis=1, keepdims=True)
        return {"loss": error, "double": 2 * error}

    def run(number):
        args = ppo.Args(num_envs=size, num_steps=1, num_minibatches=1, num_devices=number)
        spread = devices.spread([SAME, GAMES, GAMES], (SAME, SAME, GAMES))
        of = spread(lambda args, params, data, weight: devices.gradient(loss, params, data, weight))
        return jax.jit(lambda: of(args, params, (frames, target), weight))()

    got = run(1 if size % 4 else 4)
    outputs = jax.jit(lambda params: devices.in_chunks(partial(encoder.apply, params), frames))(params)
    monkeypatch.setattr(devices, "on_cpu", lambda: False)
    want = run(1)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-3, atol=2e-3 * np.abs(w).max())
    np.testing.assert_allclose(outputs, jax.jit(encoder.apply)(params, frames), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("whole", [False, True])
def test_a_loss_is_told_to_return_parts_per_sample(whole):
    """A mean taken too early would make the result depend on how many samples a core looks at."""
    params, x = jnp.ones(3), np.random.default_rng(0).normal(size=(32, 1, 3)).astype(np.float32)

    def take(loss):
        return devices.gradient(loss, params, x, np.ones((32, 1)), whole=whole)

    def error(params, x):
        return (x @ params) ** 2

    grads, means, parts = take(lambda params, x: {"loss": error(params, x)})
    np.testing.assert_allclose(grads, jax.grad(lambda params: error(params, x).mean())(params), rtol=1e-5)
    np.testing.assert_allclose(means["loss"], parts["loss"].mean(), rtol=1e-5)
    np.testing.assert_allclose(parts["loss"], error(params, x), rtol=1e-5)
    for loss, words in (
        (lambda params, x: {"loss": error(params, x).mean()}, r"part 'loss' has shape \[\]; leave out the mean"),
        (lambda params, x: {"loss": error(params, x), "kl": x[:, 0]}, r"per sample, .* part 'kl' has shape \[\d+, 3\]"),
        (lambda params, x: {"loss": error(params, x), "kl": x}, r"part 'kl' has shape \[\d+, 1, 3\]; sum it over"),
        (lambda params, x: error(params, x).mean(), "returns a dict of parts per sample"),
        (lambda params, x: {"policy_loss": error(params, x)}, "one of them 'loss'"),
    ):
        with pytest.raises(ValueError, match=words):
            take(loss)


def test_accelerators_get_plain_convolutions_in_bfloat16():
    with encoders.plain_flax():
        for spec in GRADIENTS.values():
            encoder = networks.make_encoder(spec)
            program = str(jax.make_jaxpr(encoder.init)(jax.random.PRNGKey(0), jnp.zeros((2, 64, 64, 6), jnp.uint8)))
            assert "custom_vjp" not in program
            assert "bf16" in program


@pytest.mark.parametrize(
    "flags", [{"channels": "4", "blocks": 1, "norm": "group"}, {"encoder": "xresnet:[8,2],se,sa1"}]
)
def test_parameters_to_act_with_give_the_same_bit_for_bit(flags):
    """Operation by operation: a CPU's compiler may leave out a rounding to bfloat16 in one program, not in another."""
    args = ppo.Args(**flags, hidden=8, dtype="bfloat16")
    agent = ppo.make_agent(args)
    shapes = jax.eval_shape(lambda: ppo.initial_state(args, agent)).params["agent"]
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: 0.1 * rng.normal(size=x.shape).astype(np.float32), shapes)
    _, acting = networks.for_acting(agent, params)
    given = rng.integers(0, 256, (2, 64, 64, 3 * len(args.offsets)), np.uint8), np.ones(2, bool), ()
    for got, want in zip(agent.apply(acting, *given)[:2], agent.apply(params, *given)[:2], strict=True):
        np.testing.assert_array_equal(got, want)
    changed = [path for path, x in jax.tree_util.tree_leaves_with_path(acting) if x.dtype == jnp.bfloat16]
    assert all("encoder" in str(path) for path in changed)
    assert len(changed) >= 5


def test_parameters_to_act_with_are_the_learners_where_the_encoder_is_float32():
    args = ppo.Args(width=1, hidden=8)
    params = {"params": {"encoder": {"Conv_0": {"kernel": jnp.ones((3, 3, 6, 16))}}}}
    agent = ppo.make_agent(args)
    assert networks.for_acting(agent, params)[1] is params
    for own in (nn.Dense(8), nn.Sequential([agent.encoder, nn.Dense(8)])):  # a fork's; this one's .layers is a list
        assert networks.for_acting(agent.clone(encoder=own), params)[1] is params


def test_kernels_to_act_with_lie_as_a_gpu_reads_them(monkeypatch):
    """A program takes them as they lie: it does not ask for another layout."""
    args = ppo.Args(width=1, blocks=1, hidden=8, dtype="bfloat16")
    agent = ppo.make_agent(args)
    params = devices.run_once(ppo.initial_state, args, agent).params["agent"]
    _, want = networks.for_acting(agent, params)
    monkeypatch.setattr(devices, "on_cpu", lambda: False)
    _, got = networks.for_acting(agent, params)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    asked = jax.jit(lambda params: jax.tree.map(jnp.sum, params)).lower(got).compile().input_formats[0][0]
    kernels = [form.layout.major_to_minor for form in jax.tree.leaves(asked) if len(form.layout.major_to_minor) == 4]
    assert set(kernels) == {(3, 0, 1, 2)}


# ENCODERS


def randomized(rng, params):
    """Nothing starts at 0 or 1, where a mistake would not show."""
    return jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype(np.float32), params)


NAMES = {
    "impala": (
        replace(SMALL, channels="4,6"),
        lambda p, x: oracle.impala_cnn(p, x, 2, 2, "avg"),
    ),
    "impala, flattened": (
        replace(SMALL, channels="4", blocks=1, pool="flatten", conv_bias="no"),
        lambda p, x: oracle.impala_cnn(p, x, 1, 1, "flatten"),
    ),
    "impala, averaged late": (
        replace(SMALL, channels="4", blocks=1, pool="act_avg", activation="silu"),
        lambda p, x: oracle.impala_cnn(p, x, 1, 1, "act_avg", act=lambda x: x / (1 + np.exp(-x))),
    ),
    "impala, in parts": (
        replace(SMALL, channels="4", blocks=0, pool="max6", center="no"),
        lambda p, x: oracle.impala_cnn(p, x, 1, 0, "max6", center=False),
    ),
    "impala, strides": (
        replace(SMALL, channels="4,6", blocks=0, downsample="stride", pool="max"),
        lambda p, x: oracle.impala_cnn(p, x, 2, 0, "max", by_stride=True),
    ),
    "impala, separable": (
        replace(SMALL, channels="4,6", blocks=1, separable=2, norm="group"),
        lambda p, x: oracle.impala_cnn(p, x, 2, 1, "avg", separable=True, norm=True),
    ),
    "xresnet": (
        replace(SMALL, encoder="xresnet:[4,2],[4,1],[6,1]"),
        lambda p, x: oracle.xresnet(p, x, [(4, 2), (4, 1), (6, 1)]),
    ),
    "xresnet, everything": (
        replace(SMALL, encoder="xresnet:stem, [4,1], [6, 2]x2, se, sa2", downsample="maxpool"),
        lambda p, x: oracle.xresnet(p, x, [(4, 1), (6, 2), (6, 2)], True, True, 2, True),
    ),
    "xresnet, flattened": (
        replace(SMALL, encoder="xresnet:[4,2],[4,1]", pool="flatten", activation="silu"),
        lambda p, x: oracle.xresnet(p, x, [(4, 2), (4, 1)], pool="flatten", act=lambda x: x / (1 + np.exp(-x))),
    ),
    "mobilenet": (
        replace(SMALL, encoder="mobilenet", channels="4,6"),
        lambda p, x: oracle.mobilenet(p, x, 2, 2),
    ),
    "nature": (
        replace(SMALL, encoder="nature", channels="2,3,4", pool="flatten"),
        lambda p, x: oracle.nature_cnn(p, x, "flatten"),
    ),
    "nature, averaged": (
        replace(SMALL, encoder="nature", channels="2,3,4"),
        lambda p, x: oracle.nature_cnn(p, x, "avg"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_encoder_equals_the_one_by_hand(name):
    spec, by_hand = NAMES[name]
    rng = np.random.default_rng(0)
    size = 64 if spec.encoder == "nature" else 16
    frames = rng.integers(0, 256, (2, size, size, 3), np.uint8)
    encoder = networks.make_encoder(spec)
    params = randomized(rng, init_params(encoder, frames))
    want, used = by_hand(params["params"], frames)
    assert used == len(params["params"])
    assert (want > 0).mean() > 0.2  # not all features are dead
    np.testing.assert_allclose(jax.jit(encoder.apply)(params, frames), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("spec", "parameters"),
    # Counted by hand: convolutions, then the dense layer.
    [
        (EncoderArgs(width=1, pool="flatten"), 448 + 4 * 2320 + 4640 + 4 * 9248 + 9248 + 4 * 9248 + (2048 + 1) * 256),
        (EncoderArgs(width=1), 448 + 4 * 2320 + 4640 + 4 * 9248 + 9248 + 4 * 9248 + (32 + 1) * 256),
        (EncoderArgs("nature", width=1, pool="flatten"), 6176 + 32832 + 36928 + (1024 + 1) * 256),
        (
            EncoderArgs("xresnet:[32,2],[64,1]"),
            9 * (3 * 32 + 32 * 32 + 32 * 64 + 64 * 64) + 3 * 32 + 32 * 64 + 65 * 256,
        ),
    ],
)
def test_parameter_counts(spec, parameters):
    assert encoders.cost(spec, channels=3)["parameters"] == parameters


def test_arithmetic_and_memory_are_counted():
    cost = encoders.cost(EncoderArgs("nature", width=1, pool="flatten", hidden=512), channels=6)
    outputs = (15 * 15 * 32, 6 * 6 * 64, 4 * 4 * 64, 512)
    madds = sum(n * size for n, size in zip(outputs, (8 * 8 * 6, 4 * 4 * 32, 3 * 3 * 64, 1024), strict=True))
    assert cost["MFLOP"] == pytest.approx(2 * madds / 1e6, rel=0.05)
    kept = 4 * (64 * 64 * 6 + sum(outputs)) / 1024  # float32 inputs of each layer, and masks of the nonlinearities
    assert kept < cost["KiB kept"] < 1.5 * kept


@pytest.mark.parametrize("script", [ppo, trpo, impala, apex, sac])
def test_every_flag_changes_the_network(script):
    """Of PPO, as `make_encoder` reads them all; of the others one says that they give theirs to it."""
    flags = ENCODER_FLAGS if script is ppo else {"activation": ENCODER_FLAGS["activation"]}

    def program(**flags):
        args = script.Args(**{"hidden": 8, "channels": "4,8"} | flags)
        runs.check_args(args, script.SCRIPT)
        return str(jax.make_jaxpr(lambda: script.initial_state(args, script.make_agent(args)))())

    default = program()
    assert [flag for flag, value in flags.items() if program(**{flag: value}) == default] == []
    assert program(seed=2) != default


@relaxed
@given(st.integers(0, 2**32 - 1), st.sampled_from([(3, 3, 16, 32), (3, 3, 32, 8), (1, 1, 4, 4)]))
def test_spectral_norm_is_the_largest_singular_value(seed, shape):
    """And its slope that of the singular value, u v'."""
    kernel = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    u, values, v = np.linalg.svd(kernel.reshape(-1, shape[3]).astype(np.float64), full_matrices=False)
    got, slope = jax.value_and_grad(networks.largest_singular_value)(kernel)
    # After 256 steps two values that lie closer than a hundredth are not told apart, which changes little.
    np.testing.assert_allclose(got, values[0], rtol=3e-3)
    assert got <= values[0] * (1 + 1e-5)
    if values[1] < 0.95 * values[0]:
        np.testing.assert_allclose(slope.reshape(-1, shape[3]), np.outer(u[:, 0], v[0]), atol=2e-3)
    text = str(jax.make_jaxpr(networks.largest_singular_value)(kernel))
    assert text.count("dot_general[") == text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") > 0


def test_l2_is_the_gradient_of_the_convolutions_squares():
    rng = np.random.default_rng(0)
    params = {"kernel": rng.normal(size=(3, 3, 2, 4)), "dense": rng.normal(size=(4, 5)), "bias": rng.normal(size=4)}
    grads = jax.tree.map(lambda x: rng.normal(size=x.shape), params)
    got = networks.add_l2(grads, params, 0.1)
    np.testing.assert_allclose(got["kernel"], grads["kernel"] + 0.2 * params["kernel"])
    assert all((got[name] == grads[name]).all() for name in ("dense", "bias"))
    assert networks.add_l2(grads, params, 0.0) is grads


def test_residual_blocks_with_spectral_norm_are_those_of_normed_kernels():
    args = EncoderArgs(channels="4,8", blocks=1, hidden=8, spectral_norm=True)
    frames = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), np.uint8)
    encoder = networks.make_encoder(args)
    params = init_params(encoder, frames)
    normed = jax.tree.map(jnp.copy, params)
    for i in range(4):
        kernel = params["params"][f"SpectralConv_{i}"]["kernel"]
        value = np.linalg.svd(np.reshape(kernel, (-1, kernel.shape[3])), compute_uv=False)[0]
        normed["params"][f"SpectralConv_{i}"]["kernel"] = kernel / value
    done = encoder.clone(layers=replace(encoder.layers, residual_norm="spectral, done"))
    want = jax.jit(done.apply)(normed, frames)
    np.testing.assert_allclose(jax.jit(encoder.apply)(params, frames), want, rtol=5e-3, atol=1e-4)
    assert np.abs(jax.jit(done.apply)(params, frames) - want).max() > 1e-2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_to_act_with_are_divided_once(dtype):
    args = ppo.Args(channels="4,8", blocks=1, hidden=8, spectral_norm=True, dtype=dtype)
    agent, rng = ppo.make_agent(args), np.random.default_rng(0)
    params = devices.run_once(ppo.initial_state, args, agent).params["agent"]
    given = rng.integers(0, 256, (2, 64, 64, 3 * len(args.offsets)), np.uint8), np.ones(2, bool), ()
    acting, some = networks.for_acting(agent, params)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    done, plain = jax.jit(acting.apply)(some, *given)[:2], jax.jit(agent.apply)(params, *given)[:2]
    for got, want in zip(done, plain, strict=True):
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
    assert "argmax" not in str(jax.make_jaxpr(acting.apply)(some, *given))
    assert "argmax" in str(jax.make_jaxpr(agent.apply)(params, *given))


@pytest.mark.parametrize("size", [6, 8, 11])
def test_adaptive_pool_takes_the_largest_of_each_part(size):
    x = np.random.default_rng(0).normal(size=(2, size, size + 1, 3)).astype(np.float32)
    np.testing.assert_array_equal(networks.adaptive_max_pool(x, 6), oracle.max_in_parts(x, 6))


def test_initial_weights_have_the_spread_that_they_should():
    for init, want in {"glorot": 2 / (32 + 64), "kaiming": 2 / 32, "orthogonal": 2 / 64}.items():
        encoder = networks.make_encoder(EncoderArgs(width=1, hidden=64, init=init))
        params = init_params(encoder, jnp.zeros((1, 64, 64, 3), jnp.uint8))
        kernel = np.asarray(params["params"]["Dense_0"]["kernel"])
        assert kernel.var() == pytest.approx(want, rel=0.15), init
    np.testing.assert_allclose(kernel @ kernel.T, 2 * np.eye(32), atol=1e-5)  # orthogonal, gain sqrt(2)


def test_initial_weights_as_pytorchs_are_uniform_and_biases_too():
    """torch.nn.Conv2d and Linear: both within 1 / sqrt(fan-in), where a depthwise kernel has one input channel."""
    encoder = networks.make_encoder(replace(SMALL, channels="64", blocks=0, separable=8, hidden=256, init="pytorch"))
    layers = init_params(encoder, jnp.zeros((1, 16, 16, 3), jnp.uint8))["params"]
    assert layers["Conv_0"]["kernel"].shape == (3, 3, 1, 24)
    for name, fan_in in {"Conv_0": 9, "Conv_1": 24, "Dense_0": 64}.items():
        for values in layers[name].values():
            bound = 1 / np.sqrt(fan_in)
            assert 0.9 * bound < np.abs(values).max() <= bound
            assert np.std(values) == pytest.approx(bound / np.sqrt(3), rel=0.25)
    assert "bias" in layers["Conv_1"]


def check_encoder(args):
    runs.check_flags(args)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"encoder": "imapla"}, ["--encoder imapla", "impala, nature, mobilenet"]),
        ({"encoder": "xresnet"}, ["--encoder xresnet", "xresnet:["]),
        ({"encoder": "xresnet:"}, ["--encoder xresnet:", "''", "[channels,stride]"]),
        ({"encoder": "xresnet:se"}, ["xresnet:se", "no blocks"]),
        ({"encoder": "xresnet:[32,3]"}, ["'[32,3]'", "stride 1 or 2"]),
        ({"encoder": "xresnet:[0,1]"}, ["'[0,1]'", "[channels,stride]"]),
        ({"encoder": "xresnet:[32,2]x0"}, ["[32,2]x0"]),
        ({"encoder": "xresnet:[32,2"}, ["'[32'"]),
        ({"encoder": "xresnet:[32,2],[32,1]x4,sa9"}, ["sa9", "5 blocks"]),
        ({"encoder": "xresnet:[32,2]x6"}, ["6 times", "at most 5"]),
        ({"encoder": "xresnet:[32,1]x99,[32,1]x99,[32,1]x99"}, ["297 blocks"]),
        ({"channels": "32,,64"}, ["--channels 32,,64", "16,32,32"]),
        ({"channels": "32,64", "encoder": "nature"}, ["--channels 32,64", "3 numbers"]),
        ({"channels": "8,8", "encoder": "xresnet:[32,2]"}, ["--channels 8,8", "impala", "xresnet"]),
        ({"blocks": 3, "encoder": "nature"}, ["--blocks 3", "nature"]),
        ({"downsample": "stride", "encoder": "nature"}, ["--downsample stride", "nature", "auto"]),
        ({"separable": 1, "encoder": "mobilenet"}, ["--separable 1", "mobilenet"]),
        ({"separable": 17}, ["--separable 17", "16"]),
        ({"width": 0}, ["--width 0"]),
        ({"width": 1, "channels": "8,8"}, ["--width 1", "--channels"]),
        ({"width": 1, "encoder": "xresnet:[32,2]"}, ["--width 1", "xresnet"]),
        ({"encoder": "xresnet:[32,2],sa0"}, ["'sa0'"]),
        ({"encoder": "xresnet:[5000,1]"}, ["'[5000,1]'", "1 to 4096"]),
        ({"encoder": "xresnet:[32,1]x100"}, ["'[32,1]x100'", "at most x99"]),
        ({"encoder": "xresnet:[32,1],se,se"}, ["'se'", "twice"]),
        ({"pool": "act_avg", "encoder": "nature"}, ["--pool act_avg", "only impala"]),
        ({"spectral_norm": True, "separable": 1}, ["--spectral-norm", "--separable"]),
        ({"spectral_norm": True, "blocks": 0}, ["--spectral-norm", "blocks"]),
        ({"hidden": 0}, ["--hidden 0"]),
    ],
)
def test_bad_networks_get_one_sentence(flags, words):
    args = EncoderArgs(**flags)
    with pytest.raises(UsageError) as error:
        check_encoder(args)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_dropout_drops_a_share_and_keeps_the_mean():
    keys = jax.random.split(jax.random.PRNGKey(0), 64)
    x = jnp.ones((64, 256))
    y = np.asarray(networks.dropout(x, keys, 0.25))
    assert set(np.unique(y)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs(y.mean() - 1) < 0.02
    assert len(np.unique(y, axis=0)) == 64  # each sample its own
    np.testing.assert_array_equal(networks.dropout(x, None, 0.25), x)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_core_forgets_at_an_episodes_first_frame_only(kind):
    rng, core = np.random.default_rng(0), networks.initial_core(kind, 8, 2)
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
