"""A step in micro-batches as a row of the plan."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxmem.ir import jaxprs
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.scans import size_of
from jaxmem.scheduling.plan.rows import WHOLE_STEP, TiledRegion
from jaxmem.scheduling.tiling.batch import Batch
from jaxmem.scheduling.tiling.batch_price import seconds
from jaxmem.scheduling.tiling.live_bytes import LiveBytes
from jaxmem.scheduling.tiling.partial_sums import PartTreatment, State
from jaxmem.scheduling.tiling.sums import wide


def row_of(batch: Batch, target: str) -> TiledRegion:
    """The row of a step whose examples run in parts."""
    largest = max(_in_parts(batch), key=size_of)
    before, after = held(batch)
    return TiledRegion(
        largest.aval.shape,
        str(largest.aval.dtype),
        WHOLE_STEP,
        "",
        "batch",
        batch.n,
        before,
        after,
        1,
        seconds(batch, target),
    )


def held(batch: Batch) -> tuple[int, int]:
    """Bytes that a step has made and holds at its peak: as it is, and in parts."""
    graph, live = batch.graph, LiveBytes(batch.graph)
    before = live.whole + _inside(graph.eqns, {}, 1)
    sums, cut = batch.frontier()
    sizes = _sizes(graph, batch.state, batch.n)
    # those that lie there whole, from the first part on
    kept = {v: float(v.aval.size * wide(v.aval.dtype).itemsize) for v in sums}
    kept |= {v: float(size_of(v)) for v in cut}
    after = live.profile({v: s for v, s in sizes.items() if v not in kept})
    after += _inside(graph.eqns, batch.treated, batch.n)
    first = min(batch.treated)
    for v, size in kept.items():
        after[first : live.death[v]] += size
    return int(before.max()), int(after.max())


def _sizes(graph: JaxprGraph, state: Mapping[Any, State], n: int) -> dict[Any, float]:
    """Bytes of what a list makes, for one part."""
    parts = lambda v: n if isinstance(state.get(v), int) else 1
    return {v: size_of(v) / parts(v) for v in graph.maker}


def _inside(eqns: Sequence[Any], treated: Mapping[int, PartTreatment], n: int):
    """Of each equation of a list, the bytes that its bodies hold at their peak."""
    return np.array([_of_bodies(eqn, treated.get(i), n) for i, eqn in enumerate(eqns)])


def _of_bodies(eqn, found: PartTreatment | None, n: int) -> float:
    if found is None or not found.inner:
        closed = [(body, {}, {}) for body in jaxprs.bodies(eqn)]
    else:
        closed = [(body.closed, body.state, body.treated) for body in found.inner]
    return max((_most(*one, n) for one in closed), default=0.0)


def _most(closed, state: Mapping[Any, State], treated, n: int) -> float:
    """The peak of a body for one part."""
    graph = JaxprGraph(closed)
    profile = LiveBytes(graph).profile(_sizes(graph, state, n))
    return (profile + _inside(graph.eqns, treated, n)).max(initial=0.0)


def _in_parts(batch: Batch) -> Iterator[Any]:
    """Variables of which a part at a time is there, those of bodies too."""
    _, kept = batch.frontier()
    graph = batch.graph
    yield from (
        v for v in _cut(graph.eqns, batch.treated, batch.state) if v not in kept
    )


def _cut(eqns: Sequence[Any], treated: Mapping[int, PartTreatment], state):
    for i, found in treated.items():
        yield from (v for v in eqns[i].outvars if isinstance(state.get(v), int))
        for body in found.inner:
            yield from _cut(body.jaxpr.eqns, body.treated, body.state)
