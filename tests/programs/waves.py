"""Waves through a volume, slice by slice: its refraction is fitted to intensities.

A complex field is propagated in Fourier space between thin slices of the volume.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from tests.programs._common import arguments, of_size, training_step


class Size(NamedTuple):
    fields: int
    side: int
    slices: int


def propagator(side: int, distance=0.5, wavelength=0.1):
    """What a distance does to each spatial frequency."""
    f = jnp.fft.fftfreq(side)
    squared = f[:, None] ** 2 + f[None] ** 2
    return jnp.exp(-1j * jnp.pi * wavelength * distance * squared)


def loss(params, fields, intensities):
    step = propagator(fields.shape[-1])

    def through(field, layer):
        phase, absorbed = layer
        field = field * jnp.exp(1j * phase - jax.nn.softplus(absorbed))
        return jnp.fft.ifft2(jnp.fft.fft2(field) * step), None

    left, _ = jax.lax.scan(through, fields, (params["phase"], params["absorbed"]))
    smooth = jnp.mean(jnp.diff(params["phase"], axis=0) ** 2)
    return jnp.mean((jnp.abs(left) ** 2 - intensities) ** 2) + 1e-3 * smooth


def make(size: str):
    s = of_size(size, small=Size(2, 8, 4), big=Size(8, 256, 48))
    tx = optax.adam(1e-2)

    def init(key):
        k = jax.random.split(key, 3)
        volume = (s.slices, s.side, s.side)
        params = {
            "phase": 0.1 * jax.random.normal(k[0], volume),
            "absorbed": jnp.full(volume, -5.0),
        }
        angles = jax.random.uniform(k[1], (s.fields, s.side, s.side))
        intensities = jax.random.uniform(k[2], (s.fields, s.side, s.side))
        return (params, tx.init(params)), jnp.exp(1j * angles), intensities

    return training_step(loss, tx), arguments(size, init), (0,)
