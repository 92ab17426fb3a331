"""What an equation costs on a chip: an estimate from its flops and bytes.

Only ratios matter: the estimate ranks what may be computed twice. Matmuls and
convolutions take their arithmetic at the chip's best rate (what they read and write is
there or needed for others anyway); anything else takes its bytes at the memory's, and
nothing where it is fused into its reader. Short kernels are not charged for starting.
"""

from collections.abc import Callable
from typing import Any

from jaxmem import _compat
from jaxmem.chips import CHIPS
from jaxmem.chips import Machine as Machine
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.jaxprs import elements
from jaxmem.ir.map_operations import devices_of
from jaxmem.ir.part_marks import innermost_operations
from jaxmem.ir.primitives import Kind
from jaxmem.ir.ragged import is_ragged, ragged_flops
from jaxmem.ir.scans import is_var, size_of

MACHINES = {name: chip.machine for name, chip in CHIPS.items()}

_HASH = 3  # integer work of one random word, in terms of the bandwidth it takes


def fused_only(eqn, sent: float = 0.0) -> float | None:
    """A price at which only what costs next to nothing is recomputed."""
    free = lambda e: primitives.of(e).fused or is_lookup(e)
    fused = all(map(free, innermost_operations(eqn))) and not sent
    return 0.0 if fused and not _compat.has_side_effects(eqn) else None


def is_fused(eqn) -> bool:
    """Whether an equation is done inside of what reads its result."""
    return primitives.of(eqn).fused or primitives.is_barrier(eqn)


def is_lookup(eqn) -> bool:
    """Whether codes are looked up in a table of a byte's values, as NF4's sixteen."""
    if not primitives.is_gather(eqn):
        return False
    table, codes = (elements(v.aval.shape) for v in eqn.invars[:2])
    return table <= min(256, codes)


def flops(eqn) -> float:
    """Multiplications and additions of matmuls and convolutions, loops in full."""
    if primitives.is_dot(eqn):
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        inner = elements([shape[a] for a in contracted])
        return 2.0 * inner * elements(eqn.outvars[0].aval.shape)
    if primitives.is_convolution(eqn):
        kernel = list(eqn.invars[1].aval.shape)
        # its output features are among the elements of the output
        kernel.pop(eqn.params["dimension_numbers"].rhs_spec[0])
        return 2.0 * elements(eqn.outvars[0].aval.shape) * elements(kernel)
    if is_ragged(eqn):
        return ragged_flops(eqn)
    return _inside(eqn, flops) or 0.0


def seconds(eqn, machine: Machine) -> float | None:
    """How long an equation takes; None where nobody can tell, or it has effects."""
    # Nothing for what is fused into its reader.
    if _compat.has_side_effects(eqn):
        return None
    if is_fused(eqn):
        return 0.0
    known = primitives.of(eqn)
    if jaxprs.bodies(eqn) and not known.opaque:
        return _inside(eqn, lambda e: seconds(e, machine))
    if known.opaque or known.sends:
        return None
    if primitives.is_product(eqn):
        narrow = all(v.aval.dtype.itemsize <= 2 for v in eqn.invars[:2])
        return flops(eqn) / (machine.narrow if narrow else machine.wide)
    moved = sum(size_of(v) for v in [*eqn.invars, *eqn.outvars] if is_var(v))
    # a counter is hashed: that takes arithmetic where others wait for memory
    if known.kind is Kind.RANDOM:
        moved = _HASH * sum(map(size_of, eqn.outvars))
    return moved / machine.bandwidth


def product_seconds(eqn, machine: Machine) -> float:
    """How long the matmuls and convolutions of an equation take, loops in full."""
    if primitives.is_product(eqn):
        return seconds(eqn, machine) or 0.0
    return _inside(eqn, lambda e: product_seconds(e, machine)) or 0.0


def _inside(eqn, of: Callable[[Any], float | None]) -> float | None:
    """The sum over the equations inside; of the branches of a `cond` the largest."""
    # A `shard_map` is of what one device does, and this of what all do.
    # None where `of` is None for any of them.
    sums = []
    for body in jaxprs.bodies(eqn):
        parts = [of(e) for e in jaxprs.split(body)[0].eqns]
        known = [x for x in parts if x is not None]
        if len(known) < len(parts):
            return None
        sums.append(sum(known))
    times = eqn.params["length"] if primitives.is_scan(eqn) else 1
    times *= devices_of(eqn) if primitives.is_shard_map(eqn) else 1
    # one branch is taken, and nobody knows which
    return times * (max(sums) if primitives.is_branch(eqn) else sum(sums))
