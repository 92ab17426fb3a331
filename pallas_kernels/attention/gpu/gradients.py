"""What each backward kernel recomputes of a tile of logits."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.gpu.logits import LogitsTile, product


def probabilities(tile: LogitsTile, products, seen):
    """The softmax, from the row statistics."""
    x = tile.logits(products, seen)
    top, log_total = (tile.per_query.get(x) for x in ("top", "log_total"))
    if log_total is not None and not tile.masked and not tile.has_bias:
        top, log_total = top + log_total, None
    p = x - tile.of_queries(top)
    return jnp.exp2(p if log_total is None else p - tile.of_queries(log_total))


def logit_gradient(tile: LogitsTile, p, dp, share, seen):
    """Not yet scaled; from the probabilities and the gradient of what came of them."""
    dp = dp if share is None else dp * share
    ds = p * (dp - tile.of_queries(tile.per_query["delta"]))
    return ds if seen is None else jnp.where(seen, ds, np.float32(0))


def gradient_of_logits(tile: LogitsTile, q, k, g, v):
    """Not yet scaled; of tiles in shared memory, with queries along its first axis."""
    seen = tile.seen()
    p = probabilities(tile, product(q, k), seen)
    dp = tile.dropped(product(g, v))
    return logit_gradient(tile, p, dp, tile.factor, seen)
