"""Arrays between the device's memory and the host's."""

import jax
import jax.numpy as jnp


def to_host(x):
    """In the host's memory; scalars, such as step counts, stay on the device."""
    return jax.device_put(x, jax.memory.Space.Host) if jnp.ndim(x) else x


def to_device(x):
    """In the device's memory."""
    return jax.device_put(x, jax.memory.Space.Device) if jnp.ndim(x) else x
