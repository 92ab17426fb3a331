"""A pair of scans whose first layers recompute more than the others, and both rebuilt.

The scans stay whole: the forward scan writes what only the first layers keep, and what
only the others keep, into stacks in its carry, and in the backward scan a `cond` on the
layer's number reads what the others keep or recomputes it. (On a GPU the host waits for
its predicate once a layer.) From there on all layers are alike. What they all recompute
is computed once, before the `cond` where it needs nothing that only the others keep,
else inside of it. Weights that products need there are gathered there, and once more
for the gradient's products.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem import _compat
from jaxmem._module_path import taken_in
from jaxmem.ir.graph import JaxprGraph, Values
from jaxmem.ir.scans import is_var, run_body, scan_like, split
from jaxmem.ir.shards import held
from jaxmem.scheduling.recompute.draws import is_of_draws, values_of
from jaxmem.scheduling.recompute.minimum_cut import needed
from jaxmem.scheduling.recompute.pair_rewrite import (
    Given,
    PairRewrite,
    packed,
    read_by,
    rebuilt,
    stacked,
    unpacked,
)
from jaxmem.scheduling.recompute.pairs import Pair
from jaxmem.scheduling.recompute.residuals import handed_on, last_of


@dataclass(frozen=True)
class FirstLayersRewrite:
    """A pair of scans, and what its first layers keep instead of what all others do.

    Attributes:
      all: what is done to the pair in the other layers.
      kept: variables of the forward body that the first layers keep.
      layers: how many these are.
      apart: as `FirstLayers.apart`.
    """

    all: PairRewrite
    kept: tuple[Any, ...]
    layers: int
    apart: bool = False

    @property
    def pair(self) -> Pair:
        return self.all.pair

    @property
    def body(self) -> JaxprGraph:
        return self.pair.body

    @cached_property
    def late(self) -> list[Any]:
        """What only the other layers keep; the first ones recompute it."""
        return [v for v in kept_by(self.all) if v not in self.kept]

    @cached_property
    def early(self) -> list[Any]:
        """What only the first layers keep."""
        known = kept_by(self.all)
        return [v for v in self.kept if v not in known]

    @cached_property
    def beyond(self) -> list[int]:
        """Positions of the equations that make what is late of what is kept."""
        return needed(self.body, self.late, {*self.kept, *self.pair.free})

    @property
    def anyway(self) -> set[int]:
        """Positions of what all layers recompute, as far as the first ones have it."""
        return set() if self.apart else set(self.all.evaluated)

    @cached_property
    def _by_all(self) -> list[int]:
        """Those of the equations beyond that all layers evaluate."""
        return sorted(set(self.beyond) & self.anyway)

    @cached_property
    def before(self) -> list[int]:
        """Those of them that need nothing but what all layers keep.

        They need no `cond`: what it returns is written and read once more.
        """
        known = {*kept_by(self.all), *self.pair.free} - {*self.late}
        found = []
        for i in self._by_all:
            eqn = self.body.eqns[i]
            if known.issuperset(filter(is_var, eqn.invars)):
                found.append(i)
                known |= {*eqn.outvars}
        return found

    @cached_property
    def shared(self) -> list[int]:
        """The rest of them, as far as they cost something."""
        rest = (i for i in self._by_all if i not in self.before)
        return [i for i in rest if self.pair.is_paid(self.body.eqns[i])]

    @property
    def inputs(self) -> set[Any]:
        here = read_by(self.body, self.beyond)
        return {*self.all.inputs, *here, *self.late}

    @property
    def recomputed(self) -> list[tuple[Any, int]]:
        """(equation, how often) of what is recomputed and costs something."""
        own = sorted(set(self.beyond) - self.anyway)
        eqns = [self.body.eqns[i] for i in own]
        more = [(e, self.layers) for e in eqns if self.pair.is_paid(e)]
        return [*self.all.recomputed, *more]

    @property
    def gathered(self) -> Iterator[tuple[Any, Any, float, int]]:
        """(product, operand, bytes that a device sends, how often), in the `cond`."""
        own = set(self.beyond) - {*self.shared, *self.before}
        inside = [(i, self.layers) for i in sorted(own)]
        inside += [(i, self.pair.length) for i in self.shared]
        for i, times in inside:
            eqn = self.body.eqns[i]
            yield from ((eqn, v, size, times) for v, size in self.pair.gathered(eqn))

    @property
    def offloaded_bytes(self) -> int:
        return 0

    def described(self) -> Iterator[tuple[Any, Any, str, int, int]]:
        """As those of a `PairRewrite`."""
        yield from self.all.described()
        shards = self.all.pair.shards
        for v in self.late:
            words = "recomputed in the first layers"
            yield stacked(v, self.layers), self.all.maker(v), words, 1, shards(v)
        for v in self.early:
            words = "others are computed from it in the first layers"
            yield stacked(v, self.layers), self.all.maker(v), words, -1, shards(v)


def kept_by(plan: PairRewrite) -> list[Any]:
    """Variables of the forward body that are kept for the backward scan alone."""
    slots = [v for slot, v in plan.stays.items() if slot not in plan.pair.fixed]
    return list(dict.fromkeys([*slots, *plan.instead]))


def with_first_layers(closed, plan: FirstLayersRewrite):
    """The jaxpr with residuals of the first `plan.layers` layers recomputed."""

    def backward(eqn, ins: list, given: Given, outs: list, stacks: dict) -> list:
        return _run_backward(eqn, ins, plan, given, outs, stacks)

    return rebuilt(closed, plan, _run_forward, backward)


def _row(plan: FirstLayersRewrite, j, early: bool):
    """Where layer `j` lies in a stack of the early layers, or of the late ones."""
    # A layer that has no place there is sent to a row that is written over, or not
    # read.
    return jnp.minimum(j, plan.layers) if early else jnp.maximum(j - plan.layers, 0)


def _empty(plan: FirstLayersRewrite, v, early: bool):
    # one row more, into which the late layers write (`_row`)
    rows = plan.layers + 1 if early else plan.pair.length - plan.layers
    value = packed(v, jnp.zeros(v.aval.shape, v.aval.dtype))
    zeros = jnp.zeros((rows, *value.shape), value.dtype)
    return _compat.typed_as(zeros, v.aval)


def _run_forward(
    eqn, values: list, plan: FirstLayersRewrite
) -> tuple[list, dict[Any, Any]]:
    """Outputs of the forward scan, and the stacks of some of the layers, or of all."""
    consts, init, xs = split(eqn, values)
    body = plan.body
    parts = [*((v, True) for v in plan.early), *((v, False) for v in plan.late)]
    always = [v for v in plan.all.instead if v not in plan.late]
    once = plan.all.draws_once and is_of_draws(body, [*plan.all.kept, *plan.early])

    def step(carry, x):
        j, inner, stacks = carry
        inside = values_of(body, body.inputs([*consts, *inner, *x]), once)
        outs = inside.all_outputs()
        new = []
        for (v, early), stack in zip(parts, stacks, strict=True):
            value, at = packed(v, inside.read(v)), _row(plan, j, early)
            new.append(lax.dynamic_update_index_in_dim(stack, value, at, 0))
        kept = [packed(v, inside.read(v)) for v in always]
        return (j + 1, outs[: len(init)], new), (outs[len(init) :], kept)

    start = jnp.int32(0), init, [_empty(plan, *part) for part in parts]
    (_, ends, stacks), (ys, kept) = scan_like(eqn, step, start, xs)
    made = {v: stack for (v, _), stack in zip(parts, stacks, strict=True)}
    return [*ends, *ys], made | dict(zip(always, kept, strict=True))


def _run_backward(
    eqn,
    values: list,
    plan: FirstLayersRewrite,
    weights: Given,
    outs: list,
    stacks: dict,
) -> list:
    consts, init, xs = split(eqn, values)
    stays = {slot: v for slot, v in plan.all.stays.items() if v not in plan.late}
    always = [v for v in plan.all.instead if v not in plan.late]

    def step(carry, item):
        (inner, before), (j, rows, now, kept) = carry, item
        x = dict(rows)
        known = dict(zip(weights.slices, now, strict=True)) | weights.whole
        known |= {v: x[slot] for slot, v in stays.items()}
        known |= {v: unpacked(v, k) for v, k in zip(always, kept, strict=True)}
        first = values_of(plan.body, known, plan.all.draws_once)
        first.recompute(plan.before)
        known = first.env | _beyond(plan, first.env, stacks, j)
        inside = values_of(plan.body, known, plan.all.draws_once)
        # the `cond` has given the results of the last, to either kind of layer
        inside.done.update(plan.before, plan.shared)
        inside.recompute(plan.all.evaluated)
        made = {**plan.all.slots, **plan.all.stays}
        x |= {slot: inside.env[v] for slot, v in made.items() if v in inside.env}
        last = zip(plan.all.loop_carried, before, strict=True)
        x |= {one.slot: value for one, value in last}
        carry, ys = run_body(eqn, consts, inner, [x[i] for i in range(len(xs))])
        return (carry, handed_on(plan.all, inside.env)), ys

    kept = [stacks[v] for v in always]
    there = {i: x for i, x in enumerate(xs) if i not in plan.all.slots}
    there = {i: x for i, x in there.items() if i in stays or i not in plan.all.stays}
    numbers = jnp.arange(plan.pair.length, dtype=jnp.int32)
    if not eqn.params["reverse"]:  # the forward scan runs from the end
        numbers = numbers[::-1]
    items = numbers, there, list(weights.slices.values()), kept
    start = init, last_of(plan.all, outs)
    (ends, _), ys = scan_like(eqn, step, start, items)
    return [*ends, *ys]


def _beyond(
    plan: FirstLayersRewrite, known: dict[Any, Any], stacks: dict[Any, Any], j
) -> dict[Any, Any]:
    """What only some layers keep of layer `j`, and what is computed beside it."""
    # both branches give the same variables: what follows is one body for all layers
    results = (v for i in plan.shared for v in plan.body.eqns[i].outvars)
    wanted = list(dict.fromkeys([*plan.late, *results]))
    if not wanted:
        return {}

    def made(kept: Sequence[Any], early: bool) -> list[Any]:
        at = _row(plan, j, early)
        rows = (lax.dynamic_index_in_dim(stacks[v], at, 0, False) for v in kept)
        here = {v: unpacked(v, row) for v, row in zip(kept, rows, strict=True)}
        values = Values(plan.body, known | here)
        return [values.read(v) for v in wanted]

    recompute = lambda: made(plan.early, early=True)
    read = lambda: made(plan.late, early=False)
    with jax.named_scope(taken_in(plan.layers, plan.pair.length)):
        results = lax.cond(j < plan.layers, recompute, read)
    # XLA does not see through a `cond` how they are sharded: it would gather them
    shardings = plan.pair.inside()
    return {
        v: held(x, shardings.mesh, shardings.of[v]) if shardings.shards(v) > 1 else x
        for v, x in zip(wanted, results, strict=True)
    }
