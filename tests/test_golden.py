"""Every script's metrics are the same as before, to float32 rounding, whatever the code looks like."""

import importlib
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import COMPILE_SOONER, ROOT

from benchmarks.golden_runs import CASES, read_metrics, run_processes
from common import runs

# EnvPool 1.2.7, of Python 3.12 and newer, draws Procgen by Qt 6, and some pixels differ from Qt 5's.
GOLDEN = Path(__file__).with_name("golden.json" if sys.version_info < (3, 12) else "golden_qt6.json")


def run(case, folder):
    if case.processes > 1:
        return run_processes(case, folder, ROOT, COMPILE_SOONER)
    script = importlib.import_module(case.script)
    for words in case.commands(folder):
        runs.cli(script.Args, script.main, words)
    return read_metrics(folder)


def write(name, lines):
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    golden[name] = [{metric: float(f"{value:.7g}") for metric, value in line.items()} for line in lines]
    texts = []
    for case in CASES:
        if case in golden:
            texts.append(f"{json.dumps(case)}: [\n" + ",\n".join(map(json.dumps, golden[case])) + "\n]")
    GOLDEN.write_text("{\n" + ",\n".join(texts) + "\n}\n")


# Two processes take longest, as each starts twice and compiles its own.
SLOW = "ppo, 2 processes", "trpo, 2 processes", "impala, 2 processes"


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES])
def test_metrics_are_the_golden_ones(name, tmp_path):
    """WRITE_GOLDEN=1 python -m pytest tests/test_golden.py writes them anew, or with -k some of them."""
    lines = run(CASES[name], tmp_path)
    if os.environ.get("WRITE_GOLDEN"):
        return write(name, lines)
    golden = json.loads(GOLDEN.read_text())[name]
    assert [list(line) for line in lines] == [list(line) for line in golden]
    assert [line["global_step"] for line in lines] == [line["global_step"] for line in golden]
    # Another processor rounds otherwise, which MuJoCo's contacts amplify.
    rtol, atol, of_shares = (5e-2, 1e-4, 0.025) if "hnppo" in name else (1e-3, 1e-5, 1e-5)
    for i, (line, expected) in enumerate(zip(lines, golden, strict=True)):
        for metric, value in expected.items():
            least = of_shares if metric in ("losses/clipfrac", "losses/explained_variance") else atol
            np.testing.assert_allclose(line[metric], value, rtol, least, err_msg=f"line {i + 1}: {metric}")
