"""Puts film strips that evaluate.py wrote under each other, all as wide. Try:

    python evaluate.py agents/ppo_bigfish --episodes 8 --video
    python -m experiments.strip agents/ppo_bigfish/videos/test_levels_8001167.png doors.png:4 --out docs/agents.png

A strip has a row for each scene; FILE:N takes its N-th alone.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from annotated_types import Interval
from PIL import Image

from common import files, films, runs
from common.files import check


@dataclass(frozen=True)
class Args:
    strips: tyro.conf.Positional[tuple[str, ...]]
    """pictures, or FILE:N for a row of one"""
    width: Annotated[int, Interval(ge=64, le=8192)] = 1280
    """pixels of the picture"""
    out: str = "docs/agents.png"
    """where to write"""


def rows(text: str, width: int) -> np.ndarray:
    """A strip, or its row N, as uint8 [H, width, 3]."""
    path, colon, number = (text, "", "") if Path(text).is_file() else text.rpartition(":")
    check(Path(path).is_file(), f"STRIPS {text}: there is no such file")
    try:
        picture = Image.open(path).convert("RGB")
    except OSError:
        raise runs.UsageError(f"STRIPS {text}: is no picture") from None
    height = picture.width // films.MOMENTS
    check(0 < height <= picture.height, f"STRIPS {text}: is no film strip, {films.MOMENTS} frames wide")
    if colon:
        count = picture.height // height
        square = picture.height == count * height
        check(square, f"STRIPS {text}: its frames are not square, so rows cannot be told; give all of it")
        check(number.isdecimal() and 1 <= int(number) <= count, f"STRIPS {text}: has rows 1 to {count}")
        top = (int(number) - 1) * height
        picture = picture.crop((0, top, picture.width, top + height))
    size = width, round(picture.height * width / picture.width)
    kind = Image.Resampling.NEAREST if picture.width < width else Image.Resampling.LANCZOS  # a game's pixels stay sharp
    return np.asarray(picture.resize(size, kind))


def main(args: Args) -> None:
    check(len(args.strips) > 0, "STRIPS: give at least one")
    files.make_room(Path(args.out), "--out")
    films.write_picture(Path(args.out), np.concatenate([rows(text, args.width) for text in args.strips]))
    print(args.out)


if __name__ == "__main__":
    runs.cli(Args, main)
