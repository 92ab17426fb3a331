"""A jaxpr whose every operation that rounds is off by a rounding at random.

That is Monte Carlo arithmetic (Parker, Monte Carlo Arithmetic: exploiting randomness in
floating-point arithmetic, 1997) on a jaxpr: how far results of several such runs lie
apart is what rounding alone does to them, however ill-conditioned they are.

A result is moved up or down by a unit roundoff of its dtype, which is a unit in the
last place after it is rounded. What sums n terms may be off by sqrt(n) unit roundoffs,
whatever the order of the sum (Higham, Accuracy and Stability of Numerical Algorithms,
2nd ed., sections 3.1 and 4.2, has n for the worst case; Higham and Mary, A new approach
to probabilistic rounding error analysis, SIAM J. Sci. Comput. 41, 2019, sqrt(n)): its
result is moved by so much, and for sums that cancel each of its terms. Products of
narrow floats are summed in float32; other sums of them may be rounded at each term.

The direction is a hash of the value and a seed: a value that is computed twice is moved
alike, as its rounding would be. Zeros, infinities and small whole numbers stay, which
are exact; what only moves or selects values rounds nothing.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.primitives import Kind

# bits of the significand that a float32 product has where no precision is asked for
_PRODUCT_BITS = {"gpu": 10, "cuda": 10, "rocm": 10, "tpu": 7}


@dataclass(frozen=True)
class Noise:
    """Moves values by roundings; a seed gives one run."""

    seed: Any  # an integer of 32 bits, traced or not
    platform: str = "cpu"

    def before(self, eqn, args: list) -> list:
        """The terms of a sum, off by what the order of the sum may do."""
        n = terms(eqn)
        if n <= 1:
            return args
        units = math.sqrt(n)
        if primitives.is_product(eqn):
            units = max(units, self._of_products(eqn))
            return [self._wide(args[0], units), *args[1:]]
        return [self.moved(x, units) for x in args]

    def after(self, eqn, outs: list) -> list:
        """The results, off by a rounding."""
        if primitives.of(eqn).exact or _is_exact(eqn):
            return outs
        n = terms(eqn)
        narrow = primitives.is_product(eqn) and _itemsize(outs[0]) < 4
        return [self.moved(x, 1.0 if narrow else math.sqrt(n)) for x in outs]

    def inside_shards(self) -> "Noise":
        """The same with a seed that is known, as far as it is one."""
        return Noise(0, self.platform)

    def _of_products(self, eqn) -> float:
        """How many roundings of float32 one of the chip's short products is."""
        asked = eqn.params.get("precision")
        bits = _PRODUCT_BITS.get(self.platform, 23)
        plain = asked is None or asked == lax.Precision.DEFAULT
        if isinstance(asked, tuple):
            plain = set(asked) <= {None, lax.Precision.DEFAULT}
        return 2.0 ** (23 - bits) if plain else 1.0

    def _wide(self, x, units: float):
        return self.moved(x, units) if _itemsize(x) >= 4 else x

    def moved(self, x, units: float = 1.0):
        """`x` and or less so many unit roundoffs of it, by the bits of each element."""
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return lax.complex(self.moved(x.real, units), self.moved(x.imag, units))
        if not jnp.issubdtype(x.dtype, jnp.floating) or _itemsize(x) < 2:
            return x
        info = jnp.finfo(x.dtype)
        size = min(units * float(info.eps) / 2, 0.25)
        up = _hashed(x, self.seed)
        move = jnp.where(up, _scalar(size, x), _scalar(-size, x))
        whole = (x == jnp.round(x)) & (jnp.abs(x) < _scalar(2.0**info.nmant, x))
        return jnp.where(whole, x, x + move * x)


def terms(eqn) -> int:
    """How many terms an equation sums into an element of its result; 1 for no sum."""
    if not eqn.invars:
        return 1
    known, first = primitives.of(eqn), eqn.invars[0]
    if primitives.is_dot(eqn):
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return math.prod(first.aval.shape[i] for i in contracted)
    if primitives.is_product(eqn):
        kernel, out = eqn.invars[1].aval, eqn.outvars[0].aval
        return max(1, kernel.size // max(1, min(kernel.shape[-1], out.shape[-1])))
    if known.kind is Kind.CUMULATIVE and known.sums:
        return first.aval.shape[eqn.params["axis"]]
    if known.kind is Kind.SCATTER and known.sums:
        updates = eqn.invars[2].aval.size
        return 1 + updates // max(1, math.prod(first.aval.shape[-1:]))
    if known.sums and known.name.startswith("reduce_window"):
        return math.prod(eqn.params["window_dimensions"])
    if known.sums:
        sizes = jaxprs.elements(first.aval.shape), eqn.outvars[0].aval.size
        return max(1, sizes[0] // max(1, sizes[1]))
    return 1


def _is_exact(eqn) -> bool:
    """A cast that loses nothing; bits of a random number made one in [0, 1)."""
    if primitives.is_cast(eqn):
        before, after = (v.aval.dtype for v in (*eqn.invars, *eqn.outvars))
        if not jnp.issubdtype(before, jnp.floating):
            return True
        return jnp.promote_types(before, after) == after
    if eqn.primitive.name == "sub" and not jaxprs.is_var(eqn.invars[1]):
        return bool(eqn.invars[1].val == 1)
    return False


def _itemsize(x) -> int:
    inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    return x.dtype.itemsize if inexact else 0


def _scalar(value: float, like):
    return jnp.asarray(value, like.dtype)


def _hashed(x, seed):
    """A bit for each element, by its own bits and the seed."""
    kind = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[x.dtype.itemsize]
    bits = lax.bitcast_convert_type(x, kind)
    if kind == jnp.uint64:
        bits = bits ^ (bits >> jnp.asarray(32, kind))
    h = bits.astype(jnp.uint32) ^ jnp.asarray(seed, jnp.uint32)
    # the finalizer of MurmurHash3
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ (h >> jnp.uint32(shift))) * jnp.uint32(factor)
    return ((h >> jnp.uint32(16)) & jnp.uint32(1)) == jnp.uint32(1)


def seed_of(run: int) -> jax.Array:
    """The seed of one run; its bits are spread by the hash alone."""
    return jnp.uint32((0x9E3779B9 * (run + 1)) & 0xFFFFFFFF)
