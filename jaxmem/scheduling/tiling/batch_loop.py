"""The loop that runs a step on some examples at a time, and adds up the gradients."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem import _compat
from jaxmem.ir import graph as graphs
from jaxmem.ir import jaxprs
from jaxmem.ir.scans import is_var
from jaxmem.scheduling.tiling.batch import Batch
from jaxmem.scheduling.tiling.part_values import PartValues
from jaxmem.scheduling.tiling.sums import neutral
from jaxmem.scheduling.tiling.written import WrittenParts

SCOPE = "jaxmem.examples"  # of the loop over parts of the examples


def in_parts(closed, batch: Batch):
    """The closed jaxpr of a step with its region as one loop over parts."""
    run = lambda args: _run(batch, args)
    return _compat.without_dead_code(jaxprs.retrace(closed, run))


def is_batch_loop(eqn) -> bool:
    """Whether a scan is the loop over parts of the examples."""
    is_scan = eqn is not None and eqn.primitive.name == "scan"
    return is_scan and SCOPE in _compat.name_stack(eqn)


def _run(batch: Batch, args: list) -> list[Any]:
    values = graphs.Values(batch.graph, batch.graph.inputs(args))
    for i in range(len(batch.graph.eqns)):
        if i not in batch.treated and i not in batch.late:
            values.evaluate(i)
    values.env.update(_looped(batch, values))
    values.done |= batch.treated.keys()
    for i in sorted(batch.late):
        values.evaluate(i)
    return [values.read(v) for v in batch.graph.outvars]


def _looped(batch: Batch, outside: graphs.Values) -> dict[Any, Any]:
    sums, cut = batch.frontier()
    axes = {v: a for v in cut if isinstance(a := batch.state[v], int)}
    written = WrittenParts(axes)
    in_part = batch.in_part()

    def body(carry, part):
        totals, buffers = carry
        values = _StepPart(
            batch.n, part, batch.state, batch.zeros, batch=batch, outside=outside
        )
        values.in_part = in_part
        for i in sorted(batch.treated):
            values.apply(batch.graph.eqns[i], batch.treated[i])
        new = [
            getattr(lax, str(batch.state[v]))(t, values.env[v].astype(t.dtype))
            for t, v in zip(totals, sums, strict=True)
        ]
        buffers, stacks = written.write(buffers, part, values.env)
        return (new, buffers), stacks

    first = _empty_sums(batch)
    parts = jnp.arange(batch.n, dtype=jnp.int32)
    with jax.named_scope(SCOPE):
        carry = first, written.buffers()
        (totals, buffers), stacks = lax.scan(body, carry, parts)
    found = written.whole(buffers, stacks)
    pairs = zip(sums, totals, strict=True)
    return found | {v: total.astype(v.aval.dtype) for v, total in pairs}


@dataclass
class _StepPart(PartValues):
    """Values of a part of the step; whole ones are those before the loop."""

    batch: Any = None
    outside: Any = None
    in_part: Any = frozenset()

    def whole(self, v) -> Any:
        """A whole value: computed in the part where that is cheap."""
        made = self.batch.graph.maker.get(v)
        if made not in self.in_part:
            return self.outside.read(v)
        if v not in self.env:
            eqn = self.batch.graph.eqns[made]
            args = [self.whole(a) if is_var(a) else a.val for a in eqn.invars]
            self.env.update(zip(eqn.outvars, _compat.bind(eqn, args), strict=True))
        return self.env[v]


def sum_bytes(batch: Batch) -> int:
    """Bytes of what the parts add up."""
    avals = jax.eval_shape(lambda: _empty_sums(batch))
    return sum(x.size * x.dtype.itemsize for x in avals)


def _empty_sums(batch: Batch) -> list[Any]:
    """What the parts add to at first."""
    sums, _ = batch.frontier()
    return [neutral(str(batch.state[v]), v.aval) for v in sums]
