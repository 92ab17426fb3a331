"""Arguments whose updated value the step returns, and that are not donated."""

from collections.abc import Iterator

from jaxmem.linting._arguments import about_arguments
from jaxmem.linting._subject import Finding, Subject
from jaxmem.memory.report import updated_arguments


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
