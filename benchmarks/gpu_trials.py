"""Other forms of PPO's `act`, transfers and `update`, timed beside the baselines: five minutes on one GPU, no games.

XLA launches `act` as 23 operations, since it records no convolution in a CUDA graph. A step's transfers between host
and device take as long as that launch. Each trial runs in a process of its own and prints a line: milliseconds, their
ratio to the baseline's, and whether the outputs are equal. Accept a form of `act` that is launched in under
0.15 ms, shortens a step without environments by at least 0.15 ms, and has 99 % of actions equal; one of transfers that
shortens the step as much; `unpadded` if the update is faster.

    python -m benchmarks.gpu_trials
    python -m benchmarks.gpu_trials act --flags="--num-envs 256 --num-steps 32"
    JAX_PLATFORMS=cpu python -m benchmarks.gpu_trials --flags="--num-envs 4 --num-steps 4 --num-minibatches 2 --width 1"
"""

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import lax
from jax.experimental import pallas
from jax.experimental.pallas import triton
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding

import ppo_procgen as ppo
from benchmarks.gpu_profile import make_step, median_ms
from common import devices, envs, gpu, networks, runs
from common.devices import ENV_SHARDED
from experiments import records, trials

# All commands that XLA records by default, and convolutions. cuDNN must be set up before the recording: by a first call
# under a profiler, which makes XLA launch each command by itself (warm), or with kernels that are loaded early (eager).
GRAPH = {"xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONVOLUTION"}
# By trial: compiler options of `jax.jit`, options of JAX's GPU client, environment variables of the process.
COMPILER = {"warm": GRAPH, "eager": GRAPH, "fusion": {"xla_gpu_experimental_enable_conv_fusion": True}}
CLIENT = {"tfrt": {"use_tfrt_gpu_client": True}, "unstaged": {"should_stage_host_to_device_transfers": False}}
ENVIRONMENT = {"eager": {"CUDA_MODULE_LOADING": "EAGER"}, "spin": {"TF_CUDA_PLATFORM_GPU_DEVICE_SCHEDULE": "spin"}}
TRIALS = {  # the baseline first; measure_act makes pallas, pinned and warm; measure_update, unpadded
    "act": ("baseline", "fusion", "pallas", "warm", "eager"),
    "update": ("baseline", "unpadded"),
    "transfers": ("baseline", "pinned", "tfrt", "unstaged", "spin"),
}
TIMEOUT = 90  # seconds of a trial


@dataclass(frozen=True)
class Args:
    groups: tyro.conf.Positional[tuple[Literal["act", "transfers", "update"], ...]] = tuple(TRIALS)
    """groups of trials"""
    flags: str = ""
    """flags of ppo_procgen.py, in quotes: --flags='--num-envs 8'; pallas: default network only, of any --width"""


# A CONVOLUTION


def _conv_kernel(x, w, bias, *rest, height, width, block, relu):
    """Outputs [block, O] of x [B * H * W, C] and w [9, C, O]: a product for each of the nine pixels of the kernel."""
    residual, y = rest if len(rest) == 2 else (None, rest[0])
    pixel = pallas.program_id(0) * block + jnp.arange(block)
    row, column = pixel // width % height, pixel % width
    total = jnp.zeros((block, w.shape[2]), jnp.float32)
    for tap in range(9):
        i, j = tap // 3 - 1, tap % 3 - 1
        inside = (row + i >= 0) & (row + i < height) & (column + j >= 0) & (column + j < width)
        source = jnp.where(inside, pixel + i * width + j, 0)
        if devices.on_cpu():  # interpreted, where Pallas cannot gather from a reference
            seen = jnp.where(inside[:, None], x[...][source], 0)
        else:
            mask = jnp.broadcast_to(inside[:, None], (block, x.shape[1]))
            seen = triton.load(x.at[source, :], mask=mask, other=0)
        seen = jnp.maximum(seen, 0) if relu else seen
        total += jnp.dot(seen, w[tap], preferred_element_type=jnp.float32)
    total += bias[...].astype(jnp.float32)[None]
    if residual is not None:
        total += residual[...].astype(jnp.float32)
    y[...] = total.astype(y.dtype)


def pallas_conv(x, kernel, bias, residual=None, *, relu=False):
    """A 3 x 3 convolution, SAME, of relu(x), plus the residual: x [B, H, W, C], kernel [3, 3, C, O] -> [B, H, W, O]."""
    height, width, channels, features = *x.shape[1:], kernel.shape[3]
    block = 64 if height > 8 else 32  # pixels per program; fewer for 8 x 8 frames, which have few pixels
    inputs = [x.reshape(-1, channels), kernel.reshape(9, channels, features), bias]
    specs = [pallas.BlockSpec(y.shape, lambda i, axes=y.ndim: (0,) * axes) for y in inputs]
    of_block = pallas.BlockSpec((block, features), lambda i: (i, 0))
    if residual is not None:
        inputs, specs = [*inputs, residual.reshape(-1, features)], [*specs, of_block]
    pixels = len(inputs[0])
    y = pallas.pallas_call(
        partial(_conv_kernel, height=height, width=width, block=block, relu=relu),
        grid=(pixels // block,),
        in_specs=specs,
        out_specs=of_block,
        out_shape=jax.ShapeDtypeStruct((pixels, features), x.dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=devices.on_cpu(),
    )(*inputs)
    return y.reshape(*x.shape[:3], features)


def policy_and_value(agent, params, frames, is_first, hidden_state):
    """`ppo.policy_and_value` of the default IMPALA CNN, with `pallas_conv`."""
    layers, encoder = agent.encoder.layers, params["params"]["encoder"]
    x = layers.pixels(frames)
    more = -x.shape[3] % 16  # a Triton product takes at least 16 channels

    def conv(i, x, *residual, relu=False):
        kernel, bias = encoder[f"Conv_{i}"]["kernel"], encoder[f"Conv_{i}"]["bias"]
        kernel = kernel if i else jnp.pad(kernel, ((0, 0), (0, 0), (0, more), (0, 0)))
        return pallas_conv(x, kernel, bias, *residual, relu=relu)

    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, more)))
    for i in (0, 5, 10):
        x = networks.max_pool(conv(i, x))
        for j in (i + 1, i + 3):
            x = conv(j + 1, conv(j, x, relu=True), x, relu=True)
    x = layers.act(layers.reduce(x)).astype(layers.dtype)
    features = layers.act(x @ encoder["Dense_0"]["kernel"] + encoder["Dense_0"]["bias"]).astype(jnp.float32)
    inputs = features[:, None], is_first[:, None], hidden_state
    logits, values, hidden_state = agent.apply(params, *inputs, method="decode")
    return logits[:, 0], values[:, 0], hidden_state


# TRIALS


def make_rollout(args: ppo.Args, mesh) -> ppo.Rollout:
    env_state = ppo.init_env_state(args, np.arange(args.num_envs, dtype=np.int32))
    begin = partial(ppo.begin_rollout, args, env_state, 0)
    return jax.jit(begin, out_shardings=devices.shardings(mesh, ppo.ROLLOUT_SPECS))()


def measure_act(args: ppo.Args, name: str) -> dict[str, Any]:
    """Milliseconds of a launch and of a step without environments, and the outputs of the first steps."""
    agent, mesh, options = ppo.make_agent(args), devices.make_mesh(args), {}
    params = jax.jit(partial(ppo.init_state, args, agent))().params["agent"]
    acting_params = networks.acting_params(agent, params)
    if name == "pallas":  # it reads kernels as they are, not in cuDNN's order
        ppo.policy_and_value = policy_and_value
        acting_params = networks.cast_encoder(agent.encoder.layers, params)
    if name == "pinned":
        pinned = NamedSharding(mesh, ENV_SHARDED, memory_kind="pinned_host")
        options["out_shardings"] = devices.shardings(mesh, ppo.ROLLOUT_SPECS), pinned
    step = make_step(args, agent, mesh, compiler_options=COMPILER.get(name), **options)

    def act(obs, episode_step):
        nonlocal rollout
        rollout, actions = step(acting_params, rollout, obs, episode_step)
        return actions

    steps = min(8, args.num_steps)
    frames = np.random.default_rng(0).integers(0, 256, (steps, args.num_envs, 3, 64, 64), np.uint8)
    episode_step = np.ones(args.num_envs, np.int32)
    rollout = make_rollout(args, mesh)
    if name == "warm":
        with tempfile.TemporaryDirectory() as folder, jax.profiler.trace(folder):
            act(frames[0], episode_step).block_until_ready()
        rollout = make_rollout(args, mesh)
    actions = np.array([act(obs, episode_step) for obs in frames])
    outputs = np.array(rollout.logits[:steps])
    on_device = jax.device_put((frames[0], episode_step), devices.shardings(mesh, ENV_SHARDED))
    return {
        "launched in": median_ms(lambda: act(*on_device), 50),
        "step without environments": median_ms(lambda: np.asarray(act(frames[0], episode_step)), 50),
        "outputs": outputs,
        "actions": actions,
    }


def measure_update(args: ppo.Args, name: str) -> dict[str, Any]:
    """Milliseconds of an update from random frames and rewards, and the parameters after the first."""
    if name == "unpadded":
        gpu.conv_general_dilated = lax.conv_general_dilated
    agent, mesh, rng = ppo.make_agent(args), devices.make_mesh(args), np.random.default_rng(0)
    state, rollout = jax.jit(partial(ppo.init_state, args, agent))(), make_rollout(args, mesh)
    images = rng.integers(0, 256, rollout.frames.images.shape, np.uint8)
    rollout = rollout._replace(frames=rollout.frames.replace(images=images))
    rewards = rng.normal(size=(args.num_steps, args.num_envs)).astype(np.float32)
    no, age = np.zeros(rewards.shape, bool), np.ones((len(rewards) + 1, args.num_envs), np.int32)
    timesteps = envs.Timesteps(rewards, terminated=no, truncated=no, is_reset=no, episode_step=age, forced_reset=no[0])
    specs = ppo.STATE_SPECS, ppo.ROLLOUT_SPECS, envs.TIMESTEP_SPECS
    state, rollout, timesteps = jax.device_put((state, rollout, timesteps), devices.shardings(mesh, specs))
    update = ppo.make_update(args, agent, mesh)

    def run():
        nonlocal state
        state, metrics = update(state, rollout, timesteps)
        jax.block_until_ready(metrics)

    run()
    outputs = np.array(ravel_pytree(state.params)[0])
    return {"takes": median_ms(run, 5), "outputs": outputs}


def measure(group: str, name: str, flags: str, file: str) -> None:
    """A trial in a process of its own: writes times and outputs to a file."""
    runs.set_up_jax()
    if name in CLIENT:
        jax.config.update("jax_pjrt_client_create_options", CLIENT[name])
    args = replace(records.read_flags(ppo, flags), num_devices=1)
    if devices.on_cpu() and (name in CLIENT or name in ENVIRONMENT):
        sys.exit("skipped: its options are CUDA's")
    np.savez(file, **(measure_update if group == "update" else measure_act)(args, name))


def describe(found: dict[str, np.ndarray], baseline: dict[str, np.ndarray] | None) -> str:
    """Times with their ratios to the baseline's, and how far the outputs are from its own; if that has failed,
    times alone."""
    if not baseline:
        return ", ".join(f"{part} {x:.3f} ms" for part, x in found.items() if np.ndim(x) == 0)
    words = [f"{part} {x:.3f} ms ({x / baseline[part]:.2f} x)" for part, x in found.items() if np.ndim(x) == 0]
    difference = np.abs(found["outputs"] - baseline["outputs"]).max()
    words.append(f"outputs differ by up to {difference:.2g}" if difference else "equal")
    if difference and "actions" in found:
        words.append(f"{(found['actions'] == baseline['actions']).mean():.1%} of actions equal")
    return ", ".join(words)


def run(group: str, name: str, flags: str, file: Path) -> str:
    """Runs `measure` in another process. Returns its exit status and last lines of errors, or that it took too long."""
    arguments = (group, name, flags, str(file))
    code = f"from benchmarks import gpu_trials; gpu_trials.measure(*{arguments!r})"
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "JAX_TRACEBACK_FILTERING": "off"}  # else the last line is a note of JAX
    environment = os.environ | quiet | ENVIRONMENT.get(name, {})
    how = {"env": environment, "cwd": records.ROOT, "timeout": TIMEOUT, "capture_output": True, "text": True}
    try:
        process = subprocess.run([sys.executable, "-c", code], check=False, **how)
    except subprocess.TimeoutExpired:
        return f"not done after {TIMEOUT} s"
    lines = [line[:300] for line in process.stderr.strip().splitlines()[-5:]]
    return "\n  ".join([f"exit status {process.returncode}", *lines])


def main(args: Args) -> None:
    records.parse_flags(ppo, args.flags)  # without starting JAX, which would take the GPU's memory
    with tempfile.TemporaryDirectory() as folder:
        for group in args.groups:
            baseline = None
            for name in TRIALS[group]:
                file = Path(folder, f"{group}_{name}.npz")
                why = run(group, name, args.flags, file)
                found = dict(np.load(file)) if file.exists() else None
                baseline = found if name == "baseline" else baseline
                print(f"{group} {name}: {describe(found, baseline) if found else why}", flush=True)
    print(", ".join(f"{name} {value}" for name, value in trials.origin().items()))


if __name__ == "__main__":
    runs.cli(Args, main)
