"""Checkpoints that recompute all at once, or that the compiler has undone."""

import re
from collections.abc import Iterator

from jaxmem._compat import RECOMPUTED
from jaxmem.cost.equations import flops
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.scans import is_var, size_of
from jaxmem.linting._subject import (
    Finding,
    Subject,
    SubjectLevel,
    checkpoints,
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
        for eqn in level.graph.eqns:
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


_HLO = re.compile(
    r" (?:dot|convolution)\(|custom_call_target=\"[^\"]*(?:gemm|matmul|conv)"
)


def recomputation_undone(subject: Subject) -> Iterator[Finding]:
    """Finds programs in which less than half of the recomputation is left."""
    # Common subexpression elimination merges what a checkpoint recomputes with the
    # forward pass unless a barrier keeps them apart. The forward pass's own products
    # show how many are merged or split for other reasons.
    if subject.compiled is None:
        return
    wanted, forward = _products_of_step(subject)
    left, forward_left = products_of_program(subject.compiled.hlo)
    expected = wanted * min(1.0, forward_left / max(forward, 1))
    if 2 * left >= expected:
        return
    every = list(checkpoints(subject.closed))
    size = sum(level.times * recomputed(eqn)[1] for level, eqn in every)
    target = subject.compiled.target
    yield Finding(
        check="recomputation undone",
        severity="error",
        what=(
            f"of {wanted} products that jax.checkpoint recomputes, {left} are left in "
            f"the program for {target}: the compiler keeps the results of the forward "
            "pass"
        ),
        bytes=int(size * (1 - left / expected)),
        remedy=(
            "leave prevent_cse as it is (True) outside of lax.scan"
            + ("; XLA:CPU may undo it all the same" if target == "cpu" else "")
        ),
        **place(*every[0]),
    )


def _products_of_step(subject: Subject) -> tuple[int, int]:
    """(recomputed, forward) products of the traced step."""
    scopes = [
        level.scopes(eqn)
        for level in levels(subject.closed)
        for eqn in level.graph.eqns
        if primitives.is_product(eqn)
    ]
    return _split(scopes)


def products_of_program(text: str) -> tuple[int, int]:
    """(recomputed, forward) products of the compiled program."""
    return _split([line for line in text.splitlines() if _HLO.search(line)])


def _split(scopes: list[str]) -> tuple[int, int]:
    forward = (s for s in scopes if RECOMPUTED not in s and "transpose(" not in s)
    return sum(RECOMPUTED in s for s in scopes), sum(1 for _ in forward)
