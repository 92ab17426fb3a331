"""Rows of a plan: what became of gradients, residuals, operations and regions."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from jaxmem.chips import Rates, rates_of
from jaxmem.cost.equations import flops, recompute_seconds
from jaxmem.ir import jaxprs
from jaxmem.ir.part_marks import scopes_of
from jaxmem.ir.shards import WHOLE, Shardings


@dataclass(frozen=True)
class Gradient:
    """A stacked output of a backward scan, or the gradient of a table.

    Attributes:
      bytes: of the whole stack, on one device.
      shape: its shape, the layers in front.
      dtype: its dtype.
      path: the name scopes (the modules) of the operation that makes it.
      released: whether the stack, or the table's gradient, no longer exists.
      why: what prevents the release; empty where it is released.
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    path: str
    released: bool
    why: str = ""


@dataclass(frozen=True)
class RecomputedResidual:
    """A residual of a forward scan that the backward scan recomputes.

    Attributes:
      bytes: of the stack on one device; negative for what is kept in place of others.
      shape: its shape, the layers in front.
      dtype: its dtype.
      path: the name scopes (the modules) of the operation that makes it.
      how: what it is recomputed from.
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    path: str
    how: str


@dataclass(frozen=True)
class RecomputedOperation:
    """An operation of the forward pass that the backward pass does a second time.

    Attributes:
      operation: its name.
      shape: of its result.
      dtype: of its result.
      path: the name scopes (the modules) it belongs to.
      times: how often it is recomputed: the number of layers.
      flops: of all times together, of matmuls and convolutions, on one device.
      seconds: of all times together, by the rates of the target.
      bytes: of its result, on one device.
    """

    operation: str
    shape: tuple[int, ...]
    dtype: str
    path: str
    times: int
    flops: float
    seconds: float
    bytes: int = 0


WHOLE_STEP = "the whole step"  # as the path of what runs in micro-batches


@dataclass(frozen=True)
class TiledRegion:
    """Operations that are run in parts, one part after the other.

    Attributes:
      shape: of the largest array that only its tiles exist of.
      dtype: of the same.
      path: the name scopes (the modules) of the operation that makes it; "the whole
        step" where the tiles are micro-batches, up to the gradients.
      line: where that is written, as `file:line (function)`; empty where unknown.
      axis: what is cut: "batch", "heads", "tokens" or "vocabulary" where that can be
        told, else the number of the array's axis.
      n: tiles.
      bytes_before: what runs at one time (the step outside of its loops, or an
        iteration of one) holds at its peak without the tiles, by the step's graph.
      bytes_after: the same with them.
      times: how often the region is run: the number of layers.
      seconds: that the tiles take longer, of all times together, by the rates of the
        target.
    """

    shape: tuple[int, ...]
    dtype: str
    path: str
    line: str
    axis: str
    n: int
    bytes_before: int
    bytes_after: int
    times: int
    seconds: float

    @property
    def bytes(self) -> int:
        """What the tiles save."""
        return self.bytes_before - self.bytes_after


@dataclass(frozen=True)
class Description:
    """Rows of a plan, the bytes that are offloaded to the host, and sentences."""

    gradients: tuple[Gradient, ...] = ()
    residuals: tuple[RecomputedResidual, ...] = ()
    recomputed: tuple[RecomputedOperation, ...] = ()
    offloaded_bytes: int = 0
    notes: tuple[str, ...] = ()
    tiles: tuple[TiledRegion, ...] = ()

    def repeated(self, n: int) -> "Description":
        """What was done to a list of equations that runs `n` times."""
        if n == 1:
            return self
        more = lambda row, *sums: replace(
            row, **{name: n * getattr(row, name) for name in ("times", *sums)}
        )
        done = (more(row, "flops", "seconds") for row in self.recomputed)
        tiles = (more(row, "seconds") for row in self.tiles)
        return replace(self, recomputed=tuple(done), tiles=tuple(tiles))

    def __add__(self, other: "Description") -> "Description":
        names = [f.name for f in fields(self)]
        return Description(*(getattr(self, n) + getattr(other, n) for n in names))


def gradient(aval, maker, released: bool, why: str, shards: int = 1) -> Gradient:
    """The row of a stack; `maker`: the equation that makes a layer of it, or None."""
    size, shape, dtype, path = described(aval, maker)
    return Gradient(size // shards, shape, dtype, path, released, why)


def residual(aval, maker, how: str, sign: int, shards: int = 1) -> RecomputedResidual:
    """The row of a residual; `sign`: -1 for what is kept instead of others."""
    size, shape, dtype, path = described(aval, maker)
    return RecomputedResidual(sign * (size // shards), shape, dtype, path, how)


def recomputed(
    equations: Iterable[tuple[Any, int]], target: str, shardings: Shardings = WHOLE
) -> tuple:
    """Rows of equations and how often each is run; `shardings`: over devices."""
    rates = rates_of(target)
    return tuple(_recomputed(eqn, times, shardings, rates) for eqn, times in equations)


def _recomputed(
    eqn, times: int, shardings: Shardings, rates: Rates
) -> RecomputedOperation:
    aval, size = eqn.outvars[0].aval, shardings.bytes_of(eqn.outvars[0])
    cost = times * (recompute_seconds(eqn, rates, shardings) or 0.0)
    path = scopes_of(eqn)
    work = times * flops(eqn, shardings), cost
    name = eqn.primitive.name
    about = name, aval.shape, str(aval.dtype), path, times
    return RecomputedOperation(*about, *work, size)


def gathered_again(
    eqn, v, size: float, times: int, rates: Rates
) -> RecomputedOperation:
    """The row of an operand of a product that devices send `size` bytes to gather."""
    cost, path = times * size / rates.link, scopes_of(eqn)
    about = "all_gather", v.aval.shape, str(v.aval.dtype), path
    return RecomputedOperation(*about, times, 0.0, cost)


def described(aval, maker) -> tuple[int, tuple[int, ...], str, str]:
    """(bytes, shape, dtype, path) of an array."""
    path = scopes_of(maker) if maker is not None else ""
    return nbytes(aval), aval.shape, str(aval.dtype), path


def nbytes(array) -> int:
    """Bytes of an array; a PRNG key has no size of its own."""
    return jaxprs.elements(array.shape) * getattr(array.dtype, "itemsize", 0)
