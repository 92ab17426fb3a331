"""What of the operations after a scan works a layer at a time, and what does not."""

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

from jaxmem import _compat
from jaxmem.ir import primitives
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.placements import REPLICATE, Placements, Shard
from jaxmem.ir.placements.layers import placements_of
from jaxmem.ir.placements.propagate import Propagation
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
        i not in first.placed
        for i in cone
        if any(is_var(w) and w in search.of for w in graph.eqns[i].invars)
    )
    sums = any(first.sums(i) for i in cone)
    return sums and not any(waits)


@dataclass
class AfterScan(Propagation):
    """Everything after a scan that works a layer at a time."""

    later: set[Any] = field(kw_only=True)  # variables that need the scan to have ended
    # variable -> why something done to it is not moved
    reasons: dict[Any, str] = field(default_factory=dict)
    # what is missing before such an operation
    blockers: dict[Any, None] = field(default_factory=dict)

    def sums(self, i: int) -> bool:
        """Whether an equation combines the layers."""
        return i in self.placed and bool(self.placed[i].op)


def after_scan(
    graph: JaxprGraph, scan: int, known: Set[Any] = frozenset()
) -> AfterScan:
    """`known` are variables that are there before the scan, whatever makes them."""
    stacks = ys_of(graph.eqns[scan])
    found = AfterScan(dict.fromkeys(stacks, Shard(0)), later=graph.after(scan) - known)
    for i in range(scan + 1, len(graph.eqns)):
        eqn = graph.eqns[i]
        layered = [v for v in eqn.invars if is_var(v) and v in found.of]
        if not layered:
            continue
        placements = _placements_of(graph, eqn, found)
        if isinstance(placements, str):
            found.reasons.update(dict.fromkeys(layered, placements))
            continue
        if placements.op:  # nothing else has all of it before the scan has ended
            found.placed[i] = placements
        else:
            found.place(i, eqn, placements)
    return found


def _placements_of(graph: JaxprGraph, eqn, found: AfterScan) -> Placements | str:
    ins = found.all_at(eqn.invars)
    placements = placements_of(eqn, ins)
    if isinstance(placements, str):
        return f"{primitives.quoted(eqn)} {_at(eqn)}: {placements}"
    for v, have, want in zip(eqn.invars, ins, placements.ins, strict=True):
        if have not in (REPLICATE, want):
            return f"{primitives.quoted(eqn)} {_at(eqn)}: layers along different axes"
        if is_var(v) and have == REPLICATE and v in found.later:
            found.blockers[v] = None
            return (
                f"{primitives.quoted(eqn)} {_at(eqn)} needs {_origin(graph, v, found)}"
            )
    return placements


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
        if not ins or any(w in found.of for w in ins):
            return graph.eqns[i]
        # a way that begins with a sum over layers tells more than any other
        v = next((w for w in ins if _from_reduction(graph, w, found)), ins[0])


def _from_reduction(graph: JaxprGraph, v, found: AfterScan) -> bool:
    cone = graph.cone([v], found.later)
    return any(found.sums(i) for i in cone)
