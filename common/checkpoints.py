"""Checkpoints of a run: trees of arrays, written by Orbax under a temporary name, and read only if they are whole."""

import errno
import hashlib
import logging
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from common import files
from common.files import UsageError, check

NOT_ITS_FAULT = {errno.EACCES, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT}
VERSION = 2  # of a checkpoint's names
TEMPORARY = "*.orbax-checkpoint-tmp*"  # what Orbax calls a checkpoint that is not finished


def steps_in(run_dir: str | Path) -> list[int]:
    """The steps of a run's checkpoints, oldest first."""
    names = [path.name for path in Path(run_dir, "checkpoints").glob("*")]
    return sorted(int(name) for name in names if re.fullmatch(r"0|[1-9][0-9]*", name))


def _orbax():
    import orbax.checkpoint as ocp  # late: it takes a second

    for late in ("absl", "asyncio"):  # its threads and its tasks log what is raised here too
        logging.getLogger(late).setLevel(logging.CRITICAL)
    sys.unraisablehook = _ignore_late_threads
    options = ocp.options.MultiprocessingOptions()
    if jax.process_count() > 1:  # each host for itself
        one = jax.process_index()
        options = ocp.options.MultiprocessingOptions(one, {one}, f"host{one}")
    # In OCDBT's form: some twenty files, not two or three an array. For it tensorstore 0.1.86 leaks
    # 300 bytes an array each time (KvStore.Spec.to_json), little beside a million steps.
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
    return ocp.Checkpointer(handler, multiprocessing_options=options)


def _ignore_late_threads(unraisable) -> None:
    """Where a file cannot be read or written, tensorstore's other threads come back when nobody waits any more."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def checksum(tree: dict[str, Any]) -> np.ndarray:
    """uint8 [32]: SHA-256 of a tree of dicts of arrays: their names, types, shapes and bytes."""
    sha = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(tree):
        array = np.asarray(leaf)
        sha.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        sha.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return np.frombuffer(sha.digest(), np.uint8)


def save(run_dir: Path, step: int, tree: dict[str, Any], keep: int) -> None:
    """Writes a tree of dicts of arrays, with its checksum, and removes all checkpoints but the newest ones.

    Where that fails, as on a full disk, removes what there is of it.
    """
    import orbax.checkpoint as ocp

    tree = jax.device_get(tree)
    folder = (run_dir / "checkpoints").absolute()
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
        away = (folder / str(old)).rename(folder / f"{old}{TEMPORARY.strip('*')}")
        shutil.rmtree(away, ignore_errors=True)  # on NFS what somebody reads can stay; the next resume removes it


NO_FOLDERS = {errno.EINVAL, errno.ENOTSUP, errno.EISDIR, errno.EACCES}  # of file systems that sync files alone


def _write_through(path: Path) -> None:
    """Has a file, or the names that are in a folder, lie on the disk itself: for before an older one is removed."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in NO_FOLDERS:
            raise


def remove_unfinished(run_dir: Path, seconds: float = 0) -> None:
    """Removes unfinished checkpoints until Orbax's threads have added nothing for this many seconds, or ten times as
    many have passed (on NFS something may stay). Only for the process that holds the run."""
    begun = gone = time.monotonic()
    while True:
        for unfinished in Path(run_dir, "checkpoints").glob(TEMPORARY):
            shutil.rmtree(unfinished, ignore_errors=True)
            gone = time.monotonic()
        now = time.monotonic()
        if now - gone >= seconds or now - begun >= 10 * seconds:
            return
        time.sleep(0.05)


def load(run_dir: str | Path) -> tuple[int, dict[str, Any]]:
    """The newest checkpoint that is whole: its step and its tree of NumPy arrays (tuples come back as dicts).

    Says which ones are damaged. Raises UsageError if none is left. The run may continue meanwhile.
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
            if newest not in steps_in(run_dir):  # the run has gone on meanwhile, and removed it
                continue
            if isinstance(error, MemoryError) or _number_of(error) in NOT_ITS_FAULT:
                raise UsageError(f"checkpoint {path}: cannot be read here and now ({error})") from None
            why = str(error).split(":")[0].strip().replace("\n", " ")[:80]
            damaged[newest] = f"checkpoint {path} is damaged ({why})"
            continue
        for sentence in damaged.values():
            print(f"{sentence}: the one before it is taken", file=sys.stderr, flush=True)
        return newest, tree
    none = f"{run_dir} has no {'whole' if damaged else 'complete'} checkpoint: nothing to load"
    none += " (the first comes after --checkpoint-every steps, or at the run's end)"
    raise UsageError("; ".join([none, *damaged.values()]))


def _number_of(error: Exception) -> int | None:
    """The system's number of an error, which tensorstore has in its text."""
    told = re.search(r"os_error_code='(\d+)'", str(error))
    return int(told[1]) if told else getattr(error, "errno", None)


def _read(path: Path) -> dict[str, Any]:
    """One checkpoint; raises many kinds of error, ValueError if its checksum is wrong, UsageError if it has none."""
    with _orbax() as orbax:
        tree = orbax.restore(path)
    if not tree:
        raise ValueError("it is empty")
    version = int(tree.pop("version", 1))
    older = (
        f"checkpoint {path}: is of format {version}, these scripts read {VERSION}; resume it with those that wrote it"
    )
    check(version == VERSION, older)
    if not np.array_equal(tree.pop("checksum"), checksum(tree)):
        raise ValueError("its checksum differs")
    return tree


def quarantine(run_dir: Path, after: int) -> None:
    """Moves checkpoints of later steps, which are damaged, to the folder `damaged`: no run may resume from them."""
    for step in steps_in(run_dir):
        if step > after:
            files.quarantine(run_dir / "checkpoints" / str(step), run_dir / "damaged")


class MisfitError(UsageError):
    """A checkpoint does not fit the arguments: its names or shapes are not those that they make."""


def restore_tree(template: Any, saved: Any, run_dir: str) -> Any:
    """Gives a loaded tree the structure of `template`; raises MisfitError if names or shapes differ."""
    from flax import serialization

    differ = f"{run_dir}: its checkpoint does not fit these arguments"
    try:
        tree = serialization.from_state_dict(template, saved)
    except (ValueError, KeyError, TypeError) as error:
        raise MisfitError(f"{differ} ({files.first_line(error)})") from None
    except AttributeError:  # Flax found None where there should be a tuple
        raise MisfitError(f"{differ}: something that they need is not in it") from None
    if not len(jax.tree.leaves(template)) == len(jax.tree.leaves(tree)) == len(jax.tree.leaves(saved)):
        raise MisfitError(f"{differ}: there is something in it that they do not need")
    for (path, want), got in zip(jax.tree.leaves_with_path(template), jax.tree.leaves(tree), strict=True):
        name = jax.tree_util.keystr(path)
        if want.shape != got.shape:
            raise MisfitError(f"{differ} ({name} is {got.shape} there, {want.shape} here)")
    return tree
