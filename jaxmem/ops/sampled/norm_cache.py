"""Norms of the gradients of an output, kept from one step to a later one.

They exist in the backward pass alone. A loop gets them from there as the gradient of
the array that they will replace, as Flax's float8 layers get their scales.
Source: Liu et al., WTA-CRS (NeurIPS 2023), arXiv 2305.15265, section 3.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem._checks import check_array, shown, wrong_value
from jaxmem.ops.common.blocks import vary_alike
from jaxmem.ops.common.lean import widen
from jaxmem.ops.sampled.rows import row_sizes

# Of the probability this part does not follow the cache, whose norms are of another
# step: else a row of small norm then and large norm now would get an unlimited weight.
# Source: Hesterberg, "Weighted Average Importance Sampling and Defensive Mixture
# Distributions", Technometrics 37 (1995).
_EQUAL = 0.1


def row_factors(x, cache, ids):
    """What the norms of the rows of x are multiplied by, [rows], from their gradients'.

    Of a row's probability `_EQUAL` is that without a cache.
    """
    norms = _of_samples(jax.lax.stop_gradient(cache), ids)
    norms = norms.astype(jnp.float32)
    norms = jnp.where(jnp.isfinite(norms) & (norms > 0), norms, 0.0)
    norms = _ratio(norms, norms.max(initial=0.0))  # their sum is finite
    # A sample of zeros alone has not been seen yet; in others a zero is padding, say.
    seen = norms.any(tuple(range(1, norms.ndim)), keepdims=True)
    seen = jnp.broadcast_to(seen, norms.shape)
    mean = norms.sum() / jnp.maximum(seen.sum(dtype=jnp.float32), 1.0)
    norms = jnp.where(seen, norms, jnp.where(mean > 0, mean, 1.0)).reshape(-1)
    size = row_sizes(jax.lax.stop_gradient(x)).reshape(-1)
    share = _ratio(jnp.vdot(size, norms), size.sum())
    return _EQUAL + (1 - _EQUAL) * _ratio(norms, share)


def _ratio(a, b):
    """a / b, and zeros where b is zero."""
    return jnp.where(b > 0, a / jnp.where(b > 0, b, 1.0), 0.0)


def noting(y, cache, ids):
    """y; the gradient of `cache` is the cache of after this step.

    Saves:
      The numbers of the samples.
    """
    return _noting(*vary_alike(y, cache, ids))


@jax.custom_vjp
def _noting(y, cache, ids):
    return y


def _forward(y, cache, ids):
    # all that is written over is not kept, but for its dtype
    return y, (jnp.zeros(0, cache.dtype) if ids is None else cache, ids)


def _backward(kept, dy):
    cache, ids = kept
    norms = jnp.sqrt(jnp.sum(jnp.square(widen(dy)), -1)).astype(cache.dtype)
    if ids is None:
        return dy, norms, None
    place = cache.at[ids]
    new = place.set(norms, mode="drop", wrap_negative_indices=False)
    return dy, new, np.zeros(ids.shape, jax.dtypes.float0)


_noting.defvjp(_forward, _backward)


def _of_samples(cache, ids):
    if ids is None:
        return cache
    place = cache.at[ids]
    return place.get(mode="fill", fill_value=0, wrap_negative_indices=False)


def check_norm_cache(op: str, x, cache, ids) -> None:
    """Errors for a cache, or numbers of samples, that do not fit x."""
    if cache is None:
        if ids is not None:
            raise wrong_value(f"{op}: sample_ids", ids, "None without a norm_cache")
        return
    check_array(f"{op}: norm_cache", cache, "floating")
    if x.ndim < 2:
        raise wrong_value(f"{op}: x", x, "of two axes or more with a norm_cache")
    samples, *rest = x.shape[:-1]
    if ids is not None:
        check_array(f"{op}: sample_ids", ids, "integer")
        if ids.shape != (samples,):
            raise wrong_value(f"{op}: sample_ids", ids, f"of shape ({samples},)")
        samples = cache.shape[0] if cache.ndim else samples
    if cache.shape != (samples, *rest):
        allowed = f"of shape {(samples, *rest)}, for x={shown(x)}"
        more = "; sample_ids allow any first axis" if ids is None else ""
        raise wrong_value(f"{op}: norm_cache", cache, allowed + more)
