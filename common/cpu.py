"""Convolutions and pools in forms that XLA compiles well on a CPU; gpu.py has those of a GPU.

XLA's CPU backend is fast only for convolutions in plain NHWC / HWIO order (jax issue 12868). Autodiff's gradients are
in other orders, and fall back to a naive loop: here they are written as plain convolutions, and max-pooling as maxima
of slices.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from common.derivatives import custom_vjp


def conv_general_dilated(x: jax.Array, w: jax.Array, strides, padding, **options) -> jax.Array:
    """`lax.conv_general_dilated` as `nn.Conv` calls it: x [B, H, W, C] and w [h, w, C / groups, features] ->
    [B, H', W', features] in x's dtype. Square kernels without dilation, of one group or one per channel, take a fast
    form."""
    size, stride, groups = len(w), strides[0], options.get("feature_group_count", 1)
    known = w.shape[0] == w.shape[1] and len(set(strides)) == 1 and padding in ("SAME", "VALID")
    known &= groups in (1, x.shape[3])
    known &= all(set(options.get(name) or (1,)) == {1} for name in ("lhs_dilation", "rhs_dilation"))
    if not known:
        return lax.conv_general_dilated(x, w, strides, padding, **options)
    if size == stride == groups == 1:
        return (x.reshape(-1, x.shape[3]) @ w[0, 0]).reshape(*x.shape[:3], -1)
    if groups == 1 and stride == 1 and padding == "SAME" and size % 2:
        return _conv(x, w, size // 2)
    # Pad or cut x to the pixels that the kernel sees.
    outputs = [-(-n // stride) if padding == "SAME" else (n - size) // stride + 1 for n in x.shape[1:3]]
    reach = [(n - 1) * stride + size for n in outputs]
    before = [max(r - n, 0) // 2 if padding == "SAME" else 0 for r, n in zip(reach, x.shape[1:3], strict=True)]
    x = _pad(x, before, reach)
    if groups > 1:
        filters = w.shape[3] // groups  # of each channel
        y = [_depthwise(x, w[..., i::filters], stride) for i in range(filters)]
        return y[0] if filters == 1 else jnp.stack(y, axis=-1).reshape(*y[0].shape[:3], -1)
    return _blocks(x, w, stride) if size % stride == 0 else _strided(x, w, stride)


def _pad(x, before, sizes, inner=0):
    """Pads rows and columns with `before` zeros in front, `inner` between, and behind up to `sizes` (or cuts them)."""
    config = [
        (low, size - low - n - (n - 1) * inner, inner) for low, size, n in zip(before, sizes, x.shape[1:3], strict=True)
    ]
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *config, (0, 0, 0)])


def _blocks(x, w, stride):
    """A strided VALID convolution as one of stride 1 over blocks of pixels; zeros pad the kernel to whole blocks."""
    more = -len(w) % stride
    x = _pad(x, (0, 0), [n + more for n in x.shape[1:3]])
    w = jnp.pad(w, ((0, more), (0, more), (0, 0), (0, 0)))
    return _conv(_space_to_depth(x, stride), _space_to_depth(w[None], stride)[0], 0)


@partial(custom_vjp, nondiff_argnums=(2,))
def _strided(x, w, stride):
    """A VALID convolution whose stride does not divide the kernel's size: its gradients are those of _blocks."""
    return _plain_conv(x, w, 0, (stride, stride))


def _strided_backward(stride, saved, g):
    return jax.vjp(partial(_blocks, stride=stride), *saved)[1](g)


_strided.defvjp(lambda x, w, stride: (_strided(x, w, stride), (x, w)), _strided_backward)


def _seen(x, i, j, places, stride):
    """The pixels under element (i, j) of a kernel at each of its places [rows, columns]."""
    rows, columns = ((n - 1) * stride + 1 for n in places)
    return x[:, i : i + rows : stride, j : j + columns : stride]


def _filter(x, w, stride):
    places = [(n - len(w)) // stride + 1 for n in x.shape[1:3]]
    return sum(_seen(x, i, j, places, stride) * w[i, j, 0] for i in range(len(w)) for j in range(len(w)))


@partial(custom_vjp, nondiff_argnums=(2,))
def _depthwise(x, w, stride):
    """A VALID depthwise convolution as a sum over the kernel's elements, which XLA fuses to one loop."""
    return _filter(x, w, stride)


def _depthwise_backward(stride, saved, g):
    x, w = saved
    more = len(w) - 1
    spread = _pad(g, (more, more), [n + more for n in x.shape[1:3]], stride - 1)
    dx = _filter(spread, w[::-1, ::-1], 1)

    def element_gradient(i, j):  # of the kernel's element (i, j): [C]
        seen = _seen(x, i, j, g.shape[1:3], stride)
        return jnp.einsum("nc,nc->c", seen.reshape(-1, seen.shape[3]), g.reshape(-1, g.shape[3]))

    dw = jnp.array([[element_gradient(i, j) for j in range(len(w))] for i in range(len(w))])
    return dx, dw[:, :, None]


_depthwise.defvjp(lambda x, w, stride: (_filter(x, w, stride), (x, w)), _depthwise_backward)


def _space_to_depth(x, block):
    """[B, H, W, C, ...] to [B, H / block, W / block, block * block * C, ...]."""
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
    """Computes `group` neighbouring pixels of a row as channels of one, since XLA is slow with few channels: the kernel
    is repeated, shifted by a column each time, and strides by `group`."""
    size, _, inputs, outputs = w.shape
    height, width = (n + 2 * pad - size + 1 for n in x.shape[1:3])
    group = 4 if inputs <= 4 else 2
    if inputs * outputs > 256 or width % group:
        group = 1
    if group > 1:
        w = jnp.concatenate([jnp.pad(w, ((0, 0), (i, group - 1 - i), (0, 0), (0, 0))) for i in range(group)], axis=3)
    return _plain_conv(x, w, pad, (1, group)).reshape(len(x), height, width, outputs)


@partial(custom_vjp, nondiff_argnums=(2,))
def _conv(x, w, pad):
    return _grouped_conv(x, w, pad)


def _conv_backward(pad, saved, g):
    x, w = saved
    dx = _grouped_conv(g, w[::-1, ::-1].swapaxes(2, 3), len(w) - 1 - pad)
    # The kernel's gradient is the convolution of x with g, samples and channels swapped.
    dw = _plain_conv(x.transpose(3, 1, 2, 0), g.transpose(1, 2, 0, 3), pad)
    return dx, dw.transpose(1, 2, 0, 3)


_conv.defvjp(lambda x, w, pad: (_grouped_conv(x, w, pad), (x, w)), _conv_backward)


def avg_pool(x: jax.Array) -> jax.Array:
    """2 x 2 averages with stride 2: [B, H, W, C] -> [B, H/2, W/2, C], H and W even."""
    batch, height, width, channels = x.shape
    return x.reshape(batch, height // 2, 2, width // 2, 2, channels).mean(axis=(2, 4))


def _max(x, axis):
    """The maximum of each window of 3 with stride 2 along `axis`, whose size is even, and its index in the window,
    uint8 (the first of equals, as XLA's own)."""
    pairs = x.reshape(*x.shape[:axis], x.shape[axis] // 2, 2, *x.shape[axis + 1 :])
    first, second = (lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in (0, 1))
    pad = jnp.full_like(lax.slice_in_dim(first, 0, 1, axis=axis), -jnp.inf)
    third = jnp.concatenate([lax.slice_in_dim(first, 1, None, axis=axis), pad], axis)
    y = jnp.maximum(jnp.maximum(first, second), third)
    return y, jnp.where(first == y, jnp.uint8(0), jnp.where(second == y, jnp.uint8(1), jnp.uint8(2)))


def _max_backward(winner, g, axis):
    """The gradient of `_max`: each window's gradient goes to the place that `winner` names."""
    rest = jnp.where(winner == 2, g, 0)
    zero = jnp.zeros_like(lax.slice_in_dim(rest, 0, 1, axis=axis))
    from_left = jnp.concatenate([zero, lax.slice_in_dim(rest, 0, rest.shape[axis] - 1, axis=axis)], axis)
    pairs = jnp.stack([jnp.where(winner == 0, g, 0) + from_left, jnp.where(winner == 1, g, 0)], axis + 1)
    return pairs.reshape(*g.shape[:axis], 2 * g.shape[axis], *g.shape[axis + 1 :])


@custom_vjp
def max_pool(x: jax.Array) -> jax.Array:
    """3 x 3 max-pool with stride 2, SAME: [B, H, W, C] -> [B, H/2, W/2, C], H and W even."""
    return _max_pool_forward(x)[0]


def _max_pool_forward(x):
    rows, row_winner = _max(x, 2)
    y, winner = _max(rows, 1)
    return y, (row_winner, winner)  # bytes: a ninth of the memory of x, rows and y


def _max_pool_backward(saved, g):
    row_winner, winner = saved
    return (_max_backward(row_winner, _max_backward(winner, g, 1), 2),)


max_pool.defvjp(_max_pool_forward, _max_pool_backward)
