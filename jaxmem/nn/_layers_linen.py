"""The layers of `jaxmem.nn.linen`."""

import functools
from dataclasses import field
from typing import Any

import jax
from flax import linen as nn
from jaxtyping import Array, Float

from jaxmem import ops
from jaxmem.nn import _linen_calls as calls
from jaxmem.nn import _norm
from jaxmem.nn._constructor import check_abn, check_ms_save
from jaxmem.nn._norm import check_save
from jaxmem.ops.codes import bits_or_none


def _lean(module: nn.Module, *args: Any, **how: Any) -> Any:
    """What replaces the Flax layer that this bound module is, and falls back on it."""
    bases = (cls for cls in type(module).__mro__ if "__call__" in vars(cls))
    written = (calls.raw(cls.__call__) for cls in bases)
    flax_call = next(call for call in written if call in calls.TABLE)
    how |= {"save": module.save} if isinstance(module, _Saves) else {}
    # Raw: it runs inside the compact call under way.
    given = module, functools.partial(flax_call, module)
    return calls.TABLE[flax_call](*given, *args, **how)


class _Saves(nn.Module):
    """A layer whose `save` is checked where it is made: bits, or nothing."""

    save: Any = field(default=None, kw_only=True)
    _check = staticmethod(bits_or_none)

    def __post_init__(self) -> None:
        self._check(type(self).__name__, self.save)
        super().__post_init__()


class _Normalizes(nn.Module):
    """The call that Flax's norms of one row or group have."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "*shape"], *, mask: jax.Array | None = None
    ) -> Float[Array, "*shape"]:
        """Normalizes `x`, with statistics over the elements that `mask` marks."""
        return _lean(self, x, mask=mask)


class _SavesWord(_Normalizes, _Saves):
    """A norm that keeps its input, its output or codes."""

    save: Any = field(default="input", kw_only=True)
    _check = staticmethod(lambda _, save: check_save(save))


class _SavesNormalized(_Saves):
    """A norm that keeps its normalised input, or codes of it."""

    save: Any = field(default="output", kw_only=True)
    _check = staticmethod(lambda _, save: check_ms_save(save))

    @nn.compact
    def __call__(self, x: Float[Array, "*shape"], *, mask: jax.Array | None = None):
        """Normalizes `x`; scale and bias go along for the next layer."""
        return calls.ms_norm(self, x, mask, self.save)


class _Contracts(_Saves):
    """The call that Flax's layers of one product have."""

    # Flax annotates a field with a protocol that type checkers cannot test.
    __no_type_check__ = True

    @nn.compact
    def __call__(
        self, inputs: Float[Array, "..."] | ops.Normalized
    ) -> Float[Array, "..."]:
        """Applies the linear map to `axis`, of `Dense` the last one."""
        return _lean(self, inputs)


class LayerNorm(_SavesWord, nn.LayerNorm):
    """`flax.linen.LayerNorm`, built on `jaxmem.ops.layer_norm`.

    Args:
        save: `"input"` keeps the layer's input, `"output"` its output, which the next
            matmul keeps anyway, bits a value (1 to 8) codes of the normalised input;
            keyword-only. All other fields as in Flax.

    Saves:
        The input or the output in its own dtype, and one or two float32 a row;
        Flax keeps three float32 copies of the input.
    """


class RMSNorm(_SavesWord, nn.RMSNorm):
    """`flax.linen.RMSNorm`, built on `jaxmem.ops.rms_norm`.

    Args:
        save: as in `LayerNorm`; keyword-only. All other fields as in Flax.

    Saves:
        The input or the output in its own dtype, and one float32 a row.
    """


class MSLayerNorm(_SavesNormalized, nn.LayerNorm):
    """A LayerNorm to be read by dense layers, which apply its scale and bias.

    Fields, parameters and their names as in `flax.linen.LayerNorm`, so a pretrained
    tree loads as it is; the last axis only. The output is a `jaxmem.ops.Normalized`,
    which `Dense`, `DenseGeneral` and the attention layers of this module take; give
    `.array()` of it to anything else.

    Args:
        save: `"output"`, or bits a value (1 to 8) for codes of the normalised input;
            keyword-only. All other fields as in Flax.

    Saves:
        The normalised input, once for the norm and all dense layers that read it, and
        one float32 a row.
    """


class MSRMSNorm(_SavesNormalized, nn.RMSNorm):
    """An RMSNorm to be read by dense layers, which apply its scale.

    Otherwise as `MSLayerNorm`, with the fields and parameters of `flax.linen.RMSNorm`.

    Saves:
        As `MSLayerNorm`.
    """


class GroupNorm(_Normalizes, nn.GroupNorm):
    """`flax.linen.GroupNorm`, built on `jaxmem.ops.group_norm`.

    Saves:
        The input in its own dtype, and two float32 a group.
    """


class BatchNorm(nn.BatchNorm):
    """`flax.linen.BatchNorm`, built on `jaxmem.ops.batch_norm`.

    Saves:
        The input in its own dtype, and two float32 a feature.
    """

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "*shape"],
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
    ) -> Float[Array, "*shape"]:
        """Normalizes `x` and updates `batch_stats`, as Flax's layer does."""
        return _lean(self, x, use_running_average, mask=mask)


class InPlaceABN(_norm.Activates, BatchNorm):
    """Batch norm and activation in one, built on `jaxmem.ops.inplace_abn`.

    Fields and variables as in `flax.linen.BatchNorm`, with one feature axis; scales may
    have any sign.

    Args:
        activation: "leaky_relu", "elu", "silu", "gelu" or "identity"; keyword-only, as
            those after it.
        negative_slope: of leaky_relu; positive.
        alpha: of elu; positive.
        approximate: the tanh form of gelu if true, else the erf form.

    Saves:
        The output, which the next layer keeps anyway; see the op.
    """

    activation: str = field(default="leaky_relu", kw_only=True)
    negative_slope: float = field(default=0.01, kw_only=True)
    alpha: float = field(default=1.0, kw_only=True)
    approximate: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        numbers = self.negative_slope, self.alpha, self.approximate
        check_abn(self.activation, *numbers)
        super().__post_init__()


class Dense(_Contracts, nn.Dense):
    """`flax.linen.Dense`, built on `jaxmem.ops.dense`.

    Args:
        save: bits a value (1 to 8) or a `jaxmem.ops.Quantization`, to keep codes of
            the input; keyword-only. All other fields as in Flax.

    Saves:
        The input and the kernel themselves, and no copy of either in the dtype of
        the computation.
    """


class DenseGeneral(_Contracts, nn.DenseGeneral):
    """`flax.linen.DenseGeneral`, built on `jaxmem.ops.dense`.

    Args:
        save: bits a value (1 to 8) or a `jaxmem.ops.Quantization`, to keep codes of
            the input; keyword-only. All other fields as in Flax.

    Saves:
        The input and the kernel themselves, and no copy of either.
    """


class Conv(_Saves, nn.Conv):
    """`flax.linen.Conv`, built on `jaxmem.ops.conv`.

    Args:
        save: bits a value (1 to 8) or a `jaxmem.ops.Quantization`, to keep codes of
            the input; keyword-only. All other fields as in Flax.

    Saves:
        The input where the kernel is trained, the kernel itself where the input is
        differentiated, and no copy of the kernel in the dtype of the computation.
    """

    # Flax annotates a field with a protocol that type checkers cannot test.
    __no_type_check__ = True

    @nn.compact
    def __call__(self, inputs: Float[Array, "..."]) -> Float[Array, "..."]:
        """Convolves the spatial dimensions of the channels-last input."""
        return _lean(self, inputs)


class Dropout(nn.Dropout):
    """`flax.linen.Dropout`, built on `jaxmem.ops.dropout`.

    Saves:
        The key; the mask is recomputed in the backward pass.
    """

    @nn.compact
    def __call__(
        self,
        inputs: Float[Array, "*shape"],
        deterministic: bool | None = None,
        rng: jax.Array | None = None,
    ) -> Float[Array, "*shape"]:
        """Drops elements at `self.rate` with a key from `make_rng`."""
        return _lean(self, inputs, deterministic, rng)


class _Attends(_Saves):
    """The call that both of Flax's attention layers have."""

    @nn.compact
    def __call__(
        self,
        inputs_q: Float[Array, "*batch q d"],
        inputs_k: Float[Array, "*batch k dk"] | None = None,
        inputs_v: Float[Array, "*batch k dv"] | None = None,
        **options: Any,
    ) -> Float[Array, "*batch q f"]:
        """Projects, attends, projects; `options` as in Flax (`mask`, ...)."""
        flax_call: Any = super().__call__  # pyright: ignore[reportAttributeAccessIssue]
        return _lean_attention(self, flax_call, inputs_q, inputs_k, inputs_v, **options)


class MultiHeadDotProductAttention(_Attends, nn.MultiHeadDotProductAttention):
    """`flax.linen.MultiHeadDotProductAttention` on `jaxmem.ops`.

    Args:
        save: bits a value (1 to 8) or a `jaxmem.ops.Quantization`, to keep codes of
            what attention and projections keep; keyword-only. All other fields as
            in Flax.

    Saves:
        The layer's inputs, query, key, value, the attention output once (the output
        projection contracts its head axes directly), and one float32 a row.
    """


class MultiHeadAttention(_Attends, nn.MultiHeadAttention):
    """`flax.linen.MultiHeadAttention`; see `MultiHeadDotProductAttention`."""


class SelfAttention(_Saves, nn.SelfAttention):
    """`flax.linen.SelfAttention`; see `MultiHeadDotProductAttention`."""

    @nn.compact
    def __call__(
        self,
        inputs_q: Float[Array, "*batch q d"],
        mask: jax.Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: jax.Array | None = None,
        sow_weights: bool = False,
    ) -> Float[Array, "*batch q f"]:
        """Projects, attends to itself, projects; arguments as in Flax."""
        options = dict(deterministic=deterministic, dropout_rng=dropout_rng)
        return _lean_attention(
            self, super().__call__, inputs_q, mask, sow_weights=sow_weights, **options
        )


def _lean_attention(module, flax_call, *args, **kwargs):
    """Flax's call with our attention function, and our layers for those it makes."""

    def inner(next_call, args, kwargs, context):
        lean = calls.TABLE.get(context.orig_method.func)
        if lean is None or lean not in calls.INSIDE_ATTENTION:
            return next_call(*args, **kwargs)
        save = {} if module.save is None else {"save": module.save}
        return lean(context.module, next_call, *args, **kwargs, **save)

    with nn.intercept_methods(inner):
        return calls.attention(module, flax_call, *args, save=module.save, **kwargs)
