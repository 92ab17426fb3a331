"""Which arrays of a jaxpr exist in memory, once XLA has fused it.

XLA computes a chain of elementwise operations in one kernel: what lies between is never
written. An array that several kernels read is recomputed in each where that costs less
than writing it once and reading it back; what it is made of then lives longer. Not
modelled: kernels with several outputs, limits on a kernel's size, other epilogues.
"""

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jaxmem.ir import primitives
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.jaxprs import elements
from jaxmem.ir.scans import is_var, size_of
from jaxmem.scheduling.predict.fusion_kinds import (
    Kind,
    kind_of,
    operations_an_element,
)
from jaxmem.scheduling.predict.fusion_zeros import folded
from jaxmem.scheduling.predict.tpu import Images, computes_inside, images_of

# A byte of memory traffic takes as long as so many operations (H100: 33e12 a second on
# its lanes, 3.35e12 bytes).
_OPERATIONS_A_BYTE = 10
_SMALL = 4096  # bytes below which an array with several readers is simply kept
_REREAD = 4  # a kernel reads at most so many times the bytes it makes: slices, gathers


@dataclass
class Fusion:
    """The kernels of a flat jaxpr."""

    graph: JaxprGraph
    tpu: bool = False
    kinds: list[Kind] = field(init=False)
    folded: dict[int, int] = field(init=False)  # scatter -> the sum that scatters

    def __post_init__(self):
        self.kinds = [self._kind_of(eqn) for eqn in self.graph.eqns]
        self.folded = {} if self.tpu else folded(self.graph)
        # the sum takes the place of the zeros, and the scatter is done in its kernel
        for scatter, total in self.folded.items():
            self.kinds[scatter], self.kinds[total] = Kind.FUSED, Kind.ROOT

    def _kind_of(self, eqn) -> Kind:
        kind = kind_of(self.graph, eqn)
        reads = self.tpu and kind is Kind.ALONE and computes_inside(eqn, self.images)
        return Kind.ROOT if reads else kind

    @cached_property
    def images(self) -> dict[tuple[int, ...], Images]:
        return images_of(self.graph)

    # Views and barriers.

    @cached_property
    def source(self) -> dict[Any, Any]:
        """A view -> the array whose bytes it shows; None for a number."""
        found: dict[Any, Any] = {}
        for out, atom, _ in self._shown():
            found[out] = found.get(atom, atom) if is_var(atom) else None
        return found

    @cached_property
    def _behind(self) -> dict[Any, Any]:
        """A view -> the output of a barrier that it shows."""
        found: dict[Any, Any] = {}
        for out, atom, kind in self._shown():
            if kind is Kind.TIE:
                found[out] = out
            elif is_var(atom) and atom in found:
                found[out] = found[atom]
        return found

    def _shown(self) -> Iterator[tuple[Any, Any, Kind]]:
        """(view, what it is of, its kind)."""
        for eqn, kind in zip(self.graph.eqns, self.kinds, strict=True):
            if kind in (Kind.VIEW, Kind.TIE):
                for out, atom in zip(eqn.outvars, eqn.invars, strict=False):
                    yield out, atom, kind

    def barriers(self, i: int) -> Iterator[Any]:
        """The outputs of barriers that equation `i` reads, views looked through."""
        atoms = filter(is_var, self.graph.eqns[i].invars)
        return (self._behind[v] for v in atoms if v in self._behind)

    def resolve(self, atom) -> Any:
        """The array behind a variable, None for a number."""
        return self.source.get(atom, atom) if is_var(atom) else None

    def operands(self, i: int) -> list[Any]:
        """The arrays that equation `i` reads, views looked through, each once."""
        found = (self.resolve(v) for v in self.graph.eqns[i].invars)
        return list(dict.fromkeys(v for v in found if v is not None))

    @cached_property
    def users(self) -> dict[Any, list[int]]:
        found: dict[Any, list[int]] = {}
        for i, kind in enumerate(self.kinds):
            # a view reads nothing: who reads it reads what it is of
            if kind is not Kind.VIEW:
                for v in self.operands(i):
                    found.setdefault(v, []).append(i)
        return found

    @cached_property
    def results(self) -> set[Any]:
        return {self.resolve(v) for v in self.graph.outputs} - {None}

    # What is written.

    @cached_property
    def widened(self) -> dict[Any, Any]:
        """The result of a matrix product -> the cast of it that is written instead."""
        # a product casts its result itself if nobody else wants it, for a single reader
        pairs = ((v, self._only_cast(v)) for v in self._of(primitives.is_dot))
        return {v: cast for v, cast in pairs if cast is not None}

    @cached_property
    def narrowed(self) -> set[Any]:
        """Casts that a single matrix product reads: it does them itself."""
        dots = {i for i, e in enumerate(self.graph.eqns) if primitives.is_dot(e)}
        return {
            v
            for v in self._of(primitives.is_cast)
            if len(users := self.users.get(v, ())) == 1
            and users[0] in dots
            and v not in self.results
        }

    def record(self, i: int) -> primitives.Record:
        """What is known of an equation's primitive."""
        return primitives.of(self.graph.eqns[i])

    def name_of(self, i: int) -> str:
        return self.graph.eqns[i].primitive.name

    def _of(self, asked: Callable[[Any], bool]) -> Iterator[Any]:
        for eqn, kind in zip(self.graph.eqns, self.kinds, strict=True):
            if asked(eqn) and kind is not Kind.VIEW:
                yield eqn.outvars[0]

    def _only_cast(self, v) -> Any:
        users = self.users.get(v, ())
        if len(users) != 1 or v in self.results:
            return None
        if not primitives.is_cast(self.graph.eqns[users[0]]):
            return None
        (cast,) = self.graph.eqns[users[0]].outvars
        return cast if len(self.users.get(cast, ())) < 2 else None

    @cached_property
    def held(self) -> set[Any]:
        """Arrays that must exist: results, and what no kernel can compute inside."""
        found = self.results | set(self.widened.values())
        for i, (eqn, kind) in enumerate(zip(self.graph.eqns, self.kinds, strict=True)):
            if kind in (Kind.ROOT, Kind.ALONE):
                found.update(v for v in eqn.outvars if v not in self.widened)
            # barriers and library calls read memory, but for the cast that a product
            # does
            if kind in (Kind.TIE, Kind.ALONE):
                found.update(v for v in self.operands(i) if v not in self.narrowed)
            if primitives.of(eqn).into_first and i not in self.folded:
                found.add(self.resolve(eqn.invars[0]))
        return found & self.graph.maker.keys()

    @cached_property
    def kept(self) -> set[Any]:
        """All arrays that exist, inputs aside."""
        # In two rounds: in the second what is costly only for something else that is
        # there anyway is no longer kept.
        first = self._choice(self.held, self.graph.maker.keys())
        return self._choice(first, first)

    def _choice(self, there: Set[Any], among: Set[Any]) -> set[Any]:
        """What `among` some arrays is worth being written, when `there` can be read."""
        # XLA's priority fusion puts a producer into all of its consumers or into none.
        found = set(self.held)
        ends: dict[Any, frozenset[Any]] = {}  # array -> the kernels it is computed in
        work = self._work(there)
        # from the end: in which kernels an array is computed depends on who reads it
        for i in reversed(range(len(self.kinds))):
            for v in self.graph.eqns[i].outvars if self._is_fused(i) else ():
                if v in found:
                    continue
                ends[v] = self._ends(v, found, ends)
                if v in among and _pays(size_of(v), len(ends[v]), *work[v]):
                    found.add(v)
        return found

    def _is_fused(self, i: int) -> bool:
        return self.kinds[i] is Kind.FUSED

    def _ends(self, v, kept: set[Any], ends) -> frozenset[Any]:
        kernels: set[Any] = set()
        for u in self.users.get(v, ()):
            if not self._is_fused(u):
                kernels.add(u)
                continue
            for w in self.graph.eqns[u].outvars:
                kernels |= {w} if w in kept else ends.get(w, frozenset())
        return frozenset(kernels)

    def _work(self, there: Set[Any]) -> dict[Any, tuple[float, int]]:
        """Array -> operations and bytes read of the kernel that would end in it."""
        # Back to what is in memory, or is likely to be: what several kernels read and
        # is smaller than what it is made of.
        work: dict[Any, tuple[float, int]] = {}
        leaves: dict[Any, frozenset[Any]] = {}
        for i, eqn in enumerate(self.graph.eqns):
            for v in eqn.outvars if self._is_fused(i) else ():
                count = elements(v.aval.shape)
                operations, inside = operations_an_element(eqn) * count, set()
                for u in self.operands(i):
                    if u in leaves and u not in there and self._inside(u, work[u]):
                        operations += work[u][0]
                        inside |= leaves[u]
                    else:
                        inside.add(u)
                most = _REREAD * size_of(v)
                read = sum(min(size_of(u), most) for u in inside)
                leaves[v], work[v] = frozenset(inside), (operations, read)
        return work

    def _inside(self, v, work: tuple[float, int]) -> bool:
        return len(self.users[v]) == 1 or work[1] <= size_of(v)


def _pays(size: int, kernels: int, operations: float, read: int) -> bool:
    """Whether to write an array of `size` bytes that so many kernels read."""
    if kernels < 2 or size <= _SMALL:
        return kernels > 1
    # made in each kernel; or made once, written, and read by each
    making = operations / _OPERATIONS_A_BYTE + read
    return kernels * making > making + (kernels + 1) * size
