"""Recomputation that the compiler undid.

What a checkpoint computes again is, to the compiler, the same as what was there: common
subexpression elimination merges the two unless a barrier keeps them apart. How many of
the products computed again are left in the program tells; that products are merged or
split for other reasons is seen on those of the forward pass.
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
from jaxmem.linting._whole import again

_AGAIN = "rematted_computation"
_HLO = re.compile(
    r" (?:dot|convolution)\(|custom_call_target=\"[^\"]*(?:gemm|matmul|conv)"
)


def undone(subject: Subject) -> Iterator[Finding]:
    """A finding if less than half of what was to be computed again is."""
    assert subject.compiled is not None
    wanted, forward = _in_jaxpr(subject)
    left, forward_left = _in_hlo(subject.compiled.hlo)
    expected = wanted * min(1.0, forward_left / max(forward, 1))
    if 2 * left >= expected:
        return
    found = list(checkpoints(subject.closed))
    held = sum(level.times * again(eqn)[1] for level, eqn in found)
    target = subject.compiled.target
    yield Finding(
        check="recomputation undone",
        severity="error",
        what=(
            f"of {wanted} products that jax.checkpoint computes again, {left} are left "
            f"in the program for {target}: the compiler keeps the first ones"
        ),
        bytes=int(held * (1 - left / expected)),
        remedy=(
            "leave prevent_cse as it is (True) outside of lax.scan"
            + ("; XLA:CPU may undo it all the same" if target == "cpu" else "")
        ),
        **place(*found[0]),
    )


def _in_jaxpr(subject: Subject) -> tuple[int, int]:
    """(computed again, forward) products."""
    scopes = [
        level.scopes(eqn)
        for level in levels(subject.closed)
        for eqn in level.jaxpr.eqns
        if eqn.primitive.name in PRODUCTS
    ]
    return _split(scopes)


def _in_hlo(text: str) -> tuple[int, int]:
    """The same of a compiled program."""
    return _split([line for line in text.splitlines() if _HLO.search(line)])


def _split(scopes: list[str]) -> tuple[int, int]:
    once_more = sum(_AGAIN in s for s in scopes)
    return once_more, sum(_AGAIN not in s and "transpose(" not in s for s in scopes)
