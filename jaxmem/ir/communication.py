"""What devices send each other to compute an equation, by how its arrays are sharded.

They send to cut or to sum along an axis that is sharded over them, and where a result
is whole along it: what a constraint asks for, Shardy has in the moves before it. What
gathers weights for a product is not counted: a product of its gradient needs them too.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.jaxprs import is_var
from jaxmem.ir.placements import Axis
from jaxmem.ir.placements.rules import same_axis
from jaxmem.ir.propagation import given_inside, shardings_in
from jaxmem.ir.scans import iterations
from jaxmem.ir.shards import Names, Shardings
from jaxmem.ir.types import Body, JaxprEqn


def sent(eqn: JaxprEqn, shardings: Shardings) -> float:
    """Bytes that a device sends to compute an equation, loops in full.

    Of a ring of n devices it sends (n-1)/n of the whole of what is summed, twice that
    where each is to have all of it, as much of what is gathered, and its own part of
    what is cut otherwise.
    """
    if shardings.mesh is None:
        return 0.0
    if id(eqn) not in shardings.sent:
        shardings.sent[id(eqn)] = eqn, _sent(eqn, shardings)
    return shardings.sent[id(eqn)][1]


def _sent(eqn: JaxprEqn, shardings: Shardings) -> float:
    inside = [(b, given_inside(eqn, b, shardings)) for b in jaxprs.bodies(eqn)]
    if known := [_sent_in(*one) for one in inside if one[1] is not None]:
        # of branches one is taken, and nobody knows which
        return max(known) * iterations(eqn)
    if primitives.is_shard_map(eqn):
        return 0.0  # its collectives are equations inside, which nobody recomputes
    if primitives.is_constraint(eqn):
        return _of_constraint(eqn, shardings)
    summed, gathered, cut = set(), set(), 0.0
    for k, axis, names in _sharded_axes(eqn, shardings):
        same = same_axis(eqn, k, axis, shardings.size(names))
        if same is None:
            cut += shardings.bytes_of(eqn.invars[k])
        elif _is_summed(eqn, same, names, shardings):
            summed.add(names)
        elif _is_gathered(eqn, same, names, shardings):
            gathered.add(names)
    cut += sum(_of_gather(eqn, names, shardings) for names in gathered)
    return cut + sum(_of_sum(eqn, names, shardings) for names in summed)


def gathered(eqn: JaxprEqn, shardings: Shardings) -> Iterator[tuple[Any, float]]:
    """(operand, bytes) that a device sends so that all have an operand of a product.

    So it is with weights that are sharded over the axes of the mesh that the examples
    are sharded over (FSDP).
    """
    if not primitives.is_product(eqn) or shardings.mesh is None:
        return
    for k, v in enumerate(eqn.invars):
        names = [n for j, _, n in _sharded_axes(eqn, shardings) if j == k]
        axes = [axis for j, axis, _ in _sharded_axes(eqn, shardings) if j == k]
        pairs = zip(axes, names, strict=True)
        apart = [n for axis, n in pairs if not _is_used(eqn, k, axis, n, shardings)]
        if apart:
            n = shardings.size(tuple(itertools.chain(*apart)))
            yield v, (n - 1) * shardings.bytes_of(v)


def _is_used(
    eqn: JaxprEqn, k: int, axis: int, names: Names, shardings: Shardings
) -> bool:
    """Whether a device needs its own part of an operand alone."""
    same = same_axis(eqn, k, axis, shardings.size(names))
    if same is None:
        return False
    outs = _having(eqn.outvars, same[len(eqn.invars) :])
    is_own = any(shardings.names(v, a) == names for v, a in outs)
    return is_own or _is_summed(eqn, same, names, shardings)


def _having(atoms: Sequence[Any], same: Sequence[Axis]) -> Iterator[tuple[Any, int]]:
    """The arrays that have an axis, and which of theirs it is."""
    pairs = zip(atoms, same, strict=True)
    return ((v, axis) for v, axis in pairs if axis is not None)


def _sent_in(closed: Body, given) -> float:
    inside = shardings_in(closed, given)
    return sum(sent(e, inside) for e in jaxprs.split(closed)[0].eqns)


def _sharded_axes(
    eqn: JaxprEqn, shardings: Shardings
) -> Iterator[tuple[int, int, Names]]:
    """(operand, axis, over which axes of the mesh) of what is sharded."""
    for k, v in enumerate(eqn.invars):
        for axis, names in enumerate(shardings.of.get(v, ()) if is_var(v) else ()):
            if names:
                yield k, axis, names


def _is_summed(
    eqn: JaxprEqn, same: Sequence[Axis], names: Names, shardings: Shardings
) -> bool:
    """Whether each device sums a part of an axis, of all operands that have it."""
    count = len(eqn.invars)
    having = _having(eqn.invars, same[:count])
    is_kept = any(axis is not None for axis in same[count:])
    return not is_kept and all(shardings.names(v, a) == names for v, a in having)


def _is_gathered(
    eqn: JaxprEqn, same: Sequence[Axis], names: Names, shardings: Shardings
) -> bool:
    """Whether a result is whole along an axis that an operand is sharded along."""
    if primitives.is_product(eqn):
        return False
    # nothing is known of what is sharded over a part of an axis of the mesh
    return any(
        v.aval.shape[axis] % shardings.size(names) == 0 and not shardings.names(v, axis)
        for v, axis in _having(eqn.outvars, same[len(eqn.invars) :])
    )


def _of_gather(eqn: JaxprEqn, names: Names, shardings: Shardings) -> float:
    n = shardings.size(names)
    return (n - 1) / n * sum(map(shardings.bytes_of, eqn.outvars))


def _of_constraint(eqn: JaxprEqn, shardings: Shardings) -> float:
    """To cut what a device has takes nothing."""
    (v,), (out,) = eqn.invars, eqn.outvars
    total = 0.0
    for _, axis, names in _sharded_axes(eqn, shardings):
        if shardings.names(out, axis)[: len(names)] == names:
            continue
        moved = {*names} & {*itertools.chain(*shardings.of.get(out, ()))}
        total += shardings.bytes_of(v) if moved else _of_gather(eqn, names, shardings)
    return total


def _of_sum(eqn: JaxprEqn, names: Names, shardings: Shardings) -> float:
    """Bytes that a device sends to sum results over these axes of the mesh."""
    n = shardings.size(names)
    total = 0.0
    for v in eqn.outvars:
        own = {*itertools.chain(*shardings.of.get(v, ()))}
        # each is left with a part of it, or with all of what it has a part of
        share = n if own & {*names} else 2
        total += (n - 1) / n * share * shardings.bytes_of(v)
    return total
