"""Options of cross entropy's kernels, and the cotangents of a block of logits."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

# Not -inf, so that a column may be masked by a bias of -inf.
LOWEST = np.float32(np.finfo(np.float32).min)
TINY = np.float32(np.finfo(np.float32).tiny)


class LossOptions(NamedTuple):
    """What a call computes, and in which blocks.

    Attributes:
      vocab_axis: the kernel's axis of the vocabulary, 0 or 1.
      softcap: logits become `softcap * tanh(logits / softcap)`.
      precision: of the products where x is float32.
      block_tokens, block_vocabulary: multiples of 128.
    """

    vocab_axis: int = 1
    softcap: float | None = None
    precision: Any = None
    block_tokens: int | None = None
    block_vocabulary: int | None = None


def only(inside, t, otherwise):
    """`t` where `inside`, else `otherwise`; None stands for everywhere."""
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
