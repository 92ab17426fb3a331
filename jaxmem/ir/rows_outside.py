"""Rows that loops and branches add into a table's gradient, added after them instead.

JAX carries the gradient of a table that a scan reads through the backward scan, where
each layer adds an array of the table's size. Here the scan stacks the ids and the rows
of all layers, and one scatter-add takes them. A branch hands its ids and rows out. A
`jax.checkpoint` that is differentiated is written out, as its lowering does it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.flatten import is_plain_call, opened
from jaxmem.ir.graph import JaxprGraph, Values
from jaxmem.ir.jaxprs import is_var
from jaxmem.ir.row_scatters import RowSums, Scatters, adds_rows
from jaxmem.ir.scans import iterations, rows_of_layers, scan_like, split
from jaxmem.ir.types import Body, ClosedJaxpr, JaxprEqn, Var

# Whether a variable, of which so many rows are added up, is to be made outside.
Wanted = Callable[[Var, int], bool]


def rows_outside(closed: Body, wanted: Wanted) -> Any:
    """A jaxpr whose loops and branches add no rows into zeros, or into a carry.

    Args:
      closed: as traced; calls may be written out in the result.
      wanted: of which sums. Outside, the rows of all iterations are in memory.

    Returns:
      The jaxpr itself where nothing adds such rows.
    """
    if not any(_hides_rows(eqn, wanted) for eqn in jaxprs.split(closed)[0].eqns):
        return closed

    def rule(eqn: JaxprEqn, args: list) -> list[Any] | None:
        if not _hides_rows(eqn, wanted):
            return None
        if is_plain_call(eqn) or primitives.is_remat(eqn):
            return opened(eqn, args, rule)
        if primitives.is_scan(eqn):
            return _scan(eqn, args, wanted)
        return _branches(eqn, args, wanted) if primitives.is_branch(eqn) else None

    return jaxprs.rewritten(closed, rule)


def _hides_rows(eqn: JaxprEqn, wanted: Wanted) -> bool:
    """Whether rows are added in the bodies of an equation."""
    inside = (e for body in jaxprs.bodies(eqn) for e in jaxprs.walk(body))
    return any(adds_rows(e) and wanted(e.outvars[0], 0) for e in inside)


# -- scans


class BodySums:
    """The body of a scan, and what its carries are increased by.

    Attributes:
      graph: the body, what is in it moved outside.
      sums: those of its variables, in which a carry that is only added to is zero.
      kept: of each carry that is only added to the variable of the sum, by position.
    """

    def __init__(self, eqn: JaxprEqn, wanted: Wanted):
        (body,) = jaxprs.bodies(eqn)
        self.graph = JaxprGraph(rows_outside(body, wanted))
        carry = split(eqn, self.graph.arguments)[1]
        pairs = enumerate(zip(carry, self.graph.outvars, strict=False))
        self.kept = {k: out for k, (v, out) in pairs if _adds_to(self.graph, v, out)}
        self.sums = RowSums(
            self.graph, frozenset(carry[k] for k in self.kept), why_inside
        )

    def rows(self, eqn: JaxprEqn, wanted: Wanted) -> dict[int, Scatters]:
        """Of each carry to which rows alone are added what adds them."""
        found = {}
        for k, out in self.kept.items():
            added = "" if self.sums.why(out) else self.sums.slots[out]
            if added and wanted(out, added * iterations(eqn)):
                found[k] = self.sums.scatters(out)
        return found


def _adds_to(graph: JaxprGraph, v: Var, out: Any) -> bool:
    """Whether `out` is `v` with something added, and nothing else reads `v`."""
    while v is not out:
        users = [graph.eqns[i] for i in graph.users.get(v, ())]
        if len(users) != 1 or v in graph.outputs:
            return False
        (eqn,) = users
        at = eqn.invars.index(v)
        known = primitives.of(eqn)
        first = primitives.is_scatter_add(eqn) and at == 0
        if not (first or known.same or primitives.is_sum(eqn)):
            return False
        v = eqn.outvars[at if known.same else 0]
    return bool(v.aval.ndim) and v not in graph.users and _comes_once(graph, v)


def _comes_once(graph: JaxprGraph, v: Var) -> bool:
    return sum(out is v for out in graph.outvars) == 1


def _scan(eqn: JaxprEqn, args: list, wanted: Wanted) -> list[Any]:
    """A scan that stacks ids and rows, and what its carries are with these added."""
    body = BodySums(eqn, wanted)
    graph, found = body.graph, body.rows(eqn, wanted)
    consts, init, xs = split(eqn, args)
    n = len(init)
    carried = [k for k in range(n) if k not in found]
    own_consts, own_carry, own_xs = split(eqn, graph.arguments)
    names = [*own_consts, *(own_carry[k] for k in carried), *own_xs]

    def step(carry: Sequence[Any], x: Sequence[Any]) -> tuple[Any, Any]:
        given = zip(names, [*consts, *carry, *x], strict=True)
        values = _evaluated(graph, dict(given))
        ends = [values.read(graph.outvars[k]) for k in carried]
        ys = [values.read(v) for v in graph.outvars[n:]]
        return ends, (ys, [one.rows(values) for one in found.values()])

    ends, (ys, rows) = scan_like(eqn, step, [init[k] for k in carried], xs)
    outs = dict(zip(carried, ends, strict=True))
    for k, (ids, added) in zip(found, jax.tree.map(rows_of_layers, rows), strict=True):
        flat = added.reshape(-1, *added.shape[2:])
        outs[k] = _compat.in_context_of(eqn, _added, init[k], ids.reshape(-1), flat)
    return [*(outs[k] for k in range(n)), *ys]


def _evaluated(graph: JaxprGraph, given: dict[Any, Any]) -> Values:
    """The values of a body, of which what nothing reads, such as a print, is done."""
    values = Values(graph, graph.constants | given)
    for i, eqn in enumerate(graph.eqns):
        if _compat.has_side_effects(eqn):
            values.evaluate(i)
    return values


def _added(table: Any, ids: Any, rows: Any) -> Any:
    """The table with the rows added; ids behind its end name none."""
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, rows.ndim)),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0,),
    )
    mode = lax.GatherScatterMode.FILL_OR_DROP
    return lax.scatter_add(table, ids[:, None], rows, numbers, mode=mode)


# -- branches


def _branches(eqn: JaxprEqn, args: list, wanted: Wanted) -> list[Any]:
    """Branches that give ids and rows, as many in each as in the one with the most."""
    bodies = [rows_outside(body, wanted) for body in jaxprs.bodies(eqn)]
    sums = [RowSums(JaxprGraph(body)) for body in bodies]
    slots = {k: _most(sums, k) for k in range(len(eqn.outvars))}
    found = [k for k, n in slots.items() if n and wanted(eqn.outvars[k], n)]
    rest = [k for k in slots if k not in found]

    def branch(body: ClosedJaxpr, own: RowSums) -> ClosedJaxpr:
        graph = own.graph

        def run(args: list) -> list[Any]:
            values = _evaluated(graph, graph.inputs(args))
            outs = [values.read(graph.outvars[k]) for k in rest]
            for k in found:
                outs += _filled(own, graph.outvars[k], values, slots[k])
            return outs

        return jaxprs.retrace(body, run)

    outs = jaxprs.rebind(eqn, args, list(map(branch, bodies, sums)))
    made = dict(zip(rest, outs, strict=False))
    pairs = zip(outs[len(rest) :: 2], outs[len(rest) + 1 :: 2], strict=True)
    for k, (ids, rows) in zip(found, pairs, strict=True):
        aval = eqn.outvars[k].aval
        zeros = jnp.zeros(aval.shape, aval.dtype)
        made[k] = _compat.in_context_of(eqn, _added, zeros, ids, rows)
    return [made[k] for k in range(len(eqn.outvars))]


def _most(sums: Sequence[RowSums], k: int) -> int:
    """How many rows the branches add up to an output; 0 where one does more."""
    outs = [own.graph.outvars[k] for own in sums]
    if not outs[0].aval.shape or any(map(RowSums.why_atom, sums, outs)):
        return 0
    pairs = zip(sums, outs, strict=True)
    return max(own.slots[v] if is_var(v) else 0 for own, v in pairs)


def _filled(own: RowSums, v: Any, values: Values, slots: int) -> list[Any]:
    """Ids and rows of a branch, and ids behind the table up to so many."""
    count = v.aval.shape[0]
    if is_var(v):
        ids, rows = own.scatters(v).rows(values)
    else:
        ids, rows = jnp.zeros(0, jnp.int32), jnp.zeros((0, *v.aval.shape[1:]))
    rows = rows.astype(v.aval.dtype)
    missing = slots - ids.shape[0]
    ids = jnp.pad(ids, (0, missing), constant_values=count)
    return [ids, jnp.pad(rows, [(0, missing), *[(0, 0)] * (rows.ndim - 1)])]


# -- reasons


def why_inside(scan: JaxprEqn, v: Var) -> str:
    """What makes an output of a scan another thing than sums of rows."""
    body, k = BodySums(scan, lambda v, rows: True), scan.outvars.index(v)
    if k >= len(split(scan, scan.invars)[1]):
        return "`scan` stacks it: each iteration reads a table of its own"
    if k not in body.kept:
        return "`scan` makes a part of it"
    return f"in a `scan`, {body.sums.why(body.kept[k])}"
