"""Montezuma's Revenge on EnvPool: the game, the rooms of its pyramid, and episodes played for an evaluation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
from annotated_types import Interval

from common import devices, envs

ENV_ID = "MontezumaRevenge-v5"
NUM_ACTIONS = 18
FRAME_SHAPE = (84, 84, 1)  # as the networks see it; EnvPool's own frames are (1, 84, 84)
FLOORS = (range(3), range(3, 8), range(8, 15), range(15, 24))  # the pyramid's rooms; play starts in 1
NUM_ROOMS = 24


@dataclass(frozen=True)
class GameArgs:
    """Montezuma's Revenge and its observations."""

    FIXED: ClassVar = ("sticky_actions", "max_episode_steps", "restart_every")

    env_id: ClassVar[str] = ENV_ID

    sticky_actions: Annotated[float, Interval(ge=0, le=0.99)] = 0.25
    """probability, at each emulator frame, of repeating the previous action (repeat_action_probability)"""
    max_episode_steps: Annotated[int, Interval(ge=2, le=10**6)] = 4500
    """time limit of an episode in steps of four frames, after which it is truncated"""
    frame_stack: Annotated[int, Interval(ge=1, le=64)] = 4
    """number of stacked frames for the policy; RND sees only the newest"""
    restart_every: Annotated[int, Interval(ge=1, le=10**6)] = 65_536
    """steps of each environment between restarts of all games, which drop unfinished episodes; a resume replays the
    steps since the last restart"""

    @property
    def offsets(self) -> tuple[int, ...]:
        """How many steps back each frame of a stack lies, oldest first."""
        return envs.stack_offsets(self.frame_stack, gap_stack=False)


def make_montezuma(args, num_envs: int, seed: int | list[int], **frames):
    """Makes `num_envs` copies of the game as one EnvPool (Gymnasium API, C++ threads).

    A step is four of the emulator's frames, the observation the maximum of the last two. Actions are sticky at each of
    the emulator's frames (Machado et al. 2018, section 5). A life lost is no episode's end.

    Args:
      args: sticky_actions, and max_episode_steps in steps of the agent.
      seed: 0 to runs.MAX_SEED, or one for each game; with the same actions it gives the same frames and rewards.
      frames: EnvPool's gray_scale, img_height and img_width, if not grey 84 x 84; they change no game.

    Returns an EnvPool: frames uint8 [N, 1, 84, 84], rewards float32 [N], 18 actions; info["ram"] is uint8 [N, 128].
    """
    envpool = envs.import_envpool()

    return envpool.make(
        ENV_ID,
        env_type="gymnasium",
        num_envs=num_envs,
        seed=seed,
        repeat_action_probability=args.sticky_actions,
        max_episode_steps=args.max_episode_steps,
        stack_num=1,
        frame_skip=4,
        noop_max=1,
        use_fire_reset=False,
        episodic_life=False,
        reward_clip=False,
        **frames,
    )


def rooms_of(info: dict) -> np.ndarray:
    """The room int64 [N] that each game is in: byte 3 of the console's memory, which may hold anything for a moment."""
    return np.minimum(info["ram"][:, 3], NUM_ROOMS - 1).astype(np.int64)


# WHAT TRAINING SEES OF IT


class Rooms:
    """Which rooms the games have been in, for how many steps, and what they look like."""

    def __init__(self, num_envs: int):
        self.visits = np.zeros(NUM_ROOMS, np.int64)
        self.pictures = np.zeros((NUM_ROOMS, *FRAME_SHAPE[:2]), np.uint8)  # a frame of each room, the newest
        self._episode = np.zeros((num_envs, NUM_ROOMS), bool)  # where each unfinished episode has been
        self._most = np.int64(0)  # rooms in one episode
        self._recent = np.full(100, np.nan)  # rooms in each of the last episodes, oldest first

    def add(self, rooms: np.ndarray, steps: envs.Steps, pictures: dict[int, np.ndarray]) -> None:
        """Takes the rooms int [T, N] of the frames of T steps, what else these steps say, and a frame uint8 [84, 84] of
        each room."""
        self.visits += np.bincount(rooms.reshape(-1), minlength=NUM_ROOMS)
        for room, picture in pictures.items():
            self.pictures[room] = picture
        over = steps.done.copy()
        over[-1] |= steps.ended[-1] & steps.restarts  # EnvPool's junk step, by which it would be seen, never comes
        for now, last in zip(rooms, over, strict=True):
            self._episode[np.arange(len(now)), now] = True
            counts = self._episode.sum(axis=1)
            self._most = max(self._most, counts.max())
            self._recent = np.concatenate([self._recent, counts[last]])[-100:]
            self._episode[last] = False
        self._episode[steps.restarts] = False

    def visited(self) -> list[int]:
        return np.flatnonzero(self.visits).tolist()

    def metrics(self) -> dict[str, float]:
        """Rooms that any game has visited, the most that one episode has, and the mean of the last 100 episodes."""
        recent = self._recent[~np.isnan(self._recent)]
        mean = {"charts/rooms_per_episode": float(recent.mean())} if len(recent) else {}
        return {"charts/rooms_visited": len(self.visited()), "charts/max_room_score": float(self._most)} | mean

    def save(self) -> dict[str, np.ndarray]:
        return {k.strip("_"): v for k, v in vars(self).items()}

    def restore(self, saved: dict[str, np.ndarray]) -> None:
        for name in vars(self):
            setattr(self, name, np.array(saved[name.strip("_")]))


class Statistics:
    """What a run says of its episodes: their returns in the game's rewards and in the bonus, and their rooms."""

    def __init__(self, num_envs: int):
        self.episodes = envs.EpisodeStatistics(num_envs)
        self.intrinsic = envs.EpisodeStatistics(num_envs)
        self.rooms = Rooms(num_envs)

    def add(self, steps: envs.Steps, bonus: np.ndarray, rooms: np.ndarray, pictures: dict[int, np.ndarray]) -> None:
        """Takes T steps, their bonuses float32 [T, N], and what `Rooms.add` wants of them."""
        self.episodes.add(steps)
        self.intrinsic.add(steps._replace(rewards=bonus))
        self.rooms.add(rooms, steps, pictures)

    def metrics(self) -> dict[str, float]:
        charts = self.episodes.metrics() | self.rooms.metrics()
        intrinsic = self.intrinsic.metrics()
        if intrinsic:
            charts["charts/episodic_intrinsic_return"] = intrinsic["charts/episodic_return"]
        return charts

    def save(self) -> dict[str, dict[str, np.ndarray]]:
        return {name: part.save() for name, part in vars(self).items()}

    def restore(self, saved: dict[str, dict[str, np.ndarray]]) -> None:
        for name, part in vars(self).items():
            part.restore(saved[name])


def draw_rooms(visits: np.ndarray, pictures: np.ndarray) -> np.ndarray:
    """The pyramid uint8 [H, W, 3]: a frame of each room that was visited, with the number of frames seen there."""
    from PIL import Image, ImageDraw, ImageFont  # late: only for the picture

    size, line, gap = 2 * FRAME_SHAPE[0], 22, 6
    width, height = (size + gap) * len(FLOORS[-1]) + gap, (size + line + gap) * len(FLOORS) + gap
    image = Image.new("RGB", (width, height), (24, 24, 28))
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(15)
    for i, floor in enumerate(FLOORS):
        for j, room in enumerate(floor):
            x = gap + (size + gap) * (j + (len(FLOORS[-1]) - len(floor)) // 2)
            y = gap + (size + line + gap) * i
            if visits[room]:
                image.paste(Image.fromarray(pictures[room]).resize((size, size), Image.Resampling.NEAREST), (x, y))
            else:
                draw.rectangle((x, y, x + size - 1, y + size - 1), fill=(44, 44, 50))
            color = (255, 214, 102) if visits[room] else (120, 120, 128)
            text = f"{room}: {visits[room]:,}" if visits[room] else f"{room}"
            draw.text((x + 2, y + size + 1), text, fill=color, font=font)
    return np.asarray(image)


# EVALUATION


class Episode(NamedTuple):
    """An episode that was played: game `env` from its `first` to its `last` frame."""

    score: float  # raw rewards
    rooms: list[int]
    env: int
    first: int
    last: int


class _Recorder:
    """An EnvPool that remembers the actions, and of every frame the rooms and whether it is an episode's last."""

    def __init__(self, env):
        self._env, self.actions = env, []

    def reset(self):
        obs, info = self._env.reset()
        self.rooms, self.last = [rooms_of(info)], [np.zeros(len(obs), bool)]
        return obs, info

    def step(self, actions: np.ndarray):
        obs, reward, terminated, truncated, info = self._env.step(actions)
        self.actions.append(np.array(actions))
        self.rooms.append(rooms_of(info))
        self.last.append(terminated | truncated)
        return obs, reward, terminated, truncated, info


random_policy = partial(envs.random_policy, actions=NUM_ACTIONS)


def play(args, policy: Callable, *, episodes: int, seed: int, record: bool = False):
    """`envs.play_episodes` on Montezuma's Revenge (`args`: as above, and frame_stack), up to 32 games side by side.

    Returns `episodes` of Episode (rounded up to a multiple of the games) and, with `record`, the best one's frames in
    colour, uint8 [T, 210, 160, 3].
    """
    num_envs = devices.multiple(args, min(episodes, 32))
    env = make_montezuma(args, num_envs, seed)
    log = _Recorder(env)
    scores, *_ = envs.play_episodes(log, policy, args.offsets, episodes=episodes, seed=seed)
    env.close()
    rooms, last = np.stack(log.rooms), np.stack(log.last)
    played = []
    for n, own in enumerate(scores.reshape(num_envs, -1)):
        ends = np.flatnonzero(last[:, n])[: len(own)]
        starts = [0, *(ends[:-1] + 1)]
        for score, start, end in zip(own, starts, ends, strict=True):
            played.append(Episode(float(score), np.unique(rooms[start : end + 1, n]).tolist(), n, start, int(end)))
    best = max(played, key=lambda episode: (episode.score, len(episode.rooms)))
    return played, replay(args, num_envs, seed, actions=log.actions, episode=best) if record else None


def evaluate(args, policy: Callable, *, episodes: int, seed: int, record: bool = False):
    """Plays episodes: a row for each (score, steps, rooms), a summary with all their rooms, and the best one's film."""
    played, film = play(args, policy, episodes=episodes, seed=seed, record=record)
    rows = [
        {"episode": i, "score": episode.score, "steps": episode.last - episode.first, "rooms": episode.rooms}
        for i, episode in enumerate(played)
    ]
    summary = envs.summarize(np.array([episode.score for episode in played]))
    return rows, summary | {"rooms": sorted({room for episode in played for room in episode.rooms})}, film


def replay(args, num_envs: int, seed: int, *, actions: Sequence[np.ndarray], episode: Episode) -> np.ndarray:
    """Plays the same games again, which the same actions make the same, and returns one episode's frames in colour."""
    env = make_montezuma(args, num_envs, seed, gray_scale=False, img_height=210, img_width=160)
    obs, film = env.reset()[0], []
    for t in range(episode.last + 1):
        if t:
            obs = env.step(actions[t - 1])[0]
        if t >= episode.first:
            film.append(obs[episode.env].copy())
    env.close()
    return np.stack(film).transpose(0, 2, 3, 1)
