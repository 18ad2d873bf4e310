"""Memory, kernels, bytes and FLOPs of a script's programs as XLA compiles them for an H100, on a machine without a GPU.

Needs XLA's compiler for NVIDIA GPUs in an environment of its own; the flags in quotes are those of the script:

    python3.12 -m venv /tmp/gpu-plan
    /tmp/gpu-plan/bin/pip install -r requirements.txt "jax[cuda12-local]"  # the plugin without the rest of CUDA
    /tmp/gpu-plan/bin/python -m benchmarks.gpu_plan ppo --top 20
    /tmp/gpu-plan/bin/python -m benchmarks.gpu_plan ppo --flags="--num-envs 256 --num-steps 32"

XLA_FLAGS=--xla_dump_to=hlo keeps the programs. Nothing is measured, and nothing is autotuned: cuDNN's choice of
algorithms and their workspaces are not known. XLA reports no costs for a GPU that is not there, so they are counted in
the optimised HLO: the bytes that each kernel must read and write, each array once, and the FLOPs of convolutions and
matrix products, a multiply-add as two.
"""

import importlib.util
import math
import re
import unittest.mock
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich import box
from rich.console import Console
from rich.table import Table

import apex_procgen as apex
import impala_procgen as impala
import ppo_procgen as ppo
import rnd_montezuma as rnd
import sac_procgen as sac
import trpo_procgen as trpo
from common import atari, devices, envs, networks, offpolicy, replay, runs
from common.flags import NonNegativeInt
from common.gpu import layouts
from experiments import records

SCRIPTS = {"ppo": ppo, "trpo": trpo, "impala": impala, "apex": apex, "sac": sac, "rnd": rnd}
H100 = """
    gpu_device_info {
      cuda_compute_capability { major: 9 minor: 0 }
      core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
      threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
      shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
      registers_per_core_limit: 65536 registers_per_block_limit: 65536
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      memory_bandwidth: 3352320000000 l2_cache_size: 52428800 device_memory_size: 84929347584
    }
    platform_name: "CUDA"
    dnn_version_info { major: 9 minor: 28 patch: 0 }
    runtime_version { major: 12 minor: 9 patch: 0 }
    device_description_str: "NVIDIA H100 80GB HBM3"
"""  # XLA's GpuTargetConfigProto


@dataclass(frozen=True)
class Args:
    script: tyro.conf.Positional[Literal[tuple(SCRIPTS)]]
    """the script whose programs are compiled"""
    flags: str = ""
    """flags of the script, in quotes: --flags='--num-envs 8'"""
    top: NonNegativeInt = 0
    """also list so many kernels of each program, those that move the most bytes"""
    csv: str = ""
    """also append the table to this file"""


# PROGRAMS


def lowerings(script: ModuleType, args: Any, mesh: Mesh) -> dict[str, Callable[[], jax.stages.Lowered]]:
    """How to lower each program of a script for a mesh of one GPU, with arguments of the shapes that a run gives it."""
    gpu = NamedSharding(mesh, PartitionSpec())

    def array(*dims, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=gpu)

    def shapes(function, *arguments):
        return jax.tree.map(lambda x: array(*x.shape, dtype=x.dtype), jax.eval_shape(function, *arguments))

    def acting_params(network, params):
        params = shapes(partial(networks.cast_encoder, network.encoder.layers), params)
        return jax.tree.map(lambda x, layout: x.update(sharding=layout), params, layouts(params))

    agent = script.make_agent(args)
    state = shapes(partial(script.init_state, args, agent))
    if script is trpo:
        acting_agent = trpo.Agent(*map(networks.acting_agent, agent))
        params = {name: acting_params(network, state.params[name]) for name, network in agent._asdict().items()}
    else:
        acting_agent = networks.acting_agent(agent)
        params = acting_params(agent, state.params["agent"] if script in (ppo, rnd) else state.params)

    num_actors = args.num_actors if script in (impala, apex, sac) else 1
    length, num_envs = args.num_steps, args.num_envs // num_actors
    height, width, channels = (atari if script is rnd else envs).FRAME_SHAPE
    frames, episode_step = array(num_envs, channels, height, width, dtype=jnp.uint8), array(num_envs, dtype=jnp.int32)
    timesteps = envs.Timesteps(
        rewards=array(length, num_envs),
        **dict.fromkeys(("terminated", "truncated", "is_reset"), array(length, num_envs, dtype=bool)),
        episode_step=array(length + 1, num_envs, dtype=jnp.int32),
        forced_reset=array(num_envs, dtype=bool),
    )
    if script in (ppo, impala, rnd):
        init_env_state = partial(script.init_env_state, args)
    else:
        init_env_state = partial(envs.init_env_state, stack_offsets=args.stack_offsets)
    env_state = jax.eval_shape(init_env_state, episode_step)
    rollout = shapes(partial((offpolicy if script in (apex, sac) else script).begin_rollout, args), env_state, 0)
    act = jax.jit(partial(script.act, args, acting_agent), donate_argnums=1)
    programs = {"act": partial(act.lower, params, rollout, frames, episode_step)}

    if script is impala:
        args = replace(args, update_pieces=1)  # else there is no program of the whole
    update = script.make_update(args, agent, mesh)
    actor_rollouts, actor_timesteps = (rollout,) * num_actors, (timesteps,) * num_actors
    if script is impala:
        buffers = shapes(partial(impala.init_buffers, args))
        assemble_batch = partial(impala.assemble_batch, args)
        _, unrolls = shapes(assemble_batch, buffers, actor_rollouts, actor_timesteps, 0, 0)
        programs["update"] = partial(update.lower, state, unrolls)
    elif script in (apex, sac):
        buffer = shapes(partial(offpolicy.init_replay, args))
        insert = jax.jit(partial(offpolicy.insert, args), donate_argnums=0)
        programs["insert"] = partial(insert.lower, buffer, actor_rollouts, actor_timesteps, replay.SINGLE_POLICY, None)
        programs["update"] = partial(update.lower, state, buffer, 1, 1.0)  # one update
    else:
        programs["update"] = partial(update.lower, state, rollout, timesteps)
    return programs


# HLO: a list of computations; each instruction of the entry, and of the loops and branches it reaches, is a kernel.

SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
NO_KERNEL = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier"}
READ_IN_PART = {"dynamic-slice", "slice", "gather"}  # their first operand
WRITTEN_IN_PART = {"dynamic-update-slice": 1, "scatter": 2}  # in place; the operand from which on new values come
TARGET = r'custom_call_target="([^"]*)"'  # a library's function


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    op: str
    shapes: list[tuple[str, list[int]]]  # dtype and dimensions of each array that it makes
    operands: list[str]
    attributes: str
    root: bool

    @property
    def bytes(self) -> int:
        return sum(SIZES[dtype] * math.prod(dims) for dtype, dims in self.shapes)

    def find(self, pattern: str) -> str:
        """The first group of a pattern in the attributes, or nothing."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""


class Kernel(NamedTuple):
    kind: str  # the instruction's op, or a library's function
    source: str  # JAX's name of what it computes
    times: int  # in one run of the program
    bytes: int  # each time
    flops: int  # each time


def parse_hlo(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """Computations by name, each with its instructions by name; and the name of the entry."""
    computations, entry, current = {}, "", {}
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif x := re.match(r"\s+(ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(.*)", line):
            shapes = re.findall(r"(\w+)\[([\d,]*)\]", x[3])
            shapes = [(dtype, [int(n) for n in dims.split(",") if n]) for dtype, dims in shapes if dtype in SIZES]
            current[x[2]] = Instruction(x[2], x[4], shapes, re.findall(r"%([\w.\-]+)", x[5]), x[6], bool(x[1]))
    return computations, entry


def count_kernels(computations: dict, name: str, times: int = 1) -> list[Kernel]:
    """The kernels of a computation that runs so many times."""
    kernels, around = [], computations[name]

    def add(kind, x, moved, flops):
        kernels.append(Kernel(kind, x.find(r'op_name="([^"]*)"'), times, moved, flops))

    for x in around.values():
        if x.op == "while":
            trips = int(x.find(r'"known_trip_count":\{"n":"(\d+)"') or 1)  # 1 where only a run can tell
            kernels += count_kernels(computations, x.find(r"body=%([\w.\-]+)"), times * trips)
        elif x.op == "conditional":  # the branch with the most kernels
            branches = re.findall(r"_computation=%([\w.\-]+)", x.attributes)
            branches = branches or re.findall(r"%([\w.\-]+)", x.find(r"branch_computations=\{([^}]*)\}"))
            kernels += max((count_kernels(computations, branch, times) for branch in branches), key=len)
        elif x.op == "call":
            kernels += count_kernels(computations, x.find(r"to_apply=%([\w.\-]+)"), times)
        elif x.op == "fusion":
            body = computations[x.find(r"calls=%([\w.\-]+)")]
            add(x.op, x, fusion_bytes(body), sum(count_flops(y, body) for y in body.values()))
        elif x.op not in NO_KERNEL and not x.op.endswith("-done"):
            add(x.find(TARGET) or x.op, x, instruction_bytes(x, around), count_flops(x, around))
    return kernels


def count_flops(x: Instruction, around: dict[str, Instruction]) -> int:
    target = x.find(TARGET)
    if x.op == "dot" or target.startswith("__cublas"):
        contracted = x.find(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')
        _, left = around[x.operands[0]].shapes[0]
        return 2 * math.prod(x.shapes[0][1]) * math.prod(left[int(i)] for i in re.findall(r"\d+", contracted))
    if target.startswith("__cudnn$conv"):
        result, first, second = x.shapes[0][1], *(around[name].shapes[0][1] for name in x.operands[:2])
        kernel = result if "BackwardFilter" in target else second
        output = second if "BackwardFilter" in target else first if "BackwardInput" in target else result
        letters = x.find(r"dim_labels=\w+?_(\w+)->")  # each output pixel and channel sums over the kernel's other axes
        return 2 * math.prod(output) * math.prod(n for n, letter in zip(kernel, letters, strict=True) if letter != "o")
    return 0


def instruction_bytes(x: Instruction, around: dict[str, Instruction]) -> int:
    """Bytes read and written by an instruction that is a kernel of its own."""
    if x.op in WRITTEN_IN_PART:
        return 2 * sum(around[name].bytes for name in x.operands[WRITTEN_IN_PART[x.op] :])
    if x.op in READ_IN_PART:
        return 2 * x.bytes
    return x.bytes + sum(around[name].bytes for name in x.operands)


def fusion_bytes(body: dict[str, Instruction]) -> int:
    """Bytes read and written by a fusion: of an array that is sliced or updated in place only that part."""

    def read(name):
        size, total = body[name].bytes, 0
        users = [(y, i) for y in body.values() for i, operand in enumerate(y.operands) if operand == name]
        for y, i in users:
            if y.op in READ_IN_PART and i == 0:
                total += y.bytes
            elif y.op in ("bitcast", "reshape") and not y.root:
                total += read(y.name)
            elif y.op not in WRITTEN_IN_PART or i > 0:
                total += size
        return min(total, size)

    def written(y):
        if y.op in ("bitcast", "reshape", "tuple"):
            return sum(written(body[name]) for name in y.operands)
        if y.op == "dynamic-update-slice":
            return body[y.operands[1]].bytes
        if y.op == "scatter":  # atomic: each place is read and written
            return 2 * sum(body[name].bytes for name in y.operands[2:])
        return y.bytes

    reads = sum(read(name) for name, y in body.items() if y.op == "parameter")
    return reads + sum(written(y) for y in body.values() if y.root)


# THE COMMAND


def print_table(rows: list[dict[str, Any]]) -> None:
    table = Table(*rows[0], box=box.SIMPLE)
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=160).print(table)


def main(args: Args) -> None:
    jax.config.update("jax_platforms", "cpu")  # else the plug-in asks for a driver when JAX starts
    jax.config.update("jax_enable_compilation_cache", False)
    flags = records.read_flags(SCRIPTS[args.script], args.flags)
    found = importlib.util.find_spec("jax_plugins") and importlib.util.find_spec("jax_plugins.xla_cuda12")
    runs.check(bool(found), "jax-cuda12-plugin is not installed: see this file's first lines")
    records.make_room(args.csv, "--csv")
    gpus = topologies.get_topology_desc("h100", "cuda", target_config=H100, topology="1x1x1").devices
    mesh = Mesh(np.array(gpus), "device")
    rows, longest = [], []
    with unittest.mock.patch.object(devices, "on_cpu", return_value=False):
        programs = lowerings(SCRIPTS[args.script], flags, mesh)
        for name, lower in programs.items():
            compiled, program = lower().compile(), {"program": f"{args.script}.{name}"}
            kernels, memory = count_kernels(*parse_hlo(compiled.as_text())), compiled.memory_analysis()
            new = memory.output_size_in_bytes - memory.alias_size_in_bytes  # not written over arguments
            numbers = {
                "MiB": (memory.argument_size_in_bytes + new + memory.temp_size_in_bytes) / 2**20,
                "temporaries MiB": memory.temp_size_in_bytes / 2**20,
                "kernels": sum(k.times for k in kernels),
                "GB": sum(k.times * k.bytes for k in kernels) / 1e9,
                "GFLOP": sum(k.times * k.flops for k in kernels) / 1e9,
            }
            rows.append(program | {key: f"{x:.3g}" if x < 1000 else f"{x:.0f}" for key, x in numbers.items()})
            for k in sorted(kernels, key=lambda k: -k.times * k.bytes)[: args.top]:
                each = {"MB each": f"{k.bytes / 1e6:.3g}", "GFLOP each": f"{k.flops / 1e9:.3g}"}
                longest.append(program | {"kernel": k.kind, "times": k.times} | each | {"of": k.source[-60:]})
    print_table(rows)
    if longest:
        print_table(longest)
    origin = {"flags": args.flags, "jax": jax.__version__, "commit": records.commit()}
    records.append_rows(args.csv, [row | origin for row in rows])


if __name__ == "__main__":
    runs.cli(Args, main)
