"""Speed of DoorGym's simulation and of hnppo_doorgym.py, in three tables.

speed: decisions per second of `DoorVectorEnv`, and its speed as a percentage of bare `mj_step` calls on as many
threads. physics: the time of `mj_step` with other MuJoCo options. update: the time of a rollout and an update of
hnppo_doorgym.py. With --out OUT their rows are appended to OUT.csv, OUT_physics.csv and OUT_update.csv:

    python -m benchmarks.doors
    python -m benchmarks.doors --parts physics
"""

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Annotated, Literal

from annotated_types import Interval

import doorgym  # before MuJoCo, which it tells how to draw without a display

# isort: split
import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import optax

import evaluate
import hnppo_doorgym as hn
from common import devices, runs
from common.doors import ACTION_REPEAT, DECISIONS, MAX_DOORS, make_doors
from common.flags import PositiveInt
from doorgym.opener import Opener
from doorgym.vector import FRAME_SKIP
from experiments import records

SUBSTEPS = FRAME_SKIP * ACTION_REPEAT  # MuJoCo steps per decision
PUBLISHED = (
    "--critic hyper --beta 0.001 --hyper-learning-rate 5e-3 --clip-coef 0.3 --ent-coef 0.01 "
    "--noise-color 0 --keep-std --max-grad-norm 1e-4 --num-envs 256 --num-minibatches 256 --update-epochs 10"
)
SETTINGS = {
    "default": "",
    "--critic fresh": "--critic fresh",
    "--critic fresh --chunked": "--critic fresh --chunked",
    "published": PUBLISHED,
    "--method ppo": "--method ppo",
}
TASKS = ("Pull-Right-Pull", "Lever-Right-Pull", "Round-Left-Push")
Disable = mujoco.mjtDisableBit
# Changes to MuJoCo's options; the first is none.
PHYSICS = {
    "as it is": {},
    "no contacts": {"disableflags": Disable.mjDSBL_CONTACT},
    "no constraints": {"disableflags": Disable.mjDSBL_CONSTRAINT},
    "one iteration of the solver": {"iterations": 1},
    "solver: conjugate gradients": {"solver": mujoco.mjtSolver.mjSOL_CG},
    "ten iterations of collision": {"ccd_iterations": 10},
    "tolerance of collision 1e-4": {"ccd_tolerance": 1e-4},
    "collision by libccd": {"disableflags": Disable.mjDSBL_NATIVECCD},
}


@dataclass(frozen=True)
class Args:
    parts: tuple[Literal["speed", "physics", "update"], ...] = ("speed", "physics", "update")
    """which of the tables"""
    num_envs: Annotated[int, Interval(ge=1, le=MAX_DOORS)] = 64
    """environments (speed, physics)"""
    rounds: Annotated[int, Interval(ge=1, le=100)] = 5
    """repetitions (speed, physics); tables have medians"""
    updates: PositiveInt = 2
    """timed updates (update), after two that compile"""
    out: str = "benchmarks/results/doors"
    """where rows are appended; empty for nowhere"""


def time_env(doors: doorgym.DoorVectorEnv, actions: np.ndarray) -> float:
    """Seconds for actions [T, N, A] in the environment."""
    doors.reset(seed=1)
    start = time.perf_counter()
    for action in actions:
        doors.step(action)
    return time.perf_counter() - start


def time_mj_step(doors: doorgym.DoorVectorEnv, actions: np.ndarray, threads: int) -> float:
    """Seconds for the same worlds, starts and actions with nothing but mj_step, doors dealt out to threads."""
    doors.reset(seed=1)
    models = [doors.models[world] for world in doors._world]
    datas = [mujoco.MjData(model) for model in models]
    for data, state in zip(datas, doors._state, strict=True):
        data.qpos[:] = state[1 : 1 + data.qpos.size]

    def work(k):
        for action in actions:
            for i in range(k, len(models), threads):
                datas[i].ctrl[:] = action[i]
                mujoco.mj_step(models[i], datas[i], SUBSTEPS)

    workers = [threading.Thread(target=work, args=(k,)) for k in range(threads)]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - start


def speed(task: str, args: Args) -> dict:
    threads = devices.available_cores()
    doors = doorgym.make_vec(task, args.num_envs, 1, threads, action_repeat=ACTION_REPEAT)
    # Towards the knob, so that there are contacts.
    actions = np.random.default_rng(0).normal(0, 1, (DECISIONS - 1, args.num_envs, 6))
    actions[..., 0] -= 0.5
    times = [(time_env(doors, actions), time_mj_step(doors, actions, threads)) for _ in range(args.rounds)]
    doors.close()
    ours, theirs = np.median(times, axis=0)
    steps = actions.shape[0] * args.num_envs * SUBSTEPS
    return {
        "task": task,
        "threads": threads,
        "doors": args.num_envs,
        "decisions/s": f"{steps / SUBSTEPS / ours:.0f}",
        "mj_step us, one thread": f"{1e6 * theirs * threads / steps:.2f}",
        "of bare mj_step %": f"{100 * np.median([b / a for a, b in times]):.1f}",
        "rounds": args.rounds,
    }


@contextmanager
def override_options(option: mujoco.MjOption, changes: dict):
    """A model's options changed for a while; flags are added to those that are set."""
    kept = {name: getattr(option, name) for name in changes}
    for name, value in changes.items():
        setattr(option, name, kept[name] | value if name == "disableflags" else value)
    yield
    for name, value in kept.items():
        setattr(option, name, value)


def physics(task: str, args: Args) -> list[dict]:
    """Microseconds of `mj_step` on one thread, from the states after 20, 40 and 60 decisions of `Opener`: the hook
    approaches a handle, turns it, and opens the door."""
    doors = doorgym.make_vec(task, args.num_envs, 1, 1, num_worlds=args.num_envs, action_repeat=ACTION_REPEAT)
    opener, starts = Opener(doors), {}
    for decision in range(61):
        actions = opener()
        if decision in (20, 40, 60):
            starts[decision] = doors._state.copy(), actions
        doors.step(actions)
    models = [doors.models[world] for world in doors._world]
    data, times = mujoco.MjData(models[0]), {}
    for _, name, decision in product(range(args.rounds), PHYSICS, starts):
        seconds = 0.0
        for model, state, action in zip(models, *starts[decision], strict=True):
            mujoco.mj_setState(model, data, state, mujoco.mjtState.mjSTATE_FULLPHYSICS)
            data.ctrl[:], data.qacc_warmstart[:] = action, 0
            with override_options(model.opt, PHYSICS[name]):
                start = time.perf_counter()
                mujoco.mj_step(model, data, SUBSTEPS)
                seconds += time.perf_counter() - start
        times.setdefault((name, decision), []).append(1e6 * seconds / (SUBSTEPS * len(models)))
    doors.close()
    return [
        {"task": task, "physics": name}
        | {f"us after {decision} decisions": f"{np.median(times[name, decision]):.2f}" for decision in starts}
        | {"rounds": args.rounds}
        for name in PHYSICS
    ]


def adam_alone(args: hn.Args, learner: dict) -> float:
    """Seconds per Adam step on these parameters, a mean of ten."""
    tx = hn.make_optimizer(args)

    @partial(jax.jit, donate_argnums=0)
    def ten(carry):
        def step(carry, _):
            learner, opt_state = carry
            updates, opt_state = tx.update(jax.tree.map(lambda p: 0.1 * p, learner), opt_state)
            return (optax.apply_updates(learner, updates), opt_state), None

        return jax.lax.scan(step, carry, length=10)[0]

    carry = jax.block_until_ready(ten((jax.tree.map(jnp.copy, learner), tx.init(learner))))
    start = time.perf_counter()
    jax.block_until_ready(ten(carry))
    return (time.perf_counter() - start) / 10


def update_seconds(name: str, flags: str, updates: int) -> dict:
    """An update in a second task, so that the penalty is in it."""
    args = records.read_flags(hn, f"{flags} --num-worlds 64")
    agent, mesh = hn.make_agent(args), devices.make_mesh(args)
    jitted = hn.make_jitted(args, agent, mesh)
    doors = make_doors(args, "Pull-Right-Pull", args.num_envs, seed=1, num_worlds=args.num_worlds)
    state = jitted.begin_task(jax.jit(partial(hn.init_state, args, agent))())
    state = jitted.begin_task(jitted.end_task(state))
    update = jitted.update_with_penalty if args.method == "hnppo" else jitted.update
    shardings = devices.shardings(mesh, (hn.STATE_SPECS, devices.TIME_ENV_SHARDED))
    adam = adam_alone(args, state.learner)
    times = []
    for _ in range(2 + updates):  # the second still compiles, since the state has another sharding then
        watch = runs.Stopwatch()
        rollout, _ = hn.collect(args, jitted, doors, state, watch)
        with watch("update"):
            state, metrics = update(*jax.device_put((state, rollout), shardings))
            jax.device_get(metrics)
        times.append(watch.seconds)
    doors.close()
    rollout, update = (np.median([x[name] for x in times[2:]]) for name in ("rollout", "update"))
    steps = args.num_minibatches * args.update_epochs
    decisions = args.num_envs * DECISIONS
    return {
        "setting": name,
        "trainable parameters": sum(x.size for x in jax.tree.leaves(state.learner)),
        "decisions": decisions,
        "gradient steps": steps,
        "rollout s": f"{rollout:.3g}",
        "update s": f"{update:.3g}",
        "decisions/s": f"{decisions / (rollout + update):.0f}",
        "ms/gradient step": f"{1e3 * update / steps:.3g}",
        "Adam %": f"{100 * adam * steps / update:.0f}",
        "flags": flags,
    }


def main(args: Args) -> None:
    records.make_room(args.out and f"{args.out}.csv", "--out")
    tables = {
        "speed": ("", lambda: [speed(task, args) for task in TASKS]),
        # Not the round knob, which `Opener` cannot turn.
        "physics": ("_physics", lambda: [row for task in TASKS[:2] for row in physics(task, args)]),
        "update": ("_update", lambda: [update_seconds(*setting, args.updates) for setting in SETTINGS.items()]),
    }
    for part in args.parts:
        suffix, measure = tables[part]
        rows = measure()
        evaluate.show(part, rows)
        records.append_rows(args.out and args.out + suffix + ".csv", [row | records.origin() for row in rows])


if __name__ == "__main__":
    runs.cli(Args, main)
