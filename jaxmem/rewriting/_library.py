"""The formulas people write, each with the lean op that replaces it.

One entry stands for every spelling that differs in the order of products and sums, in
casts and in layout (`_match`); what is listed twice below differs by more than that.
`tanh` and `sigmoid` are not here: JAX keeps their output alone already.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxmem import ops
from jaxmem._checks import check_choice, wrong_value
from jaxmem.ops.codes import Quantization, as_quantization, coded_activation
from jaxmem.rewriting._attention import attention_patterns
from jaxmem.rewriting._norms import batch_norm_patterns, norm_patterns
from jaxmem.rewriting._pattern import Pattern
from jaxmem.rewriting._products import conv_patterns, dense_patterns

GATED = ("*batch", "*batch")
Save = str | int | Quantization


def _gelu_expanded(x):
    """The cubic factored: x * (1 + 0.044715 x^2) under the tanh."""
    inner = x * (1 + 0.044715 * x * x)
    return 0.5 * x * (1 + jnp.tanh(0.7978845608028654 * inner))


def _gelu_erf(x):
    return 0.5 * x * (1 + jax.scipy.special.erf(x * 0.7071067811865476))


def _gelu_jax_erf(x):
    return jax.nn.gelu(x, approximate=False)


GELU_TANH = (jax.nn.gelu, _gelu_expanded)
GELU_ERF = (_gelu_jax_erf, _gelu_erf)
SILU = (jax.nn.silu, lambda x: x / (1 + jnp.exp(-x)))
# the quick GELU of CLIP with beta = 1.702
SWISH = (
    lambda x, beta: x * jax.nn.sigmoid(beta * x),
    lambda x, beta: x / (1 + jnp.exp(-beta * x)),
)


def _each(name: str, plains, lean: Callable, **options) -> list[Pattern]:
    return [Pattern(name, plain, lean, **options) for plain in plains]


@functools.cache
def _bound(op: Callable, **scalars: float) -> Callable:
    """One and the same for equal numbers: codes are shared by the function."""
    return functools.partial(op, **scalars)


def _coded(op: Callable, how: Quantization) -> Callable:
    """The op, keeping codes of its arrays, which the next layer reads too."""

    def lean(*xs, **scalars):
        return coded_activation(_bound(op, **scalars), how, len(xs))(*xs)

    return lean


def _gated(plain: Callable) -> Callable:
    return lambda gate, up: plain(gate) * up


_GEGLU_ERF = functools.partial(ops.geglu, approximate=False)


def glu_patterns(save: Save) -> list[Pattern]:
    """An activation times another projection: the two projections are kept, no more."""
    forms = (("geglu", GELU_TANH, ops.geglu), ("geglu", GELU_ERF, _GEGLU_ERF))
    forms += (("swiglu", SILU, ops.swiglu),)
    lean = lambda op: _coded(op, save) if isinstance(save, Quantization) else op
    return [
        Pattern(name, _gated(plain), lean(op), examples=GATED)
        for name, plains, op in forms
        for plain in plains
    ]


_GELU_ERF = functools.partial(ops.gelu, approximate=False)


def gelu_and_silu_patterns(save: Save) -> list[Pattern]:
    """The activations that can be kept by their output."""

    def form(op):
        if isinstance(save, Quantization):
            return _coded(op, save)
        return functools.partial(op, save=save)

    gelu, erf, silu = (form(op) for op in (ops.gelu, _GELU_ERF, ops.silu))
    return [
        *_each("gelu", GELU_TANH, gelu),
        *_each("gelu", GELU_ERF, erf),
        *_each("silu", SILU, silu),
        *_each("swish", SWISH, silu, scalars=("beta",), when=lambda beta: beta > 0),
    ]


def _elu(x, alpha):
    return jnp.where(x > 0, x, alpha * (jnp.exp(x) - 1))


def _jax_elu(x, alpha):
    return jax.nn.elu(x, alpha)


def _leaky(x, negative_slope):
    return jax.nn.leaky_relu(x, negative_slope)


def _leaky_strict(x, negative_slope):
    return jnp.where(x > 0, x, negative_slope * x)


def _relu_where(x):
    return jnp.where(x > 0, x, 0)


def _leaky_bit(x, negative_slope):
    """A bit tells the sign of the output only where the slope is a positive one."""
    save = "bit" if negative_slope > 0 else "output"
    return ops.leaky_relu(x, negative_slope, save=save)


def activation_patterns(save: Save) -> list[Pattern]:
    """The rest; the larger first.

    `jnp.maximum(x, 0)` is no `relu`: at 0 its slope is 1/2 in JAX. Squared, it is.
    Where the next layer stores codes, it keeps no output: a bit, or codes to share.
    """
    codes = isinstance(save, Quantization)
    form = lambda op: _coded(op, save) if isinstance(save, Quantization) else op
    relu = (jax.nn.relu, _relu_where)
    maximum = lambda x: jnp.maximum(x, 0)
    squared = [lambda x, f=f: jnp.square(f(x)) for f in (*relu, maximum)]
    softplus = (jax.nn.softplus, lambda x: jnp.log1p(jnp.exp(x)))
    mish = [lambda x, f=f: x * jnp.tanh(f(x)) for f in softplus]
    leaky = _leaky_bit if codes else ops.leaky_relu
    rectifier = functools.partial(ops.relu, save="bit" if codes else "auto")
    slope = ("negative_slope",)
    return [
        *_each("mish", mish, form(ops.mish)),
        *_each("squared_relu", squared, form(ops.squared_relu)),
        *_each("elu", (_jax_elu, _elu), form(ops.elu), scalars=("alpha",)),
        *_each("leaky_relu", (_leaky, _leaky_strict), leaky, scalars=slope),
        *_each("softplus", softplus, form(ops.softplus)),
        *_each("relu", relu, rectifier),
    ]


def _log_softmax_by_sum(x):
    return x - jax.scipy.special.logsumexp(x, axis=-1, keepdims=True)


def _softmax_unshifted(x):
    return jnp.exp(x) / jnp.sum(jnp.exp(x), axis=-1, keepdims=True)


def softmax_patterns() -> list[Pattern]:
    """Over the last axis, or over another one where it stands first or second."""
    found = []
    for axis, dims in ((-1, "*batch n"), (-2, "*batch n a"), (-3, "*batch n a b")):
        plain = (
            functools.partial(jax.nn.softmax, axis=axis),
            *((_softmax_unshifted,) if axis == -1 else ()),
        )
        lean = functools.partial(ops.softmax, axis=axis)
        found += _each("softmax", plain, lean, examples=(dims,))
    plain = (jax.nn.log_softmax, _log_softmax_by_sum)
    found += _each("log_softmax", plain, ops.log_softmax, examples=("*batch n",))
    return found


def dropout_patterns() -> list[Pattern]:
    """A drawn mask; replaced by another of the same law, recomputed when needed."""

    def selected(x, key, keep):
        mask = jax.random.bernoulli(key, keep, x.shape)
        return jnp.where(mask, x / keep, 0)

    def multiplied(x, key, keep):
        return x * jax.random.bernoulli(key, keep, x.shape).astype(x.dtype) / keep

    def selected_first(x, key, keep):
        return jnp.where(jax.random.bernoulli(key, keep, x.shape), x, 0) / keep

    def lean(x, key, keep):
        return ops.dropout(x, round(1 - keep, 6), key)

    plains = (selected, multiplied, selected_first)
    return _each(
        "dropout",
        plains,
        lean,
        examples=("*batch", "key"),
        scalars=("keep",),
        when=lambda keep: 0 < keep < 1,
    )


def _pool(x):
    ones = (1,) * x.ndim
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, ones, ones, "VALID")


def _lean_pool(x, *, window_dimensions, window_strides, padding, **dilations):
    sizes, strides = window_dimensions[:-1], window_strides[:-1]
    return ops.max_pool(x, sizes, strides, padding[:-1])


def _is_lean_pool(
    window_dimensions, window_strides, padding, base_dilation, window_dilation
) -> bool:
    """Whether the last axis is not pooled, and no window has holes."""
    last = window_dimensions[-1:], window_strides[-1:], padding[-1:]
    return last == ((1,), (1,), ((0, 0),)) and {*base_dilation, *window_dilation} == {1}


def pool_patterns() -> list[Pattern]:
    """Max-pooling with channels last, of any window."""
    params = ("window_dimensions", "window_strides", "padding")
    params += ("base_dilation", "window_dilation")
    return _each("max_pool", (_pool,), _lean_pool, params=params, when=_is_lean_pool)


def library(save: Save = "input", norm_save: str = "input") -> tuple[Pattern, ...]:
    """The patterns `rewrite` looks for, the largest first.

    Args:
      save: what GELU and SiLU keep: "input", or "output" (and one bit an element),
        which is free where the next operation keeps the output anyway; "auto": that
        where it is so, else the input (`auto_save`, as ReLU always); or the bits of
        codes of their derivative, or a `Quantization` for codes of their input, which
        a dense layer that stores codes shares; gated units and the other activations
        then keep such codes too, ReLU and leaky ReLU a bit.
      norm_save: likewise for layer norm and RMS norm. A function does not show whether
        a scale is near zero, where the input cannot be had back from the output, so
        "output" is for those who know that it is not.

    Returns:
      Patterns for attention, norms, dropout, gated units, softmax, activations,
      max-pooling, and products and convolutions with cast weights.

    Raises:
      ValueError: another word for `save` or `norm_save`.
    """
    if as_quantization(save) is None and save not in ("input", "output", "auto"):
        allowed = "'input', 'output', 'auto', bits (1 to 8) or a Quantization"
        raise wrong_value("save", save, f"one of {allowed}")
    check_choice("norm_save", norm_save, ("input", "output"))
    return (
        *attention_patterns(),
        *norm_patterns(norm_save),
        *batch_norm_patterns(),
        *dropout_patterns(),
        *glu_patterns(save),
        *gelu_and_silu_patterns(save),
        *activation_patterns(save),
        *softmax_patterns(),
        *pool_patterns(),
        *dense_patterns(),
        *conv_patterns(),
    )


LIBRARY = library()
