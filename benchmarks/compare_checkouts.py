"""Compares two checkouts digit for digit: runs the cases of benchmarks/golden_runs.py with the scripts of both and
compares names and values of their metrics.

    python -m benchmarks.compare_checkouts ../old . --scripts ppo_procgen trpo_procgen

XLA optimises as by default, unlike in the tests. Prints each line that differs; the exit code is 1 if any does or a run
fails.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.golden_runs import CASES, differences, run_processes
from common import runs

SCRIPTS = tuple(dict.fromkeys(case.script for case in CASES.values()))


@dataclass(frozen=True)
class Args:
    old: tyro.conf.Positional[str]
    """folder of the checkout to compare with"""
    new: tyro.conf.Positional[str]
    """folder of the changed checkout"""
    scripts: tuple[str, ...] = SCRIPTS
    """scripts whose runs are compared"""


def main(args: Args) -> None:
    checkouts = [Path(path).absolute() for path in (args.old, args.new)]
    for path in checkouts:
        runs.check((path / "common").is_dir(), f"{path}: not a checkout, it has no folder common")
    unknown = [name for name in args.scripts if name not in SCRIPTS]
    runs.check(bool(args.scripts) and not unknown, f"--scripts {' '.join(unknown)}: give some of {' '.join(SCRIPTS)}")
    failed = 0
    for name, case in CASES.items():
        if case.script in args.scripts:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    old, new = (run_processes(case, Path(folder) / str(i), path) for i, path in enumerate(checkouts))
                except RuntimeError as error:  # such as a flag that one of them does not have
                    print(f"{name}: failed: {error}", flush=True)
                    failed += 1
                    continue
            found = differences(old, new)
            print(f"{name}: {f'{len(found)} differences' if found else 'the same'}", *found, sep="\n  ", flush=True)
            failed += bool(found)
    sys.exit(failed > 0)


if __name__ == "__main__":
    runs.cli(Args, main)
