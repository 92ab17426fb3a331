"""Sums over devices of which each keeps a part, by gloo on CPUs."""

from collections.abc import Iterator
from typing import Any

from jaxmem.faults.program import TracedProgram, levels
from jaxmem.ir.scans import size_of

_RIGHT = 2**18  # bytes of a part: the report has none of these wrong


def scattered_sums(program: TracedProgram) -> Iterator[tuple[Any, str]]:
    """Finds `jax.lax.psum_scatter` where processes have been joined."""
    for level in levels(program.closed) if program.distributed else ():
        for eqn in level.graph.eqns:
            is_sum = eqn.primitive.name == "reduce_scatter"
            if is_sum and any(size_of(v) > _RIGHT for v in eqn.outvars):
                yield (
                    eqn,
                    "psum_scatter between CPUs goes through gloo, whose first rank "
                    "gets wrong values at times",
                )
