"""What an equation costs on a chip: an estimate from its flops and bytes.

Only ratios matter: the estimate ranks what may be computed twice. Matmuls and
convolutions take their arithmetic at the chip's best rate (what they read and write is
there or needed for others anyway); anything else takes its bytes at the memory's, and
nothing where it is fused into its reader. Short kernels are not charged for starting.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxmem import _compat, _jaxpr
from jaxmem._jaxpr import elements
from jaxmem.ir.layer_axis import CHEAP, ELEMENTWISE
from jaxmem.ir.scans import is_var, size_of


@dataclass(frozen=True)
class Machine:
    """The rates of a chip.

    Attributes:
      narrow: flops a second of matmuls in 16 bits.
      wide: the same in 32 bits, at jax's default precision.
      bandwidth: bytes a second from and to its memory.
      host: bytes a second to its host's memory, or from there.
    """

    narrow: float
    wide: float
    bandwidth: float
    host: float


# the vendors' figures for dense matmuls; for the host those of 16 lanes of PCI Express
MACHINES = {
    "cpu": Machine(2e11, 1e11, 2e10, 2e10),
    "t4": Machine(65e12, 8.1e12, 320e9, 16e9),
    "l4": Machine(121e12, 60e12, 300e9, 32e9),
    "a100": Machine(312e12, 156e12, 1555e9, 32e9),
    "h100": Machine(989e12, 494e12, 3352e9, 64e9),
    "h200": Machine(989e12, 494e12, 4800e9, 64e9),
    "b200": Machine(2250e12, 1100e12, 7672e9, 64e9),
    "tpu-v4": Machine(275e12, 275e12, 1228e9, 16e9),
    "tpu-v5e": Machine(197e12, 197e12, 819e9, 16e9),
    "tpu-v5p": Machine(459e12, 459e12, 2765e9, 32e9),
    "tpu-v6e": Machine(918e12, 918e12, 1640e9, 32e9),
}

# done where they are read, inside whatever reads them
FUSED = ELEMENTWISE | CHEAP | {"concatenate", "iota", "name", "pad", "split"}
_HASH = 3  # integer work of one random word, in terms of the bandwidth it takes
_MATMULS = {"dot_general", "conv_general_dilated"}
_RANDOM = {"random_bits", "threefry2x32", "rng_bit_generator"}


def fused_only(eqn) -> float | None:
    """A price at which only what costs next to nothing is recomputed."""
    one = eqn.primitive.name in FUSED
    return 0.0 if one and not _compat.has_side_effects(eqn) else None


def flops(eqn) -> float:
    """Multiplications and additions of matmuls and convolutions, loops in full."""
    name = eqn.primitive.name
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        inner = elements([shape[a] for a in contracted])
        return 2.0 * inner * elements(eqn.outvars[0].aval.shape)
    if name == "conv_general_dilated":
        kernel = list(eqn.invars[1].aval.shape)
        kernel.pop(eqn.params["dimension_numbers"].rhs_spec[0])
        return 2.0 * elements(eqn.outvars[0].aval.shape) * elements(kernel)
    return _inside(eqn, flops) or 0.0


def seconds(eqn, machine: Machine) -> float | None:
    """How long an equation takes; None where nobody can tell, or it has effects.

    Nothing for what is fused into its reader.
    """
    if _compat.has_side_effects(eqn):
        return None
    if eqn.primitive.name in FUSED or eqn.primitive.name == "optimization_barrier":
        return 0.0
    if _jaxpr.bodies(eqn) and eqn.primitive.name not in _OPAQUE:
        return _inside(eqn, lambda e: seconds(e, machine))
    if eqn.primitive.name in _OPAQUE or eqn.primitive.name in _COLLECTIVES:
        return None
    if eqn.primitive.name in _MATMULS:
        narrow = all(v.aval.dtype.itemsize <= 2 for v in eqn.invars)
        return flops(eqn) / (machine.narrow if narrow else machine.wide)
    moved = sum(size_of(v) for v in [*eqn.invars, *eqn.outvars] if is_var(v))
    if eqn.primitive.name in _RANDOM:
        moved = _HASH * sum(map(size_of, eqn.outvars))
    return moved / machine.bandwidth


# the jaxpr does not say how often they iterate, or what they do
_OPAQUE = {"while", "pallas_call", "ffi_call", "custom_call", "shard_map"}
_COLLECTIVES = {
    *("psum", "psum2", "psum_invariant", "pmax", "pmin", "ppermute", "all_to_all"),
    *("all_gather", "all_gather_invariant", "reduce_scatter", "psum_scatter"),
}


def _inside(eqn, of: Callable[[Any], float | None]) -> float | None:
    """The sum over the equations inside; of the branches of a `cond` the largest.

    None where `of` is None for any of them.
    """
    sums = []
    for body in _jaxpr.bodies(eqn):
        parts = [of(e) for e in _jaxpr.split(body)[0].eqns]
        known = [x for x in parts if x is not None]
        if len(known) < len(parts):
            return None
        sums.append(sum(known))
    times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
    return times * (max(sums) if eqn.primitive.name == "cond" else sum(sums))
