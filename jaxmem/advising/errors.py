"""What approximate measures change in training, measured on random numbers."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

_MEAN = 0.1  # of the gradient of an element, over its deviation between micro-batches


def update_error(
    *, bits: int | None = None, n: int = 1, steps: int = 8, rows: int = 64
) -> float:
    """By how much AdamA moves parameters otherwise than Adam, relative (RMS).

    After some steps with normal gradients, whose scales lie over four decades from row
    to row. Adam has the mean of the micro-batches' gradients.

    Args:
      bits: of AdamA's moments; None for float32.
      n: micro-batches of a step.
      steps: how many.
      rows: of the parameters.
    """
    from jaxmem.optim import adama

    keys = jax.random.split(jax.random.key(0), steps + 2)
    scale = 10.0 ** jax.random.uniform(keys[0], (rows, 1), minval=-4.0, maxval=0.0)
    shape = rows, 256
    mean = _MEAN * jax.random.normal(keys[1], shape, jnp.float32)

    def moved(tx: optax.GradientTransformation, whole: bool) -> jax.Array:
        params: Any = jnp.zeros(shape, jnp.float32)
        state, update = tx.init(params), jax.jit(tx.update)
        for key in keys[2:]:
            noise = jax.random.normal(key, (n, *shape), jnp.float32)
            grads = scale[None] * (mean[None] + noise)
            for grad in [grads.mean(0)] if whole else grads:
                updates, state = update(grad, state, params)
                params = optax.apply_updates(params, updates)
        return params

    low = adama(1e-3, micro_batches=n, bits=bits)
    return relative(moved(low, False), moved(optax.adam(1e-3), True))


def gradient_error(options: Mapping[str, Any], width: int = 64) -> float:
    """By how much gradients differ where activations are kept in few bits (RMS).

    Of the parameters of a norm and two dense layers with GELU between, at normal
    inputs.

    Args:
      options: of `jaxmem.substitute`.
      width: of the layers.
    """
    from flax import nnx

    from jaxmem.nn import substitute

    rngs = nnx.Rngs(0)
    wide = nnx.Linear(width, 4 * width, rngs=rngs), nnx.gelu
    norm, last = nnx.LayerNorm(width, rngs=rngs), nnx.Linear(4 * width, 1, rngs=rngs)
    model = nnx.Sequential(norm, *wide, last)
    x = jax.random.normal(jax.random.key(0), (256, width), jnp.float32)

    def gradients(options: Mapping[str, Any]) -> jax.Array:
        graph, state = nnx.split(substitute(model, **options))
        loss = lambda state: jnp.mean(jnp.square(nnx.merge(graph, state)(x)))
        leaves = jax.tree.leaves(jax.jit(jax.grad(loss))(state))
        return jnp.concatenate([jnp.ravel(leaf) for leaf in leaves])

    return relative(gradients(options), gradients({}))


def relative(a: jax.Array, b: jax.Array) -> float:
    """The root of the mean square of the difference, over that of `b`."""
    return float(jnp.sqrt(jnp.mean((a - b) ** 2) / jnp.mean(b**2)))
