"""What a compiled program launches on a GPU, read from its text: kernels, the bytes they move and their FLOPs.

Optimised HLO is a list of computations. The instructions of the entry, and of the loops and branches that it reaches,
are launched one after another; one that is called a fusion is a whole computation in one kernel. For a GPU that is not
there XLA gives no costs (`cost_analysis()` is None), so they are counted here: FLOPs of convolutions and matrix
products (a multiply-add is two), and bytes that must come from memory or go there, once for each array and kernel.
"""

import math
import re
from typing import NamedTuple

BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8,
    "u64": 8, "f64": 8, "c64": 8,
}  # fmt: skip
NOT_LAUNCHED = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "partition-id",
    "replica-id",
}  # fmt: skip
PARTLY_READ = {"dynamic-slice", "slice", "gather"}  # of their first operand
PARTLY_WRITTEN = {"dynamic-update-slice": 1, "scatter": 2}  # in place; the operand from which on new values come
COLLECTIVES = {
    "all-reduce", "all-gather", "all-to-all", "ragged-all-to-all", "reduce-scatter", "collective-permute",
    "collective-broadcast",
}  # fmt: skip
RENAMED = {"bitcast", "reshape", "tuple"}
COPIES = {"parameter", "constant", "convert", "copy", "transpose", *RENAMED}


class Array(NamedTuple):
    """A dtype as XLA writes it, and dimensions."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return BYTES[self.dtype] * math.prod(self.dims)


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    op: str
    arrays: tuple[Array, ...]  # that it makes
    operands: tuple[str, ...]  # names of instructions
    attributes: str
    root: bool

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)

    def attribute(self, pattern: str) -> str:
        """The first group of a pattern in the attributes, or nothing."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""

    def numbers(self, name: str) -> tuple[int, ...]:
        """Of an attribute such as lhs_contracting_dims={1,2}."""
        return tuple(int(word) for word in self.attribute(name + r"=\{([\d,]*)\}").split(",") if word)

    @property
    def target(self) -> str:
        """The library function of a custom call."""
        return self.attribute(r'custom_call_target="([^"]*)"')

    @property
    def collective(self) -> str:
        """What GPUs do together in it, such as all-reduce, or nothing."""
        op = self.op.removesuffix("-start")
        return op if op in COLLECTIVES else ""

    @property
    def calls(self) -> str:
        """The computation of a fusion, or the one that a call goes to."""
        return self.attribute(r"(?:calls|to_apply)=%([\w.\-]+)")


Computation = dict[str, Instruction]


class Kernel(NamedTuple):
    """Something that is launched."""

    instruction: Instruction
    kind: str  # in a word or two
    times: int  # in one run of the program
    bytes: int  # each time, of this GPU's memory
    flops: int  # each time
    arithmetic: str  # of these FLOPs: bf16, tf32 or f32
    shared: int = 0  # bytes each time of the arrays that this GPU gives to a collective; they are not in `bytes`

    @property
    def where(self) -> str:
        """JAX's name of what it computes."""
        return self.instruction.attribute(r'op_name="([^"]*)"')


def _arrays(text: str) -> tuple[Array, ...]:
    """Of a shape's text, such as (f32[3,4]{1,0}, u8[0]{0})."""
    found = re.findall(r"(\w+)\[([\d,]*)\]", text)
    return tuple(Array(dtype, tuple(map(int, dims.split(","))) if dims else ()) for dtype, dims in found)


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` closes."""
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if not depth:
            return i
    raise ValueError(f"a bracket does not close: {text}")


def _instruction(line: str) -> Instruction:
    line = re.sub(r"/\*.*?\*/", "", line).strip()
    name, text = line.removeprefix("ROOT ").split(" = ", 1)
    end = _closing(text, 0) + 1 if text[0] == "(" else text.index(" ")
    shape, text = text[:end], text[end:].strip()
    start = text.index("(")
    end = _closing(text, start)
    return Instruction(
        name=name.removeprefix("%"),
        op=text[:start],
        arrays=tuple(array for array in _arrays(shape) if array.dtype in BYTES),
        operands=tuple(re.findall(r"%([\w.\-]+)", text[start:end])),
        attributes=text[end + 1 :],
        root=line.startswith("ROOT "),
    )


class Program:
    """A program from its text, `compiled.as_text()`."""

    def __init__(self, text: str):
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        current = None
        for line in text.splitlines():
            header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line)
            if header:
                current = self.computations.setdefault(header[2], {})
                self.entry = header[2] if header[1] else self.entry
            elif line.startswith("}"):
                current = None
            elif current is not None and " = " in line:
                one = _instruction(line)
                current[one.name] = one

    def kernels(self) -> list[Kernel]:
        """All that is launched, once for each place in the text: see `Kernel.times`."""
        return self._kernels(self.entry, 1)

    def _kernels(self, computation: str, times: int) -> list[Kernel]:
        launched = []
        for x in self.computations[computation].values():
            if x.op == "while":
                trips = int(x.attribute(r'"known_trip_count":\{"n":"(\d+)"') or 1)  # 1 where only a run can tell
                launched += self._kernels(x.attribute(r"body=%([\w.\-]+)"), times * trips)
            elif x.op == "conditional":  # one branch is taken: the longest is counted
                launched += max((self._kernels(branch, times) for branch in _branches(x)), key=len)
            elif x.op == "call":
                launched += self._kernels(x.calls, times)
            elif x.op not in NOT_LAUNCHED and not x.op.endswith("-done"):  # which waits for what "-start" launched
                launched.append(self._kernel(x, self.computations[computation], times))
        return launched

    def _kernel(self, x: Instruction, around: Computation, times: int) -> Kernel:
        if x.collective:
            shared = sum(around[name].bytes for name in x.operands)
            return Kernel(x, x.collective, times, 0, 0, "f32", shared)
        body = self.computations[x.calls] if x.op == "fusion" else None
        flops, arithmetic = self._flops(x, around)
        moved = _fused_bytes(body) if body else _bytes(x, around)
        return Kernel(x, _kind(x, body), times, moved, flops, arithmetic)

    def _flops(self, x: Instruction, around: Computation) -> tuple[int, str]:
        """FLOPs, and in which arithmetic."""
        if x.op == "fusion":
            inside = self.computations[x.calls]
            counted = [self._flops(y, inside) for y in inside.values()]
            return sum(flops for flops, _ in counted), next((how for flops, how in counted if flops), "f32")
        operands = [around[name].arrays for name in x.operands]
        if x.op == "dot":
            return _dot_flops(operands[0][0], x.arrays[0], x.numbers("lhs_contracting_dims")), _arithmetic(x, operands)
        if x.target.startswith("__cublas"):
            dims = x.attribute(r'"lhs_contracting_dimensions":\[([^\]]*)\]').replace('"', "")
            dims = tuple(int(word) for word in dims.split(",") if word)
            return _dot_flops(operands[0][0], x.arrays[0], dims), _arithmetic(x, operands)
        if x.target.startswith("__cudnn$conv"):
            return _conv_flops(x, operands), _arithmetic(x, operands)
        return 0, "f32"


def _branches(x: Instruction) -> list[str]:
    named = re.findall(r"(?:true|false)_computation=%([\w.\-]+)", x.attributes)
    return named or re.findall(r"%([\w.\-]+)", x.attribute(r"branch_computations=\{([^}]*)\}"))


def _arithmetic(x: Instruction, operands: list[tuple[Array, ...]]) -> str:
    """bf16; of float32 operands tf32 or, where full precision was asked for, f32."""
    if operands[0][0].dtype in ("bf16", "f16"):
        return "bf16"
    return "f32" if "highest" in x.attributes.lower() else "tf32"


def _dot_flops(left: Array, product: Array, contracted: tuple[int, ...]) -> int:
    return 2 * math.prod(product.dims) * math.prod(left.dims[i] for i in contracted)


def _conv_flops(x: Instruction, operands: list[tuple[Array, ...]]) -> int:
    """Of cuDNN's convolution or one of its gradients: inputs of each output times outputs, in every direction."""
    result, (first, *_), (second, *_) = x.arrays[0], *operands[:2]
    if "BackwardFilter" in x.target:
        kernel, output = result, second
    elif "BackwardInput" in x.target:
        kernel, output = second, first
    else:
        kernel, output = second, result
    letters = x.attribute(r"dim_labels=\w+?_(\w+)->")
    inputs = math.prod(n for n, letter in zip(kernel.dims, letters, strict=True) if letter != "o")
    return 2 * math.prod(output.dims) * inputs


def _kind(x: Instruction, body: Computation | None) -> str:
    if x.target or not body:
        return x.target or x.op
    ops = {y.op for y in body.values()}
    for op in ("scatter", "select-and-scatter", "sort", "dot", "gather", "reduce-window"):
        if op in ops:
            return f"{op} fusion"
    if ops <= COPIES:
        return "copy fusion"
    return "reduce fusion" if "reduce" in ops else "loop fusion"


def _bytes(x: Instruction, around: Computation) -> int:
    """Bytes read and written by an instruction that is a kernel of its own."""
    if x.op in PARTLY_WRITTEN:
        return 2 * sum(around[name].bytes for name in x.operands[PARTLY_WRITTEN[x.op] :])
    if x.op in PARTLY_READ:
        return 2 * x.bytes
    return x.bytes + sum(around[name].bytes for name in x.operands)


def _fused_bytes(body: Computation) -> int:
    """Bytes read and written by a fusion: of what is sliced or updated in place only that part."""
    users: dict[str, list[tuple[Instruction, int]]] = {name: [] for name in body}
    for y in body.values():
        for i, name in enumerate(y.operands):
            users[name].append((y, i))

    def read(name: str) -> int:
        whole, total = body[name].bytes, 0
        for y, i in users[name]:
            if y.op in PARTLY_READ and i == 0:
                total += y.bytes
            elif y.op in RENAMED and y.op != "tuple" and not y.root:
                total += read(y.name)
            elif y.op not in PARTLY_WRITTEN or i > 0:
                total += whole
        return min(total, whole)

    def written(y: Instruction) -> int:
        if y.op in RENAMED:
            return sum(written(body[name]) for name in y.operands)
        if y.op == "dynamic-update-slice":
            return body[y.operands[1]].bytes
        if y.op == "scatter":  # atomics: each place is read and written
            return 2 * sum(body[name].bytes for name in y.operands[2:])
        return y.bytes

    reads = sum(read(y.name) for y in body.values() if y.op == "parameter")
    return reads + sum(written(y) for y in body.values() if y.root)
