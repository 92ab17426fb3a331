"""Checkpoint policies that save nothing, everything, or names that nothing has."""

from collections.abc import Iterator
from typing import Any

import jax

from jaxmem import _compat
from jaxmem.ir import primitives
from jaxmem.ir.scans import is_var
from jaxmem.linting._kept import kept_values
from jaxmem.linting._subject import (
    Finding,
    Subject,
    SubjectLevel,
    checkpoints,
    is_recomputed,
    levels,
    place,
)


def policy_none(subject: Subject) -> Iterator[Finding]:
    """Finds `policy=None`, which saves nothing; some read it as no checkpoint."""
    for level, eqn in checkpoints(subject.closed):
        if eqn.params["policy"] is None:
            yield Finding(
                check="policy None",
                severity="note",
                what="a jax.checkpoint without a policy saves nothing",
                remedy=(
                    "if that is intended, use "
                    "jax.checkpoint_policies.nothing_saveable; if everything is to be "
                    "saved, remove the checkpoint"
                ),
                **place(level, eqn),
            )


def policy_saves_all(subject: Subject) -> Iterator[Finding]:
    """Finds `save_anything_except_these_names` where jax saves those names too."""
    forgetful = [
        (level, eqn)
        for level, eqn in checkpoints(subject.closed)
        if _compat.forgets_its_names(eqn.params["policy"])
    ]
    if forgetful:
        yield Finding(
            check="policy saves all",
            severity="error",
            what=(
                "save_anything_except_these_names saves everything, the names "
                f"included, in jax {jax.__version__}"
            ),
            bytes=sum(k.bytes for k in kept_values(SubjectLevel.of(subject.live))),
            count=len(forgetful),
            remedy=(
                "name what is to be saved (save_only_these_names), or write a policy: "
                "a function of (primitive, *types, **params)"
            ),
            **place(*forgetful[0]),
        )


def unmatched_name(subject: Subject) -> Iterator[Finding]:
    """Finds names that a policy is to save or to offload, and that no residual has."""
    # In unrolled layers the name of a layer's output counts as matched: the next layer
    # keeps its input, with or without the name.
    kept = _kept_names(subject)
    everywhere = _names(subject)
    for level, eqn in checkpoints(subject.closed):
        saved, offloaded = _compat.policy_names(eqn.params["policy"])
        unmatched = [n for n in saved if not kept & {(n, False), (n, True)}]
        unmatched += [n for n in offloaded if (n, True) not in kept]
        for name in sorted(unmatched):
            reason = (
                "the backward pass does not read the value that has it"
                if name in everywhere
                else "no value in the step has it"
            )
            yield Finding(
                check="unmatched name",
                severity="error",
                what=f"the policy's name {name!r} matches no residual: {reason}",
                remedy=(
                    "put checkpoint_name on a value that the backward pass "
                    "reads (jaxmem.residuals lists them), inside the function under "
                    "jax.checkpoint"
                ),
                **place(level, eqn),
            )


def _names(subject: Subject) -> set[str]:
    eqns = (e for level in levels(subject.closed) for e in level.graph.eqns)
    return {e.params["name"] for e in eqns if primitives.is_named(e)}


def _kept_names(subject: Subject) -> set[tuple[str, bool]]:
    """(name, whether offloaded) of each value that the backward pass reads."""
    kept: set[tuple[str, bool]] = set()
    for level in levels(subject.closed):
        carriers = _carriers(level)
        for eqn in level.graph.eqns:
            if level.is_backward(eqn):
                kept.update(*(carriers.get(v, ()) for v in filter(is_var, eqn.invars)))
                continue
            # a loop stacks its residuals; its carry is no residual
            first = _compat.scan_counts(eqn)[1] if primitives.is_scan(eqn) else 0
            for inner in level.inside(eqn):
                outs = filter(is_var, inner.graph.outvars[first:])
                names = _carriers(inner)
                kept.update(*(names.get(v, ()) for v in outs))
    return kept


def _passes_on(eqn) -> bool:
    """Whether what a policy keeps of its operand is kept as its result."""
    known = primitives.of(eqn)
    rounded = known.shows and known.elementwise and not primitives.is_cast(eqn)
    return rounded or primitives.is_named(eqn)


def _carriers(level: SubjectLevel) -> dict[Any, set[tuple[str, bool]]]:
    """Variable -> (name, whether offloaded) of each name that it has."""
    named: dict[Any, set[tuple[str, bool]]] = {}
    for eqn in level.graph.eqns:
        moved = primitives.is_transfer(eqn)
        if (moved or _passes_on(eqn)) and not is_recomputed(eqn):
            own = primitives.is_named(eqn)
            given = {(eqn.params["name"], False)} if own else set()
            names = given.union(*(named.get(v, ()) for v in filter(is_var, eqn.invars)))
            if moved:
                names = {(name, True) for name, _ in names}
            named.update((v, names) for v in eqn.outvars)
    return named
