import json

import pytest

from common import runs
from ppo_procgen import Args, main

# Small enough to compile in seconds; the games are real.
TINY = {
    "env_id": "bigfish", "num_envs": 4, "num_steps": 32, "num_minibatches": 2, "update_epochs": 2,
    "encoder": "nature", "pool": "flatten", "width": 1, "hidden": 16, "learning_rate": "0.003",
    "total_timesteps": 384, "eval_episodes": 0, "wandb_mode": "disabled",
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
    timed = ("time", "charts/SPS")
    return [{k: v for k, v in line.items() if clocks or not (k in timed or k.startswith("time/"))} for line in lines]
