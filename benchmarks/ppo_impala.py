"""PPO and IMPALA in turns, in one run: steps per second, and how busy the learner, the actors and the games are.

Runs the scripts themselves, as a user does, and reads their metrics; prints a table and appends its rows to a CSV
file. The flags in quotes go to both scripts, then to each:

    python -m benchmarks.ppo_impala small --flags="--width 1 --pool flatten --num-envs 64 --num-steps 64"
"""

import shlex
import tempfile
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import tyro
from annotated_types import Interval

import impala_procgen as impala
import ppo_procgen as ppo
from benchmarks import records, throughput
from common import runs
from common.flags import PositiveInt


@dataclass(frozen=True)
class Args:
    name: tyro.conf.Positional[str]
    """what to call this setting in the table"""
    flags: str = ""
    """flags of both scripts, in one string, after a ="""
    ppo_flags: str = "--update-epochs 1 --num-minibatches 2"
    """more flags, of ppo_procgen.py"""
    impala_flags: str = "--update-epochs 1 --num-minibatches 2"
    """more flags, of impala_procgen.py"""
    updates: PositiveInt = 10
    """timed iterations in a round, after two that compile"""
    rounds: Annotated[int, Interval(ge=1, le=100)] = 3
    """how often each script runs, in turns; the table has the medians"""
    csv: str = "benchmarks/results/ppo_impala.csv"
    """file that rows are appended to; empty for none"""


def measure(script, flags: str, updates: int) -> dict[str, float]:
    """One run of a script, from its third line of metrics on."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = f"--eval-episodes 0 --wandb-mode disabled --run-dir {shlex.quote(folder)}"
        args = records.read_flags(script, f"{flags} {fixed}")
        args = replace(args, total_timesteps=args.num_envs * args.num_steps * (updates + 2))
        run = script.main(args)
        lines = records.lines_of(run)
    timed = lines[2 : 2 + updates]
    seconds = timed[-1]["time"] - lines[1]["time"]

    def percent(*parts):
        return 100 * float(np.mean([sum(line.get(f"time/{part}", 0) for part in parts) for line in timed]))

    actor = ("actor_inference", "actor_game") if script is impala else ("inference", "game")
    return {
        "steps/s": (timed[-1]["global_step"] - lines[1]["global_step"]) / seconds,
        "learner busy %": percent("update", "transfer"),
        "of it transfer %": percent("transfer"),
        "learner waits %": percent("waiting"),
        "actors busy %": percent(*actor),
        "of it game %": percent(actor[1]),
        "actors blocked %": percent("actor_blocked"),
        "lag": float(np.mean([line.get("charts/policy_lag", 0) for line in timed])),
        "queue": float(np.mean([line.get("charts/queue_size", 0) for line in timed])),
    }


def main(args: Args) -> None:
    records.make_room(args.csv, "--csv")
    settings = {"ppo": (ppo, f"{args.flags} {args.ppo_flags}"), "impala": (impala, f"{args.flags} {args.impala_flags}")}
    results = {name: [] for name in settings}
    for i in range(args.rounds):
        for name in settings if i % 2 == 0 else reversed(settings):
            results[name].append(measure(*settings[name], args.updates))
    ratio = np.median([i["steps/s"] / p["steps/s"] for p, i in zip(results["ppo"], results["impala"], strict=True)])
    alone = throughput.procgen_rate(records.read_flags(ppo, args.flags))
    rows = []
    for name, (_, flags) in settings.items():
        row = {"setting": args.name, "script": name}
        row |= {k: f"{np.median([x[k] for x in results[name]]):.4g}" for k in results[name][0]}
        row["game alone steps/s"] = f"{alone:.4g}"
        row |= {"times PPO's steps/s": f"{ratio if name == 'impala' else 1:.3g}", "rounds": args.rounds, "flags": flags}
        rows.append(row | records.origin())
    records.show(rows, settings)
    records.append_rows(args.csv, rows)


if __name__ == "__main__":
    runs.cli(Args, main)
