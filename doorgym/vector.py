"""Door worlds as a Gymnasium vector environment, stepped in MuJoCo's own threads, and as a single environment."""

import os
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from mujoco import mjtState
from mujoco.rollout import Rollout

from doorgym import worlds

FRAME_SKIP = 20  # MuJoCo steps of 1 ms per environment step
OPEN = 0.2  # radians: a door opened this far counts as a success
FREE = 0.836  # radians: a knob turned this far takes its latch out of the frame
ROBOTS = {"hook": 6, "gripper": 7}  # number of observed joints, and of actions
HARDNESS = ("hard", "easy")


def sizes(robot: str) -> tuple[int, int]:
    """The sizes of an observation and an action."""
    return 2 * ROBOTS[robot] + 3, ROBOTS[robot]


def action_space(robot: str) -> gym.spaces.Box:
    """A float32 Box of motor controls from -1 to 1, where 1 is 2 N (slides) or 2 N m (hinges). The gripper's last
    action is its fingers' angle in radians, from 0 (open) to 1.05 (closed)."""
    low, high = -np.ones(ROBOTS[robot], np.float32), np.ones(ROBOTS[robot], np.float32)
    if robot == "gripper":
        low[-1], high[-1] = 0.0, 1.05
    return gym.spaces.Box(low, high)


def reward(offset: np.ndarray, pitch, yaw, door, knob, actions: np.ndarray) -> np.ndarray:
    """DoorGym's reward float64 [N] (Urakami et al. 2019, arXiv 1908.01887), from the state before a step and its
    actions.

    Args:
      offset: [N, 3] from knob to finger, metres.
      pitch, yaw: [N] joint angles of the wrist, radians; the door's angle is subtracted from the yaw. The joints turn
        about z, y and x in this order; the original's Euler angles have another order, which agrees for small angles.
      door, knob: [N] angles; 0 for a knob that does not turn.
      actions: [N, 6] before clipping; a gripper's [N, 5], without the last two, as in the original's code.
    """
    distance = np.linalg.norm(offset, axis=-1)
    reach = -distance - np.log(distance**2 + 0.005) - 5
    return reach - np.hypot(pitch, yaw) - (actions**2).mean(axis=-1) + 30 * np.abs(door) + 50 * np.abs(knob)


class DoorVectorEnv(gym.vector.VectorEnv):
    """N parallel doors, each episode in a world from a pool that is compiled once.

    Observations float32 [N, 15] (gripper: 17): the robot's joint positions and velocities, then finger minus knob.
    Actions float32 [N, 6] (gripper: 7): see `action_space`. An episode is truncated after `max_episode_steps`, never
    terminated, and the next one begins in the same step: the last observation and infos are then in
    info["final_obs"] and info["final_info"].

    info["door_angle"] and info["knob_angle"] [N] are in radians, the door's positive as it opens. Of the episode so
    far: info["success"] [N], whether the door was 0.2 rad open after a step, info["freed"] [N], whether its latch was
    free of the frame (False for a pull handle, which has none), and info["max_knob_angle"] [N], the largest absolute
    angle.

    The same seed gives the same trajectories for any number of threads. Environment i's does not depend on the number
    of environments either, except that with `in_turn` the worlds of its second and later episodes do.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 50, "autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(
        self,
        task: str,
        num_envs: int = 1,
        seed: int = 0,
        num_threads: int | None = None,
        *,
        robot: str = "hook",
        hardness: str = "hard",
        num_worlds: int = 256,
        action_repeat: int = 1,
        max_episode_steps: int = 512,
        render_mode: str | None = None,
        width: int = 480,
        height: int = 480,
        autoreset: bool = True,
        in_turn: bool = False,
    ):
        """
        Args:
          task: a name in `doorgym.TASKS`, such as Lever-Right-Pull.
          seed: of the worlds, and of the episodes until `reset` is given another.
          num_threads: None or 0 for one per core.
          num_worlds: number of worlds to draw and compile.
          action_repeat: hold an action for this many steps of 20 ms; the reward is the last step's.
          max_episode_steps: episode length in steps of 20 ms, whatever action_repeat is.
          autoreset: whether the next episode begins at once; otherwise call `reset`.
          in_turn: use the worlds in turn, counted from the last reset with a seed: environment i plays world i, then
            i + N, i + 2 N, ... (modulo num_worlds); otherwise each episode draws one at random.

        Raises ValueError for invalid arguments.
        """
        for name, value, valid in (
            ("task", task, tuple(worlds.TASKS)), ("robot", robot, tuple(ROBOTS)), ("hardness", hardness, HARDNESS),
            ("render_mode", render_mode, (None, "rgb_array")),
        ):  # fmt: skip
            if value not in valid:
                raise ValueError(f"{name} {value!r}: give one of {', '.join(map(str, valid))}")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        num_threads = num_threads or cores
        counts = {
            "num_envs": num_envs, "num_threads": num_threads, "num_worlds": num_worlds, "action_repeat": action_repeat,
        }  # fmt: skip
        for name, value in counts.items():
            if value < 1:
                raise ValueError(f"{name} {value}: must be 1 or more")
        for name, value, low, high in (
            ("seed", seed, 0, 2**64),
            ("width", width, 1, 1024),
            ("height", height, 1, 1024),
        ):
            if not low <= value <= high:
                raise ValueError(f"{name} {value}: must be from {low} to {high}")
        if max_episode_steps < 1 or max_episode_steps % action_repeat:
            raise ValueError(
                f"max_episode_steps {max_episode_steps}: must be 1 or more, and a multiple of action_repeat "
                f"{action_repeat}"
            )
        self.task, self.robot, self.num_envs, self.render_mode = worlds.TASKS[task], robot, num_envs, render_mode
        self.action_repeat, self.max_episode_steps = action_repeat, max_episode_steps
        self._picture = {"height": height, "width": width}
        self.metadata = self.metadata | {
            "render_fps": 50 / action_repeat,
            "autoreset_mode": AutoresetMode.SAME_STEP if autoreset else AutoresetMode.DISABLED,
        }
        self.single_observation_space = gym.spaces.Box(-np.inf, np.inf, (sizes(robot)[0],), np.float32)
        self.single_action_space = action_space(robot)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

        rng = np.random.default_rng([seed, 0])
        self.worlds = [worlds.draw(self.task.knob, hardness, rng) for _ in range(num_worlds)]
        self.models = [worlds.build(self.task, robot, world).compile() for world in self.worlds]
        model = self.models[0]
        # A thread's data is used for one world after another: arrays of other sizes would be written out of bounds.
        if len({model.signature for model in self.models}) > 1:
            raise RuntimeError(f"worlds of {task} differ in structure")
        self._nq, self._door = model.nq, model.joint("door").qposadr[0]
        self._datas = [mujoco.MjData(model) for _ in range(num_threads)]
        self._pool = Rollout(nthread=num_threads)
        steps = FRAME_SKIP * action_repeat
        size = mujoco.mj_stateSize(model, mjtState.mjSTATE_FULLPHYSICS)
        self._state = np.zeros((num_envs, size))  # time, positions, velocities
        self._states = np.zeros((num_envs, steps, size))
        self._sensors = np.zeros((num_envs, steps, model.nsensordata))
        self._controls = np.zeros((num_envs, steps, model.nu))
        self._finger_minus_knob = np.zeros((num_envs, 3))
        self._world = np.zeros(num_envs, int)
        self._steps, self._success = np.zeros(num_envs, int), np.zeros(num_envs, bool)
        self._max_knob = np.zeros(num_envs)
        self._renderers, self._autoreset, self._in_turn = {}, autoreset, in_turn
        self._rngs, self._next_world = [None] * num_envs, np.zeros(num_envs, int)
        self.reset(seed=seed)

    # Parts of a state: self._state, or another array of its layout.

    def _positions(self, state: np.ndarray) -> np.ndarray:
        return state[..., 1 : 1 + self._nq]

    def _angles(self, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Door and knob."""
        positions = self._positions(state)
        door = positions[..., self._door]
        return door, positions[..., -1] if self.task.turns else np.zeros_like(door)

    def _offset(self, sensors: np.ndarray) -> np.ndarray:
        """Finger (or the middle of two) minus knob [..., 3]."""
        points = sensors.reshape(*sensors.shape[:-1], -1, 3)
        return points[..., :-1, :].mean(axis=-2) - points[..., -1, :]

    def _observe(self) -> np.ndarray:
        joints, velocities = ROBOTS[self.robot], 1 + self._nq
        parts = (
            self._state[:, 1 : 1 + joints],
            self._state[:, velocities : velocities + joints],
            self._finger_minus_knob,
        )
        return np.concatenate(parts, axis=1, dtype=np.float32)

    def _info(self) -> dict[str, Any]:
        door, knob = self._angles(self._state)
        info = {
            "door_angle": self.task.direction * door, "success": self._success.copy(), "knob_angle": knob.copy(),
            "max_knob_angle": self._max_knob.copy(), "freed": self._max_knob >= FREE,
        }  # fmt: skip
        return info | {f"_{name}": np.ones(self.num_envs, bool) for name in info}

    def _begin(self, i: int) -> None:
        """Starts an episode of environment i: picks a world, and places the robot at random."""
        rng = self._rngs[i]
        drawn = rng.integers(len(self.models))  # also with in_turn, so that the positions below are the same
        self._world[i] = self._next_world[i] % len(self.models) if self._in_turn else drawn
        self._next_world[i] += self.num_envs
        model, data = self.models[self._world[i]], self._datas[0]
        positions = np.zeros(self._nq)
        positions[:6] = rng.uniform(-0.3, 0.3, 6)
        positions[5] = rng.uniform(0, 3.13)
        sideways, up = rng.uniform(-0.05, 0.15) * self.task.side, rng.uniform(-0.15, 0.15)
        # As published: a turning knob varies only in height.
        positions[self._door + 1 : self._door + 3] = (0.0 if self.task.turns else sideways), up
        self._state[i] = 0
        self._positions(self._state[i])[:] = positions
        data.qpos[:] = positions
        mujoco.mj_kinematics(model, data)
        sensed = [data.site(model.sensor(k).objid[0]).xpos for k in range(model.nsensor)]
        self._finger_minus_knob[i] = self._offset(np.concatenate(sensed))
        self._steps[i], self._success[i], self._max_knob[i] = 0, False, 0

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Resets all environments, or those of options["reset_mask"] bool [N]; `seed` seeds them (not the worlds).

        Raises ValueError for a mask of another shape or dtype, or several seeds.
        """
        mask = np.asarray((options or {}).get("reset_mask", np.ones(self.num_envs, bool)))
        if (mask.shape, mask.dtype) != ((self.num_envs,), bool):
            raise ValueError(f"reset_mask {mask.dtype} {list(mask.shape)}: give bool [{self.num_envs}]")
        if seed is not None:
            if np.ndim(seed):
                raise ValueError(f"seed {seed}: give one for all, of which each environment makes its own")
            for i in np.flatnonzero(mask):
                self._rngs[i], self._next_world[i] = np.random.default_rng([seed, 1, i]), i
        for i in np.flatnonzero(mask):
            self._begin(i)
        return self._observe(), self._info()

    def step(self, actions: np.ndarray):
        """Steps all environments by `action_repeat` times 20 ms; rewards are float64 [N]."""
        actions = np.asarray(actions, np.float64)
        if actions.shape != self.action_space.shape:
            raise ValueError(f"actions of shape {actions.shape}: give {self.action_space.shape}")
        start = (self.action_repeat - 1) * FRAME_SKIP  # the MuJoCo step with which the rewarded 20 ms begin
        # MuJoCo would clip them too, but treats one beyond 1e10 as an error.
        controls = np.clip(actions, self.single_action_space.low, self.single_action_space.high)
        if self.robot == "gripper":  # one angle for four servos: right inner, right outer, left inner, left outer
            controls = np.concatenate([controls[:, :6], controls[:, 6:] * (1, -1, 1, -1)], axis=1)
        self._controls[:] = controls[:, None]
        self._pool.rollout(
            [self.models[w] for w in self._world], self._datas, self._state, self._controls,
            nstep=self._controls.shape[1], control_spec=mjtState.mjSTATE_CTRL.value, skip_checks=True,
            state=self._states, sensordata=self._sensors, chunk_size=max(1, self.num_envs // (8 * len(self._datas))),
        )  # fmt: skip

        before = self._states[:, start - 1] if start else self._state
        door, knob = self._angles(before)
        yaw, pitch = self._positions(before)[:, 3] - door, self._positions(before)[:, 4]
        costly = actions if self.robot == "hook" else actions[:, :-2]
        # A sensor's reading after a MuJoCo step is of the state before it.
        rewards = reward(self._offset(self._sensors[:, start]), pitch, yaw, door, knob, costly)

        self._state[:] = self._states[:, -1]
        self._finger_minus_knob[:] = self._offset(self._sensors[:, -1])
        self._steps += self.action_repeat
        self._success |= np.abs(self._angles(self._state)[0]) >= OPEN
        np.maximum(self._max_knob, np.abs(self._angles(self._states)[1]).max(axis=1), out=self._max_knob)
        truncated = self._steps >= self.max_episode_steps
        observations, info = self._observe(), self._info()
        if truncated.any() and self._autoreset:
            final = {"final_obs": observations, "_final_obs": truncated.copy(), "_final_info": truncated.copy()}
            final |= {"final_info": info | {name: truncated.copy() for name in info if name.startswith("_")}}
            observations, info = self.reset(options={"reset_mask": truncated})
            info |= final
        return observations, rewards, np.zeros(self.num_envs, bool), truncated, info

    def frame(self, i: int = 0) -> np.ndarray:
        """Renders environment i, whatever `render_mode` is: uint8 [height, width, 3].

        Raises RuntimeError after `close`, and if rendering is not possible.
        """
        if self.closed:
            raise RuntimeError("frame: these doors are closed")
        world, size = int(self._world[i]), self._picture
        if world not in self._renderers:
            if len(self._renderers) == 8:  # each holds a context of the graphics driver
                self._renderers.pop(next(iter(self._renderers))).close()
            try:
                self._renderers[world] = mujoco.Renderer(self.models[world], **size)
            except Exception as error:  # its type depends on the driver
                reason = str(error).splitlines()[0][:80] if str(error) else type(error).__name__
                raise RuntimeError(
                    f"no offscreen rendering with MUJOCO_GL={os.environ.get('MUJOCO_GL')} ({reason}): "
                    "install libegl1 or libosmesa6; set it to egl or osmesa, or import doorgym before mujoco"
                ) from error
        data = self._datas[0]
        data.qpos[:] = self._positions(self._state[i])
        mujoco.mj_forward(self.models[world], data)
        self._renderers[world].update_scene(data, "side")
        return self._renderers[world].render()

    def render(self) -> tuple[np.ndarray, ...] | None:
        """Renders all environments if render_mode is rgb_array."""
        return tuple(self.frame(i) for i in range(self.num_envs)) if self.render_mode else None

    def close_extras(self, **kwargs) -> None:
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers = {}
        self._pool.close()


class DoorEnv(gym.Env):
    """One door as a `gymnasium.Env`, without autoreset; without a seed its worlds and episodes are new each time.

    `gymnasium.make` passes max_episode_steps to its own wrapper, which counts actions: to set the vector environment's,
    make this class directly.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 50}  # noqa: RUF012

    def __init__(self, task: str, **options):
        options = {"seed": int(np.random.SeedSequence().generate_state(1)[0])} | options
        self._doors = DoorVectorEnv(task, 1, num_threads=1, autoreset=False, **options)
        self.observation_space = self._doors.single_observation_space
        self.action_space = self._doors.single_action_space
        self.render_mode = self._doors.render_mode
        self.metadata = self.metadata | {"render_fps": self._doors.metadata["render_fps"]}

    @staticmethod
    def _first(info: dict[str, Any]) -> dict[str, Any]:
        return {name: value[0] for name, value in info.items() if not name.startswith("_")}

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        observations, info = self._doors.reset(seed=seed)
        return observations[0], self._first(info)

    def step(self, action: np.ndarray):
        observations, rewards, _, truncated, info = self._doors.step(np.asarray(action)[None])
        return observations[0], float(rewards[0]), False, bool(truncated[0]), self._first(info)

    def render(self) -> np.ndarray | None:
        return self._doors.frame() if self.render_mode else None

    def close(self) -> None:
        self._doors.close()
