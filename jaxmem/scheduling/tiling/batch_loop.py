"""The loop that runs a step on some examples at a time, and adds up the gradients."""

import math
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
from jaxmem.scheduling.tiling.loop import constant
from jaxmem.scheduling.tiling.part_values import PartValues

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
    axis = {v: a for v in cut if isinstance(a := batch.state[v], int)}
    stacked = [v for v in cut if math.prod(v.aval.shape[: axis[v]]) == 1]
    placed = [v for v in cut if v not in stacked]
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
        written = [
            lax.dynamic_update_slice_in_dim(
                b, values.env[v], part * values.env[v].shape[axis[v]], axis[v]
            )
            for b, v in zip(buffers, placed, strict=True)
        ]
        return (new, written), [values.env[v] for v in stacked]

    first = [_neutral(batch.state[v], v.aval) for v in sums]
    buffers = [constant(v.aval, 0, v.aval.dtype) for v in placed]
    parts = jnp.arange(batch.n, dtype=jnp.int32)
    with jax.named_scope(SCOPE):
        (totals, buffers), ys = lax.scan(body, (first, buffers), parts)
    found = dict(zip(placed, buffers, strict=True))
    found |= {v: y.reshape(v.aval.shape) for v, y in zip(stacked, ys, strict=True)}
    pairs = zip(sums, totals, strict=True)
    return found | {v: total.astype(v.aval.dtype) for v, total in pairs}


def _neutral(combine, aval) -> Any:
    """What a sum is before any part has been added; in float32 where it is narrower."""
    dtype, is_float = aval.dtype, jnp.issubdtype(aval.dtype, jnp.floating)
    if is_float:
        dtype = jnp.promote_types(dtype, "float32")
    if combine in ("max", "min"):
        info = jnp.finfo(dtype) if is_float else jnp.iinfo(dtype)
        ends = (-jnp.inf, jnp.inf) if is_float else (info.min, info.max)
        return constant(aval, ends[combine == "min"], dtype)
    return constant(aval, 1 if combine == "mul" else 0, dtype)


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
    avals = jax.eval_shape(
        lambda: [_neutral(batch.state[v], v.aval) for v in batch.frontier()[0]]
    )
    return sum(x.size * x.dtype.itemsize for x in avals)
