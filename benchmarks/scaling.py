"""The cost of sharding a run on a CPU: steps per second of a script on one device, on several, and on as many processes
with a device each, measured in turns.

On "one device" XLA's threads may still use all cores. Prints a table and appends its rows to a CSV file. The
flags in quotes are the script's:

    python -m benchmarks.scaling ppo_procgen --flags="--encoder nature --width 1 --pool flatten --num-steps 64"
"""

import importlib
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from annotated_types import Interval
from rich.console import Console
from rich.table import Table

from benchmarks.golden_runs import variables_of_hosts
from common import devices, runs
from common.flags import PositiveInt
from experiments import records, trials


@dataclass(frozen=True)
class Args:
    script: tyro.conf.Positional[Literal["ppo_procgen", "impala_procgen"]]
    """the script"""
    flags: str = ""
    """its flags, in quotes: --flags='--num-envs 8'"""
    devices: Annotated[int, Interval(ge=2, le=8)] = 2
    """how many devices, and how many processes"""
    steps: PositiveInt = 40_000
    """environment steps of a run"""
    rounds: Annotated[int, Interval(ge=1, le=100)] = 3
    """how often each runs, in turns; the table has the medians"""
    csv: str = "benchmarks/results/scaling.csv"
    """file that rows are appended to; empty for none"""


def start(args: Args, folder: str, num_devices: int, more: list[str], **variables: str) -> subprocess.Popen:
    """The script in a process of its own, in which a CPU is so many devices."""
    fixed = f"--total-timesteps {args.steps} --eval-episodes 0 --wandb-mode disabled --run-dir".split()
    env = os.environ | variables | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}"}
    command = [sys.executable, f"{args.script}.py", *records.split_flags(args.flags), *fixed, folder, *more]
    return subprocess.Popen(command, cwd=records.ROOT, env=env, stderr=subprocess.PIPE, text=True)


def steps_per_second(args: Args, way: str) -> float:
    """Of one run, the median over its updates after the third."""
    with tempfile.TemporaryDirectory() as folder:
        if way == "processes":
            more = ["--num-devices", "1", "--distributed"]
            processes = [start(args, folder, 1, more, **variables) for variables in variables_of_hosts(args.devices)]
        else:
            number = 1 if way == "one device" else args.devices
            processes = [start(args, folder, number, ["--num-devices", str(number)])]
        try:
            outputs = [process.communicate()[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
        for process, output in zip(processes, outputs, strict=True):
            runs.check(process.returncode == 0, f"{way}: {(output.strip().splitlines() or ['no word'])[-1]}")
        lines = trials.read_metrics(trials.find_run(Path(folder)))
    seen = np.array([(line["global_step"], line["time"]) for line in lines if "charts/SPS" in line])[2:]
    runs.check(len(seen) > 3, f"--steps {args.steps}: too few updates to time, give more")
    steps, seconds = np.diff(seen, axis=0).T
    return float(np.median(steps / seconds))


def main(args: Args) -> None:
    records.make_room(args.csv, "--csv")
    runs.check(devices.on_cpu(), "scaling: is of a CPU's cores, and this is a GPU; set JAX_PLATFORMS=cpu")
    given = records.parse_flags(importlib.import_module(args.script), args.flags)
    if args.script == "ppo_procgen":
        least = 6 * given.num_envs * given.num_steps
        runs.check(args.steps >= least, f"--steps {args.steps}: is too few updates to time, give {least} or more")
    ways = "one device", "devices", "processes"
    rates = {way: [] for way in ways}
    for i in range(args.rounds):
        for way in ways if i % 2 == 0 else reversed(ways):
            rates[way].append(steps_per_second(args, way))
    table, rows = Table("", "steps/s", "times one device's"), []
    for way in ways:
        ratio = np.median(np.divide(rates[way], rates["one device"]))
        name = way if way == "one device" else f"{args.devices} {way}"
        row = {"script": args.script, "on": name, "steps/s": f"{np.median(rates[way]):.4g}", "ratio": f"{ratio:.3g}"}
        rows.append(row | {"rounds": args.rounds, "flags": args.flags} | records.origin())
        table.add_row(name, row["steps/s"], row["ratio"])
    Console().print(table)
    records.append_rows(args.csv, rows)


if __name__ == "__main__":
    runs.cli(Args, main)
