"""What of the operations after a scan works a layer at a time, and what does not."""

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from jaxmem import _compat
from jaxmem.ir import primitives
from jaxmem.ir.branches import treatment
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.layer_axis import Batched, Reduced
from jaxmem.ir.scans import is_var, ys_of

HINT = ' (clip="two_pass" finds it in a first backward pass)'


def blockers(graph: JaxprGraph, scan: int) -> list[Any]:
    """Numbers made of all layers that operations on the layers wait for."""
    # Those that one backward pass can find: none of them waits for another.
    first = after_scan(graph, scan)
    known: set[Any] = set()
    while True:
        search = after_scan(graph, scan, known)
        new = {v for v in search.blockers if _in_one_pass(graph, v, first, search)}
        if not new - known:
            return list(dict.fromkeys(v for v in graph.maker if v in known))
        known |= new


def _in_one_pass(graph: JaxprGraph, v, first: "AfterScan", search: "AfterScan") -> bool:
    """Whether `v` is made of sums over layers that need nothing but the scan."""
    cone = graph.cone([v], first.later)
    waits = (
        i not in first.treatments
        for i in cone
        if any(is_var(w) and w in search.axis for w in graph.eqns[i].invars)
    )
    sums = any(isinstance(first.treatments.get(i), Reduced) for i in cone)
    return sums and not any(waits)


@dataclass
class AfterScan:
    """Everything after a scan that works a layer at a time."""

    axis: dict[Any, int]
    treatments: dict[int, Batched | Reduced]
    reasons: dict[Any, str]  # variable -> why something done to it is not moved
    blockers: dict[Any, None]  # what is missing before such an operation
    later: set[Any]  # variables that need the scan to have ended


def after_scan(
    graph: JaxprGraph, scan: int, known: Set[Any] = frozenset()
) -> AfterScan:
    """`known` are variables that are there before the scan, whatever makes them."""
    stacks = ys_of(graph.eqns[scan])
    found = AfterScan(dict.fromkeys(stacks, 0), {}, {}, {}, graph.after(scan) - known)
    for i in range(scan + 1, len(graph.eqns)):
        eqn = graph.eqns[i]
        layered = [v for v in eqn.invars if is_var(v) and v in found.axis]
        if not layered:
            continue
        treated = _treatment(graph, eqn, found)
        if isinstance(treated, str):
            found.reasons.update(dict.fromkeys(layered, treated))
            continue
        found.treatments[i] = treated
        if isinstance(treated, Batched):
            found.axis.update(zip(eqn.outvars, treated.outs, strict=True))
    return found


def _treatment(graph: JaxprGraph, eqn, found: AfterScan) -> Batched | Reduced | str:
    axes = [found.axis.get(v) if is_var(v) else None for v in eqn.invars]
    treated = treatment(eqn, axes)
    if isinstance(treated, str):
        return f"{primitives.quoted(eqn)} {_at(eqn)}: {treated}"
    for v, have, want in zip(eqn.invars, axes, treated.ins, strict=True):
        if have is not None and have != want:
            return f"{primitives.quoted(eqn)} {_at(eqn)}: layers along different axes"
        if is_var(v) and have is None and v in found.later:
            found.blockers[v] = None
            return (
                f"{primitives.quoted(eqn)} {_at(eqn)} needs {_origin(graph, v, found)}"
            )
    return treated


def _at(eqn) -> str:
    line = _compat.source_line(eqn)
    return f"at {line}" if line else "of the update"


def _origin(graph: JaxprGraph, v, found: AfterScan) -> str:
    """What of the scan a blocker is made of, in words."""
    eqn = _first(graph, v, found)
    if primitives.is_scan(eqn):
        return "a value that the scan ends with"
    text = f"{primitives.quoted(eqn)} over all layers, {_at(eqn)}"
    return text + HINT


def _first(graph: JaxprGraph, v, found: AfterScan):
    """The first equation on a way from the scan to `v` that needs all layers."""
    while True:
        i = graph.maker[v]
        ins = [w for w in graph.eqns[i].invars if is_var(w) and w in found.later]
        if not ins or any(w in found.axis for w in ins):
            return graph.eqns[i]
        # a way that begins with a sum over layers tells more than any other
        v = next((w for w in ins if _from_reduction(graph, w, found)), ins[0])


def _from_reduction(graph: JaxprGraph, v, found: AfterScan) -> bool:
    cone = graph.cone([v], found.later)
    return any(isinstance(found.treatments.get(i), Reduced) for i in cone)
