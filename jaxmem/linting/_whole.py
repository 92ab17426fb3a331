"""A `jax.checkpoint` round the whole loss."""

from collections.abc import Iterator

from jaxmem import _jaxpr
from jaxmem.ir.costs import flops
from jaxmem.ir.scans import is_var, size_of
from jaxmem.linting._subject import (
    Finding,
    Level,
    Subject,
    is_differentiated,
    is_recomputed,
    levels,
    place,
)

_MOST = 0.8  # of the forward pass


def whole_losses(subject: Subject) -> Iterator[Finding]:
    """Recomputes (nearly) the whole forward pass at once, and holds all it made.

    The peak is that of no checkpoint at all, and the forward pass is done twice.
    """
    for level in levels(subject.closed):
        forward = 0.0
        for eqn in level.jaxpr.eqns:
            if not level.is_backward(eqn):
                forward += flops(eqn)
            elif is_differentiated(eqn):
                work, size = again(eqn)
                if work and work >= _MOST * forward > 0:
                    yield _finding(level, eqn, work / forward, size)


def again(eqn) -> tuple[float, int]:
    """Flops of what is computed again, and bytes of it that are held for the rest."""
    work, made, held = 0.0, set(), 0
    for inner in _jaxpr.split(_jaxpr.bodies(eqn)[0])[0].eqns:
        if is_recomputed(inner):
            work += flops(inner)
            made.update(inner.outvars)
            continue
        read = {v for v in inner.invars if is_var(v)} & made
        held += sum(map(size_of, read))
        made -= read
    return work, held


def _finding(level: Level, eqn, share: float, size: int) -> Finding:
    return Finding(
        check="whole loss",
        severity="warning",
        what=(
            f"one jax.checkpoint computes {100 * min(share, 1):.0f} % of the forward "
            "pass again at once, and then holds what it was to save"
        ),
        bytes=size,
        remedy=(
            "put the checkpoint round a layer (the body of the scan), or give it a "
            "policy, or leave it out: the peak is the same"
        ),
        **place(level, eqn),
    )
