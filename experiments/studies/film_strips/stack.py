"""Stacks film strips of evaluate.py, scaled to one width. FILE:N takes the N-th scene of a strip.

python evaluate.py agents/ppo_bigfish --episodes 8 --video
python -m experiments.studies.film_strips.stack BIGFISH.png DOORS.png:4 --out docs/agents.png
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from PIL import Image

from common import films, runs
from common.flags import PositiveInt


@dataclass(frozen=True)
class Args:
    strips: tyro.conf.Positional[tuple[str, ...]]
    """pictures, or FILE:N for one row"""
    width: PositiveInt = 1280
    """pixels"""
    out: str = "docs/agents.png"
    """where to write"""


def rows(text: str, width: int) -> np.ndarray:
    """A strip, or its row N, as uint8 [H, width, 3]."""
    path, _, number = (text, "", "") if Path(text).is_file() or ":" not in text else text.rpartition(":")
    picture = Image.open(path).convert("RGB")
    if number:
        height = picture.width // films.MOMENTS
        picture = picture.crop((0, (int(number) - 1) * height, picture.width, int(number) * height))
    size = width, round(picture.height * width / picture.width)
    kind = Image.Resampling.NEAREST if picture.width < width else Image.Resampling.LANCZOS  # a game's pixels stay sharp
    return np.asarray(picture.resize(size, kind))


def main(args: Args) -> None:
    films.write_picture(Path(args.out), np.concatenate([rows(text, args.width) for text in args.strips]))


if __name__ == "__main__":
    runs.cli(Args, main)
