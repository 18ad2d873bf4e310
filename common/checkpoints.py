"""Checkpoints of a run: trees of arrays, written by Orbax under a temporary name, and read only if they are whole."""

import hashlib
import logging
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from common import files
from common.files import UsageError, check, full_disk_explained

TEMPORARY = "*.orbax-checkpoint-tmp*"


def open_folder(run_dir: Path, keep: int | None = None):
    """Orbax's manager of a run's checkpoints: to read them, or with `keep` to write them too, the newest of which stay.

    Who writes must hold the run: what is left of a checkpoint that was never finished is removed.
    """
    import orbax.checkpoint as ocp  # late: it takes a second

    logging.getLogger("absl").setLevel(logging.CRITICAL)  # its threads log what is raised here too
    folder, writes = Path(run_dir, "checkpoints").absolute(), keep is not None
    if writes:
        folder.mkdir(exist_ok=True)
    for unfinished in folder.glob(TEMPORARY) if writes else ():
        shutil.rmtree(unfinished)
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False, create=False)
    if jax.process_count() > 1:  # each host for itself
        one = jax.process_index()
        options.multiprocessing_options = ocp.options.MultiprocessingOptions(one, {one}, f"host{one}")
    # Not in OCDBT's form, for which tensorstore 0.1.86 leaks 300 bytes an array each time (KvStore.Spec.to_json).
    return ocp.CheckpointManager(folder, options=options, item_handlers=ocp.PyTreeCheckpointHandler(use_ocdbt=False))


def checksum(tree: dict[str, Any]) -> np.ndarray:
    """uint8 [32]: SHA-256 of a tree of dicts of arrays: their names, types, shapes and bytes."""
    sha = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(tree):
        array = np.asarray(leaf)
        sha.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        sha.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return np.frombuffer(sha.digest(), np.uint8)


def save(manager, step: int, tree: dict[str, Any]) -> None:
    """Writes a tree of dicts of arrays, with its checksum.

    Raises FullError if the disk is full, and removes what there is of it.
    """
    import orbax.checkpoint as ocp

    tree = jax.device_get(tree)
    folder = Path(manager.directory)
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None  # tensorstore's threads complain on their own
    try:
        with full_disk_explained(folder / str(step)):
            manager.save(step, args=ocp.args.PyTreeSave(tree | {"checksum": checksum(tree)}), force=True)
    except BaseException:
        _remove_unfinished(folder)
        raise
    sys.unraisablehook = hook


def _remove_unfinished(folder: Path) -> None:
    """Removes what a save has left that failed, until for a second none of Orbax's threads has written any more."""
    gone = time.monotonic()
    while time.monotonic() - gone < 1:
        for unfinished in folder.glob(TEMPORARY):
            shutil.rmtree(unfinished, ignore_errors=True)
            gone = time.monotonic()
        time.sleep(0.05)


def load(run_dir: str) -> tuple[int, dict[str, Any]]:
    """The newest checkpoint that is whole: its step and its tree of NumPy arrays (tuples come back as dicts).

    Says which ones are damaged. Raises UsageError if none is left. The run may go on meanwhile.
    """
    check(Path(run_dir, "checkpoints").is_dir(), f"{run_dir} has no checkpoint yet: nothing to load")
    damaged = {}
    with open_folder(Path(run_dir)) as manager:
        while steps := sorted({*manager.all_steps(read=True)} - {*damaged}):
            try:
                tree = _read(manager, steps[-1])
            except Exception as error:  # Orbax and tensorstore raise many kinds
                if max(manager.all_steps(read=True), default=-1) <= steps[-1]:  # else the run has gone on meanwhile
                    why = str(error).split(":")[0].strip().replace("\n", " ")[:80]
                    damaged[steps[-1]] = f"checkpoint {Path(run_dir, 'checkpoints', str(steps[-1]))} is damaged ({why})"
                continue
            for sentence in damaged.values():
                print(f"{sentence}: the one before it is taken", file=sys.stderr, flush=True)
            return steps[-1], tree
    none = f"{run_dir} has no {'whole' if damaged else 'complete'} checkpoint: nothing to load"
    raise UsageError("; ".join([none, *damaged.values()]))


def _read(manager, step: int) -> dict[str, Any]:
    """One checkpoint; raises many kinds of error, ValueError if its checksum is wrong."""
    import orbax.checkpoint as ocp

    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        tree = manager.restore(step, args=ocp.args.PyTreeRestore())
    finally:
        sys.unraisablehook = hook
    expected = tree.pop("checksum", None)
    if expected is None or not np.array_equal(expected, checksum(tree)):
        raise ValueError("it has no checksum" if expected is None else "its checksum differs")
    return tree


def set_aside(run_dir: Path, after: int) -> None:
    """Moves checkpoints of later steps, which are damaged, to the folder `damaged`: nobody is to go on from them."""
    for path in Path(run_dir, "checkpoints").iterdir():
        if path.name.isdigit() and int(path.name) > after:
            files.set_aside(path, run_dir / "damaged")


def restore_tree(template: Any, saved: Any, run_dir: str) -> Any:
    """Gives a loaded tree the structure of `template`; raises UsageError if names or shapes differ."""
    from flax import serialization

    differ = f"{run_dir}: its checkpoint does not fit these arguments"
    try:
        tree = serialization.from_state_dict(template, saved)
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{differ} ({str(error).splitlines()[0]})") from None
    except AttributeError:  # Flax found None where there should be a tuple
        raise UsageError(f"{differ}: something that they need is not in it") from None
    same = len(jax.tree.leaves(template)) == len(jax.tree.leaves(tree)) == len(jax.tree.leaves(saved))
    check(same, f"{differ}: there is something in it that they do not need")
    for (path, want), got in zip(jax.tree.leaves_with_path(template), jax.tree.leaves(tree), strict=True):
        name = jax.tree_util.keystr(path)
        check(want.shape == got.shape, f"{differ} ({name} is {got.shape} there, {want.shape} here)")
    return tree
