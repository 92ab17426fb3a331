"""What an equation costs one device of a chip, by the rates of compiled steps.

The estimate ranks what may be computed twice. Matmuls and convolutions take what their
tiles take (`cost.roofline`), or as long as their output takes to be written: one of few
channels, as that of queries and keys. What they read is there, or needed for others
anyway. Kernels take what they declare, and anything else its bytes at the memory's
rate, or nothing where it is fused into its reader. Each kernel is started.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jaxmem import _compat
from jaxmem.chips import Rates
from jaxmem.cost import roofline
from jaxmem.cost.chosen_kernel import kernel_seconds
from jaxmem.cost.library_attention import attention_seconds, is_library_attention
from jaxmem.cost.products import product_of
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.communication import sent
from jaxmem.ir.fused import is_fused
from jaxmem.ir.jaxprs import elements
from jaxmem.ir.map_operations import mapped_axes
from jaxmem.ir.primitives import Kind
from jaxmem.ir.propagation import given_inside, shardings_in
from jaxmem.ir.ragged import is_ragged, ragged_flops
from jaxmem.ir.scans import is_mask, is_var, iterations
from jaxmem.ir.shards import WHOLE, Shardings

# A random word, in terms of what it takes to write it: that, and 60 operations of
# threefry, as of a compiled kernel: by an H100's rates another 1.8 times.
_HASH = 3


def flops(eqn, shardings: Shardings = WHOLE) -> float:
    """Multiplications and additions of matmuls and convolutions, loops in full."""
    if not primitives.is_product(eqn):
        return _of_products_inside(eqn, shardings, flops)
    if is_ragged(eqn):
        return ragged_flops(eqn) / shardings.workers(eqn)
    if primitives.is_dot(eqn):
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        inner = elements([shape[a] for a in contracted])
    else:
        kernel = list(eqn.invars[1].aval.shape)
        # its output features are among the elements of the output
        kernel.pop(eqn.params["dimension_numbers"].rhs_spec[0])
        inner = elements(kernel)
    return 2.0 * inner * elements(eqn.outvars[0].aval.shape) / shardings.workers(eqn)


def arithmetic(
    eqn,
    rates: Rates,
    shardings: Shardings = WHOLE,
    axes: Sequence[int | None] = (),
    n: int = 1,
) -> float:
    """How long the arithmetic of a matmul or a convolution takes; 0 of all else.

    Args:
      eqn: any equation.
      rates: of the chip.
      shardings: how its arrays are sharded over devices.
      axes: of each operand the axis along which parts are cut, or None.
      n: how many parts there are; the seconds are those of one.
    """
    if not primitives.is_product(eqn):
        return 0.0
    return roofline.product_seconds(product_of(eqn, shardings, axes, n), rates)


def started(eqn, rates: Rates) -> float:
    """Seconds of a kernel beside what it does."""
    return rates.launch + rates.fill * primitives.is_product(eqn)


def seconds(eqn, rates: Rates, shardings: Shardings = WHOLE) -> float | None:
    """How long an equation takes; None where nobody can tell, or it has effects."""
    if _compat.has_side_effects(eqn):
        return None
    if is_fused(eqn):
        return 0.0
    known = primitives.of(eqn)
    if known.opaque or known.sends:
        return None
    kernel = _of_kernel(eqn, rates, shardings)
    if kernel is not None:
        return kernel
    if jaxprs.bodies(eqn):
        return _inside(eqn, shardings, lambda e, s: seconds(e, rates, s))
    made = sum(map(shardings.bytes_of, eqn.outvars)) / rates.bandwidth
    if primitives.is_product(eqn):
        return max(arithmetic(eqn, rates, shardings), made) + started(eqn, rates)
    if is_library_attention(eqn):
        took = attention_seconds(eqn, rates, shardings)
        return max(took, made) + started(eqn, rates)
    # a counter is hashed: that takes arithmetic where others wait for memory
    if known.kind is Kind.RANDOM:
        return _HASH * made + started(eqn, rates)
    read = sum(map(shardings.bytes_of, filter(is_var, eqn.invars)))
    return read / rates.bandwidth + made + started(eqn, rates)


def recompute_seconds(eqn, rates: Rates, shardings: Shardings) -> float | None:
    """The same to compute it once more: what devices send each other for it, too.

    Where random bits are drawn in whatever reads them a mask that is kept is read twice
    in the forward pass: to draw it in the backward pass instead costs nothing more.
    """
    if primitives.of(eqn).kind is Kind.RANDOM and rates.draws_in_readers:
        return 0.0
    own = seconds(eqn, rates, shardings)
    return None if own is None else own + sent(eqn, shardings) / rates.link


def packing_seconds(v, rates: Rates, shardings: Shardings = WHOLE) -> float:
    """How long one device packs a mask into bits to keep it, and unpacks it."""
    if not is_mask(v):
        return 0.0
    return elements(v.aval.shape) / shardings.shards(v) / rates.packing


def product_seconds(eqn, rates: Rates, shardings: Shardings = WHOLE) -> float:
    """How long the matmuls and convolutions of an equation take, loops in full."""
    if primitives.is_product(eqn):
        return arithmetic(eqn, rates, shardings)
    kernel = _of_kernel(eqn, rates, shardings)
    if kernel is not None:
        return kernel
    of = lambda e, s: product_seconds(e, rates, s)
    return _of_products_inside(eqn, shardings, of)


def _of_kernel(eqn, rates: Rates, shardings: Shardings) -> float | None:
    """How long the kernel takes that an equation is lowered to, if to any."""
    of = lambda e, s: product_seconds(e, rates, s)
    products = lambda e: _of_products_inside(e, shardings, of)
    return kernel_seconds(eqn, rates, shardings, products)


def _of_products_inside(
    eqn, shardings: Shardings, of: Callable[[Any, Shardings], float]
) -> float:
    # where there are none, it is no matter how arrays inside are sharded
    inside = (e for body in jaxprs.bodies(eqn) for e in jaxprs.walk(body))
    if not any(map(primitives.is_product, inside)):
        return 0.0
    return _inside(eqn, shardings, of) or 0.0


def _inside(
    eqn, shardings: Shardings, of: Callable[[Any, Shardings], float | None]
) -> float | None:
    """The sum over the equations inside; of the branches of a `cond` the largest."""
    # None where `of` is None for any of them.
    sums = []
    for body in jaxprs.bodies(eqn):
        given = given_inside(eqn, body, shardings)
        inside = shardings_in(body, given)
        parts = [of(e, inside) for e in jaxprs.split(body)[0].eqns]
        known = [x for x in parts if x is not None]
        if len(known) < len(parts):
            return None
        sums.append(sum(known) / (_sharing(eqn, shardings) if given is None else 1))
    # one branch is taken, and nobody knows which
    one = max(sums) if primitives.is_branch(eqn) else sum(sums)
    return iterations(eqn) * one


def _sharing(eqn, shardings: Shardings) -> int:
    """How many devices share what the bodies of an equation are of."""
    # that of a `shard_map` is of one device already
    own = mapped_axes(eqn) if primitives.is_shard_map(eqn) else ()
    return shardings.workers(eqn, without=own)
