"""DoorGym: flags for a sequence of tasks, and episodes of many parallel doors."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import numpy as np
import tyro
from annotated_types import Interval

import doorgym
from common.devices import available_cores
from common.files import FailedError, check
from common.flags import NonNegativeInt

# The tasks of Schoepf et al. 2022, by number.
TASKS = (
    "Pull-Right-Pull", "Pull-Left-Pull", "Lever-Right-Pull", "Lever-Left-Pull", "Lever-Right-Push", "Lever-Left-Push",
)  # fmt: skip
MAX_TASKS = len(TASKS)  # in a sequence
ACTION_REPEAT, DECISIONS = 4, 128  # an episode has 128 decisions of 80 ms: 10.24 seconds
MAX_DOORS = 20_000  # of a task; each is compiled


@dataclass(frozen=True)
class DoorArgs:
    """A sequence of DoorGym tasks, and evaluation."""

    # --resume refuses to change them; best.success depends on eval_episodes.
    FIXED: ClassVar = ("robot", "hardness", "num_worlds", "eval_episodes")
    env_id: ClassVar[str] = "DoorGym"

    tasks: Annotated[str, tyro.conf.arg(aliases=["--task"])] = "0,1,2,3,4,5"
    """tasks in order, by number or name (Round-Right-Pull); 0, 1: pull handles, 2, 3: levers to pull, 4, 5: to push"""
    robot: Literal["hook", "gripper"] = "hook"
    """a floating wrist with a hook or a gripper"""
    hardness: Literal["hard", "easy"] = "hard"
    """spring and damper of a lever or round knob; easy: ten times weaker"""
    num_worlds: Annotated[int, Interval(ge=1, le=MAX_DOORS)] = 512
    """number of random doors per task"""
    num_threads: Annotated[int, Interval(ge=0, le=4096)] = 0
    """simulation threads; 0 for one per core"""
    eval_every: NonNegativeInt = 81_920
    """decisions between evaluations within a task; 0 for only one at its end"""
    eval_episodes: Annotated[int, Interval(ge=1, le=MAX_DOORS)] = 100
    """episodes per evaluation, with mean actions, on the same doors throughout a task; the best parameters are kept"""

    def check(self) -> None:
        for task in task_names(self):
            able = self.robot == "gripper" or not task.startswith("Round")
            check(able, f"--tasks {self.tasks!r}: a hook cannot turn the round knob of {task}, give --robot gripper")


def task_names(args: DoorArgs) -> tuple[str, ...]:
    """The names of the tasks in `args.tasks`; raises UsageError."""
    names = []
    for word in args.tasks.split(","):
        word = word.strip()
        if word.isdecimal() and int(word) < len(TASKS):
            word = TASKS[int(word)]
        valid = f"give numbers from 0 to {len(TASKS) - 1}, or names such as {TASKS[2]}, with commas between"
        check(word in doorgym.TASKS, f"--tasks {args.tasks!r}: {valid}")
        check(word not in names, f"--tasks {args.tasks!r}: {word} is in it twice")
        names.append(word)
    check(len(names) <= MAX_TASKS, f"--tasks {args.tasks!r}: give at most {MAX_TASKS}")
    return tuple(names)


def make_doors(
    args: DoorArgs, task: str, num_envs: int, *, seed: int, num_worlds: int, in_turn: bool = False
) -> doorgym.DoorVectorEnv:
    """Makes `num_envs` doors of a task, with episodes of DECISIONS actions and no autoreset."""
    return doorgym.make_vec(
        task, num_envs, seed, args.num_threads or available_cores(),
        robot=args.robot, hardness=args.hardness, num_worlds=num_worlds, action_repeat=ACTION_REPEAT,
        max_episode_steps=ACTION_REPEAT * DECISIONS, autoreset=False, in_turn=in_turn,
    )  # fmt: skip


class Rollout(NamedTuple):
    """One episode of each of N doors."""

    obs: np.ndarray  # float32 [DECISIONS + 1, N, D]
    actions: np.ndarray  # float32 [DECISIONS, N, A]
    rewards: np.ndarray  # float32 [DECISIONS, N]


class Outcomes(NamedTuple):
    """Results of one episode of each of N doors."""

    returns: np.ndarray  # float32 [N]
    success: np.ndarray  # bool [N]: opened
    freed: np.ndarray  # bool [N]: the latch was free of the frame; False without a latch
    max_knob_angle: np.ndarray  # float [N]: largest absolute angle, radians

    def means(self, prefix: str) -> dict[str, np.floating]:
        """Means over the doors, by metric name."""
        names = {"success": "success_rate", "freed": "freed_rate", "max_knob_angle": "max_knob_angle"}
        return {prefix + name: getattr(self, field).mean() for field, name in names.items()}


def play(env: doorgym.DoorVectorEnv, policy: Callable, seed: int, film: list | None = None) -> tuple[Rollout, Outcomes]:
    """Plays one episode of each door, with actions [N, A] = policy(obs, t).

    Appends a frame of the first door to `film` before each decision. Raises FailedError if it cannot be rendered.
    """
    obs, _ = env.reset(seed=seed)
    seen, actions, rewards = [obs], [], []
    for t in range(DECISIONS):
        actions.append(np.asarray(policy(obs, t)))
        if film is not None:
            try:
                film.append(env.frame())
            except RuntimeError as error:
                raise FailedError(f"--video: {error}") from error
        obs, reward, _, _, info = env.step(actions[-1])
        rewards.append(reward)
        seen.append(obs)
    rollout = Rollout(np.stack(seen), np.stack(actions), np.stack(rewards).astype(np.float32))
    return rollout, Outcomes(rollout.rewards.sum(axis=0), info["success"], info["freed"], info["max_knob_angle"])


def evaluate(
    args: DoorArgs, policy: Callable, task: str, *, episodes: int, seed: int, film: list | None = None
) -> Outcomes:
    """Plays one episode in each of `episodes` different worlds, which `seed` determines."""
    with closing(make_doors(args, task, episodes, seed=seed, num_worlds=episodes, in_turn=True)) as env:
        return play(env, policy, seed, film)[1]
