import jax
import optax
from flax import nnx

import jaxmem

rngs = nnx.Rngs(0)
layers = nnx.Linear(512, 2048, rngs=rngs), nnx.gelu, nnx.Linear(2048, 512, rngs=rngs)
model = jaxmem.substitute(nnx.Sequential(*layers))  # saves less for the backward pass
optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda m: optax.l2_loss(m(x), x).mean())(model)
    optimizer.update(model, grads)
    return loss


x = jax.random.normal(jax.random.key(0), (64, 512))
print(jaxmem.estimate(step, model, optimizer, x, target="h100", donate_argnums=(0, 1)))
step = jaxmem.schedule(step, donate_argnums=(0, 1))  # instead of nnx.jit
print("loss:", step(model, optimizer, x))
