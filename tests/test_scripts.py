"""What every script does alike: bad input, flags, help, same seed, resume, signals, evaluation."""

import functools
import importlib
import json
import os
import re
import signal
import sys
import threading
import time
from dataclasses import fields
from pathlib import Path

import jax
import numpy as np
import pytest
import tyro
from conftest import (
    ROOT,
    TINY,
    assert_one_sentence,
    assert_same_run,
    cut_back,
    flags_of,
    parameters,
    read_metrics,
    start,
    wait_for,
)
from rollouts import init_env_state

import evaluate
from common import atari, checkpoints, envs, multihost, offpolicy, runs

pytestmark = pytest.mark.optimised

# Small enough to compile in seconds; the games are real. Everything that has a state of its own is on, and the games
# restart after every second update.
PROCGEN = {
    "env_id": "bigfish", "num_envs": 4, "num_steps": 16, "hidden": 16, "pool": "flatten", "sticky_actions": 0.25,
    "learning_rate": "0.003", "restart_every": 30, "total_timesteps": 300, "eval_episodes": 0, "num_devices": 2,
    "wandb_mode": "disabled",
}  # fmt: skip
ON_POLICY = PROCGEN | {"encoder": "nature", "width": 1, "num_minibatches": 2, "normalize_rewards": True}
DRAC = {"augment": "translate", "augment_mode": "drac", "dropout": 0.1}
OFF_POLICY = PROCGEN | {
    "channels": "8", "blocks": 0, "downsample": "stride", "buffer_size": 320, "learning_starts": 150, "batch_size": 16,
    "replay_ratio": 0.5, "n_step": 3, "per_alpha": 0.5, "max_lag": 2, "deterministic": True, "dropout": 0.1,
    "augment": "translate", "total_timesteps": 400,
}  # fmt: skip
FLAGS = {
    "ppo_procgen": ON_POLICY | DRAC | {
        "update_epochs": 2, "kl_target": 1e-4, "core": "gru", "rnd_coef": 0.5, "rnd_normalize": True,
    },
    "trpo_procgen": ON_POLICY | {"value_epochs": 2, "fisher_fraction": 0.5},
    "ppg_procgen": ON_POLICY | {
        "policy_iterations": 2, "aux_epochs": 2, "aux_minibatches": 2, "augment": "translate", "dropout": 0.1,
    },
    "impala_procgen": ON_POLICY | DRAC | {
        "update_epochs": 2, "core": "lstm", "replay_fraction": 0.5, "replay_size": 16, "max_lag": 2,
        "deterministic": True,
    },
    "apex_procgen": OFF_POLICY | {"num_atoms": 11, "target_network_frequency": 4, "num_policies": 3},
    "sac_procgen": OFF_POLICY | {
        "tau": 0.1, "target_network_frequency": 2, "average_q": True, "q_clip": 0.5, "entropy_penalty": 0.5,
    },
    "rnd_montezuma": {
        "num_envs": 4, "num_steps": 16, "num_minibatches": 2, "update_epochs": 2, "channels": "4,4,4", "hidden": 8,
        "obs_norm_init_steps": 5, "learning_rate": "0.003", "total_timesteps": 300, "max_episode_steps": 30,
        "restart_every": 20, "async_": True, "vtrace": True, "core": "gru", "wandb_mode": "disabled", "num_devices": 2,
    },
    # A task has three updates of 256 decisions, and is evaluated after the second and at its end.
    "hnppo_doorgym": {
        "tasks": "0,2", "num_envs": 2, "num_worlds": 2, "num_minibatches": 2, "update_epochs": 2, "hidden": 8,
        "num_layers": 1, "hyper_width": 16, "task_timesteps": 3 * 256, "eval_every": 400, "eval_episodes": 2,
        "hyper_learning_rate": 1e-3, "wandb_mode": "disabled",
    },
}  # fmt: skip
of_each_script = pytest.mark.parametrize("name", FLAGS)


def train(name, folder, args_class=None, **flags):
    script = importlib.import_module(name)
    return script.main((args_class or script.Args)(**FLAGS[name] | {"run_dir": str(folder)} | flags)).path


@pytest.fixture(scope="module", autouse=True)
def short_warmup():
    """Ape-X's runs here have too few updates for its bonus to begin."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("apex_procgen.PREDICTOR_WARMUP", 1)
        yield


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """uninterrupted(name) is the script's run with a checkpoint after each update, which is known to be finite."""
    check_finite, save = runs.Run.check_finite, runs.Run.save

    @functools.cache
    def run(name):
        checked = set()

        def note_and_check(self, step, metrics):
            checked.add(step)
            # Off-policy scripts have no losses before they learn.
            assert name in ("apex_procgen", "sac_procgen") or any(key.startswith("losses/") for key in metrics)
            check_finite(self, step, metrics)

        def save_what_is_checked(self, step, *trees):
            assert step in checked
            return save(self, step, *trees)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runs.Run, "check_finite", note_and_check)
            patch.setattr(runs.Run, "save", save_what_is_checked)
            return train(name, tmp_path_factory.mktemp(name), checkpoint_every=1, keep_checkpoints=99)

    return run


def record_reads(args_class):
    """A subclass of a script's Args, and the set of fields that are read: not by checks of the flags, and not by what
    saves or copies all of them."""
    names, reads = {field.name for field in fields(args_class)}, set()

    def read(self, name):
        if name in names and name not in reads:
            frame, reader = sys._getframe(1), []
            while frame:
                reader.append((Path(frame.f_code.co_filename).name, frame.f_code.co_name))
                frame = frame.f_back
            checks = any(file == "flags.py" or function == "check" for file, function in reader)
            if not checks and reader[0][0] not in ("dataclasses.py", "<string>"):  # the latter: its repr
                reads.add(name)
        return object.__getattribute__(self, name)

    return type(args_class.__name__, (args_class,), {"__getattribute__": read}), reads


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    """observed(name) is another run of the script with the same flags, but evaluated, filmed and with few checkpoints,
    its games slowed down at random; and the fields of Args that it read."""
    rng, step = np.random.default_rng(), envs.ReplayableVecEnv.step

    def step_slowly(self, actions):
        time.sleep(rng.random() * 0.005)
        return step(self, actions)

    @functools.cache
    def run(name):
        script = importlib.import_module(name)
        args_class, reads = record_reads(script.Args)
        more = {"track": "tensorboard"}
        if isinstance(script.Args(), envs.GameArgs):
            more |= {"eval_every": 120, "eval_episodes": 1, "capture_video": True}
        more |= {"rnd_montezuma": {"room_map": True}, "hnppo_doorgym": {"num_threads": 3}}.get(name, {})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(envs.ReplayableVecEnv, "step", step_slowly)
            return train(name, tmp_path_factory.mktemp(name), args_class, **more), reads

    return run


# WHOLE RUNS


@of_each_script
def test_same_seed_gives_the_same_metrics(name, uninterrupted, observed):
    """However fast the games are, wherever checkpoints fall, and whether it is evaluated or not."""
    path, _ = observed(name)
    lines = read_metrics(path)
    trained = [line for line in lines if "eval/test_levels/mean_return" not in line]
    assert trained == read_metrics(uninterrupted(name))
    assert (len(trained) < len(lines)) == name.endswith("_procgen")
    assert_same_run(path, uninterrupted(name), lines=trained)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


class Reached(Exception):
    """The games would be made, with these seeds."""


@pytest.mark.parametrize("name", [name for name in FLAGS if name != "hnppo_doorgym"])
def test_another_seed_gives_other_parameters_games_and_actions(name, tmp_path, monkeypatch):
    """HN-PPO's doors are in tests/test_hnppo_run.py."""
    script, enter, seen = importlib.import_module(name), runs.Run.__enter__, []

    def note_and_enter(run):
        enter(run)
        seen.append(run.checkpoint["state"].params)
        return run

    def make_games(args, num_envs, seeds):
        raise Reached(seeds)

    monkeypatch.setattr(runs.Run, "__enter__", note_and_enter)
    monkeypatch.setattr(envs, "make_procgen", make_games)
    monkeypatch.setattr(atari, "make_montezuma", make_games)
    games, keys = [], []
    for seed in (1, 2):
        with pytest.raises(Reached) as reached:
            train(name, tmp_path, seed=seed)
        games += reached.value.args[0]
        args = script.Args(**FLAGS[name] | {"seed": seed})
        begin = getattr(script, "begin_rollout", offpolicy.begin_rollout)
        keys.append(begin(args, init_env_state(script, args), 0).key)
    assert len(set(games)) == len(games)
    assert (keys[0] != keys[1]).any()
    pairs = zip(*map(jax.tree.leaves, seen), strict=True)
    assert all((a != b).any() for a, b in pairs if a.ndim > 1)  # all but biases, which begin at 0


@pytest.mark.parametrize(
    ("name", "updates"),
    [
        # After the update after which the games restart, before it, and at it: there SIGTERM stops them too, below.
        ("ppo_procgen", 3), slow("ppo_procgen", 1), slow("ppo_procgen", 2), slow("trpo_procgen", 3),
        ("ppg_procgen", 1),  # after its auxiliary phase
        slow("impala_procgen", 3), slow("impala_procgen", 2), ("rnd_montezuma", 1), slow("rnd_montezuma", 2),
        # Before learning starts, and after.
        ("apex_procgen", 2), slow("apex_procgen", 5), slow("sac_procgen", 2), slow("sac_procgen", 5),
        # At the first task's end, where it is evaluated, and in the second task.
        slow("hnppo_doorgym", 2), ("hnppo_doorgym", 3), slow("hnppo_doorgym", 5),
    ],
)  # fmt: skip
def test_resume_equals_uninterrupted_bit_for_bit(name, updates, uninterrupted, tmp_path):
    half = cut_back(uninterrupted(name), updates, tmp_path)
    assert len(checkpoints.steps_in(half)) == updates < len(checkpoints.steps_in(uninterrupted(name)))
    assert train(name, tmp_path, resume=str(half)) == half
    assert_same_run(uninterrupted(name), half)


@of_each_script
def test_sigterm_writes_a_checkpoint_and_the_run_continues(name, uninterrupted, tmp_path, monkeypatch, capfd):
    """It comes during the fourth update (PPG: the third, within a policy phase); the command that the run prints leads
    to the uninterrupted run's end."""
    check, updates = runs.Run.check_finite, []

    def stop_and_check(run, *given):
        updates.append(run)
        if len(updates) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        check(run, *given)

    with monkeypatch.context() as patch:
        patch.setattr(runs.Run, "check_finite", stop_and_check)
        path = train(name, tmp_path)
    assert (updates[0].stop, len(updates)) == ("SIGTERM", 4)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("actor")]
    (words,) = re.findall(rf"python {name}.py (--resume {path})", capfd.readouterr().err)
    step = checkpoints.load(path)[0]
    assert step == read_metrics(path)[-1]["global_step"] < read_metrics(uninterrupted(name))[-1]["global_step"]
    script = importlib.import_module(name)
    runs.cli(script.Args, script.main, words.split())
    assert_same_run(uninterrupted(name), path)


def test_kill_9_leaves_the_last_checkpoint_usable(tmp_path):
    flags = TINY | {"checkpoint_every": 100, "restart_every": 60, "total_timesteps": 1250, "run_dir": str(tmp_path)}
    process = start("ppo_procgen.py", *flags_of(flags))
    wait_for(lambda: len(list(tmp_path.glob("*/checkpoints/[0-9]*/commit_success.txt"))) >= 2, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    (run_dir,) = tmp_path.iterdir()
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"global_step": 99999, "ti')  # a line that was being written
    (run_dir / "checkpoints" / "1249.orbax-checkpoint-tmp").mkdir()  # and a checkpoint
    assert parameters(run_dir)
    ppo = importlib.import_module("ppo_procgen")
    ppo.main(ppo.Args(**flags | {"resume": str(run_dir)}))
    assert_same_run(ppo.main(ppo.Args(**flags | {"run_dir": str(tmp_path / "whole")})).path, run_dir)


@of_each_script
def test_evaluation_plays_what_a_script_trained(name, observed):
    path, _ = observed(name)
    runs.cli(evaluate.Args, evaluate.main, [str(path), "--episodes", "2", "--seed", "3"])
    result = json.loads((path / "eval.json").read_text())
    assert result.pop("global_step") == checkpoints.load(path)[0]
    (entry,) = [entry for entry in result.values() if entry["seed"] == 3]
    assert entry["episodes"] >= 2
    if name == "hnppo_doorgym":  # generates the networks of its best evaluation: tests/test_hnppo_math.py
        return
    script, args = evaluate.script_of(str(path))
    saved = checkpoints.load(path)[1]["state"]["params"]
    for part in ("agent", "policy"):  # of PPO, SAC and RND; of TRPO
        saved = saved.get(part, saved)
    loaded = script.load_params(args, script.make_agent(args), str(path))["params"]
    jax.tree.map(np.testing.assert_array_equal, loaded, saved)


# FLAGS

# Flags that the runs above do not read: those of runs.cli (tests/test_devices.py) and of W&B (tests/test_run.py), and
# what other networks have, or values without atoms (tests/test_apex_math.py).
UNREAD = {"distributed", "wandb_project", "wandb_entity"}
UNREAD_BY = {name: {"blocks"} for name in ("ppo_procgen", "trpo_procgen", "ppg_procgen", "impala_procgen")}
UNREAD_BY |= {"apex_procgen": {"width", "munchausen_tau"}, "sac_procgen": {"width"}}


@of_each_script
def test_every_flag_is_read(name, observed):
    """By the code that it is for."""
    _, reads = observed(name)
    unread = {field.name for field in fields(importlib.import_module(name).Args)} - reads
    assert unread == UNREAD | UNREAD_BY.get(name, set())


@of_each_script
def test_help_shows_the_scripts_own_flags_first(name, capsys):
    script = importlib.import_module(name)
    own = [runs.flag_of(field) for field in script.Args.__annotations__ if field != "FIXED"]
    with pytest.raises(SystemExit) as stopped:
        runs.cli(script.Args, script.main, ["--help"])
    output = capsys.readouterr().out
    flags = re.findall(r"^(?:[│|] |  )(--[a-z0-9-]+)", output, re.MULTILINE)
    assert stopped.value.code == 0
    assert flags[: len(own)] == own
    assert len(set(flags)) == len(fields(script.Args))
    assert script.__doc__.splitlines()[0] in output


def test_the_makefiles_training_command_is_valid():
    ppo = importlib.import_module("ppo_procgen")
    words = re.search(r"TRAIN \?= ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text())[1].replace("\\\n", "").split()
    runs.check_args(tyro.cli(ppo.Args, args=words), ppo.SCRIPT)


def test_wandbs_booleans_and_integers_with_an_exponent_are_understood():
    ppo = importlib.import_module("ppo_procgen")
    words = ["--gap_stack=False", "--total-timesteps", "1e6", "--num_levels=2.5e2", "--learning-rate", "1e-3"]
    args = tyro.cli(ppo.Args, args=runs.plain_values(ppo.Args, words))
    assert (args.gap_stack, args.total_timesteps, args.num_levels, args.learning_rate) == (False, 10**6, 250, "1e-3")


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("ppo_procgen", ["--num-envs", "many"], ["--num-envs", "INT"]),
        ("ppo_procgen", ["--pool", "min"], ["--pool", "act_avg"]),
        ("ppo_procgen", ["--env-id", "bigfsh"], ["--env-id", "starpilot"]),
        ("ppo_procgen", ["--no-such-flag"], ["--no-such-flag"]),
        ("impala_procgen", ["--core", "rnn"], ["--core", "lstm"]),
        ("hnppo_doorgym", ["--method", "sac"], ["--method", "finetune"]),
    ],
)
def test_words_that_do_not_parse_exit_with_2_and_the_choices(name, words, said, capfd):
    script = importlib.import_module(name)
    with pytest.raises(SystemExit) as stopped:
        runs.cli(script.Args, script.main, words)
    output = capfd.readouterr().err
    assert stopped.value.code == 2
    assert all(part in output for part in said), output


# Script, words (RUN: the uninterrupted run's directory), what the answer names, and what it says is valid.
BAD = [
    # One of each range.
    ("ppo", "--num-steps 0", "--num-steps 0", "1 or more"),
    ("ppo", "--num-levels -1", "--num-levels -1", "0 or more"),
    ("ppo", "--clip-coef nan", "--clip-coef nan", "above 0"),
    ("ppo", "--vf-clip -1", "--vf-clip -1", "0 or more"),
    ("ppo", "--vf-coef 1e39", "--vf-coef 1e+39", "float32"),
    ("ppo", "--gae-lambda 1.5", "--gae-lambda 1.5", "from 0 to 1"),
    ("ppo", "--dropout 1", "--dropout 1", "from 0 to 0.99"),
    ("ppo", "--update-epochs 1001", "--update-epochs 1001", "from 1 to 1000"),
    ("ppo", "--hidden 65537", "--hidden 65537", "from 1 to 65536"),
    ("ppo", f"--seed {2**31}", "--seed", "2147483647"),
    ("ppo", f"--total-timesteps {2**31}", "--total-timesteps", "from 1 to 2130706432"),
    ("ppo", "--learning-rate -1", "--learning-rate '-1'", "0 or more"),
    ("ppo", "--gamma 0:0.5,9:1.5", "--gamma '0:0.5,9:1.5'", "from 0 to 1"),
    ("trpo", "--fisher-fraction 2", "--fisher-fraction 2", "at most 1"),
    ("impala", "--rho-bar nan", "--rho-bar nan", "above 0"),
    ("impala", "--max-lag -1", "--max-lag -1", "from 0 to 64"),
    ("apex", "--num-atoms 0", "--num-atoms 0", "from 1 to 1024"),
    ("apex", "--per-beta 0:0.4,5:2", "--per-beta '0:0.4,5:2'", "from 0 to 1"),
    ("sac", "--tau 0", "--tau 0", "from 1e-06 to 1"),
    ("rnd", "--update-proportion 2", "--update-proportion 2", "from 0 to 1"),
    ("hnppo", "--task-embedding-dim 0", "--task-embedding-dim 0", "from 1"),
    # Schedules.
    ("ppo", "--learning-rate 0:1e-4,oops", "--learning-rate '0:1e-4,oops'", "step:value"),
    ("ppo", "--gamma 5:0.9,2:0.8", "--gamma '5:0.9,2:0.8'", "rising"),
    ("ppo", "--ent-coef=", "--ent-coef ''", "number"),
    ("ppo", "--learning-rate nan", "--learning-rate 'nan'", "number"),
    ("ppo", "--learning-rate 1e39", "--learning-rate '1e39'", "number"),
    # A batch and its minibatches.
    ("ppo", "--num-minibatches 7", "--num-minibatches 7", "8192"),
    ("ppo", "--core lstm --num-minibatches 128", "--num-minibatches 128", "64 (a recurrent core"),
    ("ppo", "--num-envs 65536 --num-steps 1024", "--num-envs 65536", "at most 16777216"),
    ("trpo", "--num-minibatches 7", "--num-minibatches 7", "8192"),
    ("ppg", "--resume RUN --aux-epochs 3", "--aux-epochs 3", "keeps its own, --aux-epochs 2"),
    ("ppg", "--aux-minibatches 7", "--aux-minibatches 7", "environments, 64"),
    ("ppg", "--policy-iterations 1000 --num-envs 4096", "--policy-iterations 1000", "this host has"),
    ("impala", "--num-minibatches 3", "--num-minibatches 3", "16"),
    ("impala", "--replay-fraction 0.2 --num-minibatches 3", "--num-minibatches 3", "20"),
    ("impala", "--update-pieces 2", "--update-pieces 2", "--update-epochs, 3, or be 3 x a divisor"),
    ("impala", "--update-pieces 12", "--update-pieces 12", "a divisor of --num-minibatches, 2"),
    ("impala", "--num-envs 65536 --num-steps 1024", "--num-envs 65536", "at most"),
    ("impala", "--num-envs 512 --num-steps 65536 --replay-fraction 0.5", "--num-envs 512", "at most"),
    ("rnd", "--num-minibatches 7", "--num-minibatches 7", "16384"),
    ("rnd", "--core gru --num-minibatches 256", "--num-minibatches 256", "128 (a recurrent core"),
    ("hnppo", "--num-minibatches 7", "--num-minibatches 7", "8192"),
    # Flags without effect.
    ("ppo", "--kl-coef 0 --kl-target 0.1", "--kl-target 0.1", "without --kl-coef"),
    ("ppo", "--augment-mode drac", "--augment-mode drac", "without --augment"),
    ("ppo", "--augment-prob 1", "--augment-prob 1", "without --augment"),
    ("ppo", "--augment flip --drac-coef 1", "--drac-coef 1", "--augment-mode drac"),
    ("ppo", "--rnd-normalize", "--rnd-normalize", "--rnd-coef"),
    ("ppo", "--normalize-gamma 0.9", "--normalize-gamma 0.9", "--normalize-rewards"),
    ("ppo", "--track tensorboard --wandb-project x", "--wandb-project x", "--track tensorboard"),
    ("ppo", "--eval-episodes 0 --capture-video", "--capture-video", "--eval-episodes 1"),
    ("ppo", "--eval-episodes 0 --eval-every 500", "--eval-every 500", "--eval-episodes 1 or more"),
    ("ppo", "--start-level 5", "--start-level 5", "--num-levels 1"),
    ("trpo", "--penalty 0.5 --damping 1", "--damping 1", "--penalty 0"),
    ("impala", "--replay-size 64", "--replay-size 64", "without --replay-fraction"),
    ("apex", "--epsilon 0 --epsilon-alpha 3", "--epsilon-alpha 3", "between 0 and 1"),
    ("apex", "--num-atoms 1 --v-max 9", "--v-max 9", "--num-atoms 2 or more"),
    ("apex", "--num-quantiles 8 --num-atoms 51", "--num-atoms 51", "--num-quantiles 0"),
    ("apex", "--munchausen-tau 0.1", "--munchausen-tau 0.1", "--munchausen-alpha"),
    ("apex", "--rnd-coef 1", "--rnd-coef 1.0", "--num-policies 2 or more"),
    ("apex", "--num-atoms 1 --munchausen-alpha 0.9 --no-double-q", "--no-double-q", "--munchausen-alpha 0"),
    ("sac", "--no-autotune --target-entropy-scale 0.5", "--target-entropy-scale 0.5", "--autotune"),
    ("sac", "--per-beta 1", "--per-beta 1", "--per-alpha"),
    ("sac", "--tau 1 --q-clip 0.5", "--q-clip 0.5", "--target-network-frequency 2"),
    ("rnd", "--vtrace", "--vtrace", "--async"),
    ("rnd", "--actor-devices 1", "--actor-devices 1", "--async"),
    ("rnd", "--core gru --separate-value", "--separate-value", "leave --core at none"),
    ("hnppo", "--method ppo --beta 1e-3", "--beta 0.001", "--method hnppo"),
    ("hnppo", "--method finetune --critic fresh", "--critic fresh", "--method hnppo"),
    ("hnppo", "--task 2 --beta 0.3", "--beta 0.3", "a second task in --tasks"),
    ("hnppo", "--method ppo --keep-std", "--keep-std", "--method hnppo or finetune"),
    ("hnppo", "--keep-std --learning-rate 0.5", "--learning-rate 0.5", "--critic fresh"),
    ("hnppo", "--eval-every 0 --stop-at-success 0.9", "--stop-at-success 0.9", "--eval-every"),
    # Networks, augmentation, levels, doors.
    ("ppo", "--encoder xresnet:[32,3]", "--encoder xresnet:[32,3]", "stride 1 or 2"),
    ("ppo", "--encoder nature --channels 8", "--channels 8", "3 numbers"),
    ("apex", "--encoder nature --width 1 --pool max6", "--pool max6", "4 x 4"),
    ("apex", "--encoder nature --width 1 --spectral-norm", "--spectral-norm", "impala"),
    ("rnd", "--channels 32,64", "--channels 32,64", "3 numbers"),
    ("rnd", "--channels=", "--channels ''", "3 numbers"),
    ("ppo", "--augment rotat", "--augment rotat", "did you mean rotate?"),
    ("ppo", "--augment flip,flip", "--augment flip,flip", "each of them once"),
    ("ppo", f"--start-level {2**31 - 1} --num-levels 5", "--start-level", "level"),
    ("hnppo", "--tasks 0,6", "--tasks '0,6'", "from 0 to 5"),
    ("hnppo", "--task Lever", "--tasks 'Lever'", "Lever-Right-Pull"),
    ("hnppo", "--tasks=", "--tasks ''", "from 0 to 5"),
    ("hnppo", "--tasks 0,1,2,3,4,5,Round-Left-Pull", "Round-Left-Pull'", "at most 6"),
    ("hnppo", "--task Round-Left-Pull", "--tasks 'Round-Left-Pull'", "--robot gripper"),
    ("hnppo", "--tasks 0,Pull-Right-Pull", "--tasks '0,Pull-Right-Pull'", "twice"),
    # Replay, values, temperatures, statistics.
    ("impala", "--replay-fraction 0.02", "--replay-fraction 0.02", "0.059 for one unroll"),
    ("impala", "--replay-fraction 0.5 --replay-size 8", "--replay-size 8", "from 16"),
    ("apex", "--buffer-size 100", "--buffer-size 100", "give 1008 or more"),
    ("apex", f"--buffer-size {2**27}", "--buffer-size 134217728: needs",
     "(1652.89 GB with --no-save-replay), this host has"),
    ("apex", "--learning-starts 1000000", "--learning-starts 1000000", "200000 (--buffer-size)"),
    ("apex", "--learning-starts 10", "--learning-starts 10", "from 1008"),
    ("apex", "--num-policies 25", "--num-policies 25", "--num-envs, 24"),
    ("apex", "--num-policies 4 --rnd-coef 0", "--rnd-coef 0", "above 0"),
    ("apex", "--num-policies 4 --gamma 0.9", "--min-gamma 0.97", "at most --gamma, 0.9"),
    ("apex", "--num-policies 4 --gamma 1", "--gamma 1.0", "below 1"),
    ("apex", "--v-min 30", "--v-min 30", "0 or less"),
    ("apex", "--v-max -1", "--v-max -1", "0 or more"),
    ("apex", "--munchausen-alpha 0.9", "--munchausen-alpha 0.9", "--num-atoms 1"),
    ("sac", "--learning-starts 5", "--learning-starts 5", "an n-step return"),
    ("sac", "--min-alpha 0.02", "--min-alpha 0.02", "at most --alpha, 0.01"),
    ("rnd", "--update-proportion 0 --num-devices 1", "--update-proportion 0.0", "4096 samples of a minibatch"),
    ("rnd", "--update-proportion 0.0004 --num-devices 4", "--update-proportion 0.0004", "give 0.00098 or more"),
    ("rnd", "--ext-coef 0 --int-coef 0:0,9:0", "--ext-coef 0.0", "--int-coef"),
    # Actors and devices, of which there are four.
    ("apex", "--num-actors 5", "--num-actors 5", "24"),
    ("impala", "--num-actors 3", "--num-actors 3", "16"),
    ("impala", "--actor-devices 3", "--actor-devices 3", "at most --num-actors, 2"),
    ("impala", "--num-actors 8 --actor-devices 4", "--actor-devices 4", "leaves none"),
    ("impala", "--num-actors 8 --actor-devices 5", "--actor-devices 5", "leaves none"),
    ("impala", "--num-devices 4 --num-envs 16 --num-minibatches 8", "a minibatch's unrolls, 2", "1 or 2"),
    ("rnd", "--async --actor-devices 2", "--actor-devices 2", "at most --num-actors, 1"),
    ("ppo", "--num-devices 3 --num-envs 8", "--num-devices 3: does not divide the environments", "give 1 or 2 or 4"),
    ("ppo", "--num-devices 4 --num-envs 8 --core gru", "a minibatch's environments, 1", "give 1"),
    ("ppo", "--num-devices 5", "--num-devices 5", "there are 4"),
    ("apex", "--num-devices 3", "--num-devices 3", "does not divide --batch-size, 128; give 1 or 2 or 4"),
    ("apex", "--num-devices 3 --actor-devices 1 --batch-size 32", "--batch-size, 32", "1 or 2"),
    ("apex", "--num-devices 4 --actor-devices 1", "--num-devices 4", "there are 3"),
    ("rnd", "--num-devices 3", "--num-devices 3", "the environments, --num-envs, 128; give 1 or 2 or 4"),
    ("hnppo", "--num-devices 3", "--num-devices 3", "64; give 1 or 2 or 4"),
    # Folders.
    ("ppo", "--resume /nowhere", "--resume /nowhere", "run directory"),
    ("ppo", "--resume=", "--resume ''", "leave the flag out"),
    ("ppo", "--resume a --resume=b", "--resume", "one run directory"),
    ("ppo", "--run-dir=", "--run-dir ''", "give a folder"),
    ("ppo", "--run-dir /proc/runs", "--run-dir /proc/runs", "cannot write"),
    # A resume.
    ("ppo", "--resume RUN --run-dir b", "--run-dir b", "stays in its folder"),
    ("ppo", "--resume RUN --seed 9", "--seed 9", "keeps its own, --seed 1"),
    ("ppo", "--resume RUN --env-id coinrun", "--env-id coinrun", "bigfish"),
    ("ppo", "--resume RUN --activation gelu", "--activation gelu", "keeps its own, --activation relu"),
    ("ppo", "--resume RUN --init orthogonal", "--init orthogonal", "keeps its own, --init glorot"),
    ("ppo", "--resume RUN --hidden 32", "does not fit", "--hidden 32 here, 16 there"),
    ("trpo", "--resume RUN --penalty 0.5", "--penalty 0.5", "keeps its own, --penalty 0.0"),
    ("impala", "--resume RUN --num-actors 1", "--num-actors 1", "keeps its own, --num-actors 2"),
    ("impala", "--resume RUN --num-envs 8", "--num-envs 8", "keeps its own, --num-envs 4"),
    ("impala", "--resume RUN --frame-stack 8", "--frame-stack 8", "keeps its own, --frame-stack 4"),
    ("impala", "--resume RUN --core gru", "does not fit", "--core gru here, lstm there"),
    ("impala", "--resume RUN --replay-fraction 0 --replay-size 128", "does not fit", "--replay-fraction 0.0 here"),
    ("apex", "--resume RUN --n-step 2", "--n-step 2", "keeps its own, --n-step 3"),
    ("apex", "--resume RUN --v-max 5", "--v-max 5", "keeps its own, --v-max 20"),
    ("apex", "--resume RUN --buffer-size 1024", "does not fit", "here"),
    ("sac", "--resume RUN --alpha 0.1", "--alpha 0.1", "keeps its own, --alpha 0.01"),
    ("rnd", "--resume RUN --sticky-actions 0", "--sticky-actions 0.0", "keeps its own, --sticky-actions 0.25"),
    ("rnd", "--resume RUN --obs-norm-init-steps 6", "--obs-norm-init-steps 6", "keeps its own"),
    ("rnd", "--resume RUN --core lstm", "does not fit", "--core lstm here, gru there"),
    ("rnd", "--resume RUN --core none --separate-value", "does not fit", "--separate-value here, False there"),
    ("hnppo", "--resume RUN --robot gripper", "--robot gripper", "keeps its own, --robot hook"),
    ("hnppo", "--resume RUN --num-envs 4", "--num-envs 4", "keeps its own, --num-envs 2"),
    ("hnppo", "--resume RUN --tasks 0,3", "--tasks '0,3'", "Lever-Right-Pull"),
    ("hnppo", "--resume RUN --eval-episodes 50", "--eval-episodes 50", "keeps its own"),
    ("hnppo", "--resume RUN --num-worlds 8", "--num-worlds 8", "keeps its own"),
    ("hnppo", "--resume RUN --hardness easy", "--hardness easy", "keeps its own"),
    ("hnppo", "--resume RUN --hidden 16", "does not fit", "--hidden 16 here, 8 there"),
    # Several hosts, which are not looked for before all else is right.
    ("ppo", "--distributed --num-minibatches 0", "--num-minibatches 0", "1 or more"),
    ("apex", "--distributed", "--distributed", "trains on one host"),
    ("sac", "--distributed", "--distributed", "trains on one host"),
    ("rnd", "--distributed", "--distributed", "rnd_montezuma.py trains on one host"),
    ("hnppo", "--distributed", "--distributed", "hnppo_doorgym.py trains on one host"),
]  # fmt: skip
SCRIPTS = {name.split("_")[0]: name for name in FLAGS}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("script", "words", "name", "valid"), BAD)
def test_bad_input_is_answered_in_one_sentence(script, words, name, valid, uninterrupted, monkeypatch, capfd):
    monkeypatch.setattr(multihost, "initialize", None)
    words = [str(uninterrupted(SCRIPTS[script])) if word == "RUN" else word for word in words.split()]
    capfd.readouterr()
    assert_one_sentence(importlib.import_module(SCRIPTS[script]), words, name, valid, monkeypatch, capfd)
