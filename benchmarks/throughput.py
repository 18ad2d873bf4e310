"""Steps per second of PPO, end to end and split, and what bounds it: the game's own rate and the network's FLOPs.

Prints a table and appends a row to a CSV file. The flags in quotes are those of ppo_procgen.py:

    python -m benchmarks.throughput default
    python -m benchmarks.throughput small --flags="--width 1 --pool flatten --frame-stack 1 --num-steps 256"
"""

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import ppo_procgen as ppo
from benchmarks import encoders, records
from common import devices, envs, networks, runs
from common.devices import GAMES, SAME
from common.flags import PositiveInt


@dataclass(frozen=True)
class Args:
    name: tyro.conf.Positional[str]
    """what to call this setting in the table"""
    flags: str = ""
    """flags of ppo_procgen.py, in one string, after a ="""
    updates: PositiveInt = 3
    """timed iterations, after two that compile"""
    csv: str = "benchmarks/results/throughput.csv"
    """file that a row is appended to; empty for none"""


def outputs(args: ppo.Args, agent: ppo.Agent, params: dict, frames):
    """Logits and values of the first step of an episode."""
    core = networks.initial_core(args.core, args.hidden, len(frames))
    return agent.apply(params, frames, np.ones(len(frames), bool), core)[:2]


def game_rate(args, make: Callable, num_actions: int, steps: int) -> float:
    """EnvPool alone, as make(args, num_envs, seed) has it, random actions, all cores: steps/s."""
    env = make(args, args.num_envs, 0)
    env.reset()
    actions = np.random.default_rng(0).integers(0, num_actions, (steps, args.num_envs))
    start = time.perf_counter()
    for row in actions:
        env.step(row)
    seconds = time.perf_counter() - start
    env.close()
    return steps * args.num_envs / seconds


def procgen_rate(args: ppo.Args) -> float:
    return game_rate(args, envs.make_levels, envs.NUM_ACTIONS, 500)


def flops(args: ppo.Args) -> tuple[float, float]:
    """FLOPs (a multiply-add is two) a sample of a forward pass, and of a forward and backward pass, in plain Flax."""
    channels = 3 * len(args.offsets)
    frames = np.zeros((16, *envs.FRAME_SHAPE[:2], channels), np.uint8)
    agent = ppo.make_agent(args)

    def total(params):
        return sum(x.sum() for x in outputs(args, agent, params, frames))

    with encoders.plain_flax(), jax.default_device(jax.devices("cpu")[0]):
        params = agent.init(
            jax.random.PRNGKey(0), frames, np.ones(16, bool), networks.initial_core(args.core, args.hidden, 16)
        )  # on the CPU: XLA counts there, on a GPU it does not
        return tuple(jax.jit(f).lower(params).cost_analysis()["flops"] / 16 for f in (total, jax.grad(total)))


def matrix_rate(size: int = 4096) -> float:
    """What the device does at best: GFLOP/s of a large float32 matrix product in JAX (TF32 on a GPU)."""
    x = jnp.ones((size, size))
    product = jax.jit(jnp.matmul)
    product(x, x).block_until_ready()
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        product(x, x).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds) / 1e9


def transfer_seconds(args: ppo.Args, repeats: int = 100) -> float:
    """One step's frames to the device, as `act` is given them, and its actions back: by a program that does no more."""
    frames = np.zeros((args.num_envs, 3, 64, 64), np.uint8)
    act = jax.jit(lambda frames: frames[:, 0, 0, 0].astype(jnp.int32))
    seconds = []
    for _ in range(1 + repeats):  # the first compiles
        start = time.perf_counter()
        np.asarray(act(devices.feed(args, frames)))
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[1:]))


def gradient_speedup(args: ppo.Args, agent: ppo.Agent, params: dict, rounds: int = 5) -> float:
    """How many times faster the CPU form of the network's gradient is than plain Flax (not in a scan), 128 samples."""
    channels = 3 * len(args.offsets)
    frames = np.random.default_rng(0).integers(0, 256, (128, *envs.FRAME_SHAPE[:2], channels), np.uint8)

    def loss(params, frames):
        logits, values = outputs(args, agent, params, frames)
        return {"loss": (logits**2).sum(axis=(1, 2)) + (values**2).sum(axis=1)}

    def gradient(args, params, frames):
        return devices.gradient(loss, params, frames, jnp.ones(len(frames)))[0]

    ours = jax.jit(partial(devices.spread([SAME, GAMES], SAME)(gradient), args))
    plain = jax.jit(jax.grad(lambda p, x: loss(p, x)["loss"].mean()))
    ours(params, frames)
    with encoders.plain_flax():
        local = jax.device_put(jax.device_get(params), jax.devices()[0])
        plain(local, frames)
    seconds = {ours: [], plain: []}
    for _ in range(rounds):
        for function, p in ((ours, params), (plain, local)):
            start = time.perf_counter()
            jax.block_until_ready(function(p, frames))
            seconds[function].append(time.perf_counter() - start)
    return float(np.median(seconds[plain]) / np.median(seconds[ours]))


def measure(args: ppo.Args, updates: int) -> dict[str, float]:
    """Times whole iterations as `ppo_procgen.main` runs them, without logging."""
    agent = ppo.make_agent(args)
    numbers = devices.games_of_host(args)
    state = devices.put(args, devices.run_once(ppo.initial_state, args, agent), ppo.STATE)
    carry = devices.put(args, ppo.initial_carry(args, numbers), ppo.CARRY)
    games = envs.Games(partial(envs.make_levels, args), numbers, 0, args.restart_every)
    watch = runs.Stopwatch()
    marks = []
    for _ in range(updates + 2):  # the second still compiles where the first one changed how arrays are placed
        watch.fractions()
        start, before = time.perf_counter(), int(state.global_step)
        params, i = state.params["agent"], int(state.updates)
        rollout, steps, carry = ppo.collect(args, agent, games, params, carry, i=i, watch=watch)
        with watch("update"):
            given = devices.put(args, (rollout, steps), (ppo.ROLLOUT, envs.STEPS))
            state, metrics = ppo.update(args, agent, state, *given)
            jax.device_get(metrics)
        marks.append((time.perf_counter() - start, int(state.global_step) - before, dict(watch.seconds)))
    timed = marks[2:]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # before what is measured below takes more
    seconds, done = (sum(mark[i] for mark in timed) for i in (0, 1))
    part = {name: 100 * sum(m[2][name] for m in timed) / seconds for name in ("game", "inference", "update")}
    transfer = 100 * transfer_seconds(args) * args.num_steps * updates / seconds
    forward, both = flops(args)
    flops_a_step = forward + args.update_epochs * both
    return {
        "steps/s": done / seconds,
        "game %": part["game"],
        "inference %": part["inference"],
        "of it transfer %": transfer,
        "update %": part["update"],
        "Python and rest %": 100 - sum(part.values()),
        "game alone steps/s": procgen_rate(args),
        "MFLOP forward": forward / 1e6,
        "MFLOP a step": flops_a_step / 1e6,
        "GFLOP/s": flops_a_step * done / seconds / 1e9,
        "matrix product GFLOP/s": matrix_rate(),
        "gradient speed-up": gradient_speedup(args, agent, state.params["agent"]) if devices.on_cpu() else 1.0,
        "peak host MiB": peak,
    }


def main(args: Args) -> None:
    records.make_room(args.csv, "--csv")
    ppo_args = records.read_flags(ppo, args.flags)
    row = {"setting": args.name} | {k: f"{v:.4g}" for k, v in measure(ppo_args, args.updates).items()}
    row |= {"flags": args.flags} | records.origin()
    records.show([row], [args.name])
    records.append_rows(args.csv, [row])


if __name__ == "__main__":
    runs.cli(Args, main)
