"""What each backward kernel on a TPU recomputes of a block of logits."""

from collections.abc import Callable

import jax.numpy as jnp

from pallas_kernels.arrays import dot
from pallas_kernels.attention.tpu.blocks import Scalars, TpuCase
from pallas_kernels.attention.tpu.grid import GridPoint, for_visited
from pallas_kernels.attention.tpu.logits import LogitsBlock, where


def gradient_of_logits(block: LogitsBlock, n: int):
    """(probabilities with dropout, gradient of the logits) of head n."""
    # Both lack the factors `1 / (1 - rate)` and `scale`, which `factor` gives to the
    # sums. The second is None if the values are not among the inputs: dv needs none.
    ins = block.ins
    logits, seen = block.logits(n)
    top, log_total = (ins[name][0, 0, n : n + 1] for name in ("top", "log_total"))
    real = block.real_queries()
    p = where(real, jnp.exp(logits - top - log_total))
    drop = block.dropout(n)
    if "v" not in ins:
        return drop(p), None
    g = block.alone(ins["g"][0], n)
    dp = drop(dot(ins["v"][0], g, (1, 1)))
    ds = p * (dp - ins["delta"][0, 0, n : n + 1] * (1.0 - block.case.rules.rate))
    for condition in (seen, real, block.real_keys()):
        ds = where(condition, ds)
    return drop(p), ds


def for_gradients(
    case: TpuCase, at: GridPoint, scalars: Scalars, ins, add: Callable
) -> None:
    """`add(block, gradient of logits, n)` of each head, if the block is visited."""

    def visit(whole: bool) -> None:
        block = LogitsBlock(case, scalars, at, ins, whole)
        for n in range(case.sizes.pack):
            add(block, gradient_of_logits(block, n)[1], n)

    for_visited(case, scalars, at, visit)


def factor(case: TpuCase, name: str) -> float:
    """The factor of a gradient that `gradient_of_logits` leaves out."""
    return (case.rules.scale if name in ("dq", "dk") else 1.0) / (1.0 - case.rules.rate)
