"""Gradients that are computed, and then thrown away or multiplied by zero.

A first walk over the equations finds the values that are zero for all arguments. A
second one, from the outputs backwards, finds the equations that are needed, where a
zero needs none. A product of the backward pass that is not needed is a gradient of
something that is not trained. A mask that is an argument is not known to be zero.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.scans import is_var, size_of
from jaxmem.ir.zeros import gives_zeros
from jaxmem.linting._subject import (
    LEAST,
    Finding,
    Subject,
    SubjectLevel,
    array,
    place,
)

_LARGEST_CONSTANT = 2**20  # elements of a constant that is compared with zero


def unused_gradient(subject: Subject) -> Iterator[Finding]:
    """Finds products of the backward pass that no output of the step needs."""
    level = SubjectLevel.of(subject.closed)
    needs = _Needs(level, [False for _ in level.graph.arguments])
    needs.mark([True] * len(level.graph.outvars))
    for level, eqn in needs.unneeded_products():
        if size_of(eqn.outvars[0]) >= LEAST:
            yield Finding(
                check="unused gradient",
                severity="warning",
                what=f"a gradient, {array(eqn.outvars[0].aval)}, is computed and then "
                "discarded or multiplied by zero",
                bytes=level.times * size_of(eqn.outvars[0]),
                remedy=(
                    "differentiate only what is trained: jaxmem.trainable(params, "
                    "mask) and jaxmem.value_and_grad; no moments for the rest either"
                ),
                **place(level, eqn),
            )


@dataclass
class _Needs:
    """The equations of a level that outputs of the step need."""

    level: SubjectLevel  # the equations
    zero: Sequence[bool]  # which arguments are zero

    def __post_init__(self):
        graph = self.level.graph
        self.zeros = {v for v, c in graph.constants.items() if _is_zero(c)}
        self.zeros |= {v for v, z in zip(graph.arguments, self.zero, strict=True) if z}
        self.calls: dict[int, _Needs] = {}
        self.needed: set[Any] = set()
        for i, eqn in enumerate(graph.eqns):
            self.zeros.update(self._zero_outputs(i, eqn))

    def _zero_outputs(self, i: int, eqn) -> Iterator[Any]:
        known = [self._is_zero(v) for v in eqn.invars]
        is_call = primitives.of(eqn).calls
        if is_call or primitives.is_scan(eqn):
            self.calls[i] = inner = self._inside(eqn, known)
            if is_call:
                pairs = zip(eqn.outvars, inner.level.graph.outvars, strict=True)
                yield from (out for out, v in pairs if inner._is_zero(v))
        elif gives_zeros(eqn, known):
            yield from eqn.outvars

    def _inside(self, eqn, known: list[bool]) -> "_Needs":
        (inner,) = self.level.inside(eqn)
        if primitives.is_scan(eqn):  # a carry may change between iterations
            n_consts, n_carry = _compat.scan_counts(eqn)
            known[n_consts : n_consts + n_carry] = [False] * n_carry
        return _Needs(inner, known)

    def _is_zero(self, atom) -> bool:
        return atom in self.zeros if is_var(atom) else _is_zero(atom.val)

    def mark(self, wanted: Sequence[bool]) -> list[bool]:
        """Marks what these outputs need; returns which arguments they need."""
        graph = self.level.graph
        self._want(v for v, w in zip(graph.outvars, wanted, strict=True) if w)
        for i, eqn in reversed([*enumerate(graph.eqns)]):
            if not self._is_needed(eqn):
                continue
            read = [True] * len(eqn.invars)
            if i in self.calls:
                outs = [v in self.needed for v in eqn.outvars]
                inner = self.calls[i]
                loop = primitives.is_scan(eqn)
                read = _mark_scan(eqn, inner, outs) if loop else inner.mark(outs)
            self._want(v for v, r in zip(eqn.invars, read, strict=True) if r)
        return [v in self.needed for v in graph.arguments]

    def _want(self, atoms) -> None:
        self.needed.update(v for v in atoms if is_var(v) and v not in self.zeros)

    def _is_needed(self, eqn) -> bool:
        return bool(eqn.effects) or any(v in self.needed for v in eqn.outvars)

    def unneeded_products(self) -> Iterator[tuple[SubjectLevel, Any]]:
        """The products of the backward pass that are not needed."""
        for i, eqn in enumerate(self.level.graph.eqns):
            if not self._is_needed(eqn):
                if self.level.is_backward(eqn):
                    yield from _products(self.level, eqn)
            elif i in self.calls:
                yield from self.calls[i].unneeded_products()


def _mark_scan(eqn, inner: _Needs, outs: list[bool]) -> list[bool]:
    """Marks what a scan needs, where a carry comes from the iteration before."""
    # Each pass adds carries, so that it ends after at most as many as there are.
    n_consts, n_carry = _compat.scan_counts(eqn)
    while True:
        read = inner.mark(outs)
        carry, stacks = outs[:n_carry], outs[n_carry:]
        needed = read[n_consts : n_consts + n_carry]
        grown = [c or n for c, n in zip(carry, needed, strict=True)]
        if grown == carry:
            return read
        outs = grown + stacks


def _products(level: SubjectLevel, eqn) -> Iterator[tuple[SubjectLevel, Any]]:
    if primitives.is_product(eqn):
        yield level, eqn
    for inner in level.inside(eqn):
        for e in inner.graph.eqns:
            yield from _products(inner, e)


def _is_zero(value) -> bool:
    """Whether the value of a constant is known now, and all zero."""
    if jaxprs.is_abstract(value) or getattr(value, "size", 1) > _LARGEST_CONSTANT:
        return False
    try:
        return not np.any(np.asarray(value))
    except TypeError:  # of a type without a zero, as PRNG keys
        return False
