"""Which devices there are, and how the network's work is laid out on them.

On an accelerator a batch is computed as a whole. On a CPU, where most of XLA's convolutions run on one core, every
core is a JAX device of its own: each takes its share of a batch, and of that a few samples at a time, so that the
activations stay in its cache. All other arrays are the same on every device.
"""

import contextlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

CHUNK = 8  # frames


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


def everywhere() -> NamedSharding | jax.Device:
    """Every device of a CPU, each with a copy; or the accelerator."""
    return NamedSharding(_cores(), P()) if on_cpu() else jax.devices()[0]


def replicate(tree):
    """Puts a tree of arrays `everywhere`."""
    return jax.device_put(tree, everywhere())


def in_chunks(function: Callable, x):
    """`function(x)`, arrays [B, ...] -> arrays [B, ...]: on a CPU, on the core that runs this, a few samples at a time.

    For use inside a loss, or where one thread has one core. Its gradient goes chunk by chunk too.
    """
    size = len(jax.tree.leaves(x)[0])
    if not on_cpu() or size <= CHUNK:
        return function(x)
    x = jax.tree.map(lambda x: jnp.pad(x, ((0, -size % CHUNK), *[(0, 0)] * (x.ndim - 1))), x)
    out = lax.map(jax.checkpoint(function, policy=_worth_keeping, prevent_cse=False), _chunks(x, CHUNK))
    return jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:])[:size], out)


def _worth_keeping(primitive, *_, **__) -> bool:
    """What the gradient keeps of the chunks' way forward: by then it has left the cache, so not what is only scaled or
    rearranged, such as a frame's pixels, which is made again sooner than fetched from memory."""
    moves = "convert_element_type", "sub", "div", "broadcast_in_dim", "pad", "reshape", "transpose"
    return primitive.name not in moves


def apply(function: Callable, params, frames: jax.Array):
    """`function(params, frames)` for frames [B, ...]: arrays [B, ...]. On a CPU, by core and a few at a time."""

    def share(params, frames, shared=False):
        out = in_chunks(partial(function, params), frames)
        return lax.all_gather(out, "device", tiled=True) if shared else out

    return _by_core(share, len(frames), P())(params, frames) if on_cpu() else share(params, frames)


def gradient(loss: Callable, params, batch, weight: jax.Array, *, whole: bool = False) -> tuple[Any, dict, dict]:
    """The gradient of a loss that says what it is *for each sample*: the contract of every loss in this project.

    `loss` is called on the whole batch on an accelerator, but on a few samples of it at a time on each core of a CPU.
    So it must not look across samples: whatever it makes of one sample depends on that sample alone. It returns its
    parts per sample, and here they are weighed and added up.

    Args:
      loss: loss(params, batch) -> dict of float32 [B, S]; the part "loss" is what is minimised, the others are logged.
      params: a tree of arrays.
      batch: a tree of arrays [B, ...]: B sequences of S steps (S = 1: single transitions).
      weight: float32 or bool [B, S] (or [B], and so the parts): how much each sample counts, 0 for not at all. It is
        divided by its sum here, where that is 1 or more.
      whole: all samples at once on a CPU too, where they are a few numbers and no frames.

    Returns the gradient of the weighted mean of "loss", the weighted means float32 [] of all parts, and the parts.

    Raises ValueError if `loss` returns anything but parts per sample. Shapes do not show a mean within an expression.
    """
    weight = weight / jnp.maximum(weight.sum(), 1)

    def objective(params, some):
        batch, weight = some
        parts = _per_sample(loss(params, batch), weight.shape)
        means = {name: (weight * part).sum() for name, part in parts.items()}
        return means["loss"], (means, parts)

    differentiate = jax.grad(objective, has_aux=True)
    if whole or not on_cpu():
        grads, (means, parts) = differentiate(params, (batch, weight))
        return grads, means, parts

    def share(params, data, shared):
        samples, steps = len(data[1]), data[1].size // len(data[1])
        chunks = _chunks(data, _divisor(samples, max(CHUNK // steps, 1)))
        grads, (means, _) = jax.eval_shape(differentiate, params, jax.tree.map(lambda x: x[0], chunks))
        zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (grads, means))

        def add(total, chunk):
            grads, (means, parts) = differentiate(params, chunk)
            return jax.tree.map(jnp.add, total, (grads, means)), parts

        total, parts = lax.scan(add, zero, chunks)
        parts = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), parts)
        return lax.psum(total, "device") if shared else total, parts

    (grads, means), parts = _by_core(share, len(weight), (P(), P("device")))(params, (batch, weight))
    return grads, means, parts


def _per_sample(parts, shape: tuple[int, ...]) -> dict:
    """What a loss has returned, if that is parts per sample."""
    must = f"a loss returns a dict of parts per sample, here float32 {list(shape)}, one of them 'loss'"
    if not isinstance(parts, dict) or "loss" not in parts:
        got = f"a dict of {', '.join(parts)}" if isinstance(parts, dict) else f"{type(parts).__name__}"
        raise ValueError(f"{must}: this one returned {got}")
    for name, part in parts.items():
        if jnp.shape(part) != shape:
            raise ValueError(
                f"{must}: its part {name!r} has shape {list(jnp.shape(part))}; leave out the mean or sum over samples, "
                "which devices.gradient takes by weight"
            )
    return parts


def _cores() -> Mesh:
    return Mesh(np.array(jax.devices()), "device")


def _by_core(function: Callable, size: int, out_specs) -> Callable:
    """`function(whole, batch)`, batch split over the cores, if they divide its `size`."""
    if size % jax.device_count():
        return lambda whole, batch: function(whole, batch, shared=False)
    split = partial(function, shared=True)
    return jax.shard_map(split, mesh=_cores(), in_specs=(P(), P("device")), out_specs=out_specs, check_vma=False)


def _divisor(number: int, most: int) -> int:
    """The largest divisor of `number` up to `most`."""
    return max(n for n in range(1, most + 1) if number % n == 0)


def _chunks(tree, few: int):
    """[B, ...] to [B / few, few, ...]."""
    return jax.tree.map(lambda x: x.reshape(-1, few, *x.shape[1:]), tree)


# SMALL PARTS OF AN UPDATE
# On a GPU what counts is how many kernels are launched, each of which takes longer than to work through an array.


def norm(tree) -> jax.Array:
    """The Euclidean norm of all numbers in a tree of arrays, float32 []."""
    return optax.tree.norm(tree) if on_cpu() else jnp.sqrt((ravel_pytree(tree)[0] ** 2).sum())


def clip_by_norm(most: float) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm` with the `norm` above, so that one that is logged too is computed once."""
    if on_cpu():
        return optax.clip_by_global_norm(most)

    def clip(grads, params):
        scale = jnp.minimum(1.0, most / norm(grads))
        return jax.tree.map(lambda g: scale * g, grads)

    return optax.stateless(clip)


def cond(condition: jax.Array, true_function: Callable, false_function: Callable, *arrays):
    """`lax.cond`. On a GPU, where a branch waits for the host and copies what it keeps, both sides are computed."""
    if on_cpu():
        return lax.cond(condition, true_function, false_function, *arrays)
    return jax.tree.map(partial(jnp.where, condition), true_function(*arrays), false_function(*arrays))


def compute_once(tree):
    """The same tree of arrays. On a CPU XLA may compute an array of millions again in each of its uses: not these."""
    return lax.optimization_barrier(tree) if on_cpu() else tree


def unroll() -> int:
    """How many steps at once a scan over the steps of a rollout takes, each a few numbers a game. A CPU is faster with
    one."""
    return 1 if on_cpu() else 32
