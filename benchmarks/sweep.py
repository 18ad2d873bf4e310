"""Runs a W&B sweep file without a server, on Optuna: grid, random or Bayesian, several trials at a time. Try:

python benchmarks/sweep.py sweeps/coinrun_ppo.yaml --jobs 2
python benchmarks/sweep.py sweeps/doorgym_hnppo_bayes.yaml --count 20 --storage postgresql://user@host/studies

A study lives in its storage: killed and started again it goes on where it was, trials that were under way from their last
checkpoint; any number of these processes, on any number of machines, may share one.
"""

import contextlib
import csv
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib as mpl
import optuna
import tyro
import yaml
from optuna.trial import TrialState

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import runs
from common.runs import check

mpl.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parent.parent
OVER = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)


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
    sampler: Literal["auto", "grid", "random", "tpe", "gp"] = "auto"
    """auto is what the file asks for: bayes is Optuna's TPE; gp wants PyTorch"""
    seed: int = 0
    """of the sampler"""
    grace_period: int = 60
    """seconds without a sign of life after which another process takes over a trial"""


# THE SWEEP FILE


def read_sweep(path: str, overrides: tuple[str, ...]) -> dict:
    """A sweep file with flags overridden; raises UsageError."""
    try:
        sweep = dict(yaml.safe_load(Path(path).read_text()))
    except (OSError, ValueError, TypeError, yaml.YAMLError):
        raise runs.UsageError(f"SWEEP {path}: give a readable sweep file, such as one in sweeps/") from None
    for key in ("program", "method", "metric", "parameters"):
        check(key in sweep, f"SWEEP {path}: it has no {key}")
    check((ROOT / sweep["program"]).exists(), f"SWEEP {path}: its program {sweep['program']} is not here")
    for word in overrides:
        name, equals, value = word.partition("=")
        check(bool(name and equals), f"--set {word}: give name=value")
        sweep["parameters"][name.replace("-", "_")] = {"value": yaml.safe_load(value)}
    return sweep


def grid_of(parameters: dict) -> dict[str, list]:
    """The values of each parameter that has several."""
    return {name: spec["values"] for name, spec in parameters.items() if "values" in spec}


def suggest(trial: optuna.Trial, name: str, spec: dict):
    """A value as W&B would draw it from a parameter's specification; raises UsageError."""
    if "value" in spec:
        return spec["value"]
    if "values" in spec:
        return trial.suggest_categorical(name, spec["values"])
    low, high = spec.get("min"), spec.get("max")
    whole = isinstance(low, int) and isinstance(high, int)
    kind = spec.get("distribution", "int_uniform" if whole else "uniform")
    if kind == "int_uniform":
        return trial.suggest_int(name, low, high)
    if kind in ("uniform", "q_uniform"):
        return trial.suggest_float(name, low, high, step=spec.get("q") if kind == "q_uniform" else None)
    if kind == "log_uniform_values":
        return trial.suggest_float(name, low, high, log=True)
    raise runs.UsageError(f"parameter {name}: distribution {kind!r} is none of those that are known here")


def make_sampler(args: Args, sweep: dict) -> optuna.samplers.BaseSampler:
    kind = {"bayes": "tpe"}.get(sweep["method"], sweep["method"]) if args.sampler == "auto" else args.sampler
    if kind == "grid":
        several = [name for name, spec in sweep["parameters"].items() if not {"value", "values"} & set(spec)]
        check(not several, f"SWEEP {args.sweep}: a grid has values, and {', '.join(several)} has a range")
        return optuna.samplers.GridSampler(grid_of(sweep["parameters"]), seed=args.seed)
    samplers = {
        "random": optuna.samplers.RandomSampler,
        "tpe": optuna.samplers.TPESampler,
        "gp": optuna.samplers.GPSampler,
    }
    check(kind in samplers, f"SWEEP {args.sweep}: method {kind!r}, give grid, random or bayes")
    return samplers[kind](seed=args.seed)


def make_pruner(sweep: dict) -> optuna.pruners.BasePruner:
    """W&B's early_terminate: Hyperband counts how often the metric was logged."""
    rule = sweep.get("early_terminate")
    if not rule:
        return optuna.pruners.NopPruner()
    return optuna.pruners.HyperbandPruner(
        min_resource=rule.get("min_iter", 1),
        max_resource=rule.get("max_iter", "auto"),
        reduction_factor=rule.get("eta", 3),
    )


# TRIALS


def values_of(path: Path, metric: str) -> Iterator[float]:
    """What a run has logged of a metric so far."""
    lines = path.read_text().splitlines() if path.exists() else []
    for line in lines:
        try:
            content = json.loads(line)
        except ValueError:  # being written
            return
        if metric in content:
            yield content[metric]


def words_of(parameters: dict) -> list[str]:
    """Flags as `wandb agent` gives them: --name=value."""
    return [f"--{name}={value}" for name, value in parameters.items()]


def find_run(folder: Path) -> Path | None:
    found = sorted(path.parent for path in folder.glob("*/args.json"))
    return found[-1] if found else None


class Sweep:
    """Runs trials of a sweep as processes; `stop()` ends those that run, each with a checkpoint."""

    def __init__(self, sweep: dict, folder: Path):
        self.sweep, self.folder, self.stopping = sweep, folder, threading.Event()

    def objective(self, trial: optuna.Trial) -> float:
        """One trial; a trial that was taken over goes on in its old run directory, if it has a checkpoint."""
        given = {name: suggest(trial, name, spec) for name, spec in self.sweep["parameters"].items()}
        folder = Path(trial.user_attrs.get("folder", self.folder / f"{trial.number:04d}"))
        folder.mkdir(parents=True, exist_ok=True)
        trial.set_user_attr("folder", str(folder))
        command = [sys.executable, str(ROOT / self.sweep["program"]), *words_of({"wandb_mode": "disabled"} | given)]
        run = find_run(folder)
        if run and any((run / "checkpoints").glob("[0-9]*")):
            command += ["--resume", str(run)]
        else:
            command += ["--run_dir", str(folder)]
        with (folder / "output.txt").open("a") as output:
            process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            self.watch(trial, process, folder)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait()
        values = list(values_of(find_run(folder) / "metrics.jsonl", self.sweep["metric"]["name"]))
        if not values:
            raise RuntimeError(f"{self.sweep['metric']['name']} was never logged, see {folder}")
        return values[-1]

    def watch(self, trial: optuna.Trial, process: subprocess.Popen, folder: Path) -> None:
        """Reports what a process logs until it ends; raises TrialPruned, RuntimeError or Stopped."""
        reported = 0
        while True:
            over = process.poll() is not None
            run = find_run(folder)
            if run:
                values = list(values_of(run / "metrics.jsonl", self.sweep["metric"]["name"]))
                for step in range(reported, len(values)):
                    trial.report(values[step], step + 1)
                reported = max(reported, len(values))
                if values and not over and trial.should_prune():
                    raise optuna.TrialPruned
            if self.stopping.is_set():
                raise KeyboardInterrupt
            if over:
                if process.returncode:
                    last = (folder / "output.txt").read_text().strip().splitlines()[-1:]
                    raise RuntimeError(f"exit code {process.returncode}: {' '.join(last)}")
                return
            time.sleep(0.5)


# RESULTS


def write_results(study: optuna.Study, out: Path) -> None:
    """results.csv (a row each trial that is over), parallel.png, and importance.png where there is enough to tell."""
    trials = [trial for trial in study.get_trials(deepcopy=False) if trial.state in OVER]
    names = sorted({name for trial in trials for name in trial.params})
    rows = []
    for trial in trials:
        row = {"trial": trial.number, "state": trial.state.name.lower(), study.user_attrs["metric"]: trial.value}
        row |= {name: trial.params.get(name) for name in names}
        seconds = (trial.datetime_complete - trial.datetime_start).total_seconds() if trial.datetime_start else 0
        rows.append(row | {"seconds": round(seconds), "why": trial.user_attrs.get("why", "")})
    if not rows:
        return
    temporary = out / "results.csv.tmp"
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    temporary.replace(out / "results.csv")
    done = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    varied = [name for name in names if len({str(trial.params.get(name)) for trial in done}) > 1]
    if len(done) < 2 or not varied:
        return
    draw(out / "parallel.png", optuna.visualization.matplotlib.plot_parallel_coordinate, study, params=varied)
    if len({trial.value for trial in done}) > 1 and len(varied) > 1 and len(done) >= 4:
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        draw(
            out / "importance.png", optuna.visualization.matplotlib.plot_param_importances, study, evaluator=evaluator,
            params=varied,
        )  # fmt: skip


def draw(path: Path, plot: Callable, study: optuna.Study, **options) -> None:
    plot(study, **options)
    plt.gcf().set_size_inches(9, 5)
    plt.gcf().savefig(path, dpi=120, bbox_inches="tight")
    plt.close("all")


# MAIN


def main(args: Args) -> optuna.Study:
    """Runs trials until the study has enough; returns it."""
    check(args.jobs >= 1, f"--jobs {args.jobs}: must be 1 or more")
    check(args.count >= 0, f"--count {args.count}: must be 0 or more")
    sweep = read_sweep(args.sweep, args.set)
    sampler, count = make_sampler(args, sweep), args.count
    if isinstance(sampler, optuna.samplers.GridSampler):
        size = len(sampler._all_grids)
        count = min(count or size, size)
    check(count > 0, "--count 0: has no end unless the sweep is a grid, give a number of trials")
    name = Path(args.sweep).stem
    out = Path(args.out or f"runs/sweeps/{name}").absolute()
    out.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    url = args.storage or f"sqlite:///{out / 'study.db'}"
    try:
        storage = optuna.storages.RDBStorage(
            url, heartbeat_interval=max(1, args.grace_period // 3), grace_period=args.grace_period,
            heartbeat_stale_trial_callback=optuna.storages.RetryHeartbeatStaleTrialCallback(),
            engine_kwargs={"connect_args": {"timeout": 60}} if url.startswith("sqlite") else None,
        )  # fmt: skip
    except Exception as error:  # SQLAlchemy and drivers raise many kinds
        raise runs.UsageError(f"--storage {url}: cannot be opened ({str(error).splitlines()[0][:100]})") from None
    goal = sweep["metric"].get("goal", "minimize")
    study = optuna.create_study(
        study_name=name,
        storage=storage,
        sampler=sampler,
        pruner=make_pruner(sweep),
        direction=goal,
        load_if_exists=True,
    )
    study.set_user_attr("metric", sweep["metric"]["name"])
    work, lock = Sweep(sweep, out), threading.Lock()

    def room() -> bool | None:
        """Whether another trial is to be begun; None: not now, but one that runs may fail to come to an end."""
        optuna.storages.fail_stale_trials(study)
        trials = study.get_trials(deepcopy=False)
        retried = {number for trial in trials for number in trial.system_attrs.get("retry_history", [])}
        states = [trial.state for trial in trials if trial.number not in retried]
        if TrialState.WAITING in states or len(states) < count:
            return True
        return None if TrialState.RUNNING in states else False

    def worker() -> None:
        while not work.stopping.is_set():
            with lock:
                more = room()
            if more is False:
                return
            if more is None:
                work.stopping.wait(2)
                continue
            with contextlib.suppress(KeyboardInterrupt):  # the trial stays open, for whoever goes on with the study
                study.optimize(work.objective, n_trials=1, catch=(Exception,), callbacks=[lambda *_: report()])

    def report() -> None:
        with lock:
            write_results(study, out)

    threads = [threading.Thread(target=worker) for _ in range(args.jobs)]
    old = {number: signal.signal(number, lambda *_: work.stopping.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, handler in old.items():
        signal.signal(number, handler)
    write_results(study, out)
    print(out / "results.csv")
    return study


if __name__ == "__main__":
    runs.cli(Args, main)
