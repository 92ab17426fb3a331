"""Recomputation that the compiler has undone.

To the compiler, what a checkpoint recomputes is equal to what the forward pass has
computed: common subexpression elimination merges the two unless a barrier keeps them
apart. The number of recomputed products that are left in the program shows it. The
products of the forward pass show how many are merged or split for other reasons.
"""

import re
from collections.abc import Iterator

from jaxmem.linting._subject import (
    PRODUCTS,
    Finding,
    Subject,
    checkpoints,
    levels,
    place,
)
from jaxmem.linting.rules.whole_loss import recomputed

_RECOMPUTED = "rematted_computation"  # jax's name scope of what it recomputes
_HLO = re.compile(
    r" (?:dot|convolution)\(|custom_call_target=\"[^\"]*(?:gemm|matmul|conv)"
)


def recomputation_undone(subject: Subject) -> Iterator[Finding]:
    """Finds programs in which less than half of the recomputation is left."""
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
        for eqn in level.jaxpr.eqns
        if eqn.primitive.name in PRODUCTS
    ]
    return _split(scopes)


def products_of_program(text: str) -> tuple[int, int]:
    """(recomputed, forward) products of the compiled program."""
    return _split([line for line in text.splitlines() if _HLO.search(line)])


def _split(scopes: list[str]) -> tuple[int, int]:
    forward = (s for s in scopes if _RECOMPUTED not in s and "transpose(" not in s)
    return sum(_RECOMPUTED in s for s in scopes), sum(1 for _ in forward)
