"""Do critics distinguish actions? Compares Q-values of actions with the same effect to those of different ones.

    python -m experiments.studies.action_values.measure RUN_DIRS --out action_values

Takes runs of apex_procgen.py and sac_procgen.py (the mean of its two Q-functions) with a checkpoint.
"""

from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import tyro

import evaluate
from common import envs, files, runs
from common.flags import PositiveInt, Seed
from experiments import records
from experiments.studies.constant_actions.play import ACTIONS

MEASURED = "run", "game", "step", "do the same", "spread among these", "spread among others", "liked anyway"


@dataclass(frozen=True)
class Args:
    run_dirs: tyro.conf.Positional[tuple[str, ...]]
    """run directories; the newest checkpoint of each is evaluated"""
    games: PositiveInt = 16
    """environments, on test levels"""
    steps: PositiveInt = 120
    """random steps in each; the network sees every third frame"""
    seed: Seed = 0
    """seed of the games and the random actions"""
    out: str = "action_values"
    """writes OUT.csv"""


def same_actions(game: envs.GameArgs, games: int, seed: int, before: int = 20, steps: int = 10) -> list[list[int]]:
    """Groups the 15 actions by the frames that follow when each is repeated after `before` random steps."""
    prefix = np.random.default_rng(seed).integers(0, len(ACTIONS), (before, games), np.int32)
    groups = {}
    for action in range(len(ACTIONS)):
        env = envs.make_procgen(game, games, seed, "test")
        env.reset()
        for actions in prefix:
            env.step(actions)
        seen = [env.step(np.full(games, action, np.int32))[0].tobytes() for _ in range(steps)]
        groups.setdefault(b"".join(seen), []).append(action)
        env.close()
    return list(groups.values())


def random_frames(args: envs.GameArgs, games: int, steps: int, seed: int) -> np.ndarray:
    """Stacked frames uint8 [games * steps // 3, 64, 64, C] of random play."""
    env, rng, seen = envs.make_procgen(args, games, seed, "test"), np.random.default_rng(seed), []

    def policy(frames, episode_step, key, hidden_state):
        seen.append(np.asarray(frames))
        return rng.integers(0, len(ACTIONS), games).astype(np.int32), None

    envs.play_episodes(
        env, policy, args.stack_offsets, episodes=games * steps, seed=seed, stop=lambda: len(seen) == steps
    )
    env.close()
    return np.concatenate(seen[2::3])


def q_values(script, args, run_dir: str, frames: np.ndarray) -> tuple[int, np.ndarray]:
    """The step of the newest checkpoint, and its values float32 [B, 15] of frames [B, 64, 64, C]."""
    agent = script.make_agent(args)
    tree = script.load_params(args, agent, run_dir)

    @jax.jit
    def values(frames):
        outputs = agent.apply(tree["params"], frames)
        return outputs[1].mean(axis=1) if script.SCRIPT == "sac_procgen" else script.mean_q(agent.support, outputs)

    parts = np.array_split(frames, max(len(frames) // 64, 1))
    return int(tree["global_step"]), np.concatenate([values(part) for part in parts])


def spreads(values: np.ndarray, groups: list[list[int]]) -> tuple[float, float, float]:
    """Standard deviations of values [B, 15] over actions, each action's mean over frames subtracted: within the largest
    group, and over one action of each group. Third, that of the means within the largest group."""
    means, same = values.mean(axis=0), max(groups, key=len)

    def spread(actions):
        return float(np.sqrt((values - means)[:, actions].var(axis=1, ddof=1).mean()))

    return spread(same), spread([group[0] for group in groups]), float(means[same].std(ddof=1))


def main(args: Args) -> None:
    runs.check(len(args.run_dirs) > 0, "RUN_DIRS: give at least one")
    files.make_room(Path(f"{args.out}.csv"), "--out")
    rows = []
    for run_dir in args.run_dirs:
        script, saved = evaluate.script_of(run_dir)
        runs.check(script.SCRIPT in ("apex_procgen", "sac_procgen"), f"RUN_DIR {run_dir}: is of {script.SCRIPT}.py")
        groups = same_actions(saved, args.games, args.seed)
        step, values = q_values(script, saved, run_dir, random_frames(saved, args.games, args.steps, args.seed))
        same = " ".join(ACTIONS[action].replace(" ", "-") for action in max(groups, key=len))
        measured = [f"{spread:.4f}" for spread in spreads(values, groups)]
        row = Path(run_dir).resolve().name, saved.env_id, step, same, *measured
        rows.append(dict(zip(MEASURED, row, strict=True)))
    evaluate.show("values of actions", rows)
    records.write_rows(Path(f"{args.out}.csv"), [row | records.origin() for row in rows])


if __name__ == "__main__":
    runs.cli(Args, main)
