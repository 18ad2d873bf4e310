"""Door worlds: physics against the published numbers, and the environment's promises."""

import ctypes
from unittest import mock

import gymnasium as gym
import mujoco
import numpy as np
import pytest
import tyro
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st

import doorgym
from doorgym import __main__ as doorgym_main
from doorgym import opener, vector, worlds

TURNING = [name for name, task in doorgym.TASKS.items() if task.knob != "pull"]


def middle(knob, hardness="hard"):
    """A world with every number in the middle of its range."""
    low, high = ([s[i] for s in worlds.SHAPES[knob]] for i in (0, 1))
    shape = tuple(np.mean([low, high], axis=0))
    world = worlds.draw(knob, hardness, np.random.default_rng(0))
    return world._replace(
        height=2.25, thickness=0.0245, door_damping=1.45, door_stiffness=0.145, knob_friction=(0.75, 0.0025, 0.0025),
        robot_damping=0.1, shape=shape,
    )  # fmt: skip


def compiled(name, world=None, robot="hook"):
    task = doorgym.TASKS[name]
    model = worlds.build(task, robot, world or middle(task.knob)).compile()
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    return task, model, data


# PHYSICS


@pytest.mark.parametrize("name", TURNING)
@pytest.mark.parametrize("sign", [1, -1])
def test_latch_blocks_at_82_hundredths_and_frees_at_84(name, sign):
    """4 N m for two seconds, the knob held at an angle: published, measured on the original's meshes."""
    task, model, _ = compiled(name)
    opened = {}
    for angle in (0.82, 0.84):
        data = mujoco.MjData(model)
        for _ in range(2000):
            data.joint("knob").qpos[0], data.joint("knob").qvel[0] = sign * angle, 0
            data.joint("door").qfrc_applied[0] = 4 * task.direction
            mujoco.mj_step(model, data)
        opened[angle] = abs(data.joint("door").qpos[0])
    assert opened[0.82] < 0.005
    assert opened[0.84] > vector.OPEN
    assert 0.82 < vector.FREE < 0.84


@pytest.mark.parametrize("name", doorgym.TASKS)
def test_door_opens_in_its_direction_only(name):
    task, model, _ = compiled(name)
    angles = []
    for sign in (1, -1):
        data = mujoco.MjData(model)
        for _ in range(4000):
            if task.knob != "pull":
                data.joint("knob").qpos[0] = 1.0
            data.joint("door").qfrc_applied[0] = 4 * sign
            mujoco.mj_step(model, data)
        angles.append(task.direction * data.joint("door").qpos[0])
    shut, opened = sorted(angles)
    assert -0.01 < shut < 0.01
    assert 1.4 < opened < 1.6
    # A pull door's free edge comes towards the robot, at +x.
    mujoco.mj_kinematics(model, data)
    data.joint("door").qpos[0] = task.direction * 0.5
    mujoco.mj_kinematics(model, data)
    assert (data.site("knob").xpos[0] > 0.2) == (task.opening == "pull")


def test_two_newtons_open_an_unlatched_door_in_the_published_time():
    _, model, data = compiled("Pull-Right-Pull")
    while data.joint("door").qpos[0] < 0.2:
        data.joint("door").qfrc_applied[0] = 2 * 0.85
        mujoco.mj_step(model, data)
    assert 1.25 <= data.time <= 1.3


def test_fingertip_and_mass_matrix_of_the_hook():
    _, model, data = compiled("Lever-Right-Pull")
    np.testing.assert_allclose(data.site("finger").xpos, (0.840, 0, 1.200), atol=2e-4)
    mass = np.zeros((model.nv, model.nv))
    mujoco.mj_fullM(model, data, mass)
    published = 1.6616, 1.6616, 1.6616, 1.0035, 1.0054, 1.0058
    np.testing.assert_allclose(np.diag(mass)[:6], published, atol=2e-4)
    assert 5.6 < mass[6, 6] < 8.4  # about the door's hinge, knob included
    assert model.nu == 6
    assert (model.actuator_gear[:, 0] == 2).all()  # N, and N m
    assert (model.actuator_ctrlrange == (-1, 1)).all()
    for name, x in (("Pull-Right-Pull", (0.011 + 0.0935) / 2), ("Round-Left-Pull", 0.014 + 0.038 / 2)):
        _, _, data = compiled(name)
        np.testing.assert_allclose(data.site("knob").xpos - data.body("knob").xpos, (x, 0, 0), atol=1e-9)


@pytest.mark.parametrize(
    ("shape", "center"),
    [
        ((0.0201, 0.0515, 0.1417, 0.0212, 0.0086, 0.0142, 0.0062), (0.0595, 0.0327)),
        ((0.0152, 0.0571, 0.1244, 0.0171, 0.0099, 0.0108, 0.0081), (0.0646, 0.0315)),
        ((0.0162, 0.0668, 0.1353, 0.0355, 0.0143, 0.0058, 0.0089), (0.0731, 0.0343)),
        ((0.0148, 0.0603, 0.1278, 0.0209, 0.0093, 0.0148, 0.0019), (0.0667, 0.0311)),
        ((0.0186, 0.0473, 0.0941, 0.0292, 0.0039, 0.0125, 0.0049), (0.0542, 0.0177)),
    ],
)
def test_lever_is_where_the_original_has_its_middle(shape, center):
    """Five levers that the original publishes: their parameters, and the centre of mass of their handle's mesh."""
    _, model, data = compiled("Lever-Left-Pull", middle("lever")._replace(shape=shape))
    offset = data.site("knob").xpos - data.body("knob").xpos
    np.testing.assert_allclose(offset, (center[0], -center[1], 0), atol=0.002)
    handle = data.geom("handle").xpos - data.body("knob").xpos  # a mesh's is its own centre of mass
    assert np.abs(handle - offset).max() < 0.015
    assert model.geom("handle").type == mujoco.mjtGeom.mjGEOM_MESH


def test_mouth_of_the_hook_takes_a_ball_of_32_mm():
    """The original's opens to 50 mm and narrows to 37; its bounding boxes would leave 23.5."""
    task = doorgym.TASKS["Lever-Right-Pull"]
    spec = worlds.build(task, "hook", middle("lever"))
    ball = spec.worldbody.add_body(name="ball")
    ball.add_geom(name="ball", type=mujoco.mjtGeom.mjGEOM_SPHERE, size=(0.016, 0, 0), contype=0, conaffinity=1)
    model = spec.compile()
    hook = mujoco.MjData(model)
    mujoco.mj_forward(model, hook)
    origin = hook.body("hook").xpos
    for x, y in ((-0.061, -0.02), (-0.0605, 0), (-0.066, 0.01), (-0.075, 0.02)):
        model.body("ball").pos[:] = origin + np.array((x, y, 0))
        mujoco.mj_forward(model, hook)
        assert not hook.ncon, (x, y, [model.geom(c.geom[0]).name for c in hook.contact])


# Each knob, side and way to open; the rest of the doors are slow.
QUICK = {(name, "hard") for name in ("Pull-Right-Push", "Lever-Left-Pull")}
OPENED = [  # a pull handle has no spring
    (name, hardness) for name, task in doorgym.TASKS.items() for hardness in vector.HARDNESS
    if task.knob == "lever" or (task.knob == "pull" and hardness == "hard")
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "hardness"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in OPENED],
)
def test_a_script_opens_nine_doors_of_ten(name, hardness):
    info = opener.open_doors(name, 32, 7, hardness)
    assert info["success"].mean() >= 0.9
    assert info["freed"].mean() >= 0.9 or "Lever" not in name


def test_check_says_how_many_and_fails_below_nine_of_ten(monkeypatch, capsys):
    monkeypatch.setattr(doorgym_main, "open_doors", lambda *_: {"success": np.array([True] * 9 + [False])})
    for args, code in ((["--check"], 0), (["--check", "--num-worlds", "0"], None), (["--seed", "3"], None)):
        with pytest.raises((SystemExit, ValueError)) as stopped:
            doorgym_main.main(tyro.cli(doorgym_main.Args, args=args))
        assert getattr(stopped.value, "code", None) == code
    assert capsys.readouterr().out.count("90%") == 12
    for path in ("doors", "nowhere/doors.png", "doors.psd"):
        with pytest.raises(ValueError, match=f"^{path}: give the name of a picture"):
            doorgym_main.main(doorgym_main.Args(path=path))
    monkeypatch.setattr(doorgym_main, "open_doors", lambda *_: {"success": np.array([True] * 8 + [False] * 2)})
    with pytest.raises(SystemExit) as stopped:
        doorgym_main.main(doorgym_main.Args(check=True))
    assert stopped.value.code == 1
    asked = []

    def open_first(*given):
        asked.append(given)
        return {"success": np.arange(10) < (8 if len(asked) == 1 else 10)}

    monkeypatch.setattr(doorgym_main, "open_doors", open_first)  # the first task is the bad one
    with pytest.raises(SystemExit) as stopped:
        doorgym_main.main(doorgym_main.Args(check=True))
    assert (stopped.value.code, asked[0]) == (1, ("Pull-Right-Pull", 64, 0, "hard"))


def test_opener_refuses_what_a_hook_cannot_turn(make, monkeypatch):
    with pytest.raises(ValueError, match="Round-Left-Push with a hook"):
        opener.Opener(make("Round-Left-Push", 1, 1, 1, num_worlds=1))
    made = mock.Mock(side_effect=ZeroDivisionError)
    monkeypatch.setattr(opener, "DoorVectorEnv", made)
    with pytest.raises(ZeroDivisionError):
        opener.open_doors("Lever-Left-Pull", 3, 5, "easy")
    assert (made.call_args.args, made.call_args.kwargs["hardness"]) == (("Lever-Left-Pull", 3, 5), "easy")


@pytest.mark.parametrize("hardness", ["hard", "easy"])
@pytest.mark.parametrize("knob", ["pull", "lever", "round"])
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_worlds_are_drawn_from_the_published_ranges(knob, hardness, seed):
    world = worlds.draw(knob, hardness, np.random.default_rng(seed))
    hard = hardness == "hard"
    ranges = {
        "height": (2.0, 2.499), "thickness": (0.020, 0.029), "door_damping": (1.0, 1.9), "door_stiffness": (0.1, 0.19),
        "knob_damping": (1.0, 1.99) if hard else (0.1, 0.19), "knob_stiffness": (1.0, 1.49) if hard else (0.1, 0.14),
        "knob_limit": (1.308, 1.379), "robot_damping": (0.09, 0.1),
    }  # fmt: skip
    for name, (low, high) in ranges.items():
        assert low - 1e-9 <= getattr(world, name) <= high + 1e-9, name
    for value, (low, high) in zip(world.shape, worlds.SHAPES[knob], strict=True):
        assert low <= value <= high
    assert 12.0 <= worlds.door_mass(world) <= 21.75
    assert 0.5 <= world.knob_friction[0] <= 0.99
    assert 2 <= len(world.lights) <= 5


def test_a_thousand_worlds_stay_finite_under_random_actions():
    """Robots anywhere around the door, knobs turned at random, a third of a second each."""
    rng = np.random.default_rng(0)
    names = list(doorgym.TASKS)
    for i in range(960):
        task, robot = doorgym.TASKS[names[i % len(names)]], ("hook", "gripper")[i // len(names) % 2]
        world = worlds.draw(task.knob, ("hard", "easy")[i // 24 % 2], rng)
        model = worlds.build(task, robot, world).compile()
        data = mujoco.MjData(model)
        data.qpos[:3] = rng.uniform((-1, -0.7, -0.6), (0.2, 0.7, 0.4))
        data.qpos[3:6] = rng.uniform((-1, -1, 0), (1, 1, 3))
        if task.knob != "pull":
            data.joint("knob").qpos[0] = rng.uniform(-1.3, 1.3)
        data.ctrl[:] = rng.normal(size=model.nu)
        mujoco.mj_step(model, data, 300)
        assert np.isfinite(data.qpos).all(), (task.name, robot, i)
        assert np.abs(data.qvel).max() < 1000, (task.name, robot, i)
        assert not any(warning.number for warning in data.warning), (task.name, robot, i)


# THE ENVIRONMENT


@pytest.fixture
def make():
    """make(task, num_envs, seed, threads, **options): doors that are closed when the test ends."""
    made = []

    def make(*args, **options):
        made.append(doorgym.make_vec(*args, **{"num_worlds": 8} | options))
        return made[-1]

    yield make
    for doors in made:
        doors.close()


def wander(doors, steps, seed=0, towards=True):
    """Random actions that drift to the door; everything that came back."""
    rng = np.random.default_rng(seed)
    seen = [doors.reset(seed=5)[0]]
    for _ in range(steps):
        actions = rng.normal(size=(64, *doors.single_action_space.shape))[: doors.num_envs]
        if towards:
            actions[:, :3] -= 2 * seen[-1][:, -3:]
        obs, rewards, _, truncated, info = doors.step(actions)
        seen += [obs, rewards, truncated, info["door_angle"], info["success"]]
        seen[-5], seen[-1] = seen[-1], obs
    return seen


@pytest.mark.parametrize("robot", ["hook", "gripper"])
def test_same_seed_same_trajectory_whatever_the_threads(make, robot):
    options = {"robot": robot, "action_repeat": 4, "max_episode_steps": 160}
    a, b, c = (wander(make("Lever-Right-Pull", 24, 1, threads, **options), 60) for threads in (1, 2, 5))
    for x, y, z in zip(a, b, c, strict=True):
        np.testing.assert_array_equal(x, y)
        np.testing.assert_array_equal(x, z)


def test_an_environment_does_not_depend_on_its_neighbours(make):
    options = {"action_repeat": 4, "max_episode_steps": 160}
    many, few = (wander(make("Pull-Left-Pull", n, 1, 2, **options), 60) for n in (9, 4))
    for x, y in zip(many, few, strict=True):
        np.testing.assert_array_equal(x[:4], y)


def test_seeds_differ_in_worlds_and_episodes(make):
    doors = make("Lever-Right-Pull", 8, 1, 1)
    first, again, other = (doors.reset(seed=seed)[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any(axis=1).all()
    assert len(np.unique(first[:, 0])) == 8
    masses = [{model.body("door").mass[0] for model in make("Lever-Right-Pull", 1, s, 1).models} for s in (1, 2)]
    assert masses[0] != masses[1]


def test_reward_at_published_distances():
    zero = np.zeros(2)
    offset = np.array([[0, 0, 0], [0, 0.4, 0]])
    got = vector.reward(offset, zero, zero, zero, zero, np.zeros((2, 6)))
    np.testing.assert_allclose(got, [0.298, -3.6], atol=2e-3)
    actions = np.array([[1, 2, 0, 0, 0, 1], [0] * 6])
    got = vector.reward(np.zeros((2, 3)), 3 + zero, 4 + zero, zero - 0.5, zero + 0.1, actions)
    np.testing.assert_allclose(got, -np.log(0.005) - 5 - 5 + 30 * 0.5 + 50 * 0.1 - np.array([1, 0]))


@pytest.mark.parametrize("repeat", [1, 4])
@pytest.mark.parametrize(
    ("name", "robot"), [("Lever-Left-Push", "hook"), ("Pull-Right-Pull", "hook"), ("Round-Left-Pull", "gripper")]
)
def test_observation_and_reward_are_those_of_mujoco(make, name, robot, repeat):
    """One environment's steps against mj_step in a loop, world, action and all; at the start a pull door is ajar, a
    knob turned."""
    doors = make(name, 3, 7, 2, action_repeat=repeat, robot=robot)
    obs, _ = doors.reset(seed=3)
    model, n = doors.models[doors._world[1]], doors.single_action_space.shape[0]
    data = mujoco.MjData(model)
    data.qpos[:] = doors._positions(doors._state[1])
    knob = data.joint("knob").qpos if doors._turns else np.zeros(1)
    fingers = ("finger",) if robot == "hook" else ("finger_right", "finger_left")

    def offset():
        mujoco.mj_forward(model, data)
        return np.mean([data.site(name).xpos for name in fingers], axis=0) - data.site("knob").xpos

    np.testing.assert_allclose(obs[1], [*data.qpos[:n], *data.qvel[:n], *offset()], atol=1e-6)
    joint, start = ("knob", 0.9) if doors._turns else ("door", 0.05)
    doors._positions(doors._state[1])[model.joint(joint).qposadr[0]] = data.joint(joint).qpos[0] = start
    rng = np.random.default_rng(0)
    for t in range(20):
        actions = rng.normal(0, 2, (3, n))
        a = actions[1]
        data.ctrl[:] = a if robot == "hook" else [*a[:6], a[6], -a[6], a[6], -a[6]]
        mujoco.mj_step(model, data, 20 * (repeat - 1))
        d, door = np.linalg.norm(offset()), data.joint("door").qpos[0]
        want = -d - np.log(d * d + 0.005) - 5 - np.hypot(data.qpos[4], data.qpos[3] - door)
        assert t or abs(knob[0]) > 0.3 or not doors._turns
        want += 30 * abs(door) + 50 * abs(knob[0]) - (a[: 6 if robot == "hook" else 5] ** 2).mean()
        mujoco.mj_step(model, data, 20)
        obs, rewards, *_ = doors.step(actions)
        np.testing.assert_allclose(rewards[1], want, rtol=1e-6)
        # Finger and knob are seen as they were a millisecond ago.
        np.testing.assert_allclose(obs[1], [*data.qpos[:n], *data.qvel[:n], *offset()], atol=3e-3)


@pytest.mark.parametrize("seed", range(4))
def test_touching_doors_move_as_each_alone(make, seed):
    """Doors of many worlds that take turns in two threads' data, robot and door in contact, against a model and data of
    their own each: what one world leaves behind must not change another."""
    doors = make("Pull-Right-Pull", 48, seed, 2, num_worlds=48)
    doors.reset(seed=3)
    rng = np.random.default_rng(seed)
    knobs = doors._state[:, 2 + doors._door : 4 + doors._door]
    doors._state[:, 1:7] = rng.normal((-0.75, -0.35, -0.2, 0, 0, 1.5), 0.02, (48, 6))
    doors._state[:, 2:4] += knobs
    singles = []
    for state, world in zip(doors._state, doors._world, strict=True):
        model = doors.models[world]
        singles.append((model, mujoco.MjData(model)))
        singles[-1][1].qpos[:] = doors._positions(state)
    actions, touched = rng.normal((1, 0, 0, 0, 0, 0), 1, (15, 48, 6)), 0
    for action in actions:
        doors.step(action)
        for (model, data), control, got in zip(singles, action, doors._state, strict=True):
            data.ctrl[:] = control
            data.qacc_warmstart[:] = 0  # as in mujoco.rollout
            mujoco.mj_step(model, data, 20)
            touched += data.ncon > 0
            np.testing.assert_allclose(doors._positions(got), data.qpos, atol=1e-9)
    assert touched > 50


def test_each_episode_has_another_world(make):
    doors = make("Pull-Right-Pull", 16, 1, 1, max_episode_steps=2)
    seen = [doors._world.copy()]
    for _ in range(8):
        doors.step(np.zeros((16, 6)))
        seen.append(doors._world.copy())
    assert len(set(seen[0])) > 4
    np.testing.assert_array_equal(seen[0], seen[1])
    assert (seen[1] != seen[2]).mean() > 0.5
    assert len(set(np.ravel(seen))) == 8


def test_worlds_can_be_taken_in_turn(make):
    doors = make("Pull-Right-Pull", 3, 1, 1, max_episode_steps=1, in_turn=True)
    for turn in ([3, 4, 5], [6, 7, 0], [1, 2, 3]):  # of eight
        doors.step(np.zeros((3, 6)))
        assert doors._world.tolist() == turn
    doors.reset(seed=1)
    assert doors._world.tolist() == [0, 1, 2]


def test_worlds_fill_the_published_ranges():
    """Nothing is drawn from a part of its range only."""
    rng = np.random.default_rng(0)
    drawn = [worlds.draw("lever", "hard", rng) for _ in range(400)]
    ranges = {
        "height": (2.0, 2.499), "thickness": (0.020, 0.029), "door_damping": (1.0, 1.9), "door_stiffness": (0.1, 0.19),
        "knob_damping": (1.0, 1.99), "knob_stiffness": (1.0, 1.49), "knob_limit": (1.308, 1.379),
        "robot_damping": (0.09, 0.1),
    }  # fmt: skip
    for name, (low, high) in ranges.items():
        values = [getattr(world, name) for world in drawn]
        np.testing.assert_allclose([min(values), max(values)], [low, high], atol=0.05 * (high - low), err_msg=name)
    low, high = np.array(worlds.SHAPES["lever"]).T
    assert (np.ptp([world.shape for world in drawn], axis=0) > 0.9 * (high - low)).all()


@pytest.mark.parametrize("knob", ["pull", "lever", "round"])
def test_what_is_drawn_is_in_the_model(knob):
    """Each joint's damping, spring and range, and the door's mass."""
    task = doorgym.TASKS[f"{knob.capitalize()}-Left-Push"]
    world = worlds.draw(knob, "hard", np.random.default_rng(5))
    model = worlds.build(task, "hook", world).compile()
    numbers = {
        "slide_x": (world.robot_damping, 0, 3), "hinge_z": (world.robot_damping, 0, 1.57),
        "hinge_x": (world.robot_damping, 0, 3.13), "door": (world.door_damping, world.door_stiffness, 1.57),
        "target_y": (30000, 0, 0.3), "target_z": (30000, 0, 0.5),
    }  # fmt: skip
    if knob != "pull":
        numbers["knob"] = world.knob_damping, world.knob_stiffness, world.knob_limit
    for name, want in numbers.items():
        joint = model.joint(name)
        got = model.dof_damping[joint.dofadr[0]], np.ravel(joint.stiffness)[0], joint.range[1]
        np.testing.assert_allclose(got, want, err_msg=name)
    assert model.body("door").mass[0] == pytest.approx(300 * world.height * world.thickness)
    assert {tuple(x) for x in model.geom_friction[model.geom_condim == 4]} == {world.knob_friction}
    assert (model.opt.timestep, *model.opt.gravity) == (0.001, 0, 0, 0)


def test_episodes_are_truncated_and_begin_again_in_the_same_step(make):
    doors = make("Pull-Right-Pull", 3, 1, 1, max_episode_steps=5)
    doors.reset(seed=1, options={"reset_mask": np.ones(3, bool)})
    doors.reset(options={"reset_mask": np.array([False, False, True])})
    for t in range(1, 13):
        obs, _, terminated, truncated, info = doors.step(np.ones((3, 6)))
        assert not terminated.any()
        assert truncated.all() == (t % 5 == 0)
        if truncated.all():
            # Full thrust moved the robot; the next episode's is at rest.
            assert (np.abs(info["final_obs"][:, 6:12]) > 0.01).all()
            assert (obs[:, 6:12] == 0).all()
            assert set(info["final_info"]) >= {"door_angle", "knob_angle", "max_knob_angle", "freed", "success"}
        else:
            assert "final_obs" not in info
    doors.reset(seed=1)
    doors.step(np.ones((3, 6)))
    doors.reset(options={"reset_mask": np.array([False, False, True])})
    for _ in range(4):
        obs, _, _, truncated, _ = doors.step(np.ones((3, 6)))
    assert truncated.tolist() == [True, True, False]
    assert (obs[:, 6:12] == 0).all(axis=1).tolist() == [True, True, False]  # the third one's episode goes on


def test_success_is_a_door_that_has_been_open_in_this_episode(make):
    doors = make("Pull-Left-Pull", 2, 1, 1, max_episode_steps=40)
    doors.reset(seed=1)
    doors._state[:, 1 + doors._door] = -0.25, -0.19
    _, _, _, _, info = doors.step(np.zeros((2, 6)))
    assert info["door_angle"][0] > 0.2  # in the door's own direction
    assert info["success"].tolist() == [True, False]
    doors._state[0, 1 + doors._door] = 0
    for _ in range(39):
        _, _, _, truncated, info = doors.step(np.zeros((2, 6)))
    assert truncated.all()
    assert info["final_info"]["success"].tolist() == [True, False]
    assert info["success"].tolist() == [False, False]


def test_a_latch_that_was_free_stays_so_for_the_episode(make):
    doors = make("Lever-Left-Pull", 2, 1, 1, max_episode_steps=40)
    doors.reset(seed=1)
    doors._state[0, doors._nq] = -0.9  # the last position is the knob's
    _, _, _, _, info = doors.step(np.zeros((2, 6)))
    assert info["knob_angle"][0] < -0.83
    for _ in range(39):
        _, _, _, _, info = doors.step(np.zeros((2, 6)))
    final = info["final_info"]
    assert abs(final["knob_angle"][0]) < vector.FREE  # its spring turned it back
    assert final["freed"].tolist() == [True, False]
    np.testing.assert_allclose(final["max_knob_angle"], (0.9, 0), atol=0.02)
    assert not info["freed"].any()


def test_start_states_are_in_the_published_ranges(make):
    sideways = {"Pull-Right-Pull": (-0.05, 0.15), "Pull-Left-Pull": (-0.15, 0.05), "Lever-Left-Pull": (0, 0)}
    for name, (low, high) in sideways.items():
        doors = make(name, 300, 1, 1)
        obs, _ = doors.reset(seed=1)
        assert (np.abs(obs[:, :5]) <= 0.3).all()
        assert (np.abs(obs[:, :5]).max(axis=0) > 0.28).all()
        assert obs[:, 5].min() >= 0
        assert 3 < obs[:, 5].max() <= 3.13
        door, slide_y, slide_z = doors._state[:, 1 + doors._door : 4 + doors._door].T
        assert (door == 0).all()
        assert low <= slide_y.min() <= low + 0.01
        assert high - 0.01 <= slide_y.max() <= high
        assert np.abs(slide_z).max() <= 0.15 < np.abs(slide_z).max() + 0.01


@pytest.mark.filterwarnings("ignore::UserWarning")  # unbounded observations, the gripper's asymmetric action
@pytest.mark.parametrize("options", [{}, {"robot": "gripper"}])
def test_gymnasium_makes_and_checks_it(options):
    env = gym.make("DoorGym/Lever-Right-Pull-v0", num_worlds=2, render_mode="rgb_array", **options)
    check_env(env.unwrapped)
    env.close()
    doors = gym.make_vec("DoorGym/Lever-Right-Pull-v0", num_envs=3, num_worlds=2, **options)
    obs, _ = doors.reset(seed=1)
    assert doors.observation_space.contains(obs)
    assert obs.shape == ((3, 17) if options else (3, 15))
    obs, *_ = doors.step(doors.action_space.sample())
    assert doors.observation_space.contains(obs)
    doors.close()


def test_the_gripper_closes_its_fingers(make):
    doors = make("Round-Right-Pull", 1, 1, 1, robot="gripper")
    widths = []
    for angle in (0.0, 1.05):
        doors.reset(seed=1)
        for _ in range(40):
            doors.step(np.array([[0, 0, 0, 0, 0, 0, angle]]))
        fingers = doors._sensors[0, -1].reshape(3, 3)[:2]
        widths.append(np.linalg.norm(fingers[0] - fingers[1]))
    assert widths[0] > 0.08
    assert widths[1] < 0.03


def test_a_single_environment_waits_for_reset():
    env = gym.make("DoorGym/Pull-Right-Pull-v0", num_worlds=2, max_episode_steps=3)
    env.reset(seed=1)
    for t in range(1, 4):
        obs, _, _, truncated, info = env.step(np.ones(6, np.float32))
        assert truncated == (t == 3)
    assert (np.abs(obs[6:12]) > 0.01).all()
    assert set(info) == {"door_angle", "knob_angle", "max_knob_angle", "freed", "success"}
    first, _ = env.reset(seed=1)
    np.testing.assert_array_equal(first, env.reset(seed=1)[0])
    env.close()


def test_pictures_show_the_door_move(make):
    doors = make("Pull-Right-Pull", 2, 1, 1, render_mode="rgb_array", height=120, width=160)
    doors.reset(seed=1)
    shut, other = doors.render()
    assert shut.shape == (120, 160, 3)
    assert shut.dtype == np.uint8
    assert shut.std() > 10
    assert (shut != other).any()
    doors._state[0, 1 + doors._door] = 1.0
    assert (doors.frame(0) != shut).any(axis=-1).mean() > 0.2
    before = doors.frame(0)
    doors._world[0] = (doors._world[0] + 1) % 8  # as the next episode's
    assert (doors.frame(0) != before).any(axis=-1).mean() > 0.2
    doors.close()
    with pytest.raises(RuntimeError, match="are closed"):
        doors.frame(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "Lever-Up-Pull"}, "task 'Lever-Up-Pull': give one of Pull-Right-Pull"),
        ({"robot": "arm"}, "robot 'arm': give one of hook, gripper"),
        ({"hardness": "soft"}, "hardness 'soft'"),
        ({"render_mode": "human"}, "render_mode 'human'"),
        ({"num_envs": 0}, "num_envs 0: must be 1 or more"),
        ({"num_worlds": 0}, "num_worlds 0"),
        ({"seed": -1}, "seed -1: must be from 0"),
        ({"width": 1200}, "width 1200: must be from 1 to 1024"),
        (
            {"max_episode_steps": 10, "action_repeat": 4},
            "max_episode_steps 10: must be 1 or more, and a multiple of action_repeat 4",
        ),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message.split(":")[0]) as error:
        doorgym.make_vec(**{"task": "Pull-Right-Pull", "num_envs": 1} | options)
    assert message in str(error.value)


def test_pictures_and_ends_are_described(make):
    """A step that holds its action for four is 80 ms long."""
    each = doorgym.DoorEnv("Pull-Right-Pull", num_worlds=1, action_repeat=4)
    assert each.metadata["render_fps"] == each._doors.metadata["render_fps"] == 12.5
    assert each._doors.metadata["autoreset_mode"] == AutoresetMode.DISABLED
    each.close()
    assert make("Pull-Right-Pull", 2, 1, 1).metadata["autoreset_mode"] == AutoresetMode.SAME_STEP


def test_what_draws_is_there(monkeypatch):
    assert doorgym._renderer() == "egl"
    monkeypatch.setattr(ctypes, "CDLL", mock.Mock(side_effect=OSError))
    assert doorgym._renderer() == "disabled"


def test_a_masked_reset_leaves_the_others_alone(make):
    """Their random numbers too; masks and seeds of other kinds are refused."""
    doors, other = (make("Pull-Right-Pull", 3, 1, 1) for _ in range(2))
    for each in (doors, other):
        each.reset(seed=5)
    obs, _ = doors.reset(seed=6, options={"reset_mask": np.array([True, False, True])})
    assert (obs != other._observe()).any(axis=1).tolist() == [True, False, True]
    np.testing.assert_array_equal(doors.reset()[0][1], other.reset()[0][1])
    np.testing.assert_array_equal(doors.reset(seed=6)[0][[0, 2]], obs[[0, 2]])
    for mask in (np.ones(2, bool), np.ones(3, int)):
        with pytest.raises(ValueError, match=r"^reset_mask .*: give bool \[3\]$"):
            doors.reset(options={"reset_mask": mask})
    with pytest.raises(ValueError, match=r"^seed \[1, 2, 3\]: give one for all"):
        doors.reset(seed=[1, 2, 3])


@pytest.mark.parametrize("robot", ["hook", "gripper"])
def test_huge_actions_are_those_at_the_limits(make, robot):
    """To the doors; their cost in the reward is their own."""
    doors, other = (make("Pull-Right-Pull", 2, 1, 1, robot=robot) for _ in range(2))
    space = doors.action_space
    for _ in range(3):
        huge = doors.step(np.where(np.arange(space.shape[1]) % 2, 1e12, -1e12) * np.ones(space.shape))
        least = other.step(np.where(np.arange(space.shape[1]) % 2, space.high, space.low))
        np.testing.assert_array_equal(huge[0], least[0])
        assert (huge[1] < least[1]).all()


def test_actions_of_a_wrong_shape_are_named(make):
    with pytest.raises(ValueError, match=r"actions of shape \(6,\): give \(2, 6\)"):
        make("Pull-Right-Pull", 2, 1, 1).step(np.zeros(6))
