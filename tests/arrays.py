"""Arrays for tests, made without a compile."""

from typing import Any

import jax
import numpy as np


def array(values: Any, dtype: Any = None) -> jax.Array:
    """Numbers as an array on the device.

    `jnp.asarray` compiles a small program for each shape and dtype; the suite has
    thousands of them.
    """
    return jax.device_put(np.asarray(values, dtype))


def ones(shape: int | tuple[int, ...] = (), dtype: Any = np.float32) -> jax.Array:
    """As `jnp.ones`."""
    return array(np.ones(shape, dtype))
