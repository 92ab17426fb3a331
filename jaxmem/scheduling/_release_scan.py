"""The scan with the update in its body: what a `Release` plans, carried out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxmem import _compat, _jaxpr
from jaxmem.scheduling._graph import Graph
from jaxmem.scheduling._layer_axis import Axis, Batched, Reduced, narrow
from jaxmem.scheduling._release import Place, Release, made_of
from jaxmem.scheduling._scans import is_var, scan_like, split, xs_of, ys_of
from jaxmem.scheduling._write_back import narrowed, scan_with_write_back


def release(closed, plan: Release):
    """The jaxpr with the planned operations moved into the body of the scan."""
    graph = Graph(closed)

    def run(args: list) -> list:
        state = _State(graph, plan, graph.inputs(args))
        for i in range(len(graph.eqns)):
            state.evaluate(i)
        return [state.read(v) for v in graph.outvars]

    return _jaxpr.retrace(closed, run)


@dataclass
class _State:
    """Values so far; an equation is evaluated when it is first needed."""

    graph: Graph
    plan: Release
    env: dict[Any, Any]
    done: set[int] = field(default_factory=set)

    def read(self, atom):
        if not is_var(atom):
            return atom.val
        if atom not in self.env:
            self.evaluate(self.graph.maker[atom])
        return self.env[atom]

    def evaluate(self, i: int) -> None:
        if i in self.done or i in self.plan.verdicts:
            return
        self.done.add(i)
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
        if eqn.primitive.name != "scan" or self.plan.scan in self.done:
            return []
        buffers = {v for v, axis in self.plan.updated.values() if axis == 0}
        return narrowed(eqn, [v for v in buffers if v in self.graph.invars])

    def _before_scan(self) -> None:
        """Everyone else who reads what is overwritten does so first."""
        for v, _ in self.plan.updated.values():
            for u in self.graph.users.get(v, ()):
                if u != self.plan.scan and u not in self.plan.verdicts:
                    self.evaluate(u)


def _run_scan(state: _State) -> dict[Any, Any]:
    """The scan with more in its body: values of its outputs and of what was moved."""
    graph, plan = state.graph, state.plan
    eqn = graph.eqns[plan.scan]
    consts, init, slices = split(eqn, [state.read(v) for v in eqn.invars])
    xs = xs_of(eqn)
    updated = {place: v for v, place in plan.updated.items()}
    whole = _whole(state)
    in_carry = {v for v, axis in updated if axis == 0}
    read = [i for i, v in enumerate(xs) if not (is_var(v) and v in in_carry)]
    sums = [i for i, verdict in plan.verdicts.items() if isinstance(verdict, Reduced)]
    reverse = eqn.params["reverse"]

    def step(carry, turn):
        j, inner, buffers, totals = carry
        env: dict[Place, Any] = {}
        cut = _Cut(
            graph, plan, j, whole | dict(zip(updated, buffers, strict=True)), env
        )
        given = dict(zip(read, turn, strict=True))
        for i, v in enumerate(xs):
            if i not in given:
                given[i] = jnp.squeeze(cut.slice_of(v, 0), 0)
        args = [*consts, *inner, *(given[i] for i in range(len(xs)))]
        outs = _jaxpr.evaluate(eqn.params["jaxpr"], args)
        env.update(_as_layers(eqn, outs[len(init) :]))
        for i in plan.moved:
            cut.run(i)
        buffers = [
            lax.dynamic_update_slice_in_dim(buffer, env[v, axis], j, axis)
            for ((_, axis), v), buffer in zip(updated.items(), buffers, strict=True)
        ]
        totals = [
            getattr(lax, plan.verdicts[i].combine)(
                total, env[graph.eqns[i].outvars[0], -1]
            )
            for i, total in zip(sums, totals, strict=True)
        ]
        kept = [jnp.squeeze(env[v, plan.axis[v]], plan.axis[v]) for v in plan.outputs]
        return (j + (-1 if reverse else 1), outs[: len(init)], buffers, totals), kept

    start = jnp.int32(eqn.params["length"] - 1 if reverse else 0)
    carry = (
        start,
        init,
        [state.read(v) for v, _ in updated],
        [_neutral(graph.eqns[i]) for i in sums],
    )
    (_, ends, buffers, totals), kept = scan_like(
        eqn, step, carry, [slices[i] for i in read]
    )
    found = dict(zip(eqn.outvars, ends, strict=False))
    found |= dict(zip(updated.values(), buffers, strict=True))
    found |= {graph.eqns[i].outvars[0]: t for i, t in zip(sums, totals, strict=True)}
    for v, stack in zip(plan.outputs, kept, strict=True):
        found[v] = jnp.moveaxis(stack, 0, plan.axis[v])
    return found


def _as_layers(eqn, ys: Sequence[Any]) -> dict[Place, Any]:
    """A layer's outputs as slices of the stacks that they would have gone into."""
    return {(v, 0): jnp.expand_dims(y, 0) for v, y in zip(ys_of(eqn), ys, strict=True)}


def _whole(state: _State) -> dict[Any, Any]:
    """What the body reads from outside: values of buffers by place, others by name."""
    graph, plan = state.graph, state.plan
    found = {place: state.read(place[0]) for place in plan.buffers}
    for i in plan.moved:
        for v, axis in zip(graph.eqns[i].invars, plan.verdicts[i].ins, strict=True):
            if not is_var(v) or v in plan.axis:
                continue
            for w in [v] if axis is None else _unsliced(graph, v, axis):
                found[w, None] = state.read(w)
    return found


def _unsliced(graph: Graph, v, axis: int) -> Iterator[Any]:
    """Whole arrays (scalars, mostly) that go into the slices of `v`."""
    recipe = made_of(graph, v, axis)
    if recipe is None:
        return
    for w, inner in zip(graph.eqns[graph.maker[v]].invars, recipe, strict=True):
        if is_var(w) and inner is None:
            yield w
        elif is_var(w):
            yield from _unsliced(graph, w, inner)


@dataclass
class _Cut:
    """Slices of one layer, made as they are asked for."""

    graph: Graph
    plan: Release
    j: Any
    whole: Mapping[Any, Any]
    env: dict[Any, Any]

    def slice_of(self, atom, axis: Axis):
        if not is_var(atom):
            return atom.val
        if axis is None:
            return self.whole[atom, None]
        if (atom, axis) not in self.env:
            self.env[atom, axis] = self._make(atom, axis)
        return self.env[atom, axis]

    def _make(self, v, axis: int):
        recipe = made_of(self.graph, v, axis)
        if recipe is None:
            return lax.dynamic_slice_in_dim(self.whole[v, axis], self.j, 1, axis)
        eqn = self.graph.eqns[self.graph.maker[v]]
        args = [self.slice_of(w, a) for w, a in zip(eqn.invars, recipe, strict=True)]
        return _compat.bind(eqn, args, narrow(eqn, (axis,)))[0]

    def run(self, i: int) -> None:
        eqn, verdict = self.graph.eqns[i], self.plan.verdicts[i]
        args = [
            self.slice_of(v, a) for v, a in zip(eqn.invars, verdict.ins, strict=True)
        ]
        axes = verdict.outs if isinstance(verdict, Batched) else (-1,)
        params = narrow(eqn, axes) if isinstance(verdict, Batched) else eqn.params
        outs = _compat.bind(eqn, args, params)
        self.env.update(zip(zip(eqn.outvars, axes, strict=True), outs, strict=True))


def _neutral(eqn):
    """What a running sum (product, maximum, ...) starts from."""
    aval, name = eqn.outvars[0].aval, eqn.primitive.name
    inexact = jnp.issubdtype(aval.dtype, jnp.inexact)
    if name in ("reduce_max", "reduce_min"):
        info = jnp.finfo(aval.dtype) if inexact else jnp.iinfo(aval.dtype)
        low, high = (-jnp.inf, jnp.inf) if inexact else (info.min, info.max)
        value = low if name == "reduce_max" else high
    else:
        value = {"reduce_prod": 1, "reduce_and": ~0}.get(name, 0)
    return jnp.full(aval.shape, value, aval.dtype)
