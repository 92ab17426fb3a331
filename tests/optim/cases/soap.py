"""SOAP in numpy float64: Adam in the eigenbases of Gram matrices.

The Gram matrix of a first gradient has the rank of the gradient's smaller side, so that
the larger side's eigenvectors are not determined by it. The battery's rules are
one-sided; `tests/optim/test_soap.py` gives the reference the first bases otherwise.
"""

import numpy as np

from jaxmem.optim import soap
from tests.optim.cases.case import LR, Case

B1, B2, EPS, DECAY, FREQUENCY = 0.95, 0.95, 1e-8, 0.01, 10


def eigenbasis(gram):
    return np.linalg.eigh(gram)[1][:, ::-1]


def turned(x, bases, back=False):
    left, right = (q if q is None or not back else q.T for q in bases)
    x = x if left is None else left.T @ x
    return x if right is None else x @ right


def refreshed(gram, basis):
    order = np.argsort(-np.diag(basis.T @ gram @ basis))
    return np.linalg.qr(gram @ basis[:, order])[0], order


def soap_reference(
    p,
    grads,
    sides,
    first=None,
    lr=LR,
    decay=DECAY,
    frequency=FREQUENCY,
    beta=B2,
    correct=True,
    factored=False,
):
    """Of a matrix with bases on these `sides`; `first` are those of the first step."""
    m = v = np.zeros_like(p)
    of_g = lambda g: (
        [g @ g.T if "left" in sides else None] + [g.T @ g if "right" in sides else None]
    )
    each = lambda fn, *xs: [
        None if x[0] is None else fn(*x) for x in zip(*xs, strict=True)
    ]
    for t, g in enumerate(grads):
        outer = of_g(g)
        if t == 0:
            grams = each(lambda x: (1 - beta) * x, outer)
            bases = first or each(eigenbasis, grams)
            p = (1 - lr * decay) * p
            continue
        h = turned(g, bases)
        m, v = B1 * m + (1 - B1) * h, B2 * v + (1 - B2) * h**2
        whole = np.outer(v.mean(1), v.mean(0)) / v.mean() if factored else v
        u = turned(m / (np.sqrt(whole) + EPS), bases, back=True)
        u = u * (np.sqrt(1 - B2**t) / (1 - B1**t) if correct else 1.0)
        p = (1 - lr * decay) * p - lr * u
        grams = each(lambda gram, x: beta * gram + (1 - beta) * x, grams, outer)
        if t % frequency == 0:
            m = turned(m, bases, back=True)
            for axis, (gram, basis) in enumerate(zip(grams, bases, strict=True)):
                if gram is not None:
                    bases[axis], order = refreshed(gram, basis)
                    v = np.take(v, order, axis=axis)
            m = turned(m, bases)
    return p


def one_sided(path, p, grads):
    if p.ndim < 2:
        return soap_reference(p, grads, ())
    return soap_reference(p, grads, ("left" if p.shape[0] <= p.shape[1] else "right",))


def made(rate=LR, **how):
    return soap(rate, stacked="layers", **how)


CASES = [
    Case(
        "soap",
        lambda lr=LR: made(lr, one_sided=True),
        one_sided,
        needs_params=True,
    ),
]
