"""A loop that is watched: what is alive, what the steps leave, a file of figures."""

import jax
import jax.numpy as jnp
import optax

import jaxmem

WIDTH, LAYERS, BATCH = 256, 4, 64
tx = optax.adam(1e-3)


def loss_fn(params, x):
    y = x
    for layer in params["layers"]:
        y = y + jax.nn.gelu(y @ layer["up"]) @ layer["down"]
    return jnp.mean((y - x) ** 2, axis=1).mean(), y


@jax.jit  # without donate_argnums: old and new state are alive during a step
def train_step(state, x):
    params, opt_state = state
    (loss, y), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, x)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss, y


@jax.jit
def make_state(key):
    make = lambda key, shape: jax.random.normal(key, shape) / 32
    up, down = (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)
    keys = jax.random.split(key, LAYERS)
    params = {"layers": [{"up": make(k, up), "down": make(k, down)} for k in keys]}
    return params, tx.init(params)


state, x = make_state(jax.random.key(0)), jnp.ones((BATCH, WIDTH))
report = jaxmem.estimate(train_step, state, x)
outputs = []


def live_arrays():
    return jaxmem.live_arrays(params=state[0], opt_state=state[1], batch=x)


with (
    jaxmem.monitor(report, log_to="memory.jsonl", every=5, live=True) as monitor,
    jaxmem.explained(lambda: {"state": state}),
):
    for i in range(11):
        state, loss, y = train_step(state, x)
        outputs.append(y)  # which keeps an array of each step alive
        monitor(i)
        if i == 0:
            before = live_arrays()

print(live_arrays(), end="\n\n")
print(live_arrays() - before, end="\n\n")
print(monitor.row())
