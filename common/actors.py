"""A fleet of actor threads: each plays its own games and hands the learner one unroll after the other.

An actor's i-th unroll is learnt from in iteration i, together with the i-th of every other actor, so what the learner
sees does not depend on which thread was faster. Parameters have a version, the number of iterations that made them.
Unroll i is played with the newest parameters, and waits for version i - max_lag where the learner is not so far yet:
that bounds the policy's lag and the queue, as no more than max_lag + 1 unrolls of an actor can wait. In
lock-step it is played with exactly version i - max_lag.

The learner's loop takes unrolls, updates, publishes and logs. A checkpoint does not disturb the actors: it is of the
moment after the unrolls that were taken last, each of which brought what its actor needs to go on from there.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Interval

from common import checkpoints, devices, envs, runs
from common.envs import Games, Mark
from common.files import check
from common.flags import NonNegativeInt, Size


@dataclass(frozen=True)
class ActorArgs:
    """The actors' devices."""

    actor_devices: NonNegativeInt = 0
    """number of devices, the last ones of this host, for actors alone; 0 to share the learner's"""


@dataclass(frozen=True)
class FleetArgs(ActorArgs):
    """Actor threads and policy lag."""

    FIXED: ClassVar = ("num_envs", "num_actors")  # each has games of its own

    num_actors: Annotated[int, Interval(ge=1, le=256)] = 2
    """number of actor threads, which share the environments"""
    num_envs: Size = 32
    """number of parallel environments, over all actors"""
    max_lag: Annotated[int, Interval(ge=0, le=64)] = 1
    """maximum policy lag of an unroll in learner iterations; 0 for actors and learner in turns"""
    deterministic: bool = False
    """play each unroll with a policy exactly max_lag iterations old, so that the same seed gives the same metrics (bit
    for bit on a CPU); without it the threads' timing decides how old (not at --max-lag 0)"""

    def check(self) -> None:
        """Raises UsageError for inconsistent flags."""
        what = f"--num-actors {self.num_actors}: must divide the number of games, {self.num_envs}"
        check(self.num_envs % self.num_actors == 0, what)
        each = f"--actor-devices {self.actor_devices}: give at most --num-actors, {self.num_actors}; each uses one"
        check(self.actor_devices <= self.num_actors, each)


class ActorError(RuntimeError):
    """An actor's thread raised: its exception is the cause."""


class Stopped(Exception):
    """Ends an actor's thread; raised by `check_stop` in the midst of an unroll."""


@jax.jit
def _copy(tree):
    return jax.tree.map(jnp.copy, tree)


class Item(NamedTuple):
    """What an actor hands over."""

    unroll: Any  # what `collect` returned; its `steps` are envs.Steps
    carry: Any  # what the actor needs to go on after it
    games: Mark  # where its games were after it
    version: int  # of the parameters it was played with
    shares: dict[str, float]  # of the actor's time


class Unroll(NamedTuple):
    """What an actor has played."""

    rollout: Any  # what the script keeps of it on a device
    steps: envs.Steps


class Fleet:
    """The actors, their threads and their games. `with` ends them.

    Args:
      collect: collect(games, params, carry, i=, watch=, check_stop=) -> (unroll, carry), called in an actor's thread
        for its i-th unroll. It calls check_stop() at every step of the games, and times its parts with `watch`.
      games: of each actor.
      carries: what each actor begins with.
      homes: where each actor's parameters lie, as jax.device_put takes it.
      carry_homes: where its carry lies; with the parameters if not given.
      max_lag, lockstep: see above.
    """

    def __init__(
        self,
        collect: Callable,
        games: Sequence[Games],
        carries: Sequence[Any],
        *,
        homes: Sequence[jax.Device | jax.sharding.Sharding],
        carry_homes: Sequence[Any] = (),
        max_lag: int,
        lockstep: bool,
    ):
        self._collect, self._games, self._max_lag, self._lockstep = collect, games, max_lag, lockstep
        self._homes, self._carry_homes, self._carries = homes, carry_homes or homes, list(carries)
        self._marks = [one.mark() for one in games]
        self._changed = threading.Condition()  # guards all that follows
        self._ready = [deque() for _ in games]
        self._published: dict[int, dict[jax.Device, Any]] = {}
        self._error: tuple[int, BaseException] | None = None
        self._stopping, self._threads, self._waiting = True, [], 0.0

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is KeyboardInterrupt:  # asked twice: do not wait for the games, the threads end with the process
            self._stopping = True
            return
        self.stop()
        for one in self._games:
            one.close()

    def start(self, version: int, params: Any) -> None:
        """Starts a thread for each actor, from its unroll number `version` on, with these parameters; after `restore`,
        with those that were published then."""
        if not self._published:
            self.publish(version, params)
        self._stopping = False
        for actor, home in enumerate(self._carry_homes):
            carry = jax.device_put(self._carries[actor], home)
            thread = threading.Thread(
                target=self._run, args=(actor, version, carry), name=f"actor {actor}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Ends and joins every thread, within a step of its games; unrolls that were not taken are dropped."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads = []
        for queue in self._ready:
            queue.clear()

    def publish(self, version: int, params: Any) -> None:
        """Gives the actors new parameters: a copy on the device, since the learner donates its own."""
        copy = _copy(params)
        copies = {home: jax.device_put(copy, home) for home in set(self._homes)}
        with self._changed:
            self._published[version] = copies
            for old in [v for v in self._published if v < version - (self._max_lag if self._lockstep else 0)]:
                del self._published[old]
            self._changed.notify_all()

    def take(self, run: runs.Run, save: Callable[[], None]) -> list[Item] | None:
        """Waits for every actor's next unroll; None if `run.stop` says so before. If an actor has failed, calls `save`,
        on a single host, and raises ActorError."""
        with self._changed:
            self._waiting = sum(map(len, self._ready)) / len(self._ready)
            while not (self._error or run.stop or all(self._ready)):
                self._changed.wait(0.2)
            items = [queue.popleft() for queue in self._ready] if all(self._ready) and not self._error else None
        if self._error:
            if jax.process_count() == 1:  # other hosts would have to save too, and do not know
                save()
            run.say(f"an actor failed; the last checkpoint is in {run.path}, to continue with --resume")
            self.check()
        if items:
            self._carries = [item.carry for item in items]
            self._marks = [item.games for item in items]
        return items

    def metrics(self, version: int, items: Sequence[Item]) -> dict[str, float]:
        """Charts of the unrolls that were taken: how many waited when the learner came (a mean over the actors; 0: it
        is starved), by how many of the learner's iterations their parameters were older than its `version`, and the
        actors' time."""

        def mean(numbers):
            return sum(numbers) / len(items)

        charts = {"charts/queue_size": self._waiting}
        charts["charts/policy_lag"] = version - mean(item.version for item in items)
        for part in ("inference", "game", "blocked"):
            charts[f"time/actor_{part}"] = mean(item.shares[f"time/{part}"] for item in items)
        return charts

    def save(self) -> dict[str, Any]:
        """For a checkpoint: the actors' carries and games after the unrolls taken last, and the parameters published:
        the newest, and in lock-step the last max_lag + 1."""
        with self._changed:
            published = {str(version): copies[self._homes[0]] for version, copies in self._published.items()}
        return {
            "carries": {str(actor): carry for actor, carry in enumerate(self._carries)},
            "games": {str(actor): mark.save() for actor, mark in enumerate(self._marks)},
            "published": published,
        }

    def restore(self, saved: dict[str, Any], params: Any, run: runs.Run) -> None:
        """Goes back to a checkpoint, before `start`; `params` have the shapes of those published."""
        template = {
            "carries": {str(actor): carry for actor, carry in enumerate(self._carries)},
            "published": dict.fromkeys(saved["published"], params),
        }
        parts = {name: checkpoints.restore_tree(some, saved[name], str(run.path)) for name, some in template.items()}
        for actor, games in enumerate(self._games):
            games.restore(saved["games"][str(actor)], run)
            self._carries[actor] = parts["carries"][str(actor)]
            self._marks[actor] = games.mark()
        for version, published in parts["published"].items():
            self.publish(int(version), published)

    def check(self) -> None:
        """Raises ActorError if an actor's thread has raised."""
        if self._error:
            actor, error = self._error
            raise ActorError(f"actor {actor} failed") from error

    def _run(self, actor: int, i: int, carry: Any) -> None:
        watch, games = runs.Stopwatch(), self._games[actor]
        try:
            while True:
                with watch("blocked"):
                    version, params = self._parameters(actor, i)
                unroll, carry = self._collect(games, params, carry, i=i, watch=watch, check_stop=self._check_stop)
                item = Item(unroll, carry, games.mark(), version, watch.fractions())
                with self._changed:
                    self._check_stop()
                    self._ready[actor].append(item)
                    self._changed.notify_all()
                i += 1
        except Stopped:
            pass
        except BaseException as error:
            with self._changed:
                self._error = self._error or (actor, error)
                self._changed.notify_all()

    def _parameters(self, actor: int, i: int) -> tuple[int, Any]:
        """Waits for the parameters of unroll i; returns their version and themselves."""
        with self._changed:
            oldest = max(i - self._max_lag, min(self._published))
            while max(self._published) < oldest:
                self._check_stop()
                self._changed.wait()
            self._check_stop()
            version = oldest if self._lockstep else max(self._published)
            return version, self._published[version][self._homes[actor]]

    def _check_stop(self) -> None:
        if self._stopping:
            raise Stopped


def make_fleet(args: Any, collect: Callable, initial_carry: Callable) -> Fleet:
    """The actors of a Procgen script, each with its part of this host's games (`args`: FleetArgs, GameArgs).

    Args:
      collect: as Fleet takes it.
      initial_carry: initial_carry(numbers int32 [n]) -> what an actor of these games begins with.
    """
    numbers, seed = devices.games_of_host(args).reshape(args.num_actors, -1), envs.derive_seed(args.seed, 0)
    return Fleet(
        collect,
        [Games(partial(envs.make_levels, args), own, seed, args.restart_every) for own in numbers],
        [initial_carry(own) for own in numbers],
        homes=devices.of_actors(args, args.num_actors),
        max_lag=args.max_lag,
        lockstep=args.deterministic,
    )
