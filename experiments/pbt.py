"""Population-based training (Jaderberg et al. 2017, arXiv 1711.09846) of a script, by Ray Tune and the script's own
checkpoints. Try:

    python -m experiments.pbt ppo_procgen.py --mutate gamma=0.9:0.999 learning_rate=1e-4:1e-3:log --jobs 2
    python -m experiments.pbt impala_procgen.py --mutate gamma=0.9:0.999 --set env_id=coinrun --address auto --out /nfs

After each generation the worst members resume from copies of the best members' run directories, with perturbed
hyperparameters. Stopped and started again, a study continues. On a cluster, all machines see the repository and --out
under the same paths. Needs `pip install '.[ray]'`.
"""

import contextlib
import dataclasses
import importlib
import json
import logging
import math
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, NotRequired, get_args, get_type_hints

import tyro
from annotated_types import Ge, Interval
from matplotlib.figure import Figure
from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from common import files, runs
from common.files import check
from common.flags import Iterations, NonNegativeFloat, StepCount, UnitInterval
from experiments import plot, records, trials

os.environ["RAY_USAGE_STATS_ENABLED"] = os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"  # results.csv is all that is wanted
try:
    import ray
    from ray import tune
    from ray.tune.experiment import Trial
    from ray.tune.schedulers import PopulationBasedTraining
except ImportError:
    print("error: experiments/pbt.py needs Ray Tune: pip install '.[ray]'", file=sys.stderr)
    sys.exit(2)

# Flags that set the shapes in a checkpoint: with other values a clone could not load its donor's.
SHAPES = ("hidden", "buffer_size", "num_envs", "frame_stack", "predictor_depth", "replay_size")
NONZERO = ("rnd_coef", "replay_fraction")  # at 0 a checkpoint lacks RND's networks, the replayed unrolls
OWN = ("total_timesteps", "seed", "checkpoint_every", "keep_checkpoints")  # flags that pbt sets


@dataclass(frozen=True)
class Args:
    program: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SCRIPT")]
    """a script, such as ppo_procgen.py"""
    mutate: tuple[str, ...] = ("gamma=0.9:0.999", "learning_rate=1e-4:1e-3:log")
    """flags to mutate, with their ranges: name=low:high, or name=low:high:log to draw log-uniformly"""
    set: tuple[str, ...] = ()
    """flags of every member as name=value, such as env_id=bigfish num_envs=64"""
    population: Annotated[int, Interval(ge=2, le=1000)] = 8
    """number of members, each with a seed of its own"""
    generations: Annotated[int, Interval(ge=1, le=100_000)] = 20
    """number of generations; between two of them the worst members are replaced"""
    interval: Annotated[int, Interval(ge=1, le=2**31)] = 400_000
    """environment steps of a generation"""
    metric: str = "charts/episodic_return"
    """logged metric whose last value ranks the members; evaluation is off unless it is eval/..."""
    goal: Literal["maximize", "minimize"] = "maximize"
    """whether a higher or a lower metric is better"""
    quantile: Annotated[float, Interval(ge=0, le=0.5)] = 0.25
    """fraction of members, the worst, replaced by clones of the best between generations"""
    resample: UnitInterval = 0.2
    """probability that a clone's flag is redrawn; else it moves by a tenth of its range (:log: x 1.2 or 0.8)"""
    jobs: Iterations = 1
    """members that train at a time; with --address, the cluster's CPUs and GPUs decide"""
    cpus: Annotated[float, Ge(0.001)] = 1.0
    """CPUs per member; only with --address"""
    gpus: NonNegativeFloat = 0.0
    """GPUs of a member; 0.5 for two members on one; 0 to train on the CPU"""
    address: str = ""
    """a Ray cluster to train on, such as auto; empty for this machine alone"""
    out: str = ""
    """folder of the study: results.csv, pbt.png and the members; by default runs/pbt/<name of the script>"""
    seed: Annotated[int, Interval(ge=0, le=2**30)] = 0
    """seed of the draws; member i, from 0 on, trains with seed + i"""


# THE COMMAND LINE


class Range(NamedTuple):
    """The range of a hyperparameter."""

    low: float
    high: float
    log: bool
    integer: bool

    def clamp(self, value: float) -> float:
        value = min(max(float(f"{value:.6g}"), self.low), self.high)
        return round(value) if self.integer else value

    def draw(self) -> float:
        if self.log:
            return self.clamp(math.exp(random.uniform(math.log(self.low), math.log(self.high))))
        return self.clamp(random.uniform(self.low, self.high))

    def perturb(self, value: float) -> float:
        """Moves a value up or down. Without :log by a tenth of the range: Jaderberg et al.'s factors would take a
        discount or a lambda from anywhere to an end of its range."""
        up = random.random() < 0.5
        new = value * (1.2 if up else 0.8) if self.log else value + (0.1 if up else -0.1) * (self.high - self.low)
        if self.integer:
            new = max(round(new), value + 1) if up else min(round(new), value - 1)
        return self.clamp(new)


def read_ranges(args: Args, kinds: dict[str, type]) -> dict[str, Range]:
    """Parses --mutate; `kinds` are the types of the script's flags. Raises UsageError."""
    ranges = {}
    for word in args.mutate:
        match = re.fullmatch(r"([\w-]+)=([^:]+):([^:]+)(:log)?", word)
        check(bool(match), f"--mutate {word}: give name=low:high or name=low:high:log")
        name, log = match[1].replace("-", "_"), bool(match[4])
        try:
            low, high = float(match[2]), float(match[3])
        except ValueError:
            raise runs.UsageError(f"--mutate {word}: low and high must be numbers") from None
        check(-math.inf < low < high < math.inf, f"--mutate {word}: low and high must be finite, low less than high")
        check(low > 0 or not log, f"--mutate {word}: low must be above 0 for a logarithm")
        fits = kinds.get(name) is not int or (low.is_integer() and high.is_integer())
        check(fits, f"--mutate {word}: {runs.flag_of(name)} takes integers, give integer bounds")
        check(name not in ranges, f"--mutate {word}: {name} has a range already, give one")
        ranges[name] = Range(low, high, log, kinds.get(name) is int)
    check(bool(ranges), "--mutate: give at least one flag with its range, such as gamma=0.9:0.999")
    return ranges


def check_args(args: Args) -> tuple[dict[str, Range], dict[str, str]]:
    """The ranges of --mutate and all other flags; raises UsageError, or exits as the script would if it refuses a
    bound."""
    trials.check_flags("SCRIPT", args.program, {})
    check(args.jobs == 1 or not args.address, f"--jobs {args.jobs}: has no effect with --address")
    check(args.cpus == 1 or args.address, f"--cpus {args.cpus:g}: has no effect without --address, give --jobs")
    script = importlib.import_module(Path(args.program).stem)
    kinds = {name.rstrip("_"): kind for name, kind in get_type_hints(script.Args).items()}
    check("total_timesteps" in kinds, f"SCRIPT {args.program}: has no --total-timesteps, give another script")
    ranges, given = read_ranges(args, kinds), trials.read_settings(args.set)
    trials.check_flags("--set", args.program, given, OWN)
    trials.check_flags("--mutate", args.program, {name: f"{r.low}:{r.high}" for name, r in ranges.items()}, OWN)
    # IMPALA's buffer holds whole unrolls.
    shapes = (*SHAPES, "num_steps") if "replay_fraction" in given | ranges else SHAPES
    for name in ranges:
        fixed = name in (*runs.fixed(script.Args), *shapes)
        check(not fixed, f"--mutate {name}: a resumed run keeps its own {runs.flag_of(name)}, give another flag")
        positive = name not in NONZERO or ranges[name].low > 0
        zero = f"--mutate {name}={ranges[name].low:g}:...: low must be above 0, where checkpoints have other arrays"
        check(positive, zero)
        check(name not in given, f"--set {name}={given.get(name)}: --mutate changes it, leave out one of the two")
    # One checkpoint a generation, at its end: nobody resumes from another.
    flags = {"checkpoint_every": args.interval, "keep_checkpoints": 1}
    if "eval_episodes" in kinds and not args.metric.startswith("eval/"):
        flags["eval_episodes"] = 0
    steps, most = args.interval * args.generations, get_args(StepCount)[1].le
    product = f"--interval {args.interval} --generations {args.generations}"
    check(steps <= most, f"{product}: their product, the steps of a member, must be at most {most}")
    flags |= given | {"total_timesteps": steps}
    for end in ("low", "high"):
        trials.check_values(args.program, flags | {name: r.clamp(getattr(r, end)) for name, r in ranges.items()})
    return ranges, flags


# A MEMBER


def read_owner(checkpoint: Path) -> tuple[int, int]:
    """A checkpoint's member and generation."""
    two = Annotated[list[int], Field(min_length=2, max_length=2)]
    return tuple(files.read(checkpoint / "member.json", two, "--out", "give another folder"))


def remove_work(out: Path, prefix: str) -> None:
    """Removes OUT/work/PREFIX*; a prefix begins with the study's random id, so others' folders stay."""
    for old in (out / "work").glob(f"{prefix}*"):
        shutil.rmtree(old, ignore_errors=True)


def member(config: dict) -> None:
    """Ray's trainable: the generations of one member, in a process of its own on some machine.

    A checkpoint of Ray is a copy of the folder that holds the script's run directory. After each report Ray ends this
    process and continues in another one, from the checkpoint of this member or of the donor that it becomes a clone of.
    """
    study = config["study"]
    me = int(tune.get_context().get_trial_id().split("_")[-1])
    out = Path(study["out"])
    remove_work(out, f"{study['id']}_{me}_")  # of processes that are gone
    (out / "work").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{study['id']}_{me}_", dir=out / "work"))
    generation, donor = 0, ""
    if checkpoint := tune.get_checkpoint():
        # After a restart Ray knows a clone's configuration but no longer its donor's checkpoint, only the member's own.
        paths = [Path(path) for path in (config.get("donor"), checkpoint.path) if path and Path(path).exists()]
        path = max(paths, key=lambda path: read_owner(path)[1])  # the donor's, until there is a newer one
        owner, generation = read_owner(path)
        shutil.copytree(path, folder, dirs_exist_ok=True)
        donor = "" if owner == me else owner
    # jaxlib refuses both at once.
    given = {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"} & os.environ.keys()
    if study["gpus"] == 0:
        os.environ["JAX_PLATFORMS"] = "cpu"  # Ray itself leaves GPUs in sight
    if 0 < study["gpus"] < 1 and not given:  # JAX would take three quarters of the GPU's memory
        os.environ["XLA_CLIENT_MEM_FRACTION"] = f"{0.9 * study['gpus']:.3f}"
    while generation < study["generations"]:
        generation += 1
        row = {"member": me, "generation": generation, "cloned_from": donor}
        row |= {name: config[name] for name in study["ranges"]} | train_generation(config, folder, generation)
        (folder / "member.json").write_text(json.dumps([me, generation]))
        tune.report(row, checkpoint=tune.Checkpoint.from_directory(folder))
        donor = ""


def train_generation(config: dict, folder: Path, generation: int) -> dict:
    """Trains the run in a member's folder for one more generation; returns the rest of its row of results.csv."""
    study, began, why = config["study"], time.time(), ""
    logged = len(trials.values_of(trials.find_run(folder), "global_step"))
    # The seed is a part of the configuration since it goes with the run: a clone has its donor's.
    own = {"seed": config["seed"], "total_timesteps": generation * study["interval"]}
    own |= {name: config[name] for name in study["ranges"]}
    try:
        with files.lock_run(folder) as lock:
            trials.run(study["program"], study["flags"] | own, folder, lock, stopping=threading.Event())
        steps = trials.values_of(trials.find_run(folder), "global_step")
        if len(steps) == logged and not (steps and steps[-1] >= own["total_timesteps"]):
            raise RuntimeError(f"no update ended in --interval {study['interval']}, give more environment steps")
        score = trials.last_value(trials.find_run(folder), study["metric"])
    except (trials.Killed, files.FullError):  # as when its machine stops: Ray begins the generation again
        raise
    except RuntimeError as error:  # the worst score there is, so that a better member takes its place
        score, why = -math.inf if study["goal"] == "maximize" else math.inf, str(error)
    run = trials.find_run(folder)
    last_step = (trials.values_of(run, "global_step") or [0])[-1]
    return {"global_step": last_step, "score": score, "hours": (time.time() - began) / 3600, "why": why}


# THE POPULATION


class Generations(PopulationBasedTraining):
    """Ray's synchronous scheduler, extended to lost members and restarts, after which Ray's own waits for ever."""

    def on_trial_add(self, tune_controller, trial):
        super().on_trial_add(tune_controller, trial)
        state = self._trial_state[trial]
        last = trial.last_result or {}
        if "generation" in last:
            self._save_trial_state(state, last["generation"], last, trial)
            state.last_perturbation_time = last["generation"]
        self._next_perturbation_sync = 1 + min(state.last_train_time for state in self._trial_state.values())

    def _get_new_config(self, trial, trial_to_clone):
        config, operations = super()._get_new_config(trial, trial_to_clone)
        return config | {"donor": self._trial_state[trial_to_clone].last_checkpoint.path}, operations

    def _quantiles(self):
        """The members to replace and their donors. A member that was lost and has come back is behind: no donor."""
        lower, upper = super()._quantiles()
        newest = max((state.last_train_time for state in self._trial_state.values()), default=0)
        upper = [trial for trial in upper if self._trial_state[trial].last_train_time == newest]
        return (lower, upper) if upper else ([], [])

    def _checkpoint_or_exploit(self, trial, tune_controller, upper_quantile, lower_quantile):
        if trial in upper_quantile and trial.status == Trial.PENDING:  # after a restart: Ray's own finds it has none
            self._trial_state[trial].last_checkpoint = trial.checkpoint
        else:
            super()._checkpoint_or_exploit(trial, tune_controller, upper_quantile, lower_quantile)

    def on_trial_error(self, tune_controller, trial):
        super().on_trial_error(tune_controller, trial)
        times = [state.last_train_time for other, state in self._trial_state.items() if not other.is_finished()]
        if times and min(times) >= self._next_perturbation_sync:  # the others waited for it: this time none is replaced
            self._next_perturbation_sync = min(times) + 1


class Results(tune.Callback, tune.Stopper):
    """Writes members' reports to results.csv and the screen; stops the study when all members fail."""

    def __init__(self, args: Args, out: Path, ranges: dict[str, Range]):
        self.args, self.out, self.rows = args, out, {}
        self.numbers = [*ranges, args.metric]
        self.columns = ["member", "generation", "global_step", *self.numbers, "cloned_from", "hours", "why"]

    def setup(self, **info) -> None:
        self.rows = {(int(row["member"]), int(row["generation"])): row for row in read_rows(self.out, self.numbers)}

    def on_trial_result(self, iteration, trials, trial, result, **info) -> None:
        row = {name: result[name] for name in self.columns if name in result}
        row |= {self.args.metric: "" if row["why"] else f"{result['score']:.6g}", "hours": f"{row['hours']:.4f}"}
        self.add(row)

    def on_trial_error(self, iteration, trials, trial, **info) -> None:
        lost = int(trial.trial_id.split("_")[-1])
        row = dict.fromkeys(self.columns, "") | {"member": lost, "why": "Ray lost it, see error.txt in its folder"}
        self.add(row | {"generation": 1 + (trial.last_result or {}).get("generation", 0)})

    def add(self, row: dict) -> None:
        self.rows[row["member"], row["generation"]] = row
        ordered = [row for _, row in sorted(self.rows.items(), key=lambda item: item[0][::-1])]
        records.write_rows(self.out / "results.csv", [{k: x.get(k, "") for k in self.columns} for x in ordered])
        shown = "  ".join(f"{name} {row[name]}" for name in self.columns if row[name] != "" and name != "hours")
        print(shown.replace("cloned_from", "cloned from").replace("global_step", "step"), flush=True)

    def __call__(self, trial_id, result) -> bool:
        return result["generation"] >= self.args.generations

    def stop_all(self) -> bool:
        """Whether all members failed in the newest generation, or the first ones did not log the metric: then the next
        generation fails too."""
        newest = max((generation for _, generation in self.rows), default=0)
        whys = [row["why"] for (_, generation), row in self.rows.items() if generation == newest]
        misnamed = newest == 1 and all("was never logged" in why for why in whys)
        return misnamed or (len(whys) == self.args.population and all(whys))


# RESULTS


COUNT, REAL = "^[0-9]{1,15}$", r"^(-?[0-9]+(\.[0-9]+)?(e[-+][0-9]+)?)?$"


def read_rows(out: Path, numbers: list[str]) -> list[dict]:
    """The rows of results.csv so far, with numbers or nothing in the columns `numbers`; raises UsageError."""
    if not (out / "results.csv").exists():
        return []
    count, real = (Annotated[str, Field(pattern=pattern)] for pattern in (COUNT, REAL))
    columns = {"member": count, "generation": count, "why": str}
    columns |= dict.fromkeys(["cloned_from", "global_step"], count | Literal[""])
    kind = TypedDict("Row", columns | dict.fromkeys(["hours", *numbers], real))
    return files.read(out / "results.csv", list[kind], "--out", "give another folder")


def draw(args: Args, rows: list[dict], ranges: dict[str, Range]) -> Figure:
    """pbt.png: the metric and the hyperparameters over steps; a clone's line begins at its donor's."""

    def point(row: dict, name: str) -> tuple[float, float]:
        return int(row["global_step"]), float(row[name])

    rows = {(int(row["member"]), int(row["generation"])): row for row in rows if row[args.metric]}
    figure = Figure(figsize=(9, 3.5 + 1.8 * len(ranges)), dpi=120, layout="constrained")
    axes = figure.subplots(1 + len(ranges), sharex=True, squeeze=False, height_ratios=[2] + [1] * len(ranges))[:, 0]
    for i, me in enumerate(sorted({me for me, _ in rows})):
        own = [row for (member, _), row in sorted(rows.items()) if member == me]
        style = plot.style_of(i) | {"ms": 4, "lw": 1.2}
        last = None
        for row in own:
            if row["cloned_from"]:
                if last:
                    axes[0].plot(*point(last, args.metric), "x", color=style["color"], ms=9, mew=1.5)
                last = rows.get((int(row["cloned_from"]), int(row["generation"]) - 1))
            x, y = zip(*(point(r, args.metric) for r in (last, row) if r), strict=True)
            axes[0].plot(x, y, **style | {"marker": ""})
            axes[0].plot(*point(row, args.metric), **style)
            last = row
        axes[0].plot([], [], **style, label=f"member {me}")
        for axis, name in zip(axes[1:], ranges, strict=True):
            x, y = zip(*(point(row, name) for row in own), strict=True)
            axis.plot((0, *x), (y[0], *y), **style | {"drawstyle": "steps-pre"}, markevery=slice(1, None))
    axes[0].plot([], [], "kx", ms=9, mew=1.5, label="replaced by a clone")
    for axis, name in zip(axes, (args.metric, *ranges), strict=True):
        log = name in ranges and ranges[name].log
        axis.set(ylabel=name.split("/")[-1].replace("_", " "), yscale="log" if log else "linear")
        axis.grid(alpha=0.3)
    axes[-1].set(xlabel="environment steps of a member")
    figure.suptitle(f"Population-based training of {args.program}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    return figure


def report(args: Args, out: Path, ranges: dict[str, Range], results: Results, grid: tune.ResultGrid) -> None:
    """Draws the study and prints the best member; raises FailedError if none is left."""
    results.setup()  # Ray may have had a copy
    rows = list(results.rows.values())
    if any(row[args.metric] for row in rows):
        with files.atomic_write(out / "pbt.png") as temporary:
            draw(args, rows, ranges).savefig(temporary, format="png")
    good = [  # of the last generation: a member that Ray lost may have been better before
        result
        for result in grid
        if result.checkpoint
        and result.metrics.get("generation") == args.generations
        and math.isfinite(result.metrics.get("score", math.nan))
    ]
    ended = [row for row in rows if row["generation"] == str(args.generations) and row["global_step"]]
    over = len(ended) + grid.num_errors  # a member that Ray lost has no step in its row
    if results.stop_all() or (over >= args.population and not good):
        raise files.FailedError(f"no member is left: {rows[-1]['why']}; see {out / 'members'}")
    if over < args.population:
        print("stopped; repeat the command to continue")
    else:
        best = (max if args.goal == "maximize" else min)(good, key=lambda result: result.metrics["score"])
        print(f"best: member {best.metrics['member']}, {trials.find_run(Path(best.checkpoint.path))}")
    if rows:
        print(out / "results.csv")


# MAIN


class Saved(TypedDict):
    """args.json: the flags of a study, and its random id."""

    __pydantic_config__ = ConfigDict(extra="allow")
    id: NotRequired[Annotated[str, Field(pattern="^[0-9a-f]{32}$")]]


def token_of(study: dict) -> Path:
    """The file that marks a user's own study: where nobody else writes, unlike in the study's folder."""
    return files.own_folder() / "pbt" / f"{study['id']}.json"


def place_of(out: Path) -> dict:
    return {"out": str(out.resolve()), "inode": out.stat().st_ino}


def check_study(args: Args, out: Path) -> dict:
    """The flags and the id of the study in a folder, or of a new one. Raises UsageError if it has other flags, or
    unless this user began it there: Ray unpickles its files, which can run any command."""
    free = ("jobs", "cpus", "address", "out")  # may differ when a study continues
    asked = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(args).items() if k not in free}
    saved = {}
    if (out / "args.json").exists():
        saved = files.read(out / "args.json", Saved, "--out", "give another folder")
        for name, value in asked.items():
            flag = "SCRIPT" if name == "program" else runs.flag_of(name)
            has = f"the study in {out} has {saved.get(name)}; continue that or give another --out"
            check(value == saved.get(name), f"{flag} {value}: {has}")
    begun = (out / "members").exists()
    study = asked | {"id": saved.get("id", "") if begun else uuid.uuid4().hex}
    if begun:
        token = token_of(study)
        known = token.exists() and files.read(token, dict, "--out", "give another folder") == place_of(out)
        restored = [path for pattern in ("members", "members/*", "members/*/*") for path in out.glob(pattern)]
        foreign = [path for path in restored if path.lstat().st_uid != os.getuid()]
        here = f"{os.environ.get('USER', os.getuid())} on {socket.gethostname()}"
        check(
            known and not foreign,
            f"--out {out}: Ray would run code from its files, and {token} does not say that {here} began this study, "
            "or some files are another user's; continue where it was begun, or give another --out",
        )
    return study


def start_ray(args: Args) -> None:
    """Starts Ray here or connects to a cluster; raises UsageError."""
    warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called|Consider boosting PBT performance")
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(args.population)  # all of them take part from the beginning
    local = {} if args.address else {"num_cpus": args.jobs, "include_dashboard": False}
    try:
        if re.fullmatch(r"[^:/]+:\d+", args.address):  # Ray itself would try for minutes
            socket.create_connection(args.address.split(":"), timeout=10).close()
        ray.init(args.address or "local", log_to_driver=False, logging_level=logging.ERROR, **local)
    except (OSError, ValueError, RuntimeError) as error:
        why = files.first_line(error)
        what = f"--address {args.address}: Ray does not start there" if args.address else "Ray does not start"
        raise runs.UsageError(f"{what} ({why})") from None
    gpus = ray.cluster_resources().get("GPU", 0)
    # A cluster may get its GPUs only when they are asked for; here, Ray would wait for them for ever.
    check(bool(args.address) or args.gpus <= gpus, f"--gpus {args.gpus:g}: there are {gpus:g} here, give at most that")
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)


def make_tuner(args: Args, out: Path, ranges: dict[str, Range], study: dict, results: Results) -> tune.Tuner:
    """Ray's tuner of a new population, or of the one that was stopped."""
    trainable = tune.with_resources(member, {"cpu": args.cpus, "gpu": args.gpus})
    if tune.Tuner.can_restore(out / "members"):
        return tune.Tuner.restore(str(out / "members"), trainable, resume_errored=True)

    def explore(config: dict) -> dict:
        """A clone's configuration, from its donor's."""
        return config | {
            name: r.draw() if random.random() < args.resample else r.perturb(config[name]) for name, r in ranges.items()
        }

    scheduler = Generations(
        time_attr="generation", metric="score", mode={"maximize": "max", "minimize": "min"}[args.goal],
        perturbation_interval=1, synch=True,
        hyperparam_mutations={name: r.draw for name, r in ranges.items()}, quantile_fraction=args.quantile,
        resample_probability=0, perturbation_factors=(1, 1), custom_explore_fn=explore,
    )  # fmt: skip
    seeds = tune.grid_search([args.seed + i for i in range(args.population)])
    return tune.Tuner(
        trainable,
        param_space={"seed": seeds, "study": study},
        tune_config=tune.TuneConfig(
            scheduler=scheduler, trial_dirname_creator=lambda trial: trial.trial_id.split("_")[-1]
        ),
        run_config=tune.RunConfig(
            name="members", storage_path=str(out), callbacks=[results], stop=results, verbose=0,
            checkpoint_config=tune.CheckpointConfig(num_to_keep=3),
            failure_config=tune.FailureConfig(max_failures=3),  # of Ray and its machines: it continues elsewhere
        ),
    )  # fmt: skip


def main(args: Args) -> None:
    """Trains the population until all generations are over, or a signal comes."""
    ranges, flags = check_args(args)
    out = Path(args.out or f"runs/pbt/{Path(args.program).stem}").absolute()
    files.make_folder(out, "--out")
    lock = files.lock_run(out)
    check(bool(lock), f"--out {out}: {files.holder(out)} is running it; wait for its end, or give another --out")
    with lock:
        study, results = check_study(args, out), Results(args, out, ranges)
        done = len(read_rows(out, results.numbers))
        start_ray(args)
        files.write_json(token_of(study), place_of(out))
        files.write_json(out / "args.json", study)
        random.seed(f"{args.seed} {done}")  # Ray draws from it too; a continued study repeats no draws
        for number in set(runs.stop_signals()) - {signal.SIGINT}:
            signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))  # at which Tune saves and ends
        study |= {"out": str(out), "flags": flags, "ranges": list(ranges)}
        grid = make_tuner(args, out, ranges, study, results).fit()
        ray.shutdown()
        remove_work(out, f"{study['id']}_")
        with contextlib.suppress(OSError):  # something else is in it
            (out / "work").rmdir()
        report(args, out, ranges, results, grid)


if __name__ == "__main__":
    runs.cli(Args, main)
