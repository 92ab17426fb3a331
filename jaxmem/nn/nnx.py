"""Drop-in layers for `flax.nnx`: the same constructors, parameters and outputs.

Each class is a subclass of Flax's whose `__call__` runs on `jaxmem.ops`; constructors,
parameters, state paths and initial values are Flax's own. As in `jaxmem.nn.linen`,
dropout draws other masks, the softmax of the attention is always in float32, and what
no lean op serves runs Flax's own code and warns once.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.module import first_from
from flax.nnx.nn import dtypes
from jaxtyping import Array, Float

from jaxmem import ops
from jaxmem.nn import _norm
from jaxmem.nn._fallback import fall_back
from jaxmem.nn._nnx_attention import dot_product_attention as dot_product_attention


def _value(param):
    return None if param is None else param[...]


def _promoted(module, x, bias=True):
    """Input, scale and bias as Flax promotes them."""
    params = (module.scale, module.bias) if bias else (module.scale,)
    return module.promote_dtype((x, *map(_value, params)), dtype=module.dtype)


class LayerNorm(nnx.LayerNorm):
    """`flax.nnx.LayerNorm`, built on `jaxmem.ops.layer_norm`.

    Args:
        save: `"input"` keeps the layer's input, `"output"` its output, which the next
            matmul keeps anyway; keyword-only. All other arguments as in Flax.

    Saves:
        The input or the output in its own dtype, and one or two float32 a row;
        Flax keeps three float32 copies of the input.
    """

    save = "input"

    def __init__(self, *args: Any, save: str = "input", **kwargs: Any):
        _norm.check_save(save)
        super().__init__(*args, **kwargs)
        self.save = save

    def __call__(
        self, x: Float[Array, "*shape"], *, mask: jax.Array | None = None
    ) -> Float[Array, "*shape"]:
        """Normalizes `x`, with statistics over the elements that `mask` marks."""
        if reason := _norm.obstacle(self, x):
            fall_back("LayerNorm", reason)
            return nnx.LayerNorm.__call__(self, x, mask=mask)
        x, scale, bias = _promoted(self, x)
        return _norm.layer_norm(self, x, scale, bias, mask, x.dtype, self.save)


class RMSNorm(nnx.RMSNorm):
    """`flax.nnx.RMSNorm`, built on `jaxmem.ops.rms_norm`.

    Args:
        save: as in `LayerNorm`; keyword-only. All other arguments as in Flax.

    Saves:
        The input or the output in its own dtype, and one float32 a row.
    """

    save = "input"

    def __init__(self, *args: Any, save: str = "input", **kwargs: Any):
        _norm.check_save(save)
        super().__init__(*args, **kwargs)
        self.save = save

    def __call__(
        self, x: Float[Array, "*shape"], mask: jax.Array | None = None
    ) -> Float[Array, "*shape"]:
        """Normalizes `x`, with statistics over the elements that `mask` marks."""
        if reason := _norm.obstacle(self, x):
            fall_back("RMSNorm", reason)
            return nnx.RMSNorm.__call__(self, x, mask=mask)
        x, scale = _promoted(self, x, bias=False)
        return _norm.rms_norm(self, x, scale, mask, x.dtype, self.save)


class GroupNorm(nnx.GroupNorm):
    """`flax.nnx.GroupNorm`, built on `jaxmem.ops.group_norm`.

    Saves:
        The input in its own dtype, and two float32 a group.
    """

    def __call__(
        self, x: Float[Array, "*shape"], *, mask: jax.Array | None = None
    ) -> Float[Array, "*shape"]:
        """Normalizes `x` within each group of channels."""
        if reason := _norm.obstacle(self, x):
            fall_back("GroupNorm", reason)
            return nnx.GroupNorm.__call__(self, x, mask=mask)
        x, scale, bias = _promoted(self, x)
        groups = self.num_groups
        return _norm.group_norm(self, x, scale, bias, mask, x.dtype, groups)


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
        if reason := _norm.obstacle(self, x):
            fall_back("BatchNorm", reason)
            return nnx.BatchNorm.__call__(self, x, frozen, mask=mask)
        x, mean, var, scale, bias = self.promote_dtype(
            (x, self.mean[...], self.var[...], _value(self.scale), _value(self.bias)),
            dtype=self.dtype,
        )
        if frozen:
            y = ops.batch_norm(
                x,
                scale,
                bias,
                mean=mean,
                var=var,
                axis=self.axis,
                epsilon=self.epsilon,
            )
            assert not isinstance(y, tuple)
            return y
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


def _product_obstacle(module, out_sharding) -> str | None:
    """Why a linear layer needs Flax's own product, or None."""
    if module.dot_general not in (None, jax.lax.dot_general):
        return "a dot_general of its own"
    if getattr(module, "dot_general_cls", None) is not None:
        return "a dot_general of its own"
    if module.promote_dtype is not dtypes.promote_dtype:
        return "a promote_dtype of its own"
    if out_sharding is not None:
        return "out_sharding"
    return None


class Linear(nnx.Linear):
    """`flax.nnx.Linear`, built on `jaxmem.ops.dense`.

    Saves:
        The input and the kernel themselves, and no copy of either in the dtype of
        the computation.
    """

    def __call__(
        self, inputs: Float[Array, "*batch d"], out_sharding: Any = None
    ) -> Float[Array, "*batch f"]:
        """Applies the linear map to the last axis."""
        reason = _product_obstacle(self, out_sharding)
        if reason:
            fall_back("Linear", reason)
            return nnx.Linear.__call__(self, inputs, out_sharding)
        return _dense(self, inputs, -1)


class LinearGeneral(nnx.LinearGeneral):
    """`flax.nnx.LinearGeneral`, built on `jaxmem.ops.dense`.

    Saves:
        The input and the kernel themselves, and no copy of either.
    """

    def __call__(
        self, inputs: Float[Array, "..."], out_sharding: Any = None
    ) -> Float[Array, "..."]:
        """Applies the linear map to `self.axis`."""
        reason = _product_obstacle(self, out_sharding)
        reason = reason or ("batch_axis" if self.batch_axis else None)
        if reason:
            fall_back("LinearGeneral", reason)
            return nnx.LinearGeneral.__call__(self, inputs, out_sharding)
        return _dense(self, inputs, _norm.axes(inputs.ndim, self.axis))


def _dense(module, x, axis):
    kernel, bias = module.kernel[...], _value(module.bias)
    given = [a for a in (x, kernel, bias) if a is not None]
    dtype = dtypes.canonicalize_dtype(*given, dtype=module.dtype)
    return ops.dense(
        x,
        kernel,
        bias,
        axis=axis,
        dtype=dtype,
        precision=module.precision,
        preferred_element_type=module.preferred_element_type,
    )


class Dropout(nnx.Dropout):
    """`flax.nnx.Dropout`, built on `jaxmem.ops.dropout`.

    Saves:
        The key; the mask is made again in the backward pass.
    """

    def __call__(
        self,
        inputs: Float[Array, "*shape"],
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> Float[Array, "*shape"]:
        """Drops elements at `self.rate` with a key from `rngs` or the layer's own."""
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

    Saves:
        The layer's inputs, query, key, value, the attention output once (the output
        projection contracts its head axes directly), and one float32 a row.
    """

    @functools.wraps(nnx.MultiHeadAttention.__init__)
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        use_lean_parts(self)


INSIDE_ATTENTION = {nnx.LinearGeneral: LinearGeneral, nnx.LayerNorm: LayerNorm}


def use_lean_parts(module: nnx.MultiHeadAttention) -> None:
    """Exchanges the attention function and the layers inside an attention module."""
    if module.attention_fn is nnx.dot_product_attention:
        module.attention_fn = dot_product_attention
    for name in ("query", "key", "value", "out", "query_ln", "key_ln"):
        part = getattr(module, name)
        if type(part) in INSIDE_ATTENTION:
            object.__setattr__(part, "__class__", INSIDE_ATTENTION[type(part)])
