"""Runs on several hosts: joins the hosts, and converts pytrees between host-local and global arrays."""

import os
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from common import devices
from common.devices import REPLICATED


def initialize() -> None:
    """Joins the hosts of a job, before JAX starts, as SLURM (or another cluster that JAX knows) or the variables
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID name them. Raises RuntimeError or ValueError."""
    numbers = (os.environ.get(f"JAX_{name}") for name in ("NUM_PROCESSES", "PROCESS_ID"))
    processes, process = (int(number) if number else None for number in numbers)
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM, which a run handles
    # Under SLURM and Open MPI JAX would give each process one GPU; an empty list leaves it all of its host's.
    local_device_ids = None if os.environ.get("JAX_LOCAL_DEVICE_IDS") else []
    jax.distributed.initialize(
        num_processes=processes, process_id=process, local_device_ids=local_device_ids, heartbeat_timeout_seconds=30
    )


def host_to_global(mesh: Mesh, tree: Any, specs: Any) -> Any:
    """Makes each host's arrays, of its own environments, parts of global arrays; the data stay on its devices."""
    tree = jax.device_put(tree, devices.shardings(mesh.local_mesh, specs))
    if jax.process_count() == 1:
        return tree
    return multihost_utils.host_local_array_to_global_array(tree, mesh, specs)


def local_replica(mesh: Mesh, tree: Any) -> Any:
    """Replicated global arrays as arrays of this host's devices; nothing is copied."""
    if jax.process_count() == 1:
        return tree
    return multihost_utils.global_array_to_host_local_array(tree, mesh, REPLICATED)


def distribute(mesh: Mesh, tree: Any, specs: Any) -> Any:
    """Shards a pytree, of which every host has a full copy, over the devices of all hosts."""
    if jax.process_count() == 1:
        return jax.device_put(tree, devices.shardings(mesh, specs))

    def from_host(sharding, subtree):
        return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, sharding, x.__getitem__), subtree)

    return jax.tree.map(from_host, devices.shardings(mesh, specs), jax.device_get(tree))


def gather(tree: Any) -> Any:
    """Gathers a pytree of global arrays as NumPy arrays on every host."""

    def gather_array(x):
        local = not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated
        return x if local else multihost_utils.process_allgather(x, tiled=True)

    return jax.device_get(jax.tree.map(gather_array, tree))


def gather_per_host(tree: Any) -> dict[str, Any]:
    """Gathers a pytree of arrays from every host: {"0": tree of NumPy arrays, "1": ...}. Shapes are the same on all."""
    tree = jax.device_get(tree)
    if jax.process_count() == 1:
        return {"0": tree}

    def gather_bytes(x):  # bytes, since JAX would round 64 bits to 32
        x = np.asarray(x)
        rows = multihost_utils.process_allgather(np.frombuffer(x.tobytes(), np.uint8))
        return [np.frombuffer(row.tobytes(), x.dtype).reshape(x.shape) for row in rows]

    leaves, structure = jax.tree.flatten(tree)
    gathered = [gather_bytes(x) for x in leaves]
    return {str(i): jax.tree.unflatten(structure, [rows[i] for rows in gathered]) for i in range(jax.process_count())}
