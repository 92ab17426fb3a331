"""GaLore, APOLLO and Fira, from the papers' formulas; a matrix at a time."""

import jax.numpy as jnp
import numpy as np

from jaxmem.optim import apollo, apollo_mini, fira, galore
from jaxmem.optim.low_rank.apollo import random_projector
from tests.optim.cases.case import LR, Case

RANK, GAP, B1, B2, EPS = 8, 20, 0.9, 0.999, 1e-6


def correction(t):
    return np.sqrt(1 - B2**t) / (1 - B1**t)


def adam(grads):
    """m / (sqrt(v) + eps) after each gradient, without the bias correction."""
    m = v = 0.0
    for g in grads:
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g**2
        yield m / (np.sqrt(v) + EPS)


def whole(p, grads, lr=LR):
    """Adam with eps before the correction."""
    for t, step in enumerate(adam(grads), 1):
        p = p - lr * correction(t) * step
    return p


def projectors(grads, rank, gap):
    """(A, B), of which one is None, for each gradient, from its singular vectors.

    Vectors point as those of the projector before do.
    """
    old = None
    for t, g in enumerate(grads):
        right = g.shape[0] >= g.shape[1]
        if t % gap == 0:
            u, _, vh = np.linalg.svd(g, full_matrices=False)
            new = vh[:rank] if right else u[:, :rank].T
            if old is not None:
                new = new * np.where((new * old).sum(1) < 0, -1, 1)[:, None]
            old = new
        yield (None, old) if right else (old, None)


def down(g, a, b):
    return g @ b.T if a is None else a @ g


def up(low, a, b):
    return low @ b if a is None else a.T @ low


def galore_matrix(p, grads, rank=RANK, gap=GAP, scale=0.25):
    m = v = 0.0
    rows = zip(grads, projectors(grads, rank, gap), strict=True)
    for t, (g, by) in enumerate(rows, 1):
        low = down(g, *by)
        m, v = B1 * m + (1 - B1) * low, B2 * v + (1 - B2) * low**2
        step = m / (1 - B1**t) / (np.sqrt(v / (1 - B2**t)) + EPS)
        p = p - LR * scale * up(step, *by)
    return p


def adam_vector(p, grads):
    m = v = 0.0
    for t, g in enumerate(grads, 1):
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g**2
        p = p - LR * m / (1 - B1**t) / (np.sqrt(v / (1 - B2**t)) + EPS)
    return p


def limited(x, before, growth=1.01):
    norm = np.linalg.norm(x)
    over = max(norm / (before + 1e-8), growth) / growth if before > 0 else 1.0
    return x / over, norm / over


def fira_matrix(p, grads, rank=RANK, gap=GAP, scale=0.25):
    bys = list(projectors(grads, rank, gap))
    lows = [down(g, *by) for g, by in zip(grads, bys, strict=True)]
    before = 0.0
    rows = zip(grads, bys, lows, adam(lows), strict=True)
    for t, (g, by, low, step) in enumerate(rows, 1):
        axis = 1 if by[0] is None else 0
        norm = lambda x, axis=axis: np.linalg.norm(x, axis=axis, keepdims=True)
        rest = (g - scale * up(low, *by)) * norm(step) / (norm(low) + 1e-8)
        rest, before = limited(rest, before)
        p = p - LR * correction(t) * (scale * up(step, *by) + rest)
    return p


def apollo_matrix(p, grads, by, gap, scale, axis):
    """`by(t)` is the projector, which no formula gives: it is random."""
    lows = [down(g, *by(t // gap)) for t, g in enumerate(grads)]
    before = 0.0
    rows = zip(grads, lows, adam(lows), strict=True)
    for t, (g, low, step) in enumerate(rows, 1):
        norm = lambda x: np.sqrt((x**2).sum(axis, keepdims=True))
        update, before = limited(g * norm(step) / (norm(low) + 1e-8), before)
        p = p - LR * correction(t) * np.sqrt(scale) * update
    return p


def by_shape(matrix, vector):
    def reference(path, p, grads):
        return (matrix if p.ndim == 2 else vector)(p, grads)

    return reference


def apollo_reference(rank, gap, scale, axis):
    def matrix(path, p, grads):
        shape, layer = p.shape, ...
        if path == "layers":
            from tests.optim.test_battery import params  # it imports this module

            stack = np.float64(params()[path])
            shape, layer = (
                stack.shape,
                [np.array_equal(x, p) for x in stack].index(True),
            )

        def by(index):
            vectors = random_projector(0, f"['{path}']", jnp.int32(index), rank, shape)
            return [None if x is None else np.float64(x)[layer] for x in vectors]

        cached = [by(i) for i in range(-(-len(grads) // gap))]
        rank_axis = (1 if p.shape[0] >= p.shape[1] else 0) if axis is None else axis
        return apollo_matrix(p, grads, cached.__getitem__, gap, scale, rank_axis)

    return lambda path, p, grads: (
        matrix(path, p, grads) if p.ndim == 2 else whole(p, grads)
    )


def apart(grads):
    """The gradients; those of which a projector is made with even singular values.

    Rounding turns the singular vectors of a matrix by the eps of float32 times its
    largest singular value over the least distance of two, and Adam's moments are of
    their directions one by one. Of the 32 values of the battery's random matrices some
    two are 1e-2 apart, the largest being 13: 1.5e-4. These, evenly from 13 down to
    13/32, are 13/32 apart: 32 eps or 4e-6, whatever computes the vectors.
    """
    if grads.ndim < 3:
        return grads
    u, s, vh = np.linalg.svd(np.float64(grads[::GAP]), full_matrices=False)
    even = 13 * np.arange(s.shape[-1], 0, -1) / s.shape[-1]
    grads = grads.copy()
    grads[::GAP] = u * even @ vh
    return grads


CASES = [
    Case(
        "galore",
        lambda lr=LR: galore(lr, RANK, GAP, subspace="svd"),
        by_shape(galore_matrix, adam_vector),
        prepared=apart,
    ),
    Case(
        "fira",
        lambda lr=LR: fira(lr, RANK, GAP, subspace="svd"),
        by_shape(fira_matrix, whole),
        prepared=apart,
    ),
    Case(
        "apollo",
        lambda lr=LR: apollo(lr, RANK, GAP),
        apollo_reference(RANK, GAP, 1.0, None),
    ),
    Case(
        "apollo_mini",
        lambda lr=LR: apollo_mini(lr, GAP),
        apollo_reference(1, GAP, 128.0, (0, 1)),
    ),
]
