"""The actor threads, with arithmetic in the games' place."""

import threading
import time
import traceback
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common.actors import ActorError, Fleet
from common.envs import EnvSnapshot


class Count:
    """Stands for games: counts the steps played."""

    def __init__(self, number):
        self.number, self.played, self.closed = number, 0, False

    def snapshot(self):
        return EnvSnapshot(self.number, [np.zeros(2, np.uint8)] * self.played, self.played)

    def restore(self, saved, run):
        self.number, self.played = int(saved["seed"]), len(saved.get("actions", ()))

    def close(self):
        self.closed = True


def run_of(stop=lambda: None):
    class Run:
        path = "there"
        said: list = []  # noqa: RUF012
        stop = property(lambda self: stop())

        def print(self, sentence):
            self.said.append(sentence)

        def resume_hint(self):
            return "no checkpoint was written yet"

    return Run()


NEVER = run_of()


def running():
    return [thread for thread in threading.enumerate() if thread.name.startswith("actor")]


def make(collect, num_actors=2, max_lag=1, deterministic=False, env_state=None):
    how = {"max_lag": max_lag, "deterministic": deterministic, "param_shardings": [jax.devices()[0]] * num_actors}
    return Fleet(collect, [Count(actor) for actor in range(num_actors)], [env_state] * num_actors, **how)


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


def queues(fleet):
    return {len(queue) for queue in fleet._ready}


def echo(vec_env, params, env_state, *, i, watch, check_stop):
    """An unroll is who made it, its number, what the parameters were; the env_state counts."""
    check_stop()
    vec_env.played += 3
    for part in ("inference", "game"):
        with watch(part):
            pass
    return (vec_env.number, i, int(params), int(env_state)), env_state + 1


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_unrolls_at_any_lag_come_in_order_and_wait_in_bounded_queues(max_lag, deterministic):
    with make(echo, 3, max_lag, deterministic, env_state=jnp.int32(0)) as fleet:
        fleet.start(0, jnp.int32(0))
        for version in range(12):
            if version < 9:  # the learner is slow at first
                wait_until(lambda: queues(fleet) == {max_lag + 1})
            played = [vec_env.played for vec_env in fleet._vec_envs]
            assert max(played) <= 3 * (version + max_lag + 1)  # a full queue holds its actor back
            items = fleet.get(NEVER, None)
            assert [item.unroll[:2] for item in items] == [(actor, version) for actor in range(3)]
            assert [item.unroll[3] for item in items] == [version] * 3
            assert [item.env_state for item in items] == [version + 1] * 3
            assert [item.snapshot.steps for item in items] == [3 * (version + 1)] * 3
            for item in items:
                assert item.unroll[2] == 10 * item.version
                lag = version - item.version
                assert lag == min(max_lag, version) if deterministic else 0 <= lag <= max_lag
            charts = fleet.metrics(version, items)
            assert charts["charts/queue_size"] == max_lag + 1 or version >= 9
            assert charts["charts/policy_lag"] == version - np.mean([item.version for item in items])
            fleet.publish(version + 1, jnp.int32(10 * (version + 1)))
        published = sorted(map(int, fleet.save()["published"]))
        assert published == list(range(12 - max_lag if deterministic else 12, 13))
    assert all(vec_env.closed for vec_env in fleet._vec_envs)


def test_parameters_that_the_learner_donates_stay_with_the_actors():
    """The learner donates its own, which deletes them."""
    state = jnp.ones(3)

    def collect(vec_env, params, env_state, *, i, watch, check_stop):
        return params + 0, env_state

    with make(collect, 1) as fleet:
        fleet.publish(1, state)
        jax.jit(lambda x: x + 1, donate_argnums=0)(state).block_until_ready()
        assert state.is_deleted()
        fleet.start(1, None)
        assert fleet.get(NEVER, None)[0].unroll.tolist() == [1, 1, 1]


def test_an_exception_in_an_actor_reaches_the_learner_and_ends_every_thread():
    saved = []

    def collect(vec_env, params, env_state, *, i, watch, check_stop):
        if vec_env.number == 1 and i == 1:
            raise ZeroDivisionError("the game broke")
        return i, env_state

    with make(collect, 3) as fleet:
        fleet.start(0, jnp.int32(0))
        wait_until(lambda: len(running()) == 2)
        with pytest.raises(ActorError, match="actor 1") as error:
            fleet.get(NEVER, lambda: saved.append(True))
        assert saved
        assert "an actor failed" in NEVER.said[-1]
        assert isinstance(error.value.__cause__, ZeroDivisionError)
        where = traceback.extract_tb(error.value.__cause__.__traceback__)
        assert "collect" in [frame.name for frame in where]
    assert not running()


def test_a_second_ctrl_c_while_games_hang_does_not_wait_for_them():
    """One may hang."""
    release = threading.Event()

    def collect(vec_env, params, env_state, *, i, watch, check_stop):
        release.wait(10)
        return i, env_state

    def interrupt():
        with make(collect) as fleet:
            fleet.start(0, jnp.int32(0))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert len(running()) == 2
    release.set()
    wait_until(lambda: not running())


def test_get_while_games_hang_ends_when_the_run_stops():
    release, asked = threading.Event(), []

    def collect(vec_env, params, env_state, *, i, watch, check_stop):
        while not release.wait(0.01):  # a game that hangs until it is told to stop
            check_stop()
        return i, env_state

    with make(collect) as fleet:
        fleet.start(0, jnp.int32(0))
        assert fleet.get(run_of(lambda: asked.append(1) or len(asked) > 2), None) is None
        assert queues(fleet) == {0}
    assert not running()


@pytest.mark.parametrize("max_lag", [0, 2])
def test_a_checkpoint_while_actors_are_ahead_continues_as_if_nothing_had_happened(max_lag):
    """Saved while the actors are ahead, and gone on with by another fleet: as if nothing had happened."""
    with make(echo, 2, max_lag, deterministic=True, env_state=jnp.int32(0)) as fleet:
        fleet.start(0, jnp.int32(0))
        for version in range(4):
            fleet.get(NEVER, None)
            fleet.publish(version + 1, jnp.int32(version + 1))
        wait_until(lambda: queues(fleet) == {max_lag + 1})
        saved = jax.device_get(fleet.save())
        assert [len(saved_env["actions"]) for saved_env in saved["snapshots"].values()] == [12, 12]
        want = [item.unroll for item in fleet.get(NEVER, None)]
    with make(echo, 2, max_lag, deterministic=True, env_state=jnp.int32(0)) as fleet:
        fleet.restore(saved, jax.ShapeDtypeStruct((), jnp.int32), SimpleNamespace(path="there"))
        assert [vec_env.played for vec_env in fleet._vec_envs] == [12, 12]
        fleet.start(4, None)
        assert [item.unroll for item in fleet.get(NEVER, None)] == want == [(a, 4, 4 - max_lag, 4) for a in range(2)]
