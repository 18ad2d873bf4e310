"""Profiles a step and an update of PPO on this machine's device, part by part and kernel by kernel.

Prints two tables and appends their rows to CSV files; benchmarks/gpu_plan.py counts the kernels' bytes and FLOPs
without a GPU. The flags in quotes are those of ppo_procgen.py:

    python -m benchmarks.gpu_profile default --flags="--env-id starpilot"
"""

import collections
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np
import tyro
from jax.profiler import ProfileData
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

import ppo_procgen as ppo
from common import devices, envs, networks, runs
from common.devices import ENV_SHARDED, REPLICATED
from experiments import records


@dataclass(frozen=True)
class Args:
    name: tyro.conf.Positional[str]
    """what to call this setting in the tables"""
    flags: str = ""
    """flags of ppo_procgen.py, in quotes: --flags='--num-envs 8'"""
    out: str = "benchmarks/results/gpu_profile"
    """rows are appended to OUT.csv and OUT_kernels.csv; empty for none"""


def median_ms(function: Callable, repeats: int) -> float:
    """Milliseconds of a call, after three that warm up."""
    for _ in range(3):
        function()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return 1e3 * float(np.median(seconds))


def kernels(function: Callable, repeats: int) -> list[dict]:
    """The GPU's kernels in a call, by JAX's profiler, the longest first; none on a CPU."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(repeats):
                function()
        file = next(Path(folder).glob("**/*.xplane.pb"))
        planes = [plane for plane in ProfileData.from_file(str(file)).planes if "device:GPU" in plane.name]
    total, count = collections.Counter(), collections.Counter()
    for line in (line for plane in planes for line in plane.lines if line.name.startswith("Stream")):
        for event in line.events:
            total[event.name] += event.duration_ns / 1e6 / repeats
            count[event.name] += 1 / repeats
    return [
        {"kernel": name[:100], "ms": f"{ms:.4f}", "launches": f"{count[name]:g}"} for name, ms in total.most_common()
    ]


def make_step(args: ppo.Args, agent: ppo.Agent, mesh: Mesh, **options) -> Callable:
    """`ppo.act`, jitted as in `ppo.make_collect`, with more options of `jax.jit`."""
    step = jax.shard_map(
        partial(ppo.act, args, networks.acting_agent(agent)),
        mesh=mesh,
        in_specs=(REPLICATED, ppo.ROLLOUT_SPECS, ENV_SHARDED, ENV_SHARDED),
        out_specs=(ppo.ROLLOUT_SPECS, ENV_SHARDED),
        check_vma=False,
    )
    return jax.jit(step, donate_argnums=1, **options)


def measure(args: ppo.Args) -> tuple[dict[str, float], list[dict]]:
    """Milliseconds of each part, and kernels of `act` and `update`."""
    agent, mesh = ppo.make_agent(args), devices.make_mesh(args)
    collect, update_learner = ppo.make_collect(args, agent, mesh), ppo.make_update(args, agent, mesh)
    specs = ppo.STATE_SPECS, ppo.ROLLOUT_SPECS, envs.TIMESTEP_SPECS, envs.ENV_STATE_SPECS
    state_sharding, rollout_sharding, timestep_sharding, env_state_sharding = devices.shardings(mesh, specs)
    state = jax.jit(partial(ppo.init_state, args, agent), out_shardings=state_sharding)()
    env_state = jax.device_put(ppo.init_env_state(args, devices.local_env_ids(args)), env_state_sharding)
    vec_env = envs.make_threaded_envs(args)
    inputs = envs.join_envs([(part.obs, part.episode_step) for part in vec_env.parts], axis=0)
    put = partial(jax.device_put, inputs, devices.shardings(mesh, ENV_SHARDED))
    inputs_on_mesh = put()
    rollout, timesteps = collect(vec_env, state.params["agent"], env_state, 0, runs.Stopwatch())
    vec_env.close()
    timesteps = jax.device_put(timesteps, timestep_sharding)
    acting_params = networks.acting_params(agent, state.params["agent"])
    next_rollout = partial(ppo.begin_rollout, args, rollout.env_state, 1)
    next_rollout = jax.jit(next_rollout, out_shardings=rollout_sharding)()
    step = make_step(args, agent, mesh)

    def act(obs, episode_step):
        nonlocal next_rollout
        next_rollout, actions = step(acting_params, next_rollout, obs, episode_step)
        return actions

    def update():
        nonlocal state
        state, metrics = update_learner(state, rollout, timesteps)
        jax.block_until_ready(metrics)

    parts = {
        "frames to the device": median_ms(lambda: jax.block_until_ready(put()), 50),
        "act, launched": median_ms(lambda: act(*inputs_on_mesh), 50),
        "act": median_ms(lambda: act(*inputs_on_mesh).block_until_ready(), 50),
        # device_put made a step up to 0.4 of 1.7 ms slower on an H100, so the scripts pass NumPy arrays to `jit`.
        "step without environments, device_put": median_ms(lambda: np.asarray(act(*put())), 50),
        "step without environments": median_ms(lambda: np.asarray(act(*inputs)), 50),
    }
    rows = [{"program": "act"} | row for row in kernels(lambda: act(*inputs_on_mesh).block_until_ready(), 20)]
    parts["update"] = median_ms(update, 5)  # donates the state, and with it on a CPU the parameters above
    rows += [{"program": "update"} | row for row in kernels(update, 1)]
    for name in ("act", "update"):
        some = [row for row in rows if row["program"] == name]
        parts[f"kernels of {name}"] = sum(float(row["ms"]) for row in some)
        parts[f"launches of {name}"] = sum(float(row["launches"]) for row in some)
    return parts, rows


def main(args: Args) -> None:
    records.make_room(args.out and f"{args.out}.csv", "--out")
    ppo_args = records.read_flags(ppo, args.flags)
    parts, rows = measure(ppo_args)
    named = {"setting": args.name}
    row = named | {name: f"{ms:.4g}" for name, ms in parts.items()} | {"flags": args.flags} | records.origin()
    records.show([row], [args.name])
    longest = Table("program", "kernel", "ms", "launches")
    for kernel in sorted(rows, key=lambda x: -float(x["ms"]))[:30]:
        longest.add_row(*kernel.values())
    Console().print(longest)
    if args.out:
        records.append_rows(f"{args.out}.csv", [row])
        if rows:
            records.append_rows(f"{args.out}_kernels.csv", [named | kernel for kernel in rows])


if __name__ == "__main__":
    runs.cli(Args, main)
