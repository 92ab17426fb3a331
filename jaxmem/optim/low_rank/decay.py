"""Weight decay of the parameters as the step has left them.

The AdamW that GaLore, APOLLO and Fira come with decays after the step: p <- p - lr u,
then p <- p - lr wd p. `optax.adamw` decays the parameters from before it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Int32, PyTree

from jaxmem.optim._adama_arguments import check_mask, check_rate


class DecayState(NamedTuple):
    """How far the schedules of `decay_new_weights` are: int32[], steps."""

    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]


def with_learning_rate(
    learning_rate: ArrayLike | optax.Schedule,
    weight_decay: ArrayLike | optax.Schedule,
    mask: Any,
) -> optax.GradientTransformation:
    """What follows a rule: the learning rate, then the decay of the new parameters."""
    rate = check_rate("learning_rate", learning_rate)
    decay = check_rate("weight_decay", weight_decay)
    check_mask(mask)
    steps = optax.scale_by_learning_rate(rate)
    if isinstance(decay, int | float) and decay == 0:
        return steps
    decays = _decay_new_weights(rate, decay)
    return optax.chain(steps, decays if mask is None else optax.masked(decays, mask))


def _decay_new_weights(rate, decay) -> optax.GradientTransformation:
    def init(params: PyTree) -> DecayState:
        del params
        return DecayState(jnp.zeros((), jnp.int32))

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None
    ) -> tuple[PyTree, DecayState]:
        if params is None:
            raise ValueError(
                "weight_decay needs params: update(updates, state, params)"
            )
        now = [x(state.count) if callable(x) else x for x in (rate, decay)]
        factor = jnp.asarray(now[0], jnp.float32) * jnp.asarray(now[1], jnp.float32)

        def decayed(u, p):
            wide = u.astype(jnp.float32)
            return (wide - factor * (p.astype(jnp.float32) + wide)).astype(u.dtype)

        updates = jax.tree.map(decayed, updates, params)
        count = jnp.asarray(optax.safe_increment(state.count))
        return updates, DecayState(count)

    return optax.GradientTransformation(init, update)
