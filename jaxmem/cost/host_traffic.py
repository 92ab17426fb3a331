"""What a step moves to the host's memory and back, and how long it waits for that.

Each device has a link of its own: bytes and seconds are those of one.
"""

from typing import Any

from jaxmem.chips import Rates
from jaxmem.cost.equations import seconds
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.jaxprs import elements
from jaxmem.ir.propagation import given_inside, shardings_in
from jaxmem.ir.scans import is_on_host, iterations
from jaxmem.ir.shards import InputShardings, Shardings


def host_traffic(closed, given: InputShardings | None = None) -> int:
    """Bytes that a device moves to the host's memory and back; a `while` counts once.

    Args:
      closed: a step.
      given: how its inputs are sharded over devices, where that is known.
    """
    if not _moves(closed):
        return 0
    shardings = shardings_in(closed, given)
    return sum(_traffic(eqn, shardings) for eqn in jaxprs.split(closed)[0].eqns)


def _traffic(eqn, shardings: Shardings) -> int:
    """Of an equation and its bodies, all iterations of a scan."""
    total = 0
    if primitives.is_transfer(eqn):
        for u, v in zip(eqn.invars, eqn.outvars, strict=True):
            size = elements(v.aval.shape) * v.aval.dtype.itemsize
            shards = shardings.shards(u if is_on_host(u) else v)  # as the host has it
            total += size // shards if is_on_host(u) != is_on_host(v) else 0
    inside = (
        host_traffic(b, given_inside(eqn, b, shardings)) for b in jaxprs.bodies(eqn)
    )
    return total + iterations(eqn) * sum(inside)


def waiting_for_host(
    closed, rates: Rates, given: InputShardings | None = None
) -> float:
    """Seconds that scans wait for the link to the host, by what they compute and move.

    Their copies run beside the computation of other iterations. A scan that holds
    another one with copies counts by that, once; one whose time nobody knows, not.
    """
    if not _moves(closed):
        return 0.0
    total, shardings = 0.0, shardings_in(closed, given)
    for eqn in jaxprs.split(closed)[0].eqns:
        within = [(b, given_inside(eqn, b, shardings)) for b in jaxprs.bodies(eqn)]
        if primitives.is_scan(eqn) and not any(map(_has_copies, _inner(eqn))):
            work, sent = seconds(eqn, rates, shardings), _traffic(eqn, shardings)
            total += 0.0 if work is None else max(0.0, sent / rates.host - work)
        else:
            total += sum(waiting_for_host(b, rates, known) for b, known in within)
    return total


def _inner(eqn) -> list[Any]:
    return [e for body in jaxprs.bodies(eqn) for e in jaxprs.walk(body)]


def _has_copies(eqn) -> bool:
    return primitives.is_scan(eqn) and any(map(_moves, jaxprs.bodies(eqn)))


def _moves(body) -> bool:
    """Whether anything in a body goes to the host's memory, or comes from it."""
    puts = (e for e in jaxprs.walk(body) if primitives.is_transfer(e))
    pairs = (zip(e.invars, e.outvars, strict=True) for e in puts)
    return any(is_on_host(u) != is_on_host(v) for pair in pairs for u, v in pair)
