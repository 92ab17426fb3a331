"""Steps that differ in what they keep, as a user's module has them."""

SOURCE = """
import jax, jax.numpy as jnp

S = jax.ShapeDtypeStruct

def made(keep, layers=3, width=16, rows=128):
    def layer(x, w):
        with jax.named_scope("mlp"):
            return x + jnp.tanh(jnp.tanh(x @ w[0]) @ w[1])

    run = layer if keep else jax.checkpoint(layer)

    def loss(ws, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (run(x, w), None), x, ws)[0] ** 2)

    def step(ws, x):
        return ws - jnp.float32(0.1) * jax.grad(loss)(ws, x)

    args = S((layers, 2, width, width), "float32"), S((rows, width), "float32")
    return step, args, {"donate_argnums": 0}

def remat():
    return made(False)

def plain():
    return made(True)
"""
FOUND: dict = {}
exec(SOURCE, FOUND)
remat, plain, made = FOUND["remat"], FOUND["plain"], FOUND["made"]
