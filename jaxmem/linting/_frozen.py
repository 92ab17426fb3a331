"""Gradients that are computed, and then thrown away or multiplied by zero.

Two walks over the equations: forwards, which values are zero whatever the arguments
are; backwards, which equations anybody needs, where nobody needs what makes a zero.
What is neither, belongs to the backward pass and is a product is a gradient of what is
not trained. A mask that is an argument of the step is not known to be zero.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmem import _compat, _jaxpr
from jaxmem.ir.scans import is_var, size_of
from jaxmem.linting._subject import (
    CALLS,
    LEAST,
    PRODUCTS,
    Finding,
    Level,
    Subject,
    array,
    place,
)

# zero if the named number of their operands are
_ANY_ZERO = frozenset("mul dot_general conv_general_dilated".split())
_FIRST_ZERO = frozenset("div select_and_scatter_add dynamic_slice".split())
_ALL_ZERO = frozenset(
    "add add_any sub neg sqrt abs sign tanh sin broadcast_in_dim reshape squeeze copy "
    "transpose convert_element_type reduce_sum concatenate slice name integer_pow "
    "square reduce_precision expand_dims optimization_barrier".split()
)
_LARGEST_CONSTANT = 2**20  # elements of a constant that are looked at


def frozen_gradients(subject: Subject) -> Iterator[Finding]:
    """Products of the backward pass that no output of the step needs."""
    closed = subject.closed
    zeros = [_is_zero(c) for c in _jaxpr.split(closed)[1]]
    level = Level.of(closed)
    walk = _Walk(level, [*zeros, *(False for _ in level.jaxpr.invars)])
    walk.need([True] * len(level.jaxpr.outvars))
    for level, eqn in walk.unneeded():
        if size_of(eqn.outvars[0]) >= LEAST:
            yield Finding(
                check="unused gradient",
                severity="warning",
                what=f"a gradient, {array(eqn.outvars[0].aval)}, is computed and then "
                "thrown away or multiplied by zero",
                bytes=level.times * size_of(eqn.outvars[0]),
                remedy=(
                    "differentiate what is trained alone: jaxmem.trainable(params, "
                    "mask) and jaxmem.value_and_grad; no moments for the rest either"
                ),
                **place(level, eqn),
            )


@dataclass
class _Walk:
    """Which equations of a list somebody needs.

    `zero` says which constants and arguments, in this order, are zero.
    """

    level: Level
    zero: Sequence[bool]

    def __post_init__(self):
        jaxpr = self.level.jaxpr
        inputs = [*jaxpr.constvars, *jaxpr.invars]
        self.zeros = {v for v, z in zip(inputs, self.zero, strict=True) if z}
        self.calls: dict[int, _Walk] = {}
        self.needed: set[Any] = set()
        for i, eqn in enumerate(jaxpr.eqns):
            self.zeros.update(self._zero_outputs(i, eqn))

    def _zero_outputs(self, i: int, eqn) -> Iterator[Any]:
        known = [self._is_zero(v) for v in eqn.invars]
        name = eqn.primitive.name
        if name in CALLS or name == "scan":
            self.calls[i] = inner = self._inside(eqn, known)
            if name != "scan":
                yield from (
                    out
                    for out, v in zip(eqn.outvars, inner.outs, strict=True)
                    if inner._is_zero(v)
                )
        elif (
            (name in _ANY_ZERO and any(known))
            or (name in _FIRST_ZERO and known[0])
            or (name in _ALL_ZERO and all(known))
        ):
            yield from eqn.outvars

    def _inside(self, eqn, known: list[bool]) -> "_Walk":
        (inner,) = self.level.inside(eqn)
        consts = [_is_zero(c) for c in _jaxpr.split(_jaxpr.bodies(eqn)[0])[1]]
        if eqn.primitive.name == "scan":  # a carry changes: not followed
            n_consts, n_carry = _compat.scan_counts(eqn)
            known[n_consts : n_consts + n_carry] = [False] * n_carry
        return _Walk(inner, [*consts, *known])

    @property
    def outs(self) -> Sequence[Any]:
        return self.level.jaxpr.outvars

    def _is_zero(self, atom) -> bool:
        return atom in self.zeros if is_var(atom) else _is_zero(atom.val)

    def need(self, wanted: Sequence[bool]) -> list[bool]:
        """Marks what these outputs need; which arguments they need."""
        jaxpr = self.level.jaxpr
        self._want(v for v, w in zip(jaxpr.outvars, wanted, strict=True) if w)
        for i in reversed(range(len(jaxpr.eqns))):
            eqn = jaxpr.eqns[i]
            if not self._is_needed(eqn):
                continue
            read = [True] * len(eqn.invars)
            if i in self.calls:
                outs = [v in self.needed for v in eqn.outvars]
                inner = self.calls[i]
                loop = eqn.primitive.name == "scan"
                read = _turns(eqn, inner, outs) if loop else inner.need(outs)
            self._want(v for v, r in zip(eqn.invars, read, strict=True) if r)
        return [v in self.needed for v in jaxpr.invars]

    def _want(self, atoms) -> None:
        self.needed.update(v for v in atoms if is_var(v) and v not in self.zeros)

    def _is_needed(self, eqn) -> bool:
        return bool(eqn.effects) or any(v in self.needed for v in eqn.outvars)

    def unneeded(self) -> Iterator[tuple[Level, Any]]:
        """The products of the backward pass that nobody needs."""
        for i, eqn in enumerate(self.level.jaxpr.eqns):
            if not self._is_needed(eqn):
                if self.level.is_backward(eqn):
                    yield from _products(self.level, eqn)
            elif i in self.calls:
                yield from self.calls[i].unneeded()


def _turns(eqn, inner: _Walk, outs: list[bool]) -> list[bool]:
    """What a scan needs: a carry that a turn reads is made by the turn before."""
    n_consts, n_carry = _compat.scan_counts(eqn)
    while True:
        read = inner.need(outs)
        again = read[n_consts : n_consts + n_carry]
        if not any(r and not o for r, o in zip(again, outs, strict=False)):
            return read
        outs = [o or r for o, r in zip(outs[:n_carry], again, strict=True)] + outs[
            n_carry:
        ]


def _products(level: Level, eqn) -> Iterator[tuple[Level, Any]]:
    if eqn.primitive.name in PRODUCTS:
        yield level, eqn
    for inner in level.inside(eqn):
        for e in inner.jaxpr.eqns:
            yield from _products(inner, e)


def _is_zero(value) -> bool:
    """Whether a constant is known now and zero all over."""
    if _jaxpr.is_abstract(value) or getattr(value, "size", 1) > _LARGEST_CONSTANT:
        return False
    try:
        return not np.any(np.asarray(value))
    except TypeError:  # a key, or what else has no zero
        return False
