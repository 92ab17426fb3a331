"""What an operation takes that is lowered to a kernel, by what the kernel declares.

Which one it is depends on the chip. A jaxpr has XLA's form, whose blocks go through
memory: attention of 64 x 512 tokens of BERT-base takes 2.6 ms in it on an H100, where
the kernel takes 0.2.
"""

import functools
from collections.abc import Callable

from jaxmem import _compat
from jaxmem.chips import Rates, is_choice, kernel_of
from jaxmem.cost import roofline
from jaxmem.cost.kernel import Arithmetic, Declared, KernelWork, Traffic
from jaxmem.cost.library_attention import attention_seconds, is_library_attention
from jaxmem.ir import jaxprs
from jaxmem.ir.jaxprs import elements
from jaxmem.ir.scans import is_var
from jaxmem.ir.shards import Shardings
from jaxmem.ir.types import ClosedJaxpr, JaxprEqn


def kernel_seconds(
    eqn: JaxprEqn,
    rates: Rates,
    shardings: Shardings,
    products: Callable[[JaxprEqn], float],
) -> float | None:
    """How long the kernel takes; None where XLA does it.

    Args:
      eqn: any equation.
      rates: of the chip.
      shardings: how its arrays are sharded over devices.
      products: seconds of the products in XLA's form. A kernel that declares nothing
        takes what these do with exponentials between them, or its bytes.
    """
    if not is_choice(eqn):
        return None
    devices = shardings.workers(eqn)
    kernel = kernel_of(eqn, rates.chip, devices > 1)
    if kernel is None:
        return None
    declared = _declared(kernel, rates)
    if declared is not None:
        return declared / devices
    moved = sum(map(shardings.bytes_of, filter(is_var, (*eqn.invars, *eqn.outvars))))
    took = max(products(eqn) / rates.between, moved / rates.bandwidth)
    return took + rates.launch + rates.fill


@functools.lru_cache(maxsize=256)  # every cut asks for it, and equal layers share one
def _declared(kernel: ClosedJaxpr, rates: Rates) -> float | None:
    """Of what a kernel's jaxpr says; None where it says nothing."""
    parts = (_seconds(one, rates) for one in jaxprs.walk(kernel.jaxpr))
    known = [part for part in parts if part is not None]
    return sum(known) if known else None


def _seconds(eqn: JaxprEqn, rates: Rates) -> float | None:
    """Of an equation in a kernel's jaxpr that says what it costs."""
    if is_library_attention(eqn):
        return attention_seconds(eqn, rates) + rates.launch + rates.fill
    told = _compat.declared_cost(eqn)
    if told is None:
        return None
    largest = max((v.aval for v in eqn.invars), key=lambda x: elements(x.shape))
    special, size = told["transcendentals"], told["bytes_accessed"]
    declared = Declared(told["flops"], special, size, 8 * largest.dtype.itemsize)
    traffic = Traffic((("", size),), 0)
    work = KernelWork((), traffic, Arithmetic(special=special), declared=declared)
    return roofline.seconds(work, rates)[0]
