"""Which rows of x the kernel's gradient is made from, and with what weights.

Drawing row j with probability p_j and weighing it with `1 / (k p_j)` makes the sum over
k draws unbiased, whatever p is. Source: Liu et al., WTA-CRS (NeurIPS 2023), section 3;
Drineas et al., "Fast Monte Carlo Algorithms for Matrices I" (2006).
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.ops.common.lean import widen
from jaxmem.ops.randomness.bits import random_bits


def _bits(seed, count: int):
    return random_bits(seed, jnp.uint32(0), jnp.arange(count, dtype=jnp.uint32))


def _uniform(seed, count: int):
    """In [0, 1), 24 bits each."""
    return (_bits(seed, count) >> np.uint32(8)).astype(jnp.float32) * 2.0**-24


def row_sizes(rows):
    """Norms, float32."""
    return jnp.sqrt(jnp.sum(jnp.square(widen(rows)), -1)).astype(jnp.float32)


def _probabilities(rows, factor):
    size = row_sizes(rows)
    size = size if factor is None else size * factor.astype(jnp.float32)
    # The variance is least for p proportional to `|x_i| |dy_i|`; dy is unknown yet, but
    # for a factor of the caller's.
    return size / jnp.maximum(size.sum(), jnp.finfo(jnp.float32).tiny)


def _inverse(p, mass):
    """`mass / p`, and zero for rows that are zero."""
    return jnp.where(p > 0, mass / jnp.where(p > 0, p, 1.0), 0.0)


def _draw(seed, p, k: int, taken):
    """k slots: those from `taken` on are drawn from p, in strata."""
    slot = jnp.arange(k, dtype=jnp.float32)
    drawn = k - taken.astype(jnp.float32)
    # Slot s takes its point of the cumulative distribution from the s-th of as many
    # equal parts, which leaves the expectation and can only lower the variance.
    point = (slot - (k - drawn) + _uniform(seed, k)) / drawn
    cumulative = jnp.cumsum(p)
    mass = cumulative[-1]
    below_one = float(np.nextafter(np.float32(1), np.float32(0)))
    point = jnp.clip(point, 0.0, below_one) * mass
    places = jnp.searchsorted(cumulative, point, side="right")
    places = jnp.minimum(places, p.size - 1).astype(jnp.int32)
    return places, _inverse(p[places], mass / drawn)


def norm_weighted(seed, rows, k: int, factor):
    """k draws, by row norms: "crs" among the methods."""
    return _draw(seed, _probabilities(rows, factor), k, jnp.int32(0))


def winner_takes_all(seed, rows, k: int, factor):
    """The largest rows, and draws from the rest: "wta"."""
    p = _probabilities(rows, factor)
    top, best = jax.lax.top_k(p, k)
    slot = jnp.arange(k, dtype=jnp.int32)
    left = 1.0 - (jnp.cumsum(top) - top)  # by how many are taken: 0 .. k - 1
    # With this count the variance is never above that of draws alone.
    taken = jnp.argmin(left / (k - slot).astype(jnp.float32)).astype(jnp.int32)
    winner = slot < taken
    rest = p.at[best].multiply(jnp.where(winner, 0.0, 1.0), unique_indices=True)
    places, weights = _draw(seed, rest, k, taken)
    places = jnp.where(winner, best.astype(jnp.int32), places)
    return places, jnp.where(winner, 1.0, weights)


def uniform(seed, rows, k: int, factor):
    """k different rows, each as likely: "uniform"."""
    count = rows.shape[0]
    places = jax.lax.top_k(_bits(seed, count), k)[1].astype(jnp.int32)
    return places, jnp.full(k, count / k, jnp.float32)


CHOICES = {"wta": winner_takes_all, "crs": norm_weighted, "uniform": uniform}
