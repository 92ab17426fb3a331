"""What a custom call declares of its cost: the fields of a `pl.CostEstimate`.

Pallas writes them into the call's configuration: on TPUs, and on GPUs from jax 0.12 on.
With any jax they stand among the call's attributes if it is made under
`jax.experimental.xla_metadata.set_xla_metadata(flops=..., transcendentals=...)`.
Kernels of JAX's own that declare nothing are known by their names.
"""

import math
import re

from jaxmem.cost.kernel import Declared
from jaxmem.memory.buffers.hlo import Hlo, Instruction
from jaxmem.memory.buffers.shapes import HloArray, arrays_of
from jaxmem.memory.time.reading import inside

# `flops="1"`, `"flops":"1"`, and in a string of a configuration `\22flops\22: 1`
_FIELDS = {
    name: re.compile(rf'(?:\\22|\b){name}(?:\\22|\\?"|[=:\s])+(\d+)')
    for name in ("flops", "transcendentals", "bytes_accessed")
}


def declared_of(hlo: Hlo, made: Instruction) -> Declared | None:
    """What an instruction declares, or a call in its fusion; None without any."""
    if made.opcode == "fusion":  # XLA puts a call and the slices that it reads into one
        of_calls = (declared_of(hlo, one) for one in inside(hlo, made))
        return next((one for one in of_calls if one), None)
    if made.opcode != "custom-call":
        return None
    found = {name: one.search(made.attributes) for name, one in _FIELDS.items()}
    flops, special, size = (int(one.group(1)) if one else 0 for one in found.values())
    if not any(found.values()):
        known = _splash_cost(hlo, made)
        if known is None:
            return None
        flops, special = known
    operands = [a for name in made.operands for a in arrays_of(hlo.shape_of(name))]
    largest = max(operands, key=lambda array: array.bytes, default=None)
    return Declared(flops, special, size, largest.bits if largest else 16)


# JAX's splash attention for TPUs declares nothing. Its kernels are known by names, and
# tell the sides of their blocks. Of their mask the module has the blocks it leaves:
# as many as are in a row of its table, and where that is a whole row those of a causal
# mask, since the text does not tell another one.
_KERNEL = re.compile(r"splash_m[hq]a_(fwd|dkv|dq)_")
_SIDES = {"fwd": ("q", "kv"), "dkv": ("q_dkv", "kv_dkv"), "dq": ("q_dq", "kv_dq")}
# Products of queries with keys, and of weights with values, and their derivatives.
_PRODUCTS = {"fwd": (1, 1), "dkv": (2, 2), "dq": (2, 1), "all": (3, 2)}


def _splash_cost(hlo: Hlo, made: Instruction) -> tuple[float, float] | None:
    """(flops, exponentials) of a splash kernel; None for any other instruction."""
    found = _KERNEL.match(made.name)
    if found is None:
        return None
    phase = found.group(1)
    arrays = [arrays_of(hlo.shape_of(name))[0] for name in made.operands]
    queries, keys, values = [one for one in arrays if one.dtype[0] in "bf"][:3]
    length = keys.sizes[_axis(made, "k", -2)]
    pairs = queries.sizes[_axis(made, "q", -2)] * length
    elements = queries.elements * length * _left(made, phase, arrays, pairs)
    width = queries.sizes[_axis(made, "q", -1)]
    across = values.sizes[_axis(made, "v", -1)] / width
    if phase == "dkv" and len(_alike(made, keys)) > 2:
        phase = "all"
    scores, sums = _PRODUCTS[phase]
    return 2.0 * elements * (scores + sums * across), elements / width


def _alike(made: Instruction, keys: HloArray) -> list[HloArray]:
    """The gradients among a kernel's results: of queries, too, if it has all."""
    alike = lambda one: one.dtype == keys.dtype and one.elements >= keys.elements
    return list(filter(alike, arrays_of(made.shape)))


def _axis(made: Instruction, name: str, axis: int) -> int:
    """Where an axis of an operand lies; a layout of 2 has tokens last."""
    found = re.search(rf"\b{name}_layout\W+(\d)", made.attributes)
    return -3 - axis if found and found.group(1) == "2" else axis


def _left(made: Instruction, phase: str, arrays: list[HloArray], pairs: int) -> float:
    """The share of a head's blocks that the mask leaves."""
    tables = (one for one in arrays if one.dtype.startswith("s"))
    table = next((one for one in tables if len(one.sizes) == 3), None)
    if table is None:  # no mask
        return 1.0
    *_, rows, columns = table.sizes
    blocks = pairs / _block(made, phase, pairs // (rows * columns))
    if rows * columns < blocks:
        return rows * columns / blocks
    below = sum(math.ceil((row + 1) * columns / rows) for row in range(rows))
    return below / (rows * columns)


def _block(made: Instruction, phase: str, otherwise: int) -> int:
    """Queries times keys of a block."""
    said = (rf"\bblock_{side}\W+(\d+)" for side in _SIDES[phase])
    found = [re.search(one, made.attributes) for one in said]
    return (
        math.prod(int(one.group(1)) for one in found if one)
        if all(found)
        else otherwise
    )
