"""The layers of `jaxmem.nn.nnx`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.module import first_from
from flax.nnx.nn import dtypes
from jaxtyping import Array, Float

from jaxmem import ops
from jaxmem.nn import _constructor, _functions, _norm
from jaxmem.nn._fallback import fall_back
from jaxmem.nn._intercepted import INTERCEPTED, leave, products_are_intercepted
from jaxmem.nn._nnx_attention import attention_saving
from jaxmem.nn._nnx_attention import dot_product_attention as dot_product_attention
from jaxmem.nn._traced import is_replaced
from jaxmem.ops.codes import bits_or_none, sharing


def _value(param):
    return None if param is None else param[...]


def _parameters(module, x, names):
    """The input, its dtype and the parameters of a norm, as Flax promotes them."""
    params = (_value(getattr(module, name)) for name in names)
    x, *params = module.promote_dtype((x, *params), dtype=module.dtype)
    return x, x.dtype, *params


class _WordLayer(nnx.Module):
    """A layer that keeps its input, its output or codes, checked where it is made."""

    save = "input"

    def __init__(self, *args: Any, save: Any = "input", **kwargs: Any):
        _norm.check_save(save)
        super().__init__(*args, **kwargs)
        self.save = save


class _NormalizedLayer(nnx.Module):
    """A layer that keeps its normalised input, or codes of it."""

    save = "output"

    def __init__(self, *args: Any, save: Any = "output", **kwargs: Any):
        _constructor.check_ms_save(save)
        super().__init__(*args, **kwargs)
        self.save = save


class _BitsLayer(nnx.Module):
    """A layer that keeps its input, or codes of it."""

    save = None

    def __init__(self, *args: Any, save: Any = None, **kwargs: Any):
        save = bits_or_none(type(self).__name__, save)
        super().__init__(*args, **kwargs)
        self.save = save


class LayerNorm(_WordLayer, nnx.LayerNorm):
    """`flax.nnx.LayerNorm`, built on `jaxmem.ops.layer_norm`.

    `save` and what is saved are as in `jaxmem.nn.linen.LayerNorm`.
    """

    def __call__(
        self, x: Float[Array, "*shape"], *, mask: jax.Array | None = None
    ) -> Float[Array, "*shape"]:
        """Normalizes `x`, with statistics over the elements that `mask` marks."""
        flax_call = functools.partial(nnx.LayerNorm.__call__, self)
        how = dict(mask=mask, save=self.save)
        return _norm.layer_norm(_parameters, self, flax_call, x, **how)


class RMSNorm(_WordLayer, nnx.RMSNorm):
    """`flax.nnx.RMSNorm`, built on `jaxmem.ops.rms_norm`.

    `save` and what is saved are as in `jaxmem.nn.linen.RMSNorm`.
    """

    def __call__(
        self, x: Float[Array, "*shape"], mask: jax.Array | None = None
    ) -> Float[Array, "*shape"]:
        """Normalizes `x`, with statistics over the elements that `mask` marks."""
        flax_call = functools.partial(nnx.RMSNorm.__call__, self)
        how = dict(mask=mask, save=self.save)
        return _norm.rms_norm(_parameters, self, flax_call, x, **how)


class MSLayerNorm(_NormalizedLayer, nnx.LayerNorm):
    """A LayerNorm to be read by dense layers, which apply its scale and bias.

    Arguments and state as in `flax.nnx.LayerNorm`, the last axis only. The output is a
    `jaxmem.ops.Normalized`, which `Linear`, `LinearGeneral` and `MultiHeadAttention` of
    this module take; give `.array()` of it to anything else. `save` and what is saved
    are as in `jaxmem.nn.linen.MSLayerNorm`.
    """

    def __call__(
        self, x: Float[Array, "*shape"], *, mask: jax.Array | None = None
    ) -> Any:
        """Normalizes `x`; scale and bias go along for the next layer."""
        op, parameters = ops.ms_layer_norm, (_value(self.scale), _value(self.bias))
        return _norm.ms_norm(self, op, x, mask, *parameters, save=self.save)


class MSRMSNorm(_NormalizedLayer, nnx.RMSNorm):
    """An RMSNorm to be read by dense layers, which apply its scale.

    Otherwise as `MSLayerNorm`, with the arguments and state of `flax.nnx.RMSNorm`.

    Saves:
        As `MSLayerNorm`.
    """

    def __call__(self, x: Float[Array, "*shape"], mask: jax.Array | None = None) -> Any:
        """Normalizes `x`; the scale goes along for the next layer."""
        scale, save = _value(self.scale), self.save
        return _norm.ms_norm(self, ops.ms_rms_norm, x, mask, scale, save=save)


class GroupNorm(nnx.GroupNorm):
    """`flax.nnx.GroupNorm`, built on `jaxmem.ops.group_norm`.

    Saves:
        The input in its own dtype, and two float32 a group.
    """

    def __call__(
        self, x: Float[Array, "*shape"], *, mask: jax.Array | None = None
    ) -> Float[Array, "*shape"]:
        """Normalizes `x` within each group of channels."""
        flax_call = functools.partial(nnx.GroupNorm.__call__, self)
        how = dict(mask=mask, groups=lambda *_: self.num_groups)
        return _norm.group_norm(_parameters, self, flax_call, x, **how)


class BatchNorm(nnx.BatchNorm):
    """`flax.nnx.BatchNorm`, built on `jaxmem.ops.batch_norm`.

    Saves:
        The input in its own dtype, and two float32 a feature.
    """

    def __call__(
        self,
        x: Float[Array, "*shape"],
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
    ) -> Float[Array, "*shape"]:
        """Normalizes `x` and updates the running statistics, as Flax's layer does."""
        frozen = first_from(
            use_running_average,
            self.use_running_average,
            error_msg="BatchNorm needs `use_running_average`: in the constructor, in "
            "the call, or through nnx.view",
        )
        if reason := _norm.unsupported_reason(self, x):
            fall_back("BatchNorm", reason)
            return nnx.BatchNorm.__call__(self, x, frozen, mask=mask)
        x, mean, var, scale, bias = self.promote_dtype(
            (x, self.mean[...], self.var[...], _value(self.scale), _value(self.bias)),
            dtype=self.dtype,
        )
        if frozen:
            options = dict(axis=self.axis, epsilon=self.epsilon)
            op = _norm.batch_op(self)
            return op(x, scale, bias, mean=mean, var=var, **options)
        y, mean, var = _norm.batch_norm(
            self, x, scale, bias, mask, x.dtype, self.axis_name
        )
        self._update(mean, var)
        return y

    def _update(self, mean, var):
        # A statistic held in a mutable array takes no derivative, as in Flax.
        mutable = self.mean._can_update or self.var._can_update
        stop = jax.lax.stop_gradient if mutable else lambda x: x
        keep = self.momentum
        self.mean[...] = stop(keep * self.mean[...] + (1 - keep) * mean)
        self.var[...] = stop(keep * self.var[...] + (1 - keep) * var)


class InPlaceABN(_norm.Activates, BatchNorm):
    """Batch norm and activation in one, built on `jaxmem.ops.inplace_abn`.

    Arguments and state as in `flax.nnx.BatchNorm`, with one feature axis; the further
    ones, all keyword-only, as in `jaxmem.nn.linen.InPlaceABN`.
    """

    def __init__(
        self,
        *args: Any,
        activation: str = "leaky_relu",
        negative_slope: float = 0.01,
        alpha: float = 1.0,
        approximate: bool = True,
        **kwargs: Any,
    ):
        _constructor.check_abn(activation, negative_slope, alpha, approximate)
        super().__init__(*args, **kwargs)
        self.activation = activation
        self.negative_slope = negative_slope
        self.alpha = alpha
        self.approximate = approximate


def _product_reason(module, out_sharding) -> str | None:
    """Why a linear layer needs Flax's own product, or None."""
    own = module.dot_general not in (None, jax.lax.dot_general)
    if products_are_intercepted():
        return INTERCEPTED
    if own or getattr(module, "dot_general_cls", None) is not None:
        return "a dot_general of its own"
    if module.promote_dtype is not dtypes.promote_dtype:
        return "a promote_dtype of its own"
    if out_sharding is not None:
        return "out_sharding"
    return None


class Linear(_BitsLayer, nnx.Linear):
    """`flax.nnx.Linear`, built on `jaxmem.ops.dense`.

    `save` and what is saved are as in `jaxmem.nn.linen.Dense`.
    """

    def __call__(
        self,
        inputs: Float[Array, "*batch d"] | ops.Normalized,
        out_sharding: Any = None,
    ) -> Float[Array, "*batch f"]:
        """Applies the linear map to the last axis."""
        if reason := _product_reason(self, out_sharding):
            leave("Linear", reason)
            return nnx.Linear.__call__(self, _norm.plain(inputs), out_sharding)
        return _dense(self, inputs, -1)


class LinearGeneral(_BitsLayer, nnx.LinearGeneral):
    """`flax.nnx.LinearGeneral`, built on `jaxmem.ops.dense`.

    `save` and what is saved are as in `jaxmem.nn.linen.DenseGeneral`.
    """

    def __call__(
        self, inputs: Float[Array, "..."] | ops.Normalized, out_sharding: Any = None
    ) -> Float[Array, "..."]:
        """Applies the linear map to `self.axis`."""
        reason = _product_reason(self, out_sharding)
        reason = reason or ("batch_axis" if self.batch_axis else None)
        if reason:
            leave("LinearGeneral", reason)
            return nnx.LinearGeneral.__call__(self, _norm.plain(inputs), out_sharding)
        return _dense(self, inputs, _norm.axes(inputs.ndim, self.axis))


def _dense(module, x, axis):
    kernel, bias = module.kernel[...], _value(module.bias)
    given = [a for a in (getattr(x, "value", x), kernel, bias) if a is not None]
    dtype = dtypes.canonicalize_dtype(*given, dtype=module.dtype)
    return ops.dense(
        x,
        kernel,
        bias,
        axis=axis,
        dtype=dtype,
        precision=module.precision,
        preferred_element_type=module.preferred_element_type,
        save=module.save,
    )


class Conv(_BitsLayer, nnx.Conv):
    """`flax.nnx.Conv`, built on `jaxmem.ops.conv`.

    `save` and what is saved are as in `jaxmem.nn.linen.Conv`.
    """

    def __call__(
        self, inputs: Float[Array, "..."], out_sharding: Any = None
    ) -> Float[Array, "..."]:
        """Convolves the spatial dimensions of the channels-last input."""
        if reason := _conv_reason(self, out_sharding):
            leave("Conv", reason)
            return nnx.Conv.__call__(self, inputs, out_sharding)
        lean: Any = _WithLeanParts(self)
        return nnx.Conv.__call__(lean, inputs)


def _conv_reason(module: nnx.Conv, out_sharding) -> str | None:
    """Why a convolution needs Flax's own, or None."""
    if products_are_intercepted():
        return INTERCEPTED
    if module.conv_general_dilated is not jax.lax.conv_general_dilated:
        return "a conv_general_dilated of its own"
    if module.promote_dtype is not dtypes.promote_dtype:
        return "a promote_dtype of its own"
    return None if out_sharding is None else "out_sharding"


class _WithLeanParts:
    """A convolution as Flax's own `__call__` sees it, with our functions to call."""

    def __init__(self, module: "Conv"):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    @staticmethod
    def promote_dtype(args, dtype):
        x, kernel, bias = args
        dtype = dtypes.canonicalize_dtype(*args, dtype=dtype)
        return _functions.promote(x, kernel, bias, dtype)

    def conv_general_dilated(
        self, lhs, rhs, strides, padding, *, out_sharding, **options
    ):
        del out_sharding  # None: see _conv_reason
        options["save"] = self._module.save
        return _functions.conv_general_dilated(lhs, rhs, strides, padding, **options)


class Dropout(nnx.Dropout):
    """`flax.nnx.Dropout`, built on `jaxmem.ops.dropout`.

    Saves:
        The key; the mask is recomputed in the backward pass.
    """

    def __call__(
        self,
        inputs: Float[Array, "*shape"],
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> Float[Array, "*shape"]:
        """Drops elements at `self.rate` with a key from `rngs` or the layer's own."""
        if is_replaced("dropout") and not self.broadcast_dims:
            return super().__call__(inputs, deterministic=deterministic, rngs=rngs)
        deterministic = first_from(
            deterministic,
            self.deterministic,
            error_msg="Dropout needs `deterministic`: in the constructor, in the call, "
            "or through nnx.view",
        )
        if deterministic or self.rate == 0.0:
            return inputs
        if self.rate == 1.0:
            return jnp.zeros_like(inputs)
        rngs = first_from(
            rngs,
            self.rngs,
            error_msg="Dropout needs `rngs`: in the constructor or in the call",
        )
        if isinstance(rngs, nnx.Rngs):
            rngs = rngs[self.rng_collection]
        key = rngs if isinstance(rngs, jax.Array) else rngs()
        dims = tuple(self.broadcast_dims)
        return ops.dropout(inputs, self.rate, key, broadcast_dims=dims)


class MultiHeadAttention(nnx.MultiHeadAttention):
    """`flax.nnx.MultiHeadAttention` on `jaxmem.ops`.

    `save` and what is saved are as in `jaxmem.nn.linen.MultiHeadDotProductAttention`.
    """

    @functools.wraps(nnx.MultiHeadAttention.__init__)
    def __init__(self, *args: Any, save: Any = None, **kwargs: Any):
        save = bits_or_none("MultiHeadAttention", save)
        super().__init__(*args, **kwargs)
        use_lean_parts(self, save)

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Projects, attends, projects; arguments as in Flax."""
        with sharing():
            return super().__call__(*args, **kwargs)


INSIDE_ATTENTION = {nnx.LinearGeneral: LinearGeneral, nnx.LayerNorm: LayerNorm}


def use_lean_parts(module: nnx.MultiHeadAttention, save: Any = None) -> None:
    """Exchanges the attention function and the layers inside an attention module."""
    if module.attention_fn is nnx.dot_product_attention:
        lean = dot_product_attention if save is None else attention_saving(save)
        module.attention_fn = lean
    for name in ("query", "key", "value", "out", "query_ln", "key_ln"):
        part = getattr(module, name)
        if type(part) in INSIDE_ATTENTION:
            object.__setattr__(part, "__class__", INSIDE_ATTENTION[type(part)])
            if save is not None:
                part.save = save
