"""What cuDNN's attention takes: one call of a jaxpr, and of a compiled module."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxmem.chips import Rates
from jaxmem.cost import roofline
from jaxmem.cost.kernel import Product
from jaxmem.ir.shards import WHOLE, Shardings
from jaxmem.ir.types import JaxprEqn

_PASSES = "dot_product_attention_fwd", "dot_product_attention_bwd"  # wrapped or not
_STARTED = 256  # keys in whose time a block of queries starts and ends; measured, H200
_BIASED = 1.9  # times as long, where a bias or a mask is added to the logits; measured
_GRADIENTS = 12.0  # times the queries: what a backward pass clears, sums, converts


@dataclass(frozen=True)
class LibraryAttention:
    """A pass of it.

    Attributes:
        heads: of all examples together.
        queries: their number.
        keys: their number.
        width: of a head.
        bits: of an element of the queries.
        dtype: theirs.
        causal: whether half of the pairs are left out.
        biased: whether a bias is added to the logits.
        backward: whether it is the backward pass.
    """

    heads: int
    queries: int
    keys: int
    width: int
    bits: int
    dtype: str
    causal: bool
    biased: bool
    backward: bool

    def products(self) -> Iterator[Product]:
        """Two of a forward pass, five of a backward one; causal ones by half."""
        seen = 0.5 if self.causal else 1.0
        spent = 1.0 + _STARTED / (self.keys * seen)
        spent *= _BIASED if self.biased else 1.0
        one = Product(self.heads, self.queries, self.keys, self.width * seen, *self._of)
        two = Product(self.heads, self.queries, self.width, self.keys * seen, *self._of)
        one, two = (replace(each, spent=spent, library=True) for each in (one, two))
        if self.backward:
            yield from (replace(one, again=True), one, two, two, two)
        else:
            yield from (one, two)

    @property
    def apart(self) -> float:
        """Bytes that other kernels of the same call move."""
        size = self.heads * self.queries * self.width * self.bits / 8
        return _GRADIENTS * size if self.backward else 0.0

    @property
    def _of(self) -> tuple[int, str]:
        return self.bits, self.dtype


def is_library_attention(eqn: JaxprEqn) -> bool:
    """Whether it is a pass of cuDNN's attention."""
    return _is_pass(eqn, *_PASSES) and "mask_type" in eqn.params


def _is_pass(eqn: JaxprEqn, *names: str) -> bool:
    return eqn.primitive.name.startswith(names)


def attention_seconds(
    eqn: JaxprEqn, rates: Rates, shardings: Shardings = WHOLE
) -> float:
    """How long a pass takes on one device."""
    one = _of_equation(eqn)
    products = sum(roofline.product_seconds(p, rates) for p in one.products())
    return (products + one.apart / rates.bandwidth) / shardings.workers(eqn)


def _of_equation(eqn: JaxprEqn) -> LibraryAttention:
    queries, keys = (v.aval for v in eqn.invars[:2])
    # [batch, length, heads, width], or with heads before the length
    length, heads = (2, 1) if eqn.params["layout"] else (1, 2)
    return LibraryAttention(
        queries.shape[0] * queries.shape[heads],
        queries.shape[length],
        keys.shape[length],
        queries.shape[3],
        8 * queries.dtype.itemsize,
        queries.dtype.name,
        "CAUSAL" in str(eqn.params["mask_type"]),
        eqn.params["variadic_args"][0],
        _is_pass(eqn, _PASSES[1]),
    )
