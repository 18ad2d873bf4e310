"""Montezuma's Revenge on EnvPool: the game, room statistics, evaluation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
from annotated_types import Interval
from jax.sharding import Mesh

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
    """steps of each environment between restarts of all, which cut episodes; a resume replays the steps since then"""

    @property
    def stack_offsets(self) -> tuple[int, ...]:
        """How many steps back each frame of a stack lies, oldest first."""
        return envs.frame_stack_offsets(self.frame_stack, gap_stack=False)


def make_montezuma(args, num_envs: int, seed: int | list[int], **frames):
    """Makes `num_envs` copies of the game as one EnvPool: frames uint8 [N, 1, 84, 84], rewards float32 [N], 18 actions;
    info["ram"] is uint8 [N, 128]. Takes GameArgs and seeds as `envs.make_procgen`.

    A step is four of the emulator's frames, the observation the maximum of the last two. Actions are sticky at each of
    the emulator's frames (Machado et al. 2018, section 5). Losing a life does not end an episode. `frames` are
    EnvPool's gray_scale, img_height and img_width, which change the observation but not the game.
    """
    return envs.import_envpool().make(
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
    """Each environment's room int64 [N]: byte 3 of the console's RAM, clipped as it may hold anything for a moment."""
    return np.minimum(info["ram"][:, 3], NUM_ROOMS - 1).astype(np.int64)


# STATISTICS


class RoomStatistics:
    """Steps in each room, a picture of it, and the number of rooms per episode."""

    def __init__(self, num_envs: int):
        self.visits = np.zeros(NUM_ROOMS, np.int64)
        self.pictures = np.zeros((NUM_ROOMS, *FRAME_SHAPE[:2]), np.uint8)  # the newest frame of each room
        self._episode = np.zeros((num_envs, NUM_ROOMS), bool)  # the rooms of each unfinished episode
        self._most = np.int64(0)  # rooms in one episode
        self._recent = np.full(100, np.nan)  # rooms in each of the last episodes, oldest first

    def add(self, rooms: np.ndarray, timesteps: envs.Timesteps, pictures: dict[int, np.ndarray]) -> None:
        """Adds T timesteps, the rooms int [T, N] of their frames, and a frame uint8 [84, 84] of each of these rooms."""
        self.visits += np.bincount(rooms.reshape(-1), minlength=NUM_ROOMS)
        for room, picture in pictures.items():
            self.pictures[room] = picture
        is_last = timesteps.is_reset.copy()  # a junk step shows its episode's last frame
        is_last[-1] |= timesteps.episode_end[-1] & timesteps.forced_reset  # whose junk step never comes
        for current, last in zip(rooms, is_last, strict=True):
            self._episode[np.arange(len(current)), current] = True
            counts = self._episode.sum(axis=1)
            self._most = max(self._most, counts.max())
            self._recent = np.concatenate([self._recent, counts[last]])[-100:]
            self._episode[last] = False
        self._episode[timesteps.forced_reset] = False

    def visited(self) -> list[int]:
        return np.flatnonzero(self.visits).tolist()

    def metrics(self) -> dict[str, float]:
        """The number of rooms visited so far, the most in one episode, and the mean of the last 100 episodes."""
        recent = self._recent[~np.isnan(self._recent)]
        mean = {"charts/rooms_per_episode": float(recent.mean())} if len(recent) else {}
        return {"charts/rooms_visited": len(self.visited()), "charts/max_room_score": float(self._most)} | mean

    def save(self) -> dict[str, np.ndarray]:
        return {k.strip("_"): v for k, v in vars(self).items()}

    def restore(self, saved: dict[str, np.ndarray]) -> None:
        for name in vars(self):
            setattr(self, name, np.array(saved[name.strip("_")]))


class Statistics:
    """Statistics of a run's episodes: returns of the game's rewards and of the bonus, and rooms."""

    def __init__(self, num_envs: int):
        self.episodes = envs.EpisodeStatistics(num_envs)
        self.intrinsic = envs.EpisodeStatistics(num_envs)
        self.rooms = RoomStatistics(num_envs)

    def add(
        self, timesteps: envs.Timesteps, bonus: np.ndarray, rooms: np.ndarray, pictures: dict[int, np.ndarray]
    ) -> None:
        """Adds T timesteps and their bonuses float32 [T, N]; rooms and pictures as for `RoomStatistics.add`."""
        self.episodes.add(timesteps)
        self.intrinsic.add(timesteps._replace(rewards=bonus))
        self.rooms.add(rooms, timesteps, pictures)

    def metrics(self) -> dict[str, float]:
        """Means over the last 100 finished episodes (none before the first), and counts of rooms."""
        metrics = self.episodes.metrics() | self.rooms.metrics()
        intrinsic = self.intrinsic.metrics()
        if intrinsic:
            metrics["charts/episodic_intrinsic_return"] = intrinsic["charts/episodic_return"]
        return metrics

    def save(self) -> dict[str, dict[str, np.ndarray]]:
        return {name: statistics.save() for name, statistics in vars(self).items()}

    def restore(self, saved: dict[str, dict[str, np.ndarray]]) -> None:
        for name, statistics in vars(self).items():
            statistics.restore(saved[name])


def draw_rooms(visits: np.ndarray, pictures: np.ndarray) -> np.ndarray:
    """A map of the pyramid, uint8 [H, W, 3]: a picture of each visited room and its number of visits."""
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
    """An episode of an evaluation."""

    score: float  # its return, of raw rewards
    rooms: list[int]
    env: int
    first: int  # step of its first frame in that environment
    last: int  # step of its last frame


class _Recorder:
    """An EnvPool that records its actions, each frame's room, and whether a frame is its episode's last."""

    def __init__(self, env):
        self._env, self.actions = env, []

    def reset(self):
        obs, info = self._env.reset()
        self.rooms, self.is_last = [rooms_of(info)], [np.zeros(len(obs), bool)]
        return obs, info

    def step(self, actions: np.ndarray):
        obs, reward, terminated, truncated, info = self._env.step(actions)
        self.actions.append(np.array(actions))
        self.rooms.append(rooms_of(info))
        self.is_last.append(terminated | truncated)
        return obs, reward, terminated, truncated, info


random_policy = partial(envs.random_policy, num_actions=NUM_ACTIONS)


def evaluate(args, mesh: Mesh, policy: Callable, *, episodes: int, seed: int, record: bool = False):
    """`envs.play_episodes` on Montezuma's Revenge (`args`: GameArgs), in up to 32 environments.

    Returns a row (episode, score, steps, rooms) for each episode, the same number in each environment; a summary
    with the rooms of all; and, with `record`, the best episode's frames in colour, uint8 [T, 210, 160, 3].
    """
    num_envs = devices.round_to_devices(mesh, min(episodes, 32))
    env = make_montezuma(args, num_envs, seed)
    recorder = _Recorder(env)
    returns = envs.play_episodes(recorder, policy, args.stack_offsets, episodes=episodes, seed=seed).returns
    env.close()
    rooms, is_last = np.stack(recorder.rooms), np.stack(recorder.is_last)
    played = []
    for n, scores in enumerate(returns.reshape(num_envs, -1)):
        ends = np.flatnonzero(is_last[:, n])[: len(scores)]
        starts = [0, *(ends[:-1] + 1)]
        for score, start, end in zip(scores, starts, ends, strict=True):
            played.append(Episode(float(score), np.unique(rooms[start : end + 1, n]).tolist(), n, start, int(end)))
    rows = [
        {"episode": i, "score": episode.score, "steps": episode.last - episode.first, "rooms": episode.rooms}
        for i, episode in enumerate(played)
    ]
    summary = envs.summarize(np.array([episode.score for episode in played]))
    summary["rooms"] = sorted({room for episode in played for room in episode.rooms})
    best = max(played, key=lambda episode: (episode.score, len(episode.rooms)))
    film = replay(args, num_envs, seed, actions=recorder.actions, episode=best) if record else None
    return rows, summary, film


def replay(args, num_envs: int, seed: int, *, actions: Sequence[np.ndarray], episode: Episode) -> np.ndarray:
    """Replays recorded actions; returns an episode's frames in colour, uint8 [T, 210, 160, 3]."""
    env = make_montezuma(args, num_envs, seed, gray_scale=False, img_height=210, img_width=160)
    obs, film = env.reset()[0], []
    for t in range(episode.last + 1):
        if t:
            obs = env.step(actions[t - 1])[0]
        if t >= episode.first:
            film.append(obs[episode.env].copy())
    env.close()
    return np.stack(film).transpose(0, 2, 3, 1)
