"""Ape-X: steps and updates per second, and what the learner's and the actors' time goes into.

Runs the script itself, as a user does, and reads its metrics from the first second after learning started; prints a
table and appends a row to a CSV file. The flags in quotes are those of apex_procgen.py:

    python -m benchmarks.apex nature --flags="--encoder nature --width 1 --pool flatten --num-envs 32 --batch-size 512"
"""

import tempfile
from dataclasses import dataclass

import jax
import numpy as np
import tyro

import apex_procgen as apex
from common import offpolicy, runs
from experiments import records


@dataclass(frozen=True)
class Args:
    name: tyro.conf.Positional[str]
    """what to call this setting in the table"""
    flags: str = ""
    """flags of apex_procgen.py, in one string, after a ="""
    steps: int = 10_000
    """environment steps to time, after learning has started"""
    csv: str = "benchmarks/results/apex.csv"
    """file that a row is appended to; empty for none"""


def measure(flags: str, steps: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        fixed = ["--eval-episodes", "0", "--wandb-mode", "disabled", "--no-save-replay", "--run-dir", folder]
        args = tyro.cli(apex.Args, args=[*records.words_of(flags), *fixed])
        unroll = args.num_envs * args.num_steps
        runs.check(steps >= 2 * unroll, f"--steps {steps}: must be {2 * unroll} or more, two unrolls of every game")
        warm = args.learning_starts + max(2 * unroll, 2 * args.batch_size / max(args.replay_ratio, 1e-9))  # it compiles
        args = tyro.cli(apex.Args, args=["--total-timesteps", str(int(warm) + steps)], default=args)
        run = apex.main(args)
        lines = records.lines_of(run)
    first = next(line for line in lines if line["global_step"] >= warm)
    timed = lines[lines.index(first) + 1 :]
    seconds = timed[-1]["time"] - first["time"]
    weights = np.diff([first["time"], *(line["time"] for line in timed)])

    def percent(part):
        return 100 * float(np.average([x.get(f"time/{part}", 0) for x in timed], weights=weights))

    rates = {"steps/s": "global_step", "updates/s": "charts/updates"}
    result = {name: (timed[-1][key] - first[key]) / seconds for name, key in rates.items()}
    result |= {"batch size": args.batch_size, "learnt from/s": result["updates/s"] * args.batch_size}
    parts = {"update": "update", "sampling and priorities": "sample", "inserting": "insert", "learner waits": "waiting"}
    parts |= {"actors' inference": "actor_inference", "games": "actor_game", "actors blocked": "actor_blocked"}
    result |= {f"{name} %": percent(part) for name, part in parts.items()}
    result["sampling and priorities, % of update"] = 100 * percent("sample") / max(percent("update"), 1e-9)
    if args.replay_device == "device":  # there it is a part of the update's program
        result |= dict.fromkeys(("sampling and priorities %", "sampling and priorities, % of update"), float("nan"))
    buffer = jax.eval_shape(lambda: offpolicy.initial_replay(args))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(buffer))
    result["bytes a transition"] = size / buffer.priorities.size
    return result


def main(args: Args) -> None:
    records.make_room(args.csv, "--csv")
    row = {"setting": args.name} | {k: "" if x != x else f"{x:.4g}" for k, x in measure(args.flags, args.steps).items()}
    row |= {"flags": args.flags} | records.origin()
    records.show([row], [args.name])
    records.append_rows(args.csv, [row])


if __name__ == "__main__":
    runs.cli(Args, main)
