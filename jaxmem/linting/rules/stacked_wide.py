"""Scans that stack float32 where only a narrower copy of the stack is read."""

from collections.abc import Iterator

from jaxmem.ir import primitives
from jaxmem.ir.scans import size_of, ys_of
from jaxmem.linting._subject import LEAST, Finding, Subject, array, place, scans


def stacked_wide(subject: Subject) -> Iterator[Finding]:
    """Finds outputs of a scan that are cast to a narrower dtype, and not used else.

    So it is where scanned layers are initialised in float32 and cast afterwards: the
    weights are there in both dtypes.
    """
    for level, eqn in scans(subject.live):
        yield from _findings(level, eqn)


def _findings(level, eqn) -> Iterator[Finding]:
    found = {v: after for v in ys_of(eqn) if (after := _narrowed(level, v))}
    if found:
        largest = max(found, key=size_of)
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        yield Finding(
            check="stacked wide",
            severity="warning",
            what=f"a scan stacks {array(largest.aval)}{more}, of which only a copy in "
            f"{found[largest].aval.dtype.name} is used",
            bytes=sum(map(size_of, found)),
            remedy="cast in the body of the scan; parameters are initialised in that "
            "dtype by param_dtype, or where jaxmem.schedule is given the function",
            **place(level, eqn),
        )


def _narrowed(level, stack):
    """The narrower copy that all users of a stack make of it, or None."""
    users = [level.graph.eqns[i] for i in level.graph.users.get(stack, ())]
    if size_of(stack) < LEAST or not users or stack in level.graph.outputs:
        return None
    if any(not primitives.is_cast(eqn) for eqn in users):
        return None
    widest = max((eqn.outvars[0] for eqn in users), key=size_of)
    return widest if size_of(widest) < size_of(stack) else None
