"""The scan with the update in its body: what a `Release` plans, carried out."""

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.graph import JaxprGraph, Values
from jaxmem.ir.one_gpu import index_after, late, row_major
from jaxmem.ir.placements import Axis, Placements, Shard, at
from jaxmem.ir.placements.lower import Form, PartValues
from jaxmem.ir.scans import (
    barrier,
    is_ahead,
    is_on_host,
    is_var,
    scan_like,
    split,
    xs_of,
    ys_of,
)
from jaxmem.scheduling.release.analysis import Place, Release, bases, unsliced
from jaxmem.scheduling.release.write_back import narrowed, scan_with_write_back


def release(closed, plan: Release):
    """The jaxpr with the planned operations moved into the body of the scan."""
    graph = JaxprGraph(closed)

    def run(args: list) -> list:
        moved = set(plan.placements)  # done in the scan's body
        return _ReleasedValues(
            graph, graph.inputs(args), moved, plan=plan
        ).all_outputs()

    return jaxprs.retrace(closed, run)


@dataclass
class _ReleasedValues(Values):
    """Values so far, with the planned scan in the place of the old one."""

    plan: Release = field(kw_only=True)

    def apply(self, i: int) -> None:
        eqn = self.graph.eqns[i]
        if i == self.plan.scan:
            self._before_scan()
            self.env.update(_run_scan(self))
            return
        values = [self.read(v) for v in eqn.invars]
        slots = self._overwritten(i)
        if slots:
            outs, stacks = scan_with_write_back(eqn, values, slots)
            self.env.update(zip([xs_of(eqn)[k] for k in slots], stacks, strict=True))
        else:
            outs = _compat.bind(eqn, values)
        self.env.update(zip(eqn.outvars, outs, strict=True))

    def _overwritten(self, i: int) -> list[int]:
        """Which xs of an earlier scan are stacks that this one will overwrite."""
        eqn = self.graph.eqns[i]
        if not primitives.is_scan(eqn) or self.plan.scan in self.done:
            return []
        buffers = {v for v, axis in self.plan.updated.values() if axis == 0}
        return narrowed(eqn, [v for v in buffers if v in self.graph.invars])

    def _before_scan(self) -> None:
        """Everyone else who reads what is overwritten does so first."""
        for v, _ in self.plan.updated.values():
            for u in self.graph.users.get(v, ()):
                if u != self.plan.scan and u not in self.plan.placements:
                    self.evaluate(u)


def _run_scan(state: _ReleasedValues) -> dict[Any, Any]:
    """The scan with more in its body: values of its outputs and of what was moved."""
    graph, plan = state.graph, state.plan
    eqn = graph.eqns[plan.scan]
    consts, init, slices = split(eqn, [state.read(v) for v in eqn.invars])
    body = _Body(graph, plan, consts, _whole(state))
    first = jnp.int32(eqn.params["length"] - 1 if eqn.params["reverse"] else 0)
    carry = (
        (first, first + 1),
        init,
        [state.read(v) for v, _ in body.places],
        [
            _of_no_layer(graph.eqns[i], placements)
            for i, placements in body.sums.items()
        ],
    )
    xs = {i: slices[i] for i in body.read}
    (_, ends, buffers, totals), kept = scan_like(eqn, body, carry, xs)
    found = dict(zip(eqn.outvars, ends, strict=False))
    found |= dict(zip(plan.updated, buffers, strict=True))
    found |= {
        graph.eqns[i].outvars[0]: x for i, x in zip(body.sums, totals, strict=True)
    }
    for v, stack in zip(plan.outputs, kept, strict=True):
        found[v] = jnp.moveaxis(stack, 0, plan.axis[v])
    return found


def _whole(state: _ReleasedValues) -> dict[tuple[Any, Axis], Any]:
    """What the body reads from outside: buffers by place, others with None."""
    graph, plan = state.graph, state.plan
    found: dict[tuple[Any, Axis], Any] = {p: state.read(p[0]) for p in plan.buffers}
    for i in plan.moved:
        for v, axis in plan.placements[i].operands(graph.eqns[i]):
            if is_var(v) and v not in plan.axis:
                for w in [v] if axis is None else unsliced(graph, v, axis):
                    found[w, None] = state.read(w)
    for v in filter(is_var, xs_of(graph.eqns[plan.scan])):
        found |= {(w, None): state.read(w) for w in unsliced(graph, v, 0)}
    return found


@dataclass(eq=False)  # hashed by identity, as scan wants of a function
class _Body:
    """An iteration of the scan: the old body, what was moved, the slices stored."""

    # State that is updated goes into the carry and is written slice by slice, and the
    # body reads it from there too, or XLA would copy it. Reductions over layers are
    # running sums.

    graph: JaxprGraph
    plan: Release
    consts: Sequence[Any]
    whole: Mapping[tuple[Any, Axis], Any]
    places: list[Place] = field(init=False)  # the buffers that are updated in place
    sums: dict[int, Placements] = field(init=False)  # the moved reductions over layers
    read: list[int] = field(init=False)  # which of the old xs are still xs
    # the others, whose slices are read from the buffers
    carried: list[Any] = field(init=False)

    def __post_init__(self):
        placements = self.plan.placements.items()
        self.eqn = self.graph.eqns[self.plan.scan]
        self.places = list(self.plan.updated.values())
        self.sums = {i: how for i, how in placements if how.op}
        self.carried = [v for v in filter(is_var, xs_of(self.eqn)) if self._has(v)]
        xs = enumerate(xs_of(self.eqn))
        self.read = [i for i, v in xs if not (is_var(v) and v in self.carried)]

    def _has(self, v) -> bool:
        """Whether an array is a buffer, or made of buffers by what costs nothing."""
        made_of_it = list(bases(self.graph, v, 0))
        return bool(made_of_it) and all(place in self.places for place in made_of_it)

    def __call__(self, carry, item):
        (j, after), inner, buffers, totals = carry
        buffers = dict(zip(self.plan.updated, buffers, strict=True))
        whole = dict(zip(self.places, buffers.values(), strict=True))
        layer = _Layer(self.graph, self.plan, j, after - 1, {**self.whole, **whole})
        outs = self._old_body(layer, inner, item)
        read = {place for v in self.carried for place in bases(self.graph, v, 0)}
        for i in self.plan.moved:
            layer.run(i)
            for v in set(self.graph.eqns[i].outvars) & set(buffers):
                # where its slices were read, or XLA:GPU does not write in place
                at = layer.after(layer.source[v])
                if self.plan.updated[v] in read:
                    # Nothing else says that the body reads the old parameters before
                    # they are written: XLA:CPU would copy their whole stack in every
                    # iteration to be sure.
                    at = _after(at, layer.same_j, outs)
                buffers[v] = self._stored(layer, v, buffers[v], at, layer.same_j)
        totals = [
            self._combined(i, total, layer)
            for i, total in zip(self.sums, totals, strict=True)
        ]
        axes = self.plan.axis
        kept = [
            jnp.squeeze(layer.slice_of(v, axes[v]), axes[v]) for v in self.plan.outputs
        ]
        step = -1 if self.eqn.params["reverse"] else 1
        return ((j + step, after + step), outs, list(buffers.values()), totals), kept

    def _stored(self, layer: "_Layer", v, buffer, at, same_j):
        """The buffer with this layer's new value, and the value as it is read from it.

        XLA:CPU would recompute the value from the old slice wherever it is used, and
        copy the whole buffer in every iteration to have it: it reads it back.
        `same_j` is the same index computed otherwise, or reading would be simplified
        away. XLA:GPU would make a moment that the next moment or the weights read in a
        kernel of its own, and copy it into the buffer in another one: it reads it back
        too, from behind a barrier, unless the buffer is in the host's memory.
        """
        place, axis = self.plan.updated[v]
        value = layer.env[v, Shard(axis)]
        new = lax.dynamic_update_slice_in_dim(buffer, value, at, axis)
        buffer = row_major(new)
        cut = lambda buffer, i: lax.dynamic_slice_in_dim(buffer, i, 1, axis)

        def behind_barrier(buffer, value):
            (buffer,) = barrier([buffer])
            return buffer, cut(buffer, at)

        how = {"cpu": lambda buffer, value: (buffer, cut(buffer, same_j))}
        how |= {} if is_on_host(place) else {"cuda": behind_barrier}
        buffer, layer.env[v, Shard(axis)] = lax.platform_dependent(
            buffer, value, **how, default=lambda buffer, value: (buffer, value)
        )
        return buffer

    def _old_body(self, layer: "_Layer", inner, item) -> list:
        """Its carry; its stacked outputs go into the layer."""
        xs = [
            item[i] if i in item else jnp.squeeze(layer.slice_of(v, 0), 0)
            for i, v in enumerate(xs_of(self.eqn))
        ]
        outs = jaxprs.evaluate(
            self.eqn.params["jaxpr"], [*self._consts_now(layer), *inner, *xs]
        )
        ys = zip(ys_of(self.eqn), outs[len(inner) :], strict=True)
        for v, y in ys:
            layer.stacked(v, jnp.expand_dims(y, 0))
        return outs[: len(inner)]

    def _consts_now(self, layer: "_Layer") -> list:
        """The old constants; those of which it reads rows to come, from the buffer."""
        now = list(self.consts)
        for k, v in enumerate(split(self.eqn, self.eqn.invars)[0]):
            maker = self.graph.maker.get(v) if is_var(v) else None
            if maker is not None and is_ahead(eqn := self.graph.eqns[maker]):
                now[k] = layer.whole.get((eqn.invars[0], 0), now[k])
        return now

    def _combined(self, i: int, total, layer: "_Layer"):
        (placement,) = self.sums[i].outs
        value = layer.env[self.graph.eqns[i].outvars[0], placement]
        return getattr(lax, self.sums[i].op)(total, value)


@dataclass
class _Layer:
    """Slices of one layer, made as they are asked for."""

    graph: JaxprGraph
    plan: Release
    j: Any
    same_j: Any  # the same number, which the compiler cannot tell
    whole: Mapping[tuple[Any, Axis], Any]
    # what the scan stacks and what is moved
    env: dict[Form, Any] = field(default_factory=dict)
    # of what is there before, by the gradient that slices wait for
    slices: dict[Any, PartValues] = field(default_factory=dict)
    late: dict[Any, Any] = field(default_factory=dict)  # `j` after a gradient
    source: dict[Any, Any] = field(default_factory=dict)  # of what is moved, a gradient

    def waiting_for(self, gradient) -> PartValues:
        """Slices of what is there before, made once a layer of a gradient is there."""
        if gradient not in self.slices:
            whole, cut = lambda v: self.whole[v, None], partial(self._cut, gradient)
            about = {"env": ChainMap({}, self.env), "graph": self.graph}
            self.slices[gradient] = PartValues(whole, cut, **about)
        return self.slices[gradient]

    def slice_of(self, atom, axis: Axis):
        """A slice along `axis`; with None the whole of what comes from outside."""
        return self.waiting_for(None).read(atom, at(axis))

    def stacked(self, v, y) -> None:
        """Takes a layer of what the scan stacks."""
        self.env[v, Shard(0)] = y
        self.source[v] = v

    def run(self, i: int) -> None:
        eqn, placements = self.graph.eqns[i], self.plan.placements[i]
        found = (self.source[v] for v in eqn.invars if is_var(v) and v in self.source)
        gradient = next(found, None)
        self.source.update(dict.fromkeys(eqn.outvars, gradient))
        outs = self.waiting_for(gradient).outputs(eqn, placements)
        forms = zip(eqn.outvars, placements.outs, strict=True)
        self.env.update(zip(forms, outs, strict=True))

    def _cut(self, gradient, v, axis: int, _: Callable):
        # the host's copies are to be under way before the gradient is there
        j = self.j if is_on_host(v) else self.after(gradient)
        # with its test for a negative index, without which XLA:CPU's step is larger
        return lax.dynamic_slice_in_dim(self.whole[v, axis], j, 1, axis)

    def after(self, gradient):
        """`j`, on one GPU not before a layer of a gradient is there."""
        if gradient is None or not _has_a_first(y := self.env[gradient, Shard(0)]):
            return self.j
        if gradient not in self.late:
            first = y[(0,) * y.ndim]
            self.late[gradient] = index_after(self.j, self.same_j, first)
        return self.late[gradient]


def _after(j, same_j, outs: Sequence[Any]):
    """`j`; on CPU not before the old body has put out its carry."""
    firsts = [x[(0,) * x.ndim] for x in outs if _has_a_first(x)]
    default = lambda j, same_j, *firsts: j
    return lax.platform_dependent(j, same_j, *firsts, cpu=late, default=default)


def _has_a_first(x) -> bool:
    """Whether one element of a float array can be had, the same on all devices."""
    differs = _compat.varying_axes(x)
    return jnp.issubdtype(x.dtype, jnp.floating) and x.size > 0 and not differs


def _of_no_layer(eqn, reduced: Placements):
    """What a running sum (product, maximum, ...) starts from."""
    # The reduction says so itself, of zero layers: not every dtype has an infinity for
    # the maximum to start from.
    aval, (axis,) = eqn.invars[0].aval, reduced.in_axes
    shape = [0 if d == axis else size for d, size in enumerate(aval.shape)]
    nothing = _compat.typed_as(jnp.zeros(shape, aval.dtype), aval)
    return _compat.bind(eqn, [nothing])[0]
