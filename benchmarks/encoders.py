"""Measures an encoder's parameters, FLOPs, memory and time on this machine.

Without flags it measures the encoders in NAMED; with flags the one that they describe:

    python -m benchmarks.encoders
    python -m benchmarks.encoders --encoder "xresnet:[32,2],[32,1],[64,2],[64,1]x4,se,sa2"
"""

import contextlib
import time
import unittest.mock
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

import ppo_procgen as ppo
from common import devices, gpu, networks, runs
from common.devices import ENV_SHARDED, REPLICATED
from common.networks import EncoderArgs
from experiments import records

IMPALA = EncoderArgs(width=1)
ROUNDS = 5  # timed
BEST = "[32,2],[32,1],[64,2],[64,1]x4"
NAMED = {
    "Nature": EncoderArgs("nature", width=1, pool="flatten", hidden=512),
    "IMPALA, flattened": replace(IMPALA, pool="flatten"),
    "IMPALA": IMPALA,
    "IMPALA, max-pooled": replace(IMPALA, pool="max"),
    "IMPALA, strides": replace(IMPALA, downsample="stride"),
    "IMPALA, GroupNorm": replace(IMPALA, norm="group"),
    "IMPALA 2x (default)": EncoderArgs(),
    "IMPALA 2x, separable": EncoderArgs(separable=1),
    "IMPALA 4x": EncoderArgs(width=4),
    "XResNet": EncoderArgs(f"xresnet:{BEST}"),
    "XResNet, se": EncoderArgs(f"xresnet:{BEST},se"),
    "XResNet, sa2": EncoderArgs(f"xresnet:{BEST},sa2"),
    "XResNet, max-pools": EncoderArgs(f"xresnet:{BEST}", downsample="maxpool"),
    "XResNet, stem": EncoderArgs(f"xresnet:stem,{BEST}"),
    "MobileNetV2": EncoderArgs("mobilenet"),
}


@contextlib.contextmanager
def plain_flax() -> Iterator[None]:
    """Replaces our CPU and GPU layers by Flax's."""
    with (
        unittest.mock.patch.dict(networks.ACTIVATIONS, relu=nn.relu),
        unittest.mock.patch.object(
            gpu, "max_pool", partial(nn.max_pool, window_shape=(3, 3), strides=(2, 2), padding="SAME")
        ),
        unittest.mock.patch.object(devices, "on_cpu", return_value=False),
    ):
        yield


def cost(spec: EncoderArgs, channels: int = 6) -> dict[str, float]:
    """Parameters, and for one frame uint8 [64, 64, channels]: MFLOP of a forward pass (a multiply-add is two) and KiB
    that its gradient keeps of it, in plain Flax without rematerialisation."""
    frames = [jnp.zeros((n, 64, 64, channels), jnp.uint8) for n in (1, 2)]
    encoder = networks.make_encoder(spec)
    with plain_flax(), jax.default_device(jax.devices("cpu")[0]):  # XLA reports no FLOPs for a GPU
        params = jax.eval_shape(encoder.init, jax.random.PRNGKey(0), frames[0])
        flops = jax.jit(encoder.apply).lower(params, frames[1]).cost_analysis()["flops"] / 2  # of two frames

        def kept(frames):
            residuals = jax.eval_shape(lambda p: jax.vjp(lambda p: encoder.apply(p, frames), p)[1], params)
            return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(residuals))

        bytes_kept = kept(frames[1]) - kept(frames[0])
    size = sum(x.size for x in jax.tree.leaves(params))
    return {"parameters": size, "MFLOP": flops / 1e6, "KiB kept": bytes_kept / 1024}


def seconds(spec: EncoderArgs, batch: int = 128, channels: int = 6) -> dict[str, float]:
    """Median seconds per frame of "forward", a forward pass; "gradient", forward and backward pass as in `update`;
    "plain Flax", on a CPU: the gradient with Flax's layers, on one device, the batch in one piece."""
    frames = np.random.default_rng(0).integers(0, 256, (batch, 64, 64, channels), np.uint8)
    encoder = networks.make_encoder(spec)
    params = jax.device_get(jax.jit(encoder.init)(jax.random.PRNGKey(0), frames[:1]))

    def loss(params, frames):
        return {"loss": (encoder.apply(params, frames) ** 2).sum(axis=-1)}

    def forward(params, frames):
        return devices.map_in_chunks(partial(encoder.apply, params), frames)

    def both(params, frames):
        return devices.gradient(loss, params, frames, jnp.ones(len(frames)))[0]

    # As many devices as a script would take.
    mesh = devices.make_mesh(ppo.Args(num_envs=batch, num_steps=1, num_minibatches=1))
    shard_map = partial(jax.shard_map, mesh=mesh, in_specs=(REPLICATED, ENV_SHARDED), check_vma=False)
    on_mesh = jax.device_put((params, frames), devices.shardings(mesh, (REPLICATED, ENV_SHARDED)))
    programs = {
        "forward": (jax.jit(shard_map(forward, out_specs=ENV_SHARDED)), on_mesh),
        "gradient": (jax.jit(shard_map(both, out_specs=REPLICATED)), on_mesh),
    }
    if devices.on_cpu():
        plain = jax.jit(both)
        with plain_flax():
            plain(params, frames)  # compiled here
        programs["plain Flax"] = (plain, (params, frames))
    times = {name: [] for name in programs}
    for i in range(ROUNDS + 1):
        for name, (function, given) in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(function(*given))
            if i > 0:  # the first round compiles
                times[name].append(time.perf_counter() - start)
    return {name: float(np.median(values)) / batch for name, values in times.items()}


@dataclass(frozen=True)
class Args:
    spec: tyro.conf.OmitArgPrefixes[EncoderArgs] = field(default_factory=EncoderArgs)
    csv: str = ""
    """also append the table to this file"""


def main(args: Args) -> None:
    records.make_room(args.csv, "--csv")
    runs.check_flags(args.spec)
    named = NAMED if args.spec == EncoderArgs() else {args.spec.encoder: args.spec}
    rows = []
    table = Table(title=f"one frame of 64 x 64 x 6 on {jax.devices()[0].device_kind}", box=box.SIMPLE)
    for name, one in named.items():
        numbers = cost(one) | {f"{what} ms": 1e3 * value for what, value in seconds(one).items()}
        rows.append({"encoder": name} | {k: f"{x:.3g}" if x < 100 else f"{x:.0f}" for k, x in numbers.items()})
        if not table.columns:
            table.add_column("encoder", no_wrap=True)
            for column in numbers:
                table.add_column(column.replace(" ", "\n"), justify="right", no_wrap=True)
        table.add_row(*rows[-1].values())
        changed = {
            f.name: getattr(one, f.name)
            for f in fields(EncoderArgs)
            if getattr(one, f.name) != getattr(EncoderArgs, f.name)
        }
        rows[-1] |= {"flags": " ".join(runs.as_given(*flag) for flag in changed.items())} | records.origin()
    Console().print(table)
    records.append_rows(args.csv, rows)


if __name__ == "__main__":
    runs.cli(Args, main)
