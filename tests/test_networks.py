"""The forms that are fast on a CPU against plain Flax and XLA."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common import networks


def gradients(function, *arrays):
    weight = np.random.default_rng(9).normal(size=jax.eval_shape(function, *arrays).shape)
    return jax.grad(lambda *a: (function(*a) * weight).sum(), argnums=range(len(arrays)))(*arrays)


@pytest.mark.parametrize(
    ("size", "channels", "features", "kernel", "stride", "padding"),
    [
        (8, 3, 16, 3, 1, "SAME"),  # four pixels at a time
        (16, 16, 16, 3, 1, "SAME"),  # two
        (8, 32, 32, 3, 1, "SAME"),  # one
        (7, 4, 5, 3, 1, "SAME"),
        (64, 6, 32, 8, 4, "VALID"),  # the Nature CNN's three
        (15, 32, 64, 4, 2, "VALID"),
        (6, 64, 64, 3, 1, "VALID"),
        (9, 4, 5, 3, 2, "VALID"),  # no fast form
        (8, 4, 5, 3, 2, "SAME"),
    ],
)
def test_convolution_equals_xla(size, channels, features, kernel, stride, padding):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, size, size, channels)).astype(np.float32)
    w = rng.normal(size=(kernel, kernel, channels, features)).astype(np.float32)
    layout = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    ours = lambda x, w: networks.conv_general_dilated(x, w, (stride, stride), padding, **layout)  # noqa: E731
    theirs = lambda x, w: jax.lax.conv_general_dilated(x, w, (stride, stride), padding, **layout)  # noqa: E731
    np.testing.assert_allclose(ours(x, w), theirs(x, w), rtol=1e-4, atol=1e-4)
    for got, want in zip(gradients(ours, x, w), gradients(theirs, x, w), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


def test_dilated_convolution_is_not_taken_for_a_plain_one():
    x = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype(np.float32)
    ours, theirs = (
        nn.Conv(4, (3, 3), kernel_dilation=2, **options)
        for options in ({"conv_general_dilated": networks.conv_general_dilated}, {})
    )
    params = ours.init(jax.random.PRNGKey(0), x)
    np.testing.assert_allclose(ours.apply(params, x), theirs.apply(params, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [2, 5, 8, 64])
def test_max_pool_equals_flax_with_ties(size):
    x = np.random.default_rng(0).integers(0, 4, (3, size, size, 5)).astype(np.float32)  # many ties
    theirs = lambda x: nn.max_pool(x, (3, 3), (2, 2), "SAME")  # noqa: E731
    np.testing.assert_array_equal(networks.max_pool(x), theirs(x))
    np.testing.assert_allclose(gradients(networks.max_pool, x)[0], gradients(theirs, x)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [5, 48])  # 5: no even share for each core
@pytest.mark.parametrize("name", ["impala", "nature"])
def test_gradient_in_chunks_equals_the_whole(name, size):
    rng = np.random.default_rng(0)
    encoder = networks.make_encoder(name, 1, "avg", 32, jnp.float32)
    frames, target = rng.integers(0, 256, (size, 64, 64, 3), np.uint8), rng.normal(size=(size, 32))
    params = encoder.init(jax.random.PRNGKey(0), frames[:1])

    def loss(params, batch):
        error = ((encoder.apply(params, batch[0]) - batch[1]) ** 2).sum()
        return error, {"double": 2 * error}

    got, want = networks.value_and_grad(loss, params, (frames, target)), jax.value_and_grad(loss, has_aux=True)(
        params, (frames, target)
    )  # fmt: skip
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-3, atol=1e-3 * np.abs(w).max())
    outputs = networks.apply(encoder, params, frames)
    np.testing.assert_allclose(outputs, encoder.apply(params, frames), rtol=1e-4, atol=1e-5)


def test_accelerators_get_plain_flax(monkeypatch):
    monkeypatch.setattr(networks, "on_cpu", lambda: False)
    encoder = networks.make_encoder("impala", 1, "flatten", 16, jnp.bfloat16)
    frames = jnp.zeros((2, 64, 64, 6), jnp.uint8)
    program = str(jax.make_jaxpr(encoder.init)(jax.random.PRNGKey(0), frames))
    assert "custom_vjp" not in program
    assert "reduce_window_max" in program


@pytest.mark.parametrize(
    ("name", "pool", "parameters"),
    # Counted by hand: convolutions, then the dense layer.
    [
        ("impala", "flatten", 448 + 4 * 2320 + 4640 + 4 * 9248 + 9248 + 4 * 9248 + (2048 + 1) * 256),
        ("impala", "avg", 448 + 4 * 2320 + 4640 + 4 * 9248 + 9248 + 4 * 9248 + (32 + 1) * 256),
        ("nature", "flatten", 6176 + 32832 + 36928 + (1024 + 1) * 256),
    ],
)
def test_parameter_counts(name, pool, parameters):
    encoder = networks.make_encoder(name, 1, pool, 256, jnp.float32)
    shapes = jax.eval_shape(encoder.init, jax.random.PRNGKey(0), jnp.zeros((1, 64, 64, 3), jnp.uint8))
    assert sum(x.size for x in jax.tree.leaves(shapes)) == parameters
