"""What every part needs whole, gathered once: before the loop of a region.

A weight that is spread as the examples are (FSDP) is gathered where it meets them. XLA
would do that in every iteration.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxmem.ir.label_rules import Labels
from jaxmem.ir.scans import is_var
from jaxmem.ir.shards import Names
from jaxmem.scheduling.tiling.regions import Region, RegionGraph


def gathered(graph: RegionGraph, region: Region, read: Callable) -> dict[Any, Any]:
    """The arrays that a region needs in another place than they are, in that place.

    Args:
      graph: the list of equations.
      region: some of them.
      read: gives the value of a variable.
    """
    found: dict[Any, list[Names]] = {}
    for i in sorted(region.eqns):
        for v, axis, names in _apart(graph, region, i):
            spread = found.setdefault(v, [*graph.spreads.of[v]])
            if spread[axis] == names:
                spread[axis] = ()
    return {v: _held(read(v), graph.spreads.mesh, names) for v, names in found.items()}


def _apart(
    graph: RegionGraph, region: Region, i: int
) -> Iterator[tuple[Any, int, Names]]:
    """(variable, axis, its names) of whole operands that others are not spread as."""
    eqn, table, spreads = graph.eqns[i], graph.labels(i, region.blocks), graph.spreads
    if not isinstance(table, Labels):
        return
    atoms = list(
        zip([*eqn.invars, *eqn.outvars], [*table.ins, *table.outs], strict=True)
    )
    for k, cut in enumerate(region.cut[i].ins):
        v, of_axis = atoms[k]
        if cut is not None or not is_var(v) or graph.maker.get(v) in region.eqns:
            continue
        for axis, label in enumerate(of_axis):
            names = spreads.names(v, axis)
            others = (
                spreads.names(w, of_other.index(label))
                for m, (w, of_other) in enumerate(atoms)
                if m != k and label is not None and label in of_other
            )
            if names and any(other != names for other in others):
                yield v, axis, names


def _held(x, mesh, spread: list[Names]):
    spec = PartitionSpec(*(names or None for names in spread))
    return jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, spec))
