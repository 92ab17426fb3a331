"""What is run of a jaxpr, once XLA has fused it (`fusion.py`): its kernels."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxmem.ir.jaxprs import elements
from jaxmem.ir.scans import size_of
from jaxmem.scheduling.predict.fusion import Fusion
from jaxmem.scheduling.predict.fusion_kinds import Kind
from jaxmem.scheduling.predict.fusion_zeros import AT_ONCE, same_zeros


@dataclass(frozen=True)
class Kernel:
    """Equations that run as one."""

    # their positions; those that other kernels compute as well included
    equations: tuple[int, ...]
    reads: tuple[Any, ...]  # the arrays of memory that they read
    writes: tuple[Any, ...]  # those that they make
    # (written, read) pairs of one size, the one an elementwise function of the other:
    # it may lie in its place
    over: tuple[tuple[Any, Any], ...] = ()


@dataclass
class Kernels:
    """The kernels of a flat jaxpr, iterated in the order in which they end."""

    fusion: Fusion

    def __iter__(self) -> Iterator[Kernel]:
        fusion, zeros = self.fusion, self._zeros()
        equations = zip(fusion.graph.eqns, fusion.kinds, strict=True)
        for i, (eqn, kind) in enumerate(equations):
            if i in zeros:
                if same := zeros[i]:
                    outs = (fusion.graph.eqns[j].outvars[0] for j in same)
                    yield Kernel(same, (), tuple(outs))
            elif kind is Kind.FUSED:
                kept = (v for v in eqn.outvars if v in fusion.kept)
                yield from (self._kernel(i, (v,)) for v in kept)
            elif kind is not Kind.VIEW and fusion.widened.keys().isdisjoint(
                eqn.outvars
            ):
                yield self._kernel(i, tuple(eqn.outvars))

    def _zeros(self) -> dict[int, tuple[int, ...]]:
        """First of the equations that make the same zeros -> all; the others: none."""
        graph = self.fusion.graph
        if self.fusion.tpu or not AT_ONCE:
            return {}
        kept = (graph.maker[v] for v in self.fusion.kept)
        found: dict[int, tuple[int, ...]] = {}
        for same in same_zeros(graph, sorted(kept)):
            found |= dict.fromkeys(same, ()) | {same[0]: same}
        return found

    def name(self, kernel: Kernel) -> str:
        """What a kernel is about: the library's call in it, else what ends it."""
        alone = (i for i in kernel.equations if self.fusion.kinds[i] is Kind.ALONE)
        return self.fusion.name_of(next(alone, kernel.equations[-1]))

    def _kernel(self, end: int, writes: tuple[Any, ...]) -> Kernel:
        """What ends in an equation: as far back as arrays are not in memory."""
        fusion = self.fusion
        inside, straight, crooked = self._reach(end, writes)
        over = [(writes[0], v) for v in straight if v not in crooked]
        if over and self._lies_apart(end, writes, straight | crooked):
            over = []
        if fusion.record(end).into_first:
            first = fusion.resolve(fusion.graph.eqns[end].invars[0])
            over = [(writes[0], first)] if first is not None else []
        return Kernel(inside, (*(straight | crooked),), writes, tuple(over))

    def _reach(
        self, end: int, writes: tuple[Any, ...]
    ) -> tuple[tuple[int, ...], dict[Any, None], dict[Any, None]]:
        """The equations of a kernel, what it reads element by element, and the rest."""
        fusion = self.fusion
        straight: dict[Any, None] = {}  # from end to end
        crooked: dict[Any, None] = {}
        todo, seen = [(end, True)], {(end, True)}
        size = elements(writes[0].aval.shape) if writes else None
        while todo:
            i, elementwise = todo.pop()
            elementwise = elementwise and fusion.record(i).elementwise
            for v in fusion.operands(i):
                same = elementwise and elements(v.aval.shape) == size
                maker = fusion.graph.maker.get(v)
                if maker is None or v in fusion.kept:
                    fits = same and size_of(v) == size_of(writes[0])
                    (straight if fits else crooked)[v] = None
                elif (maker, same) not in seen:
                    seen.add((maker, same))
                    todo.append((maker, same))
        return tuple(sorted({i for i, _ in seen})), straight, crooked

    def _lies_apart(self, end: int, writes: tuple[Any, ...], reads: Iterable) -> bool:
        """Whether XLA:GPU gives what a kernel makes memory of its own."""
        # It does where a scatter will write into it. And where rows are read for their
        # sums or maxima first: one kernel does that and the rest.
        if self.fusion.tpu:
            return False
        sums = self.fusion.folded.values()
        if end in sums or not self._scattered_into.isdisjoint(writes):
            return True
        reads = set(reads)
        return any(not reads.isdisjoint(self._rows(v)) for v in reads)

    @cached_property
    def _scattered_into(self) -> set[Any]:
        fusion, eqns = self.fusion, self.fusion.graph.eqns
        places = (i for i in range(len(eqns)) if fusion.record(i).into_first)
        return {
            fusion.resolve(eqns[i].invars[0]) for i in places if i not in fusion.folded
        }

    def _rows(self, v) -> tuple[Any, ...]:
        """What is read, row by row, for a sum or a maximum of rows."""
        fusion = self.fusion
        i = fusion.graph.maker.get(v)
        if i is None or not fusion.name_of(i).startswith("reduce_"):
            return ()
        eqn = fusion.graph.eqns[i]
        if eqn.params.get("axes") != (eqn.invars[0].aval.ndim - 1,):
            return ()
        _, straight, crooked = self._reach(i, (v,))
        return (*(straight | crooked),)
