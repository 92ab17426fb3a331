"""Schedule-free AdamW in numpy float64, from the paper's three sequences."""

import numpy as np

from jaxmem.optim import schedule_free_adamw
from tests.optim.cases.case import LR, Case

B1, B2, EPS, DECAY = 0.9, 0.999, 1e-8, 0.1


def reference(path, p, grads, rate=lambda t: LR, b1=B1):
    """y; `sequences` has z and x, too."""
    return sequences(p, grads, rate, b1)[0]


def sequences(p, grads, rate, b1=B1):
    """(y, z, x) after all gradients, at learning rates `rate(0)`, `rate(1)`, ..."""
    y = z = x = p
    v, total, largest = 0.0, 0.0, 0.0
    for t, g in enumerate(grads, 1):
        v = B2 * v + (1 - B2) * g**2
        z = z - rate(t - 1) * (g / (np.sqrt(v / (1 - B2**t)) + EPS) + DECAY * y)
        largest = max(largest, rate(t))  # as optax: that of the next step
        total += largest**2
        c = largest**2 / total
        x = (1 - c) * x + c * z
        y = (1 - b1) * z + b1 * x
    return y, z, x


def made(rate=LR, **how):
    return schedule_free_adamw(rate, weight_decay=DECAY, **how)


CASES = [Case("schedule_free_adamw", made, reference, needs_params=True)]
