import gc
import importlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

import doorgym  # before MuJoCo, which it tells how to draw without a display
from benchmarks.golden_runs import without_clocks
from common import atari, bonus, checkpoints, devices, envs, networks, runs
from common.actors import Fleet
from experiments import trials
from ppo_procgen import Args, main

ROOT = Path(__file__).parent.parent
# Compiles some programs a third faster, all together a fifth; parts of a program that are compiled at the same time
# gain nothing where another worker has the other core. LLVM's optimiser is off, except in tests marked as `optimised`.
COMPILE_SOONER = (
    "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=1 --xla_cpu_parallel_codegen_split_count=1"
)
# Also for the processes that tests start: what one has compiled no other compiles again, but for what takes no longer
# than to write it.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(ROOT / ".pytest_cache" / "jax")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
runs.set_up_jax()
# More devices than most tests use, on however many cores; the processes that tests start have as many.
os.environ["XLA_FLAGS"] += f" --xla_force_host_platform_device_count=4 {COMPILE_SOONER}"
jax.config.update("jax_num_cpu_devices", 4)
gc.set_threshold(100_000, 20, 20)  # what JAX keeps is much to look through, and little of it is ever free

# Small enough to compile in seconds; the games are real.
TINY = {
    "env_id": "bigfish", "num_envs": 4, "num_steps": 32, "num_minibatches": 2, "update_epochs": 2,
    "encoder": "nature", "pool": "flatten", "width": 1, "hidden": 16, "learning_rate": "0.003",
    "total_timesteps": 384, "eval_episodes": 0, "wandb_mode": "disabled", "num_devices": 2,
}  # fmt: skip


# What each flag of an encoder is changed to where it must change the network (tests/test_networks.py).
ENCODER_FLAGS = {
    "channels": "4,8,8", "blocks": 1, "downsample": "stride", "separable": 1, "norm": "group", "conv_bias": "no",
    "center": "no", "init": "orthogonal", "activation": "elu", "spectral_norm": True,
}  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Turns XLA's optimiser off for tests not marked as `optimised`, and for the processes that they start. It runs
    before fixtures, whose programs are a test's too."""
    off = item.get_closest_marker("optimised") is None
    jax.config.update("jax_disable_most_optimizations", off)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(off)


last_count = 0.0  # when `few_programs` counted the maps, which takes longer than most tests


@pytest.fixture(autouse=True)
def few_programs():
    """Drops compiled programs before they fill memory, and Linux's 65,530 maps of a process: XLA crashes there."""
    yield
    global last_count
    maps, now = Path("/proc/self/maps"), time.monotonic()
    if now - last_count < 5:
        return
    last_count = now
    if maps.exists() and maps.read_bytes().count(b"\n") > 15_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True, scope="session")
def small_bonus():
    """The bonus's two networks have a size of their own: an update of TINY takes ten times as long with them. Yields
    that size."""
    small = networks.EncoderArgs(channels="4", blocks=0, downsample="stride", pool="flatten")
    with pytest.MonkeyPatch.context() as patch:
        size = bonus.ENCODER
        patch.setattr(bonus, "ENCODER", small)
        yield size


@pytest.fixture
def train(tmp_path):
    """train(**flags) runs the script with TINY settings and returns its run."""
    return lambda **flags: main(Args(**TINY | {"run_dir": str(tmp_path)} | flags))


def init_params(module, *inputs):
    """A network's parameters: as one program they compile sooner than operation by operation."""
    return jax.jit(module.init, compiler_options=devices.UNOPTIMISED)(jax.random.PRNGKey(0), *inputs)


def matmuls(function, *args):
    """(dtype, precision) of all matrix products and convolutions: a CPU's results do not show a GPU's precision."""

    def inner(x):
        return hasattr(x, "eqns") or hasattr(x, "jaxpr")

    def walk(jaxpr):
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
                yield str(eqn.invars[0].aval.dtype), eqn.params["precision"]
            for x in filter(inner, jax.tree.leaves(list(eqn.params.values()), is_leaf=inner)):
                yield from walk(x)

    return set(walk(jax.make_jaxpr(function)(*args)))


FULL_PRECISION = {("float32", (jax.lax.Precision.HIGHEST,) * 2)}


def read_metrics(run_dir, clocks=False):
    """The lines of metrics.jsonl; without `clocks`, without what depends on the machine's speed."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return lines if clocks else [without_clocks(line) for line in lines]


def tensorboard_events(folder):
    """As TensorBoard reads them, from records of protocol buffers."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(folder.iterdir()):
        data, place = path.read_bytes(), 0
        while place < len(data):
            size = int.from_bytes(data[place : place + 8], "little")
            yield Event.FromString(data[place + 12 : place + 12 + size])
            place += size + 16


def parameters(run_dir):
    return jax.tree.leaves(checkpoints.load(run_dir)[1]["state"])


def assert_same_run(a, b, lines=None):
    """Two runs have the same metrics (those of `a` may be given) and the same state of everything at their end."""
    assert (lines or read_metrics(a)) == read_metrics(b)
    (step, tree), (other_step, other) = checkpoints.load(a), checkpoints.load(b)
    assert step == other_step
    del tree["run"], other["run"]  # how many lines and seconds there were
    jax.tree.map(np.testing.assert_array_equal, tree, other)


def cut_back(run_dir, updates, folder):
    """A copy of a run with a checkpoint after each update, as one is that was killed after so many of them."""
    later = [str(step) for step in checkpoints.steps_in(run_dir)[updates:]]

    def leave_out(path, names):
        return later if Path(path) == run_dir / "checkpoints" else []

    return shutil.copytree(run_dir, folder / "cut back", ignore=leave_out)


def start(*argv, **variables):
    """Runs a script in a process of its own, with these environment variables besides."""
    command = [sys.executable, *map(str, argv)]
    env = os.environ | variables
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run_here(program, flags, folder, lock, stopping, look=lambda alive: None):
    """In the place of `trials.run` where a process of its own proves nothing more: a whole run of a script, here."""
    script = importlib.import_module(Path(program).stem)
    words = trials.words_of({"wandb_mode": "disabled"} | flags | {"run_dir": folder})
    runs.cli(script.Args, script.main, words)
    look(False)


def flags_of(args):
    """A dict of flags as command-line words."""
    words = []
    for name, value in args.items():
        if isinstance(value, bool):
            words.append(runs.flag_of(name if value else f"no_{name}"))
        else:
            words += [runs.flag_of(name), str(value)]
    return words


def documented_flags(script):
    """The flags of each command with this script in the docs, its docstring's included; loops' variables filled in."""
    pages = (
        *ROOT.glob("docs/*.md"),
        *(ROOT / name for name in ("README.md", "agents/README.md", "benchmarks/TODO.md", script)),
    )
    texts = [page.read_text() for page in pages]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    lines = [line for line in lines if line.startswith(f"python {script} -")]
    values = {"$flags": "", "$game": "coinrun", "$transform": "flip", "$seed": "1"}
    for line in lines:
        if "RUN_DIR" not in line and "--help" not in line:
            for name, value in values.items():
                line = line.replace(name, value)
            yield shlex.split(line, comments=True)[2:]


def init_state(script, args, agent=None):
    """A script's state before its first update, compiled as a whole, which is quicker than op by op."""
    make = partial(script.init_state, args, agent or script.make_agent(args))
    return jax.jit(make, compiler_options=devices.UNOPTIMISED)()


def run_of(script, args, **state):
    """An open run of a script whose checkpoint is a dict of such arrays, for tests of `runs.Run` itself."""
    return runs.Run(args, script.SCRIPT, devices.make_mesh(args), lambda: state or {"state": jax.numpy.zeros(())})


def record_shardings(monkeypatch):
    """A list that gets the devices of each fleet's actors as it is made."""
    shardings, make = [], Fleet.__init__

    def look(self, *given, **how):
        shardings.append(how["param_shardings"])
        make(self, *given, **how)

    monkeypatch.setattr(Fleet, "__init__", look)
    return shardings


def assert_refused(script, words, capture, *parts):
    """A script's, or a benchmark's, whole answer is one sentence with these parts in it, and exit code 2."""
    with pytest.raises(SystemExit) as stopped:
        runs.cli(script.Args, script.main, [*map(str, words)])
    output = capture.readouterr()
    assert stopped.value.code == 2
    assert output.err.count("\n") == 1, output.err
    assert output.err.startswith("error: ")
    for part in parts:
        assert part in output.err
    assert not output.out
    return output.err


def assert_one_sentence(script, words, names, valid, monkeypatch, capfd):
    """Bad input is answered in one sentence with exit code 2, before anything long starts."""
    for module, name in ((envs, "make_procgen"), (atari, "make_montezuma"), (doorgym, "make_vec")):
        monkeypatch.setattr(module, name, None)
    assert_refused(script, ["--wandb-mode", "disabled", *words], capfd, names, valid)


def wait_for(condition, process, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)
