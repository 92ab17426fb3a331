"""Primitives that make each element of those at its place."""

from typing import Any

from jaxmem.ir.primitives.record import ALL, FIRST
from jaxmem.ir.primitives.record import PrimitiveKind as Kind
from jaxmem.ir.primitives.record import PrimitiveRecord as Record

# Operations an element: more than one for what the chip computes in some instructions,
# and much more for polynomials.
_SOME, _MORE, _MANY, _MOST = 8, 20, 50, 100


def _fused(name: str, operations: float = 1, **facts: Any) -> Record:
    facts = {"operations": operations, "fused": True, "fusible": True, **facts}
    return Record(name, Kind.ELEMENTWISE, elementwise=True, **facts)


def _alone(name: str, **facts: Any) -> Record:
    return Record(name, Kind.SPECIAL, **facts)


_ELEMENTWISE = (
    _fused("abs", keeps_zero=True, exact=True),
    _fused("acos", _MANY, in_chlo=True),
    _fused("acosh", _MANY, in_chlo=True),
    _fused("add", linear=ALL),
    _fused("add_any", linear=ALL),
    _fused("and", commutes=True),
    _fused("asin", _MANY, keeps_zero=True, in_chlo=True),
    _fused("asinh", _MANY, keeps_zero=True, in_chlo=True),
    _fused("atan", _MANY, keeps_zero=True, in_chlo=True),
    _fused("atan2", _MANY),
    _fused("atanh", _MANY, keeps_zero=True, in_chlo=True),
    _fused("cbrt", _SOME, keeps_zero=True),
    _fused("ceil", keeps_zero=True, exact=True),
    _fused("clamp", exact=True),
    _fused("complex", exact=True),
    _fused("conj", exact=True),
    _fused("cos", _MANY),
    _fused("cosh", _MANY, in_chlo=True),
    _fused("digamma", _MOST, in_chlo=True),
    # in the dividend alone
    _fused("div", _SOME, linear=FIRST),
    _fused("eq", commutes=True),
    # `_to`: in the total order of floats, in which NaN has a place, as sorts compare
    _fused("eq_to"),
    _fused("erf", _MANY, keeps_zero=True, in_chlo=True),
    _fused("erf_inv", _MANY, in_chlo=True),
    _fused("erfc", _MANY, in_chlo=True),
    _fused("exp", _MORE),
    _fused("exp2", _MORE),
    _fused("expm1", _MANY, keeps_zero=True),
    _fused("floor", keeps_zero=True, exact=True),
    _fused("ge", orders=True),
    _fused("gt", orders=True),
    # two of this library, of several operations each
    _fused("hash_mix", _SOME),
    _fused("imag", exact=True),
    _fused("integer_pow", _SOME, saves_operand=True),
    _fused("is_finite"),
    _fused("le", orders=True),
    _fused("le_to", orders=True),
    _fused("lgamma", _MOST, in_chlo=True),
    _fused("log", _MORE, saves_operand=True),
    _fused("log1p", _MANY, keeps_zero=True),
    _fused("log2", _MORE),
    _fused("logistic", _MORE),
    _fused("lt", orders=True),
    _fused("lt_to", orders=True),
    _fused("max", exact=True, commutes=True),
    _fused("min", exact=True, commutes=True),
    _fused("mul", bilinear=True),
    _fused("ne", commutes=True),
    _fused("neg", linear=FIRST, keeps_zero=True, exact=True),
    _fused("nextafter", exact=True),
    _fused("not"),
    _fused("one_minus_square"),
    _fused("or", commutes=True),
    _fused("polynomial"),
    _fused("population_count"),
    _fused("position_bits", _SOME),
    _fused("pow", _MANY),
    _fused("real", keeps_zero=True, exact=True),
    _fused("rem", _SOME),
    _fused("round", keeps_zero=True, exact=True),
    _fused("rsqrt", _SOME),
    # in what it chooses from, for one choice
    _fused("select_n", linear=slice(1, None), exact=True),
    _fused("shift_left"),
    _fused("shift_right_arithmetic"),
    _fused("shift_right_logical"),
    _fused("sign", keeps_zero=True, exact=True),
    _fused("sin", _MANY, keeps_zero=True),
    _fused("sinh", _MANY, keeps_zero=True, in_chlo=True),
    _fused("sqrt", _SOME, keeps_zero=True),
    _fused("square", keeps_zero=True, saves_operand=True, in_chlo=True),
    _fused("sub", linear=ALL),
    _fused("tan", _MANY, keeps_zero=True, in_chlo=True),
    _fused("tanh", _MANY, keeps_zero=True),
    _fused("xor", commutes=True),
)

# By a series or a loop: not so cheap that they are done where they are read.
_SPECIAL = (
    _alone("bessel_i0e"),
    _alone("bessel_i1e", in_chlo=True),
    _alone("clz"),
    _alone("igamma"),
    _alone("igamma_grad_a"),
    _alone("igammac"),
    _alone("polygamma"),
    _alone("regularized_incomplete_beta"),
    _alone("zeta"),
)

RECORDS = (*_ELEMENTWISE, *_SPECIAL)
