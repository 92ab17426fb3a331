"""Passes that take the `shard_map`s of layers apart, and put them together again.

Between them the passes that recompute residuals decide for each operation of a
`shard_map` by itself, as for those outside.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from jaxmem.ir import jaxprs
from jaxmem.ir.graph import JaxprGraph, Values, done_otherwise
from jaxmem.ir.map_parts import can_be_taken_apart, put_together, taken_apart
from jaxmem.scheduling._pass import Level, Pass
from jaxmem.scheduling.recompute.pairs import pairs

Bodies = dict[int, Any]  # position of a scan -> its new body


@dataclass(frozen=True)
class MapsApart:
    """Nothing can be chosen: what it does is undone by `MapsTogether`."""

    name: ClassVar[str] = "maps_apart"


@dataclass(frozen=True)
class MapsTogether:
    """Nothing can be chosen."""

    name: ClassVar[str] = "maps_together"


class TakeMapsApart(Pass[MapsApart, Bodies]):
    """`shard_map`s in a forward scan that leave something for the backward scan."""

    config = MapsApart

    def analyse(self, level: Level, config: MapsApart) -> Iterator[Bodies]:
        if level.maps:  # a map in a map
            return
        found: Bodies = {}
        for pair in pairs(level.jaxpr):
            left = {*pair.slots.values()}
            maps = [e for e in pair.body.eqns if e.primitive.name == "shard_map"]
            maps = [e for e in maps if not left.isdisjoint(e.outvars)]
            maps = [e for e in maps if can_be_taken_apart(e)]
            if maps:
                eqn = JaxprGraph(level.jaxpr).eqns[pair.forward]
                found[pair.forward] = _apart(eqn.params["jaxpr"], maps)
        if found:
            yield found

    def apply(self, level: Level, rewrite: Bodies) -> Any:
        return _with_bodies(level.jaxpr, rewrite)


class PutMapsTogether(Pass[MapsTogether, Bodies]):
    """Those of one operation become part of those around them."""

    config = MapsTogether

    def analyse(self, level: Level, config: MapsTogether) -> Iterator[Bodies]:
        if level.maps:
            return
        eqns = JaxprGraph(level.jaxpr).eqns
        scans = {i: e for i, e in enumerate(eqns) if e.primitive.name == "scan"}
        found = {i: put_together(e.params["jaxpr"]) for i, e in scans.items()}
        changed = {i: b for i, b in found.items() if b is not scans[i].params["jaxpr"]}
        if changed:
            yield changed

    def apply(self, level: Level, rewrite: Bodies) -> Any:
        return _with_bodies(level.jaxpr, rewrite)


def _apart(body, maps: list[Any]) -> Any:
    def rule(eqn, args: list) -> list[Any] | None:
        return taken_apart(eqn, args) if any(eqn is one for one in maps) else None

    return jaxprs.retrace(body, lambda args: jaxprs.evaluate(body, args, rule))


def _with_bodies(closed, bodies: Bodies) -> Any:
    def rebound(eqn, body, values: Values) -> list[Any]:
        return jaxprs.rebind(eqn, [values.read(v) for v in eqn.invars], [body])

    graph = JaxprGraph(closed)
    made = {i: partial(rebound, graph.eqns[i], body) for i, body in bodies.items()}
    return done_otherwise(closed, graph, made)
