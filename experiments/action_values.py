"""Whether a Q-network tells actions apart, or gives them values that differ by chance. Try:

    python -m experiments.action_values RUN_DIRS --out action_values

Several of Procgen's 15 actions do the same in a game. Which is found out: copies of a game play the same random actions
and then one of the 15 for some steps, and where the frames are the same, so are the actions. What a network says of
these differs by its error alone: where it differs by no more among actions that do something else, the best action is
the best by chance. An action that is liked by as much on every frame does not count in these two numbers: nobody has to
look for that. A third has what such likings differ by, among actions that do the same. Runs of apex_procgen.py and of
sac_procgen.py (the mean of its two Q-functions).
"""

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated

import jax
import numpy as np
import tyro
from annotated_types import Interval

import evaluate
from benchmarks import records
from common import checkpoints, envs, files, runs
from common.flags import Seed
from experiments.constant_actions import ACTIONS

MEASURED = "run", "game", "step", "do the same", "spread among these", "spread among others", "liked anyway"


@dataclass(frozen=True)
class Args:
    run_dirs: tyro.conf.Positional[tuple[str, ...]]
    """run directories; of each the newest checkpoint is asked"""
    games: Annotated[int, Interval(ge=1, le=1024)] = 16
    """games that are played, of the test levels"""
    steps: Annotated[int, Interval(ge=3, le=10**4)] = 120
    """random steps of each; the network is asked about every third frame"""
    seed: Seed = 0
    """of the games and the random actions"""
    out: str = "action_values"
    """where to write: OUT.csv"""


def same_actions(game: envs.GameArgs, games: int, seed: int, before: int = 20, steps: int = 10) -> list[list[int]]:
    """The actions 0 to 14 in groups: those of one do the same after `before` random steps, in all games."""
    prefix = np.random.default_rng(seed).integers(0, len(ACTIONS), (before, games), np.int32)
    groups = {}
    for action in range(len(ACTIONS)):
        env = envs.make_levels(game, games, seed, "test")
        env.reset()
        for actions in prefix:
            env.step(actions)
        seen = [env.step(np.full(games, action, np.int32))[0].tobytes() for _ in range(steps)]
        groups.setdefault(b"".join(seen), []).append(action)
        env.close()
    return list(groups.values())


def random_frames(args: envs.GameArgs, games: int, steps: int, seed: int) -> np.ndarray:
    """Stacked frames uint8 [games * steps // 3, 64, 64, C] of random play."""
    env, rng, seen = envs.make_levels(args, games, seed, "test"), np.random.default_rng(seed), []

    def policy(frames, age, key, memory):
        seen.append(np.asarray(frames))
        return rng.integers(0, len(ACTIONS), games).astype(np.int32), None

    envs.play_episodes(env, policy, args.offsets, episodes=games * steps, seed=seed, stop=lambda: len(seen) == steps)
    env.close()
    return np.concatenate(seen[2::3])


def q_values(script: ModuleType, args: envs.GameArgs, run_dir: str, frames: np.ndarray) -> tuple[int, np.ndarray]:
    """The step of a run's newest checkpoint, and what that says of frames [B, 64, 64, C]: values float32 [B, 15]."""
    agent = script.make_agent(args)
    tree = script.trained(args, agent, run_dir)
    params = tree["params"]

    @jax.jit
    def values(frames):
        outputs = agent.apply(params, frames)
        if script.SCRIPT == "sac_procgen":
            return outputs[1].mean(axis=1)
        return script.mean_value(agent.support, outputs)

    parts = np.array_split(frames, max(len(frames) // 64, 1))
    return int(tree["global_step"]), np.concatenate([values(part) for part in parts])


def spreads(values: np.ndarray, groups: list[list[int]]) -> tuple[float, float, float]:
    """The standard deviation of values [B, 15], less each action's mean over frames, among actions of the largest group
    and among one of each group: roots of the variances' means over frames. Then that of the means of the largest
    group."""
    means = values.mean(axis=0)
    values = values - means
    same = max(groups, key=len)

    def spread(actions):
        return float(np.sqrt(values[:, actions].var(axis=1, ddof=1).mean()))

    return spread(same), spread([group[0] for group in groups]), float(means[same].std(ddof=1))


def main(args: Args) -> list[dict]:
    """Returns the rows of the table."""
    runs.check(len(args.run_dirs) > 0, "RUN_DIRS: give at least one")
    files.make_room(Path(f"{args.out}.csv"), "--out")
    chosen = [evaluate.script_of(run_dir) for run_dir in args.run_dirs]  # all of them before the first is played
    for run_dir, (script, _) in zip(args.run_dirs, chosen, strict=True):
        name = script.SCRIPT
        known = name in ("apex_procgen", "sac_procgen")
        runs.check(known, f"RUN_DIR {run_dir}: is of {name}.py, give runs of apex_procgen.py or sac_procgen.py")
        runs.check(checkpoints.steps_in(run_dir), f"RUN_DIR {run_dir}: has no complete checkpoint yet")
    rows = []
    for run_dir, (script, saved) in zip(args.run_dirs, chosen, strict=True):
        groups = same_actions(saved, args.games, args.seed)
        step, values = q_values(script, saved, run_dir, random_frames(saved, args.games, args.steps, args.seed))
        measured = [f"{spread:.4f}" for spread in spreads(values, groups)]
        same = " ".join(ACTIONS[action].replace(" ", "-") for action in max(groups, key=len))
        row = Path(run_dir).resolve().name, saved.env_id, step, same, *measured
        rows.append(dict(zip(MEASURED, row, strict=True)))
    evaluate.show("values of actions", rows, {})
    origin = records.origin()
    records.write_rows(Path(f"{args.out}.csv"), [row | origin for row in rows])
    return rows


if __name__ == "__main__":
    runs.cli(Args, main)
