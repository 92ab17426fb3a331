"""Lazy subspaces: where a projector hardly turns, it is made anew half as often.

Q-GaLore (arXiv 2407.08296, section 3.3): the cosine between the first vectors of one
projector and the next is kept for the last five refreshes. Once their mean is at least
0.4, the layer's gap doubles, at each refresh for which that holds.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jaxmem.optim.low_rank.sides import Vectors

QUEUE = 5
THRESHOLD = 0.4
_LONGEST = 2**29  # steps; twice it, added to a count, must not overflow int32


class LazyState(NamedTuple):
    """A leaf's refreshes, matrix by matrix.

    Attributes:
      gap: steps between two refreshes.
      cosines: of the last five pairs of projectors; -inf where there were fewer.
    """

    gap: Int32[Array, "*batch"]
    cosines: Float32[Array, "*batch 5"]


def init(batch: tuple[int, ...], gap: int) -> LazyState:
    """Before the first refresh."""
    never = jnp.full((*batch, QUEUE), -jnp.inf, jnp.float32)
    return LazyState(jnp.full(batch, gap, jnp.int32), never)


def advanced(
    state: LazyState | None, new: dict[str, Float32[Array, "..."]], old: Vectors
) -> LazyState:
    """The state after a refresh, of projectors on one side.

    The first refresh has no projector before it, and leaves the state as it is.
    """
    assert state is not None
    ((side, now),) = new.items()
    first, before = now[..., 0, :], getattr(old, side)[..., 0, :]
    length = jnp.sqrt(jnp.sum(before * before, axis=-1))  # 1, but for rounding to codes
    cosine = jnp.sum(first * before, axis=-1) / jnp.maximum(length, 1e-12)
    queue = jnp.concatenate([state.cosines[..., 1:], cosine[..., None]], axis=-1)
    some = length > 0
    queue = jnp.where(some[..., None], queue, state.cosines)
    turned = jnp.sum(queue, axis=-1) < QUEUE * THRESHOLD
    doubled = jnp.where(state.gap <= _LONGEST, 2 * state.gap, state.gap)
    return LazyState(jnp.where(turned | ~some, state.gap, doubled), queue)
