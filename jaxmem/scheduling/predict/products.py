"""Products of one operand, which XLA:GPU does as one.

It puts the other operands side by side and multiplies once: all results are there in
one buffer until the last of them has been read, and what is put side by side is there a
second time. So a weight's gradients of all iterations of an unrolled recurrence are
alive together. Source: openxla/xla, xla/service/dot_merger.cc.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jaxmem.ir import primitives
from jaxmem.ir.primitives import Kind
from jaxmem.ir.scans import is_var
from jaxmem.planning import Graph, Operation, Value

PRODUCT = "dot_general"
SMALL = 64 * 2**20  # bytes of operands and result: xla_gpu_dot_merger_threshold_mb
# Which of two products have to be small to be merged.
_MERGES_SMALL = all if jax.__version_info__ >= (0, 12) else any


def merged(
    graph: Graph,
    equations: Sequence[Sequence[Any]],
    values: Mapping[Any, int],
    bytes_of: Callable[[Any], int],
) -> Graph:
    """The graph with products merged."""
    # `equations`: those of each operation; `values`: variable -> the value it shows;
    # `bytes_of`: of a variable, in the memory of one device.
    products = [
        _Product.of(i, equations[i], values, bytes_of)
        for i, operation in enumerate(graph.operations)
        if operation.name == PRODUCT
    ]
    groups = list(_groups(graph, products))
    return _Rewrite(graph, equations).run(groups) if groups else graph


@dataclass(frozen=True)
class _Product:
    operations: tuple[int, ...]  # their places
    # of either operand: the same where it is the same array, read the same way
    keys: tuple[Any, Any]
    sizes: tuple[int, int, int]  # bytes of the operands and the result
    shared: int | None = None  # which operand is the same in all; None for one product

    @classmethod
    def of(
        cls,
        i: int,
        eqns: Sequence[Any],
        values: Mapping[Any, int],
        bytes_of: Callable[[Any], int],
    ) -> "_Product":
        (eqn,) = (e for e in eqns if primitives.is_dot(e))
        (out,) = eqn.outvars
        how = tuple(str(eqn.params[k]) for k in ("dimension_numbers", "precision"))
        kinds = tuple(v.aval.dtype for v in (*eqn.invars, out))
        # XLA merges two that read one operand on the same side, in the same way
        keys = [
            (values.get(v, v), v.aval.shape, side, how, kinds) if is_var(v) else None
            for side, v in enumerate(eqn.invars)
        ]
        first, second = map(bytes_of, eqn.invars)
        return cls((i,), (keys[0], keys[1]), (first, second, bytes_of(out)))

    @property
    def is_small(self) -> bool:
        return sum(self.sizes) <= SMALL

    def beside(self, other: "_Product", shared: int) -> "_Product":
        sizes = [a + b for a, b in zip(self.sizes, other.sizes, strict=True)]
        sizes[shared] = self.sizes[shared]
        keys = tuple(k if s == shared else None for s, k in enumerate(self.keys))
        both = self.operations + other.operations
        first, second, result = sizes
        return _Product(both, (keys[0], keys[1]), (first, second, result), shared)


def _groups(graph: Graph, products: Sequence[_Product]) -> Iterator[_Product]:
    """Products to be merged; none is in two groups."""
    classes: dict[Any, list[_Product]] = {}
    for product in products:
        for key in filter(None, product.keys):
            classes.setdefault(key, []).append(product)
    several = {key: found for key, found in classes.items() if len(found) > 1}
    order = _Order(graph) if several else None
    taken: set[int] = set()
    for key, found in several.items():
        rest = [p for p in found if not taken & set(p.operations)]
        while order and rest:
            group, *others = rest
            rest = []
            for product in others:
                small = _MERGES_SMALL((group.is_small, product.is_small))
                if small and order.joins(group.operations[0], product.operations[0]):
                    group = group.beside(product, key[2])
                else:
                    rest.append(product)
            if len(group.operations) > 1:
                taken.update(group.operations)
                yield group


@dataclass
class _Order:
    """Which operations come before which, as sets of bits."""

    graph: Graph
    before: list[int] = field(init=False)

    def __post_init__(self):
        self.before = []
        for places in self.graph.before:
            found = 0
            for i in places:
                found |= self.before[i] | 1 << i
            self.before.append(found)

    def joins(self, i: int, j: int) -> bool:
        # one that needs the other's result cannot be done beside it
        if self.before[i] >> j & 1 or self.before[j] >> i & 1:
            return False
        # as one they come after all that either came after, and so do their readers
        both, one = 1 << i | 1 << j, self.before[i] | self.before[j]
        for k, found in enumerate(self.before):
            if found & both:
                self.before[k] = found | both | one
        self.before[i] = self.before[j] = one
        return True


class _Rewrite:
    def __init__(self, graph: Graph, equations: Sequence[Sequence[Any]]):
        self.graph, self.values = graph, list(graph.values)
        self.equations = equations
        self.gone: set[int] = set()
        self.read_as: dict[int, int] = {}  # result of a product -> the merged result
        self.new: list[tuple[int, Operation]] = []  # each with a place in the order

    def run(self, groups: Sequence[_Product]) -> Graph:
        for group in groups:
            self._merge(group)
        kept = (x for x in enumerate(self.graph.operations) if x[0] not in self.gone)
        operations = [(i, self._renamed(o)) for i, o in (*kept, *self.new)]
        return replace(
            self.graph, operations=_sorted(operations), values=tuple(self.values)
        )

    def _value(self, size: int, name: str) -> int:
        self.values.append(Value(size, name))
        return len(self.values) - 1

    def _merge(self, group: _Product) -> None:
        graph, place = self.graph, group.operations[0]
        parts = [graph.operations[i] for i in group.operations]
        assert group.shared is not None
        shared = group.keys[group.shared][0]
        reads = dict.fromkeys(v for part in parts for v in part.inputs)
        self.gone.update(group.operations)
        found = (self._read_for(v, group) for v in reads if v != shared)
        others = tuple(dict.fromkeys(itertools.chain.from_iterable(found)))
        beside = self._value(group.sizes[1 - group.shared], "operands side by side")
        made = [v for part in parts for v in part.outputs]
        result = self._value(graph.bytes_of(made), "products side by side")
        product = replace(
            parts[0],
            inputs=(shared, beside) if shared in reads else (beside,),
            outputs=(result,),
            flops=sum(part.flops for part in parts),
            moved=sum(part.moved for part in parts),
        )
        self.new += [
            (
                place,
                Operation("concatenate", tuple(others), (beside,), path=product.path),
            ),
            (place, product),
        ]
        # a slice of the merged result is read where it lies, unless memory is asked for
        for v in made:
            if self._is_apart(v):
                self.new.append((place, Operation("slice", (result,), (v,))))
            else:
                self.read_as[v] = result

    def _read_for(self, v: int, group: _Product) -> tuple[int, ...]:
        """What is read to put `v` beside others: it may be computed there at once."""
        i = self.graph.maker.get(v)
        if i is None or v in self.graph.outputs or i in self.gone:
            return (v,)
        operation, eqns = self.graph.operations[i], self.equations[i]
        readers = set(self.graph.readers[v])
        alone = operation.outputs == (v,) and readers <= set(group.operations)
        if not alone or not all(primitives.of(e).fusible for e in eqns):
            return (v,)
        self.gone.add(i)
        return operation.inputs

    def _is_apart(self, v: int) -> bool:
        """Whether a result must lie in memory by itself, not be read where it is."""
        readers = (self.graph.operations[i].name for i in self.graph.readers[v])
        return v in self.graph.outputs or any(
            primitives.named(r).kind is Kind.LOOP for r in readers
        )

    def _renamed(self, operation: Operation) -> Operation:
        """It reads the merged results, and cannot write over a part of one."""
        inputs = dict.fromkeys(self.read_as.get(v, v) for v in operation.inputs)
        over = ((v, u) for v, u in operation.in_place if u not in self.read_as)
        return replace(operation, inputs=tuple(inputs), in_place=tuple(over))


def _sorted(operations: Sequence[tuple[int, Operation]]) -> tuple[Operation, ...]:
    """In the order of their places, as far as values are made before they are read."""
    maker = {v: k for k, (_, o) in enumerate(operations) for v in o.outputs}
    after: list[list[int]] = [[] for _ in operations]
    missing = [0] * len(operations)
    for k, (_, operation) in enumerate(operations):
        for b in {maker[v] for v in operation.inputs if v in maker}:
            after[b].append(k)
            missing[k] += 1
    ready = [(place, k) for k, (place, _) in enumerate(operations) if not missing[k]]
    heapq.heapify(ready)
    found = []
    while ready:
        _, k = heapq.heappop(ready)
        found.append(operations[k][1])
        for j in after[k]:
            missing[j] -= 1
            if not missing[j]:
                heapq.heappush(ready, (operations[j][0], j))
    return tuple(found)
