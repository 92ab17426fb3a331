"""SOAP of one matrix: Adam in the eigenbasis of Shampoo's preconditioner."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, PyTree

from jaxmem.optim.factored.moments import FactoredMoment, averaged
from jaxmem.optim.low_bit.low_bit import LowBit
from jaxmem.optim.low_rank.stored import empty, load, store
from jaxmem.optim.preconditioned.bases import (
    eigenbasis,
    iterated,
    rotated,
    rotated_back,
)
from jaxmem.optim.preconditioned.leaves import drawn
from jaxmem.optim.preconditioned.symmetric import (
    PreconditionerDType,
    Zeros,
    empty_symmetric,
    load_symmetric,
    with_gradient,
)

_SIDES, _AXES = ("left", "right"), (0, 1)


class SoapState(NamedTuple):
    """State of `scale_by_soap`.

    Attributes:
      count: int32[], steps, the first one included.
      mu: first moment, in the eigenbases, of the parameters' shapes: `MomentCodes` a
        leaf, or float32.
      nu: second moment, likewise, or None where it is factored.
      left: of each leaf of matrices [m, n] an `EigenbasisState` of [m, m], or None.
      right: the same of [n, n].
      factors: of each leaf of matrices with a factored second moment its means over
        columns and rows, in the eigenbases: a `FactoredMoment`; else None.
    """

    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: PyTree
    nu: PyTree
    left: PyTree
    right: PyTree
    factors: PyTree = None


class EigenbasisState(NamedTuple):
    """What is kept of one side of a leaf's matrices.

    Attributes:
      gram: the mean of g g^T (of g^T g on the right), [*batch, n, n] as stored.
      basis: its eigenvectors in columns, [*batch, n, n] as stored.
    """

    gram: Any
    basis: Any


class SoapRule(NamedTuple):
    """What is done to each matrix; see `soap` for the arguments."""

    how: LowBit
    b1: Any
    b2: Any
    gram_decay: Any
    eps: Any
    frequency: int
    largest: int
    one_sided: bool
    factored: bool
    correct_bias: bool
    dtype: PreconditionerDType

    def has_moments(self, matrix: bool) -> tuple[bool, bool]:
        """A factored second moment of matrices is kept beside the moments."""
        return True, not (matrix and self.factored)

    def kept(self, m: int, n: int, side: Callable[[str], Zeros]) -> tuple[Any, ...]:
        """The sides of a new matrix, and its factors."""
        small = "left" if m <= n else "right"

        def made(which: str, size: int):
            if size > self.largest or (self.one_sided and which != small):
                return None
            shape, zeros = (size, size), side(which)
            gram = empty_symmetric(shape, self.dtype, zeros)
            return EigenbasisState(gram, empty(shape, self.dtype, zeros))

        means = [side("left")((m,), "float32"), side("right")((n,), "float32")]
        factors = FactoredMoment(*means) if self.factored else None
        return *map(made, _SIDES, (m, n)), factors

    def matrix(self, count, seed, g, m, v, left, right, factors) -> tuple[Any, ...]:
        """(update, mu, nu, left, right, factors); without sides it is Adam."""
        sides, v = (left, right), v if factors is None else factors
        bases = _of_sides(lambda s: self._loaded(s.basis), sides)
        u, m, v = self._adam(count, rotated(g, *bases), m, v)
        u = jnp.where(count == 0, 0.0, rotated_back(u, *bases))
        if left is None and right is None:
            return u, m, *_apart(v, None, None)
        how = self.gram_decay, 1 - self.gram_decay, self.dtype
        grams = [
            None if s is None else with_gradient(s.gram, x, *how, drawn(seed, 2 + i))
            for i, (s, x) in enumerate(zip(sides, (g, g.T), strict=True))
        ]
        stored = [None if s is None else s.basis for s in sides]
        stored, m, v = self._refreshed(count, grams, stored, m, v)
        kept = [
            None if gram is None else EigenbasisState(gram, basis)
            for gram, basis in zip(grams, stored, strict=True)
        ]
        return u, m, *_apart(v, *kept)

    def _adam(self, count, g, m, v):
        """Adam's update, and its moments; the first call leaves them as they are."""
        kept = lambda old, new: jnp.where(count == 0, old, new)
        m = kept(m, self.b1 * m + (1 - self.b1) * g)
        square = jnp.square(g)
        new = averaged(v, square, self.b2, 1 - self.b2, _AXES)
        v = jax.tree.map(kept, v, new)
        u = m / (_root(v) + self.eps)
        if self.correct_bias:
            t = jnp.maximum(count, 1).astype(jnp.float32)
            u = u * (jnp.sqrt(1 - self.b2**t) / (1 - self.b1**t))
        return u, m, v

    def _refreshed(self, count, grams, bases, m, v):
        """The bases as they are stored, and the moments in them."""

        def born(grams, bases, m, v):
            made = _of_sides(lambda gram: eigenbasis(load_symmetric(gram)), grams)
            return _of_sides(self._stored, made), m, v

        def refreshed(grams, bases, m, v):
            old = _of_sides(self._loaded, bases)
            found = _of_sides(iterated, _of_sides(load_symmetric, grams), old)
            for axis, pair in enumerate(found):
                v = v if pair is None else _sorted(v, pair[1], axis)
            made = _of_sides(lambda pair: self._stored(pair[0]), found)
            m = rotated(rotated_back(m, *old), *_of_sides(self._loaded, made))
            return made, m, v

        def same(grams, bases, m, v):
            return bases, m, v

        due = jnp.where(count % self.frequency == 0, 1, 2)
        which = jnp.where(count == 0, 0, due)
        return lax.switch(which, (born, refreshed, same), grams, bases, m, v)

    def _stored(self, basis):
        return store(basis, self.dtype)

    def _loaded(self, basis):
        return load(basis, _columns(basis))


def _root(v):
    """Of a second moment; roots of factors first, whose products may be too small."""
    if not isinstance(v, FactoredMoment):
        return jnp.sqrt(v)
    mean = jnp.maximum(jnp.mean(v.row), jnp.finfo(v.row.dtype).tiny)
    return jnp.sqrt(v.row / mean)[:, None] * jnp.sqrt(v.col)[None]


def _sorted(v, order, axis: int):
    """A second moment with the rows (0) or columns (1) in this order."""
    if not isinstance(v, FactoredMoment):
        return jnp.take(v, order, axis=axis)
    one = ("row", "col")[axis]
    return v._replace(**{one: jnp.take(getattr(v, one), order)})


def _apart(v, left, right):
    """(nu, left, right, factors) with a second moment where it belongs."""
    factored = isinstance(v, FactoredMoment)
    return None if factored else v, left, right, v if factored else None


def _of_sides(fn: Callable, *lists: Sequence) -> list:
    """`fn` of what there is of each side; None of a side without a basis."""
    sides = zip(*lists, strict=True)
    return [None if xs[0] is None else fn(*xs) for xs in sides]


def _columns(basis: Any) -> int:
    """Of a stored square matrix."""
    return basis.shape[-1] if hasattr(basis, "dtype") else basis.codes.shape[-3]
