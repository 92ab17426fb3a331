"""The arithmetic of norms on rows in registers, which both platforms share.

A row is the last axis of `x`, in float32, and `mean_of` takes the mean over it.
Statistics take two passes over the registers: the mean, then the mean of the centred
squares. The reference is `implementation="xla"` of the ops.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import hashing


class NormRules(NamedTuple):
    """What a kernel computes: static and hashable.

    Attributes:
      epsilon: is added to the variance.
      centred: whether it is a layer norm, not an RMS norm.
      rate: of the dropout before the residual sum.
    """

    epsilon: float
    centred: bool
    rate: float = 0.0


def moments(rules: NormRules, x, mean_of):
    """(x - mean, mean, variance); for an RMS norm (x, None, mean square)."""
    if not rules.centred:
        return x, None, mean_of(x * x)
    mean = mean_of(x)
    off = x - mean
    return off, mean, mean_of(off * off)


def rstd(rules: NormRules, var):
    """One over the standard deviation."""
    return jax.lax.rsqrt(var + np.float32(rules.epsilon))


def normalised(rules: NormRules, saved, output, mean_of):
    """(the normalised input, its variance) from the input or the output that was saved.

    `output` is (variance, shift, inverse); the last two are None if it is the input.
    """
    var, shift, inverse = output
    if inverse is None:
        off, _, var = moments(rules, saved, mean_of)
        return off * rstd(rules, var), var
    return (saved - shift) * inverse, var


def affine(off, factor, scale, bias):
    """`off * factor * scale + bias`; scale and bias may be None."""
    y = off * (factor if scale is None else factor * scale)
    return y if bias is None else y + bias


def input_gradient(rules: NormRules, u, xhat, var, mean_of):
    """The gradient of the input, for the gradient `u` of the normalised input."""
    # a constant row has no share in its variance
    pull = jnp.where(var > 0, mean_of(u * xhat), np.float32(0))
    flow = u - xhat * pull
    if rules.centred:
        flow = flow - mean_of(u)
    return rstd(rules, var) * flow


def dropped(rules: NormRules, keep, x):
    """Dropout of float32 `x`."""
    return jnp.where(keep, x / np.float32(1.0 - rules.rate), np.float32(0))


def keep(rules: NormRules, seed, row, column_word):
    """Dropout's mask in uint32 `row`s: the bits of `jaxmem.ops.dropout`."""
    bits = hashing.bits_of(hashing.row_words(seed, row), column_word)
    return bits >= hashing.threshold(rules.rate)


def donors(outs, ins) -> dict[str, str]:
    """Which gradient ("residual", "x") is written over which incoming one."""
    over: dict[str, str] = {}
    for out, donor in (("residual", "g_total"), ("x", "g"), ("residual", "g")):
        taken = out in over or donor in over.values()
        if out in outs and ins.get(donor) is not None and not taken:
            if ins[donor].dtype == outs[out].dtype:
                over[out] = donor
    return over
