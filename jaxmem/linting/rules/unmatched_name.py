"""Names of a checkpoint policy that no residual has."""

from collections.abc import Iterator
from typing import Any

from jaxmem import _compat
from jaxmem.ir.scans import is_var
from jaxmem.linting._subject import (
    Finding,
    Subject,
    SubjectLevel,
    checkpoints,
    is_recomputed,
    levels,
    place,
)

_PASSED_ON = frozenset("name reduce_precision copy device_put".split())


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
                    "put checkpoint_name on the very value that the backward pass "
                    "reads (jaxmem.residuals lists them), inside the function under "
                    "jax.checkpoint"
                ),
                **place(level, eqn),
            )


def _names(subject: Subject) -> set[str]:
    eqns = (e for level in levels(subject.closed) for e in level.jaxpr.eqns)
    return {e.params["name"] for e in eqns if e.primitive.name == "name"}


def _kept_names(subject: Subject) -> set[tuple[str, bool]]:
    """(name, whether offloaded) of each value that the backward pass reads."""
    kept: set[tuple[str, bool]] = set()
    for level in levels(subject.closed):
        carriers = _carriers(level)
        for eqn in level.jaxpr.eqns:
            if level.is_backward(eqn):
                kept.update(*(carriers.get(v, ()) for v in filter(is_var, eqn.invars)))
                continue
            # a loop stacks its residuals; its carry is no residual
            first = _compat.scan_counts(eqn)[1] if eqn.primitive.name == "scan" else 0
            for inner in level.inside(eqn):
                outs = filter(is_var, inner.jaxpr.outvars[first:])
                names = _carriers(inner)
                kept.update(*(names.get(v, ()) for v in outs))
    return kept


def _carriers(level: SubjectLevel) -> dict[Any, set[tuple[str, bool]]]:
    """Variable -> (name, whether offloaded) of each name that it has."""
    named: dict[Any, set[tuple[str, bool]]] = {}
    for eqn in level.jaxpr.eqns:
        primitive = eqn.primitive.name
        if primitive in _PASSED_ON and not is_recomputed(eqn):
            given = {(eqn.params["name"], False)} if primitive == "name" else set()
            names = given.union(*(named.get(v, ()) for v in filter(is_var, eqn.invars)))
            if primitive == "device_put":
                names = {(name, True) for name, _ in names}
            named.update((v, names) for v in eqn.outvars)
    return named
