"""Files: read with one sentence about what is wrong, written whole or not at all, held by one process."""

import contextlib
import csv
import errno
import fcntl
import functools
import io
import itertools
import json
import os
import platform
import reprlib
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO


class UsageError(ValueError):
    """Bad input: one sentence that names the flag, the value and what would be valid."""


class FailedError(RuntimeError):
    """What was asked for could not be done: one sentence."""


def first_line(error: BaseException) -> str:
    """What an error says, in one line; its kind, where it says nothing."""
    return (str(error).strip() or repr(error)).splitlines()[0]


class FullError(FailedError):
    """A disk is full: one sentence about what could not be written, and where."""


def check(condition: bool, sentence: str) -> None:
    """Raises UsageError(sentence) unless `condition` holds."""
    if not condition:
        raise UsageError(sentence)


# READING


def read(path: str | Path, kind: Any, flag: str, valid: str) -> Any:
    """A file's content, of the type `kind` as pydantic reads it, strictly: "1" is no number, 1 no text.

    JSON and CSV are known by their ending, all else is YAML; CSV is a list of rows, each a dict of text. Nothing
    in the file is executed. Raises UsageError, naming `flag` and what would be `valid`, if the file cannot be read, is
    of another form, or is of another type.
    """
    from pydantic import TypeAdapter, ValidationError  # late: not every run reads one

    try:
        text = Path(path).read_text()
        if Path(path).suffix == ".json":
            content = json.loads(text)
        elif Path(path).suffix == ".csv":
            content = list(csv.DictReader(io.StringIO(text)))
        else:
            import yaml

            content = yaml.load(text, yaml.SafeLoader)  # not the one in C, which deep nesting crashes
        return TypeAdapter(kind).validate_python(content, strict=True)
    except OSError as error:
        why = error.strerror
    except RecursionError:
        why = "it is nested too deeply"
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc'])) or 'its content'}: {first['msg'].removeprefix('Value error, ')}"
        why += f", it is {reprlib.repr(first['input'])}" if first["type"] != "missing" else ""
    except Exception as error:  # YAML raises more kinds than its own: its dates and numbers are Python's
        why = str(error)
    raise UsageError(f"{flag} {path}: {' '.join(why.split())[:300]}; {valid}") from None


# WRITING


def make_folder(path: Path, flag: str, advice: str = "give another folder") -> None:
    """Makes a folder, unless it is there; raises UsageError, naming `flag`, if nothing can be written in it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        if full := full_disk(error, path):
            raise full from None
        raise UsageError(f"{flag} {path}: cannot write there ({error.strerror}); {advice}") from None


def make_room(path: Path, flag: str) -> None:
    """Makes the folder that a file is to be in; raises UsageError, naming `flag`, if the file cannot be written."""
    if os.path.isdir(path) or not path.name:
        raise UsageError(f"{flag} {path}: is a folder; give the name of a file")
    make_folder(path.parent, flag)


_homeless = functools.cache(tempfile.mkdtemp)  # one for this process alone


def own_folder() -> Path:
    """This user's folder on this machine, for what is of use to all runs."""
    try:
        home = Path.home()
    except RuntimeError:  # a user without one, as in some containers
        home = Path(_homeless())
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache", "jax-rl-scripts")


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Gives a temporary name to write a file under, which then gets its own: it is there whole or not at all, also
    after a power cut.

    Raises FullError where the disk is full.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")  # two processes may write the same file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except Exception as error:
        if full := full_disk(error, path):
            raise full from None
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file whole or not at all."""
    with whole(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n")


FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
SQLITE_FULL = "database or disk is full"


def full_disk(error: BaseException | None, path: Path | None = None) -> FullError | None:
    """The one sentence for an error of a full disk, from Python or from a library that has it in words; None for any
    other error. `path` is what was being written, where the error does not have it."""
    if error is None or isinstance(error, FullError):
        return error
    chain = [error]
    while cause := chain[-1].__cause__:
        chain.append(cause)
    words = " ".join(map(str, chain))
    known = [SQLITE_FULL, *map(os.strerror, FULL), *(errno.errorcode[number] for number in FULL)]
    number = getattr(error, "errno", None)
    if number not in FULL and not any(word in words for word in known):
        return None
    why = next((word for word in known if word in words), os.strerror(number or errno.ENOSPC))
    why = "the disk is full" if why in ("ENOSPC", os.strerror(errno.ENOSPC), SQLITE_FULL) else why
    path = path or Path(getattr(error, "filename", None) or ".").absolute()
    there = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(there).free / 2**20
    return FullError(f"cannot write {path}: {why}, {free:,.1f} MiB are free there")


def set_aside(path: Path, folder: Path, *, copy: bool = False) -> Path:
    """Moves something that cannot be read into a folder, or copies a file, under a name that is free there; returns
    where it is now."""
    folder.mkdir(exist_ok=True)
    names = (folder / (f"{path.name}.{i}" if i else path.name) for i in itertools.count())
    free = next(name for name in names if not os.path.lexists(name))
    if not copy:
        return path.rename(free)
    with whole(free) as temporary:
        shutil.copyfile(path, temporary)
    return free


# HOLDING


def take(folder: Path, wait: bool = False) -> TextIO | None:
    """Locks a folder, by the file `lock` in it; None if somebody else has it, unless we `wait`.

    The kernel lets the lock go when what is returned is closed in every process that inherited it, or when they are
    dead: however they died. Who has it is written in the file, for `holder`. On NFS it holds between machines, unless
    it is mounted with `nolock` or `local_lock`; where a file system has no locks at all, it is said and nothing held.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / "lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    except OSError as error:
        sentence = f"{folder}: cannot be locked ({error.strerror}); see to it that one process writes there"
        print(sentence, file=sys.stderr, flush=True)
    try:
        lock.truncate(0)
        # Not buffered, so that close() has nothing left to write.
        os.write(lock.fileno(), f"process {os.getpid()} on {platform.node()}".encode())
    except BaseException:
        lock.close()
        raise
    return lock


def holder(folder: Path) -> str:
    """Who holds a folder that could not be taken, in words."""
    return (folder / "lock").read_text() or "another process"
