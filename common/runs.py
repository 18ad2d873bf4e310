"""A run: its flags and directory, W&B, metrics, progress line, checkpoints, resume, signals, answers to bad input.

runs/<env_id>__<script>__<seed>__<time>/
    args.json        script, W&B id and arguments
    metrics.jsonl    one line a log, with `global_step`, `time` (seconds since 1970) and `seconds` (of its own clock)
    checkpoints/     Orbax, one folder a step, each with a checksum
    lock             held by the process that trains
    videos/  eval.json  wandb/ or tensorboard/
"""

import ast
import contextlib
import dataclasses
import inspect
import io
import itertools
import json
import os
import platform
import re
import secrets
import shutil
import signal
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, NoReturn, get_type_hints

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

import common
from common import checkpoints, devices, files
from common.files import FailedError, FullError, UsageError, check, write_json

MAX_SEED = 2**31 - 1  # EnvPool's seeds are non-negative int32
MAX_FLOAT = float(np.finfo(np.float32).max)


class DivergedError(FailedError):
    """Training produced NaN or infinity."""


# FLAGS


@dataclass(frozen=True)
class RunArgs:
    """The run and its files."""

    # A group of flags may have: closed ranges of its numbers (None: no bound), names of what a run cannot change when
    # it is resumed, and check(), which raises UsageError. A script inherits groups, and adds its own of each.
    LIMITS: ClassVar = {
        "seed": (0, MAX_SEED), "total_timesteps": (1, 2**31 - 2**24), "checkpoint_every": (1, None),
        "keep_checkpoints": (1, None), "num_devices": (0, None),
    }  # fmt: skip
    FIXED: ClassVar = ("seed",)

    seed: int = 1
    """of everything: the same seed gives the same metrics (with --deterministic, in scripts that have it)"""
    run_dir: str = devices.host_only("runs")
    """where run directories go"""
    resume: str = devices.host_only("")
    """a run directory to continue; its arguments are taken over, and flags given here override them"""
    checkpoint_every: int = devices.host_only(1_000_000)
    """environment steps between checkpoints"""
    keep_checkpoints: int = devices.host_only(3)
    """how many of the newest checkpoints to keep"""
    num_devices: int = 0
    """devices of this machine that learn: GPUs, or cores of a CPU (at most 8); 0 for as many as divide the games
    and minibatches"""
    distributed: bool = False
    """PPO, TRPO, IMPALA: train on several hosts together, each with its share of the games; SLURM or JAX's own
    variables say which"""
    track: Literal["wandb", "tensorboard"] = devices.host_only("wandb")
    """where metrics go besides metrics.jsonl: to Weights & Biases, or to files that TensorBoard reads"""
    wandb_mode: Literal["auto", "online", "offline", "disabled"] = devices.host_only("auto")
    """Weights & Biases; auto is online if logged in, else offline"""
    wandb_project: str = devices.host_only("procgen")
    """W&B project"""
    wandb_entity: str = devices.host_only("")
    """W&B team or user; empty for your default"""

    def check(self) -> None:
        """Raises UsageError if the run has no place."""
        check(self.run_dir != "", "--run-dir '': give a folder")

    def shares(self) -> dict[str, int]:
        """What the devices that learn divide between them: in words, and how many."""
        what, parts = _parts_of_batch(self)
        return {"the games, --num-envs": self.num_envs, f"a minibatch's {what}": parts // self.num_minibatches}


# What flags of earlier versions, and CleanRL's, are called here. A script has the first answer whose flags it has.
OTHER_NAMES = {
    "--num-sgd-iter": ("is --update-epochs here", "is --value-epochs here"),
    "--optimizer-eps": ("is --adam-eps here",),
    "--gru": ("is --core gru here",),
    "--lstm": ("is --core lstm here",),
    "--average-targets": ("is --average-q here",),
    "--target-kl": ("the adaptive KL penalty, --kl-coef and --kl-target, does its work here", "is --max-kl here"),
    "--rnd-episodic": ("is gone; rnd_montezuma.py has the non-episodic bonus",),
    "--lr": ("is --learning-rate here",),
    "--policy-lr": ("is --learning-rate here, of both networks",),
    "--q-lr": ("is --learning-rate here, of both networks",),
    "--anneal-lr": ("is a schedule here, such as --learning-rate 0:5e-4,8000000:0",),
    "--clip-vloss": ("is --vf-clip here, in reward; 0 for none",),
    "--train-frequency": ("is --replay-ratio here, uses of each step",),
    "--update-frequency": ("is --replay-ratio here, uses of each step",),
    "--exp-name": ("a run has its script's name here; --run-dir is where it goes",),
}


def check_args(args: Any, script: str) -> None:
    """Checks flags by their groups' LIMITS and check(), and what a resumed run keeps by FIXED.

    Raises UsageError, one sentence, if a flag's value makes no sense.
    """
    named = bool(re.fullmatch(r"\w+_\w+", script))
    form = "give it a name of letters, digits and an underscore, such as my_ppo.py, else its runs cannot be found again"
    check(named, f"{script}.py: {form}")
    check_flags(args)
    check_devices(args)
    if args.resume:
        saved = saved_args(type(args), args.resume, "--resume", script)
        whole = (Path(args.resume) / "checkpoints").is_dir()
        check(whole, f"--resume {args.resume}: has no checkpoints, as an exported agent; give a run directory")
        for name in fixed(type(args)):
            new, old = getattr(args, name), getattr(saved, name)
            check(new == old, f"{as_given(name, new)}: a resumed run keeps its own, {as_given(name, old)}")


def check_flags(args: Any) -> None:
    """Raises UsageError if a flag's value makes no sense, by its group's LIMITS and check()."""
    groups = _groups(type(args))
    for group in groups:
        for name, value in vars(group).items():
            plain = isinstance(value, bool | int | float | str) and name.islower() and not name.startswith("_")
            if plain and name not in inspect.get_annotations(group):
                new = f"{name}: {type(value).__name__} = {value!r}"
                raise UsageError(f"{group.__name__}.{name}: is no flag, and no new default, without its type: {new}")
    for group in reversed(groups):  # a script's own first: its total_timesteps may be made of them
        check_limits(args, vars(group).get("LIMITS", {}))
    for group in groups:
        if "check" in vars(group):
            group.check(args)
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        finite = not isinstance(value, float) or abs(value) <= MAX_FLOAT
        check(finite, f"{flag_of(field.name)} {value}: is not a number that float32 can hold")


def check_devices(args: Any) -> None:
    """Raises UsageError if this run cannot be spread over the devices and hosts that it is to have."""
    most, hosts = len(devices.of_learner(args)), devices.hosts(args)
    each = [len(own) for own in devices.of_hosts(args)]
    same = f"--distributed: the hosts have {each} devices; give each as many, by CUDA_VISIBLE_DEVICES or (CPU) taskset"
    check(len(set(each)) == 1, same)
    check(most > 0, f"--actor-devices {getattr(args, 'actor_devices', 0)}: leaves none of this machine's to learn")
    check(args.num_devices <= most, f"--num-devices {args.num_devices}: there are {most} to learn on this machine")
    for what, share in args.shares().items():
        check(share % hosts == 0, f"--distributed: the {hosts} hosts do not divide {what}, {share}")
        fit = devices.that_divide(args, share)
        must = " or ".join(map(str, fit)) + (f" on each of {hosts} hosts" if hosts > 1 else "")
        check(
            args.num_devices in (0, *fit),
            f"--num-devices {args.num_devices}: does not divide {what}, {share}; give {must}",
        )


GAME = 280_000  # bytes of a game of bigfish in EnvPool; coinrun has 790,000, Montezuma's Revenge 950,000


def check_memory(args: Any, names: Sequence[str], arrays: Any, on_host: Any = ()) -> None:
    """Raises UsageError if a run keeps more than there is memory for. (It needs still more in an update.)

    Args:
      names: of the flags that decide about it.
      arrays: what lies on the devices that learn, a tree of anything with a shape and a dtype.
      on_host: what lies in this host's memory besides the games.
    """
    sizes = [sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) for tree in (arrays, on_host)]
    of_host, of_devices = devices.memory(args)
    games = len(devices.games_of_host(args)) * GAME
    asked = {"this machine": (sizes[1] + games + sizes[0] * devices.on_cpu(), of_host)}
    if not devices.on_cpu():
        asked["the devices that learn"] = sizes[0], of_devices
    flags = " ".join(as_given(name, getattr(args, name)) for name in names)
    needs = " and ".join(
        f"{need / 1e9:,.1f} GB on {place} (there are {there / 1e9:,.1f})" for place, (need, there) in asked.items()
    )
    check(all(need <= there for need, there in asked.values()), f"{flags}: ask for at least {needs} of memory")


def fixed(args_class: type) -> tuple[str, ...]:
    """Names of the flags that a resumed run keeps: of a script and of the groups that it inherits."""
    return tuple(name for group in _groups(args_class) for name in vars(group).get("FIXED", ()))


def _groups(args_class: type) -> list[type]:
    return [group for group in reversed(args_class.__mro__) if dataclasses.is_dataclass(group)]


# THE COMMAND LINE


def cli(args_class: type, main: Callable, argv: Sequence[str] | None = None) -> None:
    """Runs a script's `main(args)` on the command line's flags; answers bad input in one line with exit code 2.

    With `--resume RUN_DIR` the flags start from that run's own arguments, so that none need be repeated.
    """
    module = sys.modules[main.__module__]
    argv = _plain_booleans(args_class, sys.argv[1:] if argv is None else argv)
    set_up_jax()
    try:
        _check_names(args_class, argv)
        default = None
        flags = [word.partition("=")[0].replace("_", "-") for word in argv]
        check(flags.count("--resume") <= 1, "--resume: is given twice, give one run directory")
        run_dir = _flag_value(argv, "--resume")
        check(run_dir != "", "--resume '': give a run directory, or leave the flag out to start a new run")
        if run_dir:
            default = saved_args(args_class, run_dir, "--resume", Path(module.__file__).stem)
        args = _parse(args_class, argv, default, module.__doc__)
        _check_given(args, flags)
        if getattr(args, "distributed", False):
            # Before JAX starts, which a dtype that depends on the device would do: not every script can.
            check_flags(dataclasses.replace(args, dtype="float32") if hasattr(args, "dtype") else args)
            _join_hosts()
        main(args)
    except (UsageError, FailedError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        _exit(2 if isinstance(error, UsageError) else 1)
    except BrokenPipeError:  # as in `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _exit(128 + signal.SIGPIPE)
    except KeyboardInterrupt:  # a second Ctrl-C: the last checkpoint is kept
        _exit(128 + signal.SIGINT)
    except Exception as error:
        if jax.process_count() == 1:
            raise
        if not re.search("gloo|nccl|unavailable|deadline", str(error), re.IGNORECASE):
            traceback.print_exc()
        reason = files.first_line(error)
        print(f"error: this host or another has failed ({reason}); go on with --resume", file=sys.stderr, flush=True)
        _exit(1)


def _exit(code: int) -> NoReturn:
    if jax.distributed.is_initialized():
        os._exit(code)  # not sys.exit, which would wait for the other hosts
    sys.exit(code)


def _join_hosts() -> None:
    try:
        devices.connect()
    except (RuntimeError, ValueError, IndexError) as error:  # the last for an address without a port
        raise UsageError(
            f"--distributed: the hosts were not found ({files.first_line(error)}); start it with srun, or set "
            "JAX_COORDINATOR_ADDRESS (HOST:PORT), JAX_NUM_PROCESSES and JAX_PROCESS_ID on each; "
            "on one host give --no-distributed"
        ) from None


def set_up_jax() -> None:
    """Every core of a CPU as a device, and compiled programs in the user's cache folder, so that a second start takes
    seconds. Before JAX starts; importing does neither."""
    devices.use_every_core()
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(files.own_folder())
    jax.config.update("jax_compilation_cache_dir", folder)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:  # JAX's own is a whole second
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _parse(args_class: type, argv: Sequence[str], default: Any, description: str) -> Any:
    """tyro.cli, whose --help shows a script's own flags first and then, each in a box, the groups it inherits."""
    groups = [group for group in args_class.__bases__ if dataclasses.is_dataclass(group)]
    if not groups:
        return tyro.cli(args_class, args=argv, default=default, description=description)
    default = args_class() if default is None else default
    hints, texts = get_type_hints(args_class, include_extras=True), _field_texts(args_class)
    inherited = {field.name for group in groups for field in dataclasses.fields(group)}

    def box(name, about, fields):
        flags = [
            (field.name, Annotated[hints[field.name], tyro.conf.arg(help=texts.get(field.name, ""))])
            for field in fields
        ]
        part = dataclasses.make_dataclass(name, flags, frozen=True)
        kind = Annotated[tyro.conf.OmitArgPrefixes[part], tyro.conf.arg(help=about)]
        return name, kind, part(**{flag: getattr(default, flag) for flag, _ in flags})

    boxes = [box("algorithm", "", [field for field in dataclasses.fields(args_class) if field.name not in inherited])]
    for group in groups:
        boxes.append(box(group.__name__.removesuffix("Args").lower(), group.__doc__, dataclasses.fields(group)))
    answer = tyro.cli(dataclasses.make_dataclass("Boxed", boxes), args=argv, description=description)
    return args_class(**{flag: value for part in vars(answer).values() for flag, value in vars(part).items()})


def _field_texts(args_class: type) -> dict[str, str]:
    """The literal below each field, in the words of the class that says it last: a script's before its groups'."""
    texts = {}
    for each in filter(dataclasses.is_dataclass, reversed(args_class.__mro__)):
        body = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0].body
        texts |= {
            field.target.id: " ".join(text.value.value.split())
            for field, text in itertools.pairwise(body)
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
        }
    return texts


def _check_given(args: Any, flags: Sequence[str]) -> None:
    """Raises UsageError for a flag that would do nothing, of those that the command line has."""
    if getattr(args, "resume", ""):
        there = Path(args.resume).resolve().parent == Path(args.run_dir).resolve()
        stays = f"--run-dir {args.run_dir}: a resumed run stays in its folder, {args.resume}; leave the flag out"
        check(there or "--run-dir" not in flags, stays)
    if getattr(args, "track", "wandb") != "wandb":
        for name in ("wandb_mode", "wandb_project", "wandb_entity"):
            given, value = flag_of(name) in flags, getattr(args, name)
            check(not given or value == "disabled", f"{as_given(name, value)}: has no effect with --track {args.track}")


def _check_names(args_class: type, argv: Sequence[str]) -> None:
    """Raises UsageError for a flag that has another name in this script."""
    names = {flag_of(field.name) for field in dataclasses.fields(args_class)}
    for word in argv:
        flag = word.partition("=")[0].replace("_", "-").replace("--no-", "--")
        for answer in OTHER_NAMES.get(flag, ()) if flag not in names else ():
            if names.issuperset(re.findall(r"--[a-z-]+", answer)):
                raise UsageError(f"{flag}: {answer}")


def _plain_booleans(args_class: type, argv: Sequence[str]) -> list[str]:
    """--gap_stack=False, as `wandb agent` has it, becomes --no-gap-stack."""
    flags = [flag_of(name)[2:] for name, kind in get_type_hints(args_class).items() if kind is bool]
    words = []
    for word in argv:
        name, _, value = word.removeprefix("--").partition("=")
        name = name.replace("_", "-")
        if word.startswith("--") and name in flags and value.lower() in ("true", "false"):
            word = f"--{name}" if value.lower() == "true" else f"--no-{name}"
        words.append(word)
    return words


def _flag_value(argv: list[str], flag: str) -> str | None:
    for i, word in enumerate(argv):
        if word == flag:
            return argv[i + 1] if i + 1 < len(argv) else None
        if word.startswith(flag + "="):
            return word.removeprefix(flag + "=")
    return None


class Schedule(NamedTuple):
    """A piecewise-linear function of the environment step, constant before its first and after its last point."""

    steps: tuple[float, ...]
    values: tuple[float, ...]

    def __call__(self, step: jax.Array) -> jax.Array:
        """Value float32 [] at an environment step []; traceable."""
        steps, values = (np.asarray(a, np.float32) for a in self)
        return jax.numpy.interp(jax.numpy.asarray(step, np.float32), steps, values)


def parse_schedule(text: str) -> Schedule:
    """Reads "0.0005" or "0:1e-4,500000:8e-4,1000000:1e-4"; raises ValueError if it is neither."""
    points = text.split(",") if ":" in text else [f"0:{text}"]
    steps, values = zip(*(map(float, point.split(":")) for point in points), strict=True)
    finite = (np.abs(steps + values) <= MAX_FLOAT).all()  # NaN is not
    if not (finite and steps[0] >= 0 and (np.diff(steps) > 0).all()):
        raise ValueError(text)
    return Schedule(steps, values)


def _check_schedule(flag: str, text: str, low: float, high: float | None) -> None:
    form = f'{flag} {text!r}: give a number, or points "step:value,step:value,..." with rising steps'
    try:
        values = parse_schedule(text).values
    except ValueError:
        raise UsageError(form) from None
    check(min(values) >= low and (high is None or max(values) <= high), f"{flag} {text!r}: {_range(low, high)}")


def flag_of(name: str) -> str:
    """The flag of a field: --num-envs of num_envs, --async of async_."""
    return "--" + name.rstrip("_").replace("_", "-")


def as_given(name: str, value: Any) -> str:
    """A flag and its value as they are written: --num-envs 8, --no-gap-stack."""
    words = flag_of(name)
    return f"--no-{words[2:]}" if value is False else words if value is True else f"{words} {value}"


def check_batch(args: Any) -> None:
    """Raises UsageError if a rollout of all games, num_envs x num_steps, has no even minibatches, or is too large."""
    batch = args.num_envs * args.num_steps
    what, parts = _parts_of_batch(args)
    divided = {
        "samples": f"the batch, num_envs x num_steps = {batch}",
        "games": f"the number of games, {parts} (a recurrent core learns from whole rollouts)",
    }
    check(parts % args.num_minibatches == 0, f"--num-minibatches {args.num_minibatches}: must divide {divided[what]}")
    check(batch <= 2**24, f"--num-envs {args.num_envs}: num_envs x num_steps = {batch} must be at most {2**24}")


def _parts_of_batch(args: Any) -> tuple[str, int]:
    """What minibatches are made of, and how many a rollout of all games has: a core learns from whole rollouts."""
    if getattr(args, "core", "none") != "none":
        return "games", args.num_envs
    return "samples", args.num_envs * args.num_steps


def check_limits(args: Any, limits: dict[str, tuple[float, float | None]]) -> None:
    """Raises UsageError if a number or schedule of `args`, where one is given, lies outside its closed range (None: no
    bound)."""
    for name, (low, high) in limits.items():
        value = getattr(args, name)
        if value is None:
            continue
        if isinstance(value, str):
            _check_schedule(flag_of(name), value, low, high)
            continue
        inside = low <= value < float("inf") and (high is None or value <= high)
        check(inside, f"{flag_of(name)} {value}: {_range(low, high)}")


def check_needs(args: Any, given: Any, need: str, flags: Sequence[str]) -> None:
    """Raises UsageError if one of these flags (of those that `args` has) is changed and what it needs is not given."""
    own = {field.name: field.default for field in dataclasses.fields(args) if field.name in flags}
    for name, default in own.items():
        value = getattr(args, name)
        check(given or value == default, f"{as_given(name, value)}: has no effect without {need}")


def _range(low: float, high: float | None) -> str:
    return f"must be {low} or more" if high is None else f"must be from {low} to {high}"


def crossed(every: int, before: int, after: int) -> bool:
    """Whether a multiple of `every` (0: none) lies in (before, after]."""
    return every > 0 and before // every < after // every


# FILES


def read_args(run_dir: str, flag: str, script: str | None = None) -> dict[str, Any]:
    """The content of a run's `args.json`: script, wandb_id, args.

    Raises UsageError, naming `flag`, if `run_dir` is no run, or a run of another script than `script`.
    """
    form = "give a run directory, with a readable args.json in it"
    content = files.read(Path(run_dir, "args.json"), dict, flag, form)
    known = re.fullmatch(r"\w+", str(content.get("script"))) and isinstance(content.get("args"), dict)
    check(bool(known), f"{flag} {run_dir}: its args.json has no script's name and no arguments; {form}")
    owner = content["script"]
    check(script in (None, owner), f"{flag} {run_dir}: give a run of {script}.py, this one is of {owner}.py")
    return content


def saved_args(args_class: type, run_dir: str, source: str, script: str | None = None) -> Any:
    """The arguments of a run; a field that it does not have yet takes its default. Raises UsageError."""
    args = read_args(run_dir, source, script)["args"]
    words = _plain_booleans(args_class, [f"{flag_of(name)}={value}" for name, value in args.items()])
    about = f"{source} {run_dir}: its args.json is not of this version of the script"
    text = io.StringIO()
    try:
        _check_names(args_class, words)
        with contextlib.redirect_stderr(text):
            return tyro.cli(args_class, args=words)
    except UsageError as error:
        raise UsageError(f"{about}: {error}") from None
    except SystemExit:
        lines = [line.strip("│─ ") for line in text.getvalue().splitlines()]  # title, what is wrong, a rule, help
        raise UsageError(f"{about}: {' '.join(itertools.takewhile(bool, lines[1:]))}") from None


def on_this_machine(args: Any) -> Any:
    """The arguments of a run, to play what it has learnt on whatever devices there are here."""
    anywhere = {"num_devices": 0, "actor_devices": 0, "distributed": False, "replay_device": "device"}
    return dataclasses.replace(args, **{name: anywhere[name] for name in anywhere if hasattr(args, name)})


def load(initial: Callable[[], dict], run_dir: str) -> dict[str, Any]:
    """The newest checkpoint of a run, those parts of it that `initial` makes with their structure; raises UsageError.

    What is of one host only is in it where there are as many hosts as there were.
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
            if name != "resume" and new != getattr(saved, name)
        }
        told = "; ".join(f"{flag} here, {old} there" for flag, old in changed.items())
        raise UsageError(f"{error}; flags differ: {told}" if told else str(error)) from None


class _Checkpoint(dict):
    """Parts of a checkpoint; raises UsageError for one that is not in it."""

    run_dir: str

    def __missing__(self, name: str):
        raise UsageError(f"{self.run_dir}: its checkpoint is not of this version of the script, it has no {name}")


# THE RUN


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
        mode = _wandb_mode(args) if self.first else "disabled"
        with contextlib.ExitStack() as undo, _undone_by_signals(undo):
            try:
                with files.full_disk_explained(Path(root)):
                    self._open(args, script, load, mode=mode, undo=undo)
            except OSError as error:
                raise UsageError(f"{flag} {root}: cannot write there ({error.strerror})") from None
            undo.pop_all()
        self.stop, self._script, self._args = None, script, args
        self._lines, self._evaluated, self._saved, self._begun = 0, 0, 0, False
        self._signal, self._written, self._seconds = None, None, 0.0
        self._old_handlers = {}
        self._console = Console(stderr=True, quiet=not self.first)
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
        self._wandb = _start_wandb(args, mode, self.path, run_id, config | {"env_id": args.env_id})
        if self._wandb:
            undo.callback(self._wandb.finish, exit_code=1)
            if os.environ.get("WANDB_SWEEP_ID"):  # the run is in the sweep's project, where a resume is to find it
                config |= {"wandb_project": self._wandb.project, "wandb_entity": self._wandb.entity or ""}
        self._board = None
        if args.track == "tensorboard" and self.first:
            # What a resumed run had logged after its checkpoint is to vanish.
            after = int(self.saved["run"]["step"]) + 1 if self.saved else None
            self._board = _Board(self.path / "tensorboard", after)
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
        if isinstance(error, FullError) and self.first:
            error.args = (f"{error}; {self.kept()}",)
        if self.stop and kind is None:
            kept = checkpoints.steps_in(self.path)
            how = f"continue with: {self._how_to_go_on()}" if kept else "there was no checkpoint yet, begin again"
            self.say(f"stopped by {self.stop}; {how}")
        self._tell_wandb("finish", exit_code=0 if kind in (None, SystemExit) else 1)
        if self._lock:
            self._lock.close()
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

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
        with files.full_disk_explained(self.path / "metrics.jsonl"):
            self._metrics.write(json.dumps(clocks | numbers) + "\n")
            self._metrics.flush()
        self._lines += 1
        self._log_to_wandb(step, numbers)
        if self._board:
            self._board.add_numbers(step, numbers)
        if "charts/SPS" in numbers:
            status = f"{step:,} steps  {numbers['charts/SPS']:,.0f}/s"
            status += f"  return {numbers.get('charts/episodic_return', float('nan')):.2f}"
            self._progress.update(self._task, completed=step, status=status)

    def _log_to_wandb(self, step: int, what: dict[str, Any]) -> None:
        """The step is a value like others, which `_start_wandb` makes the axis: of W&B's own steps none may come twice,
        and after a resume some do."""
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
        write_video(path, frames)
        if self._wandb:
            import wandb

            self._log_to_wandb(step, {"videos/episode": wandb.Video(str(path))})

    def save_picture(self, step: int, name: str, picture: np.ndarray) -> None:
        """Writes uint8 [H, W, 3] to <name>.png and W&B."""
        path = self.path / f"{name}.png"
        write_picture(path, picture)
        if self._wandb:
            import wandb

            self._log_to_wandb(step, {f"pictures/{name}": wandb.Image(str(path))})
        if self._board:
            self._board.add_picture(step, f"pictures/{name}", picture)

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
                with files.full_disk_explained(self.path / "metrics.jsonl"):
                    os.fsync(self._metrics.fileno())  # a checkpoint says how many lines there are
                tree = serialization.to_state_dict(content)
                checkpoints.save(self.path, step, tree, keep=self._args.keep_checkpoints)
        self._saved = self._written = step

    def _where(self) -> dict[str, int]:
        return {"devices": devices.mesh(self._args).size, "hosts": devices.hosts(self._args)}

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
        before, now = (f"{where['devices']} devices of {where['hosts']} hosts" for where in (saved, self._where()))
        if before != now:
            self.say(f"this run was on {before} and goes on with {now}: it will not be the same run")
        if self.first:
            checkpoints.set_aside(self.path, after=self._saved)
            self._go_back_to_line(int(saved["lines"]))

    def _go_back_to_line(self, count: int) -> None:
        """Keeps the first `count` lines of metrics.jsonl; says so if they are not all there, and keeps what cannot be
        read elsewhere. Also keeps an evaluation of the checkpoint itself, which may have come after it."""
        path = self.path / "metrics.jsonl"
        everything = path.read_bytes().splitlines(keepends=True)
        lines, later = everything[:count], everything[count:]
        kept = [line for line in lines if _is_logged(line, self._saved)]
        if len(kept) < count:
            lost = f"{path}: {count - len(kept)} of the {count} lines before step {self._saved} are missing"
            if lines:
                aside = files.set_aside(path, self.path / "damaged", copy=True)
                lost += f" or not readable; what was there is now {aside}"
            self.say(lost)
        new = later and self._evaluated < self._saved and b'"eval/' in later[0] and _is_logged(later[0], self._saved)
        if new and len(kept) == count:
            kept.append(later[0])
            self._evaluated = self._saved
            self._seconds = max(self._seconds, json.loads(later[0]).get("seconds", 0.0))
        self._metrics.close()
        with files.whole(path) as temporary:
            temporary.write_bytes(b"".join(kept))
        self._metrics, self._lines = path.open("a"), len(kept)

    def while_replaying(self, what: str, total: int) -> Callable[[int], None]:
        """Asked with how many of `total` steps have been played again: says so every ten seconds, and ends the program
        if a signal came, since nothing has been learnt yet."""
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


def _wandb_mode(args: Any) -> str:
    """online, offline or disabled; auto is what WANDB_MODE says, or online where the user is logged in."""
    if args.wandb_mode == "disabled" or args.track != "wandb":
        return "disabled"
    try:
        import wandb
    except ImportError:
        raise UsageError(f"--wandb-mode {args.wandb_mode}: the package wandb is not installed; use disabled") from None
    mode = (os.environ.get("WANDB_MODE") or None) if args.wandb_mode == "auto" else args.wandb_mode
    if mode in (None, "online"):
        try:
            logged_in = wandb.login(prompt=False)
        except Exception:  # no network, or a key that is refused: without the server, training can go on
            logged_in = False
        check(
            logged_in or mode is None, f"--wandb-mode {args.wandb_mode}: not logged in; run wandb login or use offline"
        )
        mode = "online" if logged_in else "offline"
    return mode


def _start_wandb(args: Any, mode: str, path: Path, run_id: str, config: dict[str, Any]):
    """W&B's run, or None where it is disabled."""
    if mode == "disabled":
        return None
    import wandb

    try:
        run = wandb.init(
            project=args.wandb_project,
            entity=args.wandb_entity or None,
            name=path.resolve().name,
            id=run_id,
            resume="allow",
            dir=path,
            config=config,
            mode=mode,
            # Without an end, a run that is stopped would wait for a network that is gone.
            settings=wandb.Settings(console="off", silent=mode != "online", finish_timeout=60),
        )
        run.define_metric("global_step")
        run.define_metric("*", step_metric="global_step")
        return run
    except Exception as error:  # W&B raises many kinds
        given = f"--wandb-mode {args.wandb_mode} --wandb-project {args.wandb_project}"
        raise UsageError(
            f"{given}: W&B does not start ({error!r}); give another mode or project, or --wandb-mode disabled"
        ) from None


def _is_logged(line: bytes, step: int) -> bool:
    """Whether this is a whole line of metrics.jsonl, of that step or one before."""
    try:
        return line.endswith(b"\n") and json.loads(line)["global_step"] <= step
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


class _Board:
    """TensorBoard's file of events, which are in it when they have been logged. tensorboardX's own writer leaves that
    to a thread, which dies where the disk is full, and all wait for it."""

    def __init__(self, folder: Path, purge_step: int | None):
        """What older files say of `purge_step` and later is to vanish. Raises OSError where it cannot be written."""
        from tensorboardX import record_writer, summary  # late: not every run writes for it
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._summary, self._event, self._path = summary, Event, folder
        folder.mkdir(exist_ok=True)
        # A file is named by the second in which it is opened, and replaces no other.
        name = f"events.out.tfevents.{int(time.time())}.{platform.node()}.{purge_step or 0}"
        self._file = record_writer.RecordWriter(str(folder / name))
        first = [Event(wall_time=time.time(), file_version="brain.Event:2")]
        if purge_step is not None:
            first.append(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))
        self._write(first)

    def _write(self, events: Iterable) -> None:
        with files.full_disk_explained(self._path):
            for event in events:
                self._file.write(event.SerializeToString())
            self._file.flush()

    def add_numbers(self, step: int, numbers: dict[str, float]) -> None:
        values = [self._summary.scalar(name, number) for name, number in numbers.items()]
        self._write(self._event(wall_time=time.time(), step=step, summary=value) for value in values)

    def add_picture(self, step: int, name: str, picture: np.ndarray) -> None:
        value = self._summary.image(name, picture, dataformats="HWC")
        self._write([self._event(wall_time=time.time(), step=step, summary=value)])

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def _undone_by_signals(undo: contextlib.ExitStack) -> Iterator[None]:
    """A signal before training, which ends the program at once, first takes back what a run has begun: no folder is
    left that is no run."""

    def end(number: int, frame) -> None:
        try:
            undo.close()
        finally:
            common._end(number, frame)

    numbers = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is common._end]
    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, common._end)


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


MOMENTS = 8  # in each row of a film strip


def film_strip(frames: np.ndarray, scenes: int, moments: int = MOMENTS) -> np.ndarray:
    """Moments of a film [T, H, W, 3], evenly spaced from the first to the last of each scene: a picture, a row each."""
    rows = []
    for scene in np.array_split(frames, scenes):
        chosen = scene[np.linspace(0, len(scene) - 1, moments).round().astype(int)]
        rows.append(np.concatenate(chosen, axis=1))
    return np.concatenate(rows)


def side_by_side(films: dict[str, np.ndarray], size: int = 384) -> Iterator[np.ndarray]:
    """Films [T, H, W, 3] beside each other, of `size` pixels and under their names, frame after frame; who ends early
    stands still."""
    from PIL import Image, ImageDraw, ImageFont

    band = 32
    title = Image.new("RGB", (size * len(films), band), "white")
    for i, name in enumerate(films):
        middle = size * (i + 0.5), band / 2
        ImageDraw.Draw(title).text(middle, name, "black", ImageFont.load_default(18), anchor="mm")
    for t in range(max(map(len, films.values()))):
        frames = [Image.fromarray(film[min(t, len(film) - 1)]) for film in films.values()]
        row = np.concatenate([frame.resize((size, size), Image.Resampling.NEAREST) for frame in frames], axis=1)
        yield np.concatenate([np.asarray(title), row])


def write_picture(path: Path, picture: np.ndarray) -> None:
    """Writes uint8 [H, W, 3] as png, under a temporary name first."""
    from PIL import Image

    with files.whole(path) as temporary:
        Image.fromarray(picture).save(temporary, format="png")


def write_video(path: Path, frames: Iterable[np.ndarray], fps: float = 15) -> None:
    """Writes uint8 frames [H, W, 3] as mp4, enlarged to some 400 pixels, under a temporary name first."""
    import av

    frames = iter(frames)
    first = next(frames)
    scale = round(400 / len(first))

    with files.whole(path) as temporary, av.open(str(temporary), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps), options={"crf": "18"})
        stream.height, stream.width = (scale * size for size in first.shape[:2])
        stream.pix_fmt = "yuv420p"
        for frame in itertools.chain([first], frames):
            picture = np.ascontiguousarray(frame.repeat(scale, axis=0).repeat(scale, axis=1))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
