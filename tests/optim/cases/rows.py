"""Adagrad with one accumulator a row, with dense gradients.

What it does with tables is in `tests/optim/rows`.
"""

import numpy as np
import optax

from jaxmem.optim import scale_by_rowwise_adagrad
from tests.optim.cases.case import LR, Case


def reference(path, p, grads):
    sums = 0.0
    for g in grads:
        squares = g**2 if g.ndim == 1 else (g**2).mean(-1, keepdims=True)
        sums = sums + squares
        p = p - LR * g / (np.sqrt(sums) + 1e-8)
    return p


def make(lr=LR):
    rate = optax.scale_by_learning_rate(lr)
    return optax.chain(scale_by_rowwise_adagrad(), rate)


# The accumulators of one leaf have the shape of another by chance; that they are
# sharded as the rows is in `tests/optim/rows/test_memory.py`.
CASES = [Case("rowwise_adagrad", make, reference, sharded=False)]
