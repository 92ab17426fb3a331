"""What room for fewer tokens would save in a mixture of experts that drops none.

Shapes are fixed, so that where devices share the experts, each has rows for all tokens
that could choose one of its own. How many do is known only as the step runs.
"""

import math
from collections.abc import Iterator
from typing import Any

from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.graph import is_transposed
from jaxmem.ir.ragged import groups, is_ragged
from jaxmem.ir.scans import is_var
from jaxmem.ir.shards import names_of
from jaxmem.ir.types import ClosedJaxpr, Jaxpr, JaxprEqn
from jaxmem.memory import MemoryReport, format_bytes

ROOM = 1.25  # times an even share: the capacity factor of GShard and of Switch


def capacity_notes(closed: ClosedJaxpr, report: MemoryReport | None) -> Iterator[str]:
    """A sentence for each number of rows that a device has for tokens of others.

    Args:
      closed: the original step.
      report: of the scheduled step; its bytes at the peak are told.
    """
    maps = filter(primitives.is_shard_map, _forward(closed))
    found = dict.fromkeys(pair for eqn in maps for pair in _shared_rows(eqn))
    for rows, sharing in found:
        even = rows // sharing
        room = math.ceil(even * ROOM)
        told = _saved(rows, room, report)
        if told:
            yield (
                f"ragged_dot has {rows:,} rows on a device, for all tokens that may "
                "choose one of its experts; if all experts are chosen equally often, "
                f"{even:,} are used. A capacity of {room:,} rows, {ROOM} times as "
                f"many, {told}, but drops the tokens that exceed it"
            )


def _forward(body: Any) -> Iterator[JaxprEqn]:
    """Equations that are not of the backward pass.

    That one is handed weights as residuals, whose specification names every axis.
    """
    for eqn in jaxprs.split(body)[0].eqns:
        if not is_transposed(eqn):
            yield eqn
            for inner in jaxprs.bodies(eqn):
                yield from _forward(inner)


def _saved(rows: int, room: int, report: MemoryReport | None) -> str:
    less = 1 - room / rows
    if report is None:
        return f"makes arrays of these rows {less:.0%} smaller"
    peak = sum(b.bytes for b in report.at_peak if rows in b.shape)
    return f"saves about {format_bytes(round(peak * less))} at the peak" if peak else ""


def _shared_rows(eqn: JaxprEqn) -> Iterator[tuple[int, int]]:
    """(rows, devices that share the experts) of products of groups in a `shard_map`."""
    body, _ = jaxprs.split(jaxprs.bodies(eqn)[0])
    shards = _devices_of_axes(eqn, body)
    makers = {v: e for e in body.eqns for v in e.outvars}
    for product in filter(is_ragged, body.eqns):
        numbers = product.params["ragged_dot_dimension_numbers"]
        (ragged,) = numbers.lhs_ragged_dimensions
        if not numbers.rhs_group_dimensions:  # a gradient of matrices: of these rows
            continue
        lhs, rhs = product.invars[:2]
        sharing = shards.get((_origin(rhs, makers), groups(product)), 1)
        if sharing > 1:
            yield lhs.aval.shape[ragged], sharing


def _origin(v: Any, makers: dict[Any, JaxprEqn]) -> Any:
    """The variable that one was made of by operations of one array each."""
    while is_var(v) and v in makers:
        arrays = [x for x in makers[v].invars if is_var(x) and x.aval.ndim]
        if len(arrays) != 1:
            break
        (v,) = arrays
    return v


def _devices_of_axes(eqn: JaxprEqn, body: Jaxpr) -> dict[tuple[Any, int], int]:
    """How many devices have parts of an operand's axis, by its variable and length."""
    mesh, found = eqn.params["mesh"], {}
    for v, spec in zip(body.invars, eqn.params["in_specs"], strict=True):
        for length, names in zip(v.aval.shape, spec, strict=False):
            sizes = (mesh.shape[name] for name in names_of(names))
            found[v, length] = math.prod(sizes)
    return found
