"""Which values of a graph are one known number, and how exactly it is known."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmem.ir import jaxprs as _jaxpr
from jaxmem.ir.operands_first import operands_first
from jaxmem.rewriting._flat_graph import FlatValue

_FUNCTIONS = {
    "add": np.add,
    "and": np.logical_and,
    "div": np.divide,
    "eq": np.equal,
    "exp": np.exp,
    "ge": np.greater_equal,
    "gt": np.greater,
    "integer_pow": lambda x, y: x**y,
    "le": np.less_equal,
    "log": np.log,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.logical_not,
    "pow": np.power,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sqrt": np.sqrt,
    "square": np.square,
    "sub": np.subtract,
}


@dataclass(frozen=True)
class Number:
    """A number and the relative error that its dtypes have put on it."""

    value: float
    error: float

    def agrees(self, other: "Number") -> bool:
        """Equal within the errors of both, first order; a tenth for the others."""
        if self.value == other.value:
            return True
        allowed = 1.1 * (self.error + other.error) * abs(other.value)
        return bool(abs(self.value - other.value) <= allowed)


def error_of(dtype) -> float:
    """Half a unit in the last place; nothing for integers, booleans and keys."""
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    return float(jnp.finfo(dtype).eps) / 2


def folded(value: FlatValue) -> Number | None:
    """The number that every element of `value` is known to be, or None."""
    if value.folded != ():
        return value.folded
    for one in operands_first(value, _unfolded):
        if one.folded == ():
            one.folded = _fold(one)
    return value.folded


def _function(node) -> Callable[..., Any] | None:
    """Of the numbers that the operands are."""
    if node.record.keeps_all or node.name == "stop_gradient":
        return lambda x: x
    return _FUNCTIONS.get(node.name)


def _unfolded(value: FlatValue) -> list[FlatValue]:
    """The operands to fold before a value."""
    node = value.node if value.folded == () and value.known is None else None
    if node is None or _function(node) is None:
        return []
    return [v for v in node.ins if v.folded == ()]


def _fold(value: FlatValue) -> Number | None:
    if value.known is not None:
        return _known(value)
    if value.node is None or len(value.node.outs) != 1:
        return None
    function = _function(value.node)
    if function is None or not value.node.ins:
        return None
    found = [folded(v) for v in value.node.ins]
    parts = [p for p in found if p is not None]
    if len(parts) < len(found):
        return None
    extra = [value.node.params["y"]] if value.node.name == "integer_pow" else []
    with np.errstate(all="ignore"):
        number = float(function(*(p.value for p in parts), *extra))
    error = error_of(value.dtype) + sum(p.error for p in parts)
    return Number(number, error)


def _known(value: FlatValue) -> Number | None:
    known = value.known
    if _jaxpr.is_abstract(known) or not _is_real(value.dtype):
        return None
    array = np.asarray(known)
    if array.size != 1:
        return None
    return Number(float(array.reshape(())), error_of(value.dtype))


def _is_real(dtype) -> bool:
    kinds = (jnp.floating, jnp.integer, jnp.bool_)
    return any(jnp.issubdtype(dtype, k) for k in kinds)


def power(number: Number, exponent: float) -> Number:
    if exponent == 1:
        return number
    bad = number.value == 0 and exponent < 0
    bad |= number.value < 0 and not float(exponent).is_integer()
    return Number(
        float("nan") if bad else number.value**exponent, number.error * abs(exponent)
    )


def times(a: Number, b: Number) -> Number:
    return Number(a.value * b.value, a.error + b.error)


def plus(a: Number, b: Number) -> Number:
    total = a.value + b.value
    spread = abs(a.value) * a.error + abs(b.value) * b.error
    return Number(total, spread / abs(total) if total else 0.0)
