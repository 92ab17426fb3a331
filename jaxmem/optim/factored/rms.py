"""Root mean squares of updates and of parameters, a layer or a leaf."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmem.optim.factored.leaves import layer_axes, map_leaves


def rms(x, layers: int):
    """The root mean square over all axes but the first `layers`, which stay."""
    axes = tuple(range(layers, x.ndim))
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True))


def clipped(x, threshold, layers: int):
    """`x` scaled down to a root mean square of at most `threshold`."""
    return x / jnp.maximum(1.0, rms(x, layers) / threshold)


def clip_by_layer_rms(who: str, threshold, stacked: Any) -> Any:
    """Clips the root mean square of each layer's update; `stacked=False`: a leaf's."""

    def update(updates, state, params=None):
        del params
        axes = iter(layer_axes(who, stacked, updates))
        clip = lambda x: clipped(x, threshold, next(axes))
        return jax.tree.map(clip, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def scale_by_layer_rms(who: str, least, stacked: Any) -> Any:
    """Multiplies each layer's update by its parameters' root mean square.

    That is at least `least`. `stacked=False`: a leaf's. ValueError without parameters.
    """

    def update(updates, state, params=None):
        if params is None:
            raise ValueError(
                f"params=None: {who} scales updates by the root mean square of the "
                "parameters; call update(updates, state, params)"
            )
        axes = iter(layer_axes(who, stacked, updates))
        scale = lambda path, u, p: (u * jnp.maximum(rms(p, next(axes)), least),)
        return map_leaves(who, 1, scale, updates, params)[0], state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
