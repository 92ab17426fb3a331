"""The arithmetic of a norm on rows in registers, as both platforms do it.

A row is the last axis of `x`, in float32, and `mean_of` the mean over it. Statistics
take two passes over the registers: the mean, then the mean of the centred squares.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import hashing


class Rules(NamedTuple):
    """What a kernel computes: static and hashable.

    `centred`: layer norm, else RMS norm; `rate`: of the dropout before the sum.
    """

    epsilon: float
    centred: bool
    rate: float = 0.0


def check_dtypes(allowed: tuple[str, ...], *arrays) -> None:
    """NotImplementedError for an array of another dtype."""
    for x in arrays:
        if x is not None and x.dtype.name not in allowed:
            raise NotImplementedError(f"{', '.join(allowed)}, not {x.dtype.name}")


def wide(x):
    return x.astype(jnp.float32)


def moments(rules: Rules, x, mean_of):
    """(x - mean, mean, variance); for an RMS norm (x, None, mean square)."""
    if not rules.centred:
        return x, None, mean_of(x * x)
    mean = mean_of(x)
    off = x - mean
    return off, mean, mean_of(off * off)


def rstd(rules: Rules, var):
    """One over the standard deviation."""
    return jax.lax.rsqrt(var + np.float32(rules.epsilon))


def affine(off, factor, scale, bias):
    """`off * factor * scale + bias`; scale and bias may be None."""
    y = off * (factor if scale is None else factor * scale)
    return y if bias is None else y + bias


def input_gradient(rules: Rules, u, xhat, var, mean_of):
    """The gradient of the input, for the gradient `u` of the normalised input."""
    # a constant row has no share in its variance
    pull = jnp.where(var > 0, mean_of(u * xhat), np.float32(0))
    flow = u - xhat * pull
    if rules.centred:
        flow = flow - mean_of(u)
    return rstd(rules, var) * flow


def dropped(rules: Rules, keep, x):
    """Dropout of float32 `x`."""
    return jnp.where(keep, x / np.float32(1.0 - rules.rate), np.float32(0))


def keep(rules: Rules, seed, row, column_word):
    """Dropout's mask: the bits of `jaxmem.ops.dropout` in uint32 `row`s."""
    bits = hashing.bits_of(hashing.row_words(seed, row), column_word)
    return bits >= hashing.threshold(rules.rate)


def donors(outs, ins) -> dict[str, str]:
    """Which gradient ("residual", "x") takes the place of which incoming one."""
    over: dict[str, str] = {}
    for out, donor in (("residual", "g_total"), ("x", "g"), ("residual", "g")):
        taken = out in over or donor in over.values()
        if out in outs and ins.get(donor) is not None and not taken:
            if ins[donor].dtype == outs[out].dtype:
                over[out] = donor
    return over
