import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from common import runs
from ppo_procgen import Args, main

ROOT = Path(__file__).parent.parent

# Small enough to compile in seconds; the games are real.
TINY = {
    "env_id": "bigfish", "num_envs": 4, "num_steps": 32, "num_minibatches": 2, "update_epochs": 2,
    "encoder": "nature", "pool": "flatten", "width": 1, "hidden": 16, "learning_rate": "0.003",
    "total_timesteps": 384, "eval_episodes": 0, "wandb_mode": "disabled",
}  # fmt: skip


# What each flag of an encoder is changed to where it must change the network (tests/test_networks.py).
ENCODER_FLAGS = {
    "channels": "4,8,8", "blocks": 1, "downsample": "stride", "separable": 1, "norm": "group", "conv_bias": "no",
    "init": "orthogonal", "activation": "elu",
}  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def compilation_cache():
    runs.use_compilation_cache()


@pytest.fixture
def train(tmp_path):
    """train(**flags) runs the script with TINY settings and returns its run."""
    return lambda **flags: main(Args(**TINY | {"run_dir": str(tmp_path)} | flags))


def read_metrics(run_dir, clocks=False):
    """The lines of metrics.jsonl; without `clocks`, without what depends on the machine's speed."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    timed = ("time", "charts/SPS", "charts/queue_size")
    return [{k: v for k, v in line.items() if clocks or not (k in timed or k.startswith("time/"))} for line in lines]


def parameters(run_dir):
    return jax.tree.leaves(runs.load_checkpoint(run_dir)[1]["state"])


def assert_same_run(a, b):
    assert read_metrics(a) == read_metrics(b)
    for x, y in zip(parameters(a), parameters(b), strict=True):
        np.testing.assert_array_equal(x, y)


def start(*argv):
    """Runs a script in a process of its own."""
    command = [sys.executable, *map(str, argv)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def flags_of(args):
    """A dict of flags as command-line words."""
    words = []
    for name, value in args.items():
        flag = name.replace("_", "-")
        words += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", value]
    return words


def documented_flags(script):
    """The flags of each command with this script in the docs, its docstring's included; loops' variables filled in."""
    texts = [(ROOT / name).read_text() for name in ("README.md", "benchmarks/TODO.md", script)]
    lines = [line for text in texts for line in text.splitlines() if f"python {script} -" in line]
    values = {"$flags": "", "$game": "coinrun", "$transform": "flip", "$n": "3", "$atoms": "51"}
    for line in lines:
        if "RUN_DIR" not in line and "--help" not in line:
            for name, value in values.items():
                line = line.replace(name, value)
            yield shlex.split(line, comments=True)[2:]


def wait_for(condition, process, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)
