"""Short runs of every script on the real games, which between them use most of the options. tests/test_golden.py
compares their metrics with stored ones, benchmarks/compare_checkouts.py those of two checkouts. They are command lines,
not Python calls, so that they also run in checkouts whose code has other names.

Each run is stopped after an early update and resumed, and its resumed part ends with an evaluation.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from experiments import trials

# Metrics that depend on the machine's speed, besides time/*.
CLOCKS = "time", "seconds", "charts/SPS", "charts/queue_size"


@dataclass(frozen=True)
class Case:
    script: str
    """without .py"""
    flags: str
    """of the run"""
    first: str
    """flags that stop it early"""
    then: str
    """flags of the resume"""
    processes: int = 1
    """2: with --distributed, on this machine"""

    def commands(self, folder: Path) -> Iterator[list[str]]:
        """Yields the arguments of the run and, once that has ended, of its resume."""
        distributed = ["--distributed"] if self.processes > 1 else []
        yield [*f"{self.flags} {self.first} --wandb-mode disabled --run-dir".split(), str(folder), *distributed]
        yield ["--resume", str(trials.find_run(folder)), *self.then.split(), *distributed]


TINY = "--encoder nature --width 1 --pool flatten --hidden 16 "
ON_POLICY = TINY + "--num-envs 4 --num-steps 16 --num-minibatches 2 "
RESIDUAL = "--num-envs 4 --channels 4,8 --blocks 1 --hidden 16 --num-steps 16 --num-minibatches 2 "
OFF_POLICY = (
    "--num-envs 4 --channels 8 --blocks 0 --downsample stride --pool flatten --hidden 16 --num-steps 16 "
    "--buffer-size 256 --learning-starts 100 --batch-size 16 --replay-ratio 0.5 --learning-rate 0.003 --deterministic "
)
MONTEZUMA = (
    "--num-envs 4 --num-steps 16 --num-minibatches 2 --update-epochs 2 --channels 4,4,4 --hidden 8 "
    "--obs-norm-init-steps 5 --learning-rate 0.003 --max-episode-steps 30 "
)
DOORS = (
    "--num-worlds 2 --num-minibatches 2 --update-epochs 1 --hidden 8 --num-layers 1 --eval-every 0 --eval-episodes 2 "
)

# Steps of a run and of its resume. FILLED: for off-policy scripts, which first fill a replay buffer.
FIRST, THEN = "--total-timesteps 60 --eval-episodes 0", "--total-timesteps 180 --eval-episodes 2"
FILLED, THEN_FILLED = "--total-timesteps 180 --eval-episodes 0", "--total-timesteps 300 --eval-episodes 2"
CASES = {
    "ppo, 1 device": Case(
        "ppo_procgen",
        RESIDUAL + "--num-devices 1 --env-id starpilot --learning-rate 0.003 --core lstm --normalize-rewards "
        "--sticky-actions 0.25 --rnd-coef 0.5 --rnd-normalize --restart-every 40 --update-epochs 2",
        FIRST, THEN,
    ),
    "ppo, 4 devices": Case(
        "ppo_procgen",
        ON_POLICY + "--num-devices 4 --env-id fruitbot --learning-rate 0:0.001,100:0.003 --frame-stack 2 "
        "--no-gap-stack --augment translate --dropout 0.1 --augment-mode drac --kl-coef 0 --max-grad-norm 0.5 "
        "--l2 0.001 --no-use-backgrounds --num-levels 5",
        FIRST, THEN,
    ),
    "ppo, 2 processes": Case(
        "ppo_procgen",
        ON_POLICY + "--env-id bigfish --learning-rate 0.003 --core gru --normalize-rewards --update-epochs 1",
        FIRST, THEN, 2,
    ),
    "trpo, 1 device": Case(
        "trpo_procgen",
        RESIDUAL + "--num-devices 1 --env-id starpilot --value-epochs 2 --normalize-rewards --fisher-fraction 0.5",
        FIRST, THEN,
    ),
    "trpo, 4 devices": Case(
        "trpo_procgen",
        ON_POLICY + "--num-devices 4 --env-id bossfight --penalty 0.5 --learning-rate 0.003 --value-epochs 1 "
        "--sticky-actions 0.25 --reward-clip 1 --no-gap-stack --gamma 0:0.9,180:0.99",
        FIRST, THEN,
    ),
    "trpo, 2 processes": Case(
        "trpo_procgen", ON_POLICY + "--env-id bigfish --value-epochs 1 --cg-iterations 3", FIRST, THEN, 2
    ),
    "ppg, 4 devices": Case(
        "ppg_procgen",
        ON_POLICY + "--num-devices 4 --env-id starpilot --learning-rate 0.003 --policy-iterations 2 --aux-epochs 2 "
        "--aux-minibatches 1 --augment translate --dropout 0.1 --separate-value --max-grad-norm 0.5",
        FIRST, THEN,
    ),
    "impala, 1 device": Case(
        "impala_procgen",
        RESIDUAL + "--deterministic --num-devices 1 --env-id starpilot --learning-rate 0.003 --core lstm --max-lag 2 "
        "--augment translate --dropout 0.1 --normalize-rewards --update-epochs 1",
        FIRST, THEN,
    ),
    "impala, 4 devices": Case(
        "impala_procgen",
        TINY + "--num-envs 8 --num-steps 8 --num-minibatches 2 --deterministic --num-devices 4 --env-id bigfish "
        "--learning-rate 0.003 --replay-fraction 0.5 --replay-size 16 --sticky-actions 0.25 --clip-coef 0.2 "
        "--optimizer rmsprop --rho-bar 0.9 --vtrace-lambda 0.9 --update-epochs 2 --restart-every 20",
        FIRST, THEN,
    ),
    "impala, 2 processes": Case(
        "impala_procgen",
        # With the default --adam-eps of 1e-8 Adam enlarges the rounding of tiny gradients, which differs by processor.
        ON_POLICY + "--deterministic --env-id bigfish --learning-rate 0.003 --adam-eps 1e-5 --core gru "
        "--num-actors 1 --update-epochs 1",
        FIRST, THEN, 2,
    ),
    "apex, 1 device": Case(
        "apex_procgen",
        OFF_POLICY + "--num-devices 1 --env-id starpilot --n-step 3 --num-atoms 11 --per-alpha 0.5 --max-lag 2 "
        "--target-network-frequency 4 --sticky-actions 0.25 --restart-every 40",
        FILLED, THEN_FILLED,
    ),
    "apex, 4 devices": Case(
        "apex_procgen",
        OFF_POLICY + "--num-devices 4 --num-actors 1 --env-id bigfish --n-step 2 --num-quantiles 8 "
        "--munchausen-alpha 0.9 --augment translate --dropout 0.1 --per-alpha 0.6 --target-network-frequency 2 "
        "--replay-device host",
        FILLED, THEN_FILLED,
    ),
    "sac, 1 device": Case(
        "sac_procgen",
        OFF_POLICY + "--num-devices 1 --env-id starpilot --n-step 2 --average-q --q-clip 0.5 --entropy-penalty 0.5 "
        "--tau 0.1 --sticky-actions 0.25",
        FILLED, THEN_FILLED,
    ),
    "sac, 4 devices": Case(
        "sac_procgen",
        OFF_POLICY + "--num-devices 4 --num-actors 1 --env-id bigfish --per-alpha 0.5 --augment translate "
        "--dropout 0.1 --max-lag 2 --no-autotune --alpha 0.02 --reward-shaping --restart-every 40",
        FILLED, THEN_FILLED,
    ),
    "rnd, 1 device": Case(
        "rnd_montezuma",
        MONTEZUMA + "--num-devices 1 --core gru --room-map --update-proportion 0.5",
        "--total-timesteps 60", "--total-timesteps 180",
    ),
    "rnd, 4 devices": Case(
        "rnd_montezuma",
        MONTEZUMA + "--num-devices 4 --norm-adv --max-grad-norm 0.5 --restart-every 20 --predictor-depth 1",
        "--total-timesteps 60", "--total-timesteps 180",
    ),
    "hnppo, 1 device": Case(
        "hnppo_doorgym",
        DOORS + "--num-devices 1 --num-envs 1 --hyper-width 16 --task-timesteps 256 --hyper-learning-rate 0.001",
        "--tasks 0", "--tasks 0,2",
    ),
    "hnppo, 4 devices": Case(
        "hnppo_doorgym",
        DOORS + "--num-devices 4 --num-envs 4 --method finetune --task-timesteps 512",
        "--tasks 1", "--tasks 1,4",
    ),
}  # fmt: skip


def without_clocks(line: dict[str, float]) -> dict[str, float]:
    """A line of metrics without what depends on the machine's speed."""
    return {name: value for name, value in line.items() if name not in CLOCKS and not name.startswith("time/")}


def differing(a: dict[str, float], b: dict[str, float]) -> list[str]:
    """Sorted names of the metrics in which two lines differ; NaN equals itself."""
    return [name for name in sorted(a | b) if str(a.get(name)) != str(b.get(name))]


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl of the run in a folder, without what depends on the machine's speed."""
    return [without_clocks(line) for line in trials.read_metrics(trials.find_run(folder))]


def differences(old: list[dict[str, float]], new: list[dict[str, float]]) -> list[str]:
    """A sentence for each line of metrics that differs."""
    found = [f"{len(old)} -> {len(new)} lines of metrics"] if len(old) != len(new) else []
    for i, (a, b) in enumerate(zip(old, new, strict=False)):
        if names := differing(a, b):
            values = ", ".join(f"{name} {a.get(name)} -> {b.get(name)}" for name in names)
            found.append(f"line {i + 1}, step {b['global_step']}: {values}")
    return found


def variables_of_hosts(number: int) -> list[dict[str, str]]:
    """The environment variables of so many processes on this machine that are to be hosts of one run."""
    with socket.create_server(("localhost", 0)) as free:
        address = f"localhost:{free.getsockname()[1]}"
    common = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(number)}
    return [common | {"JAX_PROCESS_ID": str(i)} for i in range(number)]


def run_processes(case: Case, folder: Path, checkout: Path, xla_flags: str = "") -> list[dict[str, float]]:
    """Runs a case as its users would, with a checkout's script, and returns its metrics.

    One process has four devices to choose from, two have one each. Raises RuntimeError if one of them fails.
    """
    count = 1 if case.processes > 1 else 4
    xla_flags = f"--xla_force_host_platform_device_count={count} {xla_flags}"
    for words in case.commands(folder):
        processes = []
        for variables in variables_of_hosts(case.processes) if case.processes > 1 else [{}]:
            env = os.environ | {"XLA_FLAGS": xla_flags} | variables
            command = [sys.executable, f"{case.script}.py", *words]
            pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            processes.append(subprocess.Popen(command, cwd=checkout, env=env, **pipe))
        try:
            outputs = [process.communicate()[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(process.returncode for process in processes):
            raise RuntimeError("\n".join([f"{checkout}: {' '.join(command)}", *outputs]))
    return read_metrics(folder)
