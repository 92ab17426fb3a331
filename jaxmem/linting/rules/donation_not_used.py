"""Donated arguments whose buffer no output reuses."""

from collections import defaultdict
from collections.abc import Iterator

from jaxmem.linting._arguments import about_arguments
from jaxmem.linting._subject import Finding, Subject
from jaxmem.memory.report import unused_donations
from jaxmem.scheduling._passes import by_shape
from jaxmem.scheduling._scans import is_var


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
            remedy="do not donate what is not updated; return it as it came in",
        )
