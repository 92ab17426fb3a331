"""Seconds of one kernel: the longest of its products, its bytes, its arithmetic.

A product runs in tiles, one a processor at a time, so that its last wave may be nearly
empty, and a tile that is small or has a short sum does not reach the peak (Williams et
al. 2009, "Roofline", with the waves of NVIDIA's matrix multiplication guide).
"""

import functools
import math
from typing import Literal

from jaxmem.chips import Rates
from jaxmem.cost.kernel import Arithmetic, Declared, KernelWork, Product

Bound = Literal["products", "memory", "arithmetic", "launch", "host", "collective"]
# What starting and ending a tile's sum takes, in terms of it; measured on an H200. A
# library's kernels end one tile while they start the next.
_DEPTH, _LIBRARY_DEPTH = 128, 48
_BEST = 128 * 128 / (128 + 128)  # flops for each element read of tiles at the peak
_ALONE = 0.5  # of a kernel's arithmetic, where two blocks run side by side; measured
_SPLITS = (1, 2, 4, 8)  # parts of a long sum whose tiles run side by side


def seconds(work: KernelWork, rates: Rates, cached: int = 0) -> tuple[float, Bound]:
    """How long a kernel takes, and what binds it.

    Args:
        work: what it does.
        rates: of the chip.
        cached: bytes of what it moves that stay in the chip's cache.
    """
    arithmetic = max(_elementwise(work.arithmetic, rates), work.loaded / rates.vector)
    moved = _moved(work, rates, cached)
    done: dict[Bound, float] = {
        "products": _declared(work.declared, rates)
        + sum(product_seconds(one, rates) for one in work.products),
        "memory": moved + _ALONE * arithmetic * work.access.serial,
        "arithmetic": arithmetic,
        "host": work.traffic.host / rates.host,
    }
    bound = max(done, key=lambda kind: done[kind])
    phases = bool(work.flops) or work.access.phases
    launches = max(1.0, work.alone / rates.window)
    took = _together(done, rates) + launches * rates.launch + rates.fill * phases
    took += work.access.apart / rates.bandwidth
    return took, "launch" if done[bound] < rates.launch else bound


def _together(done: dict[Bound, float], rates: Rates) -> float:
    """Seconds of all that runs side by side, with what of it stays exposed.

    Arithmetic that takes longest hides the rest, since the others wait for it.
    """
    others = [took for kind, took in done.items() if kind != "arithmetic"]
    rest = sum(done.values()) - max(others)
    return max(done["arithmetic"], max(others) + rates.exposed * rest)


def _moved(work: KernelWork, rates: Rates, cached: int) -> float:
    """Seconds until all bytes are there: their own, or those of who asks for them."""
    access = work.access
    plain = (work.traffic.bytes - cached) / rates.bandwidth
    plain += (cached + access.spilled) / rates.cached
    plain += access.scattered / rates.sectors + access.near / rates.near
    waves = math.ceil(access.columns / (2 * rates.processors))  # two blocks fit in one
    row = access.loads * (rates.wait if access.stores else rates.issue)
    return max(plain, access.blocks / rates.blocks, waves * access.rows * row)


def _elementwise(work: Arithmetic, rates: Rates) -> float:
    """Integers share the issue slots of all, and have fewer units of their own."""
    issued = (work.floating + work.integer) / rates.floating
    issued += work.shifts / rates.shifts
    return max(issued, work.integer / rates.integer, work.special / rates.special)


def _declared(work: Declared | None, rates: Rates) -> float:
    """Products wait for exponentials between them, where a kernel has these."""
    if work is None:
        return 0.0
    share = rates.between if work.transcendentals else 1.0
    return work.flops / (share * _peak(work.bits, rates))


def _peak(bits: int, rates: Rates) -> float:
    """Flops per second of large products of such elements."""
    return (rates.wide if bits > 16 else rates.narrow) * (2 if bits == 8 else 1)


@functools.lru_cache(maxsize=4096)  # layers repeat each other
def product_seconds(product: Product, rates: Rates) -> float:
    """How long a product takes where its operands are at hand."""
    peak = _peak(product.bits, rates)
    if len(rates.tiles) == 1:
        return 2.0 * product.batch * _padded(product, rates) / peak
    return min(_tiled(product, rates, peak, tile) for tile in rates.tiles)


def _padded(product: Product, rates: Rates) -> float:
    """Multiplications of a TPU, whose matrix units take whole blocks of both axes.

    The units share a sum, so that a short one leaves some without work.
    """
    side = rates.tiles[0][0]
    depth = max(_up(product.k, side), side * rates.processors)
    return _up(product.m, 8) * _up(product.n, side) * depth


def _up(size: float, to: int) -> float:
    return to * math.ceil(size / to)


def _tiled(product: Product, rates: Rates, peak: float, tile: tuple[int, int]) -> float:
    rows, columns = tile
    reached = min(1.0, rows * columns / (rows + columns) / _BEST) ** 0.5
    depth = _LIBRARY_DEPTH if product.library else _DEPTH
    one = 2.0 * rows * columns * rates.processors / (peak * reached)  # of depth 1
    tiles = product.batch * math.ceil(product.m / rows) * math.ceil(product.n / columns)

    def split(parts: int) -> float:
        waves = math.ceil(tiles * parts / rates.processors)
        return waves * one * (product.k / parts + depth) * product.spent

    return min(map(split, _SPLITS))
