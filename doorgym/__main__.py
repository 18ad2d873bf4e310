"""Draws six doors or, with --check, shows that a scripted hook can open all pull handles and levers.

Try:

    python -m doorgym doors.png
    python -m doorgym --check
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from PIL import Image, ImageDraw

import doorgym
from doorgym.opener import open_doors
from doorgym.vector import HARDNESS


@dataclass(frozen=True)
class Args:
    path: Annotated[str, tyro.conf.Positional] = "doors.png"
    """picture to write"""
    check: bool = False
    """instead, open doors of each pull-handle and lever task and print success rates; exit code 1 below 90 %"""
    num_worlds: int = 64
    """number of random doors per task for --check"""
    seed: int = 0
    """seed of the doors for --check"""


DRAWN = (  # in rows
    ("Pull-Right-Pull", "Pull-Left-Pull", "Lever-Right-Pull"),
    ("Lever-Left-Pull", "Lever-Right-Push", "Lever-Left-Push"),
)


def picture(task: str, seed: int) -> np.ndarray:
    """Renders a robot in front of a door, with the task's name: uint8 [400, 400, 3]."""
    doors = doorgym.make_vec(task, 1, seed, 1, num_worlds=1, width=400, height=400)
    doors.reset(seed=3)
    image = Image.fromarray(doors.frame())
    doors.close()
    ImageDraw.Draw(image).text((8, 8), task, fill="black", font_size=22)
    return np.asarray(image)


def check(args: Args) -> bool:
    """Opens doors of each task with a lever (hard and easy) or a pull handle; returns whether at least 90 % of each
    opened."""
    worst = 1.0
    for name, task in doorgym.TASKS.items():
        if task.knob != "round":
            kinds = HARDNESS if task.knob == "lever" else ("hard",)  # a pull handle has no spring
            rates = [open_doors(name, args.num_worlds, args.seed, hardness)["success"].mean() for hardness in kinds]
            print(f"{name:18}" + "".join(f"{h:>6} {rate:4.0%}" for h, rate in zip(kinds, rates, strict=True)))
            worst = min(worst, *rates)
    return worst >= 0.9


def main(args: Args) -> None:
    """Raises ValueError or OSError for bad arguments, RuntimeError if rendering is not possible."""
    given = f"--num-worlds {args.num_worlds}, --seed {args.seed}"
    if args.num_worlds < 1 or args.seed < 0:
        raise ValueError(f"{given}: give 1 or more worlds, and a seed of 0 or more")
    if not args.check and (args.num_worlds, args.seed) != (Args.num_worlds, Args.seed):
        raise ValueError(f"{given}: have no effect without --check")
    if args.check and args.path != Args.path:
        raise ValueError(f"{args.path}: --check writes no picture, leave it out")
    if args.check:
        sys.exit(0 if check(args) else 1)
    path = Path(args.path)
    kind = Image.registered_extensions().get(path.suffix.lower())  # may be read-only, such as .psd
    if kind not in Image.SAVE or not path.absolute().parent.is_dir():
        raise ValueError(f"{args.path}: give the name of a picture in a folder that is there, such as doors.png")
    rows = [
        np.concatenate([picture(task, 3 * i + j) for j, task in enumerate(row)], axis=1) for i, row in enumerate(DRAWN)
    ]
    Image.fromarray(np.concatenate(rows)).save(args.path)
    print(args.path)


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
