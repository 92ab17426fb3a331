"""cuDNN's attention, as JAX lowers it."""

from typing import Any

import jax


def cudnn_attention(form: Any, scale: float, arrays: dict) -> tuple:
    """(output [b, t, n, h], logarithm of the sums of exponentials [b, n, t]).

    `form` is one of `ops/attention/cudnn_rules.py`; `arrays` are q, k, v, and lengths
    of keys or None. JAX's own function asks the process for its GPU
    and its cuDNN: they may be absent when a program is compiled.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    operands, how = _fused_call(fused, form, scale, arrays)
    out = fused._dot_product_attention_fwd_p.bind(*operands, is_training=True, **how)
    return tuple(out)


def cudnn_attention_grads(form: Any, scale: float, arrays: dict) -> dict[str, Any]:
    """Gradients of q, k and v; `arrays` has besides the output o, its cotangent g, and
    `total`, the second result of `cudnn_attention`.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    operands, how = _fused_call(fused, form, scale, arrays)
    results = arrays["total"], arrays["o"], arrays["g"]
    grads = fused._dot_product_attention_bwd_p.bind(*operands, *results, **how)
    return dict(zip("qkv", grads, strict=True))


def _fused_call(fused: Any, form: Any, scale: float, arrays: dict) -> tuple:
    """The ten operands that both passes have, and their parameters."""
    import jax.numpy as jnp

    q, k, v = (arrays[name] for name in "qkv")
    none = jnp.zeros(0, q.dtype)
    lengths = [none, none]
    kind = fused.MaskType.CAUSAL if form.causal else fused.MaskType.NO_MASK
    if form.padded:
        kind = fused.MaskType.PADDING
        every = jnp.full(q.shape[0], q.shape[1], jnp.int32)
        lengths = [every, arrays["kv_len"]]
    how: dict[str, Any] = {
        "scale": scale,
        "seed": 42,  # of dropout, which there is none of
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # no bias, and no gradient of one
        "mask_type": kind,
        "layout": fused.AttentionLayout.BTNH.value,
        "sliding_window_length": form.window,
    }
    if jax.__version_info__ >= (0, 12):
        how |= {"score_mod_name": None, "score_mod_jaxpr": None}
    return (q, k, v, none, *lengths, *[none] * 4), how
