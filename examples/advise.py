"""A training step that does not fit, and what `jaxmem.advise` says to write."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxmem

LAYERS, WIDTH, TOKENS = 12, 1024, 1024
HALF = {"dtype": jnp.bfloat16}


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y = nn.MultiHeadDotProductAttention(16, **HALF)(nn.LayerNorm(**HALF)(x))
        x = x + nn.Dropout(0.1, deterministic=False)(y)
        y = nn.gelu(nn.Dense(4 * WIDTH, **HALF)(nn.LayerNorm(**HALF)(x)))
        return x + nn.Dense(WIDTH, **HALF)(y), None


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        split = {"params": True, "dropout": True}
        layers = nn.scan(Layer, {"params": 0}, split_rngs=split, length=LAYERS)
        return layers()(x, None)[0]


def loss_fn(params, x, key):
    return jnp.mean(Net().apply({"params": params}, x, rngs={"dropout": key}) ** 2)


def init(key, x):
    return Net().init({"params": key, "dropout": key}, x)["params"]


key = jax.random.key(0)
batch = jax.ShapeDtypeStruct((8, TOKENS, WIDTH), jnp.bfloat16)
params = jax.eval_shape(init, key, batch)
advice = jaxmem.advise(
    loss_fn, params, batch, key, tx=optax.adam(1e-3), target="h100", budget="4.5GiB"
)
print(advice)
