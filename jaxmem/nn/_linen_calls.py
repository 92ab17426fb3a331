"""What replaces `__call__` of each linen layer: for the drop-in class and `substitute`.

Each function takes the bound module, Flax's own call of it (to fall back on, and to
leave parameter creation to Flax where that is not a line), and the call's arguments.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import canonicalize_dtype
from flax.linen.dtypes import promote_dtype as flax_promote_dtype

from jaxmem import ops
from jaxmem.nn import _functions, _norm
from jaxmem.nn._fallback import fall_back
from jaxmem.nn._intercepted import INTERCEPTED, products_are_intercepted
from jaxmem.nn._traced import is_replaced
from jaxmem.ops.codes import sharing
from jaxmem.ops.records import RECORDS


@contextlib.contextmanager
def _with_fields(module: nn.Module, **fields: Any) -> Iterator[None]:
    # Bound linen modules are frozen and live for one call: fields set and put back.
    before = {name: getattr(module, name) for name in fields}
    try:
        for name, value in fields.items():
            object.__setattr__(module, name, value)
        yield
    finally:
        for name, value in before.items():
            object.__setattr__(module, name, value)


def _norm_params(module, features, names):
    """Parameters as Flax makes them: scale first, then bias."""
    return [
        module.param(
            name, getattr(module, f"{name}_init"), features, module.param_dtype
        )
        if getattr(module, f"use_{name}")
        else None
        for name in names
    ]


def _parameters(module, x, names):
    """The input, the dtype to compute in, and the parameters of a norm."""
    places = _norm.axes(x.ndim, getattr(module, "feature_axes", -1))
    made = _norm_params(module, tuple(x.shape[i] for i in places), names)
    return x, canonicalize_dtype(x, *made, dtype=module.dtype), *made


def save_rng(module):
    """A key for stochastic rounding of codes, where the caller gave one."""
    return module.make_rng("storage") if module.has_rng("storage") else None


def layer_norm(module, flax_call, x, **how):
    rng = None if _norm.unsupported_reason(module, x) else save_rng(module)
    return _norm.layer_norm(_parameters, module, flax_call, x, rng=rng, **how)


def rms_norm(module, flax_call, x, **how):
    rng = None if _norm.unsupported_reason(module, x) else save_rng(module)
    return _norm.rms_norm(_parameters, module, flax_call, x, rng=rng, **how)


def group_norm(module, flax_call, x, **how):
    return _norm.group_norm(
        _parameters, module, flax_call, x, groups=_num_groups, **how
    )


def _num_groups(module, channels: int) -> int:
    if (module.num_groups is None) == (module.group_size is None):
        raise ValueError(
            "GroupNorm: give either num_groups or group_size (and num_groups=None), "
            f"got {module.num_groups} and {module.group_size}"
        )
    if module.group_size is None:
        return module.num_groups
    if channels % module.group_size:
        raise ValueError(
            f"GroupNorm: group_size={module.group_size} does not divide {channels} "
            "channels"
        )
    return channels // module.group_size


def ms_norm(module, x, mask, save):
    """The normalised input, beside the parameters that Flax's norm would apply."""
    op, names = ops.ms_rms_norm, ("scale",)
    if isinstance(module, nn.LayerNorm):
        op, names = ops.ms_layer_norm, ("scale", "bias")
    parameters = _norm_params(module, x.shape[-1:], names)
    rng = save_rng(module)
    return _norm.ms_norm(module, op, x, mask, *parameters, save=save, rng=rng)


def batch_norm(module, flax_call, x, use_running_average=None, *, mask=None):
    if reason := _norm.unsupported_reason(module, x):
        fall_back("BatchNorm", reason)
        return flax_call(x, use_running_average, mask=mask)
    frozen = nn.merge_param(
        "use_running_average", module.use_running_average, use_running_average
    )
    axes = _norm.axes(x.ndim, module.axis)
    features = tuple(x.shape[i] for i in axes)
    mean = module.variable("batch_stats", "mean", jnp.zeros, features, jnp.float32)
    var = module.variable("batch_stats", "var", jnp.ones, features, jnp.float32)
    scale, bias = _norm_params(module, features, ("scale", "bias"))
    dtype = canonicalize_dtype(x, scale, bias, dtype=module.dtype)
    if frozen:
        stats = dict(mean=mean.value, var=var.value)
        options = dict(axis=axes, epsilon=module.epsilon, dtype=dtype)
        return _norm.batch_op(module)(x, scale, bias, **stats, **options)
    # The mesh axis does not exist yet when parameters are made.
    axis_name = None if module.is_initializing() else module.axis_name
    y, *new = _norm.batch_norm(module, x, scale, bias, mask, dtype, axis_name)
    if not module.is_initializing():
        keep = module.momentum
        for old, value in zip((mean, var), new, strict=True):
            old.value = keep * old.value + (1 - keep) * value
    return y


def dense(module, flax_call, inputs, save=None):
    """Flax makes and shapes the parameters; the product and the casts are ours."""
    given, inputs = inputs, getattr(inputs, "value", inputs)
    reason = None
    if products_are_intercepted():
        reason = INTERCEPTED
    elif module.dot_general is not None or module.dot_general_cls is not None:
        reason = "a dot_general of its own"
    elif module.promote_dtype is not flax_promote_dtype:
        reason = "a promote_dtype of its own"
    elif getattr(module, "batch_dims", ()):
        reason = "batch_dims"
    if reason:
        fall_back(type(module).__name__, reason)
        return flax_call(_norm.plain(given))
    computed, rng = [], save_rng(module)

    def promote(inputs, kernel, bias, dtype=None):
        computed[:] = [canonicalize_dtype(inputs, kernel, bias, dtype=dtype)]
        return inputs, kernel, None if bias is None else bias.astype(computed[0])

    def dot_general(inputs, kernel, dimension_numbers, precision=None):
        return ops.dense(
            given,
            kernel,
            axis=dimension_numbers[0][0],
            dtype=computed[0],
            precision=precision,
            save=save,
            save_rng=rng,
        )

    with _with_fields(module, promote_dtype=promote, dot_general=dot_general):
        return flax_call(inputs)


def conv(module, flax_call, inputs, save=None):
    """Flax makes the parameters and the padding; the convolution is ours."""
    reason = None
    if products_are_intercepted():
        reason = INTERCEPTED
    elif module.conv_general_dilated or module.conv_general_dilated_cls:
        reason = "a conv_general_dilated of its own"
    elif module.promote_dtype is not flax_promote_dtype:
        reason = "a promote_dtype of its own"
    elif not module.shared_weights:
        reason = "unshared weights"
    if reason:
        fall_back(type(module).__name__, reason)
        return flax_call(inputs)

    def promote(inputs, kernel, bias, dtype=None):
        dtype = canonicalize_dtype(inputs, kernel, bias, dtype=dtype)
        return _functions.promote(inputs, kernel, bias, dtype)

    options = dict(save=save, save_rng=save_rng(module))
    convolve = functools.partial(_functions.conv_general_dilated, **options)
    with _with_fields(module, promote_dtype=promote, conv_general_dilated=convolve):
        return flax_call(inputs)


def dropout(module, flax_call, inputs, deterministic=None, rng=None):
    if is_replaced("dropout") and not module.broadcast_dims:
        return flax_call(inputs, deterministic, rng)
    deterministic = nn.merge_param("deterministic", module.deterministic, deterministic)
    if deterministic or module.rate == 0.0:
        return inputs
    if module.rate == 1.0:
        return jnp.zeros_like(inputs)
    rng = module.make_rng(module.rng_collection) if rng is None else rng
    return ops.dropout(inputs, module.rate, rng, broadcast_dims=module.broadcast_dims)


def attention(module, flax_call, *args, save=None, **kwargs):
    """Flax's own projections and cache; the attention function between them is ours."""
    reason = attention_reason(module, kwargs.get("sow_weights", False))
    if reason:
        fall_back(type(module).__name__, reason)
        return flax_call(*args, **kwargs)
    attention_fn = functools.partial(dot_product_attention, save=save)
    with _with_fields(module, attention_fn=attention_fn), sharing():
        return flax_call(*args, **kwargs)


def attention_reason(module, sow_weights) -> str | None:
    """Why this call needs Flax's attention function, or None."""
    if module.attention_fn is not nn.dot_product_attention:
        return "an attention_fn of its own"
    if sow_weights:
        return "sow_weights=True asks for the weights"
    if module.decode:
        return "decode=True"
    if module.precision is not None:
        return "a precision of its own"
    if module.qk_attn_weights_einsum_cls or module.attn_weights_value_einsum_cls:
        return "an einsum of its own"
    return None


# Flax passes those of its arguments whose names are in this signature.
def dot_product_attention(
    query,
    key,
    value,
    bias=None,
    mask=None,
    broadcast_dropout=True,
    dropout_rng=None,
    dropout_rate=0.0,
    deterministic=False,
    dtype=None,
    *,
    save=None,
):
    """As `flax.linen.dot_product_attention`; the softmax is always in float32."""
    query, key, value = flax_promote_dtype(query, key, value, dtype=dtype)
    return _functions.attend(
        *(query, key, value, bias, mask),
        dropout_rate=0.0 if deterministic else dropout_rate,
        dropout_rng=dropout_rng,
        broadcast_dropout=broadcast_dropout,
        save=save,
    )


def raw(method: Callable) -> Callable:
    """The function a Flax class was written with, below Flax's state handling."""
    return inspect.unwrap(method)


CALLS = {
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "group_norm": group_norm,
    "batch_norm": batch_norm,
    "dense": dense,
    "conv": conv,
    "dropout": dropout,
    "dot_product_attention": attention,
}
# Keyed by function, not by class: it is found whatever class inherits it.
TABLE = {
    raw(getattr(nn, layer).__call__): CALLS[record.name]
    for record in RECORDS
    for layer in record.layers.linen
}
TAKES_WORD = [CALLS[r.name] for r in RECORDS if r.layers.linen and r.layers.words]
TAKES_BITS = [CALLS[r.name] for r in RECORDS if r.layers.linen and r.layers.bits]
INSIDE_ATTENTION = (dense, layer_norm)
