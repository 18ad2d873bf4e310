"""Trackers of a run's metrics besides metrics.jsonl: Weights & Biases and TensorBoard."""

import os
from pathlib import Path
from typing import Any

from common import files
from common.files import UsageError, check


def wandb_mode(args: Any) -> str:
    """The mode of W&B: online, offline or disabled. auto is WANDB_MODE or, without it, online if the user is logged in,
    else offline. Raises UsageError if wandb is not installed, or for online without a login or a network."""
    mode = (os.environ.get("WANDB_MODE") or None) if args.wandb_mode == "auto" else args.wandb_mode
    if mode == "disabled" or args.track != "wandb":
        return "disabled"
    try:
        import wandb
    except ImportError:
        raise UsageError(f"--wandb-mode {args.wandb_mode}: the package wandb is not installed; use disabled") from None
    if mode in (None, "online"):
        try:
            logged_in = wandb.login(prompt=False)
        except Exception:  # no network, or a key that is refused: a run that did not ask for online continues
            logged_in = False
        why = "not logged in, or no network; run wandb login or use offline"
        where = "WANDB_MODE=online" if args.wandb_mode == "auto" else f"--wandb-mode {args.wandb_mode}"
        check(logged_in or mode is None, f"{where}: {why}")
        mode = "online" if logged_in else "offline"
    return mode


def as_number(value: Any) -> Any:
    """Converts a text that is a number, as of a schedule: W&B compares and sorts numbers only."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def start_wandb(args: Any, mode: str, path: Path, run_id: str, config: dict[str, Any]):
    """W&B's run, None if it is disabled."""
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
            config={name: as_number(value) for name, value in config.items()},
            save_code=True,
            mode=mode,
            # SageMaker would replace the id, which a resume needs; a stopped run would wait for a lost network.
            settings=wandb.Settings(console="off", silent=mode != "online", finish_timeout=60, sagemaker_disable=True),
        )
        run.define_metric("global_step")
        run.define_metric("*", step_metric="global_step")
        return run
    except Exception as error:  # W&B raises many kinds
        if full := files.full_disk(error, path):
            raise full from None
        entity = f" --wandb-entity {args.wandb_entity}" if args.wandb_entity else ""
        given = f"--wandb-mode {mode}{entity} --wandb-project {args.wandb_project}"
        valid = "give another mode, entity or project, or --wandb-mode disabled"
        raise UsageError(f"{given}: W&B does not start ({error!r}); {valid}") from None


def start_tensorboard(folder: Path, purge_step: int | None):
    """TensorBoard's writer; hides older events from `purge_step` on."""
    from tensorboardX import SummaryWriter  # late: not every run writes for it

    # Its thread dies on a full disk, and a full queue would wait for it: this one has room until the next flush, which
    # raises the error. The suffix keeps a resume from replacing a file of the same second.
    return SummaryWriter(str(folder), purge_step=purge_step, max_queue=10_000, filename_suffix=f".{purge_step or 0}")
