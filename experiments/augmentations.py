"""Draws every augmentation of common/augment.py.

On frames of real games, a row each:

    python -m experiments.augmentations --out experiments/results/augmentations.png
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import jax
import numpy as np
from annotated_types import Interval

import ppo_procgen as ppo
from common import augment, envs, runs
from experiments import plot


@dataclass(frozen=True)
class Args:
    out: str = "augmentations.png"
    """the picture: OUT.png"""
    env_ids: str = "bigfish,coinrun,fruitbot"
    """games, one a row"""
    steps: Annotated[int, Interval(ge=0, le=1_000_000)] = 40
    """random steps before the frame"""
    seed: int = 1
    """of games and transforms"""


def play(env_id: str, args: Args) -> np.ndarray:
    """A frame uint8 [64, 64, 3]."""
    of = ppo.Args(env_id=env_id, seed=args.seed)
    runs.check_args(of, ppo.SCRIPT)
    games = envs.Games(partial(envs.make_levels, of), [0], args.seed, of.restart_every)
    rng = np.random.default_rng(args.seed)
    games.play(lambda obs, age: rng.integers(0, envs.NUM_ACTIONS, 1).astype(np.int32), args.steps, runs.Stopwatch())
    games.close()
    return games.obs[0].transpose(1, 2, 0)


def main(args: Args) -> None:
    plot.check_out(args.out)
    frames = np.stack([play(env_id, args) for env_id in args.env_ids.split(",")])
    keys = jax.random.split(jax.random.PRNGKey(args.seed), len(frames))
    columns = {"frame": frames}
    for name in augment.TRANSFORMS:
        columns[name] = augment.augment(augment.AugmentArgs(name, 1.0), keys, frames)
    figure, axes = plot.plt.subplots(
        len(frames), len(columns), figsize=(1.2 * len(columns), 1.25 * len(frames) + 0.2), squeeze=False, dpi=100
    )
    for axis in axes.flat:
        axis.set_axis_off()
    for (name, images), column in zip(columns.items(), axes.T, strict=True):
        column[0].set_title(name.replace("random_convolution", "random_conv."), fontsize=8)
        for image, axis in zip(images, column, strict=True):
            axis.imshow(image, interpolation="nearest")
    figure.tight_layout(pad=0.2)
    plot.write_whole(args.out, ".png", lambda temporary: figure.savefig(temporary, format="png", dpi=100))


if __name__ == "__main__":
    runs.cli(Args, main)
