"""What do constant-action policies score? Plays each action at every step, and random actions.

    python -m experiments.studies.constant_actions.play bigfish coinrun

The best of several means is biased upwards, so the best action is played again in four times as many other levels.
Random play, which many pages cite, gets 16 episodes in each environment.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from common import envs, runs
from common.flags import PositiveInt, Seed
from experiments import records

# Procgen's 15 actions. The last six are keys of some games, and do nothing in the others.
ACTIONS = ("left down", "left", "left up", "down", "none", "up", "right down", "right", "right up", *"DAWSQE")


@dataclass(frozen=True)
class Args:
    games: tyro.conf.Positional[tuple[envs.Game, ...]]
    """games, such as bigfish"""
    episodes: PositiveInt = 64
    """episodes per action, each in an environment of its own, all levels, easy; random play has 16 in each"""
    seed: Seed = 0
    """seed of the games and the random actions; the best action is played again with the next seed"""
    csv: str = str(Path(__file__).with_name("constant_actions.csv"))
    """table to write; rows of other games are kept"""


def play(game: str, action: int | None, name: str, *, episodes: int, num_envs: int, seed: int) -> dict:
    """A row of the table: raw returns of a constant action, or of random ones."""

    def constant(frames, episode_step, key, hidden_state):
        return np.full(len(frames), action), None

    env = envs.make_procgen(envs.GameArgs(env_id=game), num_envs, seed)
    policy = envs.random_policy if action is None else constant
    played = envs.play_episodes(env, policy, (0,), episodes=episodes, seed=seed)
    env.close()
    stats = envs.summarize(played.returns)
    row = {"game": game, "action": name, "mean": f"{stats['mean_return']:.3f}"}
    row |= {"error": f"{stats['standard_error']:.3f}", "min": f"{stats['min']:g}", "max": f"{stats['max']:g}"}
    return row | {"episodes": stats["episodes"]}


def main(args: Args) -> None:
    for game in args.games:
        how = {"episodes": args.episodes, "num_envs": args.episodes, "seed": args.seed}
        rows = [play(game, i, name, **how) for i, name in enumerate(ACTIONS)]
        best = max(range(len(rows)), key=lambda i: float(rows[i]["mean"]))
        name = f"{ACTIONS[best]}, played anew"
        again = {"episodes": 4 * args.episodes, "num_envs": 4 * args.episodes, "seed": args.seed + 1}
        rows.append(play(game, best, name, **again))
        rows.append(play(game, None, "random", **how | {"episodes": 16 * args.episodes}))
        print(f"{game}: {name} {rows[-2]['mean']} ({rows[-2]['error']}), random {rows[-1]['mean']}", flush=True)
        records.add_rows(Path(args.csv), [row | records.origin() for row in rows], ("game",))


if __name__ == "__main__":
    runs.cli(Args, main)
