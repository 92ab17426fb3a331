"""What the linen and nnx norms share: which options the lean ops serve, and axes."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from jaxmem import ops

SAVES = ("input", "output")


def check_save(save: str) -> None:
    """At the constructor, not only when the layer runs."""
    if save not in SAVES:
        raise ValueError(f"save={save!r}: must be one of {SAVES}")


def axes(ndim: int, given) -> tuple[int, ...]:
    """Sorted, non-negative axes."""
    given = given if isinstance(given, Iterable) else (given,)
    return tuple(sorted({axis % ndim for axis in given}))


def obstacle(module, x) -> str | None:
    """Why this call cannot run on a lean op, or None."""
    if not getattr(module, "force_float32_reductions", True):
        return "force_float32_reductions=False"
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return f"an input of dtype {x.dtype}"
    return None


def layer_norm(module, x, scale, bias, mask, dtype, save):
    """`ops.layer_norm` with the fields of a Flax LayerNorm."""
    return ops.layer_norm(
        x,
        scale,
        bias,
        use_fast_variance=module.use_fast_variance,
        **_options(module, mask, dtype),
        **_over_features(module, x, save),
    )


def rms_norm(module, x, scale, mask, dtype, save):
    """`ops.rms_norm` with the fields of a Flax RMSNorm."""
    options = _options(module, mask, dtype)
    return ops.rms_norm(x, scale, **options, **_over_features(module, x, save))


def group_norm(module, x, scale, bias, mask, dtype, num_groups):
    """`ops.group_norm` with the fields of a Flax GroupNorm."""
    return ops.group_norm(
        x,
        scale,
        bias,
        num_groups=num_groups,
        reduction_axes=module.reduction_axes,
        use_fast_variance=module.use_fast_variance,
        **_options(module, mask, dtype),
    )


def batch_norm(module, x, scale, bias, mask, dtype, axis_name):
    """`ops.batch_norm` in training: the output, the batch's mean and variance."""
    options = _options(module, mask, dtype) | dict(axis_name=axis_name)
    return ops.batch_norm(
        x,
        scale,
        bias,
        axis=axes(x.ndim, module.axis),
        use_fast_variance=module.use_fast_variance,
        **options,
    )


def _options(module, mask, dtype) -> dict[str, Any]:
    return dict(
        epsilon=module.epsilon,
        mask=None if mask is None else jnp.asarray(mask, bool),
        dtype=dtype,
        axis_name=module.axis_name,
        axis_index_groups=module.axis_index_groups,
    )


def _over_features(module, x, save) -> dict[str, Any]:
    """Axes, and the input kept where the op cannot do with the output."""
    reduced, features = (
        axes(x.ndim, given) for given in (module.reduction_axes, module.feature_axes)
    )
    if len(reduced) > 1 or reduced != features or module.axis_name is not None:
        save = "input" if save == "output" else save
    return dict(axis=reduced, feature_axis=features, save=save)
