"""What attention's kernels on Hopper declare of their cost.

Limits: lengths and segments are not known before the step runs, so the pairs that they
hide count. Dropout's and a mask's integer work has no place in a `pl.CostEstimate`.
"""

import math

import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels.attention.gpu.case import GpuCase
from pallas_kernels.gpu import Named


def cost_of(case: GpuCase, products: int, arrays: Named) -> pl.CostEstimate:
    """Of a kernel with so many products for each tile of logits.

    Args:
      arrays: what it reads and writes.
    """
    pairs = case.batch * case.heads * _visited(case)
    sizes = (math.prod(x.shape) * x.dtype.itemsize for x in arrays.values())
    return pl.CostEstimate(
        flops=2 * products * pairs * case.size,
        transcendentals=pairs,
        bytes_accessed=sum(sizes),
    )


def _visited(case: GpuCase) -> int:
    """Pairs of a query and a key in the blocks that a head visits."""
    first = case.block_q * np.arange(case.q_blocks)
    last = np.minimum(first + case.block_q, case.queries) - 1
    low, high = np.zeros_like(first), np.full_like(first, case.keys - 1)
    if case.rules.causal:
        high = np.minimum(high, last)
    if case.rules.window is not None:
        left, right = case.rules.window
        low, high = np.maximum(low, first - left), np.minimum(high, last + right)
    blocks = high // case.block_kv - low // case.block_kv + 1
    return int(np.maximum(blocks, 1).sum()) * case.block_q * case.block_kv
