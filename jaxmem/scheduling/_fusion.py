"""Which arrays of a jaxpr exist in memory, once XLA has fused it.

XLA computes a chain of elementwise operations in one kernel: what lies between is never
written. An array that several kernels read is made again in each of them where that
moves fewer bytes than writing it once and reading it back; it never exists either, and
what it is made of lives longer. (XLA's priority fusion: fuse a producer into all of its
consumers or into none, by a model of the time.)

Not modelled: kernels with several outputs, limits on a kernel's size, libraries'
epilogues.
"""

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from jaxmem import _compat
from jaxmem.scheduling._graph import Graph
from jaxmem.scheduling._layer_axis import ELEMENTWISE
from jaxmem.scheduling._scans import is_var, size_of

# A byte of memory traffic takes as long as so many operations (H100: 33e12 a second on
# its lanes, 3.35e12 bytes).
_OPERATIONS_A_BYTE = 10
_SMALL = 4096  # bytes below which an array with several readers is simply kept


class Kind(enum.Enum):
    """What becomes of an equation."""

    VIEW = "the same bytes under another shape"
    TIE = "its outputs are its inputs, after all of them"
    FUSED = "computed where it is read, if that pays"
    ROOT = "ends a kernel: what it reads may be computed in it"
    ALONE = "reads and writes memory: a library call, a loop"


_VIEWS = frozenset(
    """reshape squeeze expand_dims name sharding_constraint layout_constraint pvary pcast
    random_wrap random_unwrap stop_gradient""".split()
)
_MOVES = frozenset(
    """broadcast_in_dim concatenate dynamic_slice gather iota pad random_bits
    random_fold_in random_seed random_split rev slice split threefry2x32
    transpose""".split()
)
_ROOTS = frozenset(
    """argmax argmin dynamic_update_slice reduce reduce_and reduce_max reduce_min
    reduce_or reduce_prod reduce_sum reduce_xor scatter scatter-add scatter_add
    scatter_max scatter_min scatter_mul scatter-mul scatter-min scatter-max""".split()
)
# Those that write into their first operand.
INTO_FIRST = frozenset(n for n in _ROOTS if n.startswith(("scatter", "dynamic_")))


# What the chip computes in one or a few instructions, and what in polynomials.
_COSTLY = {
    **dict.fromkeys("div sqrt rsqrt rem integer_pow cbrt".split(), 8),
    **dict.fromkeys("exp exp2 log logistic".split(), 20),
    **dict.fromkeys(
        """acos acosh asin asinh atan atan2 atanh cos cosh erf erf_inv erfc expm1 log1p
        pow sin sinh tan tanh""".split(),
        50,
    ),
    **dict.fromkeys("digamma lgamma random_bits threefry2x32".split(), 100),
}


def operations_an_element(eqn) -> float:
    """Operations for each element that a fused equation makes, or a reduction reads."""
    name = eqn.primitive.name
    return _COSTLY.get(name, 1.0 if name in ELEMENTWISE else 0.25)


@dataclass(frozen=True)
class Kernel:
    """Equations that run as one.

    Attributes:
      equations: their positions; those that other kernels compute as well included.
      reads: the arrays of memory that they read.
      writes: those that they make.
      over: (written, read) pairs of one size, the one an elementwise function of the
        other: it may lie in its place.
    """

    equations: tuple[int, ...]
    reads: tuple[Any, ...]
    writes: tuple[Any, ...]
    over: tuple[tuple[Any, Any], ...] = ()


@dataclass
class Fusion:
    """The kernels of a flat jaxpr."""

    graph: Graph
    kinds: list[Kind] = field(init=False)

    def __post_init__(self):
        self.kinds = [self._kind(i) for i in range(len(self.graph.eqns))]

    def _kind(self, i: int) -> Kind:
        eqn = self.graph.eqns[i]
        name = eqn.primitive.name
        if name == "optimization_barrier":
            return Kind.TIE
        if _compat.has_side_effects(eqn):
            return Kind.ALONE
        if name in _VIEWS or _is_view(eqn):
            return Kind.VIEW
        if name == "transpose" and (self._only_feeds_dots(eqn) or self._of_dot(eqn)):
            return Kind.VIEW
        if name in ELEMENTWISE or name in _MOVES:
            return Kind.FUSED
        return Kind.ROOT if name in _ROOTS else Kind.ALONE

    def _only_feeds_dots(self, eqn) -> bool:
        """Whether a transposition is a layout in which matrix products read."""
        (out,), users = eqn.outvars, self.graph.users.get(eqn.outvars[0], ())
        return (
            out not in self.graph.outputs
            and bool(users)
            and all(_dot_reads(self.graph.eqns[u], out, eqn) for u in users)
        )

    def _of_dot(self, eqn) -> bool:
        """Whether a transposition is a layout in which a matrix product writes."""
        v = eqn.invars[0]
        made = self.graph.maker.get(v) if is_var(v) else None
        if made is None or len(self.graph.users[v]) > 1 or v in self.graph.outputs:
            return False
        return _dot_writes(self.graph.eqns[made], eqn)

    @cached_property
    def source(self) -> dict[Any, Any]:
        """A view -> the array whose bytes it shows; None for a number."""
        found: dict[Any, Any] = {}
        for eqn, kind in zip(self.graph.eqns, self.kinds, strict=True):
            if kind in (Kind.VIEW, Kind.TIE):
                for out, atom in zip(eqn.outvars, eqn.invars, strict=False):
                    found[out] = found.get(atom, atom) if is_var(atom) else None
        return found

    @cached_property
    def _behind(self) -> dict[Any, Any]:
        """A view -> the output of a barrier that it shows."""
        found: dict[Any, Any] = {}
        for eqn, kind in zip(self.graph.eqns, self.kinds, strict=True):
            if kind is Kind.TIE:
                found.update(zip(eqn.outvars, eqn.outvars, strict=True))
            elif kind is Kind.VIEW and is_var(v := eqn.invars[0]) and v in found:
                found[eqn.outvars[0]] = found[v]
        return found

    def barriers(self, i: int) -> Iterator[Any]:
        """The outputs of barriers that equation `i` reads, views looked through."""
        return (
            self._behind[v]
            for v in self.graph.eqns[i].invars
            if is_var(v) and v in self._behind
        )

    def resolve(self, atom) -> Any:
        """The array behind a variable, None for a number."""
        return self.source.get(atom, atom) if is_var(atom) else None

    def operands(self, i: int) -> Iterator[Any]:
        """The arrays that equation `i` reads, views looked through, each once."""
        found = (self.resolve(v) for v in self.graph.eqns[i].invars)
        return iter(dict.fromkeys(v for v in found if v is not None))

    @cached_property
    def users(self) -> dict[Any, list[int]]:
        """Array -> the equations that read it, views of it included."""
        found: dict[Any, list[int]] = {}
        for i, kind in enumerate(self.kinds):
            if kind is not Kind.VIEW:
                for v in self.operands(i):
                    found.setdefault(v, []).append(i)
        return found

    @cached_property
    def widened(self) -> dict[Any, Any]:
        """The result of a matrix product -> the cast of it that is written instead."""
        found = {}
        for eqn in self.graph.eqns:
            if eqn.primitive.name == "dot_general":
                (v,) = eqn.outvars
                users = self.users.get(v, ())
                if len(users) == 1 and v not in self.graph.outputs and self._cast(users[0]):
                    found[v] = self.graph.eqns[users[0]].outvars[0]
        return found

    @cached_property
    def narrowed(self) -> set[Any]:
        """Casts that a single matrix product reads: it does them itself."""
        found = set()
        for i, eqn in enumerate(self.graph.eqns):
            users = self.users.get(eqn.outvars[0], ()) if eqn.outvars else ()
            if (
                len(users) == 1
                and self._cast(i)
                and eqn.outvars[0] not in self.graph.outputs
                and self.graph.eqns[users[0]].primitive.name == "dot_general"
            ):
                found.add(eqn.outvars[0])
        return found

    def _cast(self, i: int) -> bool:
        eqn = self.graph.eqns[i]
        return (
            eqn.primitive.name == "convert_element_type" and self.kinds[i] is Kind.FUSED
        )

    @cached_property
    def held(self) -> set[Any]:
        """Arrays that must exist: results, and what is no kernel's inside to compute."""
        graph = self.graph
        found = {self.resolve(v) for v in graph.outputs}
        for i, (eqn, kind) in enumerate(zip(graph.eqns, self.kinds, strict=True)):
            if kind in (Kind.ROOT, Kind.ALONE):
                found.update(v for v in eqn.outvars if v not in self.widened)
            if kind in (Kind.TIE, Kind.ALONE):
                found.update(v for v in self.operands(i) if v not in self.narrowed)
            if eqn.outvars[0] in self.widened.values():
                found.add(eqn.outvars[0])
            if eqn.primitive.name in INTO_FIRST:
                found.add(self.resolve(eqn.invars[0]))
        return {v for v in found if v is not None}

    @cached_property
    def kept(self) -> set[Any]:
        """All arrays that exist, arguments aside."""
        found = self.held & self.graph.maker.keys()
        ends: dict[Any, frozenset[Any]] = {}  # array -> the kernels it is computed in
        work = self._work()
        for i in reversed(range(len(self.graph.eqns))):
            if self.kinds[i] is not Kind.FUSED:
                continue
            for v in self.graph.eqns[i].outvars:
                if v not in found:
                    ends[v] = self._ends(v, found, ends)
                    if self._pays(v, len(ends[v]), *work[v]):
                        found.add(v)
        return found

    def _ends(self, v, kept: set[Any], ends) -> frozenset[Any]:
        kernels: set[Any] = set()
        for u in self.users.get(v, ()):
            if self.kinds[u] is not Kind.FUSED:
                kernels.add(u)
                continue
            for w in self.graph.eqns[u].outvars:
                kernels |= {w} if w in kept else ends.get(w, frozenset())
        return frozenset(kernels)

    @staticmethod
    def _pays(v, kernels: int, operations: float, read: int) -> bool:
        """Whether to write an array that so many kernels read."""
        size = size_of(v)
        if kernels < 2:
            return False
        if size <= _SMALL:
            return True
        making = operations / _OPERATIONS_A_BYTE + read
        return kernels * making > making + (kernels + 1) * size

    def _work(self) -> dict[Any, tuple[float, int]]:
        """Array -> operations and bytes read by the kernel that would end in it."""
        leaves: dict[Any, tuple[float, frozenset[Any]]] = {}
        for i, eqn in enumerate(self.graph.eqns):
            if self.kinds[i] is not Kind.FUSED:
                continue
            inside = set()
            for v in eqn.outvars:
                operations = operations_an_element(eqn) * v.aval.size
                for u in self.operands(i):
                    if u in leaves and u not in self.held and len(self.users[u]) == 1:
                        operations += leaves[u][0]
                        inside |= leaves[u][1]
                    else:
                        inside.add(u)
                leaves[v] = operations, frozenset(inside)
        return {
            v: (operations, sum(min(size_of(u), 4 * size_of(v)) for u in inside))
            for v, (operations, inside) in leaves.items()
        }

    def kernels(self) -> Iterator[Kernel]:
        """What is run, in the order of the equations in which they end."""
        for i, (eqn, kind) in enumerate(zip(self.graph.eqns, self.kinds, strict=True)):
            if kind is Kind.FUSED:
                for v in eqn.outvars:
                    if v in self.kept:
                        yield self._kernel(i, (v,))
            elif kind is not Kind.VIEW and not self.widened.keys() & set(eqn.outvars):
                yield self._kernel(i, tuple(eqn.outvars))

    def _kernel(self, i: int, writes: tuple[Any, ...]) -> Kernel:
        inside, reads, todo = {i}, {}, list(self.operands(i))
        while todo:
            v = todo.pop()
            maker = self.graph.maker.get(v)
            if v in self.kept or maker is None:
                reads[v] = None
            elif maker not in inside:
                inside.add(maker)
                todo += self.operands(maker)
        over = self._over(i, writes) if self.kinds[i] is not Kind.TIE else ()
        return Kernel(tuple(sorted(inside)), tuple(reads), writes, tuple(over))

    def name(self, kernel: Kernel) -> str:
        """What a kernel is about: the library's call in it, else what ends it."""
        alone = (i for i in kernel.equations if self.kinds[i] is Kind.ALONE)
        return self.graph.eqns[next(alone, kernel.equations[-1])].primitive.name

    def _over(self, i: int, writes) -> Iterable[tuple[Any, Any]]:
        """What may be written where which operand lies."""
        eqn = self.graph.eqns[i]
        if eqn.primitive.name in INTO_FIRST:
            first = self.resolve(eqn.invars[0])
            return [(writes[0], first)] if first is not None else []
        if eqn.primitive.name not in ELEMENTWISE:
            return []
        direct, otherwise, todo, seen = {}, set(), [i], {i}
        while todo:
            at = todo.pop()
            straight = self.graph.eqns[at].primitive.name in ELEMENTWISE
            for v in self.operands(at):
                maker = self.graph.maker.get(v)
                same = straight and v.aval.size == writes[0].aval.size
                if v in self.kept or maker is None:
                    if same and size_of(v) == size_of(writes[0]):
                        direct[v] = None
                    else:
                        otherwise.add(v)
                elif same and maker not in seen:
                    seen.add(maker)
                    todo.append(maker)
                elif not same:
                    otherwise |= self._leaves(maker)
        return [(writes[0], v) for v in direct if v not in otherwise]

    def _leaves(self, i: int) -> set[Any]:
        return set(self._kernel_reads(i))

    def _kernel_reads(self, i: int) -> Iterator[Any]:
        todo, seen = list(self.operands(i)), set()
        while todo:
            v = todo.pop()
            if v in seen:
                continue
            seen.add(v)
            maker = self.graph.maker.get(v)
            if v in self.kept or maker is None:
                yield v
            else:
                todo += self.operands(maker)


def _is_view(eqn) -> bool:
    """Whether an equation moves nothing: it adds axes of one, or swaps such."""
    name = eqn.primitive.name
    ins = [v.aval for v in eqn.invars]
    outs = [v.aval for v in eqn.outvars]
    if name == "broadcast_in_dim":
        return is_var(eqn.invars[0]) and ins[0].size == outs[0].size
    if name == "transpose":
        kept = [a for a in eqn.params["permutation"] if ins[0].shape[a] != 1]
        return kept == sorted(kept)
    if name == "bitcast_convert_type":
        return ins[0].shape == outs[0].shape
    if name == "convert_element_type":
        return ins[0].dtype == outs[0].dtype
    if name == "concatenate":
        return len(ins) == 1
    return False


def _dot_writes(eqn, transposition) -> bool:
    """Whether a matrix product can write a transposition of its result at once."""
    if eqn.primitive.name != "dot_general":
        return False
    (contracting, _), (batch, _) = eqn.params["dimension_numbers"]
    rows = eqn.invars[0].aval.ndim - len(contracting)
    kinds = [2] * len(batch) + [1] * (rows - len(batch))
    kinds += [0] * (eqn.outvars[0].aval.ndim - rows)
    shape = eqn.outvars[0].aval.shape
    axes = [a for a in transposition.params["permutation"] if shape[a] != 1]
    return _in_pieces([kinds[a] for a in axes]) and _ascending(axes, kinds)


def _in_pieces(groups: list[int]) -> bool:
    """Whether axes of a kind lie together, those of the batch (2) outermost."""
    starts = [g for k, g in enumerate(groups) if k == 0 or groups[k - 1] != g]
    return len(starts) == len(set(starts)) and (2 not in starts or starts[0] == 2)


def _ascending(axes: list[int], kinds: list[int]) -> bool:
    """Whether axes of each kind keep their order."""
    return all(
        (found := [a for a in axes if kinds[a] == kind]) == sorted(found)
        for kind in set(kinds)
    )


def _dot_reads(eqn, out, transposition) -> bool:
    """Whether a matrix product reads this transposition of an array as it lies.

    Batch axes outermost; the summed and the free axes each in one piece.
    """
    if eqn.primitive.name != "dot_general":
        return False
    contracting, batch = eqn.params["dimension_numbers"]
    permutation = transposition.params["permutation"]
    for side, v in enumerate(eqn.invars):
        if v is not out:
            continue
        groups = [
            2 if a in batch[side] else 1 if a in contracting[side] else 0
            for a in np.argsort(permutation)
            if out.aval.shape[a] != 1
        ]
        if not _in_pieces(groups):
            return False
    return True
