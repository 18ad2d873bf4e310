"""Draws every transform of common/augment.py on frames of three games.

python -m experiments.studies.augmentations.draw
"""

from functools import partial
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np

import ppo_procgen as ppo
from common import augment, envs, runs

GAMES, STEPS, SEED = ("bigfish", "coinrun", "fruitbot"), 40, 1


def play(env_id: str) -> np.ndarray:
    """A frame uint8 [64, 64, 3] after STEPS random steps."""
    args = ppo.Args(env_id=env_id, seed=SEED)
    vec_env = envs.ReplayableVecEnv(partial(envs.make_procgen, args), [0], SEED, args.restart_every)
    rng = np.random.default_rng(SEED)

    def random_actions(obs, episode_step):
        return rng.integers(0, envs.NUM_ACTIONS, 1).astype(np.int32)

    vec_env.play(random_actions, STEPS, runs.Stopwatch())
    vec_env.close()
    return vec_env.obs[0].transpose(1, 2, 0)


def main() -> None:
    frames = np.stack([play(env_id) for env_id in GAMES])
    keys = jax.random.split(jax.random.PRNGKey(SEED), len(frames))
    columns = {"frame": frames}
    columns |= {name: augment.augment(augment.AugmentArgs(name, 1.0), keys, frames) for name in augment.TRANSFORMS}
    size = 1.2 * len(columns), 1.25 * len(frames) + 0.2
    figure, axes = plt.subplots(len(frames), len(columns), figsize=size, squeeze=False, dpi=100)
    for (name, images), column in zip(columns.items(), axes.T, strict=True):
        column[0].set_title(name.replace("random_convolution", "random_conv."), fontsize=8)
        for image, axis in zip(images, column, strict=True):
            axis.set_axis_off()
            axis.imshow(image, interpolation="nearest")
    figure.tight_layout(pad=0.2)
    figure.savefig(Path(__file__).with_name("augmentations.png"), dpi=100)


if __name__ == "__main__":
    main()
