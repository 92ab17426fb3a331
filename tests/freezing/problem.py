"""A small linen-like tree of parameters, and a loss that reads all of it."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.arrays import array

WIDTH, LAYERS = 6, 3


def params(seed=0):
    """A scanned stack, a head, a table that is quantized, and a norm."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: array(rng.standard_normal(shape) / 2, jnp.float32)
    return {
        "layers": {
            "up": {
                "kernel": draw(LAYERS, WIDTH, WIDTH),
                "bias": draw(LAYERS, WIDTH),
                "lora_a": draw(LAYERS, WIDTH, 2),
                "lora_b": draw(LAYERS, 2, WIDTH),
            },
            "norm": {"scale": jnp.ones((LAYERS, WIDTH))},
        },
        "head": {"kernel": draw(WIDTH, 3), "bias": draw(3)},
        "codes": jnp.arange(WIDTH, dtype=jnp.int8),
    }


PATHS = [
    "codes",
    "head/bias",
    "head/kernel",
    "layers/norm/scale",
    "layers/up/bias",
    "layers/up/kernel",
    "layers/up/lora_a",
    "layers/up/lora_b",
]


def loss(params, batch, rng=None):
    def body(x, layer):
        up = layer["up"]
        y = x @ up["kernel"] + (x @ up["lora_a"]) @ up["lora_b"]
        y = jnp.tanh(y + jnp.broadcast_to(up["bias"], y.shape))
        return y * jnp.broadcast_to(layer["norm"]["scale"], y.shape), None

    x = batch + jnp.broadcast_to(params["codes"].astype(batch.dtype), batch.shape)
    x, _ = jax.lax.scan(body, x, params["layers"])
    y = x @ params["head"]["kernel"]
    return jnp.mean(jnp.square(y + jnp.broadcast_to(params["head"]["bias"], y.shape)))


def batch(size=8):
    rng = np.random.default_rng(9)
    return array(rng.standard_normal((size, WIDTH)), jnp.float32)
