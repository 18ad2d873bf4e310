"""Trained agents as small files: what evaluation needs of a run, in safetensors, which hold numbers and no code."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from common import checkpoints, files
from common.files import UsageError

FILE = "agent.safetensors"


def load(
    run_dir: str, initial: Callable[[], Any], load_run: Callable[[str], dict], part: Callable[[Any], dict]
) -> dict:
    """What evaluation needs of a run's newest checkpoint, or of a folder that `evaluate.py --export` wrote.

    Args:
      run_dir: either of them.
      initial: makes a training state, whose shapes must be those of what is loaded.
      load_run: load_run(run_dir) -> the newest checkpoint, of which "state" is a training state.
      part: what evaluation needs of such a state: dicts of arrays.

    Raises UsageError if there is neither, or it does not fit.
    """
    path = Path(run_dir, FILE)
    if not path.exists():
        return part(load_run(run_dir)["state"])
    template = jax.eval_shape(lambda: part(initial()))
    tree = checkpoints.restore_tree(template, read(path), run_dir)
    return jax.tree.map(lambda x, like: jnp.asarray(x, like.dtype), tree, template)


def read(path: Path) -> dict:
    """A file's arrays, in dicts by the parts of their names. Raises UsageError if it is damaged."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        arrays = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UsageError(f"RUN_DIR {path.parent}: {path.name} cannot be read ({error})") from None
    tree = {}
    for name, array in arrays.items():
        *folders, last = name.split("/")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = array
    return tree


def write(folder: Path, content: dict, tree: dict) -> None:
    """Writes an agent and its args.json (`content`) to a folder. Over 1 MB, its larger arrays become float16."""
    from safetensors.numpy import save

    leaves = jax.tree.leaves_with_path(jax.tree.map(np.asarray, tree))
    large = sum(x.nbytes for _, x in leaves) > 1e6

    def small(x):
        return x.astype(np.float16) if large and x.dtype == np.float32 and x.size > 1000 else x

    arrays = {"/".join(key.key for key in path): np.array(small(x), order="C") for path, x in leaves}
    files.make_folder(folder, "--export")
    with files.full_disk_explained(folder / FILE), files.whole(folder / FILE) as temporary:
        temporary.write_bytes(save(arrays))
    files.write_json(folder / "args.json", content)
