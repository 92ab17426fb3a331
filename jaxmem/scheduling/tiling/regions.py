"""A region: operations that can run in n parts, and the axis each array is cut along.

From one array and one of its axes the labels of `ir.axis_labels` say how the arrays
around it are cut. Largest arrays speak first; where two axes meet, the side without the
first array leaves the region.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from jaxmem.ir.axis_labels import WHOLE, Cut, cut
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.scans import is_var, size_of
from jaxmem.scheduling.tiling.masks import from_nothing

PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
_COLLECTIVES = frozenset({"psum", "psum2", "psum_invariant"})


class RegionGraph(JaxprGraph):
    """A graph that knows what every equation needs."""

    def __init__(self, closed):
        super().__init__(closed)
        self.closed = closed
        # of each equation, those that it needs, as bits
        self.above: list[int] = []
        for eqn in self.eqns:
            bits = 0
            for v in filter(is_var, eqn.invars):
                if v in self.maker:
                    bits |= self.above[self.maker[v]] | 1 << self.maker[v]
            self.above.append(bits)
        self.from_nothing = from_nothing(self.eqns)

    def around(self, v) -> list[int]:
        """The equations that make or use a variable."""
        made = [self.maker[v]] if v in self.maker else []
        return [*self.users.get(v, ()), *made]

    def needs(self, i: int, k: int) -> bool:
        """Whether equation i needs what k makes."""
        return bool(self.above[i] >> k & 1)


@dataclass
class Region:
    """Equations that run `n` times, each on its part.

    Attributes:
      n: how many parts.
      eqns: positions of the equations.
      axis: of each variable that is cut: along which axis.
      cut: how each equation is cut.
      blocked: equations at the border, and why they are not in it.
    """

    n: int
    eqns: set[int] = field(default_factory=set)
    axis: dict[Any, int] = field(default_factory=dict)
    cut: dict[int, Cut] = field(default_factory=dict)
    blocked: dict[int, str] = field(default_factory=dict)

    def is_sum(self, i: int) -> bool:
        """Whether the parts of an equation's output are combined."""
        return bool(self.cut[i].combine)


def bits_of(positions: Iterable[int]) -> int:
    found = 0
    for i in positions:
        found |= 1 << i
    return found


def treat(eqn, axis: dict[Any, int], n: int) -> Cut | str:
    """How an equation is cut that agrees with `axis`, or why it is not."""
    if eqn.primitive.name in _COLLECTIVES:  # all devices would have to agree on parts
        return "it sums over devices"
    known = lambda atoms: [axis.get(v) if is_var(v) else None for v in atoms]
    found = cut(eqn, known(eqn.invars), known(eqn.outvars), n)
    is_cut = isinstance(found, Cut) and found.combine and len(eqn.outvars) > 1
    return WHOLE if is_cut else found


def find(graph: RegionGraph, seed, axis: int, n: int, floor: int = 0) -> Region:
    """The largest region round an array that is cut along an axis; it is convex."""
    # `floor`: bytes from which an array ties operations to the region
    region = Region(n, axis={seed: axis})
    allowed = _hull(graph, seed, floor)
    work = [seed]
    while work:
        v = max(work, key=size_of)  # where large arrays say how, the small ones follow
        work.remove(v)
        for i in graph.around(v):
            if i in region.eqns or i in region.blocked or not allowed >> i & 1:
                continue
            _join(graph, region, i, work)
    home = graph.maker[seed]
    while _leave(graph, region, home):
        pass
    return region


def _join(graph: RegionGraph, region: Region, i: int, work: list) -> None:
    eqn = graph.eqns[i]
    got = treat(eqn, region.axis, region.n)
    if isinstance(got, str):
        region.blocked[i] = got
        return
    region.eqns.add(i)
    region.cut[i] = got
    places = zip([*eqn.invars, *eqn.outvars], [*got.ins, *got.outs], strict=True)
    for v, place in places:
        if place is not None and is_var(v) and v not in region.axis:
            region.axis[v] = place
            work.append(v)


def _hull(graph: RegionGraph, seed, floor: int) -> int:
    """Equations that large arrays tie to the seed, and all between, as bits."""
    seen, found, work = {seed}, set(), [seed]
    while work:
        v = work.pop()
        for i in set(graph.around(v)) - found:
            found.add(i)
            eqn = graph.eqns[i]
            ties = filter(is_var, [*eqn.invars, *eqn.outvars])
            near = {a for a in ties if a not in seen and size_of(a) >= floor}
            seen |= near
            work += near
    inside, above = bits_of(found), 0
    for i in found:
        above |= graph.above[i]
    between = (i for i in range(len(graph.eqns)) if above >> i & 1)
    between = [i for i in between if graph.above[i] & inside]
    # what is made of nothing is made for each part
    return inside | bits_of(between) | graph.from_nothing & above


def _leave(graph: RegionGraph, region: Region, home: int) -> bool:
    """Whether equations had to leave, since a value is needed whole."""
    # It must be there before the loop: of its makers and its users those leave that are
    # not on the seed's side.
    inside = bits_of(region.eqns)
    for i in sorted(region.eqns):
        for v, place in zip(graph.eqns[i].invars, region.cut[i].ins, strict=True):
            m = graph.maker.get(v) if is_var(v) else None
            if m is None:
                continue
            if place is not None and m in region.eqns and not region.is_sum(m):
                continue
            makers = inside & (graph.above[m] | 1 << m)
            if not makers:
                continue
            gone = {k for k in region.eqns if makers >> k & 1}
            if home in gone:  # the seed is among the makers: the users go
                gone = {k for k in region.eqns if k == i or graph.needs(k, i)}
            why = f"it needs all of `{graph.eqns[m].primitive.name}` first"
            region.blocked.update(dict.fromkeys(gone, why))
            region.eqns -= gone
            return True
    return False


def inner(graph: RegionGraph, region: Region) -> set[Any]:
    """Variables of which one part at a time is there."""
    found: set[Any] = set()
    for i in region.eqns:
        if region.is_sum(i):
            continue
        for v in graph.eqns[i].outvars:
            if v not in graph.outputs and region.eqns.issuperset(
                graph.users.get(v, ())
            ):
                found.add(v)
    return found


def has_product(graph: RegionGraph, region: Region) -> bool:
    return any(graph.eqns[i].primitive.name in PRODUCTS for i in region.eqns)
