"""What bounds a gradient on a CPU? One network in variants of XLA, JAX and the chunks, beside PyTorch's oneDNN.

    python -m experiments.studies.cpu_speed.measure
    python -m experiments.studies.cpu_speed.measure --jax other/bin/python --torch theirs/bin/python

Each variant is a process of its own, and all take turns. The network is CleanRL's: the IMPALA CNN with 16, 32 and 32
channels, flattened, on frames uint8 [64, 64, 3].
"""

import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from common import devices, networks, runs
from common.flags import PositiveInt
from experiments import records

HERE = Path(__file__).parent
BATCH, SECONDS = 256, 5
ONE_DEVICE = "XLA_FLAGS=--xla_force_host_platform_device_count=1"
# Frames that a core processes at a time, dtype, environment variable.
VARIANTS = {
    "as shipped": (8, "float32", ""),
    "chunks of 4": (4, "float32", ""),
    "chunks of 16": (16, "float32", ""),
    "chunks of 32": (32, "float32", ""),
    "vectors of 512 bits": (8, "float32", "XLA_FLAGS=--xla_cpu_prefer_vector_width=512"),
    "vectors of 128 bits": (8, "float32", "XLA_FLAGS=--xla_cpu_prefer_vector_width=128"),
    "fast math": (8, "float32", "XLA_FLAGS=--xla_cpu_enable_fast_math=true"),
    "oneDNN within XLA": (8, "float32", "XLA_FLAGS=--xla_cpu_use_onednn=true"),
    "one device": (8, "float32", ONE_DEVICE),
    "one device, chunks of 256": (256, "float32", ONE_DEVICE),
    "huge pages": (8, "float32", "GLIBC_TUNABLES=glibc.malloc.hugetlb=1"),
    "bfloat16": (8, "bfloat16", ""),
}
TORCH = ("torch, 8 frames", "torch, 256 frames", "torch, 256 frames, channels last", "torch, 256 frames, bfloat16")


@dataclass(frozen=True)
class Args:
    rounds: PositiveInt = 5
    """how often each variant runs; the table has medians"""
    jax: tuple[str, ...] = ()
    """other Pythons, with other versions of JAX, that run the shipped variant too"""
    torch: str = ""
    """a Python with PyTorch"""


def measure(name: str) -> float:
    """Milliseconds of one frame's gradient, its forward pass included, in this process."""
    devices.CHUNK_SIZE, dtype, _ = VARIANTS[name]
    devices.use_every_core()
    encoder = networks.make_encoder(networks.EncoderArgs(width=1, pool="flatten", dtype=dtype))
    frames = np.random.default_rng(0).integers(0, 256, (BATCH, 64, 64, 3), np.uint8)
    params = jax.device_get(jax.jit(encoder.init)(jax.random.PRNGKey(0), frames[:1]))
    specs = devices.REPLICATED, devices.ENV_SHARDED
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "device")

    def loss(params, frames):
        return {"loss": (encoder.apply(params, frames) ** 2).sum(axis=-1)}

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=devices.REPLICATED, check_vma=False)
    def gradient(params, frames):
        return devices.gradient(loss, params, frames, jnp.ones(len(frames)))[0]

    params, frames = jax.device_put((params, frames), devices.shardings(mesh, specs))
    times, end = [], None
    while end is None or time.perf_counter() < end:
        start = time.perf_counter()
        jax.block_until_ready(gradient(params, frames))
        times.append(time.perf_counter() - start)
        end = end or time.perf_counter() + SECONDS  # after the first, which compiles
    return 1e3 * statistics.median(times[1:]) / BATCH


def run(python: str, name: str) -> tuple[float, str]:
    """`measure(name)`, or PyTorch's, in a process of its own; NaN without such a flag. And the library's version."""
    if name in VARIANTS:
        words = [python, "-m", "experiments.studies.cpu_speed.measure", "--child", name]
        variable = VARIANTS[name][2]
    else:
        words, variable = [python, str(HERE / "torch_gradient.py"), name, str(BATCH), str(SECONDS)], ""
    env = os.environ | ({variable.partition("=")[0]: variable.partition("=")[2]} if variable else {})
    done = subprocess.run(words, capture_output=True, text=True, env=env, cwd=records.ROOT, check=False)
    print(f"{python} {name}: {done.stdout.strip() or done.stderr.strip()[-300:]}", flush=True)
    milliseconds, _, version = done.stdout.strip().partition(" ") if done.returncode == 0 else ("nan", "", "")
    return float(milliseconds), version


def main(args: Args) -> None:
    for python in filter(None, (*args.jax, args.torch)):
        runs.check(shutil.which(python) is not None, f"--jax or --torch {python}: no such program")
    jobs = [(sys.executable, name) for name in VARIANTS] + [(python, "as shipped") for python in args.jax]
    jobs += [(args.torch, name) for name in TORCH] if args.torch else []
    times, versions = {job: [] for job in jobs}, {}
    for i in range(args.rounds):
        for job in jobs if i % 2 == 0 else reversed(jobs):
            milliseconds, version = run(*job)
            versions[job] = version or versions.get(job, "")
            times[job].append(milliseconds)
    rows = []
    for job, found in times.items():
        ratios = [x / first for x, first in zip(found, times[jobs[0]], strict=True)]
        row = {"variant": job[1], "library": versions[job], "ms": f"{np.median(found):.3g}"}
        row |= {"times_shipped": f"{np.median(ratios):.3g}", "rounds": args.rounds} | records.origin()
        del row["jax"]  # of this process
        rows.append(row)
    records.add_rows(HERE / "cpu_speed.csv", rows, ("variant", "library", "machine"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(measure(sys.argv[2]), "JAX", jax.__version__)
    else:
        runs.cli(Args, main)
