"""What every part needs whole, gathered once: before the loop of a region.

A weight that is sharded as the examples are (FSDP) is gathered where it meets them. XLA
would do that in every iteration.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxmem.ir.placements.labels import Labels
from jaxmem.ir.scans import is_var
from jaxmem.ir.shards import Names, Shardings, held
from jaxmem.scheduling.tiling.regions import Region, RegionGraph


def gathered(graph: RegionGraph, region: Region, read: Callable) -> dict[Any, Any]:
    """The arrays that a region needs in another place than they are, in that place.

    Args:
      graph: the list of equations.
      region: some of them.
      read: gives the value of a variable.
    """
    apart = (one for i in sorted(region.eqns) for one in _apart(graph, region, i))
    return held_whole(apart, graph.shardings, read)


def held_whole(
    apart: Iterable[tuple[Any, int, Names]], shardings: Shardings, read: Callable
) -> dict[Any, Any]:
    """Arrays that are not sharded along some axes any more.

    Args:
      apart: (variable, axis, over what it is sharded), for each of these axes.
      shardings: how the variables are sharded.
      read: gives the value of a variable.
    """
    found: dict[Any, list[Names]] = {}
    for v, axis, names in apart:
        spec = found.setdefault(v, [*shardings.of[v]])
        if spec[axis] == names:
            spec[axis] = ()
    return {v: held(read(v), shardings.mesh, tuple(s)) for v, s in found.items()}


def sharded_apart(
    eqn, table: Labels, shardings: Shardings, k: int
) -> Iterator[tuple[Any, int, Names]]:
    """(variable, axis, its names) where operand `k` is sharded as no other is."""
    atoms = [*eqn.invars, *eqn.outvars]
    for axis, label in enumerate(table.ins[k]):
        names = shardings.names(atoms[k], axis)
        if not names or label is None:
            continue
        same = enumerate(zip(atoms, table.axes(label), strict=True))
        others = (
            shardings.names(w, a) for m, (w, a) in same if m != k and a is not None
        )
        if any(other != names for other in others):
            yield atoms[k], axis, names


def _apart(
    graph: RegionGraph, region: Region, i: int
) -> Iterator[tuple[Any, int, Names]]:
    """(variable, axis, its names) of whole operands that others are not sharded as."""
    eqn, table, shardings = (
        graph.eqns[i],
        graph.labels(i, region.blocks),
        graph.shardings,
    )
    if not isinstance(table, Labels):
        return
    for k, cut in enumerate(region.placed[i].in_axes):
        v = eqn.invars[k]
        if cut is None and is_var(v) and graph.maker.get(v) not in region.eqns:
            yield from sharded_apart(eqn, table, shardings, k)
