"""How XLA's emitters for GPUs lay a kernel out, by what the module says of it."""

from jaxmem.cost.kernel import Access, Traffic
from jaxmem.memory.buffers.hlo import Hlo, Instruction
from jaxmem.memory.buffers.shapes import arrays_of
from jaxmem.memory.time.in_turn import Reduction, heaps, reductions, sorted_rows, sums
from jaxmem.memory.time.products import attention_of
from jaxmem.memory.time.reading import elements_of, inside
from jaxmem.memory.time.strides import LARGE, SECTOR, strided
from jaxmem.memory.time.triton import is_tiled, tiled

_LOOP = 512  # elements of a loop's block: 128 threads, four each
_TILE = 32 * 32  # elements of a transposition's block


def access_of(hlo: Hlo, made: Instruction, traffic: Traffic) -> Access:
    """How an instruction's threads get at what it reads and writes."""
    if '"__gpu$TopK"' in made.attributes:
        return heaps(made)
    if made.opcode == "sort":
        return sorted_rows(made)
    if made.opcode == "custom-call" and (attention := attention_of(hlo, made)):
        return Access(apart=attention.apart)
    if made.opcode != "fusion":
        return Access()
    if is_tiled(made):
        return tiled(hlo, made, traffic)
    if "kind=kLoop" in made.attributes:
        return _loop(hlo, made, traffic)
    if "kind=kInput" in made.attributes:
        return _input(hlo, made)
    sorts = (one for one in inside(hlo, made) if one.opcode == "sort")
    return next(map(sorted_rows, sorts), Access())


def _loop(hlo: Hlo, made: Instruction, traffic: Traffic) -> Access:
    bits = min((a.bits for a in arrays_of(made.shape)), default=8)
    elements = min(elements_of(made.shape), 8 * traffic.written // bits)
    apart = strided(hlo, made, tiles=False)
    return Access(elements / _LOOP, scattered=SECTOR * apart)


def _input(hlo: Hlo, made: Instruction) -> Access:
    """Sums, or else transpositions in tiles."""
    found = [one for one in reductions(hlo, made) if one.elements >= LARGE]
    if found:
        return sums(hlo, made, max(found, key=_in_turn))
    apart = strided(hlo, made, tiles=True)
    elements = elements_of(made.shape)
    large = elements >= LARGE
    return Access(elements / _TILE, near=SECTOR * apart, phases=large)


def _in_turn(one: Reduction) -> int:
    return one.rows if one.columns > 1 else 0
