"""Files: read with one sentence on what is wrong, written atomically, locked by one process."""

import contextlib
import csv
import difflib
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
import stat
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO


class UsageError(ValueError):
    """Bad input: one sentence that names the flag, the value and what would be valid."""


class FailedError(RuntimeError):
    """What was asked for could not be done: one sentence."""


class FullError(FailedError):
    """A disk is full: one sentence on what could not be written, and where."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message; without one, its repr."""
    return (str(error).strip() or repr(error)).splitlines()[0]


def check(condition: bool, sentence: str) -> None:
    """Raises UsageError(sentence) unless `condition` holds."""
    if not condition:
        raise UsageError(sentence)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence on an unknown name, with the nearest of those known; "" if none is near."""
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else ""


# READING


def read(path: str | Path, kind: Any, flag: str, valid: str) -> Any:
    """Reads a JSON (.json), CSV (.csv: a list of dicts of text) or YAML file of the type `kind`, as pydantic validates
    it strictly: "1" is no number, 1 no text. Executes nothing in it.

    Raises UsageError, naming `flag` and what would be `valid`, if the file cannot be read or is of another type.
    """
    from pydantic import TypeAdapter, ValidationError  # late: not every run reads one

    try:
        check_regular(path, at_most=10**8)
        text = Path(path).read_text()
        if Path(path).suffix == ".json":
            content = json.loads(text)
        elif Path(path).suffix == ".csv":
            content = list(csv.DictReader(io.StringIO(text)))
        else:
            import yaml

            class Loader(yaml.SafeLoader):  # not the one in C, which deep nesting crashes
                def construct_mapping(self, node, deep=False):
                    merge = "tag:yaml.org,2002:merge"  # <<: *defaults
                    own = [key for key, _ in node.value if key.tag != merge]
                    keys = Counter(self.construct_object(key, deep=True) for key in own)
                    if keys and (most := keys.most_common(1)[0])[1] > 1:
                        raise ValueError(f"{most[0]} stands there twice")
                    return super().construct_mapping(node, deep)

            content = yaml.load(text, Loader)
        content = TypeAdapter(kind).validate_python(content, strict=True)
        json.dumps(content, ensure_ascii=False, default=str).encode()  # "\ud800" can be written nowhere
        return content
    except OSError as error:
        why = error.strerror
    except RecursionError:
        why = "it is nested too deeply"
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc'])) or 'its content'}: {first['msg'].removeprefix('Value error, ')}"
        why += f", it is {reprlib.repr(first['input'])}" if first["type"] != "missing" else ""
    except Exception as error:  # YAML raises Python's errors too, for dates and numbers
        why = str(error)
    raise UsageError(f"{flag} {path}: {' '.join(why.split())[:300]}; {valid}") from None


def check_regular(path: str | Path, at_most: int) -> None:
    """Raises OSError if a file is missing, a FIFO or a device, which may never end, or of more than `at_most` bytes."""
    info = os.stat(path)
    if not stat.S_ISREG(info.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    if info.st_size > at_most:
        raise OSError(errno.EFBIG, f"it has {info.st_size / 1e6:,.0f} MB, at most {at_most / 1e6:,.0f} are read")


# WRITING


RUN_FILES = "lock", "metrics.jsonl"
RUN_FOLDERS = "checkpoints", "damaged", "tensorboard", "videos", "wandb"


def check_parts(run_dir: str | Path, flag: str) -> None:
    """Raises UsageError if a part of a run is of another kind, or a link: a stranger's could lead to our files."""
    for name in RUN_FILES + RUN_FOLDERS:
        path, kind = Path(run_dir, name), "regular file" if name in RUN_FILES else "folder"
        right = path.is_file() if name in RUN_FILES else path.is_dir()
        ours = not os.path.lexists(path) or (right and not path.is_symlink())
        check(ours, f"{flag} {run_dir}: {name} is a link or no {kind}; move it away")


def open_lock(path: Path) -> TextIO:
    """Opens a file to lock and to write the process into. Raises UsageError if it is a link, a FIFO or a device."""
    refused = UsageError(f"{path}: is a link or no regular file; move it away")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise (refused if error.errno == errno.ELOOP else error) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise refused
    return os.fdopen(descriptor, "r+")


def make_folder(path: Path, flag: str, advice: str = "give another folder") -> None:
    """Makes a folder if it is missing; raises UsageError, naming `flag`, if it cannot be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        if full := full_disk(error, path):
            raise full from None
        raise UsageError(f"{flag} {path}: cannot write there ({error.strerror}); {advice}") from None


def make_room(path: Path, flag: str) -> None:
    """Makes the parent folder of a file; raises UsageError, naming `flag`, if the file cannot be written."""
    if os.path.isdir(path) or not path.name:
        raise UsageError(f"{flag} {path}: is a folder; give the name of a file")
    make_folder(path.parent, flag)


_make_home = functools.cache(tempfile.mkdtemp)


def own_folder() -> Path:
    """This user's cache folder, for what all runs share."""
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache, "jax-rl-scripts")
    try:
        home = Path.home()
    except RuntimeError:  # a user without one, as in some containers: one for this process
        home = Path(_make_home())
    return home / ".cache" / "jax-rl-scripts"


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write, then renames it to `path`: after a crash or a power cut `path` is the old file
    or the complete new one. Makes the parent folder; raises FullError if the disk is full."""
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
    """Writes a JSON file atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n")


def full_disk(error: BaseException | None, path: Path | None = None) -> FullError | None:
    """The FullError for an error of a full disk, from Python or in a library's words; None for any other error. `path`
    is what was being written; without it, the file that the error names."""
    if error is None or isinstance(error, FullError):
        return error
    told = errno.errorcode.get(getattr(error, "errno", None), "")
    cause = error
    while cause:
        told, cause = f"{told} {cause}", cause.__cause__
    reasons = {"database or disk is full": "the disk is full"}  # SQLite's words
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        reason = "the disk is full" if number == errno.ENOSPC else os.strerror(number)
        reasons |= {os.strerror(number): reason, errno.errorcode[number]: reason}
    why = next((reason for words, reason in reasons.items() if words in told), None)
    if why is None:
        return None
    path = path or Path(getattr(error, "filename", None) or ".").absolute()
    there = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
    disk = os.statvfs(there)
    if disk.f_files and not disk.f_favail:
        why = "the disk has no inodes left, delete some of its many files"
    return FullError(f"cannot write {path}: {why}, {disk.f_frsize * disk.f_bavail / 2**20:,.1f} MiB are free there")


def quarantine(path: Path, run_dir: Path, *, copy: bool = False) -> Path:
    """Moves what cannot be read (or copies a file) into RUN_DIR/damaged, under a free name; returns its new path."""
    folder = run_dir / "damaged"
    folder.mkdir(exist_ok=True)
    names = (folder / (f"{path.name}.{i}" if i else path.name) for i in itertools.count())
    free = next(name for name in names if not os.path.lexists(name))
    if not copy:
        return path.rename(free)
    with atomic_write(free) as temporary:
        shutil.copyfile(path, temporary)
    return free


# LOCKING


def lock_run(folder: Path, wait: bool = False) -> TextIO | None:
    """Locks a folder by the file `lock` in it, which names the process; None if another has it, unless we `wait`.

    The kernel releases the lock when the returned file is closed in all processes that inherited it, or they are dead.
    On NFS it holds between machines, unless mounted with `nolock` or `local_lock`; a file system without locks is
    reported, and nothing is locked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = open_lock(folder / "lock")
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
        # Unbuffered, so that close() has nothing left to write.
        os.write(lock.fileno(), f"process {os.getpid()} on {platform.node()}".encode())
    except BaseException:
        lock.close()
        raise
    return lock


def holder(folder: Path) -> str:
    """The process that has locked a folder, in words."""
    return (folder / "lock").read_text() or "another process"
