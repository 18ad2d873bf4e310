"""A run: its directory, metrics, progress line, checkpoints, resume and signals.

runs/<env_id>__<script>__<seed>__<time>/
    args.json        script, game, devices, W&B id and arguments
    metrics.jsonl    one line per log, with `global_step`, `time` (seconds since 1970) and `seconds` (of training)
    checkpoints/     Orbax, one folder per step, with a checksum
    lock             held by the process that trains
    videos/  eval.json  wandb/ or tensorboard/  damaged/ (files that could not be read)
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from common import checkpoints, devices, files, films, multihost, tracking
from common.files import FailedError, FullError, UsageError, check, write_json
from common.flags import (  # noqa: F401 - scripts use these as runs.cli, runs.check_args, ...
    MAX_SEED,
    NonNegativeInt,
    PositiveInt,
    Seed,
    as_given,
    check_args,
    check_batch,
    check_flags,
    check_needs,
    cli,
    fixed,
    flag_of,
    leave_closed_terminal,
    on_this_machine,
    parse_schedule,
    parts_of_batch,
    plain_values,
    read_args,
    saved_args,
    set_up_jax,
    silence,
    stop_signals,
)


class DivergedError(FailedError):
    """Training produced NaN or infinity."""


@dataclass(frozen=True)
class RunArgs:
    """The run and its files."""

    # A group of flags may have FIXED, the flags that a resume cannot change, and check(), which raises UsageError for
    # inconsistent flags. A script inherits groups and adds its own of each.
    FIXED: ClassVar = ("seed",)

    seed: Seed = 1
    """seed of everything; the same seed gives the same metrics (with --deterministic, in scripts that have it)"""
    run_dir: str = "runs"
    """parent folder of run directories"""
    resume: str = ""
    """run directory to resume: its flags become the defaults; seed and most flags of game and network cannot change"""
    checkpoint_every: PositiveInt = 1_000_000
    """environment steps between checkpoints"""
    keep_checkpoints: PositiveInt = 3
    """number of most recent checkpoints to keep"""
    num_devices: NonNegativeInt = 0
    """learner devices per host: GPUs, or up to 8 CPU cores; 0 for the most that divide environments and minibatches"""
    distributed: bool = False
    """train on several hosts (PPO, TRPO, IMPALA), which divide the environments; set up by SLURM or JAX's variables"""
    track: Literal["wandb", "tensorboard"] = "wandb"
    """where to log besides metrics.jsonl: Weights & Biases or TensorBoard; for neither give --wandb-mode disabled"""
    wandb_mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """mode of Weights & Biases; auto is WANDB_MODE from the environment, else online if logged in, else offline"""
    wandb_project: str = "procgen"
    """W&B project"""
    wandb_entity: str = ""
    """W&B entity (team or user); empty for your default"""

    def check(self) -> None:
        check(self.run_dir != "", "--run-dir '': give a folder")

    def sharded_sizes(self) -> dict[str, int]:
        """The sizes that are divided among the learner devices, by their descriptions."""
        what, parts = parts_of_batch(self)
        return {"the environments, --num-envs": self.num_envs, f"a minibatch's {what}": parts // self.num_minibatches}


# A CHECKPOINT


def load(init_checkpoint: Callable[[], dict], run_dir: str) -> dict[str, Any]:
    """Loads the newest checkpoint of a run in the structure of `init_checkpoint()`, with the parts that each host saved
    for itself if the number of hosts is the same. Raises UsageError."""
    template = jax.eval_shape(init_checkpoint)
    step, saved = checkpoints.load(run_dir)
    saved = _Checkpoint(saved)
    saved.run_dir = run_dir
    saved["run"]["step"] = step
    _check_identity(saved["run"], run_dir)
    per_host = saved["hosts"]
    same_hosts = len(per_host) == jax.process_count()
    if same_hosts:
        saved.update(per_host[str(jax.process_index())])
    for name, part in template.items():
        if same_hosts or name in saved:
            saved[name] = checkpoints.restore_tree(part, saved[name], run_dir)
    return saved


def _check_identity(saved: dict[str, Any], run_dir: str) -> None:
    """Raises UsageError if args.json is not that of the run which wrote the checkpoint."""
    content = read_args(run_dir, "RUN_DIR")
    here = content["args"] | {"wandb_id": content.get("wandb_id")}
    for name, value in json.loads(saved["identity"].tobytes()).items():
        differ = f"{name} is {here.get(name)!r} in its args.json and {value!r} in its checkpoint"
        check(here.get(name) == value, f"{run_dir}: {differ}; put the run's own args.json back")


def _load_for(args: Any, script: str, load: Callable) -> dict[str, Any]:
    """Loads the checkpoint to resume from; if it does not fit, names the flags that differ from the run's."""
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
    """A checkpoint's parts by name; a missing one raises UsageError."""

    run_dir: str

    def __missing__(self, name: str):
        raise UsageError(f"{self.run_dir}: its checkpoint is not of this version of the script, it has no {name}")


# THE RUN


def crossed(every: int, before: int, after: int) -> bool:
    """Whether a multiple of `every` (0: none) lies in (before, after]."""
    return every > 0 and before // every < after // every


class Stopwatch:
    """Measures `with stopwatch("game"): ...`; `fractions()` returns {"time/game": its part of the time since the last
    call, ...}."""

    def __init__(self):
        self.seconds, self._since = {}, time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, name: str):
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def fractions(self) -> dict[str, float]:
        now = time.perf_counter()
        fractions = {f"time/{name}": s / (now - self._since) for name, s in self.seconds.items()}
        self.seconds, self._since = {}, now
        return fractions


class Run:
    """One run of a script.

    Attributes:
      path: the run directory. Of several hosts only the first writes there, logs and evaluates.
      resumed: whether the run continues an earlier one.
      checkpoint: within the `with` block, the newest checkpoint or, in a new run, what `init_checkpoint` returns. If
        the number of hosts has changed, what each host saved for itself is as in a new run, or missing.
      stop: the name of the signal that asked the run to end, else None. Hosts agree on it in `finished`.
      is_main: whether this host writes and evaluates: the only one, or the first of several.
    """

    def __init__(self, args: Any, script: str, mesh: Mesh, init_checkpoint: Callable[[], dict], load: Callable = load):
        """Creates and locks the run directory, or opens `args.resume` and loads its checkpoint.

        Args:
          args, script: the script's flags (RunArgs, env_id, total_timesteps) and its name.
          mesh: of all learner devices.
          init_checkpoint: returns a new run's checkpoint, a dict of pytrees.
          load: load(init_checkpoint, run_dir) -> the checkpoint to resume from.

        Raises UsageError if it cannot, FullError if the disk is full; both leave everything as it was.
        """
        jax.eval_shape(init_checkpoint)  # raises UsageError for an impossible network
        self.is_main = jax.process_index() == 0
        flag, root = ("--resume", args.resume) if args.resume else ("--run-dir", args.run_dir)
        mode = tracking.wandb_mode(args) if self.is_main else "disabled"
        self._devices = devices.describe(mesh)
        with contextlib.ExitStack() as undo:
            try:
                self._open(args, script, partial(load, init_checkpoint), mode=mode, undo=undo)
            except OSError as error:
                if full := files.full_disk(error, Path(root)):
                    raise full from None
                raise UsageError(f"{flag} {root}: cannot write there ({error.strerror})") from None
            undo.pop_all()
        self._init_checkpoint = init_checkpoint
        self.stop, self._script, self._args, self._mesh = None, script, args, mesh
        self._lines, self._evaluated, self._saved, self._begun = 0, 0, None, False
        self._signal, self._seconds = None, 0.0
        self._old_handlers = {}
        self._console = Console(stderr=True, quiet=not self.is_main, emoji=False)  # a path may have a :x:
        self._console.on_broken_pipe = self._on_broken_pipe  # Rich's own would end the program
        self._progress = Progress(
            "{task.description}",
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

    def _open(self, args: Any, script: str, load: Callable, *, mode: str, undo: contextlib.ExitStack) -> None:
        """Opens or makes the run directory, locks it and opens its files; `undo` collects how to revert that."""
        if args.resume:
            self.path = Path(args.resume)
        elif self.is_main:
            self.path = _new_directory(args, script)
            undo.callback(shutil.rmtree, self.path, ignore_errors=True)
        self._lock = files.lock_run(self.path) if self.is_main else None
        if self._lock:
            undo.callback(self._lock.close)
        elif self.is_main:
            holder = files.holder(self.path)
            raise UsageError(f"--resume {args.resume}: {holder} is training it; wait for its end, or stop it")
        self.resumed = bool(args.resume)
        self.checkpoint = _load_for(args, script, load) if self.resumed else None
        if self.resumed and jax.process_count() > 1:
            steps = {int(x) for x in multihost.gather_per_host(np.int64(self.checkpoint["run"]["step"])).values()}
            differ = f"the hosts read checkpoints of steps {sorted(steps)}, try again"
            check(len(steps) == 1, f"--resume {args.resume}: {differ}")
        if not self.is_main:  # its files are not needed
            self._nowhere = tempfile.TemporaryDirectory()
            self.path = Path(self._nowhere.name)
        known = read_args(args.resume, "--resume", script) if args.resume else {}
        config = dataclasses.asdict(args) | {"resume": ""}
        run_id = known.get("wandb_id") or os.environ.get("WANDB_RUN_ID")
        run_id = run_id or f"{self.path.name}-{secrets.token_hex(4)}"  # other machines may have a folder of this name
        files.make_folder(self.path / "checkpoints", "--resume" if args.resume else "--run-dir")
        checkpoints.remove_unfinished(self.path)
        self._metrics = (self.path / "metrics.jsonl").open("a")
        undo.callback(self._metrics.close)
        about = {"env_id": args.env_id, "devices": self._devices}
        wandb_config = config | about | {"exp_name": script}
        self._wandb = tracking.start_wandb(args, mode, self.path, run_id, wandb_config)
        if self._wandb:
            undo.callback(self._wandb.finish, exit_code=1)
            if os.environ.get("WANDB_SWEEP_ID"):  # a resume must find the run in the sweep's project
                config |= {"wandb_project": self._wandb.project, "wandb_entity": self._wandb.entity or ""}
        self._board = None
        if args.track == "tensorboard" and self.is_main:
            # Purges what a resumed run had logged after its checkpoint.
            after = int(self.checkpoint["run"]["step"]) + 1 if self.resumed else None
            self._board = tracking.start_tensorboard(self.path / "tensorboard", after)
            undo.callback(self._board.close)
        write_json(self.path / "args.json", {"script": script, "wandb_id": run_id} | about | {"args": config})
        # For the checkpoints, as JSON: `_check_identity` compares it with args.json.
        identity = {"wandb_id": run_id} | {name: config[name] for name in fixed(type(args))}
        self._identity = np.frombuffer(json.dumps(identity).encode(), np.uint8)
        self._logged = hashlib.sha256()

    def __enter__(self) -> "Run":
        with contextlib.suppress(ValueError):  # only the main thread handles signals
            for number in stop_signals():
                self._old_handlers[number] = signal.signal(number, self._on_signal)
        self._progress.start()
        self._since = time.monotonic()
        self.print(f"run directory: {self.path}, devices: {self._devices}")
        if self._wandb and self._wandb.offline:
            upload = f"wandb sync {shlex.quote(str(self.path))}/wandb/offline-run-*"
            self.print(f"W&B is offline; to upload this run afterwards: {upload}")
        try:
            if not self.resumed or len(self.checkpoint["hosts"]) != jax.process_count():
                initial = jax.jit(self._init_checkpoint, compiler_options=devices.UNOPTIMISED)()
                self.checkpoint = initial | (self.checkpoint or {})
            if self.resumed:
                self._rewind(self.checkpoint["run"])
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(self, kind, error, traceback) -> None:
        leave_closed_terminal()
        self._progress.stop()
        for file in filter(None, (self._metrics, self._board)):
            with contextlib.suppress(OSError):  # if the disk is full, `error` says so: reported below
                file.close()
        if self.stop and kind is None:
            kept = checkpoints.steps_in(self.path)
            how = f"continue with: {self._resume_command()}" if kept else "there was no checkpoint yet, start again"
            self.print(f"stopped by {self.stop}; {how}")
        self._call_wandb("finish", exit_code=0 if kind in (None, SystemExit) else 1)
        if self._lock:
            self._lock.close()
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        if self.is_main and (full := files.full_disk(error, self.path)):
            raise FullError(f"{full}; {self.resume_hint()}") from None

    def _resume_command(self) -> str:
        called = sys.argv[0] if Path(sys.argv[0]).stem == self._script else f"{self._script}.py"
        return f"python {shlex.quote(called)} --resume {shlex.quote(str(self.path))}"

    def resume_hint(self) -> str:
        """A sentence on how to continue a run that failed."""
        steps = checkpoints.steps_in(self.path)
        if not steps:
            return "no checkpoint was written yet"
        return f"the checkpoint of step {steps[-1]} is complete; continue from it: {self._resume_command()}"

    def _on_signal(self, number: int, frame) -> None:
        # A second signal ends the run at once; within 2 s it is the first one, which came twice (to a process group).
        if self._signal and time.monotonic() - self._asked > 2:
            raise KeyboardInterrupt(number)
        leave_closed_terminal()
        self._request_stop(signal.Signals(number).name)

    def _on_broken_pipe(self) -> None:
        """Treats the end of stderr's reader, as in `| head`, as a signal."""
        self._console.quiet = True
        silence(sys.stderr)
        self._request_stop("SIGPIPE")

    def _request_stop(self, name: str) -> None:
        if not self._signal:
            self._signal, self._asked = name, time.monotonic()
            if jax.process_count() == 1:
                self.stop = self._signal

    @property
    def interrupted(self) -> bool:
        """Whether a signal came, even if the other hosts do not know yet."""
        return bool(self.stop or self._signal)

    def print(self, *parts: Any) -> None:
        """Prints sentences and Rich's tables to stderr, above the progress line."""
        leave_closed_terminal()  # one that closed without a signal, as after disown
        for part in parts:
            self._console.print(part, highlight=False, markup=False, soft_wrap=isinstance(part, str))

    def _clock(self) -> float:
        """Seconds of training over all resumes, by a monotonic clock; rounded here, so that a checkpoint never has less
        than an earlier log."""
        return round(self._seconds + time.monotonic() - self._since, 3)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Writes metrics to metrics.jsonl and W&B or TensorBoard; the progress line needs "charts/SPS" among them."""
        numbers = {name: float(value) for name, value in metrics.items()}
        clocks = {"global_step": step, "time": time.time(), "seconds": self._clock()}
        line = json.dumps(clocks | numbers) + "\n"
        self._metrics.write(line)
        self._metrics.flush()
        self._logged.update(line.encode())
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
        """Logs with the step as a value, the x-axis of `tracking.start_wandb`: W&B's own steps must not repeat, as they
        do after a resume."""
        self._call_wandb("log", {"global_step": step} | what)

    def _call_wandb(self, method: str, *given, **options) -> None:
        """Calls a method of W&B's run, if there is one; training continues if W&B's process has died."""
        if self._wandb:
            try:
                getattr(self._wandb, method)(*given, **options)
            except Exception as error:
                self._wandb = None
                self.print(f"W&B has stopped ({error!r}); metrics.jsonl has everything")

    def finished(self, step: int) -> bool:
        """Whether training ends: at `args.total_timesteps`, or because a signal came. All hosts call it."""
        finished = step >= self._args.total_timesteps
        if finished and not self._begun:
            self.print(f"the run is at step {step} already; to continue, give a larger --total-timesteps")
        self._begun = True
        if jax.process_count() > 1:  # all hosts stop before the same update
            signals = multihost.gather_per_host(np.bool_(self._signal))
            if any(signals.values()):  # not `self._signal`, which may have come since
                self.stop = self._signal or "a signal on another host"
        return finished or bool(self.stop)

    def evaluation_due(self, step: int) -> bool:
        """Whether a multiple of `args.eval_every` (0: none), or the end, was passed since the last evaluation; on hosts
        other than the first always False."""
        if step <= self._evaluated or not self.is_main:
            return False
        return step >= self._args.total_timesteps or crossed(self._args.eval_every, self._evaluated, step)

    def checkpoint_due(self, step: int) -> bool:
        """Whether a multiple of `args.checkpoint_every`, or the end, was passed since the last checkpoint. The end
        counts because a run may be killed during its last evaluation, which takes minutes."""
        saved = self._saved or 0  # None before the first
        ended = step >= self._args.total_timesteps > saved
        return ended or crossed(self._args.checkpoint_every, saved, step)

    def log_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """As `log`; `evaluation_due` counts from this step."""
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
        """Environment steps per second since the first call, which returns 0 (the first iteration compiles)."""
        if self._start_time is None:
            self._start_time, self._start_step = time.perf_counter(), step
            return 0.0
        return (step - self._start_step) / (time.perf_counter() - self._start_time)

    def save(self, step: int, tree: dict[str, Any], per_host: dict[str, Any]) -> bool:
        """Writes a checkpoint atomically: pytrees of global arrays by name, and each host's own (`per_host`). All hosts
        call it. Returns False, without writing, if this step has a checkpoint. Raises FailedError if somebody removed
        or replaced the run directory."""
        if due := step != self._saved:
            progress = {"lines": self._lines, "evaluated": self._evaluated, "seconds": self._clock()} | self._topology()
            content = multihost.gather(tree) | {"hosts": multihost.gather_per_host(per_host)}
            content["run"] = {name: np.asarray(number) for name, number in progress.items()}
            content["run"] |= {"identity": self._identity, "logged": np.frombuffer(self._logged.digest(), np.uint8)}
            if self.is_main:
                self._check_in_place(step)
                os.fsync(self._metrics.fileno())  # the checkpoint has its number of lines
                checkpoints.save(self.path, step, content, keep=self._args.keep_checkpoints)
        self._saved = step
        return due

    def _check_in_place(self, step: int) -> None:
        """Raises FailedError if somebody has removed, renamed or replaced the run directory or its metrics.jsonl."""
        path = self.path / "metrics.jsonl"
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._metrics.fileno()), path.stat()):
                return
        raise FailedError(f"{path} was removed, renamed or replaced while the run wrote to it; stopped at step {step}")

    def _topology(self) -> dict[str, int]:
        return {"devices": self._mesh.size, "hosts": jax.process_count(), "cpu": int(devices.on_cpu())}

    def check_finite(self, step: int, metrics: dict[str, float]) -> None:
        """Raises DivergedError if a metric is NaN or infinite, ValueError if it is not a scalar."""
        for name, value in metrics.items():
            if np.shape(value):
                raise ValueError(f"metric {name} has shape {list(np.shape(value))}: must be a scalar, float32 []")
        broken = [name for name, value in metrics.items() if not np.isfinite(value)]
        if broken:
            kept = f"; {self.resume_hint()}" if self.is_main else ""
            raise DivergedError(f"not finite at step {step}: {', '.join(broken)}; training stopped{kept}")

    def _rewind(self, saved: dict[str, Any]) -> None:
        """Takes up the checkpoint's counters, sets later (damaged) checkpoints aside and drops the metrics logged after
        it, which will be logged again; an evaluation of the checkpoint itself stays."""
        self._evaluated, self._saved, self._seconds = int(saved["evaluated"]), saved["step"], float(saved["seconds"])
        here = self._topology()
        kinds = ("an accelerator, with ", "a CPU, with ") if saved["cpu"] != here["cpu"] else ("", "")
        before, now = (
            f"{kinds[int(where['cpu'])]}{where['devices']} devices of {where['hosts']} hosts" for where in (saved, here)
        )
        if before != now:
            self.print(f"this run was on {before} and continues on {now}: its numbers will differ")
        if self.is_main:
            for step in checkpoints.steps_in(self.path):
                if step > self._saved:  # it is damaged
                    files.quarantine(self.path / "checkpoints" / str(step), self.path)
            self._rewind_log(int(saved["lines"]), saved["logged"].tobytes())

    def _rewind_log(self, count: int, digest: bytes) -> None:
        """Keeps the first `count` lines of metrics.jsonl, and an evaluation of the checkpoint itself that may follow.
        Reports lines that are missing or not those of `digest`, and keeps a copy of the file as it was."""
        path, good, sha = self.path / "metrics.jsonl", [], hashlib.sha256()
        with path.open("rb") as file:  # line by line: Ape-X writes millions
            for line in itertools.islice(file, count):
                good.append(_is_logged(line, self._saved))
                sha.update(line)
            later = next(file, b"")
        missing = count - sum(good)
        if sha.digest() != digest:
            of = f"of the {count} lines before step {self._saved}"
            wrong = f"{missing} {of} are missing or not readable" if missing else f"some {of} are not what was logged"
            copy = f"; a copy: {files.quarantine(path, self.path, copy=True)}" if good else ""
            self.print(f"{path}: {wrong}{copy}")
        evaluated = b'"eval/' in later and _is_logged(later, self._saved)
        if new := evaluated and self._evaluated < self._saved and not missing:
            self._evaluated = self._saved
            self._seconds = max(self._seconds, json.loads(later).get("seconds", 0.0))
        self._metrics.close()
        with files.atomic_write(path) as temporary, path.open("rb") as old, temporary.open("wb") as kept:
            for line in itertools.compress(old, [*good, new]):
                kept.write(line)
                self._logged.update(line)
        self._metrics, self._lines = path.open("a"), sum(good) + new

    def replay_progress(self, total: int) -> Callable[[int], None]:
        """Returns progress(count), to be called as steps are replayed: it prints `count` of `total` every ten seconds,
        and on a single host ends the program if a signal came."""
        told = time.monotonic()

        def progress(count: int) -> None:
            nonlocal told
            if self.stop:
                self.print(f"stopped by {self.stop}; the checkpoint is as it was")
                raise SystemExit(0)
            if time.monotonic() - told > 10:
                told = time.monotonic()
                self.print(f"replayed {count:,} of {total:,} environment steps since the last restart")

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
    """Whether this is a whole line of metrics.jsonl, up to that step."""
    try:
        return line.endswith(b"\n") and json.loads(line)["global_step"] <= step
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


class Evaluation(NamedTuple):
    """Result of evaluating a checkpoint, for evaluate.py."""

    step: int  # of the checkpoint
    name: str  # of the entry in eval.json
    title: str  # of the printed table
    rows: list[dict]  # of the table; may be empty
    summary: dict  # the entry in eval.json
    film: np.ndarray | None  # uint8 [T, H, W, 3]
    fps: float = 15  # frames per second of the film
    scenes: int = 1  # in the film, of equal length
    details: dict | None = None  # for eval.json only
