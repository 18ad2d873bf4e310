"""Runs a W&B sweep file with Optuna, without W&B's server: grid, random or Bayesian, several trials at a time. Try:

    python -m experiments.sweep sweeps/coinrun_ppo_grid.yaml --jobs 2
    python -m experiments.sweep sweeps/doorgym_hnppo_bayes.yaml --count 20 --storage postgresql://user@host/studies

Stopped or killed and started again, a study continues, and unfinished trials resume from their last checkpoints.
Several processes may share a study, also on machines that share its folder: each locks its trial by a file there, so
that another one can take over the trial of a process that died.
"""

import contextlib
import io
import itertools
import math
import re
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Annotated, Any, Literal, NotRequired, TextIO

import matplotlib as mpl
import numpy as np
import optuna
import tyro
from annotated_types import Interval
from optuna.trial import FrozenTrial, TrialState
from pydantic import AfterValidator, ConfigDict, Field, FiniteFloat, PositiveInt
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from typing_extensions import TypedDict

from common import files, runs
from common.files import check
from common.flags import Iterations, NonNegativeInt
from experiments import records, trials

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import LogFormatter

plt.rcParams["text.parse_math"] = False  # a $ in a name starts no TeX formula
FINISHED = TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL
MAX_CELLS = 1000
MAX_KILLS = 3  # then a trial has failed
DATABASE_ERRORS = optuna.exceptions.StorageInternalError, SQLAlchemyError


@dataclass(frozen=True)
class Args:
    sweep: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SWEEP")]
    """a W&B sweep file"""
    count: Annotated[int, Interval(ge=0, le=1_000_000)] = 0
    """trials of the study, failed ones included; 0 for the file's run_cap, or else a whole grid"""
    jobs: Iterations = 1
    """trials of this process at a time"""
    out: str = ""
    """folder of the study, its runs and results; by default runs/sweeps/<name of the file>"""
    storage: str = ""
    """Optuna storage, such as sqlite:///study.db or postgresql://...; by default study.db in the folder"""
    set: tuple[str, ...] = ()
    """flags of every trial as name=value, in place of the file's, such as total_timesteps=100000"""
    seed: NonNegativeInt = 0
    """seed of the sampler"""


# THE SWEEP FILE


def check_number(value: Any) -> Any:
    """Returns a number as it is; raises ValueError for anything else."""
    if isinstance(value, bool) or not (isinstance(value, (int, float)) and math.isfinite(value)):
        raise ValueError("give a number (to YAML, 1e-4 is text and 1.0e-4 a number)")
    return value


def check_parameter(spec: dict) -> dict:
    """Returns a parameter as it is; raises ValueError unless it has a value, values or a range."""
    if set(spec) - {"distribution"} not in ({"value"}, {"values"}, {"min", "max"}):
        raise ValueError("give it a value, values, or min and max")
    if "min" in spec:
        low, high, distribution = spec["min"], spec["max"], distribution_of(spec)
        if low > high:
            raise ValueError("min must not be above max")
        if distribution == "int_uniform" and not (isinstance(low, int) and isinstance(high, int)):
            raise ValueError("int_uniform takes integers")
        if distribution == "log_uniform_values" and low <= 0:
            raise ValueError("min must be above 0 for a logarithm")
    return spec


def schema(name: str, required: dict, optional: dict) -> type:
    """A type of dicts with these keys and no others: a misspelt key would change what is drawn."""
    kind = TypedDict(name, required | {key: NotRequired[value] for key, value in optional.items()})
    kind.__pydantic_config__ = ConfigDict(extra="forbid")
    return kind


Scalar = str | bool | int | FiniteFloat
Number = Annotated[Any, AfterValidator(check_number)]
Parameter = schema("Parameter", {}, {
    "value": Scalar | list[Scalar], "values": Annotated[list[Scalar], Field(min_length=1)],
    "min": Number, "max": Number, "distribution": Literal["int_uniform", "uniform", "log_uniform_values"],
})  # fmt: skip
Metric = schema("Metric", {"name": str}, {"goal": Literal["minimize", "maximize"]})
EarlyTerminate = schema(
    "EarlyTerminate", {"type": Literal["hyperband"], "min_iter": PositiveInt}, {"eta": Annotated[int, Field(ge=2)]}
)
SERVER_KEYS = "name", "description", "project", "entity"  # of use to W&B's server only
Sweep = schema("Sweep", {
    "program": str, "method": Literal["grid", "random", "bayes"], "metric": Metric,
    "parameters": dict[str, Annotated[Parameter, AfterValidator(check_parameter)]],
}, {"run_cap": PositiveInt, "early_terminate": EarlyTerminate | None, **dict.fromkeys(SERVER_KEYS, Any)})  # fmt: skip


def read_sweep(path: str, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    """Reads a sweep file and overrides flags; raises UsageError if it cannot be run here."""
    sweep = files.read(path, Sweep, "SWEEP", "give a sweep file such as those in sweeps/")
    sweep = {key: value for key, value in sweep.items() if key not in SERVER_KEYS}
    settings = trials.read_settings(overrides)
    trials.check_flags(f"SWEEP {path}", sweep["program"], sweep["parameters"])
    trials.check_flags("--set", sweep["program"], settings)
    sweep["parameters"] |= {name: {"value": value} for name, value in settings.items()}
    if sweep["method"] == "grid":
        for name, spec in sweep["parameters"].items():
            check("min" not in spec, f"SWEEP {path}: {name} has a range, and a grid takes values")
        cells = math.prod(len(spec.get("values", [0])) for spec in sweep["parameters"].values())
        check(cells <= MAX_CELLS, f"SWEEP {path}: its grid has {cells:,} cells, give at most {MAX_CELLS:,}")
    return sweep | {"metric": {"goal": "minimize"} | sweep["metric"]}


def distribution_of(spec: dict) -> str:
    """The distribution of a range: by default that of its bounds' type."""
    integers = isinstance(spec["min"], int) and isinstance(spec["max"], int)
    return spec.get("distribution", "int_uniform" if integers else "uniform")


def grid_cells(sweep: dict) -> list[dict]:
    """The cells of a grid, as the values of the parameters that have several; the last one varies fastest."""
    values = {name: spec["values"] for name, spec in sweep["parameters"].items() if "values" in spec}
    return [dict(zip(values, cell, strict=True)) for cell in itertools.product(*values.values())]


def check_values(sweep: dict) -> None:
    """Exits as the script would if it refuses all first values together, or another value (or bound) with both the
    others' last and first values. Single cells of a grid may be refused."""

    def extremes(spec):
        if "min" not in spec:
            return [spec["value"]] if "value" in spec else spec["values"]
        ends = spec["min"], spec["max"]
        return ends if distribution_of(spec) == "int_uniform" else [float(end) for end in ends]

    values = {name: extremes(spec) for name, spec in sweep["parameters"].items()}
    first, last = ({name: each[i] for name, each in values.items()} for i in (0, -1))
    trials.check_values(sweep["program"], first)
    for name, each in values.items():
        for value in each[1:]:
            try:
                with contextlib.redirect_stderr(io.StringIO()):
                    trials.check_values(sweep["program"], last | {name: value})
            except SystemExit:
                trials.check_values(sweep["program"], first | {name: value})


# OPTUNA'S STUDY


def suggest(trial: optuna.Trial, name: str, spec: dict) -> Any:
    """A parameter's value for a trial."""
    if "value" in spec:
        return spec["value"]
    if "values" in spec:
        return trial.suggest_categorical(name, spec["values"])
    distribution = distribution_of(spec)
    if distribution == "int_uniform":
        return trial.suggest_int(name, spec["min"], spec["max"])
    return trial.suggest_float(name, spec["min"], spec["max"], log=distribution == "log_uniform_values")


def make_sampler(args: Args, sweep: dict, trial: int) -> optuna.samplers.BaseSampler:
    """A sampler seeded for one trial, so that processes that share or resume a study repeat no draw."""
    kind = optuna.samplers.TPESampler if sweep["method"] == "bayes" else optuna.samplers.RandomSampler
    return kind(seed=int(np.random.SeedSequence([args.seed, trial]).generate_state(1)[0]))


def make_pruner(sweep: dict) -> optuna.pruners.BasePruner:
    """The pruner of early_terminate. W&B's Hyperband has one bracket, which Optuna calls successive halving: after
    min_iter, min_iter * eta, min_iter * eta^2, ... values of the metric, a trial continues only if it is among the best
    1 / eta. Of n trials Optuna keeps max(1, n // eta), W&B one more."""
    rule = sweep.get("early_terminate")
    if not rule:
        return optuna.pruners.NopPruner()
    return optuna.pruners.SuccessiveHalvingPruner(rule["min_iter"], reduction_factor=rule.get("eta", 3))


def open_study(args: Args, sweep: dict, name: str, out: Path) -> optuna.Study:
    """Opens or creates the study, and queues the cells of a grid; raises UsageError if it is of another sweep.

    The caller holds the lock of `out`: SQLite's tables are created here too.
    """
    url = args.storage or f"sqlite:///{out / 'study.db'}"
    shown = re.sub(r"(://[^/@]*:)[^/@]*@", r"\1***@", url)  # without a password
    try:
        patient = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else None
        storage = optuna.storages.RDBStorage(url, engine_kwargs=patient)
    except Exception as error:  # SQLAlchemy and drivers raise many kinds
        raise runs.UsageError(f"--storage {shown}: cannot be opened ({files.first_line(error)[:100]})") from None
    path = out / "study.json"
    known = name in optuna.get_all_study_names(storage) or not any(out.glob("[0-9]*/"))
    check(known, f"--out {out}: has trials of another study or of one that is gone, give another folder")
    if not path.exists():
        runs.write_json(path, {"id": str(uuid.uuid4())})
    which = f"the study {name} in {shown}"
    study_id = files.read(path, TypedDict("Study", {"id": str}), "--out", "give another folder")["id"]
    study = optuna.create_study(
        study_name=name, storage=storage, pruner=make_pruner(sweep), direction=sweep["metric"]["goal"],
        load_if_exists=True,
    )  # fmt: skip
    if "id" not in study.user_attrs:
        for key, value in {"sweep": sweep, "out": str(out), "seed": args.seed, "id": study_id}.items():
            study.set_user_attr(key, value)
    _check_intact(study, out, f"--out {out}: {which} is damaged; put a copy back, or give another folder")
    attrs = study.user_attrs
    check(attrs["id"] == study_id, f"--out {out}: {which} has its runs in {attrs['out']}, give that")
    same = attrs["seed"] == args.seed
    check(same, f"--seed {args.seed}: {which} has {attrs['seed']}, give that, or another --out")
    check(attrs["sweep"] == sweep, f"SWEEP {args.sweep}: {which} has another sweep file or --set, give another --out")
    if sweep["method"] == "grid":  # all of its trials are queued here, in order
        for cell in grid_cells(sweep)[len(study.get_trials(deepcopy=False)) :]:
            study.enqueue_trial(cell)
    return study


def _check_intact(study: optuna.Study, out: Path, sentence: str) -> None:
    """Raises UsageError(sentence) if the study cannot be read or lacks a trial that has a folder, or a part of a
    finished trial: Optuna recreates a missing table empty."""
    try:
        drawn = {name for name, spec in study.user_attrs["sweep"]["parameters"].items() if "value" not in spec}
        intact = all(
            trial.params.keys() == drawn
            and {"ended", "origin", "seconds"} <= trial.user_attrs.keys()
            and (trial.state != TrialState.COMPLETE or trial.value is not None)
            and (trial.user_attrs["ended"] == "fail" or trial.intermediate_values)
            for trial in finished_trials(study)
        ) and len(study.get_trials(deepcopy=False)) >= len(list(out.glob("[0-9]*/")))
    except Exception as error:  # SQLAlchemy's and Optuna's, for what cannot be read
        cause = error.__cause__ or error
        if isinstance(cause, OperationalError) and "no such" not in str(cause):
            raise  # the database does not answer now
        intact = False
    check(intact, sentence)


# TRIALS


def begin_trial(study: optuna.Study, args: Args, sweep: dict, count: int, out: Path) -> tuple | None:
    """An unfinished trial that no process runs, or else a new one if there are fewer than `count`: the trial, its
    flags, its folder, and the folder's lock. None if there is neither."""
    with files.lock_run(out, wait=True):
        known = study.get_trials(deepcopy=False)
        chosen = None
        for old in known:
            if old.state == TrialState.RUNNING and (lock := files.lock_run(out / f"{old.number:04d}")):
                if study.get_trials(deepcopy=False)[old.number].state == TrialState.RUNNING:
                    study.sampler = make_sampler(args, sweep, old.number)
                    chosen = optuna.trial.Trial(study, old._trial_id)
                    break
                lock.close()  # it has just ended
        begun = sum(trial.state != TrialState.WAITING for trial in known)
        left = begun < len(known) or sweep["method"] != "grid"  # all cells of a grid are queued in open_study
        if chosen is None and begun < count and left:
            study.sampler = make_sampler(args, sweep, begun)
            chosen = study.ask()
            lock = files.lock_run(out / f"{chosen.number:04d}", wait=True)
        if chosen is None:
            return None
        flags = {name: suggest(chosen, name, spec) for name, spec in sweep["parameters"].items()}
        return chosen, flags, out / f"{chosen.number:04d}", lock


def objective(trial: optuna.Trial, sweep: dict, flags: dict, folder: Path, lock: TextIO, stopping: Event) -> float:
    """Runs or resumes a trial's script, reports the metric to Optuna, and returns its last value.

    Raises TrialPruned, Stopped if the trial remains open, RuntimeError if it failed or never logged the metric, and
    UsageError if no other trial has logged it either.
    """
    if trial.user_attrs.get("ended") == "pruned":  # its process died before the study was told
        raise optuna.TrialPruned
    metric = sweep["metric"]["name"]
    reported = len(trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values)

    def report(alive: bool) -> None:
        nonlocal reported
        values = trials.values_of(trials.find_run(folder), metric)
        for step in range(reported, len(values)):
            trial.report(values[step], step + 1)
            reported = step + 1
            if alive and trial.should_prune():
                trial.set_user_attr("ended", "pruned")  # kept: a pruner that is asked again only looks at the next rung
                raise optuna.TrialPruned

    trials.run(sweep["program"], flags, folder, lock, stopping, report)
    try:
        return trials.last_value(trials.find_run(folder), metric)
    except trials.NotLoggedError as error:
        if any(other.intermediate_values for other in trial.study.get_trials(deepcopy=False)):
            raise
        raise runs.UsageError(f"metric {error}; see {folder}") from None


def run_trial(
    study: optuna.Study, trial: optuna.Trial, sweep: dict, flags: dict, folder: Path, lock: TextIO, stopping: Event
) -> None:
    """Runs a trial and tells the study how it ended; a trial that was stopped or killed stays open."""
    value = state = why = None
    try:
        value, state = objective(trial, sweep, flags, folder, lock, stopping), TrialState.COMPLETE
    except trials.Stopped:
        pass
    except optuna.TrialPruned:
        state = TrialState.PRUNED
    except (*DATABASE_ERRORS, files.FullError, runs.UsageError):  # not the trial's fault
        raise
    except (trials.Killed, OSError) as error:  # for want of memory, or as a file system does not answer
        if full := files.full_disk(error, folder):
            raise full from None
        kills = trial.user_attrs.get("kills", 0) + 1
        trial.set_user_attr("kills", kills)
        if kills >= MAX_KILLS:
            state, why = TrialState.FAIL, str(error)
        elif isinstance(error, OSError):
            stopping.wait(2)
    except Exception as error:  # whatever it is, the others continue
        state, why = TrialState.FAIL, str(error) or repr(error)
    trial.set_user_attr("seconds", trials.seconds_of(folder))
    if state:
        for key, text in {"why": why, "ended": state.name.lower()}.items():
            trial.set_user_attr(key, text)
        value, state = outcome_for_sampler(study, sweep, value, state)
        study.tell(trial, value, state=state)
        print(f"trial {trial.number}: {why or trial.user_attrs['ended']}", flush=True)


def outcome_for_sampler(
    study: optuna.Study, sweep: dict, value: float | None, state: TrialState
) -> tuple[float | None, TrialState]:
    """The value and state that a Bayesian sampler is told, as W&B's is.

    A failed trial counts as the worst so far, if there is one: samplers ignore failed trials, and would draw their like
    again.
    """
    if sweep["method"] == "bayes" and state == TrialState.FAIL:
        others = study.get_trials(deepcopy=False)
        known = [other.value for other in others if other.value is not None and math.isfinite(other.value)]
        if known:
            return (min if sweep["metric"]["goal"] == "maximize" else max)(known), TrialState.COMPLETE
    return value, state


def finished_trials(study: optuna.Study) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=FINISHED)


def run_trials(study: optuna.Study, args: Args, sweep: dict, count: int, out: Path) -> bool:
    """Runs trials until the study has `count`; returns whether a signal stopped it."""
    trials.origin()  # before signals are caught: it takes a second

    def work(stopping: Event) -> None:
        while not stopping.is_set():
            if begun := begin_trial(study, args, sweep, count, out):
                trial, flags, folder, lock = begun
                with lock:
                    origin = trials.merge_origins(trial.user_attrs.get("origin", {}), trials.origin())
                    trial.set_user_attr("origin", origin)
                    run_trial(study, trial, sweep, flags, folder, lock, stopping)
                with files.lock_run(out, wait=True):
                    write_results(study, out)
            elif any(trial.state == TrialState.RUNNING for trial in study.get_trials(deepcopy=False)):
                stopping.wait(2)  # its process may die, and then it is ours
            else:
                return

    return trials.in_parallel(work, args.jobs)


# RESULTS


def write_results(study: optuna.Study, out: Path) -> None:
    """Writes results.csv, a row for each finished trial; parallel.png (two trials or more), importance.png (four)."""
    finished = finished_trials(study)
    names = list(dict.fromkeys(name for trial in finished for name in trial.params))
    metric, goal = (study.user_attrs["sweep"]["metric"][key] for key in ("name", "goal"))
    rows, valued = [], []
    for trial in finished:
        value = None if trial.user_attrs["ended"] == "fail" else trial.value
        if value is not None and math.isfinite(value):
            valued.append(trial)
        row = {"trial": trial.number, "state": trial.user_attrs["ended"], metric: value, "goal": goal}
        row |= {name: trial.params.get(name) for name in names} | {"logged": len(trial.intermediate_values)}
        row |= {"seconds": round(trial.user_attrs["seconds"]), "why": trial.user_attrs.get("why")}
        rows.append(row | trial.user_attrs["origin"])
    if not rows:
        return
    records.write_rows(out / "results.csv", rows)
    drawn = optuna.create_study(study_name=study.study_name, direction=goal)  # Optuna draws complete trials only
    drawn.add_trials(
        optuna.trial.create_trial(params=trial.params, distributions=trial.distributions, value=trial.value)
        for trial in valued
    )
    varied = [name for name in names if len({str(trial.params.get(name)) for trial in valued}) > 1]
    if len(valued) < 2 or not varied:
        return
    options, pictures = {"params": varied, "target_name": metric}, optuna.visualization.matplotlib
    draw(out / "parallel.png", pictures.plot_parallel_coordinate, drawn, **options)
    if len({trial.value for trial in valued}) > 1 and len(varied) > 1 and len(valued) >= 4:
        # No target is given: with one, PED-ANOVA takes the lowest values for the best, whatever the goal.
        options["evaluator"] = optuna.importance.PedAnovaImportanceEvaluator()
        draw(out / "importance.png", pictures.plot_param_importances, drawn, **options)


def draw(path: Path, plot: Callable, study: optuna.Study, **options) -> None:
    """Writes one of Optuna's plots, in a colour map that colour-blind readers can read too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        plot(study, **options)
    figure = plt.gcf()
    for axis in figure.axes:
        axis.set_facecolor("white")
        for lines in axis.collections:
            lines.set(cmap="cividis_r", linewidth=2)
        if axis.get_yscale() == "log":  # its default formatter writes TeX
            axis.yaxis.set(major_formatter=LogFormatter(), minor_formatter=LogFormatter(minor_thresholds=(1, 0.4)))
    figure.axes[0].set_title("", loc="left")
    figure.axes[0].set_title(f"{study.study_name}, {len(study.trials)} trials")
    figure.set_size_inches(9, 5)
    with files.atomic_write(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120, bbox_inches="tight")
    plt.close("all")


# MAIN


def main(args: Args) -> None:
    """Runs trials until the study has enough."""
    sweep = read_sweep(args.sweep, args.set)
    check_values(sweep)
    count = args.count or sweep.get("run_cap") or (len(grid_cells(sweep)) if sweep["method"] == "grid" else 0)
    check(count > 0, f"--count 0: SWEEP {args.sweep} is no grid and has no run_cap, give a number of trials")
    name = Path(args.sweep).stem
    out = Path(args.out or f"runs/sweeps/{name}").absolute()
    files.make_folder(out, "--out")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with files.lock_run(out, wait=True):
            study = open_study(args, sweep, name, out)
        stopped = run_trials(study, args, sweep, count, out)
        with files.lock_run(out, wait=True):
            write_results(study, out)  # also of a trial whose process died before it could
    except Exception as error:
        if full := files.full_disk(error, out):
            raise files.FullError(f"{full}; open trials remain, repeat the command to continue") from None
        if not isinstance(error, DATABASE_ERRORS):
            raise
        why = " ".join(str(error).split())[:200]
        raise files.FailedError(f"the study's database does not answer ({why}); repeat the command") from None
    if stopped:
        print("stopped; repeat the command to continue")
    if (out / "results.csv").exists():
        print(out / "results.csv")
    finished = finished_trials(study)
    failures = [trial for trial in finished if trial.user_attrs["ended"] == "fail"]
    failed = {f"trial {trial.number}": trial.user_attrs["why"] for trial in failures}
    if not stopped:
        trials.report_failures(failed, len(finished), out / "results.csv")


if __name__ == "__main__":
    runs.cli(Args, main)
