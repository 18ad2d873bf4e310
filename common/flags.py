"""The command line: flags of groups, what they may be, schedules, a run's own arguments, answers to bad input."""

import ast
import contextlib
import dataclasses
import inspect
import io
import itertools
import os
import re
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn, get_origin, get_type_hints

import jax
import numpy as np
import tyro

from common import devices, files
from common.files import FailedError, UsageError, check

MAX_SEED = 2**31 - 1  # EnvPool's seeds are non-negative int32
MAX_FLOAT = float(np.finfo(np.float32).max)

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
    "--policy-lr": ("is --learning-rate here, whose help says of what",),
    "--q-lr": ("is --learning-rate here, whose help says of what",),
    "--anneal-lr": ("is --learning-rate here, 0:5e-4,8000000:0 if its help calls it a schedule",),
    "--clip-vloss": ("is --vf-clip here, in reward; 0 for none",),
    "--train-frequency": ("is --replay-ratio here, uses of each step",),
    "--update-frequency": ("is --replay-ratio here, uses of each step",),
    "--exp-name": ("a run has its script's name here; --run-dir is where it goes",),
}


# THE COMMAND LINE


def cli(args_class: type, main: Callable, argv: Sequence[str] | None = None) -> None:
    """Runs a script's `main(args)` on the command line's flags; answers a UsageError in one line with exit code 2,
    and a FailedError with 1. What tyro cannot parse, it answers itself, with 2.

    With `--resume RUN_DIR` the flags start from that run's own arguments, so that none need be repeated.
    """
    module = sys.modules[main.__module__]
    argv = plain_booleans(args_class, sys.argv[1:] if argv is None else argv)
    set_up_jax()
    try:
        flags = [word.partition("=")[0].replace("_", "-") for word in argv]
        _check_names(args_class, flags)
        _check_once(args_class, flags)
        run_dir = _flag_value(argv, "--resume")
        check(run_dir != "", "--resume '': give a run directory, or leave the flag out to start a new run")
        _check_types(args_class)
        default = saved_args(args_class, run_dir, "--resume", Path(module.__file__).stem) if run_dir else None
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
        if "RESOURCE_EXHAUSTED" in (why := f"{error} {error.__cause__}"):  # of an actor it is the cause
            full = files.first_line(why[why.index("RESOURCE_EXHAUSTED") :])
            less = "the last checkpoint is whole; give fewer --num-envs, or run fewer scripts on the device"
            print(f"error: a device's memory is full ({full[:200]}); {less}", file=sys.stderr, flush=True)
            _exit(128 + signal.SIGKILL)  # as where the host's memory is full: to go on from there may help
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
    jax.config.update("jax_default_prng_impl", "threefry2x32")  # JAX's own today: a run is repeated by them
    jax.config.update("jax_threefry_partitionable", True)
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
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
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


def _check_names(args_class: type, flags: Iterable[str]) -> None:
    """Raises UsageError for a flag that has another name in this script."""
    names = {flag_of(field.name) for field in dataclasses.fields(args_class)}
    for flag in flags:
        flag = flag.replace("--no-", "--")
        for answer in OTHER_NAMES.get(flag, ()) if flag not in names else ():
            if names.issuperset(re.findall(r"--[a-z-]+", answer)):
                raise UsageError(f"{flag}: {answer}")


def _check_once(args_class: type, flags: Sequence[str]) -> None:
    """Raises UsageError where an earlier flag would be forgotten: of other flags the last one counts, as usual."""
    check(flags.count("--resume") <= 1, "--resume: is given twice, give one run directory")
    for name, kind in get_type_hints(args_class).items():
        lists = get_origin(kind) is tuple and flags.count(flag_of(name)) > 1
        check(not lists, f"{flag_of(name)}: is given twice, give all its values after one")


def plain_booleans(args_class: type, argv: Sequence[str]) -> list[str]:
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


# WHAT FLAGS MAY BE


def check_args(args: Any, script: str) -> None:
    """Checks flags by their groups' LIMITS and check(), and what a resumed run keeps by FIXED.

    Raises UsageError, one sentence, if a flag's value makes no sense.
    """
    named = bool(re.fullmatch(r"\w+_\w+", script))
    form = "give it a name of letters, digits and an underscore, such as my_ppo.py, else its runs cannot be found again"
    check(named, f"{script}.py: {form}")
    if args.resume:  # first: what else is wrong then may be a flag that nobody gave
        saved = saved_args(type(args), args.resume, "--resume", script)
        whole = (Path(args.resume) / "checkpoints").is_dir()
        check(whole, f"--resume {args.resume}: has no checkpoints, as an exported agent; give a run directory")
        for name in fixed(type(args)):
            new, old = getattr(args, name), getattr(saved, name)
            check(new == old, f"{as_given(name, new)}: a resumed run keeps its own, {as_given(name, old)}")
    check_flags(args)
    check_devices(args)


def _check_types(args_class: type) -> None:
    """Raises UsageError for what looks like a flag, or a flag's new default, and has no type: it would be neither."""
    types = {field.name: field.type for field in dataclasses.fields(args_class)}
    for group in _groups(args_class):
        for name, value in vars(group).items():
            plain = isinstance(value, bool | int | float | str | tuple) and name.islower() and not name.startswith("_")
            if (plain or name in types) and name not in inspect.get_annotations(group):
                kind = types.get(name, type(value))
                kind = getattr(kind, "__name__", kind)
                if isinstance(value, tuple):
                    kind = f"tuple[{', '.join(type(each).__name__ for each in value)}]"
                new = f"{name}: {kind} = {(str(value) if kind == 'str' else value)!r}"
                of_class = "" if name in types else "; if it is not to be a flag, annotate it as a ClassVar"
                what = f"is no flag, and no new default, without its type: {new}{of_class}"
                raise UsageError(f"{group.__name__}.{name}: {what}")


def check_flags(args: Any) -> None:
    """Raises UsageError if a flag's value makes no sense, by its group's LIMITS and check()."""
    _check_types(type(args))
    groups = _groups(type(args))
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
    actors = getattr(args, "actor_devices", 0)
    check(most > 0, f"--actor-devices {actors}: leaves none of this machine's devices to learn on, give fewer")
    given = f"--num-devices {args.num_devices}"
    check(args.num_devices <= most, f"{given}: there are {most} devices to learn on this machine, give at most that")
    for what, share in args.shares().items():
        check(share % hosts == 0, f"--distributed: the {hosts} hosts do not divide {what}, {share}")
        fit = devices.that_divide(args, share)
        must = " or ".join(map(str, fit)) + (f" on each of {hosts} hosts" if hosts > 1 else "")
        check(
            args.num_devices in (0, *fit),
            f"--num-devices {args.num_devices}: does not divide {what}, {share}; give {must}",
        )


GAME_BYTES = 280_000  # of bigfish in EnvPool; coinrun has 790,000, Montezuma's Revenge 950,000


def check_memory(args: Any, names: Sequence[str], arrays: Any, on_host: Any = (), game_bytes: int = GAME_BYTES) -> None:
    """Raises UsageError if a run keeps more than there is memory for. (It needs still more in an update.)

    Args:
      names: of the flags that decide about it.
      arrays: what lies on the devices that learn, a tree of anything with a shape and a dtype.
      on_host: what lies in this host's memory besides the games.
      game_bytes: of one game.
    """
    sizes = [sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) for tree in (arrays, on_host)]
    of_host, of_devices = devices.memory(args)
    games = len(devices.games_of_host(args)) * game_bytes
    asked = {"this machine": (sizes[1] + games + sizes[0] * devices.on_cpu(), of_host)}
    if not devices.on_cpu():
        asked["the devices that learn"] = sizes[0], of_devices
    flags = " ".join(as_given(name, getattr(args, name)) for name in names)
    needs = " and ".join(
        f"{need / 1e9:,.1f} GB on {place} (there are {there / 1e9:,.1f})" for place, (need, there) in asked.items()
    )
    fits = all(need <= there for need, there in asked.values())
    check(fits, f"{flags}: ask for at least {needs} of memory, give smaller values")


def fixed(args_class: type) -> tuple[str, ...]:
    """Names of the flags that a resumed run keeps: of a script and of the groups that it inherits."""
    return tuple(name for group in _groups(args_class) for name in vars(group).get("FIXED", ()))


def _groups(args_class: type) -> list[type]:
    return [group for group in reversed(args_class.__mro__) if dataclasses.is_dataclass(group)]


def check_batch(args: Any) -> None:
    """Raises UsageError if a rollout of all games, num_envs x num_steps, has no even minibatches, or is too large."""
    batch = args.num_envs * args.num_steps
    what, parts = parts_of_batch(args)
    divided = {
        "samples": f"the batch, num_envs x num_steps = {batch}",
        "games": f"the number of games, {parts} (a recurrent core learns from whole rollouts)",
    }
    check(parts % args.num_minibatches == 0, f"--num-minibatches {args.num_minibatches}: must divide {divided[what]}")
    check(batch <= 2**24, f"--num-envs {args.num_envs}: num_envs x num_steps = {batch} must be at most {2**24}")


def parts_of_batch(args: Any) -> tuple[str, int]:
    """What minibatches are made of, and how many a rollout of all games has: a core learns from whole rollouts."""
    if getattr(args, "core", "none") != "none":
        return "games", args.num_envs
    return "samples", args.num_envs * args.num_steps


def check_limits(args: Any, limits: dict[str, tuple[float, float | None]]) -> None:
    """Raises UsageError if a number or schedule of `args`, where one is given, lies outside its closed range (None: no
    bound)."""
    for name, (low, high) in limits.items():
        check(hasattr(args, name), f"LIMITS: has {name}, which is no flag of {type(args).__name__}")
        given = getattr(args, name)
        for value in given if isinstance(given, tuple) else (given,):
            if isinstance(value, str):
                _check_schedule(flag_of(name), value, low, high)
            elif value is not None:
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


# NAMES AND VALUES


def flag_of(name: str) -> str:
    """The flag of a field: --num-envs of num_envs, --async of async_."""
    return "--" + name.rstrip("_").replace("_", "-")


def as_given(name: str, value: Any) -> str:
    """A flag and its value as they are written: --num-envs 8, --no-gap-stack."""
    words = flag_of(name)
    return f"--no-{words[2:]}" if value is False else words if value is True else f"{words} {value}"


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


# A RUN'S OWN


def read_args(run_dir: str, flag: str, script: str | None = None) -> dict[str, Any]:
    """The content of a run's `args.json`: script, args, and what not every one has: wandb_id, env_id, run.

    Raises UsageError, naming `flag`, if `run_dir` is no run, or a run of another script than `script`.
    """
    form = "give a run directory, with a readable args.json in it"
    content = files.read(Path(run_dir, "args.json"), dict, flag, form)
    known = re.fullmatch(r"\w+", str(content.get("script"))) and isinstance(content.get("args"), dict)
    check(bool(known), f"{flag} {run_dir}: its args.json has no script's name or no arguments; {form}")
    owner = content["script"]
    check(script in (None, owner), f"{flag} {run_dir}: give a run of {script}.py, this one is of {owner}.py")
    return content


def words_of(flag: str, value: Any) -> list[str]:
    """A flag with its value on a command line: one word, or those of a tuple (a list in JSON) after the flag."""
    return [flag, *map(str, value)] if isinstance(value, list | tuple) else [f"{flag}={value}"]


def saved_args(args_class: type, run_dir: str, source: str, script: str | None = None) -> Any:
    """The arguments of a run; a field that it does not have yet takes its default. Raises UsageError."""
    args = read_args(run_dir, source, script)["args"]
    given = []
    for name, value in args.items():
        given += words_of(flag_of(name), value)
    words = plain_booleans(args_class, given)
    about = f"{source} {run_dir}: its args.json is not of this version of the script"
    text = io.StringIO()
    try:
        _check_names(args_class, map(flag_of, args))
        with contextlib.redirect_stderr(text):
            return tyro.cli(args_class, args=words)
    except UsageError as error:
        raise UsageError(f"{about}: {error}") from None
    except SystemExit:
        # Title, what is wrong, a rule, help; in ASCII where a terminal knows nothing else.
        lines = [line.strip("│|─ ") for line in text.getvalue().splitlines()]
        lines = ["" if set(line) <= set("-+") else line for line in lines]
        raise UsageError(f"{about}: {' '.join(itertools.takewhile(bool, lines[1:]))}") from None


def on_this_machine(args: Any) -> Any:
    """The arguments of a run, to play what it has learnt on whatever devices there are here."""
    anywhere = {"num_devices": 0, "actor_devices": 0, "distributed": False, "replay_device": "device"}
    return dataclasses.replace(args, **{name: anywhere[name] for name in anywhere if hasattr(args, name)})
