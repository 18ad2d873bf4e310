"""A fleet of actor threads: each plays its own environments and hands the learner one unroll after the other.

The learner's iteration i takes the i-th unroll of every actor, whichever thread was faster. The version of parameters
is the number of iterations that made them. Unroll i is played with the newest parameters, once version i - max_lag is
published (with `deterministic`: with exactly that version). This bounds the policy lag, and the queue to max_lag + 1
unrolls per actor.

A checkpoint does not disturb the actors: each unroll brings what its actor needs to continue after it.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Interval

from common import checkpoints, devices, envs, files, runs
from common.envs import EnvSnapshot, ReplayableVecEnv
from common.files import check
from common.flags import NonNegativeInt, Size


@dataclass(frozen=True)
class ActorArgs:
    """Actor threads and their devices."""

    FIXED: ClassVar = ("num_actors",)  # --resume refuses to change it: a checkpoint has each actor's environments

    num_actors: Annotated[int, Interval(ge=1, le=256)] = 2
    """actor threads of each host, each with an equal part of its environments"""
    actor_devices: NonNegativeInt = 0
    """number of devices, the last ones of this host, for actors alone; 0 to share the learner's"""

    def check(self) -> None:
        given = f"--num-envs {self.num_envs} --num-actors {self.num_actors}"
        check(self.num_envs % self.num_actors == 0, f"{given}: the actors must divide the environments evenly")
        each = f"--actor-devices {self.actor_devices}: give at most --num-actors, {self.num_actors}; each uses one"
        check(self.actor_devices <= self.num_actors, each)


@dataclass(frozen=True)
class FleetArgs(ActorArgs):
    """Environments of actor threads, and policy lag."""

    FIXED: ClassVar = ("num_envs",)  # in addition to num_actors

    num_envs: Size = 32
    """number of parallel environments, over all actors and hosts"""
    max_lag: Annotated[int, Interval(ge=0, le=64)] = 1
    """most iterations (one unroll of every actor each) that an acting policy may lag; 0 to play and learn in turns"""
    deterministic: bool = False
    """play with policies exactly max_lag iterations old: same seed, same metrics but charts/queue_size and timings"""


class ActorError(RuntimeError):
    """An actor's thread raised: its exception is the cause."""


class Stopped(Exception):
    """Ends an actor's thread, between unrolls or, by `check_stop`, within one."""


@jax.jit
def _copy(tree):
    return jax.tree.map(jnp.copy, tree)


class Unroll(NamedTuple):
    """Steps that an actor has played."""

    rollout: Any  # the script's, on the actor's device
    timesteps: envs.Timesteps


class ActorBatch(NamedTuple):
    """An actor's unroll and all that is needed to continue after it."""

    unroll: Any  # Unroll, or what else `collect` returned
    env_state: Any
    snapshot: EnvSnapshot  # of its environments
    version: int  # of the parameters it was played with
    time_fractions: dict[str, float]  # of the actor's time


class Fleet:
    """Actors with their threads and environments. Leaving its `with` block ends them.

    Args:
      collect: collect(vec_env, params, env_state, i=, watch=, check_stop=) -> (unroll, env_state) plays an actor's i-th
        unroll in its thread. It calls check_stop() at every step and times "inference" and "game" with `watch`, as
        vec_env.play does.
      vec_envs, env_states: each actor's environments and their first state.
      param_shardings: the device or sharding of each actor's parameters.
      env_state_shardings: of its environment state; by default those of the parameters.
      max_lag, deterministic: see above.
    """

    def __init__(
        self,
        collect: Callable,
        vec_envs: Sequence[ReplayableVecEnv],
        env_states: Sequence[Any],
        *,
        param_shardings: Sequence[jax.Device | jax.sharding.Sharding],
        env_state_shardings: Sequence[Any] = (),
        max_lag: int,
        deterministic: bool,
    ):
        self._collect, self._vec_envs, self._env_states = collect, vec_envs, list(env_states)
        self._param_shardings = param_shardings
        self._env_state_shardings = env_state_shardings or param_shardings
        self._max_lag, self._deterministic = max_lag, deterministic
        self._snapshots = [vec_env.snapshot() for vec_env in vec_envs]
        self._changed = threading.Condition()  # held to change _ready, _published and _error
        self._ready = [deque() for _ in vec_envs]
        self._published: dict[int, dict[Any, Any]] = {}
        self._error: tuple[int, BaseException] | None = None
        self._stopping, self._threads, self._queued = True, [], 0.0

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is KeyboardInterrupt:  # a second Ctrl-C: do not wait, the threads end with the process
            self._stopping = True
            return
        self.stop()
        for vec_env in self._vec_envs:
            vec_env.close()

    def start(self, version: int, params: Any) -> None:
        """Starts the actors at unroll number `version`, with these parameters or, after `restore`, those restored."""
        if not self._published:
            self.publish(version, params)
        self._stopping = False
        for actor, sharding in enumerate(self._env_state_shardings):
            env_state = jax.device_put(self._env_states[actor], sharding)
            given = actor, version, env_state
            thread = threading.Thread(target=self._run, args=given, name=f"actor {actor}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Ends and joins every thread, within a step of its environments; unrolls that wait are dropped."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads = []
        for queue in self._ready:
            queue.clear()

    def publish(self, version: int, params: Any) -> None:
        """Gives the actors new parameters: a copy, since the learner donates its own."""
        copy = _copy(params)
        copies = {sharding: jax.device_put(copy, sharding) for sharding in set(self._param_shardings)}
        with self._changed:
            self._published[version] = copies
            for old in [v for v in self._published if v < version - (self._max_lag if self._deterministic else 0)]:
                del self._published[old]
            self._changed.notify_all()

    def get(self, run: runs.Run, save: Callable[[], None]) -> list[ActorBatch] | None:
        """Waits for every actor's next unroll; returns None if `run.stop` is set before. If an actor has failed, calls
        `save`, on a single host, and raises ActorError."""
        with self._changed:
            self._queued = sum(map(len, self._ready)) / len(self._ready)
            while not (self._error or run.stop or all(self._ready)):
                self._changed.wait(0.2)  # a signal sets run.stop without notifying
            batches = [queue.popleft() for queue in self._ready] if all(self._ready) and not self._error else None
        if self._error:
            if jax.process_count() == 1:  # other hosts would have to save too, and do not know
                try:
                    save()
                    run.print(f"an actor failed; {run.resume_hint()}")
                except Exception as error:
                    run.print(f"an actor failed, and no checkpoint could be written ({files.first_line(error)})")
            self.check()
        if batches:
            self._env_states = [batch.env_state for batch in batches]
            self._snapshots = [batch.snapshot for batch in batches]
        return batches

    def metrics(self, version: int, batches: Sequence[ActorBatch]) -> dict[str, float]:
        """Means over the actors: unrolls queued when the learner asked (0: it had to wait), the lag of their parameters
        behind the learner's `version` in iterations, and fractions of the actors' time."""
        charts = {"charts/queue_size": self._queued}
        charts["charts/policy_lag"] = version - sum(batch.version for batch in batches) / len(batches)
        for part in ("inference", "game", "blocked"):
            fractions = [batch.time_fractions[f"time/{part}"] for batch in batches]
            charts[f"time/actor_{part}"] = sum(fractions) / len(batches)
        return charts

    def save(self) -> dict[str, Any]:
        """For a checkpoint: environment states and snapshots after the unrolls that the learner got last, and the
        published parameters (if deterministic, the last max_lag + 1 versions)."""
        with self._changed:
            published = {str(version): copies[self._param_shardings[0]] for version, copies in self._published.items()}
        return {
            "env_states": {str(actor): env_state for actor, env_state in enumerate(self._env_states)},
            "snapshots": {str(actor): snapshot.save() for actor, snapshot in enumerate(self._snapshots)},
            "published": published,
        }

    def restore(self, saved: dict[str, Any], params: Any, run: runs.Run) -> None:
        """Restores what `save` returned, before `start`; `params` have the shapes of those published."""
        env_states = {str(actor): env_state for actor, env_state in enumerate(self._env_states)}
        env_states = checkpoints.restore_tree(env_states, saved["env_states"], str(run.path))
        published = dict.fromkeys(saved["published"], params)
        published = checkpoints.restore_tree(published, saved["published"], str(run.path))
        for actor, vec_env in enumerate(self._vec_envs):
            vec_env.restore(saved["snapshots"][str(actor)], run)
            self._env_states[actor] = env_states[str(actor)]
            self._snapshots[actor] = vec_env.snapshot()
        for version, params in published.items():
            self.publish(int(version), params)

    def check(self) -> None:
        """Raises ActorError if an actor's thread has raised."""
        if self._error:
            actor, error = self._error
            raise ActorError(f"actor {actor} failed") from error

    def _run(self, actor: int, i: int, env_state: Any) -> None:
        watch, vec_env = runs.Stopwatch(), self._vec_envs[actor]
        try:
            while True:
                with watch("blocked"):
                    version, params = self._parameters(actor, i)
                unroll, env_state = self._collect(
                    vec_env, params, env_state, i=i, watch=watch, check_stop=self._check_stop
                )
                batch = ActorBatch(unroll, env_state, vec_env.snapshot(), version, watch.fractions())
                with self._changed:
                    self._check_stop()
                    self._ready[actor].append(batch)
                    self._changed.notify_all()
                i += 1
        except Stopped:
            pass
        except BaseException as error:
            with self._changed:
                self._error = self._error or (actor, error)
                self._changed.notify_all()

    def _parameters(self, actor: int, i: int) -> tuple[int, Any]:
        """Waits for the parameters of unroll i; returns their version and the parameters."""
        with self._changed:
            needed = max(i - self._max_lag, min(self._published))  # a run's first unrolls have no version that old
            while max(self._published) < needed:
                self._check_stop()
                self._changed.wait()
            self._check_stop()
            version = needed if self._deterministic else max(self._published)
            return version, self._published[version][self._param_shardings[actor]]

    def _check_stop(self) -> None:
        if self._stopping:
            raise Stopped


def make_fleet(args: Any, collect: Callable, init_env_state: Callable) -> Fleet:
    """The actors of a Procgen script, each with its part of this host's environments (`args`: FleetArgs, GameArgs).

    Args:
      collect: as Fleet takes it.
      init_env_state: init_env_state(env_ids int32 [n]) -> the first state of these environments.
    """
    env_ids = devices.local_env_ids(args).reshape(args.num_actors, -1)
    return Fleet(
        collect,
        [envs.make_train_envs(args, ids) for ids in env_ids],
        [init_env_state(ids) for ids in env_ids],
        param_shardings=devices.actor_devices(args),
        max_lag=args.max_lag,
        deterministic=args.deterministic,
    )
