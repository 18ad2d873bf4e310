"""Image encoders: the IMPALA CNN and the Nature CNN, uint8 frames in, float32 features out.

On a CPU the 3 x 3 convolutions, the 3 x 3 / 2 max-pools and the accumulation of gradients take a form that XLA
compiles well there (see FAST ON A CPU below); on an accelerator they are plain Flax. The maths is the same.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

GLOROT = nn.initializers.glorot_uniform()


def on_cpu() -> bool:
    return jax.default_backend() == "cpu"


class ImpalaCNN(nn.Module):
    """The residual network of Espeholt et al. 2018 (IMPALA, figure 3, right), uint8 [B, 64, 64, C] -> [B, hidden].

    `pool` = "avg" averages over all positions before the dense layer: the competition entry's best network, with
    `channels` (32, 64, 64). "flatten" keeps them, as the paper and train-procgen do with (16, 32, 32).
    """

    channels: tuple[int, ...] = (32, 64, 64)
    pool: str = "avg"
    hidden: int = 256
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, frames: jax.Array) -> jax.Array:
        def conv(x, features):
            return nn.Conv(
                features, (3, 3), dtype=self.dtype, kernel_init=GLOROT, conv_general_dilated=conv_general_dilated
            )(x)

        x = (frames.astype(self.dtype) - 128) / 255
        for features in self.channels:
            x = max_pool(conv(x, features))
            for _ in range(2):
                x = x + conv(nn.relu(conv(nn.relu(x), features)), features)
        x = x.mean(axis=(1, 2), dtype=jnp.float32) if self.pool == "avg" else x.reshape(len(x), -1)
        x = nn.Dense(self.hidden, dtype=self.dtype, kernel_init=GLOROT)(nn.relu(x))
        return nn.relu(x).astype(jnp.float32)


class NatureCNN(nn.Module):
    """The network of Mnih et al. 2015 (DQN, Methods), uint8 [B, 64, 64, C] -> [B, hidden]."""

    width: int = 1
    pool: str = "flatten"
    hidden: int = 512
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, frames: jax.Array) -> jax.Array:
        x = frames.astype(self.dtype) / 255
        for features, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            x = nn.Conv(
                features * self.width, (size, size), stride, padding="VALID", dtype=self.dtype, kernel_init=GLOROT
            )(x)
            x = nn.relu(x)
        x = x.mean(axis=(1, 2), dtype=jnp.float32) if self.pool == "avg" else x.reshape(len(x), -1)
        return nn.relu(nn.Dense(self.hidden, dtype=self.dtype, kernel_init=GLOROT)(x)).astype(jnp.float32)


def make_encoder(name: str, width: int, pool: str, hidden: int, dtype: jnp.dtype) -> nn.Module:
    """`name` "impala" (`width` x (16, 32, 32) channels) or "nature" (`width` x (32, 64, 64))."""
    if name == "nature":
        return NatureCNN(width, pool, hidden, dtype)
    return ImpalaCNN((16 * width, 32 * width, 32 * width), pool, hidden, dtype)


# FAST ON A CPU
# XLA rewrites convolutions to its fast CPU form only where their dimensions are in plain NHWC / HWIO order, and,
# inside a scan, only then (jax issue 12868): autodiff's gradients are not, and cost up to 31 times more. So both
# gradients are written here as plain convolutions, max-pooling as maxima of slices, and a minibatch's gradient is
# summed over a few samples at a time, so that the activations stay in the cache.

CHUNK = 16  # samples


def value_and_grad(loss: Callable, params, batch) -> tuple:
    """`jax.value_and_grad(loss, has_aux=True)(params, batch)`, a few samples at a time on a CPU.

    Args:
      loss: loss(params, batch) -> (scalar, tree of scalars), all *sums* over the samples of the batch.
      batch: tree of arrays [B, ...].
    """
    gradient = jax.value_and_grad(loss, has_aux=True)
    if not on_cpu():
        return gradient(params, batch)
    size = len(jax.tree.leaves(batch)[0])
    chunk = max(n for n in range(1, CHUNK + 1) if size % n == 0)
    chunks = jax.tree.map(lambda x: x.reshape(-1, chunk, *x.shape[1:]), batch)
    shapes = jax.eval_shape(gradient, params, jax.tree.map(lambda x: x[0], chunks))
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return lax.scan(lambda total, x: (jax.tree.map(jnp.add, total, gradient(params, x)), None), zero, chunks)[0]


def conv_general_dilated(x: jax.Array, w: jax.Array, strides, padding, **options) -> jax.Array:
    """`lax.conv_general_dilated` for `nn.Conv`, with fast gradients for 3 x 3, stride 1, SAME on a CPU."""
    plain = w.shape[:2] == (3, 3) and tuple(strides) == (1, 1) and padding == "SAME"
    if on_cpu() and plain and options.get("feature_group_count", 1) == 1:
        return _conv3x3(x, w)
    return lax.conv_general_dilated(x, w, strides, padding, **options)


def _plain_conv(x, w, padding="SAME"):
    return lax.conv_general_dilated(x, w, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))


@jax.custom_vjp
def _conv3x3(x, w):
    return _plain_conv(x, w)


def _conv3x3_forward(x, w):
    return _plain_conv(x, w), (x, w)


def _conv3x3_backward(saved, g):
    x, w = saved
    dx = _plain_conv(g, w[::-1, ::-1].swapaxes(2, 3))
    # Samples and channels change places: the gradient is the kernel-sized convolution of x with g.
    dw = _plain_conv(x.transpose(3, 1, 2, 0), g.transpose(1, 2, 0, 3), ((1, 1), (1, 1)))
    return dx, dw.transpose(1, 2, 0, 3)


_conv3x3.defvjp(_conv3x3_forward, _conv3x3_backward)


def max_pool(x: jax.Array) -> jax.Array:
    """3 x 3 max-pool with stride 2, SAME: [B, H, W, C] -> [B, H/2, W/2, C] (rounded up)."""
    if on_cpu() and x.shape[1] % 2 == 0 and x.shape[2] % 2 == 0:
        return _max_pool(x)
    return nn.max_pool(x, (3, 3), (2, 2), "SAME")


def _windows(x, axis):
    """The three members of each window along `axis`: x[0::2], x[1::2], x[2::2] (padded with -inf)."""
    pairs = x.reshape(*x.shape[:axis], x.shape[axis] // 2, 2, *x.shape[axis + 1 :])
    first, second = (lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in (0, 1))
    pad = jnp.full_like(lax.slice_in_dim(first, 0, 1, axis=axis), -jnp.inf)
    return first, second, jnp.concatenate([lax.slice_in_dim(first, 1, None, axis=axis), pad], axis)


def _max(x, axis):
    first, second, third = _windows(x, axis)
    return jnp.maximum(jnp.maximum(first, second), third)


def _max_backward(x, y, g, axis):
    """Gradient to the first maximum of each window, as XLA's own."""
    first, second, _ = _windows(x, axis)
    to_first = first == y
    to_second = (second == y) & ~to_first
    rest = jnp.where(to_first | to_second, 0, g)
    zero = jnp.zeros_like(lax.slice_in_dim(rest, 0, 1, axis=axis))
    from_left = jnp.concatenate([zero, lax.slice_in_dim(rest, 0, rest.shape[axis] - 1, axis=axis)], axis)
    pairs = jnp.stack([jnp.where(to_first, g, 0) + from_left, jnp.where(to_second, g, 0)], axis + 1)
    return pairs.reshape(x.shape)


@jax.custom_vjp
def _max_pool(x):
    return _max(_max(x, 2), 1)


def _max_pool_forward(x):
    rows = _max(x, 2)
    y = _max(rows, 1)
    return y, (x, rows, y)


def _max_pool_backward(saved, g):
    x, rows, y = saved
    return (_max_backward(x, rows, _max_backward(rows, y, g, 1), 2),)


_max_pool.defvjp(_max_pool_forward, _max_pool_backward)
