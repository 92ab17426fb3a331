"""Arguments that are donated without effect, or twice, or not at all."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from jaxmem.ir import jaxprs
from jaxmem.ir.graph import by_shape
from jaxmem.ir.scans import is_var
from jaxmem.linting._subject import LEAST, Finding, Subject
from jaxmem.memory.report import unused_donations, updated_arguments, whole_bytes

_SHOWN = 2


def about_arguments(
    subject: Subject, leaves: Iterable[int], least: int = LEAST, **fields: Any
) -> Iterator[Finding]:
    """One finding about several arguments of `least` bytes or more."""
    sizes = {i: whole_bytes(subject.call, i) for i in leaves}
    large = sorted((i for i in sizes if sizes[i] >= least), key=lambda i: -sizes[i])
    if large:
        names = [subject.call.leaves[i].name for i in large]
        rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        total = sum(sizes[i] for i in large)
        yield Finding(where=", ".join(names[:_SHOWN]) + rest, bytes=total, **fields)


def not_donated(subject: Subject) -> Iterator[Finding]:
    """Finds arguments that are in memory twice, before and after their update."""
    leaves = subject.call.leaves
    updated = updated_arguments(subject.closed)
    yield from about_arguments(
        subject,
        [i for i in updated if not leaves[i].donated],
        check="not donated",
        severity="warning",
        what="the step returns updated values of arguments that are not donated",
        remedy="name them in donate_argnums: otherwise they are in memory twice",
    )


def donation_not_used(subject: Subject) -> Iterator[Finding]:
    """Finds donations without effect; in the compiled step, if there is a target."""
    call, jaxpr = subject.call, subject.closed.jaxpr
    read = {v for e in jaxpr.eqns for v in filter(is_var, e.invars)}
    read.update(filter(is_var, jaxpr.outvars))
    used = [i for i, v in enumerate(jaxpr.invars) if v in read]
    if subject.compiled:
        aliased = subject.compiled.aliased
    else:  # jax matches donated arguments to outputs in this way before it compiles
        donated = [i for i in used if call.leaves[i].donated]
        aliased = frozenset(by_shape(subject.closed, donated).values())
    by_reason: dict[str, list[int]] = defaultdict(list)
    unused = unused_donations(call, used, subject.closed.out_avals, aliased)
    for i, reason in unused.items():
        by_reason[reason].append(i)
    for reason, leaves in by_reason.items():
        yield from about_arguments(
            subject,
            leaves,
            check="donation not used",
            severity="error",
            what=f"donated, and not reused: {reason}",
            remedy="donate only arguments that the step returns updated",
        )


def donated_twice(subject: Subject) -> Iterator[Finding]:
    """Finds donations that fail when the step runs."""
    leaves_of: dict[Any, list[int]] = defaultdict(list)
    for i, leaf in enumerate(subject.leaves):
        if (buffer := _buffer(leaf)) is not None:
            leaves_of[buffer].append(i)
    for leaves in leaves_of.values():
        donated = [i for i in leaves if subject.call.leaves[i].donated]
        if len(leaves) > 1 and donated:
            twice = len(donated) > 1
            yield from about_arguments(
                subject,
                leaves,
                check="donated twice" if twice else "donated and read",
                severity="error",
                what=(
                    "one buffer is donated as several arguments"
                    if twice
                    else "one buffer is an argument that is donated and another that "
                    "is not"
                ),
                remedy="copy it (jnp.copy) for all arguments but one",
                least=0,  # the step fails, whatever the size
            )


def _buffer(leaf: Any) -> Any:
    """Equal for arguments with the same memory; None where there is no memory."""
    if not isinstance(leaf, jax.Array) or jaxprs.is_abstract(leaf):
        return None
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) or leaf.is_deleted():
        return id(leaf)
    try:
        return leaf.unsafe_buffer_pointer()
    except (ValueError, RuntimeError):  # an array on several devices has no pointer
        return id(leaf)
