"""How the networks compute: plain Flax on an accelerator; on a CPU, in forms that XLA compiles well there.

`on_cpu()` is the one switch: it chooses between two forms of the same maths. What is slow on a CPU, and the cure:

* XLA rewrites convolutions to its fast CPU form only where their dimensions are in plain NHWC / HWIO order, and,
  inside a scan, only then (jax issue 12868): autodiff's gradients are not, and fall to a naive loop. So both
  gradients are written here as plain convolutions, and max-pooling as maxima of slices.
* Most of these convolutions run on one core. So every core is a JAX device of its own, and takes its share of
  each batch; all other arrays are the same on every device.
* A few samples at a time, so that the activations stay in the cache.
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

CHUNK = 8  # samples


def on_cpu() -> bool:
    return jax.default_backend() == "cpu"


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


def everywhere() -> NamedSharding | jax.Device:
    """Every device of a CPU, each with a copy; or the accelerator."""
    return NamedSharding(_cores(), P()) if on_cpu() else jax.devices()[0]


def replicate(tree):
    """Puts a tree of arrays `everywhere`."""
    return jax.device_put(tree, everywhere())


def _cores() -> Mesh:
    return Mesh(np.array(jax.devices()), "core")


def _by_core(function: Callable, size: int) -> Callable:
    """`function(whole, batch)`, batch split over the cores, if they divide its `size`."""
    if size % jax.device_count():
        return lambda whole, batch: function(whole, batch, False)
    split = partial(function, shared=True)
    return jax.shard_map(split, mesh=_cores(), in_specs=(P(), P("core")), out_specs=P(), check_vma=False)


def in_chunks(function: Callable, x):
    """`function(x)`, arrays [B, ...] -> arrays [B, ...]: on a CPU, on the core that runs this, a few samples at a time.

    For use inside a loss, or where one thread has one core. Its gradient goes chunk by chunk too.
    """
    size = len(jax.tree.leaves(x)[0])
    if not on_cpu() or size <= CHUNK:
        return function(x)
    x = jax.tree.map(lambda x: jnp.pad(x, ((0, -size % CHUNK), *[(0, 0)] * (x.ndim - 1))), x)
    out = lax.map(function, _chunks(x, CHUNK))
    return jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:])[:size], out)


def apply(function: Callable, params, frames: jax.Array):
    """`function(params, frames)` for frames [B, ...]: arrays [B, ...]. On a CPU, by core and a few at a time."""

    def share(params, frames, shared=False):
        out = in_chunks(partial(function, params), frames)
        return lax.all_gather(out, "core", tiled=True) if shared else out

    return _by_core(share, len(frames))(params, frames) if on_cpu() else share(params, frames)


def value_and_grad(loss: Callable, params, batch, few: int = CHUNK) -> tuple:
    """`jax.value_and_grad(loss, has_aux=True)(params, batch)`. On a CPU, by core and a few samples at a time.

    Args:
      loss: loss(params, batch) -> (scalar, tree of scalars), all *sums* over the samples of the batch.
      batch: tree of arrays [B, ...].
      few: at most so many samples at a time; 1 where a sample is a whole sequence.
    """
    gradient = jax.value_and_grad(loss, has_aux=True)
    if not on_cpu():
        return gradient(params, batch)

    def share(params, batch, shared):
        chunks = _chunks(batch, _divisor(len(jax.tree.leaves(batch)[0]), few))
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

    There is for square kernels without dilation, with one group or one a channel.
    """
    size, stride, groups = len(w), strides[0], options.get("feature_group_count", 1)
    known = w.shape[0] == w.shape[1] and len(set(strides)) == 1 and padding in ("SAME", "VALID")
    known &= groups in (1, x.shape[3])
    known &= all(set(options.get(name) or (1,)) == {1} for name in ("lhs_dilation", "rhs_dilation"))
    if not (on_cpu() and known):
        return lax.conv_general_dilated(x, w, strides, padding, **options)
    if size == stride == groups == 1:
        return (x.reshape(-1, x.shape[3]) @ w[0, 0]).reshape(*x.shape[:3], -1)
    if groups == 1 and stride == 1 and padding == "SAME" and size % 2:
        return _conv(x, w, size // 2)
    # Exactly the pixels that are seen: zeros around them, and what lies behind the last place is cut off.
    places = [-(-n // stride) if padding == "SAME" else (n - size) // stride + 1 for n in x.shape[1:3]]
    reach = [(places - 1) * stride + size for places in places]
    before = [max(reach - n, 0) // 2 if padding == "SAME" else 0 for reach, n in zip(reach, x.shape[1:3], strict=True)]
    x = _pad(x, before, reach)
    if groups > 1:
        filters = w.shape[3] // groups  # of each channel
        y = [_depthwise(x, w[..., i::filters], stride) for i in range(filters)]
        return y[0] if filters == 1 else jnp.stack(y, axis=-1).reshape(*y[0].shape[:3], -1)
    return _blocks(x, w, stride) if size % stride == 0 else _strided(x, w, stride)


def _pad(x, before, sizes, inner=0):
    """Zeros before, between and after the rows and columns, or fewer of them, so that there are `sizes`."""
    config = [
        (low, size - low - n - (n - 1) * inner, inner) for low, size, n in zip(before, sizes, x.shape[1:3], strict=True)
    ]
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *config, (0, 0, 0)])


def _blocks(x, w, stride):
    """A convolution with a stride, VALID, as one of blocks of pixels without."""
    whole = -(-len(w) // stride) * stride  # the kernel, filled up with zeros
    more = whole - len(w)
    x = _pad(x, (0, 0), [n + more for n in x.shape[1:3]])
    w = jnp.pad(w, ((0, more), (0, more), (0, 0), (0, 0)))
    return _conv(_space_to_depth(x, stride), _space_to_depth(w[None], stride)[0], 0)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _strided(x, w, stride):
    """The same where stride and kernel do not fit: forward it is fast as it is, only its gradients take the blocks."""
    return _plain_conv(x, w, 0, (stride, stride))


def _strided_forward(x, w, stride):
    return _strided(x, w, stride), (x, w)


def _strided_backward(stride, saved, g):
    return jax.vjp(partial(_blocks, stride=stride), *saved)[1](g)


_strided.defvjp(_strided_forward, _strided_backward)


def _seen(x, i, j, places, stride):
    """What pixel (i, j) of a kernel sees at each of its places [rows, columns]."""
    rows, columns = ((n - 1) * stride + 1 for n in places)
    return x[:, i : i + rows : stride, j : j + columns : stride]


def _filter(x, w, stride):
    places = [(n - len(w)) // stride + 1 for n in x.shape[1:3]]
    return sum(_seen(x, i, j, places, stride) * w[i, j, 0] for i in range(len(w)) for j in range(len(w)))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _depthwise(x, w, stride):
    """One filter a channel, VALID, as a sum over the kernel's pixels: XLA makes one loop of it."""
    return _filter(x, w, stride)


def _depthwise_forward(x, w, stride):
    return _filter(x, w, stride), (x, w)


def _depthwise_backward(stride, saved, g):
    (x, w), more = saved, len(saved[1]) - 1
    spread = _pad(g, (more, more), [n + more for n in x.shape[1:3]], stride - 1)
    dx = _filter(spread, w[::-1, ::-1], 1)
    flat = lambda x: x.reshape(-1, x.shape[3])  # noqa: E731
    pixels = [
        [jnp.einsum("nc,nc->c", flat(_seen(x, i, j, g.shape[1:3], stride)), flat(g)) for j in range(len(w))]
        for i in range(len(w))
    ]
    return dx, jnp.array(pixels)[:, :, None]


_depthwise.defvjp(_depthwise_forward, _depthwise_backward)


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


def avg_pool(x: jax.Array) -> jax.Array:
    """2 x 2 averages with stride 2: [B, H, W, C] -> [B, H/2, W/2, C], H and W even."""
    batch, height, width, channels = x.shape
    return x.reshape(batch, height // 2, 2, width // 2, 2, channels).mean(axis=(2, 4))


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
