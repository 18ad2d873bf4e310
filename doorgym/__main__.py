"""Draws a world of each knob, hinge and opening: python -m doorgym doors.png"""

import sys

import numpy as np
from PIL import Image, ImageDraw

import doorgym


def main(path: str, tasks: tuple[str, ...], columns: int = 3) -> None:
    """Writes a picture of these tasks, a robot before each door."""
    pictures = []
    for i, task in enumerate(tasks):
        robot = "gripper" if task.startswith("Round") else "hook"
        doors = doorgym.make_vec(
            task, 1, i, 1, num_worlds=1, robot=robot, render_mode="rgb_array", width=400, height=400
        )
        doors.reset(seed=3)
        picture = Image.fromarray(doors.frame())
        ImageDraw.Draw(picture).text((8, 8), f"{task}, {robot}", fill="black", font_size=22)
        pictures.append(np.asarray(picture))
        doors.close()
    rows = [np.concatenate(pictures[i : i + columns], axis=1) for i in range(0, len(pictures), columns)]
    Image.fromarray(np.concatenate(rows)).save(path)
    print(path)


if __name__ == "__main__":
    pulls = ("Pull-Right-Pull", "Pull-Left-Pull", "Lever-Right-Pull", "Lever-Left-Pull")
    main(sys.argv[1] if len(sys.argv) > 1 else "doors.png", (*pulls, "Lever-Right-Push", "Lever-Left-Push"))
