"""Donation: asked for and not done, possible and not asked for, asked for twice."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from jaxmem import _jaxpr
from jaxmem.ir.scans import is_var
from jaxmem.linting._subject import LEAST, Finding, Subject
from jaxmem.memory._donation import unused_donations, updated_arguments, whole_bytes
from jaxmem.scheduling._passes import by_shape

_SHOWN = 2


def not_donated(subject: Subject) -> Iterator[Finding]:
    """Arguments whose updated value the step returns, and that are not donated."""
    leaves = subject.step.leaves
    updated = updated_arguments(subject.closed)
    missed = [i for i in updated if not leaves[i].donated]
    yield from _findings(
        subject,
        missed,
        check="not donated",
        severity="warning",
        what="the step returns updated values of arguments that are not donated",
        remedy="name them in donate_argnums: else they are there twice",
    )


def not_reused(subject: Subject) -> Iterator[Finding]:
    """Donated arguments whose buffer no output gets; compiled, if there is a target."""
    step, jaxpr = subject.step, subject.closed.jaxpr
    read = {v for e in jaxpr.eqns for v in filter(is_var, e.invars)}
    read.update(filter(is_var, jaxpr.outvars))
    kept = [i for i, v in enumerate(jaxpr.invars) if v in read]
    if subject.compiled:
        aliased = subject.compiled.aliased
    else:
        donated = [i for i in kept if step.leaves[i].donated]
        aliased = frozenset(by_shape(subject.closed, donated).values())
    reasons: dict[str, list[int]] = defaultdict(list)
    found = unused_donations(step, kept, subject.closed.out_avals, aliased)
    for i, why in found.items():
        reasons[why].append(i)
    for why, places in reasons.items():
        yield from _findings(
            subject,
            places,
            check="donation not used",
            severity="error",
            what=f"donated, and not reused: {why}",
            remedy="do not donate what is not updated; return it as it came in",
        )


def donated_twice(subject: Subject) -> Iterator[Finding]:
    """One buffer in several arguments of which one is donated: fails when it runs."""
    holders: dict[Any, list[int]] = defaultdict(list)
    for i, leaf in enumerate(subject.leaves):
        if (buffer := _buffer(leaf)) is not None:
            holders[buffer].append(i)
    for places in holders.values():
        donated = [i for i in places if subject.step.leaves[i].donated]
        if len(places) > 1 and donated:
            twice = len(donated) > 1
            yield from _findings(
                subject,
                places,
                check="donated twice" if twice else "donated and read",
                severity="error",
                what=(
                    "one buffer is donated as several arguments"
                    if twice
                    else "a buffer is donated, and an argument that is not"
                ),
                remedy="copy it (jnp.copy) for all arguments but one",
                least=0,
            )


def _buffer(leaf: Any) -> Any:
    """What tells one array in memory from another; None where there is none."""
    if not isinstance(leaf, jax.Array) or _jaxpr.is_abstract(leaf):
        return None
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) or leaf.is_deleted():
        return id(leaf)
    try:
        return leaf.unsafe_buffer_pointer()
    except (ValueError, RuntimeError):  # spread over several devices
        return id(leaf)


def _findings(
    subject: Subject, places: Iterable[int], least: int = LEAST, **said: Any
) -> Iterator[Finding]:
    """One finding about several arguments, the largest named."""
    sizes = {i: whole_bytes(subject.step, i) for i in places}
    large = sorted((i for i in sizes if sizes[i] >= least), key=lambda i: -sizes[i])
    if large:
        names = [subject.step.leaves[i].name for i in large]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        total = sum(sizes[i] for i in large)
        yield Finding(where=", ".join(names[:_SHOWN]) + more, bytes=total, **said)
