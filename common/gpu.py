"""What makes networks fast on a GPU: max-pooling in a form that XLA compiles well, and layouts of kernels.

The form is about what a gradient keeps and reads, since memory bounds it. `networks.py` takes that of cpu.py on a
CPU. benchmarks/gpu_plan.py shows what XLA makes of it.
"""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Format, Layout

from common.derivatives import custom_vjp


def max_pool(x: jax.Array) -> jax.Array:
    """3 x 3 max-pool with stride 2, SAME: [B, H, W, C] -> [B, H/2, W/2, C] (rounded up), as `nn.max_pool`.

    Of that one's gradient XLA makes a scatter: additions in no fixed order, of numbers that were written to memory for
    it. Here a byte remembers which of its nine pixels won each window, and the gradient is one loop over the pixels.
    What bounds that loop is its instructions, so that each pixel asks no more than the four windows that it can lie in.
    """
    return _max_pool(x, (x.shape[1] % 2, x.shape[2] % 2))


@partial(custom_vjp, nondiff_argnums=(1,))
def _max_pool(x, odd):
    return _max_pool_forward(x, odd)[0]


def _max_pool_forward(x, odd):
    rows, columns = (2 * -(-n // 2) - 1 for n in x.shape[1:3])  # from a pixel of the first window to the last one's
    # SAME has padding behind all windows; before them too where the size is odd.
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
    blocks = (batch, height, 2, width, 2, channels)  # of 2 x 2 pixels, one for each window

    def shown(x, *back):  # to the pixels of each block: of the window so many rows and columns before its own
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *((n, -n, 0) for n in back), (0, 0, 0)])
        return jnp.broadcast_to(x[:, :, None, :, None], blocks)

    total = jnp.zeros((), g.dtype)
    for back in itertools.product(*((-before, 1 - before) for before in odd)):
        # Where a block's pixels lie in that window; outside of it there is none of the nine.
        i, j = (np.arange(2) + 2 * n + before for n, before in zip(back, odd, strict=True))
        inside = np.logical_and.outer((i >= 0) & (i <= 2), (j >= 0) & (j <= 2))
        pixel = np.where(inside, np.add.outer(3 * i, j), 9).astype(np.uint8)[:, None, :, None]
        total = total + jnp.where(shown(winner, *back) == pixel, shown(g, *back), 0)
    x = total.reshape(batch, 2 * height, 2 * width, channels)
    return (x[:, : 2 * height - odd[0], : 2 * width - odd[1]],)


_max_pool.defvjp(_max_pool_forward, _max_pool_backward)


def layouts(params):
    """For `jax.device_put`: where each array lies, and for the kernels of convolutions [H, W, I, O] the order in memory
    that cuDNN reads them in, output channels first; else each program that is given them makes it anew."""
    kernels = Layout(major_to_minor=(3, 0, 1, 2))
    return jax.tree.map(lambda x: Format(kernels, x.sharding) if x.ndim == 4 else x.sharding, params)
