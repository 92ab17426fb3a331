"""Layers that are written out: what is recomputed waits for the backward pass.

Lean ops recompute through `jax.checkpoint` without a barrier, which is right in a scan:
there each pass is a loop of its own. Of layers that are written out XLA finds both
passes in one program. It merges the cast of a weight in the backward pass with that of
the forward pass and keeps the copy, or recomputes something long before it is read.
Behind a barrier it waits for the gradient. JAX itself keeps narrow copies of weights
that a model casts outside of such an op: they are cast in each pass too.
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.fused import fused_only
from jaxmem.ir.graph import JaxprGraph, late_of
from jaxmem.ir.scans import LARGE, is_var
from jaxmem.memory import format_bytes
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._pass import Level
from jaxmem.scheduling._searched import Searched, SearchedStep
from jaxmem.scheduling.plan.rows import Description
from jaxmem.scheduling.recompute.pairs import Cut, Pair
from jaxmem.scheduling.recompute.space import space_of_step
from jaxmem.scheduling.recompute.unrolled import (
    Recomputed,
    has_both_passes,
    not_kept,
    weights_made_by,
)
from jaxmem.scheduling.recompute.unrolled_cut import unrolled

Checkpoints = frozenset[int]  # by their places in the list
Casts = tuple[Pair, Cut]  # the two passes, and what is kept of the casts: none


@dataclass(frozen=True)
class Barriers:
    """Whether there are barriers: it costs no operation, but XLA decides what it saves.

    A barrier ends a fusion, so the result is compared with the step without.
    """

    name: ClassVar[str] = "barriers"
    enabled: bool = False


class RecomputeBehindBarriers(Searched[Barriers, Checkpoints | Casts]):
    """In unrolled layers, recomputation waits for its gradient."""

    config = Barriers
    repeats = True  # for the checkpoints, and then for the casts
    for_all = True

    def analyse(self, level: Level, config: Barriers) -> Iterator[Checkpoints | Casts]:
        if not config.enabled or not has_both_passes(level):
            return
        graph = JaxprGraph(level.jaxpr)
        early = (i for i in late_of(graph) if _is_early(level, graph.eqns[i]))
        # alone: the casts are looked for in the list that this gives
        if found := frozenset(early):
            yield found
        yield from _casts(level, graph)

    def apply(self, level: Level, rewrite: Checkpoints | Casts):
        if isinstance(rewrite, frozenset):
            return _with_barriers(level.jaxpr, rewrite)
        run = lambda args: Recomputed.of(*rewrite, args).all_outputs()
        return jaxprs.retrace(level.jaxpr, run)

    def describe(self, rewrite: Checkpoints | Casts, target: str) -> Description:
        if isinstance(rewrite, frozenset):
            note = f"{len(rewrite)} recomputations wait for their gradients"
        else:
            bytes_of = rewrite[0].inside().bytes_of
            size = format_bytes(sum(map(bytes_of, not_kept(*rewrite))))
            note = f"{size} of casts of weights are made in each pass, and not kept"
        return Description(notes=(note,))

    def free(self, step: SearchedStep) -> Iterator[Barriers]:
        enabled = Barriers(enabled=True)
        if space_of_step(step).is_unrolled:
            choice = Choice(step.target, (enabled,))
            if step.traced.rewritten(choice).did(Barriers):
                yield enabled


def barriers_of(step: SearchedStep) -> list[Barriers]:
    """What a search starts from, if it asks for these."""
    asked = step.front[0].choice.configs if step.front else ()
    return [one for one in asked if isinstance(one, Barriers)]


def _is_early(level: Level, eqn) -> bool:
    """Whether XLA may do the recomputation of a checkpoint before it is needed."""
    if not primitives.is_remat(eqn):
        return False
    # with `prevent_cse` JAX has put a barrier there itself
    if not eqn.params["differentiated"] or eqn.params["prevent_cse"]:
        return False
    # a barrier ends fusions, so there is none for little
    if not any(is_var(v) and level.size(v) >= LARGE for v in eqn.invars):
        return False
    # what XLA fuses into its readers is nowhere before they run
    inside = jaxprs.walk(jaxprs.bodies(eqn)[0])
    return any(fused_only(one) is None for one in inside)


def _with_barriers(closed, places: Set[int]):
    """The jaxpr where these checkpoints recompute behind a barrier."""
    eqns = JaxprGraph(closed).eqns
    held = {id(eqns[i]) for i in places}

    def rule(eqn, args: list) -> list[Any] | None:
        if id(eqn) not in held:
            return None
        return _compat.bind(eqn, args, {**eqn.params, "prevent_cse": True})

    return jaxprs.rewritten(closed, rule)


def _casts(level: Level, graph: JaxprGraph) -> Iterator[Casts]:
    """Casts of arguments for products, kept from one pass to the other."""
    pair = unrolled(level.jaxpr, level.shardings)
    if pair is None:
        return
    arguments = set(graph.invars)
    of_weights = {
        i
        for i, eqn in enumerate(graph.eqns)
        if _is_narrowing(level, eqn) and eqn.invars[0] in arguments
    }
    found = weights_made_by(of_weights, pair)
    if not_kept(*found):
        yield found


def _is_narrowing(level: Level, eqn) -> bool:
    """Whether an equation casts a large array to a narrower floating dtype."""
    if not primitives.is_cast(eqn) or not is_var(eqn.invars[0]):
        return False
    before, after = (v.aval.dtype for v in (eqn.invars[0], eqn.outvars[0]))
    floats = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (before, after))
    narrower = floats and after.itemsize < before.itemsize
    return narrower and level.size(eqn.outvars[0]) >= LARGE
