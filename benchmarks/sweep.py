"""Runs a W&B sweep file without a server, on Optuna: grid, random or Bayesian, several trials at a time. Try:

    python benchmarks/sweep.py sweeps/coinrun_ppo_grid.yaml --jobs 2
    python benchmarks/sweep.py sweeps/doorgym_hnppo_bayes.yaml --count 20 --storage postgresql://user@host/studies

A study lives in its storage: killed and started again it goes on where it was, trials that were under way from their
last checkpoint; any number of these processes, on any number of machines with one file system, may share it.
"""

import importlib.util
import itertools
import os
import platform
import signal
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import optuna
import records  # the file beside this one; it makes the repository's modules importable
import trials
import tyro
import yaml
from optuna.storages import RetryHeartbeatStaleTrialCallback as Retry
from optuna.trial import TrialState

from common import runs
from common.runs import check

mpl.use("Agg")
import matplotlib.pyplot as plt

warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)

OVER = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
RANGES = ("int_uniform", "uniform", "q_uniform", "log_uniform_values")


@dataclass(frozen=True)
class Args:
    sweep: tyro.conf.Positional[str]
    """a sweep file of W&B's kind"""
    count: int = 0
    """stop when the study has as many trials, failed ones included; 0 for all of a grid"""
    jobs: int = 1
    """trials of this process at a time"""
    out: str = ""
    """folder of the study, its runs and results; by default runs/sweeps/<name of the file>"""
    storage: str = ""
    """Optuna's storage, such as sqlite:///study.db or postgresql://...; by default study.db in the folder"""
    set: tuple[str, ...] = ()
    """flags with a value that each trial gets instead of the file's, such as total_timesteps=100000"""
    sampler: Literal["auto", "random", "tpe", "gp"] = "auto"
    """of method bayes; auto is tpe, and gp wants PyTorch"""
    seed: int = 0
    """of the sampler"""
    grace_period: int = 60
    """seconds without a sign of life after which another process takes over a trial"""


# THE SWEEP FILE


def read_sweep(path: str, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    """A sweep file with flags overridden; raises UsageError if it is not one that can be run here."""
    try:
        sweep = dict(yaml.safe_load(Path(path).read_text()))
    except (OSError, ValueError, TypeError, yaml.YAMLError):
        raise runs.UsageError(f"SWEEP {path}: give a readable sweep file, such as one in sweeps/") from None
    for key in ("program", "method", "metric", "parameters"):
        check(key in sweep, f"SWEEP {path}: it has no {key}")
    method, rule = sweep["method"], sweep.get("early_terminate", {"type": "hyperband", "min_iter": 1})
    check(method in ("grid", "random", "bayes"), f"SWEEP {path}: method {method}, give grid, random or bayes")
    hyperband = rule.get("type") == "hyperband" and ("min_iter" in rule or {"max_iter", "s"} <= set(rule))
    check(hyperband, f"SWEEP {path}: early_terminate {rule}, give hyperband with min_iter, or max_iter and s")
    sweep["parameters"] |= trials.read_settings(overrides)
    for name, spec in sweep["parameters"].items():
        known = {"value", "values"} & set(spec) or ({"min", "max"} <= set(spec) and kind_of(spec) in RANGES)
        check(bool(known), f"SWEEP {path}: {name} needs value, values, or min and max of {', '.join(RANGES)}")
        check(method != "grid" or "min" not in spec, f"SWEEP {path}: {name} has a range, and a grid takes values")
    trials.check_flags(f"SWEEP {path}", sweep["program"], sweep["parameters"])
    return sweep


def kind_of(spec: dict) -> str:
    whole = all(isinstance(spec[end], int) for end in ("min", "max"))
    return spec.get("distribution", "int_uniform" if whole else "uniform")


def grid_of(sweep: dict) -> list[dict]:
    """The cells of a grid, the last parameter varying fastest: the values of each parameter that has several."""
    values = {name: spec["values"] for name, spec in sweep["parameters"].items() if "values" in spec}
    return [dict(zip(values, cell, strict=True)) for cell in itertools.product(*values.values())]


def suggest(trial: optuna.Trial, name: str, spec: dict) -> Any:
    """A value as W&B would draw it from a parameter's specification."""
    if "value" in spec:
        return spec["value"]
    if "values" in spec:
        return trial.suggest_categorical(name, spec["values"])
    kind, low, high = kind_of(spec), spec["min"], spec["max"]
    if kind == "int_uniform":
        return trial.suggest_int(name, low, high)
    step = spec.get("q", 1) if kind == "q_uniform" else None
    return trial.suggest_float(name, low, high, step=step, log=kind == "log_uniform_values")


def make_sampler(args: Args, sweep: dict) -> optuna.samplers.BaseSampler:
    """Of a grid it draws nothing: its cells are queued."""
    kind = args.sampler if args.sampler != "auto" else "tpe" if sweep["method"] == "bayes" else "random"
    torch = kind != "gp" or importlib.util.find_spec("torch") is not None
    check(torch, "--sampler gp: needs PyTorch (pip install torch), or give tpe")
    samplers = {"random": "RandomSampler", "tpe": "TPESampler", "gp": "GPSampler"}
    return getattr(optuna.samplers, samplers[kind])(seed=args.seed)


def make_pruner(sweep: dict) -> optuna.pruners.BasePruner:
    """W&B's early_terminate. Its Hyperband has a single bracket, which Optuna calls successive halving: whoever is not
    among the best 1/eta goes after min_iter, min_iter eta, min_iter eta^2, ... values of the metric."""
    rule = sweep.get("early_terminate")
    if not rule:
        return optuna.pruners.NopPruner()
    eta = rule.get("eta", 3)
    least = rule.get("min_iter") or max(1, int(rule["max_iter"] / eta ** rule["s"]))
    return optuna.pruners.SuccessiveHalvingPruner(min_resource=least, reduction_factor=eta)


# TRIALS


def run_trial(trial: optuna.Trial, sweep: dict, folder: Path, stopping: threading.Event) -> float:
    """One trial; one that was taken over goes on in its old folder, from its last checkpoint if it has one.

    Raises TrialPruned, RuntimeError if the script fails or never logs the metric, Stopped once `stopping` is set.
    """
    flags = {name: suggest(trial, name, spec) for name, spec in sweep["parameters"].items()}
    folder = Path(trial.user_attrs.get("folder", folder / f"{trial.number:04d}"))
    trial.set_user_attr("folder", str(folder))
    metric, reported = sweep["metric"]["name"], 0

    def look():
        nonlocal reported
        values = trials.values_of(trials.find_run(folder), metric)
        for step in range(reported, len(values)):
            trial.report(values[step], step + 1)
            reported = step + 1
            if process.poll() is None and trial.should_prune():
                raise optuna.TrialPruned

    process = trials.start(sweep["program"], flags, folder)
    trials.wait(process, folder, stopping, look)
    values = trials.values_of(trials.find_run(folder), metric)
    if not values:
        raise RuntimeError(f"{metric} was never logged, see {folder}")
    return values[-1]


def counted(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    """The study's trials, without those that go on as another one."""
    every = study.get_trials(deepcopy=False)
    gone_on = {number for trial in every for number in trial.system_attrs.get("retry_history", [])}
    return [trial for trial in every if trial.number not in gone_on and not trial.user_attrs.get("surplus")]


# RESULTS


def write_results(study: optuna.Study, out: Path) -> None:
    """results.csv (a row each trial that is over), parallel.png, and importance.png where there is enough to tell."""
    over = [trial for trial in counted(study) if trial.state in OVER]
    names = list(dict.fromkeys(name for trial in over for name in trial.params))
    rows = []
    for trial in over:
        row = {"trial": trial.number, "state": trial.state.name.lower(), study.user_attrs["metric"]: trial.value}
        row |= {name: trial.params.get(name) for name in names}
        seconds = (trial.datetime_complete - trial.datetime_start).total_seconds() if trial.datetime_start else 0
        row |= {"logged": len(trial.intermediate_values), "seconds": round(seconds)}
        rows.append(row | {"why": trial.user_attrs.get("why", ""), **trial.user_attrs.get("origin", {})})
    if not rows:
        return
    records.write_rows(out / "results.csv", [dict.fromkeys(max(rows, key=len)) | row for row in rows])
    done = [trial for trial in over if trial.state == TrialState.COMPLETE]
    varied = [name for name in names if len({str(trial.params.get(name)) for trial in done}) > 1]
    if len(done) < 2 or not varied:
        return
    options = {"params": varied, "target": lambda trial: trial.value, "target_name": study.user_attrs["metric"]}
    draw(out / "parallel.png", optuna.visualization.matplotlib.plot_parallel_coordinate, study, **options)
    if len({trial.value for trial in done}) > 1 and len(varied) > 1 and len(done) >= 4:
        options["evaluator"] = optuna.importance.PedAnovaImportanceEvaluator()
        draw(out / "importance.png", optuna.visualization.matplotlib.plot_param_importances, study, **options)


def draw(path: Path, plot: Callable, study: optuna.Study, **options) -> None:
    """Optuna's picture, in colours that go from light to dark for everybody."""
    plot(study, **options)
    figure = plt.gcf()
    for axis in figure.axes:
        axis.set_facecolor("white")
        for lines in axis.collections:
            lines.set(cmap="cividis_r", linewidth=2)
    figure.axes[0].set_title(study.study_name)
    figure.set_size_inches(9, 5)
    figure.savefig(temporary := path.with_suffix(".tmp"), format="png", dpi=120, bbox_inches="tight")
    temporary.replace(path)
    plt.close("all")


# MAIN


def open_study(args: Args, sweep: dict, name: str, out: Path) -> optuna.Study:
    """Creates the study, with all cells of a grid queued, or opens it; raises UsageError if it is of another sweep."""
    url = args.storage or f"sqlite:///{out / 'study.db'}"
    try:
        storage = optuna.storages.RDBStorage(
            url, heartbeat_interval=max(1, args.grace_period // 3), grace_period=args.grace_period,
            heartbeat_stale_trial_callback=Retry(),
            engine_kwargs={"connect_args": {"timeout": 60}} if url.startswith("sqlite") else None,
        )  # fmt: skip
    except Exception as error:  # SQLAlchemy and drivers raise many kinds
        raise runs.UsageError(f"--storage {url}: cannot be opened ({str(error).splitlines()[0][:100]})") from None
    options = {"study_name": name, "storage": storage, "sampler": make_sampler(args, sweep)}
    options["pruner"] = make_pruner(sweep)
    try:
        study = optuna.create_study(**options, direction=sweep["metric"].get("goal", "minimize"))
        study.set_user_attr("metric", sweep["metric"]["name"])
        study.set_user_attr("sweep", sweep)
    except optuna.exceptions.DuplicatedStudyError:
        study = optuna.load_study(**options)
        for _ in range(60):  # another process may be about to queue the grid
            if study.user_attrs.get("queued"):
                break
            time.sleep(0.5)
        same = study.user_attrs.get("sweep", sweep) == sweep
        check(same, f"SWEEP {args.sweep}: {url} has a study {name} of another file or other --set, give another --out")
    if not study.user_attrs.get("queued"):
        for i, cell in enumerate(grid_of(sweep)) if sweep["method"] == "grid" else ():
            study.enqueue_trial(cell, user_attrs={"cell": i}, skip_if_exists=True)
        study.set_user_attr("queued", True)
    return study


def main(args: Args) -> optuna.Study:
    """Runs trials until the study has enough; returns it."""
    check(args.jobs >= 1, f"--jobs {args.jobs}: must be 1 or more")
    check(args.count >= 0, f"--count {args.count}: must be 0 or more")
    check(args.grace_period >= 3, f"--grace-period {args.grace_period}: must be 3 or more")
    sweep = read_sweep(args.sweep, args.set)
    grid = sweep["method"] == "grid"
    check(args.count > 0 or grid, "--count 0: has no end unless the sweep is a grid, give a number of trials")
    count = min(args.count or len(grid_of(sweep)), len(grid_of(sweep))) if grid else args.count
    name = Path(args.sweep).stem
    out = Path(args.out or f"runs/sweeps/{name}").absolute()
    out.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = open_study(args, sweep, name, out)
    stopping, lock, origin = threading.Event(), threading.Lock(), trials.origin()

    def room() -> bool | None:
        """Whether another trial is to be begun; None: not now, but one that runs may fail to come to an end."""
        optuna.storages.fail_stale_trials(study)
        known = counted(study)
        waiting = [trial for trial in known if trial.state == TrialState.WAITING]
        retries = [trial for trial in waiting if "retry_history" in trial.system_attrs]
        begun = len(known) - len(waiting) + len(retries)
        if retries or (begun < count and (waiting or not grid)):
            return True
        return None if any(trial.state == TrialState.RUNNING for trial in known) else False

    def objective(trial: optuna.Trial) -> float:
        trial.set_user_attr("origin", origin)
        trial.set_user_attr("worker", f"{platform.node()}:{os.getpid()}")
        trial.set_user_attr("stopped", False)
        if grid and "cell" not in trial.user_attrs:  # another process took the last
            trial.set_user_attr("surplus", True)
            raise optuna.TrialPruned
        try:
            return run_trial(trial, sweep, out, stopping)
        except trials.Stopped:
            trial.set_user_attr("stopped", True)
            raise
        except optuna.TrialPruned:
            raise
        except Exception as error:
            trial.set_user_attr("why", str(error) or repr(error))
            raise

    def end_trial(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if trial.user_attrs.get("stopped"):
            Retry()(study, trial)  # queued again, for whoever goes on with the study
        with lock:
            write_results(study, out)

    def work() -> None:
        while not stopping.is_set():
            with lock:
                more = room()
            if more is False:
                return
            if more is None:
                stopping.wait(2)
            else:
                study.optimize(objective, n_trials=1, catch=(Exception,), callbacks=[end_trial])

    threads = [threading.Thread(target=work) for _ in range(args.jobs)]
    old = {number: signal.signal(number, lambda *_: stopping.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, handler in old.items():
        signal.signal(number, handler)
    write_results(study, out)
    if stopping.is_set():
        print("stopped; the same command goes on")
    print(out / "results.csv")
    return study


if __name__ == "__main__":
    runs.cli(Args, main)
