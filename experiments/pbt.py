"""Population-based training (Jaderberg et al. 2017, arXiv 1711.09846) of a script, on Ray Tune and the script's own
checkpoints. Try:

    python -m experiments.pbt ppo_procgen.py --mutate gamma=0.9:0.999 learning_rate=1e-4:1e-3:log --jobs 2
    python -m experiments.pbt impala_procgen.py --mutate gamma=0.9:0.999 --set env_id=coinrun --address auto --out /nfs

Members train for a generation each; then the worst ones resume from copies of the best ones' run directories, with
other hyper-parameters. Stopped and started again, a study continues. On a cluster, the repository and --out are in
folders that all machines see under the same paths. Wants `pip install '.[ray]'`.
"""

import contextlib
import dataclasses
import importlib
import itertools
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
from typing import Annotated, Literal, NamedTuple, NotRequired, get_type_hints

import tyro
from annotated_types import Ge, Interval
from matplotlib.figure import Figure
from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from common import files, runs
from common.files import check
from common.flags import Iterations, NonNegativeFloat, UnitInterval
from experiments import records, trials

for name in ("RAY_USAGE_STATS_ENABLED", "RAY_AIR_NEW_OUTPUT"):
    os.environ[name] = "0"
os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"  # results.csv is all that is wanted
try:
    import ray
    from ray import tune
    from ray.tune.experiment import Trial
    from ray.tune.schedulers import PopulationBasedTraining
except ImportError:
    print("error: experiments/pbt.py needs Ray Tune: pip install '.[ray]'", file=sys.stderr)
    sys.exit(2)

SHAPES = ("hidden", "buffer_size", "num_envs")  # with another, what a clone takes from its donor does not fit
OWN = ("total_timesteps", "seed", "checkpoint_every", "keep_checkpoints")  # and trials.PLACES
NEVER_LOGGED = "was never logged"
COLORS = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000"  # Okabe and Ito's
LINES = "-", "--", "-.", ":"
MARKERS = "osD^v"


@dataclass(frozen=True)
class Args:
    program: tyro.conf.Positional[str]
    """a script, such as ppo_procgen.py"""
    mutate: tuple[str, ...] = ("gamma=0.9:0.999", "learning_rate=1e-4:1e-3:log")
    """flags that change, each with its range: name=low:high, or name=low:high:log to draw evenly in the logarithm"""
    set: tuple[str, ...] = ()
    """flags with a value that all members get, such as env_id=bigfish num_envs=64"""
    population: Annotated[int, Interval(ge=2, le=1000)] = 8
    """members; each has a seed of its own"""
    generations: Annotated[int, Interval(ge=1, le=100_000)] = 20
    """how often each member trains for the interval; between two generations the worst are replaced"""
    interval: Annotated[int, Interval(ge=1, le=2**31)] = 400_000
    """environment steps of a generation"""
    metric: str = "charts/episodic_return"
    """metric to compare members by, its last value in metrics.jsonl; they run evaluations only for one of eval/..."""
    goal: Literal["maximize", "minimize"] = "maximize"
    """of the metric"""
    quantile: Annotated[float, Interval(ge=0, le=0.5)] = 0.25
    """share of the members, the worst, that are replaced, and share, the best, that are cloned in their place"""
    resample: UnitInterval = 0.2
    """probability that a clone's flag is drawn anew from its range; otherwise it moves up or down, with :log by a
    factor of 1.2 or 0.8, without by a tenth of its range"""
    jobs: Iterations = 1
    """members that train at a time; with --address, the cluster's CPUs and GPUs decide"""
    cpus: Annotated[float, Ge(0.001)] = 1.0
    """CPUs of a cluster that a member takes, with --address"""
    gpus: NonNegativeFloat = 0.0
    """GPUs that a member takes; a part, such as 0.5, shares one; with 0 it sees none"""
    address: str = ""
    """a Ray cluster to train on, such as auto; empty for this machine alone"""
    out: str = ""
    """folder of the study: results.csv, pbt.png and the members; by default runs/pbt/<name of the script>"""
    seed: Annotated[int, Interval(ge=0, le=2**30)] = 0
    """seed of the draws and of the first member's run; the others' runs get seed + 1, seed + 2, ..."""


# THE COMMAND LINE


class Range(NamedTuple):
    """Where a hyper-parameter's values lie."""

    low: float
    high: float
    log: bool
    whole: bool

    def clamp(self, value: float) -> float:
        value = min(max(float(f"{value:.6g}"), self.low), self.high)
        return round(value) if self.whole else value

    def draw(self) -> float:
        if self.log:
            return self.clamp(math.exp(random.uniform(math.log(self.low), math.log(self.high))))
        return self.clamp(random.uniform(self.low, self.high))

    def move(self, value: float) -> float:
        """A value beside this one, above or below. A factor, Jaderberg et al.'s, would take a discount or a lambda from
        anywhere to an end of its range."""
        up = random.random() < 0.5
        near = value * (1.2 if up else 0.8) if self.log else value + (0.1 if up else -0.1) * (self.high - self.low)
        if self.whole:
            near = max(round(near), value + 1) if up else min(round(near), value - 1)
        return self.clamp(near)


def read_ranges(args: Args, kinds: dict[str, type]) -> dict[str, Range]:
    """The ranges of --mutate, by flag; `kinds` are the script's flags. Raises UsageError."""
    ranges = {}
    for word in args.mutate:
        match = re.fullmatch(r"([\w-]+)=([^:]+):([^:]+)(:log)?", word)
        check(bool(match), f"--mutate {word}: give name=low:high or name=low:high:log")
        name = match[1].replace("-", "_")
        log = bool(match[4])
        try:
            low, high = float(match[2]), float(match[3])
        except ValueError:
            raise runs.UsageError(f"--mutate {word}: low and high must be numbers") from None
        check(-math.inf < low < high < math.inf, f"--mutate {word}: low must be less than high")
        check(low > 0 or not log, f"--mutate {word}: low must be above 0 for a logarithm")
        fits = kinds.get(name) is not int or (low.is_integer() and high.is_integer())
        check(fits, f"--mutate {word}: {runs.flag_of(name)} is a whole number, give whole ends")
        check(name in kinds, f"--mutate {word}: {args.program} has no flag {runs.flag_of(name)}")
        check(name not in ranges, f"--mutate {word}: {name} has a range already, give one")
        ranges[name] = Range(low, high, log, kinds[name] is int)
    check(bool(ranges), "--mutate: give at least one flag with its range, such as gamma=0.9:0.999")
    return ranges


def read_flags(args: Args, kinds: dict[str, type]) -> dict[str, str]:
    """The flags that all members get. Raises UsageError."""
    # One checkpoint a generation, at its end: nobody resumes from another.
    flags = {"checkpoint_every": args.interval, "keep_checkpoints": 1}
    if "eval_episodes" in kinds and not args.metric.startswith("eval/"):
        flags["eval_episodes"] = 0
    given = trials.read_settings(args.set)
    trials.check_flags("--set", args.program, given, OWN)
    return flags | given


def check_args(args: Args) -> tuple[dict[str, Range], dict[str, str]]:
    """What changes and what does not; raises UsageError, or ends as the script would, if a value makes no sense."""
    stem = Path(args.program).stem
    check(args.program in trials.SCRIPTS, f"PROGRAM {args.program}: give one of {', '.join(trials.SCRIPTS)}")
    check(args.jobs == 1 or not args.address, f"--jobs {args.jobs}: has no effect with --address")
    check(args.cpus == 1 or args.address, f"--cpus {args.cpus:g}: has no effect without --address, give --jobs")
    script = importlib.import_module(stem)
    kinds = {name.rstrip("_"): kind for name, kind in get_type_hints(script.Args).items()}
    check("total_timesteps" in kinds, f"PROGRAM {args.program}: has no --total-timesteps to measure generations by")
    ranges = read_ranges(args, kinds)
    flags = read_flags(args, kinds)
    trials.check_flags("--mutate", args.program, {name: f"{r.low}:{r.high}" for name, r in ranges.items()}, OWN)
    for name in ranges:
        fixed = name in (*runs.fixed(script.Args), *SHAPES)
        check(not fixed, f"--mutate {name}: {runs.flag_of(name)} is not free here, a resumed run keeps its own")
        check(name not in flags, f"--set {name}={flags.get(name)}: --mutate changes it already")
    flags["total_timesteps"] = args.interval * args.generations

    ends = [{name: r.clamp(getattr(r, end)) for name, r in ranges.items()} for end in ("low", "high")]
    between = [
        ends[0] | {name: value}  # of whole numbers each, as some may not divide others
        for name, r in ranges.items()
        if r.whole
        for value in range(int(r.low) + 1, int(r.high), 1 + int(r.high - r.low) // 64)
    ]
    for values in (*ends, *between):  # the script itself says what it does not like
        trials.ask_script(args.program, flags | values)
    return ranges, flags


# A MEMBER


def read_owner(checkpoint: Path) -> tuple[int, int]:
    """Whose checkpoint it is, and of which generation."""
    two = Annotated[list[int], Field(min_length=2, max_length=2)]
    return tuple(files.read(checkpoint / "member.json", two, "--out", "give another folder"))


def remove_work(out: Path, begin: str) -> None:
    """Removes the folders of OUT/work whose names begin so: with the random name of a study, they are its own."""
    for old in (out / "work").glob(f"{begin}*"):
        shutil.rmtree(old, ignore_errors=True)


def member(config: dict) -> None:
    """What Ray runs, in a process of its own on some machine: generations of one member, one script's process each.

    Ray's checkpoint is a copy of the folder in which the script has its run directory. After each report Ray ends this
    process, and continues in another one: from the checkpoint of this member or, where that is better, of another.
    """
    study = config["study"]
    me = int(tune.get_context().get_trial_id().split("_")[-1])
    out = Path(study["out"])
    remove_work(out, f"{study['id']}_{me}_")  # of processes that are gone
    (out / "work").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{study['id']}_{me}_", dir=out / "work"))
    generation = 0
    donor = ""
    if checkpoint := tune.get_checkpoint():
        # After a restart Ray knows a clone's configuration but no longer its donor's checkpoint, only the member's own.
        paths = [Path(path) for path in (config.get("donor"), checkpoint.path) if path and Path(path).exists()]
        path = max(paths, key=lambda path: read_owner(path)[1])  # the donor's, until there is a newer one
        owner, generation = read_owner(path)
        shutil.copytree(path, folder, dirs_exist_ok=True)
        donor = "" if owner == me else owner
    given = {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"} & os.environ.keys()  # jaxlib refuses both
    if study["gpus"] == 0:
        os.environ["JAX_PLATFORMS"] = "cpu"  # Ray itself leaves GPUs in sight
    if 0 < study["gpus"] < 1 and not given:  # JAX would take three quarters of the GPU's memory
        os.environ["XLA_CLIENT_MEM_FRACTION"] = f"{0.9 * study['gpus']:.3f}"
    while generation < study["generations"]:
        generation += 1
        began, before = time.time(), sum(1 for _ in trials.each_line(trials.find_run(folder)))
        why = ""
        # The seed is a part of the configuration since it goes with the run: a clone has its donor's.
        own = {"seed": config["seed"], "total_timesteps": generation * study["interval"]}
        own |= {name: config[name] for name in study["ranges"]}
        try:
            with files.lock_run(folder) as lock:
                trials.run(study["program"], study["flags"] | own, folder, lock, stopping=threading.Event())
        except (trials.Killed, files.FullError):  # as when its machine stops: Ray begins the generation again
            raise
        except RuntimeError as error:
            why = str(error)
        run = trials.find_run(folder)
        steps = trials.values_of(run, "global_step")
        values = trials.values_of(run, study["metric"])
        score = values[-1] if values else math.nan
        if not why and len(steps) == before and not (steps and steps[-1] >= generation * study["interval"]):
            why = f"no update ended in --interval {study['interval']}, give more environment steps"
        elif not (why or values):
            why = f"{study['metric']} {NEVER_LOGGED}, give one of {' '.join(trials.logged_names(run))}"
        elif not (why or math.isfinite(score)):
            why = f"{study['metric']} is {score}"
        if why:  # the worst there is, so that a better member takes its place
            score = -math.inf if study["goal"] == "maximize" else math.inf
        for other in folder.glob("*/args.json"):  # a run that failed before its first checkpoint
            if other.parent != run:
                shutil.rmtree(other.parent)
        (folder / "member.json").write_text(json.dumps([me, generation]))
        row = {"member": me, "generation": generation, "global_step": steps[-1] if steps else 0}
        row |= {name: config[name] for name in study["ranges"]}
        row |= {"score": score, "cloned_from": donor, "hours": (time.time() - began) / 3600, "why": why}
        tune.report(row, checkpoint=tune.Checkpoint.from_directory(folder))
        donor = ""


# THE POPULATION


class Generations(PopulationBasedTraining):
    """Ray's, synchronous: who is compared has trained for as long, even where members take turns on few CPUs.

    Ray's own waits for ever for a member that is lost, and after a restart, of which it remembers nothing.
    """

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
        """Those to replace and those to replace them by: a member that was lost and has come back is behind, and is
        nobody's donor."""
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
    """Writes what members report to results.csv and the screen; ends the study where all of them fail."""

    def __init__(self, args: Args, out: Path, names: list[str]):
        self.args, self.out = args, out
        self.rows = {}
        self.numbers = [*names, args.metric]
        self.columns = ["member", "generation", "global_step", *names, args.metric, "cloned_from", "hours", "why"]

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
        records.write_rows(
            self.out / "results.csv", [{name: x.get(name, "") for name in self.columns} for x in ordered]
        )
        shown = "  ".join(f"{name} {row[name]}" for name in self.columns if row[name] != "" and name != "hours")
        print(shown.replace("cloned_from", "cloned from").replace("global_step", "step"), flush=True)

    def __call__(self, trial_id, result) -> bool:
        return result["generation"] >= self.args.generations

    def stop_all(self) -> bool:
        """Whether the newest whole generation is one of failures: flags that fail in all fail in the next one too.

        The first members tell whether the metric is one that the script logs.
        """
        newest = max((generation for _, generation in self.rows), default=0)
        whys = [row["why"] for (_, generation), row in self.rows.items() if generation == newest]
        misnamed = newest == 1 and all(NEVER_LOGGED in why for why in whys)
        return misnamed or (len(whys) == self.args.population and all(whys))


# RESULTS


COUNT, REAL = "^[0-9]{1,15}$", r"^(-?[0-9]+(\.[0-9]+)?(e[-+][0-9]+)?)?$"


def read_rows(out: Path, numbers: list[str]) -> list[dict]:
    """results.csv so far, with numbers or nothing in these columns; raises UsageError if it is something else."""
    if not (out / "results.csv").exists():
        return []
    count, real = (Annotated[str, Field(pattern=pattern)] for pattern in (COUNT, REAL))
    columns = {"member": count, "generation": count, "cloned_from": count | Literal[""], "why": str}
    kind = TypedDict("Row", columns | dict.fromkeys(["global_step", "hours", *numbers], real))
    return files.read(out / "results.csv", list[kind], "--out", "give another folder")


def draw(args: Args, out: Path, ranges: dict[str, Range]) -> None:
    """pbt.png: the metric and the hyper-parameters over steps; a clone's line begins at its donor's."""
    known = [row for row in read_rows(out, [*ranges, args.metric]) if row[args.metric]]
    rows = {(int(row["member"]), int(row["generation"])): row for row in known}
    figure = Figure(figsize=(9, 3.5 + 1.8 * len(ranges)), dpi=120, layout="constrained")
    axes = figure.subplots(1 + len(ranges), sharex=True, squeeze=False, height_ratios=[2] + [1] * len(ranges))
    looks = itertools.cycle(zip(COLORS * 20, LINES * 35, MARKERS * 28, strict=True))  # 140 before one comes again
    for me, (color, line, marker) in zip(sorted({me for me, _ in rows}), looks, strict=False):
        own = [row for (member, _), row in sorted(rows.items()) if member == me]
        look = {"color": color, "ls": line, "marker": marker, "ms": 4, "lw": 1.2}
        last = None
        for row in own:
            if row["cloned_from"]:
                axes[0, 0].plot(*point(last, args.metric), "x", color=color, ms=9, mew=1.5) if last else None
                last = rows.get((int(row["cloned_from"]), int(row["generation"]) - 1))
            x, y = zip(*(point(r, args.metric) for r in (last, row) if r), strict=True)
            axes[0, 0].plot(x, y, **look | {"marker": ""})
            axes[0, 0].plot(*point(row, args.metric), **look)
            last = row
        axes[0, 0].plot([], [], **look, label=f"member {me}")
        for axis, name in zip(axes[1:, 0], ranges, strict=True):
            x, y = zip(*(point(row, name) for row in own), strict=True)
            axis.plot((0, *x), (y[0], *y), **look | {"drawstyle": "steps-pre"}, markevery=slice(1, None))
    axes[0, 0].plot([], [], "kx", ms=9, mew=1.5, label="replaced by a clone")
    for axis, name in zip(axes[:, 0], (args.metric, *ranges), strict=True):
        log = name in ranges and ranges[name].log
        axis.set(ylabel=name.split("/")[-1].replace("_", " "), yscale="log" if log else "linear")
        axis.grid(alpha=0.3)
    axes[-1, 0].set(xlabel="environment steps of a member")
    figure.suptitle(f"Population-based training of {args.program}")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    with files.atomic_write(out / "pbt.png") as temporary:
        figure.savefig(temporary, format="png")


def point(row: dict, name: str) -> tuple[float, float]:
    return int(row["global_step"]), float(row[name])


# MAIN


class Saved(TypedDict):
    """args.json: the flags of a study, and its random name."""

    __pydantic_config__ = ConfigDict(extra="allow")
    id: NotRequired[Annotated[str, Field(pattern="^[0-9a-f]{32}$")]]


def token_of(study: str) -> Path:
    """The file by which a user's own studies are known: where nobody else writes, unlike the study's folder."""
    return files.own_folder() / "pbt" / f"{study}.json"


def place_of(out: Path) -> dict:
    return {"out": str(out.resolve()), "inode": out.stat().st_ino}


def check_ours(out: Path, study: str) -> None:
    """Raises UsageError unless this user began the study here: Ray unpickles its files, which can run any command."""
    token = token_of(study)
    known = token.exists() and files.read(token, dict, "--out", "give another folder") == place_of(out)
    restored = [path for pattern in ("members", "members/*", "members/*/*") for path in out.glob(pattern)]
    foreign = [path for path in restored if path.lstat().st_uid != os.getuid()]
    here = f"{os.environ.get('USER', os.getuid())} on {socket.gethostname()}"
    check(
        known and not foreign,
        f"--out {out}: the study in it was not begun there by {here} (there is no {token} that says so, or files are "
        "another user's), and Ray would execute what its files say; continue where it was begun, or give another --out",
    )


def main(args: Args) -> None:
    """Trains the population until all generations are over, or a signal comes; continues a study of this user."""
    ranges, flags = check_args(args)
    out = Path(args.out or f"runs/pbt/{Path(args.program).stem}").absolute()
    files.make_folder(out, "--out")
    lock = files.lock_run(out)
    check(bool(lock), f"--out {out}: {files.holder(out)} is at it; wait for its end, stop it, or give another --out")
    with lock:
        train(args, out, ranges, flags)


def train(args: Args, out: Path, ranges: dict[str, Range], flags: dict[str, str]) -> None:
    """Begins the study in a folder that we hold, or continues it."""
    where = ("jobs", "cpus", "address", "out")  # may differ when a study continues
    asked = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(args).items() if k not in where}
    saved = {}
    if (out / "args.json").exists():
        saved = files.read(out / "args.json", Saved, "--out", "give another folder")
        for name, value in asked.items():
            same = f"{runs.flag_of(name)} {value}: the study in {out} has {saved.get(name)}; continue that or give"
            check(value == saved.get(name), f"{same} another --out")
    if (out / "members").exists():
        study = asked | {"id": saved.get("id", "")}
        check_ours(out, study["id"])
    else:
        study = asked | {"id": uuid.uuid4().hex}
        files.write_json(token_of(study["id"]), place_of(out))
    files.write_json(out / "args.json", study)
    results = Results(args, out, list(ranges))
    done = len(read_rows(out, results.numbers))
    warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called|Consider boosting PBT performance")
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(args.population)  # all of them take part from the beginning
    local = {} if args.address else {"num_cpus": args.jobs, "include_dashboard": False}
    try:
        if re.fullmatch(r"[^:/]+:\d+", args.address):  # Ray itself would try for minutes
            socket.create_connection(args.address.split(":"), timeout=10).close()
        ray.init(args.address or "local", log_to_driver=False, logging_level=logging.ERROR, **local)
    except (OSError, ValueError, RuntimeError) as error:
        why = files.first_line(error)
        raise runs.UsageError(f"--address {args.address or 'local'}: Ray does not start there ({why})") from None
    gpus = ray.cluster_resources().get("GPU", 0)
    # A cluster may get its GPUs only when they are asked for; here, Ray would wait for them for ever.
    if not args.address and args.gpus > gpus:
        if not (out / "members").exists():  # nothing was begun that would have to continue these
            (out / "args.json").unlink()
        raise runs.UsageError(f"--gpus {args.gpus:g}: there are {gpus:g} here, give at most that")
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # at which Tune saves and ends

    def explore(config: dict) -> dict:
        """A clone's configuration, of its donor's."""
        return config | {
            name: r.draw() if random.random() < args.resample else r.move(config[name]) for name, r in ranges.items()
        }

    random.seed(f"{args.seed} {done}")
    trainable = tune.with_resources(member, {"cpu": args.cpus, "gpu": args.gpus})
    if tune.Tuner.can_restore(out / "members"):
        tuner = tune.Tuner.restore(str(out / "members"), trainable, resume_errored=True)
    else:
        study |= {"out": str(out), "flags": flags, "ranges": list(ranges)}
        seeds = tune.grid_search([args.seed + i for i in range(args.population)])
        scheduler = Generations(
            time_attr="generation", metric="score", mode=args.goal[:3], perturbation_interval=1, synch=True,
            hyperparam_mutations={name: r.draw for name, r in ranges.items()}, quantile_fraction=args.quantile,
            resample_probability=0, perturbation_factors=(1, 1), custom_explore_fn=explore,
        )  # fmt: skip
        tuner = tune.Tuner(
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
    grid = tuner.fit()
    ray.shutdown()
    remove_work(out, f"{study['id']}_")
    with contextlib.suppress(OSError):  # something else is in it
        (out / "work").rmdir()
    rows = read_rows(out, results.numbers)
    if any(row[args.metric] for row in rows):
        draw(args, out, ranges)
    good = [  # of the last generation: a member that Ray lost may have been better before
        result
        for result in grid
        if result.checkpoint
        and result.metrics.get("generation") == args.generations
        and math.isfinite(result.metrics.get("score", math.nan))
    ]
    results.setup()  # Ray may have had a copy
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


if __name__ == "__main__":
    runs.cli(Args, main)
