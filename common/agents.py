"""Trained agents as small safetensors files, which hold no code; their upload to Hugging Face's hub, with a card."""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml

from common import checkpoints, files, runs
from common.files import UsageError, check

FILE = "agent.safetensors"


def load(run_dir: str, init_state: Callable[[], Any], select: Callable[[Any], dict]) -> dict:
    """Loads an agent from a run's newest checkpoint, or from a folder that `evaluate.py --export` wrote.

    Args:
      init_state: returns a training state of the shapes that are to be loaded.
      select: select(state) -> a dict of pytrees, those that evaluation needs.

    Returns that dict with the state's `global_step`. Raises UsageError if there is no agent, or it does not fit.
    """

    def params_and_step(state):
        return select(state) | {"global_step": state.global_step}

    path = Path(run_dir, FILE)
    if not path.exists():
        return params_and_step(runs.load(lambda: {"state": init_state()}, run_dir)["state"])
    template = jax.eval_shape(lambda: params_and_step(init_state()))
    tree = checkpoints.restore_tree(template, read(path), run_dir)
    return jax.tree.map(lambda x, like: jnp.asarray(x, like.dtype), tree, template)


def read(path: Path) -> dict:
    """A file's arrays, in nested dicts. Raises UsageError if it is damaged."""
    from safetensors.numpy import load

    tree = {}
    try:
        files.check_regular(path, at_most=10**10)
        data = path.read_bytes()
        digest = runs.read_args(str(path.parent), "RUN_DIR").get("sha256")  # older agents have none
        if digest not in (None, hashlib.sha256(data).hexdigest()):
            raise ValueError("its SHA-256 is not that of args.json")
        for name, array in sorted(load(data).items()):  # a name before those within it
            *folders, last = name.split("/")
            if len(folders) > 20 or not np.isfinite(array).all():
                raise ValueError(f"{name[:80]} is not finite or nested too deeply")
            place = tree
            for folder in folders:
                place = place.setdefault(folder, {})
            place[last] = array
    except Exception as error:  # safetensors' own, and those of impossible names
        raise UsageError(f"RUN_DIR {path.parent}: {path.name} cannot be read ({error})") from None
    return tree


def write(folder: Path, content: dict, tree: dict) -> None:
    """Writes an agent and its args.json (`content`) to a folder. In an agent of more than 1 MB, large arrays become
    float16 unless a number is too large for that. Raises UsageError if it cannot write there, FullError if the disk is
    full."""
    from flax import serialization
    from safetensors.numpy import save

    leaves = jax.tree.leaves_with_path(jax.tree.map(np.asarray, serialization.to_state_dict(tree)))
    large = sum(x.nbytes for _, x in leaves) > 1e6

    def small(x):
        fits = x.dtype == np.float32 and x.size > 1000 and np.abs(x).max() <= np.finfo(np.float16).max
        return x.astype(np.float16) if large and fits else x

    arrays = {"/".join(key.key for key in path): np.array(small(x), order="C") for path, x in leaves}
    files.make_folder(folder, "--export")
    data = save(arrays)
    with files.atomic_write(folder / FILE) as temporary:
        temporary.write_bytes(data)
    files.write_json(folder / "args.json", content | {"sha256": hashlib.sha256(data).hexdigest()})


# THE HUB


def check_hub(name: str) -> None:
    """Raises UsageError unless `name` is OWNER/NAME, huggingface_hub is installed and the user is logged in."""
    try:
        import huggingface_hub
        from huggingface_hub.utils import HFValidationError, validate_repo_id
    except ImportError:
        raise UsageError(f"--push-to-hub {name}: needs huggingface_hub, pip install huggingface_hub") from None
    try:
        validate_repo_id(name)
        valid = "/" in name
    except HFValidationError:
        valid = False
    check(valid, f"--push-to-hub {name}: must be OWNER/NAME, such as me/ppo-bigfish")
    check(huggingface_hub.get_token() is not None, f"--push-to-hub {name}: not logged in; run hf auth login")


def results(evaluation: dict) -> list[tuple]:
    """An eval.json as rows of a table: levels or task, metric, value, deviation over episodes, number of episodes."""
    rows = []
    for name, entry in evaluation.items():
        if not isinstance(entry, dict) or name.startswith("random_"):
            continue
        episodes = entry["episodes"]
        if "mean_return" in entry:
            value, deviation = entry["mean_return"], f"{entry['std']:.2f}"
            rows.append((name.replace("_", " "), "mean return", value, deviation, episodes))
        else:
            rates = {task: rate for task, rate in entry.items() if isinstance(rate, float)}
            rows += [(task, "success rate", rate, "", episodes) for task, rate in rates.items()]
    return rows


def card(folder: Path, name: str) -> str:
    """The README.md of an agent on the hub, from its args.json and eval.json."""
    content = files.read(folder / "args.json", dict, "RUN_DIR", "export the agent anew")
    evaluation = files.read(folder / "eval.json", dict, "RUN_DIR", "evaluate the agent anew")
    script, args = content["script"], content["args"]
    game = content.get("env_id") or args.get("env_id", "DoorGym")
    rows = results(evaluation)
    metrics = [
        {"type": metric.replace(" ", "_"), "name": f"{metric}, {of}", "value": round(value, 3), "verified": False}
        for of, metric, value, _, _ in rows
    ]
    task = {"type": "reinforcement-learning", "name": "reinforcement-learning"}
    result = {"task": task, "dataset": {"name": game, "type": game}, "metrics": metrics}
    head = {
        "library_name": "jax",
        "pipeline_tag": "reinforcement-learning",
        "tags": ["reinforcement-learning", "deep-reinforcement-learning", script.replace("_", "-"), game],
        "model-index": [{"name": script, "results": [result]}],
    }
    title = re.sub("_(procgen|doorgym|montezuma)$", "", script).replace("_", " ").upper()
    table = "\n".join(
        f"| {of} | {metric} | {value:.2f} | {deviation} | {episodes} |"
        for of, metric, value, deviation, episodes in rows
    )
    levels, steps = "", "environment steps"
    if "robot" in args:
        levels, steps = f", on {args['hardness']} doors with a {args['robot']}", "decisions"
    if "num_levels" in args:
        count = f"{args['num_levels']:,} levels" if args["num_levels"] else "all levels"
        levels = f", on {count} of the {args['distribution_mode']} game"
    return f"""---
{yaml.safe_dump(head, sort_keys=False)}---
# {title} on {game}

A policy that `{script}.py` trained for {evaluation["global_step"]:,} {steps}{levels}; `args.json` has its
arguments.

| of | | mean | deviation over episodes | episodes |
| --- | --- | --- | --- | --- |
{table}

Play it, in a copy of the repository that has {script}.py:

    hf download {name} --local-dir my_agent
    python evaluate.py my_agent --video
"""


def push(folder: Path, name: str) -> str:
    """Uploads an agent and its card with the user's login; returns the repository's URL. Does not change the folder.
    Raises UsageError if its args.json or eval.json cannot be read, FailedError if the upload fails."""
    from huggingface_hub import HfApi

    text = card(folder, name)
    try:
        api = HfApi()
        url = api.create_repo(name, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, allow_patterns=[FILE, "args.json", "eval.json"])
        api.upload_file(repo_id=name, path_in_repo="README.md", path_or_fileobj=text.encode())
        return str(url)
    except Exception as error:  # huggingface_hub's, httpx's, the system's
        reason = files.first_line(error)
        raise files.FailedError(f"--push-to-hub {name}: {reason} (hf auth login says who you are)") from None
