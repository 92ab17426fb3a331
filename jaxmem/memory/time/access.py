"""How the threads of a GPU's fusion get at its bytes, beside how many bytes there are.

XLA's emitters decide it. A loop has a block of threads for each 512 elements. A sum of
columns has one for each 32 columns, which takes its rows one after another. A
transposition goes through tiles, and what is transposed once more is read element by
element. Triton's tiles are written in the module. Found in profiles of an H200.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from jaxmem.memory.buffers.hlo import Hlo, Instruction
from jaxmem.memory.buffers.shapes import arrays_of
from jaxmem.memory.time.traffic import Traffic

_LOOP = 512  # elements of a block: 128 threads, four each
_TILE = 32  # side of a transposition's tile; columns, and rows at once, of a sum
_HEAP = 16  # loads in a row, in terms of time, for each element that a heap keeps
_HEAPS = 4  # small blocks that fit where one of 1024 threads does
_SECTOR = 32  # bytes that are fetched at least
_LARGE = 2**18  # elements of an array that does not stay in the L1 cache
_SERIAL = 32  # elements of a thread, beyond which few blocks fit side by side
_CACHED = 0.2  # of a load's time, where the operand is small
_FULL = 3  # arrays of twice as many, which registers do not hold
_SIZES = re.compile(r'"output_tiles":\[\{"sizes":\[([^\]]*)\]')
_WARPS = re.compile(r'"num_warps":"(\d+)"')


@dataclass(frozen=True)
class Access:
    """What a fusion's threads do to get at its bytes.

    Attributes:
        blocks: of threads that are started.
        scattered: bytes of sectors of which one element is wanted.
        near: bytes of such sectors whose other elements the block wants soon.
        rows: groups of rows that a block takes one after another.
        columns: blocks that do so.
        loads: of each row.
        stores: whether something is written for each row, before the next is read.
        serial: whether arithmetic waits for loads, as few blocks fit side by side.
        spilled: bytes of values that do not fit in registers.
    """

    blocks: float = 0.0
    scattered: float = 0.0
    near: float = 0.0
    rows: int = 0
    columns: int = 0
    loads: float = 0.0
    stores: bool = False
    serial: bool = False
    spilled: float = 0.0


def access_of(hlo: Hlo, made: Instruction, traffic: Traffic) -> Access:
    """How an instruction's threads get at what it reads and writes."""
    if '"__gpu$TopK"' in made.attributes:
        return _top_k(hlo, made)
    if made.opcode != "fusion":
        return Access()
    if '"kind":"__triton"' in made.attributes and _SIZES.search(made.attributes):
        return _triton(hlo, made, traffic)
    if "kind=kLoop" in made.attributes:
        bits = min((a.bits for a in arrays_of(made.shape)), default=8)
        elements = min(_elements(made), 8 * traffic.written // bits)
        sectors = _SECTOR * _strided(hlo, made, tiles=False)
        return Access(elements / _LOOP, scattered=sectors)
    if "kind=kInput" in made.attributes:
        sums = [one for one in _reductions(hlo, made) if one.elements >= _LARGE]
        if sums:
            return _sums(hlo, made, max(sums, key=lambda one: one.column * one.rows))
        sectors = _SECTOR * _strided(hlo, made, tiles=True)
        return Access(_elements(made) / _TILE**2, near=sectors)
    return Access()


def _top_k(hlo: Hlo, made: Instruction) -> Access:
    """A block for each row keeps the largest in a heap, one after another."""
    kept = arrays_of(made.shape)[0].sizes[-1]
    blocks = math.ceil(_elements(made) / kept / _HEAPS)
    return Access(rows=_HEAP * kept, columns=blocks, loads=1.0, stores=True)


def _elements(made: Instruction) -> int:
    return max((a.elements for a in arrays_of(made.shape)), default=0)


def _body(hlo: Hlo, made: Instruction) -> Iterator[Instruction]:
    for called in made.called:
        yield from hlo.body(called)


@dataclass(frozen=True)
class _Reduction:
    """Of an array seen as [blocks, rows, columns]; `column`: along the rows."""

    elements: int
    rows: int
    columns: int
    column: bool


def _reductions(hlo: Hlo, made: Instruction) -> list[_Reduction]:
    plain = (one for one in _body(hlo, made) if one.opcode == "reduce")
    return [_reduction(hlo, one) for one in plain]


def _reduction(hlo: Hlo, made: Instruction) -> _Reduction:
    sizes = arrays_of(hlo.shape_of(made.operands[0]))[0].sizes
    summed = [axis for axis in _numbers("dimensions", made) if sizes[axis] > 1]
    rows = math.prod(sizes[axis] for axis in summed)
    inner = math.prod(sizes[max(summed, default=-1) + 1 :])
    return _Reduction(math.prod(sizes), rows, inner, inner > 1)


def _numbers(name: str, made: Instruction) -> list[int]:
    found = re.search(rf"{name}=\{{([\d,]*)\}}", made.attributes)
    return [int(n) for n in found.group(1).split(",") if n] if found else []


def _sums(hlo: Hlo, made: Instruction, one: _Reduction) -> Access:
    """Sums along rows keep all processors busy; those along columns may not."""
    if not one.column:
        return Access()
    outer = one.elements // (one.rows * one.columns)
    sizes = [_elements_of(hlo, name) for name in made.operands]
    large = sum(size >= one.elements for size in sizes)
    stores = any(a.elements >= one.elements for a in arrays_of(made.shape))
    loads = large + _CACHED * (sum(size > 1 for size in sizes) - large) * stores
    rows = math.ceil(one.rows / _TILE)
    return Access(
        rows=rows,
        columns=outer * math.ceil(one.columns / _TILE),
        loads=loads,
        stores=stores,
    )


def _elements_of(hlo: Hlo, name: str) -> int:
    return sum(a.elements for a in arrays_of(hlo.shape_of(name)))


def _triton(hlo: Hlo, made: Instruction, traffic: Traffic) -> Access:
    """A block for each tile of the result."""
    tile = [int(n) for n in re.findall(r"\d+", _SIZES.search(made.attributes).group(1))]
    out, sums = arrays_of(made.shape)[0], _reductions(hlo, made)
    largest = max([out.elements, *(one.elements for one in sums)])
    blocks = out.elements / math.prod(tile)
    warps = _WARPS.search(made.attributes)
    held = largest / blocks / (32 * int(warps.group(1)) if warps else 128)
    full = sum(_elements_of(hlo, name) >= largest for name in made.operands)
    selects = any(one.opcode == "select" for one in _body(hlo, made))
    spilled = full - _FULL + 1 + selects if held > _SERIAL and full >= _FULL else 0
    return Access(
        blocks,
        scattered=_narrow(hlo, made, traffic, tile, any(one.column for one in sums)),
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
    return sum(size * _SECTOR / part for size, part in parts if part < _SECTOR)


def _bits(hlo: Hlo, name: str) -> int:
    return max((a.bits for a in arrays_of(hlo.shape_of(name))), default=0)


def _strided(hlo: Hlo, made: Instruction, tiles: bool) -> int:
    """Elements that neighbouring threads read from places far apart.

    Those whose last axis has become another one; `tiles`: where the transposition that
    comes last is done in tiles, and costs nothing.
    """
    found: dict[str, int] = {}
    todo = [(hlo.roots.get(c, ""), 0 if tiles else 1, 0) for c in made.called]
    seen = set()
    while todo:
        name, turned, elements = todo.pop()
        one = hlo.instruction(name)
        if one is None or (name, turned) in seen:
            continue
        seen.add((name, turned))
        if one.opcode == "parameter":
            if turned and turned % 2 == 0 and _elements(one) >= _LARGE:
                found[name] = elements
            continue
        turned += _turns(hlo, one)
        if one.opcode == "reduce":
            elements = _elements_of(hlo, one.operands[0])
        elif one.opcode not in ("bitcast", "tuple"):
            elements = _elements(one)
        todo += [(operand, turned, elements) for operand in one.operands]
    return sum(found.values())


def _turns(hlo: Hlo, made: Instruction) -> bool:
    """Whether neighbours in memory are others than before, single elements aside."""
    if made.opcode not in ("transpose", "reduce", "copy"):
        return False
    shape = hlo.shape_of(made.operands[0]) if made.opcode == "transpose" else made.shape
    order = (
        _numbers("dimensions", made) if made.opcode == "transpose" else _layout(shape)
    )
    real = [axis for axis in order if arrays_of(shape)[0].sizes[axis] > 1]
    return bool(real) and real[-1] != max(real)


def _layout(shape: str) -> list[int]:
    """The axes of an array, that of neighbours in memory last."""
    found = re.search(r"\{([\d,]+)", shape)
    return [int(n) for n in found.group(1).split(",")][::-1] if found else []
