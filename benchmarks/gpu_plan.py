"""What XLA would run on a GPU, planned on a machine without one: memory, kernels, bytes and FLOPs of each script's
programs, and a model of their time. No line of it is a measurement.

Needs the wheel jax-cuda12-plugin, which `make gpu-plan` installs in an environment of its own, but neither GPU nor
driver. The flags in quotes are those of the scripts whose programs are planned:

python -m benchmarks.gpu_plan
python -m benchmarks.gpu_plan ppo.act ppo.update --flags="--num-envs 256 --num-steps 32" --game-ms 0.5 --dump plans

The model: a kernel takes 3 us to launch and then as long as its bytes at the memory's full rate, or its FLOPs at 40 %
of the peak rate, whichever is more. XLA compiles without trying anything out, so that cuDNN's algorithms and their
workspace are not known, and atomic additions count as plain traffic. Use it to compare two versions of a program.
"""

import contextlib
import importlib.util
import shlex
import sys
import unittest.mock
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import tyro
from jax.experimental import topologies
from rich import box
from rich.console import Console
from rich.table import Table

import apex_procgen as apex
import doorgym
import hnppo_doorgym as hnppo
import impala_procgen as impala
import ppo_procgen as ppo
import rnd_montezuma as rnd
from benchmarks import hlo, records
from common import atari, devices, doors, envs, networks, runs
from common.gpu import layouts

WHEEL = "jax_plugins.xla_cuda12"


# GPUS


class Gpu(NamedTuple):
    """A GPU as XLA's compiler and the model of time see it; dense rates, without sparsity."""

    flops: dict[str, float]  # FLOP/s at best, by arithmetic
    bandwidth: float  # of memory, bytes/s
    description: str  # XLA's GpuTargetConfigProto, as text


GPUS = {
    "h100": Gpu(
        flops={"bf16": 989e12, "tf32": 494e12, "f32": 67e12},
        bandwidth=3.35e12,
        description="""
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
        """,
    ),
    "a100": Gpu(
        flops={"bf16": 312e12, "tf32": 156e12, "f32": 19.5e12},
        bandwidth=2.04e12,
        description="""
            gpu_device_info {
              cuda_compute_capability { major: 8 minor: 0 }
              core_count: 108 fpus_per_core: 64 clock_rate_ghz: 1.41
              threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
              shared_memory_per_block: 49152 shared_memory_per_block_optin: 166912 shared_memory_per_core: 167936
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              memory_bandwidth: 2039040000000 l2_cache_size: 41943040 device_memory_size: 85100068864
            }
            platform_name: "CUDA"
            dnn_version_info { major: 9 minor: 28 patch: 0 }
            runtime_version { major: 12 minor: 9 patch: 0 }
            device_description_str: "NVIDIA A100-SXM4-80GB"
        """,
    ),
}
SHARE = 0.4  # of the peak rate that convolutions and matrix products reach
LAUNCH = 3e-6  # seconds a kernel


def installed() -> bool:
    """Whether the wheel with XLA's compiler for NVIDIA GPUs is."""
    return importlib.util.find_spec("jax_plugins") is not None and importlib.util.find_spec(WHEEL) is not None


def target(gpu: str, count: int = 1) -> list[jax.Device]:
    """So many GPUs of a kind to compile for, in one host."""
    runs.check(
        installed(),
        "the wheel jax-cuda12-plugin is not installed here: `make gpu-plan` makes an environment that has it",
    )
    topology = topologies.get_topology_desc(gpu, "cuda", target_config=GPUS[gpu].description, topology=f"1x1x{count}")
    return list(topology.devices)


@contextlib.contextmanager
def planning() -> Iterator[None]:
    """Within it, programs are traced as on an accelerator and compiled anew."""
    cached = jax.config.jax_enable_compilation_cache
    jax.clear_caches()  # of what was traced for a CPU
    jax.config.update("jax_enable_compilation_cache", False)  # the same program for a CPU would be another's answer
    try:
        with unittest.mock.patch.object(devices, "on_cpu", return_value=False):
            yield
    finally:
        jax.config.update("jax_enable_compilation_cache", cached)
        jax.clear_caches()


# PROGRAMS


class Cycle(NamedTuple):
    """How often a script's loop runs its programs between two updates of its parameters (Ape-X: two unrolls)."""

    steps: int  # of all games together
    turns: int  # steps that each game plays, one after another
    calls: dict[str, int]  # of programs; "act" is one of them
    overlap: bool  # whether games go on while the GPU does something else


class Plan(NamedTuple):
    """A script's programs, for some flags."""

    programs: dict[str, Callable[[], jax.stages.Lowered]]
    cycle: Cycle


Place = Callable[[Any], Any]  # a tree of shapes -> the same, with the sharding that its arrays have on the GPUs


def on_first(gpus: list[jax.Device]) -> Place:
    """All arrays on the first GPU."""
    sharding = jax.sharding.SingleDeviceSharding(gpus[0])
    return partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding))


def array(place: Place, *shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return place(jax.ShapeDtypeStruct(shape, dtype))


def result(place: Place, function: Callable, *args) -> Any:
    """The shapes of what `function(*args)` returns."""
    return place(jax.eval_shape(function, *args))


def steps_of(place: Place, length: int, games: int) -> envs.Steps:
    flag = array(place, length, games, dtype=bool)
    return envs.Steps(
        rewards=array(place, length, games),
        terminated=flag,
        truncated=flag,
        done=flag,
        age=array(place, length + 1, games, dtype=jnp.int32),
        restarts=array(place, games, dtype=bool),
    )


def seen(place: Place, games: int, shape: tuple[int, int, int]) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """The newest frame of each game, channels first as EnvPool has them, and its age."""
    height, width, channels = shape
    frames = array(place, games, channels, height, width, dtype=jnp.uint8)
    return frames, array(place, games, dtype=jnp.int32)


def played_with(place: Place, agent, params: dict) -> dict:
    """What `networks.for_acting` returns."""
    params = result(place, partial(networks.cast_encoder, agent.encoder.layers.dtype), params)

    def lay(x, where):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    return jax.tree.map(lay, params, layouts(params))


def plan_ppo(args: ppo.Args, place: Place) -> Plan:
    agent = ppo.make_agent(args)
    state = result(place, partial(ppo.initial_state, args, agent))
    carry = result(place, partial(ppo.initial_carry, args))
    rollout = result(place, partial(ppo.begin_rollout, args), carry, 0)
    steps = steps_of(place, args.num_steps, args.num_envs)
    frames = seen(place, args.num_envs, envs.FRAME_SHAPE)
    params = played_with(place, agent, state.params["agent"])
    return Plan(
        {
            "act": partial(ppo.act.lower, args, agent, params, rollout, *frames),
            "update": partial(ppo.update.lower, args, agent, state, rollout, steps),
        },
        Cycle(
            steps=args.num_steps * args.num_envs,
            turns=args.num_steps,
            calls={"act": args.num_steps, "update": 1},
            overlap=False,
        ),
    )


def plan_impala(args: impala.Args, place: Place) -> Plan:
    agent, games = impala.make_agent(args), args.num_envs // args.num_actors
    state = result(place, partial(impala.initial_state, args, agent))
    memory = result(place, partial(impala.initial_memory, args))
    carry = result(place, partial(impala.initial_carry, args))
    rollout = result(place, partial(impala.begin_rollout, args), carry, 1, 0)
    rollouts, steps = (rollout,) * args.num_actors, steps_of(place, args.num_steps, args.num_envs)
    unrolls = result(place, partial(impala.remember, args), memory, rollouts, steps, 0, 0)[1]
    frames = seen(place, games, envs.FRAME_SHAPE)
    params = played_with(place, agent, state.params)
    return Plan(
        {
            "act": partial(impala.act.lower, args, agent, params, rollout, *frames),
            "remember": partial(impala.remember.lower, args, memory, rollouts, steps, 0, 0),
            "update": partial(impala.update.lower, args, agent, state, unrolls),
        },
        Cycle(
            steps=args.num_steps * args.num_envs,
            turns=args.num_steps,
            calls={"act": args.num_steps * args.num_actors, "remember": 1, "update": 1},
            overlap=args.max_lag > 0,
        ),
    )


def plan_apex(args: apex.Args, place: Place) -> Plan:
    agent, games = apex.make_agent(args), args.num_envs // args.num_actors
    state = result(place, partial(apex.initial_state, args, agent))
    buffer = result(place, partial(apex.initial_replay, args))
    carry = result(place, partial(apex.initial_carry, args))
    rollout = result(place, partial(apex.begin_rollout, args), carry, 1, 0)
    rollouts, steps = (rollout,) * args.num_actors, steps_of(place, args.num_steps, args.num_envs)
    batch = result(place, partial(apex.sample, args), buffer, 0, 1.0)
    frames, played = seen(place, games, envs.FRAME_SHAPE), args.num_steps * args.num_envs
    params = played_with(place, agent, state.params)
    return Plan(
        {
            "act": partial(
                apex.act.lower,
                args,
                agent,
                params,
                rollout,
                *frames,
                array(place, games),
            ),
            "insert": partial(apex.insert.lower, args, buffer, rollouts, steps),
            "sample": partial(apex.sample.lower, args, buffer, 0, 1.0),
            "update": partial(apex.update.lower, args, agent, state, batch),
            # Only a run knows how often its loop goes round: the plan is of one update.
            "learn_in_place": partial(apex.learn_in_place.lower, args, agent, state, buffer, 1, 1.0),
        },
        Cycle(
            steps=played,
            turns=args.num_steps,
            calls={
                "act": args.num_steps * args.num_actors,
                "insert": 1,
                "learn_in_place": round(args.replay_ratio * played / args.batch_size),
            },
            overlap=args.max_lag > 0,
        ),
    )


def plan_rnd(args: rnd.Args, place: Place) -> Plan:
    agent = rnd.make_agent(args)
    state = result(place, partial(rnd.initial_state, args, agent))
    carry = result(place, partial(rnd.initial_carry, args))
    rollout = result(place, partial(rnd.begin_rollout, args), carry, 0)
    steps = steps_of(place, args.num_steps, args.num_envs)
    frames = seen(place, args.num_envs, atari.FRAME_SHAPE)
    params = played_with(place, agent, state.params["agent"])
    return Plan(
        {
            "act": partial(rnd.act.lower, args, agent, params, rollout, *frames),
            "update": partial(rnd.update.lower, args, agent, state, rollout, steps),
        },
        Cycle(
            steps=args.num_steps * args.num_envs,
            turns=args.num_steps,
            calls={"act": args.num_steps, "update": 1},
            overlap=args.async_,
        ),
    )


def plan_hnppo(args: hnppo.Args, place: Place) -> Plan:
    """After the first task, with the penalty, if there is a hypernetwork."""
    agent, games = hnppo.Agent(args), args.num_envs
    state = result(place, partial(hnppo.initial_state, args, agent))
    state = result(place, partial(hnppo.begin_task, args, agent), state)
    actor = result(place, partial(hnppo.policy_for, agent), state, 0)
    observed, acted = doorgym.vector.sizes(args.robot)
    rollout = doors.Rollout(
        obs=array(place, doors.DECISIONS + 1, games, observed),
        actions=array(place, doors.DECISIONS, games, acted),
        rewards=array(place, doors.DECISIONS, games),
    )
    obs, key, remember = array(place, games, observed), array(place, 2, dtype=jnp.uint32), args.method == "hnppo"
    return Plan(
        {
            "act": partial(hnppo.act.lower, agent, actor, obs, key, 0),
            "update": partial(hnppo.update.lower, args, agent, remember, state, rollout),
        },
        Cycle(
            steps=doors.DECISIONS * games,
            turns=doors.DECISIONS,
            calls={"act": doors.DECISIONS, "update": 1},
            overlap=False,
        ),
    )


SCRIPTS: dict[str, tuple[ModuleType, Callable[[Any, Place], Plan]]] = {
    "ppo": (ppo, plan_ppo),
    "impala": (impala, plan_impala),
    "apex": (apex, plan_apex),
    "rnd": (rnd, plan_rnd),
    "hnppo": (hnppo, plan_hnppo),
}
PROGRAMS = {
    "ppo": ("act", "update"),
    "impala": ("act", "remember", "update"),
    "apex": ("act", "insert", "sample", "update", "learn_in_place"),
    "rnd": ("act", "update"),
    "hnppo": ("act", "update"),
}


def read_flags(script: str, flags: str) -> Any:
    """A script's Args from flags as on its command line; raises UsageError."""
    module, _ = SCRIPTS[script]
    args = tyro.cli(module.Args, args=shlex.split(flags))
    runs.check_args(args, module.SCRIPT)
    return args


# COSTS


def work(gpu: Gpu, kernel: hlo.Kernel) -> float:
    """Seconds that a kernel takes once it is launched, in the model."""
    return max(kernel.flops / (SHARE * gpu.flops[kernel.arithmetic]), kernel.bytes / gpu.bandwidth)


def cost(gpu: Gpu, memory, kernels: list[hlo.Kernel]) -> dict[str, float]:
    """What one run of a program takes, by what its kernels are and what XLA says of its memory."""
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes  # outputs that are not written over arguments
    launches = sum(k.times for k in kernels)
    seconds = sum(k.times * work(gpu, k) for k in kernels)
    return {
        "MiB": (arguments + new + temporaries) / 2**20,
        "temporaries MiB": temporaries / 2**20,
        "kernels": launches,
        "GB": sum(k.times * k.bytes for k in kernels) / 1e9,
        "GFLOP": sum(k.times * k.flops for k in kernels) / 1e9,
        "work ms": 1e3 * seconds,
        "launches ms": 1e3 * LAUNCH * launches,
        "modelled ms": 1e3 * (seconds + LAUNCH * launches),
    }


def steps_per_second(cycle: Cycle, ms: dict[str, float], game_ms: float) -> float:
    """Of all games, on one GPU that does one thing after another, from the modelled time of each program.

    Where games and GPU overlap, they do so perfectly: what takes longer, GPU or games and their own looks at the
    policy, is all that counts.
    """
    busy = sum(calls * ms[name] for name, calls in cycle.calls.items())
    if cycle.overlap:
        return 1e3 * cycle.steps / max(busy, cycle.turns * (game_ms + ms["act"]))
    return 1e3 * cycle.steps / (busy + cycle.turns * game_ms)


# THE COMMAND


@dataclass(frozen=True)
class Args:
    programs: tyro.conf.Positional[tuple[str, ...]] = ()
    """such as ppo.update, or a script, such as ppo; all of them if none is given"""
    gpu: Literal["all", "h100", "a100"] = "all"
    """the GPU to plan for"""
    flags: str = ""
    """flags of the scripts, in one string, after a ="""
    game_ms: float = 0.3
    """what a step of the games costs besides act: playing it, its frames to the GPU, actions back; for steps/s"""
    top: int = 0
    """also list so many of each program's kernels, those that take longest"""
    dump: str = ""
    """also write each program's optimised HLO to this folder"""
    csv: str = ""
    """also write the table to this file"""


def chosen(words: tuple[str, ...]) -> dict[str, list[str]]:
    """Names of programs, by script; raises UsageError."""
    names = [f"{script}.{name}" for script, own in PROGRAMS.items() for name in own]
    for word in words:
        runs.check(word in names or word in PROGRAMS, f"{word}: give a script or a program of {', '.join(names)}")
    wanted: dict[str, list[str]] = {}
    for name in names:
        script, _, program = name.partition(".")
        if not words or name in words or script in words:
            wanted.setdefault(script, []).append(program)
    return wanted


def plan_script(args: Args, gpu: str, script: str, names: list[str]) -> tuple[list[dict], list[dict]]:
    """Rows of the table, one for each program and, if all that its loop runs are among them, one for the script; and
    rows for the longest kernels."""
    one = SCRIPTS[script][1](read_flags(script, args.flags), on_first(target(gpu)))
    ms, rows, kernels = {}, [], []
    for name in names:
        lowered = one.programs[name]()
        compiled = lowered.compile()
        text, program = compiled.as_text(), f"{script}.{name}"
        if args.dump:
            Path(args.dump).mkdir(parents=True, exist_ok=True)
            Path(args.dump, f"{gpu}.{program}.hlo").write_text(text)
        launched = hlo.Program(text).kernels()
        numbers = cost(GPUS[gpu], compiled.memory_analysis(), launched)
        ms[name] = numbers["modelled ms"]
        origin = {"is": "plan", "gpu": gpu, "program": program}
        rows.append(origin | {column: written(number) for column, number in numbers.items()})
        launched.sort(key=lambda kernel: -kernel.times * work(GPUS[gpu], kernel))
        kernels += [origin | row_of_kernel(GPUS[gpu], kernel) for kernel in launched[: args.top]]
    if set(one.cycle.calls) <= set(ms):
        rate = steps_per_second(one.cycle, ms, args.game_ms)
        rows.append({"is": "plan", "gpu": gpu, "program": script, "modelled steps/s": written(rate)})
    return rows, kernels


def row_of_kernel(gpu: Gpu, kernel: hlo.Kernel) -> dict[str, str]:
    return {
        "kernel": f"{kernel.times} x {kernel.kind}",
        "makes": ", ".join(f"{dtype}{list(dims)}" for dtype, dims in kernel.instruction.arrays[:2]),
        "MB each": written(kernel.bytes / 1e6),
        "GFLOP each": written(kernel.flops / 1e9),
        "modelled us each": written(1e6 * (LAUNCH + work(gpu, kernel))),
        "of": kernel.where[-60:],
    }


def written(number: float) -> str:
    return f"{number:.3g}" if number < 1000 else f"{number:.0f}"


def show(rows: list[dict[str, str]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(box=box.SIMPLE)
    for name in names:
        text = name in ("is", "gpu", "program", "kernel", "makes", "of")
        table.add_column(name if text else name.replace(" ", "\n"), justify="left" if text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row.get(name, "") for name in names))
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def main(args: Args) -> None:
    jax.config.update("jax_platforms", "cpu")  # else the plug-in asks for a driver when JAX starts
    runs.check_limits(args, {"game_ms": (0, None), "top": (0, 1000)})
    wanted, rows, kernels = chosen(args.programs), [], []
    for script in wanted:
        read_flags(script, args.flags)
    with planning():
        for gpu in GPUS if args.gpu == "all" else [args.gpu]:
            for script, names in wanted.items():
                more, longest = plan_script(args, gpu, script, names)
                rows, kernels = rows + more, kernels + longest
    show(rows)
    if kernels:
        show(kernels)
    if args.csv:
        columns = dict.fromkeys(name for row in rows for name in row)
        made_by = {"flags": args.flags, "jax": jax.__version__, "commit": records.commit()}
        records.write_rows(Path(args.csv), [dict.fromkeys(columns, "") | row | made_by for row in rows])


if __name__ == "__main__":
    runs.cli(Args, main)
