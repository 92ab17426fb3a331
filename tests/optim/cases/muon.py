"""Muon in numpy float64: Newton-Schulz of every matrix, AdamW of vectors."""

import numpy as np

from jaxmem.optim import muon
from tests.optim.cases.case import LR, Case

COEFFS = (3.4445, -4.7750, 2.0315)
# The rounding of a direction that is nearly lost grows by the slope at 0 in each of
# five iterations, to half the last digit of float32 times that.
RTOL = COEFFS[0] ** 5 * 2.0**-24


def orthogonal(x, steps=5, coeffs=COEFFS, eps=1e-8):
    if x.shape[0] > x.shape[1]:
        return orthogonal(x.T, steps, coeffs, eps).T
    x = x / (np.linalg.norm(x) + eps)
    for _ in range(steps):
        a = x @ x.T
        x = coeffs[0] * x + (coeffs[1] * a + coeffs[2] * a @ a) @ x
    return x


def muon_reference(path, p, grads, beta=0.95, decay=0.1, nesterov=True):
    if p.ndim < 2:
        return adam_reference(p, grads)
    m = 0.0
    for t, g in enumerate(grads, 1):
        m = beta * m + (1 - beta) * g
        x = m / (1 - beta**t)
        if nesterov:
            x = beta * m / (1 - beta ** (t + 1)) + (1 - beta) * g / (1 - beta**t)
        step = np.sqrt(max(1, p.shape[1] / p.shape[0])) * orthogonal(x)
        p = (1 - decay * LR) * p - LR * step
    return p


def adam_reference(p, grads, b1=0.9, b2=0.999):
    m = v = 0.0
    for t, g in enumerate(grads, 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        ahead = b1 * m / (1 - b1 ** (t + 1)) + (1 - b1) * g / (1 - b1**t)
        p = p - LR * ahead / (np.sqrt(v / (1 - b2**t)) + 1e-8)
    return p


def made(rate=LR, **how):
    return muon(rate, weight_decay=0.1, stacked="layers", **how)


CASES = [
    Case("muon", made, muon_reference, rtol=RTOL, needs_params=True),
    Case(
        "muon_gram",
        lambda lr=LR: made(lr, gram=True),
        muon_reference,
        rtol=RTOL,
        needs_params=True,
    ),
]
