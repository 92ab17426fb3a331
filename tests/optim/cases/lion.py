"""Lion in numpy float64, with its momentum as it is and rounded to codes.

A sum within float32's rounding of 0 may have the other sign there, and its element ends
two steps away; of the battery's gradients there is none.
"""

import numpy as np

from jaxmem.optim import LowBit, lion
from tests.optim.cases.case import LR, Case
from tests.optim.cases.low_bit import companded_first

B1, B2, DECAY = 0.9, 0.99, 0.1


def reference(path, p, grads, rounded=lambda m: m):
    m = np.zeros_like(p)
    for g in grads:
        step = np.sign(B1 * m + (1 - B1) * g)
        p = (1 - LR * DECAY) * p - LR * step
        m = rounded(B2 * m + (1 - B2) * g)
    return p


def in_codes(path, p, grads):
    grouped = lambda m: companded_first(m.reshape(-1, 32)).reshape(m.shape)
    return reference(path, p, grads, grouped)


def made(rate=LR, **how):
    return lion(rate, weight_decay=DECAY, **how)


CASES = [
    Case("lion", made, reference, needs_params=True),
    Case(
        "lion_8_bits",
        lambda lr=LR: made(lr, bits=LowBit(8, least_size=0, stochastic=False)),
        in_codes,
        needs_params=True,
    ),
]
