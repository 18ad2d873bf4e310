"""Steps per second of any script and where its time goes; variants run in turns, with ratios to the first.

Runs the scripts as processes of their own, as a user does, and reads their metrics once everything is compiled. A
variant is a script with flags of its own, in quotes:

    python -m benchmarks.throughput ppo_procgen --flags="--encoder nature --width 1 --pool flatten"
    python -m benchmarks.throughput ppo_procgen "impala_procgen --num-actors 2" --flags="--update-epochs 1"
    python -m benchmarks.throughput rnd_montezuma "rnd_montezuma --async" "rnd_montezuma --async --vtrace"
"""

import contextlib
import importlib
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from common import atari, envs, files, runs
from common.flags import PositiveInt
from experiments import records, trials

# Flags of a run, where a script has them: it trains until it is stopped, and does nothing else.
OVERRIDES = {"total_timesteps": 2_000_000_000, "save_replay": False, "obs_norm_init_steps": 1}
# Parts of an iteration, as the metrics time/<part> name them.
PARTS = "update", "transfer", "waiting", "sample", "insert", "rollout", "game", "inference", "blocked"
NUMBERS = (
    "steps/s", "updates/s", *(f"{part} %" for part in PARTS), "policy lag", "times the first", "games alone steps/s",
)  # fmt: skip
COLUMNS = "variant", *NUMBERS, "rounds", "updates", "flags", *trials.ORIGIN
GAME_STEPS = 300  # of each environment, to time EnvPool alone


@dataclass(frozen=True)
class Args:
    variants: tyro.conf.Positional[tuple[str, ...]]
    """scripts, each alone or in quotes with flags of its own"""
    flags: str = ""
    """flags of all variants, in quotes: --flags='--num-envs 8'"""
    updates: PositiveInt = 10
    """timed iterations in a round"""
    rounds: PositiveInt = 3
    """how often each variant runs, in turns; the table has the medians"""
    csv: str = ""
    """file that rows are appended to"""


def read_variant(variant: str, flags: str) -> tuple[str, Any]:
    """The script's name and its parsed flags."""
    words = records.split_flags(variant)
    runs.check(bool(words), "VARIANTS: give scripts, such as ppo_procgen")
    name = words[0].removesuffix(".py")
    trials.check_flags("VARIANTS", f"{name}.py", {})
    return name, records.parse_flags(importlib.import_module(name), f"{flags} {variant.partition(words[0])[2]}")


def games_rate(args: Any) -> float:
    """EnvPool alone, random actions, all cores: steps/s; NaN for other games."""
    if not isinstance(args, envs.GameArgs | atari.GameArgs):
        return float("nan")
    procgen = isinstance(args, envs.GameArgs)
    env = (envs.make_procgen if procgen else atari.make_montezuma)(args, args.num_envs, 0)
    count = envs.NUM_ACTIONS if procgen else atari.NUM_ACTIONS
    env.reset()
    actions = np.random.default_rng(0).integers(0, count, (GAME_STEPS, args.num_envs))
    start = time.perf_counter()
    for row in actions:
        env.step(row)
    seconds = time.perf_counter() - start
    env.close()
    return GAME_STEPS * args.num_envs / seconds


def phase_length(args: Any) -> int:
    """Iterations per phase: PPG's --policy-iterations, else 1."""
    return getattr(args, "policy_iterations", 1)


def timed_lines(lines: list[dict], phase: int = 1) -> list[dict]:
    """The lines of metrics after the first phase that learns, in which programs compile."""
    learning = [i for i, line in enumerate(lines) if any(name.startswith("losses/") for name in line)]
    return lines[learning[0] + phase :] if learning else []


def measure(name: str, args: Any, updates: int) -> dict[str, float]:
    """One run of a script, stopped after so many updates."""
    stopping, defaults = threading.Event(), type(args)()
    flags = {k.rstrip("_"): v for k, v in vars(args).items() if v != getattr(defaults, k)}
    flags |= {k: v for k, v in OVERRIDES.items() if k in [field.name for field in fields(args)]}
    flags |= {"eval_episodes": 0} if isinstance(args, envs.GameArgs) else {}
    with tempfile.TemporaryDirectory() as folder:

        def timed() -> list[dict]:
            return timed_lines(trials.read_metrics(trials.find_run(Path(folder))), phase_length(args))

        def stop_if_timed(alive: bool) -> None:
            if len(timed()) > updates:
                stopping.set()

        try:
            with files.lock_run(Path(folder)) as lock, contextlib.suppress(trials.Stopped):
                trials.run(f"{name}.py", flags, Path(folder), lock, stopping, stop_if_timed)
        except RuntimeError as error:
            raise files.FailedError(f"{name}.py: {error}") from None
        lines = timed()
    if len(lines) <= updates:
        raise files.FailedError(f"{name}.py: ended after {max(len(lines) - 1, 0)} of {updates} timed iterations")
    return rates(lines)


def rates(lines: list[dict]) -> dict[str, float]:
    """Steps and updates per second from the first line to the last, and what share of the time each part takes."""
    first, last, timed = lines[0], lines[-1], lines[1:]
    seconds = np.diff([line["time"] for line in lines])
    found = {"steps/s": (last["global_step"] - first["global_step"]) / seconds.sum()}
    if "charts/updates" in last:
        found["updates/s"] = (last["charts/updates"] - first["charts/updates"]) / seconds.sum()
    for part in PARTS:  # of actors where these are threads of their own
        key = f"time/actor_{part}" if f"time/actor_{part}" in last else f"time/{part}"
        if key in last:
            found[f"{part} %"] = 100 * float(np.average([line.get(key, 0) for line in timed], weights=seconds))
    if "charts/policy_lag" in last:
        found["policy lag"] = float(np.mean([line["charts/policy_lag"] for line in timed]))
    return found


def tabulate(args: Args, found: dict[str, list[dict[str, float]]], alone: list[float]) -> list[dict]:
    """A row for each variant that was measured: medians over its rounds, and over the ratios of rounds."""
    rows = []
    for variant, rounds in found.items():
        if not rounds:
            continue
        pairs = zip(rounds, found[args.variants[0]], strict=False)
        ratios = [own["steps/s"] / first["steps/s"] for own, first in pairs]
        numbers = {name: statistics.median(one.get(name, np.nan) for one in rounds) for name in NUMBERS}
        numbers |= {"times the first": statistics.median(ratios), "games alone steps/s": statistics.median(alone)}
        row = {"variant": variant} | {name: "" if np.isnan(x) else f"{x:.4g}" for name, x in numbers.items()}
        rows.append(row | {"rounds": len(rounds), "updates": args.updates, "flags": args.flags} | trials.origin())
    return rows


def main(args: Args) -> None:
    records.make_room(args.csv, "--csv")
    if args.csv:
        records.check_columns(args.csv, records.read_rows(Path(args.csv)), [dict.fromkeys(COLUMNS)])
    runs.check(len(set(args.variants)) == len(args.variants) > 0, "VARIANTS: give one or more, each once")
    parsed = {variant: read_variant(variant, args.flags) for variant in args.variants}
    for variant, (_, flags) in parsed.items():
        whole = args.updates % phase_length(flags) == 0
        runs.check(whole, f"--updates {args.updates}: for {variant} give a multiple of {phase_length(flags)}")
    found, alone = {variant: [] for variant in parsed}, []
    try:
        for i in range(args.rounds):
            alone.append(games_rate(parsed[args.variants[0]][1]))
            for variant in parsed if i % 2 == 0 else reversed(parsed):
                found[variant].append(measure(*parsed[variant], args.updates))
    finally:  # also after a failure or a signal, with what was measured before
        rows = tabulate(args, found, alone)
        if rows:
            records.show(rows, [row["variant"] for row in rows])
            records.append_rows(args.csv, rows)


if __name__ == "__main__":
    runs.cli(Args, main)
