"""Each transform against NumPy, SciPy or Pillow, on random images."""

import colorsys
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import scipy.ndimage
from PIL import Image
from scipy.signal import correlate

from common import augment
from common.files import UsageError

NAMES = tuple(augment.TRANSFORMS)
KEYS = jax.random.split(jax.random.PRNGKey(3), 48)


def images(count=48, frames=2, seed=0):
    """Smooth in places and noisy in others, as games are."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (count, 8, 8, 3 * frames)).repeat(8, axis=1).repeat(8, axis=2)
    noise = rng.integers(-40, 41, coarse.shape) * (rng.random((count, 64, 64, 1)) < 0.3)
    return (coarse + noise).clip(0, 255).astype(np.uint8)


@functools.cache
def applied(name):
    return jax.jit(lambda keys, x: augment.augment(augment.AugmentArgs(name, 1.0), keys, x))


def transformed(name, count=48):
    before = images(count)
    return before, np.asarray(applied(name)(KEYS[:count], before))


def keys_of(count=48):
    """What each sample's transform is given, when it is the only one."""
    return [jax.random.split(jax.random.fold_in(key, 0))[1] for key in KEYS[:count]]


def places(options, before, after, tolerance=0):
    """For each sample, which of the options {what: function(image)} explains it: exactly one must."""
    found = []
    for x, y in zip(before, after, strict=True):
        errors = {what: np.abs(option(x).astype(int) - y).max() for what, option in options.items()}
        best = min(errors, key=errors.get)
        assert errors[best] <= tolerance, errors[best]
        found.append(best)
    return found


def test_flip_equals_numpy():
    found = places({"across": np.fliplr, "down": np.flipud}, *transformed("flip"))
    assert 10 < found.count("across") < 38


def test_translate_equals_numpy_roll():
    moves = {m: lambda x, m=m: np.roll(x, m, (0, 1)) for m in itertools.product(range(-8, 9), repeat=2)}
    found = np.array(places(moves, *transformed("translate")))
    assert len(np.unique(found, axis=0)) > 35
    assert found.min(axis=0).max() <= -6
    assert found.max(axis=0).min() >= 6
    assert (found.min(), found.max()) == (-8, 8)


def test_pad_crop_equals_numpy_pad():
    def cut(x, down, right):
        return np.pad(x, ((10, 10), (10, 10), (0, 0)), "reflect")[down : down + 64, right : right + 64]

    corners = {c: lambda x, c=c: cut(x, *c) for c in itertools.product(range(21), repeat=2)}
    found = np.array(places(corners, *transformed("pad_crop")))
    assert len(np.unique(found, axis=0)) > 35
    assert found.min(axis=0).max() <= 2
    assert found.max(axis=0).min() >= 18
    assert (found.min(), found.max()) == (0, 20)


def test_crop_resize_equals_pillow():
    """The part is found by the key; Pillow cuts and enlarges it by its own means, which differ in rounding."""
    before, after = transformed("crop_resize")
    sizes = []
    for key, x, y in zip(keys_of(), before, after, strict=True):
        size_key, *keys = jax.random.split(key, 3)
        size = int(jax.random.randint(size_key, (), 48, 65))
        top, left = (int(jax.random.randint(k, (), 0, 65 - size)) for k in keys)
        for frame in (slice(0, 3), slice(3, 6)):
            part = Image.fromarray(x[top : top + size, left : left + size, frame])
            want = np.asarray(part.resize((64, 64), Image.Resampling.BILINEAR))
            assert np.abs(want.astype(int) - y[..., frame]).max() <= 1
        sizes.append((size, top, left))
    sizes = np.array(sizes)
    assert sizes[:, 0].min() <= 50
    assert sizes[:, 0].max() >= 62
    assert sizes[:, 1:].max() >= 8


def test_rotate_equals_scipy():
    before, after = transformed("rotate")
    angles = [float(jax.random.uniform(key, minval=-20, maxval=20)) for key in keys_of()]
    for angle, x, y in zip(angles, before, after, strict=True):
        # SciPy's angle turns the other way round; its grid-constant mixes with black at the border as we do.
        x = np.pad(x.astype(np.float64), ((32, 32), (32, 32), (0, 0)))
        want = scipy.ndimage.rotate(x, -angle, reshape=False, order=1)[32:-32, 32:-32]
        assert np.abs(np.round(want) - y).max() <= 1
    assert min(angles) < -15
    assert max(angles) > 15


def rectangles(name, color):
    """Checks that each sample got one rectangle of color(sample) [3 * frames] and nothing else; returns them."""
    found = []
    for i, (x, y) in enumerate(zip(*transformed(name), strict=True)):
        # A pixel inside may have had the colour before: what spans the changed ones is what was painted.
        rows, columns = np.nonzero((x != y).any(axis=2))
        box = rows.min(), rows.max() + 1, columns.min(), columns.max() + 1
        want = x.copy()
        want[box[0] : box[1], box[2] : box[3]] = color(i, y[box[0], box[2]])
        np.testing.assert_array_equal(y, want)
        found.append(box)
    sides = np.array([(b[1] - b[0], b[3] - b[2]) for b in found])
    assert 9 <= sides.min() <= 13
    assert 27 <= sides.max() <= 30
    assert np.array(found)[:, [0, 2]].min() <= 3
    assert np.array(found)[:, [1, 3]].max() == 64
    return found


def test_cutout_is_a_black_rectangle():
    rectangles("cutout", lambda i, seen: 0)


def test_cutout_color_is_a_rectangle_of_one_color():
    colors = []

    def color(i, seen):
        np.testing.assert_array_equal(seen[:3], seen[3:])
        colors.append(tuple(seen[:3]))
        return seen

    rectangles("cutout_color", color)
    assert len(set(colors)) > 45


def grey(x):
    return x @ np.array([0.299, 0.587, 0.114])


def test_grayscale_equals_pillow():
    for x, y in zip(*transformed("grayscale"), strict=True):
        for frame in (slice(0, 3), slice(3, 6)):
            want = np.asarray(Image.fromarray(x[..., frame]).convert("L"))
            assert np.abs(want[..., None].astype(int) - y[..., frame]).max() <= 1


def test_color_jitter_equals_colorsys():
    before, after = transformed("color_jitter", 6)
    for key, x, y in zip(keys_of(6), before, after, strict=True):
        keys = jax.random.split(key, 4)
        bright, contrast, saturation = (float(jax.random.uniform(k, minval=0.6, maxval=1.4)) for k in keys[:3])
        turn = float(jax.random.uniform(keys[3], minval=-0.5, maxval=0.5))
        mean = grey((x.reshape(64, 64, 2, 3).astype(np.float64) * bright).clip(0, 255)).mean()
        for frame in (slice(0, 3), slice(3, 6)):
            z = (x[..., frame].astype(np.float64) * bright).clip(0, 255)
            z = (mean + contrast * (z - mean)).clip(0, 255)
            z = (grey(z)[..., None] + saturation * (z - grey(z)[..., None])).clip(0, 255)
            want = []
            for pixel in z.reshape(-1, 3) / 255:
                hue, *rest = colorsys.rgb_to_hsv(*pixel)
                want.append(colorsys.hsv_to_rgb((hue + turn) % 1, *rest))
            assert np.abs(np.round(255 * np.array(want)).reshape(64, 64, 3) - y[..., frame]).max() <= 1


def test_random_convolution_equals_scipy():
    kernels = []
    for key, x, y in zip(keys_of(), *transformed("random_convolution"), strict=True):
        kernel = np.asarray(jax.nn.initializers.glorot_normal()(key, (3, 3, 3, 3)), np.float64)
        for frame in (slice(0, 3), slice(3, 6)):
            z = np.pad(x[..., frame] / 255.0, ((1, 1), (1, 1), (0, 0)), "edge")
            total = np.stack([correlate(z, kernel[..., o], "valid")[..., 0] for o in range(3)], axis=2)
            assert np.abs(np.round(255 / (1 + np.exp(-total))) - y[..., frame]).max() <= 1
        kernels.append(kernel)
    assert np.var(kernels) == pytest.approx(2 / (27 + 27), rel=0.2)


@pytest.mark.parametrize("name", NAMES)
def test_every_frame_of_a_stack_is_treated_alike(name):
    one = images(frames=1)
    stack = np.concatenate([one, one, one], axis=3)
    got = np.asarray(applied(name)(KEYS, stack))
    assert got.dtype == np.uint8
    np.testing.assert_array_equal(got[..., :3], got[..., 3:6])
    np.testing.assert_array_equal(got[..., :3], got[..., 6:])
    assert (got != stack).any(axis=(1, 2, 3)).mean() > 0.9


@pytest.mark.optimised
def test_a_sample_depends_on_its_own_key_alone():
    x = images(8)
    run = jax.jit(lambda keys, x: augment.augment(augment.AugmentArgs(",".join(NAMES), 0.5), keys, x))
    together = np.asarray(run(KEYS[:8], x))
    for i in range(8):
        others = np.arange(8) != i
        keys, y = KEYS[8:16].at[i].set(KEYS[i]), np.where(others[:, None, None, None], 255 - x, x)
        np.testing.assert_array_equal(run(keys, y)[i], together[i])


def test_probability_is_that_of_each_transform():
    names, x = "translate,grayscale", images(1).repeat(1000, axis=0)
    args = augment.AugmentArgs(names, 0.3)
    got = np.asarray(augment.augment(args, jax.random.split(jax.random.PRNGKey(0), 1000), x))
    is_grey = (got[..., 0] == got[..., 1]).all(axis=(1, 2))
    moved = (grey(got[..., :3].astype(float)).round() != grey(x[..., :3].astype(float)).round()).mean(axis=(1, 2)) > 0.1
    assert is_grey.mean() == pytest.approx(0.3, abs=0.04)
    assert moved.mean() == pytest.approx(0.3, abs=0.04)
    assert (is_grey & moved).mean() == pytest.approx(0.09, abs=0.03)
    np.testing.assert_array_equal(augment.augment(augment.AugmentArgs(names, 0.0), KEYS, images()), images())
    np.testing.assert_array_equal(augment.augment(augment.AugmentArgs("", 1.0), KEYS, images()), images())


def test_transforms_are_applied_in_order():
    x, key = images(1)[0], jax.random.PRNGKey(7)
    want = x
    for i, name in enumerate(("rotate", "cutout")):
        want = augment.TRANSFORMS[name](jax.random.split(jax.random.fold_in(key, i))[1], want)
    args = augment.AugmentArgs("rotate,cutout", 1.0)
    np.testing.assert_array_equal(augment.augment(args, key[None], x[None])[0], want)


def test_names_are_read():
    assert augment.parse("") == ()
    assert augment.parse("translate, flip") == ("translate", "flip")
    for text, words in {
        "zoom": ["'zoom'", "flip, rotate"],
        "flip,,": ["''"],
        "colour_jitter": ["color_jitter?"],
    }.items():
        with pytest.raises(UsageError) as error:
            augment.parse(text)
        assert all(word in str(error.value) for word in (f"--augment {text}:", *words))
    assert (augment.AugmentArgs().augment_prob, augment.DracArgs().drac_coef) == (0.5, 0.1)  # as published


def test_drac_by_hand():
    rng = np.random.default_rng(0)
    logits, new_logits = rng.normal(size=(2, 5, 15)).astype(np.float32)
    values, new_values = rng.normal(size=(2, 5)).astype(np.float32)
    p, q = (np.stack([oracle.softmax(np.float64(row)) for row in x]) for x in (logits, new_logits))
    want = (p * np.log(p / q)).sum(axis=1) + (values - new_values) ** 2
    np.testing.assert_allclose(augment.drac_loss(logits, values, new_logits, new_values), want, rtol=1e-4)

    def total(*x):
        return augment.drac_loss(*x).sum()

    grads = jax.grad(total, argnums=range(4))(logits, values, new_logits, new_values)
    assert [bool(jnp.any(g != 0)) for g in grads] == [False, False, True, True]
