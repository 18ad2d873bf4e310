"""A scripted controller that opens doors from the simulator's state. It shows that a task is feasible, not
that it can be learnt.

The hook reaches over a lever from above (around the bar of a pull handle from the side), rolls back so that its link
and tip turn the lever between them, and pulls or pushes. Pushing the end of a lever with a motor's 2 N would turn a
hard one by only 0.2 rad; its latch comes free at 0.836.
"""

from contextlib import closing

import numpy as np
from scipy.spatial.transform import Rotation

from doorgym import worlds
from doorgym.vector import FREE, DoorVectorEnv

REACH = 0.82  # where a lever is gripped, as a fraction of its length: thin enough for the hook's mouth
PIVOT = np.array((1 - 0.06416, 0, 1.2053))  # where the axes of the wrist's joints meet, when their positions are 0
MIDDLE = np.array((-0.07084, 0, -0.0053))  # from the pivot to the middle of the hook's inside
INSIDE = 0.0185  # metres from this middle to the hook's finger
MASS = np.array((1.66, 1.66, 1.66, 1.005, 1.005, 1.005))  # kg and kg m^2 of the six joints
ACCELERATION = np.array((1.2, 1.2, 1.2, 2, 2, 2))  # m/s^2 and rad/s^2, of 2 N and 2 N m
# Phases. The hook goes 0.1 m in front of ABOVE, then above a lever or beside a pull handle, then around it; it turns a
# lever, and moves the door.
BEFORE, ABOVE, AROUND, TURN, MOVE = range(5)


class Opener:
    """Chooses actions for all doors of a vector environment with hooks; make a new one for each episode."""

    def __init__(self, doors: DoorVectorEnv):
        if doors.robot != "hook" or doors.task.knob == "round":
            raise ValueError(f"{doors.task.name} with a {doors.robot}: give a lever or a pull handle, and the hook")
        self._doors, self._lever = doors, doors.task.knob == "lever"
        self._phase = np.zeros(doors.num_envs, int)
        self._waited = np.zeros(doors.num_envs, int)  # decisions in this phase

    def __call__(self) -> np.ndarray:
        """Returns the next actions float64 [N, 6] and updates each door's phase: call it once per decision."""
        doors, task, lever = self._doors, self._doors.task, self._lever
        positions = doors._positions(doors._state)
        joints, velocities = positions[:, :6], doors._state[:, 1 + doors._nq :][:, :6]
        door, knob = doors._angles(doors._state)
        phase = self._phase

        # The target of the hook's middle, relative to the point that it grips, in the door's own axes.
        further = np.where(phase >= TURN, -0.3 * task.side * lever, 0)  # rad: also presses the lever down
        point, inner = self._grip(positions, knob + further)
        away = np.array((0, 0, 0.075) if lever else (0, 0.075, 0))
        goal = point + np.where(phase[:, None] <= ABOVE, away, 0)
        goal[:, 0] += inner + np.where(phase < TURN, 0.001, INSIDE)  # its tip passes behind the handle
        goal[:, 0] += np.where(phase == BEFORE, 0.1, 0)
        goal = _about_z(door, goal) + np.array((0, task.side * worlds.WIDTH / 2, 0))
        middle = joints[:, :3] + PIVOT + Rotation.from_euler("ZYX", joints[:, 3:]).apply(MIDDLE)
        # A lever is turned with the hook a little askew, which takes out the play of a thin one.
        yaw = door + np.where(phase >= TURN, 0.15 * task.side * lever, 0)
        roll = (np.pi / 2 + knob) * lever
        angles = np.stack([yaw, np.zeros_like(yaw), roll], axis=1)
        error = np.concatenate([goal - middle, angles - joints[:, 3:]], axis=1)

        # As fast as the motors can still brake.
        speed = np.minimum(np.sqrt(1.4 * ACCELERATION * np.abs(error)), np.abs(error) / 0.25)
        force = MASS * (np.sign(error) * speed - velocities) / 0.12
        if lever:
            force[phase >= TURN, 5] = -2 * task.side  # presses the handle down
        force[phase == TURN, 0] = 0.6
        force[phase == MOVE, 0] = 2 if task.opening == "pull" else -2
        force[phase == MOVE, 3] = -0.5 * velocities[phase == MOVE, 3]

        near = np.abs(error) < np.where(phase[:, None] == BEFORE, 0.05, (0.01, 0.012, 0.02, 0.3, 0.3, 0.08))
        there = near.all(axis=1) & ((np.abs(velocities).max(axis=1) < 0.15) | (phase == BEFORE))
        along = np.abs(error[:, 2 if lever else 1]) < 0.012
        done = np.select(
            [phase == BEFORE, phase == ABOVE, phase == AROUND, phase == TURN],
            [there, there, along | (self._waited > 20), (np.abs(knob) > FREE) | (not lever)],
        )
        self._waited = np.where(done, 0, self._waited + 1)
        self._phase = phase + done.astype(int)
        return np.clip(force / 2, -1, 1)

    def _grip(self, positions: np.ndarray, knob: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The middle of the part of the handle to grip [N, 3], from the door's hinge in its own axes, and the offset
        from there to its face towards the slab [N] (negative)."""
        doors, side = self._doors, self._doors.task.side
        drawn = [doors.worlds[world] for world in doors._world]
        shapes = np.array([world.shape for world in drawn]).T
        x = np.array([world.thickness for world in drawn]) / 2
        sideways, up = positions[:, doors._door + 1], positions[:, doors._door + 2]
        along = np.zeros_like(x)
        if self._lever:
            radius, shaft, length, _, sink, rise, bump = shapes
            along = side * REACH * (length - radius)
            outer = 2 * worlds.TAPER * (1 - REACH) * (rise + bump)  # what the taper leaves there
            inner = -(outer + sink) / 2
            x = x + shaft + (outer - sink) / 2
        else:
            _, _, distance, _, radius = shapes
            inner = -radius
            x = x - 0.006 + distance
        y = worlds.knob_home(doors.task) - side * worlds.WIDTH / 2 + sideways + along * np.cos(knob)
        z = worlds.KNOB_HEIGHT + up + along * np.sin(knob)
        return np.stack([x, y, z], axis=1), inner


def _about_z(angle: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Rotates points [N, 3] by angles [N]."""
    return Rotation.from_euler("z", angle[:, None]).apply(points)


def open_doors(task: str, num_worlds: int, seed: int, hardness: str = "hard") -> dict[str, np.ndarray]:
    """Plays one episode in each of `num_worlds` random worlds; returns the last `info` of `DoorVectorEnv`.

    Raises ValueError for a round knob, which the hook cannot turn.
    """
    how = {"num_worlds": num_worlds, "hardness": hardness, "autoreset": False, "in_turn": True}
    with closing(DoorVectorEnv(task, num_worlds, seed, action_repeat=4, **how)) as doors:
        opener, truncated = Opener(doors), np.zeros(1, bool)
        while not truncated.any():
            _, _, _, truncated, info = doors.step(opener())
    return info
