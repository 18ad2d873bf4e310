"""The actor threads, with arithmetic in the games' place."""

import threading
import time
import traceback

import jax
import jax.numpy as jnp
import pytest

from common.actors import ActorError, Actors


def never():
    return False


def running():
    return [thread for thread in threading.enumerate() if thread.name.startswith("actor")]


def make(collect, num_actors=2, max_lag=1, lockstep=False):
    actors = Actors(collect, [jax.devices()[0]] * num_actors, max_lag, lockstep)
    actors.publish(0, jnp.int32(0))
    return actors


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


def echo(actor, i, params, carry, watch, check):
    """An unroll is who made it, its number, what the parameters were; the carry counts."""
    check()
    return (actor, i, int(params), carry), carry + 1


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_lag_and_queue_are_bounded_and_unrolls_in_order(max_lag, lockstep):
    with make(echo, 3, max_lag, lockstep) as actors:
        actors.start(0, [0, 100, 200])
        for version in range(12):
            if version < 9:  # the learner is slow at first
                wait_until(lambda: actors.queue_size == max_lag + 1)
            items = actors.take(never)
            assert [item.unroll[:2] for item in items] == [(actor, version) for actor in range(3)]
            assert [item.unroll[3] for item in items] == [version, 100 + version, 200 + version]
            assert [item.carry for item in items] == [version + 1, 101 + version, 201 + version]
            for item in items:
                assert item.unroll[2] == 10 * item.version
                lag = version - item.version
                assert lag == min(max_lag, version) if lockstep else 0 <= lag <= max_lag
            actors.publish(version + 1, jnp.int32(10 * (version + 1)))
        assert sorted(actors.published()) == list(range(12 - max_lag if lockstep else 12, 13))


def test_full_queue_holds_the_actors_back():
    played = []

    def collect(actor, i, params, carry, watch, check):
        played.append(i)
        return i, carry

    with make(collect, 1, max_lag=2) as actors:
        actors.start(0, [None])
        wait_until(lambda: actors.queue_size == 3)  # of updates 0, 1 and 2, all with version 0
        time.sleep(0.2)
        assert played == [0, 1, 2]
        actors.publish(1, jnp.int32(0))
        wait_until(lambda: len(played) == 4)
    assert not running()


def test_parameters_are_copies():
    """The learner donates its own, which deletes them."""
    state = jnp.ones(3)
    with make(lambda actor, i, params, carry, watch, check: (params + 0, carry), 1) as actors:
        actors.publish(1, state)
        jax.jit(lambda x: x + 1, donate_argnums=0)(state).block_until_ready()
        assert state.is_deleted()
        actors.start(1, [None])
        assert actors.take(never)[0].unroll.tolist() == [1, 1, 1]


def test_an_exception_reaches_the_learner_and_every_thread_ends():
    def collect(actor, i, params, carry, watch, check):
        if actor == 1 and i == 1:
            raise ZeroDivisionError("the game broke")
        return i, carry

    with make(collect, 3) as actors:
        actors.start(0, [None] * 3)
        wait_until(lambda: len(running()) == 2)
        with pytest.raises(ActorError, match="actor 1") as error:
            actors.take(never)
        assert isinstance(error.value.__cause__, ZeroDivisionError)
        where = traceback.extract_tb(error.value.__cause__.__traceback__)
        assert "collect" in [frame.name for frame in where]
    assert not running()


def test_take_gives_up_when_asked():
    release = threading.Event()

    def collect(actor, i, params, carry, watch, check):
        while not release.wait(0.01):  # a game that hangs until it is told to stop
            check()
        return i, carry

    with make(collect) as actors:
        actors.start(0, [None] * 2)
        asked = []
        assert actors.take(lambda: asked.append(1) or len(asked) > 2) is None
        assert actors.queue_size == 0
    assert not running()


def test_stopped_and_started_again_from_where_the_learner_is():
    with make(echo, 2, max_lag=2) as actors:
        actors.start(0, [0, 0])
        wait_until(lambda: actors.queue_size == 3)
        (item, _) = actors.take(never)
        actors.publish(1, jnp.int32(1))
        actors.stop()
        assert actors.queue_size == 0
        actors.start(1, [item.carry, item.carry])
        assert [item.unroll for item in actors.take(never)] == [(0, 1, 1, 1), (1, 1, 1, 1)]
