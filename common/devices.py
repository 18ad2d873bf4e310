"""Which devices there are, and how a run's games are spread over them.

A run has one mesh axis, "device": the cores of a CPU, the GPUs of a host, the hosts of a job. Each device keeps the
frames of its own games and learns from them; only sums cross over (`total`), of gradients, moments and counts. What
learns is the same on every device. Which device a game is on decides nothing about how it is played.

On a CPU, where most of XLA's convolutions run on one core, each core is a device, and takes a few samples at a time, so
that the activations stay in its cache.
"""

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from functools import lru_cache, partial, wraps
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental import multihost_utils as multihost
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

CHUNK = 8  # frames

# Where an array lies: the same on every device; or with each device its own games, [N, ...] or [T, N, ...].
SAME, GAMES, STEPS = P(), P("device"), P(None, "device")


# Compiler options of what runs once: to optimise it takes longer than to run it as it is.
UNOPTIMISED = {"xla_backend_optimization_level": 0}


@partial(jax.jit, static_argnums=(0, 1, 2), compiler_options=UNOPTIMISED)
def run_once(function: Callable, args: Any, agent: Any) -> Any:
    """function(args, agent), both static: compiled without XLA's optimiser."""
    return function(args, agent)


def host_only(default: Any) -> Any:
    """A flag that no compiled program depends on: runs that differ in nothing else share their programs."""
    return dataclasses.field(default=default, compare=False)


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


def connect() -> None:
    """Joins the hosts of a job, before JAX starts: those of SLURM or another cluster that JAX knows, or as
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID say. Raises RuntimeError or ValueError."""
    numbers = (os.environ.get(f"JAX_{name}") for name in ("NUM_PROCESSES", "PROCESS_ID"))
    processes, process = (int(number) if number else None for number in numbers)
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM, which a run answers
    # Under SLURM and Open MPI JAX would give each process one GPU; here a host is one process, with all of its GPUs.
    own = None if os.environ.get("JAX_LOCAL_DEVICE_IDS") else []
    jax.distributed.initialize(
        num_processes=processes, process_id=process, local_device_ids=own, heartbeat_timeout_seconds=30
    )


# THE MESH


def hosts(args: Any) -> int:
    """How many hosts train together."""
    return jax.process_count() if args.distributed else 1


def host(args: Any) -> int:
    """This host's number, from 0; host 0 logs, evaluates and writes."""
    return jax.process_index() if args.distributed else 0


def of_hosts(args: Any) -> list[list[jax.Device]]:
    """Each host's devices."""
    return [[device for device in jax.devices() if device.process_index == i] for i in range(hosts(args))]


def of_learner(args: Any) -> list[jax.Device]:
    """This host's devices but for those that only actors use, the last `args.actor_devices`."""
    every = jax.local_devices()
    return every[: max(0, len(every) - getattr(args, "actor_devices", 0))]


def of_actors(args: Any, number: int) -> list[jax.Device]:
    """A device of this host for each actor: in turns the last `args.actor_devices`, or those of the learner."""
    every = jax.local_devices()[-args.actor_devices :] if args.actor_devices else of_learner(args)[: count(args)]
    return [every[-1 - actor % len(every)] for actor in range(number)]


@lru_cache
def count(args: Any) -> int:
    """How many devices of this host learn: `args.num_devices`, or as many as divide all of `args.shares()`."""
    return args.num_devices or max(that_divide(args, math.gcd(*args.shares().values())), default=1)


def that_divide(args: Any, share: int) -> list[int]:
    """The numbers of devices per host among which `share` games or samples can be divided evenly."""
    return [n for n in range(1, len(of_learner(args)) + 1) if share % (n * hosts(args)) == 0]


@lru_cache
def mesh(args: Any, every_host: bool = True) -> Mesh:
    """The devices that learn, host by host, or those of this host."""
    if not every_host or hosts(args) == 1:
        return Mesh(np.array(of_learner(args)[: count(args)]), "device")
    return Mesh(np.array([device for own in of_hosts(args) for device in own[: count(args)]]), "device")


def games_of_host(args: Any) -> np.ndarray:
    """The numbers int32 [n] of the games that this host plays."""
    share = args.num_envs // hosts(args)
    return np.arange(share, dtype=np.int32) + host(args) * share


def multiple(args: Any, number: int) -> int:
    """`number` of games, rounded down to a multiple of this host's devices that learn, and at least one for each."""
    each = count(args)
    return each * max(number // each, 1)


def group_limit(system: Path = Path("/")) -> float:
    """The bytes of memory that a container, or a job of SLURM, leaves this process; inf where nothing limits it."""
    limits = [math.inf]
    with contextlib.suppress(OSError):
        for line in (system / "proc/self/cgroup").read_text().splitlines():
            _, kinds, group = line.split(":", 2)
            top, name = ("memory", "memory.limit_in_bytes") if kinds else ("", "memory.max")  # versions 1 and 2
            if kinds in ("", "memory"):
                own = Path(group.strip("/"))
                for part in (own, *own.parents):  # each group is within the limits of those around it
                    with contextlib.suppress(OSError, ValueError):  # it has none, or "max"
                        limits.append(int((system / "sys/fs/cgroup" / top / part / name).read_text()))
    return min(limits)


def memory(args: Any) -> tuple[float, float]:
    """Bytes of memory: of this host (or what is left to it there), and of its devices that learn, where they say it."""
    bytes_of_host = min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), group_limit())
    stats = [device.memory_stats() or {} for device in of_learner(args)[: count(args)]]
    return bytes_of_host, sum(of_one.get("bytes_limit", math.inf) for of_one in stats)  # a CPU does not


def layout(kind: Callable, *, games: str = "", steps: str = "", **parts: Any) -> Any:
    """Where the fields of a NamedTuple lie: these with each device's games, [N, ...] or [T, N, ...], `parts` as said,
    all others the same on every device."""
    specs = dict.fromkeys(games.split(), GAMES) | dict.fromkeys(steps.split(), STEPS) | parts
    return kind(**{name: specs.get(name, SAME) for name in kind._fields})


def spread(
    in_specs: Sequence[Any], out_specs: Any, *, every_host: bool = True, when: Callable = lambda args: True
) -> Callable:
    """A decorator for function(args, ..., *arrays), which each device then runs on its own part of the arrays.

    Args:
      in_specs: where each of the last arguments lies, `layout`s or parts of them; a list of one for a sequence of such.
      out_specs: the same of what the function returns.
      every_host: on the devices of all hosts; else on those of this host.
      when: when(args) says whether; else it runs as it is, wherever its arrays are.
    """

    def decorate(function):
        @wraps(function)
        def on_each_device(args, *given):
            if not when(args):
                return function(args, *given)
            static, arrays = given[: -len(in_specs)], given[-len(in_specs) :]
            return jax.shard_map(
                partial(function, args, *static),
                mesh=mesh(args, every_host),
                in_specs=tuple(
                    type(some)(spec * len(some)) if isinstance(spec, list) else spec
                    for spec, some in zip(in_specs, arrays, strict=True)
                ),
                out_specs=out_specs,
                check_vma=False,
            )(*arrays)

        return on_each_device

    return decorate


def put(args: Any, tree: Any, specs: Any) -> Any:
    """Puts a tree of arrays, of this host's games where they are of games, on this host's devices that learn."""
    return jax.device_put(tree, shardings(args, specs, every_host=False))


def feed(args: Any, tree: Any) -> Any:
    """Arrays [n, ...] of this host's games, for the jitted function that is called next. With one device they stay
    where they are: the call moves them itself, which saves .4 ms of a step's 1.7 (an H100, 64 games)."""
    return put(args, tree, GAMES) if mesh(args, every_host=False).size > 1 else tree


def join(args: Any, tree: Any, specs: Any) -> Any:
    """Puts a tree of arrays on the devices that learn; arrays of games are joined with those of the other hosts."""
    tree = put(args, tree, specs)
    return _same_parts(mesh(args), tree, specs) if hosts(args) > 1 else tree


def here(args: Any, tree: Any) -> Any:
    """What is the same on all hosts, as arrays of this one; nothing is copied."""
    return _same_parts(mesh(args, every_host=False), tree, SAME) if hosts(args) > 1 else tree


def share(args: Any, tree: Any, specs: Any) -> Any:
    """Puts a tree of arrays, which each host has of all games, on the devices of all hosts."""
    if hosts(args) == 1:
        return put(args, tree, specs)

    def own_parts(where, some):
        return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, where, x.__getitem__), some)

    return jax.tree.map(own_parts, shardings(args, specs), jax.device_get(tree))


def whole(args: Any, tree: Any) -> Any:
    """A tree of arrays on the devices of all hosts, as NumPy arrays on each host."""

    def collect(x):
        return x if x.is_fully_addressable or x.is_fully_replicated else multihost.process_allgather(x, tiled=True)

    return jax.device_get(jax.tree.map(collect, tree) if hosts(args) > 1 else tree)


def of_each_host(args: Any, tree: Any) -> dict[str, Any]:
    """What each host gives of a tree of arrays of the same shapes: a tree of NumPy arrays for each host's number."""
    tree = jax.device_get(tree)
    if hosts(args) == 1:
        return {"0": tree}

    def collect(x):  # as bytes, since JAX would round 64 bits to 32
        x = np.asarray(x)
        everyone = multihost.process_allgather(np.frombuffer(x.tobytes(), np.uint8))
        return [np.frombuffer(some.tobytes(), x.dtype).reshape(x.shape) for some in everyone]

    leaves, structure = jax.tree.flatten(tree)
    collected = [collect(x) for x in leaves]
    return {str(i): jax.tree.unflatten(structure, [some[i] for some in collected]) for i in range(hosts(args))}


def shardings(args: Any, specs: Any, *, every_host: bool = True) -> Any:
    """Where arrays of all games lie, or of this host's, as jax.jit and jax.device_put take it."""
    return jax.tree.map(partial(NamedSharding, mesh(args, every_host)), specs, is_leaf=_is_spec)


def _same_parts(where: Mesh, tree: Any, specs: Any) -> Any:
    """The arrays whose parts on this host's devices are as they are, on a mesh of more or fewer hosts."""

    def of_parts(spec, x):
        parts = [part.data for part in x.addressable_shards]
        axes = (*spec, *[None] * (x.ndim - len(spec)))
        shape = [n * where.size if axis else n for n, axis in zip(parts[0].shape, axes, strict=True)]
        return jax.make_array_from_single_device_arrays(tuple(shape), NamedSharding(where, spec), parts)

    return jax.tree.map(lambda spec, some: jax.tree.map(partial(of_parts, spec), some), specs, tree, is_leaf=_is_spec)


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


# WITHIN A SPREAD FUNCTION


def size() -> int:
    """How many devices run what is traced: 1 outside of a spread function."""
    try:
        return lax.axis_size("device")
    except NameError:
        return 1


def total(tree: Any) -> Any:
    """The tree of arrays, each summed over all devices: same shapes, same dtypes."""
    return lax.psum(tree, "device") if size() > 1 else tree  # a CPU would copy all of it, even for one


def highest(x: jax.Array) -> jax.Array:
    """The maximum over all devices."""
    return lax.pmax(x, "device") if size() > 1 else x


def own_key(key: jax.Array) -> jax.Array:
    """A key of this device's own."""
    return jax.random.fold_in(key, lax.axis_index("device")) if size() > 1 else key


def keys_of(key: jax.Array, numbers: jax.Array) -> jax.Array:
    """A key for each number int32 [N], such as a game's: uint32 [N, 2], wherever it is drawn."""
    return jax.vmap(partial(jax.random.fold_in, key))(numbers)


# CHUNKS


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
    weight = weight / jnp.maximum(total(weight.sum()), 1)

    def objective(params, some):
        batch, weight = some
        parts = _per_sample(loss(params, batch), weight.shape)
        means = {name: (weight * part).sum() for name, part in parts.items()}
        return means["loss"], (means, parts)

    differentiate = jax.grad(objective, has_aux=True)
    data = batch, weight
    if whole or not on_cpu():
        grads, (means, parts) = differentiate(params, data)
        return *total((grads, means)), parts

    samples, steps = len(weight), weight.size // len(weight)
    few = max(n for n in range(1, max(CHUNK // steps, 1) + 1) if samples % n == 0)
    chunks = _chunks(data, few)

    def add(sums, chunk):
        grads, metrics = differentiate(params, chunk)
        return jax.tree.map(jnp.add, sums, grads), metrics

    grads, (means, parts) = lax.scan(add, jax.tree.map(jnp.zeros_like, params), chunks)
    means = jax.tree.map(lambda x: x.sum(0), means)
    return *total((grads, means)), jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), parts)


def _per_sample(parts, shape: tuple[int, ...]) -> dict:
    """What a loss has returned, if that is parts per sample."""
    must = f"a loss returns a dict of parts per sample, here float32 {list(shape)}, one of them 'loss'"
    if not isinstance(parts, dict) or "loss" not in parts:
        got = f"a dict of {', '.join(parts)}" if isinstance(parts, dict) else f"{type(parts).__name__}"
        raise ValueError(f"{must}: this one returned {got}")
    for name, part in parts.items():
        if jnp.shape(part) != shape:
            advice = "leave out the mean or sum over samples, which devices.gradient takes by weight"
            if jnp.ndim(part) > len(shape):
                advice = "sum it over, or index, its last axes"
            raise ValueError(f"{must}: its part {name!r} has shape {list(jnp.shape(part))}; {advice}")
    return parts


def _chunks(tree, few: int):
    """[B, ...] to [B / few, few, ...]."""
    return jax.tree.map(lambda x: x.reshape(-1, few, *x.shape[1:]), tree)


# SMALL PARTS OF AN UPDATE
# On a GPU what counts is how many kernels are launched, each of which takes longer than to work through an array.


def norm(tree) -> jax.Array:
    """The Euclidean norm of all numbers in a tree of arrays, float32 []."""
    return optax.tree.norm(tree) if on_cpu() else jnp.sqrt((ravel_pytree(tree)[0] ** 2).sum())


def clip_by_norm(most: float) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm` (0: none) with the `norm` above, so that one that is logged too is computed once."""
    if not most:
        return optax.identity()
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
