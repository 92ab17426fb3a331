"""How far gradients of attention may be off since its logits are computed twice.

The backward pass recomputes the logits l = w + b, w the scaled product of queries
and keys, and takes p = exp(l' - top - log sum) with the row's maximum and sum of the
forward pass. The compiler may contract the scaling and the addition into one rounding
(a fused multiply-add) in one of both programs and not in the other. Then the two
differ by the rounding of the product, eps / 2 |w|, and by a rounding of each of the
sums, eps / 2 |l|:

    |l' - l| <= eps (|w| / 2 + |l|),    |p' - p| <= p |l' - l|

The plain formula has one p, in which an error common to a row cancels; where p is
near 1, as it is for a large logit, that is all of the error. What p' - p makes of the
gradients is linear, and summed up here by absolute values.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np


def attention_errors(
    masked: Callable, args: Sequence[np.ndarray], g: np.ndarray, eps: float
) -> list[float]:
    """The largest error in the gradient of q, k, v and of what is added to the logits.

    Args:
      masked: (w, *others) -> logits.
      args: q, k, v [b, t, n, h] in float64, and the others.
      g: the output's cotangent, as q.
      eps: of the dtype in which the logits are computed.
    """
    q, k, v, *others = args
    scale = q.shape[-1] ** -0.5
    w = np.einsum("btnh,bsnh->bnts", q, k) * scale
    with jax.enable_x64(True):
        logits = masked(jnp.asarray(w), *map(jnp.asarray, others))
        p, logits = map(np.asarray, (jax.nn.softmax(logits), logits))
    far = np.where(p > 0, eps * (np.abs(w) / 2 + np.abs(logits)), 0.0)
    dp = np.einsum("btnh,bsnh->bnts", g, v)
    ds = p * far * np.abs(dp - (p * dp).sum(-1, keepdims=True))
    errors = [
        np.einsum("bnts,bsnh->btnh", ds, np.abs(k)) * scale,
        np.einsum("bnts,btnh->bsnh", ds, np.abs(q)) * scale,
        np.einsum("bnts,btnh->bsnh", p * far, np.abs(g)),
        *(_summed(ds, x.shape) for x in others if x.dtype.kind == "f"),
    ]
    return [float(e.max()) for e in errors]


def _summed(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Over the axes along which an array of this shape is repeated."""
    axes = tuple(i for i, n in enumerate(shape) if n == 1)
    return x.sum(axis=axes, keepdims=True)
