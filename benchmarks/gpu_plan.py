"""What XLA would run on one GPU or on eight, planned on a machine without one: memory, kernels, bytes and FLOPs of each
script's programs, what crosses between GPUs, and a model of their time. No line of it is a measurement.

Needs the wheel jax-cuda12-plugin, which `make gpu-plan` installs in an environment of its own, but neither GPU nor
driver. The flags in quotes are those of the scripts whose programs are planned:

    python -m benchmarks.gpu_plan
    python -m benchmarks.gpu_plan ppo.act ppo.update --flags="--num-envs 256 --num-steps 32" --game-ms 0.5 --dump plans
    python -m benchmarks.gpu_plan ppo impala --gpus 8 --scaling strong

The model: a kernel takes 3 us to launch and then as long as its bytes at the memory's full rate, or its FLOPs at 40 %
of the peak rate, whichever is more. A sum over n GPUs takes as long as 2 (n - 1) / n times its bytes over NVLink, and
nothing runs beside it; how long GPUs wait for each other is left out. XLA compiles without trying anything out, so that
cuDNN's algorithms and their workspace are not known, and atomic additions count as plain traffic. Use it to compare two
versions of a program.
"""

import contextlib
import dataclasses
import importlib.util
import sys
import unittest.mock
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from annotated_types import Interval
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from rich import box
from rich.console import Console
from rich.table import Table

import apex_procgen as apex
import doorgym
import hnppo_doorgym as hnppo
import impala_procgen as impala
import ppo_procgen as ppo
import rnd_montezuma as rnd
import sac_procgen as sac
import trpo_procgen as trpo
from benchmarks import hlo
from common import atari, devices, doors, envs, files, networks, offpolicy, replay, runs
from common.devices import GAMES, SAME, STEPS
from common.flags import NonNegativeFloat
from common.gpu import layouts
from experiments import records

WHEEL = "jax_plugins.xla_cuda12"


# GPUS


class Gpu(NamedTuple):
    """A GPU as XLA's compiler and the model of time see it; dense rates, without sparsity."""

    flops: dict[str, float]  # FLOP/s at best, by arithmetic
    bandwidth: float  # of memory, bytes/s
    link: float  # NVLink to the other GPUs of a host, bytes/s each way
    description: str  # XLA's GpuTargetConfigProto, as text


GPUS = {
    "h100": Gpu(
        flops={"bf16": 989e12, "tf32": 494e12, "f32": 67e12},
        bandwidth=3.35e12,
        link=450e9,
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
        link=300e9,
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


def mesh_of(gpus: list[jax.Device]) -> Mesh:
    return Mesh(np.array(gpus), "device")


@contextlib.contextmanager
def planning(gpus: list[jax.Device]) -> Iterator[None]:
    """Within it, programs are traced as on these GPUs, all of which learn, and compiled anew."""
    here = {
        "on_cpu": lambda: False,
        "mesh": lambda args, every_host=True: mesh_of(gpus),
        "count": lambda args: len(gpus),
    }
    cached = jax.config.jax_enable_compilation_cache
    jax.clear_caches()  # of what was traced for a CPU
    jax.config.update("jax_enable_compilation_cache", False)  # the same program for a CPU would be another's answer
    try:
        with unittest.mock.patch.multiple(devices, **here):
            yield
    finally:
        jax.config.update("jax_enable_compilation_cache", cached)
        jax.clear_caches()


# PROGRAMS


class Cycle(NamedTuple):
    """How often a script's loop runs its programs between two updates of its parameters (Ape-X: two unrolls)."""

    steps: int  # of all games together
    turns: int  # steps that each game plays, one after another
    calls: dict[str, float]  # of programs, on the GPU that has the most; "act" is one of them
    overlap: bool  # whether games go on while the GPU does something else


class Plan(NamedTuple):
    """A script's programs, for some flags."""

    programs: dict[str, Callable[[], jax.stages.Lowered]]
    cycle: Cycle


Place = Callable[..., Any]  # a tree of shapes and where they lie -> the same, with the shardings of arrays on the GPUs


def on_all(gpus: list[jax.Device]) -> Place:
    """Arrays lie as the layouts of `devices.spread` say, the same on every GPU if none is given."""
    mesh = mesh_of(gpus)

    def place(tree, specs=SAME):
        def lay(spec, some):
            return jax.tree.map(partial(shape, sharding=NamedSharding(mesh, spec)), some)

        return jax.tree.map(lay, specs, tree, is_leaf=lambda x: isinstance(x, PartitionSpec))

    return place


def on_first(gpus: list[jax.Device]) -> Place:
    """All arrays lie on the first GPU, as those of an actor do on its own."""

    def place(tree, specs=SAME):
        return jax.tree.map(partial(shape, sharding=SingleDeviceSharding(gpus[0])), tree)

    return place


def shape(x, sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def array(*dims: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def steps_of(length: int, games: int) -> envs.Steps:
    flag = array(length, games, dtype=bool)
    return envs.Steps(
        rewards=array(length, games),
        terminated=flag,
        truncated=flag,
        done=flag,
        age=array(length + 1, games, dtype=jnp.int32),
        restarts=array(games, dtype=bool),
    )


def seen(games: int, shape: tuple[int, int, int]) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """The newest frame of each game, channels first as EnvPool has them, and its age."""
    height, width, channels = shape
    return array(games, channels, height, width, dtype=jnp.uint8), array(games, dtype=jnp.int32)


def started(module: ModuleType, args, place: Place, games: int) -> Any:
    """The rollout of so many games before its first step."""
    carry = jax.eval_shape(partial(module.initial_carry, args), array(games, dtype=jnp.int32))
    return place(jax.eval_shape(partial(module.begin_rollout, args), carry, 0), module.ROLLOUT)


def played_with(place: Place, agent, params: dict) -> tuple[Any, dict]:
    """What `networks.for_acting` returns."""
    params = place(jax.eval_shape(partial(networks.prepare, agent.encoder.layers), params))
    return networks.acting(agent), jax.tree.map(shape, params, layouts(params))


def plan_on_policy(script: ModuleType, args: Any, gpus: list[jax.Device]) -> Plan:
    agent, place = script.make_agent(args), on_all(gpus)
    state = place(jax.eval_shape(partial(script.initial_state, args, agent)), script.STATE)
    rollout = started(script, args, place, args.num_envs)
    steps = place(steps_of(args.num_steps, args.num_envs), envs.STEPS)
    frames = place(seen(args.num_envs, envs.FRAME_SHAPE), GAMES)
    if script is trpo:
        both = {name: played_with(place, network, state.params[name]) for name, network in agent._asdict().items()}
        player, params = trpo.Agent(*(network for network, _ in both.values())), {n: p for n, (_, p) in both.items()}
    else:
        player, params = played_with(place, agent, state.params["agent"])
    return Plan(
        {
            "act": partial(script.act.lower, args, player, params, rollout, *frames),
            "update": partial(script.update.lower, args, agent, state, rollout, steps),
        },
        Cycle(
            steps=args.num_steps * args.num_envs,
            turns=args.num_steps,
            calls={"act": args.num_steps, "update": 1},
            overlap=False,
        ),
    )


def acts(args, gpus: list[jax.Device]) -> int:
    """How often the GPU that has the most actors looks at the policy in a round of all of them, as a fleet has it."""
    return args.num_steps * -(-args.num_actors // len(gpus))


def plan_impala(args: impala.Args, gpus: list[jax.Device]) -> Plan:
    agent, place, alone = impala.make_agent(args), on_all(gpus), on_first(gpus)
    games = args.num_envs // args.num_actors
    state = place(jax.eval_shape(partial(impala.initial_state, args, agent)))
    memory = place(jax.eval_shape(partial(impala.initial_memory, args)), impala.MEMORY)
    rollouts = (started(impala, args, place, games),) * args.num_actors
    steps = (place(steps_of(args.num_steps, games), envs.STEPS),) * args.num_actors
    unrolls = place(jax.eval_shape(partial(impala.remember, args), memory, rollouts, steps, 0, 0)[1], STEPS)
    player, params = played_with(alone, agent, state.params)
    own, frames = started(impala, args, alone, games), alone(seen(games, envs.FRAME_SHAPE))
    return Plan(
        {
            "act": partial(impala.act.lower, args, player, params, own, *frames),
            "remember": partial(impala.remember.lower, args, memory, rollouts, steps, 0, 0),
            "update": partial(impala.update.lower, args, agent, state, unrolls),
        },
        Cycle(
            steps=args.num_steps * args.num_envs,
            turns=args.num_steps,
            calls={"act": acts(args, gpus), "remember": 1, "update": 1},
            overlap=args.max_lag > 0,
        ),
    )


def plan_off_policy(script: ModuleType, args: Any, gpus: list[jax.Device]) -> Plan:
    """With the replay buffer on the GPUs; `update_on_batch` is what they run of an update where it is on the host."""
    agent, place, alone = script.make_agent(args), on_all(gpus), on_first(gpus)
    games, played = args.num_envs // args.num_actors, args.num_steps * args.num_envs
    state = place(jax.eval_shape(partial(script.initial_state, args, agent)))
    buffer = jax.eval_shape(partial(offpolicy.initial_replay, args))
    batch = place(jax.eval_shape(partial(offpolicy.sample, args), buffer, 0, 1.0), GAMES)
    buffer = place(buffer, replay.REPLAY)
    rollouts = (started(offpolicy, args, place, games),) * args.num_actors
    steps = (place(steps_of(args.num_steps, games), envs.STEPS),) * args.num_actors
    player, params = played_with(alone, agent, state.params)
    own, frames = started(offpolicy, args, alone, games), alone(seen(games, envs.FRAME_SHAPE))
    return Plan(
        {
            "act": partial(script.act.lower, args, player, params, own, *frames),
            "insert": partial(offpolicy.insert.lower, args, buffer, rollouts, steps),
            # Only a run knows how often its loop goes round: the plan is of one update.
            "update": partial(script.update.lower, args, agent, state, buffer, 1, 1.0),
            "update_on_batch": partial(script.update_on_batch.lower, args, agent, state, batch),
        },
        Cycle(
            steps=played,
            turns=args.num_steps,
            calls={
                "act": acts(args, gpus),
                "insert": 1,
                "update": args.replay_ratio * played / args.batch_size,
            },
            overlap=args.max_lag > 0,
        ),
    )


def plan_rnd(args: rnd.Args, gpus: list[jax.Device]) -> Plan:
    agent, place = rnd.make_agent(args), on_all(gpus)
    acting = place if rnd.in_turns(args) else on_first(gpus)
    state = place(jax.eval_shape(partial(rnd.initial_state, args, agent)), rnd.STATE)
    rollout = started(rnd, args, place, args.num_envs)
    steps = place(steps_of(args.num_steps, args.num_envs), envs.STEPS)
    player, params = played_with(acting, agent, state.params["agent"])
    own, frames = acting(rollout, rnd.ROLLOUT), acting(seen(args.num_envs, atari.FRAME_SHAPE), GAMES)
    return Plan(
        {
            "act": partial(rnd.act.lower, args, player, params, own, *frames),
            "update": partial(rnd.update.lower, args, agent, state, rollout, steps),
        },
        Cycle(
            steps=args.num_steps * args.num_envs,
            turns=args.num_steps,
            calls={"act": args.num_steps, "update": 1},
            overlap=args.async_,
        ),
    )


def plan_hnppo(args: hnppo.Args, gpus: list[jax.Device]) -> Plan:
    """After the first task, with the penalty, if there is a hypernetwork."""
    agent, games, place = hnppo.Agent(args), args.num_envs, on_all(gpus)
    state = jax.eval_shape(partial(hnppo.initial_state, args, agent))
    state = place(jax.eval_shape(partial(hnppo.begin_task, args, agent), state), hnppo.STATE)
    actor = place(jax.eval_shape(partial(hnppo.policy_for, agent), state, 0))
    observed, acted = doorgym.vector.sizes(args.robot)
    rollout = doors.Rollout(
        obs=array(doors.DECISIONS + 1, games, observed),
        actions=array(doors.DECISIONS, games, acted),
        rewards=array(doors.DECISIONS, games),
    )
    rollout = place(rollout, STEPS)
    obs, noise = place((array(games, observed), array(games, acted)))  # each GPU looks at all doors
    return Plan(
        {
            "act": partial(hnppo.act.lower, agent, actor, obs, noise),
            "update": partial(hnppo.update.lower, args, agent, args.method == "hnppo", state, rollout),
        },
        Cycle(
            steps=doors.DECISIONS * games,
            turns=doors.DECISIONS,
            calls={"act": doors.DECISIONS, "update": 1},
            overlap=False,
        ),
    )


SCRIPTS: dict[str, tuple[ModuleType, Callable[[Any, list[jax.Device]], Plan]]] = {
    "ppo": (ppo, partial(plan_on_policy, ppo)),
    "trpo": (trpo, partial(plan_on_policy, trpo)),
    "impala": (impala, plan_impala),
    "apex": (apex, partial(plan_off_policy, apex)),
    "sac": (sac, partial(plan_off_policy, sac)),
    "rnd": (rnd, plan_rnd),
    "hnppo": (hnppo, plan_hnppo),
}
PROGRAMS = {
    "ppo": ("act", "update"),
    "trpo": ("act", "update"),
    "impala": ("act", "remember", "update"),
    "apex": ("act", "insert", "update", "update_on_batch"),
    "sac": ("act", "insert", "update", "update_on_batch"),
    "rnd": ("act", "update"),
    "hnppo": ("act", "update"),
}


def read_flags(script: str, flags: str) -> Any:
    """A script's Args, by its name here; raises UsageError."""
    return records.read_flags(SCRIPTS[script][0], flags)


def for_gpus(args: Any, count: int, scaling: str) -> Any:
    """A script's Args for so many GPUs; raises UsageError if they do not divide the games and all else they share.

    Weak scaling: as many times the games, and the sizes that go with them, so that each GPU has what one alone would
    have: as many games and samples of a minibatch, and of updates there are as many. Strong: `args` as they are.
    """
    if scaling == "weak":
        sizes = ("num_envs", "batch_size", "buffer_size", "replay_size")
        args = dataclasses.replace(args, **{name: count * getattr(args, name) for name in sizes if hasattr(args, name)})
    for what, share in args.shares().items():
        runs.check(share % count == 0, f"--gpus {count}: does not divide {what}, {share}; change it by --flags")
    return args


# COSTS

# A step of all games, in ms. On an H100's host with 16 cores Procgen's is 0.3; 128 games of Montezuma's Revenge make
# 17,170 steps/s without anything else. 64 doors take 80 of MuJoCo's steps of 8.1 us each, divided by 16 cores.
GAME_MS = dict.fromkeys(("ppo", "trpo", "impala", "apex", "sac"), 0.3) | {"rnd": 7.5, "hnppo": 2.6}


def work(gpu: Gpu, kernel: hlo.Kernel, count: int = 1) -> float:
    """Seconds that a kernel takes once it is launched on each of so many GPUs, in the model."""
    crossing = 2 * (count - 1) / count * kernel.shared  # a ring: each part is sent on while it is summed, and again
    return max(kernel.flops / (SHARE * gpu.flops[kernel.arithmetic]), kernel.bytes / gpu.bandwidth, crossing / gpu.link)


def cost(gpu: Gpu, memory, kernels: list[hlo.Kernel], count: int = 1) -> dict[str, float]:
    """What one run of a program takes on each GPU, by what its kernels are and what XLA says of its memory."""
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes  # outputs that are not written over arguments
    launches, sums = sum(k.times for k in kernels), [k for k in kernels if k.shared]
    crossing = sum(k.times * work(gpu, k, count) for k in sums)
    seconds = sum(k.times * work(gpu, k, count) for k in kernels) - crossing
    return {
        "MiB": (arguments + new + temporaries) / 2**20,
        "temporaries MiB": temporaries / 2**20,
        "kernels": launches,
        "GB": sum(k.times * k.bytes for k in kernels) / 1e9,
        "GFLOP": sum(k.times * k.flops for k in kernels) / 1e9,
        "sums": sum(k.times for k in sums),
        "summed MB": sum(k.times * k.shared for k in sums) / 1e6,
        "work ms": 1e3 * seconds,
        "NVLink ms": 1e3 * crossing,
        "launches ms": 1e3 * LAUNCH * launches,
        "modelled ms": 1e3 * (seconds + crossing + LAUNCH * launches),
    }


def steps_per_second(cycle: Cycle, ms: dict[str, float], game_ms: float) -> float:
    """Of all games, on GPUs each of which does one thing after another, from the modelled time of each program.

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
    gpus: Literal["all", "1", "8"] = "all"
    """how many of them, in one host"""
    scaling: Literal["weak", "strong"] = "weak"
    """what 8 GPUs have: each as many games as one alone, 8 times the flags' in all; or, strong, these divided by 8"""
    flags: str = ""
    """flags of the scripts, in one string, after a ="""
    game_ms: NonNegativeFloat | None = None
    """what a step of all games costs besides act, however many GPUs: playing it, frames there, actions back; for
    steps/s; by default 0.3, of Montezuma's Revenge 7.5, of doors 2.6"""
    top: Annotated[int, Interval(ge=0, le=1000)] = 0
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


def plan_script(args: Args, gpu: str, count: int, script: str, names: list[str]) -> tuple[list[dict], list[dict]]:
    """Rows of the table, one for each program and, if all that its loop runs are among them, one for the script; and
    rows for the longest kernels."""
    flags, gpus = for_gpus(read_flags(script, args.flags), count, args.scaling), target(gpu, count)
    common = {"is": "plan", "gpu": gpu, "GPUs": str(count), "games": str(flags.num_envs)}
    ms, rows, kernels = {}, [], []
    with planning(gpus):
        one = SCRIPTS[script][1](flags, gpus)
        for name in names:
            compiled = one.programs[name]().compile()
            text, origin = compiled.as_text(), common | {"program": f"{script}.{name}"}
            if args.dump:
                Path(args.dump, f"{gpu}x{count}.{script}.{name}.hlo").write_text(text)
            launched = hlo.Program(text).kernels()
            numbers = cost(GPUS[gpu], compiled.memory_analysis(), launched, count)
            ms[name] = numbers["modelled ms"]
            rows.append(origin | {column: written(number) for column, number in numbers.items()})
            launched.sort(key=lambda kernel: -kernel.times * (LAUNCH + work(GPUS[gpu], kernel, count)))
            kernels += [origin | row_of_kernel(GPUS[gpu], kernel, count) for kernel in launched[: args.top]]
    if set(one.cycle.calls) <= set(ms):
        rate = steps_per_second(one.cycle, ms, GAME_MS[script] if args.game_ms is None else args.game_ms)
        rows.append(common | {"program": script, "modelled steps/s": written(rate)})
    return rows, kernels


def row_of_kernel(gpu: Gpu, kernel: hlo.Kernel, count: int) -> dict[str, str]:
    return {
        "kernel": f"{kernel.times} x {kernel.kind}",
        "makes": ", ".join(f"{dtype}{list(dims)}" for dtype, dims in kernel.instruction.arrays[:2]),
        "MB each": written((kernel.bytes + kernel.shared) / 1e6),
        "GFLOP each": written(kernel.flops / 1e9),
        "modelled us each": written(1e6 * (LAUNCH + work(gpu, kernel, count))),
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
    records.make_room(args.csv, "--csv")
    if args.dump:
        files.make_folder(Path(args.dump), "--dump")
    wanted, rows, kernels = chosen(args.programs), [], []
    counts = (1, 8) if args.gpus == "all" else (int(args.gpus),)
    for script in wanted:
        for count in counts:
            for_gpus(read_flags(script, args.flags), count, args.scaling)
    for gpu in GPUS if args.gpu == "all" else [args.gpu]:
        for count in counts:
            for script, names in wanted.items():
                more, longest = plan_script(args, gpu, count, script, names)
                rows, kernels = rows + more, kernels + longest
    show(rows)
    if kernels:
        show(kernels)
    if args.csv:
        columns = dict.fromkeys(name for row in rows for name in row)
        made_by = {"scaling": args.scaling, "flags": args.flags, "jax": jax.__version__, "commit": records.commit()}
        records.write_rows(Path(args.csv), [dict.fromkeys(columns, "") | row | made_by for row in rows])


if __name__ == "__main__":
    runs.cli(Args, main)
