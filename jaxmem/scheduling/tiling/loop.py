"""The loop that runs a region part by part.

Inputs that are cut are read in place, slice by slice; what others need of the region is
written in place; sums are carried, in float32 where the array is narrower.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem import _compat
from jaxmem.ir import jaxprs
from jaxmem.ir.axis_labels import narrowed
from jaxmem.ir.scans import is_var
from jaxmem.scheduling.tiling.regions import PRODUCTS, Region, RegionGraph, inner

SCOPE = "jaxmem.tile"  # of the loop of a region
VOCABULARY = f"{SCOPE}_vocabulary"  # of a head's loops, which are made before

# Linear and cheap: done to each part of a sum, so that the sum has its final layout.
# Else XLA transposes the whole sum behind the loop.
_TAILS = ("transpose", "convert_element_type", "neg")


def tiled(graph: RegionGraph, region: Region):
    """The closed jaxpr of a graph with a region as one loop."""
    loop = _RegionLoop(graph, region)
    return _compat.without_dead_code(jaxprs.retrace(graph.closed, loop.run))


def wide(dtype):
    """The type in which parts of a sum are added."""
    narrow = _is_float(dtype) and dtype.itemsize < 4
    return jnp.dtype("float32") if narrow else dtype


def _is_float(dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


@dataclass
class _Sum:
    """A running sum: an equation, what follows it in a part, the variable it gives."""

    eqn: Any
    tail: tuple[Any, ...]
    out: Any
    combine: str
    start: Any = None  # the variable onto which it is summed

    @property
    def dtype(self):
        return wide(self.out.aval.dtype)

    def first(self, read):
        """What the sum is before any part has been added."""
        if self.eqn.primitive.name == "scatter-add":  # onto what was there
            return read(self.eqn.invars[0]).astype(self.dtype)
        if self.start is not None:
            return read(self.start)
        start = _NEUTRAL[self.combine](self.dtype)
        return constant(self.out.aval, start, self.dtype)

    def added(self, args: Sequence[Any], total):
        """The sum with one part added."""
        name, params = self.eqn.primitive.name, dict(self.eqn.params)
        if name == "scatter-add":
            return _scattered(self.eqn, args, total)
        if name == "dot_general":
            part = product(self.eqn, args, params, self.dtype)
        else:
            if name in PRODUCTS:
                params["preferred_element_type"] = None
            if name in PRODUCTS or name == "reduce_sum":
                args = [x.astype(self.dtype) for x in args]
            (part,) = _compat.bind(self.eqn, list(args), params)
        for eqn in self.tail:
            if eqn.primitive.name in ("transpose", "neg"):
                (part,) = _compat.bind(eqn, [part])
        return getattr(lax, self.combine)(total, part.astype(total.dtype))


def constant(aval, value, dtype):
    """An array of one value that varies between devices, and is spread, as `aval`."""
    return _compat.typed_as(jnp.full(aval.shape, value, dtype), aval)


def _is_tail(eqn) -> bool:
    return eqn.primitive.name in _TAILS and _is_float(eqn.outvars[0].aval.dtype)


def _lowest(dtype):
    return -jnp.inf if _is_float(dtype) else jnp.iinfo(dtype).min


def _highest(dtype):
    return jnp.inf if _is_float(dtype) else jnp.iinfo(dtype).max


_NEUTRAL = {
    "add": lambda dtype: 0,
    "mul": lambda dtype: 1,
    "max": _lowest,
    "min": _highest,
    "bitwise_or": lambda dtype: 0,
    "bitwise_xor": lambda dtype: 0,
    "bitwise_and": lambda dtype: dtype == jnp.bool_ or -1,
}


def product(eqn, args: Sequence[Any], params: dict[str, Any], dtype):
    """A product whose result has the type of the sum, whatever its operands have."""
    params = params | {"preferred_element_type": jnp.dtype(dtype), "out_sharding": None}
    direct = lambda *xs: _compat.bind(eqn, list(xs), params)[0]
    if all(x.dtype == dtype for x in args):
        return direct(*args)
    # XLA's CPU backend has not every product of narrow operands that is wide.
    cast = lambda *xs: direct(*(x.astype(dtype) for x in xs))
    return lax.platform_dependent(*args, cpu=cast, default=direct)


def _scattered(eqn, args: Sequence[Any], total):
    p = eqn.params
    return lax.scatter_add(
        total,
        args[1],
        args[2].astype(total.dtype),
        p["dimension_numbers"],
        indices_are_sorted=p["indices_are_sorted"],
        unique_indices=p["unique_indices"],
        mode=p["mode"],
    )


@dataclass
class _RegionLoop:
    """How a region becomes a loop."""

    graph: RegionGraph
    region: Region

    @cached_property
    def order(self) -> list[int]:
        return sorted(self.region.eqns)

    @cached_property
    def sums(self) -> dict[int, _Sum]:
        return {i: self._sum(i) for i in self.order if self.region.is_sum(i)}

    @cached_property
    def done_inside(self) -> set[int]:
        """Equations outside of the region that are done to every part of a sum."""
        tails = (eqn for one in self.sums.values() for eqn in one.tail)
        return {self.graph.maker[eqn.outvars[0]] for eqn in tails}

    @cached_property
    def kept(self) -> list[Any]:
        """Variables that are cut and needed outside: written part by part."""
        within = inner(self.graph, self.region)
        made = (i for i in self.order if i not in self.sums)
        cut = (v for i in made for v in self.graph.eqns[i].outvars)
        return [v for v in cut if v not in within and self._is_needed(v)]

    def _is_needed(self, v) -> bool:
        return v in self.graph.outputs or bool(self.graph.users.get(v))

    def _is_stacked(self, v) -> bool:
        """Whether parts lie one behind the other; else a stack would be transposed."""
        return math.prod(v.aval.shape[: self.region.axis[v]]) == 1

    @cached_property
    def late(self) -> set[int]:
        """Equations outside that need the loop to be done."""
        inside = 0
        for i in self.region.eqns:
            inside |= 1 << i
        above, eqns = self.graph.above, range(len(self.graph.eqns))
        return {i for i in eqns if i not in self.region.eqns and above[i] & inside}

    def _sum(self, i: int) -> _Sum:
        graph, eqn = self.graph, self.graph.eqns[i]
        combine = self.region.cut[i].combine
        tail, v, start = [], eqn.outvars[0], None
        additive = eqn.primitive.name in (*PRODUCTS, "reduce_sum")
        while additive and v not in graph.outputs and len(graph.users.get(v, ())) == 1:
            follower = graph.eqns[graph.users[v][0]]
            start = self._before(follower, v)
            if start is None and not _is_tail(follower):
                break
            tail.append(follower)
            v = follower.outvars[0]
            if start is not None:
                break
        return _Sum(eqn, tuple(tail), v, combine, start)

    def _before(self, follower, v) -> Any:
        """What a sum is added to, where that is there before the loop."""
        if follower.primitive.name not in ("add", "add_any"):
            return None
        (other,) = [w for w in follower.invars if w is not v] or [None]
        if other is None or not is_var(other) or other.aval.dtype != wide(v.aval.dtype):
            return None
        m = self.graph.maker.get(other)
        return other if m is None or m not in self.region.eqns | self.late else None

    def run(self, args: list) -> list[Any]:
        """The outputs of the graph."""
        env = self.graph.inputs(args)
        read = lambda atom: env[atom] if is_var(atom) else atom.val

        def evaluate(i: int) -> None:
            eqn = self.graph.eqns[i]
            outs = _compat.bind(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))

        others = [i for i in range(len(self.graph.eqns)) if i not in self.region.eqns]
        for i in others:
            if i not in self.late:
                evaluate(i)
        env.update(self._looped(read))
        for i in others:
            if i in self.late and i not in self.done_inside:
                evaluate(i)
        return [read(v) for v in self.graph.outvars]

    def _looped(self, read) -> dict[Any, Any]:
        stacked = [v for v in self.kept if self._is_stacked(v)]
        placed = [v for v in self.kept if not self._is_stacked(v)]
        first = [one.first(read) for one in self.sums.values()]
        buffers = [constant(v.aval, 0, v.aval.dtype) for v in placed]

        def body(carry, j):
            totals, buffers = carry
            part = _Part(self, read, j, dict(zip(self.sums, totals, strict=True)))
            part.run()
            buffers = [part.written(b, v) for b, v in zip(buffers, placed, strict=True)]
            return (list(part.totals.values()), buffers), [part.env[v] for v in stacked]

        steps = jnp.arange(self.region.n, dtype=jnp.int32)
        with jax.named_scope(SCOPE):
            (totals, buffers), ys = lax.scan(body, (first, buffers), steps)
        found = dict(zip(placed, buffers, strict=True))
        for v, y in zip(stacked, ys, strict=True):
            found[v] = y.reshape(v.aval.shape)
        for one, total in zip(self.sums.values(), totals, strict=True):
            found[one.out] = total.astype(one.out.aval.dtype)
        return found


class _Part:
    """The values of one part."""

    def __init__(self, loop: _RegionLoop, read, j, totals: dict[int, Any]):
        self.loop, self.outside, self.j, self.totals = loop, read, j, totals
        self.env: dict[Any, Any] = {}

    def _start(self, v):
        return self.j * self._size(v)

    def _size(self, v) -> int:
        return v.aval.shape[self.loop.region.axis[v]] // self.loop.region.n

    def read(self, atom, axis: int | None):
        if axis is None or not is_var(atom):
            return self.outside(atom)
        if atom not in self.env:  # made outside: read in place
            whole, size = self.outside(atom), self._size(atom)
            part = lax.dynamic_slice_in_dim(whole, self._start(atom), size, axis)
            self.env[atom] = part
        return self.env[atom]

    def run(self) -> None:
        for i in self.loop.order:
            eqn, (ins, outs, _) = self.loop.graph.eqns[i], self.loop.region.cut[i]
            one = self.loop.sums.get(i)
            if one is not None and one.eqn.primitive.name == "scatter-add":
                ins = (None, *ins[1:])
            args = [self.read(v, a) for v, a in zip(eqn.invars, ins, strict=True)]
            if one is not None:
                self.totals[i] = one.added(args, self.totals[i])
                continue
            params = narrowed(eqn, ins, outs, self.loop.region.n)
            new = _compat.bind(eqn, args, params)
            if eqn.primitive.name == "iota" and outs[0] == eqn.params["dimension"]:
                new = [new[0] + self._start(eqn.outvars[0]).astype(new[0].dtype)]
            self.env.update(zip(eqn.outvars, new, strict=True))

    def written(self, buffer, v):
        axis = self.loop.region.axis[v]
        part, start = self.env[v], self._start(v)
        return lax.dynamic_update_slice_in_dim(buffer, part, start, axis)
