"""Actor threads: each plays its own games and hands the learner one unroll after the other.

An actor's i-th unroll is learnt from in update i, together with the i-th of every other actor, so what the learner
sees does not depend on which thread was faster. Parameters have a version, the number of updates that made them.
Unroll i is played with the newest parameters, and waits for version i - max_lag where the learner is not so far yet:
that bounds the policy's lag and the queue, as no more than max_lag + 1 unrolls of an actor can wait. In
lock-step it is played with exactly version i - max_lag.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from common.runs import Stopwatch


class ActorError(RuntimeError):
    """An actor's thread raised: its exception is the cause."""


class Stopped(Exception):
    """Ends an actor's thread; raised by `check` in the midst of an unroll."""


@jax.jit
def _copy(tree):
    return jax.tree.map(jnp.copy, tree)


class Item(NamedTuple):
    """What an actor hands over."""

    unroll: Any  # what `collect` returned
    carry: Any  # what the actor needs to go on after it
    version: int  # of the parameters it was played with
    shares: dict[str, float]  # of the actor's time


class Actors:
    """The threads, from `start` to `stop`; both can be called again and again. `with` stops them at its end.

    Args:
      collect: collect(actor, i, params, carry, watch, check) -> (unroll, carry), called in the actor's thread for its
        i-th unroll. It calls check() at every step of the games, and times its parts with `watch`.
      devices: where each actor's parameters lie: a device, or a sharding.
      max_lag: see above.
      lockstep: see above.
    """

    def __init__(
        self, collect: Callable, devices: Sequence[jax.Device | jax.sharding.Sharding], max_lag: int, lockstep: bool
    ):
        self._collect, self._devices, self._max_lag, self._lockstep = collect, devices, max_lag, lockstep
        self._changed = threading.Condition()  # guards all that follows
        self._ready = [deque() for _ in devices]
        self._published: dict[int, dict[jax.Device, Any]] = {}
        self._error: tuple[int, BaseException] | None = None
        self._stopping, self._threads = True, []

    def __enter__(self) -> "Actors":
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is KeyboardInterrupt:  # asked twice: do not wait for the games, the threads end with the process
            self._stopping = True
        else:
            self.stop()

    def start(self, i: int, carries: Sequence[Any]) -> None:
        """Starts a thread for each actor, from its i-th unroll and its carry on."""
        self._stopping = False
        for actor, carry in enumerate(carries):
            thread = threading.Thread(target=self._run, args=(actor, i, carry), name=f"actor {actor}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Ends and joins every thread, within a step of its games; unrolls that were not taken are dropped."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._threads = []
        for queue in self._ready:
            queue.clear()

    def publish(self, version: int, params: Any) -> None:
        """Gives the actors new parameters: a copy on the device, since the learner donates its own."""
        copy = _copy(params)
        copies = {device: jax.device_put(copy, device) for device in set(self._devices)}
        with self._changed:
            self._published[version] = copies
            for old in [v for v in self._published if v < version - (self._max_lag if self._lockstep else 0)]:
                del self._published[old]
            self._changed.notify_all()

    def published(self) -> dict[int, Any]:
        """Parameters by version: the newest, and in lock-step the last max_lag + 1."""
        return {version: copies[self._devices[0]] for version, copies in self._published.items()}

    @property
    def queue_size(self) -> float:
        """Unrolls that wait, a mean over the actors; 0 where the learner is starved."""
        return sum(map(len, self._ready)) / len(self._ready)

    def take(self, stop: Callable[[], Any]) -> list[Item] | None:
        """Waits for every actor's next unroll; None if `stop()` says yes before. Raises ActorError."""
        with self._changed:
            while True:
                self.check()
                if all(self._ready):
                    return [queue.popleft() for queue in self._ready]
                if stop():
                    return None
                self._changed.wait(0.2)

    def check(self) -> None:
        """Raises ActorError if an actor's thread has raised."""
        if self._error:
            actor, error = self._error
            raise ActorError(f"actor {actor} failed") from error

    def _run(self, actor: int, i: int, carry: Any) -> None:
        watch = Stopwatch()
        try:
            while True:
                with watch("blocked"):
                    version, params = self._parameters(actor, i)
                unroll, carry = self._collect(actor, i, params, carry, watch, self._check)
                with self._changed:
                    self._check()
                    self._ready[actor].append(Item(unroll, carry, version, watch.fractions()))
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
                self._check()
                self._changed.wait()
            self._check()
            version = oldest if self._lockstep else max(self._published)
            return version, self._published[version][self._devices[actor]]

    def _check(self) -> None:
        if self._stopping:
            raise Stopped
