"""A run: its directory, metrics, progress line, checkpoints, resume and signals.

runs/<env_id>__<script>__<seed>__<time>/
    args.json        script, game, W&B id and arguments
    metrics.jsonl    one line a log, with `global_step`, `time` (seconds since 1970) and `seconds` (of its own clock)
    checkpoints/     Orbax, one folder a step, each with a checksum
    lock             held by the process that trains
    videos/  eval.json  wandb/ or tensorboard/
"""

import contextlib
import dataclasses
import itertools
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from common import checkpoints, devices, files, films, tracking
from common.files import FailedError, FullError, UsageError, check, write_json
from common.flags import (  # noqa: F401 - to scripts all of this is `runs`
    MAX_SEED,
    NonNegativeInt,
    PositiveInt,
    Seed,
    Timesteps,
    as_given,
    check_args,
    check_batch,
    check_flags,
    check_memory,
    check_needs,
    cli,
    fixed,
    flag_of,
    on_this_machine,
    parse_schedule,
    parts_of_batch,
    plain_booleans,
    read_args,
    saved_args,
    set_up_jax,
)


class DivergedError(FailedError):
    """Training produced NaN or infinity."""


@dataclass(frozen=True)
class RunArgs:
    """The run and its files."""

    # A group of flags may have FIXED, the flags that a resume cannot change, and check(), which raises UsageError.
    # A script inherits groups and adds its own of each.
    FIXED: ClassVar = ("seed",)

    seed: Seed = 1
    """seed of everything; the same seed gives the same metrics (with --deterministic, in scripts that have it)"""
    run_dir: str = devices.host_only("runs")
    """parent folder of run directories"""
    resume: str = devices.host_only("")
    """run directory to resume; its saved arguments are the defaults of all other flags"""
    checkpoint_every: PositiveInt = devices.host_only(1_000_000)
    """environment steps between checkpoints"""
    keep_checkpoints: PositiveInt = devices.host_only(3)
    """number of most recent checkpoints to keep"""
    num_devices: NonNegativeInt = 0
    """learner devices on this host: GPUs, or CPU cores (a power of two, at most 8); 0 for as many as divide the
    environments and minibatches"""
    distributed: bool = False
    """train on several hosts (PPO, TRPO, IMPALA), which share the environments; set up by SLURM or JAX's variables"""
    track: Literal["wandb", "tensorboard"] = devices.host_only("wandb")
    """where to log metrics besides metrics.jsonl: Weights & Biases or TensorBoard"""
    wandb_mode: Literal["auto", "online", "offline", "disabled"] = devices.host_only("auto")
    """mode of Weights & Biases; auto is WANDB_MODE from the environment, else online if logged in, else offline"""
    wandb_project: str = devices.host_only("procgen")
    """W&B project"""
    wandb_entity: str = devices.host_only("")
    """W&B entity (team or user); empty for your default"""

    def check(self) -> None:
        """Raises UsageError for inconsistent flags."""
        check(self.run_dir != "", "--run-dir '': give a folder")

    def shares(self) -> dict[str, int]:
        """What the devices that learn divide between them: in words, and how many."""
        what, parts = parts_of_batch(self)
        return {"the games, --num-envs": self.num_envs, f"a minibatch's {what}": parts // self.num_minibatches}


# A CHECKPOINT


def load(initial: Callable[[], dict], run_dir: str) -> dict[str, Any]:
    """The newest checkpoint of a run; the parts that `initial` makes get their structure back. Raises UsageError.

    What each host saved for itself is included only if there are as many hosts as when it was saved.
    """
    template = jax.eval_shape(initial)
    step, saved = checkpoints.load(run_dir)
    saved = _Checkpoint(saved)
    saved.run_dir = run_dir
    saved["run"]["step"] = step
    own = saved["hosts"]
    same = len(own) == jax.process_count()
    if same:
        saved.update(own[str(jax.process_index())])
    wanted = {name: part for name, part in template.items() if same or name in saved}
    saved.update({name: checkpoints.restore_tree(part, saved[name], run_dir) for name, part in wanted.items()})
    return saved


def _load_for(args: Any, script: str, load: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """The checkpoint that a run goes on from; of one that does not fit, says which flags differ from the run's own."""
    try:
        return load(args.resume)
    except checkpoints.MisfitError as error:
        saved = saved_args(type(args), args.resume, "--resume", script)
        changed = {
            as_given(name, new): getattr(saved, name)
            for name, new in dataclasses.asdict(args).items()
            if name not in ("resume", "total_timesteps") and new != getattr(saved, name)
        }
        told = "; ".join(f"{flag} here, {old} there" for flag, old in changed.items())
        raise UsageError(f"{error}; " + (f"flags differ: {told}" if told else "has the script changed?")) from None


class _Checkpoint(dict):
    """Parts of a checkpoint; raises UsageError for one that is not in it."""

    run_dir: str

    def __missing__(self, name: str):
        raise UsageError(f"{self.run_dir}: its checkpoint is not of this version of the script, it has no {name}")


# THE RUN


def crossed(every: int, before: int, after: int) -> bool:
    """Whether a multiple of `every` (0: none) lies in (before, after]."""
    return every > 0 and before // every < after // every


class Stopwatch:
    """Where the time goes: `with stopwatch("game"): ...`; `fractions()` since the last call."""

    def __init__(self):
        self.seconds, self._since = {}, time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, name: str):
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def fractions(self) -> dict[str, float]:
        now = time.perf_counter()
        shares = {f"time/{name}": s / (now - self._since) for name, s in self.seconds.items()}
        self.seconds, self._since = {}, now
        return shares


class Run:
    """One run of a script. `args` is a dataclass with the fields read below.

    Attributes:
      path: the run directory. Of several hosts only the first writes there, logs and evaluates.
      saved: the checkpoint that a resumed run goes on from, as `load` returned it; else None.
      stop: the name of the signal that asked the run to end, else None. Hosts agree on it in `over`.
    """

    def __init__(self, args: Any, script: str, load: Callable[[str], dict[str, Any]] | None = None):
        """Creates the run directory, or opens `args.resume`: holds it, so that no other process can write there, and
        only then reads its checkpoint by load(run_dir).

        Raises UsageError where that is not possible, FullError where the disk is full; what was there is as it was.
        """
        self.first = devices.host(args) == 0
        flag, root = ("--resume", args.resume) if args.resume else ("--run-dir", args.run_dir)
        mode = tracking.wandb_mode(args) if self.first else "disabled"
        with contextlib.ExitStack() as undo:
            try:
                self._open(args, script, load, mode=mode, undo=undo)
            except OSError as error:
                if full := files.full_disk(error, Path(root)):
                    raise full from None
                raise UsageError(f"{flag} {root}: cannot write there ({error.strerror})") from None
            undo.pop_all()
        self.stop, self._script, self._args = None, script, args
        self._lines, self._evaluated, self._saved, self._begun = 0, 0, 0, False
        self._signal, self._written, self._seconds = None, None, 0.0
        self._old_handlers = {}
        self._console = Console(stderr=True, quiet=not self.first, emoji=False)  # a path may have a :x:
        self._console.on_broken_pipe = self._on_broken_pipe  # Rich's own would end the program
        self._progress = Progress(
            "[progress.description]{task.description}",
            BarColumn(None),
            "{task.fields[status]}",
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            speed_estimate_period=3600,  # an update may take a minute
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task(f"{script} {args.env_id}", total=args.total_timesteps, status="compiling")
        self._start_time, self._start_step = None, 0

    def _open(self, args: Any, script: str, load: Callable | None, *, mode: str, undo: contextlib.ExitStack) -> None:
        """Finds or makes the run directory, holds it and opens its files; `undo` is told how to take that back."""
        self._lock = None
        if args.resume:
            self.path = Path(args.resume)
            self._lock = files.take(self.path) if self.first else None
            if self.first and not self._lock:
                holder = files.holder(self.path)
                raise UsageError(f"--resume {args.resume}: {holder} is at it; wait for its end, or stop it")
        elif self.first:
            self.path = _new_directory(args, script)
            undo.callback(shutil.rmtree, self.path, ignore_errors=True)
            self._lock = files.take(self.path)
        undo.callback(lambda: self._lock and self._lock.close())
        self.saved = _load_for(args, script, load) if args.resume and load else None
        if self.saved and devices.hosts(args) > 1:
            steps = {int(x) for x in devices.of_each_host(args, np.int64(self.saved["run"]["step"])).values()}
            check(len(steps) == 1, f"--resume {args.resume}: hosts read those of steps {sorted(steps)}, try again")
        if not self.first:  # what it writes is of no use to anybody
            self._nowhere = tempfile.TemporaryDirectory()
            self.path = Path(self._nowhere.name)
        known = read_args(args.resume, "--resume", script) if args.resume else {}
        config = dataclasses.asdict(args) | {"resume": ""}
        run_id = known.get("wandb_id") or os.environ.get("WANDB_RUN_ID")
        run_id = run_id or f"{self.path.name}-{secrets.token_hex(4)}"  # elsewhere a folder may have the same name
        (self.path / "checkpoints").mkdir(exist_ok=True)
        checkpoints.remove_unfinished(self.path)
        self._metrics = (self.path / "metrics.jsonl").open("a")
        undo.callback(self._metrics.close)
        self._wandb = tracking.start_wandb(
            args, mode, self.path, run_id, config | {"env_id": args.env_id, "exp_name": script}
        )
        if self._wandb:
            undo.callback(self._wandb.finish, exit_code=1)
            if os.environ.get("WANDB_SWEEP_ID"):  # the run is in the sweep's project, where a resume is to find it
                config |= {"wandb_project": self._wandb.project, "wandb_entity": self._wandb.entity or ""}
        self._board = None
        if args.track == "tensorboard" and self.first:
            # What a resumed run had logged after its checkpoint is to vanish.
            after = int(self.saved["run"]["step"]) + 1 if self.saved else None
            self._board = tracking.start_tensorboard(self.path / "tensorboard", after)
            undo.callback(self._board.close)
        write_json(
            self.path / "args.json", {"script": script, "wandb_id": run_id, "env_id": args.env_id, "args": config}
        )

    def __enter__(self) -> "Run":
        with contextlib.suppress(ValueError):  # signals can be caught in the main thread only
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old_handlers[number] = signal.signal(number, self._on_signal)
        self._progress.start()
        self._since = time.monotonic()
        self.say(f"run directory: {self.path}")
        if self._wandb and self._wandb.offline:
            self.say(f"W&B is offline; to send it this run afterwards: wandb sync {self.path}/wandb/offline-run-*")
        try:
            if self.saved:
                self._go_back(self.saved["run"])
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self._progress.stop()
        for file in filter(None, (self._metrics, self._board)):
            with contextlib.suppress(OSError):  # what a full disk did not take has been said already
                file.close()
        if self.stop and kind is None:
            kept = checkpoints.steps_in(self.path)
            how = f"continue with: {self._how_to_go_on()}" if kept else "there was no checkpoint yet, begin again"
            self.say(f"stopped by {self.stop}; {how}")
        self._tell_wandb("finish", exit_code=0 if kind in (None, SystemExit) else 1)
        if self._lock:
            self._lock.close()
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        if self.first and (full := files.full_disk(error, self.path)):
            raise FullError(f"{full}; {self.kept()}") from None

    def _how_to_go_on(self) -> str:
        return f"python {self._script}.py --resume {self.path}"

    def kept(self) -> str:
        """What a run that failed says of its checkpoints."""
        steps = checkpoints.steps_in(self.path)
        if not steps:
            return "no checkpoint was written yet"
        return f"the checkpoint of step {steps[-1]} is whole, to go on from it: {self._how_to_go_on()}"

    def _on_signal(self, number: int, frame) -> None:
        # Asked twice: do not wait for the iteration's end. One signal to a whole group may come twice, though, at once.
        if self._signal and time.monotonic() - self._asked > 2:
            raise KeyboardInterrupt
        self._end_for(signal.Signals(number).name)

    def _on_broken_pipe(self) -> None:
        """Whoever read what the run says has gone, as in `| head`: as good as a signal."""
        self._console.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        self._end_for("SIGPIPE")

    def _end_for(self, name: str) -> None:
        if not self._signal:
            self._signal, self._asked = name, time.monotonic()
            if devices.hosts(self._args) == 1:
                self.stop = self._signal

    @property
    def interrupted(self) -> bool:
        """Whether a signal came, which other hosts may not know of yet (`stop` they learn of together)."""
        return bool(self.stop or self._signal)

    def say(self, sentence: str) -> None:
        """Prints one line, above the progress line where there is one."""
        self._console.print(sentence, highlight=False, soft_wrap=True, markup=False)

    def show(self, *parts: Any) -> None:
        """Prints texts and Rich's tables, each on lines of its own."""
        self._console.print(*parts, sep="\n", markup=False)

    def _clock(self) -> float:
        """Seconds that this run has run, over all its resumes, by a clock that nobody sets. Rounded here, so that what
        a checkpoint has is never less than what was logged before."""
        return round(self._seconds + time.monotonic() - self._since, 3)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Writes metrics to metrics.jsonl and W&B or TensorBoard."""
        numbers = {name: float(value) for name, value in metrics.items()}
        clocks = {"global_step": step, "time": time.time(), "seconds": self._clock()}
        self._metrics.write(json.dumps(clocks | numbers) + "\n")
        self._metrics.flush()
        self._lines += 1
        self._log_to_wandb(step, numbers)
        if self._board:
            for name, number in numbers.items():
                self._board.add_scalar(name, number, step)
            self._board.flush()
        if "charts/SPS" in numbers:
            status = f"{step:,} steps  {numbers['charts/SPS']:,.0f}/s"
            status += f"  return {numbers.get('charts/episodic_return', float('nan')):.2f}"
            self._progress.update(self._task, completed=step, status=status)

    def _log_to_wandb(self, step: int, what: dict[str, Any]) -> None:
        """The step is a value like others, which `tracking.start_wandb` makes the axis: of W&B's own steps none may
        come twice, and after a resume some do."""
        self._tell_wandb("log", {"global_step": step} | what)

    def _tell_wandb(self, method: str, *given, **options) -> None:
        """Calls a method of W&B's run, if there is one. Its process may be gone, killed for memory or by a signal to
        all of a job: training needs it no more than its checkpoint does."""
        if self._wandb:
            try:
                getattr(self._wandb, method)(*given, **options)
            except Exception as error:
                self._wandb = None
                self.say(f"W&B has stopped ({error!r}) and misses what comes; metrics.jsonl has everything")

    def over(self, step: int) -> bool:
        """Whether a script's loop ends: at `args.total_timesteps`, or because a signal came."""
        finished = step >= self._args.total_timesteps
        if finished and not self._begun:
            self.say(f"the run is at step {step} already; to go on, give a larger --total-timesteps")
        self._begun = True
        if devices.hosts(self._args) > 1:  # all of them stop before the same update
            signals = devices.of_each_host(self._args, np.bool_(self._signal))
            if any(signals.values()):  # not one that has come since, of which the others do not know
                self.stop = self._signal or "a signal on another host"
        return finished or bool(self.stop)

    def evaluation_due(self, step: int) -> bool:
        """Whether a multiple of `args.eval_every` (0: none), or the end, has come since the last evaluation."""
        if step <= self._evaluated or not self.first:
            return False
        return step >= self._args.total_timesteps or crossed(self._args.eval_every, self._evaluated, step)

    def checkpoint_due(self, step: int) -> bool:
        """Whether a multiple of `args.checkpoint_every` has come since the last checkpoint, or the end: a run may be
        killed within its last evaluation, which takes minutes."""
        ended = step >= self._args.total_timesteps > self._saved
        return ended or crossed(self._args.checkpoint_every, self._saved, step)

    def log_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        self.log(step, metrics)
        self._evaluated = step

    def save_video(self, step: int, frames: np.ndarray) -> None:
        """Writes frames uint8 [T, H, W, 3] to videos/<step>.mp4 and W&B."""
        path = self.path / "videos" / f"{step}.mp4"
        films.write_video(path, frames)
        if self._wandb:
            import wandb

            self._log_to_wandb(step, {"videos/episode": wandb.Video(str(path))})

    def save_picture(self, step: int, name: str, picture: np.ndarray) -> None:
        """Writes uint8 [H, W, 3] to <name>.png and W&B."""
        path = self.path / f"{name}.png"
        films.write_picture(path, picture)
        if self._wandb:
            import wandb

            self._log_to_wandb(step, {f"pictures/{name}": wandb.Image(str(path))})
        if self._board:
            self._board.add_image(f"pictures/{name}", picture, step, dataformats="HWC")

    def steps_per_second(self, step: int) -> float:
        """Environment steps a second since the first call, which gives 0 (the first iteration compiles)."""
        if self._start_time is None:
            self._start_time, self._start_step = time.perf_counter(), step
            return 0.0
        return (step - self._start_step) / (time.perf_counter() - self._start_time)

    def save(self, step: int, tree: dict[str, Any], own: dict[str, Any]) -> None:
        """Writes a checkpoint, under a temporary name, then renames it: a dict of trees of arrays that all hosts have
        together, and one of what each has of its own. All of them call it."""
        if step != self._written:
            from flax import serialization

            progress = {"lines": self._lines, "evaluated": self._evaluated, "seconds": self._clock()} | self._where()
            content = devices.whole(self._args, tree) | {"hosts": devices.of_each_host(self._args, own)}
            content["run"] = {name: np.asarray(number) for name, number in progress.items()}
            if self.first:
                os.fsync(self._metrics.fileno())  # a checkpoint says how many lines there are
                tree = serialization.to_state_dict(content)
                checkpoints.save(self.path, step, tree, keep=self._args.keep_checkpoints)
        self._saved = self._written = step

    def _where(self) -> dict[str, int]:
        number, hosts = devices.mesh(self._args).size, devices.hosts(self._args)
        return {"devices": number, "hosts": hosts, "cpu": int(devices.on_cpu())}

    def check_finite(self, step: int, metrics: dict[str, float]) -> None:
        """Raises DivergedError if a metric is NaN or infinite, the checkpoints before are kept; ValueError if one is
        no number."""
        for name, value in metrics.items():
            if np.shape(value):
                raise ValueError(f"metric {name} has shape {list(np.shape(value))}: it is to be one number, float32 []")
        broken = [name for name, value in metrics.items() if not np.isfinite(value)]
        if broken:
            kept = f"; {self.kept()}" if self.first else ""
            raise DivergedError(f"not finite at step {step}: {', '.join(broken)}; training stopped{kept}")

    def _go_back(self, saved: dict[str, Any]) -> None:
        """To a checkpoint: drops what was logged after it, but an evaluation of it: the rest is about to be logged
        again."""
        self._evaluated, self._saved, self._seconds = int(saved["evaluated"]), saved["step"], float(saved["seconds"])
        self._written = self._saved
        here = self._where()
        there = here | saved  # older ones do not say whether it was a CPU
        kinds = ("an accelerator, with ", "a CPU, with ") if there["cpu"] != here["cpu"] else ("", "")
        before, now = (
            f"{kinds[int(where['cpu'])]}{where['devices']} devices of {where['hosts']} hosts" for where in (there, here)
        )
        if before != now:
            self.say(f"this run was on {before} and goes on with {now}: it will not be the same run")
        if self.first:
            checkpoints.set_aside(self.path, after=self._saved)
            self._go_back_to_line(int(saved["lines"]))

    def _go_back_to_line(self, count: int) -> None:
        """Keeps the first `count` lines of metrics.jsonl; says so if they are not all there, and keeps what cannot be
        read elsewhere. Also keeps an evaluation of the checkpoint itself, which may have come after it."""
        path = self.path / "metrics.jsonl"
        with path.open("rb") as file:  # line by line: Ape-X has millions
            good = [_is_logged(line, self._saved) for line in itertools.islice(file, count)]
            later = next(file, b"")
        if missing := count - sum(good):
            lost = f"{path}: {missing} of the {count} lines before step {self._saved} are missing"
            if good:
                aside = files.set_aside(path, self.path / "damaged", copy=True)
                lost += f" or not readable; what was there is now {aside}"
            self.say(lost)
        evaluated = b'"eval/' in later and _is_logged(later, self._saved)
        if new := evaluated and self._evaluated < self._saved and not missing:
            self._evaluated = self._saved
            self._seconds = max(self._seconds, json.loads(later).get("seconds", 0.0))
        self._metrics.close()
        with files.whole(path) as temporary, path.open("rb") as old, temporary.open("wb") as kept:
            kept.writelines(itertools.compress(old, [*good, new]))
        self._metrics, self._lines = path.open("a"), sum(good) + new

    def while_replaying(self, what: str, total: int) -> Callable[[int], None]:
        """Returns progress(count), to be called as steps are replayed: it reports `count` of `total` every ten seconds
        and, on a single host, ends the program if a signal came, since nothing has been learnt yet."""
        told = time.monotonic()

        def progress(count: int) -> None:
            nonlocal told
            if self.stop:
                self.say(f"stopped by {self.stop}; the checkpoint is as it was")
                raise SystemExit(0)
            if time.monotonic() - told > 10:
                told = time.monotonic()
                self.say(f"{what}: {count:,} of {total:,} steps played again")

        return progress


def _new_directory(args: Any, script: str) -> Path:
    root, second = Path(args.run_dir), int(time.time())
    root.mkdir(parents=True, exist_ok=True)
    while True:
        path = root / f"{args.env_id}__{script}__{args.seed}__{second}"
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
        second += 1  # another run started in the same second


def _is_logged(line: bytes, step: int) -> bool:
    """Whether this is a whole line of metrics.jsonl, of that step or one before."""
    try:
        return line.endswith(b"\n") and json.loads(line)["global_step"] <= step
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


class Evaluation(NamedTuple):
    """What a script's `evaluate` answers evaluate.py, which asks every script the same."""

    step: int  # of the checkpoint
    name: str  # of the entry in eval.json
    title: str  # of the table
    rows: list[dict]  # of it; there may be none
    summary: dict  # what eval.json says
    film: np.ndarray | None  # uint8 [T, H, W, 3]
    fps: float = 15  # frames a second of it
    scenes: int = 1  # of it, of equal length
    details: dict | None = None  # what eval.json says besides
