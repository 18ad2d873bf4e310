"""Where a run's metrics go besides metrics.jsonl: Weights & Biases, or TensorBoard."""

import os
import platform
import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from common import files
from common.files import UsageError, check


def wandb_mode(args: Any) -> str:
    """online, offline or disabled; auto is what WANDB_MODE says, or online where the user is logged in."""
    if args.wandb_mode == "disabled" or args.track != "wandb":
        return "disabled"
    try:
        import wandb
    except ImportError:
        raise UsageError(f"--wandb-mode {args.wandb_mode}: the package wandb is not installed; use disabled") from None
    mode = (os.environ.get("WANDB_MODE") or None) if args.wandb_mode == "auto" else args.wandb_mode
    if mode in (None, "online"):
        try:
            logged_in = wandb.login(prompt=False)
        except Exception:  # no network, or a key that is refused: where nobody asked for the server, training goes on
            logged_in = False
        why = "not logged in, or no network; run wandb login or use offline"
        check(logged_in or mode is None, f"--wandb-mode {args.wandb_mode}: {why}")
        mode = "online" if logged_in else "offline"
    return mode


def as_number(value: Any) -> Any:
    """Text that is a number, as schedules may be, as that: W&B compares and sorts numbers only."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def start_wandb(args: Any, mode: str, path: Path, run_id: str, config: dict[str, Any]):
    """W&B's run, or None where it is disabled."""
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
            # Without an end, a run that is stopped would wait for a network that is gone.
            settings=wandb.Settings(console="off", silent=mode != "online", finish_timeout=60),
        )
        run.define_metric("global_step")
        run.define_metric("*", step_metric="global_step")
        return run
    except Exception as error:  # W&B raises many kinds
        given = f"--wandb-mode {args.wandb_mode} --wandb-project {args.wandb_project}"
        raise UsageError(
            f"{given}: W&B does not start ({error!r}); give another mode or project, or --wandb-mode disabled"
        ) from None


class Board:
    """TensorBoard's file of events, which are in it when they have been logged. tensorboardX's own writer leaves that
    to a thread, which dies where the disk is full, and all wait for it."""

    def __init__(self, folder: Path, purge_step: int | None):
        """What older files say of `purge_step` and later is to vanish. Raises OSError where it cannot be written."""
        from tensorboardX import record_writer, summary  # late: not every run writes for it
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._summary, self._event, self._path = summary, Event, folder
        folder.mkdir(exist_ok=True)
        # TensorBoard reads files in the order of these seconds; the rest of the name lets none replace another.
        name = f"events.out.tfevents.{int(time.time())}.{platform.node()}.{secrets.token_hex(4)}.{purge_step or 0}"
        self._file = record_writer.RecordWriter(str(folder / name))
        first = [Event(wall_time=time.time(), file_version="brain.Event:2")]
        if purge_step is not None:
            first.append(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))
        self._write(first)

    def _write(self, events: Iterable) -> None:
        with files.full_disk_explained(self._path):
            for event in events:
                self._file.write(event.SerializeToString())
            self._file.flush()

    def add_numbers(self, step: int, numbers: dict[str, float]) -> None:
        values = [self._summary.scalar(name, number) for name, number in numbers.items()]
        self._write(self._event(wall_time=time.time(), step=step, summary=value) for value in values)

    def add_picture(self, step: int, name: str, picture: np.ndarray) -> None:
        value = self._summary.image(name, picture, dataformats="HWC")
        self._write([self._event(wall_time=time.time(), step=step, summary=value)])

    def close(self) -> None:
        self._file.close()
