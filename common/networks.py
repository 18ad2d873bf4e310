"""Image encoders: the IMPALA CNN and the Nature CNN, uint8 frames in, float32 features out.

On a CPU the 3 x 3 convolutions, the 3 x 3 / 2 max-pools and the accumulation of gradients take a form that XLA
compiles well there (see FAST ON A CPU below); on an accelerator they are plain Flax. The maths is the same.
"""

import contextlib
import os
from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

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
            features *= self.width
            options = {"padding": "VALID", "dtype": self.dtype, "kernel_init": GLOROT}
            x = nn.Conv(features, (size, size), stride, conv_general_dilated=conv_general_dilated, **options)(x)
            x = nn.relu(x)
        x = x.mean(axis=(1, 2), dtype=jnp.float32) if self.pool == "avg" else x.reshape(len(x), -1)
        return nn.relu(nn.Dense(self.hidden, dtype=self.dtype, kernel_init=GLOROT)(x)).astype(jnp.float32)


def make_encoder(name: str, width: int, pool: str, hidden: int, dtype: jnp.dtype) -> nn.Module:
    """`name` "impala" (`width` x (16, 32, 32) channels) or "nature" (`width` x (32, 64, 64))."""
    if name == "nature":
        return NatureCNN(width, pool, hidden, dtype)
    return ImpalaCNN((16 * width, 32 * width, 32 * width), pool, hidden, dtype)


# FAST ON A CPU
# * XLA rewrites convolutions to its fast CPU form only where their dimensions are in plain NHWC / HWIO order, and,
#   inside a scan, only then (jax issue 12868): autodiff's gradients are not, and fall to a naive loop. So both
#   gradients are written here as plain convolutions, and max-pooling as maxima of slices.
# * Most of these convolutions run on one core. So every core is a JAX device of its own, and takes its share of
#   each batch; all other arrays are the same on every device.
# * A few samples at a time, so that the activations stay in the cache.

CHUNK = 8  # samples


def use_every_core() -> None:
    """Makes each core (up to 8, a power of two) a JAX device; without effect once JAX has started."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_cpu_collective_call" not in flags:  # a core may wait long for one that another program slows down
        os.environ["XLA_FLAGS"] = (
            f"{flags} --xla_cpu_collective_call_terminate_timeout_seconds=3600"
            " --xla_cpu_collective_call_warn_stuck_timeout_seconds=600"
        )
    if "xla_force_host_platform_device_count" not in flags:
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", min(1 << (cores.bit_length() - 1), 8))


use_every_core()


def replicate(tree):
    """Puts a tree of arrays on every device of a CPU, or on the accelerator."""
    return jax.device_put(tree, NamedSharding(_cores(), P()) if on_cpu() else None)


def _cores() -> Mesh:
    return Mesh(np.array(jax.devices()), "core")


def _by_core(function: Callable, size: int) -> Callable:
    """`function(whole, batch)`, batch split over the cores, if they divide its `size`."""
    if size % jax.device_count():
        return lambda whole, batch: function(whole, batch, False)
    split = partial(function, shared=True)
    return jax.shard_map(split, mesh=_cores(), in_specs=(P(), P("core")), out_specs=P(), check_vma=False)


def in_chunks(function: Callable, x: jax.Array):
    """`function(x)`, x [B, ...] -> [B, ...] each: on a CPU, on the core that runs this, a few samples at a time.

    For use inside a loss, or where one thread has one core. Its gradient goes chunk by chunk too.
    """
    if not on_cpu() or len(x) <= CHUNK:
        return function(x)
    size = len(x)
    x = jnp.pad(x, ((0, -size % CHUNK), *[(0, 0)] * (x.ndim - 1)))
    out = lax.map(function, x.reshape(-1, CHUNK, *x.shape[1:]))
    return jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:])[:size], out)


def apply(module: nn.Module, params, frames: jax.Array, method: str | None = None):
    """`module.apply(params, frames)` for frames [B, ...]: outputs [B, ...]. On a CPU, by core and a few at a time."""

    def share(params, frames, shared=False):
        out = in_chunks(lambda x: module.apply(params, x, method=method), frames)
        return lax.all_gather(out, "core", tiled=True) if shared else out

    return _by_core(share, len(frames))(params, frames) if on_cpu() else share(params, frames)


def value_and_grad(loss: Callable, params, batch) -> tuple:
    """`jax.value_and_grad(loss, has_aux=True)(params, batch)`. On a CPU, by core and a few samples at a time.

    Args:
      loss: loss(params, batch) -> (scalar, tree of scalars), all *sums* over the samples of the batch.
      batch: tree of arrays [B, ...].
    """
    gradient = jax.value_and_grad(loss, has_aux=True)
    if not on_cpu():
        return gradient(params, batch)

    def share(params, batch, shared):
        chunks = _chunks(batch, _divisor(len(jax.tree.leaves(batch)[0]), CHUNK))
        zero = _zeros(gradient, params, jax.tree.map(lambda x: x[0], chunks))
        total, _ = lax.scan(lambda total, x: (jax.tree.map(jnp.add, total, gradient(params, x)), None), zero, chunks)
        return lax.psum(total, "core") if shared else total

    return _by_core(share, len(jax.tree.leaves(batch)[0]))(params, batch)


def value_and_grad_backwards(loss: Callable, params, batch, after, steps: int, whole: bool = False) -> tuple:
    """As `value_and_grad`, for a loss of sequences in which a step needs later ones only through what they hand back.

    V-trace runs from the last step to the first, and so can its gradient: on a CPU each few samples go forward and,
    still in the cache, backward, the last steps first. Nothing is computed twice and no activation is kept (but with
    `whole` those of a sequence are).

    Args:
      loss: loss(params, batch, start, size, after) -> (scalar, (tree of scalars, before)): sums over the `size` steps
        from `start` on of sequences [B, ...], and what it hands to the steps before them. `size` is a Python int.
      batch: tree of arrays [B, ...], whole sequences.
      after: tree of arrays [B, ...], handed to the last steps; no gradient flows through it.
      steps: of each sequence.
      whole: all steps at once, one sequence after the other, where a step needs the steps before it too.
    """
    if not on_cpu():
        (value, (parts, _)), grads = jax.value_and_grad(loss, has_aux=True)(params, batch, 0, steps, after)
        return (value, parts), grads

    def share(params, data, shared):
        few = 1 if whole else _divisor(len(jax.tree.leaves(data)[0]), CHUNK)
        size = steps if whole else _divisor(steps, CHUNK // few)

        def gradient(params, batch, start, after):
            (value, (parts, before)), grads = jax.value_and_grad(loss, has_aux=True)(params, batch, start, size, after)
            return ((value, parts), grads), before

        def sequences(total, data):
            def some_steps(carry, start):
                total, after = carry
                part, before = gradient(params, data[0], start, after)
                return (jax.tree.map(jnp.add, total, part), before), None

            starts = jnp.arange(steps - size, -1, -size)
            return lax.scan(some_steps, (total, data[1]), starts)[0][0], None

        chunks = _chunks(data, few)
        batch, after = jax.tree.map(lambda x: x[0], chunks)
        zero, _ = _zeros(gradient, params, batch, 0, after)
        total, _ = lax.scan(sequences, zero, chunks)
        return lax.psum(total, "core") if shared else total

    return _by_core(share, len(jax.tree.leaves(batch)[0]))(params, (batch, after))


def _divisor(number: int, most: int) -> int:
    """The largest divisor of `number` up to `most`."""
    return max(n for n in range(1, most + 1) if number % n == 0)


def _chunks(tree, few: int):
    """[B, ...] to [B / few, few, ...]."""
    return jax.tree.map(lambda x: x.reshape(-1, few, *x.shape[1:]), tree)


def _zeros(function: Callable, *args):
    """Zeros of the shapes that function(*args) returns."""
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(function, *args))


def conv_general_dilated(x: jax.Array, w: jax.Array, strides, padding, **options) -> jax.Array:
    """`lax.conv_general_dilated` for `nn.Conv` [B, H, W, C]: on a CPU, a fast form where there is one.

    There is for square kernels with stride 1 and SAME padding, and for VALID where the stride divides the size.
    """
    size, stride = w.shape[0], strides[0]
    square = w.shape[0] == w.shape[1] and len(set(strides)) == 1 and options.get("feature_group_count", 1) == 1
    square &= all(set(options.get(name) or (1,)) == {1} for name in ("lhs_dilation", "rhs_dilation"))
    if on_cpu() and square and padding == "SAME" and stride == 1 and size % 2:
        return _conv(x, w, size // 2)
    if on_cpu() and square and padding == "VALID" and size % stride == 0:
        rows, columns = ((n - size) // stride * stride + size for n in x.shape[1:3])  # the rest is not read
        return _conv(_space_to_depth(x[:, :rows, :columns], stride), _space_to_depth(w[None], stride)[0], 0)
    return lax.conv_general_dilated(x, w, strides, padding, **options)


def _space_to_depth(x, block):
    """[B, H, W, C, ...] to [B, H / block, W / block, block * block * C, ...]: a stride becomes channels."""
    if block == 1:
        return x
    batch, height, width, channels, *rest = x.shape
    x = x.reshape(batch, height // block, block, width // block, block, channels, *rest)
    x = x.swapaxes(2, 3)
    return x.reshape(batch, height // block, width // block, block * block * channels, *rest)


def _plain_conv(x, w, pad, strides=(1, 1)):
    padding = ((pad, pad), (pad, pad))
    return lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _grouped_conv(x, w, pad):
    """XLA is slow with few channels: here `group` neighbouring pixels of a row are computed as channels of one.

    The kernel is repeated, one column further each time, and strides by `group`: same numbers, same memory order.
    """
    size, _, inputs, outputs = w.shape
    height, width = (n + 2 * pad - size + 1 for n in x.shape[1:3])
    group = 1 if inputs * outputs > 256 else 4 if inputs <= 4 else 2
    if width % group:
        group = 1
    if group > 1:
        w = jnp.concatenate([jnp.pad(w, ((0, 0), (i, group - 1 - i), (0, 0), (0, 0))) for i in range(group)], axis=3)
    return _plain_conv(x, w, pad, (1, group)).reshape(len(x), height, width, outputs)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _conv(x, w, pad):
    return _grouped_conv(x, w, pad)


def _conv_forward(x, w, pad):
    return _grouped_conv(x, w, pad), (x, w)


def _conv_backward(pad, saved, g):
    x, w = saved
    dx = _grouped_conv(g, w[::-1, ::-1].swapaxes(2, 3), len(w) - 1 - pad)
    # Samples and channels change places: the gradient is the kernel-sized convolution of x with g.
    dw = _plain_conv(x.transpose(3, 1, 2, 0), g.transpose(1, 2, 0, 3), pad)
    return dx, dw.transpose(1, 2, 0, 3)


_conv.defvjp(_conv_forward, _conv_backward)


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
    """The maximum of each window, and which of its members that is (0, 1 or 2; the first of equals, as XLA's own)."""
    first, second, third = _windows(x, axis)
    y = jnp.maximum(jnp.maximum(first, second), third)
    return y, jnp.where(first == y, 0, jnp.where(second == y, 1, 2)).astype(jnp.uint8)


def _max_backward(winner, g, axis):
    rest = jnp.where(winner == 2, g, 0)
    zero = jnp.zeros_like(lax.slice_in_dim(rest, 0, 1, axis=axis))
    from_left = jnp.concatenate([zero, lax.slice_in_dim(rest, 0, rest.shape[axis] - 1, axis=axis)], axis)
    pairs = jnp.stack([jnp.where(winner == 0, g, 0) + from_left, jnp.where(winner == 1, g, 0)], axis + 1)
    return pairs.reshape(*g.shape[:axis], 2 * g.shape[axis], *g.shape[axis + 1 :])


@jax.custom_vjp
def _max_pool(x):
    return _max_pool_forward(x)[0]


def _max_pool_forward(x):
    rows, row_winner = _max(x, 2)
    y, winner = _max(rows, 1)
    return y, (row_winner, winner)  # bytes: a twelfth of the memory that x, rows and y would take


def _max_pool_backward(saved, g):
    row_winner, winner = saved
    return (_max_backward(row_winner, _max_backward(winner, g, 1), 2),)


_max_pool.defvjp(_max_pool_forward, _max_pool_backward)
