"""A table's gradient as the rows that are added into it.

The gradient of a lookup is a scatter-add into zeros. Several lookups give several of
them, one into the result of another or added; a table that is looked up in another
dtype gives a cast of one. `row_scatters` finds them behind a variable, and
`Scatters.rows` computes ids and rows without the array that they would be added into.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmem.ir import jaxprs
from jaxmem.ir.graph import JaxprGraph, Values
from jaxmem.ir.jaxprs import is_var
from jaxmem.ir.unique_rows import concatenated, in_table, unique_rows

# What passes an array on as it is.
_SAME = {"copy", "copy_p", "name", "optimization_barrier", "pcast", "pvary"}
_SAME |= {"sharding_constraint"}


@dataclass(frozen=True)
class Scatters:
    """Scatter-adds of rows whose sum a variable is.

    Attributes:
      shape: of the table.
      dtype: of the variable.
      scatters: positions of the equations.
      within: of a cast the sum that is cast; else None.
    """

    shape: tuple[int, ...]
    dtype: Any
    scatters: tuple[int, ...] = ()
    within: tuple["Scatters", ...] = ()

    def slots(self, graph: JaxprGraph) -> int:
        """How many rows are added, each time that one is counted."""
        own = (jaxprs.elements(_ids(graph, i).aval.shape) for i in self.scatters)
        return sum(own) + sum(inner.slots(graph) for inner in self.within)

    def equations(self) -> Iterator[int]:
        """The positions of all scatter-adds."""
        yield from self.scatters
        for inner in self.within:
            yield from inner.equations()

    def rows(self, values: Values) -> tuple[Any, Any]:
        """Ids [k] and rows [k, ...] in the variable's dtype; an id may come twice.

        Ids outside of the table name the row behind its end.
        """
        count = self.shape[0]
        parts = [_part(values, i, count) for i in self.scatters]
        for inner in self.within:
            ids, rows = inner.rows(values)
            if inner.dtype != self.dtype:  # the cast is one of sums
                ids, rows = unique_rows(ids, rows, count)
            parts.append((ids, rows.astype(self.dtype)))
        ids, rows = concatenated(parts, self.shape, self.dtype)
        return in_table(ids, count)[0], rows


def row_scatters(graph: JaxprGraph, v) -> Scatters | str:
    """What is added up to a variable; a text names what else makes it."""
    aval = v.aval
    if not aval.ndim:
        return "it has no rows"
    found: list[int] = []
    casts: list[Scatters] = []
    todo = [v]
    while todo:
        v = todo.pop()
        if _is_zero(graph, v):
            continue
        i = graph.maker.get(v) if is_var(v) else None
        if i is None:
            return "a part of it is given"
        eqn = graph.eqns[i]
        name = eqn.primitive.name
        if name == "scatter-add":
            if not _adds_rows(eqn):
                return "`scatter-add` adds more or less than whole rows"
            found.append(i)
            todo.append(eqn.invars[0])
        elif name in ("add", "add_any"):
            todo += eqn.invars
        elif name in _SAME:
            todo.append(eqn.invars[eqn.outvars.index(v)])
        elif name == "convert_element_type":
            inner = row_scatters(graph, eqn.invars[0])
            if isinstance(inner, str):
                return inner
            casts.append(inner)
        else:
            return f"`{name}` makes a part of it"
    return Scatters(aval.shape, aval.dtype, tuple(sorted(found)), tuple(casts))


def _ids(graph: JaxprGraph, i: int):
    return graph.eqns[i].invars[1]


def _part(values: Values, i: int, count: int) -> tuple[Any, Any]:
    """Ids and rows of a scatter-add, in the shapes that it has them in."""
    eqn = values.graph.eqns[i]
    ids, rows = (values.read(v) for v in eqn.invars[1:])
    ids = jnp.asarray(ids)[..., 0]
    if eqn.params["mode"] == lax.GatherScatterMode.CLIP:
        ids = jnp.clip(ids, 0, count - 1)
    wide = ids.dtype.itemsize > 4 or ids.dtype == jnp.uint32
    if wide:  # what int32 cannot hold is not in the table
        ids = jnp.where((ids >= 0) & (ids < count), ids, jnp.asarray(count, ids.dtype))
    return ids.astype(jnp.int32), rows


def _adds_rows(eqn) -> bool:
    """Whether each id names a whole row to which a row is added."""
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


def _is_zero(graph: JaxprGraph, atom) -> bool:
    """Whether every element of an operand is known to be zero."""
    while is_var(atom):
        i = graph.maker.get(atom)
        if i is None:
            return False
        eqn = graph.eqns[i]
        known = {"broadcast_in_dim", "convert_element_type", *_SAME}
        if eqn.primitive.name not in known:
            return False
        atom = eqn.invars[eqn.outvars.index(atom)]
    return not np.any(np.asarray(atom.val))
