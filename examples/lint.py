"""A train step with three habits that cost memory, and what `jaxmem.lint` says."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxmem

LAYERS, WIDTH, TOKENS = 12, 1024, 4096
HALF = {"dtype": jnp.bfloat16}
tx = optax.adamw(1e-3)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y = nn.Dense(4 * WIDTH, **HALF)(nn.LayerNorm(**HALF)(x))
        y = nn.Dropout(0.1, deterministic=False)(nn.gelu(y))
        return x + nn.Dense(WIDTH, **HALF)(y), None


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        split = {"params": True, "dropout": True}
        layers = nn.scan(Layer, {"params": 0}, split_rngs=split, length=LAYERS)
        return layers()(x, None)[0]


def loss_fn(params, x, key):
    return jnp.mean(Net().apply({"params": params}, x, rngs={"dropout": key}) ** 2)


def step(state, x, key):
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params, x, key)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def make_state(key):
    params = Net().init({"params": key, "dropout": key}, jnp.ones((1, WIDTH)))["params"]
    return params, tx.init(params)


key = jax.random.key(0)
batch = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16)
report = jaxmem.lint(step, jax.eval_shape(make_state, key), batch, key)
print(report)
