"""Where a step adds rows into zeros, and updates a table element by element by them.

Found in a list of equations: the gradient, the equations that it goes into, and whether
an update of the touched rows alone is exact.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.row_scatters import RowSums, Scatters, adds_rows
from jaxmem.ir.rows_outside import BodySums, why_inside
from jaxmem.ir.scans import LARGE, is_var, size_of
from jaxmem.ir.types import JaxprEqn
from jaxmem.scheduling.rows.no_effect import ZERO, of_zero

ROWS = 4  # a table has so many times more rows than are added, or it does not pay
MOVES = (
    "its update moves rows without a gradient, as those of momentum, Adam and weight "
    "decay do; jaxmem.optim.rowwise and lazy_adam do so on the touched rows alone"
)
NOTHING = "nothing is made of it"


@dataclass(frozen=True)
class UpdatedTable:
    """A table whose gradient is rows.

    Attributes:
      gradient: the variable that would be of the table's size.
      maker: the equation that makes it, or the loop in which it is made.
      scatters: what is added into it.
      update: positions of the equations that it goes into.
      outputs: variable of an updated array -> the input whose other rows it has.
      why: what prevents an update of the rows alone; empty where it is exact.
    """

    gradient: Any
    maker: JaxprEqn
    scatters: Scatters | None
    update: frozenset[int] = frozenset()
    outputs: tuple[tuple[Any, Any], ...] = ()
    why: str = ""

    @property
    def mixed(self) -> bool:
        """Whether it is rows and something else."""
        return self.scatters is None


def tables(graph: JaxprGraph) -> Iterator[UpdatedTable]:
    """Those for which it pays, in order."""
    if any(map(adds_rows, graph.eqns)):
        yield from _found(RowSums(graph, inside=why_inside))


def _found(sums: RowSums) -> Iterator[UpdatedTable]:
    graph, taken = sums.graph, set()
    for i, eqn in enumerate(graph.eqns):
        v = eqn.outvars[0] if len(eqn.outvars) == 1 else None
        if v is None or i in taken or not _is_table(v):
            continue
        if found := sums.why(v):
            if why := _mixed(sums, eqn, found):
                yield UpdatedTable(v, eqn, None, why=why)
        elif _pays(sums, v) and _is_whole(sums, v):
            table = _table(graph, eqn, sums.scatters(v))
            # what the update makes of the gradient is no gradient of another table
            taken |= table.update
            yield table


def mixed_in(eqn: JaxprEqn) -> Iterator[UpdatedTable]:
    """In the body of a scan those that are read in another way too."""
    if primitives.is_scan(eqn) and any(
        map(adds_rows, jaxprs.walk(*jaxprs.bodies(eqn)))
    ):
        found = _found(BodySums(eqn, pays).sums)
        yield from (replace(table, maker=eqn) for table in found if table.mixed)


def pays(v, rows: int) -> bool:
    """Whether a gradient with so many rows added is better made of them."""
    return _is_table(v) and ROWS * rows <= v.aval.shape[0]


def _is_table(v) -> bool:
    shape = getattr(v.aval, "shape", ())
    return bool(shape) and all(isinstance(n, int) for n in shape) and _is_large(v)


def _is_large(v) -> bool:
    return hasattr(v.aval.dtype, "itemsize") and size_of(v) >= LARGE


def _pays(sums: RowSums, v) -> bool:
    return bool(sums.slots[v]) and pays(v, sums.slots[v])


def _is_whole(sums: RowSums, v) -> bool:
    """Whether it goes into something that is no sum of rows any more."""
    graph = sums.graph
    if v in graph.outputs:
        return True
    users = [graph.eqns[k] for k in graph.users.get(v, ())]
    if any(_adds_gradients(eqn) and _is_dense(sums, eqn) for eqn in users):
        return False  # a part of what is told of as mixed
    return any(
        len(eqn.outvars) != 1
        or eqn.outvars[0].aval.shape != v.aval.shape
        or _is_dense(sums, eqn)
        for eqn in users
    )


def _adds_gradients(eqn) -> bool:
    return eqn.primitive.name == "add_any"  # that of derivatives


def _is_dense(sums: RowSums, eqn) -> bool:
    return bool(sums.why(eqn.outvars[0]))


def _mixed(sums: RowSums, eqn, why: str) -> str:
    """Why a sum of rows and of something else stays as it is; else empty."""
    if not _adds_gradients(eqn):
        return ""
    parts = (x for x in eqn.invars if is_var(x))
    rows = any(not sums.why(x) and _pays(sums, x) for x in parts)
    return f"the table is used elsewhere too: {why}" if rows else ""


def _table(graph: JaxprGraph, maker: JaxprEqn, found: Scatters) -> UpdatedTable:
    """The table of a gradient, and why it is left alone."""
    update: set[int] = set()
    (v,) = maker.outvars
    reached = {v}
    for i, eqn in enumerate(graph.eqns):
        if not any(is_var(x) and x in reached for x in eqn.invars):
            continue
        shapes = {x.aval.shape for x in eqn.outvars}
        if not is_by_element(eqn) or shapes != {v.aval.shape}:
            why = f"{primitives.quoted(eqn)} reads all of it"
            return UpdatedTable(v, maker, found, why=why)
        update.add(i)
        reached.update(eqn.outvars)
    pairs, why = _outputs(graph, v, reached)
    return UpdatedTable(v, maker, found, frozenset(update), pairs, why)


def is_by_element(eqn) -> bool:
    """Whether rows of its results are made of the same rows of its operands."""
    known = primitives.of(eqn)
    return known.elementwise or (known.same and known.fused)


def _outputs(graph: JaxprGraph, v, reached: set) -> tuple[tuple, str]:
    """(output, input whose other rows it has) pairs, and why there are none."""
    known = of_zero(graph, v)
    pairs = []
    for out in dict.fromkeys(filter(is_var, graph.outvars)):
        if out not in reached:
            continue
        own = known(out)
        if out is v or own is ZERO:
            return (), "the step returns it"
        if own is None or own.aval != out.aval:
            return (), MOVES
        pairs.append((out, own))
    return tuple(pairs), "" if pairs else NOTHING
