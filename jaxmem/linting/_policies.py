"""Checkpoint policies that do not do what their words say."""

from collections.abc import Iterator
from typing import Any

import jax

from jaxmem import _compat
from jaxmem.ir.scans import is_var
from jaxmem.linting._kept import kept
from jaxmem.linting._subject import (
    Finding,
    Level,
    Subject,
    checkpoints,
    is_recomputed,
    levels,
    place,
)

_PASSED_ON = frozenset("name reduce_precision copy device_put".split())


def unmatched_names(subject: Subject) -> Iterator[Finding]:
    """A name that a policy is to save or to offload, and that no residual has.

    In unrolled layers the name of a layer's output counts as matched: the next layer
    keeps its input, whatever the name says.
    """
    found = _kept_names(subject)
    everywhere = _names(subject)
    for level, eqn in checkpoints(subject.closed):
        saved, offloaded = _compat.policy_names(eqn.params["policy"])
        missed = [n for n in saved if not found & {(n, False), (n, True)}]
        missed += [n for n in offloaded if (n, True) not in found]
        for name in sorted(missed):
            why = (
                "the backward pass does not read what carries it"
                if name in everywhere
                else "nothing in the step carries it"
            )
            yield Finding(
                check="unmatched name",
                severity="error",
                what=f"the policy's name {name!r} matches no residual: {why}",
                remedy=(
                    "put checkpoint_name on the very value that the backward pass "
                    "reads (jaxmem.residuals lists them), inside the function under "
                    "jax.checkpoint"
                ),
                **place(level, eqn),
            )


def no_policy(subject: Subject) -> Iterator[Finding]:
    """`policy=None` saves nothing; some read it as no checkpoint."""
    for level, eqn in checkpoints(subject.closed):
        if eqn.params["policy"] is None:
            yield Finding(
                check="policy None",
                severity="note",
                what="a jax.checkpoint without a policy saves nothing",
                remedy=(
                    "if that is meant, jax.checkpoint_policies.nothing_saveable says "
                    "so; if it is meant to save all, leave the checkpoint out"
                ),
                **place(level, eqn),
            )


def saves_all(subject: Subject) -> Iterator[Finding]:
    """`save_anything_except_these_names` where jax lets it save those too."""
    found = [
        (level, eqn)
        for level, eqn in checkpoints(subject.closed)
        if _compat.forgets_its_names(eqn.params["policy"])
    ]
    if found:
        yield Finding(
            check="policy saves all",
            severity="error",
            what=(
                "save_anything_except_these_names saves everything, the names "
                f"included, in jax {jax.__version__}"
            ),
            bytes=sum(k.bytes for k in kept(Level.of(subject.live))),
            count=len(found),
            remedy=(
                "name what is to be saved (save_only_these_names), or write a policy: "
                "a function of (primitive, *types, **params)"
            ),
            **place(*found[0]),
        )


def _names(subject: Subject) -> set[str]:
    eqns = (e for level in levels(subject.closed) for e in level.jaxpr.eqns)
    return {e.params["name"] for e in eqns if e.primitive.name == "name"}


def _kept_names(subject: Subject) -> set[tuple[str, bool]]:
    """(name, moved to other memory) of what the backward pass reads."""
    found: set[tuple[str, bool]] = set()
    for level in levels(subject.closed):
        carriers = _carriers(level)
        for eqn in level.jaxpr.eqns:
            if level.is_backward(eqn):
                found.update(*(carriers.get(v, ()) for v in filter(is_var, eqn.invars)))
                continue
            # a loop stacks what is kept; what it carries is no residual of its own
            first = _compat.scan_counts(eqn)[1] if eqn.primitive.name == "scan" else 0
            for inner in level.inside(eqn):
                outs = filter(is_var, inner.jaxpr.outvars[first:])
                names = _carriers(inner)
                found.update(*(names.get(v, ()) for v in outs))
    return found


def _carriers(level: Level) -> dict[Any, set[tuple[str, bool]]]:
    """Variable -> (name, moved to other memory) of what it carries forwards."""
    named: dict[Any, set[tuple[str, bool]]] = {}
    for eqn in level.jaxpr.eqns:
        primitive = eqn.primitive.name
        if primitive in _PASSED_ON and not is_recomputed(eqn):
            own = {(eqn.params["name"], False)} if primitive == "name" else set()
            names = own.union(*(named.get(v, ()) for v in filter(is_var, eqn.invars)))
            if primitive == "device_put":
                names = {(name, True) for name, _ in names}
            named.update((v, names) for v in eqn.outvars)
    return named
