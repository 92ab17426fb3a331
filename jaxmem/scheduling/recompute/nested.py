"""Passes that take what is nested in layers apart, and put it together again.

Between them the passes that recompute residuals decide for each operation of a
`shard_map`, of a branch or of a loop in a layer by itself, as for those outside.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxmem.ir import jaxprs
from jaxmem.ir.graph import JaxprGraph, with_bodies
from jaxmem.ir.nested_parts import apart, together
from jaxmem.ir.scans import is_var
from jaxmem.scheduling._pass import Level, Pass
from jaxmem.scheduling.recompute.pairs import pairs

Bodies = dict[int, Any]  # position of a scan -> its new body


@dataclass(frozen=True)
class NestedApart:
    """Nothing can be chosen: what it does is undone by `NestedTogether`."""

    name: ClassVar[str] = "nested_apart"


@dataclass(frozen=True)
class NestedTogether:
    """Nothing can be chosen."""

    name: ClassVar[str] = "nested_together"


class TakeNestedApart(Pass[NestedApart, Bodies]):
    """What is nested in a forward scan and leaves something for the backward scan."""

    config = NestedApart

    def analyse(self, level: Level, config: NestedApart) -> Iterator[Bodies]:
        left: dict[int, set[Any]] = {}
        # of a forward scan only what a backward one reads: the rest stays whole
        for pair in pairs(level.jaxpr):
            left.setdefault(pair.forward, set()).update(pair.slots.values())
        eqns, found = JaxprGraph(level.jaxpr).eqns, {}
        for i, variables in left.items():
            body = eqns[i].params["jaxpr"]
            outs = jaxprs.split(body)[0].outvars
            new = apart(
                body, [k for k, v in enumerate(outs) if is_var(v) and v in variables]
            )
            if new is not body:
                found[i] = new
        if found:
            yield found

    def apply(self, level: Level, rewrite: Bodies) -> Any:
        bodies = {i: [body] for i, body in rewrite.items()}
        return with_bodies(level.jaxpr, JaxprGraph(level.jaxpr), bodies)


class PutNestedTogether(Pass[NestedTogether, Any]):
    """Those of one operation become part of those around them."""

    config = NestedTogether

    def analyse(self, level: Level, config: NestedTogether) -> Iterator[Any]:
        # the same object comes back where nothing was a part
        if (joined := together(level.jaxpr)) is not level.jaxpr:
            yield joined

    def apply(self, level: Level, rewrite: Any) -> Any:
        return rewrite
