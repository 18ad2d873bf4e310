"""The programs that are planned for a GPU, compiled where the wheel for that is installed (`make gpu-plan-test`), and
how they are read; what needs no compiler is tested everywhere."""

import csv
import math
import types

import jax
import jax.numpy as jnp
import pytest
from conftest import assert_refused

from benchmarks import gpu_plan, hlo, queue_model
from common.files import UsageError

needs_compiler = pytest.mark.skipif(not gpu_plan.installed(), reason="the wheel jax-cuda12-plugin is not installed")
CASES = [(one, name) for one in ((script, 1) for script in gpu_plan.PROGRAMS) for name in gpu_plan.PROGRAMS[one[0]]]
CASES += [(one, "update") for one in ((script, 8) for script in gpu_plan.PROGRAMS)] + [(("ppo", 8), "act")]


def case(one, name):
    """The large programs are slow, but PPO's on several GPUs."""
    marks = pytest.mark.slow if name.startswith("update") and one != ("ppo", 8) else ()
    return pytest.param(one, name, id=f"{one[0]}.{name} on {one[1]}", marks=marks)


@pytest.fixture
def place():
    """Puts shapes on one GPU."""
    jax.config.update("jax_platforms", "cpu")
    gpus = gpu_plan.target("h100")
    with gpu_plan.planning(gpus):
        yield gpu_plan.on_all(gpus)


@pytest.fixture(scope="module")
def planned(request):
    """A script's name, how many GPUs, its flags for them by default, and its plan."""
    jax.config.update("jax_platforms", "cpu")
    script, count = request.param
    gpus = gpu_plan.target("h100", count)
    args = gpu_plan.for_gpus(gpu_plan.read_flags(script, ""), count, "weak")
    with gpu_plan.planning(gpus):
        yield script, count, args, gpu_plan.SCRIPTS[script][1](args, gpus)


def test_every_script_and_program_is_named():
    assert set(gpu_plan.SCRIPTS) == set(gpu_plan.PROGRAMS)


@needs_compiler
@pytest.mark.parametrize(("planned", "program"), [case(*names) for names in CASES], indirect=["planned"])
def test_program_is_one_for_gpus(planned, program):
    """It compiles, in bfloat16 and float32 as it should, without atomics on activations and at a size that fits; and
    GPUs have nothing in common but sums, of gradients and next to nothing else."""
    script, count, args, plan = planned
    assert set(plan.programs) == set(gpu_plan.PROGRAMS[script])
    lowered = plan.programs[program]()
    compiled = lowered.compile()
    read = hlo.Program(compiled.as_text())
    kernels = read.kernels()
    for x in (x for computation in read.computations.values() for x in computation.values()):
        assert not (x.op in ("scatter", "select-and-scatter") and len(x.arrays[0].dims) == 4), x
        assert x.collective in ("", "all-reduce"), x
    for kernel in kernels:
        if kernel.kind.startswith("__cudnn$conv") and kernel.arithmetic != "bf16":
            assert (script, program) == ("rnd", "update"), kernel
            assert "Features" in kernel.where  # RND's target and predictor, which are to be exact
        assert not kernel.flops or kernel.arithmetic != "tf32", kernel
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 2 * 2**30
    numbers = gpu_plan.cost(gpu_plan.GPUS["h100"], memory, kernels, count)
    assert 0 < numbers["modelled ms"] < 1000
    if program in ("act", "update"):
        assert numbers["GFLOP"] > 0
    if script == "trpo" and program == "update":  # besides gradients, products with the Fisher matrix of its parts
        assert (numbers["summed MB"] > 0) == (count > 1)
        return
    learnt = 0
    if count > 1 and program == "update":
        state = lowered.args_info[0][0]
        learner = state.learner if script == "hnppo" else state.params
        learnt = 4 * sum(math.prod(x.shape) for x in jax.tree.leaves(learner)) * steps_of_an_update(args)
    assert learnt <= 1e6 * numbers["summed MB"] <= 1.01 * learnt


def steps_of_an_update(args):
    return args.num_minibatches * args.update_epochs if hasattr(args, "num_minibatches") else 1


def compiled_text(place, function, *shapes):
    given = [place(gpu_plan.array(*dims, dtype=dtype)) for dims, dtype in shapes]
    return jax.jit(function).lower(*given).compile().as_text()


@needs_compiler
@pytest.mark.parametrize(("precision", "arithmetic"), [("default", "tf32"), ("highest", "f32")])
def test_a_matrix_product_is_counted(place, precision, arithmetic):
    def product(a, b):
        return jnp.matmul(a, b, precision=precision)

    text = compiled_text(place, product, ((256, 512), jnp.float32), ((512, 128), jnp.float32))
    kernels = hlo.Program(text).kernels()
    (one,) = (kernel for kernel in kernels if kernel.flops)
    assert one.flops == 2 * 256 * 512 * 128
    assert one.arithmetic == arithmetic
    assert one.bytes >= 4 * (256 * 512 + 512 * 128 + 256 * 128)


@needs_compiler
def test_a_convolution_and_its_gradients_are_counted(place):
    def loss(x, w):
        y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return (y.astype(jnp.float32) ** 2).sum()

    shapes = ((4, 16, 16, 32), jnp.bfloat16), ((3, 3, 32, 64), jnp.bfloat16)
    kernels = hlo.Program(compiled_text(place, jax.grad(loss, (0, 1)), *shapes)).kernels()
    convolutions = [kernel for kernel in kernels if kernel.kind.startswith("__cudnn$conv")]
    assert len(convolutions) == 3
    for kernel in convolutions:
        assert kernel.flops == 2 * 4 * 16 * 16 * 64 * 3 * 3 * 32, kernel
        assert kernel.arithmetic == "bf16"


@needs_compiler
def test_a_loop_counts_as_often_as_it_goes_round_and_slices_only_what_they_are(place):
    def total(x):
        return jax.lax.scan(lambda carry, row: (jnp.sin(carry + row), None), jnp.zeros(1000), x)[0]

    kernels = hlo.Program(compiled_text(place, total, ((50, 1000), jnp.float32))).kernels()
    inside = [kernel for kernel in kernels if kernel.times == 50 and kernel.bytes > 1000]
    assert len(inside) == 1
    assert 3 * 4000 <= inside[0].bytes < 4 * 4000  # a row, and the sum before and after; not 50 rows


def test_a_branch_and_a_call_are_followed():
    text = """
HloModule test
%short (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %a = f32[8]{0} negate(%p)
}
%long (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  %b = f32[8]{0} negate(%q)
  ROOT %c = f32[8]{0} copy(%b)
}
ENTRY %main (i: pred[], x: f32[8]) -> f32[8] {
  %i = pred[] parameter(0)
  %x = f32[8]{0} parameter(1)
  %y = f32[8]{0} conditional(%i, %x, %x), true_computation=%short, false_computation=%long
  ROOT %z = f32[8]{0} call(%y), to_apply=%short
}
"""
    kernels = hlo.Program(text).kernels()
    assert [kernel.kind for kernel in kernels] == ["negate", "copy", "negate"]
    assert [kernel.bytes for kernel in kernels] == [64, 64, 64]


def test_a_sum_over_gpus_is_counted_once_and_not_as_memory_traffic():
    text = """
HloModule test
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}
ENTRY %main (x: f32[250], y: f32[]) -> f32[250] {
  %x = f32[250]{0} parameter(0)
  %y = f32[] parameter(1)
  %start = (f32[250]{0}, f32[]) all-reduce-start(%x, %y), replica_groups={{0,1,2,3}}, to_apply=%add
  %done = (f32[250]{0}, f32[]) all-reduce-done(%start)
  ROOT %z = f32[250]{0} get-tuple-element(%done), index=0
}
"""
    (kernel,) = hlo.Program(text).kernels()
    assert (kernel.kind, kernel.shared, kernel.bytes, kernel.flops) == ("all-reduce", 1004, 0, 0)
    gpu = gpu_plan.Gpu({"f32": 1.0}, bandwidth=1.0, link=1004.0, description="")
    assert gpu_plan.work(gpu, kernel, 4) == pytest.approx(2 * 3 / 4)
    assert gpu_plan.work(gpu, kernel, 1) == 0


def test_flags_of_several_gpus():
    """Weak scaling leaves each GPU what one alone has; strong scaling needs a default that they divide."""
    one = gpu_plan.read_flags("apex", "")
    weak = gpu_plan.for_gpus(one, 8, "weak")
    assert (weak.num_envs, weak.batch_size, weak.buffer_size) == (8 * 24, 8 * 128, 8 * 200_000)
    assert weak.num_actors == one.num_actors
    ppo = gpu_plan.read_flags("ppo", "")
    assert gpu_plan.for_gpus(ppo, 8, "strong") == gpu_plan.for_gpus(ppo, 1, "weak") == ppo
    with pytest.raises(UsageError, match=r"--gpus 8: does not divide an actor's games, .*12"):
        gpu_plan.for_gpus(one, 8, "strong")


def test_a_kernel_takes_its_launch_and_the_larger_of_bytes_and_flops():
    gpu = gpu_plan.Gpu({"bf16": 1e12, "tf32": 1e11, "f32": 1e10}, 1e9, 1e8, "")
    x = hlo.Instruction("x", "custom-call", (), (), "", True)
    slow, heavy = hlo.Kernel(x, "a", 1, 10**6, 1, "bf16"), hlo.Kernel(x, "b", 1, 1, 4 * 10**9, "bf16")
    assert gpu_plan.work(gpu, slow) == pytest.approx(1e-3)
    assert gpu_plan.work(gpu, heavy) == pytest.approx(1e-2)
    assert gpu_plan.work(gpu, heavy._replace(arithmetic="f32")) == pytest.approx(1)
    sizes = {"argument": 1, "temp": 2, "output": 5, "alias": 1}  # what is donated counts once
    memory = types.SimpleNamespace(**{f"{name}_size_in_bytes": n * 2**20 for name, n in sizes.items()})
    numbers = gpu_plan.cost(gpu, memory, [slow._replace(times=10)])
    assert (numbers["MiB"], numbers["modelled ms"]) == (7, pytest.approx(10 + 1e3 * 10 * gpu_plan.LAUNCH))


def test_steps_per_second_of_games_that_wait_and_that_go_on():
    cycle = gpu_plan.Cycle(steps=1000, turns=10, calls={"act": 10, "update": 1}, overlap=False)
    ms = {"act": 1.0, "update": 20.0}
    assert gpu_plan.steps_per_second(cycle, ms, game_ms=2.0) == pytest.approx(1e6 / (10 + 20 + 20))
    side_by_side = cycle._replace(overlap=True)
    assert gpu_plan.steps_per_second(side_by_side, ms, game_ms=0.5) == pytest.approx(1e6 / 30)
    assert gpu_plan.steps_per_second(side_by_side, ms, game_ms=9.0) == pytest.approx(1e6 / 100)


def test_one_queue_by_hand():
    args = queue_model.Args(act_ms=1.0, update_ms=8.0, game_ms=2.0, steps=4, pieces=2, rounds=10)
    turns, halves, whole, pieces = queue_model.ways(args).values()
    assert turns == pytest.approx(4 * (1 + 2) + 8)
    assert halves == pytest.approx(4 * 2 + 1 + 8)  # each half's game while the other is looked at, and the last one's
    # An act waits for the update: 8 ms, then 3 steps with their games, and the first one's game beside the update.
    assert 8 + 3 * 3 + 1 <= whole <= turns
    assert pieces < whole


@needs_compiler
def test_every_line_says_that_it_is_a_plan(tmp_path, capfd):
    path = tmp_path / "plan.csv"
    gpu_plan.main(
        gpu_plan.Args(programs=("hnppo.act", "apex.insert"), top=2, csv=str(path), dump=str(tmp_path / "dump"))
    )
    lines = capfd.readouterr().out.splitlines()
    rows = [line for line in lines if "hnppo" in line or "apex" in line]
    assert len(rows) >= 16
    assert all(line.split()[0] == "plan" for line in rows)
    with path.open() as file:
        assert [(row["is"], row["gpu"], row["GPUs"], row["program"]) for row in csv.DictReader(file)] == [
            ("plan", gpu, count, program)
            for gpu in ("h100", "a100")
            for count in "18"
            for program in ("apex.insert", "hnppo.act")
        ]
    assert len(list((tmp_path / "dump").iterdir())) == 8


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["ppo.updat"], ["ppo.updat:", "ppo.update"]),
        (["ppo", "--flags=--num-minibatches 7"], ["--num-minibatches 7", "must divide"]),
        (["ppo", "--game-ms", "-1"], ["--game-ms -1.0"]),
        (["apex", "--gpus", "8", "--scaling", "strong"], ["--gpus 8", "does not divide", "12", "--flags"]),
        (["ppo", "--gpu", "a100"], ["jax-cuda12-plugin", "make gpu-plan"]),
    ],
)
def test_bad_input_gets_one_sentence(words, parts, monkeypatch, capfd):
    monkeypatch.setattr(gpu_plan, "installed", lambda: False)
    assert_refused(gpu_plan, words, capfd, *parts)
