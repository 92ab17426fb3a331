"""The norm-growth limiter of Fira and APOLLO: a step is hardly longer than the last."""

import jax.numpy as jnp
from jaxtyping import Array, Float32

_LEAST = 1e-8  # added to norms that divide, as in both references


def limit(
    update: Float32[Array, "*batch m n"],
    before: Float32[Array, "*batch"],
    growth: float,
) -> tuple[Float32[Array, "*batch 1 1"], Float32[Array, "*batch"]]:
    """By what to multiply each matrix, so that its norm grows by at most `growth`.

    After a norm of zero, as at the first step, there is no limit: the references then
    allow a norm of 1e-8, and need thousands of steps to come back from it.

    Args:
      update: what is limited.
      before: norms of the step before, as limited.
      growth: at least 1.

    Returns:
      (factors, norms as limited).
    """
    norm = jnp.sqrt(jnp.sum(update * update, axis=(-2, -1)))
    over = jnp.maximum(norm / (before + _LEAST), growth) / growth
    factor = jnp.where(before > 0, 1 / over, jnp.ones_like(over))
    return factor[..., None, None], norm * factor


def ratio_of_norms(
    above: Float32[Array, "*batch m n"],
    below: Float32[Array, "*batch m n"],
    axes: tuple[int, ...],
) -> Float32[Array, "..."]:
    """|above| / (|below| + 1e-8) along these axes, which stay with size one."""
    norm = lambda x: jnp.sqrt(jnp.sum(x * x, axis=axes, keepdims=True))
    return norm(above) / (norm(below) + _LEAST)
