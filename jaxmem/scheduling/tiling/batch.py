"""The part of a step that can run on some examples at a time: all up to the gradients.

From the arguments that hold the examples the axis is followed through both passes. What
sums over all examples ends the region: gradients, the loss. What needs such a sum and
examples too is where examples meet; there a step cannot be cut, unless the sum is of
labels and masks alone, and is known before.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.placements import Partial, Placement, Shard
from jaxmem.ir.placements.bodies import NotInParts, is_zero, named, summed_by
from jaxmem.ir.placements.propagate import Propagation
from jaxmem.ir.primitives import Kind
from jaxmem.ir.scans import is_var
from jaxmem.ir.shards import Names, Shardings, asked_by, of_spec
from jaxmem.scheduling.tiling.batch_gradients import has_gradients, has_product
from jaxmem.scheduling.tiling.loops import is_nested, placements_of
from jaxmem.scheduling.tiling.partial_sums import moves_sums
from jaxmem.scheduling.tiling.shard_parts import Parts
from jaxmem.scheduling.tiling.sums import is_arithmetic


class _Meet(Exception):
    """The operation in which examples meet.

    Attributes:
      at: how many equations come before the one that cannot be in parts.
    """

    def __init__(self, why: str, at: int):
        super().__init__(why)
        self.at = at


@dataclass
class Batch(Propagation):
    """What of a step runs in parts along the axis of its examples.

    Attributes:
      graph: the step.
      n: how many parts there are.
      axis: of the arguments, along which they hold the examples.
      shards: over how many devices the examples are sharded. A part is taken from each
        of their shards, so that no device needs what another one has.
      shardings: how the arrays of the step are sharded.
      after: equations that need all parts to be done.
      before: variables that are computed of all examples before the first part.
      zeros: variables that are zero.
    """

    graph: JaxprGraph = field(kw_only=True)
    n: int = field(kw_only=True)
    axis: int = 0
    shards: int = 1
    shardings: Shardings = field(default_factory=Shardings)
    after: dict[int, str] = field(default_factory=dict)  # -> what they wait for
    before: set[Any] = field(default_factory=set)
    zeros: set[Any] = field(default_factory=set)
    # variables made late of arrays that hold examples -> what they wait for
    meets: dict[Any, str] = field(default_factory=dict)
    behind: dict[Any, str] = field(default_factory=dict)  # made late -> the same

    @property
    def length(self) -> int:
        """How many examples a shard has."""
        return self.examples.aval.shape[self.axis] // self.shards

    @property
    def examples(self) -> Any:
        """The largest argument that holds some, of those that are sharded most."""
        found = (v for v in self.graph.arguments if v in self.of)
        return max(
            found, key=lambda v: (self.shardings.count(v, self.axis), v.aval.size)
        )

    @property
    def parts(self) -> Parts:
        return Parts(self.n, self.shards)

    @property
    def names(self) -> Names:
        """Over which axes of the mesh the examples are sharded."""
        return self.shardings.names(self.examples, self.axis)

    def frontier(self) -> tuple[list[Any], list[Any]]:
        """(sums, cut arrays) of the parts that something outside of them needs."""
        made = self._needed()
        sums = [v for v in made if isinstance(self.at(v), Partial)]
        return sums, [v for v in made if isinstance(self.at(v), Shard)]

    def of_no_example(self) -> list[Any]:
        """What the parts make, each the same, that something outside of them needs."""
        ends = Partial | Shard
        return [v for v in self._needed() if not isinstance(self.at(v), ends)]

    def _needed(self) -> list[Any]:
        graph, needed = self.graph, dict.fromkeys(filter(is_var, self.graph.outvars))
        for i in self.after:
            needed |= dict.fromkeys(filter(is_var, graph.eqns[i].invars))
        return [v for v in needed if graph.maker.get(v) in self.placed]

    def in_part(self) -> set[int]:
        """Equations on whole arrays that are cheap enough to be done for each part."""
        found: set[int] = set()
        for i, eqn in enumerate(self.graph.eqns):
            if i in self.placed or i in self.after:
                continue
            if not _is_done_anew(eqn) or set(eqn.outvars) & self.before:
                continue
            makers = (self.graph.maker.get(v) for v in filter(is_var, eqn.invars))
            if all(m is None or m in found for m in makers):
                found.add(i)
        return found


def find(
    closed, n: int, given: Iterable[int], shardings: Shardings | None = None
) -> Batch | str:
    """The region of a step that runs in n parts.

    Args:
      closed: the step.
      n: how many parts.
      given: positions of arguments that may hold the examples.
      shardings: how its arrays are sharded over devices, where that is known.

    Returns:
      The region. A text says why there is none: the operation where examples meet.
    """
    shardings = shardings or Shardings()
    whys = {-1: f"no argument has an axis that n={n} divides"}
    variables = jaxprs.split(closed)[0].invars
    groups = _by_shape(variables, given, axes=1)
    blocks = lambda v: n * shardings.count(v, 0)
    is_cut = lambda i: variables[i].aval.shape[0] % blocks(variables[i]) == 0
    groups = [places for places in groups if all(map(is_cut, places))]
    for places in groups:
        try:
            found = _from(closed, n, places, shardings)
        except _Meet as reason:
            whys[reason.at] = f"examples meet in {reason}"
            continue
        if has_gradients(found):
            return _moved(found) or found
        whys[0] = "no gradient is a sum over it"
    # a frozen weight may be as long as the batch; what meets the examples element by
    # element is cut with them, whether it is among the first or not
    for group in groups:
        for places in _by_shape(variables, group):
            others = set(group) - set(places)
            found = _some(closed, n, places, others, shardings) if others else None
            if found is not None:
                return _moved(found) or found
    found = _along_last(closed, n, given, shardings)
    if found is not None:
        return _moved(found) or found
    # that of the arguments which are followed furthest: weights are not examples
    return whys[max(whys)]


def _along_last(
    closed, n: int, given: Iterable[int], shardings: Shardings
) -> Batch | None:
    """The region from the last axis of an argument.

    `jax.jacfwd` stacks its tangents there, and with them goes what they are compared
    with. An axis that a product has part in is of features.
    """
    variables = jaxprs.split(closed)[0].invars
    for i in given:
        axis = variables[i].aval.ndim - 1
        if axis < 1 or variables[i].aval.shape[axis] % n:
            continue
        if shardings.count(variables[i], axis) > 1:
            continue
        with suppress(_Meet):
            found = _from(closed, n, [i], shardings, axis)
            products = any(has_product(found.graph.eqns[k]) for k in found.placed)
            if not products and has_gradients(found):
                return found
    return None


def _moved(batch: Batch) -> str:
    """Where a constraint brings examples to other devices; empty if none does.

    A part is made on the devices of its shard, as `jax.vmap` has it, and nothing in it
    can name the axes of the mesh that these lie along: but as the examples do.
    """
    own = {*batch.names}
    for i in sorted(batch.placed):
        for eqn in _all_in(batch.graph.eqns[i]):
            sharding = asked_by(eqn)
            spec = of_spec(sharding, eqn.outvars[0]) if sharding is not None else ()
            if any(own & {*names} and own != {*names} for names in spec):
                return f"examples go to other devices in {named(eqn)}"
    return ""


def _all_in(eqn) -> Iterator[Any]:
    """An equation and those in its bodies."""
    yield eqn
    for body in jaxprs.bodies(eqn):
        yield from jaxprs.walk(body)


def _by_shape(
    variables: Sequence[Any], given: Iterable[int], axes: int | None = None
) -> list[list[int]]:
    """Positions of arrays whose first `axes` axes have the same lengths."""
    found: dict[tuple[int, ...], list[int]] = {}
    for i in given:
        shape = variables[i].aval.shape
        if shape and shape[0] != 1:
            found.setdefault(shape[:axes], []).append(i)
    size = lambda places: sum(variables[i].aval.size for i in places)
    return sorted(found.values(), key=size, reverse=True)


def _some(
    closed, n: int, places: Sequence[int], others: Iterable[int], shardings: Shardings
) -> Batch | None:
    """The region from some of the arguments of one length; the others are weights."""
    try:
        found = _from(closed, n, places, shardings)
    except _Meet:
        return None
    # else they are other examples, all of which a product outside of the parts takes
    whole = {found.graph.arguments[i] for i in others}
    for i, eqn in enumerate(found.graph.eqns):
        if i not in found.placed and any(
            v in whole for v in filter(is_var, eqn.invars)
        ):
            if has_product(eqn):
                return None
            whole.update(eqn.outvars)
    return found if has_gradients(found) else None


def _from(
    closed, n: int, places: Sequence[int], shardings: Shardings, axis: int = 0
) -> Batch:
    graph = JaxprGraph(closed)
    shards = max(shardings.count(graph.arguments[i], axis) for i in places)
    about = {
        "graph": graph,
        "n": n,
        "axis": axis,
        "shards": shards,
        "shardings": shardings,
    }
    wanted: dict[Any, Placement] = {}
    before: set[Any] = set()
    while True:
        batch = Batch(wanted=dict(wanted), before=set(before), **about)
        batch.of.update((graph.arguments[i], Shard(axis)) for i in places)
        for i, eqn in enumerate(graph.eqns):
            _follow(batch, i, eqn)
        if (batch.before, batch.wanted) == (before, wanted):
            return batch
        before, wanted = batch.before, batch.wanted


def _is_done_anew(eqn) -> bool:
    """Whether it is on whole arrays, and yet done for every part."""
    # Random bits of all examples would be held from the first part to the last.
    known = primitives.of(eqn)
    draws = known.kind is Kind.KEY or (known.kind is Kind.RANDOM and not known.opaque)
    return known.cheap or known.moves or draws


def _follow(batch: Batch, i: int, eqn) -> None:
    """Takes an equation into the region, or leaves it before or behind it."""
    if is_zero(eqn, batch.zeros):
        batch.zeros.update(eqn.outvars)
    if any(v in batch.before for v in eqn.outvars):
        return
    ins = batch.all_at(eqn.invars)
    waits = next((batch.behind[v] for v in eqn.invars if _in(v, batch.behind)), "")
    terms = any(isinstance(p, Partial) for p in ins)
    cut = any(isinstance(p, Shard) for p in ins)
    is_move = moves_sums(eqn) or primitives.is_scatter_add(eqn)
    if waits or (terms and (cut or not is_move)):
        if cut and _known_early(batch, eqn):
            return
        _leave(batch, i, eqn, cut, waits or _summed(batch, eqn))
        return
    try:
        found = placements_of(eqn, ins, batch.asked(eqn), batch.parts)
        if found and not all(map(_ends, found.outs)):
            raise NotInParts(eqn, "what its parts give cannot be combined")
    except NotInParts as reason:
        _leave(batch, i, eqn, cut, str(reason))
        return
    if found is not None:
        batch.place(i, eqn, found)


def _in(atom, found) -> bool:
    return is_var(atom) and atom in found


def _ends(placement: Placement) -> bool:
    return not isinstance(placement, Partial) or is_arithmetic(placement.op)


def _leave(batch: Batch, i: int, eqn, cut: bool, why: str) -> None:
    """An equation is done behind the region; products of examples must not be."""
    meets = next((batch.meets[v] for v in eqn.invars if _in(v, batch.meets)), "")
    if cut or meets:
        if has_product(eqn):
            raise _Meet(meets or why, i)
        batch.meets.update(dict.fromkeys(eqn.outvars, meets or why))
    batch.after[i] = why
    batch.behind.update(dict.fromkeys(eqn.outvars, why))


def _summed(batch: Batch, eqn) -> str:
    """The operation that gave a sum over all examples."""
    v = next(v for v in eqn.invars if isinstance(batch.at(v), Partial))
    return named(summed_by(batch.graph.eqns, batch.placed, v))


def _known_early(batch: Batch, eqn) -> bool:
    """Whether what an equation waits for is of labels alone: it is computed before."""
    graph = batch.graph
    waits = lambda v: _in(v, batch.behind) or isinstance(batch.at(v), Partial)
    cone = graph.cone(filter(waits, eqn.invars))
    eqns = [graph.eqns[k] for k in cone]
    if any(has_product(e) or is_nested(e) for e in eqns):
        return False
    kept = (v for k in cone for v in graph.eqns[k].outvars)
    new = set(filter(waits, kept))
    changed = not new <= batch.before
    batch.before |= new
    return changed
