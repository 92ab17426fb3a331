"""The pass that updates the touched rows of a table, where that is exact."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxmem import _compat
from jaxmem.ir import primitives
from jaxmem.ir.graph import JaxprGraph, Values, done_otherwise, is_transposed
from jaxmem.ir.jaxprs import is_var
from jaxmem.ir.operands_first import operands_first
from jaxmem.ir.propagation import shardings_in
from jaxmem.ir.rows_outside import rows_outside
from jaxmem.ir.shards import InputShardings
from jaxmem.ir.unique_rows import put_rows, take_rows, unique_rows
from jaxmem.scheduling._pass import NAME_A_TARGET, Level, Pass
from jaxmem.scheduling.plan.rows import Description, Gradient, described, gradient
from jaxmem.scheduling.rows.touched import (
    NOTHING,
    UpdatedTable,
    is_by_element,
    mixed_in,
    pays,
    tables,
)

LANES = 128  # a row of an array on a TPU takes a multiple of these elements


@dataclass(frozen=True)
class TouchedRows:
    """Nothing can be chosen."""

    name: ClassVar[str] = "rows"


@dataclass(frozen=True)
class Tables:
    """Tables of a list of equations."""

    tables: tuple[UpdatedTable, ...]
    within: Any = None  # the list, a closed jaxpr, with rows outside of its loops
    given: InputShardings | None = None  # how its inputs are sharded over devices


class UpdateTouchedRows(Pass[TouchedRows, Tables]):
    """Scatter-add into zeros and an update: instead gather, update and scatter."""

    config = TouchedRows

    def analyse(self, level: Level, config: TouchedRows) -> Iterator[Tables]:
        closed = _rows_outside(level)
        every = tables(JaxprGraph(closed))
        if found := tuple(t for t in every if not _why_not(t, level)):
            yield Tables(found, closed, level.shardings)

    def apply(self, level: Level, rewrite: Tables):
        graph = JaxprGraph(rewrite.within)
        instead = {}
        for table in rewrite.tables:
            rows = _RowsAt(table)
            for out, own in table.outputs:
                instead[graph.maker[out]] = partial(rows.put, out, own)
        return done_otherwise(rewrite.within, graph, instead)

    def describe(self, rewrite: Tables, target: str) -> Description:
        del target
        shardings = shardings_in(rewrite.within, rewrite.given)

        def row(table: UpdatedTable) -> Gradient:
            v = table.gradient
            return gradient(v.aval, table.maker, True, "", shardings.shards(v))

        return Description(gradients=tuple(map(row, rewrite.tables)))

    def left(self, level: Level, config: TouchedRows) -> Iterator[str]:
        del config
        graph = JaxprGraph(_rows_outside(level))
        found = list(tables(graph))
        told = {v for t in found if t.mixed for v in filter(is_var, t.maker.invars)}
        others = (eqn for eqn in graph.eqns if told.isdisjoint(eqn.outvars))
        for table in chain(found, *map(mixed_in, others)):
            why = _why_not(table, level)
            if why not in ("", NOTHING) and is_transposed(table.maker):
                _, shape, dtype, path = described(table.gradient.aval, table.maker)
                sizes = ",".join(map(str, shape))
                where = f" of {path}" if path else ""
                yield (
                    f"the gradient {dtype}[{sizes}]{where} of a table stays dense: "
                    f"{why}"
                )


def _rows_outside(level: Level) -> Any:
    """The list, in which loops add no rows that this pass may add."""
    closed = level.jaxpr
    make = lambda: rows_outside(closed, pays)
    return level.known.get("rows outside", (closed,), make)


def _why_not(table: UpdatedTable, level: Level) -> str:
    """Why all rows of a table are updated; empty where the touched ones alone are."""
    columns = table.gradient.aval.shape[1:]
    if table.why or level.compared or not columns or 2 * columns[-1] > LANES:
        return table.why
    # A TPU keeps such a table transposed, and may copy every array that is updated into
    # one whose rows are padded, twice as large or more, to read and write its rows.
    return (
        f"its {columns[-1]} columns fill no more than half of the {LANES} lanes of a "
        "TPU, whose compiler may copy it, padded, in order to read rows; "
        f"{NAME_A_TARGET}"
    )


class _RowsAt:
    """The values of the rows that a table's gradient names."""

    def __init__(self, table: UpdatedTable):
        self.table = table
        self.ids: Any = None
        self.env: dict[Any, Any] = {}

    def put(self, out, own, values: Values) -> list[Any]:
        """An input with its rows updated."""
        # once for all arrays of a table, such as the parameter and its moments
        if self.ids is None:
            assert self.table.scatters is not None
            ids, rows = self.table.scatters.rows(values)
            count = self.table.scatters.shape[0]
            self.ids, sums = unique_rows(ids, rows, count)
            self.env[self.table.gradient] = sums
        return [put_rows(values.read(own), self.ids, self._read(out, values))]

    def _read(self, atom, values: Values):
        if not is_var(atom):
            return atom.val
        if not atom.aval.shape:
            return values.read(atom)
        for v in operands_first(atom, partial(self._missing, values.graph)):
            if v not in self.env:
                self.env[v] = self._made(v, values)
        return self.env[atom]

    def _missing(self, graph: JaxprGraph, v) -> list[Any]:
        """The variables of which rows are to be had before those of this one."""
        if v in self.env or v not in graph.maker:
            return []
        eqn = graph.eqns[graph.maker[v]]
        arrays = (x for x in eqn.invars if is_var(x) and x.aval.shape)
        return [x for x in arrays if x not in self.env] if _by_element(eqn) else []

    def _made(self, v, values: Values):
        """Of an array of the table's shape the rows, computed of rows where it can."""
        i = values.graph.maker.get(v)
        if i is not None:
            eqn = values.graph.eqns[i]
            if _by_element(eqn):
                return _compat.bind(eqn, [self._read(x, values) for x in eqn.invars])[0]
            shardings = primitives.is_broadcast(eqn)
            # all rows of it are one: no array of the table's size is made to read some
            if shardings and 0 not in eqn.params[_DIMENSIONS]:
                x = jnp.asarray(values.read(eqn.invars[0]))
                sizes = [1] * v.aval.ndim
                for axis, size in zip(eqn.params[_DIMENSIONS], x.shape, strict=True):
                    sizes[axis] = size
                shape = (self.ids.shape[0], *v.aval.shape[1:])
                return jnp.broadcast_to(x.reshape(sizes), shape)
        return take_rows(values.read(v), self.ids)


_DIMENSIONS = "broadcast_dimensions"


def _by_element(eqn) -> bool:
    return is_by_element(eqn) and len(eqn.outvars) == 1
