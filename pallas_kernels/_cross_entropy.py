"""What cross entropy's kernels for TPU and GPU share, on blocks of logits."""

import jax.numpy as jnp
import numpy as np
from jax import lax

# Not -inf, so that a column may be masked by a bias of -inf.
LOWEST = np.float32(np.finfo(np.float32).min)
TINY = np.float32(np.finfo(np.float32).tiny)


def dot(a, b, axes: tuple[int, int], precision=None):
    """The product of two matrices over an axis of each, in float32."""
    dims = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(
        a, b, dims, precision=precision, preferred_element_type=jnp.float32
    )


def only(inside, t, otherwise):
    """`t` where `inside`, which is None where all is."""
    return t if inside is None else jnp.where(inside, t, np.float32(otherwise))


def logits_gradient(softcap: float | None, logits, here, row):
    """The cotangent of a block of logits.

    Args:
      here: where a logit is its token's label.
      row: function of a name to that number of each token, spread over the block, or
        to None: of "top", "log_total", and the cotangents "g_log_total", "g_hit" and
        "g_total".
    """
    p = jnp.exp(logits - row("top") - row("log_total"))
    d = p * row("g_log_total") + jnp.where(here, row("g_hit"), np.float32(0))
    total = row("g_total")
    d = d if total is None else d + total
    if softcap is None:
        return d
    return d * (1 - jnp.square(logits / np.float32(softcap)))
