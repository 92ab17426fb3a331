"""Factored and layer-wise optimizers, from their papers' formulas, layer by layer."""

import functools

import numpy as np

from jaxmem.optim import adafactor, adalomo, adam_mini, came, lomo, sm3
from tests.optim.cases.case import LR, Case
from tests.optim.cases.low_bit import ONE_CODE, companded_first, every


def rms(x):
    return np.sqrt(np.mean(x**2))


class Estimate:
    """Adafactor's: rank one for a matrix, whole for a vector."""

    def __init__(self):
        self.row = self.col = self.v = 0.0

    def over_root(self, x, square, b, given):
        """`given` over the root of the average of `square`."""
        if x.ndim < 2:
            self.v = b * self.v + (1 - b) * square
            return given / np.sqrt(self.v)
        self.row = b * self.row + (1 - b) * square.mean(1)
        self.col = b * self.col + (1 - b) * square.mean(0)
        return given / np.sqrt(np.outer(self.row, self.col) / self.row.mean())


def as_it_is(m):
    return m


def in_codes(m):
    """8 bits in groups of 32."""
    return companded_first(m.reshape(-1, 32)).reshape(m.shape)


def came_reference(path, p, grads, decay=0.01, kept=as_it_is):
    m, nu, unsure = 0.0, Estimate(), Estimate()
    for g in grads:
        u = nu.over_root(g, g**2 + 1e-30, 0.999, g)
        u = u / max(1, rms(u))
        m = 0.9 * m + 0.1 * u
        step = m
        if p.ndim == 2:
            step = unsure.over_root(g, (u - m) ** 2 + 1e-16, 0.9999, m)
        p, m = (1 - decay * LR) * p - LR * step, kept(m)
    return p


def adalomo_reference(path, p, grads, decay=0.1):
    nu = Estimate()
    for t, g in enumerate(grads, 1):
        u = nu.over_root(g, g**2 + 1e-30, 1 - t**-0.8, g)
        u = u / max(1, rms(u))
        rate = LR * max(1e-3, rms(p))
        p = (1 - rate * decay) * p - rate * u
    return p


def adafactor_reference(path, p, grads):
    nu, m = Estimate(), 0.0
    for t, g in enumerate(grads, 1):
        u = nu.over_root(g, g**2 + 1e-30, 1 - t**-0.8, g)
        u = u / max(1, rms(u))
        m = 0.9 * m + 0.1 * LR * u * max(1e-3, rms(p))
        p = p - (m + 1e-4 * p)
    return p


def lomo_reference(path, p, grads):
    for g in grads:
        p = (1 - LR * 0.1) * p - LR * np.clip(g, -1, 1)
    return p


def sm3_reference(path, p, grads, kept=as_it_is):
    m, cover = 0.0, [np.zeros(n) for n in p.shape]
    for g in grads:
        least = cover[0]
        if p.ndim == 2:
            least = np.minimum(cover[0][:, None], cover[1][None])
        v = least + g**2
        m = 0.9 * m + 0.1 * g / np.sqrt(v + 1e-8)
        cover = [v.max(1), v.max(0)] if p.ndim == 2 else [v]
        p, m = p - LR * m, kept(m)
    return p


def adam_mini_reference(path, p, grads, kept=as_it_is):
    """A column a block, of "w" four columns, of "b" an element."""
    m = v = 0.0
    for t, g in enumerate(grads, 1):
        square = g**2
        if path == "layers":
            square = square.mean(0)
        elif path == "w":
            square = np.repeat(square.reshape(len(p), -1, 4).mean((0, 2)), 4)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * square
        step = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        p, m = p - LR * step, kept(m)
    return p


def made_adafactor(rate=LR):
    return adafactor(rate, 8, momentum=0.9, weight_decay_rate=1e-4)


def made_adam_mini(rate=LR, **how):
    # in nnx, `init` sees a path "b/value"
    of_b = lambda path: path.split("/")[0] == "b"
    return adam_mini(rate, blocks={"w": (1, 8)}, full=of_b, **how)


CASES = [
    Case(
        "came",
        lambda lr=LR: came(lr, weight_decay=0.01),
        came_reference,
        needs_params=True,
    ),
    Case(
        "adalomo",
        lambda lr=LR: adalomo(lr, weight_decay=0.1),
        adalomo_reference,
        needs_params=True,
    ),
    Case("lomo", lambda lr=LR: lomo(lr, 1.0, 0.1), lomo_reference, needs_params=True),
    Case("adafactor", made_adafactor, adafactor_reference, needs_params=True),
    Case("sm3", lambda lr=LR: sm3(lr), sm3_reference),
    Case("adam_mini", made_adam_mini, adam_mini_reference),
    # a first moment on the other side of a rounding is less than both of Adam's
    Case(
        "came_8_bits",
        lambda lr=LR: came(lr, weight_decay=0.01, bits=every(8)),
        functools.partial(came_reference, kept=in_codes),
        rtol=ONE_CODE,
        needs_params=True,
    ),
    Case(
        "sm3_8_bits",
        lambda lr=LR: sm3(lr, bits=every(8)),
        functools.partial(sm3_reference, kept=in_codes),
        rtol=ONE_CODE,
    ),
    Case(
        "adam_mini_8_bits",
        lambda lr=LR: made_adam_mini(lr, bits=every(8)),
        functools.partial(adam_mini_reference, kept=in_codes),
        rtol=ONE_CODE,
    ),
]
