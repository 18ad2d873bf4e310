"""Doors to open with a floating hook or gripper: a Gymnasium vector environment of random MuJoCo worlds.

    import doorgym
    doors = doorgym.make_vec("Lever-Right-Pull", num_envs=64, seed=1, num_threads=8)

    import gymnasium, doorgym
    doors = gymnasium.make_vec("DoorGym/Lever-Right-Pull-v0", num_envs=64)

A task's name is its knob (Pull, Lever, Round), the side of its hinge (Right, Left) and the way it opens (Pull, Push).
"""

import ctypes
import os
import sys


def _renderer() -> str:
    """MuJoCo's rendering backend without a display: egl, or disabled if its libraries are missing, since then even the
    import of MuJoCo would fail."""
    try:
        for library in ("libEGL.so.1", "libOpenGL.so.0"):
            ctypes.CDLL(library)
    except OSError:
        return "disabled"
    return "egl"


if sys.platform == "linux" and not os.environ.get("DISPLAY"):
    os.environ.setdefault("MUJOCO_GL", _renderer())  # before MuJoCo is imported

import gymnasium  # noqa: E402

from doorgym.vector import DoorEnv, DoorVectorEnv  # noqa: E402
from doorgym.worlds import TASKS  # noqa: E402

__all__ = ["TASKS", "DoorEnv", "DoorVectorEnv", "make_vec"]


def make_vec(task: str, num_envs: int, seed: int = 0, num_threads: int | None = None, **options) -> DoorVectorEnv:
    """Makes a `DoorVectorEnv`. Raises ValueError for invalid arguments."""
    return DoorVectorEnv(task, num_envs, seed, num_threads, **options)


for _name in TASKS:
    gymnasium.register(
        f"DoorGym/{_name}-v0",
        entry_point="doorgym.vector:DoorEnv",
        vector_entry_point="doorgym.vector:DoorVectorEnv",
        kwargs={"task": _name},
    )
