"""SOAP of one matrix: Adam in the eigenbasis of Shampoo's preconditioner."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, PyTree

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

_SIDES = ("left", "right")


class SoapState(NamedTuple):
    """State of `scale_by_soap`.

    Attributes:
      count: int32[], steps, the first one included.
      mu: first moment, in the eigenbases, of the parameters' shapes: `MomentCodes` a
        leaf, or float32.
      nu: second moment, likewise.
      left: of each leaf of matrices [m, n] an `EigenbasisState` of [m, m], or None.
      right: the same of [n, n].
    """

    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: PyTree
    nu: PyTree
    left: PyTree
    right: PyTree


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
    correct_bias: bool
    dtype: PreconditionerDType

    @property
    def has_moments(self) -> tuple[bool, bool]:
        """Both moments are kept."""
        return True, True

    def kept(self, m: int, n: int, side: Callable[[str], Zeros]) -> tuple[Any, ...]:
        """The sides of a new matrix."""
        small = "left" if m <= n else "right"

        def made(which: str, size: int):
            if size > self.largest or (self.one_sided and which != small):
                return None
            shape, zeros = (size, size), side(which)
            gram = empty_symmetric(shape, self.dtype, zeros)
            return EigenbasisState(gram, empty(shape, self.dtype, zeros))

        return tuple(map(made, _SIDES, (m, n)))

    def matrix(self, count, seed, g, m, v, left, right) -> tuple[Any, ...]:
        """(update, mu, nu, left, right); without sides it is Adam, elementwise."""
        sides = left, right
        bases = _of_sides(lambda s: self._loaded(s.basis), sides)
        u, m, v = self._adam(count, rotated(g, *bases), m, v)
        u = jnp.where(count == 0, 0.0, rotated_back(u, *bases))
        if left is None and right is None:
            return u, m, v, None, None
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
        return u, m, v, *kept

    def _adam(self, count, g, m, v):
        """Adam's update, and its moments; the first call leaves them as they are."""
        first = count == 0
        m = jnp.where(first, m, self.b1 * m + (1 - self.b1) * g)
        v = jnp.where(first, v, self.b2 * v + (1 - self.b2) * jnp.square(g))
        u = m / (jnp.sqrt(v) + self.eps)
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
                v = v if pair is None else jnp.take(v, pair[1], axis=axis)
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


def _of_sides(fn: Callable, *lists: Sequence) -> list:
    """`fn` of what there is of each side; None of a side without a basis."""
    sides = zip(*lists, strict=True)
    return [None if xs[0] is None else fn(*xs) for xs in sides]


def _columns(basis: Any) -> int:
    """Of a stored square matrix."""
    return basis.shape[-1] if hasattr(basis, "dtype") else basis.codes.shape[-3]
