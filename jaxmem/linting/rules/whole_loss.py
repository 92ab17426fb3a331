"""A `jax.checkpoint` around the whole loss."""

from collections.abc import Iterator

from jaxmem.ir import jaxprs
from jaxmem.ir.costs import flops
from jaxmem.ir.scans import is_var, size_of
from jaxmem.linting._subject import (
    Finding,
    Subject,
    SubjectLevel,
    is_differentiated,
    is_recomputed,
    levels,
    place,
)

_LEAST = 0.8  # of the flops of the forward pass


def whole_loss(subject: Subject) -> Iterator[Finding]:
    """Finds checkpoints that recompute (nearly) the whole forward pass at once."""
    # All that is recomputed is then in memory, so that the peak is the one without a
    # checkpoint, and the forward pass is computed twice.
    for level in levels(subject.closed):
        forward = 0.0
        for eqn in level.jaxpr.eqns:
            if not level.is_backward(eqn):
                forward += flops(eqn)
            elif is_differentiated(eqn):
                work, size = recomputed(eqn)
                if work and work >= _LEAST * forward > 0:
                    yield _finding(level, eqn, work / forward, size)


def recomputed(eqn) -> tuple[float, int]:
    """Flops that a checkpoint recomputes, and bytes of their results in memory."""
    work, results, held = 0.0, set(), 0
    for inner in jaxprs.split(jaxprs.bodies(eqn)[0])[0].eqns:
        if is_recomputed(inner):
            work += flops(inner)
            results.update(inner.outvars)
            continue
        read = {v for v in inner.invars if is_var(v)} & results
        held += sum(map(size_of, read))
        results -= read
    return work, held


def _finding(level: SubjectLevel, eqn, share: float, size: int) -> Finding:
    return Finding(
        check="whole loss",
        severity="warning",
        what=(
            f"one jax.checkpoint recomputes {100 * min(share, 1):.0f} % of the forward "
            "pass at once, and then keeps the residuals that it was to save"
        ),
        bytes=size,
        remedy=(
            "put the checkpoint around a layer (the body of the scan), or give it a "
            "policy, or leave it out: the peak is the same without it"
        ),
        **place(level, eqn),
    )
