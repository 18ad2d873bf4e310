"""The devices of a run: one mesh axis over them, PartitionSpecs, collectives, gradients of per-sample losses.

The mesh has one axis, "device", over all learner devices: CPU cores or GPUs, of one host or several. Each keeps the
frames of its own environments and learns from them; only sums and maxima of gradients, moments and counts cross
(`psum`, `pmax`). Parameters are replicated. How an environment is played does not depend on its device.

XLA runs most convolutions on one core of a CPU. So each core is a device, and processes a few samples at a time, whose
activations stay in its cache.
"""

import contextlib
import importlib.util
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

CHUNK_SIZE = 8  # frames

REPLICATED, ENV_SHARDED, TIME_ENV_SHARDED = P(), P("device"), P(None, "device")  # the last two: [N, ...], [T, N, ...]
UNOPTIMISED = {"xla_backend_optimization_level": 0}  # compiler options for programs that run once


def on_cpu() -> bool:
    """Whether JAX's default backend is the CPU."""
    return jax.default_backend() == "cpu"


def available_cores(cpu_max: str = "/sys/fs/cgroup/cpu.max") -> int:
    """CPU cores that this process may use: those of its affinity, or of its container's quota if that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2, or no quota
        quota, period = Path(cpu_max).read_text().split()
        cores = min(cores, max(int(quota) // int(period), 1))
    return cores


def host_memory(cgroup: str = "/sys/fs/cgroup") -> int:
    """Bytes of this host's memory, or of its container's limit if that is less."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroup v2, v1
        with contextlib.suppress(OSError, ValueError):  # another version, or no limit
            memory = min(memory, int((Path(cgroup) / limit).read_text()))
    return memory


def describe(mesh: Mesh) -> str:
    """The learner devices in words, and a hint if CUDA's plugin is installed but finds no GPU."""
    device = jax.local_devices()[0]  # another host's tells nothing of its memory
    kind, stats = device.device_kind, device.memory_stats()
    if not on_cpu():
        return f"{mesh.size} x {kind}" + (f", {stats['bytes_limit'] / 1e9:.0f} GB each" if stats else "")
    text = f"CPU, {mesh.size} of its cores"
    for version in (12, 13):
        if importlib.util.find_spec(f"jax_cuda{version}_plugin"):
            return f"{text}; jax-cuda{version}-plugin is installed, but JAX finds no GPU: see docs/troubleshooting.md"
    return text


def use_every_core() -> None:
    """Makes cores JAX devices: the largest power of two of them, at most 8; no effect once JAX has started."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_cpu_collective_call" not in flags:  # a core may wait long for one that other programs use
        os.environ["XLA_FLAGS"] = (
            f"{flags} --xla_cpu_collective_call_terminate_timeout_seconds=3600"
            " --xla_cpu_collective_call_warn_stuck_timeout_seconds=600"
        )
    if "xla_force_host_platform_device_count" not in flags:
        cores = available_cores()
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", min(1 << (cores.bit_length() - 1), 8))


# THE MESH


def learner_devices(args: Any, host: int | None = None) -> list[jax.Device]:
    """The devices of a host (default: this one) that may learn: all but the last `args.actor_devices`."""
    every = jax.local_devices(process_index=host)
    return every[: max(0, len(every) - getattr(args, "actor_devices", 0))]


def actor_devices(args: Any) -> list[jax.Device]:
    """A device of this host for each actor, round robin: the last `args.actor_devices`, or else those that learn."""
    if args.actor_devices:
        every = jax.local_devices()[-args.actor_devices :]
    else:
        every = learner_devices(args)[: num_learner_devices(args)]
    return [every[-1 - actor % len(every)] for actor in range(args.num_actors)]


def num_learner_devices(args: Any) -> int:
    """Number of learner devices per host: `args.num_devices`, or the most that divide all `args.sharded_sizes()`."""
    return args.num_devices or max(valid_device_counts(args, math.gcd(*args.sharded_sizes().values())), default=1)


def valid_device_counts(args: Any, size: int) -> list[int]:
    """The numbers of devices per host that divide `size` environments or samples evenly."""
    most = len(learner_devices(args))
    return [n for n in range(1, most + 1) if size % (n * jax.process_count()) == 0]


def make_mesh(args: Any) -> Mesh:
    """The mesh of all learner devices, host by host; `mesh.local_mesh` has this host's."""
    count = num_learner_devices(args)
    every = [device for host in range(jax.process_count()) for device in learner_devices(args, host)[:count]]
    return Mesh(np.array(every), "device")


def local_env_ids(args: Any) -> np.ndarray:
    """The ids int32 [n] of this host's environments, of `args.num_envs` in all."""
    count = args.num_envs // jax.process_count()
    return np.arange(count, dtype=np.int32) + jax.process_index() * count


def round_to_devices(mesh: Mesh, num_envs: int) -> int:
    """`num_envs` rounded down to a multiple of this host's devices, at least one for each."""
    each = mesh.local_mesh.size
    return each * max(num_envs // each, 1)


def partition_specs(kind: Callable, **specs: Any) -> Any:
    """A NamedTuple `kind` of PartitionSpecs: those given, and REPLICATED for all other fields."""
    return kind(**dict.fromkeys(kind._fields, REPLICATED) | specs)


def shardings(mesh: Mesh, specs: Any) -> Any:
    """The NamedShardings of a pytree of PartitionSpecs."""
    return jax.tree.map(partial(NamedSharding, mesh), specs)


# WITHIN shard_map, and outside of it on one device


def axis_size() -> int:
    """The size of the mesh axis, 1 outside of `jax.shard_map`."""
    try:
        return lax.axis_size("device")
    except NameError:
        return 1


def psum(tree: Any) -> Any:
    """`lax.psum` of a pytree over all devices."""
    return lax.psum(tree, "device") if axis_size() > 1 else tree  # on one device a CPU would still copy all of it


def pmax(x: jax.Array) -> jax.Array:
    """`lax.pmax` over all devices."""
    return lax.pmax(x, "device") if axis_size() > 1 else x


def fold_in_axis_index(key: jax.Array) -> jax.Array:
    """A different key on each device."""
    return jax.random.fold_in(key, lax.axis_index("device")) if axis_size() > 1 else key


def fold_in_ids(key: jax.Array, ids: jax.Array) -> jax.Array:
    """A key uint32 [N, 2] for each id int32 [N], such as an environment's, on any device the same."""
    return jax.vmap(partial(jax.random.fold_in, key))(ids)


# CHUNKS


def map_in_chunks(function: Callable, x):
    """`function(x)` of arrays [B, ...] -> arrays [B, ...]; on a CPU a few samples at a time, its gradient too. For code
    that runs on one device, as inside `shard_map`."""
    size = len(jax.tree.leaves(x)[0])
    if not on_cpu() or size <= CHUNK_SIZE:
        return function(x)
    x = jax.tree.map(lambda x: jnp.pad(x, ((0, -size % CHUNK_SIZE), *[(0, 0)] * (x.ndim - 1))), x)
    out = lax.map(jax.checkpoint(function, policy=_saveable, prevent_cse=False), _split(x, CHUNK_SIZE))
    return jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:])[:size], out)


def _saveable(primitive, *_, **__) -> bool:
    """A policy of `jax.checkpoint`: saves a chunk's intermediate results but for those only scaled or rearranged, such
    as a frame's pixels, which are faster to recompute than to read from memory."""
    cheap = "convert_element_type", "sub", "div", "broadcast_in_dim", "pad", "reshape", "transpose"
    return primitive.name not in cheap


def gradient(loss: Callable, params, batch, weight: jax.Array, *, in_chunks: bool = True) -> tuple[Any, dict, dict]:
    """The gradient of the weighted mean of a loss that returns its terms *per sample*, as every loss here does.

    A sequence's terms must depend on that sequence alone (S = 1: on that sample): `loss` is called on all of a device's
    batch on an accelerator, but on a few samples at a time on each core of a CPU. Weighting, summing and averaging over
    devices happen here.

    Args:
      loss: loss(params, batch) -> dict of float32 [B, S]; the term "loss" is minimised, the means of all are returned.
      params: a pytree of arrays.
      batch: a pytree of arrays [B, ...]: B sequences of S steps (S = 1: single transitions).
      weight: float32 or bool [B, S] (or [B], then the terms too), 0 to leave a sample out; divided by its sum over all
        devices, if that is 1 or more.
      in_chunks: False for all of a device's samples at once on a CPU too: for samples without frames, or a loss across
        samples (of one device: a CPU's cores are devices, so give --num-devices 1 for the whole batch).

    Returns the gradient of the weighted mean of "loss", the weighted means float32 [] of all terms, and the terms.
    Raises ValueError if `loss` does not return terms per sample; a mean within an expression goes unnoticed.
    """
    weight = weight / jnp.maximum(psum(weight.sum()), 1)

    def objective(params, data):
        batch, weight = data
        terms = _check_per_sample(loss(params, batch), weight.shape)
        means = {name: (weight * term).sum() for name, term in terms.items()}
        return means["loss"], (means, terms)

    grad = jax.grad(objective, has_aux=True)
    data = batch, weight
    if not (in_chunks and on_cpu()):
        grads, (means, terms) = grad(params, data)
        return *psum((grads, means)), terms

    sequences, steps = len(weight), weight.size // len(weight)
    size = max(n for n in range(1, max(CHUNK_SIZE // steps, 1) + 1) if sequences % n == 0)  # sequences in a chunk

    def add_chunk(sums, chunk):
        grads, aux = grad(params, chunk)
        return jax.tree.map(jnp.add, sums, grads), aux

    grads, (means, terms) = lax.scan(add_chunk, jax.tree.map(jnp.zeros_like, params), _split(data, size))
    means = jax.tree.map(lambda x: x.sum(0), means)
    return *psum((grads, means)), jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), terms)


def _check_per_sample(terms, shape: tuple[int, ...]) -> dict:
    """Checks the terms that a loss returned; raises ValueError if they are not per sample."""
    must = f"a loss returns a dict of terms per sample, here float32 {list(shape)}, one of them 'loss'"
    if not isinstance(terms, dict) or "loss" not in terms:
        got = f"a dict of {', '.join(terms)}" if isinstance(terms, dict) else f"{type(terms).__name__}"
        raise ValueError(f"{must}: this one returned {got}")
    for name, term in terms.items():
        if jnp.shape(term) != shape:
            advice = "leave out the mean or sum over samples, devices.gradient takes the weighted mean"
            if jnp.ndim(term) > len(shape):
                advice = "sum it over, or index, its last axes"
            raise ValueError(f"{must}: its term {name!r} has shape {list(jnp.shape(term))}; {advice}")
    return terms


def _split(tree, size: int):
    """[B, ...] to [B / size, size, ...]."""
    return jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), tree)


# SMALL PARTS OF AN UPDATE, where a GPU's time is that of launching kernels


def global_norm(tree) -> jax.Array:
    """`optax.global_norm` of a pytree, float32 [], in few kernels on a GPU."""
    return optax.tree.norm(tree) if on_cpu() else jnp.sqrt((ravel_pytree(tree)[0] ** 2).sum())


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm` (0: none); on a GPU with `global_norm`, which XLA computes once, for logging too."""
    if not max_norm:
        return optax.identity()
    if on_cpu():
        return optax.clip_by_global_norm(max_norm)

    def clip(grads, params):
        scale = jnp.minimum(1.0, max_norm / global_norm(grads))
        return jax.tree.map(lambda g: scale * g, grads)

    return optax.stateless(clip)


def cond(condition: jax.Array, true_function: Callable, false_function: Callable, *arrays):
    """`lax.cond`, but a GPU computes both branches: branching would wait for the host and copy unchanged arrays."""
    if on_cpu():
        return lax.cond(condition, true_function, false_function, *arrays)
    return jax.tree.map(partial(jnp.where, condition), true_function(*arrays), false_function(*arrays))


def optimization_barrier(tree):
    """`lax.optimization_barrier` on a CPU, where XLA may compute a large array anew for each use."""
    return lax.optimization_barrier(tree) if on_cpu() else tree


def scan_unroll() -> int:
    """`unroll` for a cheap scan over the steps of a rollout. A CPU is faster with 1."""
    return 1 if on_cpu() else 32
