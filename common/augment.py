"""Random augmentations of stacked frames: the competition entry's five and RAD's.

Each takes a key and one stack uint8 [H, W, 3 * frames], and transforms all of its frames alike. `augment` applies
several, with one key per sample, within the learner's jitted update; no augmented image is stored.

Sources: the competition entry (flip, rotate, crop_resize, translate, pad_crop; docs/networks.md says what differs);
RAD (Laskin et al. 2020, arXiv 2004.14990, section 4); random convolutions by Lee et al. 2020 (arXiv 1910.05396), with
the sigmoid of DMControl-GB (Hansen and Wang 2021, arXiv 2011.13389); DrAC by Raileanu et al. 2020 (arXiv 2006.12862).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from annotated_types import Interval

from common.files import UsageError, check, did_you_mean
from common.flags import NonNegativeFloat, UnitInterval, check_needs

GREY = (0.299, 0.587, 0.114)  # luma of red, green and blue (ITU-R BT.601)


# GEOMETRY


def flip(key: jax.Array, image: jax.Array) -> jax.Array:
    """Flips left to right or upside down, each as likely."""
    return jnp.where(jax.random.bernoulli(key), image[:, ::-1], image[::-1])


def rotate(key: jax.Array, image: jax.Array, degrees: float = 20) -> jax.Array:
    """Rotates by -20 to 20 degrees around the middle, bilinear; the corners are black."""
    angle = jax.random.uniform(key, minval=-degrees, maxval=degrees) * jnp.pi / 180
    height, width = image.shape[:2]
    y, x = jnp.arange(height)[:, None] - (height - 1) / 2, jnp.arange(width) - (width - 1) / 2
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    rows, columns = cos * y - sin * x + (height - 1) / 2, sin * y + cos * x + (width - 1) / 2
    top, left = jnp.floor(rows).astype(jnp.int32), jnp.floor(columns).astype(jnp.int32)
    total = 0.0
    for down in (0, 1):
        for right in (0, 1):
            row, column = top + down, left + right
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            weight = inside * (1 - jnp.abs(rows - row)) * (1 - jnp.abs(columns - column))
            total += weight[..., None] * image[row.clip(0, height - 1), column.clip(0, width - 1)]
    return _to_bytes(total)


def crop_resize(key: jax.Array, image: jax.Array, smallest: int = 48) -> jax.Array:
    """A random square crop of 48 to 64 pixels, bilinearly enlarged to the image's size."""
    size_key, *keys = jax.random.split(key, 3)
    size = jax.random.randint(size_key, (), smallest, image.shape[0] + 1)
    for axis, corner_key in enumerate(keys):
        corner = jax.random.randint(corner_key, (), 0, image.shape[axis] - size + 1)
        place = (jnp.arange(image.shape[axis]) + 0.5) * size / image.shape[axis] - 0.5
        place = place.clip(0, size - 1)  # no pixel from outside the crop
        low = jnp.floor(place).astype(jnp.int32)
        high, part = jnp.minimum(low + 1, size - 1), jnp.expand_dims(place - low, (2, 1 - axis))
        image = (1 - part) * image.take(corner + low, axis) + part * image.take(corner + high, axis)
    return _to_bytes(image)


def translate(key: jax.Array, image: jax.Array, most: int = 8) -> jax.Array:
    """Rolls by -8 to 8 pixels in both directions."""
    down, right = jax.random.randint(key, (2,), -most, most + 1)
    height, width = image.shape[:2]
    return image[(jnp.arange(height) - down) % height][:, (jnp.arange(width) - right) % width]


def pad_crop(key: jax.Array, image: jax.Array, pad: int = 10) -> jax.Array:
    """Pads with a mirrored border of 10 pixels, and crops to the old size at random."""
    places = []
    for size, move in zip(image.shape[:2], jax.random.randint(key, (2,), -pad, pad + 1), strict=True):
        place = jnp.abs(jnp.arange(size) + move)  # the mirror is at the edge pixel, which is not repeated
        places.append(jnp.where(place < size, place, 2 * (size - 1) - place))
    rows, columns = places
    return image[rows][:, columns]


def cutout(key: jax.Array, image: jax.Array) -> jax.Array:
    """Blackens a random rectangle with sides of 10 to 30 pixels."""
    return jnp.where(_rectangle(key, image.shape), jnp.uint8(0), image)


def cutout_color(key: jax.Array, image: jax.Array) -> jax.Array:
    """`cutout` in a random colour."""
    place_key, color_key = jax.random.split(key)
    color = jax.random.randint(color_key, (3,), 0, 256).astype(jnp.uint8)
    return jnp.where(_rectangle(place_key, image.shape), jnp.tile(color, image.shape[2] // 3), image)


# COLOUR


def color_jitter(key: jax.Array, image: jax.Array, most: float = 0.4, hue: float = 0.5) -> jax.Array:
    """Brightness, contrast around the stack's mean and saturation times 0.6 to 1.4; hue turned by up to half a turn."""
    keys = jax.random.split(key, 4)
    brightness, contrast, saturation = (jax.random.uniform(k, minval=1 - most, maxval=1 + most) for k in keys[:3])
    x = jnp.clip(_colors(image) * brightness, 0, 255)
    mean = (x @ jnp.array(GREY)).mean()
    x = jnp.clip(mean + contrast * (x - mean), 0, 255)
    grey = (x @ jnp.array(GREY))[..., None]
    x = jnp.clip(grey + saturation * (x - grey), 0, 255)
    return _to_bytes(_turn_hue(x, jax.random.uniform(keys[3], minval=-hue, maxval=hue))).reshape(image.shape)


def grayscale(key: jax.Array, image: jax.Array) -> jax.Array:
    """Removes the colours; the key is unused."""
    grey = (_colors(image) @ jnp.array(GREY))[..., None]
    return _to_bytes(jnp.broadcast_to(grey, (*grey.shape[:-1], 3))).reshape(image.shape)


def random_convolution(key: jax.Array, image: jax.Array) -> jax.Array:
    """A random 3 x 3 convolution of the colours (Glorot normal, edge padding), then a sigmoid."""
    kernel = jax.nn.initializers.glorot_normal()(key, (3, 3, 3, 3))
    x = jnp.pad(_colors(image) / 255, ((1, 1), (1, 1), (0, 0), (0, 0)), mode="edge")
    height, width = image.shape[:2]
    total = sum(x[i : i + height, j : j + width] @ kernel[i, j] for i in range(3) for j in range(3))
    return _to_bytes(255 * jax.nn.sigmoid(total)).reshape(image.shape)


TRANSFORMS: dict[str, Callable] = {
    transform.__name__: transform
    for transform in (
        flip, rotate, crop_resize, translate, pad_crop, cutout, cutout_color, color_jitter, grayscale,
        random_convolution,
    )
}  # fmt: skip


# USE


@dataclass(frozen=True)
class AugmentArgs:
    """Image augmentation and dropout."""

    augment: str = ""
    """augmentations of the learner's frames, such as translate,flip (--augment help lists them)"""
    augment_prob: UnitInterval = 0.5
    """probability of each augmentation, per sample"""
    dropout: Annotated[float, Interval(ge=0, le=0.99)] = 0.0
    """dropout rate of the encoder's outputs in the learner"""

    def check(self) -> None:
        parse(self.augment)
        check_needs(self, self.augment, "--augment", ("augment_prob",))


@dataclass(frozen=True)
class DracArgs:
    """The use of augmented frames in the loss."""

    augment_mode: Literal["rad", "drac"] = "rad"
    """with --augment: rad learns from augmented frames; drac from plain ones, regularised by the augmented"""
    drac_coef: NonNegativeFloat = 0.1
    """coefficient of DrAC's regularisation terms"""

    def check(self) -> None:
        check_needs(self, self.augment, "--augment", ("augment_mode", "drac_coef"))
        check_needs(self, self.augment_mode == "drac", "--augment-mode drac", ("drac_coef",))


def parse(text: str) -> tuple[str, ...]:
    """Parses --augment, such as "translate,flip"; raises UsageError."""
    names = tuple(name.strip() for name in text.split(",")) if text else ()
    for name in names:
        if name not in TRANSFORMS:
            hint = did_you_mean(name, TRANSFORMS) or f"; give some of {', '.join(TRANSFORMS)}"
            raise UsageError(f"--augment {text}: {name!r} is no augmentation{hint}")
    check(len(set(names)) == len(names), f"--augment {text}: give each of them once")
    return names


def augment(args: Any, keys: jax.Array, images: jax.Array) -> jax.Array:
    """Applies the transforms of `--augment` in order, each to each sample with probability `--augment-prob`.

    Args:
      keys: uint32 [B, 2].
      images: uint8 [B, H, W, 3 * frames], H = W = 64 for the published ranges.

    Returns uint8 of the same shape.
    """

    def one(key, image):
        for i, name in enumerate(parse(args.augment)):
            use_key, transform_key = jax.random.split(jax.random.fold_in(key, i))
            changed = TRANSFORMS[name](transform_key, image)
            image = jnp.where(jax.random.bernoulli(use_key, args.augment_prob), changed, image)
        return image

    return jax.vmap(one)(keys, images)


def drac_loss(logits: jax.Array, values: jax.Array, new_logits: jax.Array, new_values: jax.Array) -> jax.Array:
    """DrAC's regulariser G_pi + G_V, float32 [...] (Raileanu et al. 2020, equations 4 and 5): pulls logits (or
    log-probabilities) [..., A] and values [...] of augmented frames (`new_*`) towards those of the plain frames, which
    are constants."""
    logits, values = jax.lax.stop_gradient((logits, values))
    log_probs, new_log_probs = jax.nn.log_softmax(logits), jax.nn.log_softmax(new_logits)
    kl = (jnp.exp(log_probs) * (log_probs - new_log_probs)).sum(axis=-1)
    return kl + (new_values - values) ** 2


# HELPERS


def _to_bytes(x):
    return jnp.round(jnp.clip(x, 0, 255)).astype(jnp.uint8)


def _colors(image):
    """uint8 [H, W, 3 * frames] to float32 [H, W, frames, 3]."""
    return image.reshape(*image.shape[:2], -1, 3).astype(jnp.float32)


def _rectangle(key, shape, smallest=10, largest=30):
    """Whether a pixel lies in a random rectangle, bool [H, W, 1]."""
    inside = []
    for size, one in zip(shape[:2], jax.random.split(key), strict=True):
        side_key, corner_key = jax.random.split(one)
        side = jax.random.randint(side_key, (), smallest, largest + 1)
        corner = jax.random.randint(corner_key, (), 0, size - side + 1)
        inside.append((jnp.arange(size) >= corner) & (jnp.arange(size) < corner + side))
    return (inside[0][:, None] & inside[1])[..., None]


def _turn_hue(x, turns):
    """Colours float32 [..., 3] from 0 to 255 with their hue turned, saturation and value kept."""
    high, low = x.max(axis=-1), x.min(axis=-1)
    spread = jnp.maximum(high - low, 1e-6)
    red, green, blue = x[..., 0], x[..., 1], x[..., 2]
    # Not `high == red`: XLA may compute a colour anew for each use, and round differently.
    sixth = jnp.where(
        (red >= green) & (red >= blue),
        (green - blue) / spread,
        jnp.where(green >= blue, 2 + (blue - red) / spread, 4 + (red - green) / spread),
    )
    # Smith 1978: each colour is a trapezium as a function of hue, shifted by its start.
    start = jnp.array([5.0, 3.0, 1.0]) + (sixth + 6 * turns)[..., None]
    wave = jnp.clip(jnp.minimum(start % 6, 4 - start % 6), 0, 1)
    return high[..., None] - (high - low)[..., None] * wave
