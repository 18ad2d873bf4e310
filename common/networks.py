"""Image encoders (uint8 frames [B, H, W, C] -> float32 features [B, hidden]) and recurrent cores.

The IMPALA CNN, XResNet, the Nature CNN and a small MobileNetV2, with the same flags in every Procgen script. "The
competition entry" is ttumiel's of 2020 (docs/networks.md). benchmarks/encoders.py measures the encoders' parameters,
arithmetic, memory and time.
"""

import dataclasses
import math
import re
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from annotated_types import Interval

from common import cpu, devices, gpu
from common.derivatives import custom_vjp
from common.files import UsageError, check
from common.flags import Size


@dataclass(frozen=True)
class EncoderArgs:
    """The image encoder."""

    # --resume refuses to change these: one network's parameters make no sense in another, even if their shapes fit.
    FIXED: ClassVar = (
        "encoder", "channels", "width", "blocks", "downsample", "separable", "norm", "conv_bias", "center",
        "init", "activation", "spectral_norm", "pool",
    )  # fmt: skip

    encoder: str = "impala"
    """impala, nature, mobilenet, or an XResNet such as "xresnet:stem,[32,2],[64,1]x4,se,sa2" (docs/networks.md)"""
    channels: str = ""
    """channels of each stage, such as 32,64,64; empty for the encoder's own times width"""
    width: Annotated[int, Interval(ge=1, le=64)] = 2
    """multiplies the encoder's own channels (impala: 16, 32, 32; nature: 32, 64, 64; mobilenet: 8, 12, 16, 32)"""
    blocks: Annotated[int, Interval(ge=0, le=64)] = 2
    """residual blocks in a stage (impala, mobilenet)"""
    downsample: Literal["auto", "maxpool", "stride"] = "auto"
    """max pooling or strided convolutions (impala, xresnet); auto is maxpool in impala and stride in xresnet"""
    separable: Annotated[int, Interval(ge=0, le=16)] = 0
    """depth multiplier of depthwise-separable convolutions; 0 for plain convolutions (impala, xresnet)"""
    norm: Literal["auto", "none", "group"] = "auto"
    """normalisation after each convolution; auto is group (GroupNorm) in mobilenet and none in the others"""
    conv_bias: Literal["auto", "yes", "no"] = "auto"
    """whether convolutions have a bias; auto is yes in impala and nature"""
    center: Literal["auto", "yes", "no"] = "auto"
    """subtract 128 from pixels before scaling, as the competition entry; auto is no in nature and yes in the others"""
    init: Literal["glorot", "orthogonal", "kaiming", "pytorch"] = "glorot"
    """initializer of the encoder's layers; pytorch is PyTorch's default, biases included"""
    activation: Literal["relu", "elu", "gelu", "silu"] = "relu"
    """the encoder's nonlinearity"""
    spectral_norm: bool = False
    """spectral normalisation of the residual blocks' kernels (impala)"""
    pool: Literal["avg", "act_avg", "max", "max6", "flatten"] = "avg"
    """pooling before the dense layer; act_avg: avg after impala's last nonlinearity; max6: adaptive max to 6 x 6"""
    hidden: Size = 256
    """units of the dense layer, and of a recurrent core where there is one"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of the encoder's computation; auto is bfloat16 on an accelerator and float32 on a CPU"""

    def check(self) -> None:
        name = self.encoder.partition(":")[0]
        form = 'give impala, nature, mobilenet or a text such as "xresnet:[32,2],[32,1],[64,2]"'
        check(self.encoder in CHANNELS or self.encoder.startswith("xresnet:"), f"--encoder {self.encoder}: {form}")
        encoders_with = {"channels": CHANNELS, "width": CHANNELS, "blocks": ("impala", "mobilenet")}
        encoders_with |= dict.fromkeys(("downsample", "separable"), ("impala", "xresnet"))
        for flag, encoders in encoders_with.items():
            value, default = getattr(self, flag), getattr(type(self), flag)
            kept = "''" if default == "" else default
            leave = f"only {' and '.join(encoders)} have it, not {name}; leave it at {kept}"
            check(value == default or name in encoders, f"--{flag} {value}: {leave}")
        leave = f"has no effect where --channels gives the channels; leave it at {type(self).width}"
        check(not self.channels or self.width == type(self).width, f"--width {self.width}: {leave}")
        able = name == "impala" and self.blocks and not self.separable
        needs = "--spectral-norm: needs --encoder impala with --blocks 1 or more and --separable 0"
        check(not self.spectral_norm or able, needs)
        leave = f"--pool act_avg: only impala pools before its nonlinearity, not {name}; leave it at avg"
        check(self.pool != "act_avg" or name == "impala", leave)
        make_encoder(self)


CHANNELS = {"impala": (16, 32, 32), "nature": (32, 64, 64), "mobilenet": (8, 12, 16, 32)}
INITS = {
    "glorot": nn.initializers.glorot_uniform(),
    "orthogonal": nn.initializers.orthogonal(math.sqrt(2)),
    "kaiming": nn.initializers.he_normal(),
    "pytorch": nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform"),  # within 1 / sqrt(fan_in)
}


# LAYERS


@custom_vjp
def relu(x: jax.Array) -> jax.Array:
    """max(x, 0), whose gradient reads its output, which the next layer keeps anyway."""
    return jax.nn.relu(x)  # runs without differentiation or in forward mode; its derivative at 0 is 0 too


def _relu_forward(x):
    y = jnp.maximum(x, 0)
    # On a GPU XLA would otherwise keep x instead of y.
    y = y if devices.on_cpu() else jax.lax.optimization_barrier(y)
    return y, y


def _relu_backward(y, g):
    return (jnp.where(y > 0, g, 0),)


relu.defvjp(_relu_forward, _relu_backward)


ACTIVATIONS = {"relu": relu, "elu": nn.elu, "gelu": nn.gelu, "silu": nn.silu}


def max_pool(x: jax.Array) -> jax.Array:
    """3 x 3 max-pool with stride 2, SAME: [B, H, W, C] -> [B, H/2, W/2, C] (rounded up), as `nn.max_pool`."""
    even = x.shape[1] % 2 == x.shape[2] % 2 == 0  # cpu.max_pool needs that; gpu.max_pool is right on any device
    return cpu.max_pool(x) if devices.on_cpu() and even else gpu.max_pool(x)


def adaptive_max_pool(x: jax.Array, size: int) -> jax.Array:
    """PyTorch's AdaptiveMaxPool2d, maxima of size x size parts that may overlap: [B, H, W, C] -> [B, size, size, C]."""
    for axis in (1, 2):
        n = x.shape[axis]
        parts = [(i * n // size, -(-(i + 1) * n // size)) for i in range(size)]
        x = jnp.stack([jax.lax.slice_in_dim(x, *part, axis=axis).max(axis) for part in parts], axis)
    return x


def largest_singular_value(kernel: jax.Array) -> jax.Array:
    """The largest singular value, float32 [], of a kernel [H, W, I, O] as a matrix [H * W * I, O]. As in PyTorch's
    spectral_norm, its gradient takes the singular vectors as constants (Miyato et al. 2018, section 2.3). Power
    iteration keeps no state: each call makes 256 steps, as eight squarings of the Gram matrix."""
    matrix = kernel.reshape(-1, kernel.shape[-1]).astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        power = jax.lax.stop_gradient(matrix)
        power = power.T @ power
        for _ in range(4):  # two squarings after a trace of 1 keep the largest of 64 eigenvalues above 1e-8
            power = power / jnp.maximum(jnp.trace(power), 1e-30)
            power = power @ power
            power = power @ power
        right = power[:, jnp.argmax(jnp.diagonal(power))]
        right = right / jnp.maximum(jnp.linalg.norm(right), 1e-30)
        left = jax.lax.stop_gradient(matrix) @ right
        left = left / jnp.maximum(jnp.linalg.norm(left), 1e-30)
        return left @ matrix @ right


class SpectralConv(nn.Conv):
    """`nn.Conv` by another name, which tells `cast_encoder` whose kernels to divide; `conv` adds the division."""


def spectral(kernel: jax.Array) -> jax.Array:
    """A kernel [H, W, I, O] divided by its largest singular value."""
    return kernel / jnp.maximum(largest_singular_value(kernel), 1e-12).astype(kernel.dtype)


def convolve(x: jax.Array, kernel: jax.Array, strides, padding, **options) -> jax.Array:
    """`lax.conv_general_dilated` in the form that is fast on this device."""
    forms = cpu if devices.on_cpu() else gpu
    return forms.conv_general_dilated(x, kernel, strides, padding, **options)


def spectral_conv(x: jax.Array, kernel: jax.Array, *given, **options) -> jax.Array:
    return convolve(x, spectral(kernel), *given, **options)


def conv(features: int, size: int, stride: int, padding: str, kernel_norm: str = "none", **options) -> nn.Conv:
    """A convolution with a square kernel. `kernel_norm` is "none", "spectral" (divide the kernel by its largest
    singular value) or "divided" (`cast_encoder` has done so)."""
    kind = nn.Conv if kernel_norm == "none" else SpectralConv
    function = spectral_conv if kernel_norm == "spectral" else convolve
    return kind(features, (size, size), stride, padding, conv_general_dilated=function, **options)


@dataclass(frozen=True)
class Layers:
    """The settings of an encoder's layers. Its methods add layers to the module that calls them."""

    separable: int
    group_norm: bool
    bias: bool
    init: str
    activation: str
    residual_norm: str  # of residual blocks' kernels: `kernel_norm` of the module's function `conv`
    pool: str
    hidden: int
    center: bool
    dtype: jnp.dtype

    def pixels(self, frames: jax.Array, scale: float = 255) -> jax.Array:
        """uint8 frames as `dtype`, minus 128 if `center`, divided by `scale`."""
        x = frames.astype(self.dtype)
        return (x - 128) / scale if self.center else x / scale

    def conv(
        self, x: jax.Array, features: int, size: int = 3, stride: int = 1, padding="SAME", depthwise=False,
        kernel_norm="none",
    ) -> jax.Array:  # fmt: skip
        """A convolution [B, H, W, C] -> [B, H', W', features], then GroupNorm if `group_norm`. If `depthwise`,
        `features` is a multiple of C."""
        if self.separable and size > 1 and not depthwise:
            x = self._conv(x, self.separable * x.shape[3], size, stride, padding, groups=x.shape[3], bias=False)
            x = self._conv(x, features, 1, 1, padding)
        else:
            groups = x.shape[3] if depthwise else 1
            x = self._conv(x, features, size, stride, padding, groups=groups, kernel_norm=kernel_norm)
        return nn.GroupNorm(math.gcd(features, 8), dtype=self.dtype)(x) if self.group_norm else x

    def _conv(self, x, features, size, stride, padding, groups=1, bias=True, kernel_norm="none"):
        return conv(
            features, size, stride, padding, kernel_norm,
            feature_group_count=groups, use_bias=bias and self.bias, dtype=self.dtype,
            kernel_init=INITS[self.init], bias_init=self.bias_init(size * size * x.shape[3] // groups),
        )(x)  # fmt: skip

    def dense(self, x: jax.Array, features: int) -> jax.Array:
        bias_init = self.bias_init(x.shape[1])
        return nn.Dense(features, dtype=self.dtype, kernel_init=INITS[self.init], bias_init=bias_init)(x)

    def bias_init(self, fan_in: int) -> nn.initializers.Initializer:
        """Zeros, or uniform within 1 / sqrt(fan_in) as in PyTorch."""
        if self.init != "pytorch":
            return nn.initializers.zeros
        bound = 1 / math.sqrt(fan_in)
        return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)

    def act(self, x: jax.Array) -> jax.Array:
        return ACTIVATIONS[self.activation](x)

    def reduce(self, x: jax.Array) -> jax.Array:
        """[B, H, W, C] to [B, C], flattened [B, H * W * C], or [B, 36 * C] by max6 (a UsageError below 6 x 6)."""
        if self.pool == "act_avg":
            x = self.act(x)
        if self.pool in ("avg", "act_avg"):
            return x.mean(axis=(1, 2), dtype=jnp.float32)
        if self.pool == "max":
            return x.max(axis=(1, 2))
        if self.pool == "max6":
            height, width = x.shape[1:3]
            valid = f"{height} x {width} positions; give one that leaves 6 x 6 or more, or another pool"
            check(min(height, width) >= 6, f"--pool max6: this encoder leaves {valid}")
            x = adaptive_max_pool(x, 6)
        return x.reshape(len(x), -1)

    def head(self, x: jax.Array) -> jax.Array:
        """[B, C] to float32 [B, hidden]: a dense layer and its nonlinearity, unless `hidden` is 0."""
        return (self.act(self.dense(x, self.hidden)) if self.hidden else x).astype(jnp.float32)


# ENCODERS


class ImpalaCNN(nn.Module):
    """The residual network of Espeholt et al. 2018 (IMPALA, figure 3, right). With channels (16, 32, 32), "flatten" and
    no `center` it is train-procgen's; with (32, 64, 64) and "avg" the competition entry's best."""

    layers: Layers
    channels: tuple[int, ...]
    blocks: int
    max_pool: bool

    @nn.compact
    def __call__(self, frames: jax.Array) -> jax.Array:
        act, conv = self.layers.act, self.layers.conv
        residual_conv = partial(conv, kernel_norm=self.layers.residual_norm)
        x = self.layers.pixels(frames)
        for features in self.channels:
            x = max_pool(conv(x, features)) if self.max_pool else conv(x, features, stride=2)
            for _ in range(self.blocks):
                x = x + residual_conv(act(residual_conv(act(x), features)), features)
        x = self.layers.reduce(x)
        return self.layers.head(x if self.layers.pool == "act_avg" else act(x))  # act_avg applied it before


class XResNet(nn.Module):
    """A ResNet with average-pooled shortcuts (He et al. 2019, arXiv 1812.01187, ResNet-D), as the competition entry's.

    `blocks` are (channels, stride), with a stem before them if `stem`, squeeze-and-excitation in all if `squeeze`, and
    self-attention in the last `attention` of them.
    """

    layers: Layers
    blocks: tuple[tuple[int, int], ...]
    stem: bool
    squeeze: bool
    attention: int
    max_pool: bool

    @nn.compact
    def __call__(self, frames: jax.Array) -> jax.Array:
        act, conv = self.layers.act, self.layers.conv
        x = self.layers.pixels(frames, 73.9)  # the standard deviation of uniform bytes, sqrt((256**2 - 1) / 12)
        if self.stem:
            x = max_pool(act(conv(x, self.blocks[0][0])))
        for i, (features, stride) in enumerate(self.blocks):
            by_pool = stride > 1 and self.max_pool
            y = conv(x, features, stride=1 if by_pool else stride)
            y = conv(act(max_pool(y) if by_pool else y), features)
            if self.squeeze:
                y = y * self.squeeze_excitation(y)
            if i >= len(self.blocks) - self.attention:
                y = self.self_attention(y, i)
            shortcut = cpu.avg_pool(x) if stride > 1 else x  # a reshape and a mean, for any device
            if shortcut.shape[3] != features:
                shortcut = conv(shortcut, features, size=1)
            x = act(y + shortcut)
        return self.layers.head(self.layers.reduce(x))

    def squeeze_excitation(self, x: jax.Array, reduction: int = 16) -> jax.Array:
        """The weight of each channel of x [B, H, W, C], [B, 1, 1, C] (Hu et al. 2018, section 3)."""
        few = math.ceil(x.shape[3] / reduction / 8) * 8
        weight = nn.relu(self.layers.dense(x.mean(axis=(1, 2)), few))
        return nn.sigmoid(self.layers.dense(weight, x.shape[3]))[:, None, None]

    def self_attention(self, x: jax.Array, i: int) -> jax.Array:
        """x [B, H, W, C] plus `gain`, which starts at 0, times the attention between its positions (after Zhang et al.
        2019, SAGAN, section 3, with one C x C projection in place of its W_h and W_v)."""
        flat = x.reshape(len(x), -1, x.shape[3])

        def project(features):
            return nn.Dense(features, use_bias=False, dtype=x.dtype, kernel_init=INITS[self.layers.init])(flat)

        few = max(x.shape[3] // 8, 1)
        query, key, value = project(few), project(few), project(x.shape[3])
        weights = nn.softmax(jnp.einsum("bqc,bkc->bqk", query, key).astype(jnp.float32)).astype(x.dtype)
        gain = self.param(f"attention_{i}", nn.initializers.zeros, ())
        return x + gain.astype(x.dtype) * (weights @ value).reshape(x.shape)


class NatureCNN(nn.Module):
    """The network of Mnih et al. 2015 (DQN, Methods)."""

    layers: Layers
    channels: tuple[int, ...]

    @nn.compact
    def __call__(self, frames: jax.Array) -> jax.Array:
        first, second, third = self.channels
        x = self.layers.pixels(frames)
        x = self.layers.act(self.layers.conv(x, first, 8, 4, "VALID"))
        x = self.layers.act(self.layers.conv(x, second, 4, 2, "VALID"))
        x = self.layers.act(self.layers.conv(x, third, 3, 1, "VALID"))
        return self.layers.head(self.layers.reduce(x))


class MobileNet(nn.Module):
    """A convolution with stride 2, then a stage of inverted residual blocks (Sandler et al. 2018, MobileNetV2, section
    3.3) for each of `channels`, all but the first halving the frame, then a 1 x 1 convolution. Expansion is 4, for
    small frames; GroupNorm, since BatchNorm does not suit a policy that acts and learns in different batches."""

    layers: Layers
    channels: tuple[int, ...]
    blocks: int

    @nn.compact
    def __call__(self, frames: jax.Array) -> jax.Array:
        act, conv = self.layers.act, self.layers.conv
        x = self.layers.pixels(frames)
        x = act(conv(x, self.channels[0], stride=2))
        for stage, features in enumerate(self.channels):
            for block in range(self.blocks):
                stride, wide = 2 if stage and not block else 1, 4 * x.shape[3]
                y = act(conv(x, wide, size=1))
                y = conv(act(conv(y, wide, stride=stride, depthwise=True)), features, size=1)
                x = x + y if y.shape == x.shape else y
        return self.layers.head(self.layers.reduce(act(conv(x, 4 * self.channels[-1], size=1))))


def make_encoder(args) -> nn.Module:
    """Makes the encoder of `args` (EncoderArgs); raises UsageError."""
    bfloat16 = args.dtype == "bfloat16" or (args.dtype == "auto" and not devices.on_cpu())
    name = args.encoder.partition(":")[0]

    def on(flag, own):
        return own if flag == "auto" else flag in ("yes", "group")

    layers = Layers(
        separable=args.separable,
        group_norm=on(args.norm, name == "mobilenet"),
        bias=on(args.conv_bias, name in ("impala", "nature")),
        init=args.init,
        activation=args.activation,
        residual_norm="spectral" if args.spectral_norm else "none",
        pool=args.pool,
        hidden=args.hidden,
        center=on(args.center, name != "nature"),
        dtype=jnp.bfloat16 if bfloat16 else jnp.float32,
    )
    max_pool = args.downsample == "maxpool" or (args.downsample == "auto" and name == "impala")
    if name == "xresnet":
        return XResNet(layers, **_parse_xresnet(args.encoder), max_pool=max_pool)
    channels = _parse_channels(args)
    if name == "impala":
        return ImpalaCNN(layers, channels, args.blocks, max_pool)
    return NatureCNN(layers, channels) if name == "nature" else MobileNet(layers, channels, args.blocks)


def _parse_channels(args) -> tuple[int, ...]:
    own = CHANNELS[args.encoder]
    if not args.channels:
        return tuple(args.width * features for features in own)
    words = args.channels.split(",")
    known = all(re.fullmatch(r"\s*\d{1,4}\s*", word, re.ASCII) and 1 <= int(word) <= 4096 for word in words)
    least, most, count = (3, 3, "3") if args.encoder == "nature" else (1, 5, "1 to 5")
    valid = f"give {count} numbers from 1 to 4096, such as {','.join(map(str, own))}"
    check(known and least <= len(words) <= most, f"--channels {args.channels}: {valid}")
    return tuple(map(int, words))


def _parse_xresnet(text: str) -> dict:
    """Parses "xresnet:[channels,stride]xREPEATS,...,stem,se,saK"; raises UsageError."""
    example = 'an example is "xresnet:[32,2],[32,1],[64,2],[64,1]x4,se,sa2"'
    blocks, options, attention = [], [], 0
    words = re.split(r",(?![^\[]*\])", text.removeprefix("xresnet:"))  # at the commas outside of brackets
    for word in (word.strip() for word in words):
        block = re.fullmatch(r"\[(\d{1,4}),\s*([12])\](?:x([1-9]\d?))?", word)
        attend = re.fullmatch(r"sa([1-9]\d?)?", word)
        if block and 1 <= int(block[1]) <= 4096:
            blocks += [(int(block[1]), int(block[2]))] * int(block[3] or 1)
        elif attend or word in ("stem", "se"):
            options.append("sa" if attend else word)
            attention = int(attend[1] or 1) if attend else attention
        else:
            raise UsageError(
                f"--encoder {text}: {word!r} is neither [channels,stride] of 1 to 4096 channels and stride 1 or 2 (and "
                f"x4 for four of them, at most x99) nor stem, se or sa2; {example}"
            )
    check(blocks, f"--encoder {text}: has no blocks; {example}")
    for option in options:
        check(options.count(option) == 1, f"--encoder {text}: has {option!r} twice; {example}")
    stem, squeeze = "stem" in options, "se" in options
    check(len(blocks) <= 256, f"--encoder {text}: has {len(blocks)} blocks; at most 256 make sense")
    check(attention <= len(blocks), f"--encoder {text}: sa{attention} is more than its {len(blocks)} blocks")
    halved = sum(stride == 2 for _, stride in blocks) + stem
    check(halved <= 5, f"--encoder {text}: halves the 64 x 64 frame {halved} times; at most 5 leave 2 x 2 of it")
    return {"blocks": tuple(blocks), "stem": stem, "squeeze": squeeze, "attention": attention}


# PARAMETERS TO ACT WITH
# Once a rollout, not in each step, the learner's float32 parameters are cast to the encoder's dtype, and kernels are
# divided by their spectral norm.


def _encoder_layers(agent: nn.Module) -> Layers | None:
    """The Layers of an agent, None if its parameters need no conversion or its encoder is a custom one."""
    layers = getattr(getattr(agent, "encoder", None), "layers", None)
    if not isinstance(layers, Layers) or (layers.dtype == jnp.float32 and layers.residual_norm == "none"):
        return None
    return layers


def acting_agent(agent: nn.Module) -> nn.Module:
    """The agent for parameters of `acting_params`."""
    layers = _encoder_layers(agent)
    if layers is None or layers.residual_norm == "none":
        return agent
    return agent.clone(encoder=agent.encoder.clone(layers=dataclasses.replace(layers, residual_norm="divided")))


def acting_params(agent: nn.Module, params: dict) -> dict:
    """The learner's parameters, converted for a rollout."""
    layers = _encoder_layers(agent)
    if layers is None:
        return params
    params = cast_encoder(layers, params)
    return params if devices.on_cpu() else jax.device_put(params, gpu.layouts(params))


@partial(jax.jit, static_argnums=0)
def cast_encoder(layers: Layers, params: dict) -> dict:
    """Casts the encoder's convolutions and dense layers to its dtype, as Flax would, and divides the kernels of a
    SpectralConv by their norm; all other parameters (GroupNorm's too) stay."""

    def cast(path, x):
        names = [key.key for key in path]
        if "encoder" not in names or not names[-2].startswith(("Conv", "SpectralConv", "Dense")):
            return x
        divided = spectral(x) if names[-2].startswith("SpectralConv") and names[-1] == "kernel" else x
        return divided.astype(layers.dtype)

    return jax.tree_util.tree_map_with_path(cast, params)


# DROPOUT, RECURRENT CORES, L2


def dropout(x: jax.Array, keys: jax.Array | None, rate: float) -> jax.Array:
    """Dropout of features [B, hidden] with keys uint32 [B, 2], one per sample, so that chunks of a batch do not matter;
    none without keys (acting, evaluation)."""
    if keys is None or not rate:
        return x
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:]))(keys)
    return jnp.where(keep, x / (1 - rate), 0)


HiddenState = tuple[jax.Array, ...]  # float32 [B, hidden]: an LSTM's cell and hidden state, a GRU's state, or nothing


class Recurrent(nn.Module):
    """An LSTM or GRU of `hidden` units; "none" passes its input on."""

    kind: str
    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array, is_first: jax.Array, hidden_state: HiddenState) -> tuple[jax.Array, HiddenState]:
        """Features [B, S, hidden] of S steps, whether each is its episode's first [B, S], and the hidden state before
        them -> features [B, S, hidden] and the hidden state after them."""
        if self.kind == "none":
            return x, hidden_state

        def step(cell, hidden_state, inputs):
            x, is_first = inputs
            hidden_state = jax.tree.map(lambda c: jnp.where(is_first[:, None], 0, c), hidden_state)
            hidden_state, x = cell(hidden_state if self.kind == "lstm" else hidden_state[0], x)
            return hidden_state if self.kind == "lstm" else (hidden_state,), x

        cell = {"lstm": nn.OptimizedLSTMCell, "gru": nn.GRUCell}[self.kind](self.hidden)
        scan = nn.scan(step, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1)
        with jax.default_matmul_precision("highest"):  # in full float32 on a GPU too
            hidden_state, x = scan(cell, hidden_state, (x, is_first))
        return x, hidden_state


def init_hidden_state(kind: str, hidden: int, size: int) -> HiddenState:
    """The hidden state before a first step: zeros float32 [size, hidden], two of an LSTM, one of a GRU."""
    return (jnp.zeros((size, hidden)),) * {"none": 0, "gru": 1, "lstm": 2}[kind]


def add_l2(grads, params, coef: float):
    """`grads` plus the gradient of coef * the squared norm of all 4-dimensional parameters, the convolution kernels."""
    if not coef:
        return grads
    return jax.tree.map(lambda g, w: g + 2 * coef * w if w.ndim == 4 else g, grads, params)
