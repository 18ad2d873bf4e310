"""Runs a W&B sweep file without a server, on Optuna: grid, random or Bayesian, several trials at a time. Try:

    python -m experiments.sweep sweeps/coinrun_ppo_grid.yaml --jobs 2
    python -m experiments.sweep sweeps/doorgym_hnppo_bayes.yaml --count 20 --storage postgresql://user@host/studies

A study lives in its storage: killed and started again it continues where it was, trials that were under way from their
last checkpoint. Any number of these processes may share it, also on several machines that share its folder: a trial is
locked by a file there, so that one whose process has died is known and taken over.
"""

import contextlib
import importlib.util
import io
import itertools
import math
import os
import platform
import time
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Annotated, Any, Literal, NotRequired, Required, TextIO

import matplotlib as mpl
import numpy as np
import optuna
import tyro
from annotated_types import Interval
from optuna.trial import TrialState
from pydantic import AfterValidator, ConfigDict, Field
from sqlalchemy.exc import SQLAlchemyError
from typing_extensions import TypedDict

from common import files, runs
from common.files import check
from common.flags import NonNegativeInt
from experiments import records, trials

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import LogFormatter

plt.rcParams["text.parse_math"] = False  # names are no formulas, whatever is in them
OVER = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
RANGES = ("int_uniform", "uniform", "q_uniform", "log_uniform_values")
MAX_CELLS = 1000


@dataclass(frozen=True)
class Args:
    sweep: tyro.conf.Positional[str]
    """a sweep file of W&B's kind"""
    count: Annotated[int, Interval(ge=0, le=1_000_000)] = 0
    """stop when the study has this many trials, failed ones too; 0 for the file's run_cap or else a whole grid"""
    jobs: Annotated[int, Interval(ge=1, le=trials.MAX_JOBS)] = 1
    """trials of this process at a time"""
    out: str = ""
    """folder of the study, its runs and results; by default runs/sweeps/<name of the file>"""
    storage: str = ""
    """Optuna's storage, such as sqlite:///study.db or postgresql://...; by default study.db in the folder"""
    set: tuple[str, ...] = ()
    """flags with a value that each trial gets instead of the file's, such as total_timesteps=100000"""
    sampler: Literal["auto", "random", "tpe", "gp"] = "auto"
    """of method bayes; auto is tpe, and gp wants PyTorch"""
    seed: NonNegativeInt = 0
    """of the sampler"""


class NeverLoggedError(runs.UsageError):
    """No run of the study has logged the metric, so that none will."""


MAX_KILLS = 3  # of one trial, then it has failed
GONE = optuna.exceptions.StorageInternalError, SQLAlchemyError  # what the study's database raises where it is not there

# THE SWEEP FILE


def number(value: Any) -> Any:
    """A number that a float holds."""
    if isinstance(value, bool) or not (isinstance(value, (int, float)) and abs(value) <= LARGEST):
        raise ValueError("give a number (to YAML, 1e-4 is text and 1.0e-4 a number)")
    return value


def scalar(value: Any) -> Any:
    """A value that a flag can have, and JSON."""
    if not isinstance(value, (str, bool)):
        try:
            number(value)
        except ValueError:
            raise ValueError("give a number, text, true or false") from None
    return value


def fixed(value: Any) -> Any:
    """One of them, or a list."""
    return [scalar(x) for x in value] if isinstance(value, list) else scalar(value)


def in_order(spec: dict) -> dict:
    """A parameter that has a value, values, or a range that values can be drawn from."""
    if not ({"value", "values"} & set(spec) or {"min", "max"} <= set(spec)):
        raise ValueError("give it a value, values, or min and max")
    if not {"value", "values"} & set(spec):
        low, high, kind, q = spec["min"], spec["max"], kind_of(spec), spec.get("q", 1)
        if kind not in RANGES:
            raise ValueError(f"its distribution is {kind}; with min and max give one of {', '.join(RANGES)}")
        if low > high:
            raise ValueError("min must not be above max")
        if kind == "int_uniform" and not (isinstance(low, int) and isinstance(high, int)):
            raise ValueError("int_uniform takes whole numbers")
        if kind == "log_uniform_values" and low <= 0:
            raise ValueError("min must be above 0 for a logarithm")
        if "q" in spec and kind != "q_uniform":
            raise ValueError(f"q is for the distribution q_uniform, this is {kind}")
        if kind == "q_uniform" and not (high - low) / LARGEST < q <= high - low:
            raise ValueError("q must be above 0, at most max - min")
    return spec


LARGEST = 2**53  # a float holds whole numbers up to there
NOTHING_ELSE = ConfigDict(extra="forbid")  # a misspelt key would change what is drawn
Number = Annotated[Any, AfterValidator(number)]


class Parameter(TypedDict, total=False):
    """How a flag's value is found."""

    __pydantic_config__ = NOTHING_ELSE
    value: Annotated[Any, AfterValidator(fixed)]
    values: Annotated[list[Annotated[Any, AfterValidator(scalar)]], Field(min_length=1)]
    min: Number
    max: Number
    distribution: str
    q: Number


class Metric(TypedDict):
    """What trials are compared by."""

    __pydantic_config__ = NOTHING_ELSE
    name: str
    goal: NotRequired[Literal["minimize", "maximize"]]


class EarlyTerminate(TypedDict, total=False):
    """When a trial is given up."""

    __pydantic_config__ = NOTHING_ELSE
    type: Required[Literal["hyperband"]]
    min_iter: Annotated[int, Field(ge=1, le=LARGEST)]
    max_iter: Annotated[int, Field(ge=1, le=LARGEST)]
    s: Annotated[int, Field(ge=0, le=100)]
    eta: Annotated[int, Field(ge=2, le=1000)]
    strict: bool


def in_time(rule: dict | None) -> dict | None:
    """A rule that says when trials are first looked at."""
    if rule and not ("min_iter" in rule or {"max_iter", "s"} <= set(rule)):
        raise ValueError("give hyperband with min_iter, or max_iter and s")
    return rule


class Sweep(TypedDict):
    """A sweep file. What only W&B's server needs is let through: names, the command, and Hyperband's `strict`."""

    __pydantic_config__ = NOTHING_ELSE
    name: NotRequired[Any]
    description: NotRequired[Any]
    project: NotRequired[Any]
    entity: NotRequired[Any]
    command: NotRequired[Any]
    run_cap: NotRequired[Annotated[int, Field(ge=1, le=1_000_000)]]
    program: str
    method: Literal["grid", "random", "bayes"]
    metric: Metric
    parameters: dict[str, Annotated[Parameter, AfterValidator(in_order)]]
    early_terminate: NotRequired[Annotated[EarlyTerminate | None, AfterValidator(in_time)]]


def without_server(sweep: dict) -> dict:
    """A sweep without the keys that W&B's server alone reads, whose values may be of any kind."""
    return {k: v for k, v in sweep.items() if k not in ("name", "description", "project", "entity", "command")}


def read_sweep(path: str, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    """A sweep file with flags overridden; raises UsageError if it is not one that can be run here."""
    sweep = files.read(path, Sweep, "SWEEP", "give a sweep file such as those in sweeps/")
    command = sweep.get("command")
    own = [word for word in (command if isinstance(command, list) else ()) if str(word).startswith("--")]
    check(not own, f"SWEEP {path}: command has {' '.join(map(str, own))}; give that among the parameters, as a value")
    sweep = without_server(sweep)
    settings = trials.read_settings(overrides)
    trials.check_flags(f"SWEEP {path}", sweep["program"], sweep["parameters"])
    trials.check_flags("--set", sweep["program"], settings)
    sweep["parameters"] |= {name: {"value": value} for name, value in settings.items()}
    if sweep["method"] == "grid":
        for name, spec in sweep["parameters"].items():
            in_grid = {"value", "values"} & set(spec)
            check(bool(in_grid), f"SWEEP {path}: {name} has a range, and a grid takes values")
        cells = math.prod(map(len, choices(sweep).values()))
        check(cells <= MAX_CELLS, f"SWEEP {path}: its grid has {cells:,} cells, give at most {MAX_CELLS:,}")
    return sweep | {"metric": {"goal": "minimize"} | sweep["metric"]}


def kind_of(spec: dict) -> str:
    whole = all(isinstance(spec[end], int) for end in ("min", "max"))
    return spec.get("distribution", "int_uniform" if whole else "uniform")


def is_whole(spec: dict) -> bool:
    """Whether a range's values are whole numbers, which a script is to be given without a point."""
    steps = kind_of(spec) == "q_uniform" and all(isinstance(spec.get(name, 1), int) for name in ("min", "max", "q"))
    return steps or kind_of(spec) == "int_uniform"


def choices(sweep: dict) -> dict[str, list]:
    """The values of each parameter that has several."""
    return {k: spec["values"] for k, spec in sweep["parameters"].items() if "values" in spec and "value" not in spec}


def grid_of(sweep: dict) -> list[dict]:
    """The cells of a grid, the last parameter varying fastest: the values of each parameter that has several."""
    values = choices(sweep)
    return [dict(zip(values, cell, strict=True)) for cell in itertools.product(*values.values())]


def values_to_ask(spec: dict) -> list:
    """The values that a parameter can have, or the ends of its range, as they are drawn."""
    if "value" in spec or "values" in spec:
        return [spec["value"]] if "value" in spec else spec["values"]
    ends = [spec["min"], spec["max"]]
    if kind_of(spec) == "q_uniform":  # its last step may end below max
        q = spec.get("q", 1)
        ends[1] = ends[0] + (ends[1] - ends[0]) // q * q
    return ends if is_whole(spec) else [float(end) for end in ends]


def ask_script(sweep: dict) -> None:
    """Ends as the script would, unless it takes each value of a parameter at least with the first or with the last
    values of all others (some cells of a grid may be such as it refuses)."""
    values = {name: values_to_ask(spec) for name, spec in sweep["parameters"].items()}
    first, last = ({name: some[i] for name, some in values.items()} for i in (0, -1))
    trials.ask_script(sweep["program"], first)
    for name, some in values.items():
        for value in some[1:]:
            try:
                with contextlib.redirect_stderr(io.StringIO()):
                    trials.ask_script(sweep["program"], last | {name: value})
            except SystemExit:
                trials.ask_script(sweep["program"], first | {name: value})


def suggest(trial: optuna.Trial, name: str, spec: dict) -> Any:
    """A value as W&B would draw it from a parameter's specification, but q_uniform's steps begin at its min."""
    if "value" in spec:
        return spec["value"]
    if "values" in spec:
        return trial.suggest_categorical(name, spec["values"])
    kind = kind_of(spec)
    low, high = spec["min"], spec["max"]
    step = spec.get("q", 1) if kind == "q_uniform" else None
    if is_whole(spec):
        return trial.suggest_int(name, low, high, step=step or 1)
    return trial.suggest_float(name, low, high, step=step, log=kind == "log_uniform_values")


def make_sampler(args: Args, sweep: dict, trial: int) -> optuna.samplers.BaseSampler:
    """A sampler for one trial, so that a process that joins or continues the study repeats no draw."""
    kind = args.sampler if args.sampler != "auto" else "tpe" if sweep["method"] == "bayes" else "random"
    torch = kind != "gp" or importlib.util.find_spec("torch") is not None
    check(torch, "--sampler gp: needs PyTorch (pip install torch), or give tpe")
    samplers = {"random": "RandomSampler", "tpe": "TPESampler", "gp": "GPSampler"}
    seed = int(np.random.SeedSequence([args.seed, trial]).generate_state(1)[0])
    return getattr(optuna.samplers, samplers[kind])(seed=seed)


class Halving(optuna.pruners.SuccessiveHalvingPruner):
    """Optuna's, with a last rung."""

    def __init__(self, last: float, **how):
        super().__init__(**how)
        self._last = last

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        return (trial.last_step or 0) <= self._last and super().prune(study, trial)


def make_pruner(sweep: dict) -> optuna.pruners.BasePruner:
    """W&B's early_terminate. Its Hyperband has a single bracket, which Optuna calls successive halving: a trial that is
    not among the best 1/eta ends after min_iter, min_iter eta, min_iter eta^2, ... values of the metric; with max_iter
    and s after max_iter/eta^s, ... max_iter/eta. Of n trials Optuna keeps max(1, n // eta), W&B one more."""
    rule = sweep.get("early_terminate")
    if not rule:
        return optuna.pruners.NopPruner()
    eta = rule.get("eta", 3)
    if "min_iter" in rule:
        return optuna.pruners.SuccessiveHalvingPruner(min_resource=rule["min_iter"], reduction_factor=eta)
    least = max(1, int(rule["max_iter"] / eta ** rule["s"]))
    return Halving(rule["max_iter"] / eta, min_resource=least, reduction_factor=eta)


# TRIALS


def run_trial(
    trial: optuna.Trial, sweep: dict, flags: dict, *, folder: Path, lock: TextIO, stopping: Event,
    line: trials.ProgressLine,
) -> float:  # fmt: skip
    """One trial, or the rest of one that is in its folder already. Returns the last value of the metric.

    Raises TrialPruned; Stopped, and the trial stays open; RuntimeError if the script fails or never logs the metric,
    NeverLoggedError if no other trial's has either.
    """
    if trial.user_attrs.get("ended") == "pruned":  # its process died before the study was told
        raise optuna.TrialPruned
    metric = sweep["metric"]["name"]
    reported = len(trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values)

    def look(alive: bool):
        nonlocal reported
        line.look(folder, alive)
        values = trials.values_of(trials.find_run(folder), metric)
        for step in range(reported, len(values)):
            trial.report(values[step], step + 1)
            reported = step + 1
            if alive and trial.should_prune():
                trial.set_user_attr("ended", "pruned")  # asked again, the pruner would compare it at its next rung
                raise optuna.TrialPruned

    trials.run(sweep["program"], flags, folder, lock, stopping=stopping, look=look)
    values = trials.values_of(trials.find_run(folder), metric)
    if not values and not any(other.intermediate_values for other in trial.study.get_trials(deepcopy=False)):
        logged = " ".join(trials.logged_names(trials.find_run(folder)))
        raise NeverLoggedError(f"metric {metric}: {folder} ended well and has none; give one that it has: {logged}")
    if not (values and math.isfinite(values[-1])):
        raise RuntimeError(f"{metric} {f'is {values[-1]}' if values else 'was never logged'}, see {folder}")
    return values[-1]


def begin_trial(study: optuna.Study, args: Args, sweep: dict, count: int, out: Path) -> tuple | None:
    """A trial that nobody is at, else a new one if there are less than `count`: with its flags, folder and lock."""
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
        if chosen is None and begun < count and (begun < len(known) or sweep["method"] != "grid"):
            study.sampler = make_sampler(args, sweep, begun)
            chosen = study.ask()
            lock = files.lock_run(out / f"{chosen.number:04d}", wait=True)
        if chosen is None:
            return None
        try:
            flags = {name: suggest(chosen, name, spec) for name, spec in sweep["parameters"].items()}
        except BaseException:
            lock.close()
            raise
        return chosen, flags, out / f"{chosen.number:04d}", lock


def end_trial(study: optuna.Study, trial: optuna.Trial, sweep: dict, flags: dict, **where) -> None:
    """Runs a trial and tells the study what came of it; one that was stopped stays open."""
    try:
        value, state = run_trial(trial, sweep, flags, **where), TrialState.COMPLETE
    except trials.Stopped:
        value, state = None, None
    except optuna.TrialPruned:
        value, state = None, TrialState.PRUNED
    except (*GONE, files.FullError, NeverLoggedError):  # the trial is well and open
        raise
    except (trials.Killed, OSError) as error:
        if full := files.full_disk(error, where["folder"]):
            raise full from None
        # For want of memory, or as a file system does not answer: it resumes from its checkpoint, though not for ever.
        kills = trial.user_attrs.get("kills", 0) + 1
        value, state = None, None
        trial.set_user_attr("kills", kills)
        if kills >= MAX_KILLS:
            state = TrialState.FAIL
            trial.set_user_attr("why", str(error))
        elif isinstance(error, OSError):
            where["stopping"].wait(2)
    except Exception as error:  # whatever it is, the others continue
        value, state = None, TrialState.FAIL
        trial.set_user_attr("why", str(error) or repr(error))
    clock = trials.values_of(trials.find_run(where["folder"]), "seconds")  # the run's own, which continues over resumes
    trial.set_user_attr("seconds", clock[-1] if clock else 0)
    if state:
        trial.set_user_attr("ended", state.name.lower())
        value, state = as_told(study, trial, sweep, value, state)
        study.tell(trial, value, state=state)
        where["line"].look(where["folder"], False)


def as_told(
    study: optuna.Study, trial: optuna.Trial, sweep: dict, value: float | None, state: TrialState
) -> tuple[float | None, TrialState]:
    """What a Bayesian sampler is to know of a trial's end; W&B's knows as much.

    One that failed counts as the worst so far, where there is one: samplers leave out failed trials, and would draw
    their like again. Optuna's Gaussian process leaves out pruned ones too, so these count with their last value.
    """
    if sweep["method"] != "bayes":
        return value, state
    others = study.get_trials(deepcopy=False)
    if state == TrialState.FAIL:
        known = [other.value for other in others if other.value is not None and math.isfinite(other.value)]
        if known:
            return (min if sweep["metric"]["goal"] == "maximize" else max)(known), TrialState.COMPLETE
    if state == TrialState.PRUNED and isinstance(study.sampler, optuna.samplers.GPSampler):
        values = others[trial.number].intermediate_values
        if math.isfinite(last := values[max(values)]):
            return last, TrialState.COMPLETE
    return value, state


def end_of(trial: optuna.trial.FrozenTrial) -> str:
    """How a trial that is over ended: complete, pruned or fail, whatever a sampler was told of it."""
    return trial.user_attrs.get("ended", trial.state.name.lower())


# RESULTS


def write_results(study: optuna.Study, out: Path) -> None:
    """results.csv (a row each trial that is over), parallel.png, and importance.png where there is enough to tell."""
    over = [trial for trial in study.get_trials(deepcopy=False) if trial.state in OVER]
    names = list(dict.fromkeys(name for trial in over for name in trial.params))
    metric, goal = (study.user_attrs["sweep"]["metric"][key] for key in ("name", "goal"))
    rows = []
    for trial in over:
        value = None if end_of(trial) == "fail" else trial.value
        row = {"trial": trial.number, "state": end_of(trial), metric: value, "goal": goal}
        row |= {name: trial.params.get(name) for name in names} | {"logged": len(trial.intermediate_values)}
        row |= {"seconds": round(trial.user_attrs["seconds"]), "why": trial.user_attrs.get("why", "")}
        rows.append(row | trial.user_attrs["origin"])
    if not rows:
        return
    records.write_rows(out / "results.csv", rows)
    # Optuna draws trials that came to their end. A pruned one tells something too: the last value that it had.
    valued = [
        trial for trial in over if trial.value is not None and math.isfinite(trial.value) and end_of(trial) != "fail"
    ]
    drawn = optuna.create_study(study_name=study.study_name, direction=goal)
    drawn.add_trials(
        optuna.trial.create_trial(params=trial.params, distributions=trial.distributions, value=trial.value)
        for trial in valued
    )
    varied = [name for name in names if len({str(trial.params.get(name)) for trial in valued}) > 1]
    if len(valued) < 2 or not varied:
        return
    options, pictures = {"params": varied, "target_name": metric}, optuna.visualization.matplotlib
    draw(out / "parallel.png", pictures.plot_parallel_coordinate, drawn, target=lambda trial: trial.value, **options)
    if len({trial.value for trial in valued}) > 1 and len(varied) > 1 and len(valued) >= 4:
        # Without a target it is of what the best trials have in common; with one, of those with the least of it.
        options["evaluator"] = optuna.importance.PedAnovaImportanceEvaluator()
        draw(out / "importance.png", pictures.plot_param_importances, drawn, **options)


def draw(path: Path, plot: Callable, study: optuna.Study, **options) -> None:
    """Optuna's picture, in colours that go from light to dark for everybody."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        plot(study, **options)
    figure = plt.gcf()
    for axis in figure.axes:
        axis.set_facecolor("white")
        for lines in axis.collections:
            lines.set(cmap="cividis_r", linewidth=2)
        if axis.get_yscale() == "log":  # whose numbers would be formulas
            axis.yaxis.set(major_formatter=LogFormatter(), minor_formatter=LogFormatter(minor_thresholds=(1, 0.4)))
    figure.axes[0].set_title("", loc="left")
    figure.axes[0].set_title(f"{study.study_name}, {len(study.trials)} trials")
    figure.set_size_inches(9, 5)
    with files.atomic_write(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120, bbox_inches="tight")
    plt.close("all")


# MAIN


class Here(TypedDict):
    """study.json: which study a folder is of."""

    study: str
    id: str


def open_study(args: Args, sweep: dict, name: str, out: Path) -> optuna.Study:
    """Creates the study, with all cells of a grid queued, or opens it; raises UsageError if it is of another sweep.

    One process at a time: SQLite's tables are created here too.
    """
    url = args.storage or f"sqlite:///{out / 'study.db'}"
    try:
        patient = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else None
        storage = optuna.storages.RDBStorage(url, engine_kwargs=patient)
    except Exception as error:  # SQLAlchemy and drivers raise many kinds
        raise runs.UsageError(f"--storage {url}: cannot be opened ({files.first_line(error)[:100]})") from None
    own = out / "study.json"
    here = {"study": name, "id": str(uuid.uuid4())}
    if own.exists():
        here = files.read(own, Here, "--out", "give another folder")
        check(here["study"] == name, f"--out {out}: has the study {here['study']}, give another folder")
    gone = name not in optuna.get_all_study_names(storage) and any(out.glob("[0-9]*/"))
    check(not gone, f"--out {out}: has trials of a study that is gone, give another folder")
    runs.write_json(own, here)
    options = {"study_name": name, "storage": storage, "pruner": make_pruner(sweep)}
    drawing = {"sampler": args.sampler, "seed": args.seed}
    try:
        study, created = optuna.create_study(**options, direction=sweep["metric"]["goal"]), True
    except optuna.exceptions.DuplicatedStudyError:
        study, created = optuna.load_study(**options), False
    for _ in range(20):  # its creator, if that is in another folder, is about to say where
        if created or "id" in study.user_attrs:
            break
        time.sleep(0.5)
    if "id" not in study.user_attrs:
        for key, value in {"sweep": sweep, "out": str(out), "id": here["id"], **drawing}.items():
            study.set_user_attr(key, value)
    known = study.user_attrs
    check(
        known["id"] == here["id"], f"--out {out}: the study {name} in {url} has its runs in {known['out']}, give that"
    )
    for key, value in drawing.items():
        other = f"--{key} {value}: the study {name} in {url} has {known.get(key)}, give that, or another --out"
        check(known.get(key, value) == value, other)
    same = without_server(known["sweep"]) == sweep  # a study of an earlier version has these keys too
    check(same, f"SWEEP {args.sweep}: {url} has a study {name} of another file or other --set, give another --out")
    if "ready" not in known:
        queued = {trial.user_attrs.get("cell") for trial in study.get_trials(deepcopy=False)}
        for i, cell in enumerate(grid_of(sweep) if sweep["method"] == "grid" else ()):
            if i not in queued:
                study.enqueue_trial(cell, user_attrs={"cell": i})
        study.set_user_attr("ready", True)
    return study


def run_trials(args: Args, sweep: dict, count: int, out: Path, *, stopping: Event) -> optuna.Study:
    """Opens the study and runs trials until it has `count`, or `stopping` is set; returns it. Raises FullError or
    FailedError if the study cannot be written."""
    with files.lock_run(out, wait=True):
        study = open_study(args, sweep, Path(args.sweep).stem, out)
    origin = trials.origin()

    def work() -> None:
        while not stopping.is_set():
            if begun := begin_trial(study, args, sweep, count, out=out):
                trial, flags, folder, lock = begun
                with lock:
                    trial.set_user_attr("origin", trials.joined(trial.user_attrs.get("origin", {}), origin))
                    trial.set_user_attr("worker", f"{platform.node()}:{os.getpid()}")
                    end_trial(study, trial, sweep, flags, folder=folder, lock=lock, stopping=stopping, line=line)
                with files.lock_run(out, wait=True):
                    write_results(study, out)
            elif any(trial.state == TrialState.RUNNING for trial in study.get_trials(deepcopy=False)):
                stopping.wait(2)  # one of those that run may lose its process
            else:
                return

    done = sum(trial.state in OVER for trial in study.get_trials(deepcopy=False))
    try:
        with trials.ProgressLine(study.study_name, count, done) as line:
            trials.in_parallel(work, args.jobs, stopping)
        with files.lock_run(out, wait=True):
            write_results(study, out)  # also of a trial whose process died before it could
    except Exception as error:
        if full := files.full_disk(error, out):
            raise files.FullError(f"{full}; open trials remain, repeat the command to continue") from None
        if not isinstance(error, GONE):
            raise
        why = " ".join(str(error).split())[:200]
        raise files.FailedError(f"the study's database does not answer ({why}); repeat the command") from None
    return study


def main(args: Args) -> optuna.Study:
    """Runs trials until the study has enough; returns it."""
    sweep = read_sweep(args.sweep, args.set)
    ask_script(sweep)
    drawn = args.sampler == "auto" or sweep["method"] == "bayes"
    check(drawn, f"--sampler {args.sampler}: {args.sweep} is of method {sweep['method']}, leave it out")
    make_sampler(args, sweep, 0)  # or it is refused, before the study keeps it
    count = args.count or sweep.get("run_cap", 0)
    check(count > 0 or sweep["method"] == "grid", "--count 0: is for a grid only, give a number of trials")
    count = count or len(grid_of(sweep))
    out = Path(args.out or f"runs/sweeps/{Path(args.sweep).stem}").absolute()
    files.make_folder(out, "--out")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with trials.until_signal() as stopping:
        study = run_trials(args, sweep, count, out, stopping=stopping)
    if stopping.is_set():
        print("stopped; repeat the command to continue")
    if (out / "results.csv").exists():
        print(out / "results.csv")
    over = [trial for trial in study.get_trials(deepcopy=False) if trial.state in OVER]
    failed = [trial for trial in over if end_of(trial) == "fail"]
    whys = {f"trial {trial.number}": trial.user_attrs.get("why", "") for trial in failed}
    if not stopping.is_set():
        trials.report_failures(whys, len(over), out / "results.csv")
    return study


if __name__ == "__main__":
    runs.cli(Args, main)
