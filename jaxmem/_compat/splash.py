"""JAX's splash attention for TPUs."""

from typing import Any


def splash_attention_grads(kernel: Any, q, k, v, o, total, g) -> tuple:
    """Gradients of q, k and v, [heads, length, size], by a `SplashAttentionKernel`.

    JAX's own backward pass begins with the forward one, of which the results are here.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as splash,
    )

    how = kernel.kwargs
    names = "save_residuals", "mask_value", "is_mqa", "block_sizes"
    more = "residual_checkpoint_name", "mask_function", "attn_logits_soft_cap"
    given = [how[name] for name in (*names, *more, "interpret")]
    infos = kernel.dq_mask_info, kernel.dkv_mask_info
    saved = q, k, v, None, None, o, total, *infos
    run: Any = splash._splash_attention_bwd
    return run(*given, saved, g)[3:6]
