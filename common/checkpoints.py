"""Checkpoints of a run: pytrees of arrays, written by Orbax under a temporary name, and read only if complete."""

import errno
import hashlib
import logging
import math
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from common import devices, files
from common.files import UsageError, check

VERSION = 3  # of a checkpoint's names
TEMPORARY = ".orbax-checkpoint-tmp"  # after the step, in Orbax's name of an unfinished checkpoint
# Errors of the machine: the checkpoint may be intact, so `load` raises and does not fall back to an older one.
MACHINE_ERRORS = {errno.EACCES, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT}
NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EISDIR, errno.EACCES}  # of file systems that sync only files


def steps_in(run_dir: str | Path) -> list[int]:
    """The steps of a run's checkpoints, oldest first."""
    names = [path.name for path in Path(run_dir, "checkpoints").glob("*")]
    return sorted(int(name) for name in names if re.fullmatch(r"0|[1-9][0-9]*", name))


def _orbax():
    import orbax.checkpoint as ocp  # late: it takes a second

    for name in ("absl", "asyncio"):  # they log what is raised here too
        logging.getLogger(name).setLevel(logging.CRITICAL)
    sys.unraisablehook = _ignore_late_threads
    host = jax.process_index()  # each host reads and writes on its own
    options = ocp.options.MultiprocessingOptions(host, {host}, f"host{host}")
    # OCDBT: some twenty files in all, not two or three per array.
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
    return ocp.Checkpointer(handler, multiprocessing_options=options)


def _ignore_late_threads(unraisable) -> None:
    """Ignores tensorstore's threads that end after a failed read or write was given up."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def checksum(tree: dict[str, Any]) -> np.ndarray:
    """SHA-256, uint8 [32], of the names, dtypes, shapes and bytes of a tree of dicts of arrays."""
    sha = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(tree):
        array = np.asarray(leaf)
        sha.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        sha.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return np.frombuffer(sha.digest(), np.uint8)


def save(run_dir: Path, step: int, tree: dict[str, Any], keep: int) -> None:
    """Writes a dict of pytrees of arrays, with its checksum, then removes all but the `keep` newest checkpoints. If
    writing fails, as on a full disk, removes the unfinished one."""
    import orbax.checkpoint as ocp
    from flax import serialization

    tree = jax.device_get(serialization.to_state_dict(tree))
    folder = (run_dir / "checkpoints").absolute()
    if (folder / str(step)).exists() and not _is_orbax(folder / str(step)):
        files.quarantine(folder / str(step), run_dir)
    try:
        with _orbax() as orbax:
            marked = tree | {"checksum": checksum(tree), "version": np.int32(VERSION)}
            orbax.save(folder / str(step), ocp.args.PyTreeSave(marked), force=True)
    except BaseException:
        remove_unfinished(run_dir, seconds=1)
        raise
    for path in (*(folder / str(step)).rglob("*"), folder / str(step), folder):
        _write_through(path)
    for old in steps_in(run_dir)[:-keep]:
        if not _is_orbax(folder / str(old)):
            files.quarantine(folder / str(old), run_dir)
            continue
        away = (folder / str(old)).rename(folder / f"{old}{TEMPORARY}")
        shutil.rmtree(away, ignore_errors=True)  # on NFS an open file stays; the next resume removes it


def _is_orbax(path: Path) -> bool:
    """Whether a folder has one of Orbax's files, so that it is a checkpoint, and ours to remove."""
    return any((path / name).exists() for name in ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt"))


def _write_through(path: Path) -> None:
    """Syncs a file, or the names in a folder, to disk."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC:
            raise


def remove_unfinished(run_dir: Path, seconds: float = 0) -> None:
    """Removes unfinished checkpoints until Orbax's threads have added none for `seconds`, or ten times as long has
    passed (on NFS some may stay). Only for the process that has locked the run."""
    begun = gone = time.monotonic()
    while True:
        for path in Path(run_dir, "checkpoints").glob(f"*{TEMPORARY}*"):
            if re.fullmatch(rf"\d+{TEMPORARY}(-\d+)?", path.name):
                shutil.rmtree(path, ignore_errors=True)
                gone = time.monotonic()
        now = time.monotonic()
        if now - gone >= seconds or now - begun >= 10 * seconds:
            return
        time.sleep(0.05)


def load(run_dir: str | Path) -> tuple[int, dict[str, Any]]:
    """Loads the newest complete checkpoint: its step and its tree of NumPy arrays (tuples become dicts).

    Prints which ones are damaged. Raises UsageError if none is left. The run may be training meanwhile.
    """
    damaged = {}
    while steps := [step for step in steps_in(run_dir) if step not in damaged]:
        newest = steps[-1]
        path = Path(run_dir, "checkpoints", str(newest)).absolute()
        try:
            tree = _read(path)
        except UsageError:
            raise
        except Exception as error:  # Orbax and tensorstore raise many kinds
            if newest not in steps_in(run_dir):  # the run has removed it meanwhile
                continue
            told = re.search(r"os_error_code='(\d+)'", str(error))  # tensorstore's
            number = int(told[1]) if told else getattr(error, "errno", None)
            if isinstance(error, MemoryError) or number in MACHINE_ERRORS:
                raise UsageError(f"checkpoint {path}: cannot be read here and now ({error})") from None
            why = str(error).split(":")[0].strip().replace("\n", " ")[:80]
            damaged[newest] = f"checkpoint {path} is damaged ({why})"
            continue
        for sentence in damaged.values():
            print(f"{sentence}: the one before it is taken", file=sys.stderr, flush=True)
        return newest, tree
    if damaged:
        raise UsageError("; ".join([f"{run_dir} has no intact checkpoint: nothing to load", *damaged.values()]))
    first = "the first comes after --checkpoint-every steps, or at the run's end"
    raise UsageError(f"{run_dir} has no complete checkpoint: nothing to load ({first})")


def _read(path: Path) -> dict[str, Any]:
    """Reads a checkpoint. Raises UsageError for another format, or one of more bytes than this host has memory, any
    other error for a damaged one."""
    with _orbax() as orbax:
        arrays = jax.tree.leaves(orbax.metadata(path).item_metadata.tree)
        size = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
        memory = devices.host_memory()
        check(size <= memory, f"checkpoint {path}: needs {size / 1e9:.1f} GB, this host has {memory / 1e9:.1f} GB")
        tree = orbax.restore(path)
    if not tree:
        raise ValueError("it is empty")
    version = int(tree.pop("version", 1))
    older = f"is of format {version}, these scripts read {VERSION}; resume it with those that wrote it"
    check(version == VERSION, f"checkpoint {path}: {older}")
    if not np.array_equal(tree.pop("checksum"), checksum(tree)):
        raise ValueError("its checksum differs")
    return tree


class MisfitError(UsageError):
    """A checkpoint's names or shapes do not match those that the arguments define."""


def restore_tree(template: Any, saved: Any, run_dir: str) -> Any:
    """Gives a loaded tree the structure of `template`; raises MisfitError if names or shapes differ."""
    from flax import serialization

    differ = f"{run_dir}: its checkpoint does not fit this script and its arguments"
    try:
        tree = serialization.from_state_dict(template, saved)
    except (ValueError, KeyError, TypeError) as error:
        raise MisfitError(f"{differ} ({files.first_line(error)})") from None
    except AttributeError:  # Flax found None in place of a tuple
        raise MisfitError(f"{differ}: it lacks something that they need") from None
    if not len(jax.tree.leaves(template)) == len(jax.tree.leaves(tree)) == len(jax.tree.leaves(saved)):
        raise MisfitError(f"{differ}: there is something in it that they do not need")
    for (path, want), got in zip(jax.tree.leaves_with_path(template), jax.tree.leaves(tree), strict=True):
        if want.shape != got.shape:
            name = jax.tree_util.keystr(path)
            raise MisfitError(f"{differ} ({name} is {got.shape} there, {want.shape} here)")
    return tree
