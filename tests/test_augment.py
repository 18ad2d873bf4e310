"""Each transform against NumPy, SciPy or Pillow, on random images."""

import colorsys
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


def transformed(name, count=48):
    """Keys that the transform is given when it is the only one, and images before and after it."""
    keys, before = [jax.random.split(jax.random.fold_in(key, 0))[1] for key in KEYS[:count]], images(count)
    run = jax.jit(lambda keys, x: augment.augment(augment.AugmentArgs(name, 1.0), keys, x))
    after = np.asarray(run(KEYS[:count], before))
    assert (after.dtype, after.shape) == (np.uint8, before.shape)
    return keys, before, after


def assert_rounded(got, want):
    """Within 1: roundings differ."""
    assert np.abs(np.round(want).astype(int) - got).max() <= 1


def each_frame(x):
    return x[..., :3], x[..., 3:]


def mirror_cut(x, down, right):
    return np.pad(x, ((10, 10), (10, 10), (0, 0)), "reflect")[down : down + 64, right : right + 64]


@pytest.mark.parametrize(("name", "move", "places"), [
    ("flip", lambda x, axis: np.flip(x, axis), [(0,), (1,)]),
    ("translate", lambda x, *by: np.roll(x, by, (0, 1)), list(itertools.product(range(-8, 9), repeat=2))),
    ("pad_crop", mirror_cut, list(itertools.product(range(21), repeat=2))),
])  # fmt: skip
def test_transform_that_moves_pixels_equals_numpy_at_places_drawn_evenly(name, move, places):
    found = []
    for x, y in zip(*transformed(name)[1:], strict=True):
        (place,) = (place for place in places if np.array_equal(move(x, *place), y))
        found.append(place)
    lowest, highest = min(min(places)), max(max(places))
    assert (np.min(found), np.max(found)) == (lowest, highest)
    assert len(set(found)) >= min(len(places), 36)
    for axis in np.transpose(found):
        assert axis.min() <= lowest + 2
        assert axis.max() >= highest - 2
        assert abs(axis.mean() - (lowest + highest) / 2) < 0.3 * (highest - lowest)


def test_crop_resize_equals_pillow():
    """The part is found by the key; Pillow cuts and enlarges it by its own means."""
    parts = []
    for key, x, y in zip(*transformed("crop_resize"), strict=True):
        size_key, *keys = jax.random.split(key, 3)
        size = int(jax.random.randint(size_key, (), 48, 65))
        top, left = (int(jax.random.randint(k, (), 0, 65 - size)) for k in keys)
        for before, after in zip(each_frame(x), each_frame(y), strict=True):
            part = Image.fromarray(before[top : top + size, left : left + size])
            assert_rounded(after, np.asarray(part.resize((64, 64), Image.Resampling.BILINEAR)))
        parts.append((size, top, left))
    (size, *corner), (largest, *farthest) = np.min(parts, axis=0), np.max(parts, axis=0)
    assert size <= 50 < 62 <= largest
    assert max(corner) == 0 < 8 <= min(farthest)


def test_rotate_equals_scipy():
    keys, before, after = transformed("rotate")
    angles = [float(jax.random.uniform(key, minval=-20, maxval=20)) for key in keys]
    for angle, x, y in zip(angles, before, after, strict=True):
        # SciPy's angle turns the other way round; its grid-constant mixes with black at the border as we do.
        x = np.pad(x.astype(np.float64), ((32, 32), (32, 32), (0, 0)))
        assert_rounded(y, scipy.ndimage.rotate(x, -angle, reshape=False, order=1)[32:-32, 32:-32])
    assert min(angles) < -15 < 15 < max(angles)


@pytest.mark.parametrize("name", ["cutout", "cutout_color"])
def test_cutout_is_one_rectangle_of_black_or_one_color(name):
    boxes, colors = [], []
    for x, y in zip(*transformed(name)[1:], strict=True):
        # A pixel inside may have had the colour before: what spans the changed ones is what was painted.
        rows, columns = np.nonzero((x != y).any(axis=2))
        box = slice(rows.min(), rows.max() + 1), slice(columns.min(), columns.max() + 1)
        color, want = y[box][0, 0], x.copy()
        want[box] = color
        np.testing.assert_array_equal(y, want)
        np.testing.assert_array_equal(*each_frame(color))
        boxes.append([(side.start, side.stop) for side in box])
        colors.append(tuple(color))
    sides = np.diff(boxes)
    assert 9 <= sides.min() <= 13
    assert 27 <= sides.max() <= 30
    assert (np.min(boxes, axis=(0, 2)) <= 3).all()
    assert np.max(boxes) == 64
    assert set(colors) == {(0,) * 6} if name == "cutout" else len(set(colors)) > 45


def grey(x):
    return x @ np.array([0.299, 0.587, 0.114])


def test_grayscale_equals_pillow():
    for x, y in zip(*transformed("grayscale")[1:], strict=True):
        for before, after in zip(each_frame(x), each_frame(y), strict=True):
            assert_rounded(after, np.asarray(Image.fromarray(before).convert("L"))[..., None])


def test_color_jitter_equals_colorsys():
    for key, x, y in zip(*transformed("color_jitter", 6), strict=True):
        keys = jax.random.split(key, 4)
        bright, contrast, saturation = (float(jax.random.uniform(k, minval=0.6, maxval=1.4)) for k in keys[:3])
        turn = float(jax.random.uniform(keys[3], minval=-0.5, maxval=0.5))
        mean = grey((x.reshape(64, 64, 2, 3).astype(np.float64) * bright).clip(0, 255)).mean()
        for before, after in zip(each_frame(x), each_frame(y), strict=True):
            z = (before.astype(np.float64) * bright).clip(0, 255)
            z = (mean + contrast * (z - mean)).clip(0, 255)
            z = (grey(z)[..., None] + saturation * (z - grey(z)[..., None])).clip(0, 255)
            pixels = (colorsys.rgb_to_hsv(*pixel) for pixel in z.reshape(-1, 3) / 255)
            want = [colorsys.hsv_to_rgb((hue + turn) % 1, *rest) for hue, *rest in pixels]
            assert_rounded(after, 255 * np.reshape(want, (64, 64, 3)))


def test_random_convolution_equals_scipy():
    kernels = []
    for key, x, y in zip(*transformed("random_convolution"), strict=True):
        kernel = np.asarray(jax.nn.initializers.glorot_normal()(key, (3, 3, 3, 3)), np.float64)
        for before, after in zip(each_frame(x), each_frame(y), strict=True):
            z = np.pad(before / 255.0, ((1, 1), (1, 1), (0, 0)), "edge")
            total = np.stack([correlate(z, kernel[..., o], "valid")[..., 0] for o in range(3)], axis=2)
            assert_rounded(after, 255 / (1 + np.exp(-total)))
        kernels.append(kernel)
    assert np.var(kernels) == pytest.approx(2 / (27 + 27), rel=0.2)


# ALL OF THEM


@pytest.mark.optimised
def test_augment_beside_other_samples_depends_on_own_key_alone():
    x = images(8)
    run = jax.jit(lambda keys, x: augment.augment(augment.AugmentArgs(",".join(NAMES), 0.5), keys, x))
    together = np.asarray(run(KEYS[:8], x))
    for i in range(8):
        others = np.arange(8) != i
        keys, y = KEYS[8:16].at[i].set(KEYS[i]), np.where(others[:, None, None, None], 255 - x, x)
        np.testing.assert_array_equal(run(keys, y)[i], together[i])


def test_augment_with_probability_applies_each_transform_so_often():
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


def test_augment_with_two_transforms_applies_them_in_order_with_keys_of_their_own():
    x, key = images(1)[0], jax.random.PRNGKey(7)
    want = x
    for i, name in enumerate(("rotate", "cutout")):
        want = augment.TRANSFORMS[name](jax.random.split(jax.random.fold_in(key, i))[1], want)
    args = augment.AugmentArgs("rotate,cutout", 1.0)
    np.testing.assert_array_equal(augment.augment(args, key[None], x[None])[0], want)


def test_names_of_augment_flag_are_read_or_answered_in_one_sentence():
    assert augment.parse("") == ()
    assert augment.parse("translate, flip") == ("translate", "flip")
    for text, words in {
        "zoom": "'zoom' is no .*flip, rotate",
        "flip,,": "''",
        "colour_jitter": r"color_jitter\?",
    }.items():
        with pytest.raises(UsageError, match=f"--augment {text}: .*{words}"):
            augment.parse(text)
    assert (augment.AugmentArgs().augment_prob, augment.DracArgs().drac_coef) == (0.5, 0.1)  # as published


def test_drac_loss_of_two_outputs_equals_sums_by_hand_with_constant_first():
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
