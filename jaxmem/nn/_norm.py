"""What the norms of linen and nnx share: the options of the ops, and the calls."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp

from jaxmem import ops
from jaxmem._checks import wrong_value
from jaxmem.nn._fallback import fall_back
from jaxmem.ops.codes import as_quantization

SAVES = ("input", "output")


def check_save(save: Any) -> None:
    """At the constructor, not only when the layer runs."""
    word = isinstance(save, str) and save in SAVES
    if as_quantization(save) is None and not word:
        raise wrong_value("save", save, f"one of {SAVES}, or bits a value")


def plain(x: Any) -> Any:
    """`x` as an array, also where it is the output of an MS norm."""
    return x.array() if isinstance(x, ops.Normalized) else x


def axes(ndim: int, given) -> tuple[int, ...]:
    """Sorted, non-negative axes."""
    given = given if isinstance(given, Iterable) else (given,)
    return tuple(sorted({axis % ndim for axis in given}))


class Activates:
    """A batch norm of linen or nnx with an activation in it."""

    activation: str
    negative_slope: float
    alpha: float
    approximate: bool


def unsupported_reason(module, x) -> str | None:
    """Why this call cannot run on a lean op, or None."""
    reason = None
    if not getattr(module, "force_float32_reductions", True):
        reason = "force_float32_reductions=False"
    elif not jnp.issubdtype(x.dtype, jnp.floating):
        reason = f"an input of dtype {x.dtype}"
    if reason and isinstance(module, Activates):
        # Flax has no such layer to fall back on.
        raise ValueError(f"InPlaceABN: {reason}")
    return reason


def _on_op(
    op: Callable,
    layer: str,
    names: tuple[str, ...],
    own: Callable,  # (module, x, **how) -> the options that not all norms have
) -> Callable:
    """The call of a Flax norm, on `op`."""

    def call(parameters, module, flax_call, x, *, mask=None, **how):
        if reason := unsupported_reason(module, x):
            fall_back(layer, reason)
            return flax_call(x, mask=mask)
        # Linen and nnx differ in where a layer's parameters are.
        x, dtype, *given = parameters(module, x, names)
        options = _options(module, mask, dtype) | own(module, x, **how)
        return op(x, *given, **options)

    return call


def _of_layer_norm(module, x, **how) -> dict[str, Any]:
    fast = dict(use_fast_variance=module.use_fast_variance)
    return fast | _over_features(module, x, **how)


def _of_group_norm(module, x, groups: Callable) -> dict[str, Any]:
    return dict(
        num_groups=groups(module, x.shape[-1]),
        reduction_axes=module.reduction_axes,
        use_fast_variance=module.use_fast_variance,
    )


def _over_features(module, x, save="input", rng=None) -> dict[str, Any]:
    """Axes, and the input kept where the op cannot do with the output."""
    reduced, features = (
        axes(x.ndim, given) for given in (module.reduction_axes, module.feature_axes)
    )
    if len(reduced) > 1 or reduced != features or module.axis_name is not None:
        save = "input" if save == "output" else save
    return dict(axis=reduced, feature_axis=features, save=save, save_rng=rng)


layer_norm = _on_op(ops.layer_norm, "LayerNorm", ("scale", "bias"), _of_layer_norm)
rms_norm = _on_op(ops.rms_norm, "RMSNorm", ("scale",), _over_features)
group_norm = _on_op(ops.group_norm, "GroupNorm", ("scale", "bias"), _of_group_norm)


def ms_norm(module, op, x, mask, *parameters, save, rng=None):
    """`op`, an MS norm, with the fields of a Flax norm over the last axis."""
    reduced = (axes(x.ndim, module.reduction_axes), axes(x.ndim, module.feature_axes))
    if reduced != ((x.ndim - 1,),) * 2 or module.axis_name is not None:
        raise ValueError(
            f"{type(module).__name__}: reduction_axes={module.reduction_axes}, "
            f"feature_axes={module.feature_axes}, axis_name={module.axis_name}: only "
            "the last axis, and no named one, can be folded into a dense layer"
        )
    options = _options(module, mask, module.dtype)
    options = {k: options[k] for k in ("epsilon", "mask", "dtype")}
    return op(x, *parameters, save=save, save_rng=rng, **options)


def batch_norm(module, x, scale, bias, mask, dtype, axis_name):
    """In training: the output, the batch's mean and variance."""
    options = _options(module, mask, dtype) | dict(axis_name=axis_name)
    return batch_op(module)(
        x,
        scale,
        bias,
        axis=axes(x.ndim, module.axis),
        use_fast_variance=module.use_fast_variance,
        **options,
    )


def batch_op(module) -> Callable:
    """The op of a batch norm."""
    if not isinstance(module, Activates):
        return ops.batch_norm
    options = {name: getattr(module, name) for name in Activates.__annotations__}
    return functools.partial(ops.inplace_abn, **options)


def _options(module, mask, dtype) -> dict[str, Any]:
    return dict(
        epsilon=module.epsilon,
        mask=None if mask is None else jnp.asarray(mask, bool),
        dtype=dtype,
        axis_name=module.axis_name,
        axis_index_groups=module.axis_index_groups,
    )
