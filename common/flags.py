"""The command line: ranges and checks of flags, schedules, a run's saved arguments, answers to bad input."""

import argparse
import contextlib
import dataclasses
import errno
import inspect
import json
import operator
import os
import re
import reprlib
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, TextIO, Union, get_args, get_origin, get_type_hints

import jax
import numpy as np
import tyro
from annotated_types import Ge, Gt, Interval

from common import devices, files, multihost
from common.files import FailedError, UsageError, check

MAX_SEED = 2**31 - 1  # EnvPool's seeds are non-negative int32
MAX_FLOAT = float(np.finfo(np.float32).max)

# RANGES, which `cli` and `check_flags` check. A schedule is text such as "0:1e-4,500000:8e-4".

BOUNDS = {"ge": "{} or more", "gt": "above {}", "le": "at most {}", "lt": "below {}"}  # by annotated_types' names
PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
UnitInterval = Annotated[float, Interval(ge=0, le=1)]
NonNegativeSchedule = Annotated[str, Ge(0)]
UnitSchedule = Annotated[str, Interval(ge=0, le=1)]
Seed = Annotated[int, Interval(ge=0, le=MAX_SEED)]
StepCount = Annotated[int, Interval(ge=1, le=2**31 - 2**24)]  # steps are counted in int32
Size = Annotated[int, Interval(ge=1, le=65536)]  # of a layer or a batch
Iterations = Annotated[int, Interval(ge=1, le=1000)]


# THE COMMAND LINE


def cli(args_class: type, main: Callable, argv: Sequence[str] | None = None) -> None:
    """Runs `main(args)` with the command line's flags, which with `--resume RUN_DIR` default to that run's own.

    Exit codes, each with a message on stderr: 2 for a UsageError or a parse error, 1 for a FailedError or a full disk,
    137 for full device memory, 128 plus the signal's number for a stop signal before training or a second one during
    it. 141, without a message, if nobody reads the output. Any other exception is raised by a run on one host; on
    several hosts it ends with exit code 1.
    """
    module = sys.modules[main.__module__]
    argv = plain_values(args_class, sys.argv[1:] if argv is None else argv)
    set_up_jax()
    try:
        with _stop_signals_raise():
            for text in (*argv, os.getcwd()):
                check(text == text.encode(errors="ignore").decode(), f"{text!r}: is not UTF-8, give another name")
            argv = [_expand_home(word) for word in argv]
            flags = [word.partition("=")[0].replace("_", "-") for word in argv]
            _check_once(args_class, flags)
            parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
            parser.add_argument("--resume", nargs="?")
            run_dir = parser.parse_known_args(argv)[0].resume if hasattr(args_class, "resume") else None
            check(run_dir != "", "--resume '': give a run directory, or leave the flag out to start a new run")
            _check_types(args_class)
            default = saved_args(args_class, run_dir, "--resume", Path(module.__file__).stem) if run_dir else None
            # A script's own fields before inherited ones in --help and args.json; dataclasses put them last.
            own, fields = inspect.get_annotations(args_class), args_class.__dataclass_fields__
            args_class.__dataclass_fields__ = {name: fields[name] for name in own} | fields
            args = tyro.cli(args_class, args=argv, default=default, description=module.__doc__)
            _check_given(args, flags)
            _check_ranges(args)
            _check_threads()
            if getattr(args, "distributed", False):
                # Checked before JAX starts, as some scripts refuse it; "auto" would ask for the device.
                check_flags(dataclasses.replace(args, dtype="float32") if hasattr(args, "dtype") else args)
                _join_hosts()
            main(args)
    except (UsageError, FailedError) as error:
        print(f"error: {_one_line(str(error))}", file=sys.stderr, flush=True)
        _exit(2 if isinstance(error, UsageError) else 1)
    except BrokenPipeError:  # as in `--help | head`
        silence(sys.stdout)
        _exit(128 + signal.SIGPIPE)
    except KeyboardInterrupt as error:
        number = signal.Signals(*error.args or [signal.SIGINT])
        print(f"stopped by {number.name}", file=sys.stderr, flush=True)
        _exit(128 + number)
    except Exception as error:
        if full := files.full_disk(error):
            print(f"error: {full}", file=sys.stderr, flush=True)
            _exit(1)
        if "RESOURCE_EXHAUSTED" in (why := f"{error} {error.__cause__}"):  # the cause of an ActorError
            full = files.first_line(why[why.index("RESOURCE_EXHAUSTED") :])
            less = "run fewer scripts on it, resume with smaller minibatches, or start anew with fewer --num-envs"
            print(f"error: a device's memory is full ({full[:200]}); {less}", file=sys.stderr, flush=True)
            _exit(128 + signal.SIGKILL)  # as when the host's memory is full: resuming may help
        if jax.process_count() == 1:
            raise
        if not re.search("gloo|nccl|unavailable|deadline", str(error), re.IGNORECASE):
            traceback.print_exc()
        reason = files.first_line(error)
        print(f"error: this host or another has failed ({reason}); continue with --resume", file=sys.stderr, flush=True)
        _exit(1)


def stop_signals() -> list[signal.Signals]:
    """The signals that ask a program to end: Ctrl-C, a scheduler's SIGTERM and its warnings (SIGUSR1, SIGXCPU), and a
    closed terminal's SIGHUP. Of the last three, those that are ignored are left out, as under `nohup`."""
    last_three = signal.SIGUSR1, signal.SIGXCPU, signal.SIGHUP
    return [signal.SIGINT, signal.SIGTERM, *(x for x in last_three if signal.getsignal(x) != signal.SIG_IGN)]


def silence(file: TextIO) -> None:
    """Sends whatever is written to a stream nowhere, since its reader has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def leave_closed_terminal() -> None:
    """Silences standard output and error if their terminal is closed, so that writing to them raises no OSError."""
    for file in filter(None, (sys.stdout, sys.stderr)):  # None if it was closed from the start
        try:
            os.ttyname(file.fileno())
        except (OSError, ValueError) as error:  # a closed stream's is a ValueError
            if getattr(error, "errno", None) == errno.EIO:
                silence(file)


@contextlib.contextmanager
def _stop_signals_raise() -> Iterator[None]:
    """Stop signals raise KeyboardInterrupt, so that `with` blocks clean up."""

    def interrupt(number: int, frame) -> NoReturn:
        leave_closed_terminal()
        raise KeyboardInterrupt(number)

    if threading.current_thread() is not threading.main_thread():  # only that one handles signals
        yield
        return
    old = {number: signal.signal(number, interrupt) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _one_line(text: str) -> str:
    """A text on one line; a stranger's escape sequences are shown, not sent to the terminal."""
    return "".join(x if x.isprintable() else repr(x)[1:-1] for x in " ".join(text.split()))


def _exit(code: int) -> NoReturn:
    if jax.distributed.is_initialized():
        os._exit(code)  # not sys.exit, which would wait for the other hosts
    sys.exit(code)


def _join_hosts() -> None:
    try:
        multihost.initialize()
    except (RuntimeError, ValueError, IndexError) as error:  # the last for an address without a port
        raise UsageError(
            f"--distributed: the hosts were not found ({files.first_line(error)}); start it with srun, or set "
            "JAX_COORDINATOR_ADDRESS (HOST:PORT), JAX_NUM_PROCESSES and JAX_PROCESS_ID on each; "
            "on one host give --no-distributed"
        ) from None


def set_up_jax() -> None:
    """Makes every core of a CPU a device, and caches compiled programs in the user's folder. For before JAX starts."""
    devices.use_every_core()
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(files.own_folder())
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_default_prng_impl", "threefry2x32")  # JAX's defaults today, which runs depend on
    jax.config.update("jax_threefry_partitionable", True)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:  # JAX's default is a second
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _check_threads() -> None:
    """Raises FailedError if this user may not start the threads of JAX and EnvPool: XLA would abort the program."""
    need, enough, started = 50 + 4 * devices.available_cores(), threading.Event(), []
    try:
        for _ in range(need):
            started.append(threading.Thread(target=enough.wait))
            started[-1].start()
    except RuntimeError:
        started.pop()
        raise FailedError(
            f"cannot start {need} threads, only {len(started)}: raise the user's limit of processes (ulimit -u) or the "
            "container's (--pids-limit), or end other programs"
        ) from None
    finally:
        enough.set()
        for thread in started:
            thread.join()


def _check_given(args: Any, flags: Sequence[str]) -> None:
    """Raises UsageError for a given flag that would have no effect."""
    if getattr(args, "resume", ""):
        there = Path(args.resume).resolve().parent == Path(args.run_dir).resolve()
        stays = f"--run-dir {args.run_dir}: a resumed run stays in its folder, {args.resume}; leave the flag out"
        check(there or "--run-dir" not in flags, stays)
    if getattr(args, "track", "wandb") != "wandb":
        for name in ("wandb_mode", "wandb_project", "wandb_entity"):
            given, value = flag_of(name) in flags, getattr(args, name)
            check(not given or value == "disabled", f"{as_given(name, value)}: has no effect with --track {args.track}")


def _check_once(args_class: type, flags: Sequence[str]) -> None:
    """Raises UsageError if --resume or a flag of a tuple is given twice; of other flags the last one counts."""
    check(flags.count("--resume") <= 1, "--resume: is given twice, give one run directory")
    for name, kind in get_type_hints(args_class).items():
        lists = get_origin(kind) is tuple and flags.count(flag_of(name)) > 1
        check(not lists, f"{flag_of(name)}: is given twice, give all its values after one")


def plain_values(args_class: type, argv: Sequence[str]) -> list[str]:
    """Converts --gap_stack=False, as `wandb agent` writes it, to --no-gap-stack, and 1e6 to 1000000 where
    a flag takes an integer."""
    kinds = {flag_of(name): kind for name, kind in get_type_hints(args_class).items()}
    words, flag = [], ""
    for word in argv:
        start, value = "", word  # a value on its own, of the flag before it
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            flag, start = name.replace("_", "-"), name + equals
        if start and kinds.get(flag) is bool and value.lower() in ("true", "false"):
            word = as_given(flag[2:], value.lower() == "true")
        elif kinds.get(flag) is int and re.fullmatch(r"\d+(\.\d*)?e\+?\d\d?", value) and float(value).is_integer():
            word = start + str(int(float(value)))
        words.append(word)
    return words


def _expand_home(word: str) -> str:
    """Expands --run-dir=~/runs to --run-dir=/home/me/runs, as shells do for a word of its own."""
    flag, equals, value = word.partition("=")
    return flag + equals + os.path.expanduser(value) if flag.startswith("--") else word


# CHECKS


def check_args(args: Any, script: str) -> None:
    """Raises UsageError for invalid or inconsistent flags, or if a resumed run changes a flag named in FIXED."""
    form = "give it a name of letters, digits and an underscore, such as my_ppo.py, else its runs cannot be found again"
    check(bool(re.fullmatch(r"\w+_\w+", script)), f"{script}.py: {form}")
    if args.resume:  # first, since another check may name a flag that was not given
        saved = saved_args(type(args), args.resume, "--resume", script)
        files.check_parts(args.resume, "--resume")
        whole = (Path(args.resume) / "checkpoints").is_dir()
        check(whole, f"--resume {args.resume}: has no checkpoints, as an exported agent; give a run directory")
        for name in fixed(type(args)):
            new, old = getattr(args, name), getattr(saved, name)
            check(new == old, f"{as_given(name, new)}: a resumed run keeps its own, {as_given(name, old)}")
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:  # the former for cuda where it finds no GPU
        given = os.environ.get("JAX_PLATFORMS")
        if not given or getattr(args, "distributed", False) or "RESOURCE_EXHAUSTED" in str(error):
            raise
        why = f" ({files.first_line(error)})" if str(error) else ""
        raise UsageError(f"JAX_PLATFORMS={given}: JAX finds no such device{why}; see docs/troubleshooting.md") from None
    check_flags(args)
    check_devices(args)


def _check_types(args_class: type) -> None:
    """Raises UsageError for what looks like a flag, or a new default, but has no type: a dataclass ignores it."""
    fields = {field.name: field for field in dataclasses.fields(args_class)}
    for group in _groups(args_class):
        for name, value in vars(group).items():
            plain = isinstance(value, bool | int | float | str | tuple) and name.islower() and not name.startswith("_")
            if (plain or name in fields) and name not in inspect.get_annotations(group):
                kind, of_class = type(value), "; if it is not to be a flag, annotate it as a ClassVar"
                if name in fields:
                    kind, of_class = fields[name].type, ""
                    value = str(value) if isinstance(fields[name].default, str) else value
                # The name of a range above, such as PositiveInt, or else that of the type.
                aliases = [alias for alias, known in globals().items() if known == kind]
                kind = aliases[0] if aliases else getattr(kind, "__name__", kind)
                if isinstance(value, tuple):
                    kind = f"tuple[{', '.join(type(each).__name__ for each in value)}]"
                what = f"is no flag, and no new default, without its type: {name}: {kind} = {value!r}{of_class}"
                raise UsageError(f"{group.__name__}.{name}: {what}")


def check_flags(args: Any) -> None:
    """Raises UsageError for a value outside its range, and for inconsistent flags by each group's check()."""
    _check_types(type(args))
    _check_ranges(args)
    for group in _groups(type(args)):
        if "check" in vars(group):
            group.check(args)


def check_devices(args: Any) -> None:
    """Raises UsageError if environments and minibatches cannot be divided evenly among the devices and hosts."""
    hosts = jax.process_count()
    per_host = [len(devices.learner_devices(args, host)) for host in range(hosts)]
    same = f"--distributed: the hosts have {per_host} devices; give each as many (CUDA_VISIBLE_DEVICES; CPU: taskset)"
    check(len(set(per_host)) == 1, same)
    actors, most = getattr(args, "actor_devices", 0), per_host[0]
    check(most > 0, f"--actor-devices {actors}: leaves none of this machine's devices to learn on, give fewer")
    given = f"--num-devices {args.num_devices}"
    check(args.num_devices <= most, f"{given}: there are {most} learner devices on this machine, give at most that")
    for what, size in args.sharded_sizes().items():
        check(size % hosts == 0, f"--distributed: the {hosts} hosts do not divide {what}, {size}")
        valid = devices.valid_device_counts(args, size)
        must = " or ".join(map(str, valid)) + (f" on each of {hosts} hosts" if hosts > 1 else "")
        check(args.num_devices in (0, *valid), f"{given}: does not divide {what}, {size}; give {must}")


def fixed(args_class: type) -> tuple[str, ...]:
    """Names of the flags that a resumed run keeps, those in FIXED of a script and its groups."""
    return tuple(name for group in _groups(args_class) for name in vars(group).get("FIXED", ()))


def _groups(args_class: type) -> list[type]:
    """The dataclasses that a script's Args inherits, base classes first, and Args itself."""
    return [group for group in reversed(args_class.__mro__) if dataclasses.is_dataclass(group)]


def check_batch(args: Any) -> None:
    """Raises UsageError if a rollout, num_envs x num_steps, is too large or not divisible into minibatches."""
    batch = args.num_envs * args.num_steps
    what, parts = parts_of_batch(args)
    divided = {
        "samples": f"the batch, num_envs x num_steps = {batch}",
        "environments": f"the number of environments, {parts} (a recurrent core trains on sequences)",
    }
    check(parts % args.num_minibatches == 0, f"--num-minibatches {args.num_minibatches}: must divide {divided[what]}")
    given = f"--num-envs {args.num_envs} --num-steps {args.num_steps}"
    check(batch <= 2**24, f"{given}: the batch, num_envs x num_steps = {batch}, must be at most {2**24}")


def parts_of_batch(args: Any) -> tuple[str, int]:
    """The unit of minibatches and their number in a rollout: samples or, with a core, environments (all steps)."""
    if getattr(args, "core", "none") != "none":
        return "environments", args.num_envs
    return "samples", args.num_envs * args.num_steps


def _check_ranges(args: Any) -> None:
    """Raises UsageError for a value outside the range of its type; a redefined field keeps its old range too."""
    for group in reversed(_groups(type(args))):
        hints = get_type_hints(group, include_extras=True)
        for name in inspect.get_annotations(group).keys() & {field.name for field in dataclasses.fields(args)}:
            _check_range(flag_of(name), hints[name], getattr(args, name))


def _check_range(flag: str, kind: Any, value: Any) -> None:
    origin, parts = get_origin(kind), get_args(kind)
    if value is None:  # of a fork's optional flag
        return
    if origin in (Union, UnionType):
        for part in parts:
            _check_range(flag, part, value)
    elif origin is Annotated:
        for bounds in parts[1:]:
            _check_bounds(flag, value, bounds)
        _check_range(flag, parts[0], value)
    elif origin is tuple:
        for part, each in zip(parts[:1] * len(value) if parts[-1] is ... else parts, value, strict=True):
            _check_range(flag, part, each)
    elif origin is Literal:
        check(value in parts, f"{flag} {value}: give one of {', '.join(map(str, parts))}")
    elif kind is float:
        check(abs(value) <= MAX_FLOAT, f"{flag} {value}: is not a number that float32 can hold")


def check_needs(args: Any, given: Any, need: str, flags: Sequence[str]) -> None:
    """Raises UsageError if one of these flags is not at its default although what it needs is not `given`."""
    own = {field.name: field.default for field in dataclasses.fields(args) if field.name in flags}
    for name, default in own.items():
        value = getattr(args, name)
        check(given or value == default, f"{as_given(name, value)}: has no effect without {need}")


def _check_bounds(flag: str, value: float | str, bounds: Any) -> None:
    """Raises UsageError for a number or a schedule's value outside bounds such as Ge(1) or Interval(ge=0, le=1)."""
    sides = {side: limit for side in BOUNDS if (limit := getattr(bounds, side, None)) is not None}
    if not sides:
        return
    values = [value]
    if isinstance(value, str):
        try:
            values, value = parse_schedule(value).values, repr(value)
        except ValueError:
            form = 'give a number, or points "step:value,step:value,..." with rising steps'
            raise UsageError(f"{flag} {value!r}: {form}") from None
    valid = " and ".join(BOUNDS[side].format(limit) for side, limit in sides.items())
    if sides.keys() == {"ge", "le"}:
        valid = f"from {bounds.ge} to {bounds.le}"
    inside = all(getattr(operator, side)(x, limit) for side, limit in sides.items() for x in values)
    check(inside, f"{flag} {value}: must be {valid}")


# NAMES AND VALUES


def flag_of(name: str) -> str:
    """The flag of a field: --num-envs of num_envs, --async of async_."""
    return "--" + name.rstrip("_").replace("_", "-")


def as_given(name: str, value: Any) -> str:
    """A flag and its value as on a command line: --num-envs 8, --no-gap-stack."""
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
    """Parses "0.0005" or "0:1e-4,500000:8e-4,1000000:1e-4"; raises ValueError."""
    points = text.split(",") if ":" in text else [f"0:{text}"]
    steps, values = zip(*(map(float, point.split(":")) for point in points), strict=True)
    finite = (np.abs([*steps, *values]) <= MAX_FLOAT).all()  # False for NaN
    if not (finite and steps[0] >= 0 and (np.diff(steps) > 0).all()):
        raise ValueError(text)
    return Schedule(steps, values)


# SAVED ARGUMENTS


def read_args(run_dir: str, flag: str, script: str | None = None) -> dict[str, Any]:
    """The content of a run's `args.json`: script, args, and perhaps wandb_id, env_id, run. Raises UsageError, naming
    `flag`, if `run_dir` is no run, or another script's than `script`."""
    form = "give a run directory, with a readable args.json in it"
    content = files.read(Path(run_dir, "args.json"), dict, flag, form)
    owner = content.get("script")
    known = isinstance(owner, str) and re.fullmatch(r"\w+", owner) and isinstance(content.get("args"), dict)
    check(bool(known), f"{flag} {run_dir}: its args.json has no script's name or no arguments; {form}")
    check(script in (None, owner), f"{flag} {run_dir}: give a run of {script}.py, this one is of {owner}.py")
    return content


def saved_args(args_class: type, run_dir: str, source: str, script: str | None = None) -> Any:
    """The arguments of a run; fields that it does not have take their defaults. Raises UsageError.

    A stranger's args.json only sets fields: it never becomes a command line.
    """
    from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config  # late: not every run reads one
    from typing_extensions import TypedDict

    args = read_args(run_dir, source, script)["args"]
    hints, ranges = get_type_hints(args_class), get_type_hints(args_class, include_extras=True)
    for name, value in args.items():
        if ranges.get(name) in (NonNegativeSchedule, UnitSchedule) and type(value) in (int, float):
            args[name] = str(value)  # from before this flag became a schedule
    kinds = {field.name: hints[field.name] for field in dataclasses.fields(args_class)}
    kind = with_config(ConfigDict(extra="forbid"))(TypedDict("SavedArgs", kinds, total=False))
    try:
        return args_class(**TypeAdapter(kind).validate_json(json.dumps(args), strict=True))
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{flag_of('.'.join(map(str, first['loc'])))}: {first['msg']}, it is {reprlib.repr(first['input'])}"
        about = f"{source} {run_dir}: its args.json is not of this version of the script"
        raise UsageError(f"{about}: {why}") from None


def on_this_machine(args: Any) -> Any:
    """A run's arguments for evaluating it on this machine."""
    anywhere = {"num_devices": 0, "actor_devices": 0, "distributed": False, "replay_device": "device"}
    return dataclasses.replace(args, **{name: value for name, value in anywhere.items() if hasattr(args, name)})
