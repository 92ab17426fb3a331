import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxmem

rngs, width = nnx.Rngs(0), 512
up, down = nnx.Linear(width, 2048, rngs=rngs), nnx.Linear(2048, width, rngs=rngs)
model = nnx.Sequential(nnx.LayerNorm(width, rngs=rngs), up, nnx.gelu, down)
model = jaxmem.substitute(model)  # the same parameters; keeps less in training
optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - x) ** 2))(model)
    optimizer.update(model, grads)
    return loss


x = jax.random.normal(jax.random.key(0), (64, width))
print(jaxmem.estimate(step, model, optimizer, x, target="h100", donate_argnums=(0, 1)))
step = jaxmem.schedule(step, donate_argnums=(0, 1))  # in the place of nnx.jit
print("loss:", step(model, optimizer, x))
