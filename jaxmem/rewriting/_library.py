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
from jaxmem.ops._code_marks import coded_activation
from jaxmem.ops._quantize import Quantization, as_quantization
from jaxmem.rewriting._attention import attention_patterns
from jaxmem.rewriting._pattern import Pattern

GATED = ("*batch", "*batch")


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


def _each(name: str, plains, lean: Callable, **options) -> list[Pattern]:
    return [Pattern(name, plain, lean, **options) for plain in plains]


def _gated(plain: Callable) -> Callable:
    return lambda gate, up: plain(gate) * up


def glu_patterns() -> list[Pattern]:
    """An activation times another projection: the two projections are kept, no more."""
    erf = functools.partial(ops.geglu, approximate=False)
    forms = (("geglu", GELU_TANH, ops.geglu), ("geglu", GELU_ERF, erf))
    forms += (("swiglu", SILU, ops.swiglu),)
    return [
        Pattern(name, _gated(plain), lean, examples=GATED)
        for name, plains, lean in forms
        for plain in plains
    ]


_ERF = functools.partial(ops.gelu, approximate=False)


def gelu_and_silu_patterns(save: str | int | Quantization) -> list[Pattern]:
    """The activations that can be kept by their output."""

    def form(op):
        if isinstance(save, Quantization):
            return coded_activation(op, save)
        return functools.partial(op, save=save)

    gelu, erf, silu = (form(op) for op in (ops.gelu, _ERF, ops.silu))
    return [
        *_each("gelu", GELU_TANH, gelu),
        *_each("gelu", GELU_ERF, erf),
        *_each("silu", SILU, silu),
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


def activation_patterns() -> list[Pattern]:
    """The rest; the larger first.

    `jnp.maximum(x, 0)` is no `relu`: at 0 its slope is 1/2 in JAX. Squared, it is.
    """
    relu = (jax.nn.relu, _relu_where)
    maximum = lambda x: jnp.maximum(x, 0)
    squared = [lambda x, f=f: jnp.square(f(x)) for f in (*relu, maximum)]
    softplus = (jax.nn.softplus, lambda x: jnp.log1p(jnp.exp(x)))
    mish = [lambda x, f=f: x * jnp.tanh(f(x)) for f in softplus]
    slope = ("negative_slope",)
    return [
        *_each("mish", mish, ops.mish),
        *_each("squared_relu", squared, ops.squared_relu),
        *_each("elu", (_jax_elu, _elu), ops.elu, scalars=("alpha",)),
        *_each("leaky_relu", (_leaky, _leaky_strict), ops.leaky_relu, scalars=slope),
        *_each("softplus", softplus, ops.softplus),
        *_each("relu", relu, functools.partial(ops.relu, save="auto")),
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


def _affine(y, scale, bias, shifted: bool):
    if scale is not None:
        y = y * (1 + scale if shifted else scale)
    return y if bias is None else y + bias


def _variance(x, form: str):
    mean = x.mean(-1, keepdims=True)
    if form == "two_pass":
        return jnp.square(x - mean).mean(-1, keepdims=True)
    fast = jnp.square(x).mean(-1, keepdims=True) - jnp.square(mean)
    return fast if form == "fast_unclipped" else jnp.maximum(0, fast)


def _norm(center: bool, form: str, scaled: bool, biased: bool, shifted: bool):
    """The plain norm and its lean twin, for one way to write it."""

    def split(affine):
        affine = list(affine)
        scale = affine.pop(0) if scaled else None
        return scale, affine.pop(0) if biased else None

    def plain(x, *affine, epsilon):
        if center:
            y = x - x.mean(-1, keepdims=True)
            y = y * jax.lax.rsqrt(_variance(x, form) + epsilon)
        else:
            y = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + epsilon)
        return _affine(y, *split(affine), shifted)

    def lean(x, *affine, epsilon, save):
        scale, bias = split(affine)
        if shifted:
            assert scale is not None
            scale = scale.astype(jnp.promote_types(scale.dtype, jnp.float32)) + 1
        options = {"epsilon": epsilon, "save": save}
        if not center:
            return ops.rms_norm(x, scale, **options)
        fast = form != "two_pass"
        return ops.layer_norm(x, scale, bias, use_fast_variance=fast, **options)

    return plain, lean


def norm_patterns(save: str) -> list[Pattern]:
    """Layer norm and RMS norm over the last axis, with what follows them."""
    found = []
    affine = ((True, True), (True, False), (False, True), (False, False))
    forms = [
        (True, form, *a, False)
        for form in ("fast", "fast_unclipped", "two_pass")
        for a in affine
    ]
    forms += [(False, "", True, False, True)]
    forms += [(False, "", scaled, False, False) for scaled in (True, False)]
    for center, form, scaled, biased, shifted in sorted(
        forms, key=lambda f: -sum(f[2:])
    ):
        plain, lean = _norm(center, form, scaled, biased, shifted)
        found.append(
            Pattern(
                "layer_norm" if center else "rms_norm",
                plain,
                functools.partial(lean, save=save),
                examples=("*batch n", *["n"] * (scaled + biased)),
                scalars=("epsilon",),
                when=lambda epsilon: 0 <= epsilon < 0.1,
            )
        )
    return found


def dropout_patterns() -> list[Pattern]:
    """A drawn mask; replaced by another of the same law, made again when needed."""

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


def dense_patterns() -> list[Pattern]:
    """A product with a weight that is cast for it; the cast weight is not kept."""

    def pattern(x_dims, w_dims, axes: int) -> Pattern:
        def lean(x, w):
            axis = tuple(range(-axes, 0))
            return ops.dense(x, w, axis=axis, dtype=x.dtype)

        return Pattern(
            "dense",
            lambda x, w: jnp.tensordot(x, w, axes),
            lean,
            examples=(x_dims, w_dims),
            uncast=(1,),
        )

    return [
        pattern("*batch d", "d f", 1),
        pattern("*batch d", "d n h", 1),
        pattern("*batch n h", "n h d", 2),
    ]


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


def library(
    save: str | int | Quantization = "input", norm_save: str = "input"
) -> tuple[Pattern, ...]:
    """The patterns `rewrite` looks for, the largest first.

    Args:
      save: what GELU and SiLU keep: "input", or "output" (and one bit an element),
        which is free where the next operation keeps the output anyway; "auto": that
        where it is so, else the input (`auto_save`, as ReLU always); or the bits of
        codes of their derivative, or a `Quantization` for codes of their input, which
        a dense layer that stores codes shares.
      norm_save: likewise for layer norm and RMS norm. A function does not show whether
        a scale is near zero, where the input cannot be had back from the output, so
        "output" is for those who know that it is not.

    Returns:
      Patterns for attention, norms, dropout, gated units, softmax, activations,
      max-pooling and products with cast weights.

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
        *dropout_patterns(),
        *glu_patterns(),
        *gelu_and_silu_patterns(save),
        *activation_patterns(),
        *softmax_patterns(),
        *pool_patterns(),
        *dense_patterns(),
    )


LIBRARY = library()
