"""Draws a door of each of six tasks: python -m doorgym doors.png"""

import sys

import numpy as np
from PIL import Image, ImageDraw

import doorgym

TASKS = (
    ("Pull-Right-Pull", "Pull-Left-Pull", "Lever-Right-Pull"),
    ("Lever-Left-Pull", "Lever-Right-Push", "Lever-Left-Push"),
)


def picture(task: str, seed: int) -> np.ndarray:
    """A robot before a door, and the task's name: uint8 [400, 400, 3]."""
    doors = doorgym.make_vec(task, 1, seed, 1, num_worlds=1, width=400, height=400)
    doors.reset(seed=3)
    image = Image.fromarray(doors.frame())
    doors.close()
    ImageDraw.Draw(image).text((8, 8), task, fill="black", font_size=22)
    return np.asarray(image)


if __name__ == "__main__":
    path = sys.argv[1] if len(sys.argv) > 1 else "doors.png"
    rows = [
        np.concatenate([picture(task, 3 * i + j) for j, task in enumerate(row)], axis=1) for i, row in enumerate(TASKS)
    ]
    Image.fromarray(np.concatenate(rows)).save(path)
    print(path)
