"""Random doors, built with MuJoCo's model builder.

World x points from the door towards the robot, z up; metres, kilograms, radians. The slab is 1 m wide, its knob 1 m
high. Numbers are those of DoorGym's world generator (Urakami et al. 2019, arXiv 1908.01887), with boxes, cylinders,
capsules and small hulls in place of its meshes.
"""

from typing import Literal, NamedTuple

import mujoco
import numpy as np
from mujoco import mjtGeom, mjtJoint, mjtObj, mjtSensor

TIMESTEP = 0.001  # seconds
# Metres: the slab's width, the knob's height, its distance from the slab's free edge, the gap between slab and frame.
WIDTH, KNOB_HEIGHT, INSET, CLEARANCE = 1.0, 1.0, 0.15, 0.01
LATCH_THICKNESS = 0.015
GAP = 1.3 * LATCH_THICKNESS  # between the front and the back of the frame, where the latch is
LATCH = np.array((LATCH_THICKNESS / 2, 0.18333, 0.05))  # half sizes

# Collisions: robots with everything but themselves, the latch with the frame (by explicit pairs).
ROBOT, WORLD = {"contype": 1, "conaffinity": 0}, {"contype": 0, "conaffinity": 1}
NOTHING = {"contype": 0, "conaffinity": 0}


class Task(NamedTuple):
    knob: Literal["pull", "lever", "round"]
    hinge: Literal["right", "left"]
    opening: Literal["pull", "push"]

    @property
    def name(self) -> str:
        return "-".join(part.capitalize() for part in self)

    @property
    def side(self) -> int:
        """+1 if the hinge is at +y (right), -1 if at -y (left)."""
        return 1 if self.hinge == "right" else -1

    @property
    def turns(self) -> bool:
        """Whether the knob turns, with a latch that holds the door until it does."""
        return self.knob != "pull"

    @property
    def direction(self) -> int:
        """Sign of the angle of the open door."""
        return -self.side if self.opening == "push" else self.side


_TASKS = [
    Task(knob, hinge, opening)
    for knob in ("pull", "lever", "round")
    for opening in ("pull", "push")
    for hinge in ("right", "left")
]
TASKS = {task.name: task for task in _TASKS}


class World(NamedTuple):
    """The random parameters of a world."""

    height: float
    thickness: float
    door_damping: float  # N m s/rad
    door_stiffness: float  # N m/rad
    knob_damping: float  # N m s/rad
    knob_stiffness: float  # N m/rad
    knob_limit: float  # rad, in both directions
    # Sliding, torsional, rolling: as in the original without effect, since MuJoCo uses the larger of two geoms'
    # frictions, and the robots' are larger.
    knob_friction: tuple[float, float, float]
    robot_damping: float  # of the hook's slides, N s/m, and hinges, N m s/rad; the gripper's is 1
    shape: tuple[float, ...]  # of the knob, metres, in the order of `SHAPES`
    colors: np.ndarray  # [6, 3]: slab, frame, wall, floor, knob, and shininess, specular
    lights: np.ndarray  # [2 to 5, 3]: directions


TAPER = 0.68  # protrusion of a lever's handle halfway to its free end, as a fraction of its `rise + bump`
# Uniform ranges of each knob's dimensions, metres. A lever's are fitted to the five that the original publishes; those
# also taper in height, from up to 32 mm at the shaft to 17 mm at the free end.
SHAPES = {
    # plate's width and height, grip bar's distance, half length and radius
    "pull": ((0.102, 0.145), (0.255, 0.287), (0.070, 0.117), (0.077, 0.096), (0.0065, 0.0099)),
    # shaft's radius and length, handle's length and thickness; then, measured from the shaft's end: how far the handle
    # goes back towards the slab, how far out at the shaft's edge, and how much further out at the shaft's middle
    "lever": (
        (0.015, 0.020), (0.047, 0.067), (0.0945, 0.141), (0.021, 0.0285), (0.004, 0.0143), (0.0058, 0.0148),
        (0.002, 0.009),
    ),
    # neck's length, knob's radius and depth
    "round": ((0.010, 0.018), (0.033, 0.041), (0.027, 0.049)),
}  # fmt: skip


def draw(knob: str, hardness: str, rng: np.random.Generator) -> World:
    """Draws a random world. As in the original a door's numbers are discrete; shapes, colours and lights are not."""

    def steps(low: int, high: int, unit: float) -> float:
        return float(rng.integers(low, high)) * unit

    hard = hardness == "hard"
    return World(
        height=steps(2000, 2500, 0.001),
        thickness=steps(20, 30, 0.001),
        door_damping=steps(10, 20, 0.1),
        door_stiffness=steps(10, 20, 0.01),
        knob_damping=steps(100, 200, 0.01) if hard else steps(10, 20, 0.01),
        knob_stiffness=steps(100, 150, 0.01) if hard else steps(10, 15, 0.01),
        knob_limit=steps(75, 80, 3.14 / 180),
        knob_friction=(steps(50, 100, 0.01), steps(1, 5, 0.001), steps(1, 5, 0.001)),
        robot_damping=steps(9, 11, 0.01),
        shape=tuple(float(rng.uniform(low, high)) for low, high in SHAPES[knob]),
        colors=rng.uniform(0.15, 0.9, (6, 3)),
        lights=rng.uniform((-1, -1, -1), (-0.2, 1, -0.3), (rng.integers(2, 6), 3)),
    )


def door_mass(world: World) -> float:
    """Mass of the slab, of 300 kg/m^3."""
    return world.height * WIDTH * world.thickness * 300


def door_inertia(world: World) -> np.ndarray:
    """Principal moments of inertia [3] of the slab, a box, about its middle."""
    x, y, z = np.square((world.thickness, WIDTH, world.height))
    return door_mass(world) / 12 * np.array((y + z, x + z, x + y))


def knob_home(task: Task) -> float:
    """The knob's world y with its slide at 0: 0.15 m inside the slab's free edge."""
    return -task.side * (WIDTH / 2 - INSET)


def build(task: Task, robot: Literal["hook", "gripper"], world: World) -> mujoco.MjSpec:
    """A world's model, to be compiled. Joints: the robot's, door, target_y, target_z, and knob if it turns."""
    spec = mujoco.MjSpec()
    spec.modelname = f"{task.name} {robot}"
    spec.compiler.degree = False
    spec.option.timestep = TIMESTEP
    spec.option.integrator = mujoco.mjtIntegrator.mjINT_EULER  # MuJoCo's default, which may change
    spec.option.gravity = (0, 0, 0)  # as in the original's worlds with floating robots
    spec.option.disableflags |= mujoco.mjtDisableBit.mjDSBL_ISLAND  # with ten joints islands cost more than they save
    spec.visual.global_.offwidth = spec.visual.global_.offheight = 1024
    spec.visual.headlight.ambient, spec.visual.headlight.diffuse = (0.35,) * 3, (0.35,) * 3
    for i in range(5):  # in every world, active or not: all worlds of a task must have data of the same size
        light = spec.worldbody.add_light(type=mujoco.mjtLightType.mjLIGHT_DIRECTIONAL, castshadow=False)
        light.active = i < len(world.lights)
        light.dir = world.lights[min(i, len(world.lights) - 1)]
        light.diffuse = np.full(3, 0.6 / len(world.lights))
    finish = {"shininess": world.colors[5, 0], "specular": world.colors[5, 1]}
    for name, color in zip(("slab", "frame", "wall", "floor", "knob"), world.colors, strict=False):
        spec.add_material(name=name, rgba=(*(0.35 + 0.5 * color), 1), **finish)
    eye, target = (1.9, -0.95 * task.side, 1.7), (0.2, -0.05 * task.side, 1.05)
    spec.worldbody.add_camera(name="side", pos=eye, xyaxes=_look_at(eye, target))
    spec.worldbody.add_geom(
        name="floor", type=mjtGeom.mjGEOM_PLANE, pos=(0, 0, -0.05), size=(5, 5, 0.1), material="floor", **WORLD
    )
    if robot == "hook":
        add_hook(spec, world.robot_damping)
    else:
        add_gripper(spec)
    add_wall(spec, world)
    add_door(spec, task, world)
    for name in {"hook": ("finger", "knob"), "gripper": ("finger_right", "finger_left", "knob")}[robot]:
        # Computed before each step, so that a reading after it is 1 ms old, as in the original.
        spec.add_sensor(name=name, type=mjtSensor.mjSENS_FRAMEPOS, objtype=mjtObj.mjOBJ_SITE, objname=name)
    return spec


def _look_at(eye, target) -> np.ndarray:
    """The x and y axes [6] of an upright camera."""
    z = np.subtract(eye, target, dtype=float)
    x = np.cross((0, 0, 1), z)
    y = np.cross(z, x)
    return np.concatenate([x / np.linalg.norm(x), y / np.linalg.norm(y)])


def _box(body, name: str, low, high, **options) -> None:
    """Adds a box, given its lowest and highest corners."""
    low, high = np.asarray(low, float), np.asarray(high, float)
    body.add_geom(name=name, type=mjtGeom.mjGEOM_BOX, pos=(low + high) / 2, size=(high - low) / 2, **options)


def _prism(spec: mujoco.MjSpec, body, name: str, polygon: np.ndarray, height: float, **options) -> None:
    """Adds the convex hull of a polygon [P, 2] in x and y, extruded by `height` about z = 0."""
    corners = np.concatenate([np.insert(polygon, 2, z, axis=1) for z in (-height / 2, height / 2)])
    _hull(spec, body, name, corners, **options)


def _hull(spec: mujoco.MjSpec, body, name: str, points: np.ndarray, **options) -> None:
    """Adds the convex hull of points [P, 3]."""
    spec.add_mesh(name=name, uservert=points.ravel())
    body.add_geom(name=name, type=mjtGeom.mjGEOM_MESH, meshname=name, **options)


def _centroid(polygon: np.ndarray) -> np.ndarray:
    """The centroid [2] of a polygon [P, 2]."""
    following = np.roll(polygon, -1, axis=0)
    cross = polygon[:, 0] * following[:, 1] - polygon[:, 1] * following[:, 0]
    return (cross[:, None] * (polygon + following)).sum(axis=0) / (3 * cross.sum())


def add_wall(spec: mujoco.MjSpec, world: World) -> None:
    """Adds the wall around the door, and the frame's front and back, in world coordinates."""
    t, half_width, inner, top = world.thickness, WIDTH / 2, WIDTH / 2 + CLEARANCE, world.height + CLEARANCE
    wall = {"material": "wall"} | WORLD
    _box(spec.worldbody, "wall_left", (-0.3, -2.57, 0), (0, -0.57, top + 1), **wall)
    _box(spec.worldbody, "wall_right", (-0.3, 0.6, 0), (0, 2.6, top + 1), **wall)
    _box(spec.worldbody, "wall_top", (-0.3, -0.57, top + 0.1), (0, 0.6, top + 1), **wall)
    for name, x in (("front", 0), ("back", -(t + GAP))):
        sides = {"material": "frame"} | WORLD
        _box(spec.worldbody, f"{name}_left", (x - t / 2, -inner - 0.1, 0), (x + t / 2, -inner, top), **sides)
        _box(spec.worldbody, f"{name}_right", (x - t / 2, inner, 0), (x + t / 2, inner + 0.1, top), **sides)
        side = half_width + 0.11
        _box(spec.worldbody, f"{name}_top", (x - t / 2, -side, top), (x + t / 2, side, top + 0.1), **sides)


def add_door(spec: mujoco.MjSpec, task: Task, world: World) -> None:
    """Adds slab, knob and latch. The door's body is at its hinge, the knob's where it is fixed to the slab."""
    t, side = world.thickness, task.side
    door = spec.worldbody.add_body(name="door", pos=(0, side * WIDTH / 2, 0))
    angle = np.sort((0.0, task.direction * 1.57))
    _joint(door, "door", (0, 0, 1), angle, world.door_damping, 1e-4, world.door_stiffness)
    middle = np.array((0, -side * WIDTH / 2, world.height / 2))
    door.explicitinertial = True
    door.mass, door.ipos, door.inertia = door_mass(world), middle, door_inertia(world)
    half = np.array((t / 2, WIDTH / 2, world.height / 2))
    _box(door, "slab", middle - half, middle + half, material="slab", **WORLD)

    depth = t / 2 if task.turns else t / 2 - 0.006
    mount = door.add_body(name="mount", pos=(depth, knob_home(task) - side * WIDTH / 2, KNOB_HEIGHT))
    mount.explicitinertial = True
    mount.mass, mount.ipos, mount.inertia = 1.0, (0, 0, 0), (1e-3,) * 3
    # These slides only place the knob: damped so strongly that 2 N move one by less than a millimetre in an episode.
    _joint(mount, "target_y", (0, 1, 0), (-0.2, 0.3), 30000, 0, slide=True)
    _joint(mount, "target_z", (0, 0, 1), (-0.5, 0.5), 30000, 0, slide=True)
    if task.turns:
        limits = (-world.knob_limit, world.knob_limit)
        _joint(mount, "knob", (1, 0, 0), limits, world.knob_damping, 1e-4, world.knob_stiffness)
    knob = mount.add_body(name="knob")
    add_knob(spec, knob, task, world)
    if task.turns:
        x, y, z = LATCH
        knob.explicitinertial = True
        knob.mass, knob.ipos = 1.0, (-(GAP / 2 + 2.1 * t), 0, 0)
        knob.inertia = np.array((y**2 + z**2, x**2 + z**2, x**2 + y**2)) / 3
        knob.add_geom(
            name="latch", type=mjtGeom.mjGEOM_BOX, pos=(-(t + GAP / 2), 0, 0), size=LATCH, material="knob", **NOTHING
        )
        for name in ("front_left", "front_right", "back_left", "back_right"):
            spec.add_pair(geomname1="latch", geomname2=name, solref=(0.01, 1), condim=3)


def add_knob(spec: mujoco.MjSpec, body, task: Task, world: World) -> None:
    """Adds the knob's geoms, towards +x, and the target site of a robot's finger."""
    solid = {"friction": world.knob_friction, "condim": 4, "material": "knob"} | WORLD
    side, shape = task.side, world.shape

    def rod(name, a, b, radius, kind=mjtGeom.mjGEOM_CYLINDER):
        body.add_geom(name=name, type=kind, fromto=(*a, *b), size=(radius, 0, 0), density=1000, **solid)

    if task.knob == "pull":
        width, height, distance, half, radius = shape
        plate = 0.006, 0.011  # on the slab, which begins at 0.006
        _box(
            body, "plate", (plate[0], -width / 2, -height / 2), (plate[1], width / 2, height / 2), density=1000, **solid
        )
        for name, z in (("post_low", -half), ("post_high", half)):
            rod(name, (plate[1], 0, z), (distance, 0, z), radius)
        rod("grip", (distance, 0, -half), (distance, 0, half), radius, mjtGeom.mjGEOM_CAPSULE)
        target = ((plate[1] + distance) / 2, 0, 0)  # behind the bar
    elif task.knob == "lever":
        radius, shaft, length, thickness, sink, rise, bump = shape
        rod("shaft", (0, 0, 0), (shaft, 0, 0), radius)
        end, peak = length - radius, rise + bump  # the handle extends over the shaft, and tapers towards its free end
        outer = np.array([(0, -radius), (rise, -radius), (peak, 0), (TAPER * peak, end / 2), (0, end)])
        outer[:, 0] += shaft
        profile = np.concatenate([outer, [(shaft - sink, end), (shaft - sink, radius)]])
        _prism(spec, body, "handle", profile * (1, side), thickness, density=1000, **solid)
        x, y = _centroid(outer)  # the original's target is the centre of its fourth part: this one without the sink
        target = (x, side * y, 0)
    else:
        neck, radius, depth = shape
        rod("neck", (0, 0, 0), (neck, 0, 0), 0.0135)
        rod("ball", (neck, 0, 0), (neck + depth, 0, 0), radius)
        target = (neck + depth / 2, 0, 0)
    body.add_site(name="knob", pos=target, size=(0.008,) * 3, rgba=(1, 0, 0, 0.5), group=4)


def _joint(body, name, axis, limits, damping, armature, stiffness=0.0, slide=False, pos=(0, 0, 0)) -> None:
    kind = mjtJoint.mjJNT_SLIDE if slide else mjtJoint.mjJNT_HINGE
    joint = body.add_joint(name=name, type=kind, axis=axis, pos=pos, range=limits, armature=armature)
    joint.limited = mujoco.mjtLimited.mjLIMITED_TRUE
    joint.damping[0], joint.stiffness[0] = damping, stiffness


WRIST_GEOM = {"rgba": (0.25, 0.3, 0.4, 1)} | ROBOT
# Profile of the original's wrist: x, radius. Its front is round, which leaves room for the thick end of a handle.
WRIST = ((-0.099, 0.014), (-0.095, 0.028), (-0.082, 0.044), (-0.074, 0.048), (-0.018, 0.048), (0.031, 0.037))


def add_wrist(spec: mujoco.MjSpec, damping: float):
    """Adds a floating wrist with six motors at (1, 0, 1.2): slides along x, y, z, hinges about z, y, x; no geoms."""
    wrist = spec.worldbody.add_body(name="wrist", pos=(1, 0, 1.2))
    anchor = (-0.06416, 0, 0.0053)
    for axis, name in zip(np.eye(3), "xyz", strict=True):
        _joint(wrist, f"slide_{name}", axis, (-3, 3), damping, 1, slide=True, pos=anchor)
    for axis, name, limits in zip(np.eye(3)[::-1], "zyx", ((-1.57, 1.57), (-1.57, 1.57), (0, 3.13)), strict=True):
        _joint(wrist, f"hinge_{name}", axis, limits, damping, 1, pos=anchor)
    wrist.explicitinertial = True
    wrist.mass, wrist.ipos, wrist.inertia = 0.65711, anchor, (5.79e-3, 5.30e-3, 3.42e-3)
    for name in ("slide_x", "slide_y", "slide_z", "hinge_z", "hinge_y", "hinge_x"):
        motor = spec.add_actuator(
            name=name, target=name, trntype=mujoco.mjtTrn.mjTRN_JOINT, ctrlrange=(-1, 1), ctrllimited=True
        )
        motor.gear[0] = 2
    return wrist


GRIP = {"friction": (1, 1, 1), "condim": 3} | ROBOT
# Corners of the original's mesh. The slope makes a mouth of 50 mm that narrows to 37 mm.
HOOK_ARM = np.array([(-0.020, 0), (-0.020, 0.040), (-0.0494, 0.0456), (-0.0565, 0.0385), (-0.0502, 0.019), (-0.030, 0)])


def add_hook(spec: mujoco.MjSpec, damping: float) -> None:
    """Adds a hook: a C of four bars, 10 mm thick, open towards -y. Its finger is the bar farthest from the wrist."""
    wrist = add_wrist(spec, damping)
    rings = [[(x, r * np.cos(a), r * np.sin(a)) for a in np.pi / 6 * np.arange(12)] for x, r in WRIST]
    _hull(spec, wrist, "wrist", np.concatenate(rings), **WRIST_GEOM)
    hook = wrist.add_body(name="hook", pos=(-0.06, -0.02, 0))
    hook.explicitinertial = True
    hook.mass, hook.ipos, hook.inertia = 1e-4, (-0.05, 0.02, 0), (1e-7,) * 3
    color = {"rgba": (0.9, 0.75, 0.1, 1)} | GRIP
    _prism(spec, hook, "hook_arm", HOOK_ARM, 0.01, **color)
    _box(hook, "hook_link", (-0.1006, 0.0385, -0.005), (-0.0494, 0.050, 0.005), **color)
    _box(hook, "hook_tip", (-0.1006, -0.010, -0.005), (-0.080, 0.0015, 0.005), **color)
    finger = hook.add_body(name="finger")
    _box(finger, "hook_finger", (-0.105, -0.0056, -0.005), (-0.0935, 0.0456, 0.005), mass=4.3e-3, **color)
    finger.add_site(name="finger", pos=(-0.0999, 0.020, 0), size=(0.008,) * 3, rgba=(0, 1, 0, 0.5), group=4)


def add_gripper(spec: mujoco.MjSpec) -> None:
    """Adds two fingers of two links each, whose servos turn the inner link in and the outer one back, so that the tips
    stay parallel. In the original these joints lack the defaults of the robot's class: their damping is 1."""
    wrist = add_wrist(spec, 1.0)
    _box(wrist, "wrist", (-0.10, -0.05, -0.05), (0.03, 0.05, 0.05), **WRIST_GEOM)
    color = {"rgba": (0.9, 0.75, 0.1, 1)} | GRIP
    for name, side in (("right", 1), ("left", -1)):
        inner = wrist.add_body(name=f"{name}_inner", pos=(-0.10, side * 0.045, 0))
        outer = inner.add_body(name=f"{name}_outer", pos=(-0.045, 0, 0))
        # 0 is open, 1.05 closed: a positive angle moves a tip towards the other.
        _joint(inner, f"{name}_inner", (0, 0, side), (0, 1.05), 1, 0.01)
        _joint(outer, f"{name}_outer", (0, 0, side), (-1.05, 0), 1, 0.01)
        _box(inner, f"{name}_inner", (-0.045, -0.006, -0.008), (0, 0.006, 0.008), mass=0.01, **color)
        _box(outer, f"{name}_outer", (-0.035, -0.006, -0.008), (0, 0.006, 0.008), mass=0.01, **color)
        outer.add_site(name=f"finger_{name}", pos=(-0.03, 0, 0), size=(0.008,) * 3, rgba=(0, 1, 0, 0.5), group=4)
        for part, limits in (("inner", (0, 1.05)), ("outer", (-1.05, 0))):
            servo = spec.add_actuator(
                name=f"{name}_{part}", target=f"{name}_{part}", trntype=mujoco.mjtTrn.mjTRN_JOINT,
                ctrlrange=limits, ctrllimited=True,
            )  # fmt: skip
            servo.set_to_position(kp=20)
