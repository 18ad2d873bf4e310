"""How long a GPU lets those wait who share it: a model of its one queue, in which programs run in the order in which
they were asked for. Nothing is measured: the times are given, for instance those that benchmarks/gpu_plan.py models.

    python -m benchmarks.queue_model --act-ms 0.19 --update-ms 85 --game-ms 0.3 --steps 128
    python -m benchmarks.queue_model --act-ms 0.12 --update-ms 33 --game-ms 0.2 --steps 200 --actors 2

What it leaves out: that a program's launches overlap with the one before, that games share the host's cores with each
other, and Python's lock. Acting for half the games takes as long as for all: its launches do.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from annotated_types import Interval
from rich import box
from rich.console import Console
from rich.table import Table

from common import runs
from common.flags import NonNegativeFloat


@dataclass(frozen=True)
class Args:
    act_ms: NonNegativeFloat = 0.19
    """the GPU's time of one look at the policy"""
    update_ms: NonNegativeFloat = 85.0
    """the GPU's time of an update"""
    game_ms: NonNegativeFloat = 0.3
    """the host's time of one step of all games, with frames to the GPU and actions back"""
    steps: Annotated[int, Interval(ge=1, le=10_000)] = 128
    """of each game in a rollout"""
    actors: Annotated[int, Interval(ge=1, le=10_000)] = 1
    """threads that play beside a learner, each its own games, a step of which takes game_ms"""
    pieces: Annotated[int, Interval(ge=1, le=10_000)] = 24
    """parts of an update that is given to the GPU piece by piece, each after the one before: its minibatches"""
    rounds: Annotated[int, Interval(ge=1, le=10_000)] = 20
    """rollouts to play"""


class Gpu(NamedTuple):
    """Occupies the GPU for so many ms, once all that was asked for before is done."""

    ms: float


class Host(NamedTuple):
    """Takes so many ms of the host, beside everything else."""

    ms: float


Wait = Callable[[], bool]  # until this holds
Thread = Iterator[Gpu | Host | Wait]


def simulate(threads: list[Thread]) -> float:
    """Runs threads to their ends: ms until the last one is there."""
    now, free, waiting = 0.0, 0.0, []
    ready = [(0.0, i) for i in range(len(threads))]  # when each goes on; a heap
    while ready:
        now, i = heapq.heappop(ready)
        wish = next(threads[i], None)
        if isinstance(wish, Gpu):
            free = max(now, free) + wish.ms
            heapq.heappush(ready, (free, i))
        elif isinstance(wish, Host):
            heapq.heappush(ready, (now + wish.ms, i))
        elif wish is not None:
            waiting.append((wish, i))
        for one in [one for one in waiting if one[0]()]:
            waiting.remove(one)
            heapq.heappush(ready, (now, one[1]))
    return now


def play(args: Args, share: float, done: list[int], learnt: list[int], lag: int) -> Thread:
    """Rollouts of a share of the games; done[0] counts them, and learnt[0] is how many updates there were."""
    for i in range(args.rounds):
        yield lambda i=i: learnt[0] >= i - lag
        for _ in range(args.steps):
            yield Gpu(args.act_ms)
            yield Host(share * args.game_ms)
        done[0] += 1


def learn(args: Args, players: int, pieces: int, done: list[int], learnt: list[int]) -> Thread:
    """An update for each rollout of all players."""
    for i in range(args.rounds):
        yield lambda i=i: done[0] >= players * (i + 1)
        for _ in range(pieces):
            yield Gpu(args.update_ms / pieces)
        learnt[0] += 1


def per_round(args: Args, *, players: int, share: float, lag: int, pieces: int = 1) -> float:
    """ms a round with so many players, who may be `lag` updates ahead of the learner."""
    done, learnt = [0], [0]
    threads = [play(args, share, done, learnt, lag) for _ in range(players)]
    return simulate([*threads, learn(args, players, pieces, done, learnt)]) / args.rounds


def ways(args: Args) -> dict[str, float]:
    """ms a round of each way to share the GPU; a round has the same steps in all of them."""
    together = {"players": args.actors, "share": 1.0}
    return {
        "take turns": per_round(args, **together, lag=0),
        "take turns, two halves of the games alternate": per_round(args, players=2 * args.actors, share=0.5, lag=0),
        "games go on, an update is one program": per_round(args, **together, lag=1),
        f"games go on, an update is {args.pieces} pieces": per_round(args, **together, lag=1, pieces=args.pieces),
    }


def main(args: Args) -> None:
    results = ways(args)
    first = next(iter(results.values()))
    table = Table("is", "way", "ms a rollout", "speed", box=box.SIMPLE)
    for way, ms in results.items():
        table.add_row("model", way, f"{ms:.4g}", f"{first / ms:.2f} x" if ms else "")
    Console(width=100).print(table)


if __name__ == "__main__":
    runs.cli(Args, main)
