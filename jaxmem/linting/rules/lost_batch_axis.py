"""Activations of a sharded step that are not sharded as its examples are."""

from collections.abc import Iterator

from jaxmem.ir.lost_axes import lost_axes
from jaxmem.ir.scans import size_of
from jaxmem.linting._subject import Finding, Subject, SubjectLevel, place


def lost_batch_axis(subject: Subject) -> Iterator[Finding]:
    """Finds what layers hand on where XLA has moved it to another axis."""
    shardings = subject.call.shardings
    for lost in lost_axes(subject.closed, shardings):
        level = SubjectLevel.of(subject.closed)
        yield Finding(
            check="lost batch axis",
            severity="warning",
            what=f"{lost}, so devices send each other activations",
            bytes=size_of(lost.var),
            remedy=f"write in the layer: {lost.constraint}",
            **place(level, lost.eqn),
        )
