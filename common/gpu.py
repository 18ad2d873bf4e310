"""Convolutions and max-pooling in forms that XLA compiles well on a GPU, and the memory layout of kernels there. cpu.py
has a CPU's forms; benchmarks/gpu_plan.py shows what XLA makes of these.
"""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Format, Layout

from common.derivatives import custom_vjp


def conv_general_dilated(x: jax.Array, w: jax.Array, strides, padding, **options) -> jax.Array:
    """`lax.conv_general_dilated`; in bfloat16 with channels of zeros up to a multiple of 8, which cuDNN would otherwise
    add in kernels of its own. Not for 512 frames or fewer, as in a step of acting: there launching kernels takes the
    time, and padding would be one more."""
    more = -x.shape[3] % 8
    if more and len(x) > 512 and x.dtype == jnp.bfloat16 and options.get("feature_group_count", 1) == 1:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, more)))
        w = jnp.pad(w, ((0, 0), (0, 0), (0, more), (0, 0)))
    return lax.conv_general_dilated(x, w, strides, padding, **options)


def max_pool(x: jax.Array) -> jax.Array:
    """3 x 3 max-pool with stride 2, SAME: [B, H, W, C] -> [B, H/2, W/2, C] (rounded up), as `nn.max_pool`.

    XLA computes that one's gradient as a scatter: slow, and added in no fixed order. Here a byte per window records
    which of its nine pixels is the maximum, and the gradient is one loop over the pixels, each of which reads only the
    four windows that it can lie in.
    """
    return _max_pool(x, (x.shape[1] % 2, x.shape[2] % 2))


@partial(custom_vjp, nondiff_argnums=(1,))
def _max_pool(x, odd):
    return _max_pool_forward(x, odd)[0]


def _max_pool_forward(x, odd):
    rows, columns = (2 * -(-n // 2) - 1 for n in x.shape[1:3])  # from the first window's pixel to the last one's
    # SAME pads behind all windows, and before them if the size is odd.
    x = lax.pad(x, jnp.array(-jnp.inf, x.dtype), [(0, 0, 0), *((before, 1, 0) for before in odd), (0, 0, 0)])
    y = x[:, :rows:2, :columns:2]
    winner = jnp.zeros(y.shape, jnp.uint8)
    for pixel in range(1, 9):
        i, j = divmod(pixel, 3)
        seen = x[:, i : i + rows : 2, j : j + columns : 2]
        winner = jnp.where(seen > y, jnp.uint8(pixel), winner)  # the first of equals, as XLA's own
        y = jnp.maximum(y, seen)
    return y, winner


def _max_pool_backward(odd, winner, g):
    batch, height, width, channels = g.shape
    blocks = (batch, height, 2, width, 2, channels)  # of 2 x 2 pixels, one per window

    def shown(x, *back):  # to each pixel, x of the window that lies `back` rows and columns before its block's own
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *((n, -n, 0) for n in back), (0, 0, 0)])
        return jnp.broadcast_to(x[:, :, None, :, None], blocks)

    total = jnp.zeros((), g.dtype)
    for back in itertools.product(*((-before, 1 - before) for before in odd)):
        # The place of a block's pixels in that window, 9 outside of it.
        i, j = (np.arange(2) + 2 * n + before for n, before in zip(back, odd, strict=True))
        inside = np.logical_and.outer((i >= 0) & (i <= 2), (j >= 0) & (j <= 2))
        pixel = np.where(inside, np.add.outer(3 * i, j), 9).astype(np.uint8)[:, None, :, None]
        total = total + jnp.where(shown(winner, *back) == pixel, shown(g, *back), 0)
    x = total.reshape(batch, 2 * height, 2 * width, channels)
    return (x[:, : 2 * height - odd[0], : 2 * width - odd[1]],)


_max_pool.defvjp(_max_pool_forward, _max_pool_backward)


def layouts(params):
    """Formats for `jax.device_put` that lay out convolution kernels [H, W, I, O] as cuDNN reads them, output channels
    first; otherwise each program that takes them transposes them anew."""
    kernels = Layout(major_to_minor=(3, 0, 1, 2))
    return jax.tree.map(lambda x: Format(kernels, x.sharding) if x.ndim == 4 else x.sharding, params)
