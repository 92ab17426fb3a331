"""Scans that stack what they read: a copy of the weights that no one has changed."""

from collections.abc import Iterator

from jaxmem import _compat
from jaxmem.ir.scans import is_var, size_of
from jaxmem.linting._kept import definition_of
from jaxmem.linting._subject import LEAST, Finding, Subject, array, place, scans


def stacked_as_read(subject: Subject) -> Iterator[Finding]:
    """Finds outputs of a scan that are slices of its inputs, or one of them n times.

    So it is where the body of a layer returns the whole state of an nnx module, its
    parameters included, as `nnx.scan` over an `nnx.remat` does. What jax sees is handed
    on without a copy; it does not look into a `jax.checkpoint` or another call.
    """
    for level, eqn in scans(subject.live):
        yield from _findings(level, eqn)


def _findings(level, eqn) -> Iterator[Finding]:
    (inner,) = level.inside(eqn)
    n_consts, n_carry = _compat.scan_counts(eqn)
    arguments = inner.graph.arguments
    read = {*arguments[:n_consts], *arguments[n_consts + n_carry :]}
    ys = zip(eqn.outvars[n_carry:], inner.graph.outvars[n_carry:], strict=True)
    found = [
        stack
        for stack, v in ys
        if is_var(v) and size_of(stack) >= LEAST and definition_of(inner, v).var in read
    ]
    if found:
        largest = max(found, key=size_of)
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        yield Finding(
            check="stacked as read",
            severity="warning",
            what=f"a scan stacks inputs that it does not change: "
            f"{array(largest.aval)}{more}",
            bytes=sum(map(size_of, found)),
            remedy="return from the body only what it changes; of an nnx module "
            "nnx.state(layer, nnx.Not(nnx.Param)), in nnx.scan over layers that change "
            "no state nnx.remat(layer, graph_updates=False); jaxmem.schedule removes "
            "the copy",
            **place(level, eqn),
        )
