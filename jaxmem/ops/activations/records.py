"""The records of the activations: how people write them, and what they keep.

Of formulas that contain one another the larger stands first. `tanh` and `sigmoid` have
none: JAX keeps their output alone already.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxmem.ops.activations.elementwise import elementwise
from jaxmem.ops.activations.gelu import gelu
from jaxmem.ops.activations.glu import geglu, glu, swiglu
from jaxmem.ops.activations.monotone import (
    elu,
    leaky_relu,
    mish,
    relu,
    sigmoid,
    softplus,
    squared_relu,
    tanh,
)
from jaxmem.ops.activations.relu_sums import regelu2, resilu2
from jaxmem.ops.activations.silu import silu
from jaxmem.ops.activations.softmax import log_softmax, softmax
from jaxmem.ops.few_bit.derivative import fewbit
from jaxmem.ops.record import Formula, KeptByForm, OpRecord, Saving, by_codes, by_word

INPUT, OUTPUT = KeptByForm(), KeptByForm(output=True)
# The derivative from the rounded output: half a cell of y at the minimum, and the fit.
SIDE = KeptByForm(output=True, bits=1, error={"float32": 1e-4, "bfloat16": 0.016})
UNIMODAL = {"input": INPUT, "output": SIDE}
MONOTONE = {"output": OUTPUT, "input": INPUT}
TWO_SLOPES = {**MONOTONE, "bit": KeptByForm(bits=1)}


def _gelu_factored(x):
    """The cubic factored: x * (1 + 0.044715 x^2) under the tanh."""
    inner = x * (1 + 0.044715 * x * x)
    return 0.5 * x * (1 + jnp.tanh(0.7978845608028654 * inner))


GELU_TANH = (jax.nn.gelu, _gelu_factored)
GELU_ERF = (
    functools.partial(jax.nn.gelu, approximate=False),
    lambda x: 0.5 * x * (1 + jax.scipy.special.erf(x * 0.7071067811865476)),
)
SILU = (jax.nn.silu, lambda x: x / (1 + jnp.exp(-x)))
# the quick GELU of CLIP with beta = 1.702
SWISH = (
    lambda x, beta: x * jax.nn.sigmoid(beta * x),
    lambda x, beta: x / (1 + jnp.exp(-beta * x)),
)
RELU = (jax.nn.relu, lambda x: jnp.where(x > 0, x, 0))
SOFTPLUS = (jax.nn.softplus, lambda x: jnp.log1p(jnp.exp(x)))


def _each(plains, **options) -> tuple[Formula, ...]:
    return tuple(Formula(plain, **options) for plain in plains)


def _gated(plains, **options) -> tuple[Formula, ...]:
    """An activation times another projection: the two are kept, and no more."""
    products = [lambda gate, up, f=f: f(gate) * up for f in plains]
    return _each(products, examples=("*batch", "*batch"), **options)


def _rectifier(lean: Callable, saving: Saving) -> Callable:
    # Where the next layer stores codes, it keeps no output: a bit is enough.
    return functools.partial(lean, save="bit" if saving.quantized() else "auto")


def _leaky(lean: Callable, saving: Saving) -> Callable:
    return _leaky_bit if saving.quantized() else lean


def _leaky_bit(x, negative_slope):
    # A bit tells the sign of the output only where the slope is a positive one.
    save = "bit" if negative_slope > 0 else "output"
    return leaky_relu(x, negative_slope, save=save)


ELU = (jax.nn.elu, lambda x, alpha: jnp.where(x > 0, x, alpha * (jnp.exp(x) - 1)))
LEAKY_RELU = (
    jax.nn.leaky_relu,
    lambda x, negative_slope: jnp.where(x > 0, x, negative_slope * x),
)
GEGLU_ERF = functools.partial(geglu, approximate=False)
GELU_BY_ERF = functools.partial(gelu, approximate=False)

GATED = (
    OpRecord(geglu, (*_gated(GELU_TANH), *_gated(GELU_ERF, lean=GEGLU_ERF)), by_codes),
    OpRecord(swiglu, _gated(SILU), by_codes),
    OpRecord(glu, reference=jax.nn.glu),
)
UNARY = (
    OpRecord(
        gelu,
        (*_each(GELU_TANH), *_each(GELU_ERF, lean=GELU_BY_ERF)),
        by_word,
        reference=jax.nn.gelu,
        residuals=UNIMODAL,
    ),
    OpRecord(
        silu,
        (
            *_each(SILU),
            *_each(SWISH, name="swish", scalars=("beta",), when=lambda beta: beta > 0),
        ),
        by_word,
        reference=jax.nn.silu,
        residuals=UNIMODAL,
    ),
    OpRecord(
        mish,
        _each([lambda x, f=f: x * jnp.tanh(f(x)) for f in SOFTPLUS]),
        by_codes,
        reference=jax.nn.mish,
        residuals={"input": INPUT},
    ),
    # `jnp.maximum(x, 0)` is no `relu`: at 0 its slope is 1/2 in JAX. Squared, it is.
    OpRecord(
        squared_relu,
        _each(
            lambda x, f=f: jnp.square(f(x))
            for f in (*RELU, lambda x: jnp.maximum(x, 0))
        ),
        by_codes,
        reference=lambda x: jnp.square(jax.nn.relu(x)),
        residuals=MONOTONE,
    ),
    OpRecord(
        elu,
        _each(ELU, scalars=("alpha",)),
        by_codes,
        reference=jax.nn.elu,
        residuals=MONOTONE,
    ),
    OpRecord(
        leaky_relu,
        _each(LEAKY_RELU, scalars=("negative_slope",)),
        _leaky,
        reference=jax.nn.leaky_relu,
        residuals=TWO_SLOPES,
    ),
    OpRecord(
        softplus,
        _each(SOFTPLUS),
        by_codes,
        reference=jax.nn.softplus,
        residuals=MONOTONE,
    ),
    OpRecord(
        relu, _each(RELU), _rectifier, reference=jax.nn.relu, residuals=TWO_SLOPES
    ),
    OpRecord(tanh, reference=jnp.tanh, residuals=MONOTONE),
    OpRecord(sigmoid, reference=jax.nn.sigmoid, residuals=MONOTONE),
    *map(OpRecord, (regelu2, resilu2, fewbit, elementwise)),
)


def _softmax_unshifted(x):
    return jnp.exp(x) / jnp.sum(jnp.exp(x), axis=-1, keepdims=True)


def _log_softmax_by_sum(x):
    return x - jax.scipy.special.logsumexp(x, axis=-1, keepdims=True)


def _softmax_along(axis: int, dims: str, *others: Callable) -> tuple[Formula, ...]:
    plains = functools.partial(jax.nn.softmax, axis=axis), *others
    lean = functools.partial(softmax, axis=axis)
    return _each(plains, lean=lean, examples=(dims,))


SOFTMAX = (
    # Over the last axis, or over another one where it stands first or second.
    OpRecord(
        softmax,
        (
            *_softmax_along(-1, "*batch n", _softmax_unshifted),
            *_softmax_along(-2, "*batch n a"),
            *_softmax_along(-3, "*batch n a b"),
        ),
        reference=jax.nn.softmax,
    ),
    OpRecord(
        log_softmax,
        _each((jax.nn.log_softmax, _log_softmax_by_sum), examples=("*batch n",)),
        reference=jax.nn.log_softmax,
    ),
)
