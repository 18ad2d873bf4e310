"""What a policy makes that never looks: one action at every step, each of them, and random ones. Try:

    python -m experiments.constant_actions bigfish coinrun --out experiments/results/constant_actions

On some games the best of them makes several times what random play does. An agent that makes no more may have learnt no
more; `eval/*/commonest_action` of an evaluation says how near it is to that. The best of several means is too high, so
the best action is played anew, in four times as many other games.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from annotated_types import Interval

from benchmarks import records
from common import envs, files, runs
from common.flags import MAX_SEED

# Of Procgen's 15 actions; the last six are keys of games that have them, and stand still in the others.
ACTIONS = ("left down", "left", "left up", "down", "none", "up", "right down", "right", "right up", *"DAWSQE")

ANEW, RANDOM = "played anew", "random"
MEASURED = "game", "action", "mean", "error", "min", "max", "episodes"


@dataclass(frozen=True)
class Args:
    games: tyro.conf.Positional[tuple[str, ...]]
    """games, such as bigfish"""
    episodes: Annotated[int, Interval(ge=2, le=10**4)] = 64
    """episodes of each action, on all levels of each game's easy form, one in each of as many games"""
    seed: Annotated[int, Interval(ge=0, le=MAX_SEED - 1)] = 0
    """of the games and the random actions; where the best action is played anew, one more"""
    out: str = "constant_actions"
    """where to write: OUT.csv, after each game; what it has of other games stays"""


def play(game: str, action: int | None, name: str, *, episodes: int, seed: int) -> dict:
    """A row of the table: raw returns of an action at every step, or of random ones."""

    def constant(frames, age, key, memory):
        return np.full(len(frames), action), None

    env = envs.make_levels(envs.GameArgs(env_id=game), episodes, seed)
    policy = envs.random_policy if action is None else constant
    returns, *_ = envs.play_episodes(env, policy, (0,), episodes=episodes, seed=seed)
    env.close()
    said = envs.summarize(returns)
    numbers = f"{said['mean_return']:.3f}", f"{said['standard_error']:.3f}", f"{said['min']:g}", f"{said['max']:g}"
    return dict(zip(MEASURED, (game, name, *numbers, said["episodes"]), strict=True))


def main(args: Args) -> list[dict]:
    """Returns the rows of the table."""
    runs.check(len(args.games) > 0, "GAMES: give at least one, such as bigfish")
    for game in args.games:
        envs.check_game(game, "GAMES")
    path, origin = Path(f"{args.out}.csv"), records.origin()
    files.make_room(path, "--out")
    there = records.read_rows(path)
    same = not there or list(there[0]) == [*MEASURED, *origin]
    runs.check(same, f"--out {args.out}: {path} is another table, give another name")
    rows = []
    for game in args.games:
        how = {"episodes": args.episodes, "seed": args.seed}
        found = [play(game, i, name, **how) for i, name in enumerate(ACTIONS)]
        best = max(range(len(found)), key=lambda i: float(found[i]["mean"]))
        anew = play(game, best, f"{ACTIONS[best]}, {ANEW}", episodes=4 * args.episodes, seed=args.seed + 1)
        random = play(game, None, RANDOM, **how)
        print(f"{game}: {anew['action']} {anew['mean']} ({anew['error']}), random {random['mean']}", flush=True)
        new = [row | origin for row in (*found, anew, random)]
        records.add_rows(path, new, ("game",))
        rows += new
    return rows


if __name__ == "__main__":
    runs.cli(Args, main)
