"""Attention of other libraries in JAX, where they are installed, for `fast`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def others(name: str) -> dict[str, Callable]:
    """By library, functions of the arguments of a case of `kernel_cases`."""
    # cuDNN's dropout has aborted the process: jax 0.11.2, H200
    if not name.startswith("attention") or "dropout" in name:
        return {}
    return {"jax.experimental": experimental}


def experimental(q, k, v, key):
    """JAX's own Pallas kernels, causal."""
    if jax.default_backend() == "tpu":
        from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

        heads_first = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
        out = flash_attention(*heads_first, causal=True, sm_scale=q.shape[-1] ** -0.5)
        return jnp.swapaxes(out, 1, 2)
    from jax.experimental.pallas.ops.gpu.attention import mha

    return mha(q, k, v, segment_ids=None, sm_scale=q.shape[-1] ** -0.5, causal=True)
