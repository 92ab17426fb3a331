"""Triton's fusions: a block of threads for each tile, whose sizes the module tells.

A tile that is narrow takes a part of each sector. One that is large leaves room for few
blocks, whose arithmetic waits for loads, and fills the registers. Found in profiles of
an H200.
"""

import math
import re

from jaxmem.cost.kernel import Access, Traffic
from jaxmem.memory.buffers.hlo import Hlo, Instruction
from jaxmem.memory.buffers.shapes import arrays_of
from jaxmem.memory.time.in_turn import reductions
from jaxmem.memory.time.reading import elements_of, inside
from jaxmem.memory.time.strides import LARGE, SECTOR

_SERIAL = 32  # elements of a thread, beyond which few blocks fit side by side
_FULL = 3  # arrays of twice as many, which registers do not hold
_SIZES = re.compile(r'"output_tiles":\[\{"sizes":\[([^\]]*)\]')
_WARPS = re.compile(r'"num_warps":"(\d+)"')


def is_tiled(made: Instruction) -> bool:
    """Whether Triton computes an instruction that is not a product."""
    text = made.attributes
    return '"kind":"__triton"' in text and _SIZES.search(text) is not None


def tiled(hlo: Hlo, made: Instruction, traffic: Traffic) -> Access:
    """A block for each tile of the result."""
    sizes = _SIZES.search(made.attributes)
    tile = [int(n) for n in re.findall(r"\d+", sizes.group(1))] if sizes else [1]
    out, sums = arrays_of(made.shape)[0], reductions(hlo, made)
    largest = max([out.elements, *(one.elements for one in sums)])
    blocks = max(1.0, out.elements / math.prod(tile))
    warps = _WARPS.search(made.attributes)
    held = largest / blocks / (32 * int(warps.group(1)) if warps else 128)
    full = sum(elements_of(hlo.shape_of(name)) >= largest for name in made.operands)
    selects = any(one.opcode == "select" for one in inside(hlo, made))
    spilled = full - _FULL + 1 + selects if held > _SERIAL and full >= _FULL else 0
    return Access(
        blocks,
        scattered=_narrow(
            hlo, made, traffic, tile, any(one.columns > 1 for one in sums)
        ),
        phases=largest >= LARGE,
        serial=bool(sums) and held >= _SERIAL,
        spilled=8.0 * largest * spilled,  # written and read, in 32 bits
    )


def _narrow(
    hlo: Hlo, made: Instruction, traffic: Traffic, tile: list[int], columns: bool
) -> float:
    """Bytes of sectors of which a tile takes a part."""
    out = arrays_of(made.shape)[0]
    if not tile or tile[-1] == out.sizes[-1]:
        return 0.0
    moved = [(traffic.written, out.bits)]
    if columns:  # the result's last axis is the operands', too
        moved += [(size, _bits(hlo, name)) for name, size in traffic.reads]
    parts = ((size, tile[-1] * bits / 8) for size, bits in moved if bits)
    return sum(size * SECTOR / part for size, part in parts if part < SECTOR)


def _bits(hlo: Hlo, name: str) -> int:
    return max((a.bits for a in arrays_of(hlo.shape_of(name))), default=0)
