"""Modules as users write them, for the command line to name."""

PLAIN = """
import jax, jax.numpy as jnp

x = jax.ShapeDtypeStruct((64, 64), jnp.float32)

def step(w, x):
    return w - jnp.tanh(x @ w)

def args():
    return x, x

def wrong(w, x):
    return w - 1.001 * jnp.tanh(x @ w)

def sized(batch):
    return x, jax.ShapeDtypeStruct((batch, 64), jnp.float32)

def sized_step(batch):
    return step, sized(batch), {"donate_argnums": (0,)}

def listed():
    return [x, x]

def broken():
    raise RuntimeError("no weights\\nto be found")

def loss(w, x):
    return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)

def plain():
    return step, (x, x)

def with_options():
    return step, (x, x), {"donate_argnums": (0,), "target": "h100"}

def needs_arguments(n):
    return step, (x, x)

def returns_none():
    return None

def args_as_list():
    return step, [x, x]

def gradient():
    return jax.grad(loss), (x, x)

def not_traceable(x, y):
    return x if x.sum() > 0 else -x

def without_floats():
    return loss, (3, 4)

class Trainer:
    step = staticmethod(step)

not_a_function = 3
"""

ADAM = """
import optax
tx = optax.adam(1e-3)

def loss_and_tx():
    return loss, (x, x), {"tx": optax.sgd(1e-3)}

def params_and_tx():
    return {"w": x}, tx

def params():
    return ({"w": x},)

def misnamed(w, x):
    policy = jax.checkpoint_policies.save_only_these_names("no such name")
    return jax.grad(jax.checkpoint(loss, policy=policy))(w, x)
"""

LINEN = """
import jax, jax.numpy as jnp, optax
from flax import linen as nn
from flax.training.train_state import TrainState

model = nn.Dense(8)

def init():
    x = jnp.zeros((4, 8))
    params = model.init(jax.random.key(0), x)["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))

@jax.jit
def step(state, x):
    loss = lambda p: jnp.mean(state.apply_fn({"params": p}, x) ** 2)
    return state.apply_gradients(grads=jax.grad(loss)(state.params))

def args():
    return jax.eval_shape(init), jax.ShapeDtypeStruct((4, 8), jnp.float32)
"""

NNX = """
import jax, jax.numpy as jnp, optax
from flax import nnx

@nnx.jit
def step(model, optimizer, x):
    grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
    optimizer.update(model, grads)

def args():
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    return model, optimizer, jax.ShapeDtypeStruct((4, 8), jnp.float32)
"""

EQUINOX = """
import equinox as eqx
import jax, jax.numpy as jnp

@eqx.filter_jit
def step(model, x):
    grads = eqx.filter_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))(model)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -1e-3 * g, grads))

def args():
    x = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    return eqx.nn.Linear(8, 8, key=jax.random.key(0)), x
"""
