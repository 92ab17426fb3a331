"""Blocked Shampoo in numpy float64, with the length of Adam's step a block."""

import numpy as np

from jaxmem.optim import shampoo
from tests.optim.cases.case import LR, Case

DECAY, BLOCK, FREQUENCY = 0.1, 24, 5
# Eigenvalues of a first gram matrix of few gradients are 0 in float64, and what the
# rounding of the largest leaves in float32: with this eps neither is seen.
EPS = 1e-3


def inverse_root(gram, eps, power=-0.25):
    values, vectors = np.linalg.eigh(gram)
    return (vectors * (values + eps) ** power) @ vectors.T


def grafted_step(t, g, ahead, v, kind, b2=0.999, eps=1e-8):
    v = b2 * v + (1 - b2) * g**2
    if kind in ("sgd", None):
        return ahead, v
    return ahead / (np.sqrt(v / (1 - b2**t if kind == "adam" else 1)) + eps), v


def shampoo_reference(
    p,
    grads,
    *,
    lr=LR,
    decay=DECAY,
    block=BLOCK,
    every=FREQUENCY,
    start=None,
    kind="adam",
    b1=0.9,
    b2=0.999,
    eps=EPS,
    one_sided=False,
):
    if p.ndim == 2 and max(p.shape) > block:
        how = dict(lr=lr, decay=decay, block=block, every=every, start=start)
        how |= dict(one_sided=one_sided)
        how |= dict(kind=kind, b1=b1, b2=b2, eps=eps)
        cut = lambda n: [slice(i, i + block) for i in range(0, n, block)]
        out = np.empty_like(p)
        for i in cut(p.shape[0]):
            for j in cut(p.shape[1]):
                out[i, j] = shampoo_reference(p[i, j], grads[:, i, j], **how)
        return out
    start = every if start is None else start
    m = v = np.zeros_like(p)
    grams = [0.0, 0.0]
    for t, g in enumerate(grads, 1):
        m = b1 * m + (1 - b1) * g
        ahead = m / (1 - b1**t)
        u, v = grafted_step(t, g, ahead, v, kind)
        if p.ndim == 2:
            add = 1 if b2 == 1 else 1 - b2
            outers = g @ g.T, g.T @ g
            grams = [b2 * a + add * x for a, x in zip(grams, outers, strict=True)]
            if (t % every == 0 and t >= start) or t == start:
                by = 1 if b2 == 1 else 1 - b2**t
                power = -1 / 2 if one_sided else -1 / 4
                roots = [inverse_root(a / by, eps, power) for a in grams]
            if t >= start:
                wide = p.shape[0] <= p.shape[1]
                way = roots[0] @ ahead if wide or not one_sided else ahead
                way = way if wide and one_sided else way @ roots[1]
                ratio = np.linalg.norm(u) / (np.linalg.norm(way) + 1e-16)
                u = way if kind is None else way * ratio
        p = (1 - lr * decay) * p - lr * u
    return p


def made(rate=LR, **how):
    how = {"weight_decay": DECAY, "block_size": BLOCK, "eps": EPS} | how
    return shampoo(rate, stacked="layers", precondition_frequency=FREQUENCY, **how)


CASES = [
    Case(
        "shampoo",
        made,
        lambda path, p, grads: shampoo_reference(p, grads),
        needs_params=True,
    ),
]
