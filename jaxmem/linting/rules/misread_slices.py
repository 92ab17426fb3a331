"""Slices of arrays in the host's memory that a GPU takes from other places."""

from collections.abc import Iterator

from jaxmem.ir.host_slices import AFFECTED, WHAT_TO_DO, walks_back
from jaxmem.ir.jaxprs import elements
from jaxmem.ir.scans import is_on_host, is_var, xs_of, ys_of
from jaxmem.linting._subject import Finding, Subject, levels, place
from jaxmem.memory.buffers import parse_hlo, wrong_slices

_CHECK = "misread from the host"


def misread_from_host(subject: Subject) -> Iterator[Finding]:
    """Finds backward scans over the host's arrays, which XLA:GPU walks forwards.

    So it is with residuals that a policy offloads, in old versions. A compiled step
    tells all slices that go wrong, those of loops of other kinds among them.
    """
    if subject.compiled is not None:
        for one in wrong_slices(parse_hlo(subject.compiled.hlo)):
            yield Finding(
                check=_CHECK,
                severity="error",
                what=one.told,
                where=one.source,
                remedy=WHAT_TO_DO,
            )
    elif AFFECTED:
        for level in levels(subject.live):
            for eqn in filter(walks_back, level.graph.eqns):
                yield _finding(level, eqn)


def _finding(level, eqn) -> Finding:
    stacks = [v for v in (*xs_of(eqn), *ys_of(eqn)) if is_var(v) and is_on_host(v)]
    return Finding(
        check=_CHECK,
        severity="error",
        what="a scan goes backwards through arrays in the host's memory: XLA:GPU of "
        "this version takes their slices in the forward order, and computes something "
        "else",
        bytes=sum(elements(v.aval.shape) * v.aval.dtype.itemsize for v in stacks),
        remedy=WHAT_TO_DO,
        **place(level, eqn),
    )
