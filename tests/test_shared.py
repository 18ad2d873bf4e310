"""What the scripts share, where one wrong line would change every run and no other test would see it."""

import ast
import errno
import io
import os
import shutil
import signal
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import av
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro
import wandb
from conftest import ROOT, TINY, tensorboard_events
from PIL import Image

import impala_procgen as impala
import ppo_procgen as ppo
from common import actors, augment, checkpoints, devices, files, films, flags, networks, runs, tracking
from common.networks import EncoderArgs
from experiments import trials

KEYS = jax.random.split(jax.random.PRNGKey(3), 48)


def test_whether_a_transform_is_used_and_which_are_drawn_apart():
    keys = jax.random.split(jax.random.PRNGKey(0), 1000)
    x = np.random.default_rng(0).integers(0, 256, (1, 64, 64, 3), np.uint8).repeat(1000, axis=0)
    got = np.asarray(augment.augment(augment.AugmentArgs("flip", 0.5), keys, x))
    across, down = ((got == want).all(axis=(1, 2, 3)).mean() for want in (x[:, :, ::-1], x[:, ::-1]))
    assert [across, down] == pytest.approx([0.25, 0.25], abs=0.04)


@pytest.mark.parametrize("move", [partial(augment.translate, most=1), partial(augment.pad_crop, pad=1)])
def test_both_ends_of_a_move_are_drawn(move):
    dot = jnp.zeros((64, 64, 3), jnp.uint8).at[32, 32].set(1)
    moved = np.asarray(jax.vmap(move, (0, None))(KEYS, dot))
    assert {tuple(np.argwhere(x[..., 0])[0] - 32) for x in moved} == {(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)}


def test_both_ends_of_a_side_are_drawn():
    inside = np.asarray(jax.vmap(lambda key: augment._rectangle(key, (64, 64, 3), 3, 4))(KEYS))[..., 0]
    assert {(int(x.any(1).sum()), int(x.any(0).sum())) for x in inside} == {(3, 3), (3, 4), (4, 3), (4, 4)}


def count(spec):
    shapes = jax.eval_shape(
        networks.make_encoder(spec).init, jax.random.PRNGKey(0), jnp.zeros((1, 64, 64, 3), jnp.uint8)
    )
    return sum(x.size for x in jax.tree.leaves(shapes))


def inverted(c, out):
    return 4 * c * (c + 4 + 9 + out) + 2 * out


def test_parameters_of_a_mobilenet_by_hand():
    pairs = [(8, 8), (8, 8), (8, 12), (12, 12), (12, 16), (16, 16), (16, 32), (32, 32)]
    assert (
        count(EncoderArgs("mobilenet", width=1)) == 232 + sum(inverted(*p) for p in pairs) + 32 * 128 + 256 + 129 * 256
    )


def test_parameters_of_squeeze_and_attention_by_hand():
    want = 9 * (3 * 64 + 64 * 64) + 3 * 64 + (64 * 8 + 8 + 8 * 64 + 64) + (2 * 64 * 8 + 64 * 64 + 1) + 65 * 256
    assert count(EncoderArgs("xresnet:[64,2],se,sa1")) == want
    assert count(EncoderArgs("xresnet:[64,2],se,sa")) == want
    stem = 9 * (3 * 32 + 2 * 32 * 32 + 32 * 64 + 64 * 64) + 32 * 64 + 65 * 256
    assert count(EncoderArgs("xresnet:stem,[32,2],[64,1]")) == stem
    encoder = networks.make_encoder(EncoderArgs("xresnet:[8,2],sa1", hidden=8))
    params = encoder.init(jax.random.PRNGKey(0), jnp.zeros((1, 16, 16, 3), jnp.uint8))["params"]
    assert params["attention_0"] == 0  # at first it changes nothing


def test_the_depthwise_half_has_no_bias():
    spec = EncoderArgs(width=1, channels="64", blocks=0, separable=8, hidden=8, init="pytorch")
    layers = jax.eval_shape(
        networks.make_encoder(spec).init, jax.random.PRNGKey(0), jnp.zeros((1, 16, 16, 3), jnp.uint8)
    )["params"]
    assert "bias" not in layers["Conv_0"]


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_core_is_in_float32_on_a_gpu_too(kind):
    core = networks.initial_core(kind, 8, 2)
    module, x, first = networks.Recurrent(kind, 8), np.zeros((2, 6, 8), np.float32), np.zeros((2, 6), bool)
    params = jax.eval_shape(module.init, jax.random.PRNGKey(0), x, first, core)
    text = str(jax.make_jaxpr(module.apply)(params, x, first, core))
    assert text.count("dot_general[") == text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") > 0


def test_a_forks_tuples_come_back_from_its_args_json(tmp_path):
    @dataclass(frozen=True)
    class Args:
        betas: tuple[flags.UnitInterval, flags.PositiveFloat] = (0.9, 0.999)
        parts: tuple[str, ...] = ()

    for args in (Args(), Args((0.8, -0.5), ("a", "b=c"))):
        files.write_json(tmp_path / "args.json", {"script": "my_fork", "args": asdict(args)})
        assert runs.saved_args(Args, str(tmp_path), "RUN_DIR") == args
        assert tyro.cli(Args, args=trials.words_of(asdict(args))) == args  # and from a sweep's
    with pytest.raises(runs.UsageError, match=r"--betas -0.5: must be above 0"):
        runs.check_flags(args)


@pytest.mark.parametrize("script", [*ROOT.glob("*_procgen.py"), ROOT / "rnd_montezuma.py", ROOT / "hnppo_doorgym.py"])
def test_optimizer_of_a_script_is_given_the_parameters(script):
    """Optax's `add_decayed_weights` and others need the third argument of `update`."""
    calls = [x for x in ast.walk(ast.parse(script.read_text())) if isinstance(x, ast.Call)]
    updates = [x for x in calls if getattr(x.func, "attr", "") == "update" and len(x.args) > 1]
    assert updates
    assert all(len(x.args) == 3 for x in updates)


def args_in(tmp_path):
    return ppo.Args(**TINY | {"run_dir": str(tmp_path)})


def test_speed_is_of_the_steps_since_the_start(tmp_path, monkeypatch):
    run, clock = runs.Run(args_in(tmp_path), "ppo_procgen"), iter([10.0, 12.0])
    monkeypatch.setattr(runs.time, "perf_counter", lambda: next(clock))
    assert [run.steps_per_second(1000), run.steps_per_second(1300)] == [0, 150]


def test_wandb_is_told_how_a_run_ended(tmp_path):
    codes = []
    for error in (None, ZeroDivisionError, SystemExit, KeyboardInterrupt):
        run = runs.Run(args_in(tmp_path), "ppo_procgen")
        run._wandb = SimpleNamespace(offline=False, finish=lambda exit_code: codes.append(exit_code))
        run.__enter__()
        run.__exit__(error, None, None)
    assert codes == [0, 1, 0, 1]
    rows = []
    run._wandb = SimpleNamespace(log=rows.append)
    run.save_video(5, np.zeros((2, 64, 64, 3), np.uint8))
    assert [set(row) for row in rows] == [{"global_step", "videos/episode"}]


def test_signals_are_given_back(tmp_path):
    numbers = signal.SIGINT, signal.SIGTERM
    before = [signal.getsignal(number) for number in numbers]
    try:
        with runs.Run(args_in(tmp_path), "ppo_procgen") as run:
            assert [signal.getsignal(number) for number in numbers] == [run._on_signal] * 2
        assert [signal.getsignal(number) for number in numbers] == before
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)


def watch(monkeypatch):
    done, fsync, rmtree = [], os.fsync, shutil.rmtree
    monkeypatch.setattr(os, "fsync", lambda fd: done.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd))
    monkeypatch.setattr(
        shutil, "rmtree", lambda path, *a, **how: done.append(f"gone {Path(path).name}") or rmtree(path, *a, **how)
    )
    return done


def test_a_checkpoint_is_on_the_disk_before_an_older_one_goes(tmp_path, monkeypatch):
    checkpoints.save(tmp_path, 1, {"x": np.arange(3)}, keep=1)
    done = watch(monkeypatch)
    checkpoints.save(tmp_path, 2, {"x": np.arange(3)}, keep=1)
    folder = tmp_path / "checkpoints" / "2"
    before = done[: done.index("gone 1.orbax-checkpoint-tmp")]
    assert {str(path) for path in (*folder.rglob("*"), folder, folder.parent)} <= set(before)


def test_a_disk_that_fails_costs_no_older_checkpoint(tmp_path, monkeypatch):
    checkpoints.save(tmp_path, 1, {"x": np.arange(3)}, keep=1)

    def fail(descriptor):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        checkpoints.save(tmp_path, 2, {"x": np.arange(3)}, keep=1)
    assert checkpoints.steps_in(tmp_path)[0] == 1


def test_hosts_that_read_other_checkpoints_do_not_go_on(tmp_path, monkeypatch):
    """As on a file system that shows a new file to one of them later."""
    args = ppo.Args(**TINY | {"run_dir": str(tmp_path), "num_devices": 1})
    with runs.Run(args, ppo.SCRIPT) as run:
        run.save(5, {"state": np.zeros(2)}, {})
    monkeypatch.setattr(devices, "hosts", lambda args: 2)
    monkeypatch.setattr(devices, "of_each_host", lambda args, step: {"0": step, "1": step + 1})
    load = partial(runs.load, lambda: {"state": np.zeros(2)})
    with pytest.raises(runs.UsageError, match=r"hosts read those of steps \[5, 6\]"):
        runs.Run(replace(args, resume=str(run.path)), ppo.SCRIPT, load)


def test_only_the_first_host_asks_for_wandb(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "host", lambda args: 1)
    monkeypatch.setattr(tracking, "wandb_mode", None)  # which it would call
    runs.Run(ppo.Args(**TINY | {"run_dir": str(tmp_path)}), ppo.SCRIPT)


def test_an_evaluation_before_the_checkpoint_is_not_made_again(tmp_path):
    given = {"run_dir": str(tmp_path), "total_timesteps": 300, "num_devices": 1, "eval_every": 100, "eval_episodes": 1}
    args, load = ppo.Args(**TINY | given), partial(runs.load, lambda: {"state": np.zeros(2)})
    with runs.Run(args, ppo.SCRIPT) as run:
        run.log_evaluation(100, {"eval/test_levels/mean_return": 7.5})
        run.save(150, {"state": np.zeros(2)}, {})
    with runs.Run(replace(args, resume=str(run.path)), ppo.SCRIPT, load) as again:
        assert not again.evaluation_due(199)
        assert again.evaluation_due(200)


def test_tensorboard_gets_a_picture(tmp_path):
    args, picture = ppo.Args(**TINY | {"run_dir": str(tmp_path), "track": "tensorboard"}), np.zeros((5, 7, 3), np.uint8)
    picture[..., 1] = np.arange(7)
    with runs.Run(args, ppo.SCRIPT) as run:
        run.save_picture(3, "x", picture)
    *_, event = tensorboard_events(run.path / "tensorboard")
    (value,) = event.summary.value
    assert (event.step, value.tag) == (3, "pictures/x")
    np.testing.assert_array_equal(Image.open(io.BytesIO(value.image.encoded_image_string)), picture)


def test_a_second_ctrl_c_is_no_success():
    def interrupt(args):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stopped:
        runs.cli(ppo.Args, interrupt, [])
    assert stopped.value.code == 130


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done = watch(monkeypatch)
    files.write_json(tmp_path / "a.json", {})
    assert [Path(name).name.startswith("a.json.") for name in done] == [True]


def test_metrics_are_on_the_disk_before_their_checkpoint(tmp_path, monkeypatch):
    with runs.Run(args_in(tmp_path), "ppo_procgen") as run:
        done = watch(monkeypatch)
        run.save(5, {"x": np.zeros(2)}, {})
    assert done[0] == str(run.path / "metrics.jsonl")


def test_a_film_has_its_colours_and_all_its_frames(tmp_path):
    film = np.zeros((40, 64, 64, 3), np.uint8)
    film[..., 0], film[20:, ..., 1] = 200, 100
    films.write_video(tmp_path / "a.mp4", film, fps=12.5)
    with av.open(str(tmp_path / "a.mp4")) as container:
        seen = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    assert len(seen) == 40
    np.testing.assert_allclose(seen[[0, -1]].mean(axis=(1, 2)), [[200, 0, 0], [200, 100, 0]], atol=8)


def test_wandbs_own_variable_counts_where_no_flag_does(monkeypatch):
    for logged_in in (True, False):
        monkeypatch.setattr(wandb, "login", lambda logged_in=logged_in, **options: logged_in)
        auto = "online" if logged_in else "offline"
        for said, want in {"disabled": "disabled", "offline": "offline", "": auto}.items():
            monkeypatch.setenv("WANDB_MODE", said)
            assert tracking.wandb_mode(ppo.Args()) == want
    monkeypatch.setattr(wandb, "login", mock.Mock(side_effect=OSError("no network")))
    assert tracking.wandb_mode(ppo.Args()) == "offline"
    with pytest.raises(files.UsageError, match="or no network"):
        tracking.wandb_mode(ppo.Args(wandb_mode="online"))


def test_a_run_has_as_many_devices_as_divide_its_games():
    assert [devices.count(ppo.Args(num_envs=n)) for n in (64, 6, 5)] == [4, 3, 1]


@pytest.mark.parametrize(("cores", "want"), [(1, 1), (3, 2), (4, 4), (64, 8)])
def test_devices_are_no_more_than_cores(cores, want, monkeypatch):
    asked = []
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setattr(
        devices, "jax", SimpleNamespace(config=SimpleNamespace(update=lambda *given: asked.append(given)))
    )
    devices.use_every_core()
    assert asked == [("jax_num_cpu_devices", want)]
    assert "_terminate_timeout_seconds=3600" in os.environ["XLA_FLAGS"]


def test_each_actor_has_games_of_its_own(monkeypatch):
    monkeypatch.setattr(
        actors, "Games", lambda make, numbers, seed, restart: SimpleNamespace(numbers=numbers, mark=lambda: None)
    )
    fleet = actors.make_fleet(impala.Args(num_envs=4, num_actors=2), None, lambda numbers: numbers.tolist())
    assert fleet._carries == [own.numbers.tolist() for own in fleet._games] == [[0, 1], [2, 3]]
    for how in ({"deterministic": False, "max_lag": 3}, {"deterministic": True, "max_lag": 0}):
        fleet = actors.make_fleet(impala.Args(num_envs=4, **how), None, lambda numbers: None)
        assert {"deterministic": fleet._lockstep, "max_lag": fleet._max_lag} == how


def test_a_checkpoint_of_more_than_is_needed_is_refused():
    x = np.zeros(1)
    with pytest.raises(checkpoints.MisfitError, match="something in it that they do not need"):
        checkpoints.restore_tree({"a": {}, "b": x}, {"a": {"c": x}, "b": x}, "there")


@pytest.mark.parametrize(
    ("groups", "limits", "least"),
    [
        ("0::/", {"memory.max": "1000000"}, 10**6),  # a container
        ("0::/slurm/job_7/step_0", {"slurm/job_7/memory.max": "500000", "slurm/memory.max": "max"}, 500_000),
        ("5:cpu:/a\n4:memory:/slurm/job_7", {"memory/slurm/job_7/memory.limit_in_bytes": "300000"}, 300_000),
        ("0::/user.slice", {}, np.inf),
    ],
)
def test_a_containers_memory_counts(groups, limits, least, tmp_path, monkeypatch):
    files_of_system = {"proc/self/cgroup": groups} | {f"sys/fs/cgroup/{name}": x for name, x in limits.items()}
    for name, text in files_of_system.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert devices.group_limit(tmp_path) == least
    monkeypatch.setattr(devices, "group_limit", lambda: 10**6)
    assert devices.memory(ppo.Args())[0] == 10**6
    gpus = [SimpleNamespace(memory_stats=lambda n=n: {"bytes_limit": n}) for n in (3, 4)]
    monkeypatch.setattr(devices, "of_learner", lambda args: gpus)
    monkeypatch.setattr(devices, "count", lambda args: 2)
    assert devices.memory(ppo.Args())[1] == 7


def test_random_numbers_are_those_of_runs_before():
    """JAX may choose others with its next release."""
    assert jax.random.bits(jax.random.PRNGKey(1), (4,)).tolist() == [1883912375, 2292451390, 1915204986, 1882898417]


def test_half_a_checkpoint_goes_when_the_run_goes_on(tmp_path):
    run = runs.Run(args_in(tmp_path), "ppo_procgen")
    run._lock.close()
    left = run.path / "checkpoints" / "7.orbax-checkpoint-tmp"
    left.mkdir()
    runs.Run(ppo.Args(**TINY | {"resume": str(run.path)}), "ppo_procgen")
    assert not left.exists()
