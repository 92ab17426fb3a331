"""A region: operations that can run in n parts, and the axis each array is cut along.

From one array and one of its axes the labels of `ir.placements` say how the arrays
around it are cut. Largest arrays speak first; where two axes meet, the side without the
first array leaves the region.
"""

from collections.abc import Iterable, Iterator, KeysView
from dataclasses import dataclass, field, replace
from typing import Any

from jaxmem.ir import primitives
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.placements import Placements, Shard
from jaxmem.ir.placements.propagate import Propagation, Worklist
from jaxmem.ir.placements.rules import BEYOND, DIVIDES, WHOLE, place
from jaxmem.ir.scans import is_var
from jaxmem.ir.shards import Shardings, held_labels
from jaxmem.scheduling.tiling.masks import drawn, from_nothing, is_packed

NEEDS_ALL = "it needs all of"
AT_ONCE = "its generator makes all bits at once: a mask of them is kept, packed"
IN_PLACE = "it writes into an array that is carried, and parts would be a new one"


class RegionGraph(JaxprGraph):
    """A graph that knows what every equation needs."""

    def __init__(self, closed, shardings: Shardings | None = None):
        super().__init__(closed)
        self.closed = closed
        self.shardings = shardings or Shardings()
        # of each equation, those that it needs, as bits
        self.above: list[int] = []
        for eqn in self.eqns:
            bits = 0
            for v in filter(is_var, eqn.invars):
                if v in self.maker:
                    bits |= self.above[self.maker[v]] | 1 << self.maker[v]
            self.above.append(bits)
        self.drawn = drawn(self.eqns)
        # equations that each user may do for itself, as bits
        self.private = bits_of(from_nothing(self.eqns) | self.drawn)
        # of the many regions that are looked for, the same is asked again and again
        self._hulls: dict[tuple[Any, int], int] = {}
        self._sizes: dict[Any, int] = {}

    def size(self, v) -> int:
        """Bytes of a variable in the memory of one device."""
        if v not in self._sizes:
            self._sizes[v] = self.shardings.bytes_of(v)
        return self._sizes[v]

    def shards(self, v, axis: int) -> int:
        """How many shards an axis has, as far as is known."""
        return self.shardings.count(v, axis)

    def hull(self, seed, floor: int) -> int:
        """Equations that large arrays tie to an array, and all between, as bits."""
        if (seed, floor) not in self._hulls:
            self._hulls[seed, floor] = _hull(self, seed, floor)
        return self._hulls[seed, floor]

    def around(self, v) -> list[int]:
        """The equations that make or use a variable."""
        made = [self.maker[v]] if v in self.maker else []
        return [*self.users.get(v, ()), *made]

    def needs(self, i: int, k: int) -> bool:
        """Whether equation i needs what k makes."""
        return bool(self.above[i] >> k & 1)


@dataclass
class Region(Propagation):
    """Equations that run `n` times, each on its part.

    Attributes:
      n: how many parts.
      shards: over how many devices the axis is sharded. A part is taken from each of
        its shards, so that no device needs what another has.
      blocked: equations at the border, and why they are not in it.
    """

    n: int = field(kw_only=True)
    blocked: dict[int, str] = field(default_factory=dict)
    shards: int = 1

    @property
    def eqns(self) -> KeysView[int]:
        """Positions of the equations."""
        return self.placed.keys()

    @property
    def blocks(self) -> int:
        """How many pieces the axis is cut in: n of each shard."""
        return self.n * self.shards

    def is_sum(self, i: int) -> bool:
        """Whether the parts of an equation's output are combined."""
        return bool(self.placed[i].op)


def in_more_parts(graph: RegionGraph, region: Region, n: int) -> Region | None:
    """The region that `find` gives for n parts, from that of fewer; None: not known."""
    # It is the same where the labels tie the same axes to those that are cut, in all
    # that was looked at, and n divides them: what fewer parts did not divide, more do
    # not either.
    if n % region.n or any(DIVIDES in why for why in region.blocked.values()):
        return None
    looked_at = (*region.eqns, *region.blocked)
    more = replace(region, n=n)
    new, old = more.blocks, region.blocks
    if not all(_tied_alike(graph, region, i, old, new) for i in looked_at):
        return None
    if any(v.aval.shape[axis] % new for v, axis in more.axes.items()):
        return None
    return more


def _tied_alike(graph: RegionGraph, region: Region, i: int, old: int, new: int) -> bool:
    """Whether the axes that a region knows of an equation are tied to the same ones."""
    # a reshape has others that can be cut in `old` parts, and not in `new`
    before, after = graph.labels(i, old), graph.labels(i, new)
    if before == after:
        return True
    if isinstance(before, str) or isinstance(after, str):
        return False
    eqn = graph.eqns[i]
    known = enumerate(region.all_at([*eqn.invars, *eqn.outvars]))
    axes = [(k, p.axis) for k, p in known if isinstance(p, Shard)]
    same = all(before.tied(*at) == after.tied(*at) for at in axes)
    return same and before.combine == after.combine


def bits_of(positions: Iterable[int]) -> int:
    found = 0
    for i in positions:
        found |= 1 << i
    return found


def placed(graph: RegionGraph, i: int, region: Region) -> Placements | str:
    """How an equation is cut that agrees with a region, or why it is not."""
    eqn, n = graph.eqns[i], region.blocks
    name = eqn.primitive.name
    if name in BEYOND:
        return BEYOND[name]
    if primitives.is_update(eqn) and graph.is_given(eqn.invars[0]):
        return IN_PLACE
    if is_packed(eqn):
        return AT_ONCE
    table = graph.labels(i, n)
    if primitives.is_constraint(eqn):
        table = held_labels(eqn, region.shards)
    found = place(eqn, region.all_at(eqn.invars), region.all_at(eqn.outvars), n, table)
    if not isinstance(found, Placements):
        return found
    return WHOLE if found.op and len(eqn.outvars) > 1 else found


def find(graph: RegionGraph, seed, axis: int, n: int, floor: int = 0) -> Region:
    """The largest region round an array that is cut along an axis; it is convex."""
    # `floor`: bytes from which an array ties operations to the region
    region = Region({seed: Shard(axis)}, n=n, shards=graph.shards(seed, axis))
    allowed = graph.hull(seed, floor)
    # where large arrays say how, the small ones follow; of equals, the first
    work = Worklist()
    work.push(-graph.size(seed), seed)
    for v in work:
        for i in graph.around(v):
            if i in region.eqns or i in region.blocked or not allowed >> i & 1:
                continue
            for new in _join(graph, region, i):
                work.push(-graph.size(new), new)
    home = graph.maker[seed]
    while _leave(graph, region, home):
        pass
    return region


def _join(graph: RegionGraph, region: Region, i: int) -> Iterator[Any]:
    """Takes an equation in, if it can be cut; the variables whose axes it says."""
    eqn, got = graph.eqns[i], placed(graph, i, region)
    if isinstance(got, str):
        region.blocked[i] = got
        return
    yield from region.extend(i, eqn, got)


def _hull(graph: RegionGraph, seed, floor: int) -> int:
    """Equations that large arrays tie to the seed, and all between, as bits."""
    seen, found, work = {seed}, set(), [seed]
    while work:
        v = work.pop()
        for i in set(graph.around(v)) - found:
            found.add(i)
            eqn = graph.eqns[i]
            ties = filter(is_var, [*eqn.invars, *eqn.outvars])
            near = {a for a in ties if a not in seen and graph.size(a) >= floor}
            seen |= near
            work += near
    inside, above = bits_of(found), 0
    for i in found:
        above |= graph.above[i]
    between = (i for i in range(len(graph.eqns)) if above >> i & 1)
    between = [i for i in between if graph.above[i] & inside]
    # masks are made for each part
    return inside | bits_of(between) | graph.private & above


def _leave(graph: RegionGraph, region: Region, home: int) -> bool:
    """Whether equations had to leave, since a value is needed whole."""
    # It must be there before the loop: of its makers and its users those leave that are
    # not on the seed's side.
    inside = bits_of(region.eqns)
    for i in sorted(region.eqns):
        for v, axis in region.placed[i].operands(graph.eqns[i]):
            m = graph.maker.get(v) if is_var(v) else None
            if m is None:
                continue
            if axis is not None and m in region.eqns and not region.is_sum(m):
                continue
            makers = inside & (graph.above[m] | 1 << m)
            if not makers:
                continue
            gone = {k for k in region.eqns if makers >> k & 1}
            if home in gone:  # the seed is among the makers: the users go
                gone = {k for k in region.eqns if k == i or graph.needs(k, i)}
            why = f"{NEEDS_ALL} {primitives.quoted(graph.eqns[m])} first"
            region.blocked.update(dict.fromkeys(gone, why))
            for k in gone:
                del region.placed[k]
            return True
    return False


def inner(graph: JaxprGraph, region: Region) -> set[Any]:
    """Variables of which one part at a time is there."""
    found: set[Any] = set()
    for i in region.eqns:
        if region.is_sum(i):
            continue
        for v in graph.eqns[i].outvars:
            if v not in graph.outputs and region.eqns >= set(graph.users.get(v, ())):
                found.add(v)
    return found


def has_product(graph: RegionGraph, region: Region) -> bool:
    return any(primitives.is_product(graph.eqns[i]) for i in region.eqns)
