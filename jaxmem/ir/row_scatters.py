"""A table's gradient as the rows that are added into it.

The gradient of a lookup is a scatter-add into zeros, or, of one id that is no array, a
row written into zeros. Several lookups give several of them, one into the result of
another or added; a table that is looked up in another dtype gives a cast of one.
`RowSums` finds them behind the variables of a graph, and `Scatters.rows` computes ids
and rows without the array that they would be added into.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.graph import JaxprGraph, Values
from jaxmem.ir.jaxprs import is_var
from jaxmem.ir.operands_first import operands_first
from jaxmem.ir.types import JaxprEqn, Var
from jaxmem.ir.unique_rows import concatenated, in_table, unique_rows


@dataclass(frozen=True, eq=False)
class Scatters:
    """Scatter-adds of rows whose sum a variable is.

    Attributes:
      shape: of the table.
      dtype: of the variable.
      scatters: positions of the equations.
      within: of a cast the sum that is cast.
    """

    shape: tuple[int, ...]
    dtype: Any
    scatters: tuple[int, ...] = ()
    within: tuple["Scatters", ...] = ()

    def rows(self, values: Values) -> tuple[Any, Any]:
        """Ids [k] and rows [k, ...] in the variable's dtype; an id may come twice.

        Ids outside of the table name the row behind its end.
        """
        made: dict[Scatters, tuple[Any, Any]] = {}
        waits = lambda one: (
            () if one in made else (i for i in one.within if i not in made)
        )
        for one in operands_first(self, waits):
            if one not in made:
                made[one] = one._added(values, made)
        return made[self]

    def _added(
        self, values: Values, made: Mapping["Scatters", tuple[Any, Any]]
    ) -> tuple[Any, Any]:
        """`rows`, of which those of the sums within have been made."""
        count = self.shape[0]
        parts = [_part(values, i, count) for i in self.scatters]
        for inner in self.within:
            ids, rows = made[inner]
            if inner.dtype != self.dtype:  # the cast is one of sums
                ids, rows = unique_rows(ids, rows, count)
            parts.append((ids, rows.astype(self.dtype)))
        ids, rows = concatenated(parts, self.shape, self.dtype)
        return in_table(ids, count)[0], rows


@dataclass
class RowSums:
    """Which variables of a graph are nothing but scatter-adds of rows into zeros.

    Attributes:
      graph: the graph.
      given: arguments of it that count as zero.
      inside: says of a scan why one of its outputs is no such sum.
      slots: of a variable that is such a sum how many rows are added, each time that
        one is counted; 0 of zeros.
      whys: of any other what else makes it; of what follows from another operand
        `sources` has that one, and of an output of a scan that nobody has asked for
        yet `scans` the scan: looking into it takes as long as all the rest.
    """

    graph: JaxprGraph
    given: frozenset[Any] = frozenset()
    inside: Callable[[JaxprEqn, Var], str] | None = None
    slots: dict[Any, int] = field(default_factory=dict)
    whys: dict[Any, str] = field(default_factory=dict)
    sources: dict[Any, Any] = field(default_factory=dict)
    scans: dict[Any, JaxprEqn] = field(default_factory=dict)
    zeros: set[Any] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.slots.update(dict.fromkeys(self.given, 0))
        for eqn in self.graph.eqns:
            for v in eqn.outvars:
                if _is_zero(eqn, v, self.zeros):
                    self.zeros.add(v)
                    self.slots[v] = 0
                else:
                    self._tell(eqn, v)

    def why(self, v: Var) -> str:
        """What makes a variable that is no such sum; empty if it is one."""
        if not v.aval.ndim:
            return "it has no rows"
        return self.why_atom(v)

    def why_atom(self, atom: Any) -> str:
        """The same of an operand, which may be a literal."""
        while is_var(atom) and atom in self.sources:
            atom = self.sources[atom]
        given = "a part of it is given" if self._is_other(atom) else ""
        if not is_var(atom):
            return given
        if self.inside and atom in self.scans:
            self.whys[atom] = self.inside(self.scans.pop(atom), atom)
        return self.whys.get(atom, given)

    def _is_other(self, atom: Any) -> bool:
        """Whether an operand is no such sum."""
        return atom not in self.slots if is_var(atom) else bool(np.any(atom.val))

    def _tell(self, eqn: JaxprEqn, v: Var) -> None:
        """Notes of what is not zero whether an equation adds rows up."""
        read = _summed(eqn, v)
        if primitives.is_update(eqn) and eqn.invars[0] not in self.zeros:
            read = f"{primitives.quoted(eqn)} makes a part of it"
        if isinstance(read, str):
            if self.inside and primitives.is_scan(eqn):
                self.scans[v] = eqn
            else:
                self.whys[v] = read
        elif others := list(filter(self._is_other, read)):
            self.sources[v] = others[-1]
        else:
            own = _own_slots(eqn)
            self.slots[v] = own + sum(self.slots[w] for w in read if is_var(w))

    def scatters(self, v: Var) -> Scatters:
        """What is added up to a variable of which there is no `why`."""
        made: dict[Any, Scatters] = {}
        sums: dict[Any, tuple[list[int], list[Any]]] = {}

        def missing(w: Var) -> list[Any]:
            sums[w] = sums[w] if w in sums else self._taken_apart(w)
            return [inner for inner in sums[w][1] if inner not in made]

        for w in operands_first(v, missing):
            found, casts = sums[w]
            within = tuple(made[inner] for inner in casts)
            made[w] = Scatters(v.aval.shape, w.aval.dtype, tuple(sorted(found)), within)
        return made[v]

    def _taken_apart(self, v: Var) -> tuple[list[int], list[Any]]:
        """The scatter-adds of a sum in one dtype, and the sums whose casts it adds."""
        found: list[int] = []
        casts: list[Any] = []
        todo = [v]
        while todo:
            w = todo.pop()
            # zeros, written out or as a literal, add nothing
            if not is_var(w) or not self.slots[w]:
                continue
            i = self.graph.maker[w]
            eqn = self.graph.eqns[i]
            if primitives.is_cast(eqn):
                casts.append(eqn.invars[0])
                continue
            if adds_rows(eqn):
                found.append(i)
            operands = _summed(eqn, w)
            assert not isinstance(operands, str), operands  # `_tell` has asked
            todo += operands
        return found, casts


def _summed(eqn: JaxprEqn, v: Var) -> list[Any] | str:
    """The operands whose sum, beside rows, an equation makes; or why it makes none."""
    if adds_rows(eqn):
        return [eqn.invars[0]]
    if primitives.is_scatter_add(eqn):
        return "`scatter-add` adds more or less than whole rows"
    if primitives.is_sum(eqn):
        return list(eqn.invars)
    if primitives.of(eqn).same:
        return [eqn.invars[eqn.outvars.index(v)]]
    if primitives.is_cast(eqn):
        return [eqn.invars[0]]
    return f"{primitives.quoted(eqn)} makes a part of it"


def _own_slots(eqn: JaxprEqn) -> int:
    """How many rows an equation adds."""
    if primitives.is_update(eqn):
        return 1
    if not primitives.is_scatter_add(eqn):
        return 0
    return jaxprs.elements(eqn.invars[1].aval.shape[:-1])


def _is_zero(eqn: JaxprEqn, v: Var, zeros: set[Any]) -> bool:
    """Whether every element of an output is known to be zero."""
    known = primitives.of(eqn)
    if not (known.same or known.rearranges):
        return False
    atom = eqn.invars[eqn.outvars.index(v)]
    return atom in zeros if is_var(atom) else not np.any(np.asarray(atom.val))


def _part(values: Values, i: int, count: int) -> tuple[Any, Any]:
    """Ids and rows of a scatter-add, in the shapes that it has them in."""
    eqn = values.graph.eqns[i]
    if primitives.is_update(eqn):
        rows, start = (values.read(v) for v in eqn.invars[1:3])
        return jnp.clip(start, 0, count - 1).astype(jnp.int32)[None], rows
    ids, rows = (values.read(v) for v in eqn.invars[1:])
    ids = jnp.asarray(ids)[..., 0]
    if _are_slices(eqn):
        rows = jnp.squeeze(rows, axis=ids.ndim)
    # in other modes an id outside of the table adds to no row
    if eqn.params["mode"] == lax.GatherScatterMode.CLIP:
        ids = jnp.clip(ids, 0, count - 1)
    wide = ids.dtype.itemsize > 4 or ids.dtype == jnp.uint32
    if wide:  # what int32 cannot hold is not in the table
        ids = jnp.where((ids >= 0) & (ids < count), ids, jnp.asarray(count, ids.dtype))
    return ids.astype(jnp.int32), rows


def adds_rows(eqn: JaxprEqn) -> bool:
    """Whether each id names a whole row, to which a row is added, or one is written."""
    if primitives.is_update(eqn):
        return _writes_row(eqn)
    if not primitives.is_scatter_add(eqn):
        return False
    if _are_slices(eqn):
        return True
    table, ids, rows = (v.aval for v in eqn.invars)
    numbers = eqn.params["dimension_numbers"]
    batch = rows.ndim - (table.ndim - 1)
    return (
        not numbers.operand_batching_dims
        and numbers.inserted_window_dims == (0,)
        and numbers.scatter_dims_to_operand_dims == (0,)
        and numbers.update_window_dims == tuple(range(batch, rows.ndim))
        and rows.shape[batch:] == table.shape[1:]
        and ids.shape == (*rows.shape[:batch], 1)
    )


def _are_slices(eqn: JaxprEqn) -> bool:
    """Whether each start names a slice of one row, as of `table[i]` under `vmap`.

    Starts along the other axes, which a slice has whole, are clamped to zero.
    """
    table, starts, rows = (v.aval for v in eqn.invars)
    numbers = eqn.params["dimension_numbers"]
    batch = rows.ndim - table.ndim
    return (
        table.ndim > 0
        and eqn.params["mode"] == lax.GatherScatterMode.CLIP
        and not numbers.operand_batching_dims
        and numbers.inserted_window_dims == ()
        and numbers.scatter_dims_to_operand_dims == tuple(range(table.ndim))
        and numbers.update_window_dims == tuple(range(batch, rows.ndim))
        and rows.shape[batch:] == (1, *table.shape[1:])
        and starts.shape == (*rows.shape[:batch], table.ndim)
    )


def _writes_row(eqn: JaxprEqn) -> bool:
    """Whether an update is one row; its index along whole axes is clamped to zero."""
    table, row = (v.aval.shape for v in eqn.invars[:2])
    return bool(table) and row == (1, *table[1:])
