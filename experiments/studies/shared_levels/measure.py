"""How many test levels look the same as a training level, and how many end at once?

    python -m experiments.studies.shared_levels.measure coinrun maze

Compares first frames, uint8 [3, 64, 64], of easy levels; then plays one random action in each test level.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from common import envs, runs
from common.flags import PositiveInt
from experiments import records

TABLE = Path(__file__).with_name("shared_levels.csv")
NUM_ENVS = 256


@dataclass(frozen=True)
class Args:
    games: tyro.conf.Positional[tuple[envs.Game, ...]]
    """games, such as coinrun; their rows replace those in shared_levels.csv"""
    num_levels: PositiveInt = 200
    """training levels; all are seen"""
    test_levels: PositiveInt = 10_000
    """random test levels, rounded up to a multiple of 256"""


def first_frames(args: envs.GameArgs, levels: str, seed: int) -> tuple[dict[int, bytes], int]:
    """The first frames of 256 levels by their seeds, and how many end after one random action."""
    env = envs.make_procgen(args, NUM_ENVS, seed, levels)
    obs, info = env.reset()
    frames = {int(level): frame.tobytes() for level, frame in zip(info["level_seed"], obs, strict=True)}
    terminated = env.step(np.random.default_rng(seed).integers(0, 15, NUM_ENVS, np.int32))[2]
    env.close()
    return frames, int(terminated.sum())


def main(args: Args) -> None:
    for game in args.games:
        game_args = envs.GameArgs(env_id=game, num_levels=args.num_levels)
        train, test, ended, seed = {}, {}, 0, 0
        while len(train) < args.num_levels:
            train |= first_frames(game_args, "train", seed)[0]
            seed += 1
        for i in range(-(-args.test_levels // NUM_ENVS)):
            frames, terminated = first_frames(game_args, "test", i)
            test |= frames
            ended += terminated
        known = set(train.values())
        same = sum(frame in known for frame in test.values())
        row = {"game": game, "training_levels": len(train), "different_first_frames": len(known)}
        row |= {"test_levels": len(test), "shared": f"{same / len(test):.4f}"}
        row |= {"ended_after_one_step": f"{ended / (i + 1) / NUM_ENVS:.4f}"} | records.origin()
        records.add_rows(TABLE, [row], ("game",))
        print(", ".join(f"{key} {value}" for key, value in list(row.items())[:6]), flush=True)


if __name__ == "__main__":
    runs.cli(Args, main)
