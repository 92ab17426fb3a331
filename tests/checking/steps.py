"""Steps with their references, in each framework, and steps that are wrong."""

import jax
import jax.numpy as jnp
import optax

LAYERS, WIDTH, ROWS = 3, 16, 24
TX = optax.adam(1e-2)


def params(dtype=jnp.float32, seed=0):
    a, b = jax.random.split(jax.random.key(seed))
    shape = LAYERS, WIDTH, WIDTH
    up, down = (0.3 * jax.random.normal(k, shape, jnp.float32) for k in (a, b))
    return {"up": up.astype(dtype), "down": down.astype(dtype)}


def batch(dtype=jnp.float32, seed=0):
    x = jax.random.normal(jax.random.key(100 + seed), (ROWS, WIDTH), jnp.float32)
    return x.astype(dtype)


def arguments(dtype=jnp.float32, seed=0):
    p = params(dtype, seed)
    return (p, TX.init(p)), batch(dtype, seed)


def layer(h, w, factor=None):
    with jax.named_scope("block"):
        with jax.named_scope("up"):
            y = jnp.tanh(h @ w["up"])
        with jax.named_scope("down"):
            y = y @ w["down"]
        if factor is not None:
            y = (y.astype(jnp.float32) * factor).astype(y.dtype)
        return h + y


def loss(p, x, factor=None):
    body = lambda h, w: (layer(h, w, factor), None)
    h, _ = jax.lax.scan(body, x, p)
    with jax.named_scope("head"):
        return jnp.mean(h.astype(jnp.float32) ** 2)


def update(state, grads):
    p, opt = state
    updates, opt = TX.update(grads, opt, p)
    return optax.apply_updates(p, updates), opt


def step(state, x):
    value, grads = jax.value_and_grad(loss)(state[0], x)
    return update(state, grads), value


# -- right: other orders of sums


def in_micro_batches(state, x):
    parts = x.reshape(4, -1, WIDTH)

    def add(total, part):
        found = jax.value_and_grad(loss)(state[0], part)
        return jax.tree.map(jnp.add, total, found), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, state[0])
    (value, grads), _ = jax.lax.scan(add, zeros, parts)
    return update(state, jax.tree.map(lambda g: g / 4, grads)), value / 4


def unrolled(state, x):
    def loss_of(p):
        h = x
        for i in range(LAYERS):
            h = layer(h, {name: w[i] for name, w in p.items()})
        return jnp.mean(h.astype(jnp.float32) ** 2)

    value, grads = jax.value_and_grad(jax.checkpoint(loss_of))(state[0])
    return update(state, grads), value


def rows_reversed(state, x):
    return step(state, x[::-1])


RIGHT = (in_micro_batches, unrolled, rows_reversed)

# -- wrong


def scaled_residual(state, x, factor=1.001):
    value, grads = jax.value_and_grad(loss)(state[0], x, factor)
    return update(state, grads), value


def largely_scaled_residual(state, x):
    return scaled_residual(state, x, 1.03)


def dropped_micro_batch(state, x):
    return step(state, x[: 3 * ROWS // 4])


def sign_of_a_gradient(state, x):
    value, grads = jax.value_and_grad(loss)(state[0], x)
    return update(state, grads | {"down": -grads["down"]}), value


def swapped_slice(state, x):
    value, grads = jax.value_and_grad(loss)(state[0], x)
    up = grads["up"]
    return update(state, grads | {"up": up.at[0].set(up[1]).at[1].set(up[0])}), value


def scaled_gradient(state, x):
    """Which Adam's update does not show, but its moments do."""
    value, grads = jax.value_and_grad(loss)(state[0], x)
    return update(state, jax.tree.map(lambda g: 1.001 * g, grads)), value


WRONG = (
    *(scaled_residual, largely_scaled_residual, dropped_micro_batch),
    *(sign_of_a_gradient, swapped_slice, scaled_gradient),
)
