"""The rows of a report: a buffer at the peak, and a step of the schedule."""

import re
from dataclasses import dataclass
from typing import Literal

from jaxmem._module_path import of_user, ops_in

Kind = Literal["argument", "output", "temp"]

FRAGMENTATION = "fragmentation"
OTHERS = "others"

_DTYPES = {
    "pred": "bool",
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "c64": "complex64",
    "c128": "complex128",
}
_SHORT = {"bool": "bool", "bfloat16": "bf16", "complex64": "c64", "complex128": "c128"}
# opcodes that say more than the name of the JAX operation
_TELLING = ("dot", "convolution", "custom-call", "copy", "sort")
_SIZED = {"float": "f", "int": "i", "uint": "u"}


@dataclass(frozen=True)
class PeakBuffer:
    """A buffer that is alive at the peak.

    Attributes:
        bytes: its bytes on one device, padding to tiles included.
        kind: `"argument"`, `"output"` or `"temp"`.
        name: the argument's or output's name; for a temporary, XLA's name of the value.
        shape: its dimensions. A loop's residuals are one buffer with the loop's length
            in front.
        dtype: `"bfloat16"` and the like.
        operation: the JAX operation that computes it (`"dot_general"`,
            `"softmax/exp"`). `"fragmentation"` stands for the bytes of the temporaries
            that no value fills at the peak, `"others"` for all buffers too small for a
            row of their own.
        opcode: XLA's operation.
        module_path: the modules that compute it (`"Bert/layers/attention/query"`).
        function: the Python function that computes it; a script's file name outside of
            functions.
        source: `file:line` of the innermost line outside installed libraries.
        backward: whether the backward pass computes it.
        padding: of `bytes`, those that no element fills. A TPU keeps arrays in tiles,
            and fills up the last tile of an axis; elsewhere it is 0.
        layout: the order of the axes and the tiles, as XLA writes them
            (`"{1,0:T(8,128)}"`); empty where there are no tiles.
    """

    bytes: int
    kind: Kind
    name: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    operation: str = ""
    opcode: str = ""
    module_path: str = ""
    function: str = ""
    source: str = ""
    backward: bool = False
    padding: int = 0
    layout: str = ""

    @property
    def unpadded_bytes(self) -> int:
        """The bytes of its elements alone."""
        return self.bytes - self.padding

    @property
    def group(self) -> str:
        """The label of its group: module path, else function, else the kind."""
        if self.kind != "temp":
            return f"({self.kind}s)"
        return group_of(self.module_path, self.function, self.operation)

    @property
    def array(self) -> str:
        """The type as JAX prints it: `bf16[24,8,512]`."""
        if not self.dtype:
            return ""
        return f"{short_dtype(self.dtype)}[{','.join(map(str, self.shape))}]"

    @property
    def what(self) -> str:
        """The operation in one or two words, or the argument's name."""
        if self.kind != "temp":
            return self.name or self.operation
        return operation_of(self.module_path, self.operation, self.opcode)


@dataclass(frozen=True)
class PlacedBuffer:
    """One of the larger temporaries: its place in memory, and when it is alive.

    Attributes:
        bytes: its size on one device.
        offset: bytes from the start of the temporaries to its own.
        start: the step of the schedule that writes it.
        end: the last step that needs it.
        array: its type as JAX prints it: `bf16[24,8,512]`.
        what: the operation that computes it.
        module: the label of its module, as in `ScheduleStep.by_module`.
        source: `file:line` of the innermost line outside installed libraries.
        name: XLA's name of the value.
    """

    bytes: int
    offset: int
    start: int
    end: int
    array: str
    what: str
    module: str
    source: str
    name: str


@dataclass(frozen=True)
class ScheduleStep:
    """Live bytes at one step of the compiled schedule.

    Attributes:
        index: its place in the schedule, loop bodies written out once.
        label: the operation that runs, with its module path.
        bytes: live bytes, arguments and outputs included.
        by_module: (module path, bytes) pairs that add up to `bytes`, largest first.
    """

    index: int
    label: str
    bytes: int
    by_module: tuple[tuple[str, int], ...]


def group_of(module_path: str, function: str, operation: str) -> str:
    """The user's modules; the user's function where there are none."""
    if operation in (FRAGMENTATION, OTHERS):
        return f"({operation})"
    if operation.startswith(("copy of ", "cast of ", "slice of ")):
        return "(copies of arguments)"
    if modules := of_user(module_path):
        return modules
    if function:
        return function if function.endswith(".py") else f"{function}()"
    return ops_in(module_path) or "(xla)"


def operation_of(module_path: str, operation: str, opcode: str) -> str:
    """The operation in a few words: "jaxmem.dense: dot_general"."""
    plain = ": ".join(filter(None, (ops_in(module_path), operation or opcode)))
    return plain if opcode in plain or opcode not in _TELLING else f"{plain} ({opcode})"


def numpy_dtype(hlo: str) -> str:
    """XLA's `s32` as numpy's `int32`; unknown names stay."""
    if hlo in _DTYPES:
        return _DTYPES[hlo]
    match = re.fullmatch(r"([su])(\d+)", hlo)
    if match:
        return ("int" if match.group(1) == "s" else "uint") + match.group(2)
    return {"f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2"}.get(hlo, hlo)


def short_dtype(dtype: str) -> str:
    """`bfloat16` as `bf16`, the way JAX prints types."""
    if dtype in _SHORT:
        return _SHORT[dtype]
    match = re.fullmatch(r"(float|int|uint)(\d+)", dtype)
    return _SIZED[match.group(1)] + match.group(2) if match else dtype
